"""Rows that are Python dicts, as sources of users' own give them: their columns, and the dicts as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.core.errors import SourceError, place
from easypipe.sources.schemas import TypeConflict, merge_types, plain_schema

FIRST_ROWS = 1024  # from which the columns follow

_MISFITS = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, OverflowError, UnicodeEncodeError)


def require_row(row: Any, number: int, name: str) -> None:
    """Raises SourceError for what is no dict with names of columns."""
    if not (isinstance(row, Mapping) and all(isinstance(key, str) for key in row)):
        problem = f"expected a dict with names of columns, got {type(row).__name__}"
        raise SourceError(at=place(name, row=number), problem=problem, fix="Map it to rows like {'text': ...}.")


def columns_of(rows: Iterable[Mapping[str, Any]], name: str) -> pa.Schema:
    """The columns of the first rows. Raises SourceError where the values of one have no common type, or where there are none."""
    kinds: dict[str, pa.DataType] = {}
    for row in rows:  # user rows are Python objects: there is no column to work on yet
        for key, value in row.items():
            kinds[key] = _merged(key, kinds.get(key, pa.null()), value, name)
    if not kinds:
        raise SourceError(at=name, problem="holds no row from which columns could be known", fix="Give data with rows.")
    return plain_schema(pa.schema([pa.field(key, kind) for key, kind in kinds.items()]), name)


def as_arrays(rows: Sequence[Mapping[str, Any]], numbers: Sequence[int], columns: pa.Schema, name: str) -> list[pa.Array]:
    """The rows as arrays of `columns`. numbers: of each row, for errors.

    Raises SourceError naming the row and the column that does not fit.
    """
    known = set(columns.names)
    for number, row in zip(numbers, rows, strict=True):
        if not row.keys() <= known:
            problem = f"column {next(key for key in row if key not in known)!r} is not in the first {FIRST_ROWS} rows"
            raise SourceError(at=place(name, row=number), problem=problem, have=columns.names, fix="Give every row the same keys.")
    return [_array(numbers, [row.get(field.name) for row in rows], field, name) for field in columns]


def _merged(key: str, before: pa.DataType, value: Any, name: str) -> pa.DataType:
    try:
        return merge_types(before, plain_schema(pa.schema([(key, pa.array([_plain(value)]).type)]), name).field(0).type)
    except (TypeConflict, *_MISFITS) as error:
        raise SourceError(
            at=f"{name}, column {key!r}", problem=f"its values have no common type: {error}", fix="Give every row the same type."
        ) from error


def _array(numbers: Sequence[int], values: list[Any], field: pa.Field, name: str) -> pa.Array:
    try:
        return pa.array([_plain(value) for value in values], field.type)
    except _MISFITS as error:
        bad = next((n for n, value in zip(numbers, values, strict=True) if not _fits(value, field.type)), numbers[0])
        raise SourceError(
            at=place(name, row=bad, column=field.name), problem=f"is no {field.type}: {error}", fix="Give every row the same type."
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
    except _MISFITS:
        return False
    return True
