"""Folders that `datasets` wrote with `save_to_disk`: a Dataset, or a DatasetDict with splits."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from easypipe.core.errors import MissingFileError, SourceError, require, require_known
from easypipe.core.storage import is_inside
from easypipe.core.values import JsonObject

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved_dataset(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a local folder with what `save_to_disk` writes."""
    folder = _folder(path)
    splits, *both = (os.path.isfile(folder / name) for name in (SPLITS, STATE, INFO))
    return splits or all(both)


def saved_splits(path: str | os.PathLike[str]) -> tuple[list[str], bool]:
    """Returns the splits of such a folder, and whether one must be chosen (a DatasetDict)."""
    folder = _folder(path)
    if (folder / SPLITS).is_file():
        return _splits(folder), True
    return [_own_split(folder)], False


def saved_dataset_files(path: str | os.PathLike[str], split: str | None = None) -> list[str]:
    """Returns the Arrow shards, in their order.

    Raises:
        ConfigError: The split does not exist.
        MissingFileError: A file is missing.
        SourceError: The folder is damaged.
    """
    folder = _folder(path)
    if (folder / SPLITS).is_file():
        splits = _splits(folder)
        chosen = split or (splits[0] if len(splits) == 1 else None)
        problem = f"{folder} has no split {split!r}" if split else f"{folder} holds several splits"
        require_known(chosen or "", splits, "split", problem, "Name one by split=.")
        folder = folder / str(chosen)
    elif split is not None:
        own = _own_split(folder)
        require(
            split == own,
            "split",
            f"{folder} holds the split {own!r} alone, not {split!r}",
            "Leave split out.",
        )
    state = _read(folder / STATE)
    if state.get("_indices_data_files"):
        raise SourceError(
            at=str(folder),
            problem="rows behind a list of indices",
            fix="Write it with dataset.flatten_indices().save_to_disk().",
        )
    listed = state.get("_data_files") or ()
    names = [
        entry.get("filename") if isinstance(entry, dict) else None
        for entry in (listed if isinstance(listed, list | tuple) else [listed])
    ]
    files = [str(folder / name) for name in _inside(names, folder / STATE)]
    if not files:
        raise SourceError(
            at=str(folder / STATE), problem="names no data file", fix="Save the dataset again."
        )
    missing = next((file for file in files if not os.path.isfile(file)), None)
    if missing is not None:
        raise MissingFileError(
            at=missing,
            problem=f"named by {STATE}, but not there",
            fix="Copy or save the dataset again.",
        )
    return files


def _folder(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.expanduser(str(path).removeprefix("file://")))


def _own_split(folder: Path) -> str:
    """Returns the split of a folder that is not a DatasetDict."""
    return str(_read(folder / STATE).get("_split") or "train")


def _splits(folder: Path) -> list[str]:
    names = _read(folder / SPLITS).get("splits")
    return _inside(names if isinstance(names, list) else [names], folder / SPLITS)


def _inside(names: Sequence[Any], at: Path) -> list[str]:
    """Returns the names; raises SourceError if one of them is not inside the folder."""
    for name in names:
        if not is_inside(name):
            raise SourceError(
                at=str(at),
                problem=f"{name!r} does not name a file or folder beside it",
                fix="Save the dataset again.",
            )
    return list(names)


def _read(path: Path) -> JsonObject:
    """Returns the JSON object in a file of the folder."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise MissingFileError(
            at=str(path), problem="no such file", fix="Copy or save the dataset again."
        ) from None
    except (ValueError, RecursionError) as error:
        raise SourceError(
            at=str(path), problem=f"not JSON: {error}", fix="Save the dataset again."
        ) from None
    if not isinstance(value, dict):
        raise SourceError(at=str(path), problem="not a JSON object", fix="Save the dataset again.")
    return value
