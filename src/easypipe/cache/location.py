"""Chooses the folder of caches and line indexes; warns if other users may write to it."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import Any

import platformdirs

from easypipe.cache.config import CacheConfig
from easypipe.cache.folder import CacheFolder, RemoteFolder
from easypipe.core import storage
from easypipe.core.config import digest
from easypipe.core.errors import require
from easypipe.core.protocols import PipelineContext, ShardedSource, info_of
from easypipe.core.remote import public_url

log = logging.getLogger("easypipe")


class TemporaryFolder(CacheFolder):
    """A folder below the system's temporary one (TMPDIR).

    It is removed when this object is no longer referenced, at the latest when the process ends. A
    killed process leaves it, like every temporary file.
    """

    temporary = True

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="easypipe-uncached-")))
        self._remove = weakref.finalize(self, shutil.rmtree, self.local, ignore_errors=True)


@functools.cache
def _tell_who_writes(folder: Path) -> None:
    """Warns, once for each folder, if other users may write to it.

    Such users could decide which tokens are read: checksums find damage, but not intentional
    changes.
    """
    try:
        status = folder.stat()
    except OSError:  # it does not exist yet, and will be this user's own
        return
    if status.st_mode & stat.S_IWOTH:
        log.warning(
            "%s: every user of this machine may write to this cache, and so decide what tokens are "
            "read from it. chmod o-w it, or give a cache_dir of your own.",
            folder,
        )
    elif status.st_uid not in (os.getuid(), 0):
        log.info("%s: this cache is written by another user (uid %d)", folder, status.st_uid)


def cache_folder(
    given: str | Path | None, options: CacheConfig | None = None, key: str = "cache_dir"
) -> CacheFolder:
    """Returns a pipeline's cache folder: from the config, EASYPIPE_CACHE, or the user's own.

    Args:
        given: The config's folder; None if it has none.
        options: The options for a folder at a URL.
        key: The key of `given`, for error messages.

    Raises:
        StorageError: The protocol of the URL is unknown.
        ConfigError: The folder is a file.
    """
    chosen = given or os.environ.get("EASYPIPE_CACHE") or platformdirs.user_cache_dir("easypipe")
    if not storage.is_remote(chosen):
        local = Path(os.path.expanduser(str(chosen).removeprefix("file://"))).absolute()
        at = key if given else "EASYPIPE_CACHE"
        fits = os.path.isdir(local) or not os.path.exists(local)
        require(fits, at, f"{local} is a file", "Give a folder.")
        _tell_who_writes(local)
        return CacheFolder(local)
    options = options or CacheConfig()
    url = str(chosen).rstrip("/")
    own = options.staging_dir
    staging = None if own is None else Path(os.path.expanduser(own)).absolute()
    return RemoteFolder(
        url,
        _beside(url),
        options=options.storage_options,
        reading=options.reading,
        staging_bytes=options.staging_bytes,
        staging_dir=staging,
    )


def _beside(url: str) -> Path:
    """Returns this machine's folder for a cache at `url`.

    It has locks, indexes, plans and checks of fast tokenizers.
    """
    own = os.environ.get("EASYPIPE_CACHE")
    root = own if own and not storage.is_remote(own) else platformdirs.user_cache_dir("easypipe")
    return Path(os.path.expanduser(root)).absolute() / "remote" / digest(public_url(url))[:16]


def cache_folder_of(
    name: str,
    dataset: Any,
    source: ShardedSource,
    context: PipelineContext,
    *,
    keep: bool | None = None,
) -> CacheFolder:
    """Returns the folder that the tokens of a dataset go to.

    Args:
        name: The name of the dataset.
        dataset: Its DatasetConfig; None if it has none.
        source: Its rows.
        context: The context of the stage.
        keep: The stage's `cache_tokenized`; None if it was not set.

    Returns:
        A temporary folder if the tokens are not to be kept, or cannot be recognised by the next
        process.
    """
    if context.config.streaming:
        if keep:
            log.warning(
                "dataset %s: streaming keeps no tokens, though tokenize.cache_tokenized is True; "
                "leave it out",
                name,
            )
        # streaming uses it only for facts about a tokenizer
        return own_folder(dataset, context)
    enabled = keep is not False and (dataset is None or dataset.cache_enabled)
    if not enabled:
        return TemporaryFolder()
    if not info_of(source).cacheable:  # a warning said this when the source was opened
        return TemporaryFolder()
    return own_folder(dataset, context)


def own_folder(dataset: Any, context: PipelineContext) -> CacheFolder:
    """Returns the dataset's cache_path, or else the cache folder of the pipeline."""
    if dataset is None or dataset.cache_path is None:
        return context.cache or CacheFolder(context.cache_dir)
    key = f"dataset {dataset.name!r}, cache_path" if dataset.name else "cache_path"
    return cache_folder(dataset.cache_path, context.config.cache, key)


def index_folder(dataset: Any, context: PipelineContext) -> Path | None:
    """Returns the folder for indexes of line files; None keeps them in memory."""
    return own_folder(dataset, context).local / "indexes" if dataset.cache_enabled else None
