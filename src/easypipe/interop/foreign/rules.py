"""What becomes of one key of another tool's config: a rule for each kind of key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from easypipe.core.values import Json, JsonObject, JsonValue
from easypipe.train.config import PreferenceLoss

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


def to(*paths: str) -> Rule:
    """The value as it is."""

    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        value = given[key]
        for path in paths:
            made.put(key, path, value)

    return rule


def whole(path: str) -> Rule:
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


def leave(reason: str) -> Rule:
    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        made.left[key] = reason

    return rule


def off(reason: str) -> Rule:
    """Left where it is switched on, and nothing where it is off."""

    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        value = given[key]
        if value in (False, 0, "no", "none", "None", [], {}):
            made.carried[key] = "is off"
        else:
            made.left[key] = reason

    return rule


def to_if_on(path: str) -> Rule:
    """A number where it is switched on, and nothing where it is off."""

    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        if given[key] in (None, False, 0):
            made.carried[key] = "is off"
        else:
            made.put(key, path, given[key])

    return rule


def needless(text: str) -> Rule:
    def rule(made: ForeignConfig, key: str, given: Json) -> None:
        made.carried[key] = text

    return rule


def named(path: str, names: Mapping[str, str | tuple[str, str]]) -> Rule:
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


def length(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    made.put(key, "data.pack.seq_length", value)
    made.put(key, "data.tokenize.max_length", value)


def packing(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value:
        made.put(key, "data.pack.strategy", "first_fit")
    else:
        made.put(key, "data.pack.enabled", False)


def dtype(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if key in ("bf16", "bfloat16") and value in (True, "auto", "full"):
        made.put(key, "model.dtype", "bfloat16")
    elif value in ("bfloat16", "float32"):
        made.put(key, "model.dtype", value)
    elif value in (False, "auto"):
        made.carried[key] = "is off" if value is False else "is left to the other keys"
    else:
        made.left[key] = "products are of bfloat16 or float32"


def remat(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    made.put(key, "model.remat", "full" if value else "none")


def adapter(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value in (False, "full", "none"):
        made.carried[key] = "all weights are trained"
    elif value in (True, "lora", "qlora"):
        made.put(key, "train.lora", made.part("train.lora"))
        if value == "qlora":
            made.left[key] = "adapters are trained beside weights that are not quantized"
    else:
        made.left[key] = f"{value!r} is not known here: lora is"


def lora(name: str) -> Rule:
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


def targets(made: ForeignConfig, key: str, given: Json) -> None:
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


def warmup(made: ForeignConfig, key: str, given: Json) -> None:
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


def sharded(made: ForeignConfig, key: str, given: Json) -> None:
    made.put(key, "train.mesh", "fsdp")


def reports(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    for name in [value] if isinstance(value, str) else list(value or ()):
        if name in ("wandb", "tensorboard"):
            made.put(key, f"train.callbacks.{name}", made.part(f"train.callbacks.{name}"))
        elif name not in ("none", "no"):
            made.left[key] = f"{name!r} is not known here: wandb and tensorboard are"
    if key not in made.left:
        made.carried.setdefault(key, "is off")


def strategy(path: str) -> Rule:
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


def preference(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value == "dpo":
        made.put(key, "train.preference", made.part("train.preference"))
    else:
        made.left[key] = f"{value!r} is not known here: dpo is"


def stage(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if value in ("sft", "pt"):
        made.carried[key] = "is what a run without train.preference does"
    else:
        preference(made, key, given)


def beta(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    if {given.get("rl"), given.get("stage")} - {None, "dpo"}:
        made.left[key] = "it belongs to a way of training that is not known here"
    else:
        made.put(key, "train.preference.beta", value)


def loss(made: ForeignConfig, key: str, given: Json) -> None:
    value = given[key]
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if name == "sigmoid":
        made.carried[key] = "is train.preference's"
    elif name in get_args(PreferenceLoss):
        made.put(key, "train.preference.loss", name)
    else:
        made.left[key] = f"{value!r} is no loss of train.preference"
