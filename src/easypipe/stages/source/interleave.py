"""Interleaves rows of several sources, named or not, in proportions that hold at every prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from easypipe.core.class_names import classes_of
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, require
from easypipe.core.protocols import Shard, ShardedSource, Source, SourceInfo, info_of
from easypipe.core.schema import (
    ORIGIN,
    ROW_NUMBER,
    SOURCE,
    fields_text,
    offsets_of,
    row_numbers,
    with_row_numbers,
    without_row_numbers,
)
from easypipe.core.values import Int32, Int64, Record
from easypipe.plan.mix import Stop, integer_weights
from easypipe.plan.order import OrderConfig
from easypipe.plan.spec import STOPS
from easypipe.plan.windows import Plan, PlanDataset, PlanSpec
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.external.objects import open_object
from easypipe.sources.external.own import is_complete
from easypipe.stages.mix.config import block_weights, check_weights
from easypipe.stages.source.config import is_object
from easypipe.transforms.columns.base import as_array

WINDOW_ROWS = 8192
GAP_ROWS = 64  # gaps of at most this many rows are read and dropped instead of skipped


def _named(
    datasets: Mapping[str, Any] | Sequence[Any],
    weights: Mapping[str, float] | Sequence[float] | None,
) -> tuple[Mapping[str, Any], dict[str, float] | None]:
    """Returns (datasets by name, weights by name or None)."""
    if not isinstance(datasets, Mapping):
        require(
            not isinstance(weights, Mapping),
            "weights",
            "have names, and the datasets have none",
            "Give the datasets as {name: source}.",
        )
        datasets = {f"dataset{i}": source for i, source in enumerate(datasets, start=1)}
    names = list(datasets)
    require(names, "datasets", "there is nothing to mix", "Give at least one source.")
    if weights is None or isinstance(weights, Mapping):
        return datasets, None if weights is None else dict(weights)
    require(
        len(weights) == len(names),
        "weights",
        f"{len(weights)} weights for {len(names)} datasets",
        have=names,
    )
    return datasets, dict(zip(names, weights, strict=True))


def block_mixture_interleave(
    datasets: Mapping[str, Any] | Sequence[Any],
    weights: Mapping[str, float] | Sequence[float] | None = None,
    block_size: int | None = None,
    seed: int | None = None,
    stop_strategy: Stop = "restart",
    *,
    block_rows: int = 1,
) -> InterleavedSource:
    """Returns one source of the rows of several, drawn by weight.

    Args:
        datasets: Sources by name, or a list of them, which are then called dataset1, dataset2, ...
            Each is a source or rows in memory (a list of dicts, a table, a dict of columns, a
            `datasets.Dataset`). Their rows must be counted and have the same columns.
        weights: A positive number for each, in any scale; None gives every dataset the same.
        block_size: Round the shares to whole rows of a block of this size; None keeps every prefix
            within one row of its share.
        seed: Read the rows of each dataset in permuted order, which is new in every pass; None
            keeps their order.
        block_rows: With a seed, permute blocks of this many consecutive rows, so that reads stay
            large.
        stop_strategy: As in MixStageConfig; `restart` never ends, so its shard has no row count.

    Raises:
        ConfigError: Options conflict.
        PlanError: A dataset has no rows.
    """
    named, by_name = _named(datasets, weights)
    names = list(named)
    require(
        stop_strategy in STOPS, "stop_strategy", f"{stop_strategy!r} is not an option", have=STOPS
    )
    require(
        seed is not None or block_rows == 1,
        "block_rows",
        "has no effect without a seed",
        "Leave it out, or give a seed.",
    )
    require(
        block_rows >= 1, "block_rows", f"{block_rows} is not a block of rows", "Give at least 1."
    )
    require(
        block_size is None or 1 <= block_size <= 1 << 40,
        "block_size",
        f"{block_size} is not a block of rows",
        "Give at least 1.",
    )
    check_weights(by_name, names, "weights")
    shares = {name: 1.0 if by_name is None else by_name[name] for name in names}
    whole = integer_weights(shares) if block_size is None else block_weights(shares, block_size)
    sources = {name: _as_source(name, data) for name, data in named.items()}
    return InterleavedSource(
        sources,
        whole,
        stop_strategy,
        OrderConfig(shuffle=seed is not None, block_rows=block_rows),
        seed or 0,
    )


class InterleavedSource(Source):
    """The source that `block_mixture_interleave` makes from several sources.

    It has the columns of its sources, and `__source__`, the dataset that a row came from. Iterating
    over it yields the rows as dicts, from the first; an endless mixture never stops.

    Law (stateless reads): the dataset and row behind row `r` are computed, so any range can be read
    at any time, on any thread. Rows that a source leaves out (a blank line, a skipped bad row) are
    left out here, and `__row_number__` numbers the others.

    Args:
        sources: The sources by name.
        weights: A positive integer for each source.
        stop: The stop_strategy.
        order: Whether and how the rows of each source are permuted.
        seed: The seed of the permutations.

    Raises:
        ConfigError: The sources have different columns, or rows that are not counted.
    """

    def __init__(
        self,
        sources: Mapping[str, ShardedSource],
        weights: Sequence[int],
        stop: Stop,
        order: OrderConfig,
        seed: int,
    ) -> None:
        self.sources = dict(sources)
        assert self.sources, "block_mixture_interleave has looked"
        schemas = {  # saved rows say that some columns hold no null
            name: pa.schema([f.with_nullable(True) for f in without_row_numbers(source.schema)])
            for name, source in self.sources.items()
        }
        first, schema = next(iter(schemas.items()))
        for name, other in schemas.items():
            require(
                other.equals(schema),
                f"datasets.{name}",
                f"has the columns {fields_text(other)}, and {first!r} has {fields_text(schema)}",
                "Select, rename or cast columns until they agree.",
            )
            for one, its in zip(schema, other, strict=True):
                require(
                    classes_of(its) == classes_of(one),
                    f"datasets.{name}",
                    f"the classes of {one.name!r} are {classes_of(its)}, and {classes_of(one)} in "
                    f"{first!r}",
                    "Leave the column out, or write its names with Map.",
                )
        require(
            SOURCE not in schema.names,
            "datasets",
            f"has a column {SOURCE!r} already",
            "Drop or rename it.",
        )
        self._numbered = any(ROW_NUMBER in source.schema.names for source in self.sources.values())
        self.schema = schema.append(ORIGIN)
        if self._numbered:
            self.schema = with_row_numbers(self.schema)
        self._columns = schema
        self._spec = PlanSpec(
            seed=seed,
            weights=tuple(weights),
            stop=stop,
            window_docs=WINDOW_ROWS,
            num_epochs=None if stop == "restart" and len(self.sources) > 1 else 1,
            order=order,
        )

    @property
    def shards(self) -> tuple[Shard, ...]:
        return (Shard(name="interleaved", num_rows=self.plan.num_rows),)

    @property
    def fingerprint(self) -> str:
        return digest("interleaved", self.plan.fingerprint)

    @property
    def info(self) -> SourceInfo:
        """The declarations that are true of the rows of all sources."""
        every = [info_of(source) for source in self.sources.values()]
        first, same = every[0], len({(one.tokens, one.turns) for one in every}) == 1
        return SourceInfo(
            tokens=first.tokens if same else None,
            turns=first.turns if same else None,
            cacheable=all(one.cacheable for one in every),
            unversioned=tuple(dict.fromkeys(why for one in every for why in one.unversioned)),
            aligned=tuple(dict.fromkeys(name for one in every for name in one.aligned)),
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan of which row of which source is where; it counts the rows of the sources."""
        datasets = [
            PlanDataset(
                name,
                int(self._starts[i][-1]),
                int(self._starts[i][-1]),
                source.fingerprint,
                _one_each,
            )
            for i, (name, source) in enumerate(self.sources.items())
        ]
        return Plan(datasets, self._spec)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        """Returns rows `start` to `stop`.

        Raises:
            PlanError: `stop` is beyond the last row.
        """
        assert shard == 0, f"interleaved rows are one shard, not {shard + 1}"
        if start == stop:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        pieces = self.plan.pieces(np.arange(start, stop, dtype=np.int64))  # one piece for each row
        tables: list[pa.Table] = []
        # the place of each row in what was read; -1 if its source leaves it out
        place = np.full(stop - start, -1, dtype=np.int64)
        read = 0
        for i, source in enumerate(self.sources.values()):
            mine = np.flatnonzero(pieces.dataset == i)
            for run in _runs(self._starts[i], pieces.doc[mine]):
                batch = source.read(run.shard, run.start, run.stop)
                there = np.full(run.stop - run.start, -1, dtype=np.int64)
                there[row_numbers(batch, run.start) - run.start] = np.arange(batch.num_rows)
                found = there[run.rows]
                place[mine[run.which]] = np.where(found < 0, -1, read + found)
                tables.append(
                    pa.Table.from_batches([batch]).select(self._columns.names).cast(self._columns)
                )
                read += batch.num_rows
        kept = np.flatnonzero(place >= 0)
        table = pa.concat_tables(tables).take(pa.array(place[kept])).combine_chunks()
        columns = [
            as_array(table.column(name), self._columns.field(name).type)
            for name in self._columns.names
        ]
        origin = pa.DictionaryArray.from_arrays(
            pa.array(pieces.dataset[kept]), pa.array(list(self.sources), pa.string())
        )
        numbers = [pa.array(kept + start)] if self._numbered else []
        return pa.record_batch([*columns, origin, *numbers], schema=self.schema)

    def __iter__(self) -> Iterator[Record]:
        return self._rows_of(0, 0, self.shards[0].num_rows)

    @cached_property
    def _starts(self) -> list[Int64]:
        """For each source Int64[shards + 1]: the rows before each shard, and in all."""
        starts = []
        for name, source in self.sources.items():
            counts: list[int] = []
            for shard in source.shards:
                if shard.num_rows is None:
                    raise ConfigError(
                        at=f"datasets.{name}",
                        problem=f"the rows of {shard.name} are not counted",
                        fix="Mix sources whose rows have an end.",
                    )
                counts.append(shard.num_rows)
            starts.append(offsets_of(counts))
        return starts


def _as_source(name: str, data: Any) -> ShardedSource:
    """Returns a source unchanged, and rows in memory as a source.

    Raises:
        ConfigError: `data` is neither.
    """
    if is_complete(data):
        return data
    if isinstance(data, str | Path):
        fix = f"Open it: Pipeline(...).source().get_data()[...], or open_files({str(data)!r})."
        raise ConfigError(
            at=f"datasets.{name}", problem=f"{str(data)!r} is a path, not rows", fix=fix
        )
    try:
        return (
            open_object(data, name=name)
            if is_object(data)
            else InMemoryShardedSource(data, name=name)
        )
    except (TypeError, ValueError) as error:
        fix = "Give a source, a list of dicts, a table or a datasets.Dataset."
        raise ConfigError(
            at=f"datasets.{name}", problem=f"{type(data).__name__} holds no rows: {error}", fix=fix
        ) from None


class _Run(NamedTuple):
    """Rows `start` to `stop` of a shard, which are read at once.

    Attributes:
        shard: The number of the shard.
        start: The first row.
        stop: The row after the last.
        rows: Int64[n], the requested rows, counted from `start`.
        which: Int64[n], the positions of these rows in the request.
    """

    shard: int
    start: int
    stop: int
    rows: Int64
    which: Int64


def _runs(starts: Int64, docs: Int64) -> Iterator[_Run]:
    """Yields the rows `docs`, counted over all shards, in few ranges."""
    order = np.argsort(docs, kind="stable")
    ascending = docs[order]
    shards = np.searchsorted(starts, ascending, side="right") - 1
    cuts = np.flatnonzero((np.diff(ascending) > GAP_ROWS) | (np.diff(shards) > 0)) + 1
    for part in np.split(np.arange(docs.size), cuts):
        if part.size:
            shard, first, last = (
                int(shards[part[0]]),
                int(ascending[part[0]]),
                int(ascending[part[-1]]),
            )
            before = int(starts[shard])
            yield _Run(
                shard, first - before, last + 1 - before, ascending[part] - first, order[part]
            )


def _one_each(docs: Int64) -> Int32:
    """Returns a length of 1 for each row, as the plan counts rows here."""
    return np.ones(docs.shape[0], dtype=np.int32)
