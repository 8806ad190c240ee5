"""What a run tells those who watch it: the command line draws it, tests stop on it, the trainer knows neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class TrainEvent:
    """Where the run stands after `step` of `steps`.

    start: the state is ready (step > 0: it was restored); the first step will compile.   step: a line went to metrics.jsonl, `record`.
    eval: batches of a held-out loader were seen; record has name, batches.   checkpoint: a save of this step began.
    end: the last step is done and saved.
    """

    kind: Literal["start", "step", "eval", "checkpoint", "end"]
    step: int
    steps: int
    record: Mapping[str, Any] = field(default_factory=dict)


class TrainListener(Protocol):
    """Called on the training thread: quick, or training waits. What it raises ends the run."""

    def __call__(self, event: TrainEvent) -> None: ...


def unheard(event: TrainEvent) -> None:
    """The listener of those who do not listen."""
