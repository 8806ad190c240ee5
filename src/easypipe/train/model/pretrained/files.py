"""The files of a published model: config.json and safetensors, in a folder or on the Hub."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from easypipe.core.errors import MissingFileError, SourceError, StateError
from easypipe.core.trust import hub_token

WEIGHTS, INDEX, CONFIG, GENERATION = (
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
)
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    "tokenizer.model",
)
Json = dict[str, Any]  # of config.json and the like: values are what others write
_SMALL = ["*.json", *(name for name in TOKENIZER_FILES if not name.endswith(".json"))]
# some repositories hold the same weights again as consolidated.safetensors
_LARGE = ["model*.safetensors"]


def model_folder(
    path_or_hub_name: str | Path, revision: str | None, *, weights: bool = True
) -> Path:
    """The folder itself, or the Hub's files in the cache of its client. What looks like a path is
    never looked up on the Hub.

    weights: False leaves out what is large. Raises MissingFileError for neither; SourceError for a
    gated repository, and for a revision given beside a folder.
    """
    name = str(path_or_hub_name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise SourceError(
                at=name,
                problem=f"is a folder, which has no revision {revision!r}",
                fix="Leave revision out.",
            )
        return folder
    if (
        isinstance(path_or_hub_name, Path)
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    ):
        raise MissingFileError(
            at=name,
            problem="no such folder",
            fix="Give a folder with config.json, or a Hub name such as owner/model.",
        )
    from huggingface_hub import snapshot_download  # slow to import, and only needed for names
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=[*_SMALL, *(_LARGE if weights else ())],
                token=hub_token(),
            )
        )
    except GatedRepoError as error:
        fix = f"Accept its licence at https://huggingface.co/{name} and set HF_TOKEN."
        raise SourceError(at=name, problem="the Hub repository is gated", fix=fix) from error
    except RepositoryNotFoundError as error:
        problem = (
            "no such repository on the Hugging Face Hub, or it is private; nor is there a "
            "folder of this name"
        )
        raise MissingFileError(
            at=name, problem=problem, fix="Check the name, or set HF_TOKEN."
        ) from error
    except LocalEntryNotFoundError as error:
        problem = "no folder of this name, and the Hugging Face Hub cannot be reached"
        raise MissingFileError(
            at=name, problem=problem, fix="Check the path, the network, and HF_HUB_OFFLINE."
        ) from error
    # HTTP and validation errors of the Hub's client derive from these
    except (OSError, ValueError) as error:
        at = name if revision is None else f"{name}@{revision}"
        raise SourceError(
            at=at,
            problem=f"cannot be downloaded from the Hugging Face Hub: {error}",
            fix="Check name and revision.",
        ) from error


def commit_of(folder: Path, path_or_hub_name: str | Path) -> str | None:
    """The commit of the Hub's files in `folder`, which `model_folder` gave; None where that is a
    folder of its own.
    """
    return None if Path(path_or_hub_name).expanduser().is_dir() else folder.name


def read_config(folder: Path) -> tuple[Json, str]:
    """config.json, as a value and as text."""
    values = read_json(folder / CONFIG)
    return values, json.dumps(values, sort_keys=True)


def end_tokens(folder: Path) -> tuple[int, ...]:
    """What ends what a model writes, as generation_config.json says, or config.json where that does
    not. Raises StateError.
    """
    for name in (GENERATION, CONFIG):
        known = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if known is not None:
            return tuple(known) if isinstance(known, list) else (known,)
    return ()


class WeightFiles:
    """The tensors of a folder, by name. Nothing is read but headers until a part of a tensor is
    asked for. Use it as a context manager.
    """

    def __init__(self, folder: Path) -> None:
        """Raises MissingFileError where there are no safetensors files; StateError for damaged
        ones.
        """
        self.folder = folder
        self._stack = contextlib.ExitStack()
        if (folder / INDEX).is_file():
            index = read_json(folder / INDEX).get("weight_map")
            if not isinstance(index, dict):
                raise StateError(
                    at=str(folder / INDEX),
                    problem="has no weight_map",
                    fix="Download the folder again.",
                )
            files = sorted({str(file) for file in index.values()})
        else:
            index, files = None, [WEIGHTS]
        for file in files:
            if Path(file).name != file:
                raise StateError(
                    at=str(folder / INDEX),
                    problem=f"{file!r} is not a file of this folder",
                    fix="Download the folder again.",
                )
            if not (folder / file).is_file():
                has_pickle = any(folder.glob("*.bin"))
                fix = (
                    "Convert its .bin files to safetensors: they are pickles, which can run code, "
                    "and are not read."
                    if has_pickle
                    else None
                )
                raise MissingFileError(
                    at=str(folder / file),
                    problem="no such file",
                    fix=fix or "Download the folder again.",
                )
        self._of: dict[str, tuple[str, safe_open]] = {}
        with contextlib.ExitStack() as opening:
            for file in files:
                try:
                    handle = opening.enter_context(safe_open(folder / file, framework="numpy"))
                except (SafetensorError, OSError) as error:
                    problem = f"is not a whole safetensors file: {error}"
                    raise StateError(
                        at=str(folder / file), problem=problem, fix="Download it again."
                    ) from error
                self._of |= dict.fromkeys(handle.keys(), (file, handle))
            missing = (
                []
                if index is None
                else sorted(
                    name for name, file in index.items() if self._of.get(name, ("",))[0] != file
                )
            )
            if missing:
                raise StateError(
                    at=str(folder / INDEX),
                    problem=f"names tensors that its files do not hold: {short(missing)}",
                    fix="Download it again.",
                )
            self._stack = opening.pop_all()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name][1].get_slice(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """NumPy array of `part` of a tensor, in the file's dtype. Only these bytes are read."""
        file, handle = self._of[name]
        try:
            return handle.get_slice(name)[part]
        # TypeError: a dtype that NumPy has no name for
        except (SafetensorError, OSError, TypeError) as error:
            raise StateError(
                at=f"{self.folder / file}: {name}", problem=f"cannot be read: {error}"
            ) from error


def short(names: list[str], most: int = 8) -> str:
    """The first few names, and how many there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def read_json(path: Path) -> Json:
    """A file of JSON that is an object. Raises MissingFileError and StateError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(
            at=str(path),
            problem="no such file",
            fix="Give the folder of a model in the manner of transformers.",
        ) from error
    except (OSError, ValueError) as error:
        raise StateError(
            at=str(path),
            problem=f"cannot be read as JSON: {error}",
            fix="Download the folder again.",
        ) from error
    if not isinstance(values, dict):
        raise StateError(
            at=str(path), problem="is not a JSON object", fix="Download the folder again."
        )
    return values
