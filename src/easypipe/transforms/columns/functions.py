# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)
"""Map, Filter and Expand: transforms that call a user's function, and checks of what it returns.

A function takes a row as a dict and must be pure and safe to call from several threads. Rows are
transformed by whoever reads them, in any order, and again each time they are read. A row on which
it raises is a bad row of its file: `on_error` decides what happens to it.
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
from easypipe.core.errors import SourceError, place, require, require_columns
from easypipe.core.identity import UserFunction, why
from easypipe.core.protocols import Reject
from easypipe.core.schema import ROW_NUMBER, is_list, list_sizes
from easypipe.core.values import Int64, Record, Row
from easypipe.transforms.columns.base import (
    ColumnTransform,
    Rows,
    as_array,
    overlaid,
)
from easypipe.transforms.columns.types import column_types

# the errors that pyarrow raises for a value that does not fit a type
_CANNOT = (pa.ArrowException, ValueError, TypeError, OverflowError)


class Map(ColumnTransform):
    """A transform that updates each row with what a function returns.

    `Map(lambda row: {"text": row["a"].upper()}, columns={"text": "string"}, version="1")`

    Args:
        function: Takes a row as a dict and returns a mapping; or "module:function". Columns that it
            does not return stay as they are.
        columns: Types of the columns that it adds, or returns with another type: `string`, `int64`,
            `list<string>`, ... A column that neither exists nor is named here is refused, because
            the schema is known before a row is read.
        batched: The function takes a pyarrow.RecordBatch instead and returns one, or a mapping of
            columns, with as many rows. It must treat each row alone; the first batch is also passed
            to it in two halves, and a difference is an error.
        version: Raise it when the function changes. Without one (here, or as an attribute `version`
            of the function) a change cannot be noticed, so the results are not kept in the token
            cache, and a warning says so.
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
        require(
            ROW_NUMBER not in self.types,
            "Map.columns",
            f"{ROW_NUMBER!r} is kept for row numbers",
            "Choose another name.",
        )
        self.batched = batched
        self.cacheable = self.function.cacheable
        self.unversioned = self.function.unversioned
        self._checked = False

    @property
    def fingerprint(self) -> str:
        types = [[name, str(kind)] for name, kind in self.types.items()]
        return digest("map", self.function.fingerprint, types, self.batched)

    def columns(self, before: pa.Schema) -> pa.Schema:
        return overlaid(before, self.types)

    def rows(self, rows: Rows) -> Rows:
        if self.batched:
            return self._batch(rows)
        return _called(self, self.function, rows, lambda row: [self.function(row)], "map_failed")

    def _batch(self, rows: Rows) -> Rows:
        """Calls the function with a batch; if it raises, with smaller ones to find the row."""
        schema = self.columns(rows.batch.schema)
        self._check_row_wise(rows.batch, schema)
        try:
            return Rows(self._call(rows.batch, schema), rows.numbers)
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001 (as above: which row is to blame is found by giving it fewer)
            if rows.batch.num_rows <= 1:
                detail = why(self.function.name, error)
                failed = [
                    Reject(row=row, reason="map_failed", detail=detail)
                    for row in rows.numbers.tolist()
                ]
                empty = pa.RecordBatch.from_pylist([], schema=schema)
                return Rows(empty, rows.numbers[:0], tuple(failed))
        middle = rows.batch.num_rows // 2
        first = self._batch(Rows(rows.batch.slice(0, middle), rows.numbers[:middle]))
        second = self._batch(Rows(rows.batch.slice(middle), rows.numbers[middle:]))
        return Rows(
            pa.concat_batches([first.batch, second.batch]),
            np.concatenate([first.numbers, second.numbers]),
            first.rejects + second.rejects,
        )

    def _call(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Calls the function with a batch, and checks the columns that it returns."""
        returned = self.function(batch)
        if isinstance(returned, pa.RecordBatch | pa.Table):
            returned = dict(zip(returned.schema.names, returned.columns, strict=True))
        if not isinstance(returned, Mapping):
            kind = type(returned).__name__
            raise TypeError(f"it returned {kind}, not a RecordBatch or a mapping of columns")
        _require_announced(self, self.function, returned, schema, None)
        made: dict[str, pa.Array] = {}
        for field in schema:
            values = returned.get(field.name)
            if field.name not in returned and field.name not in batch.schema.names:
                raise self.error(
                    f"{self.function.name} returned no column {field.name!r}",
                    "Return it, with None for nulls alone, or leave it out of columns.",
                )
            if values is None and field.name in batch.schema.names:
                values = batch.column(field.name)
            array = (
                pa.nulls(batch.num_rows, field.type)
                if values is None
                else as_array(values, field.type)
            )
            if len(array) != batch.num_rows:
                raise self.error(
                    f"{self.function.name} returned {len(array)} rows of {field.name!r} "
                    f"for {batch.num_rows}",
                    "Return a value for each row; Filter drops rows and Expand adds them.",
                )
            made[field.name] = array
        return pa.record_batch(list(made.values()), schema=schema)

    def _check_row_wise(self, batch: pa.RecordBatch, schema: pa.Schema) -> None:
        """Raises SourceError for a function that looks at a row's neighbours.

        Its results would depend on how rows are read. It is checked once, on the first batch of
        several rows.
        """
        if self._checked or batch.num_rows < 2:
            return
        self._checked = True
        sample = batch.slice(0, 64)
        try:
            whole = self._call(sample, schema)
            pieces = [self._call(part, schema) for part in (sample.slice(0, 1), sample.slice(1))]
        except SourceError:
            raise
        except Exception:  # noqa: BLE001 (a bad row; the call that follows finds and reports it)
            return
        if not whole.equals(pa.concat_batches(pieces)):
            fix = "Make each row depend on itself alone."
            raise self.error(
                f"{self.function.name} returns other values for a row if the batch has other rows",
                fix,
            )

    def __repr__(self) -> str:
        return f"Map({self.function.name})"


class Filter(ColumnTransform):
    """A transform that keeps the rows for which a test holds.

    `Filter(pc.field("score") > 0.5)`, or `Filter(lambda row: row["score"] > 0.5, version="1")`

    Args:
        test: A pyarrow.compute expression, which Arrow computes by columns (null does not hold); or
            a function of a row that returns a bool; or "module:function".
        version: The version of a function, as in Map.
    """

    drops = True

    def __init__(
        self,
        test: pc.Expression | Callable[[Record], bool] | str,
        *,
        version: str | None = None,
    ) -> None:
        self.test: UserFunction | pc.Expression = (
            test if isinstance(test, pc.Expression) else UserFunction(test, version, of="Filter")
        )
        require(
            not isinstance(test, pc.Expression) or version is None,
            "Filter.version",
            "an expression says itself what it does",
            "Leave version out.",
        )
        self.cacheable = not isinstance(self.test, UserFunction) or self.test.cacheable
        self.unversioned = self.test.unversioned if isinstance(self.test, UserFunction) else ()

    @property
    def fingerprint(self) -> str:
        if isinstance(self.test, UserFunction):
            return digest("filter", self.test.fingerprint)
        shown = str(self.test)
        if "..." not in shown:
            return digest("filter", shown)
        whole: Any = self.test.__reduce__()[1]  # str() would leave out the middle of long lists
        return digest("filter", shown, hashlib.sha256(whole[0]).hexdigest())

    def columns(self, before: pa.Schema) -> pa.Schema:
        if isinstance(self.test, pc.Expression):
            try:
                before.empty_table().filter(self.test)
            except (pa.ArrowException, KeyError) as error:
                problem = str(error).splitlines()[0]
                raise self.error(
                    problem, "Test columns that are there.", have=before.names
                ) from error
        return before

    def rows(self, rows: Rows) -> Rows:
        if not isinstance(self.test, UserFunction):
            keep = np.zeros(rows.batch.num_rows, np.bool_)
            table = pa.Table.from_batches([rows.batch])
            table = table.append_column(ROW_NUMBER, pa.array(np.arange(len(keep))))
            keep[table.filter(self.test).column(ROW_NUMBER).to_numpy()] = True
            return rows.kept(keep)
        failed: list[Reject] = []
        rows, records = _records(rows)
        keep = np.zeros(len(records), np.bool_)
        for i, row in enumerate(records):
            try:
                holds = self.test(row)
                if not isinstance(holds, bool | np.bool_):
                    raise TypeError(f"it returned {holds!r:.80}, not True or False")
                keep[i] = holds
            except Exception as error:  # noqa: BLE001 (whatever a user's function raises is this row's fault; it is counted or raised)
                detail = why(self.test.name, error)
                failed.append(
                    Reject(row=int(rows.numbers[i]), reason="filter_failed", detail=detail)
                )
        return rows.kept(keep, failed)

    def __repr__(self) -> str:
        return f"Filter({self.test.name if isinstance(self.test, UserFunction) else self.test})"


class Expand(ColumnTransform):
    """A transform that makes several rows from one.

    `Expand("turns", most=16)` makes a row from each item of a list.

    Row numbers must follow from the file alone, whatever the rows hold: the i-th row of row r has
    number `r * most + i`. Numbers that stay unused are counted as `unfilled`, and every place that
    counts rows of the source counts `most` for each.

    Args:
        by: A column of lists, replaced by their items; or a function of a row that returns rows
            (each updates it, as in Map); or "module:function".
        most: The most rows that one row may become; a row that gives more is a bad row.
        columns: Types of what a function returns, as in Map.
        version: The version of a function, as in Map.
    """

    drops = True

    def __init__(
        self,
        by: Callable[[Record], Iterable[Row]] | str,
        *,
        most: int,
        columns: Mapping[str, str | pa.DataType] | None = None,
        version: str | None = None,
    ) -> None:
        require(
            most >= 1,
            "Expand.most",
            f"{most} rows are too few",
            "Give the most rows that one row can become.",
        )
        self.by = (
            by if isinstance(by, str) and ":" not in by else UserFunction(by, version, of="Expand")
        )
        if isinstance(self.by, str):
            self.reads = (self.by,)
            require(
                not columns and not version,
                "Expand",
                "a column of lists has a type and no version",
                "Leave out columns and version.",
            )
        self.types = column_types(columns, "Expand.columns")
        self.fan_out = most
        self.cacheable = isinstance(self.by, str) or self.by.cacheable
        self.unversioned = () if isinstance(self.by, str) else self.by.unversioned

    @property
    def fingerprint(self) -> str:
        by = self.by if isinstance(self.by, str) else self.by.fingerprint
        types = [[name, str(kind)] for name, kind in self.types.items()]
        return digest("expand", by, self.fan_out, types)

    def columns(self, before: pa.Schema) -> pa.Schema:
        if not isinstance(self.by, str):
            return overlaid(before, self.types)
        require_columns([self.by], before.names, str(self))
        kind = before.field(self.by).type
        if not is_list(kind):
            raise self.error(
                f"column {self.by!r} holds {kind}, not lists; columns of lists",
                have=[field.name for field in before if is_list(field.type)],
            )
        return overlaid(before, {self.by: kind.value_type})

    def rows(self, rows: Rows) -> Rows:
        if isinstance(self.by, UserFunction):
            by = self.by
            return _called(self, by, rows, lambda row: self._several(by(row)), "expand_failed")
        schema, lists = self.columns(rows.batch.schema), rows.batch.column(self.by)
        sizes = list_sizes(lists)
        fits = sizes <= self.fan_out
        failed = [
            _too_many(int(rows.numbers[i]), int(sizes[i]), self.fan_out)
            for i in np.flatnonzero(~fits)
        ]
        rows = rows.kept(fits, failed)
        items = pc.list_flatten(rows.batch.column(self.by))
        others = Rows(rows.batch.drop_columns([self.by]), rows.numbers, rows.rejects)
        spread = _spread(others, sizes[fits], self.fan_out)
        return spread.laid_over(schema, {self.by: items})

    def _several(self, made: Iterable[Row]) -> list[Row]:
        if isinstance(made, Mapping | str | bytes) or not isinstance(made, Iterable):
            raise TypeError(f"it returned {made!r:.80}, not a list of rows")
        return list(itertools.islice(made, self.fan_out + 1))

    narrow = ColumnTransform.narrow  # it uses `reads`; named here for readers of this class

    def __repr__(self) -> str:
        return (
            f"Expand({self.by if isinstance(self.by, str) else self.by.name!r}, "
            f"most={self.fan_out})"
        )


def _called(
    transform: Map | Expand,
    function: UserFunction,
    rows: Rows,
    call: Callable[[Row], list[Any]],
    reason: str,
) -> Rows:
    """Calls a function for each row, and updates the row with each mapping that it returns.

    A row on which it fails, or which gets no value or one of the wrong type for its column, is a
    reject.
    """
    schema, most = transform.columns(rows.batch.schema), transform.fan_out
    made: list[Row] = []
    failed: list[Reject] = []
    rows, records = _records(rows, most)
    counts = np.zeros(len(records), np.int64)
    added = [name for name in transform.types if name not in rows.batch.schema.names]
    for i, row in enumerate(records):
        number = int(rows.numbers[i])
        try:
            several = call(row)
        except Exception as error:  # noqa: BLE001 (whatever a user's function raises is this row's fault; it is counted or raised)
            detail = why(function.name, error)
            failed.append(Reject(row=number * most, reason=reason, detail=detail))
            continue
        if len(several) > most:
            failed.append(_too_many(number, len(several), most))
            continue
        for one in several:
            if isinstance(one, Mapping):
                _require_announced(transform, function, one, schema, number)
        if wrong := next(filter(None, (_wrong(one, added) for one in several)), None):
            detail = f"{function.name} returned {wrong}"
            failed.append(Reject(row=number * most, reason=reason, detail=detail))
            continue
        counts[i] = len(several)
        made += several
    spread = _spread(rows, counts, most)
    keep = np.ones(len(made), np.bool_)
    given = {name for one in made for name in one}
    arrays: dict[str, pa.Array] = {}
    for field in schema:
        old = spread.batch.column(field.name) if field.name in spread.batch.schema.names else None
        if field.name not in given and old is not None and old.type.equals(field.type):
            continue
        values = [
            one[field.name] if field.name in one else None if old is None else old[i].as_py()
            for i, one in enumerate(made)
        ]
        for i, error in _fitted(values, field.type):
            if keep[i]:
                keep[i] = False
                detail = f"{function.name} returned in column {field.name!r}: {error}"
                row = int(spread.numbers[i])
                failed.append(Reject(row=row, reason="wrong_type", detail=detail))
        arrays[field.name] = as_array(values, field.type)
    return spread.laid_over(schema, arrays).kept(keep, failed)


def _wrong(made: object, added: Sequence[str]) -> str | None:
    """Returns what is wrong with what a function returned for a row; None if nothing is.

    Args:
        made: What it returned.
        added: The columns that the transform adds.
    """
    if not isinstance(made, Mapping):
        return f"{made!r:.80}, not a mapping"
    lacking = [name for name in added if name not in made]
    return f"no column {lacking[0]!r}; None makes a null" if lacking else None


def _records(rows: Rows, most: int = 1) -> tuple[Rows, list[Row]]:
    """Returns the rows whose texts are UTF-8, and the dicts that a user's function takes."""
    try:
        return rows, rows.batch.to_pylist()
    except UnicodeDecodeError:
        rows = rows.with_texts(rows.batch.schema.names, most)
        return rows, rows.batch.to_pylist()


def _fitted(values: list[Any], kind: pa.DataType) -> list[tuple[int, str]]:
    """Returns which values do not fit this type, and why; they are replaced by None."""
    try:
        as_array(values, kind)
        return []
    except _CANNOT:
        pass
    errors: list[tuple[int, str]] = []
    for i, value in enumerate(values):
        try:
            as_array([value], kind)
        except _CANNOT as error:
            errors.append((i, f"{value!r:.80} cannot be {kind}: {error}"))
            values[i] = None
    return errors


def _require_announced(
    transform: Map | Expand,
    function: UserFunction,
    made: Row,
    schema: pa.Schema,
    row: int | None,
) -> None:
    """Raises SourceError for a returned column whose type is not known."""
    for name in made:
        if name not in schema.names:
            raise SourceError(
                at=place(repr(transform), row=row),
                problem=f"{function.name} returned a column {name!r} whose type is unknown",
                have=schema.names,
                fix=f"Name it with its type: columns={{{name!r}: 'string'}}, which are "
                "format_columns in a dataset's options.",
            )


def _spread(rows: Rows, counts: Int64, most: int) -> Rows:
    """Repeats each row `counts` times, numbered among the `most` rows that it may become."""
    if most == 1 and counts.all():
        return rows
    parents = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    numbers = (rows.numbers * most - starts)[parents] + np.arange(len(parents))
    return Rows(rows.batch.take(pa.array(parents)), numbers, rows.rejects)


def _too_many(row: int, count: int, most: int) -> Reject:
    detail = f"row {row} becomes {count} rows or more, and most={most}"
    return Reject(row=row * most, reason="too_many_rows", detail=detail)
