"""`Trainer(model="owner/model", data=...)`: a model is fine-tuned on data that is named, in one line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.core.config import from_dict, load_yaml, meant, to_dict
from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.core.progress import ProgressLine
from easypipe.core.protocols import BatchLoader, ProgressListener
from easypipe.loader.loader import LoadStageConfig
from easypipe.run import RunConfig, check_vocabulary, inputs_of, with_vocabulary
from easypipe.stages.config import PipelineConfig
from easypipe.stages.pack import PackStageConfig
from easypipe.stages.source import DatasetConfig
from easypipe.train import trainer as engine
from easypipe.train.config import TrainingConfig
from easypipe.train.model import ModelConfig
from easypipe.train.models.config import PretrainedConfig

Data = PipelineConfig | DatasetConfig | Sequence[DatasetConfig] | str | Path
_DATA = (PipelineConfig, DatasetConfig, str, Path, list, tuple)
_EITHER = ("optimizer", "loss")  # fields of TrainingConfig, and arguments of the engine's Trainer
_FIELDS = {one.name for one in dataclasses.fields(TrainingConfig)}


class Trainer(engine.Trainer):
    """`Trainer("owner/model", data=[DatasetConfig(...)], seq_length=2048, output_dir="runs/a", lora=LoraConfig()).run().save("tuned")`.

    Everything that `easypipe.train.trainer.Trainer` takes, and in place of its loaders:

    data: a PipelineConfig, or a YAML file with one (a run's config: its `data`), or datasets. Tokenized and planned here, when the Trainer
        is made, unless that was done before. Its tokenizer, where it names none, is that of a published model.
    evals: held-out data by name, each as `data` or a loader.
    seq_length: tokens of a packed row; datasets alone need it. batch_size: rows of a batch; None: LoadStageConfig's.
    progress: hears how preparing goes; None: a line on the terminal.
    Options of TrainingConfig may be given by name, in place of `config` or to change it.
    """

    def __init__(
        self,
        model: Any,
        config: TrainingConfig | None = None,
        train: BatchLoader | None = None,
        evals: Mapping[str, Any] | None = None,
        *,
        data: Data | None = None,
        seq_length: int | None = None,
        batch_size: int | None = None,
        progress: ProgressListener | None = None,
        **options: Any,
    ) -> None:
        """Raises what the engine's Trainer raises, and what preparing data raises."""
        changes = {
            name: options.pop(name) for name in list(options) if name in _FIELDS and (name not in _EITHER or _is_config(options[name]))
        }
        own = {name for name, one in inspect.signature(engine.Trainer.__init__).parameters.items() if one.kind is one.KEYWORD_ONLY}
        if unknown := [name for name in options if name not in own]:
            have = sorted({*own, *_FIELDS, "data", "seq_length", "batch_size", "progress"})
            raise ConfigError(
                at=unknown[0],
                problem="no such option of Trainer",
                have=have,
                fix=did_you_mean(unknown[0], have) or meant(TrainingConfig, unknown[0]),
            )
        config = from_dict(TrainingConfig, changes) if config is None else dataclasses.replace(config, **changes)
        if (data is None) == (train is None):
            raise ConfigError(at="data", problem="either it or a loader (`train`) says what to train on; give one of them")
        self._inputs = None
        if data is None:
            if seq_length is not None or batch_size is not None:
                at = "seq_length" if seq_length is not None else "batch_size"
                raise ConfigError(at=at, problem="has no effect on a loader that is given", fix="Set it where the loader is made.")
            assert train is not None
            super().__init__(model, config, train, evals, **options)
            return
        if isinstance(model, str | Path):
            model = PretrainedConfig(pretrained=model)
        named = {"model": model} if isinstance(model, ModelConfig | PretrainedConfig) else {}
        held_out = {name: one for name, one in (evals or {}).items() if isinstance(one, _DATA)}
        loaded = {name: one for name, one in (evals or {}).items() if name not in held_out}
        run = RunConfig(
            data=_pipeline("data", data, seq_length, batch_size),
            train=config,
            eval={name: _pipeline(f"evals.{name}", one, None, None) for name, one in held_out.items()},
            **named,
        )
        inputs = inputs_of(run, progress=ProgressLine() if progress is None else progress, model=model, evals=loaded, **options)
        if named:
            model = with_vocabulary(model, inputs.tokens)
        resolved = to_dict(dataclasses.replace(inputs.run, model=model)) if named else to_dict(inputs.run) | {"model": None}
        loaders = {name: inputs.evals[name] if name in inputs.evals else loaded[name] for name in evals or {}}
        given = {"run_config": resolved, "mesh": inputs.mesh, "tokenizer": inputs.tokens.tokenizer, **options}
        super().__init__(model, config, inputs.train, loaders, **given)
        if self.origin.config is not None:
            check_vocabulary("model", self.origin.config, inputs.tokens, "Train it on the tokens of its own tokenizer.")
        self._inputs = inputs

    def run(self) -> engine.TrainResult:
        return super().run() if self._inputs is None else self._inputs.around(super().run, writes=self.writes)


def _is_config(given: Any) -> bool:
    """Whether it is TrainingConfig's, or a transformation or a function for the engine."""
    return isinstance(given, Mapping) or dataclasses.is_dataclass(given)


def _pipeline(at: str, data: Any, seq_length: int | None, batch_size: int | None) -> PipelineConfig:
    if isinstance(data, str | Path):
        values = load_yaml(data)
        data = from_dict(PipelineConfig, values.get("data", values), str(data))
    elif isinstance(data, DatasetConfig | Sequence):
        datasets = (data,) if isinstance(data, DatasetConfig) else tuple(data)
        if at == "data" and seq_length is None:
            raise ConfigError(at="seq_length", problem="datasets alone do not say how long a row is", fix="Give it: 2048 is usual.")
        data = PipelineConfig(datasets=datasets)
    if not isinstance(data, PipelineConfig):
        have = ("PipelineConfig", "a YAML file", "DatasetConfig", "several of these")
        raise ConfigError(at=at, problem=f"{type(data).__name__} is no data", have=have)
    if seq_length is not None:
        data = dataclasses.replace(
            data, pack=dataclasses.replace(data.pack, seq_length=seq_length) if data.pack else PackStageConfig(seq_length=seq_length)
        )
    if batch_size is not None:
        data = dataclasses.replace(data, load=dataclasses.replace(data.load or LoadStageConfig(), batch_size=batch_size))
    return data
