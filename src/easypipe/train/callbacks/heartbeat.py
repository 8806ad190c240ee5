"""A small file that says that a run is alive, for whoever restarts those that are not."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from easypipe.core.errors import StorageError
from easypipe.train.callbacks.config import HeartbeatConfig
from easypipe.train.events import Callback, TrainEvent


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
