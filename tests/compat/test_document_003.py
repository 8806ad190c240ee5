"""Document 003 (shared/spec/003): a tokenizer of one's own, a stream of tokens, two loaders; its
training example, in JAX.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from easypipe import (
    BPETokenizer,
    DatasetConfig,
    LoadStageConfig,
    OrderConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    TransformerDataset,
    create_dataloaders,
    load_tokenizer,
    train_tokenizer,
)
from easypipe.compat.small_transformer import seed_of_epoch
from easypipe.core.errors import ConfigError, SourceError, TokenizerError
from easypipe.core.schema import IGNORE
from easypipe.train.model.decoder import Decoder, ModelConfig
from laws import assert_exact_resume, assert_one_way
from pipelines import jsonl, texts
from strategies import examples

LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/train.jsonl, data/val.jsonl, data/plain.txt and a trained tokenizer, as the document has
    them.
    """
    made = tmp_path_factory.mktemp("document003")
    jsonl(made / "data" / "train.jsonl", [{"text": text} for text in texts(60, longest=20)])
    jsonl(made / "data" / "val.jsonl", [{"text": text} for text in texts(13, 7, longest=20)])
    (made / "data" / "plain.txt").write_text("\n".join(texts(40, longest=12)) + "\n")
    train_tokenizer(made / "data" / "train.jsonl", 320, made / "tokenizer")
    return made


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EASYPIPE_CACHE", str(folder / "cache"))


@pytest.fixture
def tokenizer() -> BPETokenizer:
    return BPETokenizer.from_pretrained("tokenizer")


def tokens_of(path: str, tokenizer: BPETokenizer) -> list[int]:
    """The stream by the document's own loop, with EOS between samples."""
    lines = Path(path).read_text().splitlines()
    stream: list[int] = []
    for sample in [json.loads(line)["text"] for line in lines] if path.endswith("l") else lines:
        stream.extend(tokenizer.encode(sample)["input_ids"])
        stream.append(tokenizer.tokenizer.eos_token_id or 0)
    return stream


def pipeline(path: str, **pack: Any) -> Pipeline:
    """The Pipeline spelling."""
    config = PipelineConfig(
        datasets=(DatasetConfig(name="stream", data_files=path),),
        default_tokenizer="tokenizer",
        seed=pack.pop("seed", 0),
        order=OrderConfig(shuffle=False),
        pack=PackStageConfig(seq_length=LENGTH, strategy="stream", segments="row", **pack),
    )
    return Pipeline(config).source().tokenize().pack()


def test_the_tokenizer(tokenizer: BPETokenizer, tmp_path: Path) -> None:
    assert tokenizer.get_vocab_size() == load_tokenizer("tokenizer").vocab_size <= 320
    assert set(tokenizer.tokenizer.special_tokens) == {
        "<|endoftext|>",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[PAD]",
    }
    assert tokenizer.tokenizer.pad_token_id == tokenizer.encode("[PAD]")["input_ids"][0]
    text = "the quick brown fox, größer 🦊"
    encoded = tokenizer.encode(text)
    count = len(encoded["input_ids"])
    assert encoded == {
        "input_ids": encoded["input_ids"],
        "token_type_ids": [0] * count,
        "attention_mask": [1] * count,
    }
    assert tokenizer.decode(encoded["input_ids"]) == text
    framed = tokenizer.encode(text, add_special_tokens=True)["input_ids"]
    assert tokenizer.decode(framed) == f"[CLS]{text}[SEP]"
    assert tokenizer.decode(framed, skip_special_tokens=True) == text
    again = train_tokenizer(
        [{"words": text} for text in texts(50)],
        300,
        tmp_path / "a",
        content_field="words",
        special_tokens=["[PAD]"],
    )
    train_tokenizer(
        [{"words": text} for text in texts(50)],
        300,
        tmp_path / "b",
        content_field="words",
        special_tokens=["[PAD]"],
    )
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
        tmp_path / "b" / "tokenizer.json"
    ).read_bytes()
    with pytest.raises(TokenizerError, match=r"has no token \[CLS\]"):
        again.encode("x", add_special_tokens=True)
    assert train_tokenizer("data/plain.txt", 300, tmp_path / "c").get_vocab_size() == 300
    with pytest.raises(SourceError, match="no such column"):
        train_tokenizer("data/train.jsonl", 300, tmp_path / "d", content_field="body")
    with pytest.raises(TokenizerError):
        BPETokenizer.from_pretrained(tmp_path / "nothing")


@pytest.mark.parametrize("path", ["data/train.jsonl", "data/plain.txt"])
def test_the_dataset_is_a_continuous_stream(path: str, tokenizer: BPETokenizer) -> None:
    dataset = TransformerDataset(path, tokenizer, LENGTH)
    stream = tokens_of(path, tokenizer)
    assert dataset.num_tokens == len(stream)
    assert len(dataset) == len(stream) - LENGTH
    for i in (0, 1, LENGTH - 1, LENGTH, 5 * LENGTH + 7, len(dataset) - 1):
        item = dataset[i]
        assert item["input_ids"].dtype == item["labels"].dtype == np.int32
        assert item["input_ids"].tolist() == stream[i : i + LENGTH]
        assert item["labels"].tolist() == stream[i + 1 : i + 1 + LENGTH]
    assert dataset[-1]["labels"].tolist() == stream[-LENGTH:]
    for i in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match="was asked for"):
            dataset[i]
    with pytest.raises(ConfigError, match=r"^TransformerDataset\[...\]: slice.* Take one item at"):
        dataset[0:2]  # pyright: ignore[reportArgumentType]
    assert dataset[np.int64(-1)].keys() == dataset[-1].keys()
    with pytest.raises(ConfigError, match=r"stride: 1\.5 tokens from one item to the next"):
        TransformerDataset("data/val.jsonl", tokenizer, LENGTH, stride=1.5)  # pyright: ignore[reportArgumentType]


@given(st.integers(1, 80), st.integers(1, 90))
@examples(12)
def test_strides_and_lengths(stride: int, length: int) -> None:
    tokenizer = BPETokenizer.from_pretrained("tokenizer")
    dataset = TransformerDataset("data/val.jsonl", tokenizer, length, stride=stride)
    stream = tokens_of("data/val.jsonl", tokenizer)
    starts = [start for start in range(0, len(stream), stride) if start + length < len(stream)]
    assert len(dataset) == len(starts)
    for i in {0, len(starts) // 2, len(starts) - 1} if starts else ():
        assert dataset[i]["input_ids"].tolist() == stream[starts[i] : starts[i] + length]
        assert dataset[i]["labels"].tolist() == stream[starts[i] + 1 : starts[i] + 1 + length]


def test_the_dataset_is_the_rows_of_the_pipeline(tokenizer: BPETokenizer) -> None:
    dataset = TransformerDataset("data/train.jsonl", tokenizer, LENGTH, stride=LENGTH)
    rows = [
        {name: values[0] for name, values in batch.items()}
        for batch in pipeline("data/train.jsonl", shuffle_packed=False)
        .load({"batch_size": 1})
        .build()
    ]
    assert len(rows) - len(dataset) in (0, 1)  # the last row may not be full
    for item, row in zip((dataset[i] for i in range(len(dataset))), rows, strict=False):
        assert np.array_equal(item["input_ids"], row["input_ids"])
        assert np.array_equal(item["labels"], row["labels"])


def test_the_loaders_are_the_pipeline(tokenizer: BPETokenizer) -> None:
    """Law 9: every pass of either, byte by byte."""
    train, val = create_dataloaders(
        "data/train.jsonl", "data/val.jsonl", tokenizer, batch_size=4, seq_length=LENGTH, seed=5
    )
    for epoch in range(3):
        load = LoadStageConfig(batch_size=4, drop_last=True)
        spelled = pipeline("data/train.jsonl", seed=seed_of_epoch(5, epoch)).load(load).build()
        assert_one_way(list(train), list(spelled), what=f"pass {epoch}")
    plain = (
        pipeline("data/val.jsonl", shuffle_packed=False)
        .load({"batch_size": 4, "drop_last": False})
        .build()
    )
    assert_one_way(list(val), list(plain), what="validation")
    assert_exact_resume(lambda: train.loader(1), len(train))


def test_training_is_shuffled_and_validation_complete(
    tokenizer: BPETokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    train, val = create_dataloaders(
        "data/train.jsonl", "data/val.jsonl", tokenizer, batch_size=4, seq_length=LENGTH, seed=5
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], (
        "no warning of options that nobody set"
    )
    stream = tokens_of("data/train.jsonl", tokenizer)
    rows = {tuple(stream[i : i + LENGTH]) for i in range(0, len(stream), LENGTH)}
    passes = [
        [tuple(row) for batch in train for row in batch["input_ids"].tolist()] for _ in range(2)
    ]
    assert passes[0] != passes[1]
    assert [len(one) for one in passes] == [len(train) * 4] * 2
    assert len(rows) - 4 < len(passes[0]) <= len(rows)
    assert set(passes[0]) <= rows | {
        tuple(stream[len(stream) // LENGTH * LENGTH :])
        + (tokenizer.tokenizer.pad_token_id,) * (-len(stream) % LENGTH)
    }
    train.set_epoch(0)
    assert [tuple(row) for batch in train for row in batch["input_ids"].tolist()] == passes[0]
    held = tokens_of("data/val.jsonl", tokenizer)
    batches = list(val)
    ids = np.concatenate([batch["input_ids"].ravel() for batch in batches])
    assert ids[: len(held)].tolist() == held  # in order, every token of it
    labels = np.concatenate([batch["labels"].ravel() for batch in batches])
    assert labels[: len(held) - 1].tolist() == held[1:]
    assert (labels[len(held) - 1 :] == IGNORE).all()
    assert len(val) == len(batches) == -(-len(ids) // (4 * LENGTH))


def test_ranks_and_pytorch_options(
    tokenizer: BPETokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "easypipe")
    options = {"batch_size": 2, "seq_length": LENGTH, "seed": 5, "is_jsonl": True}
    paths = ("data/train.jsonl", "data/val.jsonl")
    create_dataloaders(
        *paths, tokenizer, **options, num_workers=2, pin_memory=True, persistent_workers=True
    )
    assert "pin_memory=True changes nothing" in caplog.text
    assert "persistent_workers=True changes nothing" in caplog.text
    whole, _ = create_dataloaders(*paths, "tokenizer", **options | {"batch_size": 4})
    ranks = [
        create_dataloaders(*paths, "tokenizer", **options, rank=rank, world_size=2)[0]
        for rank in range(2)
    ]
    both = [
        np.stack([a["input_ids"], b["input_ids"]], 1).reshape(4, LENGTH)
        for a, b in zip(*ranks, strict=True)
    ]
    for batch, together in zip(whole, both, strict=False):
        assert np.array_equal(batch["input_ids"], together)
    with pytest.raises(ConfigError, match=r"'stream' has \d+ rows: no batch is ever full"):
        create_dataloaders(*paths, "tokenizer", **options, rank=998, world_size=999)
    drawn, _ = create_dataloaders(*paths, "tokenizer", batch_size=4, seq_length=LENGTH)
    again, _ = create_dataloaders(
        *paths, "tokenizer", batch_size=4, seq_length=LENGTH, seed=drawn.seed
    )
    assert_one_way(list(drawn), list(again), what="a seed that was drawn")
    with pytest.raises(ConfigError, match="Give at least 1"):
        TransformerDataset("data/val.jsonl", tokenizer, LENGTH, stride=0)
    with pytest.raises(ConfigError, match="no batch is ever full"):
        create_dataloaders(*paths, tokenizer, batch_size=4000, seq_length=LENGTH)
    with pytest.raises(ConfigError, match="pass"):
        whole.set_epoch(-1)
    with pytest.raises(SourceError):
        create_dataloaders("data/plain.txt", "data/val.jsonl", tokenizer, is_jsonl=True)


def test_f30_the_complete_training_example() -> None:
    """The document's last example, line for line, with jax in the place of torch."""
    tokenizer = BPETokenizer.from_pretrained("tokenizer")
    train_loader, val_loader = create_dataloaders(
        train_path="data/train.jsonl",
        val_path="data/val.jsonl",
        tokenizer=tokenizer,
        batch_size=4,
        seq_length=LENGTH,
        num_workers=1,
        seed=1,
    )
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
    }
    shape = ModelConfig(vocab_size=tokenizer.get_vocab_size(), **sizes, scan_layers=False)
    model = Decoder(shape, nnx.Rngs(0))
    total = len(train_loader) * 3  # 3 epochs
    warmup = total // 10 + 1
    schedule = optax.join_schedules(
        [optax.linear_schedule(0, 1e-2, warmup), optax.linear_schedule(1e-2, 0, total - warmup)],
        [warmup],
    )
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

    def loss_of(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
        labels = batch["labels"]
        logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        return (losses * (labels != IGNORE)).sum() / (labels != IGNORE).sum()

    @nnx.jit
    def train_step(
        model: Decoder, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]
    ) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, gradients)
        return loss

    evaluate = nnx.jit(loss_of)
    val_losses = []
    for _ in range(3):
        for batch in train_loader:
            train_step(model, optimizer, batch)
        val_losses.append(
            sum(float(evaluate(model, batch)) for batch in val_loader) / len(val_loader)
        )
    assert val_losses[-1] < val_losses[0] < np.log(tokenizer.get_vocab_size())


class Characters:
    """A tokenizer of one's own, as the document has them: `encode` is all that it needs."""

    def __init__(
        self, *, eos: int | None = None, version: str | None = None, size: int | None = None
    ) -> None:
        for name, value in {"eos_token_id": eos, "version": version, "vocab_size": size}.items():
            if value is not None:
                setattr(self, name, value)
        self.calls = 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        if "boom" in text:
            raise ValueError("no such text")
        return [ord(letter) for letter in text]


@pytest.mark.parametrize("eos", [None, 3])
def test_an_own_tokenizer_makes_the_stream(
    eos: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    own = Characters(eos=eos)
    lines = [json.loads(line)["text"] for line in Path("data/val.jsonl").read_text().splitlines()]
    stream = [
        number for text in lines for number in (*map(ord, text), *([] if eos is None else [eos]))
    ]
    dataset = TransformerDataset("data/val.jsonl", own, LENGTH)
    assert dataset.num_tokens == len(stream)
    assert [dataset[i]["input_ids"][0] for i in range(len(dataset))] == stream[: len(dataset)]
    assert ("no end-of-sequence token" in caplog.text) == (eos is None)
    own = Characters(eos=eos)
    train, val = create_dataloaders(
        "data/train.jsonl", "data/val.jsonl", own, batch_size=3, seq_length=LENGTH, seed=5
    )
    # two passes
    assert len({batch["input_ids"].tobytes() for _ in range(2) for batch in train}) == 2 * len(
        train
    )
    assert own.calls == 60 + 13
    flat = np.concatenate([batch["input_ids"].ravel() for batch in val])
    assert flat[: len(stream)].tolist() == stream
    labels = np.concatenate([batch["labels"].ravel() for batch in val])
    assert labels[: len(stream)].tolist() == [*stream[1:], IGNORE]
    state = train.state().to_json()
    next(iter(train))
    again, _ = create_dataloaders(
        "data/train.jsonl",
        "data/val.jsonl",
        Characters(eos=eos),
        batch_size=3,
        seq_length=LENGTH,
        seed=5,
    )
    again.restore(state)  # its ids are the same, though nothing of it was kept
    assert next(iter(again))["input_ids"].tolist() == next(iter(train))["input_ids"].tolist()


def test_tokens_of_an_own_tokenizer_are_kept_by_its_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def calls(**options: Any) -> int:
        TransformerDataset("data/val.jsonl", own := Characters(eos=3, **options), LENGTH)
        return own.calls

    assert calls() == calls() == 13
    assert re.search(
        "tokenizer: .*Characters has no version, so its results are not kept", caplog.text
    )
    caplog.clear()
    assert [calls(version="1"), calls(version="1"), calls(version="2")] == [13, 0, 13]
    assert not caplog.text


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"text": "ab"}, {"text": "boom"}],
            {},
            r"bad\.jsonl, row 1: encode failed: ValueError: no such text",
        ),
        ([{"text": "ab"}, {"text": None}], {}, r"bad\.jsonl, row 1: null"),
        (
            [{"text": "ab"}, {"text": "aé"}],
            {"size": 128},
            r"bad\.jsonl, row 1.*token 233 is outside the vocabulary of 128 of 'Characters'",
        ),
        ([{"body": "ab"}], {}, r"'text': no such column.*have: body"),
    ],
)
def test_what_an_own_tokenizer_cannot_encode(
    rows: Any, options: Any, message: str, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(SourceError, match=message):
        TransformerDataset(path, Characters(eos=3, **options), 2)
