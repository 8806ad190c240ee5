"""Mixing with changing weights or by tokens: the largest deficit is drawn from.

Deficits are integers, `sum over draws of weight * size of the draw` less `total * sizes of what was
drawn`, where the weights of the datasets in the mixture always sum to `total`, and a draw has size
1, or that of its document in tokens. So they sum to 0 and stay what they are when the weights
change. docs/mixing.md proves the bounds; `owed_most` in tests/plan_oracle.py is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.jit import jit
from easypipe.plan.mix import MAX_DRAWS, Draws, Stop
from easypipe.plan.mix_schedule import apportion

# A deficit is below 12 times `total` times the largest size (the sum of 1/n up to MAX_DATASETS is
# 11.7), and stays in an Int64.
ROWS_TOTAL = 1 << 40
TOKENS_TOTAL = 1 << 30
MAX_SIZE = 1 << 27

_FULL, _EXHAUSTED, _UNKNOWN = 0, 1, 2


class Known(NamedTuple):
    """Tokens of the documents that datasets give next: `known[i]` of dataset i, in [1, MAX_SIZE],
    from `table[first[i]]` on. All Int64.
    """

    table: NDArray[np.int64]
    first: NDArray[np.int64]
    known: NDArray[np.int64]


# Looks up at least so many of each dataset (Int64[k]); how many more changes speed, never a draw.
Sizes = Callable[[NDArray[np.int64]], Known]


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


def draw_largest_deficit(
    num_draws: int,
    weigh: Callable[[NDArray[np.bool_]], NDArray[np.int64]],
    left: NDArray[np.int64],
    deficits: NDArray[np.int64],
    active: NDArray[np.bool_],
    stop: Stop,
    sizes: Sizes | None = None,
) -> Draws:
    """The next draws, at most `num_draws` of them.

    weigh: the integer weights of the datasets that are in the mixture, as `weights_of` gives them.
    left: Int64[k], documents that each dataset may still give. stop: "first_exhausted" ends before
    the first draw that needs a dataset which has none; else a dataset leaves with its last one, and
    the others go on by their shares and without deficits. sizes: None counts draws.
    """
    if not 0 < num_draws <= MAX_DRAWS:
        raise ValueError(f"between 1 and {MAX_DRAWS} draws can be made at once, not {num_draws}")
    left, deficits, active = left.copy(), deficits.copy(), active.copy()
    dataset, counts = np.empty(num_draws, dtype=np.int32), np.zeros_like(deficits)
    ahead = None if sizes is None else sizes(counts)
    made, ended, leave = 0, not active.any(), stop != "first_exhausted"
    weights = weigh(active) if not ended else counts
    while made < num_draws and not ended:
        mixture = (weights, left, deficits, active, counts)
        made, why, which = _draw_into(mixture, leave, ahead or _NO_SIZES, made, dataset)
        if why == _UNKNOWN:
            assert sizes is not None
            assert ahead is not None
            more = np.where(np.arange(counts.size) == which, ahead.known // 8 + 16, 0)
            ahead = sizes(np.minimum(ahead.known + more, counts + left))
        elif why == _EXHAUSTED and leave:
            active[which] = False
            deficits[:] = 0
            ended = not active.any()
            weights = weights if ended else weigh(active)
        elif why == _EXHAUSTED:
            ended = True
    return Draws(dataset[:made], counts, deficits, active, ended)


_NONE = np.empty(0, dtype=np.int64)
_NO_SIZES = Known(_NONE, _NONE, _NONE)


def with_margin(expected: int) -> int:
    """Documents of a dataset that are looked at first, where so many are expected."""
    return expected + expected // 16 + 16


@jit
def _draw_into(mixture, leave, ahead, made, dataset):
    """Returns (draws made, why it stopped, the dataset to blame). Changes left, deficits, counts
    and dataset in place. ahead: sizes of none where a draw has size 1.
    """
    weights, left, deficits, active, counts = mixture
    table, first, known = ahead
    by_size = known.shape[0] > 0
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
