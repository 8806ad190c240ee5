"""Documents 001 and 004: DataLoaderConfig, DataLoaderFactory, DataLoaderBuilder → one Loader.

Datasets of text with a known tokenizer (PreprocessedDataset) are read by a Pipeline; every other
dataset is read by the same Loader with a collator.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from easypipe.compat.collators import default_collate, draws
from easypipe.core.config import config
from easypipe.core.errors import ConfigError, require, require_columns, require_known
from easypipe.core.random import draw_seed
from easypipe.core.schema import INPUT_IDS, data_columns
from easypipe.core.values import Arguments, Collate, Dataset, attribute_of
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.epochs import EpochLoader, passes_of_streams, passes_over
from easypipe.loader.loader import Loader
from easypipe.loader.rows.items import ForwardRows, ItemRows
from easypipe.loader.rows.ranks import check_rank
from easypipe.pipeline import Pipeline
from easypipe.plan.order import OrderConfig
from easypipe.sources.external.objects import is_streamed
from easypipe.stages.config import PipelineConfig
from easypipe.stages.load.stage import require_a_batch
from easypipe.stages.source.config import DatasetConfig

log = logging.getLogger("easypipe")

PREFETCH_FACTOR = 2  # batches ahead of each worker


@runtime_checkable
class TextDataset(Protocol):
    """A dataset that describes how a Pipeline reads it."""

    def as_dataset_config(self) -> DatasetConfig | None:
        """Returns how a Pipeline reads the rows; None if it cannot."""
        ...


@config
class DataLoaderConfig:
    """How a dataset becomes batches, with the options of PyTorch's DataLoader.

    docs/faces.md says which of these options have an effect here.

    Args:
        batch_size: Rows of a batch on each rank.
        shuffle: A new order every pass, keyed by the seed.
        num_workers: Threads that make batches ahead; 0 makes each on request. None takes half of
            the cores, from 1 to 4.
        prefetch_factor: Batches that each thread may be ahead; None takes 2.
        pin_memory: No effect; True gives a warning, because jax takes batches from any host memory.
        persistent_workers: No effect; True gives a warning, because threads cost nothing to start.
        prefetch_to_device: Put batches on the devices ahead of their use, as jax.Arrays; PyTorch
            uses pinned memory for this.
        drop_last: Leave out a last batch that is not full; None does so for shuffled rows, because
            every shape compiles a program.
        seed: The seed of the order and of collators that use random numbers. None draws one if it
            has an effect, logs it, and stores it as `loader.seed`.
        collate_fn: A function that makes a batch from a list of rows. None takes the dataset's own
            function, else rows are stacked.
        num_epochs: Passes over the data in one iteration; the next iteration continues after them.
            None never ends.
        group_by_length: Put rows of text of similar length into one batch, as in LoadStageConfig; a
            rank groups its own rows.
        rank: The number of this rank, which reads one of every world_size consecutive rows.
        world_size: The number of ranks that share the rows.
    """

    batch_size: int = 8
    shuffle: bool = False
    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_to_device: bool = False
    drop_last: bool | None = None
    seed: int | None = None
    collate_fn: Collate | None = None
    num_epochs: int | None = 1
    group_by_length: int | None = None
    rank: int = 0
    world_size: int = 1

    def check(self) -> None:
        require(
            self.num_workers is None or self.num_workers >= 0,
            "num_workers",
            f"{self.num_workers} threads",
            "Give 0 for none, or leave it out.",
        )
        require(
            self.num_workers != 0 or self.prefetch_factor is None,
            "prefetch_factor",
            "has no effect while num_workers is 0",
            "Leave it out, or give num_workers at least 1.",
        )
        check_rank(self.rank, self.world_size)
        require(
            self.world_size <= 1 or not self.order_is_drawn or self.seed is not None,
            "seed",
            "every rank would draw its own, and read other rows twice",
            "Give all ranks one seed.",
        )
        require(
            self.seed is None or 0 <= self.seed < 1 << 63,
            "seed",
            f"{self.seed} is outside [0, 2^63)",
        )
        self.load_options()

    @property
    def workers(self) -> int:
        """The number of threads that make batches ahead; 0 for none."""
        return (
            max(1, min(4, (os.cpu_count() or 1) // 2))
            if self.num_workers is None
            else self.num_workers
        )

    @property
    def order_is_drawn(self) -> bool:
        """Whether the seed decides the order."""
        return self.shuffle or self.group_by_length is not None

    def load_options(self) -> LoadStageConfig:
        """Returns the same options as a LoadStageConfig."""
        workers = max(self.workers, 1)
        factor = PREFETCH_FACTOR if self.prefetch_factor is None else self.prefetch_factor
        require(factor >= 1, "prefetch_factor", f"{factor} batches", "Give at least 1.")
        return LoadStageConfig(
            batch_size=self.batch_size,
            prefetch_enabled=self.workers > 0,
            prefetch_workers=workers,
            prefetch_buffer_size=workers * factor,
            prefetch_to_device=self.prefetch_to_device,
            drop_last=self.shuffle if self.drop_last is None else self.drop_last,
            num_epochs=self.num_epochs,
            group_by_length=self.group_by_length,
        )

    def with_seed(self, *, drawing: bool) -> DataLoaderConfig:
        """Returns the options with a seed.

        It is drawn and logged if none was given and it matters.

        Args:
            drawing: Whether the seed decides anything; else it becomes 0.
        """
        if self.seed is not None:
            return self
        if not drawing:
            return dataclasses.replace(self, seed=0)
        seed = draw_seed()
        log.info("loader: no seed was given, drew %d; seed=%d repeats these batches", seed, seed)
        return dataclasses.replace(self, seed=seed)

    def warn_of_what_has_no_effect(self) -> None:
        """Logs a warning for each option that was set and has no effect."""
        for name, given, why in (
            (
                "pin_memory",
                self.pin_memory,
                "jax takes batches from any host memory; prefetch_to_device=True puts them on the "
                "devices ahead",
            ),
            (
                "persistent_workers",
                self.persistent_workers,
                "workers are threads, which begin and end with each iteration at no cost",
            ),
        ):
            if given:
                log.warning("loader: %s=True changes nothing: %s", name, why)


class DataLoaderFactory:
    """Makes a Loader for any dataset: `create_dataloader(dataset, DataLoaderConfig(...))`.

    Its `state()` and `restore()` resume exactly, and every iteration is the next pass
    (EpochLoader).
    """

    def create_dataloader(
        self, dataset: Dataset, config: DataLoaderConfig | None = None, *, name: str = "dataset1"
    ) -> EpochLoader:
        """Returns a Loader over a dataset.

        Args:
            dataset: One of easypipe's, anything with `len()` and rows by index, or (read in its
                order) any iterable.
            config: The options.
            name: The name that, with the seed, decides the order, as in a Pipeline.

        Raises:
            ConfigError: The dataset cannot be read with these options, or no batch is ever full.
        """
        options = config or DataLoaderConfig()
        options.warn_of_what_has_no_effect()
        drawing = options.order_is_drawn or draws(_collate(dataset, options))
        require(
            options.world_size <= 1 or not drawing or options.seed is not None,
            "seed",
            "every rank would draw its own",
            "Give all ranks one seed.",
        )
        options = options.with_seed(drawing=drawing)
        spelled = (
            dataset.as_dataset_config()
            if options.collate_fn is None and isinstance(dataset, TextDataset)
            else None
        )
        if spelled is not None:
            return text_loader(dataclasses.replace(spelled, name=name), options)
        require(
            options.group_by_length is None,
            "group_by_length",
            f"how long rows of {type(dataset).__name__} are is not known before they are read",
            "Give rows of text with a tokenizer: PreprocessedDataset(...).",
        )
        if is_streamed(dataset):
            return _forward_loader(dataset, options, name)
        require_rows(dataset, at="dataset")
        seed, collate = options.seed or 0, _collate(dataset, options)

        def build(num_epochs: int | None) -> Loader:
            rows = ItemRows(
                dataset,
                collate,
                seed=seed,
                shuffle=options.shuffle,
                num_epochs=num_epochs,
                name=name,
            )
            load = dataclasses.replace(options.load_options(), num_epochs=num_epochs)
            return Loader(rows, load, seed=seed, name=_name(dataset))

        return _ranked(passes_over(build, options.num_epochs), options)


def text_loader(
    dataset: DatasetConfig, options: DataLoaderConfig, *, columns: Sequence[str] | None = None
) -> EpochLoader:
    """Returns the loader of a Pipeline in which every document is a separate row.

    Args:
        dataset: How the Pipeline reads the rows.
        options: The options of the loader.
        columns: Columns that the source must have.
    """
    options = options.with_seed(drawing=options.order_is_drawn)
    pipeline = _text_pipeline(dataset, options, columns, streaming=False)

    def build(num_epochs: int | None) -> Loader:
        return (
            pipeline.copy()
            .load(dataclasses.replace(options.load_options(), num_epochs=num_epochs))
            .build()
        )

    return _ranked(passes_over(build, options.num_epochs), options)


def text_stream(
    dataset: DatasetConfig, options: DataLoaderConfig, *, columns: Sequence[str] | None = None
) -> EpochLoader:
    """Returns the loader of text_loader for a dataset that is read forward."""
    options = options.with_seed(drawing=options.order_is_drawn)
    pipeline = _text_pipeline(dataset, options, columns, streaming=True)
    load, together = options.load_options(), options.num_epochs or 1
    if options.num_epochs is not None:
        load = dataclasses.replace(load, num_epochs=1)  # passes_of_streams counts the passes
    return passes_of_streams(pipeline.load(load).build(), together)


def _text_pipeline(
    dataset: DatasetConfig,
    options: DataLoaderConfig,
    columns: Sequence[str] | None,
    *,
    streaming: bool,
) -> Pipeline:
    """Returns the Pipeline up to tokens.

    Raises:
        ConfigError: The source lacks a column.
    """
    order = OrderConfig(shuffle=options.shuffle)
    pipeline = Pipeline(
        PipelineConfig(datasets=(dataset,), seed=options.seed, order=order, streaming=streaming)
    ).source()
    [(name, source)] = pipeline.get_data().items()
    have = data_columns(source.schema)
    require_columns(columns or (), have, f"dataset {name!r}")
    if INPUT_IDS not in have:
        pipeline.tokenize()
    return pipeline


class DataLoaderBuilder:
    """Makes a Loader, option by option.

    `DataLoaderBuilder().with_dataset(ds).with_batch_size(32).with_workers(4).build()`
    """

    def __init__(self) -> None:
        self._dataset: Any = None
        self._options: Arguments = {}

    def with_dataset(self, dataset: Dataset) -> Self:
        self._dataset = dataset
        return self

    def with_batch_size(self, batch_size: int) -> Self:
        return self.with_options(batch_size=batch_size)

    def with_distributed(self, rank: int, world_size: int) -> Self:
        """Sets the rank of this process.

        It reads row `rank` of every world_size consecutive rows.
        """
        return self.with_options(rank=rank, world_size=world_size)

    def with_workers(self, num: int, pin_memory: bool | None = None) -> Self:
        """Sets the number of threads that make batches ahead.

        For pin_memory see DataLoaderConfig.
        """
        return self.with_options(num_workers=num, pin_memory=pin_memory)

    def with_options(self, **options: Any) -> Self:
        """Sets any fields of DataLoaderConfig.

        Raises:
            ConfigError: There is no such field.
        """
        known = [field.name for field in dataclasses.fields(DataLoaderConfig)]
        for key in options:
            require_known(key, known, key, "unknown option")
        self._options |= options
        return self

    def build(self) -> EpochLoader:
        """Returns the Loader that the options describe.

        DataLoaderConfig and the factory may raise other errors.

        Raises:
            ConfigError: There is no dataset.
        """
        require(
            self._dataset is not None,
            "build()",
            "there is no dataset",
            "Call with_dataset(dataset) first.",
        )
        return DataLoaderFactory().create_dataloader(
            self._dataset, DataLoaderConfig(**self._options)
        )


def require_rows(dataset: Dataset, *, at: str) -> None:
    """Checks that a dataset returns rows by index.

    Raises:
        ConfigError: It does not.
    """
    name = type(dataset).__name__
    if isinstance(dataset, Mapping):
        fix = "Give one of its splits, or rows: a list of dicts."
        raise ConfigError(
            at=at,
            problem=f"{name} holds columns or splits by name, not rows by number",
            have=dataset,
            fix=fix,
        )
    if (
        isinstance(dataset, str | bytes)
        or attribute_of(dataset, "__len__") is None
        or attribute_of(dataset, "__getitem__") is None
    ):
        fix = (
            "Give it __len__ and __getitem__; DataLoaderFactory also reads what can only be "
            "iterated over."
        )
        if isinstance(dataset, str):
            name, fix = (
                repr(dataset),
                "Open it first: datasets.load_dataset(...), or a Pipeline, which reads files.",
            )
        raise ConfigError(at=at, problem=f"{name} does not return rows by number", fix=fix)


def _forward_loader(dataset: Dataset, options: DataLoaderConfig, name: str) -> EpochLoader:
    """Returns the loader of a dataset that can only be iterated over.

    Raises:
        ConfigError: The options require shuffling it or reading it several times.
    """
    require(
        not options.shuffle,
        "shuffle",
        f"{type(dataset).__name__} is read from its start",
        "Give it a buffer_size that it shuffles within.",
    )
    require(
        options.num_epochs == 1,
        "num_epochs",
        f"{options.num_epochs}, but a stream is read once",
        "Leave it out.",
    )
    own_ranks = attribute_of(dataset, "sharded")
    if options.world_size > 1 and own_ranks is not None:
        own = attribute_of(dataset, "rank"), attribute_of(dataset, "world_size")
        require(
            own[1] in (None, 1) or own == (options.rank, options.world_size),
            "rank",
            f"{options.rank} of {options.world_size}, but {type(dataset).__name__} is that of "
            f"rank {own[0]} of {own[1]}",
            "Give rank and world_size to one of the two.",
        )
        dataset, options = (
            own_ranks(options.rank, options.world_size),
            dataclasses.replace(options, rank=0, world_size=1),
        )
    if options.num_workers is not None and options.num_workers > 1:
        log.warning(
            "loader: num_workers=%d, but one thread reads a stream, in its order",
            options.num_workers,
        )
    seed, load = options.seed or 0, dataclasses.replace(options.load_options(), prefetch_workers=1)

    def make(epoch: int) -> Loader:
        rows = ForwardRows(dataset, _collate(dataset, options), seed=seed, name=name, epoch=epoch)
        return Loader(rows, load, seed=seed, name=_name(dataset))

    return _ranked(make, options)


def _ranked(make: Callable[[int], Loader], options: DataLoaderConfig) -> EpochLoader:
    """Returns the passes of this rank.

    Args:
        make: Makes the loader of a pass, for all ranks.
        options: The options of the loader.
    """
    size = options.world_size
    own = EpochLoader(make if size == 1 else lambda epoch: make(epoch).of_rank(options.rank, size))
    require_a_batch(own.name, own.rows, own.config)
    return own


def _collate(dataset: Dataset, options: DataLoaderConfig) -> Collate:
    return options.collate_fn or attribute_of(dataset, "collate_fn") or default_collate


def _name(dataset: Dataset) -> str:
    return f"loader of {type(dataset).__name__}"


__all__ = [
    "DataLoaderBuilder",
    "DataLoaderConfig",
    "DataLoaderFactory",
    "TextDataset",
    "text_loader",
    "text_stream",
]
