"""Checks that gigatoken returns the ids of `tokenizers`, on hostile texts and data; verdicts.

A verdict is kept for a tokenizer and the versions of both packages. A refuted verdict stays
refuted: see Tokenizer.refute.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from easypipe.core.checked import recall_checked, remember_checked, shaped
from easypipe.core.config import digest, to_dict
from easypipe.core.random import fold, permute
from easypipe.transforms.tokenizer import fast

PROOF_FORMAT = 1  # raised when the texts of `torture` change: older verdicts are then forgotten

# These fields are read from files without a checksum too, so that a refuted verdict stays refuted.
_OLDER = ("equal", "why", "after_use")

_PIECES = (
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\xa0", "\u3000", "\u2028", "\u200b",
    "\u200d", "\ufeff", "\x00", "\x07", "\x1c", "\x7f", "\x85", "a", "A", "Hello", " world",
    "don't", "DON'T", "we'll've", "I’m", "'s", "''", "naïve", "nai\u0308ve", "Å", "A\u030a", "Å",
    "ﬁ", "ſ", "İ", "ı", "ß", "ǆ", "０１２", "٣٤", "½", "²", "1", "12", "123", "1234", "12345",
    "1,234.56", "3.14e-10", "0x1F", "$9.99", "50%", "...", "…", "!?", "--", "—", "((()))",
    "def f(x):\n    return x\n", "\tif (a != b) {\n\t\tb++;\n\t}", "<a href='x'>",
    "https://x.org/?a=b&c=%20", "a_b-c", "camelCaseXMLHttp", "日本語", "日本語のテキスト。",
    "中文字符，测试", "한국어", "ไทยภาษา", "\u0939\u093f\u0928\u094d\u0926\u0940", "العربية",
    "עברית", "\u0e20\u0e39", "Ελληνικά", "русский", "𝔘𝔫𝔦", "😀",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3fd",
    "\U0001f3f3\ufe0f\u200d\U0001f308", "🇩🇪🇫🇷", "e\u0301\u0301\u0301", "ﷺ", "\u202eabc", "▁",
    "▁▁a", "Ġ", "Ċ", "<unk>", "<s>", "</s>", "<pad>", "<|endoftext|>", "<|im_start|>user\n",
    "[INST]", "[CLS]", "<0x0A>", "##a", "\ud7ff", "\ue000", "\uffff", "\U0001f9d1\u200d\U0001f680",
    "\U0010ffff", "x" * 300, " " * 130, "\n" * 70, "ab" * 200, "é" * 100, "1" * 90, "!" * 80,
    "a b c d e f g", " leading", "trailing ", "\u0d9a\u0dca\u200d\u0dbb",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Whether gigatoken was found equal to the reference, and why.

    Attributes:
        equal: Whether it may be used.
        why: What it was compared on, or where it differs.
        after_use: Whether gigatoken had already written tokens of this tokenizer when it was found
            wrong.
    """

    equal: bool
    why: str
    after_use: bool = False


def torture(special_strings: Sequence[str]) -> pa.LargeStringArray:
    """Returns texts that have broken tokenizers before.

    They are every piece alone, several pieces side by side in a fixed order, and the tokenizer's
    own special strings in running text.
    """
    texts = list(_PIECES)
    count = len(_PIECES)
    order = np.arange(4 * count)
    for arity in (2, 5):
        picks = [
            permute(order, len(order), fold(0, "torture", arity, i)) % count for i in range(arity)
        ]
        texts += [
            "".join(_PIECES[i] for i in row)
            for row in zip(*(p.tolist() for p in picks), strict=True)
        ]
    for special in special_strings[:64]:
        texts += [
            special,
            f"a{special}b",
            f" {special} ",
            special * 2,
            f"{special[:-1]} {special}\n",
            special.upper(),
        ]
    for one, two in itertools.islice(itertools.pairwise(special_strings), 32):
        texts += [one + two, f"{one} {two}"]
    return pa.array(texts, pa.large_string())


def prove(
    engine: fast.FastEngine,
    reference: Callable[[list[str]], list[list[int]]],
    texts: pa.LargeStringArray,
    kind: str,
) -> Verdict:
    """Compares gigatoken with the reference on some texts.

    Args:
        engine: gigatoken.
        reference: Returns the ids of texts by `tokenizers`.
        kind: What the texts are, for the message: "hostile texts", "texts of dataset x".
    """
    offsets, ids = engine.encode(texts)
    plain: list[str] = texts.to_pylist()
    for i, (text, expected) in enumerate(zip(plain, reference(plain), strict=True)):
        found = ids[offsets[i] : offsets[i + 1]].tolist()
        if found != expected:
            pairs = itertools.zip_longest(found, expected)
            at = next(k for k, (one, other) in enumerate(pairs) if one != other)
            why = f"differs from `tokenizers` at token {at} of {_short(text)} ({kind})"
            return Verdict(False, f"gigatoken {fast.version()} {why}")
    why = f"equals `tokenizers` {_reference_version()} on {len(plain)} {kind}"
    return Verdict(True, f"gigatoken {fast.version()} {why}")


def recall(folder: Path | None, fingerprint: str) -> Verdict | None:
    """Returns the verdict that `remember` kept; None if there is none or its file is damaged."""
    if folder is None:
        return None
    return recall_checked(
        _memo(folder, fingerprint),
        lambda kept: shaped(Verdict, kept),
        what="the proof of a fast tokenizer",
        older=_OLDER,
    )


def remember(folder: Path | None, fingerprint: str, verdict: Verdict) -> None:
    """Keeps a verdict in the cache folder; with None it does nothing."""
    if folder is not None:
        remember_checked(_memo(folder, fingerprint), to_dict(verdict))


def _memo(folder: Path, fingerprint: str) -> Path:
    return (
        folder
        / "proofs"
        / f"{digest(PROOF_FORMAT, fingerprint, fast.version(), _reference_version())}.json"
    )


@functools.cache
def _reference_version() -> str:
    return importlib.metadata.version("tokenizers")


def _short(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")
