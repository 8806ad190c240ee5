"""The folder of a token cache, here or at a URL: how files are summed, checked and committed in it.

Files that are committed (manifests, records of ranges, tokens; cache/manifest.py has the layout) go
through `CacheFolder`, wherever the folder is. Locks, indexes, plans and checks of fast tokenizers
are always in `local`, a folder of this machine.
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Literal

import pyarrow as pa

from easypipe.cache.blocks import TokenStamp, block_sums
from easypipe.cache.manifest import Manifest, manifest_json, read_manifest
from easypipe.cache.remote import Staging
from easypipe.core import storage
from easypipe.core.errors import EasypipeError, StorageError, raising
from easypipe.core.remote import StorageOptions
from easypipe.core.values import JsonObject

# the folder of the records of which config prepared what (stages/build_record.py)
CONFIGS = "configs"
STATS = b"easypipe"  # the key of our entry in a token file's metadata


class CacheFolder:
    """A cache folder on this machine.

    Attributes:
        local: The folder.
        remote: Whether it is at a URL.
        temporary: Whether it is deleted with this process, so that no other process may make parts
            of it.
        options: The storage_options for its files.
    """

    remote = False
    temporary = False
    options: StorageOptions = None

    def __init__(self, local: Path) -> None:
        self.local = local

    def at(self, *names: str) -> Path | str:
        """Returns the path or URL of the file with these names below the folder."""
        return self.local.joinpath(*names)

    def manifest(self, key: str) -> Path | str:
        return self.at("manifests", f"{key}.json")

    def tokens(self, file: str) -> Path | str:
        """Returns the path or URL of a token file; `file` is named as in `Part.file`."""
        return self.at("tokens", file)

    def holds(self, file: str, num_bytes: int, checksum: str) -> bool:
        """Returns whether a token file exists as it was committed."""
        path = self.local / "tokens" / file
        committed = storage.Stamp(num_bytes=num_bytes, checksum=checksum)
        with raising(StorageError, path, "cannot be read", "Check the path and permissions."):
            return path.is_file() and storage.checksum(path) == committed

    def holds_quarantine(self, manifest: Manifest) -> bool:
        """Returns whether a manifest's quarantine file is intact; True if it names none."""
        if not manifest.quarantine:
            return True
        path = self.at("manifests", manifest.quarantine)
        if storage.size_of(path, self.options) is None:
            return False
        with raising(StorageError, path, "cannot be read", "Check the path and permissions."):
            found = storage.checksum(path, self.options)
        return manifest.quarantine_checksum in ("", found.checksum)

    def content(self, file: str) -> pa.Buffer:
        """Returns the bytes of a token file.

        Raises:
            FileNotFoundError: It does not exist.
            OSError: It cannot be read.
        """
        with pa.memory_map(os.fsencode(storage.endless_refused(self.tokens(file)))) as mapped:
            return mapped.read_buffer()

    def commit_tokens(
        self, file: str, batch: pa.RecordBatch, stats: JsonObject | None = None
    ) -> TokenStamp:
        """Writes and commits a token file.

        Args:
            file: Its name, as in `Part.file`.
            batch: Its documents.
            stats: What its metadata says about it.
        """
        schema = (
            batch.schema
            if stats is None
            else batch.schema.with_metadata({STATS: json.dumps(stats).encode()})
        )
        with storage.commit_file(self.tokens(file), self.options) as (temporary, stamp):
            with (
                pa.OSFile(os.fsencode(temporary), "wb") as sink,
                pa.ipc.new_file(sink, schema) as writer,
            ):
                writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
            with pa.memory_map(os.fsencode(temporary)) as mapped:
                blocks = block_sums(mapped.read_buffer())
        return TokenStamp(num_bytes=stamp().num_bytes, checksum=stamp().checksum, blocks=blocks)

    def commit_manifest(self, manifest: Manifest) -> None:
        storage.commit_bytes(self.manifest(manifest.key), manifest_json(manifest))


class RemoteFolder(CacheFolder):
    """A cache folder at a URL.

    Raises:
        StorageError: The protocol of the URL is unknown.
    """

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
        """Describes the folder; sends no request.

        Args:
            url: The URL of the folder.
            local: A folder of this machine for this URL.
            options: The storage_options.
            reading: "shards" fetches whole token files, "ranges" ranges of their bytes.
            staging_bytes: The bytes of fetched tokens that are kept while they are read.
            staging_dir: The folder of the file that keeps them; None takes the system's temporary
                folder.
        """
        super().__init__(local)
        storage.filesystem(url, options)
        self.url, self.options = url.rstrip("/"), options
        self.reading: Literal["shards", "ranges"] = reading
        self._staging_bytes, self._staging_dir = staging_bytes, staging_dir

    def at(self, *names: str) -> str:
        return "/".join([self.url, *names])

    def holds(self, file: str, num_bytes: int, checksum: str) -> bool:
        """Compares only the size, because the content was checked when it was written."""
        return storage.size_of(self.tokens(file), self.options) == num_bytes

    def content(self, file: str) -> pa.Buffer:
        return pa.py_buffer(storage.read_bytes(self.tokens(file), self.options))

    def commit_manifest(self, manifest: Manifest) -> None:
        """Commits a manifest; the first of several writers wins.

        A manifest that cannot be read, or that names other tokens, is replaced.
        """
        path, data = self.manifest(manifest.key), manifest_json(manifest)
        if storage.create_bytes(path, data, self.options):
            return
        try:
            if read_manifest(path, self.options).parts == manifest.parts:
                return
        except EasypipeError:
            pass  # this version cannot read it, and therefore the dataset was prepared again
        storage.commit_bytes(path, data, self.options)

    @cached_property
    def staging(self) -> Staging:
        """The file in which the tokens of all datasets of this folder are staged."""
        return Staging(self._staging_dir, self._staging_bytes)


def folder_of(place: str | Path | CacheFolder) -> CacheFolder:
    return place if isinstance(place, CacheFolder) else CacheFolder(Path(place))
