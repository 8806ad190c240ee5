"""RunConfig, a whole run; prepares, plans and trains it; checks whether data and model fit."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from easypipe.core.aligned import DESIRABLE, LOSS_WEIGHTS
from easypipe.core.config import config, from_dict, to_dict
from easypipe.core.errors import ConfigError, require
from easypipe.core.protocols import (
    BatchLoader,
    ProgressListener,
    TokenInfo,
    Turns,
    info_of,
    silent,
)
from easypipe.core.values import Arguments, Json
from easypipe.history import host_load, plan_of_run
from easypipe.jobs import (
    Prepared,
    file_values,
    placed,
    prepare_data,
    with_hold_outs,
    with_tokenizer_of,
)
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.pipeline import Pipeline
from easypipe.stages.config import PipelineConfig, datasets_of
from easypipe.stages.tokenize.documents import holds_pairs, token_info, trained_turns
from easypipe.train.checkpoint.files import CHECKPOINTS
from easypipe.train.checkpoint.resume import check_newest
from easypipe.train.checks import MANY_STEPS, Shapes
from easypipe.train.config import UNPAIRED, TrainingConfig, accumulating, told
from easypipe.train.engine import Engine
from easypipe.train.events import TrainEvent, TrainListener, null_listener
from easypipe.train.losses.cached_reference import Passes
from easypipe.train.model.decoder import ModelConfig
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.train.model.pretrained.origin import find_pretrained
from easypipe.train.parallel.distributed import initialize, several, shared_seed
from easypipe.train.parallel.mesh import check_batch_size, check_row_length, checked_mesh, make_mesh
from easypipe.train.plan.aot import StepPlan, plan_step
from easypipe.train.plan.topology import Topology
from easypipe.train.record import LEDGER, PLAN, check_record, recorded_seed, write_kept
from easypipe.train.report.pictures import plot_run
from easypipe.train.signals import Interrupted
from easypipe.train.trainer import TrainResult, run_training
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("easypipe")

ROW_LENGTH = "data.pack"  # the place of the error that the length of rows is not known


@config
class RunConfig:
    """One run: its data, its model and how it is trained.

    Args:
        data: The data to train on.
        train: How to train, and where to write.
        model: The decoder to train (vocab_size may be left to the tokenizer), or with `pretrained`
            a published model.
        eval: Held-out data by name, each read once to its end. An entry without seed, cache_dir,
            default_tokenizer, tokenize, pack or load takes it from `data`. `{from: data, fraction:
            0.01, seed: 7}` holds out rows of `data`.
    """

    data: PipelineConfig
    train: TrainingConfig
    model: ModelConfig | PretrainedConfig = field(default_factory=ModelConfig)
    eval: dict[str, PipelineConfig] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Reads a YAML file, with `key.path=value` overrides.

        Raises:
            ConfigError: A value is wrong; the message names its key path.
        """
        values = file_values(path, overrides)
        require(
            "data" in values or "datasets" not in values,
            str(path),
            "is a pipeline config, which says nothing about a model and its training",
            "Put its keys under data: in a run config (data, model, train, eval); `easypipe init` "
            "writes one.",
        )
        return from_dict(cls, values)

    written_out = staticmethod(with_hold_outs)

    def check(self) -> None:
        """Copies batches and passes of `train` to the data, and the data's micro-batches to it."""
        load = self.data.load or LoadStageConfig()
        if (training := accumulating(self.train, load.accumulation_steps)) is not self.train:
            object.__setattr__(self, "train", training)
        if changes := told(load, self.train, "data.load"):
            object.__setattr__(
                self,
                "data",
                dataclasses.replace(self.data, load=dataclasses.replace(load, **changes)),
            )


@placed("data")
def prepare(run: RunConfig, *, progress: ProgressListener = silent) -> Prepared:
    """Tokenizes, plans and, if the config says so, saves all data of the run.

    Held-out data is also prepared.

    Raises:
        EasypipeError: What preparing raises. Before a row is read, also what `train` would raise,
            as far as that is known without rows: see `refuse`.
    """
    _check_mesh(run)
    initialize(run.train.distributed)
    run = _completed(run)
    return prepare_data(
        run.data, run.eval, progress=progress, check=functools.partial(refuse, run, run.model)
    )


def refuse(
    run: RunConfig,
    model: Any,
    data: Pipeline,
    held_out: Mapping[str, Pipeline],
    *,
    evals: Mapping[str, BatchLoader] | None = None,
    **options: Any,
) -> None:
    """Raises what training `model` on these chains would raise on this machine.

    It checks mesh, model, adapters, optimizer, callbacks, tokenizers and the newest checkpoint; it
    reads no row and makes no array. `evals` are more held-out loaders; `options` are options of the
    Trainer.
    """
    never = run.data.endless
    require(
        run.train.steps is not None or run.train.epochs is not None or never is None,
        "train.steps",
        f"not given, and the data never ends (data.{never})",
        "Say how many steps to train.",
    )
    info = _check_data(run, data, held_out)
    shapes: Arguments = dict(evals or {})
    for name, pipeline in held_out.items():
        rows = (run.eval[name].load or run.data.load or LoadStageConfig()).batch_size
        shapes[name] = Shapes(
            rows, 1, batches=1, source_names=(*datasets_of(pipeline.get_context()),)
        )
    if isinstance(model, ModelConfig | PretrainedConfig):
        model = with_vocabulary(model, info)
    load = run.data.load or LoadStageConfig()
    config = (
        run.train
        if run.train.steps is not None
        else dataclasses.replace(run.train, steps=MANY_STEPS, epochs=None)
    )
    mesh = make_mesh(run.train.mesh, at="train.mesh")
    given: Arguments = {"mesh": mesh, "tokenizer": info.tokenizer, **options}
    for at, one in (("data", run.data), *((f"eval.{name}", one) for name, one in run.eval.items())):
        pack = one.pack or run.data.pack
        if pack is not None and pack.enabled:
            check_row_length(pack.seq_length, given["mesh"], at=f"{at}.pack.seq_length")
    sizes = {"batch_size": load.batch_size} | {
        f"batch_size_schedule[{i}]": size for i, (_, size) in enumerate(load.batch_size_schedule)
    }
    for key, size in sizes.items():
        check_batch_size(size, given["mesh"], config.accumulate_steps, at=f"data.load.{key}")
    loader = Shapes(
        load.batch_size, load.accumulation_steps, source_names=(*datasets_of(data.get_context()),)
    )
    trainer = Engine(model, config, loader, shapes, **given)
    unknown = () if run.train.steps is not None else ("train.steps",)
    known = functools.partial(_known_loader, data, load)
    folder = trainer.output_dir / CHECKPOINTS
    check_newest(folder, config, trainer.identity, unknown, known)


@placed("data")
def train(
    run: RunConfig,
    prepared: Prepared | None = None,
    *,
    progress: ProgressListener = silent,
    listener: TrainListener = null_listener,
) -> TrainResult:
    """Trains to the last step, from the newest checkpoint in `train.output_dir` if there is one.

    The ledger of the data is written into that folder too.

    Args:
        run: The config of the run.
        prepared: What `prepare(run)` returned; None prepares what is not prepared.
        progress: Called as the data is prepared.
        listener: Called with the events of training.

    Raises:
        EasypipeError: What preparing raises, and what `Trainer.run` raises.
    """
    inputs = inputs_of(run, prepared, progress=progress)
    resolved = dataclasses.replace(inputs.run, model=with_vocabulary(run.model, inputs.tokens))
    trainer = Engine(
        resolved.model,
        run.train,
        inputs.train,
        inputs.evals,
        run_config=to_dict(resolved),
        listener=listener,
        mesh=inputs.mesh,
        tokenizer=inputs.tokens.tokenizer,
        turns=inputs.turns,
    )
    trainer.passes, trainer.ledger = inputs.passes(), inputs.ledger
    return inputs.train_with(trainer)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The loaders of a run's data, and what else training needs.

    In `run`, the seed of the data is set.
    """

    run: RunConfig
    prepared: Prepared
    mesh: Any
    train: Loader
    evals: Mapping[str, Loader]
    tokens: TokenInfo
    turns: Turns | None

    def train_with(self, trainer: Engine) -> TrainResult:
        """Trains, and writes what was drawn from the data into the run's folder.

        That is the plan of several datasets; in streaming, the ledger of what was read. It is
        written after training and at some of its checkpoints: each time for at least a quarter more
        steps, because steps are counted from the first. After a signal it is written last, because
        the time until the process is killed may be short.
        """
        folder, listener, counted = trainer.output_dir, trainer.listener, 0

        def listen(event: TrainEvent) -> None:
            nonlocal counted
            listener(event)
            due = counted * 5 / 4 <= event.step < event.steps
            if event.kind == "checkpoint" and due and not event.record["stopped"]:
                counted = event.step
                self._write_drawn(folder, counted)

        if not trainer.writes:
            return run_training(trainer)
        trainer.listener = listen
        try:
            result = run_training(trainer)
        except Interrupted as stopped:
            self._write_drawn(folder, stopped.step)
            raise
        finally:
            trainer.listener = listener
        self._write_drawn(folder, result.steps)
        return result

    @property
    def ledger(self) -> Json | None:
        """The ledger of the data; None in streaming, where it is of what was read."""
        return None if self.run.data.streaming else self.prepared.report.ledger.to_json()

    def passes(self) -> Passes:
        """Returns all data of the run, each row once, for a reference model."""
        load = self.run.data.load or LoadStageConfig()
        data = [(self.prepared.data, load)] + [
            (pipeline, self.run.eval[name].load or load)
            for name, pipeline in self.prepared.held_out.items()
        ]

        def loaders() -> list[Loader]:
            return [_loader(one, _held_out(own), self.mesh) for one, own in data]

        return Passes(loaders, self.prepared.data.get_context().cache_dir / "reference")

    def _write_drawn(self, folder: Path, steps: int) -> None:
        """Writes what was drawn in `steps`.

        It is counted after them, because a plan is scanned as it is read.
        """
        if self.run.data.streaming:
            if steps and not several():  # another process has counters of its own
                write_kept(folder / LEDGER, self.train.ledger().to_json())
        elif steps and len(self.run.data.datasets) > 1:
            data = self.prepared.data.copy().load(host_load(self.run.data))
            drawn = plan_of_run(folder, data, steps, prepare=False, by_step=True)
            write_kept(folder / PLAN, drawn.to_json())
            plot_run(folder, ["mixture"])


@placed("data")
def inputs_of(
    run: RunConfig,
    prepared: Prepared | None = None,
    *,
    progress: ProgressListener = silent,
    model: Any = None,
    mesh: Any = None,
    **trainer: Any,
) -> Inputs:
    """Prepares what is not prepared, and makes loaders on the mesh of `run.train`.

    Args:
        run: The config of the run.
        prepared: What `prepare(run)` returned.
        progress: Called as the data is prepared.
        model: The model that is trained on the loaders; None takes that of `run`.
        mesh: The mesh; None makes that of `run.train`.
        trainer: Other options of the Trainer.

    Raises:
        EasypipeError: What preparing raises, and what `refuse` raises.
    """
    _check_mesh(run)
    initialize(run.train.distributed)
    run, mesh = (
        _completed(run),
        make_mesh(run.train.mesh, at="train.mesh") if mesh is None else checked_mesh(mesh),
    )
    check = functools.partial(
        refuse, run, run.model if model is None else model, mesh=mesh, **trainer
    )
    if prepared is None:
        prepared = prepare_data(run.data, run.eval, progress=progress, check=check)
    info = _check_data(run, prepared.data, prepared.held_out)
    options = run.data.load or LoadStageConfig()
    asked = {"source_ids": True} if "sources" in run.train.measure else {}
    loader = _loader(prepared.data, options, mesh, **asked)
    evals = {}
    for name, pipeline in prepared.held_out.items():
        own = run.eval[name].load or options
        evals[name] = _loader(pipeline, _held_out(own), mesh, **asked)
    run = dataclasses.replace(
        run, data=dataclasses.replace(run.data, seed=prepared.data.get_context().seed)
    )
    turns = next(filter(None, map(trained_turns, prepared.data.get_data().values())), None)
    return Inputs(run, prepared, mesh, loader, evals, info, turns)


def plan_on(run: RunConfig, topology: str | Topology) -> StepPlan:
    """Returns what the training step of `run` needs on devices, which may be absent.

    The step is compiled for the devices, such as "v5p:4x4x4", and never run; with a
    batch_size_schedule it is the largest one. It reads no data, and the tokenizer's vocabulary only
    if model.vocab_size is left out. Rows are data.pack.seq_length tokens long, or as long as
    data.tokenize.max_length allows.

    Raises:
        ConfigError: Neither of the two lengths is set.
        EasypipeError: What plan_step raises.
    """
    _check_mesh(run)
    data, load = run.data, run.data.load or LoadStageConfig()
    longest = data.tokenize.max_length if data.tokenize is not None else None
    length = data.pack.seq_length if data.pack is not None and data.pack.enabled else longest
    if length is None:
        problem = "neither it nor data.tokenize.max_length says how long rows are"
        raise ConfigError(
            at=ROW_LENGTH, problem=problem, fix="Set pack.seq_length, or tokenize.max_length."
        )
    model = run.model
    if isinstance(model, ModelConfig) and model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=_tokenizer(data).vocab_size)
    return plan_step(
        model,
        run.train,
        topology,
        batch_size=max([load.batch_size, *(size for _, size in load.batch_size_schedule)]),
        seq_length=length,
        accumulation_steps=load.accumulation_steps,
    )


def _tokenizer(data: PipelineConfig) -> Tokenizer:
    own = [one.tokenizer for one in data.datasets[:1]]
    of_stage = None if data.tokenize is None else data.tokenize.default_tokenizer
    name = next(filter(None, (*own, of_stage, data.default_tokenizer)), None)
    if name is None:
        raise ConfigError(
            at="model.vocab_size",
            problem="not set, and the data names no tokenizer",
            fix="Set either.",
        )
    return load_tokenizer(name)


def tokens_of(pipeline: Pipeline) -> TokenInfo:
    """Returns which tokenizer made the tokens of a pipeline.

    Raises:
        ConfigError: The tokenizer is not known.
    """
    for source in pipeline.get_data().values():
        info = token_info(source)
        if info is not None:
            return info
    raise ConfigError(
        at="data",
        problem="unknown tokenizer for column 'input_ids'",
        fix="Name a tokenizer, or call tokenize().",
    )


def _check_data(run: RunConfig, data: Pipeline, held_out: Mapping[str, Pipeline]) -> TokenInfo:
    """Returns which tokenizer made the tokens of the run.

    Raises:
        ConfigError: This run cannot train on the data.
    """
    _check_pairs(run, "data", data)
    info = tokens_of(data)
    for name, pipeline in held_out.items():
        _check_pairs(run, f"eval.{name}", pipeline)
        _same_tokens(f"eval.{name}", info, tokens_of(pipeline))
    return info


def _check_teacher(run: RunConfig, at: str, columns: Collection[str]) -> None:
    """Raises ConfigError for data without the teacher columns that train.distill needs."""
    distill = run.train.distill
    for name in () if distill is None else (distill.ids, distill.log_probs):
        require(
            name in columns,
            at,
            f"has no column {name!r} beside its tokens, which train.distill reads",
            "Name it in aligned_columns of the dataset, whose rows are tokens (input_ids).",
            have=sorted(columns),
        )


def _check_pairs(run: RunConfig, at: str, pipeline: Pipeline) -> None:
    """Checks that pairs of answers have a preference loss, and a preference loss has pairs.

    Without a preference loss, both answers of a pair would be trained on as text. Packed rows that
    were saved do not show whether they hold pairs.

    Raises:
        ConfigError: The data does not fit the loss.
    """
    for name, source in pipeline.get_data().items():
        _check_teacher(run, f"{at}.datasets, {name!r}", info_of(source).aligned)
        paired = holds_pairs(source)
        preference = run.train.preference
        require(
            preference is None or LOSS_WEIGHTS not in info_of(source).aligned,
            f"{at}.datasets, {name!r}",
            f"has the column {LOSS_WEIGHTS!r}, which has no effect on preferences",
            f"Rename it: format_fields: {{{LOSS_WEIGHTS}: not_used}}.",
        )
        if preference is not None and preference.loss in UNPAIRED:
            require(
                DESIRABLE.name in info_of(source).aligned,
                "train.preference.loss",
                f"{preference.loss} needs answers that are judged one by one, but the rows "
                f"hold {'pairs of answers' if paired else 'no verdicts'} ({at})",
                "Name desirable_field (prompt.desirable_column), or choose another loss.",
            )
            continue
        require(
            DESIRABLE.name not in info_of(source).aligned or preference is not None,
            at,
            "holds answers with verdicts, and without train.preference those that are not "
            "desirable would be trained like the others",
            "Set train.preference: {loss: kto}, or leave desirable_field "
            "(prompt.desirable_column) out.",
        )
        if paired and run.train.preference is None:
            problem = (
                "holds pairs of answers, and without train.preference the rejected ones "
                "would be trained like the others"
            )
            raise ConfigError(
                at=at,
                problem=problem,
                fix="Set train.preference, or leave prompt.rejected_column (rejected_field) out.",
            )
        if paired is False and run.train.preference is not None:
            problem = "is given, but the rows hold no pairs of answers"
            raise ConfigError(
                at="train.preference",
                problem=f"{problem} ({at})",
                fix="Name prompt.rejected_column (or rejected_field), or leave it out.",
            )


def _loader(pipeline: Pipeline, options: LoadStageConfig, mesh: Any, **changes: bool) -> Loader:
    return pipeline.copy().load(dataclasses.replace(options, mesh=mesh, **changes)).loader()


def _known_loader(pipeline: Pipeline, options: LoadStageConfig) -> Loader | None:
    """Returns the loader of a chain, to ask which data it reads.

    It is None if the chain would have to be prepared first.
    """
    return _loader(pipeline, options, None) if pipeline.prepared() else None


def _held_out(options: LoadStageConfig) -> LoadStageConfig:
    """Returns options that read every row once, in batches of one shape."""
    once: Arguments = {"num_epochs": 1, "drop_last": False, "shuffle_buffer_size": None}
    return dataclasses.replace(options, accumulation_steps=1, batch_size_schedule=(), **once)


def _check_mesh(run: RunConfig) -> None:
    for at, data in (
        ("data", run.data),
        *((f"eval.{name}", data) for name, data in run.eval.items()),
    ):
        own = data.load.mesh if data.load is not None else None
        require(
            own is None
            or own == run.train.mesh
            or (not isinstance(run.train.mesh, str) and own == run.train.mesh.given),
            f"{at}.load.mesh",
            f"{own}, but training runs on {run.train.mesh}",
            "Leave it out.",
        )


def with_vocabulary(
    model: ModelConfig | PretrainedConfig, info: TokenInfo
) -> ModelConfig | PretrainedConfig:
    """Returns `model` with a vocabulary for these tokens; a pretrained one is fixed to its commit.

    Raises:
        ConfigError: The vocabulary of the model is too small, or its added tokens differ from those
            of the data.
    """
    if isinstance(model, PretrainedConfig):
        found = find_pretrained(model)
        check_vocabulary(
            "model.pretrained",
            found.config,
            info,
            "Leave data.default_tokenizer out to use the model's own tokenizer.",
        )
        if model.add_tokens:
            known = load_tokenizer(info.tokenizer)
            require(
                [known.token(number) for number in found.added] == [*model.add_tokens],
                "model.add_tokens",
                f"the tokenizer of the data, {info.tokenizer!r}, is not the model's with these",
                "Leave data.default_tokenizer and datasets[].tokenizer out.",
            )
        return found.named
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=info.vocab_size)
    check_vocabulary("model.vocab_size", model, info, "Leave it out, or give at least that many.")
    return model


def check_vocabulary(at: str, model: ModelConfig, info: TokenInfo, fix: str) -> None:
    """Checks that the model has all tokens; it may have more (many vocabularies are padded).

    Raises:
        ConfigError: There are more tokens than the model has.
    """
    if model.vocabulary < info.vocab_size:
        problem = (
            f"{model.vocabulary}, but the tokenizer {info.tokenizer!r} has {info.vocab_size} tokens"
        )
        raise ConfigError(
            at=at,
            problem=problem if at.endswith("size") else f"has a vocabulary of {problem}",
            fix=fix,
        )


def _same_tokens(at: str, train: TokenInfo, held_out: TokenInfo) -> None:
    require(
        train.tokenizer_fingerprint == held_out.tokenizer_fingerprint,
        at,
        f"its tokenizer {held_out.tokenizer!r} is not the one of the training data, "
        f"{train.tokenizer!r}",
        "Leave its tokenizer out to use the tokenizer of the data.",
    )


def _completed(run: RunConfig) -> RunConfig:
    """Returns the run, completed from its folder and its model.

    A run without a data seed takes the one recorded in its folder, so that it continues with the
    same batches. A run whose data names no tokenizer takes that of its published model.
    """
    check_record(run.train.output_dir)
    if isinstance(run.model, PretrainedConfig):
        run = dataclasses.replace(run, data=with_tokenizer_of(run.data, run.model))
    if run.data.seed is not None:
        return run
    seed = recorded_seed(run.train.output_dir)
    if seed is not None:
        log.info(
            "data.seed: not given, continuing with %d of the run in %s",
            seed,
            run.train.output_dir,
        )
    elif (seed := shared_seed()) is None:  # one process draws its own seed, several share one
        return run
    return dataclasses.replace(run, data=dataclasses.replace(run.data, seed=seed))
