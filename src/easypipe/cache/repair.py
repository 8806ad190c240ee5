"""Repairs a token cache: broken files that verify.py found are set aside and made again.

They are made from the source. Intact files stay unchanged, byte for byte. A broken file is set
aside, not deleted, until there is a new one: a repair that fails leaves everything as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import parse_manifest, read_manifest
from easypipe.cache.verify import RECORDS, TOKEN_CACHE, Verification
from easypipe.cache.writer import CacheWriter
from easypipe.core import storage
from easypipe.core.errors import EasypipeError, require
from easypipe.core.remote import StorageOptions

log = logging.getLogger("easypipe")


def repair_cache(
    folder: CacheFolder, broken: Sequence[Verification], writers: Sequence[CacheWriter[Any]]
) -> None:
    """Repairs what is broken in `folder`, if one of `writers` fills it.

    If filling fails, its error is raised and everything is as before.

    Args:
        folder: The folder of the token cache.
        broken: The findings of `verify`.
        writers: Writers of the datasets of a config.

    Raises:
        ConfigError: None of the writers fills this folder.
    """
    here = place_of(folder.at())
    wanted = {found.path: broken_files(found) for found in broken if found.kind == TOKEN_CACHE}
    stale = {file for found in broken if found.kind == RECORDS for file in broken_files(found)}
    have = sorted({place_of(writer.folder.at()) for writer in writers})
    require(
        here in have,
        "cache_dir",
        f"no dataset has its tokens in {here}",
        f"Set cache_dir={here}, or give the config that filled it.",
        have=have,
    )
    for writer in writers:
        path = str(writer.path())
        files = wanted.get(path, set())
        if place_of(writer.folder.at()) != here or not (
            files or (stale and storage.exists(path, folder.options))
        ):
            continue
        with aside({*files, *stale, path}, folder.options) as kept:
            log.info("dataset %s: repairing %s", writer.dataset, path)
            writer.fill(again=True)
        _keep_the_old_facts(path, kept.get(path), folder.options)
        stale = {file for file in stale if not storage.exists(file, folder.options)}


def broken_files(found: Verification) -> set[str]:
    """Returns the files to make again."""
    return {place_of(problem.file) for problem in found.problems if problem.file is not None}


def place_of(path: str | Path) -> str:
    """Returns a path or URL in the spelling in which places are compared."""
    if storage.is_remote(path):
        return str(path).rstrip("/")
    return str(Path(os.path.expanduser(str(path).removeprefix("file://"))).absolute())


@contextlib.contextmanager
def aside(files: Iterable[str], options: StorageOptions) -> Generator[dict[str, bytes]]:
    """Sets files aside for the block; removes them when it ends, and puts them back if it raises.

    Meanwhile they are next to their places, in a bucket too, so that a killed process leaves them
    there.

    Yields:
        The bytes of the JSON files.
    """
    moved: dict[str, str] = {}
    kept: dict[str, bytes] = {}
    try:
        for file in files:
            if not storage.exists(file, options):
                continue
            if file.endswith(".json"):
                kept[file] = storage.read_bytes(file, options)
            folder, _, name = file.rpartition("/")
            there = f"{folder}/{storage.TEMPORARY}{storage.owner()}-repair-{name}"
            _move(file, there, options)
            moved[file] = there
        yield kept
    except BaseException:
        for file, there in moved.items():
            if not storage.exists(file, options):
                _move(there, file, options)
        raise
    finally:
        for there in moved.values():
            storage.remove(there, options)


def _move(file: str, there: str, options: StorageOptions) -> None:
    if not storage.is_remote(file):
        os.replace(file, there)
        return
    with storage.commit_file(there, options) as (temporary, _), open(temporary, "wb") as copy:
        copy.writelines(storage.chunks(file, options))
    storage.remove(file, options)


def _keep_the_old_facts(path: str, before: bytes | None, options: StorageOptions) -> None:
    """Restores the old manifest if the new one differs only in measured facts."""
    if before is None:
        return
    try:
        old = parse_manifest(before, path)
    except EasypipeError:  # the manifest itself was broken
        return
    new = read_manifest(path, options)
    if dataclasses.replace(new, facts=old.facts, dataset=old.dataset) == old:
        storage.commit_bytes(path, before, options)
