"""Planner: makes one window, from a state to the documents drawn, their rows, and the next state.

This is the only place that makes windows, of counted data and of streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple

import numpy as np

from easypipe.core.errors import PlanError
from easypipe.core.jit import jit
from easypipe.core.schema import offsets_of
from easypipe.core.values import Bools, Int32, Int64
from easypipe.plan import mix
from easypipe.plan.feed import Feed, WindowRule
from easypipe.plan.mix import (
    MAX_SIZE,
    ROWS_TOTAL,
    TOKENS_TOTAL,
    Known,
    draw_largest_deficit,
    weights_of,
    with_margin,
)
from easypipe.plan.order import permute
from easypipe.plan.pack import (
    Layout,
    PackSpec,
    cut_stream,
    one_row_each,
    oversize_error,
    pack_window,
    placed_tokens,
)
from easypipe.plan.spec import At, PlanSpec, WindowState


class View(NamedTuple):
    """A window as kernels take it: its first row, and columns of its layout and of its draws."""

    first_row: int
    first_piece: Int64
    table: Int32
    dataset: Int32
    doc: Int64
    length: Int32


@dataclass(frozen=True)
class Window(Generic[At]):
    """One planned window.

    Under strategy "concat" its first document may be the one in `state.cut`.

    Args:
        state: The state that the window begins with.
        after: The state after it.
        dataset: Int32[draws].
        doc: Int64[draws], document numbers within the dataset.
        length: Int32[draws], tokens.
        layout: The places of the pieces of the documents.
        ahead: Whether the last document is the one that the next window begins with, and has no
            token in a row of this window (only under strategy "concat").
    """

    state: WindowState[At]
    after: WindowState[At]
    dataset: Int32
    doc: Int64
    length: Int32
    layout: Layout
    ahead: bool = False

    @property
    def first_row(self) -> int:
        return self.state.first_row

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows

    @cached_property
    def view(self) -> View:
        at = (self.first_row, self.layout.first_piece, self.layout.table)
        return View(*at, self.dataset, self.doc, self.length)

    @property
    def num_bytes(self) -> int:
        return (
            16 * self.dataset.shape[0] + self.layout.table.nbytes + self.layout.first_piece.nbytes
        )


class Planner(Generic[At]):
    """Makes windows. It is final and stateless: the same state always makes the same window."""

    def __init__(self, spec: PlanSpec, feed: Feed[At]) -> None:
        self.spec, self.feed = spec, feed
        self.stop: mix.Stop = "all_exhausted" if len(spec.weights) == 1 else spec.stop
        self.last_epoch = spec.last_epoch(feed.num_docs.tolist())

    def window(self, state: WindowState[At]) -> Window[At]:
        """Returns the window after `state`.

        If weights change at a row, the window ends there or before, as estimated from lengths. A
        window that would end far after it is packed again with fewer documents.
        """
        pack, rule = self.spec.pack, self.feed.rule(state)
        mixing, stage = _Mixing(self, state, rule), rule.stage
        if pack is not None and pack.concat:
            return self._concat(state, mixing, rule, pack)
        draws = mixing.until_one_leaves(mixing.draw(rule.docs, rule.tokens))
        while True:
            dataset, doc, length = mixing.documents(draws)
            _permute(rule, state.cut, None, dataset, doc, length)
            if pack is None:
                layout = one_row_each(length)
            else:
                layout = pack_window(length, pack, rule.row_key)
            rows = layout.num_rows
            if pack is None or stage.rows is None or rows <= stage.most or length.size < 2:
                break
            draws = mixing.first(draws, max(1, length.size * stage.rows // rows))
        after = self._after(state, draws, layout.num_rows)
        return Window(state, after, dataset, doc, length, layout)

    def _concat(
        self, state: WindowState[At], mixing: _Mixing[At], rule: WindowRule, pack: PackSpec
    ) -> Window[At]:
        """Returns a window of strategy "concat", with the full rows that its documents fill.

        More documents are taken if they do not fill a row; at the end of an epoch the window has
        all documents that are left. A token after the last row has to be known, as the last label
        of that row, unless the epoch ends: the next window begins with it.

        Raises:
            PlanError: MAX_DRAWS documents do not fill a row.
        """
        feed, size, start = self.feed, pack.seq_length, 0 if state.cut is None else state.cut[1]
        stage, limit, enough = rule.stage, rule.docs, rule.tokens
        while True:
            draws = mixing.draw(limit, enough)
            # otherwise the documents before a dataset leaves do not fill a row
            if limit == rule.docs:
                draws = mixing.until_one_leaves(draws)
            dataset, doc, length = mixing.documents(draws)
            # tokens after the start of the window, up to the end of each document
            ends = np.cumsum(length, dtype=np.int64) - start
            tokens = int(ends[-1]) if ends.size else 0
            rows = -(-tokens // size) if draws.ended else max(0, tokens - 1) // size
            if draws.ended or rows:
                break
            if limit >= mix.MAX_DRAWS:
                raise PlanError(
                    at="pack.seq_length",
                    problem=f"{length.size} documents do not fill a row of {size} tokens",
                    fix="Lower it, or leave datasets without tokens out.",
                )
            limit, enough = min(2 * limit, mix.MAX_DRAWS), None if enough is None else 2 * enough
        cut, ahead = None, False
        if not draws.ended or (stage.rows is not None and rows > stage.rows):
            rows = rows if stage.rows is None else min(rows, stage.rows)
            # the document in which the next row begins, and where
            last = int(np.searchsorted(ends, rows * size, side="right"))
            at = rows * size - int(ends[last] - length[last])
            taken = at > 0 or feed.draws_next
            cut = (int(dataset[last]), at) if taken else None
            draws = mixing.first(draws, last + taken - (state.cut is not None))
            ahead = at == 0 and (taken or feed.counted)
            kept = slice(last + (at > 0 or ahead))
            dataset, doc, length = dataset[kept], doc[kept], length[kept]
        _permute(rule, state.cut, cut, dataset, doc, length)
        layout = cut_stream(length, pack, rule.row_key, start=start, num_rows=rows)
        after = self._after(state, draws, rows, cut)
        return Window(state, after, dataset, doc, length, layout, ahead)

    def _after(
        self,
        state: WindowState[At],
        draws: mix.Draws,
        rows: int,
        cut: tuple[int, int] | None = None,
    ) -> WindowState[At]:
        """Returns the state after a window of these draws and rows."""
        index, first_row = state.index + 1, state.first_row + rows
        drawn = self.feed.advance(state, draws, cut)
        if draws.ended and cut is None:
            return self.epoch_start(index, state.epoch + 1, first_row)
        return WindowState(
            first_row=first_row,
            epoch=state.epoch,
            drawn=drawn,
            deficits=tuple(draws.deficits.tolist()),
            active=tuple(draws.active.tolist()),
            cut=cut,
            index=index,
        )

    def after_draws(self, state: WindowState[At]) -> WindowState[At]:
        """Returns the state after the next window without packing; its rows are its draws."""
        rule = self.feed.rule(state)
        mixing = _Mixing(self, state, rule)
        draws = mixing.until_one_leaves(mixing.draw(rule.docs, rule.tokens))
        return self._after(state, draws, draws.dataset.size)

    def epoch_start(self, index: int, epoch: int, first_row: int) -> WindowState[At]:
        deficits, active = mix.start(self.feed.num_docs, self.stop)
        if self.spec.has_epochs:  # datasets that may not come again are not in it
            active &= np.array([cap is None or epoch < cap for cap in self.spec.caps])
        return WindowState(
            first_row=first_row,
            epoch=epoch,
            drawn=self.feed.begin(epoch),
            deficits=tuple(deficits.tolist()),
            active=tuple(active.tolist()),
            index=index,
        )

    def ended(self, state: WindowState[At]) -> bool:
        return self.last_epoch is not None and state.epoch >= self.last_epoch


class _Mixing(Generic[At]):
    """The draws after a state, and the documents that they take, each looked up once.

    A dataset whose documents are not counted is drawn from as if it had documents without end. Then
    one document beyond those that are taken is looked for; if it does not exist, the draw is
    repeated.
    """

    def __init__(self, planner: Planner[At], state: WindowState[At], rule: WindowRule) -> None:
        self._feed, self._spec = planner.feed, planner.spec
        self._stop: mix.Stop = planner.stop
        self._state, self._rule = state, rule
        # the documents of each dataset that the window has before its draws: one if a document is
        # cut
        self._cut = np.zeros(len(state.active), np.int64)
        if state.cut is not None:
            self._cut[state.cut[0]] = 1
        self._left = np.full(len(state.active), mix.NEVER)
        if self._feed.counted:
            self._left = self._feed.remaining(state, self._left)
        # `_known[i]` documents of each dataset i were looked up; the arrays below hold their
        # numbers and lengths, one dataset after the other
        self._known = np.zeros(len(state.active), np.int64)
        self._docs, self._lengths = np.empty(0, np.int64), np.empty(0, np.int32)

    def draw(self, limit: int, enough: int | None = None) -> mix.Draws:
        """Makes at most `limit` draws, or those of the first blocks with `enough` tokens in all."""
        deficits = np.array(self._state.deficits, dtype=np.int64)
        active = np.array(self._state.active, dtype=np.bool_)
        drawn, made, ended = self._cut, [np.empty(0, np.int32)], False
        while (
            not ended
            and (left := limit - sum(map(len, made))) > 0
            and (enough is None or self._feed.tokens(self._cut, drawn) < enough)
        ):
            draws = self._block(min(left, self._feed.block), drawn, deficits, active)
            made.append(draws.dataset)
            drawn = drawn + draws.counts
            deficits, active, ended = draws.deficits, draws.active, draws.ended
        return mix.Draws(np.concatenate(made), drawn - self._cut, deficits, active, ended)

    def _block(
        self,
        count: int,
        drawn: Int64,
        deficits: Int64,
        active: Bools,
    ) -> mix.Draws:
        """Makes at most `count` draws after those that have taken `drawn` documents."""
        left, by_weight, sizes = self._left.copy(), self._rule.stage.shares is None, None
        if self._spec.unit == "tokens":
            expected = [with_margin(int(count * part)) for part in self._rule.parts]
            self._look(drawn + np.minimum(expected, left))
            sizes = lambda counts: self._sizes(drawn, counts)  # noqa: E731
        while True:
            mixture = (left, deficits, active)
            try:
                if by_weight:
                    draws = mix.draw(count, self.weigh(active), *mixture, self._stop)
                else:
                    draws = draw_largest_deficit(count, self.weigh, *mixture, self._stop, sizes)
            except _Fewer as found:
                left[found.dataset] = found.there
                continue
            if self._feed.counted:
                return draws
            wanted = np.where(left == mix.NEVER, draws.counts + 1, 0)
            there = self._feed.remaining(self._state, drawn + wanted) - drawn
            short = there < wanted
            if not short.any():
                return draws
            left[short] = there[short]
            never_came = short & (there == 0)
            if by_weight and self._stop != "first_exhausted" and never_came.any():
                active, deficits = active & ~never_came, np.zeros_like(deficits)

    def until_one_leaves(self, draws: mix.Draws) -> mix.Draws:
        """Returns `draws` up to the last document that max_epochs allows for a dataset.

        A window ends there. Its rows are permuted, so a longer window would mix what the other
        datasets yield later with what they yield together with that dataset.
        """
        if self._spec.has_epochs:
            return draws
        left = np.flatnonzero(~draws.active & np.array(self._state.active) & (draws.counts > 0))
        ends = [int(np.flatnonzero(draws.dataset == dataset)[-1]) + 1 for dataset in left]
        return self.first(draws, min(ends, default=draws.dataset.size))

    def first(self, draws: mix.Draws, count: int) -> mix.Draws:
        """Returns the first `count` of `draws`, as if no more had been asked for."""
        if count == draws.dataset.size:
            return draws
        if count and not draws.active.all():
            return self.draw(count)  # deficits are reset when a dataset leaves
        dataset, size = draws.dataset[:count], draws.counts.size
        counts = tokens = np.bincount(dataset, minlength=size)
        if self._spec.unit == "tokens":
            sizes = token_sizes(self._lengths, self._spec.pack)
            total = offsets_of(sizes)
            begin = np.cumsum(self._known) - self._known + self._cut
            tokens = total[begin + counts] - total[begin]
        active = np.array(self._state.active, dtype=np.bool_)
        weights = self.weigh(active)
        # the products may wrap around, their difference does not
        deficits = self._state.deficits + weights * tokens.sum() - weights.sum() * tokens
        return mix.Draws(dataset, counts, deficits, active, ended=False)

    def documents(self, draws: mix.Draws) -> tuple[Int32, Int64, Int32]:
        """Returns (dataset, document, length) of each document of the window.

        The document that the state cuts comes first, then the draws.

        Raises:
            PlanError: A document is longer than a row under oversize "error".
        """
        self._look(self._cut + draws.counts)
        dataset = draws.dataset
        if self._state.cut is not None:
            dataset = np.concatenate([np.array(self._state.cut[:1], np.int32), dataset])
        doc, length = np.empty(dataset.size, np.int64), np.empty(dataset.size, np.int32)
        first = np.cumsum(self._known) - self._known
        _to_draw_order(dataset, first, self._docs, self._lengths, doc, length)
        pack = self._spec.pack
        if pack is not None and pack.oversize == "error" and (length > pack.seq_length).any():
            n = int(np.argmax(length > pack.seq_length))
            name = self._feed.name(int(dataset[n]), int(doc[n]))
            raise oversize_error(name, int(length[n]), pack)
        return dataset, doc, length

    def weigh(self, active: Bools) -> Int64:
        """Returns the integer weights of the datasets that are in the mixture, 0 for the others."""
        spec, shares = self._spec, self._rule.stage.shares
        if shares is None:
            return np.where(active, np.array(spec.weights, dtype=np.int64), 0)
        total = TOKENS_TOTAL if spec.unit == "tokens" else ROWS_TOTAL
        return np.array(weights_of(shares, active.tolist(), total, spec.block), dtype=np.int64)

    def _sizes(self, drawn: Int64, at_least: Int64) -> Known:
        """Returns the `token_sizes` of the documents that come after `drawn` of each dataset.

        Raises:
            _Fewer: A dataset has fewer than `at_least` documents.
            PlanError: A document is too long to be weighed by tokens.
        """
        self._look(drawn + at_least)
        known = self._known - drawn
        if (known < at_least).any():
            i = int(np.argmax(known < at_least))
            raise _Fewer(i, int(known[i]))
        sizes, ends = token_sizes(self._lengths, self._spec.pack), np.cumsum(self._known)
        if (sizes > MAX_SIZE).any():
            n = int(np.argmax(sizes > MAX_SIZE))
            i = int(np.searchsorted(ends, n, side="right"))
            raise PlanError(
                at=self._feed.name(i, int(self._docs[n])),
                problem=f"{sizes[n]} tokens are too many: "
                f"shares of tokens support documents of up to {MAX_SIZE}",
                fix="Set mix.unit to rows, or cut the document.",
            )
        return Known(sizes, ends - known, known)

    def _look(self, counts: Int64) -> None:
        """Looks up the first `counts[i]` documents of each dataset i that are not known yet."""
        known, more = self._known, np.maximum(counts - self._known, 0)
        if not more.any():
            return
        docs, lengths, more = self._feed.look(self._state, known, more)
        if known.any():
            of = np.tile(np.arange(known.size), 2).repeat(np.concatenate([known, more]))
            order = np.argsort(of, kind="stable")
            docs = np.concatenate([self._docs, docs])[order]
            lengths = np.concatenate([self._lengths, lengths])[order]
        self._docs, self._lengths, self._known = docs, lengths, known + more


def _permute(
    rule: WindowRule,
    first_cut: tuple[int, int] | None,
    last_cut: tuple[int, int] | None,
    dataset: Int32,
    doc: Int64,
    length: Int32,
) -> None:
    """Permutes the documents of each dataset among their places, in place.

    The document that is cut at the beginning of the window stays first, the one that is cut at its
    end stays last.
    """
    for i, key in enumerate(rule.document_keys):
        here = np.flatnonzero(dataset == i)
        first = first_cut is not None and first_cut[0] == i
        last = last_cut is not None and last_cut[0] == i
        here = here[int(first) : here.size - last]
        if here.size > 1:
            there = here[permute(np.arange(here.size), here.size, key)]
            doc[here], length[here] = doc[there], length[there]


class _Fewer(Exception):
    """Reports that a dataset has fewer documents than were asked for."""

    def __init__(self, dataset: int, there: int) -> None:
        super().__init__()
        self.dataset, self.there = dataset, there


def token_sizes(lengths: Int32, pack: PackSpec | None) -> Int64:
    """Returns how many tokens of each document get a place in a row, but at least 1."""
    return np.maximum(placed_tokens(lengths, pack), 1)


@jit
def _to_draw_order(
    dataset: Int32, first: Int64, docs: Int64, lengths: Int32, doc: Int64, length: Int32
) -> None:
    place = first.copy()
    for draw in range(dataset.shape[0]):
        at = place[dataset[draw]]
        place[dataset[draw]] += 1
        doc[draw], length[draw] = docs[at], lengths[at]
