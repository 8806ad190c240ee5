"""Strikes jobs at their file operations, in every way, and goes on where it stopped.

python tests/disasters/strike.py LOG [--minutes M] [--once] [JOB ...]

LOG has one line for each point: first one of each class (`Trial.groups`), then each operation once
as the last one of the process and once as one that fails, then each class in each way, then the
others; with --once it ends behind the operations. M minutes at most are spent on a job. What came
of it is counted in struck.json, which tests/disasters/page.py shows.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

from disasters.interposer import Interposed
from disasters.jobs import JOBS
from disasters.points import HOWS, KILLS, WRITES, Found, Trial

STRUCK = Path(__file__).with_name("struck.json")


def points(
    groups: Sequence[str], struck: Sequence[Found] = (), *, once: bool = False
) -> list[tuple[int, str]]:
    """(number, way) of all: first one of each class, then each operation once killed and once
    failing, then each class in each way, then the others.

    struck: points that stand in a log already, of an earlier version of the code perhaps.
    once: leaves out what comes behind the operations.
    """
    every = [(number, how) for number in range(1, len(groups) + 1) for how in HOWS]
    random.Random(1).shuffle(every)
    seen = Counter[tuple[object, ...]]()
    for one in struck:
        if one.group in groups:
            seen.update(((one.group,), (one.group, one.how), (one.number, one.how in KILLS)))
    turns: list[tuple[int, int, int, int]] = []
    for number, how in every:
        group, operation = groups[number - 1], (number, how in KILLS)
        seen.update(((group,), (group, how), operation))
        turns.append(
            (min(seen[group,], 2), min(seen[operation], 2), seen[group, how], seen[group,])
        )
    order = sorted(range(len(every)), key=turns.__getitem__)
    return [every[i] for i in order if not once or turns[i][:2] < (2, 2)]


def strike(trial: Trial, log: Path, seconds: float, *, once: bool) -> None:
    """Raises AssertionError at none: what is wrong stands in the log."""
    before = [one for one in read(log) if one.job == trial.job]
    done = {(one.group, one.number, one.how) for one in before}
    ends = time.monotonic() + seconds
    for number, how in points(trial.groups, before, once=once):
        if time.monotonic() > ends:
            return
        if (trial.groups[number - 1], number, how) not in done:
            with log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(trial.at(number, how))) + "\n")


def read(log: Path) -> list[Found]:
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [Found(**json.loads(line)) for line in lines]


def counted(found: Sequence[Found], trial: Trial) -> dict[str, Any]:
    """How many points of a job were struck, of how many operations and classes that are listed now,
    how the job ended, and what was wrong afterwards.
    """
    listed = {*trial.groups}
    mine = (one for one in found if one.job == trial.job and one.number <= len(trial.groups))
    own = [one for one in mine if one.group in listed]
    calls = Counter("write" if call in WRITES else call for call, _ in trial.operations)
    return {
        "operations": len(trial.operations),
        "of them": ", ".join(f"{call} {count}" for call, count in sorted(calls.items())),
        "struck": len(own),
        "killed": len({one.number for one in own if one.how in KILLS}),
        "failing": len({one.number for one in own if one.how not in KILLS}),
        "classes": len({one.group for one in own}),
        "classes listed": len(listed),
        **Counter(one.ended for one in own),
        "wrong": sum(one.wrong != "" for one in own),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("log", type=Path)
    options.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    options.add_argument("--minutes", type=float, default=float("inf"))
    options.add_argument("--once", action="store_true")
    asked = options.parse_intermixed_args()
    struck = json.loads(STRUCK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="easypipe-disasters-") as name:
        folder = Path(name).resolve()
        with Interposed(folder, arrays=True) as interposed:
            for job in asked.jobs or JOBS:
                trial = Trial(interposed, job, folder)
                print(f"{job}: {len(trial.operations)} operations")
                for number, (call, path) in enumerate(trial.operations, start=1):
                    print(f"{number:5} {call} {path}", flush=True)
                strike(trial, asked.log, asked.minutes * 60, once=asked.once)
                struck[job] = counted(read(asked.log), trial)
                STRUCK.write_text(json.dumps(struck, indent=1) + "\n", encoding="utf-8")
                trial.close()
    found = read(asked.log)
    for one in found:
        if one.wrong:
            print(one)
    return any(one.wrong for one in found)


if __name__ == "__main__":
    sys.exit(main())
