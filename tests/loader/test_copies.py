"""A copy of a loader, and the loaders of ranks, are those that the pipeline makes with such options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import laws
from easypipe import LoadStageConfig, Pipeline
from easypipe.core.errors import ConfigError, StateError
from easypipe.loader.loader import Loader
from easypipe.loader.state import LoaderState
from loader_support import MemoryCache, plan_rows, some_docs
from pipelines import config, texts

LENGTHS = np.random.Generator(np.random.PCG64(3)).integers(1, 60, 211)
SCHEDULE = {
    "stop_strategy": "all_exhausted",
    "weight_schedule": [
        {"step": 0, "weights": {"a": 1, "b": 0}},
        {"step": 5, "weights": {"a": 1, "b": 1}},
    ],
}
PACK = {"seq_length": 32}


def build(
    folder: Path,
    load: LoadStageConfig,
    *,
    pack: dict[str, Any] | None = PACK,
    mix: dict[str, Any] | None = None,
    streaming: bool = False,
) -> Loader:
    several = texts(160)
    rows = {"a": several[:80], "b": several[80:]}
    datasets = [
        {"name": name, "data_files": [{"text": one} for one in own]} for name, own in rows.items()
    ]
    chain = Pipeline(config(folder, datasets=datasets, streaming=streaming)).source().tokenize()
    chain = chain.mix(mix or {"stop_strategy": "all_exhausted"})
    return (chain if pack is None else chain.pack(pack)).load(load).build()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("given", "asked", "more"),
    [
        ({}, {"source_ids": True}, {}),
        ({"source_ids": True}, {}, {}),
        ({"source_ids": True}, {"source_ids": True, "batch_size": 2}, {"mix": SCHEDULE}),
        ({}, {"batch_size": 2}, {"mix": SCHEDULE}),
        ({}, {"batch_size": 2, "batch_size_schedule": [[3, 4]]}, {"mix": SCHEDULE}),
        ({}, {"batch_size": 2}, {"pack": {**PACK, "shuffle_buffer_factor": 4}}),
        ({}, {"shuffle_buffer_size": 7}, {"pack": {**PACK, "shuffle_buffer_factor": 4}}),
        ({}, {"drop_last": False}, {}),
    ],
)
def test_a_copy_is_what_the_pipeline_makes(
    tmp_path: Path,
    streaming: bool,
    given: dict[str, Any],
    asked: dict[str, Any],
    more: dict[str, Any],
) -> None:
    if streaming and "pack" in more:
        pytest.skip("refused in streaming")
    one, other = (LoadStageConfig(**({"batch_size": 4} | load)) for load in (given, asked))
    copy = build(tmp_path, one, streaming=streaming, **more).copy(other)
    made = build(tmp_path, other, streaming=streaming, **more)
    assert copy.state().to_json() == made.state().to_json()
    assert copy.source_names == made.source_names
    laws.assert_same_batches(copy, made)


def test_a_copy_keeps_what_was_done_to_the_rows(tmp_path: Path) -> None:
    def to_five(columns: dict[str, Any], key: int) -> None:
        columns["input_ids"][0] = 5

    four, two = (LoadStageConfig(batch_size=size, source_ids=size == 2) for size in (4, 2))
    changed = build(tmp_path, four, mix=SCHEDULE).map_rows(to_five, version="1").of_rank(1, 2)
    batch = next(iter(changed.copy(two)))
    expected = build(tmp_path, four, mix=SCHEDULE)  # 2 rows of each of 2 ranks
    assert (batch["input_ids"][:, 0] == 5).all()
    whole = next(iter(expected))
    np.testing.assert_array_equal(batch["input_ids"][:, 1:], whole["input_ids"][1::2, 1:])
    assert set(batch) - set(whole) == {"source_ids"}


@pytest.mark.parametrize(
    ("asked", "ranks", "streaming", "message"),
    [
        (
            {"shuffle_buffer_size": 64},
            1,
            True,
            r"load.shuffle_buffer_size: 64, but a copy keeps the None of the windows of a stream. "
            r"Give None, or set it in load\(\)",
        ),
        (
            {"drop_last": False},
            2,
            False,
            "load.drop_last: False, but a copy keeps the True of how rows were divided over ranks",
        ),
        ({"num_epochs": 2}, 1, False, "load.num_epochs: 2, but the rows are counted over 1"),
    ],
)
def test_what_a_copy_cannot_change_is_refused(
    tmp_path: Path, asked: dict[str, Any], ranks: int, streaming: bool, message: str
) -> None:
    loader = build(tmp_path, LoadStageConfig(batch_size=4), streaming=streaming)
    loader = loader if ranks == 1 else loader.of_rank(0, ranks)
    with pytest.raises(ConfigError, match=message):
        loader.copy(LoadStageConfig(**({"batch_size": 4} | asked)))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    ("pack", "options"),
    [
        (PACK, {"shuffle_buffer_size": 20}),
        ({**PACK, "shuffle_buffer_factor": 3}, {}),
        (None, {"group_by_length": 4}),
        (None, {"group_by_length": 3, "shuffle_buffer_size": 11}),
    ],
    ids=str,
)
def test_ranks_together_have_the_batches_of_one_loader(
    tmp_path: Path, pack: dict[str, Any] | None, options: dict[str, Any], drop_last: bool
) -> None:
    options = options | {"drop_last": drop_last}

    def tokens(*batches: Any) -> list[list[int]]:
        return sorted(
            row[there > 0].tolist()
            for batch in batches
            for row, there in zip(batch["input_ids"], batch["segment_ids"], strict=True)
        )

    six, two = (LoadStageConfig(batch_size=size, **options) for size in (6, 2))
    whole = list(build(tmp_path, six, pack=pack))
    loader = build(tmp_path, two, pack=pack)
    ranks = [list(loader.of_rank(rank, 3)) for rank in range(3)]
    full = len(whole) - (not drop_last)
    assert full > 5
    for n in range(full):
        assert tokens(whole[n]) == tokens(*(rank[n] for rank in ranks))
    assert tokens(*whole) == tokens(*(batch for rank in ranks for batch in rank))
    laws.assert_exact_resume(lambda: loader.of_rank(1, 3), len(ranks[1]), hops=[2, 3])
    shown = loader.of_rank(1, 3).explain(3)
    assert [row.row for row in shown.rows] == [0, 1]


def test_states_of_ranks_that_each_shuffled_their_own_rows_are_refused() -> None:
    rows = plan_rows([MemoryCache(some_docs(LENGTHS))])
    plain = Loader(rows, LoadStageConfig(batch_size=2)).of_rank(0, 2)
    assert "order_of_ranks" not in plain.state().config
    shuffled = Loader(rows, LoadStageConfig(batch_size=2, shuffle_buffer_size=8)).of_rank(0, 2)
    state = shuffled.state()
    # as they were saved before
    old = {name: value for name, value in state.config.items() if name != "order_of_ranks"}
    components = {**state.components, "config": "of old"}
    with pytest.raises(
        StateError, match=r"config changed .*order_of_ranks was None, is 'all rows'"
    ):
        shuffled.restore(LoaderState(batch=1, row=2, components=components, config=old))
