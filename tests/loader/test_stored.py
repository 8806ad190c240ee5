from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.compat.collators import create_causal_lm_collate
from easypipe.core.aligned import LOOK_AHEAD_WEIGHT, LOSS_WEIGHTS, AlignedColumn
from easypipe.core.errors import ConfigError, PlacementError, SourceError
from easypipe.core.protocols import Shard
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
)
from easypipe.loader.collate import CollateConfig, collate
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.rows.stored import Block, StoredRows
from laws import (
    assert_exact_resume,
    assert_rows_well_formed,
    assert_same_batch,
    assert_same_batches,
)
from loader_support import EOS, PAD, MemoryCache, plan_rows, some_docs
from strategies import examples

MASKS = [np.arange(30) % 3 > 0 for _ in range(150)]
PLANNED = plan_rows([MemoryCache(some_docs([30] * 150), masks=MASKS)])
PACKED = PLANNED.gather(np.arange(PLANNED.num_rows))


class Tables:
    """A source of several shards, cut every `cut` rows; with `drop`, rows of that number are left
    out and the others carry theirs.
    """

    def __init__(
        self, tables: list[pa.Table], cut: int = 7, drop: frozenset[int] = frozenset()
    ) -> None:
        self._batches = [table.combine_chunks().to_batches()[0] for table in tables]
        self._drop = drop
        self.fingerprint = "tables"
        self.shards = [
            Shard(
                name=f"shard-{i}.arrow", num_rows=b.num_rows, cuts=tuple(range(0, b.num_rows, cut))
            )
            for i, b in enumerate(self._batches)
        ]
        extra = [pa.field(ROW_NUMBER, pa.int64())] if drop else []
        self.schema = pa.schema([*self._batches[0].schema, *extra])
        self.reads: list[tuple[int, int, int]] = []

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        self.reads.append((shard, start, stop))
        batch = self._batches[shard].slice(start, stop - start)
        if not self._drop:
            return batch
        kept = [i for i in range(start, stop) if i not in self._drop]
        batch = batch.take(pa.array([i - start for i in kept], pa.int64()))
        return pa.RecordBatch.from_arrays(
            [*batch.columns, pa.array(kept, pa.int64())], schema=self.schema
        )


def as_table(columns: dict[str, np.ndarray], kind: pa.DataType) -> pa.Table:
    return pa.table(
        {name: pa.array([row.tolist() for row in values], kind) for name, values in columns.items()}
    )


KINDS = [
    pa.large_list(pa.uint16()),
    pa.list_(pa.uint32()),
    pa.list_(pa.int64()),
    pa.list_(pa.int32(), 64),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_rows_come_back_as_they_were(kind):
    table = as_table(PACKED, kind)
    source = Tables([table.slice(0, 20), table.slice(20, 1), table.slice(21)])
    rows = StoredRows(source, pad_token_id=PAD)
    assert rows.num_rows == PLANNED.num_rows
    assert rows.seq_length == (64 if pa.types.is_fixed_size_list(kind) else None)
    wanted = Loader(PLANNED, LoadStageConfig(batch_size=6, drop_last=False))
    assert_same_batches(wanted, Loader(rows, LoadStageConfig(batch_size=6, drop_last=False)))
    assert_rows_well_formed(rows.gather(np.arange(rows.num_rows)), pad_token_id=PAD)


@pytest.mark.parametrize(("stored", "label"), [(None, 8), (0.75, 8), (0.75, 0)])
def test_a_label_behind_the_row_has_its_stored_weight_or_1(stored, label):
    table = pa.table(
        {
            INPUT_IDS: pa.array([[5, 6, 7]], pa.list_(pa.int32())),
            LOOK_AHEAD: pa.array([label], pa.int32()),
            LOSS_WEIGHTS: pa.array([[0.5, 0.5, 0.25]], pa.list_(pa.float32())),
        }
    )
    if stored is not None:
        table = table.append_column(LOOK_AHEAD_WEIGHT, pa.array([stored], pa.float32()))
    rows = StoredRows(Tables([table]), aligned=[AlignedColumn(name=LOSS_WEIGHTS, dtype="float32")])
    batch = collate(rows.gather(np.array([0])))
    assert batch[LABELS].tolist() == [[6, 7, label]]
    assert batch[LOSS_WEIGHTS].tolist() == [[0.5, 0.25, stored or 1.0]]


def test_arrays_in_memory_are_rows():
    rows = StoredRows(PACKED, pad_token_id=PAD)
    assert rows.seq_length == 64
    assert_same_batches(
        Loader(PLANNED, LoadStageConfig(batch_size=6)), Loader(rows, LoadStageConfig(batch_size=6))
    )
    without_positions = StoredRows(
        {name: PACKED[name] for name in (INPUT_IDS, SEGMENT_IDS, LOSS_MASK)}, pad_token_id=PAD
    )
    numbers = np.array([3, -1, 0, 11])
    assert_same_batch(rows.batch(numbers, 64), without_positions.batch(numbers, 64))
    assert rows.identity["sources"] != without_positions.identity["sources"]
    assert rows.identity == StoredRows(dict(PACKED), pad_token_id=PAD).identity


@examples(40)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    masked=st.booleans(),
    labelled=st.booleans(),
    data=st.data(),
)
def test_documents_equal_the_slow_way(lengths, masked, labelled, data):
    docs = some_docs(lengths, eos_every=100)
    columns: dict[str, list[np.ndarray]] = {INPUT_IDS: docs}
    targets = [np.ones(n, bool) for n in lengths]
    if masked:
        columns[LOSS_MASK] = [np.arange(n) % 2 for n in lengths]
        targets = [t & (np.arange(n) % 2 == 1) for t, n in zip(targets, lengths, strict=True)]
    if labelled:
        columns[LABELS] = [
            np.where(np.arange(n) % 3 == 0, IGNORE, doc)
            for n, doc in zip(lengths, docs, strict=True)
        ]
        targets = [t & (np.arange(n) % 3 > 0) for t, n in zip(targets, lengths, strict=True)]
    rows = StoredRows(columns, pad_token_id=PAD)
    numbers = np.array(
        data.draw(st.lists(st.integers(-1, len(lengths) - 1), min_size=1, max_size=6)), np.int64
    )
    width = max(lengths) + 2
    batch = rows.batch(numbers, width)
    for r, number in enumerate(numbers):
        doc = docs[number] if number >= 0 else np.empty(0, int)
        n = len(doc)
        assert batch[INPUT_IDS][r].tolist() == [*doc, *[PAD] * (width - n)]
        assert batch[SEGMENT_IDS][r].tolist() == [1] * n + [0] * (width - n)
        assert batch[POSITION_IDS][r].tolist() == [*range(n), *[0] * (width - n)]
        labels = [doc[t + 1] if targets[number][t + 1] else IGNORE for t in range(n - 1)]
        assert batch[LABELS][r].tolist() == labels + [IGNORE] * (width - len(labels))
    np.testing.assert_array_equal(
        rows.lengths(numbers), [lengths[n] if n >= 0 else 0 for n in numbers]
    )


def test_a_row_may_have_no_tokens():
    rows = StoredRows({INPUT_IDS: [[5, 6], []]}, pad_token_id=PAD)
    assert rows.batch(np.arange(2), 2)[INPUT_IDS].tolist() == [[5, 6], [PAD, PAD]]


def test_an_attention_mask_says_where_the_one_segment_lies():
    rows = StoredRows(
        {
            INPUT_IDS: np.array([[0, 0, 5, 6], [7, 8, 9, 0]]),
            ATTENTION_MASK: np.array([[0, 0, 1, 1], [1, 1, 1, 0]]),
        }
    )
    batch = rows.batch(np.arange(2), 4)
    assert batch[SEGMENT_IDS].tolist() == [[0, 0, 1, 1], [1, 1, 1, 0]]
    assert batch[POSITION_IDS].tolist() == [[0, 0, 0, 1], [0, 1, 2, 0]]
    assert batch[LABELS].tolist() == [[IGNORE, IGNORE, 6, IGNORE], [8, 9, IGNORE, IGNORE]]


def test_positions_that_start_again_begin_a_segment():
    """Also in the first slot of a row whose positions do not start at 0, and next to empty rows."""
    positions = [[], [0, 1, 0, 1, 2], [3, 4], [], [0, 0, 1], []]
    masks = [[1] * len(row) for row in positions]
    masks[1][4] = 0
    rows = StoredRows(
        Tables(
            [
                pa.table(
                    {
                        "input_ids": [[7] * len(row) for row in positions],
                        "position_ids": positions,
                        "attention_mask": masks,
                    }
                )
            ]
        )
    )
    segments = rows.gather(np.arange(6), 5)["segment_ids"].tolist()
    assert segments == [
        [0] * 5, [1, 1, 2, 2, 0], [1, 1, 0, 0, 0], [0] * 5, [1, 2, 2, 0, 0], [0] * 5,
    ]  # fmt: skip


def test_shifted_labels_are_refused_with_what_to_do():
    ids = np.array([[5, 6, 7], [8, 9, 4]])
    source = Tables(
        [
            as_table(
                {INPUT_IDS: ids, LABELS: np.array([[5, 6, 7], [9, 4, IGNORE]])},
                pa.list_(pa.int64()),
            )
        ]
    )
    with pytest.raises(SourceError) as caught:
        StoredRows(source).batch(np.arange(2), 3)
    assert str(caught.value) == (
        "shard-0.arrow, row 1, column 'labels': token 0 has label 9, its id is 8. "
        "Give unshifted labels (input_ids or -100): the shift happens once, in the loader. Or "
        "leave the column out."
    )
    assert caught.value.__notes__ == ["shard 0 (shard-0.arrow), rows 0:2"]
    right = Tables(
        [
            as_table(
                {INPUT_IDS: ids, LABELS: np.array([[5, 6, 7], [IGNORE, 9, IGNORE]])},
                pa.list_(pa.int64()),
            )
        ]
    )
    assert StoredRows(right).batch(np.arange(2), 3)[LABELS].tolist() == [
        [6, 7, IGNORE],
        [9, IGNORE, IGNORE],
    ]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            pa.array([[1], None]),
            r"shard-0\.arrow, row 1, column 'input_ids': null instead of tokens",
        ),
        (pa.array([[1], [2, None]]), r"column 'input_ids': a null among the tokens"),
        (pa.array(["a", "b"]), r"column 'input_ids': expected lists of integers, got string"),
        (pa.array([[1.0], [2.0]]), r"expected lists of integers, got list<item: double>"),
        (
            pa.array([[1], [2, 1 << 31]]),
            r"row 1, column 'input_ids': 2147483648 does not fit int32",
        ),
    ],
)
def test_columns_that_are_no_tokens_are_refused(column, message):
    with pytest.raises(SourceError, match=message):
        StoredRows(Tables([pa.table({INPUT_IDS: column})])).batch(np.arange(1), 4)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("segment_ids", [1, -1], "token 1 has -1. Give 0 for padding, and 1, 2 and so on"),
        ("attention_mask", [1, 2], "token 1 has 2. Give 0 for padding and 1 for any other token"),
        ("attention_mask", [-1, 1], "token 0 has -1. Give 0 for padding and 1 for any other"),
    ],
)
def test_masks_and_segments_of_other_values_are_refused(name, values, message):
    table = pa.table({INPUT_IDS: [[5], [6, 7]], name: [[1], values]})
    with pytest.raises(SourceError, match=f"row 1, column '{name}': {message}"):
        StoredRows(Tables([table])).batch(np.arange(2), 2)
    bounds = "0, 1" if name == "attention_mask" else "0, 2147483647"
    said = rf"row 0 of the batch, column '{name}': token \d has -?\d, outside \[{bounds}\]"
    with pytest.raises(SourceError, match=said):
        create_causal_lm_collate()([{"input_ids": [6, 7], name: values}])


def test_other_bad_rows():
    with pytest.raises(
        SourceError, match=r"no column 'input_ids' \(have: text\)\. Tokenize the source first"
    ):
        StoredRows(Tables([pa.table({"text": ["a"]})]))
    with pytest.raises(ConfigError, match="no column 'input_ids'"):
        StoredRows({"text": ["a"]})
    with pytest.raises(
        ConfigError, match="columns of different numbers of rows: input_ids 2, loss_mask 1"
    ):
        StoredRows({INPUT_IDS: np.ones((2, 3), int), LOSS_MASK: np.ones((1, 3), int)})
    with pytest.raises(
        ConfigError, match=r"rows\.input_ids\[1\]: expected a row of integers, got float64"
    ):
        StoredRows({INPUT_IDS: [np.array([1]), np.array([1.5])]})
    with pytest.raises(
        SourceError,
        match=r"shard-0\.arrow, row 1, column 'loss_mask': not as long as input_ids",
    ):
        StoredRows(Tables([pa.table({INPUT_IDS: [[1], [2]], LOSS_MASK: [[1], [1, 1]]})])).batch(
            np.arange(1), 4
        )
    with pytest.raises(
        SourceError,
        match=r"shard-0\.arrow, row 1: 2 tokens do not fit rows of 1\. Give the seq_length",
    ):
        StoredRows(Tables([pa.table({INPUT_IDS: [[1], [2, 3]]})]), seq_length=1).batch(
            np.arange(2), 1
        )


def test_rows_that_a_source_leaves_out_are_not_counted():
    table = as_table(PACKED, pa.large_list(pa.uint16()))
    drop = frozenset({0, 1, 2, 3, 4, 5, 6, 9, 20})  # a whole block of 7 among them
    rows = StoredRows(Tables([table], drop=drop), seq_length=64, pad_token_id=PAD)
    kept = [r for r in range(PLANNED.num_rows) if r not in drop]
    assert rows.num_rows == len(kept)
    wanted = collate({name: values[kept] for name, values in PACKED.items()})
    assert_same_batch(rows.batch(np.arange(len(kept)), 64), wanted)


def test_laws_of_stored_rows():
    def make(**load):
        source = Tables([as_table(PACKED, pa.large_list(pa.uint16()))])
        rows = StoredRows(source, seq_length=64, num_epochs=3)
        return Loader(rows, LoadStageConfig(batch_size=5, num_epochs=3, drop_last=False, **load))

    assert_exact_resume(make, len(make()), hops=[2], stops=[0, 1, 9, 20, len(make())])
    assert_same_batches(
        make(prefetch_enabled=False), make(prefetch_workers=4, prefetch_buffer_size=9)
    )
    ids = np.concatenate([batch[INPUT_IDS] for batch in make()])
    epochs = [[row.tobytes() for row in epoch] for epoch in np.split(ids, 3)]
    assert epochs[0] == epochs[1] == epochs[2]


def test_rows_without_end():
    rows = StoredRows(PACKED, num_epochs=None)
    one = Loader(rows, LoadStageConfig(num_epochs=None))
    assert rows.num_rows is None
    with pytest.raises(TypeError, match="never ends"):
        len(one)
    n = PLANNED.num_rows
    assert_same_batch(rows.batch(np.arange(4), 64), rows.batch(np.arange(4) + 7 * n, 64))
    assert StoredRows({INPUT_IDS: np.empty((0, 4), int)}, num_epochs=None).num_rows == 0


def test_all_that_a_block_holds_counts_as_its_memory():
    numbers = np.arange(6)
    whole = {"offsets": numbers, "columns": {INPUT_IDS: numbers}, "look_ahead": numbers}
    whole |= {"values": {"weight": numbers, "more": numbers}, "ahead_weight": numbers}
    assert {*whole} == {*Block._fields}
    assert Block(**whole).num_bytes == 6 * numbers.nbytes
    assert Block(numbers, {INPUT_IDS: numbers}).num_bytes == 2 * numbers.nbytes


def test_a_block_is_decoded_once_for_its_neighbours_and_memory_is_bounded():
    source = Tables([as_table(PACKED, pa.large_list(pa.uint16()))], cut=10)
    rows = StoredRows(source, seq_length=64)
    list(Loader(rows, LoadStageConfig(batch_size=4, prefetch_workers=4)))
    assert len(source.reads) == len(set(source.reads)) == -(-PLANNED.num_rows // 10)
    block = StoredRows(source, seq_length=64)._block(0).num_bytes
    for room in (2 * block, 1):
        source = Tables([as_table(PACKED, pa.large_list(pa.uint16()))], cut=10)
        rows = StoredRows(source, seq_length=64, cache_bytes=room)
        list(Loader(rows, LoadStageConfig(batch_size=4, prefetch_workers=1)))
        assert len(source.reads) == -(-PLANNED.num_rows // 10), "the newest block is kept"
        assert sum(kept.num_bytes for kept in rows._blocks.values()) <= max(room, block)


def test_threads_that_want_one_block_decode_it_once():
    source = Tables([as_table(PACKED, pa.large_list(pa.uint16()))], cut=1000)
    rows = StoredRows(source, seq_length=64)
    gate = threading.Barrier(6)

    def work(i: int):
        gate.wait()
        return rows.batch(np.array([i]), 64)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert len(source.reads) == 1


def test_a_shard_without_a_row_count_is_refused():
    source = Tables([as_table(PACKED, pa.large_list(pa.uint16()))])
    source.shards = [Shard(name="stream.txt", num_rows=None)]
    with pytest.raises(SourceError, match=r"stream\.txt: its rows cannot be counted"):
        len(Loader(StoredRows(source), LoadStageConfig()))


def test_the_longest_row_of_all_processes_cannot_be_known(monkeypatch):
    rows = StoredRows({INPUT_IDS: some_docs([3, 4, 5, 6])})
    # one process reads all rows: fine
    Loader(rows, LoadStageConfig(batch_size=2, mesh={"data": 1}))
    monkeypatch.setattr(
        "easypipe.loader.placement.Placement._local_rows", lambda self: np.arange(1)
    )
    with pytest.raises(
        PlacementError,
        match=r"padding: the longest row of a global batch.*Set padding='max_length'",
    ):
        Loader(rows, LoadStageConfig(batch_size=2, mesh={"data": 1}))
    Loader(
        rows,
        LoadStageConfig(batch_size=2, mesh={"data": 1}),
        collate=CollateConfig(padding="max_length", max_length=8),
    )


def test_eos_is_left_as_it_was_saved():
    rows = StoredRows({INPUT_IDS: [np.array([5, 6, EOS])]})
    assert rows.batch(np.arange(1), 3)[LABELS].tolist() == [[6, EOS, IGNORE]]
