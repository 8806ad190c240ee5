"""Beyond 2^32: documents, tokens and rows of plans that no machine holds, found by arithmetic."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from easypipe.core.random import child, fold, permute
from easypipe.plan.mix_schedule import Schedule
from easypipe.plan.pack import PackSpec
from easypipe.plan.spec import PlanDataset, PlanSpec
from easypipe.plan.windows import Plan, WindowState

DOCS = (1 << 40) + 12_345
FAR_ROW = (1 << 45) + 7


def dataset(name: str, num_docs: int = DOCS) -> PlanDataset:
    return PlanDataset(
        name, num_docs, num_docs * 1000, name, lambda docs: (docs % 1999 + 1).astype(np.int32)
    )


def far(plan: Plan, drawn: tuple[int, ...]) -> WindowState:
    return dataclasses.replace(plan.state_at(0), index=1 << 34, first_row=FAR_ROW, drawn=drawn)


def test_documents_beyond_32_bits_are_the_ones_that_arithmetic_names() -> None:
    spec = PlanSpec(
        seed=3, weights=(1,), stop="restart", num_epochs=None, window_docs=4096, pack=None
    )
    plan = Plan([dataset("a")], spec)
    first = (1 << 39) + 11
    plan.resume(far(plan, (first,)))
    found = plan.pieces(np.arange(FAR_ROW, FAR_ROW + 10_000))
    expected = permute(np.arange(first, first + 10_000), DOCS, child(fold(3, "order", "a"), 0))
    assert found.doc.tolist() == expected.tolist()
    assert expected.max() > 1 << 39
    assert found.length.tolist() == (expected % 1999 + 1).tolist()


@pytest.mark.parametrize("unit", ["rows", "tokens"])
@pytest.mark.parametrize("strategy", ["greedy", "pool", "first_fit", "stream"])
def test_windows_far_out_conserve_their_tokens(strategy: str, unit: str) -> None:
    """Rows past 2^45 at steps past 2^39, on a weight ramp, hold every token of the documents that
    were drawn for them.
    """
    ramp = Schedule(((0, (1, 3)), (1 << 44, (3, 1))), "cosine", ((0, 64),))
    pack = PackSpec(2048, strategy)  # pyright: ignore[reportArgumentType]
    spec = PlanSpec(
        seed=1,
        weights=(1, 1),
        stop="restart",
        num_epochs=None,
        window_docs=3000,
        pack=pack,
        schedule=ramp,
        unit=unit,  # pyright: ignore[reportArgumentType]
    )
    plan = Plan([dataset("a"), dataset("b", DOCS - 99)], spec)
    # dataset a begins again within the window, b in its third pass
    state = far(plan, (DOCS - 500, (1 << 41) + 3))
    plan.resume(state)
    row, seen = FAR_ROW, 0
    for _ in range(3):
        window = plan.window_at(row)
        pieces = plan.pieces(np.arange(row, window.after.first_row))
        assert int(pieces.length.sum()) == int(window.layout.length.sum(dtype=np.int64))
        assert pieces.doc.min() >= 0
        assert pieces.doc.max() < DOCS
        seen += window.after.first_row - row
        row = window.after.first_row
    assert seen > 1000
    assert sum(plan.state_at(row).drawn) - sum(state.drawn) > 2000


def test_more_tokens_than_32_bits_count_are_counted() -> None:
    """4.4 G tokens in 40,000 documents: the books add up in 64 bits."""
    long = PlanDataset(
        "long", 40_000, 40_000 * 110_000, "long", lambda docs: np.full(docs.size, 110_000, np.int32)
    )
    spec = PlanSpec(
        seed=1,
        weights=(1,),
        stop="all_exhausted",
        num_epochs=1,
        window_docs=5000,
        pack=PackSpec(1 << 16),
    )
    stats = Plan([long], spec).stats()
    part = stats.datasets["long"]
    assert part.tokens_placed == part.tokens_drawn == 40_000 * 110_000 > 1 << 32
    assert stats.slots == stats.rows * (1 << 16) == part.tokens_placed + stats.padding
