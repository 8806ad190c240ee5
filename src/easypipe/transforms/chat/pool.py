"""The worker processes that run templates: rows go to idle ones, then answers, or how one ended."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from easypipe.core.errors import StallError
from easypipe.transforms.chat.sandbox import Json, Row
from easypipe.transforms.chat.spans import LAST, Rendered
from easypipe.transforms.refused import Refused

BATCH_ROWS = 64  # the most conversations of one request
BATCH_CHARACTERS = 1 << 20  # the most characters of a request of more than one conversation
LARGE_CALL = 1000  # a second worker process is worth its start for this many conversations
WORKER = "easypipe.transforms.chat.worker"
STALL_SECONDS = 120.0  # for an answer of a worker, which may use one second of processor time


class Hostile(NamedTuple):
    """A worker's answer for a template that cannot be used, and why."""

    why: str


class Ended(NamedTuple):
    """The answer for a worker that a row ended, instead of all answers to its request.

    Attributes:
        why: What ended it.
        row: The number of the row within the request.
    """

    why: str
    row: int


Answer = Rendered | Refused | Hostile | Ended
_Came = list[bytes] | Ended  # the JSON that answers a request, not parsed yet


class WrittenTalk(NamedTuple):
    """A row whose messages, and tools if it has any, are JSON that a worker process reads.

    This process would only pass the values on.
    """

    messages: str
    tools: str | None


Asked = Row | WrittenTalk


def _answer(said: Sequence[Json]) -> Answer:
    """Returns what a worker's JSON says about a row."""
    kinds = {1: Hostile, 2: Refused, 3: Rendered}
    return kinds[len(said)](*said)


def _requests(rows: Sequence[Asked]) -> Iterator[list[list[str]]]:
    """Yields all rows in order, some for each request, as the JSON texts that a worker reads."""
    some: list[list[str]] = []
    size = 0
    for row in rows:
        if isinstance(row, WrittenTalk):
            own = ["null" if text is None else text for text in row]
        else:
            own = [json.dumps(row, default=str)]  # dates and decimals of Arrow become text
        weight = sum(map(len, own))
        if some and (len(some) == BATCH_ROWS or size + weight > BATCH_CHARACTERS):
            yield some
            some, size = [], 0
        some.append(own)
        size += weight
    if some:
        yield some


def asked(spec: Mapping[str, Json], rows: Sequence[Asked]) -> Generator[list[Answer]]:
    """Yields answers to all rows, request by request, until a row ends a worker.

    While answers are read, other workers have the next requests, if there are more workers than
    threads that ask.

    Args:
        spec: What the rows are written with; see worker.py.
    """
    under_way: deque[_Worker] = deque()
    try:
        head = json.dumps(spec).encode()
        for request in _requests(rows):
            frame, came = json.dumps(request).encode(), list[_Came]()
            while (worker := _take(must=not under_way, start=len(rows) >= LARGE_CALL)) is None:
                came.append(_received(under_way))
            under_way.append(worker)
            worker.send(head, frame)
            yield from map(_answers, came)  # after the next request: no worker waits for it
        while under_way:
            yield _answers(_received(under_way))
    finally:  # after an error or Ctrl-C, workers still have answers that no one will read
        for worker in under_way:
            worker.close()


def _received(under_way: deque[_Worker]) -> _Came:
    """Returns the answer of the worker that was asked first, and makes it idle."""
    worker = under_way[0]
    came = worker.receive()
    under_way.popleft()
    if isinstance(came, Ended):
        worker.close()
    else:
        _give(worker)
    return came


def _answers(came: _Came) -> list[Answer]:
    """Parses what `_received` returns."""
    if isinstance(came, Ended):
        return [came]
    return [_answer(said) for frame in came for said in json.loads(frame)]


class _Worker:
    """One worker process, with the connection to it."""

    def __init__(self) -> None:
        # imports sockets, so only processes that render pay for it
        from multiprocessing.connection import Pipe

        # This file holds the number of the row that the worker works on; it is 0 until all rows of
        # a request are read.
        self._number = tempfile.TemporaryFile(prefix="easypipe-chat-")  # noqa: SIM115
        package = str(Path(__file__).parents[3])
        known = {
            key: os.environ[key]
            for key in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG")
            if key in os.environ
        }
        paths = [package, os.environ.get("PYTHONPATH", "")]
        self._connection, its = Pipe()
        files = (self._number.fileno(), its.fileno())
        with its:
            self._process = subprocess.Popen(  # noqa: S603  (this Python, and a module of ours)
                [sys.executable, "-P", "-m", WORKER, *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**known, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )

    def send(self, *frames: bytes) -> None:
        """Sends frames to a worker that has answered everything so far, and so is reading."""
        os.pwrite(self._number.fileno(), bytes(8), 0)
        # the worker is gone, which `receive` will notice
        with contextlib.suppress(ConnectionError):
            for frame in frames:
                self._connection.send_bytes(frame)

    def receive(self) -> _Came:
        """Returns the answers to a request, or only the Ended of the row that ended the worker.

        Raises:
            StallError: The worker does not answer.
        """
        frames: list[bytes] = []
        while True:
            try:
                if not self._connection.poll(STALL_SECONDS):
                    raise StallError(
                        at="chat template",
                        problem=f"a worker process gave no answer for {STALL_SECONDS:.0f} s",
                        fix="Run again.",
                    )
                frame = self._connection.recv_bytes()
            except (EOFError, ConnectionError):
                return self._end()
            frames.append(frame[1:])
            if frame[:1] == LAST:
                return frames

    def _end(self) -> Ended:
        """Returns why the worker is gone."""
        code = self._process.wait()
        why = {
            -signal.SIGPROF: "it takes more than 0.75 s of processor time for one conversation",
            -signal.SIGKILL: "the system ended it, most likely for its memory",
        }
        row = int.from_bytes(os.pread(self._number.fileno(), 8, 0), "little")
        return Ended(why.get(code, f"its process ended with status {code}"), row)

    def is_alive(self) -> bool:
        """Whether the process runs; the system may end one that has nothing to do."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process."""
        with _lock:
            _alive.discard(self)
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._number.close()


_idle: list[_Worker] = []
_alive: set[_Worker] = set()
_lock = threading.Lock()


def _take(*, must: bool = True, start: bool = True) -> _Worker | None:
    """Returns a worker that has nothing to do.

    Args:
        must: Whether to start one rather than return None. Otherwise None is returned if every core
            has a worker at work, or if a new one is needed and `start` is False.
        start: Whether a new worker may be started.
    """
    with _lock:
        cores = os.cpu_count() or 1
        if not must and (len(_alive) - len(_idle) >= cores or not (_idle or start)):
            return None
        idle = _idle.pop() if _idle else None
    if idle is not None and idle.is_alive():
        return idle
    if idle is not None:
        idle.close()
    worker = _Worker()
    with _lock:
        _alive.add(worker)
    return worker


def _give(worker: _Worker) -> None:
    """Makes a worker idle, or closes it if there are enough."""
    with _lock:
        # One more than cores, because a thread finds none if other threads have taken those of all
        # cores.
        if len(_idle) <= (os.cpu_count() or 1):
            _idle.append(worker)
            return
    worker.close()


def close_workers() -> None:
    """Ends the idle worker processes, which end with this process anyway."""
    with _lock:
        idle, _idle[:] = list(_idle), []
    for worker in idle:
        worker.close()


def _forget_workers() -> None:
    """Forgets all workers in a child process: two processes must not read one pipe."""
    _idle.clear()
    _alive.clear()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_forget_workers)
