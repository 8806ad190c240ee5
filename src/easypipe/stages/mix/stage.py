"""The mix stage makes one dataset from several, by their weights or equal ones, which it logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from easypipe.cache.location import cache_folder
from easypipe.core.errors import ConfigError, PlanError, moved
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedSource, SourceInfo, Sources
from easypipe.core.schema import HAS_EOS, INPUT_IDS, ORIGIN, token_dtype, token_list
from easypipe.plan.mix import integer_weights
from easypipe.plan.mix_schedule import Schedule
from easypipe.plan.order import OrderConfig
from easypipe.plan.spec import PlanSpec
from easypipe.stages.config import PipelineConfig, settings_of
from easypipe.stages.mix.config import (
    MixStageConfig,
    block_weights,
    exact_weights,
)
from easypipe.stages.mix.mixture import Mixture, PlannedSource
from easypipe.stages.mix.schedule import exact_points
from easypipe.stages.tokenize.documents import (
    cached_of,
    require_documents,
    same_kind,
    same_tokenizer,
)
from easypipe.transforms.tokenizer.config import TokenizerConfig

log = logging.getLogger("easypipe")


class MixStage(BaseStage):
    """The mix stage: a dict of datasets becomes {"mixed": MixedShardedSource}."""

    config: MixStageConfig

    @property
    def name(self) -> str:
        return "mix"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        """Mixes the datasets; it reads no rows.

        Raises:
            ConfigError: Weights do not name the datasets, or tokenizers or kinds of rows differ.
            StageOrderError: A dataset holds text.
        """
        config, names = self.config, list(data)
        config.check_names(names)
        parts = {
            name: require_documents(name, source, context, stage="mix")
            for name, source in data.items()
        }
        same_tokenizer(parts, allow=self.config.allow_mixed_tokenizers)
        same_kind(parts)
        weights = {name: config.weights[name] if config.weights else 1.0 for name in names}
        shared = config.stop_strategy != "all_exhausted"  # all_exhausted reads every document once
        if shared and config.weights is None and config.weight_schedule is None:
            log.info("mix: no weights given, so %s have 1/%d each", ", ".join(names), len(names))
        try:
            whole = (
                integer_weights(weights)
                if config.block_size is None
                else block_weights(weights, config.block_size)
            )
        except (ConfigError, PlanError) as error:
            raise moved(error, f"mix.{error.at}") from None
        schedule, settings = self._schedule(names), settings_of(context)
        spec = PlanSpec(
            seed=context.seed if config.seed is None else config.seed,
            weights=whole if schedule is None else (1,) * len(names),
            stop=config.stop_strategy,
            num_epochs=None,
            order=settings.order,
            schedule=schedule,
            unit=config.unit,
            block=None if schedule is None else config.block_size,
            max_epochs=None
            if not config.max_epochs
            else tuple(config.max_epochs.get(name) for name in names),
        )
        mixture = Mixture(parts, spec, context, config.batch_size, config.provenance)
        load = settings.load
        return {"mixed": MixedShardedSource(mixture if load is None else mixture.for_load(load))}

    def _schedule(self, names: list[str]) -> Schedule | None:
        """Returns the weight schedule in exact integers; None if the config has none."""
        config, points = self.config, self.config.weight_schedule
        if points is None:
            return None
        if config.weights is not None and points[0].step == 0:
            log.warning("mix.weights: has no effect, because weight_schedule has a point at step 0")
        before = (
            None
            if config.weights is None or points[0].step == 0
            else exact_weights(config.weights, names)
        )
        sizes = () if config.batch_size is None else ((0, config.batch_size),)
        kind = config.weight_schedule_type
        return Schedule(exact_points(points, names), kind, sizes, before)


class MixedShardedSource(PlannedSource):
    """The documents of a mixture in the order of their draws.

    Its columns are `input_ids` as stored, `has_eos` if a text may continue in another document, and
    `__source__`, the dataset of the document. Opening it reads nothing; `prepare()` counts its
    rows. An endless mixture has no row count.
    """

    kind = "mixed"

    @classmethod
    def of(
        cls,
        sources: Mapping[str, ShardedSource],
        config: MixStageConfig | None = None,
        *,
        cache_dir: str | Path | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tokenizer: TokenizerConfig | str | None = None,
    ) -> MixedShardedSource:
        """Makes a mixture without a pipeline.

        Args:
            sources: Token documents by name, as `Pipeline.tokenize()` makes them, or any source
                with a column `input_ids`.
            config: The options of the mixture; None takes the defaults.
            cache_dir: The folder of plans, and of tokens that are not in a cache yet; None takes
                EASYPIPE_CACHE, else the user's cache folder.
            seed: The seed of the order.
            shuffle: Whether every pass has a new permutation of each dataset; False keeps their
                order.
            tokenizer: The tokenizer of the tokens, if a source does not say it.

        Raises:
            EasypipeError: What `Pipeline.mix` raises.
        """

        options = PipelineConfig(
            datasets=(), default_tokenizer=tokenizer, order=OrderConfig(shuffle=shuffle)
        )
        folder = cache_folder(cache_dir)
        context = PipelineContext(
            config=options,
            seed=seed,
            cache_dir=folder.local,
            cache=folder if folder.remote else None,
        )
        mixed = MixStage(config or MixStageConfig()).process(dict(sources), context)["mixed"]
        assert isinstance(mixed, cls)
        return mixed

    @property
    def _continues(self) -> bool:
        parts = filter(None, map(cached_of, self.mixture.parts.values()))
        return any(part.continues for part in parts)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(
            [
                pa.field(INPUT_IDS, token_list(self.mixture.vocab_size), nullable=False),
                *self.mixture.mask_fields,
                *(column.field for column in self.mixture.aligned),
                *([pa.field(HAS_EOS, pa.uint8(), nullable=False)] if self._continues else []),
                ORIGIN,
            ]
        )

    @property
    def info(self) -> SourceInfo:
        aligned = tuple(column.name for column in self.mixture.aligned)
        mixture = self.mixture
        return SourceInfo(tokens=mixture.tokens, pairs=mixture.paired, aligned=aligned)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        assert shard == 0, f"a mixture has one shard, not {shard + 1}"
        # one piece for each row
        pieces = self.mixture.plan(None).pieces(np.arange(start, stop, dtype=np.int64))
        flat = self.mixture.gather(pieces.dataset, pieces.doc)
        offsets = pa.array(flat.offsets)
        ids = pa.array(flat.ids.astype(token_dtype(self.mixture.vocab_size)))
        arrays: list[pa.Array] = [pa.LargeListArray.from_arrays(offsets, ids)]
        if self.mixture.has_loss_mask:
            arrays.append(pa.LargeListArray.from_arrays(offsets, pa.array(flat.mask)))
        arrays += [
            column.lists(flat.offsets, flat.values[column.name]) for column in self.mixture.aligned
        ]
        if self._continues:
            arrays.append(pa.array(self.mixture.has_eos(pieces.dataset, pieces.doc)))
        arrays.append(
            pa.DictionaryArray.from_arrays(
                pa.array(pieces.dataset), pa.array(list(self.mixture.parts), pa.string())
            )
        )
        return pa.record_batch(arrays, schema=self.schema)
