"""Ends a run whose metric no longer gets better."""

from __future__ import annotations

from easypipe.core.checked import Json
from easypipe.train.callbacks.config import EarlyStoppingConfig
from easypipe.train.callbacks.metric import better, value_of
from easypipe.train.events import Callback, TrainEvent


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
            reason = (
                f"{self.config.metric} is {value:.6g}, and did not get better than "
                f"{self.best:.6g} {self.since} times"
            )
            event.control.stop(reason, for_good=True)

    def state(self) -> Json:
        return {"best": self.best, "since": self.since}

    def restore(self, state: Json) -> None:
        self.best, self.since = state["best"], state["since"]
        if self.since >= self.config.patience:
            self.since = 0
