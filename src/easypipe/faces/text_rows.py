"""Rows of text for collators: which tokenizer is meant, and texts as tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from easypipe.core.errors import ConfigError, SourceError, place
from easypipe.core.schema import INPUT_IDS
from easypipe.transforms.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer

TEXT = "text"
MESSAGES = "messages"


def tokenizer_config(tokenizer: Any, **changes: Any) -> TokenizerConfig:
    """The config of a Tokenizer, a TokenizerConfig, a name, or another library's tokenizer with `name_or_path`; with `changes`."""
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
        if known is not None and (size := max(known().values()) + 1) != load_tokenizer(name).vocab_size:
            problem = f"it has {size} tokens, and {name}, which it names, has {load_tokenizer(name).vocab_size}"
            raise ConfigError(at="tokenizer", problem=problem, fix="Write it with save_pretrained(folder), and give the folder.")
        tokenizer = TokenizerConfig(name_or_path=name)
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(tokenizer, **given) if given else tokenizer


def as_tokenizer(tokenizer: Any, *, max_length: int | None = None) -> Tokenizer:
    """A Tokenizer as it is, unless it has to cut at another length; any other way to name one, loaded."""
    if isinstance(tokenizer, Tokenizer) and max_length in (None, tokenizer.config.max_length):
        return tokenizer
    return load_tokenizer(tokenizer_config(tokenizer, max_length=max_length))


def pad_of(tokenizer: Any) -> int:
    """The token that fills rows up: the tokenizer's own, else its EOS, else 0."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def encoding(tokenizer: Any, max_length: int | None, collator: Any) -> Callable[..., Any]:
    """`collator`, for rows of text too where there is a tokenizer; texts are cut at max_length."""
    return collator if tokenizer is None else EncodingCollator(tokenizer=as_tokenizer(tokenizer, max_length=max_length), collator=collator)


@dataclass(frozen=True, kw_only=True)
class EncodingCollator:
    """A collator of tokens for rows that may have `text` in their place."""

    tokenizer: Tokenizer
    collator: Any

    @property
    def recipe(self) -> Any:
        return "encoding", self.tokenizer.fingerprint, self.tokenizer.config.max_length, getattr(self.collator, "recipe", None)

    @property
    def draws(self) -> bool:
        return getattr(self.collator, "draws", False)

    def __call__(self, rows: Sequence[Mapping[str, Any]], *, keys: Sequence[int] | None = None) -> Any:
        encoded = [row if INPUT_IDS in row else self._encoded(row, i) for i, row in enumerate(rows)]
        return self.collator(encoded, keys=keys) if self.draws else self.collator(encoded)

    def _encoded(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        text = row.get(TEXT)
        if not isinstance(text, str):
            at = place(f"row {number} of the batch", column=TEXT)
            raise SourceError(at=at, problem="no text, and no input_ids either", have=row, fix="Name the column of text 'text'.")
        ids = np.asarray(self.tokenizer.reference_encode(text), np.int64)
        return {**{name: value for name, value in row.items() if name != TEXT}, INPUT_IDS: ids}
