"""What is in a dataset, before anybody describes it: its splits, columns, types, rows, and what
kind of rows they are.

Reads little and bounded, however large the dataset is: footers of parquet and Arrow, the first
megabyte of files of lines, what a Hub dataset's card says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from easypipe.cache.location import cache_folder
from easypipe.core.errors import ConfigError, EasypipeError, SourceError
from easypipe.core.remote import public_url
from easypipe.discovery.findings import Discovery, Part
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
from easypipe.sources.hub.layout import TRAIN, choose_files, layouts, split_word
from easypipe.sources.hub.repo import HubRepo
from easypipe.sources.hub.source import one_format, parse_hub_name
from easypipe.sources.open import open_files
from easypipe.sources.refs import FileRef, format_of
from easypipe.sources.splits import parse_split
from easypipe.stages.source.inputs import is_hub, is_object
from easypipe.stages.source.inspection import Candidate, Look, probe, rows_part
from easypipe.stages.source.stage import READERS, DatasetConfig
from easypipe.transforms.columns.kinds import Kind

PARTS = 24  # that are looked into; those of a Hub dataset that follow are listed

Type = Literal[
    "json", "jsonl", "parquet", "csv", "arrow", "txt", "tokens", "arrayrecord", "huggingface"
]


def discover(
    data: Any,
    *,
    type: Type | None = None,  # the name that DatasetConfig has for it
    split: str | None = None,
    subset: str | None = None,
    revision: str | None = None,
    token_files: TokenFilesConfig | None = None,
    storage_options: dict[str, Any] | None = None,
    sample_rows: int = 3,
    count: bool = False,
    cache_dir: str | Path | None = None,
) -> Discovery:
    """What stands in `data`: anything that DatasetConfig.data_files takes, files of several kinds
    in one folder too.

    type, subset, revision, token_files, storage_options: as in DatasetConfig. split, subset: look
    at these alone. sample_rows: how many are shown. count: count the rows of files of lines by
    reading them; their indexes are kept in cache_dir, where the pipeline finds them.

    Nothing is mapped silently: `discovery.propose()` gives a config with the reason for every
    column. Raises MissingFileError for what is not there, SourceError where nothing in it can be
    read, ConfigError for options that do not go together.
    """
    if sample_rows < 0:
        raise ConfigError(at="sample_rows", problem=f"{sample_rows} rows", fix="Give 0 or more.")
    if isinstance(data, os.PathLike):
        data = os.fspath(data)
    files = _names_files(data)
    chooses = (
        not files
        or type == "huggingface"
        or (isinstance(data, str) and (data.startswith("hf://") or is_saved_dataset(data)))
    )
    dataset = DatasetConfig(  # which knows what goes together
        data_files=data,
        type=type,
        split=split if chooses else None,
        subset=subset,
        revision=revision,
        token_files=token_files,
        storage_options=storage_options,
    )
    if split is not None and parse_split(split)[1] is not None:
        raise ConfigError(
            at="split",
            problem=f"{split!r} is a part of a split",
            fix="Name the split: what is in it is the same.",
        )
    indexes = cache_folder(cache_dir).local / "indexes"
    look = Look(
        storage=storage_options,
        token_files=token_files,
        indexes=indexes,
        count=count,
        sample=sample_rows,
    )
    if not files:
        return Discovery(
            source=f"{data.__class__.__name__} in memory",
            parts=tuple(_in_memory(data, split, look)),
        )
    if is_hub(dataset):
        found, notes = _on_hub(dataset)
    else:
        kind = None if type is None else READERS.get(type, type)
        every, notes = _in_files(
            data if isinstance(data, str) else list(map(os.fspath, data)), kind, look
        )
        found = [group for group in every if split in (None, group.split)]
        if not found:
            have = dict.fromkeys(group.split for group in every)
            raise ConfigError(
                at="split",
                problem=f"nothing here is called {split!r}",
                have=have,
                fix="Leave split out to see what there is.",
            )
    parts: list[Part] = []
    broken: list[EasypipeError] = []
    for group in found:
        if len(parts) >= PARTS:
            parts.append(_listed(group))
            continue
        try:
            made, more = probe(group, look)
        except SourceError as error:
            broken.append(error)
            continue
        parts += made
        notes += more
    if not parts:
        raise broken[0]
    source = ", ".join(
        public_url(os.fspath(item)) for item in (data if isinstance(data, list | tuple) else [data])
    )
    return Discovery(source=source, parts=tuple(parts), notes=(*notes, *map(str, broken)))


def _names_files(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(item, str | os.PathLike) for item in data)
    return isinstance(data, str)


# Rows in memory


def _in_memory(data: Any, split: str | None, look: Look) -> Iterable[Part]:
    if is_dataset_dict(data):
        for name in data if split is None else [split]:
            yield rows_part(
                open_object(data, split=name), {"data_files": data, "split": name}, name, look
            )
        return
    source = (
        open_object(data, split=split, counted=False)
        if is_object(data)
        else InMemoryShardedSource(data)
    )
    yield rows_part(source, {"data_files": data}, split or TRAIN, look)


# Files


def _in_files(
    data: str | list[str], kind: str | None, look: Look
) -> tuple[list[Candidate], list[str]]:
    """What stands in paths, globs, folders and URLs: files by format and by the split that their
    names speak of.
    """
    reads: dict[str, Any] = {"data_files": data}
    reads |= {"storage_options": look.storage} if look.storage else {}
    if isinstance(data, str) and is_saved_dataset(data):
        splits, several = saved_splits(data)
        return [
            Candidate(
                files=tuple(resolve(saved_dataset_files(data, name))),
                format="arrow",
                reads=reads | ({"split": name} if several else {}),
                split=name,
            )
            for name in splits
        ], []
    if isinstance(data, str) and is_saved(data, look.storage):
        manifest = read_manifest(data, look.storage)
        files = tuple(resolve([join(data, shard.name) for shard in manifest.shards], look.storage))
        return [
            Candidate(
                files=files,
                format=READERS.get(manifest.format, manifest.format),
                reads=reads,
                manifest=manifest,
            )
        ], []
    files = resolve(data, look.storage, extensions=None if kind is None else [kind])
    reads |= {} if look.token_files is None else {"token_files": look.token_files}
    groups: dict[tuple[str, str], list[FileRef]] = {}
    notes = []
    above = (
        os.path.commonpath([os.path.dirname(file.path) for file in files])
        if len(files) > 1
        else os.path.dirname(files[0].path)
    )
    for file in files:
        of = kind or format_of(file.path)
        if of is None:
            notes.append(f"{file.path}: its extension names no format, so it was left out")
            continue
        groups.setdefault((split_word(file.path.removeprefix(above)) or TRAIN, of), []).append(file)
    if not groups:
        open_files(data, storage_options=look.storage)  # which says what to do about the extension
    named = {} if kind is None else {"type": kind}
    alone = len(groups) == 1 and not notes
    return [
        Candidate(
            files=tuple(group),
            format=of,
            split=split,
            apart=True,
            reads=reads | named | ({} if alone else _paths(group)),
        )
        for (split, of), group in groups.items()
    ], notes


def _paths(files: Sequence[FileRef]) -> dict[str, Any]:
    return {"data_files": files[0].path if len(files) == 1 else [file.path for file in files]}


# The Hub


def _on_hub(dataset: DatasetConfig) -> tuple[list[Candidate], list[str]]:
    asked, split, subset = parse_hub_name(dataset.data_files), dataset.split, dataset.subset
    if asked.revision and dataset.revision and asked.revision != dataset.revision:
        problem = f"{dataset.revision!r}, but data_files says {asked.revision!r}"
        raise ConfigError(at="revision", problem=problem, fix="Leave one of them out.")
    hub = HubRepo(asked.repo, dataset.storage_options)
    listing = hub.listing(asked.revision or dataset.revision)
    names = list(listing.sizes)
    reads: dict[str, Any] = {
        name: getattr(dataset, name) for name in ("data_files", "revision", "storage_options")
    }
    reads = {
        key: value for key, value in (reads | {"type": "huggingface"}).items() if value is not None
    }
    found: list[Candidate] = []

    def ready(file: FileRef) -> FileRef:
        return hub.ready(file, listing.commit, whole=False)

    if asked.pattern is not None:
        files = [
            hub.file(file, listing)
            for file in choose_files(names, listing.card, at=hub.at, pattern=asked.pattern)
        ]
        return [
            Candidate(files=tuple(files), format=one_format(files, hub), reads=reads, ready=ready)
        ], []
    every = layouts(names, listing.card, at=hub.at, converted=listing.converted)
    for config, splits in every.items():
        for part, chosen in splits.items():
            if subset not in (None, config) or split not in (None, part):
                continue
            files = [hub.file(file, listing) for file in chosen]
            found.append(
                Candidate(
                    files=tuple(files),
                    format=one_format(files, hub),
                    reads=reads | {"split": part} | ({"subset": config} if len(every) > 1 else {}),
                    split=part,
                    subset=config,
                    ready=ready,
                    card_rows=_card_rows(listing.card, config, part),
                )
            )
    if not found:
        have = [f"{config}/{part}" for config, splits in every.items() for part in splits]
        raise ConfigError(
            at=hub.at,
            problem=f"no part {'/'.join(filter(None, (subset, split)))!r}",
            have=have,
            fix="Name one of these.",
        )
    return found, [f"commit {listing.commit}"]


def _card_rows(card: Mapping[str, Any], subset: str, split: str) -> int | None:
    infos = card.get("dataset_info") or []
    for info in infos if isinstance(infos, list) else [infos]:
        if isinstance(info, Mapping) and info.get("config_name", "default") == subset:
            for entry in info.get("splits") or ():
                if (
                    isinstance(entry, Mapping)
                    and entry.get("name") == split
                    and isinstance(entry.get("num_examples"), int)
                ):
                    return entry["num_examples"]
    return None


def _listed(group: Candidate) -> Part:
    """A part that was not looked into."""
    return Part(
        subset=group.subset,
        split=group.split,
        format=group.format,
        files=tuple(file.path for file in group.files),
        num_bytes=sum(file.num_bytes for file in group.files),
        num_rows=group.card_rows,
        rows_from=None if group.card_rows is None else "card",
        cost=None if group.card_rows is not None else "discover this subset and split alone",
        columns=None,
        kind=Kind(name="unknown"),
        sample=(),
        notes=(f"listed only: {PARTS} parts were looked into",),
        reads=group.reads,
        schema=None,
        rows=(),
    )
