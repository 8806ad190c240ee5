"""Runs jobs in processes whose file operations are listed, killed at the n-th, or made to fail.

`Interposed` compiles interposer.c and keeps one process that has loaded it and everything that jobs
import; each job runs in a fork of it. Run as a program, this file is that process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SOURCE = Path(__file__).with_name("interposer.c")
OFF, RECORD, KILL, FAIL, FAIL_ON = range(5)  # as in interposer.c
DEADLINE_S = 120.0
ERROR_OF_OURS, BARE = 3, 4  # exit codes of a fork


def missing() -> str:
    """Why file operations cannot be interposed here; "" where they can."""
    if sys.platform != "linux":
        return f"LD_PRELOAD is interposed on Linux, this is {sys.platform}"
    return "" if shutil.which("cc") else "there is no C compiler named cc"


@dataclass(frozen=True)
class Order:
    """What a fork is to do: `job` in `folder`, and at its `at`-th file operation `action`."""

    job: str
    folder: str
    action: int = OFF
    at: int = 0
    errno: int = 0


@dataclass(frozen=True)
class Outcome:
    """code: 0; negative: the signal that ended it; ERROR_OF_OURS; BARE. said: on the terminal.

    operations: (call, path) of each, in order.
    """

    code: int
    said: str
    operations: list[tuple[str, str]]


class Interposed:
    """A process that forks jobs. To be used in a `with` block."""

    def __init__(self, folder: Path, *, arrays: bool = False) -> None:
        library = folder / "interposer.so"
        compiled = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(compiled, check=True, capture_output=True)
        tests = str(Path(__file__).parents[1])
        paths = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._said = folder / "said"
        self._process = subprocess.Popen(
            [sys.executable, __file__, *(["arrays"] if arrays else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"LD_PRELOAD": str(library), "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
        )

    def run(self, order: Order) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(order), str(self._said)]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks has ended"
        lines = self._said.with_suffix(".log").read_text().splitlines()
        operations = [(call, path) for call, _, path in (one.partition("\t") for one in lines)]
        return Outcome(json.loads(line), self._said.read_text(errors="replace"), operations)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate("", timeout=DEADLINE_S)


def _fork(order: Order, said: str) -> int:
    """The exit code of a fork that carries out `order`."""
    child = os.fork()
    if not child:
        _carry_out(order, said)
    ends = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return BARE


def _carry_out(order: Order, said: str) -> None:
    """Never comes back."""
    from disasters.jobs import JOBS, READERS

    code = BARE
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    log = os.open(f"{said}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        os.chdir(order.folder)
        library: Any = ctypes.CDLL(None)
        library.disaster_arm(
            order.folder.encode(), order.action, ctypes.c_long(order.at), order.errno, log
        )
        code = _ended((JOBS | READERS)[order.job].run)
        Path(f"{said}.modules").write_text("\n".join(sys.modules))
        threading._shutdown()  # type: ignore[attr-defined]  (what an interpreter does at its end)
        atexit._run_exitfuncs()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ended(run: Any) -> int:
    from easypipe.core.errors import EasypipeError

    try:
        run()
    except EasypipeError as error:
        print(f"easypipe: {error}", file=sys.stderr)
        return ERROR_OF_OURS
    except SystemExit:
        return ERROR_OF_OURS  # of a command, which has said why
    except BaseException:  # noqa: BLE001  (what is not ours is what is looked for)
        traceback.print_exc()
        return BARE
    return 0


def _serve() -> None:
    """Forks for each line of standard input. What a fork had to import, the next ones have."""
    import easypipe.cli.app

    if "arrays" in sys.argv:
        import easypipe.run  # noqa: F401
    for line in sys.stdin:
        order, said = json.loads(line)
        code = _fork(Order(**order), said)
        for name in Path(f"{said}.modules").read_text().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        print(code, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TMPDIR", tempfile.gettempdir())
    _serve()
