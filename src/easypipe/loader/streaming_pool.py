"""Threads that read ahead. Daemons, as those of the prefetcher: a read that hangs for ever keeps no
process from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

A = TypeVar("A")
T = TypeVar("T")

JOIN_TIMEOUT_S = 10.0


class ReadPool:
    """`workers` threads that do what is submitted, in that order. They start with the first
    call.
    """

    def __init__(self, workers: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[Any], Any], Any] | None] = (
            SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(workers)
        ]
        # between the first call and the end, which garbage collection may bring in the midst of it
        self._lock = threading.RLock()
        self._started = self._closed = False

    def submit(self, call: Callable[[A], T], argument: A) -> Future[T]:
        """Raises RuntimeError once the pool is closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
        future: Future[T] = Future()
        self._tasks.put((future, call, argument))
        return future

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads; what has not begun is cancelled. Waits for reads at hand, at most
        JOIN_TIMEOUT_S. Safe to call twice.
        """
        with self._lock:
            self._closed = True
            if not self._started:
                return
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads if wait else ():
            # garbage is collected on any thread
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call, argument = task
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(argument))
            except BaseException as error:  # noqa: BLE001 - it is raised again where the result is asked for
                future.set_exception(error)
            del task, future, argument  # what was read is its reader's alone
