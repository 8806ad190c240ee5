"""Rows of text for collators: which tokenizer is meant, and texts as tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from easypipe.core.errors import ConfigError, SourceError, place
from easypipe.core.schema import INPUT_IDS
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

TEXT = "text"
MESSAGES = "messages"


def tokenizer_config(tokenizer: Any, **changes: Any) -> TokenizerConfig:
    """The config of a Tokenizer, a TokenizerConfig, a name, or another library's tokenizer with
    `name_or_path`; with `changes`.
    """
    if isinstance(tokenizer, Tokenizer):
        tokenizer = tokenizer.config
    elif not isinstance(tokenizer, TokenizerConfig):
        name = tokenizer if isinstance(tokenizer, str) else getattr(tokenizer, "name_or_path", None)
        if not isinstance(name, str) or not name:
            raise ConfigError(
                at="tokenizer",
                problem=f"{type(tokenizer).__name__} names no tokenizer",
                fix="Give a tokenizer.json, its folder, a Hub name, or TokenizerConfig(...).",
            )
        known = None if isinstance(tokenizer, str) else getattr(tokenizer, "get_vocab", None)
        if (
            known is not None
            and (size := max(known().values()) + 1) != load_tokenizer(name).vocab_size
        ):
            problem = f"it has {size} tokens, and {name}, which it names, has {load_tokenizer(name).vocab_size}"
            raise ConfigError(
                at="tokenizer",
                problem=problem,
                fix="Write it with save_pretrained(folder), and give the folder.",
            )
        tokenizer = TokenizerConfig(name_or_path=name)
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(tokenizer, **given) if given else tokenizer


def is_own(tokenizer: Any) -> bool:
    """Whether it is nothing but an object of the user's that has `encode(text)`."""
    named = isinstance(tokenizer, str | Tokenizer | TokenizerConfig) or getattr(
        tokenizer, "name_or_path", None
    )
    return not named and callable(getattr(tokenizer, "encode", None))


class OwnTokenizer:
    """A user's `encode(text)`, which gives ids, or a dict with `input_ids`, for collators. It is
    not known by content, but by its class.
    """

    def __init__(self, tokenizer: Any, max_length: int | None) -> None:
        self._own, self._max_length = tokenizer, max_length
        for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            setattr(self, name, getattr(tokenizer, name, None))
        self.fingerprint = (
            f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}:{max_length}"
        )

    def reference_encode(self, text: str) -> Any:
        """Raises SourceError where there are no ids."""
        made = self._own.encode(text)
        ids = made[INPUT_IDS] if isinstance(made, Mapping) and INPUT_IDS in made else made
        array = np.asarray(getattr(ids, "ids", ids))  # `tokenizers` gives an Encoding
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            problem = f"{type(self._own).__name__}.encode gave {type(made).__name__}"
            raise SourceError(
                at="tokenizer",
                problem=problem,
                fix="Let it give a list of ids, or a dict with input_ids.",
            )
        return array[: self._max_length]


def as_tokenizer(tokenizer: Any, *, max_length: int | None = None) -> Any:
    """A Tokenizer as it is, unless it has to cut at another length; any other way to name one,
    loaded; an OwnTokenizer of what has none.
    """
    if is_own(tokenizer):
        return OwnTokenizer(tokenizer, max_length)
    if isinstance(tokenizer, Tokenizer) and max_length in (None, tokenizer.config.max_length):
        return tokenizer
    return load_tokenizer(tokenizer_config(tokenizer, max_length=max_length))


def pad_of(tokenizer: Any) -> int:
    """The token that fills rows up: the tokenizer's own, else its EOS, else 0."""
    known = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((i for i in known if i is not None), 0)


def encoding(tokenizer: Any, max_length: int | None, collator: Any) -> Callable[..., Any]:
    """`collator`, for rows of text too where there is a tokenizer; texts are cut at max_length."""
    return (
        collator
        if tokenizer is None
        else EncodingCollator(
            tokenizer=as_tokenizer(tokenizer, max_length=max_length), collator=collator
        )
    )


@dataclass(frozen=True, kw_only=True)
class EncodingCollator:
    """A collator of tokens for rows that may have `text` in their place."""

    tokenizer: Any  # a Tokenizer or an OwnTokenizer
    collator: Any

    @property
    def recipe(self) -> Any:
        config = getattr(self.tokenizer, "config", None)
        return (
            "encoding",
            self.tokenizer.fingerprint,
            getattr(config, "max_length", None),
            getattr(self.collator, "recipe", None),
        )

    @property
    def draws(self) -> bool:
        return getattr(self.collator, "draws", False)

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], *, keys: Sequence[int] | None = None
    ) -> Any:
        encoded = [row if INPUT_IDS in row else self._encoded(row, i) for i, row in enumerate(rows)]
        return self.collator(encoded, keys=keys) if self.draws else self.collator(encoded)

    def _encoded(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        text = row.get(TEXT)
        if not isinstance(text, str):
            at = place(f"row {number} of the batch", column=TEXT)
            raise SourceError(
                at=at,
                problem="no text, and no input_ids either",
                have=row,
                fix="Name the column of text 'text'.",
            )
        ids = np.asarray(self.tokenizer.reference_encode(text), np.int64)
        return {**{name: value for name, value in row.items() if name != TEXT}, INPUT_IDS: ids}
