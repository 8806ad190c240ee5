"""Making the batches of a streaming loader one after the other: streams reach their next rows, and their tokens are laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.schema import INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.loader.collate import BATCH_COLUMNS, CollateConfig, fresh_columns, row_width, with_asked
from easypipe.loader.gather import Tables, write_rows
from easypipe.loader.placement import Placement
from easypipe.loader.streaming_pool import ReadPool
from easypipe.loader.streaming_read import Deal, Forward
from easypipe.loader.streaming_state import StreamState
from easypipe.loader.streaming_window import Books, Stream, StreamSpec, Window

BLOCK_BATCHES = 16  # laid out together: a call of a compiled function costs as much as the few rows that a stream has of one batch
BLOCK_BYTES = 64 << 20  # of such a block, at most, unless one batch takes more


@dataclass(frozen=True, kw_only=True)
class Job:
    """What making batches depends on. local: Int64[n], this process's rows of the batch, ascending. own: the streams that it reads.

    rows_each: of every batch, that each stream gives. width: slots of every batch; None: of its longest row.
    """

    sources: tuple[Forward, ...]
    spec: StreamSpec
    collate: CollateConfig
    placement: Placement | None
    local: NDArray[np.int64]
    own: tuple[int, ...]
    rows_each: int
    width: int | None
    pad_token_id: int
    drop_last: bool
    workers: int
    name: str


class Numbered(NamedTuple):
    number: int
    state: StreamState


class After(NamedTuple):
    """What stands behind batch number `batch`, of the streams that this process reads."""

    batch: int
    streams: tuple[Numbered, ...]
    books: Books | None = None


class _Block(NamedTuple):
    """Batches `start` to `stop`, laid out. columns: stream after stream, batch after batch. padding: rows of it in each batch."""

    start: int
    stop: int
    columns: dict[str, NDArray[np.int32]]
    padding: list[int]


class Maker:
    """Makes batch after batch, on one thread, from streams whose chunks a pool reads."""

    def __init__(self, job: Job, entry: After) -> None:
        self._job, self._entry = job, entry
        self._books = Books()
        self.last: Books | None = None  # at the end of the data
        self.abandoned = False  # somebody hangs: close() does not wait
        self._pool = ReadPool(job.workers, f"easypipe-{job.name}-read")
        self._streams: dict[int, Stream] = {}
        numbers = job.local // job.rows_each
        self._rows_of = {n: np.flatnonzero(numbers == n) for n in job.own if (numbers == n).any()}  # of the local rows, neighbours
        self._block: _Block | None = None

    def close(self) -> None:
        self._pool.close(wait=not self.abandoned)

    def make(self, batch: int, enter: Callable[[str], None]) -> tuple[dict[str, Any], After] | None:
        """Batch number `batch` and what stands behind it, or None past the last. Batches are asked for in order."""
        job, stage = self._job, "read"
        try:
            enter(stage)
            if not self._streams:
                self._begin()
            first, stop = batch * job.rows_each, (batch + 1) * job.rows_each
            full = [stream.reach(stop - 1) for stream in self._streams.values()]
            if not all(full) and (job.drop_last or not any(stream.reach(first) for stream in self._streams.values())):
                self.last = self._snapshot()
                return None
            stage = "gather"
            enter(stage)
            columns = self._columns(batch)
            for stream in self._streams.values():
                stream.forget(stop)
            states = tuple(Numbered(number, stream.state_at(stop)) for number, stream in self._streams.items())
            after = After(batch + 1, states, self._snapshot())
            columns = with_asked(columns, job.collate)
            if job.placement is None:
                return columns, after
            stage = "place"
            enter(stage)
            return job.placement.place(columns), after
        except Exception as error:
            error.add_note(f"{job.name}: streaming batch {batch}, stage {stage!r}")
            raise

    def _begin(self) -> None:
        job, spec = self._job, self._job.spec
        deals = [Deal(source, spec.num_streams, seed=spec.seed, shuffle=spec.shuffle) for source in job.sources]
        states = dict(self._entry.streams)
        for number in job.own:
            self._streams[number] = Stream(number, spec, deals, self._pool, self._books, states.get(number))

    def _snapshot(self) -> Books:
        for i in range(len(self._job.sources)):
            self._books.waiting[i] = sum(stream.waiting(i) for stream in self._streams.values())
        return self._books.copy()

    def _columns(self, batch: int) -> dict[str, NDArray[np.int32]]:
        """This process's rows of a batch that its streams have reached."""
        job = self._job
        if self._block is None or batch >= self._block.stop:
            self._block = self._lay_out(batch)
        block = self._block
        at, count = batch - block.start, block.stop - block.start
        self._books.padding_rows += block.padding[at]
        if count == 1:
            self._block = None
            return block.columns
        width = block.columns[INPUT_IDS].shape[1]
        columns = fresh_columns(BATCH_COLUMNS, len(job.local), width)
        counts = {len(mine) for mine in self._rows_of.values()}
        for name, values in columns.items():
            if len(counts) == 1:
                rows = counts.copy().pop()
                blocks = block.columns[name].reshape(len(self._rows_of), count, rows, width)
                np.copyto(values.reshape(len(self._rows_of), rows, width), blocks[:, at])
                continue
            for mine in self._rows_of.values():
                a, b = int(mine[0]), int(mine[-1]) + 1
                start = a * count + at * (b - a)
                values[a:b] = block.columns[name][start : start + b - a]
        return columns

    def _lay_out(self, batch: int) -> _Block:
        """This batch, and those behind it whose rows stand in windows that are made already."""
        job, each = self._job, self._job.rows_each
        count = 1
        if job.spec.pack is not None and job.width is not None:
            made = [stream.state.first_row // each - batch for stream in self._streams.values() if not stream.ended]
            room = BLOCK_BYTES // (16 * job.width * max(1, len(job.local)))
            count = max(1, min([BLOCK_BATCHES, room, *made]))
        rows = np.empty(len(job.local) * count, np.int64)
        for number, mine in self._rows_of.items():
            a, b = int(mine[0]) * count, (int(mine[-1]) + 1) * count
            wanted = (np.arange(batch, batch + count)[:, None] * each + job.local[mine] % each).reshape(-1)
            rows[a:b] = np.where(wanted < self._streams[number].state.first_row, wanted, -1)
        width = job.width
        if width is None or job.spec.pack is None:
            longest = row_width(self._lengths(rows), job.collate)
            width = longest if width is None else width
        columns = fresh_columns(BATCH_COLUMNS, len(rows), width)
        padding = np.zeros(count, np.int64)
        for number, mine in self._rows_of.items():
            a, b = int(mine[0]) * count, (int(mine[-1]) + 1) * count
            padding += (rows[a:b] < 0).reshape(count, -1).sum(axis=1)
            self._fill(self._streams[number], rows[a:b], {name: values[a:b] for name, values in columns.items()})
        return _Block(batch, batch + count, columns, padding.tolist())

    def _fill(self, stream: Stream, rows: NDArray[np.int64], part: dict[str, NDArray[np.int32]]) -> None:
        done = np.zeros(len(rows), np.bool_)
        last = int(rows.max())
        for window in stream.windows:
            if window.first_row > last:
                break
            self._write(window, rows, done, part)
        if not done.all():
            self._write(_EMPTY, rows, done, part)
        assert done.all(), "a row stands in no window"

    def _write(self, window: Window | _Empty, rows: NDArray[np.int64], done: NDArray[np.bool_], part: dict[str, NDArray[np.int32]]) -> None:
        job = self._job
        eos = -1 if job.spec.eos is None else job.spec.eos
        masked = int(window.tables.mask[0]) != 0
        mask = np.empty(part[INPUT_IDS].shape if masked else (0, 0), np.uint8)
        _, bad = write_rows(
            window.view, rows, done, window.tables, eos, job.pad_token_id, True,
            part[INPUT_IDS], part[LABELS], part[SEGMENT_IDS], part[POSITION_IDS], mask,
        )  # fmt: skip
        assert bad < 0, f"piece {bad} of a window is not in its tokens"

    def _lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens of each of a single batch's local rows, which are documents."""
        lengths = np.zeros(len(rows), np.int32)
        for number, mine in self._rows_of.items():
            for i in mine.tolist():  # rows of one batch
                if rows[i] >= 0:
                    window = next(w for w in self._streams[number].windows if rows[i] < w.stop)
                    lengths[i] = window.layout.length[window.layout.first_piece[rows[i] - window.first_row]]
        return lengths


class _Empty(NamedTuple):
    """A window without rows, for those of padding."""

    first_row: int
    view: tuple
    tables: Tables


def _empty() -> _Empty:
    none = np.zeros(1, np.uint64)
    table = Tables(np.array([0, 1]), np.array([0, 0]), none, none, np.zeros(1, np.uint64), np.array([2]))
    view = (0, np.zeros(1, np.int64), np.zeros((5, 0), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64))
    return _Empty(0, view, table)


_EMPTY = _empty()
