"""Conversations to text with the characters that are trained: chat templates, run in processes that may not take long nor much.

A template is a program of strangers, and a thread that runs one cannot be stopped. So templates run in a few worker processes
(chat_worker.py), whose processor time and memory the system limits; one that goes too far ends alone, and is an error that names the row.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
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
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, StallError, TokenizerError, did_you_mean
from easypipe.transforms.prompt_templates import CHAT_TEMPLATES
from easypipe.transforms.tokenizer import Tokenizer
from easypipe.transforms.tokenizer_files import find_chat_template

ENGINE_VERSION = 3  # counts up when the same conversation gives other text or other spans
BATCH_ROWS = 64  # conversations of one request
BATCH_BYTES = 1 << 20  # at most, where it is of more than one conversation
LARGE_CALL = 1000  # conversations for which a second worker process is worth its start
STALL_SECONDS = 120.0  # without an answer, for a worker that may use one second of processor time

MASKED_END, TRAINED_END = 1, 2  # see chat_spans.py


class Rendered(NamedTuple):
    """spans: ascending character ranges that are trained. end: 0 where the template ended the last turn, else the EOS token has to
    (MASKED_END or TRAINED_END). lost: tokens that a LengthPolicy took before the text was written."""

    text: str
    spans: list[list[int]]
    end: int
    lost: int = 0


class Refused(NamedTuple):
    reason: str  # a word for the ledger
    detail: str


class HostileTemplateError(TokenizerError):
    """A template that took too long or too much, or reached for what it must not have. `row` counts within the call."""

    row: int = 0


@dataclass(frozen=True)
class ChatTemplate:
    """One chat template with what it is rendered with; `tool_use` is another one for rows that have tools, where the tokenizer has it."""

    source: str
    tool_use: str | None
    names: Mapping[str, str]  # bos_token, eos_token, ...: strings that the template may print
    closers: tuple[str, ...]  # special tokens of the tokenizer
    train_on: str
    date: str | None  # ISO date that strftime_now tells
    origin: str

    @property
    def fingerprint(self) -> str:
        """Of everything that decides text and spans but the rows."""
        return digest("chat", ENGINE_VERSION, self.source, self.tool_use, self.names, list(self.closers), self.train_on, self.date)

    def render(self, rows: Sequence[Mapping[str, Any]]) -> list[Rendered | Refused]:
        """rows: `messages`, a list of dicts, and `tools`, a list or None. Thread safe; a thread waits for one worker process.

        Raises HostileTemplateError for a template that goes beyond its limits or does not compile, StallError where a worker hangs.
        """
        answers: list[Rendered | Refused] = []
        for with_tools, run in itertools.groupby(rows, key=lambda row: self.tool_use is not None and bool(row["tools"])):
            spec = {
                "source": self.tool_use if with_tools else self.source,
                "names": dict(self.names),
                "closers": self.closers,
                "train_on": self.train_on,
                "date": self.date,
            }
            try:
                answers += answers_of(spec, [{**row, "messages": _present(row["messages"])} for row in run], self.origin)
            except HostileTemplateError as error:
                error.row += len(answers)
                raise
        return answers


def _present(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without their keys of null, as transformers hands them to templates: many print a `content` of null as the word None."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def answers_of(spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], origin: str) -> list[Rendered | Refused]:
    """What worker processes make of rows with the template of `spec` (see chat_worker.py). origin: what errors call the template."""
    answers: list[Rendered | Refused] = []
    with contextlib.closing(_asked(spec, rows)) as batches:
        for answer in itertools.chain.from_iterable(batches):
            if "hostile" in answer:
                error = HostileTemplateError(
                    at=origin, problem=f"the template cannot be used: {answer['hostile']}", fix="Give another one."
                )
                error.row = len(answers) + answer.get("row", 0)  # of a worker that was ended there is one answer, which names its row
                raise error
            if "refused" in answer:
                answers.append(Refused(answer["refused"], answer["detail"]))
            elif not is_unicode(answer["text"]):
                answers.append(Refused("invalid_utf8", "a text holds half of a surrogate pair"))
            else:
                answers.append(Rendered(answer["text"], answer["spans"], answer["end"]))
    return answers


def load_chat_template(tokenizer: Tokenizer, *, chat_template: str | Path | None, train_on: str, date: str | None) -> ChatTemplate:
    """The tokenizer's own template, or the given one: a file, the text itself, or the name of a built-in one.

    Raises TokenizerError where there is none, ConfigError for a file that is not there or a date that is none.
    """
    if date is not None:
        check_date(date)
    tool_use = None
    if chat_template is None:
        source, tool_use, origin = find_chat_template(tokenizer.name)
    else:
        source, origin = given_template(chat_template, at="chat_template", names=CHAT_TEMPLATES)
    return ChatTemplate(
        source=source,
        tool_use=tool_use,
        names=tokenizer.special_strings,
        closers=tokenizer.special_tokens,
        train_on=train_on,
        date=date,
        origin=origin,
    )


def check_date(date: str) -> None:
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        raise ConfigError(at="template_date", problem=f"{date!r} is no date", fix="Write it as 2026-01-31.") from None


def is_jinja(text: str) -> bool:
    return "{%" in text or "{{" in text or "{#" in text


def given_template(template: str | Path, *, at: str, names: Mapping[str, str] = MappingProxyType({})) -> tuple[str, str]:
    """(source, origin) of a Jinja template that is given as its text, by a name of `names`, or as a file."""
    text = str(template)
    if isinstance(template, str) and is_jinja(text):
        return text, at
    if text in names:
        return names[text], f"built-in template {text!r}"
    path = Path(text).expanduser()
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if path.is_file():
            raise ConfigError(at=at, problem=f"{path} cannot be read: {error}", fix="Give a Jinja template in UTF-8.") from None
        raise ConfigError(
            at=at,
            problem=f"{text[:200]!r} is neither a file nor the text of a template",
            have=sorted(names) or None,
            fix=did_you_mean(text, names) or "Give the path of a .jinja file.",
        ) from None


def is_unicode(value: Any) -> bool:
    """Whether a value can be written as UTF-8, as far as it is text."""
    try:
        return not isinstance(value, bytes) and (not isinstance(value, str) or value.encode() is not None)
    except UnicodeEncodeError:
        return False


def _requests(spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[bytes, int]]:
    """(request, rows in it), for all rows in their order."""
    for first in range(0, len(rows), BATCH_ROWS):
        some = rows[first : first + BATCH_ROWS]
        request = json.dumps({"template": spec, "rows": some}, default=str).encode() + b"\n"  # dates and decimals of Arrow become text
        if len(request) <= BATCH_BYTES or len(some) == 1:
            yield request, len(some)
        else:
            half = len(some) // 2
            yield from _requests(spec, some[:half])
            yield from _requests(spec, some[half:])


def _asked(spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Generator[list[dict[str, Any]]]:
    """Answers to all rows, request by request; to a hostile one, whose row it names, is the last one given.

    While answers are read, other workers have the next requests, as far as there are more workers than threads that ask.
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


def _received(under_way: deque[tuple[_Worker, int]]) -> list[dict[str, Any]]:
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
        self._number = tempfile.TemporaryFile(prefix="easypipe-chat-")  # of the row that it works on  # noqa: SIM115
        package = str(Path(__file__).parents[2])
        known = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG") if key in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "easypipe.transforms.chat_worker", str(self._number.fileno())],
            pass_fds=(self._number.fileno(),),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**known, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)},
        )
        self.gone = False

    def send(self, request: bytes) -> None:
        """Of a worker that has answered all before, and so reads."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone, which who reads its answers sees
            self._process.stdin.write(request)
            self._process.stdin.flush()

    def receive(self, count: int) -> list[dict[str, Any]]:
        """Answers to `count` rows, or to none but the one it ended at."""
        assert self._process.stdout is not None
        answers: list[dict[str, Any]] = []
        held, source, at = b"", self._process.stdout.fileno(), 0
        read: list[bytes] = []
        missing = 1  # bytes at least, until there is another whole answer
        while len(answers) < count:
            if sum(map(len, read)) >= missing:
                held, at = b"".join([held[at:], *read]), 0
                read.clear()
                stop = 0
                while (end := held.find(b"\n", at)) >= 0:
                    answer = json.loads(held[at:end])
                    stop = end + 1 + answer.get("size", 0)
                    if stop > len(held):
                        break
                    if "size" in answer:
                        answer["text"] = held[end + 1 : stop].decode("utf-8", "surrogatepass")
                    answers.append(answer)
                    at = stop
                missing = 1 if end < 0 else stop - len(held)
                continue
            if not select.select([source], [], [], STALL_SECONDS)[0]:
                raise StallError(at="chat template", problem=f"a worker process gave no answer for {STALL_SECONDS:.0f} s", fix="Run again.")
            read.append(os.read(source, 1 << 20))
            if not read[-1]:
                return [self._end()]
        return answers

    def _end(self) -> dict[str, Any]:
        """Why the worker is gone."""
        self.gone = True
        code = self._process.wait()
        why = {
            -signal.SIGPROF: "it takes more than 0.75 s of processor time for one conversation",
            -signal.SIGKILL: "the system ended it, most likely for its memory",
        }
        row = int.from_bytes(os.pread(self._number.fileno(), 8, 0), "little")
        return {"hostile": why.get(code, f"its process ended with status {code}"), "row": row}

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
    """A worker that has nothing to do. must: start one rather than give none; else: None where every core has one at work, or where
    there would have to be another one and not `start`."""
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
        if len(_idle) <= (os.cpu_count() or 1):  # one more: a thread finds none where others have taken those of all cores
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
