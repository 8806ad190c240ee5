"""The keyed permutation is a bijection of any range up to 2^48, the same whichever indices are
asked for together, and looks random.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.random import (
    MAX_ROWS,
    child,
    draw_seed,
    fold,
    mix64,
    permute,
    round_keys,
    word_bits,
)

keys = st.integers(0, (1 << 64) - 1)


@pytest.mark.parametrize("key", [0, 1, 0xDEADBEEF, (1 << 64) - 1])
def test_every_small_size_is_permuted(key: int) -> None:
    for size in itertools.chain(range(1, 130), (255, 256, 257, 1023, 1024, 1025, 4097)):
        assert sorted(permute(np.arange(size), size, key)) == list(range(size)), size


@given(size=st.integers(1, 5000), key=keys)
def test_any_size_is_permuted(size: int, key: int) -> None:
    image = permute(np.arange(size), size, key)
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(size))


@given(size=st.integers(1, MAX_ROWS), key=keys, data=st.data())
def test_large_sizes_neither_collide_nor_leave_the_range(
    size: int, key: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, size - 1))
    run = np.arange(start, min(size, start + 2000))
    spread = (np.arange(2000, dtype=np.int64) * max(1, size // 2000)) % size
    indices = np.unique(np.concatenate([run, spread, [size - 1]]))
    image = permute(indices, size, key)
    assert image.min() >= 0
    assert image.max() < size
    assert np.unique(image).size == indices.size
    assert np.array_equal(permute(indices[::-1], size, key)[::-1], image), (
        "an image depends on what is asked for with it"
    )


def test_a_whole_range_of_two_to_the_20_and_one_is_permuted() -> None:
    size = (1 << 20) + 1
    assert np.bincount(permute(np.arange(size), size, 5), minlength=size).max() == 1


def test_small_sizes_reach_every_permutation_about_equally_often() -> None:
    for size, permutations in ((2, 2), (3, 6), (4, 24)):
        seen = Counter(
            tuple(permute(np.arange(size), size, fold(7, key)).tolist())
            for key in range(permutations * 200)
        )
        assert len(seen) == permutations
        assert min(seen.values()) > 130
        assert max(seen.values()) < 280


@pytest.mark.parametrize("size", [7, 100, 1000])
def test_places_are_uniform_over_keys(size: int) -> None:
    """Chi-square of where index 0 goes, and of how far behind it its neighbour lands (never 0)."""
    images = np.array([permute(np.array([0, 1]), size, fold(1, key)) for key in range(20 * size)])
    distances = (images[:, 1] - images[:, 0]) % size
    assert distances.min() > 0
    for counts in (
        np.bincount(images[:, 0], minlength=size),
        np.bincount(distances, minlength=size)[1:],
    ):
        expected = images.shape[0] / counts.size
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - counts.size) < 6 * np.sqrt(2 * counts.size)


def test_keys_matter_and_are_enough() -> None:
    images = {permute(np.arange(50), 50, key).tobytes() for key in range(100)}
    assert len(images) == 100


def test_sizes_out_of_range_are_refused() -> None:
    for size in (0, -1, MAX_ROWS + 1):
        with pytest.raises(ValueError, match=r"between 1 and 2\^48"):
            permute(np.array([0]), size, 1)
    for index in (-1, 10):
        with pytest.raises(ValueError, match=r"\[0, 10\)"):
            permute(np.array([index]), 10, 1)
    assert permute(np.array([], dtype=np.int64), 10, 1).size == 0


@given(size=st.integers(1, MAX_ROWS))
def test_words_are_less_than_twice_the_size(size: int) -> None:
    left, right = word_bits(size)
    assert left - right in (0, 1)
    assert size <= 1 << (left + right) <= max(4, 2 * size - 1)


def test_mix64_is_splitmix64() -> None:
    """The first outputs of the published generator from seed 1234567 (Vigna's splitmix64.c, as
    Rosetta Code lists them).
    """
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [child(1234567, index) for index in range(5)] == published
    assert round_keys(1234567)[:5].tolist() == published
    words = np.arange(1 << 16, dtype=np.uint64)
    assert np.unique(mix64(words)).size == words.size


def test_children_of_neighbouring_keys_differ() -> None:
    assert len({child(key, index) for key in range(50) for index in range(50)}) == 2500


@given(
    seed=st.integers(-(1 << 70), 1 << 70),
    names=st.lists(st.one_of(st.text(max_size=5), st.integers(-5, 5)), max_size=4),
)
def test_fold_gives_64_bits_and_is_a_function(seed: int, names: list[str | int]) -> None:
    assert fold(seed, *names) == fold(seed, *names)
    assert 0 <= fold(seed, *names) < 1 << 64


def test_fold_separates_names() -> None:
    paths = [("ab", "c"), ("a", "bc"), ("abc",), ("1",), (1,), (), ("a",), ("a", "a"), ("",), (0,)]
    assert len({fold(1, *path) for path in paths}) == len(paths)
    assert fold(1, "a") != fold(2, "a")


def test_the_values_are_pinned() -> None:
    """Other numbers here mean that every saved state, cache and plan of earlier versions names
    other rows.
    """
    assert fold(0, "order", "code") == 3275208207239480117
    assert permute(np.arange(10), 10, 42).tolist() == [8, 6, 2, 4, 0, 5, 3, 7, 9, 1]


def test_draw_seed_fits_31_bits() -> None:
    assert all(0 <= draw_seed() < 1 << 31 for _ in range(100))
