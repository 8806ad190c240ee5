"""The page of one run, or of several side by side: one file of HTML that fetches nothing."""

from __future__ import annotations

import gzip
import importlib.resources
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from easypipe.core.errors import EasypipeError, StateError, TrainError
from easypipe.core.pages import Section, render, shown
from easypipe.core.storage import commit_bytes
from easypipe.core.values import Json
from easypipe.train.metrics.log import read_metrics
from easypipe.train.record import CHANGES, LEDGER, PLAN, RESTARTS, read_kept
from easypipe.train.report.numbers import Curves, flows, read_curves
from easypipe.train.report.pictures import NO_SUCH_SHAPE, mixture_lines
from easypipe.train.report.tables import ROLLBACKS, documents_of, sections

log = logging.getLogger("easypipe")

T = TypeVar("T")
PAGE = "report.html"  # in the run's folder, where no other path is given


def write_report(folders: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes the page of the run in a folder, or of several runs, and returns where.

    A run under way has one too.

    Args:
        folders: The output folder of a run, or several that are compared.
        out: Where to write it; None: report.html in the first folder.

    Raises:
        StateError: Where a folder holds no run, or a file of it cannot be read.
    """
    given = [folders] if isinstance(folders, str | Path) else folders
    runs = [Path(os.path.expanduser(folder)) for folder in given]
    target = runs[0] / PAGE if out is None else Path(os.path.expanduser(out))
    commit_bytes(target, page(runs).encode())
    return target


def page(folders: Sequence[Path], *, refresh: int | None = None) -> str:
    """The HTML of `write_report`. refresh: seconds after which it asks its server for new numbers.

    Raises StateError, StorageError and TrainError for files that are no run's.
    """
    runs = [_run(folder) for folder in folders]
    files = importlib.resources.files("easypipe.train.report")
    library = files / "echarts" / "echarts.min.js.gz"
    values = {
        "title": ", ".join(name for name, _, _ in runs),
        "runs": runs,
        "numbers": [drawn for _, drawn, _ in runs],
        "shown": shown,
        "refresh": refresh,
        "library": gzip.decompress(library.read_bytes()).decode(),
        "script": (files / "page.js").read_text("utf-8"),
    }
    return render("easypipe.train.report", values)


def numbers(folders: Sequence[Path]) -> list[Json]:
    """What page.js draws of each run. Raises what `page` does."""
    return [drawn for _, drawn, _ in map(_run, folders)]


def _run(folder: Path) -> tuple[str, Json, Sequence[Section]]:
    """(name, numbers for the curves, tables) of a run."""
    if not (folder / "metrics.jsonl").is_file():
        unlike = "holds no metrics.jsonl, so it is no run's folder"
        raise StateError(
            at=str(folder),
            problem=unlike if folder.is_dir() else "no such folder",
            fix="Give the train.output_dir of a run that has trained a step.",
        )
    try:
        curves = read_curves(folder / "metrics.jsonl")
        if curves is None:
            raise TrainError(
                at=str(folder / "metrics.jsonl"),
                problem="no step was logged, so there is nothing to draw",
                fix="Wait for the run's first step.",
            )
        return folder.absolute().name, numbers_of(folder, curves), sections(folder, curves)
    except EasypipeError:
        raise
    except NO_SUCH_SHAPE as error:
        problem = f"a file in it is not what a run writes there: {type(error).__name__} {error}"
        raise StateError(
            at=str(folder), problem=problem, fix="Give the train.output_dir of a run."
        ) from error


def numbers_of(folder: Path, curves: Curves) -> Json:
    """What page.js draws of a run: `name`, `curves` (name → [steps, values]), `marks` (step, kind,
    text), `mixture` (dataset → step, so far, lately, asked for), `flows` (links).
    """
    trained = _of(folder / PLAN, lambda plan: [one["name"] for one in plan["datasets"]], [])
    return {
        "name": folder.absolute().name,
        "curves": curves.points(),
        "marks": _marks(folder),
        "mixture": _of(folder / PLAN, mixture_lines, {}),
        "flows": _of(folder / LEDGER, lambda kept: flows(kept["entries"], trained), []),
    }


def _marks(folder: Path) -> list[Json]:
    """What happened at a step."""
    changes = _of(folder / CHANGES, _changed, [])
    restarts = _of(
        folder / RESTARTS,
        lambda kept: [_mark(one["step"], "restart", f"begun again, {one['time']}") for one in kept],
        [],
    )
    path = folder / ROLLBACKS
    undone = [
        _mark(line["batch_of_step"], "roll-back", f"its batch was skipped: {documents_of(line)}")
        for line in (read_metrics(path) if path.exists() else ())
    ]
    return [*changes, *restarts, *undone]


def _changed(kept: Sequence[Json]) -> list[Json]:
    return [
        _mark(one["step"], "change", f"{key}: {text}")
        for one in kept
        for key, text in one["changed"].items()
    ]


def _mark(step: int, kind: str, text: str) -> Json:
    return {"step": step, "kind": kind, "text": text}


def _of(path: Path, draw: Callable[[Any], T], none: T) -> T:
    """none where there is no such file, or it is damaged: the tables say so."""
    try:
        kept = read_kept(path)
        return draw(kept) if kept else none
    except (StateError, *NO_SUCH_SHAPE):
        return none
