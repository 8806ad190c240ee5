"""ColumnTransform: the base of transforms, chains by `>>`, and users' own objects as transforms.

Rows keep their numbers on the way through.

```python
clean = Rename({"body": "text"}) >> FilterNonEmpty("text") >> Select("text")
clean(batch)      # a RecordBatch
clean(source)     # a TransformedSource: lazy, reads nothing until rows are asked for
```
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import (
    ConfigError,
    SourceError,
    place,
    require,
    require_option,
    require_rows,
)
from easypipe.core.protocols import (
    Reject,
    Scan,
    Shard,
    ShardedSource,
    Source,
    SourceInfo,
    TokenInfo,
    Transform,
    bad_of,
    by_row,
    fetched,
    identity_of,
    info_of,
    place_of,
    raw_of,
    scan,
    select,
    unit_of,
)
from easypipe.core.schema import (
    ROW_NUMBER,
    cast_array,
    data_columns,
    row_numbers,
    typed_array,
    with_row_numbers,
    without_row_numbers,
)
from easypipe.core.text import not_utf8
from easypipe.core.values import Bools, Int64, attribute_of

OnError = Literal["error", "skip", "quarantine"]


@dataclass(frozen=True)
class Rows:
    """Rows on their way through a transform.

    Attributes:
        batch: The rows, without a column of row numbers.
        numbers: Int64[rows], their row numbers.
        rejects: The rows on which a transform failed.
    """

    batch: pa.RecordBatch
    numbers: Int64
    rejects: tuple[Reject, ...] = ()

    def kept(self, keep: Bools, rejects: Iterable[Reject] = ()) -> Rows:
        """Returns the rows where `keep` (Bool[rows]) is set.

        Args:
            keep: Which rows stay.
            rejects: Further rejects, in any order.
        """
        every = by_row((*self.rejects, *rejects))
        if keep.all():
            return Rows(self.batch, self.numbers, every)
        return Rows(self.batch.filter(pa.array(keep)), self.numbers[keep], every)

    def with_texts(self, names: Iterable[str], most: int = 1) -> Rows:
        """Returns the rows whose texts in these columns are UTF-8; the others are rejects.

        Args:
            most: Row r is rejected as row `r * most`, as in Expand.
        """
        bad = {row: name for name in names for row in not_utf8(self.batch.column(name))}
        keep = np.ones(len(self.numbers), np.bool_)
        keep[list(bad)] = False
        rejects = [
            Reject(
                row=int(self.numbers[row]) * most,
                reason="invalid_utf8",
                detail=f"column {name!r} is not UTF-8",
            )
            for row, name in bad.items()
        ]
        return self.kept(keep, rejects)

    def laid_over(self, schema: pa.Schema, made: Mapping[str, pa.Array]) -> Rows:
        """Returns the rows with `schema`: columns of `made`, and the other columns unchanged."""
        arrays = [made[n] if n in made else self.batch.column(n) for n in schema.names]
        return Rows(pa.record_batch(arrays, schema=schema), self.numbers, self.rejects)


class ColumnTransform(ABC):
    """The base of this package's transforms; implements Transform.

    A subclass says what happens to a schema and to rows. Equal fingerprints mean equal rows: a
    subclass puts all its options into `fingerprint`.

    Attributes:
        drops: Whether it may leave rows out.
        fan_out: The most rows that one row becomes.
        cacheable: Whether tokens of its rows may be kept in the token cache.
        unversioned: If not: why.
        tokens: The tokenizer of its rows, if they are tokens.
        reads: The columns that it needs besides those that its caller wants; None: it may read any.
        makes: A column that it makes, and does not read.
    """

    drops: bool = False
    fan_out: int = 1
    cacheable: bool = True
    unversioned: tuple[str, ...] = ()
    tokens: TokenInfo | None = None
    reads: Sequence[str] | None = None
    makes: str | None = None

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def columns(self, before: pa.Schema) -> pa.Schema:
        """Returns the schema after the transform; neither schema has ROW_NUMBER.

        Raises:
            SourceError: A column does not exist or cannot be used so.
        """

    @abstractmethod
    def rows(self, rows: Rows) -> Rows:
        """Transforms rows.

        Rows on which it fails are rejects; rows that it drops on purpose are simply left out.
        """

    def error(
        self, problem: str, fix: str | None = None, have: Iterable[str] | None = None
    ) -> SourceError:
        """Returns the error for wrong columns, which names the transform."""
        return SourceError(at=str(self), problem=problem, have=have, fix=fix)

    def overlaid(self, rows: Rows, made: Mapping[str, pa.Array]) -> Rows:
        """Returns the rows with the columns after the transform, those in `made` from there."""
        return rows.laid_over(self.columns(rows.batch.schema), made)

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> Narrowed:
        """Returns a transform with the same rows but only `columns`, and the columns it reads.

        None in place of the columns that it reads means that it may read all of them.
        """
        if self.reads is None:
            return self, None
        return self, list(dict.fromkeys([*(n for n in columns if n != self.makes), *self.reads]))

    def schema(self, before: pa.Schema) -> pa.Schema:
        """Returns the schema after the transform, ROW_NUMBER last if `before` has it.

        Reads no rows.

        Raises:
            SourceError: A column is missing; names it.
        """
        after = self.columns(pa.schema([f for f in before if f.name != ROW_NUMBER]))
        if ROW_NUMBER in after.names:
            raise self.error(
                f"column {ROW_NUMBER!r} is kept for row numbers", "Choose another name."
            )
        return with_row_numbers(after) if ROW_NUMBER in before.names else after

    def scan(self, batch: pa.RecordBatch) -> Scan:
        """Returns the transformed batch, and the rows on which the transform failed."""
        schema = self.schema(batch.schema)
        after = self.rows(Rows(batch.select(data_columns(batch.schema)), row_numbers(batch, 0)))
        arrays = list(after.batch.columns)
        if ROW_NUMBER in batch.schema.names:
            arrays.append(pa.array(after.numbers, pa.int64()))
        return Scan(pa.record_batch(arrays, schema=schema), after.rejects)

    def __call__(self, batch: pa.RecordBatch | ShardedSource) -> pa.RecordBatch | TransformedSource:
        """Transforms a batch, or makes a TransformedSource of a source.

        Raises:
            ConfigError: `batch` is neither.
            SourceError: The transform failed on a row of a batch; names the first.
        """
        if not isinstance(batch, pa.RecordBatch):
            require(
                attribute_of(batch, "schema") is not None,
                str(self),
                f"{type(batch).__name__} is neither a RecordBatch nor a source with a schema",
                "For files, rows or a source of your own, call Pipeline.source().transform().",
            )
            return TransformedSource(batch, self)
        after, rejects = self.scan(batch)
        first = next(bad_of(rejects), None)
        if first is not None:
            raise SourceError(
                at=place(str(self), row=first.row),
                problem=f"{first.reason}: {first.detail}",
                fix="Correct the row.",
            )
        return after

    def __rshift__(self, other: Transform) -> Chain:
        return Chain([self, other]) if isinstance(other, Transform) else NotImplemented

    def __rrshift__(self, other: Transform) -> Chain:
        return Chain([other, self]) if isinstance(other, Transform) else NotImplemented


Narrowed = tuple[ColumnTransform, Sequence[str] | None]


class Chain(ColumnTransform):
    """A chain of transforms, applied in turn, as `a >> b >> c` makes it.

    `(a >> b) >> c` and `a >> (b >> c)` are the same.
    """

    def __init__(self, steps: Sequence[Transform]) -> None:
        require(
            steps,
            "transform",
            "an empty list",
            "Give at least one transform.",
        )
        made = [as_transform(step) for step in steps]
        self.steps: tuple[ColumnTransform, ...] = tuple(
            inner for step in made for inner in (step.steps if isinstance(step, Chain) else (step,))
        )
        self.drops = any(step.drops for step in self.steps)
        self.fan_out = prod(step.fan_out for step in self.steps)
        self.cacheable = all(step.cacheable for step in self.steps)
        self.unversioned = tuple(why for step in self.steps for why in step.unversioned)

    @property
    def fingerprint(self) -> str:
        return digest("chain", [step.fingerprint for step in self.steps])

    def columns(self, before: pa.Schema) -> pa.Schema:
        for step in self.steps:
            before = step.schema(before)
        return before

    def rows(self, rows: Rows) -> Rows:
        rejects = list(rows.rejects)
        for step in self.steps:
            rows = step.rows(Rows(rows.batch, rows.numbers))
            rejects = [*_spread(rejects, step.fan_out), *rows.rejects]
        return Rows(rows.batch, rows.numbers, by_row(rejects))

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> Narrowed:
        schemas = [before]
        for step in self.steps[:-1]:
            schemas.append(step.schema(schemas[-1]))
        wanted: Sequence[str] | None = columns
        narrowed: list[ColumnTransform] = []
        for step, schema in zip(reversed(self.steps), reversed(schemas), strict=True):
            if wanted is not None:
                step, wanted = step.narrow(wanted, schema)
            narrowed.insert(0, step)
        return Chain(narrowed), wanted

    def __repr__(self) -> str:
        return " >> ".join(repr(step) for step in self.steps)


class _Adapted(ColumnTransform):
    """A user's own transform, with the protocol's defaults for attributes that it lacks."""

    def __init__(self, own: Transform) -> None:
        self.own = own
        lacking = {"drops": True, "fan_out": 1, "cacheable": True, "tokens": None}
        for name, value in lacking.items():
            # A user's transform may lack any of these attributes.
            setattr(self, name, getattr(own, name, value))
        if not self.cacheable:
            self.unversioned = (f"the transform {type(own).__name__} is not cacheable",)

    @property
    def fingerprint(self) -> str:
        return self.own.fingerprint

    def columns(self, before: pa.Schema) -> pa.Schema:
        return self.own.schema(before)

    def schema(self, before: pa.Schema) -> pa.Schema:
        return self.own.schema(before)

    def scan(self, batch: pa.RecordBatch) -> Scan:
        scan = attribute_of(self.own, "scan")
        return Scan(self.own(batch), ()) if scan is None else scan(batch)

    def rows(self, rows: Rows) -> Rows:
        arrays = [*rows.batch.columns, pa.array(rows.numbers, pa.int64())]
        batch, rejects = self.scan(
            pa.record_batch(arrays, schema=with_row_numbers(rows.batch.schema))
        )
        numbers = batch.column(ROW_NUMBER).to_numpy()
        return Rows(batch.drop_columns([ROW_NUMBER]), numbers, tuple(rejects))

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> Narrowed:
        narrow = attribute_of(self.own, "narrow")
        if narrow is None:
            return self, None
        own, reads = narrow(columns, before)
        return as_transform(own), reads

    def __repr__(self) -> str:
        return repr(self.own)


class TransformedSource(Source):
    """The rows of a source after a transform; no function is called until rows are asked for.

    Row numbers stay those of the source: a filter leaves gaps (benign rejects, `filtered`), and
    `num_rows` counts the rows before it. After Expand the rows of row r are r * most to r * most +
    most - 1; those that do not exist are benign rejects too (`unfilled`). Thread-safe if the user's
    functions are.
    """

    def __init__(
        self,
        source: ShardedSource,
        transform: Transform | Sequence[Transform],
        *,
        on_error: OnError = "error",
    ) -> None:
        """Reads no rows.

        Args:
            transform: A transform, or several in their order.
            on_error: What happens at a row on which the transform fails. "error" raises
                SourceError, naming file and row; "skip" and "quarantine" leave such rows out and
                list them in `scan(...).rejects`, with the reason.

        Raises:
            ConfigError: It is not a transform, or `on_error` is not one of these options.
            SourceError: The columns do not fit.
        """
        require_option(on_error, get_args(OnError), "on_error")
        self.source = source
        self.waits = isinstance(source, Source) and source.waits
        self.transform = as_transform(transform)
        self.on_error: OnError = on_error
        self._factor = self.transform.fan_out
        self._columns: tuple[str, ...] | None = None
        self._reads: tuple[str, ...] | None = None
        if self._factor > 1 and unit_of(source) == "bytes":
            problem = (
                "gives rows numbers of their own, and streaming does not count the lines of "
                "these files"
            )
            raise SourceError(
                at=str(self.transform),
                problem=problem,
                fix="Leave streaming out, or give parquet or Arrow files.",
            )
        self._numbered = (
            ROW_NUMBER in source.schema.names or on_error != "error" or self.transform.drops
        )
        self._schema = self._after(source.schema)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def shards(self) -> Sequence[Shard]:
        shards, k = self.source.shards, self._factor
        if k == 1:
            return shards
        return tuple(
            replace(
                shard,
                num_rows=None if shard.num_rows is None else shard.num_rows * k,
                cuts=tuple(cut * k for cut in shard.cuts),
            )
            for shard in shards
        )

    @property
    def fingerprint(self) -> str:
        return digest(
            "transformed", self.transform.fingerprint, self.source.fingerprint, self._columns
        )

    @property
    def info(self) -> SourceInfo:
        below, own = info_of(self.source), self.transform.tokens
        return SourceInfo(
            tokens=own or below.tokens,
            turns=below.turns if own is None else None,
            cacheable=self.transform.cacheable and below.cacheable,
            unversioned=(*below.unversioned, *self.transform.unversioned),
            aligned=tuple(name for name in below.aligned if name in self._schema.names),
        )

    @property
    def below(self) -> ShardedSource:
        """The source before the transform."""
        return self.source

    def shard_identity(self, shard: int) -> str:
        """Returns a digest of one shard below and the transform; new shards do not change it."""
        own = identity_of(self.source, shard)
        return digest("transformed", self.transform.fingerprint, own, self._columns)

    def select(self, columns: Sequence[str]) -> TransformedSource:
        """Returns the same rows with only `columns`; reads only what they need."""
        narrowed = copy.copy(self)
        narrowed.transform, reads = self.transform.narrow(
            list(columns), without_row_numbers(self.source.schema)
        )
        narrowed._columns = tuple(columns)
        if reads is not None:
            narrowed.source = select(self.source, list(reads))
        narrowed._reads = None if reads is None else tuple(reads)
        narrowed._schema = narrowed._after(narrowed.source.schema)
        return narrowed

    def fetched(self, shard: int, start: int, stop: int) -> AbstractContextManager[None]:
        return fetched(self.source, shard, start // self._factor, -(-stop // self._factor))

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """Returns rows `start` to `stop`, and the rows that were refused or left out.

        Each refused row is a reject of its own; all rows that a filter left out are one reject.
        """
        k, info = self._factor, self.shards[shard]
        require_rows(start, stop, info.num_rows, info.name)
        first, last = start // k, -(-stop // k)
        batch, below = scan(self.source, shard, first, last)
        given = self._given(batch, first)
        after, own = self.transform.scan(given)
        bad = next(bad_of(own), None)
        if bad is not None and self.on_error == "error":
            raise SourceError(
                at=place_of(self.source, shard, bad.row // k),
                problem=f"{bad.reason}: {bad.detail}",
                fix="Correct the row or the function, or set on_error to 'skip' or 'quarantine'.",
            )
        if k > 1:  # benign rejects count among the unfilled numbers
            below, own = _spread(bad_of(below), k), tuple(bad_of(own))
        rejects = [reject for reject in (*below, *own) if start <= reject.row < stop]
        if k > 1:
            numbers = after.column(ROW_NUMBER).to_numpy()
            a, b = np.searchsorted(numbers, [start, stop])
            after = after.slice(int(a), int(b - a))
            expected = np.arange(start, stop)
            left_out = stop - start - after.num_rows - len(rejects)
        else:
            expected = given.column(ROW_NUMBER).to_numpy()
            left_out = batch.num_rows - after.num_rows - sum(reject.count for reject in own)
        if left_out:
            rejects.append(self._left_out(left_out, expected, after, rejects))
        wanted = [after.column(name) for name in self._schema.names]
        return Scan(pa.record_batch(wanted, schema=self._schema), by_row(rejects))

    def at_end(self, shard: int, position: int) -> bool:
        counted = self.shards[shard].num_rows is not None
        return super().at_end(shard, position if counted else position // self._factor)

    def raw(self, shard: int, row: int) -> str | None:
        """Returns a row as it is in its file, before any transform; None if that is unknown."""
        return raw_of(self.source, shard, row // self._factor)

    def _after(self, before: pa.Schema) -> pa.Schema:
        """Returns the schema of the rows, if the source below has the schema `before`."""
        if self._reads is not None:
            before = pa.schema([before.field(name) for name in self._reads])
        after = self.transform.schema(without_row_numbers(before))
        if self._columns is not None:
            after = pa.schema([after.field(name) for name in self._columns])
        return with_row_numbers(after) if self._numbered else pa.schema(list(after))

    def _given(self, batch: pa.RecordBatch, start: int) -> pa.RecordBatch:
        """Returns what the transform is given: the columns that it reads, and row numbers."""
        data = batch.select(list(self._reads or data_columns(batch.schema)))
        schema = with_row_numbers(data.schema)
        return pa.record_batch(
            [*data.columns, pa.array(row_numbers(batch, start), pa.int64())], schema=schema
        )

    def _left_out(
        self,
        count: int,
        expected: Int64,
        after: pa.RecordBatch,
        rejects: Sequence[Reject],
    ) -> Reject:
        """Returns one reject for all rows that are neither refused nor in the result."""
        refused = np.array([reject.row for reject in rejects], np.int64)
        seen = np.concatenate([after.column(ROW_NUMBER).to_numpy(), refused])
        row = int(np.setdiff1d(expected, seen)[0])
        reason, detail = "filtered", "left out by a filter"
        if self._factor > 1:
            reason = "unfilled"
            detail = f"fewer than {self._factor} rows came of one, or a filter left it out"
        return Reject(row=row, reason=reason, detail=detail, benign=True, count=count)


def as_transform(value: Transform | Sequence[Transform]) -> ColumnTransform:
    """Returns `value` with the protocol's defaults for what it lacks; a list becomes a chain.

    Raises:
        ConfigError: `value` is neither a transform nor a list of them.
    """
    if isinstance(value, list | tuple):
        return Chain(value)
    if isinstance(value, ColumnTransform):
        return value
    if isinstance(value, Transform):
        return _Adapted(value)
    fix = (
        "Wrap a function: Map(function)."
        if callable(value)
        else "Give easypipe.transforms, as in Rename(...) >> Select(...)."
    )
    raise ConfigError(at="transform", problem=f"{value!r} is not a transform", fix=fix)


def overlaid(before: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Returns the schema with columns of these types, which replace those of their name.

    Columns of other names are put at the end.
    """
    rest = dict(types)
    same = [pa.field(f.name, rest.pop(f.name)) if f.name in rest else f for f in before]
    return pa.schema([*same, *(pa.field(name, kind) for name, kind in rest.items())])


def as_array(values: Any, kind: pa.DataType) -> pa.Array:
    """Returns values of any kind, also an Arrow array, as an array of type `kind`."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        return values if values.type.equals(kind) else cast_array(values, kind)
    return typed_array(values, kind)


def _spread(rejects: Iterable[Reject], factor: int) -> tuple[Reject, ...]:
    """Returns rejects, each numbered as the first of the `factor` rows that its row becomes."""
    return tuple(replace(reject, row=reject.row * factor) for reject in rejects)
