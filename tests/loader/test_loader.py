from __future__ import annotations

import itertools
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, PlacementError, SourceError, StallError, StateError
from easypipe.core.protocols import BatchLoader
from easypipe.core.schema import ATTENTION_MASK, IGNORE, INPUT_IDS, LABELS, SEGMENT_IDS
from easypipe.loader.collate import CollateConfig
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import AsyncDataLoader, Loader
from easypipe.loader.state import LoaderState
from laws import assert_exact_resume, assert_no_new_threads, assert_same_batches
from loader_support import MemoryCache, plan_rows, some_docs
from strategies import examples

LENGTHS = np.random.Generator(np.random.PCG64(3)).integers(1, 60, 90)
CACHE = MemoryCache(some_docs(LENGTHS))
OTHER = MemoryCache(some_docs(LENGTHS[:40], seed=8))


def loader(*, rows=None, seed=0, collate=None, **load) -> Loader:
    load = {"batch_size": 4, **load}
    rows = rows or plan_rows(
        [CACHE, OTHER], weights=[0.7, 0.3], num_epochs=load.get("num_epochs", 1)
    )
    return Loader(rows, LoadStageConfig(**load), seed=seed, collate=collate)


PREFETCH = [
    {"prefetch_enabled": False},
    {"prefetch_workers": 1, "prefetch_buffer_size": 1},
    {"prefetch_workers": 1, "prefetch_buffer_size": 9},
    {"prefetch_workers": 5, "prefetch_buffer_size": 3},
]


# Law 1


@pytest.mark.parametrize("prefetch", PREFETCH, ids=str)
@pytest.mark.parametrize("shuffle", [None, 10])
def test_batches_do_not_depend_on_how_they_are_made(prefetch, shuffle):
    wanted = list(loader(num_epochs=2, shuffle_buffer_size=shuffle))
    count = assert_same_batches(
        wanted, loader(num_epochs=2, shuffle_buffer_size=shuffle, **prefetch)
    )
    assert count == len(wanted) == len(loader(num_epochs=2)) > 20


def test_every_iteration_starts_at_the_first_batch():
    it = loader()
    assert assert_same_batches(it, it) > 10
    assert_same_batches(itertools.islice(iter(it), 3), itertools.islice(iter(it), 3))


def test_a_batch_is_a_stretch_of_rows():
    rows = plan_rows([CACHE])
    batches = list(Loader(rows, LoadStageConfig(batch_size=4)))
    for t, batch in enumerate(batches):
        for name, values in rows.batch(np.arange(4 * t, 4 * t + 4), 64).items():
            np.testing.assert_array_equal(batch[name], values)


# Law 2


@pytest.mark.parametrize("prefetch", PREFETCH, ids=str)
def test_exact_resume_at_every_batch(prefetch):
    def make():
        return loader(
            batch_size=3, num_epochs=2, shuffle_buffer_size=7, drop_last=False, **prefetch
        )

    assert_exact_resume(make, len(make()))


@examples(15)
@given(
    hops=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    shuffle=st.sampled_from([None, 1, 5, 1000]),
    seq_length=st.sampled_from([None, 32]),
    epochs=st.sampled_from([1, 3, None]),
    group=st.sampled_from([None, 1, 4]),
)
def test_save_resume_save_resume(hops, shuffle, seq_length, epochs, group):
    def make():
        rows = plan_rows(
            [CACHE, OTHER],
            weights=[0.9, 0.1],
            stop="restart" if epochs is None else "all_exhausted",
            num_epochs=epochs,
            seq_length=seq_length,
        )
        groups = group if seq_length is None else None
        return Loader(
            rows,
            LoadStageConfig(
                batch_size=5, num_epochs=epochs, shuffle_buffer_size=shuffle, group_by_length=groups
            ),
        )

    assert_exact_resume(make, 20, hops=hops, stops=[0, 1, 7, 13])


def test_the_state_is_of_the_batch_last_yielded_whatever_is_in_flight():
    one = loader(prefetch_workers=3, prefetch_buffer_size=8)
    batches = iter(one)
    assert one.state().batch == 0
    for n in range(1, 5):
        next(batches)
        time.sleep(0.02)  # let the buffer fill up behind it
        state = one.state()
        assert (state.batch, state.row) == (n, 4 * n)
    assert one.state() == loader(prefetch_enabled=False, mesh=None).state().__class__.from_json(
        state.to_json()
    )
    list(batches)
    assert one.state().batch == len(one)


def test_the_state_belongs_to_the_newest_iteration():
    one = loader()
    old, _ = iter(one), None
    next(old)
    new = iter(one)
    assert one.state().batch == 0
    next(old)
    assert one.state().batch == 0
    next(new)
    assert one.state().batch == 1


def test_an_iteration_under_way_does_not_move_a_state_that_was_restored():
    one = loader()
    old = iter(one)
    next(old)
    one.restore(loader_state_at(3))
    next(old)
    assert one.state().batch == 3


def test_restore_is_for_the_next_iteration_only():
    one = loader()
    wanted = list(one)
    other = loader()
    other.restore(LoaderState.from_json(loader_state_at(5)))
    assert other.state().batch == 5
    assert_same_batches(other, wanted[5:])
    assert_same_batches(other, wanted)


def test_a_restored_loader_tells_its_state_without_looking_back():
    for batch in range(len(loader(drop_last=False)) + 1):
        text = loader_state_at(batch, drop_last=False, shuffle_buffer_size=6)
        one = loader(drop_last=False, shuffle_buffer_size=6)
        one.restore(text)
        assert one.state().to_json() == text
        batches = iter(one)
        assert one.state().to_json() == text
        batches.close()
        hint = json.loads(text)["hint"]
        marks = [mark.index for mark in one.rows.plan.checkpoints()]
        assert not [mark for mark in marks if 0 < mark < hint["index"]], (
            "the windows before the state were planned"
        )


def loader_state_at(batch: int, **load) -> str:
    one = loader(**load)
    batches = iter(one)
    for _ in range(batch):
        next(batches)
    return one.state().to_json()


@pytest.mark.parametrize(
    "form",
    [str, str.encode, json.loads, LoaderState.from_json],
    ids=["text", "bytes", "dict", "state"],
)
def test_restore_takes_a_state_in_every_form(form):
    one = loader()
    one.restore(form(loader_state_at(3)))
    assert_same_batches(one, list(loader())[3:])


def test_the_end_can_be_restored():
    for drop_last in (True, False):
        count = len(loader(drop_last=drop_last))
        one = loader(drop_last=drop_last)
        one.restore(loader_state_at(count, drop_last=drop_last))
        assert list(one) == []
        assert one.state().batch == count


def test_a_run_can_be_prolonged_unless_its_last_batch_was_short():
    longer = list(loader(num_epochs=2))
    one = loader(num_epochs=2)
    one.restore(loader_state_at(len(loader())))
    assert_same_batches(one, longer[len(loader()) :])
    rows = plan_rows([CACHE]).num_rows
    size = next(n for n in range(3, 9) if rows % n)
    short = Loader(plan_rows([CACHE]), LoadStageConfig(batch_size=size, drop_last=False))
    list(short)
    assert short.state().row == rows
    prolonged = Loader(
        plan_rows([CACHE], num_epochs=2),
        LoadStageConfig(batch_size=size, drop_last=False, num_epochs=2),
    )
    with pytest.raises(
        StateError,
        match=rf"ended with a batch short of {size - rows % size} rows, and now there are more\. "
        r"Restore an earlier state",
    ):
        prolonged.restore(short.state())


def test_states_are_small_and_survive_json():
    caches = [MemoryCache(some_docs([5, 9, 12], seed=i), parts=1) for i in range(60)]
    one = Loader(
        plan_rows(caches, window=7, stop="restart", num_epochs=None),
        LoadStageConfig(num_epochs=None, shuffle_buffer_size=100),
    )
    batches = iter(one)
    for _ in range(30):
        next(batches)
    text = one.state().to_json()
    assert len(text.encode()) <= 4096
    assert LoaderState.from_json(text) == LoaderState.from_json(json.loads(text)) == one.state()
    assert "\n" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"batch_size": 8},
            r"loader state: config changed since this state was saved: batch_size was 4, is 8\. "
            r"Restore into the pipeline",
        ),
        (
            {"shuffle_buffer_size": 9},
            r"config changed.*shuffle_buffer_size was None, is 9; shuffle_key was None, is \d+",
        ),
        ({"drop_last": False}, r"config changed.*drop_last was True, is False"),
        (
            {"collate": CollateConfig(attention_mask=True)},
            r"config changed.*attention_mask was False, is True",
        ),
        ({"rows": plan_rows([CACHE, OTHER], weights=[0.6, 0.4])}, r"state: plan changed since"),
        (
            {"rows": plan_rows([CACHE, OTHER], weights=[0.7, 0.3], seed=6)},
            r"state: plan changed since",
        ),
        (
            {"rows": plan_rows([CACHE, CACHE], weights=[0.7, 0.3])},
            r"state: sources and plan changed since",
        ),
    ],
)
def test_a_refusal_names_what_changed(change, message):
    with pytest.raises(StateError, match=message):
        loader(**change).restore(loader_state_at(2))


def test_another_tokenizer_is_named():
    cache = MemoryCache(some_docs(LENGTHS))
    text = _state_of(Loader(plan_rows([cache]), LoadStageConfig()))
    cache.tokenizer_fingerprint = "another"
    with pytest.raises(StateError, match="state: tokenizer changed since"):
        Loader(plan_rows([cache]), LoadStageConfig()).restore(text)


def _state_of(one: Loader) -> str:
    next(iter(one))
    return one.state().to_json()


def test_what_changes_no_batch_is_free_to_change():
    one = loader(prefetch_enabled=False, stall_timeout_s=5.0, mesh={"data": -1})
    one.restore(loader_state_at(2))
    assert_same_batches(one, list(loader())[2:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t[:-5], "not JSON"),
        (lambda t: "[]", "not a state of a loader"),
        (lambda t: "{}", "not a state of a loader"),
        (lambda t: t.replace('"batch":2', '"batch":3'), "damaged: its checksum does not fit"),
        (
            lambda t: t.replace('"version":1', '"version":2'),
            r"format version 2, this easypipe reads 1\. Restore with the easypipe",
        ),
    ],
)
def test_damaged_states_are_refused(damage, message):
    with pytest.raises(StateError, match=message):
        loader().restore(damage(loader_state_at(2)))


def test_restoring_late_is_fast():
    """Batch 100,000 of a run over a few million tokens' worth of windows, in another process's
    plan.
    """
    lengths = (
        np.random.Generator(np.random.PCG64(1)).lognormal(6, 1, 4000).astype(int).clip(1, 4000)
    )
    cache = MemoryCache(some_docs(lengths), parts=2)
    stored = np.array([len(d) for d in cache.docs], np.int32)
    cache.lengths = lambda docs: stored[docs]
    ends = np.array([d[-1] == 1 for d in cache.docs])
    cache.has_eos = lambda docs: ends[docs]

    def make():
        return Loader(
            plan_rows([cache], seq_length=512, window=4000, num_epochs=None),
            LoadStageConfig(batch_size=8, num_epochs=None),
        )

    one = make()
    text = one.state_at(100_000).to_json()
    wanted = one.batch(100_000)
    fresh = make()
    start = time.perf_counter()
    fresh.restore(LoaderState.from_json(text))
    batch = next(iter(fresh))
    seconds = time.perf_counter() - start
    assert_same_batches([batch], [wanted])
    assert seconds < 0.2


def test_a_state_does_not_depend_on_where_its_loader_was_restored():
    wanted = [loader().state_at(batch).to_json() for batch in (2, 9, 15)]
    one = loader()
    one.restore(one.state_at(9))
    assert [one.state_at(batch).to_json() for batch in (2, 9, 15)] == wanted


# The end


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 1000])
@pytest.mark.parametrize("drop_last", [True, False])
def test_len_is_the_number_of_batches(batch_size, drop_last):
    rows = plan_rows([CACHE]).num_rows
    one = Loader(plan_rows([CACHE]), LoadStageConfig(batch_size=batch_size, drop_last=drop_last))
    sizes = [len(batch[INPUT_IDS]) for batch in one]
    assert len(one) == len(sizes) == (rows // batch_size if drop_last else -(-rows // batch_size))
    assert sum(sizes) == (rows // batch_size * batch_size if drop_last else rows)
    assert set(sizes[:-1]) <= {batch_size}


def test_len_of_what_never_ends_is_a_type_error():
    one = Loader(
        plan_rows([CACHE, OTHER], stop="restart", num_epochs=None), LoadStageConfig(num_epochs=None)
    )
    with pytest.raises(TypeError, match=r"never ends, so it has no len\(\).*max_steps"):
        len(one)
    assert sum(1 for _ in itertools.islice(iter(one), 300)) == 300


def test_a_short_batch_on_a_mesh_is_filled_with_rows_that_weigh_nothing():
    rows = plan_rows([CACHE]).num_rows
    size = next(n for n in range(3, 9) if rows % n)
    host = list(Loader(plan_rows([CACHE]), LoadStageConfig(batch_size=size, drop_last=False)))
    mesh = list(
        Loader(
            plan_rows([CACHE]), LoadStageConfig(batch_size=size, drop_last=False, mesh={"data": 1})
        )
    )
    last = {name: np.asarray(values) for name, values in mesh[-1].items()}
    left = rows % size
    assert last[INPUT_IDS].shape == (size, 64)
    for name, values in host[-1].items():
        np.testing.assert_array_equal(last[name][:left], values)
    assert (last[LABELS][left:] == IGNORE).all()
    assert not last[SEGMENT_IDS][left:].any()
    assert not last[INPUT_IDS][left:].any()  # the pad id of these rows is 0
    assert_same_batches(host[:-1], mesh[:-1])


def test_epochs_are_new_permutations_of_all_rows():
    one = list(Loader(plan_rows([CACHE], seq_length=None), LoadStageConfig(batch_size=1)))
    two = list(
        Loader(
            plan_rows([CACHE], seq_length=None, num_epochs=2),
            LoadStageConfig(batch_size=1, num_epochs=2),
        )
    )
    assert_same_batches(one, two[:90])
    rows = [batch[INPUT_IDS].tobytes() for batch in two]
    assert sorted(rows[:90]) == sorted(rows[90:])
    assert rows[:90] != rows[90:]


def test_the_shuffle_buffer_permutes_within_its_blocks():
    plain = [b[INPUT_IDS].tobytes() for b in loader(batch_size=1)]
    mixed = [b[INPUT_IDS].tobytes() for b in loader(batch_size=1, shuffle_buffer_size=8)]
    for start in range(0, len(plain), 8):
        assert sorted(plain[start : start + 8]) == sorted(mixed[start : start + 8])
    assert plain != mixed
    assert mixed != [
        b[INPUT_IDS].tobytes() for b in loader(batch_size=1, shuffle_buffer_size=8, seed=1)
    ]
    assert plain == [b[INPUT_IDS].tobytes() for b in loader(batch_size=1, shuffle_buffer_size=1)]
    seeded = loader(batch_size=4, shuffle_buffer_size=8, seed=7)
    assert_same_batches(seeded, seeded.copy())


# Rows that are documents


def test_padding_of_documents():
    rows = plan_rows([CACHE], seq_length=None)
    lengths = rows.lengths(np.arange(90))
    for t, batch in enumerate(Loader(rows, LoadStageConfig(batch_size=6))):
        assert batch[INPUT_IDS].shape == (6, lengths[6 * t : 6 * t + 6].max())
    fixed = Loader(
        plan_rows([CACHE], seq_length=None),
        LoadStageConfig(batch_size=6),
        collate=CollateConfig(padding="max_length", max_length=80),
    )
    assert {batch[INPUT_IDS].shape for batch in fixed} == {(6, 80)}
    ragged = Loader(
        plan_rows([CACHE], seq_length=None),
        LoadStageConfig(batch_size=6),
        collate=CollateConfig(padding=False),
    )
    with pytest.raises(SourceError, match="padding is False") as caught:
        list(ragged)
    assert caught.value.__notes__ == ["loader: batch 0, rows 0:6, stage 'lengths'"]
    short = Loader(
        plan_rows([CACHE], seq_length=None),
        LoadStageConfig(batch_size=6),
        collate=CollateConfig(padding="max_length", max_length=9),
    )
    with pytest.raises(SourceError, match="do not fit max_length 9"):
        list(short)


def test_the_attention_mask_is_where_tokens_stand():
    for batch in loader(collate=CollateConfig(attention_mask=True)):
        np.testing.assert_array_equal(
            batch[ATTENTION_MASK], (batch[SEGMENT_IDS] > 0).astype(np.int32)
        )
    assert ATTENTION_MASK not in next(iter(loader()))


# Threads, stalls, errors


def test_a_break_leaves_no_thread():
    before = set(threading.enumerate())
    one = loader(prefetch_workers=4, prefetch_buffer_size=6)
    for _, _batch in zip(range(3), one, strict=False):
        pass
    del _batch
    for batch in one:
        del batch
        break
    assert_no_new_threads(before)
    assert not [t for t in threading.enumerate() if t.name.startswith("easypipe")]


def test_without_prefetch_there_are_no_threads():
    before = set(threading.enumerate())
    batches = iter(loader(prefetch_enabled=False))
    next(batches)
    assert_no_new_threads(before)
    batches.close()


class Slow:
    """Rows that are read from somewhere slow, or not at all."""

    def __init__(self, rows, stuck_at: int, error: Exception | None = None):
        self._rows, self._stuck_at, self._error, self.release = (
            rows,
            stuck_at,
            error,
            threading.Event(),
        )

    def __getattr__(self, name):
        return getattr(self._rows, name)

    def open(self, state=None, share=None):
        return self

    def batch(self, rows, width):
        if self._stuck_at in rows:
            if self._error is not None:
                raise self._error
            self.release.wait(20)
        return self._rows.batch(rows, width)


def test_a_stall_is_named_and_is_not_the_end():
    slow = Slow(plan_rows([CACHE]), stuck_at=9)
    one = Loader(slow, LoadStageConfig(batch_size=4, stall_timeout_s=0.3), name="loader of 'code'")
    batches = iter(one)
    assert [next(batches)[INPUT_IDS].shape for _ in range(2)] == [(4, 64)] * 2
    with pytest.raises(
        StallError,
        match=r"loader of 'code': batch 2 was not ready after 0\.3 s; it is in stage 'gather'",
    ):
        next(batches)
    assert one.state().batch == 2
    slow.release.set()
    fresh = Loader(plan_rows([CACHE]), LoadStageConfig(batch_size=4))
    fresh.restore(one.state())
    assert_same_batches(fresh, list(Loader(plan_rows([CACHE]), LoadStageConfig(batch_size=4)))[2:])


@pytest.mark.parametrize(
    ("method", "by_number", "stage"),
    [
        ("available", True, "plan"),
        ("available", False, "read"),
        ("lengths", True, "lengths"),
        ("batch", True, "gather"),
    ],
)
def test_an_error_says_in_which_stage_it_came(monkeypatch, method, by_number, stage):
    def breaks(*_):
        raise OSError("no more")

    rows = Slow(plan_rows([CACHE], seq_length=None), stuck_at=-9)
    rows.by_number = by_number
    setattr(rows, method, breaks)
    one = Loader(rows, LoadStageConfig(batch_size=4))
    with pytest.raises(OSError, match="no more") as caught:
        next(iter(one))
    assert f"batch 0, rows 0:4, stage {stage!r}" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("prefetch", PREFETCH, ids=str)
def test_errors_come_whole_and_in_their_place(prefetch):
    error = SourceError(at="dataset 'code', document 3", problem="gone")
    one = Loader(Slow(plan_rows([CACHE]), 9, error), LoadStageConfig(batch_size=4, **prefetch))
    batches = iter(one)
    next(batches), next(batches)
    with pytest.raises(SourceError, match="dataset 'code', document 3: gone") as caught:
        next(batches)
    assert caught.value.__notes__[-1] == "loader: batch 2, rows 8:12, stage 'gather'"
    with pytest.raises(SourceError):
        next(batches)
    assert one.state().batch == 2


# Bad configuration


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "batch_size: 0 is too few. Give at least 1."),
        ({"prefetch_workers": 0}, "prefetch_workers: 0 is too few"),
        ({"prefetch_buffer_size": 0}, "prefetch_buffer_size: 0 is too few"),
        ({"shuffle_buffer_size": 0}, "shuffle_buffer_size: 0 is too few"),
        ({"num_epochs": 0}, "num_epochs: 0 is too few"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s: 0.0 is not a time to wait"),
        ({"partition_spec": ["data"]}, "partition_spec: has no effect without a mesh"),
        ({"batchsize": 8}, "batchsize: unknown key"),
    ],
)
def test_bad_load_configs(values, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(LoadStageConfig, values)
    assert message in str(caught.value)


def test_bad_meshes_are_refused_before_there_are_devices():
    with pytest.raises(PlacementError, match=r"mesh\.data: 0 is not an axis size"):
        LoadStageConfig(mesh={"data": 0})
    with pytest.raises(PlacementError, match="more than one axis is -1"):
        LoadStageConfig(mesh={"data": -1, "fsdp": -1})


def test_epochs_that_contradict_the_rows_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"load\.num_epochs: 2, but the rows are counted over 1\. Set num_epochs=1",
    ):
        Loader(plan_rows([CACHE]), LoadStageConfig(num_epochs=2))


def test_padding_of_packed_rows_is_refused():
    with pytest.raises(ConfigError, match="every row has 64 slots already"):
        Loader(
            plan_rows([CACHE]),
            LoadStageConfig(),
            collate=CollateConfig(padding="max_length", max_length=80),
        )


def test_a_loader_is_what_trainers_want():
    assert isinstance(loader(), BatchLoader)
    assert AsyncDataLoader is Loader
