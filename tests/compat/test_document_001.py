"""Document 001 (shared/spec/001): wrappers, collators and the builder; its examples, with
easypipe's arrays in place of tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe import (
    DataLoaderBuilder,
    DatasetConfig,
    LoadStageConfig,
    OrderConfig,
    Pipeline,
    PipelineConfig,
    PreprocessedDataset,
    PromptConfig,
    PromptEngine,
    StreamingPreprocessedDataset,
    TokenizerConfig,
    create_causal_lm_collate,
    create_collate_fn,
    create_preprocessed_dataset,
)
from easypipe.core.errors import ConfigError, SourceError
from laws import assert_exact_resume, assert_one_way, assert_same_batches
from pipelines import texts, tokenizer
from strategies import examples

PROMPT = PromptConfig(format_type="prompt_completion")
ROWS = [{"prompt": text, "completion": f" {text[::-1]}"} for text in texts(41)]


class Counting(PromptEngine):
    """The engine, which counts what it encodes."""

    encoded = 0

    def encode(self, row: Any) -> dict[str, Any]:
        self.encoded += 1
        return super().encode(row)


class Stream:
    fingerprint: str | None = None

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.fixture(scope="module")
def engine() -> PromptEngine:
    return PromptEngine(tokenizer(), PROMPT, max_length=400)


class Reusing:
    """An engine that writes every row into one array."""

    row = np.zeros(2, np.int64)

    def encode(self, row: Any) -> dict[str, Any]:
        self.row[:] = row
        return {"input_ids": self.row}


@pytest.mark.parametrize("cached", [True, False])
def test_who_writes_into_a_row_changes_no_later_read(engine: PromptEngine, cached: bool):
    own = PreprocessedDataset([[5, 6], [7, 8]], Reusing(), cached)  # pyright: ignore[reportArgumentType]
    for dataset in (PreprocessedDataset(ROWS, engine, cached), own):
        wanted = dataset[0]["input_ids"].tolist()
        for each in (dataset, dataset.select([0, 1])):
            for _ in range(2):
                row, _ = each[0], each[1]
                assert row["input_ids"].tolist() == wanted
                row["input_ids"][:] = 0


@pytest.mark.parametrize("index", [slice(0, 2), "input_ids", [0, 1], 1.0])
def test_what_is_no_number_of_a_row_is_refused(engine: PromptEngine, index: Any):
    dataset = PreprocessedDataset(ROWS, engine)
    with pytest.raises(ConfigError, match=r"is not the number of a row\. For several rows take"):
        dataset[index]
    assert dataset[np.int64(-1)]["input_ids"].tolist() == dataset[40]["input_ids"].tolist()
    for read in (dataset.__getitem__, lambda i: dataset.select([i])):
        with pytest.raises(IndexError, match="row -42 of 41"):
            read(-42)
    with pytest.raises(ConfigError, match=r"True.* is not the number of a row"):
        dataset.select(np.array([True] * 41))
    assert dataset.select([-1])[0]["input_ids"].tolist() == dataset[40]["input_ids"].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_size": 2.5}, "buffer_size: 2.5 rows"),
        ({"buffer_size": "a"}, "buffer_size: 'a' rows"),
        ({"seed": 1.5}, "seed: 1.5 is no whole number. Give 0 or another."),
        ({"rank": 0.5, "world_size": 3}, "rank: there is no rank 0.5 of 3. Give whole numbers."),
    ],
)
def test_options_of_a_stream_that_are_no_numbers_are_refused(
    engine: PromptEngine, options: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        StreamingPreprocessedDataset(ROWS, engine, **options)


def test_a_stream_of_one_rank_is_not_read_by_another(engine: PromptEngine):
    def first(**ranks: int) -> list[int]:
        loader = DataLoaderBuilder().with_dataset(
            StreamingPreprocessedDataset(ROWS, engine, rank=1, world_size=2)
        )
        batch = next(iter(loader.with_options(batch_size=1, **ranks).build()))
        return batch["input_ids"][0].tolist()

    wanted = PreprocessedDataset(ROWS, engine)[1]["input_ids"].tolist()
    assert first() == first(rank=1, world_size=2) == wanted
    message = "rank: 0 of 2, but StreamingPreprocessedDataset is that of rank 1 of 2. Give rank and"
    with pytest.raises(ConfigError, match=message):
        first(rank=0, world_size=2)
    with pytest.raises(ConfigError, match="world_size to one of the two"):
        first(rank=1, world_size=3)


def spelling(rows: Any = ROWS, shuffle: bool = False, seed: int = 0, **load: Any) -> Any:
    dataset = DatasetConfig(
        name="dataset1",
        data_files=rows,
        prompt=PROMPT,
        tokenizer=TokenizerConfig(
            name_or_path=tokenizer(), max_length=400, return_attention_mask=True
        ),
    )
    pipeline = (
        Pipeline(PipelineConfig(datasets=(dataset,), seed=seed, order=OrderConfig(shuffle=shuffle)))
        .source()
        .tokenize()
    )
    return pipeline.load(LoadStageConfig(batch_size=4, **{"drop_last": shuffle, **load})).build()


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert sorted(one) == sorted(other)
    assert all((one[name] == other[name]).all() for name in one)


def test_f26_the_map_style_example(engine: PromptEngine) -> None:
    from datasets import Dataset

    raw_ds = Dataset.from_list(ROWS)
    dataset = PreprocessedDataset(hf_dataset=raw_ds, prompt_engine=engine, cache_enabled=True)
    assert len(dataset) == len(ROWS)
    same(dataset[7], engine.encode(ROWS[7]))
    same(dataset[-1], engine.encode(ROWS[-1]))
    with pytest.raises(IndexError, match="row 41 of 41"):
        dataset[41]
    chosen = dataset.select([5, 7, 5])
    assert [row["input_ids"].tolist() for row in chosen] == [
        dataset[i]["input_ids"].tolist() for i in (5, 7, 5)
    ]
    assert_one_way(
        DataLoaderBuilder().with_dataset(chosen).with_batch_size(4).build(),
        spelling(raw_ds.select([5, 7, 5])),
        what="a selection",
    )


def test_nulls_that_datasets_fills_in_are_left_out_as_in_a_pipeline() -> None:
    from datasets import Dataset

    talks = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "about": about}]
        for about in ({"x": "one"}, {"y": "two"})
    ]
    rows = Dataset.from_list([{"messages": talk} for talk in talks])
    assert rows[0]["messages"][1]["about"] == {"x": "one", "y": None}
    template = "{% for m in messages %}{{ m.content }}{{ (m.about or {}) | tojson }}{% endfor %}"
    options = PromptConfig(template=template, train_on="all")
    own = PromptEngine(tokenizer(), options)
    config = DatasetConfig(name="d", data_files=rows, prompt=options, tokenizer=tokenizer())
    stored = Pipeline(PipelineConfig(datasets=(config,), seed=0)).source().tokenize().get_data()
    expected = stored["d"].read(0, 0, 2).column("input_ids").to_pylist()
    for streaming in (False, True):
        made = create_preprocessed_dataset(rows, own, streaming=streaming)
        assert [one["input_ids"].tolist() for one in made] == expected
    assert '{"x": "one"}' in own.tokenizer.decode(expected[0])


def test_encoded_rows_are_kept_where_asked() -> None:
    for cache_enabled, encoded in ((True, 3), (False, 6)):
        counting = Counting(tokenizer(), PROMPT)
        dataset = PreprocessedDataset(ROWS, counting, cache_enabled=cache_enabled)
        for i in (0, 1, 0, 1):
            assert dataset[i]["input_ids"].size
        chosen = dataset.select([1, 2])
        made = [chosen[i]["input_ids"].tolist() for i in (0, 1)]
        assert counting.encoded == encoded
        assert made == [dataset[i]["input_ids"].tolist() for i in (1, 2)]


def test_the_rows_of_a_stream_are_told_the_pass(engine: PromptEngine) -> None:
    class Passes:
        epoch = 0

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(ROWS[self.epoch :])

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    stream = StreamingPreprocessedDataset(Passes(), engine)
    stream.set_epoch(2)
    assert len(list(stream)) == len(ROWS) - 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_law_9_a_preprocessed_dataset_is_a_pipeline(engine: PromptEngine, shuffle: bool) -> None:
    built = (
        DataLoaderBuilder()
        .with_dataset(PreprocessedDataset(ROWS, engine))
        .with_batch_size(4)
        .with_options(shuffle=shuffle, seed=6)
    )
    assert_one_way(built.build(), spelling(shuffle=shuffle, seed=6), what="PreprocessedDataset")


@pytest.mark.parametrize("shuffle", [True, False])
def test_law_9_so_is_the_causal_collator_over_its_rows(engine: PromptEngine, shuffle: bool) -> None:
    dataset = PreprocessedDataset(ROWS, engine)
    pad = (
        engine.tokenizer.pad_token_id
        if engine.tokenizer.pad_token_id is not None
        else engine.tokenizer.eos_token_id
    )
    built = DataLoaderBuilder().with_dataset(dataset).with_batch_size(4)
    built.with_options(shuffle=shuffle, seed=6, collate_fn=create_causal_lm_collate(pad or 0))
    assert_one_way(
        built.build(), spelling(shuffle=shuffle, seed=6), what="create_causal_lm_collate"
    )


def test_an_engine_of_ones_own_is_asked_row_by_row(engine: PromptEngine) -> None:
    dataset = PreprocessedDataset(ROWS, Counting(tokenizer(), PROMPT, max_length=400))
    assert dataset.as_dataset_config() is None
    built = (
        DataLoaderBuilder()
        .with_dataset(dataset)
        .with_batch_size(4)
        .with_options(shuffle=True, seed=6)
    )
    assert_one_way(built.build(), spelling(shuffle=True, seed=6), what="an engine of one's own")


def test_law_9_a_streaming_dataset_is_a_pipeline_in_order(engine: PromptEngine) -> None:
    dataset = create_preprocessed_dataset(Stream(ROWS), engine, streaming=True)
    assert isinstance(dataset, StreamingPreprocessedDataset)
    assert_one_way(
        DataLoaderBuilder().with_dataset(dataset).with_batch_size(4).build(),
        spelling(),
        what="StreamingPreprocessedDataset",
    )
    assert isinstance(create_preprocessed_dataset(ROWS, engine), PreprocessedDataset)


def test_law_9_ranks(engine: PromptEngine) -> None:
    dataset = PreprocessedDataset(ROWS, engine)
    whole = list(spelling(shuffle=True, seed=2))
    halves = [
        DataLoaderBuilder()
        .with_dataset(dataset)
        .with_batch_size(2)
        .with_distributed(rank=r, world_size=2)
        .with_options(shuffle=True, seed=2)
        for r in range(2)
    ]
    for batch, first, second in zip(whole, *(half.build() for half in halves), strict=True):
        for r, part in ((0, first), (1, second)):
            width = part["input_ids"].shape[1]
            np.testing.assert_array_equal(part["input_ids"], batch["input_ids"][r::2, :width])
            np.testing.assert_array_equal(part["labels"], batch["labels"][r::2, :width])


def test_law_exact_resume(engine: PromptEngine) -> None:
    def make(dataset: Any, **options: Any) -> Any:
        return (
            DataLoaderBuilder()
            .with_dataset(dataset)
            .with_batch_size(4)
            .with_options(**options)
            .build()
        )

    mapped = PreprocessedDataset(ROWS, engine)
    streamed = StreamingPreprocessedDataset(Stream(ROWS), engine, buffer_size=7, seed=3)
    assert_exact_resume(
        lambda: make(mapped, shuffle=True, seed=1, rank=1, world_size=2), 4, hops=(1,), stops=(0, 2)
    )
    assert_exact_resume(lambda: make(streamed), 8, hops=(1,), stops=(0, 3))


def test_a_streams_ranks_and_workers_share_its_rows(
    engine: PromptEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = sorted(engine.encode(row)["input_ids"].tolist() for row in ROWS)
    seen = []
    for rank in range(2):
        for worker in range(3):
            monkeypatch.setattr(
                "easypipe.compat.datasets.torch_worker", lambda worker=worker: (worker, 3)
            )
            shard = StreamingPreprocessedDataset(
                Stream(ROWS), engine, buffer_size=4, rank=rank, world_size=2
            )
            seen += [row["input_ids"].tolist() for row in shard]
    assert sorted(seen) == wanted


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loader_of_a_stream_gives_each_row_to_one_rank(
    engine: PromptEngine, world_size: int
) -> None:
    wanted = sorted(engine.encode(row)["input_ids"].tolist() for row in ROWS)
    seen = []
    for rank in range(world_size):
        stream = StreamingPreprocessedDataset(Stream(ROWS), engine, buffer_size=4)
        builder = DataLoaderBuilder().with_dataset(stream).with_batch_size(4)
        loader = builder.with_distributed(rank, world_size).with_options(drop_last=False).build()
        for batch in loader:
            pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
            seen += [row[mask > 0].tolist() for row, mask in pairs]
    assert sorted(row for row in seen if row) == wanted


def test_f26_the_streaming_example_as_printed(engine: PromptEngine) -> None:
    """But for its four workers: forking this process, with jax's threads in it, may hang. Which
    rows each has is tested above.
    """
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    # For local shuffling
    dataset = StreamingPreprocessedDataset(
        hf_iterable=Stream(ROWS), prompt_engine=engine, buffer_size=1000
    )
    loader = DataLoader(dataset)
    seen = [batch["input_ids"][0].tolist() for batch in loader]  # pyright: ignore[reportIndexIssue]
    assert sorted(seen) == sorted(engine.encode(row)["input_ids"].tolist() for row in ROWS)


@examples(10)
@given(st.integers(0, 12), st.integers(0, 3))
def test_the_buffer_shuffles_within_its_blocks(
    engine: PromptEngine, buffer_size: int, seed: int
) -> None:
    rows = [engine.encode(row)["input_ids"].tolist() for row in ROWS[:20]]
    made = [
        row["input_ids"].tolist()
        for row in StreamingPreprocessedDataset(Stream(ROWS[:20]), engine, buffer_size, seed=seed)
    ]
    size = max(buffer_size, 1)
    for start in range(0, 20, size):
        assert sorted(made[start : start + size]) == sorted(rows[start : start + size])
    assert made == [
        row["input_ids"].tolist()
        for row in StreamingPreprocessedDataset(Stream(ROWS[:20]), engine, buffer_size, seed=seed)
    ]


def test_what_decides_the_rows_of_a_stream_is_in_its_fingerprint(engine: PromptEngine) -> None:
    """Every option; which rank asks is not: a state is that of all of them."""
    options: dict[str, Any] = {"buffer_size": 4, "skip_errors": False, "seed": 0}
    others: dict[str, Any] = {"buffer_size": 5, "skip_errors": True, "seed": 1}
    ranks: dict[str, Any] = {"rank": 1, "world_size": 2}
    taken = inspect.signature(StreamingPreprocessedDataset).parameters
    assert set(taken) == {"hf_iterable", "prompt_engine", *options, *ranks}

    def fingerprint(rows: str = "1", made_by: PromptEngine = engine, **changes: Any) -> str:
        stream = Stream(ROWS)
        stream.fingerprint = rows
        return StreamingPreprocessedDataset(stream, made_by, **options | changes).fingerprint

    changed = [fingerprint(**{name: value}) for name, value in others.items()]
    shorter = PromptEngine(tokenizer(), PROMPT, max_length=399)
    whole = PromptEngine(tokenizer(), dataclasses.replace(PROMPT, train_on="all"), max_length=400)
    engines = [fingerprint(made_by=one) for one in (shorter, whole)]
    apart = [fingerprint(), fingerprint("2"), *engines, *changed]
    assert len(set(apart)) == len(apart)
    assert fingerprint(**ranks) == fingerprint() == fingerprint()


def test_every_block_of_the_buffer_has_an_order_of_its_own(engine: PromptEngine) -> None:
    rows, size = ROWS[:32], 16
    plain = [engine.encode(row)["input_ids"].tolist() for row in rows]
    made = [
        plain.index(row["input_ids"].tolist())
        for row in StreamingPreprocessedDataset(Stream(rows), engine, size, seed=1)
    ]
    assert made[:size] != [at - size for at in made[size:]]


def test_skip_errors(engine: PromptEngine, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*ROWS[:3], {"prompt": "a"}, *ROWS[3:5], {"prompt": "a", "completion": ""}]
    with pytest.raises(SourceError, match=r"row 3, .*no column 'completion'"):
        list(StreamingPreprocessedDataset(Stream(rows), engine))
    dataset = StreamingPreprocessedDataset(Stream(rows), engine, skip_errors=True)
    with caplog.at_level(logging.WARNING, "easypipe"):
        assert len(list(dataset)) == 5
    assert dataset.skipped.total() == 2
    assert "stream: 2 rows were left out" in caplog.text
    with pytest.raises(SourceError, match=r"row 3, .*no column 'completion'"):
        PreprocessedDataset(rows, engine)[3]


def test_what_is_no_dataset_is_refused(engine: PromptEngine) -> None:
    with pytest.raises(
        ConfigError, match=r"Stream does not return rows by number. Use create_preprocessed_dataset"
    ):
        PreprocessedDataset(Stream(ROWS), engine)
    with pytest.raises(ConfigError, match="can be read once, and every iteration begins anew"):
        StreamingPreprocessedDataset(iter(ROWS), engine)
    for kind in (PreprocessedDataset, StreamingPreprocessedDataset):
        with pytest.raises(ConfigError, match="prompt_engine: str does not encode rows"):
            kind(Stream(ROWS), "an engine")
        with pytest.raises(ConfigError, match=r"hf_(dataset|iterable): dict .*one of its splits"):
            kind({"train": ROWS}, engine)
    for options, message in (
        ({"buffer_size": -1}, "buffer_size: -1"),
        ({"rank": 1}, "there is no rank 1 of 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            StreamingPreprocessedDataset(Stream(ROWS), engine, **options)


def test_f27_a_collator_of_ones_own(engine: PromptEngine) -> None:
    built = DataLoaderBuilder().with_dataset(PreprocessedDataset(ROWS, engine)).with_batch_size(4)
    batch = next(iter(built.with_options(collate_fn=create_collate_fn(0, max_length=400)).build()))
    assert batch["labels"].shape == (4, 400)
    trained = batch["labels"] != -100
    assert (batch["labels"][trained] == batch["input_ids"][trained]).all()  # not shifted


def test_f28_the_builders_example(engine: PromptEngine) -> None:
    train_ds = PreprocessedDataset(ROWS, engine)

    class dist:
        rank, world_size = 0, 1

    loader = (
        DataLoaderBuilder()
        .with_dataset(train_ds)
        .with_batch_size(32)
        .with_workers(8)
        .with_distributed(rank=dist.rank, world_size=dist.world_size)
        .build()
    )
    assert [batch["input_ids"].shape[0] for batch in loader] == [32, 9]
    assert_same_batches(loader, loader)
