"""Which tokens of a vocabulary begin a word, by the three marks that tokenizers use."""

from __future__ import annotations

import numpy as np

from easypipe.core.errors import TokenizerError
from easypipe.core.values import Bools
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

CONTINUES = "##"  # WordPiece: what does not begin a word
BEGINS = ("▁", "Ġ")  # SentencePiece, and byte-level BPE: a space in front
BREAKS = ("Ċ", "ĉ", "\n", "\t")  # byte-level newline and tab


def word_starts(tokenizer: Tokenizer) -> Bools:
    """Bool[vocab]: whether a token begins a word wherever it stands; special tokens do.

    Raises TokenizerError where no mark is known.
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
