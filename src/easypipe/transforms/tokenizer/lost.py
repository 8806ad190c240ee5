"""Counts the characters that a tokenizer silently drops, and warns about them.

They are the characters for which its model has no piece, no unknown token and no bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Reference

logger = logging.getLogger("easypipe")

# A text with every byte that can occur in UTF-8; vocabularies may lack the other bytes.
_EVERY_BYTE = "".join(
    map(
        chr,
        [
            *range(0x800),
            0x800,
            *range(0x1000, 0x10000, 0x1000),
            *range(0x10000, 0x110000, 0x40000),
            0x100000,
        ],
    )
)


class LostCharacters:
    """A counter of the characters that a tokenizer drops, which warns at the first one.

    Thread-safe: two threads may repeat the same work.

    Only BPE drops characters; the other models of `tokenizers` raise. A character is lost if the
    normalizer and the pre-tokenizer turn it into a text with a character that the vocabulary lacks.
    """

    def __init__(self, reference: Reference, name: str) -> None:
        import tokenizers

        self._reference, self._name = reference, name
        self._lost: dict[str, bool] = {}
        self._warned = False
        model = reference.model
        self.possible = isinstance(model, tokenizers.models.BPE) and model.unk_token is None
        if self.possible:
            written = tokenizers.pre_tokenizers.ByteLevel(
                add_prefix_space=False, use_regex=False
            ).pre_tokenize_str(_EVERY_BYTE)
            fallback = (f"<0x{byte:02X}>" for byte in set(_EVERY_BYTE.encode()))
            complete = (
                fallback
                if model.byte_fallback
                else {piece for text, _ in written for piece in text}
            )
            self.possible = any(reference.token_to_id(piece) is None for piece in complete)
            self._around = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""

    def count(self, texts: Iterable[str]) -> int:
        """Returns how many characters of the texts become no token."""
        lost = 0
        for text in texts if self.possible else ():
            for character in set(text):
                if character not in self._lost:
                    self._lost[character] = self._is_lost(character)
                if self._lost[character]:
                    lost += text.count(character)
                    self._warn(character)
        return lost

    def _is_lost(self, character: str) -> bool:
        """Whether a character has a part for which the vocabulary has no piece and no bytes."""
        reference, (prefix, suffix) = self._reference, self._around
        text = (
            character
            if reference.normalizer is None
            else reference.normalizer.normalize_str(character)
        )
        pieces = (
            [text]
            if reference.pre_tokenizer is None
            else [piece for piece, _ in reference.pre_tokenizer.pre_tokenize_str(text)]
        )
        forms = [
            (part, prefix + part, part + suffix, prefix + part + suffix)
            for piece in pieces
            for part in piece
        ]
        return any(
            all(reference.token_to_id(form) is None for form in some) for some in forms
        ) and not self._in_bytes("".join(pieces))

    def _in_bytes(self, text: str) -> bool:
        """Whether the model falls back to the bytes of a text, and has tokens for them all."""
        known = (
            self._reference.token_to_id(f"<0x{byte:02X}>") is not None
            for byte in text.encode("utf-8", "surrogatepass")
        )
        return bool(self._reference.model.byte_fallback) and all(known)

    def _warn(self, character: str) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "tokenizer %s: it has no token for %r (U+%04X), no unknown token and no bytes to fall "
            "back to: such characters are lost; "
            "the ledger counts them",
            self._name,
            character,
            ord(character),
        )
