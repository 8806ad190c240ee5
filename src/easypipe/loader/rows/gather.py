"""The gather kernel: tokens of many documents into the rows of one batch, without the GIL.

piece    a run of tokens of one document that stands in one row
part     a mapped file of one dataset's token cache (cache/reader.py)
stored   a document's tokens in the cache, without an EOS that is added to it
held     a piece that goes on with a document of another row, whose first token is no target: what
         is trained there follows a prompt, which the piece lacks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from easypipe.cache.address import int64_at, uint8_at, uint16_at, uint32_at
from easypipe.cache.blocks import INDEX, note
from easypipe.core.jit import jit
from easypipe.loader.collate import shift_labels

NO_CHECKS = np.empty((2, 0), np.int64)  # `todo` where everything was checked
CACHE_LINE = 64  # bytes that memory is read by


class Mapped(Protocol):
    """What `TokenCache.buffers()` gives: see cache/reader.py."""

    @property
    def first_doc(self) -> NDArray[np.int64]: ...
    @property
    def ids_address(self) -> NDArray[np.uint64]: ...
    @property
    def offsets_address(self) -> NDArray[np.uint64]: ...
    @property
    def mask_address(self) -> NDArray[np.uint64]: ...
    @property
    def file_address(self) -> NDArray[np.uint64]: ...
    @property
    def checked_address(self) -> NDArray[np.uint64]: ...
    @property
    def id_bytes(self) -> int: ...


class Tables(NamedTuple):
    """The buffers of all datasets, one after the other. D datasets, P parts in all.

    first_part  Int64[D+1]  parts before each dataset, and in all
    first_doc   Int64[P+D]  of dataset d at `first_part[d] + d`: documents of d before each of its
    parts, and in all ids, offsets, mask  UInt64[P]  addresses; a mask of 0 means that every token
    is a target id_bytes    Int64[D]    2 or 4
    file, checked  UInt64[P]  addresses: of the part's file, and of the flags of what was checked of
    it; 0 where nothing has to be
    """

    first_part: NDArray[np.int64]
    first_doc: NDArray[np.int64]
    ids: NDArray[np.uint64]
    offsets: NDArray[np.uint64]
    mask: NDArray[np.uint64]
    id_bytes: NDArray[np.int64]
    file: NDArray[np.uint64]
    checked: NDArray[np.uint64]


def tables(buffers: Sequence[Mapped]) -> Tables:
    parts = [len(b.ids_address) for b in buffers]
    return Tables(
        first_part=np.concatenate([[0], np.cumsum(parts)]).astype(np.int64),
        first_doc=np.concatenate([b.first_doc for b in buffers]).astype(np.int64),
        ids=np.concatenate([b.ids_address for b in buffers]).astype(np.uint64),
        offsets=np.concatenate([b.offsets_address for b in buffers]).astype(np.uint64),
        mask=np.concatenate([b.mask_address for b in buffers]).astype(np.uint64),
        id_bytes=np.array([b.id_bytes for b in buffers], dtype=np.int64),
        file=np.concatenate([b.file_address for b in buffers]).astype(np.uint64),
        checked=np.concatenate([b.checked_address for b in buffers]).astype(np.uint64),
    )


def eos_ids(eos: int | Sequence[int] | None, datasets: int) -> NDArray[np.int64]:
    """Int64[datasets], as the kernels take it: the id that ends documents of each dataset, -1 where
    nothing is added.
    """
    return np.full(datasets, -1 if eos is None else eos, np.int64)


@jit
def part_of(first_part, first_doc, dataset, doc):
    """The part that document `doc` of `dataset` lies in, the last that starts at or before it; and
    the documents before that part.
    """
    # of first_doc: see Tables
    low, high = first_part[dataset] + dataset, first_part[dataset + 1] + dataset
    while high - low > 1:
        middle = (low + high) // 2
        if first_doc[middle] <= doc:
            low = middle
        else:
            high = middle
    return low - dataset, first_doc[low]


@jit
def write_rows(
    window,
    rows,
    done,
    tables,
    eos,
    pad,
    hold,
    want_labels,
    ids,
    labels,
    segments,
    positions,
    mask,
    todo,
):
    """Writes those rows of the window that are not done. A row of -1 is all padding.

    Into Int32[R, T] `ids`, `segments`, `positions`, into `labels` if they are wanted, and into
    UInt8[R, T] `mask` unless it is [0, 0].

    window: its first row, then first_piece, table, dataset, doc (plan/window.py). rows: Int64[R],
    done: Bool[R], set for what is written.
    eos: Int64[D], of each dataset the id that follows the stored tokens where a piece is one longer
    than they are; -1 where there is none. An added EOS is a target where the token before it is
    one. hold: held pieces have no targets. Returns the first of `rows` that is not done (R: none),
    the number of the first piece of the window that the cache does not hold (-1: none), and how
    many blocks of the files have to be checked first; where there is such a piece or block, nothing
    is written. todo: Int64[2, n] for those, their parts and their numbers (cache/blocks.py); n =
    0 asks for no checks.
    """
    first_row, first_piece, table, dataset_of, doc_of = window
    _, _, ids_at, _, mask_at, id_bytes, _, _ = tables
    masked = mask.shape[0] > 0
    found, bad, unchecked = _find(
        first_row,
        first_piece,
        table,
        dataset_of,
        doc_of,
        rows,
        done,
        tables,
        eos,
        ids.shape[1],
        todo,
    )
    left = rows.shape[0]
    if bad >= 0 or unchecked > 0:
        return left, bad, unchecked
    at = 0
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
        for n in range(piece, last_piece):
            slot, length = np.int64(table[1, n]), np.int64(table[4, n])
            part, begin, copied = found[0, at], found[1, at], found[2, at]
            at += 1
            _pad(ids[r, filled:slot], segments[r, filled:slot], positions[r, filled:slot], pad)
            if id_bytes[dataset_of[table[2, n]]] == 2:
                copy(uint16_at(ids_at[part]), begin, ids[r, slot : slot + copied])
            else:
                copy(uint32_at(ids_at[part]), begin, ids[r, slot : slot + copied])
            if length > copied:
                ids[r, slot + copied] = eos[dataset_of[table[2, n]]]
            _place(
                segments[r, slot : slot + length],
                positions[r, slot : slot + length],
                np.int32(n - piece + 1),
            )
            if masked:
                mask[r, filled:slot] = 0
                if hold and found[4, at - 1] > 0:
                    mask[r, slot : slot + length] = 0
                elif mask_at[part] != 0:
                    flags = uint8_at(mask_at[part])
                    copy(flags, begin, mask[r, slot : slot + copied])
                    if length > copied:
                        mask[r, slot + copied] = (
                            flags[begin + copied - 1] if found[3, at - 1] > 0 else 1
                        )
                else:
                    mask[r, slot : slot + length] = 1
            filled = slot + length
        _pad(ids[r, filled:], segments[r, filled:], positions[r, filled:], pad)
        if masked:
            mask[r, filled:] = 0
        if want_labels:
            shift_labels(ids[r : r + 1], segments[r : r + 1], mask[r : r + 1], labels[r : r + 1])
        done[r] = True
    return left, np.int64(-1), np.int64(0)


@jit
def _find(
    first_row, first_piece, table, dataset_of, doc_of, rows, done, tables, eos, num_slots, todo
):
    """Where the pieces of `rows` lie, Int64[5, n]: the part, the first token in it, how many are
    stored, whether any of the document stands before the end of the piece, and whether it is held;
    the first piece that is not there, or -1; and how many blocks of `todo` have to be checked
    first.

    Reads a byte of every cache line of them. Documents lie anywhere in memory, and each would
    otherwise be waited for in turn; these reads do not depend on one another, so that the processor
    has many under way at once.
    """
    first_part, first_doc, ids_at, offsets_at, mask_at, id_bytes, file_at, checked_at = tables
    count, unchecked, checking = 0, np.int64(0), todo.shape[1] > 0
    for r in range(rows.shape[0]):
        row = rows[r] - first_row
        if not done[r] and rows[r] >= 0 and 0 <= row < first_piece.shape[0] - 1:
            count += first_piece[row + 1] - first_piece[row]
    found = np.empty((5, count + 1), np.int64)
    at, touched = 0, np.int64(0)
    for r in range(rows.shape[0]):
        row = rows[r] - first_row
        if done[r] or rows[r] < 0 or row < 0 or row >= first_piece.shape[0] - 1:
            continue
        filled = np.int64(0)
        for n in range(first_piece[row], first_piece[row + 1]):
            slot, start, length = (
                np.int64(table[1, n]),
                np.int64(table[3, n]),
                np.int64(table[4, n]),
            )
            d, doc = dataset_of[table[2, n]], doc_of[table[2, n]]
            if doc < 0 or doc >= first_doc[first_part[d + 1] + d]:
                return found, n, unchecked
            part, before = part_of(first_part, first_doc, d, doc)
            # nothing of the part may be believed yet
            if checking and checked_at[part] != 0 and uint8_at(checked_at[part])[0] == 0:
                if unchecked < todo.shape[1]:
                    todo[0, unchecked], todo[1, unchecked] = part, INDEX
                    unchecked += 1
                filled = slot + length
                continue
            offsets = int64_at(offsets_at[part])
            local = doc - before
            begin = offsets[local] + start
            copied = min(length, offsets[local + 1] - begin)
            if (
                start < 0
                or length < 0
                or copied < 0
                or slot < filled
                or slot + length > num_slots
                or length - copied > (eos[d] >= 0)
            ):
                return found, n, unchecked
            if checking and checked_at[part] != 0:
                ids = np.int64(ids_at[part]) + begin * id_bytes[d]
                unchecked = note(
                    checked_at[part],
                    file_at[part],
                    ids,
                    copied * id_bytes[d],
                    part,
                    todo,
                    unchecked,
                )
                if mask_at[part] != 0:
                    flags = np.int64(mask_at[part]) + begin
                    unchecked = note(
                        checked_at[part], file_at[part], flags, copied, part, todo, unchecked
                    )
                    if start > 0:
                        unchecked = note(
                            checked_at[part], file_at[part], flags - start, 1, part, todo, unchecked
                        )
            found[4, at] = goes_on_masked(mask_at[part], offsets[local], start)
            found[0, at], found[1, at], found[2, at], found[3, at] = (
                part,
                begin,
                copied,
                start + copied,
            )
            at += 1
            filled = slot + length
            lines = uint8_at(ids_at[part])
            for byte in range(begin * id_bytes[d], (begin + copied) * id_bytes[d], CACHE_LINE):
                touched += lines[byte]
    found[0, count] = touched  # so that the reads are not optimised away
    return found, np.int64(-1), unchecked


@jit
def goes_on_masked(mask_address, first, start):
    """Whether a piece from token `start` of the document whose first token is `first` of its part
    is held.
    """
    return start > 0 and mask_address != 0 and uint8_at(mask_address)[first] == 0


# Slices count from 0, so the compiler need not look for negative indices, and makes vector
# instructions of these loops.


@jit
def copy(source, begin, out):
    for i in range(out.shape[0]):
        out[i] = source[begin + i]


@jit
def _place(segments, positions, segment):
    for i in range(segments.shape[0]):
        segments[i] = segment
    for i in range(positions.shape[0]):
        positions[i] = i


@jit
def _pad(ids, segments, positions, pad):
    for i in range(ids.shape[0]):
        ids[i] = pad
    for i in range(segments.shape[0]):
        segments[i] = 0
    for i in range(positions.shape[0]):
        positions[i] = 0
