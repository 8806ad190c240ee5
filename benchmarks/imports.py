"""Compares how long `import easypipe` takes with imports of its peers, in fresh processes with
files cached by the system.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys

from _common import Report, arguments

PEERS = ("easypipe", "datasets", "grain", "torch", "jax")


def seconds_to_import(module: str) -> tuple[float, bool]:
    code = (
        f"import sys, time; s = time.perf_counter(); import {module}; "
        "print(time.perf_counter() "
        "- s, 'jax' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    return float(printed[0]), printed[1] == "True"


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("imports", "s")
    modules = [module for module in PEERS if importlib.util.find_spec(module)]
    for turn in range(-1, options.rounds):
        for module in modules:
            seconds, _ = seconds_to_import(module)
            if turn >= 0:
                report.seconds.setdefault(f"import {module}", []).append(seconds)
    loads_jax = seconds_to_import("easypipe")[1]
    report.facts["easypipe loads jax"] = loads_jax
    report.target(
        "import easypipe, seconds", statistics.median(report.seconds["import easypipe"]), below=0.3
    )
    report.target("whether import easypipe loads jax (0: no)", float(loads_jax), below=1)
    report.finish(options.out)


if __name__ == "__main__":
    main()
