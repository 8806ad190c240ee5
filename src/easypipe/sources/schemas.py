"""One schema for files or sources that differ: types merged by name, mixed ones kept as JSON text.

string → large_string, list → large_list (so that no batch reaches the 2^31 limit of int32 offsets),
dictionaries and extensions → their values, every field nullable, no metadata. Equal content then
has an equal schema, whatever program wrote it.

If no Arrow type holds all values of a column (objects in which one key has several types), the
column is JSON text, of the type `arrow.json`. So is a column that has values of that type anywhere
inside, as `datasets` writes mixed types.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from easypipe.core.class_names import classes_of, with_classes
from easypipe.core.errors import SchemaError, raising
from easypipe.core.schema import (
    JSON,
    ROW_NUMBER,
    holds,
    is_json,
    is_list,
    list_sizes,
    offsets_of,
    plain_type,
)
from easypipe.core.values import Int64

_DIFFERS = (
    "Rewrite one of the files, or make two datasets of them; a source in Python may leave the "
    "column out with columns=[...]."
)
UNITS = ("s", "ms", "us", "ns")  # units of time, each finer than the one before


class TypeConflict(Exception):
    """Two types that have no common type without loss or guessing."""


def plain_schema(schema: pa.Schema, at: str) -> pa.Schema:
    """Returns `schema` in plain types, with the names of classes that it has.

    A stored `__row_number__` is left out: it numbers the rows of the shard that it was made from,
    not of this one.

    Raises:
        SchemaError: Two columns have the same name, or a name is not UTF-8.
    """
    seen: set[str] = set()
    fix = "Write the file again with names in UTF-8."
    with raising(SchemaError, at, "the name of a column or field", fix, UnicodeDecodeError):
        names = schema.names
        types = list(map(plain_type, schema.types))
    for name in names:
        if name in seen:
            raise SchemaError(
                at=at,
                problem=f"column {name!r} appears twice",
                have=names,
                fix="Rename one of them.",
            )
        seen.add(name)
    plain = pa.schema(
        [
            pa.field(name, kind)
            for name, kind in zip(names, types, strict=True)
            if name != ROW_NUMBER
        ]
    )
    return with_classes(plain, schema)


def merge_types(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """Returns the type that holds both.

    Null gives way to any type. Numbers, decimals and units of time widen. Structs unite their
    fields. Fixed-size lists become lists when they meet others.

    Raises:
        TypeConflict: No type holds both.
    """
    t = pa.types
    if first.equals(second) or t.is_null(second):
        return first
    if t.is_null(first):
        return second
    # a file's mixed numbers may be JSON, beside another one's integers
    held = (is_json, _fits_json, t.is_large_string, t.is_integer, t.is_floating)
    if (is_json(first) or is_json(second)) and all(
        any(test(kind) for test in held) for kind in (first, second)
    ):
        return JSON
    if t.is_struct(first) and t.is_struct(second):
        theirs = {field.name: field.type for field in second.fields}
        joined = [
            (f.name, merge_types(f.type, theirs.pop(f.name)) if f.name in theirs else f.type)
            for f in first.fields
        ]
        return pa.struct([*joined, *theirs.items()])
    if t.is_map(first) and t.is_map(second):
        return pa.map_(
            merge_types(first.key_type, second.key_type),
            merge_types(first.item_type, second.item_type),
        )
    if is_list(first) and is_list(second):
        return pa.large_list(merge_types(first.value_type, second.value_type))
    if t.is_timestamp(first) and t.is_timestamp(second) and first.tz == second.tz:
        return first if UNITS.index(first.unit) >= UNITS.index(second.unit) else second
    if t.is_decimal128(first) and t.is_decimal128(second) and first.scale == second.scale:
        return first if first.precision >= second.precision else second
    if t.is_floating(first) and t.is_floating(second):
        return first if first.bit_width >= second.bit_width else second
    if (t.is_floating(first) and t.is_integer(second)) or (
        t.is_integer(first) and t.is_floating(second)
    ):
        return pa.float64()
    if t.is_integer(first) and t.is_integer(second):
        if t.is_signed_integer(first) == t.is_signed_integer(second):
            return first if first.bit_width >= second.bit_width else second
        signed, unsigned = (first, second) if t.is_signed_integer(first) else (second, first)
        bits = max(signed.bit_width, 2 * unsigned.bit_width)
        if bits <= 64:
            return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits]
    raise TypeConflict(f"{first} and {second}")


def _fits_json(kind: pa.DataType) -> bool:
    """Returns whether a nested type has only values that JSON can express: no bytes."""
    t = pa.types
    return t.is_nested(kind) and not holds(
        kind, lambda one: t.is_binary(one) or t.is_large_binary(one) or t.is_fixed_size_binary(one)
    )


def reconcile(schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Returns the schema of all files together, with columns in order of first appearance.

    A file without a column has nulls there.

    Args:
        schemas: (path, schema) of each file.

    Raises:
        SchemaError: A column has no common type; the error names it, both types and both files.
    """
    merged: dict[str, pa.DataType] = {}
    origin: dict[str, str] = {}
    named: dict[str, tuple[str, pa.Field]] = {}  # the first file that names a column's classes
    for path, schema in schemas:
        for field in schema:
            _require_same_classes(path, field, named)
            before = merged.get(field.name)
            try:
                merged[field.name] = (
                    field.type if before is None else merge_types(before, field.type)
                )
            except TypeConflict:
                if before is not None and _fits_json(before) and _fits_json(field.type):
                    merged[field.name] = JSON
                    continue
                raise SchemaError(
                    at=f"{path}, column {field.name!r}",
                    problem=f"is {field.type} here and {before} in {origin[field.name]}",
                    fix=_DIFFERS,
                ) from None
            origin.setdefault(field.name, path)
    return pa.schema(
        [
            pa.field(name, kind, metadata=named[name][1].metadata if name in named else None)
            for name, kind in merged.items()
        ]
    )


def _require_same_classes(
    path: str, field: pa.Field, named: dict[str, tuple[str, pa.Field]]
) -> None:
    """Raises SchemaError if an earlier file has other names for a column's classes."""
    classes = classes_of(field)
    if classes is None:
        return
    before, first = named.setdefault(field.name, (path, field))
    if classes_of(first) != classes:
        raise SchemaError(
            at=f"{path}, column {field.name!r}",
            problem=f"its classes are {classes} here and {classes_of(first)} in {before}",
            fix=_DIFFERS,
        )


def conform(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns `array` as `kind`, a type that merge_types made from its plain type and others.

    Raises:
        pa.ArrowInvalid: A value does not fit.
    """
    if is_json(kind):
        return _as_json(array)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    t = pa.types
    if t.is_run_end_encoded(array.type):  # which has no cast
        array = pc.call_function("run_end_decode", [array])
    have = array.type
    if have.equals(kind):
        return array
    if t.is_null(have) or t.is_null(kind):  # a column of type null holds only nulls
        return pa.nulls(len(array), kind)
    if t.is_struct(have) and t.is_struct(kind):
        by_name = {
            field.name: child for field, child in zip(have.fields, array.flatten(), strict=True)
        }
        fields = kind.fields
        children = [
            conform(by_name[f.name], f.type) if f.name in by_name else pa.nulls(len(array), f.type)
            for f in fields
        ]
        if not fields:
            return array.cast(kind)
        return pa.StructArray.from_arrays(
            children, fields=fields, mask=array.is_null() if array.null_count else None
        )
    if t.is_fixed_size_list(have) and t.is_fixed_size_list(kind):
        size, mask = kind.list_size, array.is_null() if array.null_count else None
        values = array.values.slice(array.offset * size, len(array) * size)
        values = conform(values, kind.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)
    if t.is_large_list(kind):  # not by a cast, in which pyarrow 26 loses lists of a list_view
        offsets = offsets_of(list_sizes(array))
        mask = array.is_null() if array.null_count else None
        return pa.LargeListArray.from_arrays(
            pa.array(offsets), conform(array.flatten(), kind.value_type), type=kind, mask=mask
        )
    return array.cast(kind)


def json_array(texts: Sequence[str | None]) -> pa.Array:
    """Returns JSON texts as a column of type `arrow.json`."""
    return pa.ExtensionArray.from_storage(JSON, pa.array(texts, pa.large_string()))


def _as_json(array: pa.Array) -> pa.Array:
    if is_json(array.type):
        return pa.ExtensionArray.from_storage(JSON, array.storage.cast(pa.large_string()))
    return json_array(
        [
            None if value is None else json_text(value)
            for value in _decoded(array, ("role", "content"))
        ]
    )


def json_text(value: Any) -> str:
    """Returns a value as JSON.

    JSON of a list or an object stays unchanged, because other values of its column are lists or
    objects.
    """
    if isinstance(value, str):
        try:
            if isinstance(json.loads(value), list | dict):
                return value
        except (ValueError, RecursionError):
            pass
    return json.dumps(value, ensure_ascii=False, default=str)


def _decoded(array: pa.Array, keep: Sequence[str] = ()) -> list[Any]:
    """Returns Python values; JSON text is parsed.

    A null in a struct may be a key that only other rows have, so it is left out. Keys in `keep` of
    the outermost struct stay, because every message has them.
    """
    kind, t = array.type, pa.types
    if is_json(kind):
        return [None if text is None else json.loads(text) for text in array.storage.to_pylist()]
    if isinstance(array, pa.ExtensionArray):
        return _decoded(array.storage, keep)
    if t.is_struct(kind):
        names = [field.name for field in kind.fields]
        columns = [_decoded(child) for child in array.flatten()]
        rows = zip(*columns, strict=True) if columns else itertools.repeat((), len(array))
        found: list[Any] = [
            {n: v for n, v in zip(names, row, strict=True) if v is not None or n in keep}
            for row in rows
        ]
    elif is_list(kind):
        values = iter(_decoded(array.flatten(), keep))
        found = [list(itertools.islice(values, length)) for length in list_sizes(array).tolist()]
    else:
        return array.to_pylist(maps_as_pydicts="lossy")
    valid = array.is_valid().to_pylist()
    return [one if there else None for one, there in zip(found, valid, strict=True)]


def text_array(offsets: Int64, data: Any) -> pa.Array:
    """Returns texts as a column; text i is `data[offsets[i] : offsets[i + 1]]`."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)


def column(chunks: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """Returns the chunks as one array of `kind`."""
    whole = [conform(chunk, kind) for chunk in chunks]
    if len(whole) == 1:
        return whole[0]
    return pa.concat_arrays(whole) if whole else pa.nulls(0, kind)


def has_strings(kind: pa.DataType) -> bool:
    """Returns whether a column of this type could hold bytes that are not UTF-8."""
    t = pa.types
    return holds(kind, lambda one: t.is_large_string(one) or t.is_string(one) or is_json(one))
