"""A look at the first rows of some files, and at what their footers and indexes say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from easypipe.core.errors import SchemaError, SourceError
from easypipe.core.protocols import ShardedSource, scan
from easypipe.core.schema import ROW_NUMBER
from easypipe.discovery.findings import Column, Part, bytes_text
from easypipe.save.saved import SavedManifest
from easypipe.sources.base import FileSource
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.sources.formats.txt import TextUnit
from easypipe.sources.hub.layout import TRAIN
from easypipe.sources.open import open_files
from easypipe.sources.refs import FileRef
from easypipe.sources.schemas import reconcile
from easypipe.stages.source.text_units import guess_text_unit
from easypipe.transforms.columns.kinds import guess_kind

# read of each of the first files of a part, where they are files of lines
HEAD_BYTES, HEADS = 4 << 20, 4
OTHER_HEAD_BYTES = 1 << 16  # read of each other file
LONG_HEAD_BYTES = 1 << 24  # where no row ends in those
LOOKED_AT, LOOKED_AT_REMOTE = 256, 16  # files of a part that are opened
SAMPLE_ROWS = 64  # from which the kind is told


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Files that may be one part. reads: fields of the DatasetConfig that reads them. ready: makes
    a file ready to be read.

    card_rows: what the card of a Hub dataset says of their number. manifest: of a saved folder.
    apart: files of different kinds are parts of their own. because: why `reads` are so, where that
    was guessed.
    """

    files: tuple[FileRef, ...]
    format: str
    reads: Mapping[str, Any]
    split: str = TRAIN
    subset: str | None = None
    ready: Callable[[FileRef], FileRef] = lambda file: file
    card_rows: int | None = None
    manifest: SavedManifest | None = None
    apart: bool = False
    because: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Look:
    storage: dict[str, Any] | None
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


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A file as far as it was looked at. head: a source of that file alone. total: its rows, where
    they are known.
    """

    file: FileRef
    head: FileSource
    schema: pa.Schema
    total: int | None


def probe(found: Candidate, look: Look) -> tuple[list[Part], list[str]]:
    """The parts that the files make up, and notes about files that could not be read.

    Raises SourceError where none can.
    """
    most = (
        1
        if found.card_rows is not None
        else LOOKED_AT_REMOTE
        if found.files[0].remote
        else LOOKED_AT
    )
    files = [found.ready(file) for file in found.files[:most]]
    if found.format == "txt":
        unit, why = guess_text_unit([*files, *found.files[most:]])
        found = replace(
            found,
            reads={**found.reads, "text_unit": unit},
            because=(f"text_unit = {unit!r}: {why}",),
        )
        look = replace(look, text_unit=unit)
    opened, notes, first_error = [], [], None
    with ThreadPoolExecutor(8, thread_name_prefix="easypipe-discover") as pool:
        sizes = itertools.chain([HEAD_BYTES] * HEADS, itertools.repeat(OTHER_HEAD_BYTES))
        for attempt in [
            pool.submit(_attempt, file, found.format, size, look)
            for file, size in zip(files, sizes, strict=False)
        ]:
            result = attempt.result()
            if isinstance(result, _Opened):
                opened.append(result)
            else:
                first_error = first_error or result
                notes.append(str(result))
    if not opened:
        assert first_error is not None, "a candidate has files"
        raise first_error
    groups: dict[Any, list[_Opened]] = {}
    # rows of one kind in the same columns are one dataset, whatever optional columns some files
    # lack
    for one in opened:
        kind = guess_kind(one.schema, _first_rows(one.head, 1)[0])
        key = (
            (kind.name, tuple(choice.column for choice in kind.choices if choice.slot != "tools"))
            if found.apart
            else None
        )
        groups.setdefault(key, []).append(one)
    several = len(groups) > 1
    return [_files_part(found, group, look, alone=not several) for group in groups.values()], notes


def _attempt(file: FileRef, kind: str, num_bytes: int, look: Look) -> _Opened | SourceError:
    for size in (num_bytes, LONG_HEAD_BYTES):
        try:
            head = look.open([file], kind).head(size)
            return _Opened(file=file, head=head, schema=head.schema, total=head.total_rows(0))
        except SourceError as error:
            if size == LONG_HEAD_BYTES or file.num_bytes <= size:
                return error
    raise AssertionError("the last size returns")


def _files_part(found: Candidate, group: Sequence[_Opened], look: Look, *, alone: bool) -> Part:
    files = found.files if alone else [one.file for one in group]
    notes: list[str] = []
    try:
        schema = reconcile([(one.file.path, one.schema) for one in group])
    except SchemaError as conflict:
        schema = group[0].schema
        notes.append(f"the columns are those of the first file; {conflict}")
    rows, more = _first_rows(group[0].head, SAMPLE_ROWS)
    for one in group[1:HEADS]:  # who speaks may differ from file to file
        others, bad = _first_rows(one.head, SAMPLE_ROWS)
        rows, more = rows + others, more + bad
    if any((one.head.shards[0].num_rows or 0) != one.total for one in group):
        looked = sum(one.head.shards[0].num_rows or 0 for one in group)
        notes.append(f"columns and types are those of the first rows ({looked:,} were looked at)")
    if len(files) > len(group) and alone:
        notes.append(f"{len(group)} of {len(files)} files were looked at")
    reads = (
        dict(found.reads)
        if alone
        else {**found.reads, "data_files": [one.file.path for one in group]}
    )
    if found.manifest is not None:
        schema = found.manifest.schema
        counted = (found.manifest.num_rows, "manifest", None)
    else:
        counted = _counted(found, files, group, look)
    if not alone and len(group) == 1:
        reads["data_files"] = group[0].file.path
    return part_of(
        found,
        files=files,
        schema=schema,
        rows=rows,
        notes=[*notes, *more],
        counted=counted,
        look=look,
        reads=reads,
    )


def _counted(
    found: Candidate, files: Sequence[FileRef], group: Sequence[_Opened], look: Look
) -> tuple[int | None, str | None, str | None]:
    """(rows, who says so, what it would cost to know)."""
    if look.text_unit == "file":
        return len(files), "files", None
    totals = [one.total for one in group]
    whole = len(files) == len(group)
    lines = found.format in ("json", "csv", "txt", "tokens")
    if whole and None not in totals:
        looked = all(one.total == one.head.shards[0].num_rows for one in group)
        return (
            sum(total or 0 for total in totals),
            ("footer" if not lines else "read" if looked else "index"),
            None,
        )
    if look.count:
        source = look.open([found.ready(file) for file in files], found.format)
        return sum(shard.num_rows or 0 for shard in source.shards), "count", None
    if found.card_rows is not None:
        return found.card_rows, "card", None
    if lines or None in totals:
        return (
            None,
            None,
            f"counting reads {bytes_text(sum(file.num_bytes for file in files))} (count=True, --count)",
        )
    return None, None, f"counting opens the footers of {len(files):,} files (count=True, --count)"


def rows_part(source: ShardedSource, reads: Mapping[str, Any], split: str, look: Look) -> Part:
    """Rows in memory."""
    found = Candidate(files=(), format="memory", reads=reads, split=split)
    rows, notes = _first_rows(source, SAMPLE_ROWS)
    counts = [shard.num_rows for shard in source.shards]
    total = None if None in counts else sum(filter(None, counts))
    return part_of(
        found,
        files=(),
        schema=source.schema,
        rows=rows,
        notes=notes,
        counted=(None, None, "every row would be asked for")
        if total is None
        else (total, "memory", None),
        look=look,
        reads=reads,
    )


def part_of(
    found: Candidate,
    *,
    files: Sequence[FileRef],
    schema: pa.Schema,
    rows: Sequence[Mapping[str, Any]],
    notes: Iterable[str],
    counted: tuple[int | None, str | None, str | None],
    look: Look,
    reads: Mapping[str, Any],
) -> Part:
    schema = pa.schema([field for field in schema if field.name != ROW_NUMBER])
    return Part(
        subset=found.subset,
        split=found.split,
        format=found.format,
        files=tuple(file.path for file in files),
        num_bytes=sum(file.num_bytes for file in files) if files else None,
        num_rows=counted[0],
        rows_from=counted[1],
        cost=counted[2],
        columns=tuple(Column(name=field.name, type=str(field.type)) for field in schema),
        kind=guess_kind(schema, rows),
        sample=tuple(rows[: look.sample]),
        notes=tuple(notes),
        reads=reads,
        because=found.because,
        schema=schema,
        rows=tuple(rows),
    )


def _first_rows(source: ShardedSource, count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Up to `count` rows, and a note about those among them that are bad."""
    known = source.shards[0].num_rows
    batch, rejects = scan(source, 0, 0, count if known is None else min(count, known))
    kept = [name for name in batch.schema.names if name != ROW_NUMBER]
    bad = [reject for reject in rejects if not reject.benign]
    name = source.shards[0].name
    notes = (
        [
            f"{name}: {len(bad)} of the first {count} rows are bad; row {bad[0].row}: {bad[0].reason}, {bad[0].detail}"
        ]
        if bad
        else []
    )
    return batch.select(kept).to_pylist(), notes
