"""WeightScheduler: weight schedules by name and step; plan/mix_schedule.py computes them."""

from __future__ import annotations

from collections.abc import Sequence

from easypipe.core.config import from_dict
from easypipe.core.errors import require
from easypipe.core.values import Settings
from easypipe.loader.config import LoadStageConfig
from easypipe.plan.mix_schedule import KINDS, Schedule
from easypipe.stages.mix.config import (
    ScheduleType,
    WeightSchedulePoint,
    check_points,
    exact_weights,
)


class WeightScheduler:
    """Weights by training step, from a few points, as in a mixture with the same schedule.

    Before the first point the weights are those of the first; after the last, those of the last.

    Args:
        points: WeightSchedulePoints, or mappings with `step` and `weights`; steps must ascend, and
            all points must name the same datasets.
        type: Between two points the weights stay (`step`), or change along a line (`linear`) or
            half a cosine wave (`cosine`).

    Raises:
        ConfigError: A point is invalid.
    """

    def __init__(
        self, points: Sequence[WeightSchedulePoint | Settings], type: ScheduleType = "step"
    ) -> None:
        made = tuple(
            point
            if isinstance(point, WeightSchedulePoint)
            else from_dict(WeightSchedulePoint, point, f"points[{i}]")
            for i, point in enumerate(points)
        )
        require(type in KINDS, "type", f"{type!r} is not an option", have=KINDS)
        check_points(made, "points")
        self.points, self.type = made, type
        self._names = tuple(made[0].weights)
        self._schedule = Schedule(exact_points(made, self._names), type, ((0, 1),))

    def get_weights(self, step: int) -> dict[str, float]:
        """Returns the share of each dataset at a training step; the shares sum to 1."""
        require(step >= 0, "step", f"{step} is before the first step", "Steps count from 0.")
        return dict(zip(self._names, map(float, self._schedule.shares(step)), strict=True))


def exact_points(
    points: Sequence[WeightSchedulePoint], names: Sequence[str]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns (step, integer weights in the order of `names`) of each point."""
    return tuple((point.step, exact_weights(point.weights, names)) for point in points)


def batch_sizes_of(load: LoadStageConfig) -> tuple[tuple[int, int], ...]:
    """Returns (step, rows of a batch from that step on) for each change; the first is step 0."""
    return ((0, load.batch_size), *load.batch_size_schedule)
