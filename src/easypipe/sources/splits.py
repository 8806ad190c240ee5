"""Parts of a split by row numbers: `train[:10%]`, `train[100:200]`, or its first `num_rows`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, require
from easypipe.core.protocols import (
    Scan,
    Shard,
    ShardedSource,
    Source,
    SourceInfo,
    fetched,
    identity_of,
    info_of,
    raw_of,
    scan,
    select,
)
from easypipe.core.schema import ROW_NUMBER

_WORDS = re.compile(r"(?P<name>[^\[\]+]+)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of a split, over its files in order.

    Bounds are rows, or percentages of all rows (`10%`), counted from the end if they are negative;
    percentages are rounded to the nearest row.

    Args:
        text: The split as it was written.
        start: The first bound; None begins at the first row.
        stop: The second bound; None goes to the last row.
        limits: Whether this is a limit (`num_rows`): the first rows, or all if there are fewer.
            Later rows are not counted.
    """

    text: str
    start: str | None
    stop: str | None
    limits: bool = False

    @property
    def first_rows(self) -> int | None:
        """How many first rows contain it; None if that depends on the number of rows."""
        start = self.start or "0"
        counted = start == "0%" or start.isdigit()
        return int(self.stop) if counted and self.stop is not None and self.stop.isdigit() else None

    def rows(self, num_rows: int, at: str = "split") -> tuple[int, int]:
        """Returns the first row, and the row after the last one.

        Args:
            num_rows: How many rows there are.
            at: The name of the part in errors.

        Raises:
            ConfigError: The part does not contain any of the `num_rows` rows.
        """
        start, stop = _bound(self.start, num_rows, 0), _bound(self.stop, num_rows, num_rows)
        require(
            start < stop,
            at,
            f"{self.text!r} holds none of the {num_rows} rows",
            "Correct its bounds.",
        )
        return start, stop


def parse_split(text: str) -> tuple[str, Part | None]:
    """Returns the name of a split, and the part that is asked for; None for the whole split.

    Raises:
        ConfigError: The text is neither a name nor a part of a split.
    """
    found = _WORDS.fullmatch(text)
    if found is None:
        several = "+" in text
        raise ConfigError(
            at="split",
            problem=f"{text!r} names {'several splits' if several else 'no split'}",
            fix="Make each a dataset of its own."
            if several
            else "Write a name, or a part of it: train[:10%], train[100:200].",
        )
    name, start, stop = found["name"], found["start"], found["stop"]
    for bound in (start, stop):
        require(
            bound is None or not bound.endswith("%") or abs(int(bound[:-1])) <= 100,
            "split",
            f"{text!r}: {bound} of the rows are more than all",
            "Give at most 100%.",
        )
    return name, None if found.end("name") == len(text) else Part(text, start, stop)


def _bound(bound: str | None, num_rows: int, default: int) -> int:
    if bound is None:
        return default
    row = round(num_rows * int(bound[:-1]) / 100) if bound.endswith("%") else int(bound)
    return min(max(row + num_rows if bound.startswith("-") else row, 0), num_rows)


class PartialSource(Source):
    """The rows of one part of a source, over its shards in order.

    A shard that begins in the middle of a file is named `file[first:last]`, and its rows count from
    0. Opening it counts all rows.

    Args:
        source: All rows.
        part: The part.
        at: The name of the part in errors.

    Raises:
        SourceError: Rows cannot be counted.
        ConfigError: The part is empty.
    """

    def __init__(self, source: ShardedSource, part: Part, at: str = "split") -> None:
        self.source, self.part, self._at = source, part, at
        self.waits = isinstance(source, Source) and source.waits
        self._known: tuple[tuple[Shard, int, int], ...] | None = None

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    @property
    def shards(self) -> Sequence[Shard]:
        return tuple(shard for shard, _, _ in self._pieces)

    @property
    def fingerprint(self) -> str:
        below = self.source.fingerprint
        if self.part.limits:
            return digest("limit", self.part.first_rows, below)
        return digest("part", self.part.start, self.part.stop, below)

    @property
    def info(self) -> SourceInfo:
        return replace(info_of(self.source), uncounted=False)

    @property
    def below(self) -> ShardedSource:
        return self.source

    def shard_identity(self, shard: int) -> str:
        _, inner, first = self._pieces[shard]
        whole = identity_of(self.source, inner)
        return digest(whole, first) if first else whole

    def select(self, columns: Sequence[str]) -> PartialSource:
        """Returns the same rows with only `columns`, if the source can leave out the others."""
        return PartialSource(select(self.source, columns), self.part, self._at)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        inner, first = self._place(shard, stop)
        return _counted_from(self.source.read(inner, first + start, first + stop), first)

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        inner, first = self._place(shard, stop)
        batch, rejects = scan(self.source, inner, first + start, first + stop)
        return Scan(
            _counted_from(batch, first),
            tuple(replace(reject, row=reject.row - first) for reject in rejects),
        )

    def fetched(self, shard: int, start: int, stop: int) -> AbstractContextManager[None]:
        inner, first = self._place(shard, stop)
        return fetched(self.source, inner, first + start, first + stop)

    def raw(self, shard: int, row: int) -> str | None:
        _, inner, first = self._pieces[shard]
        return raw_of(self.source, inner, first + row)

    def _place(self, shard: int, stop: int) -> tuple[int, int]:
        """Returns a shard's number in the source below, and the row at which it begins there."""
        here, inner, first = self._pieces[shard]
        if stop > (here.num_rows or 0):
            told = "num_rows leaves" if self.part.limits else "The part of the split has"
            raise SourceError(
                at=here.name,
                problem=f"row {stop - 1} was asked for",
                fix=f"{told} rows 0:{here.num_rows}{' of it' if self.part.limits else ''}.",
            )
        return inner, first

    @property
    def _pieces(self) -> tuple[tuple[Shard, int, int], ...]:
        """Every shard, its number in the source below, and the row at which it begins there."""
        if self._known is None:
            self._known = tuple(_cut(self.source.shards, self.part, self._at))
        return self._known


def _counted_from(batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
    """Returns a batch whose row numbers count from row `first`."""
    if not first or ROW_NUMBER not in batch.schema.names:
        return batch
    at = batch.schema.get_field_index(ROW_NUMBER)
    numbers = pa.array(batch.column(at).to_numpy() - first, batch.schema.field(at).type)
    return batch.set_column(at, batch.schema.field(at), numbers)


def limited(source: ShardedSource, num_rows: int) -> PartialSource:
    """Returns the first `num_rows` physical rows of a source, or all if it has fewer.

    They are counted before any are rejected.

    Raises:
        ConfigError: The limit is below 1.
    """
    require(
        num_rows >= 1,
        "num_rows",
        f"{num_rows} rows are not a dataset",
        "Give at least 1, or None for all rows.",
    )
    return PartialSource(source, Part(f"[:{num_rows}]", None, str(num_rows), limits=True))


def _cut(shards: Sequence[Shard], part: Part, at: str) -> Iterator[tuple[Shard, int, int]]:
    """Yields (shard, its number in the source below, the row at which it begins there)."""
    start, stop = 0, part.first_rows or 0
    if not part.limits:
        start, stop = part.rows(sum(_counted(shard, part) for shard in shards), at)
    before = 0
    for number, shard in enumerate(shards):
        if before >= stop:
            break
        count = _counted(shard, part)
        a, b = max(start - before, 0), min(stop - before, count)
        before += count
        if a >= b and not part.limits:
            continue
        name = f"{shard.name}[{a}:{b}]" if a else shard.name
        cuts = (0, *(cut - a for cut in shard.cuts if a < cut < b))
        size = shard.num_bytes * (b - a) // max(1, count)
        yield replace(shard, name=name, num_rows=b - a, cuts=cuts, num_bytes=size), number, a


def _counted(shard: Shard, part: Part) -> int:
    if shard.num_rows is not None:
        return shard.num_rows
    if part.limits:
        problem, fix = "cannot be counted, so num_rows cannot be kept", "Leave num_rows out."
    else:
        problem = f"are not counted, so which of them {part.text!r} is stays unknown"
        fix = "Take the first rows by num_rows, or leave streaming out."
    raise SourceError(at=shard.name, problem=f"its rows {problem}", fix=fix)
