"""Texts in Arrow columns: blank or not UTF-8, their bytes uncopied; which rows fail a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from easypipe.core.values import Bools, Int64, UInt8

E = TypeVar("E", bound=Exception)
_BLANK = r"\A[\s\x0b\x1c-\x1f\x{85}\pZ]*\z"  # all that `str.strip` removes; RE2's \s is ASCII only


def has_text(column: pa.Array) -> Bools:
    """Returns for each text whether it has more than white space; False for null.

    Args:
        column: Texts[n] of any string type.

    Returns:
        Bool[n]; True for bytes that are not UTF-8. The search stops at the first character that is
        not white space, so long texts cost nothing.
    """
    compute: Any = pc
    blank = compute.fill_null(compute.match_substring_regex(column, _BLANK), True)
    return ~blank.to_numpy(zero_copy_only=False)


def bytes_of(texts: pa.LargeStringArray) -> tuple[Int64, UInt8]:
    """Returns the bytes of texts without a copy.

    Args:
        texts: Texts[n].

    Returns:
        (ends Int64[n+1], bytes): text i is `bytes[ends[i] : ends[i + 1]]`.
    """
    if not len(texts):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, ends, data = texts.buffers()
    edges = np.frombuffer(ends, np.int64, len(texts) + 1, texts.offset * 8)
    return edges, np.frombuffer(data or b"", np.uint8)


def not_utf8(column: pa.Array) -> list[int]:
    """Returns the rows in which some string, at any depth, is not UTF-8."""

    def validate(first: int, last: int) -> None:
        part = column.slice(first, last - first)
        # Arrow checks the whole children of a slice, so the slice is copied first
        if last - first < len(column) and column.type.num_fields:
            part = part.take(pa.array(np.arange(last - first)))
        part.validate(full=True)

    return [*failing(len(column), validate, (pa.ArrowInvalid, UnicodeDecodeError))]


def failing(
    num_rows: int, check: Callable[[int, int], object], errors: tuple[type[E], ...]
) -> dict[int, E]:
    """Returns the rows at which `check(first, last)` raises one of `errors`, and what it raises.

    It searches by bisection, so that finding a few costs little more than finding none.
    """
    bad: dict[int, E] = {}
    pending = [(0, num_rows)]
    while pending:
        first, last = pending.pop()
        try:
            check(first, last)
        except errors as error:
            middle = (first + last) // 2
            if last - first == 1:
                bad[first] = error
            else:
                pending += [(first, middle), (middle, last)]
    return bad
