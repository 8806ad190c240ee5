"""The gather kernels: find the pieces of rows, copy tokens and masks into a batch, without the GIL.

piece    consecutive tokens of one document in one row
part     a mapped file of one dataset's token cache (cache/reader.py)
stored   said of a document's tokens in the cache, without an added EOS
held     said of a piece that continues a document from another row, if the document's first token
         is not a target: its targets follow a prompt that the piece lacks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.cache.address import int64_at, uint8_at, uint16_at, uint32_at
from easypipe.cache.blocks import INDEX, note
from easypipe.cache.reader import Buffers
from easypipe.core.jit import jit
from easypipe.core.schema import IGNORE, SEGMENT_BREAK, offsets_of
from easypipe.core.values import Bools, Int32, Int64, Integer, UInt8, UInt64
from easypipe.loader.collate import shift_labels
from easypipe.plan.window import View

NO_CHECKS = np.empty((2, 0), np.int64)  # `todo` if everything was checked
CACHE_LINE = 64  # bytes that the processor reads from memory at a time

# The fields of a View and of a Tables as plain tuples, and arguments of write_rows.
ViewFields = tuple[int, Int64, Int32, Int32, Int64, Int32]
TablesFields = tuple[Int64, Int64, UInt64, UInt64, UInt64, Int64, UInt64, UInt64]
Rule = tuple[Int64, int, bool, bool, tuple[bool, bool, int]]
Columns = tuple[Int32, Int32, Int32, Int32, UInt8, Int32]


class Tables(NamedTuple):
    """The buffers of all datasets, concatenated. D datasets, P parts in all.

    first_part          Int64[D+1]  parts before each dataset, and in all
    first_doc           Int64[P+D]  for dataset d at `first_part[d] + d`: documents of d before each
                                    of its parts, and in all
    ids, offsets, mask  UInt64[P]   addresses; a mask of 0 means that every token is a target
    id_bytes            Int64[D]    2 or 4
    file, checked       UInt64[P]   addresses: of the part's file, and of the flags of its checked
                                    blocks; 0 if nothing has to be checked
    """

    first_part: Int64
    first_doc: Int64
    ids: UInt64
    offsets: UInt64
    mask: UInt64
    id_bytes: Int64
    file: UInt64
    checked: UInt64


def tables(buffers: Sequence[Buffers]) -> Tables:
    parts = [len(b.ids_address) for b in buffers]
    return Tables(
        first_part=offsets_of(parts),
        first_doc=np.concatenate([b.first_doc for b in buffers]).astype(np.int64),
        ids=np.concatenate([b.ids_address for b in buffers]).astype(np.uint64),
        offsets=np.concatenate([b.offsets_address for b in buffers]).astype(np.uint64),
        mask=np.concatenate([b.mask_address for b in buffers]).astype(np.uint64),
        id_bytes=np.array([b.id_bytes for b in buffers], dtype=np.int64),
        file=np.concatenate([b.file_address for b in buffers]).astype(np.uint64),
        checked=np.concatenate([b.checked_address for b in buffers]).astype(np.uint64),
    )


def eos_ids(eos: int | Sequence[int] | None, datasets: int) -> Int64:
    """Returns the id that ends documents of each dataset, -1 for none: Int64[datasets]."""
    return np.full(datasets, -1 if eos is None else eos, np.int64)


@jit
def find(
    tables: Tables, dataset: np.int32, doc: np.int64, todo: Int64, unchecked: Integer
) -> tuple[Integer, np.int64, np.int64, Integer]:
    """Finds the part that contains document `doc` of `dataset`.

    It is the last part that starts at or before the document.

    Returns:
        The part, or -1 if its index must be checked first, which is then noted in `todo`; the
        document's first token in the part; the token after its last; and the number of blocks noted
        in `todo` so far.
    """
    # a range of first_doc: see Tables
    low, high = tables.first_part[dataset] + dataset, tables.first_part[dataset + 1] + dataset
    while high - low > 1:
        middle = (low + high) // 2
        if tables.first_doc[middle] <= doc:
            low = middle
        else:
            high = middle
    part, local = low - dataset, doc - tables.first_doc[low]
    checked = tables.checked[part]
    if todo.shape[1] > 0 and checked != 0 and uint8_at(checked)[0] == 0:
        if unchecked < todo.shape[1]:
            todo[0, unchecked], todo[1, unchecked] = part, INDEX
            unchecked += 1
        return np.int64(-1), np.int64(0), np.int64(0), unchecked
    offsets = int64_at(tables.offsets[part])
    return part, offsets[local], offsets[local + 1], unchecked


@jit
def touch(
    tables: Tables,
    part: Integer,
    span: tuple[Integer, Integer, Integer],
    todo: Int64,
    unchecked: Integer,
) -> Integer:
    """Notes in `todo` the blocks of tokens, and of their flags, that must be checked first.

    It is called only if `todo` has room, because passing all tables takes time.

    Args:
        span: The first token, the number of tokens, and the bytes of one.

    Returns:
        How many blocks are noted so far.
    """
    checked, file = tables.checked[part], tables.file[part]
    if checked != 0:
        begin, count, width = span
        here = np.int64(tables.ids[part]) + begin * width
        unchecked = note(checked, file, here, count * width, part, todo, unchecked)
        if tables.mask[part] != 0:
            here = np.int64(tables.mask[part]) + begin
            unchecked = note(checked, file, here, count, part, todo, unchecked)
    return unchecked


@jit
def write_rows(
    view: ViewFields,
    rows: Int64,
    done: Bools,
    tables: TablesFields,
    rule: Rule,
    columns: Columns,
    todo: Int64,
) -> tuple[int, Integer, Integer]:
    """Writes those rows of the window that are not done. A row of -1 is all padding.

    Nothing is written if a piece is missing or a block must be checked first.

    Args:
        view: The fields of a View.
        rows: Int64[R].
        done: Bool[R], set for what is written.
        tables: The fields of a Tables.
        rule: (eos, pad, hold, want_labels, behind). eos: Int64[D], as `eos_ids` returns it; it
            follows a piece that is one longer than its stored tokens, and is a target if the token
            before it is one. hold: held pieces have no targets. behind: (whether rows are runs;
            whether a run is one segment; slots of a run).
        columns: Int32[R, T] ids, labels if requested, segments, positions; UInt8[R, T] mask unless
            it is [0, 0]; and for runs Int32[R], which `_last_labels` fills.
        todo: Int64[2, n] for the parts and numbers of blocks to check (cache/blocks.py); n = 0
            means no checks.

    Returns:
        The first of `rows` that is not done (R: none), the number of the first piece of the window
        that the cache does not hold (-1: none), and how many blocks must be checked first.
    """
    view, tables = View(*view), Tables(*tables)
    eos, pad, hold, want_labels, (runs, _, _) = rule
    ids, labels, segments, positions, mask, ahead = columns
    masked, left = mask.shape[0] > 0, rows.shape[0]
    found, bad, unchecked = _find_pieces(view, rows, done, tables, eos, ids.shape[1], todo)
    if bad < 0 and runs:
        unchecked = _last_labels(view, rows, tables, rule, ahead, todo, unchecked)
    if bad >= 0 or unchecked > 0:
        return left, bad, unchecked
    at = 0
    for r in range(rows.shape[0]):
        if done[r]:
            continue
        row, piece, last_piece = rows[r] - view.first_row, np.int64(0), np.int64(0)
        if rows[r] >= 0:
            if row < 0 or row >= view.first_piece.shape[0] - 1:
                left = min(left, r)
                continue
            piece, last_piece = view.first_piece[row], view.first_piece[row + 1]
        filled = np.int64(0)
        for n in range(piece, last_piece):
            slot, length = np.int64(view.table[1, n]), np.int64(view.table[4, n])
            draw: np.int32 = view.table[2, n]
            d, stop = view.dataset[draw], slot + length
            part, begin, copied = found[0, at], found[1, at], found[2, at]
            _pad(ids[r, filled:slot], segments[r, filled:slot], positions[r, filled:slot], pad)
            copy_ids(tables, d, part, begin, ids[r, slot : slot + copied])
            if length > copied:
                ids[r, slot + copied] = eos[d]
            _place(segments[r, slot:stop], positions[r, slot:stop], np.int32(n - piece + 1))
            if masked:
                mask[r, filled:slot] = 0
                if hold and found[4, at] > 0:
                    mask[r, slot:stop] = 0
                elif tables.mask[part] != 0:
                    flags = uint8_at(tables.mask[part])
                    copy(flags, begin, mask[r, slot : slot + copied])
                    if length > copied:
                        mask[r, slot + copied] = (
                            flags[begin + copied - 1] if found[3, at] > 0 else 1
                        )
                else:
                    mask[r, slot:stop] = 1
            filled = stop
            at += 1
        _pad(ids[r, filled:], segments[r, filled:], positions[r, filled:], pad)
        if masked:
            mask[r, filled:] = 0
        if want_labels:
            shift_labels(ids[r : r + 1], segments[r : r + 1], mask[r : r + 1], labels[r : r + 1])
        done[r] = True
    return left, np.int64(-1), np.int64(0)


@jit
def _find_pieces(
    view: View, rows: Int64, done: Bools, tables: Tables, eos: Int64, num_slots: int, todo: Int64
) -> tuple[Int64, Integer, Integer]:
    """Finds where the pieces of `rows` are.

    It reads a byte of every cache line of them. Documents are scattered in memory, and copying
    would wait for each in turn; these reads are independent, so that the processor does many at the
    same time.

    Returns:
        Int64[5, n] (the part, the first token in it, how many are stored, whether any of the
        document is before the end of the piece, and whether it is held); the first piece that is
        missing, or -1; and how many blocks of `todo` must be checked first.
    """
    count, unchecked, last_row = 0, np.int64(0), view.first_piece.shape[0] - 1
    for r in range(rows.shape[0]):
        row = rows[r] - view.first_row
        if not done[r] and rows[r] >= 0 and 0 <= row < last_row:
            count += view.first_piece[row + 1] - view.first_piece[row]
    found = np.empty((5, count + 1), np.int64)
    at, touched, checks = 0, np.int64(0), todo.shape[1] > 0
    for r in range(rows.shape[0]):
        row = rows[r] - view.first_row
        if done[r] or rows[r] < 0 or row < 0 or row >= last_row:
            continue
        filled = np.int64(0)
        for n in range(view.first_piece[row], view.first_piece[row + 1]):
            slot, start = np.int64(view.table[1, n]), np.int64(view.table[3, n])
            length = np.int64(view.table[4, n])
            draw: np.int32 = view.table[2, n]
            d: np.int32 = view.dataset[draw]
            doc: np.int64 = view.doc[draw]
            if doc < 0 or doc >= tables.first_doc[tables.first_part[d + 1] + d]:
                return found, n, unchecked
            part, first, end, unchecked = find(tables, d, doc, todo, unchecked)
            if part >= 0:
                begin, width = first + start, tables.id_bytes[d]
                copied = min(length, end - begin)
                if (
                    min(start, length, copied) < 0
                    or slot < filled
                    or slot + length > num_slots
                    or length - copied > (eos[d] >= 0)
                ):
                    return found, n, unchecked
                if checks:
                    unchecked = touch(tables, part, (begin, copied, width), todo, unchecked)
                    if tables.mask[part] != 0 and start > 0:  # its mask shows if it is held
                        unchecked = touch(tables, part, (first, 1, 0), todo, unchecked)
                found[0, at], found[1, at], found[2, at] = part, begin, copied
                found[3, at] = start + copied
                found[4, at] = goes_on_masked(tables.mask[part], first, start)
                at += 1
                lines = uint8_at(tables.ids[part])
                for byte in range(begin * width, (begin + copied) * width, CACHE_LINE):
                    touched += lines[byte]
            filled = slot + length
    found[0, count] = touched  # so that the reads are not optimized away
    return found, np.int64(-1), unchecked


@jit
def _last_labels(
    view: View, rows: Int64, tables: Tables, rule: Rule, out: Int32, todo: Int64, unchecked: Integer
) -> Integer:
    """Writes `out`, Int32[R], the label of the last slot of rows in the window, and of rows of -1.

    It is the token after the row, so that a document that continues in the next row loses no target
    at the cut. If a run is one segment, the token after a document is the first of the next. The
    label is -100 if the row is not full, nothing follows, or the next token is not a target. `rule`
    and `todo` are those of write_rows.

    Returns:
        How many blocks are noted in `todo` so far.
    """
    eos, _, _, _, (_, joined, num_slots) = rule
    for r in range(rows.shape[0]):
        row = rows[r] - view.first_row
        if rows[r] >= 0 and (row < 0 or row >= view.first_piece.shape[0] - 1):
            continue
        out[r] = IGNORE
        if rows[r] < 0:
            continue
        draw, at = token_behind(view, row, joined, num_slots)
        if draw < 0:
            continue
        d: np.int32 = view.dataset[draw]
        part, first, end, unchecked = find(tables, d, view.doc[draw], todo, unchecked)
        if part < 0:
            continue
        place, width = first + at, tables.id_bytes[d]
        stored = place < end  # if not, the token is the added EOS
        token = place if stored else end - 1
        if end > first:
            if todo.shape[1] > 0:
                unchecked = touch(tables, part, (token, 1, width), todo, unchecked)
            if tables.mask[part] != 0 and uint8_at(tables.mask[part])[token] == 0:
                continue
        if not stored:
            out[r] = eos[d]
        elif width == 2:
            out[r] = uint16_at(tables.ids[part])[place]
        else:
            out[r] = uint32_at(tables.ids[part])[place]
    return unchecked


@jit
def token_behind(
    view: View, row: np.int64, joined: bool, num_slots: int
) -> tuple[np.int64, np.int64]:
    """Returns the token after row `row` of the window, which is the label of the last slot.

    `joined` and `num_slots` are the last two of `behind` in write_rows.

    Returns:
        The draw, and which of its tokens; a draw of -1 if the row is not full, or its last segment
        ends with the row.
    """
    nothing = np.int64(-1), np.int64(0)
    last = view.first_piece[row + 1] - 1
    draw, length = np.int64(view.table[2, last]), np.int64(view.table[4, last])
    at = np.int64(view.table[3, last]) + length
    if view.table[1, last] + length < num_slots:
        return nothing
    if at >= view.length[draw]:
        at, draws = np.int64(0), view.length.shape[0]
        draw += 1
        while joined and draw < draws and view.length[draw] == 0:
            draw += 1
        if not joined or draw == draws:
            return nothing
    return draw, at


@jit
def join_segments(segments: Int32, positions: Int32) -> None:
    """Joins each row of Int32[R, T] `segments` into one segment; counts `positions` through it."""
    for r in range(segments.shape[0]):
        for t in range(segments.shape[1]):
            if segments[r, t] > 0:
                segments[r, t] = 1
                positions[r, t] = t


@jit
def open_pairs(segments: Int32, positions: Int32, mask: UInt8) -> None:
    """Splits documents of a preferred and a rejected answer into two segments.

    The two are drawn, mixed and packed as one document, so that both are in one row. At the first
    token of the second, UInt8[R, T] `mask` is SEGMENT_BREAK, which is cleared; Int32[R, T]
    `segments` and `positions` are counted again, so that neither answer sees the other.
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


@jit
def goes_on_masked(mask_address: np.uint64, first: np.int64, start: np.int64) -> bool | np.bool_:
    """Returns whether the piece from token `start` of the document at `first` is held."""
    return start > 0 and mask_address != 0 and uint8_at(mask_address)[first] == 0


# These loops run over slices, which are indexed from 0: the compiler need not check for negative
# indices, and vectorizes the loops.


@jit
def copy_ids(tables: Tables, dataset: np.int32, part: Integer, begin: np.int64, out: Int32) -> None:
    if tables.id_bytes[dataset] == 2:
        copy(uint16_at(tables.ids[part]), begin, out)
    else:
        copy(uint32_at(tables.ids[part]), begin, out)


@jit
def copy(
    source: NDArray[np.uint8 | np.uint16 | np.uint32], begin: np.int64, out: Int32 | UInt8
) -> None:
    for i in range(out.shape[0]):
        out[i] = source[begin + i]


@jit
def _place(segments: Int32, positions: Int32, segment: np.int32) -> None:
    for i in range(segments.shape[0]):
        segments[i] = segment
    for i in range(positions.shape[0]):
        positions[i] = i


@jit
def _pad(ids: Int32, segments: Int32, positions: Int32, pad: int) -> None:
    for i in range(ids.shape[0]):
        ids[i] = pad
    for i in range(segments.shape[0]):
        segments[i] = 0
    for i in range(positions.shape[0]):
        positions[i] = 0
