# pyright: strict
"""Locks of the operating system that say who works in a cache folder.

A process that dies, however it dies, lets go of its own.

cache_dir/locks/
  work.lock             shared by whoever prepares or repairs; exclusive for whoever clears
  <key>.reader.lock     shared by every open reader of the manifest <key>; exclusive for whoever removes it
  <key>.writer.lock     exclusive for the one process that prepares the manifest <key>

A folder that rows are saved into, or that a run trains in, is locked itself: no file is left in it.

flock(2): a lock belongs to an open file, so two readers in one process are two as well. (That of
fasteners 0.19 is lockf, which belongs to the process: the first reader that closes frees all.) Over
NFS the server has to support locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path

from easypipe.core.closing import Closeable
from easypipe.core.errors import StallError, StorageError, TrainError, raising
from easypipe.core.storage import make_folder

FOLDER = "locks"
POLL_S = 0.02
REMIND_S = 60.0

log = logging.getLogger("easypipe")

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class Hold(Closeable):
    """A lock that is held until `close()`, the end of a `with` block, or the end of this object."""

    def __init__(self, descriptor: int) -> None:
        self._close = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        self._close()


def work_lock(cache_dir: Path) -> Path:
    return cache_dir / FOLDER / "work.lock"


def reader_lock(cache_dir: Path, key: str) -> Path:
    return cache_dir / FOLDER / f"{key}.reader.lock"


def writer_lock(cache_dir: Path, key: str) -> Path:
    return cache_dir / FOLDER / f"{key}.writer.lock"


def try_hold(path: Path, *, exclusive: bool) -> Hold | None:
    """None where somebody holds `path` in a way that does not go together. Raises StorageError
    where the file system has no locks.
    """
    while True:
        try:
            make_folder(path.parent)
            descriptor = _open(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError):  # read-only, and nobody has locked it yet
                error.errno = errno.EROFS
            raise StorageError(
                at=str(path),
                problem=f"cannot be locked: {error}",
                fix="Check permissions of the cache folder.",
            ) from error
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise StorageError(
                at=str(path),
                problem=f"this file system has no locks: {error}",
                fix="Put the cache on another one.",
            ) from error
        if _is(path, descriptor):
            return Hold(descriptor)
        os.close(descriptor)  # removed, by one who held it alone, between opening and locking


def hold(path: Path, *, exclusive: bool, what: str, timeout_s: float | None = None) -> Hold:
    """Waits until `path` is free. what: named while waiting, and by the StallError after
    `timeout_s` (None: for as long as it takes).
    """
    began = reminded = time.monotonic()
    first = True
    while (held := try_hold(path, exclusive=exclusive)) is None:
        now = time.monotonic()
        if timeout_s is not None and now - began > timeout_s:
            raise StallError(
                at=str(path),
                problem=f"waited {timeout_s:g} s for {what}",
                fix="Try again when it has ended.",
            )
        if first or now - reminded > REMIND_S:
            log.info("waiting for %s (%s)", what, path)
            first, reminded = False, now
        time.sleep(POLL_S)
    return held


def mark_reader(cache_dir: Path, key: str) -> Hold | None:
    """What an open reader of `key` holds. None where the folder is read-only and, with a warning,
    where it knows no locks.
    """
    try:
        return _hold_against_clearing(reader_lock(cache_dir, key))
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _READ_ONLY:
            log.warning(
                "%s: `easypipe cache clear` will not know that it is read: %s",
                cache_dir,
                error.problem,
            )
        # who may not write here may not clear either; whoever owns it should ask before clearing
        else:
            log.debug("%s is read-only, its reader leaves no mark", cache_dir)
        return None


def _hold_against_clearing(path: Path) -> Hold:
    what = "another process that clears the cache"
    return hold(path, exclusive=False, what=what, timeout_s=60.0)


@contextlib.contextmanager
def _holding(take: Callable[[], Hold], told: str, where: str | Path) -> Generator[None]:
    """While what `take` gives is held. Where there are no locks, warns and goes on."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(take())
        except StorageError as error:
            log.warning(told, where, error)
        yield


def working(cache_dir: Path) -> AbstractContextManager[None]:
    """While something is written that no manifest names yet: nobody clears the folder. Warns, and
    goes on, where there are no locks.
    """
    told = "%s: written without locks, others may clear it at the same time: %s"
    return _holding(lambda: _hold_against_clearing(work_lock(cache_dir)), told, cache_dir)


@contextlib.contextmanager
def preparing(cache_dir: Path, key: str, dataset: str) -> Generator[bool]:
    """While the manifest `key` is prepared: nobody clears the folder, and whoever wants the same
    waits and then finds it done.

    Yields whether there was such a wait. Where the file system has no locks this warns, and goes
    on: two processes that prepare the same do it twice, each range committed whole.
    """
    told = "dataset %s: prepared without locks, others may prepare or clear it at the same time: %s"
    path, waited = writer_lock(cache_dir, key), False

    def take() -> Hold:
        nonlocal waited
        alone = try_hold(path, exclusive=True)
        waited = alone is None
        what = f"another process that prepares dataset {dataset!r}"
        return alone or hold(path, exclusive=True, what=what)

    with working(cache_dir), _holding(take, told, dataset):
        yield waited


def saving(folder: Path) -> AbstractContextManager[None]:
    """While rows are saved into `folder`, which is made: whoever else wants to waits, and then
    finds what stands there.

    Raises StorageError where it cannot be made. Warns, and goes on, where the file system has no
    locks for folders.
    """
    _make(folder)
    told = "%s: written without locks, others may save there at the same time: %s"
    what = "another process that saves there"
    return _holding(lambda: hold(folder, exclusive=True, what=what), told, folder)


def training(folder: Path) -> AbstractContextManager[None]:
    """While a run trains into `folder`, which is made. Raises TrainError where another one does;
    warns, and goes on, where the file system has no locks for folders.
    """
    _make(folder)

    def take() -> Hold:
        held = try_hold(folder, exclusive=True)
        if held is None:
            raise TrainError(
                at=str(folder),
                problem="another process trains in this folder",
                fix="Wait until it has ended, or give another train.output_dir.",
            )
        return held

    return _holding(take, "%s: written without locks, others may train there too: %s", folder)


def _make(folder: Path) -> None:
    with raising(StorageError, folder, "cannot be written", "Check the path and permissions."):
        make_folder(folder)


def remove(path: Path) -> None:
    """Removes a lock file; only for whoever holds it alone."""
    path.unlink(missing_ok=True)


def _open(path: Path) -> int:
    if path.is_dir():
        return os.open(path, os.O_RDONLY)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        return os.open(path, os.O_RDONLY)  # enough for a lock, where the file is there


def _is(path: Path, descriptor: int) -> bool:
    try:
        there, here = os.stat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
