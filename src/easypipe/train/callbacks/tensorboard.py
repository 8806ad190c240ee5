"""The metrics of a run as TensorBoard's event files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from easypipe.core.errors import ConfigError
from easypipe.train.callbacks.config import TensorBoardConfig
from easypipe.train.callbacks.metric import flat
from easypipe.train.events import Callback, TrainEvent


class TensorBoard(Callback):
    """A run that goes on from step n hides what an earlier process wrote of later steps."""

    def __init__(self, config: TensorBoardConfig, folder: Path) -> None:
        """Raises ConfigError where the package tensorboardX is not installed."""
        try:
            from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            problem = f"needs the package tensorboardX: {error}"
            raise ConfigError(
                at="train.callbacks.tensorboard",
                problem=problem,
                fix="pip install 'easypipe[tensorboard]'",
            ) from error
        self.folder = (
            folder / "tensorboard" if config.folder is None else Path(config.folder).expanduser()
        )
        self._make, self._flush_s, self._writer = SummaryWriter, config.flush_s, None

    def on_init(self, event: TrainEvent) -> None:
        hidden_from = event.step + 1 if event.step else None
        # its files are named by the second: a run that goes on at once would write over itself
        suffix = f".{event.step}.{os.getpid()}"
        self._writer: Any = self._make(
            str(self.folder),
            purge_step=hidden_from,
            flush_secs=self._flush_s,
            filename_suffix=suffix,
        )

    def on_step(self, event: TrainEvent) -> None:
        if self._writer is None:
            return
        for name, value in flat(event.record).items():
            if name != "step":
                tag = name.replace(".", "/") if name.startswith("eval.") else f"train/{name}"
                self._writer.add_scalar(tag, value, event.step)

    def on_end(self, event: TrainEvent) -> None:
        self._close()

    def on_exception(self, event: TrainEvent) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
