"""The folder of a token cache, on this machine or at a URL.

What is of this machine alone has a folder here in both cases.

What is committed (manifests, records of ranges, tokens; cache/manifest.py has the layout) goes
through `CacheFolder`, wherever it lies. Locks, indexes, plans and verdicts on fast tokenizers are
always in `local`.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Literal

import pyarrow as pa

from easypipe.cache.blocks import TokenStamp, block_sums
from easypipe.cache.manifest import Manifest, manifest_json, read_manifest
from easypipe.cache.remote import Staging
from easypipe.core import storage
from easypipe.core.errors import EasypipeError
from easypipe.core.remote import StorageOptions
from easypipe.core.values import JsonObject

CONFIGS = "configs"  # what was prepared by which config (stages/build_record.py)
STATS = b"easypipe"  # key of a token file's metadata


class CacheFolder:
    """A folder of this machine."""

    remote = False
    temporary = False  # it goes with this process, so that no other may make parts of it
    options: StorageOptions = None

    def __init__(self, local: Path) -> None:
        self.local = local

    def at(self, *names: str) -> Path | str:
        """The path or URL of what has these names below the folder."""
        return self.local.joinpath(*names)

    def manifest(self, key: str) -> Path | str:
        return self.at("manifests", f"{key}.json")

    def tokens(self, file: str) -> Path | str:
        """file: as `Part.file` has it."""
        return self.at("tokens", file)

    def holds(self, file: str, num_bytes: int, checksum: str) -> bool:
        """Whether a token file is there as it was committed."""
        path = self.local / "tokens" / file
        committed = storage.Stamp(num_bytes=num_bytes, checksum=checksum)
        return path.is_file() and storage.checksum(path) == committed

    def holds_quarantine(self, manifest: Manifest) -> bool:
        """Whether the quarantine file of a manifest is there as it was committed; True where it has
        none.
        """
        if not manifest.quarantine:
            return True
        path = self.at("manifests", manifest.quarantine)
        try:
            found = storage.checksum(path, self.options)
        except FileNotFoundError:
            return False
        return manifest.quarantine_checksum in ("", found.checksum)

    def content(self, file: str) -> pa.Buffer:
        """The bytes of a token file. Raises FileNotFoundError, OSError."""
        with pa.memory_map(str(self.tokens(file))) as mapped:
            return mapped.read_buffer()

    def commit_tokens(
        self, file: str, batch: pa.RecordBatch, stats: JsonObject | None = None
    ) -> TokenStamp:
        """Writes and commits a token file. stats: kept in its metadata."""
        schema = (
            batch.schema
            if stats is None
            else batch.schema.with_metadata({STATS: json.dumps(stats).encode()})
        )
        with storage.commit_file(self.tokens(file), self.options) as (temporary, stamp):
            with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
            with pa.memory_map(str(temporary)) as mapped:
                blocks = block_sums(mapped.read_buffer())
        return TokenStamp(num_bytes=stamp().num_bytes, checksum=stamp().checksum, blocks=blocks)

    def commit_manifest(self, manifest: Manifest) -> None:
        storage.commit_bytes(self.manifest(manifest.key), manifest_json(manifest))


class RemoteFolder(CacheFolder):
    """A folder at a URL. Raises StorageError where its protocol is unknown."""

    remote = True

    def __init__(
        self,
        url: str,
        local: Path,
        *,
        options: StorageOptions = None,
        reading: Literal["shards", "ranges"] = "shards",
        staging_bytes: int = 1 << 34,
        staging_dir: Path | None = None,
    ) -> None:
        """local: a folder of this machine for this URL. reading: whole token files, checked, or
        ranges of bytes of them. staging_bytes: of tokens that are kept in a file in `staging_dir`
        (None: the system's temporary folder) while they are read."""
        super().__init__(local)
        storage.filesystem(url, options)
        self.url, self.options = url.rstrip("/"), options
        self.reading: Literal["shards", "ranges"] = reading
        self._staging_bytes, self._staging_dir = staging_bytes, staging_dir

    def at(self, *names: str) -> str:
        return "/".join([self.url, *names])

    def holds(self, file: str, num_bytes: int, checksum: str) -> bool:
        """By its size: what arrived was checked when it was written."""
        return storage.size_of(self.tokens(file), self.options) == num_bytes

    def content(self, file: str) -> pa.Buffer:
        return pa.py_buffer(storage.read_bytes(self.tokens(file), self.options))

    def commit_manifest(self, manifest: Manifest) -> None:
        """The first of several writers wins; a manifest that cannot be read, or tells of other
        tokens, is replaced.
        """
        path, data = self.manifest(manifest.key), manifest_json(manifest)
        if storage.create_bytes(path, data, self.options):
            return
        try:
            if read_manifest(path, self.options).parts == manifest.parts:
                return
        except EasypipeError:
            pass  # it is no manifest that this version reads, which is why it was prepared again
        storage.commit_bytes(path, data, self.options)

    @cached_property
    def staging(self) -> Staging:
        """The file that tokens are staged in: one for all datasets of this folder, in this
        process.
        """
        return Staging(self._staging_dir, self._staging_bytes)


def folder_of(place: str | Path | CacheFolder) -> CacheFolder:
    return place if isinstance(place, CacheFolder) else CacheFolder(Path(place))
