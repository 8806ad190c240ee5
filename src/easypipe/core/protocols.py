# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""The protocols that everything is made of: sources, stages, rows, tokenizers.

Laws stand in the docstrings; tests/laws.py checks every implementation.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import SourceError, place, require_known
from easypipe.core.schema import data_columns
from easypipe.core.values import Batch, Int64, Record


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a source that can be read on its own, usually one file.

    Args:
        num_rows: Physical records before any filter; None if they cannot be counted.
        cuts: Ascending row numbers (0 first) at which reading may start cheaply; a reader may start
            anywhere, at a cost.
        num_bytes: Size at rest, 0 if unknown; used to cut work evenly, never for correctness.
    """

    name: str
    num_rows: int | None
    cuts: tuple[int, ...] = (0,)
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A row that was read and not passed on. `benign` rows (a blank line, what a filter leaves out)
    are counted, never charged.

    count: how many rows of the range went the same way, of which `row` is the first; above 1 only
    where they are benign or, in the record of a range, follow each other.
    """

    row: int
    # a short fixed word, the ledger's key: "null", "empty", "not_a_string", "unparsable", ...
    reason: str
    detail: str = ""  # for people: what was wrong with this very row
    benign: bool = False
    count: int = 1


def left_out(rows: Sequence[int] | Int64, reason: str, detail: str = "") -> tuple[Reject, ...]:
    """Benign `rows` of one range, ascending, that went the same way: counted, not kept, since there
    may be millions.
    """
    return (
        (Reject(row=int(rows[0]), reason=reason, detail=detail, benign=True, count=len(rows)),)
        if len(rows)
        else ()
    )


def bad_of(rejects: Iterable[Reject]) -> Iterator[Reject]:
    """Those that are charged: all that are not benign."""
    for reject in rejects:
        if not reject.benign:
            yield reject


def by_row(rejects: Iterable[Reject]) -> tuple[Reject, ...]:
    return tuple(sorted(rejects, key=lambda reject: reject.row))


def counted(rejects: Iterable[Reject]) -> tuple[Reject, ...]:
    """Those of one range by row, benign ones of one reason and detail as one."""
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
    """Rows read, and rows refused. `batch` carries ROW_NUMBER when it may hold fewer rows than were
    asked for.
    """

    batch: pa.RecordBatch
    rejects: tuple[Reject, ...]


@runtime_checkable
class ShardedSource(Protocol):
    """Rows in independently readable shards.

    Law (stateless reads): for a ≤ b ≤ c, `read(s, a, b)` followed by `read(s, b, c)` holds the same
    rows as `read(s, a, c)`, on any thread and in any order. Row numbers are physical records: a
    source that filters returns fewer rows, each with its number in the column `__row_number__`; a
    source whose schema lacks that column returns exactly `stop - start` rows.
    """

    @property
    def schema(self) -> pa.Schema: ...
    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides what `read` returns."""
        ...

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        """Rows `start` to `stop` of one shard. Raises SourceError naming the file, and the row
        where one is to blame.
        """
        ...


Sources = dict[str, ShardedSource]  # what stages hand on: datasets by name


class ShardedDataSource:
    """Shards by name, to read rows one at a time; the base of a source of your own.

    Every source of easypipe has these methods. A source of your own defines `shard_names` and
    `open_shard`, which must yield the same rows whenever a shard is opened. With
    `open_shard_at_row` too, or instead, its rows are read from anywhere and none are kept beside
    the tokens. `shards` instead of `shard_names` says how many rows there are, if that is known.
    `version`, a text or number, identifies the rows: change it when they change. A class with
    `schema`, `shards`, `fingerprint` and `read` is a ShardedSource, and inherits the rest.
    """

    # `self` is Any: a user gives `open_shard`, `open_shard_at_row` or `read`, one of the three

    @property
    def shard_names(self: Any) -> Sequence[str]:
        # a property of that name would hide what a user's subclass sets in its constructor
        return self.__dict__.get("shard_names") or tuple(shard.name for shard in self.shards)

    @shard_names.setter
    def shard_names(self, names: Sequence[str]) -> None:
        self.__dict__["shard_names"] = tuple(names)

    def open_shard(self: Any, shard_name: str) -> Iterator[Record]:
        """The rows of a shard as dicts, in order. Raises SourceError for a name that no shard
        has.
        """
        return self.open_shard_at_row(shard_name, 0)

    def open_shard_at_row(self: Any, shard_name: str, row: int) -> Iterator[Record]:
        """The same from physical row `row` on, without reading those in front of it, unless only
        `open_shard` is given.
        """
        # a user's subclass has `read`, or only `open_shard`
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
        """total: None where the rows never end."""
        for start in itertools.count(row, ROWS_AT_A_TIME):
            stop = start + ROWS_AT_A_TIME if total is None else min(total, start + ROWS_AT_A_TIME)
            if stop <= start:
                return
            batch = self.read(number, start, stop)
            yield from batch.select(data_columns(batch.schema)).to_pylist()


ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """What is known of the tokens in a folder. seq_length: slots of a packed row, None where rows
    are documents.
    """

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_token_id: int | None
    pad_token_id: int | None
    seq_length: int | None


@dataclass(frozen=True)
class Turns:
    """How conversations were written for training. template: its text, as `transformers` takes
    it.
    """

    template: str
    # what a model that was trained on it writes when its turn is over; none where nobody can tell
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """What a source declares of itself; a source over another passes on what holds for it too.

    tokens: whose tokens its rows hold; None where they hold none, or nobody knows.
    turns: how the conversations were written whose tokens these are.
    pairs: every row is a pair of answers, which must stay in one row of a batch.
    cacheable: the next process knows these rows by the same fingerprint.
    uncounted: it takes `num_rows` itself, and `at_end` says where a shard ends that has none.
    checks_text: every string that it returns is UTF-8.
    bytes_per_row: of a row's values, where all rows have the same.
    num_tokens: of all its rows, where they were counted.
    aligned: names of columns with values for every token, which travel with the tokens.
    extra_columns: of the rows that its documents come from, kept beside the tokens where they are
    saved.
    """

    tokens: TokenInfo | None = None
    turns: Turns | None = None
    pairs: bool = False
    cacheable: bool = True
    uncounted: bool = False
    checks_text: bool = False
    bytes_per_row: int | None = None
    num_tokens: int | None = None
    extra_columns: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()


class Source(ShardedDataSource):
    """What easypipe's own sources have beside `read`. The defaults are those of a source that can
    do nothing more; a source of users' own stands behind one that has it all (OwnSource).
    """

    # what positions in a shard count; with "bytes", those at which its rows begin, a row's number
    # is one of these, and `num_rows` is the size
    unit: ClassVar[Literal["records", "bytes"]] = "records"

    @property
    def below(self) -> ShardedSource | None:
        """The source whose rows these are made of."""
        return None

    @property
    def info(self) -> SourceInfo:
        """By default what the source below declares."""
        return SourceInfo() if self.below is None else info_of(self.below)

    @property
    def files_cut(self) -> int:
        """Files that stop without the mark of their end."""
        return 0

    def shard_identity(self: ShardedSource, shard: int) -> str:
        """Digest of all that decides the rows of one shard, whichever shards stand beside it."""
        return digest(self.fingerprint, self.shards[shard].name)

    def select(self: ShardedSource, columns: Sequence[str]) -> ShardedSource:
        """The same rows with at least `columns`; others are left out where that saves work."""
        return self

    def exactly(self: ShardedSource, columns: Sequence[str]) -> ShardedSource:
        """The same rows, in which lists and objects of `columns` are JSON text where they hold
        nulls that an Arrow type would lose.
        """
        return self

    def head(self: ShardedSource, num_bytes: int, files: int | None = None) -> ShardedSource:
        """The source for a first look: of the first `files` of its files, where they are records,
        those that end within so many bytes.
        """
        return self

    def at_end(self: Any, shard: int, position: int) -> bool:
        """Whether no row stands at `position` or behind it."""
        rows = self.shards[shard].num_rows
        return self.below.at_end(shard, position) if rows is None else position >= rows

    def raw(self, shard: int, row: int) -> str | None:
        """A row as it stands in its file; None where that is no text."""
        return None

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        """A source has this or `scan`."""
        return self.scan(shard, start, stop).batch

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """What `read` gives, with the rows that were refused.

        Law: `scan(...).batch` equals `read(...)` wherever `read` does not raise.
        """
        return Scan(self.read(shard, start, stop), ())


def info_of(source: ShardedSource) -> SourceInfo:
    """What a source declares; of one that declares nothing, the defaults."""
    return source.info if isinstance(source, Source) else SourceInfo()


def identity_of(source: ShardedSource, shard: int) -> str:
    """Digest of all that decides the rows of a shard."""
    if isinstance(source, Source):
        return source.shard_identity(shard)
    return digest(source.fingerprint, source.shards[shard].name)


def select(source: ShardedSource, columns: Sequence[str]) -> ShardedSource:
    """The source with `columns` alone, where it can leave out the others, else as it is."""
    return source.select(columns) if isinstance(source, Source) else source


def raw_of(source: ShardedSource, shard: int, row: int) -> str | None:
    """A row as it stands in its file; None where nobody can tell."""
    return source.raw(shard, row) if isinstance(source, Source) else None


def innermost(source: ShardedSource) -> ShardedSource:
    """The source that reads the files, under whatever was put around it."""
    while isinstance(source, Source) and source.below is not None:
        source = source.below
    return source


def unit_of(source: ShardedSource) -> Literal["records", "bytes"]:
    """What positions in the shards of a source count, see Source."""
    inner = innermost(source)
    return inner.unit if isinstance(inner, Source) else "records"


def place_of(source: ShardedSource, shard: int, row: int) -> str:
    """Where a row stands, for messages."""
    name = source.shards[shard].name
    return f"{name}, line at byte {row}" if unit_of(source) == "bytes" else place(name, row=row)


def scan(source: ShardedSource, shard: int, start: int, stop: int) -> Scan:
    """`source.scan` where there is one, else `read` with nothing refused."""
    if isinstance(source, Source):
        return source.scan(shard, start, stop)
    return Scan(source.read(shard, start, stop), ())


@runtime_checkable
class Transform(Protocol):
    """RecordBatch → RecordBatch, row by row. easypipe.transforms.columns.base.ColumnTransform is
    the base of those that compose with `>>`.

    Law: `t(a ++ b) == t(a) ++ t(b)` for any two batches of one schema. ROW_NUMBER, where a batch
    has it, stays with its row: what drops rows keeps the numbers of the others. Law: every batch
    has exactly `schema(before)`, which is known without reading rows.

    Where it has them, two methods and three attributes say more:
    scan(batch) -> Scan: the batch and the rows on which it failed, by ROW_NUMBER, else by position;
    `__call__` raises for those. narrow(columns, before) -> (Transform, columns): what gives only
    `columns`, and what that reads (None: everything).
    drops: whether it may give fewer rows than it is given (True where it does not say).
    fan_out: most rows that come of one (1). Above 1 the i-th row of row r has number `r * fan_out +
    i`.
    cacheable: whether `fingerprint` will be the same in the next process (True).
    """

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides what comes out."""
        ...

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch: ...
    def schema(self, before: pa.Schema) -> pa.Schema: ...


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """The progress of one piece of long work.

    `done` and `total` count `unit`s.

    Args:
        total: None if it is unknown.
        num_bytes: Bytes read or written so far, uncompressed; 0 if they are not counted.
    """

    stage: str
    dataset: str
    done: int
    total: int | None
    unit: str
    num_bytes: int = 0


class ProgressListener(Protocol):
    def __call__(self, event: ProgressEvent) -> None: ...


def silent(event: ProgressEvent) -> None:
    """The listener of those who do not listen."""


class PipelineSettings(Protocol):
    """What every stage may know of its pipeline's config, which a PipelineConfig is."""

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
    """What every stage may know. Frozen: a stage that needs to remember something returns a source
    that does.
    """

    config: PipelineSettings
    seed: int
    # of this machine: what is kept of plans and indexes, and tokens unless `cache` says otherwise
    cache_dir: Path
    progress: ProgressListener = field(default=silent, compare=False)
    # the CacheFolder that keeps tokens; None: cache_dir
    cache: Any = field(default=None, compare=False)


class BaseStage(ABC):
    """One step of a pipeline. Subclass it, give it a `name` and a `process`, and add it with
    `Pipeline.add_stage(stage)`.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def process(self, data: Sources, context: PipelineContext) -> Sources:
        """Pure: reads no rows, so that schemas and errors are known before data moves."""


@runtime_checkable
class BatchLoader(Protocol):
    """What a trainer needs of a loader.

    Law (exact resume): after `restore(state)` with the state taken after batch n, iteration yields
    batch n + 1 onward. Batches are `(dict of arrays)`; `state()` is the state after the batch that
    was last yielded.
    """

    batch_size: int

    def __iter__(self) -> Iterator[Batch]: ...
    def __len__(self) -> int:
        """Batches from the start to the end. Raises TypeError where the data never ends."""
        ...

    def state(self) -> Any: ...
    def restore(self, state: Any) -> None: ...
