"""Mixing: the dataset of the n-th draw, by fixed or changing weights, by documents or tokens.

For k datasets, every dataset's count stays within 1 - 1/(2k - 2) of its share at every prefix,
however small the weights are; docs/mixing.md has the proof. `assign` in tests/plan_oracle.py is the
short oracle.

deficit   draws owed: after n draws with integer weights w (sum W),
          `deficits[i] = n * w[i] - count[i] * W`, always in (-W, W)
release   the first draw at which a dataset may be chosen: the smallest n with
          n·w - count·W ≥ W / (2k - 2)
deadline  the last draw at which it must have been chosen, so that it never owes more than
          W - W / (2k - 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from easypipe.core.errors import PlanError
from easypipe.core.jit import jit
from easypipe.core.values import Bools, Int32, Int64, Integer
from easypipe.plan.mix_schedule import apportion

Stop = Literal["restart", "first_exhausted", "all_exhausted"]
Calendar = tuple[Int64, Int32, Int32]  # deadline, released, behind: see `_draw_into`
Mixture = tuple[Int64, Int64, Int64, Bools, Int64]  # weights, left, deficits, active, counts

# times 2k - 2 and with a sign, it stays in an Int64 for up to MAX_DATASETS
MAX_WEIGHT_SUM = 1 << 40
MAX_DATASETS = 1 << 16
MAX_DRAWS = 1 << 20  # the most draws of one call: draws times weights stays in an Int64

NEVER = 1 << 62  # means the documents of a dataset that begins again without end
# A deadline is below 2^43, so it and the dataset's number fit one word of 64 bits.
_NUMBER_BITS, _NUMBER = np.int64(16), np.int64(MAX_DATASETS - 1)


def integer_weights(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Returns positive integers in the ratio of `weights`, in the mapping's order.

    Weights are read as the decimal numbers that were written, so {0.7, 0.3} is exactly 7 to 3 on
    every machine. If the exact ratio needs larger integers, each share is rounded to the nearest
    2^-40.

    Returns:
        Integers whose sum is at most 2^40.

    Raises:
        PlanError: There is no weight, a weight is not positive and finite, or a weight is so small
            compared to the others that it would be rounded to 0.
    """
    if not weights:
        raise PlanError(
            at="weights", problem="there is nothing to mix", fix="Give at least one dataset."
        )
    exact: list[Fraction] = []
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight <= 0:
            raise PlanError(
                at=f"weights.{name}",
                problem=f"{weight!r} is not a weight",
                fix="Give a positive finite number, or leave the dataset out.",
            )
        exact.append(
            Fraction(Decimal(repr(weight))) if isinstance(weight, float) else Fraction(weight)
        )
    scale = math.lcm(*(part.denominator for part in exact))
    whole = [int(part * scale) for part in exact]
    common = math.gcd(*whole)
    whole = [part // common for part in whole]
    total = sum(whole)
    if total > MAX_WEIGHT_SUM:
        room = MAX_WEIGHT_SUM - len(whole)  # rounding up adds less than 1 to each
        whole = [(2 * part * room + total) // (2 * total) for part in whole]
    for name, part in zip(weights, whole, strict=True):
        if part == 0:
            raise PlanError(
                at=f"weights.{name}",
                problem=f"{weights[name]!r} is less than 2^-41 of the sum of the weights",
                fix="Give a larger weight, or leave the dataset out.",
            )
    return tuple(whole)


@dataclass(frozen=True)
class Draws:
    """The next draws of a mixture.

    Attributes:
        dataset: Int32[n], the dataset of every draw.
        counts: Int64[k], the draws per dataset.
        deficits: Int64[k], the deficits after these draws.
        active: Bool[k], the datasets that are in the mixture after these draws.
        ended: Whether no further draw exists before the next epoch.
    """

    dataset: Int32
    counts: Int64
    deficits: Int64
    active: Bools
    ended: bool


def draw(
    num_draws: int,
    weights: Int64,
    remaining: Int64,
    deficits: Int64,
    active: Bools,
    stop: Stop,
) -> Draws:
    """Makes the next draws by fixed weights that count documents.

    Args:
        num_draws: The most draws to make.
        weights: Int64[k].
        remaining: Int64[k], the documents that each dataset may still yield (see `remaining`).
        deficits: Int64[k].
        active: Bool[k].
        stop: "first_exhausted" ends before the first draw that would need an exhausted dataset.
            Otherwise a dataset leaves with its last document. The others continue with their
            weights and deficits of 0, and the draws end with the last document of all.
    """
    if not 0 < num_draws <= MAX_DRAWS:
        raise ValueError(f"between 1 and {MAX_DRAWS} draws can be made at once, not {num_draws}")
    deficits, active = deficits.copy(), active.copy()
    dataset = np.empty(num_draws, dtype=np.int32)
    counts = np.zeros(weights.shape[0], dtype=np.int64)
    left, leave = remaining.copy(), stop != "first_exhausted"
    mixture = (weights, left, deficits, active, counts)
    made, ended = _draw_into(mixture, leave, dataset)
    return Draws(
        dataset=dataset[:made], counts=counts, deficits=deficits, active=active, ended=bool(ended)
    )


def start(num_docs: Sequence[int] | Int64, stop: Stop) -> tuple[Int64, Bools]:
    """Returns (deficits, active) at the start of an epoch.

    Under "all_exhausted", a dataset without documents has already left.
    """
    counts = np.asarray(num_docs, dtype=np.int64)
    return np.zeros_like(counts), (counts > 0) if stop == "all_exhausted" else np.ones(
        counts.shape, dtype=np.bool_
    )


def remaining(num_docs: Int64, drawn: Int64, stop: Stop, caps: Sequence[int | None]) -> Int64:
    """Returns the documents that each dataset may still yield in this epoch: Int64[k].

    Args:
        num_docs: Int64[k], the documents of one pass.
        drawn: Int64[k], the documents drawn so far.
        caps: The most passes over each dataset; None for no limit.
    """
    if stop != "restart":
        return num_docs - drawn
    left = [
        NEVER if cap is None or cap * count >= NEVER else cap * count - done
        for cap, count, done in zip(caps, num_docs.tolist(), drawn.tolist(), strict=True)
    ]
    return np.array(left, dtype=np.int64)


@jit
def _draw_into(mixture: Mixture, leave: bool, dataset: Int32) -> tuple[int, bool]:
    """Returns (draws made, whether the epoch ended); changes all but weights in place."""
    weights, left, deficits, active, counts = mixture
    num_datasets, limit = weights.shape[0], dataset.shape[0]
    base = np.empty(num_datasets, np.int64)  # the deficit after n draws is base + n * weight
    deadline = np.empty(num_datasets, np.int64)
    # A calendar: the datasets that are released at a draw are in a list that starts at
    # `released[draw]`.
    released = np.empty(limit + 2, np.int32)
    behind = np.empty(num_datasets, np.int32)
    calendar = (deadline, released, behind)
    # A heap of the datasets that may be chosen, by deadline, then by number.
    ready = np.empty(num_datasets, np.int64)
    made = 0
    while True:  # one iteration for every set of active datasets
        here = np.flatnonzero(active)
        total, alive = weights[here].sum(), len(here)
        if alive == 0:
            return made, True
        if alive == 1:
            only = here[0]
            take = min(limit - made, left[only])
            dataset[made : made + take] = only
            counts[only] += take
            left[only] -= take
            made += take
            if left[only] == 0:
                active[only] = False
                deficits[only] = 0
            return made, left[only] == 0
        slack = np.int64(2 * alive - 2)
        released[:] = -1
        for i in here:
            base[i] = deficits[i] - made * weights[i]
            _book(i, deficits[i], made, weights[i], total, slack, calendar)
        size = 0
        while True:
            n = made + 1  # this draw, counted from 1
            i: Integer = released[n]
            while i >= 0:
                size = _push(ready, size, deadline[i] << _NUMBER_BITS | i)
                i = behind[i]
            chosen: int = ready[0] & _NUMBER
            ended = left[chosen] == 0  # only if exhausted datasets stay in the mixture
            if ended or made == limit:
                deficits[:] = np.where(active, base + made * weights, 0)
                return made, ended
            size = _pop(ready, size)
            dataset[made] = chosen
            counts[chosen] += 1
            left[chosen] -= 1
            made = n
            base[chosen] -= total
            if leave and left[chosen] == 0:
                active[chosen] = False
                deficits[:] = 0
                break
            weight = weights[chosen]
            _book(chosen, base[chosen] + n * weight, n, weight, total, slack, calendar)


@jit
def _book(
    i: Integer, owed: int, made: int, weight: int, total: int, slack: Integer, calendar: Calendar
) -> None:
    """Sets when the next draw of dataset `i` may come and when it must have come.

    The dataset is owed `owed` after `made` draws.
    """
    deadline, released, behind = calendar
    unit = slack * weight
    deadline[i] = made + ((slack - 1) * total - slack * owed) // unit + 1
    release = max(made + 1, made - (slack * owed - total) // unit)
    if release < released.shape[0]:
        behind[i] = released[release]
        released[release] = i


@jit
def _push(heap: Int64, size: int, value: int) -> int:
    at = size
    while at > 0 and heap[(at - 1) >> 1] > value:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = value
    return size + 1


@jit
def _pop(heap: Int64, size: int) -> int:
    size -= 1
    value, at = heap[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value
    return size


# Mixing with changing weights or by tokens: the largest deficit is drawn from.
#
# Deficits are integers: `sum over draws of weight * size of the draw` minus `total * sizes of what
# was drawn`. The weights of the datasets in the mixture always sum to `total`. A draw has size 1,
# or the size of its document in tokens. So deficits sum to 0 and keep their values when the weights
# change. docs/mixing.md proves the bounds; `owed_most` in tests/plan_oracle.py is the oracle.

# A deficit is less than 12 times `total` times the largest size (the sum of 1/n up to MAX_DATASETS
# is 11.7), and stays in an Int64.
ROWS_TOTAL = 1 << 40
TOKENS_TOTAL = 1 << 30
MAX_SIZE = 1 << 27

_FULL, _EXHAUSTED, _UNKNOWN = 0, 1, 2


class Known(NamedTuple):
    """The tokens of the documents that datasets yield next, all Int64.

    `known[i]` documents of dataset i are known; their tokens, in [1, MAX_SIZE], are in `table` from
    `first[i]` on.
    """

    table: Int64
    first: Int64
    known: Int64


# Looks up at least the given number of documents of each dataset (Int64[k]). How many more it looks
# up affects speed, never a draw.
Sizes = Callable[[Int64], Known]


def weights_of(
    shares: Sequence[Fraction], active: Sequence[bool], total: int, block: int | None = None
) -> tuple[int, ...]:
    """Returns the integer weights of the datasets in the mixture, 0 for the others.

    If no dataset that is left has a share, all of them share equally.

    Args:
        shares: The share of each dataset.
        active: Which datasets are in the mixture.
        total: The sum of the weights.
        block: Rounds the shares to whole documents of a block; the sum is then the largest multiple
            of the block up to `total`.
    """
    mine = [share if alive else Fraction(0) for share, alive in zip(shares, active, strict=True)]
    if not any(mine):
        mine = [Fraction(alive) for alive in active]
    if block is None:
        return apportion(mine, total)
    return tuple(documents * (total // block) for documents in apportion(mine, block))


def draw_largest_deficit(
    num_draws: int,
    weigh: Callable[[Bools], Int64],
    left: Int64,
    deficits: Int64,
    active: Bools,
    stop: Stop,
    sizes: Sizes | None = None,
) -> Draws:
    """Makes the next draws by changing weights or by tokens.

    Args:
        num_draws: The most draws to make.
        weigh: Returns the integer weights of the datasets that are in the mixture, as `weights_of`
            does.
        left: Int64[k], the documents that each dataset may still yield.
        deficits: Int64[k].
        active: Bool[k].
        stop: "first_exhausted" ends before the first draw that needs a dataset that has no
            documents left. Otherwise a dataset leaves with its last one, and the others continue
            with their shares and deficits of 0.
        sizes: Looks up the tokens of documents; None counts draws.
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
        made, why, which = _draw_deficits_into(mixture, leave, ahead or _NO_SIZES, made, dataset)
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
    """Returns how many documents of a dataset to look up first if `expected` are expected."""
    return expected + expected // 16 + 16


@jit
def _draw_deficits_into(
    mixture: Mixture, leave: bool, ahead: Known, made: int, dataset: Int32
) -> tuple[int, int, Integer]:
    """Returns (draws made, why it stopped, the dataset that it stopped at).

    It changes left, deficits, counts and dataset in place. `ahead` is a Known without datasets if
    every draw has size 1.
    """
    weights, left, deficits, active, counts = mixture
    table, first, known = ahead
    by_size = known.shape[0] > 0
    limit = dataset.shape[0]
    # The datasets in the mixture are stored without gaps, heavy ones first: of equals the first is
    # taken, and it is found soon.
    alive = np.flatnonzero(active)
    alive = alive[np.argsort(-weights[alive], kind="mergesort")]
    size = alive.shape[0]
    weight, owed = weights[alive], deficits[alive]
    total = weight.sum()
    # A draw of size 1 is granted to all before it is made; the size of other draws is known only
    # when they are chosen.
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
