"""Items made ahead by threads and handed out in order.

item     the result of `make(index)`; indices count up from the start, one index is one batch
ahead    how many items may be made or in the making beyond the one last taken: the bound of memory

Law: the items and their order are those of `make` called in a plain loop, for any number of workers and any `ahead`. An error of `make` is
raised where its item was due, after all items before it. No thread outlives the prefetcher, an abandoned one included.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from easypipe.core.errors import StallError

T = TypeVar("T")

JOIN_TIMEOUT_S = 10.0  # close() waits this long for a worker to finish the item at hand

log = logging.getLogger("easypipe")


class Make(Protocol[T]):  # pyright: ignore[reportInvalidTypeVarUse]
    def __call__(self, index: int, enter: Callable[[str], None], /) -> T | None:
        """The item of `index`, or None past the end. `enter(stage)` says what is being done, for the error of a stall."""
        ...


class Prefetcher(Generic[T]):
    """Iterates over `make(start), make(start + 1), ...` until it gives None, `workers` threads working at most `ahead` items ahead.

    stall_timeout_s: how long `next` waits for one item. Past it StallError names the stage that the item is in. After any error the
    prefetcher is closed and every further `next` raises the same error: a failure never looks like the end of the data.
    """

    def __init__(self, make: Make[T], start: int, *, workers: int, ahead: int, stall_timeout_s: float, name: str = "loader") -> None:
        self._shared: _Shared = _Shared(make, start, ahead)
        self._stall_timeout_s = stall_timeout_s
        self._name = name
        self._index = start
        self._failure: BaseException | None = None
        # Threads hold `_shared`, never the prefetcher: dropping the prefetcher (a `break` in a for loop) is what ends them.
        threads = [
            threading.Thread(target=_work, args=(self._shared,), name=f"easypipe-{name}-{i}", daemon=True)
            for i in range(min(workers, ahead))
        ]
        self._finalizer = weakref.finalize(self, _stop, self._shared, threads, name)
        for thread in threads:
            thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._failure is not None:
            raise self._failure
        if not self._finalizer.alive:
            raise StopIteration
        try:
            kind, value = self._take()
        except BaseException as error:
            if isinstance(error, StallError):
                self._failure = error
                self.close(join_timeout_s=0.0)  # the worker hangs: there is nothing to wait for
            raise
        if kind == "item":
            self._index += 1
            return value
        self.close()
        if kind == "error":
            self._failure = value
            raise value
        raise StopIteration

    def close(self, join_timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Ends the threads and drops what they made. Safe to call twice."""
        detached = self._finalizer.detach()
        if detached is not None:
            _, _, (shared, threads, name), _ = detached
            _stop(shared, threads, name, join_timeout_s)

    def _take(self) -> tuple[str, Any]:
        shared = self._shared
        deadline = time.monotonic() + self._stall_timeout_s
        with shared.changed:
            while self._index not in shared.made:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._stalled()
                shared.wanted.wait(left)
            outcome = shared.made.pop(self._index)
            if outcome[0] == "item":
                shared.taken = self._index + 1
                shared.changed.notify()
            return outcome

    def _stalled(self) -> StallError:
        stage, since = self._shared.stages.get(self._index, ("waiting for a free worker", None))
        elsewhere = f", there for {time.monotonic() - since:.1f} s" if since is not None else ""
        return StallError(
            at=self._name,
            problem=f"batch {self._index} was not ready after {self._stall_timeout_s:g} s; it is in stage {stage!r}{elsewhere}",
            fix="See why that stage hangs (storage, a source's read), or raise stall_timeout_s.",
        )


class _Shared:
    """What workers and consumer share; every field is read and written under the one lock behind `changed` and `wanted`."""

    def __init__(self, make: Make[Any], start: int, ahead: int) -> None:
        lock = threading.RLock()
        self.changed = threading.Condition(lock)  # workers wait here for room
        self.wanted = threading.Condition(lock)  # the consumer waits here for its item
        self.make = make
        self.ahead = ahead
        self.next = start  # index that a worker takes next
        self.taken = start  # items that the consumer has, counted from 0
        self.end: int | None = None  # no index from here on is started
        self.closed = False
        self.made: dict[int, tuple[str, Any]] = {}
        self.stages: dict[int, tuple[str, float]] = {}


def _work(shared: _Shared) -> None:
    while True:
        with shared.changed:
            while not shared.closed and shared.end is None and shared.next >= shared.taken + shared.ahead:
                shared.changed.wait()
            if shared.closed or shared.end is not None:
                return
            index = shared.next
            shared.next += 1
        stages = shared.stages

        def enter(stage: str, index: int = index, stages: dict[int, tuple[str, float]] = stages) -> None:
            stages[index] = (stage, time.monotonic())  # one dict store: atomic, needs no lock

        try:
            item = shared.make(index, enter)
            outcome = ("end", None) if item is None else ("item", item)
            del item
        except BaseException as error:  # noqa: BLE001 - it is raised again in the consumer's thread
            outcome = ("error", error)
        with shared.changed:
            stages.pop(index, None)
            if shared.closed:
                return
            shared.made[index] = outcome
            if outcome[0] != "item":
                shared.end = index if shared.end is None else min(shared.end, index)
                shared.changed.notify_all()
            shared.wanted.notify()
        del outcome


def _stop(shared: _Shared, threads: list[threading.Thread], name: str, join_timeout_s: float = JOIN_TIMEOUT_S) -> None:
    with shared.changed:
        shared.closed = True
        shared.made.clear()
        shared.changed.notify_all()
    deadline = time.monotonic() + join_timeout_s
    for thread in threads:
        if thread is threading.current_thread() or thread.ident is None:  # collected as garbage on the worker itself, or never started
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive() and join_timeout_s > 0:
            with shared.changed:
                where = {index: stage for index, (stage, _) in shared.stages.items()}
            log.warning("%s: thread %s did not end within %g s; it is in %s", name, thread.name, join_timeout_s, where or "no stage")


class InOrder(Generic[T]):
    """The same items without threads: each is made when it is asked for. After an error the same item is tried again."""

    def __init__(self, make: Make[T], start: int) -> None:
        self._make: Make[T] | None = make
        self._index = start

    def __iter__(self) -> Iterator[T]:
        return self

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
    """Nobody waits, so nobody asks."""
