"""Reads what steps measured, one step behind, so that the device never waits for the reading."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from easypipe.core.errors import TrainError
from easypipe.train.metrics import Record, perplexity
from easypipe.train.step import Metrics

WINDOW_STEPS = 16


class Meter:
    """Turns device metrics into records, and keeps the clock: rates are those of the last WINDOW_STEPS steps.

    mfu: (num_tokens, attended, seconds) -> share of the devices' peak, or None where the peak is unknown.
    """

    def __init__(self, mfu: Callable[[int, float, float], float | None]) -> None:
        self._mfu = mfu
        self._pending: Any = None
        # (time, tokens, attended, seconds waited) since the run began, one a step; none before the first is through: it compiles
        self._marks: deque[tuple[float, int, float, float]] = deque(maxlen=WINDOW_STEPS + 1)
        self._tokens, self._attended, self._waited = 0, 0.0, 0.0

    def next_batch(self, batches: Any) -> Mapping[str, Any] | None:
        """The next batch, or None at the end. Time counts as waited only where the device had run dry when the batch came."""
        began = time.perf_counter()
        batch = next(batches, None)
        if self._pending is None or self._pending["loss"].is_ready():
            self._waited += time.perf_counter() - began
        return batch

    def push(self, metrics: Metrics) -> None:
        """The metrics of the step that was just dispatched. Those before must have been read."""
        for value in metrics.values():
            value.copy_to_host_async()
        self._pending = metrics

    def read(self, step: int, metrics: Metrics) -> Record:
        """Waits for `metrics` of `step` and counts them into the interval.

        loss, ppl, nll and grad_norm are None where they are not finite; skipped counts the batches so far that moved no parameter.
        fill is the share of slots outside padding, trained_share that of their tokens whose successor is predicted.
        Raises TrainError for a step without targets.
        """
        host = {name: value.item() for name, value in jax.device_get(metrics).items()}
        self._tokens += host["num_tokens"]
        self._attended += host["attended"]
        self._mark()
        if metrics is self._pending:
            self._pending = None
        _check(step, host)
        finite = {name: host[name] if math.isfinite(host[name]) else None for name in ("loss", "nll", "grad_norm")}
        return {
            "step": step,
            "loss": finite["loss"],
            "ppl": perplexity(host["nll"]),
            "nll": finite["nll"],
            "grad_norm": finite["grad_norm"],
            "skipped": step - host["updates"],
            **({"learning_rate": host["learning_rate"]} if "learning_rate" in host else {}),  # an optimizer from Python tells none
            "num_tokens": host["num_tokens"],
            "num_targets": host["num_targets"],
            "fill": host["num_tokens"] / host["num_slots"],
            "trained_share": host["num_targets"] / max(1, host["num_tokens"]),  # a label may stand on padding
        }

    def rates(self) -> Record:
        """tokens_per_second (without padding), mfu and data_wait (a share of the time); None each, before a step was timed."""
        if len(self._marks) < 2:
            return {"tokens_per_second": None, "mfu": None, "data_wait": None}
        begun, now = self._marks[0], self._marks[-1]
        seconds, tokens, attended, waited = (late - early for early, late in zip(begun, now, strict=True))
        seconds = max(seconds, 1e-9)
        return {
            "tokens_per_second": tokens / seconds,
            "mfu": self._mfu(int(tokens), attended, seconds),
            "data_wait": min(1.0, waited / seconds),
        }

    def restart(self) -> None:
        """What happened since the last step (an evaluation) is not training: rates count from here."""
        self._marks.clear()
        self._mark()

    def _mark(self) -> None:
        self._marks.append((time.perf_counter(), self._tokens, self._attended, self._waited))


def _check(step: int, host: Mapping[str, Any]) -> None:
    if host["num_targets"] == 0:
        raise TrainError(
            at=f"step {step}",
            problem="every label of the batch is ignored (-100), so there is nothing to learn from",
            fix="Look at the rows' loss_mask.",
        )
