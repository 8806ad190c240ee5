"""New tokens of a published model (`model.add_tokens`): ids, first values, what is trained of them,
and that runs with them resume, are saved and opened again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from easypipe import (
    ConfigError,
    DatasetConfig,
    LoadStageConfig,
    LoraConfig,
    PipelineConfig,
    PretrainedConfig,
    Trainer,
    train_bpe,
)
from easypipe.cli import main
from easypipe.train import load_pretrained, save_pretrained
from easypipe.train import state as states
from easypipe.train.finished import load_trained
from easypipe.train.model.lora import merge_lora
from easypipe.train.model.pretrained.files import OF_TOKENS, GrownFiles
from easypipe.train.model.pretrained.origin import find_pretrained, from_pretrained
from easypipe.train.model.pretrained.peft import save_adapters
from easypipe.train.optim.optimizers import Optimizer
from easypipe.train.parallel.mesh import make_mesh
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import texts
from train.hf_support import CONFIGS, tensors, token_ids, write_model

NEW = ("<|tool|>", "<|think|>")
KNOWN = 280  # tokens before
FIRST = KNOWN
call = nnx.jit(lambda module, ids: module(ids))


def published(folder: Path, vocab: int, *, tied: bool) -> Path:
    train_bpe(texts(60), KNOWN, ["<|endoftext|>"], folder)
    config = CONFIGS["qwen2.5"] | {"vocab_size": vocab, "tie_word_embeddings": tied}
    config["num_hidden_layers"] = 1
    weights, random = tensors(config), np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = random.normal(size=weights[name].shape).astype(np.float32)
    return write_model(folder, config, weights)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary has room for new tokens."""
    return published(tmp_path_factory.mktemp("tied") / "model", 300, tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("untied") / "model", KNOWN, tied=False)


def run(model: Path, folder: Path, steps: int, **options: Any) -> Any:
    rows = [f"{NEW[i % 2]} {text}" for i, text in enumerate(texts(80))]
    data = PipelineConfig(
        datasets=[DatasetConfig(name="text", data_files={"text": rows})],
        seed=1,
        cache_dir=folder.parent / "cache",
    )
    return Trainer(
        PretrainedConfig(pretrained=model, add_tokens=NEW),
        data=data,
        seq_length=32,
        batch_size=8,
        steps=steps,
        optimizer={"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0},
        output_dir=folder,
        **options,
    ).run()


def arrays(module: nnx.Module) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(variable.get_value())
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }


@pytest.mark.parametrize(("kind", "alone"), [("tied", False), ("tied", True), ("untied", True)])
def test_rows_of_new_tokens_begin_as_the_mean_of_all_others(
    kind: str, alone: bool, request: Any
) -> None:
    model: Path = request.getfixturevalue(kind)
    named = PretrainedConfig(pretrained=model, add_tokens=NEW, only_added_tokens=alone)
    origin = from_pretrained(find_pretrained(named), 0, None)
    mesh = make_mesh(devices=jax.devices()[:1])
    with states.on(mesh):
        layout = states.layout_of(nnx.eval_shape(origin.build), mesh, origin.trained)
        state = origin.state(layout, Optimizer(optax.identity()))
        grown: Any = layout.merge(state.params, state.rest)
    assert (set(state.params) <= {"added.embedding", "added.lm_head"}) == alone
    old, new = arrays(load_pretrained(model)), arrays(merge_lora(grown))
    assert grown.config.vocabulary == (300 if len(old["embedding"]) == 300 else 320)
    for name, axis in (("embedding", 0), ("head.kernel", 1)):
        if name in old:
            before, after = np.moveaxis(old[name], axis, 0), np.moveaxis(new[name], axis, 0)
            mean = before[:KNOWN].astype(np.float64).mean(0)
            np.testing.assert_allclose(after[FIRST : FIRST + 2], np.tile(mean, (2, 1)), atol=1e-7)
            np.testing.assert_array_equal(after[:KNOWN], before[:KNOWN])
            np.testing.assert_array_equal(after[FIRST + 2 : len(before)], before[FIRST + 2 :])
    ids = token_ids()[:, :16]
    np.testing.assert_allclose(
        call(grown, ids)[..., :KNOWN], call(load_pretrained(model), ids)[..., :KNOWN], atol=1e-5
    )
    with_new = np.array([[3, FIRST, 5, FIRST + 1]])
    np.testing.assert_allclose(call(grown, with_new), call(merge_lora(grown), with_new), atol=1e-5)


def test_a_part_of_nothing_but_new_rows_is_read_as_their_mean(tied: Path) -> None:
    with GrownFiles(tied, 640, range(KNOWN, 640)) as files:
        whole = files.read(OF_TOKENS[0], (slice(0, 640), slice(None)))
        for part in (slice(320, 640), slice(600, 640), slice(639, 640)):
            np.testing.assert_array_equal(
                files.read(OF_TOKENS[0], (part, slice(None))), whole[part]
            )


def check_saved(whole: Any, tmp_path: Path) -> Any:
    """Opens the run and its export without the cache; gives the model of the newest checkpoint."""
    tokenizer = load_tokenizer(whole.tokenizer)
    assert tokenizer.reference_encode(NEW[0] + NEW[1]) == [FIRST, FIRST + 1]
    shutil.rmtree(tmp_path / "cache")  # and the tokenizer with it
    again = load_trained(tmp_path / "run")
    assert again.tokenizer is not None
    assert load_tokenizer(again.tokenizer).fingerprint == tokenizer.fingerprint
    ids = np.array([[3, FIRST, 5, FIRST + 1]])
    np.testing.assert_array_equal(call(again.model, ids), call(whole.model, ids))
    saved = save_pretrained(again.model, tmp_path / "out", tokenizer=again.tokenizer)
    assert load_tokenizer(str(saved)).fingerprint == tokenizer.fingerprint
    config = json.loads((saved / "config.json").read_text())
    assert config["vocab_size"] == whole.model.config.vocabulary
    assert config["max_window_layers"] == 1  # keys that the model came with stay
    np.testing.assert_allclose(call(load_pretrained(saved), ids), call(whole.model, ids), atol=1e-4)
    return again.model


def test_a_run_with_new_tokens_is_saved_and_opened_again(tied: Path, tmp_path: Path) -> None:
    whole = run(tied, tmp_path / "run", steps=2)
    check_saved(whole, tmp_path)
    table = arrays(whole.model)["embedding"]
    assert np.abs(table[FIRST] - table[FIRST + 1]).max() > 1e-3  # both were trained


def test_adapters_and_new_tokens_are_trained_together_and_resume(
    untied: Path, tmp_path: Path
) -> None:
    options = {"lora": LoraConfig(rank=2), "checkpoint": {"every": 1}}
    whole = run(untied, tmp_path / "run", steps=2, **options)
    trained = check_saved(whole, tmp_path)
    rows, head = arrays(trained)["added.embedding"], arrays(trained)["added.lm_head"]
    assert np.abs(rows[0] - rows[1]).max() > 1e-3
    mean = arrays(load_pretrained(untied))["head.kernel"].mean(axis=1, keepdims=True)
    assert np.abs(head - mean).max(axis=0).min() > 1e-3
    with pytest.raises(ConfigError, match="has new tokens, for which the model that PEFT"):
        save_adapters(trained, tmp_path / "adapters")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    again = run(untied, tmp_path / "run", steps=2, **options)
    assert again.resumed_from == 1
    assert again.last["loss"] == whole.last["loss"]
    np.testing.assert_equal(arrays(again.model), arrays(whole.model))


@pytest.mark.parametrize(
    "template",
    [
        "chatml",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ],
)
def test_a_new_token_that_ends_turns_is_trained_and_stops_generation(
    template: str, tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talks = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "it is so"}]
        for i in range(40)
    ]
    options = {"name": "talks", "content_field": "messages", "chat_template": template}
    data = PipelineConfig(
        datasets=[DatasetConfig(data_files={"messages": talks}, **options)],
        load=LoadStageConfig(num_epochs=None),
        seed=1,
    )
    (tmp_path / "talks.json").write_text(json.dumps(talks[0][:1]))
    found = Trainer(
        PretrainedConfig(pretrained=tied, add_tokens=["<|im_start|>", "<|im_end|>"]),
        data=data,
        seq_length=64,
        batch_size=8,
        steps=30,
        optimizer={"learning_rate": 0.02, "schedule": "constant", "warmup_steps": 0},
        callbacks={
            "samples": {
                "every": 30,
                "messages": str(tmp_path / "talks.json"),
                "max_new_tokens": 30,
                "temperature": 0,
            }
        },
        output_dir=tmp_path / "run",
    ).run()
    assert "ends a turn with" not in caplog.text
    end = FIRST + 1
    assert found.seen.stop_token_ids == (end,)
    out = str(tmp_path / "out")
    assert main(["export", str(tmp_path / "run"), out]) == 0
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"][0] == end
    (line,) = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert [one["text"] for one in json.loads(line)["samples"]] == ["it is so"]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"add_tokens": ["<|endoftext|>"]}, "has the token '<|endoftext|>' already. Leave it out."),
        ({"add_tokens": ["a", "a"]}, "add_tokens[1]: 'a' is listed twice"),
        ({"add_tokens": [""]}, "add_tokens[0]: is empty"),
        ({"only_added_tokens": True}, "only_added_tokens: has no effect without add_tokens"),
        ({"add_tokens": NEW, "only_added_tokens": True}, "has no effect with train.lora"),
    ],
)
def test_what_cannot_be_added_is_refused(named: dict[str, Any], said: str, tied: Path) -> None:
    def build() -> None:
        found = find_pretrained(PretrainedConfig(pretrained=tied, **named))
        from_pretrained(found, 0, LoraConfig())

    with pytest.raises(ConfigError) as caught:
        build()
    assert said in str(caught.value)
    assert str(caught.value).count(caught.value.fix) == 1


def test_tokens_of_another_tokenizer_are_refused(tied: Path, tmp_path: Path) -> None:
    data = PipelineConfig(
        datasets=[DatasetConfig(name="text", data_files={"text": texts(9)})],
        default_tokenizer=str(tied),
    )
    with pytest.raises(ConfigError, match="the tokenizer of the data"):
        Trainer(
            PretrainedConfig(pretrained=tied, add_tokens=NEW),
            data=data,
            seq_length=32,
            steps=1,
            output_dir=tmp_path / "run",
        )
