from __future__ import annotations

import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from easypipe.core.config import from_dict, to_dict
from easypipe.core.errors import ConfigError
from easypipe.train.config import LossConfig, OptimizerConfig, PreferenceConfig, TrainingConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"optimizer": {"name": "adamq"}},
            "optimizer.name: 'adamq' is not an option (have: adamw, nadamw, lion, ",
        ),
        (
            {"optimizer": {"schedule": "cosin"}},
            "optimizer.schedule: 'cosin' is not an option (have: cosine, linear, ",
        ),
        (
            {"optimizer": {"learning_rate": 0.0}},
            "optimizer.learning_rate: 0.0 is not a positive number",
        ),
        (
            {"optimizer": {"beta2": 1.0}},
            "optimizer.beta2: 1.0 is outside [0, 1). 0.9 and 0.95 are usual.",
        ),
        ({"optimizer": {"clip_norm": -1.0}}, "optimizer.clip_norm: -1.0 is not a positive number"),
        (
            {"steps": 10, "optimizer": {"warmup_steps": 10}},
            "optimizer.warmup_steps: 10 warm-up steps do not end before the last of 10 steps. Give "
            "at most 9.",
        ),
        (
            {"mesh": {"dat": 2}},
            "mesh.dat: unknown key (have: preset, data, fsdp, sequence, tensor, axis_rules). Did "
            "you mean 'data'?",
        ),
        (
            {"mesh": "fspd"},
            "mesh: no preset named 'fspd' (have: dp, fsdp, zero1, tp, hybrid). Did you mean "
            "'fsdp'?",
        ),
        (
            {"mesh": {"preset": "zero"}},
            "mesh.preset: 'zero' is not an option (have: dp, fsdp, zero1, tp, hybrid). Did you "
            "mean 'zero1'?",
        ),
        (
            {"mesh": {"axis_rules": {"head": "tensor"}}},
            "mesh.axis_rules.head: no dimension of a parameter means 'head' (have: embed, heads, ",
        ),
        (
            {"mesh": {"axis_rules": {"mlp": "tensr"}}},
            "mesh.axis_rules.mlp: no mesh axis named 'tensr' (have: data, fsdp, sequence, tensor). "
            "Did",
        ),
        (
            {"mesh": {"axis_rules": {"mlp": ["data", "data"]}}},
            "mesh.axis_rules.mlp: ('data', 'data') names an axis twice",
        ),
        (
            {"mesh": {"axis_rules": {"mlp": ["tensor", "fsdp"]}}},
            "mesh.axis_rules: embed and mlp are dimensions of one array, and both lie over fsdp. "
            "Give them different axes, or null",
        ),
        (
            {"mesh": {"data": 0}},
            "mesh.data: 0 is not a number of devices. Give at least 1, or -1 for those that remain.",
        ),
        (
            {"mesh": {"data": -1, "fsdp": -1}},
            "mesh: -1 (the devices that remain) appears more than once (have: data, fsdp).",
        ),
        ({"steps": 0}, "steps: 0 is too small. Give at least 1."),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep: 0 is too small. Give at least 1."),
        ({"loss": {"z_loss": -1e-4}}, "loss.z_loss: -0.0001 is not a number from 0 up"),
        (
            {"loss": {"label_smoothing": 1.0}},
            "loss.label_smoothing: 1.0 is outside [0, 1). 0.0 for none; 0.1 is usual.",
        ),
        (
            {"loss": {"implementation": "reference", "rule": "fast"}},
            "loss.rule: the reference implementation does not use it. Leave it out",
        ),
        ({"loss": {"chunk_size": 0}}, "loss.chunk_size: 0 is too small. Give at least 1."),
        ({"stepz": 3}, "stepz: unknown key"),
    ],
)
def test_bad_values_are_refused_by_name(values, message):
    with pytest.raises(ConfigError) as error:
        from_dict(TrainingConfig, {"output_dir": "out", **values})
    assert str(error.value).startswith(message)


def test_the_loss_of_dpo_is_suggested_by_its_name_here():
    with pytest.raises(
        ConfigError, match=r"loss: 'dpo' is not an option .* Did you mean 'sigmoid'"
    ):
        PreferenceConfig(loss="dpo")


def test_a_configuration_survives_the_trip_through_plain_values():
    config = TrainingConfig(
        output_dir="out", steps=7, mesh={"fsdp": 2, "data": -1}, resume_changes=("train.steps",)
    )
    assert from_dict(TrainingConfig, to_dict(config)) == config


@pytest.mark.parametrize(
    "made",
    [
        TrainingConfig(output_dir="run", on_nonfinite="stop"),
        PreferenceConfig(loss="reward"),
        PreferenceConfig(loss="orpo"),
        PreferenceConfig(loss="kto"),
        OptimizerConfig(name="muon"),
        OptimizerConfig(schedule="wsd"),
    ],
    ids=repr,
)
def test_a_record_of_a_version_without_some_option_is_read(made):
    """A run records every option, also those whose defaults have no effect on it."""
    record = to_dict(made)
    for name in record:
        lacking = {other: value for other, value in record.items() if other != name}
        if record[name] == getattr(type(made), name, None):  # only such options can have come later
            assert from_dict(type(made), lacking) == made


def test_options_are_what_runs():
    from easypipe.kernels.loss.api import Implementation, Rule
    from easypipe.train.optim.config import DEFAULTS
    from easypipe.train.optim.optimizers import DIRECTIONS, MAIN

    assert get_args(get_type_hints(OptimizerConfig)["name"]) == tuple(DEFAULTS)
    assert {*DIRECTIONS, "prodigy"} == set(DEFAULTS)
    assert get_args(get_args(get_type_hints(OptimizerConfig)["schedule"])[0]) == tuple(MAIN)
    for option, runs in (("implementation", Implementation), ("rule", Rule)):
        literals, none = get_args(get_type_hints(LossConfig)[option])
        assert (get_args(literals), none) == (get_args(runs), type(None))


def test_reading_a_configuration_loads_no_jax():
    code = "import sys, easypipe.train.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
