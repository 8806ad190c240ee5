"""Line files read forward, without counting their rows first: what streaming opens in place of the
indexed readers.

A row is known by the plain byte at which its line begins: that is its `__row_number__`, and "rows"
a to b are the lines that begin in those bytes. So a range can be read before anything is known of
what stands in front of it, and the law of stateless reads holds as it does for counted rows. A
compressed file is entered at its start, or where a zstd frame or gzip member was met before.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import SourceError, require_columns
from easypipe.core.protocols import Reject, Scan, Shard, Source, SourceInfo
from easypipe.core.remote import StorageOptions
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.base import READER_VERSION, OnError
from easypipe.sources.files import (
    DataFiles,
    FileRef,
    compression_of,
    format_of,
    read_range,
    resolve,
)
from easypipe.sources.formats import jsonlines, txt
from easypipe.sources.formats.jsontypes import Observer, schema_of
from easypipe.sources.formats.records import MAX_RECORD_BYTES, Records, frozen, read_head
from easypipe.sources.formats.scanners import split_lines
from easypipe.sources.formats.streams import (
    START,
    ByteStream,
    Restart,
    check_compression,
    open_stream,
)
from easypipe.sources.schemas import column

log = logging.getLogger("easypipe")

HEAD_BYTES = 1 << 20  # of the first file, from which the columns of JSON lines follow
BLOCK_BYTES = 1 << 20  # plain bytes of a compressed file that are kept together
KEPT_BLOCKS = 128  # of all compressed files of a source
BEHIND_BYTES = 1 << 16  # read past a range at first, for the end of its last line
BOM = b"\xef\xbb\xbf"
_NOTHING = memoryview(b"")


class ForwardSource(Source):
    """Rows of JSON lines or plain text whose numbers are byte offsets.
    One shard per file.

    A plain file's shard has as many "rows" as the file has bytes; that of a compressed one has
    None, and `at_end` says where it ends. Columns of JSON lines are those of the first HEAD_BYTES
    of the first file that has rows there; one that is null throughout them is taken for text.
    Rejects and errors are those of the indexed readers, with bytes in the place of rows. Thread
    safe.
    num_rows: only the first so many lines, over the files in order. Where they end is found by
    reading them once.
    """

    def __init__(
        self,
        files: Sequence[FileRef],
        kind: str,
        *,
        columns: Sequence[str] | None = None,
        on_error: OnError = "error",
        num_rows: int | None = None,
    ) -> None:
        self.files = tuple(files)
        self.kind = kind
        self.columns = None if columns is None else tuple(columns)
        self.on_error: OnError = on_error
        self.num_rows = num_rows
        self.exact: tuple[str, ...] = ()
        self._blocks = _Blocks()

    @cached_property
    def _data(self) -> pa.Schema:
        """The columns, without ROW_NUMBER."""
        if self.kind == "txt":
            found = pa.schema([pa.field(txt.TEXT, pa.large_string())])
        else:
            found = next(filter(None, map(self._columns_of, self.files)), pa.schema([]))
        require_columns(self.columns or (), found.names, self.files[0].path)
        return (
            found
            if self.columns is None
            else pa.schema([found.field(name) for name in self.columns])
        )

    def _columns_of(self, file: FileRef) -> pa.Schema | None:
        """The columns of the first rows of a file of JSON lines; None where it begins with none."""
        check_compression(file)
        num_bytes, head = HEAD_BYTES, read_head(file, HEAD_BYTES)
        # the first line is longer
        while b"\n" not in head and len(head) == num_bytes < MAX_RECORD_BYTES:
            num_bytes *= 4
            head = read_head(file, num_bytes)
        stop = head.rfind(b"\n") + 1 or len(head)
        observer = Observer(file.path, self.columns)
        piece = _split(head[:stop], len(BOM) if head.startswith(BOM) else 0)
        observer(piece.data, piece.starts, piece.ends)
        kinds = schema_of(observer.facts(), self.exact, known=False)
        return (
            pa.schema(
                [
                    pa.field(f.name, pa.large_string() if pa.types.is_null(f.type) else f.type)
                    for f in kinds
                ]
            )
            if len(kinds)
            else None
        )

    @property
    def schema(self) -> pa.Schema:
        return self._data.append(pa.field(ROW_NUMBER, pa.int64()))

    @property
    def shards(self) -> Sequence[Shard]:
        return self._shards

    @cached_property
    def _shards(self) -> tuple[Shard, ...]:
        sizes = [f.num_bytes for f in self.files] if self.num_rows is None else self._cuts
        return tuple(
            Shard(
                name=f.path,
                num_rows=None if compression_of(f.path) else size,
                num_bytes=min(f.num_bytes, size),
            )
            for f, size in zip(self.files, sizes, strict=False)
        )

    @cached_property
    def _cuts(self) -> tuple[int, ...]:
        """Of the files that hold the first `num_rows` lines: the plain byte behind the last of
        them.
        """
        assert self.num_rows is not None
        left, cuts = self.num_rows, []
        for file in self.files:
            position, open_line = 0, False
            while left and (data := self._fetch(file, position, position + BLOCK_BYTES)):
                ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
                if len(ends) >= left:
                    position, left, open_line = position + int(ends[left - 1]) + 1, 0, False
                    break
                position, left, open_line = position + len(data), left - len(ends), data[-1] != 10
            cuts.append(position)
            left -= open_line  # the last line of a file needs no end
            if not left:
                break
        return tuple(cuts)

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(rows_are_bytes=True)

    @property
    def fingerprint(self) -> str:
        columns = None if self.columns is None else list(self.columns)
        more = [] if self.num_rows is None else [self.num_rows]
        return digest(
            "forward",
            READER_VERSION,
            self.kind,
            columns,
            [file.digest for file in self.files],
            *more,
        )

    def select(self, columns: Sequence[str]) -> ForwardSource:
        """The same rows with only `columns`."""
        twin = copy.copy(self)
        twin.__dict__.pop("_data", None)
        twin.columns = tuple(columns)
        return twin

    def exactly(self, columns: Sequence[str]) -> ForwardSource:
        """The same rows, in which lists and objects of `columns` are JSON text: what types those
        that follow have is not known.
        """
        twin = copy.copy(self)
        twin.__dict__.pop("_data", None)
        twin.exact = tuple(columns)
        return twin

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self.scan(shard, start, stop).batch

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """The lines that begin in plain bytes `start` to `stop`; of a compressed file `stop` may
        lie behind its end.
        """
        file = self.files[shard]
        if not 0 <= start <= stop:
            raise SourceError(
                at=file.path,
                problem=f"bytes {start}:{stop} were asked for",
                fix="Give a range that ascends.",
            )
        stop = stop if self.num_rows is None else min(stop, self._cuts[shard])
        piece = self._lines(file, start, stop) if start <= stop else None
        if piece is None:
            return Scan(
                pa.RecordBatch.from_arrays(
                    [pa.nulls(0, field.type) for field in self.schema], schema=self.schema
                ),
                (),
            )
        if self.kind == "txt":
            text, kept, rejects = txt._lines(piece)
            arrays = [text]
        else:
            table, kept, rejects = jsonlines.parse(piece, self._data, lines_already=True)
            arrays = [column(table.column(field.name).chunks, field.type) for field in self._data]
        places = piece.starts + piece.offset
        rejects = tuple(
            dataclasses.replace(reject, row=int(places[reject.row])) for reject in rejects
        )
        bad = next((reject for reject in rejects if not reject.benign), None)
        if bad is not None and self.on_error == "error":
            raise self.refusal(shard, bad)
        numbers = pa.array(places[kept])
        return Scan(pa.RecordBatch.from_arrays([*arrays, numbers], schema=self.schema), rejects)

    def at_end(self, shard: int, position: int) -> bool:
        """Whether no plain byte stands at `position` or behind it."""
        file = self.files[shard]
        if self.num_rows is not None:
            return position >= self._cuts[shard]
        if not compression_of(file.path):
            return position >= file.num_bytes
        return not self._blocks.fetch(file, position, position + 1)

    def refusal(self, shard: int, reject: Reject) -> SourceError:
        return SourceError(
            at=f"{self.files[shard].path}, line at byte {reject.row}",
            problem=reject.detail or reject.reason,
            fix="Correct the file, or read it with on_error='skip'.",
        )

    def raw(self, shard: int, row: int) -> str | None:
        piece = self._lines(self.files[shard], row, row + 1)
        return None if piece is None else piece.record(0).decode("utf-8", "replace").strip()

    def _lines(self, file: FileRef, start: int, stop: int) -> Records | None:
        """The lines that begin in [start, stop), whole; None where none does."""
        begin = max(0, start - 1)  # the byte before tells whether a line begins at `start`
        behind = BEHIND_BYTES
        while True:
            data = self._fetch(file, begin, stop + behind)
            ended = len(data) < stop + behind - begin
            first = data.find(b"\n", 0, stop - 1 - begin) + 1 if start else 0
            if (start and not first) or first + begin >= begin + len(data):
                return None
            last = data.find(b"\n", stop - 1 - begin) + 1
            if last or ended:
                break
            if behind > MAX_RECORD_BYTES:
                problem = f"a line of more than {MAX_RECORD_BYTES >> 20} MiB stands here"
                raise SourceError(
                    at=f"{file.path}, byte {stop}", problem=problem, fix="Write one row a line."
                )
            behind *= 4
        skip = len(BOM) if not start and data.startswith(BOM) else 0
        piece = _split(data[first + skip : last or len(data)], 0)
        return piece._replace(offset=begin + first + skip) if len(piece.starts) else None

    def _fetch(self, file: FileRef, start: int, stop: int) -> bytes:
        """Plain bytes, as many of them as there are."""
        if compression_of(file.path):
            return self._blocks.fetch(file, start, stop)
        stop = min(stop, file.num_bytes)
        return read_range(file, start, stop) if start < stop else b""


def open_forward(
    data_files: DataFiles,
    type: str | None = None,
    *,
    on_error: OnError = "error",
    storage_options: StorageOptions = None,
    num_rows: int | None = None,
) -> ForwardSource | None:
    """The files of `data_files` where they can be read forward without being counted; None for
    formats that need their index.

    Those are JSON that is one array, CSV, files in folders that name values, and whatever knows its
    rows anyway (parquet, arrow).
    """
    files = resolve(data_files, storage_options, extensions=None if type is None else [type])
    kinds = {type or format_of(file.path) for file in files}
    if (
        len(kinds) != 1 or not kinds <= {"json", "txt"} or any(file.partitions for file in files)
    ):  # folders that name values are columns too
        return None
    kind = str(kinds.pop())
    empty = next((file for file in files if file.num_bytes == 0), None)
    if empty is not None:
        raise SourceError(
            at=empty.path, problem="is empty (0 bytes)", fix="Remove it from data_files."
        )
    if kind == "json" and read_head(files[0], 1 << 12).removeprefix(BOM).lstrip(
        b" \t\r\n"
    ).startswith(b"["):
        return None
    return ForwardSource(files, kind, on_error=on_error, num_rows=num_rows)


def _split(text: bytes, skip: int) -> Records:
    data = frozen(text[skip:] if skip else text)
    room = int(np.count_nonzero(data == 10)) + 1
    starts, ends = np.empty(room, np.int64), np.empty(room, np.int64)
    count, _, _ = split_lines(data, True, starts, ends)
    return Records(data, starts[:count], ends[:count], 0, skip)


class _Open:
    """A compressed file that is read forward. `block`: the next one of the stream. `end`: plain
    bytes in all, once that is known.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stream: ByteStream | None = None
        self.block = 0
        self.restarts: dict[int, Restart] = {}
        self.end: int | None = None
        self.warned = False


class _Blocks:
    """Plain bytes of compressed files by range. The streams of a process ask for neighbouring
    blocks: each is decompressed once for all.

    A block that was forgotten, or that a restored run begins with, costs decompression from the
    last known restart, at worst the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, _Open] = {}
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()

    def fetch(self, file: FileRef, start: int, stop: int) -> bytes:
        pieces = []
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            first = number * BLOCK_BYTES
            pieces.append(self._block(file, number)[max(0, start - first) : stop - first])
        return b"".join(pieces)

    def _block(self, file: FileRef, number: int) -> memoryview:
        with self._lock:
            opened = self._files.setdefault(file.path, _Open())
            data = self._known(file, number)
        if data is not None:
            return data
        with opened.lock:
            with self._lock:
                data = self._known(file, number)
            if data is not None:
                return data
            if opened.end is not None and number * BLOCK_BYTES >= opened.end:
                return _NOTHING
            if opened.stream is None or opened.block > number:
                self._enter(file, opened, number)
            while True:
                data = _take(opened, BLOCK_BYTES)
                here, opened.block = opened.block, opened.block + 1
                if len(data) < BLOCK_BYTES:
                    opened.end = here * BLOCK_BYTES + len(data)
                    assert opened.stream is not None
                    opened.stream.close()
                    opened.stream = None
                with self._lock:
                    self._kept[file.path, here] = data
                    while len(self._kept) > KEPT_BLOCKS:
                        self._kept.popitem(last=False)
                if here == number:
                    return data
                if opened.end is not None:
                    return _NOTHING

    def _known(self, file: FileRef, number: int) -> memoryview | None:
        data = self._kept.get((file.path, number))
        if data is not None:
            self._kept.move_to_end((file.path, number))
        return data

    def _enter(self, file: FileRef, opened: _Open, number: int) -> None:
        """Opens the stream at the last restart before the block."""
        if opened.stream is not None:
            opened.stream.close()
        target = number * BLOCK_BYTES
        restart = max(
            (r for r in opened.restarts.values() if r.plain <= target),
            key=lambda r: r.plain,
            default=START,
        )
        if target - restart.plain > BLOCK_BYTES and not opened.warned:
            opened.warned = True
            log.warning(
                "%s: %s data cannot be entered in the middle: reading from plain byte %d to get to "
                "%d",
                file.path, compression_of(file.path), restart.plain, target,
            )  # fmt: skip
        if not opened.restarts and opened.end is None:
            check_compression(file)
        opened.stream = open_stream(file, restart)
        first = restart.plain // BLOCK_BYTES
        # what is left of the block in which the restart lies is of no use
        if restart.plain % BLOCK_BYTES:
            first += 1
            _take(opened, first * BLOCK_BYTES - restart.plain)
        opened.block = first


def _take(opened: _Open, count: int) -> memoryview:
    """The next `count` plain bytes, fewer only at the end."""
    stream = opened.stream
    assert stream is not None
    buffer = np.empty(count, np.uint8)
    view, have = memoryview(buffer.data), 0
    while have < count:
        got = stream.readinto(view[have:])
        if not got:
            break
        have += got
    for restart in stream.restarts[-4:]:  # they lie at least a block apart
        opened.restarts[restart.plain] = restart
    return view[:have]
