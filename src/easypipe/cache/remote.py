"""Token files in a bucket: fetched by parts into a sparse local file of limited size, for kernels.

part     a token file (cache/manifest.py), given a place in the sparse file that begins at a page;
         its map exists from the start, its tokens do not
index    all of a part except tokens and masks: lengths, EOS flags, row numbers and Arrow's
         metadata; fetched when the part is opened
block    BLOCK bytes of a part with a checksum, fetched and checked as one; it may be dropped
         later if it holds only tokens or masks

The file is unlinked as soon as it is open, so that it disappears with the process, however that
ends. `StagedFiles.hold` fetches what is asked for and keeps it for the duration of its block.
Beyond `capacity` the least recently used parts release their blocks to the file system.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.cache.blocks import BLOCK, check_fetched, sums_of
from easypipe.cache.manifest import Part
from easypipe.cache.mapping import AGAIN, require_sound, token_batch
from easypipe.core import storage
from easypipe.core.aligned import numbers_of
from easypipe.core.errors import CacheError, MissingFileError, StorageError, raising
from easypipe.core.remote import StorageOptions
from easypipe.core.threads import Threads
from easypipe.core.values import Int64, Integers

STRETCH = 1 << 36  # bytes of one map; a sparse file uses no disk for them
REQUESTS = 16  # requests that run at a time
GUESS = 8 << 10  # expected bytes of Arrow's metadata at either end of a file; more is fetched later

log = logging.getLogger("easypipe")

_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # fallocate(2)


class Staging:
    """The sparse file that holds fetched blocks; the least recently used parts are dropped first.

    It is thread-safe.

    Attributes:
        capacity: The bytes of blocks that it may hold.
        used: The bytes of blocks that it holds.
        fetched_bytes: The total bytes that were fetched.
        pool: The threads that fetch.
    """

    def __init__(self, folder: Path | None, capacity: int) -> None:
        """Makes the file.

        Args:
            folder: The folder of the file; None takes the system's temporary folder.
            capacity: As in Attributes.

        Raises:
            StorageError: The file cannot be made.
        """
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(  # noqa: SIM115  (goes with this object)
                prefix="easypipe-staged-", dir=self._folder, buffering=0
            )
        self.capacity = capacity
        self.used = 0
        self.fetched_bytes = 0
        self._size = self._stretch = 0  # bytes of parts; where the last map begins
        self._map = memoryview(b"")
        self._lock = threading.Lock()
        # parts with blocks, the least recently used first
        self._parts: OrderedDict[int, StagedPart] = OrderedDict()
        self._warned = False
        self.pool = Threads(REQUESTS, thread_name_prefix="easypipe-stage")

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        fix = "Check space and permissions there, or set cache.staging_dir."
        return raising(StorageError, self._folder, "cannot be written", fix)

    def reserve(self, num_bytes: int) -> tuple[int, memoryview]:
        """Returns the offset and map of space for a part; no disk is used yet.

        Many parts share a map, because the number of maps of a process is limited.
        """
        with self._lock:
            base, step = self._size, max(BLOCK, mmap.ALLOCATIONGRANULARITY)
            size = -(-num_bytes // step) * step
            if base + size > self._stretch + len(self._map):
                length, file = max(STRETCH, size), self._file.fileno()
                with self._writing():
                    os.ftruncate(file, base + length)
                room = f"no room for the addresses of {length} bytes"
                with raising(StorageError, self._folder, room, "Raise ulimit -v."):
                    mapped = mmap.mmap(file, length, access=mmap.ACCESS_READ, offset=base)
                self._stretch, self._map = base, memoryview(mapped)
            self._size += size
            return base, self._map[base - self._stretch :][:num_bytes]

    def write(self, offset: int, data: bytes) -> None:
        """Writes fetched bytes into the file."""
        view = memoryview(data)
        with self._writing():
            while view:
                done = os.pwrite(self._file.fileno(), view, offset)
                offset, view = offset + done, view[done:]
        with self._lock:
            self.fetched_bytes += len(data)

    def pin(self, part: StagedPart) -> None:
        """Keeps the blocks of `part` until `unpin`."""
        with self._lock:
            part.pins += 1
            self._parts[part.base] = part
            self._parts.move_to_end(part.base)

    def grow(self, num_bytes: int) -> None:
        """Counts this many more bytes of pinned parts, and drops other parts beyond capacity."""
        with self._lock:
            self.used += num_bytes
            self._shrink()

    def unpin(self, part: StagedPart) -> None:
        """Lets `part` be dropped again, after everyone has unpinned it."""
        with self._lock:
            part.pins -= 1
            self._shrink()

    def _shrink(self) -> None:
        """Drops the blocks of unpinned parts, least recently used first, down to `capacity`."""
        for part in list(self._parts.values()):
            if self.used <= self.capacity:
                return
            if not part.pins:
                self.used -= part.drop()
                del self._parts[part.base]
        if self.used > self.capacity and not self._warned:
            self._warned = True
            log.warning(
                "cache.staging_bytes=%d: the batches under way need %d bytes of token files at "
                "once",
                self.capacity,
                self.used,
            )

    def punch(self, offset: int, length: int) -> None:
        """Returns space to the file system; the bytes read as zeros afterwards."""
        if sys.platform != "linux":
            problem = "staged tokens can be removed only on Linux"
            raise StorageError(
                at="cache.staging_bytes",
                problem=problem,
                fix="Raise it beyond the size of the cache.",
            )
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if libc.fallocate(self._file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
            reason = os.strerror(ctypes.get_errno())
            problem = f"the file system of the staging folder cannot free parts of a file: {reason}"
            raise StorageError(
                at="cache.staging_dir", problem=problem, fix="Choose a folder on a local disk."
            )


class StagedPart:
    """One token file in a bucket, at `url`.

    Its map holds the index from the start, and tokens after `fetch_ranges` or `fetch_all`.
    """

    def __init__(self, staging: Staging, part: Part, url: str, options: StorageOptions) -> None:
        """Opens the file and fetches its index.

        Raises:
            CacheError: The file is gone, has another size, is damaged, or is not a token file.
        """
        self.part, self.url, self.pins = part, url, 0
        self._sums = sums_of(part, url)
        self._staging, self._options = staging, options
        self.base, self.map = staging.reserve(part.num_bytes)
        self.lock = threading.Lock()
        self.batch = self._open()
        address = self.address = np.frombuffer(self.map, np.uint8).ctypes.data
        lists = [column for column in self.batch.columns if pa.types.is_large_list(column.type)]
        lengths = lists[0].buffers()[1]
        self._bring_missing(
            lengths.address - address, lengths.address - address + 8 * (self.batch.num_rows + 1)
        )
        self.offsets: Int64 = np.frombuffer(lengths, np.int64, self.batch.num_rows + 1)
        tokens = int(self.offsets[-1])
        numbers = [numbers_of(column) for column in lists] if tokens else []
        values = [
            (one.buffers()[1], len(one) // tokens * (one.type.bit_width // 8)) for one in numbers
        ]
        # where ids, masks and values of aligned columns begin, in bytes of the file
        self.starts = tuple(buffer.address - address for buffer, _ in values)
        self.widths = tuple(width for _, width in values)
        self.blocks = np.zeros(-(-part.num_bytes // BLOCK), np.bool_)  # whether each is here
        data = [
            (start, start + int(self.offsets[-1]) * width)
            for start, width in zip(self.starts, self.widths, strict=True)
        ]
        # (first, stop) of blocks that hold no part of the index, and so may be dropped
        self._inside = [(-(-start // BLOCK), stop // BLOCK) for start, stop in data]
        at = 0  # the index is everything between tokens and masks
        for start, stop in [*data, (part.num_bytes, part.num_bytes)]:
            self._bring_missing(at, start)
            at = stop
        require_sound(self.batch, part, url)

    def _open(self) -> pa.RecordBatch:
        """Fetches what Arrow needs to open the file, and returns its batch."""
        size, docs = self.part.num_bytes, self.part.docs
        self._known: list[tuple[int, int]] = []
        head, tail = min(size, GUESS + 8 * (docs + 1)), min(size, GUESS + 17 * docs)
        if head + tail + BLOCK >= size:
            self._bring(0, size)
        else:
            self._bring(0, head)
            self._bring(size - tail, size)
            at = 8  # after the magic come schema and batch, each preceded by its length
            for _ in range(2):
                self._bring_missing(at, min(at + 8, size))
                at += 8 + int.from_bytes(self.map[at + 4 : at + 8], "little")
                if at > size:
                    raise CacheError(at=self.url, problem="is not a token file", fix=AGAIN)
                self._bring_missing(head, at)
            footer = size - 10 - int.from_bytes(self.map[size - 10 : size - 6], "little")
            self._bring_missing(max(0, footer), size)
        return token_batch(pa.py_buffer(self.map), self.url)

    def _bring_missing(self, start: int, stop: int) -> None:
        for a, b in _missing(start, stop, self._known):
            self._bring(a, b)

    def _bring(self, start: int, stop: int) -> None:
        """Fetches the blocks with bytes `start` to `stop`, and records that they are here."""
        start, stop = start // BLOCK * BLOCK, min(-(-stop // BLOCK) * BLOCK, self.part.num_bytes)
        try:
            self._fetch(start, stop)
        except MissingFileError as error:
            raise CacheError(
                at=error.at, problem="missing from the token cache", fix=AGAIN
            ) from None
        self._known.append((start, stop))

    def _fetch(self, start: int, stop: int) -> None:
        """Fetches and checks bytes `start` to `stop`, which must be whole blocks."""
        data = storage.read_range(self.url, start, stop, self._options)
        check_fetched(data, start, self._sums, self.url)
        self._staging.write(self.base + start, data)

    def wanted(self, docs: Int64) -> Int64:
        """Returns the blocks with tokens and masks of documents `docs`, ascending: Int64[n]."""
        first, last = self.offsets[docs], self.offsets[docs + 1]
        full = last > first
        found = [np.empty(0, np.int64)]
        for start, width in zip(self.starts, self.widths, strict=True):
            a, b = (start + first[full] * width) // BLOCK, (start + last[full] * width - 1) // BLOCK
            count = b - a + 1
            found.append(np.repeat(a - np.cumsum(count) + count, count) + np.arange(count.sum()))
        return np.unique(np.concatenate(found))

    def fetch_ranges(self, blocks: Int64) -> list[Callable[[], None]]:
        """Returns functions that fetch `blocks`, one request for each run of neighbours.

        Args:
            blocks: Int64[n], ascending, n > 0.
        """
        runs = np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1)
        size = self.part.num_bytes
        return [
            lambda run=run: self._fetch(int(run[0]) * BLOCK, min((int(run[-1]) + 1) * BLOCK, size))
            for run in runs
        ]

    def fetch_all(self) -> None:
        """Fetches the whole file.

        Raises:
            CacheError: Its checksum is not the one that was committed.
        """
        data = storage.read_range(self.url, 0, self.part.num_bytes, self._options)
        found = xxhash.xxh3_128(data).hexdigest()
        if found != self.part.checksum:
            raise CacheError(
                at=self.url,
                problem=f"damaged: checksum {found}, committed as {self.part.checksum}",
                fix=AGAIN,
            )
        self._staging.write(self.base, data)

    def drop(self) -> int:
        """Releases the space of its tokens; returns how many bytes that are."""
        for first, last in self._inside:
            if last > first and self.blocks[first:last].any():
                self._staging.punch(self.base + first * BLOCK, (last - first) * BLOCK)
        freed = int(self.blocks.sum()) * BLOCK
        self.blocks[:] = False
        return freed


class StagedFiles:
    """The parts of one token cache in a bucket; it implements cache.reader.TokenFiles.

    It is thread-safe. With `reading` "shards" it fetches whole parts, with "ranges" blocks; both
    are checked.
    """

    stays = False
    most = sys.maxsize  # all indexes are here from the start

    def __init__(
        self,
        staging: Staging,
        parts: Sequence[Part],
        urls: Sequence[str],
        options: StorageOptions,
        reading: Literal["shards", "ranges"],
    ) -> None:
        self._staging, self._whole = staging, reading == "shards"
        work = [
            lambda part=part, url=url: StagedPart(staging, part, url, options)
            for part, url in zip(parts, urls, strict=True)
        ]
        self.parts: list[StagedPart] = _all(staging.pool, work)
        self.addresses = np.array([part.address for part in self.parts], np.uint64)

    def batch(self, i: int) -> pa.RecordBatch:
        return self.parts[i].batch

    @contextlib.contextmanager
    def hold(self, files: Integers, docs: Int64 | None = None) -> Generator[None]:
        """Holds tokens and masks of document `docs[i]` (Int64[n]) of part `files[i]`.

        They are in the part's map while the `with` block lasts; the index of every part is always
        there.
        """
        if docs is None:
            yield
            return
        held: list[StagedPart] = []
        with contextlib.ExitStack() as locks:
            try:
                work: list[Callable[[], None]] = []
                coming: list[tuple[StagedPart, Int64]] = []
                # in ascending order, so that two threads never wait for each other
                for i in np.unique(files).tolist():
                    part = self.parts[i]
                    locks.enter_context(part.lock)
                    self._staging.pin(part)  # before testing which of its blocks are here
                    held.append(part)
                    blocks = (
                        np.arange(part.blocks.size)
                        if self._whole
                        else part.wanted(docs[files == i])
                    )
                    absent = blocks[~part.blocks[blocks]]
                    if absent.size:
                        work += [part.fetch_all] if self._whole else part.fetch_ranges(absent)
                        coming.append((part, absent))
                self._staging.grow(sum(absent.size for _, absent in coming) * BLOCK)
                try:
                    _all(self._staging.pool, work)
                # On any failure, including Ctrl-C, the counted space is released. Blocks that did
                # arrive are fetched again later.
                except BaseException:
                    self._staging.grow(-sum(absent.size for _, absent in coming) * BLOCK)
                    raise
                for part, absent in coming:
                    part.blocks[absent] = True
                locks.pop_all().close()
                yield
            finally:
                for part in held:
                    self._staging.unpin(part)


def _all(pool: Threads, work: Iterable[Callable[[], Any]]) -> list[Any]:
    """Runs all of `work` at once, and returns the results in order.

    After all have ended, the first failure is raised.
    """
    running = [pool.submit(one) for one in work]
    failures = [failure for one in running if (failure := one.exception()) is not None]
    if failures:
        raise failures[0]
    return [one.result() for one in running]


def _missing(start: int, stop: int, known: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the parts of `start` to `stop` that are not in any of `known`."""
    gaps = [(start, stop)] if stop > start else []
    for a, b in known:
        gaps = [
            piece
            for x, y in gaps
            for piece in ((x, min(y, a)), (max(x, b), y))
            if piece[1] > piece[0]
        ]
    return gaps
