"""Document 000, training: `Trainer("owner/model", data=..., evals=...)` fine-tunes in one line.

It takes a model, the options of its training, and loaders or data by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.core.config import from_dict, load_yaml, meant, to_dict, with_aliases
from easypipe.core.errors import ConfigError, did_you_mean, require
from easypipe.core.progress import ProgressLine
from easypipe.core.protocols import BatchLoader, ProgressListener, Turns
from easypipe.core.values import Arguments, Dataset, Settings
from easypipe.loader.config import LoadStageConfig
from easypipe.run import Inputs, RunConfig, check_vocabulary, inputs_of, with_vocabulary
from easypipe.stages.config import PipelineConfig
from easypipe.stages.pack.config import PackStageConfig
from easypipe.stages.source.config import DatasetConfig
from easypipe.train.callbacks.config import CallbacksConfig
from easypipe.train.config import LossConfig, TrainingConfig
from easypipe.train.engine import Engine
from easypipe.train.events import Callback, TrainListener
from easypipe.train.model.decoder import ModelConfig
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.train.optim.config import OptimizerConfig
from easypipe.train.parallel.config import MeshConfig
from easypipe.train.trainer import TrainResult, run_training

Data = PipelineConfig | Settings | DatasetConfig | Sequence[DatasetConfig] | str | Path
_DATA = (PipelineConfig, DatasetConfig, str, Path, list, tuple, Mapping)
# Fields of TrainingConfig that are also arguments of Trainer, with their types: the type of the
# value decides which is meant.
_EITHER = {
    "optimizer": OptimizerConfig,
    "loss": LossConfig,
    "callbacks": CallbacksConfig,
    "mesh": MeshConfig,
}
_FIELDS = {one.name for one in dataclasses.fields(TrainingConfig)}


class Trainer(Engine):
    """Trains a model.

    `Trainer(ModelConfig(...), TrainingConfig(...), loader, {"held_out": other}).run()`.

    With data instead of loaders: `Trainer("owner/model", data=[DatasetConfig(...)],
    seq_length=2048, output_dir="runs/a", lora=LoraConfig()).run().save("tuned")`.

    Args:
        model: A ModelConfig or ClassifierConfig; a published model by its folder or Hub name (or a
            PretrainedConfig), which is read onto the mesh when the run begins; a function of
            nnx.Rngs that builds an nnx.Module; such a module, whose arrays are copied; or a Flax
            Linen module, through nnx.bridge.
        config: Options of the run. Options of TrainingConfig may also be given by name, instead of
            it or to change it.
        train: Any BatchLoader. Batches have input_ids and labels, Int32[B, S], and for packed rows
            segment_ids and position_ids. Each batch is one optimizer step.
        data: Instead of `train`: a PipelineConfig, also as a dict or in a YAML file (in the config
            of a run, its `data`), or datasets. It is tokenized and planned when the Trainer is
            made, unless that was already done. The default tokenizer is that of a published model.
        evals: Held-out data by name, each a loader or as `data`; `{"from": "data", "fraction":
            0.01, "seed": 7}` holds out rows of `data`.
        seq_length: Tokens of a packed row of `data`; required for datasets.
        batch_size: Rows of a batch; None takes the default of LoadStageConfig.
        progress: Receives the progress of preparing `data`; None prints a line on the terminal.
        loss: A function of (module, batch) instead of next-token cross entropy: it returns the mean
            over the batch's targets, `(mean, {name: mean})`, or a LossOutput of sums
            (docs/training.md). Or options of the built-in loss, as in TrainingConfig.
        optimizer: Any optax transformation over a flat dict of parameters by dotted name, including
            schedule and clipping; or options.
        callbacks: Callback objects (easypipe.train.events), in addition to those in the config; or
            callbacks by name, as in the config.
        mesh: A jax.sharding.Mesh with the axes of `easypipe.train.parallel.mesh.make_mesh`, or what
            TrainingConfig takes. Give a loader the same mesh, so that its batches need not be
            moved.
        listener: Any function of the run's events.
        run_config: The resolved config of the whole run, saved in every checkpoint.
        tokenizer: The name or path of the tokenizer that made the tokens; it is recorded, so that
            it can be saved with the model.
    """

    def __init__(
        self,
        model: Any,
        config: TrainingConfig | None = None,
        train: BatchLoader | None = None,
        evals: Settings | None = None,
        *,
        data: Data | None = None,
        seq_length: int | None = None,
        batch_size: int | None = None,
        progress: ProgressListener | None = None,
        loss: Any = None,
        optimizer: Any = None,
        callbacks: Sequence[Callback] | CallbacksConfig | Settings | None = None,
        mesh: Any = None,
        listener: TrainListener | None = None,
        run_config: Settings | None = None,
        tokenizer: str | None = None,
        turns: Turns | None = None,
        **fields: Any,
    ) -> None:
        """Makes a Trainer and prepares its data, which may raise other errors.

        Raises:
            ConfigError: Something cannot run.
            PlacementError: Rows do not fit the mesh.
        """
        given: Arguments = {"loss": loss, "optimizer": optimizer, "callbacks": callbacks}
        given |= {"mesh": mesh, "listener": listener, "run_config": run_config}
        given |= {"tokenizer": tokenizer, "turns": turns}
        _check_names(fields, given)
        options = {name: value for name, value in given.items() if value is not None}
        changes = fields | {
            name: options.pop(name)
            for name, kind in _EITHER.items()
            if isinstance(options.get(name), Mapping | str | kind)
        }
        config = (
            from_dict(TrainingConfig, changes) if config is None else with_aliases(config, changes)
        )
        _check_data(data, train, evals)
        self._inputs = None
        if train is not None:
            _check_none(seq_length=seq_length, batch_size=batch_size, progress=progress)
            super().__init__(model, config, train, evals, **options)
            return
        if isinstance(model, str | Path):
            model = PretrainedConfig(pretrained=model)
        rows = _pipeline("data", data, seq_length, batch_size)
        inputs, loaders = _inputs_of(
            rows, config, model, evals or {}, progress=progress or ProgressLine(), **options
        )
        if isinstance(model, ModelConfig | PretrainedConfig):
            model = with_vocabulary(model, inputs.tokens)
        known = _known(inputs, model) | options
        super().__init__(model, inputs.run.train, inputs.train, loaders, **known)
        if self.origin.config is not None:
            fix = "Train it on the tokens of its own tokenizer."
            check_vocabulary("model", self.origin.config, inputs.tokens, fix)
        self._inputs, self.passes, self.ledger = inputs, inputs.passes(), inputs.ledger

    def run(self) -> TrainResult:
        """Trains from the newest checkpoint in output_dir, or from the start, to the last step.

        Raises:
            Interrupted: SIGINT or SIGTERM was received; the current step is saved.
            TrainError: A batch has no targets, losses are not finite (see
                TrainingConfig.on_nonfinite) or permanently out of range, a loader ends early, a
                device is out of memory (the message names what is held and what to change), or
                another process trains in output_dir.
            StateError: The checkpoint belongs to another run.
            StorageError: Something cannot be written.
        """
        return run_training(self) if self._inputs is None else self._inputs.train_with(self)


def _check_names(fields: Settings, given: Settings) -> None:
    """Checks the names of options.

    Raises:
        ConfigError: An option exists neither in Trainer nor in its config.
    """
    for name in fields:
        if name not in _FIELDS and name not in TrainingConfig.ALIASES:
            have = sorted({*given, *_FIELDS, "data", "seq_length", "batch_size", "progress"})
            fix = did_you_mean(name, have) or meant(TrainingConfig, name)
            raise ConfigError(at=name, problem="no such option of Trainer", have=have, fix=fix)


def _check_data(data: Data | None, train: BatchLoader | None, evals: Settings | None) -> None:
    problem = "either it or a loader (`train`) says what to train on; give one of them"
    require((data is None) != (train is None), "data", problem)
    problem = f"{type(evals).__name__} does not name what is held out"
    fix = 'Give it a name: {"held_out": ...}.'
    require(evals is None or isinstance(evals, Mapping), "evals", problem, fix)


def _check_none(**options: int | ProgressListener | None) -> None:
    """Checks that no option of preparing data is given with a loader, which has its own.

    Raises:
        ConfigError: One is given.
    """
    for at, value in options.items():
        fix = "Set it where the loader is made."
        require(value is None, at, "has no effect on a loader that is given", fix)


def _known(inputs: Inputs, model: Dataset) -> Arguments:
    """Returns the arguments of an Engine that follow from the data.

    Args:
        inputs: The prepared data.
        model: The model, with the vocabulary of the tokens.
    """
    named = isinstance(model, ModelConfig | PretrainedConfig)
    run = to_dict(dataclasses.replace(inputs.run, model=model) if named else inputs.run)
    return {
        "run_config": run if named else run | {"model": None},
        "mesh": inputs.mesh,
        "tokenizer": inputs.tokens.tokenizer,
        "turns": inputs.turns,
    }


def _inputs_of(
    data: PipelineConfig, config: TrainingConfig, model: Dataset, evals: Settings, **options: Any
) -> tuple[Inputs, Arguments]:
    """Prepares `data`; returns it, and the loaders of held-out data in the order of `evals`."""
    held_out: Arguments = {
        name: one if isinstance(one, Mapping) else _pipeline(f"evals.{name}", one, None, None)
        for name, one in evals.items()
        if isinstance(one, _DATA)
    }
    loaded = {name: one for name, one in evals.items() if name not in held_out}
    named = {"model": model} if isinstance(model, ModelConfig | PretrainedConfig) else {}
    run = RunConfig(data=data, train=config, eval=held_out, **named)
    inputs = inputs_of(run, model=model, evals=loaded, **options)
    made = {**loaded, **inputs.evals}
    return inputs, {name: made[name] for name in evals}


def _pipeline(
    at: str, data: Dataset, seq_length: int | None, batch_size: int | None
) -> PipelineConfig:
    """Returns the PipelineConfig for `data`, with these sizes.

    Raises:
        ConfigError: It is not data, or datasets are given without a row length.
    """
    if isinstance(data, str | Path | Mapping):
        values = data if isinstance(data, Mapping) else load_yaml(data)
        where = at if isinstance(data, Mapping) else str(data)
        data = from_dict(PipelineConfig, values.get("data", values), where)
    elif isinstance(data, DatasetConfig | Sequence):
        datasets = (data,) if isinstance(data, DatasetConfig) else tuple(data)
        require(
            at != "data" or seq_length is not None,
            "seq_length",
            "datasets alone do not say how long a row is",
            "Give it: 2048 is usual.",
        )
        data = PipelineConfig(datasets=datasets)
    if not isinstance(data, PipelineConfig):
        have = ("PipelineConfig", "a YAML file", "DatasetConfig", "several of these")
        raise ConfigError(at=at, problem=f"{type(data).__name__} is not data", have=have)
    if seq_length is not None:
        pack = data.pack or PackStageConfig(seq_length=seq_length)
        data = dataclasses.replace(data, pack=dataclasses.replace(pack, seq_length=seq_length))
    if batch_size is not None:
        load = dataclasses.replace(data.load or LoadStageConfig(), batch_size=batch_size)
        data = dataclasses.replace(data, load=load)
    return data
