"""What a run draws of each dataset, step by step: index arithmetic over the plan's windows, no token is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from easypipe.loader.steps import Steps
from easypipe.plan.windows import Plan
from easypipe.stages.mixture import Mixture

MARKS = 100  # intervals that a run is cut into, at most


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """Shares of each dataset in the steps behind the interval before, up to `step`: what the weights ask for, and what the rows hold.

    Of documents those count that begin there, where the weights are of documents ("rows"); else the tokens that stand there.
    """

    step: int
    requested: dict[str, float]
    realised: dict[str, float]


def shares_by_step(plan: Plan, mixture: Mixture, counted: Steps, steps: int, rows: int) -> tuple[StepShares, ...]:
    """The run of `steps` steps over `rows` rows in at most MARKS intervals, each of steps that are alike in number."""
    marks = sorted({round(steps * (i + 1) / MARKS) for i in range(MARKS)} - {0})
    stops = [min(rows, counted.start(step)) for step in marks]
    found, row = [], 0
    for step, stop in zip(marks, stops, strict=True):
        parts = _counts(plan, row, stop, tokens=mixture.unit == "tokens")
        asked = _asked(mixture, row, stop)
        total = max(1, int(parts.sum()))
        realised = {name: int(part) / total for name, part in zip(mixture.parts, parts, strict=True)}
        found.append(StepShares(step=step, requested=asked, realised=realised))
        row = stop
    return tuple(found)


def _counts(plan: Plan, start: int, stop: int, *, tokens: bool) -> NDArray[np.int64]:
    """Int64[k]: tokens of each dataset in rows `start` to `stop`, or documents that begin there."""
    counts = np.zeros(len(plan.datasets), dtype=np.int64)
    while start < stop:
        window = plan.window_at(start)
        end = min(stop, window.after.first_row)
        first, last = (int(window.layout.first_piece[row - window.first_row]) for row in (start, end))
        draw, begin, length = window.layout.table[2:5, first:last]
        weigh = length if tokens else begin == 0
        counts += np.bincount(window.dataset[draw], weights=weigh, minlength=counts.size).astype(np.int64)
        start = end
    return counts


def _asked(mixture: Mixture, start: int, stop: int) -> dict[str, float]:
    """The mean of what is asked for over rows `start` to `stop`, from the means over all rows before them."""
    if stop == start:
        return mixture.requested(stop)
    before, after = mixture.requested(start) if start else {}, mixture.requested(stop)
    return {name: (share * stop - before.get(name, 0.0) * start) / (stop - start) for name, share in after.items()}
