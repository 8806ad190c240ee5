"""What functions return, laid over the rows that they were given: columns of known types, and which
values are of none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.core.protocols import Reject
from easypipe.transforms.columns.base import Rows
from easypipe.transforms.columns.columns import kept

# what pyarrow raises for a value that is not of a type
_CANNOT = (pa.ArrowException, ValueError, TypeError, OverflowError)


class Misfits:
    """Values of a column that are not all of its type: those that are, and what is wrong with the
    others.
    """

    def __init__(self, values: pa.Array, errors: list[tuple[int, str]]) -> None:
        self.values, self.errors = values, errors


def overlaid(before: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    rest = dict(types)
    same = [pa.field(field.name, rest.pop(field.name, field.type)) for field in before]
    return pa.schema([*same, *(pa.field(name, kind) for name, kind in rest.items())])


def laid_over(
    field: pa.Field, batch: pa.RecordBatch, returned: Sequence[Mapping[str, Any]], names: set[str]
) -> Any:
    """A column with what was returned for it, and what stood there in the rows that returned
    nothing; a Misfits where a value is wrong.
    """
    if (
        field.name not in names
        and field.name in batch.schema.names
        and batch.schema.field(field.name).type.equals(field.type)
    ):
        return batch.column(field.name)
    old = batch.column(field.name) if field.name in batch.schema.names else None
    values = [
        made[field.name] if field.name in made else None if old is None else old[i].as_py()
        for i, made in enumerate(returned)
    ]
    try:
        return as_array(values, field.type)
    except _CANNOT:
        fitting: list[Any] = []
        errors: list[tuple[int, str]] = []
        for i, value in enumerate(values):
            try:
                as_array([value], field.type)
                fitting.append(value)
            except _CANNOT as error:
                fitting.append(None)
                errors.append((i, f"{value!r:.80} cannot be {field.type}: {error}"))
        return Misfits(as_array(fitting, field.type), errors)


def misfits_of(column: Any) -> list[tuple[int, str]]:
    return column.errors if isinstance(column, Misfits) else []


def without_misfits(
    rows: Rows,
    schema: pa.Schema,
    columns: Sequence[Any],
    bad: Sequence[tuple[int, pa.Field, str]],
    failed: list[Reject],
    name: str,
) -> Rows:
    """The columns as a batch, without the rows in which a value is of the wrong type; those are
    rejects.
    """
    batch = pa.RecordBatch.from_arrays(
        [c.values if isinstance(c, Misfits) else c for c in columns], schema=schema
    )
    keep = np.ones(batch.num_rows, np.bool_)
    for i, field, error in bad:
        if keep[i]:
            detail = f"{name} returned in column {field.name!r}: {error}"
            failed.append(Reject(row=int(rows.numbers[i]), reason="wrong_type", detail=detail))
        keep[i] = False
    result = kept(Rows(batch, rows.numbers), keep)
    return Rows(result.batch, result.numbers, tuple(sorted(failed, key=lambda reject: reject.row)))


def as_array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        return values if values.type.equals(kind) else values.cast(kind)
    return pa.array(values, kind)
