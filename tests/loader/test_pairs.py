"""Pairs of answers: packed as one document each, two segments in every row, whatever lays the rows
out.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.schema import (
    IGNORE,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_BREAK,
    SEGMENT_IDS,
)
from easypipe.loader.collate import collate
from easypipe.loader.explain import explain_rows
from easypipe.loader.rows.targets import count_targets
from loader_support import EOS, MemoryCache, plan_rows
from strategies import examples

SLOTS = 32


def some_pairs(
    seed: int, count: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(chosen, its mask, rejected, its mask): ids that tell pair and answer, ended by EOS; the
    first tokens of each are a prompt.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    made = []
    for number in range(count):
        pair = []
        for answer in (0, 1):
            length = int(rng.integers(2, SLOTS // 2 + 1))
            ids = np.full(length, 100 + 2 * number + answer)
            ids[-1] = EOS
            mask = (np.arange(length) >= rng.integers(0, length)).astype(np.uint8)
            pair += [ids, mask]
        made.append(tuple(pair))
    return made


def cache_of(pairs) -> MemoryCache:
    docs = [np.concatenate([chosen, rejected]) for chosen, _, rejected, _ in pairs]
    masks = [np.concatenate([mask, [SEGMENT_BREAK], other[1:]]) for _, mask, _, other in pairs]
    return MemoryCache(docs, masks=masks)


@examples(8)
@given(seed=st.integers(0, 99), strategy=st.sampled_from(["greedy", "pool", "first_fit"]))
def test_both_answers_stand_in_one_row_as_segments_of_their_own(seed, strategy):
    pairs = some_pairs(seed, 20)
    cache = cache_of(pairs)
    rows = plan_rows([cache], seq_length=SLOTS, strategy=strategy)
    numbers = np.arange(rows.num_rows)
    at_rest = rows.gather(numbers)
    batch = rows.batch(numbers, SLOTS)
    for name, column in collate(at_rest).items():
        np.testing.assert_array_equal(column, batch[name])
    assert set(np.unique(at_rest[LOSS_MASK])) <= {0, 1}
    seen = []
    for row in range(len(numbers)):
        segments = batch[SEGMENT_IDS][row]
        for segment in range(1, segments.max() + 1, 2):
            pair = [np.flatnonzero(segments == one) for one in (segment, segment + 1)]
            number = (int(batch[INPUT_IDS][row, pair[0][0]]) - 100) // 2
            seen.append(number)
            for slots, ids, mask in zip(pair, pairs[number][::2], pairs[number][1::2], strict=True):
                np.testing.assert_array_equal(batch[INPUT_IDS][row, slots], ids)
                np.testing.assert_array_equal(batch[POSITION_IDS][row, slots], np.arange(len(ids)))
                wanted = np.where(mask[1:] == 1, ids[1:], IGNORE)
                np.testing.assert_array_equal(batch[LABELS][row, slots], [*wanted, IGNORE])
    assert sorted(seen) == list(range(len(pairs)))
    assert (
        count_targets(rows.plan, [cache], rows.num_rows)[0].sum() == (batch[LABELS] != IGNORE).sum()
    )


def test_documents_in_rows_of_their_own_are_two_segments_too():
    pairs = some_pairs(3, 4)
    rows = plan_rows([cache_of(pairs)], seq_length=None, eos=None)
    batch = rows.batch(np.arange(4), SLOTS)
    assert (batch[SEGMENT_IDS].max(axis=1) == 2).all()


def test_explain_tells_the_answers_apart():
    pairs = some_pairs(5, 6)
    rows = plan_rows([cache_of(pairs)], seq_length=SLOTS, strategy="first_fit")
    told = explain_rows(rows, 0, np.arange(rows.num_rows), range(rows.num_rows), None)
    for row in told.rows:
        for chosen, rejected in zip(row.segments[::2], row.segments[1::2], strict=True):
            assert chosen.document == rejected.document
            assert (chosen.token_start, chosen.token_stop) == (0, rejected.token_start)
            assert rejected.token_stop == rejected.document_tokens
            assert len(chosen.ids) == len(pairs[chosen.document][0])
