"""Where saved shards begin and end: integers from row counts and row sizes, the same in every
run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.core.errors import ConfigError
from easypipe.core.protocols import Scan, Shard, ShardedSource, scan
from easypipe.core.schema import ROW_NUMBER
from easypipe.save.shard_writer import row_bytes

LEAST_SHARD_BYTES, MOST_SHARD_BYTES = 16 << 20, 500 << 20
BATCH_BYTES = 16 << 20  # of one row group or record batch, before compression
MEASURED_ROWS = 4096  # rows whose sizes are held at a time

# (first row, bytes of each row from there on), in order
Sizes = Iterable[tuple[int, NDArray[np.int64] | NDArray[np.float64]]]


def locate(shards: Sequence[Shard], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(shard, first, last) pieces of rows `start` to `stop` of the source as a whole."""
    base = 0
    for index, shard in enumerate(shards):
        rows = shard.num_rows or 0
        a, b = max(start, base), min(stop, base + rows)
        if a < b:
            yield index, a - base, b - base
        base += rows


def batches(source: ShardedSource, start: int, stop: int) -> Iterator[Scan]:
    """Rows `start` to `stop` of the source as a whole, as they are written: about BATCH_BYTES at a
    time, judged by the first rows.
    """
    step = _batch_rows(source, start, stop)
    for shard, a, b in locate(source.shards, start, stop):
        for at in range(a, b, step):
            yield scan(source, shard, at, min(at + step, b))


def _batch_rows(source: ShardedSource, start: int, stop: int) -> int:
    for shard, a, b in locate(source.shards, start, stop):
        probe = source.read(shard, a, min(b, a + 64))
        if probe.num_rows:
            return max(1, BATCH_BYTES // max(1, probe.nbytes // probe.num_rows))
    return MEASURED_ROWS


def count_rows(shards: Sequence[Shard]) -> int:
    """Raises ConfigError where a shard does not know its rows."""
    for shard in shards:
        if shard.num_rows is None:
            raise ConfigError(
                at="save",
                problem=f"shard {shard.name!r} does not know how many rows it has",
                fix="Give it a row count.",
            )
    return sum(shard.num_rows or 0 for shard in shards)


def default_shard_bytes(shards: Sequence[Shard]) -> int:
    """An eighth of the data at rest, within bounds: it follows from the data alone, never from the
    machine.
    """
    return min(
        max(sum(shard.num_bytes for shard in shards) // 8, LEAST_SHARD_BYTES), MOST_SHARD_BYTES
    )


def even_edges(total: int, num_shards: int) -> NDArray[np.int64]:
    """Int64[shards + 1]: rows dealt evenly."""
    return np.arange(num_shards + 1, dtype=np.int64) * total // num_shards


def edges_by_size(sizes: Sizes, total: int, limit: float) -> NDArray[np.int64]:
    """Int64[shards + 1]: a shard takes rows until `limit` is full; a row above the limit has a
    shard of its own.
    """
    edges, room = [0], limit
    for base, block in sizes:
        at = 0
        while at < block.size:
            fit = int(np.searchsorted(np.cumsum(block[at:]), room, side="right"))
            if fit == 0 and base + at == edges[-1]:
                fit = 1
            if at + fit == block.size:
                room -= float(block[at:].sum())
                break
            at += fit
            edges.append(base + at)
            room = limit
    return np.array([*edges, total], dtype=np.int64)


def edges_by_bytes(
    sizes: Sizes, total: int, num_shards: int, num_bytes: float
) -> NDArray[np.int64]:
    """Int64[shards + 1]: so many shards of about equal bytes, of `num_bytes` in all; none of them
    without a row.
    """
    each, edges, before = num_bytes / num_shards, [0], 0.0
    for base, block in sizes:
        ends = before + np.cumsum(block)
        while len(edges) < num_shards and ends.size and ends[-1] >= each * len(edges):
            edges.append(base + int(np.searchsorted(ends, each * len(edges), side="left")) + 1)
        before = float(ends[-1]) if ends.size else before
    edges += [total] * (num_shards + 1 - len(edges))
    ranks = np.arange(num_shards + 1)
    # each one row at least behind the one before
    spread = np.maximum.accumulate(np.array(edges, np.int64) - ranks) + ranks
    return np.minimum(spread, total - num_shards + ranks)


def raw_blocks(
    source: ShardedSource, start: int, stop: int, block_bytes: int
) -> Iterator[tuple[int, NDArray[np.int64], Callable[[], pa.RecordBatch]]]:
    """(first row, bytes of the values of each row, a way to read them): blocks of about
    `block_bytes` that cover rows `start` to `stop`.

    Rows that a source refuses take no bytes, but keep their place. Sources that tell
    `bytes_per_row` are not read for their sizes.
    """
    constant = getattr(source, "bytes_per_row", None)
    step = (
        _batch_rows(source, start, stop)
        if constant is None
        else max(1, block_bytes // max(1, constant))
    )
    step = min(step, MEASURED_ROWS)
    base = 0
    for index, shard in enumerate(source.shards):
        rows = shard.num_rows or 0
        last = min(stop - base, rows)
        for at in range(max(start - base, 0), last, step):
            end = min(at + step, last)
            if constant is not None:
                yield (
                    base + at,
                    np.full(end - at, constant, np.int64),
                    lambda i=index, a=at, b=end: source.read(i, a, b),
                )
                continue
            batch = source.read(index, at, end)
            numbers, sizes = np.arange(end - at), row_bytes(batch)
            if batch.num_rows < end - at:
                numbers = batch.column(ROW_NUMBER).to_numpy() - at
                placed = np.zeros(end - at, np.int64)
                placed[numbers] = sizes
                sizes = placed
            full = np.cumsum(sizes) // block_bytes
            cuts = np.flatnonzero(np.diff(full, prepend=0)) + 1
            for x, y in itertools.pairwise(
                np.unique(np.concatenate([[0], cuts, [end - at]])).tolist()
            ):
                i, j = np.searchsorted(numbers, [x, y]).tolist()
                yield base + at + x, sizes[x:y], lambda batch=batch, i=i, j=j: batch.slice(i, j - i)
        base += rows
