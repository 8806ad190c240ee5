"""Writes parquet files of integer lists (tokens) in about a third of pyarrow's time.

pyarrow visits every value to find its levels (where lists begin, what is null). For token lists,
the levels follow from the offsets: two runs per document. Values are copied unchanged from Arrow's
buffers into pages, and each page is compressed separately. The schema is pyarrow's: the footer of
an empty file that pyarrow wrote, with the row groups added. The format is described at
github.com/apache/parquet-format; footers use Thrift's compact protocol.

Parquet has no 16-bit integers: plain pages hold four bytes for each, which the codec must process.
A dictionary 0, 1, 2, ... makes every value its own index, and bit-packed 16-bit indices are the
same bytes as in Arrow.

In this file:
    level: A small integer for each value. A repetition level of 0 begins a row; a definition level
        says how much of list and value exists.
    run: Equal levels in sequence: varint(length * 2), then the level in one byte. Packed indices
        are varint(groups of eight * 2 + 1), then the indices.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import zstandard

from easypipe.core.values import Array, Int64, UInt8

PAGE_VALUES = 1 << 18
RUN_ROWS = 1 << 13  # lists whose runs are written together
ZSTD_LEVEL = 1  # pyarrow's default

# A dictionary must have at least this many values per entry; otherwise it is larger than what it
# saves.
DICTIONARY_SHARE = 32

_PLAIN, _RLE, _RLE_DICTIONARY = 0, 3, 8
_INT32, _INT64 = 1, 2
_CODEC_NUMBERS = {"none": 0, "gzip": 2, "zstd": 6, "lz4": 7}  # lz4 is LZ4_RAW, as in pyarrow
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
_NUM_ROWS, _ROW_GROUPS = 3, 4  # fields of the footer


def holds_lists_of_integers(schema: pa.Schema) -> bool:
    """Whether this module can write such columns."""
    lists = [f.type for f in schema if pa.types.is_list(f.type) or pa.types.is_large_list(f.type)]
    return (
        bool(lists)
        and len(lists) == len(schema)
        and all(pa.types.is_integer(kind.value_type) for kind in lists)
    )


class ListsWriter:
    """A writer of batches with such columns to a binary sink; each batch becomes a row group.

    `close()` ends the file and leaves the sink open.

    Args:
        sink: The binary sink.
        schema: The columns.
        codec: none, gzip, zstd or lz4.
    """

    def __init__(self, sink: Any, schema: pa.Schema, codec: str) -> None:
        self._sink, self._schema = sink, schema
        self._codec, self._compress = _CODEC_NUMBERS[codec], _compressor(codec)
        self._footer, self._paths = _template(schema)
        self._groups: list[bytes] = []
        self._rows = self._at = 0
        self._page_bytes = np.empty(0, np.uint8)  # bytes of the page that is being written
        self._put(b"PAR1")

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes a batch as a row group."""
        chunks, total, compressed = [], 0, 0
        for path, field, column in zip(self._paths, self._schema, batch.columns, strict=True):
            start, count, raw = self._at, 0, 0
            values = column.flatten()  # without the hidden values of null lists
            entries, wide = _entries(values), column.type.value_type.bit_width > 32
            if entries:
                raw += self._page([np.arange(entries, dtype=np.int32)], _dictionary_page(entries))
            pages = self._at
            for levels, size, present in _pages(column, values, field):
                body = (
                    _indices(present)
                    if entries
                    else [present.astype(np.int64 if wide else np.int32)]
                )
                encoding = _RLE_DICTIONARY if entries else _PLAIN
                raw += self._page([levels, *body], _data_page(size, encoding))
                count += size
            kind = _INT64 if wide else _INT32
            chunks.append(self._column_chunk(path, kind, count, raw, start, pages))
            total, compressed = total + raw, compressed + self._at - start
        group = (
            _Struct()
            .list(1, _STRUCT, chunks)
            .int(2, total, _I64)
            .int(3, batch.num_rows, _I64)
            .int(6, compressed, _I64)
        )
        self._groups.append(group.done())
        self._rows += batch.num_rows

    def _column_chunk(
        self, path: str, kind: int, count: int, raw: int, start: int, pages: int
    ) -> bytes:
        """Returns the footer's entry for a column that was just written.

        Args:
            path: The path of the column in the parquet schema.
            kind: Its parquet type.
            count: Its entries.
            raw: The bytes of all pages before compression.
            start: Where it begins in the file; its dictionary is there, if it has one.
            pages: Where its first page of data is.
        """
        names = [_varint(len(name)) + name for name in (part.encode() for part in path.split("."))]
        used = [_PLAIN, _RLE] if pages == start else [_PLAIN, _RLE, _RLE_DICTIONARY]
        meta = (
            _Struct()
            .int(1, kind)
            .list(2, _I32, [_zigzag(encoding) for encoding in used])
            .list(3, _BINARY, names)
            .int(4, self._codec)
        )
        meta.int(5, count, _I64).int(6, raw, _I64).int(7, self._at - start, _I64)
        meta.int(9, pages, _I64)
        if pages != start:
            meta.int(11, start, _I64)
        return _Struct().int(2, 0, _I64).struct(3, meta).done()

    def _page(self, parts: list[Any], kind: tuple[int, int, _Struct]) -> int:
        """Writes a page.

        Args:
            parts: Its contents.
            kind: (its number, the field of its own header, that header).

        Returns:
            Its bytes before compression, header included.
        """
        plain = [
            np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part.view(np.uint8)
            for part in parts
        ]
        size = sum(map(len, plain))
        if size > len(self._page_bytes):
            self._page_bytes = np.empty(size, np.uint8)
        data = np.concatenate(plain, out=self._page_bytes[:size])
        packed = self._compress(data.data)
        number, field, own = kind
        header = (
            _Struct()
            .int(1, number)
            .int(2, data.nbytes)
            .int(3, len(packed))
            .struct(field, own)
            .done()
        )
        self._put(header)
        self._put(packed)
        return len(header) + data.nbytes

    def close(self) -> None:
        """Writes the footer."""
        footer = _Struct()
        for number in sorted({*self._footer, _ROW_GROUPS}):
            if number == _NUM_ROWS:
                footer.int(number, self._rows, _I64)
            elif number == _ROW_GROUPS:
                footer.list(number, _STRUCT, self._groups)
            else:
                footer.copy(number, *self._footer[number])
        text = footer.done()
        self._put(text)
        self._put(struct.pack("<I", len(text)) + b"PAR1")

    def _put(self, data: Any) -> None:
        self._sink.write(data)
        self._at += len(data)


def _compressor(codec: str) -> Callable[[memoryview], Any]:
    """Returns the function that compresses the bytes of a page."""
    if codec == "none":
        return lambda page: page
    if codec == "zstd":
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress
    return pa.Codec("lz4_raw" if codec == "lz4" else codec).compress


def _entries(values: Any) -> int:
    """Returns the size of a dictionary 0, 1, 2, ... of the values; 0 if plain is better."""
    if values.type not in (pa.uint8(), pa.uint16()) or len(values) == values.null_count:
        return 0
    entries = int(pc.call_function("max", [values]).as_py()) + 1
    return entries if entries * DICTIONARY_SHARE <= len(values) else 0


def _indices(values: Array) -> list[Any]:
    """Returns values as indices of a dictionary in which each value is its own index."""
    groups = -(-len(values) // 8)
    head = bytes([8 * values.itemsize]) + (_varint(groups << 1 | 1) if groups else b"")
    return [head, np.ascontiguousarray(values), bytes((8 * groups - len(values)) * values.itemsize)]


def _pages(column: Any, values: Any, field: pa.Field) -> Iterable[tuple[bytes, int, Array]]:
    """Yields pages that begin with a row: (levels, number of entries, values that are not null).

    Args:
        column: The lists.
        values: The values of the whole column.
        field: The field of the column.
    """
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    borders = np.searchsorted(ends, np.arange(PAGE_VALUES, ends[-1], PAGE_VALUES))
    edges = np.unique(np.concatenate([[0], borders, [len(lengths)]]))
    entries = np.maximum(lengths, 1)  # an empty or null list is one entry without a value
    first, stop, runs, places = 0, 0, b"", np.zeros(1, np.int64)
    for a, b in itertools.pairwise(edges.tolist()):
        # a page has few long lists, so runs are made for several pages at once
        if b > stop:
            first, stop = (
                a,
                max(b, int(edges[np.searchsorted(edges, a + RUN_ROWS, side="right") - 1])),
            )
            runs, places = _runs(*_repetition(entries[first:stop]))
        repetition = runs[places[2 * (a - first)] : places[2 * (b - first)]]
        part = values.slice(int(ends[a]), int(ends[b] - ends[a]))
        definition = _definition(lengths[a:b], entries[a:b], column.slice(a, b - a), part, field)
        levels = b"".join(struct.pack("<I", len(one)) + one for one in (repetition, definition))
        present = part.drop_null() if part.null_count else part
        yield levels, int(entries[a:b].sum()), present.to_numpy(zero_copy_only=False)


def _repetition(entries: Int64) -> tuple[Int64, UInt8]:
    """Returns (lengths, levels) of two runs for each list: its first entry, and the others."""
    twice = np.empty((len(entries), 2), np.int64)
    twice[:, 0], twice[:, 1] = 1, entries - 1
    return twice.ravel(), np.tile(np.array([0, 1], np.uint8), len(entries))


def _definition(lengths: Int64, entries: Int64, lists: Any, values: Any, field: pa.Field) -> bytes:
    """Returns the definition levels of a page, as runs."""
    empty = int(field.nullable)
    full = empty + 1 + int(field.type.value_field.nullable)
    if lengths.all() and not values.null_count:
        return _varint(int(entries.sum()) << 1) + bytes([full]) if len(entries) else b""
    if not values.null_count and not lists.null_count:
        return _runs(entries, np.where(lengths > 0, full, empty).astype(np.uint8))[0]
    levels = np.repeat(
        np.where(lists.is_valid().to_numpy(zero_copy_only=False), empty, 0).astype(np.uint8),
        entries,
    )
    levels[np.repeat(lengths > 0, entries)] = np.where(
        values.is_valid().to_numpy(zero_copy_only=False), full, full - 1
    )
    starts = np.flatnonzero(np.diff(levels, prepend=255))
    return _runs(np.diff(np.append(starts, len(levels))), levels[starts])[0]


def _runs(lengths: Int64, levels: UInt8) -> tuple[bytes, Int64]:
    """Encodes runs of `lengths` (Int64[n]) with a level each.

    Returns:
        (the bytes, Int64[n + 1] where each run begins); a run of no length takes no bytes.
    """
    there = np.flatnonzero(lengths)
    rest, level = lengths[there] << 1, levels[there]
    width, most = np.full(len(rest), 2), int(rest.max(initial=0))
    for bits in range(7, most.bit_length(), 7):
        width += rest >> bits > 0
    starts = np.zeros(len(lengths) + 1, np.int64)
    starts[there + 1] = width
    np.cumsum(starts, out=starts)
    place, code = starts[there], np.empty(starts[-1], np.uint8)
    while rest.size:  # one byte of each run, and the level after runs that end with it
        more = rest > 127
        code[place] = rest & 127 | more.astype(np.int64) << 7
        code[place[~more] + 1] = level[~more]
        place, rest, level = place[more] + 1, rest[more] >> 7, level[more]
    return code.tobytes(), starts


# The footer.


class _Struct:
    """A Thrift struct, written field by field."""

    def __init__(self) -> None:
        self._bytes, self._last = bytearray(), 0

    def int(self, number: int, value: int, kind: int = _I32) -> _Struct:
        return self.copy(number, kind, _zigzag(value))

    def struct(self, number: int, value: _Struct) -> _Struct:
        return self.copy(number, _STRUCT, value.done())

    def list(self, number: int, kind: int, items: list[bytes]) -> _Struct:
        size = (
            bytes([len(items) << 4 | kind])
            if len(items) < 15
            else bytes([0xF0 | kind]) + _varint(len(items))
        )
        return self.copy(number, _LIST, size + b"".join(items))

    def copy(self, number: int, kind: int, value: bytes) -> _Struct:
        # fields come in order, at most a few numbers apart
        self._bytes += bytes([(number - self._last) << 4 | kind]) + value
        self._last = number
        return self

    def done(self) -> bytes:
        return bytes(self._bytes) + b"\0"


def _data_page(count: int, encoding: int) -> tuple[int, int, _Struct]:
    return 0, 5, _Struct().int(1, count).int(2, encoding).int(3, _RLE).int(4, _RLE)


def _dictionary_page(entries: int) -> tuple[int, int, _Struct]:
    return 2, 7, _Struct().int(1, entries).int(2, _PLAIN)


def _template(schema: pa.Schema) -> tuple[dict[int, tuple[int, bytes]], list[str]]:
    """Returns (the footer of a file without rows, by fields; the path of each column)."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, use_dictionary=False, write_statistics=False):
        pass
    data = sink.getvalue().to_pybytes()
    known = pq.ParquetFile(pa.BufferReader(data)).schema
    text = data[-8 - struct.unpack("<I", data[-8:-4])[0] : -8]
    found: dict[int, tuple[int, bytes]] = {}
    at = number = 0
    while text[at]:
        kind, number = text[at] & 15, number + (text[at] >> 4)
        end = _skip(text, at + 1, kind)
        found[number] = (kind, text[at + 1 : end])
        at = end
    return found, [known.column(i).path for i in range(len(schema))]


def _skip(text: bytes, at: int, kind: int) -> int:
    """Returns the end of a Thrift value that begins at `at`."""
    if kind in (1, 2):  # booleans are in the header of their field
        return at
    if kind == 3:
        return at + 1
    if kind in (4, _I32, _I64):
        return _read_varint(text, at)[1]
    if kind == _BINARY:
        size, at = _read_varint(text, at)
        return at + size
    if kind in (_LIST, 10):
        size, kind, at = text[at] >> 4, text[at] & 15, at + 1
        if size == 15:
            size, at = _read_varint(text, at)
        for _ in range(size):
            at = _skip(text, at, kind)
        return at
    assert kind == _STRUCT, f"thrift kind {kind}"
    while text[at]:
        kind = text[at] & 15
        at = _skip(text, at + 1 if text[at] >> 4 else _read_varint(text, at + 1)[1], kind)
    return at + 1


def _read_varint(text: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (text[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if text[at - 1] < 128:
            return value, at


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _zigzag(value: int) -> bytes:
    return _varint(value << 1)  # no number here is negative
