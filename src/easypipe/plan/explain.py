"""What stands in a row, piece by piece: the integers behind `Loader.explain`. Reads no tokens."""

from __future__ import annotations

from typing import NamedTuple

from easypipe.plan.windows import Plan


class PlannedPiece(NamedTuple):
    """Tokens `start` to `stop` of document `doc` of dataset number `dataset`, at slots `slot`
    onward, as segment `segment` (from 1).
    """

    slot: int
    segment: int
    dataset: int
    doc: int
    start: int
    stop: int


class PlannedRow(NamedTuple):
    """A row of the run: the epoch and the window that it stands in, and its pieces by slot."""

    row: int
    epoch: int
    window: int
    pieces: tuple[PlannedPiece, ...]


def explain_row(plan: Plan, row: int) -> PlannedRow:
    """Costs what the plan needs to find the row: a few windows where a checkpoint stands near, else
    the scan up to it, once.

    Raises PlanError for a row behind the last.
    """
    address = plan.locate(row)
    found = address.pieces
    columns = (
        found.slot,
        found.segment,
        found.dataset,
        found.doc,
        found.start,
        found.start + found.length,
    )
    pieces = tuple(
        PlannedPiece(*numbers)
        for numbers in zip(*(column.tolist() for column in columns), strict=True)
    )
    return PlannedRow(row, address.epoch, address.window, pieces)
