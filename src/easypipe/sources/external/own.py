"""Users' own sources: whatever gives rows as dicts, shard by shard from the start.

Law (stateless reads): rows that can only be read forward are read once and kept in a temporary file
of this process, from which every read takes its own.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np
import pyarrow as pa

from easypipe.core.checked import recall_checked, remember_checked
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, require, require_columns, require_rows
from easypipe.core.identity import held_by, name_of
from easypipe.core.protocols import (
    Reject,
    Scan,
    Shard,
    ShardedDataSource,
    ShardedSource,
    Source,
    SourceInfo,
)
from easypipe.core.schema import ROW_NUMBER, is_json, schema_of_text, schema_text, with_row_numbers
from easypipe.core.threads import Threads
from easypipe.core.values import Dataset, Item, JsonObject, attribute_of
from easypipe.sources.base import READER_VERSION
from easypipe.sources.external import dicts

log = logging.getLogger("easypipe")

BLOCK_ROWS = 256  # converted and written at a time
# after so many a source that is counted is thought to have no end, which is said
MANY_ROWS = 10_000_000


@runtime_checkable
class Numbered(Protocol):
    """A list, a table, a dataset: rows that are asked for by their number."""

    def __len__(self) -> int: ...
    def __getitem__(self, row: Any, /) -> Any: ...


def is_complete(data: Dataset) -> bool:
    """Whether it has `shards` and `read(shard, start, stop)`: a ShardedSource."""
    return (
        not isinstance(data, type) and _has(data, "shards") and callable(attribute_of(data, "read"))
    )


def is_sharded(data: Dataset) -> bool:
    """Whether it opens shards by name, as ShardedDataSource says."""
    opens = _has(data, "open_shard") or _has(data, "open_shard_at_row")
    return opens and not isinstance(data, type)


def is_generator(data: Dataset) -> bool:
    """Rows one after the other: a generator function, any other function without arguments, or what
    can be iterated over again.
    """
    if isinstance(data, type | os.PathLike):
        return False
    return callable(data) or (isinstance(data, Iterable) and not isinstance(data, Numbered))


class OwnOptions(TypedDict, total=False):
    """Those of `as_source`."""

    version: str | int | None
    num_rows: int | None
    counted: bool
    folder: Path | None
    skip: bool


def as_source(
    data: Dataset,
    *,
    name: str,
    version: str | int | None = None,
    num_rows: int | None = None,
    counted: bool = True,
    folder: Path | None = None,
    skip: bool = False,
) -> ShardedSource:
    """The source that `data` is, or that its rows become.

    Args:
        data: A ShardedSource; an object that opens shards by name; a function that gives rows; or
            what can be iterated over again.
        name: Of the dataset, for errors and for the one shard of what has no shards.
        version: What its rows are known by; None takes that of `data`. Without one its tokens are
            not kept.
        num_rows: Only the first so many, over the shards in order; no row behind them is asked for.
            Of a ShardedSource, all.
        counted: Whether the rows of every shard are needed before the first is read; False leaves
            shards whose ends are not known.
        folder: Where the counts of sources with a version are kept between runs; None keeps none.
        skip: Whether rows that do not fit the columns are rejects, not an error.

    Raises:
        ConfigError: It is none of these, or `version` would have no effect.
    """
    if is_complete(data):
        missing = [member for member in ("schema", "fingerprint") if not _has(data, member)]
        require(
            not missing,
            name,
            f"{type(data).__name__} has shards and read(), but no {' and no '.join(missing)}",
            "Give all four, or only shard_names and open_shard(name).",
        )
        require(
            version is None,
            "version",
            f"has no effect: {type(data).__name__} has a fingerprint of its own",
            "Leave it out.",
        )
        return data
    given = _sharded(data) if is_sharded(data) else _one_shard(data, name)
    version = given.version if version is None else version
    given = replace(given, name=name, folder=folder, skip=skip, version=version)
    if given.version is None:
        log.warning(
            "dataset %s: %s has no version, so its rows are read anew in every process, and no "
            "tokens of them are kept. Give it one "
            "(DatasetConfig(version=...), or its attribute `version`), and another one whenever "
            "its rows change.",
            name,
            given.label,
        )
    return OwnSource(given, num_rows, counted=counted or num_rows is not None)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a source of a user's gives. open: its rows from physical row r of a shard on. seeks:
    whether that costs nothing for a large r. label, held: what it is called, and the values that it
    holds. name, folder, skip: as `as_source` has them.
    """

    shards: tuple[Shard, ...]
    open: Callable[[str, int], Iterable[Item]]
    seeks: bool
    label: str
    held: Any
    version: str | int | None
    name: str = ""
    folder: Path | None = None
    skip: bool = False

    def at(self, shard: int) -> str:
        name = self.shards[shard].name
        return self.name if name == self.name else f"{self.name}, shard {name!r}"

    def taken(self, shard: int, start: int, count: int) -> list[Item]:
        """So many rows from row `start` on, fewer where it ends."""
        rows = iter(self.open(self.shards[shard].name, start))
        try:
            return dicts.next_rows(rows, start, count, self.at(shard))
        finally:
            _close(rows)

    def scanned(self, taken: list[Item], start: int, columns: pa.Schema, shard: int) -> Scan:
        numbers = range(start, start + len(taken))
        return dicts.as_scan(taken, numbers, columns, self.at(shard), skip=self.skip)


class OwnSource(Source):
    """The rows of a source of a user's own; implements ShardedSource. Made by `as_source`, which
    knows what to make of what.

    Columns follow from the first 1,024 rows, lists and objects without a common type inside as
    JSON; a later row that does not fit them raises SourceError, as does one that is no dict, or
    both are rejects (`skip`). Rows that can only be read forward are asked for once, in order, on
    one thread; those of a source with `open_shard_at_row` are asked for where they are needed, on
    any thread.
    """

    def __init__(self, given: Given, num_rows: int | None, *, counted: bool) -> None:
        self._given, self._num_rows, self._counted = given, num_rows, counted
        self.cacheable = given.version is not None
        self._identity = (
            digest("own rows", READER_VERSION, given.label, given.held, str(given.version))
            if self.cacheable
            else digest("rows of this process", given.label, secrets.token_hex(16))
        )
        self._columns: tuple[str, ...] | None = None
        self._kept = _Kept(given)
        self._exact: tuple[str, ...] = ()  # columns whose lists and objects are JSON
        self._known: JsonObject = {}  # shared by those that `select` gives: what was found out
        self._lock = threading.RLock()

    @property
    def schema(self) -> pa.Schema:
        whole, chosen = self._whole, self._columns
        return whole if chosen is None else pa.schema([whole.field(name) for name in chosen])

    @property
    def shards(self) -> Sequence[Shard]:
        """Raises what the source raises while its rows are counted."""
        return self._found(
            "shards", lambda: tuple(self._count()) if self._counted else self._given.shards
        )

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(cacheable=self.cacheable, uncounted=True)

    @property
    def fingerprint(self) -> str:
        return digest(*self._rows, *self._as_json)

    def shard_identity(self, shard: int) -> str:
        name = self._given.shards[shard].name
        return digest("own shard", self._identity, name, *self._as_json)

    @property
    def _rows(self) -> tuple[Any, ...]:
        names = [shard.name for shard in self._given.shards]
        return "own", self._identity, names, self._num_rows

    @property
    def _as_json(self) -> list[str]:
        there = [name for name in self._exact if name in self._whole.names]
        return [name for name in there if is_json(self._whole.field(name).type)]

    def select(self, columns: Sequence[str]) -> OwnSource:
        """The same rows with only `columns`; what is read is read once for both."""
        twin = copy.copy(self)
        require_columns(columns, self.schema.names, self._given.name)
        twin._columns = tuple(
            dict.fromkeys([*columns, ROW_NUMBER] if self._given.skip else columns)
        )
        return twin

    def exactly(self, columns: Sequence[str]) -> OwnSource:
        twin = copy.copy(self)
        twin._known, twin._lock, twin._exact = {}, threading.RLock(), tuple(columns)
        twin._kept = _Kept(self._given)
        return twin

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """Rows `start` to `stop`; of a shard whose end is not known as many of them as there
        are.
        """
        info, at = self.shards[shard], self._given.at(shard)
        require_rows(start, stop, info.num_rows, at)
        if self._given.seeks:
            batch, rejects = self._sought(shard, start, stop)
        else:
            limit = None if self._num_rows is None else info.num_rows
            batch, rejects = self._kept.read(shard, start, stop, self._whole, limit)
        taken = batch.num_rows + len(rejects)
        if info.num_rows is not None and taken < stop - start:
            raise SourceError(
                at=at,
                problem=f"ended behind {start + taken} rows, and {info.num_rows} were counted",
                fix="Give it another version whenever its rows change.",
            )
        return Scan(batch if self._columns is None else batch.select(list(self._columns)), rejects)

    def at_end(self, shard: int, position: int) -> bool:
        """Whether there is no row `position`, nor one behind it."""
        if self._given.seeks:
            batch, rejects = self._sought(shard, position, position + 1)
            return not batch.num_rows and not rejects
        return self._kept.pull(shard, position + 1, self._whole) <= position

    @property
    def _whole(self) -> pa.Schema:
        """All columns."""
        return self._found("schema", self._columns_of_first_rows)

    def _columns_of_first_rows(self) -> pa.Schema:
        given, rows = self._given, self._kept.first_rows(dicts.FIRST_ROWS)
        schema = dicts.columns_of(rows, given.name, skip=given.skip, exact=self._exact)
        return with_row_numbers(schema) if given.skip else schema

    def _found(self, what: str, find: Callable[[], Any]) -> Any:
        """What is known of the rows, from this process, or from an earlier one, or found now."""
        with self._lock:
            if what not in self._known:
                self._recall()
            if what not in self._known:
                self._known[what] = find()
                if what == "shards":
                    self._remember()
            return self._known[what]

    def _sought(self, shard: int, start: int, stop: int) -> Scan:
        taken = self._given.taken(shard, start, stop - start)
        return self._given.scanned(taken, start, self._whole, shard)

    def _count(self) -> Iterator[Shard]:
        left = self._num_rows
        for number, shard in enumerate(self._given.shards):
            if left == 0:
                break
            rows, size = shard.num_rows, shard.num_bytes
            if rows is None and self._given.seeks:
                rows = sum(1 for _ in itertools.islice(self._given.open(shard.name, 0), left))
            elif rows is None:
                rows = self._kept.pull(number, left, self._whole, left)
                size = self._kept.num_bytes(number)
            rows = rows if left is None else min(rows, left)
            left = None if left is None else left - rows
            yield replace(
                shard,
                num_rows=rows,
                num_bytes=size,
                cuts=tuple(cut for cut in shard.cuts if cut < rows) or (0,),
            )

    def _path(self) -> Path | None:
        """What is known of a source with a version outlives the process."""
        given = self._given
        if given.folder is None or not (self.cacheable and self._counted):
            return None
        read_as = [READER_VERSION, *(["tolerant"] if given.skip else []), *self._exact]
        return given.folder / f"{digest('counted', *read_as, digest(*self._rows))}.rows.json"

    def _remember(self) -> None:
        path = self._path()
        if path is not None:
            shards = [[one.name, one.num_rows, one.num_bytes] for one in self._known["shards"]]
            remember_checked(path, {"shards": shards, "schema": schema_text(self._whole)})

    def _recall(self) -> None:
        path = self._path()
        known = {shard.name: shard for shard in self._given.shards}

        def parse(value: JsonObject) -> JsonObject:
            shards = tuple(
                replace(known[name], num_rows=rows, num_bytes=size)
                for name, rows, size in value["shards"]
            )
            return {"shards": shards, "schema": schema_of_text(value["schema"])}

        if path is not None:
            what = f"the count of the rows of dataset {self._given.name}"
            self._known |= recall_checked(path, parse, what=what) or {}


class _Kept:
    """Rows that can only be read forward, each taken once, in a temporary file without a name.
    Thread safe.

    All iterators are begun and advanced on one thread: what many of them hold, such as a connection
    to a database, belongs to one.
    """

    def __init__(self, given: Given) -> None:
        self._given = given
        self._lock = threading.Lock()
        self._thread: Threads | None = None
        self._file: Any = None
        self._shards = [_Pulled() for _ in given.shards]

    def first_rows(self, count: int) -> list[Item]:
        """Of the first shard that has rows."""
        given = self._given

        def look() -> list[Item]:
            for shard in range(len(given.shards)):
                taken = given.taken(shard, 0, count)
                for row, one in enumerate([] if given.skip else taken):
                    dicts.require_row(one, row, given.at(shard))
                if taken:
                    return taken
            return []

        return self._on_thread(look)

    def pull(
        self, shard: int, rows: int | None, columns: pa.Schema, limit: int | None = None
    ) -> int:
        """Takes rows until there are `rows` of them; None takes all. Returns how many there are, at
        least those asked for or all.

        limit: of the whole shard; no row behind it is ever asked for.
        """
        pulled = self._shards[shard]
        if not pulled.ended and (rows is None or pulled.rows < rows):
            self._on_thread(lambda: self._advance(shard, rows, columns, limit))
        return pulled.rows

    def read(
        self, shard: int, start: int, stop: int, columns: pa.Schema, limit: int | None
    ) -> Scan:
        stop = min(stop, self.pull(shard, stop, columns, limit))
        if start >= stop:
            return Scan(pa.RecordBatch.from_pylist([], schema=columns), ())
        pulled = self._shards[shard]
        first, last = start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)
        blocks = [
            pa.ipc.read_record_batch(pa.py_buffer(self._bytes(*place)), columns)
            for place in pulled.places[first:last]
        ]
        table = pa.Table.from_batches(blocks, schema=columns)
        begin, count = start - first * BLOCK_ROWS, stop - start
        if self._given.skip:
            numbers = table.column(ROW_NUMBER).to_numpy()
            begin = int(np.searchsorted(numbers, start))
            count = int(np.searchsorted(numbers, stop)) - begin
        table = table.slice(begin, count).combine_chunks()
        batch = table.to_batches()[0] if table.num_rows else blocks[0].slice(0, 0)
        return Scan(batch, tuple(one for one in pulled.rejects if start <= one.row < stop))

    def num_bytes(self, shard: int) -> int:
        return self._shards[shard].num_bytes

    def _on_thread(self, work: Callable[[], Any]) -> Any:
        with self._lock:
            if self._thread is None:
                self._thread = Threads(1, thread_name_prefix="easypipe-rows")
        return self._thread.submit(work).result()

    def _advance(self, shard: int, rows: int | None, columns: pa.Schema, limit: int | None) -> None:
        """Whole blocks, so that row r always stands in block r // BLOCK_ROWS. Runs on the one
        thread.
        """
        given, pulled, at = self._given, self._shards[shard], self._given.at(shard)
        while not pulled.ended and (rows is None or pulled.rows < rows):
            if pulled.iterator is None:
                pulled.iterator = iter(given.open(given.shards[shard].name, pulled.rows))
            try:
                count = min(BLOCK_ROWS, (limit or sys.maxsize) - pulled.rows)
                taken = dicts.next_rows(pulled.iterator, pulled.rows, count, at)
                batch, rejects = given.scanned(taken, pulled.rows, columns, shard)
                data = memoryview(batch.serialize())
                pulled.places.append((self._append(data), len(data)))
            except BaseException:
                _close(pulled.iterator)
                # an iterator that raised looks as if it had ended: another one is begun behind what
                # is kept
                pulled.iterator = None
                raise
            pulled.rejects += rejects
            pulled.num_bytes += batch.nbytes
            pulled.rows += len(taken)
            if pulled.rows // MANY_ROWS > (pulled.rows - len(taken)) // MANY_ROWS and rows is None:
                log.warning(
                    "%s: %d rows and no end; if it has none, set num_rows, or streaming=True",
                    at,
                    pulled.rows,
                )
            pulled.ended = len(taken) < BLOCK_ROWS or pulled.rows == limit
        if pulled.ended:
            _close(pulled.iterator)
            pulled.iterator = None

    def _append(self, data: memoryview) -> int:
        """Where it stands in the file."""
        folder = self._given.folder
        with self._lock:
            if self._file is None:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(prefix="easypipe-rows-", dir=folder)  # noqa: SIM115 (closed with this object)
            at = self._file.seek(0, os.SEEK_END)
            self._file.write(data)
            self._file.flush()
            return at

    def _bytes(self, at: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(at)
            return self._file.read(size)


class _Pulled:
    """What was taken of a shard. places: (offset, bytes) of each block of the file."""

    def __init__(self) -> None:
        self.rejects: list[Reject] = []
        self.iterator: Iterator[Item] | None = None
        self.places: list[tuple[int, int]] = []
        self.rows = self.num_bytes = 0
        self.ended = False


def _sharded(data: Dataset) -> Given:
    kind, base = type(data), ShardedDataSource
    own = [
        name
        for name in ("open_shard", "open_shard_at_row")
        # methods of a user's class that are not those of the base
        if _has(data, name) and getattr(kind, name, None) is not getattr(base, name)
    ]
    require(
        own,
        "data_files",
        f"{kind.__name__} has neither open_shard(name) nor read(shard, start, stop)",
        "Give it shard_names and open_shard, which yields a dict for every row.",
    )
    shards = attribute_of(data, "shards")
    names: Any = attribute_of(data, "shard_names") if shards is None else [s.name for s in shards]
    names = names() if callable(names) else names
    require(
        not isinstance(names, str | None)
        and all(isinstance(name, str) for name in names)
        and len(names) == len(set(names)) > 0,
        "data_files",
        f"shard_names of {kind.__name__} are {names!r}",
        "Give a list of different names, one at least.",
    )

    def from_start(name: str, row: int) -> Iterable[Item]:
        rows = data.open_shard(name)
        problem = f"open_shard of {kind.__name__} gave {type(rows).__name__}, which has no rows"
        require(isinstance(rows, Iterable), f"shard {name!r}", problem, "Yield a dict for a row.")
        return _behind(iter(rows), row)

    seeks = "open_shard_at_row" in own
    return Given(
        shards=tuple(Shard(name=name, num_rows=None) for name in names or ())
        if shards is None
        else tuple(shards),
        open=data.open_shard_at_row if seeks else from_start,
        seeks=seeks,
        label=name_of(data),
        held=held_by(data),
        version=attribute_of(data, "version"),
    )


def _one_shard(data: Dataset, name: str) -> Given:
    require(
        not isinstance(data, Iterator),
        "data_files",
        f"a {type(data).__name__} can be read only once, and rows are read again where "
        "they are needed again",
        "Give the function that makes it, without calling it.",
    )
    # a class may be both; what can be iterated over is data
    called = callable(data) and not hasattr(data, "__iter__")

    def from_start(_: str, row: int) -> Iterable[Item]:
        rows: Dataset = data() if called else data
        return _behind(iter(rows), row)

    return Given(
        shards=(Shard(name=name, num_rows=None),),
        open=from_start,
        seeks=False,
        label=name_of(data),
        held=[held_by(data), held_by(attribute_of(data, "__self__"))],
        # what libraries call the version of a dataset says little of its rows
        version=attribute_of(data, "version") if called else None,
    )


def _behind(rows: Iterator[Item], row: int) -> Iterator[Item]:
    """The same iterator, `row` rows later."""
    for _ in itertools.islice(rows, row):
        pass
    return rows


def _close(rows: Dataset) -> None:
    """What a generator holds is let go on the thread that it belongs to."""
    close = attribute_of(rows, "close")
    if close is not None:
        close()


def _has(data: Dataset, name: str) -> bool:
    """Whether it has a member, without asking for its value: that may open files. Only what hands
    members on is asked for them.
    """
    missing = object()
    found = inspect.getattr_static(data, name, missing)
    return (
        found is not None
        if found is not missing
        else hasattr(type(data), "__getattr__") and getattr(data, name, None) is not None
    )
