"""The steps of one run: dispatch, read one step behind, judge, evaluate, save, and go back where a
loss left its range.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from easypipe.core.errors import EasypipeError, TrainError
from easypipe.train import state as states
from easypipe.train.checkpoint.checkpoint import Checkpoints
from easypipe.train.checks import has_passes
from easypipe.train.metrics.log import MetricsFile, Record
from easypipe.train.parallel.mesh import place_batch
from easypipe.train.signals import Interrupted, StopSignals
from easypipe.train.state import TrainState
from easypipe.train.watch import Watch

if TYPE_CHECKING:
    from easypipe.train.trainer import Engine

logger = logging.getLogger("easypipe")


class Loop:
    """Runs `trainer` from a state to its last step."""

    def __init__(
        self,
        trainer: Engine,
        checkpoints: Checkpoints,
        metrics: MetricsFile,
        rollbacks: MetricsFile,
        stop: StopSignals,
        watch: Watch,
    ) -> None:
        self._trainer, self._config, self._steps = trainer, trainer.config, trainer.steps
        self._checkpoints, self._metrics, self._rollbacks = checkpoints, metrics, rollbacks
        self._stop, self._watch, self._meter = stop, watch, trainer.meter()

    def run(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """The state after the last step, saved, and which that was: a listener may have asked for
        an earlier end.

        Raises Interrupted after a signal, and TrainError.
        """
        trainer, meter, control = self._trainer, self._meter, self._trainer.control
        batches: Any = _passes(trainer.train) if has_passes(trainer.train) else iter(trainer.train)
        unread = None
        if self._config.checkpoint.every is not None:
            self._checkpoints.expect(
                trainer.saved(states.abstract_state(trainer.layout, trainer.optimizer))
            )
        with contextlib.closing(batches) if hasattr(batches, "close") else contextlib.nullcontext():
            while step < self._steps and control.reason is None:
                batch = meter.next_batch(batches)
                if batch is None:
                    raise TrainError(
                        at=f"step {step + 1}",
                        problem=f"the loader ended, {self._steps} steps were asked for",
                        fix="Set num_epochs: null.",
                    )
                trainer.seen = trainer.seen.longer(
                    batch["input_ids"].shape[-1] if "input_ids" in batch else None
                )
                placed = place_batch(batch, trainer.mesh, in_micro_batches=trainer.in_micro_batches)
                placed = trainer.completed(state.rest, placed)
                step += 1
                trainer.tell("dispatch", step)
                self._checkpoints.copied()
                state, measured = trainer.train_step(state, placed)
                if unread is not None:
                    record, bad = self._read(*unread)
                    self._write(record)
                    # this step began where it must not have: it is taken again from the good state
                    if bad:
                        state, measured = trainer.train_step(self._roll_back(step - 1), placed)
                unread = (step, measured)
                meter.push(measured)
                self._stop.agree()
                leaving = self._stop.received is not None or control.reason is not None
                calendar = step == self._steps or _due(step, self._config.checkpoint.every)
                save_due = calendar or self._watch.owes or leaving
                eval_due = step == self._steps or leaving or _due(step, self._config.eval_every)
                if save_due or eval_due:  # both need to know that this step was sound
                    state = self._settle(
                        state, *unread, evaluate=eval_due and self._stop.received is None
                    )
                    unread = None
                # now: an evaluation may have asked
                asked = control.reason is not None or control.saving
                if save_due or asked:
                    self._save(step, state, calendar=calendar or self._watch.owes, asked=asked)
                if self._stop.received is not None and step < self._steps:
                    self._checkpoints.wait()
                    raise Interrupted(
                        signum=self._stop.received, step=step, folder=str(self._checkpoints.folder)
                    )
        return state, step

    def _settle(self, state: TrainState, step: int, measured: Any, *, evaluate: bool) -> TrainState:
        """Reads the newest step, goes back if it has to be, and evaluates what then stands."""
        record, bad = self._read(step, measured)
        if bad:
            state = self._roll_back(step)
        if evaluate and self._trainer.evals:
            record["eval"] = self._trainer.evaluate(step, state)
            self._meter.restart()
        self._write(record)
        return state

    def _read(self, step: int, measured: Any) -> tuple[Record, bool]:
        """What `step` measured, with the rates where its line is due, and whether the run has to go
        back.
        """
        record = self._meter.read(step, measured)
        return record | self._meter.rates(), self._watch.judge(record)

    def _write(self, record: Record) -> None:
        """The line of a step, if one is due."""
        step = record["step"]
        if not ("eval" in record or step == self._steps or step % self._config.log_every == 0):
            return
        self._metrics.append(record)
        if "eval" in record:
            self._trainer.tell("evaluated", step, record["eval"])
        self._trainer.tell("step", step, record)

    def _save(self, step: int, state: TrainState, *, calendar: bool, asked: bool) -> None:
        """calendar: it was due anyway, whatever signals came, so that a run which was stopped and
        one which was not go back to the same.
        asked: a listener wants it, in doubt or not."""
        watch, self._trainer.control.saving = self._watch, False
        watch.owes = calendar and watch.in_doubt and step < self._steps
        if watch.owes and self._stop.received is None and not asked:
            # what may have to be undone is no good checkpoint: saved once a sound step follows
            return
        if calendar and not watch.in_doubt:
            watch.good = step
            self._checkpoints.protected["watch"] = {step} if watch.guards else set()
        self._metrics.sync()
        self._rollbacks.sync()
        self._trainer.save(self._checkpoints, step, state, self._watch)
        self._trainer.tell("checkpoint", step)

    def _roll_back(self, step: int) -> TrainState:
        good = self._watch.good
        logger.warning(
            "step %d: back to the state of step %d; the batches of steps %d to %d are skipped",
            step,
            good,
            good + 1,
            step,
        )
        if jax.process_index() == 0:
            for line in self._skipped(good, step):
                self._rollbacks.append(line)
        state = self._trainer.state_of(self._checkpoints, good)
        self._trainer.tell("rollback", step, {"to": good})
        self._meter.restart()
        return state

    def _skipped(self, good: int, step: int) -> Iterator[Record]:
        """A line for each batch that is skipped, with its documents where the loader can tell
        them.
        """
        explain = getattr(self._trainer.train, "explain", None)
        for batch in range(good + 1, step + 1):
            line: Record = {"step": step, "to": good, "batch_of_step": batch}
            if explain is not None:
                try:
                    line["documents"] = _documents(explain(batch - 1))
                # the run goes on: what it trains does not depend on it
                except EasypipeError as error:
                    line["problem"] = str(error)
            yield line


def _passes(loader: Any) -> Iterator[Any]:
    """The batches of all passes, one behind the other."""
    empty = 0
    # where the loader was restored behind the last batch of a pass, what is left of it is none
    while empty < 2:
        empty += 1
        batches: Any = iter(loader)
        with contextlib.closing(batches) if hasattr(batches, "close") else contextlib.nullcontext():
            for batch in batches:
                empty = 0
                yield batch


def _documents(explained: Any) -> list[dict[str, Any]]:
    keys = ("dataset", "file", "row", "token_start", "token_stop")
    return [
        {"row_of_batch": row.row, **{key: getattr(s, key) for key in keys}}
        for row in explained.rows
        for s in row.segments
    ]


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
