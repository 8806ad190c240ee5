"""A model named by its folder is trained, saved and looked at: from Python in one line, and from
the command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file

from easypipe import (
    ConfigError,
    DatasetConfig,
    LoraConfig,
    MissingFileError,
    PipelineConfig,
    PretrainedConfig,
    StateError,
    Trainer,
    train_bpe,
)
from easypipe.cli.app import run as command
from easypipe.compat.trainer import _pipeline
from easypipe.core.config import from_dict
from easypipe.jobs import with_tokenizer_of
from easypipe.train import load_pretrained
from easypipe.train.finished import load_trained
from easypipe.train.model.lora import merge_lora
from easypipe.train.model.pretrained import peft
from easypipe.train.model.pretrained.files import WeightFiles
from easypipe.train.model.pretrained.peft import load_adapters, save_adapters
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import texts
from train.hf_support import CONFIGS, tensors, token_ids, write_model
from train.runs import Arithmetic, settings

VOCAB = 300
FAMILY = CONFIGS["qwen2.5"] | {"vocab_size": VOCAB, "tie_word_embeddings": True}
LORA = LoraConfig(rank=2)
call = nnx.jit(lambda module, ids: module(ids))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vocabulary that is padded beyond its tokenizer's."""
    folder = tmp_path_factory.mktemp("published") / "model"
    train_bpe(texts(60), 280, ["<|endoftext|>"], folder)
    weights = tensors(FAMILY)
    random = np.random.default_rng(0)
    weights["model.embed_tokens.weight"] = 0.3 * random.standard_normal(
        (VOCAB, FAMILY["hidden_size"])
    ).astype(np.float32)
    return write_model(folder, FAMILY, weights)


def options(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    data = [DatasetConfig(name="text", data_files={"text": texts(120)})]
    optimizer = {"learning_rate": 0.01}
    values = {
        "data": data,
        "seq_length": 64,
        "batch_size": 8,
        "steps": 3,
        "optimizer": optimizer,
        "output_dir": tmp_path / "run",
    }
    return values | changes


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One line: a folder, data, a run with adapters."""
    folder = tmp_path_factory.mktemp("tuned")
    given = options(folder, lora=LORA)
    given["data"] = PipelineConfig(datasets=given["data"], seed=1)  # batches that do not vary
    return Trainer(str(model), **given).run()


def test_a_named_model_is_tuned_in_one_line_and_saved_for_transformers(
    model: Path, tuned: Any, tmp_path: Path
) -> None:
    assert tuned.last["loss"] < tuned.first["loss"]
    saved = tuned.save(tmp_path / "out")
    assert (saved / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    before, after = load_file(model / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("proj.weight")}
    ids = token_ids()[:, :32]
    np.testing.assert_allclose(call(load_pretrained(saved), ids), call(tuned.model, ids), atol=1e-4)
    ledger = json.loads((tuned.output_dir / "ledger.json").read_text())
    assert ledger
    recorded = yaml.safe_load((tuned.output_dir / "run.yaml").read_text())
    assert recorded["model"]["pretrained"] == str(model)
    assert recorded["data"]["default_tokenizer"] == str(model)


def test_nothing_but_config_json_is_read_before_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, folder: Path) -> None:
        raise AssertionError(f"{folder} was opened")

    monkeypatch.setattr(WeightFiles, "__init__", refuse)
    trainer = Trainer(
        PretrainedConfig(pretrained=model, dtype="bfloat16"), settings(tmp_path), Arithmetic()
    )
    assert {leaf.dtype.name for leaf in trainer.layout.params.values()} == {"float32"}
    with pytest.raises(AssertionError, match="was opened"):
        trainer.run()
    frozen = Trainer(
        PretrainedConfig(pretrained=model, dtype="bfloat16"),
        settings(tmp_path, lora=LORA),
        Arithmetic(),
    ).layout
    assert {leaf.dtype.name for leaf in frozen.params.values()} == {"float32"}
    assert {frozen.rest[name].dtype.name for name in frozen.frozen} == {"bfloat16"}


def test_options_of_a_pretrained_model_are_those_of_its_decoder(
    model: Path, tmp_path: Path
) -> None:
    changes = {
        "dtype": "bfloat16",
        "param_dtype": "bfloat16",
        "remat": "full",
        "attention": "xla",
        "scan_layers": False,
    }
    named = PretrainedConfig(pretrained=model, **changes)  # type: ignore[arg-type]
    config = Trainer(named, settings(tmp_path), Arithmetic()).origin.config
    assert config is not None
    assert {name: getattr(config, name) for name in changes} == changes


def test_a_hub_name_is_trained_at_the_commit_that_it_has_today(model: Path, tmp_path: Path) -> None:
    """From the cache of the Hub's client, in a process of its own: it reads its environment
    once.
    """
    commit = "b" * 40
    snapshot = tmp_path / "hub" / "models--tiny--one" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    program = f"""
from easypipe import DatasetConfig, PretrainedConfig, Trainer
from easypipe.core.errors import MissingFileError
data = [DatasetConfig(name="text", data_files={{"text": {texts(40)!r}}})]
options = dict(data=data, seq_length=64, batch_size=8, steps=1, output_dir={str(tmp_path / "run")!r})
try:
    Trainer(PretrainedConfig(pretrained="tiny/one", revision="other"), **options)
except MissingFileError as error:
    print(error)
print(Trainer("tiny/one", **options).run().steps)
"""
    env = {
        **os.environ,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "model.pretrained: tiny/one: no such folder, and the Hugging Face Hub cannot be "
        "reached" in done.stdout
    )
    assert done.stdout.endswith("1\n")
    assert (
        yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["model"]["revision"] == commit
    )


def test_adapters_go_to_peft_and_back(model: Path, tuned: Any, tmp_path: Path) -> None:
    folder = save_adapters(tuned.model, tmp_path / "adapters", base=model)
    written = json.loads((folder / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(model)
    assert (written["r"], written["lora_alpha"], written["use_rslora"]) == (2, 16.0, False)
    assert written["target_modules"] == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    arrays = load_file(folder / "adapter_model.safetensors")
    assert arrays["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (
        2,
        FAMILY["intermediate_size"],
    )
    assert arrays["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (
        FAMILY["hidden_size"],
        2,
    )
    again = load_adapters(load_pretrained(model), folder)
    ids = token_ids()[:, :32]
    np.testing.assert_array_equal(call(again, ids), call(tuned.model, ids))
    stabilized = written | {"use_rslora": True}  # whose scale is alpha / sqrt(rank)
    (folder / "adapter_config.json").write_text(json.dumps(stabilized))
    other = save_adapters(
        load_adapters(load_pretrained(model), folder), tmp_path / "other", base=model
    )
    assert json.loads((other / "adapter_config.json").read_text()) == stabilized
    for change, message in (
        ({"use_dora": True}, "adapter_config.json: use_dora: True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' is not supported"),
        ({"lora_alpha": "x"}, "adapter_config.json: does not fit this decoder"),
        (
            {"r": 3},
            r"not the adapters of this decoder; wrong: base_model.* is \[2, 48\], not \[3, 48\]",
        ),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(written | change))
        with pytest.raises((ConfigError, StateError), match=message):
            load_adapters(load_pretrained(model), folder)
    decoder = load_pretrained(model)
    for key in peft._NEUTRAL:
        (folder / "adapter_config.json").write_text(json.dumps(written | {key: "odd"}))
        with pytest.raises(ConfigError, match=rf"adapter_config\.json: {key}: 'odd' is not supp"):
            load_adapters(decoder, folder)
    for key in ("r", "lora_alpha"):
        (folder / "adapter_config.json").write_text(
            json.dumps({name: value for name, value in written.items() if name != key})
        )
        with pytest.raises(StateError, match="does not fit this decoder"):
            load_adapters(decoder, folder)
    (folder / "adapter_config.json").write_text(json.dumps(written))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(StateError, match=r"safetensors: is not a whole safetensors file"):
        load_adapters(decoder, folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(MissingFileError, match=r"no such file.*pickles are not read"):
        load_adapters(decoder, folder)
    with pytest.raises(ConfigError, match="has no adapters that PEFT knows"):
        save_adapters(merge_lora(tuned.model), tmp_path / "none")


def test_a_run_is_exported_and_written_with_from_the_command_line(
    model: Path, tuned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tuned.output_dir)
    assert command(["export", run, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    exported, saved = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(tuned.save(tmp_path / "same") / "model.safetensors"),
    )
    assert all(np.array_equal(exported[name], saved[name]) for name in saved)
    assert command(["export", run, str(tmp_path / "adapters"), "--adapters"]) == 0
    capsys.readouterr()
    greedy = ["the", "and some", "--max-new-tokens", "5", "--temperature", "0"]
    assert command(["generate", run, *greedy]) == 0
    by_run = capsys.readouterr().out
    assert command(["generate", str(tmp_path / "out"), *greedy]) == 0
    assert capsys.readouterr().out == by_run
    assert by_run.startswith("the")
    assert command(["generate", str(tmp_path / "out"), "the", "--step", "2"]) == 2
    assert "is not a run that has checkpoints" in capsys.readouterr().err
    assert command(["generate", run, "the", "--dtype", "bfloat16"]) == 2
    assert "--dtype: has no effect on the run" in capsys.readouterr().err
    assert command(["export", run, str(tmp_path / "x"), "--step", "99"]) == 2
    assert "no checkpoint of step 99 (have: 3)" in capsys.readouterr().err.replace("\n", " ")
    assert command(["export", str(tmp_path), str(tmp_path / "x")]) == 2
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    capsys.readouterr()
    assert command(["export", str(tmp_path / "begun"), str(tmp_path / "x")]) == 2
    assert "the run has saved no checkpoint yet" in capsys.readouterr().err.replace("\n", " ")


def test_a_finished_run_knows_its_base(model: Path, tuned: Any, tmp_path: Path) -> None:
    trained = load_trained(tuned.output_dir)
    assert (trained.step, trained.base, trained.tokenizer) == (3, str(model), str(model))
    for a, b in zip(
        jax.tree.leaves(nnx.state(trained.model)),
        jax.tree.leaves(nnx.state(tuned.model)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    other = load_pretrained(model)
    other.embedding[...] = jnp.zeros_like(other.embedding[...])
    with pytest.raises(
        StateError, match=r"adapters were trained on other weights: embedding differ"
    ):
        load_trained(tuned.output_dir, base=other)


def test_a_config_names_a_model_and_its_tokenizer_is_taken(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts(120))
    )
    values = {
        "data": {
            "datasets": [{"data_files": str(tmp_path / "rows.jsonl")}],
            "seed": 1,
            "cache_dir": str(tmp_path / "cache"),
            "pack": {"seq_length": 64},
            "load": {"batch_size": 8},
        },
        "model": {"pretrained": str(model)},
        "train": {"output_dir": str(tmp_path / "run"), "steps": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert command(["prepare", str(tmp_path / "run.yaml")]) == 0
    assert (
        command(
            ["train", str(tmp_path / "run.yaml"), "--set", "train.lora.rank=2", "--samples", "1"]
        )
        == 0
    )
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    assert command(["train", str(tmp_path / "run.yaml"), "--set", "train.lora.ranc=2"]) == 2
    assert "train.lora.ranc: unknown key" in capsys.readouterr().err
    assert command(["train", str(tmp_path / "run.yaml"), "--set", "model.hidden_size=4"]) == 2
    assert "model.hidden_size: unknown key" in capsys.readouterr().err


def test_a_config_of_data_may_be_a_dict() -> None:
    values = {"datasets": [{"name": "d", "data_files": "a.txt"}], "pack": {"seq_length": 32}}
    wanted = _pipeline("data", from_dict(PipelineConfig, values), 64, 8)
    for given in (values, {"data": values, "train": {"steps": 1}}):
        assert _pipeline("data", given, 64, 8) == wanted


def test_a_tokenizer_that_the_stage_names_is_kept(model: Path) -> None:
    for named in ({"default_tokenizer": "own"}, {"tokenize": {"default_tokenizer": "own"}}):
        data = from_dict(PipelineConfig, {"datasets": [{"data_files": "a.txt"}], **named})
        assert with_tokenizer_of(data, PretrainedConfig(pretrained=str(model))) is data


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"seq_length": None},
            ConfigError,
            "seq_length: datasets alone do not say how long a row is",
        ),
        ({"data": None}, ConfigError, "data: either it or a loader"),
        ({"data": 3}, ConfigError, "data: int is not data"),
        ({"data": {"datasetz": []}}, ConfigError, "data.datasetz: unknown key"),
        ({"stepz": 3}, ConfigError, "stepz: no such option of Trainer .*Did you mean 'steps'"),
    ],
)
def test_bad_calls_are_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], kind: type, message: str
) -> None:
    with pytest.raises(kind, match=message):
        Trainer(str(model), **options(tmp_path, **changes))


def test_a_vocabulary_that_is_too_small_and_a_model_that_is_not_there(
    model: Path, tmp_path: Path
) -> None:
    train_bpe(texts(200), 340, ["<|endoftext|>"], tmp_path / "tokenizer")
    data = [
        DatasetConfig(
            name="text", data_files={"text": texts(120)}, tokenizer=str(tmp_path / "tokenizer")
        )
    ]
    assert load_tokenizer(str(tmp_path / "tokenizer")).vocab_size > VOCAB
    with pytest.raises(
        ConfigError,
        match=rf"model.pretrained: has a vocabulary of {VOCAB}, but the tokenizer .* has 3.. "
        r"tokens",
    ):
        Trainer(str(model), **options(tmp_path, data=data))
    with pytest.raises(MissingFileError, match=r"model.pretrained: .*none: no such folder"):
        Trainer(str(tmp_path / "none"), **options(tmp_path))
    with pytest.raises(ConfigError, match="float is not a model"):
        Trainer(3.5, settings(tmp_path), Arithmetic())
