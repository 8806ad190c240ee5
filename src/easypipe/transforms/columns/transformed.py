"""A transform applied to a source: a source again, and as lazy as the one below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, did_you_mean, place
from easypipe.core.protocols import (
    Reject,
    Scan,
    Shard,
    ShardedDataSource,
    ShardedSource,
    Transform,
    scan,
)
from easypipe.core.schema import ROW_NUMBER
from easypipe.transforms.columns.base import as_transform, fan_out_of, narrow, scan_with

OnError = Literal["error", "skip", "quarantine"]


class TransformedSource(ShardedDataSource):
    """The rows of a source after a transform; implements ScanningSource. No function is called
    before rows are asked for.

    Row numbers stay those of the source: a filter leaves gaps (benign rejects, `filtered`), and
    `num_rows` counts before it. After Expand the rows of row r are r * most to r * most + most - 1;
    those that do not exist are benign rejects too (`unfilled`).
    on_error: "error" raises SourceError at the first row on which the transform failed, naming file
    and row; "skip" and "quarantine" leave such rows out and list them in `scan(...).rejects`, with
    the reason. Thread safe as far as the user's functions are.
    """

    def __init__(
        self,
        source: ShardedSource,
        transform: Transform | Sequence[Transform],
        *,
        on_error: OnError = "error",
    ) -> None:
        """Raises ConfigError for what is no transform or option, SourceError where the columns do
        not fit. Reads no rows.
        """
        if on_error not in get_args(OnError):
            have = get_args(OnError)
            raise ConfigError(
                at="on_error",
                problem=f"{on_error!r} is not an option",
                have=have,
                fix=did_you_mean(str(on_error), have),
            )
        self.source = source
        self.transform = as_transform(transform)
        self.on_error: OnError = on_error
        self._factor = fan_out_of(self.transform)
        self._columns: tuple[str, ...] | None = None
        self._reads: tuple[str, ...] | None = None
        if self._factor > 1 and self.rows_are_bytes:
            problem = "gives rows numbers of their own, and streaming does not count the lines of these files"
            raise SourceError(
                at=str(self.transform),
                problem=problem,
                fix="Leave streaming out, or give parquet or Arrow files.",
            )
        self._numbered = (
            ROW_NUMBER in source.schema.names
            or on_error != "error"
            or getattr(self.transform, "drops", True)
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
    def cacheable(self) -> bool:
        """Whether the next process will know these rows by the same fingerprint."""
        return getattr(self.transform, "cacheable", True) and getattr(
            self.source, "cacheable", True
        )

    @property
    def tokens(self) -> Any:
        """Whose tokens the rows hold, where the transform made them, or the source below knows."""
        return getattr(self.transform, "tokens", None) or getattr(self.source, "tokens", None)

    @property
    def rows_are_bytes(self) -> bool:
        """Whether rows are numbered by the byte at which they begin, as files that are read forward
        number them.
        """
        return bool(getattr(self.source, "rows_are_bytes", False))

    def shard_identity(self, shard: int) -> str:
        """Of one shard below and the transform, so that new shards leave the old ones what they
        are.
        """
        source: Any = self.source
        identity = getattr(source, "shard_identity", None)
        own = (
            identity(shard)
            if identity is not None
            else digest(source.fingerprint, source.shards[shard].name)
        )
        return digest("transformed", self.transform.fingerprint, own, self._columns)

    def select(self, columns: Sequence[str]) -> TransformedSource:
        """The same rows with only `columns`; below, only what those are made of is read."""
        before = _without_numbers(self.source.schema)
        transform, reads = narrow(self.transform, list(columns), before)
        below: Any = self.source
        select = getattr(below, "select", None)
        source = below if reads is None or select is None else select(list(reads))
        twin = TransformedSource.__new__(TransformedSource)
        twin.source, twin.transform, twin.on_error, twin._factor = (
            source,
            transform,
            self.on_error,
            self._factor,
        )
        twin._columns, twin._reads = tuple(columns), None if reads is None else tuple(reads)
        twin._numbered = self._numbered
        twin._schema = twin._after(source.schema)
        return twin

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self.scan(shard, start, stop).batch

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """Rows `start` to `stop`, and those refused: by the source, by the transform, and, in one,
        those that it left out.
        """
        k, info = self._factor, self.shards[shard]
        if not 0 <= start <= stop or (info.num_rows is not None and stop > info.num_rows):
            raise SourceError(
                at=info.name,
                problem=f"rows {start}:{stop} were asked for",
                fix=f"It has rows 0:{info.num_rows}.",
            )
        first, last = start // k, -(-stop // k)
        batch, below = scan(self.source, shard, first, last)
        given = self._given(batch, first)
        after, own = scan_with(self.transform, given)
        if own and self.on_error == "error":
            bad = next((reject for reject in own if not reject.benign), None)
            if bad is not None:
                raise self._refusal(info.name, bad)
        if k > 1:  # benign ones below are among the numbers that stay unfilled
            below = tuple(
                replace(reject, row=reject.row * k) for reject in below if not reject.benign
            )
        rejects = [reject for reject in (*below, *own) if start <= reject.row < stop]
        if k > 1:
            numbers = after.column(ROW_NUMBER).to_numpy()
            a, b = np.searchsorted(numbers, [start, stop])
            after = after.slice(int(a), int(b - a))
            left_out = stop - start - after.num_rows - len(rejects)
            expected = np.arange(start, stop)
        else:
            left_out = batch.num_rows - after.num_rows - len(own)
            expected = given.column(ROW_NUMBER).to_numpy()
        if left_out:
            rejects.append(self._left_out(left_out, expected, after, rejects))
        wanted = [after.column(name) for name in self._schema.names]
        return Scan(
            pa.RecordBatch.from_arrays(wanted, schema=self._schema),
            tuple(sorted(rejects, key=lambda reject: reject.row)),
        )

    def raw(self, shard: int, row: int) -> str | None:
        """A row as it stands in its file, before any transform; None where the source cannot
        tell.
        """
        raw = getattr(self.source, "raw", None)
        return None if raw is None else raw(shard, row // self._factor)

    def _after(self, before: pa.Schema) -> pa.Schema:
        if self._reads is not None:
            before = pa.schema([before.field(name) for name in self._reads])
        after = self.transform.schema(_without_numbers(before))
        names = after.names if self._columns is None else self._columns
        fields = [after.field(name) for name in names]
        return pa.schema([*fields, pa.field(ROW_NUMBER, pa.int64())] if self._numbered else fields)

    def _given(self, batch: pa.RecordBatch, start: int) -> pa.RecordBatch:
        """What the transform is given: the columns that it reads, and row numbers."""
        if ROW_NUMBER in batch.schema.names:
            numbers = batch.column(ROW_NUMBER)
        else:
            numbers = pa.array(np.arange(start, start + batch.num_rows, dtype=np.int64))
        names = [name for name in (self._reads or batch.schema.names) if name != ROW_NUMBER]
        schema = pa.schema(
            [*(batch.schema.field(name) for name in names), pa.field(ROW_NUMBER, pa.int64())]
        )
        return pa.RecordBatch.from_arrays(
            [*(batch.column(name) for name in names), numbers], schema=schema
        )

    def _left_out(
        self,
        count: int,
        expected: NDArray[np.int64],
        after: pa.RecordBatch,
        rejects: Sequence[Reject],
    ) -> Reject:
        """One that stands for all rows which are neither there nor refused."""
        seen = np.concatenate(
            [
                after.column(ROW_NUMBER).to_numpy(),
                np.array([reject.row for reject in rejects], np.int64),
            ]
        )
        row = int(np.setdiff1d(expected, seen)[0])
        if self._factor == 1:
            return Reject(
                row=row, reason="filtered", detail="left out by a filter", benign=True, count=count
            )
        detail = f"fewer than {self._factor} rows came of one, or a filter left it out"
        return Reject(row=row, reason="unfilled", detail=detail, benign=True, count=count)

    def _refusal(self, name: str, bad: Reject) -> SourceError:
        return SourceError(
            at=f"{name}, line at byte {bad.row}"
            if self.rows_are_bytes
            else place(name, row=bad.row // self._factor),
            problem=f"{bad.reason}: {bad.detail}",
            fix="Correct the row or the function, or set on_error to 'skip' or 'quarantine'.",
        )


def _without_numbers(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if field.name != ROW_NUMBER])
