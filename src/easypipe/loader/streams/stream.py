"""Stream: one canonical stream, the documents that it draws in blocks, and its windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from easypipe.core.errors import ConfigError
from easypipe.core.random import child, fold
from easypipe.core.schema import offsets_of
from easypipe.core.values import Int32, Int64, UInt64
from easypipe.loader.collate import address
from easypipe.loader.prefetch import ReadPool
from easypipe.loader.rows.gather import Tables
from easypipe.loader.streams.feed import FEWER_STREAMS, Cursor, Deal, Loaded, Piece, Place
from easypipe.loader.streams.ledger import StreamTotals
from easypipe.loader.streams.spec import StreamSpec
from easypipe.loader.streams.state import StreamState
from easypipe.plan import mix, order, plan_stats
from easypipe.plan.feed import WindowRule
from easypipe.plan.pack import nothing_fits
from easypipe.plan.spec import Stage
from easypipe.plan.window import Planner, View, Window

BLOCK_DOCS = 256  # documents are drawn in blocks of this many; a window ends between two blocks


class StreamFeed:
    """The documents of one stream, read forward: states must come in order. It implements Feed.

    Weights that follow the training step depend on the rows of all streams: `ends` says where
    streams have ended. The code that makes the windows in the order of their rows updates it
    (plan/order.py).

    Attributes:
        totals: The counters of the stream.
        cursors: One for each dataset, after the feed was opened.
        taken: The documents of the window that was made last.
    """

    counted, block = False, BLOCK_DOCS

    def __init__(self, number: int, spec: StreamSpec, deals: Sequence[Deal], ends: Int64) -> None:
        self.number, self.spec, self._deals, self._ends = number, spec, deals, ends
        self.num_docs, self.draws_next = np.ones(len(deals), np.int64), spec.joined
        self.names = [deal.source.name for deal in deals]
        seed = spec.plan.seed
        self._keys = [fold(seed, "stream", number, name) for name in self.names]
        self._row_key = fold(seed, "stream rows", number)
        self.totals = StreamTotals.total(len(deals))
        self.cursors: list[Cursor] = []
        self.taken: list[list[Piece]] = []

    def open(self, state: StreamState, pool: ReadPool) -> None:
        """Starts to read after `state`."""
        plan = self.spec.plan
        most, total = plan.window_docs, sum(plan.weights)
        for i, deal in enumerate(self._deals):
            passes = 0 if plan.has_epochs else plan.caps[i]
            counts = self.totals.datasets[i]
            cursor = Cursor(deal, self.number, state.drawn[i], pool, counts, passes)
            needed = most * plan.weights[i] // total if state.active[i] else 0
            cursor.read_ahead(needed, plan.window_tokens)
            self.cursors.append(cursor)

    def rule(self, state: StreamState) -> WindowRule:
        plan, stage = self.spec.plan, self._stage(state.first_row)
        docs, tokens = plan.window_docs, plan.window_tokens
        if stage.rows is not None and plan.pack is None:
            docs = min(docs, stage.rows)
        elif stage.rows is not None and plan.pack is not None:
            full = (stage.rows + plan.pack.concat) * plan.pack.seq_length
            tokens = full if tokens is None else min(full, tokens)
        parts = [Fraction(1, len(self.names))] * len(self.names)
        keys = self._keys if self.spec.shuffle_window else ()
        documents = [child(key, state.first_row + state.epoch) for key in keys]
        return WindowRule(
            stage, docs, tokens, parts, child(self._row_key, state.first_row), documents
        )

    def _stage(self, row: int) -> Stage:
        plan, streams = self.spec.plan, self.spec.num_streams
        if plan.schedule is None:
            return plan.stage(row)
        # The schedule counts the rows of one stream as if none had ended.
        known = order.known_before(self._ends, row, self.number)
        there = order.rows_before(known, row, self.number) // streams
        stage = plan.stage(there)
        if stage.rows is None:
            return stage
        rows = int(order.given_by(known, (there + stage.rows) * streams)[self.number]) - row
        return Stage(stage.shares, rows, rows + stage.most - stage.rows)

    def remaining(self, state: StreamState, enough: Int64) -> Int64:
        return np.array(
            [cursor.fill(n) for cursor, n in zip(self.cursors, enough.tolist(), strict=True)]
        )

    def look(self, state: StreamState, start: Int64, counts: Int64) -> tuple[Int64, Int32, Int64]:
        stop = np.minimum(start + counts, self.remaining(state, start + counts))
        there = np.maximum(stop - start, 0)
        pieces = [piece for part in self._pieces(start, start + there) for piece in part]
        lengths = [np.diff(loaded.offsets[a : b + 1]) for loaded, a, b in pieces]
        if self.spec.eos is not None:
            ends = (loaded.has_eos[a:b] for loaded, a, b in pieces)
            lengths = [one + ~has_eos for one, has_eos in zip(lengths, ends, strict=True)]
        docs = np.arange(there.sum()) + np.repeat(start - (np.cumsum(there) - there), there)
        return docs, np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int32), there

    def tokens(self, start: Int64, stop: Int64) -> int:
        return sum(piece.tokens for part in self._pieces(start, stop) for piece in part)

    def advance(
        self, state: StreamState, draws: mix.Draws, cut: tuple[int, int] | None
    ) -> tuple[Place, ...]:
        counts = draws.counts.copy()
        if state.cut is not None:
            counts[state.cut[0]] += 1
        self.taken = self._pieces(np.zeros_like(counts), counts)
        for i, (cursor, count) in enumerate(zip(self.cursors, counts.tolist(), strict=True)):
            # a document that is cut keeps waiting
            cursor.take(count - (cut is not None and cut[0] == i))
            cursor.read_ahead(0 if draws.ended and cut is None else count)
        return tuple(cursor.place for cursor in self.cursors)

    def begin(self, epoch: int) -> tuple[Place, ...]:
        last = self.spec.last_epoch
        for cursor in self.cursors:
            cursor.end_epoch()
            if last is None or epoch < last:
                cursor.begin(epoch)
        if not self.cursors:
            return (Place(epoch),) * len(self.names)
        return tuple(Place(epoch, bad=cursor.bad) for cursor in self.cursors)

    def name(self, dataset: int, doc: int) -> str:
        return f"dataset {self.names[dataset]!r}"

    def _pieces(self, start: Int64, stop: Int64) -> list[list[Piece]]:
        spans = zip(self.cursors, start.tolist(), stop.tolist(), strict=True)
        return [cursor.pieces(a, b) for cursor, a, b in spans]


class Made(NamedTuple):
    """A window of a stream, with what kernels need to read it.

    Attributes:
        window: The window.
        view: The window in the form for kernels.
        tables: Where its documents are.
        values: Where the values of each aligned column are.
        masked: Whether there are loss masks.
        chunks: The documents of each dataset; they own the memory that `tables` points to.
        totals: The counters of the stream after the window.
        bad: For each dataset, the chunks with bad rows that count from this window on.
    """

    window: Window[Place]
    view: View
    tables: Tables
    values: Mapping[str, UInt64]
    masked: bool
    chunks: list[list[Piece]]
    totals: StreamTotals
    bad: list[list[Loaded]]

    @property
    def stop(self) -> int:
        return self.window.after.first_row


class Stream:
    """The windows of one canonical stream, made when a row of them is requested, or one ahead.

    Windows are kept until they are forgotten. It is not thread-safe.

    Law: equal states lead to equal windows, whatever other streams there are. With weights that
    follow the training step, windows also depend on the streams that ended before their first row.

    Attributes:
        state: The state after the last requested window, regardless of windows made ahead.
        ended: Whether the stream has ended there.
        totals: The counters of the stream there.
    """

    def __init__(
        self,
        feed: StreamFeed,
        pool: ReadPool,
        state: StreamState | None = None,
        ahead: ReadPool | None = None,
    ) -> None:
        """Begins at `state`, or at the first row.

        Args:
            feed: The documents of the stream.
            pool: The threads that read chunks.
            state: Where to begin.
            ahead: The thread that makes the next window while rows of this one are used; None makes
                each on request.
        """
        self._feed, self._ahead = feed, ahead
        self._planner = Planner(feed.spec.plan, feed)
        self._next: Future[Made] | None = None
        self.number, self.windows = feed.number, list[Made]()
        self.state = self._last = state or self._planner.epoch_start(0, 0, 0)
        self.ended = self._planner.ended(self.state)
        if not self.ended:
            feed.open(self.state, pool)
        self.totals = self._totals()
        self._first_epoch = self.state.epoch
        self._end_row = -1  # the end of the last epoch that `_check_some_row` checked
        # The tokens of a document that is cut at the state which were placed before it was saved.
        self._placed_before = self.state.cut[1] if self.state.cut is not None else 0

    def go_on(self) -> Made:
        """Returns the next window, which may have no rows."""
        made = self._make() if self._ahead is None else self._wait(self._ahead).result()
        self._next = None
        if made.window.num_rows:
            self.windows.append(made)
        self.state, self.totals = made.window.after, made.totals
        self.ended = self._planner.ended(self.state)
        self.begin()
        return made

    def begin(self) -> None:
        """Starts to make the next window, if windows are made ahead."""
        if self._ahead is not None and not self.ended:
            self._wait(self._ahead)

    def state_at(self, row: int) -> StreamState:
        """Returns the state from which `row` is found again; the row must not be forgotten."""
        return next((made.window.state for made in self.windows if row < made.stop), self.state)

    def forget(self, row: int) -> None:
        """Drops windows that hold nothing at or after `row`."""
        while self.windows and self.windows[0].stop <= row:
            self.windows.pop(0)

    def made_at(self, row: int) -> Made:
        return next(made for made in self.windows if row < made.stop)

    def _wait(self, ahead: ReadPool) -> Future[Made]:
        if self._next is None:
            self._next = ahead.submit(Stream._make, self)
        return self._next

    def _make(self) -> Made:
        """Makes the window after the last one."""
        window = self._planner.window(self._last)
        chunks = self._feed.taken
        self._enter(window, chunks)
        if window.after.epoch > window.state.epoch:
            self._check_some_row(window)
        self._last = window.after
        bad = [cursor.bad_chunks() for cursor in self._feed.cursors]
        tables = lay(chunks)
        masked = bool(tables.mask.any())
        values = lay_values(chunks)
        return Made(window, window.view, tables, values, masked, chunks, self._totals(), bad)

    def _totals(self) -> StreamTotals:
        """Returns a copy of the current counters."""
        return StreamTotals.total(len(self._feed.names), [self._feed.totals])

    def _enter(self, window: Window[Place], chunks: list[list[Piece]]) -> None:
        """Counts what the window holds, without a last document that has no token in it."""
        spec, totals, before = self._feed.spec, self._feed.totals, window.state
        cut, placed, after = before.cut, self._placed_before, window.after.cut
        docs = slice(window.dataset.size - window.ahead)
        dataset, doc, lengths = window.dataset[docs], window.doc[docs], window.length[docs].copy()
        lengths[:1] -= placed
        start = 0 if cut is None else cut[1]
        segments = totals.table[:, plan_stats.SEGMENTS].copy()
        pack, layout = spec.plan.pack, window.layout
        draws = (dataset, lengths)
        plan_stats.count(draws, layout, layout.num_rows, pack, totals.table, start - placed)
        if spec.joined:  # only the first token of an epoch is not a label
            totals.table[:, plan_stats.SEGMENTS] = segments
            if cut is None and not any(any(place[1:4]) for place in before.drawn):
                totals.table[dataset[np.flatnonzero(lengths)[:1]], plan_stats.SEGMENTS] += 1
        again = int(start > placed)  # a first document that was already counted when it was drawn
        for i, (counts, part) in enumerate(zip(totals.datasets, chunks, strict=True)):
            if spec.eos is not None and part:
                has_eos = np.concatenate([loaded.has_eos[a:b] for loaded, a, b in part])
                mine = doc[again:][dataset[again:] == i]
                counts["drawn", "EOS"] += int((~has_eos[mine]).sum())
            # a document that is cut was counted as drawn, and waits to be used again
            waits = after is not None and after[1] > 0 and after[0] == i
            counts["drawn", "waiting"] = self._feed.cursors[i].waiting - waits
        if after is None or window.dataset.size > 1:
            self._placed_before = 0  # that document has ended
        totals.packed_rows += layout.num_rows

    def _check_some_row(self, window: Window[Place]) -> None:
        """Checks that an epoch had a row.

        Raises:
            PlanError: Every document was longer than a row and left out.
            ConfigError: A whole epoch had no rows, and neither would all others.
        """
        end_row, self._end_row = self._end_row, window.after.first_row
        if end_row != self._end_row or self._planner.last_epoch is not None:
            return
        spec, dropped = self._feed.spec, self._feed.totals.all_dropped
        if spec.plan.pack is not None and dropped:
            raise nothing_fits(dropped // (window.after.epoch - self._first_epoch), spec.plan.pack)
        raise ConfigError(
            at="num_streams",
            problem=f"a whole pass of stream {self.number} of {spec.num_streams} over its share of "
            f"{', '.join(map(repr, self._feed.names))} had no row, and another would have none",
            fix=FEWER_STREAMS,
        )


def lay(chunks: list[list[Piece]]) -> Tables:
    """Returns where documents are: one part for each piece.

    Documents are numbered in the order of their dataset's pieces.
    """
    parts = [piece for part in chunks for piece in part]
    first_doc = [np.cumsum([0, *(b - a for _, a, b in part)]) for part in chunks]
    none = np.zeros(len(parts), np.uint64)
    return Tables(
        first_part=offsets_of([*map(len, chunks)]),
        first_doc=np.concatenate([np.zeros(0), *first_doc]).astype(np.int64),
        ids=np.array([address(one.loaded.ids) for one in parts], np.uint64),
        offsets=np.array([address(one.loaded.offsets) + 8 * one.start for one in parts], np.uint64),
        mask=np.array(
            [0 if (mask := one.loaded.mask) is None else address(mask) for one in parts], np.uint64
        ),
        id_bytes=np.array(
            [part[0].loaded.ids.itemsize if part else 2 for part in chunks], np.int64
        ),
        file=none,
        checked=none,
    )


def lay_values(chunks: list[list[Piece]]) -> dict[str, UInt64]:
    """Returns where the values of aligned columns are, for the parts that `lay` makes.

    It is 0 if a part has no such column.
    """
    parts = [piece.loaded.values for part in chunks for piece in part]
    return {
        name: np.array([address(one[name]) if name in one else 0 for one in parts], np.uint64)
        for name in {name: None for values in parts for name in values}
    }
