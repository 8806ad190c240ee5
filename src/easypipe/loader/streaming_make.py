"""Making the batches of a streaming loader one after the other: streams reach their next rows, and their tokens are laid out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.errors import BudgetError
from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.loader.collate import BATCH_COLUMNS, CollateConfig, fresh_columns, row_width, shift_labels, with_asked
from easypipe.loader.gather import Tables, write_rows
from easypipe.loader.look_ahead import join_segments, last_labels
from easypipe.loader.placement import Placement
from easypipe.loader.steps import Steps
from easypipe.loader.streaming_books import Books
from easypipe.loader.streaming_pool import ReadPool
from easypipe.loader.streaming_read import Deal, Forward
from easypipe.loader.streaming_spec import StreamSpec
from easypipe.loader.streaming_state import StreamState
from easypipe.loader.streaming_stream import Stream
from easypipe.loader.streaming_window import Window, Windows

BLOCK_BATCHES = 16  # laid out together: a call of a compiled function costs as much as the few rows that a stream has of one batch
BLOCK_BYTES = 64 << 20  # of such a block, at most, unless one batch takes more


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A size that batches have: each stream gives `rows_each` of their rows.

    local: Int64[n], this process's rows of such a batch, ascending. order: Int64[n], which of them come first, second and so on where a
    batch lies otherwise (micro-batch after micro-batch); None: as they stand.
    """

    rows_each: int
    placement: Placement | None
    local: NDArray[np.int64]
    order: NDArray[np.int64] | None = None

    def rows_of(self, own: tuple[int, ...]) -> dict[int, NDArray[np.int64]]:
        """Which of the local rows each stream gives: neighbours."""
        numbers = self.local // self.rows_each
        return {n: np.flatnonzero(numbers == n) for n in own if (numbers == n).any()}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What making batches depends on. own: the streams that this process reads. steps: of the rows of one stream.

    shapes: by rows of a batch of each stream. width: slots of every batch; None: of its longest row.
    workers: threads that read. ahead: threads that make a window of each stream ahead; 0 makes each when a batch needs it.
    """

    sources: tuple[Forward, ...]
    spec: StreamSpec
    collate: CollateConfig
    steps: Steps
    shapes: Mapping[int, Shape]
    own: tuple[int, ...]
    accumulation_steps: int
    width: int | None
    pad_token_id: int
    drop_last: bool
    workers: int
    ahead: int
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
        self._books, self._versions, self._padding = Books(), (-1, 0), 0
        self._bad: Counter[int] = Counter()  # by dataset
        self.last: Books | None = None  # at the end of the data
        self.abandoned = False  # somebody hangs: close() does not wait
        self._pool = ReadPool(job.workers, f"easypipe-{job.name}-read")
        self._window_pool = ReadPool(job.ahead, f"easypipe-{job.name}-window") if job.ahead else None
        self._streams: dict[int, Stream] = {}
        self._rows_of = {each: shape.rows_of(job.own) for each, shape in job.shapes.items()}
        self._block: _Block | None = None

    def close(self) -> None:
        self._pool.close(wait=not self.abandoned)
        if self._window_pool is not None:
            self._window_pool.close(wait=not self.abandoned)

    def make(self, batch: int, enter: Callable[[str], None]) -> tuple[dict[str, Any], After] | None:
        """Batch number `batch` and what stands behind it, or None past the last. Batches are asked for in order."""
        job, stage = self._job, "read"
        try:
            enter(stage)
            if not self._streams:
                self._begin()
            first, stop = job.steps.start(batch), job.steps.start(batch + 1)
            for stream in self._streams.values():
                for window in stream.reach(stop - 1):
                    self._charge(window)
            full = all(stream.holds(stop - 1) for stream in self._streams.values())
            if not full and (job.drop_last or not any(stream.holds(first) for stream in self._streams.values())):
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
            if job.accumulation_steps > 1:
                columns = {name: column.reshape(job.accumulation_steps, -1, column.shape[1]) for name, column in columns.items()}
            placement = job.shapes[stop - first].placement
            if placement is None:
                return columns, after
            stage = "place"
            enter(stage)
            return placement.place(columns), after
        except Exception as error:
            error.add_note(f"{job.name}: streaming batch {batch}, stage {stage!r}")
            raise

    def _begin(self) -> None:
        job, spec = self._job, self._job.spec
        deals = [Deal(source, spec.num_streams, seed=spec.seed, shuffle=spec.shuffle) for source in job.sources]
        states = dict(self._entry.streams)
        for state in states.values():
            self._bad.update(dict(enumerate(state.bad)))
        for number in job.own:
            made = Windows(number, spec, deals, self._pool, states.get(number))
            self._streams[number] = Stream(made, self._window_pool)
        for stream in self._streams.values():
            stream.begin()

    def _charge(self, window: Window) -> None:
        """Counts the bad rows of a window. Those of streams that other processes read are known up to the state that was restored."""
        for i, (source, chunks) in enumerate(zip(self._job.sources, window.bad, strict=True)):
            most = source.max_bad_rows
            for loaded in chunks:
                self._bad[i] += loaded.num_bad
                if most is not None and self._bad[i] > most:
                    which = most - self._bad[i] + loaded.num_bad
                    at, said = loaded.bad[min(which, len(loaded.bad) - 1)]
                    raise BudgetError(
                        at=at,
                        problem=f"bad row number {most + 1} of dataset {source.name!r} ({said}), and max_bad_rows is {most}",
                        fix="Correct the rows, or raise max_bad_rows.",
                    )

    def _snapshot(self) -> Books:
        """The books of all streams up to the windows that batches have reached."""
        versions = sum(stream.version for stream in self._streams.values()), self._padding
        if versions != self._versions:
            self._books, self._versions = Books.total((stream.books for stream in self._streams.values()), self._padding), versions
        return self._books

    def _columns(self, batch: int) -> dict[str, NDArray[np.int32]]:
        """This process's rows of a batch that its streams have reached."""
        job = self._job
        if self._block is None or batch >= self._block.stop:
            self._block = self._lay_out(batch)
        block = self._block
        each = job.steps.size(batch)
        shape, rows_of = job.shapes[each], self._rows_of[each]
        at, count = batch - block.start, block.stop - block.start
        self._padding += block.padding[at]
        if count == 1:
            self._block = None
            return block.columns if shape.order is None else _reordered(block.columns, shape.order)
        width = block.columns[INPUT_IDS].shape[1]
        columns = fresh_columns(BATCH_COLUMNS, len(shape.local), width)
        counts = {len(mine) for mine in rows_of.values()}
        for name, values in columns.items():
            if len(counts) == 1:
                rows = counts.copy().pop()
                blocks = block.columns[name].reshape(len(rows_of), count, rows, width)
                np.copyto(values.reshape(len(rows_of), rows, width), blocks[:, at])
                continue
            for mine in rows_of.values():
                a, b = int(mine[0]), int(mine[-1]) + 1
                start = a * count + at * (b - a)
                values[a:b] = block.columns[name][start : start + b - a]
        return columns if shape.order is None else _reordered(columns, shape.order)

    def _lay_out(self, batch: int) -> _Block:
        """This batch, and those behind it whose rows stand in windows that are made already."""
        job = self._job
        each, first = job.steps.size(batch), job.steps.start(batch)
        local, rows_of = job.shapes[each].local, self._rows_of[each]
        count = 1
        if job.spec.pack is not None and job.width is not None:
            made = [(stream.state.first_row - first) // each for stream in self._streams.values() if not stream.ended]
            room = BLOCK_BYTES // (16 * job.width * max(1, len(local)))
            count = max(1, min([BLOCK_BATCHES, room, *made]))
            while job.steps.size(batch + count - 1) != each:
                count -= 1
        rows = np.empty(len(local) * count, np.int64)
        for number, mine in rows_of.items():
            a, b = int(mine[0]) * count, (int(mine[-1]) + 1) * count
            wanted = (first + np.arange(count)[:, None] * each + local[mine] % each).reshape(-1)
            rows[a:b] = np.where(wanted < self._streams[number].state.first_row, wanted, -1)
        width = job.width
        if width is None or job.spec.pack is None:
            longest = row_width(self._lengths(rows, rows_of), job.collate)
            width = longest if width is None else width
        columns = fresh_columns(BATCH_COLUMNS, len(rows), width)
        padding = np.zeros(count, np.int64)
        for number, mine in rows_of.items():
            a, b = int(mine[0]) * count, (int(mine[-1]) + 1) * count
            padding += (rows[a:b] < 0).reshape(count, -1).sum(axis=1)
            self._fill(self._streams[number], rows[a:b], {name: values[a:b] for name, values in columns.items()})
        return _Block(batch, batch + count, columns, padding.tolist())

    def _fill(self, stream: Stream, rows: NDArray[np.int64], part: dict[str, NDArray[np.int32]]) -> None:
        spec, pad = self._job.spec, self._job.pad_token_id
        ids, labels, segments, positions = (part[name] for name in (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS))
        runs = spec.pack is not None and spec.pack.strategy == "stream"
        eos = -1 if spec.eos is None else spec.eos
        done, ahead = np.zeros(len(rows), np.bool_), np.full(len(rows), IGNORE, np.int32)
        last = int(rows.max())
        windows = [window for window in stream.windows if window.first_row <= last]
        masked = any(int(window.tables.mask[0]) for window in windows)
        mask = np.empty(ids.shape if masked else (0, 0), np.uint8)
        for window in (*windows, _EMPTY):
            if done.all():
                break
            _, bad = write_rows(window.view, rows, done, window.tables, eos, pad, not spec.joined, ids, labels, segments, positions, mask)
            assert bad < 0, f"piece {bad} of a window is not in its tokens"
            if runs and isinstance(window, Window):
                last_labels(window.view, window.length, rows, window.tables, eos, spec.joined, ids.shape[1], ahead)
        assert done.all(), "a row stands in no window"
        if spec.joined:
            join_segments(segments, positions)
            shift_labels(ids, segments, mask, labels)
        if runs:
            labels[:, -1] = ahead

    def _lengths(self, rows: NDArray[np.int64], rows_of: Mapping[int, NDArray[np.int64]]) -> NDArray[np.int32]:
        """Tokens of each of a single batch's local rows, which are documents."""
        lengths = np.zeros(len(rows), np.int32)
        for number, mine in rows_of.items():
            for i in mine.tolist():  # rows of one batch
                if rows[i] >= 0:
                    window = next(w for w in self._streams[number].windows if rows[i] < w.stop)
                    lengths[i] = window.layout.length[window.layout.first_piece[rows[i] - window.first_row]]
        return lengths


def _reordered(columns: Mapping[str, NDArray[np.int32]], order: NDArray[np.int64]) -> dict[str, NDArray[np.int32]]:
    first = next(iter(columns.values()))
    fresh = fresh_columns(tuple(columns), *first.shape)
    for name, values in fresh.items():
        np.take(columns[name], order, axis=0, out=values)
    return fresh


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
