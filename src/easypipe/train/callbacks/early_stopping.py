"""Ends a run whose metric no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from easypipe.core.config import config
from easypipe.core.errors import ConfigError
from easypipe.train.callbacks.metric import Mode, better, value_of
from easypipe.train.events import Callback, TrainEvent


@config
class EarlyStoppingConfig:
    """Stops once `metric` did not get better for `patience` of its values in a row. The step that
    shows it is saved, as a last step is, and the run is at its end: run again, it stays there,
    unless `train.resume_changes: [ended]` lets it go on.
    """

    # of held-out data, as eval.held_out.loss, or of each logged step, as loss, or what an own loss
    # gives by name
    metric: str
    mode: Mode = "min"  # whether lower or higher is better
    patience: int = 3  # values in a row, not steps
    min_delta: float = 0.0  # better by no more than this is not better

    def check(self) -> None:
        if self.patience < 1:
            raise ConfigError(
                at="patience", problem=f"{self.patience} is too small", fix="Give at least 1."
            )
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            raise ConfigError(
                at="min_delta",
                problem=f"{self.min_delta} is not a number from 0 up",
                fix="0.0 takes any gain.",
            )


class EarlyStopping(Callback):
    """Keeps its best value and its count with every checkpoint: a run that was killed stops where
    one that was not does.

    A run that goes on behind its end has as much patience as at the beginning.
    """

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.since = 0

    def on_step(self, event: TrainEvent) -> None:
        value = value_of(event.record, self.config.metric, "train.callbacks.early_stopping.metric")
        if value is None:
            return
        if better(value, self.best, self.config.mode, self.config.min_delta):
            self.best, self.since = value, 0
            return
        self.since += 1
        if self.since >= self.config.patience and event.step < event.steps:
            reason = f"{self.config.metric} is {value:.6g}, and did not get better than {self.best:.6g} {self.since} times"
            event.control.stop(reason, for_good=True)

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "since": self.since}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.since = state["best"], state["since"]
        if self.since >= self.config.patience:
            self.since = 0
