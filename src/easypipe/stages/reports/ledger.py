"""The ledger of a pipeline, from what the caches recorded and what the plan says."""

from __future__ import annotations

import pyarrow as pa

from easypipe.cache.reader import TokenCache
from easypipe.core.errors import ConfigError
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import Shard, ShardedSource, Source
from easypipe.core.schema import INPUT_IDS, LOSS_MASK
from easypipe.loader.rows.targets import count_targets, stream_start
from easypipe.plan.plan_stats import DatasetStats
from easypipe.stages.mix.mixture import Mixture
from easypipe.stages.mix.stage import MixedShardedSource
from easypipe.stages.pack.stage import PackedShardedSource
from easypipe.stages.tokenize.extra_columns import TokensAndColumns
from easypipe.stages.tokenize.stage import TokenizedShardedSource
from easypipe.stages.tokenize.tokens import is_documents, is_paired

# targets of pieces that go on with a conversation or completion of another row
WITHOUT_PROMPT = "without their prompt"


def is_endless(source: ShardedSource) -> bool:
    return isinstance(source, MixedShardedSource | PackedShardedSource) and source.mixture.endless


def rows_of(source: ShardedSource) -> ShardedSource:
    """What is written of a source: token documents from their cache, everything else as it is."""
    if is_paired(source):
        fix = "Call pack() before save(), or load them without."
        raise ConfigError(
            at="save",
            problem="pairs of answers have no columns of their own until they are packed",
            fix=fix,
        )
    if not is_documents(source):
        return source
    if isinstance(source, TokenizedShardedSource) and source.keep:
        return TokensAndColumns(source.materialize(), source.source, source.keep)
    return CachedTokens(source.materialize())


def ledger_of(name: str, source: ShardedSource) -> Ledger:
    """Every balance of what led to one epoch of `source`, called `name`. Raises LedgerError where
    one does not close.
    """
    ledger = Ledger()
    if is_documents(source):
        ledger.extend(source.materialize().ledger)
    elif isinstance(source, MixedShardedSource | PackedShardedSource):
        for cache in source.mixture.caches:
            ledger.extend(cache.ledger)
        if not source.mixture.endless:
            _plan_entries(ledger, name, source)
    ledger.check()
    return ledger


def _plan_entries(
    ledger: Ledger, whole: str, source: MixedShardedSource | PackedShardedSource
) -> None:
    """documents of all passes → drawn → placed; tokens drawn, EOS added → placed → targets; slots →
    tokens and padding.
    """
    mixture = source.mixture
    packed = source if isinstance(source, PackedShardedSource) else None
    plan, stage = (packed.plan(), "pack") if packed else (mixture.plan(None), "mix")
    stats, joined = plan.stats(), packed is not None and packed.joined
    first = stream_start(plan) if joined else -1  # the one dataset whose first token is no target
    trained = None
    if mixture.has_loss_mask:  # the one number that lengths do not tell
        hold = packed is not None and packed.rows().hold
        trained = count_targets(plan, mixture.caches, stats.rows, joined=joined, hold=hold)
    for i, (name, part) in enumerate(stats.datasets.items()):
        passes = {"passes x documents": part.passes * part.num_docs}
        drawn = {"drawn": part.draws, "unreached": part.unreached}
        ledger.add("mix", name, "documents", into=passes, out=drawn)
        ledger.facts[f"mix.{name}.epochs"] = part.epochs
        ledger.add(stage, name, "documents", into={"drawn": part.draws}, out=part.documents)
        added = _eos_added(mixture, i, part) if packed else 0
        into = {"drawn, with EOS": part.tokens_drawn}
        if added is not None:
            into = {"drawn": part.tokens_drawn - added, "EOS": added}
        ledger.add(stage, name, "tokens", into=into, out=part.tokens)
        starts = int(i == first) if joined else part.segments * (2 if mixture.paired else 1)
        labels = part.tokens_placed - starts
        out = {"targets": labels}
        if trained is not None:
            targets, held = trained[:, i].tolist()
            out = {"targets": targets, "masked": labels - targets - held}
            out |= {WITHOUT_PROMPT: held} if held else {}
        placed = {"placed": part.tokens_placed}
        ledger.add("labels", name, "tokens", into=placed, out={**out, "segment starts": starts})
    if packed:
        slots = {"tokens": stats.slots - stats.padding, "padding": stats.padding}
        ledger.add("pack", whole, "slots", into={"slots": stats.slots}, out=slots)
        ledger.facts |= {f"pack.{whole}.rows": stats.rows, f"pack.{whole}.fill": stats.fill}


def _eos_added(mixture: Mixture, i: int, part: DatasetStats) -> int | None:
    """EOS tokens that the plan added to what was drawn; None where only a part of a dataset was
    drawn that has some of its own.
    """
    lacking = mixture.without_eos[i]
    if lacking in (0, part.num_docs):
        return part.draws if lacking else 0
    return part.passes * lacking if part.unreached == 0 else None


class CachedTokens(Source):
    """The documents of a token cache as they are saved, a shard for each of its files: `input_ids`,
    and `loss_mask` where there is one.
    """

    def __init__(self, cache: TokenCache) -> None:
        self._cache = cache
        self._parts = [part for part in cache.manifest.parts if part.docs]
        self._names = [name for name in (INPUT_IDS, LOSS_MASK) if name in cache.schema.names]
        self.schema = pa.schema([cache.schema.field(name) for name in self._names])
        self.fingerprint = cache.fingerprint
        self.shards = tuple(
            Shard(name=part.file, num_rows=part.docs, num_bytes=part.num_bytes)
            for part in self._parts
        )

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        part = self._parts[shard]
        return (
            self._cache.read(part.shard, part.start, part.stop)
            .slice(start, stop - start)
            .select(self._names)
        )
