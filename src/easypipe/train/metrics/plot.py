"""The curves of a run as pictures."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.core.errors import StateError, TrainError
from easypipe.core.storage import commit_bytes
from easypipe.train.metrics.log import Record, read_metrics
from easypipe.train.record import PLAN, read_kept

log = logging.getLogger("easypipe")

MIXTURE = "mixture"  # the one that needs plan.json
# what reading values that are not there raises
NO_SUCH_SHAPE = (KeyError, TypeError, AttributeError, ValueError, IndexError)


def plot_run(folder: str | Path, names: Sequence[str] = ()) -> dict[str, Path]:
    """Draws what is known of the run in `folder` into it: name -> path of `<name>.png`. names: of
    PLOTS; () is all of them.

    Raises TrainError where no step was logged.
    """
    folder = Path(folder)
    drawn = pictures(folder, names)
    for name, picture in drawn.items():
        commit_bytes(folder / f"{name}.png", picture)
    return {name: folder / f"{name}.png" for name in drawn}


def pictures(folder: Path, names: Sequence[str] = ()) -> dict[str, bytes]:
    """name -> PNG of 1200 x 750 pixels, for those of PLOTS that the run has numbers for."""
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        raise TrainError(
            at=str(folder / "metrics.jsonl"),
            problem="no step was logged, so there is nothing to draw",
        )
    found: dict[str, bytes | None] = {}
    for name in names or PLOTS:
        try:
            found[name] = PLOTS[name](
                records, read_kept(folder / PLAN) if name == MIXTURE else None
            )
        except (StateError, *NO_SUCH_SHAPE) as error:
            if name != MIXTURE:
                raise
            log.warning("%s: not drawn, since %s cannot be read: %s", folder, PLAN, error)
    return {name: picture for name, picture in found.items() if picture is not None}


def _loss(records: Sequence[Record], plan: Any) -> bytes:
    """`loss` by step, and each held-out loss."""
    lines = {"training": _points(records, "loss")}
    for name in sorted({name for record in records for name in record.get("eval", {})}):
        seen = [record for record in records if name in record.get("eval", {})]
        lines[f"held out: {name}"] = (
            [r["step"] for r in seen],
            [r["eval"][name]["loss"] for r in seen],
        )
    return _picture("loss", "loss (nats a token)", lines)


def _by_step(key: str, title: str, label: str) -> Callable[[Sequence[Record], Any], bytes | None]:
    def draw(records: Sequence[Record], plan: Any) -> bytes | None:
        points = _points([record for record in records if record.get(key) is not None], key)
        return _picture(title, label, {title: points}) if points[0] else None

    return draw


def _mixture(records: Sequence[Record], plan: Any) -> bytes | None:
    """What the run has had of each dataset's tokens, and what it had lately (thin), beside what the
    weights ask for (dashed).
    """
    lines = mixture_lines(plan)
    if not lines:
        return None
    figure, axes = _figure()
    colors: dict[str, Any] = {}
    for name, part in lines.items():
        steps = part["step"]
        [line] = axes.plot(
            steps,
            part["so far"],
            linewidth=1.6,
            marker="o" if len(steps) == 1 else None,
            label=name,
        )
        colors[name] = line.get_color()
        axes.plot(steps, part["lately"], linewidth=0.8, alpha=0.45, color=colors[name])
        axes.plot(
            steps,
            part["asked for"],
            linewidth=1,
            linestyle="--",
            drawstyle="steps-pre",
            color=colors[name],
        )
    asked = "weight, of documents" if plan["unit"] == "rows" else "weight, of tokens"
    axes.set(xlabel="step", ylabel="share of the tokens", ylim=(0, None))
    axes.set_title(
        f"mixture: so far (thick), of the last tenth of the run (thin), {asked} (dashed)",
        fontsize="medium",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return _png(figure)


def mixture_lines(plan: Any) -> dict[str, dict[str, list[float]]]:
    """What the mixture's plot draws, from the plan of a run (plan.json): for each dataset values by
    `step`.

    "so far": its share of all tokens up to the step. "lately": of those in the tenth of the run
    that ends there. "asked for": what the weights ask for there. Empty where the plan has no steps.
    """
    # Folders of before have shares alone: each interval then counts alike.
    seen = [{"tokens": one["realised"], **one} for one in (plan or {}).get("by_step") or []]
    names = [dataset["name"] for dataset in plan["datasets"]] if seen else []
    tenth = max((one["step"] for one in seen), default=0) / 10
    found: dict[str, dict[str, list[float]]] = {
        name: {"step": [], "so far": [], "lately": [], "asked for": []} for name in names
    }
    for i, one in enumerate(seen):
        parts = {
            "so far": seen[: i + 1],
            "lately": [each for each in seen[: i + 1] if each["step"] > one["step"] - tenth]
            or [one],
        }
        for name in names:
            found[name]["step"].append(one["step"])
            found[name]["asked for"].append(one["requested"].get(name, 0.0))
            for which, intervals in parts.items():
                total = sum(sum(each["tokens"].values()) for each in intervals)
                found[name][which].append(
                    sum(each["tokens"].get(name, 0) for each in intervals) / max(1, total)
                )
    return found


PLOTS: Mapping[str, Callable[[Sequence[Record], Any], bytes | None]] = {
    "loss": _loss,
    "learning_rate": _by_step("learning_rate", "learning rate", "learning rate"),
    "tokens_per_second": _by_step(
        "tokens_per_second", "throughput", "tokens a second, without padding"
    ),
    "data_wait": _by_step("data_wait", "waiting for data", "share of the time"),
    MIXTURE: _mixture,
}


def _points(records: Sequence[Record], key: str) -> tuple[list[int], list[Any]]:
    return [record["step"] for record in records], [record[key] for record in records]


def _picture(
    title: str, label: str, lines: Mapping[str, tuple[Sequence[int], Sequence[Any]]]
) -> bytes:
    figure, axes = _figure()
    for number, (name, (steps, values)) in enumerate(lines.items()):
        axes.plot(
            steps,
            values,
            linewidth=1,
            marker="o" if number or len(steps) == 1 else None,
            markersize=4,
            label=name,
        )
    axes.set(xlabel="step", ylabel=label, title=title)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    return _png(figure)


def _figure() -> tuple[Any, Any]:
    # 0.5 s, and only needed when a run ends
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150)
    FigureCanvasAgg(figure)
    return figure, figure.add_axes((0.1, 0.11, 0.87, 0.81))


def _png(figure: Any) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
