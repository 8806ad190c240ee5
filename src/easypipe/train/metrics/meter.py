"""Makes the records of steps, one step behind, so that no device waits: rates, times, memory."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from easypipe.core.errors import TrainError
from easypipe.core.values import Json
from easypipe.train.losses.measures import named
from easypipe.train.metrics.log import Record, perplexity
from easypipe.train.step import MORE, Metrics

Batch = Mapping[str, PyTree]
WINDOW_STEPS = 16
RATES = ("tokens_per_second", "mfu", "mfu_palm", "data_wait")


class Meter:
    """Turns device metrics into records, and measures rates over the last WINDOW_STEPS steps.

    Args:
        flops: measured -> FLOPs of the step, exact for its segments, and in the PaLM convention.
            None if those of the model are not known.
        peak: FLOP/s of all devices of the run; None if that is not known.
        devices: The devices of this process, whose memory is reported if they report it.
        sources: The datasets for measures by dataset.
        of_answers: Whether the loss compares answers, so that exp(nll) is no perplexity.
    """

    def __init__(
        self,
        flops: Callable[[Json], tuple[float, float]] | None,
        peak: float | None,
        devices: Sequence[Any] = (),
        sources: Sequence[str] = (),
        *,
        of_answers: bool = False,
    ) -> None:
        self._sources, self._of_answers = sources, of_answers
        self._flops, self._peak, self._devices = flops, peak, devices
        self._pending: Batch | None = None
        # Tokens, FLOPs, PaLM FLOPs and seconds waited, since the run began.
        self._sums = [0.0] * 4
        # (time, *sums) at the end of each step, but not before the end of the first step, which
        # compiles.
        self._marks: deque[tuple[float, ...]] = deque(maxlen=WINDOW_STEPS + 1)

    def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """Returns the next batch, or None at the end.

        The time counts as waiting only if the device was already idle when the batch came.
        """
        began = time.perf_counter()
        batch = next(batches, None)
        if self._pending is None or self._pending["loss"].is_ready():
            self._sums[3] += time.perf_counter() - began
        return batch

    def push(self, metrics: Metrics) -> None:
        """Starts to copy the metrics of the step that was just dispatched.

        Those of earlier steps must have been read.
        """
        for value in metrics.values():
            value.copy_to_host_async()
        self._pending = metrics

    def read(self, step: int, metrics: Metrics) -> Record:
        """Waits for the metrics of `step`, and returns its record.

        Returns:
            loss, ppl, nll and the norms are None if they are not finite; ppl also if the loss
            compares answers. skipped is the number of batches so far that did not change the
            parameters. fill is the share of slots outside padding, trained_share that of their
            tokens whose successor is predicted.

        Raises:
            TrainError: The step has no targets.
        """
        host = {name: value.tolist() for name, value in jax.device_get(metrics).items()}
        tokens, targets = host["num_tokens"], host["num_targets"]
        counted = (tokens, *(self._flops(host) if self._flops is not None else ()))
        for i, amount in enumerate(counted):
            self._sums[i] += amount
        self._mark()
        if metrics is self._pending:
            self._pending = None
        if targets == 0:
            raise TrainError(
                at=f"step {step}",
                problem="every label of the batch is ignored (-100) or has weight 0, so there is "
                "nothing to learn from",
                fix="Check the rows' loss_mask and loss_weights.",
            )
        ppl = None if self._of_answers else perplexity(host["nll"])
        record: Record = {"step": step, "loss": host["loss"], "ppl": ppl}
        record |= {name: host[name] for name in ("nll", "grad_norm", "param_norm")}
        more = {
            name.removeprefix(MORE): value for name, value in host.items() if name.startswith(MORE)
        }
        record |= named(more, self._sources)
        record = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in record.items()
        }
        record["skipped"] = step - host["updates"]
        if "learning_rate" in host:  # an optimizer from Python reports none
            record["learning_rate"] = host["learning_rate"]
        return record | {
            "num_tokens": tokens,
            "num_targets": targets,
            "fill": tokens / host["num_slots"],
            "trained_share": targets / max(1, tokens),  # a label may be on padding
        }

    def rates(self) -> Record:
        """Returns the rates of the last steps, and the memory.

        Returns:
            tokens_per_second (without padding), mfu (exact for packed segments), mfu_palm (the PaLM
            convention) and data_wait (a share of the time), each None before a step was timed; and
            peak_memory (bytes, of the fullest device of this process), None if no device reports
            it.
        """
        rates: Record = dict.fromkeys(RATES)
        if len(self._marks) > 1:
            spans = zip(self._marks[-1], self._marks[0], strict=True)
            seconds, tokens, exact, palm, waited = (late - early for late, early in spans)
            seconds = max(seconds, 1e-9)
            rates["tokens_per_second"] = tokens / seconds
            if self._flops is not None and self._peak is not None:
                peak = self._peak * seconds
                rates |= {"mfu": exact / peak, "mfu_palm": palm / peak}
            rates["data_wait"] = min(1.0, waited / seconds)
        return rates | {"peak_memory": peak_memory(self._devices)}

    def restart(self) -> None:
        """Restarts the rates.

        The time since the last step, of an evaluation, was not training.
        """
        self._marks.clear()
        self._mark()

    def _mark(self) -> None:
        self._marks.append((time.perf_counter(), *self._sums))


def peak_memory(devices: Sequence[Any]) -> int | None:
    """Returns the peak bytes of the fullest of `devices`; None if none reports them, as on CPUs."""
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return max(peaks, default=None)
