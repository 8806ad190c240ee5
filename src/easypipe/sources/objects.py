"""Datasets of other libraries as sources: `datasets.Dataset`, `grain.MapDataset`, and whatever has `len()` and gives dicts by number.

They are known by what they can do, so none of those libraries is imported here. Rows stay where they are: a read takes its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, did_you_mean, place
from easypipe.core.protocols import Reject, Scan, Shard, ShardedDataSource
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.base import READER_VERSION
from easypipe.sources.memory import content_hash
from easypipe.sources.schemas import TypeConflict, column, merge_types, plain_schema

BLOCK_ROWS = 1024  # read at a time to learn the schema and to hash the content
ENDLESS = 1 << 62  # lengths of datasets that repeat without end are near 2^63


def is_arrow_dataset(data: Any) -> bool:
    """`datasets.Dataset`: columns in Arrow tables, maybe behind a list of indices."""
    return all(hasattr(data, name) for name in ("with_format", "column_names", "features", "__len__", "__getitem__"))


def is_dataset_dict(data: Any) -> bool:
    """`datasets.DatasetDict`."""
    return isinstance(data, Mapping) and bool(data) and all(is_arrow_dataset(part) for part in data.values())


def is_random_access(data: Any) -> bool:
    """Rows by number: `grain.MapDataset`, Grain's data sources, torch's map-style datasets, any own class; no plain container."""
    plain = isinstance(data, str | bytes | Mapping | list | tuple | np.ndarray | pa.Table | pa.RecordBatch)
    return not plain and hasattr(data, "__len__") and hasattr(data, "__getitem__") and not hasattr(data, "__fspath__")


def is_streamed(data: Any) -> bool:
    """A dataset that can only be read from its start: `datasets.IterableDataset`, `grain.IterDataset`."""
    return not isinstance(data, str | bytes | Mapping | Sequence) and hasattr(data, "__iter__") and not hasattr(data, "__len__")


def is_dataset_object(data: Any) -> bool:
    return is_dataset_dict(data) or is_arrow_dataset(data) or is_random_access(data) or is_streamed(data)


def open_object(data: Any, *, name: str = "memory", split: str | None = None) -> ArrowDatasetSource | RandomAccessSource:
    """Raises ConfigError for a split that is not there, SourceError for a dataset that can only be read from its start."""
    if is_dataset_dict(data):
        if split is None and len(data) == 1:
            split = next(iter(data))
        if split not in data:
            problem = f"no split {split!r}" if split else "holds several splits"
            raise ConfigError(
                at="split", problem=problem, have=data, fix=(did_you_mean(split, data) if split else None) or "Name one by split=."
            )
        return _opened(data[split], name)
    if split is not None:
        raise ConfigError(at="split", problem=f"{split!r}, but {type(data).__name__} has no splits", fix="Leave it out.")
    if is_streamed(data):
        raise SourceError(
            at=name,
            problem=f"{type(data).__name__} gives no rows by number",
            fix="Give the dataset itself, not a stream of it, or its files.",
        )
    return _opened(data, name)


def _opened(data: Any, name: str) -> ArrowDatasetSource | RandomAccessSource:
    """By its tables, unless its rows are made when they are read (`with_transform`): no table holds those."""
    made = (getattr(data, "format", None) or {}).get("type") == "custom" if is_arrow_dataset(data) else True
    return RandomAccessSource(data, name=name) if made else ArrowDatasetSource(data, name=name)


class ArrowDatasetSource(ShardedDataSource):
    """A `datasets.Dataset`, whatever was selected, shuffled or formatted in it; implements ShardedSource. Its tables stay memory-mapped."""

    def __init__(self, data: Any, *, name: str = "memory", columns: Sequence[str] | None = None) -> None:
        self._data = data.with_format("arrow", columns=None if columns is None else list(columns))
        self._name, self._columns = name, None if columns is None else tuple(columns)
        self.schema = plain_schema(self._data.features.arrow_schema if columns is None else self._data[:0].schema, name)
        rows = len(self._data)
        self.shards: Sequence[Shard] = (Shard(name=name, num_rows=rows, cuts=tuple(range(0, rows, 8 * BLOCK_ROWS)) or (0,)),)

    @property
    def fingerprint(self) -> str:
        """Digest of the content, which is read once for it: equal rows give an equal fingerprint."""
        return self._content

    @functools.cached_property
    def _content(self) -> str:
        return _fingerprint(self, self.shards[0].num_rows or 0)

    def shard_identity(self, shard: int) -> str:
        return self.fingerprint

    def select(self, columns: Sequence[str]) -> ArrowDatasetSource:
        return ArrowDatasetSource(self._data, name=self._name, columns=columns)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        _check_range(self._name, start, stop, self.shards[0].num_rows or 0)
        table = self._data[start:stop]
        arrays = [column(table.column(field.name).chunks, field.type) for field in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class RandomAccessSource(ShardedDataSource):
    """Anything with `len()` that gives a dict (or None, for a row that is filtered out) by number; implements ScanningSource.

    Values are Python objects or arrays. Columns follow from the first 1,024 rows; a later row that does not fit them raises SourceError, as
    does one that is no dict. Rows that are None are rejects ("filtered", benign). Thread safe where `data[i]` is.
    """

    def __init__(self, data: Any, *, name: str = "memory") -> None:
        rows = len(data)
        if rows >= ENDLESS:
            raise SourceError(
                at=name, problem=f"{type(data).__name__} never ends", fix="Take off its repeat(); give epochs to the mixture instead."
            )
        self._data, self._name, self._rows = data, name, rows
        self._lock = threading.Lock()
        self._schema: pa.Schema | None = None
        self.shards: Sequence[Shard] = (Shard(name=name, num_rows=rows, cuts=tuple(range(0, rows, 8 * BLOCK_ROWS)) or (0,)),)

    @property
    def schema(self) -> pa.Schema:
        with self._lock:
            if self._schema is None:
                kinds: dict[str, pa.DataType] = {}
                for row in self._take(0, min(self._rows, BLOCK_ROWS)):
                    for key, value in (row or {}).items():
                        kinds[key] = self._merged(key, kinds.get(key, pa.null()), value)
                if not kinds:
                    raise SourceError(at=self._name, problem="holds no row from which columns could be known", fix="Give data with rows.")
                fields = plain_schema(pa.schema([pa.field(key, kind) for key, kind in kinds.items()]), self._name)
                self._schema = fields.append(pa.field(ROW_NUMBER, pa.int64()))
            return self._schema

    @property
    def fingerprint(self) -> str:
        """Digest of the content, which is read once for it."""
        return self._content

    @functools.cached_property
    def _content(self) -> str:
        return _fingerprint(self, self._rows)

    def shard_identity(self, shard: int) -> str:
        return self.fingerprint

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self.scan(shard, start, stop).batch

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        _check_range(self._name, start, stop, self._rows)
        schema, rows = self.schema, self._take(start, stop)
        kept = [start + i for i, row in enumerate(rows) if row is not None]
        present = [row for row in rows if row is not None]
        for number, row in zip(kept, present, strict=True):  # rows are Python objects: there is no column to look at yet
            unknown = next((key for key in row if key not in schema.names), None)
            if unknown is not None:
                problem = f"column {unknown!r} is not in the first {BLOCK_ROWS} rows"
                raise SourceError(at=place(self._name, row=number), problem=problem, have=schema.names, fix="Give every row the same keys.")
        arrays = [self._array(kept, [row.get(field.name) for row in present], field) for field in schema if field.name != ROW_NUMBER]
        rejects = tuple(Reject(row=start + i, reason="filtered", benign=True) for i, row in enumerate(rows) if row is None)
        return Scan(pa.RecordBatch.from_arrays([*arrays, pa.array(kept, pa.int64())], schema=schema), rejects)

    def _take(self, start: int, stop: int) -> list[Mapping[str, Any] | None]:
        rows = [self._data[i] for i in range(start, stop)]
        for i, row in enumerate(rows):
            if row is not None and not (isinstance(row, Mapping) and all(isinstance(key, str) for key in row)):
                problem = f"expected a dict with names of columns, got {type(row).__name__}"
                raise SourceError(at=place(self._name, row=start + i), problem=problem, fix="Map it to rows like {'text': ...}.")
        return rows

    def _merged(self, key: str, before: pa.DataType, value: Any) -> pa.DataType:
        try:
            return merge_types(before, plain_schema(pa.schema([(key, pa.array([_plain(value)]).type)]), self._name).field(0).type)
        except (TypeConflict, pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise SourceError(
                at=f"{self._name}, column {key!r}", problem=f"its values have no common type: {error}", fix="Give every row the same type."
            ) from error

    def _array(self, numbers: list[int], values: list[Any], field: pa.Field) -> pa.Array:
        try:
            return pa.array([_plain(value) for value in values], field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as error:
            bad = next((n for n, value in zip(numbers, values, strict=True) if not _fits(value, field.type)), numbers[0])
            raise SourceError(
                at=place(self._name, row=bad, column=field.name),
                problem=f"is no {field.type}: {error}",
                fix="Give every row the same type.",
            ) from error


def _plain(value: Any) -> Any:
    """Arrays (of any library that NumPy understands) as lists, since Arrow takes only flat ones."""
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        array = np.asarray(value)
        return array if array.ndim == 1 else array.tolist()
    return value


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([_plain(value)], kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError):
        return False
    return True


def _fingerprint(source: ArrowDatasetSource | RandomAccessSource, rows: int) -> str:
    hasher = xxhash.xxh3_128()
    for start in range(0, rows, BLOCK_ROWS):
        hasher.update(content_hash(source.read(0, start, min(rows, start + BLOCK_ROWS))).encode())
    return digest("object", READER_VERSION, rows, [[field.name, str(field.type)] for field in source.schema], hasher.hexdigest())


def _check_range(name: str, start: int, stop: int, rows: int) -> None:
    if not 0 <= start <= stop <= rows:
        raise SourceError(at=name, problem=f"rows {start}:{stop} were asked for", fix=f"It has rows 0:{rows}.")
