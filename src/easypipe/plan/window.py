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
from easypipe.plan.deficit import MAX_SIZE, draw_owed_most, first_draws, with_margin
from easypipe.plan.order import documents
from easypipe.plan.pack import (
    Layout,
    PackSpec,
    cut_stream,
    one_row_each,
    oversize_error,
    pack_window,
)
from easypipe.plan.spec import PlanDataset, PlanSpec
from easypipe.plan.stairs import draw_shares, fit, rows_left, shares_at, window_draws
from easypipe.plan.state import WindowState
from easypipe.plan.tries import Tries

_LOOK = 1 << 16  # lengths that are asked for together


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
        self._weights = np.array(spec.weights, dtype=np.int64)
        self._order_keys = np.array(
            [fold(spec.seed, "order", dataset.name) for dataset in datasets], dtype=np.uint64
        )
        self._row_key = fold(spec.seed, "rows")
        self.last_epoch = spec.last_epoch(self.num_docs.tolist())
        self._owed_most = spec.schedule is not None or spec.unit == "tokens"

    def window(self, state: WindowState) -> Window:
        if self.spec.pack is not None and self.spec.pack.strategy == "stream":
            return self._stream(state, self.spec.pack)
        rows = rows_left(self.spec, state.first_row)
        if rows is None or self.spec.pack is None:
            draws, looked = self._draw(state)
            doc, length = self._look_up(state, draws, looked)
            return self._window(state, draws, doc, length, self._lay(state, length))
        # Fewer draws are the first of more: what was looked up for the most of them serves every
        # number that is tried.
        spec, pack, shares = self.spec, self.spec.pack, shares_at(self.spec, state.first_row)
        most: tuple[mix.Draws, NDArray[np.int64], NDArray[np.int32], Tries] | None = None
        asked = 0

        def rows_of(num_draws: int) -> int:
            nonlocal most, asked
            if most is None or num_draws > asked:
                asked = min(spec.window_docs, num_draws + num_draws // 16)
                draws, looked = self._draw(state, asked, shares)
                doc, length = self._look_up(state, draws, looked)
                most = draws, doc, length, Tries(length, pack)
            return most[3].rows(num_draws)

        guess = window_draws(self.datasets, spec, state, shares)
        chosen = fit(guess, spec.window_docs, rows, rows_of)
        if most is None or chosen > asked:
            rows_of(chosen)
        assert most is not None
        draws, doc, length, tries = most
        layout = tries.layout(chosen, self._key_of_rows(state))
        if chosen != asked:
            draws = self._first_draws(state, shares, draws, length, chosen)
        return self._window(state, draws, doc[:chosen], length[:chosen], layout)

    def _first_draws(
        self,
        state: WindowState,
        shares: Sequence[Fraction],
        draws: mix.Draws,
        length: NDArray[np.int32],
        count: int,
    ) -> mix.Draws:
        """The first `count` of `draws`, as if no more had been asked for."""
        if (
            not self._owed_most
            or count > draws.dataset.size
            or draws.active.tolist() != list(state.active)
        ):
            return self._draw(state, count, shares)[0]
        sizes = token_sizes(length, self.spec.pack) if self.spec.unit == "tokens" else None
        deficits = np.array(state.deficits, dtype=np.int64)
        return first_draws(draws, count, shares, self.spec.block, deficits, sizes)

    def _stream(self, state: WindowState, pack: PackSpec) -> Window:
        """As many full rows as the documents of a window give, more of them where they give none;
        at the end of an epoch all there is.

        A token behind the last row has to be known, as the last label of that row, unless the epoch
        ends: with it the next window begins.
        """
        shares = shares_at(self.spec, state.first_row)
        asked = window_draws(self.datasets, self.spec, state, shares)
        start = 0 if state.cut is None else state.cut[1]
        while True:
            draws, looked = self._draw(state, asked, shares)
            doc, length = self._look_up(state, draws, looked)
            dataset = draws.dataset
            if state.cut is not None:
                dataset, doc, length = self._with_cut(state, dataset, doc, length)
            # tokens behind the start of the window, up to the end of each document
            ends = np.cumsum(length, dtype=np.int64) - start
            tokens = int(ends[-1]) if ends.size else 0
            ended, rows = (
                draws.ended,
                -(-tokens // pack.seq_length)
                if draws.ended
                else max(0, tokens - 1) // pack.seq_length,
            )
            if ended or rows:
                break
            if asked == mix.MAX_DRAWS:
                problem = f"{asked} documents do not fill a row of {pack.seq_length} tokens"
                raise PlanError(
                    at="pack.seq_length",
                    problem=problem,
                    fix="Lower it, or leave datasets without tokens out.",
                )
            asked = min(2 * asked, mix.MAX_DRAWS)
        left = rows_left(self.spec, state.first_row)
        if left is not None and left < rows:
            ended, rows = False, left
        if ended:
            after = self.after(state, draws, rows)
            layout = cut_stream(length, pack, self._key_of_rows(state), start=start)
            return Window(
                state=state, after=after, dataset=dataset, doc=doc, length=length, layout=layout
            )
        # the document that the next row begins in, and where
        last = int(np.searchsorted(ends, rows * pack.seq_length, side="right"))
        at = rows * pack.seq_length - int(ends[last] - length[last])
        count = last + (at > 0) - (state.cut is not None)
        own = length if state.cut is None else length[1:]
        draws = self._first_draws(state, shares, draws, own, count) if count else _no_draws(state)
        after = self.after(state, draws, rows, cut=(int(dataset[last]), at) if at else None)
        dataset, doc, length = dataset[: last + 1], doc[: last + 1], length[: last + 1]
        layout = cut_stream(length, pack, self._key_of_rows(state), start=start, num_rows=rows)
        return Window(
            state=state,
            after=after,
            dataset=dataset,
            doc=doc,
            length=length,
            layout=layout,
            ahead=at == 0,
        )

    def _with_cut(
        self,
        state: WindowState,
        dataset: NDArray[np.int32],
        doc: NDArray[np.int64],
        length: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
        """The draws of a window behind the document that the state is in the middle of."""
        assert state.cut is not None
        first, lengths = self.next_documents(state, state.cut[0], -1, 0)
        return (
            np.concatenate([np.array(state.cut[:1], np.int32), dataset]),
            np.concatenate([first, doc]),
            np.concatenate([lengths, length]),
        )

    def _look_up(
        self, state: WindowState, draws: mix.Draws, looked: _Looked | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The document of every draw, and its length."""
        counts = draws.counts
        first = np.cumsum(counts) - counts
        if looked is not None:
            docs, lengths = looked.first(counts)
        else:
            docs, lengths = self.next_of_all(state, counts)
        doc, length = np.empty_like(docs), np.empty_like(lengths)
        _to_draw_order(draws.dataset, first, docs, lengths, doc, length)
        pack = self.spec.pack
        if pack is not None and pack.oversize == "error" and (length > pack.seq_length).any():
            n = int(np.argmax(length > pack.seq_length))
            raise oversize_error(
                f"dataset {self.datasets[draws.dataset[n]].name!r}, document {doc[n]}",
                int(length[n]),
                pack,
            )
        return doc, length

    def _lay(self, state: WindowState, length: NDArray[np.int32]) -> Layout:
        return (
            one_row_each(length)
            if self.spec.pack is None
            else pack_window(length, self.spec.pack, self._key_of_rows(state))
        )

    def _key_of_rows(self, state: WindowState) -> int:
        return child(self._row_key, state.index)

    def _window(
        self,
        state: WindowState,
        draws: mix.Draws,
        doc: NDArray[np.int64],
        length: NDArray[np.int32],
        layout: Layout,
    ) -> Window:
        after = self.after(state, draws, layout.num_rows)
        return Window(
            state=state, after=after, dataset=draws.dataset, doc=doc, length=length, layout=layout
        )

    def some_document_fits(self, pack: PackSpec) -> bool:
        """Whether any document of any dataset gets a piece. Looks at lengths until one does."""
        longest = pack.seq_length if pack.oversize == "drop" else np.iinfo(np.int32).max
        for dataset in self.datasets:
            for start in range(0, dataset.num_docs, _LOOK):
                lengths = self._lengths(
                    dataset, np.arange(start, min(start + _LOOK, dataset.num_docs), dtype=np.int64)
                )
                if ((lengths > 0) & (lengths <= longest)).any():
                    return True
        return False

    def _lengths(self, dataset: PlanDataset, docs: NDArray[np.int64]) -> NDArray[np.int32]:
        lengths = dataset.lengths(docs)
        if lengths.dtype != np.int32 or lengths.shape != docs.shape:
            problem = (
                f"lengths of {docs.shape[0]} documents came as {lengths.dtype}{list(lengths.shape)}"
            )
            raise PlanError(
                at=f"dataset {dataset.name!r}",
                problem=problem,
                fix="PlanDataset.lengths gives Int32[n].",
            )
        if (lengths < 0).any():
            n = int(np.argmax(lengths < 0))
            at = f"dataset {dataset.name!r}, document {docs[n]}"
            raise PlanError(
                at=at,
                problem=f"a length of {lengths[n]} tokens",
                fix="The token cache is damaged: prepare it again.",
            )
        return lengths

    def draw(self, state: WindowState) -> mix.Draws:
        """The draws of a window without packing, which are its rows."""
        return self._draw(state)[0]

    def _draw(
        self,
        state: WindowState,
        num_draws: int | None = None,
        shares: Sequence[Fraction] | None = None,
    ) -> tuple[mix.Draws, _Looked | None]:
        """The draws behind `state`, and what had to be looked up for them.

        num_draws: None those of `window_draws`. shares: of the window, where they are known
        already.
        """
        left = mix.remaining(
            self.num_docs, np.array(state.drawn, dtype=np.int64), self.stop, self.spec.max_epochs
        )
        deficits, active = (
            np.array(state.deficits, dtype=np.int64),
            np.array(state.active, dtype=np.bool_),
        )
        if not self._owed_most:
            num_draws = self.spec.window_docs if num_draws is None else num_draws
            return mix.draw(
                num_draws, self._weights, left, deficits, active, self.stop, capped=True
            ), None
        spec, leave = self.spec, self.stop != "first_exhausted"
        shares = shares_at(spec, state.first_row) if shares is None else shares
        num_draws = (
            window_draws(self.datasets, spec, state, shares) if num_draws is None else num_draws
        )
        if spec.unit == "rows":
            return draw_owed_most(
                num_draws, shares, spec.block, left, deficits, active, leave
            ), None
        expected = [
            int(num_draws * part) for part in draw_shares(self.datasets, spec, shares, state.active)
        ]
        looked = _Looked(self, state, np.minimum([with_margin(count) for count in expected], left))
        return draw_owed_most(
            num_draws, shares, None, left, deficits, active, leave, looked.sizes, expected
        ), looked

    def can_be_cut(self, cut: tuple[int, int] | None, drawn: Sequence[int]) -> bool:
        """Whether a state that has `drawn` documents may stand in the middle of one."""
        if cut is None:
            return True
        streams = self.spec.pack is not None and self.spec.pack.strategy == "stream"
        return streams and 0 <= cut[0] < len(drawn) and drawn[cut[0]] > 0 and cut[1] > 0

    def next_of_all(
        self, state: WindowState, counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(numbers, lengths) of the next `counts[i]` documents of every dataset i behind `state`,
        dataset after dataset.
        """
        drawn = np.array(state.drawn, dtype=np.int64)
        docs = documents(
            self.spec.order, self.num_docs, self._order_keys, state.epoch, drawn, counts
        )
        lengths = np.empty(docs.shape[0], dtype=np.int32)
        start = 0
        for dataset, count in zip(self.datasets, counts.tolist(), strict=True):
            if count:
                lengths[start : start + count] = self._lengths(dataset, docs[start : start + count])
                start += count
        return docs, lengths

    def next_documents(
        self, state: WindowState, i: int, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(numbers, lengths) of documents `start` to `stop` of those that dataset i gives behind
        `state`.
        """
        drawn, counts = np.array(state.drawn, dtype=np.int64), np.zeros_like(self.num_docs)
        drawn[i], counts[i] = drawn[i] + start, stop - start
        docs = documents(
            self.spec.order, self.num_docs, self._order_keys, state.epoch, drawn, counts
        )
        return docs, self._lengths(self.datasets[i], docs)

    def after(
        self,
        state: WindowState,
        draws: mix.Draws,
        num_rows: int,
        cut: tuple[int, int] | None = None,
    ) -> WindowState:
        index, first_row = state.index + 1, state.first_row + num_rows
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


class _Looked:
    """Documents and lengths that had to be known before it was clear which would be drawn, each
    dataset's in their order.
    """

    def __init__(self, planner: Planner, state: WindowState, counts: NDArray[np.int64]) -> None:
        """counts: Int64[k], documents of each dataset that are looked up at once."""
        self._planner = planner
        self._state = state
        docs, lengths = planner.next_of_all(state, counts)
        ends = np.cumsum(counts)
        sizes = self._weigh(docs, lengths, ends)
        cuts = [
            slice(stop - count, stop)
            for stop, count in zip(ends.tolist(), counts.tolist(), strict=True)
        ]
        self._sizes = [sizes[cut] for cut in cuts]
        self._parts = [[(docs[cut], lengths[cut])] for cut in cuts]

    def sizes(self, i: int, start: int, stop: int) -> NDArray[np.int64]:
        """`token_sizes` of the documents which dataset i gives next."""
        if stop <= self._sizes[i].size:
            return self._sizes[i][start:stop]
        docs, lengths = self._planner.next_documents(self._state, i, start, stop)
        self._parts[i].append((docs, lengths))
        return self._weigh(docs, lengths, np.where(np.arange(len(self._parts)) < i, 0, docs.size))

    def _weigh(
        self, docs: NDArray[np.int64], lengths: NDArray[np.int32], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """ends: Int64[k], where each dataset's documents end."""
        sizes = token_sizes(lengths, self._planner.spec.pack)
        if (sizes > MAX_SIZE).any():
            n = int(np.argmax(sizes > MAX_SIZE))
            i = int(np.searchsorted(ends, n, side="right"))
            raise PlanError(
                at=f"dataset {self._planner.datasets[i].name!r}, document {docs[n]}",
                problem=f"{sizes[n]} tokens cannot be weighed: shares by tokens know documents of up to {MAX_SIZE}",
                fix="Weigh by rows, or cut the document.",
            )
        return sizes

    def first(self, counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The first `counts[i]` of every dataset i, dataset after dataset."""
        docs, lengths = [_NONE_64], [_NONE_32]
        for parts, count in zip(self._parts, counts.tolist(), strict=True):
            for some_docs, some_lengths in parts:
                docs.append(some_docs[:count])
                lengths.append(some_lengths[:count])
                count -= docs[-1].size
        return np.concatenate(docs), np.concatenate(lengths)


def token_sizes(lengths: NDArray[np.int32], pack: PackSpec | None) -> NDArray[np.int64]:
    """The tokens of documents that get a place in a row; at least 1 each, so that all count."""
    sizes = lengths.astype(np.int64)
    if pack is not None and pack.oversize == "truncate":
        sizes = np.minimum(sizes, pack.seq_length)
    elif pack is not None and pack.oversize == "drop":
        sizes[sizes > pack.seq_length] = 0
    return np.maximum(sizes, 1)


def _no_draws(state: WindowState) -> mix.Draws:
    deficits, active = (
        np.array(state.deficits, dtype=np.int64),
        np.array(state.active, dtype=np.bool_),
    )
    return mix.Draws(
        dataset=_NONE_32,
        counts=np.zeros_like(deficits),
        deficits=deficits,
        active=active,
        ended=False,
    )


@jit
def _to_draw_order(dataset, first, docs, lengths, doc, length):
    place = first.copy()
    for draw in range(dataset.shape[0]):
        at = place[dataset[draw]]
        place[dataset[draw]] += 1
        doc[draw], length[draw] = docs[at], lengths[at]
