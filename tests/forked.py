"""Processes of Python whose libraries are loaded: forks of one that has imported them.

To import jax, flax, orbax and easypipe takes two seconds of a core, in each process that a test
starts; a fork has them. It begins where a fresh process would (its environment, folder, arguments,
`__main__`), with devices of its own, but shares the order of sets with the other forks. So of runs
that have to be equal, one is started by `subprocess`, and so is what tells of imports.
Run as a program, this file is the process that forks.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

PR_SET_CHILD_SUBREAPER = 36
# what a run imports, some of it late
LOADED = (
    "easypipe.cli.app",
    "easypipe.run",
    "easypipe.compat.trainer",
    "easypipe.kernels.loss.gpu.kernel",
    "easypipe.kernels.loss.tpu.kernel",
    "easypipe.transforms.tokenizer.bpe",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "numba",
    "tokenizers",
)


class Popen(subprocess.Popen[str]):
    """`subprocess.Popen` of a command `[sys.executable, ...]`, as a fork; Linux only, elsewhere it
    is started as usual.
    """

    def _execute_child(self, *given: Any) -> None:
        whole: Any = super()
        if sys.platform != "linux":
            return whole._execute_child(*given)
        named = inspect.signature(whole._execute_child).bind(*given).arguments
        files = [named["p2cread"], named["c2pwrite"], named["errwrite"]]
        order = {"arguments": [os.fspath(word) for word in named["args"][1:]]}
        order |= {"cwd": os.fspath(named["cwd"] or os.getcwd()), "given": [f != -1 for f in files]}
        order["environment"] = dict(os.environ if named["env"] is None else named["env"])
        self.pid = _begun(order, [file for file in files if file != -1])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(named[end] for end in ends))  # pyright: ignore
        return None


def run(command: list[Any], *, timeout: float = 600, **given: Any) -> subprocess.CompletedProcess:
    """`subprocess.run` with captured text, as a fork."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | given
    with Popen(command, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


_one_at_a_time = threading.Lock()


@functools.cache
def _forker() -> socket.socket:
    """The way to the process that forks, which is started by the first who asks."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # what jax reads while it is imported is set anew in each fork
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, __file__, str(its.fileno())], env=environment, pass_fds=[its.fileno()]
    )
    its.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def _begun(order: dict[str, Any], files: list[int]) -> int:
    """The process number of a fork, a child of this process: it outlives the one between, and this
    one takes its place.
    """
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    library = ctypes.CDLL(None)
    with _one_at_a_time:
        forker = _forker()
        library.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            forker.sendmsg([json.dumps(order).encode()], [rights])
            return int(forker.recv(64))
        finally:
            library.prctl(PR_SET_CHILD_SUBREAPER, 0)


def _serve(asked: socket.socket) -> dict[str, Any]:
    """Forks for each order; comes back in the forks."""
    while True:
        words, files, _, _ = socket.recv_fds(asked, 1 << 20, 3)
        if not words:
            os._exit(0)
        (number, told), between = os.pipe(), os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(told, str(child).encode())
                os._exit(0)
            for file in (number, told, asked.detach()):
                os.close(file)
            order = json.loads(words)
            _take_place(order, files)
            return order
        os.waitpid(between, 0)  # the fork has the one who asked for its parent now
        asked.send(os.read(number, 64))
        for file in (number, told, *files):
            os.close(file)


def _take_place(order: dict[str, Any], files: list[int]) -> None:
    for target, given in enumerate(order["given"]):
        if given:
            file = files.pop(0)
            os.dup2(file, target)
            os.close(file)
    for target, name in enumerate(("stdout", "stderr"), start=1):  # of a file or a pipe, as given
        setattr(sys, name, os.fdopen(target, "w", 1, "utf-8", "backslashreplace"))
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    import jax

    for name, value in order["environment"].items():
        option = name.lower()
        if name.startswith("JAX_") and option in jax.config.values:
            known = jax.config.values[option]
            of_type = str if known is None else type(known)
            asked = value.lower() in ("1", "true", "yes", "on") if of_type is bool else value
            jax.config.update(option, of_type(asked))


def _run(arguments: list[str]) -> None:
    """What `python ARGUMENTS` would."""
    what, *rest = arguments
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = ["", *filter(None, paths)]
    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if what == "-c":
        code, name, sys.argv = rest[0], "<string>", ["-c", *rest[1:]]
    else:
        code, name, sys.argv = Path(what).read_text(encoding="utf-8"), what, arguments
        sys.path[0], main.__file__ = os.path.dirname(os.path.abspath(what)), os.path.abspath(what)
    exec(compile(code, name, "exec"), main.__dict__)


def _end(run: Callable[[], None]) -> NoReturn:
    """As an interpreter ends, but without taking its modules down, which is most of its time."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        known = isinstance(end.code, int | None)
        code = int(end.code or 0) if known else print(end.code, file=sys.stderr) or 1
    except BaseException:  # noqa: BLE001  (as an interpreter does)
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    _end(lambda: _run(order["arguments"]))
