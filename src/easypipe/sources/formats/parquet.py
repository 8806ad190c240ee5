"""Parquet files: small row groups are decoded whole, large ones are read on from kept places.

A range that covers a row group decodes it. A range that covers a part of it keeps a place there for
its neighbours. That is the decoded group if it is small, otherwise the position that reading has
reached, so that memory is bounded however large row groups are.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from easypipe.core.schema import offsets_of
from easypipe.core.values import Int64
from easypipe.sources.base import FileOptions, FileSource, Rows, Survey
from easypipe.sources.files import DataFiles, library_errors, open_binary, read_range
from easypipe.sources.refs import FileRef
from easypipe.sources.schemas import plain_schema

# a group up to this size (decoded bytes of the columns that are read) is decoded whole
SMALL_GROUP_BYTES = 32 << 20
STREAMED_BYTES = 4 << 20  # bytes of a large group that are decoded at a time
KEPT_PLACES = 4  # how many places are kept per file
CUT_BYTES = 16 << 20  # a large group has cuts about this far apart
JUMP_BYTES = 1 << 16  # the fewest bytes of a remote read; the library asks for whole column chunks
MAGIC = b"PAR1"


@dataclass(frozen=True)
class _Groups:
    """The footer of a file, and the first row of each of its groups."""

    metadata: pq.FileMetaData
    first_row: Int64  # Int64[groups + 1]


@dataclass
class _Place:
    """A place in a row group, from which reading can continue.

    Attributes:
        group: The number of the group.
        columns: The columns that are read.
        position: The row of the group at which `held` begins.
        held: Rows that are decoded.
        batches: The batches after them.
    """

    group: int
    columns: tuple[str, ...]
    position: int
    held: pa.Table
    batches: Iterator[pa.RecordBatch]


class ParquetShardedSource(FileSource):
    """The rows of parquet files. Options are those of FileSource."""

    kind = "parquet"

    def __init__(self, data_files: DataFiles, **options: Unpack[FileOptions]) -> None:
        super().__init__(data_files, **options)
        self._reading = threading.Lock()
        self._places: dict[str, tuple[threading.Lock, list[_Place]]] = {}  # by path

    def _survey(self, file: FileRef) -> Survey:
        """Reads the footer, and places cuts at row groups and within large ones."""
        _check_magic(file)
        with open_binary(file, JUMP_BYTES) as opened, _library_errors(file):
            parquet = pq.ParquetFile(opened)
            metadata, schema = parquet.metadata, parquet.schema_arrow
        rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        first = offsets_of(rows)
        cuts: list[int] = []
        for group, count in enumerate(rows):
            pieces = max(1, min(count, _group_bytes(metadata, group, self.columns) // CUT_BYTES))
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

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        """Reads consecutive whole groups at once, and parts of groups through their places."""
        groups: _Groups = survey.detail
        columns = tuple(fields.names)
        parts: list[pa.Table] = []
        whole: list[int] = []  # consecutive groups that are read from end to end
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
                parts += _whole(file, groups, columns, whole)
                parts.append(self._part(file, groups, columns, group, a, b))
                whole = []
            group += 1
        parts += _whole(file, groups, columns, whole)
        return Rows(pa.concat_tables(parts))

    def _part(
        self, file: FileRef, groups: _Groups, columns: tuple[str, ...], group: int, a: int, b: int
    ) -> pa.Table:
        """Returns rows `a` to `b` of a group, read from the nearest kept place before them."""
        with self._reading:
            lock, places = self._places.setdefault(file.path, (threading.Lock(), []))
        with lock, _library_errors(file, group):
            usable = [
                p for p in places if p.group == group and p.columns == columns and p.position <= a
            ]
            if usable:
                place = max(usable, key=lambda p: p.position)
                places.remove(place)
            else:
                place = _open_place(file, groups, columns, group)
            taken: list[pa.Table] = []
            while True:
                end = place.position + place.held.num_rows
                if end > a:
                    taken.append(
                        place.held.slice(
                            max(a - place.position, 0), min(end, b) - max(a, place.position)
                        )
                    )
                if end >= b:
                    break
                place.position = end
                place.held = pa.Table.from_batches([next(place.batches)])
            if not _is_small(groups, group, columns):  # a small group stays decoded
                place.held = place.held.slice(b - place.position)
                place.position = b
            places.append(place)
            del places[:-KEPT_PLACES]
        return pa.concat_tables(taken)


def _decode(file: FileRef, groups: _Groups, columns: tuple[str, ...], run: list[int]) -> pa.Table:
    """Returns the decoded columns of some groups."""
    with open_binary(file, JUMP_BYTES) as opened:
        parquet = pq.ParquetFile(opened, metadata=groups.metadata, pre_buffer=True)
        return parquet.read_row_groups(run, columns=list(columns), use_threads=len(columns) > 1)


def _whole(
    file: FileRef, groups: _Groups, columns: tuple[str, ...], run: list[int]
) -> list[pa.Table]:
    """Returns consecutive groups from end to end.

    They are decoded into one array if possible, so that nothing is copied together afterwards.
    """
    if len(run) > 1 and not file.remote:
        # on failure they are read one by one below, so that the damaged one is named
        with contextlib.suppress(pa.ArrowException, OSError):
            return [_decode(file, groups, columns, run)]
    tables: list[pa.Table] = []
    for group in run:
        with _library_errors(file, group):
            tables.append(_decode(file, groups, columns, [group]))
    return tables


def _open_place(file: FileRef, groups: _Groups, columns: tuple[str, ...], group: int) -> _Place:
    """Returns a place at the beginning of a group; a small group is decoded whole."""
    if _is_small(groups, group, columns):
        return _Place(group, columns, 0, _decode(file, groups, columns, [group]), iter(()))
    parquet = pq.ParquetFile(
        open_binary(file, JUMP_BYTES),
        metadata=groups.metadata,
        pre_buffer=False,
        buffer_size=1 << 20,
    )
    num_rows, size = (
        groups.metadata.row_group(group).num_rows,
        _group_bytes(groups.metadata, group, columns),
    )
    batches = parquet.iter_batches(
        batch_size=max(1, num_rows * STREAMED_BYTES // max(1, size)),
        row_groups=[group],
        columns=list(columns),
        use_threads=False,
    )
    empty = (
        pa.table({}) if not columns else parquet.schema_arrow.empty_table().select(list(columns))
    )
    return _Place(group, columns, 0, empty, iter(batches))


def _is_small(groups: _Groups, group: int, columns: tuple[str, ...]) -> bool:
    return _group_bytes(groups.metadata, group, columns) <= SMALL_GROUP_BYTES


def _group_bytes(metadata: pq.FileMetaData, group: int, columns: tuple[str, ...] | None) -> int:
    """Returns the decoded bytes of the columns that are read; None means all columns."""
    info = metadata.row_group(group)
    chunks = [info.column(i) for i in range(info.num_columns)]
    return sum(
        c.total_uncompressed_size
        for c in chunks
        if columns is None or _is_within(c.path_in_schema, columns)
    )


def _is_within(path: str, columns: tuple[str, ...]) -> bool:
    """Returns whether a chunk is of one of these columns, whose names may have dots."""
    return any(top in columns for top in itertools.accumulate(path.split("."), "{}.{}".format))


def _check_magic(file: FileRef) -> None:
    """Raises SourceError if a file does not begin and end as parquet does."""
    head = read_range(file, 0, min(4, file.num_bytes))
    if head == b"PARE":
        raise file.error("is an encrypted parquet file", "Decrypt it first.")
    if head != MAGIC:
        raise file.error(
            f"not a parquet file: it begins with {head!r}, not b'PAR1'", "Check its type."
        )
    tail = read_range(file, max(0, file.num_bytes - 4), file.num_bytes)
    if tail != MAGIC or file.num_bytes < 12:
        raise file.error(
            "truncated: it begins as parquet but ends without the footer's b'PAR1'",
            "Copy or write it again.",
        )


def _library_errors(file: FileRef, group: int | None = None) -> AbstractContextManager[None]:
    at = file.path if group is None else f"{file.path}, row group {group}"
    return library_errors(at, "parquet")
