"""Columns of the source beside the tokens that came of it, for rows that are saved as documents."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from easypipe.cache.reader import TokenCache
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, place
from easypipe.core.protocols import Shard, ShardedSource, Source, scan
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, ROW_NUMBER

log = logging.getLogger("easypipe")


class TokensAndColumns(Source):
    """The documents of a token cache with `columns` of the rows that they came from; implements
    ShardedSource, a shard for each token file.

    The cache keeps row numbers and no columns: those are read from the source, so it must still be
    there and be what it was.
    """

    def __init__(self, cache: TokenCache, source: ShardedSource, columns: Sequence[str]) -> None:
        self._cache, self._source, self._columns = cache, source, list(columns)
        self._parts = [part for part in cache.manifest.parts if part.docs]
        self._tokens = [name for name in (INPUT_IDS, LOSS_MASK) if name in cache.schema.names]
        self.schema = pa.schema(
            [
                *(cache.schema.field(name) for name in self._tokens),
                *(source.schema.field(name) for name in self._columns),
            ]
        )
        self.fingerprint = digest(
            "tokens and columns", cache.fingerprint, source.fingerprint, self._columns
        )
        self.shards = tuple(
            Shard(name=part.file, num_rows=part.docs, num_bytes=part.num_bytes)
            for part in self._parts
        )

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        """Raises SourceError naming a row that the source has no more."""
        part = self._parts[shard]
        documents = self._cache.read(part.shard, part.start, part.stop).slice(start, stop - start)
        numbers = documents.column(ROW_NUMBER).to_numpy()
        if not len(numbers):
            return pa.RecordBatch.from_arrays(
                [pa.nulls(0, field.type) for field in self.schema], schema=self.schema
            )
        first = int(numbers[0])
        rows = scan(self._source, part.shard, first, int(numbers[-1]) + 1).batch
        found = (
            rows.column(ROW_NUMBER).to_numpy()
            if ROW_NUMBER in rows.schema.names
            else np.arange(first, first + rows.num_rows)
        )
        at = np.searchsorted(found, numbers)
        gone = (
            np.flatnonzero(found[np.minimum(at, len(found) - 1)] != numbers)
            if len(found)
            else np.arange(1)
        )
        if gone.size:
            raise SourceError(
                at=place(self._source.shards[part.shard].name, row=int(numbers[gone[0]])),
                problem="was tokenized, and cannot be read any more",
                fix="Prepare the dataset again, or leave out additional_fields.",
            )
        columns = [rows.column(name).take(pa.array(at)) for name in self._columns]
        return pa.RecordBatch.from_arrays(
            [*(documents.column(name) for name in self._tokens), *columns], schema=self.schema
        )


def warn_of_left_columns(stage: str, data: Mapping[str, ShardedSource]) -> None:
    """Says which extra columns do not go on behind `stage`."""
    for name, source in data.items():
        columns = getattr(source, "keep", ())
        if columns:
            log.warning(
                "dataset %s: %s() leaves columns behind, save() before it writes them: %s",
                name,
                stage,
                ", ".join(columns),
            )
