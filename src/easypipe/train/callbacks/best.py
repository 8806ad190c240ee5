"""Keeps the checkpoints that do best on held-out data."""

from __future__ import annotations

import logging
from pathlib import Path

from easypipe.core.checked import Json
from easypipe.train.callbacks.config import BestConfig
from easypipe.train.callbacks.metric import better, value_of
from easypipe.train.events import Callback, TrainEvent
from easypipe.train.record import BEST, write_kept

logger = logging.getLogger("easypipe")


class BestCheckpoints(Callback):
    """Of equal values the earlier one is better."""

    def __init__(self, config: BestConfig, folder: Path, *, write: bool = True) -> None:
        """folder: the run's output folder. write: False in all processes of a run but one."""
        self.config, self._folder, self._write = config, folder, write
        self.ranking: list[tuple[int, float]] = []  # (step, value), the best first
        # all that were ever among them, while their checkpoints are there or to come
        self._ranked: list[tuple[int, float]] = []
        self._listed: list[tuple[int, float]] = []  # in best.json

    def on_init(self, event: TrainEvent) -> None:
        there = [one for one in self.ranking if self._is_whole(one)]
        for step, _ in set(self.ranking) - set(there):
            logger.warning(
                "%s: the checkpoint of step %d, one of the best, is gone", self._folder, step
            )
        self.ranking, self._ranked = there, list(there)
        event.control.kept.update(step for step, _ in there)
        if self._write:
            # of steps that are behind the one from which it goes on
            (self._folder / BEST).unlink(missing_ok=True)
        self._list()

    def on_step(self, event: TrainEvent) -> None:
        value = value_of(event.record, self.config.metric, "train.callbacks.best.metric")
        if value is None or self._place(value, self.ranking) >= self.config.keep:
            return
        for ranking in (self.ranking, self._ranked):
            ranking.insert(self._place(value, ranking), (event.step, value))
        event.control.kept.difference_update(step for step, _ in self.ranking[self.config.keep :])
        event.control.kept.add(event.step)
        event.control.save()
        del self.ranking[self.config.keep :]

    def on_dispatch(self, event: TrainEvent) -> None:
        # a save is whole some steps after it began
        if self._write and self._ranked and self._listed != self.ranking:
            self._list()

    # the save before this one is whole by now, and another deleted for it
    def on_save(self, event: TrainEvent) -> None:
        self._list()

    def on_end(self, event: TrainEvent) -> None:
        self._list()

    def _list(self) -> None:
        """Writes down the best that are there, for whoever reads the list while the run goes on, or
        after a kill.
        """
        there = [one for one in self._ranked if self._is_whole(one)]
        newest = max((step for step, _ in there), default=0)
        self._ranked = [one for one in self._ranked if one in there or one[0] > newest]
        best = there[: self.config.keep]
        if self._write and best and best != self._listed:
            self._listed = best
            lines = [
                {"step": step, self.config.metric: value, "checkpoint": f"checkpoints/{step}"}
                for step, value in best
            ]
            write_kept(self._folder / BEST, lines)

    def _place(self, value: float, ranking: list[tuple[int, float]]) -> int:
        worse = (i for i, one in enumerate(ranking) if better(value, one[1], self.config.mode))
        return next(worse, len(ranking))

    def _is_whole(self, one: tuple[int, float]) -> bool:
        """A checkpoint gets its name when it is."""
        return (self._folder / "checkpoints" / str(one[0])).is_dir()

    def state(self) -> Json:
        return {"ranking": [list(one) for one in self.ranking]}

    def restore(self, state: Json) -> None:
        self.ranking = [(int(step), float(value)) for step, value in state["ranking"]]
