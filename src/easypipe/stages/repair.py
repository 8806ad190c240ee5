"""Repairs what verification found broken in token caches and in what save() wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.cache.repair import aside, broken_files, place_of, repair_cache
from easypipe.cache.verify import Verification
from easypipe.core import storage
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedSource
from easypipe.save import saved
from easypipe.save.stage import SaveStage
from easypipe.save.verify import cache_folder_of, verify
from easypipe.save.write_folder import write_folder
from easypipe.stages.prepare import documents_of

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
        data = steps[-1][1] if steps else {}
        writers = [source.writer for source in documents_of(data, context)]
        repair_cache(place[0], broken, writers)
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


def _repair_saved(found: Verification, steps: Steps, context: PipelineContext) -> None:
    folder, files = place_of(found.path), broken_files(found)
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
            with aside(files, options):
                write_folder(dataclasses.replace(target, config=config), context)
