"""Which callbacks a run has, by name."""

from __future__ import annotations

from easypipe.core.config import config
from easypipe.train.callbacks.best import BestConfig
from easypipe.train.callbacks.early_stopping import EarlyStoppingConfig
from easypipe.train.callbacks.heartbeat import HeartbeatConfig
from easypipe.train.callbacks.profile import ProfileConfig
from easypipe.train.callbacks.tensorboard import TensorBoardConfig
from easypipe.train.callbacks.wandb import WandbConfig


@config
class CallbacksConfig:
    """Callbacks by name; one that is given, if only as `{}`, is on. Others come from Python:
    `Trainer(..., callbacks=[...])`.
    """

    # end the run when a metric no longer gets better
    early_stopping: EarlyStoppingConfig | None = None
    best: BestConfig | None = None  # keep the checkpoints that do best on held-out data
    tensorboard: TensorBoardConfig | None = None  # event files
    wandb: WandbConfig | None = None  # Weights & Biases
    profile: ProfileConfig | None = None  # trace a few steps
    heartbeat: HeartbeatConfig | None = None  # a file that says that the run is alive
