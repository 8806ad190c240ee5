"""Rules for single keys of other tools' configs: optimizer, preferences, adapters, when to save."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from easypipe.core.values import Json, JsonObject, JsonValue
from easypipe.train.config import SMOOTHED, UNPAIRED, PreferenceLoss

# easypipe's projections by their names in PEFT's configs
PROJECTIONS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
_ADAMW = "adamw", "which has no 8-bit or paged moments; XLA fuses the update"
OPTIMIZERS = {
    "adamw_torch": ("adamw", ""), "adamw_torch_fused": ("adamw", ""), "adamw_hf": ("adamw", ""),
    "adamw_torch_4bit": _ADAMW, "adamw_torch_8bit": _ADAMW, "ao_adamw_4bit": _ADAMW,
    "ao_adamw_8bit": _ADAMW, "ao_adamw_fp8": _ADAMW, "paged_adamw": _ADAMW,
    "adamw_8bit": _ADAMW, "adamw_bnb_8bit": _ADAMW, "paged_adamw_32bit": _ADAMW,
    "paged_adamw_8bit": _ADAMW, "adafactor": ("adafactor", ""), "muon": ("muon", ""),
    "lion_32bit": ("lion", ""), "lion_8bit": ("lion", "which has no moments of 8 bits"),
    "adamw": ("adamw", ""), "schedule_free_adamw": ("schedule_free", ""),
    "optimi_adamw": ("adamw", ""),
}  # fmt: skip
SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "polynomial": "polynomial",
    "constant_with_warmup": "constant", "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd", "cosine_with_min_lr": "cosine",
}  # fmt: skip
NO_DROPOUT = "adapters have no dropout"
# losses of train.preference by their names in axolotl (`rl`) and LLaMA-Factory (`stage`)
WAYS = {
    "dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto", "rm": "reward",
}  # fmt: skip


@dataclass
class ForeignConfig:
    """A config of easypipe, made from one of another tool.

    Attributes:
        config: The config, for `RunConfig.load`.
        carried: For each key of the other tool, what it became, in words.
        left: For each key of the other tool, why it has no equivalent, or what differs.
        dataset: The fields that all datasets have.
    """

    config: JsonObject = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    dataset: JsonObject = field(default_factory=dict)

    def part(self, path: str, *, make: bool = False) -> JsonObject:
        """Returns the section at a key path; with `make`, a missing one is created."""
        inner = self.config
        for name in path.split("."):
            inner = inner.setdefault(name, {}) if make else inner.get(name, {})
        return inner


@dataclass(frozen=True)
class Key:
    """One key of the other tool's config, and the config that it goes into."""

    made: ForeignConfig
    name: str
    given: Json  # the whole config of the other tool

    @property
    def value(self) -> Any:
        return self.given[self.name]

    def put(self, path: str, value: JsonValue = None) -> None:
        """Sets a key path of easypipe's config, to the key's own value if no other is given."""
        value = self.value if value is None else value
        section, _, last = path.rpartition(".")
        self.made.part(section, make=True)[last] = value
        self.say(f"{path}: {value}")

    def put_part(self, path: str) -> None:
        """Adds a section to easypipe's config, and keeps what it already has."""
        self.put(path, self.made.part(path))

    def say(self, text: str) -> None:
        """Adds a note about what the key became."""
        carried = self.made.carried
        carried[self.name] = f"{carried[self.name]}, {text}" if self.name in carried else text

    def carry(self, text: str) -> None:
        self.made.carried[self.name] = text

    def off(self) -> None:
        self.carry("is off")

    def leave(self, why: str) -> None:
        self.made.left[self.name] = why

    def unknown(self, known: str = "") -> None:
        self.leave(f"{self.value!r} is not known here" + known)


Rule = Callable[[Key], None]


def to(*paths: str) -> Rule:
    """Returns a rule that takes the value unchanged."""

    def rule(key: Key) -> None:
        for path in paths:
            key.put(path)

    return rule


def whole(path: str, none: str = "") -> Rule:
    """Returns a rule for a number that must be an integer; a fraction is left out.

    `none` is the note for 0 and less, which easypipe's default already means.
    """

    def rule(key: Key) -> None:
        value = key.value
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            key.leave(f"{value!r} is not a whole number, and {path} counts")
        elif value > 0:
            key.put(path, int(value))
        elif none:
            key.carry(none)
        else:
            key.leave(f"{path} counts from 1")

    return rule


def leave(reason: str) -> Rule:
    return lambda key: key.leave(reason)


def off(reason: str) -> Rule:
    """Returns a rule that reports the key as left out if it is on, and skips it if it is off."""
    nothing = (False, 0, "no", "none", "None", [], {})
    return lambda key: key.off() if key.value in nothing else key.leave(reason)


def to_if_on(path: str) -> Rule:
    """Returns a rule that takes a number if it is switched on, and skips it if it is off."""
    return lambda key: key.put(path) if key.value else key.off()


def always(text: str) -> Rule:
    """Returns a rule for what easypipe always does.

    The key is left out if it is switched off.
    """
    return lambda key: (
        key.carry(text) if key.value else key.leave(f"is off there, and here: {text}")
    )


def needless(text: str) -> Rule:
    return lambda key: key.carry(text)


def named(path: str, names: Mapping[str, str | tuple[str, str]]) -> Rule:
    def rule(key: Key) -> None:
        found = names.get(str(key.value))
        if found is None:
            key.unknown()
            return
        name, differs = (found, "") if isinstance(found, str) else found
        key.put(path, name)
        if differs:
            key.leave(f"{key.value!r} became {name}, {differs}")

    return rule


length = to("data.pack.seq_length", "data.tokenize.max_length")


def schedule_options(key: Key) -> None:
    """Converts the options of a schedule, an object or its JSON: where it ends, and how."""
    names = {
        "min_lr_rate": "final_fraction", "min_lr_ratio": "final_fraction", "power": "power",
        "num_decay_steps": "cooldown_steps",
    }  # fmt: skip
    peak = key.given.get("learning_rate")
    options = json.loads(key.value) if isinstance(key.value, str) else key.value
    for name, value in options.items():
        if name in names:
            key.put(f"train.optimizer.{names[name]}", value)
        elif name in ("min_lr", "lr_end") and peak:
            key.put("train.optimizer.final_fraction", float(value) / float(peak))
        else:
            key.made.left[f"{key.name}.{name}"] = "easypipe has no key of this name"


def packing(key: Key) -> None:
    if key.value:
        key.put("data.pack.strategy", "first_fit")
    else:
        key.put("data.pack.enabled", False)


def dtype(key: Key) -> None:
    if key.name in ("bf16", "bfloat16", "pure_bf16") and key.value in (True, "auto", "full"):
        key.put("model.dtype", "bfloat16")
    elif key.value in ("bfloat16", "float32"):
        key.put("model.dtype")
    elif key.value in (False, "auto"):
        key.carry("is off" if key.value is False else "is left to the other keys")
    else:
        key.leave("products are of bfloat16 or float32")


def remat(key: Key) -> None:
    key.put("model.remat", "full" if key.value else "none")


def peft(key: Key) -> None:
    """Converts LLaMA-Factory's `peft_config`, a mapping."""
    names = {"r": "rank", "lora_alpha": "alpha"}
    if (key.value or {}).get("name") != "lora":
        key.unknown(": {name: lora} is")
        return
    key.put_part("train.lora")
    for name, value in key.value.items():
        inner = Key(key.made, f"{key.name}.{name}", {f"{key.name}.{name}": value})
        if name in names:
            key.put(f"train.lora.{names[name]}", value)
        elif name == "target_modules":
            _targets(inner)
        elif name == "lora_dropout":
            off(NO_DROPOUT)(inner)
        elif name != "name":
            inner.leave("easypipe has no key of this name")


def adapter(key: Key) -> None:
    if key.value in (False, "full", "none"):
        key.carry("all weights are trained")
    elif key.value in (True, "lora", "qlora"):
        key.put_part("train.lora")
        if key.value == "qlora":
            key.leave("adapters are trained beside weights that are not quantized")
    else:
        key.unknown(": lora is")


def new_tokens(key: Key) -> None:
    if isinstance(key.value, str):  # LLaMA-Factory's, separated by commas
        key.put("model.add_tokens", [one.strip() for one in key.value.split(",")])
    elif isinstance(key.value, Sequence):
        key.put("model.add_tokens")
    else:  # older configs have a different type here
        key.leave("the tokenizer's own are used; see model.add_tokens")


def with_adapters(rule: Rule) -> Rule:
    """Returns a rule that applies only if adapters are trained."""

    def asked(key: Key) -> None:
        said = (key.given.get(name) for name in ("adapter", "use_peft", "finetuning_type"))
        if any(one in (True, "lora", "qlora") for one in said):
            rule(key)
        else:
            key.carry("has no effect there: no adapters are trained")

    return asked


def lora(name: str) -> Rule:
    return with_adapters(to(f"train.lora.{name}"))


def _targets(key: Key) -> None:
    """Converts the projections that get adapters."""
    names = key.value.split(",") if isinstance(key.value, str) else key.value
    if not key.value:
        key.off()
    elif key.value is True or names in (["all"], ["all-linear"]):
        key.put("train.lora.targets", ["*"])
    elif not isinstance(names, Sequence):
        key.unknown()
    else:
        known = [PROJECTIONS[name.strip()] for name in names if name.strip() in PROJECTIONS]
        unknown = [name for name in names if name.strip() not in PROJECTIONS]
        if known:
            key.put("train.lora.targets", known)
        if unknown:
            key.leave(f"no projection here is called {', '.join(unknown)}")


targets = with_adapters(_targets)


def warmup(key: Key) -> None:
    value, steps = key.value, key.given.get("max_steps")
    if not value:
        key.off()
    elif key.given.get("warmup_steps"):
        key.carry("has no effect there: warmup_steps goes before it")
    elif isinstance(value, int | float) and isinstance(steps, int) and steps > 0:
        key.put("train.optimizer.warmup_steps", math.ceil(value * steps))
    else:
        key.leave(
            f"train.optimizer.warmup_steps counts steps: `easypipe plan` prints how many the run "
            f"has; set {value} of them"
        )


def sharded(key: Key) -> None:
    if key.value:
        key.put("train.mesh", "fsdp")
    else:
        key.off()


def clip(key: Key) -> None:
    if key.value:
        key.put("train.optimizer.clip_norm")
    else:
        key.made.part("train.optimizer", make=True)["clip_norm"] = None
        key.carry("train.optimizer.clip_norm: null")


def reports(key: Key) -> None:
    for name in [key.value] if isinstance(key.value, str) else list(key.value or ()):
        if name in ("wandb", "tensorboard"):
            key.put_part(f"train.callbacks.{name}")
        elif name not in ("none", "no"):
            key.leave(f"{name!r} is not known here: wandb and tensorboard are")
    if key.name not in key.made.left:
        key.made.carried.setdefault(key.name, "is off")


def strategy(path: str) -> Rule:
    """Returns a rule for a strategy: `steps` is what easypipe does; `epoch` and `no` are noted."""

    def rule(key: Key) -> None:
        if key.value == "steps":
            key.carry(f"{path} counts steps")
        elif key.value in ("no", False):
            key.off()
        else:
            key.leave(f"{path} counts steps: `easypipe plan` prints how many make an epoch")

    return rule


def preference(key: Key) -> None:
    name = WAYS.get(str(key.value))
    if name is None:
        key.unknown(f": {', '.join(WAYS)} are")
        return
    key.put_part("train.preference")
    if name != "sigmoid":
        key.put("train.preference.loss", name)


def stage(key: Key) -> None:
    if key.value in ("sft", "pt"):
        key.carry("is what a run without train.preference does")
    else:
        preference(key)


def way(given: Json) -> str | None:
    """Returns the name of a config's preference loss; None if it names none."""
    said = given.get("rl") or given.get("stage")
    return None if said in (None, "sft", "pt") else str(said)


def of_preferences(rule: Rule, *ways: str) -> Rule:
    """Returns a rule that applies only to training with one of these preference losses, or any."""

    def asked(key: Key) -> None:
        name = way(key.given)
        if name is not None and name not in WAYS:
            key.leave("it belongs to a way of training that is not known here")
        elif name is None:
            key.carry("has no effect there: no answers are compared")
        elif name not in (ways or WAYS) or name == "rm":
            key.carry(f"has no effect there on {name}")
        else:
            rule(key)

    return asked


beta = to("train.preference.beta")


# Keys of TRL's trainers that generate answers and reward them.
REWARDED = ("reward_funcs", "reward_weights", "num_generations", "use_vllm", "log_completions")
NO_REWARDS = "no reinforcement learning is available here: no answers are written and rewarded"


def trl_beta(key: Key) -> None:
    if any(name in key.given for name in REWARDED):
        key.leave(NO_REWARDS)
        return
    beta(key)
    key.leave(
        "no trainer stands in the file: it is taken for DPO's; for another one set "
        "train.preference.loss (orpo, kto, ...)"
    )


def judged(path: str) -> Rule:
    """Returns a rule for TRL's weights of answers that are judged one by one, only in KTO."""

    def rule(key: Key) -> None:
        loss = key.given.get("loss_type", "kto")
        if loss not in UNPAIRED:
            key.carry(f"has no effect there on {loss}")
            return
        key.put("train.preference.loss", loss)
        key.put(path)

    return rule


def smoothing(key: Key) -> None:
    loss = key.given.get("loss_type", "sigmoid")
    if key.value and loss in SMOOTHED:
        key.put("train.preference.label_smoothing")
    else:
        key.carry("is off" if not key.value else f"has no effect there on {loss}")


def simpo_margin(key: Key) -> None:
    name = key.given.get("loss_type") or key.given.get("pref_loss")
    if key.value and name == "simpo":
        key.put("train.preference.margin")
    else:
        key.carry("is simpo's alone" if key.value else "is off")


def reference(key: Key) -> None:
    """Converts the switch for log-probs of the reference, computed before the first step."""
    if key.value and key.given.get("loss_type") == "kto":
        key.leave("kto compares answers under other prompts, which change with the rows")
    elif key.value:
        key.put("train.preference.reference", "cached")
    else:
        key.off()


def loss(key: Key) -> None:
    value = key.value
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if name == "sigmoid":
        key.put_part("train.preference")
    elif name in ("nll", "chunked_nll"):
        key.carry("is what a run without train.preference does")
    elif name in get_args(PreferenceLoss):
        key.put("train.preference.loss", name)
    else:
        key.leave(f"{value!r} is not a loss of train.preference")
