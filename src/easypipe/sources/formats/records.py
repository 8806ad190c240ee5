"""Text files as records (lines, array elements, CSV records): limits, the kept index, ranges.

The index has an entry (row, plain offset) every 1,024 records or 1 MiB, whichever comes first. So
finding a row costs at most that much reading. If there is an index_dir, the index is kept there as
`<identity>.index.json`, and is made again when the file changes.
"""

from __future__ import annotations

import base64
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from easypipe.core.checked import recall_checked, remember_checked, whole
from easypipe.core.config import digest
from easypipe.core.values import Int64, JsonObject, UInt8
from easypipe.sources.base import FileSource, Rows, Survey
from easypipe.sources.formats.jsontypes import Observer
from easypipe.sources.formats.scanners import BROKEN, CLOSED, MORE, OPEN_QUOTE, pick_entries
from easypipe.sources.formats.streams import PlainBytes, Restart, check_compression
from easypipe.sources.refs import FileRef, changed, compression_of

INDEX_VERSION = 2
ENTRY_ROWS = 1024
ENTRY_BYTES = 1 << 20
CUT_BYTES = 1 << 20  # cuts of a shard are at least this many plain bytes apart
CHUNK_BYTES = 4 << 20
REMOTE_CHUNK_BYTES = 8 << 20  # for a remote file, as each answer is waited for
PIECE_BYTES = 32 << 20  # a range is read in pieces of about this many plain bytes
SYNCED_BYTES = 1 << 20  # the index of a smaller local file is made again sooner than synced
BATCH_RECORDS = 1 << 14
MAX_RECORD_BYTES = 1 << 30
BOM = b"\xef\xbb\xbf"

# (data, final, starts, ends) -> (records, bytes consumed, status), see scanners.py
Splitter = Callable[[UInt8, bool, Int64, Int64], tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How records are laid out in one file, and what they are.

    Args:
        key: What the index depends on, besides the file.
        split: Finds the records in a stretch of bytes.
        start: The plain offset of the first record.
        schema: Returns the columns, from the index's facts.
        parse: Returns the good rows of some records, their numbers, and the rejects in order.
        observer: Makes the object that gets every record while the index is made, or is None.
        lead: The bytes of separator that `starts` includes.
        closes: Whether the file marks the end of its records.
        lines: Whether record r is line r + 1.
        trims: Whether white space around a record is not part of it.
    """

    key: Any
    split: Splitter
    start: int
    schema: Callable[[JsonObject], pa.Schema]
    parse: Callable[[Records, pa.Schema], Rows]
    observer: Callable[[], Observer] | None = None
    lead: int = 0
    closes: bool = False
    lines: bool = False
    trims: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordIndex:
    """Where records are: row `rows[k]` begins at plain offset `offsets[k]`.

    Args:
        num_rows: The records; only those of the head, if a head was read (FileRef.head_bytes).
        total_rows: The records of the whole file; None if they were not counted.
        rows: Int64[entries], ascending; rows[0] is 0.
        offsets: Int64[entries].
        stop: The plain offset at which the records end.
        restarts: Where decompression may begin.
        facts: What the format's observer found, as JSON.
    """

    num_rows: int
    total_rows: int | None
    rows: Int64
    offsets: Int64
    stop: int
    restarts: tuple[Restart, ...]
    facts: JsonObject

    def cuts(self) -> tuple[int, ...]:
        """Returns the rows with entries that are at least CUT_BYTES apart."""
        kept, last = [0], int(self.offsets[0])
        for row, offset in zip(self.rows.tolist(), self.offsets.tolist(), strict=True):
            if offset - last >= CUT_BYTES:
                kept.append(row)
                last = offset
        return tuple(kept)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the range in pieces of about PIECE_BYTES, cut where the index has entries."""
        ends = np.append(self.offsets[1:], self.stop)
        while start < stop:
            here = int(np.searchsorted(self.rows, start, side="right")) - 1
            reach = self.offsets[here] + PIECE_BYTES
            there = max(here + 1, int(np.searchsorted(ends, reach, side="right")))
            end = min(stop, int(self.rows[there])) if there < len(self.rows) else stop
            yield start, end
            start = end

    def span(self, start: int, stop: int) -> tuple[int, int, int]:
        """Returns the row at which to begin reading, its offset, and the offset at which to end."""
        here = int(np.searchsorted(self.rows, start, side="right")) - 1
        there = int(np.searchsorted(self.rows, stop, side="left"))
        end = int(self.offsets[there]) if there < len(self.offsets) else self.stop
        return int(self.rows[here]), int(self.offsets[here]), end


class Records(NamedTuple):
    """Records [row, row + len(starts)) of a file.

    Record i is data[starts[i]:ends[i]], and data[0] has plain offset `offset`.
    """

    data: UInt8
    starts: Int64
    ends: Int64
    row: int
    offset: int

    def record(self, i: int) -> bytes:
        return self.data[self.starts[i] : self.ends[i]].tobytes()


@dataclass(frozen=True)
class Found:
    """The layout and the index of a file, for reading its rows."""

    layout: Layout
    index: RecordIndex


# (problem, fix) by status, for those after which no record can follow; {} is the plain byte
BREAKS = {
    BROKEN: ("broken JSON array near byte {}", "Correct the file."),
    OPEN_QUOTE: ("a quoted field begins here and never ends", "Close the quote."),
}


class RecordSource(FileSource):
    """The base class of text formats; a subclass says how records are laid out in a file."""

    numbered = True
    fetches = True

    def _lay_out(self, file: FileRef) -> Layout:
        """Returns how records are laid out in a file."""
        raise NotImplementedError

    def _survey(self, file: FileRef) -> Survey:
        return self._indexed(file, self._lay_out(file))

    def _indexed(self, file: FileRef, layout: Layout) -> Survey:
        index = _kept_index(
            file, self._index_dir, layout, lambda: index_records(file, layout, self._plain)
        )
        return Survey(
            num_rows=index.num_rows,
            total_rows=index.total_rows,
            cuts=index.cuts(),
            schema=layout.schema(index.facts),
            detail=Found(layout, index),
        )

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        found: Found = survey.detail
        tables, numbers, rejects = zip(
            *(
                found.layout.parse(self._read(file, found, a, b), fields)
                for a, b in found.index.pieces(start, stop)
            ),
            strict=True,
        )
        return Rows(
            pa.concat_tables(tables), np.concatenate(numbers), list(itertools.chain(*rejects))
        )

    def fetched(self, shard: int, start: int, stop: int) -> AbstractContextManager[None]:
        file, found = self.files[shard], self._open().surveys[shard].detail
        _, begin, end = found.index.span(start, stop)
        return self._plain.held(file, begin, end)

    def _line(self, file: FileRef, survey: Survey, row: int) -> int | None:
        found: Found = survey.detail
        if found.layout.lines:
            return row + 1
        piece = self._read(file, found, row, row + 1)
        text = piece.record(0)
        offset = piece.offset + int(piece.starts[0]) + len(text) - len(text.lstrip())
        return 1 + sum(
            self._plain.fetch(file, at, min(at + CHUNK_BYTES, offset)).count(b"\n")
            for at in range(0, offset, CHUNK_BYTES)
        )

    def raw(self, shard: int, row: int) -> str | None:
        found: Found = self._open().surveys[shard].detail
        piece = self._read(self.files[shard], found, row, row + 1)
        text = piece.record(0).decode("utf-8", "replace")
        return text.strip() if found.layout.trims else text

    def _read(self, file: FileRef, found: Found, start: int, stop: int) -> Records:
        """Returns records [start, stop), without their separators.

        Args:
            file: The file.
            found: What its survey found.
            start: The first record.
            stop: The record after the last one.

        Raises:
            SourceError: The file does not match the index.
        """
        row, begin, end = found.index.span(start, stop)
        data = frozen(self._plain.fetch(file, begin, end, found.index.restarts, once=True))
        last = stop == found.index.num_rows  # then no record may follow
        starts, ends = np.empty((2, stop - row + last), np.int64)
        count, _, _ = found.layout.split(data, True, starts, ends)
        if count != stop - row:
            raise changed(file)
        wanted = slice(start - row, count)
        return Records(data, starts[wanted] + found.layout.lead, ends[wanted], start, begin)


def index_records(file: FileRef, layout: Layout, plain: PlainBytes) -> RecordIndex:
    """Counts the records of a file or its head, and records where they begin.

    Raises:
        SourceError: The file is damaged, truncated or has a record above MAX_RECORD_BYTES.
    """
    observer = None if layout.observer is None else layout.observer()
    starts, ends = np.empty(BATCH_RECORDS, np.int64), np.empty(BATCH_RECORDS, np.int64)
    rows, offsets = np.empty(BATCH_RECORDS, np.int64), np.empty(BATCH_RECORDS, np.int64)
    last = np.array([0, layout.start], np.int64)
    kept_rows, kept_offsets = [np.zeros(1, np.int64)], [np.array([layout.start], np.int64)]
    row, base, held = 0, layout.start, b""  # base: the plain offset of held[0]
    final = cut = closed = False  # cut: the head ends here, but the file does not
    while not final and not cut:
        if len(held) >= MAX_RECORD_BYTES:
            problem = f"a record of more than {MAX_RECORD_BYTES >> 20} MiB begins here"
            fix = "A quote or bracket may be open; of text, take a smaller text_unit."
            raise file.error(problem, fix, row=row)
        more, final, cut = _behind(file, plain, base + len(held), len(held))
        text, at = held + more, 0
        while True:
            data = frozen(text)[at:]
            found, consumed, status = (
                layout.split(data, final, starts, ends) if not closed else (0, 0, CLOSED)
            )
            if found:
                picked = pick_entries(
                    starts[:found], row, base + at, (ENTRY_ROWS, ENTRY_BYTES), last, rows, offsets
                )
                kept_rows.append(rows[:picked].copy())
                kept_offsets.append(offsets[:picked].copy())
                if observer is not None:
                    observer(data, starts[:found] + layout.lead, ends[:found])
                row += found
            at += consumed
            if status == CLOSED:
                closed, rest, at = True, text[at:].strip(b" \t\r\n"), len(text)
                if rest:
                    problem = f"goes on after the end of the array: {rest[:20]!r}"
                    raise file.error(problem, "Correct the file.")
            elif status != MORE:
                problem, fix = BREAKS[status]
                problem = problem.format(base + at)
                raise file.error(problem, fix, row=row)
            if found < len(starts):
                break
        held, base = text[at:], base + at
    if layout.closes and not closed and not cut:
        problem, fix = "truncated: the JSON array does not end", "Copy or write it again."
        raise file.error(problem, fix, row=row)
    return RecordIndex(
        num_rows=row,
        total_rows=None if cut else row,
        rows=np.concatenate(kept_rows),
        offsets=np.concatenate(kept_offsets),
        stop=base if cut else base + len(held),
        restarts=plain.restarts(file),
        facts={} if observer is None else observer.facts(),
    )


def _behind(file: FileRef, plain: PlainBytes, position: int, held: int) -> tuple[bytes, bool, bool]:
    """Reads on from plain offset `position`, after `held` bytes that are not split yet.

    Returns:
        The bytes; whether the file ends there; whether its head ends before the file does.
    """
    limit = sys.maxsize if file.head_bytes is None else file.head_bytes
    # a long record doubles what is held, so that it is scanned only a few times
    least = REMOTE_CHUNK_BYTES if file.remote else CHUNK_BYTES
    wanted = max(0, min(max(least, held), limit - position))
    more = plain.fetch(file, position, position + wanted)
    if len(more) < wanted or position + wanted < limit:
        return more, len(more) < wanted, False
    ends = plain.ends(file, limit)
    return more, ends, not ends


def _kept_index(
    file: FileRef, index_dir: Path | None, layout: Layout, build: Callable[[], RecordIndex]
) -> RecordIndex:
    """Returns the index from its file in `index_dir`, or makes and keeps it.

    An index file that cannot be read is replaced, with a warning. The index of a head is not kept;
    the index file of the whole file, if there is one, provides `total_rows`.
    """

    def parsed(value: JsonObject) -> RecordIndex:
        index = _from_json(value)
        layout.schema(index.facts)
        return index

    whole = file if file.head_bytes is None else replace(file, head_bytes=None)
    sidecar = (
        None
        if index_dir is None
        else index_dir / f"{digest('index', INDEX_VERSION, whole.digest, layout.key)}.index.json"
    )
    kept = (
        None
        if sidecar is None
        else recall_checked(sidecar, parsed, what=f"the index of {file.path}")
    )
    if file.head_bytes is not None:
        head = build()
        return head if kept is None else replace(head, total_rows=kept.num_rows)
    if kept is not None:
        return kept
    index = build()
    if sidecar is not None:
        synced = file.remote or file.num_bytes >= SYNCED_BYTES
        remember_checked(sidecar, _to_json(index), synced=synced)
    return index


def read_head(file: FileRef, num_bytes: int, plain: PlainBytes | None = None) -> bytes:
    """Returns the first plain bytes of a file, fewer if it is shorter.

    Raises:
        SourceError: The file is empty, or is not text.
    """
    head = (plain or PlainBytes()).fetch(file, 0, num_bytes)
    if not head:
        raise file.error(
            "is empty (nothing is left when it is decompressed)", "Remove it from data_files."
        )
    if compression_of(file.path) is None:
        check_compression(file, head)
    return head


def frozen(data: bytes | UInt8) -> UInt8:
    """Returns a read-only UInt8 view, the only array type that scanners.py is compiled for."""
    view = data.view() if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    view.flags.writeable = False
    return view


def _to_json(index: RecordIndex) -> JsonObject:
    return {
        "num_rows": index.num_rows,
        "rows": base64.b64encode(index.rows.astype("<i8").tobytes()).decode(),
        "offsets": base64.b64encode(index.offsets.astype("<i8").tobytes()).decode(),
        "stop": index.stop,
        "restarts": [[restart.plain, restart.packed] for restart in index.restarts],
        "facts": index.facts,
    }


def _from_json(value: Any) -> RecordIndex:
    """Returns the index that `_to_json` wrote; raises ValueError if its entries are impossible."""
    rows, offsets = (
        np.frombuffer(base64.b64decode(value[key], validate=True), "<i8").astype(np.int64)
        for key in ("rows", "offsets")
    )
    num_rows, stop = whole(value["num_rows"]), whole(value["stop"])
    if len(rows) != len(offsets) or not len(rows) or rows[0] != 0 or offsets[0] < 0:
        raise ValueError("it has no entries")
    # a record has at least one byte, and the last one need not end with a separator
    behind = np.diff(rows, append=num_rows), np.diff(offsets, append=stop + 1)
    if (behind[0] < 0).any() or (behind[0] > behind[1]).any():
        raise ValueError("its entries do not ascend")
    return RecordIndex(
        num_rows=num_rows,
        total_rows=num_rows,
        rows=rows,
        offsets=offsets,
        stop=stop,
        restarts=tuple(Restart(whole(plain), whole(packed)) for plain, packed in value["restarts"]),
        facts=dict(value["facts"]),
    )
