"""Keeps the checkpoints that do best on held-out data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from easypipe.core import storage
from easypipe.core.config import config
from easypipe.core.errors import ConfigError
from easypipe.train.callbacks.metric import Mode, better, value_of
from easypipe.train.events import Callback, TrainEvent

logger = logging.getLogger("easypipe")

LIST = "best.json"  # in the output folder


@config
class BestConfig:
    """Saves the step of an evaluation that is among the `keep` best so far, and keeps it beside those that `checkpoint.keep` keeps.
    best.json in the output folder lists them, the best first.
    """

    metric: str  # of held-out data, as eval.held_out.loss
    mode: Mode = "min"  # whether lower or higher is better
    keep: int = 1  # checkpoints

    def check(self) -> None:
        if self.keep < 1:
            raise ConfigError(at="keep", problem=f"{self.keep} is too small", fix="Give at least 1.")


class BestCheckpoints(Callback):
    """Of equal values the earlier one is better."""

    def __init__(self, config: BestConfig, folder: Path, *, write: bool = True) -> None:
        """folder: the run's output folder. write: False in all processes of a run but one."""
        self.config, self._folder, self._write = config, folder, write
        self.ranking: list[tuple[int, float]] = []  # (step, value), the best first

    def on_init(self, event: TrainEvent) -> None:
        there = [(step, value) for step, value in self.ranking if (self._folder / "checkpoints" / str(step)).is_dir()]
        for step, _ in set(self.ranking) - set(there):
            logger.warning("%s: the checkpoint of step %d, one of the best, is gone", self._folder, step)
        self.ranking = there
        event.control.kept.update(step for step, _ in there)

    def on_step(self, event: TrainEvent) -> None:
        value = value_of(event.record, self.config.metric)
        if value is None:
            return
        place = next((i for i, (_, other) in enumerate(self.ranking) if better(value, other, self.config.mode)), len(self.ranking))
        if place >= self.config.keep:
            return
        self.ranking.insert(place, (event.step, value))
        for worse, _ in self.ranking[self.config.keep :]:
            event.control.kept.discard(worse)
        del self.ranking[self.config.keep :]
        event.control.kept.add(event.step)
        event.control.save()

    def on_save(self, event: TrainEvent) -> None:
        if self._write:
            best = [{"step": step, self.config.metric: value, "checkpoint": f"checkpoints/{step}"} for step, value in self.ranking]
            storage.commit_json(self._folder / LIST, best)

    def state(self) -> dict[str, Any]:
        return {"ranking": [list(one) for one in self.ranking]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.ranking = [(int(step), float(value)) for step, value in state["ranking"]]
