from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plan_oracle as oracle
from easypipe.core.errors import PlanError
from easypipe.plan import mix
from easypipe.plan.mix import MAX_WEIGHT_SUM, Stop, integer_weights
from strategies import examples
from strategies import weights as random_weights

small_weights = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def draw(
    weights: list[int] | tuple[int, ...],
    num_docs: list[int],
    stop: Stop,
    num_draws: int,
    chunks: list[int],
) -> tuple[list[int], bool]:
    """At most `num_draws` draws, made in chunks; and whether the epoch ended with them."""
    deficits, active = mix.start(num_docs, stop)
    left, drawn, ended = np.array(num_docs), list[int](), False
    if stop == "restart":
        left = np.full_like(left, mix.NEVER)
    for chunk in itertools.cycle(chunks):
        made = mix.draw(
            min(chunk, num_draws - len(drawn)), np.array(weights), left, deficits, active, stop
        )
        assert np.array_equal(made.counts, np.bincount(made.dataset, minlength=len(weights)))
        drawn += made.dataset.tolist()
        left, deficits, active, ended = left - made.counts, made.deficits, made.active, made.ended
        if ended or len(drawn) == num_draws:
            return drawn, ended
    raise AssertionError


def worst(weights: tuple[int, ...], drawn: list[int]) -> Fraction:
    """The largest |count - share| over all prefixes and datasets, exactly."""
    total, worst = sum(weights), 0
    counts = [0] * len(weights)
    for n, chosen in enumerate(drawn, start=1):
        counts[chosen] += 1
        worst = max(
            worst,
            *(
                abs(count * total - n * weight)
                for count, weight in zip(counts, weights, strict=True)
            ),
        )
    return Fraction(worst, total)


def bound(num_datasets: int) -> Fraction:
    return Fraction(0) if num_datasets == 1 else 1 - Fraction(1, 2 * num_datasets - 2)


@given(
    weights=random_weights(max_datasets=12),
    chunks=st.lists(st.integers(1, 400), min_size=1, max_size=4),
)
@examples(60)
def test_counts_stay_within_the_bound_at_every_prefix(
    weights: dict[str, float], chunks: list[int]
) -> None:
    whole = integer_weights(weights)
    drawn, _ = draw(whole, [1] * len(whole), "restart", 1500, chunks)
    assert worst(whole, drawn) <= bound(len(whole)) < 1


@pytest.mark.parametrize("num_datasets", [2, 3, 60, 1000])
def test_the_bound_holds_for_many_datasets_of_very_different_weights(num_datasets: int) -> None:
    whole = integer_weights({str(i): 10 ** -(6 * i / num_datasets) for i in range(num_datasets)})
    drawn, _ = draw(whole, [1] * num_datasets, "restart", 20_000, [20_000])
    counts = np.zeros(num_datasets)
    shares = np.array(whole) / sum(whole)
    deviation = 0.0
    for n, chosen in enumerate(drawn, start=1):
        counts[chosen] += 1
        deviation = max(deviation, np.abs(counts - n * shares).max())
    assert deviation <= bound(num_datasets) + 1e-9


def test_one_in_a_million_comes_once_in_a_million() -> None:
    """The case that breaks rounding per block: six equal weights and one of 1e-6. The small one
    never falls behind, never runs ahead.
    """
    whole = integer_weights({**{f"d{i}": 1.0 for i in range(6)}, "rare": 1e-6})
    drawn, _ = draw(whole, [1] * 7, "restart", 12_000_000, [1 << 20])
    places = np.flatnonzero(np.array(drawn) == 6)
    share = whole[6] / sum(whole)
    counts = np.arange(1, places.size + 1)
    assert places.size == 2
    assert (np.abs(counts - (places + 1) * share) < 1).all()
    assert (np.abs(counts - 1 - places * share) < 1).all()


@given(weights=small_weights, chunks=st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_draws_equal_the_oracle_however_they_are_cut(weights: list[int], chunks: list[int]) -> None:
    drawn, ended = draw(weights, [1] * len(weights), "restart", 200, chunks)
    assert drawn == list(itertools.islice(oracle.assign(weights), 200))
    assert not ended


@given(
    pairs=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=6),
    stop=st.sampled_from(["first_exhausted", "all_exhausted"]),
    chunks=st.lists(st.integers(1, 50), min_size=1, max_size=4),
)
def test_epochs_equal_the_oracle_and_say_when_they_end(
    pairs: list[tuple[int, int]], stop: Stop, chunks: list[int]
) -> None:
    weights, num_docs = [w for w, _ in pairs], [n for _, n in pairs]
    expected = list(oracle.draws(weights, num_docs, stop))
    drawn, ended = draw(weights, num_docs, stop, 1000, chunks)
    assert drawn == expected
    assert ended
    if expected:  # a window that is exactly full knows already that nothing follows
        assert draw(weights, num_docs, stop, len(expected), [len(expected)]) == (expected, True)
    if len(expected) > 1:
        assert draw(weights, num_docs, stop, len(expected) - 1, [len(expected)]) == (
            expected[:-1],
            False,
        )


@given(pairs=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6))
def test_all_exhausted_gives_every_document_once(pairs: list[tuple[int, int]]) -> None:
    weights, num_docs = [w for w, _ in pairs], [n for _, n in pairs]
    drawn, ended = draw(weights, num_docs, "all_exhausted", 1000, [7])
    assert np.bincount(drawn, minlength=len(pairs)).tolist() == num_docs
    assert ended


@given(pairs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=2, max_size=6))
def test_first_exhausted_ends_before_the_first_draw_it_cannot_make(
    pairs: list[tuple[int, int]],
) -> None:
    weights, num_docs = [w for w, _ in pairs], [n for _, n in pairs]
    drawn, _ = draw(weights, num_docs, "first_exhausted", 1000, [7])
    without_end = list(itertools.islice(oracle.assign(weights), len(drawn) + 1))
    assert drawn == without_end[:-1]
    counts = np.bincount(drawn, minlength=len(pairs))
    assert (counts <= num_docs).all()
    assert counts[without_end[-1]] == num_docs[without_end[-1]]


def test_datasets_leave_with_their_last_document_and_the_others_share_by_their_weights() -> None:
    """After the fourth and last document of dataset 0, datasets 1 and 2 come 3 to 1 from an even
    start.
    """
    drawn, _ = draw([4, 3, 1], [4, 100, 100], "all_exhausted", 100, [100])
    gone = np.flatnonzero(np.array(drawn) == 0)[3] + 1
    assert [dataset - 1 for dataset in drawn[gone:]] == list(
        itertools.islice(oracle.assign([3, 1]), 100 - gone)
    )


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"code": 0.7, "text": 0.3}, (7, 3)),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, (1, 1, 1)),
        ({"a": 0.1, "b": 0.2}, (1, 2)),
        ({"a": 3, "b": 1}, (3, 1)),
        ({"a": 1e-6, "b": 1.0}, (1, 1_000_000)),
        ({"only": 0.123}, (1,)),
    ],
)
def test_weights_become_the_integers_they_mean(
    weights: dict[str, float], expected: tuple[int, ...]
) -> None:
    assert integer_weights(weights) == expected


@given(weights=random_weights(max_datasets=30))
def test_integer_weights_are_as_near_as_2_to_the_40_allows(weights: dict[str, float]) -> None:
    whole = integer_weights(weights)
    total, sum_weights = sum(whole), math.fsum(weights.values())
    assert total <= MAX_WEIGHT_SUM
    assert min(whole) >= 1
    for part, weight in zip(whole, weights.values(), strict=True):
        assert abs(part / total - weight / sum_weights) < 2**-36


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(
        PlanError,
        match=r"weights\.b: .* is not a weight\. Give a positive finite number, or leave the dataset "
        r"out",
    ):
        integer_weights({"a": 1.0, "b": weight})
    assert integer_weights({"a": 1.0}) == (1,)


def test_a_weight_that_would_round_to_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"weights\.tiny: 1e-13 is less than 2\^-41 of the sum"):
        integer_weights({"a": 1.0, "tiny": 1e-13})
    assert min(integer_weights({"a": 1.0, "tiny": 1e-11})) >= 1


def test_nothing_to_mix_is_refused() -> None:
    with pytest.raises(PlanError, match="nothing to mix"):
        integer_weights({})


def test_largest_weights_and_most_datasets_do_not_overflow() -> None:
    """The kernel's products at their edge: a sum of 2^40 over 65,536 datasets, one of which has
    nearly everything.
    """
    weights = np.ones(mix.MAX_DATASETS, dtype=np.int64)
    weights[0] = MAX_WEIGHT_SUM - weights[1:].sum()
    deficits, active = mix.start(weights, "restart")
    made = mix.draw(3000, weights, weights, deficits, active, "restart")
    assert (made.dataset == 0).all()
    assert int(made.deficits.sum()) == 0
    assert made.deficits[1] == 3000
    even = np.full(mix.MAX_DATASETS, MAX_WEIGHT_SUM // mix.MAX_DATASETS)
    made = mix.draw(200, even, even, np.zeros_like(even), active, "restart")
    assert made.dataset.tolist() == list(range(200))


def test_weights_are_rounded_to_the_nearest_and_not_down() -> None:
    """Rounded down, the sum of 2^12 shares would fall short by half of that."""
    random = np.random.Generator(np.random.PCG64(1))
    weights = {str(i): float(weight) for i, weight in enumerate(random.random(4096) + 0.5)}
    whole, sum_weights = integer_weights(weights), math.fsum(weights.values())
    off = [
        part - weight / sum_weights * (MAX_WEIGHT_SUM - len(whole))
        for part, weight in zip(whole, weights.values(), strict=True)
    ]
    assert max(map(abs, off)) < 0.51
    assert abs(sum(off)) < 200


def test_a_cap_beyond_all_counting_is_none():
    left = mix.remaining(np.array([10, 10]), np.array([3, 3]), "restart", (mix.NEVER, 2))
    assert left.tolist() == [mix.NEVER, 17]


def test_datasets_without_a_share_share_equally_what_is_left_to_them():
    shares = [Fraction(0), Fraction(0), Fraction(1)]
    assert mix.weights_of(shares, [True, True, False], 10) == (5, 5, 0)
