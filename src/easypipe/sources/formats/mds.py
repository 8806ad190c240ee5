"""MDS shards of MosaicML streaming, plain or compressed, checked against their index.json.

A shard, little-endian: uint32 rows; uint32[rows + 1] bytes at which rows begin, and the end of the
last; JSON with the columns' names, encodings and sizes; the rows. A row: uint32 for the size of
each column without a fixed one, and the values.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from functools import partial
from typing import NamedTuple, Unpack

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.core.errors import MissingFileError, SourceError, place, raising
from easypipe.core.values import Array, DType, Int64, Json
from easypipe.sources.base import FileOptions, FileSource, Rows, Survey
from easypipe.sources.files import DataFiles, read_range, resolve
from easypipe.sources.formats.members import (
    BYTES,
    FLOAT,
    INTEGER,
    JSON_TEXT,
    TEXT,
    Kind,
    cuts_of,
    rows_of,
    spans,
    unread,
)
from easypipe.sources.refs import FileRef, compression_of, format_of, plain_name

INDEX = "index.json"
COPY = "Copy or write the folder again."
HASH_BYTES = 8 << 20  # bytes that are hashed at a time
HASHES = {
    **{name: partial(hashlib.new, name) for name in ("md5", "sha1", "sha256", "sha512")},
    **{f"xxh{n}": hashed for n, hashed in ((32, xxhash.xxh32), (64, xxhash.xxh64))},
}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SCALARS = (*_INTEGERS, "float16", "float32", "float64")
KINDS = {
    **dict.fromkeys(("bytes", "jpeg", "png"), BYTES),
    "str": TEXT,
    "json": JSON_TEXT,
    "str_int": INTEGER,
    "str_float": FLOAT,
}


class _Shard(NamedTuple):
    """The header of a shard."""

    offsets: Int64  # [rows + 1], the byte at which each row begins
    names: list[str]
    sizes: list[int | None]
    kinds: dict[str, Kind]


class MdsShardedSource(FileSource):
    """The rows of MDS shards. Options are those of FileSource.

    If a folder is given, every shard in its index.json must be there. A shard that is there both
    plain and compressed is read once. Reasons of rejects: unparsable (JSON), invalid_utf8.
    """

    kind = "mds"

    def __init__(self, data_files: DataFiles, **options: Unpack[FileOptions]) -> None:
        super().__init__(data_files, **options)
        self._indexes = _Indexes()
        plain = {file.path for file in self.files}
        self.files = tuple(f for f in self.files if _stem(f.path) not in plain)
        given = [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files)
        if all(isinstance(one, FileRef) or format_of(str(one)) == "mds" for one in given):
            return  # shards that were named one by one need not be all shards of the index
        have = {_stem(file.address) or file.address for file in self.files}
        for file in self.files:
            folder = file.address.rpartition("/")[0]
            for name in self._indexes.of(file) or ():
                whole = f"{folder}/{name}"
                if (_stem(whole) or whole) not in have:
                    problem = f"no such file, which {INDEX} names"
                    raise MissingFileError(at=whole, problem=problem, fix=COPY)

    def _survey(self, file: FileRef) -> Survey:
        """Reads the header of a shard, and checks it against the file and its index."""
        head = _uint32(self._plain.fetch(file, 0, 4))
        behind = 4 + 4 * (int(head[0]) + 1) if len(head) else 0
        offsets = _uint32(self._plain.fetch(file, 4, behind)).astype(np.int64)
        broken = file.error("not an MDS shard, or truncated", COPY)
        if (
            not len(head)
            or len(offsets) != int(head[0]) + 1
            or (np.diff(offsets, prepend=behind) < 0).any()
        ):
            raise broken
        if compression_of(file.path) is None and offsets[-1] != file.num_bytes:
            raise broken
        with raising(
            SourceError,
            file.path,
            "not an MDS shard",
            COPY,
            (ValueError, KeyError, TypeError, RecursionError),
        ):
            told = json.loads(self._plain.fetch(file, behind, int(offsets[0])))
            keys = ("column_names", "column_encodings", "column_sizes")
            named = [
                (str(name), str(encoding), None if size is None else int(size))
                for name, encoding, size in zip(*(told[key] for key in keys), strict=True)
            ]
        if not named or len({name for name, *_ in named}) < len(named):
            raise broken
        self._indexes.check(file, len(offsets) - 1)
        kinds: dict[str, Kind] = {}
        for name, encoding, _ in named:
            kind = _kind(encoding)
            if kind is not None:
                kinds[name] = kind
            elif self.columns is None or name in self.columns:
                raise unread(
                    file, name, "pickle" if encoding == "pkl" else f"encoding {encoding!r}"
                )
        return Survey(
            num_rows=len(offsets) - 1,
            total_rows=len(offsets) - 1,
            cuts=cuts_of(offsets[1:] - offsets[0]),
            schema=pa.schema([(name, kind.type) for name, kind in kinds.items()]),
            detail=_Shard(offsets, [name for name, _, _ in named], [s for *_, s in named], kinds),
        )

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        self._indexes.check_hashes(file)
        shard: _Shard = survey.detail
        values: dict[str, list[bytes | None]] = {name: [] for name in fields.names}
        own = [i for i, size in enumerate(shard.sizes) if size is None]
        sizes = np.array([size or 0 for size in shard.sizes], np.int64)
        begins, ends = shard.offsets[start:stop], shard.offsets[start + 1 : stop + 1]
        for row, data in enumerate(spans(self._plain, file, begins, ends), start):
            if len(data) >= 4 * len(own):
                sizes[own] = np.frombuffer(data, "<u4", len(own))
            edges = 4 * len(own) + np.cumsum(sizes)
            if edges[-1] != len(data):
                at = place(file.path, row=row)
                raise SourceError(at=at, problem="its sizes do not add up to its bytes", fix=COPY)
            for name, size, edge in zip(shard.names, sizes, edges, strict=True):
                if name in values:
                    values[name].append(data[edge - size : edge])
        return rows_of({n: (shard.kinds[n], v) for n, v in values.items()}, start, stop)


def _uint32(data: bytes) -> Array:
    """Returns all numbers in `data`."""
    return np.frombuffer(data, "<u4", len(data) // 4)


def _stem(path: str) -> str | None:
    """Returns the path without the extension of its compression; None if it is not compressed."""
    return path.rpartition(".")[0] if compression_of(path) else None


def _kind(encoding: str) -> Kind | None:
    """Returns the kind of an encoding, or None if it cannot be read."""
    name, *more = encoding.split(":")
    name = "int64" if encoding == "int" else name
    if name in SCALARS:
        return Kind(pa.from_numpy_dtype(np.dtype(name)), lambda data: np.frombuffer(data, name)[0])
    if name == "ndarray" and more and more[0] in SCALARS and "," not in "".join(more[1:]):
        dtype = np.dtype(more[0])
        kind = pa.large_list(pa.from_numpy_dtype(dtype))
        return Kind(kind, partial(_array, dtype, fixed=len(more) > 1))
    return KINDS.get(name)


def _array(dtype: DType, data: bytes, *, fixed: bool) -> Array:
    """Returns a one-dimensional array; unless `fixed`, its dimensions and shape come first."""
    if not fixed:
        if data[0] >> 2 != 1:
            raise ValueError(f"an array of {data[0] >> 2} dimensions")
        data = data[1 + 2 ** (data[0] % 4) :]
    return np.frombuffer(data, dtype)


class _Indexes:
    """The index.json of each folder of one source, each read once. It is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: dict[str, dict[str, Json] | None] = {}
        self._hashed: set[str] = set()

    def of(self, file: FileRef) -> dict[str, Json] | None:
        """Returns what the index next to a shard says about each file (samples, bytes, hashes).

        It is None if there is no index.
        """
        index = None if file.local_copy else file.beside(INDEX)
        if index is None:
            return None
        with self._lock:
            if index not in self._folders:
                self._folders[index] = _index(index, file)
            return self._folders[index]

    def check(self, file: FileRef, rows: int) -> None:
        """Raises SourceError if the size or the number of rows in the index differs."""
        facts = self._facts(file)
        _agree(file, "bytes", file.num_bytes, facts.get("bytes"))
        _agree(file, "rows", rows, facts.get("samples"))

    def check_hashes(self, file: FileRef) -> None:
        """Raises SourceError if the file's hash differs; each file is read once in a process.

        Writers leave hashes out unless they are asked for them.
        """
        told: dict[str, str] = dict(self._facts(file).get("hashes") or {})
        with self._lock:
            if file.path in self._hashed:
                return
            made = {name: HASHES[name]() for name in told if name in HASHES}
            for at in range(0, file.num_bytes if made else 0, HASH_BYTES):
                data = read_range(file, at, min(at + HASH_BYTES, file.num_bytes))
                for one in made.values():
                    one.update(data)
            for name, one in made.items():
                _agree(file, name, one.hexdigest(), told[name])
            self._hashed.add(file.path)

    def _facts(self, file: FileRef) -> Json:
        """Returns what the index says about a file; {} if there is no index."""
        index = self.of(file)
        name = plain_name(file.address).rpartition("/")[2]
        if index is not None and name not in index:
            problem = f"{INDEX} beside it does not name it"
            raise file.error(problem, COPY)
        return {} if index is None else index[name]


def _agree(file: FileRef, what: str, here: int | str, said: int | str | None) -> None:
    """Raises SourceError if the index and the file disagree."""
    if said not in (None, here):
        problem = f"{what}: {here}, {INDEX} says {said}"
        raise file.error(problem, COPY)


def _index(index: str, file: FileRef) -> dict[str, Json] | None:
    """Returns the entries of a folder's index by file name; None if there is no index."""
    try:
        [found] = resolve(index, file.storage_options)
    except MissingFileError:
        return None
    entries: dict[str, Json] = {}
    with raising(
        SourceError,
        found.path,
        "not an index",
        COPY,
        (ValueError, KeyError, TypeError, RecursionError),
    ):
        for shard in json.loads(read_range(found, 0, found.num_bytes))["shards"]:
            for data in (shard["raw_data"], shard["zip_data"]):
                if data is not None:
                    entries[data["basename"]] = {**data, "samples": shard["samples"]}
    return entries
