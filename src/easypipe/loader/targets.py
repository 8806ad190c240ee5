"""How many labels of a plan are trained: its loss masks counted where they lie, in one compiled pass over a byte a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from easypipe.loader.gather import tables
from easypipe.plan.jit import jit
from easypipe.plan.windows import Plan
from easypipe.sources.address import int64_at, uint8_at
from easypipe.sources.cache import TokenCache


def count_targets(plan: Plan, caches: Sequence[TokenCache], num_rows: int) -> NDArray[np.int64]:
    """Int64[datasets]: tokens of the first `num_rows` rows that are somebody's label, added EOS tokens included."""
    found = np.zeros(len(caches), np.int64)
    where = tables([cache.buffers() for cache in caches])
    row = 0
    while row < num_rows:
        window = plan.window_at(row)
        last = window.layout.first_piece[min(num_rows - window.first_row, window.num_rows)]
        _count(last, window.layout.table, window.dataset, window.doc, *where[:5], found)
        row = window.after.first_row
    return found


@jit
def _count(pieces, table, dataset_of, doc_of, first_part, first_doc, ids_at, offsets_at, mask_at, found):
    for n in range(pieces):
        draw, start, length = table[2, n], np.int64(table[3, n]), np.int64(table[4, n])
        d, doc = dataset_of[draw], doc_of[draw]
        low, high = first_part[d] + d, first_part[d + 1] + d  # of first_doc: see gather.Tables
        while high - low > 1:  # the last part that starts at or before doc
            middle = (low + high) // 2
            if first_doc[middle] <= doc:
                low = middle
            else:
                high = middle
        part = low - d
        if mask_at[part] == 0:  # every token is a target, but the first of a piece is nobody's next token
            found[d] += length - 1
            continue
        offsets, local = int64_at(offsets_at[part]), doc - first_doc[low]
        begin, end = offsets[local] + start, offsets[local + 1]
        flags = uint8_at(mask_at[part])
        count = np.int64(0)
        for t in range(begin + 1, min(begin + length, end)):
            count += flags[t]
        if begin + length > end and length > 1:  # an added EOS is a target where the token before it is one
            count += flags[end - 1]
        found[d] += count
