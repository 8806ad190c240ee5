from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.errors import CacheError, PlanError
from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, LOSS_MASK, POSITION_IDS, SEGMENT_IDS
from easypipe.loader.collate import BATCH_COLUMNS, collate
from easypipe.loader.rows.planned import PlannedRows
from easypipe.loader.rows.targets import count_targets, stream_start
from laws import assert_contiguous, assert_labels, assert_rows_by_number, assert_rows_well_formed
from loader_support import EOS, PAD, MemoryCache, plan_rows, slow_labels, slow_rows, some_docs
from strategies import examples


@st.composite
def datasets(draw):
    """One to three caches, of 16- and 32-bit ids, some with a loss mask."""
    caches = []
    for i in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=40))
        vocab = draw(st.sampled_from([1000, 100_000]))
        docs = some_docs(lengths, seed=i, vocab_size=vocab)
        masks = None
        if draw(st.booleans()):
            bits = draw(st.lists(st.integers(0, 1), min_size=sum(lengths), max_size=sum(lengths)))
            masks = np.split(np.array(bits, np.uint8), np.cumsum(lengths)[:-1])
        caches.append(
            MemoryCache(docs, vocab_size=vocab, masks=masks, parts=draw(st.integers(1, 4)))
        )
    return caches


@examples(60)
@given(
    caches=datasets(),
    seq_length=st.sampled_from([1, 7, 32, 64]),
    strategy=st.sampled_from(["greedy", "pool", "first_fit"]),
    data=st.data(),
    asked=st.booleans(),
)
def test_packed_rows_equal_the_slow_way(caches, seq_length, strategy, data, asked):
    rows = plan_rows(caches, seq_length=seq_length, strategy=strategy, train_continued=asked)
    numbers = np.array(
        data.draw(st.lists(st.integers(-1, rows.num_rows - 1), min_size=1, max_size=9)), np.int64
    )
    expected = slow_rows(rows, numbers.tolist(), seq_length)
    at_rest = rows.gather(numbers)
    batch = rows.batch(numbers, seq_length)
    masked = any(cache.masks is not None for cache in caches)
    assert list(at_rest) == [INPUT_IDS, SEGMENT_IDS, POSITION_IDS, *([LOSS_MASK] if masked else [])]
    for name, values in at_rest.items():
        assert values.dtype == np.int32
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    assert list(batch) == list(BATCH_COLUMNS)
    np.testing.assert_array_equal(batch[LABELS], slow_labels(expected))
    for name, values in collate(at_rest).items():
        np.testing.assert_array_equal(
            batch[name], values, err_msg=f"{name}: the fused pass is not collate(gather)"
        )
    real = {name: values[numbers >= 0] for name, values in at_rest.items()}
    assert_rows_well_formed(real, pad_token_id=PAD)
    assert_labels(batch, expected[LOSS_MASK])


def test_a_piece_that_goes_on_with_an_answer_has_no_target_without_its_prompt():
    docs = [np.arange(2, 22), np.arange(22, 42)]
    prompt_first, trained_first = (
        np.repeat([0, 1, 0, 1], [3, 7, 5, 5]),
        np.repeat([1, 0, 1], [3, 7, 10]),
    )
    caches = [
        MemoryCache([doc], masks=[mask])
        for doc, mask in zip(docs, (prompt_first, trained_first), strict=True)
    ]
    held, asked = (
        plan_rows(caches, seq_length=8),
        plan_rows(caches, seq_length=8, train_continued=True),
    )
    seen = {}
    for rows in (held, asked):
        at_rest = rows.gather(np.arange(rows.num_rows))
        assert (at_rest[LOSS_MASK] <= (at_rest[SEGMENT_IDS] > 0)).all()
        labels = rows.batch(np.arange(rows.num_rows), 8)[LABELS]
        found, lost = count_targets(rows.plan, caches, rows.num_rows, hold=rows.hold)
        assert found.sum() == (labels != IGNORE).sum()
        seen[rows.hold] = (
            found.tolist(),
            lost.tolist(),
            set(at_rest[INPUT_IDS][at_rest[LOSS_MASK] == 1].tolist()),
        )
    (targets, lost, trained), (all_targets, none, all_trained) = seen[True], seen[False]
    # of the first piece alone
    assert {id for id in trained if 2 <= id < 22} == set(docs[0][3:8].tolist())
    # begins with what is trained: no prompt
    assert {id for id in trained if id >= 22} == set(docs[1][trained_first == 1].tolist())
    assert all_trained - {EOS} == {
        *docs[0][prompt_first == 1].tolist(),
        *docs[1][trained_first == 1].tolist(),
    }
    assert none == [0, 0]
    assert targets[1] == all_targets[1]
    assert lost == [all_targets[0] - targets[0], 0]
    assert held.identity["plan"] != asked.identity["plan"]


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_may_begin_with_a_document_of_one_token(seed):
    caches = [MemoryCache([np.array([EOS])] * 9), MemoryCache(some_docs([5] * 9, eos_every=1))]
    rows = plan_rows(caches, seq_length=8, strategy="stream", joined=True, seed=seed)
    order = plan_rows(caches, seq_length=None, seed=seed).plan
    first = int(order.pieces(np.arange(1)).dataset[0])
    assert stream_start(rows.plan) == first
    targets, _ = count_targets(rows.plan, caches, rows.num_rows, joined=True)
    assert targets.tolist() == [9 - (first == 0), 45 - (first == 1)]


@examples(60)
@given(
    caches=datasets(),
    seq_length=st.sampled_from([1, 7, 32, 64]),
    window=st.sampled_from([1, 3, 16, 200]),
    joined=st.booleans(),
)
def test_rows_of_a_stream_are_contiguous_and_know_the_token_behind_them(
    caches, seq_length, window, joined
):
    options = {"seq_length": seq_length, "strategy": "stream", "window": window, "joined": joined}
    rows = plan_rows(caches, shuffle_packed=False, **options)
    # the documents one by one, in the order in which they are drawn
    order = plan_rows(caches, seq_length=None, window=window)
    drawn = order.plan.pieces(np.arange(order.num_rows))
    documents, expected = [], [0] * len(caches)  # targets of each dataset
    for dataset, doc in zip(drawn.dataset.tolist(), drawn.doc.tolist(), strict=True):
        ids = caches[dataset].docs[doc].tolist()
        mask = (
            [1] * len(ids) if caches[dataset].masks is None else caches[dataset].masks[doc].tolist()
        )
        documents.append((ids, mask) if ids[-1] == EOS else ([*ids, EOS], [*mask, mask[-1]]))
        begins = not joined or len(documents) == 1
        expected[dataset] += sum(documents[-1][1]) - begins * documents[-1][1][0]
    numbers = np.arange(rows.num_rows)
    batch = rows.batch(numbers, seq_length)
    assert_contiguous(batch, documents, joined=joined)
    at_rest = rows.gather(numbers)
    for name, values in collate(at_rest).items():
        np.testing.assert_array_equal(
            batch[name], values, err_msg=f"{name}: the fused pass is not collate(gather)"
        )
    if not joined:
        assert_rows_well_formed(at_rest, pad_token_id=PAD)
    assert_rows_by_number(
        rows, np.array([rows.num_rows - 1, -1, 0, rows.num_rows // 2]), seq_length
    )
    shuffled = plan_rows(caches, **options).batch(numbers, seq_length)
    for name in batch:  # permuted within windows, the label of the last slot with its row
        assert sorted(map(tuple, batch[name])) == sorted(map(tuple, shuffled[name]))
    targets, _ = count_targets(rows.plan, caches, rows.num_rows, joined=joined)
    assert targets.tolist() == expected
    assert targets.sum() == np.count_nonzero(batch[LABELS] != IGNORE)
    assert stream_start(rows.plan) == drawn.dataset[0]


@examples(30)
@given(caches=datasets(), data=st.data())
def test_rows_that_are_documents_equal_the_slow_way(caches, data):
    rows = plan_rows(caches, seq_length=None)
    assert rows.num_rows == sum(cache.num_docs for cache in caches)
    numbers = np.array(
        data.draw(st.lists(st.integers(-1, rows.num_rows - 1), min_size=1, max_size=9)), np.int64
    )
    lengths = rows.lengths(numbers)
    width = int(lengths.max()) + 3
    expected = slow_rows(rows, numbers.tolist(), width)
    np.testing.assert_array_equal(lengths, (expected[SEGMENT_IDS] > 0).sum(axis=1))
    batch = rows.batch(numbers, width)
    for name in (INPUT_IDS, SEGMENT_IDS, POSITION_IDS):
        np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)
    np.testing.assert_array_equal(batch[LABELS], slow_labels(expected))
    assert set(batch[SEGMENT_IDS].ravel().tolist()) <= {0, 1}


def test_every_token_stands_once_and_documents_end_with_one_eos():
    docs = some_docs([3, 64, 65, 200, 1, 9], vocab_size=100_000)
    rows = plan_rows([MemoryCache(docs, vocab_size=100_000)], seq_length=64)
    at_rest = rows.gather(np.arange(rows.num_rows))
    used = at_rest[SEGMENT_IDS] > 0
    wanted = np.concatenate([d if d[-1] == EOS else np.append(d, EOS) for d in docs])
    assert sorted(at_rest[INPUT_IDS][used].tolist()) == sorted(wanted.tolist())
    assert (at_rest[INPUT_IDS][used] == EOS).sum() == len(docs)


def test_an_added_eos_is_a_target_where_the_token_before_it_is_one():
    docs = [np.array([5, 6, 7]), np.array([8, 9])]
    masks = [np.array([0, 1, 1]), np.array([1, 0])]
    rows = plan_rows([MemoryCache(docs, masks=masks, parts=1)], seq_length=None, shuffle=False)
    batch = rows.batch(np.arange(2), 4)
    assert batch[INPUT_IDS].tolist() == [[5, 6, 7, EOS], [8, 9, EOS, PAD]]
    assert batch[LABELS].tolist() == [[6, 7, EOS, IGNORE], [IGNORE] * 4]


@pytest.mark.parametrize("target", [0, 1])
def test_an_added_eos_that_a_cut_leaves_alone_is_one_too(target):
    cache = MemoryCache([np.array([5, 6, 7])], masks=[np.array([1, 1, target])])
    rows = plan_rows([cache], seq_length=3, shuffle_packed=False)
    at_rest = rows.gather(np.arange(2))
    assert at_rest[INPUT_IDS].tolist() == [[5, 6, 7], [EOS, PAD, PAD]]
    assert at_rest[LOSS_MASK].tolist() == [[1, 1, target], [target, 0, 0]]


def test_the_label_at_the_end_of_a_row_is_no_token_of_an_empty_document():
    docs = [np.array([5, 6, 7, 8]), np.array([], np.int64), np.array([9])]
    cache = MemoryCache([*docs, *docs[1:]], parts=1)
    options = {"strategy": "stream", "joined": True, "eos": None, "shuffle": False}
    rows = plan_rows([cache], seq_length=4, shuffle_packed=False, **options)
    batch = rows.batch(np.arange(2), 4)
    assert batch[INPUT_IDS].tolist() == [[5, 6, 7, 8], [9, 9, PAD, PAD]]
    assert batch[LABELS].tolist() == [[6, 7, 8, 9], [9, IGNORE, IGNORE, IGNORE]]


def test_batches_never_share_memory():
    rows = plan_rows([MemoryCache(some_docs([30] * 50))])
    batches = [rows.batch(np.arange(4), 64) for _ in range(10)]
    for i, batch in enumerate(batches):
        for column in batch.values():
            column[:] = i
    assert all((column == i).all() for i, batch in enumerate(batches) for column in batch.values())


def test_a_cache_that_does_not_hold_what_was_planned_is_named():
    planned = MemoryCache([np.arange(2, 12), np.arange(2, 8)], parts=1)
    rows = plan_rows([planned], seq_length=32, shuffle=False)
    short = MemoryCache([np.arange(2, 12), np.arange(2, 5)], parts=1)
    other = PlannedRows(rows.plan, [short], eos_token_id=EOS, pad_token_id=PAD)
    with pytest.raises(CacheError) as caught:
        other.batch(np.arange(1), 32)
    assert str(caught.value) == (
        "dataset 'd0', document 1 (memory.jsonl, row 1): tokens 0:7 at slot 11 of 32 were planned, "
        "3 are stored. "
        "Plan and cache do not belong together: make the plan again from this cache."
    )
    without_eos = PlannedRows(rows.plan, [planned], eos_token_id=None, pad_token_id=PAD)
    with pytest.raises(CacheError, match="tokens 0:11 at slot 0 of 32 were planned, 10 are stored"):
        without_eos.batch(np.arange(1), 32)


def test_plans_and_caches_that_do_not_belong_together_are_refused():
    cache = MemoryCache(some_docs([5, 6]))
    rows = plan_rows([cache])
    with pytest.raises(PlanError, match="1 datasets, but 2 token caches"):
        PlannedRows(rows.plan, [cache, cache], EOS, PAD)
    with pytest.raises(
        PlanError,
        match=r"plan\.d0: planned over 2 documents, the token cache has 1\. Make the plan from "
        r"this cache",
    ):
        PlannedRows(rows.plan, [MemoryCache(some_docs([5]))], EOS, PAD)


def test_the_end_is_met_without_counting_all_rows_first():
    rows = plan_rows([MemoryCache(some_docs([30] * 400))], window=16)
    assert rows.available(0, 8) == 8
    assert len(rows.plan.checkpoints()) <= 3, "the whole plan was scanned for the first batch"
    total = plan_rows([MemoryCache(some_docs([30] * 400))], window=16).num_rows
    assert rows.available(total - 3, total + 5) == 3
    assert rows.available(total, total + 8) == 0
    assert rows.available(total + 100, total + 108) == 0


def test_a_plan_over_fewer_documents_than_the_cache_has_is_refused():
    rows = plan_rows([MemoryCache(some_docs([5, 6]))])
    with pytest.raises(PlanError, match=r"planned over 2 documents, the token cache has 3"):
        PlannedRows(rows.plan, [MemoryCache(some_docs([5, 6, 7]))], EOS, PAD)


def test_rows_over_the_ends_of_documents_have_an_identity_of_their_own():
    apart, joined = (
        plan_rows([MemoryCache(some_docs([5, 6]))], strategy="stream", joined=joined)
        for joined in (False, True)
    )
    assert apart.plan.fingerprint == joined.plan.fingerprint
    assert apart.identity["plan"] != joined.identity["plan"]


def test_what_pads_rows_is_part_of_their_identity():
    cache = MemoryCache(some_docs([5, 6]))
    rows = plan_rows([cache])
    other = PlannedRows(rows.plan, [cache], EOS, PAD + 3)
    assert other.identity["tokenizer"] != rows.identity["tokenizer"]
    assert {**other.identity, "tokenizer": ""} == {**rows.identity, "tokenizer": ""}
