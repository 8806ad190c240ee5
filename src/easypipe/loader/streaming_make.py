"""Making the batches of a streaming loader one after the other: streams reach their next rows, and
their tokens are laid out.

Batch `t` holds its rows of the order of plan/turns.py, those of stream 0 first: while no stream has
ended, R = batch / S of each; then the others stand in for those that have. Windows are made in that
order too, always that of the stream whose next row comes first, so which streams had ended by then
is the same for every process, thread and restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.errors import BudgetError
from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.loader.collate import (
    BATCH_COLUMNS,
    CollateConfig,
    fresh_columns,
    row_width,
    shift_labels,
    with_asked,
)
from easypipe.loader.placement import Placement
from easypipe.loader.rows.gather import NO_CHECKS, Tables, eos_ids, write_rows
from easypipe.loader.rows.look_ahead import join_segments, last_labels
from easypipe.loader.steps import Steps
from easypipe.loader.streaming_books import Books
from easypipe.loader.streaming_pool import ReadPool
from easypipe.loader.streaming_read import Deal, Forward
from easypipe.loader.streaming_spec import StreamSpec
from easypipe.loader.streaming_state import StreamState
from easypipe.loader.streaming_stream import Stream
from easypipe.loader.streaming_window import Window, Windows
from easypipe.plan import turns

# laid out together: a call of a compiled function costs as much as the few rows that a stream has
# of one batch
BLOCK_BATCHES = 16
BLOCK_BYTES = 64 << 20  # of such a block, at most, unless one batch takes more


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A size that batches have.

    local: Int64[n], this process's rows of such a batch, ascending. order: Int64[n], which of them
    come first, second and so on where a batch lies otherwise (micro-batch after micro-batch); None:
    as they stand.
    """

    placement: Placement | None
    local: NDArray[np.int64]
    order: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """What making batches depends on. own: the streams that this process reads; all of them where
    streams end.

    shapes: by rows of a batch. width: slots of every batch; None: of its longest row.
    workers: threads that read. ahead: threads that make a window of each stream ahead; 0 makes each
    when a batch needs it.
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
    """Batches `start` to `stop`, laid out stream after stream. places: Int64[stop - start, n],
    where each local row of them lies.
    """

    start: int
    stop: int
    columns: dict[str, NDArray[np.int32]]
    places: NDArray[np.int64]


class Maker:
    """Makes batch after batch, on one thread, from streams whose chunks a pool reads."""

    def __init__(self, job: Job, entry: After) -> None:
        self._job, self._entry = job, entry
        self._books, self._versions = Books(), (-1, 0)
        self._bad: Counter[int] = Counter()  # by dataset
        self.last: Books | None = None  # at the end of the data
        self.abandoned = False  # somebody hangs: close() does not wait
        self._pool = ReadPool(job.workers, f"easypipe-{job.name}-read")
        self._window_pool = (
            ReadPool(job.ahead, f"easypipe-{job.name}-window") if job.ahead else None
        )
        self._streams: dict[int, Stream] = {}
        # rows of each stream, once it has ended
        self._ends = np.full(job.spec.num_streams, turns.NEVER)
        # in windows that are made anew, and given before the state that was restored
        self._rows_before = 0
        self._block: _Block | None = None

    def close(self) -> None:
        self._pool.close(wait=not self.abandoned)
        if self._window_pool is not None:
            self._window_pool.close(wait=not self.abandoned)

    def make(self, batch: int, enter: Callable[[str], None]) -> tuple[dict[str, Any], After] | None:
        """Batch number `batch` and what stands behind it, or None past the last. Batches are asked
        for in order.
        """
        job, stage = self._job, "read"
        try:
            enter(stage)
            if not self._streams:
                self._begin()
            start, stop = job.steps.start(batch), job.steps.start(batch + 1)
            self._reach(stop)
            given = turns.given_by(self._ends, stop)
            there = int(given.sum() - turns.given_by(self._ends, start).sum())
            if not there or (there < stop - start and job.drop_last):
                self.last = self._snapshot(start, left_out=there)
                return None
            stage = "gather"
            enter(stage)
            columns = self._columns(batch)
            states = []
            for number, stream in self._streams.items():
                stream.forget(given[number])
                states.append(Numbered(number, stream.state_at(given[number])))
            after = After(batch + 1, tuple(states), self._snapshot(stop))
            columns = with_asked(columns, job.collate)
            if job.accumulation_steps > 1:
                columns = {
                    name: column.reshape(job.accumulation_steps, -1, column.shape[1])
                    for name, column in columns.items()
                }
            placement = job.shapes[stop - start].placement
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
        deals = [
            Deal(source, spec.num_streams, seed=spec.seed, shuffle=spec.shuffle)
            for source in job.sources
        ]
        states = dict(self._entry.streams)
        for state in states.values():
            self._bad.update(dict(enumerate(state.bad)))
        # Windows of a weight schedule depend on which streams have ended, which is known in the
        # order of their rows alone.
        ahead = self._window_pool if spec.schedule is None or spec.last_epoch is None else None
        for number in job.own:
            stream = self._streams[number] = Stream(
                Windows(number, spec, deals, self._pool, states.get(number), self._ends), ahead
            )
            self._ended(number, stream)
        given = turns.given_by(self._ends, job.steps.start(self._entry.batch))
        self._rows_before = sum(
            int(given[number]) - stream.state.first_row for number, stream in self._streams.items()
        )
        for stream in self._streams.values():
            stream.begin()

    def _reach(self, rows: int) -> None:
        """Makes windows until all of the first `rows` rows that are this process's stand in one, or
        every stream has ended.
        """
        while (known := self._known()) is not None and known[0] < rows:
            stream = self._streams[known[1]]
            self._charge(stream.go_on())
            self._ended(known[1], stream)

    def _known(self) -> tuple[int, int] | None:
        """(rows of the order that stand in windows, the stream whose row is next); None: every
        stream has ended.
        """
        live = [
            (stream.state.first_row, number)
            for number, stream in self._streams.items()
            if not stream.ended
        ]
        return (turns.rows_before(self._ends, *min(live)), min(live)[1]) if live else None

    def _ended(self, number: int, stream: Stream) -> None:
        if stream.ended:
            self._ends[number] = stream.state.first_row

    def _charge(self, window: Window) -> None:
        """Counts the bad rows of a window. Those of streams that other processes read are known up
        to the state that was restored.
        """
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

    def _snapshot(self, rows: int, left_out: int = 0) -> Books:
        """The books of all streams up to the windows that batches have reached, where the first
        `rows` rows were given.
        """
        versions = sum(stream.version for stream in self._streams.values()), rows
        if versions != self._versions:
            own = list(self._streams)
            begin = self._job.steps.start(self._entry.batch)
            before, given = turns.given_by(self._ends, begin), turns.given_by(self._ends, rows)
            self._books, self._versions = (
                Books.total(stream.books for stream in self._streams.values()),
                versions,
            )
            self._books.rows_given, self._books.rows_before = (
                int((given - before)[own].sum()),
                self._rows_before,
            )
            self._books.padding_rows = rows - begin - int((given - before).sum())
        self._books.rows_left_out = left_out
        return self._books

    def _columns(self, batch: int) -> dict[str, NDArray[np.int32]]:
        """This process's rows of a batch that its streams have reached."""
        block = self._block
        if block is None or batch >= block.stop:
            block = self._block = self._lay_out(batch)
        shape, places = (
            self._job.shapes[self._job.steps.size(batch)],
            block.places[batch - block.start],
        )
        if shape.order is not None:
            places = places[shape.order]
        elif block.stop - block.start == 1 and (places[:-1] < places[1:]).all():
            self._block = None
            return block.columns
        columns = fresh_columns(BATCH_COLUMNS, len(places), block.columns[INPUT_IDS].shape[1])
        for name, values in columns.items():
            # "raise" would make a copy more
            np.take(block.columns[name], places, axis=0, out=values, mode="clip")
        return columns

    def _lay_out(self, batch: int) -> _Block:
        """This batch, and those behind it whose rows stand in windows that are made already."""
        job = self._job
        start, size = job.steps.start(batch), job.steps.size(batch)
        local = job.shapes[size].local
        count = 1
        if job.spec.pack is not None and job.width is not None:
            known = self._known()
            made = (int(self._ends.sum()) if known is None else known[0]) - start
            room = BLOCK_BYTES // (16 * job.width * max(1, len(local)))
            count = max(1, min(BLOCK_BATCHES, room, made // size))
            while job.steps.size(batch + count - 1) != size:
                count -= 1
        parts = [
            turns.in_order_of_streams(self._ends, start + i * size, start + (i + 1) * size)
            for i in range(count)
        ]
        streams, rows = (
            np.stack(columns)[:, local].reshape(-1) for columns in zip(*parts, strict=True)
        )
        order = np.argsort(streams, kind="stable")
        streams, rows = streams[order], rows[order]
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        numbers = [-1, *self._streams]
        edges = [np.searchsorted(streams, (number, number + 1)).tolist() for number in numbers]
        width = job.width
        if width is None or job.spec.pack is None:
            longest = row_width(self._lengths(streams, rows), job.collate)
            width = longest if width is None else width
        columns = fresh_columns(BATCH_COLUMNS, len(rows), width)
        for number, (a, b) in zip(numbers, edges, strict=True):
            if a < b:
                stream = self._streams.get(number)
                self._fill(
                    [] if stream is None else stream.windows,
                    rows[a:b],
                    {name: values[a:b] for name, values in columns.items()},
                )
        return _Block(batch, batch + count, columns, places.reshape(count, -1))

    def _fill(
        self, windows: Sequence[Window], rows: NDArray[np.int64], part: dict[str, NDArray[np.int32]]
    ) -> None:
        spec, pad = self._job.spec, self._job.pad_token_id
        ids, labels, segments, positions = (
            part[name] for name in (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS)
        )
        runs = spec.pack is not None and spec.pack.strategy == "stream"
        eos = eos_ids(spec.eos, len(spec.weights))
        done, ahead = np.zeros(len(rows), np.bool_), np.full(len(rows), IGNORE, np.int32)
        last = int(rows.max())
        windows = [window for window in windows if window.first_row <= last]
        masked = any(int(window.tables.mask[0]) for window in windows)
        mask = np.empty(ids.shape if masked else (0, 0), np.uint8)
        for window in (*windows, _EMPTY):
            if done.all():
                break
            targets, hold = not spec.joined, not (spec.train_continued or runs)
            _, bad, _ = write_rows(
                window.view,
                rows,
                done,
                window.tables,
                eos,
                pad,
                hold,
                targets,
                ids,
                labels,
                segments,
                positions,
                mask,
                NO_CHECKS,
            )
            assert bad < 0, f"piece {bad} of a window is not in its tokens"
            if runs and isinstance(window, Window):
                last_labels(
                    window.view,
                    window.length,
                    rows,
                    window.tables,
                    eos,
                    spec.joined,
                    ids.shape[1],
                    ahead,
                    NO_CHECKS,
                )
        assert done.all(), "a row stands in no window"
        if spec.joined:
            join_segments(segments, positions)
            shift_labels(ids, segments, mask, labels)
        if runs:
            labels[:, -1] = ahead

    def _lengths(self, streams: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens of each of a single batch's local rows, which are documents."""
        lengths = np.zeros(len(rows), np.int32)
        # rows of one batch
        for i, (number, row) in enumerate(zip(streams.tolist(), rows.tolist(), strict=True)):
            if number >= 0:
                window = next(w for w in self._streams[number].windows if row < w.stop)
                lengths[i] = window.layout.length[window.layout.first_piece[row - window.first_row]]
        return lengths


class _Empty(NamedTuple):
    """A window without rows, for those of padding."""

    first_row: int
    view: tuple
    tables: Tables


def _empty() -> _Empty:
    none = np.zeros(1, np.uint64)
    table = Tables(
        np.array([0, 1]),
        np.array([0, 0]),
        none,
        none,
        np.zeros(1, np.uint64),
        np.array([2]),
        none,
        none,
    )
    view = (
        0,
        np.zeros(1, np.int64),
        np.zeros((5, 0), np.int32),
        np.zeros(0, np.int32),
        np.zeros(0, np.int64),
    )
    return _Empty(0, view, table)


_EMPTY = _empty()
