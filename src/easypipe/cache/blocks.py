"""Checksums of blocks of token files, checked at first touch, before a token reaches a batch.

block   BLOCK bytes of a token file; the last one is shorter
index   blocks with anything other than tokens, masks or values of aligned columns: Arrow's
        metadata, lengths, EOS flags, row numbers
flag    a UInt8 for each part's index and for each of its blocks, in this order: 1 after it was
        checked

A flag is set after its block was compared with its checksum, when the block is first touched. Code
that reads by address tests the flags.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from easypipe.cache.address import Buffers, int64_at, uint8_at
from easypipe.cache.manifest import Part
from easypipe.core.errors import CacheError
from easypipe.core.jit import jit
from easypipe.core.schema import offsets_of
from easypipe.core.storage import Stamp
from easypipe.core.values import Int64, Integer, UInt64

SHIFT = 16
BLOCK = 1 << SHIFT
INDEX = -1  # instead of the number of a block
ROOM = 4096  # the most blocks that are recorded at a time
AHEAD = 7  # how many further blocks are checked after one that was touched
REMAKE = (
    "`easypipe verify CACHE --repair` rebuilds it, or delete it and prepare the dataset "
    "again; only its rows are tokenized again."
)

_END = 10  # bytes after an Arrow file's footer: its length, Int32, and the magic
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class TokenStamp(Stamp):
    """The stamp of a committed token file, with the checksums of its blocks.

    Args:
        blocks: The checksums, as in `Part.blocks`.
    """

    blocks: str = ""


def block_sums(data: Any) -> str:
    """Returns the checksums of all blocks: the low 32 bits of XXH3-64, little-endian, in base64.

    Args:
        data: Bytes, a buffer or a map.
    """
    view = memoryview(data)
    sums = [xxh3_64_intdigest(view[at : at + BLOCK]) & _LOW for at in range(0, len(view), BLOCK)]
    return base64.b64encode(np.array(sums, "<u4").tobytes()).decode()


def sums_of(part: Part, file: str) -> NDArray[np.uint32]:
    """Returns the checksums of a part's blocks; none if an earlier version wrote the manifest.

    Raises:
        CacheError: The manifest does not have a checksum for each block of the file.
    """
    try:
        sums = np.frombuffer(base64.b64decode(part.blocks), "<u4")
    except ValueError as error:
        problem = f"its manifest has no checksums of its blocks: {error}"
        raise CacheError(at=file, problem=problem, fix=REMAKE) from None
    count = -(-part.num_bytes // BLOCK)
    if len(sums) != count and part.blocks:
        problem = (
            f"has {count} blocks of {BLOCK >> 10} KiB, its manifest has the checksums of "
            f"{len(sums)}"
        )
        raise CacheError(at=file, problem=problem, fix=REMAKE)
    return sums


def check_fetched(data: bytes, start: int, sums: NDArray[np.uint32], file: str) -> None:
    """Checks blocks that were fetched.

    Args:
        data: Their bytes.
        start: The byte of `file` at which the first begins.
        sums: The checksums of all blocks of `file`.
        file: The file, for errors.

    Raises:
        CacheError: A block is damaged.
    """
    view = memoryview(data)
    for at in range(0, len(view) if len(sums) else 0, BLOCK):
        block = view[at : at + BLOCK]
        if xxh3_64_intdigest(block) & _LOW != sums[(start + at) >> SHIFT]:
            raise _damaged(start + at, len(block), file)


def _damaged(start: int, num_bytes: int, file: str) -> CacheError:
    problem = f"damaged: bytes {start} to {start + num_bytes} are not those that were committed"
    return CacheError(at=file, problem=problem, fix=REMAKE)


class BlockChecks:
    """The flags of the parts of one token cache.

    It is thread-safe: a block that two threads first touch at the same time is checked twice.

    Attributes:
        addresses: UInt64[P], where the flags of each part begin; 0 if an earlier version wrote the
            manifest, so that there are no checksums.
        indexes_left: How many parts have an index that is left to check.
    """

    def __init__(self, parts: Sequence[Part], files: Sequence[str]) -> None:
        """Clears all flags.

        Args:
            parts: The parts.
            files: Their paths, for errors.
        """
        self._parts, self._files, self._lock = parts, files, threading.Lock()
        counts = [1 + -(-part.num_bytes // BLOCK) for part in parts]
        self._first = offsets_of(counts)
        self._flags = np.zeros(int(self._first[-1]), np.uint8)
        self._sums = np.zeros(len(self._flags), np.uint32)
        self._left = len(self._flags)
        self.indexes_left = len(parts)
        has = np.array([bool(part.blocks) for part in parts], np.bool_)
        self.addresses = np.where(has, self._flags.ctypes.data + self._first[:-1], 0).astype(
            np.uint64
        )
        for i in np.flatnonzero(~has).tolist():
            self._done(self._first[i], self._first[i + 1])
            self.indexes_left -= 1

    @property
    def pending(self) -> bool:
        """Whether anything is left to check."""
        return self._left > 0

    def check_index(
        self,
        part: int,
        address: int,
        runs: Iterable[tuple[int, int]],
        sound: Callable[[], None],
    ) -> None:
        """Checks the index of a part, unless that was done.

        Args:
            part: The number of the part.
            address: The address of the mapped file.
            runs: (address, bytes per token) of the tokens, the masks and the values of each aligned
                column; address 0 if the part has none.
            sound: Called when the index is intact; raises CacheError if its content is impossible.

        Raises:
            CacheError: A block of the index is damaged.
        """
        at = int(self._first[part])
        if self._flags[at]:
            return
        info = self._parts[part]
        size, count = info.num_bytes, -(-info.num_bytes // BLOCK)
        self._sums[at + 1 : at + 1 + count] = sums_of(info, self._files[part])
        # The footer says where everything else is, so it is checked first. Arrow has made sure that
        # nothing is outside the file.
        self.check(part, range(count - 1, count), address)
        footer = int.from_bytes(_bytes(address + max(size - _END, 0), 4), "little")
        self.check(part, range(max(0, size - _END - footer) // BLOCK, count), address)
        inside = np.zeros(count, np.bool_)
        for start, width in runs:
            if start:
                first, last = start - address, start - address + info.tokens * width
                inside[-(-first // BLOCK) : last // BLOCK] = True
        self.check(part, np.flatnonzero(~inside).tolist(), address)
        sound()
        with self._lock:
            if not self._flags[at]:  # another thread may have checked it meanwhile
                self._flags[at] = 1
                self._left -= 1
                self.indexes_left -= 1

    def check(self, part: int, blocks: Iterable[int], address: int, ahead: int = 0) -> None:
        """Checks blocks of a part whose index was checked before.

        Args:
            part: The number of the part.
            blocks: The numbers of the blocks.
            address: The address of the mapped file.
            ahead: How many blocks after a block are checked with it, if the block before it was
                checked: a reader that continues will touch them, and a call costs as much as a
                block. A damaged one among them is reported only when a reader touches it.

        Raises:
            CacheError: One of `blocks` is damaged.
        """
        at = int(self._first[part]) + 1
        flags = self._flags[at : int(self._first[part + 1])]
        for block in blocks:
            if flags[block]:
                continue
            if not self._intact(part, block, address):
                raise _damaged(block << SHIFT, self._length(part, block), self._files[part])
            stop = block + 1
            if block and flags[block - 1]:
                last = min(stop + ahead, len(flags))
                while stop < last and not flags[stop] and self._intact(part, stop, address):
                    stop += 1
            self._done(at + block, at + stop)

    def _intact(self, part: int, block: int, address: int) -> bool:
        """Returns whether the checksum of a block is right."""
        data = _bytes(address + (block << SHIFT), self._length(part, block))
        return xxh3_64_intdigest(data) & _LOW == self._sums[self._first[part] + 1 + block]

    def _length(self, part: int, block: int) -> int:
        return min(BLOCK, self._parts[part].num_bytes - (block << SHIFT))

    def _done(self, first: int, stop: int) -> None:
        """Sets the flags `first` to `stop`."""
        with self._lock:
            flags = self._flags[first:stop]
            self._left -= len(flags) - int(np.count_nonzero(flags))
            flags[:] = 1


def _bytes(address: int, num_bytes: int) -> pa.Buffer:
    """Returns a view of memory, which is valid while the map exists."""
    return pa.foreign_buffer(address, num_bytes)


def noted(todo: Int64) -> dict[int, set[int]]:
    """Returns the blocks of each part that `note` wrote into `todo`, including INDEX."""
    found: dict[int, set[int]] = {}
    for part, block in zip(*todo.tolist(), strict=True):
        found.setdefault(part, set()).add(block)
    return found


# Kernels that test the flags


@jit
def note(
    checked_at: np.uint64,
    file_at: np.uint64,
    address: np.int64,
    num_bytes: Integer,
    part: Integer,
    todo: Int64,
    count: Integer,
) -> Integer:
    """Adds the unchecked blocks of a stretch of memory to `todo`, while there is space.

    Args:
        checked_at: Where the part's flags begin.
        file_at: Where the part's file begins.
        address: Int64, where the stretch begins.
        num_bytes: Its length.
        part: The number of the part.
        todo: Int64[2, n], part and block of each.
        count: How many entries `todo` has.

    Returns:
        The new count.
    """
    if num_bytes > 0:
        flags, start = uint8_at(checked_at), address - np.int64(file_at)
        for block in range(start >> SHIFT, ((start + num_bytes - 1) >> SHIFT) + 1):
            if flags[block + 1] == 0 and count < todo.shape[1]:
                todo[0, count], todo[1, count] = part, block
                count += 1
    return count


@jit
def note_documents(docs: Int64, buffers: Buffers, todo: Int64) -> Integer:
    """Adds the unchecked blocks with tokens and masks of `docs` to `todo`, as `note` does.

    INDEX means a part's index, which comes first.

    Args:
        docs: Int64[n], documents of one cache.
        buffers: The Buffers of that cache.
        todo: Int64[2, n].

    Returns:
        How many blocks `todo` has.
    """
    count, id_bytes = np.int64(0), buffers.id_bytes
    for doc in docs:
        part: Integer = np.searchsorted(buffers.first_doc, doc, side="right") - 1
        checked, file = buffers.checked_address[part], buffers.file_address[part]
        if checked == 0:
            continue
        if uint8_at(checked)[0] == 0:
            if count < todo.shape[1]:
                todo[0, count], todo[1, count] = part, INDEX
                count += 1
            continue
        offsets, local = int64_at(buffers.offsets_address[part]), doc - buffers.first_doc[part]
        begin, length = offsets[local], offsets[local + 1] - offsets[local]
        ids = np.int64(buffers.ids_address[part]) + begin * id_bytes
        count = note(checked, file, ids, length * id_bytes, part, todo, count)
        if buffers.mask_address[part] != 0:
            mask = np.int64(buffers.mask_address[part]) + begin
            count = note(checked, file, mask, length, part, todo, count)
    return count


@jit
def note_values(
    docs: Int64, buffers: Buffers, addresses: UInt64, size: int, todo: Int64
) -> Integer:
    """Adds the unchecked blocks with values of an aligned column, as `note_documents` does.

    The indexes were checked before.

    Args:
        docs: Int64[n], documents of one cache.
        buffers: The Buffers of that cache.
        addresses: UInt64[P], where the values begin.
        size: The bytes of a token's value.
        todo: Int64[2, n].
    """
    count = np.int64(0)
    for doc in docs:
        part: Integer = np.searchsorted(buffers.first_doc, doc, side="right") - 1
        checked, file = buffers.checked_address[part], buffers.file_address[part]
        if checked != 0 and addresses[part] != 0:
            offsets, local = int64_at(buffers.offsets_address[part]), doc - buffers.first_doc[part]
            here = np.int64(addresses[part]) + offsets[local] * size
            length = (offsets[local + 1] - offsets[local]) * size
            count = note(checked, file, here, length, part, todo, count)
    return count
