"""The weights of a mixture at every step: points, and ramps between as stages; where these end.

step   a training step, the number of a batch from 0: with batches of `n` rows, step `s` holds rows
       `s * n` to `(s + 1) * n`
share  a dataset's part of the mixture, a fraction; the shares of a step sum to 1
point  a step and the weights that are reached at it
stage  rows with the same weights: from point to point; between two points with different weights,
       1/64 of the way, or one step if that is longer
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Kind = Literal["step", "linear", "cosine"]
KINDS: tuple[Kind, ...] = ("step", "linear", "cosine")

RAMP_STAGES = 64

_BITS = 96
_PI = 314159265358979323846264338327950288419716939937510 * (1 << _BITS) // 10**50


@dataclass(frozen=True)
class Schedule:
    """The weights of a mixture by training step.

    Args:
        points: (step, weights), steps ascending. Weights are integers of at least 0, not all 0, one
            for each dataset.
        kind: Between two points the weights stay ("step") or change along a line ("linear") or
            along half a cosine wave ("cosine").
        batch_sizes: (step, rows of a batch from there on), the first from step 0; () if they are
            not known yet.
        before: The weights until the first point; None takes the first point's.
    """

    points: tuple[tuple[int, tuple[int, ...]], ...]
    kind: Kind
    batch_sizes: tuple[tuple[int, int], ...]
    before: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        steps, sizes = ([one for one, _ in each] for each in (self.points, self.batch_sizes))
        assert self.kind in KINDS, f"no kind {self.kind!r}"
        assert steps, "no point"
        assert _ascend([-1, *steps]), f"{steps} are not ascending steps"
        assert sizes[:1] in ([0], []), f"{sizes} do not begin at step 0"
        assert _ascend(sizes), f"{sizes} are not ascending steps"
        assert all(size > 0 for _, size in self.batch_sizes), "a batch without rows"
        assert len({len(weights) for weights in self.all_weights}) == 1, "points of other datasets"
        assert all(min(w) >= 0 and any(w) for w in self.all_weights), "weights below 0, or all 0"

    @property
    def all_weights(self) -> tuple[tuple[int, ...], ...]:
        """Every set of weights in the schedule."""
        return ((self.before,) if self.before is not None else ()) + tuple(
            weights for _, weights in self.points
        )

    def shares(self, step: int) -> tuple[Fraction, ...]:
        """Returns the shares at a step, exactly; after the last point they stay."""
        place = bisect_right(self.points, step, key=lambda point: point[0])
        if place == 0:
            return normalized(self.points[0][1] if self.before is None else self.before)
        here, weights = self.points[place - 1]
        if self.kind == "step" or place == len(self.points):
            return normalized(weights)
        there, target = self.points[place]
        way = Fraction(step - here, there - here)
        if self.kind == "cosine":
            way = half_wave(way)
        return tuple(
            a + (b - a) * way for a, b in zip(normalized(weights), normalized(target), strict=True)
        )

    def mean_shares(self, rows: int) -> tuple[Fraction, ...]:
        """Returns the shares that the first `rows` rows should have.

        They are the mean over these rows, taken at no more than 1,024 of their steps.
        """
        rows = max(1, rows)
        steps = self.step_of(rows - 1) + 1
        looks = min(steps, 1024)
        places = [(2 * i + 1) * steps // (2 * looks) for i in range(looks)]
        sizes = [min(rows, self.first_row(step + 1)) - self.first_row(step) for step in places]
        return tuple(
            sum(map(operator.mul, column, sizes), Fraction(0)) / sum(sizes)
            for column in zip(*map(self.shares, places), strict=True)
        )

    def rows_left(self, row: int) -> int | None:
        """Returns the rows from `row` to the end of its stage; None if it has no end."""
        step = self.step_of(row)
        place = bisect_right(self.points, step, key=lambda point: point[0])
        if place == len(self.points):
            return None
        border = self.points[place][0]
        here, weights = self.points[place - 1] if place else (border, self.points[place][1])
        if self.kind != "step" and normalized(weights) != normalized(self.points[place][1]):
            stage = max(1, (border - here) // RAMP_STAGES)
            border = min(border, here + ((step - here) // stage + 1) * stage)
        return self.first_row(border) - row

    def stage_end(self, row: int) -> tuple[int, int] | None:
        """Returns how far a window that begins at `row` may go.

        Returns:
            The rows from `row` to the end of its stage, and how many rows a window that begins
            there may have: 1/32 more, or two batches more if that is more rows. None if the stage
            has no end.
        """
        rows = self.rows_left(row)
        if rows is None:
            return None
        step = self.step_of(row + rows)
        batch = self.first_row(step + 1) - self.first_row(step)
        return rows, rows + max(rows // 32, 2 * batch)

    def step_of(self, row: int) -> int:
        """Returns the step whose batch contains `row`."""
        place = bisect_right(self.batch_sizes, row, key=lambda point: self.first_row(point[0])) - 1
        step, size = self.batch_sizes[place]
        return step + (row - self.first_row(step)) // size

    def first_row(self, step: int) -> int:
        """Returns the number of rows before the batch of a step."""
        ends = [*(first for first, _ in self.batch_sizes[1:]), step]
        return sum(
            (max(first, min(end, step)) - first) * size
            for (first, size), end in zip(self.batch_sizes, ends, strict=True)
        )


def _ascend(steps: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(steps))


def normalized(weights: Sequence[int]) -> tuple[Fraction, ...]:
    total = sum(weights)
    return tuple(Fraction(weight, total) for weight in weights)


def half_wave(way: Fraction) -> Fraction:
    """Returns (1 - cos(pi * way)) / 2 for a way between 0 and 1, to 64 bits.

    It is the Taylor series in integers, so that all machines agree.
    """
    angle = _PI * way.numerator // way.denominator
    square = angle * angle >> _BITS
    term, total, sign, n = square // 2, 0, 1, 2  # a^2/2! - a^4/4! + ...
    while term:
        total += sign * term
        term = (term * square >> _BITS) // ((n + 1) * (n + 2))
        sign, n = -sign, n + 2
    rise = Fraction(total >> (_BITS - 63), 1 << 64)
    return min(max(rise, Fraction(0)), Fraction(1))


def apportion(shares: Sequence[Fraction], total: int) -> tuple[int, ...]:
    """Returns integers in the ratio of `shares` that sum to `total`.

    Each is within 1 of its exact part. The largest remainders are rounded up first, then the lowest
    numbers.
    """
    unit = math.lcm(*(share.denominator for share in shares))
    parts = [share.numerator * (unit // share.denominator) for share in shares]
    all_parts = sum(parts)
    whole, remainders = (
        list(column)
        for column in zip(*(divmod(part * total, all_parts) for part in parts), strict=True)
    )
    by_remainder = sorted(range(len(parts)), key=lambda i: (-remainders[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return tuple(whole)
