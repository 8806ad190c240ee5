"""A case of bad input: one small project in which something is wrong, and how it is tried out."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easypipe.cli import main
from easypipe.core.errors import EasypipeError
from pipelines import texts, tokenizer

DEADLINE_S = 30.0
AWAY = "-"  # as the value of an option: take it out of the config
THEN = " … "  # between parts of a message that follow each other

ROWS = [{"text": text} for text in texts(20, longest=8)]
Files = Mapping[str, bytes | str]
Action = Callable[[Path], object]


def lines(rows: Sequence[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


DATA = lines(ROWS)
CONFIG: dict[str, Any] = {
    "datasets": [{"name": "web", "data_files": "data.jsonl"}],
    "default_tokenizer": "tokenizer",
    "seed": 7,
    "cache_dir": "cache",
    "pack": {"seq_length": 32},
    "load": {"batch_size": 2},
}


@dataclass(frozen=True)
class Case:
    """What is wrong with a project of one file of 20 rows, a tokenizer and a config, all of which
    are right.

    what: in words. says: parts of the message, in order; None where it is accepted. files: what
    stands in which file. options: values by their key paths in the config. config: the whole file
    instead. damage: what is done to the folder after `easypipe prepare` went well. setup: what is
    done to it before all else. run: the command, or what is done in Python.
    """

    what: str
    says: str | None
    files: Files = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    config: bytes | str | None = None
    setup: Action | None = None
    damage: Action | None = None
    run: Sequence[str] | Action = ("prepare", "run.yaml")


@dataclass(frozen=True)
class Answer:
    """said: the error, without what is said on the way. own: whether it is one of ours."""

    failed: bool
    said: str
    own: bool
    seconds: float


def expect(case: Case, answer: Answer) -> None:
    """Asserts that `answer` is what the case wants: in time, and an error of ours with cause and
    fix, or none.
    """
    well_answered(answer)
    if case.says is None:
        assert not answer.failed, answer.said
        return
    assert answer.failed, "it is accepted"
    wanted = ".*".join(re.escape(part) for part in case.says.split(THEN))
    assert re.search(wanted, answer.said, re.DOTALL), f"{case.says!r} is not in: {answer.said}"


def well_answered(answer: Answer) -> None:
    """Asserts that it came in time, and that an error is one of ours with a fix."""
    assert answer.seconds < DEADLINE_S, f"not done after {answer.seconds:.0f} s"
    if not answer.failed:
        return
    assert answer.own, f"not an error of ours: {answer.said}"
    first = answer.said.partition("\nwhile ")[0].partition("\ndataset ")[0]
    assert re.search(
        r"[.?!)]\s+\S.*|\(have: |: wants |expected |is outside |ends before it", first, re.DOTALL
    ), f"no fix: {answer.said}"


def try_out(case: Case, folder: Path) -> Answer:
    """What easypipe answers in `folder`, which is empty. What was there stays as it was."""
    with contextlib.chdir(folder), _within(DEADLINE_S):
        _write(case, folder)
        if case.setup is not None:
            case.setup(folder)
        if case.damage is not None:
            good = _run(("prepare", "run.yaml"), folder)
            assert not good.failed, good.said
            case.damage(folder)
        inputs = _contents(folder, case)
        answer = _run(case.run, folder)
        changed = [name for name, data in inputs.items() if _read(folder / name) != data]
        assert not changed, f"changed: {changed}"
        left = [str(path) for path in folder.rglob("*.tmp-*")]
        assert not left, f"left behind: {left}"
    return answer


def warm_up(folder: Path) -> None:
    """Compiles what every case uses, which may take longer than a case may."""
    with contextlib.chdir(folder):
        _write(Case("nothing", None), folder)
        main(["prepare", "run.yaml"])


def _write(case: Case, folder: Path) -> None:
    shutil.copytree(tokenizer(), folder / "tokenizer")
    options = {"data.jsonl": DATA} | dict(case.files)
    options["run.yaml"] = _config(case.options) if case.config is None else case.config
    for name, content in options.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _config(options: Mapping[str, Any]) -> str:
    values: Any = copy.deepcopy(CONFIG)
    for path, value in options.items():
        node, *keys = values, *path.split(".")
        for key in keys[:-1]:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        last: Any = int(keys[-1]) if isinstance(node, list) else keys[-1]
        if value == AWAY:
            del node[last]
        else:
            node[last] = value
    return json.dumps(values)


def _contents(folder: Path, case: Case) -> dict[str, bytes | None]:
    return {name: _read(folder / name) for name in ("data.jsonl", "run.yaml", *case.files)}


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() and os.access(path, os.R_OK) else None


def _run(run: Sequence[str] | Action, folder: Path) -> Answer:
    began = time.monotonic()
    if callable(run):
        failed, said, own = _call(run, folder)
    else:
        failed, said, own = _command(run)
    # where the tests are is nothing that a reader could use
    said = said.replace(f"{folder}/", "").replace(str(folder), ".")
    return Answer(failed, said, own, time.monotonic() - began)


def _call(run: Action, folder: Path) -> tuple[bool, str, bool]:
    try:
        run(folder)
    except EasypipeError as error:
        return True, str(error), True
    except BaseException as error:  # noqa: BLE001  (what is not ours is what is looked for)
        return True, f"{type(error).__name__}: {error}", False
    return False, "", True


def _command(arguments: Sequence[str]) -> tuple[bool, str, bool]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    shown = err.getvalue()
    said = shown.partition("easypipe: ")[2] or shown or out.getvalue() if code else ""
    said = said.replace("\neasypipe:   ", "\n")  # notes behind the error
    bare = "Traceback" in shown or "This is a bug in easypipe" in said
    return code != 0, said.strip(), not bare


@contextlib.contextmanager
def _within(seconds: float) -> Generator[None]:
    """Raises TimeoutError where what is inside takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
