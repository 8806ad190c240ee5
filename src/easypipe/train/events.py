"""Events of a training run: what listeners and callbacks hear, and what they may ask of the run.

The command line draws them, tests stop on them, the trainer knows neither.

A listener is any function of a TrainEvent. A Callback is a listener with a method for each kind of
event, which may also ask the run to stop, and keep a state in its checkpoints. Records hold
Python numbers, read when the device had them ready; a model is made where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from easypipe.core.values import Json

EventKind = Literal[
    "start",
    "dispatch",
    "step",
    "eval",
    "evaluated",
    "look",
    "checkpoint",
    "rollback",
    "end",
    "exception",
]


@dataclass
class Control:
    """What listeners ask of the run.

    reason: why it shall stop after the step it is at, saved, as if that were its last. ended: the
    same, where that is the end of the run: run again, it stays there, unless train.resume_changes
    has "ended". saving: whether the step that was just evaluated shall be saved.
    kept: steps whose checkpoints are kept whatever their age. looking: whether the model shall be
    shown behind the step that is about to be taken.
    """

    reason: str | None = None
    ended: str | None = None
    saving: bool = False
    kept: set[int] = field(default_factory=set)
    looking: bool = False

    def stop(self, reason: str, *, for_good: bool = False) -> None:
        """for_good: run again, the run is found at its end; else it goes on from here."""
        self.reason = self.reason or reason
        if for_good:
            self.ended = self.ended or reason

    def save(self) -> None:
        """Asked from on_eval, or on_step of a step that was evaluated: of any other step the next
        one is under way.
        """
        self.saving = True

    def look(self) -> None:
        """Asked from on_dispatch: on_look of that step comes with its model, before it is saved."""
        self.looking = True


@dataclass(frozen=True, kw_only=True)
class TrainEvent:
    """Where the run stands after `step` of `steps`.

    start: the state is ready (step > 0: it was restored); the first step will compile.
    dispatch: `step` is about to be handed to the device (heard by callbacks only).
    step: a line went to metrics.jsonl, `record`.
    eval: batches of a held-out loader were seen; record has name, batches.
    evaluated: all were; record has what each came to, by name.
    look: a callback asked for the model of this step, which was read and is sound.
    checkpoint: a save of this step began.
    rollback: the state is again that of the step record["to"]; what came behind it is skipped.
    end: the last step is done and saved.
    exception: the run ends with the error record["error"] (its text), after the last step that was
    read.
    """

    kind: EventKind
    step: int
    steps: int
    record: Json = field(default_factory=dict)
    control: Control = field(default_factory=Control, compare=False)
    # of start, look and checkpoint: the model as it is now, for as long as the event is heard
    model: Callable[[], Any] | None = field(default=None, compare=False)


class TrainListener(Protocol):
    """Called on the training thread: quick, or training waits. What it raises ends the run."""

    def __call__(self, event: TrainEvent) -> None: ...


def null_listener(event: TrainEvent) -> None:
    """The listener of those who do not listen."""


@runtime_checkable
class StatefulListener(TrainListener, Protocol):
    """What a run takes for a callback: a listener with a state. A Callback is one."""

    def state(self) -> Json: ...
    def restore(self, state: Json) -> None: ...


class Callback:
    """A listener to subclass: override what you want to hear.

    `Trainer(..., callbacks=[MyCallback()])`.

    Called in every process of a run: what writes files does so in one of them (`jax.process_index()
    == 0`).
    """

    def __call__(self, event: TrainEvent) -> None:
        heard = {
            "start": self.on_init,
            "dispatch": self.on_dispatch,
            "step": self.on_step,
            "evaluated": self.on_eval,
            "look": self.on_look,
            "checkpoint": self.on_save,
            "rollback": self.on_rollback,
            "end": self.on_end,
            "exception": self.on_exception,
        }
        if event.kind in heard:
            heard[event.kind](event)

    def on_init(self, event: TrainEvent) -> None: ...
    def on_dispatch(self, event: TrainEvent) -> None: ...
    def on_step(self, event: TrainEvent) -> None: ...
    def on_eval(self, event: TrainEvent) -> None: ...
    def on_look(self, event: TrainEvent) -> None: ...
    def on_save(self, event: TrainEvent) -> None: ...
    def on_rollback(self, event: TrainEvent) -> None: ...
    def on_end(self, event: TrainEvent) -> None: ...
    def on_exception(self, event: TrainEvent) -> None: ...

    def state(self) -> Json:
        """Plain JSON, saved with every checkpoint."""
        return {}

    def restore(self, state: Json) -> None:
        """Goes on from `state`, called before on_init where a checkpoint has one."""
