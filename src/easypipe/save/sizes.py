"""How large rows will be in a file: measured on samples of the data, with the format and codec that
will write them.

block     neighbouring rows, about a megabyte of values; some blocks are written to memory to see what becomes of them
ratio     bytes in a file over bytes of values; a block that is not sampled takes the ratio of the last one that was
stretch   rows as many as a shard holds, written to memory as a shard is; they correct what blocks
alone cannot show
          (a codec sees further in a long file, and each row group has a header)

Blocks, samples and stretches follow from the rows alone, so that every run measures the same and
cuts the same shards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.core.errors import ConfigError
from easypipe.core.protocols import ShardedSource
from easypipe.save.layout import (
    BATCH_BYTES,
    Sizes,
    batches,
    count_rows,
    default_shard_bytes,
    edges_by_bytes,
    edges_by_size,
    even_edges,
    raw_blocks,
)
from easypipe.save.shard_writer import open_writer

log = logging.getLogger("easypipe")

BLOCK_BYTES = 1 << 20
BLOCKS_PER_SHARD = 16
MOST_BYTES = 1 << 62
STRETCHES = 4
EXACT_BYTES = 4 << 20  # of values; shards below it are measured whole
TRIALS = 12  # at finding how many rows such a shard takes
NEAR = 0.97  # of the room is full enough
EXACT_FILL = 0.99
FILL = 0.96  # of the limit is planned for: what the samples do not show seldom passes it
# a shard takes so many times what a file without rows takes, or its size says nothing about rows
LEAST_FILES = 4


def plan_shards(
    source: ShardedSource,
    format: str,
    compression: str,
    *,
    num_shards: int | None,
    max_bytes: int | None,
) -> tuple[NDArray[np.int64], str]:
    """(Int64[shards + 1] row numbers, which option decided on them).

    num_shards alone deals the rows evenly. max_bytes alone fills file after file up to that size on
    disk. With both the one that makes more shards decides. With neither a shard takes an eighth of
    the data, before compression.

    Raises ConfigError where there are fewer rows than shards, or where `max_bytes` cannot hold a
    file of these columns.
    """
    total = count_rows(source.shards)
    if num_shards is not None and num_shards > max(1, total):
        raise ConfigError(
            at="save.num_shards",
            problem=f"{num_shards} shards for {total} rows",
            fix=f"Ask for at most {max(1, total)}.",
        )
    if max_bytes is None:
        if num_shards is not None:
            return even_edges(total, num_shards), "num_shards"
        blocks = ((first, sizes) for first, sizes, _ in raw_blocks(source, 0, total, MOST_BYTES))
        return edges_by_size(blocks, total, default_shard_bytes(source.shards)), "default"
    sizes = DiskSizes(source, format, compression, max_bytes)
    sizes.check()
    num_bytes = 0.0

    def counted() -> Sizes:
        nonlocal num_bytes
        for first, block in sizes:
            num_bytes += float(block.sum())
            yield first, block

    edges = sizes.exact_edges() if sizes.small else edges_by_size(counted(), total, sizes.room)
    needed = len(edges) - 1
    if num_shards is None:
        return edges, "max_shard_size"
    if needed > num_shards:
        log.info(
            "save: max_shard_size asks for %d shards, num_shards for %d: the stricter wins, %d are written",
            needed,
            num_shards,
            needed,
        )
        return edges, "max_shard_size"
    log.info(
        "save: num_shards=%d asks for as many shards as max_shard_size (%d) or more: it decides",
        num_shards,
        needed,
    )
    if sizes.small:
        num_bytes = sum(float(block.sum()) for _, block in sizes)
    return edges_by_bytes(sizes, total, num_shards, num_bytes), "num_shards"


class DiskSizes:
    """Bytes that rows of `source` take in files of `format` with `compression`, for shards of
    `max_bytes`.
    """

    def __init__(
        self, source: ShardedSource, format: str, compression: str, max_bytes: int
    ) -> None:
        self.source, self.format, self.compression, self.max_bytes = (
            source,
            format,
            compression,
            max_bytes,
        )

    @property
    def small(self) -> bool:
        """Whether shards are so small that samples would misjudge them, and each is written to
        memory instead.
        """
        return self._shard_raw <= EXACT_BYTES

    def exact_edges(self) -> NDArray[np.int64]:
        """Int64[shards + 1]: each shard with as many rows as were seen to fit; a row above the
        limit has a shard of its own.
        """
        room = self.max_bytes * EXACT_FILL
        edges, rows = [0], max(1, int(room / self._ratio / self._probe[0]))
        while edges[-1] < self._num_rows:
            rows = self._fitting(edges[-1], rows, room)
            edges.append(edges[-1] + rows)
        return np.array(edges if self._num_rows else [0, 0], np.int64)

    def _fitting(self, start: int, guess: int, room: float) -> int:
        """Rows from `start` that fill `room` to within a few hundredths: the guess is corrected by
        what it was seen to take.
        """
        most = self._num_rows - start
        rows, low, high = min(guess, most), 0, most + 1  # `low` rows fit, `high` do not
        for _ in range(TRIALS):
            size = self._written_rows(start, start + rows)
            if size <= room:
                low = rows
                if rows == most or size >= room * NEAR:
                    break
            else:
                high = rows
            if high - low <= 1:
                break
            wanted = int(rows * (room * (1 + NEAR) / 2 - self._empty) / max(1, size - self._empty))
            rows = min(max(wanted, low + 1), high - 1, most)
        return max(1, low)

    def check(self) -> None:
        """Raises ConfigError where `max_bytes` is too little for a file of this format."""
        least = LEAST_FILES * self._empty
        if self.max_bytes < least:
            raise ConfigError(
                at="save.max_shard_size",
                problem=f"{self.max_bytes:,} bytes: a {self.format} file of these columns takes {self._empty:,} without any row",
                fix=f"Give at least {least:,}.",
            )

    @property
    def room(self) -> float:
        """Bytes for the rows of a shard that samples are trusted with."""
        return self.max_bytes * FILL - self._empty

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """(first row, bytes of each row from there on), over all rows. Rows that a source refuses
        take nothing, but keep their place.
        """
        for first, sizes in self._estimates(0, self._num_rows):
            yield first, sizes * self._correction

    def _estimates(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.float64]]]:
        ratio, unseen = self._ratio, float("inf")
        for first, sizes, read in raw_blocks(self.source, start, stop, self._block_bytes):
            unseen += sizes.sum()
            if unseen >= self._sample_every and sizes.any():
                written = self._written([read()]) - self._empty
                ratio, unseen = written / sizes.sum(), 0.0
            yield first, sizes.astype(np.float64) * ratio

    @cached_property
    def _num_rows(self) -> int:
        return sum(shard.num_rows or 0 for shard in self.source.shards)

    @cached_property
    def _empty(self) -> int:
        return self._written([])

    @cached_property
    def _probe(self) -> tuple[float, float]:
        """(bytes of values of a row, ratio), of a few rows here and there."""
        rows, raw, written = 0, 0, 0
        for at in _places(self._num_rows):
            for _, sizes, read in raw_blocks(self.source, at, self._num_rows, BLOCK_BYTES):
                if sizes.any():
                    rows += sizes.size
                    raw += int(sizes.sum())
                    written += self._written([read()]) - self._empty
                    break
        return (raw / rows, written / raw) if raw else (1.0, 1.0)

    @property
    def _ratio(self) -> float:
        return self._probe[1]

    @cached_property
    def _shard_raw(self) -> float:
        return self.max_bytes / max(self._ratio, 1e-6)

    @cached_property
    def _block_bytes(self) -> int:
        return int(min(max(self._shard_raw / BLOCKS_PER_SHARD, 1), BLOCK_BYTES))

    @cached_property
    def _sample_every(self) -> float:
        return self._shard_raw / BLOCKS_PER_SHARD

    @cached_property
    def _correction(self) -> float:
        """What stretches take in a file over what their blocks let expect."""
        count = max(1, int(min(self._shard_raw, BATCH_BYTES) / self._probe[0]))
        expected, written = 0.0, 0
        for at in _places(self._num_rows):
            stop = min(at + count, self._num_rows)
            expected += sum(float(sizes.sum()) for _, sizes in self._estimates(at, stop))
            written += self._written_rows(at, stop) - self._empty
        return written / expected if expected else 1.0

    def _written_rows(self, start: int, stop: int) -> int:
        return self._written(batch for batch, _ in batches(self.source, start, stop))

    def _written(self, rows: Iterable[pa.RecordBatch]) -> int:
        sink = pa.BufferOutputStream()
        with open_writer(sink, self.format, self.compression, self.source.schema) as write:
            for batch in rows:
                write(batch)
        return sink.getvalue().size


def _places(num_rows: int) -> list[int]:
    return (
        sorted({num_rows * (2 * i + 1) // (2 * STRETCHES) for i in range(STRETCHES)})
        if num_rows
        else []
    )
