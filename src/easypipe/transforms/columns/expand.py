# pyright: reportAttributeAccessIssue=false
# (pyarrow makes the functions of its compute module when it is imported)
"""One row to several, with row numbers that follow from the file alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, place
from easypipe.core.protocols import Reject, Transform
from easypipe.transforms.columns.base import ColumnTransform, Rows, require_columns
from easypipe.transforms.columns.columns import kept
from easypipe.transforms.columns.identity import UserFunction, why
from easypipe.transforms.columns.overlay import laid_over, misfits_of, overlaid, without_misfits
from easypipe.transforms.columns.types import column_types


class Expand(ColumnTransform):
    """One row to several: `Expand("turns", most=16)` gives a row for every item of a list.

    by: a column of lists, whose items take its place; or a function of a row that returns rows
    (each laid over it, as in Map), or
        "module:function". columns, version: of what a function returns, as in Map.
    most: at most so many rows come of one; a row that gives more is a bad row. It makes row numbers
    follow from the file alone, whatever
        the rows hold: the i-th row of row r has number `r * most + i`. Numbers that stay unused are
        counted as `unfilled`, and every place that counts rows of the source counts `most` for
        each.
    """

    drops = True

    def __init__(
        self,
        by: Callable[[dict[str, Any]], Iterable[Mapping[str, Any]]] | str,
        *,
        most: int,
        columns: Mapping[str, str | pa.DataType] | None = None,
        version: str | None = None,
    ) -> None:
        if most < 1:
            raise ConfigError(
                at="Expand.most",
                problem=f"{most} rows are none",
                fix="Give the most rows that one row can become.",
            )
        self.column = by if isinstance(by, str) and ":" not in by else None
        self.function = UserFunction(by, version, of="Expand") if self.column is None else None
        if self.column is not None and (columns or version):
            raise ConfigError(
                at="Expand",
                problem="a column of lists has a type and no version",
                fix="Leave out columns and version.",
            )
        self.types = column_types(columns, "Expand.columns")
        self.fan_out = most
        self.cacheable = self.function is None or self.function.cacheable

    @property
    def fingerprint(self) -> str:
        by = self.column if self.function is None else self.function.fingerprint
        return digest(
            "expand", by, self.fan_out, [[name, str(kind)] for name, kind in self.types.items()]
        )

    def columns(self, before: pa.Schema) -> pa.Schema:
        if self.column is None:
            return overlaid(before, self.types)
        require_columns([self.column], before, str(self))
        kind = before.field(self.column).type
        if not pa.types.is_large_list(kind) and not pa.types.is_list(kind):
            lists = [
                field.name
                for field in before
                if pa.types.is_large_list(field.type) or pa.types.is_list(field.type)
            ]
            raise SourceError(
                at=str(self),
                problem=f"column {self.column!r} holds {kind}, not lists; columns of lists",
                have=lists,
            )
        return overlaid(before, {self.column: kind.value_type})

    def rows(self, rows: Rows) -> Rows:
        schema = self.columns(rows.batch.schema)
        if self.column is None:
            return self._by_function(rows, schema)
        lists = rows.batch.column(self.column)
        lengths = (
            pc.fill_null(pc.list_value_length(lists), 0)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
        bad = lengths > self.fan_out
        failed = [
            self._too_many(int(rows.numbers[i]), int(lengths[i])) for i in np.flatnonzero(bad)
        ]
        if failed:
            rows = kept(rows, ~bad)
            lists, lengths = rows.batch.column(self.column), lengths[~bad]
        parents = np.repeat(np.arange(len(lengths)), lengths)
        items = pc.list_flatten(lists)
        arrays = [
            items if name == self.column else rows.batch.column(name).take(pa.array(parents))
            for name in schema.names
        ]
        return Rows(
            pa.RecordBatch.from_arrays(arrays, schema=schema),
            self._numbers(rows, lengths),
            tuple(failed),
        )

    def _by_function(self, rows: Rows, schema: pa.Schema) -> Rows:
        assert self.function is not None
        made: list[Mapping[str, Any]] = []
        failed: list[Reject] = []
        lengths = np.zeros(rows.batch.num_rows, np.int64)
        for i, row in enumerate(rows.batch.to_pylist()):  # the user's function knows rows
            number = int(rows.numbers[i])
            try:
                several = [
                    dict(one) for one in itertools.islice(self.function(row), self.fan_out + 1)
                ]
            except Exception as error:  # noqa: BLE001 (whatever a user's function raises is this row's fault; it is counted or raised)
                failed.append(
                    Reject(
                        row=number * self.fan_out,
                        reason="expand_failed",
                        detail=why(self.function.name, error),
                    )
                )
                continue
            if len(several) > self.fan_out:
                failed.append(self._too_many(number, len(several)))
                continue
            for one in several:
                unknown = next((name for name in one if name not in schema.names), None)
                if unknown is not None:
                    fix = f"Name it with its type: columns={{{unknown!r}: 'string'}}."
                    problem = (
                        f"{self.function.name} returned a column {unknown!r} that nobody announced"
                    )
                    raise SourceError(
                        at=place(repr(self), row=number),
                        problem=problem,
                        have=schema.names,
                        fix=fix,
                    )
            lengths[i] = len(several)
            made += several
        parents = np.repeat(np.arange(len(lengths)), lengths)
        spread = Rows(rows.batch.take(pa.array(parents, pa.int64())), self._numbers(rows, lengths))
        names = {name for one in made for name in one}
        arrays = [laid_over(field, spread.batch, made, names) for field in schema]
        bad = [
            (i, field, error)
            for field, array in zip(schema, arrays, strict=True)
            for i, error in misfits_of(array)
        ]
        return without_misfits(spread, schema, arrays, bad, failed, self.function.name)

    def _numbers(self, rows: Rows, lengths: np.ndarray) -> np.ndarray:
        starts = np.cumsum(lengths) - lengths
        return np.repeat(rows.numbers * self.fan_out - starts, lengths) + np.arange(
            int(lengths.sum())
        )

    def _too_many(self, row: int, count: int) -> Reject:
        detail = f"row {row} becomes {count} rows or more, and most={self.fan_out}"
        return Reject(row=row * self.fan_out, reason="too_many_rows", detail=detail)

    def narrow(
        self, columns: Sequence[str], before: pa.Schema
    ) -> tuple[Transform, Sequence[str] | None]:
        if self.column is None:
            return self, None
        return self, list(dict.fromkeys([*columns, self.column]))

    def __repr__(self) -> str:
        return f"Expand({self.column if self.function is None else self.function.name!r}, most={self.fan_out})"
