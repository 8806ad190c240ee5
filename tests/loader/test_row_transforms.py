from __future__ import annotations

import numpy as np
import pytest

from easypipe.core.errors import ConfigError, SourceError, StateError
from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, LOSS_MASK, SEGMENT_IDS
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.row_transforms import MappedRows
from easypipe.loader.rows.stored import StoredRows
from laws import (
    assert_exact_resume,
    assert_labels,
    assert_rows_by_number,
    assert_rows_well_formed,
    assert_same_batches,
)
from loader_support import MemoryCache, plan_rows, some_docs

LENGTHS = np.random.Generator(np.random.PCG64(3)).integers(1, 60, 90)
CACHE = MemoryCache(some_docs(LENGTHS))
MASKED = MemoryCache(some_docs(LENGTHS), masks=[np.arange(n) % 2 for n in LENGTHS])
DROPPED = 5000  # no document has it


def drop_tokens(columns, key):
    """Every fifth token, at random, becomes another and is not a target."""
    chosen = np.random.Generator(np.random.PCG64(key)).random(len(columns[INPUT_IDS])) < 0.2
    chosen &= columns[SEGMENT_IDS] > 0
    columns[INPUT_IDS][chosen] = DROPPED
    return {LOSS_MASK: columns[LOSS_MASK] * ~chosen}


def note_key(columns, key):
    columns[INPUT_IDS][0] = key % 30_000


def loader(cache=CACHE, *, seed=0, transform=drop_tokens, version="1", rows=None, **load) -> Loader:
    load = {"batch_size": 3, "num_epochs": 2, **load}
    rows = rows or plan_rows([cache], num_epochs=load["num_epochs"])
    return Loader(rows, LoadStageConfig(**load), seed=seed).map_rows(transform, version=version)


@pytest.mark.parametrize("cache", [CACHE, MASKED], ids=["plain", "masked"])
def test_the_laws_of_rows(cache):
    plain = plan_rows([cache], num_epochs=2)
    rows = MappedRows(plain, drop_tokens, "1", 7)
    numbers = np.array([5, -1, 0, rows.num_rows - 1, 5, 9])
    assert_rows_by_number(plain, numbers, 64)
    assert_rows_by_number(rows, numbers, 64)
    made = rows.gather(numbers)
    assert_rows_well_formed(made)
    assert_labels(rows.batch(numbers, 64), made[LOSS_MASK])
    before = plain.gather(numbers)
    changed = made[INPUT_IDS] != before[INPUT_IDS]
    assert 0.1 < changed.sum() / (before[SEGMENT_IDS] > 0).sum() < 0.3
    assert not made[LOSS_MASK][changed].any()
    np.testing.assert_array_equal(made[SEGMENT_IDS], before[SEGMENT_IDS])
    stored = StoredRows(
        {INPUT_IDS: [np.arange(2, 2 + n) for n in range(1, 20)]}, seq_length=20, num_epochs=3
    )
    assert_rows_by_number(
        MappedRows(stored, drop_tokens, "1", 7), np.array([0, 40, 19, -1, 56]), 20
    )
    assert stored.epochs(np.array([0, 18, 19, 56, -1])).tolist() == [0, 0, 1, 2, 0]


def test_what_is_dropped_is_no_target_and_the_shift_comes_after():
    for batch in loader():
        labels = batch[LABELS]
        assert not (labels == DROPPED).any()
        after = batch[INPUT_IDS][:, 1:] == DROPPED
        assert (labels[:, :-1][after] == IGNORE).all()


@pytest.mark.parametrize(
    "load",
    [
        {"prefetch_enabled": False},
        {"prefetch_workers": 4, "prefetch_buffer_size": 6},
        {"mesh": {"data": 1}},
    ],
    ids=str,
)
def test_batches_do_not_depend_on_how_they_are_made(load):
    assert_same_batches(loader(), loader(**load))


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_nor_on_how_many_processes_share_the_rows(processes):
    whole = {name: np.concatenate([b[name] for b in loader()]) for name in (INPUT_IDS, LABELS)}
    rows = loader().rows
    for mine in np.array_split(np.arange(len(whole[LABELS])), processes):
        for name, column in whole.items():
            np.testing.assert_array_equal(rows.batch(mine, 64)[name], column[mine])


def test_rows_of_padding_are_not_transformed():
    seen = []

    def count(columns, key):
        seen.append(key)

    rows = StoredRows({INPUT_IDS: np.zeros((7, 4), np.int64)}, num_epochs=2)
    list(loader(rows=rows, transform=count, batch_size=4, mesh={"data": 1}, drop_last=False))
    assert len(seen) == len(set(seen)) == 14


def test_exact_resume():
    assert_exact_resume(
        lambda: loader(shuffle_buffer_size=7, prefetch_workers=2), len(loader()), hops=[2, 3]
    )


def test_keys_differ_by_seed_epoch_row_and_place_in_the_chain():
    rows = StoredRows({INPUT_IDS: np.zeros((50, 4), np.int64)}, num_epochs=2)

    def keys(one):
        return np.concatenate([b[INPUT_IDS][:, 0] for b in one]).tolist()

    first = keys(loader(rows=rows, transform=note_key, batch_size=10))
    assert len(set(first)) > 95
    assert first != keys(loader(rows=rows, transform=note_key, batch_size=10, seed=1))
    second = loader(
        rows=rows, transform=lambda columns, key: None, version="0", batch_size=10
    ).map_rows(note_key, version="1")
    assert first != keys(second)


def test_another_version_is_another_config():
    saved = loader().state()
    with pytest.raises(
        StateError,
        match=r"config changed.*row_transforms was \[\['.*drop_tokens', '1'\]\], is "
        r"\[\['.*drop_tokens', '2'\]\]",
    ):
        loader(version="2").restore(saved.to_json())
    with pytest.raises(StateError, match=r"row_transforms was \[\[.*\]\], is None"):
        Loader(
            plan_rows([CACHE], num_epochs=2), LoadStageConfig(batch_size=3, num_epochs=2)
        ).restore(saved)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            lambda columns, key: {"labels": columns[INPUT_IDS]},
            r"row 0: returned column 'labels', int32 of shape \(64,\)\. Return integers",
        ),
        (
            lambda columns, key: {INPUT_IDS: columns[INPUT_IDS][:3]},
            r"returned column 'input_ids', int32 of shape \(3,\)",
        ),
        (lambda columns, key: {LOSS_MASK: np.zeros(64)}, r"returned column 'loss_mask', float64"),
        (
            lambda columns, key: {INPUT_IDS: np.full(64, 2**33 + 5)},
            r"row 0: returned 8589934597 in column 'input_ids'. Return integers from 0 to 2147483647",
        ),
        (lambda columns, key: {INPUT_IDS: np.full(64, -7)}, "returned -7 in column 'input_ids'"),
        (
            lambda columns, key: {LOSS_MASK: np.full(64, 2)},
            r"returned 2 in column 'loss_mask'. Return integers from 0 to 1 for it",
        ),
        (lambda columns, key: columns[LOSS_MASK].fill(-1), "returned -1 in column 'loss_mask'"),
    ],
)
def test_what_a_transform_may_not_return(transform, message):
    with pytest.raises(SourceError, match=message):
        next(iter(loader(transform=transform)))


def test_segments_cannot_be_changed_and_errors_name_the_row():
    def break_isolation(columns, key):
        columns[SEGMENT_IDS][:] = 1

    with pytest.raises(ValueError, match="read-only") as caught:
        next(iter(loader(transform=break_isolation)))
    assert any("epoch 0, row 0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("transform", "version", "at"),
    [(3, "1", "map_rows"), (drop_tokens, "", r"map_rows\.version: '' is not a version")],
)
def test_bad_transforms(transform, version, at):
    with pytest.raises(ConfigError, match=at):
        loader(transform=transform, version=version)


def test_ranks_draw_what_one_process_draws():
    plain = Loader(plan_rows([CACHE], num_epochs=2), LoadStageConfig(batch_size=3, num_epochs=2))
    for rank in range(2):
        after = (
            plain.map_rows(drop_tokens, version="1")
            .map_rows(note_key, version="2")
            .of_rank(rank, 2)
        )
        before = (
            plain.of_rank(rank, 2)
            .map_rows(drop_tokens, version="1")
            .map_rows(note_key, version="2")
        )
        between = (
            plain.map_rows(drop_tokens, version="1")
            .of_rank(rank, 2)
            .map_rows(note_key, version="2")
        )
        assert assert_same_batches(after, before) == assert_same_batches(after, between) > 5
        with pytest.raises(StateError, match="config"):
            before.restore(plain.of_rank(rank, 2).state().to_json())
        with pytest.raises(StateError, match="config"):
            after.restore(plain.of_rank(rank, 2).state().to_json())
