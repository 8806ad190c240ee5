"""Column types of JSON rows: one schema for a whole file, whatever range is read.

Rules: null gives way to any type; numbers are int64, float64 where one of them is not an integer or
does not fit. Where a column holds several kinds, it has that of lists or objects where these came
first, else the type of strings if there are any, else of the kind that came first; rows of another
kind are bad rows. Where the insides of its lists or objects have no common type, it is kept as
JSON.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from easypipe.core.errors import SchemaError
from easypipe.sources.formats.jsonkeys import (
    ARRAY,
    BOOL,
    FLOAT,
    INT,
    MAX_KEYS,
    NULL,
    OBJECT,
    STRING,
    new_keys,
    observe_keys,
)
from easypipe.sources.formats.scanners import gather
from easypipe.sources.schemas import JSON, TypeConflict, is_json, merge_types, plain_type

# a value of an object, but for the commonest of messages
_NULL = re.compile(rb'(?<!"role")(?<!"content")\s*:\s*null\b')


class Observer:
    """Collects column types from records shown in order. columns: those whose insides matter, None
    for all.
    """

    def __init__(self, path: str, columns: tuple[str, ...] | None) -> None:
        self._path = path
        self._columns = columns
        self._keys = new_keys()
        # so that they are found even where a file has more keys than the table holds
        if columns is not None:
            for name in columns:
                row = json.dumps({name: None}, ensure_ascii=False).encode()
                self._observe(
                    np.frombuffer(row, np.uint8), np.zeros(1, np.int64), np.array([len(row)])
                )
            self._keys.kinds[:] = 0
        self._nested: dict[str, pa.DataType] = {}
        self._nulls: set[str] = set()

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
                self._look_for_nulls(out[:size].tobytes(), wanted)
                for name, kind in nested_types(out[:size].tobytes(), wanted).items():
                    if not pa.types.is_nested(kind) and not is_json(kind):
                        continue  # these records hold another kind than others of the file
                    before = self._nested.get(name)
                    self._nested[name] = kind if before is None else merge_json(before, kind)

    def _look_for_nulls(self, lines: bytes, names: list[str]) -> None:
        """Nulls that stand in the file: an Arrow struct cannot tell them from keys that other rows
        have.
        """
        names = [name for name in names if name not in self._nulls]
        if not names or not _NULL.search(lines):
            return
        for line in io.BytesIO(lines):
            if _NULL.search(line):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                self._nulls |= {
                    name for name in names if isinstance(row, dict) and _has_null(row.get(name))
                }

    def facts(self) -> dict[str, Any]:
        """The types found, as JSON. Raises SourceError where there are more columns than can be
        told apart.
        """
        if self._keys.counts[2] and self._columns is None:
            raise SchemaError(
                at=self._path,
                problem=f"its rows have more than {MAX_KEYS} different keys",
                fix="Name those to read with columns=[...].",
            )
        nested = pa.schema(list(self._nested.items()))
        return {
            "columns": self._columns_seen(),
            "nulls": sorted(self._nulls),
            "nested": base64.b64encode(nested.serialize().to_pybytes()).decode(),
        }

    def _observe(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        data = data.view()
        data.flags.writeable = False
        flags = np.empty(len(starts), np.uint8)
        observe_keys(data, starts, ends, flags, *self._keys)
        return flags

    def _columns_seen(self) -> list[tuple[str, int, int]]:
        """(name, all kinds, first kind) of every column; keys that differ only in their escapes are
        one column.
        """
        found: dict[str, tuple[int, int]] = {}
        keys = self._keys
        for slot in range(int(keys.counts[0])):
            raw = keys.text[keys.spans[slot] : keys.spans[slot + 1]].tobytes()
            try:
                name = json.loads(b'"' + raw + b'"')
                name.encode()
            # bad escapes or no UTF-8: the rows that hold it are refused when they are read
            except ValueError:
                continue
            every, first = int(keys.kinds[slot]), int(keys.first[slot])
            if not every:
                continue
            before = found.get(name, (0, 0))
            found[name] = (before[0] | every, before[1] if before[1] > NULL else first)
        return [(name, every, first) for name, (every, first) in found.items()]


def schema_of(facts: dict[str, Any], exact: Sequence[str] = (), *, known: bool = True) -> pa.Schema:
    """The schema that an Observer's facts tell.

    exact: columns that are kept as JSON where an Arrow type would lose nulls. known: whether the
    facts are of all rows; lists and objects of `exact` columns are JSON where they are not, as
    nothing is known of those that follow.
    """
    nested = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(facts["nested"])))
    fields = []
    for name, every, first in facts["columns"]:
        if every & STRING and first not in (OBJECT, ARRAY):
            kind = pa.large_string()
        elif first in (INT, FLOAT):
            kind = pa.float64() if every & FLOAT else pa.int64()
        elif first in (OBJECT, ARRAY):
            kind = nested.field(name).type if name in nested.names else pa.null()
            if name in exact and (name in facts["nulls"] or not known):
                kind = JSON
        else:
            kind = pa.bool_() if first == BOOL else pa.null()
        fields.append(pa.field(name, kind))
    return pa.schema(fields)


def _has_null(value: Any, outermost: bool = True) -> bool:
    """Whether a null stands in an object, other than the role or content of a message."""
    if isinstance(value, dict):
        own = any(
            item is None and not (outermost and key in ("role", "content"))
            for key, item in value.items()
        )
        return own or any(_has_null(item, False) for item in value.values())
    return isinstance(value, list) and any(_has_null(item, outermost) for item in value)


def nested_types(lines: bytes, names: list[str]) -> dict[str, pa.DataType]:
    """Types of these columns in JSON lines. Lines that do not parse say nothing; they are refused
    when they are read.
    """
    try:
        options = pj.ReadOptions(use_threads=False, block_size=len(lines) + 64)
        table = pj.read_json(pa.BufferReader(lines), read_options=options)
    except pa.ArrowInvalid:
        return _slow_types(lines, names)
    return {
        name: _without_times(table.schema.field(name).type)
        for name in names
        if name in table.column_names
    }


def _slow_types(lines: bytes, names: list[str]) -> dict[str, pa.DataType]:
    """Row by row, because a block in which types clash, or one line is broken, gives no types at
    all.
    """
    found: dict[str, pa.DataType] = {}
    for line in io.BytesIO(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        for name in names:
            if isinstance(row, dict) and isinstance(row.get(name), dict | list):
                try:
                    kind = _type_of(row[name])
                except TypeConflict:
                    kind = JSON
                found[name] = merge_json(found[name], kind) if name in found else kind
    return found


def merge_json(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type of a nested column of both; JSON where no type holds both within. Lists and objects
    in one place are one of these, too; but of the column itself the kind that came first stays, and
    rows of the other are bad rows."""
    t = pa.types
    if is_json(first) or is_json(second):
        return JSON
    if t.is_nested(first) and t.is_nested(second) and t.is_struct(first) != t.is_struct(second):
        return first
    try:
        return merge_types(first, second)
    except TypeConflict:
        return JSON


def _without_times(kind: pa.DataType) -> pa.DataType:
    """Plain types; the JSON reader takes strings that look like times for times, which would hang
    on the rows at hand.
    """
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_date(kind):
        return pa.large_string()
    if pa.types.is_struct(kind):
        return pa.struct(
            [
                (kind.field(i).name, _without_times(kind.field(i).type))
                for i in range(kind.num_fields)
            ]
        )
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
    """Raises TypeConflict."""
    result = pa.null()
    for kind in kinds:
        result = merge_types(result, kind)
    return result
