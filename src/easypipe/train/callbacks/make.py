"""The callbacks of a configuration."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from easypipe.core.checked import Json
from easypipe.core.errors import ConfigError
from easypipe.train.callbacks.best import BestCheckpoints
from easypipe.train.callbacks.config import CallbacksConfig
from easypipe.train.callbacks.early_stopping import EarlyStopping
from easypipe.train.callbacks.heartbeat import Heartbeat
from easypipe.train.callbacks.metric import Known
from easypipe.train.callbacks.profile import ProfilerWindow
from easypipe.train.callbacks.tensorboard import TensorBoard
from easypipe.train.callbacks.wandb import Wandb
from easypipe.train.events import Callback, StatefulListener

_AT = "train.callbacks"


def checked_callbacks(given: object) -> tuple[StatefulListener, ...]:
    """Raises ConfigError for what are no callbacks."""
    several: Iterable[object] = (given,)
    if isinstance(given, Iterable) and not isinstance(given, StatefulListener | str):
        several = given
    callbacks: list[StatefulListener] = []
    for i, one in enumerate(several):
        if isinstance(one, type) or not isinstance(one, StatefulListener):
            fix = (
                "Make an object of a class that extends easypipe.train.events.Callback; those "
                "with names stand in a mapping: {best: {}}."
            )
            raise ConfigError(at=f"callbacks[{i}]", problem=f"{one!r} is no Callback", fix=fix)
        callbacks.append(one)
    return tuple(callbacks)


def make_callbacks(
    config: CallbacksConfig,
    folder: Path,
    known: Known,
    *,
    run_config: Json,
    process: int,
) -> dict[str, Callback]:
    """Name -> callback, for this process of the run: those that only write are made in the first
    one.

    Raises ConfigError for a metric that the run will not measure, a window after its end, and a
    package that is not installed. Touches no file.
    """
    made: dict[str, Callback] = {}
    if config.early_stopping is not None:
        known.check(f"{_AT}.early_stopping.metric", config.early_stopping.metric, training=True)
        made["early_stopping"] = EarlyStopping(config.early_stopping)
    if config.best is not None:
        known.check(f"{_AT}.best.metric", config.best.metric, training=False)
        made["best"] = BestCheckpoints(config.best, folder, write=process == 0)
    if config.heartbeat is not None:
        made["heartbeat"] = Heartbeat(config.heartbeat, folder, process=process)
    if config.profile is not None and config.profile.start > known.steps:
        problem = f"{config.profile.start}, but the run ends after {known.steps} steps"
        raise ConfigError(
            at=f"{_AT}.profile.start", problem=problem, fix=f"Give at most {known.steps}."
        )
    if process == 0:
        if config.tensorboard is not None:
            made["tensorboard"] = TensorBoard(config.tensorboard, folder)
        if config.wandb is not None:
            made["wandb"] = Wandb(config.wandb, folder, run_config)
        if config.profile is not None:
            made["profile"] = ProfilerWindow(config.profile, folder)
    return made
