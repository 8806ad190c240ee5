"""Document 004 from a config: ClassifyConfig, a run on images, as `easypipe train` does it.

Task, data, model, training; what the command does with it is these functions, and nothing else.

The collator is chosen by the TaskSpec, batches are UniversalDataModule's, and the training is
Trainer's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from easypipe.compat.data_module import UniversalDataModule
from easypipe.compat.foreign import Values
from easypipe.compat.images import ImageRows, Images, ImagesConfig
from easypipe.compat.registry import CollatorRegistry
from easypipe.core.config import apply_overrides, config, from_dict, load_yaml, to_dict
from easypipe.core.errors import ConfigError, SourceError
from easypipe.core.schema import LABELS, PIXEL_VALUES, TaskSpec
from easypipe.train.checks import resolve_steps
from easypipe.train.config import TrainingConfig, told
from easypipe.train.events import TrainListener, null_listener
from easypipe.train.model.config import ClassifierConfig
from easypipe.train.parallel.config import DistributedConfig
from easypipe.train.parallel.distributed import initialize
from easypipe.train.record import recorded_seed
from easypipe.train.trainer import Engine, TrainResult

log = logging.getLogger("easypipe")

VAL = "val"  # what the held-out rows are called in metrics


@config
class ClassifyConfig:
    """A run on images: task, data, model and training.

    task: which collator makes batches, and its options (`channels`, `image_size`, `preset`,
    `mean`, `std`, ...); of modality `vision` and task_type `classification`. data: the images.
    model: the network; what it leaves out is the data's. train: as for text.
    """

    task: TaskSpec
    data: ImagesConfig
    train: TrainingConfig
    model: ClassifierConfig = field(default_factory=ClassifierConfig)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> ClassifyConfig:
        """A YAML file, with `key.path=value` overrides.

        Raises ConfigError naming the key path of what is wrong.
        """
        return from_dict(cls, apply_overrides(load_yaml(path), overrides))

    def check(self) -> None:
        for key, value, known in (
            ("modality", self.task.modality, "vision"),
            ("task_type", self.task.task_type, "classification"),
        ):
            if value != known:
                problem = f"{value!r} is nothing that is trained from a config"
                raise ConfigError(
                    at=f"task.{key}",
                    problem=problem,
                    have=[known],
                    fix="From Python: UniversalDataModule and Trainer.",
                )
        try:
            CollatorRegistry.get_instance().get_collator(self.task)
        except ConfigError as error:
            raise ConfigError(
                at="task.options",
                problem=f"{error.at}: {error.problem}",
                have=error.have,
                fix=error.fix,
            ) from None
        if changes := told(self.data, self.train, "data"):
            object.__setattr__(self, "data", dataclasses.replace(self.data, **changes))
        if self.train.preference is not None:
            raise ConfigError(
                at="train.preference",
                problem="is for pairs of answers, and these are images",
                fix="Leave it out.",
            )
        if self.train.lora is not None:
            raise ConfigError(
                at="train.lora",
                problem="adapts the projections of a decoder, and there is none here",
                fix="Leave it out.",
            )
        if self.train.distributed != DistributedConfig():
            raise ConfigError(
                at="train.distributed",
                problem="images are read by one process",
                fix="Leave it out.",
            )


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a config comes to once its data is read.

    run: with seed, classes, num_classes and image_shape.
    """

    run: ClassifyConfig
    module: UniversalDataModule
    train: Any
    val: Any  # None where nothing is held out
    per_class: Mapping[str, int]  # rows of data_files, held-out ones among them
    val_rows: int


def inputs_of(run: ClassifyConfig) -> Inputs:
    """Opens the data and makes its loaders.

    Raises ConfigError and SourceError for data that does not fit the rest.
    """
    data, model = run.data, run.model
    seed = recorded_seed(run.train.output_dir) if data.seed is None else data.seed
    images = Images(data, "data_files")
    classes = images.names if data.classes is None else list(data.classes)
    rows = images.rows(classes)
    if not len(rows):
        raise ConfigError(at="data.data_files", problem="has no rows", fix="Give it some.")
    held_out = None if data.val_files is None else Images(data, "val_files").rows(classes)
    count = max(len(classes or ()), int(rows.labels.max()) + 1)
    num_classes = _num_classes(model, count, held_out)
    try:
        module = UniversalDataModule(
            rows,
            held_out,
            task_spec=run.task,
            val_split=data.val_split,
            seed=seed,
            batch_size=data.batch_size,
            num_epochs=data.num_epochs,
            num_workers=data.num_workers,
        )
    except ConfigError as error:
        raise error.under("data") from None
    train = module.train_dataloader()
    shape = tuple(np.shape(_first(train)[PIXEL_VALUES])[1:])
    if model.image_shape is not None and model.image_shape != shape:
        problem = f"{list(model.image_shape)}, but the images are {list(shape)}"
        raise ConfigError(
            at="model.image_shape",
            problem=problem,
            fix="Leave it out, or set task.options.image_size.",
        )
    try:
        model = dataclasses.replace(model, num_classes=num_classes, image_shape=shape)
    except ConfigError as error:
        raise error.under("model") from None
    names = None if classes is None else tuple(classes)
    data = dataclasses.replace(data, seed=module.seed, classes=names)
    counts = np.bincount(rows.labels, minlength=count).tolist()
    return Inputs(
        run=dataclasses.replace(run, data=data, model=model),
        module=module,
        train=train,
        val=module.val_dataloader(),
        per_class={str(classes[i] if classes else i): n for i, n in enumerate(counts)},
        val_rows=len(module.splits.val) if held_out is None else len(held_out),
    )


def _num_classes(model: ClassifierConfig, count: int, held_out: ImageRows | None) -> int:
    """Raises ConfigError and SourceError for labels that the model has no class for."""
    if model.num_classes is not None and model.num_classes < count:
        raise ConfigError(
            at="model.num_classes",
            problem=f"{model.num_classes}, but labels go to {count - 1}",
            fix=f"Leave it out, or give at least {count}.",
        )
    num_classes = model.num_classes or max(count, 2)
    if held_out is not None and len(held_out) and int(held_out.labels.max()) >= num_classes:
        row = int(held_out.labels.argmax())
        raise SourceError(
            at=f"val_files, row {row}",
            problem=f"label {held_out.labels[row]}, but the model has {num_classes} classes",
            fix="Set model.num_classes.",
        )
    return num_classes


def train(
    run: ClassifyConfig, inputs: Inputs | None = None, *, listener: TrainListener = null_listener
) -> TrainResult:
    """Trains to the last step, from the newest checkpoint in `train.output_dir` if there is one.

    Evaluates on what is held out as "val".

    inputs: what `inputs_of(run)` gave. Raises what that raises, and what `Trainer.run` raises.
    """
    if initialize():
        raise ConfigError(
            at="train.distributed",
            problem="this is one of several processes, and images are read by one",
            fix="Start one.",
        )
    inputs = inputs_of(run) if inputs is None else inputs
    evals = {} if inputs.val is None else {VAL: inputs.val}
    resolved = inputs.run
    return Engine(
        resolved.model,
        run.train,
        inputs.train,
        evals,
        run_config=to_dict(resolved),
        listener=listener,
    ).run()


@dataclass(frozen=True, kw_only=True)
class ClassifyPlan:
    """What a run would do. train_rows: of one pass."""

    image_shape: tuple[int, ...]  # height, width, channels
    per_class: Mapping[str, int]  # rows of data_files
    train_rows: int
    val_rows: int
    batch_size: int
    steps: int
    epochs: float

    def to_json(self) -> dict[str, Any]:
        return to_dict(self)

    def __str__(self) -> str:
        height, width, channels = self.image_shape
        shares = ", ".join(f"{name}: {rows:,}" for name, rows in self.per_class.items())
        return (
            f"images   {height} x {width} pixels, "
            f"{'grey' if channels == 1 else f'{channels} channels'}\n"
            f"classes  {len(self.per_class)} ({shares})\n"
            f"rows     {self.train_rows:,} to train on, {self.val_rows:,} held out\n"
            f"steps    {self.steps:,} of {self.batch_size} rows: {self.epochs:.2f} passes"
        )


def plan(run: ClassifyConfig, steps: int | None = None) -> ClassifyPlan:
    """Reads labels and the first batch; trains nothing.

    steps: in place of train.steps. Raises what inputs_of raises.
    """
    inputs = inputs_of(run)
    asked = run.train if steps is None else dataclasses.replace(run.train, steps=steps, epochs=None)
    resolved, rows, size = (
        resolve_steps(asked, inputs.train),
        len(inputs.module.splits.train),
        run.data.batch_size,
    )
    shape = inputs.run.model.image_shape
    assert shape is not None
    return ClassifyPlan(
        image_shape=shape,
        per_class=inputs.per_class,
        train_rows=rows,
        val_rows=inputs.val_rows,
        batch_size=size,
        steps=resolved,
        epochs=resolved * size / rows,
    )


def _first(loader: Any) -> Values:
    """The first batch. Raises ConfigError for one that a Classifier does not take."""
    batch = loader.batch(0)
    pixels = batch.get(PIXEL_VALUES) if isinstance(batch, Mapping) else None
    if (
        pixels is None
        or LABELS not in batch
        or np.ndim(pixels) != 4
        or np.shape(pixels)[3] not in (1, 3)
    ):
        got = (
            {name: list(np.shape(column)) for name, column in batch.items()}
            if isinstance(batch, Mapping)
            else type(batch).__name__
        )
        fix = "Leave channels_last out." if pixels is not None else "Choose a collator of images."
        raise ConfigError(
            at="task.options",
            problem=f"batches are {got}, not pixel_values [B, H, W, C] with labels",
            fix=fix,
        )
    return batch
