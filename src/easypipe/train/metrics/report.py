"""A run's folder as one page of HTML, its plots inside it; no script, nothing fetched."""

from __future__ import annotations

import base64
import functools
import html
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.core.checked import Json
from easypipe.core.errors import EasypipeError, StateError
from easypipe.core.storage import commit_bytes
from easypipe.train.metrics.log import Record, read_metrics
from easypipe.train.metrics.plot import NO_SUCH_SHAPE, pictures
from easypipe.train.record import (
    BEST,
    CHANGES,
    FINGERPRINTS,
    LEDGER,
    PLAN,
    RECORD,
    VERSIONS,
    read_kept,
)

log = logging.getLogger("easypipe")

PAGE = "report.html"  # in the run's folder, where no other path is given
_MOST_LINES = 200  # of a table; the middle of a longer one is left out, and said so

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
td, th { padding: .15rem .7rem; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } img { width: 100%; max-width: 35rem; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; } .none { color: #777; }
"""


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page of the run in `folder` to `out` (None: report.html in it), and returns where.
    A run under way has one too.

    Raises StateError where `folder` holds no run, or a file of it cannot be read.
    """
    folder = Path(folder).expanduser()
    if not (folder / "metrics.jsonl").is_file():
        unlike = "holds no metrics.jsonl, so it is no run's folder"
        raise StateError(
            at=str(folder),
            problem=unlike if folder.is_dir() else "no such folder",
            fix="Give the train.output_dir of a run that has trained a step.",
        )
    out = folder / PAGE if out is None else Path(out).expanduser()
    try:
        text = page(folder)
    except EasypipeError:
        raise
    except NO_SUCH_SHAPE as error:
        problem = f"a file in it is not what a run writes there: {type(error).__name__} {error}"
        raise StateError(
            at=str(folder), problem=problem, fix="Give the train.output_dir of a run."
        ) from error
    commit_bytes(out, text.encode())
    return out


def page(folder: Path) -> str:
    """The HTML of `write_report`. Raises StateError, StorageError and TrainError for files that are
    no run's.
    """
    records = read_metrics(folder / "metrics.jsonl")
    plots = "".join(
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for name, png in pictures(folder).items()
    )
    of = functools.partial(_of, folder)
    parts = [
        ("Summary", _table(("", ""), _summary(folder, records))),
        ("Curves", plots),
        ("Evaluations", _evaluations(records)),
        ("Best checkpoints", of(BEST, functools.partial(_best, folder))),
        ("Roll-backs", _rollbacks(folder / "rollbacks.jsonl")),
        ("Changes", of(CHANGES, _changes, "nothing was changed while it ran")),
        ("Mixture", of(PLAN, functools.partial(_mixture, records[-1]["step"]))),
        ("Ledger: where every row and token went", of(LEDGER, _ledger)),
        ("Data", of(FINGERPRINTS, _fingerprints)),
        ("Versions", of(VERSIONS, _versions)),
        ("Configuration", _config(folder / RECORD)),
    ]
    title = html.escape(folder.absolute().name)
    body = "".join(f"<h2>{html.escape(heading)}</h2>\n{content}\n" for heading, content in parts)
    head = f'<head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>'
    return (
        f'<!doctype html>\n<html lang="en">{head}\n<body><h1>{title}</h1>\n{body}</body></html>\n'
    )


def _summary(folder: Path, records: Sequence[Record]) -> list[tuple[str, object]]:
    first, last = records[0], records[-1]
    checkpoints = sorted(
        int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()
    )
    rates = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    return [
        ("folder", str(folder.absolute())),
        ("last step logged", last["step"]),
        ("loss at first, at last", f"{_shown(first.get('loss'))}, {_shown(last.get('loss'))}"),
        ("steps skipped, not finite", last.get("skipped", 0)),
        ("tokens a second, median", sorted(rates)[len(rates) // 2] if rates else None),
        (
            "MFU at last (exact; PaLM convention)",
            f"{_shown(last.get('mfu'))}; {_shown(last.get('mfu_palm'))}",
        ),
        ("peak memory of a device, bytes", last.get("peak_memory")),
        ("checkpoints of steps", ", ".join(map(str, checkpoints)) or "none"),
    ]


def _evaluations(records: Sequence[Record]) -> str:
    keys = ("loss", "nll", "ppl", "num_targets")
    lines = [
        (record["step"], name, *(seen[key] for key in keys))
        for record in records
        for name, seen in record.get("eval", {}).items()
    ]
    return _table(("step", "held out", "loss", "nll", "perplexity", "targets"), lines)


def _best(folder: Path, listed: Sequence[Json]) -> str:
    metric = next((key for one in listed for key in one if key not in ("step", "checkpoint")), "")
    lines = []
    for one in listed:
        gone = "" if (folder / one["checkpoint"]).is_dir() else " (gone)"
        lines.append((one["step"], one[metric], one["checkpoint"] + gone))
    return _table(("step", metric, "checkpoint"), lines)


def _rollbacks(path: Path) -> str:
    if not path.exists():
        return _none("the run did not watch for spikes")

    def documents(line: Record) -> str:
        found = [
            f"{one['dataset']} {one['file']} row {one['row']}" for one in line.get("documents", ())
        ]
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        return ", ".join(dict.fromkeys(found[:5])) + more or str(line.get("problem", ""))

    lines = [
        (line["step"], line["to"], line["batch_of_step"], documents(line))
        for line in read_metrics(path)
    ]
    return _table(("at step", "back to", "skipped batch of step", "its documents"), lines)


def _changes(entries: Sequence[Record]) -> str:
    """What was allowed to differ when the run went on; all else on the page is of the whole run,
    its configuration of the last part.
    """
    lines = [
        (f"from step {one['step'] + 1}", key, text)
        for one in entries
        for key, text in one["changed"].items()
    ]
    return _table(("", "changed", ""), lines)


def _mixture(last: int, plan: Json) -> str:
    """last: the step that was logged last."""
    lines = [
        (d["name"], d["requested"], d["realised"], d["drawn"], d["epochs"], d["tokens_placed"])
        for d in plan["datasets"]
    ]
    table = _table(
        ("dataset", f"asked for ({plan['unit']})", "drawn", "documents", "epochs", "tokens"), lines
    )
    notes = [*plan.get("notes", ())]
    if plan["steps"] < last:
        notes.insert(
            0,
            f"counted for the first {plan['steps']:,} steps, when the run had come to its end "
            "there; it has gone on since",
        )
    return table + "".join(f"<p>{html.escape(note)}</p>\n" for note in notes)


def _ledger(books: Json) -> str:
    def said(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{name} {count:,}" for name, count in counts.items())

    lines = [
        (e["stage"], e["dataset"], e["unit"], said(e["in"]), said(e["out"]))
        for e in books["entries"]
    ]
    return _table(("stage", "dataset", "unit", "in", "out"), lines)


def _fingerprints(kept: Json) -> str:
    of = {"training": kept["train"]}
    of |= {f"held out: {name}": one for name, one in kept["eval"].items()}
    lines = [
        (name, part, digest)
        for name, one in of.items()
        for part, digest in (one or {"": "not known to its loader"}).items()
    ]
    return _table(("data", "part", "fingerprint"), lines)


def _versions(kept: Sequence[Json]) -> str:
    """A column for each process that began with other versions."""
    head = ("", *(f"from step {one['from_step']}" for one in kept))
    keys = [key for key in kept[-1] if key != "from_step"]
    return _table(head, [(key, *(one.get(key) for one in kept)) for key in keys])


def _config(path: Path) -> str:
    if not path.exists():
        return _none(f"no {path.name}")
    return f"<pre>{html.escape(path.read_text(encoding='utf-8', errors='replace'))}</pre>"


def _of(folder: Path, name: str, draw: Callable[[Any], str], none: str = "not recorded") -> str:
    """What a file of the run says; that it is damaged where it is, since the rest of the page does
    not need it.
    """
    try:
        kept = read_kept(folder / name)
        return draw(kept) if kept else _none(none)
    except (StateError, *NO_SUCH_SHAPE) as error:
        why = (
            error.problem
            if isinstance(error, StateError)
            else f"damaged: it does not hold what a run writes there: {error!r}"
        )
        log.warning("%s: %s", folder / name, why)
        return _none(f"not known: {name} is {why}")


def _none(text: str) -> str:
    return f'<p class="none">{html.escape(text)}</p>'


def _table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    if not lines:
        return _none("there was none")
    half = _MOST_LINES // 2
    left_out = len(lines) - 2 * half
    shown = [*lines[:half], (f"… {left_out} more …",), *lines[-half:]] if left_out > 0 else lines
    rows = ["".join(f"<th>{html.escape(word)}</th>" for word in head)] if any(head) else []
    rows += ["".join(map(_cell, line)) for line in shown]
    return "<table>" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _cell(value: object) -> str:
    kind = ' class="number"' if isinstance(value, int | float) else ""
    return f"<td{kind}>{html.escape(_shown(value))}</td>"


def _shown(value: object) -> str:
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
