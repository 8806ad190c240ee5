"""Strikes jobs at their file operations, in every way, and goes on where it stopped.

python tests/disasters/strike.py LOG [--minutes M] [JOB ...]

LOG has one line for each point, in an order in which all kinds of operations and ways come early. M
minutes at most are spent on a job. What came of it is counted in struck.json, which
tests/disasters/page.py shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

from disasters.interposer import Interposed
from disasters.jobs import JOBS
from disasters.points import HOWS, Found, Trial

STRUCK = Path(__file__).with_name("struck.json")


def points(operations: Sequence[tuple[str, str]]) -> list[tuple[int, str]]:
    """(number, way) of all: first one of each kind of operation in each way, then the next one."""
    every = [(number, how) for number in range(1, len(operations) + 1) for how in HOWS]
    random.Random(1).shuffle(every)
    seen: Counter[tuple[str, str]] = Counter()
    turns: list[int] = []
    for number, how in every:
        kind = (operations[number - 1][0], how)
        seen[kind] += 1
        turns.append(seen[kind])
    order = sorted(range(len(every)), key=turns.__getitem__)
    return [every[i] for i in order]


def strike(trial: Trial, log: Path, seconds: float) -> None:
    """Raises AssertionError at none: what is wrong stands in the log."""
    done = {(one.number, one.how) for one in read(log) if one.job == trial.job}
    ends = time.monotonic() + seconds
    for number, how in points(trial.operations):
        if time.monotonic() > ends:
            return
        if (number, how) not in done:
            with log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(trial.at(number, how))) + "\n")


def read(log: Path) -> list[Found]:
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [Found(**json.loads(line)) for line in lines]


def counted(found: Sequence[Found]) -> dict[str, dict[str, int]]:
    """By job: how many points were struck, how the jobs ended, and what was wrong afterwards."""
    return {
        job: {
            "struck": len(own),
            **Counter(one.ended for one in own),
            "wrong": sum(one.wrong != "" for one in own),
        }
        for job in JOBS
        if (own := [one for one in found if one.job == job])
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("log", type=Path)
    options.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    options.add_argument("--minutes", type=float, default=float("inf"))
    asked = options.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="easypipe-disasters-") as name:
        folder = Path(name).resolve()
        with Interposed(folder, arrays=True) as interposed:
            for job in asked.jobs or JOBS:
                trial = Trial(interposed, job, folder)
                strike(trial, asked.log, asked.minutes * 60)
                trial.close()
    found = read(asked.log)
    STRUCK.write_text(json.dumps(counted(found), indent=1) + "\n", encoding="utf-8")
    for one in found:
        if one.wrong:
            print(one)
    return any(one.wrong for one in found)


if __name__ == "__main__":
    sys.exit(main())
