from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plan_oracle as oracle
from easypipe.core import random
from easypipe.core.errors import ConfigError
from easypipe.plan.order import OrderConfig, documents, permute

keys = st.integers(0, (1 << 64) - 1)


@given(size=st.integers(1, 3000), key=keys)
def test_the_compiled_permutation_is_the_numpy_one(size: int, key: int) -> None:
    indices = np.arange(size)
    assert np.array_equal(permute(indices, size, key), random.permute(indices, size, key))


@given(size=st.integers(1, random.MAX_ROWS), key=keys, data=st.data())
def test_the_compiled_permutation_is_the_numpy_one_for_large_sizes(
    size: int, key: int, data: st.DataObject
) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=30)), dtype=np.int64)
    assert np.array_equal(permute(indices, size, key), random.permute(indices, size, key))


def test_the_compiled_permutation_refuses_what_the_numpy_one_refuses() -> None:
    for size, index in ((0, 0), (random.MAX_ROWS + 1, 0), (10, 10), (10, -1)):
        with pytest.raises(ValueError) as compiled:
            permute(np.array([index]), size, 1)
        with pytest.raises(ValueError) as plain:
            random.permute(np.array([index]), size, 1)
        assert str(compiled.value) == str(plain.value)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    key=st.integers(0, (1 << 64) - 10),
    epoch=st.integers(0, 3),
    spec=st.one_of(
        st.builds(OrderConfig, block_rows=st.integers(1, 50)), st.just(OrderConfig(shuffle=False))
    ),
    data=st.data(),
)
def test_documents_follow_the_permutation_of_their_pass(
    sizes: list[int], key: int, epoch: int, spec: OrderConfig, data: st.DataObject
) -> None:
    """From any place on, over any number of passes, for several datasets at once."""
    drawn = [data.draw(st.integers(0, 3 * size)) for size in sizes]
    counts = [data.draw(st.integers(0, 3 * size)) for size in sizes]
    keys = [key + i for i in range(len(sizes))]
    docs = documents(
        spec,
        np.array(sizes),
        np.array(keys, dtype=np.uint64),
        epoch,
        np.array(drawn),
        np.array(counts),
    )
    expected: list[int] = []
    for size, own, start, count in zip(sizes, keys, drawn, counts, strict=True):
        for position in range(start, start + count):
            order = oracle.one_pass(spec, size, random.child(own, epoch + position // size))
            expected.append(order[position % size])
    assert docs.tolist() == expected


@given(size=st.integers(1, 300), block=st.integers(1, 64), key=keys)
def test_blocks_stay_together_and_every_pass_is_complete(size: int, block: int, key: int) -> None:
    docs = documents(
        OrderConfig(block_rows=block),
        np.array([size]),
        np.array([key], np.uint64),
        0,
        np.array([0]),
        np.array([size]),
    )
    assert sorted(docs) == list(range(size))
    starts = np.flatnonzero(docs % block == 0)
    for start in starts:
        whole = min(block, size - docs[start])
        assert np.array_equal(docs[start : start + whole], docs[start] + np.arange(whole))


def test_passes_differ() -> None:
    docs = documents(
        OrderConfig(), np.array([100]), np.array([3], np.uint64), 0, np.array([0]), np.array([300])
    ).reshape(3, 100)
    assert len({row.tobytes() for row in docs}) == 3
    assert (np.sort(docs) == np.arange(100)).all()


def test_bad_specs_name_the_field() -> None:
    with pytest.raises(
        ConfigError, match=r"block_rows: 0 is not a block of rows\. Give at least 1"
    ):
        OrderConfig(block_rows=0)
    with pytest.raises(
        ConfigError,
        match=r"block_rows: has no effect without shuffle\. Leave it out, or set shuffle",
    ):
        OrderConfig(shuffle=False, block_rows=8)
    OrderConfig(shuffle=False, block_rows=1)
    OrderConfig(shuffle=True, block_rows=8)
