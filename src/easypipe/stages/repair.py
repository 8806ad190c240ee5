"""What verify.py found broken is made again from the source, and nothing else; what is whole stays
as it is, byte for byte.

A broken file is set aside, not deleted, until there is a new one: a repair that fails leaves
everything as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import parse_manifest, read_manifest
from easypipe.core import storage
from easypipe.core.errors import ConfigError, EasypipeError
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedSource
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.save import saved
from easypipe.save.stage import SaveStage
from easypipe.save.write_folder import write_folder
from easypipe.stages.mix.stage import MixedShardedSource
from easypipe.stages.pack.stage import PackedShardedSource
from easypipe.stages.tokenize.import_tokens import ImportedTokens
from easypipe.stages.tokenize.stage import TokenizedShardedSource
from easypipe.stages.tokenize.tokens import Documents, require_documents
from easypipe.stages.verify import Verification, cache_folder_of, place_of, verify

log = logging.getLogger("easypipe")

# of a pipeline: each stage, and what it made
Steps = Sequence[tuple[BaseStage, Mapping[str, ShardedSource]]]


def repair(path: str | Path, steps: Steps, context: PipelineContext) -> tuple[Verification, ...]:
    """Makes good what is broken in `path` as far as this pipeline makes it; returns what `verify`
    says afterwards.

    A token cache is repaired where the pipeline keeps tokens there, a saved folder where one of its
    save() writes there. What a pipeline does not make stays broken, and is told of. Raises
    ConfigError where `path` is neither, and what preparing and saving raise.
    """
    options = _options_for(place_of(path), steps, context)
    broken = [found for found in verify(path, options) if not found.ok]
    place = cache_folder_of(path, options)
    if place is not None:
        _repair_cache(place[0], broken, steps, context)
    else:
        for found in broken:
            _repair_saved(found, steps, context)
    return verify(path, options)


def _options_for(place: str, steps: Steps, context: PipelineContext) -> dict[str, Any] | None:
    """The storage_options with which the pipeline writes to a URL."""
    for stage, data in steps:
        if isinstance(stage, SaveStage) and any(
            place_of(target.folder).startswith(place) for target in stage.targets(data, context)
        ):
            return stage.config.storage_options
    return None if context.cache is None else context.cache.options


def _repair_cache(
    folder: CacheFolder, broken: Sequence[Verification], steps: Steps, context: PipelineContext
) -> None:
    here = place_of(folder.at())
    wanted = {
        found.path: _files(found)
        for found in broken
        if found.kind == "token cache" and _files(found)
    }
    stale = {file for found in broken if found.kind == "records" for file in _files(found)}
    sources = [
        (name, source, str(source.writer.path()), place_of(source.writer.folder.at()))
        for name, source in _documents(steps, context)
        if isinstance(source, TokenizedShardedSource | ImportedTokens)
    ]
    if here not in {there for *_, there in sources}:
        fix = f"Set cache_dir={here}, or give the config that filled it."
        have = sorted({there for *_, there in sources})
        raise ConfigError(
            at="cache_dir", problem=f"no dataset has its tokens in {here}", have=have, fix=fix
        )
    for name, source, path, there in sources:
        if there != here or not (
            path in wanted or (stale and storage.exists(path, folder.options))
        ):
            continue
        with _aside({*wanted.get(path, ()), *stale, path}, folder.options) as kept:
            log.info("dataset %s: making good %s", name, path)
            source.materialize()
        _keep_the_old_facts(path, kept.get(path), folder.options)
        stale = {file for file in stale if not storage.exists(file, folder.options)}


def _files(found: Verification) -> set[str]:
    return {place_of(problem.file) for problem in found.problems if problem.file is not None}


def _keep_the_old_facts(path: str, before: bytes | None, options: dict[str, Any] | None) -> None:
    """A manifest that only measured other seconds this time is put back as it was."""
    try:
        old = None if before is None else parse_manifest(before, path)
    except EasypipeError:  # that is what was broken
        return
    new = read_manifest(path, options)
    if (
        before is not None
        and old is not None
        and dataclasses.replace(new, facts=old.facts, dataset=old.dataset) == old
    ):
        storage.commit_bytes(path, before, options)


def _documents(steps: Steps, context: PipelineContext) -> Iterable[tuple[str, Documents]]:
    """Every dataset of the pipeline that has a token cache."""
    for name, source in steps[-1][1].items() if steps else ():
        if isinstance(source, MixedShardedSource | PackedShardedSource):
            yield from source.mixture.parts.items()
        elif INPUT_IDS in source.schema.names and SEGMENT_IDS not in source.schema.names:
            yield name, require_documents(name, source, context, stage="repair")


def _repair_saved(found: Verification, steps: Steps, context: PipelineContext) -> None:
    folder, files = place_of(found.path), _files(found)
    manifest = saved.join(folder, saved.MANIFEST)
    for stage, data in steps:
        if not isinstance(stage, SaveStage):
            continue
        for target in stage.targets(data, context):
            if place_of(target.folder) != folder:
                continue
            # Without a manifest nobody knows which bytes are right, so everything is written again
            # beside what stands.
            options = target.config.storage_options
            lost = manifest in files and storage.exists(manifest, options)
            config = dataclasses.replace(target.config, overwrite=target.config.overwrite or lost)
            with _aside(files, options):
                write_folder(dataclasses.replace(target, config=config), context)


@contextlib.contextmanager
def _aside(files: Iterable[str], options: dict[str, Any] | None) -> Generator[dict[str, bytes]]:
    """Sets files aside for the block: gone for good when it ends, put back where it raises. Yields
    the bytes of the JSON files.

    What was in a bucket is kept in a temporary folder of this machine meanwhile.
    """
    moved: dict[str, Path] = {}
    kept: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="easypipe-repair-") as folder:
        try:
            for i, file in enumerate(files):
                if not storage.exists(file, options):
                    continue
                if file.endswith(".json"):
                    kept[file] = storage.read_bytes(file, options)
                if storage.is_remote(file):
                    moved[file] = Path(folder) / str(i)
                    with open(moved[file], "wb") as copy:
                        copy.writelines(storage.chunks(file, options))
                    storage.remove(file, options)
                else:
                    moved[file] = Path(file).with_name(
                        f"{storage.TEMPORARY}{storage._owner()}-repair-{Path(file).name}"
                    )
                    os.replace(file, moved[file])
            yield kept
        except BaseException:
            for file, there in moved.items():
                if storage.exists(file, options):
                    continue
                if storage.is_remote(file):
                    storage.commit_bytes(file, there.read_bytes(), options)
                else:
                    os.replace(there, file)
            raise
        finally:
            for there in moved.values():
                there.unlink(missing_ok=True)
