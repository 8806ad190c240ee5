"""Text files as sequences of records (lines, array elements, CSV records): a sparse index of where
they begin, and ranges of them.

The index has an entry (row, plain offset) every 1,024 records or 1 MiB, whichever comes first, so
that finding a row costs at most that much reading. It is kept beside other indexes as
`<identity>.index.json` where an index_dir is given, and made again when the file changed.
"""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.checked import commit_checked, recall_checked
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, place
from easypipe.core.protocols import Reject
from easypipe.sources.files import FileRef, changed
from easypipe.sources.formats.scanners import BROKEN, CLOSED, OPEN_QUOTE, pick_entries
from easypipe.sources.formats.streams import Bytes, Restart, open_bytes, open_stream

INDEX_VERSION = 2
ENTRY_ROWS = 1024
ENTRY_BYTES = 1 << 20
CUT_BYTES = 1 << 20  # cuts of a shard are at least so many plain bytes apart
CHUNK_BYTES = 4 << 20
PIECE_BYTES = 32 << 20  # a range is read in pieces of about this size
BATCH_RECORDS = 1 << 14
MAX_RECORD_BYTES = 1 << 30
KEPT_FILES = 32  # compressed files that keep places to go on from

# (data, final, starts, ends) -> (records, bytes consumed, status), see scanners.py
Splitter = Callable[
    [NDArray[np.uint8], bool, NDArray[np.int64], NDArray[np.int64]], tuple[int, int, int]
]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How records lie in one file.

    start: plain offset of the first record. lead: bytes of separator that `starts` includes.
    closes: the file says where records end.
    """

    name: str
    split: Splitter
    start: int
    lead: int = 0
    closes: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecordIndex:
    """Row `rows[k]` begins at plain offset `offsets[k]`; rows[0] is 0. Records end at `stop`.
    `facts` are the format's own, as JSON.

    total_rows: of the whole file, where `num_rows` are those of its head (FileRef.head_bytes); None
    where nobody has counted them.
    """

    num_rows: int
    total_rows: int | None
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    stop: int
    restarts: tuple[Restart, ...]
    facts: dict[str, Any]

    def cuts(self) -> tuple[int, ...]:
        """Rows with entries, at least CUT_BYTES apart."""
        kept, last = [0], int(self.offsets[0])
        for row, offset in zip(self.rows.tolist(), self.offsets.tolist(), strict=True):
            if offset - last >= CUT_BYTES:
                kept.append(row)
                last = offset
        return tuple(kept)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The range in pieces of about PIECE_BYTES, cut where the index has entries."""
        while start < stop:
            here = int(np.searchsorted(self.rows, start, side="right")) - 1
            there = max(
                here + 1,
                int(np.searchsorted(self.offsets, self.offsets[here] + PIECE_BYTES, side="right"))
                - 1,
            )
            end = min(stop, int(self.rows[there])) if there < len(self.rows) else stop
            yield start, end
            start = end

    def span(self, start: int, stop: int) -> tuple[int, int, int, int]:
        """(row at which to begin, its offset, offset at which to end, offset at which a next range
        would begin).
        """
        here = int(np.searchsorted(self.rows, start, side="right")) - 1
        there = int(np.searchsorted(self.rows, stop, side="left"))
        end = int(self.offsets[there]) if there < len(self.offsets) else self.stop
        following = (
            int(self.offsets[int(np.searchsorted(self.rows, stop, side="right")) - 1])
            if stop < self.num_rows
            else end
        )
        return int(self.rows[here]), int(self.offsets[here]), end, following


class Records(NamedTuple):
    """Records [row, row + len(starts)) of a file: record i is data[starts[i]:ends[i]], and data[0]
    has plain offset `offset`.
    """

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    row: int
    offset: int

    def record(self, i: int) -> bytes:
        return self.data[self.starts[i] : self.ends[i]].tobytes()


@dataclass(frozen=True)
class Found:
    """What surveying a file told of it, for whoever reads it."""

    layout: Layout
    index: RecordIndex


class RecordReader:
    """Records of files that were surveyed. Compressed files remember places, so the most recently
    used ones are kept; thread safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Bytes] = OrderedDict()

    def pieces(self, file: FileRef, found: Found, start: int, stop: int) -> Iterator[Records]:
        """Records [start, stop), without their separators. Raises SourceError where the file is not
        what the index says.
        """
        for a, b in found.index.pieces(start, stop):
            yield self._read(file, found, a, b)

    def parsed(
        self,
        file: FileRef,
        found: Found,
        start: int,
        stop: int,
        parse: Callable[[Records], tuple[Any, NDArray[np.int64], list[Reject]]],
    ) -> tuple[list[Any], NDArray[np.int64], list[Reject]]:
        """What `parse` makes of every piece: a table or column of its good rows, their numbers, and
        the rejects in order.
        """
        parts, numbers, rejects = zip(
            *(parse(piece) for piece in self.pieces(file, found, start, stop)), strict=True
        )
        return list(parts), np.concatenate(numbers), [reject for some in rejects for reject in some]

    def text(self, file: FileRef, found: Found, row: int) -> str:
        """A record as it stands, for those who report it."""
        return self._read(file, found, row, row + 1).record(0).decode("utf-8", "replace")

    def line(self, file: FileRef, found: Found, row: int) -> int:
        """The line, from 1, on which the text of a record begins."""
        piece = self._read(file, found, row, row + 1)
        text = piece.record(0)
        return _line_at(
            self._bytes(file, found.index),
            piece.offset + int(piece.starts[0]) + len(text) - len(text.lstrip()),
        )

    def _bytes(self, file: FileRef, index: RecordIndex) -> Bytes:
        with self._lock:
            kept = self._kept.pop(file.path, None) or open_bytes(file, index.restarts)
            self._kept[file.path] = kept
            while len(self._kept) > KEPT_FILES:
                self._kept.popitem(last=False)
            return kept

    def _read(self, file: FileRef, found: Found, start: int, stop: int) -> Records:
        row, begin, end, following = found.index.span(start, stop)
        data = frozen(self._bytes(file, found.index).fetch(begin, end, following))
        starts, ends = np.empty(stop - row, np.int64), np.empty(stop - row, np.int64)
        count, _, _ = found.layout.split(data, True, starts, ends)
        if count != stop - row:
            raise changed(file)
        skip = start - row
        return Records(data, starts[skip:] + found.layout.lead, ends[skip:], start, begin)


def index_records(
    file: FileRef,
    layout: Layout,
    observe: Callable[[Records], None] | None,
    facts: Callable[[], dict[str, Any]],
) -> RecordIndex:
    """Reads the file, or its head, once: counts records, notes where they begin, and shows them to
    `observe` in order.

    Raises SourceError for a file that is damaged, truncated or has a record above MAX_RECORD_BYTES.
    """
    stream = open_stream(file)
    buffer = np.empty(CHUNK_BYTES, np.uint8)
    starts, ends = np.empty(BATCH_RECORDS, np.int64), np.empty(BATCH_RECORDS, np.int64)
    rows, offsets = np.empty(BATCH_RECORDS, np.int64), np.empty(BATCH_RECORDS, np.int64)
    last = np.array([0, layout.start], np.int64)
    kept_rows, kept_offsets = [np.zeros(1, np.int64)], [np.array([layout.start], np.int64)]
    row = have = 0
    base, skip, final, closed = 0, layout.start, False, False
    limit, cut = file.head_bytes, False  # cut: the head ends here, the file does not
    try:
        while not final and not cut:
            if have == len(buffer):
                if have >= MAX_RECORD_BYTES:
                    problem = f"a record of more than {MAX_RECORD_BYTES >> 20} MiB begins here"
                    fix = "A quote or bracket may be open; of text, take a smaller text_unit."
                    raise SourceError(at=place(file.path, row=row), problem=problem, fix=fix)
                buffer = np.concatenate([buffer, np.empty_like(buffer)])
            room = len(buffer) if limit is None else min(len(buffer), limit - base)
            # full, so that a record longer than the buffer is scanned few times
            while have < room and not final:
                count = stream.readinto(buffer.data[have:room])
                final = count == 0
                have += count
            if limit is not None and base + have == limit and not final:
                final = stream.readinto(memoryview(bytearray(1))) == 0
                cut = not final
            at = min(skip, have)  # bytes before the first record: a byte order mark, a header
            skip -= at
            if skip:
                base, have = base + at, 0
                continue
            while True:
                data = frozen(buffer[at:have])
                found, consumed, status = (
                    layout.split(data, final, starts, ends) if not closed else (0, 0, CLOSED)
                )
                if found:
                    picked = pick_entries(
                        starts[:found], row, base + at, ENTRY_ROWS, ENTRY_BYTES, last, rows, offsets
                    )
                    kept_rows.append(rows[:picked].copy())
                    kept_offsets.append(offsets[:picked].copy())
                    if observe is not None:
                        observe(
                            Records(
                                data, starts[:found] + layout.lead, ends[:found], row, base + at
                            )
                        )
                    row += found
                at += consumed
                if status == BROKEN:
                    raise SourceError(
                        at=place(file.path, row=row),
                        problem=f"broken JSON array near byte {base + at}",
                        fix="Correct the file.",
                    )
                if status == OPEN_QUOTE:
                    raise SourceError(
                        at=place(file.path, row=row),
                        problem="a quoted field begins here and never ends",
                        fix="Close the quote.",
                    )
                if status == CLOSED:
                    closed = True
                    rest = buffer[at:have].tobytes().strip(b" \t\r\n")
                    if rest:
                        raise SourceError(
                            at=file.path,
                            problem=f"goes on after the end of the array: {rest[:20]!r}",
                            fix="Correct the file.",
                        )
                    at = have
                if found < len(starts):
                    break
            buffer[: have - at] = buffer[at:have]
            base, have = base + at, have - at
        if layout.closes and not closed and not cut:
            raise SourceError(
                at=place(file.path, row=row),
                problem="truncated: the JSON array does not end",
                fix="Copy or write it again.",
            )
        return RecordIndex(
            num_rows=row,
            total_rows=None if cut else row,
            rows=np.concatenate(kept_rows),
            offsets=np.concatenate(kept_offsets),
            stop=base if cut else base + have,
            restarts=tuple(stream.restarts),
            facts=facts(),
        )
    finally:
        stream.close()


def kept_index(
    file: FileRef, index_dir: Path | None, options: Any, build: Callable[[], RecordIndex]
) -> RecordIndex:
    """The index from its sidecar, or made and kept. A sidecar that cannot be read is made again,
    with a warning.

    That of a head is not kept; its file's sidecar, where there is one, tells `total_rows`.
    """
    whole = file if file.head_bytes is None else replace(file, head_bytes=None)
    sidecar = (
        None
        if index_dir is None
        else index_dir / f"{digest('index', INDEX_VERSION, whole.digest, options)}.index.json"
    )
    kept = (
        None
        if sidecar is None
        else recall_checked(sidecar, _from_json, what=f"the index of {file.path}")
    )
    if file.head_bytes is not None:
        head = build()
        return head if kept is None else replace(head, total_rows=kept.num_rows)
    if kept is not None:
        return kept
    index = build()
    if sidecar is not None:
        commit_checked(sidecar, _to_json(index))
    return index


def _line_at(store: Bytes, offset: int) -> int:
    """Line, from 1, in which plain byte `offset` stands."""
    lines, at = 1, 0
    while at < offset:
        step = min(CHUNK_BYTES, offset - at)
        lines += store.fetch(at, at + step, at + step).count(b"\n")
        at += step
    return lines


def read_head(file: FileRef, num_bytes: int) -> bytes:
    """The first plain bytes, fewer where the file is shorter. Raises SourceError for a file that
    holds none.
    """
    stream = open_stream(file)
    try:
        buffer = bytearray(num_bytes)
        view, have = memoryview(buffer), 0
        while have < num_bytes:
            count = stream.readinto(view[have:])
            if not count:
                break
            have += count
    finally:
        stream.close()
    if not have:
        raise SourceError(
            at=file.path,
            problem="is empty (nothing is left when it is decompressed)",
            fix="Remove it from data_files.",
        )
    return bytes(buffer[:have])


def frozen(data: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A read-only UInt8 view: the one array type that the kernels of scanners.py are compiled
    for.
    """
    view = data.view() if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    view.flags.writeable = False
    return view


def _to_json(index: RecordIndex) -> dict[str, Any]:
    return {
        "num_rows": index.num_rows,
        "rows": base64.b64encode(index.rows.astype("<i8").tobytes()).decode(),
        "offsets": base64.b64encode(index.offsets.astype("<i8").tobytes()).decode(),
        "stop": index.stop,
        "restarts": [[restart.plain, restart.packed] for restart in index.restarts],
        "facts": index.facts,
    }


def _from_json(value: Any) -> RecordIndex:
    rows, offsets = (
        np.frombuffer(base64.b64decode(value[key], validate=True), "<i8").astype(np.int64)
        for key in ("rows", "offsets")
    )
    if len(rows) != len(offsets) or not len(rows) or rows[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError("its entries do not ascend")
    return RecordIndex(
        num_rows=int(value["num_rows"]),
        total_rows=int(value["num_rows"]),
        rows=rows,
        offsets=offsets,
        stop=int(value["stop"]),
        restarts=tuple(Restart(int(plain), int(packed)) for plain, packed in value["restarts"]),
        facts=dict(value["facts"]),
    )
