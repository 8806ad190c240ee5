"""Describes how two nested mappings differ: key path → both values, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from easypipe.core.values import JsonValue
from easypipe.core.visible import first_of

_ABSENT = "\0 nothing"  # no YAML text can be equal to it


def differences(
    saved: JsonValue,
    here: JsonValue,
    at: str = "",
    words: str = "{here} here, {saved} in the checkpoint",
) -> dict[str, str]:
    """Returns key path → difference in words, for every value that differs.

    Lists of mappings (datasets, groups) are compared entry by entry: `datasets.1.name`, as in
    `--set`.

    Args:
        saved: The values of the checkpoint.
        here: The values of this run.
        at: The key path of both.
        words: The format of a difference, such as `64 here, 128 in the checkpoint`.
    """
    old, new = _sections(saved), _sections(here)
    if old is None or new is None or isinstance(saved, Mapping) != isinstance(here, Mapping):
        text = words.format(here=_shown(here), saved=_shown(saved))
        return {} if saved == here else {at: text}
    found: dict[str, str] = {}
    keys: Iterable[str] = [*new, *(key for key in old if key not in new)]
    if isinstance(saved, list):
        keys = [key for key in new if key in old]
        if len(old) != len(new):
            found[at] = words.format(here=f"{len(new)} of them", saved=len(old))
    for key in keys:
        found |= differences(old.get(key, _ABSENT), new.get(key, _ABSENT), _path(at, key), words)
    return found


def key_paths(values: JsonValue, at: str = "") -> Iterator[str]:
    """Yields every path that `differences` can report, sections before their contents."""
    for key, value in (_sections(values) or {}).items():
        yield _path(at, key)
        yield from key_paths(value, _path(at, key))


def listed(unlike: Mapping[str, str]) -> str:
    """Formats what `differences` found as one line."""
    lines = [f"{path}: {difference}" for path, difference in unlike.items()]
    return first_of(lines, between="; ")


def _sections(value: JsonValue) -> Mapping[str, JsonValue] | None:
    """Returns what is compared key by key: a mapping, or a list of mappings by index; or None."""
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        return {str(i): one for i, one in enumerate(value)}
    return value if isinstance(value, Mapping) else None


def _path(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _shown(value: JsonValue) -> str:
    return "nothing" if value is _ABSENT else str(value)
