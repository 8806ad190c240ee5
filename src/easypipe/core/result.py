# pyright: strict
"""`Ok(value)` or `Err(error)`: a result for callers who would rather inspect than catch an error.

`Err` holds the error that would have been raised. Bugs stay exceptions: `attempt` turns only an
EasypipeError into Err.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, ParamSpec, TypeAlias, TypeVar

from easypipe.core.errors import EasypipeError

T = TypeVar("T", covariant=True)
U = TypeVar("U")
E = TypeVar("E", covariant=True)
P = ParamSpec("P")


class UnwrapError(ValueError):
    """Raised by `unwrap()` of an Err whose error is not an exception, for example a text.

    Attributes:
        value: The error of that Err.
    """

    def __init__(self, value: object) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return f"unwrap() of Err({self.value!r}): ask is_err() first"


@dataclass(frozen=True)
class Ok(Generic[T]):
    """A success, with its value."""

    value: T

    def is_ok(self) -> bool:
        return True

    def is_err(self) -> bool:
        return False

    def unwrap(self) -> T:
        return self.value

    def unwrap_err(self) -> NoReturn:
        """Raises TypeError, because there is no error."""
        raise TypeError(f"unwrap_err() of {self!r}: ask is_err() first")

    def unwrap_or(self, default: object) -> T:
        return self.value

    def map(self, function: Callable[[T], U]) -> Ok[U]:
        return Ok(function(self.value))

    def and_then(self, function: Callable[[T], Result[U, E]]) -> Result[U, E]:
        """Returns the result of `function` on the value, which may be an Err."""
        return function(self.value)


@dataclass(frozen=True)
class Err(Generic[E]):
    """A failure, with its error."""

    error: E

    def is_ok(self) -> bool:
        return False

    def is_err(self) -> bool:
        return True

    def unwrap(self) -> NoReturn:
        """Raises the error, or UnwrapError with it if it is not an exception."""
        if isinstance(self.error, BaseException):
            raise self.error
        raise UnwrapError(self.error)

    def unwrap_err(self) -> E:
        return self.error

    def unwrap_or(self, default: U) -> U:
        return default

    def map(self, function: Callable[..., object]) -> Err[E]:
        return self

    def and_then(self, function: Callable[..., object]) -> Err[E]:
        return self


Result: TypeAlias = Ok[T] | Err[E]


def attempt(
    function: Callable[P, U], *args: P.args, **kwargs: P.kwargs
) -> Result[U, EasypipeError]:
    """Calls a function: returns Ok of its result, or Err of an EasypipeError that it raises.

    Any other exception is a bug and is not caught.
    """
    try:
        return Ok(function(*args, **kwargs))
    except EasypipeError as error:
        return Err(error)
