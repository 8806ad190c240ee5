"""Plans how many rows each saved file holds: by number, default size, or bytes measured by samples.

Edges depend only on the rows, so that every run cuts the same shards. Sizes on disk are measured
with the format and codec of the files.

In this file:
    block: Consecutive rows of about a megabyte of values; some blocks are written to memory.
    ratio: Bytes in a file over bytes of values; a block that is not sampled has the ratio of the
        last sampled one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from easypipe.core.errors import require
from easypipe.core.protocols import Scan, Shard, ShardedSource, info_of, scan
from easypipe.core.schema import row_numbers
from easypipe.core.values import Int64
from easypipe.save.shard_writer import open_writer

log = logging.getLogger("easypipe")

LEAST_SHARD_BYTES, MOST_SHARD_BYTES = 16 << 20, 500 << 20
BATCH_BYTES = 16 << 20  # bytes of one row group or record batch, before compression
FIRST_ROWS = 256  # so many rows of a batch are read before their size is looked at
BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 4096  # the most rows of a block, because their sizes are held in memory
SAMPLES = 16  # the fewest samples of each shard
EXACT_BYTES = 4 << 20  # of values: smaller shards are written to memory as a whole
TRIALS = 12  # attempts to find how many rows such a shard takes
NEAR = 0.97  # this share of the room is full enough
EXACT_FILL = 0.99
LEAST_RATIO = 1e-6  # the ratio for rows that take no space
# the share of the limit that is planned; errors of samples seldom exceed the rest
FILL = 0.96
# A shard must have room for this many files without rows: smaller sizes say nothing about rows.
LEAST_FILES = 4

# functions that return the lengths of a column's values, with the types that they take
LENGTHS = {
    "list_value_length": (pa.types.is_list, pa.types.is_large_list),
    "binary_length": (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    ),
}

Edges = Int64  # [shards + 1] row numbers
# (first row, bytes of each row from that one on), in order
Sizes = Iterable[tuple[int, NDArray[np.float64]]]


def plan_shards(
    source: ShardedSource,
    format: str,
    compression: str,
    *,
    num_shards: int | None,
    max_bytes: int | None,
) -> tuple[Edges, str]:
    """Returns the rows at which shards begin and end, and which option decided that.

    With only `num_shards`, rows are distributed evenly. With only `max_bytes`, file after file is
    filled up to that size on disk. With both, the option that makes more shards decides. With
    neither, a shard has an eighth of the data, before compression.

    Raises:
        ConfigError: There are fewer rows than shards, or `max_bytes` cannot hold a file of these
            columns.
    """
    total = count_rows(source.shards)
    require(
        num_shards is None or num_shards <= max(1, total),
        "save.num_shards",
        f"{num_shards} shards for {total} rows",
        f"Ask for at most {max(1, total)}.",
    )
    if max_bytes is None:
        if num_shards is not None:
            return np.arange(num_shards + 1, dtype=np.int64) * total // num_shards, "num_shards"
        sizes = ((first, values) for first, values, _ in _blocks(source, total))
        return edges_by_size(sizes, total, default_shard_bytes(source.shards)), "default"
    edges, num_bytes, known = DiskSizes(source, format, compression).fill(max_bytes, total)
    needed = len(edges) - 1
    if num_shards is None:
        return edges, "max_shard_size"
    if needed > num_shards:
        log.info(
            "save: max_shard_size asks for %d shards, num_shards for %d: the stricter wins, %d are "
            "written",
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
    return edges_by_bytes(num_bytes, known, num_shards), "num_shards"


def count_rows(shards: Sequence[Shard]) -> int:
    """Returns the rows of all shards.

    Raises:
        ConfigError: The rows of a shard are not counted.
    """
    for shard in shards:
        require(
            shard.num_rows is not None,
            "save",
            f"shard {shard.name!r} does not know how many rows it has",
            "Give it a row count.",
        )
    return sum(shard.num_rows or 0 for shard in shards)


def default_shard_bytes(shards: Sequence[Shard]) -> int:
    """Returns an eighth of the bytes of the data, within bounds.

    It depends only on the data, never on the machine.
    """
    eighth = sum(shard.num_bytes for shard in shards) // 8
    return min(max(eighth, LEAST_SHARD_BYTES), MOST_SHARD_BYTES)


def edges_by_size(sizes: Sizes, total: int, limit: float) -> Edges:
    """Fills shards with rows up to `limit`; a row above the limit has a separate shard."""
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


def edges_by_bytes(num_bytes: Sequence[float], rows: Sequence[int], num_shards: int) -> Edges:
    """Returns the edges of `num_shards` shards of about equal bytes, each with at least one row.

    Args:
        num_bytes: The bytes that all rows before each of `rows` take, from 0 to all.
        rows: Row numbers, from 0 to all.
        num_shards: How many shards.
    """
    ranks = np.arange(num_shards + 1)
    even = np.interp(num_bytes[-1] * ranks / num_shards, num_bytes, rows).astype(np.int64)
    even[0], even[-1] = 0, rows[-1]  # rows may have no bytes
    spread = np.maximum.accumulate(even - ranks) + ranks
    return np.maximum(np.minimum(spread, rows[-1] - num_shards + ranks), 0)


def batches(source: ShardedSource, start: int, stop: int) -> Iterator[Scan]:
    """Yields rows `start` to `stop` of the whole source, for writing.

    A batch has about BATCH_BYTES, estimated from the first rows. Where later rows are much larger,
    it has fewer rows.
    """
    step = _rows_of(BATCH_BYTES, source, start, stop)
    for _, shard, a, b in _pieces(source.shards, start, stop, step):
        yield from _bounded(source, shard, a, b)


def _bounded(source: ShardedSource, shard: int, start: int, stop: int) -> Iterator[Scan]:
    """Yields rows of a shard: together, unless they have more than twice BATCH_BYTES."""
    held, rejects, size, at = [], [], 0, start
    while at < stop:
        share = min(3, 2 * BATCH_BYTES / max(1, size) - 1)  # of the rows that are held
        end = min(stop, at + max(FIRST_ROWS, int(share * (at - start))))
        batch, more = scan(source, shard, at, end)
        held.append(batch)
        rejects += more
        size, at = size + batch.nbytes, end
        if at == stop or size > 2 * BATCH_BYTES:
            yield Scan(held[0] if len(held) == 1 else pa.concat_batches(held), tuple(rejects))
            held, rejects, size, start = [], [], 0, at


def _pieces(
    shards: Sequence[Shard], start: int, stop: int, step: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first row of the source, shard, first row in it, end), `step` rows at a time."""
    base = 0
    for shard, rows in enumerate(each.num_rows or 0 for each in shards):
        last = min(stop - base, rows)
        for at in range(max(start - base, 0), last, step):
            yield base + at, shard, at, min(at + step, last)
        base += rows


def _rows_of(num_bytes: int, source: ShardedSource, start: int, stop: int) -> int:
    """Returns about how many rows have `num_bytes` of values, estimated from the first ones."""
    for _, shard, a, b in _pieces(source.shards, start, stop, 64):
        probe = source.read(shard, a, b)
        if probe.num_rows:
            return max(1, num_bytes // max(1, probe.nbytes // probe.num_rows))
    return BLOCK_ROWS


def _blocks(
    source: ShardedSource, total: int
) -> Iterator[tuple[int, NDArray[np.float64], tuple[int, int, int]]]:
    """Yields all rows, block by block: (first row, bytes of the values of each row, what to read).

    Rows that a source rejects take no bytes, but keep their place. Sources with `bytes_per_row` are
    not read for their sizes.
    """
    constant = info_of(source).bytes_per_row
    step = min(BLOCK_ROWS, _rows_of(BLOCK_BYTES, source, 0, total))
    for first, shard, a, b in _pieces(source.shards, 0, total, step):
        sizes = np.full(b - a, constant or 0, np.float64)
        if constant is None:
            batch = source.read(shard, a, b)
            sizes[row_numbers(batch, a) - a] = row_bytes(batch)
        yield first, sizes, (shard, a, b)


def row_bytes(batch: pa.RecordBatch) -> NDArray[np.float64]:
    """Returns the bytes of each row's values before compression, estimated by length."""
    total = np.zeros(batch.num_rows)
    for column in batch.columns:
        weights = np.ones(batch.num_rows)
        for length, kinds in LENGTHS.items():
            if any(fits(column.type) for fits in kinds):
                weights += pc.call_function(length, [column]).fill_null(0).to_numpy()
        total += column.nbytes * weights / max(1, weights.sum())
    return total


class DiskSizes:
    """The measured bytes that rows of `source` take in files of a format and codec."""

    def __init__(self, source: ShardedSource, format: str, compression: str) -> None:
        self.source, self.format, self.compression = source, format, compression
        self.empty = self._written([])

    def fill(self, max_bytes: int, total: int) -> tuple[Edges, list[float], list[int]]:
        """Plans shards of at most `max_bytes`.

        Returns:
            (the edges, the bytes that all rows before some row numbers take, those row numbers).

        Raises:
            ConfigError: `max_bytes` is too small for a file of this format.
        """
        least = LEAST_FILES * self.empty
        require(
            max_bytes >= least,
            "save.max_shard_size",
            f"{max_bytes:,} bytes: a {self.format} file of these columns takes "
            f"{self.empty:,} without any row",
            f"Give at least {least:,}.",
        )
        taken, known = [0.0], [0]

        def note(row: int, num_bytes: float) -> None:
            known.append(row)
            taken.append(taken[-1] + num_bytes)

        row, ratio = self._probe(total)
        if max_bytes <= EXACT_BYTES * ratio:
            rows = int(max_bytes / ratio / row)
            while known[-1] < total:
                rows, num_bytes = self._fitting(known[-1], total, rows, max_bytes * EXACT_FILL)
                note(known[-1] + rows, num_bytes)
            return np.array(known if total else [0, 0], np.int64), taken, known

        def noted() -> Sizes:
            for first, sizes in self._estimates(total, max_bytes / ratio / SAMPLES):
                note(first + sizes.size, float(sizes.sum()))
                yield first, sizes

        edges = edges_by_size(noted(), total, max_bytes * FILL - self.empty)
        return edges, taken, known

    def _probe(self, total: int) -> tuple[float, float]:
        """Returns (bytes of a row's values, ratio), from the first block."""
        for _, sizes, place in _blocks(self.source, total):
            if sizes.any():
                return float(sizes.mean()), self._ratio(sizes, place)
        return 1.0, 1.0

    def _ratio(self, sizes: NDArray[np.float64], place: tuple[int, int, int]) -> float:
        """Returns the ratio of a block, which is written to memory."""
        written = self._written([self.source.read(*place)]) - self.empty
        return max(written / float(sizes.sum()), LEAST_RATIO)

    def _estimates(self, total: int, sample_every: float) -> Sizes:
        """Yields the estimated bytes on disk of all rows, with a sample every `sample_every`."""
        ratio, unseen = 1.0, float("inf")
        for first, sizes, place in _blocks(self.source, total):
            unseen += float(sizes.sum())
            if unseen >= sample_every and sizes.any():
                ratio, unseen = self._ratio(sizes, place), 0.0
            yield first, sizes * ratio

    def _fitting(self, start: int, total: int, guess: int, room: float) -> tuple[int, float]:
        """Returns (rows from `start` that fill `room` to within a few hundredths, their bytes).

        The guess is corrected by its measured bytes. The result has at least one row.
        """
        most = total - start
        low, low_bytes, high = 0, 0.0, most + 1  # `low` rows fit, `high` do not
        rows = min(max(guess, 1), most)
        for _ in range(TRIALS):
            size = self.of_rows(start, start + rows)
            if size <= room:
                low, low_bytes = rows, size
                if rows == most or size >= room * NEAR:
                    break
            else:
                high = rows
            if high - low <= 1:
                break
            wanted = int(rows * (room * (1 + NEAR) / 2 - self.empty) / max(1, size - self.empty))
            rows = min(max(wanted, low + 1), high - 1, most)
        return (low, low_bytes) if low else (1, room)

    def of_rows(self, start: int, stop: int) -> int:
        """Returns the bytes of one file of these rows."""
        return self._written(batch for batch, _ in batches(self.source, start, stop))

    def _written(self, rows: Iterable[pa.RecordBatch]) -> int:
        """Returns the bytes of a file with these batches, written to memory."""
        sink = pa.BufferOutputStream()
        with open_writer(sink, self.format, self.compression, self.source.schema) as write:
            for batch in rows:
                write(batch)
        return sink.getvalue().size
