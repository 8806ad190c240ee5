"""Counts the labels of a plan in one compiled pass over its loss masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from easypipe.cache.address import uint8_at
from easypipe.cache.reader import TokenCache, pin
from easypipe.core.jit import jit
from easypipe.core.schema import LOSS_MASK
from easypipe.core.values import Int64
from easypipe.loader.rows.gather import NO_CHECKS, Tables, find, goes_on_masked, tables
from easypipe.plan.window import View
from easypipe.plan.windows import Plan, Window


def count_targets(
    plan: Plan,
    caches: Sequence[TokenCache],
    num_rows: int,
    *,
    joined: bool = False,
    hold: bool = False,
) -> Int64:
    """Counts the tokens of the first `num_rows` rows that are the label of a slot.

    Args:
        plan: The plan over the datasets of `caches`.
        caches: The token caches.
        num_rows: The number of rows to count.
        joined: Whether the rows are those of one epoch of "concat" with rows of one segment.
        hold: Whether held pieces (see loader/rows/gather.py) have no targets.

    Returns:
        Int64[2, datasets]: the tokens that are labels, including added EOS tokens; and those that
        would be labels by their mask but are in a held piece.
    """
    found = np.zeros((2, len(caches)), np.int64)
    where = tables([cache.buffers() for cache in caches])
    # without a loss mask no token is read
    masked = caches if any(LOSS_MASK in cache.schema.names for cache in caches) else ()
    goes_on = plan.spec.pack is not None and plan.spec.pack.concat
    row = 0
    while row < num_rows:
        window = plan.window_at(row)
        last = window.layout.first_piece[min(num_rows - window.first_row, window.num_rows)]
        begins = _first_draw(window) if joined and row == 0 else -1
        with pin(masked, window.dataset, window.doc):
            _count(last, window.view, where, (goes_on, joined, begins, hold), NO_CHECKS, found)
        row = window.after.first_row
    return found


def stream_start(plan: Plan) -> int:
    """Returns the dataset of the first token of the first epoch; -1 if there is no token."""
    window = plan.window_at(0) if plan.num_rows != 0 else None
    return -1 if window is None else int(window.dataset[_first_draw(window)])


def _first_draw(window: Window[int]) -> int:
    return int(np.argmax(window.length > 0))


@jit
def _count(
    pieces: np.int64,
    view: View,
    tables: Tables,
    rule: tuple[bool, bool, int, bool],
    todo: Int64,
    found: Int64,
) -> None:
    """Adds the targets of the first `pieces` pieces of a window to `found` (Int64[2, datasets])."""
    goes_on, joined, begins, hold = rule
    for n in range(pieces):
        draw: np.int32 = view.table[2, n]
        start, length = np.int64(view.table[3, n]), np.int64(view.table[4, n])
        d = view.dataset[draw]
        part, first, end, _ = find(tables, d, view.doc[draw], todo, 0)
        # The first token of a piece is not a label, unless it is that of the previous row.
        skipped = 0 if goes_on and (start > 0 or (joined and draw != begins)) else 1
        if tables.mask[part] == 0:  # every token is a target
            found[0, d] += length - skipped
            continue
        begin, flags = first + start, uint8_at(tables.mask[part])
        count = np.int64(0)
        for t in range(begin + skipped, min(begin + length, end)):
            count += flags[t] == 1
        # an added EOS is a target if the token before it is one
        if begin + length > end and length > skipped:
            count += flags[end - 1] if end > first else 1
        found[1 if hold and goes_on_masked(tables.mask[part], first, start) else 0, d] += count
