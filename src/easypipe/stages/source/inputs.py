"""Which kind of input a dataset names, beside plain files: the Hub, files of tokens, a folder of
`datasets`, an object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from easypipe.core.errors import ConfigError
from easypipe.core.protocols import ShardedSource
from easypipe.sources.external.objects import is_dataset_object, open_object
from easypipe.sources.external.saved_datasets import is_saved_dataset, saved_dataset_files
from easypipe.sources.hub.source import HuggingFaceShardedSource, parse_hub_name
from easypipe.sources.open import open_files
from easypipe.sources.refs import TOKEN_EXTENSIONS, format_of
from easypipe.sources.splits import Part, parse_split

WHOLE = "train"  # how `datasets` calls all rows of files that name no splits


def is_object(data: Any) -> bool:
    return not isinstance(data, pa.Table | Path) and is_dataset_object(data)


def is_hub(dataset: Any) -> bool:
    files = dataset.data_files
    return dataset.type == "huggingface" or (isinstance(files, str) and files.startswith("hf://"))


def is_tokens(dataset: Any) -> bool:
    """Files that token_files may describe."""
    if dataset.type is not None:
        return dataset.type in TOKEN_EXTENSIONS
    files = (
        dataset.data_files if isinstance(dataset.data_files, list | tuple) else [dataset.data_files]
    )
    return bool(files) and all(
        isinstance(file, str | Path) and format_of(str(file)) in TOKEN_EXTENSIONS for file in files
    )


def _may_be_text(dataset: Any) -> bool:
    """Whether these can be text files, as far as their names tell."""
    if dataset.in_memory or dataset.type not in (None, "txt", "huggingface"):
        return False
    files = (
        dataset.data_files if isinstance(dataset.data_files, list | tuple) else [dataset.data_files]
    )
    return dataset.type is not None or all(format_of(str(file)) in (None, "txt") for file in files)


def check_input(dataset: Any) -> None:
    """What type, split, subset and revision mean together. Raises ConfigError for those that would
    have no effect.
    """
    files = dataset.data_files
    if dataset.split is not None:
        parse_split(dataset.split)
    if dataset.version is not None and not is_object(files):
        problem = "has no effect: files, and rows in memory, are known by their content"
        raise ConfigError(at="version", problem=problem, fix="Leave it out.")
    if dataset.token_files is not None and not is_tokens(dataset):
        raise ConfigError(
            at="token_files",
            problem="has no effect: these are no files of tokens",
            fix="Set type='tokens', or leave it out.",
        )
    if dataset.text_unit is not None and not _may_be_text(dataset):
        raise ConfigError(
            at="text_unit", problem="has no effect: these are no text files", fix="Leave it out."
        )
    if is_hub(dataset):
        if dataset.type not in (None, "huggingface"):
            problem = (
                f"{dataset.type!r}, but {files} is on the Hub, where file names tell the format"
            )
            raise ConfigError(
                at="type",
                problem=problem,
                fix="Leave it out, or name files: hf://datasets/owner/name/*.jsonl.",
            )
        if not isinstance(files, str):
            raise ConfigError(
                at="data_files",
                problem=f"{files!r} names no dataset of the Hub",
                fix="Write owner/name.",
            )
        if parse_hub_name(files).pattern and (dataset.split or dataset.subset):
            at = "split" if dataset.split else "subset"
            raise ConfigError(
                at=at, problem="has no effect beside a pattern", fix="Leave it or the pattern out."
            )
        return
    for name in ("subset", "revision"):
        if getattr(dataset, name) is not None:
            raise ConfigError(
                at=name,
                problem="means something for datasets of the Hub alone",
                fix="Set type='huggingface', or leave it out.",
            )
    if (
        dataset.split is None
        or is_object(files)
        or (isinstance(files, str | Path) and is_saved_dataset(files))
    ):
        return
    if parse_split(dataset.split)[0] != WHOLE:
        raise ConfigError(
            at="split",
            problem=f"{dataset.split!r}, but these rows name no splits: all of them are {WHOLE!r}",
            fix="Leave it out, and give the files of that split by data_files.",
        )


def split_of(dataset: Any) -> tuple[str | None, Part | None]:
    """The name of the split, and the part of it, that a dataset asks for."""
    return (None, None) if dataset.split is None else parse_split(dataset.split)


def open_input(
    dataset: Any, index_dir: Path | None, *, num_rows: int | None = None, counted: bool = True
) -> ShardedSource | None:
    """The source of an input that is no plain file and no plain rows, all of its split; None for
    those.

    num_rows, counted: of a source of users' own, how many of its rows are asked for, and whether
    they are counted before they are read.
    """
    files = dataset.data_files
    split, part = split_of(dataset)
    if is_object(files):
        return open_object(
            files,
            name=str(dataset.name),
            split=split,
            version=dataset.version,
            num_rows=num_rows if part is None else None,
            counted=counted or part is not None,
            folder=index_dir,
        )
    if is_hub(dataset):
        return HuggingFaceShardedSource(
            files,
            split=split,
            subset=dataset.subset,
            revision=dataset.revision,
            num_rows=dataset.num_rows if part is None else part.first_rows,
            on_error=dataset.on_error,
            storage_options=dataset.storage_options,
            index_dir=index_dir,
            text_unit=dataset.text_unit,
        )
    if is_tokens(dataset):
        return open_files(
            files,
            type=dataset.type,
            on_error=dataset.on_error,
            storage_options=dataset.storage_options,
            index_dir=index_dir,
            token_files=dataset.token_files,
        )
    if isinstance(files, str | Path) and is_saved_dataset(files):
        if dataset.type not in (None, "arrow"):
            raise ConfigError(
                at=f"datasets.{dataset.name}.type",
                problem=f"{dataset.type!r}, but {files} is a folder of `datasets`",
                fix="Leave it out.",
            )
        return open_files(
            saved_dataset_files(files, split),
            type="arrow",
            on_error=dataset.on_error,
            text_unit=dataset.text_unit,
        )
    return None
