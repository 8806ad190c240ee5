"""What the seed documents print or promise under names of their own: classes, arguments and
`next(loader)`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import easypipe
from easypipe import (
    CollatorRegistry,
    DataLoaderConfig,
    DataLoaderFactory,
    LanguageModelingDataCollator,
    LoadStageConfig,
    PackStageConfig,
    ParquetShardedSource,
    Pipeline,
    PreprocessedDataset,
    TaskSpec,
    UniversalDataModule,
    VisionDataCollator,
    create_causal_lm_collate,
    create_masked_lm_collate,
    create_seq2seq_collate,
    create_vision_collate,
    load_tokenizer,
)
from easypipe.core.errors import ConfigError, SourceError
from laws import assert_same_batch
from pipelines import config, jsonl, tokenizer


def cached(tmp_path: Path) -> Any:
    return (
        Pipeline(config(tmp_path))
        .source()
        .tokenize()
        .mix()
        .pack(PackStageConfig(seq_length=64))
        .load(LoadStageConfig(batch_size=4))
        .build()
    )


def streaming(tmp_path: Path) -> Any:
    made = (
        Pipeline(config(tmp_path, streaming=True))
        .source()
        .tokenize()
        .mix()
        .pack(PackStageConfig(seq_length=64))
    )
    return made.load(LoadStageConfig(batch_size=4, shuffle_buffer_size=64)).build()


def epochs(tmp_path: Path) -> Any:
    rows = [{"x": i} for i in range(40)]
    return DataLoaderFactory().create_dataloader(
        rows, DataLoaderConfig(batch_size=4, shuffle=True, seed=1)
    )


@pytest.mark.parametrize("make", [cached, streaming, epochs])
def test_next_of_a_loader_is_an_iteration_that_it_keeps(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    loader = make(tmp_path)
    wanted = list(itertools.islice(loader, 5))
    loader = make(tmp_path)
    assert_same_batch(next(loader), wanted[0])
    assert_same_batch(next(iter(loader)), wanted[0])  # which neither moves nor resets it
    assert_same_batch(next(loader), wanted[1])
    state = make(tmp_path).state()
    kept = make(tmp_path)
    for batch in wanted[:3]:
        assert_same_batch(next(kept), batch)
    state = kept.state().to_json()
    loader.restore(state)
    assert_same_batch(next(iter(loader)), wanted[3])
    assert_same_batch(next(loader), wanted[3])
    assert_same_batch(next(loader), wanted[4])
    loader.restore(state)
    assert_same_batch(next(loader), wanted[3])


def test_next_of_a_loader_ends_and_goes_on_with_the_next_pass_where_there_is_one(
    tmp_path: Path,
) -> None:
    loader, other = epochs(tmp_path), epochs(tmp_path)
    passes = [list(other) for _ in range(2)]
    for one in passes:
        for batch in one:
            assert_same_batch(next(loader), batch)
        with pytest.raises(StopIteration):
            next(loader)
    plain = other.loader(0)
    for _ in passes[0]:
        next(plain)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(plain)


def test_sources_of_every_format_are_at_the_door(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    source = ParquetShardedSource(tmp_path / "*.parquet")
    assert [row["text"] for name in source.shard_names for row in source.open_shard(name)] == [
        "a",
        "b",
    ]
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    opened = (
        Pipeline.from_config(
            {"datasets": [{"data_files": str(path)}, {"data_files": str(tmp_path / "a.parquet")}]}
        )
        .source()
        .get_data()
    )
    assert isinstance(opened["dataset1"], easypipe.JsonShardedSource)
    assert isinstance(opened["dataset2"], ParquetShardedSource)
    kinds = (
        "Arrow",
        "Csv",
        "HuggingFace",
        "InMemory",
        "Json",
        "Mixed",
        "Packed",
        "Parquet",
        "Text",
        "Tokenized",
    )
    assert all(
        issubclass(getattr(easypipe, f"{kind}ShardedSource"), easypipe.ShardedDataSource)
        for kind in kinds
    )


IMAGES = [
    {"pixel_values": np.full((4, 4, 3), 10 * i, np.uint8), "input_ids": [1, 2, 3][: i + 1]}
    for i in range(3)
]


def test_the_multimodal_collator_of_document_004_as_printed() -> None:
    registry = CollatorRegistry()

    @registry.register(
        "multimodal", modality="vision", description="Vision-language collator", replace=True
    )
    def create_multimodal_collator(task_spec=None, tokenizer=None, normalize=True):
        vision_collator = VisionDataCollator(normalize=normalize)
        text_collator = LanguageModelingDataCollator(tokenizer=tokenizer)

        def multimodal_collate_fn(batch):
            # Separate vision and text components
            vision_batch = [{"pixel_values": item["pixel_values"]} for item in batch]
            text_batch = [{"input_ids": item["input_ids"]} for item in batch]

            # Apply collators
            vision_out = vision_collator(vision_batch)
            text_out = text_collator(text_batch)

            # Merge outputs
            return {
                "pixel_values": vision_out["pixel_values"],
                "input_ids": text_out["input_ids"],
                "attention_mask": text_out["attention_mask"],
                "labels": text_out["labels"],
            }

        return multimodal_collate_fn

    made = registry.get_collator(collator_name="multimodal", tokenizer=load_tokenizer(tokenizer()))(
        IMAGES
    )
    assert made["pixel_values"].shape == (3, 4, 4, 3)
    assert made["labels"].tolist() == [[-100, -100, -100], [2, -100, -100], [2, 3, -100]]


def test_the_registry_chooses_the_collators_that_have_names() -> None:
    registry = CollatorRegistry()
    vision = registry.get_collator(task_spec=TaskSpec.vision_tiny())
    assert isinstance(vision, VisionDataCollator)
    assert VisionDataCollator(mean=[0.5] * 3, std=[0.5] * 3, image_size=8) == create_vision_collate(
        mean=[0.5] * 3, std=[0.5] * 3, image_size=8
    )
    own = load_tokenizer(tokenizer())
    text = registry.get_collator(task_spec=TaskSpec.lm_tiny(), tokenizer=own)
    assert isinstance(text, LanguageModelingDataCollator)
    rows = [{"text": "a quick fox"}, {"input_ids": [1, 2]}]
    ids = own.reference_encode("a quick fox")
    assert_same_batch(
        text(rows),
        create_causal_lm_collate(text(rows)["input_ids"][1, -1])([{"input_ids": ids}, rows[1]]),
    )
    hidden = LanguageModelingDataCollator(own, mlm=True, mlm_probability=0.4, mask_token_id=7)
    assert hidden.draws
    wanted = create_masked_lm_collate(own, probability=0.4, mask_token_id=7)(
        [{"input_ids": ids}], keys=[3]
    )
    assert_same_batch(hidden([{"text": "a quick fox"}], keys=[3]), wanted)
    with pytest.raises(ConfigError, match="mlm_probability: has no effect without mlm"):
        LanguageModelingDataCollator(own, mlm_probability=0.4)


def test_a_tokenizer_says_what_starts_the_decoder(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"input_ids": [5], "labels": [6, 7, 8]}, {"input_ids": [5, 5], "labels": [6]}]
    own = load_tokenizer(tokenizer())
    for bos, pad, start in ((3, 9, 3), (None, 9, 9)):
        monkeypatch.setattr(own, "bos_token_id", bos)
        monkeypatch.setattr(own, "pad_token_id", pad)
        with caplog.at_level(logging.WARNING, "easypipe"):
            batch = create_seq2seq_collate(tokenizer=own)(rows)
        assert batch["decoder_input_ids"].tolist() == [[start, 6, 7], [start, 6, pad]]
        assert batch["input_ids"].tolist() == [[5, pad], [5, 5]]
        assert (
            CollatorRegistry().get_collator(collator_name="seq2seq", tokenizer=own)(rows)[
                "decoder_input_ids"
            ][0, 0]
            == start
        )
    assert create_seq2seq_collate(2, decoder_start_token_id=1, tokenizer=own)(rows)[
        "decoder_input_ids"
    ].tolist() == [[1, 6, 7], [1, 6, 2]]
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "easypipe"):
        assert create_seq2seq_collate(4)(rows)["decoder_input_ids"].tolist() == [
            [4, 6, 7],
            [4, 6, 4],
        ]
    assert (
        "the pad token, 4, starts the decoder: no decoder_start_token_id or tokenizer was given"
        in caplog.text
    )


class Letters:
    """A tokenizer of one's own, as document 003 has one: nothing but an encode() that gives a
    dict.
    """

    pad_token_id = 0

    def encode(self, text: str) -> dict[str, list[int]]:
        ids = [ord(letter) for letter in text]
        return {
            "input_ids": ids,
            "token_type_ids": [0] * len(ids),
            "attention_mask": [1] * len(ids),
        }


def test_a_tokenizer_of_ones_own_encodes_rows_of_text() -> None:
    rows = [{"text": "abc" + "d" * i} for i in range(6)]
    data = UniversalDataModule(rows, tokenizer=Letters(), batch_size=3, seed=1, max_length=5)
    batches = list(data.train_dataloader())
    seen = sorted(
        bytes(row[row > 0].astype(np.uint8)).decode()
        for batch in batches
        for row in batch["input_ids"]
    )
    assert seen == ["abc", "abcd", "abcdd", "abcdd", "abcdd", "abcdd"]
    assert batches[0]["labels"][0, 0] == ord("b")
    made = LanguageModelingDataCollator(Letters())([{"text": "ab"}])
    assert made["input_ids"].tolist() == [[97, 98]]
    ended = type("Ended", (Letters,), {"pad_token_id": 3, "eos_token_id": 7})()
    made = LanguageModelingDataCollator(ended)([{"text": "ab"}, {"text": "a"}])
    assert made["input_ids"].tolist() == [[97, 98], [97, 3]]  # EOS pads where there is no pad token
    with pytest.raises(
        SourceError,
        match=r"tokenizer: Broken.encode returned str. Let it return a list of ids, or a dict with "
        r"input_ids",
    ):
        LanguageModelingDataCollator(type("Broken", (), {"encode": lambda self, text: text})())(
            [{"text": "ab"}]
        )


def test_tokens_of_ones_own_encode_are_hidden_by_what_it_tells() -> None:
    told = {"mask_token_id": 5, "vocab_size": 128, "pad_token_id": 0}
    own = type("Masking", (Letters,), told)()
    hidden = LanguageModelingDataCollator(own, mlm=True)([{"text": "abcdefgh" * 9}], keys=[3])
    same = create_masked_lm_collate(
        mask_token_id=5, vocab_size=128, pad_token_id=0, special_token_ids=[0, 5]
    )
    assert_same_batch(hidden, same([Letters().encode("abcdefgh" * 9)], keys=[3]))
    assert (hidden["input_ids"] == 5).any()
    with pytest.raises(
        ConfigError, match=r"mask_token_id: is not known\. Letters has none: give it"
    ):
        LanguageModelingDataCollator(Letters(), mlm=True)


class Engine:
    """A prompt engine of one's own."""

    def encode(self, row: dict[str, Any]) -> dict[str, list[int]]:
        return {"input_ids": [1, *row["ids"]], "loss_mask": [0] + [1] * len(row["ids"])}


def test_a_prompt_engine_of_ones_own_is_an_encode() -> None:
    dataset = PreprocessedDataset([{"ids": [2, 3]}, {"ids": [4]}], Engine())
    assert dataset[0]["input_ids"].tolist() == [1, 2, 3]
    [batch] = DataLoaderFactory().create_dataloader(dataset, DataLoaderConfig(batch_size=2))
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 4, 0]]
    assert batch["labels"].tolist() == [[2, 3, -100], [4, -100, -100]]
    assert (
        dataset.fingerprint
        == PreprocessedDataset([{"ids": [2, 3]}, {"ids": [4]}], Engine()).fingerprint
    )
    nothing = type("Nothing", (), {"encode": lambda self, row: [1]})()
    with pytest.raises(
        SourceError,
        match=r"row 1: Nothing.encode returned no input_ids \(have: list\)\. Let encode\(row\) return a "
        r"dict",
    ):
        PreprocessedDataset([{"ids": [2]}] * 2, nothing)[1]
    with pytest.raises(ConfigError, match="prompt_engine: int does not encode rows"):
        PreprocessedDataset([], 3)  # type: ignore[arg-type]
