"""Tokens back to text, for people who look at batches: the tokenizer of each dataset, loaded when
it is first asked for.
"""

from __future__ import annotations

import functools

from easypipe.core.errors import TokenizerError
from easypipe.core.protocols import ShardedSource
from easypipe.loader.explain import Decoder, Decodes
from easypipe.stages.mix.stage import MixedShardedSource
from easypipe.stages.pack.stage import PackedShardedSource
from easypipe.stages.tokenize.tokens import token_info, tokenizer_of
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer


def decoder_of(source: ShardedSource) -> Decoder:
    """dataset → its tokenizer; for saved rows, whose datasets are no longer told apart, any name
    will do.
    """
    parts = (
        source.mixture.parts if isinstance(source, MixedShardedSource | PackedShardedSource) else {}
    )

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


def same_tokenizer_again(name: str, fingerprint: str) -> Tokenizer:
    """The tokenizer that made some tokens, by the name and the fingerprint that were recorded with
    them.

    Raises TokenizerError where it cannot be found, or where what is there now encodes differently
    (its golden probe is another).
    """
    # of a TokenizerConfig, what the fingerprint knows beside the files
    for special in (False, True):
        found = load_tokenizer(TokenizerConfig(name_or_path=name, add_special_tokens=special))
        if found.fingerprint == fingerprint:
            return found
    raise TokenizerError(
        at=name,
        problem="is not the tokenizer that made these tokens: its files or its encoding of a fixed text are others",
        fix="Put the files back that were used when the tokens were made.",
    )
