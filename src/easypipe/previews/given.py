"""Rows as JSON files or the user give them, whatever easypipe makes of them when it reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from easypipe.core.protocols import ShardedSource, Source, innermost, raw_of
from easypipe.core.values import Dataset, Json, Row
from easypipe.sources.formats.jsonlines import JsonShardedSource
from easypipe.stages.source.config import DatasetConfig, is_object
from easypipe.transforms.columns.base import Chain, TransformedSource
from easypipe.transforms.columns.columns import Rename, Select
from easypipe.transforms.columns.hold_out import HoldOut

Given = Callable[[int, int], Json | None]  # (shard, row) -> the row; None if it is not known


def given_rows(
    dataset: DatasetConfig, source: ShardedSource, columns: tuple[str, ...]
) -> Given | None:
    """Returns what gives `columns` of a row of `source` as its file or the user has them.

    It is None if that is not known: for other files than JSON, objects, and transforms.

    Args:
        dataset: The config of the dataset.
        source: The rows that easypipe reads, from the first one of the dataset on.
        columns: The columns.
    """
    names, rows = _names(source, columns), dataset.data_files
    own = dataset.in_memory and isinstance(rows, list | tuple | Mapping) and not is_object(rows)
    if not names or not (own or isinstance(innermost(source), JsonShardedSource)):
        return None

    def row_of(shard: int, row: int) -> Json | None:
        try:
            text = None if own else raw_of(source, shard, row)
            found = _in_memory(rows, row) if own else json.loads(text or "null")
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, Mapping):
            return None
        return {name: found.get(old) for name, old in names.items()}

    return row_of


def _in_memory(rows: Dataset, row: int) -> Row:
    """Returns a row of a list of rows, or of a mapping of columns."""
    if isinstance(rows, Mapping):
        return {name: values[row] for name, values in rows.items()}
    return rows[row]


def _names(source: ShardedSource, columns: tuple[str, ...]) -> dict[str, str]:
    """Returns the names of columns below all transforms; {} if one may change their values."""
    names = dict(zip(columns, columns, strict=True))
    while isinstance(source, Source) and source.below is not None:
        if isinstance(source, TransformedSource):
            made = source.transform
            for step in reversed(made.steps if isinstance(made, Chain) else (made,)):
                if not isinstance(step, Rename | Select | HoldOut):
                    return {}
                olds = {} if not isinstance(step, Rename) else step.names
                old = {new: before for before, new in olds.items()}
                names = {name: old.get(below, below) for name, below in names.items()}
        source = source.below
    return names
