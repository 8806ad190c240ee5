"""gigatoken behind Arrow columns. Only transforms/proof.py decides whether it may be used."""

from __future__ import annotations

import importlib.metadata
import mmap
import threading
import time
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# gigatoken remembers every word it meets: random text costs six times its size. A new tokenizer (0.1 s) gives the memory back.
RENEW_BYTES = 256 << 20  # of text
GROWN_BYTES = 64 << 20  # of this process's anonymous memory, whoever took it ...
PATIENCE_S = 0.25  # ... but not before so much work: words that are new are slow as well, so renewing stays cheap beside them


def version() -> str:
    return importlib.metadata.version("gigatoken")


class FastEngine:
    """Token ids of whole columns, without special tokens. Thread safe; the GIL is released while it works.

    Raises RuntimeError or ValueError where gigatoken does not support the tokenizer.
    """

    def __init__(self, definition: str) -> None:
        self._definition = definition
        self._lock = threading.Lock()
        self._bytes = 0
        self._busy_s = 0.0
        self._least = anonymous_bytes()  # seen since the tokenizer was renewed
        self._tokenizer = self._load()

    def encode(self, texts: pa.LargeStringArray) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Int64[n+1] offsets from 0, UInt32[total] ids."""
        import awkward

        if len(texts) == 0:
            return np.zeros(1, np.int64), np.zeros(0, np.uint32)
        _, offset_buffer, data_buffer = texts.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64, len(texts) + 1, texts.offset * 8)
        data = np.zeros(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)
        # Built by hand: awkward's own reading of Arrow adds an option layer, which gigatoken does not take.
        characters = awkward.contents.NumpyArray(cast(Any, data), parameters={"__array__": "char"})
        layout = awkward.contents.ListOffsetArray(awkward.index.Index64(offsets), characters, parameters={"__array__": "string"})
        tokenizer = self._current(int(offsets[-1] - offsets[0]))
        started = time.thread_time()
        # One thread per call: the callers are threads themselves.
        encoded: Any = tokenizer.encode_batch(awkward.Array(layout), parallel=False).layout
        with self._lock:
            self._busy_s += time.thread_time() - started
        starts = np.asarray(encoded.offsets.data, dtype=np.int64)
        ids = np.asarray(encoded.content.data, dtype=np.uint32)
        return (starts, ids) if starts[0] == 0 else (starts - starts[0], ids[starts[0] : starts[-1]])

    def _current(self, num_bytes: int) -> Any:
        with self._lock:
            now = anonymous_bytes()
            self._least = min(self._least, now)
            if self._bytes > RENEW_BYTES or (self._busy_s > PATIENCE_S and now > self._least + GROWN_BYTES):
                self._tokenizer = None  # the old memory goes before the new comes, once the last call is done with it
                self._tokenizer = self._load()
                self._bytes, self._busy_s, self._least = 0, 0.0, anonymous_bytes()
            self._bytes += num_bytes
            return self._tokenizer

    def _load(self) -> Any:
        import gigatoken  # with awkward a quarter of a second, for those who encode

        return gigatoken.Tokenizer.from_json(self._definition)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs; 0 where the system does not tell (then only the amount of text counts)."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * mmap.PAGESIZE
