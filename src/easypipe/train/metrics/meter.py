"""Reads what steps measured, one step behind, so that the device never waits for the reading."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from easypipe.core.errors import TrainError
from easypipe.train.metrics.log import Record, perplexity
from easypipe.train.step import MORE, Metrics

WINDOW_STEPS = 16
RATES = ("tokens_per_second", "mfu", "mfu_palm", "data_wait")


class Meter:
    """Turns device metrics into records, and keeps the clock: rates are those of the last
    WINDOW_STEPS steps.

    flops: measured -> FLOPs of the step, exact for its segments, and in the PaLM convention. None
    where the model's are not known.
    peak: FLOP/s of all devices of the run; None where that is not known.
    devices: those of this process, whose memory is told where they tell it.
    """

    def __init__(
        self,
        flops: Callable[[Mapping[str, Any]], tuple[float, float]] | None,
        peak: float | None,
        devices: Sequence[Any] = (),
    ) -> None:
        self._flops, self._peak, self._devices = flops, peak, devices
        self._pending: Any = None
        # (time, tokens, FLOPs, PaLM's, seconds waited) since the run began, a step each; none
        # before the first is through: it compiles
        self._marks: deque[tuple[float, ...]] = deque(maxlen=WINDOW_STEPS + 1)
        self._tokens, self._exact, self._palm, self._waited = 0, 0.0, 0.0, 0.0

    def next_batch(self, batches: Any) -> Mapping[str, Any] | None:
        """The next batch, or None at the end. Time counts as waited only where the device had run
        dry when the batch came.
        """
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

        loss, ppl, nll and the norms are None where they are not finite; skipped counts the batches
        so far that moved no parameter. fill is the share of slots outside padding, trained_share
        that of their tokens whose successor is predicted. Raises TrainError for a step without
        targets.
        """
        host = {name: value.item() for name, value in jax.device_get(metrics).items()}
        self._tokens += host["num_tokens"]
        if self._flops is not None:
            exact, palm = self._flops(host)
            self._exact, self._palm = self._exact + exact, self._palm + palm
        self._mark()
        if metrics is self._pending:
            self._pending = None
        _check(step, host)
        finite = {name: _finite(host[name]) for name in ("loss", "nll", "grad_norm", "param_norm")}
        return {
            "step": step,
            "loss": finite["loss"],
            "ppl": perplexity(host["nll"]),
            "nll": finite["nll"],
            "grad_norm": finite["grad_norm"],
            "param_norm": finite["param_norm"],
            **{
                name.removeprefix(MORE): _finite(value)
                for name, value in host.items()
                if name.startswith(MORE)
            },
            "skipped": step - host["updates"],
            # an optimizer from Python tells none
            **({"learning_rate": host["learning_rate"]} if "learning_rate" in host else {}),
            "num_tokens": host["num_tokens"],
            "num_targets": host["num_targets"],
            "fill": host["num_tokens"] / host["num_slots"],
            # a label may stand on padding
            "trained_share": host["num_targets"] / max(1, host["num_tokens"]),
        }

    def rates(self) -> Record:
        """tokens_per_second (without padding), mfu (exact for packed segments), mfu_palm (the PaLM
        convention) and data_wait (a share of the time), None each before a step was timed; and
        peak_memory (bytes, the fullest device of this process), None where no device tells.
        """
        if len(self._marks) < 2:
            rates = dict.fromkeys(RATES)
        else:
            begun, now = self._marks[0], self._marks[-1]
            seconds, tokens, exact, palm, waited = (
                late - early for early, late in zip(begun, now, strict=True)
            )
            seconds = max(seconds, 1e-9)
            peak = None if self._flops is None or self._peak is None else self._peak * seconds
            shares = (None, None) if peak is None else (exact / peak, palm / peak)
            rates = dict(
                zip(RATES, (tokens / seconds, *shares, min(1.0, waited / seconds)), strict=True)
            )
        return {**rates, "peak_memory": peak_memory(self._devices)}

    def restart(self) -> None:
        """What happened since the last step (an evaluation) is not training: rates count from
        here.
        """
        self._marks.clear()
        self._mark()

    def _mark(self) -> None:
        self._marks.append(
            (time.perf_counter(), self._tokens, self._exact, self._palm, self._waited)
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def peak_memory(devices: Sequence[Any]) -> int | None:
    """Bytes that the fullest of `devices` held at its worst moment so far; None where none of them
    tells, as CPUs do not.
    """
    told = [
        stats["peak_bytes_in_use"]
        for device in devices
        if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats
    ]
    return max(told, default=None)


def _check(step: int, host: Mapping[str, Any]) -> None:
    if host["num_targets"] == 0:
        raise TrainError(
            at=f"step {step}",
            problem="every label of the batch is ignored (-100), so there is nothing to learn from",
            fix="Look at the rows' loss_mask.",
        )
