"""How many rows the first documents of a window fill, tried for several numbers of them, and the
layout of the number that is chosen.

"greedy" and "pool" never look ahead, so the pieces of the first n documents are the first pieces of
more: one assignment serves every number. "first_fit" begins with the longest document, so it packs
anew, but the number of its rows follows from how many documents there are of each length: rows with
the same free room are counted instead of told apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from easypipe.core.jit import jit
from easypipe.plan.pack import (
    LEVELS,
    OVERSIZE,
    Layout,
    PackSpec,
    arrange,
    assign,
    clear_bit,
    next_bit,
    pack_window,
    set_bit,
)


class Tries:
    """Documents of `lengths` (Int32[n]), none of them refused by `spec`, of which the first so many
    will make a window.
    """

    def __init__(self, lengths: NDArray[np.int32], spec: PackSpec) -> None:
        self._lengths = lengths
        self._spec = spec
        self._loose: NDArray[np.int32] | None = None
        if spec.strategy in ("greedy", "pool"):
            self._loose = assign(lengths, spec)[0]
            self._rows = np.maximum.accumulate(self._loose[0])

    def rows(self, count: int) -> int:
        """Rows that the first `count` documents fill: `layout(count, key).num_rows`."""
        if self._loose is None:
            return int(
                _first_fit_rows(
                    self._lengths[:count],
                    self._spec.seq_length,
                    OVERSIZE.index(self._spec.oversize),
                )
            )
        pieces = self._pieces(self._loose, count)
        return int(self._rows[pieces - 1]) + 1 if pieces else 0

    def layout(self, count: int, key: int) -> Layout:
        """What `pack_window` makes of the first `count` documents."""
        if self._loose is None:
            return pack_window(self._lengths[:count], self._spec, key)
        pieces = self._pieces(self._loose, count)
        return arrange(
            np.ascontiguousarray(self._loose[:, :pieces]), self.rows(count), self._spec, key
        )

    def _pieces(self, loose: NDArray[np.int32], count: int) -> int:
        return int(np.searchsorted(loose[2], count))  # line 2 is the draw, ascending


@jit
def _first_fit_rows(lengths, seq_length, rule):
    truncate = rule == _TRUNCATE
    rows = np.int64(0)
    of_length = np.zeros(seq_length + 1, np.int64)
    for draw in range(lengths.shape[0]):
        length = np.int64(lengths[draw])
        if length > seq_length and truncate:
            length = np.int64(seq_length)
        if length > seq_length and rule != _SPLIT:
            continue
        full = length // seq_length
        rows += full
        of_length[length - full * seq_length] += 1
    first = np.zeros(LEVELS + 1, np.int64)
    words = seq_length + 1
    for level in range(LEVELS):
        words = (words + 63) // 64
        first[level + 1] = first[level] + words
    bits = np.zeros(first[LEVELS], np.uint64)
    with_room = np.zeros(seq_length + 1, np.int64)  # rows, by their free room
    for length in range(seq_length - 1, 0, -1):
        count = of_length[length]
        while count > 0:
            room = next_bit(bits, first, length)
            if room < 0:
                room, those, opens = np.int64(seq_length), count, True  # as many as are needed
            else:
                those, opens = with_room[room], False
            # A row that took one is the fullest that has room, so it takes the next as well, until
            # none fits.
            each = room // length
            filled = min(those, count // each)
            rest = count - filled * each if filled < those else np.int64(0)
            if opens:
                rows += filled + (rest > 0)
            else:
                with_room[room] -= filled + (rest > 0)
                if with_room[room] == 0:
                    clear_bit(bits, first, room)
            _leave_room(bits, first, with_room, room - each * length, filled)
            if rest > 0:
                _leave_room(bits, first, with_room, room - rest * length, np.int64(1))
            count -= filled * each + rest
    return rows


@jit
def _leave_room(bits, first, with_room, room, count):
    if room > 0 and count > 0:
        if with_room[room] == 0:
            set_bit(bits, first, room)
        with_room[room] += count


_SPLIT, _TRUNCATE = (OVERSIZE.index(rule) for rule in ("split", "truncate"))
