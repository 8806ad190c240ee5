"""The training loop: a loader's batches into a model, with checkpoints from which a killed run goes
on as if it had not been killed.

Law (exact resume): kill the process at any moment and run again; the loss of every step in
metrics.jsonl is bit for bit what one uninterrupted run writes (same devices, same versions of
everything).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

import easypipe
from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError, StateError, TrainError
from easypipe.core.protocols import BatchLoader
from easypipe.train import state as states
from easypipe.train.callbacks.make import make_callbacks
from easypipe.train.callbacks.metric import Known
from easypipe.train.checkpoint.checkpoint import Checkpoints, DamagedCheckpoint, differences, listed
from easypipe.train.checkpoint.files import CHECKPOINTS
from easypipe.train.checks import (
    ENDED,
    IF_THERE,
    LOADER_PARTS,
    MUST_MATCH,
    check_changes,
    check_newest,
    check_resume,
    check_same,
    checked_callbacks,
    is_under,
    loader_state,
    micro_batches,
    resolve_steps,
    saved_loader_state,
)
from easypipe.train.config import TrainingConfig
from easypipe.train.evaluate import HeldOut, held_out
from easypipe.train.events import Callback, Control, TrainEvent, TrainListener, unheard
from easypipe.train.loop import Loop
from easypipe.train.losses.loss import LossFn, LossOutput, default_loss
from easypipe.train.losses.preference import Reference, preference_loss
from easypipe.train.metrics.log import MetricsFile, Record
from easypipe.train.metrics.memory import out_of_memory
from easypipe.train.metrics.meter import Meter
from easypipe.train.metrics.peak import peak_flops
from easypipe.train.metrics.plot import plot_run
from easypipe.train.model.flops import adapter_flops, flops_from_sums, palm_flops_per_step, windows
from easypipe.train.model.lora import fingerprint
from easypipe.train.model.pretrained.files import short
from easypipe.train.model.pretrained.origin import Model, origin_of
from easypipe.train.model.pretrained.save import Seen, save_pretrained
from easypipe.train.optim.config import OptimizerConfig
from easypipe.train.optim.optimizers import Optimizer, make_optimizer
from easypipe.train.optim.schedules import make_schedule
from easypipe.train.parallel.config import mesh_config
from easypipe.train.parallel.mesh import check_batch_size, checked_mesh, make_mesh
from easypipe.train.record import write_changes, write_config, write_fingerprints, write_versions
from easypipe.train.signals import StopSignals
from easypipe.train.step import make_eval_step, make_train_step
from easypipe.train.watch import Watch
from easypipe.transforms.chat.render import Turns

logger = logging.getLogger("easypipe")


_WAS_IS = "was {saved}, is {here}"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run. `first` and `last` are records of metrics.jsonl; `last["eval"]` has the
    held-out losses.
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
        """Writes the model, its adapters merged, and its tokenizer to the new folder `path`, for
        `transformers`.

        tokenizer: as save_pretrained takes it; None: the one of the data. Raises what
        save_pretrained raises.
        """
        return save_pretrained(
            self.model,
            path,
            tokenizer=self.tokenizer if tokenizer is None else tokenizer,
            **self.seen.options(),
        )


class Engine:
    """What `easypipe.Trainer`, which takes all of this and data besides, is made of; the rest of
    this package trains with it.

    model: a ModelConfig or ClassifierConfig; a published model, by its folder or Hub name (more in
    a PretrainedConfig), whose files are read onto the mesh when the run begins; a function of
    nnx.Rngs that builds an nnx.Module; such a module, whose arrays are copied; or a Flax Linen
    module, through nnx.bridge. train, evals: anything that is a BatchLoader; batches have input_ids
    and labels, Int32[B, S], and segment_ids and position_ids where rows are packed. A batch is the
    batch of one optimizer step.
    loss: a function of (module, batch) that gives a mean over the batch's targets, such a mean and
    further ones by name, or a LossOutput of sums (see easypipe.train.losses.loss.AsSums); default:
    `loss_sums`, for modules that have Decoder's `hidden` and `lm_head`; for others, which give
    logits when they are called, `logits_loss_sums`.
    run_config: the resolved configuration of the whole run, kept in every checkpoint for whoever
    reads it later. listener, callbacks: hear how the run goes; see easypipe.train.events.
    optimizer: any optax transformation over a flat dict of parameters by dotted name, schedule and
    clipping included, in place of `config.optimizer`.
    tokenizer: name or path of the one that made the tokens; recorded, so that it can be saved with
    the model.
    turns: how the conversations of the data are written; recorded for the same reason.
    mesh: default: `make_mesh(config.mesh)`, whose axes any other has too; give the loader the same
    one, and its batches are used where they lie.
    """

    def __init__(
        self,
        model: Model,
        config: TrainingConfig,
        train: BatchLoader,
        evals: Mapping[str, BatchLoader] | None = None,
        *,
        loss: LossFn | None = None,
        run_config: Mapping[str, Any] | None = None,
        listener: TrainListener = unheard,
        callbacks: Sequence[Callback] = (),
        mesh: Mesh | None = None,
        optimizer: optax.GradientTransformation | None = None,
        tokenizer: str | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Raises ConfigError and PlacementError for what cannot run, and what load_pretrained
        raises for a published model, of which config.json is read; touches no other file and makes
        no array.
        """
        self.config, self.train, self.listener, self.control = config, train, listener, Control()
        self.writes = jax.process_index() == 0  # whether this process writes the files of the run
        laid_out = mesh_config(config.mesh, "train.mesh")
        self.mesh, self.rules = (
            make_mesh(laid_out, at="train.mesh") if mesh is None else checked_mesh(mesh),
            laid_out.rules,
        )
        self.steps = resolve_steps(config, train)
        self.output_dir = Path(config.output_dir).expanduser()
        self.metrics_path, self.plot_path = (
            self.output_dir / "metrics.jsonl",
            self.output_dir / "loss.png",
        )
        self.rollbacks_path, self._told = self.output_dir / "rollbacks.jsonl", 0
        self.evals = held_out(evals or {}, max_batches=config.eval_batches)
        check_batch_size(train.batch_size, self.mesh, config.accumulate_steps)
        self.in_micro_batches = micro_batches(
            "train.accumulate_steps", train, config.accumulate_steps
        )
        for one in self.evals:
            one.check(self.mesh)
            micro_batches(f"eval.{one.name}.load.accumulation_steps", one.loader, 1)
        self.origin = origin_of(model, config.seed, config.lora)
        self.tokenizer, self.seen = tokenizer, Seen.of(turns)
        self._own_optimizer = optimizer is not None
        self._frozen: dict[str, Any] = {}
        # what the run goes on with that was another before
        self._change: dict[str, Any] | None = None
        self._run_config = to_dict(run_config or {})
        self._given, more = (
            checked_callbacks(callbacks),
            loss is not None or config.preference is not None,
        )
        measured = Known([one.name for one in self.evals], config.eval_every, self.steps, more)
        self._named = make_callbacks(
            config.callbacks,
            self.output_dir,
            measured,
            run_config=self._run_config,
            process=jax.process_index(),
        )
        self.callbacks = (*self._given, *self._named.values())
        check_changes(config.resume_changes, self._identity())
        # Shapes of any other module are asked for on one device: the mesh itself would refuse a
        # size without naming the parameter.
        apart = self.mesh if self.origin.config else make_mesh(devices=[self.mesh.devices.flat[0]])
        with states.on(apart, self.rules):
            abstract = nnx.eval_shape(self.origin.build)
            spread = ("data",) if laid_out.preset == "zero1" else ()
            self.layout = states.layout_of(abstract, self.mesh, self.origin.trained, spread=spread)
        if optimizer is None:
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
        self._reference: Reference | None = None
        if config.preference is not None:
            if loss is not None:
                raise ConfigError(
                    at="train.preference",
                    problem="given, and so is a loss from Python",
                    fix="Leave one of them out.",
                )
            loss = preference_loss(config.preference)
            if config.preference.reference == "initial":
                self._reference = Reference(self.layout)
        platform = self.mesh.devices.flat[0].platform
        chosen, twice = (
            default_loss(abstract, config.loss, platform) if loss is None else (loss, loss)
        )
        schedule = None if self._own_optimizer else make_schedule(config.optimizer, self.steps)
        self.train_step = make_train_step(
            self.layout,
            self.optimizer,
            schedule,
            chosen,
            accumulate_steps=config.accumulate_steps,
            curvature_loss=twice,
            windows=windows(self.origin.config) if self.origin.config else (None,),
        )
        self._eval_step = make_eval_step(self.layout, chosen)

    def completed(
        self, rest: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]
    ) -> Mapping[str, jax.Array]:
        """A batch on the mesh with what its loss needs besides. rest: of the model, what is not
        trained.
        """
        return batch if self._reference is None else self._reference.added(rest, batch)

    def run(self) -> TrainResult:
        """Trains from the newest checkpoint in output_dir, or from the start, to the last step.

        Raises Interrupted after SIGINT or SIGTERM, once the step reached is saved; TrainError for a
        batch without targets, losses that are not finite (see TrainingConfig.on_nonfinite) or leave
        their range for ever, and a loader that ends early; StateError for a checkpoint of another
        run; StorageError for what cannot be written. A device that is out of memory is a TrainError
        too, which names what is held and what to change.
        """
        try:
            return self._run()
        except BaseException as error:
            about = (
                self.layout,
                self.optimizer,
                self.config,
                self.origin.config,
                self.train.batch_size,
            )
            memory = out_of_memory(error, self._told, *about)
            told = memory or error
            try:
                self.tell("exception", self._told, {"error": f"{type(told).__name__}: {told}"})
            except Exception as second:  # noqa: BLE001  (of two errors, the first is the one to raise)
                told.add_note(
                    f"a callback failed when it heard of this: {type(second).__name__}: {second}"
                )
            if memory is not None:
                raise memory from error
            raise

    def _run(self) -> TrainResult:
        with contextlib.ExitStack() as stack:
            stack.enter_context(states.on(self.mesh, self.rules))
            checkpoints = stack.enter_context(
                Checkpoints(self.output_dir / CHECKPOINTS, keep=self.config.checkpoint.keep)
            )
            stop = stack.enter_context(StopSignals())
            watch, self.control = Watch(self.config), Control()
            checkpoints.protected["listeners"] = self.control.kept
            state, begun = self._begin(checkpoints, watch)
            step = begun or 0
            if self._reference is not None:
                self._reference.keep(state.params if begun is None else self.fresh().params)
            if self.writes:
                write_config(
                    self.output_dir,
                    self._run_config or {"model": self.origin.shape, "train": self.config},
                )
                write_versions(self.output_dir, step)
                write_changes(
                    self.output_dir, step, self._change, getattr(self.train.state(), "changes", ())
                )
                write_fingerprints(
                    self.output_dir, self.train, {one.name: one.loader for one in self.evals}
                )
            metrics = stack.enter_context(
                contextlib.closing(
                    MetricsFile(self.metrics_path, after_step=step, write=self.writes)
                )
            )
            keep_books = watch.guards and self.writes
            rollbacks = stack.enter_context(
                contextlib.closing(
                    MetricsFile(self.rollbacks_path, after_step=step, write=keep_books)
                )
            )
            if self.control.ended is not None:
                way = f"To train on: train.resume_changes: [{ENDED}]"
                logger.warning(
                    "%s: the run ended at step %d of %d: %s. %s.",
                    self.output_dir,
                    step,
                    self.steps,
                    self.control.ended,
                    way,
                )
            self.tell("start", step)
            if step < self.steps and self.control.ended is None:
                state, step = Loop(self, checkpoints, metrics, rollbacks, stop, watch).run(
                    state, step
                )
            checkpoints.wait()
            if metrics.first is None or metrics.last is None:
                raise TrainError(
                    at=str(self.metrics_path),
                    problem="holds no line, though the run is finished",
                    fix="Give another output_dir.",
                )
            if self.writes:
                plot_run(self.output_dir)
            if self.control.reason is not None:
                logger.warning(
                    "stopped at step %d of %d: %s", step, self.steps, self.control.reason
                )
            self.tell("end", step, metrics.last)
            return TrainResult(
                steps=step,
                resumed_from=begun,
                first=metrics.first,
                last=metrics.last,
                output_dir=self.output_dir,
                metrics=self.metrics_path,
                plot=self.plot_path,
                checkpoint=checkpoints.folder / str(step),
                model=self.layout.merge(
                    self.optimizer.eval_params(state.optimizer, state.params), state.rest
                ),
                tokenizer=self.tokenizer,
                seen=self.seen,
            )

    def _begin(
        self, checkpoints: Checkpoints, watch: Watch
    ) -> tuple[states.TrainState, int | None]:
        """The state to go on from, and the step it was saved at (None: a new run)."""
        steps = checkpoints.steps()
        if not steps:
            return self.fresh(), None
        check_resume(checkpoints.folder, self.config, steps)
        damaged: list[DamagedCheckpoint] = []
        for step in reversed(steps):
            try:
                state = self._restore(checkpoints, step, watch)
            except DamagedCheckpoint as error:
                damaged.append(error)
                continue
            for lost, error in zip(reversed(steps), damaged, strict=False):
                logger.warning(
                    "%s; moved to %s, going on from step %d",
                    error,
                    checkpoints.set_aside(lost),
                    step,
                )
            return state, step
        raise damaged[0]  # beginning anew over a run that is there is for its owner to decide

    def _restore(self, checkpoints: Checkpoints, step: int, watch: Watch) -> states.TrainState:
        saved, at, data = (
            checkpoints.run(step),
            checkpoints.folder / str(step),
            self._run_config.get("data", {}),
        )
        unlike = check_same(
            saved, self._identity(), self.config.resume_changes, at, self.train, data
        )
        allowed = [
            part
            for part in LOADER_PARTS
            if any(is_under(f"loader.{part}", key) for key in self.config.resume_changes)
        ]
        allowed = [part for part in allowed if f"loader.{part}" in unlike]
        try:
            self.train.restore(
                loader_state(self.train, saved["loader"]),
                **({"allow_changed": allowed} if allowed else {}),
            )
        except StateError as error:
            problem = f"belongs to a run on other data: {error.problem}"
            raise StateError(
                at=str(at),
                problem=problem,
                fix="Change that back, or give another train.output_dir.",
            ) from error
        state = self.state_of(checkpoints, step)
        if others := [
            name for name, bits in saved.get("frozen", {}).items() if self._frozen.get(name) != bits
        ]:
            raise StateError(
                at=str(checkpoints.folder / str(step)),
                problem=f"has adapters of other weights: {short(sorted(others))} differ",
                fix="Train the model that they belong to, or give another train.output_dir.",
            )
        if ENDED not in self.config.resume_changes:
            self.control.ended = saved.get("ended")
        self.seen = self.seen.longer(Seen.recorded(saved).max_length)
        watch.restore(saved.get("watch"), step, checkpoints.steps())
        if watch.guards:
            checkpoints.protected["watch"] = {watch.good}
        for callback, told in zip(self._given, saved.get("callbacks", ()), strict=False):
            callback.restore(told)
        for name, told in saved.get("named_callbacks", {}).items():
            if name in self._named:
                self._named[name].restore(told)
        self._change = self._changed(saved, unlike)
        own = {
            path: text
            for path, text in unlike.items()
            if path not in {f"loader.{part}" for part in allowed}
        }
        if own:  # of the others the loader tells
            logger.warning(
                "%s: resumed at step %d with changes: %s", self.output_dir, step, listed(own)
            )
        return state

    def _changed(
        self, saved: Mapping[str, Any], unlike: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """What changes.json is told of a run that goes on from `saved`; None where nothing
        differs.
        """
        changed = differences(saved["identity"], self._identity(), words=_WAS_IS)
        # of the loader
        if parts := {path: text for path, text in unlike.items() if path not in changed}:
            changed |= parts | differences(
                saved["config"].get("data", {}), self._run_config.get("data", {}), "data", _WAS_IS
            )
        if ENDED in self.config.resume_changes and saved.get("ended"):
            changed[ENDED] = f"it had ended: {saved['ended']}"
        if not changed:
            return None
        was = loader_state(self.train, saved["loader"])
        before = {"config": saved["config"], "components": getattr(was, "components", None)}
        return {"row": getattr(was, "row", None), "changed": changed, "before": before}

    def check_checkpoint(
        self,
        *,
        unknown: Sequence[str] = (),
        loader: Callable[[], BatchLoader | None] = lambda: None,
    ) -> None:
        """Raises what `run` would raise for the newest checkpoint in output_dir, as far as it can
        be told without data and arrays.

        unknown: key paths that are not compared. loader: gives the run's, or None where data would
        have to be prepared for it.
        """
        check_newest(self.output_dir / CHECKPOINTS, self.config, self._identity(), unknown, loader)

    def fresh(self) -> states.TrainState:
        """The state before the first step."""
        state = self.origin.state(self.layout, self.optimizer)
        self._frozen = fingerprint({name: state.rest[name] for name in sorted(self.layout.frozen)})
        return state

    def state_of(self, checkpoints: Checkpoints, step: int) -> states.TrainState:
        """The state after `step`, from its checkpoint; 0: before the first."""
        if step == 0:
            return self.fresh()
        checkpoints.wait()
        abstract = states.abstract_state(self.layout, self.optimizer)
        loaded = checkpoints.load(step, self.saved(abstract))
        if self.layout.frozen:  # what is not trained is where the run began
            first = self.fresh().rest
            loaded |= {f"rest/{name}": first[name] for name in self.layout.frozen}
        return states.unflatten(loaded, abstract)

    def saved(self, state: states.TrainState) -> dict[str, Any]:
        """What a checkpoint has of a state, or of an abstract one."""
        return self.layout.without_frozen(states.flatten(state))

    def save(
        self, checkpoints: Checkpoints, step: int, state: states.TrainState, watch: Watch
    ) -> None:
        run = {
            "identity": self._identity(),
            "config": self._run_config,
            "train": to_dict(self.config),
            "watch": watch.state(),
            "ended": self.control.ended,
        }
        told = {
            "callbacks": [callback.state() for callback in self._given],
            "named_callbacks": {name: callback.state() for name, callback in self._named.items()},
        }
        base = {
            "frozen": self._frozen,
            "origin": self.origin.record(),
            "tokenizer": self.tokenizer,
            "seen": self.seen.record(),
        }
        checkpoints.save(
            step,
            self.saved(state),
            {**run, **told, **base, "loader": saved_loader_state(self.train)},
        )

    def evaluate(self, step: int, state: states.TrainState) -> dict[str, Any]:
        """What every held-out loader comes to, by name."""
        averaged = state._replace(params=self.optimizer.eval_params(state.optimizer, state.params))

        def step_of(params: Any, rest: Any, batch: Mapping[str, Any]) -> LossOutput:
            return self._eval_step(params, rest, self.completed(rest, batch))

        def seen(one: HeldOut) -> dict[str, Any]:
            return one.evaluate(
                step_of,
                averaged,
                self.mesh,
                lambda seen: self.tell("eval", step, {"name": one.name, "batches": seen}),
            )

        return {one.name: seen(one) for one in self.evals}

    def tell(self, kind: Any, step: int, record: Mapping[str, Any] | None = None) -> None:
        self._told = step
        event = TrainEvent(
            kind=kind, step=step, steps=self.steps, record=record or {}, control=self.control
        )
        if kind != "dispatch":  # as often as steps, and with nothing to show
            self.listener(event)
        for callback in self.callbacks:
            callback(event)

    def _identity(self) -> dict[str, Any]:
        """What has to be the same for a resumed run to be the same run."""
        optimizer = (
            {"name": "given from Python"}
            if self._own_optimizer
            else self.config.optimizer.resolved()
        )
        train = {key: to_dict(getattr(self.config, key)) for key in MUST_MATCH} | {
            "steps": self.steps,
            "optimizer": optimizer,
        }
        for name in IF_THERE:
            if (value := getattr(self.config, name)) is not None:
                train[name] = to_dict(value)
        return {
            "model": to_dict(self.origin.shape),
            "train": train,
            "loader": {"batch_size": self.train.batch_size},
        }

    def meter(self) -> Meter:
        """What reads this run's steps."""
        config, peak = self.origin.config, peak_flops(self.mesh.devices.flat[0])

        def flops(measured: Mapping[str, Any]) -> tuple[float, float]:
            assert config is not None
            adapted = (
                sum(leaf.size for leaf in self.layout.params.values()) if self.config.lora else None
            )
            more = 0 if adapted is None else adapter_flops(config, adapted)
            exact = (
                flops_from_sums(config, measured["num_tokens"], measured["attended"])
                + more * measured["num_tokens"]
            )
            palm = (
                palm_flops_per_step(config, measured["num_slots"], measured["seq_length"])
                + more * measured["num_slots"]
            )
            return exact, float(palm)

        devices = [
            device
            for device in self.mesh.devices.flat
            if device.process_index == jax.process_index()
        ]
        return Meter(
            None if config is None else flops,
            None if peak is None else peak * self.mesh.size,
            devices,
        )


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # under the name that it has always had here; it stands on a higher floor
        return easypipe.Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
