"""Preparing a chain: the token caches behind its sources are filled, and its rows planned."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from easypipe.core.protocols import PipelineContext, ShardedSource
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.stages.mix.stage import MixedShardedSource
from easypipe.stages.pack.stage import PackedShardedSource
from easypipe.stages.tokenize.import_tokens import ImportedTokens
from easypipe.stages.tokenize.stage import TokenizedShardedSource
from easypipe.stages.tokenize.tokens import require_documents

log = logging.getLogger("easypipe")


def prepare_sources(
    data: Mapping[str, ShardedSource], context: PipelineContext, num_epochs: int | None
) -> None:
    """Fills the token caches and plans `num_epochs` (None: without end), as far as there is a
    plan.
    """
    for documents in documents_of(data, context):
        documents.materialize()
    for name, source in data.items():
        if isinstance(source, PackedShardedSource):
            plan = source.plan(num_epochs)
        elif isinstance(source, MixedShardedSource):
            plan = source.mixture.plan(None, num_epochs=num_epochs)
        else:
            continue
        log.info("%s: %s rows are planned", name, plan.num_rows or "endless")
        source.mixture.remember(plan)


def documents_of(
    data: Mapping[str, ShardedSource], context: PipelineContext
) -> Iterator[TokenizedShardedSource | ImportedTokens]:
    """Every dataset behind these sources that has a token cache."""
    for name, source in data.items():
        if isinstance(source, MixedShardedSource | PackedShardedSource):
            found = list(source.mixture.parts.values())
        elif INPUT_IDS in source.schema.names and SEGMENT_IDS not in source.schema.names:
            found = [require_documents(name, source, context, stage="repair")]
        else:
            found = []
        for documents in found:
            if isinstance(documents, TokenizedShardedSource | ImportedTokens):
                yield documents
