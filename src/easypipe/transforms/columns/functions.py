# pyright: reportAttributeAccessIssue=false
# (pyarrow makes the functions of its compute module when it is imported)
"""Transforms that call a function of the user's, row by row or batch by batch: Map and Filter, and
Expand in expand.py.

A function takes a row as a dict and must be pure and safe to call from several threads: rows are
transformed by whoever reads them, in any order, and again where they are read again. A row on which
it raises is a bad row of its file: `on_error` decides what becomes of it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, place
from easypipe.core.protocols import Reject
from easypipe.core.schema import ROW_NUMBER
from easypipe.transforms.columns.base import ColumnTransform, Rows
from easypipe.transforms.columns.columns import kept
from easypipe.transforms.columns.identity import UserFunction, why
from easypipe.transforms.columns.overlay import (
    as_array,
    laid_over,
    misfits_of,
    overlaid,
    without_misfits,
)
from easypipe.transforms.columns.types import column_types


class Map(ColumnTransform):
    """What a function returns is laid over its row: `Map(lambda row: {"text": row["a"].upper()},
    columns={"text": "string"}, version="1")`.

    function: takes a row as a dict and returns a mapping, or "module:function". Columns that it
    does not return stay as they are.
    columns: types of the columns that it adds, or returns with another type: `string`, `int64`,
    `list<string>`, ... A column that is
        neither there already nor named here is refused: the schema is known before a row is read.
    batched: the function takes a pyarrow.RecordBatch instead and returns one, or a mapping of
    columns, with as many rows. It must treat
        each row alone; the first batch is also given to it cut in two, and a difference is an
        error.
    version: raise it when the function changes. Without one (here, or as an attribute `version` of
    the function) nothing can know that it
        changed, so what comes out is not kept in the token cache, and a warning says so.
    """

    def __init__(
        self,
        function: Callable[[Any], Any] | str,
        *,
        columns: Mapping[str, str | pa.DataType] | None = None,
        batched: bool = False,
        version: str | None = None,
    ) -> None:
        self.function = UserFunction(function, version, of="Map")
        self.types = column_types(columns, "Map.columns")
        if ROW_NUMBER in self.types:
            raise ConfigError(
                at="Map.columns",
                problem=f"{ROW_NUMBER!r} is kept for row numbers",
                fix="Choose another name.",
            )
        self.batched = batched
        self.cacheable = self.function.cacheable
        self._checked = False

    @property
    def fingerprint(self) -> str:
        return digest(
            "map",
            self.function.fingerprint,
            [[name, str(kind)] for name, kind in self.types.items()],
            self.batched,
        )

    def columns(self, before: pa.Schema) -> pa.Schema:
        return overlaid(before, self.types)

    def rows(self, rows: Rows) -> Rows:
        if self.batched:
            return self._batch(rows)
        schema = self.columns(rows.batch.schema)
        returned: list[Mapping[str, Any]] = []
        failed: list[Reject] = []
        good = np.ones(rows.batch.num_rows, np.bool_)
        for i, row in enumerate(rows.batch.to_pylist()):  # the user's function knows rows
            number = int(rows.numbers[i])
            try:
                made = self.function(row)
            except Exception as error:  # noqa: BLE001 (whatever a user's function raises is this row's fault; it is counted or raised)
                made, good[i] = {}, False
                failed.append(
                    Reject(row=number, reason="map_failed", detail=why(self.function.name, error))
                )
            if not isinstance(made, Mapping):
                failed.append(
                    Reject(
                        row=number,
                        reason="map_failed",
                        detail=f"{self.function.name} returned {made!r:.80}, not a mapping",
                    )
                )
                made, good[i] = {}, False
            self._require_known(made, schema, number)
            returned.append(made)
        if not good.all():
            returned = list(itertools.compress(returned, good))
            rows = kept(rows, good)
        names = {name for made in returned for name in made}
        arrays = [laid_over(field, rows.batch, returned, names) for field in schema]
        bad = [
            (i, field, error)
            for field, array in zip(schema, arrays, strict=True)
            for i, error in misfits_of(array)
        ]
        return without_misfits(rows, schema, arrays, bad, failed, self.function.name)

    def _batch(self, rows: Rows) -> Rows:
        schema = self.columns(rows.batch.schema)
        self._check_row_wise(rows.batch, schema)
        try:
            return Rows(self._call(rows.batch, schema), rows.numbers)
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001 (as above: which row is to blame is found by giving it fewer)
            if rows.batch.num_rows <= 1:
                failed = [
                    Reject(row=int(row), reason="map_failed", detail=why(self.function.name, error))
                    for row in rows.numbers
                ]
                return Rows(_empty(schema), rows.numbers[:0], tuple(failed))
        middle = rows.batch.num_rows // 2
        first = self._batch(Rows(rows.batch.slice(0, middle), rows.numbers[:middle]))
        second = self._batch(Rows(rows.batch.slice(middle), rows.numbers[middle:]))
        return Rows(
            _joined([first.batch, second.batch]),
            np.concatenate([first.numbers, second.numbers]),
            first.rejects + second.rejects,
        )

    def _call(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        made = self.function(batch)
        if isinstance(made, pa.Table):
            made = made.combine_chunks()
        returned = (
            {name: made.column(name) for name in made.schema.names}
            if isinstance(made, pa.RecordBatch | pa.Table)
            else made
        )
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"it returned {type(made).__name__}, not a RecordBatch or a mapping of columns"
            )
        self._require_known(returned, schema, None)
        arrays = []
        for field in schema:
            values = returned.get(field.name)
            array = as_array(values, field.type) if values is not None else _before(field, batch)
            if len(array) != batch.num_rows:
                raise SourceError(
                    at=str(self),
                    problem=f"{self.function.name} returned {len(array)} rows of {field.name!r} for {batch.num_rows}",
                    fix="Return a value for each row; Filter drops rows and Expand adds them.",
                )
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _check_row_wise(self, batch: pa.RecordBatch, schema: pa.Schema) -> None:
        """Once, on the first batch of several rows: a function that looks at its neighbours would
        depend on how rows are read.
        """
        if self._checked or batch.num_rows < 2:
            return
        self._checked = True
        sample = batch.slice(0, 64)
        try:
            whole = self._call(sample, schema)
            pieces = _joined(
                [self._call(sample.slice(0, 1), schema), self._call(sample.slice(1), schema)]
            )
        except SourceError:
            raise
        except Exception:  # noqa: BLE001 (a bad row; the call that follows finds and reports it)
            return
        if not whole.equals(pieces):
            fix = "Make each row depend on itself alone."
            raise SourceError(
                at=str(self),
                problem=f"{self.function.name} gives a row other values when it comes with others",
                fix=fix,
            )

    def _require_known(self, made: Mapping[str, Any], schema: pa.Schema, row: int | None) -> None:
        for name in made:
            if name not in schema.names:
                fix = f"Name it with its type: columns={{{name!r}: 'string'}}, which are format_columns in a dataset's options."
                problem = f"{self.function.name} returned a column {name!r} that nobody announced"
                raise SourceError(
                    at=place(repr(self), row=row), problem=problem, have=schema.names, fix=fix
                )

    def __repr__(self) -> str:
        return f"Map({self.function.name})"


class Filter(ColumnTransform):
    """Only the rows for which a test holds: `Filter(pc.field("score") > 0.5)`, or `Filter(lambda
    row: row["score"] > 0.5, version="1")`.

    test: a pyarrow.compute expression, which Arrow computes by columns (null does not hold), or a
    function of a row that returns a bool, or
        "module:function". version: of a function, as in Map.
    """

    drops = True

    def __init__(
        self,
        test: pc.Expression | Callable[[dict[str, Any]], bool] | str,
        *,
        version: str | None = None,
    ) -> None:
        self.expression = test if isinstance(test, pc.Expression) else None
        self.function = (
            None if isinstance(test, pc.Expression) else UserFunction(test, version, of="Filter")
        )
        if self.expression is not None and version is not None:
            raise ConfigError(
                at="Filter.version",
                problem="an expression says itself what it does",
                fix="Leave version out.",
            )
        self.cacheable = self.function is None or self.function.cacheable

    @property
    def fingerprint(self) -> str:
        if self.function is not None:
            return digest("filter", self.function.fingerprint)
        shown = str(self.expression)
        if "..." not in shown:
            return digest("filter", shown)
        whole: Any = self.expression.__reduce__()[1]  # type: ignore[union-attr]  (printed, long lists lack their middle)
        return digest("filter", shown, hashlib.sha256(whole[0]).hexdigest())

    def columns(self, before: pa.Schema) -> pa.Schema:
        if self.expression is not None:
            try:
                before.empty_table().filter(self.expression)
            except (pa.ArrowException, KeyError) as error:
                problem = str(error).splitlines()[0]
                raise SourceError(
                    at=str(self),
                    problem=problem,
                    have=before.names,
                    fix="Test columns that are there.",
                ) from error
        return before

    def rows(self, rows: Rows) -> Rows:
        if self.expression is not None:
            table = pa.table(
                {
                    **{name: rows.batch.column(name) for name in rows.batch.schema.names},
                    ROW_NUMBER: np.arange(len(rows.numbers)),
                }
            )
            keep = np.zeros(len(rows.numbers), np.bool_)
            keep[table.filter(self.expression).column(ROW_NUMBER).to_numpy()] = True
            return kept(rows, keep)
        assert self.function is not None
        keep, failed = np.zeros(rows.batch.num_rows, np.bool_), []
        for i, row in enumerate(rows.batch.to_pylist()):  # the user's function knows rows
            try:
                holds = self.function(row)
                if not isinstance(holds, bool | np.bool_):
                    raise TypeError(f"it returned {holds!r:.80}, not True or False")
                keep[i] = holds
            except Exception as error:  # noqa: BLE001 (whatever a user's function raises is this row's fault; it is counted or raised)
                failed.append(
                    Reject(
                        row=int(rows.numbers[i]),
                        reason="filter_failed",
                        detail=why(self.function.name, error),
                    )
                )
        result = kept(rows, keep)
        return Rows(result.batch, result.numbers, tuple(failed))

    def __repr__(self) -> str:
        return f"Filter({self.expression if self.function is None else self.function.name})"


def _before(field: pa.Field, batch: pa.RecordBatch) -> pa.Array:
    if field.name in batch.schema.names:
        return as_array(batch.column(field.name), field.type)
    return pa.nulls(batch.num_rows, field.type)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    schema = batches[0].schema
    arrays = [pa.concat_arrays([batch.column(i) for batch in batches]) for i in range(len(schema))]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
