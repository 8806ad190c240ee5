"""Documents that are two, one behind the other: an answer that was preferred and one that was not.

They are drawn, mixed and packed as one document, so that both stand in one row. Where the second
begins, the stored loss mask is SEGMENT_BREAK; in rows they are two segments, of which neither sees
the other.
"""

from __future__ import annotations

from easypipe.core.jit import jit
from easypipe.core.schema import SEGMENT_BREAK


@jit
def open_pairs(segments, positions, mask):
    """Counts Int32[R, T] `segments` and `positions` anew where UInt8[R, T] `mask` says that another
    segment begins, and clears that.
    """
    for r in range(segments.shape[0]):
        before, opened, origin = 0, 0, 0
        for t in range(segments.shape[1]):
            if segments[r, t] == 0:
                continue
            if segments[r, t] != before:
                before, origin = segments[r, t], 0
            if mask[r, t] == SEGMENT_BREAK:
                opened += 1
                origin = positions[r, t]
                mask[r, t] = 0
            segments[r, t] += opened
            positions[r, t] -= origin
