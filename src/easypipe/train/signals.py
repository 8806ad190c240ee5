"""SIGINT and SIGTERM: the first saves and exits with a last message, a second acts as usual."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

import jax

from easypipe.core.errors import TrainError
from easypipe.train.parallel.distributed import Largest


class Interrupted(TrainError):
    """The error of a run that a signal stopped, after it was saved at `step`.

    Attributes:
        signum: The number of the signal.
        step: The step that was saved.
        exit_code: The exit code that a shell expects: 128 + the signal's number.
    """

    in_all = True

    def __init__(self, *, signum: int, step: int, folder: str) -> None:
        self.signum, self.step = signum, step
        self.exit_code = 128 + signum
        name = signal.Signals(signum).name
        super().__init__(
            at=f"step {step}",
            problem=f"stopped by {name}, saved in {folder}",
            fix="Run the same command again to continue.",
        )


class StopSignals:
    """A context manager that records a stop signal instead of letting it end the process.

    In a run of several processes, `received` is the same in all of them, whichever process received
    the signal, so that they exit after the same step. Python lets only the main thread handle
    signals: in another thread nothing is received, and signals act as before.

    Attributes:
        received: The number of the signal that came before the last `agree()`, or None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self._came = 0  # the signal that this process received, or 0
        self._largest = Largest() if jax.process_count() > 1 else None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def agree(self) -> None:
        """Registers a signal; called once a step, after the step was dispatched.

        A signal to another process is registered one step later.
        """
        came = self._came if self._largest is None else self._largest(self._came)
        self.received = self.received or came or None

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        """Records the signal, and restores the handlers, so that a second signal acts as usual."""
        self._came = signum
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            # None means that the handler was not installed from Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
