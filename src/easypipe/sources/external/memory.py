"""Rows in memory (an Arrow table, a list of dicts, a dict of columns), known by their content."""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.core.config import digest
from easypipe.core.errors import SourceError, place, require_columns, require_rows
from easypipe.core.protocols import Shard, Source
from easypipe.core.schema import changes_json
from easypipe.core.values import Row
from easypipe.sources.base import READER_VERSION
from easypipe.sources.external.dicts import (
    MISFITS,
    NO_COMMON_TYPE,
    as_json,
    inferred,
    misfit,
    outer_kind,
)
from easypipe.sources.schemas import column, json_array, json_text, plain_schema

CUT_ROWS = 8192  # rows in memory can be read from anywhere; cuts only say where work may be divided


class InMemoryShardedSource(Source):
    """A table, list of dicts or dict of columns as a source of one shard; implements ShardedSource.

    Columns get plain types (large_string, large_list). Lists and objects without a common type
    inside are kept as JSON.

    Args:
        data: pa.Table or pa.RecordBatch; a list of dicts (missing keys are null); a dict of equally
            long columns (lists, NumPy or Arrow arrays).
        columns: Names to read, in this order; None reads all.
        name: The name of the dataset, for errors.

    Raises:
        SourceError: The values of a column have no common type; the error names row and column.
    """

    def __init__(
        self,
        data: pa.Table | pa.RecordBatch | Sequence[Row] | Row,
        *,
        columns: Sequence[str] | None = None,
        name: str = "memory",
    ) -> None:
        table = _table(data, name)
        self._columns, self._name = columns, name
        # the Python values of columns in which Arrow changes some: objects have their own keys in
        # their order, and their own nulls; an integer beside fractions is no fraction
        self._python = {
            key: values
            for key, kind in zip(table.column_names, table.schema.types, strict=True)
            if (changes_json(kind) or pa.types.is_floating(kind))
            and (values := _python_values(data, key)) is not None
        }
        if columns is not None:
            require_columns(columns, table.column_names, name)
            table = table.select(list(columns))
        if not table.column_names:
            raise SourceError(
                at=name,
                problem="holds no column",
                fix="Give at least one row with at least one key.",
            )
        self.schema = plain_schema(table.schema, name)
        arrays = [column(table.column(field.name).chunks, field.type) for field in self.schema]
        self._batch = pa.record_batch(arrays, schema=self.schema)
        rows = self._batch.num_rows
        cuts, size = tuple(range(0, rows, CUT_ROWS)) or (0,), self._batch.nbytes
        self.shards = (Shard(name=name, num_rows=rows, cuts=cuts, num_bytes=size),)
        # a digest of the content: equal rows have an equal fingerprint
        self.fingerprint = digest("memory", READER_VERSION, content_hash(self._batch))

    def shard_identity(self, shard: int) -> str:
        return self.fingerprint

    def exactly(self, columns: Sequence[str]) -> InMemoryShardedSource:
        table = pa.Table.from_batches([self._batch])
        for key in columns:
            values = self._python.get(key)
            if values is None or key not in self.schema.names:
                continue
            if changes_json(self.schema.field(key).type):
                texts = as_json(values)
            elif _mixes_numbers(values):
                texts = json_array([None if one is None else json_text(one) for one in values])
            else:
                continue
            table = table.set_column(table.column_names.index(key), key, texts)
        if table.schema.equals(self.schema):
            return self
        return InMemoryShardedSource(table, columns=self._columns, name=self._name)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        require_rows(start, stop, self._batch.num_rows, self._name)
        return self._batch.slice(start, stop - start)


def _table(data: Any, name: str) -> pa.Table:
    """Returns the data of a user as a table; raises SourceError if it holds no rows."""
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, Mapping):
        arrays = {str(key): _array(values, name, str(key)) for key, values in data.items()}
        lengths = {key: len(array) for key, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise SourceError(
                at=name,
                problem=f"columns differ in length: {lengths}",
                fix="Give every column a value for every row.",
            )
        return pa.table(arrays)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        keys: dict[str, None] = {}
        # row by row: these are Python objects, not columns yet
        for number, row in enumerate(data):
            if not isinstance(row, Mapping):
                kind = type(row).__name__
                raise SourceError(
                    at=place(name, row=number),
                    problem=f"expected a dict, got {kind}",
                    fix="Give rows like {'text': ...}.",
                )
            for key in row:
                if not isinstance(key, str):
                    raise SourceError(
                        at=place(name, row=number),
                        problem=f"key {key!r} is not a string",
                        fix="Name columns with strings.",
                    )
            keys.update(dict.fromkeys(row))
        return pa.table({key: _array([row.get(key) for row in data], name, key) for key in keys})
    raise SourceError(
        at=name,
        problem=f"cannot read rows from {type(data).__name__}",
        fix="Give a pyarrow.Table, a list of dicts or a dict of columns.",
    )


def _python_values(data: Any, key: str) -> Sequence[Any] | None:
    """Returns a column as Python objects; None if Arrow holds it already."""
    if isinstance(data, Mapping):
        return data[key] if isinstance(data[key], list | tuple) else None
    return None if isinstance(data, pa.Table | pa.RecordBatch) else [row.get(key) for row in data]


def _mixes_numbers(values: Sequence[Any]) -> bool:
    """Returns whether Python integers stand beside fractions, with nothing else but None."""
    plain = all(value is None or isinstance(value, int | float) for value in values)
    return plain and len({type(value) for value in values if value is not None}) > 1


def _array(values: Any, name: str, key: str) -> pa.Array | pa.ChunkedArray:
    """Returns a column's values as an array; raises SourceError if they have no common type."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values) if values.ndim == 2 else values.tolist()
    if isinstance(values, str | bytes | os.PathLike):
        raise SourceError(
            at=place(name, column=key),
            problem=f"{str(values)!r:.80} is not a list: a mapping holds the rows themselves, as a "
            "list for each column",
            fix="Give a list. A file is named without a mapping: data_files: rows.jsonl.",
        )
    try:
        return inferred(values)
    except MISFITS as error:
        if len({outer_kind(value) for value in values if value is not None} - {None}) == 1:
            with contextlib.suppress(*MISFITS):
                return as_json(values)
        row = _first_misfit(values)
        raise misfit(place(name, row=row, column=key), NO_COMMON_TYPE, error) from error


def _first_misfit(values: Any) -> int:
    """Returns the first row whose type conflicts with those before it."""

    def conflict(stop: int) -> bool:
        try:
            pa.array(values[:stop])
        except MISFITS:
            return True
        return False

    return bisect.bisect_left(range(len(values)), True, 1, key=conflict) - 1


def content_hash(batch: pa.RecordBatch) -> str:
    """Returns the XXH3 of the batch as an Arrow stream: of schema and values only."""
    hasher = xxhash.xxh3_128()
    sink = pa.PythonFile(_Hashing(hasher), mode="w")
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return hasher.hexdigest()


class _Hashing:
    """A file that only hashes what is written to it."""

    closed = False

    def __init__(self, hasher: Any) -> None:
        self._hasher = hasher

    def write(self, data: Any) -> int:
        self._hasher.update(data)
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
