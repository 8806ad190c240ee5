"""Objects as sources: `datasets.Dataset`, `grain.MapDataset`, and sequences of dicts.

They are recognised by their methods, so none of those libraries is imported here. Rows stay where
they are: each read takes only the rows that it needs.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.core.config import digest
from easypipe.core.errors import (
    SourceError,
    place,
    require,
    require_columns,
    require_known,
    require_rows,
)
from easypipe.core.identity import held_by, name_of, raise_named
from easypipe.core.protocols import Scan, Shard, ShardedSource, Source, left_out
from easypipe.core.schema import ROW_NUMBER, with_row_numbers
from easypipe.core.values import Dataset, attribute_of
from easypipe.sources.base import READER_VERSION
from easypipe.sources.external.dicts import (
    FIRST_ROWS,
    as_batch,
    columns_of,
    fitting,
    require_row,
)
from easypipe.sources.external.memory import content_hash
from easypipe.sources.external.own import (
    Numbered,
    OwnOptions,
    as_source,
    is_complete,
    is_generator,
    is_sharded,
)
from easypipe.sources.schemas import column, plain_schema

BLOCK_ROWS = 1024  # rows that are read at a time to hash the content
ENDLESS = 1 << 62  # lengths of datasets that repeat without end are near 2^63


def is_arrow_dataset(data: Dataset) -> bool:
    """Returns whether this is a `datasets.Dataset`: Arrow tables, perhaps with indices."""
    return all(
        hasattr(data, name)
        for name in ("with_format", "column_names", "features", "__len__", "__getitem__")
    )


def is_dataset_dict(data: Dataset) -> bool:
    """Returns whether this is a `datasets.DatasetDict`."""
    return (
        isinstance(data, Mapping)
        and bool(data)
        and all(is_arrow_dataset(part) for part in data.values())
    )


def is_random_access(data: Dataset) -> bool:
    """Returns whether this has rows by number and is not a plain container.

    Examples are `grain.MapDataset`, Grain's data sources, torch's map-style datasets, and users'
    own classes.
    """
    plain = isinstance(
        data, str | bytes | Mapping | list | tuple | np.ndarray | pa.Table | pa.RecordBatch
    )
    return not plain and isinstance(data, Numbered) and not isinstance(data, os.PathLike)


def is_streamed(data: Dataset) -> bool:
    """Returns whether this can only be read from its start.

    Examples are `datasets.IterableDataset` and `grain.IterDataset`.
    """
    return not isinstance(data, str | bytes | Mapping | Sequence | Sized) and isinstance(
        data, Iterable
    )


def is_dataset_object(data: Dataset) -> bool:
    """Returns whether `open_object` opens it: neither a path nor rows in a plain container."""
    kinds = (
        is_dataset_dict,
        is_arrow_dataset,
        is_complete,
        is_sharded,
        is_random_access,
        is_generator,
    )
    return not isinstance(data, str | bytes) and any(kind(data) for kind in kinds)


def open_object(
    data: Dataset,
    *,
    name: str = "memory",
    split: str | None = None,
    **options: Unpack[OwnOptions],
) -> ShardedSource:
    """Returns the source of an object.

    Rows that an object has by number are identified by their content, or by `version` if it is
    given.

    Args:
        data: The object.
        name: The name of the dataset, for errors.
        split: The split of a DatasetDict.
        options: Those of `own.as_source`.

    Raises:
        ConfigError: The split does not exist, or the object can be read only once.
    """
    if is_dataset_dict(data):
        if split is None and len(data) == 1:
            split = next(iter(data))
        problem = f"no split {split!r}" if split else "holds several splits"
        require_known(split or "", data, "split", problem, "Name one by split=.")
        data = data[split]
    else:
        require(
            split is None,
            "split",
            f"{split!r}, but {type(data).__name__} has no splits",
            "Leave it out.",
        )
    if is_arrow_dataset(data) or (
        is_random_access(data) and not is_complete(data) and not is_sharded(data)
    ):
        return _opened(data, name, options.get("version"), skip=options.get("skip", False))
    return as_source(data, name=name, **options)


def _opened(
    data: Dataset, name: str, version: str | int | None, *, skip: bool
) -> ArrowDatasetSource | RandomAccessSource:
    """Returns a source of the dataset's tables, or of its rows if reading makes them.

    With `with_transform`, reading makes the rows: no table holds them.
    """
    made = (
        (attribute_of(data, "format") or {}).get("type") == "custom"
        if is_arrow_dataset(data)
        else True
    )
    identity = (
        None
        if version is None
        else digest("object", READER_VERSION, name_of(data), held_by(data), str(version))
    )
    if made:
        return RandomAccessSource(data, name=name, identity=identity, skip=skip)
    return ArrowDatasetSource(data, name=name, identity=identity)


class _Object(Source):
    """The rows of an object: one shard, identified by its content."""

    def __init__(self, name: str, rows: int, identity: str | None) -> None:
        """Sets up the one shard.

        Args:
            name: The name of the dataset.
            rows: How many rows there are.
            identity: What identifies the rows instead of their content; None: the content.
        """
        self._name, self._identity = name, identity
        self.shards: Sequence[Shard] = (
            Shard(name=name, num_rows=rows, cuts=tuple(range(0, rows, 8 * BLOCK_ROWS)) or (0,)),
        )

    @property
    def fingerprint(self) -> str:
        """A digest of the content, which is read once: equal rows have an equal fingerprint."""
        return self._content

    @functools.cached_property
    def _content(self: Any) -> str:
        if self._identity is not None:
            return self._identity
        hasher, rows = xxhash.xxh3_128(), self.shards[0].num_rows or 0
        for start in range(0, rows, BLOCK_ROWS):
            batch = self.read(0, start, min(rows, start + BLOCK_ROWS))
            hasher.update(content_hash(batch).encode())
        fields = [[field.name, str(field.type)] for field in self.schema]
        return digest("object", READER_VERSION, rows, fields, hasher.hexdigest())

    def shard_identity(self, shard: int) -> str:
        return self.fingerprint


class ArrowDatasetSource(_Object):
    """A `datasets.Dataset`, whatever was selected, shuffled or formatted in it.

    It implements ShardedSource. Its tables stay memory-mapped.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        name: str = "memory",
        columns: Sequence[str] | None = None,
        identity: str | None = None,
    ) -> None:
        super().__init__(name, len(data), identity)
        self._data = data.with_format("arrow", columns=None if columns is None else list(columns))
        self.schema = plain_schema(
            self._data.features.arrow_schema if columns is None else self._data[:0].schema, name
        )

    def select(self, columns: Sequence[str]) -> ArrowDatasetSource:
        return ArrowDatasetSource(
            self._data, name=self._name, columns=columns, identity=self._identity
        )

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        require_rows(start, stop, self.shards[0].num_rows, self._name)
        table = self._data[start:stop]
        arrays = [column(table.column(field.name).chunks, field.type) for field in self.schema]
        return pa.record_batch(arrays, schema=self.schema)


class RandomAccessSource(_Object):
    """Rows by number: anything with `len()` whose `data[i]` is a dict, or None for a filtered row.

    Values are Python objects or arrays. Columns follow from the `first_rows`. A row that does not
    fit those that are selected, or that is not a dict, raises SourceError or is a reject (`skip`).
    Rows that are None are rejects ("filtered", benign). It is thread-safe if `data[i]` is.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        name: str = "memory",
        identity: str | None = None,
        skip: bool = False,
        first_rows: int = FIRST_ROWS,
    ) -> None:
        rows = len(data)
        if rows >= ENDLESS:
            raise SourceError(
                at=name,
                problem=f"{type(data).__name__} never ends",
                fix="Take off its repeat(); give epochs to the mixture instead.",
            )
        super().__init__(name, rows, identity)
        self._columns: tuple[str, ...] | None = None
        self._exact: tuple[str, ...] = ()  # columns whose lists and objects are JSON
        self._data, self._rows, self._skip, self._first = data, rows, skip, first_rows
        self._lock = threading.Lock()
        self._schema: pa.Schema | None = None

    @property
    def schema(self) -> pa.Schema:
        whole, chosen = self._whole, self._columns
        return whole if chosen is None else pa.schema([whole.field(name) for name in chosen])

    @property
    def _whole(self) -> pa.Schema:
        """The columns of the first rows, with ROW_NUMBER."""
        with self._lock:
            if self._schema is None:
                rows = self._there(0, min(self._rows, self._first))[1]
                for i, row in ({} if self._skip else rows).items():
                    require_row(row, i, self._name)
                columns = columns_of(rows.values(), self._name, exact=self._exact)
                self._schema = with_row_numbers(columns)
            return self._schema

    def select(self, columns: Sequence[str]) -> RandomAccessSource:
        clone = copy.copy(self)
        require_columns(columns, self.schema.names, self._name)
        clone._columns = tuple(dict.fromkeys([*columns, ROW_NUMBER]))
        clone.__dict__.pop("_content", None)
        return clone

    def exactly(self, columns: Sequence[str]) -> RandomAccessSource:
        clone = copy.copy(self)
        clone._exact, clone._schema, clone._lock = tuple(columns), None, threading.Lock()
        clone.__dict__.pop("_content", None)
        return clone

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        require_rows(start, stop, self._rows, self._name)
        none, rows = self._there(start, stop)
        numbers = list(rows)
        batch = as_batch(list(rows.values()), numbers, self._whole)
        batch, bad = fitting(batch, numbers, self._columns, self._name, skip=self._skip)
        return Scan(batch, (*bad, *left_out(none, "filtered")))

    def _there(self, start: int, stop: int) -> tuple[list[int], dict[int, Any]]:
        """Returns the numbers of the rows that are None, and the other rows by number."""
        taken: dict[int, Any] = {}
        for i in range(start, stop):
            try:
                taken[i] = self._data[i]
            except Exception as error:  # noqa: BLE001 (raised as an error that names the row)
                raise_named(name_of(self._data), error, place(self._name, row=i))
        rows = {i: row for i, row in taken.items() if row is not None}
        return [i for i in taken if i not in rows], rows
