"""Which of several streams gives the next row, where they end at different rows.

stream  a sequence of rows; `ends[s]` is how many stream s has, NEVER where it has not ended yet (or
never does) turn    one row of each stream that has not ended, lowest number first: turn r holds the rows with number r
order   turn after turn. While no stream has ended, S streams give equally many rows of each batch
that S divides; where some have
        ended, the others stand in for them, each within one row of the others.

A stream that has a row behind some place of the order does not change what comes before that place,
wherever it ends. So the order up to a place is known as soon as every stream either has a row
behind it or has ended.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NEVER = 1 << 62


def rows_before(ends: NDArray[np.int64], row: int, stream: int) -> int:
    """Rows of all streams that come before row `row` of stream `stream`."""
    return int(np.minimum(ends, row + (np.arange(len(ends)) < stream)).sum())


def given_by(ends: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Of the first `count` rows, how many each stream gives: Int64[S]. They sum to `count`, or to
    less where all streams have ended.
    """
    in_order = np.sort(np.minimum(ends, count + 1))
    ended = np.cumsum(in_order) - in_order  # rows of the streams that end before
    live = np.arange(len(ends), 0, -1)
    place = int(np.searchsorted(ended + in_order * live, count, side="right"))
    if place == len(ends):
        return ends.copy()
    turn, left = divmod(count - int(ended[place]), int(live[place]))
    rows = np.minimum(ends, turn)
    rows[np.flatnonzero(ends > turn)[:left]] += 1
    return rows


def in_order_of_streams(
    ends: NDArray[np.int64], start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(stream, row of it) of the rows `start` to `stop`, stream after stream; (-1, -1) behind the
    last. Int64[stop - start] each.
    """
    first, last = given_by(ends, start), given_by(ends, stop)
    counts = last - first
    streams, rows = np.full((2, stop - start), -1, np.int64)
    total = int(counts.sum())
    streams[:total] = np.repeat(np.arange(len(ends)), counts)
    rows[:total] = np.arange(total) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return streams, rows


def known_before(ends: NDArray[np.int64], row: int, stream: int) -> NDArray[np.int64]:
    """`ends` as far as they change what comes before row `row` of `stream`: whoever stands there
    knows no others.
    """
    return np.where(ends < row + (np.arange(len(ends)) < stream), ends, NEVER)
