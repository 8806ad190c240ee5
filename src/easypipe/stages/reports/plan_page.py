"""Makes the page of a plan report: the run's size, its datasets, and notes."""

from __future__ import annotations

from collections.abc import Sequence

from easypipe.core.pages import Section
from easypipe.core.values import JsonValue
from easypipe.stages.reports.plan_report import DatasetPlan, PlanReport, megabytes, row_lengths


def plan_sections(plan: PlanReport) -> Sequence[Section]:
    """Returns the sections of the page, with the content of `str(plan)`."""
    head = ("dataset", "documents", "tokens", f"asked ({plan.unit})", "realised", "of tokens")
    head += ("drawn", "epochs", "tokens cut or dropped", "token cache")
    return (
        Section("The run", (), _run(plan)),
        Section("Datasets", head, [_dataset(one) for one in plan.datasets]),
        Section("Before it starts", notes=plan.notes or ("Nothing stands out.",)),
    )


def _run(plan: PlanReport) -> list[tuple[str, JsonValue]]:
    """Returns the lines about the run as a whole."""
    ends = "never" if plan.steps_available is None else f"after {plan.steps_available:,} steps"
    sizes = ", ".join(f"{rows:,} in {steps:,} steps" for steps, rows in plan.sizes)
    lines: list[tuple[str, JsonValue]] = [
        ("steps", plan.steps),
        ("the data ends", ends),
        ("rows of a step", sizes if len(plan.sizes) > 1 else plan.batch_size),
        ("rows", plan.rows),
        ("rows left over at the end", plan.rows_left_over),
        ("slots of a row", row_lengths(plan) if plan.seq_length else "as many as its document has"),
        ("slots filled", f"{plan.fill:.3%}"),
        ("tokens", plan.slots - plan.padding),
        ("slots of padding", plan.padding),
        ("token cache", megabytes(plan.cache_bytes)),
    ]
    if plan.saved_bytes is not None:
        lines.append(("to save, before compression", megabytes(plan.saved_bytes)))
    return lines


def _dataset(one: DatasetPlan) -> Sequence[JsonValue]:
    shares = (f"{share:.4%}" for share in (one.requested, one.realised, one.token_share))
    lost = one.tokens_cut + one.tokens_truncated + one.tokens_dropped
    epochs, cache = f"{one.epochs:.3f}", megabytes(one.cache_bytes)
    return (one.name, one.documents, one.tokens, *shares, one.drawn, epochs, lost, cache)
