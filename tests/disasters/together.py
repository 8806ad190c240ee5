"""Processes that prepare, read, save and clear in one folder at the same time, some of them killed.

Each ends well, or with an error of ours, or is the one that was killed; then one that is alone makes
what an undisturbed one makes.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from disasters.interposer import ERROR_OF_OURS, KILL, OFF, THEN, Interposed, Order
from disasters.jobs import write_inputs
from disasters.points import contents, difference

STEPS = ("prepare", "save", "read", "clear")
LONGEST = 4  # steps of one process
LAST = f"prepare{THEN}save{THEN}read"


class Shared:
    """A folder that several processes work in."""

    def __init__(self, interposed: Interposed, folder: Path) -> None:
        self._interposed, self._work, self._before = interposed, folder / "work", folder / "before"
        write_inputs(self._work)
        shutil.copytree(self._work, self._before)
        alone = f"prepare{THEN}clear{THEN}{LAST}"  # each step ends well where nobody disturbs it
        done = interposed.run(Order(alone, str(self._work)))
        assert done.code == 0, done.said
        self._expected, self._digest = contents(self._work), _digests(done.said)

    def wrong(self, seed: int, processes: int) -> str:
        """What `processes` processes, whose steps and deaths `seed` decides, brought about; "" where
        all is as it must be."""
        shutil.rmtree(self._work)
        shutil.copytree(self._before, self._work)
        orders = self._orders(random.Random(seed), processes)
        outcomes = self._interposed.together(orders)
        for order, outcome in zip(orders, outcomes, strict=True):
            ended = outcome.code in (0, ERROR_OF_OURS, -9 if order.action == KILL else 0)
            if not ended or "This is a bug in easypipe" in outcome.said:
                return f"{order.job}: {outcome.code}: {outcome.said[-2000:]}"
            if not _digests(outcome.said) <= self._digest:
                return f"{order.job}: other batches"
        done = self._interposed.run(Order(LAST, str(self._work)))
        if done.code or _digests(done.said) != self._digest:
            return f"alone again: {done.said[-2000:]}"
        return difference(self._expected, contents(self._work))

    def trainers(self, processes: int) -> list[int]:
        """Exit codes of as many that train in one run folder at the same time, sorted."""
        orders = [Order("train", str(self._work))] * processes
        outcomes = self._interposed.together(orders)
        refused = [one for one in outcomes if one.code]
        assert all("another process trains in this folder" in one.said for one in refused), outcomes
        return sorted(one.code for one in outcomes)

    def _orders(self, drawn: random.Random, processes: int) -> Sequence[Order]:
        orders: list[Order] = []
        for _ in range(processes):
            job = THEN.join(drawn.choices(STEPS, k=drawn.randint(1, LONGEST)))
            action = KILL if drawn.random() < 0.25 else OFF
            orders.append(Order(job, str(self._work), action, drawn.randint(1, 150)))
        return orders


def _digests(said: str) -> set[str]:
    return {line for line in said.splitlines() if line.startswith("digest ")}
