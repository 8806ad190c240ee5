"""Weight schedules as people write them: by name and training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError
from easypipe.loader.config import LoadStageConfig
from easypipe.plan.mix_schedule import KINDS, Schedule
from easypipe.stages.mix.config import (
    ScheduleType,
    WeightSchedulePoint,
    check_points,
    exact_weights,
)

BatchSizes = tuple[tuple[int, int], ...]


class WeightScheduler:
    """Weights by training step, from a few points: the ones that a mixture under the same schedule
    has.

    points: WeightSchedulePoints, or mappings with `step` and `weights`; steps ascending, the same
    datasets in all.
    type: between two points weights stay (`step`), or go over along a line (`linear`) or half a
    cosine wave (`cosine`). Before the first point they are those of the first, after the last those
    of the last. Raises ConfigError for points that are none.
    """

    def __init__(
        self, points: Sequence[WeightSchedulePoint | Mapping[str, Any]], type: ScheduleType = "step"
    ) -> None:
        made = tuple(
            point
            if isinstance(point, WeightSchedulePoint)
            else from_dict(WeightSchedulePoint, point, f"points[{i}]")
            for i, point in enumerate(points)
        )
        if type not in KINDS:
            raise ConfigError(at="type", problem=f"{type!r} is not an option", have=KINDS)
        check_points(made, "points")
        self.points, self.type = made, type
        self._names = tuple(made[0].weights)
        self._schedule = Schedule(exact_points(made, self._names), type, ((0, 1),))

    def get_weights(self, step: int) -> dict[str, float]:
        """The share of each dataset at a training step; they sum to 1."""
        if step < 0:
            raise ConfigError(
                at="step", problem=f"{step} is before the first step", fix="Steps count from 0."
            )
        return dict(zip(self._names, map(float, self._schedule.shares(step)), strict=True))


def exact_points(
    points: Sequence[WeightSchedulePoint], names: Sequence[str]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((point.step, exact_weights(point.weights, names)) for point in points)


def batch_sizes_of(load: LoadStageConfig) -> BatchSizes:
    """(step, rows of a batch from there on), the first from step 0."""
    later = tuple(load.batch_size_schedule)
    return later if later and later[0][0] == 0 else ((0, load.batch_size), *later)


@dataclass(frozen=True)
class MixSchedule:
    """A schedule that may not know yet how many rows a training step has.

    points, kind, before: as in plan.Schedule. block: documents that shares are rounded to.
    batch_sizes: None where nobody has said.
    given: they are mix.batch_size, which load() may not contradict.
    """

    points: tuple[tuple[int, tuple[int, ...]], ...]
    kind: ScheduleType
    before: tuple[int, ...] | None
    block: int | None
    batch_sizes: BatchSizes | None
    given: bool

    def spec(self) -> Schedule:
        """Raises ConfigError where no batch size is known."""
        if self.batch_sizes is None:
            raise ConfigError(
                at="mix.weight_schedule",
                problem="its steps are training steps, and nobody has said how many rows one has",
                fix="Set load.batch_size in the pipeline's config or call load() first, or set "
                "mix.batch_size.",
            )
        return Schedule(self.points, self.kind, self.batch_sizes, self.before)

    def for_load(self, load: LoadStageConfig) -> MixSchedule:
        """With the batch sizes of a loader. Raises ConfigError where mix.batch_size is another."""
        sizes = batch_sizes_of(load)
        if self.given and sizes != self.batch_sizes:
            assert self.batch_sizes is not None
            raise ConfigError(
                at="mix.batch_size",
                problem=f"{self.batch_sizes[0][1]}, but load() makes batches of "
                f"{', then '.join(str(size) for _, size in sizes)} rows",
                fix="Leave mix.batch_size out, or give load.batch_size the same.",
            )
        return dataclasses.replace(self, batch_sizes=sizes)

    def mean_shares(self, rows: int) -> tuple[Fraction, ...]:
        """The shares that the first `rows` rows are asked to have, the mean over at most 1,024 of
        their steps.
        """
        schedule = self.spec()
        steps = max(1, schedule.step_of(max(0, rows - 1)) + 1)
        looks = min(steps, 1024)
        shares = [schedule.shares((2 * i + 1) * steps // (2 * looks)) for i in range(looks)]
        return tuple(sum(column, Fraction(0)) / looks for column in zip(*shares, strict=True))
