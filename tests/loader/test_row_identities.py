"""What decides rows or batches is in the identity that a loader's state keeps: every argument of
every kind of rows, and every option of their collation, is tried.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from easypipe.core.aligned import AlignedColumn
from easypipe.loader.collate import CollateConfig
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.rows.items import ForwardRows, ItemRows
from easypipe.loader.rows.planned import PlannedRows
from easypipe.loader.rows.ranks import PassRows, RankRows
from easypipe.loader.rows.rows import Rows
from easypipe.loader.rows.stored import Arrays, StoredRows
from loader_support import MemoryCache, plan_rows, some_docs

CACHES = [MemoryCache(some_docs([5, 9, 3, 12], seed=seed)) for seed in (1, 2)]
OTHER = MemoryCache(some_docs([5, 9, 3, 12], seed=3))
PLAIN = plan_rows(CACHES, strategy="stream")
IDS = np.arange(12).reshape(3, 4)


class Items(list[int]):
    fingerprint = "first"


class Others(list[int]):
    fingerprint = "first"


class Named:
    """A collator of this package."""

    def __init__(self, recipe: list[Any]) -> None:
        self.recipe = recipe

    def __call__(self, rows: list[Any]) -> dict[str, np.ndarray]:
        return {"rows": np.array(rows)}


def collate(rows: list[Any]) -> dict[str, np.ndarray]:
    return {"rows": np.array(rows)}


def other_print() -> Items:
    made = Items([1, 2, 3])
    made.fingerprint = "other"
    return made


def other_tokenizer() -> list[MemoryCache]:
    made = MemoryCache(some_docs([5, 9, 3, 12], seed=2))
    made.tokenizer_fingerprint = "others"
    return [CACHES[0], made]


class Change(NamedTuple):
    argument: str
    value: Any
    changed: str  # components of the identity, joined by blanks


BASES: dict[type, tuple[Callable[..., Rows], dict[str, Any], list[Change]]] = {
    ItemRows: (
        ItemRows,
        {"dataset": Items([1, 2, 3]), "collate": collate},
        [
            Change("dataset", Items([1, 2]), "sources"),
            Change("dataset", other_print(), "sources"),
            Change("dataset", Others([1, 2, 3]), "sources"),
            Change("dataset", Items([3, 2, 1]), ""),  # rows are not hashed
            Change("collate", Named([1]), "tokenizer"),
            Change("collate", Named([2]), "tokenizer"),
            Change("seed", 1, "plan"),
            Change("shuffle", True, "plan"),
            Change("num_epochs", 3, ""),
            Change("name", "other", "plan"),
        ],
    ),
    ForwardRows: (
        ForwardRows,
        {"dataset": Items([1, 2, 3]), "collate": collate},
        [
            Change("dataset", other_print(), "sources"),
            Change("dataset", Others([1, 2, 3]), "sources"),
            Change("dataset", Items([1, 2]), ""),  # they are not counted
            Change("collate", Named([1]), "tokenizer"),
            Change("seed", 1, "plan"),
            Change("name", "other", "plan"),
            Change("epoch", 1, "plan"),
        ],
    ),
    StoredRows: (
        StoredRows,
        {"rows": {"input_ids": IDS}},
        [
            Change("rows", {"input_ids": IDS + 1}, "sources"),
            Change("rows", {"input_ids": IDS, "segment_ids": IDS * 0 + 1}, "sources"),
            Change("rows", {"input_ids": IDS[:2]}, "sources"),
            Change("rows", {"input_ids": IDS.astype(np.int32)}, "sources"),
            Change("rows", {"input_ids": list(IDS)}, "sources plan"),
            Change("seq_length", 5, "plan"),
            Change("pad_token_id", 1, "tokenizer"),
            Change("num_epochs", None, ""),
            Change("tokenizer_fingerprint", "other", "tokenizer"),
            Change("cache_bytes", 1, ""),
            Change("aligned", [AlignedColumn(name="value", dtype="int8")], "plan"),
        ],
    ),
    PlannedRows: (
        PlannedRows,
        {"plan": PLAIN.plan, "caches": CACHES, "eos_token_id": 1, "pad_token_id": 0},
        [
            Change("plan", plan_rows(CACHES, strategy="stream", seed=9).plan, "plan"),
            Change("plan", plan_rows(CACHES, seq_length=16).plan, "plan"),
            Change("caches", [CACHES[0], OTHER], "sources"),
            Change("caches", CACHES[::-1], "sources"),
            Change("caches", other_tokenizer(), "tokenizer"),
            Change("eos_token_id", 2, "tokenizer"),
            Change("eos_token_id", None, "tokenizer"),
            Change("eos_token_id", (1, 1), ""),
            Change("eos_token_id", (1, 2), "tokenizer"),
            Change("pad_token_id", 3, "tokenizer"),
            Change("joined", True, "plan"),
            Change("train_continued", True, "plan"),
        ],
    ),
    RankRows: (
        RankRows,
        {"rows": PLAIN, "rank": 0, "world_size": 2, "even": True},
        [
            Change("rows", plan_rows([CACHES[0], OTHER], strategy="stream"), "sources plan"),
            Change("rank", 1, ""),
            Change("world_size", 3, "plan"),
            Change("even", False, "plan"),
        ],
    ),
    PassRows: (
        PassRows,
        {"endless": PLAIN, "epoch": 1, "num_epochs": 1, "rows_each": 8},
        [
            Change("endless", plan_rows([CACHES[0], OTHER], strategy="stream"), "sources plan"),
            Change("epoch", 2, "plan"),
            Change("num_epochs", 2, "plan"),
            Change("rows_each", 7, ""),
        ],
    ),
}
EVERY = [(kind, change) for kind, (_, _, changes) in BASES.items() for change in changes]


@pytest.mark.parametrize(
    ("kind", "change"), EVERY, ids=[f"{kind.__name__} {change.argument}" for kind, change in EVERY]
)
def test_an_argument_changes_what_it_decides(kind: type, change: Change) -> None:
    make, base, _ = BASES[kind]
    was, now = make(**base).identity, make(**{**base, change.argument: change.value}).identity
    assert set(was) == set(now) == {"sources", "tokenizer", "plan"}
    assert {name for name in was if was[name] != now[name]} == set(change.changed.split())
    assert make(**base).identity == was


@pytest.mark.parametrize("kind", BASES, ids=lambda kind: kind.__name__)
def test_every_argument_is_tried(kind: type) -> None:
    tried = {change.argument for change in BASES[kind][2]}
    assert set(inspect.signature(kind).parameters) <= tried


def test_joined_and_trained_on_are_two_things() -> None:
    make, base, _ = BASES[PlannedRows]
    each: list[Mapping[str, bool]] = [{}, {"joined": True}, {"train_continued": True}]
    each += [{"joined": True, "train_continued": True}]
    assert len({make(**base, **options).identity["plan"] for options in each}) == 4


def test_the_content_of_arrays_is_in_their_fingerprint() -> None:
    ragged = {"input_ids": [np.arange(3), np.arange(2)]}
    prints = [
        Arrays({"input_ids": IDS}).fingerprint,
        Arrays({"input_ids": IDS[::-1]}).fingerprint,
        Arrays({"input_ids": IDS.reshape(4, 3)}).fingerprint,
        Arrays({"input_ids": IDS, "labels": IDS}).fingerprint,
        Arrays({"input_ids": IDS, "loss_mask": IDS}).fingerprint,
        Arrays(ragged).fingerprint,
        Arrays({"input_ids": [np.arange(2), np.arange(3)]}).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert Arrays(ragged).fingerprint == Arrays(ragged).fingerprint


COLLATION: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"padding": "max_length", "max_length": 32}),
    ({"padding": "max_length", "max_length": 32}, {"max_length": 33}),
    ({}, {"padding_side": "left"}),
    ({}, {"pad_to_multiple_of": 8}),
    ({"pad_to_multiple_of": 8}, {"pad_to_multiple_of": 4}),
    ({}, {"length_buckets": (16, 64)}),
    ({"length_buckets": (16, 64)}, {"length_buckets": (32, 64)}),
    ({}, {"attention_mask": True}),
    ({}, {"segment_ids": False}),
]


@pytest.mark.parametrize(("base", "change"), COLLATION)
def test_collation_is_in_the_state(base: dict[str, Any], change: dict[str, Any]) -> None:
    def state(options: dict[str, Any]) -> tuple[Mapping[str, str], dict[str, Any]]:
        loader = Loader(
            plan_rows(CACHES, seq_length=None),
            LoadStageConfig(batch_size=2),
            collate=CollateConfig(**options),
        )
        return loader.state().components, dict(loader.state().config)

    (was, words), (now, other) = state(base), state(base | change)
    assert {name for name in was if was[name] != now[name]} == {"config"}
    differ = {name for name in {*words, *other} if words.get(name) != other.get(name)}
    assert differ == set(change)


def test_every_option_of_collation_is_tried() -> None:
    tried = {name for _, change in COLLATION for name in change}
    assert {field.name for field in dataclasses.fields(CollateConfig)} == tried


# With others the states that were saved before would be refused.
KEPT = {
    StoredRows: {"sources": "d6f5378a", "tokenizer": "513fbd34", "plan": "2d769763"},
    PlannedRows: {"sources": "9fc94083", "tokenizer": "f10933bd", "plan": "97cd5f3a"},
    RankRows: {"sources": "9fc94083", "tokenizer": "f10933bd", "plan": "3d6204ab"},
    PassRows: {"sources": "9fc94083", "tokenizer": "f10933bd", "plan": "41107b41"},
}


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.__name__)
def test_saved_states_name_the_rows_of_now(kind: type) -> None:
    make, base, _ = BASES[kind]
    assert {name: value[:8] for name, value in make(**base).identity.items()} == KEPT[kind]


@pytest.mark.parametrize("num_epochs", [3, None])
def test_the_pass_of_a_row(num_epochs: int | None) -> None:
    """Rows of padding, which are negative, count as the first."""
    several: list[Rows] = [
        ItemRows(Items([1, 2, 3]), collate, num_epochs=num_epochs),
        StoredRows({"input_ids": IDS}, num_epochs=num_epochs),
    ]
    for rows in several:
        numbers = np.array([-1, 0, 2, 3, 5, 8, -2])
        assert rows.open().epochs(numbers).tolist() == [0, 0, 0, 1, 1, 2, 0]
        assert rows.num_rows == (None if num_epochs is None else 9)
        there = [rows.open().available(a, b) for a, b in ((0, 9), (2, 11), (9, 11), (12, 15))]
        assert there == ([9, 9, 2, 3] if num_epochs is None else [9, 7, 0, 0])
    assert ForwardRows(Items([1, 2]), collate, epoch=4).epochs(np.arange(2)).tolist() == [4, 4]


@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_behind_the_last_row_of_a_rank_or_a_pass_there_is_none(
    num_epochs: int, world_size: int
) -> None:
    """Workers ask for batches that lie any way behind it."""
    plain = ItemRows(Items([1, 2, 3, 4, 5]), collate, num_epochs=num_epochs)
    endless = ItemRows(Items([1, 2, 3, 4, 5]), collate, num_epochs=None)
    several: list[Rows] = [PassRows(endless, 3, num_epochs, 5)]
    several += [
        RankRows(plain, rank, world_size, even=even)
        for rank in range(world_size)
        for even in (False, True)
    ]
    for rows in several:
        assert rows.num_rows is not None
        for start in range(20):
            for stop in range(start, 22):
                there = max(0, min(stop, rows.num_rows) - start)
                assert rows.open().available(start, stop) == there


def test_rows_that_come_forward_are_asked_for_once() -> None:
    """Who is at a row and goes on begins nothing again."""

    class Counted(Items):
        begun = 0

        def __iter__(self) -> Any:
            self.begun += 1
            return super().__iter__()

    data = Counted([*range(9)])
    rows = ForwardRows(data, collate)
    for start in range(0, 8, 2):
        assert rows.available(start, start + 2) == 2
        rows.batch(np.arange(start, start + 2), 0)
        rows.batch(np.arange(start, start + 2), 0)
    assert data.begun == 1
    rows.batch(np.arange(2), 0)
    assert data.begun == 2
