"""What a report says that a run draws of each dataset, against counting piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from easypipe.core.random import fold
from easypipe.loader.steps import Begin, Steps
from easypipe.plan.mix_schedule import Schedule
from easypipe.plan.pack import PackSpec
from easypipe.plan.windows import Plan, PlanDataset, PlanSpec
from easypipe.stages.mix.mixture import Mixture
from easypipe.stages.reports import shares

ROW = 16
PACKS = {
    "none": None,
    **{how: PackSpec(ROW, oversize=how) for how in ("split", "truncate", "drop")},
    "pool": PackSpec(ROW, "pool", 3),
    "concat": PackSpec(ROW, "stream"),
}


def lengths(count: int, most: int, salt: int) -> np.ndarray:
    return np.array([fold(salt, "length", i) % (most + 1) for i in range(count)], np.int32)


LENGTHS = {"long": lengths(31, 40, 1), "short": lengths(23, 9, 2)}
DATASETS = [
    PlanDataset(name, each.size, int(each.sum()), name, each.__getitem__)
    for name, each in LENGTHS.items()
]


def plan_of(pack: PackSpec | None, **changes: Any) -> Plan:
    values = {"seed": 3, "weights": (3, 1), "stop": "first_exhausted", "num_epochs": 2}
    return Plan(DATASETS, PlanSpec(**{**values, "window_docs": 8, "pack": pack, **changes}))


def mixture_of(**changes: Any) -> Mixture:
    values = {"seed": 3, "weights": (3, 1), "stop": "first_exhausted", "num_epochs": None}
    spec = PlanSpec(**{**values, "window_docs": 8, **changes})
    return Mixture(dict.fromkeys(LENGTHS), spec, None)  # type: ignore[arg-type]


def counted(plan: Plan, start: int, stop: int) -> tuple[list[int], list[int]]:
    pieces = plan.pieces(np.arange(start, stop))
    tokens = np.bincount(pieces.dataset, pieces.length, 2)
    documents = np.bincount(pieces.dataset[pieces.start == 0], minlength=2)
    return tokens.astype(int).tolist(), documents.tolist()


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
def test_tokens_and_documents_of_rows(pack: PackSpec | None) -> None:
    plan = plan_of(pack)
    rows = plan.num_rows
    assert rows is not None
    assert rows > 12, "several windows"
    for start in range(0, rows, 5):
        for stop in (*range(start, rows, 3), rows):
            tokens, documents = shares._counts(plan, start, stop)
            assert (tokens.tolist(), documents.tolist()) == counted(plan, start, stop)


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
def test_documents_that_a_run_has_drawn(pack: PackSpec | None) -> None:
    """Whole windows with all that they drew; of the last one what stands in the rows."""
    plan = plan_of(pack)
    assert plan.num_rows is not None
    for rows in range(plan.num_rows + 1):
        first = plan.window_at(rows - 1).first_row if rows else 0
        whole = rows if rows == plan.num_rows or plan.window_at(rows).first_row == rows else first
        drawn = np.array([part.draws for part in plan.stats(whole).datasets.values()], float)
        pieces = plan.pieces(np.arange(whole, rows))
        before = None  # the piece that goes on with what the window before has drawn
        if whole < rows and (cut := plan.window_at(whole).state.cut) is not None:
            window = plan.window_at(whole)
            before = int(window.dataset[0]), int(window.doc[0]), cut[1]
        for part, doc, start, placed in zip(
            pieces.dataset, pieces.doc, pieces.start, pieces.length, strict=True
        ):
            if before is not None and before[:2] == (part, doc) and start >= before[2]:
                continue
            length = int(LENGTHS[list(LENGTHS)[part]][doc])
            kept = min(length, ROW) if pack is not None and pack.oversize == "truncate" else length
            drawn[part] += 1 if length == 0 else placed / kept
        assert shares.documents_drawn(plan, rows) == pytest.approx(drawn), rows


@pytest.mark.parametrize("unit", ["rows", "tokens"])
@pytest.mark.parametrize("steps", [1, 7, 100, 101, 250])
def test_shares_are_those_of_each_interval(unit: str, steps: int) -> None:
    plan = plan_of(PACKS["split"], stop="restart", num_epochs=None, unit=unit)
    mixture = mixture_of(stop="restart", unit=unit)
    begin = Begin(2, 9)
    counting = Steps(2, begin=begin)
    found = shares.shares_by_step(plan, mixture, counting, steps + begin.batch)
    edges = [begin.batch, *(share.step for share in found)]
    assert edges == sorted(set(edges))
    assert (edges[-1], len(found)) == (steps + begin.batch, min(steps, shares.MARKS))
    assert max(np.diff(edges)) - min(np.diff(edges)) <= 1
    for one, start, stop in zip(found, edges, edges[1:], strict=False):
        rows = counting.start(start), counting.start(stop)
        tokens, documents = counted(plan, *rows)
        assert list(one.tokens.values()) == tokens
        parts = tokens if unit == "tokens" else documents
        assert list(one.realised.values()) == pytest.approx(np.array(parts) / max(1, sum(parts)))
        assert one.requested == pytest.approx({"long": 0.75, "short": 0.25})


def test_steps_behind_the_end_hold_nothing() -> None:
    plan = plan_of(PACKS["split"])
    assert plan.num_rows is not None
    found = shares.shares_by_step(plan, mixture_of(), Steps(plan.num_rows + 3), 2)
    assert list(found[0].tokens.values()) == counted(plan, 0, plan.num_rows)[0]
    assert list(found[1].tokens.values()) == [0, 0]


def test_what_is_asked_for_between_two_rows_is_the_mean_of_its_steps() -> None:
    """However many rows a step has."""
    sizes = ((0, 2), (3, 4), (5, 1))
    schedule = Schedule(((0, (1, 1)), (4, (1, 3)), (6, (7, 1))), "step", sizes)
    mixture = mixture_of(schedule=schedule)
    for start in range(18):
        for stop in range(start + 1, 20):
            each = [schedule.shares(schedule.step_of(row)) for row in range(start, stop)]
            mean = np.mean([[float(share) for share in row] for row in each], axis=0)
            asked = shares.asked_between(mixture, start, stop)
            assert list(asked.values()) == pytest.approx(mean / mean.sum())
    assert shares.asked_between(mixture, 6, 6) == mixture.requested(6)


@pytest.mark.parametrize("size", [1, 7, 23, 1 << 20])
@pytest.mark.parametrize("name", PACKS)
def test_mean_tokens(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_LENGTHS", size)
    placed = {  # at least 1, so that all count
        "truncate": lambda length: np.clip(length, 1, ROW),
        "drop": lambda length: np.where(length > ROW, 1, np.maximum(length, 1)),
    }.get(name, np.asarray)
    expected = [float(placed(each).mean()) for each in LENGTHS.values()]
    assert shares._mean_tokens(plan_of(PACKS[name])) == pytest.approx(expected)


def test_weights_of_documents_that_give_other_shares_of_tokens_are_told() -> None:
    plan = plan_of(None)
    means = [float(each.mean()) for each in LENGTHS.values()]
    for weights in ((3, 1), (1, 1), (1, 5), (1, 40)):
        asked = [weight / sum(weights) for weight in weights]
        tokens = np.array(asked) * means / np.dot(asked, means)
        apart = [
            f"{name} has {part:.2%} of the tokens for a weight of {share:.2%}"
            for name, part, share in zip(LENGTHS, tokens, asked, strict=True)
            if not 1 / 1.5 <= part / share <= 1.5
        ]
        told = shares.unlike_weights(mixture_of(), plan, dict(zip(LENGTHS, asked, strict=True)))
        assert (told or "").startswith("; ".join(apart))
        assert (told is None) == (not apart)
    asked = {"long": 0.5, "short": 0.5}
    assert shares.unlike_weights(mixture_of(), plan, asked)
    assert shares.unlike_weights(mixture_of(unit="tokens"), plan, asked) is None
    assert shares.unlike_weights(mixture_of(stop="all_exhausted"), plan, asked) is None
    assert shares.unlike_weights(mixture_of(), plan, {"long": 1.0, "short": 0.0}) is None


@pytest.mark.parametrize(("count", "more"), [(8, ""), (10, ", and 2 more")])
def test_the_first_eight_datasets_with_other_shares_are_named(count: int, more: str) -> None:
    sizes = np.array([900] + [1] * (count - 1), np.int32)
    parts = [
        PlanDataset(f"d{i}", 1, int(n), "", lambda docs, n=n: np.array([n]))
        for i, n in enumerate(sizes)
    ]
    plan = Plan(parts, PlanSpec(seed=3, weights=(1,) * count, stop="restart", num_epochs=None))
    names = [part.name for part in parts]
    mixture = Mixture(dict.fromkeys(names), plan.spec, None)  # type: ignore[arg-type]
    asked = 1 / count
    told = shares.unlike_weights(mixture, plan, dict.fromkeys(names, asked))
    apart = [
        f"{name} has {n / sizes.sum():.2%} of the tokens for a weight of {asked:.2%}"
        for name, n in zip(names[:8], sizes, strict=False)
    ]
    assert str(told).startswith(
        f"{'; '.join(apart)}{more}: the weights are shares of the documents"
    )


def test_a_dataset_that_is_not_asked_for_is_not_to_blame() -> None:
    """However long its documents are."""
    means = {"none": 1_000, "most": 1, "some": 1}
    parts = [
        PlanDataset(
            name, 9, 9 * mean, "", lambda docs, mean=mean: np.full(len(docs), mean, np.int32)
        )
        for name, mean in means.items()
    ]
    schedule = Schedule(((0, (0, 3, 1)),), "step", ((0, 2),))
    spec = PlanSpec(seed=3, weights=(1, 3, 1), stop="restart", num_epochs=None, schedule=schedule)
    mixture = Mixture(dict.fromkeys(means), spec, None)  # type: ignore[arg-type]
    (told,) = shares.far_from_asked(mixture, Plan(parts, spec), Steps(2), 1)
    assert "where 75.00% is asked for: documents of most (mean 1 tokens) are long" in told


def test_weights_that_hold_late_are_told() -> None:
    schedule = Schedule(((0, (1, 1)), (4, (1, 3)), (90, (7, 1))), "step", ((0, 2),))
    plan = plan_of(
        PACKS["split"], stop="restart", num_epochs=None, weights=(1, 1), schedule=schedule
    )
    assert plan.window_at(2 * 4).after.first_row == 2 * 5
    assert plan.window_at(2 * 90).after.first_row in (2 * 90, 2 * 90 + 1), "not late"
    told = (
        "the weights of step 4 hold from step 5 on, where the window of documents before them ends"
    )
    for steps in (4, 5, 90, 91):
        assert shares.late_stages(plan, Steps(2), steps) == [told] * (steps > 4)
    begun = Steps(2, begin=Begin(4, 8))
    assert shares.late_stages(plan, begun, 91) == [], "a run that goes on there does not tell it"
    assert shares.late_stages(plan_of(PACKS["split"]), Steps(2), 9) == []
