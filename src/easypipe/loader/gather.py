"""The gather: tokens of many documents, straight from mapped files into the rows of one batch, in one compiled pass without the GIL.

piece    a run of tokens of one document that stands in one row
part     a mapped file of one dataset's token cache (sources/cache.py)
stored   a document's tokens in the cache, without an EOS that is added to it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from easypipe.loader.collate import shift_labels
from easypipe.plan.jit import jit
from easypipe.sources.address import int64_at, uint8_at, uint16_at, uint32_at


class Mapped(Protocol):
    """What `TokenCache.buffers()` gives: see sources/cache.py."""

    @property
    def first_doc(self) -> NDArray[np.int64]: ...
    @property
    def ids_address(self) -> NDArray[np.uint64]: ...
    @property
    def offsets_address(self) -> NDArray[np.uint64]: ...
    @property
    def mask_address(self) -> NDArray[np.uint64]: ...
    @property
    def id_bytes(self) -> int: ...


class Tables(NamedTuple):
    """The buffers of all datasets, one after the other. D datasets, P parts in all.

    first_part  Int64[D+1]  parts before each dataset, and in all
    first_doc   Int64[P+D]  of dataset d at `first_part[d] + d`: documents of d before each of its parts, and in all
    ids, offsets, mask  UInt64[P]  addresses; a mask of 0 means that every token is a target
    id_bytes    Int64[D]    2 or 4
    """

    first_part: NDArray[np.int64]
    first_doc: NDArray[np.int64]
    ids: NDArray[np.uint64]
    offsets: NDArray[np.uint64]
    mask: NDArray[np.uint64]
    id_bytes: NDArray[np.int64]


def tables(buffers: Sequence[Mapped]) -> Tables:
    parts = [len(b.ids_address) for b in buffers]
    return Tables(
        first_part=np.concatenate([[0], np.cumsum(parts)]).astype(np.int64),
        first_doc=np.concatenate([b.first_doc for b in buffers]).astype(np.int64),
        ids=np.concatenate([b.ids_address for b in buffers]).astype(np.uint64),
        offsets=np.concatenate([b.offsets_address for b in buffers]).astype(np.uint64),
        mask=np.concatenate([b.mask_address for b in buffers]).astype(np.uint64),
        id_bytes=np.array([b.id_bytes for b in buffers], dtype=np.int64),
    )


@jit
def part_of(first_part, first_doc, dataset, doc):
    """The part that document `doc` of `dataset` lies in, the last that starts at or before it; and the documents before that part."""
    low, high = first_part[dataset] + dataset, first_part[dataset + 1] + dataset  # of first_doc: see Tables
    while high - low > 1:
        middle = (low + high) // 2
        if first_doc[middle] <= doc:
            low = middle
        else:
            high = middle
    return low - dataset, first_doc[low]


@jit
def write_rows(window, rows, done, tables, eos, pad, want_labels, ids, labels, segments, positions, mask):
    """Writes those rows of the window that are not done. A row of -1 is all padding.

    Into Int32[R, T] `ids`, `segments`, `positions`, into `labels` if they are wanted, and into UInt8[R, T] `mask` unless it is [0, 0].

    window: its first row, then first_piece, table, dataset, doc (plan/window.py). rows: Int64[R], done: Bool[R], set for what is written.
    eos: the id that follows the stored tokens where a piece is one longer than they are; -1 where there is none. An added EOS is a target
    where the token before it is one. Returns the first of `rows` that is not done (R: none), and the number of the first piece of the
    window that the cache does not hold (-1: none), nothing behind it written.
    """
    first_row, first_piece, table, dataset_of, doc_of = window
    first_part, first_doc, ids_at, offsets_at, mask_at, id_bytes = tables
    masked = mask.shape[0] > 0
    num_slots = ids.shape[1]
    left = rows.shape[0]
    for r in range(rows.shape[0]):
        if done[r]:
            continue
        row, piece, last_piece = rows[r] - first_row, np.int64(0), np.int64(0)
        if rows[r] >= 0:
            if row < 0 or row >= first_piece.shape[0] - 1:
                left = min(left, r)
                continue
            piece, last_piece = first_piece[row], first_piece[row + 1]
        filled = np.int64(0)
        segment = np.int32(0)
        for n in range(piece, last_piece):
            draw, slot, start, length = table[2, n], np.int64(table[1, n]), np.int64(table[3, n]), np.int64(table[4, n])
            d, doc = dataset_of[draw], doc_of[draw]
            if doc < 0 or doc >= first_doc[first_part[d + 1] + d]:
                return left, n
            part, before = part_of(first_part, first_doc, d, doc)
            offsets = int64_at(offsets_at[part])
            local = doc - before
            begin = offsets[local] + start
            copied = min(length, offsets[local + 1] - begin)
            missing = length - copied
            if start < 0 or length < 0 or copied < 0 or slot < filled or slot + length > num_slots or missing > (1 if eos >= 0 else 0):
                return left, n
            _pad(ids, segments, positions, mask, masked, r, filled, slot, pad)
            if id_bytes[d] == 2:
                source16 = uint16_at(ids_at[part])
                for i in range(copied):
                    ids[r, slot + i] = source16[begin + i]
            else:
                source32 = uint32_at(ids_at[part])
                for i in range(copied):
                    ids[r, slot + i] = source32[begin + i]
            if masked:
                if mask_at[part] != 0:
                    flags = uint8_at(mask_at[part])
                    for i in range(copied):
                        mask[r, slot + i] = flags[begin + i]
                    if missing:
                        last = begin + copied - 1
                        mask[r, slot + copied] = flags[last] if last >= offsets[local] else 1
                else:
                    for i in range(length):
                        mask[r, slot + i] = 1
            if missing:
                ids[r, slot + copied] = eos
            segment += np.int32(1)
            for i in range(length):
                segments[r, slot + i] = segment
                positions[r, slot + i] = i
            filled = slot + length
        _pad(ids, segments, positions, mask, masked, r, filled, num_slots, pad)
        if want_labels:
            shift_labels(ids[r : r + 1], segments[r : r + 1], mask[r : r + 1], labels[r : r + 1])
        done[r] = True
    return left, np.int64(-1)


@jit
def _pad(ids, segments, positions, mask, masked, r, start, stop, pad):
    for t in range(start, stop):
        ids[r, t] = pad
        segments[r, t] = 0
        positions[r, t] = 0
    if masked:
        for t in range(start, stop):
            mask[r, t] = 0
