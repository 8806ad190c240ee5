"""FillInTheMiddle: writes a share of documents as prefix, suffix and middle, with its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import xxhash

from easypipe.core.config import digest
from easypipe.core.errors import TokenizerError, require, require_columns
from easypipe.core.random import child, fold
from easypipe.transforms.chat.columns import is_text
from easypipe.transforms.columns.base import ColumnTransform, Rows, overlaid
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

# The names that published models have for the tokens before the prefix, the suffix and the middle.
KNOWN = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


class FillInTheMiddle(ColumnTransform):
    """A transform that writes a share of documents as prefix, suffix and middle.

    `FillInTheMiddle("my-tokenizer", rate=0.5)`

    PSM writes PRE prefix SUF suffix MID middle; SPM writes PRE SUF suffix MID prefix middle. This
    is the second variant of SPM of Bavarian et al., Efficient Training of Language Models to Fill
    in the Middle, 2022. Cuts may be between any two characters. Nothing is lost: see `restored`.
    Empty documents, and documents that already hold one of the tokens, are not changed.

    Args:
        tokenizer: The tokenizer whose special tokens are written.
        rate: The share of documents.
        spm_rate: The share of those that are SPM.
        seed: Decides, with the text itself, which documents are cut, and where.
        column: The column of text.
        tokens: The special tokens before prefix, suffix and middle, if the tokenizer's names for
            them differ from those of known models.

    Raises:
        TokenizerError: The tokenizer lacks the tokens.
    """

    def __init__(
        self,
        tokenizer: TokenizerConfig | str,
        *,
        rate: float = 0.5,
        spm_rate: float = 0.5,
        seed: int = 0,
        column: str = "text",
        tokens: Sequence[str] | None = None,
    ) -> None:
        for name, value in (("rate", rate), ("spm_rate", spm_rate)):
            require(
                0 <= value <= 1,
                f"FillInTheMiddle.{name}",
                f"{value} is not a share",
                "Give a number from 0 to 1.",
            )
        require(
            tokens is None or (len(tokens) == 3 and len(set(tokens)) == 3 and all(tokens)),
            "FillInTheMiddle.tokens",
            f"{tokens}",
            "Give those of prefix, suffix and middle.",
        )
        loaded = load_tokenizer(tokenizer)
        special = loaded.special_tokens
        require(
            loaded.special.policy == "allow",
            "FillInTheMiddle.tokenizer",
            f"special_strings={loaded.special.policy!r} takes the tokens for text",
            "Set special_strings='allow'.",
        )
        named = [tuple(tokens)] if tokens is not None else list(KNOWN)
        found = next((names for names in named if all(name in special for name in names)), None)
        if found is None:
            lacking = ", ".join(name for name in named[0] if name not in special)
            problem = f"no special tokens for prefix, suffix and middle: it lacks {lacking}"
            raise TokenizerError(
                at=loaded.name,
                problem=problem,
                fix="Take a tokenizer of a code model, or add the tokens and name them.",
            )
        self.prefix, self.suffix, self.middle = found
        self.rate, self.spm_rate, self.seed, self.column = rate, spm_rate, seed, column
        self.reads = (column,)

    @property
    def fingerprint(self) -> str:
        return digest(
            "fill in the middle",
            2,
            self.prefix,
            self.suffix,
            self.middle,
            self.rate,
            self.spm_rate,
            self.seed,
            self.column,
        )

    def columns(self, before: pa.Schema) -> pa.Schema:
        require_columns([self.column], before.names, str(self))
        kind = before.field(self.column).type
        require(
            is_text(kind) or pa.types.is_null(kind),
            str(self),
            f"column {self.column!r} holds {kind}, not text",
            "Name a column of text.",
        )
        return overlaid(before, {self.column: pa.large_string()})

    def rows(self, rows: Rows) -> Rows:
        rows = rows.with_texts([self.column])
        texts = rows.batch.column(self.column).cast(pa.large_string()).to_pylist()
        turned = [None if text is None else self.turned(text) for text in texts]
        return self.overlaid(rows, {self.column: pa.array(turned, pa.large_string())})

    narrow = ColumnTransform.narrow  # it uses `reads`; named here for readers of this class

    def turned(self, text: str) -> str:
        """Returns what one document becomes."""
        key = fold(self.seed, "fill in the middle", xxhash.xxh3_128_hexdigest(text.encode()))
        share = [child(key, i) / 2**64 for i in range(2)]
        if (
            not text
            or share[0] >= self.rate
            or any(token in text for token in (self.prefix, self.suffix, self.middle))
        ):
            return text
        first, second = sorted(child(key, i) % (len(text) + 1) for i in (2, 3))
        before, gap, behind = text[:first], text[first:second], text[second:]
        if share[1] < self.spm_rate:
            return f"{self.prefix}{self.suffix}{behind}{self.middle}{before}{gap}"
        return f"{self.prefix}{before}{self.suffix}{behind}{self.middle}{gap}"

    def restored(self, text: str) -> str:
        """Returns the document from which `turned` made this text."""
        if not text.startswith(self.prefix) or self.suffix not in text or self.middle not in text:
            return text
        before, _, rest = text.removeprefix(self.prefix).partition(self.suffix)
        behind, _, gap = rest.partition(self.middle)
        # With SPM, `before` is empty here, and `gap` begins with the prefix: the order is right in
        # both cases.
        return before + gap + behind

    def __repr__(self) -> str:
        return f"FillInTheMiddle(rate={self.rate}, spm_rate={self.spm_rate})"
