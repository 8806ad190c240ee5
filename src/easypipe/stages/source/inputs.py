"""Tells the kinds of input apart: the Hub, token files, folders of `datasets`, objects, files."""

from __future__ import annotations

from pathlib import Path

from easypipe.core.errors import require
from easypipe.core.protocols import ShardedSource
from easypipe.sources.base import FileOptions
from easypipe.sources.external.objects import open_object
from easypipe.sources.external.saved_datasets import is_saved_dataset, saved_dataset_files
from easypipe.sources.hub.source import HuggingFaceShardedSource
from easypipe.sources.open import open_files
from easypipe.stages.source.config import DatasetConfig, is_hub, is_object, is_tokens, split_of


def open_input(
    dataset: DatasetConfig,
    index_dir: Path | None,
    *,
    num_rows: int | None = None,
    counted: bool = True,
) -> ShardedSource | None:
    """The source of an input that is no plain file and no plain rows, all of its split; None for
    those.

    num_rows, counted: of a source of users' own, how many of its rows are asked for, and whether
    they are counted before they are read.
    """
    files = dataset.data_files
    split, part = split_of(dataset)
    options: FileOptions = {
        "on_error": dataset.on_error,
        "storage_options": dataset.storage_options,
        "index_dir": index_dir,
    }
    if is_object(files):
        return open_object(
            files,
            name=str(dataset.name),
            split=split,
            version=dataset.version,
            num_rows=num_rows if part is None else None,
            counted=counted or part is not None,
            folder=index_dir,
            skip=dataset.on_error != "error",
        )
    if is_hub(dataset):
        return HuggingFaceShardedSource(
            files,
            split=split,
            subset=dataset.subset,
            revision=dataset.revision,
            num_rows=dataset.num_rows if part is None else part.first_rows,
            text_unit=dataset.text_unit,
            **options,
        )
    if is_tokens(dataset):
        return open_files(files, type=dataset.type, token_files=dataset.token_files, **options)
    if isinstance(files, str | Path) and is_saved_dataset(files):
        require(
            dataset.type in (None, "arrow"),
            f"datasets.{dataset.name}.type",
            f"{dataset.type!r}, but {files} is a folder of `datasets`",
            "Leave it out.",
        )
        return open_files(
            saved_dataset_files(files, split),
            type="arrow",
            text_unit=dataset.text_unit,
            **options,
        )
    return None
