# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Protocols of sources, transforms, stages and loaders; what a source declares; rejects of rows.

The docstrings state laws; tests/laws.py checks every implementation against them.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import EasypipeError, SourceError, place, require_known
from easypipe.core.identity import name_of, raise_named
from easypipe.core.schema import ROW_NUMBER, data_columns
from easypipe.core.values import Batch, Int64, Record


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a source that can be read on its own, usually one file.

    Args:
        name: The name of the shard, unique in its source.
        num_rows: Physical records before any filter; None if they cannot be counted.
        cuts: Ascending row numbers (0 first) at which reading can start cheaply; starting elsewhere
            costs more.
        num_bytes: The stored size, 0 if unknown; used to divide work evenly, never for correctness.
    """

    name: str
    num_rows: int | None
    cuts: tuple[int, ...] = (0,)
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A record that was read and not passed on (docs/glossary.md: "rejected record").

    Args:
        row: The record's physical number in its shard.
        reason: A short fixed word, used as key in the ledger: "null", "empty", "not_a_string",
            "unparsable", ...
        detail: A message about what was wrong with this record.
        benign: Whether the record is counted but not charged to the error budget, like a blank line
            or a record that a filter drops.
        count: How many records of the range were rejected in the same way; `row` is the first. It
            is above 1 only if they are benign or, in the stored record of a range, consecutive.
    """

    row: int
    reason: str
    detail: str = ""
    benign: bool = False
    count: int = 1


def left_out(rows: Sequence[int] | Int64, reason: str, detail: str = "") -> tuple[Reject, ...]:
    """Returns one benign Reject for all of `rows`.

    They are only counted, because there may be millions.

    Args:
        rows: Ascending record numbers of one range, all rejected in the same way.
        reason: As in Reject.
        detail: As in Reject.

    Returns:
        One Reject with the first row and their count; () if there are no rows.
    """
    return (
        (Reject(row=int(rows[0]), reason=reason, detail=detail, benign=True, count=len(rows)),)
        if len(rows)
        else ()
    )


def bad_of(rejects: Iterable[Reject]) -> Iterator[Reject]:
    """Yields the rejects that are not benign, which are charged to the error budget."""
    for reject in rejects:
        if not reject.benign:
            yield reject


def by_row(rejects: Iterable[Reject]) -> tuple[Reject, ...]:
    """Returns the rejects in ascending order of their rows."""
    return tuple(sorted(rejects, key=lambda reject: reject.row))


def counted(rejects: Iterable[Reject]) -> tuple[Reject, ...]:
    """Merges the benign rejects of one range that have the same reason and detail.

    Returns:
        The rejects by ascending row, each merged one at its first row with the sum of the counts.
    """
    kept: list[Reject] = []
    first: dict[tuple[str, str], Reject] = {}
    counts = Counter[tuple[str, str]]()
    for reject in by_row(rejects):
        if reject.benign:
            counts[reject.reason, reject.detail] += reject.count
            first.setdefault((reject.reason, reject.detail), reject)
        else:
            kept.append(reject)
    kept += [replace(reject, count=counts[key]) for key, reject in first.items()]
    return by_row(kept)


class Scan(NamedTuple):
    """The records of a range that was read, and the rejected ones.

    Attributes:
        batch: The good records; it has the column ROW_NUMBER if it may hold fewer rows than were
            requested.
        rejects: The rejected records of the range.
    """

    batch: pa.RecordBatch
    rejects: tuple[Reject, ...]


@runtime_checkable
class ShardedSource(Protocol):
    """A dataset as rows in shards that can be read independently of each other.

    Law (stateless reads): for a ≤ b ≤ c, `read(s, a, b)` and `read(s, b, c)` together return the
    rows of `read(s, a, c)`, on any thread and in any order. Row numbers are physical records: a
    source that filters returns fewer rows, each with its number in the column `__row_number__`; a
    source whose schema lacks that column returns exactly `stop - start` rows.
    """

    @property
    def schema(self) -> pa.Schema: ...
    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def fingerprint(self) -> str:
        """A hex digest of everything that decides what `read` returns."""
        ...

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        """Reads a range of rows of one shard.

        Args:
            shard: Index into `shards`.
            start: The first row.
            stop: The row after the last one.

        Raises:
            SourceError: The rows cannot be read; the error names the file, and the row if a single
                one is bad.
        """
        ...


Sources = dict[str, ShardedSource]  # what stages pass on: datasets by name


class ShardedDataSource:
    """The base class of users' own sources: shards by name, whose rows are read one at a time.

    Every source of easypipe has these methods. Your own source defines `shard_names` and
    `open_shard`, which must yield the same rows whenever a shard is opened. If it defines
    `open_shard_at_row`, also without `open_shard`, reading can start at any row and rows are not
    stored with the tokens. A source that defines `shards` instead of `shard_names` says how many
    rows there are, if that is known; another number of rows is an error. `version`, a text or
    number, identifies the rows: change it when they change. A class with `schema`, `shards`,
    `fingerprint` and `read` is a ShardedSource, and inherits the rest.
    """

    # `self` is Any: a user's class defines one of `open_shard`, `open_shard_at_row` and `read`

    @property
    def shard_names(self: Any) -> Sequence[str]:
        # kept in __dict__: this property would hide what a user's subclass sets in its constructor
        return self.__dict__.get("shard_names") or tuple(shard.name for shard in self.shards)

    @shard_names.setter
    def shard_names(self, names: Sequence[str]) -> None:
        self.__dict__["shard_names"] = tuple(names)

    def open_shard(self: Any, shard_name: str) -> Iterator[Record]:
        """Yields the rows of a shard as dicts, in order.

        Raises:
            SourceError: No shard has this name.
        """
        return self.open_shard_at_row(shard_name, 0)

    def open_shard_at_row(self: Any, shard_name: str, row: int) -> Iterator[Record]:
        """Yields the rows of a shard as dicts, from physical row `row` on.

        The rows before it are not read, unless the source defines only `open_shard`.

        Raises:
            SourceError: No shard has this name, its rows are not counted, or it has no such row.
        """
        # a user's subclass defines `read`, or only `open_shard`
        if not hasattr(self, "read"):
            return itertools.islice(self.open_shard(shard_name), row, None)
        names = list(self.shard_names)
        problem = "no shard has this name"
        require_known(shard_name, names, shard_name, problem, kind=SourceError)
        number = names.index(shard_name)
        total = self.shards[number].num_rows
        if total is None:
            raise SourceError(
                at=shard_name,
                problem="its rows are not counted",
                fix="Read it with streaming=False.",
            )
        if not 0 <= row <= total:
            raise SourceError(
                at=shard_name, problem=f"row {row} was asked for", fix=f"It has rows 0:{total}."
            )
        return self._rows_of(number, row, total)

    def _rows_of(self: Any, number: int, row: int, total: int | None) -> Iterator[Record]:
        """Yields the rows `row` to `total` of a shard; `total` is None if the rows never end."""
        for start in itertools.count(row, ROWS_AT_A_TIME):
            stop = start + ROWS_AT_A_TIME if total is None else min(total, start + ROWS_AT_A_TIME)
            if stop <= start:
                return
            batch = scan(self, number, start, stop).batch
            yield from batch.select(data_columns(batch.schema)).to_pylist()


ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """A description of the tokens in a folder.

    Args:
        tokenizer: The name of the tokenizer.
        tokenizer_fingerprint: A digest of what the tokenizer does.
        vocab_size: All token ids are below it.
        eos_token_id: The id of the token that ends a document; None if there is none.
        pad_token_id: The id of the token that fills rows; None if there is none.
        seq_length: The slots of a packed row; None if rows are documents.
    """

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_token_id: int | None
    pad_token_id: int | None
    seq_length: int | None


@dataclass(frozen=True)
class Turns:
    """How conversations were written for training.

    Args:
        template: The text of the chat template, in the form that `transformers` takes.
        stop_token_ids: The tokens with which a model trained on it ends its turn; () if they are
            unknown.
    """

    template: str
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """What a source declares about itself; a wrapper passes on what is also true of its rows.

    Args:
        tokens: The tokenizer of the tokens in its rows; None if there are no tokens, or if it is
            unknown.
        turns: How conversations were written, if these are their tokens.
        pairs: Whether every row is a preference pair, which must stay in one row of a batch.
        cacheable: Whether these rows have the same fingerprint in the next process.
        unversioned: If not: why, such as "function m:f has no version".
        uncounted: Whether it accepts shards without `num_rows`; `at_end` then tells their end.
        checks_text: Whether every string that it returns has been checked to be UTF-8.
        bytes_per_row: The bytes of a row's values, if all rows have the same size.
        num_tokens: The number of tokens in all its rows, if they were counted.
        extra_columns: Columns of the original rows, which are saved with the tokens.
        aligned: Names of columns with values for every token, which are packed with the tokens.
    """

    tokens: TokenInfo | None = None
    turns: Turns | None = None
    pairs: bool = False
    cacheable: bool = True
    unversioned: tuple[str, ...] = ()
    uncounted: bool = False
    checks_text: bool = False
    bytes_per_row: int | None = None
    num_tokens: int | None = None
    extra_columns: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()


class Source(ShardedDataSource):
    """The base class of easypipe's own sources: ShardedSource with optional capabilities.

    The defaults are those of a source without more capabilities. A user's source is wrapped in one
    that has them all (OwnSource).
    """

    # What positions in a shard count. With "bytes", a row's number is the byte at which it begins,
    # and `num_rows` is the size of the shard.
    unit: ClassVar[Literal["records", "bytes"]] = "records"
    # whether reading waits for remote storage; `fetched` can do the waiting before
    waits: bool = False

    @property
    def below(self) -> ShardedSource | None:
        """The source that this one is made from; None for one that reads files itself."""
        return None

    @property
    def info(self) -> SourceInfo:
        """The declarations of this source; by default, those of the source below."""
        return SourceInfo() if self.below is None else info_of(self.below)

    @property
    def files_cut(self) -> int:
        """How many files end without their end marker."""
        return 0

    def shard_identity(self: ShardedSource, shard: int) -> str:
        """Returns a digest of all that decides the rows of one shard, regardless of others."""
        return digest(self.fingerprint, self.shards[shard].name)

    def select(self: ShardedSource, columns: Sequence[str]) -> ShardedSource:
        """Returns the same rows with at least `columns`; others are left out if that saves work."""
        return self

    def exactly(self: ShardedSource, columns: Sequence[str]) -> ShardedSource:
        """Returns a source of the same rows that keeps every null within lists and objects.

        Args:
            columns: The columns in which lists and objects become JSON text if they hold nulls that
                an Arrow type would lose.
        """
        return self

    def head(self: ShardedSource, num_bytes: int, files: int | None = None) -> ShardedSource:
        """Returns a smaller source for a first look at the data.

        Args:
            num_bytes: Only records within the first `num_bytes` bytes of their file are read.
            files: Only the first `files` files are read; None reads all.
        """
        return self

    def at_end(self: Any, shard: int, position: int) -> bool:
        """Returns whether the shard has no row at or after `position`."""
        rows = self.shards[shard].num_rows
        return self.below.at_end(shard, position) if rows is None else position >= rows

    def raw(self, shard: int, row: int) -> str | None:
        """Returns a row as it is written in its file; None if the file is not text."""
        return None

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        """Reads rows `start` to `stop` of one shard; a subclass defines this or `scan`."""
        return self.scan(shard, start, stop).batch

    def fetched(self, shard: int, start: int, stop: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a scan of these rows hardly waits for remote storage.

        The data is fetched when the context is entered, and kept until it is left.
        """
        if self.below is None:
            return contextlib.nullcontext()
        return fetched(self.below, shard, start, stop)

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """Reads rows as `read` does, and says which records were rejected.

        Law: `scan(...).batch` equals `read(...)` wherever `read` does not raise.
        """
        return Scan(self.read(shard, start, stop), ())


def info_of(source: ShardedSource) -> SourceInfo:
    """Returns what a source declares about itself, or the defaults if it declares nothing."""
    return source.info if isinstance(source, Source) else SourceInfo()


def identity_of(source: ShardedSource, shard: int) -> str:
    """Returns a digest of all that decides the rows of one shard."""
    if isinstance(source, Source):
        return source.shard_identity(shard)
    return digest(source.fingerprint, source.shards[shard].name)


def select(source: ShardedSource, columns: Sequence[str]) -> ShardedSource:
    """Returns the source with only `columns`, or unchanged if it cannot leave out the others."""
    return source.select(columns) if isinstance(source, Source) else source


def raw_of(source: ShardedSource, shard: int, row: int) -> str | None:
    """Returns a row as it is written in its file; None if that is unknown."""
    return source.raw(shard, row) if isinstance(source, Source) else None


def innermost(source: ShardedSource) -> ShardedSource:
    """Returns the source that reads the files, below all that wrap it."""
    while isinstance(source, Source) and source.below is not None:
        source = source.below
    return source


def unit_of(source: ShardedSource) -> Literal["records", "bytes"]:
    """Returns what positions in the shards of a source count, as `Source.unit` says."""
    inner = innermost(source)
    return inner.unit if isinstance(inner, Source) else "records"


def place_of(source: ShardedSource, shard: int, row: int) -> str:
    """Returns the place of a row, for messages."""
    name = source.shards[shard].name
    return f"{name}, line at byte {row}" if unit_of(source) == "bytes" else place(name, row=row)


def fetched(
    source: ShardedSource, shard: int, start: int, stop: int
) -> contextlib.AbstractContextManager[None]:
    """Returns the context of `Source.fetched`; for other sources, one that fetches nothing."""
    if isinstance(source, Source):
        return source.fetched(shard, start, stop)
    return contextlib.nullcontext()


def scan(source: ShardedSource, shard: int, start: int, stop: int) -> Scan:
    """Calls `source.scan` if there is one, else `read` with nothing rejected.

    Raises:
        SourceError: A user's `read` raised an error, or returned too few or too many rows.
    """
    if isinstance(source, Source):
        return source.scan(shard, start, stop)
    one, name = source.shards[shard], name_of(source)
    at = f"{one.name}, rows {start}:{stop}"
    try:
        batch = source.read(shard, start, stop)
    except EasypipeError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever a user's source raises; raised as an error that names the place)
        raise_named(name, error, at)
    exact = one.num_rows is not None and ROW_NUMBER not in batch.schema.names
    if exact and batch.num_rows != stop - start:
        raise SourceError(
            at=at,
            problem=f"{name} returned {batch.num_rows} rows, and the shard has {one.num_rows} by "
            "its num_rows",
            fix="Correct num_rows, or return all rows from start to stop.",
        )
    return Scan(batch, ())


@runtime_checkable
class Transform(Protocol):
    """A function from RecordBatch to RecordBatch that works row by row.

    easypipe.transforms.columns.base.ColumnTransform is the base class of transforms that compose
    with `>>`.

    Law: `t(a ++ b) == t(a) ++ t(b)` for any two batches of one schema. If a batch has ROW_NUMBER,
    it stays with its row: a transform that drops rows keeps the numbers of the others. Law: every
    batch has exactly `schema(before)`, which is known without reading rows.

    A transform may also have two methods and three attributes:

    - `scan(batch) -> Scan`: the batch and the rows on which it failed, by ROW_NUMBER, else by
      position; `__call__` raises an error for those rows.
    - `narrow(columns, before) -> (Transform, columns)`: a transform that returns only `columns`,
      and the columns that it reads (None: all).
    - `drops`: whether it may return fewer rows than it is given (default: True).
    - `fan_out`: the most rows that one row becomes (default: 1). Above 1, the i-th row made from
      row r has number `r * fan_out + i`.
    - `cacheable`: whether `fingerprint` will be the same in the next process (default: True).
    """

    @property
    def fingerprint(self) -> str:
        """A hex digest of everything that decides the output."""
        ...

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch: ...
    def schema(self, before: pa.Schema) -> pa.Schema: ...


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """The progress of one piece of long work.

    `done` and `total` count `unit`s.

    Args:
        stage: The kind of work, such as "tokenize".
        dataset: The name of the dataset.
        done: How many units are done.
        total: How many units there are; None if that is unknown.
        unit: What is counted, such as "rows".
        num_bytes: Bytes read or written so far, uncompressed; 0 if they are not counted.
    """

    stage: str
    dataset: str
    done: int
    total: int | None
    unit: str
    num_bytes: int = 0


class ProgressListener(Protocol):
    """A function that is called with every ProgressEvent."""

    def __call__(self, event: ProgressEvent) -> None: ...


def silent(event: ProgressEvent) -> None:
    """Ignores the event: the listener that shows nothing."""


class PipelineSettings(Protocol):
    """The part of a pipeline's config that every stage may use; a PipelineConfig satisfies it."""

    @property
    def seed(self) -> int | None: ...
    @property
    def cache_dir(self) -> str | Path | None: ...
    @property
    def cache(self) -> Any:
        """How a cache at a URL is reached: a CacheConfig, or None."""
        ...

    @property
    def streaming(self) -> bool: ...
    @property
    def num_streams(self) -> int | None: ...
    @property
    def executor(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class PipelineContext:
    """The config and the services that every stage is given.

    It is frozen: a stage that needs to remember something returns a source that does.

    Args:
        config: The config of the pipeline.
        seed: The seed of the run.
        cache_dir: The local folder of plans, indexes and, unless `cache` says otherwise, tokens.
        progress: Called with every ProgressEvent.
        cache: The CacheFolder of the tokens; None if they are in `cache_dir`.
    """

    config: PipelineSettings
    seed: int
    cache_dir: Path
    progress: ProgressListener = field(default=silent, compare=False)
    cache: Any = field(default=None, compare=False)


class BaseStage(ABC):
    """One step of a pipeline.

    Subclass it, define `name` and `process`, and add it with `Pipeline.add_stage(stage)`.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def process(self, data: Sources, context: PipelineContext) -> Sources:
        """Returns the datasets that this stage makes from `data`.

        It is pure and reads no rows, so that schemas and errors are known before data is read.
        """


@runtime_checkable
class BatchLoader(Protocol):
    """A loader as a trainer needs it.

    Law (exact resume): after `restore(state)` with the state taken after batch n, iteration
    continues with batch n + 1. A batch is a dict of arrays; `state()` is the state after the last
    yielded batch.
    """

    batch_size: int

    def __iter__(self) -> Iterator[Batch]: ...
    def __len__(self) -> int:
        """Returns the number of batches from the start to the end.

        Raises:
            TypeError: The data never ends.
        """
        ...

    def state(self) -> Any: ...
    def restore(self, state: Any) -> None: ...
