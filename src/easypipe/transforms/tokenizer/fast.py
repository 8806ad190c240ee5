"""FastEngine: gigatoken, the fast tokenizer, for columns; when its memory is released."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import mmap
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.core.text import bytes_of
from easypipe.core.values import Int64

# gigatoken remembers every word it meets: random text costs six times its size in memory. A new
# tokenizer (0.1 s) releases the memory; one is made when both limits are passed.
GROWN_BYTES = 48 << 20  # growth of this process's anonymous memory, whatever caused it
# processor time beyond what known words take: only new words are slow, and only they are remembered
SLOW_S = 0.2
KNOWN_S_PER_BYTE = 10e-9  # text of known words takes 3 to 10 ns a byte, random text 40
BLIND_BYTES = 128 << 20  # of text, for systems that do not tell how much memory a process has


@functools.cache  # reading a package's metadata takes milliseconds
def version() -> str:
    return importlib.metadata.version("gigatoken")


@dataclass
class _Engine:
    """One gigatoken tokenizer, how much it has encoded, and how long it was slow."""

    tokenizer: Any
    num_bytes: int = 0
    slow_s: float = 0.0


class FastEngine:
    """The encoder of whole columns by gigatoken, without special tokens.

    Thread-safe; the GIL is released while it works. Each caller at work has a tokenizer of its own:
    calls to one wait for each other, and two threads on it are no faster than one.

    Raises:
        RuntimeError, ValueError: gigatoken does not support the tokenizer.
    """

    def __init__(self, definition: str) -> None:
        self._definition = definition
        self._lock = threading.Lock()
        self._least = anonymous_bytes()  # the least memory since a tokenizer was last renewed
        self._free = [self._load()]

    def encode(self, texts: pa.LargeStringArray) -> tuple[Int64, NDArray[np.uint32]]:
        """Returns (Int64[n+1] offsets from 0, UInt32[total] ids) of a column without nulls."""
        import awkward

        if len(texts) == 0:
            return np.zeros(1, np.int64), np.zeros(0, np.uint32)
        offsets, data = bytes_of(texts)
        # The array is built by hand: awkward's own reading of Arrow adds an option layer, which
        # gigatoken does not take.
        characters = awkward.contents.NumpyArray(cast(Any, data), parameters={"__array__": "char"})
        layout = awkward.contents.ListOffsetArray(
            awkward.index.Index64(offsets), characters, parameters={"__array__": "string"}
        )
        engine = self._take()
        try:
            started = time.thread_time()
            # One thread per call, since the callers are threads themselves.
            encoded: Any = engine.tokenizer.encode_batch(
                awkward.Array(layout), parallel=False
            ).layout
            num_bytes = int(offsets[-1] - offsets[0])
            engine.num_bytes += num_bytes
            engine.slow_s += max(0.0, time.thread_time() - started - num_bytes * KNOWN_S_PER_BYTE)
        finally:
            with self._lock:
                self._free.append(engine)
        starts = np.asarray(encoded.offsets.data, dtype=np.int64)
        ids = np.asarray(encoded.content.data, dtype=np.uint32)
        return (
            (starts, ids) if starts[0] == 0 else (starts - starts[0], ids[starts[0] : starts[-1]])
        )

    def _take(self) -> _Engine:
        """Returns a tokenizer that no other caller uses: a new one if its memory has grown."""
        with self._lock:
            now = anonymous_bytes()
            self._least = min(self._least, now)
            grown = now > self._least + GROWN_BYTES
            engine = self._free.pop() if self._free else None
        if engine is None:
            return self._load()
        if (grown and engine.slow_s > SLOW_S) or (not now and engine.num_bytes > BLIND_BYTES):
            del engine  # the old memory is freed before the new is taken
            _trim()
            engine = self._load()
            with self._lock:
                self._least = anonymous_bytes()
        return engine

    def _load(self) -> _Engine:
        # with awkward it takes a quarter of a second to import: only callers that encode pay for it
        import gigatoken

        return _Engine(gigatoken.Tokenizer.from_json(self._definition))


_kept: tuple[str, FastEngine] | None = None
_keeping = threading.Lock()


def engine_of(definition: str) -> FastEngine:
    """Returns the engine of a tokenizer.json.

    The last one is kept: a run loads its tokenizer for every dataset and every held-out set.
    """
    global _kept
    with _keeping:
        if _kept is None or _kept[0] != definition:
            _kept = None
            _kept = (definition, FastEngine(definition))
        return _kept[1]


def _trim() -> None:
    """Returns freed memory to the system if its C library (glibc) keeps it.

    That is a fifth of a gigabyte here.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def anonymous_bytes() -> int:
    """Returns how much memory of this process is not backed by a file.

    0 if the system does not tell; then only the amount of text counts.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * mmap.PAGESIZE
