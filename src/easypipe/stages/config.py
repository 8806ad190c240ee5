"""PipelineConfig: every dataset and stage, and which options conflict, also with streaming."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from easypipe.cache.config import CacheConfig, check_cache
from easypipe.core.config import ListOf, config, fields_of
from easypipe.core.errors import ConfigError
from easypipe.core.protocols import PipelineContext
from easypipe.loader.config import LoadStageConfig, check_streams
from easypipe.plan.order import OrderConfig
from easypipe.save.config import SaveStageConfig
from easypipe.stages.mix.config import MixStageConfig, restarts
from easypipe.stages.pack.config import PackStageConfig
from easypipe.stages.source.config import DatasetConfig, no_datasets
from easypipe.stages.streamable import require_streamable
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.transforms.tokenizer.config import TokenizerConfig, with_options


@config
class PipelineConfig:
    """Everything that a pipeline needs.

    A stage that is called without a config takes its section of this one.

    Args:
        default_tokenizer: The tokenizer of datasets without one, if the tokenize stage names none
            either.
        seed: The seed of every order in the pipeline; None draws one, logs it and stores it in
            `pipeline.get_context().seed`.
        cache_dir: The folder of tokens, indexes and plans; None takes EASYPIPE_CACHE, else the
            user's cache folder. If it is a URL (`s3://`, `gs://`), only tokens are stored there;
            locks, indexes and plans stay in the user's cache folder.
        cache: How a cache_dir (or a dataset's cache_path) that is a URL is reached and read.
        streaming: Read forward and tokenize while training: rows are not counted and tokens are not
            stored. docs/streaming.md describes the differences.
        num_streams: With streaming, the number of canonical streams that the rows of a batch come
            from. It must divide the batch size and decides the order; at most this many processes
            can share the reading. None takes the largest divisor of the batch size up to 8.
        executor: Where to tokenize. "local": threads of this process. "ray": tasks on a Ray cluster
            (extra `ray`) whose machines all see the sources and cache_dir; the tokens are
            byte-equal.
    """

    datasets: ListOf[DatasetConfig]
    default_tokenizer: TokenizerConfig | str | None = None
    seed: int | None = None
    cache_dir: str | Path | None = None
    cache: CacheConfig | None = None
    streaming: bool = False
    num_streams: int | None = None
    executor: Literal["local", "ray"] = "local"
    order: OrderConfig = field(default_factory=OrderConfig)
    tokenize: TokenizeStageConfig | None = None
    mix: MixStageConfig | None = None
    pack: PackStageConfig | None = None
    save: SaveStageConfig | None = None
    load: LoadStageConfig | None = None

    @cached_property
    def _by_name(self) -> Mapping[str, DatasetConfig]:
        """The datasets by name, computed once because there may be thousands of look-ups."""
        return {str(dataset.name): dataset for dataset in self.datasets}

    def validate(self) -> list[str]:
        """Returns conflicts between the parts; each part was checked when it was made.

        `Pipeline.from_config` raises the first of these problems.
        """
        return [str(problem) for problem in self.problems()]

    def named(self) -> PipelineConfig:
        """Returns the same config with a name for every dataset."""
        named = [
            dataset
            if dataset.name is not None
            else dataclasses.replace(dataset, name=f"dataset{i}")
            for i, dataset in enumerate(self.datasets, start=1)
        ]
        return dataclasses.replace(self, datasets=tuple(named))

    def problems(self) -> list[ConfigError]:
        """Returns the errors that `validate` returns as texts."""
        return list(self._problems())

    @property
    def endless(self) -> str | None:
        """The option that makes the batches of this data endless; None if they end."""
        load, mix = self.load or LoadStageConfig(), self.mix
        if mix is None and len(self.datasets) > 1:
            mix = MixStageConfig()
        capped = {} if mix is None else mix.max_epochs or {}
        if all(dataset.name in capped for dataset in self.named().datasets):
            return None
        if mix is not None and mix.stop_strategy == "restart":
            return "mix.stop_strategy: restart"
        return "load.num_epochs: null" if load.num_epochs is None else None

    def _passes(self) -> Iterator[ConfigError]:
        """Yields the error for a number of passes over a mixture that is drawn once."""
        passes = 1 if self.load is None else self.load.num_epochs
        mix = self.mix or (MixStageConfig() if len(self.datasets) > 1 else None)
        if mix is not None and mix.stop_strategy == "restart" and passes not in (1, None):
            yield restarts(passes, "the mixture", endless=self.endless is not None)

    def _problems(self) -> Iterator[ConfigError]:
        """Yields the errors for conflicts between the parts of the config."""
        if not self.datasets:
            yield no_datasets()
        names = [dataset.name or f"dataset{i}" for i, dataset in enumerate(self.datasets, start=1)]
        for i, name in enumerate(names):
            if name in names[:i]:
                yield ConfigError(
                    at=f"datasets[{i}].name",
                    problem=f"{name!r} names an earlier dataset too",
                    fix="Give each its own name.",
                )
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            yield ConfigError(
                at="seed", problem=f"{self.seed} is outside [0, 2^63)", fix="Give 0 or more."
            )
        yield from _streaming_problems(self)
        paths = [dataset.cache_path for dataset in self.datasets]
        yield from _refused(
            partial(check_cache, self.cache, self.cache_dir, paths, streaming=self.streaming)
        )
        if self.mix is not None:
            yield from _refused(partial(self.mix.check_names, names))
        yield from self._passes()
        if self.save is not None and self.save.enabled and self.save.output_dir is None:
            for name, dataset in zip(names, self.datasets, strict=True):
                if dataset.save_path is None:
                    yield ConfigError(
                        at="save.output_dir",
                        problem=f"no folder for dataset {name!r}",
                        fix="Set it, or the dataset's save_path.",
                    )
                    return


def _refused(check: Callable[[], None]) -> Iterator[ConfigError]:
    """Yields the error that a check raises, if it raises one."""
    try:
        check()
    except ConfigError as error:
        yield error


def _streaming_problems(config: PipelineConfig) -> Iterator[ConfigError]:
    """Yields errors for options of the config that streaming does not have.

    Without streaming, it yields errors for options that only streaming has.
    """
    if not config.streaming:
        if config.num_streams is not None:
            yield ConfigError(
                at="num_streams",
                problem="has no effect without streaming",
                fix="Leave it out, or set streaming=True.",
            )
        return
    stages = fields_of(config)
    for at in ("tokenize", "mix", "pack", "load"):  # save() itself raises the error
        yield from _refused(partial(require_streamable, at, stages[at]))
    if config.order.block_rows > 1:
        yield ConfigError(
            at="order.block_rows",
            problem="has no effect in streaming: ranges are read whole",
            fix="Leave it out.",
        )
    if config.executor != "local":
        problem = f"{config.executor!r} fills a token cache, and streaming keeps none"
        yield ConfigError(at="executor", problem=problem, fix="Leave it, or streaming, out.")
    for i, dataset in enumerate(config.datasets):
        pairs = "rejected_field" if dataset.rejected_field is not None else None
        if dataset.prompt is not None and dataset.prompt.rejected_column is not None:
            pairs = "prompt.rejected_column"
        if pairs is not None:
            yield ConfigError(
                at=f"datasets[{i}].{pairs}",
                problem="is not there in streaming: pairs are laid out over token caches",
                fix="Leave streaming out.",
            )
        if dataset.on_error == "quarantine":
            yield ConfigError(
                at=f"datasets[{i}].on_error",
                problem="'quarantine' writes a file when all rows were seen, and streaming may "
                "see each many times",
                fix="Set it to 'skip', or leave streaming out.",
            )
    if config.num_streams is not None:
        yield from _refused(
            partial(check_streams, config.num_streams, config.load or LoadStageConfig())
        )


def settings_of(context: PipelineContext) -> PipelineConfig:
    """Returns the config of the pipeline that a stage belongs to."""
    assert isinstance(context.config, PipelineConfig)
    return context.config


def tokenizer_config_of(name: str, context: PipelineContext) -> TokenizerConfig | str | None:
    """Returns the tokenizer that the config names for a dataset: its own, else the default."""
    own, settings = datasets_of(context).get(name), settings_of(context)
    of_stage = settings.tokenize and settings.tokenize.default_tokenizer
    chosen = (own and own.tokenizer) or of_stage or settings.default_tokenizer
    more = own and own.tokenizer_kwargs
    return with_options(chosen, more) if chosen is not None and more else chosen


def datasets_of(context: PipelineContext) -> Mapping[str, DatasetConfig]:
    """Returns the configs of the datasets by name, in their order."""
    return settings_of(context)._by_name
