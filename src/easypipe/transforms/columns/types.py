"""Parses types of columns written as text, such as `string` and `list<struct<role: string>>`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa

from easypipe.core.errors import ConfigError, did_you_mean, require
from easypipe.core.schema import plain_type

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_SCALARS = ("string", "binary", "bool", *_INTEGERS, "float32", "float64", "double")
_KNOWN = [*_SCALARS, "list", "struct"]
_NESTED = re.compile(r"(list|struct)\s*<(.*)>", re.DOTALL)
_FIELD = re.compile(r"\s*(\w[\w ]*?)\s*:(.*)", re.DOTALL)


def column_types(
    columns: Mapping[str, str | pa.DataType] | None, at: str
) -> dict[str, pa.DataType]:
    """Returns {name: type}, each type as columns are kept: large strings, large lists.

    Raises:
        ConfigError: A text is not a type; the error names its column.
    """
    return {name: parse_type(kind, f"{at}.{name}") for name, kind in (columns or {}).items()}


def parse_type(kind: str | pa.DataType, at: str = "type") -> pa.DataType:
    """Returns the Arrow type that a text names.

    Raises:
        ConfigError: It is not the name of a type.
    """
    if isinstance(kind, pa.DataType):
        return plain_type(kind)
    text = kind.strip() if isinstance(kind, str) else ""
    if text in _SCALARS:
        return plain_type(pa.type_for_alias(text))
    nested = _NESTED.fullmatch(text)
    if nested is None:
        raise ConfigError(
            at=at,
            problem=f"{kind!r} is not a type",
            have=_KNOWN,
            fix=did_you_mean(text, _KNOWN) or "Write it like 'string' or 'list<int64>'.",
        )
    if nested[1] == "list":
        return pa.large_list(parse_type(nested[2], at))
    fields = [_FIELD.fullmatch(field) for field in _parts(nested[2])]
    require(
        None not in fields,
        at,
        f"{kind!r} is not a type: a field has no name",
        "Write it like 'list<struct<role: string>>'.",
    )
    return pa.struct([(field[1], parse_type(field[2], at)) for field in fields if field])


def _parts(text: str) -> list[str]:
    """Splits a text at the commas that are not inside a bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "<") - (letter == ">")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
