"""Rows that are kept apart for evaluation, chosen by what stands in them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.core.config import config, digest
from easypipe.core.errors import ConfigError, require_columns
from easypipe.transforms.columns.base import ColumnTransform, Rows


@config
class HoldOutConfig:
    """Which rows of a dataset are read: those that are held out, or the others.

    What a row holds decides it, so equal rows fall together, and files that are added, renamed
    or written in another format move no row from one side to the other.

    fraction: of the rows that are held out, about. seed: another one holds out others. held: True
    reads these, False all others.
    """

    fraction: float
    seed: int = 0
    held: bool = False

    def check(self) -> None:
        if not 0 < self.fraction < 1:
            raise ConfigError(
                at="fraction",
                problem=f"{self.fraction} is no part of the rows",
                fix="Give a number between 0 and 1.",
            )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(
                at="seed", problem=f"{self.seed} is outside [0, 2^63)", fix="Give a smaller one."
            )


class HoldOut(ColumnTransform):
    """The rows of one side of a hold-out.

    names: the columns that decide it, which are those that are read.
    """

    drops = True

    def __init__(self, options: HoldOutConfig, names: Sequence[str]) -> None:
        self.options = options
        self.names = self.reads = tuple(sorted(names))

    @property
    def fingerprint(self) -> str:
        return digest("hold out", self.options, self.names)

    def columns(self, before: pa.Schema) -> pa.Schema:
        require_columns(self.names, before.names, str(self))
        return before

    def rows(self, rows: Rows) -> Rows:
        columns = [rows.batch.column(name).to_pylist() for name in self.names]
        limit, seed = int(self.options.fraction * 2**64), self.options.seed
        held = np.zeros(len(rows.numbers), np.bool_)
        for i, values in enumerate(zip(*columns, strict=True)):  # hashes are of rows
            text = (
                values[0]
                if len(values) == 1 and isinstance(values[0], str)
                else json.dumps(values, sort_keys=True, default=str)
            )
            held[i] = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"), seed) < limit
        return rows.kept(held == self.options.held)

    def __repr__(self) -> str:
        return f"HoldOut({self.options.fraction}, seed={self.options.seed})"
