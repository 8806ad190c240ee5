"""Plan: the sequence of windows, which of them it keeps, and the content of any row.

row     a row of the whole run, counted over all epochs
window  `spec.window_docs` draws (fewer if an epoch ends; under "concat", those that fill whole
        rows); no row holds two windows
draw    the n-th document of the mixture
piece   the part of a draw that is in one row of a window
mark    a state that the scan passed and keeps, one every MARK_EVERY windows

Which documents are in a row is a pure function of datasets, spec and row: marks, caches and threads
only affect how fast the answer comes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from easypipe.core.errors import PlanError, StateError
from easypipe.core.jit import jit
from easypipe.core.values import Int32, Int64
from easypipe.plan import plan_stats
from easypipe.plan.feed import CachedFeed
from easypipe.plan.mix import NEVER
from easypipe.plan.pack import nothing_fits
from easypipe.plan.plan_stats import COUNTERS, FIELDS, DatasetStats, PlanStats
from easypipe.plan.spec import (
    At,
    PlanDataset,
    PlanSpec,
    WindowState,
    check,
    fingerprint,
    window_docs,
)
from easypipe.plan.window import Planner, View, Window


class Pieces(NamedTuple):
    """The pieces of some rows, in the order in which the rows were asked for, then by slot.

    Attributes:
        row: Int64[p], the index into the rows that were asked for.
        slot: Int32[p], the first slot of the piece.
        segment: Int32[p], from 1.
        dataset: Int32[p].
        doc: Int64[p], the number of the document within its dataset.
        start: Int32[p], the first token of the document in the piece.
        length: Int32[p], tokens.
    """

    row: Int64
    slot: Int32
    segment: Int32
    dataset: Int32
    doc: Int64
    start: Int32
    length: Int32


_NONE_32, _NONE_64 = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
NO_PIECES = Pieces(_NONE_64, _NONE_32, _NONE_32, _NONE_32, _NONE_64, _NONE_32, _NONE_32)


def pieces_of(window: Window[At], rows: Int64) -> Pieces | None:
    """Returns the pieces of `rows`, or None if a row is outside the window."""
    view = window.view
    total = _count_pieces(rows, view)
    if total < 0:
        return None
    wide, narrow = np.empty((2, total), dtype=np.int64), np.empty((5, total), dtype=np.int32)
    _gather_pieces(rows, view, wide, narrow)
    return Pieces(wide[0], narrow[0], narrow[1], narrow[2], wide[1], narrow[3], narrow[4])


def join(parts: Sequence[Pieces]) -> Pieces:
    """Returns the pieces of all `parts`, rows ascending."""
    order = np.argsort(np.concatenate([part.row for part in parts]), kind="stable")
    return Pieces._make(np.concatenate(columns)[order] for columns in zip(*parts, strict=True))


@jit
def _count_pieces(rows: Int64, view: View) -> int:
    total, first_piece = 0, view.first_piece
    for n in range(rows.shape[0]):
        row: int = rows[n] - view.first_row
        if row < 0 or row >= first_piece.shape[0] - 1:
            return -1
        total += first_piece[row + 1] - first_piece[row]
    return total


@jit
def _gather_pieces(rows: Int64, view: View, wide: Int64, narrow: Int32) -> None:
    at = 0
    for n in range(rows.shape[0]):
        row = rows[n] - view.first_row
        first = view.first_piece[row]
        for piece in range(first, view.first_piece[row + 1]):
            draw = view.table[2, piece]
            wide[0, at], wide[1, at] = n, view.doc[draw]
            narrow[0, at], narrow[1, at] = view.table[1, piece], piece - first + 1
            narrow[2, at], narrow[3, at] = view.dataset[draw], view.table[3, piece]
            narrow[4, at] = view.table[4, piece]
            at += 1


__all__ = [
    "DatasetStats",
    "Pieces",
    "Plan",
    "PlanDataset",
    "PlanSpec",
    "PlanStats",
    "RowAddress",
    "Window",
    "WindowState",
    "window_docs",
]

MARK_EVERY = 16


class RowAddress(NamedTuple):
    """The place of a row in the plan, and its pieces."""

    row: int
    epoch: int
    window: int
    row_in_window: int
    pieces: Pieces


class Plan:
    """Which documents are in every row. Final; every method may be called from several threads.

    Law: `pieces(rows)` depends on datasets and spec alone, not on earlier calls, `checkpoints`,
    `resume` or `cache_bytes`.

    Args:
        datasets: The datasets of the mixture.
        spec: The choices that the plan follows.
        checkpoints: States that an earlier plan with the same fingerprint returned.
        cache_bytes: The bytes of planned windows that are kept for neighbouring rows.

    Raises:
        PlanError: Datasets and spec do not make a plan.
    """

    def __init__(
        self,
        datasets: Sequence[PlanDataset],
        spec: PlanSpec,
        checkpoints: Iterable[WindowState[int]] = (),
        *,
        cache_bytes: int = 64 << 20,
    ) -> None:
        check(datasets, spec)
        self.datasets = tuple(datasets)
        self.spec = spec
        self.fingerprint = fingerprint(datasets, spec)
        self._feed = CachedFeed(datasets, spec)
        self._planner = Planner(spec, self._feed)
        self.ends = self._planner.last_epoch is not None  # whether there is a last row
        self._cache_bytes = cache_bytes
        self._scan_lock = threading.RLock()  # guards planning; taken before _lock if both are
        self._lock = threading.Lock()  # guards the fields below; never held while planning
        self._windows: OrderedDict[int, Window[int]] = OrderedDict()
        self._latest: Window[int] | None = None
        self._marks: list[WindowState[int]] = [self._planner.epoch_start(0, 0, 0)]
        self._num_rows: int | None = None
        self._some_document_fits = False  # True once it is known
        self._counted: tuple[WindowState[int], Int64] = (
            self._marks[0],
            np.zeros((len(datasets), COUNTERS), dtype=np.int64),
        )
        for state in checkpoints:
            self.resume(state)

    @property
    def num_rows(self) -> int | None:
        """The rows of all epochs; None if there is no end.

        The first use scans the plan, unless a checkpoint is at its end.
        """
        if not self.ends:
            return None
        if self._num_rows is None:
            last = self._planner.last_epoch
            assert last is not None
            if self.spec.pack is None and self._planner.stop != "first_exhausted":
                most = last if self.spec.has_epochs else NEVER  # passes over one dataset
                passes = [min(most, most if cap is None else cap) for cap in self.spec.caps]
                self._num_rows = sum(
                    count * n for count, n in zip(self._feed.num_docs.tolist(), passes, strict=True)
                )
            else:
                with self._scan_lock:
                    self._scan(None)
        return self._num_rows

    def window_at(self, row: int) -> Window[int]:
        """Returns the window that contains `row`.

        Raises:
            PlanError: The row is after the last.
        """
        return self._cached(row) or self._planned(row)

    def locate(self, row: int) -> RowAddress:
        """Returns which documents are in `row`; reads no tokens.

        Raises:
            PlanError: The row is after the last.
        """
        window = self.window_at(row)
        pieces = self.pieces(np.array([row], dtype=np.int64))
        return RowAddress(
            row, window.state.epoch, window.state.index, row - window.first_row, pieces
        )

    def pieces(self, rows: Int64) -> Pieces:
        """Returns the pieces of `rows` (Int64[n], any order).

        Raises:
            PlanError: A row is after the last.
        """
        rows = np.require(rows, dtype=np.int64, requirements=["C", "W"])
        if rows.size == 0:
            return NO_PIECES
        window = self._latest
        if window is not None:
            found = pieces_of(window, rows)
            if found is not None:
                return found
        parts: list[Pieces] = []
        left = np.arange(rows.size)
        while left.size:
            window = self.window_at(int(rows[left[0]]))
            inside = (rows[left] >= window.first_row) & (rows[left] < window.after.first_row)
            found = pieces_of(window, rows[left[inside]])
            assert found is not None
            parts.append(found._replace(row=left[inside][found.row]))
            left = left[~inside]
        return parts[0] if len(parts) == 1 else join(parts)

    def state_at(self, row: int) -> WindowState[int]:
        """Returns the state of the window that contains `row`.

        For the row after the last it is the state at the end.

        Raises:
            PlanError: The row is later than that.
        """
        window = self._cached(row)
        if window is not None:
            return window.state
        with self._scan_lock:
            state = self._scan(row)[0]
        if self._planner.ended(state) and row > state.first_row:
            raise self._no_row(row)
        return state

    def resume(self, state: WindowState[int]) -> None:
        """Lets the scan start from `state`: its rows are planned without the rows before it.

        A state of another plan over the same datasets cannot be distinguished from one of this
        plan: compare fingerprints.

        Raises:
            StateError: The state cannot be one of a plan over these datasets.
        """
        size, epochs = len(self.datasets), self._planner.last_epoch
        fits = len(state.drawn) == len(state.deficits) == len(state.active) == size
        if fits and (cut := state.cut) is not None:
            runs = self.spec.pack is not None and self.spec.pack.concat
            fits = runs and 0 <= cut[0] < size and state.drawn[cut[0]] > 0 and cut[1] > 0
        if (
            not fits
            or min(state.index, state.epoch, state.first_row, *state.drawn) < 0
            or sum(state.deficits)
        ):
            raise StateError(
                at="window",
                problem=f"{state.to_json()} is not a state of a plan over {size} datasets",
            )
        if (self._feed.remaining(state) < 0).any():
            raise StateError(
                at="window", problem=f"{state.to_json()} has drawn more documents than there are"
            )
        if epochs is not None and (
            state.epoch > epochs or (state.epoch == epochs and any(state.drawn))
        ):
            return  # from a plan with more epochs
        self._mark(state)

    def checkpoints(self) -> tuple[WindowState[int], ...]:
        """Returns the states that the scan has kept, for a later `Plan(..., checkpoints=...)`.

        There is one every 16 windows, and also the resumed ones and the end.
        """
        with self._lock:
            return tuple(self._marks)

    def stats(self, stop_row: int | None = None, start_row: int = 0) -> PlanStats:
        """Returns what became of the documents of rows `start_row` to `stop_row`.

        It scans from the start, or from the end of the last call. `passes` and `unreached` count
        from row 0.

        Args:
            stop_row: None for the last row, so the plan must end.
            start_row: The first row to count.

        Raises:
            PlanError: A row is after the last, or a plan without an end is asked for its end.
        """
        if stop_row is None and (stop_row := self.num_rows) is None:
            raise PlanError(at="stats", problem="this plan has no end", fix="Say up to which row.")
        before = self._counters(start_row)[0] if start_row else 0
        counters, begun = self._counters(stop_row)
        rows, pack, datasets = stop_row - start_row, self.spec.pack, dict[str, DatasetStats]()
        for dataset, cap, line, drawn in zip(
            self.datasets,
            self.spec.caps,
            (counters - before).tolist(),
            counters[:, 0].tolist(),
            strict=True,
        ):
            passes = begun if self.spec.has_epochs else -(-drawn // dataset.num_docs)
            passes = min(max(1, passes), cap or NEVER)
            datasets[dataset.name] = DatasetStats(
                num_docs=dataset.num_docs,
                passes=passes,
                unreached=passes * dataset.num_docs - drawn,
                **dict(zip(FIELDS, line, strict=True)),
            )
        placed = sum(part.tokens_placed for part in datasets.values())
        slots = placed if pack is None else rows * pack.seq_length
        return PlanStats(rows=rows, slots=slots, padding=slots - placed, datasets=datasets)

    def _counters(self, stop_row: int) -> tuple[Int64, int]:
        """Returns (Int64[k, COUNTERS] of rows 0 to `stop_row`, the epochs begun by then)."""
        end = self.num_rows
        if stop_row < 0 or (end is not None and stop_row > end):
            raise self._no_row(stop_row)
        with self._scan_lock:
            state, counters = self._counted
            if state.first_row > stop_row:
                state, counters = self._marks[0], np.zeros_like(counters)
            counters, partly = counters.copy(), None
            for window in self._walk(state):
                if window.first_row == stop_row != end:
                    break
                if window.after.first_row > stop_row:
                    partly = window
                    break
                self._count(window, window.num_rows, counters)
                state = self._keep(window.after)
            self._counted = (state, counters.copy())
            if partly is not None:
                self._count(partly, stop_row - partly.first_row, counters)
            return counters, state.epoch + (partly is not None or any(state.drawn))

    def _count(self, window: Window[int], num_rows: int, counters: Int64) -> None:
        drawn = slice(window.dataset.size - window.ahead)
        cut = 0 if window.state.cut is None else window.state.cut[1]
        draws = (window.dataset[drawn], window.length[drawn])
        plan_stats.count(draws, window.layout, num_rows, self.spec.pack, counters, cut)

    # The scan. Callers of _scan and _walk hold _scan_lock.

    def _scan(self, row: int | None) -> tuple[WindowState[int], Window[int] | None]:
        """Walks to the window that holds `row`.

        Returns:
            The state of that window, and the window if it was planned on the way; the state at the
            end and None if no window has the row.
        """
        state = self._nearest(row)
        if self.spec.pack is None:
            while not self._planner.ended(state):
                after = self._planner.after_draws(state)
                if row is not None and row < after.first_row:
                    return state, None
                state = self._keep(after)
            return state, None
        for window in self._walk(state):
            if row is not None and row < window.after.first_row:
                return window.state, window
            state = self._keep(window.after)
        return state, None

    def _walk(self, state: WindowState[int]) -> Iterator[Window[int]]:
        while not self._planner.ended(state):
            window = self._planner.window(state)
            yield window
            if window.num_rows == 0 and window.dataset.size and not self.ends:
                self.check_that_some_document_fits()  # otherwise it would be scanned without end
            state = window.after

    def check_that_some_document_fits(self) -> None:
        """Checks that packing finds a place for some document.

        Raises:
            PlanError: Packing leaves out every document.
        """
        pack, num_docs = self.spec.pack, int(self._feed.num_docs.sum())
        if pack is None or not num_docs:
            return
        self._some_document_fits = self._some_document_fits or self._feed.some_document_fits(pack)
        if not self._some_document_fits:
            raise nothing_fits(num_docs, pack)

    # The methods that keep and find marks and windows take _lock themselves.

    def _nearest(self, row: int | None) -> WindowState[int]:
        """Returns the last known state at or before `row` (None: the last of all)."""
        if row is not None and row < 0:
            raise self._no_row(row)
        with self._lock:
            marks = self._marks
            best = marks[
                -1
                if row is None
                else bisect_right(marks, row, key=lambda state: state.first_row) - 1
            ]
            for window in self._windows.values():
                if window.after.index > best.index and (
                    row is None or window.after.first_row <= row
                ):
                    best = window.after
        return best

    def _keep(self, state: WindowState[int]) -> WindowState[int]:
        if state.index % MARK_EVERY == 0 or self._planner.ended(state):
            self._mark(state)
        return state

    def _mark(self, state: WindowState[int]) -> None:
        with self._lock:
            place = bisect_left(self._marks, state.index, key=lambda mark: mark.index)
            if place == len(self._marks) or self._marks[place].index != state.index:
                self._marks.insert(place, state)
            if self._planner.ended(state):
                self._num_rows = state.first_row

    def _cached(self, row: int) -> Window[int] | None:
        window = self._latest
        if window is not None and window.first_row <= row < window.after.first_row:
            return window
        with self._lock:
            for window in reversed(self._windows.values()):
                if window.first_row <= row < window.after.first_row:
                    self._windows.move_to_end(window.state.index)
                    self._latest = window
                    return window
        return None

    def _planned(self, row: int) -> Window[int]:
        """Plans the window of `row` and keeps it; drops the oldest windows beyond `cache_bytes`."""
        with self._scan_lock:
            window = self._cached(row)  # another thread may have planned it while this one waited
            if window is not None:
                return window
            state, window = self._scan(row)
            if self._planner.ended(state):
                raise self._no_row(row)
            window = window or self._planner.window(state)
            self._keep(window.after)
        with self._lock:
            self._windows[state.index] = self._latest = window
            held = sum(window.num_bytes for window in self._windows.values())
            while held > self._cache_bytes and len(self._windows) > 2:
                held -= self._windows.popitem(last=False)[1].num_bytes
        return window

    def _no_row(self, row: int) -> PlanError:
        return PlanError(
            at=f"row {row}",
            problem=f"the plan has {self._num_rows} rows" if row >= 0 else "rows count from 0",
        )
