"""Packing: which row and slot each piece of a document gets, by strategy; what is too long for one.

window  the documents that are packed together; a row never holds two windows
draw    a document of the window, by its index in draw order
piece   a run of a document's tokens that is in one row; it becomes one segment
slot    one token place in a row

docs/packing.md describes the strategies; tests/plan_oracle.py holds their oracles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from easypipe.core.errors import PlanError
from easypipe.core.jit import jit
from easypipe.core.values import Int32, Int64, Integer, Integers, UInt64
from easypipe.plan.order import permute

Strategy = Literal["greedy", "pool", "first_fit", "stream"]
Oversize = Literal["split", "truncate", "drop", "error"]

STRATEGIES: tuple[Strategy, ...] = ("greedy", "pool", "first_fit", "stream")
OVERSIZE: tuple[Oversize, ...] = ("split", "truncate", "drop", "error")
MAX_SEQ_LENGTH = 1 << 24


@dataclass(frozen=True)
class PackSpec:
    """How documents are packed into rows of `seq_length` tokens.

    Args:
        seq_length: The slots of a row.
        strategy: "greedy" puts a document into the only open row, and opens the next row if it does
            not fit. "pool" keeps `num_packers` rows open and takes the fullest one that fits.
            "first_fit" is best-fit decreasing: it sees the whole window and takes the fullest row
            that fits, longest document first. "stream" (in options `concat`) puts documents end to
            end and begins a row wherever the row before it is full.
        num_packers: The rows that "pool" keeps open.
        oversize: What happens to a document longer than a row: it is cut into full rows and a
            remainder ("split"), cut off ("truncate"), left out ("drop"), or refused ("error").
            Documents that fit a row are never cut. "stream" cuts where rows end, and supports only
            "split".
        shuffle_rows: Permutes the rows of a window; without it first_fit returns rows of long
            documents first.
    """

    seq_length: int
    strategy: Strategy = "greedy"
    num_packers: int = 16
    oversize: Oversize = "split"
    shuffle_rows: bool = True

    def __post_init__(self) -> None:
        assert 1 <= self.seq_length <= MAX_SEQ_LENGTH, f"{self.seq_length} tokens make no row"
        assert self.strategy in STRATEGIES, f"no strategy {self.strategy!r}"
        assert self.oversize in OVERSIZE, f"no rule {self.oversize!r}"
        assert not self.concat or self.oversize == "split", "a stream cuts everywhere"
        assert self.num_packers > 0, "no open row"

    @property
    def concat(self) -> bool:
        """Whether documents are put end to end, across the ends of rows.

        In fingerprints and states of plans the strategy has its older name, "stream".
        """
        return self.strategy == "stream"


@dataclass(frozen=True)
class Layout:
    """The places of the pieces of a window, sorted by row, then slot.

    Attributes:
        table: Int32[5, pieces], with the lines `row`, `slot`, `draw`, `start` and `length`. A piece
            is tokens `start` to `start + length` of document `draw` and fills slots `slot` to `slot
            + length` of `row`.
        first_piece: Int64[num_rows + 1], where each row's pieces begin.
    """

    table: Int32
    first_piece: Int64

    @property
    def num_rows(self) -> int:
        return self.first_piece.shape[0] - 1

    @property
    def row(self) -> Int32:
        return self.table[0]

    @property
    def slot(self) -> Int32:
        return self.table[1]

    @property
    def draw(self) -> Int32:
        return self.table[2]

    @property
    def start(self) -> Int32:
        return self.table[3]

    @property
    def length(self) -> Int32:
        return self.table[4]


def pack_window(lengths: Int32, spec: PackSpec, key: int) -> Layout:
    """Packs documents of `lengths` into rows. Documents without tokens get no piece.

    Args:
        lengths: Int32[n], tokens, including EOS.
        spec: The strategy and the row length.
        key: Decides the order of the rows.

    Raises:
        PlanError: A document is longer than `seq_length` under oversize "error".
    """
    lengths = np.require(lengths, dtype=np.int32, requirements=["C", "W"])
    if spec.concat:
        rows = -(-int(lengths.sum(dtype=np.int64)) // spec.seq_length)
        return cut_stream(lengths, spec, key, start=0, num_rows=rows)
    if spec.oversize == "error" and lengths.size and lengths.max() > spec.seq_length:
        draw = int(np.argmax(lengths > spec.seq_length))
        raise oversize_error(f"draw {draw}", int(lengths[draw]), spec)
    rule, strategy = OVERSIZE.index(spec.oversize), STRATEGIES.index(spec.strategy)
    loose = np.empty((5, _count_pieces(lengths, spec.seq_length, rule)), dtype=np.int32)
    packers = max(1, min(spec.num_packers, lengths.size))  # no more rows are ever open
    rows = _assign(lengths, spec.seq_length, strategy, packers, rule, loose)
    return _arrange(loose, int(rows), spec, key)


def cut_stream(lengths: Int32, spec: PackSpec, key: int, *, start: int, num_rows: int) -> Layout:
    """Puts documents end to end and cuts them into rows; the last row may not be full.

    Args:
        lengths: Int32[n], tokens.
        spec: The row length, and whether rows are permuted.
        key: Decides the order of the rows.
        start: The tokens of the first document that are in rows before these.
        num_rows: The number of rows to make.
    """
    count = int(_cut(lengths, start, spec.seq_length, num_rows, np.empty((5, 0), dtype=np.int32)))
    loose = np.empty((5, count), dtype=np.int32)
    _cut(lengths, start, spec.seq_length, num_rows, loose)
    return _arrange(loose, num_rows, spec, key)


def _arrange(loose: Int32, num_rows: int, spec: PackSpec, key: int) -> Layout:
    """Returns the layout of pieces in any order of rows; permutes rows if `spec` says so."""
    order = np.arange(num_rows, dtype=np.int64)
    if spec.shuffle_rows and num_rows > 1:
        order = permute(order, num_rows, key)
    table, first_piece = np.empty_like(loose), np.zeros(num_rows + 1, dtype=np.int64)
    _sort_by_row(loose, order, first_piece, table)
    return Layout(table=table, first_piece=first_piece)


def one_row_each(lengths: Int32) -> Layout:
    """Returns the layout without packing: document n is row n, whole, even if it has no tokens."""
    count = lengths.shape[0]
    rows, zeros = np.arange(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
    return Layout(
        table=np.stack([rows, zeros, rows, zeros, lengths]),
        first_piece=np.arange(count + 1, dtype=np.int64),
    )


def placed_tokens(lengths: Integers, pack: PackSpec | None) -> Int64:
    """Returns how many tokens of each document get a place in a row: Int64[n]."""
    placed = lengths.astype(np.int64)
    if pack is not None and pack.oversize == "truncate":
        placed = np.minimum(placed, pack.seq_length)
    elif pack is not None and pack.oversize == "drop":
        placed[placed > pack.seq_length] = 0
    return placed


def oversize_error(document: str, length: int, spec: PackSpec) -> PlanError:
    return PlanError(
        at=document,
        problem=f"{length} tokens do not fit a row of {spec.seq_length}",
        fix="Raise pack.seq_length, or set pack.oversize to 'split', 'truncate' or 'drop'.",
    )


def nothing_fits(num_docs: int, spec: PackSpec) -> PlanError:
    """Returns the error for a plan without pieces.

    Under oversize "drop" the cause is the length of rows, not the data. Otherwise no document has a
    token.
    """
    if spec.oversize != "drop":
        return PlanError(
            at="pack",
            problem=f"none of {num_docs} documents has a token",
            fix="Check the columns that are named and the files.",
        )
    return PlanError(
        at="pack.oversize",
        problem=f"none of {num_docs} documents fits a row of {spec.seq_length} tokens",
        fix="Raise pack.seq_length, or set pack.oversize to 'split' or 'truncate'.",
    )


_SPLIT, _TRUNCATE, _DROP = (OVERSIZE.index(rule) for rule in ("split", "truncate", "drop"))
_PLACE_BITS, _PLACES, _NO_ROW = np.int64(32), np.int64((1 << 32) - 1), np.int64(1 << 62)
_GREEDY, _POOL = STRATEGIES.index("greedy"), STRATEGIES.index("pool")

LEVELS = 4  # levels of words of 64 bits: 64^4 sizes of free room are MAX_SEQ_LENGTH
# A de Bruijn sequence: the six bits below each place identify the place.
_LOWEST_BIT = np.uint64(0x03F79D71B4CB0A89)
_PLACE = np.argsort([(int(_LOWEST_BIT) << bit) >> 58 & 63 for bit in range(64)])
_ZERO, _ONE, _S58 = np.uint64(0), np.uint64(1), np.uint64(58)


@jit
def _count_pieces(lengths: Int32, seq_length: int, rule: int) -> int:
    pieces = 0
    for n in range(lengths.shape[0]):
        if lengths[n] <= seq_length or rule == _TRUNCATE:
            pieces += lengths[n] > 0
        elif rule == _SPLIT:
            pieces += (lengths[n] + seq_length - 1) // seq_length
    return pieces


@jit
def _put(
    table: Int32,
    piece: int,
    row: Integer,
    slot: Integer,
    draw: int,
    start: Integer,
    length: Integer,
) -> None:
    table[0, piece], table[1, piece], table[2, piece], table[3, piece], table[4, piece] = (
        row,
        slot,
        draw,
        start,
        length,
    )


@jit
def _assign(
    lengths: Int32, seq_length: int, strategy: int, num_packers: int, rule: int, table: Int32
) -> int:
    """Writes every piece to `table` and returns the number of rows used.

    `table` is Int32[5, pieces] (row, slot, draw, start, length); the slots of a row ascend.
    """
    pieces, rows, rests = 0, 0, 0
    open_rows = 1 if strategy == _GREEDY else num_packers
    row_of = np.zeros(open_rows, np.int64)
    # An open row is one word: its free room (0: no row is open in this place), then its place, so
    # that the fullest one that fits is a minimum.
    open_row = np.arange(open_rows).astype(np.int64)
    by_length = np.zeros(seq_length + 1, np.int64)
    rest_draw = np.empty(0 if strategy <= _POOL else lengths.shape[0], np.int32)
    for draw in range(lengths.shape[0]):
        length = np.int64(lengths[draw])
        if length > seq_length and rule == _TRUNCATE:
            length = np.int64(seq_length)
        if length > seq_length and rule != _SPLIT:
            continue
        full = length // seq_length
        for i in range(full):  # a full row is alone and leaves the open ones open
            _put(table, pieces, rows, 0, draw, i * seq_length, seq_length)
            pieces += 1
            rows += 1
        rest = length - full * seq_length
        if rest == 0:
            continue
        if strategy > _POOL:
            by_length[rest] += 1
            rest_draw[rests] = draw
            rests += 1
            continue
        need, best = rest << _PLACE_BITS, _NO_ROW
        for i in range(open_rows):
            word = open_row[i]
            best = min(best, word if word >= need else _NO_ROW)
        if best == _NO_ROW:  # the fullest row is closed
            for i in range(open_rows):
                best = min(best, open_row[i])
            place = best & _PLACES
            best = np.int64(seq_length) << _PLACE_BITS | place
            row_of[place] = rows
            rows += 1
        place = best & _PLACES
        slot = seq_length - (best >> _PLACE_BITS)
        _put(table, pieces, row_of[place], slot, draw, full * seq_length, rest)
        pieces += 1
        open_row[place] = best - need
    if rests:
        rows = _best_fit_decreasing(
            lengths, seq_length, rest_draw[:rests], by_length, pieces, rows, table
        )
    return rows


@jit
def _cut(lengths: Int32, start: int, seq_length: int, num_rows: int, table: Int32) -> int:
    """Writes the pieces of the first `num_rows` rows to `table` and returns how many there are.

    It only counts them if `table` is Int32[5, 0].
    """
    pieces, row, filled = 0, 0, np.int64(0)
    for draw in range(lengths.shape[0]):
        at, length = np.int64(start if draw == 0 else 0), np.int64(lengths[draw])
        while at < length and row < num_rows:
            run = min(length - at, seq_length - filled)
            if table.shape[1] > 0:
                _put(table, pieces, row, filled, draw, at, run)
            pieces += 1
            at += run
            filled += run
            if filled == seq_length:
                row += 1
                filled = np.int64(0)
        if row == num_rows:
            break
    return pieces


@jit
def _best_fit_decreasing(
    lengths: Int32,
    seq_length: int,
    rest_draw: Int32,
    by_length: Int64,
    pieces: int,
    rows: int,
    table: Int32,
) -> int:
    """Places the longest first, each into the fullest row that has room.

    Of equally full rows it takes the last one that was touched.
    """
    rests = rest_draw.shape[0]
    before = 0
    for length in range(seq_length - 1, 0, -1):  # counting sort, descending and stable
        count = by_length[length]
        by_length[length] = before
        before += count
    order = np.empty(rests, np.int32)
    for i in range(rests):
        rest = lengths[rest_draw[i]] % seq_length
        order[by_length[rest]] = rest_draw[i]
        by_length[rest] += 1

    # There is a stack of open rows for each size of free room. A tree of bits, 64 to a word, says
    # which stacks are not empty.
    first = np.zeros(LEVELS + 1, np.int64)
    words = seq_length + 1
    for level in range(LEVELS):
        words = (words + 63) // 64
        first[level + 1] = first[level] + words
    bits = np.zeros(first[LEVELS], np.uint64)
    top = np.full(seq_length + 1, -1, np.int32)  # row on top of the stack
    under = np.empty(rests, np.int32)  # row below it
    first_row = rows
    for i in range(rests):
        draw = order[i]
        rest = np.int64(lengths[draw] % seq_length)
        room = _next_bit(bits, first, rest)
        if room < 0:
            room = np.int64(seq_length)
            row = rows
            rows += 1
        else:
            row = np.int64(top[room])
            top[room] = under[row - first_row]
            if top[room] < 0:
                _clear_bit(bits, first, room)
        start = np.int64(lengths[draw]) - rest
        _put(table, pieces, row, seq_length - room, draw, start, rest)
        pieces += 1
        room -= rest
        if room > 0:
            under[row - first_row] = top[room]
            if top[room] < 0:
                _set_bit(bits, first, room)
            top[room] = row
    return rows


@jit
def _next_bit(bits: UInt64, first: Int64, place: np.int64) -> np.int64:
    """Returns the lowest set bit at or above `place`, or -1."""
    for level in range(LEVELS):
        word = place >> 6
        at: int = first[level] + word
        if at >= first[level + 1]:
            return np.int64(-1)
        below = np.uint64(place & 63)
        found = (bits[at] >> below) << below
        if found != _ZERO:
            place = (word << 6) + _lowest(found)
            for lower in range(level - 1, -1, -1):
                at = first[lower] + place
                place = (place << 6) + _lowest(bits[at])
            return place
        place = word + 1
    return np.int64(-1)


@jit
def _lowest(word: np.uint64) -> np.int64:
    return _PLACE[((word & (_ZERO - word)) * _LOWEST_BIT) >> _S58]


@jit
def _set_bit(bits: UInt64, first: Int64, place: np.int64) -> None:
    for level in range(LEVELS):
        word = first[level] + (place >> 6)
        was = bits[word]
        bits[word] = was | (_ONE << np.uint64(place & 63))
        if was != _ZERO:
            return
        place >>= 6


@jit
def _clear_bit(bits: UInt64, first: Int64, place: np.int64) -> None:
    for level in range(LEVELS):
        word = first[level] + (place >> 6)
        bits[word] ^= bits[word] & (_ONE << np.uint64(place & 63))
        if bits[word] != _ZERO:
            return
        place >>= 6


@jit
def _sort_by_row(loose: Int32, order: Int64, first_piece: Int64, table: Int32) -> None:
    """Sorts pieces by row, where row r becomes row order[r].

    A stable counting sort keeps the slots of a row ascending.
    """
    for piece in range(loose.shape[1]):
        first_piece[order[loose[0, piece]] + 1] += 1
    for row in range(order.shape[0]):
        first_piece[row + 1] += first_piece[row]
    place = first_piece[:-1].copy()
    for piece in range(loose.shape[1]):
        row = order[loose[0, piece]]
        at = place[row]
        place[row] += 1
        table[0, at] = row
        for field in range(1, 5):
            table[field, at] = loose[field, piece]
