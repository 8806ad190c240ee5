"""The bytes of a file as text formats see them: plain, gzip, bzip2 or zstandard, read forward or by
range.

Offsets here are always *plain* offsets: positions in the decompressed bytes. A compressed file can
only be entered at its start or where a new gzip member, bzip2 stream or zstd frame begins (its
restarts; BGZF, pbzip2 and multi-frame zst have many). `CompressedBytes` keeps a few places from
which reading can go on, so that consecutive ranges are decompressed once; what a fetch returns
never depends on them.
"""

from __future__ import annotations

import bz2
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zstandard

from easypipe.core.errors import SourceError
from easypipe.sources.files import (
    FileRef,
    LocalFile,
    compression_of,
    open_binary,
    read_range,
    reading,
)

INPUT_BYTES = 1 << 17  # compressed bytes taken at a time
OUTPUT_BYTES = 1 << 20  # decompressed bytes handed on at a time
KEPT_PLACES = 4  # per compressed file
RESTART_BYTES = 1 << 20  # restarts closer than this in plain bytes are not worth remembering
MAGIC = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd", "bz2": b"BZh"}
# behind the level: the first block, or the end of a stream without one
BZ2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
DAMAGED = (zlib.error, zstandard.ZstdError, OSError, EOFError)  # bz2 raises OSError
# zstd frames without content (RFC 8878, 3.1.2)
SKIPPABLE = tuple(bytes([low]) + b"\x2a\x4d\x18" for low in range(0x50, 0x60))


@dataclass(frozen=True)
class Restart:
    """Decompression can begin at byte `packed` of the file and gives plain bytes from `plain`
    on.
    """

    plain: int
    packed: int


START = Restart(0, 0)


class ByteStream(Protocol):
    """Plain bytes in order."""

    restarts: list[Restart]  # met so far

    def readinto(self, view: memoryview) -> int:
        """Fills some of `view`; 0 only at the end."""
        ...

    def close(self) -> None: ...


class Bytes(Protocol):
    """Plain bytes by range. Thread safe."""

    def fetch(self, start: int, stop: int, resume: int) -> bytes:
        """Plain bytes [start, stop), all of them. The next fetch is likely to begin at `resume`
        (start ≤ resume ≤ stop) or later.
        """
        ...


def check_compression(file: FileRef) -> str | None:
    """The compression that the file's name promises. Raises SourceError where its first bytes say
    otherwise.
    """
    kind = compression_of(file.path)
    first = read_range(file, 0, min(10, file.num_bytes))
    head = first[:4]
    found = next((k for k, magic in MAGIC.items() if head.startswith(magic)), None)
    if found == "bz2" and first[4:] not in BZ2_BLOCKS:  # three letters alone could be text
        found = None
    if kind == "zst" and head in SKIPPABLE:
        found = "zst"
    if kind and found != kind:
        raise SourceError(
            at=file.path,
            problem=f"not {kind} data, in spite of its name: it begins with {head!r}",
            fix="Rename the file.",
        )
    if found and not kind:
        raise SourceError(
            at=file.path,
            problem=f"is compressed ({found}), which its name does not say",
            fix=f"Rename it to end in .{found}.",
        )
    if head.startswith((b"PAR1", b"ARROW1"[:4])):
        raise SourceError(
            at=file.path,
            problem=f"not text: it begins with {head!r}",
            fix="Give the format by type=, or rename the file.",
        )
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SourceError(at=file.path, problem="is UTF-16", fix="Convert it to UTF-8.")
    return kind


def open_stream(file: FileRef, restart: Restart = START) -> ByteStream:
    """The plain bytes from `restart` on."""
    kind = compression_of(file.path)
    if kind is None:
        return _PlainStream(file, restart.plain)
    return _Decompressed(file, kind, restart)


def open_bytes(file: FileRef, restarts: Sequence[Restart]) -> Bytes:
    return (
        PlainBytes(file) if compression_of(file.path) is None else CompressedBytes(file, restarts)
    )


class PlainBytes:
    def __init__(self, file: FileRef) -> None:
        self._file = file

    def fetch(self, start: int, stop: int, resume: int) -> bytes:
        return read_range(self._file, start, stop)


class CompressedBytes:
    """Fetches of one file wait for each other: whoever goes on where another stopped finds its work
    done.
    """

    def __init__(self, file: FileRef, restarts: Sequence[Restart]) -> None:
        self._file = file
        self._restarts = [START, *restarts]
        self._lock = threading.Lock()
        self._places: list[_Place] = []

    def fetch(self, start: int, stop: int, resume: int) -> bytes:
        with self._lock:
            restart = max((r for r in self._restarts if r.plain <= start), key=lambda r: r.plain)
            usable = [p for p in self._places if restart.plain <= p.position <= start]
            if usable:
                place = max(usable, key=lambda p: p.position)
                self._places.remove(place)
            else:
                place = _Place(self._file, restart)
            try:
                data = place.fetch(start, stop, resume)
            except BaseException:
                place.close()
                raise
            self._places.append(place)
            for forgotten in self._places[:-KEPT_PLACES]:
                forgotten.close()
            del self._places[:-KEPT_PLACES]
            return data


class _Place:
    """A place in a compressed file: `held` are the plain bytes from `position` on, the stream goes
    on after them.
    """

    def __init__(self, file: FileRef, restart: Restart) -> None:
        self._file = file
        self._stream = _Decompressed(file, compression_of(file.path) or "", restart)
        self.position = restart.plain
        self.held = b""

    def fetch(self, start: int, stop: int, resume: int) -> bytes:
        pieces, at = [], self.position
        piece = self.held
        while True:
            if at + len(piece) > start:
                pieces.append(piece[max(0, start - at) :])
            at += len(piece)
            if at >= stop:
                break
            piece = self._stream.read()
            if not piece:
                raise SourceError(
                    at=self._file.path,
                    problem=f"ends at plain byte {at}, expected {stop}",
                    fix="Make the source again.",
                )
        data = b"".join(pieces)
        self.position, self.held = resume, data[resume - start :]
        return data if len(data) == stop - start else data[: stop - start]

    def close(self) -> None:
        self._stream.close()


class _PlainStream:
    def __init__(self, file: FileRef, start: int) -> None:
        self._file = file
        self._position = start
        self.restarts: list[Restart] = []
        self._local = None if file.remote else LocalFile(file)
        self._remote: Any = open_binary(file) if file.remote else None
        if self._remote is not None and start:
            self._remote.seek(start)

    def readinto(self, view: memoryview) -> int:
        if self._local is not None:
            count = self._local.readinto(view, self._position)
        else:
            data = reading(self._file, lambda: self._remote.read(len(view)))
            count = len(data)
            view[:count] = data
        self._position += count
        return count

    def close(self) -> None:
        (self._local or self._remote).close()


class _Decompressed:
    def __init__(self, file: FileRef, kind: str, restart: Restart) -> None:
        self._file, self._kind = file, kind
        self._input: Any = open_binary(file)
        self._packed = restart.packed  # offset of the first byte of self._rest
        self._plain = restart.plain
        self._input.seek(self._packed)
        self._rest = b""
        self._engine: Any = None  # None between members
        self._ready = memoryview(b"")
        self.restarts: list[Restart] = []

    def readinto(self, view: memoryview) -> int:
        if not self._ready:
            self._ready = memoryview(self.read())
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def read(self) -> bytes:
        """Some plain bytes; empty only at the end. Raises SourceError for damaged or truncated
        data.
        """
        while True:
            if not self._rest and not self._held():
                self._rest = reading(self._file, lambda: self._input.read(INPUT_BYTES))
                if not self._rest:
                    if self._engine is not None:
                        raise SourceError(
                            at=self._file.path,
                            problem=f"truncated {self._kind} data",
                            fix="Copy or write the file again.",
                        )
                    return b""
            if self._engine is None and not self._begin():
                continue
            out = self._decompress()
            if out:
                self._plain += len(out)
                return out

    def _begin(self) -> bool:
        """Starts a member (frame) at the current input; False where only padding stood there."""
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
        last = self.restarts[-1].plain if self.restarts else 0
        if self._plain - last >= RESTART_BYTES:
            self.restarts.append(Restart(self._plain, self._packed))
        return True

    def _held(self) -> bool:
        """Whether the engine has input of its own to go on with."""
        return self._kind == "bz2" and self._engine is not None and not self._engine.needs_input

    def _decompress(self) -> bytes:
        engine, given = self._engine, self._rest
        try:
            if self._kind == "gz":
                out = engine.decompress(given, OUTPUT_BYTES)
                left = engine.unused_data if engine.eof else engine.unconsumed_tail
            elif self._kind == "bz2":  # it keeps input that it has not decompressed yet to itself
                out = engine.decompress(given, OUTPUT_BYTES)
                left = engine.unused_data if engine.eof else b""
            else:
                out = engine.decompress(given)
                left = engine.unused_data if engine.eof else b""
        except DAMAGED as error:
            raise SourceError(
                at=self._file.path,
                problem=f"damaged {self._kind} data near byte {self._packed}: {error}",
                fix="Copy or write the file again.",
            ) from error
        self._packed += len(given) - len(left)
        self._rest = left
        if engine.eof:
            self._engine = None
        return out

    def close(self) -> None:
        self._input.close()
