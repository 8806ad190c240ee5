"""Lists all files of a folder, local or in a bucket, with sizes and times."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from fsspec import AbstractFileSystem

from easypipe.core import storage
from easypipe.core.errors import MissingFileError
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
    """Returns every file in a folder and its subfolders.

    Returns:
        Sizes and times by the file's path within the folder, sorted; {} if there is no folder.
    """
    if not storage.is_remote(folder):
        local = Path(str(folder).removeprefix("file://"))
        stats = (
            {
                path.relative_to(local).as_posix(): path.stat()
                for path in local.rglob("*")
                if path.is_file()
            }
            if local.is_dir()
            else {}
        )
        return {name: Found(stats[name].st_size, stats[name].st_mtime) for name in sorted(stats)}

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


def _written(info: Json) -> float:
    when = next(
        (info[key] for key in ("LastModified", "updated", "mtime", "created") if info.get(key)),
        None,
    )
    when = datetime.fromisoformat(when) if isinstance(when, str) else when
    return when.timestamp() if isinstance(when, datetime) else float(when or time.time())
