"""The examples of the Pipeline API document (shared/spec/002), in method-chained form, run in a
folder that has the files they name.

The tokenizer names of the document are folders here. Options of later issues are refused as unknown
keys; they are listed at the end.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from easypipe import (
    AsyncDataLoader,
    ConfigError,
    DatasetConfig,
    LoadStageConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    TokenizerConfig,
    TokenizeStageConfig,
    WeightSchedulePoint,
    create_pipeline,
    tokenize_and_save,
    train_bpe,
)
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedDataSource
from easypipe.sources.formats.jsonlines import JsonShardedSource
from easypipe.sources.formats.parquet import ParquetShardedSource
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from pipelines import jsonl, texts

TOKENIZERS = {
    "meta-llama/Llama-2-7b": 300,
    "meta-llama/Llama-2-7b-chat-hf": 300,
    "bigcode/starcoder": 310,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """data/*.parquet, raw_data/ and conversations/ as JSONL, bucket/ for what the document has on
    gs://, tokenizers with `</s>` as id 2.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EASYPIPE_CACHE", str(tmp_path / "cache"))
    for place, salt in (("data", 1), ("bucket/code", 3), ("bucket/text", 5), ("bucket/math", 7)):
        Path(place).mkdir(parents=True)
        for i in range(2):
            pq.write_table(pa.table({"text": texts(400, salt + i)}), f"{place}/part-{i}.parquet")
    for place in ("raw_data", "conversations", "more_data"):
        jsonl(tmp_path / place / "a.jsonl", [{"text": text} for text in texts(300, 11)])
    for name, size in TOKENIZERS.items():
        train_bpe(texts(100), size, ["<s>", "</s>"], name)
        options = Path(name) / "tokenizer_config.json"
        options.write_text(
            json.dumps(json.loads(options.read_text()) | {"bos_token": "<s>", "eos_token": "</s>"})
        )
    return tmp_path


def train_step(batch: dict[str, np.ndarray]) -> None:
    assert batch["input_ids"].shape == batch["labels"].shape == batch["segment_ids"].shape


def test_overview() -> None:
    config = PipelineConfig(
        datasets=[DatasetConfig(data_files="data/*.parquet")],
        default_tokenizer="meta-llama/Llama-2-7b",
    )
    pipeline = Pipeline.from_config(config)
    result = pipeline.source().tokenize().mix().pack().load().build()
    assert isinstance(result, AsyncDataLoader)
    steps = 0
    for batch in result:
        train_step(batch)
        steps += 1
    assert steps == len(result) > 0


def test_the_main_configuration() -> None:
    config = PipelineConfig(
        datasets=[
            DatasetConfig(
                name="ds1", data_files="data/*.parquet", tokenizer="meta-llama/Llama-2-7b"
            ),
            DatasetConfig(name="ds2", data_files="raw_data/*.jsonl"),
        ],
        default_tokenizer="meta-llama/Llama-2-7b",
        seed=42,
        tokenize=TokenizeStageConfig(max_length=2048),
        mix=MixStageConfig(weights={"ds1": 0.5, "ds2": 0.5}, stop_strategy="first_exhausted"),
        pack=PackStageConfig(enabled=True, seq_length=2048),
        load=LoadStageConfig(batch_size=8),
        save=SaveStageConfig(enabled=True, output_dir="./output"),
    )
    assert config.validate() == []
    loader = (
        Pipeline.from_config(config)
        .source()
        .tokenize()
        .mix()
        .pack()
        .save()
        .load(LoadStageConfig(batch_size=1))
        .build()
    )
    for batch in loader:
        train_step(batch)
    assert list(Path("output").glob("*.parquet"))


def my_transform_fn(row: dict[str, object]) -> dict[str, object]:
    return {"text": str(row["text"]).upper(), "metadata": len(str(row["text"]))}


def test_dataset_options() -> None:
    for i in range(2):
        pq.write_table(
            pa.table({"old_name": texts(400, i), "metadata": range(400)}), f"data/part-{i}.parquet"
        )
    config = DatasetConfig(
        data_files="data/*.parquet",
        name="my_dataset",
        type="parquet",
        split="train",
        num_rows=10,
        tokenizer=TokenizerConfig(name_or_path="meta-llama/Llama-2-7b", max_length=64),
        tokenizer_kwargs={"use_fast": True},
        cache_path="./cache/my_dataset",
        cache_enabled=True,
        save_path="./output/my_dataset",
        save_format="parquet",
        content_field="text",
        additional_fields=["metadata"],
        format_callback=my_transform_fn,
        format_version="1",  # easypipe's own: without it the callback's tokens are not kept
        format_fields={"old_name": "text"},
    )
    report = (
        Pipeline.from_config(PipelineConfig(datasets=[config])).source().tokenize().save().build()
    )
    assert report.num_rows == 10
    saved = pa.concat_tables(
        pq.read_table(path) for path in sorted(Path("output/my_dataset").glob("*.parquet"))
    )
    assert saved.column_names == ["input_ids", "metadata"]
    assert saved.column("metadata").to_pylist() == [len(text) for text in texts(10, 0)]
    assert list(Path("cache/my_dataset/manifests").glob("*.json"))
    assert (
        report.folders[0].path == "output/my_dataset"
        or report.folders[0].path == "./output/my_dataset"
    )


def test_source_stage() -> None:
    config = PipelineConfig(
        datasets=[
            DatasetConfig(data_files="data/*.parquet"),
            DatasetConfig(data_files="raw_data/*.jsonl"),
        ]
    )
    pipeline = Pipeline.from_config(config)
    pipeline.source()
    sources = pipeline.get_data()
    assert isinstance(sources["dataset1"], ParquetShardedSource)
    assert isinstance(sources["dataset2"], JsonShardedSource)


def test_stage_details() -> None:
    config = PipelineConfig(
        datasets=[
            DatasetConfig(name="code", data_files="bucket/code/*.parquet"),
            DatasetConfig(name="text", data_files="bucket/text/*.parquet"),
        ],
        seed=42,
    )
    pipeline = Pipeline.from_config(config).source()
    config = TokenizeStageConfig(
        default_tokenizer="meta-llama/Llama-2-7b",
        max_length=2048,
        batch_size=1000,
        num_workers=4,
        cache_tokenized=True,
        remove_columns=["text"],
    )
    pipeline.tokenize(config)
    config = MixStageConfig(
        weights={"code": 0.3, "text": 0.7}, block_size=1000, stop_strategy="restart", seed=42
    )
    pipeline.mix(config)
    config = PackStageConfig(
        enabled=True,
        seq_length=2048,
        eos_token_id=2,
        pad_token_id=0,
        strategy="greedy",
        num_packers=4,
        include_segment_ids=True,
        shuffle_packed=True,
        shuffle_buffer_factor=10,
    )
    pipeline.pack(config)
    config = LoadStageConfig(
        batch_size=8,
        prefetch_enabled=True,
        prefetch_workers=2,
        prefetch_buffer_size=4,
        shuffle_buffer_size=10000,
        drop_last=True,
        prefetch_to_device=False,
    )
    pipeline.load(config)
    for batch in itertools.islice(pipeline.build(), 2):
        assert batch["input_ids"].shape == (8, 2048)
        train_step(batch)


def test_save_stage() -> None:
    config = PipelineConfig(
        datasets=[DatasetConfig(data_files="data/*.parquet", tokenizer="meta-llama/Llama-2-7b")]
    )
    pipeline = Pipeline.from_config(config).source().tokenize()
    config = SaveStageConfig(
        enabled=True,
        output_dir="./processed_data",
        format="parquet",
        num_shards=10,
        compression="zstd",
        max_shard_size="500MB",
        overwrite=False,
        push_to_hub=False,
        hub_repo_id="username/dataset",
        hub_private=True,
        hub_token="hf_xxx",
    )
    report = pipeline.save(config).build()
    assert report.folders[0].num_shards == len(list(Path("processed_data").glob("*.parquet"))) == 10


def test_sft_training_pipeline() -> None:
    config = PipelineConfig(
        datasets=[
            DatasetConfig(
                data_files="conversations/*.jsonl",
                tokenizer="meta-llama/Llama-2-7b-chat-hf",
                content_field="text",
            )
        ],
        pack=PackStageConfig(enabled=True, seq_length=2048, eos_token_id=2),
        load=LoadStageConfig(batch_size=2, shuffle_buffer_size=10000),
    )
    pipeline = Pipeline.from_config(config)
    steps = 0
    for batch in pipeline.source().tokenize().pack().load().build():
        train_step(batch)
        assert 2 in batch["input_ids"]
        steps += 1
    assert steps


def test_multi_dataset_pretraining() -> None:
    """As the document prints it, it mixes two tokenizers, which is refused; with one it runs."""

    def config(tokenizer: str) -> PipelineConfig:
        return PipelineConfig(
            datasets=[
                DatasetConfig(name="code", data_files="bucket/code/*.parquet", tokenizer=tokenizer),
                DatasetConfig(
                    name="text",
                    data_files="bucket/text/*.parquet",
                    tokenizer="meta-llama/Llama-2-7b",
                ),
                DatasetConfig(
                    name="math",
                    data_files="bucket/math/*.parquet",
                    tokenizer="meta-llama/Llama-2-7b",
                ),
            ],
            mix=MixStageConfig(weights={"code": 0.4, "text": 0.5, "math": 0.1}, block_size=2000),
            pack=PackStageConfig(enabled=True, seq_length=4096, strategy="pool"),
            load=LoadStageConfig(batch_size=32),
        )

    with pytest.raises(
        ConfigError,
        match=r"'code' and 'text' have different tokenizers, 'bigcode/starcoder' and "
        r"'meta-llama/Llama-2-7b'",
    ):
        Pipeline.from_config(config("bigcode/starcoder")).source().tokenize().mix()
    pipeline = Pipeline.from_config(config("meta-llama/Llama-2-7b"))
    for batch in itertools.islice(pipeline.source().tokenize().mix().pack().load().build(), 2):
        train_step(batch)


def test_pre_tokenization_pipeline() -> None:
    config = PipelineConfig(
        datasets=[
            DatasetConfig(
                data_files="raw_data/*.jsonl",
                tokenizer="meta-llama/Llama-2-7b",
                save_path="./tokenized_data",
            )
        ],
        tokenize=TokenizeStageConfig(max_length=2048),
        save=SaveStageConfig(enabled=True, format="parquet", compression="zstd"),
    )
    Pipeline.from_config(config).source().tokenize().save().build()
    assert (
        sum(pq.read_metadata(path).num_rows for path in Path("tokenized_data").glob("*.parquet"))
        == 300
    )


def test_accessing_pipeline_state() -> None:
    config = PipelineConfig(
        datasets=[DatasetConfig(data_files="data/*.parquet", tokenizer="meta-llama/Llama-2-7b")],
        seed=3,
    )
    pipeline = Pipeline.from_config(config)
    pipeline.source().tokenize()
    data = pipeline.get_data()
    assert isinstance(data["dataset1"], TokenizedShardedSource)
    context = pipeline.get_context()
    assert context.seed == 3
    assert context.config.datasets[0].data_files == "data/*.parquet"
    assert pipeline.get_stages() == ["source", "tokenize"]


def test_error_handling() -> None:
    config = PipelineConfig(datasets=[DatasetConfig(data_files="data/*.parquet")])
    pipeline = Pipeline.from_config(config)
    errors = config.validate()
    assert errors == []
    with pytest.raises(RuntimeError, match=r"^Call source\(\) before other pipeline stages$"):
        pipeline.tokenize()


def test_custom_stages() -> None:
    class MyTransformedSource:
        def __init__(self, source: ShardedDataSource, config: dict) -> None:
            self._source, self._config = source, config
            self.schema, self.shards, self.fingerprint = (
                source.schema,
                source.shards,
                source.fingerprint + "-mine",
            )

        def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
            return self._source.read(shard, start, stop)

    class MyCustomStage(BaseStage):
        def __init__(self, config):
            super().__init__(config)
            self._config = config

        @property
        def name(self) -> str:
            return "my_stage"

        def process(
            self, data: dict[str, ShardedDataSource], context: PipelineContext
        ) -> dict[str, ShardedDataSource]:
            result = {}
            for name, source in data.items():
                result[name] = MyTransformedSource(source, self._config)
            return result

    config = PipelineConfig(
        datasets=[DatasetConfig(data_files="data/*.parquet")],
        default_tokenizer="meta-llama/Llama-2-7b",
        seed=1,
    )
    pipeline = (
        Pipeline.from_config(config)
        .source()
        .add_stage(MyCustomStage({"any": "thing"}))
        .tokenize()
        .pack()
        .load()
    )
    assert pipeline.get_stages() == ["source", "my_stage", "tokenize", "pack", "load"]
    train_step(next(iter(pipeline.copy().build())))


def test_create_pipeline() -> None:
    pipeline = create_pipeline(
        datasets=[
            DatasetConfig(data_files="data/*.parquet"),
            {"data_files": "more_data/*.jsonl"},
        ],
        default_tokenizer="meta-llama/Llama-2-7b",
    )
    assert sorted(pipeline.source().tokenize().get_data()) == ["dataset1", "dataset2"]


def test_tokenize_and_save() -> None:
    tokenize_and_save(
        data_files="raw_data/*.jsonl",
        tokenizer="meta-llama/Llama-2-7b",
        output_path="./tokenized",
        output_format="parquet",
        max_length=2048,
    )
    assert list(Path("tokenized").glob("*.parquet"))


def test_f7_mix_stage_with_a_schedule() -> None:
    config = MixStageConfig(
        weights={"code": 0.3, "text": 0.7},
        weight_schedule=[
            WeightSchedulePoint(step=0, weights={"code": 0.2, "text": 0.8}),
            WeightSchedulePoint(step=10000, weights={"code": 0.5, "text": 0.5}),
        ],
        weight_schedule_type="linear",
        block_size=1000,
        stop_strategy="restart",
        seed=42,
    )
    pipeline = create_pipeline(
        [
            DatasetConfig(name="code", data_files="bucket/code/*.parquet"),
            DatasetConfig(name="text", data_files="bucket/text/*.parquet"),
        ],
        "meta-llama/Llama-2-7b",
        seed=42,
    )
    pipeline.source().tokenize()
    pipeline.mix(config)
    batch = next(
        iter(
            pipeline.pack(PackStageConfig(seq_length=128))
            .load(LoadStageConfig(batch_size=8))
            .build()
        )
    )
    assert batch["input_ids"].shape == (8, 128)
