"""What the later stages ask of a source of tokens: whose they are, and that they are documents."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol, TypeGuard

from easypipe.cache.location import cache_folder_of, in_folder
from easypipe.cache.reader import TokenCache
from easypipe.core.errors import ConfigError, StageOrderError
from easypipe.core.protocols import PipelineContext, ShardedSource, TokenInfo, info_of
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.sources.splits import PartialSource
from easypipe.stages.config import datasets_of, settings_of
from easypipe.stages.tokenize.import_tokens import ImportedTokens
from easypipe.stages.tokenize.stage import TokenizedShardedSource, tokens_of
from easypipe.transforms.chat.render import Turns, turns_of
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("easypipe")


class Documents(ShardedSource, Protocol):
    """Token documents that can be had as a token cache: tokenized on the first call, opened on
    every later one.
    """

    def materialize(self) -> TokenCache: ...


def is_documents(source: ShardedSource) -> TypeGuard[Documents]:
    return callable(getattr(type(source), "materialize", None))


def require_documents(
    name: str, source: ShardedSource, context: PipelineContext, *, stage: str
) -> Documents:
    """Raises StageOrderError for text, ConfigError for rows that are packed already."""
    if SEGMENT_IDS in source.schema.names:
        raise ConfigError(
            at=stage,
            problem=f"the rows of dataset {name!r} are packed already",
            fix=f"Leave out {stage}() and load them as they are, or start from documents.",
        )
    if is_documents(source):
        return source
    if INPUT_IDS not in source.schema.names:
        raise StageOrderError(
            at="",
            problem=f"Call tokenize() before {stage}(): dataset {name!r} has no column "
            f"{INPUT_IDS!r}",
        )
    own = datasets_of(context).get(name)
    context = in_folder(context, cache_folder_of(own, source, context))
    tokens = token_info(source) or _named_tokenizer(name, context)
    return ImportedTokens(name, source, tokens, context)


def _named_tokenizer(name: str, context: PipelineContext) -> TokenInfo:
    """The tokenizer that the config names for tokens which do not say whose they are. Raises
    ConfigError where it names none.
    """
    own = datasets_of(context).get(name)
    chosen = (own and own.tokenizer) or settings_of(context).default_tokenizer
    if chosen is None:
        raise ConfigError(
            at=f"datasets.{name}.tokenizer",
            problem="nobody knows whose tokens these are",
            fix="Name the tokenizer that made them.",
        )
    return tokens_of(load_tokenizer(chosen))


def is_paired(source: ShardedSource) -> bool:
    """Whether every document is a pair of answers, which must stay in one row."""
    return info_of(source).pairs


def holds_pairs(source: ShardedSource) -> bool | None:
    """Whether a source of tokens, mixed and packed or not, holds pairs of answers; None where its
    rows were made before.
    """
    mixture = getattr(source, "mixture", None)
    if mixture is not None:
        return bool(mixture.paired)
    return is_paired(source) if is_documents(source) else None


def same_kind(parts: Mapping[str, Documents]) -> None:
    """Raises ConfigError where some datasets hold pairs and others do not: a loss is either of
    pairs or of tokens.
    """
    paired = [name for name, source in parts.items() if is_paired(source)]
    others = [name for name in parts if name not in paired]
    if paired and others:
        problem = f"dataset {paired[0]!r} holds pairs of answers, and {others[0]!r} does not"
        raise ConfigError(at="mix", problem=problem, fix="Train on them in two runs.")


def token_info(source: ShardedSource) -> TokenInfo | None:
    """Whose tokens these are; None where nobody knows."""
    return info_of(source).tokens


def tokenizer_of(source: ShardedSource) -> Tokenizer | None:
    """The tokenizer that a source runs; None for tokens that were made before."""
    return source.tokenizer if isinstance(source, TokenizedShardedSource) else None


def trained_turns(source: ShardedSource) -> Turns | None:
    """How the conversations of a source, mixed and packed or not, are written; None where it holds
    none, and for rows made before.

    Of several templates the first is told, with all the tokens that end turns. Raises
    HostileTemplateError.
    """
    if isinstance(source, PartialSource):
        return trained_turns(source.source)
    mixture = getattr(source, "mixture", None)
    found: dict[str, Turns] = {}
    for part in [source] if mixture is None else mixture.parts.values():
        tokenizer, template = (
            tokenizer_of(part),
            getattr(getattr(getattr(part, "form", None), "engine", None), "template", None),
        )
        if tokenizer is not None and template is not None and template.source not in found:
            found[template.source] = turns_of(template, tokenizer)
    if not found:
        return None
    stops = dict.fromkeys(number for turns in found.values() for number in turns.stop_token_ids)
    return Turns(next(iter(found)), tuple(stops))


def same_tokenizer(parts: Mapping[str, Documents], *, allow: bool) -> None:
    """Raises ConfigError naming the first two datasets whose tokens mean different things; with
    `allow`, a warning names them.
    """
    first: tuple[str, TokenInfo] | None = None
    for name, source in parts.items():
        info = token_info(source)
        if info is None:
            continue
        if first is None:
            first = (name, info)
        elif first[1].tokenizer_fingerprint != info.tokenizer_fingerprint:
            problem = (
                f"datasets {first[0]!r} and {name!r} have different tokenizers, "
                f"{first[1].tokenizer!r} and {info.tokenizer!r}"
            )
            if not allow:
                raise ConfigError(
                    at="mix",
                    problem=problem,
                    fix="Give them one tokenizer, or set mix.allow_mixed_tokenizers=True.",
                )
            log.warning(
                "mix: %s: equal ids mean different tokens, and each document ends with its own "
                "tokenizer's EOS",
                problem,
            )
