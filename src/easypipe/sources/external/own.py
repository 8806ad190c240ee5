"""Users' own sources of dicts, by shard or generator: counted, versioned, kept in a temporary file.

Law (stateless reads): rows that can only be read forward are read once and kept in a temporary file
of this process; every read takes its rows from there.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable

import pyarrow as pa

from easypipe.core.checked import recall_checked, remember_checked
from easypipe.core.class_names import with_classes
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, place, require, require_columns, require_rows
from easypipe.core.identity import held_by, name_of, raise_named
from easypipe.core.protocols import (
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

BLOCK_ROWS = 256  # rows that are converted and written at a time
# counting may never end; a warning after every this many rows says so
MANY_ROWS = 10_000_000


@runtime_checkable
class Numbered(Protocol):
    """A list, a table, a dataset: rows that are read by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, row: Any, /) -> Any: ...


def is_complete(data: Dataset) -> bool:
    """Returns whether it has `shards` and `read(shard, start, stop)`: a ShardedSource."""
    return (
        not isinstance(data, type) and _has(data, "shards") and callable(attribute_of(data, "read"))
    )


def is_sharded(data: Dataset) -> bool:
    """Returns whether it opens shards by name, as ShardedDataSource says."""
    opens = _has(data, "open_shard") or _has(data, "open_shard_at_row")
    return opens and not isinstance(data, type)


def is_generator(data: Dataset) -> bool:
    """Returns whether it yields rows in turn.

    That is a function without arguments, which may be a generator function, or an object that can
    be iterated over again.
    """
    if isinstance(data, type | os.PathLike):
        return False
    return callable(data) or (isinstance(data, Iterable) and not isinstance(data, Numbered))


class OwnOptions(TypedDict, total=False):
    """The keyword options of `as_source`."""

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
    """Returns the source that `data` is, or that its rows become.

    Args:
        data: A ShardedSource; an object that opens shards by name; a function that returns rows; or
            an object that can be iterated over again.
        name: The name of the dataset, for errors and for the only shard of data without shards.
        version: What identifies its rows; None takes that of `data`. Without one its tokens are not
            kept.
        num_rows: Takes only this many first rows, over the shards in order; no later row is asked
            for. A ShardedSource yields all.
        counted: Whether the rows of every shard are needed before the first is read; False leaves
            the ends of shards unknown.
        folder: The folder in which the counts of sources with a version are kept between runs; with
            None they are not kept.
        skip: Whether rows that do not fit the columns are rejects, not an error.

    Raises:
        ConfigError: `data` is none of these, or `version` would have no effect.
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
            "dataset %s: %s has no version, so its rows are read again in every process, and "
            "their tokens are not kept. Give it one "
            "(DatasetConfig(version=...), or its attribute `version`), and change it whenever "
            "its rows change.",
            name,
            given.label,
        )
    return OwnSource(given, num_rows, counted=counted or num_rows is not None)


@dataclass(frozen=True, kw_only=True)
class Given:
    """The members of a user's source that are used.

    Args:
        shards: Its shards.
        open: Returns its rows, beginning at a physical row of a shard.
        seeks: Whether that is cheap even for a large row number.
        label: The name of the user's object.
        held: The values that the object holds.
        version: As in `as_source`; so are name, folder and skip.
        features: The schema by which `datasets` describes its columns, if it does.
    """

    shards: tuple[Shard, ...]
    open: Callable[[str, int], Iterable[Item]]
    seeks: bool
    label: str
    held: Any
    version: str | int | None
    features: pa.Schema | None = None
    name: str = ""
    folder: Path | None = None
    skip: bool = False

    def at(self, shard: int) -> str:
        """Returns the dataset and the shard, for errors."""
        name = self.shards[shard].name
        return self.name if name == self.name else f"{self.name}, shard {name!r}"

    def rows(self, shard: int, start: int) -> Iterator[Item]:
        """Yields the rows of a shard from row `start` on.

        Raises:
            SourceError: The user's code raised its `__cause__` for a row, which the error names.
        """
        one, row, rows = self.shards[shard], start, None
        try:
            rows = iter(self.open(one.name, start))
            for item in rows:
                yield item
                row += 1
        except Exception as error:  # noqa: BLE001 (raised as an error that names the row)
            if isinstance(error, LookupError) and row == one.num_rows:
                return  # the source refuses positions behind its last row
            raise_named(self.label, error, place(self.at(shard), row=row))
        finally:
            _close(rows)

    def taken(self, shard: int, start: int, count: int) -> list[Item]:
        """Returns `count` rows beginning at row `start`, fewer at the end."""
        rows = self.rows(shard, start)
        try:
            return list(itertools.islice(rows, count))
        finally:
            _close(rows)


class OwnSource(Source):
    """The rows of a user's own source, as `as_source` makes it; implements ShardedSource.

    Columns follow from the first 1,024 rows; lists and objects with mixed types inside are JSON. A
    row that does not fit those that are selected, or that is not a dict, raises SourceError or is a
    reject (`skip`). Rows that can only be read forward are asked for once, in order, on one thread.
    Rows of a source with `open_shard_at_row` are asked for when they are needed, on any thread.
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
        self._known: JsonObject = {}  # facts that were found, shared by the copies of `select`
        self._lock = threading.RLock()

    @property
    def schema(self) -> pa.Schema:
        whole, chosen = self._whole, self._columns
        return whole if chosen is None else pa.schema([whole.field(name) for name in chosen])

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards, counted if necessary; passes on errors of the user's source."""
        return self._found(
            "shards", lambda: tuple(self._count()) if self._counted else self._given.shards
        )

    @property
    def info(self) -> SourceInfo:
        why = () if self.cacheable else (f"{self._given.label} has no version",)
        return SourceInfo(cacheable=self.cacheable, unversioned=why, uncounted=True)

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
        """Returns the same rows with only `columns`; both sources share what is read."""
        clone = copy.copy(self)
        require_columns(columns, self.schema.names, self._given.name)
        clone._columns = tuple(
            dict.fromkeys([*columns, ROW_NUMBER] if self._given.skip else columns)
        )
        return clone

    def exactly(self, columns: Sequence[str]) -> OwnSource:
        clone = copy.copy(self)
        clone._known, clone._lock, clone._exact = {}, threading.RLock(), tuple(columns)
        clone._kept = _Kept(self._given)
        return clone

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """Returns rows `start` to `stop`; fewer only if the shard's end is not known."""
        info, limit = self.shards[shard], self._limit(shard)
        require_rows(start, stop, info.num_rows, self._given.at(shard))
        # where the shard should end, one more row is asked for, and there must be none
        more = stop + (start < stop == info.num_rows != limit)
        if self._given.seeks:
            taken = self._given.taken(shard, start, more - start)
            found = start + len(taken)
            some = taken[: stop - start]
            batch = dicts.as_batch(some, range(start, start + len(some)), self._whole)
        else:
            found = self._kept.pull(shard, more, self._whole, limit)
            batch = self._kept.read(shard, start, stop, self._whole, limit)
        if info.num_rows is not None and not stop <= found <= info.num_rows:
            raise self._miscounted(shard, info.num_rows, found)
        numbers, at = range(start, start + batch.num_rows), self._given.at(shard)
        return dicts.fitting(batch, numbers, self._columns, at, skip=self._given.skip)

    def at_end(self, shard: int, position: int) -> bool:
        """Returns whether there is no row at `position` or after it."""
        if self._given.seeks:
            return not self._given.taken(shard, position, 1)
        return self._kept.pull(shard, position + 1, self._whole) <= position

    def _limit(self, shard: int) -> int | None:
        """Returns the most rows of a shard that may be asked for; None if it is read to its end."""
        if self._num_rows is None:
            return None
        so_far = sum(one.num_rows or 0 for one in self.shards[: shard + 1])
        return self.shards[shard].num_rows if so_far == self._num_rows else None

    def _miscounted(self, shard: int, num_rows: int, found: int) -> SourceError:
        """Returns the error for a shard that has more or fewer rows than `num_rows`."""
        given = self._given
        if given.shards[shard].num_rows is None:
            known, fix = (
                f"the {num_rows} that were counted",
                "Change its version whenever its rows change.",
            )
        else:
            known = f"its num_rows, which is {num_rows}"
            fix = f"Correct num_rows in {given.label}, or make it None: the rows are then counted."
        problem = (
            f"ended after {found} rows, fewer than" if found < num_rows else "has more rows than"
        )
        return SourceError(at=given.at(shard), problem=f"{problem} {known}", fix=fix)

    @property
    def _whole(self) -> pa.Schema:
        """All columns."""
        return self._found("schema", self._columns_of_first_rows)

    def _columns_of_first_rows(self) -> pa.Schema:
        given, (at, rows) = self._given, self._kept.first_rows(dicts.FIRST_ROWS)
        schema = dicts.columns_of(rows, at, exact=self._exact)
        if given.features is not None:
            schema = with_classes(schema, given.features)
        return with_row_numbers(schema) if given.skip else schema

    def _found(self, what: str, find: Callable[[], Any]) -> Any:
        """Returns a fact about the rows: known already, from an earlier process, or found now."""
        with self._lock:
            if what not in self._known:
                self._recall()
            if what not in self._known:
                self._known[what] = find()
                if what == "shards":
                    self._remember()
            return self._known[what]

    def _count(self) -> Iterator[Shard]:
        """Yields the shards with their numbers of rows."""
        left = self._num_rows
        for number, shard in enumerate(self._given.shards):
            if left == 0:
                break
            rows, size = shard.num_rows, shard.num_bytes
            if rows is None and self._given.seeks:
                rows = sum(1 for _ in itertools.islice(self._given.rows(number, 0), left))
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
        """Returns where the counts are kept between processes; None if they are not."""
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
        """Takes over the facts that an earlier process found."""
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
    """Rows that can only be read forward, each taken once, in an unnamed temporary file.

    It is thread-safe. All iterators are begun and advanced on one thread, because many of them hold
    something that belongs to one thread, such as a connection to a database.
    """

    def __init__(self, given: Given) -> None:
        self._given = given
        self._lock = threading.Lock()
        self._thread: Threads | None = None
        self._file: Any = None
        self._shards = [_Pulled() for _ in given.shards]

    def first_rows(self, count: int) -> tuple[str, list[Item]]:
        """Returns the first `count` rows of the first shard that has rows, and its place."""
        given = self._given

        def look() -> tuple[str, list[Item]]:
            for shard in range(len(given.shards)):
                taken = given.taken(shard, 0, count)
                for row, one in enumerate([] if given.skip else taken):
                    dicts.require_row(one, row, given.at(shard))
                if taken:
                    return given.at(shard), taken
            return given.name, []

        return self._on_thread(look)

    def pull(
        self, shard: int, rows: int | None, columns: pa.Schema, limit: int | None = None
    ) -> int:
        """Takes rows until there are `rows` of them; None takes all.

        Args:
            shard: The number of the shard.
            rows: How many rows are needed.
            columns: The columns of the rows.
            limit: The most rows of the shard; no later row is ever asked for.

        Returns:
            The number of rows that were taken, which is all, or at least `rows`.
        """
        pulled = self._shards[shard]
        if not pulled.ended and (rows is None or pulled.rows < rows):
            self._on_thread(lambda: self._advance(shard, rows, columns, limit))
        return pulled.rows

    def read(
        self, shard: int, start: int, stop: int, columns: pa.Schema, limit: int | None
    ) -> pa.RecordBatch:
        """Returns rows `start` to `stop`, as `dicts.as_batch` does; they are taken if necessary."""
        stop = min(stop, self.pull(shard, stop, columns, limit))
        if start >= stop:
            return dicts.as_batch([], [], columns)
        pulled = self._shards[shard]
        first, last = start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)
        blocks = [
            pa.ipc.read_record_batch(pa.py_buffer(self._bytes(*at)), dicts.with_faults(columns))
            for at in pulled.places[first:last]
        ]
        table = pa.Table.from_batches(blocks)
        table = table.slice(start - first * BLOCK_ROWS, stop - start)
        return table.combine_chunks().to_batches()[0]

    def num_bytes(self, shard: int) -> int:
        return self._shards[shard].num_bytes

    def _on_thread(self, work: Callable[[], Any]) -> Any:
        with self._lock:
            if self._thread is None:
                self._thread = Threads(1, thread_name_prefix="easypipe-rows")
        return self._thread.submit(work).result()

    def _advance(self, shard: int, rows: int | None, columns: pa.Schema, limit: int | None) -> None:
        """Takes whole blocks on the one thread, so that row r is in block r // BLOCK_ROWS."""
        given, pulled, at = self._given, self._shards[shard], self._given.at(shard)
        while not pulled.ended and (rows is None or pulled.rows < rows):
            if pulled.iterator is None:
                pulled.iterator = given.rows(shard, pulled.rows)
            try:
                count = min(BLOCK_ROWS, (limit or sys.maxsize) - pulled.rows)
                taken = list(itertools.islice(pulled.iterator, count))
                numbers = range(pulled.rows, pulled.rows + len(taken))
                batch = dicts.as_batch(taken, numbers, columns)
                data = memoryview(batch.serialize())
                pulled.places.append((self._append(data), len(data)))
            except BaseException:
                _close(pulled.iterator)
                # An iterator that raised looks as if it had ended: the next call begins another one
                # after the rows that are kept.
                pulled.iterator = None
                raise
            pulled.num_bytes += batch.nbytes - batch.column(dicts.FAULTS).nbytes
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

    def _append(self, data: memoryview) -> int:
        """Writes a block, and returns where it begins in the file."""
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
    """The rows that were taken from a shard so far.

    Attributes:
        iterator: Where reading continues; None if it has to begin.
        places: (offset, bytes) of each block in the file.
        rows: How many rows were taken.
        num_bytes: Their bytes in memory.
        ended: Whether these are all rows.
    """

    def __init__(self) -> None:
        self.iterator: Iterator[Item] | None = None
        self.places: list[tuple[int, int]] = []
        self.rows = self.num_bytes = 0
        self.ended = False


def _called(member: object) -> Any:
    """Returns an attribute, or what it returns if the user's class defines it as a method."""
    return member() if callable(member) else member


def _sharded(data: Dataset) -> Given:
    """Returns the members of an object that opens shards by name."""
    kind, base = type(data), ShardedDataSource
    own = [
        name
        for name in ("open_shard", "open_shard_at_row")
        # only methods that the user's class defines itself
        if _has(data, name) and getattr(kind, name, None) is not getattr(base, name)
    ]
    require(
        own,
        "data_files",
        f"{kind.__name__} has neither open_shard(name) nor read(shard, start, stop)",
        "Give it shard_names and open_shard, which yields a dict for every row.",
    )
    shards = _called(attribute_of(data, "shards"))
    require(
        shards is None
        or (isinstance(shards, Collection) and all(isinstance(one, Shard) for one in shards)),
        "data_files",
        f"shards of {kind.__name__} are {shards!r}",
        "Give a list of Shard(name=..., num_rows=...), or leave shards out and give shard_names.",
    )
    names = (
        [shard.name for shard in shards]
        if shards is not None
        else _called(attribute_of(data, "shard_names"))
    )
    require(
        isinstance(names, Collection)
        and not isinstance(names, str | set | frozenset)  # a set has another order in each process
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
        # a shard of 0 rows would never be read, so that its rows are counted
        else tuple(replace(shard, num_rows=shard.num_rows or None) for shard in shards),
        open=data.open_shard_at_row if seeks else from_start,
        seeks=seeks,
        label=name_of(data),
        held=held_by(data),
        version=attribute_of(data, "version"),
    )


def _one_shard(data: Dataset, name: str) -> Given:
    """Returns the members of a function or an iterable, as one shard."""
    require(
        not isinstance(data, Iterator),
        "data_files",
        f"a {type(data).__name__} can be read only once, and rows are read again where "
        "they are needed again",
        "Give the function that makes it, without calling it.",
    )
    # an object may be both callable and iterable: then it is iterated over
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
        # the `version` of a library's dataset says little about its rows
        version=attribute_of(data, "version") if called else None,
        features=attribute_of(attribute_of(data, "features"), "arrow_schema"),
    )


def _behind(rows: Iterator[Item], row: int) -> Iterator[Item]:
    """Returns the same iterator, advanced by `row` rows."""
    for _ in itertools.islice(rows, row):
        pass
    return rows


def _close(rows: Dataset) -> None:
    """Closes a generator, on the thread that it belongs to."""
    close = attribute_of(rows, "close")
    if close is not None:
        close()


def _has(data: Dataset, name: str) -> bool:
    """Returns whether an object has a member that is not None, without evaluating properties.

    A property may open files. A value is read only if the object has `__getattr__`.
    """
    missing = object()
    found = inspect.getattr_static(data, name, missing)
    return (
        found is not None
        if found is not missing
        else hasattr(type(data), "__getattr__") and getattr(data, name, None) is not None
    )
