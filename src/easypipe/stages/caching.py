"""Which folder keeps the tokens of a dataset: the pipeline's, its own, or one that goes with the process."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from easypipe.core.protocols import PipelineContext, ShardedSource

log = logging.getLogger("easypipe")


class TemporaryFolder:
    """A folder below the system's temporary one (TMPDIR); removed when nobody holds this object, at the latest when the process ends.

    A process that is killed leaves it behind, as it does every temporary file.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="easypipe-uncached-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def cache_folder_of(dataset: Any, source: ShardedSource, context: PipelineContext, *, keep: bool | None = None) -> Path | TemporaryFolder:
    """Where the tokens of `dataset` (a DatasetConfig, or None) go. keep: as the stage says; None where it says nothing."""
    if getattr(context.config, "streaming", False):
        if keep:
            name = "?" if dataset is None else dataset.name
            log.warning("dataset %s: streaming keeps no tokens, though tokenize.cache_tokenized is True; leave it out", name)
        return own_folder(dataset, context)  # of which streaming asks only what is known of a tokenizer
    enabled = keep is not False and (dataset is None or dataset.cache_enabled)
    if not enabled:
        return TemporaryFolder()
    if not getattr(source, "cacheable", True):
        name = "?" if dataset is None else dataset.name
        log.warning("dataset %s: a function without a version made its rows, so its tokens are made anew in every process", name)
        return TemporaryFolder()
    return own_folder(dataset, context)


def own_folder(dataset: Any, context: PipelineContext) -> Path:
    """The dataset's cache_path, else the cache folder of the pipeline."""
    own = None if dataset is None else dataset.cache_path
    return context.cache_dir if own is None else Path(own).expanduser().absolute()


def index_folder(dataset: Any, context: PipelineContext) -> Path | None:
    """Where indexes of line files are kept; None keeps them in memory."""
    return own_folder(dataset, context) / "indexes" if dataset.cache_enabled else None


def in_folder(context: PipelineContext, folder: Path | TemporaryFolder) -> PipelineContext:
    return dataclasses.replace(context, cache_dir=folder.path if isinstance(folder, TemporaryFolder) else folder)
