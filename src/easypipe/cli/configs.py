"""What `plan` and `explain` read of a config: its data, and of a run its steps and seed.

No jax is loaded for this.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easypipe.cli.prepare import data_of
from easypipe.core.config import apply_overrides, from_dict, load_yaml
from easypipe.core.errors import require
from easypipe.history import host_load
from easypipe.jobs import chain
from easypipe.pipeline import Pipeline
from easypipe.stages.config import PipelineConfig
from easypipe.train.config import TrainingConfig
from easypipe.train.record import recorded_seed


@dataclass(frozen=True)
class Described:
    """steps: of the run, where its config says so. within: what stands before the keys of `data` in
    the file, "data." in a run config.
    output_dir: of the run.
    """

    data: PipelineConfig
    steps: int | None
    within: str = ""
    output_dir: Path | None = None

    def refuse_streaming(self, problem: str, then: str) -> None:
        """Raises ConfigError where `data` streams. then: what can be done without it."""
        at = f"{self.within}streaming"
        require(
            not self.data.streaming,
            at,
            problem,
            f"Leave it out, here with --set {at}=false, {then}.",
        )

    def pipeline(self, **options: Any) -> Pipeline:
        """The chain up to where batches are made; nothing is saved and nothing put on a device."""
        return chain(self.data, save=False, **options)

    def loaded(self, **options: Any) -> Pipeline:
        """The same, with batches as the run makes them, but on no device."""
        return self.pipeline(**options).load(host_load(self.data))


def described(config: Path, overrides: list[str], *, needs_seed: bool = False) -> Described:
    """Raises ConfigError naming the key path of what is wrong; also where `needs_seed` and neither
    the config nor its run has a seed.
    """
    values = apply_overrides(load_yaml(config), overrides)
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
        "none is given, so every run draws its own order",
        "Set the seed that the run logged, or keep the run's train.output_dir.",
    )
    within = "data." if "data" in values else ""
    return Described(
        data,
        None if train is None else train.steps,
        within,
        None if train is None else Path(train.output_dir).expanduser(),
    )
