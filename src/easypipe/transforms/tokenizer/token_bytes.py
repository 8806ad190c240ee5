"""Finds the bytes of text that each token is, in a byte-level BPE, and its place in a text.

gigatoken returns only ids. If the concatenated bytes of a text's tokens are that text, their
lengths tell where each token is. Spaces at the ends of a token are left out if `tokenizers` leaves
them out (trim_offsets), so that masks are the same as its own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.core.schema import offsets_of
from easypipe.core.text import bytes_of
from easypipe.core.values import Bools, Int32, Int64

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece writes a space


class Ranges(NamedTuple):
    """Where the tokens of some texts are in them, counted as if the texts were one.

    Attributes:
        starts: Int64[total], the first byte of each token.
        stops: Int64[total], the byte after each token.
        known: Bool[n], the texts whose tokens are their bytes; other texts' ranges mean nothing.
        bases: Int64[n+1], where each text begins, and the end of the last one.
    """

    starts: Int64
    stops: Int64
    known: Bools
    bases: Int64


class TokenBytes:
    """The bytes of every token of a byte-level BPE.

    Args:
        pieces: The bytes of each token, by id.
        trims: Whether spaces at the ends of a token are not part of its range.
    """

    def __init__(self, pieces: Sequence[bytes], trims: bool) -> None:
        self._pieces = pa.array(pieces, pa.large_binary())
        self._trims = trims
        self.lengths = np.array([len(piece) for piece in pieces], np.int64)
        self._lead = np.array(
            [len(piece) - len(piece.lstrip(b" ")) if trims else 0 for piece in pieces], np.int64
        )
        self._trail = np.array(
            [len(piece) - len(piece.rstrip(b" ")) if trims else 0 for piece in pieces], np.int64
        )

    def ranges(self, texts: pa.LargeStringArray, offsets: Int64, ids: NDArray[np.uint32]) -> Ranges:
        """Finds where the tokens of texts are in them.

        Args:
            texts: A column without nulls.
            offsets: Int64[n+1].
            ids: The tokens: `ids[offsets[i] : offsets[i + 1]]` are those of text i.
        """
        lengths = self.lengths[ids]
        ends = offsets_of(lengths)
        edges, data = bytes_of(texts)
        text = data[edges[0] : edges[-1]]
        found = bytes_of(self._pieces.take(pa.array(ids)))[1][: ends[-1]]
        bases = ends[offsets]
        if np.array_equal(bases, edges - edges[0]) and np.array_equal(found, text):
            known = np.ones(len(texts), np.bool_)
        else:
            where = edges - edges[0]
            known = np.array(
                [
                    np.array_equal(found[bases[i] : bases[i + 1]], text[where[i] : where[i + 1]])
                    for i in range(len(texts))
                ],
                np.bool_,
            )
        first, last = ends[:-1], ends[1:]
        if not self._trims:
            return Ranges(first, last, known, bases)
        starts = np.minimum(first + self._lead[ids], last)
        return Ranges(starts, np.maximum(last - self._trail[ids], starts), known, bases)


@functools.lru_cache(maxsize=2)
def token_bytes(definition: str) -> TokenBytes | None:
    """Returns the bytes of a tokenizer.json's tokens; None if its tokens are not bytes."""
    parts = json.loads(definition)
    if (parts.get("model") or {}).get("type", "BPE") != "BPE" or "ByteLevel" not in _kinds(
        parts.get("decoder")
    ):
        return None
    vocab: dict[str, int] = dict(parts["model"]["vocab"])
    back = {character: byte for byte, character in _alphabet().items()}
    pieces = [b""] * (
        max(
            [*vocab.values(), *(token["id"] for token in parts.get("added_tokens") or ())],
            default=-1,
        )
        + 1
    )
    for word, i in vocab.items():
        if all(character in back for character in word):
            pieces[i] = bytes(back[character] for character in word)
    for token in parts.get("added_tokens") or ():
        pieces[token["id"]] = token["content"].encode()
    return TokenBytes(pieces, _trims(parts.get("post_processor")))


def text_bytes(definition: str) -> Int32 | None:
    """Returns Int32[vocabulary]: how many bytes of text each token of a tokenizer.json is.

    Special tokens have 0, as they are not text. The result is None if tokens are neither bytes nor,
    as SentencePiece's are, pieces of text.
    """
    parts = json.loads(definition)
    added = parts.get("added_tokens") or ()
    if (known := token_bytes(definition)) is not None:
        sizes = known.lengths.astype(np.int32)
    elif _kinds(parts.get("decoder")) & {"ByteFallback", "Metaspace"}:
        vocab = parts["model"]["vocab"]
        words = vocab if isinstance(vocab, dict) else {word: i for i, (word, _) in enumerate(vocab)}
        sizes = np.zeros(1 + max([*words.values(), *(token["id"] for token in added)]), np.int32)
        for word, i in words.items():
            of_byte = re.fullmatch("<0x[0-9A-F]{2}>", word)
            sizes[i] = 1 if of_byte else len(word.replace(_SPACE, " ").encode())
    else:
        return None
    for token in added:
        sizes[token["id"]] = 0 if token.get("special") else len(token["content"].encode())
    return sizes


def _kinds(part: Any) -> set[str]:
    """Returns the types of a part of tokenizer.json, such as its decoder, and of parts in it."""
    if not isinstance(part, dict):
        return set()
    inner = part.get("decoders") or part.get("processors") or part.get("pretokenizers") or []
    return {part.get("type", "")}.union(*(_kinds(one) for one in inner))


def _trims(part: Any) -> bool:
    """Whether a post-processor leaves spaces at the ends of tokens out of their offsets."""
    if not isinstance(part, dict):
        return False
    if part.get("type") == "ByteLevel":
        return bool(part["trim_offsets"])
    return any(_trims(one) for one in part.get("processors") or [])


def _alphabet() -> dict[int, str]:
    """Returns the character by which byte-level tokenizers (GPT-2's) write each byte.

    It is the byte's own character if that can be printed, otherwise a character from 256 up.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
