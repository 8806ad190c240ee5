"""Finds which files of a Hub dataset are a subset or split: by its card (README), folders or names.

The rules are those that the Hub documents (huggingface.co/docs/hub, "Data files configuration" and
"File names and splits").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fsspec.utils import glob_translate

from easypipe.core.errors import MissingFileError, SourceError, raising, require_known
from easypipe.core.values import Json
from easypipe.sources.refs import EXTENSIONS, format_of, natural

TRAIN = "train"
KEYWORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
BOOKKEEPING = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
PARTIAL = "partial-"  # in front of the name of a split of which the Hub converted a part
SHARD = re.compile(r"(?:^|/)([\w.-]+?)-\d{4,}-of-\d{4,}[^/]*$")


def choose_files(
    names: Sequence[str],
    card: Json,
    *,
    at: str,
    pattern: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    converted: bool = False,
) -> list[str]:
    """Returns the names of the data files, naturally sorted.

    Args:
        names: All files of the repository.
        card: The data of its card.
        at: The dataset, for errors.
        pattern: A glob for the files; None goes by subset and split.
        subset: None takes the default one.
        split: None takes `train`.
        converted: Whether the layout is the Hub's own, `subset/split/0000.parquet`.

    Raises:
        MissingFileError: A pattern, subset or split matches no file; the error lists those that
            exist.
        SourceError: The card lists files in a way that the Hub does not document.
    """
    data = _data_files(names, at)
    if pattern is not None:
        chosen = _matching(data, [pattern], at)
        if not chosen:
            raise MissingFileError(
                at=f"{at}/{pattern}",
                problem="the pattern matches no file",
                have=data[:8],
                fix="Correct the pattern.",
            )
        return chosen
    splits = _splits(data, card, subset, at, converted)
    if not splits:
        raise _unmatched(data, at)
    wanted = split or TRAIN
    fix = "Name one by split=."
    require_known(wanted, sorted(splits), at, f"no split {wanted!r}", fix, MissingFileError)
    return splits[wanted]


def layouts(
    names: Sequence[str], card: Json, *, at: str, converted: bool = False
) -> dict[str, dict[str, list[str]]]:
    """Returns the names of the data files of a whole dataset, by subset and split.

    Raises:
        MissingFileError: There is no data file, or the card names none.
        SourceError: As in choose_files.
    """
    data = _data_files(names, at)
    subsets = (
        sorted({name.split("/")[0] for name in data})
        if converted
        else list(_configs(card)) or ["default"]
    )
    found = {subset: _splits(data, card, subset, at, converted) for subset in subsets}
    if not any(found.values()):
        raise _unmatched(data, at)
    return found


def _unmatched(data: list[str], at: str) -> MissingFileError:
    """Returns the error for a card that names none of the data files."""
    problem, fix = "its card names none of its data files", f"Name them: {at}/PATTERN."
    return MissingFileError(at=at, problem=problem, have=data[:8], fix=fix)


def _data_files(names: Sequence[str], at: str) -> list[str]:
    """Returns the data files among `names`, naturally sorted."""
    data = sorted(filter(is_data, names), key=natural)
    if not data:
        raise MissingFileError(
            at=at,
            problem="holds no data file that could be read",
            have=names[:8],
            fix="Check the name of the dataset.",
        )
    return data


def _splits(
    data: list[str], card: Json, subset: str | None, at: str, converted: bool
) -> dict[str, list[str]]:
    """Returns the names of a subset's data files by split."""
    return _from_folders(data, subset, at) if converted else _from_card(data, card, subset, at)


def _configs(card: Json) -> dict[str, Json]:
    """Returns what the card says about each subset for which it lists files."""
    listed = card.get("configs")
    configs = {
        str(entry.get("config_name", "default")): entry
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, Mapping)
    }
    return {
        name: entry
        for name, entry in configs.items()
        if entry.get("data_files") or entry.get("data_dir")
    }


def _from_card(data: list[str], card: Json, subset: str | None, at: str) -> dict[str, list[str]]:
    """Returns the files of a subset by split, as the card lists them, or by file names."""
    configs = _configs(card)
    if not configs:
        if subset is None or subset == "default":
            return _by_names(data)
        have = sorted({folder for name in data for folder in name.split("/")[:-1]})
        fix = "Leave subset out."
        require_known(subset, have, at, f"no subset {subset!r}", fix, MissingFileError)
        return _by_names([name for name in data if subset in name.split("/")[:-1]])
    chosen = subset or next((name for name, entry in configs.items() if entry.get("default")), None)
    if chosen is None and (len(configs) == 1 or "default" in configs):
        chosen = "default" if "default" in configs else next(iter(configs))
    entry = configs[_known_subset(subset, chosen, configs, at)]
    base = str(entry.get("data_dir") or "").strip("/")
    inside = [name for name in data if not base or name.startswith(f"{base}/")]
    files = entry.get("data_files")
    if not files:
        return _by_names(inside)
    prefix = f"{base}/" if base else ""
    found: dict[str, list[str]] = {}
    for split, paths in _patterns(files, at):
        found[split] = _matching(inside, [prefix + path for path in paths], at)
    return {name: paths for name, paths in found.items() if paths}


def _patterns(files: Any, at: str) -> list[tuple[str, list[str]]]:
    """Returns (split, patterns) as `data_files` of a card says; without splits all are `train`.

    Raises:
        SourceError: It is neither a pattern, nor a list of them, nor one of a split and `path`
            each; or a split comes twice.
    """
    items = files if isinstance(files, list) else [files]
    if all(isinstance(item, str) for item in items):
        items = [{"path": items}]
    found: list[tuple[str, list[str]]] = []
    for item in items:
        paths = item.get("path") if isinstance(item, Mapping) else None
        paths = [paths] if isinstance(paths, str) else paths
        if isinstance(paths, list) and all(isinstance(path, str) for path in paths):
            found.append((str(item.get("split") or TRAIN), paths))
    if len(dict(found)) < len(items):
        raise SourceError(
            at=f"{at}, card",
            problem=f"data_files is {files!r:.200}: not one split and its path for each entry",
            fix=f"Name the files: {at}/PATTERN.",
        )
    return found


def _from_folders(data: list[str], subset: str | None, at: str) -> dict[str, list[str]]:
    """Returns the files of a subset by split, in the Hub's own layout."""
    subsets = sorted({name.split("/")[0] for name in data})
    chosen = subset or (
        "default" if "default" in subsets else subsets[0] if len(subsets) == 1 else None
    )
    chosen = _known_subset(subset, chosen, subsets, at)
    found: dict[str, list[str]] = {}
    for name in data:
        parts = name.split("/")
        if parts[0] == chosen and len(parts) > 2:
            found.setdefault(parts[1].removeprefix(PARTIAL), []).append(name)
    return found


def partial_note(names: Sequence[str]) -> str | None:
    """Returns what to tell of files in the Hub's own layout; None if they are a whole split."""
    folders = {"/".join(name.split("/")[:2]) for name in names if f"/{PARTIAL}" in name}
    told = "the Hub's parquet copy, which is read, holds only the first rows of this split"
    return f"{told} ({', '.join(sorted(folders))})" if folders else None


def _known_subset(subset: str | None, chosen: str | None, have: Collection[str], at: str) -> str:
    """Returns the chosen subset if it exists, or raises MissingFileError.

    Args:
        subset: The subset that was asked for.
        chosen: The subset that was chosen.
        have: The subsets that exist.
        at: The dataset, for errors.
    """
    problem = f"no subset {subset!r}" if subset else "has several subsets, and none is the default"
    require_known(chosen or "", have, at, problem, "Name one by subset=.", MissingFileError)
    return chosen or ""


def _by_names(data: list[str]) -> dict[str, list[str]]:
    """Returns the files by split, found by `split-00000-of-00004.parquet` or words in paths.

    If no path names a split, all files are `train`.
    """
    shards = {name: match[1] for name in data if (match := SHARD.search(name))}
    if len(shards) == len(data):
        return _grouped({name: split_word(found) or found for name, found in shards.items()})
    words = {name: split_word(name) for name in data}
    if any(words.values()):
        return _grouped({name: word for name, word in words.items() if word})
    return {TRAIN: data}


def split_word(name: str) -> str | None:
    """Returns the split that a path's folders and file name mention, or None."""
    parts = set(re.split(r"[/._\s-]+|(?<=[a-z])(?=\d)", name.lower()))
    return next((split for split, words in KEYWORDS.items() if parts & set(words)), None)


def _grouped(splits: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, split in splits.items():
        found.setdefault(split, []).append(name)
    return found


def _matching(names: list[str], patterns: Sequence[str], at: str) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        fix = "Correct the pattern."
        with raising(SourceError, f"{at}/{pattern}", "cannot be matched", fix, ValueError):
            expression = re.compile(glob_translate(pattern.strip("/")))
        found.update(dict.fromkeys(name for name in names if expression.match(name)))
    return list(found)


def is_data(name: str) -> bool:
    """Returns whether a file of a repository is one of rows."""
    parts = name.split("/")
    return (
        format_of(name) in EXTENSIONS
        and parts[-1] not in BOOKKEEPING
        and not any(part.startswith((".", "_")) for part in parts)
    )
