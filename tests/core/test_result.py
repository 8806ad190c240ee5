"""Ok and Err: what would have been returned, or raised."""

from __future__ import annotations

import pickle

import pytest

from easypipe import Err, Ok, Result
from easypipe.core.errors import ConfigError
from easypipe.core.result import UnwrapError, attempt

WRONG = ConfigError(at="rows", problem="0 are none", fix="Give at least 1.")


def rows(count: int) -> int:
    if count == 0:
        raise WRONG
    return 100 // count


def half(number: int) -> Result[int, ConfigError]:
    return (
        Ok(number // 2)
        if number % 2 == 0
        else Err(ConfigError(at="number", problem=f"{number} is odd"))
    )


def test_f16_ok():
    found = attempt(rows, 5)
    assert found == Ok(20)
    assert (found.is_ok(), found.is_err(), found.unwrap(), found.unwrap_or(0)) == (
        True,
        False,
        20,
        20,
    )
    assert found.map(str) == Ok("20")
    assert found.and_then(half) == Ok(10)
    assert found.and_then(half).and_then(half).and_then(half).is_err()
    with pytest.raises(TypeError, match=r"unwrap_err\(\) of Ok"):
        found.unwrap_err()


def test_f16_err_holds_what_would_have_been_raised():
    found = attempt(rows, 0)
    assert (found.is_ok(), found.is_err(), found.unwrap_or(7)) == (False, True, 7)
    assert found.unwrap_err() is WRONG
    assert found.map(str) is found
    assert found.and_then(half) is found
    with pytest.raises(ConfigError, match=r"rows: 0 are none. Give at least 1."):
        found.unwrap()


def test_a_bug_is_no_err():
    with pytest.raises(TypeError, match="unsupported operand"):
        attempt(rows, "5")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["boom", 3, None, ConfigError])
def test_unwrapping_an_error_that_is_no_exception_raises_one_that_holds_it(value: object):
    found = Err(value)
    with pytest.raises(UnwrapError, match=r"unwrap\(\) of Err\(") as raised:
        found.unwrap()
    assert raised.value.value is value
    assert repr(value) in str(raised.value)
    assert pickle.loads(pickle.dumps(raised.value)).value == value
