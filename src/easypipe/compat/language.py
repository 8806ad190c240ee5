"""Document 004: LanguageModelingDataCollator, rows of tokens or of text → batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from easypipe.compat.collators import called, create_causal_lm_collate, draws, recipe_of
from easypipe.compat.foreign import TEXT, Batch, Row, Rows, TokenizerLike, as_tokenizer, pad_of
from easypipe.compat.masking import create_masked_lm_collate
from easypipe.core.errors import ConfigError, SourceError, place
from easypipe.core.schema import INPUT_IDS
from easypipe.transforms.tokenizer.tokenizer import Tokenizer


class LanguageModelingDataCollator:
    """The collator of text that CollatorRegistry chooses, for rows of `text` or of tokens.

    It is `create_causal_lm_collate`, or with mlm `create_masked_lm_collate`.

    tokenizer: encodes rows that have `text` in place of `input_ids`, and says which token pads.
    max_length: the width of every batch, at which texts are cut. options: of the function that is
    named above.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike = None,
        mlm: bool = False,
        mlm_probability: float | None = None,
        *,
        max_length: int | None = None,
        pad_token_id: int | None = None,
        **options: Any,
    ) -> None:
        if mlm_probability is not None:
            if not mlm:
                raise ConfigError(
                    at="mlm_probability",
                    problem="has no effect without mlm",
                    fix="Leave it out, or set mlm=True.",
                )
            options["probability"] = mlm_probability
        known: Any = None if tokenizer is None else as_tokenizer(tokenizer)
        if pad_token_id is None and known is not None and not mlm:
            pad_token_id = pad_of(known)
        options |= {} if pad_token_id is None else {"pad_token_id": pad_token_id}
        self._collate = (
            create_masked_lm_collate(known, max_length=max_length, **options)
            if mlm
            else create_causal_lm_collate(max_length=max_length, **options)
        )
        self._tokenizer = None if known is None else as_tokenizer(tokenizer, max_length=max_length)

    @property
    def recipe(self) -> object:
        own = recipe_of(self._collate)
        if self._tokenizer is None:
            return own
        length = None
        if isinstance(self._tokenizer, Tokenizer):
            length = self._tokenizer.config.max_length
        return "encoding", self._tokenizer.fingerprint, length, own

    @property
    def draws(self) -> bool:
        return draws(self._collate)

    def __call__(self, rows: Rows, *, keys: Sequence[int] | None = None) -> Batch:
        if self._tokenizer is not None:
            rows = [
                row if INPUT_IDS in row else self._encoded(row, i) for i, row in enumerate(rows)
            ]
        return called(self._collate, rows, keys)

    def _encoded(self, row: Row, number: int) -> Row:
        text = row.get(TEXT)
        if not isinstance(text, str) or self._tokenizer is None:
            raise SourceError(
                at=place(f"row {number} of the batch", column=TEXT),
                problem="no text, and no input_ids either",
                have=row,
                fix="Name the column of text 'text'.",
            )
        others = {name: value for name, value in row.items() if name != TEXT}
        return others | {INPUT_IDS: np.asarray(self._tokenizer.reference_encode(text), np.int64)}


__all__ = ["LanguageModelingDataCollator"]
