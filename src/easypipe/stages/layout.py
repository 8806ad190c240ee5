"""Where saved shards begin and end: integers from row counts and row sizes, the same in every run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from easypipe.core.errors import ConfigError
from easypipe.core.protocols import Shard, ShardedSource
from easypipe.stages.shard_writer import row_bytes

LEAST_SHARD_BYTES, MOST_SHARD_BYTES = 16 << 20, 500 << 20
MEASURED_ROWS = 4096  # rows whose sizes are held at a time


def locate(shards: Sequence[Shard], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(shard, first, last) pieces of rows `start` to `stop` of the source as a whole."""
    base = 0
    for index, shard in enumerate(shards):
        rows = shard.num_rows or 0
        a, b = max(start, base), min(stop, base + rows)
        if a < b:
            yield index, a - base, b - base
        base += rows


def count_rows(shards: Sequence[Shard]) -> int:
    """Raises ConfigError where a shard does not know its rows."""
    for shard in shards:
        if shard.num_rows is None:
            raise ConfigError(at="save", problem=f"shard {shard.name!r} does not know how many rows it has", fix="Give it a row count.")
    return sum(shard.num_rows or 0 for shard in shards)


def default_shard_bytes(shards: Sequence[Shard]) -> int:
    """An eighth of the data at rest, within bounds: it follows from the data alone, never from the machine."""
    return min(max(sum(shard.num_bytes for shard in shards) // 8, LEAST_SHARD_BYTES), MOST_SHARD_BYTES)


def shard_edges(source: ShardedSource, *, num_shards: int | None, max_bytes: int | None) -> np.ndarray:
    """Int64[shards + 1] row numbers. With `num_shards` rows are dealt evenly; else a shard takes rows until `max_bytes` are full.

    Raises ConfigError where there are fewer rows than shards, or where a shard of the asked number would pass `max_bytes`.
    """
    total = count_rows(source.shards)
    if num_shards is not None and num_shards > max(1, total):
        raise ConfigError(at="save.num_shards", problem=f"{num_shards} shards for {total} rows", fix=f"Ask for at most {max(1, total)}.")
    if num_shards is None:
        assert max_bytes is not None
        return _edges_by_size(source, total, max_bytes)
    edges = np.arange(num_shards + 1, dtype=np.int64) * total // num_shards
    if max_bytes is not None:
        _check_sizes(source, edges, max_bytes)
    return edges


def _edges_by_size(source: ShardedSource, total: int, max_bytes: int) -> np.ndarray:
    edges, room = [0], max_bytes
    for base, sizes in _sizes(source):
        at = 0
        while at < sizes.size:
            fit = int(np.searchsorted(np.cumsum(sizes[at:]), room, side="right"))
            if fit == 0 and base + at == edges[-1]:
                fit = 1  # a row larger than the limit has a shard of its own
            if at + fit == sizes.size:
                room -= int(sizes[at:].sum())
                break
            at += fit
            edges.append(base + at)
            room = max_bytes
    return np.array([*edges, total], dtype=np.int64)


def _check_sizes(source: ShardedSource, edges: np.ndarray, max_bytes: int) -> None:
    bytes_of = np.zeros(len(edges) - 1, dtype=np.int64)
    for base, sizes in _sizes(source):
        shard = np.searchsorted(edges, base + np.arange(sizes.size), side="right") - 1
        np.add.at(bytes_of, shard, sizes)
    largest = int(bytes_of.max())
    if largest > max_bytes:
        raise ConfigError(
            at="save.max_shard_size",
            problem=f"of {len(edges) - 1} shards one would hold {largest:,} bytes, the limit is {max_bytes:,}",
            fix=f"Give max_shard_size={largest}, more shards, or leave num_shards out.",
        )


def _sizes(source: ShardedSource) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, Int64[n] bytes) over all rows. Rows that a source refuses take no bytes, but keep their place."""
    base = 0
    constant = getattr(source, "bytes_per_row", None)
    for index, shard in enumerate(source.shards):
        rows = shard.num_rows or 0
        for start in range(0, rows, MEASURED_ROWS):
            stop = min(start + MEASURED_ROWS, rows)
            if constant is not None:
                yield base + start, np.full(stop - start, constant, dtype=np.int64)
                continue
            batch = source.read(index, start, stop)
            sizes = row_bytes(batch)
            if batch.num_rows < stop - start:
                numbers = batch.column("__row_number__").to_numpy() - start
                placed = np.zeros(stop - start, dtype=np.int64)
                placed[numbers] = sizes
                sizes = placed
            yield base + start, sizes
        base += rows
