"""Checks of this machine: packages, devices, locks, atomic renames, a kill, the clock, limits."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from easypipe.core import locks, storage
from easypipe.core.random import permute
from easypipe.doctor.check import Check, Failed, Skipped

PACKAGES = ("easypipe", "jax", "flax", "optax", "orbax-checkpoint", "numpy", "numba", "pyarrow")
REPLACED = 200  # how often a file is replaced while it is read
SKEW_S = 5.0  # the most that the file system's clock may differ from this machine's
COARSE_S = 0.1  # two changes of a file within this time are told apart only by its size
OPEN_FILES = 1024  # at least this many open files must be allowed
FREE_BYTES = 1 << 30  # at least this much disk must be free
# Another process runs this to say whether it gets a lock.
ASK = (
    "import sys; from pathlib import Path; from easypipe.core import locks; "
    "print(locks.try_hold(Path(sys.argv[1]), exclusive=True) is not None)"
)
MULTIPLY = (
    "import jax, jax.numpy as jnp; x = jnp.arange(1024.).reshape(32, 32); "
    "assert float((x @ jnp.eye(32) - x).sum()) == 0; "
    "print(len(jax.devices()), jax.devices()[0].device_kind)"
)
DIE = (
    "import os, sys; from easypipe.core import storage; "
    "storage.set_fault_hook(lambda step, _: os._exit(9) if step == 'rename' else None); "
    "storage.commit_bytes(sys.argv[1], b'new')"
)


def machine_checks(folder: Path) -> Sequence[Check]:
    """Returns the checks of this machine.

    `folder` is empty and on the file system that is checked.
    """
    parts: dict[str, Callable[[], str]] = {
        "installation": installation,
        "devices": devices,
        "locks exclude": partial(locks_exclude, folder),
        "writes are synced": partial(writes_are_synced, folder),
        "renaming is atomic": partial(renaming_is_atomic, folder),
        "a kill loses nothing": partial(a_kill_loses_nothing, folder),
        "clock": partial(clock, folder),
        "limits": partial(limits, folder),
    }
    return [Check(name, try_out) for name, try_out in parts.items()]


def installation() -> str:
    """Checks that the packages are installed, and that rows are shuffled as they should be."""
    found: list[str] = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            raise Failed(f"{name} is not installed") from None
    drawn = permute(np.arange(1000), 1000, 7)
    if sorted(drawn.tolist()) != list(range(1000)):
        raise Failed("a permutation of 1,000 rows repeats or misses rows")
    return f"Python {sys.version.split()[0]}, {', '.join(found)}"


def devices() -> str:
    """Checks the devices in another process, so that this one does not occupy an accelerator."""
    done = _python(MULTIPLY)
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or ["jax died"])[-1])
    return done.stdout.strip().splitlines()[-1]


def locks_exclude(folder: Path) -> str:
    """Checks that two processes cannot hold one lock."""
    path = folder / "lock"
    with locks.try_hold(path, exclusive=True) or _no_lock(path):
        if _is_free(path):
            raise Failed(f"{path}: held here, and another process got it too")
    if not _is_free(path):
        raise Failed(f"{path}: released here, but another process did not get it")
    return "two processes, one lock"


def writes_are_synced(folder: Path) -> str:
    """Returns how long it takes to write and sync a small file."""
    began = time.monotonic()
    for number in range(10):
        storage.commit_bytes(folder / f"synced{number}", bytes(1 << 16))
    return f"{(time.monotonic() - began) * 100:.1f} ms for a file of 64 KiB"


def renaming_is_atomic(folder: Path) -> str:
    """Checks that a reader of a file that is replaced sees the old bytes or the new ones."""
    path = folder / "replaced"
    contents = [bytes([number]) * 50_000 for number in (1, 2)]
    storage.commit_bytes(path, contents[0])
    seen: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set() and not seen:
            try:
                if path.read_bytes() not in contents:
                    seen.append("a part of the new bytes")
            except OSError as error:
                seen.append(f"no file ({error.strerror})")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(REPLACED):
            storage.commit_bytes(path, contents[number % 2])
            if seen:
                break
    finally:
        stop.set()
        reader.join()
    if seen:
        raise Failed(f"{path}: while it was replaced, a reader saw {seen[0]}")
    return f"a file was replaced {REPLACED} times while it was read"


def a_kill_loses_nothing(folder: Path) -> str:
    """Checks that a process killed while it replaces a file leaves only the old bytes."""
    inside = folder / "killed"
    storage.commit_bytes(inside / "file", b"old")
    died = _python(DIE, inside / "file")
    found = (inside / "file").read_bytes()
    if died.returncode != 9 or found != b"old":
        raise Failed(f"{inside / 'file'}: killed while it was replaced, it holds {found!r}")
    swept = storage.sweep(inside)
    left = [path.name for path in inside.iterdir() if path.name != "file"]
    if swept != 1 or left:
        raise Failed(f"{inside}: what a killed process left is not found: {left}")
    return "the old bytes were kept, and temporary files were removed"


def clock(folder: Path) -> str:
    """Checks that files are dated by this machine's clock, finely enough to see a change."""
    path = folder / "clock"
    path.write_bytes(b"1")
    ahead = path.stat().st_mtime - time.time()
    if abs(ahead) > SKEW_S:
        raise Failed(f"files are dated {ahead:+.0f} s from this machine's clock")
    first = path.stat().st_mtime_ns
    time.sleep(COARSE_S)
    path.write_bytes(b"2")
    if path.stat().st_mtime_ns == first:
        raise Failed(
            f"two changes of a file {COARSE_S} s apart have the same date: a change that keeps a "
            "file's size may be overlooked"
        )
    return f"files are dated {ahead:+.2f} s from this machine's clock"


def limits(folder: Path) -> str:
    """Checks the limits of open files, disk and file names."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    endless = files == resource.RLIM_INFINITY
    if not endless and files < OPEN_FILES:
        raise Failed(f"{files} open files are allowed, {OPEN_FILES} are wanted: ulimit -n")
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES:
        raise Failed(f"{free / 1e9:.1f} GB are free in {folder}")
    long = folder / ("é" * 100 + ".arrow")
    long.write_bytes(b"")  # raises if names must be shorter or have another encoding
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    open_files = "any number of" if endless else files
    return f"{open_files} open files, {free / 1e9:.0f} GB of disk, {memory / 1e9:.0f} GB of memory"


def _python(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  (this Python, and what stands above)
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _is_free(path: Path) -> bool:
    done = _python(ASK, path)
    if done.returncode:
        raise Skipped(f"no other process could be asked: {done.stderr.strip()[-300:]}")
    return done.stdout.strip() == "True"


def _no_lock(path: Path) -> locks.Hold:
    raise Failed(f"{path}: a new file is locked by another process")
