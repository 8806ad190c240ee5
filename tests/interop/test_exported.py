"""`easypipe export --check`: what transformers and PEFT make of an exported folder. The whole matrix
needs torch: `nox -s parity`; without it tokens and ends are compared.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest
import typer
from flax import nnx

from easypipe import train_bpe
from easypipe.cli import main
from easypipe.cli.export import _tell
from easypipe.interop import exported as exported_
from easypipe.interop.exported import differences, token_differences
from easypipe.train import load_pretrained, save_pretrained
from easypipe.train import state as states
from easypipe.train.finished import Trained
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.lora import adapters, add_lora
from easypipe.train.model.pretrained.added import tokenizer_with
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.train.model.pretrained.origin import find_pretrained, from_pretrained
from easypipe.train.model.pretrained.peft import save_adapters
from easypipe.train.model.pretrained.save import Seen
from easypipe.train.optim.optimizers import Optimizer
from easypipe.train.parallel.mesh import make_mesh
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import texts
from train.hf_support import CONFIGS, tensors, write_model

VOCAB, EOS, IM_END = 300, 0, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = Seen(chat_template=CHAT_TEMPLATES["chatml"], stop_token_ids=(IM_END,), max_length=48)
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: nox -s parity"
)
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(texts(60), VOCAB - 4, SPECIAL, folder)
    return folder


def trained(model: Decoder, tokenizer: Path, seen: Seen, base: Path | None = None) -> Trained:
    name = None if base is None else str(base)
    return Trained(model=model, step=1, tokenizer=str(tokenizer), seen=seen, base=name)


def small() -> Decoder:
    shape = ModelConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2
    )
    return Decoder(shape, nnx.Rngs(0))


def exported(run: Trained, folder: Path) -> Path:
    return save_pretrained(run.model, folder, tokenizer=run.tokenizer, **run.seen.options())


@pytest.mark.parametrize("seen", [Seen(), CHAT], ids=["texts", "conversations"])
def test_tokens_and_ends_of_an_export_are_those_of_the_run(
    seen: Seen, tokenizer: Path, tmp_path: Path
) -> None:
    run = trained(small(), tokenizer, seen)
    assert list(token_differences(run, exported(run, tmp_path / "out"))) == []


def _other_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_start|>"))


def _ends(*tokens: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))

    return damage


def _lost_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["added_tokens"] = [
        token for token in values["added_tokens"] if token["id"] not in (IM_END,)
    ]
    path.write_text(json.dumps(values))


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_other_template, "conversation with a question: "),
        (_ends(EOS), "generation ends at the tokens [0], and the run's at [0, 2]"),
        (_ends(EOS, IM_END, 7), "generation ends at the tokens [0, 2, 7], and the run's at [0, 2]"),
        (_ends(7), "generation ends at the tokens [7], and the run's at [0, 2]"),
        (_lost_token, "the text '<|endoftext|> and <|im_start|> and <|im_end|>': "),
        (_no_tokenizer, "the folder has no tokenizer, and the run has one"),
    ],
)
def test_what_transformers_would_do_in_another_way_is_told(
    damage: Any, told: str, tokenizer: Path, tmp_path: Path
) -> None:
    run = trained(small(), tokenizer, CHAT)
    folder = exported(run, tmp_path / "out")
    damage(folder)
    assert any(one.startswith(told) for one in token_differences(run, folder))


def test_a_package_that_is_not_there_is_named_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--check"]) == 2
    said = capsys.readouterr().err
    assert "--check: needs the package torch" in said
    assert "pip install 'easypipe[check]'" in said


def test_differences_are_told_and_end_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    _tell("transformers", [], "logits")
    assert "transformers opens it as it was trained: equal logits" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        _tell("transformers", iter(["one token", "another"]), "logits")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out == "differs: one token\ndiffers: another\n"


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_exports_of_every_family_are_what_was_trained(
    family: str, tokenizer: Path, tmp_path: Path
) -> None:
    config = CONFIGS[family] | {"vocab_size": VOCAB, "bos_token_id": EOS, "eos_token_id": EOS}
    base = exported(
        trained(
            load_pretrained(write_model(tmp_path / "files", config, tensors(config))),
            tokenizer,
            Seen(),
        ),
        tmp_path / "base",
    )
    full = trained(load_pretrained(base), tokenizer, Seen(), base)
    assert list(differences(full, base)) == []
    talked = dataclasses.replace(full, seen=CHAT)
    assert list(differences(talked, exported(talked, tmp_path / "chat"))) == []
    with_lora = add_lora(load_pretrained(base), LoraConfig(rank=3, alpha=5.0), seed=0)
    for i, linear in enumerate(adapters(with_lora).values()):
        linear.lora_b[...] = 0.1 * jax.random.normal(jax.random.key(i), linear.lora_b.shape)
    adapted = dataclasses.replace(full, model=with_lora)
    assert list(differences(adapted, exported(adapted, tmp_path / "merged"))) == []
    alone = save_adapters(with_lora, tmp_path / "alone", base=base)
    assert list(differences(adapted, alone, adapters=True)) == []
    (told,) = differences(adapted, base)
    assert told.startswith("logits differ by up to ")


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("rows_alone", [False, True], ids=["full", "rows"])
@pytest.mark.parametrize("family", CONFIGS)
def test_exports_of_every_family_with_new_tokens_are_what_was_trained(
    family: str, rows_alone: bool, tokenizer: Path, tmp_path: Path
) -> None:
    config = CONFIGS[family] | {"vocab_size": VOCAB, "bos_token_id": EOS, "eos_token_id": EOS}
    files = load_pretrained(write_model(tmp_path / "files", config, tensors(config)))
    base = exported(trained(files, tokenizer, Seen()), tmp_path / "base")
    tokens = [f"<|new {i}|>" for i in range(7)]  # 303 of a vocabulary of 300
    found = find_pretrained(PretrainedConfig(pretrained=base, add_tokens=tokens))
    origin = from_pretrained(found, 0, LoraConfig(rank=3) if rows_alone else None)
    mesh = make_mesh(devices=jax.devices()[:1])
    with states.on(mesh):
        layout = states.layout_of(nnx.eval_shape(origin.build), mesh, origin.trained)
        state = origin.state(layout, Optimizer(optax.identity()))
    moved = {
        name: array + 0.1 * jax.random.normal(jax.random.key(i), array.shape)
        for i, (name, array) in enumerate(state.params.items())
        if rows_alone or name in ("embedding", "head.kernel")
    }
    model = layout.merge(state.params | moved, state.rest)
    grown = tokenizer_with(base, tokens, tmp_path)
    run = trained(model, grown, CHAT, base)
    folder = exported(run, tmp_path / "out")
    assert list(differences(run, folder)) == []
    named = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    assert named.convert_tokens_to_ids(tokens) == list(found.added)
    assert named("a" + tokens[3])["input_ids"][-1] == found.added[3]


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_reward_models_of_every_family_are_what_was_trained(
    family: str, tokenizer: Path, tmp_path: Path
) -> None:
    config = CONFIGS[family] | {"vocab_size": VOCAB, "bos_token_id": EOS, "eos_token_id": EOS}
    model = load_pretrained(write_model(tmp_path / "files", config, tensors(config)))
    model.add_score(0)
    run = trained(model, tokenizer, Seen())
    assert list(differences(run, exported(run, tmp_path / "out"))) == []


@pytest.mark.parametrize(
    ("own", "found", "who"),
    [(None, [1], "the run's template"), ("text", None, "transformers"), (None, None, None)],
)
def test_who_refuses_a_conversation_is_told(
    own: str | None,
    found: list[int] | None,
    who: str | None,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exported_, "written_text", lambda *_: own)
    monkeypatch.setattr(exported_, "applied", lambda *_, **__: found)
    template = CHAT_TEMPLATES["chatml"]
    said = [*exported_._conversations(load_tokenizer(tokenizer), template, SimpleNamespace())]
    assert bool(said) == (who is not None)
    assert all(f": {who} refuses it" in one for one in said)


def test_texts_have_what_tokenizers_differ_in() -> None:
    """Each alone, so that none is there by chance in another."""
    plain, scripts, code = exported_.TEXTS
    for text, pieces in (
        (plain, ("  ", "\n\n", "\t", "12345.67", "!")),
        (scripts, (" a", "ü", "中文", "עברית", "\N{SLIGHTLY SMILING FACE}")),
        (code, ("\n    ", "{'a': x[0]}", "<b>", "</b>", "\r\n")),
    ):
        assert all(piece in text for piece in pieces)
