# ruff: noqa: SIM110 - kernels spell out what numba compiles best
"""What the top-level keys of JSON objects hold, found by scanning bytes (numba, without the GIL):
names and kinds of values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.jit import jit
from easypipe.sources.formats.scanners import BLANK, GOOD, ODD, skip_nested, skip_space, skip_string

# kinds of JSON values, as bits
NULL, BOOL, INT, FLOAT, STRING, OBJECT, ARRAY = 1, 2, 4, 8, 16, 32, 64

MAX_KEYS = 4096
KEY_BYTES = 1 << 20
TABLE = 4 * MAX_KEYS

_QUOTE = 34


class Keys(NamedTuple):
    """What the top-level keys of objects hold, filled by observe_keys; keys are numbered in order
    of first appearance.
    """

    counts: NDArray[np.int64]  # keys, bytes of `text`, whether keys were left out for want of room
    table: NDArray[np.int32]  # hash table of key numbers, -1 where free
    spans: NDArray[np.int32]  # key k is text[spans[k] : spans[k + 1]]
    text: NDArray[np.uint8]  # raw bytes of keys, as between their quotes
    kinds: NDArray[np.uint8]  # all kinds of values seen
    first: NDArray[np.uint8]  # the first kind seen that is not NULL


def new_keys() -> Keys:
    return Keys(
        np.zeros(3, np.int64),
        np.full(TABLE, -1, np.int32),
        np.zeros(MAX_KEYS + 1, np.int32),
        np.zeros(KEY_BYTES, np.uint8),
        np.zeros(MAX_KEYS, np.uint8),
        np.zeros(MAX_KEYS, np.uint8),
    )


@jit
def observe_keys(data, starts, ends, flags, counts, table, spans, text, kinds, first):
    """Adds what the top-level keys of GOOD records hold to Keys; flags records ODD whose structure
    is wrong.

    The arrays after `flags` are those of Keys. Keys beyond MAX_KEYS set counts[2] and are not
    recorded.
    """
    words = data[: len(data) // 8 * 8].view(np.uint64)
    line_keys = np.empty(MAX_KEYS, np.int32)
    line_kinds = np.empty(MAX_KEYS, np.uint8)
    for r in range(len(starts)):
        i, end = starts[r], ends[r]
        i = skip_space(data, i, end)
        if i == end:
            flags[r] = BLANK
            continue
        flags[r] = ODD
        if data[i] != 123:
            continue
        i += 1
        here, expect, ok, guess = 0, False, False, 0
        while True:
            i = skip_space(data, i, end)
            if i < end and data[i] == 125 and not expect:
                i += 1
                ok = True
                break
            if i >= end or data[i] != _QUOTE:
                break
            key = i + 1
            i = skip_string(data, words, key, end)
            if i < 0:
                break
            key_end = i - 1
            i = skip_space(data, i, end)
            if i >= end or data[i] != 58:  # :
                break
            i += 1
            i = skip_space(data, i, end)
            if i >= end:
                break
            c = data[i]
            if c == _QUOTE:
                kind = STRING
                i = skip_string(data, words, i + 1, end)
            elif c == 123 or c == 91:
                kind = OBJECT if c == 123 else ARRAY
                i = skip_nested(data, words, i, end)
            else:
                kind, i = _scalar(data, i, end)
            if i < 0:
                break
            slot = _slot(data, key, key_end, guess, counts, table, spans, text)
            guess = slot + 1
            if slot >= 0 and here < MAX_KEYS:
                line_keys[here] = slot
                line_kinds[here] = kind
                here += 1
            i = skip_space(data, i, end)
            if i < end and data[i] == 44:
                i += 1
                expect = True
            elif i < end and data[i] == 125:
                i += 1
                ok = True
                break
            else:
                break
        if ok and skip_space(data, i, end) == end:
            flags[r] = GOOD
            for k in range(here):
                kinds[line_keys[k]] |= line_kinds[k]
                if first[line_keys[k]] <= NULL:
                    first[line_keys[k]] = line_kinds[k]


@jit
def _scalar(data, i, end):
    """Kind of a literal or number, and where it ends; -1 where it is neither."""
    c = data[i]
    most = np.uint64(9223372036854775807)
    if c == 116 or c == 102 or c == 110:  # t f n
        kind = NULL if c == 110 else BOOL
        while i < end and 97 <= data[i] <= 122:
            i += 1
        return kind, i
    if c == 45:
        i += 1
        most += np.uint64(1)
    digits, value = 0, np.uint64(0)
    while i < end and 48 <= data[i] <= 57:
        if digits < 19:
            value = value * np.uint64(10) + np.uint64(data[i] - 48)
        digits += 1
        i += 1
    if digits == 0:
        return 0, -1
    kind = INT
    if digits > 19 or value > most:
        kind = FLOAT
    if i < end and (data[i] == 46 or data[i] == 101 or data[i] == 69):  # . e E
        kind = FLOAT
        while i < end and (
            48 <= data[i] <= 57
            or data[i] == 46
            or data[i] == 101
            or data[i] == 69
            or data[i] == 43
            or data[i] == 45
        ):
            i += 1
    return kind, i


@jit
def _slot(data, key, key_end, guess, counts, table, spans, text):
    """Number of a key, in order of first appearance; -1 where the table is full. Lines mostly
    repeat their keys: `guess` is tried first.
    """
    length = key_end - key
    if guess < counts[0] and _same(data, key, length, guess, spans, text):
        return guess
    mixed = np.uint64(1469598103934665603)  # FNV-1a, 64 bits
    for i in range(key, key_end):
        mixed = (mixed ^ np.uint64(data[i])) * np.uint64(1099511628211)
    place = np.int64(mixed >> np.uint64(32)) % TABLE
    while table[place] >= 0:
        if _same(data, key, length, table[place], spans, text):
            return table[place]
        place = (place + 1) % TABLE
    slot = counts[0]
    if slot >= MAX_KEYS or counts[1] + length > KEY_BYTES:
        counts[2] = 1
        return -1
    for i in range(length):
        text[counts[1] + i] = data[key + i]
    counts[0] += 1
    counts[1] += length
    spans[slot + 1] = counts[1]
    table[place] = slot
    return slot


@jit
def _same(data, key, length, slot, spans, text):
    begin = spans[slot]
    if spans[slot + 1] - begin != length:
        return False
    for i in range(length):
        if text[begin + i] != data[key + i]:
            return False
    return True
