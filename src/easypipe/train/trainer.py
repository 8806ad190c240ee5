"""The training loop: a loader's batches into a model, with checkpoints from which a killed run goes on as if it had not been killed.

Law (exact resume): kill the process at any moment and run again; the loss of every step in metrics.jsonl is bit for bit what one
uninterrupted run writes (same devices, same versions of everything).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError, StateError, TrainError, did_you_mean
from easypipe.core.protocols import BatchLoader
from easypipe.train import state as states
from easypipe.train.checkpoint import Checkpoints, DamagedCheckpoint, differences, listed
from easypipe.train.config import TrainConfig
from easypipe.train.evaluate import held_out
from easypipe.train.events import TrainEvent, TrainListener, unheard
from easypipe.train.flops import flops_from_sums
from easypipe.train.loss import loss_sums
from easypipe.train.mesh import check_batch_size, make_mesh, place_batch
from easypipe.train.meter import Meter
from easypipe.train.metrics import MetricsFile, Record
from easypipe.train.model import Decoder, ModelConfig
from easypipe.train.optim import Optimizer, make_optimizer
from easypipe.train.optim_config import OptimizerConfig
from easypipe.train.peak import peak_flops
from easypipe.train.plot import plot_loss
from easypipe.train.schedules import make_schedule
from easypipe.train.signals import Interrupted, StopSignals
from easypipe.train.step import LossFn, make_eval_step, make_train_step

logger = logging.getLogger("easypipe")

LOADER_PARTS = ("sources", "tokenizer", "config", "plan")  # what a loader's state is compared by
_MUST_MATCH = ("optimizer", "loss", "steps", "seed", "accumulate_steps")  # of TrainConfig: what decides the numbers


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run. `first` and `last` are records of metrics.jsonl; `last["eval"]` has the held-out losses."""

    steps: int
    resumed_from: int | None  # the step of the checkpoint it went on from
    first: Record
    last: Record
    output_dir: Path
    metrics: Path
    plot: Path
    checkpoint: Path
    model: Any  # the trained nnx.Module, on the mesh


class Trainer:
    """`Trainer(ModelConfig(...), TrainConfig(...), loader, {"held_out": other}).run()`.

    model: a ModelConfig; or a function of nnx.Rngs that builds an nnx.Module; or such a module, whose arrays are copied.
    train, evals: anything that is a BatchLoader; batches have input_ids and labels, Int32[B, S], and segment_ids and position_ids
    where rows are packed. A batch is the batch of one optimizer step.
    loss: `(module, batch) -> LossOutput` of sums; default: `loss_sums`, for modules that have Decoder's `hidden` and `lm_head`.
    run_config: the resolved configuration of the whole run, kept in every checkpoint for whoever reads it later.
    optimizer: any optax transformation over a flat dict of parameters by dotted name, schedule and clipping included, in place of
    `config.optimizer`.
    mesh: default: `make_mesh(config.mesh)`; give the loader the same one, and its batches are used where they lie.
    """

    def __init__(
        self,
        model: ModelConfig | nnx.Module | Callable[[nnx.Rngs], nnx.Module],
        config: TrainConfig,
        train: BatchLoader,
        evals: Mapping[str, BatchLoader] | None = None,
        *,
        loss: LossFn | None = None,
        run_config: Mapping[str, Any] | None = None,
        listener: TrainListener = unheard,
        mesh: Mesh | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        """Raises ConfigError and PlacementError for what cannot run; touches no file and makes no array."""
        self.config, self.train, self.listener = config, train, listener
        self.mesh = make_mesh(config.mesh) if mesh is None else mesh
        self.steps = _resolve_steps(config, train)
        self.output_dir = Path(config.output_dir).expanduser()
        self.metrics_path, self.plot_path = self.output_dir / "metrics.jsonl", self.output_dir / "loss.png"
        self._evals = held_out(evals or {}, max_batches=config.eval_batches)
        check_batch_size(train.batch_size, self.mesh, config.accumulate_steps)
        self._in_micro_batches = _micro_batches("train.accumulate_steps", train, config.accumulate_steps)
        for one in self._evals:
            one.check(self.mesh)
            _micro_batches(f"eval.{one.name}.load.accumulation_steps", one.loader, 1)
        self._model_config = model if isinstance(model, ModelConfig) else None
        self._module = model if isinstance(model, nnx.Module) else None
        self._build = _builder(model, config.seed)
        self._own_optimizer = optimizer is not None
        self._run_config = to_dict(run_config or {})
        _check_changes(config.resume_changes, self._identity())
        # Shapes of any other module are asked for on one device: the mesh itself would refuse a size without naming the parameter.
        apart = self.mesh if self._model_config else make_mesh(devices=[self.mesh.devices.flat[0]])
        with states.on(apart):
            abstract = nnx.eval_shape(self._build) if self._module is None else self._module
        self.layout = states.layout_of(abstract, self.mesh)
        if optimizer is None:
            self.optimizer = make_optimizer(config.optimizer, self.steps, self.layout.decays, self.layout.hidden)
        elif config.optimizer == OptimizerConfig():
            self.optimizer = Optimizer(optimizer)
        else:
            problem = "given, and so is an optimizer from Python, which would leave it without effect"
            raise ConfigError(at="train.optimizer", problem=problem, fix="Leave one of them out.")
        options = {key: value for key, value in to_dict(config.loss).items() if value is not None}
        chosen = loss or functools.partial(loss_sums, **options)
        schedule = None if self._own_optimizer else make_schedule(config.optimizer, self.steps)
        # A Pallas kernel has no second derivative; the plain XLA loss has.
        twice = loss or functools.partial(loss_sums, **options | {"implementation": options.get("implementation") or "chunked"})
        self._train_step = make_train_step(
            self.layout, self.optimizer, schedule, chosen, accumulate_steps=config.accumulate_steps, curvature_loss=twice
        )
        self._eval_step = make_eval_step(self.layout, chosen)

    def run(self) -> TrainResult:
        """Trains from the newest checkpoint in output_dir, or from the start, to the last step.

        Raises Interrupted after SIGINT or SIGTERM, once the step reached is saved; TrainError for a batch without targets, a loss that
        is not finite, and a loader that ends early; StateError for a checkpoint of another run; StorageError for what cannot be written.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(states.on(self.mesh))
            checkpoints = stack.enter_context(Checkpoints(self.output_dir / "checkpoints", keep=self.config.checkpoint.keep))
            stop = stack.enter_context(StopSignals())
            state, begun = self._begin(checkpoints)
            metrics = stack.enter_context(contextlib.closing(MetricsFile(self.metrics_path, after_step=begun or 0, write=_is_first())))
            self._tell("start", begun or 0)
            if (begun or 0) < self.steps:
                state = self._loop(state, begun or 0, checkpoints, metrics, stop)
            checkpoints.wait(self.steps)
            if metrics.first is None or metrics.last is None:
                raise TrainError(
                    at=str(self.metrics_path), problem="holds no line, though the run is finished", fix="Give another output_dir."
                )
            if _is_first():
                plot_loss(self.metrics_path, self.plot_path)
            self._tell("end", self.steps, metrics.last)
            return TrainResult(
                steps=self.steps,
                resumed_from=begun,
                first=metrics.first,
                last=metrics.last,
                output_dir=self.output_dir,
                metrics=self.metrics_path,
                plot=self.plot_path,
                checkpoint=checkpoints.folder / str(self.steps),
                model=self.layout.merge(self.optimizer.eval_params(state.optimizer, state.params), state.rest),
            )

    def _begin(self, checkpoints: Checkpoints) -> tuple[states.TrainState, int | None]:
        """The state to go on from, and the step it was saved at (None: a new run)."""
        steps = checkpoints.steps()
        if not steps:
            if self._module is not None:
                return states.state_from(self._module, self.layout, self.optimizer), None
            return states.init_state(self._build, self.layout, self.optimizer), None
        if not self.config.resume:
            raise ConfigError(
                at="train.resume",
                problem=f"{self.output_dir} holds a run at step {steps[-1]}, and resume is false",
                fix="Set resume: true, or give another train.output_dir.",
            )
        damaged: list[DamagedCheckpoint] = []
        for step in reversed(steps):
            try:
                state = self._restore(checkpoints, step)
            except DamagedCheckpoint as error:
                damaged.append(error)
                continue
            for lost, error in zip(reversed(steps), damaged, strict=False):
                logger.warning("%s; moved to %s, going on from step %d", error, checkpoints.set_aside(lost), step)
            return state, step
        raise damaged[0]  # beginning anew over a run that is there is for its owner to decide

    def _restore(self, checkpoints: Checkpoints, step: int) -> states.TrainState:
        saved = checkpoints.run(step)
        unlike = differences(saved["identity"], self._identity())
        refused = {path: text for path, text in unlike.items() if not any(_under(path, key) for key in self.config.resume_changes)}
        if refused:
            raise StateError(
                at=str(checkpoints.folder / str(step)),
                problem=f"belongs to another run: {listed(refused)}",
                fix="Change that back, give another train.output_dir, or list it in train.resume_changes.",
            )
        abstract = states.abstract_state(self.layout, self.optimizer)
        arrays = checkpoints.load(step, states.flatten(abstract))
        allowed = [part for part in LOADER_PARTS if any(_under(f"loader.{part}", key) for key in self.config.resume_changes)]
        loader: Any = self.train
        loader.restore(_loader_state(loader, saved["loader"]), **({"allow_changed": allowed} if allowed else {}))
        if unlike:
            logger.warning("%s: resumed at step %d with changes: %s", self.output_dir, step, listed(unlike))
        return states.unflatten(arrays, abstract)

    def _loop(
        self, state: states.TrainState, step: int, checkpoints: Checkpoints, metrics: MetricsFile, stop: StopSignals
    ) -> states.TrainState:
        meter = Meter(self._mfu)
        batches: Any = iter(self.train)
        unread = None
        with contextlib.closing(batches) if hasattr(batches, "close") else contextlib.nullcontext():
            while step < self.steps:
                batch = meter.next_batch(batches)
                if batch is None:
                    raise TrainError(
                        at=f"step {step + 1}", problem=f"the loader ended, {self.steps} steps were asked for", fix="Set num_epochs: null."
                    )
                state, measured = self._train_step(state, place_batch(batch, self.mesh, in_micro_batches=self._in_micro_batches))
                step += 1
                if unread is not None:
                    self._write(metrics, meter, *unread)
                unread = (step, measured)
                meter.push(measured)
                save_due = step == self.steps or _due(step, self.config.checkpoint.every) or stop.received is not None
                eval_due = step == self.steps or _due(step, self.config.eval_every)
                if save_due or eval_due:  # both need to know that this step was sound
                    self._write(metrics, meter, *unread, state=state if eval_due else None)
                    unread = None
                if save_due:
                    metrics.sync()
                    self._save(checkpoints, step, state)
                if stop.received is not None and step < self.steps:
                    checkpoints.wait(step)
                    raise Interrupted(signum=stop.received, step=step, folder=str(checkpoints.folder))
        return state

    def _write(self, metrics: MetricsFile, meter: Meter, step: int, measured: Any, *, state: states.TrainState | None = None) -> None:
        """Reads what `step` measured, evaluates where a state is given, and writes the line if one is due."""
        record = meter.read(step, measured)
        evaluate = state is not None and bool(self._evals)
        if not (evaluate or step == self.steps or step % self.config.log_every == 0):
            return
        record |= meter.rates()
        if state is not None and evaluate:
            record["eval"] = {one.name: self._evaluate(one, step, state) for one in self._evals}
            meter.restart()
        metrics.append(record)
        self._tell("step", step, record)

    def _evaluate(self, one: Any, step: int, state: states.TrainState) -> dict[str, Any]:
        averaged = state._replace(params=self.optimizer.eval_params(state.optimizer, state.params))
        heard = lambda seen: self._tell("eval", step, {"name": one.name, "batches": seen})  # noqa: E731
        return one.evaluate(self._eval_step, averaged, self.mesh, heard)

    def _save(self, checkpoints: Checkpoints, step: int, state: states.TrainState) -> None:
        run = {"identity": self._identity(), "config": self._run_config, "train": to_dict(self.config)}
        checkpoints.save(step, states.flatten(state), {**run, "loader": _saved_loader_state(self.train)})
        self._tell("checkpoint", step)

    def _identity(self) -> dict[str, Any]:
        """What has to be the same for a resumed run to be the same run."""
        optimizer = {"name": "given from Python"} if self._own_optimizer else self.config.optimizer.resolved()
        train = {key: to_dict(getattr(self.config, key)) for key in _MUST_MATCH} | {"steps": self.steps, "optimizer": optimizer}
        return {"model": to_dict(self._model_config), "train": train, "loader": {"batch_size": self.train.batch_size}}

    def _mfu(self, num_tokens: float, attended: float, seconds: float) -> float | None:
        peak = peak_flops(self.mesh.devices.flat[0])
        if peak is None or self._model_config is None:
            return None
        return flops_from_sums(self._model_config, num_tokens, attended) / seconds / (peak * self.mesh.size)

    def _tell(self, kind: Any, step: int, record: Mapping[str, Any] | None = None) -> None:
        self.listener(TrainEvent(kind=kind, step=step, steps=self.steps, record=record or {}))


def _builder(model: Any, seed: int) -> Callable[[], nnx.Module]:
    if isinstance(model, ModelConfig):
        return lambda: Decoder(model, nnx.Rngs(seed))
    return lambda: model(nnx.Rngs(seed))


def _resolve_steps(config: TrainConfig, train: BatchLoader) -> int:
    try:
        batches = len(train)
    except TypeError:
        batches = None
    if config.steps is None:
        if batches is None:
            raise ConfigError(at="train.steps", problem="not given, and the loader never ends", fix="Say how many steps to train.")
        return batches
    if batches is not None and config.steps > batches:
        raise ConfigError(
            at="train.steps",
            problem=f"{config.steps} steps, but the loader ends after {batches} batches",
            fix=f"Give at most {batches}, or set num_epochs: null in the loader.",
        )
    return config.steps


def _micro_batches(at: str, loader: BatchLoader, pieces: int) -> bool:
    """Whether the loader yields [A, B/A, ...] already. Raises ConfigError where its A is not `pieces`."""
    cut = getattr(loader, "accumulation_steps", 1)
    if cut in (1, pieces):
        return cut > 1
    raise ConfigError(
        at=at,
        problem=f"{pieces}, but the loader cuts its batches into {cut} micro-batches",
        fix=f"Use the same number, {pieces} or {cut}, for both.",
    )


def _saved_loader_state(loader: BatchLoader) -> Any:
    """JSON text where the state can write itself as such, else the state, which then is plain JSON."""
    state = loader.state()
    return {"text": state.to_json()} if hasattr(state, "to_json") else {"value": state}


def _loader_state(loader: BatchLoader, saved: Mapping[str, Any]) -> Any:
    return type(loader.state()).from_json(saved["text"]) if "text" in saved else saved["value"]


def _under(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def _check_changes(changes: tuple[str, ...], identity: Mapping[str, Any]) -> None:
    known = [*identity, *differences({}, identity), *(f"train.{key}" for key in _MUST_MATCH), *(f"loader.{part}" for part in LOADER_PARTS)]
    for key in changes:
        if key not in known:
            problem = f"{key!r} is nothing that a checkpoint is compared by"
            raise ConfigError(at="train.resume_changes", problem=problem, have=sorted(set(known)), fix=did_you_mean(key, known))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _is_first() -> bool:
    return jax.process_index() == 0
