"""The tables of a run's page: what each file of its folder says, or why that is not known."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.core.errors import StateError
from easypipe.core.pages import Section, shown
from easypipe.core.values import Json, JsonValue
from easypipe.train.metrics.log import SAMPLES, Record, read_metrics
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
)
from easypipe.train.report.numbers import Curves
from easypipe.train.report.pictures import NO_SUCH_SHAPE

log = logging.getLogger("easypipe")

ROLLBACKS = "rollbacks.jsonl"
MOST_LINES = 200  # of a table; the middle of a longer one is left out, and said so


def sections(folder: Path, curves: Curves) -> list[Section]:
    """All of them, in the order of the page."""
    of = functools.partial(_of, folder)
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
        of("Mixture", PLAN, functools.partial(_mixture, curves.last["step"])),
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
    half = MOST_LINES // 2
    left_out = len(section.lines) - 2 * half
    if left_out <= 0:
        return section
    lines = [*section.lines[:half], (f"… {left_out} more …",), *section.lines[-half:]]
    return section._replace(lines=lines)


def _summary(folder: Path, curves: Curves) -> list[tuple[str, JsonValue]]:
    first, last = curves.first, curves.last
    checkpoints = sorted(
        int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()
    )
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
    """The first documents of the batch that a roll-back skipped."""
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
    """What the model wrote, the newest first."""
    if not path.exists():
        return Section(heading, none="the run had none written")
    lines = [
        (line["step"], one["prompt"], one["text"])
        for line in reversed(read_metrics(path))
        for one in line["samples"]
    ]
    return _section(heading, ("step", "prompt", "what the model wrote"), lines)


def _changes(heading: str, entries: Sequence[Record]) -> Section:
    """What was allowed to differ when the run went on; all else on the page is of the whole run,
    its configuration of the last part.
    """
    lines = [
        (f"from step {one['step'] + 1}", key, text)
        for one in entries
        for key, text in one["changed"].items()
    ]
    return _section(heading, ("", "changed", ""), lines)


def _restarts(heading: str, entries: Sequence[Record]) -> Section:
    lines = [(f"from step {one['step'] + 1}", one["time"]) for one in entries]
    return _section(heading, ("", "begun again, UTC"), lines)


def _mixture(last: int, heading: str, plan: Json) -> Section:
    """last: the step that was logged last."""
    head = ("dataset", f"asked for ({plan['unit']})", "drawn", "documents", "epochs", "tokens")
    lines = [
        (d["name"], d["requested"], d["realised"], d["drawn"], d["epochs"], d["tokens_placed"])
        for d in plan["datasets"]
    ]
    notes = [*plan.get("notes", ())]
    if plan["steps"] < last:
        notes.insert(
            0,
            f"counted for the first {plan['steps']:,} steps, when the run had come to its end "
            "there; it has gone on since",
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
    """A column for each process that began with other versions."""
    head = ("", *(f"from step {one['from_step']}" for one in kept))
    keys = [key for key in kept[-1] if key != "from_step"]
    return _section(heading, head, [(key, *(one.get(key) for one in kept)) for key in keys])


def _config(heading: str, path: Path) -> Section:
    if not path.exists():
        return Section(heading, none=f"no {path.name}")
    return Section(heading, text=path.read_text(encoding="utf-8", errors="replace"))


def _of(
    folder: Path,
    heading: str,
    name: str,
    draw: Callable[[str, Any], Section],
    none: str = "not recorded",
) -> Section:
    """What a file of the run says; that it is damaged where it is, since the rest of the page does
    not need it.
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
