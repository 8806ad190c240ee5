"""The loss of a run as a picture."""

from __future__ import annotations

import io
from pathlib import Path

from easypipe.core.errors import TrainError
from easypipe.core.storage import commit_bytes
from easypipe.train.metrics import read_metrics


def plot_loss(metrics: str | Path, png: str | Path, *, title: str = "loss") -> Path:
    """Draws `loss` by step, and each held-out loss, from metrics.jsonl to a PNG of 1200 x 750 pixels; returns its path.

    Raises TrainError where no step was logged.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # 0.5 s, and only needed when a run ends
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    if not records:
        raise TrainError(at=str(metrics), problem="no step was logged, so there is nothing to draw")
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    marker = "o" if len(records) == 1 else None
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], linewidth=1, marker=marker, label="training")
    names = sorted({name for record in records for name in record.get("eval", {})})
    for name in names:
        seen = [record for record in records if name in record.get("eval", {})]
        axes.plot([r["step"] for r in seen], [r["eval"][name]["loss"] for r in seen], marker="o", markersize=4, label=f"held out: {name}")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    commit_bytes(png, picture.getvalue())
    return Path(png)
