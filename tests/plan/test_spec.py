"""Every choice of a plan, cached or streaming, is in its fingerprint, or decides nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from easypipe.loader.streams.spec import StreamSpec
from easypipe.plan.feed import CachedFeed
from easypipe.plan.mix_schedule import Schedule
from easypipe.plan.order import OrderConfig
from easypipe.plan.pack import PackSpec
from easypipe.plan.spec import PlanDataset, PlanSpec, WindowState, ends_choice, fingerprint

PARTS = [PlanDataset(name, 3, 30, name, lambda docs: np.full(len(docs), 10)) for name in "ab"]
PLAN = PlanSpec(seed=1, weights=(1, 2), stop="all_exhausted", window_docs=8, pack=PackSpec(10))
SCHEDULE = Schedule(((0, (1, 1)),), "step", ((0, 8),))
SCHEDULED = dataclasses.replace(PLAN, schedule=SCHEDULE)
POOLED = dataclasses.replace(PLAN, pack=PackSpec(10, "pool"))
BOTH = "cached streaming"
# a choice, another value, the plan that it is changed in, and whose fingerprint changes
CHOICES: list[tuple[str, Any, PlanSpec, str]] = [
    ("seed", 2, PLAN, BOTH),
    ("weights", (2, 2), PLAN, BOTH),
    ("stop", "first_exhausted", PLAN, BOTH),
    ("window_docs", 9, PLAN, BOTH),
    ("window_tokens", 99, PLAN, BOTH),
    ("num_epochs", 2, PLAN, ""),  # more rows stand behind the last
    ("order", OrderConfig(shuffle=False), PLAN, "cached"),  # StreamSpec has its own
    ("order", OrderConfig(block_rows=2), PLAN, "cached"),
    ("pack", None, PLAN, BOTH),
    ("schedule", SCHEDULE, PLAN, BOTH),
    ("unit", "tokens", PLAN, BOTH),
    ("block", 6, SCHEDULED, BOTH),
    ("max_epochs", (1, None), PLAN, BOTH),
    ("max_epochs", (None, None), PLAN, BOTH),
    ("pack.seq_length", 11, PLAN, BOTH),
    ("pack.strategy", "first_fit", PLAN, BOTH),
    ("pack.strategy", "stream", PLAN, BOTH),
    ("pack.num_packers", 3, PLAN, "streaming"),  # as it was from the beginning
    ("pack.num_packers", 3, POOLED, BOTH),
    ("pack.oversize", "drop", PLAN, BOTH),
    ("pack.shuffle_rows", False, PLAN, BOTH),
    ("schedule.points", ((0, (1, 2)),), SCHEDULED, BOTH),
    ("schedule.kind", "linear", SCHEDULED, BOTH),
    ("schedule.batch_sizes", ((0, 9),), SCHEDULED, BOTH),
    ("schedule.before", (3, 1), SCHEDULED, BOTH),
]


def streaming(plan: PlanSpec, **changes: Any) -> str:
    return StreamSpec(plan=plan, **{"num_streams": 2, **changes}).fingerprint()


def replaced(spec: PlanSpec, path: str, value: Any) -> PlanSpec:
    part, _, name = path.rpartition(".")
    if part:
        name, value = part, dataclasses.replace(getattr(spec, part), **{name: value})
    return dataclasses.replace(spec, **{name: value})


@pytest.mark.parametrize(("path", "value", "plan", "whose"), CHOICES)
def test_a_choice_changes_the_fingerprint(
    path: str, value: Any, plan: PlanSpec, whose: str
) -> None:
    other = replaced(plan, path, value)
    assert (fingerprint(PARTS, plan) != fingerprint(PARTS, other)) == ("cached" in whose)
    assert (streaming(plan) != streaming(other)) == ("streaming" in whose)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (PLAN, {}),
        (SCHEDULED, {"stages_end": "estimated"}),
        (replaced(SCHEDULED, "pack", None), {}),
        (replaced(SCHEDULED, "pack.strategy", "stream"), {}),
        (replaced(PLAN, "max_epochs", (1, None)), {}),
        (dataclasses.replace(PLAN, stop="restart", num_epochs=None), {}),
        (
            dataclasses.replace(PLAN, stop="restart", num_epochs=None, max_epochs=(1, None)),
            {"windows_end": "where one leaves"},
        ),
    ],
)
def test_plans_whose_windows_end_where_they_did_say_nothing_of_it(
    plan: PlanSpec, says: dict[str, str]
) -> None:
    assert ends_choice(plan) == says


def test_every_choice_is_tried() -> None:
    for prefix, kind in (("", PlanSpec), ("pack.", PackSpec), ("schedule.", Schedule)):
        names = {prefix + field.name for field in dataclasses.fields(kind)}
        assert names <= {path for path, *_ in CHOICES}


def test_windows_that_end_by_tokens_have_no_size_in_documents() -> None:
    by_tokens = dataclasses.replace(PLAN, window_tokens=64)
    assert streaming(by_tokens) == streaming(dataclasses.replace(by_tokens, window_docs=9))
    assert streaming(by_tokens) == streaming(dataclasses.replace(by_tokens, window_tokens=65))


STREAMS = {
    "plan": dataclasses.replace(PLAN, seed=3),
    "num_streams": 4,
    "shuffle": False,
    "shuffle_window": False,
    "eos": 7,
    "joined": True,
    "train_continued": True,
}


def test_every_choice_of_a_stream_is_in_its_fingerprint() -> None:
    assert set(STREAMS) == {field.name for field in dataclasses.fields(StreamSpec)}
    given: list[dict[str, Any]] = [{"plan": PLAN}, {"plan": PLAN, "eos": (1, 2)}]
    given += [{"plan": PLAN, **{name: value}} for name, value in STREAMS.items()]
    assert len({streaming(**one) for one in given}) == len(given)


@pytest.mark.parametrize(
    ("field", "value"), [("name", "c"), ("num_docs", 4), ("total_tokens", 31), ("fingerprint", "x")]
)
def test_every_dataset_is_in_the_fingerprint(field: str, value: Any) -> None:
    for i in range(2):
        parts = list(PARTS)
        parts[i] = dataclasses.replace(parts[i], **{field: value})
        assert fingerprint(parts, PLAN) != fingerprint(PARTS, PLAN)
    assert fingerprint(PARTS[::-1], PLAN) != fingerprint(PARTS, PLAN)


def test_saved_states_name_the_plans_of_now() -> None:
    """With others every run that is under way would be refused."""
    by_tokens = dataclasses.replace(PLAN, window_tokens=64)
    plans = (PLAN, POOLED, SCHEDULED, dataclasses.replace(PLAN, pack=None), by_tokens)
    assert [fingerprint(PARTS, plan)[:6] for plan in plans] == [
        "940949",
        "3805de",
        "a4b93c",
        "0d1bcb",
        "699772",
    ]
    assert [streaming(plan)[:6] for plan in plans] == [
        "3c8e86",
        "5a2e97",
        "f66b13",
        "0e2d0f",
        "124180",
    ]


def test_every_field_of_a_state_comes_back() -> None:
    state = WindowState(
        first_row=5,
        epoch=2,
        drawn=(3, 4),
        deficits=(6, -7),
        active=(True, False),
        cut=(1, 9),
        index=8,
    )
    assert all(
        getattr(state, field.name) != field.default for field in dataclasses.fields(WindowState)
    )
    assert WindowState.from_json(state.to_json()) == state
    whole = dataclasses.replace(state, cut=None)
    assert "cut" not in whole.to_json()
    assert WindowState.from_json(whole.to_json()) == whole


def test_a_dataset_without_documents_keeps_no_run_going() -> None:
    """All others have made their last pass, and it has none to make."""
    ends = dataclasses.replace(PLAN, num_epochs=None, max_epochs=(2, None))
    assert ends.last_epoch((10, 0)) == 2
    assert ends.last_epoch((10, 1)) is None
    assert dataclasses.replace(ends, stop="restart").last_epoch((10, 0)) == 1


@pytest.mark.parametrize(("oversize", "docs"), [("truncate", 80), ("split", 8)])
def test_a_window_before_a_change_of_weights_counts_what_is_placed(
    oversize: Any, docs: int
) -> None:
    """80 rows of 10 slots until the change, and documents of 100 tokens."""
    schedule = Schedule(((0, (1, 1)), (10, (1, 3))), "step", ((0, 8),))
    parts = [dataclasses.replace(part, num_docs=900, total_tokens=90_000) for part in PARTS]
    pack = PackSpec(10, oversize=oversize)
    spec = dataclasses.replace(PLAN, schedule=schedule, window_docs=4096, pack=pack)
    start = WindowState(first_row=0, epoch=0, drawn=(0, 0), deficits=(0, 0), active=(True, True))
    assert CachedFeed(parts, spec).rule(start).docs == docs
