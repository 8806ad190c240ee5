"""Lists all files of a folder, local or in a bucket, with sizes and times."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from datetime import datetime
from glob import has_magic
from pathlib import Path
from typing import NamedTuple

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.utils import glob_translate

from easypipe.core import storage
from easypipe.core.errors import MissingFileError, StorageError
from easypipe.core.remote import StorageOptions, remote_call
from easypipe.core.values import Json


class Found(NamedTuple):
    """A file that was listed.

    Attributes:
        num_bytes: Its size.
        modified: When it was written, in Unix seconds; the current time if a store does not say.
    """

    num_bytes: int
    modified: float


def files_below(folder: str | Path, storage_options: StorageOptions = None) -> dict[str, Found]:
    """Returns every file in a folder and its subfolders, also in those that are links.

    Returns:
        Sizes and times by the file's path within the folder, sorted; {} if there is no folder.

    Raises:
        StorageError: A folder cannot be listed.
    """
    if not storage.is_remote(folder):
        return dict(sorted(_local(str(folder).removeprefix("file://"))))

    def call(fs: AbstractFileSystem, name: str, timeout_s: float) -> dict[str, Found]:
        fs.invalidate_cache()  # stores remember listings; another process may have written since
        found = every_file(fs, name, timeout_s)
        root = name.strip("/") + "/"
        return {
            path.strip("/").removeprefix(root): Found(int(info.get("size") or 0), _written(info))
            for path, info in found.items()
        }

    try:
        return dict(sorted(storage.ask_long(folder, storage_options, call).items()))
    except MissingFileError:
        return {}


def every_file(fs: AbstractFileSystem, folder: str, timeout_s: float) -> dict[str, Json]:
    """Does `fs.find(folder, detail=True)`, but raises the error of a folder that cannot be listed.

    The method that most filesystems inherit from fsspec leaves such a folder out.
    """
    if not _omits(fs):
        return remote_call(fs, "find", timeout_s, folder, detail=True)
    found: dict[str, Json] = {}
    waiting = [folder]
    for here in waiting:  # the list grows meanwhile
        for name, info in _listed(fs, here, timeout_s).items():
            if info["type"] != "directory":
                found[name] = info
            elif name.rstrip("/") != here.rstrip("/"):
                waiting.append(name)
    return found


def matching(fs: AbstractFileSystem, pattern: str, timeout_s: float) -> dict[str, Json]:
    """Does `fs.glob(pattern, detail=True)`, but as `every_file` does; folders may be missing."""
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if has_magic(part))
    deep = "**" in pattern
    # s3fs lists recursively in one go only if all is wanted
    if not _omits(fs) and (deep or first == len(parts) - 1 or "s3" not in fs.protocol):
        return remote_call(fs, "glob", timeout_s, pattern, detail=True)
    root = "/".join(parts[:first])
    if deep:
        whole, inside = re.compile(glob_translate(pattern)), every_file(fs, root, timeout_s)
        return {name: info for name, info in inside.items() if whole.match(name)}
    found: dict[str, Json] = {root: {"type": "directory"}}
    for part in parts[first:]:
        fits = re.compile(glob_translate(part))
        folders = [name.rstrip("/") for name, info in found.items() if info["type"] == "directory"]
        found = {}
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                for name, info in _listed(fs, folder, timeout_s).items():
                    below = name.rstrip("/").removeprefix(folder).strip("/")
                    if fits.match(below):
                        found[name] = info
    return found


def _listed(fs: AbstractFileSystem, folder: str, timeout_s: float) -> dict[str, Json]:
    found = remote_call(fs, "ls", timeout_s, folder, detail=True)
    return {info["name"]: info for info in found}


def _omits(fs: AbstractFileSystem) -> bool:
    """Returns whether a filesystem asks for one folder after another, and drops what fails."""
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._find is AsyncFileSystem._find  # pyright: ignore[reportPrivateUsage]
    return type(fs).find is AbstractFileSystem.find


def _local(folder: str) -> Iterator[tuple[str, Found]]:
    """Yields the files below a local folder; what several links lead to once."""
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, onerror=_unlisted, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(OSError):  # it was removed meanwhile, or is a link to nothing
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    found = Found(status.st_size, status.st_mtime)
                    yield path.relative_to(folder).as_posix(), found


def _unlisted(error: OSError) -> None:
    """Raises the error of a folder that cannot be listed, whose files would seem not to exist."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        fix = "Check its permissions."
        at, problem = str(error.filename), f"cannot be listed: {error.strerror}"
        raise StorageError(at=at, problem=problem, fix=fix) from error


def _written(info: Json) -> float:
    when = next(
        (info[key] for key in ("LastModified", "updated", "mtime", "created") if info.get(key)),
        None,
    )
    when = datetime.fromisoformat(when) if isinstance(when, str) else when
    return when.timestamp() if isinstance(when, datetime) else float(when or time.time())
