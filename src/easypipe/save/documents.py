"""What is saved: documents of a token cache with columns of their source; rows without numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from easypipe.cache.reader import TokenCache
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, place
from easypipe.core.protocols import Reject, Scan, Shard, ShardedSource, Source, by_row, scan
from easypipe.core.schema import (
    HAS_EOS,
    INPUT_IDS,
    LOSS_MASK,
    ROW_NUMBER,
    data_columns,
    row_numbers,
    without_row_numbers,
)


class CachedDocuments(Source):
    """The documents of a token cache, with a shard for each token file.

    Their columns are `input_ids`, `loss_mask` if there is one, aligned columns, `has_eos` if a text
    may continue in another document, and columns of the rows of the source. The cache stores row
    numbers but not those columns: they are read from the source, which must still exist and be
    unchanged.

    Args:
        cache: The token cache.
        source: The source that was tokenized.
        columns: The columns of its rows.
        continues: Whether a text may continue in another document, or have lost its end.
    """

    def __init__(
        self,
        cache: TokenCache,
        source: ShardedSource,
        columns: Sequence[str] = (),
        *,
        continues: bool = False,
    ) -> None:
        self._cache, self._source, self._columns = cache, source, list(columns)
        self._parts = [part for part in cache.manifest.parts if part.docs]
        self._tokens = [name for name in (INPUT_IDS, LOSS_MASK) if name in cache.schema.names]
        self._tokens += [column.name for column in cache.aligned]
        self._tokens += [HAS_EOS] if continues else []
        kept = [source.schema.field(name) for name in self._columns]
        self.schema = pa.schema([*map(cache.schema.field, self._tokens), *kept])
        self.fingerprint = (
            digest("with ends", cache.fingerprint) if continues else cache.fingerprint
        )
        if columns:
            self.fingerprint = digest(
                "tokens and columns", self.fingerprint, source.fingerprint, self._columns
            )
        self.shards = tuple(
            Shard(name=part.file, num_rows=part.docs, num_bytes=part.num_bytes)
            for part in self._parts
        )

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        """Returns documents `start` to `stop` of a token file.

        Raises:
            SourceError: The source no longer has a row; the error names it.
        """
        part = self._parts[shard]
        documents = self._cache.read(part.shard, part.start, part.stop).slice(start, stop - start)
        kept = self._kept(part.shard, documents.column(ROW_NUMBER).to_numpy())
        return pa.RecordBatch.from_arrays(
            [*(documents.column(name) for name in self._tokens), *kept], schema=self.schema
        )

    def _kept(self, shard: int, numbers: np.ndarray) -> list[pa.Array]:
        """Returns the columns of the source for these row numbers."""
        if not len(numbers) or not self._columns:
            return [pa.nulls(0, self.schema.field(name).type) for name in self._columns]
        first = int(numbers[0])
        rows = scan(self._source, shard, first, int(numbers[-1]) + 1).batch
        found = row_numbers(rows, first)
        gone = numbers[~np.isin(numbers, found)]
        if gone.size:
            raise SourceError(
                at=place(self._source.shards[shard].name, row=int(gone[0])),
                problem="was tokenized, and cannot be read any more",
                fix="Prepare the dataset again, or leave out additional_fields.",
            )
        at = pa.array(np.searchsorted(found, numbers))
        return [rows.column(name).take(at) for name in self._columns]


class UnnumberedRows(Source):
    """The rows of a source without their numbers: readers of a saved folder count its rows."""

    def __init__(self, source: ShardedSource) -> None:
        self._source, self.schema = source, without_row_numbers(source.schema)
        self.shards, self.fingerprint = source.shards, source.fingerprint

    @property
    def below(self) -> ShardedSource:
        return self._source

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        batch, rejects = scan(self._source, shard, start, stop)
        # Some sources only say which rows they pass on.
        told = batch.num_rows + sum(reject.count for reject in rejects)
        if gone := stop - start - told:
            other = Reject(row=start, reason="other", detail="", benign=True, count=gone)
            rejects = by_row((*rejects, other))
        return Scan(batch.select(data_columns(batch.schema)), rejects)
