"""Maps token files of this machine to fixed addresses: how many at once, and whether each is valid.

A process maps at most vm.max_map_count files (only Linux has that limit). Caches are mapped whole
when they are opened, until those of the process use half of it. After that, each file gets a place
in a reserved range of addresses, which costs nothing, and is mapped there while it is read. A
quarter of the limit is for such files; the least recently read are unmapped first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import stat
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.cache.manifest import Part
from easypipe.core.errors import CacheError
from easypipe.core.storage import endless_refused
from easypipe.core.values import Int64, Integers, UInt64

AGAIN = "Prepare the dataset again; only this range is tokenized again."
LIMIT = Path("/proc/sys/vm/max_map_count")

# not every system has MAP_NORESERVE
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_FIXED = 0x10  # MAP_FIXED of Linux: replaces what is mapped there
_NOTHING = 0  # PROT_NONE

_lock = threading.RLock()  # re-entrant, as the garbage collector may run _forget within it
_standing = 0  # how many files are mapped for the lifetime of their cache
# by (number of MappedFiles, file), the least recently read first
_open: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
_numbers = itertools.count()


def most_maps() -> int:
    """Returns how many files one process may map."""
    try:
        return int(LIMIT.read_text())
    except (OSError, ValueError):
        return sys.maxsize


def may_map(owner: _Region, files: int) -> bool:
    """Returns whether `owner` may map all of its files for its lifetime, and counts them if so."""
    global _standing
    with _lock:
        if _standing + files > most_maps() // 2:
            return False
        _standing += files
    weakref.finalize(owner, _give_back, files)
    return True


def _give_back(files: int) -> None:
    global _standing
    with _lock:
        _standing -= files


class _Region:
    """The owner of the addresses that files are mapped to.

    The addresses are released when nothing references this object or a view of its memory.
    """


class _Entry:
    """A file that is mapped in its place for a while.

    Attributes:
        owner: The MappedFiles that it belongs to.
        pins: How many readers are at work on it.
    """

    def __init__(self, owner: weakref.ref[MappedFiles], pins: int) -> None:
        self.owner, self.pins = owner, pins


class MappedFiles:
    """The files of one cache; it implements cache.reader.TokenFiles. It is thread-safe.

    Attributes:
        stays: Whether all files are mapped for the lifetime of this object, so that `hold` has
            nothing to do.
    """

    def __init__(self, parts: Sequence[Part], paths: Sequence[str]) -> None:
        """Reserves addresses for all files, and maps them if they may stay.

        Raises:
            CacheError: There are not enough addresses, or a file is missing or has another size.
        """
        step = mmap.ALLOCATIONGRANULARITY
        self._paths, self._sizes = paths, [part.num_bytes for part in parts]
        rooms = [-(-max(size, 1) // step) * step for size in self._sizes]
        places = np.cumsum([0, *rooms], dtype=np.int64)
        self._number, size = next(_numbers), int(places[-1])
        region = _map(None, size, _NOTHING, _RESERVED, -1) if size else 0
        if region is None:
            raise CacheError(
                at=paths[0],
                problem=f"no room for the addresses of {size} bytes",
                fix="Raise ulimit -v.",
            )
        self.addresses: UInt64 = places[:-1].astype(np.uint64) + np.uint64(region)
        self._region = _Region()
        gone = weakref.finalize(self._region, _forget, self._number, region, size)
        # not at exit: threads that still read when the process ends would crash
        gone.atexit = False
        self.stays = may_map(self._region, len(paths))
        # the most files that should be held at once; more are held if necessary
        self.most = sys.maxsize if self.stays else max(1, most_maps() // 4)
        self._batches: list[pa.RecordBatch] = []  # filled only if all files stay
        for i in range(len(paths) if self.stays else 0):
            self._bring(i)
            self._batches.append(self._batch(i))

    def batch(self, i: int) -> pa.RecordBatch:
        """Returns the documents of a file that is held, without a copy.

        Raises:
            CacheError: It is not a token file.
        """
        return self._batches[i] if self.stays else self._batch(i)

    def _batch(self, i: int) -> pa.RecordBatch:
        data = pa.foreign_buffer(int(self.addresses[i]), self._sizes[i], base=self._region)
        return token_batch(data, self._paths[i])

    @contextlib.contextmanager
    def hold(self, files: Integers, docs: Int64 | None = None) -> Generator[None]:
        """Maps `files` (Int[n]) for the length of the block.

        Raises:
            CacheError: A file cannot be mapped.
        """
        if self.stays:
            yield
            return
        held: list[_Entry] = []
        try:
            with _lock:
                absent: list[int] = []
                for i in np.unique(files).tolist():
                    entry = _open.get((self._number, i))
                    if entry is None:
                        absent.append(i)
                        continue
                    entry.pins += 1
                    held.append(entry)
                    _open.move_to_end((self._number, i))
                _shrink(self.most - len(absent))
                for i in absent:
                    self._bring(i)
                    entry = _open[self._number, i] = _Entry(weakref.ref(self), pins=1)
                    held.append(entry)
            yield
        finally:
            with _lock:
                for entry in held:
                    entry.pins -= 1
                _shrink(self.most)

    def _bring(self, i: int) -> None:
        """Maps file i in its place."""
        path, size = self._paths[i], self._sizes[i]
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is not waited for
        except FileNotFoundError as error:
            raise CacheError(at=path, problem="missing from the token cache", fix=AGAIN) from error
        except OSError as error:
            raise CacheError(at=path, problem=f"cannot be read: {error}", fix=AGAIN) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                endless_refused(path)
            # touching a map past the end of its file would crash the process
            found = status.st_size
            if found != size:
                raise CacheError(
                    at=path, problem=f"{found} bytes, committed with {size}", fix=AGAIN
                )
            flags = mmap.MAP_SHARED | _FIXED
            if _map(int(self.addresses[i]), size, mmap.PROT_READ, flags, descriptor) is None:
                raise CacheError(
                    at=path,
                    problem=f"cannot be mapped: {os.strerror(ctypes.get_errno())}",
                    fix="A process maps a limited number of files, and this cache has "
                    f"{len(self._paths):,}: raise sysctl vm.max_map_count.",
                )
        finally:
            os.close(descriptor)

    def drop(self, i: int) -> None:
        """Unmaps file i; its addresses stay reserved."""
        done = _map(
            int(self.addresses[i]), max(self._sizes[i], 1), _NOTHING, _RESERVED | _FIXED, -1
        )
        assert done is not None, "taking a map away needs no new one"


def token_batch(data: pa.Buffer, at: str) -> pa.RecordBatch:
    """Returns the documents of a token file, without a copy of `data`.

    Raises:
        CacheError: It is not a token file.
    """
    try:
        return pa.ipc.open_file(data).get_batch(0).replace_schema_metadata(None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CacheError(at=at, problem=f"cannot be read: {error}", fix=AGAIN) from error


def require_sound(batch: pa.RecordBatch, part: Part, at: str) -> None:
    """Checks the index of a token file for consistency and against what was committed.

    Args:
        batch: The documents of the file; only the index is read.
        part: What the manifest says about the file.
        at: The file, for errors.

    Raises:
        CacheError: Documents end outside the file, or its documents are not those that were
            committed.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise CacheError(at=at, problem=f"cannot be read: {error}", fix=AGAIN) from error
    for column in batch.columns:
        if pa.types.is_large_list(column.type):
            found = len(column.values), column.offsets[0].as_py(), column.offsets[-1].as_py()
            if found != (part.tokens, 0, part.tokens):
                problem = (
                    f"holds {found[0]} tokens, its documents have {found[1]} to "
                    f"{found[2]}, and {part.tokens} were committed"
                )
                raise CacheError(at=at, problem=problem, fix=AGAIN)


def _shrink(most: int) -> None:
    """Unmaps the least recently read files until `most` are left, but not files in use."""
    for _ in range(len(_open)):
        if len(_open) <= most:
            return
        key, entry = next(iter(_open.items()))
        if entry.pins:
            _open.move_to_end(key)
            continue
        _open.pop(key, None)
        # While this reference is held, its addresses cannot be given to another cache.
        owner = entry.owner()
        if owner is not None:
            owner.drop(key[1])


def _forget(number: int, region: int, num_bytes: int) -> None:
    """Unmaps all files of a MappedFiles that no longer exists."""
    with _lock:
        for key in [key for key in list(_open) if key[0] == number]:
            _open.pop(key, None)
        if num_bytes:
            _libc().munmap(region, num_bytes)


def _map(
    address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int
) -> int | None:
    """Calls mmap(2) with an address, which Python's own mmap cannot take; None if it fails."""
    found = _libc().mmap(address, num_bytes, protection, flags, descriptor, 0)
    return None if found is None or found == ctypes.c_void_p(-1).value else int(found)


@functools.cache
def _libc() -> Any:
    """Returns the C library, with the types of mmap(2) and munmap(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
