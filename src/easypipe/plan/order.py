"""The order of documents: the n-th of a dataset after shuffling, and which stream's row is next.

Position `p` of pass `e` over a dataset of `num_docs` documents is document `permutation_e(p)`: a
keyed Feistel permutation, a new one for every pass, computed for one position at a time. The
kernels here are compiled copies of the functions in `easypipe.core.random`.
"""

from __future__ import annotations

import numpy as np

from easypipe.core.config import config
from easypipe.core.errors import require
from easypipe.core.jit import jit
from easypipe.core.random import MAX_ROWS, ROUNDS, mix64
from easypipe.core.values import Int64, UInt64


@config
class OrderConfig:
    """The order in which the documents of each dataset are drawn.

    Args:
        shuffle: A new keyed permutation every epoch; False keeps the order of the files.
        block_rows: Permute blocks of this many neighbouring documents as one, so that reads from
            remote storage stay large. Needs shuffle.
    """

    shuffle: bool = True
    block_rows: int = 1

    def check(self) -> None:
        require(
            self.block_rows >= 1,
            "block_rows",
            f"{self.block_rows} is not a block of rows",
            "Give at least 1.",
        )
        require(
            self.block_rows <= 1 or self.shuffle,
            "block_rows",
            "has no effect without shuffle",
            "Leave it out, or set shuffle.",
        )


def permute(indices: Int64, size: int, key: int) -> Int64:
    """Returns what `core.random.permute` returns, but is compiled and several times as fast.

    Raises:
        ValueError: `size` is out of range, or an index is not in [0, size).
    """
    if not 0 < size <= MAX_ROWS:
        raise ValueError(f"cannot permute {size} rows: between 1 and 2^48 are possible")
    indices = np.require(indices, dtype=np.int64, requirements=["C", "W"])
    out = np.empty(indices.shape[0], dtype=np.int64)
    if not _permute_into(indices, size, np.uint64(key), out):
        raise ValueError(f"indices must lie in [0, {size})")
    return out


def documents(
    order: OrderConfig,
    num_docs: Int64,
    keys: UInt64,
    epoch: int,
    drawn: Int64,
    counts: Int64,
) -> Int64:
    """Returns the next `counts[i]` documents of every dataset `i` after `drawn[i]` of them.

    Args:
        order: Whether documents are permuted, and in what blocks.
        num_docs: Int64[k], the documents of each dataset.
        keys: UInt64[k], one per dataset. Pass `e` over a dataset permutes by `child(key, epoch +
            e)`.
        epoch: The epoch that positions are counted in.
        drawn: Int64[k].
        counts: Int64[k].

    Returns:
        Int64[sum(counts)], one dataset after the other.
    """
    out = np.empty(int(counts.sum()), dtype=np.int64)
    _documents_into(num_docs, keys, epoch, drawn, counts, (order.shuffle, order.block_rows), out)
    return out


# The words below are UInt64 throughout: Numba would turn Int64 with UInt64 into a float.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_CHUNK = 1024  # words of a permutation that are computed together


_mix64 = jit(mix64)


@jit
def _child(key: np.uint64, index: int) -> np.uint64:
    return _mix64(key + np.uint64(index + 1) * _STEP)


@jit
def _word_bits(size: int) -> int:
    bits = 2
    while (size - 1) >> bits:
        bits += 1
    return bits


@jit
def _set_round_keys(key: np.uint64, rounds: UInt64) -> None:
    for i in range(ROUNDS):
        rounds[i] = _child(key, i)


@jit
def _backward(index: int, size: int, bits: int, rounds: UInt64) -> np.int64:
    shift = np.uint64(bits // 2)
    left_mask, right_mask = (_ONE << np.uint64(bits - bits // 2)) - _ONE, (_ONE << shift) - _ONE
    word = np.uint64(index)
    while True:
        left, right = word >> shift, word & right_mask
        for i in range(ROUNDS - 2, -1, -2):
            right ^= _mix64(left + rounds[i + 1]) & right_mask
            left ^= _mix64(right + rounds[i]) & left_mask
        word = (left << shift) | right
        if word < np.uint64(size):
            return np.int64(word)


@jit
def _permute_into(indices: Int64, size: int, key: np.uint64, out: Int64) -> bool:
    rounds = np.empty(ROUNDS, np.uint64)
    _set_round_keys(key, rounds)
    for n in range(indices.shape[0]):
        if indices[n] < 0 or indices[n] >= size:
            return False
    _forward_all(indices, size, _word_bits(size), rounds, out)
    return True


@jit
def _forward_all(indices: Int64, size: int, bits: int, rounds: UInt64, out: Int64) -> None:
    """Writes where each index goes.

    It takes one step of the walk for a whole chunk, in vector instructions, then for the words that
    are not below `size` yet, and so on.
    """
    words, places = np.empty(_CHUNK, np.uint64), np.empty(_CHUNK, np.int64)
    top = np.uint64(size)
    for first in range(0, indices.shape[0], _CHUNK):
        count = min(_CHUNK, indices.shape[0] - first)
        for n in range(count):
            words[n], places[n] = np.uint64(indices[first + n]), first + n
        while count:
            _step_all(words, count, bits, rounds)
            walking = 0
            for n in range(count):
                word, place = words[n], places[n]
                out[place] = np.int64(word)  # a word that is not below `size` yet is written again
                words[walking], places[walking] = word, place
                walking += word >= top
            count = walking


@jit
def _step_all(words: UInt64, count: int, bits: int, rounds: UInt64) -> None:
    """Takes one step of the permutation's walk for the first `count` words, in place."""
    shift = np.uint64(bits // 2)
    left_mask, right_mask = (_ONE << np.uint64(bits - bits // 2)) - _ONE, (_ONE << shift) - _ONE
    # ROUNDS is 8; as an array, the rounds would be read again for every word
    a, b, c, d = rounds[0], rounds[1], rounds[2], rounds[3]
    e, f, g, h = rounds[4], rounds[5], rounds[6], rounds[7]
    for n in range(count):
        left, right = words[n] >> shift, words[n] & right_mask
        left ^= _mix64(right + a) & left_mask
        right ^= _mix64(left + b) & right_mask
        left ^= _mix64(right + c) & left_mask
        right ^= _mix64(left + d) & right_mask
        left ^= _mix64(right + e) & left_mask
        right ^= _mix64(left + f) & right_mask
        left ^= _mix64(right + g) & left_mask
        right ^= _mix64(left + h) & right_mask
        words[n] = (left << shift) | right


@jit
def _documents_into(
    num_docs: Int64,
    keys: UInt64,
    epoch: int,
    drawn: Int64,
    counts: Int64,
    order: tuple[bool, int],
    out: Int64,
) -> None:
    """Writes the next documents of every dataset to `out`, one dataset after the other."""
    shuffle, block = order
    rounds = np.empty(ROUNDS, np.uint64)
    n = 0
    for i in range(num_docs.shape[0]):
        size = num_docs[i]
        done = np.int64(0)
        while done < counts[i]:  # one iteration for every pass over the dataset
            turn, start = (drawn[i] + done) // size, (drawn[i] + done) % size
            stop = min(size, start + counts[i] - done)
            if not shuffle:
                for position in range(start, stop):
                    out[n] = position
                    n += 1
            else:
                _set_round_keys(_child(keys[i], epoch + turn), rounds)
                blocks, tail = (size + block - 1) // block, size % block
                bits = _word_bits(blocks)
                # The last block may be short: every position after its place moves up by the
                # missing documents.
                short_at = _backward(blocks - 1, blocks, bits, rounds) * block if tail else size
                places = np.arange(start, stop)
                if tail:
                    places[max(0, short_at + tail - start) :] += block - tail
                landed = out[n : n + places.shape[0]]
                _forward_all(places // block, blocks, bits, rounds, landed)
                if block > 1:
                    landed *= block
                    landed += places % block
                n += places.shape[0]
            done += stop - start


# Which of several streams yields the next row, if they end at different rows.
#
# stream  a sequence of rows; `ends[s]` is how many stream s has, NEVER if it has not ended yet (or
#         never does)
# turn    one row of each stream that has not ended, lowest number first: turn r holds the rows with
#         number r
# order   turn after turn. While no stream has ended, S streams yield equally many rows of each
#         batch whose size S divides. After some have ended, the others fill in for them, each
#         within one row of the others.
#
# If a stream has a row after some place of the order, its end does not change what comes before
# that place. So the order up to a place is known as soon as every stream either has a row after it
# or has ended.


NEVER = 1 << 62


def rows_before(ends: Int64, row: int, stream: int) -> int:
    """Returns the number of rows, of all streams, that come before row `row` of stream `stream`."""
    return int(np.minimum(ends, row + (np.arange(len(ends)) < stream)).sum())


def given_by(ends: Int64, count: int) -> Int64:
    """Returns how many of the first `count` rows each stream yields: Int64[S].

    They sum to `count`, or to less if all streams have ended.
    """
    in_order = np.sort(np.minimum(ends, count + 1))
    ended = np.cumsum(in_order) - in_order  # rows of the streams that end before
    live = np.arange(len(ends), 0, -1)
    place = int(np.searchsorted(ended + in_order * live, count, side="right"))
    if place == len(ends):
        return ends.copy()
    turn, left = divmod(count - int(ended[place]), int(live[place]))
    rows = np.minimum(ends, turn)
    rows[np.flatnonzero(ends > turn)[:left]] += 1
    return rows


def in_order_of_streams(ends: Int64, start: int, stop: int) -> tuple[Int64, Int64]:
    """Returns the stream and its row for each of the rows `start` to `stop`, stream after stream.

    Returns:
        (stream, row of that stream), Int64[stop - start] each; (-1, -1) after the last row.
    """
    first, last = given_by(ends, start), given_by(ends, stop)
    counts = last - first
    streams, rows = np.full((2, stop - start), -1, np.int64)
    total = int(counts.sum())
    streams[:total] = np.repeat(np.arange(len(ends)), counts)
    rows[:total] = np.arange(total) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return streams, rows


def known_before(ends: Int64, row: int, stream: int) -> Int64:
    """Returns the `ends` that change what comes before row `row` of stream `stream`, others NEVER.

    A process at that row knows no other ends.
    """
    return np.where(ends < row + (np.arange(len(ends)) < stream), ends, NEVER)
