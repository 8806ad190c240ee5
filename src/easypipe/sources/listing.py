"""Lists the files that a URL names: an object, a pattern, a folder or a served file."""

from __future__ import annotations

import glob
import logging
from dataclasses import replace
from typing import Any

from easypipe.core import remote
from easypipe.core.config import digest
from easypipe.core.errors import MissingFileError, SourceError, StorageError, require
from easypipe.core.remote import StorageOptions
from easypipe.core.storage import filesystem
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
    here = FileRef(path=name, num_bytes=0, identity="")
    # a file there reads like any other: saved folders name theirs
    require(
        not text.startswith("hf://") or "." in text.rpartition("/")[2],
        "data_files",
        f"{name!r} is a dataset on the Hub",
        "Read it with type='huggingface'.",
    )
    if remote.is_http(text):
        return [_resolve_http(text, name, here, storage_options)]

    def call(method: str, *args: Any, **kwargs: Any) -> Any:
        def attempt(timeout_s: float) -> Any:
            fs, _ = filesystem(text, dict(storage_options or {}))
            return remote.remote_call(fs, method, timeout_s, *args, **kwargs)

        return remote.retrying(text, attempt, options=storage_options)

    def connect(timeout_s: float) -> tuple[Any, str]:
        return filesystem(text, dict(storage_options or {}))

    fs, path = remote.retrying(text, connect, options=storage_options)
    # listings that this process made before would hide what has changed since
    fs.invalidate_cache()

    def ref(found: str, info: Json) -> FileRef:
        url = remote.public_url(fs.unstrip_protocol(found))
        if info.get("size") is None:
            raise SourceError(
                at=url,
                problem="the server does not tell its size",
                fix="Copy the file to storage that does.",
            )
        return FileRef(
            path=url,
            num_bytes=int(info["size"]),
            identity=_identity(info),
            url=fs.unstrip_protocol(found),
            storage_options=storage_options,
        )

    def listed(method: str) -> dict[str, Json]:
        found = reading(here, lambda: call(method, path, detail=True))
        return {
            str(fs._strip_protocol(key)): info
            for key, info in found.items()
            if info.get("type") != "directory"
        }

    if glob.has_magic(path):
        matches = listed("glob")
        if not matches:
            raise MissingFileError(
                at=name, problem="the pattern matches no file", fix="Correct the pattern."
            )
        return partitioned(
            [ref(found, matches[found]) for found in sorted(matches, key=natural)],
            fixed_part(fs.unstrip_protocol(path)),
        )
    try:
        info = call("info", path)
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


def _resolve_http(text: str, name: str, here: FileRef, storage_options: StorageOptions) -> FileRef:
    require(
        not glob.has_magic(plain_name(text)),
        "data_files",
        f"{name!r}: a web server lists no files",
        "Give the URL of every file.",
    )

    def attempt(timeout_s: float) -> remote.HttpFacts:
        fs, _ = filesystem(text, dict(storage_options or {}))
        return remote.http_facts(fs, text, timeout_s)

    try:
        facts = remote.retrying(text, attempt, options=storage_options)
    except StorageError as error:
        raise SourceError(at=name, problem=error.problem, fix=error.fix) from None
    if facts.num_bytes is None:
        raise SourceError(
            at=name,
            problem="the server does not tell its size",
            fix="Copy the file to storage that does.",
        )
    if not facts.ranges and facts.num_bytes > WHOLE_BYTES:
        problem = (
            "the server sends no ranges, so every read would transfer all "
            f"{facts.num_bytes >> 20} MiB"
        )
        raise SourceError(
            at=name, problem=problem, fix="Download the file, or serve it from storage that does."
        )
    if not facts.ranges:
        log.warning(
            "%s: the server sends no ranges: every read transfers the whole file (%d bytes)",
            name,
            facts.num_bytes,
        )
    return replace(
        here,
        num_bytes=facts.num_bytes,
        identity=facts.identity,
        url=text,
        storage_options=storage_options,
    )


def _identity(info: Json) -> str:
    """What the store itself changes with the content, else every fact it gives."""
    for key in ("etag", "ETag", "generation", "md5Hash", "md5", "checksum"):
        if info.get(key):
            return f"{key}:{info[key]}"
    for key in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        if info.get(key):
            return f"{key}:{info[key]}"
    return digest({key: str(value) for key, value in sorted(info.items())})
