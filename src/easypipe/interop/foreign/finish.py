"""What follows from several keys or none of another tool's config: defaults, columns by loss."""

from __future__ import annotations

from dataclasses import dataclass

from easypipe.core.errors import require
from easypipe.core.values import Json, JsonObject, JsonValue
from easypipe.interop.foreign.datasets import SPLIT, preferred
from easypipe.interop.foreign.rules import ForeignConfig, Key
from easypipe.train.config import UNPAIRED
from easypipe.train.optim.config import DEFAULTS


def finish(made: ForeignConfig, tool: str, given: Json) -> None:
    """Sets what follows from several keys together."""
    load = made.part("data.load", make=True)
    defaults = _DEFAULTS[tool]
    key, rows = defaults.batch
    key = "micro_batch_size" if "micro_batch_size" in given else key  # LLaMA-Factory has both
    rows, parts = given.get(key, rows), given.get("gradient_accumulation_steps", 1)
    for name, value in ((key, rows), ("gradient_accumulation_steps", parts)):
        counts = isinstance(value, int) and not isinstance(value, bool) and value > 0
        require(counts, name, f"{value!r} is not a count of rows", "Give a whole number.")
    load |= {"batch_size": rows * parts, "accumulation_steps": parts}
    if key in given:
        made.left[key] = (
            f"data.load.batch_size is of all devices together: {rows * parts} is for one; "
            "multiply it by their number"
        )
    if "steps" in made.config.get("train", {}):
        load["num_epochs"] = None  # the steps override the number of epochs
    else:
        load.setdefault("num_epochs", 1 if tool == "axolotl" else 3)
    if given.get("save_strategy") in ("no", False):
        made.part("train.checkpoint", make=True)["every"] = None
    if tool != "axolotl":
        _evaluation(made, given)
    _length(made, tool, given)
    _lora(made, tool)
    _optimizer(made, tool)
    if "preference" in made.config["train"]:  # an empty section too
        loss = made.part("train.preference").get("loss")
        _pack_answers(made, given, pairs=loss not in UNPAIRED)
    _mixture(made, given)
    for dataset in made.config.get("data", {}).get("datasets", ()):
        _dataset(made, tool, given, dataset)
    for dataset in made.part("eval.held_out").get("datasets", ()):
        _dataset(made, tool, given, dataset)


# The keys that say where rows are.
_ROWS_OF = (
    "datasets", "pretraining_dataset", "dataset_mixture", "dataset_mixer", "dataset",
    "dataset_name",
)  # fmt: skip


def _mixture(made: ForeignConfig, given: Json) -> None:
    """Makes several datasets end, because the other tool concatenates their rows."""
    datasets = made.config.get("data", {}).get("datasets", ())
    mix = made.part("data.mix")
    if len(datasets) > 1 and "stop_strategy" not in mix:
        made.part("data.mix", make=True)["stop_strategy"] = "all_exhausted"
    if mix.get("stop_strategy") == "restart":
        made.part("data.load")["num_epochs"] = None  # it never ends
    if len(datasets) > 1 and "weights" not in mix:
        name = next(name for name in _ROWS_OF if name in given)
        made.left[f"{name}, its rows"] = (
            "each dataset is drawn from alike until it ends, and theirs shuffles the rows of all: "
            "for that set data.mix.weights to their numbers of rows (`easypipe plan`)"
        )


def _dataset(made: ForeignConfig, tool: str, given: Json, dataset: JsonObject) -> None:
    """Sets the common fields of datasets, and the columns that the training loss reads."""
    if tool == "trl" and not {"content_field", "prompt"} & {*dataset, *made.dataset}:
        made.left[f"{next(one for one in _ROWS_OF if one in given)}, their columns"] = (
            "theirs finds them in the rows, and here they are guessed: look at content_field or "
            "prompt of each dataset; TRL trains all of conversations (train_on: all) unless "
            "assistant_only_loss is set"
        )
        if made.part("train.preference").get("loss") in UNPAIRED:
            dataset["prompt"] = preferred({}, judged=True)
        elif "preference" in made.config.get("train", {}):
            dataset["prompt"] = {
                "input_columns": ["chosen"],
                "rejected_column": "rejected",
                "train_on": "last_assistant",
            }
        elif any(map(given.get, ("chat_template", "dataset_mixture", "assistant_only_loss"))):
            dataset["content_field"] = "messages"
            if not given.get("assistant_only_loss"):
                dataset["train_on"] = "all"
    for name, value in made.dataset.items():
        if "prompt" in dataset and name in ("chat_template", "train_on"):
            _into_prompt(dataset["prompt"], name, value)
        elif "prompt" in dataset and name in ("chat_template_kwargs", "train_empty_thinking"):
            dataset["prompt"].setdefault(name, value)
        else:
            dataset.setdefault(name, value)


@dataclass(frozen=True)
class _Defaults:
    """The defaults of a tool.

    Attributes:
        batch: The key for the number of rows per device, and its default.
        length: The most tokens of a row.
        rate: The learning rate, and that of preference training; None: it must be given.
        lora: Options of adapters.
    """

    batch: tuple[str, int]
    length: int
    rate: tuple[float, float] | None
    lora: JsonObject


_PEFT_TARGETS = ["query", "value"]  # PEFT's default for Llama-like decoders
_DEFAULTS = {
    "axolotl": _Defaults(("micro_batch_size", 1), 512, None, {"targets": _PEFT_TARGETS}),
    "trl": _Defaults(
        ("per_device_train_batch_size", 8),
        1024,
        (2e-5, 1e-6),
        {"rank": 16, "alpha": 32, "targets": _PEFT_TARGETS},
    ),
    "llamafactory": _Defaults(("per_device_train_batch_size", 8), 2048, (5e-5, 5e-5), {"rank": 8}),
}
# The keys that say how many tokens a row has.
_LENGTHS = ("sequence_len", "max_length", "max_seq_length", "cutoff_len")


def _length(made: ForeignConfig, tool: str, given: Json) -> None:
    """Sets the other tool's default length of a row, and which datasets it splits into rows."""
    if not {*given, *made.carried}.intersection(_LENGTHS):
        made.part("data.pack", make=True)["seq_length"] = _DEFAULTS[tool].length
        made.part("data.tokenize", make=True)["max_length"] = _DEFAULTS[tool].length
    if given.get("stage") == "pt" and given.get("packing", True):
        made.dataset["length"] = dict(SPLIT)


def _lora(made: ForeignConfig, tool: str) -> None:
    """Sets the other tool's defaults for adapters."""
    if "lora" not in made.config.get("train", {}):
        return
    options = made.part("train.lora")
    for name, value in _DEFAULTS[tool].lora.items():
        options.setdefault(name, value)
    if tool == "llamafactory":
        options.setdefault("alpha", 2 * options["rank"])


def _evaluation(made: ForeignConfig, given: Json) -> None:
    """Sets evaluation by steps if `eval_strategy` says so; the default is never."""
    train = made.part("train", make=True)
    if given.get("eval_strategy", given.get("evaluation_strategy")) == "steps":
        train.setdefault("eval_every", train.get("log_every", 500))
    elif train.pop("eval_every", None) is not None:
        made.carried["eval_steps"] = "has no effect there: eval_strategy is not steps"


def _optimizer(made: ForeignConfig, tool: str) -> None:
    """Sets the other tool's defaults if easypipe's differ."""
    options = made.part("train.optimizer", make=True)
    name = options.get("name", "adamw")
    for option, value in {"weight_decay": 0.0, "beta2": 0.999}.items():
        if option in DEFAULTS[name]:
            options.setdefault(option, value)
    steps = made.config["train"].get("steps")
    if (
        tool == "axolotl"
        and steps
        and not {"warmup_steps", "warmup_ratio"} & {*made.carried, *made.left}
    ):
        options["warmup_steps"] = min(int(0.03 * steps), 100)
    if rates := _DEFAULTS[tool].rate:
        options.setdefault("learning_rate", rates["preference" in made.config["train"]])
    if name != "schedule_free":
        options.setdefault("schedule", "cosine" if tool == "axolotl" else "linear")
    if options.get("schedule") in ("cosine", "linear", "polynomial", "wsd"):
        options.setdefault("final_fraction", 0.0)
    if options.get("schedule") == "polynomial":
        options.setdefault("power", 1.0)


def _pack_answers(made: ForeignConfig, given: Json, *, pairs: bool) -> None:
    """Packs whole answers into rows; the other tool pads each."""
    pack = made.part("data.pack", make=True)
    pack.pop("enabled", None)
    pack |= {"strategy": "first_fit", "oversize": "drop"}
    if pairs and pack.get("seq_length"):
        pack["seq_length"] *= 2
        for name in _LENGTHS:
            if made.carried.get(name):
                Key(made, name, given).say(
                    f"and data.pack.seq_length {pack['seq_length']}: a row holds both answers"
                )
    for name in ("packing", "sample_packing"):
        if name in made.carried:
            made.carried[name] = "answers are packed, each a segment of its own"


def _into_prompt(prompt: JsonObject, name: str, value: JsonValue) -> None:
    """Puts a field that all datasets have into the prompt of one."""
    if name == "train_on":
        for other in ("roles_to_train", "train_on_eos"):
            prompt.pop(other, None)
        prompt["train_on"] = value
    elif prompt.get("format_type") != "alpaca":
        prompt["template"] = value
