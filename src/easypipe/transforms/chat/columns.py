"""Columns of conversations and texts as Python values, whatever Arrow type they have.

Conversations are lists of objects with role and content, or JSON text of such lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from easypipe.core.schema import is_json
from easypipe.transforms.chat.conversations import cleaned, loaded, value_of
from easypipe.transforms.chat.sandbox import Json

VERDICTS = {"true": True, "false": False}  # booleans, and texts in any case, as CSV has them


def is_messages(kind: pa.DataType) -> bool:
    """Whether a column holds lists of objects."""
    t = pa.types
    return (t.is_list(kind) or t.is_large_list(kind) or t.is_list_view(kind)) and t.is_struct(
        kind.value_type
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings, including JSON."""
    t = pa.types
    return (
        is_json(kind)
        or t.is_large_string(kind)
        or t.is_string(kind)
        or t.is_string_view(kind)
        or (t.is_dictionary(kind) and is_text(kind.value_type))
    )


def values_of(column: pa.Array, *, keep: Sequence[str]) -> list[Json]:
    """Returns the Python values of a column.

    Keys that Arrow filled with nulls are left out of structs, except those in `keep` of the
    outermost.
    """
    return [value_of(value, keep=keep) for value in plain_of(column, objects=True)]


def plain_of(column: pa.Array, *, objects: bool = False) -> list[Json]:
    """Returns the Python values of any column; bytes for text that is not UTF-8.

    With `objects`, maps are dicts, as templates want them, else lists of pairs.
    """
    return (
        strings_of(column)
        if is_text(column.type) or pa.types.is_null(column.type)
        else column.to_pylist(maps_as_pydicts="lossy" if objects else None)
    )


def decoded_of(column: pa.Array, *, objects: bool = False) -> list[Json]:
    """Does `plain_of`, and parses a column of JSON type.

    Keys that Arrow filled with nulls are left out of structs; JSON has only keys that were given.
    """
    if is_json(column.type):
        return [None if text is None else loaded(text) for text in strings_of(column)]
    return [cleaned(value) for value in plain_of(column, objects=objects)]


def strings_of(column: pa.Array) -> list[Json]:
    """Returns texts, None for null, and bytes for texts that are not UTF-8."""
    if pa.types.is_null(column.type):
        return [None] * len(column)
    try:
        return column.cast(pa.large_string()).to_pylist()
    except (UnicodeDecodeError, pa.ArrowInvalid):
        raw = column.cast(pa.large_string(), safe=False).view(pa.large_binary()).to_pylist()
    return [_decoded(value) for value in raw]


def _decoded(value: bytes | None) -> str | bytes | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value
