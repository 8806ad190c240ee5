"""What every key of other tools' configs becomes: in `easypipe import`, and written into ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from easypipe.compat.trainer import TrainingConfig
from easypipe.core.config import from_dict, to_dict
from easypipe.core.errors import EasypipeError
from easypipe.core.foreign_names import OURS
from easypipe.interop.foreign.rules import OPTIMIZERS, PROJECTIONS, SCHEDULES
from easypipe.interop.foreign.tools import TOOLS, import_config
from easypipe.run import RunConfig
from easypipe.train.config import PreferenceLoss
from golden.cases import golden
from golden.limits import classes

VALUES = (True, False, 0, 3, 0.25, "a word")  # tried of every key, with those of its own
_TARGETS = ("all", ["all-linear"], "q_proj, other", *PROJECTIONS)
_LOSSES = (*get_args(PreferenceLoss), "sigmoid", ["sigmoid"], ["ipo"])
_PART = {"path": "rows.jsonl", "type": "alpaca"}
_MIXED = {"id": "a/b", "split": "train_sft", "weight": 0.5}
OF_KEY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("optim", "optimizer"), (*OPTIMIZERS,)),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), (*SCHEDULES,)),
    **dict.fromkeys(("bf16", "bfloat16"), ("auto", "full")),
    **dict.fromkeys(("dtype", "torch_dtype"), ("bfloat16", "float32", "float16", "auto")),
    **dict.fromkeys(("lora_target", "lora_target_modules", "lora_target_linear"), _TARGETS),
    **dict.fromkeys(("pref_loss", "loss_type"), _LOSSES),
    **dict.fromkeys(("fsdp", "deepspeed"), ([], ["full_shard"], "zero3.json")),
    **dict.fromkeys(("adapter", "finetuning_type"), ("lora", "qlora", "full", "none")),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), ("steps", "epoch", "no")),
    **dict.fromkeys(("save_strategy", "logging_strategy"), ("steps", "epoch", "no")),
    **dict.fromkeys(("template", "chat_template"), ("chatml", "default", "{% if a %}{% endif %}")),
    **dict.fromkeys(("max_steps", "warmup_steps", "save_total_limit"), (-1, 3.0, 1.5)),
    "report_to": ("wandb", "tensorboard", "all", "none", ["wandb", "tensorboard"]),
    "rl": ("dpo", "kto", "orpo", "grpo"),
    "stage": ("sft", "pt", "dpo", "kto", "rm", "ppo"),
    "peft_config": ({"name": "lora", "r": 4, "lora_dropout": 0.1, "target_modules": "all"},),
    "pretraining_dataset": ([{"path": "a/b", "type": "pretrain", "text_column": "body"}],),
    "tokens": (["<a>"], {"bos_token": "<s>"}),
    "datasets": ([_PART], [{**_PART, "type": "completion", "field": "body"}], [{"type": "alpaca"}]),
    "dataset": ("one,two", ["one", "two"]),
    "dataset_name": ("a/b", "rows.jsonl"),
    "dataset_mixer": ({"a/b": 0.5, "rows.jsonl": 1.0},),
    "dataset_mixture": ({"datasets": [_MIXED], "test_split_size": 0.25},),
}
# Keys that others decide about, and those others
_ADAPTED = {"axolotl": {"adapter": "lora"}, "trl": {"use_peft": True}, "llamafactory": {"finetuning_type": "lora"}}  # fmt: skip
_PAIRS = {"axolotl": {"rl": "dpo"}, "trl": {}, "llamafactory": {"stage": "dpo"}}


def everywhere(keys: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return dict.fromkeys(TOOLS, keys)


BESIDE: Mapping[str, tuple[Mapping[str, Mapping[str, Any]], ...]] = {
    "warmup_ratio": (everywhere({"max_steps": 20}),),
    "eval_steps": (everywhere({"eval_strategy": "steps"}),),
    "max_steps": (everywhere({"num_train_epochs": 2, "num_epochs": 2}),),
    "cosine_min_lr_ratio": (everywhere({"lr_scheduler": "cosine"}),),
    "gradient_accumulation_steps": (
        everywhere({"micro_batch_size": 5, "per_device_train_batch_size": 5}),
    ),
    **dict.fromkeys(("sequence_len", "max_length", "cutoff_len", "pref_loss"), (_PAIRS,)),
    **{
        key: (_PAIRS, {"axolotl": {"rl": "kto"}, "trl": {}, "llamafactory": {"stage": "kto"}})
        for key in ("rl_beta", "dpo_beta", "pref_beta", "beta")
    },
    **dict.fromkeys(
        ("kto_desirable_weight", "kto_undesirable_weight"), (everywhere({"rl": "kto"}),)
    ),
    "orpo_alpha": (everywhere({"rl": "orpo"}),),
    "simpo_gamma": (everywhere({"rl": "simpo"}),),
}
_ROWS = {
    "axolotl": {"base_model": "m", "datasets": [_PART]},
    "trl": {"model_name_or_path": "m", "dataset_name": "rows.jsonl"},
    "llamafactory": {"model_name_or_path": "m", "dataset": "one"},
}
# what stands in place of a key that no config can be without
_OTHERS = {
    **dict.fromkeys(("base_model", "model_name_or_path", "dataset_name", "dataset"), "another"),
    "datasets": [{"path": "another.jsonl", "type": "alpaca"}],
}


def flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """(key path, value) of every leaf of a config."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()  # fmt: skip
    for key, inner in items:
        yield from flat(inner, f"{at}.{key}".lstrip("."))
    if not isinstance(value, dict | list) or not value:
        yield at, value


Made = tuple[dict[str, Any], dict[str, str]]


def made(tool: str, given: Mapping[str, Any], folder: Path) -> Made:
    """(the config that theirs becomes, what is said)."""
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump(dict(given)))
    found = import_config(tool, path)
    said = {f"carried {name}": why for name, why in found.carried.items()}
    return found.config, said | {f"left {name}": why for name, why in found.left.items()}


def becomes(tool: str, given: Mapping[str, Any], without: Made, folder: Path) -> dict[str, str]:
    """What of the config that is made, and of what is said, is otherwise without a key."""
    base, before = without
    try:
        config, said = made(tool, given, folder)
    except EasypipeError as error:
        return {"refused": error.problem}
    now, then = dict(flat(config)), dict(flat(base))
    found = {path: repr(value) for path, value in now.items() if then.get(path, then) != value}
    found |= {f"{path} goes": repr(then[path]) for path in then.keys() - now.keys()}
    found |= {name: why for name, why in said.items() if before.get(name) != why}
    try:
        run = dict(flat(to_dict(from_dict(RunConfig, config))))
    except EasypipeError as error:
        return found | {"is refused": str(error.at)}
    other = {path: run[path] for path, value in now.items() if run.get(path, value) != value}
    return found | ({"arrives as": f"{other}"} if other else {})


def told(tool: str, key: str, folder: Path) -> dict[str, str]:
    """By what becomes of a key: the values of which that becomes."""
    beside = [{}, *(one[tool] for one in BESIDE.get(key, ()))]
    if key.startswith("lora_") or key == "use_rslora":
        beside.append(_ADAPTED[tool])
    found: dict[str, list[str]] = {}
    tried = [{k: v for k, v in others.items() if k in TOOLS[tool]} for others in beside]
    for n, others in enumerate(tried):
        if others in tried[:n]:
            continue
        rest = {name: one for name, one in (_ROWS[tool] | others).items() if name != key}
        named = {name: _OTHERS[name] for name in _ROWS[tool]} | rest
        without = made(tool, named, folder)
        for value in (*VALUES, *OF_KEY.get(key, ())):
            became = becomes(tool, {**rest, key: value}, without, folder)
            words = "; ".join(f"{at}: {what}" for at, what in sorted(became.items()))
            for shown in (repr(value), str(value)):
                words = re.sub(rf"(?<![\w.]){re.escape(shown)}(?![\w.])", "VALUE", words)
            where = f"{value!r}" + "".join(f" ({name}: {one})" for name, one in others.items())
            found.setdefault(words or "NOTHING", []).append(where)
    return {words: ", ".join(values) for words, values in found.items()}


@golden()
def imported(folder: Path) -> dict[str, dict[str, str]]:
    """By key and the tools that have it."""
    found: dict[str, dict[str, str]] = {}
    for key in sorted({key for table in TOOLS.values() for key in table}):
        groups: list[tuple[list[str], dict[str, str]]] = []
        for tool in TOOLS:
            if key in TOOLS[tool]:
                words = told(tool, key, folder)
                same = next((tools for tools, other in groups if other == words), None)
                groups.append(([tool], words)) if same is None else same.append(tool)
        found |= {f"{key} of {', '.join(tools)}": words for tools, words in groups}
    return found


@golden()
def left_out(folder: Path) -> dict[str, Any]:
    """What is taken where a file says next to nothing, and beside each optimizer and schedule."""
    found = {tool: made(tool, rows, folder)[0] for tool, rows in _ROWS.items()}
    for key, names in (("optimizer", OPTIMIZERS), ("lr_scheduler", SCHEDULES)):
        for name in names:
            config = made("axolotl", {**_ROWS["axolotl"], key: name}, folder)[0]
            found[name] = config["train"]["optimizer"]
    return found


@golden()
def written_into_ours(folder: Path) -> dict[str, str]:
    """What a refusal says to write in place of a key of theirs."""
    found = {}
    for key in sorted(OURS):
        try:
            from_dict(TrainingConfig, {key: 1})
            found[key] = "taken"
        except EasypipeError as error:
            found[key] = str(error.fix)
    return found


@golden()
def other_names(folder: Path) -> dict[str, dict[str, str]]:
    """By class: the other names of its options, and what it says of keys that stand elsewhere."""
    tables = {
        name: {**getattr(cls, "ALIASES", {}), **getattr(cls, "ELSEWHERE", {})}
        for name, cls in classes().items()
    }
    return {name: table for name, table in tables.items() if table}
