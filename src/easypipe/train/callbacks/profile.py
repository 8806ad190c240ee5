"""A profile of a few steps, for TensorBoard's or Perfetto's eyes."""

from __future__ import annotations

import logging
from pathlib import Path

from easypipe.train.callbacks.config import ProfileConfig
from easypipe.train.events import Callback, TrainEvent

logger = logging.getLogger("easypipe")


class ProfilerWindow(Callback):
    """The window ends two dispatches after its last step, when that step is known to be through."""

    def __init__(self, config: ProfileConfig, folder: Path) -> None:
        self.folder = folder / "profile"
        self._first, self._last = config.start, config.start + config.steps - 1
        self._tracing = False

    def on_dispatch(self, event: TrainEvent) -> None:
        import jax

        if self._tracing and event.step > self._last + 1:
            self._stop()
        elif not self._tracing and self._first <= event.step <= self._last:
            self.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.folder))
            self._tracing = True

    def on_end(self, event: TrainEvent) -> None:
        self._stop()

    def on_exception(self, event: TrainEvent) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._tracing:
            import jax

            self._tracing = False
            jax.profiler.stop_trace()
            logger.info("profile of steps %d to %d: %s", self._first, self._last, self.folder)
