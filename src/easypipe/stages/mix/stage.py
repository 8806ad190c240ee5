"""The mix stage: several datasets become one, in proportions that hold at every prefix."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from easypipe.cache.location import cache_folder
from easypipe.core.config import ListOf, config, digest
from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    Shard,
    ShardedDataSource,
    ShardedSource,
)
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, SOURCE, token_dtype, token_list
from easypipe.plan.mix import integer_weights
from easypipe.plan.spec import Unit
from easypipe.save.saved import TokenInfo
from easypipe.stages.mix.mixture import Mixture
from easypipe.stages.mix.schedule import (
    MixSchedule,
    ScheduleType,
    WeightSchedulePoint,
    batch_sizes_of,
    check_points,
    exact_points,
    exact_weights,
)
from easypipe.stages.tokenize.tokens import require_documents, same_kind, same_tokenizer, token_info
from easypipe.transforms.tokenizer.tokenizer import TokenizerConfig

log = logging.getLogger("easypipe")


@config
class MixStageConfig:
    """How much of each dataset the mixture holds. docs/mixing.md has the rules, and the bounds that
    they keep.

    weights: a positive number for each dataset, in any scale; None gives every dataset the same.
    weight_schedule: weights that follow the training step, in place of `weights`, which then hold
    until the first point (without them, the
        first point's do). The mixture looks at them where a window of documents ends, and windows
        end where they change.
    weight_schedule_type: between two points the weights stay (`step`), or go over along a line
    (`linear`) or half a cosine wave (`cosine`).
    batch_size: rows of a training step, for weight_schedule. None takes that of load(), or of the
    config's `load`; one that differs from
        them is refused.
    unit: what the weights are shares of: documents (`rows`), or the tokens of them that get a place
    in a row (`tokens`).
    max_epochs: for each dataset named, how often a document of it may come in the whole run. A
    dataset that has come so often leaves, and
        the others go on by their weights. A mixture that restarts ends where all its datasets have
        such a number.
    block_size: round the shares to whole documents of a block of so many, so that every block of
    that many documents in a row holds the
        same number of each dataset. None keeps the weights as they are; every prefix is then within
        one document of them. Under a schedule the shares of a window are rounded so; with `unit` at
        `tokens` there are no such blocks.
    stop_strategy: `restart` begins an exhausted dataset again and never ends; `first_exhausted`
    ends before the first document that an
        exhausted dataset would have to give; `all_exhausted` goes on with the others, so that every
        document comes exactly once.
    seed: orders the mixture in place of the pipeline's seed.
    allow_mixed_tokenizers: datasets of different tokenizers are refused unless this is True.
    provenance: packed rows get a column `__source__` too: the dataset of every segment, in their
    order. It is kept by save(), and left
        out of batches. Mixed rows that are not packed always have it.
    """

    weights: dict[str, float] | None = None
    weight_schedule: ListOf[WeightSchedulePoint] | None = None
    weight_schedule_type: ScheduleType = "step"
    batch_size: int | None = None
    unit: Unit = "rows"
    max_epochs: dict[str, int] | None = None
    block_size: int | None = None
    stop_strategy: Literal["restart", "first_exhausted", "all_exhausted"] = "restart"
    seed: int | None = None
    allow_mixed_tokenizers: bool = False
    provenance: bool = False

    def check(self) -> None:
        for name, weight in (self.weights or {}).items():
            if not math.isfinite(weight) or weight <= 0:
                raise ConfigError(
                    at=f"weights.{name}",
                    problem=f"{weight!r} is no weight",
                    fix="Give a positive number, or leave the dataset out.",
                )
        if self.weights is not None and not self.weights:
            raise ConfigError(
                at="weights",
                problem="there is nothing to mix",
                fix="Give a weight for every dataset, or leave it out.",
            )
        if self.block_size is not None:
            if not 1 <= self.block_size <= 1 << 40:
                raise ConfigError(
                    at="block_size",
                    problem=f"{self.block_size} is no block of documents",
                    fix="Give at least 1.",
                )
            if self.unit == "tokens":
                raise ConfigError(
                    at="block_size",
                    problem="counts documents, and unit is 'tokens'",
                    fix="Leave one of them out.",
                )
            if self.weights is not None:
                block_weights(self.weights, self.block_size)
        for name, epochs in (self.max_epochs or {}).items():
            if epochs < 1:
                raise ConfigError(
                    at=f"max_epochs.{name}",
                    problem=f"{epochs} is no pass",
                    fix="Give at least 1, or leave the dataset out.",
                )
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.weight_schedule is None:
            for name, default in (("weight_schedule_type", "step"), ("batch_size", None)):
                if getattr(self, name) != default:
                    raise ConfigError(
                        at=name,
                        problem="has no effect without weight_schedule",
                        fix="Leave it out, or give points.",
                    )
            return
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(
                at="batch_size",
                problem=f"{self.batch_size} rows are no batch",
                fix="Give at least 1.",
            )
        check_points(self.weight_schedule, "weight_schedule")
        for i, point in enumerate(self.weight_schedule):
            try:
                exact_weights(point.weights, list(point.weights))
                if self.block_size is not None:
                    block_weights(
                        {name: weight for name, weight in point.weights.items() if weight > 0},
                        self.block_size,
                    )
            except ConfigError as error:
                raise error.under(f"weight_schedule[{i}]") from None

    def check_names(self, names: list[str]) -> None:
        """Raises ConfigError where weights, points or max_epochs do not name these datasets."""
        check_weights(self.weights, names)
        for i, point in enumerate(self.weight_schedule or ()):
            check_weights(point.weights, names, f"mix.weight_schedule[{i}].weights")
        for name in self.max_epochs or {}:
            if name not in names:
                raise ConfigError(
                    at=f"mix.max_epochs.{name}",
                    problem=f"no dataset named {name!r}",
                    have=sorted(names),
                    fix=did_you_mean(name, names),
                )

    def ends(self, names: list[str]) -> bool:
        """Whether the mixture of these datasets comes to an end."""
        return (
            self.stop_strategy != "restart"
            or len(names) == 1
            or set(names) <= set(self.max_epochs or {})
        )


def check_weights(
    weights: dict[str, float] | None, names: list[str], at: str = "mix.weights"
) -> None:
    """Raises ConfigError where weights and datasets do not name the same."""
    if weights is None:
        return
    for name in weights:
        if name not in names:
            raise ConfigError(
                at=f"{at}.{name}",
                problem=f"no dataset named {name!r}",
                have=sorted(names),
                fix=did_you_mean(name, names),
            )
    for name in names:
        if name not in weights:
            raise ConfigError(
                at=at,
                problem=f"no weight for dataset {name!r}",
                have=weights,
                fix="Give it one, or leave the dataset out.",
            )


def block_weights(weights: dict[str, float], block_size: int) -> tuple[int, ...]:
    """Whole documents of each dataset in a block, largest remainders first. Raises ConfigError for
    a share that rounds to none.
    """
    exact = dict(zip(weights, integer_weights(weights), strict=True))
    shares = {
        name: Fraction(part * block_size, sum(exact.values())) for name, part in exact.items()
    }
    whole = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (whole[name] - shares[name], name))
    for name in by_remainder[: block_size - sum(whole.values())]:
        whole[name] += 1
    for name, documents in whole.items():
        if documents == 0:
            needed = math.ceil(1 / (shares[name] / block_size))
            raise ConfigError(
                at="block_size",
                problem=f"in a block of {block_size} documents {name!r} has {float(shares[name]):.3g}, which is none",
                fix=f"Use blocks of at least {needed}, or leave block_size out.",
            )
    return tuple(whole.values())


class MixStage(BaseStage):
    """dict of datasets → {"mixed": MixedShardedSource}."""

    config: MixStageConfig

    @property
    def name(self) -> str:
        return "mix"

    def process(
        self, data: dict[str, ShardedSource], context: PipelineContext
    ) -> dict[str, ShardedSource]:
        config, names = self.config, list(data)
        config.check_names(names)
        parts = {
            name: require_documents(name, source, context, stage="mix")
            for name, source in data.items()
        }
        same_tokenizer(parts, allow=self.config.allow_mixed_tokenizers)
        same_kind(parts)
        weights = {name: config.weights[name] if config.weights else 1.0 for name in names}
        if config.weights is None and config.weight_schedule is None:
            log.info("mix: no weights given, so %s have 1/%d each", ", ".join(names), len(names))
        try:
            whole = (
                integer_weights(weights)
                if config.block_size is None
                else block_weights(weights, config.block_size)
            )
        except ConfigError as error:
            raise error.under("mix") from None
        mixture = Mixture(
            parts=parts,
            weights=whole,
            stop=config.stop_strategy,
            seed=context.seed if config.seed is None else config.seed,
            context=context,
            schedule=self._schedule(names, context),
            unit=config.unit,
            max_epochs=None
            if not config.max_epochs
            else tuple(config.max_epochs.get(name) for name in names),
            provenance=config.provenance,
        )
        return {"mixed": MixedShardedSource(mixture)}

    def _schedule(self, names: list[str], context: PipelineContext) -> MixSchedule | None:
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
        load = getattr(context.config, "load", None)
        sizes = None if load is None else batch_sizes_of(load)
        if config.batch_size is not None:
            sizes = ((0, config.batch_size),)
        made = MixSchedule(
            exact_points(points, names),
            config.weight_schedule_type,
            before,
            config.block_size,
            sizes,
            config.batch_size is not None,
        )
        return made if load is None else made.for_load(load)


class MixedShardedSource(ShardedDataSource):
    """The documents of a mixture in the order of their draws: `input_ids` as they are stored, and
    `__source__`, the dataset they came from.

    Opening it reads nothing; its shards are known once the datasets are tokenized. An endless
    mixture has no row count.
    """

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

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
        """A mixture without a pipeline.

        sources: documents of tokens by name, as `Pipeline.tokenize()` makes them, or any with a
        column `input_ids`. cache_dir: where plans are kept, and tokens that are in no cache yet;
        None takes EASYPIPE_CACHE, else the user's cache folder. shuffle: a new permutation of every
        dataset each pass; False keeps their order.
        tokenizer: whose the tokens are, where a source does not say it.
        Raises what `Pipeline.mix` raises.
        """
        from easypipe.stages.config import OrderConfig, PipelineConfig  # it knows this module

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
    def schema(self) -> pa.Schema:
        fields = [pa.field(INPUT_IDS, token_list(self.mixture.vocab_size), nullable=False)]
        if self.mixture.has_loss_mask:
            fields.append(pa.field(LOSS_MASK, pa.large_list(pa.uint8()), nullable=False))
        return pa.schema(
            [*fields, pa.field(SOURCE, pa.dictionary(pa.int32(), pa.string()), nullable=False)]
        )

    @property
    def tokens(self) -> TokenInfo | None:
        info = token_info(next(iter(self.mixture.parts.values())))
        return (
            None if info is None else dataclasses.replace(info, vocab_size=self.mixture.vocab_size)
        )

    @property
    def shards(self) -> tuple[Shard, ...]:
        plan = self.mixture.plan(None)
        rows = plan.num_rows
        self.mixture.remember(plan)
        return (Shard(name="mixed", num_rows=rows),)

    @property
    def fingerprint(self) -> str:
        return digest("mixed", self.mixture.plan(None).fingerprint)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        assert shard == 0, f"a mixture has one shard, not {shard + 1}"
        # one for each row
        pieces = self.mixture.plan(None).pieces(np.arange(start, stop, dtype=np.int64))
        flat = self.mixture.gather(pieces.dataset, pieces.doc)
        offsets = pa.array(flat.offsets)
        ids = pa.array(flat.ids.astype(token_dtype(self.mixture.vocab_size)))
        arrays: list[pa.Array] = [pa.LargeListArray.from_arrays(offsets, ids)]
        if self.mixture.has_loss_mask:
            arrays.append(pa.LargeListArray.from_arrays(offsets, pa.array(flat.mask)))
        arrays.append(
            pa.DictionaryArray.from_arrays(
                pa.array(pieces.dataset), pa.array(list(self.mixture.parts), pa.string())
            )
        )
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)
