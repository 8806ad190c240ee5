# pyright: strict
"""A pool of threads that raises EasypipeError when the machine gives no more threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from easypipe.core.errors import EasypipeError, raising

P = ParamSpec("P")
T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` whose `submit` and `map` raise EasypipeError if no thread starts."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        fix = "Raise the limits of memory and threads (ulimit -v, ulimit -u, the container's)."
        with raising(EasypipeError, "threads", "none can be started", fix, RuntimeError):
            return super().submit(fn, *args, **kwargs)
