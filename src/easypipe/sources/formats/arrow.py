"""Arrow IPC files and streams (also feather version 2), distinguished by content; offset checks."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from easypipe.core.errors import SourceError, raising
from easypipe.core.schema import offsets_of
from easypipe.core.values import Int64, Integers
from easypipe.sources.base import FileSource, Rows, Survey
from easypipe.sources.files import library_errors, open_binary, open_local, read_range
from easypipe.sources.refs import FileRef
from easypipe.sources.schemas import holds, plain_schema

log = logging.getLogger("easypipe")

FILE_MAGIC = b"ARROW1"
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"  # the end of a stream
COPY = "Copy or write the file again."
STREAM_MAGIC = b"\xff\xff\xff\xff"  # the continuation marker before the first message


@dataclass(frozen=True)
class _Batches:
    """The record batches of a file or stream.

    Attributes:
        first_row: Int64[batches + 1], the first row of each batch, and the number of rows.
        offsets: Where each batch's message begins in a stream; None for the file format.
        schema: The schema as it is stored.
        ended: False for a stream that stops between two messages without its end mark.
        whole: False if only the head of a remote stream was examined (FileRef.head_bytes).
    """

    first_row: Int64
    offsets: list[int] | None
    schema: pa.Schema
    ended: bool = True
    whole: bool = True


class ArrowShardedSource(FileSource):
    """The rows of Arrow IPC files and streams. Options are those of FileSource."""

    kind = "arrow"

    def _survey(self, file: FileRef) -> Survey:
        """Counts the rows of each batch, by the footer of a file or through all of a stream."""
        head = read_range(file, 0, min(8, file.num_bytes))
        with library_errors(file.path, "Arrow data"), _open(file) as opened:
            if head.startswith(FILE_MAGIC):
                tail = read_range(file, file.num_bytes - len(FILE_MAGIC), file.num_bytes)
                if tail != FILE_MAGIC or file.num_bytes < 20:
                    raise file.error(
                        "truncated: an Arrow file without its footer", "Copy or write it again."
                    )
                batches = _survey_file(opened)
            elif head.startswith(STREAM_MAGIC):
                # examining a whole stream on disk costs only a page per batch
                batches = _survey_stream(opened, file.head_bytes if file.remote else None)
                if not batches.ended:
                    log.warning(
                        "%s: an Arrow stream without its end mark: its %d rows in %d batches are "
                        "read; the program that wrote or copied it stopped early, and the rows "
                        "after them are missing",
                        file.path,
                        int(batches.first_row[-1]),
                        len(batches.first_row) - 1,
                    )
            elif head.startswith(b"FEA1"):
                raise file.error(
                    "is feather version 1", "Write it again with pyarrow.feather (version 2)."
                )
            else:
                raise file.error(
                    f"neither an Arrow file nor a stream: it begins with {head!r}",
                    "Check its type.",
                )
        cuts = tuple(int(row) for row in np.unique(batches.first_row[:-1])) or (0,)
        schema, rows = plain_schema(batches.schema, file.path), int(batches.first_row[-1])
        return Survey(
            num_rows=rows,
            total_rows=rows if batches.whole else None,
            cuts=cuts,
            schema=schema,
            detail=batches,
            ended=batches.ended,
        )

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        batches: _Batches = survey.detail
        first = int(np.searchsorted(batches.first_row, start, side="right")) - 1
        last = int(np.searchsorted(batches.first_row, stop, side="left"))
        with library_errors(file.path, "Arrow data"), _open(file) as opened:
            parts = _read(opened, batches, fields.names, first, last)
            for batch in parts:
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    with raising(
                        SourceError, file.path, f"damaged column {name!r}", COPY, pa.ArrowException
                    ):
                        column.validate()
                        _require_offsets(column)
        table = pa.Table.from_batches(parts)
        return Rows(table.slice(start - int(batches.first_row[first]), stop - start))


def _survey_file(opened: pa.NativeFile) -> _Batches:
    schema = pa.ipc.open_file(opened).schema
    opened.seek(0)
    reader = pa.ipc.open_file(opened, options=_only(schema, []))
    counts = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    return _Batches(offsets_of(counts), None, schema)


def _survey_stream(opened: pa.NativeFile, limit: int | None) -> _Batches:
    """Counts the rows of a stream, up to byte `limit` if one is given."""
    schema = pa.ipc.open_stream(opened).schema
    opened.seek(0)
    reader = pa.ipc.open_stream(opened, options=_only(schema, []))
    counts, offsets = [], []
    while True:
        offset = opened.tell()
        if limit is not None and offset > limit:
            return _Batches(offsets_of(counts), offsets, schema, whole=False)
        try:
            counts.append(reader.read_next_batch().num_rows)
        except StopIteration:  # the library stops at the end mark or at the end of the file
            opened.seek(offset)
            # old writers leave out the first half of the mark
            ended = opened.read(len(END_MARK)).endswith(END_MARK[4:])
            return _Batches(offsets_of(counts), offsets, schema, ended=ended)
        offsets.append(offset)


def _read(
    opened: pa.NativeFile, batches: _Batches, names: list[str], first: int, last: int
) -> list[pa.RecordBatch]:
    """Returns the batches `first` to `last` with the named columns."""
    options = _only(batches.schema, names)
    if batches.offsets is None:
        reader = pa.ipc.open_file(opened, options=options)
        return [reader.get_batch(i) for i in range(first, last)]
    # a batch may need any dictionary before it, so the stream is read from its start
    if any(holds(field.type, pa.types.is_dictionary) for field in batches.schema):
        reader = pa.ipc.open_stream(opened, options=options)
        for _ in range(first):
            reader.read_next_batch()
        return [reader.read_next_batch() for _ in range(first, last)]
    parts = []
    for i in range(first, last):
        opened.seek(batches.offsets[i])
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(opened), batches.schema)
        parts.append(batch.select(names))
    return parts


def _require_offsets(array: pa.Array) -> None:
    """Checks that every list and text, at any depth, is within the array that it is a slice of.

    The library checks only the first and the last offset, and then reads wherever the others point.

    Raises:
        ArrowInvalid: A list or text is not.
    """
    kind, t = array.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _require_offsets(array.storage)
    inside: list[pa.Array] = []
    if t.is_struct(kind):
        inside = [array.field(i) for i in range(kind.num_fields)]
    elif t.is_fixed_size_list(kind):
        inside = [array.values]
    elif t.is_dictionary(kind):
        inside = [array.dictionary]
    elif t.is_list(kind) or t.is_large_list(kind) or t.is_map(kind):
        inside = [array.values]
        _require_ascending(array.offsets.to_numpy())
    elif kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
        ends = array.buffers()[1]
        if len(array):
            dtype = np.int64 if t.is_large_string(kind) or t.is_large_binary(kind) else np.int32
            edges = np.frombuffer(ends, dtype)[array.offset : array.offset + len(array) + 1]
            _require_ascending(edges)
    elif not t.is_primitive(kind):
        array.validate(full=True)
    for one in inside:
        _require_offsets(one)
    return None


def _require_ascending(edges: Integers) -> None:
    if (edges[1:] < edges[:-1]).any():
        raise pa.ArrowInvalid("offsets point outside of its values")


def _only(schema: pa.Schema, names: list[str]) -> pa.ipc.IpcReadOptions:
    """Returns options that read these columns; if there are none, the cheapest one.

    The library treats an empty list as all columns.
    """
    wanted = [i for i, name in enumerate(schema.names) if name in names]
    if not wanted and len(schema):
        flat = [
            i
            for i, field in enumerate(schema)
            if field.type.num_fields == 0 and pa.types.is_primitive(field.type)
        ]
        wanted = flat[:1] or [0]
    return pa.ipc.IpcReadOptions(included_fields=wanted)


def _open(file: FileRef) -> pa.NativeFile:
    if file.remote:
        return pa.PythonFile(open_binary(file), mode="r")
    # open_local refuses a file that changed, because the map below must not meet a shorter one
    with open_local(file):
        return pa.memory_map(os.fsencode(file.here.path), "r")
