"""What transforms share: rows keep their numbers, `>>` chains them, and a transform of a source is
a source.

clean = Rename({"body": "text"}) >> FilterNonEmpty("text") >> Select("text")
clean(batch)      # a RecordBatch
clean(source)     # a TransformedSource: lazy, nothing is read before it is asked for
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, did_you_mean, place
from easypipe.core.protocols import Reject, Scan, Transform
from easypipe.core.schema import ROW_NUMBER


@dataclass(frozen=True)
class Rows:
    """Rows on their way through a transform. `numbers` Int64[rows] are their row numbers; `batch`
    has no column of them.
    """

    batch: pa.RecordBatch
    numbers: NDArray[np.int64]
    rejects: tuple[Reject, ...] = ()


class ColumnTransform(ABC):
    """The base of this package's transforms; implements Transform. A subclass says what becomes of
    a schema and of rows.

    Equal fingerprints mean equal rows: a subclass puts all its options into `fingerprint`.
    """

    drops: bool = False
    fan_out: int = 1
    cacheable: bool = True

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def columns(self, before: pa.Schema) -> pa.Schema:
        """The schema after. Neither has ROW_NUMBER. Raises SourceError for a column that is not
        there or cannot be used so.
        """

    @abstractmethod
    def rows(self, rows: Rows) -> Rows:
        """What becomes of rows. Only rows on which it failed are rejects; what it drops on purpose
        is in neither.
        """

    def narrow(
        self, columns: Sequence[str], before: pa.Schema
    ) -> tuple[Transform, Sequence[str] | None]:
        """A transform with the same rows that needs to give only `columns`, and what it reads; None
        where that is everything.
        """
        return self, None

    def schema(self, before: pa.Schema) -> pa.Schema:
        """The schema after, ROW_NUMBER last where `before` has it. Reads no rows; raises
        SourceError naming a column that is missing.
        """
        after = self.columns(_plain(before))
        if ROW_NUMBER in after.names:
            raise SourceError(
                at=str(self),
                problem=f"column {ROW_NUMBER!r} is kept for row numbers",
                fix="Choose another name.",
            )
        return (
            after.append(pa.field(ROW_NUMBER, pa.int64())) if ROW_NUMBER in before.names else after
        )

    def scan(self, batch: pa.RecordBatch) -> Scan:
        """The batch transformed, and the rows on which that failed."""
        schema = self.schema(batch.schema)
        numbered = ROW_NUMBER in batch.schema.names
        numbers = (
            batch.column(ROW_NUMBER).to_numpy()
            if numbered
            else np.arange(batch.num_rows, dtype=np.int64)
        )
        data = batch.drop_columns([ROW_NUMBER]) if numbered else batch
        after = self.rows(Rows(data, numbers))
        arrays = after.batch.columns
        if numbered:
            arrays = [*arrays, pa.array(after.numbers, pa.int64())]
        return Scan(pa.RecordBatch.from_arrays(arrays, schema=schema), after.rejects)

    def __call__(self, batch: Any) -> Any:
        """A batch gives a batch, a source a TransformedSource. Raises SourceError for the first row
        on which it failed.
        """
        if not isinstance(batch, pa.RecordBatch):
            from easypipe.transforms.columns.transformed import TransformedSource

            return TransformedSource(batch, self)
        after, rejects = self.scan(batch)
        first = next((reject for reject in rejects if not reject.benign), None)
        if first is not None:
            raise SourceError(
                at=place(str(self), row=first.row),
                problem=f"{first.reason}: {first.detail}",
                fix="Correct the row.",
            )
        return after

    def __rshift__(self, other: Transform) -> Chain:
        if not is_transform(other):
            return NotImplemented
        return Chain([self, other])

    def __rrshift__(self, other: Transform) -> Chain:
        if not is_transform(other):
            return NotImplemented
        return Chain([other, self])


class Chain(ColumnTransform):
    """One transform after the other; what `a >> b >> c` makes. `(a >> b) >> c` and `a >> (b >> c)`
    are one and the same.
    """

    def __init__(self, steps: Sequence[Transform]) -> None:
        if not steps:
            raise ConfigError(
                at="transform", problem="an empty list", fix="Give at least one transform."
            )
        for step in steps:
            if not is_transform(step):
                fix = (
                    "Wrap a function: Map(function)."
                    if callable(step)
                    else "Give easypipe.transforms, as in Rename(...) >> Select(...)."
                )
                raise ConfigError(at="transform", problem=f"{step!r} is no transform", fix=fix)
        self.steps: tuple[Transform, ...] = tuple(
            inner
            for step in steps
            for inner in (step.steps if isinstance(step, Chain) else (step,))
        )
        self.drops = any(getattr(step, "drops", True) for step in self.steps)
        self.fan_out = int(np.prod([fan_out_of(step) for step in self.steps], dtype=np.int64))
        self.cacheable = all(getattr(step, "cacheable", True) for step in self.steps)

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
            factor = fan_out_of(step)
            if factor > 1:
                rejects = [replace(reject, row=reject.row * factor) for reject in rejects]
            if isinstance(step, ColumnTransform):
                rows = step.rows(Rows(rows.batch, rows.numbers))
            else:
                rows = _foreign(step, rows)
            rejects += rows.rejects
        return Rows(rows.batch, rows.numbers, tuple(sorted(rejects, key=lambda reject: reject.row)))

    def narrow(
        self, columns: Sequence[str], before: pa.Schema
    ) -> tuple[Transform, Sequence[str] | None]:
        schemas = [before]
        for step in self.steps[:-1]:
            schemas.append(step.schema(schemas[-1]))
        wanted: Sequence[str] | None = columns
        narrowed: list[Transform] = []
        for step, schema in zip(reversed(self.steps), reversed(schemas), strict=True):
            if wanted is not None:
                step, wanted = narrow(step, wanted, schema)
            narrowed.insert(0, step)
        return Chain(narrowed), wanted

    def __repr__(self) -> str:
        return " >> ".join(repr(step) for step in self.steps)


def is_transform(value: object) -> bool:
    return (
        callable(value)
        and callable(getattr(value, "schema", None))
        and hasattr(value, "fingerprint")
    )


def as_transform(value: Transform | Sequence[Transform]) -> Transform:
    """A transform as it is, a list of them as a chain. Raises ConfigError for anything else."""
    if isinstance(value, list | tuple):
        return Chain(value)
    return value if is_transform(value) else Chain([value])  # type: ignore[list-item, return-value]


def fan_out_of(transform: Transform) -> int:
    return getattr(transform, "fan_out", 1)


def scan_with(transform: Transform, batch: pa.RecordBatch) -> Scan:
    """`transform.scan` where there is one, else the transform with nothing refused."""
    own = getattr(transform, "scan", None)
    return Scan(transform(batch), ()) if own is None else own(batch)


def narrow(
    transform: Transform, columns: Sequence[str], before: pa.Schema
) -> tuple[Transform, Sequence[str] | None]:
    own = getattr(transform, "narrow", None)
    return (transform, None) if own is None else own(columns, before)


def require_columns(names: Sequence[str], schema: pa.Schema, at: str) -> None:
    """Raises SourceError for the first name that is no column."""
    for name in names:
        if name not in schema.names:
            raise SourceError(
                at=at,
                problem=f"no column {name!r}",
                have=schema.names,
                fix=did_you_mean(name, schema.names),
            )


def column_names(names: tuple[str | Sequence[str], ...], of: str) -> tuple[str, ...]:
    """`("a", "b")` or `(["a", "b"],)` as names. Raises ConfigError where there is none, or one
    stands twice.
    """
    flat = tuple(names[0]) if len(names) == 1 and not isinstance(names[0], str) else names
    if (
        not flat
        or not all(isinstance(name, str) and name for name in flat)
        or len(set(flat)) < len(flat)
    ):
        raise ConfigError(
            at=of,
            problem=f"expected different column names, got {names!r}",
            fix=f'Write {of}("text").',
        )
    return flat  # type: ignore[return-value]


def _plain(schema: pa.Schema) -> pa.Schema:
    return pa.schema(
        [pa.field(field.name, field.type) for field in schema if field.name != ROW_NUMBER]
    )


def _foreign(step: Transform, rows: Rows) -> Rows:
    """A step that knows nothing of Rows: it takes and gives batches with ROW_NUMBER."""
    schema = rows.batch.schema.append(pa.field(ROW_NUMBER, pa.int64()))
    numbered = pa.RecordBatch.from_arrays(
        [*rows.batch.columns, pa.array(rows.numbers, pa.int64())], schema=schema
    )
    batch, rejects = scan_with(step, numbered)
    return Rows(
        batch.drop_columns([ROW_NUMBER]), batch.column(ROW_NUMBER).to_numpy(), tuple(rejects)
    )
