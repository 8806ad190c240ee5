from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from numba.core import entrypoints

import easypipe
from easypipe.core.jit import jit

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
logging.getLogger("numba").setLevel(logging.WARNING)
import numpy as np
from easypipe.plan.pack import PackSpec, pack_window
from easypipe.sources.formats.scanners import BLANK, flag_blank
from easypipe.sources.formats.records import frozen
flags = np.zeros(1, np.uint8)
flag_blank(frozen(b"  "), np.zeros(1, np.int64), np.full(1, 2), flags)
assert flags[0] == BLANK
print(pack_window(np.array([3, 5], dtype=np.int32), PackSpec(8), 0).num_rows)
"""
WITH_KERNELS = ("plan", "sources")


def run(package: Path, cache: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    environment |= {
        "PYTHONPATH": str(package.parent),
        "XDG_CACHE_HOME": cache,
        "HOME": cache,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_kernels_run_where_nothing_can_be_written(tmp_path: Path) -> None:
    """`__pycache__` is a file and the home is not a folder: what a read-only image looks like, also to
    root.
    """
    package = tmp_path / "easypipe"
    shutil.copytree(
        Path(easypipe.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    for part in WITH_KERNELS:
        (package / part / "__pycache__").write_text("")
    output = run(package, "/dev/null/nothing")
    assert output.splitlines()[-1] == "1"
    assert "no disk cache for" in output


def test_kernels_are_kept_in_the_users_cache_where_the_package_is_read_only(tmp_path: Path) -> None:
    package, home = tmp_path / "easypipe", tmp_path / "home"
    shutil.copytree(
        Path(easypipe.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    for part in WITH_KERNELS:
        (package / part / "__pycache__").write_text("")
    assert "no disk cache" not in run(package, str(home))
    assert list(home.rglob("*.nbi"))


def test_numba_is_loaded_by_the_first_kernel_alone() -> None:
    first = "from easypipe import Pipeline, tokenize_and_save\nprint('numba' in sys.modules)\n"
    program = PROGRAM.replace("import numpy", f"{first}import numpy")
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.split() == ["False", "1"]


def test_numba_can_be_imported_ahead() -> None:
    wait = "import sys, threading; [one.join() for one in threading.enumerate()[1:]]"
    program = f"from easypipe.core import jit; jit.ahead(); {wait}; print('numba' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout == "True\n"


def test_threads_that_call_a_kernel_first_at_the_same_time_get_one() -> None:
    @jit
    def twice(x: int) -> int:
        return 2 * x

    made, start = [], threading.Barrier(4)

    def call() -> None:
        start.wait()
        made.append((twice(21), twice.made()))  # pyright: ignore[reportFunctionMemberAccess]

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {result for result, _ in made} == {42}
    assert len({id(kernel) for _, kernel in made}) == 1


def test_no_kernel_compiles_while_an_extension_of_numba_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what it registers empties a table that the other thread reads: a KeyError, seldom."""
    compiled = threading.Event()

    @jit
    def first(x: int) -> int:
        return ~x

    @jit
    def second(x: int) -> int:
        return ~x

    monkeypatch.setattr(second, "_make", lambda make=second._make: (compiled.set(), make())[1])  # pyright: ignore[reportFunctionMemberAccess]
    other, seen = threading.Thread(target=lambda: second(1)), []

    def extension() -> None:
        other.start()
        seen.append(compiled.wait(0.5))

    class Found:
        def select(self, **_: str) -> list[SimpleNamespace]:
            return [SimpleNamespace(load=lambda: extension)]

    monkeypatch.setattr(entrypoints, "_already_initialized", False)
    monkeypatch.setattr(entrypoints.importlib_metadata, "entry_points", Found)
    assert first(1) == -2
    other.join()
    assert seen == [False], "the second kernel waits for the extension"
    assert compiled.is_set()


KERNEL = """
from typing import NamedTuple
import numpy as np
from easypipe.core.jit import jit
class NAME(NamedTuple):
    numbers: np.ndarray
@jit
def total(given):
    return given.numbers.sum()
print(total(NAME(np.arange(4))))
"""


def test_code_kept_for_a_class_that_is_gone_is_compiled_anew(tmp_path: Path) -> None:
    """As after an upgrade: Numba alone ends with an AttributeError."""
    module, environment = tmp_path / "kernels.py", os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for name in ("Before", "After"):
        module.write_text(KERNEL.replace("NAME", name), encoding="utf-8")
        found = subprocess.run(
            [sys.executable, "-c", "import kernels"],
            env=environment | {"PYTHONPATH": f"{tmp_path}:{Path(easypipe.__file__).parents[1]}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert found.stdout == "6\n", found.stderr
        assert list(tmp_path.rglob("*.nbi")), "Numba keeps its code there"
