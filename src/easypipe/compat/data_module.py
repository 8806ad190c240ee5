"""Document 004: UniversalDataModule splits a dataset of any kind into train and validation loaders.

The task chooses the collator.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from easypipe.compat.collators import as_array, is_number
from easypipe.compat.datasets import PreprocessedDataset, subset
from easypipe.compat.foreign import MESSAGES, TEXT, TokenizerLike, is_own, tokenizer_config
from easypipe.compat.loaders import DataLoaderConfig, DataLoaderFactory, require_rows, text_loader
from easypipe.compat.registry import DEFAULT, CollatorRegistry
from easypipe.compat.vision import IMAGE_COLUMNS
from easypipe.core.errors import ConfigError, require
from easypipe.core.random import draw_seed, fold
from easypipe.core.schema import INPUT_IDS, TaskSpec
from easypipe.core.values import Arguments, Collate, Dataset, Int64, Item, attribute_of
from easypipe.loader.epochs import EpochLoader
from easypipe.loader.loader import Loader
from easypipe.plan.order import permute
from easypipe.stages.source.config import DatasetConfig

log = logging.getLogger("easypipe")


@runtime_checkable
class DataModuleProtocol(Protocol):
    """Any class with a training loader and a validation loader. It needs no base class."""

    def train_dataloader(self) -> Any: ...
    def val_dataloader(self) -> Any: ...


class Splits(NamedTuple):
    """The numbers of the rows to train on and to validate on.

    They are each Int64[n], ascending and disjoint, and together all rows.
    """

    train: Int64
    val: Int64


class UniversalDataModule:
    """Loaders over any map-style dataset, for training and for validation.

    The dataset may be one of `datasets` or torch, tuples, a list of integer arrays, or a
    PreprocessedDataset. The training loader is shuffled, with a new order every pass, unless
    shuffle=False, and leaves out a last batch that is not full, unless drop_last=False. The
    validation loader is ordered, complete, and the same every time. Rows without text are left out
    and counted, as with on_error="skip". Other options are those of DataLoaderConfig.

    Args:
        train_data: The rows to train on.
        val_data: The rows to validate on.
        val_split: The share of train_data to validate on, drawn by the seed and not trained on.
            With val_data it has no effect, and a warning says so.
        task_spec: Chooses the collator (CollatorRegistry). With None the first row decides: tokens,
            `text` or `messages` are text, an image column is vision, anything else is stacked.
        collate_fn: Your own collator, instead of the one for the task.
        tokenizer: For rows of text: a Tokenizer, its config, a name, or another library's with
            `name_or_path`. `messages` are rendered by its chat template, and the assistant's turns
            are trained on.
        max_length: The most tokens of a text.
        seed: The seed of split, order and collators; None draws one, logs it, and stores it as
            `seed`.
    """

    def __init__(
        self,
        train_data: Dataset,
        val_data: Dataset = None,
        *,
        task_spec: TaskSpec | None = None,
        tokenizer: TokenizerLike = None,
        batch_size: int = 32,
        val_split: float = 0.0,
        max_length: int | None = None,
        seed: int | None = None,
        collate_fn: Collate | None = None,
        **options: Any,
    ) -> None:
        require(
            is_number(val_split) and 0 <= val_split < 1,
            "val_split",
            f"{val_split!r} is not a share of the rows",
            "Give one from 0 up to 1.",
        )
        if val_data is not None and val_split:
            log.warning("val_split=%s has no effect: val_data is given", val_split)
        for name, data in (("train_data", train_data), ("val_data", val_data)):
            if data is not None:
                require_rows(data, at=name)
        require(
            seed is not None or options.get("world_size", 1) == 1,
            "seed",
            "every rank would draw its own, and read other rows twice",
            "Give all ranks one seed.",
        )
        self.seed = draw_seed() if seed is None else seed
        if seed is None:
            log.info("data module: no seed was given, drew %d", self.seed)
        self.val_split, self.max_length, self.tokenizer = val_split, max_length, tokenizer
        self._train, self._val, self._collate_fn = train_data, val_data, collate_fn
        self._passes: dict[str, int] = {}
        options = {"shuffle": True, **options}
        self.options = DataLoaderConfig(batch_size=batch_size, seed=self.seed, **options)
        require(len(train_data), "train_data", "has no rows", "Give it some.")
        # what a PreprocessedDataset makes is known, and its first row may be a bad one
        encoded = isinstance(train_data, PreprocessedDataset)
        raw: Item = {INPUT_IDS: ()} if encoded else train_data[0]
        first = _row(raw)
        self._arrays = first is not raw
        self.task_spec = task_spec or _task_of(first)
        self._column = next(
            (name for name in (TEXT, MESSAGES) if isinstance(first, Mapping) and name in first),
            TEXT,
        )
        self._check_text(first, sure=task_spec is not None or collate_fn is not None)
        if not len(self.splits.train) or (
            val_split and val_data is None and not len(self.splits.val)
        ):
            none = "train" if not len(self.splits.train) else "validate"
            problem = f"{val_split} of {len(train_data)} rows leaves none to {none} on"
            raise ConfigError(at="val_split", problem=problem, fix="Give another share.")

    def _check_text(self, first: Item, *, sure: bool) -> None:
        """Checks that the tokenizer and max_length are given if and only if they have an effect.

        Args:
            first: The first row.
            sure: Whether the kind of rows was chosen by the user, not guessed from the first row.

        Raises:
            ConfigError: The tokenizer is missing, or one of them has no effect.
        """
        have = list(first) if isinstance(first, Mapping) else [type(first).__name__]
        texts = isinstance(first, Mapping) and INPUT_IDS not in first
        require(
            self.tokenizer is not None
            or not self._is_plain_text
            or not texts
            or self._column not in have,
            "tokenizer",
            "the rows are text, but no tokenizer is given",
            "Name the tokenizer that encodes them.",
        )
        require(
            self.tokenizer is None or sure or self.task_spec.modality != DEFAULT,
            "tokenizer",
            "has no effect: no column of text is known",
            f"Name the column of text {TEXT!r}, or say by task_spec what the rows are.",
            have,
        )
        require(
            self.max_length is None or (self.tokenizer is not None and texts),
            "max_length",
            "cuts texts that are encoded here, but these rows are not text",
            "Leave it out.",
        )
        require(
            self.max_length is None or self._collate_fn is None,
            "max_length",
            "has no effect: collate_fn makes the batches",
            "Cut the texts there.",
        )
        if self._collate_fn is None:
            entry = CollatorRegistry.get_instance().find(self.task_spec)
            for name, value in (("tokenizer", self.tokenizer), ("max_length", self.max_length)):
                problem = f"has no effect: the collator {entry.name!r} does not take it"
                require(value is None or entry.takes(name), name, problem, "Leave it out.")

    @cached_property
    def splits(self) -> Splits:
        """The rows of train_data to train on, and those to validate on."""
        rows = len(self._train)
        held_out = 0 if self._val is not None else round(rows * self.val_split)
        order = permute(np.arange(rows), rows, fold(self.seed, "val_split"))
        return Splits(train=np.sort(order[held_out:]), val=np.sort(order[:held_out]))

    def train_dataloader(self) -> EpochLoader:
        """Returns a loader that begins after the last pass of earlier loaders.

        A pass counts once a loader of this method has finished it.
        """
        train = (
            self._train
            if len(self.splits.train) == len(self._train)
            else subset(self._train, self.splits.train.tolist())
        )
        drop_last = True if self.options.drop_last is None else self.options.drop_last
        return self._loader(train, "train", drop_last=drop_last).counted_by(self._passes, "train")

    def val_dataloader(self) -> Loader | None:
        """Returns the loader of held-out rows; None if nothing is held out."""
        if self._val is None and not len(self.splits.val):
            return None
        val = self._val if self._val is not None else subset(self._train, self.splits.val.tolist())
        return self._loader(
            val, "val", shuffle=False, drop_last=False, num_epochs=1, group_by_length=None
        ).loader(0)

    def dataset_config(self, data: Dataset, name: str) -> DatasetConfig | None:
        """Returns how a Pipeline reads these rows; None if it cannot.

        It can read text if the tokenizer is known.
        """
        if not self._is_plain_text:
            return None
        if (
            isinstance(data, PreprocessedDataset)
            or self.tokenizer is None
            or is_own(self.tokenizer)
        ):
            return None
        tokenizer = tokenizer_config(
            self.tokenizer, max_length=self.max_length, return_attention_mask=True
        )
        rows = [_row(row) for row in data] if isinstance(data, list | tuple) else data
        return DatasetConfig(
            name=name,
            data_files=rows,
            tokenizer=tokenizer,
            content_field=self._column,
            on_error="skip",
        )

    @property
    def _is_plain_text(self) -> bool:
        """Whether the Pipeline makes the batches.

        It does so with easypipe's own text collator and without task options.
        """
        if self._collate_fn is not None:
            return False
        entry = CollatorRegistry.get_instance().find(self.task_spec)
        return entry.name == "text" and entry.builtin and not self.task_spec.options

    def _loader(self, data: Dataset, name: str, **changes: Any) -> EpochLoader:
        """Returns the loader of some rows, through a Pipeline or through a collator."""
        options = dataclasses.replace(self.options, **changes)
        spelled = self.dataset_config(data, name)
        if spelled is not None:
            options.warn_of_what_has_no_effect()
            return text_loader(spelled, options)
        arrays = self._arrays and self._collate_fn is None
        rows = _Rows(data) if arrays or isinstance(data, list | tuple) else data
        collate = (
            None
            if isinstance(data, PreprocessedDataset) and self._is_plain_text
            else self._collator()
        )
        return DataLoaderFactory().create_dataloader(
            rows, dataclasses.replace(options, collate_fn=collate), name=name
        )

    def _collator(self) -> Collate:
        if self._collate_fn is not None:
            return self._collate_fn
        registry = CollatorRegistry.get_instance()
        entry = registry.find(self.task_spec)
        given: Arguments = {"tokenizer": self.tokenizer, "max_length": self.max_length}
        chosen = {k: value for k, value in given.items() if value is not None and entry.takes(k)}
        return registry.get_collator(task_spec=self.task_spec, **chosen)


class _Rows:
    """Rows in which arrays of integers count as rows of tokens."""

    def __init__(self, data: Sequence[Item]) -> None:
        self._data = data
        self.fingerprint = attribute_of(data, "fingerprint", "_fingerprint")

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Item:
        return _row(self._data[index])


def _row(row: Item) -> Any:
    """Returns `{"input_ids": row}` for an array of integers, and any other row unchanged."""
    if isinstance(row, Mapping | tuple | str | bytes):
        return row
    array = as_array(row)
    return {INPUT_IDS: array} if array.ndim == 1 and array.dtype.kind in "iu" else row


def _task_of(row: Item) -> TaskSpec:
    """Returns the task that fits a row."""
    if isinstance(row, Mapping):
        if any(name in row for name in (INPUT_IDS, TEXT, MESSAGES)):
            return TaskSpec.lm_tiny()
        if any(name in row for name in IMAGE_COLUMNS):
            return TaskSpec.vision_tiny()
    return TaskSpec(name="rows", modality=DEFAULT, task_type="any")


__all__ = ["DataModuleProtocol", "Splits", "UniversalDataModule"]
