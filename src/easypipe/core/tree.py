"""Lists all files of a folder, local or in a bucket, with sizes and times."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from fsspec import AbstractFileSystem

from easypipe.core import storage
from easypipe.core.errors import MissingFileError, StorageError
from easypipe.core.remote import StorageOptions, remote_call
from easypipe.core.values import Json, JsonObject


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
        found: JsonObject = remote_call(fs, "find", timeout_s, name, detail=True)
        root = name.strip("/") + "/"
        return {
            path.strip("/").removeprefix(root): Found(int(info.get("size") or 0), _written(info))
            for path, info in found.items()
        }

    try:
        return dict(sorted(storage.ask_long(folder, storage_options, call).items()))
    except MissingFileError:
        return {}


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
