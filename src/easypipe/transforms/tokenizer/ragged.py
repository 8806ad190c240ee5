"""Lists of token ids, one after the other, cut and framed all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def truncate(
    offsets: NDArray[np.int64], ids: NDArray[np.unsignedinteger], limit: int | None
) -> tuple[NDArray[np.int64], NDArray[np.unsignedinteger], NDArray[np.int64]]:
    """(offsets, ids, Int64[n] how many were cut off) of lists that keep their first `limit` ids;
    None keeps all.
    """
    lengths = np.diff(offsets)
    cut = np.zeros_like(lengths) if limit is None else np.maximum(lengths - limit, 0)
    if not cut.any():
        return offsets, ids, cut
    step = np.zeros(len(ids) + 1, np.int8)  # +1 where a cut begins, -1 where the next document does
    step[(offsets[1:] - cut)[cut > 0]] += 1
    step[offsets[1:][cut > 0]] -= 1
    keep = np.cumsum(step[:-1], dtype=np.int8) == 0
    return np.concatenate([[0], np.cumsum(lengths - cut)]).astype(np.int64), ids[keep], cut


def surround(
    offsets: NDArray[np.int64],
    ids: NDArray[np.unsignedinteger],
    prefix: Sequence[int],
    suffix: Sequence[int],
) -> tuple[NDArray[np.int64], NDArray[np.unsignedinteger]]:
    """(offsets, ids) of lists with `prefix` before and `suffix` behind each."""
    room = len(prefix) + len(suffix)
    if not room:
        return offsets, ids
    wide = offsets + np.arange(len(offsets), dtype=np.int64) * room
    out = np.empty(int(wide[-1]), ids.dtype)
    content = np.ones(len(out), np.bool_)
    for places, tokens in ((wide[:-1], prefix), (wide[1:] - len(suffix), suffix)):
        for i, token in enumerate(tokens):
            out[places + i] = token
            content[places + i] = False
    out[content] = ids
    return wide, out
