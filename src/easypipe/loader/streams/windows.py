"""The windows of one canonical stream: documents drawn, shuffled and packed together, each from the
state that the last one left.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.errors import ConfigError, PlanError
from easypipe.core.random import child, fold
from easypipe.loader.prefetch import ReadPool
from easypipe.loader.rows.gather import Tables
from easypipe.loader.streams.draw import Drawer, Drawn
from easypipe.loader.streams.feed import Cursor, Deal, Loaded, Place
from easypipe.loader.streams.ledger import Books
from easypipe.loader.streams.spec import WINDOW_DOCS, StreamSpec
from easypipe.loader.streams.state import StreamState
from easypipe.plan import mix, plan_stats, turns
from easypipe.plan.mix_schedule import normalized
from easypipe.plan.order import permute
from easypipe.plan.pack import (
    Layout,
    PackSpec,
    cut_stream,
    nothing_fits,
    one_row_each,
    pack_window,
)

BLOCK_DOCS = 256  # drawn at a time; a window ends between two blocks


class Window(NamedTuple):
    """Rows `first_row` to `first_row + layout.num_rows` of a stream. `kept` owns the memory that
    `tables` points to.
    """

    first_row: int
    layout: Layout
    dataset: NDArray[np.int32]  # Int32[draws]; all 0: the window's documents are one table
    doc: NDArray[np.int64]  # Int64[draws], numbers within the table
    length: NDArray[np.int32]  # Int32[draws], tokens, with an EOS that is added
    tables: Tables
    kept: tuple[NDArray, ...]
    before: StreamState
    after: StreamState
    books: Books  # of the stream behind it
    # for each dataset, chunks with bad rows that count from here on
    bad: tuple[tuple[Loaded, ...], ...]

    @property
    def stop(self) -> int:
        return self.first_row + self.layout.num_rows


class Windows:
    """The windows of one stream, in order. Not thread safe, but any thread may ask for the next.

    Law: from equal states come equal windows, whatever other streams there are. Only where weights
    follow the training step does a window also depend on which of the others ended before its first
    row comes (plan/turns.py): `ends`, kept by whoever makes the windows in order.
    state: behind the window that was made last. ended: there is no further one.
    """

    def __init__(
        self,
        number: int,
        spec: StreamSpec,
        deals: Sequence[Deal],
        pool: ReadPool,
        state: StreamState | None = None,
        ends: NDArray[np.int64] | None = None,
    ) -> None:
        self.number, self.spec, self._books = number, spec, Books.total(len(deals))
        self._ends = np.full(spec.num_streams, turns.NEVER) if ends is None else ends
        self._names = [deal.source.name for deal in deals]
        self._keys = [fold(spec.seed, "stream", number, name) for name in self._names]
        self._row_key = fold(spec.seed, "stream rows", number)
        self.state = state or self._start(0, 0, ())
        self.ended = self.at_end(self.state)
        bad = self.state.bad or (0,) * len(deals)
        self._cursors = [
            Cursor(
                deal,
                number,
                self.state.places[i],
                pool,
                self._books.datasets[i],
                passes=spec.caps[i] if spec.endless_parts else 0,
                bad=bad[i],
            )
            for i, deal in enumerate(() if self.ended else deals)
        ]
        self._drawer = Drawer(self._cursors, spec)
        docs, tokens = self._size
        for cursor, weight, active in zip(
            self._cursors, spec.weights, self.state.active, strict=False
        ):
            cursor.wish(docs * weight // sum(spec.weights) if active else 0, tokens)
        self._first_epoch = self.state.epoch
        self._end_row = -1  # where the last epoch ended that was seen to
        # Tokens of the document that is cut where this begins, which whoever saved the state has
        # placed.
        self._placed_before = self.state.cut[1] if self.state.cut is not None else 0

    def make(self) -> Window:
        """The window behind `state`, and that moves on."""
        window = self._window()
        self.state, self.ended = window.after, self.at_end(window.after)
        return window

    @property
    def books(self) -> Books:
        """As they stand now."""
        return Books.total(len(self._names), [self._books])

    @property
    def _size(self) -> tuple[int, int | None]:
        """Documents of a window, or tokens of fewer long ones (None: no matter how many)."""
        docs = self.spec.window_docs
        return (WINDOW_DOCS, self.spec.window_tokens) if docs is None else (docs, None)

    def _window(self) -> Window:
        before, spec = self.state, self.spec
        shares, rows, most = self._shares(before.first_row)
        limit, enough = self._size
        if spec.pack is not None and spec.pack.strategy == "stream":
            drawn = self._draw_run(rows, spec.pack, limit, enough, shares)
        elif rows is None:
            drawn = self._draw(limit, enough, shares)
        elif spec.pack is None:
            drawn = self._draw(min(limit, rows), enough, shares)
        else:
            full = rows * spec.pack.seq_length
            enough = full if enough is None else min(full, enough)
            drawn = self._draw_stage(rows, most, limit, enough, shares)
        for cursor, part in zip(self._cursors, drawn.taken, strict=True):
            cursor.wish(0 if drawn.ended else sum(b - a for _, a, b in part))
        lengths, doc, tables, kept = self._lay(drawn)
        layout = self._layout(lengths, before, drawn)
        bad = tuple(tuple(cursor.bad_chunks()) for cursor in self._cursors)
        self._enter(drawn, lengths, layout)
        after = self._after(before, layout.num_rows, drawn)
        # a document that is cut was counted as drawn, and waits to be read again
        for i, cursor in enumerate(self._cursors):
            self._books.datasets[i]["drawn", "waiting"] = cursor.waiting - (
                drawn.cut is not None and drawn.cut[1] > 0 and drawn.cut[0] == i
            )
        return Window(
            first_row=before.first_row,
            layout=layout,
            dataset=drawn.dataset,
            doc=doc,
            length=lengths,
            tables=tables,
            kept=kept,
            before=before,
            after=after,
            books=self.books,
            bad=bad,
        )

    def _shares(self, row: int) -> tuple[tuple[Fraction, ...] | None, int | None, int]:
        """(the shares of a window that begins at `row`, None for the static weights of documents;
        rows until they change; rows that the window may have).
        """
        spec = self.spec
        # which counts the rows of one stream among streams that all live
        if spec.schedule is not None:
            streams, known = spec.num_streams, turns.known_before(self._ends, row, self.number)
            there = turns.rows_before(known, row, self.number) // streams
            shares = spec.schedule.shares(spec.schedule.step_of(there))
            stage = spec.schedule.stage_end(there)
            if stage is None:
                return shares, None, 0
            left = int(turns.given_by(known, (there + stage[0]) * streams)[self.number]) - row
            return shares, left, left + stage[1] - stage[0]
        return (normalized(spec.weights) if spec.unit == "tokens" else None), None, 0

    def _draw(
        self,
        limit: int,
        enough: int | None,
        shares: tuple[Fraction, ...] | None,
        *,
        leave_last: bool = False,
    ) -> Drawn:
        """The next documents, taken: at most `limit`, or those of the first blocks that hold
        `enough` tokens.

        Before them the one that is cut where the window begins. leave_last: document number `limit`
        is looked at, and waits.
        """
        before = self.state
        deficits, active = np.array(before.deficits, np.int64), np.array(before.active, np.bool_)
        taken: list[list[tuple[Loaded, int, int]]] = [[] for _ in self._cursors]
        drawn = [np.zeros(0, np.int32)]
        made = tokens = 0
        ended = False
        if before.cut is not None:
            cursor = self._cursors[before.cut[0]]
            cursor.fill(1)
            taken[before.cut[0]] += [cursor.look()] if leave_last and not limit else cursor.take(1)
            drawn.append(np.array(before.cut[:1], np.int32))
        while not ended and made < limit and (enough is None or tokens < enough):
            draws = self._drawer.draw(min(BLOCK_DOCS, limit - made), deficits, active, shares)
            made += draws.dataset.shape[0]
            left = int(draws.dataset[-1]) if leave_last and made == limit else -1
            for i, count in enumerate(draws.counts.tolist()):
                pieces = self._cursors[i].take(count - (i == left)) if count else []
                taken[i] += pieces
                tokens += sum(int(loaded.offsets[b] - loaded.offsets[a]) for loaded, a, b in pieces)
                if i == left:
                    taken[i].append(self._cursors[i].look())
            drawn.append(draws.dataset)
            deficits, active, ended = draws.deficits, draws.active, draws.ended
        return Drawn(np.concatenate(drawn), taken, deficits, active, ended)

    def _draw_run(
        self,
        left: int | None,
        pack: PackSpec,
        limit: int,
        enough: int | None,
        shares: tuple[Fraction, ...] | None,
    ) -> Drawn:
        """The next documents of one continuous run, as many as end in a row's last slot or behind
        it; at the end of an epoch all.

        left: rows until the shares change. A token behind the last row has to be known, as its last
        label, unless the epoch ends.
        """
        cut, length = self.state.cut, pack.seq_length
        start = 0 if cut is None else cut[1]
        for cursor in self._cursors:
            cursor.mark()
        if left is not None:
            enough = min((left + 1) * length, enough or (left + 1) * length)
        while True:
            drawn = self._draw(limit, enough, shares)
            lengths = self._lengths(drawn, shuffle=False)[0]
            # tokens behind the window's first, up to the end of each document
            ends = np.cumsum(lengths, dtype=np.int64) - start
            tokens = int(ends[-1]) if ends.size else 0
            rows = -(-tokens // length) if drawn.ended else max(0, tokens - 1) // length
            if rows or drawn.ended:
                break
            if limit >= mix.MAX_DRAWS:
                problem = f"{len(drawn.dataset)} documents do not fill a row of {length} tokens"
                raise PlanError(
                    at="pack.seq_length",
                    problem=problem,
                    fix="Lower it, or leave datasets without tokens out.",
                )
            limit, enough = 2 * limit, None if enough is None else 2 * enough
            for cursor in self._cursors:
                cursor.give_back()
        if drawn.ended and (left is None or rows <= left):
            return drawn._replace(start=start, rows=rows)
        rows = rows if left is None else min(rows, left)
        # the document that the next row begins in, and where
        last = int(np.searchsorted(ends, rows * length, side="right"))
        at = rows * length - int(ends[last] - lengths[last])
        goes_on = at > 0 or self.spec.joined
        for cursor in self._cursors:
            cursor.give_back()
        chosen = self._draw(last + goes_on - (cut is not None), None, shares, leave_last=goes_on)
        return chosen._replace(
            start=start, rows=rows, cut=(int(drawn.dataset[last]), at) if goes_on else None
        )

    def _draw_stage(
        self,
        rows: int,
        most: int,
        limit: int,
        enough: int,
        shares: tuple[Fraction, ...] | None,
    ) -> Drawn:
        """The next documents: those that fill about `rows` rows, by their tokens. Where they fill
        more than `most`, they are given back and fewer are drawn.
        """
        for cursor in self._cursors:
            cursor.mark()
        drawn = self._draw(limit, enough, shares)
        while (made := drawn.dataset.size) > 1:
            filled = self._layout(self._lengths(drawn)[0], self.state, drawn).num_rows
            if filled <= most:
                break
            for cursor in self._cursors:
                cursor.give_back()
            drawn = self._draw(max(1, made * rows // filled), None, shares)
        return drawn

    def _layout(self, lengths: NDArray[np.int32], before: StreamState, drawn: Drawn) -> Layout:
        pack, key = self.spec.pack, child(self._row_key, before.first_row)
        if pack is None:
            return one_row_each(lengths)
        return (
            pack_window(lengths, pack, key)
            if drawn.rows is None
            else cut_stream(lengths, pack, key, start=drawn.start, num_rows=drawn.rows)
        )

    def _lay(
        self, drawn: Drawn
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], Tables, tuple[NDArray, ...]]:
        """All documents of the window side by side, and which of them each draw is."""
        lengths, doc, offsets, lacks = self._lengths(drawn)
        pieces = [piece for part in drawn.taken for piece in part]
        masked = any(loaded.mask is not None for loaded, _, _ in pieces)
        ids, masks = [], []
        for loaded, a, b in pieces:
            first, last = int(loaded.offsets[a]), int(loaded.offsets[b])
            ids.append(loaded.ids[first:last])
            if masked:
                masks.append(
                    np.ones(last - first, np.uint8)
                    if loaded.mask is None
                    else loaded.mask[first:last]
                )
        flat = np.concatenate(ids) if ids else np.zeros(1, np.uint16)
        mask = np.concatenate(masks) if masks else np.zeros(0, np.uint8)
        if self.spec.eos is not None:
            # a first document that was counted when it was drawn
            again = int(drawn.start > self._placed_before)
            added = lacks[doc[again : drawn.counted]]
            for i in range(len(drawn.taken)):
                self._books.datasets[i]["drawn", "EOS"] += int(
                    added[drawn.dataset[again : drawn.counted] == i].sum()
                )
        # the part of each dataset is the documents of all, so that `doc` numbers them as they lie
        count = len(drawn.taken)
        tables = Tables(
            first_part=np.arange(count + 1, dtype=np.int64),
            first_doc=np.tile(np.array([0, len(drawn.dataset)], np.int64), count),
            ids=np.full(count, flat.ctypes.data, np.uint64),
            offsets=np.full(count, offsets.ctypes.data, np.uint64),
            mask=np.full(count, mask.ctypes.data if masks else 0, np.uint64),
            id_bytes=np.full(count, flat.itemsize, np.int64),
            file=np.zeros(count, np.uint64),
            checked=np.zeros(count, np.uint64),
        )
        return lengths, doc, tables, (flat, offsets, mask)

    def _lengths(
        self, drawn: Drawn, *, shuffle: bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Of each draw its length and its document; of all documents side by side their offsets,
        and which lack EOS.

        Documents of a dataset are permuted, but the one that is cut where the window begins stays
        first, the one where it ends last.
        """
        dataset, taken, before = drawn.dataset, drawn.taken, self.state
        doc = np.empty(dataset.shape[0], np.int64)
        offsets = np.zeros(len(dataset) + 1, np.int64)
        lacks = np.zeros(len(dataset), np.bool_)
        at = 0
        for loaded, a, b in (piece for part in taken for piece in part):
            offsets[at + 1 : at + 1 + b - a] = (
                loaded.offsets[a + 1 : b + 1] - int(loaded.offsets[a]) + offsets[at]
            )
            lacks[at : at + b - a] = ~loaded.has_eos[a:b]
            at += b - a
        base = 0
        for i, part in enumerate(taken):
            here = np.flatnonzero(dataset == i)
            order = np.arange(len(here), dtype=np.int64)
            first = int(before.cut is not None and before.cut[0] == i)
            free = len(here) - first - (drawn.cut is not None and drawn.cut[0] == i)
            if shuffle and self.spec.shuffle_window and free > 1:
                order[first : first + free] = first + permute(
                    order[:free], free, child(self._keys[i], before.first_row + before.epoch)
                )
            doc[here] = base + order
            base += sum(b - a for _, a, b in part)
        extra = lacks.astype(np.int64) if self.spec.eos is not None else 0
        return (np.diff(offsets) + extra)[doc].astype(np.int32), doc, offsets, lacks

    def _after(self, before: StreamState, num_rows: int, drawn: Drawn) -> StreamState:
        first_row, bad = before.first_row + num_rows, tuple(cursor.bad for cursor in self._cursors)
        bad = bad if any(bad) else ()
        if not drawn.ended or drawn.cut is not None:
            return StreamState(
                first_row=first_row,
                epoch=before.epoch,
                deficits=tuple(drawn.deficits.tolist()),
                active=tuple(drawn.active.tolist()),
                places=tuple(cursor.place for cursor in self._cursors),
                bad=bad,
                cut=drawn.cut,
            )
        last = self.spec.last_epoch
        if (
            first_row == self._end_row
            and last is None
            and self.spec.pack is not None
            and self._books.all_dropped
        ):
            passes = before.epoch + 1 - self._first_epoch
            raise nothing_fits(self._books.all_dropped // passes, self.spec.pack)
        if first_row == self._end_row and last is None:
            raise ConfigError(
                at="num_streams",
                problem=f"a whole pass of stream {self.number} of {self.spec.num_streams} over its "
                "share of "
                f"{', '.join(map(repr, self._names))} gave no row, and another would give none",
                fix="Use fewer streams, or leave streaming out: the data is small.",
            )
        self._end_row = first_row
        epoch = before.epoch + 1
        for i, cursor in enumerate(self._cursors):
            self._books.datasets[i].end_epoch(cursor.drop())
            cursor.close()
            if last is None or epoch < last:
                cursor.begin(epoch)
        return self._start(first_row, epoch, bad)

    def _start(self, first_row: int, epoch: int, bad: tuple[int, ...]) -> StreamState:
        """Of an epoch. Datasets that may not come again are out of it."""
        deficits, active = mix.start([1] * len(self._names), self.spec.mix_stop)
        if not self.spec.endless_parts:
            active &= np.array([cap is None or epoch < cap for cap in self.spec.caps])
        places = (Place(epoch),) * len(self._names)
        return StreamState(
            first_row, epoch, tuple(deficits.tolist()), tuple(active.tolist()), places, bad
        )

    def at_end(self, state: StreamState) -> bool:
        last = self.spec.last_epoch
        return last is not None and state.epoch >= last

    def _enter(self, drawn: Drawn, lengths: NDArray[np.int32], layout: Layout) -> None:
        books, pack = self._books, self.spec.pack
        segments = books.table[:, plan_stats.SEGMENTS].copy()
        dataset, lengths = drawn.dataset[: drawn.counted], lengths[: drawn.counted].copy()
        lengths[:1] -= self._placed_before
        cut = 0 if drawn.rows is None else drawn.start - self._placed_before
        plan_stats.count((dataset, lengths), layout, layout.num_rows, pack, books.table, cut)
        if self.spec.joined:  # only the first token of an epoch is nobody's next
            books.table[:, plan_stats.SEGMENTS] = segments
            if self.state.cut is None and self.state.places == (Place(self.state.epoch),) * len(
                segments
            ):
                books.table[dataset[np.flatnonzero(lengths)[:1]], plan_stats.SEGMENTS] += 1
        if drawn.cut is None or len(drawn.dataset) > 1:
            self._placed_before = 0  # that document is through
        books.packed_rows += layout.num_rows


def _nothing(*_: object) -> None: ...
