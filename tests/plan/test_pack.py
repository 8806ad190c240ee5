from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plan_oracle as oracle
from easypipe.core.errors import PlanError
from easypipe.core.random import permute
from easypipe.plan.pack import (
    MAX_SEQ_LENGTH,
    OVERSIZE,
    STRATEGIES,
    Layout,
    PackSpec,
    one_row_each,
    pack_window,
)
from strategies import examples
from strategies import lengths as random_lengths

sizes = st.one_of(st.integers(1, 300), st.sampled_from([1, 2, 63, 64, 65, 128, 4096]))
specs = st.one_of(
    st.builds(
        PackSpec,
        seq_length=sizes,
        strategy=st.sampled_from(STRATEGIES[:3]),
        num_packers=st.integers(1, 20),
        oversize=st.sampled_from(OVERSIZE[:3]),
        shuffle_rows=st.booleans(),
    ),
    st.builds(PackSpec, seq_length=sizes, strategy=st.just("stream"), shuffle_rows=st.booleans()),
)
any_lengths = st.one_of(
    random_lengths(),
    st.lists(st.integers(0, 40), max_size=80).map(lambda values: np.array(values, dtype=np.int32)),
)


def as_rows(layout: Layout) -> list[list[tuple[int, int, int]]]:
    columns = (layout.draw, layout.start, layout.length)
    return [
        list(zip(*(column[first:stop].tolist() for column in columns), strict=True))
        for first, stop in zip(layout.first_piece[:-1], layout.first_piece[1:], strict=True)
    ]


@given(lengths=any_lengths, spec=specs, key=st.integers(0, (1 << 64) - 1))
@examples(300)
def test_layouts_equal_the_oracle(lengths: np.ndarray, spec: PackSpec, key: int) -> None:
    layout = pack_window(lengths, spec, key)
    expected = oracle.pack(lengths.tolist(), spec)
    if spec.shuffle_rows and expected:
        places = permute(np.arange(len(expected)), len(expected), key)
        expected = [expected[n] for n in np.argsort(places)]
    assert as_rows(layout) == expected


@given(lengths=any_lengths, spec=specs, key=st.integers(0, (1 << 64) - 1))
def test_every_token_stands_once_and_no_row_is_too_long(
    lengths: np.ndarray, spec: PackSpec, key: int
) -> None:
    layout = pack_window(lengths, spec, key)
    assert layout.first_piece[0] == 0
    assert layout.first_piece[-1] == layout.row.size
    assert (np.diff(layout.first_piece) > 0).all(), "a row is empty"
    assert (layout.length > 0).all()
    for row, (first, stop) in enumerate(
        zip(layout.first_piece[:-1], layout.first_piece[1:], strict=True)
    ):
        assert (layout.row[first:stop] == row).all()
        ends = np.cumsum(layout.length[first:stop])
        assert ends[-1] <= spec.seq_length
        assert np.array_equal(layout.slot[first:stop], ends - layout.length[first:stop]), (
            "slots overlap or leave a gap"
        )
    kept = np.minimum(lengths, spec.seq_length) if spec.oversize == "truncate" else lengths
    if spec.oversize == "drop":
        kept = np.where(lengths > spec.seq_length, 0, lengths)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for draw, start, length in zip(layout.draw, layout.start, layout.length, strict=True):
        assert start + length <= lengths[draw]
        seen[draw][start : start + length] += 1
    for counts, keep in zip(seen, kept, strict=True):
        assert (counts[:keep] == 1).all()
        assert not counts[keep:].any()
    if spec.strategy == "stream":
        assert layout.num_rows == -(-int(lengths.sum()) // spec.seq_length), (
            "a row but the last is not full"
        )
        return
    fits = lengths <= spec.seq_length
    assert (np.bincount(layout.draw, minlength=lengths.size)[fits] <= 1).all(), (
        "a document that fits a row was cut"
    )


@given(lengths=any_lengths, spec=specs)
def test_the_key_only_moves_rows(lengths: np.ndarray, spec: PackSpec) -> None:
    one, two = pack_window(lengths, spec, 1), pack_window(lengths, spec, 2)
    assert sorted(as_rows(one)) == sorted(as_rows(two))
    if not spec.shuffle_rows:
        assert as_rows(one) == as_rows(two)


def test_rows_are_shuffled() -> None:
    lengths = np.arange(1, 101, dtype=np.int32)[::-1].copy()
    spec = PackSpec(seq_length=100, strategy="first_fit")
    assert as_rows(pack_window(lengths, spec, 1)) != as_rows(pack_window(lengths, spec, 2))
    plain = pack_window(
        lengths, PackSpec(seq_length=100, strategy="first_fit", shuffle_rows=False), 1
    )
    assert plain.length[plain.first_piece[0]] == 100


@pytest.mark.parametrize(
    ("strategy", "least"),
    [("greedy", 0.80), ("pool", 0.99), ("first_fit", 0.999), ("stream", 0.9999)],
)
def test_fill(strategy: str, least: float) -> None:
    """Lognormal lengths of median 400 in rows of 2,048; windows as `window_docs` makes them."""
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(np.log(400), 1.0, 41_943)).astype(
        np.int32
    )
    layout = pack_window(lengths, PackSpec(2048, strategy), 0)  # pyright: ignore[reportArgumentType]
    assert int(layout.length.sum()) == int(lengths.sum())
    assert lengths.sum() / (layout.num_rows * 2048) >= least


def test_the_longest_rows_and_documents() -> None:
    """A row as long as is allowed, and a document of nearly 2^31 tokens."""
    lengths = np.array([MAX_SEQ_LENGTH, 5, (1 << 31) - 1, MAX_SEQ_LENGTH - 5], dtype=np.int32)
    for strategy in STRATEGIES:
        layout = pack_window(lengths, PackSpec(MAX_SEQ_LENGTH, strategy), 0)
        assert int(layout.length.sum(dtype=np.int64)) == int(lengths.sum(dtype=np.int64))
        assert np.bincount(layout.row, layout.length).max() <= MAX_SEQ_LENGTH
    one = pack_window(np.array([3, 2], dtype=np.int32), PackSpec(1, "first_fit"), 0)
    assert one.num_rows == 5


def test_arrays_from_elsewhere_are_taken() -> None:
    """Read-only and strided lengths, as memory maps and slices give them."""
    lengths = np.array([5, 9, 3, 9, 7, 9], dtype=np.int32)[::2]
    frozen = lengths.copy()
    frozen.flags.writeable = False
    spec = PackSpec(8)
    assert as_rows(pack_window(lengths, spec, 1)) == as_rows(pack_window(frozen, spec, 1))
    assert frozen.tolist() == [5, 3, 7]


def test_one_row_each() -> None:
    layout = one_row_each(np.array([3, 0, 2], dtype=np.int32))
    assert layout.num_rows == 3
    assert as_rows(layout) == [[(0, 0, 3)], [(1, 0, 0)], [(2, 0, 2)]]


def test_oversize_error_names_the_document_and_its_advice_works() -> None:
    lengths = np.array([3, 9, 12], dtype=np.int32)
    with pytest.raises(
        PlanError,
        match=r"draw 1: 9 tokens do not fit a row of 8\. Raise pack\.seq_length, or set "
        r"pack\.oversize",
    ):
        pack_window(lengths, PackSpec(8, oversize="error"), 0)
    assert pack_window(lengths, PackSpec(12, oversize="error"), 0).num_rows
    for rule in OVERSIZE[:3]:
        assert pack_window(lengths, PackSpec(8, oversize=rule), 0).num_rows
