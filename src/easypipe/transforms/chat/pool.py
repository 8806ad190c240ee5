"""The worker processes of chat templates (chat_worker.py): rows go to those that are idle, and come
back as texts in their order.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import select
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
from easypipe.transforms.refused import Refused

BATCH_ROWS = 64  # conversations of one request
BATCH_BYTES = 1 << 20  # at most, where it is of more than one conversation
LARGE_CALL = 1000  # conversations for which a second worker process is worth its start
STALL_SECONDS = 120.0  # without an answer, for a worker that may use one second of processor time


class Rendered(NamedTuple):
    """spans: ascending character ranges that are trained. end: 0 where the template ended the last
    turn, else the EOS token has to (MASKED_END or TRAINED_END, see chat_spans.py). lost: tokens
    that were left out before the text was written; fewer than 0 were written twice. goes_on: the
    conversation does so in another text."""

    text: str
    spans: list[list[int]]
    end: int
    lost: int = 0
    goes_on: bool = False


class Hostile(NamedTuple):
    why: str
    row: int = 0  # of a worker that was ended there is one answer, which names its row


Answer = Rendered | Refused | Hostile


class WrittenTalk(NamedTuple):
    """A row whose messages, and tools if it has any, are JSON that a worker process reads: this one
    would only hand the values on.
    """

    messages: str
    tools: str | None


Asked = Row | WrittenTalk


def _answer(text: str, rest: Sequence[Json]) -> Answer:
    """What a worker says of a row after the size of its text."""
    if len(rest) == 1:
        return Hostile(rest[0])
    return Refused(*rest) if isinstance(rest[0], str) else Rendered(text, *rest)


def _requests(spec: Mapping[str, Json], rows: Sequence[Asked]) -> Iterator[tuple[bytes, int]]:
    """(request, rows in it), for all rows in their order."""
    head = json.dumps(spec).encode()
    cells: list[list[bytes]] = []
    size = 0
    for row in rows:
        own = _cells(row)
        weight = sum(map(len, own))
        if cells and (len(cells) == BATCH_ROWS or size + weight > BATCH_BYTES):
            yield _request(head, cells), len(cells)
            cells, size = [], 0
        cells.append(own)
        size += weight
    if cells:
        yield _request(head, cells), len(cells)


def _cells(row: Asked) -> list[bytes]:
    if isinstance(row, WrittenTalk):
        return [("null" if one is None else one).encode("utf-8", "surrogatepass") for one in row]
    return [json.dumps(row, default=str).encode()]  # dates and decimals of Arrow become text


def _request(head: bytes, cells: Sequence[Sequence[bytes]]) -> bytes:
    sizes = json.dumps([[len(cell) for cell in row] for row in cells]).encode()
    return b"".join([head, b"\n", sizes, b"\n", *itertools.chain.from_iterable(cells)])


def asked(spec: Mapping[str, Json], rows: Sequence[Asked]) -> Generator[list[Answer]]:
    """Answers to all rows, request by request; a hostile one is the last one given.

    While answers are read, other workers have the next requests, as far as there are more workers
    than threads that ask.
    """
    under_way: deque[tuple[_Worker, int]] = deque()
    try:
        for request, count in _requests(spec, rows):
            while (worker := _take(must=not under_way, start=len(rows) >= LARGE_CALL)) is None:
                yield _received(under_way)
            under_way.append((worker, count))
            worker.send(request)
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
        # holds the number of the row that it works on
        self._number = tempfile.TemporaryFile(prefix="easypipe-chat-")  # noqa: SIM115
        package = str(Path(__file__).parents[3])
        known = {
            key: os.environ[key]
            for key in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG")
            if key in os.environ
        }
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "easypipe.transforms.chat.worker",
                str(self._number.fileno()),
            ],
            pass_fds=(self._number.fileno(),),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **known,
                "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]).rstrip(
                    os.pathsep
                ),
            },
        )
        self.gone = False

    def send(self, request: bytes) -> None:
        """Of a worker that has answered all before, and so reads."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone, which who reads its answers sees
            self._process.stdin.write(request)
            self._process.stdin.flush()

    def receive(self, count: int) -> list[Answer]:
        """Answers to `count` rows, or to none but the one it ended at."""
        answers: list[Answer] = []
        held = bytearray()
        while len(answers) < count:
            while (end := held.find(b"\n")) < 0:
                if not self._read_on(held):
                    return [self._end()]
            some = json.loads(held[:end])
            stop = end + 1 + sum(answer[0] for answer in some)
            while len(held) < stop:
                if not self._read_on(held):
                    return [self._end()]
            at = end + 1
            for size, *rest in some:
                text = held[at : at + size].decode()
                at += size
                answers.append(_answer(text, rest))
            del held[:stop]
        return answers

    def _read_on(self, held: bytearray) -> bool:
        """False where nothing more will come."""
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        if not select.select([source], [], [], STALL_SECONDS)[0]:
            raise StallError(
                at="chat template",
                problem=f"a worker process gave no answer for {STALL_SECONDS:.0f} s",
                fix="Run again.",
            )
        read = os.read(source, 1 << 20)
        held += read
        return bool(read)

    def _end(self) -> Hostile:
        """Why the worker is gone."""
        self.gone = True
        code = self._process.wait()
        why = {
            -signal.SIGPROF: "it takes more than 0.75 s of processor time for one conversation",
            -signal.SIGKILL: "the system ended it, most likely for its memory",
        }
        row = int.from_bytes(os.pread(self._number.fileno(), 8, 0), "little")
        return Hostile(why.get(code, f"its process ended with status {code}"), row)

    def close(self) -> None:
        with _lock:
            _alive.discard(self)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
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
