"""What an exported model's folder says of how it was trained: what ends a turn, how long rows were,
how conversations are written.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError

from easypipe import (
    DatasetConfig,
    Decoder,
    LoadStageConfig,
    ModelConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    Trainer,
    train_bpe,
)
from easypipe.cli import main
from easypipe.core.errors import ConfigError, SourceError, StorageError
from easypipe.train import save_pretrained
from easypipe.train.checkpoint.checkpoint import Checkpoints
from easypipe.train.finished import load_trained
from easypipe.train.model.generate import generate
from easypipe.train.model.pretrained.save import Seen
from easypipe.train.model.writing import Loaded, Writer
from easypipe.transforms.chat.render import load_chat_template, turns_of
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import texts

SHAPE = ModelConfig(vocab_size=300, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
ENDOFTEXT, IM_END = 0, 2
# It ends no turn, and a model that calls a tool stops by opening the result.
ENDLESS = (
    "{% for m in messages %}{{ '<|b|>' if m.role == 'tool' else '<|a|>' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
CHAT: dict[str, Any] = {"content_field": "messages", "chat_template": "chatml"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(
        texts(60), 290, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|a|>", "<|b|>"], folder
    )
    return folder


@pytest.fixture(scope="module")
def tuned(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(tokenizer, folder / "tokenizer")
    talks = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} it is"}]
        for i in range(60)
    ]
    one = DatasetConfig(name="talks", data_files={"messages": talks}, tokenizer="tokenizer", **CHAT)
    data = PipelineConfig(datasets=(one,), seed=7)
    how: dict[str, Any] = {
        "seq_length": 48,
        "batch_size": 4,
        "steps": 2,
        "optimizer": {"learning_rate": 0.01},
    }
    with contextlib.chdir(folder):
        return Trainer(SHAPE, data=data, output_dir=folder / "run", **how).run()


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_a_tuned_model_says_what_ends_a_turn_how_long_rows_were_and_how_it_was_asked(
    tuned: Any, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        saved = tuned.save(tmp_path / "saved")
        assert main(["export", str(tuned.output_dir), str(tmp_path / "exported")]) == 0
    finally:
        os.umask(before)
    for folder in (saved, tmp_path / "exported"):
        config, generation = read(folder, "config.json"), read(folder, "generation_config.json")
        assert (config["eos_token_id"], config["max_position_embeddings"]) == (IM_END, 48)
        assert generation["eos_token_id"] == [IM_END, ENDOFTEXT]
        assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATES["chatml"]
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes.pop("model.safetensors") == 0o640
        assert not [name for name in modes if name.startswith(".")]
        assert set(modes.values()) == {0o640}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_a_run_that_averages_its_weights_exports_the_average(
    tokenizer: Path, tmp_path: Path
) -> None:
    one = DatasetConfig(name="t", data_files={"text": texts(60)}, tokenizer=str(tokenizer))
    how: dict[str, Any] = {
        "data": PipelineConfig(datasets=(one,), seed=7),
        "seq_length": 48,
        "batch_size": 4,
        "steps": 3,
    }

    def run(name: str, **optimizer: Any) -> Any:
        own = {"learning_rate": 0.01, "schedule": "constant", **optimizer}
        return Trainer(SHAPE, output_dir=tmp_path / name, optimizer=own, **how).run()

    averaged, plain = run("averaged", ema_decay=0.9), run("plain")
    assert averaged.last["loss"] == plain.last["loss"]
    there = np.asarray(load_trained(averaged.output_dir).model.embedding[...])
    np.testing.assert_array_equal(there, np.asarray(averaged.model.embedding[...]))
    assert np.abs(there - np.asarray(plain.model.embedding[...])).max() > 1e-4


def test_a_tokenizer_that_was_named_from_the_folder_of_the_run_is_found_from_any(
    tuned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = str(tuned.output_dir.parent / "tokenizer")
    assert tuned.tokenizer == load_trained(tuned.output_dir).tokenizer == beside
    recorded = Checkpoints.run  # before paths were recorded absolute
    monkeypatch.setattr(
        Checkpoints, "run", lambda self, step: recorded(self, step) | {"tokenizer": "tokenizer"}
    )
    assert load_trained(tuned.output_dir).tokenizer == beside


def test_what_was_seen_is_in_the_checkpoint_and_generate_stops_there(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = load_trained(tuned.output_dir).seen
    assert (seen.stop_token_ids, seen.max_length, seen.chat_template) == (
        (IM_END,),
        48,
        CHAT_TEMPLATES["chatml"],
    )
    folder = tuned.save(tmp_path / "saved")
    greedy = ["generate", str(folder), "say 7", "--max-new-tokens", "6", "--temperature", "0"]

    given: list[list[int]] = []

    def watched(*args: Any, **options: Any) -> list[list[int]]:
        given.extend(generate(*args, **options))
        return given[-1:]

    monkeypatch.setattr("easypipe.train.model.writing.generate", watched)
    assert main(greedy) == 0
    unused = next(token for token in range(300) if token not in given[0])
    generation = read(folder, "generation_config.json") | {"eos_token_id": [unused, given[0][-1]]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert main(greedy) == 0
    whole, cut = given
    assert cut == whole[: whole.index(whole[-1])]


def test_conversations_are_answered_by_the_template_that_was_trained(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tuned.output_dir)
    decode = load_tokenizer(load_trained(run).tokenizer or "").decode
    asked: list[str] = []

    def watched(model: Any, prompts: Any, **options: Any) -> list[list[int]]:
        asked.extend(map(decode, prompts))
        assert IM_END in options["eos_token_id"]
        return generate(model, prompts, **options)

    monkeypatch.setattr("easypipe.train.model.writing.generate", watched)
    greedy = ["generate", run, "--max-new-tokens", "4", "--temperature", "0"]
    talks = [[{"role": "user", "content": f"say {n}"}] for n in (3, 4)]
    opened = [f"<|im_start|>user\nsay {n}<|im_end|>\n<|im_start|>assistant\n" for n in (3, 4)]
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(map(json.dumps, [talks[0], {"messages": talks[1]}])))
    assert main([*greedy, "--messages", str(file)]) == 0
    assert asked == opened
    file.write_text(json.dumps(talks[0], indent=1))
    assert main([*greedy, "--messages", str(file)]) == 0
    assert asked == [*opened, opened[0]]
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("say 3\n\nsay 4\n"))
    assert main([*greedy, "--chat"]) == 0
    answer = capsys.readouterr().out.split("\n")[0]
    assert asked[3] == opened[0]
    assert asked[4].startswith(opened[0] + answer)
    assert asked[4].endswith(opened[1])


def test_a_conversation_to_answer_keeps_the_nulls_inside_its_calls_and_tools(tuned: Any) -> None:
    source = load_trained(str(tuned.output_dir)).tokenizer or ""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "z": None}}}
    row = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"name": "f", "default": None}],
    }
    seen = Seen(chat_template="{{ tools | tojson }}{{ messages[0].tool_calls | tojson }}<|im_end|>")
    (text,) = Writer(Loaded(Decoder(SHAPE, nnx.Rngs(0)), source, seen), {}).opened([("row", row)])
    assert text == f"{json.dumps(row['tools'])}{json.dumps([call])}<|im_end|>"


def test_an_answer_is_kept_as_it_is_and_shown_without_what_steers_a_terminal(
    tuned: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tuned.output_dir)
    tokenizer = load_tokenizer(load_trained(run).tokenizer or "")
    asked: list[str] = []

    def answers(model: Any, prompts: Any, **options: Any) -> list[list[int]]:
        asked.extend(map(tokenizer.decode, prompts))
        return [tokenizer.reference_encode("a\x1b[2Jb")]

    monkeypatch.setattr("easypipe.train.model.writing.generate", answers)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["generate", run, "--chat"]) == 0
    assert capsys.readouterr().out == "a\\u{1b}[2Jb\n" * 2
    assert "assistant\na\x1b[2Jb<|im_end|>" in asked[1]


def test_a_published_model_without_a_tokenizer_is_asked_for_one(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_pretrained(Decoder(SHAPE, nnx.Rngs(0)), tmp_path / "m")
    ask = ["generate", str(tmp_path / "m"), "say", "--max-new-tokens", "1"]
    assert main(ask) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "m names no tokenizer. Give the tokenizer that made its tokens." in said
    assert main([*ask, "--tokenizer", str(tokenizer)]) == 0
    assert capsys.readouterr().out.startswith("say")


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["--messages", "FILE"], '[{"role": "user"}]\n{"a"', "line 2: is not JSON"),
        (
            ["--messages", "FILE"],
            '{"messages": "hi"}',
            "talks, line 1, messages: is text, not messages",
        ),
        (
            ["--messages", "FILE"],
            '{"prompt": "How many figs?"}\n{"prompt": "2?"}',
            "line 1, prompt: is text, not messages. Give it as an argument: easypipe generate RUN "
            "'How many figs?'",
        ),
        (
            ["--messages", "FILE"],
            json.dumps({"prompt": "y" * 61}),
            f"Give it as an argument: easypipe generate RUN '{'y' * 60} ...'.",
        ),
        (
            ["--messages", "FILE", "x"],
            "[]",
            "PROMPT: is given together with another kind of prompt",
        ),
        ([], "", "PROMPT: no prompt is given"),
        (["x", "--system", "y"], "", "--system: has no effect without --chat"),
        (["x", "\ud800"], "", r"prompts[1]: '\ud800' is not valid Unicode. Write it again."),
    ],
)
def test_what_cannot_be_asked_is_refused(
    arguments: list[str],
    text: str,
    message: str,
    tuned: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "talks").write_text(text)
    given = [str(tmp_path / "talks") if word == "FILE" else word for word in arguments]
    assert main(["generate", str(tuned.output_dir), *given]) == 2
    assert message in capsys.readouterr().err


def test_a_conversation_brings_its_system_prompt_and_what_its_template_sees(
    tokenizer: Path,
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% if think %}{{ think }}{% endif %}{% endif %}"
    )
    asked: Any = None  # nothing is generated
    writer = Writer(Loaded(asked, str(tokenizer), Seen(chat_template=template)), {})
    talk = [{"role": "user", "content": "a"}]
    row = {"messages": talk, "chat_template_kwargs": {"think": "hm"}, "system": "s"}
    assert writer.opened([("x", row)]) == ["system: s<|im_end|>user: a<|im_end|>assistant: hm"]
    with pytest.raises(SourceError, match=r"x: bad_template_kwargs.*'messages' is not a variable"):
        writer.opened([("x", {"messages": talk, "chat_template_kwargs": {"messages": 1}})])


def test_a_text_is_shown_up_to_its_stop_string(
    tuned: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = ["generate", str(tuned.output_dir), "say 7", "--temperature", "0"]
    assert main([*greedy, "--max-new-tokens", "6"]) == 0
    whole = capsys.readouterr().out.rstrip("\n")
    written = whole[len("say 7") :]
    for stop in (written[1:3], "say"):  # one that stands in the prompt ends nothing there
        assert main([*greedy, "--max-new-tokens", "6", "--stop", stop]) == 0
        shown = "say 7" + written.partition(stop)[0]
        assert capsys.readouterr().out.rstrip("\n") == shown


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", [IM_END]),
        ("zephyr", [ENDOFTEXT]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|a|><|b|>\n{% endfor %}", [4]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}", []),
        ("{% for m in messages %}{{ m.role }}: {{ m.content[0].text }}<|a|>{% endfor %}", [3]),
        (ENDLESS, [4]),
        (
            "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }}<|a|>{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
            [],
        ),
    ],
)
def test_what_ends_a_turn_is_read_off_the_template(
    template: str, expected: list[int], tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_tokenizer(str(tokenizer))
    found = turns_of(
        load_chat_template(loaded, chat_template=template, train_on="all", date=None), loaded
    )
    assert list(found.stop_token_ids) == expected
    said = "ends a turn with '<|end|>', which is not a special or added token of tokenizer"
    assert (said in caplog.text) == ("<|end|>" in template)


def test_a_model_of_text_ends_with_its_tokenizer_and_a_published_one_keeps_what_it_says(
    tokenizer: Path, tmp_path: Path
) -> None:
    decoder = Decoder(SHAPE, nnx.Rngs(0))
    plain = save_pretrained(decoder, tmp_path / "plain", tokenizer=str(tokenizer), max_length=128)
    assert (
        read(plain, "config.json")["eos_token_id"]
        == read(plain, "generation_config.json")["eos_token_id"]
        == ENDOFTEXT
    )
    assert read(plain, "config.json")["max_position_embeddings"] == 128
    assert "chat_template.jinja" not in {path.name for path in plain.iterdir()}
    decoder.hf_config = json.dumps(
        read(plain, "config.json") | {"eos_token_id": [5, 6], "max_position_embeddings": 4096}
    )
    tuned = save_pretrained(
        decoder, tmp_path / "tuned", tokenizer=str(tokenizer), eos_token_id=7, max_length=256
    )
    assert read(tuned, "config.json")["eos_token_id"] == 7
    assert read(tuned, "generation_config.json")["eos_token_id"] == [7, 5, 6, ENDOFTEXT]
    assert read(tuned, "config.json")["max_position_embeddings"] == 4096
    bare = save_pretrained(Decoder(SHAPE, nnx.Rngs(0)), tmp_path / "bare")
    assert read(bare, "generation_config.json") == {}


def test_a_model_goes_into_a_new_folder_or_an_empty_one(tmp_path: Path) -> None:
    decoder = Decoder(SHAPE, nnx.Rngs(0))
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        saved = save_pretrained(decoder, tmp_path / name)
        assert (saved / "model.safetensors").is_file()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / ".hidden").touch()
    (tmp_path / "file").touch()
    for name in ("used", "file", "new"):
        with pytest.raises(ConfigError, match=f"{name}: is there already. Give a new folder"):
            save_pretrained(decoder, tmp_path / name)
    assert [path.name for path in (tmp_path / "used").iterdir()] == [".hidden"]


def test_configs_name_every_special_token_of_the_tokenizer(tmp_path: Path) -> None:
    special = {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7}
    mine = SimpleNamespace(**special, save_pretrained=lambda folder: None)
    saved = save_pretrained(Decoder(SHAPE, nnx.Rngs(0)), tmp_path / "saved", tokenizer=mine)
    for file in ("config.json", "generation_config.json"):
        assert {name: read(saved, file).get(name) for name in special} == special


def test_a_template_goes_where_every_version_of_transformers_looks(
    tokenizer: Path, tmp_path: Path
) -> None:
    values = (
        read(tokenizer, "tokenizer_config.json")
        if (tokenizer / "tokenizer_config.json").is_file()
        else {}
    )
    own = tmp_path / "own"
    own.mkdir()
    (own / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (own / "tokenizer_config.json").write_text(json.dumps(values | {"chat_template": "old"}))
    (own / "chat_template.jinja").write_text("old")
    saved = save_pretrained(
        Decoder(SHAPE, nnx.Rngs(0)),
        tmp_path / "saved",
        tokenizer=str(own),
        chat_template="new {{ messages }}",
    )
    assert (saved / "chat_template.jinja").read_text() == "new {{ messages }}"
    assert read(saved, "tokenizer_config.json")["chat_template"] == "new {{ messages }}"


def test_every_file_of_a_tokenizer_goes_along(tokenizer: Path, tmp_path: Path) -> None:
    files = {
        "tokenizer.json": (tokenizer / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": b'{"model_max_length": 64}',
        "special_tokens_map.json": b'{"eos_token": "<|endoftext|>"}',
        "chat_template.jinja": b"{{ messages }}",
        "tokenizer.model": b"\nthe pieces that older versions read",
    }
    own = tmp_path / "own"
    own.mkdir()
    for name, data in files.items():
        (own / name).write_bytes(data)
    saved = save_pretrained(Decoder(SHAPE, nnx.Rngs(0)), tmp_path / "saved", tokenizer=str(own))
    assert {name: (saved / name).read_bytes() for name in files} == files
    alone = shutil.copy(tokenizer / "tokenizer.json", tmp_path / "mine.json")
    saved = save_pretrained(Decoder(SHAPE, nnx.Rngs(0)), tmp_path / "alone", tokenizer=alone)
    assert (saved / "tokenizer.json").read_bytes() == files["tokenizer.json"]


@pytest.mark.parametrize("packed", [False, True])
def test_saved_conversations_tell_how_they_were_written(
    tokenizer: Path, tmp_path: Path, packed: bool
) -> None:
    talk = [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "1 it is"}]
    dataset = DatasetConfig(
        name="d", data_files={"messages": [talk] * 20}, tokenizer=str(tokenizer), **CHAT
    )
    chain = Pipeline(PipelineConfig(datasets=[dataset], seed=1, cache_dir=tmp_path / "cache"))
    chain.source().tokenize()
    if packed:
        chain.pack(PackStageConfig(seq_length=48))
    chain.save(SaveStageConfig(output_dir=tmp_path / "saved")).build()
    again = [DatasetConfig(name="d", data_files=str(tmp_path / "saved"))]
    data: Any = (
        PipelineConfig(datasets=again, seed=1, load=LoadStageConfig(batch_size=4))
        if packed
        else again
    )
    how: dict[str, Any] = {} if packed else {"seq_length": 48, "batch_size": 4}
    trainer = Trainer(SHAPE, data=data, output_dir=tmp_path / "run", steps=1, **how)
    saved = trainer.run().save(tmp_path / "model")
    assert (saved / "chat_template.jinja").read_text() == CHAT_TEMPLATES["chatml"]
    assert read(saved, "config.json")["eos_token_id"] == IM_END


def test_weights_that_find_no_space_are_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors has an error of its own for a full disk."""

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("easypipe.train.model.pretrained.save.save_file", full)
    with pytest.raises(StorageError, match=r"out: cannot be written: .*No space left.* Check"):
        save_pretrained(Decoder(SHAPE, nnx.Rngs(0)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
