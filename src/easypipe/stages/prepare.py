"""Prepares the datasets of a chain, several at a time; repairs and checks again what it made."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from easypipe.cache.folder import CONFIGS
from easypipe.cache.repair import aside, broken_files, place_of, repair_cache
from easypipe.cache.verify import Verification
from easypipe.core import storage
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedSource
from easypipe.core.remote import StorageOptions
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.core.threads import each
from easypipe.save import saved
from easypipe.save.verify import cache_folder_of, verify
from easypipe.save.write_folder import write_folder
from easypipe.stages.mix.mixture import planned_of
from easypipe.stages.save import SaveStage, rows_of
from easypipe.stages.tokenize.documents import EncodedSource, cached_of, require_documents

log = logging.getLogger("easypipe")

# A dataset of at most this size takes less time to tokenize than to commit, which waits for the
# disk: several such datasets are prepared at the same time.
SMALL_BYTES = 1 << 20
AT_ONCE = 8

# the stages of a pipeline, each with the sources that it made
Steps = Sequence[tuple[BaseStage, Mapping[str, ShardedSource]]]


def repair(path: str | Path, steps: Steps, context: PipelineContext) -> tuple[Verification, ...]:
    """Repairs what is broken in `path`, as far as this pipeline makes it.

    A token cache is repaired if the pipeline stores its tokens there, and a saved folder if one of
    its save() stages writes there. Other files stay broken.

    Returns:
        The findings of `verify` afterwards, which name what is still broken.

    Raises:
        ConfigError: `path` is neither a token cache nor a saved folder.
        EasypipeError: Preparing or saving fails.
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


def _options_for(place: str, steps: Steps, context: PipelineContext) -> StorageOptions:
    """Returns the storage_options with which the pipeline writes to a URL."""
    for stage, data in steps:
        if isinstance(stage, SaveStage) and any(
            place_of(target.folder).startswith(place) for target in stage.targets(data, context)
        ):
            return stage.config.storage_options
    return None if context.cache is None else context.cache.options


def _repair_saved(found: Verification, steps: Steps, context: PipelineContext) -> None:
    """Writes the broken files of a saved folder again, if a save() stage writes there."""
    folder, files = place_of(found.path), broken_files(found)
    manifest = saved.join(folder, saved.MANIFEST)
    for stage, data in steps:
        if not isinstance(stage, SaveStage):
            continue
        for target in stage.targets(data, context):
            if place_of(target.folder) != folder:
                continue
            # Without a manifest the right bytes are unknown, so everything is written again next to
            # the existing files.
            options = target.config.storage_options
            lost = manifest in files and storage.exists(manifest, options)
            config = dataclasses.replace(target.config, overwrite=target.config.overwrite or lost)
            with aside(files, options):
                target = dataclasses.replace(target, config=config)
                write_folder(target, rows_of(target, context), context.progress)


def prepare_sources(
    data: Mapping[str, ShardedSource], context: PipelineContext, num_epochs: int | None
) -> None:
    """Fills the token caches, and makes the plans, if there are any.

    Args:
        data: The sources at the end of the chain.
        num_epochs: How many epochs are planned; None: endless.
    """
    for at_once, some in itertools.groupby(documents_of(data, context), _at_once):
        each(EncodedSource.materialize, [*some], at_once, "prepare")
    # Sweeps temporary files of a killed process; if another process has written the same files,
    # nothing else removes them.
    for name in ("indexes", "manifests", CONFIGS):
        storage.sweep(context.cache_dir / name)
    for name, planned in ((name, planned_of(source)) for name, source in data.items()):
        if planned is not None:
            rows = planned.prepare(num_epochs).plan(num_epochs).num_rows
            log.info("%s: %s rows are planned", name, rows or "endless")


def _at_once(documents: EncodedSource) -> int:
    """Returns how many datasets like this one are prepared at the same time."""
    sizes = [shard.num_bytes for shard in documents.shards]
    small = min(sizes, default=0) > 0 and sum(sizes) <= SMALL_BYTES  # 0: unknown
    return documents.writer.num_workers or AT_ONCE if small else 1


def documents_of(
    data: Mapping[str, ShardedSource], context: PipelineContext
) -> Iterator[EncodedSource]:
    """Yields every dataset under these sources that has a token cache."""
    for name, source in data.items():
        planned, names = planned_of(source), source.schema.names
        parts: Sequence[ShardedSource] = ()
        if planned is not None:
            parts = tuple(planned.mixture.parts.values())
        elif INPUT_IDS in names and SEGMENT_IDS not in names:
            parts = (require_documents(name, source, context, stage="repair"),)
        yield from filter(None, map(cached_of, parts))
