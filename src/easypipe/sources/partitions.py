"""Hive partitions: folders such as `year=2024/lang=en/` become columns of the rows below them."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa

from easypipe.core.errors import SourceError

NOTHING = "__HIVE_DEFAULT_PARTITION__"  # Hive's word for null
LARGEST = 2**63


def partition_values(
    paths: Sequence[str], root: str
) -> list[tuple[tuple[str, str | int | None], ...]]:
    """Returns the (name, value) pairs of each path, from the folders between `root` and the file.

    A value is an integer if all values of its name are integers.

    Raises:
        SourceError: Files have different names of partitions.
    """
    pairs = [_pairs(path[len(root) :]) if path.startswith(root) else {} for path in paths]
    names = {tuple(found): i for i, found in reversed(list(enumerate(pairs)))}
    if len(names) > 1:
        (a, b) = sorted(names.values())[:2]
        raise SourceError(
            at=paths[b],
            problem=f"its folders name the partitions {list(pairs[b])}, those of {paths[a]} "
            f"{list(pairs[a])}",
            fix="Give the two kinds as datasets of their own.",
        )
    whole = {
        name: all(_is_int(found[name]) for found in pairs if found[name] is not None)
        for name in (pairs[0] if pairs else {})
    }
    return [
        tuple(
            (name, int(value) if value is not None and whole[name] else value)
            for name, value in found.items()
        )
        for found in pairs
    ]


def partition_schema(partitions: Sequence[tuple[str, str | int | None]]) -> pa.Schema:
    """Returns the columns of one file's partitions; the type is null if the value is null."""
    kinds = {int: pa.int64(), str: pa.large_string()}
    return pa.schema(
        [
            pa.field(name, pa.null() if value is None else kinds[type(value)])
            for name, value in partitions
        ]
    )


def constant(value: str | int | None, rows: int, kind: pa.DataType) -> pa.Array:
    """Returns a column with one value in all rows."""
    return pa.nulls(rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), rows)


def _pairs(below: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in below.split("/")[:-1]:
        name, equals, value = folder.partition("=")
        if equals and name:
            found[unquote(name)] = None if value == NOTHING else unquote(value)
    return found


def _is_int(text: str | None) -> bool:
    """Returns whether a text is an integer in its usual spelling: 007 stays text."""
    text = text or ""
    digits = text.removeprefix("-")
    return (
        digits.isascii()
        and digits.isdigit()
        and str(int(text)) == text
        and -LARGEST <= int(text) < LARGEST
    )
