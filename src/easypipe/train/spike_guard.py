"""The spike guard: judges a loss by the median of the last ones, and decides when a run rolls back.

Everything here follows from the losses read so far, and is saved with every checkpoint: a killed
run decides like one that was not. `SpikeConfig` (train/config.py) has its patience.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Collection

from easypipe.core.errors import TrainError
from easypipe.core.values import Json
from easypipe.train.config import TrainingConfig
from easypipe.train.metrics.log import Record

logger = logging.getLogger("easypipe")

# For a normal distribution the standard deviation is this factor times the median absolute
# deviation.
_TO_SIGMA = 1.4826


class SpikeGuard:
    """Judges the losses of a run, step by step, and counts its bad steps and roll-backs.

    Attributes:
        good: The step of the last checkpoint that was saved by the configured interval and is not
            in doubt. A run is rolled back to it; 0 is its start.
        owes: Whether a save was due by the interval while the run was in doubt.
        in_doubt: Whether the newest step was bad, so that a checkpoint of it would not be good.
        guards: Whether this run may be rolled back at all.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._config, self._spikes = config, config.spikes
        self.guards = self._spikes is not None
        self._losses = deque[float](maxlen=self._spikes.window if self._spikes else 0)
        self._nonfinite = self._bad = self._rollbacks = self.good = 0
        self.owes = False

    @property
    def in_doubt(self) -> bool:
        return self._bad > 0

    def judge(self, record: Record) -> bool:
        """Judges the next step; call it once for every step, in order.

        Returns:
            Whether the run has to be rolled back.

        Raises:
            TrainError: The run must not continue: see TrainingConfig.on_nonfinite, max_nonfinite
                and SpikeConfig.max_rollbacks.
        """
        at, loss = f"step {record['step']}", record["loss"]
        skipped = loss is None or record["grad_norm"] is None
        self._nonfinite = self._nonfinite + 1 if skipped else 0
        lost = not skipped and record["param_norm"] is None  # no later step can be finite
        if skipped:
            waits = self._spikes is None or self._bad + 1 < self._spikes.patience
            self._skip(at, record, most=self._config.max_nonfinite if waits else None)
        if self._spikes is None:
            if lost:
                fix = (
                    "Lower train.optimizer.learning_rate, or continue from the last checkpoint "
                    "with "
                    "another optimizer."
                )
                raise TrainError(
                    at=at, problem="its update left parameters that are not finite", fix=fix
                )
            return False
        limit = self.limit()
        spiked = limit is not None and loss is not None and loss > limit
        self._bad = self._bad + 1 if skipped or lost or spiked else 0
        if self._bad == 0 and loss is not None:
            self._losses.append(loss)
        elif spiked:
            allowed = f"{limit:.4g}, what the last {len(self._losses)} steps allow"
            logger.warning("%s: loss %.4g is above %s", at, loss, allowed)
        if self._bad < self._spikes.patience:
            return False
        self._rollbacks += 1
        if self._rollbacks > self._spikes.max_rollbacks:
            raise TrainError(
                at=at,
                problem=f"the loss left its range again after {self._spikes.max_rollbacks} "
                "roll-backs",
                fix="Lower train.optimizer.learning_rate, or look at the documents that "
                "rollbacks.jsonl names.",
            )
        self._bad = self._nonfinite = 0
        return True

    def limit(self) -> float | None:
        """Returns the loss above which a step is bad; None before `window` good steps were seen.

        It is the median of the last `window` good steps plus `threshold` standard deviations, which
        are estimated by the median absolute deviation.
        """
        if self._spikes is None or len(self._losses) < self._spikes.window:
            return None
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self._spikes.threshold * _TO_SIGMA * deviation

    def state(self) -> Json:
        """Returns the state of the guard as plain JSON."""
        return {
            "nonfinite": self._nonfinite,
            "bad": self._bad,
            "rollbacks": self._rollbacks,
            "good": self.good,
            "owes": self.owes,
            "losses": list(self._losses),
        }

    def restore(self, state: Json | None, step: int, saved: Collection[int]) -> None:
        """Restores the `state` of a checkpoint.

        Args:
            state: The saved state; None if the checkpoint was saved without a guard.
            step: The step of the checkpoint.
            saved: Steps that have a checkpoint. If the good one is gone, `step` takes its place.
        """
        if state is not None:
            self._nonfinite, self._bad = state["nonfinite"], state["bad"]
            self._rollbacks, self.good, self.owes = state["rollbacks"], state["good"], state["owes"]
            self._losses.extend(state["losses"])
        if state is None or (self.good and self.good not in saved):
            self.good = step

    def _skip(self, at: str, record: Record, most: int | None) -> None:
        """Warns about a step that is not finite.

        Args:
            at: The step, in words.
            record: Its record.
            most: How many skipped steps in succession end the run; None: the run goes back anyway.

        Raises:
            TrainError: The options do not allow skipping it.
        """
        what = "loss" if record["loss"] is None else "gradient norm"
        rate = f" at learning rate {record['learning_rate']:g}" if "learning_rate" in record else ""
        problem = f"the {what} is not finite{rate}"
        if self._config.on_nonfinite == "skip":
            if most is None or self._nonfinite < most:
                logger.warning("%s: skipped, its %s is not finite%s", at, what, rate)
                return
            problem = f"{self._nonfinite} steps in a row were skipped: {problem}"
        fix = (
            "Lower train.optimizer.learning_rate, lengthen the warm-up, or look for labels "
            "outside the vocabulary."
        )
        raise TrainError(at=at, problem=problem, fix=fix)
