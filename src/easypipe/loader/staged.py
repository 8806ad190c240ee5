"""Before kernels read: tokens of a bucket, or of more files than may be mapped at once, are there
for as long as a block lasts, and those that nobody touched before are held against their
checksums."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from easypipe.cache.reader import TokenCache
from easypipe.plan.windows import Window


@contextlib.contextmanager
def staged(caches: Sequence[TokenCache], dataset: NDArray[np.integer], docs: NDArray[np.int64]):
    """Documents `docs` (Int64[n]) of the caches numbered `dataset` (Int[n]); those that a cache
    does not have are left to the reader.
    """
    with contextlib.ExitStack() as stack:
        for i, cache in enumerate(caches):
            if cache.comes_and_goes or cache.pending:
                asked = np.unique(docs[dataset == i])
                stack.enter_context(cache.staged(asked[(asked >= 0) & (asked < cache.num_docs)]))
        yield


def staged_rows(
    caches: Sequence[TokenCache], window: Window, rows: NDArray[np.int64]
) -> contextlib.AbstractContextManager[None]:
    """The documents of those of `rows` (Int64[R]) that stand in the window, and the one behind
    each, whose first token may be a label.
    """
    if not any(cache.comes_and_goes for cache in caches):
        return contextlib.nullcontext()
    layout = window.layout
    here = (
        rows[(rows >= window.first_row) & (rows < window.first_row + window.num_rows)]
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
    return staged(caches, window.dataset[draws], window.doc[draws])
