"""Draws a run's curves and its mixture as PNG pictures, which its folder keeps."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from easypipe.core.errors import StateError, TrainError
from easypipe.core.storage import commit_bytes
from easypipe.core.values import Arguments, Json
from easypipe.train.metrics.log import Record, read_metrics
from easypipe.train.record import PLAN, read_kept

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Sheet: TypeAlias = tuple[Figure, Axes]

log = logging.getLogger("easypipe")

MIXTURE = "mixture"  # the picture that needs plan.json
# The errors of reading missing values.
NO_SUCH_SHAPE = (KeyError, TypeError, AttributeError, ValueError, IndexError)


def plot_run(folder: str | Path, names: Sequence[str] = ()) -> dict[str, Path]:
    """Draws the pictures of the run in `folder` into it; returns name -> path of `<name>.png`.

    Args:
        folder: The run's folder.
        names: Names of PLOTS, and "mixture"; (): all of them.

    Raises:
        TrainError: No step was logged.
    """
    folder = Path(folder)
    drawn = pictures(folder, names)
    for name, picture in drawn.items():
        commit_bytes(folder / f"{name}.png", picture)
    return {name: folder / f"{name}.png" for name in drawn}


def pictures(folder: Path, names: Sequence[str] = ()) -> dict[str, bytes]:
    """Returns name -> PNG of 1200 x 750 pixels, for those pictures that the run has numbers for.

    Raises:
        TrainError: No step was logged.
    """
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        raise TrainError(
            at=str(folder / "metrics.jsonl"),
            problem="no step was logged, so there is nothing to draw",
            fix="Wait for the run's first step.",
        )
    sheet = _figure()
    drawn = {name: PLOTS[name](sheet, records) for name in names or PLOTS if name != MIXTURE}
    if not names or MIXTURE in names:
        try:
            drawn[MIXTURE] = mixture_picture(read_kept(folder / PLAN))
        except (StateError, *NO_SUCH_SHAPE) as error:
            log.warning("%s: not drawn, since %s cannot be read: %s", folder, PLAN, error)
    return {name: picture for name, picture in drawn.items() if picture is not None}


def _loss(sheet: Sheet, records: Sequence[Record]) -> bytes:
    """Draws `loss` by step, and each held-out loss."""
    lines = {"training": [(record["step"], record["loss"]) for record in records]}
    for name in sorted({name for record in records for name in record.get("eval", {})}):
        lines[f"held out: {name}"] = [
            (record["step"], record["eval"][name]["loss"])
            for record in records
            if name in record.get("eval", {})
        ]
    return _picture(sheet, "loss", "loss (nats a token)", lines)


def _curve(
    key: str, title: str, label: str, sheet: Sheet, records: Sequence[Record]
) -> bytes | None:
    """Draws one number by step; returns None if the run has no values of it."""
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return _picture(sheet, title, label, {title: points}) if points else None


def mixture_picture(plan: Json | None) -> bytes | None:
    """Draws each dataset's share of the tokens.

    The share so far is thick, the recent share is thin, and the target share is dashed.

    Returns None if there is no plan or it has no steps.
    """
    lines = mixture_lines(plan)
    if plan is None or not lines:
        return None
    figure, axes = _figure()
    for name, part in lines.items():
        steps, marker = part["step"], "o" if len(part["step"]) == 1 else None
        [line] = axes.plot(steps, part["so far"], linewidth=1.6, marker=marker, label=_label(name))
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
    """Returns the lines in the picture of the mixture: for each dataset values by `step`.

    Args:
        plan: The plan of a run (plan.json).

    Returns:
        "so far": the dataset's share of all tokens up to the step. "lately": its share in the tenth
        of the run that ends there. "asked for": what the weights ask for there. Empty if the plan
        has no steps.
    """
    if not plan or not plan.get("by_step"):
        return {}
    # Older folders hold only shares: each interval then has the same weight.
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


PLOTS: Mapping[str, Callable[[Sheet, Sequence[Record]], bytes | None]] = {
    "loss": _loss,
    "learning_rate": partial(_curve, "learning_rate", "learning rate", "learning rate"),
    "tokens_per_second": partial(
        _curve, "tokens_per_second", "throughput", "tokens a second, without padding"
    ),
    "data_wait": partial(_curve, "data_wait", "waiting for data", "share of the time"),
}


def _picture(
    sheet: Sheet, title: str, label: str, lines: Mapping[str, Sequence[tuple[int, float | None]]]
) -> bytes:
    """Draws one picture on a sheet, which is blank again afterwards.

    The pictures of a run share a sheet because ticks and labels cost more than lines.
    """
    figure, axes = sheet
    for number, (name, points) in enumerate(lines.items()):
        marker = "o" if number or len(points) == 1 else None
        told: Arguments = {"linewidth": 1, "markersize": 4, "label": _label(name)}
        axes.plot(*zip(*points, strict=True), marker=marker, **told)
    axes.set(xlabel="step", ylabel=label, title=title)
    legend = axes.legend() if len(lines) > 1 else None
    picture = _png(figure)
    for drawn in (*axes.lines, *filter(None, [legend])):
        drawn.remove()
    axes.set_prop_cycle(None)  # starts with the first color again
    axes.relim()
    return picture


def _label(name: str) -> str:
    """Returns the name of a dataset as a legend shows it unchanged.

    A legend leaves out names that begin with "_" and reads formulas between dollars.
    """
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def _figure() -> Sheet:
    # The import takes 0.5 s, and is only needed when a run ends.
    scheme, _, module = os.environ.get("MPLBACKEND", "").partition("://")
    if scheme == "module" and find_spec(module.partition(".")[0]) is None:
        # that of a notebook, of another environment; matplotlib does not import with it
        del os.environ["MPLBACKEND"]
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
