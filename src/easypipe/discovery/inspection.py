"""Inspects the first rows of files and their footers, and finds how many rows there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from easypipe.core.class_names import classes_of
from easypipe.core.errors import SchemaError, SourceError
from easypipe.core.protocols import ShardedSource, bad_of, scan
from easypipe.core.remote import StorageOptions
from easypipe.core.schema import data_columns, without_row_numbers
from easypipe.core.threads import each
from easypipe.core.values import Arguments, Row, Settings
from easypipe.core.visible import bytes_text
from easypipe.discovery.findings import Column, Part
from easypipe.save.saved import SavedManifest
from easypipe.sources.base import FileSource
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.sources.formats.txt import TextUnit
from easypipe.sources.hub.layout import TRAIN
from easypipe.sources.open import open_files
from easypipe.sources.refs import FileRef
from easypipe.sources.schemas import reconcile
from easypipe.stages.source.text_units import guess_text_unit
from easypipe.transforms.columns.columns import ClassNames
from easypipe.transforms.columns.kinds import guess_kind

# This many bytes are read of each of the first HEADS files of a part, if they are files of lines.
HEAD_BYTES, HEADS = 4 << 20, 4
OTHER_HEAD_BYTES = 1 << 16  # bytes read of each other file
LONG_HEAD_BYTES = 1 << 24  # bytes read if the first row is longer
LOOKED_AT, LOOKED_AT_REMOTE = 256, 16  # files of a part that are opened
SAMPLE_ROWS = 64  # rows from which the kind is guessed


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Files that may be one part.

    Attributes:
        reads: The settings of the DatasetConfig that reads them.
        ready: Makes a file ready to be read.
        card_rows: The number of their rows in the card of a Hub dataset.
        manifest: The manifest of a saved folder.
        apart: Whether files of different kinds are separate parts.
        because: The reason for `reads`, if they were guessed.
    """

    files: tuple[FileRef, ...]
    format: str
    reads: Settings
    split: str = TRAIN
    subset: str | None = None
    ready: Callable[[FileRef], FileRef] = lambda file: file
    card_rows: int | None = None
    manifest: SavedManifest | None = None
    apart: bool = False
    because: tuple[str, ...] = ()

    def part(self, notes: Iterable[str], **found: Any) -> Part:
        """Returns the part that these files form, with what was found in them."""
        return Part(
            subset=self.subset,
            split=self.split,
            format=self.format,
            files=tuple(file.path for file in self.files),
            num_bytes=sum(file.num_bytes for file in self.files) if self.files else None,
            reads=self.reads,
            because=self.because,
            notes=tuple(notes),
            **found,
        )


@dataclass(frozen=True)
class Look:
    """How much to inspect, and how files are opened for it."""

    storage: StorageOptions
    token_files: TokenFilesConfig | None
    indexes: Path | None
    count: bool
    sample: int
    text_unit: TextUnit | None = None

    def open(self, files: Iterable[FileRef], kind: str) -> FileSource:
        return open_files(
            list(files),
            type=kind,
            on_error="skip",
            storage_options=self.storage,
            index_dir=self.indexes,
            token_files=self.token_files if kind in ("tokens", "arrayrecord") else None,
            text_unit=self.text_unit,
        )

    def rows(self, schema: pa.Schema, rows: Sequence[Row]) -> Arguments:
        """Returns what the first rows show, as fields of a Part."""
        schema = without_row_numbers(schema)
        return {
            "columns": tuple(Column(name=field.name, type=str(field.type)) for field in schema),
            "kind": guess_kind(schema, rows),
            "sample": tuple(rows[: self.sample]),
            "schema": schema,
            "rows": tuple(rows),
        }


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A file as far as it was inspected.

    Attributes:
        head: A source of only that file.
        total: The number of its rows, if it is known.
    """

    file: FileRef
    head: FileSource
    total: int | None

    @property
    def looked_at(self) -> int:
        return self.head.shards[0].num_rows or 0


def inspect_files(found: Candidate, look: Look) -> tuple[list[Part], list[str]]:
    """Returns the parts that the files form, and notes about files that could not be read.

    Raises:
        SourceError: None of the files can be read.
    """
    most = LOOKED_AT_REMOTE if found.files[0].remote else LOOKED_AT
    if found.card_rows is not None:
        most = 1
    files = [found.ready(file) for file in found.files[:most]]
    if found.format == "txt":
        unit, why = guess_text_unit([*files, *found.files[most:]])
        reads = {**found.reads, "text_unit": unit}
        found = replace(found, reads=reads, because=(f"text_unit = {unit!r}: {why}",))
        look = replace(look, text_unit=unit)
    sizes = [HEAD_BYTES if i < HEADS else OTHER_HEAD_BYTES for i in range(len(files))]
    heads = [*zip(files, sizes, strict=True)]
    tried = each(lambda head: _open(found.format, look, *head), heads, 8, "discover")
    opened = [one for one in tried if isinstance(one, _Opened)]
    errors = [one for one in tried if isinstance(one, SourceError)]
    if not opened:
        raise errors[0]
    groups: dict[tuple[str, tuple[str | None, ...]] | None, list[_Opened]] = {}
    # Rows of one kind in the same columns are one dataset, even if some files lack optional
    # columns.
    for one in opened:
        key = None
        if found.apart:
            kind = guess_kind(one.head.schema, _first_rows(one.head, 1)[0])
            key = kind.name, tuple(c.column for c in kind.choices if c.slot != "tools")
        groups.setdefault(key, []).append(one)
    if len(groups) == 1:
        return [_part(found, opened, look)], list(map(str, errors))
    parts, notes = [], list(map(str, errors))
    for group in groups.values():
        own = tuple(one.file for one in group)
        reads = {**found.reads, **read_paths(own)}
        parts.append(_part(replace(found, files=own, reads=reads), group, look))
    if left := found.files[most:]:
        notes.append(
            f"{len(left):,} files from {left[0].path} on are in no part: {most} {found.format} "
            "files were looked at, which hold rows of several kinds; discover the others by "
            "themselves"
        )
    return parts, notes


def read_paths(files: Sequence[FileRef]) -> Settings:
    """Returns the field of a DatasetConfig that reads these files."""
    return {"data_files": files[0].path if len(files) == 1 else [file.path for file in files]}


def _open(kind: str, look: Look, file: FileRef, num_bytes: int) -> _Opened | SourceError:
    try:
        head = look.open([file], kind).head(num_bytes)
        _ = head.schema  # finding the schema may read rows, and may fail
        return _Opened(file=file, head=head, total=head.total_rows(0))
    except SourceError as error:
        if num_bytes == LONG_HEAD_BYTES or file.num_bytes <= num_bytes:
            return error
    return _open(kind, look, file, LONG_HEAD_BYTES)


def _part(found: Candidate, group: Sequence[_Opened], look: Look) -> Part:
    """Returns the part that files of one kind form, with what was found in them."""
    notes: list[str] = []
    try:
        schema = reconcile([(one.file.path, one.head.schema) for one in group])
    except SchemaError as conflict:
        schema = group[0].head.schema
        notes.append(f"the columns are those of the first file; {conflict}")
    if any(one.looked_at != one.total for one in group):
        looked = sum(one.looked_at for one in group)
        notes.append(f"columns and types are those of the first rows ({looked:,} were looked at)")
    if len(found.files) > len(group):
        notes.append(f"{len(group)} of {len(found.files)} files were looked at")
    rows: list[Row] = []
    for one in group[:HEADS]:  # the speakers of conversations may differ from file to file
        first, bad = _first_rows(one.head, SAMPLE_ROWS)
        rows, notes = rows + first, notes + bad
    if found.manifest is not None:
        counted = {"num_rows": found.manifest.num_rows, "rows_from": "manifest"}
        return found.part(notes, **counted, **look.rows(found.manifest.schema, rows))
    return found.part(notes, **_counted(found, group, look), **look.rows(schema, rows))


def _counted(found: Candidate, group: Sequence[_Opened], look: Look) -> Arguments:
    """Returns the number of rows and its origin, or what counting would cost.

    They are returned as fields of a Part.
    """
    files, lines = found.files, found.format in ("json", "csv", "txt", "tokens")
    totals = [one.total for one in group if one.total is not None]
    known = len(totals) == len(group)
    if look.text_unit == "file":
        return {"num_rows": len(files), "rows_from": "files"}
    if known and len(files) == len(group):
        read = totals == [one.looked_at for one in group]
        how = ("read" if read else "index") if lines else "footer"
        return {"num_rows": sum(totals), "rows_from": how}
    if look.count:
        source = look.open([found.ready(file) for file in files], found.format)
        total = sum(shard.num_rows or 0 for shard in source.shards)
        return {"num_rows": total, "rows_from": "count"}
    if found.card_rows is not None:
        return {"num_rows": found.card_rows, "rows_from": "card"}
    cost = f"counting opens the footers of {len(files):,} files"
    if lines or not known:
        cost = f"counting reads {bytes_text(sum(file.num_bytes for file in files))}"
    return {"cost": f"{cost} (count=True, --count)"}


def inspect_rows(source: ShardedSource, reads: Settings, split: str, look: Look) -> Part:
    """Returns the part for rows in memory."""
    rows, notes = _first_rows(source, SAMPLE_ROWS)
    counts = [shard.num_rows for shard in source.shards]
    counted = {"cost": "every row would be asked for"}
    if None not in counts:
        counted = {"num_rows": sum(filter(None, counts)), "rows_from": "memory"}
    found = Candidate(files=(), format="memory", reads=reads, split=split)
    return found.part(notes, **counted, **look.rows(source.schema, rows))


def _first_rows(source: ShardedSource, count: int) -> tuple[list[Row], list[str]]:
    """Returns up to `count` rows, and a note about the bad ones among them."""
    known = source.shards[0].num_rows
    batch, rejects = scan(source, 0, 0, count if known is None else min(count, known))
    kept = data_columns(batch.schema)
    bad = list(bad_of(rejects))
    name = source.shards[0].name
    seen = batch.num_rows + len(bad)
    notes = [
        f"{name}: {len(bad)} of the first {seen} rows are bad; row {first.row}: {first.reason}, "
        f"{first.detail}"
        for first in bad[:1]
    ]
    rows = batch.select(kept)
    classes = [field.name for field in rows.schema if classes_of(field)]
    return ClassNames(classes).scan(rows).batch.to_pylist(), notes
