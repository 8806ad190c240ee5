"""Assembles a run (mesh, optimizer, loss, callbacks, compiled steps) and evaluates held-out data.

Nothing here touches a file of the run; trainer.py runs what this file assembles.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from easypipe.core.config import digest, fields_of, to_dict
from easypipe.core.errors import ConfigError, TokenizerError, TrainError, require
from easypipe.core.protocols import BatchLoader, Turns
from easypipe.core.values import Arguments, Json
from easypipe.core.visible import first_of
from easypipe.train import state as states
from easypipe.train.callbacks.named import NLL, Known, checked_callbacks, make_callbacks
from easypipe.train.checkpoint.resume import (
    check_changes,
    check_processes,
    identity_of,
    saved_loader_state,
)
from easypipe.train.checks import (
    check_loader,
    micro_batches,
    num_batches,
    resolve_steps,
    sources_of,
)
from easypipe.train.config import UNPAIRED, LossConfig, PreferenceConfig, TrainingConfig
from easypipe.train.events import (
    Callback,
    Control,
    EventKind,
    TrainEvent,
    TrainListener,
    null_listener,
)
from easypipe.train.losses.cached_reference import CachedReference, Passes
from easypipe.train.losses.loss import AsSums, LossFn, LossOutput, default_loss
from easypipe.train.losses.measures import Measures, named
from easypipe.train.losses.preference import Reference, preference_loss
from easypipe.train.losses.unpaired import answers_elsewhere, unpaired_loss
from easypipe.train.metrics.devices import peak_flops
from easypipe.train.metrics.log import Record, perplexity
from easypipe.train.metrics.meter import Meter
from easypipe.train.model.classifier import Classifier
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.flops import adapter_flops, flops_from_sums, palm_flops_per_step, windows
from easypipe.train.model.lora import fingerprint
from easypipe.train.model.noise import NoiseOfStep, noise_columns
from easypipe.train.model.pretrained.origin import Model, origin_of
from easypipe.train.model.pretrained.save import Seen
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
from easypipe.train.record import fingerprint as digests_of
from easypipe.train.record import from_anywhere
from easypipe.train.step import make_eval_step, make_train_step
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

Batch = Mapping[str, jax.Array]

logger = logging.getLogger("easypipe")


@dataclass(frozen=True)
class HeldOut:
    """A held-out loader, which every evaluation reads from the same position."""

    name: str
    loader: BatchLoader
    start: Any  # the loader's state at that position
    sources: Sequence[str] = ()  # the datasets that are measured separately


class Engine:
    """The parts of a training run. `easypipe.Trainer`, which also takes data, is built from them.

    The rest of this package trains with an Engine.

    Args:
        model: A ModelConfig or ClassifierConfig; a published model, by its folder or Hub name (or,
            with options, as a PretrainedConfig), whose files are read onto the mesh when the run
            begins; a function of nnx.Rngs that builds an nnx.Module; an nnx.Module, whose arrays
            are copied; or a Flax Linen module, which is used through nnx.bridge.
        config: The options of the run.
        train: Any BatchLoader. Its batches have input_ids and labels, Int32[B, S], and segment_ids
            and position_ids if rows are packed. One batch is the batch of one optimizer step.
        evals: Held-out loaders by name.
        loss: A function of (module, batch) that returns a mean over the batch's targets, or such a
            mean and further means by name, or a LossOutput of sums (see
            easypipe.train.losses.loss.AsSums). Default: `loss_sums`, for modules that have
            Decoder's `hidden` and `lm_head`; `logits_loss_sums` for others, which return logits
            when they are called.
        run_config: The resolved configuration of the whole run, which every checkpoint keeps for
            later readers.
        listener: A function that receives every event of the run; see easypipe.train.events.
        callbacks: Listeners that may also stop the run or keep a state.
        mesh: The device mesh; default: `make_mesh(config.mesh)`. Any other mesh has the same axes.
            If the loader has the same mesh, its batches are used in place.
        optimizer: Any optax transformation over a flat dict of parameters by dotted name, including
            schedule and clipping, instead of `config.optimizer`.
        tokenizer: The name or path of the tokenizer that made the tokens. It is recorded, so that
            it can be saved with the model.
        turns: How the conversations of the data are written; recorded for the same reason.

    Raises:
        ConfigError: Something cannot run; PlacementError if rows do not fit the mesh. A published
            model can raise the errors of load_pretrained: its config.json is read, but no other
            file is touched and no array is made.
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
        self.output_dir = Path(os.path.expanduser(config.output_dir))
        self.tokenizer = None if tokenizer is None else from_anywhere(tokenizer)
        self.seen = Seen.of(turns)
        self.run_config = to_dict(run_config or {})
        self.passes: Passes | None = None  # over all data, before any step
        self.ledger: Json | None = None  # of the data, if it is known
        self.emitted = 0  # the step of the newest event
        self._lay_out(mesh)
        self._check_loaders(evals or {})
        scores = config.preference is not None and config.preference.scores
        self.origin = origin_of(model, config.seed, config.lora, scores=scores)
        self._compile(loss, optimizer)
        # a digest of everything that decides the first state, if known
        self.made_of: str | None = None
        if self.origin.shape is not None and optimizer is None:
            options = (config.optimizer.resolved(), self.steps, config.lora, config.seed, scores)
            shape = self.origin.shape
            self.made_of = digest(type(shape), shape, *options, self.rules)
        self._make_callbacks(callbacks)
        self.identity = identity_of(
            config,
            self.origin.shape,
            self.steps,
            train.batch_size,
            own_optimizer=optimizer is not None,
        )
        check_changes(config.resume_changes, self.identity)
        held_out = {f"eval.{one.name}": one.loader for one in self.evals}
        check_processes(config, self.identity, {"loader": train, **held_out})

    def _lay_out(self, mesh: Mesh | None) -> None:
        """Sets the mesh, the sharding rules, and the axes that also divide optimizer state."""
        laid_out = mesh_config(self.config.mesh, "train.mesh")
        self.rules = laid_out.rules
        self.spread = ("data",) if laid_out.preset == "zero1" else ()
        self.mesh = make_mesh(laid_out, at="train.mesh") if mesh is None else checked_mesh(mesh)

    def _check_loaders(self, evals: Mapping[str, BatchLoader]) -> None:
        """Checks the loaders; sets the number of steps, the datasets and the held-out loaders."""
        config, pieces = self.config, self.config.accumulate_steps
        check_loader(self.train, "train")
        saved_loader_state(self.train)  # refuses a state that no checkpoint can hold
        for name, loader in evals.items():
            check_loader(loader, f"evals.{name}")
        self.steps = resolve_steps(config, self.train)
        asked = "sources" in config.measure
        self.sources = sources_of(self.train, "train") if asked else ()
        self.evals = tuple(
            HeldOut(name, one, one.state(), _sources(name, one) if asked else ())
            for name, one in evals.items()
        )
        # what the numbers of each of them are of, as far as it is known
        self.held_out: Json = {
            one.name: {**(digests_of(one.loader) or {}), "eval_batches": config.eval_batches}
            for one in self.evals
        }
        of_evals = {"eval_every": config.eval_every, "eval_batches": config.eval_batches}
        for option in [name for name, value in of_evals.items() if value and not evals]:
            logger.warning("train.%s: has no effect, because no data is held out (eval)", option)
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

    def _make_callbacks(self, given: Sequence[Callback]) -> None:
        """Sets the callbacks, after checking that the metrics they watch will exist."""
        config, told = self.config, self.told
        self.known = Known(
            {one.name: told(one.sources) for one in self.evals},
            config.eval_every,
            self.steps,
            told(self.sources),
            self.own_loss is None,
            tokenizer=self.tokenizer,
            seen=lambda: self.seen,
        )
        self.given_callbacks = checked_callbacks(given)
        self.named_callbacks = make_callbacks(
            config.callbacks,
            self.output_dir,
            self.known,
            run_config=self.run_config,
            process=jax.process_index(),
        )
        self.callbacks = (*self.given_callbacks, *self.named_callbacks.values())

    def _compile(self, loss: LossFn | None, optimizer: optax.GradientTransformation | None) -> None:
        """Sets the layout, the optimizer and the steps, which are compiled at their first call."""
        config = self.config
        # The shapes of a module from elsewhere are found on one device, because the mesh itself
        # would refuse a size without naming the parameter.
        apart = self.mesh if self.origin.config else make_mesh(devices=[self.mesh.devices.flat[0]])
        with states.on(apart, self.rules):
            abstract = nnx.eval_shape(self.origin.build)
            self.layout = states.layout_of(
                abstract, self.mesh, self.origin.trained, spread=self.spread
            )
        schedule = self._choose_optimizer(optimizer)
        self.own_loss, self.reference = loss, None
        if config.preference is not None:
            loss = self._compare(config.preference)
        self.told = functools.partial(self._told, abstract)
        self.noise = self._noise(abstract, own_loss=self.own_loss is not None)
        twice = loss  # a loss that can be differentiated twice
        if loss is None:
            platform = self.mesh.devices.flat[0].platform
            loss, twice = default_loss(
                abstract,
                config.loss,
                platform,
                self._measures(),
                config.class_weights,
                config.distill,
                self._num_tokens,
            )
        else:
            require(
                not config.measure,
                "train.measure",
                "has no effect on a loss from Python, which measures its own",
                "Leave it out.",
            )
            for key, without in (
                ("class_weights", None),
                ("distill", None),
                ("loss", LossConfig()),
            ):
                require(
                    fields_of(config)[key] == without,
                    f"train.{key}",
                    "has no effect on a loss from Python",
                    "Leave one of them out.",
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

    def _compare(self, config: PreferenceConfig) -> LossFn:
        """Returns the preference loss; sets the reference model if the loss needs one."""
        fix = "Leave one of them out."
        require(
            self.own_loss is None, "train.preference", "given, and so is a loss from Python", fix
        )
        if config.reference == "cached" and config.compares:
            self.reference = CachedReference(self.layout)
        elif config.compares:
            elsewhere = answers_elsewhere if config.loss == "kto" else None
            self.reference = Reference(self.layout, elsewhere)
        return (unpaired_loss if config.loss in UNPAIRED else preference_loss)(config)

    def _choose_optimizer(
        self, given: optax.GradientTransformation | None
    ) -> optax.Schedule | None:
        """Sets the optimizer: the given one, or that of the config, whose schedule it returns."""
        named = self.config.optimizer
        if given is None:
            # The average that it does not keep is computed from the parameters at every step.
            params = self.layout.params.items()
            narrow = [name for name, leaf in params if leaf.dtype.itemsize < 4]
            require(
                named.name != "schedule_free" or not narrow,
                "train.optimizer.name",
                "schedule_free needs parameters in float32, since it would move others by their "
                f"rounding at every step: {first_of(narrow)}",
                "Set model.param_dtype: float32 (model.dtype may stay bfloat16), or choose another "
                "optimizer.",
            )
            self.optimizer = make_optimizer(
                named, self.steps, self.layout.decays, self.layout.hidden, self.layout.stacked
            )
            return make_schedule(named, self.steps)
        require(
            named == OptimizerConfig(),
            "train.optimizer",
            "given, and so is an optimizer from Python, which would leave it without effect",
            "Leave one of them out.",
        )
        self.optimizer = Optimizer(given)
        return None

    def _noise(self, model: nnx.Module, *, own_loss: bool) -> NoiseOfStep | None:
        """Returns the function that makes the noise columns of a step; None without noise."""
        alpha, at = self.config.neftune_alpha, "train.neftune_alpha"
        if alpha is None:
            return None
        require(
            isinstance(model, Decoder),
            at,
            "puts noise on the embeddings of tokens, but there are none in a "
            f"{type(model).__name__}",
            "Leave it out, or train a Decoder: a ModelConfig or a published model.",
        )
        require(
            not own_loss,
            at,
            "has no effect on a loss from Python, which calls the model by itself",
            "Leave one of them out.",
        )
        return noise_columns(alpha, self.config.seed)

    def _told(self, model: nnx.Module, sources: Sequence[str]) -> Sequence[str]:
        """Returns the names of what the loss reports.

        A loss from Python is not known here: see `check_metrics`.
        """
        if self.config.preference is not None:
            return "nll", *self.config.preference.tells
        if isinstance(model, Classifier):
            return *NLL, "accuracy"
        taught = () if self.config.distill is None else ("kl",)
        return *NLL, *taught, *Measures(self.config.measure).told(sources)

    def check_metrics(self, state: states.TrainState, batch: Batch) -> None:
        """Checks the metrics that callbacks watch against those that a loss from Python reports.

        The loss is only traced; nothing is computed.

        Args:
            state: The state before the first step.
            batch: The first batch, on the mesh.

        Raises:
            ConfigError: A callback watches a name that the loss does not report.
        """
        callbacks, loss = self.config.callbacks, self.own_loss
        named = [one.metric for one in (callbacks.early_stopping, callbacks.best) if one]
        if self.known.asked or not named or loss is None:
            return

        def told(batch: Batch) -> tuple[str, ...]:
            sums = AsSums(loss)

            def run(params: Batch, rest: Batch, batch: Batch) -> LossOutput:
                return sums(self.layout.merge(params, rest), batch)

            out = jax.eval_shape(run, state.params, state.rest, batch)
            return *(NLL if sums.knows_nll else ()), *out.more, *out.ratios

        def first(one: HeldOut) -> tuple[str, ...]:
            one.loader.restore(one.start)
            batch = next(iter(one.loader), None)
            return () if batch is None else told(self._placed(one, batch))

        watched = {self.known.of(metric) for metric in named}
        micro = jax.tree.map(lambda array: array[0], batch) if self.in_micro_batches else batch
        evals = {one.name: first(one) if one.name in watched else () for one in self.evals}
        self.known = dataclasses.replace(self.known, evals=evals, told=told(micro), asked=True)
        self.known.check(callbacks)

    def _num_tokens(self) -> int | None:
        """Returns the vocabulary size of the data's tokenizer.

        It is None if the tokenizer is unknown or can no longer be read, as training does not need
        it.
        """
        try:
            return None if self.tokenizer is None else load_tokenizer(self.tokenizer).vocab_size
        except TokenizerError:
            return None

    def _measures(self) -> Measures:
        """Returns the measures of targets that `train.measure` names.

        Raises:
            ConfigError: bits_per_byte is asked for, but the bytes of the tokens are not known.
        """
        names, sizes = self.config.measure, None
        if "bits_per_byte" in names:
            name = self.tokenizer
            sizes = None if name is None else load_tokenizer(name).text_bytes()
            require(
                sizes is not None,
                "train.measure",
                "bits_per_byte, but the tokenizer of this data is not known"
                if name is None
                else f"bits_per_byte, and tokens of {name!r} are not bytes of the text",
                "Leave it out, or name another: Trainer(tokenizer=...).",
            )
        each = (self.sources, *(one.sources for one in self.evals))
        return Measures(names, max(map(len, each)), sizes)

    def emit(
        self,
        kind: EventKind,
        step: int,
        record: Json | None = None,
        state: states.TrainState | None = None,
    ) -> None:
        """Sends an event to the listener and the callbacks.

        Args:
            kind: The kind of event. The listener does not receive "dispatch".
            step: The step that the event is about.
            record: The numbers or names of the event; see TrainEvent.
            state: The state whose model the event offers, if any.
        """
        self.emitted = step
        event = TrainEvent(
            kind=kind,
            step=step,
            steps=self.steps,
            record=record or {},
            control=self.control,
            model=None if state is None else functools.partial(self.model, state),
        )
        if kind != "dispatch":  # one for every step, with nothing to show
            self.listener(event)
        for callback in self.callbacks:
            callback(event)

    def model(self, state: states.TrainState) -> Any:
        """Returns the module of a state, with averaged parameters if the optimizer averages."""
        params = self.optimizer.eval_params(state.optimizer, state.params)
        return self.layout.merge(params, state.rest)

    def fresh(self) -> states.TrainState:
        """Returns the state before the first step."""
        return self.origin.state(self.layout, self.optimizer, self.made_of)

    def weights(self, first: states.TrainState, *, trained: bool) -> dict[str, dict[str, int]]:
        """Returns the fingerprints of the weights that a run begins with, by "frozen" or "initial".

        Weights that the seed makes are left out: the checkpoint has the seed, and other devices may
        round them differently.

        Args:
            first: The state before the first step.
            trained: Whether those that are trained are fingerprinted too, as "initial".
        """
        origin, found = self.origin, {name: first.rest[name] for name in self.layout.frozen}
        given = origin.shape is None or origin.is_module or origin.pretrained is not None
        own = first.params if trained and given and self.config.lora is None else {}
        return {"frozen": fingerprint(found), "initial": fingerprint(own)}

    def ask_reference(self, first: states.TrainState) -> None:
        """Fills a cached reference with the log-probabilities of all answers of the data.

        Args:
            first: The state before the first step, whose model is the reference.

        Raises:
            ConfigError: The data is a loader, and it is not known how to read all of its data once.
        """
        if isinstance(self.reference, CachedReference):
            if self.passes is None:
                raise ConfigError(
                    at="train.preference.reference",
                    problem="cached, but a loader does not tell how all data is read once",
                    fix="Give data in place of a loader, or leave it out.",
                )
            self.reference.fill(first, self.passes, self.mesh, to_dict(self.origin.shape))

    def saved(self, state: states.TrainState) -> Arguments:
        """Returns the named arrays that a checkpoint holds for a state, or for an abstract one."""
        return self.layout.without_frozen(states.flatten(state))

    def completed(self, rest: Batch, batch: Batch) -> Batch:
        """Adds to a batch the columns of the reference model, if the loss needs them.

        Args:
            rest: The untrained arrays of the model.
            batch: The batch, on the mesh.
        """
        return batch if self.reference is None else self.reference.added(rest, batch)

    def evaluate(self, step: int, state: states.TrainState) -> dict[str, Record]:
        """Evaluates the state after `step` on every held-out loader.

        Returns:
            For each loader, by name: loss and nll (nats per token, over all targets of all batches,
            including the short last one), ppl, what the loss reports besides, and num_targets. nll
            and ppl are None if the loss reports no nll; ppl also if the loss compares answers.

        Raises:
            TrainError: A loader has no target, or its loss is not finite.
        """
        params = self.optimizer.eval_params(state.optimizer, state.params)
        return {one.name: self._evaluate(one, step, params, state.rest) for one in self.evals}

    def _placed(self, held_out: HeldOut, batch: Json) -> Batch:
        """Puts a held-out batch on the mesh, padded to a number of rows that the mesh divides."""
        shards = batch_shards(self.mesh)
        rows = -(-held_out.loader.batch_size // shards) * shards
        return place_batch(batch, self.mesh, rows=rows)

    def _evaluate(self, held_out: HeldOut, step: int, params: Batch, rest: Batch) -> Record:
        """Evaluates the parameters on one held-out loader; see `evaluate`."""
        loader, name, sums = held_out.loader, held_out.name, []
        loader.restore(held_out.start)
        for batch in itertools.islice(iter(loader), self.config.eval_batches):
            placed = self.completed(rest, self._placed(held_out, batch))
            sums.append(self.eval_step(params, rest, placed))
            if len(sums) > 2:
                # Batches in flight hold memory, and two are enough to keep the device busy.
                jax.block_until_ready(sums[-3])
            self.emit("eval", step, {"name": name, "batches": len(sums)})
        loader.restore(held_out.start)  # a later Trainer may take the same loader
        outs = jax.device_get(sums)
        num_targets = sum(int(out.num_targets) for out in outs)
        counts = [out.num_targets if out.weight_sum is None else out.weight_sum for out in outs]
        divisor = math.fsum(map(float, counts))

        def mean(values: Iterator[Any]) -> float:
            return math.fsum(map(float, values)) / divisor

        if divisor == 0:
            weighed = "with a weight above 0 " if num_targets else ""
            raise TrainError(
                at=f"eval.{name}",
                problem=f"no label {weighed}to predict in {len(outs)} batches",
                fix=f"Look at its loss_{'weights' if num_targets else 'mask'} and its length.",
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
        with np.errstate(invalid="ignore"):  # a dataset may have no target
            quotients = {
                key: (top / below).tolist()
                for key, (top, below) in sums(*(out.ratios for out in outs)).items()
            }
        more |= {
            key: value if math.isfinite(value) else None
            for key, value in named(quotients, held_out.sources)
        }
        known = nll if math.isfinite(nll) else None
        ppl = None if self.config.preference is not None else perplexity(nll)
        record = {"loss": loss, "nll": known, "ppl": ppl}
        return record | more | {"num_targets": num_targets}

    def meter(self) -> Meter:
        """Returns the meter that turns measurements of the steps into records and rates."""
        config, devices = self.origin.config, self.mesh.devices.flat
        peak = peak_flops(devices[0])
        local = [one for one in devices if one.process_index == jax.process_index()]
        answers = self.config.preference is not None
        if config is None:
            return Meter(None, None, local, self.sources, of_answers=answers)
        params = self.layout.params.items()
        adapted = sum(leaf.size for name, leaf in params if not name.startswith("added."))
        more = adapter_flops(config, adapted) if self.layout.frozen else 0

        def flops(measured: Json) -> tuple[float, float]:
            tokens, slots = measured["num_tokens"], measured["num_slots"]
            exact = flops_from_sums(config, tokens, measured["attended"])
            palm = palm_flops_per_step(config, slots, measured["seq_length"])
            return exact + more * tokens, float(palm + more * slots)

        peak = None if peak is None else peak * self.mesh.size
        return Meter(flops, peak, local, self.sources, of_answers=answers)


def _sources(name: str, held_out: BatchLoader) -> tuple[str, ...]:
    """Returns the datasets of a held-out loader, without the prefix of held-out rows."""
    names = sources_of(held_out, f"evals.{name}")
    return tuple(one.removeprefix(f"eval.{name}.") for one in names)
