"""SIGINT and SIGTERM: the first asks the loop to save and leave, a second does as it always did."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

import jax

from easypipe.core.errors import TrainError
from easypipe.train.parallel.distributed import Largest


class Interrupted(TrainError):
    """Training was stopped by a signal, and saved at `step`.

    `exit_code` is what a shell expects: 128 + the signal's number.
    """

    in_all = True

    def __init__(self, *, signum: int, step: int, folder: str) -> None:
        self.signum, self.step = signum, step
        self.exit_code = 128 + signum
        name = signal.Signals(signum).name
        super().__init__(
            at=f"step {step}",
            problem=f"stopped by {name}, saved in {folder}",
            fix="Run the same command again to go on.",
        )


class StopSignals:
    """`with StopSignals() as stop:` — `stop.received` is the number of the signal that came before
    the last `stop.agree()`, or None.

    In a run of several processes `received` is the same in all of them, whichever the signal came
    to: they leave after the same step. Outside the main thread Python lets nobody handle signals:
    there nothing is received, and signals act as before.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self._came = 0  # the signal that this process has had
        self._largest = Largest() if jax.process_count() > 1 else None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def agree(self) -> None:
        """Called once a step, after the step was dispatched: takes note of what came, in another
        process one step later.
        """
        came = self._came if self._largest is None else self._largest(self._came)
        self.received = self.received or came or None

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._came = signum
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python and cannot be put back by it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
