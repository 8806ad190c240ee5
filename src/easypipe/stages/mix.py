"""The mix stage: several datasets become one, in proportions that hold at every prefix."""

from __future__ import annotations

import dataclasses
import logging
import math
from fractions import Fraction
from typing import Literal

import numpy as np
import pyarrow as pa

from easypipe.core.config import config, digest
from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.core.protocols import BaseStage, PipelineContext, Shard, ShardedSource
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, SOURCE, token_dtype, token_list
from easypipe.plan.mix import integer_weights
from easypipe.stages.mixture import Mixture
from easypipe.stages.saved import TokenInfo
from easypipe.stages.tokens import require_documents, same_tokenizer, token_info

log = logging.getLogger("easypipe")


@config
class MixStageConfig:
    """How much of each dataset the mixture holds, counted in documents.

    weights: a positive number for each dataset, in any scale; None gives every dataset the same.
    block_size: round the shares to whole documents of a block of so many, so that every block of that many documents in a row holds the
        same number of each dataset. None keeps the weights as they are; every prefix is then within one document of them.
    stop_strategy: `restart` begins an exhausted dataset again and never ends; `first_exhausted` ends before the first document that an
        exhausted dataset would have to give; `all_exhausted` goes on with the others, so that every document comes exactly once.
    seed: orders the mixture in place of the pipeline's seed.
    allow_mixed_tokenizers: datasets of different tokenizers are refused unless this is True.
    """

    weights: dict[str, float] | None = None
    block_size: int | None = None
    stop_strategy: Literal["restart", "first_exhausted", "all_exhausted"] = "restart"
    seed: int | None = None
    allow_mixed_tokenizers: bool = False

    def check(self) -> None:
        for name, weight in (self.weights or {}).items():
            if not math.isfinite(weight) or weight <= 0:
                raise ConfigError(
                    at=f"weights.{name}", problem=f"{weight!r} is no weight", fix="Give a positive number, or leave the dataset out."
                )
        if self.weights is not None and not self.weights:
            raise ConfigError(at="weights", problem="there is nothing to mix", fix="Give a weight for every dataset, or leave it out.")
        if self.block_size is not None:
            if not 1 <= self.block_size <= 1 << 40:
                raise ConfigError(at="block_size", problem=f"{self.block_size} is no block of documents", fix="Give at least 1.")
            if self.weights is not None:
                block_weights(self.weights, self.block_size)


def check_weights(weights: dict[str, float] | None, names: list[str]) -> None:
    """Raises ConfigError where weights and datasets do not name the same."""
    if weights is None:
        return
    for name in weights:
        if name not in names:
            raise ConfigError(
                at=f"mix.weights.{name}", problem=f"no dataset named {name!r}", have=sorted(names), fix=did_you_mean(name, names)
            )
    for name in names:
        if name not in weights:
            raise ConfigError(
                at="mix.weights", problem=f"no weight for dataset {name!r}", have=weights, fix="Give it one, or leave the dataset out."
            )


def block_weights(weights: dict[str, float], block_size: int) -> tuple[int, ...]:
    """Whole documents of each dataset in a block, largest remainders first. Raises ConfigError for a share that rounds to none."""
    exact = dict(zip(weights, integer_weights(weights), strict=True))
    shares = {name: Fraction(part * block_size, sum(exact.values())) for name, part in exact.items()}
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

    def process(self, data: dict[str, ShardedSource], context: PipelineContext) -> dict[str, ShardedSource]:
        names = list(data)
        check_weights(self.config.weights, names)
        parts = {name: require_documents(name, source, context, stage="mix") for name, source in data.items()}
        same_tokenizer(parts, allow=self.config.allow_mixed_tokenizers)
        weights = {name: self.config.weights[name] if self.config.weights else 1.0 for name in names}
        if self.config.weights is None:
            log.info("mix: no weights given, so %s have 1/%d each", ", ".join(names), len(names))
        try:
            whole = integer_weights(weights) if self.config.block_size is None else block_weights(weights, self.config.block_size)
        except ConfigError as error:
            raise error.under("mix") from None
        seed = context.seed if self.config.seed is None else self.config.seed
        mixture = Mixture(parts=parts, weights=whole, stop=self.config.stop_strategy, seed=seed, context=context)
        return {"mixed": MixedShardedSource(mixture)}


class MixedShardedSource:
    """The documents of a mixture in the order of their draws: `input_ids` as they are stored, and `__source__`, the dataset they came from.

    Opening it reads nothing; its shards are known once the datasets are tokenized. An endless mixture has no row count.
    """

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    @property
    def schema(self) -> pa.Schema:
        fields = [pa.field(INPUT_IDS, token_list(self.mixture.vocab_size), nullable=False)]
        if self.mixture.has_loss_mask:
            fields.append(pa.field(LOSS_MASK, pa.large_list(pa.uint8()), nullable=False))
        return pa.schema([*fields, pa.field(SOURCE, pa.dictionary(pa.int32(), pa.string()), nullable=False)])

    @property
    def tokens(self) -> TokenInfo | None:
        info = token_info(next(iter(self.mixture.parts.values())))
        return None if info is None else dataclasses.replace(info, vocab_size=self.mixture.vocab_size)

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
        pieces = self.mixture.plan(None).pieces(np.arange(start, stop, dtype=np.int64))  # one for each row
        flat = self.mixture.gather(pieces.dataset, pieces.doc)
        offsets = pa.array(flat.offsets)
        ids = pa.array(flat.ids.astype(token_dtype(self.mixture.vocab_size)))
        arrays: list[pa.Array] = [pa.LargeListArray.from_arrays(offsets, ids)]
        if self.mixture.has_loss_mask:
            arrays.append(pa.LargeListArray.from_arrays(offsets, pa.array(flat.mask)))
        arrays.append(pa.DictionaryArray.from_arrays(pa.array(pieces.dataset), pa.array(list(self.mixture.parts), pa.string())))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)
