"""What is measured beside the loss: of each dataset, bits per byte, accuracy."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

from easypipe import ModelConfig, RunConfig, Trainer, TrainingConfig
from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError
from easypipe.run import prepare, train
from easypipe.train.config import LossConfig, PreferenceConfig
from easypipe.train.losses.loss import RECORDED, logits_loss_sums, loss_sums
from easypipe.train.losses.measures import Measures
from easypipe.train.metrics.log import read_metrics
from easypipe.transforms.tokenizer.token_bytes import text_bytes
from token_support import small_tokenizer, small_tokenizer_folder
from train.runs import Arithmetic, settings

NAMES = ("sources", "bits_per_byte", "token_accuracy", "entropy")
SIZES = np.array([0, 1, 2, 3, 4, 5], np.int32)


class Fixed:
    """A model whose logits are given, in both of the forms that losses take."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits

    def hidden(self, input_ids: Any, *_: Any) -> Any:
        return self.logits

    def lm_head(self) -> Any:
        return jnp.eye(self.logits.shape[-1])

    def __call__(self, input_ids: Any) -> Any:
        return self.logits


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_those_of_plain_loops(weighted: bool) -> None:
    draw = np.random.default_rng(3)
    logits = draw.normal(size=(3, 7, 6)).astype(np.float32)
    labels = draw.integers(0, 6, (3, 7))
    labels[draw.random(labels.shape) < 0.3] = -100
    sources = draw.integers(0, 3, labels.shape)  # of the fourth there is nothing
    weights = draw.choice([0.0, 0.5, 2.0], labels.shape) if weighted else np.ones(labels.shape)
    batch = {"labels": labels, "input_ids": labels, "source_ids": sources.astype(np.uint16)}
    batch |= {"loss_weights": weights.astype(np.float32)} if weighted else {}

    top, below = np.zeros((4, 4)), np.zeros((4, 4))  # nll, bits, hits, entropy; last row: all
    for row, slot in zip(*np.nonzero(labels != -100), strict=True):
        own, label = logits[row, slot].astype(np.float64), labels[row, slot]
        nll, weight = np.log(np.exp(own).sum()) - own[label], weights[row, slot]
        size, odds = SIZES[label], np.exp(own) / np.exp(own).sum()
        spread = -(odds * np.log(odds)).sum()
        for to in (sources[row, slot], 3):
            top[to] += weight * np.array([nll, nll / math.log(2) * (size > 0), own[label] == own.max(), spread])  # fmt: skip
            below[to] += weight * np.array([1, size, 1, 1])

    measures = Measures(NAMES, 4, SIZES)
    for sums in (loss_sums, logits_loss_sums):

        @jax.jit
        def run(logits, batch, sums=sums):
            out = sums(Fixed(logits), batch, measures=measures)
            return out.nll_sum / out.divisor, {name: a / b for name, (a, b) in out.ratios.items()}

        loss, quotients = jax.tree.map(np.asarray, run(logits, batch))
        for column, name in enumerate(("nll", *NAMES[1:])):
            wanted = top[:3, column] / below[:3, column]
            np.testing.assert_allclose(quotients[f"{name}/"][:3], wanted, rtol=1e-5)
            assert math.isnan(quotients[f"{name}/"][3])
            if name != "nll":
                np.testing.assert_allclose(quotients[name], top[3, column] / below[3, column], rtol=1e-5)  # fmt: skip
        known = quotients["share/"] > 0
        mean = (quotients["share/"] * quotients["nll/"])[known].sum()
        np.testing.assert_allclose(mean, loss, rtol=1e-5)


def config(folder: Path, held: Mapping[str, Any] | None = None, **given: Any) -> RunConfig:
    for name, word in (("words", "alpha beta "), ("code", "1234 = ")):
        lines = [json.dumps({"text": word * (1 + i % 7)}) for i in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    one = [{"name": name, "data_files": str(folder / f"{name}.jsonl")} for name in ("words", "code")]  # fmt: skip
    data = {
        "default_tokenizer": str(small_tokenizer_folder()),
        "cache_dir": str(folder / "cache"),
        "pack": {"seq_length": 32},
        "mix": {"weights": {"words": 3, "code": 1}, "stop_strategy": "all_exhausted"},
        "load": {"batch_size": 8, "accumulation_steps": 2},
        "seed": 1,
    }
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8)
    model = {**sizes, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    training = {"output_dir": str(folder / "run"), "steps": 4, "eval_every": 2, "measure": NAMES}
    held_out = {"eval": {"held": held or {"datasets": one[:1]}}}
    made = {"data": data | {"datasets": one}, "model": model, "train": training | given, **held_out}
    return from_dict(RunConfig, made)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run that measures; its data and their cache lie there too."""
    folder = tmp_path_factory.mktemp("measured")
    watched = {"best": {"metric": "eval.held.nll/words"}, "early_stopping": {"metric": "entropy"}}
    train(config(folder, checkpoint={"every": 2}, callbacks=watched))
    return folder


def test_a_run_tells_the_losses_of_its_datasets_and_of_those_held_out(measured: Path) -> None:
    records = read_metrics(measured / "run" / "metrics.jsonl")
    for record in records:
        shares = record["share/words"], record["share/code"]
        assert sum(shares) == pytest.approx(1)
        own = (record["nll/words"], record["nll/code"])
        assert np.dot(shares, own) == pytest.approx(record["nll"], rel=1e-5)
        assert 0 <= record["token_accuracy/code"] <= 1
        assert 0 < record["entropy"] <= math.log(small_tokenizer().vocab_size)
    held = records[-1]["eval"]["held"]
    assert held["nll/words"] == pytest.approx(held["nll"], rel=1e-5)
    assert "nll/code" not in held
    sizes = text_bytes((small_tokenizer_folder() / "tokenizer.json").read_text())
    assert sizes is not None
    assert 0 < held["bits_per_byte"] < held["nll"] / math.log(2)


def test_names_that_a_run_tells_are_known_before_it(measured: Path) -> None:
    last = read_metrics(measured / "run" / "metrics.jsonl")[-1]
    names = Measures(NAMES)
    assert last.keys() - RECORDED - {"nll"} == {*names.told(["words", "code"])}
    held = last["eval"]["held"].keys() - {"loss", "nll", "ppl", "num_targets"}
    assert held == {*names.told(["words"])}


def test_a_metric_that_is_not_measured_is_refused_before_data_is_read(tmp_path: Path) -> None:
    for metric, meant in (
        ("eval.held.entropi", "eval.held.entropy"),
        ("eval.held.nll/wrods", "eval.held.nll/words"),
        ("eval.held.reward_margin", None),
    ):
        run = config(tmp_path, callbacks={"best": {"metric": metric}})
        words = re.escape(f"no held-out metric named {metric!r} (have: eval.held.loss, ")
        words += rf".*Did you mean '{meant}'" if meant is not None else ""
        with pytest.raises(ConfigError, match=words):
            prepare(run)
    assert not (tmp_path / "cache" / "tokens").exists()


def test_rows_held_out_of_a_dataset_have_its_name(tmp_path: Path) -> None:
    held_out, watched = {"from": "data", "fraction": 0.4}, {"metric": "eval.held.nll/code"}
    train(config(tmp_path, held=held_out, steps=2, callbacks={"best": watched}))
    held = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["eval"]["held"]
    assert {name for name in held if name.startswith("nll/")} == {"nll/words", "nll/code"}


def test_several_held_out_datasets_are_read_once_to_their_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = config(tmp_path, steps=2)
    every = {"datasets": [dataclasses.replace(one, name=None) for one in values.data.datasets]}
    with caplog.at_level("INFO", "easypipe"):
        train(config(tmp_path, held=every, steps=2, measure=["sources"]))
    held = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["eval"]["held"]
    assert {name for name in held if name.startswith("nll/")} == {"nll/1", "nll/2"}
    assert "no weights given" not in caplog.text


def test_measuring_is_no_other_run(measured: Path) -> None:
    """Losses are the same ones, and a run goes on with it."""
    train(config(measured, output_dir=str(measured / "plain"), measure=[]))
    plain, told = (read_metrics(measured / name / "metrics.jsonl") for name in ("plain", "run"))
    assert [one["loss"] for one in plain] == [one["loss"] for one in told]
    again = config(measured, measure=[])
    assert train(again).resumed_from == 4


def test_each_token_has_as_many_bytes_as_its_text() -> None:
    tokenizer = small_tokenizer()
    sizes = tokenizer.text_bytes()
    assert sizes is not None
    assert len(sizes) == tokenizer.vocab_size
    text = "alpha naïve 日本 1234"
    ids = tokenizer.encode_column(pa.array([text])).ids
    assert sizes[ids].sum() == len(text.encode())
    special = [tokenizer.token(i) in tokenizer.special_tokens for i in range(len(sizes))]
    assert not sizes[special].any()


def test_pieces_of_text_and_words(shared_data: Path) -> None:
    definition = json.loads((shared_data / "tokenizers" / "mistral_v1" / "tokenizer.json").read_text())  # fmt: skip
    sizes = text_bytes(json.dumps(definition))
    vocab = definition["model"]["vocab"]
    assert sizes is not None
    assert [sizes[vocab[word]] for word in ("<0x0A>", "▁the", "é", "<s>")] == [1, 4, 2, 0]
    definition["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    assert text_bytes(json.dumps(definition)) is None
    words = {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.5]]}  # no pieces of bytes
    definition |= {"model": words, "decoder": {"type": "ByteLevel"}}
    assert text_bytes(json.dumps(definition)) is None


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="measure: has no effect on preferences"):
        TrainingConfig(measure=("sources",), preference=PreferenceConfig())
    model = ModelConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1)  # fmt: skip
    for measure, words in (
        ("sources", r"and batches of the loader 'train' do not say .*load\.source_ids"),
        ("bits_per_byte", "but the tokenizer of this data is not known"),
    ):
        with pytest.raises(ConfigError, match=f"train.measure: {measure}, {words}"):
            Trainer(model, settings(tmp_path, measure=(measure,)), Arithmetic())
    with pytest.raises(ConfigError, match=r"train\.measure: has no effect on a loss from Python"):
        Trainer(model, settings(tmp_path, measure=NAMES[2:]), Arithmetic(), loss=lambda *_: 0)
    smoothed = settings(tmp_path, loss=LossConfig(label_smoothing=0.1))
    with pytest.raises(ConfigError, match=r"train\.loss: has no effect on a loss from Python"):
        Trainer(model, smoothed, Arithmetic(), loss=lambda *_: 0)
