"""Watches the losses of a run for steps that do harm, and says when to go back to the last good
checkpoint.

Everything here follows from the losses read so far, and is saved with every checkpoint: a run that
was killed decides as one that was not.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from easypipe.core.errors import TrainError
from easypipe.train.config import TrainingConfig
from easypipe.train.metrics.log import Record

logger = logging.getLogger("easypipe")

# the median absolute deviation of a normal distribution, times this, is its standard deviation
_TO_SIGMA = 1.4826


class Watch:
    """`judge(record)` of every step, in order, tells whether the run has to be rolled back.

    good: the step of the last checkpoint that was saved by the calendar and not in doubt, to which
    a run is rolled back; 0: its start.
    owes: whether a save was due by the calendar while the run was in doubt.
    in_doubt: whether the newest step was bad, so that a checkpoint of it would not be a good one.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._stops, self._most, self._spikes = (
            config.on_nonfinite == "stop",
            config.max_nonfinite,
            config.spikes,
        )
        self._losses: deque[float] = deque(maxlen=self._spikes.window if self._spikes else 0)
        self._nonfinite, self._bad, self._rollbacks = 0, 0, 0
        self.good, self.owes = 0, False

    @property
    def in_doubt(self) -> bool:
        return self._bad > 0

    @property
    def guards(self) -> bool:
        """Whether this run may be rolled back at all."""
        return self._spikes is not None

    def judge(self, record: Record) -> bool:
        """Raises TrainError where the run must not go on: see TrainingConfig.on_nonfinite,
        max_nonfinite and SpikeConfig.max_rollbacks.
        """
        step, loss = record["step"], record["loss"]
        skipped = loss is None or record["grad_norm"] is None
        self._nonfinite = self._nonfinite + 1 if skipped else 0
        lost = not skipped and record["param_norm"] is None  # no later step can be sound
        if skipped:
            self._unsound(record)
        if self._spikes is None and lost:
            fix = "Lower train.optimizer.learning_rate, or go on from the last checkpoint with another optimizer."
            raise TrainError(
                at=f"step {step}", problem="its update left parameters that are not finite", fix=fix
            )
        if self._spikes is None:
            return False
        limit = self.limit()
        spiked = limit is not None and loss is not None and loss > limit
        self._bad = self._bad + 1 if skipped or lost or spiked else 0
        if self._bad == 0 and loss is not None:
            self._losses.append(loss)
        elif spiked:
            logger.warning(
                "step %d: loss %.4g is above %.4g, what the last %d steps allow",
                step,
                loss,
                limit,
                len(self._losses),
            )
        if self._bad < self._spikes.patience:
            return False
        self._rollbacks += 1
        if self._rollbacks > self._spikes.max_rollbacks:
            raise TrainError(
                at=f"step {step}",
                problem=f"the loss left its range again after {self._spikes.max_rollbacks} roll-backs",
                fix="Lower train.optimizer.learning_rate, or look at the documents that rollbacks.jsonl names.",
            )
        self._bad = self._nonfinite = 0
        return True

    def limit(self) -> float | None:
        """The loss above which a step is bad: median + threshold standard deviations, by the median
        absolute deviation of the last `window` good steps. None until there were so many."""
        if self._spikes is None or len(self._losses) < self._spikes.window:
            return None
        median = statistics.median(self._losses)
        return median + self._spikes.threshold * _TO_SIGMA * statistics.median(
            abs(loss - median) for loss in self._losses
        )

    def state(self) -> dict[str, Any]:
        """Plain JSON."""
        counts = {
            "nonfinite": self._nonfinite,
            "bad": self._bad,
            "rollbacks": self._rollbacks,
            "good": self.good,
            "owes": self.owes,
        }
        return {**counts, "losses": list(self._losses)}

    def restore(self, state: Mapping[str, Any] | None, step: int, saved: Collection[int]) -> None:
        """Goes on from the `state` of a checkpoint of `step`; None: it was saved before there was a
        watch.

        saved: steps that have a checkpoint; where the good one is gone, this one takes its place.
        """
        if state is not None:
            self._nonfinite, self._bad, self._rollbacks = (
                state["nonfinite"],
                state["bad"],
                state["rollbacks"],
            )
            self.good, self.owes = state["good"], state["owes"]
            self._losses.extend(state["losses"])
        if state is None or (self.good and self.good not in saved):
            self.good = step

    def _unsound(self, record: Record) -> None:
        step, what = record["step"], "loss" if record["loss"] is None else "gradient norm"
        rate = f" at learning rate {record['learning_rate']:g}" if "learning_rate" in record else ""
        fix = "Lower train.optimizer.learning_rate, lengthen the warm-up, or look for labels outside the vocabulary."
        if self._stops:
            raise TrainError(at=f"step {step}", problem=f"the {what} is not finite{rate}", fix=fix)
        if self._nonfinite >= self._most:
            times = f"{self._nonfinite} steps in a row were skipped: the {what} is not finite{rate}"
            raise TrainError(at=f"step {step}", problem=times, fix=fix)
        logger.warning("step %d: skipped, its %s is not finite%s", step, what, rate)
