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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, Self

SOURCE = Path(__file__).with_name("interposer.c")
OFF, RECORD, KILL, FAIL, FAIL_ON = range(5)  # as in interposer.c
DEADLINE_S = float(os.environ.get("EASYPIPE_PATIENCE_S", "120"))  # more where a machine is busy
GRACE_S = 5.0
THEN = ", then "
ERROR_OF_OURS, BARE, TOO_LONG = 3, 4, 5  # exit codes of a fork


def missing() -> str:
    """Why file operations cannot be interposed here; "" where they can."""
    if sys.platform != "linux":
        return f"LD_PRELOAD is interposed on Linux, this is {sys.platform}"
    return "" if shutil.which("cc") else "there is no C compiler named cc"


@dataclass(frozen=True)
class Order:
    """What a fork is to do: `job` in `folder`, and at its `at`-th file operation `action`.

    job: the name of one, or of several with THEN between them. environment: variables of the
    fork.
    """

    job: str
    folder: str
    action: int = OFF
    at: int = 0
    errno: int = 0
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Outcome:
    """code: 0; negative: the signal that ended it; ERROR_OF_OURS; BARE. said: on the terminal.

    operations: (call, path) of each, in order. files: of each its inode and its size before, (0, 0)
    where the call names it by its path. times: when each was made. others: of the processes that
    ran beside it. frames: of each that was recorded, the lines of easypipe
    that made it, the innermost first; none of threads that no Python runs in.
    """

    code: int
    said: str
    operations: list[tuple[str, str]]
    files: list[tuple[int, int]]
    times: list[int]
    frames: list[list[str]]
    others: list[Outcome] = field(default_factory=list["Outcome"])


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
            | {
                "LD_PRELOAD": str(library),
                "PYTHONPATH": paths,
                "TOKENIZERS_PARALLELISM": "false",
                "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
        )

    def run(self, order: Order) -> Outcome:
        return self.together([order])[0]

    def together(self, orders: Sequence[Order], *, as_one: bool = False) -> list[Outcome]:
        """What becomes of forks that run at the same time. as_one: where one does not end well, the
        others are ended GRACE_S later, as those that start the processes of a run do it.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        said = [self._said.with_name(f"said-{i}") for i in range(len(orders))]
        told = [[asdict(order), str(path)] for order, path in zip(orders, said, strict=True)]
        self._process.stdin.write(json.dumps([told, as_one]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks has ended"
        return [_outcome(code, path) for code, path in zip(json.loads(line), said, strict=True)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate("", timeout=DEADLINE_S)


def _outcome(code: int, said: Path) -> Outcome:
    operations: list[tuple[str, str]] = []
    files: list[tuple[int, int]] = []
    times: list[int] = []
    frames: list[list[str]] = []
    for line in said.with_suffix(".log").read_text().splitlines():
        if "\t" in line:
            call, when, inode, size, path = line.split("\t", 4)
            operations.append((call, path))
            files.append((int(inode), int(size)))
            times.append(int(when))
            frames.append([])
        elif "/easypipe/" in line:
            frames[-1].append(line.rpartition("/easypipe/")[2])
    return Outcome(code, said.read_text(errors="replace"), operations, files, times, frames)


def _fork(order: Order, said: str) -> int:
    """The process number of a fork that carries out `order`."""
    child = os.fork()
    if not child:
        _carry_out(order, said)
    return child


def _exit_codes(children: Sequence[int], *, as_one: bool) -> list[int]:
    """Of forks, when all have ended. Those that never do are killed."""
    ends = time.monotonic() + DEADLINE_S * len(children)
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in set(children) - codes.keys():
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if as_one and codes[child]:
                    ends = min(ends, time.monotonic() + GRACE_S)
            elif time.monotonic() > ends:
                os.kill(child, 9)
                os.waitpid(child, 0)
                codes[child] = TOO_LONG
        time.sleep(0.002)
    return [codes[child] for child in children]


def _carry_out(order: Order, said: str) -> None:
    """Never comes back."""
    from disasters.jobs import JOBS, READERS, TOGETHER

    code = BARE
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    log = os.open(f"{said}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        os.chdir(order.folder)
        os.environ.update(order.environment)
        library: Any = ctypes.CDLL(None)
        library.disaster_arm(
            order.folder.encode(), order.action, ctypes.c_long(order.at), order.errno, log
        )
        for name in order.job.split(THEN):
            code = _ended((JOBS | READERS | TOGETHER)[name].run)
            if code:
                break
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

        _keep_compiled()
    for line in sys.stdin:
        told, as_one = json.loads(line)
        children = [_fork(Order(**order), said) for order, said in told]
        codes = _exit_codes(children, as_one=as_one)
        for _, said in told:
            imported = Path(f"{said}.modules")  # not there where a fork was killed
            for name in imported.read_text().split() if imported.exists() else ():
                with contextlib.suppress(Exception):
                    _load_kernels(importlib.import_module(name))
        print(json.dumps(codes), flush=True)


def _keep_compiled() -> None:
    """Lets every process of a run write what it compiled for the next runs, under a key of its own.

    jax lets the first one alone, so that the others compile in every run, which is most of its time.
    """
    from jax._src import compiler

    first: Any = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
    compiler.distributed = first


def _load_kernels(module: ModuleType) -> None:
    """Those that a fork has compiled, so that the next ones have them."""
    from easypipe.core.jit import _Kernel

    for kernel in [*vars(module).values()]:
        if isinstance(kernel, _Kernel) and kernel.__module__ == module.__name__:
            made = kernel.made()
            for signature, *_ in made._cache._cache_file._load_index():
                made.compile(signature)


if __name__ == "__main__":
    os.environ.setdefault("TMPDIR", tempfile.gettempdir())
    _serve()
