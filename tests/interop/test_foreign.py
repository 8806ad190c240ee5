"""Configs of axolotl, TRL and LLaMA-Factory, as their repositories have them, as configs of ours."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from chat_support import chat_tokenizer, talk
from easypipe import DatasetConfig, Pipeline
from easypipe.cli import main
from easypipe.core.config import from_dict, load_yaml
from easypipe.core.errors import ConfigError
from easypipe.interop.foreign.rules import ForeignConfig
from easypipe.interop.foreign.tools import TOOLS, import_config, lines_left
from easypipe.run import RunConfig

FILES = sorted((Path(__file__).parent / "foreign").glob("*.yaml"))


def of(name: str) -> tuple[str, Path]:
    path = next(path for path in FILES if path.stem == name)
    return name.partition("-")[0], path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_is_carried_or_told(path: Path) -> None:
    tool = path.stem.partition("-")[0]
    made = import_config(tool, path)
    said = {*made.carried, *(re.match(r"\w+", key)[0] for key in made.left)}  # type: ignore[index]
    assert said >= set(load_yaml(path))
    assert not [why for why in made.left.values() if "no key of this name" in why]
    run = from_dict(RunConfig, made.config)
    assert run.model.pretrained


def test_five_of_each_are_tried() -> None:
    for tool in TOOLS:
        assert sum(path.stem.startswith(f"{tool}-") for path in FILES) >= 5, tool


def test_what_axolotl_s_keys_become() -> None:
    made = import_config(*of("axolotl-lora-8b"))
    run = from_dict(RunConfig, made.config)
    assert run.train.lora is not None
    assert (run.train.lora.rank, run.train.lora.alpha, run.train.lora.targets) == (32, 16, ("*",))
    assert run.data.pack is not None
    assert (run.data.pack.seq_length, run.data.pack.strategy) == (4096, "first_fit")
    assert run.data.load is not None
    assert (run.data.load.batch_size, run.data.load.num_epochs) == (8, 4)
    assert run.train.accumulate_steps == 4
    assert run.train.optimizer.name == "adamw"
    assert run.data.datasets[0].prompt.format_type == "alpaca"
    for key in ("load_in_8bit", "lora_dropout", "lora_modules_to_save", "warmup_ratio"):
        assert key in made.left, key
    assert "8-bit" in made.left["optimizer"]

    run = from_dict(RunConfig, import_config(*of("axolotl-fft-8b-liger-fsdp")).config)
    assert run.train.mesh == "fsdp"
    assert run.data.datasets[0].prompt.format_type == "sharegpt"
    assert run.data.datasets[0].split == "train[:20%]"
    assert run.train.optimizer.warmup_steps == 100
    run = from_dict(RunConfig, import_config(*of("axolotl-instruct-dpo-lora-8b")).config)
    assert run.train.preference is not None
    prompt = run.data.datasets[0].prompt
    assert (prompt.inputs, prompt.label) == (("conversation",), "chosen")
    assert (prompt.rejected_column, prompt.train_on) == ("rejected", "completion")
    run = from_dict(RunConfig, import_config(*of("axolotl-qlora-1b")).config)
    assert set(run.train.lora.targets) == {"query", "key", "value", "output", "gate", "up", "down"}


TURNS: list[tuple[str, dict[str, object], list[str]]] = [
    ("roles_to_train: [gpt]\ntrain_on_eos: turn", {}, []),
    ("roles_to_train: [human, gpt]", {"roles_to_train": ("user", "assistant")}, []),
    ("train_on_eos: last", {"train_on_eos": "last"}, []),
    ("roles_to_train:\ntrain_on_eos:", {"train_on": "completion"}, []),
    ("train_on_eos:", {"train_on_eos": "none"}, []),
    ("train_on_eos: all", {}, ["datasets[0].train_on_eos"]),
    ("train_on_eot: last", {}, ["datasets[0].train_on_eot"]),
    ("roles_to_train: [judge, user]", {"roles_to_train": ("user",)}, ["datasets[0].roles_to_train"]),
    (
        "roles_to_train: []\nmessage_field_training: train_it",
        {"roles_to_train": (), "message_fields": {"train": "train_it"}},
        [],
    ),
    (
        "message_field_training_detail: train_detail",
        {"message_fields": {"train_ranges": "train_detail"}, "roles_to_train": ("assistant",)},
        [],
    ),
    (  # as axolotl's page on conversations has it
        "field_messages: messages\nmessage_property_mappings:\n  role: from\n  content: value\n"
        "roles_to_train: []\ntrain_on_eos: turn\nmessage_field_training: train\n"
        "message_field_training_detail: train_detail",
        {
            "format_type": "sharegpt",
            "roles_to_train": (),
            "message_fields": {"train_ranges": "train_detail"},
        },
        [],
    ),
    (
        "message_field_role: who\nmessage_field_content: said",
        {"message_fields": {"role": "who", "content": "said"}},
        [],
    ),
    ("message_field_role: from\nmessage_field_content: value", {"format_type": "sharegpt"}, []),
    ("message_property_mappings: {role: from, content: text}", {"format_type": "sharegpt", "message_fields": {"content": "text"}}, []),
    ("message_property_mappings: {name: who}", {}, ["datasets[0].message_property_mappings"]),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "expected", "left"), TURNS, ids=lambda value: str(value)[:40])
def test_whose_turns_axolotl_trains_is_carried(
    keys: str, expected: dict[str, object], left: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    own = keys.replace("\n", "\n    ")
    file.write_text(
        "base_model: m\nchat_template: chatml\ndatasets:\n  - path: rows.jsonl\n    "
        f"type: chat_template\n    {own}\n"
    )
    made = import_config("axolotl", file)
    dataset = from_dict(DatasetConfig, made.config["data"]["datasets"][0])
    if expected:
        found = dataset.prompt
        assert {name: getattr(found, name) for name in expected} == expected
        assert (found.inputs, found.template) == (("messages",), "chatml")
    else:
        assert (dataset.content_field, dataset.chat_template) == ("messages", "chatml")
        assert (dataset.prompt, dataset.train_on, dataset.train_on_eos) == (None, None, None)
    assert [key for key in made.left if key.startswith("datasets")] == left


def test_keys_that_axolotl_reads_of_no_preferences(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "base_model: m\nchat_template: chatml\nrl: dpo\ndatasets:\n"
        "  - {path: a.jsonl, type: chat_template.default, message_field_training: train_it}\n"
        "  - {path: b.jsonl, type: chatml.intel, field_chosen: good, message_field_role: who}\n"
    )
    made = import_config("axolotl", file)
    one, other = (from_dict(DatasetConfig, row).prompt for row in made.config["data"]["datasets"])
    assert (one.inputs, one.label, one.message_fields) == (("messages",), "chosen", None)
    assert (other.label, other.message_fields) == ("good", {"role": "who"})
    assert made.left.pop("datasets, its rows")
    assert made.left == {
        "datasets[0].message_field_training": "theirs does not read it of preferences either",
        "datasets[1]": "type 'chatml.intel' of preferences is not known here: chat_template",
    }


@pytest.mark.parametrize(
    ("tool", "key"), [("axolotl", "train_on_inputs"), ("llamafactory", "train_on_prompt")]
)
@pytest.mark.parametrize("value", [True, False])
def test_prompts_are_trained_where_asked(tool: str, key: str, value: bool, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"base_model: m\nmodel_name_or_path: m\n{key}: {str(value).lower()}\ndataset: rows.jsonl\n"
        "datasets:\n  - path: rows.jsonl\n    type: alpaca\n"
    )
    made = import_config(tool, file)
    [dataset] = made.config["data"]["datasets"]
    found = dataset | dataset.get("prompt", {})
    assert found.get("train_on") == ("all" if value else None)
    assert key not in made.left


def test_what_the_others_keys_become() -> None:
    made = import_config(*of("trl-zephyr-dpo-qlora"))
    run = from_dict(RunConfig, made.config)
    assert run.train.preference.beta == 0.01
    assert run.train.checkpoint.every == 100
    assert (run.data.tokenize.max_length, run.data.pack.seq_length) == (1024, 2048)
    assert [one.split for one in run.data.datasets] == ["train_prefs"]
    assert "torch_dtype" in made.left
    run = from_dict(RunConfig, import_config(*of("trl-smollm-sft")).config)
    assert len(run.data.datasets) == 10
    assert run.data.datasets[0].content_field == "messages"
    assert "<|im_start|>" in run.data.datasets[0].chat_template
    assert run.train.callbacks.wandb
    assert run.train.callbacks.tensorboard
    run = from_dict(RunConfig, import_config(*of("trl-gpt2-nl-cpt")).config)
    assert (run.data.datasets[0].subset, run.data.datasets[0].content_field) == ("tiny", "text")
    run = from_dict(RunConfig, import_config(*of("llamafactory-v1-lora-dpo")).config)
    assert (run.model.pretrained, run.train.lora.rank) == ("Qwen/Qwen3-4B", 16)
    run = from_dict(RunConfig, import_config(*of("llamafactory-lora-reward")).config)
    assert run.train.preference.loss == "reward"
    made = import_config(*of("llamafactory-lora-kto"))
    run = from_dict(RunConfig, made.config)
    assert (run.train.preference.loss, run.train.preference.beta) == ("kto", 0.1)
    assert run.data.pack.seq_length == run.data.tokenize.max_length
    assert run.data.datasets[0].num_rows == 1000
    assert run.eval["held_out"].datasets


def test_axolotl_s_other_ways_of_training() -> None:
    run = from_dict(RunConfig, import_config(*of("axolotl-qlora-orpo")).config)
    assert (run.train.preference.loss, run.train.preference.beta) == ("orpo", 0.1)
    run = from_dict(RunConfig, import_config(*of("axolotl-pretrain-tiny-llama")).config)
    assert run.data.streaming
    [dataset] = run.data.datasets
    assert (dataset.data_files, dataset.subset, dataset.content_field) == (
        "allenai/c4", "en", "text"
    )  # fmt: skip


ROWS = {
    "axolotl-qlora-1b-kto": {"prompt": "What?", "completion": "That.", "label": True},
    "axolotl-qlora-orpo": {
        "messages": talk("What?"),
        "chosen": talk("What?", "That.")[1:],
        "rejected": talk("What?", "No.")[1:],
    },
    "trl-zephyr-orpo-full": {
        "chosen": talk("What?", "That."),
        "rejected": talk("What?", "No."),
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_answers_are_packed_as_the_losses_take_them(name: str, tmp_path: Path) -> None:
    made = import_config(*of(name))
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[name]) + "\n")
    made.config.pop("eval", None)  # the one row is trained
    data = made.config["data"]
    [dataset] = data["datasets"]
    data |= {"default_tokenizer": chat_tokenizer(), "cache_dir": str(tmp_path / "cache")}
    for key in ("type", "split"):
        dataset.pop(key, None)
    dataset["data_files"] = str(tmp_path / "rows.jsonl")
    data["load"] = {"batch_size": 1, "num_epochs": 1}
    config = from_dict(RunConfig, made.config).data
    (batch,) = Pipeline.from_config(config).source().tokenize().pack().load().build()
    answers = 1 if name.endswith("kto") else 2
    assert batch["segment_ids"].max() == answers
    assert batch["segment_ids"].shape[1] == answers * config.tokenize.max_length


@pytest.mark.parametrize(
    ("text", "left", "targets"),
    [
        ("lora_target_linear: false", [], ("query", "value")),  # PEFT's own
        ("lora_target_linear: true", [], ("*",)),
        ("lora_target_modules: 7", ["lora_target_modules"], ("query", "value")),
    ],
)
def test_projections_that_are_off_or_no_list(
    text: str, left: list[str], targets: object, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"base_model: m\nadapter: lora\ndatasets: [{{path: a.jsonl, type: alpaca}}]\n{text}\n"
    )
    made = import_config("axolotl", file)
    assert {*made.carried, *made.left} == {
        "base_model",
        "adapter",
        "datasets",
        text.partition(":")[0],
    }
    assert [*made.left] == left
    assert tuple(made.config["train"]["lora"]["targets"]) == targets


def test_every_whole_per_cent_of_a_mixer_is_a_split(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    mixer = {f"a/d{n}": n / 100 for n in range(1, 101)} | {"a/e": 0.125, "a/f": 5000}
    path.write_text(
        yaml.safe_dump({"model_name_or_path": "gpt2", "dataset_mixer": mixer}, sort_keys=False)
    )
    made = import_config("trl", path)
    splits = [one["split"] for one in made.config["data"]["datasets"]]
    assert splits == [f"train[:{n}%]" for n in range(1, 100)] + ["train", "train", "train"]
    left = [told for told in made.left if "dataset_mixer" in told]
    what = ("train of a/e", "train of a/f", "its rows", "their columns")
    assert left == [f"dataset_mixer, {of}" for of in what]


def test_a_key_without_a_value_is_as_if_it_were_left_out(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = (
        "base_model: m\ndatasets:\n- {path: a.jsonl, type: chat_template, roles_to_train: [user],\n"
        "   message_field_training: train_it}\n- path: b.jsonl\n  chat_template: x\n"
    )
    path.write_text(text)
    whole = import_config("axolotl", path)
    path.write_text(f"{text}chat_template: y\nrl:\nmicro_batch_size:\n")
    made = import_config("axolotl", path)
    assert made.config == whole.config
    assert made.left.keys() - whole.left.keys() == {"chat_template"}
    assert made.carried["rl"] == made.carried["micro_batch_size"] == "is empty"
    assert [line for line in lines_left(made, path) if "line 7, chat_template" in line]


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, path = of("axolotl-lora-8b")
    out = tmp_path / "sft.yaml"
    assert main(["import", tool, str(path), "--out", str(out)]) == 0
    assert out.read_text().startswith("# yaml-language-server: $schema=easypipe.schema.json\n")
    assert (out.parent / "easypipe.schema.json").is_file()
    said = capsys.readouterr().out
    number = path.read_text().splitlines().index("load_in_8bit: true") + 1
    assert f"line {number}, load_in_8bit: easypipe does not quantize weights" in said
    assert RunConfig.load(out).train.lora is not None
    assert f"line {number}, load_in_8bit" in out.read_text()
    assert main(["import", tool, str(path), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["import", tool, str(path), "--out=~/sft.yaml"]) == 2
    out.write_text("")
    assert main(["import", tool, str(path), "--out", str(out), "--force"]) == 0
    assert RunConfig.load(out).train.lora is not None
    capsys.readouterr()
    assert main(["import", tool, str(path)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["pretrained"]


def test_a_key_that_nobody_knows_and_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    rows = "datasets: [{path: a.jsonl, type: alpaca}]\n"
    path.write_text(f"base_model: m\nsurprise: 1\nnum_epochs: 1.5\noptimizer: [lion]\n{rows}")
    made = import_config("axolotl", path)
    assert made.left["surprise"] == "easypipe has no key of this name"
    assert made.left["optimizer"] == "['lion'] is not known here"
    assert "not a whole number" in made.left["num_epochs"]
    path.write_text("learning_rate: 1\n")
    with pytest.raises(ConfigError, match="names no model"):
        import_config("trl", path)
    path.write_text("model_name_or_path: m\ninfer_backend: vllm\n")
    with pytest.raises(ConfigError, match="names no dataset, so nothing can be trained"):
        import_config("llamafactory", path)
    with pytest.raises(ConfigError, match="no importer for 'unsloth'"):
        import_config("unsloth", path)


def test_files_that_entries_name(tmp_path: Path) -> None:
    """Of this machine, of a dataset of the Hub and of its revision; several of them."""
    entries = [
        {"path": "json", "data_files": ["a.json", "b.json"], "name": "web"},
        {"path": "owner/pairs", "data_files": "x/a.json", "name": "web", "revision": "v1"},
        {"path": "owner/pairs", "name": "web", "revision": "v1", "split": "train"},
    ]
    made = {}
    for tool, model in (("axolotl", "base_model"), ("trl", "model_name_or_path")):
        path = tmp_path / f"{tool}.yaml"
        path.write_text(yaml.safe_dump({model: "m", "datasets": entries}))
        made[tool] = import_config(tool, path)
        local, named, whole = from_dict(RunConfig, made[tool].config).data.datasets
        assert local.data_files == ["a.json", "b.json"]
        assert local.subset is None
        assert named.data_files == "hf://datasets/owner/pairs@v1/x/a.json"
        assert (whole.data_files, whole.subset, whole.split) == ("owner/pairs", "web", "train")
        assert whole.revision == "v1"
        assert made[tool].left["datasets[0].name"] == made[tool].left["datasets[1].name"]


@pytest.mark.parametrize(
    ("tool", "given", "wanted"),
    [
        ("trl", {"loss_type": "sigmoid"}, {"loss": "sigmoid"}),
        ("trl", {"beta": 0.2, "label_smoothing": 0.1}, {"beta": 0.2, "label_smoothing": 0.1}),
        ("trl", {"loss_type": "ipo", "label_smoothing": 0.1}, {"label_smoothing": 0.0}),
        ("trl", {"beta": 0.2, "precompute_ref_log_probs": True}, {"reference": "cached"}),
        ("trl", {"undesirable_weight": 1.33}, {"loss": "kto", "undesirable_weight": 1.33}),
        ("trl", {"loss_type": "ipo", "desirable_weight": 2.0}, {"desirable_weight": 1.0}),
        ("trl", {"loss_type": "simpo", "simpo_gamma": 0.7}, {"margin": 0.7}),
        ("trl", {"loss_type": "nll"}, None),
        ("llamafactory", {"stage": "kto", "kto_chosen_weight": 2.0}, {"desirable_weight": 2.0}),
        ("llamafactory", {"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 1.0}, {"margin": 1}),
        ("llamafactory", {"stage": "dpo", "dpo_label_smoothing": 0.1}, {"label_smoothing": 0.1}),
    ],
)
def test_options_of_preferences_that_files_spell_out(
    tool: str, given: dict, wanted: dict | None, tmp_path: Path
) -> None:
    path = tmp_path / "theirs.yaml"
    data = {"dataset_name" if tool == "trl" else "dataset": "owner/pairs"}
    path.write_text(yaml.safe_dump({"model_name_or_path": "m", **data, **given}))
    made = import_config(tool, path)
    assert {*given} <= {*made.carried}
    run = from_dict(RunConfig, made.config)
    if wanted is None:
        assert run.train.preference is None
        return
    assert {name: getattr(run.train.preference, name) for name in wanted} == wanted
    assert run.data.pack.oversize == "drop"  # whole answers, also where the section is empty
    if tool == "trl":
        prompt = run.data.datasets[0].prompt
        assert (prompt.desirable_column is not None) == (wanted.get("loss") == "kto")


LORA = {
    "trl": {"use_peft": True},
    "llamafactory": {"finetuning_type": "lora"},
    "axolotl": {"adapter": "lora"},
}
SCHEDULE = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("tool", "given", "path", "wanted"),
    [
        ("trl", LORA["trl"], "train.lora", {"rank": 16, "alpha": 32, "targets": ["query", "value"]}),
        ("llamafactory", LORA["llamafactory"], "train.lora", {"rank": 8, "alpha": 16}),
        ("llamafactory", LORA["llamafactory"] | {"lora_rank": 32}, "train.lora", {"alpha": 64}),
        ("trl", {}, "train.optimizer", {"learning_rate": 2e-5}),
        ("trl", {"beta": 0.1}, "train.optimizer", {"learning_rate": 1e-6}),
        ("llamafactory", {}, "train.optimizer", {"learning_rate": 5e-5}),
        ("axolotl", {"max_steps": 200}, "train.optimizer", {"warmup_steps": 6}),
        ("axolotl", {"max_steps": 9000}, "train.optimizer", {"warmup_steps": 100}),
        ("axolotl", {"max_steps": 200, "warmup_steps": 0}, "train.optimizer", {"warmup_steps": None}),
        ("axolotl", {"max_steps": 200, "warmup_steps": 0.5}, "train.optimizer", {"warmup_steps": None}),
        ("trl", {}, "data.pack", {"seq_length": 1024}),
        ("trl", {"max_length": None}, "data.pack", {"seq_length": None}),
        ("llamafactory", {}, "data.tokenize", {"max_length": 2048}),
        (
            "llamafactory",
            {"micro_batch_size": 2, "per_device_train_batch_size": 5},
            "data.load",
            {"batch_size": 2},
        ),
        ("axolotl", {}, "data.tokenize", {"max_length": 512}),
        (
            "trl",
            SCHEDULE | {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            "train.optimizer",
            {"final_fraction": 0.1},
        ),
        (
            "trl",
            SCHEDULE | {"lr_scheduler_kwargs": '{"min_lr": 2.5e-5}'},
            "train.optimizer",
            {"final_fraction": 0.25},
        ),
        (
            "trl",
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 3.0}},
            "train.optimizer",
            {"power": 3.0, "final_fraction": 0.0},
        ),
    ],
)  # fmt: skip
def test_what_files_leave_out_is_as_their_tools_have_it(
    tool: str, given: dict, path: str, wanted: dict, tmp_path: Path
) -> None:
    rows = {
        "axolotl": {"base_model": "m", "datasets": [{"path": "a.jsonl", "type": "alpaca"}]},
        "trl": {"model_name_or_path": "m", "dataset_name": "o/a"},
        "llamafactory": {"model_name_or_path": "m", "dataset": "a"},
    }
    made = imported(tool, tmp_path, **rows[tool], **given)
    from_dict(RunConfig, made.config)
    found = made.part(path)
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("tool", "given", "policy"),
    [
        ("axolotl", {"pretraining_dataset": [{"path": "o/a", "type": "pretrain"}]}, "split"),
        ("axolotl", {"datasets": [{"path": "o/a", "type": "completion"}]}, "split"),
        ("axolotl", {"datasets": [{"path": "o/a", "type": "chat_template"}]}, "drop"),
        (
            "axolotl",
            {
                "datasets": [{"path": "o/a", "type": "chat_template"}],
                "excess_length_strategy": "truncate",
            },
            "keep_start",
        ),
        ("axolotl", {"datasets": [{"path": "o/a", "type": "alpaca"}]}, None),
        ("llamafactory", {"dataset": "a", "stage": "pt"}, "split"),
        ("llamafactory", {"dataset": "a", "stage": "pt", "packing": False}, None),
        ("llamafactory", {"dataset": "a", "stage": "sft"}, None),
        ("trl", {"dataset_name": "o/a", "packing": True}, None),
        ("trl", {"dataset_name": "o/a", "packing": True, "packing_strategy": "bfd_split"}, "split"),
        ("trl", {"dataset_name": "o/a", "packing": True, "packing_strategy": "wrapped"}, "split"),
        ("trl", {"dataset_name": "o/a", "packing_strategy": "bfd_split"}, None),
    ],
)
def test_rows_that_are_too_long_become_what_they_become_there(
    tool: str, given: dict, policy: str | None, tmp_path: Path
) -> None:
    model = {"base_model" if tool == "axolotl" else "model_name_or_path": "m"}
    run = from_dict(RunConfig, imported(tool, tmp_path, **model, **given).config)
    [dataset] = run.data.datasets
    assert (dataset.length and dataset.length.policy) == policy
    assert run.data.pack.seq_length
    if given.get("packing_strategy") == "wrapped":
        assert run.data.pack.strategy == "concat"


def test_an_unknown_way_with_long_rows_is_listed(tmp_path: Path) -> None:
    given = {"base_model": "m", "datasets": [{"path": "o/a", "type": "chat_template"}]}
    made = imported("axolotl", tmp_path, **given, excess_length_strategy="cut")
    assert made.left["excess_length_strategy"] == (
        "'cut' is not known here: drop, truncate, raise are"
    )
    assert made.config["data"]["datasets"][0]["length"] == {"policy": "drop"}


def test_a_config_of_rewards_is_none_of_preferences(tmp_path: Path) -> None:
    given = {"reward_funcs": ["accuracy"], "num_generations": 4, "beta": 0.0}
    made = imported("trl", tmp_path, model_name_or_path="m", dataset_name="o/a", **given)
    assert {*given} <= {*made.left}
    assert from_dict(RunConfig, made.config).train.preference is None


def test_llamafactory_s_history_and_new_tokens(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    given = {"mask_history": True, "new_special_tokens": "<a>, <b>", "resize_vocab": True}
    path.write_text(yaml.safe_dump({"model_name_or_path": "m", "dataset": "talks", **given}))
    run = from_dict(RunConfig, import_config("llamafactory", path).config)
    assert list(run.model.add_tokens) == ["<a>", "<b>"]
    assert run.data.datasets[0].train_on == "last_assistant"


def imported(tool: str, tmp_path: Path, **given: object) -> ForeignConfig:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(given))
    made = import_config(tool, path)
    assert not [why for why in made.left.values() if "no key of this name" in why]
    return made


@pytest.mark.parametrize(
    ("given", "mix", "epochs"),
    [
        ({}, {"stop_strategy": "all_exhausted"}, 3),
        (
            {"mix_strategy": "concat", "interleave_probs": "1"},
            {"stop_strategy": "all_exhausted"},
            3,
        ),
        (
            {"mix_strategy": "interleave_under", "interleave_probs": "0.3, 0.7"},
            {"stop_strategy": "first_exhausted", "weights": {"dataset1": 0.3, "dataset2": 0.7}},
            3,
        ),
        ({"mix_strategy": "interleave_once"}, {"stop_strategy": "all_exhausted"}, 3),
        ({"mix_strategy": "interleave_over"}, {"stop_strategy": "restart"}, None),
    ],
)
def test_how_llamafactory_mixes_datasets(
    given: dict, mix: dict, epochs: int | None, tmp_path: Path
) -> None:
    made = imported("llamafactory", tmp_path, model_name_or_path="m", dataset="a, b", **given)
    run = from_dict(RunConfig, made.config)
    assert {name: getattr(run.data.mix, name) for name in mix} == mix
    assert run.data.load.num_epochs == epochs
    assert ("mix_strategy" in made.left) == (epochs is None)
    assert ("dataset, its rows" in made.left) == ("weights" not in mix)
    assert not run.data.validate()
    alone = imported("llamafactory", tmp_path, model_name_or_path="m", dataset="a", **given)
    assert from_dict(RunConfig, alone.config).data.mix is None or "weights" in mix
    unknown = imported(
        "llamafactory", tmp_path, model_name_or_path="m", dataset="a,b", mix_strategy="random"
    )
    assert "mix_strategy" in unknown.left


def test_several_datasets_of_every_tool_end(tmp_path: Path) -> None:
    two = [{"path": "a.jsonl", "type": "alpaca"}, {"path": "b.jsonl", "type": "alpaca"}]
    axolotl = imported("axolotl", tmp_path, base_model="m", datasets=two, num_epochs=2)
    trl = imported(
        "trl", tmp_path, model_name_or_path="m", datasets=[{"path": "o/a"}, {"path": "o/b"}]
    )
    for made in (axolotl, trl):
        run = from_dict(RunConfig, made.config)
        assert run.data.mix.stop_strategy == "all_exhausted"
        assert not run.data.validate()
        assert "data.mix.weights" in made.left["datasets, its rows"]


THEIRS = {
    "axolotl": {"base_model": "m", "datasets": [{"path": "o/a", "type": "chat_template"}]},
    "trl": {"model_name_or_path": "m", "dataset_name": "o/a"},
    "llamafactory": {"model_name_or_path": "m", "dataset": "a"},
}
UNSET = "not set"
MIXTURE = {"datasets": [{"id": "o/a", "split": "train_sft"}], "test_split_size": 0.1}
PEFT = {"use_peft": True}
CACHED = {"precompute_ref_log_probs": True}


@pytest.mark.parametrize(
    ("tool", "given", "part", "becomes"),
    [
        ("trl", {"bf16": "auto"}, "model", {"dtype": "bfloat16"}),
        ("trl", {"torch_dtype": "float32"}, "model", {"dtype": "float32"}),
        ("trl", {"gradient_checkpointing": False}, "model", {"remat": "none"}),
        ("trl", {"neftune_noise_alpha": 5}, "train", {"neftune_alpha": 5}),
        ("trl", {"neftune_noise_alpha": 0}, "train", {"neftune_alpha": UNSET}),
        ("trl", {"max_grad_norm": 0.0}, "train.optimizer", {"clip_norm": None}),
        ("trl", {"deepspeed": "zero3.json"}, "train", {"mesh": "fsdp"}),
        ("trl", {"deepspeed": False}, "train", {"mesh": UNSET}),
        ("trl", {"save_strategy": "no"}, "train.checkpoint", {"every": None}),
        ("trl", {"save_strategy": "steps", "save_steps": 7}, "train.checkpoint", {"every": 7}),
        ("trl", {"eval_strategy": "steps", "eval_steps": 9}, "train", {"eval_every": 9}),
        ("trl", {"eval_strategy": "steps"}, "train", {"eval_every": 500}),
        ("trl", {"eval_steps": 9}, "train", {"eval_every": UNSET}),
        ("axolotl", {"eval_steps": 9}, "train", {"eval_every": 9}),
        ("trl", {"dataset_mixture": MIXTURE}, "eval", {"held_out": {"from": "data", "fraction": 0.1}}),
        ("trl", {"dataset_mixture": MIXTURE}, "data.datasets", {"split": "train_sft"}),
        ("trl", PEFT | {"lora_target_modules": "all-linear"}, "train.lora", {"targets": ["*"]}),
        ("trl", PEFT | {"lora_target_modules": ["q_proj"]}, "train.lora", {"targets": ["query"]}),
        ("trl", CACHED | {"loss_type": "ipo"}, "train.preference", {"reference": "cached"}),
        ("trl", CACHED | {"loss_type": "kto"}, "train.preference", {"reference": UNSET}),
        ("trl", {"loss_type": "ipo", "max_length": 512}, "data.pack", {"seq_length": 1024}),
        ("trl", {"loss_type": "kto", "max_length": 512}, "data.pack", {"seq_length": 512}),
        ("trl", {"max_length": 512}, "data.pack", {"seq_length": 512, "oversize": UNSET}),
        ("trl", {"packing": False}, "data.pack", {"enabled": False}),
        ("trl", {"packing_strategy": "wrapped"}, "data.pack", {"strategy": UNSET}),
        ("trl", {"warmup_ratio": 0.1, "max_steps": 95}, "train.optimizer", {"warmup_steps": 10}),
        ("axolotl", {"max_steps": 1000}, "train.optimizer", {"warmup_steps": 30}),
        ("axolotl", {"max_steps": 9000}, "train.optimizer", {"warmup_steps": 100}),
        ("axolotl", {"max_steps": 90, "warmup_ratio": 0}, "train.optimizer", {"warmup_steps": UNSET}),
        ("axolotl", {"max_steps": 90}, "data.load", {"num_epochs": None}),
        ("axolotl", {}, "data.load", {"num_epochs": 1}),
        ("trl", {}, "data.load", {"num_epochs": 3, "batch_size": 8}),
        ("trl", {"gradient_accumulation_steps": 4}, "data.load", {"batch_size": 32}),
        ("llamafactory", {"mask_history": False}, "data.datasets", {"train_on": UNSET}),
        ("llamafactory", {"train_on_prompt": True}, "data.datasets", {"train_on": "all"}),
        ("llamafactory", {"finetuning_type": "lora", "lora_rank": 4}, "train.lora", {"alpha": 8}),
        ("llamafactory", {"finetuning_type": "full", "lora_rank": 4}, "train", {"lora": UNSET}),
        ("llamafactory", {"val_size": 0.1}, "eval.held_out", {"fraction": 0.1}),
        ("llamafactory", {"val_size": 0}, "eval", {"held_out": UNSET}),
    ],
)  # fmt: skip
def test_what_a_value_becomes(
    tool: str, given: dict, part: str, becomes: dict, tmp_path: Path
) -> None:
    named = {"model_name_or_path": "m"} if "dataset_mixture" in given else THEIRS[tool]
    made = imported(tool, tmp_path, **named, **given)
    found = made.part(part)
    [found] = found if isinstance(found, list) else [found]
    assert {name: found.get(name, UNSET) for name in becomes} == becomes
    from_dict(RunConfig, made.config)


@pytest.mark.parametrize(
    ("tool", "key", "value", "told"),
    [
        ("trl", "packing_strategy", "wrapped", ""),
        ("trl", "packing_strategy", "bfd_split", ""),
        ("trl", "packing_strategy", "worst_fit", "'worst_fit' is not known here"),
        ("trl", "report_to", ["wandb", "comet"], "'comet' is not known here"),
        ("trl", "report_to", "none", ""),
        ("trl", "load_in_4bit", True, "easypipe does not quantize weights"),
        ("trl", "load_in_4bit", False, ""),
        ("trl", "fp16", True, "products are of bfloat16 or float32"),
        ("trl", "torch_dtype", "float16", "products are of bfloat16 or float32"),
        ("trl", "logging_steps", 0, "train.log_every counts from 1"),
        ("trl", "max_steps", -1, ""),
        ("trl", "logging_steps", 0.1, "0.1 is not a whole number"),
        ("trl", "warmup_ratio", 0.1, "train.optimizer.warmup_steps counts steps"),
        ("trl", "save_strategy", "epoch", "train.checkpoint.every counts steps"),
        ("llamafactory", "val_size", 100, "eval.held_out.fraction is a share of the rows"),
        ("llamafactory", "peft_config", {"name": "lora", "lora_dropout": 0.1}, "adapters have no"),
        ("llamafactory", "peft_config", {"name": "lora", "lora_dropout": 0}, ""),
        ("llamafactory", "peft_config", {"name": "oft"}, "is not known here: {name: lora} is"),
        ("axolotl", "resume_from_checkpoint", False, "is off there, and here: a run goes on"),
    ],
)
def test_what_is_told_of_a_value(
    tool: str, key: str, value: object, told: str, tmp_path: Path
) -> None:
    """A value without a counterpart is told with its reason; any other is carried."""
    made = imported(tool, tmp_path, **THEIRS[tool], **{key: value})
    said = [why for name, why in made.left.items() if name.split(".")[0] == key]
    assert len(said) == bool(told)
    assert all(told in why for why in said)
    assert said or key in made.carried or f"{key}.lora_dropout" in made.carried


@pytest.mark.parametrize("value", [True, False])
def test_llamafactory_s_thoughts(value: bool, tmp_path: Path) -> None:
    made = imported(
        "llamafactory", tmp_path, model_name_or_path="m", dataset="a", enable_thinking=value
    )
    [dataset] = from_dict(RunConfig, made.config).data.datasets
    assert dataset.chat_template_kwargs == {"enable_thinking": value}
    assert (dataset.train_empty_thinking is not False) == value
    assert ("enable_thinking" in made.left) != value


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("llamafactory", {"model_name_or_path": "m", "dataset": "a", "streaming": True}),
        ("axolotl", {"base_model": "m", "datasets": [{"path": "a.jsonl", "type": "alpaca"}], "streaming": True}),
        ("trl", {"model_name_or_path": "m", "dataset_name": "o/a", "dataset_streaming": True}),
    ],
)  # fmt: skip
def test_streams_are_streams(tool: str, given: dict, tmp_path: Path) -> None:
    assert imported(tool, tmp_path, **given).config["data"]["streaming"] is True


def test_held_out_datasets_are_those_that_files_name(tmp_path: Path) -> None:
    rows = {"path": "o/a", "type": "chat_template", "split": "train"}
    made = imported(
        "axolotl", tmp_path, base_model="m", chat_template="chatml", datasets=[rows],
        test_datasets=[{**rows, "split": "test"}],
    )  # fmt: skip
    run = from_dict(RunConfig, made.config)
    [held] = run.eval["held_out"].datasets
    assert (held.split, held.content_field, held.chat_template) == ("test", "messages", "chatml")
    given = {"model_name_or_path": "m", "dataset_name": "o/a", "dataset_config": "en"}
    made = imported("trl", tmp_path, **given, dataset_test_split="test", eval_strategy="steps")
    [held] = from_dict(RunConfig, made.config).eval["held_out"].datasets
    assert (held.data_files, held.subset, held.split) == ("o/a", "en", "test")
    made = imported("trl", tmp_path, **given, dataset_test_split="test")
    assert "eval" not in made.config
    made = imported(
        "llamafactory", tmp_path, model_name_or_path="m", dataset="a", eval_dataset="b,c",
        max_samples=9,
    )  # fmt: skip
    held = from_dict(RunConfig, made.config).eval["held_out"].datasets
    assert [(one.data_files, one.num_rows) for one in held] == [
        ("data/b.json", 9),
        ("data/c.json", 9),
    ]
