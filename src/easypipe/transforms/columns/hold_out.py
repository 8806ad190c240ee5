"""Holds rows out of training for evaluation, chosen by a hash of their content."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.core.config import config, digest
from easypipe.core.errors import require, require_columns
from easypipe.core.protocols import left_out
from easypipe.core.schema import holds, is_json
from easypipe.transforms.chat.columns import decoded_of
from easypipe.transforms.chat.conversations import cleaned
from easypipe.transforms.chat.sandbox import Json
from easypipe.transforms.columns.base import ColumnTransform, Rows


@config
class HoldOutConfig:
    """Which rows of a dataset are read: the held-out rows, or all others.

    The content of a row decides, so equal rows are on the same side. Adding or renaming files, or
    writing the same values in another format, moves no row to the other side.

    Args:
        fraction: About this share of the rows is held out.
        seed: Another seed holds out other rows.
        held: True reads the held-out rows, False all others.
    """

    fraction: float
    seed: int = 0
    held: bool = False

    def check(self) -> None:
        require(
            0 < self.fraction < 1,
            "fraction",
            f"{self.fraction} is not a part of the rows",
            "Give a number between 0 and 1.",
        )
        require(
            0 <= self.seed < 1 << 63,
            "seed",
            f"{self.seed} is outside [0, 2^63)",
            "Give a smaller one.",
        )


class HoldOut(ColumnTransform):
    """A transform that keeps the rows of one side of a hold-out.

    Args:
        options: The share, the seed, and which side is kept.
        names: The columns whose values decide the side; only they are read.
        schema: The columns of the rows.
    """

    drops = True

    def __init__(self, options: HoldOutConfig, names: Sequence[str], schema: pa.Schema) -> None:
        self.options = options
        self.names = self.reads = tuple(sorted(names))
        types = [schema.field(name).type for name in self.names]
        self.have_keys = any(pa.types.is_nested(kind) or is_json(kind) for kind in types)
        self.vary = any(holds(kind, _varies) for kind in types)

    @property
    def fingerprint(self) -> str:
        # Rows with keys were held out by another rule once: by keys without a value too. And so
        # were numbers and maps: 1.0 was not 1, and a map was no object.
        rule = "hold out by given keys" if self.have_keys else "hold out"
        rule += " and equal values" * self.vary
        return digest(rule, self.options, self.names)

    def columns(self, before: pa.Schema) -> pa.Schema:
        require_columns(self.names, before.names, str(self))
        return before

    def rows(self, rows: Rows) -> Rows:
        limit, seed = int(self.options.fraction * 2**64), self.options.seed
        columns = [rows.batch.column(name) for name in self.names]
        texts = len(columns) == 1 and str(columns[0].type).endswith("string")
        keys = _texts(columns[0]) if texts else _json(columns)
        hashes = map(xxhash.xxh3_64_intdigest, keys, itertools.repeat(seed))
        held = np.fromiter(hashes, np.uint64, len(rows.numbers)) < limit
        mine = held == self.options.held
        reason = "not_held_out" if self.options.held else "held_out"
        return rows.kept(mine, left_out(rows.numbers[~mine], reason))

    def __repr__(self) -> str:
        return f"HoldOut({self.options.fraction}, seed={self.options.seed})"


def _texts(column: pa.Array) -> Iterator[bytes | memoryview]:
    """Returns the bytes of each text without decoding, which would cost more than the hashes."""
    column = column.cast(pa.large_string()).fill_null("[null]")
    _, offsets, data = column.buffers()
    borders = np.frombuffer(offsets, np.int64)[column.offset :][: len(column) + 1].tolist()
    return map(memoryview(data or b"").__getitem__, map(slice, borders, borders[1:]))


def _json(columns: Sequence[pa.Array]) -> Iterator[bytes]:
    """Yields the JSON of each row; if a row is one text (also JSON in a file), that text.

    A key without a value counts as missing: columns have keys that only rows of other files have.
    """
    for values in zip(*(decoded_of(one, objects=True) for one in columns), strict=True):
        whole = len(values) == 1 and isinstance(values[0], str)
        text = (
            values[0]
            if whole
            else json.dumps(_same_numbers(cleaned(values)), sort_keys=True, default=str)
        )
        yield text.encode("utf-8", "surrogatepass")


def _varies(kind: pa.DataType) -> bool:
    """Returns whether values of this type are written differently in other types."""
    return pa.types.is_floating(kind) or pa.types.is_map(kind)


def _same_numbers(value: Json) -> Json:
    """Returns a value in which a number does not show whether its column has fractions.

    A column with fractions holds 1 as 1.0, and large integers rounded to the nearest float64.
    """
    if isinstance(value, dict):
        return {key: _same_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_same_numbers(item) for item in value]
    if isinstance(value, int) and 1 << 53 < abs(value) < 1 << 1023:
        return int(float(value))
    return int(value) if isinstance(value, float) and value.is_integer() else value
