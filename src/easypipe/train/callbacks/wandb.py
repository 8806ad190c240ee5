"""The metrics of a run at Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from easypipe.core.checked import Json
from easypipe.core.errors import ConfigError
from easypipe.train.callbacks.config import WandbConfig
from easypipe.train.callbacks.metric import flat
from easypipe.train.events import Callback, TrainEvent


class Wandb(Callback):
    """A run that goes on from a checkpoint goes on in the same W&B run; `step` is the x axis, so
    lines written twice do no harm.
    """

    def __init__(self, config: WandbConfig, folder: Path, run_config: Json) -> None:
        """Raises ConfigError where the package wandb is not installed."""
        try:
            import wandb
        except ImportError as error:
            problem = f"needs the package wandb: {error}"
            raise ConfigError(
                at="train.callbacks.wandb", problem=problem, fix="pip install 'easypipe[wandb]'"
            ) from error
        self._wandb, self.config, self._folder = wandb, config, folder
        self._run_config = dict(run_config)
        self.id: str | None = None
        self._run: Any = None

    def on_init(self, event: TrainEvent) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._wandb.init(
                project=self.config.project,
                entity=self.config.entity,
                name=self.config.name,
                mode=self.config.mode,
                id=self.id,
                resume="allow" if self.id is not None and self.config.mode == "online" else None,
                dir=str(self._folder),
                config=self._run_config,
                settings=self._wandb.Settings(console="off", save_code=False, silent=True),
            )
        except self._wandb.Error as error:
            fix = "Run `wandb login`, or set train.callbacks.wandb.mode to offline."
            raise ConfigError(
                at="train.callbacks.wandb", problem=f"W&B does not begin: {error}", fix=fix
            ) from error
        self.id = self._run.id
        self._run.define_metric("*", step_metric="step")

    def on_step(self, event: TrainEvent) -> None:
        if self._run is not None:
            self._run.log(
                {name.replace(".", "/"): value for name, value in flat(event.record).items()}
            )

    def on_end(self, event: TrainEvent) -> None:
        self._finish(0)

    def on_exception(self, event: TrainEvent) -> None:
        self._finish(1)

    def state(self) -> Json:
        return {"id": self.id}

    def restore(self, state: Json) -> None:
        self.id = state["id"]

    def _finish(self, code: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=code)
            self._run = None
