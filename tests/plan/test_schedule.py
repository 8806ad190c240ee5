"""Weights that follow the training step, shares of tokens, and caps: the bounds, the arithmetic and
the refusals.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import plan_oracle as oracle
from easypipe.core.errors import PlanError
from easypipe.plan.feed import CachedFeed
from easypipe.plan.mix import (
    MAX_DATASETS,
    MAX_SIZE,
    NEVER,
    ROWS_TOTAL,
    TOKENS_TOTAL,
    Known,
    draw_largest_deficit,
    integer_weights,
    weights_of,
)
from easypipe.plan.mix_schedule import KINDS, Kind, Schedule, apportion, half_wave
from easypipe.plan.order import OrderConfig
from easypipe.plan.pack import STRATEGIES, PackSpec
from easypipe.plan.spec import PlanDataset, PlanSpec
from easypipe.plan.window import Planner
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

        def look(counts: np.ndarray) -> Known:
            counts = np.maximum(counts, 1)
            table = [
                sizes[i, np.arange(drawn[i], drawn[i] + n) % sizes.shape[1]]  # noqa: B023
                for i, n in enumerate(counts.tolist())
            ]
            return Known(np.concatenate(table), np.cumsum(counts) - counts, counts)

        def weigh(active: np.ndarray) -> np.ndarray:
            return np.array(weights_of(shares, active.tolist(), total))  # noqa: B023

        made = draw_largest_deficit(
            draws, weigh, left, deficits, active, "restart", None if sizes is None else look
        )
        deficits, drawn = made.deficits, drawn + made.counts
        datasets.append(made.dataset)
        weights += [weights_of(shares, [True] * count, total)] * draws
    return np.concatenate(datasets), np.array(weights)


def by_rows(shares: list[Fraction]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda active: np.array(weights_of(shares, active.tolist(), ROWS_TOTAL))


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
        made = draw_largest_deficit(
            1 << 20, by_rows(part), np.full(7, NEVER), deficits, active, "restart"
        )
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
    made = draw_largest_deficit(
        100,
        by_rows(part),
        np.full(count, NEVER),
        np.zeros(count, np.int64),
        np.ones(count, np.bool_),
        "restart",
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
@example(parts=[1, 1, 1], total=1)  # equal remainders, which chance seldom gives
@examples(60)
def test_apportioned_integers_are_the_nearest(parts: list[int], total: int) -> None:
    whole = apportion([Fraction(part) for part in parts], total)
    assert sum(whole) == total
    assert all(
        abs(w - Fraction(part * total, sum(parts))) < 1
        for w, part in zip(whole, parts, strict=True)
    )
    left = [Fraction(part * total, sum(parts)) % 1 for part in parts]
    up = [w > part * total // sum(parts) for w, part in zip(whole, parts, strict=True)]
    order = sorted(range(len(parts)), key=lambda i: (-left[i], i))  # of equal ones the first
    assert [up[i] for i in order] == sorted(up, reverse=True)


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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"points": ()}, "no point"),
        ({"points": ((-1, (1,)),)}, r"\[-1\] are not ascending"),
        ({"points": ((0, (1,)), (0, (1,)))}, r"\[0, 0\] are not ascending"),
        ({"points": ((2, (1,)), (1, (1,)))}, r"\[2, 1\] are not ascending"),
        ({"batch_sizes": ((1, 8),)}, "begin at step 0"),
        ({"batch_sizes": ((0, 8), (0, 8))}, r"\[0, 0\] are not ascending"),
        ({"batch_sizes": ((0, 0),)}, "without rows"),
        ({"points": ((0, (0,)),)}, "all 0"),
        ({"points": ((0, (2, -1)),)}, "below 0"),
        ({"before": (1, 1)}, "other datasets"),
    ],
)
def test_what_is_no_schedule_is_made_by_nobody(change: dict[str, Any], problem: str) -> None:
    good: dict[str, Any] = {"points": ((0, (1,)), (1, (1,))), "batch_sizes": ((0, 1), (1, 1))}
    Schedule(kind="step", **good)
    with pytest.raises(AssertionError, match=problem):
        Schedule(kind="step", **good | change)


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


@st.composite
def staged(draw: st.DrawFn) -> tuple[list[PlanDataset], PlanSpec]:
    """Packed mixtures whose weights change, of documents that fill rows well or badly: short ones,
    just over half a row, of several rows, or some of each in the worst order.
    """
    size = draw(st.sampled_from([16, 64]))
    kinds = [st.integers(1, 6), st.integers(size // 2 + 1, size // 2 + 3), st.integers(1, 3 * size)]
    count = draw(st.integers(1, 3))
    lengths = [
        draw(st.lists(draw(st.sampled_from(kinds)), min_size=30, max_size=200))
        for _ in range(count)
    ]
    lengths = [sorted(values) if draw(st.booleans()) else values for values in lengths]
    weights = st.lists(st.sampled_from([0, 1, 3]), min_size=count, max_size=count).filter(any)
    steps = draw(st.lists(st.integers(0, 60), min_size=1, max_size=3, unique=True).map(sorted))
    return [dataset(f"d{i}", np.array(values)) for i, values in enumerate(lengths)], PlanSpec(
        seed=draw(st.integers(0, 99)),
        weights=(1,) * count,
        stop="restart" if count > 1 else "all_exhausted",
        num_epochs=None,
        window_docs=4096,
        order=OrderConfig(shuffle=draw(st.booleans())),
        pack=PackSpec(size, draw(st.sampled_from(STRATEGIES[:3]))),
        unit=draw(st.sampled_from(["rows", "tokens"])),
        schedule=Schedule(
            tuple((step, tuple(draw(weights))) for step in steps),
            draw(st.sampled_from(KINDS)),
            draw(st.sampled_from([((0, 1),), ((0, 4),), ((0, 2), (20, 6))])),
            tuple(draw(weights)),
        ),
    )


@given(made=staged())
@examples(80)
def test_weights_change_late_by_a_32nd_of_a_stage_or_two_batches(
    made: tuple[list[PlanDataset], PlanSpec],
) -> None:
    """Windows begin with the weights of their step, and end at most so far behind the row where
    the weights change; only one document of many rows may reach farther.
    """
    plan, schedule = Plan(*made), made[1].schedule
    assert schedule is not None
    row, begun = 0, 0
    while row < 400:
        window = plan.window_at(row)
        left = schedule.rows_left(row)
        if left is None:
            return
        late, stage = window.num_rows - left, row + left - begun
        step = schedule.step_of(row + left)
        batch = schedule.first_row(step + 1) - schedule.first_row(step)
        assert late <= max(stage / 32, 2 * batch) or window.dataset.size == 1
        begun, row = row if late >= 0 else begun, window.after.first_row


@given(
    steps=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    size=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
)
@examples(60)
def test_a_stage_ends_at_a_point_or_within_a_64th_of_the_way(
    steps: list[int], size: int, kind: Kind
) -> None:
    """Whoever goes from stage to stage comes to every point, over stages of whole steps."""
    at = list(itertools.accumulate(steps))
    points = tuple((step, (1 + i % 2, 1)) for i, step in enumerate(at))
    schedule = Schedule(points=points, kind=kind, batch_sizes=((0, size),))
    row, ends = 0, [0]
    while (left := schedule.rows_left(row)) is not None:
        assert left > 0
        row += left
        ends.append(row)
    assert {step * size for step in at} <= set(ends)
    assert row == at[-1] * size
    for a, b in itertools.pairwise(ends):
        place = sum(step * size <= a for step in at)
        ramp = place > 0 and kind != "step"
        way = at[place] - at[place - 1] if ramp else at[place]
        assert b - a <= max(size, size * way // 64 if ramp else size * way)


@given(made=staged())
@examples(40)
def test_every_stage_has_its_shares_within_a_draw_of_each_dataset(
    made: tuple[list[PlanDataset], PlanSpec],
) -> None:
    """From any window to any other: what is owed at both ends is all that counts may be off."""
    datasets, spec = made
    assert spec.schedule is not None
    most = (
        1
        if spec.unit == "rows"
        else int(max(d.lengths(np.arange(d.num_docs)).max() for d in datasets))
    )
    total = ROWS_TOTAL if spec.unit == "rows" else TOKENS_TOTAL
    state, k = Plan(*made).state_at(0), len(datasets)
    planner = Planner(spec, CachedFeed(*made))
    while state.first_row < 400:
        window = planner.window(state)
        shares = weights_of(spec.stage(state.first_row).shares or (), [True] * k, total, spec.block)
        sizes = np.ones_like(window.length) if spec.unit == "rows" else np.maximum(window.length, 1)
        given_ = np.bincount(window.dataset, weights=sizes, minlength=k)
        if state.epoch == window.after.epoch:
            off = [share * sizes.sum() / total - n for share, n in zip(shares, given_, strict=True)]
            assert max(map(abs, off)) <= float(harmonic(k)) * most + 1e-6
        state = window.after


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
    row, late, windows = 0, None, 0
    while late is None:
        window = plan.window_at(row)
        assert set(window.dataset.tolist()) == ({0} if row < 8000 else {1})
        late = None if row < 8000 else row - 8000
        row, windows = window.after.first_row, windows + (row < 8000)
    assert late <= 250
    assert windows <= 12


def test_a_ramp_is_followed_in_stages() -> None:
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
    assert plan.stats(8 * 640).padding / slots < 0.009, "about half a row for each stair of 80"


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


def test_a_document_too_long_to_weigh_is_named() -> None:
    giant = dataset("giant", np.array([5, MAX_SIZE + 1]))
    spec = PlanSpec(seed=0, weights=(1, 1), stop="all_exhausted", window_docs=8, unit="tokens")
    with pytest.raises(
        PlanError, match=rf"dataset 'giant', document 1: {MAX_SIZE + 1} tokens are too many"
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
