# pyright: strict
"""Thread pools that raise EasypipeError when the machine allows no more threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from easypipe.core.errors import EasypipeError, raising

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` whose `submit` and `map` raise EasypipeError if no thread starts."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        fix = "Raise the limits of memory and threads (ulimit -v, ulimit -u, the container's)."
        with raising(EasypipeError, "threads", "none can be started", fix, RuntimeError):
            return super().submit(fn, *args, **kwargs)


def each(fn: Callable[[S], T], items: Sequence[S], most: int, name: str) -> list[T]:
    """Returns `fn` of every item, computed in at most `most` threads; in none if that is 1.

    After a failure no more items are started.

    Raises:
        EasypipeError: No thread can be started.
    """
    if min(most, len(items)) < 2:
        return [fn(item) for item in items]
    with Threads(min(most, len(items)), thread_name_prefix=f"easypipe-{name}") as pool:
        return list(pool.map(fn, items))
