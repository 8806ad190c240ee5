# pyright: reportAttributeAccessIssue=false
# (pyarrow makes the functions of its compute module when it is imported)
"""Transforms that call a function of the user's, row by row or batch by batch: Map, Filter, Expand.

A function takes a row as a dict and must be pure and safe to call from several threads: rows are transformed by whoever reads them, in any
order, and again where they are read again. A row on which it raises is a bad row of its file: `on_error` decides what becomes of it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, place
from easypipe.core.protocols import Reject, Transform
from easypipe.core.schema import ROW_NUMBER
from easypipe.transforms.base import ColumnTransform, Rows, require_columns
from easypipe.transforms.columns import kept
from easypipe.transforms.identity import UserFunction, why
from easypipe.transforms.types import column_types

_CANNOT = (pa.ArrowException, ValueError, TypeError, OverflowError)  # what pyarrow raises for a value that is not of a type


class Map(ColumnTransform):
    """What a function returns is laid over its row: `Map(lambda row: {"text": row["a"].upper()}, columns={"text": "string"}, version="1")`.

    function: takes a row as a dict and returns a mapping, or "module:function". Columns that it does not return stay as they are.
    columns: types of the columns that it adds, or returns with another type: `string`, `int64`, `list<string>`, ... A column that is
        neither there already nor named here is refused: the schema is known before a row is read.
    batched: the function takes a pyarrow.RecordBatch instead and returns one, or a mapping of columns, with as many rows. It must treat
        each row alone; the first batch is also given to it cut in two, and a difference is an error.
    version: raise it when the function changes. Without one (here, or as an attribute `version` of the function) nothing can know that it
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
            raise ConfigError(at="Map.columns", problem=f"{ROW_NUMBER!r} is kept for row numbers", fix="Choose another name.")
        self.batched = batched
        self.cacheable = self.function.cacheable
        self._checked = False

    @property
    def fingerprint(self) -> str:
        return digest("map", self.function.fingerprint, [[name, str(kind)] for name, kind in self.types.items()], self.batched)

    def columns(self, before: pa.Schema) -> pa.Schema:
        return _overlaid(before, self.types)

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
                failed.append(Reject(row=number, reason="map_failed", detail=why(self.function.name, error)))
            if not isinstance(made, Mapping):
                failed.append(Reject(row=number, reason="map_failed", detail=f"{self.function.name} returned {made!r:.80}, not a mapping"))
                made, good[i] = {}, False
            self._require_known(made, schema, number)
            returned.append(made)
        if not good.all():
            returned = list(itertools.compress(returned, good))
            rows = kept(rows, good)
        names = {name for made in returned for name in made}
        arrays = [_laid_over(field, rows.batch, returned, names) for field in schema]
        bad = [(i, field, error) for field, array in zip(schema, arrays, strict=True) for i, error in _misfits(array)]
        return _without(rows, schema, arrays, bad, failed, self.function.name)

    def _batch(self, rows: Rows) -> Rows:
        schema = self.columns(rows.batch.schema)
        self._check_row_wise(rows.batch, schema)
        try:
            return Rows(self._call(rows.batch, schema), rows.numbers)
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001 (as above: which row is to blame is found by giving it fewer)
            if rows.batch.num_rows <= 1:
                failed = [Reject(row=int(row), reason="map_failed", detail=why(self.function.name, error)) for row in rows.numbers]
                return Rows(_empty(schema), rows.numbers[:0], tuple(failed))
        middle = rows.batch.num_rows // 2
        first = self._batch(Rows(rows.batch.slice(0, middle), rows.numbers[:middle]))
        second = self._batch(Rows(rows.batch.slice(middle), rows.numbers[middle:]))
        return Rows(_joined([first.batch, second.batch]), np.concatenate([first.numbers, second.numbers]), first.rejects + second.rejects)

    def _call(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        made = self.function(batch)
        if isinstance(made, pa.Table):
            made = made.combine_chunks()
        returned = {name: made.column(name) for name in made.schema.names} if isinstance(made, pa.RecordBatch | pa.Table) else made
        if not isinstance(returned, Mapping):
            raise TypeError(f"it returned {type(made).__name__}, not a RecordBatch or a mapping of columns")
        self._require_known(returned, schema, None)
        arrays = []
        for field in schema:
            values = returned.get(field.name)
            array = _as_array(values, field.type) if values is not None else _before(field, batch)
            if len(array) != batch.num_rows:
                raise SourceError(
                    at=str(self),
                    problem=f"{self.function.name} returned {len(array)} rows of {field.name!r} for {batch.num_rows}",
                    fix="Return a value for each row; Filter drops rows and Expand adds them.",
                )
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _check_row_wise(self, batch: pa.RecordBatch, schema: pa.Schema) -> None:
        """Once, on the first batch of several rows: a function that looks at its neighbours would depend on how rows are read."""
        if self._checked or batch.num_rows < 2:
            return
        self._checked = True
        sample = batch.slice(0, 64)
        try:
            whole = self._call(sample, schema)
            pieces = _joined([self._call(sample.slice(0, 1), schema), self._call(sample.slice(1), schema)])
        except SourceError:
            raise
        except Exception:  # noqa: BLE001 (a bad row; the call that follows finds and reports it)
            return
        if not whole.equals(pieces):
            fix = "Make each row depend on itself alone."
            raise SourceError(at=str(self), problem=f"{self.function.name} gives a row other values when it comes with others", fix=fix)

    def _require_known(self, made: Mapping[str, Any], schema: pa.Schema, row: int | None) -> None:
        for name in made:
            if name not in schema.names:
                fix = f"Name it with its type: columns={{{name!r}: 'string'}}."
                problem = f"{self.function.name} returned a column {name!r} that nobody announced"
                raise SourceError(at=place(repr(self), row=row), problem=problem, have=schema.names, fix=fix)

    def __repr__(self) -> str:
        return f"Map({self.function.name})"


class Filter(ColumnTransform):
    """Only the rows for which a test holds: `Filter(pc.field("score") > 0.5)`, or `Filter(lambda row: row["score"] > 0.5, version="1")`.

    test: a pyarrow.compute expression, which Arrow computes by columns (null does not hold), or a function of a row that returns a bool, or
        "module:function". version: of a function, as in Map.
    """

    drops = True

    def __init__(self, test: pc.Expression | Callable[[dict[str, Any]], bool] | str, *, version: str | None = None) -> None:
        self.expression = test if isinstance(test, pc.Expression) else None
        self.function = None if isinstance(test, pc.Expression) else UserFunction(test, version, of="Filter")
        if self.expression is not None and version is not None:
            raise ConfigError(at="Filter.version", problem="an expression says itself what it does", fix="Leave version out.")
        self.cacheable = self.function is None or self.function.cacheable

    @property
    def fingerprint(self) -> str:
        if self.function is not None:
            return digest("filter", self.function.fingerprint)
        shown = str(self.expression)
        if "..." not in shown:
            return digest("filter", shown)
        whole = self.expression.__reduce__()[1][0]  # type: ignore[index]  (what is printed leaves out the middle of long lists)
        return digest("filter", shown, hashlib.sha256(whole).hexdigest())

    def columns(self, before: pa.Schema) -> pa.Schema:
        if self.expression is not None:
            try:
                before.empty_table().filter(self.expression)
            except (pa.ArrowException, KeyError) as error:
                problem = str(error).splitlines()[0]
                raise SourceError(at=str(self), problem=problem, have=before.names, fix="Test columns that are there.") from error
        return before

    def rows(self, rows: Rows) -> Rows:
        if self.expression is not None:
            table = pa.table(
                {**{name: rows.batch.column(name) for name in rows.batch.schema.names}, ROW_NUMBER: np.arange(len(rows.numbers))}
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
                failed.append(Reject(row=int(rows.numbers[i]), reason="filter_failed", detail=why(self.function.name, error)))
        result = kept(rows, keep)
        return Rows(result.batch, result.numbers, tuple(failed))

    def __repr__(self) -> str:
        return f"Filter({self.expression if self.function is None else self.function.name})"


class Expand(ColumnTransform):
    """One row to several: `Expand("turns", most=16)` gives a row for every item of a list.

    by: a column of lists, whose items take its place; or a function of a row that returns rows (each laid over it, as in Map), or
        "module:function". columns, version: of what a function returns, as in Map.
    most: at most so many rows come of one; a row that gives more is a bad row. It makes row numbers follow from the file alone, whatever
        the rows hold: the i-th row of row r has number `r * most + i`. Numbers that stay unused are counted as `unfilled`, and every place
        that counts rows of the source counts `most` for each.
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
            raise ConfigError(at="Expand.most", problem=f"{most} rows are none", fix="Give the most rows that one row can become.")
        self.column = by if isinstance(by, str) and ":" not in by else None
        self.function = UserFunction(by, version, of="Expand") if self.column is None else None
        if self.column is not None and (columns or version):
            raise ConfigError(at="Expand", problem="a column of lists has a type and no version", fix="Leave out columns and version.")
        self.types = column_types(columns, "Expand.columns")
        self.fan_out = most
        self.cacheable = self.function is None or self.function.cacheable

    @property
    def fingerprint(self) -> str:
        by = self.column if self.function is None else self.function.fingerprint
        return digest("expand", by, self.fan_out, [[name, str(kind)] for name, kind in self.types.items()])

    def columns(self, before: pa.Schema) -> pa.Schema:
        if self.column is None:
            return _overlaid(before, self.types)
        require_columns([self.column], before, str(self))
        kind = before.field(self.column).type
        if not pa.types.is_large_list(kind) and not pa.types.is_list(kind):
            lists = [field.name for field in before if pa.types.is_large_list(field.type) or pa.types.is_list(field.type)]
            raise SourceError(at=str(self), problem=f"column {self.column!r} holds {kind}, not lists; columns of lists", have=lists)
        return _overlaid(before, {self.column: kind.value_type})

    def rows(self, rows: Rows) -> Rows:
        schema = self.columns(rows.batch.schema)
        if self.column is None:
            return self._by_function(rows, schema)
        lists = rows.batch.column(self.column)
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        bad = lengths > self.fan_out
        failed = [self._too_many(int(rows.numbers[i]), int(lengths[i])) for i in np.flatnonzero(bad)]
        if failed:
            rows = kept(rows, ~bad)
            lists, lengths = rows.batch.column(self.column), lengths[~bad]
        parents = np.repeat(np.arange(len(lengths)), lengths)
        items = pc.list_flatten(lists)
        arrays = [items if name == self.column else rows.batch.column(name).take(pa.array(parents)) for name in schema.names]
        return Rows(pa.RecordBatch.from_arrays(arrays, schema=schema), self._numbers(rows, lengths), tuple(failed))

    def _by_function(self, rows: Rows, schema: pa.Schema) -> Rows:
        assert self.function is not None
        made: list[Mapping[str, Any]] = []
        failed: list[Reject] = []
        lengths = np.zeros(rows.batch.num_rows, np.int64)
        for i, row in enumerate(rows.batch.to_pylist()):  # the user's function knows rows
            number = int(rows.numbers[i])
            try:
                several = [dict(one) for one in itertools.islice(self.function(row), self.fan_out + 1)]
            except Exception as error:  # noqa: BLE001 (whatever a user's function raises is this row's fault; it is counted or raised)
                failed.append(Reject(row=number * self.fan_out, reason="expand_failed", detail=why(self.function.name, error)))
                continue
            if len(several) > self.fan_out:
                failed.append(self._too_many(number, len(several)))
                continue
            for one in several:
                unknown = next((name for name in one if name not in schema.names), None)
                if unknown is not None:
                    fix = f"Name it with its type: columns={{{unknown!r}: 'string'}}."
                    problem = f"{self.function.name} returned a column {unknown!r} that nobody announced"
                    raise SourceError(at=place(repr(self), row=number), problem=problem, have=schema.names, fix=fix)
            lengths[i] = len(several)
            made += several
        parents = np.repeat(np.arange(len(lengths)), lengths)
        spread = Rows(rows.batch.take(pa.array(parents, pa.int64())), self._numbers(rows, lengths))
        names = {name for one in made for name in one}
        arrays = [_laid_over(field, spread.batch, made, names) for field in schema]
        bad = [(i, field, error) for field, array in zip(schema, arrays, strict=True) for i, error in _misfits(array)]
        return _without(spread, schema, arrays, bad, failed, self.function.name)

    def _numbers(self, rows: Rows, lengths: np.ndarray) -> np.ndarray:
        starts = np.cumsum(lengths) - lengths
        return np.repeat(rows.numbers * self.fan_out - starts, lengths) + np.arange(int(lengths.sum()))

    def _too_many(self, row: int, count: int) -> Reject:
        detail = f"row {row} becomes {count} rows or more, and most={self.fan_out}"
        return Reject(row=row * self.fan_out, reason="too_many_rows", detail=detail)

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> tuple[Transform, Sequence[str] | None]:
        if self.column is None:
            return self, None
        return self, list(dict.fromkeys([*columns, self.column]))

    def __repr__(self) -> str:
        return f"Expand({self.column if self.function is None else self.function.name!r}, most={self.fan_out})"


class _Misfits:
    """Values of a column that are not all of its type: those that are, and what is wrong with the others."""

    def __init__(self, values: pa.Array, errors: list[tuple[int, str]]) -> None:
        self.values, self.errors = values, errors


def _overlaid(before: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    rest = dict(types)
    same = [pa.field(field.name, rest.pop(field.name, field.type)) for field in before]
    return pa.schema([*same, *(pa.field(name, kind) for name, kind in rest.items())])


def _laid_over(field: pa.Field, batch: pa.RecordBatch, returned: Sequence[Mapping[str, Any]], names: set[str]) -> Any:
    """A column with what was returned for it, and what stood there in the rows that returned nothing; a _Misfits where a value is wrong."""
    if field.name not in names and field.name in batch.schema.names and batch.schema.field(field.name).type.equals(field.type):
        return batch.column(field.name)
    old = batch.column(field.name) if field.name in batch.schema.names else None
    values = [made[field.name] if field.name in made else None if old is None else old[i].as_py() for i, made in enumerate(returned)]
    try:
        return _as_array(values, field.type)
    except _CANNOT:
        fitting: list[Any] = []
        errors: list[tuple[int, str]] = []
        for i, value in enumerate(values):
            try:
                _as_array([value], field.type)
                fitting.append(value)
            except _CANNOT as error:
                fitting.append(None)
                errors.append((i, f"{value!r:.80} cannot be {field.type}: {error}"))
        return _Misfits(_as_array(fitting, field.type), errors)


def _misfits(column: Any) -> list[tuple[int, str]]:
    return column.errors if isinstance(column, _Misfits) else []


def _without(
    rows: Rows, schema: pa.Schema, columns: Sequence[Any], bad: Sequence[tuple[int, pa.Field, str]], failed: list[Reject], name: str
) -> Rows:
    """The columns as a batch, without the rows in which a value is of the wrong type; those are rejects."""
    batch = pa.RecordBatch.from_arrays([c.values if isinstance(c, _Misfits) else c for c in columns], schema=schema)
    keep = np.ones(batch.num_rows, np.bool_)
    for i, field, error in bad:
        if keep[i]:
            detail = f"{name} returned in column {field.name!r}: {error}"
            failed.append(Reject(row=int(rows.numbers[i]), reason="wrong_type", detail=detail))
        keep[i] = False
    result = kept(Rows(batch, rows.numbers), keep)
    return Rows(result.batch, result.numbers, tuple(sorted(failed, key=lambda reject: reject.row)))


def _as_array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        return values if values.type.equals(kind) else values.cast(kind)
    return pa.array(values, kind)


def _before(field: pa.Field, batch: pa.RecordBatch) -> pa.Array:
    if field.name in batch.schema.names:
        return _as_array(batch.column(field.name), field.type)
    return pa.nulls(batch.num_rows, field.type)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    schema = batches[0].schema
    arrays = [pa.concat_arrays([batch.column(i) for batch in batches]) for i in range(len(schema))]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
