"""All documents: users' own tokenizers, those that objects are or name, and the padding token."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from easypipe.core.errors import ConfigError, SourceError, require
from easypipe.core.schema import INPUT_IDS
from easypipe.core.values import Integers, Item, Row, attribute_of
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

# The documents do not define what a tokenizer is: it is anything that acts like one.
# `core.values.attribute_of` reads its attributes.
TokenizerLike = Any  # a Tokenizer, its config, a name, another library's, a user's `encode(text)`
Rows = Sequence[Row]

TEXT = "text"
MESSAGES = "messages"


def tokenizer_config(tokenizer: TokenizerLike, **changes: Any) -> TokenizerConfig:
    """Returns the config that a tokenizer has, is, or names, with `changes`.

    Args:
        tokenizer: A Tokenizer, a TokenizerConfig, a name, or another library's tokenizer with
            `name_or_path`.
        changes: Fields of TokenizerConfig to set, if not None.

    Raises:
        ConfigError: It names no tokenizer, or one with a different number of tokens.
    """
    if isinstance(tokenizer, Tokenizer):
        tokenizer = tokenizer.config
    elif not isinstance(tokenizer, TokenizerConfig):
        foreign = not isinstance(tokenizer, str)
        name = attribute_of(tokenizer, "name_or_path") if foreign else tokenizer
        if not isinstance(name, str) or not name:
            raise ConfigError(
                at="tokenizer",
                problem=f"{type(tokenizer).__name__} names no tokenizer",
                fix="Give a tokenizer.json, its folder, a Hub name, or TokenizerConfig(...).",
            )
        vocabulary = attribute_of(tokenizer, "get_vocab") if foreign else None
        if vocabulary is not None:
            size, known = max(vocabulary().values()) + 1, load_tokenizer(name).vocab_size
            require(
                size == known,
                "tokenizer",
                f"it has {size} tokens, and {name}, which it names, has {known}",
                "Write it with save_pretrained(folder), and give the folder.",
            )
        tokenizer = TokenizerConfig(name_or_path=name)
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(tokenizer, **given) if given else tokenizer


def is_own(tokenizer: TokenizerLike) -> bool:
    """Returns whether it is a user's object of which only `encode(text)` is known."""
    if isinstance(tokenizer, str | Tokenizer | TokenizerConfig):
        return False
    named = attribute_of(tokenizer, "name_or_path")
    return not named and callable(attribute_of(tokenizer, "encode"))


def vocabulary_of(tokenizer: TokenizerLike) -> Mapping[str, int] | None:
    """Returns tokens and their ids, if a user's object provides them."""
    known = attribute_of(tokenizer, "get_vocab")
    found = known() if callable(known) else None
    return found if isinstance(found, Mapping) and found else None


class OwnTokenizer:
    """A user's object with `encode(text)`, for collators.

    `encode` returns ids or a dict with `input_ids`.

    Its fingerprint is that of its class, because its content is unknown.
    """

    def __init__(self, tokenizer: TokenizerLike, max_length: int | None) -> None:
        self._own, self._max_length = tokenizer, max_length
        self.pad_token_id: int | None = attribute_of(tokenizer, "pad_token_id")
        self.eos_token_id: int | None = attribute_of(tokenizer, "eos_token_id")
        self.bos_token_id: int | None = attribute_of(tokenizer, "bos_token_id")
        self.mask_token_id: int | None = attribute_of(tokenizer, "mask_token_id")
        kind = type(tokenizer)
        self.name = kind.__qualname__
        self.fingerprint = f"{kind.__module__}.{kind.__qualname__}:{max_length}"

    @functools.cached_property
    def vocab_size(self) -> int | None:
        """The number of ids, if the object provides it."""
        vocabulary = vocabulary_of(self._own)
        if vocabulary is not None:
            return max(vocabulary.values()) + 1
        told = attribute_of(self._own, "get_vocab_size", "vocab_size")
        size = told() if callable(told) else told
        return size if isinstance(size, int) and size > 0 else None

    @property
    def special_token_ids(self) -> list[int]:
        """The special tokens that the object provides."""
        known = self.bos_token_id, self.eos_token_id, self.pad_token_id, self.mask_token_id
        return [token for token in known if token is not None]

    def reference_encode(self, text: str) -> Integers:
        """Returns the ids of a text, cut to max_length.

        Raises:
            SourceError: `encode` returned no ids.
        """
        made = self._own.encode(text)
        ids = made[INPUT_IDS] if isinstance(made, Mapping) and INPUT_IDS in made else made
        own = attribute_of(ids, "ids")  # `tokenizers` returns an Encoding
        array = np.asarray(ids if own is None else own)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            problem = f"{type(self._own).__name__}.encode returned {type(made).__name__}"
            raise SourceError(
                at="tokenizer",
                problem=problem,
                fix="Let it return a list of ids, or a dict with input_ids.",
            )
        return array[: self._max_length]


def as_tokenizer(
    tokenizer: TokenizerLike, *, max_length: int | None = None
) -> Tokenizer | OwnTokenizer:
    """Returns a tokenizer that encodes, from an object that is or names one.

    A Tokenizer is unchanged, unless it must cut at a different length; an object that names one is
    loaded; a user's object becomes an OwnTokenizer.
    """
    if isinstance(tokenizer, OwnTokenizer):
        return tokenizer
    if is_own(tokenizer):
        return OwnTokenizer(tokenizer, max_length)
    if isinstance(tokenizer, Tokenizer) and max_length in (None, tokenizer.config.max_length):
        return tokenizer
    return load_tokenizer(tokenizer_config(tokenizer, max_length=max_length))


def row_number(index: Item, count: int, name: str, fix: str) -> int:
    """Returns the number of a row, of which a negative one counts from the end of `count` rows.

    Raises:
        ConfigError: The index is no whole number, for example a slice.
    """
    try:
        number = operator.index(index)
    except TypeError:
        at, problem = f"{name}[...]", f"{index!r} is not the number of a row"
        raise ConfigError(at=at, problem=problem, fix=fix) from None
    return number + count if number < 0 else number


def pad_of(tokenizer: TokenizerLike) -> int:
    """Returns the token that pads rows: the tokenizer's own, else its EOS, else 0."""
    return attribute_of(tokenizer, "pad_token_id", "eos_token_id") or 0
