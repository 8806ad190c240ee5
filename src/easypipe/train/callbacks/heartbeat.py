"""A small file that says that a run is alive, for whoever restarts those that are not."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from easypipe.core.config import config
from easypipe.core.errors import ConfigError, StorageError
from easypipe.train.events import Callback, TrainEvent


@config
class HeartbeatConfig:
    """Each process renews heartbeat-<process>.json in the output folder as its training goes on:
    step, steps, status (running, ended, stopped by a signal, failed), time (UNIX seconds), host and
    pid. A run that hangs renews nothing: it is the training thread that writes.
    """

    every_s: float = 10.0  # seconds between two renewals, at least

    def check(self) -> None:
        if not self.every_s >= 0:
            raise ConfigError(
                at="every_s",
                problem=f"{self.every_s} is no time",
                fix="10.0 is usual; 0.0 writes at every step.",
            )


class Heartbeat(Callback):
    """The file is whole at any moment: written beside, and renamed. It is not synced: after a crash
    of the machine it may be old.
    """

    def __init__(
        self,
        config: HeartbeatConfig,
        folder: Path,
        *,
        process: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = folder / f"heartbeat-{process}.json"
        self._every_s, self._clock, self._last = config.every_s, clock, float("-inf")

    def __call__(self, event: TrainEvent) -> None:
        if event.kind == "end":
            self._beat(event, "ended")
        elif event.kind == "exception":
            self._beat(
                event,
                "stopped" if str(event.record["error"]).startswith("Interrupted:") else "failed",
            )
        elif event.kind == "start" or self._clock() - self._last >= self._every_s:
            self._beat(event, "running")

    def _beat(self, event: TrainEvent, status: str) -> None:
        self._last = self._clock()
        told = {"step": event.step, "steps": event.steps, "status": status, "time": self._last}
        beside = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(
                json.dumps(told | {"host": socket.gethostname(), "pid": os.getpid()}),
                encoding="utf-8",
            )
            os.replace(beside, self.path)
        except OSError as error:
            raise StorageError(
                at=str(self.path),
                problem=f"cannot be written: {error}",
                fix="Check space and permissions.",
            ) from error
