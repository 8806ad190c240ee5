"""Document 004 from a config: labelled images in files, by number, which a run on images reads.

Rows of files are copied once, the two columns that are needed, into an Arrow file of the cache
folder that is mapped into memory: a row in any order then costs what it holds, and memory does not
grow with the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from easypipe.cache.location import cache_folder
from easypipe.compat.foreign import Batch, Dataset
from easypipe.core import storage
from easypipe.core.arrays import Ints
from easypipe.core.config import ListOf, config, digest
from easypipe.core.errors import ConfigError, SourceError, did_you_mean, place
from easypipe.core.protocols import ShardedSource, select
from easypipe.pipeline import Pipeline
from easypipe.stages.config import PipelineConfig
from easypipe.stages.source.config import DatasetConfig

ROWS_AT_A_TIME = 256
COPY_VERSION = 1  # counts up when the same rows are copied otherwise


@config
class ImagesConfig:
    """Rows with an image and a label, and how they become batches.

    data_files, type, split: as DatasetConfig has them: a path, glob or list of parquet, Arrow or
    JSON files, rows in memory, a dataset of
        the Hub. Images are what VisionDataCollator takes: encoded bytes, `{bytes, path}`, arrays of
        0 to 255 or of floats.
    val_files: rows of the same kind to evaluate on, all of them. val_split: in their place a share
    of data_files, drawn by the seed and
        not trained on.
    image_column, label_column: where they stand. Labels are classes from 0, or names.
    classes: names of the classes in the order of their numbers; None takes the names among the
    labels, sorted. batch_size, num_epochs: rows of a batch; passes over the rows, null without end.
    num_workers: threads that make batches ahead; None: half of the cores, from 1 to 4.
    seed: of the order and of the split; None draws one and records it.
    cache_dir: where rows of files are copied to; None: EASYPIPE_CACHE, else the user's cache
    folder.
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
        if not 0 <= self.val_split < 1:
            raise ConfigError(
                at="val_split",
                problem=f"{self.val_split} is no share of the rows",
                fix="Give one from 0 up to 1.",
            )
        if self.val_split and self.val_files is not None:
            raise ConfigError(
                at="val_split",
                problem="has no effect beside val_files",
                fix="Leave one of them out.",
            )
        if self.image_column == self.label_column:
            raise ConfigError(
                at="label_column", problem="is the image_column too", fix="Name another column."
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
        """How a Pipeline reads `data_files` or `val_files`."""
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
    """Map-style: `rows[i]` is {"image": ..., "label": int}.

    Thread safe. `fingerprint` is that of what they were read from.

    Reading raises SourceError naming the row where an image is missing.
    """

    def __init__(self, images: pa.ChunkedArray, labels: Ints, fingerprint: str, name: str) -> None:
        """labels: of all rows, from 0."""
        self._images, self.labels, self.fingerprint, self._name = images, labels, fingerprint, name

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        image = self._images[index].as_py()
        if image is None:
            raise SourceError(
                at=place(self._name, row=index, column="image"),
                problem="there is none",
                fix="Leave such rows out.",
            )
        return {
            "image": np.asarray(image) if isinstance(image, list) else image,
            "label": int(self.labels[index]),
        }


class Images:
    """`data_files` or `val_files` of an ImagesConfig, opened.

    Columns are known and copied, labels read.
    """

    def __init__(self, config: ImagesConfig, name: str) -> None:
        """Raises what opening files raises, and ConfigError for columns that are not there."""
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
            if column not in have:
                raise ConfigError(
                    at=f"data.{key}",
                    problem=f"{name} have no column {column!r}",
                    have=have,
                    fix=did_you_mean(column, have),
                )
        self._columns = [config.image_column, config.label_column]
        self.fingerprint = digest("images", COPY_VERSION, source.fingerprint, self._columns)
        self._table = self._mapped(select(source, self._columns), in_memory=dataset.in_memory)

    @property
    def names(self) -> list[str] | None:
        """The names among the labels, sorted; None where they are numbers.

        Raises SourceError for what is neither, and for nulls.
        """
        if not pa.types.is_large_string(self._labels.type):
            return None
        return sorted(set(self._labels.to_pylist()))

    def rows(self, classes: Sequence[str] | None) -> ImageRows:
        """Raises SourceError naming the row with a label that is no class."""
        images = self._table.column(0)
        return ImageRows(images, self._numbers(classes), self.fingerprint, self._name)

    @cached_property
    def _labels(self) -> pa.Array:
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
                at=self._row(row), problem="there is no label", fix="Leave such rows out."
            )
        return labels

    def _numbers(self, classes: Sequence[str] | None) -> Ints:
        if classes is None or self.names is None:
            numbers = self._labels.to_numpy().astype(np.int64)
        else:
            known = {name: i for i, name in enumerate(classes)}
            numbers = np.array([known.get(name, -1) for name in self._labels.to_pylist()], np.int64)
        most = np.iinfo(np.int64).max if classes is None else len(classes)
        wrong = np.flatnonzero((numbers < 0) | (numbers >= most))
        if wrong.size:
            problem = f"label {self._labels[int(wrong[0])].as_py()!r} is none of the classes"
            raise SourceError(
                at=self._row(int(wrong[0])),
                problem=problem,
                have=classes,
                fix="Classes count from 0, or have names.",
            )
        return numbers

    def _row(self, row: int) -> str:
        return place(self._name, row=row, column=self._config.label_column)

    def _mapped(self, source: ShardedSource, *, in_memory: bool) -> pa.Table:
        schema = pa.schema([source.schema.field(name) for name in self._columns])
        if in_memory:
            return pa.Table.from_batches(self._read(source), schema)
        path = cache_folder(self._config.cache_dir).local / "images" / f"{self.fingerprint}.arrow"
        if not path.exists():
            with (
                storage.commit_file(path) as (temporary, _),
                pa.ipc.new_file(str(temporary), schema) as writer,
            ):
                for batch in self._read(source):
                    writer.write_batch(batch)
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def _read(self, source: ShardedSource) -> Iterator[pa.RecordBatch]:
        for number, shard in enumerate(source.shards):
            rows = shard.num_rows or 0
            for start in range(0, rows, ROWS_AT_A_TIME):
                stop = min(rows, start + ROWS_AT_A_TIME)
                yield source.read(number, start, stop).select(self._columns)
