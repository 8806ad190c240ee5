"""Document 004 by a config: ClassifyConfig, images copied to disk, their labels, plan, training.

The command `easypipe` calls these functions and adds nothing. The TaskSpec chooses the collator,
UniversalDataModule makes the batches, and Trainer's engine does the training.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from easypipe.cache.location import cache_folder
from easypipe.compat.collators import as_array
from easypipe.compat.data_module import UniversalDataModule
from easypipe.compat.registry import CollatorRegistry
from easypipe.core import storage
from easypipe.core.class_names import classes_of
from easypipe.core.config import (
    ListOf,
    apply_overrides,
    config,
    digest,
    from_dict,
    load_yaml,
    to_dict,
)
from easypipe.core.errors import (
    ConfigError,
    SourceError,
    place,
    require,
    require_known,
)
from easypipe.core.protocols import Shard, ShardedSource, select
from easypipe.core.schema import LABELS, PIXEL_VALUES, TaskSpec, row_numbers
from easypipe.core.values import Batch, Dataset, Int64, JsonObject, Settings
from easypipe.pipeline import Pipeline
from easypipe.stages.config import PipelineConfig
from easypipe.stages.source.config import DatasetConfig
from easypipe.train.checks import resolve_steps
from easypipe.train.config import TrainingConfig, told
from easypipe.train.engine import Engine
from easypipe.train.events import TrainListener, null_listener
from easypipe.train.model.config import ClassifierConfig
from easypipe.train.parallel.config import DistributedConfig
from easypipe.train.parallel.distributed import initialize
from easypipe.train.record import recorded_seed
from easypipe.train.trainer import TrainResult, run_training

# The labelled images of a run. The two columns that are needed are copied once into an Arrow file
# of the cache folder, which is memory-mapped: random access then reads only one row, and memory
# does not grow with the dataset.


log = logging.getLogger("easypipe")

ROWS_AT_A_TIME = 256
MAX_CLASSES = 1 << 20  # a larger label is no class, but another number, such as that of a row
COPY_VERSION = 1  # to be increased when the format of the copies changes


@config
class ImagesConfig:
    """Rows with an image and a label, and how they become batches.

    Args:
        data_files: A path, glob or list of parquet, Arrow or JSON files, rows in memory, or a
            dataset of the Hub, as in DatasetConfig. Images are encoded bytes, `{bytes, path}`, or
            arrays of 0 to 255 or of floats.
        val_files: Rows of the same kind; all of them are used for evaluation.
        val_split: The share of data_files, drawn by the seed, that is used for evaluation instead
            of val_files and not trained on.
        type: The format, as in DatasetConfig.
        split: The split, as in DatasetConfig.
        image_column: The column of images.
        label_column: The column of labels: classes from 0, or names.
        classes: Names of the classes in the order of their numbers; None takes those that
            `datasets` gives the column, else the names among the labels, sorted.
        batch_size: Rows of a batch.
        num_epochs: Passes over the rows; None never ends.
        num_workers: Threads that make batches ahead; None takes half of the cores, from 1 to 4.
        seed: Seed of the order and of the split; None draws one and records it.
        cache_dir: The folder that rows of files are copied to; None takes EASYPIPE_CACHE, else the
            user's cache folder.
    """

    data_files: Dataset
    val_files: Any = None
    val_split: float = 0.0
    type: Literal["json", "jsonl", "parquet", "arrow", "huggingface"] | None = None
    split: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    classes: ListOf[str] | None = None
    batch_size: int = 32
    num_epochs: int | None = 1
    num_workers: int | None = None
    seed: int | None = None
    cache_dir: str | Path | None = None

    def check(self) -> None:
        self.dataset("data_files")
        if self.val_files is not None:
            self.dataset("val_files")
        require(
            0 <= self.val_split < 1,
            "val_split",
            f"{self.val_split} is not a share of the rows",
            "Give one from 0 up to 1.",
        )
        require(
            not self.val_split or self.val_files is None,
            "val_split",
            "has no effect together with val_files",
            "Leave one of them out.",
        )
        require(
            self.image_column != self.label_column,
            "label_column",
            "is the image_column too",
            "Name another column.",
        )
        if self.classes is not None and (
            len(set(self.classes)) < len(self.classes) or len(self.classes) < 2
        ):
            raise ConfigError(
                at="classes",
                problem=f"{list(self.classes)} are not names of two classes or more",
                fix="Name each once.",
            )

    def dataset(self, name: str) -> DatasetConfig:
        """Returns the DatasetConfig by which a Pipeline reads `data_files` or `val_files`."""
        own = name == "data_files"
        files, part = (self.data_files, self.split) if own else (self.val_files, None)
        try:
            return DatasetConfig(name=name, data_files=files, type=self.type, split=part)
        except ConfigError as error:
            raise (
                ConfigError(at=name, problem=error.problem, fix=error.fix)
                if error.at == "data_files"
                else error
            ) from None


class ImageRows:
    """A map-style, thread-safe dataset: `rows[i]` is {"image": ..., "label": int}.

    Args:
        images: The images of all rows.
        labels: The classes of all rows, from 0.
        fingerprint: The fingerprint of the data they were read from.
        at: Returns the place of a row, for error messages.

    Raises:
        SourceError: A row that is read has no image; the error names the row.
    """

    def __init__(
        self, images: pa.ChunkedArray, labels: Int64, fingerprint: str, at: Callable[[int], str]
    ) -> None:
        self._images, self.labels, self.fingerprint, self._at = images, labels, fingerprint, at

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        image = self._images[index].as_py()
        if image is None:
            raise SourceError(
                at=self._at(index),
                problem="the row has no image",
                fix="Leave such rows out.",
            )
        return {
            "image": as_array(image) if isinstance(image, list) else image,
            "label": int(self.labels[index]),
        }


class Images:
    """`data_files` or `val_files` of an ImagesConfig, copied and with labels read.

    Opening files may raise other errors.

    Raises:
        ConfigError: A column does not exist.
    """

    def __init__(self, config: ImagesConfig, name: str) -> None:
        self._config, self._name = config, name
        dataset = config.dataset(name)
        [source] = (
            Pipeline(PipelineConfig(datasets=(dataset,), seed=0, cache_dir=config.cache_dir))
            .source()
            .get_data()
            .values()
        )
        have = source.schema.names
        for key, column in (
            ("image_column", config.image_column),
            ("label_column", config.label_column),
        ):
            require_known(column, have, f"data.{key}", f"{name} have no column {column!r}")
        self._classes = classes_of(source.schema.field(config.label_column))
        self._columns, self._source = [config.image_column, config.label_column], source
        self.fingerprint = digest("images", COPY_VERSION, source.fingerprint, self._columns)
        self._table = self._mapped(select(source, self._columns), in_memory=dataset.in_memory)

    @property
    def names(self) -> list[str] | None:
        """The names among the labels, sorted, or those of their numbers; None if there are none.

        Raises:
            SourceError: Labels are neither numbers nor names, or some are null.
        """
        if not pa.types.is_large_string(self._labels.type):
            return self._classes if isinstance(self._classes, list) else None
        return sorted(set(self._labels.to_pylist()))

    def rows(self, classes: Sequence[str] | None) -> ImageRows:
        """Returns the rows, with labels numbered by `classes`.

        Raises:
            SourceError: A label is not a class; the error names the row.
        """
        images, at = self._table.column(0), partial(self._place, self._config.image_column)
        return ImageRows(images, self._numbers(classes), self.fingerprint, at)

    @cached_property
    def _labels(self) -> pa.Array:
        """The column of labels.

        Raises:
            SourceError: Labels are neither numbers nor names, or some are null.
        """
        labels = self._table.column(1).combine_chunks()
        kind = labels.type
        if not (pa.types.is_integer(kind) or pa.types.is_large_string(kind)) and len(labels):
            at = place(self._name, column=self._config.label_column)
            raise SourceError(
                at=at,
                problem=f"holds {kind}, not classes",
                fix="Give whole numbers from 0, or names.",
            )
        if labels.null_count:
            row = int(np.flatnonzero(labels.is_null().to_numpy(zero_copy_only=False))[0])
            raise SourceError(
                at=self._place(self._config.label_column, row),
                problem="there is no label",
                fix="Leave such rows out.",
            )
        return labels

    def _numbers(self, classes: Sequence[str] | None) -> Int64:
        """Returns the class of each row.

        Raises:
            SourceError: A label is not a class; the error names the row.
        """
        names = pa.types.is_large_string(self._labels.type)
        if names and classes is None:
            raise SourceError(
                at=place(self._name, column=self._config.label_column),
                problem="holds names, and the labels of data_files are numbers",
                fix="Set data.classes to the names in the order of their numbers.",
            )
        if not names:
            numbers, own = self._labels.to_numpy().astype(np.int64), self._classes
            if classes is not None and isinstance(own, list) and {*own} <= {*classes}:
                # the same names may have other numbers
                among = (numbers >= 0) & (numbers < len(own))
                order = np.array([classes.index(name) for name in own], np.int64)
                numbers = np.where(among, order[np.where(among, numbers, 0)], -1)
        else:
            known = {name: i for i, name in enumerate(classes or ())}
            numbers = np.array([known.get(name, -1) for name in self._labels.to_pylist()], np.int64)
        most = MAX_CLASSES if classes is None else len(classes)
        wrong = np.flatnonzero((numbers < 0) | (numbers >= most))
        if wrong.size:
            problem = f"label {self._labels[int(wrong[0])].as_py()!r} is not one of the classes"
            raise SourceError(
                at=self._place(self._config.label_column, int(wrong[0])),
                problem=problem,
                have=classes,
                fix="Classes count from 0, or have names.",
            )
        return numbers

    def _place(self, column: str, row: int) -> str:
        """Returns the file and the record of a row of the table, for error messages.

        Sources leave out some records, such as blank lines, so their numbers are read again.
        """
        before = 0
        for shard, start, batch in _batches(select(self._source, [self._config.label_column])):
            if row < before + batch.num_rows:
                number = int(row_numbers(batch, start)[row - before])
                return place(shard.name, row=number, column=column)
            before += batch.num_rows
        return place(self._name, row=row, column=column)  # the files are others now

    def _mapped(self, source: ShardedSource, *, in_memory: bool) -> pa.Table:
        """Returns the two columns, in memory or mapped from a copy in the cache folder."""
        schema = pa.schema([source.schema.field(name) for name in self._columns])
        if in_memory:
            return pa.Table.from_batches(self._read(source), schema)
        path = cache_folder(self._config.cache_dir).local / "images" / f"{self.fingerprint}.arrow"
        if path.exists():
            try:
                return _opened(path)
            except pa.ArrowInvalid as error:
                log.warning("%s is damaged, and is made again: %s", path, error)
        with (
            storage.commit_file(path) as (temporary, _),
            pa.ipc.new_file(str(temporary), schema) as writer,
        ):
            for batch in self._read(source):
                writer.write_batch(batch)
        return _opened(path)

    def _read(self, source: ShardedSource) -> Iterator[pa.RecordBatch]:
        for _, _, batch in _batches(source):
            yield batch.select(self._columns)


def _batches(source: ShardedSource) -> Iterator[tuple[Shard, int, pa.RecordBatch]]:
    """Yields the rows of a source in order, some at a time, with their shard and first record."""
    for number, shard in enumerate(source.shards):
        rows = shard.num_rows or 0
        for start in range(0, rows, ROWS_AT_A_TIME):
            yield shard, start, source.read(number, start, min(rows, start + ROWS_AT_A_TIME))


def _opened(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(os.fsencode(path))).read_all()


VAL = "val"  # the name of the held-out rows in metrics


@config
class ClassifyConfig:
    """A run on images: task, data, model and training.

    Args:
        task: The collator that makes batches, and its options (`channels`, `image_size`, `preset`,
            `mean`, `std`, ...); modality `vision`, task_type `classification`.
        data: The images.
        train: Training options, as for text.
        model: The network; options that it leaves out follow from the data.
    """

    task: TaskSpec
    data: ImagesConfig
    train: TrainingConfig
    model: ClassifierConfig = field(default_factory=ClassifierConfig)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> ClassifyConfig:
        """Reads a YAML file, with `key.path=value` overrides.

        Raises:
            ConfigError: A value is wrong; the error names its key path.
        """
        return from_dict(cls, apply_overrides(load_yaml(path), overrides))

    def check(self) -> None:
        for key, value, known in (
            ("modality", self.task.modality, "vision"),
            ("task_type", self.task.task_type, "classification"),
        ):
            require(
                value == known,
                f"task.{key}",
                f"{value!r} cannot be trained from a config",
                "From Python: UniversalDataModule and Trainer.",
                [known],
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
        require(
            self.train.preference is None,
            "train.preference",
            "is for pairs of answers, and these are images",
            "Leave it out.",
        )
        require(
            self.train.lora is None,
            "train.lora",
            "adapts the projections of a decoder, but this model is not a decoder",
            "Leave it out.",
        )
        require(
            self.train.distributed == DistributedConfig(),
            "train.distributed",
            "images are read by one process",
            "Leave it out.",
        )


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A config with its data and loaders.

    Attributes:
        run: The config with seed, classes, num_classes and image_shape filled in.
        module: The data module.
        train: The training loader.
        val: The loader of held-out rows; None if nothing is held out.
        per_class: Rows of data_files by class, including held-out ones.
        val_rows: The number of held-out rows.
    """

    run: ClassifyConfig
    module: UniversalDataModule
    train: Any
    val: Any
    per_class: Mapping[str, int]
    val_rows: int


def inputs_of(run: ClassifyConfig) -> Inputs:
    """Opens the data and makes its loaders.

    Raises:
        ConfigError: The data does not fit the task or the model.
        SourceError: A row cannot be used.
    """
    data, model = run.data, run.model
    seed = recorded_seed(run.train.output_dir) if data.seed is None else data.seed
    images = Images(data, "data_files")
    classes = images.names if data.classes is None else list(data.classes)
    rows = images.rows(classes)
    require(len(rows), "data.data_files", "has no rows", "Give it some.")
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
    require(
        model.image_shape is None or model.image_shape == shape,
        "model.image_shape",
        f"{list(model.image_shape or ())}, but the images are {list(shape)}",
        "Leave it out, or set task.options.image_size.",
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
    """Returns the number of classes of the model.

    Raises:
        ConfigError: The model has too few classes for the labels.
        SourceError: A held-out label has no class.
    """
    require(
        model.num_classes is None or model.num_classes >= count,
        "model.num_classes",
        f"{model.num_classes}, but labels go to {count - 1}",
        f"Leave it out, or give at least {count}.",
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

    Held-out rows are evaluated as "val". `inputs_of` and `Trainer.run` may raise other errors.

    Args:
        run: The config.
        inputs: What `inputs_of(run)` returned, if it was called.
        listener: A function that receives the events of the run.

    Raises:
        ConfigError: There are several processes.
    """
    require(
        not initialize(),
        "train.distributed",
        "this is one of several processes, and images are read by one",
        "Start one.",
    )
    inputs = inputs_of(run) if inputs is None else inputs
    evals = {} if inputs.val is None else {VAL: inputs.val}
    resolved = inputs.run
    trainer = Engine(
        resolved.model,
        run.train,
        inputs.train,
        evals,
        run_config=to_dict(resolved),
        listener=listener,
    )
    return run_training(trainer)


@dataclass(frozen=True, kw_only=True)
class ClassifyPlan:
    """What a run would do.

    Attributes:
        image_shape: Height, width, channels.
        per_class: Rows of data_files by class.
        train_rows: The number of rows in one pass.
        val_rows: The number of held-out rows.
        batch_size: Rows of a batch.
        steps: The number of steps.
        epochs: The number of passes.
    """

    image_shape: tuple[int, ...]
    per_class: Mapping[str, int]
    train_rows: int
    val_rows: int
    batch_size: int
    steps: int
    epochs: float

    def to_json(self) -> JsonObject:
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
    """Reads the labels and the first batch, and returns what a run would do, without training.

    It raises the errors of inputs_of.

    Args:
        run: The config.
        steps: The number of steps, in place of train.steps.
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


def _first(loader: Any) -> Settings:
    """Returns the first batch.

    Raises:
        ConfigError: A Classifier cannot take it.
    """
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
