"""One schema for files that differ: types without accidents of storage, merged by name, and arrays brought to them.

string → large_string, list → large_list (so that no batch meets the 2^31 limit of int32 offsets), dictionaries and extensions → their
values, every field nullable, no metadata. Equal content then has an equal schema whatever wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from easypipe.core.errors import SchemaError
from easypipe.core.schema import ROW_NUMBER

UNITS = ("s", "ms", "us", "ns")  # of time, each finer than the one before


class TypeConflict(Exception):
    """Two types that no common one holds without loss or guess."""


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column in this package; idempotent."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    t = pa.types
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return pa.large_string()
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind):
        return pa.large_binary()
    if t.is_list(kind) or t.is_large_list(kind) or t.is_list_view(kind) or t.is_large_list_view(kind):
        return pa.large_list(plain_type(kind.value_type))
    if t.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if t.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in _fields(kind)])
    return kind


def plain_schema(schema: pa.Schema, at: str) -> pa.Schema:
    """`schema` in plain types. A stored `__row_number__` is left out: it numbers rows of the shard it was made from, not of this one.

    Raises SchemaError naming a column that stands twice.
    """
    seen: set[str] = set()
    for name in schema.names:
        if name in seen:
            raise SchemaError(at=at, problem=f"column {name!r} stands twice", have=schema.names, fix="Rename one of them.")
        seen.add(name)
    return pa.schema([pa.field(field.name, plain_type(field.type)) for field in schema if field.name != ROW_NUMBER])


def merge_types(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that holds both: null gives way, numbers, decimals and units of time widen, structs join their fields, lists of a fixed
    length meet others as lists. Raises TypeConflict."""
    t = pa.types
    if first.equals(second) or t.is_null(second):
        return first
    if t.is_null(first):
        return second
    if t.is_struct(first) and t.is_struct(second):
        theirs = {field.name: field.type for field in _fields(second)}
        joined = [(f.name, merge_types(f.type, theirs.pop(f.name)) if f.name in theirs else f.type) for f in _fields(first)]
        return pa.struct([*joined, *theirs.items()])
    if _is_list(first) and _is_list(second):
        return pa.large_list(merge_types(first.value_type, second.value_type))
    if t.is_timestamp(first) and t.is_timestamp(second) and first.tz == second.tz:
        return first if UNITS.index(first.unit) >= UNITS.index(second.unit) else second
    if t.is_decimal128(first) and t.is_decimal128(second) and first.scale == second.scale:
        return first if first.precision >= second.precision else second
    if t.is_floating(first) and t.is_floating(second):
        return first if first.bit_width >= second.bit_width else second
    if (t.is_floating(first) and t.is_integer(second)) or (t.is_integer(first) and t.is_floating(second)):
        return pa.float64()
    if t.is_integer(first) and t.is_integer(second):
        if t.is_signed_integer(first) == t.is_signed_integer(second):
            return first if first.bit_width >= second.bit_width else second
        signed, unsigned = (first, second) if t.is_signed_integer(first) else (second, first)
        bits = max(signed.bit_width, 2 * unsigned.bit_width)
        if bits <= 64:
            return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits]
    raise TypeConflict(f"{first} and {second}")


def reconcile(schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """The schema of all files together, columns in order of first appearance; a file without a column has nulls there.

    Raises SchemaError naming the column, both types and both files where no common type exists.
    """
    merged: dict[str, pa.DataType] = {}
    origin: dict[str, str] = {}
    for path, schema in schemas:
        for field in schema:
            before = merged.get(field.name)
            try:
                merged[field.name] = field.type if before is None else merge_types(before, field.type)
            except TypeConflict:
                raise SchemaError(
                    at=f"{path}, column {field.name!r}",
                    problem=f"is {field.type} here and {before} in {origin[field.name]}",
                    fix=f"Leave {field.name!r} out with columns=[...], or rewrite one of the files.",
                ) from None
            origin.setdefault(field.name, path)
    return pa.schema([pa.field(name, kind) for name, kind in merged.items()])


def conform(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """`array` as `kind`, which came from merge_types of its plain type. Raises pa.ArrowInvalid where a value does not fit."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    t = pa.types
    have = array.type
    if have.equals(kind):
        return array
    if t.is_null(have) or t.is_null(kind):  # a column of type null has no other values
        return pa.nulls(len(array), kind)
    if t.is_struct(have) and t.is_struct(kind):
        by_name = {field.name: child for field, child in zip(_fields(have), array.flatten(), strict=True)}
        fields = _fields(kind)
        children = [conform(by_name[f.name], f.type) if f.name in by_name else pa.nulls(len(array), f.type) for f in fields]
        if not fields:
            return array.cast(kind)
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null() if array.null_count else None)
    if t.is_fixed_size_list(have) and t.is_large_list(kind):
        have = pa.large_list(have.value_type)
        array = array.cast(have)
    if (t.is_list(have) or t.is_large_list(have)) and t.is_large_list(kind):
        lengths = pc.fill_null(pc.call_function("list_value_length", [array]), 0).to_numpy(zero_copy_only=False)
        offsets = np.zeros(len(array) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        mask = array.is_null() if array.null_count else None
        return pa.LargeListArray.from_arrays(pa.array(offsets), conform(array.flatten(), kind.value_type), type=kind, mask=mask)
    return array.cast(kind)


def column(chunks: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """The chunks as one array of `kind`."""
    whole = [conform(chunk, kind) for chunk in chunks]
    if len(whole) == 1:
        return whole[0]
    return pa.concat_arrays(whole) if whole else pa.nulls(0, kind)


def has_strings(kind: pa.DataType) -> bool:
    """Whether bytes that are not UTF-8 could stand anywhere in a column of this type."""
    if pa.types.is_large_string(kind) or pa.types.is_string(kind):
        return True
    return any(has_strings(kind.field(i).type) for i in range(kind.num_fields))


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)]
