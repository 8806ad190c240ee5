# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)
"""The names of classes: those of the integers in a `datasets` feature ClassLabel.

The field of such a column has them as metadata, which survives renaming, selecting and joining
files. In text the names replace the integers; everywhere else the column holds integers.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from easypipe.core.schema import is_list, list_sizes, offsets_of
from easypipe.core.values import JsonValue

KEY = b"class_names"
FEATURES = b"huggingface"  # the metadata of a schema in which `datasets` describes its columns
# The names of a column of integers or of lists of integers; for a struct, those of each field.
Classes: TypeAlias = "list[str] | dict[str, Classes]"


def classes_of(field: pa.Field) -> Classes | None:
    """Returns the names of a column's classes; None if it has none."""
    return json.loads((field.metadata or {}).get(KEY, b"null"))


def with_classes(schema: pa.Schema, stored: pa.Schema) -> pa.Schema:
    """Returns the schema with the names of classes that its columns have in a `stored` schema.

    The stored schema has them in the metadata of its fields, or in that of `datasets`.
    """
    try:
        text = (stored.metadata or {}).get(FEATURES, b"null")
        described: dict[str, JsonValue] = dict(json.loads(text)["info"]["features"])
    except (KeyError, TypeError, ValueError, RecursionError):
        described = {}
    own = {field.name: classes_of(field) for field in stored}
    found = [
        own.get(field.name) or _classes(described.get(field.name), field.type) for field in schema
    ]
    return pa.schema(
        [
            field.with_metadata({KEY: json.dumps(classes)}) if classes else field
            for field, classes in zip(schema, found, strict=True)
        ]
    )


def _classes(feature: JsonValue, kind: pa.DataType) -> Classes | None:
    """Returns the names in the description of a feature whose column has the type `kind`."""
    if isinstance(feature, list) and feature:  # how older versions write a list
        feature = {"feature": feature[0], "_type": "List"}
    if not isinstance(feature, dict):
        return None
    # a Sequence of objects is stored as an object of lists
    inside = feature.get("feature", feature) if "_type" in feature else feature
    if is_list(kind):
        return _classes(inside, kind.field(0).type)
    if pa.types.is_struct(kind) and isinstance(inside, dict):
        found = {one.name: _classes(inside.get(one.name), one.type) for one in kind.fields}
        return {name: classes for name, classes in found.items() if classes}
    names = feature.get("names")
    if not pa.types.is_integer(kind) or not isinstance(names, list):
        return None
    texts = [name for name in names if isinstance(name, str)]
    return texts if len(texts) == len(names) else None


def named(array: pa.Array, classes: Any) -> pa.Array:
    """Returns a column with the names of its classes in place of integers.

    -1, which in `datasets` means that a row has no label, becomes null, as does a number without a
    name.

    Args:
        array: The column.
        classes: Its Classes.
    """
    kind = array.type
    if is_list(kind):
        mask = array.is_null() if array.null_count else None
        items = named(array.flatten(), classes)
        return pa.LargeListArray.from_arrays(
            pa.array(offsets_of(list_sizes(array))), items, mask=mask
        )
    if pa.types.is_struct(kind):
        names = [field.name for field in kind.fields]
        children = [
            named(child, classes[name]) if name in classes else child
            for name, child in zip(names, array.flatten(), strict=True)
        ]
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, names, mask=mask)
    known = pc.and_(pc.greater_equal(array, 0), pc.less(array, len(classes)))
    at = pc.if_else(known, array, pa.scalar(None, kind))
    return pa.array(classes, pa.large_string()).take(at)
