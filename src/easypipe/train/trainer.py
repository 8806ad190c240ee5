"""The training loop: in which order it steps, evaluates, saves, rolls back; resumes a killed run.

Law (exact resume): kill the process at any moment and run again. The loss of every step in
metrics.jsonl is bit for bit the one that an uninterrupted run writes (same devices, same versions
of everything).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import easypipe
from easypipe.core import locks
from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError, EasypipeError, StateError, TrainError
from easypipe.core.protocols import BatchLoader
from easypipe.core.values import Arguments, Json
from easypipe.core.visible import first_of
from easypipe.train import state as states
from easypipe.train.callbacks.named import BestCheckpoints, EarlyStopping
from easypipe.train.checkpoint.checkpoint import Checkpoints, DamagedCheckpoint
from easypipe.train.checkpoint.differences import listed
from easypipe.train.checkpoint.files import CHECKPOINTS
from easypipe.train.checkpoint.resume import (
    ENDED,
    check_resume,
    check_same,
    data_differences,
    held_out_differences,
    loader_state,
    plain_json,
    run_differences,
    saved_loader_state,
)
from easypipe.train.checks import Closing, EpochStyle, Explaining, KnowingState
from easypipe.train.engine import Batch, Engine
from easypipe.train.events import Control, StatefulListener
from easypipe.train.metrics.devices import out_of_memory
from easypipe.train.metrics.log import METRICS, ROLLBACKS, MetricsFile, Record
from easypipe.train.model.pretrained.save import Seen, save_pretrained
from easypipe.train.parallel.mesh import place_batch
from easypipe.train.record import (
    LEDGER,
    check_record,
    drop_later,
    write_changes,
    write_config,
    write_fingerprints,
    write_kept,
    write_restart,
    write_versions,
)
from easypipe.train.report.pictures import plot_run
from easypipe.train.signals import Interrupted, StopSignals
from easypipe.train.spike_guard import SpikeGuard
from easypipe.train.step import Metrics

logger = logging.getLogger("easypipe")

# What is wrong with checkpoints whose weights of Engine.weights differ, and the fix.
_OTHERS = {
    "frozen": ("has adapters of other weights", "Train the model that they belong to"),
    "initial": (
        "belongs to a run that began with other weights, to which its reference or a roll-back "
        "returns",
        "Train the model that it began with",
    ),
}


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The outcome of a finished run.

    Attributes:
        steps: The last step of the run.
        resumed_from: The step of the checkpoint from which this process continued; None for a new
            run.
        first: The first record of metrics.jsonl.
        last: The last record of metrics.jsonl; `last["eval"]` holds the held-out losses.
        output_dir: The folder of the run.
        metrics: The path of metrics.jsonl.
        plot: The path of loss.png.
        checkpoint: The folder of the last checkpoint.
        model: The trained nnx.Module, on the mesh.
        tokenizer: The name or path of the tokenizer of the data, if it is known.
        seen: The record of the data that the run has seen, which `save` passes to save_pretrained.
    """

    steps: int
    resumed_from: int | None
    first: Record
    last: Record
    output_dir: Path
    metrics: Path
    plot: Path
    checkpoint: Path
    model: Any
    tokenizer: str | None
    seen: Seen

    def save(self, path: str | Path, *, tokenizer: Any = None) -> Path:
        """Writes the model and its tokenizer to the new folder `path`, for `transformers`.

        Adapters are merged into the weights. Errors are those of save_pretrained.

        Args:
            path: The folder to create.
            tokenizer: A tokenizer, as for save_pretrained; None: the tokenizer of the data.
        """
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        return save_pretrained(self.model, path, tokenizer=tokenizer, **self.seen.options())


def run_training(trainer: Engine) -> TrainResult:
    """Trains from the newest checkpoint in the output folder, or from the start, to the last step.

    An error is passed to the callbacks before it is raised. Errors are those of
    `easypipe.Trainer.run`.
    """
    try:
        with contextlib.ExitStack() as stack:
            return _Run(trainer, stack).finish()
    except BaseException as error:
        memory = out_of_memory(
            error,
            trainer.emitted,
            trainer.layout,
            trainer.optimizer,
            trainer.config,
            trainer.origin.config,
            trainer.train.batch_size,
        )
        raised = memory or error
        try:
            text = f"{type(raised).__name__}: {raised}"
            trainer.emit("exception", trainer.emitted, {"error": text})
        except Exception as second:  # noqa: BLE001  (of two errors, the first is the one to raise)
            raised.add_note(
                f"a callback failed when it was told of this: {type(second).__name__}: {second}"
            )
        if memory is not None:
            raise memory from error
        raise


class _Run:
    """One run of the loop: starts or resumes, then steps, judges each loss, evaluates and saves.

    If the spike guard finds that the loss left its range, the run rolls back to the last good
    checkpoint.
    """

    def __init__(self, trainer: Engine, stack: contextlib.ExitStack) -> None:
        """Opens files, locks and signal handlers on `stack`, and finds the first state."""
        self.trainer, self.config, folder = trainer, trainer.config, trainer.output_dir
        if trainer.writes:
            check_record(folder)
            stack.enter_context(locks.training(folder))
        stack.enter_context(states.on(trainer.mesh, trainer.rules))
        self.checkpoints = stack.enter_context(
            Checkpoints(folder / CHECKPOINTS, keep=self.config.checkpoint.keep)
        )
        self.stop = stack.enter_context(StopSignals())
        self.guard, self.control = SpikeGuard(self.config), Control()
        trainer.control = self.control
        self.checkpoints.protected["listeners"] = self.control.kept
        self.change: Json | None = None  # what differs from the run before the resume
        self.lines: Mapping[str, str | None] = {}  # digests of the .jsonl files at the save
        self.began: dict[str, dict[str, int]] = {}  # Engine.weights of the first state
        # The record of a step that a signal stopped before its evaluation.
        self.unevaluated: Record | None = None
        self.state, self.resumed_from = self._begin()
        self.step = self.resumed_from or 0
        if trainer.reference is not None:
            first = self.state if self.resumed_from is None else self._first()
            trainer.reference.keep(first.params)
            trainer.ask_reference(first)
        if trainer.writes:
            self._record(folder)
        written = self.step if self.unevaluated is None else self.step - 1
        files = (
            (METRICS, written, trainer.writes),
            (ROLLBACKS, self.step, trainer.writes and self.guard.guards),
        )
        self.metrics, self.rollbacks = (
            stack.enter_context(
                MetricsFile(
                    folder / name, after_step=step, write=write, digest=self.lines.get(name)
                )
            )
            for name, step, write in files
        )

    def finish(self) -> TrainResult:
        """Runs to the last step, or to the end that a callback asks for; returns the result.

        Raises:
            TrainError: metrics.jsonl holds no step, because a callback stopped the run before the
                first step or because the file of a finished run is empty.
        """
        trainer, control, folder = self.trainer, self.control, self.trainer.output_dir
        if control.ended is not None:
            where = f"step {self.step} of {trainer.steps}: {control.ended}"
            way = f"To continue training: train.resume_changes: [{ENDED}]"
            logger.warning("%s: the run ended at %s. %s.", folder, where, way)
        trainer.emit("start", self.step, state=self.state)
        if self.unevaluated is not None:
            self._evaluate_late(self.unevaluated)
        if self.step < trainer.steps and control.ended is None:
            self._loop()
        self.checkpoints.wait()
        if self.metrics.first is None or self.metrics.last is None:
            if control.reason is not None:
                raise TrainError(
                    at="callbacks",
                    problem=f"one stopped the run before its first step: {control.reason}",
                    fix="Stop in on_step or later.",
                )
            raise TrainError(
                at=str(self.metrics.path),
                problem="holds no line, though the run is finished",
                fix="Give another output_dir.",
            )
        if trainer.writes:
            plot_run(folder)
        if control.reason is not None:
            logger.warning("stopped at step %d of %d: %s", self.step, trainer.steps, control.reason)
        trainer.emit("end", self.step, self.metrics.last)
        return TrainResult(
            steps=self.step,
            resumed_from=self.resumed_from,
            first=self.metrics.first,
            last=self.metrics.last,
            output_dir=folder,
            metrics=self.metrics.path,
            plot=folder / "loss.png",
            checkpoint=self.checkpoints.folder / str(self.step),
            model=trainer.model(self.state),
            tokenizer=trainer.tokenizer,
            seen=trainer.seen,
        )

    # the loop

    def _loop(self) -> None:
        """Takes the steps up to the last one, and saves the last one.

        Raises:
            Interrupted: A signal stopped the run, after the step was saved.
        """
        trainer, control, checkpoints = self.trainer, self.control, self.checkpoints
        self.meter = trainer.meter()
        unread = None  # the newest step and its metrics: the device may still be computing it
        if self.config.checkpoint.every is not None:
            abstract = states.abstract_state(trainer.layout, trainer.optimizer)
            checkpoints.expect(trainer.saved(abstract))
        with contextlib.closing(_batches(trainer.train)) as batches:
            while self.step < trainer.steps and control.reason is None:
                placed = self._next_batch(batches)
                trainer.check_metrics(self.state, placed)
                self.step += 1
                trainer.emit("dispatch", self.step)
                checkpoints.copied()
                self.state, measured = trainer.train_step(self.state, placed)
                if unread is not None:
                    record, bad = self._read(*unread)
                    self._write(record)
                    if bad:  # this step started from a bad state: it is repeated from a good one
                        self._roll_back(self.step - 1)
                        self.state, measured = trainer.train_step(self.state, placed)
                unread = (self.step, measured)
                self.meter.push(measured)
                self.stop.agree()
                if self._settle(self.step, measured):
                    unread = None

    def _next_batch(self, batches: Iterator[Json]) -> Batch:
        """Returns the next batch on the mesh, with reference and noise columns added."""
        trainer = self.trainer
        batch = self.meter.next_batch(batches)
        if batch is None:
            raise TrainError(
                at=f"step {self.step + 1}",
                problem=f"the loader ended, {trainer.steps} steps were asked for",
                fix="Set num_epochs: null.",
            )
        placed = place_batch(batch, trainer.mesh, in_micro_batches=trainer.in_micro_batches)
        if "input_ids" in placed:
            trainer.seen = trainer.seen.longer(placed["input_ids"].shape[-1])
        placed = trainer.completed(self.state.rest, placed)
        if trainer.noise is None:
            return placed
        return {**placed, **trainer.noise(self.step + 1, placed)}

    def _settle(self, step: int, measured: Metrics) -> bool:
        """Evaluates, shows and saves `step`, the newest one, if that is due.

        Returns:
            Whether the metrics of `step` were read for that purpose.

        Raises:
            Interrupted: A signal came; the step is saved.
        """
        last, stopped = step == self.trainer.steps, self.stop.received is not None
        leaving = last or self.control.reason is not None
        calendar = last or _due(step, self.config.checkpoint.every)
        save = calendar or self.guard.owes or leaving or stopped or self.control.saving
        evaluate = leaving or _due(step, self.config.eval_every)
        # each of these needs a finite step
        if settled := save or evaluate or self.control.looking:
            record, bad = self._read(step, measured)
            if bad:
                self._roll_back(step)
            if evaluate and stopped and self.trainer.evals:
                self.unevaluated = record  # evaluated when the run continues
            elif evaluate and self.trainer.evals:
                record["eval"] = self.trainer.evaluate(step, self.state)
                self.meter.restart()
            if self.unevaluated is None:
                self._write(record)
            # Asked only now, because a callback may have ended the run at this step.
            if self.control.looking:
                self._look(step)
                self.meter.restart()
        # Read only now, because a callback may have asked during the evaluation.
        asked = self.control.reason is not None or self.control.saving
        if save or asked:
            self._save(step, calendar=calendar or self.guard.owes, asked=asked)
        if self.stop.received is not None and (not last or self.unevaluated is not None):
            self.checkpoints.wait()
            folder = str(self.checkpoints.folder)
            raise Interrupted(signum=self.stop.received, step=step, folder=folder)
        return settled

    def _evaluate_late(self, record: Record) -> None:
        """Evaluates the step from which the run continues, and saves it again with its record."""
        if self.trainer.evals:
            record["eval"] = self.trainer.evaluate(self.step, self.state)
        self._write(record)
        self.unevaluated = None
        if self.control.looking:
            self._look(self.step)
        self._commit(self.step)

    def _look(self, step: int) -> None:
        """Answers `Control.look`: callbacks see the model after `step`, and after its roll-back."""
        self.control.looking = False
        self.trainer.emit("look", step, state=self.state)

    def _read(self, step: int, measured: Metrics) -> tuple[Record, bool]:
        """Returns the record of `step` with the rates, and whether the run has to roll back."""
        record = self.meter.read(step, measured)
        return record | self.meter.rates(), self.guard.judge(record)

    def _write(self, record: Record) -> None:
        """Appends the record of a step to metrics.jsonl and emits it, if a line is due."""
        step, emit = record["step"], self.trainer.emit
        if "eval" in record or step == self.trainer.steps or _due(step, self.config.log_every):
            self.metrics.append(record)
            if "eval" in record:
                emit("evaluated", step, record["eval"])
            emit("step", step, record)

    def _save(self, step: int, *, calendar: bool, asked: bool) -> None:
        """Starts to save the state after `step`, unless the spike guard doubts that step.

        Args:
            step: The newest step, whose metrics were read.
            calendar: Whether the save was due by the configured interval. Only such checkpoints
                count as good, so that a run that was stopped and one that was not roll back to the
                same step.
            asked: Whether a callback asked for the save, which then happens even in doubt.
        """
        guard = self.guard
        guard.owes = calendar and guard.in_doubt and step < self.trainer.steps
        if guard.owes and self.stop.received is None and not asked:
            # A step that may be rolled back is not a good checkpoint: the next sound step is saved
            # instead.
            return
        if calendar and not guard.in_doubt:
            guard.good = step
            self.checkpoints.protected["watch"] = {step} if guard.guards else set()
        self._commit(step)
        stopped = {"stopped": self.stop.received is not None}
        self.trainer.emit("checkpoint", step, stopped, state=self.state)

    def _commit(self, step: int) -> None:
        """Starts to write the checkpoint of the state after `step`."""
        trainer, guard, control = self.trainer, self.guard, self.control
        control.saving = False
        self.metrics.sync()
        self.rollbacks.sync()
        run = {
            "identity": trainer.identity,
            "config": trainer.run_config,
            "train": to_dict(self.config),
            "watch": guard.state(),
            "ended": control.ended,
            "unevaluated": self.unevaluated,
            "given_callbacks": _states_of(trainer.given_callbacks),
            "named_callbacks": {
                name: callback.state() for name, callback in trainer.named_callbacks.items()
            },
            **self.began,
            "held_out": trainer.held_out,
            "origin": trainer.origin.record(),
            "tokenizer": trainer.tokenizer,
            "seen": trainer.seen.record(),
            "lines": {METRICS: self.metrics.digest(), ROLLBACKS: self.rollbacks.digest()},
            "loader": saved_loader_state(trainer.train),
        }
        self.checkpoints.save(step, trainer.saved(self.state), run)

    def _roll_back(self, step: int) -> None:
        """Replaces the state after `step` by the state of the last good checkpoint.

        The skipped batches and their documents are written to rollbacks.jsonl.
        """
        good = self.guard.good
        logger.warning(
            "step %d: back to the state of step %d; the batches of steps %d to %d are skipped",
            step,
            good,
            good + 1,
            step,
        )
        if self.trainer.writes:
            # A roll-back to the same checkpoint has skipped the batches up to its step already.
            told = 0 if self.rollbacks.last is None else self.rollbacks.last["step"]
            for batch in range(max(good, told) + 1, step + 1):
                line = {"step": step, "to": good, "batch_of_step": batch}
                self.rollbacks.append(line | _documents(self.trainer.train, batch - 1))
        self.state = self._load(good)
        self.trainer.emit("rollback", step, {"to": good})
        self.meter.restart()

    # continuing from a checkpoint

    def _begin(self) -> tuple[states.TrainState, int | None]:
        """Returns the state to start from and the step it was saved at (None for a new run).

        A damaged checkpoint is set aside and the next older one is used.

        Raises:
            DamagedCheckpoint: Every checkpoint is damaged. Only the owner may decide to start again
                over an existing run.
        """
        steps = self.checkpoints.steps()
        if not steps:
            return self._first(), None
        check_resume(self.checkpoints.folder, self.config, steps)
        damaged: dict[int, DamagedCheckpoint] = {}
        for step in reversed(steps):
            try:
                state = self._restore(step)
            except DamagedCheckpoint as error:
                damaged[step] = error
                continue
            for lost, error in damaged.items():
                where = self.checkpoints.set_aside(lost)
                logger.warning("%s; moved to %s, continuing from step %d", error, where, step)
            return state, step
        raise damaged[steps[-1]]  # only its owner may decide to start again

    def _restore(self, step: int) -> states.TrainState:
        """Restores the state after `step`, and loader, spike guard and callbacks.

        Raises:
            StateError: The run differs from the checkpoint in something that `resume_changes` does
                not allow, or its adapters belong to other weights.
        """
        trainer, config, checkpoints = self.trainer, self.config, self.checkpoints
        saved, at = checkpoints.run(step), checkpoints.folder / str(step)
        data = trainer.run_config.get("data", {})
        own, of_data = check_same(
            saved, trainer.identity, config.resume_changes, at, trainer.train, data
        )
        self._restore_loader(saved, at, [path.removeprefix("loader.") for path in of_data])
        self.began = {record: saved.get(record, {}) for record in _OTHERS}
        state = self._load(step)
        trainer.seen = trainer.seen.longer(Seen.recorded(saved).max_length)
        self.lines, self.unevaluated = saved.get("lines", {}), saved.get("unevaluated")
        self.guard.restore(saved.get("watch"), step, checkpoints.steps())
        if self.guard.guards:
            checkpoints.protected["watch"] = {self.guard.good}
        given = _saved_states(saved, trainer.given_callbacks, at)
        evals = held_out_differences(saved, trainer.held_out, trainer.run_config)
        states_of, named = saved.get("named_callbacks", {}), trainer.named_callbacks
        both = [*given, *((named[name], states_of[name]) for name in named if name in states_of)]
        for callback, kept in both:
            watches = isinstance(callback, EarlyStopping | BestCheckpoints)
            metric = callback.config.metric if watches else ""
            # its values may be of other data than those that follow
            if step == trainer.steps or trainer.known.of(metric) not in evals:
                callback.restore(kept)
        if own:  # the loader itself reports changes of the data
            logger.warning(
                "%s: resumed at step %d with changes: %s", trainer.output_dir, step, listed(own)
            )
        was_is = {"words": "was {saved}, is {here}"}
        changed = run_differences(saved, trainer.identity, **was_is) | of_data
        changed |= {path: text for one in evals.values() for path, text in one.items()}
        if of_data:
            changed |= data_differences(saved, data, **was_is)
        ended = saved.get("ended")
        if ENDED not in config.resume_changes:
            self.control.ended = ended
        elif ended:
            changed[ENDED] = f"it had ended: {ended}"
        was = loader_state(trainer.train, saved["loader"])
        row, components = (
            (was.row, was.components) if isinstance(was, KnowingState) else (None, None)
        )
        before = {"config": saved["config"], "components": components}
        self.change = {"row": row, "changed": changed, "before": before} if changed else None
        return state

    def _restore_loader(self, saved: Json, at: Path, changed: Sequence[str]) -> None:
        """Restores the loader; its data components in `changed` may differ."""
        train = self.trainer.train
        allowed: Arguments = {"allow_changed": changed} if changed else {}
        try:
            train.restore(loader_state(train, saved["loader"]), **allowed)
        except StateError as error:
            problem = f"belongs to a run on other data: {error.problem}"
            fix = "Change that back, or give another train.output_dir."
            raise StateError(at=str(at), problem=problem, fix=fix) from error
        except ConfigError as error:
            error.at = "train.resume_changes"  # which a loader calls allow_changed
            raise

    def _first(self) -> states.TrainState:
        """Returns the state before the first step.

        Raises:
            StateError: Its weights are not those that the run began with.
        """
        first = self.trainer.fresh()
        returns = self.trainer.reference is not None or self.guard.guards
        here = self.trainer.weights(first, trained=returns)
        for record, (problem, fix) in _OTHERS.items():
            before, found = self.began.get(record, {}), here[record]
            others = [name for name in sorted(before) if found.get(name) != before[name]]
            if others and (returns or record == "frozen"):
                raise StateError(
                    at=str(self.checkpoints.folder),
                    problem=f"{problem}: {first_of(others)} differ",
                    fix=f"{fix}, or give another train.output_dir.",
                )
            self.began[record] = found or before
        return first

    def _load(self, step: int) -> states.TrainState:
        """Loads the state after `step` from its checkpoint; for step 0, makes the initial state."""
        trainer, layout = self.trainer, self.trainer.layout
        if step == 0:
            return self._first()
        self.checkpoints.wait()
        abstract = states.abstract_state(layout, trainer.optimizer)
        loaded = self.checkpoints.load(step, trainer.saved(abstract))
        if layout.frozen:  # checkpoints leave out frozen parameters
            first = self._first().rest
            loaded |= {f"rest/{name}": first[name] for name in layout.frozen}
        return states.unflatten(loaded, abstract)

    def _record(self, folder: Path) -> None:
        """Writes the run's configuration, versions, changes and data fingerprints to its folder."""
        trainer, now = self.trainer, self.trainer.train.state()
        made_of = {"model": trainer.origin.shape, "train": self.config}
        write_versions(folder, self.step)  # before run.yaml: see check_record
        write_config(folder, trainer.run_config or made_of)
        if trainer.ledger is not None:
            write_kept(folder / LEDGER, trainer.ledger)
        if self.step:
            write_restart(folder, self.step)
        of_data = now.changes if isinstance(now, KnowingState) else ()
        write_changes(folder, self.step, self.change, of_data)
        evals = {one.name: one.loader for one in trainer.evals}
        write_fingerprints(folder, trainer.train, evals, trainer.steps)
        writers = {*trainer.named_callbacks, *(("spikes",) if self.guard.guards else ())}
        if any(isinstance(one, BestCheckpoints) for one in trainer.given_callbacks):
            writers.add("best")
        listed = drop_later(folder, self.step, self.checkpoints.steps(), writers)
        self.checkpoints.protected["best"] = listed


def _states_of(callbacks: Sequence[StatefulListener]) -> list[Json]:
    """Returns the states of the callbacks given from Python, with the names of their classes."""
    found = []
    for one in callbacks:
        at = f"callback {type(one).__name__}.state()"
        state = plain_json(at, one.state(), finite=False)
        found.append({"class": type(one).__qualname__, "state": state})
    return found


def _saved_states(
    saved: Json, callbacks: Sequence[StatefulListener], at: Path
) -> Iterator[tuple[StatefulListener, Json]]:
    """Yields each callback that has a state in a checkpoint, with that state.

    Several callbacks of a class get their states in order. A warning names states that belong to no
    callback.
    """
    left = list(saved.get("given_callbacks", ()))
    for one in callbacks:
        own = next((kept for kept in left if kept["class"] == type(one).__qualname__), None)
        if own is not None:
            left.remove(own)
            yield one, own["state"]
    if others := [kept["class"] for kept in left if kept["state"]]:
        text = "%s: holds states of callbacks that this run lacks: %s"
        logger.warning(text, at, first_of(others))
    # Older checkpoints hold states without the names of classes.
    yield from zip(callbacks, saved.get("callbacks", ()), strict=False)


def _batches(loader: BatchLoader) -> Generator[Json]:
    """Yields the batches of a loader, pass after pass if the loader is an EpochStyle.

    It ends after two successive passes without a batch.
    """
    empty = 0
    # If a loader was restored after the last batch of a pass, the rest of that pass is empty and
    # comes first.
    while empty < 2:
        empty += 1
        batches = iter(loader)
        with contextlib.ExitStack() as stack:
            if isinstance(batches, Closing):
                stack.callback(batches.close)
            for batch in batches:
                empty = 0
                yield batch
        if not isinstance(loader, EpochStyle):
            return


def _documents(loader: BatchLoader, batch: int) -> Record:
    """Returns which documents a batch holds, or {} if the loader does not know."""
    if not isinstance(loader, Explaining):
        return {}
    try:
        rows = loader.explain(batch).rows
    except EasypipeError as error:  # only information: the run continues
        return {"problem": str(error)}
    documents = [
        {
            "row_of_batch": row.row,
            "dataset": part.dataset,
            "file": part.file,
            "row": part.row,
            "token_start": part.token_start,
            "token_stop": part.token_stop,
        }
        for row in rows
        for part in row.segments
    ]
    return {"documents": documents}


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # an old name of easypipe.Trainer
        return easypipe.Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
