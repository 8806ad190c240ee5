"""The numbers that a run's report draws: thinned curves, and flows of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from easypipe.core.values import Json
from easypipe.train.metrics.log import Record, records_from

MOST_POINTS = 2000  # the most points of a curve; longer ones keep the extremes of each stretch
ALL_POINTS = 40_000  # the most points of all curves of a run, if each gets LEAST_POINTS
LEAST_POINTS = 100
STRETCH = 100  # logged steps; the gradient norms of one say what is usual in the next
TO_SIGMA = 10 * 1.4826  # ten standard deviations, of normal values, in median absolute deviations
MOST_SPIKES = 20  # the most that are marked: the greatest
HELD_OUT = "eval"  # the key of a record's held-out results


@dataclass
class Curves:
    """The content of metrics.jsonl: the values of every number by step, and a few records.

    Attributes:
        first: The first record.
        last: The last record.
        evaluations: The records with held-out results.
        steps: The steps of each number's values.
        values: The values of each number.
    """

    first: Record
    last: Record
    evaluations: list[Record] = field(default_factory=list)
    steps: dict[str, array[float]] = field(default_factory=dict)
    values: dict[str, array[float]] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """Returns the median of a number; None if it has no values."""
        found = self.values.get(name)
        return float(np.median(found)) if found else None

    def points(self) -> dict[str, tuple[list[int], list[float]]]:
        """Returns name → (steps, values), at most MOST_POINTS each, and fewer of many curves.

        Held-out names are `eval/<name>/<metric>`.
        """
        each = max(LEAST_POINTS, ALL_POINTS // max(1, len(self.values)))
        most = min(MOST_POINTS, each)
        return {
            name: thinned(np.asarray(self.steps[name]), np.asarray(values), most)
            for name, values in self.values.items()
        }


class CurvesReader:
    """Reads the curves of a run; later calls read only what was written since.

    A file that was replaced, for example by a run that continues, is read again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._at = self._lines = 0
        self._curves: Curves | None = None

    def read(self) -> Curves | None:
        """Returns all curves; None if no step was logged.

        Raises:
            StorageError: The file is not a metrics file.
        """
        now = self._path.stat()
        if now.st_ino != self._inode or now.st_size < self._at:
            self._inode, self._at, self._lines, self._curves = now.st_ino, 0, 0, None
        for at, lines, record in records_from(self._path, self._at, self._lines):
            self._at, self._lines = at, lines
            self._curves = self._curves or Curves(record, record)
            self._curves.last = record
            if HELD_OUT in record:
                self._curves.evaluations.append(record)
            _enter(self._curves, record["step"], "", record)
        return self._curves


def _enter(found: Curves, step: int, under: str, values: Json) -> None:
    """Adds the numbers of a record to the curves."""
    for key, value in values.items():
        name = under + key
        if isinstance(value, Mapping):
            _enter(found, step, f"{name}/", value)
        elif isinstance(value, int | float) and name != "step":
            if name not in found.values:
                found.steps[name], found.values[name] = array("d"), array("d")
            found.steps[name].append(step)
            found.values[name].append(value)


def thinned(
    steps: NDArray[np.float64], values: NDArray[np.float64], most: int = MOST_POINTS
) -> tuple[list[int], list[float]]:
    """Returns at most about `most` steps and values, the values with six digits.

    A longer curve is cut into as many stretches as there is space for. It keeps its first and last
    point, and the least and the greatest value of each stretch, so that no spike is lost.
    """
    if len(steps) > most:
        edges = np.linspace(0, len(steps), most // 2, dtype=np.int64)
        kept = {0, len(steps) - 1}
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            part = values[start:stop]
            kept |= {start + int(part.argmin()), start + int(part.argmax())}
        chosen = sorted(kept)
        steps, values = steps[chosen], values[chosen]
    return steps.astype(np.int64).tolist(), [float(f"{value:.6g}") for value in values.tolist()]


def spikes(curves: Curves) -> list[tuple[int, float, float]]:
    """Returns the steps whose gradient norm is far above those of the stretch before.

    Far is twice their median, and ten standard deviations above it, estimated by the median
    absolute deviation.

    Returns:
        For each the step, its norm and that median, in the order of steps.
    """
    steps, values = (np.asarray(of.get("grad_norm", ())) for of in (curves.steps, curves.values))
    filled = np.append(values, np.full(-len(values) % STRETCH, np.nan))
    before, norms = filled.reshape(-1, STRETCH)[:-1], filled.reshape(-1, STRETCH)[1:]
    median = np.median(before, axis=1, keepdims=True)
    deviation = np.median(np.abs(before - median), axis=1, keepdims=True)
    over = np.flatnonzero(norms > np.maximum(median + TO_SIGMA * deviation, 2 * median))
    usual = median[over // STRETCH, 0]
    greatest = np.sort(np.argsort(norms.flat[over] / usual)[-MOST_SPIKES:])
    return [
        (int(steps[at + STRETCH]), float(norms.flat[at]), float(middle))
        for at, middle in zip(over[greatest], usual[greatest], strict=True)
    ]


def flows(
    entries: Sequence[Json], datasets: Sequence[str], placed: Mapping[str, int] | None = None
) -> list[Json]:
    """Returns where the tokens of `datasets` went, as links with `source`, `target` and `value`.

    What comes into a stage flows through it to what comes out. Tokens that are drawn in mixing were
    stored in the cache; tokens that no pass reached, and tokens that were drawn again, are links of
    their own. Of stored tokens that are labels later, targets and masked ones are only counted
    there.

    Args:
        entries: The entries of a ledger.
        datasets: The names of the datasets.
        placed: The tokens of each dataset in the rows of the run, if they are known. They continue
            the flow of a mixture that restarts, because its ledger counts no epoch.
    """
    links: list[Json] = []

    def link(source: str, target: str, value: int) -> None:
        if value > 0:
            links.append({"source": source, "target": target, "value": value})

    for name in datasets:
        own = [one for one in entries if one["dataset"] == name and one["unit"] == "tokens"]
        stored = sum(one["out"].get("stored", 0) for one in own)
        labelled = stored and any(one["stage"] == "labels" for one in own)
        for one in own:
            if labelled and one["stage"] == "loss_mask":
                continue
            through = f"{one['stage']} {name}"
            for word, count in one["in"].items():
                link(f"{name}: {word}", through, count)
            for word, count in one["out"].items():
                link(through, f"{name}: {word}", count)
        drawn = sum(one["in"].get("drawn", 0) for one in own)
        if stored and drawn:
            link(f"{name}: stored", f"{name}: drawn", min(stored, drawn))
            link(f"{name}: stored", f"{name}: not drawn", stored - drawn)
            link(f"{name}: drawn again", f"{name}: drawn", drawn - stored)
        elif stored and placed and name in placed:
            rows = f"{name}: in the run's rows"
            link(f"{name}: stored", rows, min(stored, placed[name]))
            link(f"{name}: stored", f"{name}: not drawn", stored - placed[name])
            link(f"{name}: drawn again, or EOS added", rows, placed[name] - stored)
    return links
