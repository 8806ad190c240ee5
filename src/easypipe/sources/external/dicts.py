"""Rows (dicts) of users to Arrow batches: types of columns, JSON for mixed ones, faults by row."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import json
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from easypipe.core.errors import SourceError, moved, place
from easypipe.core.protocols import Reject, Scan
from easypipe.core.schema import (
    ROW_NUMBER,
    changes_json,
    is_json,
    is_list,
    plain_type,
    typed_array,
)
from easypipe.core.values import Item, Row
from easypipe.sources.schemas import (
    JSON,
    TypeConflict,
    holds,
    json_array,
    json_text,
    merge_types,
    plain_schema,
)

FIRST_ROWS = 1024  # the columns follow from this many first rows

FAULTS = "__faults__"  # the column of `as_batch` that says which rows do not fit
NO_COMMON_TYPE = "its values have no common type"

MISFITS = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    TypeError,
    OverflowError,
    UnicodeEncodeError,
)


def require_row(row: Item, number: int, name: str) -> None:
    """Raises SourceError if a row is not a dict with names of columns."""
    if not _is_row(row):
        raise moved(_not_a_row(row), place(name, row=number))


def _not_a_row(row: Item) -> SourceError:
    return SourceError(
        at="",
        problem=f"expected a dict with names of columns, got {type(row).__name__}",
        fix="Map it to rows like {'text': ...}, or set on_error to 'skip'.",
    )


def _unknown_column(name: str, columns: pa.Schema) -> SourceError:
    return SourceError(
        at="",
        problem=f"column {name!r} is not in the first {FIRST_ROWS} rows",
        have=[one for one in columns.names if one != ROW_NUMBER],
        fix="Give every row the same keys, or set on_error to 'skip'.",
    )


def _is_row(row: Item) -> bool:
    return isinstance(row, Mapping) and all(isinstance(key, str) for key in row)


def columns_of(rows: Iterable[Item], name: str, *, exact: Sequence[str] = ()) -> pa.Schema:
    """Returns the columns of the first rows; if types differ, the most frequent ones decide.

    Args:
        rows: The rows; those that are not dicts are left out.
        name: The dataset, for errors.
        exact: Columns whose lists and objects are JSON if an Arrow type could change them, as later
            rows may hold nulls that it could not tell from missing keys.

    Raises:
        SourceError: There are no columns.
    """
    found: dict[str, Counter[pa.DataType]] = {}
    for row in filter(_is_row, rows):  # row by row: these are Python objects, not columns yet
        for key, value in row.items():
            counts = found.setdefault(key, Counter())
            with contextlib.suppress(*MISFITS):  # such a value fits no column
                counts[_kind(value)] += 1
    kinds: dict[str, pa.DataType] = {}
    for key, counts in found.items():
        try:
            kinds[key] = _of_all(counts)
        except TypeConflict:
            kinds[key] = pa.null()
            for kind, _ in counts.most_common():
                with contextlib.suppress(TypeConflict):
                    kinds[key] = _common(kinds[key], kind)
    kinds |= {key: JSON for key in exact if key in kinds and changes_json(kinds[key])}
    if not kinds:
        raise SourceError(
            at=name,
            problem="has no row from which columns can be determined",
            fix="Give data with rows.",
        )
    return plain_schema(pa.schema([pa.field(key, kind) for key, kind in kinds.items()]), name)


def as_batch(rows: Sequence[Item], numbers: Sequence[int], columns: pa.Schema) -> pa.RecordBatch:
    """Returns the rows as a batch of `columns` and FAULTS.

    FAULTS is null for a row that fits. For others it is a JSON list of faults: the column (null for
    a row that is no dict), and place, problem, choices and fix as in an error. A value that does
    not fit is null in its column.

    Args:
        rows: The rows.
        numbers: The number of each row, for ROW_NUMBER.
        columns: The columns.
    """
    faults: dict[int, list[tuple[str | None, Fault]]] = {}

    def note(i: int, column: str | None, error: SourceError) -> None:
        faults.setdefault(i, []).append(
            (column, Fault(error.at, error.problem, error.have, error.fix))
        )

    known = set(columns.names)
    dicts: list[Row] = []
    for i, row in enumerate(rows):
        if not _is_row(row):
            note(i, None, _not_a_row(row))
        elif not row.keys() <= known:
            for key in row.keys() - known:
                note(i, key, _unknown_column(key, columns))
        dicts.append(row if _is_row(row) else {})
    arrays: list[pa.Array] = []
    for field in columns:
        if field.name == ROW_NUMBER:
            arrays.append(pa.array(numbers, pa.int64()))
            continue
        values = [row.get(field.name) for row in dicts]
        try:
            arrays.append(_array(values, field))
        except SourceError:
            for i, value in enumerate(values):  # only a few blocks hold a value that does not fit
                try:
                    _array([value], field)
                except SourceError as error:
                    note(i, field.name, error)
                    values[i] = None
            arrays.append(_array(values, field))
    texts = [json.dumps(faults[i]) if i in faults else None for i in range(len(rows))]
    return pa.record_batch(
        [*arrays, pa.array(texts, pa.large_string())], schema=with_faults(columns)
    )


class Fault(NamedTuple):
    """What is wrong with a row; the members are those of SourceError."""

    at: str
    problem: str
    have: list[str] | None
    fix: str | None


def with_faults(columns: pa.Schema) -> pa.Schema:
    return columns.append(pa.field(FAULTS, pa.large_string()))


def fitting(
    batch: pa.RecordBatch,
    numbers: Sequence[int],
    columns: Sequence[str] | None,
    name: str,
    *,
    skip: bool,
) -> Scan:
    """Returns the rows of a batch of `as_batch` without FAULTS.

    Args:
        batch: The batch.
        numbers: The number of each row.
        columns: The columns to return; faults in others do not count. None returns all.
        name: The dataset and the shard, for errors.
        skip: Whether rows with faults are rejects.

    Raises:
        SourceError: A row has a fault, and `skip` is False; the error names the first.
    """
    texts = batch.column(FAULTS)
    names = [one for one in batch.schema.names if one != FAULTS] if columns is None else [*columns]
    rejects: list[Reject] = []
    for i in np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False)).tolist():
        for column, told in json.loads(texts[i].as_py()):
            if column is not None and columns is not None and column not in columns:
                continue
            at, problem, have, fix = Fault(*told)
            if not skip:
                at = ", ".join(filter(None, (place(name, row=numbers[i]), at)))
                raise SourceError(at=at, problem=problem, have=have, fix=fix)
            detail = f"{at}: {problem}" if at else problem
            rejects.append(Reject(row=numbers[i], reason="wrong_type", detail=detail))
            break
    batch = batch.select(names)
    if rejects:
        bad = {reject.row for reject in rejects}
        batch = batch.filter(pa.array([number not in bad for number in numbers]))
    return Scan(batch, tuple(rejects))


def as_json(values: Iterable[Any]) -> pa.Array:
    """Returns lists and objects without a common Arrow type as a column of JSON; None is null.

    Raises:
        TypeError: A value is neither a list nor an object, or holds something that JSON cannot
            express.
    """
    return json_array([None if value is None else json_text(_of_json(value)) for value in values])


def misfit(at: str, problem: str, error: Exception) -> SourceError:
    """Returns the error for a value that does not fit its column."""
    if isinstance(error, UnicodeEncodeError):
        half = error.object[error.start : error.end]
        return SourceError(
            at=at,
            problem=f"is not Unicode text: {half!r} is half of a surrogate pair",
            fix="Replace it, as text.encode('utf-8', 'replace').decode() does, or set on_error to "
            "'skip'.",
        )
    return SourceError(
        at=at,
        problem=f"{problem}: {error}",
        fix="Give every row the same type, or set on_error to 'skip'.",
    )


def _kind(value: Any) -> pa.DataType:
    """Returns the type of one value; JSON for a list or an object with mixed types inside."""
    try:
        return plain_type(inferred([_plain(value)]).type)
    except MISFITS:
        if outer_kind(value) is None:
            raise
        return as_json([value]).type


def inferred(values: Any) -> pa.Array | pa.ChunkedArray:
    """Returns values as an array of the type that pyarrow finds; uint64 if int64 is too small."""
    try:
        return pa.array(values, from_pandas=False)
    except OverflowError:
        return pa.array(values, pa.uint64())


def _of_all(kinds: Iterable[pa.DataType]) -> pa.DataType:
    """Returns the type of a column that holds all of these types, in any order.

    Objects become JSON among themselves before they meet lists, as in JSON lines.

    Raises:
        TypeConflict: No type holds all.
    """
    kinds = list(kinds)
    objects = [kind for kind in kinds if pa.types.is_struct(kind)]
    others = [kind for kind in kinds if not pa.types.is_struct(kind)]
    return _common(*(functools.reduce(_common, some, pa.null()) for some in (others, objects)))


def _common(before: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """Returns the type of a column that holds both, by the rule of JSON lines.

    Lists with any contents have a common type, and so do objects.

    Raises:
        TypeConflict: No type holds both.
    """
    t = pa.types
    lists = list(map(is_list, (before, kind)))
    try:
        merged = merge_types(before, kind)
    except TypeConflict:
        if t.is_nested(before) and t.is_nested(kind) and lists[0] == lists[1]:
            return JSON
        raise
    if is_json(merged) and not all(
        is_json(one) or t.is_nested(one) or t.is_null(one) for one in (before, kind)
    ):
        raise TypeConflict(f"{before} and {kind}")
    return merged


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    """Returns a column's values as an array; raises SourceError if one does not fit."""
    at = f"column {field.name!r}"
    try:
        if is_json(field.type):
            return as_json(values)
        array = typed_array([_plain(value) for value in values], field.type)
    except MISFITS as error:
        wanted = "is kept as JSON" if is_json(field.type) else f"is not of type {field.type}"
        raise misfit(at, wanted, error) from error
    if holds_struct(field.type):  # Arrow drops keys that are not in the type
        for value in values:
            lost = _lost(value, field.type)
            if lost is not None:
                raise SourceError(
                    at=at,
                    problem=f"has the key {lost!r}, which no object there has in the first "
                    f"{FIRST_ROWS} rows",
                    fix="Give a row that has it among those, or the column as JSON text "
                    "(json.dumps), or set on_error to 'skip'.",
                )
    return array


def holds_struct(kind: pa.DataType) -> bool:
    return holds(kind, pa.types.is_struct)


def _lost(value: Any, kind: pa.DataType) -> str | None:
    """Returns a key of an object inside `value` that is not null and not in `kind`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if item is None:
                continue
            at = kind.get_field_index(key) if isinstance(key, str) else -1
            inner = str(key) if at < 0 else _lost(item, kind.field(at).type)
            if inner is not None:
                return inner
    elif isinstance(value, list | tuple) and holds_struct(kind):
        inside = kind.field(0).type
        return next(
            (key for key in (_lost(item, inside) for item in value) if key is not None), None
        )
    return None


def outer_kind(value: Any) -> type | None:
    """Returns dict for objects, list for lists and arrays, None for any other value."""
    if isinstance(value, Mapping):
        return dict
    # arrays of any library are recognised by their attributes
    return list if isinstance(value, list | tuple) or getattr(value, "ndim", 0) else None


def _of_json(value: Any, *, outermost: bool = True) -> Any:
    """Returns `value` in JSON's own types; raises TypeError if that would lose something."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(
                "keys of objects are strings, and one is "
                f"{next(key for key in value if not isinstance(key, str))!r}"
            )
        return {key: _of_json(item, outermost=False) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_of_json(item, outermost=False) for item in value]
    if hasattr(value, "__array__") and (getattr(value, "ndim", 0) or not outermost):
        return _of_json(np.asarray(value).tolist(), outermost=outermost)
    if outermost:
        raise TypeError(f"{type(value).__name__} {value!r} is in a column of lists or objects")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal | uuid.UUID):
        return str(value)
    raise TypeError(f"JSON knows no {type(value).__name__}")


def _plain(value: Any) -> Any:
    """Returns arrays of any library as flat NumPy arrays or lists, which Arrow accepts."""
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        array = np.asarray(value)
        return array if array.ndim == 1 else array.tolist()
    return value
