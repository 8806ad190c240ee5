"""Chooses a few widths for rows of many lengths, from the lengths alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from easypipe.core.values import Int64, Integers

# The most lengths that may become a width; choosing costs their square times the buckets.
CANDIDATES = 1024


def length_counts(lengths: Iterable[Integers]) -> Int64:
    """Counts how many rows have each length.

    Args:
        lengths: The lengths of the rows, in several pieces.

    Returns:
        Int64[longest + 1].
    """
    counts = np.zeros(1, np.int64)
    for piece in lengths:
        found = np.bincount(piece, minlength=counts.size)
        found[: counts.size] += counts
        counts = found
    return counts


def bucket_widths(counts: Int64, buckets: int) -> tuple[int, ...]:
    """Returns at most `buckets` widths, ascending, that leave the fewest slots in all.

    Each row takes the first width that holds it.

    Law: of all sets of this many widths, none has fewer slots. This is dynamic programming over the
    lengths that occur; if these are more than CANDIDATES, it takes every n-th of them and the last.
    Only integers are used, so that every process chooses the same.

    Args:
        counts: Int64[longest + 1], how many rows have each length.
        buckets: The most widths to return.

    Returns:
        The widths, the last one being the longest length; () if no row has a token.
    """
    lengths = np.flatnonzero(counts)
    lengths = lengths[lengths > 0]
    if not lengths.size:
        return ()
    if lengths.size > CANDIDATES:
        lengths = lengths[np.linspace(0, lengths.size - 1, CANDIDATES).astype(np.int64)]
    # Int64[L + 1]: rows that the first i widths hold
    rows = np.concatenate([[0], np.cumsum(counts)[lengths] - counts[0]])
    n = lengths.size
    best = lengths * rows[1:]  # slots of all rows up to each length, with one width
    chosen: list[Int64] = []
    for _ in range(min(buckets, n) - 1):
        # With one width more: the last takes the rows after j, the rows before it take what they
        # took with the widths so far.
        slots = np.concatenate([[0], best])[None, :] + lengths[:, None] * (
            rows[1:, None] - rows[None, :]
        )
        slots[np.arange(n + 1)[None, :] > np.arange(n)[:, None]] = np.iinfo(np.int64).max
        before = np.argmin(slots, axis=1)
        best = slots[np.arange(n), before]
        chosen.append(before)
    widths, last = [int(lengths[-1])], n - 1
    for before in reversed(chosen):
        last = int(before[last]) - 1
        if last < 0:  # fewer widths do as well
            break
        widths.append(int(lengths[last]))
    return tuple(reversed(widths))
