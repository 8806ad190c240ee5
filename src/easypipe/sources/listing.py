"""The files that a URL names: an object, a pattern, a folder, or a file of a web server (HTTP)."""

from __future__ import annotations

import glob
import logging
from dataclasses import replace
from typing import Any

from easypipe.core import remote, storage
from easypipe.core.config import digest
from easypipe.core.errors import MissingFileError, SourceError, StorageError, require
from easypipe.core.remote import StorageOptions
from easypipe.core.values import Json
from easypipe.sources.refs import (
    FileRef,
    data_files_in,
    fixed_part,
    natural,
    partitioned,
    plain_name,
    reading,
)

WHOLE_BYTES = 64 << 20  # a server that sends no ranges is asked for files up to this size

log = logging.getLogger("easypipe")


def resolve_remote(
    text: str, storage_options: StorageOptions, kinds: tuple[str, ...]
) -> list[FileRef]:
    name = remote.public_url(text)
    here = FileRef(path=name, num_bytes=0, identity="", url=text, storage_options=storage_options)
    # a file there reads like any other: saved folders name theirs
    require(
        not text.startswith("hf://") or "." in text.rpartition("/")[2],
        "data_files",
        f"{name!r} is a dataset on the Hub",
        "Read it with type='huggingface'.",
    )
    if remote.is_http(text):
        return [_resolve_http(text, here)]

    def call(method: str, **kwargs: Any) -> Any:
        use = lambda fs, path, s: remote.remote_call(fs, method, s, path, **kwargs)  # noqa: E731
        return storage.ask(text, storage_options, use)

    fs, path = storage.ask(text, storage_options, lambda fs, path, _: (fs, path))
    fs.invalidate_cache()

    def ref(found: str, info: Json) -> FileRef:
        url = fs.unstrip_protocol(found)
        named = replace(here, path=remote.public_url(url), url=url)
        return _sized(named, info.get("size"), _identity(info))

    def listed(method: str) -> dict[str, Json]:
        found = reading(here, lambda: call(method, detail=True))
        files = {key: info for key, info in found.items() if info.get("type") != "directory"}
        return {str(fs._strip_protocol(key)): info for key, info in files.items()}

    if glob.has_magic(path):
        matches = listed("glob")
        if not matches:
            problem = "the pattern matches no file"
            raise MissingFileError(at=name, problem=problem, fix="Correct the pattern.")
        files = [ref(found, matches[found]) for found in sorted(matches, key=natural)]
        return partitioned(files, fixed_part(fs.unstrip_protocol(path)))
    try:
        info = call("info")
    except MissingFileError:
        info = None
    except StorageError as error:
        raise SourceError(at=name, problem=error.problem, fix=error.fix) from None
    if info is not None and info.get("type") != "directory":
        return [ref(path, info)]
    inside = listed("find") if info is not None else {}
    if not inside:
        raise MissingFileError(at=name, problem="no such file or folder", fix="Check the URL.")
    files = [ref(found, inside[found]) for found in data_files_in(path, name, inside, kinds)]
    return partitioned(files, remote.public_url(fs.unstrip_protocol(path)))


def _resolve_http(text: str, here: FileRef) -> FileRef:
    name, options = here.path, here.storage_options
    require(
        not glob.has_magic(plain_name(text)),
        "data_files",
        f"{name!r}: a web server lists no files",
        "Give the URL of every file.",
    )

    try:
        use = lambda fs, _, s: remote.http_facts(fs, text, s)  # noqa: E731
        facts = storage.ask(text, options, use, kind="facts")
    except StorageError as error:
        raise SourceError(at=name, problem=error.problem, fix=error.fix) from None
    file = _sized(here, facts.num_bytes, facts.identity)
    if not facts.ranges and file.num_bytes > WHOLE_BYTES:
        problem = (
            "the server sends no ranges, so every read would transfer all "
            f"{file.num_bytes >> 20} MiB"
        )
        raise SourceError(
            at=name, problem=problem, fix="Download the file, or serve it from storage that does."
        )
    if not facts.ranges:
        log.warning(
            "%s: the server sends no ranges: every read transfers the whole file (%d bytes)",
            name,
            file.num_bytes,
        )
    return file


def _sized(file: FileRef, num_bytes: int | None, identity: str) -> FileRef:
    """The file with what its server tells of it. Raises SourceError where that is no size."""
    if num_bytes is None:
        raise file.error("the server does not tell its size", "Copy the file to storage that does.")
    return replace(file, num_bytes=int(num_bytes), identity=identity)


def _identity(info: Json) -> str:
    """What the store itself changes with the content, else every fact it gives."""
    for key in ("etag", "ETag", "generation", "md5Hash", "md5", "checksum"):
        if info.get(key):
            return f"{key}:{info[key]}"
    for key in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        if info.get(key):
            return f"{key}:{info[key]}"
    return digest({key: str(value) for key, value in sorted(info.items())})
