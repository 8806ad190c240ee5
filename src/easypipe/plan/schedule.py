"""Schedules: how the weights of a mixture follow the training step, in exact arithmetic.

step   a training step, the number of a batch from 0: with batches of `n` rows, step `s` holds rows
`s * n` to `(s + 1) * n` share  a dataset's part of the mixture, a fraction; the shares of a step
sum to 1 point  a step and the weights that are reached there
stair  between two points the plan looks at the weights again after 1/64 of the way, or after a step
where that is longer
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from easypipe.core.errors import PlanError

Kind = Literal["step", "linear", "cosine"]
KINDS: tuple[Kind, ...] = ("step", "linear", "cosine")

STAIRS = 64

_BITS = 96
_PI = 314159265358979323846264338327950288419716939937510 * (1 << _BITS) // 10**50


@dataclass(frozen=True)
class Schedule:
    """Weights by training step.

    points: (step, weights), steps ascending; weights are integers of at least 0, not all 0, one for
    each dataset. kind: between two points the weights stay ("step") or go over, along a line or
    along half a cosine wave. batch_sizes: (step, rows of a batch from there on), the first from
    step 0. before: the weights until the first point; None takes the first point's.
    """

    points: tuple[tuple[int, tuple[int, ...]], ...]
    kind: Kind
    batch_sizes: tuple[tuple[int, int], ...]
    before: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(at="schedule", problem=f"no kind {self.kind!r}", have=KINDS)
        if (
            not self.batch_sizes
            or self.batch_sizes[0][0] != 0
            or any(size < 1 for _, size in self.batch_sizes)
        ):
            raise PlanError(
                at="schedule",
                problem=f"{self.batch_sizes} are no batch sizes",
                fix="Give at least 1 row, from step 0 on.",
            )
        steps = [step for step, _ in self.points]
        if (
            not steps
            or steps[0] < 0
            or not _ascend(steps)
            or not _ascend([step for step, _ in self.batch_sizes])
        ):
            raise PlanError(
                at="schedule",
                problem=f"{steps} are no ascending steps",
                fix="Give each step once, from 0 on.",
            )
        if len({len(weights) for weights in self.all_weights}) != 1:
            raise PlanError(
                at="schedule",
                problem="the points have weights for different numbers of datasets",
                fix="Name all in each.",
            )
        if any(min(weights, default=-1) < 0 or not any(weights) for weights in self.all_weights):
            raise PlanError(
                at="schedule",
                problem="weights below 0, or all 0",
                fix="Give each point a weight above 0.",
            )

    @property
    def all_weights(self) -> tuple[tuple[int, ...], ...]:
        """Every set of weights that stands in the schedule."""
        return ((self.before,) if self.before is not None else ()) + tuple(
            weights for _, weights in self.points
        )

    def shares(self, step: int) -> tuple[Fraction, ...]:
        """The shares at a step, exactly; after the last point they stay."""
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

    def rows_left(self, row: int) -> int | None:
        """Rows from `row` to the one where the weights are looked at again; None where they stay
        from here on.
        """
        step = self.step_of(row)
        place = bisect_right(self.points, step, key=lambda point: point[0])
        if place == len(self.points):
            return None
        border = self.points[place][0]
        here, weights = self.points[place - 1] if place else (border, self.points[place][1])
        if self.kind != "step" and normalized(weights) != normalized(self.points[place][1]):
            stair = max(1, (border - here) // STAIRS)
            border = min(border, here + ((step - here) // stair + 1) * stair)
        return self.first_row(border) - row

    def step_of(self, row: int) -> int:
        """The step whose batch `row` stands in."""
        place = bisect_right(self.batch_sizes, row, key=lambda point: self.first_row(point[0])) - 1
        step, size = self.batch_sizes[place]
        return step + (row - self.first_row(step)) // size

    def first_row(self, step: int) -> int:
        """Rows before the batch of a step."""
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
    """(1 - cos(pi * way)) / 2 for a way between 0 and 1, to 64 bits: the Taylor series in integers,
    so that machines agree.
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
    """Integers in the ratio of `shares` that sum to `total`, each within 1 of its exact part:
    largest remainders first, then by number.
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
