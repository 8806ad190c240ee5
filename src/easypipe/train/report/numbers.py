"""The numbers of a run that its page draws: curves without their middle, marks, shares, flows."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from easypipe.core.values import Json
from easypipe.train.metrics.log import Record, each_record

MOST_POINTS = 2000  # of a curve: the least and the most of each stretch of a longer one
HELD_OUT = "eval"  # under which a record has what was seen on held-out data


@dataclass
class Curves:
    """What metrics.jsonl holds, read once: values by step of every number, and a few records."""

    first: Record
    last: Record
    evaluations: list[Record] = field(default_factory=list)
    steps: dict[str, array[float]] = field(default_factory=dict)
    values: dict[str, array[float]] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """Of the values that are there."""
        found = self.values.get(name)
        return float(np.median(found)) if found else None

    def points(self) -> dict[str, tuple[list[int], list[float]]]:
        """name → (steps, values), at most MOST_POINTS each; the names of held-out ones are
        `eval/<name>/<metric>`.
        """
        return {
            name: thinned(np.asarray(self.steps[name]), np.asarray(values))
            for name, values in self.values.items()
        }


def read_curves(path: Path) -> Curves | None:
    """None where no step was logged. Raises StorageError for what is no such file."""
    found: Curves | None = None
    for record in each_record(path):
        if found is None:
            found = Curves(record, record)
        found.last = record
        if HELD_OUT in record:
            found.evaluations.append(record)
        _enter(found, record["step"], "", record)
    return found


def _enter(found: Curves, step: int, under: str, values: Json) -> None:
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
    steps: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """Steps and values, of six digits; of more than MOST_POINTS the first, the last, and the least
    and the most of each of as many stretches as there is room for, so that no spike is lost.
    """
    if len(steps) > MOST_POINTS:
        edges = np.linspace(0, len(steps), MOST_POINTS // 2, dtype=np.int64)
        kept = {0, len(steps) - 1}
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            part = values[start:stop]
            kept |= {start + int(part.argmin()), start + int(part.argmax())}
        chosen = sorted(kept)
        steps, values = steps[chosen], values[chosen]
    return steps.astype(np.int64).tolist(), [float(f"{value:.6g}") for value in values.tolist()]


def flows(entries: Sequence[Json], datasets: Sequence[str]) -> list[Json]:
    """Where the tokens of `datasets` went, by the entries of a ledger: links of a flow picture,
    each with `source`, `target` and `value`.

    What comes into a stage goes through it to what comes out. Tokens that are drawn in mixing were
    stored in the cache; those that no pass reached, and those that were drawn again, are links of
    their own.
    """
    links: list[Json] = []

    def link(source: str, target: str, value: int) -> None:
        if value > 0:
            links.append({"source": source, "target": target, "value": value})

    for name in datasets:
        own = [one for one in entries if one["dataset"] == name and one["unit"] == "tokens"]
        for one in own:
            through = f"{one['stage']} {name}"
            for word, count in one["in"].items():
                link(f"{name}: {word}", through, count)
            for word, count in one["out"].items():
                link(through, f"{name}: {word}", count)
        stored = sum(one["out"].get("stored", 0) for one in own)
        drawn = sum(one["in"].get("drawn", 0) for one in own)
        if stored and drawn:
            link(f"{name}: stored", f"{name}: drawn", min(stored, drawn))
            link(f"{name}: stored", f"{name}: not drawn", stored - drawn)
            link(f"{name}: drawn again", f"{name}: drawn", drawn - stored)
    return links
