"""Which datasets the next documents of a stream come from, where nobody knows how many each still
has, or how long they are.

A draw is made as if every dataset had documents without end. Then one document beyond those that it
takes is looked for in each; one that has no more is known by then, and the draw is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.errors import SourceError
from easypipe.loader.streams.feed import Cursor, Loaded
from easypipe.loader.streams.spec import StreamSpec
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
from easypipe.plan.pack import placed_tokens


class Drawn(NamedTuple):
    """dataset: Int32[draws]. taken: of each dataset, ranges of what was loaded. deficits, active,
    ended: of the mixture behind them.

    Of a run: start, tokens of the first document that stand in rows before these; rows, how many
    there are; cut, as in StreamState.
    """

    dataset: NDArray[np.int32]
    taken: list[list[tuple[Loaded, int, int]]]
    deficits: NDArray[np.int64]
    active: NDArray[np.bool_]
    ended: bool
    start: int = 0
    rows: int | None = None
    cut: tuple[int, int] | None = None

    @property
    def counted(self) -> int:
        """The draws that books count: all but a last one of which no token stands in these rows."""
        return len(self.dataset) - (self.cut is not None and self.cut[1] == 0)


class Drawer:
    """Draws from the cursors of one stream. Raises SourceError for a document that is too long to
    be weighed by tokens.
    """

    def __init__(self, cursors: Sequence[Cursor], spec: StreamSpec) -> None:
        self._cursors, self._spec = cursors, spec
        self._weights = np.array(spec.weights, np.int64)

    def draw(
        self,
        count: int,
        deficits: NDArray[np.int64],
        active: NDArray[np.bool_],
        shares: Sequence[Fraction] | None,
    ) -> mix.Draws:
        """The next draws, at most `count`, with every document that they need waiting. shares: None
        draws by the static weights.
        """
        remaining = np.full(len(self._cursors), mix.NEVER)
        while True:
            try:
                draws = self._draws(count, remaining, deficits, active, shares)
            except _NoMore as found:
                remaining[found.dataset] = found.waiting
                continue
            short = False
            for i, wanted in enumerate(draws.counts.tolist()):
                if remaining[i] == mix.NEVER:
                    waiting = self._cursors[i].fill(wanted + 1)
                    if waiting <= wanted:
                        remaining[i] = waiting
                        short = True
                        # it leaves before it came
                        if (
                            not waiting
                            and shares is None
                            and self._spec.mix_stop != "first_exhausted"
                        ):
                            active = active & (np.arange(len(active)) != i)
                            deficits = np.zeros_like(deficits)
            if not short:
                return draws

    def _draws(
        self,
        count: int,
        remaining: NDArray[np.int64],
        deficits: NDArray[np.int64],
        active: NDArray[np.bool_],
        shares: Sequence[Fraction] | None,
    ) -> mix.Draws:
        if shares is None:
            return mix.draw(count, self._weights, remaining, deficits, active, self._spec.mix_stop)
        expected = with_margin(1 + count // len(self._cursors))
        total = ROWS_TOTAL if self._spec.unit == "rows" else TOKENS_TOTAL
        return draw_largest_deficit(
            count,
            lambda active: np.array(weights_of(shares, active.tolist(), total, self._spec.block)),
            remaining,
            deficits,
            active,
            self._spec.mix_stop,
            None
            if self._spec.unit == "rows"
            else lambda counts: self._sizes(np.maximum(counts, np.minimum(expected, remaining))),
        )

    def _sizes(self, counts: NDArray[np.int64]) -> Known:
        """As `plan.deficit.Sizes`: the tokens that get a place in a row, at least 1 each, so that
        all count.
        """
        parts = []
        for i, (cursor, count) in enumerate(zip(self._cursors, counts.tolist(), strict=True)):
            waiting = cursor.fill(count) if count else 0
            if waiting < count:
                raise _NoMore(i, waiting)
            lengths, has_eos = cursor.lengths(0, count)
            sizes = placed_tokens(
                lengths + ~has_eos if self._spec.eos is not None else lengths, self._spec.pack
            )
            if (sizes > MAX_SIZE).any():
                raise SourceError(
                    at=f"dataset {cursor.name!r}",
                    problem=f"a document of {sizes.max()} tokens cannot be weighed: "
                    f"shares by tokens know documents of up to {MAX_SIZE}",
                    fix="Weigh by rows, or cut the document.",
                )
            parts.append(np.maximum(sizes, 1))
        return Known(np.concatenate(parts), np.cumsum(counts) - counts, counts)


class _NoMore(Exception):
    """A dataset has fewer documents than were asked for."""

    def __init__(self, dataset: int, waiting: int) -> None:
        super().__init__()
        self.dataset, self.waiting = dataset, waiting
