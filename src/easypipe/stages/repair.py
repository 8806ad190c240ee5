"""What verify.py found broken is made again from the source, and nothing else; what is whole stays as it is, byte for byte.

A broken file is set aside, not deleted, until there is a new one: a repair that fails leaves everything as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

from easypipe.core import storage
from easypipe.core.errors import ConfigError, EasypipeError
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedSource
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.sources.manifest import read_manifest, write_manifest
from easypipe.stages import saved
from easypipe.stages.mix import MixedShardedSource
from easypipe.stages.pack import PackedShardedSource
from easypipe.stages.save import SaveStage
from easypipe.stages.tokens import Documents, require_documents
from easypipe.stages.verify import Verification, cache_folder_of, verify
from easypipe.stages.write_folder import write_folder

log = logging.getLogger("easypipe")

Steps = Sequence[tuple[BaseStage, Mapping[str, ShardedSource]]]  # of a pipeline: each stage, and what it made


def repair(path: str | Path, steps: Steps, context: PipelineContext) -> tuple[Verification, ...]:
    """Makes good what is broken in `path` as far as this pipeline makes it; returns what `verify` says afterwards.

    A token cache is repaired where the pipeline keeps tokens there, a saved folder where one of its save() writes there. What a pipeline
    does not make stays broken, and is told of. Raises ConfigError where `path` is neither, and what preparing and saving raise.
    """
    if storage.is_remote(path):
        raise ConfigError(at=str(path), problem="only local folders are repaired", fix="Save the data again with overwrite=True.")
    broken = [found for found in verify(path) if not found.ok]
    place = cache_folder_of(path)
    if place is not None:
        _repair_cache(place, broken, steps, context)
    else:
        for found in broken:
            _repair_saved(found, steps, context)
    return verify(path)


def _repair_cache(cache_dir: Path, broken: Sequence[Verification], steps: Steps, context: PipelineContext) -> None:
    wanted = {Path(found.path): _files(found) for found in broken if found.kind == "token cache" and _files(found)}
    stale = {file for found in broken if found.kind == "records" for file in _files(found)}
    sources = [(name, source, getattr(source, "cache_path", None)) for name, source in _documents(steps, context)]
    folders = {path.parent.parent for _, _, path in sources if path is not None}
    if cache_dir not in folders:
        fix = f"Set cache_dir={cache_dir}, or give the config that filled it."
        raise ConfigError(at="cache_dir", problem=f"no dataset has its tokens in {cache_dir}", have=sorted(map(str, folders)), fix=fix)
    for name, source, path in sources:
        if path is None or path.parent.parent != cache_dir or not (path in wanted or (stale and path.exists())):
            continue
        with _aside({*wanted.get(path, ()), *stale, path}) as kept:
            log.info("dataset %s: making good %s", name, path.stem)
            source.materialize()
        _keep_the_old_facts(path, kept.get(path))
        stale = {file for file in stale if not file.exists()}


def _files(found: Verification) -> set[Path]:
    return {Path(problem.file.removeprefix("file://")).expanduser().absolute() for problem in found.problems if problem.file is not None}


def _keep_the_old_facts(path: Path, before: bytes | None) -> None:
    """A manifest that only measured other seconds this time is put back as it was."""
    if before is None:
        return
    new = read_manifest(path)
    old_path = path.with_name(f"{storage.TEMPORARY}compare-{path.name}")
    try:
        old_path.write_bytes(before)
        old = read_manifest(old_path)
    except EasypipeError:
        return
    finally:
        old_path.unlink(missing_ok=True)
    if dataclasses.replace(new, facts=old.facts, dataset=old.dataset) == old:
        storage.commit_bytes(path, before)
    else:
        write_manifest(path, new)


def _documents(steps: Steps, context: PipelineContext) -> Iterable[tuple[str, Documents]]:
    """Every dataset of the pipeline that has a token cache."""
    for name, source in steps[-1][1].items() if steps else ():
        if isinstance(source, MixedShardedSource | PackedShardedSource):
            yield from source.mixture.parts.items()
        elif INPUT_IDS in source.schema.names and SEGMENT_IDS not in source.schema.names:
            yield name, require_documents(name, source, context, stage="repair")


def _repair_saved(found: Verification, steps: Steps, context: PipelineContext) -> None:
    folder = Path(found.path.removeprefix("file://")).expanduser().absolute()
    files = _files(found)
    manifest = folder / saved.MANIFEST
    for stage, data in steps:
        if not isinstance(stage, SaveStage):
            continue
        for target in stage._targets(data, context):
            if Path(target.folder.removeprefix("file://")).expanduser().absolute() != folder:
                continue
            # Without a manifest nobody knows which bytes are right, so everything is written again beside what stands.
            lost = manifest in files and manifest.exists()
            with _aside(files):
                write_folder(dataclasses.replace(target, overwrite=target.overwrite or lost), context)


@contextlib.contextmanager
def _aside(files: Iterable[Path]) -> Generator[dict[Path, bytes]]:
    """Sets files aside for the block: gone for good when it ends, put back where it raises. Yields the bytes of the JSON files."""
    moved: dict[Path, Path] = {}
    kept: dict[Path, bytes] = {}
    try:
        for file in files:
            if file.exists():
                if file.suffix == ".json":
                    kept[file] = file.read_bytes()
                moved[file] = file.with_name(f"{storage.TEMPORARY}{storage._owner()}-repair-{file.name}")
                os.replace(file, moved[file])
        yield kept
    except BaseException:
        for file, there in moved.items():
            if not file.exists():
                os.replace(there, file)
        raise
    finally:
        for there in moved.values():
            there.unlink(missing_ok=True)
