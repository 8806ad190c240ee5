"""Mix with weights that change, or that count tokens: every draw goes to the dataset that is owed
most.

Deficits are integers, `sum over draws of weight * size of the draw` less `total * sizes of what was
drawn`, where the weights of the datasets in the mixture always sum to `total`, and a draw has size
1, or that of its document in tokens. So they sum to 0 and stay what they are when the weights
change. docs/mixing.md proves the bounds; `owed_most` in tests/plan_oracle.py is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from easypipe.core.jit import jit
from easypipe.plan.mix import MAX_DRAWS, Draws
from easypipe.plan.schedule import apportion

# A deficit is below 12 times `total` times the largest size (the sum of 1/n up to MAX_DATASETS is
# 11.7), and stays in an Int64.
ROWS_TOTAL = 1 << 40
TOKENS_TOTAL = 1 << 30
MAX_SIZE = 1 << 27

Sizes = Callable[[int, int, int], NDArray[np.int64]]

_FULL, _EXHAUSTED, _UNKNOWN = 0, 1, 2


def weights_of(
    shares: Sequence[Fraction], active: Sequence[bool], total: int, block: int | None = None
) -> tuple[int, ...]:
    """Integer weights of the datasets in the mixture, 0 for the others. They sum to `total`.

    block: round the shares to whole documents of a block; the sum is then the largest multiple of
    it up to `total`. Where the datasets that are left have no share, they share alike.
    """
    mine = [share if alive else Fraction(0) for share, alive in zip(shares, active, strict=True)]
    if not any(mine):
        mine = [Fraction(alive) for alive in active]
    if block is None:
        return apportion(mine, total)
    return tuple(documents * (total // block) for documents in apportion(mine, block))


def draw_owed_most(
    num_draws: int,
    shares: Sequence[Fraction],
    block: int | None,
    left: NDArray[np.int64],
    deficits: NDArray[np.int64],
    active: NDArray[np.bool_],
    leave: bool,
    sizes: Sizes | None = None,
    expected: Sequence[int] = (),
) -> Draws:
    """The next draws, at most `num_draws` of them.

    left: Int64[k], documents that each dataset may still give. leave: a dataset leaves with its
    last one, and the others go on by their shares and without deficits; False ends before the first
    draw that needs a dataset which has none.
    sizes: None counts draws. Else `sizes(i, start, stop)` gives Int64[stop - start] in [1,
    MAX_SIZE], the tokens of the next documents of dataset i, counted from the first of this call;
    `expected[i]` of them are asked for at once. It changes speed, never a draw.
    """
    if not 0 < num_draws <= MAX_DRAWS:
        raise ValueError(f"between 1 and {MAX_DRAWS} draws can be made at once, not {num_draws}")
    left, deficits, active = left.copy(), deficits.copy(), active.copy()
    dataset = np.empty(num_draws, dtype=np.int32)
    counts = np.zeros(len(shares), dtype=np.int64)
    ahead = None if sizes is None else _Ahead(sizes, expected)
    made, ended = 0, not active.any()
    weights = _NONE
    while made < num_draws and not ended:
        if weights is _NONE:
            total = ROWS_TOTAL if ahead is None else TOKENS_TOTAL
            weights = np.array(weights_of(shares, active.tolist(), total, block), dtype=np.int64)
        table, first, known = (_NONE, _NONE, _NONE) if ahead is None else ahead.known(left, counts)
        made, why, which = _draw_into(
            weights,
            left,
            deficits,
            active,
            leave,
            ahead is not None,
            table,
            first,
            known,
            made,
            dataset,
            counts,
        )
        if why == _UNKNOWN:
            assert ahead is not None
            ahead.extend(int(which))
        elif why == _EXHAUSTED and leave:
            active[which] = False
            deficits[:] = 0
            ended, weights = not active.any(), _NONE
        elif why == _EXHAUSTED:
            ended = True
    return Draws(
        dataset=dataset[:made], counts=counts, deficits=deficits, active=active, ended=ended
    )


def first_draws(
    draws: Draws,
    num_draws: int,
    shares: Sequence[Fraction],
    block: int | None,
    deficits: NDArray[np.int64],
    sizes: NDArray[np.int64] | None,
) -> Draws:
    """The first `num_draws` of `draws`, among which no dataset left: what `draw_owed_most` gives if
    no more are asked for.

    deficits: Int64[k], before the first of them. sizes: Int64[n] of every draw in tokens; None
    counts draws.
    """
    total = ROWS_TOTAL if sizes is None else TOKENS_TOTAL
    weights = np.array(weights_of(shares, draws.active.tolist(), total, block), dtype=np.int64)
    counts, tokens = np.zeros_like(deficits), np.zeros_like(deficits)
    dataset = draws.dataset[:num_draws]
    _count(dataset, _NONE if sizes is None else sizes, counts, tokens)
    # the products may wrap around, their difference does not
    deficits = deficits + weights * tokens.sum() - weights.sum() * tokens
    return Draws(
        dataset=dataset, counts=counts, deficits=deficits, active=draws.active, ended=False
    )


_NONE = np.empty(0, dtype=np.int64)


def with_margin(expected: int) -> int:
    """Documents of a dataset that are looked at first, where so many are expected."""
    return expected + expected // 16 + 16


class _Ahead:
    """Sizes of the documents that may be drawn next, asked for as far as they are needed."""

    def __init__(self, sizes: Sizes, expected: Sequence[int]) -> None:
        self._sizes = sizes
        self._wanted = [with_margin(count) for count in expected]
        self._parts = [_NONE for _ in expected]
        self._table = _NONE, _NONE, _NONE
        self._stale = True

    def known(
        self, left: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(sizes of all datasets, Int64[n]; where each dataset's begin and how many there are, both
        Int64[k]).
        """
        if self._stale:
            for i, part in enumerate(self._parts):
                wanted = min(self._wanted[i], int(counts[i] + left[i]))
                if wanted > part.size:
                    self._parts[i] = np.concatenate([part, self._sizes(i, part.size, wanted)])
            known = np.array([part.size for part in self._parts], dtype=np.int64)
            self._table = np.concatenate(self._parts), np.cumsum(known) - known, known
            self._stale = False
        return self._table

    def extend(self, dataset: int) -> None:
        self._wanted[dataset] += self._parts[dataset].size // 8 + 16
        self._stale = True


@jit
def _draw_into(
    weights, left, deficits, active, leave, by_size, table, first, known, made, dataset, counts
):
    """Returns (draws made, why it stopped, the dataset to blame). Changes left, deficits, dataset
    and counts in place.
    """
    limit = dataset.shape[0]
    # The datasets in the mixture without gaps, heavy ones first: of equals the first is taken, and
    # is found soon.
    alive = np.flatnonzero(active)
    alive = alive[np.argsort(-weights[alive], kind="mergesort")]
    size = alive.shape[0]
    weight, owed = weights[alive], deficits[alive]
    total = weight.sum()
    # A draw of size 1 is granted to all before it is made; how large another is shows only when it
    # is chosen.
    grant = np.int64(0) if by_size else np.int64(1)
    why, which = _FULL, np.int64(0)
    while made < limit:
        top = np.int64(-1) << 62
        if by_size:
            for i in range(size):
                owed[i] += grant * weight[i]
                top = max(top, owed[i])
        else:
            for i in range(size):
                owed[i] += weight[i]
                top = max(top, owed[i])
        best = 0
        while owed[best] != top:
            best += 1
        which = alive[best]
        if left[which] == 0:
            why = _EXHAUSTED
        elif by_size and counts[which] == known[which]:
            why = _UNKNOWN
        if why != _FULL:
            grant = np.int64(0) if by_size else np.int64(-1)
            break
        tokens = table[first[which] + counts[which]] if by_size else np.int64(1)
        dataset[made] = which
        made += 1
        counts[which] += 1
        left[which] -= 1
        owed[best] -= total * tokens
        grant = tokens if by_size else np.int64(0)
        if leave and left[which] == 0:
            why = _EXHAUSTED
            break
    for i in range(size):
        deficits[alive[i]] = owed[i] + grant * weight[i]
    return made, why, which


@jit
def _count(dataset, sizes, counts, tokens):
    for draw in range(dataset.shape[0]):
        counts[dataset[draw]] += 1
        tokens[dataset[draw]] += sizes[draw] if sizes.shape[0] > 0 else 1
