"""Column types of JSON rows, found while a file is indexed, so that the schema is the file's and not that of the range that is read.

Rules: null gives way to any type; numbers are int64, float64 where one of them is not an integer or does not fit. Where a column holds
several kinds, it has that of lists or objects where these came first, else the type of strings if there are any, else of the kind that
came first; rows of another kind are bad rows.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from easypipe.core.errors import SchemaError
from easypipe.sources.jsonkeys import ARRAY, BOOL, FLOAT, INT, MAX_KEYS, NULL, OBJECT, STRING, new_keys, observe_keys
from easypipe.sources.scanners import gather
from easypipe.sources.schemas import merge_types, plain_type


class Observer:
    """Collects column types from records shown in order. columns: those whose insides matter, None for all."""

    def __init__(self, path: str, columns: tuple[str, ...] | None) -> None:
        self._path = path
        self._columns = columns
        self._keys = new_keys()
        if columns is not None:  # so that they are found even where a file has more keys than the table holds
            for name in columns:
                row = json.dumps({name: None}, ensure_ascii=False).encode()
                self._observe(np.frombuffer(row, np.uint8), np.zeros(1, np.int64), np.array([len(row)]))
            self._keys.kinds[:] = 0
        self._nested: dict[str, pa.DataType] = {}

    def __call__(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        flags = self._observe(data, starts, ends)
        kinds = self._keys.kinds[: self._keys.counts[0]]
        if (kinds >= OBJECT).any():
            nested = [name for name, every, _ in self._columns_seen() if every >= OBJECT]
            wanted = [name for name in nested if self._columns is None or name in self._columns]
            if wanted:
                size = int((ends - starts).sum()) + len(starts)
                out = np.empty(size, np.uint8)
                size = gather(data, starts, ends, flags, out)
                for name, kind in nested_types(out[:size].tobytes(), wanted).items():
                    if not pa.types.is_nested(kind):
                        continue  # these records hold another kind than others of the file
                    before = self._nested.get(name)
                    self._nested[name] = kind if before is None else merge_json(before, kind)

    def facts(self) -> dict[str, Any]:
        """The types found, as JSON. Raises SourceError where there are more columns than can be told apart."""
        if self._keys.counts[2] and self._columns is None:
            raise SchemaError(
                at=self._path,
                problem=f"its rows have more than {MAX_KEYS} different keys",
                fix="Name those to read with columns=[...].",
            )
        nested = pa.schema(list(self._nested.items()))
        return {
            "columns": self._columns_seen(),
            "nested": base64.b64encode(nested.serialize().to_pybytes()).decode(),
        }

    def _observe(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        data = data.view()
        data.flags.writeable = False
        flags = np.empty(len(starts), np.uint8)
        observe_keys(data, starts, ends, flags, *self._keys)
        return flags

    def _columns_seen(self) -> list[tuple[str, int, int]]:
        """(name, all kinds, first kind) of every column; keys that differ only in their escapes are one column."""
        found: dict[str, tuple[int, int]] = {}
        keys = self._keys
        for slot in range(int(keys.counts[0])):
            raw = keys.text[keys.spans[slot] : keys.spans[slot + 1]].tobytes()
            try:
                name = json.loads(b'"' + raw + b'"')
                name.encode()
            except ValueError:  # bad escapes or no UTF-8: the rows that hold it are refused when they are read
                continue
            every, first = int(keys.kinds[slot]), int(keys.first[slot])
            if not every:
                continue
            before = found.get(name, (0, 0))
            found[name] = (before[0] | every, before[1] if before[1] > NULL else first)
        return [(name, every, first) for name, (every, first) in found.items()]


def schema_of(facts: dict[str, Any]) -> pa.Schema:
    """The schema that an Observer's facts tell."""
    nested = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(facts["nested"])))
    fields = []
    for name, every, first in facts["columns"]:
        if every & STRING and first not in (OBJECT, ARRAY):
            kind = pa.large_string()
        elif first in (INT, FLOAT):
            kind = pa.float64() if every & FLOAT else pa.int64()
        elif first in (OBJECT, ARRAY):
            kind = nested.field(name).type if name in nested.names else pa.null()
        else:
            kind = pa.bool_() if first == BOOL else pa.null()
        fields.append(pa.field(name, kind))
    return pa.schema(fields)


def nested_types(lines: bytes, names: list[str]) -> dict[str, pa.DataType]:
    """Types of these columns in JSON lines. Lines that do not parse say nothing; they are refused when they are read."""
    try:
        options = pj.ReadOptions(use_threads=False, block_size=len(lines) + 64)
        table = pj.read_json(pa.BufferReader(lines), read_options=options)
    except pa.ArrowInvalid:
        return _slow_types(lines, names)
    return {name: _without_times(table.schema.field(name).type) for name in names if name in table.column_names}


def _slow_types(lines: bytes, names: list[str]) -> dict[str, pa.DataType]:
    """Row by row, because a block in which types clash, or one line is broken, gives no types at all."""
    found: dict[str, pa.DataType] = {}
    for line in io.BytesIO(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        for name in names:
            if isinstance(row, dict) and isinstance(row.get(name), dict | list):
                kind = _type_of(row[name])
                found[name] = merge_json(found[name], kind) if name in found else kind
    return found


def merge_json(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """merge_types, with the rule for kinds that clash: strings win over all but objects that came before, else the first."""
    t = pa.types
    if first.equals(second) or t.is_null(second):
        return first
    if t.is_null(first) or (t.is_large_string(second) and not t.is_struct(first)):
        return second
    if t.is_struct(first) and t.is_struct(second):
        joined = {first.field(i).name: first.field(i).type for i in range(first.num_fields)}
        for i in range(second.num_fields):
            field = second.field(i)
            joined[field.name] = merge_json(joined[field.name], field.type) if field.name in joined else field.type
        return pa.struct(list(joined.items()))
    if t.is_large_list(first) and t.is_large_list(second):
        return pa.large_list(merge_json(first.value_type, second.value_type))
    if (t.is_integer(first) and t.is_floating(second)) or (t.is_floating(first) and t.is_integer(second)):
        return merge_types(first, second)
    return first


def _without_times(kind: pa.DataType) -> pa.DataType:
    """Plain types; the JSON reader takes strings that look like times for times, which would hang on the rows at hand."""
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_date(kind):
        return pa.large_string()
    if pa.types.is_struct(kind):
        return pa.struct([(kind.field(i).name, _without_times(kind.field(i).type)) for i in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.large_list(_without_times(kind.value_type))
    return plain_type(kind)


def _type_of(value: Any) -> pa.DataType:
    if value is None:
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(1 << 63) <= value < 1 << 63 else pa.float64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, str):
        return pa.large_string()
    if isinstance(value, dict):
        return pa.struct([(key, _type_of(item)) for key, item in value.items()])
    return pa.large_list(_merged(_type_of(item) for item in value))


def _merged(kinds: Iterable[pa.DataType]) -> pa.DataType:
    result = pa.null()
    for kind in kinds:
        result = merge_json(result, kind)
    return result
