"""Converts a tokenizer.json to a GGUF file's tables; refuses rules that llama.cpp lacks.

Source of the rules: llama.cpp, `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from easypipe.core.errors import TokenizerError
from easypipe.core.values import JsonObject
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("easypipe")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens in GGUF
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as in SentencePiece
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_WORDS = _BYTES | {"use_regex": True}


def _split(numbers: str) -> JsonObject:
    """Returns the split rule of Qwen and Llama 3, which keep this many digits together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# llama.cpp's name of the rule by which text is split into words -> the steps of a tokenizer.json,
# and whether words that are tokens are taken without merges
_CUTS: dict[str, tuple[list[JsonObject], bool]] = {
    "gpt-2": ([_WORDS], False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, _WORDS], False),
    "qwen2": ([_split(r"\p{N}"), _BYTES], False),
    "llama-bpe": ([_split(r"\p{N}{1,3}"), _BYTES], True),
    "smaug-bpe": ([_split(r"\p{N}{1,3}"), _BYTES], False),
}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_METASPACE = {  # as transformers 5 writes Llama 2's
    "type": "Metaspace",
    "replacement": _SPACE,
    "prepend_scheme": "always",
    "split": False,
}
_NO_CUT = {  # Gemma's, which finds nothing: its spaces were replaced before
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tables of a GGUF file: which tokens there are, and how text is tokenized.

    Attributes:
        kind: "gpt2" merges bytes by rank, "llama" merges pieces of text by score.
        cut: llama.cpp's name of the rule by which text is split into words.
        tokens: The spelling of each token.
        types: The type of each token.
        merges: The merges of gpt2.
        scores: The scores of llama.
        space_prefix: Whether a space is put before a text.
        begins: The token that is put before every text.
        ends: The token that is put after every text.
    """

    kind: Literal["gpt2", "llama"]
    cut: str
    tokens: list[str] = field(repr=False)
    types: list[int] = field(repr=False)
    merges: list[str] = field(repr=False)
    scores: list[float] = field(repr=False)
    space_prefix: bool
    begins: int | None
    ends: int | None


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Returns the tables of `tokenizer` for a model of `size` tokens.

    It warns if the rules differ in rare texts.

    Raises:
        TokenizerError: llama.cpp does not support the tokenizer's rules.
    """
    parts = json.loads(tokenizer.definition_with(()))
    model, at = parts["model"], tokenizer.name
    _require(model["type"] == "BPE", at, f"llama.cpp has no {model['type']} as transformers has it")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        _require(not model.get(key), at, f"llama.cpp does not support {key} ({model.get(key)!r})")
    for token in parts["added_tokens"]:
        flags = [flag for flag in ("single_word", "lstrip", "rstrip") if token[flag]]
        _require(
            not flags, at, f"llama.cpp does not support {flags} of the token {token['content']!r}"
        )
    _require(
        tokenizer.vocab_size <= size,
        at,
        f"has {tokenizer.vocab_size} tokens, and the model {size}",
        "Give the tokenizer that the model was trained with.",
    )
    before, after = tokenizer.surrounding
    _require(
        len(before) <= 1 and len(after) <= 1,
        at,
        f"puts {[*map(tokenizer.token, [*before, *after])]} around every text, and llama.cpp knows "
        "one token before it and one behind",
    )
    steps = _steps(parts["pre_tokenizer"])
    in_bytes = any(step["type"] == "ByteLevel" for step in steps)
    _require(model["merges"], at, "has no merges, and llama.cpp needs some")
    types = _types(parts, size)
    tokens = _tokens(parts, types, in_bytes)
    _require(len({*tokens}) == size, at, "two of its tokens would have one spelling in a GGUF file")
    cut = _cut(parts, steps, at) if in_bytes else "default"
    space_prefix = not in_bytes and _prepends(parts, steps, at)
    return Vocabulary(
        kind="gpt2" if in_bytes else "llama",
        cut=cut,
        tokens=tokens,
        types=types,
        merges=[f"{left} {right}" for left, right in model["merges"]] if in_bytes else [],
        scores=[] if in_bytes else _scores(model, types, tokens, at),
        space_prefix=space_prefix,
        begins=next(iter(before), None),
        ends=next(iter(after), None),
    )


def _require(holds: object, at: str, problem: str, fix: str | None = None) -> None:
    """Raises a TokenizerError if a condition does not hold."""
    if not holds:
        fix = fix or "Export without --gguf, for transformers."
        raise TokenizerError(at=at, problem=problem, fix=fix)


def _steps(part: JsonObject | None) -> list[JsonObject]:
    """Returns the pre-tokenizers or normalizers of a tokenizer.json as a flat list."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        inner = part.get("pretokenizers") or part.get("normalizers") or []
        return [step for one in inner for step in _steps(one)]
    return [{key: value for key, value in part.items() if key != "trim_offsets"}]


def _types(parts: JsonObject, size: int) -> list[int]:
    """Returns the GGUF type of each token."""
    types, model = [UNUSED] * size, parts["model"]
    for word, number in model["vocab"].items():
        of_byte = model["byte_fallback"] and re.fullmatch("<0x[0-9A-F]{2}>", word)
        types[number] = BYTE if of_byte else NORMAL
    for token in parts["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    if (unknown := model["unk_token"]) is not None:
        types[model["vocab"][unknown]] = UNKNOWN
    return types


def _tokens(parts: JsonObject, types: Sequence[int], in_bytes: bool) -> list[str]:
    """Returns the spelling of every token, with placeholders for ids without one."""
    tokens = [f"[PAD{i}]" for i in range(len(types))]
    for word, number in parts["model"]["vocab"].items():
        tokens[number] = word
    for token in parts["added_tokens"]:
        number, text = token["id"], token["content"]
        plain = not in_bytes and types[number] == USER_DEFINED
        tokens[number] = text.replace(_SPACE, " ") if plain else text
    return tokens


def _cut(parts: JsonObject, steps: list[JsonObject], at: str) -> str:
    """Returns llama.cpp's name of the rule by which this byte-level tokenizer splits text.

    Raises:
        TokenizerError: llama.cpp does not support these rules.
    """
    normalized = _steps(parts["normalizer"])
    _require(normalized in ([], [{"type": "NFC"}]), at, f"llama.cpp does not know its {normalized}")
    if normalized:
        logger.warning(
            "tokenizer %s: brings texts into Unicode's form NFC, which llama.cpp does not: texts "
            "in another form become other tokens there",
            at,
        )
    rule = steps, bool(parts["model"]["ignore_merges"])
    names = [name for name, known in _CUTS.items() if known == rule]
    _require(
        names,
        at,
        f"it cuts text into words by rules that are not known to be llama.cpp's: {steps}"
        + (" (ignore_merges)" if rule[1] else ""),
        f"Known are those named {', '.join(_CUTS)}; export without --gguf, for transformers.",
    )
    return names[0]


def _prepends(parts: JsonObject, steps: list[JsonObject], at: str) -> bool:
    """Returns whether a SentencePiece-style tokenizer puts a space before each text.

    Raises:
        TokenizerError: llama.cpp does not support its rules.
    """
    normalized = _steps(parts["normalizer"])
    rules = [*normalized, *steps]
    prepends = _PREPEND in rules or _METASPACE in rules
    _require(
        parts["model"]["byte_fallback"]
        and rules in ([_PREPEND, _REPLACE], [_METASPACE], [_REPLACE], [_REPLACE, _NO_CUT]),
        at,
        f"it treats text by rules that are not known to be llama.cpp's: {rules}"
        + ("" if parts["model"]["byte_fallback"] else " (without byte_fallback)"),
    )
    if _METASPACE in rules:
        logger.warning(
            "tokenizer %s: puts a space before texts, and before text after special tokens, "
            "unless it begins with a space; llama.cpp always puts one",
            at,
        )
    for token in parts["added_tokens"]:
        _require(
            not (prepends and token["normalized"]),
            at,
            f"puts a space before the token {token['content']!r}, which llama.cpp does not",
        )
    return prepends


def _scores(model: JsonObject, types: Sequence[int], tokens: Sequence[str], at: str) -> list[float]:
    """Returns a score for each token, with which llama.cpp merges in the order of the merge list.

    Tokens that are merged earlier have higher scores.

    llama.cpp merges any two pieces that spell a token. Of all such pairs, it takes the one whose
    token has the highest score, and of equal ones the first in the text. The result is the same as
    with the list of merges if the pairs of a token are adjacent in it and none is left out. Pairs
    of runs of one character (spaces) may be mixed with each other: both begin with the first, and
    continue with its result.

    Raises:
        TokenizerError: No scores produce the order of the merges, or a byte has no token.
    """
    vocab = model["vocab"]
    missing = [
        byte
        for byte in range(256)
        if f"<0x{byte:02X}>" not in vocab and (byte > 127 or chr(byte) not in vocab)
    ]
    _require(not missing, at, f"llama.cpp needs a token for each byte; there is none for {missing}")
    listed = {(left, right) for left, right in model["merges"]}
    early = [made for left, right in listed if types[vocab[made := left + right]] == USER_DEFINED]
    if early:
        logger.warning(
            "tokenizer %s: llama.cpp takes tokens such as %r out of texts before it merges others, "
            "which may cut a row of them otherwise",
            at,
            min(early),
        )
    made = [left + right for left, right in model["merges"]]
    made = [word for word in made if types[vocab[word]] != USER_DEFINED]
    last = {word: i for i, word in enumerate(made)}
    blocks: list[set[str]] = []  # sets of words whose pairs are mixed
    end = -1
    for i, word in enumerate(made):
        if i > end:
            blocks.append(set())
        blocks[-1].add(word)
        end = max(end, last[word])
    for block in blocks:
        _require(
            len(block) == 1 or len({*"".join(block)}) == 1,
            at,
            f"its merges to {min(block)!r} are not adjacent, which scores cannot express",
        )
    order = {word: i for i, block in enumerate(blocks) for word in block}
    for word, number in vocab.items():
        if types[number] == NORMAL:
            for i in range(1, len(word)):
                pair = word[:i], word[i:]
                _require(
                    pair in listed or pair[0] not in vocab or pair[1] not in vocab,
                    at,
                    f"its merges leave out {pair[0]!r} + {pair[1]!r}, which llama.cpp would merge",
                )
    rest = -float(len(blocks))
    return [-float(order[token]) if token in order else rest for token in tokens]
