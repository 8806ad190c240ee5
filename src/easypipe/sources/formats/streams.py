"""Plain bytes of text files by range, decompressed (gzip, bzip2, zstandard), and their damage.

Offsets here are always *plain* offsets: positions in the decompressed bytes. A compressed file is
decompressed forward, by one thread at a time, and the latest output is kept for neighbouring reads.
Decompression can begin at the start, or where a new gzip member, bzip2 stream or zstd frame begins
(its restarts; BGZF, pbzip2 and multi-frame zst have many). The result of a fetch never depends on
that. For uncompressed remote files, what the index read is kept until the rows are read.
"""

from __future__ import annotations

import bisect
import bz2
import logging
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import zstandard

from easypipe.sources.files import held, open_binary, open_local, read_range
from easypipe.sources.refs import FileRef, compression_of, reading

log = logging.getLogger("easypipe")

INPUT_BYTES = 1 << 17  # compressed bytes taken at a time
# of zstd, for whose output the library takes no limit: 4 bytes may become 128 KiB
ZST_INPUT_BYTES = 1 << 11
OUTPUT_BYTES = 1 << 20  # decompressed bytes returned at a time
BLOCK_BYTES = 1 << 20  # plain bytes of a compressed or remote file that are kept together
KEPT_BLOCKS = 128  # how many blocks of all such files of a source are kept
KEPT_FILES = 32  # how many compressed files are kept open, so that reading can continue
RESTART_BYTES = 1 << 20  # kept restarts are at least this many plain bytes apart
MAGIC = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd", "bz2": b"BZh"}
# what follows the compression level: the first block, or the end of a stream without one
BZ2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
DAMAGED = (zlib.error, zstandard.ZstdError, OSError, EOFError)  # bz2 raises OSError
# zstd frames without content (RFC 8878, 3.1.2)
SKIPPABLE = tuple(bytes([low]) + b"\x2a\x4d\x18" for low in range(0x50, 0x60))


class Restart(NamedTuple):
    """A place where decompression can begin.

    Attributes:
        plain: The plain offset of the bytes that come out.
        packed: The byte of the file at which to begin.
    """

    plain: int
    packed: int


START = Restart(0, 0)


def check_compression(file: FileRef, first: bytes) -> None:
    """Raises SourceError if the first bytes of a file are not what its name promises."""
    kind = compression_of(file.path)
    head = first[:4]
    found = next((k for k, magic in MAGIC.items() if head.startswith(magic)), None)
    if found == "bz2" and first[4:10] not in BZ2_BLOCKS:  # three letters could be text
        found = None
    if kind == "zst" and head in SKIPPABLE:
        found = "zst"
    if kind and found != kind:
        raise file.error(
            f"not {kind} data, in spite of its name: it begins with {head!r}", "Rename the file."
        )
    if found and not kind:
        raise file.error(
            f"is compressed ({found}), which its name does not say",
            f"Rename it to end in .{found}.",
        )
    if head.startswith((b"PAR1", b"ARROW1"[:4])):
        raise file.error(
            f"not text: it begins with {head!r}", "Give the format by type=, or rename the file."
        )
    if head in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        raise file.error("is UTF-32", "Convert it to UTF-8.")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise file.error("is UTF-16", "Convert it to UTF-8.")
    begin = first[:16]  # zeros further on may be a hole after text
    if not kind and len(head) == 4 and begin.count(0) * 4 > len(begin):
        raise file.error(
            f"not text: {begin.count(0)} of its first {len(begin)} bytes are 0",
            "Convert it to UTF-8 if it is UTF-16, or copy it again.",
        )


class PlainBytes:
    """The plain bytes of the files of one source. It is thread-safe.

    Args:
        forward: Whether files are read forward, without an index that was made before. Then no
            bytes of plain files are kept, and a warning names a file that has to be decompressed
            from its start to reach its middle.
    """

    def __init__(self, *, forward: bool = False) -> None:
        self._forward = forward
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _Unpacking] = OrderedDict()
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def fetch(
        self,
        file: FileRef,
        start: int,
        stop: int,
        restarts: Sequence[Restart] = (),
        *,
        once: bool = False,
    ) -> bytes:
        """Returns plain bytes [start, stop), fewer at the end.

        Args:
            file: The file.
            start: The first plain byte.
            stop: The plain byte after the last one.
            restarts: Restarts of the file that are known from its index.
            once: Whether these bytes of a remote file need not be kept after this call.
        """
        if compression_of(file.path) is None:
            stop = min(stop, file.num_bytes)
            if start >= stop:
                return b""
            if not file.remote or self._forward:
                return read_range(file, start, stop)
            kept = self._kept_of(file, start, stop, once)
            if kept is not None:
                return kept
            data = read_range(file, start, stop)
            return data if once else self._keep(file, start, data)
        if not file.remote:
            open_local(file).close()  # refuses one that changed
        unpacking, pieces = self._unpacking(file, restarts), []
        with unpacking.lock:
            for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
                first = number * BLOCK_BYTES
                block = memoryview(self._block(unpacking, number))
                if not block:
                    break  # the end of the file
                pieces.append(block[max(0, start - first) : stop - first])
        return b"".join(pieces)

    def held(self, file: FileRef, start: int, stop: int) -> AbstractContextManager[None]:
        """Returns a block in which these plain bytes of a remote file are fetched already.

        Bytes of compressed files are not, because decompression needs the bytes before them.
        """
        stop = min(stop, file.num_bytes)
        packed = compression_of(file.path) is not None
        if packed or not file.remote or self._has(file, start, stop):
            return nullcontext()
        return held(file, start, stop)

    def ends(self, file: FileRef, position: int) -> bool:
        """Returns whether there is no plain byte at `position` or after it."""
        if compression_of(file.path) is None:
            return position >= file.num_bytes
        return not self.fetch(file, position, position + 1)

    def restarts(self, file: FileRef) -> tuple[Restart, ...]:
        """Returns the restarts that were found so far, without the start."""
        packed = compression_of(file.path) is not None
        return tuple(self._unpacking(file, ()).restarts[1:]) if packed else ()

    def _has(self, file: FileRef, start: int, stop: int) -> bool:
        """Returns whether bytes of a remote file were kept."""
        numbers = range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        return bool(numbers) and all((file.path, number) in self._kept for number in numbers)

    def _kept_of(self, file: FileRef, start: int, stop: int, once: bool) -> bytes | None:
        """Returns bytes of a remote file that were kept; None if some of them were not.

        With `once`, blocks that are read completely are forgotten.
        """
        first = start // BLOCK_BYTES
        with self._lock:
            if not self._has(file, start, stop):
                return None
            numbers = range(first, -(-stop // BLOCK_BYTES))
            data = b"".join(self._kept[file.path, number] for number in numbers)
            for number in numbers:
                begins, ends = number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES
                if once and start <= begins and min(ends, file.num_bytes) <= stop:
                    del self._kept[file.path, number]
        return data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _keep(self, file: FileRef, start: int, data: bytes) -> bytes:
        """Returns `data` of a remote file, and keeps its whole blocks.

        So a small dataset is fetched once, for both its index and its rows.
        """
        stop = start + len(data)
        end = -(-stop // BLOCK_BYTES) if stop == file.num_bytes else stop // BLOCK_BYTES
        for number in range(-(-start // BLOCK_BYTES), end):
            at = number * BLOCK_BYTES - start
            self._remember(file.path, number, data[at : at + BLOCK_BYTES])
        return data

    def _remember(self, path: str, number: int, data: bytes) -> None:
        with self._lock:
            self._kept[path, number] = data
            while len(self._kept) > KEPT_BLOCKS:
                self._kept.popitem(last=False)

    def _unpacking(self, file: FileRef, restarts: Sequence[Restart]) -> _Unpacking:
        with self._lock:
            found = self._files.pop(file.path, None) or _Unpacking(file)
            found.restarts = max(found.restarts, [START, *restarts], key=len)
            self._files[file.path] = found
            while len(self._files) > KEPT_FILES:
                self._files.popitem(last=False)
            return found

    def _block(self, unpacking: _Unpacking, number: int) -> bytes:
        """Returns plain block `number` of a compressed file; b"" if it ends before."""
        path = unpacking.file.path
        with self._lock:
            data = self._kept.get((path, number))
            if data is not None:
                self._kept.move_to_end((path, number))
                return data
        while unpacking.end is None or number < unpacking.end:
            unpacking.enter(number, self._forward)
            here, data = unpacking.next_block()
            self._remember(path, here, data)
            if here == number:
                return data
        return b""


class _Unpacking:
    """A compressed file that is decompressed forward.

    Attributes:
        restarts: The restarts that are known, the start first.
        block: The number of the block that comes next; None if reading has to begin at a restart.
        end: How many blocks there are, once that is known.
    """

    def __init__(self, file: FileRef) -> None:
        self.lock = threading.Lock()
        self.file, self._kind = file, compression_of(file.path)
        self.restarts = [START]
        self.block: int | None = None
        self.end: int | None = None
        self._told = False
        self._input: Any = None
        self._engine: Any = None  # the decompressor; None between members

    def enter(self, number: int, tells: bool) -> None:
        """Goes to the last restart before a block, unless reading is already between the two."""
        target = number * BLOCK_BYTES
        restart = self.restarts[bisect.bisect(self.restarts, (target, sys.maxsize)) - 1]
        first = -(-restart.plain // BLOCK_BYTES)
        if self.block is not None and first <= self.block <= number:
            return
        if tells and not self._told and target - restart.plain > BLOCK_BYTES:
            self._told = True
            log.warning(
                "%s: %s data cannot be read from the middle: reading from plain byte %d to get to "
                "%d",
                self.file.path, self._kind, restart.plain, target,
            )  # fmt: skip
        if self._input is not None:
            self._input.close()
        self._input = open_binary(self.file)
        self._input.seek(restart.packed)
        self._plain, self._packed = restart  # plain offset of the next byte, packed of self._rest
        self._rest = self._input.read(0 if restart.packed else 16)
        self._ready = memoryview(b"")  # plain bytes that come next
        if not restart.packed:
            check_compression(self.file, self._rest)
        self._engine = None
        self.block = first
        # skips the rest of the block that contains the restart
        self._take(first * BLOCK_BYTES - restart.plain)

    def next_block(self) -> tuple[int, bytes]:
        """Returns the number of the next block and its BLOCK_BYTES bytes, fewer at the end."""
        assert self.block is not None
        here, self.block = self.block, None  # if this fails, the next call begins at a restart
        data = self._take(BLOCK_BYTES)
        if len(data) == BLOCK_BYTES:
            self.block = here + 1
        else:
            self.end = here + 1
            self._input.close()
        return here, data

    def _take(self, count: int) -> bytes:
        """Returns the next `count` plain bytes, fewer at the end."""
        pieces = list[memoryview]()
        while count and (piece := self._ready or memoryview(self._read())):
            pieces.append(piece[:count])
            self._ready = piece[count:]
            count -= len(pieces[-1])
        return b"".join(pieces)

    def _read(self) -> bytes:
        """Returns some plain bytes; b"" only at the end.

        Raises:
            SourceError: The data is damaged or truncated.
        """
        while True:
            if not self._rest and not self._held():
                with reading(self.file):
                    self._rest = self._input.read(
                        ZST_INPUT_BYTES if self._kind == "zst" else INPUT_BYTES
                    )
                if not self._rest:
                    if self._engine is not None:
                        raise self.file.error(
                            f"truncated {self._kind} data", "Copy or write the file again."
                        )
                    return b""
            if self._engine is None and not self._begin():
                continue
            out = self._decompress()
            if out:
                self._plain += len(out)
                return out

    def _begin(self) -> bool:
        """Starts a member (frame) at the current input; returns False if there was only padding."""
        if self._kind == "gz":
            # tapes and block devices pad with zeros; gzip allows it
            stripped = self._rest.lstrip(b"\0")
            self._packed += len(self._rest) - len(stripped)
            self._rest = stripped
            if not stripped:
                return False
            self._engine = zlib.decompressobj(31)
        elif self._kind == "bz2":
            self._engine = bz2.BZ2Decompressor()
        else:
            self._engine = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        if self._plain - self.restarts[-1].plain >= RESTART_BYTES:
            self.restarts.append(Restart(self._plain, self._packed))
        return True

    def _held(self) -> bool:
        """Returns whether the decompressor still holds input."""
        return self._kind == "bz2" and self._engine is not None and not self._engine.needs_input

    def _decompress(self) -> bytes:
        """Decompresses some of the input; b"" if it needs more."""
        engine, given = self._engine, self._rest
        try:
            if self._kind == "gz":
                out = engine.decompress(given, OUTPUT_BYTES)
                left = engine.unused_data if engine.eof else engine.unconsumed_tail
            elif self._kind == "bz2":  # it holds input that it has not decompressed yet
                out = engine.decompress(given, OUTPUT_BYTES)
                left = engine.unused_data if engine.eof else b""
            else:
                out = engine.decompress(given)
                left = engine.unused_data if engine.eof else b""
        except DAMAGED as error:
            raise self.file.error(
                f"damaged {self._kind} data after byte {self._packed}: {error}",
                "Copy or write the file again.",
            ) from error
        self._packed += len(given) - len(left)
        self._rest = left
        if engine.eof:
            self._engine = None
        return out
