"""What a user's function holds identifies it: functions of one name and version that hold other
values are two, in every process.
"""

from __future__ import annotations

import datetime
import functools
import operator
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from easypipe.core.config import digest
from easypipe.core.identity import UserFunction, held_by


@dataclass
class Bound:
    least: int
    above: Any = None


class Slotted:
    __slots__ = ("__weakref__", "n", "unset")

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, row: Any) -> Any:
        return row


class Locked:
    def __init__(self, n: int) -> None:
        self.lock, self.bound, self.module = threading.Lock(), Bound(n, self), re


class Opened:
    """Holds a file, which nothing can compare; `version` says what is in it."""

    def __init__(self, version: str | None = None) -> None:
        self.file, self.version = sys.stdout, version

    def __call__(self, row: Any) -> Any:
        return row


def within(held: Any, row: Any) -> bool:
    return row in held


def fingerprint(function: Callable[..., Any]) -> str:
    made = UserFunction(function, "1", of="Filter")
    assert made.cacheable
    return made.fingerprint


@pytest.mark.parametrize(
    "make",
    [
        lambda n: range(0, 100, n),
        lambda n: slice(n),
        lambda n: re.compile(f"a{n}"),
        lambda n: re.compile("a", re.IGNORECASE if n == 2 else 0),
        lambda n: re.compile(f"a{n}").fullmatch,
        lambda n: f"{n}".startswith,
        lambda n: operator.itemgetter(n),
        lambda n: np.arange(n),
        lambda n: np.zeros(6, np.int16 if n == 2 else np.int32),
        lambda n: np.zeros((n, 6 // n)),
        lambda n: np.array([{"a": n}], dtype=object),
        lambda n: np.int64(n),
        lambda n: np.datetime64(n, "D"),
        lambda n: np.dtype(f"i{2 * n}" if n == 2 else "f4"),
        lambda n: Fraction(1, n),
        lambda n: Decimal(n),
        lambda n: complex(n),
        lambda n: datetime.timedelta(n),
        lambda n: bytearray([n]),
        lambda n: deque([n]),
        lambda n: Bound(1, Bound(n)),
        lambda n: SimpleNamespace(n=n),
        lambda n: Slotted(n),
        lambda n: Locked(n),
        lambda n: [{"a": (Bound(n),)}],
        lambda n: Opened(version=str(n)),
        lambda n: SimpleNamespace(file=sys.stdout, version=str(n)),
    ],
)
def test_a_value_is_told_by_its_content(make: Callable[[int], Any]) -> None:
    two, again, three = (fingerprint(partial(within, make(n))) for n in (2, 2, 3))
    assert two == again != three


def test_an_object_that_many_hold_is_read_once() -> None:
    held: Any = Bound(1)
    for _ in range(60):  # 2 ** 60 paths lead to the first
        held = Bound(held, held)
    assert fingerprint(partial(within, held)) == fingerprint(partial(within, held))


def test_a_value_that_cannot_be_compared_is_not_cached(caplog: pytest.LogCaptureFixture) -> None:
    for function in (
        partial(within, sys.stdout),
        partial(within, [Bound(1, sys.stdout)]),
        partial(within, np.ma.masked_array([1, 2], [0, 1])),
        Opened(version="1"),
        functools.partial(within, Opened()),
    ):
        caplog.clear()
        one, two = (UserFunction(function, "1", of="Filter") for _ in range(2))
        assert one.fingerprint != two.fingerprint
        assert not one.cacheable
        assert re.search(
            r"Filter: \S+ holds a value of type \S+:\w+, which cannot be compared with that of "
            r"another process, so its results are not kept in the token cache, whatever its "
            r"version. Hold plain values, arrays or dataclasses, or give that value an attribute "
            r"`version`.",
            caplog.text,
        )
    deep: Any = Bound(1)
    for _ in range(5000):
        deep = Bound(1, deep)
    assert not UserFunction(partial(within, deep), "1", of="Filter").cacheable
    # a source's version says what such a value gives: it counts by its type, as a whole
    assert held_by(Opened()) == held_by(Opened()) != held_by(Slotted(1))
    assert digest(held_by(partial(within, Bound(1, sys.stdout)))) == digest(
        held_by(partial(within, Bound(2, sys.stdout)))
    )


def test_identities_are_those_of_earlier_versions() -> None:
    """Tokens that were cached under them are found."""
    plain = [1, 2.5, "a", b"b", None, True, PurePosixPath("/a"), {"k": [{3}, (4,)]}]
    assert (
        digest(held_by(partial(within, plain, deep=Fraction))) == "28ffa9757218c82448f701a364dcf97c"
    )
    if sys.version_info < (3, 12):  # code of functools is in it, which is another in newer Pythons
        cached = functools.lru_cache(operator.add)
        assert digest(held_by(cached)) == "d72ca3106d51902974fef665fb9edef4"
    assert digest(held_by(partial(np.add, 1))) == "d54b68ed7bdecdaf61645f33ecc33c0e"
    assert held_by(len) is held_by(within) is held_by(dict.fromkeys) is None
    assert held_by(partial(within, object()))[2] == ["list", [["builtins:object"]]]
