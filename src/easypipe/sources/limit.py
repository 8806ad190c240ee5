"""The first rows of a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError
from easypipe.core.protocols import (
    Scan,
    Shard,
    ShardedSource,
    Source,
    SourceInfo,
    identity_of,
    info_of,
    raw_of,
    scan,
    select,
)


class LimitedSource(Source):
    """The first `num_rows` physical rows of a source over its shards in order; fewer where it has
    fewer.

    Row numbers stay those of the source: the limit counts rows before any are refused. Raises
    ConfigError for a limit below 1.
    """

    def __init__(self, source: ShardedSource, num_rows: int) -> None:
        if num_rows < 1:
            raise ConfigError(
                at="num_rows",
                problem=f"{num_rows} rows are no dataset",
                fix="Give at least 1, or None for all rows.",
            )
        self.source = source
        self.num_rows = num_rows
        self._shards: tuple[Shard, ...] | None = None

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    @property
    def shards(self) -> Sequence[Shard]:
        if self._shards is None:
            self._shards = tuple(_first(self.source.shards, self.num_rows))
        return self._shards

    @property
    def fingerprint(self) -> str:
        return digest("limit", self.num_rows, self.source.fingerprint)

    @property
    def info(self) -> SourceInfo:
        return info_of(self.source)

    @property
    def below(self) -> ShardedSource:
        return self.source

    def shard_identity(self, shard: int) -> str:
        """The source's own: a row is the same row under any limit."""
        return identity_of(self.source, shard)

    def select(self, columns: Sequence[str]) -> LimitedSource:
        """The same rows with only `columns`, where the source can leave out the others; else the
        source as it is.
        """
        return LimitedSource(select(self.source, columns), self.num_rows)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        self._check(shard, stop)
        return self.source.read(shard, start, stop)

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        self._check(shard, stop)
        return scan(self.source, shard, start, stop)

    def raw(self, shard: int, row: int) -> str | None:
        return raw_of(self.source, shard, row)

    def _check(self, shard: int, stop: int) -> None:
        here = self.shards[shard]
        if stop > (here.num_rows or 0):
            raise SourceError(
                at=here.name,
                problem=f"row {stop - 1} was asked for",
                fix=f"num_rows leaves rows 0:{here.num_rows} of it.",
            )


def _first(shards: Sequence[Shard], num_rows: int) -> list[Shard]:
    kept = []
    for shard in shards:
        if num_rows == 0:
            break
        if shard.num_rows is None:
            raise SourceError(
                at=shard.name,
                problem="its rows cannot be counted, so num_rows cannot be kept",
                fix="Leave num_rows out.",
            )
        rows = min(shard.num_rows, num_rows)
        num_bytes = shard.num_bytes * rows // max(1, shard.num_rows)
        kept.append(
            replace(
                shard,
                num_rows=rows,
                cuts=tuple(cut for cut in shard.cuts if cut < rows) or (0,),
                num_bytes=num_bytes,
            )
        )
        num_rows -= rows
    return kept
