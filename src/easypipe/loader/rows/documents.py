"""Reads whole documents from token caches, for saving an unpacked mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from easypipe.cache.address import uint8_at
from easypipe.cache.reader import TokenCache, pin
from easypipe.core.aligned import AlignedColumn
from easypipe.core.jit import jit
from easypipe.core.schema import offsets_of
from easypipe.core.values import Array, Int32, Int64, UInt8
from easypipe.loader.rows.aligned import copy_values
from easypipe.loader.rows.gather import NO_CHECKS, Tables, copy, copy_ids, find, tables


class Documents(NamedTuple):
    """n documents; document i has the tokens `ids[offsets[i] : offsets[i + 1]]`.

    Attributes:
        offsets: Int64[n+1].
        ids: Int32[total].
        mask: UInt8[total] if it was requested, else empty.
        values: The values of aligned columns, [total] or [total, width].
    """

    offsets: Int64
    ids: Int32
    mask: UInt8
    values: Mapping[str, Array]


def gather_documents(
    caches: Sequence[TokenCache],
    dataset: Int32,
    docs: Int64,
    *,
    with_mask: bool,
    aligned: Sequence[AlignedColumn] = (),
) -> Documents:
    """Returns the stored tokens of documents of several caches.

    Args:
        caches: The token caches.
        dataset: Int32[n], the number of each document's cache.
        docs: Int64[n], the number of each document within its cache.
        with_mask: Whether to read loss masks; the mask is 1 for a cache without one.
        aligned: The aligned columns to read.

    Raises:
        IndexError: A document is not in its cache.
    """
    lengths = np.empty(docs.size, np.int64)
    for i, cache in enumerate(caches):
        here = dataset == i
        lengths[here] = cache.lengths(docs[here])
    offsets = offsets_of(lengths)
    where = tables([cache.buffers() for cache in caches])
    total = int(offsets[-1])
    ids = np.empty(total, np.int32)
    mask = np.empty(total if with_mask else 0, np.uint8)
    with pin(caches, dataset, docs):
        _copy(dataset, docs, where, NO_CHECKS, offsets, ids, mask)
        values = {
            column.name: copy_values(
                column,
                (dataset, docs, offsets),
                where,
                np.concatenate([cache.values(column.name) for cache in caches]),
            )
            for column in aligned
        }
    return Documents(offsets, ids, mask, values)


@jit
def _copy(
    dataset: Int32,
    docs: Int64,
    tables: Tables,
    todo: Int64,
    offsets: Int64,
    ids: Int32,
    mask: UInt8,
) -> None:
    for n in range(docs.shape[0]):
        d, start, stop = dataset[n], offsets[n], offsets[n + 1]
        part, begin, _, _ = find(tables, d, docs[n], todo, 0)
        copy_ids(tables, d, part, begin, ids[start:stop])
        if mask.shape[0] > 0:
            if tables.mask[part] != 0:
                copy(uint8_at(tables.mask[part]), begin, mask[start:stop])
            else:
                mask[start:stop] = 1
