"""gigatoken behind Arrow columns. Only transforms/proof.py decides whether it may be used."""

from __future__ import annotations

import importlib.metadata
import threading
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

RENEW_BYTES = 256 << 20  # its caches grow with every new word: a new tokenizer gives the memory back


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
        # One thread per call: the callers are threads themselves.
        encoded: Any = self._current(int(offsets[-1] - offsets[0])).encode_batch(awkward.Array(layout), parallel=False).layout
        starts = np.asarray(encoded.offsets.data, dtype=np.int64)
        ids = np.asarray(encoded.content.data, dtype=np.uint32)
        return (starts, ids) if starts[0] == 0 else (starts - starts[0], ids[starts[0] : starts[-1]])

    def _current(self, num_bytes: int) -> Any:
        with self._lock:
            if self._bytes > RENEW_BYTES:
                self._tokenizer = self._load()
                self._bytes = 0
            self._bytes += num_bytes
            return self._tokenizer

    def _load(self) -> Any:
        import gigatoken  # with awkward a quarter of a second, for those who encode

        return gigatoken.Tokenizer.from_json(self._definition)
