"""Callbacks that send a run's numbers, and how it ended, to Weights & Biases, trackio or MLflow."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from easypipe.core.errors import ConfigError, raising
from easypipe.core.values import Json
from easypipe.train.callbacks.config import MlflowConfig, TrackioConfig, WandbConfig
from easypipe.train.events import Callback, TrainEvent

Config = TypeVar("Config", WandbConfig, TrackioConfig, MlflowConfig)


def installed(name: str, package: str) -> ModuleType:
    """Imports the package of a callback.

    Raises:
        ConfigError: The package is not installed.
    """
    at, fix = f"train.callbacks.{name}", f"pip install 'easypipe[{name}]'"
    with raising(ConfigError, at, f"needs the package {package}", fix, ImportError):
        return importlib.import_module(package)


def flat(record: Json, under: str = "") -> dict[str, float]:
    """Returns every number of a record, by dotted name; None values are left out."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{under}{key}.")
        elif isinstance(value, int | float):
            found[f"{under}{key}"] = value
    return found


class Tracker(Callback, Generic[Config]):
    """The base of callbacks that send numbers to a service.

    A run that is resumed from a checkpoint continues the same run of the service. Lines that are
    sent twice do no harm, because they carry their step.

    Attributes:
        name: The name of the service, of its package and of its config key.
        id: The id of the run in the service.
    """

    name: ClassVar[str]
    id: str | None = None
    _run: Any = None  # None before it begins and after it ends

    def __init__(self, config: Config, folder: Path, run_config: Json) -> None:
        """Imports the service's package.

        Raises:
            ConfigError: The package is not installed.
        """
        self._service = installed(self.name, self.name)
        self.config, self._folder, self._run_config = config, folder, dict(run_config)

    def send(self, step: int, values: dict[str, float]) -> None:
        """Sends the numbers of a step."""
        raise NotImplementedError

    def finish(self, *, failed: bool) -> None:
        """Ends the run of the service."""
        raise NotImplementedError

    def on_step(self, event: TrainEvent) -> None:
        if self._run is not None:
            values = flat(event.record)
            self.send(event.step, {name.replace(".", "/"): one for name, one in values.items()})

    def on_end(self, event: TrainEvent) -> None:
        self._close(failed=False)

    def on_exception(self, event: TrainEvent) -> None:
        self._close(failed=True)

    def state(self) -> Json:
        return {"id": self.id}

    def restore(self, state: Json) -> None:
        self.id = state["id"]

    def _close(self, *, failed: bool) -> None:
        if self._run is not None:
            self.finish(failed=failed)
            self._run = None


class Wandb(Tracker[WandbConfig]):
    """Sends the numbers to Weights & Biases."""

    name = "wandb"

    def on_init(self, event: TrainEvent) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with raising(
            ConfigError,
            "train.callbacks.wandb",
            "W&B does not start",
            "Run `wandb login`, or set train.callbacks.wandb.mode to offline.",
            self._service.Error,
        ):
            self._run = self._service.init(
                project=self.config.project,
                entity=self.config.entity,
                name=self.config.name,
                mode=self.config.mode,
                id=self.id,
                resume="allow" if self.id is not None and self.config.mode == "online" else None,
                dir=str(self._folder),
                config=self._run_config,
                settings=self._service.Settings(console="off", save_code=False, silent=True),
            )
        self.id = self._run.id
        self._run.define_metric("*", step_metric="step")

    def send(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio(Tracker[TrackioConfig]):
    """Sends the numbers to trackio, whose runs are identified by their names."""

    name = "trackio"

    def on_init(self, event: TrainEvent) -> None:
        self._run = self._service.init(
            project=self.config.project,
            name=self.id or self.config.name,
            config=self._run_config,
            resume="never" if self.id is None else "allow",
            embed=False,
        )
        self.id = self._run.name

    def send(self, step: int, values: dict[str, float]) -> None:
        self._run.log({name: one for name, one in values.items() if name != "step"}, step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish()


class Mlflow(Tracker[MlflowConfig]):
    """Sends the numbers to MLflow."""

    name = "mlflow"
    _refused: ClassVar = re.compile(r"[^/\w.\- :]")  # in the names of metrics

    def on_init(self, event: TrainEvent) -> None:
        at = "train.callbacks.mlflow"
        where = self.config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        files = None  # where MLflow keeps files
        if where is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            where = f"sqlite:///{self._folder.absolute()}/mlflow.db"
            files = (self._folder.absolute() / "mlflow").as_uri()
        fix, error = "Check tracking_uri.", self._service.exceptions.MlflowException
        with raising(ConfigError, at, "MLflow does not start", fix, error):
            client = self._service.MlflowClient(tracking_uri=where)
            if self.id is None:
                found = client.get_experiment_by_name(self.config.experiment)
                experiment = (
                    client.create_experiment(self.config.experiment, files)
                    if found is None
                    else found.experiment_id
                )
                self.id = client.create_run(experiment, run_name=self.config.name).info.run_id
                client.log_dict(self.id, self._run_config, "config.json")
            else:
                client.update_run(self.id, status="RUNNING")
        self._run = client

    def send(self, step: int, values: dict[str, float]) -> None:
        made, now = self._service.entities.Metric, int(time.time() * 1000)
        named = ((self._refused.sub("_", name), value) for name, value in values.items())
        metrics = [made(name, value, now, step) for name, value in named]
        self._run.log_batch(self.id, metrics=metrics)

    def finish(self, *, failed: bool) -> None:
        self._run.set_terminated(self.id, "FAILED" if failed else "FINISHED")
