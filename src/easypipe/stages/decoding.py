"""Decodes tokens of batches to text for people, with the tokenizer of each dataset."""

from __future__ import annotations

import functools

from easypipe.cache.verify import same_tokenizer_again
from easypipe.core.errors import TokenizerError
from easypipe.core.protocols import ShardedSource
from easypipe.loader.explain import Decoder, Decodes
from easypipe.stages.mix.mixture import planned_of
from easypipe.stages.tokenize.documents import token_info, tokenizer_of


def decoder_of(source: ShardedSource) -> Decoder:
    """dataset → its tokenizer; for saved rows, whose datasets are no longer told apart, any name
    will do.
    """
    planned = planned_of(source)
    parts = {} if planned is None else planned.mixture.parts

    def decoder(dataset: str) -> Decodes:
        part: ShardedSource = parts.get(dataset, source)
        own = tokenizer_of(part)
        if own is not None:
            return own
        info = token_info(part)
        if info is None:
            raise TokenizerError(
                at=f"dataset {dataset!r}" if dataset else "rows",
                problem="nobody knows whose tokens these are",
            )
        return same_tokenizer_again(info.tokenizer, info.tokenizer_fingerprint)

    return functools.cache(decoder)
