"""`easypipe runs`: lists the runs in a folder, with their state, steps and losses."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.arguments import AsJson
from easypipe.cli.show import aligned, say
from easypipe.core.errors import EasypipeError, require


@dataclass(frozen=True)
class Run:
    """A run in the list.

    Attributes:
        folder: The output folder of the run.
        state: "training", "finished" (also if a callback ended it for good) or "stopped"; "not
            training" if the number of steps is not known; or why the run cannot be read.
        step: The last step that is logged or has a checkpoint.
        steps: The number of its steps; None: as many as its data has, which was not counted.
        loss: The last loss.
        held_out: The last loss of each evaluation.
    """

    folder: str
    state: str
    step: int
    steps: int | None
    loss: float | None
    held_out: dict[str, float]


def runs(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The folder to search."),
    ] = Path("."),
    as_json: AsJson = False,
) -> None:
    """List the runs in DIR, with their state, steps and losses. Subfolders are searched too."""
    found = [_run(path) for path in _folders(folder)]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(one) for one in found]))
        return
    require(found, str(folder), "holds no run", "Give the folder that train.output_dir lies in.")
    lines = [("run", "state", "step", "of", "loss", "held out")]
    for one in found:
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        held_out = ", ".join(f"{name} {value:.4f}" for name, value in one.held_out.items())
        steps = "" if one.steps is None else f"{one.steps:,}"
        lines.append((one.folder, one.state, f"{one.step:,}", steps, loss, held_out))
    say(aligned(lines, left=(0, 1, 5)))


def _folders(folder: Path) -> Iterator[Path]:
    """Yields the folders that hold a run, by name, without looking into runs.

    A folder with only a run.yaml is that of a project, whose runs may be in it.
    """
    for path, names, files in os.walk(folder):
        if "metrics.jsonl" in files or {"run.yaml", "versions.json"} <= set(files):
            names.clear()
            yield Path(path)
        names.sort()


def _run(folder: Path) -> Run:
    """Reads a run.

    If it cannot be read, the reason is its state, and the other runs are still listed.
    """
    from easypipe.core.locks import try_hold
    from easypipe.train.checkpoint.files import CHECKPOINTS, committed, ended, evaluated
    from easypipe.train.metrics.log import Record, each_record
    from easypipe.train.record import recorded_steps

    checkpoints = folder / CHECKPOINTS
    try:
        metrics = folder / "metrics.jsonl"
        last: Record = {"step": 0}
        evals: dict[str, Record] = {}
        for last in each_record(metrics) if metrics.exists() else ():
            evals = last.get("eval") or evals
        steps = recorded_steps(folder)
        newest = max(committed(checkpoints), default=0)
        step = max(last["step"], newest)
        if (held := try_hold(folder, exclusive=False)) is not None:
            held.close()
        done = steps is not None and newest >= steps and evaluated(checkpoints / str(newest))
        finished = held is not None and (done or ended(checkpoints / str(step)))
    except (EasypipeError, OSError) as error:
        return Run(str(folder), f"damaged: {error}", 0, None, None, {})
    if held is None:
        state = "training"
    elif finished:
        state = "finished"
    else:
        state = "not training" if steps is None else "stopped"
    held_out = {name: seen["loss"] for name, seen in evals.items() if seen.get("loss") is not None}
    return Run(str(folder), state, step, steps, last.get("loss"), held_out)
