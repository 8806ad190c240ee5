"""`discover`: finds the subsets and splits of files, Hub or memory, and inspects each part.

It reads little, however large the dataset is: footers of parquet and Arrow, the first megabytes of
files of lines, and the card of a Hub dataset.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from easypipe.cache.location import cache_folder
from easypipe.core.errors import ConfigError, SourceError, require
from easypipe.core.remote import StorageOptions, public_url
from easypipe.core.values import Json, Settings
from easypipe.discovery.findings import Discovery, Part
from easypipe.discovery.inspection import (
    Candidate,
    Look,
    inspect_files,
    inspect_rows,
    read_paths,
)
from easypipe.save.saved import is_saved, join, read_manifest
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.external.objects import is_dataset_dict, open_object
from easypipe.sources.external.saved_datasets import (
    is_saved_dataset,
    saved_dataset_files,
    saved_splits,
)
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.sources.files import resolve
from easypipe.sources.hub.layout import (
    TRAIN,
    choose_files,
    layouts,
    partial_note,
    split_word,
)
from easypipe.sources.hub.repo import HubRepo
from easypipe.sources.hub.source import one_format, parse_hub_name
from easypipe.sources.open import open_files
from easypipe.sources.refs import FileRef, format_of
from easypipe.sources.splits import parse_split
from easypipe.stages.source.config import DatasetConfig, is_hub, is_object
from easypipe.stages.source.stage import READERS

DataFiles = Any  # whatever DatasetConfig.data_files takes
PARTS = 24  # at most this many parts are inspected; others are only listed

Type = Literal[
    "json",
    "jsonl",
    "parquet",
    "csv",
    "arrow",
    "txt",
    "tokens",
    "arrayrecord",
    "mds",
    "webdataset",
    "huggingface",
]


def discover(
    data: DataFiles,
    *,
    type: Type | None = None,  # the same name as in DatasetConfig
    split: str | None = None,
    subset: str | None = None,
    revision: str | None = None,
    token_files: TokenFilesConfig | None = None,
    storage_options: StorageOptions = None,
    sample_rows: int = 3,
    count: bool = False,
    cache_dir: str | Path | None = None,
) -> Discovery:
    """Inspects `data`, and says what it holds.

    `data` is anything that DatasetConfig.data_files takes, also a folder with files of several
    kinds. type, subset, revision, token_files and storage_options are those of DatasetConfig.
    `discovery.propose()` returns a config, with the reason for every column.

    Args:
        split: Inspect only this split.
        subset: Inspect only this subset.
        sample_rows: How many rows are shown.
        count: Count the rows of files of lines by reading them; cache_dir stores their indexes.

    Raises:
        MissingFileError: There is nothing at `data`.
        SourceError: Nothing can be read.
        ConfigError: Options conflict.
    """
    require(sample_rows >= 0, "sample_rows", f"{sample_rows} rows", "Give 0 or more.")
    if split is not None and parse_split(split)[1] is not None:
        fix = "Name the split: what is in it is the same."
        raise ConfigError(at="split", problem=f"{split!r} is a part of a split", fix=fix)
    if isinstance(data, os.PathLike):
        data = os.fspath(data)
    files = _names_files(data)
    chooses = not files or type == "huggingface" or _has_splits(data)
    dataset = DatasetConfig(
        data_files=data,
        type=type,
        split=split if chooses else None,
        subset=subset,
        revision=revision,
        token_files=token_files,
        storage_options=storage_options,
    )
    indexes = cache_folder(cache_dir).local / "indexes"
    look = Look(storage_options, token_files, indexes, count, sample_rows)
    if not files:
        source = f"{data.__class__.__name__} in memory"
        return Discovery(source=source, parts=tuple(_in_memory(data, split, look)))
    found, notes = _on_hub(dataset) if is_hub(dataset) else _of_split(data, type, split, look)
    parts, more = _inspect(found, look)
    named = data if isinstance(data, list | tuple) else [data]
    return Discovery(
        source=", ".join(public_url(os.fspath(item)) for item in named),
        parts=tuple(parts),
        notes=(*notes, *more),
    )


def _inspect(found: Iterable[Candidate], look: Look) -> tuple[list[Part], list[str]]:
    """Returns the parts, and notes about files that cannot be read.

    Raises:
        SourceError: None of the files can be read.
    """
    parts: list[Part] = []
    notes: list[str] = []
    broken: list[SourceError] = []
    for candidate in found:
        if len(parts) < PARTS:
            try:
                made, more = inspect_files(candidate, look)
                parts += made
                notes += more
            except SourceError as error:
                broken.append(error)
            continue
        part = candidate.part([f"listed only: {PARTS} parts were looked into"])
        known = {"cost": "discover this subset and split alone"}
        if candidate.card_rows is not None:
            known = {"num_rows": candidate.card_rows, "rows_from": "card"}
        parts.append(dataclasses.replace(part, **known))
    if not parts:
        raise broken[0]
    return parts, [*notes, *map(str, broken)]


def _has_splits(data: DataFiles) -> bool:
    return isinstance(data, str) and (data.startswith("hf://") or is_saved_dataset(data))


def _names_files(data: DataFiles) -> bool:
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(item, str | os.PathLike) for item in data)
    return isinstance(data, str)


def _in_memory(data: DataFiles, split: str | None, look: Look) -> Iterator[Part]:
    if is_dataset_dict(data):
        for name in data if split is None else [split]:
            reads = {"data_files": data, "split": name}
            yield inspect_rows(open_object(data, split=name), reads, name, look)
    else:  # which have no other split
        source = (
            open_object(data, split=split, counted=False)
            if is_object(data)
            else InMemoryShardedSource(data)
        )
        yield inspect_rows(source, {"data_files": data}, TRAIN, look)


def _of_split(
    data: DataFiles, type: Type | None, split: str | None, look: Look
) -> tuple[list[Candidate], list[str]]:
    paths = data if isinstance(data, str) else list(map(os.fspath, data))
    every, notes = _in_files(paths, None if type is None else READERS.get(type, type), look)
    found = [candidate for candidate in every if split in (None, candidate.split)]
    require(
        found,
        "split",
        f"nothing here is called {split!r}",
        "Leave split out to see what there is.",
        have=dict.fromkeys(candidate.split for candidate in every),
    )
    return found, notes


def _in_files(
    data: str | list[str], kind: str | None, look: Look
) -> tuple[list[Candidate], list[str]]:
    """Finds the files of paths, globs, folders and URLs.

    Files are grouped by format and by the split in their names.
    """
    reads: Settings = {"data_files": data}
    reads = {**reads, "storage_options": look.storage} if look.storage else reads
    if isinstance(data, str) and is_saved_dataset(data):
        splits, several = saved_splits(data)
        return [
            Candidate(
                files=tuple(resolve(saved_dataset_files(data, name))),
                format="arrow",
                reads={**reads, **({"split": name} if several else {})},
                split=name,
            )
            for name in splits
        ], []
    if isinstance(data, str) and is_saved(data, look.storage):
        manifest = read_manifest(data, look.storage)
        files = resolve(
            [join(data, one.name) for one in manifest.readable or manifest.shards], look.storage
        )
        format = READERS.get(manifest.format, manifest.format)
        return [Candidate(files=tuple(files), format=format, reads=reads, manifest=manifest)], []
    files = resolve(data, look.storage, extensions=None if kind is None else [kind])
    given = {"token_files": look.token_files, "type": kind}
    reads = {**reads, **{name: value for name, value in given.items() if value is not None}}
    groups: dict[tuple[str, str], list[FileRef]] = {}
    notes: list[str] = []
    above = {}  # of files here and of URLs: how many folders all of their paths begin with
    for remote in (False, True):
        folders = [file.path.split("/")[:-1] for file in files if file.remote == remote]
        same = itertools.takewhile(lambda names: len({*names}) == 1, zip(*folders, strict=False))
        above[remote] = len([*same])
    for file in files:
        format = kind or format_of(file.path)
        if format is None:
            notes.append(f"{file.path}: its extension names no format, so it was left out")
            continue
        split = split_word("/".join(file.path.split("/")[above[file.remote] :])) or TRAIN
        groups.setdefault((split, format), []).append(file)
    if not groups:
        open_files(data, storage_options=look.storage)  # its error is about the extension
    alone = len(groups) == 1 and not notes
    return [
        Candidate(
            files=tuple(group),
            format=format,
            split=split,
            apart=True,
            reads={**reads, **({} if alone else read_paths(group))},
        )
        for (split, format), group in groups.items()
    ], notes


def _on_hub(dataset: DatasetConfig) -> tuple[list[Candidate], list[str]]:
    """Returns the parts that a dataset repository of the Hub may have, and the commit as a note.

    Raises:
        ConfigError: Revisions conflict, or there is no such part.
    """
    asked, split, subset = parse_hub_name(dataset.data_files), dataset.split, dataset.subset
    if asked.revision and dataset.revision and asked.revision != dataset.revision:
        problem = f"{dataset.revision!r}, but data_files says {asked.revision!r}"
        raise ConfigError(at="revision", problem=problem, fix="Leave one of them out.")
    hub = HubRepo(asked.repo, dataset.storage_options)
    listing = hub.listing(asked.revision or dataset.revision)
    given = {"revision": dataset.revision, "storage_options": dataset.storage_options}
    reads: Settings = {"data_files": dataset.data_files, "type": "huggingface"}
    reads = {**reads, **{name: value for name, value in given.items() if value is not None}}

    def candidate(names: Iterable[str], reads: Settings, **which: Any) -> Candidate:
        files = tuple(hub.file(name, listing) for name in names)
        return Candidate(
            files=files,
            format=one_format(files, hub),
            reads=reads,
            ready=lambda file: hub.ready(file, listing.commit, whole=False),
            **which,
        )

    names = list(listing.sizes)
    if asked.pattern is not None:
        chosen = choose_files(names, listing.card, at=hub.at, pattern=asked.pattern)
        return [candidate(chosen, reads)], []
    every = layouts(names, listing.card, at=hub.at, converted=listing.converted)
    found = [
        candidate(
            chosen,
            {**reads, "split": part, **({"subset": config} if len(every) > 1 else {})},
            split=part,
            subset=config,
            card_rows=_card_rows(listing.card, config, part),
        )
        for config, splits in every.items()
        for part, chosen in splits.items()
        if subset in (None, config) and split in (None, part)
    ]
    require(
        found,
        hub.at,
        f"no part {'/'.join(filter(None, (subset, split)))!r}",
        "Name one of these.",
        have=[f"{config}/{part}" for config, splits in every.items() for part in splits],
    )
    partly = [
        f"{config}/{part}: {note}"
        for config, splits in (every if listing.converted else {}).items()
        for part, chosen in splits.items()
        if (note := partial_note(chosen)) is not None
    ]
    return found, [f"commit {listing.commit}", *partly]


def _card_rows(card: Json, subset: str, split: str) -> int | None:
    infos = card.get("dataset_info") or []
    for info in infos if isinstance(infos, list) else [infos]:
        if isinstance(info, Mapping) and info.get("config_name", "default") == subset:
            for entry in info.get("splits") or ():
                if isinstance(entry, Mapping) and entry.get("name") == split:
                    rows = entry.get("num_examples")
                    return rows if isinstance(rows, int) else None
    return None
