"""Weights that follow the training step, shares of tokens, and caps: the bounds, the arithmetic and
the refusals.
"""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plan_oracle as oracle
from easypipe.core.errors import PlanError
from easypipe.plan.deficit import MAX_SIZE, ROWS_TOTAL, TOKENS_TOTAL, draw_owed_most, weights_of
from easypipe.plan.mix import MAX_DATASETS, NEVER, integer_weights
from easypipe.plan.pack import PackSpec
from easypipe.plan.schedule import Schedule, apportion, half_wave
from easypipe.plan.spec import PlanDataset, PlanSpec
from easypipe.plan.windows import Plan, WindowState
from strategies import examples
from strategies import weights as random_weights


def harmonic(n: int) -> Fraction:
    return sum((Fraction(1, i) for i in range(1, n + 1)), Fraction(0))


def run(
    stretches: list[tuple[list[Fraction], int]], sizes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(dataset of every draw, weights in force at it) of several windows after another. sizes:
    Int64[datasets, documents].
    """
    count = len(stretches[0][0])
    deficits, active, left = (
        np.zeros(count, np.int64),
        np.ones(count, np.bool_),
        np.full(count, NEVER),
    )
    drawn = np.zeros(count, np.int64)
    datasets, weights = [], []
    total = ROWS_TOTAL if sizes is None else TOKENS_TOTAL
    for shares, draws in stretches:

        def look(i: int, start: int, stop: int) -> np.ndarray:
            return sizes[i, np.arange(drawn[i] + start, drawn[i] + stop) % sizes.shape[1]]  # noqa: B023

        made = draw_owed_most(
            draws,
            shares,
            None,
            left,
            deficits,
            active,
            True,
            None if sizes is None else look,
            [1] * count,
        )
        deficits, drawn = made.deficits, drawn + made.counts
        datasets.append(made.dataset)
        weights += [weights_of(shares, [True] * count, total)] * draws
    return np.concatenate(datasets), np.array(weights)


shares = random_weights(max_datasets=8).map(
    lambda weights: [Fraction(w, sum(integer_weights(weights))) for w in integer_weights(weights)]
)


@st.composite
def stretches(draw: st.DrawFn) -> list[tuple[list[Fraction], int]]:
    """Windows of any length, each with other weights, from 0 and one in a million to nearly all."""
    count = draw(st.integers(2, 8))
    weight = st.sampled_from([0, 1, 1, 1000, 999_999, 1_000_000])
    vector = st.lists(weight, min_size=count, max_size=count).filter(any)
    return [
        ([Fraction(w, sum(weights)) for w in weights], length)
        for weights, length in draw(
            st.lists(st.tuples(vector, st.integers(1, 200)), min_size=1, max_size=8)
        )
    ]


@given(made=stretches())
@examples(60)
def test_counts_stay_within_the_bound_whatever_the_weights_do(
    made: list[tuple[list[Fraction], int]],
) -> None:
    dataset, weights = run(made)
    owed = (
        np.cumsum(weights, axis=0)
        - ROWS_TOTAL * np.cumsum(dataset[:, None] == np.arange(weights.shape[1]), axis=0)
    ).astype(object)
    k = weights.shape[1]
    assert owed.max() <= (harmonic(k) - 1) * ROWS_TOTAL, "behind by more than H_k - 1"
    assert -owed.min() <= (1 - Fraction(1, k)) * ROWS_TOTAL, "ahead by more than 1 - 1/k"


@given(made=stretches(), seed=st.integers(0, 1000), longest=st.sampled_from([1, 3, 500, 100_000]))
@examples(60)
def test_tokens_stay_within_the_bound_whatever_the_weights_do(
    made: list[tuple[list[Fraction], int]], seed: int, longest: int
) -> None:
    count = len(made[0][0])
    sizes = np.random.default_rng(seed).integers(1, longest + 1, (count, 37))
    dataset, weights = run(made, sizes)
    place = np.zeros(count, np.int64)
    tokens = np.empty(dataset.size, np.int64)
    for n, i in enumerate(dataset.tolist()):
        tokens[n] = sizes[i, place[i] % 37]
        place[i] += 1
    given_ = np.cumsum((dataset[:, None] == np.arange(count)) * tokens[:, None], axis=0)
    owed = (np.cumsum(weights * tokens[:, None], axis=0) - TOKENS_TOTAL * given_).astype(object)
    assert owed.max() <= harmonic(count - 1) * longest * TOKENS_TOTAL
    assert -owed.min() < longest * TOKENS_TOTAL


def test_one_in_a_million_comes_in_its_turn_under_a_schedule() -> None:
    weights = integer_weights({**{f"d{i}": 1.0 for i in range(6)}, "rare": 1e-6})
    part = [Fraction(w, sum(weights)) for w in weights]
    dataset, _ = zip(*(run([(part, 1 << 20)]) for _ in range(1)), strict=True)
    deficits, active, places, before = np.zeros(7, np.int64), np.ones(7, np.bool_), [], 0
    for _ in range(12):
        made = draw_owed_most(1 << 20, part, None, np.full(7, NEVER), deficits, active, True)
        deficits = made.deficits
        places += (before + np.flatnonzero(made.dataset == 6)).tolist()
        before += 1 << 20
    assert dataset[0].size == 1 << 20
    share = float(part[6])
    assert len(places) == 2
    for n, place in enumerate(places):
        assert n - place * share <= 1
        assert (place + 1) * share - n <= float(harmonic(7) - 1) + 1


def test_most_datasets_and_longest_documents_do_not_overflow() -> None:
    count = MAX_DATASETS
    part = [Fraction(1, count)] * count
    made = draw_owed_most(
        100,
        part,
        None,
        np.full(count, NEVER),
        np.zeros(count, np.int64),
        np.ones(count, np.bool_),
        True,
    )
    assert made.dataset.tolist() == list(range(100))
    assert int(made.deficits.sum()) == 0
    sizes = np.full((3, 5), MAX_SIZE)
    dataset, _ = run([([Fraction(1, 3)] * 3, 300)], sizes)
    assert np.bincount(dataset).tolist() == [100, 100, 100]


@given(
    parts=st.lists(st.integers(0, 1 << 50), min_size=1, max_size=9).filter(any),
    total=st.integers(1, 1 << 40),
)
@examples(60)
def test_apportioned_integers_are_the_nearest(parts: list[int], total: int) -> None:
    whole = apportion([Fraction(part) for part in parts], total)
    assert sum(whole) == total
    assert all(
        abs(w - Fraction(part * total, sum(parts))) < 1
        for w, part in zip(whole, parts, strict=True)
    )


def test_half_a_wave() -> None:
    for n in range(1001):
        assert (
            abs(float(half_wave(Fraction(n, 1000))) - (1 - math.cos(math.pi * n / 1000)) / 2)
            < 1e-15
        )
    assert (half_wave(Fraction(0)), half_wave(Fraction(1, 2)), half_wave(Fraction(1))) == (
        0,
        Fraction(1, 2),
        1,
    )
    rises = [half_wave(Fraction(n, 997)) for n in range(998)]
    assert rises == sorted(rises)


@pytest.mark.parametrize("kind", ["step", "linear", "cosine"])
def test_shares_follow_the_step(kind: str) -> None:
    made = Schedule(((100, (1, 4)), (300, (3, 1))), kind, ((0, 8),), (1, 1))  # pyright: ignore[reportArgumentType]
    way = {"step": 0.0, "linear": 0.25, "cosine": (1 - math.cos(math.pi / 4)) / 2}[kind]
    for step, share in {
        0: 0.5,
        99: 0.5,
        100: 0.2,
        150: 0.2 + 0.55 * way,
        300: 0.75,
        10**9: 0.75,
    }.items():
        assert float(made.shares(step)[0]) == pytest.approx(share, abs=1e-12)
        assert sum(made.shares(step)) == 1


def test_steps_and_rows_of_batches_that_grow() -> None:
    made = Schedule(((0, (1,)),), "step", ((0, 2), (5, 4), (7, 1)))
    rows = [0, 2, 4, 6, 8, 10, 14, 18, 19, 20]
    assert [made.first_row(step) for step in range(10)] == rows
    assert [made.step_of(row) for row in range(20)] == [
        sum(first <= row for first in rows) - 1 for row in range(20)
    ]


def dataset(name: str, lengths: np.ndarray) -> PlanDataset:
    array = np.asarray(lengths, dtype=np.int32)
    return PlanDataset(
        name, array.size, int(array.sum(dtype=np.int64)), name, lambda docs: array[docs]
    )


def lengths(seed: int, mean: int, count: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 2 * mean, count)


def test_a_step_is_a_training_step() -> None:
    """Unpacked, a row is a document: the weights change at the very row of the point, however large
    the window could be.
    """
    made = Schedule(((50, (0, 1)), (80, (1, 0))), "step", ((0, 16),), (1, 0))
    spec = PlanSpec(
        seed=0, weights=(1, 0 + 1), stop="restart", window_docs=4096, num_epochs=None, schedule=made
    )
    plan = Plan([dataset("a", lengths(0, 50)), dataset("b", lengths(1, 50))], spec)
    drawn = plan.pieces(np.arange(100 * 16)).dataset.reshape(100, 16)
    assert (drawn[:50] == 0).all()
    assert (drawn[50:80] == 1).all()
    assert (drawn[80:] == 0).all()


@pytest.mark.parametrize("strategy", ["greedy", "pool", "first_fit"])
@pytest.mark.parametrize("mean", [30, 400, 3000])
def test_packed_rows_change_about_where_they_should(strategy: str, mean: int) -> None:
    """A window that begins at row r has the weights of the step of r, and one ends where they
    change.
    """
    made = Schedule(((1000, (0, 1)),), "step", ((0, 8),), (1, 0))
    pack = PackSpec(1024, strategy)  # pyright: ignore[reportArgumentType]
    spec = PlanSpec(
        seed=0,
        weights=(1, 1),
        stop="restart",
        window_docs=65_536,
        num_epochs=None,
        schedule=made,
        pack=pack,
    )
    plan = Plan([dataset("a", lengths(0, mean)), dataset("b", lengths(1, 50))], spec)
    row, late = 0, None
    while late is None:
        window = plan.window_at(row)
        assert set(window.dataset.tolist()) == ({0} if row < 8000 else {1})
        late = None if row < 8000 else row - 8000
        row = window.after.first_row
    assert late <= 6, "only a document of several rows may reach over the border"


def test_a_ramp_is_followed_in_stairs() -> None:
    made = Schedule(((0, (1, 0)), (640, (0, 1))), "linear", ((0, 8),))
    pack = PackSpec(1024, "first_fit")
    spec = PlanSpec(
        seed=0,
        weights=(1, 1),
        stop="restart",
        window_docs=65_536,
        num_epochs=None,
        schedule=made,
        pack=pack,
    )
    plan = Plan([dataset("a", lengths(0, 60)), dataset("b", lengths(1, 60))], spec)
    for step in range(0, 640, 80):
        drawn = plan.pieces(np.arange(step * 8, (step + 80) * 8)).dataset
        assert drawn.mean() == pytest.approx((step + 40) / 640, abs=0.02)
    slots = 8 * 640 * 1024
    assert plan.tally(8 * 640).padding / slots < 0.009, "about half a row for each stair of 80"


def test_states_hold_all_and_stay_small() -> None:
    rng = np.random.default_rng(0)
    count = 60
    points = tuple(
        (step, tuple(int(w) for w in rng.integers(1, 1 << 30, count)))
        for step in (0, 1000, 100_000)
    )
    datasets = [
        PlanDataset(f"d{i}", 1 << 40, 1 << 50, "", lambda docs: (docs % 900 + 1).astype(np.int32))
        for i in range(count)
    ]
    for unit in ("rows", "tokens"):
        spec = PlanSpec(
            seed=0,
            weights=(1,) * count,
            stop="restart",
            window_docs=5000,
            num_epochs=None,
            pack=PackSpec(2048),
            schedule=Schedule(points, "cosine", ((0, 64),)),
            unit=unit,  # pyright: ignore[reportArgumentType]
        )
        plan = Plan(datasets, spec)
        state = plan.state_at(20_000)
        far = dataclasses.replace(
            state, drawn=tuple((1 << 40) + n for n in state.drawn), index=1 << 40, first_row=1 << 47
        )
        text = json.dumps(far.to_json(), separators=(",", ":"))
        assert len(text) < 3300
        again = Plan(datasets, spec)
        again.resume(WindowState.from_json(json.loads(text)))
        assert again.pieces(np.array([far.first_row])).length.sum() <= 2048


def test_equal_weights_under_a_schedule_come_in_turn_like_the_oracle() -> None:
    weights = weights_of([Fraction(2, 3), Fraction(1, 3)], [True, True], ROWS_TOTAL)
    mixing = oracle.Mixing([0, 0], [math.inf, math.inf], [True, True])
    expected = [
        i
        for i, _ in zip(
            oracle.owed_most(mixing, lambda active: weights, "restart", None),
            range(200),
            strict=False,
        )
    ]
    assert run([([Fraction(2, 3), Fraction(1, 3)], 200)])[0].tolist() == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "wave"}, r"schedule: no kind 'wave' \(have: step, linear, cosine\)"),
        ({"points": ()}, r"schedule: \[\] are no ascending steps"),
        ({"points": ((5, (1, 1)), (5, (1, 2)))}, r"schedule: \[5, 5\] are no ascending steps"),
        ({"points": ((-1, (1, 1)),)}, r"schedule: \[-1\] are no ascending steps"),
        ({"points": ((0, (0, 0)),)}, r"schedule: weights below 0, or all 0"),
        ({"points": ((0, (1, -1)),)}, r"schedule: weights below 0, or all 0"),
        ({"before": (1,)}, r"schedule: the points have weights for different numbers of datasets"),
        ({"batch_sizes": ((0, 0),)}, r"schedule: \(\(0, 0\),\) are no batch sizes"),
    ],
)
def test_schedules_that_are_none(values: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Schedule(
            **({"points": ((0, (1, 1)),), "kind": "linear", "batch_sizes": ((0, 8),)} | values)
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unit": "bytes"}, r"unit: no unit 'bytes' \(have: rows, tokens\)"),
        ({"block": 10}, r"block: 10\. Give 1 to 2\^40, with a schedule"),
        ({"max_epochs": (1,)}, r"max_epochs: 1 numbers for 2 datasets"),
        ({"max_epochs": (0, None)}, r"max_epochs: \(0, None\) holds fewer than one pass"),
        (
            {"schedule": Schedule(((0, (1, 1, 1)),), "step", ((0, 8),))},
            r"schedule: its points do not have weights for 2 datasets",
        ),
    ],
)
def test_plans_that_cannot_be(values: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanSpec(
            **(
                {
                    "seed": 0,
                    "weights": (1, 1),
                    "stop": "restart",
                    "window_docs": 8,
                    "num_epochs": None,
                }
                | values
            )
        )


def test_a_document_too_long_to_weigh_is_named() -> None:
    giant = dataset("giant", np.array([5, MAX_SIZE + 1]))
    spec = PlanSpec(seed=0, weights=(1, 1), stop="all_exhausted", window_docs=8, unit="tokens")
    with pytest.raises(
        PlanError, match=rf"dataset 'giant', document 1: {MAX_SIZE + 1} tokens cannot be weighed"
    ):
        Plan([giant, dataset("b", np.array([1]))], spec).locate(0)
    Plan([giant, dataset("b", np.array([1]))], dataclasses.replace(spec, unit="rows")).locate(0)


def test_the_fingerprint_holds_the_new_choices() -> None:
    base = PlanSpec(seed=0, weights=(1, 1), stop="all_exhausted", window_docs=8)
    made = Schedule(((0, (1, 1)),), "step", ((0, 8),))
    others = [
        {"unit": "tokens"},
        {"max_epochs": (2, None)},
        {"schedule": made},
        {"schedule": made, "block": 3},
    ]
    others += [
        {"schedule": dataclasses.replace(made, **change)}
        for change in ({"kind": "linear"}, {"batch_sizes": ((0, 9),)})
    ]
    parts = [dataset("a", np.array([3])), dataset("b", np.array([4]))]
    assert (
        len(
            {Plan(parts, dataclasses.replace(base, **other)).fingerprint for other in ({}, *others)}
        )
        == 7
    )


def test_static_plans_are_what_they_were() -> None:
    """Rows and fingerprints of plans without the choices of this file, as version 0.1.0 made
    them.
    """
    import hashlib

    parts = [
        dataset("code", np.arange(1, 300)),
        dataset("text", np.arange(400, 1, -1)),
        dataset("math", np.arange(90) % 37),
    ]
    parts = [dataclasses.replace(part, fingerprint=f"tokens of {part.name}") for part in parts]
    expected = {
        ("restart", None): ("b82d81cb315b938a2c4ba75bf37c8c09", "9f376d2da21e422d"),
        ("restart", PackSpec(64, "pool", 3)): (
            "53348391c37dda6f9dd6fe672dc12b4e",
            "6c3ab1631f45a723",
        ),
        ("first_exhausted", None): ("923d00700f5471032bb8f9851b8ec0e4", "9f376d2da21e422d"),
        ("first_exhausted", PackSpec(64, "pool", 3)): (
            "18a9d12438005652dcd33dbc765794fc",
            "6c3ab1631f45a723",
        ),
        ("all_exhausted", None): ("221d48e0ff76b307461e81a840c19ac3", "9f376d2da21e422d"),
        ("all_exhausted", PackSpec(64, "pool", 3)): (
            "df983d6cd912ca34d9b0300ca1912cbd",
            "6c3ab1631f45a723",
        ),
    }
    for (stop, pack), (fingerprint, rows) in expected.items():
        epochs = None if stop == "restart" else 2
        plan = Plan(
            parts,
            PlanSpec(
                seed=7, weights=(70, 29, 1), stop=stop, window_docs=50, num_epochs=epochs, pack=pack
            ),
        )  # pyright: ignore[reportArgumentType]
        made = hashlib.sha256()
        for column in plan.pieces(np.arange(300)):
            made.update(np.ascontiguousarray(column).astype("<i8").tobytes())
        assert (plan.fingerprint, made.hexdigest()[:16]) == (fingerprint, rows)
