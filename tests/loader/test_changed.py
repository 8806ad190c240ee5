"""Going on with a run although something is another thing than when its state was saved: refused,
unless it is said, and then recorded.
"""

from __future__ import annotations

import dataclasses
import logging
import re

import numpy as np
import pytest

import pipelines
from easypipe import Pipeline, PipelineConfig
from easypipe.core.config import from_dict, to_dict
from easypipe.core.errors import ConfigError, StateError
from easypipe.core.schema import INPUT_IDS
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.state import MAX_CHANGES, LoaderState
from laws import assert_exact_resume, assert_same_batches
from loader_support import MemoryCache, plan_rows, some_docs

LENGTHS = np.random.Generator(np.random.PCG64(3)).integers(1, 60, 90)
CACHE = MemoryCache(some_docs(LENGTHS))
OTHER = MemoryCache(some_docs(LENGTHS, seed=9))


def loader(cache=CACHE, *, plan_seed=5, **load) -> Loader:
    load = {"batch_size": 4, **load}
    return Loader(
        plan_rows([cache], seed=plan_seed, num_epochs=load.get("num_epochs", 1)),
        LoadStageConfig(**load),
    )


def after(one: Loader, count: int) -> str:
    batches = iter(one)
    for _ in range(count):
        next(batches)
    text = one.state().to_json()
    batches.close()
    return text


def stretch(one: Loader, start: int, size: int) -> list[dict[str, np.ndarray]]:
    """The rows from `start` on, in batches of `size`, the last one full."""
    total = one.rows.num_rows
    assert total is not None
    return [
        one.rows.batch(np.arange(a, a + size), 64) for a in range(start, total - size + 1, size)
    ]


@pytest.mark.parametrize("drop_last", [True, False])
def test_another_batch_size_goes_on_from_the_row_that_was_reached(drop_last, caplog):
    text = after(loader(drop_last=drop_last), 3)
    one = loader(batch_size=6, drop_last=drop_last)
    with pytest.raises(
        StateError,
        match=r"config changed.*batch_size was 4, is 6.*restore\(state, "
        r"allow_changed=\['config'\]\)",
    ):
        one.restore(text)
    with caplog.at_level(logging.WARNING, "easypipe"):
        one.restore(text, allow_changed=["config"])
    assert "batch_size was 4, is 6; continuing after batch 3, from row 12" in caplog.text
    total = one.rows.num_rows
    assert len(one) == 3 + ((total - 12) // 6 if drop_last else -(-(total - 12) // 6))
    assert one.rows_of(4) == range(18, 24)
    batches = iter(one)
    seen = list(batches)
    assert_same_batches(stretch(one, 12, 6), seen[: (total - 12) // 6])
    assert len(seen) == len(one) - 3
    state = one.state()
    assert (state.batch, state.row) == (len(one), 12 + sum(len(b[INPUT_IDS]) for b in seen))
    assert [(c["batch"], c["row"], sorted(c)) for c in state.changes] == [
        (3, 12, ["batch", "config", "row"])
    ]
    assert LoaderState.from_json(state.to_json()) == state
    # the next iteration starts at the first batch
    assert_same_batches(one, loader(batch_size=6, drop_last=drop_last))


def test_what_was_allowed_once_needs_no_more_saying():
    text = after(loader(), 3)

    def make() -> Loader:
        one = loader(batch_size=6, num_epochs=1)
        one.restore(text, allow_changed=["config"])
        return one

    total = make().rows.num_rows
    assert_exact_resume(make, (total - 12) // 6, hops=[1, 2])
    first = make()
    again = loader(batch_size=6)
    again.restore(after(first, 2))
    assert_same_batches(again, stretch(again, 24, 6))
    back = loader(batch_size=5)  # and changed once more
    back.restore(after(make(), 2), allow_changed=["config"])
    assert_same_batches(back, stretch(back, 24, 5))
    assert [c["batch"] for c in back.state().changes] == [3, 5]


def test_what_stood_before_a_change_is_not_made_up():
    one = loader(batch_size=6)
    one.restore(after(loader(), 3), allow_changed=["config"])
    batches = iter(one)
    next(batches)
    for ask in (one.rows_of, one.batch, one.state_at):
        with pytest.raises(
            StateError,
            match="batch 2 comes before batch 3, from which this run continued with changes",
        ):
            ask(2)
        with pytest.raises(IndexError, match="there is no batch -1"):
            ask(-1)
    assert one.rows_of(3) == range(12, 18)
    assert (one.state_at(3).row, one.state_at(4).row) == (12, 18)
    again = loader(batch_size=6)
    again.restore(one.state())
    assert (again.state_at(3).row, again.state_at(5).row) == (12, 24)
    assert_same_batches([again.batch(3)], stretch(again, 12, 6)[:1])
    with pytest.raises(IndexError, match="there is no batch 999"):
        again.batch(999)


def test_other_data_go_on_at_the_same_row_of_what_there_is_now():
    text = after(loader(), 3)
    one = loader(OTHER)
    for short in ([], ["sources"], ["plan", "config"]):
        with pytest.raises(
            StateError,
            match=r"sources and plan changed.*: dataset d0 was '\w{8}', is '\w{8}'\. "
            r".*allow_changed=\['sources', 'plan'\]",
        ):
            one.restore(text, allow_changed=short)
    allowed = re.search(r"allow_changed=(\[.*?\])", _refusal(one, text))
    assert allowed is not None
    # what the message recommends
    one.restore(text, allow_changed=re.findall(r"'(\w+)'", allowed[1]))
    assert_same_batches(one, stretch(one, 12, 4))
    [change] = one.state().changes
    assert {name: [len(part) for part in change[name]] for name in ("sources", "plan")} == {
        "sources": [8, 8],
        "plan": [8, 8],
    }
    assert change["sources"][0] != change["sources"][1]
    another_order = loader(plan_seed=6)
    another_order.restore(text, allow_changed=["plan"])
    assert_same_batches(another_order, stretch(another_order, 12, 4))


def _refusal(one: Loader, text: str) -> str:
    with pytest.raises(StateError) as caught:
        one.restore(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"seed": 8}, "plan.seed was 7, is 8"),
        ({"mix": {"weights": {"code": 1, "docs": 1}}}, "plan.weights was [7, 3], is [1, 1]"),
        ({"pack": {"seq_length": 32}}, "plan.pack.seq_length was 64, is 32"),
        ({"pack": {"strategy": "first_fit"}}, "plan.pack.strategy was 'greedy', is 'first_fit'"),
        ({"order": {"shuffle": False}}, "plan.order.shuffle was True, is False"),
        (
            {"mix": {"stop_strategy": "all_exhausted"}},
            "plan.stop was 'first_exhausted', is 'all_exhausted'",
        ),
        ({"mix": {"max_epochs": {"docs": 3}}}, "plan.max_epochs was None, is [None, 3]"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_choice_that_changed_is_named(tmp_path, now, words, streaming):
    def make(now):
        options = {
            "mix": {
                "weights": {"code": 7, "docs": 3},
                "stop_strategy": "first_exhausted",
                **now.get("mix", {}),
            },
            "pack": {"seq_length": 64, **now.get("pack", {})},
            "load": {"batch_size": 4},
            **{key: value for key, value in now.items() if key not in ("mix", "pack")},
        }
        given = from_dict(
            PipelineConfig,
            {**to_dict(pipelines.config(tmp_path)), "streaming": streaming, **options},
        )
        return Pipeline(given).source().tokenize().mix().pack().load().build()

    text = after(make({}), 2)
    refusal = _refusal(make(now), text)
    if streaming:  # the same words for the same things
        words = words.replace("plan.order.shuffle", "plan.shuffle")
    assert "plan changed since this state was saved: " in refusal
    assert words in refusal
    make({}).restore(text)


def test_allowing_what_did_not_change_records_nothing():
    text = after(loader(), 3)
    one = loader()
    one.restore(text, allow_changed=["sources", "config"])
    assert one.state().to_json() == text
    assert "changes" not in text
    assert_same_batches(one, list(loader())[3:])


@pytest.mark.parametrize("changed", ["sources", "tokenizer", "config", "plan"])
def test_a_changed_state_is_of_what_there_is_now(changed):
    state = dataclasses.replace(LoaderState.from_json(after(loader(), 3)), hint={"of": "the plan"})
    components, config = {**state.components, changed: "another"}, {"batch_size": 9}
    with pytest.raises(StateError, match=f"{changed}.* changed since this state was saved"):
        state.check(components, dict(state.config))
    now = state.check(components, config, [changed])
    assert (now.components, now.config) == (components, config)
    # it says where the scan of a plan may start, and is wrong in another plan
    assert now.hint == (None if changed in ("sources", "plan") else state.hint)


def test_unknown_components_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"allow_changed: a state has no component 'source' \(have: sources, .*Did you mean "
        r"'sources'",
    ):
        loader().restore(after(loader(), 1), allow_changed=["source"])


def test_a_row_behind_the_end_of_less_data_is_refused():
    one = loader(MemoryCache(some_docs(LENGTHS[:9])))
    with pytest.raises(
        StateError, match=r"it is at row 20, and there are fewer rows now\. Start a new run"
    ):
        one.restore(after(loader(), 5), allow_changed=["sources", "plan"])


def test_only_the_datasets_that_changed_are_named():
    text = Loader(plan_rows([CACHE, OTHER]), LoadStageConfig(batch_size=4)).state().to_json()
    refusal = _refusal(Loader(plan_rows([CACHE, CACHE]), LoadStageConfig(batch_size=4)), text)
    assert "dataset d1 was" in refusal
    assert "dataset d0" not in refusal
    added = _refusal(Loader(plan_rows([CACHE, OTHER, OTHER]), LoadStageConfig(batch_size=4)), text)
    assert re.search(
        r"changed since this state was saved: dataset d2 was None, is '\w{8}'; plan\.weights was "
        r"\[1, 1\], is \[1, 1, 1\]\. ",
        added,
    )


@pytest.mark.parametrize("datasets", [16, 60])
def test_a_state_with_every_change_it_may_have_stays_small(datasets):
    caches = [MemoryCache(some_docs([5, 9, 12], seed=i), parts=1) for i in range(datasets)]

    def make(size: int) -> Loader:
        rows = plan_rows(caches, window=7, stop="restart", num_epochs=None)
        return Loader(
            rows, LoadStageConfig(batch_size=size, num_epochs=None, shuffle_buffer_size=100)
        )

    state = make(1).state_at(10**6 // 64)
    for i in range(MAX_CHANGES):
        one = make(2 + i % 2)
        one.restore(state, allow_changed=["config"])
        state = one.state_at(state.batch + 100)
        assert len(state.changes) == i + 1
    assert len(state.to_json().encode()) <= 4096
    with pytest.raises(StateError, match=rf"changed {MAX_CHANGES} times already\. Start a new run"):
        make(7).restore(state, allow_changed=["config"])


def test_a_run_that_ended_short_behind_a_change_cannot_be_prolonged():
    total = loader().rows.num_rows
    size = next(n for n in range(5, 12) if (total - 12) % n)
    one = loader(batch_size=size, drop_last=False)
    one.restore(after(loader(drop_last=False), 3), allow_changed=["config"])
    list(one)
    assert one.state().row == total
    longer = loader(batch_size=size, drop_last=False, num_epochs=2)
    with pytest.raises(
        StateError,
        match=f"ended with a batch short of {size - (total - 12) % size} rows, and now there are "
        "more",
    ):
        longer.restore(one.state(), allow_changed=["plan"])
