"""Items made ahead by threads, returned in order, with a timeout that names the stage that hangs.

item     the result of `make(index)`; indices ascend from the start, and one index is one batch
ahead    how many items may be finished or in progress after the last one taken; it limits memory
permit   an index that a worker may make; worker `index % workers` gets it once `ahead` allows it

Law: the items and their order are those of `make` called in a plain loop, for any number of workers
and any `ahead`. An error of `make` is raised in place of its item, after all earlier items. No
thread outlives the prefetcher, even if it is abandoned.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from easypipe.core.errors import StallError

A = TypeVar("A")
T = TypeVar("T")

# A waiting consumer is woken for every item, which costs as much as making a small item. After
# sleeping this long, it finds several.
BREATH_S = 0.0004
JOIN_TIMEOUT_S = 10.0  # close() waits this long for a worker to finish its current item

log = logging.getLogger("easypipe")


# Takes (index, enter) and returns the item of `index`, or None after the end. It calls
# `enter(stage)` to say what it is doing, for the error about a stall.
Make = Callable[[int, Callable[[str], None]], T | None]


class Prefetcher(Iterator[T]):
    """Iterates over `make(start), make(start + 1), ...` until it returns None.

    After any error the prefetcher is closed and every further `next` raises the same error: a
    failure never looks like the end of the data.

    Args:
        make: Makes the item of an index.
        start: The first index.
        workers: The number of threads.
        ahead: The most items that they make ahead.
        stall_timeout_s: How long `next` waits for one item; after that, StallError names the stage
            of the item.
        name: The name of the threads, also used in errors.
    """

    def __init__(
        self,
        make: Make[T],
        start: int,
        *,
        workers: int,
        ahead: int,
        stall_timeout_s: float,
        name: str = "loader",
    ) -> None:
        self._workers = [_Worker(make) for _ in range(min(workers, ahead))]
        self._stall_timeout_s = stall_timeout_s
        self._name = name
        self._index = start
        self._ahead = ahead
        self._failure: BaseException | None = None
        for index in range(start, start + ahead):
            self._permit(index)
        # Threads reference their worker, never the prefetcher, so that dropping the prefetcher (a
        # `break` in a for loop) ends them.
        threads = [
            threading.Thread(target=_work, args=(worker,), name=f"easypipe-{name}-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        self._finalizer = weakref.finalize(self, _stop, self._workers, threads, name)
        for thread in threads:
            thread.start()

    def __next__(self) -> T:
        if self._failure is not None:
            raise self._failure
        if not self._finalizer.alive:
            raise StopIteration
        worker = self._workers[self._index % len(self._workers)]
        if worker.made.empty():
            time.sleep(BREATH_S)
        try:
            item, error = worker.made.get(timeout=self._stall_timeout_s)
        except Empty:
            self._failure = self._stalled(worker)
            self.close(join_timeout_s=0.0)  # the worker hangs: there is nothing to wait for
            raise self._failure from None
        if item is not None:
            self._permit(self._index + self._ahead)
            self._index += 1
            return item
        self.close()
        if error is not None:
            self._failure = error
            raise error
        raise StopIteration

    def close(self, join_timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Ends the threads and drops what they made. It is safe to call twice."""
        detached = self._finalizer.detach()
        if detached is not None:
            _, _, (workers, threads, name), _ = detached
            _stop(workers, threads, name, join_timeout_s)

    def _permit(self, index: int) -> None:
        self._workers[index % len(self._workers)].permits.put(index)

    def _stalled(self, worker: _Worker) -> StallError:
        at = worker.at
        stage = (
            f"it is in stage {at[1]!r}, there for {time.monotonic() - at[2]:.1f} s"
            if at is not None
            else "no worker has begun it"
        )
        return StallError(
            at=self._name,
            problem=f"batch {self._index} was not ready after {self._stall_timeout_s:g} s; {stage}",
            fix="See why that stage hangs (storage, a source's read), or raise stall_timeout_s.",
        )


@dataclass(eq=False)
class _Worker:
    """The state that one thread and the consumer share.

    The queues need no other lock; each of the two other fields is written by only one side.
    """

    make: Make[Any]
    permits: SimpleQueue[int | None] = field(default_factory=SimpleQueue)  # None: no more
    # (None, None): after the end
    made: SimpleQueue[tuple[Any, BaseException | None]] = field(default_factory=SimpleQueue)
    at: tuple[int, str, float] | None = None  # the current index, its stage, and its start time
    closed: bool = False


def _work(worker: _Worker) -> None:
    """Makes items while there are permits: the loop of one thread."""
    while (index := worker.permits.get()) is not None and not worker.closed:

        def enter(stage: str, index: int = index) -> None:
            worker.at = (index, stage, time.monotonic())

        enter("start")
        try:
            outcome = (worker.make(index, enter), None)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the consumer's thread
            outcome = (None, error)
        worker.at = None
        worker.made.put(outcome)
        if outcome[0] is None:
            return
        # only the consumer may hold it now: this thread must not keep an item alive
        del outcome


def _stop(
    workers: list[_Worker],
    threads: list[threading.Thread],
    name: str,
    join_timeout_s: float = JOIN_TIMEOUT_S,
) -> None:
    """Ends the threads and waits for them; logs those that do not end within `join_timeout_s`."""
    for worker in workers:
        worker.closed = True
        worker.permits.put(None)
    deadline = time.monotonic() + join_timeout_s
    for worker, thread in zip(workers, threads, strict=True):
        # collected as garbage on the worker itself, or never started
        if thread is threading.current_thread() or thread.ident is None:
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive() and join_timeout_s > 0:
            at = worker.at
            where = "no batch" if at is None else f"batch {at[0]}, stage {at[1]!r}"
            log.warning(
                "%s: thread %s did not end within %g s; it is at %s",
                name,
                thread.name,
                join_timeout_s,
                where,
            )


class InOrder(Iterator[T]):
    """Makes the same items without threads, each on request.

    After an error the same item is tried again.
    """

    def __init__(self, make: Make[T], start: int) -> None:
        self._make: Make[T] | None = make
        self._index = start

    def __next__(self) -> T:
        item = None if self._make is None else self._make(self._index, _no_stage)
        if item is None:
            self._make = None
            raise StopIteration
        self._index += 1
        return item

    def close(self) -> None:
        self._make = None


def _no_stage(stage: str) -> None:
    """Ignores the stage: without threads no consumer waits for an item."""


class ReadPool:
    """`workers` threads, and `waiting` more, that do what is submitted, in that order.

    They start with the first call, and are daemons, so that a hanging read does not keep the
    process from ending.

    Attributes:
        turns: Admits the threads that may work at a time; the others wait for storage.
    """

    def __init__(self, workers: int, name: str, *, waiting: int = 0) -> None:
        self.turns = threading.Semaphore(workers)
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[Any], Any], Any] | None] = (
            SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(workers + waiting)
        ]
        # Protects the first call from close(), which garbage collection may call in the middle of
        # it.
        self._lock = threading.RLock()
        self._started = self._closed = False

    def submit(self, call: Callable[[A], T], argument: A) -> Future[T]:
        """Has a thread call `call(argument)`.

        Raises:
            RuntimeError: The pool is closed.
        """
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
        """Ends the threads; calls that have not started are cancelled.

        With `wait` it waits for current reads, at most JOIN_TIMEOUT_S. It is safe to call twice.
        """
        with self._lock:
            self._closed = True
            if not self._started:
                return
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads if wait else ():
            # Garbage may be collected on any thread, including one of these.
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
            del task, future, argument  # this thread must not keep the result alive
