"""Configs of axolotl, TRL and LLaMA-Factory as configs of ours; what cannot be carried is listed.

Each tool is a table: its key → what becomes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from easypipe.core.config import load_yaml
from easypipe.core.errors import ConfigError, require_known
from easypipe.core.values import Json, JsonObject, JsonValue

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
FILES = (".json", ".jsonl", ".parquet", ".csv", ".arrow", ".txt", ".gz", ".zst")
# the projections of ours by the names that PEFT's configs have
PROJECTIONS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
_ADAMW = "adamw", "which has no moments of 8 bits, paged or fused by hand: XLA fuses the update"
OPTIMIZERS = {
    "adamw_torch": ("adamw", ""), "adamw_torch_fused": ("adamw", ""), "adamw_hf": ("adamw", ""),
    "adamw_8bit": _ADAMW, "adamw_bnb_8bit": _ADAMW, "paged_adamw_32bit": _ADAMW,
    "paged_adamw_8bit": _ADAMW, "adafactor": ("adafactor", ""), "muon": ("muon", ""),
    "lion_32bit": ("lion", ""), "lion_8bit": ("lion", "which has no moments of 8 bits"),
    "adamw": ("adamw", ""), "schedule_free_adamw": ("schedule_free", ""),
}  # fmt: skip
SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "polynomial": "polynomial",
    "constant_with_warmup": "constant", "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd", "cosine_with_min_lr": "cosine",
}  # fmt: skip


@dataclass
class ForeignConfig:
    """A config of ours, made of one of theirs.

    Attributes:
        config: What `RunConfig.load` takes.
        carried: By key of theirs, what it became, in words.
        left: By key of theirs, why nothing stands for it, or what differs.
    """

    config: JsonObject = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    dataset: JsonObject = field(default_factory=dict)  # what all datasets have

    def put(self, key: str, path: str, value: JsonValue) -> None:
        """Sets a key path of ours."""
        *outer, last = path.split(".")
        inner = self.config
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = value
        self.say(key, f"{path}: {value}")

    def say(self, key: str, text: str) -> None:
        self.carried[key] = f"{self.carried[key]}, {text}" if key in self.carried else text

    def part(self, path: str) -> JsonObject:
        """What stands at a key path so far."""
        inner = self.config
        for name in path.split("."):
            inner = inner.get(name, {})
        return inner


Rule = Callable[[ForeignConfig, str, Json], None]  # (what is made, key, all of theirs)


def import_config(tool: str, path: str | Path) -> ForeignConfig:
    """A config of `tool` ("axolotl", "trl", "llamafactory") as one of ours.

    Every key of the file is carried or left; none is dropped.

    Raises:
        ConfigError: For an unknown tool, a file that is no mapping, one that names no model, and
            code of strangers (`trust_remote_code` is left, and said).
    """
    require_known(tool, tuple(TOOLS), "tool", f"no importer for {tool!r}")
    given = load_yaml(path)
    made = ForeignConfig()
    table = TOOLS[tool]
    for key, value in given.items():
        if value is None or value == "":
            made.carried[key] = "is empty"
        elif key in table:
            table[key](made, key, given)
        else:
            made.left[key] = "no key of this name is known here"
    _finish(made, tool, given)
    if "model" not in made.config:
        raise ConfigError(
            at=str(path),
            problem=f"names no model, so it is no config of {tool}",
            fix=f"Give a YAML file of {tool}: one of {', '.join(TOOLS)}.",
        )
    return made


def _to(*paths: str) -> Rule:
    """The value as it is."""

    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        value = given[key]
        for path in paths:
            made.put(key, path, value)

    return rule


def _whole(path: str) -> Rule:
    """A number that has to be whole; a share of something is left."""

    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        value = given[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            made.left[key] = f"{value!r} is no whole number, and {path} counts"
        elif value > 0:
            made.put(key, path, int(value))
        else:
            made.carried[key] = "says that there is no limit"

    return rule


def _leave(reason: str) -> Rule:
    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        made.left[key] = reason

    return rule


def _off(reason: str) -> Rule:
    """Left where it is switched on, and nothing where it is off."""

    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        value = given[key]
        if value in (False, 0, "no", "none", "None", [], {}):
            made.carried[key] = "is off"
        else:
            made.left[key] = reason

    return rule


def _needless(text: str) -> Rule:
    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        made.carried[key] = text

    return rule


def _named(path: str, names: Mapping[str, str | tuple[str, str]]) -> Rule:
    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        value = given[key]
        found = names.get(str(value))
        if found is None:
            made.left[key] = f"{value!r} is not known here"
            return
        name, differs = (found, "") if isinstance(found, str) else found
        made.put(key, path, name)
        if differs:
            made.left[key] = f"{value!r} became {name}, {differs}"

    return rule


def _length(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    made.put(key, "data.pack.seq_length", value)
    made.put(key, "data.tokenize.max_length", value)


def _packing(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value:
        made.put(key, "data.pack.strategy", "first_fit")
    else:
        made.put(key, "data.pack.enabled", False)


def _dtype(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if key in ("bf16", "bfloat16") and value in (True, "auto", "full"):
        made.put(key, "model.dtype", "bfloat16")
    elif value in ("bfloat16", "float32"):
        made.put(key, "model.dtype", value)
    elif value in (False, "auto"):
        made.carried[key] = "is off" if value is False else "is left to the other keys"
    else:
        made.left[key] = "products are of bfloat16 or float32"


def _remat(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    made.put(key, "model.remat", "full" if value else "none")


def _adapter(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value in (False, "full", "none"):
        made.carried[key] = "all weights are trained"
    elif value in (True, "lora", "qlora"):
        made.put(key, "train.lora", made.part("train.lora"))
        if value == "qlora":
            made.left[key] = "adapters are trained beside weights that are not quantized"
    else:
        made.left[key] = f"{value!r} is not known here: lora is"


def _lora(name: str) -> Rule:
    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        value = given[key]
        if _has_adapters(given):
            made.put(key, f"train.lora.{name}", value)
        else:
            made.carried[key] = "has no effect there: no adapters are trained"

    return rule


def _has_adapters(given: Json) -> bool:
    said = (given.get("adapter"), given.get("use_peft"), given.get("finetuning_type"))
    return any(one in (True, "lora", "qlora") for one in said)


def _targets(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if not _has_adapters(given):
        made.carried[key] = "has no effect there: no adapters are trained"
        return
    names = value.split(",") if isinstance(value, str) else value
    if value is True or names in (["all"], ["all-linear"]):
        made.put(key, "train.lora.targets", ["*"])
    elif isinstance(names, Sequence):
        known = [PROJECTIONS[name.strip()] for name in names if name.strip() in PROJECTIONS]
        unknown = [name for name in names if name.strip() not in PROJECTIONS]
        if known:
            made.put(key, "train.lora.targets", known)
        if unknown:
            made.left[key] = f"no projection here is called {', '.join(unknown)}"


def _warmup(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    steps = given.get("max_steps")
    if not value:
        made.carried[key] = "is off"
    elif isinstance(value, int | float) and isinstance(steps, int) and steps > 0:
        made.put(key, "train.optimizer.warmup_steps", round(value * steps))
    else:
        made.left[key] = (
            f"train.optimizer.warmup_steps counts steps: `easypipe plan` tells how many the run "
            f"has; take {value} of them"
        )


def _held_out(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if isinstance(value, float) and 0 < value < 1:
        made.put(key, "eval.held_out", {"from": "data", "fraction": value})
    elif value:
        made.left[key] = "eval.held_out.fraction is a share of the rows, not a count"
    else:
        made.carried[key] = "is off"


def _sharded(made: ForeignConfig, key: str, given: Json) -> None:
    made.put(key, "train.mesh", "fsdp")


def _reports(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    for name in [value] if isinstance(value, str) else list(value or ()):
        if name in ("wandb", "tensorboard"):
            made.put(key, f"train.callbacks.{name}", made.part(f"train.callbacks.{name}"))
        elif name not in ("none", "no"):
            made.left[key] = f"{name!r} is not known here: wandb and tensorboard are"
    if key not in made.left:
        made.carried.setdefault(key, "is off")


def _strategy(path: str) -> Rule:
    """`steps` is what ours does; `epoch` and `no` are told."""

    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        value = given[key]
        if value == "steps":
            made.carried[key] = f"{path} counts steps"
        elif value in ("no", False):
            made.carried[key] = "is off"
        else:
            made.left[key] = f"{path} counts steps: `easypipe plan` tells how many make an epoch"

    return rule


def _preference(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value == "dpo":
        made.put(key, "train.preference", made.part("train.preference"))
    else:
        made.left[key] = f"{value!r} is not known here: dpo is"


def _stage(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value in ("sft", "pt"):
        made.carried[key] = "is what a run without train.preference does"
    else:
        _preference(made, key, given)


def _beta(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if {given.get("rl"), given.get("stage")} - {None, "dpo"}:
        made.left[key] = "it belongs to a way of training that is not known here"
    else:
        made.put(key, "train.preference.beta", value)


def _loss(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value in ("sigmoid", ["sigmoid"]):
        made.carried[key] = "is train.preference's"
    else:
        made.left[key] = f"{value!r}: train.preference has the sigmoid loss"


def _template(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if isinstance(value, str) and ("{%" in value or value in ("chatml", "zephyr", "alpaca")):
        made.dataset["chat_template"] = value
        made.say(key, "chat_template of each dataset")
    elif value in ("tokenizer_default", "default"):
        made.carried[key] = "the tokenizer's own is taken"
    else:
        made.left[key] = (
            f"no built-in template is called {value!r}: the tokenizer's own is taken; set "
            "chat_template of the datasets to a .jinja file where it has none"
        )


def _trained(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value:
        made.dataset["train_on"] = "all"
        made.say(key, "train_on: all")
    else:
        made.carried[key] = "answers alone are trained"


def _sources(made: ForeignConfig, datasets: Sequence[JsonObject], key: str) -> None:
    have = made.config.setdefault("data", {}).setdefault("datasets", [])
    have += datasets
    made.say(key, f"data.datasets: {', '.join(str(one['data_files']) for one in datasets)}")


def _from(name: str) -> JsonObject:
    """Where a dataset's rows are: files, or a dataset of the Hub."""
    hub = HUB_NAME.fullmatch(name) and not name.endswith(FILES) and not Path(name).exists()
    return {"data_files": name, "type": "huggingface"} if hub else {"data_files": name}


def _axolotl_datasets(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    found: list[JsonObject] = []
    for number, one in enumerate(value):
        at = f"{key}[{number}]"
        dataset = _from(str(one.get("data_files") or one["path"]))
        kind = str(one.get("type", "")).removesuffix(".default")
        if given.get("rl") == "dpo":
            dataset["prompt"] = {
                "input_columns": [one.get("field_chosen", "chosen")],
                "rejected_column": one.get("field_rejected", "rejected"),
                "train_on": "last_assistant",
            }
            kind = "chat_template"
        elif kind == "alpaca":
            dataset["prompt"] = {"format_type": "alpaca"}
        elif kind == "completion":
            dataset["content_field"] = one.get("field", "text")
        elif kind in ("chat_template", "sharegpt"):
            dataset["content_field"] = one.get("field_messages", "messages")
        else:
            made.left[at] = f"type {kind!r} is not known here: alpaca, chat_template, completion"
        roles = one.get("message_property_mappings") or {}
        names = (
            one.get("message_field_role") or roles.get("role"),
            one.get("message_field_content") or roles.get("content"),
        )
        if names in (("from", "value"), ("role", "content"), (None, None)):
            if names[0] == "from":
                dataset["prompt"] = {
                    "format_type": "sharegpt",
                    "input_columns": [dataset.pop("content_field")],
                }
        else:
            made.left[at] = f"messages with the keys {names}: set message_fields of the dataset"
        for name, path in (("split", "split"), ("name", "subset"), ("revision", "revision")):
            if one.get(name) is not None:
                dataset[path] = one[name]
        known = {
            "path", "type", "data_files", "field", "field_messages", "field_chosen",
            "field_rejected", "message_property_mappings", "message_field_role",
            "message_field_content", "split", "name", "revision", "ds_type",
        }  # fmt: skip
        roles = one.get("roles")
        if roles and all([role] == list(names) for role, names in roles.items()):
            known.add("roles")
        for name in one:
            if name not in known:
                made.left[f"{at}.{name}"] = "no key of this name is known here"
        found.append(dataset)
    _sources(made, found, key)


def _trl_dataset(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    dataset = _from(str(value))
    for name, path in (("dataset_config", "subset"), ("dataset_train_split", "split")):
        if given.get(name):
            dataset[path] = given[name]
    _sources(made, [dataset], key)


def _mixture(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    found: list[JsonObject] = []
    for one in value["datasets"]:
        dataset = _from(one["id"])
        dataset |= {"split": one["split"]} if "split" in one else {}
        dataset |= {"subset": one["config"]} if one.get("config", "default") != "default" else {}
        dataset["split"] = _share(made, key, dataset.get("split", "train"), one.get("weight", 1.0))
        found.append(dataset)
    _sources(made, found, key)
    if value.get("test_split_size"):
        _held_out(made, "test_split_size", value)


def _share(made: ForeignConfig, key: str, split: str, share: float) -> str:
    """A split, or the share of its rows that TRL calls a weight."""
    percent = share * 100
    if percent == 100:
        return split
    if percent == int(percent):
        return f"{split}[:{int(percent)}%]"
    made.left[f"{key}, {split}"] = (
        f"{share} of its rows are no whole per cents: set num_rows of the dataset"
    )
    return split


def _mixer(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    splits = [str(one) for one in given.get("dataset_splits") or ["train"]]
    trained = [one for one in splits if "test" not in one]
    found: list[JsonObject] = []
    for number, (name, share) in enumerate(value.items()):
        configs = given.get("dataset_configs") or ()
        for split in trained:
            part = _share(made, key, split, share)
            found.append({**_from(str(name)), "split": part})
            if number < len(configs):
                found[-1]["subset"] = configs[number]
    _sources(made, found, key)


def _listed(made: ForeignConfig, key: str, given: Json) -> None:
    """LLaMA-Factory's names stand in a dataset_info.json, which is not read."""
    value = given[key]
    names = value.split(",") if isinstance(value, str) else value
    folder = str(given.get("dataset_dir", "data"))
    _sources(made, [{"data_files": f"{folder}/{str(name).strip()}.json"} for name in names], key)
    made.left[key] = (
        f"the files of {value!r} stand in {folder}/dataset_info.json, which is not read: see "
        "data_files, and `easypipe discover` for what is in them"
    )


def _samples(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    made.dataset["num_rows"] = value
    made.say(key, f"num_rows of each dataset: {value}")


def _field(path: str) -> Rule:
    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        value = given[key]
        made.dataset[path] = value
        made.say(key, f"{path} of each dataset: {value}")

    return rule


def _finish(made: ForeignConfig, tool: str, given: Json) -> None:
    """What follows from several keys together."""
    rows = given.get("micro_batch_size", given.get("per_device_train_batch_size"))
    parts = given.get("gradient_accumulation_steps", 1)
    if isinstance(rows, int) and isinstance(parts, int):
        made.config.setdefault("data", {}).setdefault("load", {})["batch_size"] = rows * parts
        made.config.setdefault("train", {})["accumulate_steps"] = parts
        key = "micro_batch_size" if tool == "axolotl" else "per_device_train_batch_size"
        made.left[key] = (
            f"data.load.batch_size is of all devices together: {rows * parts} is for one; "
            "multiply it by their number"
        )
    if made.part("train.preference") and (pack := made.part("data.pack")).get("seq_length"):
        pack["seq_length"] *= 2  # a row holds both answers
    for dataset in made.config.get("data", {}).get("datasets", ()):
        for name, value in made.dataset.items():
            dataset.setdefault(name, value)
        if tool == "trl" and not {"content_field", "prompt"} & set(dataset):
            if "preference" in made.config.get("train", {}) or "beta" in given:
                dataset["prompt"] = {
                    "input_columns": ["chosen"],
                    "rejected_column": "rejected",
                    "train_on": "last_assistant",
                }
            elif given.get("chat_template") or "dataset_mixture" in given:
                dataset["content_field"] = "messages"


_CHOSEN = _needless("the fastest attention of the device is taken")
_SLOW = _leave("quantized weights are not known here: they stay in model.dtype")
_PUSH = _off("a model is pushed after `easypipe export`, by the Hub's own command")
_COMMON: dict[str, Rule] = {
    "output_dir": _to("train.output_dir"),
    "learning_rate": _to("train.optimizer.learning_rate"),
    "weight_decay": _to("train.optimizer.weight_decay"),
    "adam_beta1": _to("train.optimizer.beta1"),
    "adam_beta2": _to("train.optimizer.beta2"),
    "adam_epsilon": _to("train.optimizer.epsilon"),
    "max_grad_norm": _to("train.optimizer.clip_norm"),
    "warmup_steps": _whole("train.optimizer.warmup_steps"),
    "warmup_ratio": _warmup,
    "max_steps": _whole("train.steps"),
    "logging_steps": _whole("train.log_every"),
    "eval_steps": _whole("train.eval_every"),
    "save_steps": _whole("train.checkpoint.every"),
    "save_total_limit": _whole("train.checkpoint.keep"),
    "seed": _to("data.seed", "train.seed"),
    "gradient_accumulation_steps": _needless("train.accumulate_steps, and in data.load.batch_size"),
    "gradient_checkpointing": _remat,
    "gradient_checkpointing_kwargs": _needless("has no counterpart in a compiled step"),
    "bf16": _dtype,
    "fp16": _off("products are of bfloat16 or float32"),
    "tf32": _off("XLA chooses by jax_default_matmul_precision"),
    "attn_implementation": _CHOSEN,
    "trust_remote_code": _off("no code of strangers is run: models are read by family"),
    "load_in_8bit": _off("quantized weights are not known here: they stay in model.dtype"),
    "load_in_4bit": _off("quantized weights are not known here: they stay in model.dtype"),
    "resume_from_checkpoint": _needless("a run goes on from its newest checkpoint"),
    "deepspeed": _sharded,
    "fsdp": _sharded,
    "fsdp_config": _needless("has no counterpart: train.mesh says how arrays are divided"),
    "ddp_timeout": _needless("has no counterpart: processes find each other by train.distributed"),
    "lora_alpha": _lora("alpha"),
    "lora_dropout": _off("adapters have no dropout"),
    "use_rslora": _lora("rank_stabilized"),
    "neftune_noise_alpha": _off("no noise is put on embeddings"),
    "report_to": _reports,
    "hub_model_id": _PUSH,
    "hub_strategy": _PUSH,
    "push_to_hub": _PUSH,
    "group_by_length": _off("data.load.group_by_length is for rows that are not packed"),
}
_TRANSFORMERS: dict[str, Rule] = {
    **_COMMON,
    "model_name_or_path": _to("model.pretrained"),
    "model_revision": _to("model.revision"),
    "torch_dtype": _dtype,
    "dtype": _dtype,
    "num_train_epochs": _whole("data.load.num_epochs"),
    "per_device_train_batch_size": _needless("in data.load.batch_size"),
    "per_device_eval_batch_size": _needless("held-out data takes batches of the same size"),
    "optim": _named("train.optimizer.name", OPTIMIZERS),
    "lr_scheduler_type": _named("train.optimizer.schedule", SCHEDULES),
    "lr_scheduler_kwargs": _leave("see final_fraction and power of train.optimizer"),
    "packing": _packing,
    "eval_strategy": _strategy("train.eval_every"),
    "evaluation_strategy": _strategy("train.eval_every"),
    "save_strategy": _strategy("train.checkpoint.every"),
    "logging_strategy": _strategy("train.log_every"),
    "do_train": _needless("is what the command says"),
    "do_eval": _needless("is done where there is held-out data"),
    "overwrite_output_dir": _leave("a run goes on in its folder: give another one to begin anew"),
    "preprocessing_num_workers": _to("data.tokenize.num_workers"),
    "log_level": _needless("has no effect on what is trained"),
    "remove_unused_columns": _needless("columns that nothing reads are not read"),
    "dataloader_num_workers": _needless(
        "has no counterpart: data.load.prefetch_workers are threads"
    ),
}
_AXOLOTL: dict[str, Rule] = {
    **_COMMON,
    "base_model": _to("model.pretrained"),
    "revision_of_model": _to("model.revision"),
    "model_type": _needless("is read from the model's config"),
    "tokenizer_type": _needless("is read from the model's files"),
    "tokenizer_config": _to("data.default_tokenizer"),
    "strict": _off("unknown keys are always refused"),
    "datasets": _axolotl_datasets,
    "dataset_prepared_path": _to("data.cache_dir"),
    "val_set_size": _held_out,
    "sequence_len": _length,
    "sample_packing": _packing,
    "eval_sample_packing": _needless("held-out data is packed as `data` is"),
    "pad_to_sequence_len": _needless("packed rows are full"),
    "adapter": _adapter,
    "lora_r": _lora("rank"),
    "lora_target_modules": _targets,
    "lora_target_linear": _targets,
    "lora_modules_to_save": _leave("adapters alone are trained, no table beside them"),
    "wandb_project": _to("train.callbacks.wandb.project"),
    "wandb_entity": _to("train.callbacks.wandb.entity"),
    "wandb_name": _to("train.callbacks.wandb.name"),
    "micro_batch_size": _needless("in data.load.batch_size"),
    "num_epochs": _whole("data.load.num_epochs"),
    "optimizer": _named("train.optimizer.name", OPTIMIZERS),
    "lr_scheduler": _named("train.optimizer.schedule", SCHEDULES),
    "cosine_min_lr_ratio": _to("train.optimizer.final_fraction"),
    "bfloat16": _dtype,
    "attention": _CHOSEN,
    "flash_attention": _CHOSEN,
    "xformers_attention": _CHOSEN,
    "sdp_attention": _CHOSEN,
    "early_stopping_patience": _leave("see train.callbacks.early_stopping"),
    "train_on_inputs": _trained,
    "chat_template": _template,
    "evals_per_epoch": _leave("train.eval_every counts steps: `easypipe plan` tells how many"),
    "saves_per_epoch": _leave("train.checkpoint.every counts steps"),
    "eval_max_new_tokens": _needless("nothing is written during an evaluation"),
    "special_tokens": _leave("the tokenizer's own are taken; see data.pack.pad_token_id"),
    "plugins": _leave("no plugins: the loss is fused with the head always"),
    "rl": _preference,
    "rl_beta": _beta,
    "dpo_beta": _beta,
    "loss_watchdog_threshold": _leave("see train.spikes, which goes back to a checkpoint"),
    "loss_watchdog_patience": _leave("see train.spikes"),
    "shuffle_merged_datasets": _needless("documents are drawn in a permuted order"),
    **{
        f"liger_{name}": _needless("XLA fuses it")
        for name in ("rope", "rms_norm", "glu_activation", "fused_linear_cross_entropy")
    },
}
_TRL: dict[str, Rule] = {
    **_TRANSFORMERS,
    "dataset_name": _trl_dataset,
    "dataset_config": _needless("in data.datasets"),
    "dataset_train_split": _needless("in data.datasets"),
    "dataset_test_split": _leave("name its rows under eval.held_out.datasets"),
    "dataset_mixture": _mixture,
    "dataset_mixer": _mixer,
    "dataset_splits": _needless("in data.datasets; those of tests under eval, where there are any"),
    "dataset_configs": _needless("in data.datasets"),
    "dataset_text_field": _field("content_field"),
    "dataset_num_proc": _to("data.tokenize.num_workers"),
    "dataset_kwargs": _needless("what the template writes is taken as it stands"),
    "max_length": _length,
    "max_seq_length": _length,
    "max_prompt_length": _leave("prompts are cut by the length policy of the dataset"),
    "use_peft": _adapter,
    "lora_r": _lora("rank"),
    "lora_target_modules": _targets,
    "lora_task_type": _needless("is what the run says"),
    "chat_template": _template,
    "assistant_only_loss": _needless("is the default of conversations"),
    "completion_only_loss": _needless("is the default of prompts with completions"),
    "beta": _beta,
    "loss_type": _loss,
    "use_liger_kernel": _needless("the loss is fused with the head always"),
}
_LLAMAFACTORY: dict[str, Rule] = {
    **_TRANSFORMERS,
    "stage": _stage,
    "finetuning_type": _adapter,
    "lora_rank": _lora("rank"),
    "lora_target": _targets,
    "dataset": _listed,
    "dataset_dir": _needless("in data.datasets"),
    "template": _template,
    "cutoff_len": _length,
    "max_samples": _samples,
    "overwrite_cache": _needless(
        "a cache is known by its content, and made anew when that changes"
    ),
    "val_size": _held_out,
    "plot_loss": _needless("curves are drawn always"),
    "pref_beta": _beta,
    "pref_loss": _loss,
    "flash_attn": _CHOSEN,
    "train_on_prompt": _trained,
    "quantization_bit": _SLOW,
    "save_only_model": _off("checkpoints hold all that a run needs to go on"),
}
TOOLS: Mapping[str, Mapping[str, Rule]] = {
    "axolotl": _AXOLOTL,
    "trl": _TRL,
    "llamafactory": _LLAMAFACTORY,
}


def lines_left(made: ForeignConfig, path: Path) -> list[str]:
    """What is left, by the line of its key in the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[tuple[int, str]] = []
    for key, why in made.left.items():
        name = re.match(r"\w+", key)
        head = f"{name[0]}:" if name else key
        number = next((n for n, line in enumerate(lines, 1) if line.strip().startswith(head)), 0)
        found.append((number, f"line {number}, {key}: {why}"))
    return [text for _, text in sorted(found)]


def written(made: ForeignConfig, tool: str, path: Path) -> str:
    """The YAML of a config, with what is left in comments above it."""
    comments = [f"# Made of {tool}'s {path.name} by `easypipe import`."]
    if made.left:
        comments.append("# Look at these, for which nothing stands here, or something else:")
        comments += [f"#   {line}" for line in lines_left(made, path)]
    text = yaml.safe_dump(made.config, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(comments) + "\n" + text
