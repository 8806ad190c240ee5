"""Decides which columns a DatasetConfig reads, renames, passes to a function and keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from easypipe.core.errors import ConfigError, SourceError, moved, require, require_known
from easypipe.core.protocols import ShardedSource
from easypipe.core.schema import data_columns
from easypipe.core.values import Arguments
from easypipe.stages.source.config import TOKEN_COLUMNS, DatasetConfig
from easypipe.transforms.columns.base import TransformedSource
from easypipe.transforms.columns.columns import Rename
from easypipe.transforms.columns.functions import Map
from easypipe.transforms.columns.hold_out import HoldOut


def read_columns(dataset: DatasetConfig) -> list[list[str]]:
    """Returns the columns of the files that a dataset reads, by the names in the files.

    Returns:
        Lists of columns; the first list whose columns all exist is used. [] with a callback, which
        may read any column.
    """
    if dataset.format_callback is not None:
        return []
    if dataset.prompt is not None:
        try:
            new = list(dataset.prompt.columns)
        except ConfigError as error:  # the template names the columns
            raise error.under(f"datasets.{dataset.name}.prompt") from None
        tools = dataset.prompt.tools_column
    else:
        new = list(answer_fields(dataset)) or [dataset.content_field]
        tools = dataset.tools_field
    new += [*dataset.additional_fields, *([tools] if tools is not None else [])]
    old = {name: before for before, name in (dataset.format_fields or {}).items()}
    names = list(dict.fromkeys([*(old.get(name, name) for name in new if name), *old.values()]))
    # these columns are read if they exist
    optional = ["chat_template_kwargs", *(["tools"] if tools is None else [])]
    return [[*names, *optional], *([*names, name] for name in reversed(optional)), names]


def answer_fields(dataset: DatasetConfig) -> tuple[str, ...]:
    """Returns the columns that prompt_field, completion_field and similar options name."""
    named = (
        dataset.prompt_field,
        dataset.completion_field,
        dataset.rejected_field,
        dataset.desirable_field,
    )
    return tuple(name for name in named if name is not None)


def template_columns(dataset: DatasetConfig) -> list[str]:
    """Returns the columns of the files that are text or are only used in a template.

    Their values must stay exactly as they are in the files.
    """
    every = [name for names in read_columns(dataset)[:1] for name in names]
    old = {name: before for before, name in (dataset.format_fields or {}).items()}
    return [
        name
        for name in every
        if name not in {old.get(kept, kept) for kept in dataset.additional_fields}
    ]


def formatted(source: ShardedSource, dataset: DatasetConfig) -> ShardedSource:
    """Applies `hold_out`, then `format_fields`, then `format_callback` to a source.

    It reads no rows. Errors name the option.
    """
    steps: list[Any] = []
    schema = source.schema
    if dataset.hold_out is not None:
        columns = data_columns(schema)
        wanted = next(iter(read_columns(dataset)[-1:]), columns)
        names = [name for name in wanted if name in columns] or columns
        steps.append(HoldOut(dataset.hold_out, names, schema))
    if dataset.format_fields is not None:
        steps.append(Rename(dataset.format_fields))
        try:
            schema = steps[-1].schema(schema)
        except (ConfigError, SourceError) as error:
            raise moved(error, f"datasets.{dataset.name}.format_fields") from None
    if dataset.format_callback is not None:
        types: Arguments = dict(dataset.format_columns or {})
        own = answer_fields(dataset) or (dataset.content_field,)
        made = own if dataset.prompt is None else dataset.prompt.columns
        for column in made:  # callbacks mostly make the text column
            if column not in schema.names:
                types.setdefault(column, pa.large_string())
        try:
            steps.append(
                Map(
                    dataset.format_callback,
                    columns=types,
                    batched=dataset.format_batched,
                    version=dataset.format_version,
                )
            )
        except ConfigError as error:
            raise moved(error, f"datasets.{dataset.name}.format_callback") from None
    return TransformedSource(source, steps, on_error=dataset.on_error) if steps else source


def kept_columns(
    name: str,
    source: ShardedSource,
    additional: Sequence[str],
    remove: Sequence[str] | None,
    *,
    at: str,
) -> tuple[str, ...]:
    """Returns the columns of a source that are kept with its tokens.

    Args:
        additional: The additional_fields, which are kept.
        remove: All columns except these are kept; None keeps only `additional`.
        at: The key path of the dataset, for errors.

    Raises:
        ConfigError: A column does not exist, or is both kept and removed.
    """
    have = data_columns(source.schema)
    for column in additional:
        problem = f"dataset {name!r} has no column {column!r}"
        require_known(column, have, f"{at}.additional_fields", problem)
        require(
            remove is None or column not in remove,
            "tokenize.remove_columns",
            f"{column!r} is one of the additional_fields of dataset {name!r}",
            "Take it out of one of the two.",
        )
    if remove is None:
        return tuple(additional)
    kept = tuple(column for column in have if column not in remove)
    for column in kept:
        require(
            column not in TOKEN_COLUMNS,
            "tokenize.remove_columns",
            f"{column!r} of dataset {name!r} would be kept, but tokenized rows have such a column",
            f"Add {column!r} to remove_columns.",
        )
    return kept
