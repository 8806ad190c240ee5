"""LanguageModelingDataCollator: rows of tokens or of text → batches to train a language model
on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from easypipe.compat.collators import create_causal_lm_collate
from easypipe.compat.masking import create_masked_lm_collate
from easypipe.compat.text_rows import as_tokenizer, encoding, pad_of
from easypipe.core.errors import ConfigError


class LanguageModelingDataCollator:
    """What CollatorRegistry chooses for text: `create_causal_lm_collate`, or with mlm
    `create_masked_lm_collate`, for rows of `text` too.

    tokenizer: encodes rows that have `text` in place of `input_ids`, and says which token pads.
    max_length: the width of every batch, at which texts are cut. options: of the function that is
    named above.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        mlm: bool = False,
        mlm_probability: float | None = None,
        *,
        max_length: int | None = None,
        pad_token_id: int | None = None,
        **options: Any,
    ) -> None:
        known = None if tokenizer is None else as_tokenizer(tokenizer)
        if mlm_probability is not None:
            if not mlm:
                raise ConfigError(
                    at="mlm_probability",
                    problem="has no effect without mlm",
                    fix="Leave it out, or set mlm=True.",
                )
            options["probability"] = mlm_probability
        if pad_token_id is None and known is not None and not mlm:
            pad_token_id = pad_of(known)
        if pad_token_id is not None:
            options["pad_token_id"] = pad_token_id
        made = (
            create_masked_lm_collate(known, max_length=max_length, **options)
            if mlm
            else create_causal_lm_collate(max_length=max_length, **options)
        )
        self._collate: Any = encoding(tokenizer, max_length, made)

    @property
    def recipe(self) -> Any:
        return self._collate.recipe

    @property
    def draws(self) -> bool:
        return getattr(self._collate, "draws", False)

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], *, keys: Sequence[int] | None = None
    ) -> dict[str, Any]:
        return self._collate(rows, keys=keys) if self.draws else self._collate(rows)


__all__ = ["LanguageModelingDataCollator"]
