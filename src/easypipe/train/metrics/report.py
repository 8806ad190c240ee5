"""A run's curves as pictures, and its folder as one page of HTML, which fetches nothing."""

from __future__ import annotations

import base64
import functools
import html
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from easypipe.core.errors import EasypipeError, StateError, TrainError
from easypipe.core.storage import commit_bytes
from easypipe.core.values import Json, JsonValue
from easypipe.train.metrics.log import Record, read_metrics
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger("easypipe")

MIXTURE = "mixture"  # the one that needs plan.json
# what reading values that are not there raises
NO_SUCH_SHAPE = (KeyError, TypeError, AttributeError, ValueError, IndexError)


def plot_run(folder: str | Path, names: Sequence[str] = ()) -> dict[str, Path]:
    """Draws what is known of the run in `folder` into it: name -> path of `<name>.png`.

    names: of PLOTS, and "mixture"; () is all of them.

    Raises TrainError where no step was logged.
    """
    folder = Path(folder)
    drawn = pictures(folder, names)
    for name, picture in drawn.items():
        commit_bytes(folder / f"{name}.png", picture)
    return {name: folder / f"{name}.png" for name in drawn}


def pictures(folder: Path, names: Sequence[str] = ()) -> dict[str, bytes]:
    """name -> PNG of 1200 x 750 pixels, for those that the run has numbers for."""
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        raise TrainError(
            at=str(folder / "metrics.jsonl"),
            problem="no step was logged, so there is nothing to draw",
            fix="Wait for the run's first step.",
        )
    drawn = {name: PLOTS[name](records) for name in names or PLOTS if name != MIXTURE}
    if not names or MIXTURE in names:
        try:
            drawn[MIXTURE] = mixture_picture(read_kept(folder / PLAN))
        except (StateError, *NO_SUCH_SHAPE) as error:
            log.warning("%s: not drawn, since %s cannot be read: %s", folder, PLAN, error)
    return {name: picture for name, picture in drawn.items() if picture is not None}


def _loss(records: Sequence[Record]) -> bytes:
    """`loss` by step, and each held-out loss."""
    lines = {"training": [(record["step"], record["loss"]) for record in records]}
    for name in sorted({name for record in records for name in record.get("eval", {})}):
        lines[f"held out: {name}"] = [
            (record["step"], record["eval"][name]["loss"])
            for record in records
            if name in record.get("eval", {})
        ]
    return _picture("loss", "loss (nats a token)", lines)


def _curve(key: str, title: str, label: str, records: Sequence[Record]) -> bytes | None:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return _picture(title, label, {title: points}) if points else None


def mixture_picture(plan: Json | None) -> bytes | None:
    """What the run has had of each dataset's tokens, and what it had lately (thin), beside what the
    weights ask for (dashed).
    """
    lines = mixture_lines(plan)
    if plan is None or not lines:
        return None
    figure, axes = _figure()
    for name, part in lines.items():
        steps, marker = part["step"], "o" if len(part["step"]) == 1 else None
        [line] = axes.plot(steps, part["so far"], linewidth=1.6, marker=marker, label=name)
        color = line.get_color()
        axes.plot(steps, part["lately"], linewidth=0.8, alpha=0.45, color=color)
        [dashed] = axes.plot(steps, part["asked for"], "--", linewidth=1, color=color)
        dashed.set_drawstyle("steps-pre")
    asked = "weight, of documents" if plan["unit"] == "rows" else "weight, of tokens"
    axes.set(xlabel="step", ylabel="share of the tokens", ylim=(0, None))
    axes.set_title(
        f"mixture: so far (thick), of the last tenth of the run (thin), {asked} (dashed)",
        fontsize="medium",
    )
    axes.legend()
    return _png(figure)


def mixture_lines(plan: Json | None) -> dict[str, dict[str, list[float]]]:
    """What the mixture's plot draws, from the plan of a run (plan.json): for each dataset values by
    `step`.

    "so far": its share of all tokens up to the step. "lately": of those in the tenth of the run
    that ends there. "asked for": what the weights ask for there. Empty where the plan has no steps.
    """
    if not plan or not plan.get("by_step"):
        return {}
    # Folders of before have shares alone: each interval then counts alike.
    seen = [{"tokens": one["realised"], **one} for one in plan["by_step"]]
    tenth = max(one["step"] for one in seen) / 10

    def share(name: str, intervals: Sequence[Json]) -> float:
        total = sum(sum(each["tokens"].values()) for each in intervals)
        return sum(each["tokens"].get(name, 0) for each in intervals) / max(1, total)

    so_far = [seen[: i + 1] for i in range(len(seen))]
    lately = [
        [each for each in until if each["step"] > until[-1]["step"] - tenth] or until[-1:]
        for until in so_far
    ]
    return {
        name: {
            "step": [one["step"] for one in seen],
            "so far": [share(name, intervals) for intervals in so_far],
            "lately": [share(name, intervals) for intervals in lately],
            "asked for": [one["requested"].get(name, 0.0) for one in seen],
        }
        for name in (dataset["name"] for dataset in plan["datasets"])
    }


PLOTS: Mapping[str, Callable[[Sequence[Record]], bytes | None]] = {
    "loss": _loss,
    "learning_rate": partial(_curve, "learning_rate", "learning rate", "learning rate"),
    "tokens_per_second": partial(
        _curve, "tokens_per_second", "throughput", "tokens a second, without padding"
    ),
    "data_wait": partial(_curve, "data_wait", "waiting for data", "share of the time"),
}


def _picture(
    title: str, label: str, lines: Mapping[str, Sequence[tuple[int, float | None]]]
) -> bytes:
    figure, axes = _figure()
    for number, (name, points) in enumerate(lines.items()):
        marker = "o" if number or len(points) == 1 else None
        axes.plot(*zip(*points, strict=True), linewidth=1, marker=marker, markersize=4, label=name)
    axes.set(xlabel="step", ylabel=label, title=title)
    if len(lines) > 1:
        axes.legend()
    return _png(figure)


def _figure() -> tuple[Figure, Axes]:
    # 0.5 s, and only needed when a run ends
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.1, 0.11, 0.87, 0.81))
    axes.grid(alpha=0.3)
    return figure, axes


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


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
    """The HTML of `write_report`.

    Raises StateError, StorageError and TrainError for files that are no run's.
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


def _summary(folder: Path, records: Sequence[Record]) -> list[tuple[str, JsonValue]]:
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


def _table(head: Sequence[str], lines: Sequence[Sequence[JsonValue]]) -> str:
    if not lines:
        return _none("there was none")
    half = _MOST_LINES // 2
    left_out = len(lines) - 2 * half
    shown = [*lines[:half], (f"… {left_out} more …",), *lines[-half:]] if left_out > 0 else lines
    rows = ["".join(f"<th>{html.escape(word)}</th>" for word in head)] if any(head) else []
    rows += ["".join(map(_cell, line)) for line in shown]
    return "<table>" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _cell(value: JsonValue) -> str:
    kind = ' class="number"' if isinstance(value, int | float) else ""
    return f"<td{kind}>{html.escape(_shown(value))}</td>"


def _shown(value: JsonValue) -> str:
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
