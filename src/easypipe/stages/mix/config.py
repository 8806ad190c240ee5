"""MixStageConfig: weights, schedule, unit, blocks and limits on passes; checks of their names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

from easypipe.core.config import ListOf, config
from easypipe.core.errors import ConfigError, PlanError, require, require_known
from easypipe.plan.mix import integer_weights
from easypipe.plan.spec import Unit

ScheduleType = Literal["step", "linear", "cosine"]


@config
class WeightSchedulePoint:
    """The weights of all datasets at one training step.

    Args:
        step: The trainer's step, counted from 0; one batch of the loader is one step.
        weights: A number of at least 0 for each dataset, in any scale; 0 leaves the dataset out at
            that step.
    """

    step: int
    weights: dict[str, float]

    def check(self) -> None:
        require(
            self.step >= 0, "step", f"{self.step} is before the first step", "Steps count from 0."
        )
        for name, weight in self.weights.items():
            require(
                math.isfinite(weight) and weight >= 0,
                f"weights.{name}",
                f"{weight!r} is not a weight",
                "Give a number of at least 0.",
            )
        require(
            any(self.weights.values()),
            "weights",
            "all are 0",
            "Give at least one a number above 0.",
        )


@config
class MixStageConfig:
    """The shares of the datasets in the mixture.

    docs/mixing.md has the rules and their bounds.

    Args:
        weights: A positive number for each dataset, in any scale; None gives every dataset the
            same.
        weight_schedule: Weights by training step. `weights` then hold until the first point
            (without them, the first point's do). Packed rows follow a change at most 1/32 of a
            stage or two batches late, because weights are looked up once for each window of
            documents.
        weight_schedule_type: Between two points the weights stay (`step`), or change along a line
            (`linear`) or half a cosine wave (`cosine`).
        batch_size: Rows of a training step, for weight_schedule. None takes that of load(), or of
            the config's `load`; a different one is an error.
        unit: What the weights are shares of: documents (`rows`), or tokens that are placed in rows
            (`tokens`).
        max_epochs: For each named dataset, how often each of its documents may be drawn in the
            whole run. The dataset then leaves the mixture, and the others continue by their
            weights. A mixture that restarts ends if all its datasets have such a limit.
        block_size: Round the shares to whole documents of a block of this size, so that every such
            block holds the same number of each dataset; under a schedule, the shares of each window
            are rounded. None keeps every prefix within one document of the weights. An error with
            unit `tokens`.
        stop_strategy: `restart` starts an exhausted dataset again and never ends; `first_exhausted`
            ends when an exhausted dataset would be drawn; `all_exhausted` continues with the
            others, so that every document comes exactly once.
        seed: The seed of the mixture, instead of the pipeline's.
        allow_mixed_tokenizers: Accept datasets of different tokenizers, which are an error
            otherwise.
        provenance: Keep the column `__source__` in packed rows too: the dataset of every segment,
            in the order of the segments. save() writes it; batches leave it out. Mixed rows that
            are not packed always have it.
    """

    weights: dict[str, float] | None = None
    weight_schedule: ListOf[WeightSchedulePoint] | None = None
    weight_schedule_type: ScheduleType = "step"
    batch_size: int | None = None
    unit: Unit = "rows"
    max_epochs: dict[str, int] | None = None
    block_size: int | None = None
    stop_strategy: Literal["restart", "first_exhausted", "all_exhausted"] = "restart"
    seed: int | None = None
    allow_mixed_tokenizers: bool = False
    provenance: bool = False

    def check(self) -> None:
        for name, weight in (self.weights or {}).items():
            require(
                math.isfinite(weight) and weight > 0,
                f"weights.{name}",
                f"{weight!r} is not a weight",
                "Give a positive number, or leave the dataset out.",
            )
        require(
            self.weights is None or self.weights,
            "weights",
            "there is nothing to mix",
            "Give a weight for every dataset, or leave it out.",
        )
        if self.block_size is not None:
            require(
                1 <= self.block_size <= 1 << 40,
                "block_size",
                f"{self.block_size} is not a block of documents",
                "Give at least 1.",
            )
            require(
                self.unit != "tokens",
                "block_size",
                "counts documents, and unit is 'tokens'",
                "Leave one of them out.",
            )
            if self.weights is not None:
                block_weights(self.weights, self.block_size)
        for name, epochs in (self.max_epochs or {}).items():
            require(
                epochs >= 1,
                f"max_epochs.{name}",
                f"{epochs} is not a pass",
                "Give at least 1, or leave the dataset out.",
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        """Checks the points of the weight schedule, and options that need one."""
        if self.weight_schedule is None:
            for name, value, default in (
                ("weight_schedule_type", self.weight_schedule_type, "step"),
                ("batch_size", self.batch_size, None),
            ):
                require(
                    value == default,
                    name,
                    "has no effect without weight_schedule",
                    "Leave it out, or give points.",
                )
            return
        require(
            self.batch_size is None or self.batch_size >= 1,
            "batch_size",
            f"{self.batch_size} rows are not a batch",
            "Give at least 1.",
        )
        check_points(self.weight_schedule, "weight_schedule")
        for i, point in enumerate(self.weight_schedule):
            try:
                exact_weights(point.weights, list(point.weights))
                if self.block_size is not None:
                    block_weights(
                        {name: weight for name, weight in point.weights.items() if weight > 0},
                        self.block_size,
                    )
            except ConfigError as error:
                raise error.under(f"weight_schedule[{i}]") from None

    def check_names(self, names: list[str]) -> None:
        """Raises ConfigError if weights, points or max_epochs do not name these datasets."""
        check_weights(self.weights, names)
        for i, point in enumerate(self.weight_schedule or ()):
            check_weights(point.weights, names, f"mix.weight_schedule[{i}].weights")
        for name in self.max_epochs or {}:
            require_known(
                name, sorted(names), f"mix.max_epochs.{name}", f"no dataset named {name!r}"
            )

    def ends(self, names: list[str]) -> bool:
        """Whether the mixture of these datasets ends."""
        return (
            self.stop_strategy != "restart"
            or len(names) == 1
            or set(names) <= set(self.max_epochs or {})
        )


def check_weights(
    weights: dict[str, float] | None, names: list[str], at: str = "mix.weights"
) -> None:
    """Raises ConfigError if weights and datasets do not have the same names."""
    if weights is None:
        return
    for name in weights:
        require_known(name, sorted(names), f"{at}.{name}", f"no dataset named {name!r}")
    for name in names:
        require(
            name in weights,
            at,
            f"no weight for dataset {name!r}",
            "Give it one, or leave the dataset out.",
            have=weights,
        )


def block_weights(weights: dict[str, float], block_size: int) -> tuple[int, ...]:
    """Returns the whole documents of each dataset in a block, rounded by largest remainders.

    Raises:
        ConfigError: The share of a dataset is rounded to 0.
    """
    exact = dict(zip(weights, integer_weights(weights), strict=True))
    shares = {
        name: Fraction(part * block_size, sum(exact.values())) for name, part in exact.items()
    }
    whole = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (whole[name] - shares[name], name))
    for name in by_remainder[: block_size - sum(whole.values())]:
        whole[name] += 1
    for name, documents in whole.items():
        if documents == 0:
            needed = math.ceil(1 / (shares[name] / block_size))
            raise ConfigError(
                at="block_size",
                problem=f"in a block of {block_size} documents {name!r} has "
                f"{float(shares[name]):.3g}, which rounds to 0",
                fix=f"Use blocks of at least {needed}, or leave block_size out.",
            )
    return tuple(whole.values())


def check_points(points: Sequence[WeightSchedulePoint], at: str) -> None:
    """Raises ConfigError if the points are not in ascending order or name different datasets."""
    require(points, at, "it has no points", "Give at least one, or leave it out.")
    first = points[0].weights
    for i, point in enumerate(points):
        require(
            not i or point.step > points[i - 1].step,
            f"{at}[{i}].step",
            f"{point.step} does not come after {points[i - 1].step}",
            "Order the points by step.",
        )
        for name in point.weights:
            require_known(
                name,
                first,
                f"{at}[{i}].weights.{name}",
                f"{at}[0] has no weight for {name!r}",
                "Name the same datasets in every point; 0 leaves one out.",
            )
        for name in first:
            require(
                name in point.weights,
                f"{at}[{i}].weights",
                f"no weight for {name!r}",
                "Give it one; 0 leaves it out.",
                have=point.weights,
            )


def exact_weights(weights: Mapping[str, float], names: Sequence[str]) -> tuple[int, ...]:
    """Returns integers in the ratio of `weights`, in the order of `names`; 0 stays 0.

    Raises:
        ConfigError: A weight is too small compared to the others.
    """
    above = {name: weight for name, weight in weights.items() if weight > 0}
    try:
        whole = dict(zip(above, integer_weights(above), strict=True))
    except PlanError as error:
        raise ConfigError(at=error.at, problem=error.problem, fix=error.fix) from None
    return tuple(whole.get(name, 0) for name in names)


def restarts(num_epochs: int, what: str, *, endless: bool) -> ConfigError:
    """Returns the error for a number of passes over a mixture that restarts its datasets.

    Args:
        num_epochs: The number of passes in the config.
        what: The mixture, in words.
        endless: Whether it never ends; else mix.max_epochs ends it.
    """
    why = "never ends" if endless else "is drawn once, until mix.max_epochs ends it"
    return ConfigError(
        at="load.num_epochs",
        problem=f"{num_epochs}, but {what} {why}: its stop_strategy is 'restart'",
        fix="Leave it out, or set mix.stop_strategy to 'first_exhausted' or 'all_exhausted'.",
    )
