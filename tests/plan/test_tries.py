"""Packing tried for several numbers of documents gives what packing each of them alone gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.plan.pack import PackSpec, pack_window
from easypipe.plan.tries import Tries
from strategies import examples


@pytest.mark.parametrize("oversize", ["split", "truncate", "drop"])
@pytest.mark.parametrize("strategy", ["greedy", "pool", "first_fit"])
@given(
    lengths=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 300)), max_size=120),
    seq_length=st.sampled_from([1, 2, 7, 64, 65, 200]),
    counts=st.lists(st.integers(0, 130), min_size=1, max_size=4),
    packers=st.integers(1, 5),
)
@examples(60)
def test_tries_are_packing(
    strategy: str,
    oversize: str,
    lengths: list[int],
    seq_length: int,
    counts: list[int],
    packers: int,
) -> None:
    spec = PackSpec(seq_length, strategy, packers, oversize)  # pyright: ignore[reportArgumentType]
    array = np.array(lengths, dtype=np.int32)
    tries = Tries(array, spec)
    for count in counts:
        expected = pack_window(array[:count], spec, 3)
        assert tries.rows(count) == expected.num_rows
        layout = tries.layout(count, 3)
        assert np.array_equal(layout.table, expected.table)
        assert np.array_equal(layout.first_piece, expected.first_piece)


@pytest.mark.parametrize("seq_length", [512, 8192])
def test_rows_of_many_documents_are_counted(seq_length: int) -> None:
    lengths = (
        np.random.default_rng(0)
        .lognormal(np.log(400), 1.0, 30_000)
        .clip(1, 100_000)
        .astype(np.int32)
    )
    spec = PackSpec(seq_length, "first_fit")
    assert Tries(lengths, spec).rows(lengths.size) == pack_window(lengths, spec, 0).num_rows
