"""Rows of any sources as one: the laws, the shares, the order, and every refusal with its cure."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import laws
from easypipe import (
    ConfigError,
    Map,
    MixedShardedSource,
    MixStageConfig,
    Pipeline,
    SaveStageConfig,
    block_mixture_interleave,
    load_saved,
)
from easypipe.core.protocols import ShardedSource
from easypipe.core.schema import INPUT_IDS, SOURCE
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.open import open_files
from pipelines import config, texts, tokenizer


def sources(folder: Path, a: int = 70, b: int = 45) -> dict[str, ShardedSource]:
    """`a` in three parquet files, `b` in memory."""
    (folder / "a").mkdir(exist_ok=True)
    rows = texts(a, 3)
    for i in range(3):
        pq.write_table(
            pa.table({"text": pa.array(rows[i::3], pa.string())}), folder / "a" / f"{i}.parquet"
        )
    return {
        "a": open_files(str(folder / "a" / "*.parquet"), index_dir=folder / "indexes"),
        "b": InMemoryShardedSource(
            pa.table({"text": pa.array(texts(b, 5), pa.string())}), name="b"
        ),
    }


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_any_cut_gives_the_same_rows(tmp_path: Path, stop: str, seed: int | None) -> None:
    made = block_mixture_interleave(
        sources(tmp_path), {"a": 0.7, "b": 0.3}, seed=seed, stop_strategy=stop
    )  # pyright: ignore[reportArgumentType]
    laws.assert_stateless_reads(made, cuts=(1, 5, 17, 63))
    rows = made.read(0, 0, made.shards[0].num_rows)
    share = np.cumsum([origin == "a" for origin in rows[SOURCE].to_pylist()])
    if stop == "first_exhausted":
        assert (np.abs(share - 0.7 * np.arange(1, rows.num_rows + 1)) <= 0.5 + 1e-9).all()
    else:
        expected = Counter([("a", t) for t in texts(70, 3)] + [("b", t) for t in texts(45, 5)])
        assert Counter((row[SOURCE], row["text"]) for row in rows.to_pylist()) == expected
    mine = [row["text"] for row in rows.to_pylist() if row[SOURCE] == "b"]
    assert (mine == texts(45, 5)[: len(mine)]) == (seed is None), (
        "a seed permutes, None keeps the order"
    )


def test_it_restarts_without_end(tmp_path: Path) -> None:
    made = block_mixture_interleave(sources(tmp_path), {"a": 1, "b": 1})
    assert made.shards[0].num_rows is None
    far = made.read(0, 10_000, 10_020)
    assert far[SOURCE].to_pylist() == ["a", "b"] * 10
    assert far["text"].to_pylist()[1] == texts(45, 5)[5_000 % 45]
    alone = block_mixture_interleave([[{"text": "a"}, {"text": "b"}]])
    assert alone.shards[0].num_rows == 2, "there is nothing beside it that it could wait for"


def test_a_block_holds_whole_shares_and_neighbours_stay_together(tmp_path: Path) -> None:
    made = block_mixture_interleave(sources(tmp_path), {"a": 2, "b": 1}, 10)
    origins = made.read(0, 0, 60)[SOURCE].to_pylist()
    assert [origins[i : i + 10].count("a") for i in range(0, 60, 10)] == [7] * 6
    blocks = block_mixture_interleave(
        {"b": sources(tmp_path)["b"]}, seed=1, block_rows=5, stop_strategy="all_exhausted"
    )
    places = [texts(45, 5).index(text) for text in blocks.read(0, 0, 45)["text"].to_pylist()]
    assert np.diff(np.array(places).reshape(9, 5), axis=1).tolist() == [[1] * 4] * 9
    assert places != sorted(places)


def test_lists_and_fingerprints(tmp_path: Path) -> None:
    parts = list(sources(tmp_path).values())
    made = block_mixture_interleave(parts, [3, 1], stop_strategy="all_exhausted")
    assert list(made.sources) == ["dataset1", "dataset2"]
    choices = (([3, 1], None), ([1, 1], None), ([3, 1], 0))
    others = [
        block_mixture_interleave(parts, weights, seed=seed, stop_strategy="all_exhausted")
        for weights, seed in choices
    ]
    assert made.fingerprint == others[0].fingerprint
    assert len({other.fingerprint for other in others}) == 3
    assert made.read(0, 5, 5).num_rows == 0


def test_refusals(tmp_path: Path) -> None:
    both = sources(tmp_path)
    other = InMemoryShardedSource(pa.table({"words": pa.array(["x"])}), name="c")
    for values, message in (
        (({},), r"datasets: there is nothing to mix"),
        (
            ({**both, "c": other},),
            r"datasets.c: has the columns words: large_string, and 'a' has text: large_string. "
            r"Select, rename",
        ),
        ((both, {"a": 1}), r"weights: no weight for dataset 'b'"),
        ((both, {"a": 1, "b": 1, "c": 1}), r"weights.c: no dataset named 'c'"),
        ((list(both.values()), [1]), r"weights: 1 weights for 2 datasets"),
        (
            (list(both.values()), {"a": 1, "b": 1}),
            r"weights: have names, and the datasets have none",
        ),
        (
            (both, {"a": 99, "b": 1}, 10),
            r"block_size: in a block of 10 documents 'b' has 0.1, which rounds to 0. Use blocks of at "
            r"least 100",
        ),
        ((both, None, 0), r"block_size: 0 is not a block of rows"),
        ((both, None, None, None, "never"), r"stop_strategy: 'never' is not an option"),
        (({"x": block_mixture_interleave(both)},), r"datasets: has a column '__source__' already"),
    ):
        with pytest.raises(ConfigError, match=message):
            block_mixture_interleave(*values)
    with pytest.raises(ConfigError, match=r"block_rows: has no effect without a seed"):
        block_mixture_interleave(both, block_rows=4)
    with pytest.raises(ConfigError, match=r"block_rows: 0 is not a block"):
        block_mixture_interleave(both, seed=1, block_rows=0)


def test_tokens_mix_without_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MixedShardedSource.of gives the rows that Pipeline.mix gives; and sources of token columns
    are adopted.
    """
    data = Pipeline(config(tmp_path)).source().tokenize()
    options = MixStageConfig(
        weights={"code": 0.7, "docs": 0.3}, stop_strategy="all_exhausted", max_epochs={"code": 1}
    )
    monkeypatch.setenv("EASYPIPE_CACHE", str(tmp_path / "other"))
    alone = MixedShardedSource.of(data.get_data(), options, seed=7)
    rows = alone.shards[0].num_rows
    assert alone.read(0, 0, rows).equals(data.mix(options).get_data()["mixed"].read(0, 0, rows))
    laws.assert_stateless_reads(alone, cuts=(1, 7))
    raw = {
        n: InMemoryShardedSource([{INPUT_IDS: [i] * 3} for i in range(20)], name=n)
        for n in ("x", "y")
    }
    made = MixedShardedSource.of(
        raw,
        MixStageConfig(stop_strategy="all_exhausted"),
        cache_dir=tmp_path,
        tokenizer=tokenizer(),
        shuffle=False,
    )
    assert [row[INPUT_IDS][0] for row in made.read(0, 0, 40).to_pylist()] == [
        i // 2 for i in range(40)
    ]


def test_what_sources_declare_is_true_of_their_rows_together(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_weights": [0.0, 1.0, 0.5]}] * 12
    saved = Pipeline(
        config(tmp_path, datasets=[{"data_files": rows, "aligned_columns": ["loss_weights"]}])
    )
    saved.source().pack().save(SaveStageConfig(output_dir=str(tmp_path / "saved"))).build()
    both = [load_saved(tmp_path / "saved")] * 2
    made = block_mixture_interleave(both, stop_strategy="all_exhausted")
    assert (made.info.tokens, made.info.aligned) == (both[0].info.tokens, ("loss_weights",))
    files = open_files(str(tmp_path / "saved" / "*.parquet"))
    made = block_mixture_interleave([both[0], files], stop_strategy="all_exhausted")
    assert (made.info.tokens, made.read(0, 0, 2).num_rows) == (None, 2)
    # rows of a function without a version are not kept
    lower = Map(lambda row: row)
    text = InMemoryShardedSource({"text": ["a"]})
    assert block_mixture_interleave([text, text]).info.cacheable
    assert not block_mixture_interleave([text, lower(text)]).info.cacheable


def test_it_takes_rows_of_any_kind_and_iterates(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "l0"}\n\n{"text": "l2"}\n{"text": 5}\n{"text": "l4"}\n'
    )
    datasets = {
        "list": [{"text": f"a{i}"} for i in range(5)],
        "table": pa.table({"text": pa.array([f"b{i}" for i in range(5)], pa.large_string())}),
        "columns": {"text": [f"c{i}" for i in range(5)]},
        "lines": open_files(tmp_path / "rows.jsonl", on_error="skip"),
    }
    mixed = block_mixture_interleave(datasets, stop_strategy="all_exhausted")
    rows = list(mixed)
    assert [row["text"] for row in rows if row[SOURCE] == "lines"] == ["l0", "l2", "l4"]
    assert [row["text"] for row in rows[:4]] == ["a0", "b0", "c0", "l0"]
    assert len(rows) == 18
    assert rows == list(mixed)
    laws.assert_stateless_reads(mixed, cuts=(1, 3, 7, 11))
    endless = iter(block_mixture_interleave([datasets["list"], datasets["columns"]], seed=1))
    assert len({(row[SOURCE], row["text"]) for row in itertools.islice(endless, 4000)}) == 10
    for wrong, message in (
        (["a", "b"], r"datasets.dataset1: 'a' is a path, not rows"),
        ([3, 4], r"datasets.dataset1: int holds no rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            block_mixture_interleave(wrong)


def test_it_takes_datasets_of_datasets() -> None:
    hf = pytest.importorskip("datasets")
    made = [hf.Dataset.from_list([{"text": f"{name}{i}"} for i in range(4)]) for name in "ab"]
    mixed = block_mixture_interleave(made, stop_strategy="all_exhausted")
    assert [row["text"] for row in mixed] == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
