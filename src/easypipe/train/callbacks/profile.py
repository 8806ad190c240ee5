"""A profile of a few steps, for TensorBoard's or Perfetto's eyes."""

from __future__ import annotations

import logging
from pathlib import Path

from easypipe.core.config import config
from easypipe.core.errors import ConfigError
from easypipe.train.events import Callback, TrainEvent

logger = logging.getLogger("easypipe")


@config
class ProfileConfig:
    """Traces host and devices from the dispatch of step `start` until `steps` steps are through.
    The traces lie in `profile/` in the output folder (one process of a run writes them);
    `tensorboard --logdir` opens it, with the plugin of the package xprof.
    """

    start: int = 10  # the first step that is traced; step 1 compiles
    steps: int = 3

    def check(self) -> None:
        for name in ("start", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    at=name, problem=f"{getattr(self, name)} is too small", fix="Give at least 1."
                )


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
