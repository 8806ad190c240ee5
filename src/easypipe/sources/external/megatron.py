"""Megatron's indexed datasets, read and written: `name.bin` has tokens, `name.idx` the documents.

name.idx, little-endian (after Megatron-LM, core/datasets/indexed_dataset.py):
  9 bytes "MMIDIDX\0\0" · uint64 version 1 · uint8 dtype code · uint64 sequences · uint64 length
  of doc_idx int32[sequences] tokens of each · int64[sequences] byte of .bin at which each begins ·
  int64[documents + 1] each document's first sequence
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from easypipe.core import storage
from easypipe.core.errors import SourceError, place
from easypipe.core.protocols import ShardedSource
from easypipe.core.schema import INPUT_IDS, offsets_of
from easypipe.core.values import Array, DType, Int32, Int64
from easypipe.sources.files import open_local, read_range
from easypipe.sources.refs import FileRef

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
CODES = {"uint16": 8, "int32": 4}
CHUNK_DOCS = 1 << 16


@dataclass(frozen=True)
class MegatronIndex:
    """Where documents are; its arrays are mapped from the file if that is local.

    Args:
        path: The .idx file.
        dtype: The dtype of the tokens.
        sizes: Int32[sequences], the tokens of each sequence.
        pointers: Int64[sequences], the byte of the .bin file at which each begins.
        documents: Int64[docs + 1], the first sequence of each document, and how many sequences
            there are.
    """

    path: str
    dtype: DType
    sizes: Int32
    pointers: Int64
    documents: Int64

    @property
    def num_docs(self) -> int:
        return len(self.documents) - 1

    def read(self, file: FileRef, start: int, stop: int) -> tuple[np.ndarray, Int64]:
        """Returns the tokens of documents `start` to `stop`, and their offsets.

        Raises:
            SourceError: A document is outside the .bin file.
        """
        first, last = int(self.documents[start]), int(self.documents[stop])
        begins = np.array(self.pointers[first:last], np.int64)
        lengths = np.array(self.sizes[first:last], np.int64)
        ends = begins + lengths * self.dtype.itemsize
        wrong = np.flatnonzero((begins < 0) | (lengths < 0) | (ends > file.num_bytes))
        if wrong.size:
            row = int(np.searchsorted(self.documents, first + int(wrong[0]), side="right")) - 1
            problem = (
                f"bytes {begins[wrong[0]]}:{ends[wrong[0]]} of {file.path}, which has "
                f"{file.num_bytes}"
            )
            raise SourceError(
                at=place(self.path, row=row),
                problem=problem,
                fix="Copy or write both files again: one is truncated, or belongs to another file.",
            )
        breaks = (
            [0, *(np.flatnonzero(begins[1:] != ends[:-1]) + 1).tolist(), len(begins)]
            if len(begins)
            else [0]
        )
        parts = [
            np.frombuffer(read_range(file, int(begins[a]), int(ends[b - 1])), self.dtype)
            for a, b in itertools.pairwise(breaks)
        ]
        running = offsets_of(lengths)
        return np.concatenate(parts) if parts else np.empty(0, self.dtype), running[
            np.array(self.documents[start : stop + 1], np.int64) - first
        ]


def open_index(index: FileRef, data: FileRef) -> MegatronIndex:
    """Returns the index of a .bin file.

    Raises:
        SourceError: It is not an index, is truncated, or does not belong to `data`.
    """
    dtype, sequences, documents = _header(index)

    def array(at: int, count: int, dtype: str) -> Array:
        if count == 0:
            return np.empty(0, dtype)
        if index.remote:
            return np.frombuffer(
                read_range(index, at, at + count * np.dtype(dtype).itemsize), dtype
            )
        with open_local(index):  # refuses a file that changed meanwhile
            return np.memmap(index.here.path, dtype=dtype, mode="r", offset=at, shape=(count,))

    sizes = array(HEADER_BYTES, sequences, "<i4")
    pointers = array(HEADER_BYTES + 4 * sequences, sequences, "<i8")
    firsts = array(HEADER_BYTES + 12 * sequences, documents, "<i8")
    if (
        not documents
        or firsts[0] != 0
        or firsts[-1] != sequences
        or (firsts[1:] < firsts[:-1]).any()
    ):
        raise index.error("its documents do not cover its sequences in order", "Write it again.")
    stop = int(pointers[-1]) + int(sizes[-1]) * dtype.itemsize if sequences else 0
    if stop > data.num_bytes:
        problem = f"{data.num_bytes} bytes, {index.path} says {stop}: truncated"
        raise data.error(problem, "Copy or write both files again.")
    return MegatronIndex(index.path, dtype, sizes, pointers, firsts)


def _header(index: FileRef) -> tuple[np.dtype[Any], int, int]:
    """Returns the dtype of the tokens, and how many sequences and documents there are."""
    head = read_range(index, 0, min(HEADER_BYTES, index.num_bytes))
    if not head.startswith(MAGIC) or len(head) < HEADER_BYTES:
        raise index.error(
            f"truncated: {len(head)} bytes"
            if head.startswith(MAGIC)
            else f"not a Megatron index: it begins with {head[:9]!r}, not {MAGIC!r}",
            "Check the file, or remove it.",
        )
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences, documents = (
        int.from_bytes(head[18:26], "little"),
        int.from_bytes(head[26:34], "little"),
    )
    if version != 1 or code not in DTYPES:
        what = f"version {version}" if version != 1 else f"dtype code {code}"
        raise index.error(
            f"{what} is not known",
            "Write it again as integers.",
            have=DTYPES.values() if version == 1 else [1],
        )
    expected = HEADER_BYTES + 12 * sequences + 8 * documents
    if index.num_bytes != expected:
        what = (
            "truncated"
            if index.num_bytes < expected
            else "it may be of a multimodal dataset, which is not read"
        )
        raise index.error(
            f"{index.num_bytes} bytes, its header says {expected}: {what}",
            "Copy or write it again.",
        )
    return np.dtype(DTYPES[code]), sequences, documents


def write_megatron(
    prefix: str | os.PathLike[str],
    documents: ShardedSource | Iterable[ArrayLike],
    *,
    dtype: Literal["uint16", "int32"] = "uint16",
) -> tuple[int, int]:
    """Writes `prefix.bin` and `prefix.idx`, one sequence per document; the .idx is the commit.

    Memory does not grow with the documents.

    Args:
        documents: A source with `input_ids`, or one-dimensional integer arrays.

    Returns:
        Documents and tokens written.

    Raises:
        SourceError: A token does not fit `dtype`.
    """
    target = os.fspath(prefix)
    if not storage.is_remote(target):
        # an old index must never describe the new tokens
        Path(f"{target}.idx").unlink(missing_ok=True)
    kind, limits = np.dtype(dtype).newbyteorder("<"), np.iinfo(dtype)
    docs = tokens = 0
    with tempfile.TemporaryFile() as lengths_file:
        with storage.commit_file(f"{target}.bin") as (temporary, _), open(temporary, "wb") as out:
            for values, lengths in _blocks(documents):
                wrong = np.flatnonzero((values < limits.min) | (values > limits.max))
                if len(wrong):
                    row = docs + int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
                    raise SourceError(
                        at=place(target, row=row),
                        problem=f"token {values[wrong[0]]} is not a {dtype}",
                        fix="Write it with dtype='int32'.",
                    )
                out.write(values.astype(kind).tobytes())
                lengths_file.write(lengths.astype("<i4").tobytes())
                docs, tokens = docs + len(lengths), tokens + len(values)
        with storage.commit_file(f"{target}.idx") as (temporary, _), open(temporary, "wb") as out:
            out.write(
                MAGIC
                + (1).to_bytes(8, "little")
                + bytes([CODES[dtype]])
                + docs.to_bytes(8, "little")
                + (docs + 1).to_bytes(8, "little")
            )
            for lengths in _chunks(lengths_file):
                out.write(lengths.tobytes())
            at = 0
            for lengths in _chunks(lengths_file):
                ends = at + np.cumsum(lengths, dtype=np.int64) * kind.itemsize
                out.write((ends - lengths.astype(np.int64) * kind.itemsize).astype("<i8").tobytes())
                at = int(ends[-1])
            for start in range(0, docs + 1, CHUNK_DOCS):
                out.write(
                    np.arange(start, min(docs + 1, start + CHUNK_DOCS), dtype="<i8").tobytes()
                )
    return docs, tokens


def _chunks(file: Any) -> Iterator[Int32]:
    file.seek(0)
    while data := file.read(4 * CHUNK_DOCS):
        yield np.frombuffer(data, "<i4")


def _blocks(
    documents: ShardedSource | Iterable[ArrayLike],
) -> Iterator[tuple[np.ndarray, Int64]]:
    """Yields (tokens, length of each document) of some documents at a time."""
    if isinstance(documents, ShardedSource):
        for number, shard in enumerate(documents.shards):
            edges = sorted({*shard.cuts, shard.num_rows or 0})
            for a, b in itertools.pairwise(edges):
                for start in range(a, b, CHUNK_DOCS):
                    lists = documents.read(number, start, min(b, start + CHUNK_DOCS)).column(
                        INPUT_IDS
                    )
                    lengths = lists.value_lengths().fill_null(0).to_numpy()
                    yield cast(pa.Array, lists.flatten()).to_numpy(), lengths.astype(np.int64)
        return
    for document in documents:
        values = np.asarray(document)
        yield values.astype(np.int64), np.array([len(values)], np.int64)
