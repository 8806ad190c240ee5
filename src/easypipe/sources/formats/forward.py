"""ForwardSource: line files read forward for streaming, uncounted, by offset, and where they end.

A row is identified by the plain byte at which its line begins. That is its `__row_number__`, and
"rows" a to b are the lines that begin in those bytes. So a range can be read before anything before
it is known, and the law of stateless reads holds as it does for counted rows. Reading of a
compressed file begins at its start, or at a zstd frame or gzip member that was found before.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import numpy as np
import pyarrow as pa

from easypipe.core import jit
from easypipe.core.config import digest
from easypipe.core.errors import SourceError
from easypipe.core.protocols import Reject, Scan, Shard, SourceInfo
from easypipe.core.remote import StorageOptions
from easypipe.sources.base import READER_VERSION, FileSource, OnError, Rows, Survey
from easypipe.sources.files import DataFiles, resolve
from easypipe.sources.formats import jsonlines, txt
from easypipe.sources.formats.jsontypes import Observer, schema_of
from easypipe.sources.formats.records import BOM, MAX_RECORD_BYTES, Records, frozen, read_head
from easypipe.sources.formats.scanners import split_lines
from easypipe.sources.formats.streams import PlainBytes
from easypipe.sources.refs import FileRef, compression_of, format_of

HEAD_BYTES = 1 << 20  # the columns of JSON lines follow from this many bytes of the first file
BLOCK_BYTES = 1 << 20  # bytes that are read at a time to find where the first lines end
BEHIND_BYTES = 1 << 16  # bytes that are first read after a range, for the end of its last line
PARSERS = {"json": jsonlines.parse_lines, "txt": txt.parse_lines}


class ForwardSource(FileSource):
    """Rows of JSON lines or plain text whose numbers are byte offsets, one shard per file.

    The shard of a plain file has as many "rows" as the file has bytes; that of a compressed file
    has None, and `at_end` says where it ends. Rejects and errors are those of the indexed readers,
    with bytes in place of rows. Other options are those of FileSource.

    Args:
        files: The files.
        kind: "json" or "txt".
        on_error: As in FileSource.
        num_rows: Takes only this many first lines, over the files in order. They are read once to
            find where they end.
    """

    unit = "bytes"
    numbered = True
    fetches = True

    def __init__(
        self,
        files: Sequence[FileRef],
        kind: str,
        *,
        on_error: OnError = "error",
        num_rows: int | None = None,
    ) -> None:
        self.kind, self.num_rows = kind, num_rows
        super().__init__(files, on_error=on_error)
        self._plain, self._reading = PlainBytes(forward=True), threading.Lock()
        self._exact: Sequence[str] = ()
        self._schemas: dict[tuple[str, ...] | None, pa.Schema] = {}

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        piece = self._lines(file, start, stop)
        if piece is None:
            return Rows(fields.empty_table(), np.zeros(0, np.int64))
        table, numbers, rejects = PARSERS[self.kind](piece, fields)
        places = piece.starts + piece.offset
        return Rows(
            table,
            places[numbers],
            [dataclasses.replace(reject, row=int(places[reject.row])) for reject in rejects],
        )

    def _survey(self, file: FileRef) -> Survey:
        return Survey(num_rows=None, total_rows=None, cuts=(0,), schema=self._schema())

    def _schema(self) -> pa.Schema:
        """Returns the columns.

        For JSON lines these are the columns of the first HEAD_BYTES of the first file that has rows
        there; a column that is null in all of them is treated as text.
        """
        if self.kind == "txt":
            return txt.SCHEMA
        with self._reading:
            if self.columns not in self._schemas:
                found = map(self._columns_of, self.files)
                self._schemas[self.columns] = next(filter(None, found), pa.schema([]))
            return self._schemas[self.columns]

    def _columns_of(self, file: FileRef) -> pa.Schema | None:
        """Returns the columns of a file's first JSON lines; None if it has no rows there."""
        num_bytes, head = HEAD_BYTES, read_head(file, HEAD_BYTES)
        # reads on while the first line is longer
        while b"\n" not in head and len(head) == num_bytes < MAX_RECORD_BYTES:
            num_bytes *= 4
            head = read_head(file, num_bytes)
        stop = head.rfind(b"\n") + 1 or len(head)
        observer = Observer(file.path, self.columns)
        piece = _split(head[:stop], len(BOM) if head.startswith(BOM) else 0)
        observer(piece.data, piece.starts, piece.ends)
        kinds = schema_of(observer.facts(), self._exact, known=False)
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

    def _lines(self, file: FileRef, start: int, stop: int) -> Records | None:
        """Returns the whole lines that begin in [start, stop); None if there are none."""
        begin = max(0, start - 1)  # the byte before it says whether a line begins at `start`
        behind = BEHIND_BYTES
        while True:
            data = self._plain.fetch(file, begin, stop + behind)
            ended = len(data) < stop + behind - begin
            first = data.find(b"\n", 0, stop - 1 - begin) + 1 if start else 0
            if (start and not first) or first + begin >= begin + len(data):
                return None
            last = data.find(b"\n", stop - 1 - begin) + 1
            if last or ended:
                break
            if behind > MAX_RECORD_BYTES:
                problem = f"a line of more than {MAX_RECORD_BYTES >> 20} MiB begins here"
                raise SourceError(
                    at=f"{file.path}, byte {stop}", problem=problem, fix="Write one row a line."
                )
            behind *= 4
        skip = len(BOM) if not start and data.startswith(BOM) else 0
        piece = _split(data[first + skip : last or len(data)], 0)
        return piece._replace(offset=begin + first + skip) if len(piece.starts) else None

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
        """The plain byte after the last of the first `num_rows` lines, by file that has any."""
        assert self.num_rows is not None
        left, cuts = self.num_rows, []
        for file in self.files:
            position, open_line = 0, False
            while left and (data := self._plain.fetch(file, position, position + BLOCK_BYTES)):
                ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
                if len(ends) >= left:
                    position, left, open_line = position + int(ends[left - 1]) + 1, 0, False
                    break
                position, left, open_line = position + len(data), left - len(ends), data[-1] != 10
            cuts.append(position)
            left -= open_line  # the last line of a file needs no line break
            if not left:
                break
        return tuple(cuts)

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(uncounted=True, checks_text=True)

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

    def head(self, num_bytes: int, files: int | None = None) -> ForwardSource:
        return self

    def exactly(self, columns: Sequence[str]) -> ForwardSource:
        """Returns the same rows, in which lists and objects of `columns` are JSON text.

        The types of later rows are not known.
        """
        clone = self.reopened()
        clone._exact, clone._schemas = columns, {}
        return clone

    def fetched(self, shard: int, start: int, stop: int) -> AbstractContextManager[None]:
        return self._plain.held(self.files[shard], max(0, start - 1), stop + BEHIND_BYTES)

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """Returns the lines that begin in plain bytes `start` to `stop`, or up to the end."""
        if self.num_rows is not None:
            stop = max(start, min(stop, self._cuts[shard]))
        return super().scan(shard, start, stop)

    def at_end(self, shard: int, position: int) -> bool:
        """Returns whether there is no plain byte at `position` or after it."""
        if self.num_rows is not None:
            return position >= self._cuts[shard]
        return self._plain.ends(self.files[shard], position)

    def _refusal(self, file: FileRef, survey: Survey, reject: Reject) -> SourceError:
        return SourceError(
            at=f"{file.path}, line at byte {reject.row}",
            problem=reject.detail or reject.reason,
            fix="Correct the file, or read it with on_error='skip'.",
        )


def open_forward(
    data_files: DataFiles,
    type: str | None = None,
    *,
    on_error: OnError = "error",
    storage_options: StorageOptions = None,
    num_rows: int | None = None,
) -> ForwardSource | None:
    """Returns a source that reads `data_files` forward without counting them; None if it cannot.

    It cannot read JSON that is one array, CSV, files whose folders hold values, and formats that
    know their rows anyway (parquet, arrow).

    Args:
        data_files: Paths, globs, folders or URLs.
        type: Their format; None decides by the extension.
        on_error: As in FileSource.
        storage_options: Passed to fsspec.
        num_rows: As in ForwardSource.
    """
    files = resolve(data_files, storage_options, extensions=None if type is None else [type])
    kinds = {type or format_of(file.path) for file in files}
    if (
        len(kinds) != 1 or not kinds <= {"json", "txt"} or any(file.partitions for file in files)
    ):  # folders with values in their names add columns
        return None
    kind = str(kinds.pop())
    if files[0].remote:
        jit.ahead()
    if kind == "json" and files[0].num_bytes:
        head = read_head(files[0], 1 << 12).removeprefix(BOM)
        if head.lstrip(b" \t\r\n").startswith(b"["):
            return None
    return ForwardSource(files, kind, on_error=on_error, num_rows=num_rows)


def _split(text: bytes, skip: int) -> Records:
    """Returns the lines of a text, without its first `skip` bytes."""
    data = frozen(text[skip:] if skip else text)
    room = int(np.count_nonzero(data == 10)) + 1
    starts, ends = np.empty(room, np.int64), np.empty(room, np.int64)
    count, _, _ = split_lines(data, True, starts, ends)
    return Records(data, starts[:count], ends[:count], 0, skip)
