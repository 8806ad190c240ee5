from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

import strategies
from easypipe.core.errors import ConfigError, SourceError, TokenizerError
from easypipe.core.protocols import PipelineContext, Source
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.stages.config import PipelineConfig
from easypipe.stages.source.config import DatasetConfig
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.stages.tokenize.stage import TokenizeStage
from easypipe.stages.tokenize.token_rows import ends_closed
from easypipe.transforms.tokenizer.config import TokenizerConfig
from laws import assert_stateless_reads
from strategies import examples
from token_support import (
    CountingTokenizer,
    ShardedTexts,
    small_tokenizer,
    small_tokenizer_folder,
    texts,
)

SMALL = str(small_tokenizer_folder())


@examples(25)
@given(tables=strategies.shards(), cuts=strategies.row_cuts())
def test_stateless_reads(
    tmp_path_factory: pytest.TempPathFactory, tables: list[pa.Table], cuts: list[int]
) -> None:
    shards = [[*table.column("text").to_pylist(), None, "", "last"] for table in tables]
    folder = tmp_path_factory.mktemp("cache")
    source = TokenizedShardedSource(
        ShardedTexts(*shards, cuts=4),
        small_tokenizer(),
        dataset="d",
        cache_dir=folder,
        on_error="skip",
        batch_size=3,
    )
    assert isinstance(source, Source)
    assert_stateless_reads(source, cuts)
    cache = source.materialize()
    assert_stateless_reads(cache, cuts)
    for shard, info in enumerate(source.shards):  # the cache is the source, read once
        assert cache.read(shard, 0, info.num_rows or 0).equals(
            source.read(shard, 0, info.num_rows or 0)
        )
    assert source.materialize() is cache


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    below = ShardedTexts(texts(30))
    source = TokenizedShardedSource(below, small_tokenizer(), dataset="d", cache_dir=tmp_path)
    assert (source.schema.names, len(source.shards), len(source.fingerprint)) == (
        ["input_ids", "has_eos", "__row_number__"],
        1,
        32,
    )
    assert below.reads == []
    assert not list(tmp_path.iterdir())


def test_a_bad_row_raises_in_read_and_is_told_by_scan(tmp_path: Path) -> None:
    source = TokenizedShardedSource(
        ShardedTexts(["a", None]), small_tokenizer(), dataset="d", cache_dir=tmp_path
    )
    assert source.read(0, 0, 1).num_rows == 1
    with pytest.raises(SourceError, match=r"shard-0, row 1, column 'text': null: no value"):
        source.read(0, 0, 2)
    assert [(reject.row, reject.reason) for reject in source.scan(0, 0, 2).rejects] == [(1, "null")]


# The stage


def run(
    tmp_path: Path,
    *,
    stage: TokenizeStageConfig | None = None,
    default: object = None,
    datasets: tuple = (),
    **data: object,
) -> dict:
    config = PipelineConfig(datasets=datasets, default_tokenizer=default)  # type: ignore[arg-type]
    context = PipelineContext(config=config, seed=0, cache_dir=tmp_path)
    sources = {
        name: ShardedTexts(texts(5)) if source is None else source for name, source in data.items()
    }
    return TokenizeStage(stage).process(sources, context)  # type: ignore[arg-type]


def dataset(name: str, **values: Any) -> DatasetConfig:
    return DatasetConfig(name=name, data_files="beside.jsonl", **values)


def test_a_dataset_s_own_tokenizer_comes_first_then_the_stage_s_then_the_pipeline_s(
    tmp_path: Path,
) -> None:
    own, stage, wide = (TokenizerConfig(name_or_path=SMALL, max_length=n) for n in (1, 2, 3))
    datasets = (dataset("a", tokenizer=own), dataset("b"))
    result = run(
        tmp_path,
        stage=TokenizeStageConfig(default_tokenizer=stage),
        default=wide,
        datasets=datasets,
        a=None,
        b=None,
    )
    assert [result[name].tokenizer.config.max_length for name in "ab"] == [1, 2]
    assert (
        run(tmp_path, default=wide, datasets=datasets, b=None)["b"].tokenizer.config.max_length == 3
    )
    both = run(tmp_path, default=SMALL, x=None, y=None)
    assert both["x"].tokenizer is both["y"].tokenizer  # loaded once


def test_max_length_of_the_stage_is_for_tokenizers_without_their_own(tmp_path: Path) -> None:
    stage = TokenizeStageConfig(max_length=4)
    assert run(tmp_path, stage=stage, default=SMALL, d=None)["d"].tokenizer.config.max_length == 4
    own = TokenizerConfig(name_or_path=SMALL, max_length=2)
    source = run(tmp_path, stage=stage, default=own, d=None)["d"]
    assert max(map(len, source.read(0, 0, 5).column("input_ids").to_pylist())) == 2


def test_batch_size_is_how_many_texts_go_at_a_time(tmp_path: Path) -> None:
    source = run(tmp_path, stage=TokenizeStageConfig(batch_size=2), default=SMALL, d=None)["d"]
    counter = CountingTokenizer(source.tokenizer)
    source.read(0, 0, 5)
    assert counter.calls == 3


def test_content_field_and_budget_come_from_the_dataset(tmp_path: Path) -> None:
    datasets = (dataset("d", content_field="body", on_error="skip", max_bad_rows=1),)
    source = run(
        tmp_path, default=SMALL, datasets=datasets, d=ShardedTexts(["a", None, "b"], column="body")
    )["d"]
    assert source.materialize().num_docs == 2
    with pytest.raises(
        SourceError, match=r"dataset 'd', column 'body': no such column \(have: text, n\)"
    ):
        run(tmp_path, default=SMALL, datasets=datasets, d=None)


def test_tokens_pass_through_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = InMemoryShardedSource({"input_ids": [[1, 2], [3]]})
    with caplog.at_level(logging.INFO, logger="easypipe"):
        assert run(tmp_path, d=tokens)["d"] is tokens
    assert "dataset d: holds input_ids already, tokenize() leaves it as it is" in caplog.text


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, datasets=(dataset("a", tokenizer=SMALL), dataset("b")), a=None, b=None)
    assert str(caught.value).startswith(
        "datasets[1].tokenizer: dataset 'b' has no tokenizer. Set it there, or set default_tokenizer"
    )
    with pytest.raises(TokenizerError, match="/nowhere/t: no such file or folder"):
        run(tmp_path, default="/nowhere/t", d=None)


@pytest.mark.parametrize("name", ["max_length", "batch_size", "num_workers"])
def test_options_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: 0 is too few\. Give at least 1"):
        TokenizeStageConfig(**{name: 0})


def test_the_end_of_one_document_closes_no_other() -> None:
    """EOS as the last token or the last but one of each: that of [5, 2] is not that of [7]."""
    ids, offsets = np.array([5, 2, 7, 2, 7, 2, 7, 7], np.uint16), np.array([0, 2, 3, 5, 8])
    assert ends_closed(ids, offsets, 2).tolist() == [1, 0, 1, 0]
