"""Conversations as rows hold them: lists of objects with role and content, or JSON text of that; and what is wrong with the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa


def is_messages(kind: pa.DataType) -> bool:
    t = pa.types
    return (t.is_list(kind) or t.is_large_list(kind) or t.is_list_view(kind)) and t.is_struct(kind.value_type)


def is_text(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_large_string(kind) or t.is_string(kind) or t.is_string_view(kind) or (t.is_dictionary(kind) and is_text(kind.value_type))


def wrong_messages(value: Any) -> tuple[str, str] | None:
    """(reason, detail) where `value` is no conversation that can be rendered."""
    if value is None:
        return "null", "no messages"
    if isinstance(value, BadJson):
        return "not_json", str(value)
    if not isinstance(value, list):
        return "not_a_list", f"messages are {_kind(value)}"
    if not value:
        return "empty", "a conversation without messages"
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            return "not_a_message", f"message {i} is {_kind(message)}"
        if not isinstance(message.get("role"), str) or not message["role"]:
            return "no_role", f"message {i} has no role"
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            return "not_a_message", f"the content of message {i} is {_kind(content)}"
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
                return "multimodal", f"message {i} holds a part of type {kind!r}; only text can be tokenized"
    return None


def strings_within(value: Any) -> Iterator[str]:
    """Every text in nested lists and objects, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings_within(part)


class BadJson(str):
    """What is wrong with a text that should have been JSON."""


def _kind(value: Any) -> str:
    return {dict: "an object", str: "text", int: "a number", float: "a number", bool: "true or false", list: "a list"}.get(
        type(value), "null"
    )


def values_of(column: pa.Array, *, keep: Sequence[str]) -> list[Any]:
    """Python values; of structs without the keys that Arrow filled up with nulls, but for those in `keep` of the outermost."""
    return [value_of(value, keep=keep) for value in plain_of(column)]


def value_of(value: Any, *, keep: Sequence[str]) -> Any:
    """One of `values_of`, from a Python value: text is taken for JSON."""
    if not isinstance(value, str | bytes):
        return cleaned(value, keep)
    try:
        return json.loads(value)
    except (ValueError, TypeError, RecursionError) as error:
        return BadJson(error)


def plain_of(column: pa.Array) -> list[Any]:
    """Python values of any column; bytes for text that is no UTF-8."""
    return strings_of(column) if is_text(column.type) or pa.types.is_null(column.type) else column.to_pylist()


def cleaned(value: Any, keep: Sequence[str] = ()) -> Any:
    """A value without the keys that Arrow fills up with null because other rows have them; `keep` names some that stay, outermost."""
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items() if item is not None or key in keep}
    if isinstance(value, list | tuple):
        return [cleaned(item, keep) for item in value]
    return value


def strings_of(column: pa.Array) -> list[Any]:
    """Texts, None for null, bytes for what is no UTF-8."""
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
