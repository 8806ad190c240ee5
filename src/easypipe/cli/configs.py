"""What commands read from a config (data, steps, seed), and the error for streamed data.

This file loads no jax.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easypipe.core.config import from_dict
from easypipe.core.errors import did_you_mean, require
from easypipe.core.values import JsonObject
from easypipe.history import host_load
from easypipe.jobs import RUN_KEYS, chain, file_values, placed, with_hold_outs, with_tokenizer_of
from easypipe.pipeline import Pipeline
from easypipe.stages.config import PipelineConfig
from easypipe.train.config import TrainingConfig
from easypipe.train.model.config import ModelConfig
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.train.record import recorded_seed

TASK = "task"  # the key that only runs on images have


@dataclass(frozen=True)
class Described:
    """What a config file says.

    Attributes:
        data: The data.
        steps: The number of steps of the run, if its config sets it.
        within: The prefix of the keys of `data` in the file, "data." in a run config.
        output_dir: The output folder of the run.
    """

    data: PipelineConfig
    steps: int | None
    within: str = ""
    output_dir: Path | None = None

    def refuse_streaming(self, problem: str, then: str) -> None:
        """Checks that `data` does not stream.

        Args:
            problem: What streaming makes impossible.
            then: What can be done without streaming.

        Raises:
            ConfigError: It streams.
        """
        at = f"{self.within}streaming"
        require(
            not self.data.streaming,
            at,
            problem,
            f"Leave it out, here with --set {at}=false, {then}.",
        )

    def placed(self) -> AbstractContextManager[None]:
        """Returns a context manager in which errors name keys as the file does."""
        return placed(self.within.rstrip("."))

    def pipeline(self, **options: Any) -> Pipeline:
        """Returns the chain up to batches; nothing is saved and nothing is put on a device."""
        return chain(self.data, save=False, **options)

    def loaded(self, **options: Any) -> Pipeline:
        """Returns the same chain with the batches of the run, which are not put on a device."""
        return self.pipeline(**options).load(host_load(self.data))


def described(config: Path, overrides: list[str], *, needs_seed: bool = False) -> Described:
    """Reads a config file.

    Args:
        config: The file.
        overrides: `key.path=value` overrides.
        needs_seed: Whether a seed is required, from the config or from its run.

    Raises:
        ConfigError: Something is wrong or the seed is missing; names the key path.
    """
    values = file_values(config, overrides)
    data, _ = data_of(values)
    train = (
        from_dict(TrainingConfig, values["train"], "train")
        if "data" in values and "train" in values
        else None
    )
    if data.seed is None and train is not None:
        data = dataclasses.replace(data, seed=recorded_seed(train.output_dir))
    require(
        data.seed is not None or not needs_seed,
        "data.seed" if "data" in values else "seed",
        "not given, so every run draws its own order",
        "Set the seed that the run logged, or keep the run's train.output_dir.",
    )
    within = "data." if "data" in values else ""
    return Described(
        data,
        None if train is None else train.steps,
        within,
        None if train is None else Path(os.path.expanduser(train.output_dir)),
    )


def of_images(config: Path, overrides: list[str]) -> bool:
    """Returns whether the file is a ClassifyConfig, for a run on images."""
    return TASK in file_values(config, overrides)


def data_of(values: JsonObject) -> tuple[PipelineConfig, dict[str, PipelineConfig]]:
    """Returns the data and the held-out data of a run config, or only a pipeline config.

    Raises:
        ConfigError: It is a run on images, or something is wrong, also with the model or the
            training; names the key path.
    """
    require(
        TASK not in values,
        TASK,
        "this is a run on images, which this command does not support",
        "Use `easypipe train` or `easypipe plan` for such runs.",
    )
    if "data" not in values:
        return from_dict(PipelineConfig, values), {}
    values = with_hold_outs(values)
    for key in values:
        of_data = key in PipelineConfig.__annotations__
        fix = f"Did you mean 'data.{key}'?" if of_data else did_you_mean(str(key), RUN_KEYS)
        require(key in RUN_KEYS, key, "unknown key", fix, have=RUN_KEYS)
    held_out = {} if values.get("eval") is None else values["eval"]
    require(
        isinstance(held_out, dict),
        "eval",
        f"expected a mapping of names to pipeline configs, got {held_out!r}",
    )
    data, model = from_dict(PipelineConfig, values["data"], "data"), values.get("model") or {}
    if isinstance(model, dict) and "pretrained" in model:
        data = with_tokenizer_of(data, from_dict(PretrainedConfig, model, "model"))
    else:
        from_dict(ModelConfig, model, "model")
    if "train" in values:
        from_dict(TrainingConfig, values["train"], "train")
    return (
        data,
        {
            str(name): from_dict(PipelineConfig, entry, f"eval.{name}")
            for name, entry in held_out.items()
        },
    )
