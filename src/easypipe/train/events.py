"""Events of a training run: what listeners and callbacks receive, and what they may ask of the run.

The command line displays the events and tests stop on them; the trainer knows neither.

A listener is any function of a TrainEvent. A Callback is a listener with a method for each kind of
event, which may also ask the run to stop, and keep a state in its checkpoints. Records hold Python
numbers, read when the device had them ready; a model is made only if it is asked for.
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
    """The requests of listeners to the run.

    Attributes:
        reason: Why the run shall stop after its current step, which is then saved as if it were the
            last; None: it continues.
        ended: The same, if that is the final end of the run: it stays ended when it is started
            again, unless train.resume_changes has "ended".
        saving: Whether the step that was just evaluated shall be saved.
        kept: Steps whose checkpoints are kept whatever their age.
        looking: Whether an event "look" with the model shall follow the step that is about to be
            taken.
    """

    reason: str | None = None
    ended: str | None = None
    saving: bool = False
    kept: set[int] = field(default_factory=set)
    looking: bool = False

    def stop(self, reason: str, *, for_good: bool = False) -> None:
        """Stops the run after its current step.

        Args:
            reason: Why; the first reason that is given counts.
            for_good: Whether the run counts as ended when it is started again; otherwise it
                continues from here.
        """
        self.reason = self.reason or reason
        if for_good:
            self.ended = self.ended or reason

    def save(self) -> None:
        """Asks for a checkpoint of the step that was evaluated.

        Call it from on_eval, or from on_step of an evaluated step: after any other step, the next
        one is already running.
        """
        self.saving = True

    def look(self) -> None:
        """Asks for an on_look event of this step with its model, before the step is saved.

        Call it from on_dispatch; from on_step, the event is about the newest step.
        """
        self.looking = True


@dataclass(frozen=True, kw_only=True)
class TrainEvent:
    """An event of the run after `step` of `steps`.

    The kinds of events:

    - start: the state is ready (step > 0: it was restored); the first step will compile.
    - dispatch: `step` is about to be handed to the device (only callbacks receive this).
    - step: a line was written to metrics.jsonl; `record` is that line.
    - eval: some batches of a held-out loader were evaluated; `record` has name and batches.
    - evaluated: all were evaluated; `record` has the results by loader name.
    - look: a callback asked for the model of this step, which was read; if the run rolled back at
      it, that is the model of the checkpoint.
    - checkpoint: a save of this step began; record["stopped"] is whether a signal asked for it,
      and the run ends when it is complete.
    - rollback: the state is that of step record["to"] again; the batches after it are skipped.
    - end: the last step is done and saved.
    - exception: the run ends with the error record["error"] (its text), after the last step that
      was read.

    Attributes:
        kind: The kind of event.
        step: The step that the event is about.
        steps: The number of steps of the run.
        record: The numbers or names of the event.
        control: Takes requests to the run.
        model: For start, look and checkpoint: returns the current model, which is valid until the
            listener returns.
    """

    kind: EventKind
    step: int
    steps: int
    record: Json = field(default_factory=dict)
    control: Control = field(default_factory=Control, compare=False)
    model: Callable[[], Any] | None = field(default=None, compare=False)


class TrainListener(Protocol):
    """A function that receives the events of a run, on the training thread.

    It must be quick, because training waits for it. An exception from it ends the run.
    """

    def __call__(self, event: TrainEvent) -> None: ...


def null_listener(event: TrainEvent) -> None:
    """Ignores the event: the default listener."""


@runtime_checkable
class StatefulListener(TrainListener, Protocol):
    """The protocol of callbacks: listeners with a state that checkpoints keep."""

    def state(self) -> Json: ...
    def restore(self, state: Json) -> None: ...


class Callback:
    """A base class of listeners: override the methods of the events you want.

    `Trainer(..., callbacks=[MyCallback()])`.

    It is called in every process of a run: write files in one of them only (`jax.process_index() ==
    0`).
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
        """Returns plain JSON, which is saved with every checkpoint."""
        return {}

    def restore(self, state: Json) -> None:
        """Restores the `state` of a checkpoint; called before on_init."""
