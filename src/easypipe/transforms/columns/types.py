"""Types of columns, written as text: `string`, `int64`, `list<string>`, `list<struct<role: string,
content: string>>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa

from easypipe.core.errors import ConfigError, did_you_mean

_SCALARS: dict[str, pa.DataType] = {
    "string": pa.large_string(),
    "binary": pa.large_binary(),
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "double": pa.float64(),
}
_TOKEN = re.compile(r"\s*([A-Za-z_][\w ]*\w|[A-Za-z_]|[<>,:])")


def column_types(
    columns: Mapping[str, str | pa.DataType] | None, at: str
) -> dict[str, pa.DataType]:
    """{name: type} with every type in the form in which columns are kept: large strings, large
    lists. Raises ConfigError at the name.
    """
    return {name: parse_type(kind, f"{at}.{name}") for name, kind in (columns or {}).items()}


def parse_type(kind: str | pa.DataType, at: str = "type") -> pa.DataType:
    """The Arrow type that text names. Raises ConfigError for what is no type."""
    if isinstance(kind, pa.DataType):
        return _large(kind)
    if not isinstance(kind, str):
        raise ConfigError(
            at=at,
            problem=f"{kind!r} is no type",
            have=_known(),
            fix="Write it like 'string' or 'list<int64>'.",
        )
    tokens, end = [], 0
    while end < len(kind.rstrip()):
        found = _TOKEN.match(kind, end)
        if found is None:
            raise ConfigError(
                at=at,
                problem=f"{kind!r} is no type: {kind[end:]!r} does not belong there",
                have=_known(),
            )
        tokens.append(found[1])
        end = found.end()
    parsed = _Parser(tokens, kind, at)
    result = parsed.type()
    parsed.end()
    return result


class _Parser:
    def __init__(self, tokens: list[str], text: str, at: str) -> None:
        self._tokens, self._text, self._at = tokens, text, at

    def type(self) -> pa.DataType:
        name = self._next()
        if name == "list":
            self._expect("<")
            inner = self.type()
            self._expect(">")
            return pa.large_list(inner)
        if name == "struct":
            self._expect("<")
            fields = [self._field()]
            while self._peek() == ",":
                self._next()
                fields.append(self._field())
            self._expect(">")
            return pa.struct(fields)
        if name not in _SCALARS:
            raise ConfigError(
                at=self._at,
                problem=f"{name!r} is no type",
                have=_known(),
                fix=did_you_mean(name, _known()),
            )
        return _SCALARS[name]

    def end(self) -> None:
        if self._tokens:
            raise self._wrong(f"{self._tokens[0]!r} does not belong there")

    def _field(self) -> pa.Field:
        name = self._next()
        self._expect(":")
        return pa.field(name, self.type())

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise self._wrong(f"{token!r} is missing")
        self._next()

    def _peek(self) -> str | None:
        return self._tokens[0] if self._tokens else None

    def _next(self) -> str:
        if not self._tokens:
            raise self._wrong("it ends too early")
        return self._tokens.pop(0)

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(
            at=self._at,
            problem=f"{self._text!r} is no type: {why}",
            fix="Write it like 'list<struct<role: string>>'.",
        )


def _known() -> list[str]:
    return [*_SCALARS, "list", "struct"]


def _large(kind: pa.DataType) -> pa.DataType:
    """What sources make of a type: no accidents of storage."""
    t = pa.types
    if t.is_string(kind) or t.is_string_view(kind):
        return pa.large_string()
    if t.is_binary(kind) or t.is_binary_view(kind):
        return pa.large_binary()
    if t.is_list(kind) or t.is_large_list(kind):
        return pa.large_list(_large(kind.value_type))
    if t.is_struct(kind):
        return pa.struct(
            [
                pa.field(kind.field(i).name, _large(kind.field(i).type))
                for i in range(kind.num_fields)
            ]
        )
    return kind
