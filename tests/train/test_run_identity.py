"""What a run is compared by when it goes on from a checkpoint: every option that decides numbers is
in it, and no other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from easypipe.core.config import from_dict, to_dict
from easypipe.train.checkpoint.resume import identity_of, run_differences
from easypipe.train.config import (
    DistillConfig,
    LossConfig,
    OptimizerConfig,
    PreferenceConfig,
    SpikeConfig,
    TrainingConfig,
)
from easypipe.train.model.config import LoraConfig, ModelConfig
from easypipe.train.optim.config import DEFAULTS

BASE = {"steps": 40}
LATER = ("on_nonfinite", "spikes", "checkpoint")
LORA = {"lora": {}}
PAIRS = {"preference": {}}
MARGIN = {"preference": {"loss": "simpo"}}
TAUGHT = {"distill": {}}
SPIKES = {"spikes": {}}
VERDICTS = {"preference": {"loss": "kto"}}
FLAT = {"optimizer": {"schedule": "wsd"}}
GROUPS = {"optimizer": {"groups": [{"match": "a"}]}}
# an option, another value, what it is changed in
DECIDE: list[tuple[str, Any, dict[str, Any]]] = [
    ("steps", 41, {}),
    ("seed", 1, {}),
    ("accumulate_steps", 2, {}),
    ("neftune_alpha", 5.0, {}),
    ("neftune_alpha", 5.0, {"neftune_alpha": 1.0}),
    ("class_weights", [1.0, 2.0], {}),
    ("class_weights", [1.0, 2.0], {"class_weights": [2.0, 1.0]}),
    ("loss.z_loss", 1e-4, {}),
    ("loss.label_smoothing", 0.1, {}),
    ("loss.implementation", "reference", {}),
    ("loss.rule", "strict", {}),
    ("loss.chunk_size", 8, {}),
    ("lora", {}, {}),
    ("lora.rank", 4, LORA),
    ("lora.alpha", 4.0, LORA),
    ("lora.rank_stabilized", True, LORA),
    ("lora.targets", ["query"], LORA),
    ("preference", {}, {}),
    ("preference.loss", "hinge", PAIRS),
    ("preference.beta", 0.2, PAIRS),
    ("preference.label_smoothing", 0.1, PAIRS),
    ("preference.reference", "none", PAIRS),
    ("preference.margin", 0.7, MARGIN),
    ("preference.desirable_weight", 2.0, VERDICTS),
    ("preference.undesirable_weight", 2.0, VERDICTS),
    ("distill", {}, {}),
    ("distill.weight", 0.9, TAUGHT),
    ("distill.ids", "others", TAUGHT),
    ("distill.log_probs", "others", TAUGHT),
    ("on_nonfinite", "stop", {}),
    ("spikes", {}, {}),
    *((f"spikes.{name}", 9, SPIKES) for name in ("window", "threshold", "patience")),
    ("spikes.max_rollbacks", 9, SPIKES),
    ("checkpoint.every", 3, SPIKES),
    ("optimizer.schedule", "linear", {}),
    ("optimizer.warmup_steps", 3, {}),
    ("optimizer.final_fraction", 0.2, {}),
    ("optimizer.clip_norm", 2.0, {}),
    ("optimizer.clip_norm", None, {}),
    ("optimizer.ema_decay", 0.9, {}),
    ("optimizer.power", 3.0, {"optimizer": {"schedule": "polynomial"}}),
    ("optimizer.cooldown_steps", 3, FLAT),
    ("optimizer.cooldown_shape", "sqrt", FLAT),
    ("optimizer.groups", [{"match": "a"}], {}),
    ("optimizer.groups", [{"match": "b"}], GROUPS),
    ("optimizer.groups", [{"match": "a", "learning_rate_scale": 0.5}], GROUPS),
    ("optimizer.groups", [{"match": "a", "weight_decay": 0.5}], GROUPS),
    *(("optimizer.name", name, {}) for name in DEFAULTS if name != "adamw"),
    *(
        (f"optimizer.{option}", value + 1 if isinstance(value, int) else value / 2 or 0.5, base)
        for name, options in DEFAULTS.items()
        for base in ({"optimizer": {"name": name}},)
        for option, value in options.items()
    ),
]
FREE: dict[str, Any] = {
    "output_dir": "elsewhere",
    "epochs": 1,  # steps and the size of a batch are told beside the config
    "batch_size": 4,
    "mesh": "fsdp",
    "distributed": {"timeout": 9},
    "log_every": 2,
    "eval_every": 2,
    "eval_batches": 2,
    "measure": ["token_accuracy"],
    "checkpoint": {"every": 3, "keep": 3},
    "callbacks": {"heartbeat": {}},
    "max_nonfinite": 11,
    "resume": False,
    "resume_changes": ["train.steps"],
}


def changed(base: dict[str, Any], option: str, value: Any) -> dict[str, Any]:
    part, _, name = option.partition(".")
    return base | {part: value if not name else {**base.get(part, {}), name: value}}


def identity(values: dict[str, Any], **told: Any) -> dict[str, Any]:
    config = from_dict(TrainingConfig, values)
    given = {"model": ModelConfig(), "steps": config.steps or 40, "batch_size": 8} | told
    own = {"own_optimizer": False} | {k: given.pop(k) for k in ("own_optimizer",) if k in given}
    return identity_of(config, **given, **own)


@pytest.mark.parametrize(("option", "value", "base"), DECIDE, ids=str)
def test_an_option_that_decides_numbers_is_compared(
    option: str, value: Any, base: dict[str, Any]
) -> None:
    was, now = identity(BASE | base), identity(changed(BASE | base, option, value))
    assert was != now
    assert was == identity(BASE | base)


@pytest.mark.parametrize("option", FREE)
def test_an_option_that_decides_none_may_change(option: str) -> None:
    base = BASE if option != "epochs" else {}
    assert identity(base | {option: FREE[option]}) == identity(base)


def test_options_that_came_later_are_not_compared_at_their_defaults() -> None:
    """A run of preferences goes on from the checkpoints of versions that knew these options only."""
    first = {"beta": 0.1, "label_smoothing": 0.0, "reference": "initial"}
    assert identity(BASE | PAIRS)["train"]["preference"] == first


def test_older_checkpoints_are_compared_by_the_options_that_they_were_saved_with() -> None:
    """Their identity lacks what is told of steps that are not sound."""

    def compared(was: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
        of = identity(BASE | was)
        older = {k: v for k, v in of["train"].items() if k not in LATER}
        values = to_dict(from_dict(TrainingConfig, BASE | was))
        saved = {"identity": {**of, "train": older}, "train": values}
        found = run_differences(saved, identity(BASE | now))
        assert found == run_differences(saved | {"identity": of}, identity(BASE | now))
        return found

    rare = {"spikes": {}, "checkpoint": {"every": 4}}
    for same in ({}, SPIKES, rare, {"on_nonfinite": "stop"}):
        assert compared(same, same) == {}
    assert compared(rare, {}).keys() == compared({}, rare).keys() == {"train.spikes"}
    assert compared(rare, SPIKES) == {"train.checkpoint.every": "500 here, 4 in the checkpoint"}
    assert compared({}, {"on_nonfinite": "stop"}).keys() == {"train.on_nonfinite"}


def test_every_option_is_tried() -> None:
    tried = {option for option, *_ in DECIDE} | {*FREE}
    for prefix, kind in (
        ("", TrainingConfig),
        ("optimizer.", OptimizerConfig),
        ("loss.", LossConfig),
        ("lora.", LoraConfig),
        ("preference.", PreferenceConfig),
        ("distill.", DistillConfig),
        ("spikes.", SpikeConfig),
    ):
        names = {prefix + field.name for field in dataclasses.fields(kind)}
        assert names - tried <= {"optimizer", "loss"}


def test_what_is_told_besides_is_compared() -> None:
    others: list[dict[str, Any]] = [{"steps": 41}, {"batch_size": 9}, {"own_optimizer": True}]
    others += [{"model": None}]
    others += [
        {"model": dataclasses.replace(ModelConfig(), **{name: value})}
        for name, value in (("num_layers", 5), ("rope_theta", 5.0), ("qk_norm", True))
    ]
    assert len({str(identity(BASE, **one)) for one in [{}, *others]}) == len(others) + 1
    assert identity(BASE)["model"] == to_dict(ModelConfig())
