"""The worker processes that write prompts by templates: rows go to idle ones, texts come back."""

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
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.refused import Refused

BATCH_ROWS = 64  # conversations of one request
BATCH_CHARACTERS = 1 << 20  # at most, where it is of more than one conversation
LARGE_CALL = 1000  # conversations for which a second worker process is worth its start
WORKER = "easypipe.transforms.chat.worker"
STALL_SECONDS = 120.0  # without an answer, for a worker that may use one second of processor time


class Hostile(NamedTuple):
    """A template that cannot be used."""

    why: str


class Ended(NamedTuple):
    """A worker that a row ended; it is the one answer to a request. row: counts within that."""

    why: str
    row: int


Answer = Rendered | Refused | Hostile | Ended


class WrittenTalk(NamedTuple):
    """A row whose messages, and tools if it has any, are JSON that a worker process reads.

    This process would only hand the values on.
    """

    messages: str
    tools: str | None


Asked = Row | WrittenTalk


def _answer(said: Sequence[Json]) -> Answer:
    """What a worker says of a row."""
    kinds = {1: Hostile, 2: Refused, 3: Rendered}
    return kinds[len(said)](*said)


def _requests(rows: Sequence[Asked]) -> Iterator[list[list[str]]]:
    """All rows in their order, as the JSON texts that a worker reads, some for each request."""
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
    """Answers to all rows, request by request, until one ends a worker.

    While answers are read, other workers have the next requests, as far as there are more workers
    than threads that ask.
    """
    under_way: deque[tuple[_Worker, int]] = deque()
    try:
        head = json.dumps(spec).encode()
        for request in _requests(rows):
            while (worker := _take(must=not under_way, start=len(rows) >= LARGE_CALL)) is None:
                yield _received(under_way)
            under_way.append((worker, len(request)))
            worker.send(head, json.dumps(request).encode())
        while under_way:
            yield _received(under_way)
    finally:  # an error, or Ctrl-C: they still have answers to give, which are nobody's
        for worker, _ in under_way:
            worker.close()


def _received(under_way: deque[tuple[_Worker, int]]) -> list[Answer]:
    worker, count = under_way[0]
    answers = worker.receive(count)
    under_way.popleft()
    if worker.gone:
        worker.close()
    else:
        _give(worker)
    return answers


class _Worker:
    def __init__(self) -> None:
        from multiprocessing.connection import Pipe  # imports sockets, for those who render

        # holds the number of the row that it works on
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
        self.gone = False

    def send(self, *frames: bytes) -> None:
        """To a worker that has answered all before, and so reads."""
        with contextlib.suppress(ConnectionError):  # it is gone, which who reads its answers sees
            for frame in frames:
                self._connection.send_bytes(frame)

    def receive(self, count: int) -> list[Answer]:
        """Answers to `count` rows, or to none but the one it ended at."""
        answers: list[Answer] = []
        while len(answers) < count:
            try:
                if not self._connection.poll(STALL_SECONDS):
                    raise StallError(
                        at="chat template",
                        problem=f"a worker process gave no answer for {STALL_SECONDS:.0f} s",
                        fix="Run again.",
                    )
                answers += map(_answer, json.loads(self._connection.recv_bytes()))
            except (EOFError, ConnectionError):
                return [self._end()]
        return answers

    def _end(self) -> Ended:
        """Why the worker is gone."""
        self.gone = True
        code = self._process.wait()
        why = {
            -signal.SIGPROF: "it takes more than 0.75 s of processor time for one conversation",
            -signal.SIGKILL: "the system ended it, most likely for its memory",
        }
        row = int.from_bytes(os.pread(self._number.fileno(), 8, 0), "little")
        return Ended(why.get(code, f"its process ended with status {code}"), row)

    def close(self) -> None:
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
    """A worker that has nothing to do. must: start one rather than give none; else: None where
    every core has one at work, or where there would have to be another one and not `start`."""
    with _lock:
        cores = os.cpu_count() or 1
        if not must and (len(_alive) - len(_idle) >= cores or not (_idle or start)):
            return None
        if _idle:
            return _idle.pop()
    worker = _Worker()
    with _lock:
        _alive.add(worker)
    return worker


def _give(worker: _Worker) -> None:
    with _lock:
        # one more: a thread finds none where others have taken those of all cores
        if len(_idle) <= (os.cpu_count() or 1):
            _idle.append(worker)
            return
    worker.close()


def close_workers() -> None:
    """Ends the idle worker processes; they end with this process anyway."""
    with _lock:
        idle, _idle[:] = list(_idle), []
    for worker in idle:
        worker.close()


def _forget_workers() -> None:
    """In a child process, which has none: two may not read one pipe."""
    _idle.clear()
    _alive.clear()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_forget_workers)
