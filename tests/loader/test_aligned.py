"""Aligned columns: what stands beside tokens stays beside them, from files to batches."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from easypipe import (
    DatasetConfig,
    LoadStageConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    TokenizerConfig,
)
from easypipe.core.errors import ConfigError, SourceError
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.transforms.columns.hold_out import HoldOutConfig
from laws import assert_aligned
from token_support import small_tokenizer

EOS, TOP = 9999, 3


def advantage(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.float32) * 0.25


def teacher(ids: np.ndarray) -> np.ndarray:
    return np.stack([ids, ids + 1, -ids], axis=-1).astype(np.int32)


def half(ids: np.ndarray) -> np.ndarray:
    return (ids % 2048).astype(np.float16)


COLUMNS = {"advantages": advantage, "teacher_ids": teacher, "half": half}


def rows(count: int = 60, first: int = 0, **columns: Any) -> pa.Table:
    """Documents of 1 to 40 tokens, each of which is another id."""
    sizes = np.random.default_rng(first).integers(1, 40, count)
    ids = [np.arange(a, b) + first for a, b in itertools.pairwise([0, *np.cumsum(sizes)])]
    table = {
        "input_ids": pa.array(ids, pa.list_(pa.int32())),
        "advantages": pa.array([advantage(one) for one in ids], pa.list_(pa.float32())),
        "teacher_ids": pa.array(
            [teacher(one).tolist() for one in ids], pa.list_(pa.list_(pa.int32(), TOP))
        ),
        "half": pa.array([half(one) for one in ids], pa.list_(pa.float16())),
    }
    return pa.table(table | columns)


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> str:
    return str(shared_data / "tokenizers" / "gpt2")


def dataset(data: Any, name: str = "one", **options: Any) -> DatasetConfig:
    options = {"aligned_columns": list(COLUMNS)} | options
    return DatasetConfig(data_files=data, name=name, **options)


def pipeline(
    tmp_path: Path, tokenizer: Any, *datasets: DatasetConfig, pack: Any = None, **options: Any
) -> Pipeline:
    config = PipelineConfig(
        datasets=list(datasets), default_tokenizer=tokenizer, cache_dir=tmp_path, seed=5, **options
    )
    made = Pipeline(config).source().tokenize()
    made = made.mix(MixStageConfig(stop_strategy="first_exhausted")) if len(datasets) > 1 else made
    return made if pack is None else made.pack(PackStageConfig(**pack))


PACKS = {
    "alone": None,
    "best fit": {"seq_length": 64, "strategy": "first_fit"},
    "split": {"seq_length": 16, "strategy": "greedy", "oversize": "split"},
    "truncate": {"seq_length": 16, "strategy": "greedy", "oversize": "truncate"},
    "concat": {"seq_length": 32, "strategy": "concat"},
    "joined": {"seq_length": 32, "strategy": "concat", "segments": "row"},
}


@pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streaming"])
@pytest.mark.parametrize("pack", PACKS)
def test_values_stand_where_their_tokens_do(
    tmp_path: Path, tokenizer: Any, pack: str, streaming: bool
) -> None:
    more = {"num_streams": 2} if streaming else {}
    one, two = dataset(rows()), dataset(rows(40, first=5000), "two")
    made = pipeline(tmp_path, tokenizer, one, two, pack=PACKS[pack], streaming=streaming, **more)
    options = LoadStageConfig(batch_size=2, drop_last=False, source_ids=True)
    loader = made.load(options).build()
    assert loader.source_names == ("one", "two")
    batches = list(loader)
    for batch in batches:
        ids, sources = batch["input_ids"], batch["source_ids"]
        ended = np.roll(ids, 1, axis=1) * (batch["position_ids"] > 0)  # what an EOS stands behind
        of_second = np.where(ids == 50256, ended, ids) >= 5000
        own = (batch["segment_ids"] > 0) & ((ids != 50256) | (ended > 0))
        np.testing.assert_array_equal(sources[own], of_second[own])
        assert sources.dtype == np.uint16
        assert not sources[batch["segment_ids"] == 0].any()
    assert assert_aligned(batches, COLUMNS, added=50256) > 1000
    assert {name: batches[0][name].dtype.name for name in COLUMNS} == {
        "advantages": "float32",
        "teacher_ids": "int32",
        "half": "float16",
    }


def test_every_list_of_a_packed_row_counts_into_its_bytes_once(
    tmp_path: Path, tokenizer: Any
) -> None:
    """Lists of the row's length with an offset of 8 bytes, beside them numbers of 4 bytes."""
    source = pipeline(tmp_path, tokenizer, dataset(rows()), pack=PACKS["concat"]).get_data()["one"]
    size = {"input_ids": 4, "segment_ids": 1, "position_ids": 1, "advantages": 4, "half": 2}
    size["teacher_ids"] = 4 * TOP
    assert {*size, "look_ahead"} == {*source.schema.names}
    assert source.bytes_per_row == sum(32 * each + 8 for each in size.values()) + 4


@pytest.mark.parametrize("format", ["parquet", "arrow", "jsonl"])
@pytest.mark.parametrize("packed", [True, False])
def test_saved_and_loaded(tmp_path: Path, tokenizer: Any, format: str, packed: bool) -> None:
    pack = PACKS["concat"] if packed else None
    made = pipeline(tmp_path / "cache", tokenizer, dataset(rows()), pack=pack)
    made.save(SaveStageConfig(output_dir=tmp_path / "saved", format=format)).build()
    some = HoldOutConfig(fraction=0.01)
    for options in ({}, {"hold_out": some}):
        again = dataset(tmp_path / "saved", aligned_columns=(), **options)
        loaded = pipeline(tmp_path / "other", tokenizer, again)
        loader = loaded.load(LoadStageConfig(batch_size=2)).build()
        batches = list(loader)
        assert assert_aligned(batches, COLUMNS, added=50256) > 500
        assert batches[0]["half"].dtype == np.float16


def test_a_mixture_of_documents_is_saved_with_their_values(tmp_path: Path, tokenizer: Any) -> None:
    both = [dataset(rows()), dataset(rows(20, 5000), name="two")]
    made = pipeline(tmp_path / "cache", tokenizer, *both)
    made.save(SaveStageConfig(output_dir=tmp_path / "saved")).build()
    again = dataset(tmp_path / "saved", aligned_columns=())
    batches = pipeline(tmp_path / "other", tokenizer, again).load(LoadStageConfig(batch_size=2))
    assert assert_aligned(list(batches.build()), COLUMNS, added=50256) > 500


def test_json_and_memory_and_left_padding(tmp_path: Path, tokenizer: Any) -> None:
    """Lists in lists without a fixed size get theirs by config."""
    plain = [{**row, "half": None} for row in rows(20).to_pylist()]
    left = TokenizerConfig(name_or_path=tokenizer, padding_side="left")
    named = {"advantages": None, "teacher_ids": TOP}
    made = pipeline(tmp_path, left, dataset(plain, aligned_columns=named))
    batches = list(made.load(LoadStageConfig(batch_size=4)).build())
    assert batches[0]["teacher_ids"].shape[2] == TOP
    wanted = {"advantages": advantage, "teacher_ids": teacher}
    assert assert_aligned(batches, wanted, added=50256) > 100


def test_ledger_says_of_how_many_tokens_there_are_values(tmp_path: Path, tokenizer: Any) -> None:
    made = pipeline(tmp_path, tokenizer, dataset(rows()), pack=PACKS["best fit"])
    made.prepare()
    ledger = made.ledger()
    entry = ledger.find("aligned", "one", "tokens of teacher_ids")
    assert entry.out["with"] == sum(map(len, rows()["input_ids"].to_pylist()))


def test_damage_is_found_before_a_value_is_given(tmp_path: Path, tokenizer: Any) -> None:
    from easypipe.core.errors import CacheError

    def make() -> Any:
        made = pipeline(tmp_path, tokenizer, dataset(rows(2000)), pack=PACKS["best fit"])
        return made.load(LoadStageConfig(batch_size=2)).build()

    list(make())
    file, *_ = (tmp_path / "tokens").rglob("*.arrow")
    data = bytearray(file.read_bytes())
    at = data.find(teacher(np.arange(30000, 30010)).tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CacheError, match="damaged"):
        list(make())


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"advantages": "short"}, SourceError, "dataset 'one', .*row 3.*2 values, and the row has"),
        ({"advantages": "null"}, SourceError, "row 3.*-1 values|row 3.*null"),
        ({"advantages": "text"}, SourceError, "holds large_list<item: large_string>"),
        ({"teacher_ids": "ragged"}, SourceError, "aligned_columns: {teacher_ids: 8}"),
        ({"name": "nope"}, ConfigError, "aligned_columns.*no column 'nope'"),
        ({"name": "position_ids"}, ConfigError, "tokenized rows have already"),
    ],
)
def test_refusals(
    tmp_path: Path, tokenizer: Any, change: dict[str, str], kind: Any, said: str
) -> None:
    table = rows(6)
    values = {name: table[name].to_pylist() for name in table.column_names}
    names = list(COLUMNS)
    types = {field.name: field.type for field in table.schema}
    if "name" in change:
        names = [change["name"]]
    elif change == {"advantages": "short"}:
        values["advantages"][3] = [0.5, 0.5]
    elif change == {"advantages": "null"}:
        values["advantages"][3] = None
    elif change == {"advantages": "text"}:
        values["advantages"] = [["x"]] * 6
        types["advantages"] = pa.list_(pa.string())
    else:
        types["teacher_ids"] = pa.list_(pa.list_(pa.int32()))
    table = pa.table({name: pa.array(values[name], types[name]) for name in values})
    pq.write_table(table, tmp_path / "a.parquet")

    def build() -> None:
        one = dataset(str(tmp_path / "a.parquet"), aligned_columns=names)
        pipeline(tmp_path / "c", tokenizer, one).load(LoadStageConfig(batch_size=2)).build()

    with pytest.raises(kind, match=f"(?s){said}"):
        build()


@pytest.mark.parametrize("named", [(), ("advantages",)])
def test_loss_weights_that_are_not_named_are_refused(
    tmp_path: Path, tokenizer: Any, named: tuple[str, ...]
) -> None:
    table = rows(6)
    ones = pa.array([[1.0] * len(ids) for ids in table["input_ids"].to_pylist()])
    table = table.append_column("loss_weights", ones)

    def build(**options: Any) -> Any:
        one = dataset(table, aligned_columns=named, **options)
        return pipeline(tmp_path, tokenizer, one).load(LoadStageConfig(batch_size=2)).build()

    said = "datasets.one.aligned_columns: does not name the column 'loss_weights', which weighs"
    with pytest.raises(ConfigError, match=said):
        build()
    batch = next(iter(build(format_fields={"loss_weights": "not_used"})))
    assert "loss_weights" not in batch


def test_datasets_differ(tmp_path: Path, tokenizer: Any) -> None:
    one, two = dataset(rows()), dataset(rows(first=900), "two", aligned_columns=["advantages"])
    with pytest.raises(ConfigError, match="dataset 'one' has 'teacher_ids', and dataset 'two' has"):
        pipeline(tmp_path, tokenizer, one, two, pack=PACKS["split"]).prepare()


@pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streaming"])
@pytest.mark.parametrize("pack", PACKS)
def test_loss_weights_are_told_of_labels(
    tmp_path: Path, tokenizer: Any, pack: str, streaming: bool
) -> None:
    """Where a label stands, the weight of its token; in rows of a stream too, whose last label is
    the first token of another row. A dataset without weights has weights of 1; an EOS that is added
    weighs what the token before it does.
    """

    def weight(ids: np.ndarray) -> np.ndarray:
        return np.where(ids < 5000, (ids % 7) * 0.25, 1)

    table = rows()
    ids = [np.asarray(one) for one in table["input_ids"].to_pylist()]
    weights = pa.array([weight(one) for one in ids], pa.list_(pa.float64()))
    one = dataset(table.append_column("loss_weights", weights), aligned_columns=["loss_weights"])
    two = dataset(rows(40, first=5000), "two", aligned_columns=())
    more = {"num_streams": 2} if streaming else {}
    made = pipeline(tmp_path, tokenizer, one, two, pack=PACKS[pack], streaming=streaming, **more)
    batches = list(made.copy().load(LoadStageConfig(batch_size=2, drop_last=False)).build())
    ends = {int(one[-1]) for one in ids}
    seen = 0
    for batch in batches:
        found, labels = batch["loss_weights"], batch["labels"]
        assert found.dtype == np.float32
        assert not found[labels == -100].any()
        here = (labels != -100) & (labels != 50256)
        np.testing.assert_array_equal(found[here], weight(labels[here]).astype(np.float32))
        # of an added EOS: its slot is that of the token before it, unless a row ends between them
        eos = (labels == 50256) & np.isin(batch["input_ids"], list(ends))
        np.testing.assert_array_equal(
            found[eos], weight(batch["input_ids"][eos]).astype(np.float32)
        )
        seen += int(here.sum())
    assert seen > 900
    if pack == "concat" and not streaming:
        made.save(SaveStageConfig(output_dir=tmp_path / "saved")).build()
        again = pipeline(tmp_path / "o", tokenizer, dataset(tmp_path / "saved", aligned_columns=()))
        loaded = list(again.load(LoadStageConfig(batch_size=2, drop_last=False)).build())
        by_row = lambda some: sorted(  # noqa: E731
            row.tobytes() + weights.tobytes()
            for one in some
            for row, weights in zip(one["input_ids"], one["loss_weights"], strict=True)
        )
        assert by_row(loaded) == by_row(batches)


def test_text_has_no_values_to_travel(tmp_path: Path) -> None:
    one = DatasetConfig(name="one", data_files={"text": ["a b"]}, aligned_columns=["scores"])
    config = PipelineConfig(datasets=[one], default_tokenizer="any", cache_dir=tmp_path)
    refused = r"^datasets\[0\]\.aligned_columns: has no effect on text"
    with pytest.raises(ConfigError, match=refused):
        Pipeline.from_config(config).source().tokenize().prepare()


def test_a_source_that_tokenizes_has_none(tmp_path: Path) -> None:
    rows = InMemoryShardedSource({"text": ["a b"]})
    made = TokenizedShardedSource(rows, small_tokenizer(), dataset="one", cache_dir=tmp_path)
    one = DatasetConfig(name="one", data_files=made, aligned_columns=["scores"])
    chain = Pipeline.from_config(PipelineConfig(datasets=[one], seed=1)).source().tokenize()
    with pytest.raises(ConfigError, match=r"^datasets\.one\.aligned_columns: has no effect"):
        chain.pack(PackStageConfig(seq_length=8)).prepare()


def test_sources_are_told_by_rows_that_are_changed_and_refused_of_those_that_do_not_know(
    tmp_path: Path, tokenizer: Any
) -> None:
    one, two = dataset(rows()), dataset(rows(40, first=5000), "two")
    made = pipeline(tmp_path, tokenizer, one, two, pack=PACKS["split"])
    loader = made.copy().load(LoadStageConfig(batch_size=4, source_ids=True)).build()
    changed = loader.map_rows(lambda columns, key: None, version="1")
    assert changed.source_names == ("one", "two")
    for a, b in zip(loader, changed, strict=True):
        np.testing.assert_array_equal(a["source_ids"], b["source_ids"])
    plain = made.copy().load(LoadStageConfig(batch_size=4)).build()
    assert plain.source_names == ()
    assert "source_ids" not in next(iter(plain))
    loader.restore(plain.state_at(3))  # a column more is no other data

    made.save(SaveStageConfig(output_dir=tmp_path / "saved")).build()
    saved = DatasetConfig(data_files=str(tmp_path / "saved"), name="saved")
    again = pipeline(tmp_path, tokenizer, saved).load(
        LoadStageConfig(batch_size=4, source_ids=True)
    )
    with pytest.raises(ConfigError, match=r"load\.source_ids: rows that were saved packed do not"):
        again.build()
    own = dataset(rows(source_ids=rows()["half"]), aligned_columns=["source_ids"])
    again = pipeline(tmp_path, tokenizer, own, pack=PACKS["split"])
    with pytest.raises(ConfigError, match=r"a dataset has a column 'source_ids' of its own"):
        again.load(LoadStageConfig(batch_size=4, source_ids=True)).build()
