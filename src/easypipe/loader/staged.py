"""Pins the documents that a batch needs in their token caches before kernels read them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from easypipe.cache.reader import TokenCache, pin
from easypipe.plan.window import Window


def staged_rows(
    caches: Sequence[TokenCache], window: Window[int], rows: NDArray[np.int64]
) -> contextlib.AbstractContextManager[None]:
    """The documents of those of `rows` (Int64[R]) that stand in the window, and the one behind
    each, whose first token may be a label.
    """
    if not any(cache.comes_and_goes for cache in caches):
        return contextlib.nullcontext()
    layout = window.layout
    here = (
        rows[(rows >= window.first_row) & (rows < window.first_row + layout.num_rows)]
        - window.first_row
    )
    pieces = [
        np.arange(a, b)
        for a, b in zip(layout.first_piece[here], layout.first_piece[here + 1], strict=True)
    ]
    draws = np.unique(
        layout.table[2, np.concatenate([np.empty(0, np.int64), *pieces])].astype(np.int64)
    )
    full = np.flatnonzero(window.length > 0)
    behind = np.searchsorted(full, draws, side="right")
    draws = np.union1d(draws, full[behind[behind < full.size]])
    return pin(caches, window.dataset[draws], window.doc[draws])
