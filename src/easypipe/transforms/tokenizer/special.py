"""SpecialStrings: raw text with "<|endoftext|>" and the like is encoded, escaped or refused.

In this file:
    special: A token that tokenizer.json marks as special. Its string in a text becomes its id,
        which then ends documents or separates turns.
    unknown: The special token that the model itself writes for text that it has no piece for; its
        id alone says nothing about the text.
    doubtful: A text that may hold a special string, because its tokens include a special id.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from easypipe.core.errors import TokenizerError
from easypipe.core.values import Bools, Int64, attribute_of
from easypipe.transforms.tokenizer.ragged import Ids, Mask, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Reference

SpecialPolicy = Literal["allow", "escape", "error"]

MOST_RUNS = 8  # the most runs of neighbouring ids to compare with; more are looked up in a table
_UNKNOWN = "\U000f0000\U0010fffd"  # for private use: few vocabularies have a piece for it


# returns the tokens of text number i as ordinary text, and its mask (None: every token is a target)
Encode = Callable[[str, int], tuple[Sequence[int], Mask | None]]


class SpecialStrings:
    """The policy for special strings in raw text. Thread-safe.

    - allow: They become special tokens, and are counted; the string of the unknown token is not
      counted.
    - escape: They are ordinary text, as `tokenizers` encodes with encode_special_tokens=True; they
      do not become special ids.
    - error: A text that holds one is refused by the caller, who knows its row.

    Raises:
        TokenizerError: The policy is "escape", but the model itself turns the string of a special
            token into that token.
    """

    def __init__(
        self, reference: Reference, definition: str, policy: SpecialPolicy, name: str
    ) -> None:
        self.policy: SpecialPolicy = policy
        added = reference.get_added_tokens_decoder()
        self._strings: dict[int, str] = {
            i: token.content for i, token in added.items() if token.special
        }
        self._unknown = self._strings.keys() & set(
            reference.encode(_UNKNOWN, add_special_tokens=False).ids
        )
        self._unknown |= {
            i
            for i, text in self._strings.items()
            if text == attribute_of(reference.model, "unk_token")
        }
        self._runs, self._table = _runs(sorted(self._strings.keys() - self._unknown))
        self._definition = definition
        if policy == "escape":
            for text in self._strings.values():
                ids = self.escaped.encode(text, add_special_tokens=False).ids
                left = [
                    self._strings[i] for i in ids if i in self._strings and i not in self._unknown
                ]
                if left:
                    raise TokenizerError(
                        at=name,
                        problem="special_strings='escape' is not possible: its model has "
                        f"{left[0]!r} as a piece of ordinary text",
                        fix="Set special_strings='error'.",
                    )

    @property
    def recipe(self) -> tuple[str, ...]:
        """The policy's part of the encoding key; empty for "allow".

        So the keys of older caches stay the same.
        """
        return () if self.policy == "allow" else (self.policy,)

    @property
    def strings(self) -> tuple[str, ...]:
        """The strings of all special tokens."""
        return tuple(self._strings.values())

    @property
    def escaped(self) -> Reference:
        """The reference that treats special strings as ordinary text."""
        return _escaping(self._definition)

    def settle(
        self, texts: pa.LargeStringArray, tokens: Tokens, encode: Encode
    ) -> tuple[Tokens, Int64]:
        """Applies the policy to encoded texts.

        Args:
            tokens: Their tokens from the encoder, without special tokens around them.
            encode: Encodes a text, given with its number, as ordinary text.

        Returns:
            (the tokens under the policy, Int64[n] how many special strings are in each text).
        """
        found, doubtful = self.look(tokens.offsets, tokens.ids)
        if self.policy == "allow":
            return tokens, found
        others: dict[int, tuple[Sequence[int], Mask | None]] = {}
        for i in np.flatnonzero(doubtful).tolist():  # few texts
            text = texts[i].as_py()
            if self.policy == "error":
                found[i] = found[i] or self.first_in(text) is not None
                continue
            others[i] = encode(text, i)
            old = tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]]
            found[i] += max(0, self._unknown_in(old) - self._unknown_in(others[i][0]))
        return tokens.replaced(others), found

    def look(self, offsets: Int64, ids: Ids) -> tuple[Int64, Bools]:
        """Looks for special ids among the tokens of texts.

        Returns:
            (Int64[n] special tokens, Bool[n] doubtful texts). What the model writes for unknown
            text is doubtful and is not counted.
        """
        found = _in_each(offsets, _places(ids, self._runs, self._table))
        if self.policy == "allow" or not self._unknown:
            return found, found > 0
        return found, (found > 0) | (
            _in_each(offsets, np.flatnonzero(np.isin(ids, list(self._unknown)))) > 0
        )

    def _unknown_in(self, ids: Ids | Sequence[int]) -> int:
        return int(np.isin(ids, list(self._unknown)).sum())

    def first_in(self, text: str) -> str | None:
        """Returns a special string that `text` holds, or None."""
        return next((one for one in self._strings.values() if one in text), None)


@functools.lru_cache(maxsize=1)
def _escaping(definition: str) -> Reference:
    """Loads the tokenizer so that it treats special strings as ordinary text."""
    import tokenizers

    reference = tokenizers.Tokenizer.from_str(definition)
    reference.no_truncation()
    reference.no_padding()
    reference.encode_special_tokens = True
    return reference


def _runs(ids: list[int]) -> tuple[list[tuple[int, int]], Bools | None]:
    """Returns ranges of neighbouring ids, and a table over all ids if there are many ranges."""
    table = np.zeros(ids[-1] + 1 if ids else 0, np.bool_)
    table[ids] = True
    edges = (
        np.flatnonzero(np.diff(table.astype(np.int8), prepend=0, append=0)).reshape(-1, 2).tolist()
    )
    return [(a, b) for a, b in edges], table if len(edges) > MOST_RUNS else None


def _places(ids: Ids, runs: list[tuple[int, int]], table: Bools | None) -> Int64:
    """Returns the positions of the ids in one of the ranges."""
    if not ids.size or not runs:
        return np.zeros(0, np.int64)
    if table is not None:
        return np.flatnonzero(table[np.minimum(ids, len(table) - 1)] & (ids < len(table)))
    # Special tokens are mostly the first or the last of a vocabulary: one or two comparisons are
    # enough.
    most = int(ids.max())
    runs = [(a, b) for a, b in runs if a <= most]
    least = int(ids.min()) if runs else 0
    places = [np.flatnonzero((ids >= a) & (ids < b)) for a, b in runs if least < b]
    return np.concatenate(places) if places else np.zeros(0, np.int64)


def _in_each(offsets: Int64, places: Int64) -> Int64:
    """Returns Int64[n]: how many of the positions are in each document."""
    if not places.size:
        return np.zeros(len(offsets) - 1, np.int64)
    return np.bincount(
        np.searchsorted(offsets, places, side="right") - 1, minlength=len(offsets) - 1
    ).astype(np.int64)
