"""Parquet files, read by row group.

A range that covers a row group decodes it; one that covers a part of a small group keeps the
decoded group for its neighbours; one that covers a part of a large group streams through it, so
that memory is bounded however large row groups are.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from easypipe.core.errors import SourceError, place
from easypipe.sources.base import FileSource, Format, Rows, Survey
from easypipe.sources.files import FileRef, open_binary, read_range
from easypipe.sources.schemas import plain_schema

# a group up to this size (decoded, columns that are read) is decoded whole
SMALL_GROUP_BYTES = 32 << 20
KEPT_GROUPS = 4  # decoded small groups that a source remembers
STREAMED_BYTES = 4 << 20  # of a large group, decoded at a time
KEPT_STREAMS = 4  # places in large groups from which reading can go on, per file
CUT_BYTES = 16 << 20  # a large group has cuts about this far apart
JUMP_BYTES = 1 << 16  # of a remote file, read at a time: the library asks for whole column chunks
MAGIC = b"PAR1"


@dataclass(frozen=True)
class _Groups:
    metadata: pq.FileMetaData
    first_row: NDArray[np.int64]  # Int64[groups + 1]


@dataclass
class _Stream:
    """A place inside a row group; `held` begins at row `position` of the group."""

    group: int
    columns: tuple[str, ...]
    position: int
    held: pa.Table
    batches: Iterator[pa.RecordBatch]


class ParquetFormat(Format):
    numbered = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decoded: OrderedDict[Any, pa.Table] = OrderedDict()
        self._streams: dict[str, tuple[threading.Lock, list[_Stream]]] = {}

    def survey(
        self, file: FileRef, columns: tuple[str, ...] | None, index_dir: Path | None
    ) -> Survey:
        _check_magic(file)
        with open_binary(file, JUMP_BYTES) as opened, _arrow_errors(file):
            parquet = pq.ParquetFile(opened)
            metadata, schema = parquet.metadata, parquet.schema_arrow
        rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        first = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        cuts: list[int] = []
        for group, count in enumerate(rows):
            pieces = max(1, min(count, _group_bytes(metadata, group, columns) // CUT_BYTES))
            cuts += (
                [int(first[group]) + count * piece // pieces for piece in range(pieces)]
                if count
                else []
            )
        return Survey(
            num_rows=int(first[-1]),
            total_rows=int(first[-1]),
            cuts=tuple(cuts) or (0,),
            schema=plain_schema(schema, file.path),
            detail=_Groups(metadata, first),
        )

    def rows(self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int) -> Rows:
        groups: _Groups = survey.detail
        columns = tuple(fields.names)
        parts: list[pa.Table] = []
        whole: list[int] = []  # groups side by side that are read from end to end
        group = int(np.searchsorted(groups.first_row, start, side="right")) - 1
        while group < groups.metadata.num_row_groups and groups.first_row[group] < stop:
            first, count = (
                int(groups.first_row[group]),
                int(groups.first_row[group + 1] - groups.first_row[group]),
            )
            a, b = max(start - first, 0), min(stop - first, count)
            if a < b and (a, b) == (0, count):
                whole.append(group)
            elif a < b:
                parts += self._whole(file, groups, columns, whole)
                parts.append(self._part(file, groups, columns, group, a, b, whole=False))
                whole = []
            group += 1
        parts += self._whole(file, groups, columns, whole)
        return Rows(pa.concat_tables(parts))

    def _whole(
        self, file: FileRef, groups: _Groups, columns: tuple[str, ...], run: list[int]
    ) -> list[pa.Table]:
        """Groups side by side from end to end; decoded into one array where they can be, so that
        nothing is copied together afterwards.
        """
        with self._lock:
            known = any((file.path, group, columns) in self._decoded for group in run)
        if len(run) > 1 and not known and not file.remote:
            # read one by one, the damaged one is named
            with contextlib.suppress(pa.ArrowException, OSError):
                return [_decode(file, groups, columns, run)]
        return [
            self._part(
                file,
                groups,
                columns,
                g,
                0,
                int(groups.first_row[g + 1] - groups.first_row[g]),
                whole=True,
            )
            for g in run
        ]

    def _part(
        self,
        file: FileRef,
        groups: _Groups,
        columns: tuple[str, ...],
        group: int,
        a: int,
        b: int,
        *,
        whole: bool,
    ) -> pa.Table:
        key = (file.path, group, columns)
        small = _group_bytes(groups.metadata, group, columns) <= SMALL_GROUP_BYTES
        if small:
            with self._lock:
                decoded = self._decoded.get(key)
                if decoded is not None:
                    self._decoded.move_to_end(key)
                    return decoded.slice(a, b - a)
        with _arrow_errors(file, group):
            if not small and not whole:
                return self._streamed(file, groups, columns, group, a, b)
            decoded = _decode(file, groups, columns, [group])
        if small and not whole:  # a group that is read whole is not asked for again soon
            with self._lock:
                self._decoded[key] = decoded
                while len(self._decoded) > KEPT_GROUPS:
                    self._decoded.popitem(last=False)
        return decoded.slice(a, b - a)

    def _streamed(
        self, file: FileRef, groups: _Groups, columns: tuple[str, ...], group: int, a: int, b: int
    ) -> pa.Table:
        with self._lock:
            lock, streams = self._streams.setdefault(file.path, (threading.Lock(), []))
        with lock:
            usable = [
                s for s in streams if s.group == group and s.columns == columns and s.position <= a
            ]
            if usable:
                stream = max(usable, key=lambda s: s.position)
                streams.remove(stream)
            else:
                stream = _open_stream(file, groups, columns, group)
            taken: list[pa.Table] = []
            while True:
                end = stream.position + stream.held.num_rows
                if end > a:
                    taken.append(
                        stream.held.slice(
                            max(a - stream.position, 0), min(end, b) - max(a, stream.position)
                        )
                    )
                if end >= b:
                    break
                stream.position = end
                stream.held = pa.Table.from_batches([next(stream.batches)])
            stream.held = stream.held.slice(b - stream.position)
            stream.position = b
            streams.append(stream)
            del streams[:-KEPT_STREAMS]
        return pa.concat_tables(taken)


class ParquetShardedSource(FileSource):
    """Rows of parquet files. Options are those of FileSource."""

    kind = "parquet"

    def _make_format(self) -> Format:
        return ParquetFormat()


def _decode(file: FileRef, groups: _Groups, columns: tuple[str, ...], run: list[int]) -> pa.Table:
    with open_binary(file, JUMP_BYTES) as opened:
        parquet = pq.ParquetFile(opened, metadata=groups.metadata, pre_buffer=True)
        return parquet.read_row_groups(run, columns=list(columns), use_threads=len(columns) > 1)


def _open_stream(file: FileRef, groups: _Groups, columns: tuple[str, ...], group: int) -> _Stream:
    parquet = pq.ParquetFile(
        open_binary(file, JUMP_BYTES),
        metadata=groups.metadata,
        pre_buffer=False,
        buffer_size=1 << 20,
    )
    info = groups.metadata.row_group(group)
    rows = max(
        1, info.num_rows * STREAMED_BYTES // max(1, _group_bytes(groups.metadata, group, columns))
    )
    batches = parquet.iter_batches(
        batch_size=rows, row_groups=[group], columns=list(columns), use_threads=False
    )
    empty = (
        pa.table({}) if not columns else parquet.schema_arrow.empty_table().select(list(columns))
    )
    return _Stream(group=group, columns=columns, position=0, held=empty, batches=iter(batches))


def _group_bytes(metadata: pq.FileMetaData, group: int, columns: tuple[str, ...] | None) -> int:
    """Decoded bytes of the columns that are read."""
    info = metadata.row_group(group)
    chunks = [info.column(i) for i in range(info.num_columns)]
    return sum(
        c.total_uncompressed_size
        for c in chunks
        if columns is None or c.path_in_schema.split(".")[0] in columns
    )


def _check_magic(file: FileRef) -> None:
    head = read_range(file, 0, min(4, file.num_bytes))
    if head == b"PARE":
        raise SourceError(
            at=file.path, problem="is an encrypted parquet file", fix="Decrypt it first."
        )
    if head != MAGIC:
        raise SourceError(
            at=file.path,
            problem=f"not a parquet file: it begins with {head!r}, not b'PAR1'",
            fix="Check its type.",
        )
    tail = read_range(file, max(0, file.num_bytes - 4), file.num_bytes)
    if tail != MAGIC or file.num_bytes < 12:
        raise SourceError(
            at=file.path,
            problem="truncated: it begins as parquet but ends without the footer's b'PAR1'",
            fix="Copy or write it again.",
        )


class _arrow_errors:
    """Failures of the parquet library told as SourceErrors that name the file (and row group)."""

    def __init__(self, file: FileRef, group: int | None = None) -> None:
        self._at = place(file.path) if group is None else f"{file.path}, row group {group}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (pa.ArrowException, OSError)) and not isinstance(error, SourceError):
            raise SourceError(
                at=self._at,
                problem=f"damaged parquet: {error}",
                fix="Copy or write the file again.",
            ) from error
