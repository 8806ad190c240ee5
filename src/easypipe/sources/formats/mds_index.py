"""The index.json beside MDS shards: what it says of each is checked."""

from __future__ import annotations

import hashlib
import json
import threading
from functools import partial

import xxhash

from easypipe.core.errors import MissingFileError, SourceError, raising
from easypipe.core.values import Json
from easypipe.sources.files import read_range, resolve
from easypipe.sources.refs import FileRef

INDEX = "index.json"
COPY = "Copy or write the folder again."
HASH_BYTES = 8 << 20  # hashed at a time
HASHES = {name: partial(hashlib.new, name) for name in ("md5", "sha1", "sha256", "sha512")}
HASHES |= {f"xxh{n}": hashed for n, hashed in ((32, xxhash.xxh32), (64, xxhash.xxh64))}


class MdsIndexes:
    """The indexes of the folders of one source, each read once. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: dict[str, dict[str, Json] | None] = {}
        self._hashed: set[str] = set()

    def of(self, file: FileRef) -> dict[str, Json] | None:
        """What the index beside a shard says of each file: name -> {samples, bytes, hashes}; None
        where there is no index.
        """
        folder = file.address.rpartition("/")[0]
        with self._lock:
            if folder not in self._folders:
                self._folders[folder] = None if file.twin else _read(folder, file)
            return self._folders[folder]

    def check(self, file: FileRef, rows: int) -> None:
        """Raises SourceError where the index has another size or number of rows."""
        facts = self._facts(file)
        _agree(file, "bytes", file.num_bytes, facts.get("bytes"))
        _agree(file, "rows", rows, facts.get("samples"))

    def check_hashes(self, file: FileRef) -> None:
        """Raises SourceError where the file has another hash. It is read once in a process; writers
        leave hashes out unless they are asked for them.
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
        index = self.of(file)
        name = file.address.rpartition("/")[2]
        if index is not None and name not in index:
            problem = f"{INDEX} beside it does not name it"
            raise file.error(problem, COPY)
        return {} if index is None else index[name]


def _agree(file: FileRef, what: str, here: int | str, said: int | str | None) -> None:
    if said not in (None, here):
        problem = f"{what}: {here}, {INDEX} says {said}"
        raise file.error(problem, COPY)


def _read(folder: str, file: FileRef) -> dict[str, Json] | None:
    try:
        [found] = resolve(f"{folder}/{INDEX}", file.storage_options)
    except MissingFileError:
        return None
    entries: dict[str, Json] = {}
    with raising(SourceError, found.path, "not an index", COPY, (ValueError, KeyError, TypeError)):
        for shard in json.loads(read_range(found, 0, found.num_bytes))["shards"]:
            for data in (shard["raw_data"], shard["zip_data"]):
                if data is not None:
                    entries[data["basename"]] = {**data, "samples": shard["samples"]}
    return entries
