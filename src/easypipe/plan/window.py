"""One window: from a state to the documents that are drawn, to the rows they stand in, and on to
the next state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from easypipe.core.errors import PlanError
from easypipe.core.jit import jit
from easypipe.core.random import child, fold
from easypipe.plan import mix
from easypipe.plan.deficit import (
    MAX_SIZE,
    ROWS_TOTAL,
    TOKENS_TOTAL,
    Known,
    draw_largest_deficit,
    weights_of,
    with_margin,
)
from easypipe.plan.mix_schedule import normalized
from easypipe.plan.order import documents
from easypipe.plan.pack import (
    Layout,
    PackSpec,
    cut_stream,
    one_row_each,
    oversize_error,
    pack_window,
    placed_tokens,
)
from easypipe.plan.spec import PlanDataset, PlanSpec
from easypipe.plan.state import WindowState

_LOOK = 1 << 16  # lengths that are asked for together
_UNIT = 1 << 32  # parts of a token, and of a share

_NONE_32, _NONE_64 = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Window:
    """One window, planned. dataset, length: Int32[draws]; doc: Int64[draws], numbers within the
    dataset. after: the state behind it.

    Under strategy "stream" the first of them may be the document that `state.cut` names, and the
    last may be `ahead`: the one that the next window begins with, of which no token stands in a row
    of this one.
    """

    state: WindowState
    after: WindowState
    dataset: NDArray[np.int32]
    doc: NDArray[np.int64]
    length: NDArray[np.int32]
    layout: Layout
    ahead: bool = False

    @property
    def first_row(self) -> int:
        return self.state.first_row

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows

    @property
    def num_bytes(self) -> int:
        return (
            16 * self.dataset.shape[0] + self.layout.table.nbytes + self.layout.first_piece.nbytes
        )


class Planner:
    """Plans single windows. Final, and without memory: the same state gives the same window, on any
    thread.
    """

    def __init__(self, datasets: Sequence[PlanDataset], spec: PlanSpec) -> None:
        self.datasets = tuple(datasets)
        self.spec = spec
        self.stop: mix.Stop = "all_exhausted" if len(datasets) == 1 else spec.stop
        self.num_docs = np.array([dataset.num_docs for dataset in datasets], dtype=np.int64)
        self._order_keys = np.array(
            [fold(spec.seed, "order", dataset.name) for dataset in datasets], dtype=np.uint64
        )
        self._row_key = fold(spec.seed, "rows")
        self.last_epoch = spec.last_epoch(self.num_docs.tolist())

    def window(self, state: WindowState) -> Window:
        """The window behind `state`. Where weights change at a row, it ends there as the mean
        lengths tell, or before: one that would end far behind is laid anew with fewer documents.
        """
        pack = self.spec.pack
        if pack is not None and pack.strategy == "stream":
            return self._concat(state, pack)
        mixing = _Mixing(self, state)
        draws = mixing.draw(self.window_draws(state))
        doc, length = mixing.documents(draws)
        layout = self._lay(state, length)
        stage = self.spec.stage_end(state.first_row)
        while stage is not None and layout.num_rows > stage[1] and length.size > 1:
            count = max(1, length.size * stage[0] // layout.num_rows)
            draws, doc, length = mixing.first(draws, length, count), doc[:count], length[:count]
            layout = self._lay(state, length)
        after = self._after(state, draws, layout.num_rows)
        return Window(state, after, draws.dataset, doc, length, layout)

    def _concat(self, state: WindowState, pack: PackSpec) -> Window:
        """As many full rows as the documents of a window give, more of them where they give none;
        at the end of an epoch all there is.

        A token behind the last row has to be known, as the last label of that row, unless the epoch
        ends: with it the next window begins.
        """
        mixing, size, key = _Mixing(self, state), pack.seq_length, self._key_of_rows(state)
        asked, start = self.window_draws(state), 0 if state.cut is None else state.cut[1]
        while True:
            draws = mixing.draw(asked)
            dataset, (doc, own) = draws.dataset, mixing.documents(draws)
            length = own
            if state.cut is not None:  # the document that the state is in the middle of
                last = np.arange(self.num_docs.size) == state.cut[0]
                cut_doc, cut_length = self.look_up(
                    state.epoch, np.array(state.drawn, np.int64) - last, last.astype(np.int64)
                )
                dataset = np.concatenate([np.array(state.cut[:1], np.int32), dataset])
                doc, length = np.concatenate([cut_doc, doc]), np.concatenate([cut_length, own])
            # tokens behind the start of the window, up to the end of each document
            ends = np.cumsum(length, dtype=np.int64) - start
            tokens = int(ends[-1]) if ends.size else 0
            rows = -(-tokens // size) if draws.ended else max(0, tokens - 1) // size
            if draws.ended or rows:
                break
            if asked == mix.MAX_DRAWS:
                raise PlanError(
                    at="pack.seq_length",
                    problem=f"{asked} documents do not fill a row of {size} tokens",
                    fix="Lower it, or leave datasets without tokens out.",
                )
            asked = min(2 * asked, mix.MAX_DRAWS)
        left = self.spec.rows_left(state.first_row)
        if draws.ended and (left is None or rows <= left):
            layout = cut_stream(length, pack, key, start=start)
            return Window(state, self._after(state, draws, rows), dataset, doc, length, layout)
        rows = rows if left is None else min(rows, left)
        # the document that the next row begins in, and where
        last = int(np.searchsorted(ends, rows * size, side="right"))
        at = rows * size - int(ends[last] - length[last])
        draws = mixing.first(draws, own, last + (at > 0) - (state.cut is not None))
        after = self._after(state, draws, rows, cut=(int(dataset[last]), at) if at else None)
        dataset, doc, length = dataset[: last + 1], doc[: last + 1], length[: last + 1]
        layout = cut_stream(length, pack, key, start=start, num_rows=rows)
        return Window(state, after, dataset, doc, length, layout, ahead=at == 0)

    def window_draws(self, state: WindowState) -> int:
        """Documents of the window behind `state`: under a schedule those before its shares change,
        as the mean lengths tell.
        """
        spec, rows = self.spec, self.spec.rows_left(state.first_row)
        if rows is None:
            return spec.window_docs
        if spec.pack is None:
            return min(spec.window_docs, rows)
        longest = spec.pack.seq_length * _UNIT if spec.pack.oversize == "truncate" else 1 << 62
        mean = sum(  # of a document that is drawn, in 2^-32 tokens
            int(part * min(longest, d.total_tokens * _UNIT // max(1, d.num_docs)))
            for part, d in zip(self.draw_shares(state), self.datasets, strict=True)
        )
        return max(1, min(spec.window_docs, rows * spec.pack.seq_length * _UNIT // max(1, mean)))

    def draw_shares(self, state: WindowState) -> tuple[Fraction, ...]:
        """The part of the draws behind `state` that each dataset will have: its share, divided by
        its mean length where shares are of tokens.

        Where all have left (only the rest of a document is to come, under strategy "stream") all
        have the same.
        """
        if not any(state.active):
            return normalized([1] * len(self.datasets))
        weights = weights_of(self.spec.shares_at(state.first_row), state.active, _UNIT)
        if self.spec.unit == "tokens":
            weights = [
                w * max(1, d.num_docs) * _UNIT // max(1, d.total_tokens)
                for w, d in zip(weights, self.datasets, strict=True)
            ]
        return normalized(weights if any(weights) else [1] * len(weights))

    def _lay(self, state: WindowState, length: NDArray[np.int32]) -> Layout:
        pack = self.spec.pack
        return (
            one_row_each(length)
            if pack is None
            else pack_window(length, pack, self._key_of_rows(state))
        )

    def _key_of_rows(self, state: WindowState) -> int:
        return child(self._row_key, state.index)

    def some_document_fits(self, pack: PackSpec) -> bool:
        """Whether any document of any dataset gets a piece. Looks at lengths until one does."""
        return any(
            placed_tokens(self._lengths(dataset, docs), pack).any()
            for dataset in self.datasets
            for start in range(0, dataset.num_docs, _LOOK)
            for docs in [np.arange(start, min(start + _LOOK, dataset.num_docs), dtype=np.int64)]
        )

    def _lengths(self, dataset: PlanDataset, docs: NDArray[np.int64]) -> NDArray[np.int32]:
        lengths = dataset.lengths(docs)
        if lengths.dtype != np.int32 or lengths.shape != docs.shape:
            raise PlanError(
                at=f"dataset {dataset.name!r}",
                problem=f"lengths of {docs.shape[0]} documents came as "
                f"{lengths.dtype}{list(lengths.shape)}",
                fix="PlanDataset.lengths gives Int32[n].",
            )
        if (lengths < 0).any():
            n = int(np.argmax(lengths < 0))
            raise PlanError(
                at=f"dataset {dataset.name!r}, document {docs[n]}",
                problem=f"a length of {lengths[n]} tokens",
                fix="The token cache is damaged: prepare it again.",
            )
        return lengths

    def remaining(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Documents that each dataset may still give in an epoch that has `drawn`: Int64[k]."""
        return mix.remaining(self.num_docs, drawn, self.stop, self.spec.caps)

    def can_be_cut(self, cut: tuple[int, int] | None, drawn: Sequence[int]) -> bool:
        """Whether a state that has `drawn` documents may stand in the middle of one."""
        if cut is None:
            return True
        streams = self.spec.pack is not None and self.spec.pack.strategy == "stream"
        return streams and 0 <= cut[0] < len(drawn) and drawn[cut[0]] > 0 and cut[1] > 0

    def look_up(
        self, epoch: int, drawn: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(numbers, lengths) of the `counts[i]` documents that follow `drawn[i]` of every dataset
        i, dataset after dataset.
        """
        docs = documents(self.spec.order, self.num_docs, self._order_keys, epoch, drawn, counts)
        lengths = np.empty(docs.shape[0], dtype=np.int32)
        start = 0
        for dataset, count in zip(self.datasets, counts.tolist(), strict=True):
            if count:
                lengths[start : start + count] = self._lengths(dataset, docs[start : start + count])
                start += count
        return docs, lengths

    def _after(
        self, state: WindowState, draws: mix.Draws, rows: int, cut: tuple[int, int] | None = None
    ) -> WindowState:
        index, first_row = state.index + 1, state.first_row + rows
        if draws.ended and cut is None:
            return self.epoch_start(index, state.epoch + 1, first_row)
        return WindowState(
            index=index,
            epoch=state.epoch,
            first_row=first_row,
            drawn=tuple(a + b for a, b in zip(state.drawn, draws.counts.tolist(), strict=True)),
            deficits=tuple(draws.deficits.tolist()),
            active=tuple(draws.active.tolist()),
            cut=cut,
        )

    def after_draws(self, state: WindowState) -> WindowState:
        """The state behind the next window of a plan without packing, whose rows are its draws."""
        draws = _Mixing(self, state).draw(self.window_draws(state))
        return self._after(state, draws, draws.dataset.size)

    def epoch_start(self, index: int, epoch: int, first_row: int) -> WindowState:
        deficits, active = mix.start(self.num_docs, self.stop)
        if self.spec.has_epochs:
            active &= np.array([cap is None or epoch < cap for cap in self.spec.caps])
        return WindowState(
            index=index,
            epoch=epoch,
            first_row=first_row,
            drawn=(0,) * len(self.datasets),
            deficits=tuple(deficits.tolist()),
            active=tuple(active.tolist()),
        )

    def ended(self, state: WindowState) -> bool:
        return self.last_epoch is not None and state.epoch >= self.last_epoch


class _Mixing:
    """The draws behind a state, and the documents that they take, each looked up once."""

    def __init__(self, planner: Planner, state: WindowState) -> None:
        self._planner, self._state, self._spec = planner, state, planner.spec
        self._drawn = np.array(state.drawn, dtype=np.int64)
        self._left = planner.remaining(self._drawn)
        self._deficits = np.array(state.deficits, dtype=np.int64)
        self._active = np.array(state.active, dtype=np.bool_)
        # of each dataset that many, dataset after dataset
        self._known = np.zeros_like(self._drawn)
        self._docs, self._lengths = _NONE_64, _NONE_32

    def draw(self, count: int) -> mix.Draws:
        """The next draws, at most `count`."""
        spec, stop, left = self._spec, self._planner.stop, self._left
        if not spec.by_deficit:
            weights = self.weigh(self._active)
            return mix.draw(count, weights, left, self._deficits, self._active, stop)
        sizes = None
        if spec.unit == "tokens":
            parts = self._planner.draw_shares(self._state)
            expected = [with_margin(int(count * part)) for part in parts]
            self._look(np.minimum(expected, left))
            sizes = self._sizes
        return draw_largest_deficit(
            count, self.weigh, left, self._deficits, self._active, stop, sizes
        )

    def first(self, draws: mix.Draws, lengths: NDArray[np.int32], count: int) -> mix.Draws:
        """The first `count` of `draws`, as if no more had been asked for. lengths: Int32[draws]."""
        if count == draws.dataset.size:
            return draws
        if count and draws.active.tolist() != list(self._state.active):
            return self.draw(count)  # deficits begin anew where a dataset leaves
        dataset, size = draws.dataset[:count], self._drawn.size
        counts = tokens = np.bincount(dataset, minlength=size)
        if self._spec.unit == "tokens":
            sizes = token_sizes(lengths[:count], self._spec.pack)
            tokens = np.bincount(dataset, weights=sizes, minlength=size).astype(np.int64)
        weights = self.weigh(self._active)
        # the products may wrap around, their difference does not
        deficits = self._deficits + weights * tokens.sum() - weights.sum() * tokens
        return mix.Draws(dataset, counts, deficits, self._active, ended=False)

    def documents(self, draws: mix.Draws) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The document of every draw, and its length."""
        self._look(draws.counts)
        doc = np.empty(draws.dataset.size, dtype=np.int64)
        length = np.empty(draws.dataset.size, dtype=np.int32)
        first = np.cumsum(self._known) - self._known
        _to_draw_order(draws.dataset, first, self._docs, self._lengths, doc, length)
        pack = self._spec.pack
        if pack is not None and pack.oversize == "error" and (length > pack.seq_length).any():
            n = int(np.argmax(length > pack.seq_length))
            name = self._planner.datasets[draws.dataset[n]].name
            raise oversize_error(f"dataset {name!r}, document {doc[n]}", int(length[n]), pack)
        return doc, length

    def weigh(self, active: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Integer weights of the datasets that are in the mixture, 0 for the others."""
        spec = self._spec
        if not spec.by_deficit:
            return np.where(active, np.array(spec.weights, dtype=np.int64), 0)
        shares, total = spec.shares_at(self._state.first_row), ROWS_TOTAL
        if spec.unit == "tokens":
            total = TOKENS_TOTAL
        return np.array(weights_of(shares, active.tolist(), total, spec.block), dtype=np.int64)

    def _sizes(self, at_least: NDArray[np.int64]) -> Known:
        """`token_sizes` of the documents that come next."""
        self._look(at_least)
        sizes, ends = token_sizes(self._lengths, self._spec.pack), np.cumsum(self._known)
        if (sizes > MAX_SIZE).any():
            n = int(np.argmax(sizes > MAX_SIZE))
            i = int(np.searchsorted(ends, n, side="right"))
            raise PlanError(
                at=f"dataset {self._planner.datasets[i].name!r}, document {self._docs[n]}",
                problem=f"{sizes[n]} tokens cannot be weighed: "
                f"shares by tokens know documents of up to {MAX_SIZE}",
                fix="Weigh by rows, or cut the document.",
            )
        return Known(sizes, ends - self._known, self._known)

    def _look(self, counts: NDArray[np.int64]) -> None:
        """Looks up the first `counts[i]` documents of every dataset i that are not known."""
        known, more = self._known, np.maximum(counts - self._known, 0)
        if not more.any():
            return
        docs, lengths = self._planner.look_up(self._state.epoch, self._drawn + known, more)
        if known.any():
            of = np.tile(np.arange(known.size), 2).repeat(np.concatenate([known, more]))
            order = np.argsort(of, kind="stable")
            docs = np.concatenate([self._docs, docs])[order]
            lengths = np.concatenate([self._lengths, lengths])[order]
        self._docs, self._lengths, self._known = docs, lengths, known + more


def token_sizes(lengths: NDArray[np.int32], pack: PackSpec | None) -> NDArray[np.int64]:
    """The tokens of documents that get a place in a row; at least 1 each, so that all count."""
    return np.maximum(placed_tokens(lengths, pack), 1)


@jit
def _to_draw_order(dataset, first, docs, lengths, doc, length):
    place = first.copy()
    for draw in range(dataset.shape[0]):
        at = place[dataset[draw]]
        place[dataset[draw]] += 1
        doc[draw], length[draw] = docs[at], lengths[at]
