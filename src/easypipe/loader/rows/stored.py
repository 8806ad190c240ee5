"""Rows that already exist, saved or as arrays in memory: decoded to int32 by blocks, and checked.

row    a row of all epochs; row `r` of epoch `e` is `e * rows of the source + r`
block  consecutive rows that are decoded together, between the source's cuts
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import ArrayLike

from easypipe.core.aligned import LOOK_AHEAD_WEIGHT, LOSS_WEIGHTS, AlignedColumn, flat_values
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, place, require
from easypipe.core.protocols import Shard, ShardedSource, Source
from easypipe.core.schema import (
    ATTENTION_MASK,
    IGNORE,
    INPUT_IDS,
    LABELS,
    LOOK_AHEAD,
    LOSS_MASK,
    POSITION_IDS,
    ROW_NUMBER,
    SEGMENT_IDS,
    SOURCE,
    TARGET_COLUMNS,
    is_list,
    offsets_of,
    row_numbers,
)
from easypipe.core.values import Array, Int32, Int64
from easypipe.loader.collate import collate, count_positions, fresh_columns
from easypipe.loader.rows.rows import MOST_IDS, RepeatedRows, default_width

# the largest value of a column, the least is 0, and the fix for others
TARGETS = 1, "Give 1 for a target and 0 for any other token, or leave the row out."
BOUNDS = {
    ATTENTION_MASK: (
        1,
        "Give 0 for padding and 1 for any other token; segment_ids tell documents.",
    ),
    SEGMENT_IDS: (
        MOST_IDS - 1,
        "Give 0 for padding, and 1, 2 and so on for the documents of a row.",
    ),
}
READ_COLUMNS = (INPUT_IDS, SEGMENT_IDS, POSITION_IDS, ATTENTION_MASK, *TARGET_COLUMNS, LOOK_AHEAD)


class Arrays(Source):
    """Arrays in memory as a source of one shard.

    Raises:
        ConfigError: There are no columns, a column does not hold integers, or columns have
            different numbers of rows.
    """

    def __init__(self, columns: Mapping[str, ArrayLike | Sequence[ArrayLike]]) -> None:
        arrays: dict[str, pa.Array] = {}
        for name, values in columns.items():
            if name == LOOK_AHEAD:
                arrays[name] = pa.array(np.asarray(values, np.int32))
            elif name in READ_COLUMNS:
                arrays[name] = _as_lists(name, values)
        require(arrays, "rows", f"no column {INPUT_IDS!r}", have=columns)
        if len({len(array) for array in arrays.values()}) > 1:
            counts = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
            raise ConfigError(at="rows", problem=f"columns of different numbers of rows: {counts}")
        self._batch = pa.record_batch(list(arrays.values()), names=list(arrays))
        self.schema = self._batch.schema
        self.shards = (Shard(name="memory", num_rows=self._batch.num_rows),)

    @property
    def fingerprint(self) -> str:
        hasher = xxhash.xxh3_128()
        for name, column in zip(self.schema.names, self._batch.columns, strict=True):
            hasher.update(f"{name} {column.type} {len(column)}".encode())
            for buffer in column.buffers():
                if buffer is not None:
                    hasher.update(memoryview(buffer))
        return hasher.hexdigest()

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self._batch.slice(start, stop - start)


def _as_lists(name: str, values: ArrayLike | Sequence[ArrayLike]) -> pa.Array:
    """Returns a column of arrays as Arrow lists.

    Raises:
        ConfigError: It holds something other than rows of integers.
    """
    if isinstance(values, np.ndarray) and values.ndim == 2:
        if values.dtype.kind not in "iub":
            raise ConfigError(at=f"rows.{name}", problem=f"expected integers, got {values.dtype}")
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    rows = [np.asarray(row) for row in values]  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
    for i, row in enumerate(rows):
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iub"):
            raise ConfigError(
                at=f"rows.{name}[{i}]",
                problem=f"expected a row of integers, got {row.dtype} of shape {row.shape}",
            )
    offsets = offsets_of([row.size for row in rows])
    flat = np.concatenate([row.astype(np.int64) for row in rows]) if rows else np.empty(0, np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))


BLOCK_ROWS = 16_384  # no block has more rows, however far apart the source's cuts are

log = logging.getLogger("easypipe")


class Block(NamedTuple):
    """Decoded rows: row i has slots `offsets[i]:offsets[i + 1]` of every column.

    Attributes:
        offsets: Int64[n+1].
        columns: Int32[total] each.
        look_ahead: Int32[n], the label of each row's last slot, if there is one.
        values: The values of aligned columns, one or several for each token.
        ahead_weight: Float32[n], the loss weight of that label.
    """

    offsets: Int64
    columns: Mapping[str, Int32]
    look_ahead: Int32 | None = None
    values: Mapping[str, Array] = {}
    ahead_weight: Array | None = None

    @property
    def num_bytes(self) -> int:
        beside = (self.look_ahead, self.ahead_weight)
        arrays = (self.offsets, *self.columns.values(), *self.values.values(), *beside)
        return sum(array.nbytes for array in arrays if array is not None)


class StoredRows(RepeatedRows):
    """Rows of a ShardedSource with `input_ids`, or of arrays in memory.

    `segment_ids`, `position_ids` and `loss_mask` are read if the source has them. Without
    `segment_ids` a segment begins where `position_ids` are 0; without both a row is one. Where the
    `attention_mask` is 0, there is padding. A `labels` column must
    be unshifted, equal to input_ids or -100. It becomes the loss mask, like `completion_mask` and
    `assistant_masks`; with several of them, a token must be a target in all. Other columns are not
    read. An error in reading is a SourceError that names file and row.

    Args:
        rows: A source, or a mapping of such columns to an integer array [rows, slots] or a list of
            one-dimensional ones.
        seq_length: The slots of every row. None takes it from fixed-size columns; without them, a
            row has the length of its tokens.
        pad_token_id: The token id in padding.
        num_epochs: The number of epochs; None: endless.
        tokenizer_fingerprint: The fingerprint of the tokenizer that made the tokens.
        cache_bytes: The bytes of decoded blocks that an LRU cache keeps.
        aligned: Columns of the source with values for every token, which batches also have.

    Raises:
        SourceError: The source has no `input_ids`.
    """

    lengths_are_free = False

    def __init__(
        self,
        rows: ShardedSource | Mapping[str, ArrayLike | Sequence[ArrayLike]],
        *,
        seq_length: int | None = None,
        pad_token_id: int = 0,
        num_epochs: int | None = 1,
        tokenizer_fingerprint: str = "",
        cache_bytes: int = 256 << 20,
        aligned: Sequence[AlignedColumn] = (),
    ) -> None:
        self._source: ShardedSource = Arrays(rows) if isinstance(rows, Mapping) else rows
        names = self._source.schema.names
        if INPUT_IDS not in names:
            raise SourceError(
                at="rows",
                problem=f"no column {INPUT_IDS!r}",
                have=names,
                fix="Tokenize the source first.",
            )
        self.seq_length = _fixed_length(self._source.schema) if seq_length is None else seq_length
        self.pad_token_id = pad_token_id
        self.num_epochs = num_epochs
        self._tokenizer = tokenizer_fingerprint
        self._cache_bytes, self._aligned = cache_bytes, tuple(aligned)
        self._names = [name for name in READ_COLUMNS if name in names]
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()
        self._decoding: dict[int, threading.Lock] = {}

    @property
    def rows_each(self) -> int:
        return int(self._index.first_row[-1])

    @property
    def identity(self) -> Mapping[str, str]:
        return {
            "sources": self._source.fingerprint,
            "tokenizer": digest(self._tokenizer, self.pad_token_id),
            "plan": digest("stored", self.seq_length, [], *self._aligned),
        }

    def lengths(self, rows: Int64) -> Int32:
        out = np.zeros(len(rows), dtype=np.int32)
        for i, found in enumerate(self._find(rows)):
            if found is not None:
                out[i] = found.stop - found.start
        return out

    def gather(self, rows: Int64, width: int | None = None) -> dict[str, Int32]:
        width = default_width(self, rows, self.seq_length) if width is None else width
        masked = any(name in self._names for name in TARGET_COLUMNS)
        names = (INPUT_IDS, SEGMENT_IDS, POSITION_IDS) + ((LOSS_MASK,) if masked else ())
        out = fresh_columns(names, len(rows), width)
        beside = {column.name: column.empty(len(rows), width) for column in self._aligned}
        ahead = np.full(len(rows), IGNORE, dtype=np.int32)
        weights = np.ones(len(rows), np.float32)
        # One iteration per row: a row is one copy of a few kilobytes per column, so iterations cost
        # less than an index array of its slots.
        for i, found in enumerate(self._find(rows)):
            start, stop = (0, 0) if found is None else (found.start, found.stop)
            length = stop - start
            if length > width:
                assert found is not None
                raise SourceError(
                    at=self._describe(found.number),
                    problem=f"{length} tokens do not fit rows of {width}",
                    fix="Give the seq_length that the rows were packed with.",
                )
            for name, column in out.items():
                column[i, length:] = self.pad_token_id if name == INPUT_IDS else 0
                if found is None:
                    continue
                values = found.block.columns.get(name)
                if values is not None:
                    column[i, :length] = values[start:stop]
                elif name == SEGMENT_IDS:
                    column[i, :length] = 1
            if found is None:
                continue
            for name, each in found.block.values.items():
                beside[name][i, :length] = each[start:stop]
            if found.block.look_ahead is not None:
                ahead[i] = found.block.look_ahead[found.local]
            if found.block.ahead_weight is not None:
                weights[i] = found.block.ahead_weight[found.local]
        if POSITION_IDS not in self._names:
            count_positions(out[SEGMENT_IDS], out[POSITION_IDS])
        if LOOK_AHEAD in self._names:
            out[LOOK_AHEAD] = ahead
            beside |= {LOOK_AHEAD_WEIGHT: weights} if LOSS_WEIGHTS in beside else {}
        return out | beside

    def batch(self, rows: Int64, width: int) -> dict[str, Int32]:
        return collate(self.gather(rows, width))

    @cached_property
    def _index(self) -> _Index:
        """The index of the blocks.

        It reads row numbers only from sources that leave out rows, and only once.
        """
        spans: list[tuple[int, int, int]] = []
        counts: list[int] = []
        filtered = ROW_NUMBER in self._source.schema.names
        for shard, info in enumerate(self._source.shards):
            if info.num_rows is None:
                raise SourceError(
                    at=info.name,
                    problem="its rows cannot be counted, so they cannot be read by number",
                    fix="Save it as parquet or arrow.",
                )
            edges = sorted({*info.cuts, info.num_rows, 0})
            for a, b in itertools.pairwise(edges):
                for start in range(a, b, BLOCK_ROWS):
                    stop = min(b, start + BLOCK_ROWS)
                    spans.append((shard, start, stop))
                    counts.append(
                        self._source.read(shard, start, stop).num_rows if filtered else stop - start
                    )
        return _Index(spans, offsets_of(counts))

    def _find(self, rows: Int64) -> list[_Found | None]:
        """Returns where each row is; None for -1."""
        index = self._index
        real = rows >= 0
        numbers = np.where(real, rows % max(self.rows_each, 1), 0)
        blocks = np.searchsorted(index.first_row, numbers, side="right") - 1
        opened = {int(b): self._block(int(b)) for b in np.unique(blocks[real])}
        found: list[_Found | None] = []
        for is_real, number, b in zip(real, numbers, blocks, strict=True):
            if not is_real:
                found.append(None)
                continue
            local, block = int(number - index.first_row[b]), opened[int(b)]
            found.append(
                _Found(
                    block,
                    int(block.offsets[local]),
                    int(block.offsets[local + 1]),
                    int(number),
                    local,
                )
            )
        return found

    def _block(self, number: int) -> Block:
        """Returns a block, newly decoded or kept."""
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
                return self._blocks[number]
            decoding = self._decoding.setdefault(number, threading.Lock())
        with decoding:  # two threads that need the same block decode it once
            with self._lock:
                if number in self._blocks:
                    return self._blocks[number]
            shard, start, stop = self._index.spans[number]
            try:
                name, batch = self._source.shards[shard].name, self._source.read(shard, start, stop)
                block = decode(batch, self._names, name, start)
                block = self._with_values(block, batch, name, row_numbers(batch, start))
            # any error of a source, also a user's: it is raised again with its place
            except Exception as error:
                error.add_note(
                    f"shard {shard} ({self._source.shards[shard].name}), rows {start}:{stop}"
                )
                raise
            with self._lock:
                self._blocks[number] = block
                self._decoding.pop(number, None)
                total = sum(kept.num_bytes for kept in self._blocks.values())
                while total > self._cache_bytes and len(self._blocks) > 1:
                    total -= self._blocks.popitem(last=False)[1].num_bytes
            return block

    def _with_values(self, block: Block, batch: pa.RecordBatch, file: str, rows: Int64) -> Block:
        if not self._aligned:
            return block
        at = lambda i: place(file, row=int(rows[i]))  # noqa: E731
        lists = {column.name: batch.column(column.name) for column in self._aligned}
        ahead = batch.column(LOOK_AHEAD_WEIGHT) if LOOK_AHEAD_WEIGHT in batch.schema.names else None
        return block._replace(
            values={
                one.name: flat_values(one, lists[one.name], block.offsets, at)
                for one in self._aligned
            },
            ahead_weight=None if ahead is None else ahead.to_numpy().astype(np.float32),
        )

    def where(self, row: int) -> tuple[int, str, int, tuple[str, ...]]:
        """Returns (epoch, file, row of that file, datasets of its segments) of a row of the run.

        The datasets are those that were saved with the row, if any.
        """
        shard, start, stop, local = self._locate(row % self.rows_each)
        # rows were left out, so their numbers must be read
        if ROW_NUMBER in self._source.schema.names:
            local = self._source.read(shard, start, stop).column(ROW_NUMBER)[local].as_py() - start
        names: tuple[str, ...] = ()
        if SOURCE in self._source.schema.names:
            told = (
                self._source.read(shard, start + local, start + local + 1).column(SOURCE)[0].as_py()
            )
            names = (told,) if isinstance(told, str) else tuple(told)
        return (
            row // self.rows_each,
            self._source.shards[shard].name,
            start + local,
            names,
        )

    def _locate(self, number: int) -> tuple[int, int, int, int]:
        """Returns the shard, start and stop of a row's block, and the row within the block."""
        block = int(np.searchsorted(self._index.first_row, number, side="right")) - 1
        return *self._index.spans[block], number - int(self._index.first_row[block])

    def _describe(self, number: int) -> str:
        _, file, row, _ = self.where(number)
        return place(file, row=row)


class _Index(NamedTuple):
    """Where the blocks of a source are.

    Attributes:
        spans: (shard, start, stop) of every block.
        first_row: Int64[blocks + 1], the rows before each block, and in all.
    """

    spans: list[tuple[int, int, int]]
    first_row: Int64


class _Found(NamedTuple):
    block: Block
    start: int
    stop: int
    number: int  # the row within an epoch
    local: int  # the row within the block


def decode(
    batch: pa.RecordBatch, names: Sequence[str], at: str, start: int, unit: str = "row"
) -> Block:
    """Decodes columns of lists into one Block.

    Args:
        batch: Rows of one shard.
        names: The columns to decode.
        at: The name of the shard, for errors.
        start: The row of the shard from which on the batch was read.
        unit: What the numbers of rows count, for errors.

    Raises:
        SourceError: A column is not a list of integers, or differs in length from `input_ids`; the
            message names the row.
    """
    offsets: Int64 | None = None
    columns: dict[str, Int32] = {}
    rows = row_numbers(batch, start)

    def where(i: np.int64, column: str) -> str:
        return f"{at}, {unit} {rows[i]}, column {column!r}"

    for name in names:
        if name == LOOK_AHEAD:
            continue
        column = batch.column(batch.schema.get_field_index(name))
        ends, values = _flat(column, name, at, where)
        if offsets is None:
            offsets = ends
        elif not np.array_equal(offsets, ends):
            raise SourceError(
                at=where(np.flatnonzero(np.diff(offsets) != np.diff(ends))[0], name),
                problem=f"not as long as {INPUT_IDS}",
                fix="Give one value for each token, or leave the row out.",
            )
        columns[name] = values
    assert offsets is not None
    for name in (name for name in BOUNDS if name in columns):
        _bounded(columns[name], offsets, name, where)
    columns = _segments(columns, offsets) | columns
    if LABELS in columns:
        ids, labels = columns[INPUT_IDS], columns.pop(LABELS)
        wrong = np.flatnonzero((labels != ids) & (labels != IGNORE))
        if wrong.size:
            row = np.searchsorted(offsets, wrong[0], side="right") - 1
            raise SourceError(
                at=where(row, LABELS),
                problem=f"token {int(wrong[0] - offsets[row])} has label "
                f"{labels[wrong[0]]}, its id is {ids[wrong[0]]}",
                fix="Give unshifted labels (input_ids or -100): the shift happens once, in the "
                "loader. Or leave the column out.",
            )
        columns[LABELS] = (labels != IGNORE).astype(np.int32)
    if targets := [name for name in TARGET_COLUMNS if name in columns]:
        masks = [_bounded(columns.pop(name), offsets, name, where) for name in targets]
        columns[LOSS_MASK] = functools.reduce(np.minimum, masks)
    return Block(
        offsets, columns, _look_ahead(batch.column(LOOK_AHEAD), at) if LOOK_AHEAD in names else None
    )


def _segments(columns: dict[str, Int32], offsets: Int64) -> dict[str, Int32]:
    """Returns the segments that other columns say; takes the attention mask out of `columns`."""
    attended, positions = columns.pop(ATTENTION_MASK, None), columns.get(POSITION_IDS)
    if attended is None and positions is None:
        return {}
    one = np.ones(offsets[-1], np.int32)
    segments = one if positions is None else segments_of(positions, offsets)
    return {SEGMENT_IDS: segments if attended is None else segments * (attended != 0)}


def segments_of(positions: Int32 | Int64, offsets: Int64) -> Int32:
    """Returns the segments of rows, from 1 in each: one begins where its positions start at 0.

    Rows of several documents are flattened so for attention that knows only positions, as by
    `DataCollatorWithFlattening` of transformers.
    """
    begins = positions == 0
    lengths = np.diff(offsets)
    begins[offsets[:-1][lengths > 0]] = True
    count = np.cumsum(begins, dtype=np.int32)
    return count - np.repeat(count[offsets[:-1][lengths > 0]] - 1, lengths[lengths > 0])


def _bounded(
    values: Int32, offsets: Int64, name: str, where: Callable[[np.int64, str], str]
) -> Int32:
    """Returns the values of a mask, or of segments.

    Raises:
        SourceError: One is negative, or more than the column may hold.
    """
    most, fix = BOUNDS.get(name, TARGETS)
    if values.min(initial=0) < 0 or values.max(initial=0) > most:
        wrong = np.flatnonzero((values < 0) | (values > most))[0]
        row = np.searchsorted(offsets, wrong, side="right") - 1
        problem = f"token {int(wrong - offsets[row])} has {values[wrong]}"
        raise SourceError(at=where(row, name), problem=problem, fix=fix)
    return values


def _look_ahead(column: pa.Array, at: str) -> Int32:
    if not pa.types.is_integer(column.type) or column.null_count:
        problem = (
            f"expected an integer in every row, got {column.type} with {column.null_count} nulls"
        )
        raise SourceError(
            at=place(at, column=LOOK_AHEAD),
            problem=problem,
            fix="Save the rows again, or rename a column of that name.",
        )
    return column.to_numpy().astype(np.int32)


def _flat(
    column: pa.Array, name: str, at: str, where: Callable[[np.int64, str], str]
) -> tuple[Int64, Int32]:
    """Returns the offsets, Int64[n + 1], and the int32 values of a column of lists.

    Raises:
        SourceError: It holds a null, or something other than integers that fit int32.
    """
    kind = column.type
    masks = name != INPUT_IDS and is_list(kind) and pa.types.is_boolean(kind.value_type)
    if not masks and not (is_list(kind) and pa.types.is_integer(kind.value_type)):
        raise SourceError(
            at=place(at, column=name),
            problem=f"expected lists of integers, got {kind}",
            fix="Give such lists, or rename the column: columns of this name belong to tokens.",
        )
    if column.null_count:
        nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        raise SourceError(
            at=where(nulls[0], name),
            problem="null instead of tokens",
            fix="Leave such rows out.",
        )
    values = column.flatten()
    if values.null_count:
        nulls = pc.call_function("list_parent_indices", [column]).filter(values.is_null())
        raise SourceError(
            at=where(nulls[0].as_py(), name),
            problem="a null among the tokens",
            fix="Leave such rows out.",
        )
    if pa.types.is_fixed_size_list(kind):
        offsets = np.arange(len(column) + 1, dtype=np.int64) * kind.list_size
    else:
        offsets = column.offsets.to_numpy().astype(np.int64)
        offsets -= offsets[0]
    numbers = values.to_numpy(zero_copy_only=False)
    if (
        numbers.dtype.itemsize >= 4
        and numbers.dtype != np.int32
        and numbers.size
        and not -(1 << 31) <= numbers.min() <= numbers.max() < 1 << 31
    ):
        wrong = np.flatnonzero((numbers < -(1 << 31)) | (numbers >= 1 << 31))[0]
        raise SourceError(
            at=where(np.searchsorted(offsets, wrong, side="right") - 1, name),
            problem=f"{numbers[wrong]} does not fit int32, which batches have",
            fix="Give rows of numbers that do.",
        )
    return offsets, numbers.astype(np.int32, copy=False)


def _fixed_length(schema: pa.Schema) -> int | None:
    kind = schema.field(INPUT_IDS).type
    return kind.list_size if pa.types.is_fixed_size_list(kind) else None
