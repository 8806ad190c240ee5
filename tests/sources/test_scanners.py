"""Splitters find the same records wherever a text is cut, and however many they have room for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.sources.formats.records import frozen
from easypipe.sources.formats.scanners import (
    CLOSED,
    MORE,
    flag_objects,
    split_csv,
    split_elements,
    split_lines,
    split_paragraphs,
)
from strategies import examples

UNTOUCHED = -7


def split(
    splitter: Callable[..., Any], text: bytes, cuts: list[int], room: int
) -> tuple[list[bytes], bytes]:
    """The records of `text`, which arrives in parts; what is left behind them."""
    found: list[bytes] = []
    data, places = b"", sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    while True:
        starts, ends = (np.full(room + 2, UNTOUCHED, np.int64) for _ in range(2))
        count, consumed, status = splitter(frozen(data), not parts, starts[:room], ends[:room])
        assert count <= room
        assert (starts[count:] == UNTOUCHED).all()
        assert (ends[count:] == UNTOUCHED).all()
        found += [data[a:b] for a, b in zip(starts[:count], ends[:count], strict=True)]
        data = data[consumed:]
        if status == CLOSED:
            return found, data + b"".join(parts)
        assert status == MORE
        if count < room:
            if not parts:
                return found, data
            data += parts.pop(0)


def lines_of(text: bytes) -> list[bytes]:
    lines = text.split(b"\n")
    return [line.removesuffix(b"\r") for line in (lines if lines[-1] else lines[:-1])]


def paragraphs_of(text: bytes) -> list[bytes]:
    found, at = [], 0
    for blank in re.finditer(rb"(?m)^[ \t\r]*(?:\n|\Z)", text + b"\n"):
        found.append(text[at : blank.start()].removesuffix(b"\n").removesuffix(b"\r"))
        at = blank.end()
    return [one for one in [*found, text[at:]] if one.strip()]


cut = st.lists(st.integers(0, 60), max_size=4)
room = st.integers(1, 5)
text_of_lines = st.lists(
    st.sampled_from([b"a", b"bc d", b"", b" ", b"\t", b"123456789", b"\n", b"\r\n"]), max_size=12
).map(b"".join)


@examples(60)
@given(text_of_lines, cut, room)
def test_lines(text: bytes, cuts: list[int], room: int) -> None:
    assert split(split_lines, text, cuts, room) == (lines_of(text), b"")


@examples(60)
@given(text_of_lines, cut, room)
def test_paragraphs(text: bytes, cuts: list[int], room: int) -> None:
    assert split(split_paragraphs, text, cuts, room)[0] == paragraphs_of(text)


VALUES = [b"1", b'"a,]b"', b'{"a": [1, "}"]}', b"[]", b'"\\"\\\\"', b"null", b"[[],{}]"]
spaces = st.sampled_from([b"", b" ", b"\n\t", b"\r\n"])


@examples(60)
@given(st.lists(st.tuples(spaces, st.sampled_from(VALUES), spaces), max_size=8), cut, room)
def test_elements(values: list[tuple[bytes, bytes, bytes]], cuts: list[int], room: int) -> None:
    text = b"[" + b",".join(map(b"".join, values)) + b"] behind"
    found, left = split(split_elements, text, cuts, room)
    assert [one[1:].strip() for one in found] == [value for _, value, _ in values]
    assert left == b" behind"


@pytest.mark.parametrize("text", [b"[]", b"[ ]", b"[\n\t]", b"[ 1 , 2 ]"])
def test_spaces_of_an_array(text: bytes) -> None:
    found, left = split(split_elements, text, [], 5)
    assert [one[1:].strip() for one in found] == text.strip(b"[] \n\t").replace(b" ", b"").split(
        b","
    ) * (b"1" in text)
    assert left == b""


FIELDS = [b"a", b'"b;c"', b'"d\ne"', b'"f""g"', b'h"i', b'""']
records = st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3).map(b";".join)


@examples(60)
@given(
    st.lists(records, max_size=6),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.booleans(),
    cut,
    room,
)
def test_csv(rows: list[bytes], end: bytes, closed: bool, cuts: list[int], room: int) -> None:
    text = end.join(rows) + (end if closed and rows else b"")
    assert split(lambda *given: split_csv(ord(";"), *given), text, cuts, room) == (rows, b"")


@pytest.mark.parametrize(
    ("record", "good"),
    [
        *((b'{"a": "12345678%s"}' % (b"x" * length), True) for length in range(9)),
        *((b'{"a": "%s\\" }"}' % (b"x" * length), True) for length in range(9)),
        *((b'{"a": "%s\x1f"}' % (b"x" * length), False) for length in range(9)),
        *((b'{"a": [%s]}' % (b" " * length), True) for length in range(9)),
        (b' {"a": {"b": []}} ', True),
        (b'{"a": [}', False),
        (b'{"a": ]}', False),
        (b'{"a": 1}}', False),
        (b'{"a": "', False),
        (b"[1]", False),
    ],
)
def test_what_could_be_an_object(record: bytes, good: bool) -> None:
    """Wherever its bytes fall among eight, and whatever stands beside it."""
    text = b'"{' + record + b'}"'
    flags = np.full(1, 9, np.uint8)
    starts, ends = np.array([2]), np.array([2 + len(record)])
    assert flag_objects(frozen(text), starts, ends, flags) == good
    assert (flags[0] == 0) == good
