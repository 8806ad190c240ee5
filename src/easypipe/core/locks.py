# pyright: strict
"""Locks of processes that prepare, read, clear, save or train in a folder; messages while waiting.

A process that dies releases its locks, whatever the cause.

cache_dir/locks/
  work.lock             shared by processes that prepare or repair; exclusive for one that clears
  <key>.reader.lock     shared by every open reader of the manifest <key>; exclusive for the process
                        that removes it
  <key>.writer.lock     exclusive for the one process that prepares the manifest <key>

A folder that rows are saved into, or that a run trains in, is locked itself: it gets no lock file.

The locks are flock(2), which belong to an open file, so two readers in one process hold two locks.
(fasteners 0.19 uses lockf, which belongs to the process: the first reader that closes releases
all.) On NFS the server must support locks.
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
from functools import partial
from pathlib import Path

from easypipe.core.closing import Closeable
from easypipe.core.errors import StallError, StorageError, TrainError, raising
from easypipe.core.storage import make_folder

FOLDER = "locks"
POLL_S = 0.02
REMIND_S = 60.0

log = logging.getLogger("easypipe")

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_CLEARING = "another process that clears the cache"


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
    """Takes the lock `path` if it is free.

    Returns:
        The lock; None if a holder excludes this one.

    Raises:
        StorageError: The file cannot be opened, or the file system has no locks.
    """
    while True:
        try:
            make_folder(path.parent)
            descriptor = _open(path)
        except OSError as error:
            # the folder is read-only, and nobody has locked it yet
            if isinstance(error, FileNotFoundError):
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
                problem=f"this file system does not support locks: {error}",
                fix="Put the cache on another file system.",
            ) from error
        # a process with the exclusive lock may have removed the file after it was opened here
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(path, descriptor):
                return Hold(descriptor)
        os.close(descriptor)


def hold(path: Path, *, exclusive: bool, what: str, timeout_s: float | None = None) -> Hold:
    """Takes the lock `path`, waiting until it is free.

    Args:
        path: The lock.
        exclusive: Whether no other holder is allowed at the same time.
        what: What is waited for, named in the log and in the error.
        timeout_s: The longest wait in seconds; None: no limit.

    Raises:
        StallError: The timeout passed.
        StorageError: As in `try_hold`.
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
    """Takes the shared lock of an open reader of the manifest `key`.

    Returns:
        The lock; None if the folder is read-only or, with a warning, if its file system has no
        locks.
    """
    try:
        return hold(reader_lock(cache_dir, key), exclusive=False, what=_CLEARING, timeout_s=60.0)
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _READ_ONLY:
            log.warning(
                "%s: `easypipe cache clear` will not know that it is read: %s",
                cache_dir,
                error.problem,
            )
        # A user who may not write here cannot clear either; the owner should ask before clearing.
        else:
            log.debug("%s is read-only, so its reader is not recorded", cache_dir)
        return None


@contextlib.contextmanager
def _holding(take: Callable[[], Hold], told: str, where: str | Path) -> Generator[None]:
    """Holds the lock that `take` returns during the block.

    If the file system has no locks, it warns with the text `told` and continues.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(take().close)
        except StorageError as error:
            log.warning(told, where, error)
        yield


def working(cache_dir: Path) -> AbstractContextManager[None]:
    """Returns a context in which no process clears the cache folder.

    It is for files that no manifest names yet. If there are no locks, it warns and continues.
    """
    told = "%s: written without locks, others may clear it at the same time: %s"
    lock = work_lock(cache_dir)
    take = partial(hold, lock, exclusive=False, what=_CLEARING, timeout_s=60.0)
    return _holding(take, told, cache_dir)


@contextlib.contextmanager
def preparing(cache_dir: Path, key: str, dataset: str) -> Generator[bool]:
    """Locks the manifest `key`, so that no other process prepares it or clears the folder.

    Another process that prepares the same manifest waits, and then finds it done. If the file
    system has no locks, this warns and continues: two processes then do the same work twice, and
    still commit only whole ranges.

    Yields:
        Whether this process had to wait for another process.
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
    """Returns a context in which only this process saves rows into `folder`, which it creates.

    Other processes wait, and then find what was saved. If the file system has no locks for folders,
    it warns and continues.

    Raises:
        StorageError: The folder cannot be created.
    """
    _make(folder)
    told = "%s: written without locks, others may save there at the same time: %s"
    what = "another process that saves there"
    return _holding(lambda: hold(folder, exclusive=True, what=what), told, folder)


def training(folder: Path) -> AbstractContextManager[None]:
    """Returns a context in which only this run trains into `folder`, which it creates.

    If the file system has no locks for folders, it warns and continues.

    Raises:
        TrainError: Another process trains there when the context is entered.
        StorageError: The folder cannot be created.
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
    """Removes a lock file; only a process that holds it exclusively may call this."""
    path.unlink(missing_ok=True)


def _open(path: Path) -> int:
    """Opens a file or folder to lock it; a missing file is created."""
    if path.is_dir():
        return os.open(path, os.O_RDONLY)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        return os.open(path, os.O_RDONLY)  # enough for a lock if the file exists
