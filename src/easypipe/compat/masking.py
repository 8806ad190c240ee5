"""Document 004, masked language modelling: which tokens or whole words are hidden, and how.

Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers (NAACL 2019), 3.1: of the
chosen tokens, 80 % become the mask token, 10 % a random token, and 10 % are unchanged. The draws
are computed from a row's key, so they do not depend on NumPy's generators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from easypipe.compat.collators import (
    Padding,
    Side,
    Tensors,
    integers,
    is_number,
    require_id,
    targets_of,
    token_columns,
)
from easypipe.compat.foreign import OwnTokenizer, Rows, TokenizerLike, as_tokenizer
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, TokenizerError, place, require
from easypipe.core.random import fold, mix64
from easypipe.core.schema import ATTENTION_MASK, IGNORE, INPUT_IDS, LABELS, OutputSchema
from easypipe.core.values import Batch, Bools, Identity, Int64, Row
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

WORD_IDS = "word_ids"
# A chosen token becomes the mask token if its draw is below the first number, a random token if it
# is below the second, and is unchanged otherwise.
MASKED, REPLACED = 0.8, 0.9


@dataclass(frozen=True, eq=False)
class MaskedLMCollator:
    """The collator of create_masked_lm_collate.

    Law: the result for a row depends only on the row and its key.
    """

    padding: Padding
    mask_token_id: int
    vocab_size: int
    special: Bools  # Bool[vocab]: tokens never chosen and never drawn
    probability: float
    # Bool[vocab]: tokens that begin a word; None: tokens are chosen one by one, or rows have
    # word_ids.
    starts: Bools | None
    whole_word: bool
    seed: int

    draws = True

    @property
    def recipe(self) -> Identity:
        words = [self.whole_word, self.starts is not None]
        special = np.flatnonzero(self.special).tolist()
        return (
            "masked_lm",
            self.padding,
            self.mask_token_id,
            self.vocab_size,
            special,
            self.probability,
            words,
            self.seed,
        )

    def __call__(self, rows: Rows, *, keys: Sequence[int] | None = None) -> Batch:
        """Makes a batch; `keys` are the random keys of the rows."""
        rule, columns = self.padding, token_columns(rows)
        targets = targets_of(columns)
        width = rule.width(columns[INPUT_IDS])
        if keys is None:  # called directly: equal rows are masked alike
            keys = [fold(self.seed, digest(ids.tolist())) for ids in columns[INPUT_IDS]]
        hidden, labels = [], []
        # Every row has its own draws.
        for i, (row, key) in enumerate(zip(rows, keys, strict=True)):
            ids = columns[INPUT_IDS][i]
            self._check(ids, i)
            allowed = (columns[ATTENTION_MASK][i] != 0) & (targets[i] != IGNORE)
            words, own = self._words(row, ids, i), fold(self.seed, "masked_lm", key)
            shown, said = self._mask(ids, allowed, words, own)
            hidden.append(shown)
            labels.append(said)
        padded = rule.fill(labels, width, IGNORE)
        return rule.finish(
            {
                INPUT_IDS: rule.fill(hidden, width, rule.pad_token_id),
                ATTENTION_MASK: rule.fill(columns[ATTENTION_MASK], width, 0),
                LABELS: np.where(padded == IGNORE, rule.label_pad_token_id, padded),
            }
        )

    def _check(self, ids: Int64, number: int) -> None:
        """Raises SourceError if a token of a row is outside the vocabulary."""
        outside = np.flatnonzero(ids >= self.vocab_size)
        if outside.size:
            raise SourceError(
                at=place(f"row {number} of the batch", column=INPUT_IDS),
                problem=f"token {outside[0]}: {ids[outside[0]]} is outside the vocabulary of "
                f"{self.vocab_size}",
                fix="Give the vocab_size of the tokenizer that made the rows.",
            )

    def _mask(
        self,
        ids: Int64,
        allowed: Bools,
        words: Int64,
        key: int,
    ) -> tuple[Int64, Int64]:
        """Returns (the tokens to show, the tokens to predict, -100 elsewhere), Int64[n] each."""
        chosen = (_draw(key, "choose", words) < self.probability) & ~self.special[ids] & allowed
        places = np.arange(ids.size)
        how = _draw(key, "how", places)
        ordinary = np.flatnonzero(~self.special)
        other = ordinary[(_draw(key, "token", places) * ordinary.size).astype(np.int64)]
        shown = np.where(chosen & (how < MASKED), self.mask_token_id, ids)
        shown = np.where(chosen & (how >= MASKED) & (how < REPLACED), other, shown)
        return shown, np.where(chosen, ids, IGNORE)

    def _words(self, row: Row, ids: Int64, number: int) -> Int64:
        """Returns the word of each token, Int64[n].

        It is the token's position if tokens are chosen one by one.

        Raises:
            SourceError: The words are unknown.
        """
        if not self.whole_word:
            return np.arange(ids.size)
        if row.get(WORD_IDS) is not None:
            # None: the token is not in a word
            own = [-1 - i if word is None else word for i, word in enumerate(row[WORD_IDS])]
            return integers({WORD_IDS: own}, WORD_IDS, number, like=ids)
        if self.starts is None:
            at = place(f"row {number} of the batch", column=WORD_IDS)
            raise SourceError(
                at=at,
                problem="whole_word needs it if there is no tokenizer",
                fix="Give the word of each token.",
            )
        return np.cumsum(self.starts[ids] | self.special[ids], dtype=np.int64)


def create_masked_lm_collate(
    tokenizer: TokenizerLike = None,
    *,
    mask_token_id: int | None = None,
    vocab_size: int | None = None,
    special_token_ids: Sequence[int] = (),
    probability: float = 0.15,
    whole_word: bool = False,
    seed: int = 0,
    pad_token_id: int | None = None,
    label_pad_token_id: int = IGNORE,
    padding_side: Side = "right",
    max_length: int | None = None,
    return_tensors: Tensors = True,
    schema: OutputSchema | None = None,
) -> MaskedLMCollator:
    """Makes a collator for masked language models: batches of tokens, some of them hidden.

    Batches have `input_ids`, `attention_mask` and `labels`, Int32[B, T]; labels are the chosen
    tokens, else -100, not shifted. Each token is chosen with `probability`; with whole_word each
    word is, and each of its tokens is then replaced by the 80/10/10 rule. Special tokens, padding,
    and tokens with loss_mask 0 or label -100 are never chosen. In a loader, a row's draws depend on
    seed, pass and row, so they differ between passes; in a direct call, they depend on `seed` and
    the row's tokens.

    Args:
        tokenizer: Supplies mask token, vocabulary, special tokens, padding and word boundaries.
            Alternatively, give mask_token_id, vocab_size, special_token_ids and pad_token_id, and
            for whole_word rows with a column `word_ids`.

    Raises:
        ConfigError: Something is missing.
    """
    known = None if tokenizer is None else as_tokenizer(tokenizer)
    problem = f"{probability!r} is not a share of tokens"
    fits = is_number(probability) and 0 < probability < 1
    require(fits, "probability", problem, "Give one between 0 and 1.")
    require(is_number(seed, int), "seed", f"{seed!r} is no whole number", "Give 0 or another.")
    special, starts = list(special_token_ids), None
    if known is not None:
        own, masks = _specials(known)
        special += own
        mask_token_id = masks if mask_token_id is None else mask_token_id
        vocab_size = known.vocab_size if vocab_size is None else vocab_size
        pad_token_id = known.pad_token_id if pad_token_id is None else pad_token_id
        if isinstance(known, Tokenizer) and whole_word:
            starts = word_starts(known)
    if mask_token_id is None or vocab_size is None:
        fix = "Give it, or a tokenizer that has one."
        raise ConfigError(
            at="mask_token_id" if mask_token_id is None else "vocab_size",
            problem="is not known",
            fix=fix if known is None else f"{known.name} has none: give it.",
        )
    require_id(vocab_size, "vocab_size")
    is_special = _special(mask_token_id, special, vocab_size)
    pad = pad_token_id or 0
    rule = (pad, label_pad_token_id, padding_side, max_length, return_tensors, schema)
    how = (is_special, probability, starts, whole_word, seed)
    return MaskedLMCollator(Padding(*rule), mask_token_id, vocab_size, *how)


def _specials(tokenizer: Tokenizer | OwnTokenizer) -> tuple[list[int], int | None]:
    """Returns the ids of a tokenizer's special tokens, and the id of its mask token."""
    if isinstance(tokenizer, OwnTokenizer):
        return tokenizer.special_token_ids, tokenizer.mask_token_id
    by_name = {tokenizer.token(i): i for i in range(tokenizer.vocab_size)}
    own = tokenizer.special_strings.get("mask_token", "[MASK]")
    special = [by_name[token] for token in tokenizer.special_tokens]
    return special, by_name.get(own, by_name.get("<mask>"))


def _special(mask_token_id: int, special: Sequence[int], vocab_size: int) -> Bools:
    """Returns Bool[vocab_size]: the tokens that are never hidden.

    Raises:
        ConfigError: An id is outside the vocabulary, or all tokens are special.
    """
    for name, ids in (("mask_token_id", [mask_token_id]), ("special_token_ids", special)):
        for number in ids:
            require(
                is_number(number, int) and 0 <= number < vocab_size,
                name,
                f"{number} is outside the vocabulary of {vocab_size}",
                "Give a larger vocab_size.",
            )
    is_special = np.zeros(vocab_size, np.bool_)
    is_special[[*special, mask_token_id]] = True
    require(
        not is_special.all(),
        "special_token_ids",
        f"all {vocab_size} tokens are special: none can be hidden",
    )
    return is_special


def _draw(key: int, what: str, numbers: Int64) -> NDArray[np.float64]:
    """Returns uniform draws on [0, 1), Float64[n], one for each of `numbers`.

    Equal numbers have equal draws.
    """
    words = mix64(
        numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(fold(key, what))
    )
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


__all__ = ["MaskedLMCollator", "create_masked_lm_collate"]


CONTINUES = "##"  # WordPiece: the token continues a word
BEGINS = ("▁", "Ġ")  # SentencePiece, byte-level BPE: a space before it
BREAKS = ("Ċ", "ĉ", "\n", "\t")  # byte-level newline and tab


def word_starts(tokenizer: Tokenizer) -> Bools:
    """Returns Bool[vocab]: whether a token always begins a word, which special tokens do.

    Raises:
        TokenizerError: The vocabulary does not mark where words begin.
    """
    tokens = [tokenizer.token(i) or "" for i in range(tokenizer.vocab_size)]
    special = set(tokenizer.special_tokens)
    if any(token.startswith(CONTINUES) for token in tokens):
        starts = [not token.startswith(CONTINUES) for token in tokens]
    elif any(token.startswith(BEGINS) for token in tokens):
        starts = [token.startswith((*BEGINS, *BREAKS)) or token in special for token in tokens]
    else:
        raise TokenizerError(
            at=tokenizer.name,
            problem="nothing in its vocabulary tells where words begin",
            fix="Give rows a column word_ids, or leave whole_word out.",
        )
    return np.array(starts, np.bool_)
