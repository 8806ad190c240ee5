"""Sizes of batches by step, micro-batches, and the short last batch: in arithmetic and as a loader
yields them.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, StateError
from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, SEGMENT_IDS
from easypipe.loader.collate import CollateConfig
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.steps import Begin, Steps
from laws import assert_exact_resume, assert_same_batches
from loader_support import MemoryCache, plan_rows, some_docs
from strategies import examples

CACHE = MemoryCache(some_docs(np.random.Generator(np.random.PCG64(3)).integers(1, 60, 90)))


def loader(rows=None, collate=None, **load) -> Loader:
    rows = rows or plan_rows([CACHE], num_epochs=load.get("num_epochs", 1))
    return Loader(rows, LoadStageConfig(**{"batch_size": 4, **load}), collate=collate)


ROWS = plan_rows([CACHE]).num_rows

# Arithmetic


@examples(200)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    gaps=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    begin=st.tuples(st.integers(0, 30), st.integers(0, 200)),
    num_rows=st.integers(0, 300),
)
def test_steps_are_those_of_a_loop(sizes, gaps, begin, num_rows):
    points = list(zip(np.cumsum(gaps).tolist(), sizes[1:], strict=False))
    steps = Steps(sizes[0], points, Begin(*begin))
    row = begin[1]
    full = needed = begin[0]
    for step in range(begin[0], begin[0] + 400):
        size = next((n for s, n in reversed(points) if step >= s), sizes[0])
        assert (steps.size(step), steps.start(step)) == (size, row)
        if row < num_rows:
            needed = step + 1
        row += size
        if row <= num_rows:
            full = step + 1
    if num_rows >= begin[1]:
        assert (steps.full(num_rows), steps.needed(num_rows)) == (full, needed)
    assert steps.sizes == tuple(sorted(set(sizes[: len(points) + 1])))
    for stop in (begin[0] - 3, begin[0], begin[0] + 40):
        each = [size for count, size in steps.counts(stop) for _ in range(count)]
        assert each == [steps.size(step) for step in range(begin[0], stop)]
        assert all(count > 0 for count, _ in steps.counts(stop))


# Batch size by step


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("mesh", [None, {"data": 1}], ids=["host", "mesh"])
def test_batches_have_the_size_of_their_step(drop_last, mesh):
    one = loader(batch_size=2, batch_size_schedule=((3, 4), (5, 7)), drop_last=drop_last, mesh=mesh)
    batches = list(one)
    sizes = [len(batch[INPUT_IDS]) for batch in batches]
    assert sizes[:6] == [2, 2, 2, 4, 4, 7]
    assert len(one) == len(batches)
    real = [len(one.rows_of(step)) for step in range(len(batches))]
    assert sum(real) == (ROWS if not drop_last else sum(sizes))
    assert len(one.rows_of(len(batches))) == 0
    assert len(set(sizes)) <= 3 + (mesh is None and not drop_last), (
        "a shape of its own for the last batch"
    )
    whole = {name: np.concatenate([b[name] for b in loader(batch_size=1)]) for name in batches[0]}
    for step, batch in enumerate(batches):
        rows = one.rows_of(step)
        for name, values in batch.items():
            np.testing.assert_array_equal(
                np.asarray(values)[: len(rows)], whole[name][rows.start : rows.stop]
            )


@pytest.mark.parametrize(
    "load", [{}, {"drop_last": False, "shuffle_buffer_size": 6, "prefetch_workers": 3}], ids=str
)
def test_a_schedule_resumes_exactly(load):
    def make():
        return loader(batch_size=3, batch_size_schedule=((2, 1), (6, 5)), num_epochs=2, **load)

    assert_exact_resume(make, len(make()))
    assert_exact_resume(make, len(make()), hops=[1, 4, 2], stops=[0, 1, 2, 5, 6, 7])


def test_another_schedule_is_another_config():
    one = loader(batch_size_schedule=((2, 8),))
    with pytest.raises(
        StateError, match=r"config changed.*batch_size_schedule was None, is \[\[2, 8\]\]"
    ):
        one.restore(loader().state().to_json())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"batch_size_schedule": [[0, 8]]},
            r"batch_size_schedule[0]: step 0 does not come after step 0. Name steps in ascending "
            r"order",
        ),
        (
            {"batch_size_schedule": [[5, 8], [3, 9]]},
            "batch_size_schedule[1]: step 3 does not come after step 5",
        ),
        (
            {"batch_size_schedule": [[5, 0]]},
            "batch_size_schedule[0]: 0 rows are too few. Give at least 1.",
        ),
        ({"batch_size_schedule": [[5]]}, "batch_size_schedule[0]: expected 2 items, got 1"),
        ({"accumulation_steps": 0}, "accumulation_steps: 0 is too few"),
        (
            {"accumulation_steps": 3},
            "batch_size: 8 rows do not divide into accumulation_steps 3. Give 6 or 9 rows.",
        ),
        (
            {"accumulation_steps": 4, "batch_size_schedule": [[2, 2]]},
            "batch_size_schedule[0]: 2 rows do not divide into accumulation_steps 4. Give 4 rows.",
        ),
    ],
)
def test_bad_sizes(values, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(LoadStageConfig, values)
    assert message in str(caught.value)


# Micro-batches


@pytest.mark.parametrize("mesh", [None, {"data": 1}], ids=["host", "mesh"])
@pytest.mark.parametrize("attention_mask", [False, True])
def test_micro_batches_are_the_rows_of_the_plain_batch(mesh, attention_mask):
    collate = CollateConfig(attention_mask=attention_mask)
    plain = list(loader(batch_size=6, collate=collate, batch_size_schedule=((2, 12),)))
    micro = list(
        loader(
            batch_size=6,
            collate=collate,
            batch_size_schedule=((2, 12),),
            accumulation_steps=3,
            mesh=mesh,
        )
    )
    assert len(plain) == len(micro)
    for a, b in zip(plain, micro, strict=True):
        for name, values in b.items():
            assert values.shape == (3, len(a[name]) // 3, 64)
            for piece in range(3):
                np.testing.assert_array_equal(np.asarray(values)[piece], a[name][piece::3])


@pytest.mark.parametrize("mesh", [None, {"data": 1}], ids=["host", "mesh"])
def test_a_short_batch_in_micro_batches_is_filled_up(mesh):
    size = next(n for n in range(4, 12, 2) if ROWS % n)
    one = loader(batch_size=size, accumulation_steps=2, drop_last=False, mesh=mesh)
    *_, last = one
    real = one.rows_of(len(one) - 1)
    assert 0 < len(real) < size
    flat = {
        name: np.asarray(values).swapaxes(0, 1).reshape(size, 64) for name, values in last.items()
    }
    assert (flat[LABELS][len(real) :] == IGNORE).all()
    assert not flat[SEGMENT_IDS][len(real) :].any()
    assert (flat[SEGMENT_IDS][: len(real), 0] > 0).all()


def test_micro_batches_are_free_to_change():
    saved = loader(accumulation_steps=2)
    batches = iter(saved)
    next(batches), next(batches)
    other = loader()
    other.restore(saved.state())
    assert_same_batches(other, list(loader())[2:])


def test_documents_in_micro_batches_share_the_width_of_their_batch():
    def rows():
        return plan_rows([CACHE], seq_length=None)

    plain, micro = list(loader(rows())), list(loader(rows(), accumulation_steps=2))
    assert [b[INPUT_IDS].shape[-1] for b in plain] == [b[INPUT_IDS].shape[-1] for b in micro]
