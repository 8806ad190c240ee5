"""What stands in rows of a window, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from easypipe.core.jit import jit
from easypipe.core.values import Int32, Int64
from easypipe.plan.window import Window


class Pieces(NamedTuple):
    """The pieces of some rows, in the order the rows were asked for, then by slot.

    row: Int64[p], index into the rows asked for. slot, segment (from 1), dataset, start, length:
    Int32[p]. doc: Int64[p].
    """

    row: Int64
    slot: Int32
    segment: Int32
    dataset: Int32
    doc: Int64
    start: Int32
    length: Int32


_NONE_32, _NONE_64 = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
NO_PIECES = Pieces(_NONE_64, _NONE_32, _NONE_32, _NONE_32, _NONE_64, _NONE_32, _NONE_32)


def pieces_of(window: Window, rows: Int64) -> Pieces | None:
    """None where a row stands outside the window."""
    view = window.view
    total = _count_pieces(rows, view)
    if total < 0:
        return None
    wide, narrow = np.empty((2, total), dtype=np.int64), np.empty((5, total), dtype=np.int32)
    _gather_pieces(rows, view, wide, narrow)
    return Pieces(wide[0], narrow[0], narrow[1], narrow[2], wide[1], narrow[3], narrow[4])


def join(parts: Sequence[Pieces]) -> Pieces:
    """The pieces of `parts`, rows ascending."""
    order = np.argsort(np.concatenate([part.row for part in parts]), kind="stable")
    return Pieces._make(np.concatenate(columns)[order] for columns in zip(*parts, strict=True))


@jit
def _count_pieces(rows, view):
    total, first_piece = 0, view.first_piece
    for n in range(rows.shape[0]):
        row = rows[n] - view.first_row
        if row < 0 or row >= first_piece.shape[0] - 1:
            return -1
        total += first_piece[row + 1] - first_piece[row]
    return total


@jit
def _gather_pieces(rows, view, wide, narrow):
    at = 0
    for n in range(rows.shape[0]):
        row = rows[n] - view.first_row
        first = view.first_piece[row]
        for piece in range(first, view.first_piece[row + 1]):
            draw = view.table[2, piece]
            wide[0, at], wide[1, at] = n, view.doc[draw]
            narrow[0, at], narrow[1, at] = view.table[1, piece], piece - first + 1
            narrow[2, at], narrow[3, at] = view.dataset[draw], view.table[3, piece]
            narrow[4, at] = view.table[4, piece]
            at += 1
