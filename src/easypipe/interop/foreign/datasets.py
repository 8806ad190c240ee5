"""The rules for datasets of another tool's config: where rows are, how they are read and mixed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from easypipe.core.values import JsonObject
from easypipe.interop.foreign.rules import WAYS, Key, Rule, way
from easypipe.transforms.chat.conversations import MESSAGE_FIELDS, ROLES
from easypipe.transforms.prompt.config import SPEAKERS

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Keys of axolotl's datasets of messages that say which turns are trained on.
OF_TURNS = {
    "roles_to_train",
    "train_on_eos",
    "train_on_eot",
    "message_field_training",
    "message_field_training_detail",
}
# The length policy for text that the other tool splits into rows and easypipe would cut.
SPLIT = {"policy": "split"}
# What axolotl does with rows that are too long, as easypipe's length policies.
EXCESS = {"drop": "drop", "truncate": "keep_start", "raise": "error"}
FILES = (".json", ".jsonl", ".parquet", ".csv", ".arrow", ".txt", ".gz", ".zst")


def _sources(key: Key, datasets: Sequence[JsonObject]) -> None:
    have = key.made.config.setdefault("data", {}).setdefault("datasets", [])
    have += datasets
    key.say(f"data.datasets: {', '.join(str(one['data_files']) for one in datasets)}")


def _held_out(key: Key, datasets: Sequence[JsonObject]) -> None:
    key.made.part("eval", make=True)["held_out"] = {"datasets": list(datasets)}
    key.say(f"eval.held_out.datasets: {', '.join(str(one['data_files']) for one in datasets)}")


def _from(name: str) -> JsonObject:
    """Returns where a dataset's rows are: files, or a dataset of the Hub."""
    hub = HUB_NAME.fullmatch(name) and not name.endswith(FILES) and not Path(name).exists()
    return {"data_files": name, "type": "huggingface"} if hub else {"data_files": name}


def _rows_of(left: dict[str, str], at: str, one: JsonObject) -> JsonObject:
    """Returns where the rows of an entry `at` of a list of datasets are.

    They are in `data_files`, one or several, local or of a dataset of the Hub; else in a dataset of
    the Hub, or in files.
    """
    path, files = str(one.get("path") or ""), one.get("data_files")
    dataset = _from(str(one["path"])) if not files else {}
    if files:
        revision = f"@{one['revision']}" if one.get("revision") else ""
        hub = "/" in path and "type" in _from(path)  # a bare name is a reader: json, parquet
        start = f"hf://datasets/{path}{revision}/" if hub else ""
        names = [start + str(name) for name in ([files] if isinstance(files, str) else files)]
        dataset["data_files"] = names[0] if len(names) == 1 else names
    if one.get("split") is not None:
        dataset["split"] = one["split"]
    for name, key in (("name", "subset"), ("revision", "revision")):
        if one.get(name) is not None and "type" in dataset:
            dataset[key] = one[name]
        elif one.get(name) is not None and (name == "name" or not files):
            left[f"{at}.{name}"] = "files have none"
    return dataset


def axolotl_datasets(key: Key) -> None:
    _sources(key, _axolotl_rows(key))


def axolotl_test_datasets(key: Key) -> None:
    _held_out(key, _axolotl_rows(key))


def _axolotl_rows(key: Key) -> list[JsonObject]:
    """Returns the datasets of axolotl's list; leaves out keys without a counterpart."""
    given, left = key.given, key.made.left
    found: list[JsonObject] = []
    for number, one in enumerate(key.value):
        at = f"{key.name}[{number}]"
        dataset = _rows_of(left, at, one)
        kind = str(one.get("type", "")).removesuffix(".default")
        if way(given) in WAYS:
            if kind != "chat_template":
                left[at] = f"type {kind!r} of preferences is not known here: chat_template"
            dataset["prompt"] = preferred(one, judged=way(given) == "kto")
            kind = "chat_template"
        elif kind == "alpaca":
            dataset["prompt"] = {"format_type": "alpaca"}
        elif kind == "completion":
            dataset |= {"content_field": one.get("field", "text"), "length": dict(SPLIT)}
        elif kind in ("chat_template", "sharegpt"):
            dataset["content_field"] = one.get("field_messages", "messages")
        else:
            left[at] = f"type {kind!r} is not known here: alpaca, chat_template, completion"
        known = {
            "path", "type", "data_files", "field", "field_messages", "field_chosen",
            "field_rejected", "message_property_mappings", "message_field_role",
            "message_field_content", "split", "name", "revision", "ds_type",
        }  # fmt: skip
        if kind in ("chat_template", "sharegpt"):
            asked = str(given.get("excess_length_strategy"))
            dataset["length"] = {"policy": EXCESS.get(asked, EXCESS["drop"])}
            for name in OF_TURNS.intersection(one if "rl" in given else ()):
                left[f"{at}.{name}"] = "theirs does not read it of preferences either"
            prompt = _axolotl_keys(left, at, one, flags="rl" not in given)
            if way(given) in WAYS:
                dataset["prompt"] |= prompt
            elif prompt := prompt | _axolotl_turns(left, at, one):
                dataset["prompt"] = {"input_columns": [dataset.pop("content_field")], **prompt}
            known |= OF_TURNS if "rl" not in given else set()
        roles = one.get("roles")
        if roles and all([role] == list(names) for role, names in roles.items()):
            known.add("roles")
        for name in one:
            if name not in known and f"{at}.{name}" not in left:
                left[f"{at}.{name}"] = "easypipe has no key of this name"
        found.append(dataset)
    return found


def preferred(one: JsonObject, *, judged: bool) -> JsonObject:
    """Returns the prompt of a dataset of pairs, or of answers that are judged one by one."""
    if judged:
        columns = {"input_columns": ["prompt"], "label_column": "completion"}
        return {"format_type": "prompt_completion", **columns, "desirable_column": "label"}
    return {
        "input_columns": [one.get("field_messages", "messages")],
        "label_column": one.get("field_chosen", "chosen"),
        "rejected_column": one.get("field_rejected", "rejected"),
        "train_on": "completion",
    }


def axolotl_pretraining(key: Key) -> None:
    """Makes datasets from the text that axolotl streams."""
    given = [key.value] if isinstance(key.value, str | dict) else key.value
    found: list[JsonObject] = []
    for number, one in enumerate(
        {"path": each} if isinstance(each, str) else each for each in given
    ):
        at = f"{key.name}[{number}]"
        dataset = _rows_of(key.made.left, at, one)
        column = one.get("text_column", one.get("field", "text"))
        dataset |= {"content_field": column, "length": dict(SPLIT)}
        known = {"path", "data_files", "name", "split", "revision", "text_column", "field", "type"}
        if one.get("type", "pretrain") not in ("pretrain", "completion"):
            known.remove("type")
        for name in one.keys() - known:
            key.made.left[f"{at}.{name}"] = "easypipe has no key of this name"
        found.append(dataset)
    _sources(key, found)
    key.put("data.streaming", True)


def _axolotl_keys(left: dict[str, str], at: str, one: JsonObject, *, flags: bool) -> JsonObject:
    """Returns the part of a prompt that names the keys of speakers and content in messages.

    With `flags` it also names the keys that say whether messages are trained on.
    """
    given = dict(one.get("message_property_mappings") or {})
    for name, key in (("role", "message_field_role"), ("content", "message_field_content")):
        given |= {name: one[key]} if one.get(key) else {}
    if flags and (flag := one.get("message_field_training")):
        given["train"] = flag
    if flags and (ranges := one.get("message_field_training_detail")):
        given["train_ranges"] = ranges
    for name in given:
        if name not in MESSAGE_FIELDS and given[name] != name:
            left[f"{at}.message_property_mappings"] = f"{name!r} has no other name here"
    prompt: JsonObject = {"format_type": "sharegpt"} if given.get("role") == "from" else {}
    known = {"role": "from", "content": "value"} if prompt else {}
    fields = {
        name: key
        for name, key in given.items()
        if name in MESSAGE_FIELDS and key not in (name, known.get(name))
    }
    return prompt | ({"message_fields": fields} if fields else {})


def _axolotl_turns(left: dict[str, str], at: str, one: JsonObject) -> JsonObject:
    """Returns the part of a prompt that says which turns are trained on.

    axolotl trains on the turns of `roles_to_train` (without the key, those of the assistant) and
    the tokens that end them; only on the last message if both it and `train_on_eos` are empty.
    """
    roles, ends = one.get("roles_to_train", ["assistant"]), one.get("train_on_eos", "turn")
    flagged = bool(one.get("message_field_training") or one.get("message_field_training_detail"))
    if not roles and not ends and not flagged:
        return {"train_on": "completion"}
    roles = [ROLES.get(str(role), str(role)) for role in roles or ()]
    if unknown := [role for role in roles if role not in SPEAKERS]:
        left[f"{at}.roles_to_train"] = f"unknown roles: {', '.join(unknown)}"
        roles = [role for role in roles if role in SPEAKERS]
    prompt: JsonObject = {"roles_to_train": roles} if roles != ["assistant"] or flagged else {}
    if ends == "all":
        left[f"{at}.train_on_eos"] = "the ends of turns that are not trained are not targets"
    elif ends != "turn":
        prompt["train_on_eos"] = ends or "none"
    if one.get("train_on_eot", ends) != ends:
        left[f"{at}.train_on_eot"] = "train_on_eos is of whatever ends a turn"
    return prompt


def trl_datasets(key: Key) -> None:
    """Makes datasets from the list that `trl sft` reads besides or instead of dataset_name."""
    found: list[JsonObject] = []
    for number, one in enumerate(key.value):
        at = f"{key.name}[{number}]"
        found.append(_rows_of(key.made.left, at, one))
        # columns that nothing reads are not read
        for name in one.keys() - {"path", "data_files", "name", "revision", "split", "columns"}:
            key.made.left[f"{at}.{name}"] = "easypipe has no key of this name"
    _sources(key, found)


def trl_dataset(key: Key) -> None:
    dataset = _from(str(key.value))
    for name, path in (("dataset_config", "subset"), ("dataset_train_split", "split")):
        if key.given.get(name):
            dataset[path] = key.given[name]
    _sources(key, [dataset])


def trl_test_split(key: Key) -> None:
    if key.given.get("eval_strategy", key.given.get("evaluation_strategy", "no")) == "no":
        key.carry("has no effect there: nothing is evaluated")
    elif not key.given.get("dataset_name"):
        key.leave("name its rows under eval.held_out.datasets")
    else:
        subset = key.given.get("dataset_config")
        dataset = _from(str(key.given["dataset_name"])) | ({"subset": subset} if subset else {})
        _held_out(key, [dataset | {"split": key.value}])


def mixture(key: Key) -> None:
    """Makes datasets from TRL's `dataset_mixture`."""
    found: list[JsonObject] = []
    for one in key.value["datasets"]:
        dataset = _from(one["id"])
        dataset |= {"split": one["split"]} if "split" in one else {}
        dataset |= {"subset": one["config"]} if one.get("config", "default") != "default" else {}
        split, share = dataset.get("split", "train"), one.get("weight", 1.0)
        dataset["split"] = _share(key, one["id"], split, share)
        # `columns` is among the known keys: columns that nothing uses are never read
        for name in one.keys() - {"id", "split", "config", "weight", "columns"}:
            left = f"{key.name}.datasets[{len(found)}].{name}"
            key.made.left[left] = "easypipe has no key of this name"
        found.append(dataset)
    _sources(key, found)
    if key.value.get("test_split_size"):
        held_out(Key(key.made, "test_split_size", key.value))


def _share(key: Key, name: str, split: str, share: float) -> str:
    """Returns a split, or the fraction of its rows that TRL calls a weight."""
    percent = round(share * 100, 6)  # 0.07 * 100 is 7.000000000000001
    if percent == 100:
        return split
    if percent == int(percent) and 1 <= percent < 100:
        return f"{split}[:{int(percent)}%]"
    key.made.left[f"{key.name}, {split} of {name}"] = (
        f"{share} of its rows are not 1 to 100 whole per cents: set num_rows of the dataset"
    )
    return split


def mixer(key: Key) -> None:
    splits = [str(one) for one in key.given.get("dataset_splits") or ["train"]]
    trained = [one for one in splits if "test" not in one]
    found: list[JsonObject] = []
    for number, (name, share) in enumerate(key.value.items()):
        configs = key.given.get("dataset_configs") or ()
        for split in trained:
            part = _share(key, str(name), split, share)
            found.append({**_from(str(name)), "split": part})
            if number < len(configs):
                found[-1]["subset"] = configs[number]
    _sources(key, found)


def listed(key: Key) -> None:
    """Makes datasets from LLaMA-Factory's names.

    They are defined in a dataset_info.json, which is not read.
    """
    names = key.value.split(",") if isinstance(key.value, str) else key.value
    folder = str(key.given.get("dataset_dir", "data"))
    found = [{"data_files": f"{folder}/{str(name).strip()}.json"} for name in names]
    (_held_out if key.name == "eval_dataset" else _sources)(key, found)
    key.leave(
        f"the files of {key.value!r} stand in {folder}/dataset_info.json, which is not read: see "
        "data_files, and `easypipe discover` for what is in them"
    )


def mixed(key: Key) -> None:
    """Converts LLaMA-Factory's way of mixing several datasets."""
    names = {
        "concat": "all_exhausted",
        "interleave_once": "all_exhausted",
        "interleave_under": "first_exhausted",
        "interleave_over": "restart",
    }
    if key.value not in names:
        key.unknown(f": {', '.join(names)} are")
    elif "," not in str(key.given.get("dataset")):
        key.carry("has no effect there on one dataset")
    else:
        key.put("data.mix.stop_strategy", names[key.value])
        if key.value == "interleave_over":
            key.leave("theirs ends when each dataset has come once: set train.steps")


def probabilities(key: Key) -> None:
    if key.given.get("mix_strategy", "concat") == "concat":
        key.carry("has no effect there: rows are not interleaved")
    else:
        weights = key.value.split(",") if isinstance(key.value, str) else key.value
        named = {f"dataset{i}": float(one) for i, one in enumerate(weights, start=1)}
        key.put("data.mix.weights", named)


def thinking(key: Key) -> None:
    """Converts LLaMA-Factory's switch for the reasoning of a template."""
    key.made.dataset["chat_template_kwargs"] = {"enable_thinking": key.value}
    key.say(f"chat_template_kwargs of each dataset: {{enable_thinking: {key.value}}}")
    if not key.value:
        key.made.dataset["train_empty_thinking"] = False
        key.leave("theirs takes the thoughts of the last answer away too: leave them out of rows")


def described(key: Key) -> None:
    """Makes a dataset from a LLaMA-Factory file that says where the rows are; it is not read."""
    _sources(key, [{"data_files": str(key.value)}])
    key.leave(f"{key.value} says where the rows are, and is not read: name their files")


def field(path: str) -> Rule:
    """Returns a rule that sets a field of each dataset."""

    def rule(key: Key) -> None:
        key.made.dataset[path] = key.value
        key.say(f"{path} of each dataset: {key.value}")

    return rule


def template(key: Key) -> None:
    value = key.value
    if isinstance(value, str) and ("{%" in value or value in ("chatml", "zephyr", "alpaca")):
        key.made.dataset["chat_template"] = value
        key.say("chat_template of each dataset")
    elif value in ("tokenizer_default", "default"):
        key.carry("the tokenizer's own is taken")
    else:
        key.leave(
            f"no built-in template is called {value!r}: the tokenizer's own is taken; set "
            "chat_template of the datasets to a .jinja file where it has none"
        )


def trained(key: Key) -> None:
    if key.value:
        key.made.dataset["train_on"] = "all"
        key.say("train_on: all")
    else:
        key.carry("answers alone are trained")


def history(key: Key) -> None:
    """Converts LLaMA-Factory's switch for training only on the last answer."""
    if key.value:
        key.made.dataset["train_on"] = "last_assistant"
        key.say("train_on: last_assistant")
    else:
        key.off()


def held_out(key: Key) -> None:
    value = key.value
    if isinstance(value, float) and 0 < value < 1:
        key.put("eval.held_out", {"from": "data", "fraction": value})
    elif value:
        key.leave("eval.held_out.fraction is a share of the rows, not a count")
    else:
        key.off()
