"""The trainer and its loop: set up, step, evaluate, save, roll back, resume where a run was killed.

Law (exact resume): kill the process at any moment and run again; the loss of every step in
metrics.jsonl is bit for bit what one uninterrupted run writes (same devices, same versions of
everything).

`Engine` says what a run is made of, and touches no file; `_Run` is one call of `Engine.run`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import easypipe
from easypipe.core import locks
from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError, EasypipeError, StateError, TrainError, require
from easypipe.core.protocols import BatchLoader, Turns
from easypipe.core.values import Arguments, Json
from easypipe.train import state as states
from easypipe.train.callbacks.named import Known, checked_callbacks, make_callbacks
from easypipe.train.checkpoint.checkpoint import Checkpoints, DamagedCheckpoint
from easypipe.train.checkpoint.differences import differences, listed
from easypipe.train.checkpoint.files import CHECKPOINTS
from easypipe.train.checkpoint.resume import (
    ENDED,
    check_changes,
    check_newest,
    check_resume,
    check_same,
    data_differences,
    identity_of,
    loader_state,
    saved_loader_state,
)
from easypipe.train.checks import (
    Closing,
    EpochStyle,
    Explaining,
    KnowingState,
    check_loader,
    micro_batches,
    num_batches,
    resolve_steps,
    sources_of,
)
from easypipe.train.config import UNPAIRED, TrainingConfig
from easypipe.train.events import (
    Callback,
    Control,
    EventKind,
    TrainEvent,
    TrainListener,
    null_listener,
)
from easypipe.train.losses.cached_reference import CachedReference, Passes
from easypipe.train.losses.loss import LossFn, default_loss
from easypipe.train.losses.measures import Measures, named
from easypipe.train.losses.preference import Reference, preference_loss
from easypipe.train.losses.unpaired import answers_elsewhere, unpaired_loss
from easypipe.train.metrics.devices import out_of_memory, peak_flops
from easypipe.train.metrics.log import METRICS, ROLLBACKS, MetricsFile, Record, perplexity
from easypipe.train.metrics.meter import Meter
from easypipe.train.model.flops import adapter_flops, flops_from_sums, palm_flops_per_step, windows
from easypipe.train.model.lora import fingerprint
from easypipe.train.model.pretrained.files import short
from easypipe.train.model.pretrained.origin import Model, origin_of
from easypipe.train.model.pretrained.save import Seen, save_pretrained
from easypipe.train.optim.config import OptimizerConfig
from easypipe.train.optim.optimizers import Optimizer, make_optimizer, make_schedule
from easypipe.train.parallel.config import mesh_config
from easypipe.train.parallel.mesh import (
    batch_shards,
    check_batch_size,
    checked_mesh,
    make_mesh,
    place_batch,
)
from easypipe.train.record import (
    from_anywhere,
    write_changes,
    write_config,
    write_fingerprints,
    write_restart,
    write_versions,
)
from easypipe.train.report.pictures import plot_run
from easypipe.train.signals import Interrupted, StopSignals
from easypipe.train.spike_guard import SpikeGuard
from easypipe.train.step import Metrics, make_eval_step, make_train_step
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

logger = logging.getLogger("easypipe")

Batch = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run.

    `first` and `last` are records of metrics.jsonl; `last["eval"]` has the held-out losses.
    """

    steps: int
    resumed_from: int | None  # the step of the checkpoint it went on from
    first: Record
    last: Record
    output_dir: Path
    metrics: Path
    plot: Path
    checkpoint: Path
    model: Any  # the trained nnx.Module, on the mesh
    tokenizer: str | None  # of the data, where it is known
    seen: Seen  # what the data was, for `save`

    def save(self, path: str | Path, *, tokenizer: Any = None) -> Path:
        """Writes the model and its tokenizer to the new folder `path`, for `transformers`.

        Adapters are merged. tokenizer: as save_pretrained takes it; None: the one of the data.
        Raises what save_pretrained raises.
        """
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        return save_pretrained(self.model, path, tokenizer=tokenizer, **self.seen.options())


@dataclass(frozen=True)
class HeldOut:
    """A loader of held-out data, which every evaluation reads from where it stood when the trainer
    was made.
    """

    name: str
    loader: BatchLoader
    start: Any  # the state of `loader` there
    sources: Sequence[str] = ()  # the datasets that are told apart


class Engine:
    """What `easypipe.Trainer`, which takes all of this and data besides, is made of; the rest of
    this package trains with it.

    Args:
        model: A ModelConfig or ClassifierConfig; a published model, by its folder or Hub name (more
            in a PretrainedConfig), whose files are read onto the mesh when the run begins; a
            function of nnx.Rngs that builds an nnx.Module; such a module, whose arrays are copied;
            or a Flax Linen module, through nnx.bridge.
        config: How to train it.
        train: Anything that is a BatchLoader; batches have input_ids and labels, Int32[B, S], and
            segment_ids and position_ids where rows are packed. A batch is the batch of one
            optimizer step.
        evals: Held-out loaders by name.
        loss: A function of (module, batch) that gives a mean over the batch's targets, such a mean
            and further ones by name, or a LossOutput of sums (see
            easypipe.train.losses.loss.AsSums); default: `loss_sums`, for modules that have
            Decoder's `hidden` and `lm_head`; for others, which give logits when they are called,
            `logits_loss_sums`.
        run_config: The resolved configuration of the whole run, kept in every checkpoint for
            whoever reads it later.
        listener: Hears how the run goes; see easypipe.train.events.
        callbacks: Hear it too, and may stop the run or keep a state.
        mesh: Default: `make_mesh(config.mesh)`, whose axes any other has too; give the loader the
            same one, and its batches are used where they lie.
        optimizer: Any optax transformation over a flat dict of parameters by dotted name, schedule
            and clipping included, in place of `config.optimizer`.
        tokenizer: Name or path of the one that made the tokens; recorded, so that it can be saved
            with the model.
        turns: How the conversations of the data are written; recorded for the same reason.

    Raises:
        ConfigError: Something cannot run; as PlacementError where rows do not fit the mesh. What
            load_pretrained raises for a published model, of which config.json is read; no other
            file is touched, and no array made.
    """

    def __init__(
        self,
        model: Model,
        config: TrainingConfig,
        train: BatchLoader,
        evals: Mapping[str, BatchLoader] | None = None,
        *,
        loss: LossFn | None = None,
        run_config: Json | None = None,
        listener: TrainListener = null_listener,
        callbacks: Sequence[Callback] = (),
        mesh: Mesh | None = None,
        optimizer: optax.GradientTransformation | None = None,
        tokenizer: str | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.config, self.train, self.listener, self.control = config, train, listener, Control()
        self.writes = jax.process_index() == 0  # whether this process writes the files of the run
        self.output_dir = Path(config.output_dir).expanduser()
        self.tokenizer = None if tokenizer is None else from_anywhere(tokenizer)
        self.seen = Seen.of(turns)
        self.run_config = to_dict(run_config or {})
        self.passes: Passes | None = None  # over all data, for whoever has to read it before a step
        self.emitted = 0  # the step of the newest event
        self.frozen: dict[str, int] = {}  # fingerprints of what is not trained
        self._lay_out(mesh)
        self._check_loaders(evals or {})
        scores = config.preference is not None and config.preference.scores
        self.origin = origin_of(model, config.seed, config.lora, scores=scores)
        self._make_callbacks(callbacks, own_loss=loss is not None)
        self.identity = identity_of(
            config,
            self.origin.shape,
            self.steps,
            train.batch_size,
            own_optimizer=optimizer is not None,
        )
        check_changes(config.resume_changes, self.identity)
        self._compile(loss, optimizer)

    def _lay_out(self, mesh: Mesh | None) -> None:
        laid_out = mesh_config(self.config.mesh, "train.mesh")
        self.rules = laid_out.rules
        self.spread = ("data",) if laid_out.preset == "zero1" else ()
        self.mesh = make_mesh(laid_out, at="train.mesh") if mesh is None else checked_mesh(mesh)

    def _check_loaders(self, evals: Mapping[str, BatchLoader]) -> None:
        config, pieces = self.config, self.config.accumulate_steps
        check_loader(self.train, "train")
        for name, loader in evals.items():
            check_loader(loader, f"evals.{name}")
        self.steps = resolve_steps(config, self.train)
        asked = "sources" in config.measure
        self.sources = sources_of(self.train, "train") if asked else ()
        self.evals = tuple(
            HeldOut(name, one, one.state(), sources_of(one, f"evals.{name}") if asked else ())
            for name, one in evals.items()
        )
        for one in self.evals:
            require(
                config.eval_batches is not None or num_batches(one.loader) is not None,
                "train.eval_batches",
                f"held-out loader {one.name!r} never ends",
                "Say how many of its batches to look at.",
            )
        check_batch_size(self.train.batch_size, self.mesh, pieces)
        self.in_micro_batches = micro_batches("train.accumulate_steps", self.train, pieces)
        for name, loader in evals.items():
            check_batch_size(loader.batch_size, self.mesh, at=f"eval.{name}.batch_size")
            micro_batches(f"eval.{name}.load.accumulation_steps", loader, 1)

    def _make_callbacks(self, given: Sequence[Callback], *, own_loss: bool) -> None:
        config = self.config
        own_loss = own_loss or config.preference is not None or bool(config.measure)
        known = Known(
            [one.name for one in self.evals],
            config.eval_every,
            self.steps,
            own_loss,
            tokenizer=self.tokenizer,
            seen=lambda: self.seen,
        )
        self.given_callbacks = checked_callbacks(given)
        self.named_callbacks = make_callbacks(
            config.callbacks,
            self.output_dir,
            known,
            run_config=self.run_config,
            process=jax.process_index(),
        )
        self.callbacks = (*self.given_callbacks, *self.named_callbacks.values())

    def _compile(self, loss: LossFn | None, optimizer: optax.GradientTransformation | None) -> None:
        """Finds the layout, the optimizer and the steps; compiled when they are first called."""
        config = self.config
        # Shapes of any other module are asked for on one device: the mesh itself would refuse a
        # size without naming the parameter.
        apart = self.mesh if self.origin.config else make_mesh(devices=[self.mesh.devices.flat[0]])
        with states.on(apart, self.rules):
            abstract = nnx.eval_shape(self.origin.build)
            self.layout = states.layout_of(
                abstract, self.mesh, self.origin.trained, spread=self.spread
            )
        schedule = None
        if optimizer is None:
            schedule = make_schedule(config.optimizer, self.steps)
            self.optimizer = make_optimizer(
                config.optimizer, self.steps, self.layout.decays, self.layout.hidden
            )
        elif config.optimizer == OptimizerConfig():
            self.optimizer = Optimizer(optimizer)
        else:
            problem = (
                "given, and so is an optimizer from Python, which would leave it without effect"
            )
            raise ConfigError(at="train.optimizer", problem=problem, fix="Leave one of them out.")
        self.reference = None
        if config.preference is not None:
            require(
                loss is None,
                "train.preference",
                "given, and so is a loss from Python",
                "Leave one of them out.",
            )
            unpaired = config.preference.loss in UNPAIRED
            loss = (unpaired_loss if unpaired else preference_loss)(config.preference)
            if config.preference.reference == "cached" and config.preference.compares:
                self.reference = CachedReference(self.layout)
            elif config.preference.compares:
                elsewhere = answers_elsewhere if config.preference.loss == "kto" else None
                self.reference = Reference(self.layout, elsewhere)
        twice = loss  # what can be differentiated twice
        if loss is None:
            platform = self.mesh.devices.flat[0].platform
            loss, twice = default_loss(abstract, config.loss, platform, self._measures())
        else:
            require(
                not config.measure,
                "train.measure",
                "has no effect on a loss from Python, which measures its own",
                "Leave it out.",
            )
        self.train_step = make_train_step(
            self.layout,
            self.optimizer,
            schedule,
            loss,
            accumulate_steps=config.accumulate_steps,
            curvature_loss=twice,
            windows=windows(self.origin.config) if self.origin.config else (None,),
        )
        self.eval_step = make_eval_step(self.layout, loss)

    def _measures(self) -> Measures:
        """What is measured of targets, as `train.measure` names it."""
        names, sizes = self.config.measure, None
        if "bits_per_byte" in names:
            name = self.tokenizer
            sizes = None if name is None else load_tokenizer(name).text_bytes()
            require(
                sizes is not None,
                "train.measure",
                "bits_per_byte, and of this data no tokenizer is known"
                if name is None
                else f"bits_per_byte, and tokens of {name!r} are not bytes of the text",
                "Leave it out, or name another: Trainer(tokenizer=...).",
            )
        each = (self.sources, *(one.sources for one in self.evals))
        return Measures(names, max(map(len, each)), sizes)

    def check_checkpoint(
        self,
        *,
        unknown: Sequence[str] = (),
        loader: Callable[[], BatchLoader | None] = lambda: None,
    ) -> None:
        """Raises what `run` would raise for the newest checkpoint in output_dir, as far as it can
        be known without data and arrays; unknown and loader as check_newest takes them.
        """
        check_newest(self.output_dir / CHECKPOINTS, self.config, self.identity, unknown, loader)

    def run(self) -> TrainResult:
        """Trains from the newest checkpoint in output_dir, or from the start, to the last step.

        Raises:
            Interrupted: After SIGINT or SIGTERM, once the step reached is saved.
            TrainError: A batch without targets, losses that are not finite (see
                TrainingConfig.on_nonfinite) or leave their range for ever, a loader that ends
                early, or a device out of memory: it names what is held and what to change.
            StateError: A checkpoint of another run.
            TrainError: Another process trains in output_dir.
            StorageError: Something cannot be written.
        """
        try:
            with contextlib.ExitStack() as stack:
                return _Run(self, stack).finish()
        except BaseException as error:
            memory = out_of_memory(
                error,
                self.emitted,
                self.layout,
                self.optimizer,
                self.config,
                self.origin.config,
                self.train.batch_size,
            )
            raised = memory or error
            try:
                text = f"{type(raised).__name__}: {raised}"
                self.emit("exception", self.emitted, {"error": text})
            except Exception as second:  # noqa: BLE001  (of two errors, the first is the one to raise)
                raised.add_note(
                    f"a callback failed when it heard of this: {type(second).__name__}: {second}"
                )
            if memory is not None:
                raise memory from error
            raise

    def emit(
        self,
        kind: EventKind,
        step: int,
        record: Json | None = None,
        state: states.TrainState | None = None,
    ) -> None:
        """Passes an event to the listener and the callbacks, with the model of a state."""
        self.emitted = step
        event = TrainEvent(
            kind=kind,
            step=step,
            steps=self.steps,
            record=record or {},
            control=self.control,
            model=None if state is None else functools.partial(self.model, state),
        )
        if kind != "dispatch":  # as often as steps, and with nothing to show
            self.listener(event)
        for callback in self.callbacks:
            callback(event)

    def model(self, state: states.TrainState) -> Any:
        """The module of a state, averaged where the optimizer averages."""
        params = self.optimizer.eval_params(state.optimizer, state.params)
        return self.layout.merge(params, state.rest)

    def fresh(self) -> states.TrainState:
        """The state before the first step."""
        state = self.origin.state(self.layout, self.optimizer)
        self.frozen = fingerprint({name: state.rest[name] for name in sorted(self.layout.frozen)})
        return state

    def ask_reference(self, first: states.TrainState) -> None:
        """Asks a cached reference of all answers of the data."""
        if isinstance(self.reference, CachedReference):
            if self.passes is None:
                raise ConfigError(
                    at="train.preference.reference",
                    problem="cached, and of a loader it is not known how all data is read once",
                    fix="Give data in place of a loader, or leave it out.",
                )
            self.reference.fill(first, self.passes, self.mesh, to_dict(self.origin.shape))

    def saved(self, state: states.TrainState) -> Arguments:
        """What a checkpoint has of a state, or of an abstract one."""
        return self.layout.without_frozen(states.flatten(state))

    def completed(self, rest: Batch, batch: Batch) -> Batch:
        """A batch on the mesh with what its loss needs besides.

        Args:
            rest: Of the model, what is not trained.
            batch: On the mesh.
        """
        return batch if self.reference is None else self.reference.added(rest, batch)

    def evaluate(self, step: int, state: states.TrainState) -> dict[str, Record]:
        """What every held-out loader comes to, by name, after `step`.

        Returns:
            loss and nll (nats a token, over all targets of all batches, the short last one
            included), ppl, what the loss gives besides, and num_targets. nll and ppl are None of a
            loss that gives no nll.

        Raises:
            TrainError: Nothing is a target, or the loss is not finite.
        """
        params = self.optimizer.eval_params(state.optimizer, state.params)
        return {one.name: self._evaluate(one, step, params, state.rest) for one in self.evals}

    def _evaluate(self, held_out: HeldOut, step: int, params: Batch, rest: Batch) -> Record:
        loader, name, sums = held_out.loader, held_out.name, []
        loader.restore(held_out.start)
        shards = batch_shards(self.mesh)
        rows = -(-loader.batch_size // shards) * shards
        for batch in itertools.islice(iter(loader), self.config.eval_batches):
            placed = self.completed(rest, place_batch(batch, self.mesh, rows=rows))
            sums.append(self.eval_step(params, rest, placed))
            if len(sums) > 2:
                # batches in flight hold memory: two are enough to keep the device busy
                jax.block_until_ready(sums[-3])
            self.emit("eval", step, {"name": name, "batches": len(sums)})
        outs = jax.device_get(sums)
        num_targets = sum(int(out.num_targets) for out in outs)
        counts = [out.num_targets if out.weight_sum is None else out.weight_sum for out in outs]
        divisor = math.fsum(map(float, counts)) or 1

        def mean(values: Iterator[Any]) -> float:
            return math.fsum(map(float, values)) / divisor

        if num_targets == 0:
            raise TrainError(
                at=f"eval.{name}",
                problem=f"no label to predict in {len(outs)} batches",
                fix="Look at its loss_mask and its length.",
            )
        loss, nll = mean(out.loss_sum for out in outs), mean(out.nll_sum for out in outs)
        if not math.isfinite(loss):
            raise TrainError(
                at=f"eval.{name}",
                problem=f"the held-out loss is {loss}",
                fix="Look for labels outside the vocabulary.",
            )
        more = {key: mean(out.more[key] for out in outs) for key in outs[0].more}
        sums = functools.partial(jax.tree.map, lambda *parts: np.sum(parts, axis=0, dtype=float))
        with np.errstate(invalid="ignore"):  # of a dataset that has no target
            quotients = {
                key: (top / below).tolist()
                for key, (top, below) in sums(*(out.ratios for out in outs)).items()
            }
        more |= {
            key: value if math.isfinite(value) else None
            for key, value in named(quotients, held_out.sources)
        }
        known = nll if math.isfinite(nll) else None
        record = {"loss": loss, "nll": known, "ppl": perplexity(nll)}
        return record | more | {"num_targets": num_targets}

    def meter(self) -> Meter:
        """What reads this run's steps."""
        config, devices = self.origin.config, self.mesh.devices.flat
        peak = peak_flops(devices[0])
        local = [one for one in devices if one.process_index == jax.process_index()]
        if config is None:
            return Meter(None, None, local, self.sources)
        params = self.layout.params.items()
        adapted = sum(leaf.size for name, leaf in params if not name.startswith("added."))
        more = adapter_flops(config, adapted) if self.layout.frozen else 0

        def flops(measured: Json) -> tuple[float, float]:
            tokens, slots = measured["num_tokens"], measured["num_slots"]
            exact = flops_from_sums(config, tokens, measured["attended"])
            palm = palm_flops_per_step(config, slots, measured["seq_length"])
            return exact + more * tokens, float(palm + more * slots)

        peak = None if peak is None else peak * self.mesh.size
        return Meter(flops, peak, local, self.sources)


class _Run:
    """One call of `Engine.run`: begin or go on, step, judge, evaluate, save, and go back where a
    loss left its range.
    """

    def __init__(self, trainer: Engine, stack: contextlib.ExitStack) -> None:
        """Opens what the run needs, on `stack`, and finds the state to go on from."""
        self.trainer, self.config, folder = trainer, trainer.config, trainer.output_dir
        if trainer.writes:
            stack.enter_context(locks.training(folder))
        stack.enter_context(states.on(trainer.mesh, trainer.rules))
        self.checkpoints = stack.enter_context(
            Checkpoints(folder / CHECKPOINTS, keep=self.config.checkpoint.keep)
        )
        self.stop = stack.enter_context(StopSignals())
        self.guard, self.control = SpikeGuard(self.config), Control()
        trainer.control = self.control
        self.checkpoints.protected["listeners"] = self.control.kept
        self.change: Json | None = None  # what the run goes on with that was another before
        self.lines: Mapping[str, str | None] = {}  # digests of the files of lines when it was saved
        self.state, self.resumed_from = self._begin()
        self.step = self.resumed_from or 0
        if trainer.reference is not None:
            first = self.state if self.resumed_from is None else trainer.fresh()
            trainer.reference.keep(first.params)
            trainer.ask_reference(first)
        if trainer.writes:
            self._record(folder)
        self.metrics, self.rollbacks = (
            stack.enter_context(
                MetricsFile(
                    folder / name, after_step=self.step, write=write, digest=self.lines.get(name)
                )
            )
            for name, write in (
                (METRICS, trainer.writes),
                (ROLLBACKS, trainer.writes and self.guard.guards),
            )
        )

    def finish(self) -> TrainResult:
        """Runs to the last step, or to an earlier end that a callback asked for."""
        trainer, control, folder = self.trainer, self.control, self.trainer.output_dir
        if control.ended is not None:
            where = f"step {self.step} of {trainer.steps}: {control.ended}"
            way = f"To train on: train.resume_changes: [{ENDED}]"
            logger.warning("%s: the run ended at %s. %s.", folder, where, way)
        trainer.emit("start", self.step, state=self.state)
        if self.step < trainer.steps and control.ended is None:
            self._loop()
        self.checkpoints.wait()
        if self.metrics.first is None or self.metrics.last is None:
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
        """Steps to the last one, which is saved.

        Raises:
            Interrupted: After a signal.
        """
        trainer, control, checkpoints = self.trainer, self.control, self.checkpoints
        self.meter = trainer.meter()
        unread = None  # the newest step and its metrics: the device may still be at work on it
        if self.config.checkpoint.every is not None:
            abstract = states.abstract_state(trainer.layout, trainer.optimizer)
            checkpoints.expect(trainer.saved(abstract))
        with contextlib.closing(_batches(trainer.train)) as batches:
            while self.step < trainer.steps and control.reason is None:
                placed = self._next_batch(batches)
                self.step += 1
                trainer.emit("dispatch", self.step)
                checkpoints.copied()
                self.state, measured = trainer.train_step(self.state, placed)
                if unread is not None:
                    record, bad = self._read(*unread)
                    self._write(record)
                    if bad:  # this step began where it must not have: taken again from a good state
                        self._roll_back(self.step - 1)
                        self.state, measured = trainer.train_step(self.state, placed)
                unread = (self.step, measured)
                self.meter.push(measured)
                self.stop.agree()
                if self._settle(self.step, measured):
                    unread = None

    def _next_batch(self, batches: Iterator[Json]) -> Batch:
        """The next batch, on the mesh, complete."""
        trainer = self.trainer
        batch = self.meter.next_batch(batches)
        if batch is None:
            raise TrainError(
                at=f"step {self.step + 1}",
                problem=f"the loader ended, {trainer.steps} steps were asked for",
                fix="Set num_epochs: null.",
            )
        if "input_ids" in batch:
            trainer.seen = trainer.seen.longer(batch["input_ids"].shape[-1])
        placed = place_batch(batch, trainer.mesh, in_micro_batches=trainer.in_micro_batches)
        return trainer.completed(self.state.rest, placed)

    def _settle(self, step: int, measured: Metrics) -> bool:
        """Evaluates and saves where `step`, the newest, is due; whether it was read for that.

        Raises:
            Interrupted: A signal came, and the step is saved.
        """
        last, stopped = step == self.trainer.steps, self.stop.received is not None
        leaving = stopped or self.control.reason is not None
        calendar = last or _due(step, self.config.checkpoint.every)
        save = calendar or self.guard.owes or leaving or self.control.saving
        evaluate = last or leaving or _due(step, self.config.eval_every)
        if settled := save or evaluate:  # both need to know that this step was sound
            record, bad = self._read(step, measured)
            if bad:
                self._roll_back(step)
            if evaluate and not stopped and self.trainer.evals:
                record["eval"] = self.trainer.evaluate(step, self.state)
                self.meter.restart()
            self._write(record)
        # now: an evaluation may have asked
        asked = self.control.reason is not None or self.control.saving
        if save or asked:
            self._save(step, calendar=calendar or self.guard.owes, asked=asked)
        if self.stop.received is not None and not last:
            self.checkpoints.wait()
            folder = str(self.checkpoints.folder)
            raise Interrupted(signum=self.stop.received, step=step, folder=folder)
        return settled

    def _read(self, step: int, measured: Metrics) -> tuple[Record, bool]:
        """What `step` measured, with the rates, and whether the run has to go back."""
        record = self.meter.read(step, measured)
        return record | self.meter.rates(), self.guard.judge(record)

    def _write(self, record: Record) -> None:
        """The line of a step, if one is due."""
        step, emit = record["step"], self.trainer.emit
        if "eval" in record or step == self.trainer.steps or _due(step, self.config.log_every):
            self.metrics.append(record)
            if "eval" in record:
                emit("evaluated", step, record["eval"])
            emit("step", step, record)

    def _save(self, step: int, *, calendar: bool, asked: bool) -> None:
        """Begins to save the state after `step`, unless it is in doubt.

        Args:
            step: The newest, which was read.
            calendar: It was due anyway, whatever signals came, so that a run which was stopped and
                one which was not go back to the same.
            asked: A callback wants it, in doubt or not.
        """
        trainer, guard, control = self.trainer, self.guard, self.control
        control.saving = False
        guard.owes = calendar and guard.in_doubt and step < trainer.steps
        if guard.owes and self.stop.received is None and not asked:
            # what may have to be undone is no good checkpoint: saved once a sound step follows
            return
        if calendar and not guard.in_doubt:
            guard.good = step
            self.checkpoints.protected["watch"] = {step} if guard.guards else set()
        self.metrics.sync()
        self.rollbacks.sync()
        run = {
            "identity": trainer.identity,
            "config": trainer.run_config,
            "train": to_dict(self.config),
            "watch": guard.state(),
            "ended": control.ended,
            "callbacks": [callback.state() for callback in trainer.given_callbacks],
            "named_callbacks": {
                name: callback.state() for name, callback in trainer.named_callbacks.items()
            },
            "frozen": trainer.frozen,
            "origin": trainer.origin.record(),
            "tokenizer": trainer.tokenizer,
            "seen": trainer.seen.record(),
            "lines": {METRICS: self.metrics.digest(), ROLLBACKS: self.rollbacks.digest()},
            "loader": saved_loader_state(trainer.train),
        }
        self.checkpoints.save(step, trainer.saved(self.state), run)
        trainer.emit("checkpoint", step, state=self.state)

    def _roll_back(self, step: int) -> None:
        """Takes the state of the last good checkpoint in place of that after `step`."""
        good = self.guard.good
        logger.warning(
            "step %d: back to the state of step %d; the batches of steps %d to %d are skipped",
            step,
            good,
            good + 1,
            step,
        )
        if self.trainer.writes:
            for batch in range(good + 1, step + 1):
                line = {"step": step, "to": good, "batch_of_step": batch}
                self.rollbacks.append(line | _documents(self.trainer.train, batch - 1))
        self.state = self._load(good)
        self.trainer.emit("rollback", step, {"to": good})
        self.meter.restart()

    # going on from a checkpoint

    def _begin(self) -> tuple[states.TrainState, int | None]:
        """The state to go on from, and the step it was saved at (None: a new run)."""
        steps = self.checkpoints.steps()
        if not steps:
            return self.trainer.fresh(), None
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
                logger.warning("%s; moved to %s, going on from step %d", error, where, step)
            return state, step
        raise damaged[
            steps[-1]
        ]  # to begin anew over a run that is there is for its owner to decide

    def _restore(self, step: int) -> states.TrainState:
        """The state after `step`; brings loader, guard and callbacks to where they stood then."""
        trainer, config, checkpoints = self.trainer, self.config, self.checkpoints
        saved, at = checkpoints.run(step), checkpoints.folder / str(step)
        data = trainer.run_config.get("data", {})
        own, of_data = check_same(
            saved, trainer.identity, config.resume_changes, at, trainer.train, data
        )
        self._restore_loader(saved, at, [path.removeprefix("loader.") for path in of_data])
        state = self._load(step)
        before = saved.get("frozen", {})
        if others := sorted(name for name in before if trainer.frozen.get(name) != before[name]):
            raise StateError(
                at=str(at),
                problem=f"has adapters of other weights: {short(others)} differ",
                fix="Train the model that they belong to, or give another train.output_dir.",
            )
        trainer.seen = trainer.seen.longer(Seen.recorded(saved).max_length)
        self.lines = saved.get("lines", {})
        self.guard.restore(saved.get("watch"), step, checkpoints.steps())
        if self.guard.guards:
            checkpoints.protected["watch"] = {self.guard.good}
        given = zip(trainer.given_callbacks, saved.get("callbacks", ()), strict=False)
        named = saved.get("named_callbacks", {})
        both = [
            (one, named[name]) for name, one in trainer.named_callbacks.items() if name in named
        ]
        for callback, kept in (*given, *both):
            callback.restore(kept)
        if own:  # of the others the loader tells
            logger.warning(
                "%s: resumed at step %d with changes: %s", trainer.output_dir, step, listed(own)
            )
        was_is = {"words": "was {saved}, is {here}"}
        changed = differences(saved["identity"], trainer.identity, **was_is) | of_data
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
        train = self.trainer.train
        allowed: Arguments = {"allow_changed": changed} if changed else {}
        try:
            train.restore(loader_state(train, saved["loader"]), **allowed)
        except StateError as error:
            problem = f"belongs to a run on other data: {error.problem}"
            fix = "Change that back, or give another train.output_dir."
            raise StateError(at=str(at), problem=problem, fix=fix) from error

    def _load(self, step: int) -> states.TrainState:
        """The state after `step`, from its checkpoint; 0: before the first."""
        trainer, layout = self.trainer, self.trainer.layout
        if step == 0:
            return trainer.fresh()
        self.checkpoints.wait()
        abstract = states.abstract_state(layout, trainer.optimizer)
        loaded = self.checkpoints.load(step, trainer.saved(abstract))
        if layout.frozen:  # what is not trained is where the run began
            first = trainer.fresh().rest
            loaded |= {f"rest/{name}": first[name] for name in layout.frozen}
        return states.unflatten(loaded, abstract)

    def _record(self, folder: Path) -> None:
        """Writes into the run's folder what it is made of, and what changed since it began."""
        trainer, now = self.trainer, self.trainer.train.state()
        made_of = {"model": trainer.origin.shape, "train": self.config}
        write_config(folder, trainer.run_config or made_of)
        write_versions(folder, self.step)
        if self.step:
            write_restart(folder, self.step)
        of_data = now.changes if isinstance(now, KnowingState) else ()
        write_changes(folder, self.step, self.change, of_data)
        evals = {one.name: one.loader for one in trainer.evals}
        write_fingerprints(folder, trainer.train, evals)


def _batches(loader: BatchLoader) -> Generator[Json]:
    """The batches of a loader; of all passes, one behind the other, where it has such."""
    empty = 0
    # where the loader was restored behind the last batch of a pass, what is left of it is none
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
    """Which documents a batch holds, where the loader knows."""
    if not isinstance(loader, Explaining):
        return {}
    try:
        rows = loader.explain(batch).rows
    except EasypipeError as error:  # the run goes on: what it trains does not depend on it
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
    if name == "Trainer":  # under the name that it has always had here; it stands on a higher floor
        return easypipe.Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
