"""Metrics that callbacks are told to watch, by name: `loss`, `eval.held_out.loss`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from easypipe.core.checked import Json
from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.train.callbacks.config import Mode

# of each line of metrics.jsonl, and the same in all processes of a run
TRAINING = ("loss", "nll", "ppl", "grad_norm", "param_norm")
HELD_OUT = ("loss", "nll", "ppl")  # of each held-out loader


@dataclass(frozen=True)
class Known:
    """What a run will measure. evals: names of its held-out loaders. eval_every: steps between
    evaluations; None: only the last step's.

    more: the loss tells further means under names of its own, which are known once it has run:
    `value_of` refuses what is none of them.
    """

    evals: Sequence[str]
    eval_every: int | None
    steps: int
    more: bool = False

    def check(self, at: str, metric: str, *, training: bool) -> None:
        """Raises ConfigError for a metric that will not be there, or only when all is over.
        training: False takes held-out ones only.
        """
        held_out = [f"eval.{name}.{key}" for name in self.evals for key in HELD_OUT]
        known = [*(TRAINING if training else ()), *held_out]
        of = next((name for name in self.evals if metric.startswith(f"eval.{name}.")), None)
        if metric not in known and not (
            self.more and (of is not None or (training and not metric.startswith("eval.")))
        ):
            fix = did_you_mean(metric, known) or (
                "Give the run held-out data, under `eval`." if not known else None
            )
            what = "metric" if training else "held-out metric"
            raise ConfigError(at=at, problem=f"no {what} named {metric!r}", have=known, fix=fix)
        if of is not None and self.eval_every is None:
            raise ConfigError(
                at=at,
                problem=f"{metric} is measured once, after the last step",
                fix="Set train.eval_every.",
            )


def value_of(record: Json, metric: str, at: str) -> float | None:
    """The value of `metric` in a line of metrics.jsonl; None where it is not finite, or of an
    evaluation that the line does not have.

    Raises ConfigError where the line has what would hold it, and no such name. at: where the metric
    was named.
    """
    group: Json = record
    under = ""
    if metric.startswith("eval."):
        name = next(
            (name for name in record.get("eval", {}) if metric.startswith(f"eval.{name}.")), None
        )
        if name is None:
            return None
        group, under = record["eval"][name], f"eval.{name}."
    if metric.removeprefix(under) not in group:
        known = [f"{under}{key}" for key, value in group.items() if not isinstance(value, Mapping)]
        raise ConfigError(
            at=at,
            problem=f"the loss gives no {metric!r}",
            have=known,
            fix=did_you_mean(metric, known),
        )
    value = flat(record).get(metric)
    return value if value is not None and math.isfinite(value) else None


def flat(record: Json, under: str = "") -> dict[str, float]:
    """Every number of a record, by dotted name; what is None is left out."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{under}{key}.")
        elif isinstance(value, int | float):
            found[f"{under}{key}"] = value
    return found


def better(value: float, than: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Whether `value` beats `than` by more than min_delta; anything beats None."""
    return than is None or (than - value if mode == "min" else value - than) > min_delta
