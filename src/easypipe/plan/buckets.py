"""A few widths for rows of many lengths, chosen from the lengths alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from easypipe.core.values import Int64, Integers

CANDIDATES = 1024  # lengths that may become a width; choosing costs their square times the buckets


def length_counts(lengths: Iterable[Integers]) -> Int64:
    """How many rows have each length: Int64[longest + 1], of pieces of all their lengths."""
    counts = np.zeros(1, np.int64)
    for piece in lengths:
        found = np.bincount(piece, minlength=counts.size)
        found[: counts.size] += counts
        counts = found
    return counts


def bucket_widths(counts: Int64, buckets: int) -> tuple[int, ...]:
    """At most `buckets` widths, ascending, the last one the longest length: those with the fewest
    slots in all, where each row takes the first width that holds it. `()` where there is no row
    with a token.

    counts: Int64[longest + 1], how many rows have each length. Law: of all sets of so many widths
    none has fewer slots (dynamic programming over the lengths that occur; where more than
    CANDIDATES do, over every so many-th of them and the last). Integers only, so that every process
    chooses the same.
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
        # With one width more: the last takes the rows behind j, those before it what they took with
        # the widths so far.
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
