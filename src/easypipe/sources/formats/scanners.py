# ruff: noqa: SIM109 - kernels spell out what numba compiles best
"""Numba byte scanners: where lines, JSON objects (and how deep), CSV records and documents end.

`data` is always a read-only UInt8 array (records.frozen), so that every kernel is compiled once. A
splitter fills `starts` and `ends` (Int64, as many as they hold), and returns (records, bytes
consumed, status). It begins at the start of a record. Unless `final`, it leaves a record that
`data` does not hold whole for the next call.
"""

from __future__ import annotations

import numpy as np

from easypipe.core.jit import jit
from easypipe.core.values import Int64, UInt8, UInt64

Split = tuple[int, int, int]  # what a splitter returns

# status of a splitter
MORE = 0  # needs more bytes, or room for more records
CLOSED = 1  # the JSON array ended
BROKEN = 2  # no record can follow; `consumed` says where
OPEN_QUOTE = 3  # a quoted CSV field does not end

# flags of a record
GOOD = 0
BLANK = 1
ODD = 2  # cannot be one JSON object

MAX_DEPTH = 200

_QUOTE, _BACKSLASH, _NEWLINE, _RETURN = 34, 92, 10, 13


# Eight bytes at a time (Mycroft's tests, Hacker's Delight 6-1): x has a zero byte where
# (x - ONES) & ~x & HIGHS is not 0, and a byte below 32 where (x - 32 * ONES) & ~x & HIGHS is not 0.
_ONES = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)
_SPACES = np.uint64(0x2020202020202020)
_NEWLINES = np.uint64(0x0A0A0A0A0A0A0A0A)
_QUOTES = np.uint64(0x2222222222222222)
_BACKSLASHES = np.uint64(0x5C5C5C5C5C5C5C5C)


@jit
def split_lines(data: UInt8, final: bool, starts: Int64, ends: Int64) -> Split:
    """Splits lines, without their "\\n" or "\\r\\n"."""
    n, count, start, i = len(data), 0, 0, 0
    words = data[: n // 8 * 8].view(np.uint64)
    while count < len(starts):
        while i < n and data[i] != _NEWLINE:
            i += 1
            if i & 7 == 0:
                w = i >> 3
                while w < len(words):
                    x = words[w] ^ _NEWLINES
                    if (x - _ONES) & ~x & _HIGHS:
                        break
                    w += 1
                i = w << 3
        if i == n and (not final or start == n):
            break
        starts[count] = start
        ends[count] = i - 1 if i > start and data[i - 1] == _RETURN else i
        count += 1
        i += 1
        start = min(i, n)
        if i >= n:
            break
    return count, start, MORE


@jit
def split_paragraphs(data: UInt8, final: bool, starts: Int64, ends: Int64) -> Split:
    """Splits runs of lines that are not blank, without the line break after the last one."""
    n, count, consumed, i = len(data), 0, 0, 0
    start, end = -1, -1  # of the open paragraph; -1 if none is open
    while i < n and count < len(starts):
        stop = i
        while stop < n and data[stop] != _NEWLINE:
            stop += 1
        if stop == n and not final:
            break
        if skip_space(data, i, stop) == stop:
            if start >= 0:
                starts[count], ends[count] = start, end
                count += 1
                start = -1
            consumed = min(stop + 1, n)
        else:
            start = i if start < 0 else start
            end = stop - 1 if data[stop - 1] == _RETURN else stop
        i = min(stop + 1, n)
    if final and i == n and start >= 0 and count < len(starts):
        starts[count], ends[count] = start, end
        count, consumed = count + 1, n
    return count, consumed, MORE


@jit
def split_elements(data: UInt8, final: bool, starts: Int64, ends: Int64) -> Split:
    """Splits the elements of a JSON array.

    `data` begins at the "[" or "," before an element, and so do `starts`: an element begins one
    byte later.
    """
    n, count, i = len(data), 0, 0
    consumed = 0
    while count < len(starts):
        i = skip_space(data, i, n)
        consumed = i
        if i == n:
            break
        if data[i] == 93:  # ]
            return count, i + 1, CLOSED
        start = i
        opening = data[i] == 91  # only at the first element; "," or "]" precedes the others
        i += 1
        i = skip_space(data, i, n)
        if opening and i < n and data[i] == 93:
            return count, i + 1, CLOSED
        first, depth = i, 0
        while i < n:
            c = data[i]
            if c == _QUOTE:
                i += 1
                while i < n and data[i] != _QUOTE:
                    i += 2 if data[i] == _BACKSLASH else 1
                if i >= n:
                    return count, consumed, MORE
            elif c == 123 or c == 91:  # { [
                depth += 1
            elif c == 125 or c == 93:  # } ]
                if depth == 0:
                    break
                depth -= 1
            elif c == 44 and depth == 0:  # ,
                break
            i += 1
        if i >= n and (depth > 0 or not final):
            return count, consumed, MORE
        i = min(i, n)
        end = i
        while end > first and is_space(data[end - 1]):
            end -= 1
        if end == first or (i < n and data[i] == 125):  # no element, or a "}" that closes nothing
            return count, i, BROKEN if i < n else MORE
        starts[count] = start
        ends[count] = end
        count += 1
        consumed = i
    return count, consumed, MORE


@jit
def split_csv(delimiter: int, data: UInt8, final: bool, starts: Int64, ends: Int64) -> Split:
    """Splits records of delimited text.

    A quote counts only at the start of a field; inside the field "" means one quote.
    """
    n, count, start, i = len(data), 0, 0, 0
    while count < len(starts) and start < n:
        at_field = True
        complete = False
        while i < n:
            c = data[i]
            if at_field and c == _QUOTE:
                i += 1
                closed = False
                while i < n:
                    if data[i] != _QUOTE:
                        i += 1
                    elif i + 1 < n and data[i + 1] == _QUOTE:
                        i += 2
                    elif i + 1 < n or final:
                        i += 1
                        closed = True
                        break
                    else:
                        break
                if not closed:
                    if final:
                        return count, start, OPEN_QUOTE
                    return count, start, MORE
                at_field = False
            elif c == _NEWLINE or c == _RETURN:
                complete = True
                break
            else:
                at_field = c == delimiter
                i += 1
        if not complete and not final:
            break
        if complete and data[i] == _RETURN and i + 1 == n and not final:
            break  # "\n" may follow
        starts[count] = start
        ends[count] = i
        count += 1
        if i + 1 < n and data[i] == _RETURN and data[i + 1] == _NEWLINE:
            i += 1
        i += 1
        start = min(i, n)
    return count, start, MORE


@jit
def flag_blank(data: UInt8, starts: Int64, ends: Int64, flags: UInt8) -> None:
    """Flags each record GOOD, or BLANK if it is only white space."""
    for r in range(len(starts)):
        i, end = starts[r], ends[r]
        i = skip_space(data, i, end)
        flags[r] = BLANK if i == end else GOOD


@jit
def flag_objects(data: UInt8, starts: Int64, ends: Int64, flags: UInt8) -> int:
    """Flags each record: GOOD is one {...} with balanced brackets and closed strings.

    Returns:
        How many are GOOD.
    """
    good = 0
    words = data[: len(data) // 8 * 8].view(np.uint64)
    for r in range(len(starts)):
        i, end = starts[r], ends[r]
        i = skip_space(data, i, end)
        if i == end:
            flags[r] = BLANK
            continue
        flags[r] = ODD
        if data[i] != 123:
            continue
        i = skip_nested(data, words, i, end)
        if i < 0:
            continue
        i = skip_space(data, i, end)
        if i == end:
            flags[r] = GOOD
            good += 1
    return good


@jit
def gather(data: UInt8, starts: Int64, ends: Int64, flags: UInt8, out: UInt8) -> int:
    """Copies the GOOD records to `out`, each followed by "\\n"; line breaks within become spaces.

    Such line breaks are between JSON tokens.

    Returns:
        The bytes written.
    """
    at = 0
    for r in range(len(starts)):
        if flags[r] == GOOD:
            for i in range(starts[r], ends[r]):
                c = data[i]
                out[at] = 32 if c == _NEWLINE or c == _RETURN else c
                at += 1
            out[at] = _NEWLINE
            at += 1
    return at


@jit
def gather_text(
    data: UInt8, starts: Int64, ends: Int64, flags: UInt8, out: UInt8, offsets: Int64
) -> None:
    """Copies the GOOD records to `out` back to back, and their Int64[good + 1] offsets."""
    at, count = 0, 0
    offsets[0] = 0
    for r in range(len(starts)):
        if flags[r] == GOOD:
            for i in range(starts[r], ends[r]):
                out[at] = data[i]
                at += 1
            count += 1
            offsets[count] = at


@jit
def pick_entries(
    starts: Int64,
    row: int,
    offset: int,
    every: tuple[int, int],
    last: Int64,
    rows: Int64,
    offsets: Int64,
) -> int:
    """Picks index entries among records that begin at `offset + starts`.

    Args:
        starts: Int64[n], where the records begin.
        row: The row of the first.
        offset: The plain offset of `data`.
        every: (rows, bytes) after which the next entry is due.
        last: Int64[2], row and offset of the last entry, which is updated.
        rows: Int64[n], filled with the rows of the entries.
        offsets: Int64[n], filled with their offsets.

    Returns:
        How many entries there are.
    """
    count, (every_rows, every_bytes) = 0, every
    for r in range(len(starts)):
        if row + r - last[0] >= every_rows or offset + starts[r] - last[1] >= every_bytes:
            last[0] = row + r
            last[1] = offset + starts[r]
            rows[count] = last[0]
            offsets[count] = last[1]
            count += 1
    return count


@jit
def is_space(c: np.uint8) -> bool:
    return c == 32 or c == 10 or c == 13 or c == 9


@jit
def skip_space(data: UInt8, i: int, end: int) -> int:
    """Returns the first place from i on that is not white space, or `end`."""
    while i < end and is_space(data[i]):
        i += 1
    return i


@jit
def skip_string(data: UInt8, words: UInt64, i: int, end: int) -> int:
    """Goes from after the opening quote of a string to after the closing one.

    Returns:
        -1 if it does not end, or if it holds a control character.
    """
    while i < end:
        c = data[i]
        if c == _QUOTE:
            return i + 1
        if c == _BACKSLASH:
            i += 2
        elif c < 32:
            return -1
        else:
            i += 1
        if i & 7 == 0:
            w, last = i >> 3, end >> 3
            while w < last:
                x = words[w]
                q, b = x ^ _QUOTES, x ^ _BACKSLASHES
                if (((q - _ONES) & ~q) | ((b - _ONES) & ~b) | ((x - _SPACES) & ~x)) & _HIGHS:
                    break
                w += 1
            i = max(i, w << 3)
    return -1


@jit
def skip_nested(data: UInt8, words: UInt64, i: int, end: int) -> int:
    """Goes from an opening bracket to after the closing one.

    Returns:
        -1 if it does not close or goes deeper than MAX_DEPTH.
    """
    depth = 0
    while i < end:
        c = data[i]
        if c == _QUOTE:
            i = skip_string(data, words, i + 1, end)
            if i < 0:
                return -1
            continue
        if c == 123 or c == 91:
            depth += 1
            if depth > MAX_DEPTH:
                return -1
        elif c == 125 or c == 93:
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    return -1


@jit
def split_tokens(
    itemsize: int, separator: int, data: UInt8, final: bool, starts: Int64, ends: Int64
) -> Split:
    """Splits documents of `itemsize`-byte little-endian integers, each with its separator."""
    n, count, start, i = len(data) // itemsize, 0, 0, 0
    while i < n and count < len(starts):
        value = np.uint64(0)
        for k in range(itemsize):
            value |= np.uint64(data[i * itemsize + k]) << np.uint64(8 * k)
        i += 1
        if value == np.uint64(separator) or (final and i == n):
            starts[count] = start * itemsize
            ends[count] = i * itemsize
            count += 1
            start = i
    return count, start * itemsize, MORE
