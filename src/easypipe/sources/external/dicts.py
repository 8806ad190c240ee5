"""Rows (dicts) of users to Arrow batches: types of columns, JSON for mixed ones, errors by row."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.core.errors import SourceError, place
from easypipe.core.protocols import Reject, Scan
from easypipe.core.schema import is_json, is_list, plain_type, typed_array, without_row_numbers
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
        problem = f"expected a dict with names of columns, got {type(row).__name__}"
        raise SourceError(
            at=place(name, row=number),
            problem=problem,
            fix="Map it to rows like {'text': ...}, or set on_error to 'skip'.",
        )


def _is_row(row: Item) -> bool:
    return isinstance(row, Mapping) and all(isinstance(key, str) for key in row)


def columns_of(
    rows: Iterable[tuple[int, Item]], name: str, *, skip: bool = False, exact: Sequence[str] = ()
) -> pa.Schema:
    """Returns the columns of the first rows.

    Args:
        rows: Numbers and rows.
        name: The dataset, for errors.
        skip: Whether to leave out rows that do not fit; the most frequent type decides.
        exact: Columns whose lists and objects are JSON: later rows may hold nulls that an Arrow
            type could not tell from missing keys.

    Raises:
        SourceError: The values of a column have no common type, and the error names the first row
            that differs from those before it; or there are no columns.
    """
    found: dict[str, Counter[pa.DataType]] = {}
    first: dict[tuple[str, pa.DataType], int] = {}
    for number, row in rows:  # row by row: these are Python objects, not columns yet
        if skip and not _is_row(row):
            continue
        for key, value in row.items():
            try:
                kind = _kind(value)
            except MISFITS as error:
                if skip:
                    continue
                raise misfit(place(name, row=number, column=key), "has no type", error) from error
            found.setdefault(key, Counter())[kind] += 1
            first.setdefault((key, kind), number)
    kinds: dict[str, pa.DataType] = {}
    for key, counts in found.items():
        if not skip:
            every = list(counts)
            try:
                kinds[key] = _of_all(every)
            except TypeConflict as error:
                kind = every[_conflict(every)]
                at = place(name, row=first[key, kind], column=key)
                raise misfit(at, NO_COMMON_TYPE, error) from error
            continue
        for kind, _ in counts.most_common():
            with contextlib.suppress(TypeConflict):
                kinds[key] = _common(kinds.get(key, pa.null()), kind)
    kinds |= {key: JSON for key in exact if key in kinds and holds_struct(kinds[key])}
    if not kinds:
        raise SourceError(
            at=name,
            problem="has no row from which columns can be determined",
            fix="Give data with rows.",
        )
    return plain_schema(pa.schema([pa.field(key, kind) for key, kind in kinds.items()]), name)


def as_arrays(
    rows: Sequence[Row], numbers: Sequence[int], columns: pa.Schema, name: str
) -> list[pa.Array]:
    """Returns the rows as arrays of `columns`.

    Args:
        rows: The rows.
        numbers: The number of each row, for errors.
        columns: The columns.
        name: The dataset, for errors.

    Raises:
        SourceError: A value does not fit; the error names its row and column.
    """
    known = set(columns.names)
    for number, row in zip(numbers, rows, strict=True):
        if not row.keys() <= known:
            problem = (
                f"column {next(key for key in row if key not in known)!r} is not in the "
                f"first {FIRST_ROWS} rows"
            )
            raise SourceError(
                at=place(name, row=number),
                problem=problem,
                have=columns.names,
                fix="Give every row the same keys, or set on_error to 'skip'.",
            )
    return [
        _array(numbers, [row.get(field.name) for row in rows], field, name) for field in columns
    ]


def as_scan(
    rows: Sequence[Item], numbers: Sequence[int], columns: pa.Schema, name: str, *, skip: bool
) -> Scan:
    """Returns the rows as a batch of `columns`.

    Args:
        rows: The rows.
        numbers: The number of each row.
        columns: The columns; with `skip` they hold ROW_NUMBER.
        name: The dataset, for errors.
        skip: Whether rows that do not fit are rejects.

    Raises:
        SourceError: A row does not fit, and `skip` is False; the error names the first.
    """

    def made(rows: Sequence[Item], numbers: Sequence[int]) -> pa.RecordBatch:
        for number, row in zip(numbers, rows, strict=True):
            require_row(row, number, name)
        data = without_row_numbers(columns)
        arrays = as_arrays(rows, numbers, data, name)
        if len(data) < len(columns):
            arrays.append(pa.array(numbers, pa.int64()))
        return pa.record_batch(arrays, schema=columns)

    try:
        return Scan(made(rows, numbers), ())
    except SourceError:
        if not skip:
            raise
    good: list[tuple[int, Any]] = []
    rejects: list[Reject] = []
    for number, row in zip(numbers, rows, strict=True):  # only a few blocks hold a bad row
        try:
            made([row], [number])
            good.append((number, row))
        except SourceError as error:
            at = error.at.removeprefix(place(name, row=number)).removeprefix(", ")
            detail = f"{at}: {error.problem}" if at else error.problem
            rejects.append(Reject(row=number, reason="wrong_type", detail=detail))
    kept = made([row for _, row in good], [number for number, _ in good])
    return Scan(kept, tuple(rejects))


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
        return plain_type(pa.array([_plain(value)]).type)
    except MISFITS:
        if outer_kind(value) is None:
            raise
        return as_json([value]).type


def _of_all(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """Returns the type of a column that holds all of these types, in any order.

    Objects become JSON among themselves before they meet lists, as in JSON lines.

    Raises:
        TypeConflict: No type holds all.
    """
    objects = [kind for kind in kinds if pa.types.is_struct(kind)]
    others = [kind for kind in kinds if not pa.types.is_struct(kind)]
    return _common(*(functools.reduce(_common, some, pa.null()) for some in (others, objects)))


def _conflict(kinds: Sequence[pa.DataType]) -> int:
    """Returns which of these types is the first that has no common type with those before it."""
    for n in range(2, len(kinds)):
        try:
            _of_all(kinds[:n])
        except TypeConflict:
            return n - 1
    return len(kinds) - 1


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


def _array(numbers: Sequence[int], values: list[Any], field: pa.Field, name: str) -> pa.Array:
    """Returns a column's values as an array; raises SourceError for one that does not fit."""
    try:
        if is_json(field.type):
            return as_json(values)
        array = typed_array([_plain(value) for value in values], field.type)
    except MISFITS as error:
        bad = next(
            (n for n, value in zip(numbers, values, strict=True) if not _fits(value, field.type)),
            numbers[0],
        )
        wanted = "is kept as JSON" if is_json(field.type) else f"is not of type {field.type}"
        raise misfit(place(name, row=bad, column=field.name), wanted, error) from error
    if holds_struct(field.type):  # Arrow drops keys that are not in the type
        for number, value in zip(numbers, values, strict=True):
            lost = _lost(value, field.type)
            if lost is not None:
                raise SourceError(
                    at=place(name, row=number, column=field.name),
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
            at = kind.get_field_index(key)
            inner = key if at < 0 else _lost(item, kind.field(at).type)
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


def _fits(value: Any, kind: pa.DataType) -> bool:
    """Returns whether a value can be stored as `kind`."""
    try:
        as_json([value]) if is_json(kind) else typed_array([_plain(value)], kind)
    except MISFITS:
        return False
    return True
