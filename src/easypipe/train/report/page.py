"""The report page of one run, or several side by side: its tables, marks, and documents skipped.

Its tables show the content of each file in a run's folder, or why it is not known.
"""

from __future__ import annotations

import functools
import gzip
import importlib.resources
import logging
import os
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from easypipe.core.errors import ConfigError, EasypipeError, StateError, TrainError, require
from easypipe.core.pages import Section, commit_page, render, shown
from easypipe.core.values import Json, JsonValue
from easypipe.train.checkpoint.files import committed
from easypipe.train.metrics.log import ROLLBACKS, SAMPLES, Record, read_metrics
from easypipe.train.record import (
    BEST,
    CHANGES,
    FINGERPRINTS,
    LEDGER,
    PLAN,
    RECORD,
    RESTARTS,
    VERSIONS,
    read_kept,
    recorded_datasets,
)
from easypipe.train.report.numbers import Curves, CurvesReader, flows, spikes
from easypipe.train.report.pictures import NO_SUCH_SHAPE, mixture_lines

log = logging.getLogger("easypipe")

T = TypeVar("T")
PAGE = "report.html"  # the default file name, in the run's folder
COMPARISON = "comparison.html"  # that of several runs, in the folder of the first
MOST_LINES = 200  # lines of a table; the middle of a longer one is left out, with a note


def write_report(folders: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes the report page of a run, or of several runs, and returns its path.

    A run in progress can have one too.

    Args:
        folders: The output folder of a run, or several that are compared.
        out: The file to write; None: report.html in the folder, or comparison.html in the first
            of several.

    Raises:
        ConfigError: No folder is given.
        StateError: A folder holds no run, or a file of it cannot be read.
    """
    given = [folders] if isinstance(folders, str | Path) else folders
    require(given, "folders", "names no run", "Give the train.output_dir of a run.")
    runs = [Path(os.path.expanduser(folder)) for folder in given]
    name = PAGE if len(runs) == 1 else COMPARISON
    target = runs[0] / name if out is None else Path(os.path.expanduser(out))
    commit_page(target, page(runs))
    return target


def page(folders: Sequence[Path]) -> str:
    """Returns the HTML of `write_report`. Errors are those of `RunReader.read`.

    Args:
        folders: The output folders of the runs.
    """
    return live_page(run_readers(folders), None)


def live_page(readers: Sequence[RunReader], refresh: int | None) -> str:
    """Returns the page of runs, which asks its server for `news` after every `refresh` seconds."""
    runs = [reader.read() for reader in readers]
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


def news(readers: Sequence[RunReader]) -> Json:
    """Returns the numbers that page.js draws for the runs, and the HTML of their tables."""
    runs = [reader.read() for reader in readers]
    values = {"runs": runs, "shown": shown}
    return {
        "numbers": [drawn for _, drawn, _ in runs],
        "tables": render("easypipe.train.report", values, block="tables"),
    }


def run_readers(folders: Sequence[Path]) -> list[RunReader]:
    """Returns readers of runs; folders of the same name are named by their paths."""
    paths = [folder.absolute() for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        common = os.path.commonpath([path.parent for path in paths])
        names = [str(path.relative_to(common)) for path in paths]
    return [RunReader(*one) for one in zip(folders, names, strict=True)]


class RunReader:
    """Reads what the page shows of a run; later calls read only the new metrics.

    Several threads may ask.

    Args:
        folder: The output folder of the run.
        name: What the page calls it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._curves = folder, CurvesReader(folder / "metrics.jsonl")
        self._name, self._lock = name, threading.Lock()

    def read(self) -> tuple[str, Json, Sequence[Section]]:
        """Returns (name, numbers for the curves, tables).

        Raises:
            StateError: The folder holds no run, or a file of it cannot be read.
            StorageError: metrics.jsonl cannot be read.
            TrainError: No step was logged.
        """
        folder = self._folder
        if not (folder / "metrics.jsonl").is_file():
            unlike = "holds no metrics.jsonl, so it is not a run's folder"
            raise StateError(
                at=str(folder),
                problem=unlike if folder.is_dir() else "no such folder",
                fix="Give the train.output_dir of a run that has trained a step.",
            )
        try:
            with self._lock:
                curves = self._curves.read()
                if curves is None:
                    raise TrainError(
                        at=str(folder / "metrics.jsonl"),
                        problem="no step was logged, so there is nothing to draw",
                        fix="Wait for the run's first step.",
                    )
                drawn = {"name": self._name, **numbers_of(folder, curves)}
                return self._name, drawn, sections(folder, curves)
        except EasypipeError:
            raise
        except NO_SUCH_SHAPE as error:
            problem = f"a file in it is not what a run writes there: {type(error).__name__} {error}"
            raise StateError(
                at=str(folder), problem=problem, fix="Give the train.output_dir of a run."
            ) from error


def numbers_of(folder: Path, curves: Curves) -> Json:
    """Returns the numbers that page.js draws for a run.

    Returns:
        `config` (the file that explains its batches, quoted for a shell), `curves` (name → [steps,
        values]), `marks` (step, kind, text), `mixture` (dataset → step, so far, lately, asked for),
        `flows` (links).
    """
    try:
        trained = recorded_datasets(folder)
    except ConfigError:  # the rest of the page does not need the record
        trained = []
    placed = _of(folder / PLAN, _placed, {})
    return {
        "config": shlex.quote(str((folder / RECORD).absolute())),
        "curves": curves.points(),
        "marks": _marks(folder, curves),
        "mixture": _of(folder / PLAN, mixture_lines, {}),
        "flows": _of(folder / LEDGER, lambda kept: flows(kept["entries"], trained, placed), []),
    }


def _placed(kept: Json) -> dict[str, int]:
    return {one["name"]: one["tokens_placed"] for one in kept["datasets"]}


def _marks(folder: Path, curves: Curves) -> list[Json]:
    """Returns the changes, restarts, roll-backs and spikes of a run, by step."""
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
    high = [
        _mark(step, "spike", f"gradient norm {norm:.3g}, usual before it {usual:.3g}")
        for step, norm, usual in spikes(curves)
    ]
    return [*changes, *restarts, *undone, *high]


def _changed(kept: Sequence[Json]) -> list[Json]:
    return [
        _mark(one["step"], "change", f"{key}: {text}")
        for one in kept
        for key, text in one["changed"].items()
    ]


def _mark(step: int, kind: str, text: str) -> Json:
    return {"step": step, "kind": kind, "text": text}


def _of(path: Path, draw: Callable[[Any], T], none: T) -> T:
    """Reads and draws a file of the run; returns `none` if it is missing or damaged.

    The tables show why.
    """
    try:
        kept = read_kept(path)
        return draw(kept) if kept else none
    except (StateError, *NO_SUCH_SHAPE):
        return none


def sections(folder: Path, curves: Curves) -> list[Section]:
    """Returns all tables, in the order of the page."""
    of = functools.partial(_kept, folder)
    found = [
        _section("Summary", (), _summary(folder, curves)),
        _section(
            "Evaluations",
            ("step", "held out", "loss", "nll", "perplexity", "targets"),
            _evaluations(curves.evaluations),
        ),
        _samples("Samples", folder / SAMPLES),
        of("Best checkpoints", BEST, functools.partial(_best, folder)),
        _rollbacks("Roll-backs", folder / ROLLBACKS),
        of("Changes", CHANGES, _changes, "nothing was changed while it ran"),
        of("Restarts", RESTARTS, _restarts, "it was never begun again"),
        of(
            "Mixture",
            PLAN,
            functools.partial(_mixture, curves.last["step"]),
            f"{PLAN} is written at checkpoints of a run of several datasets and when it stops, but "
            "not in streaming",
        ),
        of("Ledger: where every row and token went", LEDGER, _ledger),
        of("Data", FINGERPRINTS, _fingerprints),
        of("Versions", VERSIONS, _versions),
        _config("Configuration", folder / RECORD),
    ]
    return [_without_middle(one) for one in found]


def _section(
    heading: str,
    head: Sequence[str],
    lines: Sequence[Sequence[JsonValue]],
    notes: Sequence[str] = (),
) -> Section:
    return Section(heading, head, lines, notes, none="" if lines else "there was none")


def _without_middle(section: Section) -> Section:
    """Leaves out the middle of a long table."""
    half = MOST_LINES // 2
    left_out = len(section.lines) - 2 * half
    if left_out <= 0:
        return section
    lines = [*section.lines[:half], (f"… {left_out} more …",), *section.lines[-half:]]
    return section._replace(lines=lines)


def _summary(folder: Path, curves: Curves) -> list[tuple[str, JsonValue]]:
    """Returns the lines of the summary table."""
    first, last = curves.first, curves.last
    checkpoints = committed(folder / "checkpoints")
    return [
        ("folder", str(folder.absolute())),
        ("last step logged", last["step"]),
        ("loss at first, at last", f"{shown(first.get('loss'))}, {shown(last.get('loss'))}"),
        ("steps skipped, not finite", last.get("skipped", 0)),
        ("tokens a second, median", curves.median("tokens_per_second")),
        (
            "MFU at last (exact; PaLM convention)",
            f"{shown(last.get('mfu'))}; {shown(last.get('mfu_palm'))}",
        ),
        ("peak memory of a device, bytes", last.get("peak_memory")),
        ("checkpoints of steps", ", ".join(map(str, checkpoints)) or "none"),
    ]


def _evaluations(records: Sequence[Record]) -> list[Sequence[JsonValue]]:
    keys = ("loss", "nll", "ppl", "num_targets")
    return [
        (record["step"], name, *(seen[key] for key in keys))
        for record in records
        for name, seen in record["eval"].items()
    ]


def _best(folder: Path, heading: str, listed: Sequence[Json]) -> Section:
    metric = next((key for one in listed for key in one if key not in ("step", "checkpoint")), "")
    lines = []
    for one in listed:
        gone = "" if (folder / one["checkpoint"]).is_dir() else " (gone)"
        lines.append((one["step"], one[metric], one["checkpoint"] + gone))
    return _section(heading, ("step", metric, "checkpoint"), lines)


def documents_of(line: Record) -> str:
    """Returns the first documents of the batch that a roll-back skipped, as text."""
    found = [
        f"{one['dataset']} {one['file']} row {one['row']}" for one in line.get("documents", ())
    ]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return ", ".join(dict.fromkeys(found[:5])) + more or str(line.get("problem", ""))


def _rollbacks(heading: str, path: Path) -> Section:
    if not path.exists():
        return Section(heading, none="the run did not watch for spikes")
    head = ("at step", "back to", "skipped batch of step", "its documents")
    lines = [
        (line["step"], line["to"], line["batch_of_step"], documents_of(line))
        for line in read_metrics(path)
    ]
    return _section(heading, head, lines)


def _samples(heading: str, path: Path) -> Section:
    """Returns the table of the model's texts, the newest first."""
    if not path.exists():
        return Section(heading, none="the run had none written")
    lines = [
        (line["step"], one["prompt"], one["text"])
        for line in reversed(read_metrics(path))
        for one in line["samples"]
    ]
    return _section(heading, ("step", "prompt", "what the model wrote"), lines)


def _changes(heading: str, entries: Sequence[Record]) -> Section:
    """Returns the table of what was allowed to differ when the run was resumed.

    Everything else on the page is about the complete run, but its configuration is that of the last
    part.
    """
    lines = [
        (f"after step {one['step']}", key, text)
        for one in entries
        for key, text in one["changed"].items()
    ]
    return _section(heading, ("", "changed", ""), lines)


def _restarts(heading: str, entries: Sequence[Record]) -> Section:
    lines = [(f"after step {one['step']}", one["time"]) for one in entries]
    return _section(heading, ("", "begun again, UTC"), lines)


def _mixture(last: int, heading: str, plan: Json) -> Section:
    """Returns the table of the mixture; `last` is the last logged step."""
    head = ("dataset", f"asked for ({plan['unit']})", "drawn", "documents", "epochs", "tokens")
    lines = [
        (d["name"], d["requested"], d["realised"], d["drawn"], d["epochs"], d["tokens_placed"])
        for d in plan["datasets"]
    ]
    notes = [*plan.get("notes", ())]
    if plan["steps"] < last:
        notes.insert(
            0,
            f"counted for the first {plan['steps']:,} steps, when the run had ended there; it "
            "has continued since",
        )
    return _section(heading, head, lines, notes)


def _ledger(heading: str, kept: Json) -> Section:
    def said(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{name} {count:,}" for name, count in counts.items())

    lines = [
        (e["stage"], e["dataset"], e["unit"], said(e["in"]), said(e["out"]))
        for e in kept["entries"]
    ]
    return _section(heading, ("stage", "dataset", "unit", "in", "out"), lines)


def _fingerprints(heading: str, kept: Json) -> Section:
    of = {"training": kept["train"]}
    of |= {f"held out: {name}": one for name, one in kept["eval"].items()}
    lines = [
        (name, part, digest)
        for name, one in of.items()
        for part, digest in (one or {"": "not known to its loader"}).items()
    ]
    return _section(heading, ("data", "part", "fingerprint"), lines)


def _versions(heading: str, kept: Sequence[Json]) -> Section:
    """Returns the table of versions, with a column for each process with different ones."""
    head = ("", *(f"after step {one['from_step']}" for one in kept))
    keys = [key for key in kept[-1] if key != "from_step"]
    return _section(heading, head, [(key, *(one.get(key) for one in kept)) for key in keys])


def _config(heading: str, path: Path) -> Section:
    if not path.exists():
        return Section(heading, none=f"no {path.name}")
    return Section(heading, text=path.read_text(encoding="utf-8", errors="replace"))


def _kept(
    folder: Path,
    heading: str,
    name: str,
    draw: Callable[[str, Any], Section],
    none: str = "not recorded",
) -> Section:
    """Returns the table of a file of the run.

    If the file is damaged, the table says so: the rest of the page does not need it.
    """
    try:
        kept = read_kept(folder / name)
        return draw(heading, kept) if kept else Section(heading, none=none)
    except (StateError, *NO_SUCH_SHAPE) as error:
        why = (
            error.problem
            if isinstance(error, StateError)
            else f"damaged: it does not hold what a run writes there: {error!r}"
        )
        log.warning("%s: %s", folder / name, why)
        return Section(heading, none=f"not known: {name} is {why}")
