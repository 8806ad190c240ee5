"""Texts of which only some characters are trained, to tokens with a loss mask.

A token is a target where one of the characters it stands for is trained; between the first and the last token of a trained range every
token is. Which characters those are, `tokenizers` says, or the bytes of gigatoken's tokens (token_bytes.py) where these are the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from easypipe.core.errors import TokenizerError
from easypipe.transforms.tokenizer import Tokenizer

NO_END, MASKED_END, TRAINED_END = 0, 1, 2  # what follows a text: nothing, EOS unseen by the loss, EOS as a target


class Masked(NamedTuple):
    """n documents: `ids[offsets[i] : offsets[i + 1]]`, special tokens included.

    offsets Int64[n+1] from 0 · ids UInt32[total] · mask UInt8[total]: 1 is a target · before, added Int64[n]: special tokens that were put
    in front of each document, and in all · truncated Int64[n]: tokens cut off each · special Int64[n]: special strings in each text, where
    they were looked for
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    before: NDArray[np.int64]
    added: NDArray[np.int64]
    truncated: NDArray[np.int64]
    special: NDArray[np.int64]


def encode_masked(
    tokenizer: Tokenizer,
    texts: pa.LargeStringArray,
    spans: Sequence[Sequence[Sequence[int]]],
    ends: Sequence[int],
    *,
    raw: bool,
    reference: bool = False,
    whole: bool = False,
) -> Masked:
    """texts: without nulls. spans: of each, ascending character ranges that are trained. ends: of each, NO_END, MASKED_END or TRAINED_END.

    raw: no template wrote the texts: the tokenizer's own special tokens are put around each, where they do not stand there already, and
    its special_strings is obeyed. Masks are made of the whole text and cut with it; a text that was cut gets no EOS.
    reference: ask `tokenizers`, whatever backend runs. whole: max_length cuts nothing.
    """
    before, after = tokenizer.surrounding if raw else ((), ())
    limit = tokenizer.config.max_length if tokenizer.config.truncation and not whole else None
    eos = tokenizer.eos_token_id
    ids, masks = [], []
    front, added, truncated, special = (np.zeros(len(texts), np.int64) for _ in range(4))
    for i, (tokens, mask) in enumerate(_encoded(tokenizer, texts, spans, reference=reference)):
        if raw:
            tokens, mask, special[i] = _settled(tokenizer, texts[i], spans[i], tokens, mask)
        prefix = () if not before or tuple(tokens[: len(before)].tolist()) == before else before
        suffix, room = after, len(prefix) + len(after)
        closed = len(tokens) > 0 and int(tokens[-1]) == eos
        cut = 0 if limit is None else max(0, len(tokens) + room - limit)
        if cut:
            tokens, mask = tokens[: len(tokens) - cut], mask[: len(tokens) - cut]
        elif ends[i] != NO_END and not after and not closed and (limit is None or len(tokens) + len(prefix) < limit):
            if eos is None:
                raise TokenizerError(
                    at=tokenizer.name,
                    problem="it names no EOS token, and nothing else ends what is trained",
                    fix="Name its eos_token in tokenizer_config.json.",
                )
            suffix = (eos,)
        if prefix or suffix:
            last = ends[i] == TRAINED_END and not cut
            tokens = np.concatenate([np.asarray(prefix, np.uint32), tokens, np.asarray(suffix, np.uint32)])
            mask = np.concatenate([np.zeros(len(prefix), np.uint8), mask, np.full(len(suffix), last, np.uint8)])
        ids.append(tokens)
        masks.append(mask)
        front[i], added[i], truncated[i] = len(prefix), len(prefix) + len(suffix), cut
    lengths = np.array([len(tokens) for tokens in ids], np.int64)
    return Masked(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        ids=np.concatenate(ids).astype(np.uint32) if ids else np.zeros(0, np.uint32),
        mask=np.concatenate(masks).astype(np.uint8) if masks else np.zeros(0, np.uint8),
        before=front,
        added=added,
        truncated=truncated,
        special=special,
    )


def _settled(
    tokenizer: Tokenizer, text: pa.Scalar, spans: Sequence[Sequence[int]], ids: NDArray[np.uint32], mask: NDArray[np.uint8]
) -> tuple[NDArray[np.uint32], NDArray[np.uint8], int]:
    """(ids, mask, special strings in the text) under the tokenizer's special_strings."""
    special = tokenizer.special
    counts, doubtful = special.look(np.array([0, len(ids)]), ids)
    found = int(counts[0])
    if special.policy == "error" and doubtful[0] and not found:
        found = int(special.first_in(text.as_py()) is not None)
    if special.policy != "escape" or not doubtful[0]:
        return ids, mask, found
    ((new, starts, stops),) = tokenizer.encode_with_characters([text.as_py()], escaped=True)
    new = np.asarray(new, np.uint32)
    return new, token_mask(starts, stops, spans), found + max(0, special.unknown_in(ids) - special.unknown_in(new))


def _encoded(
    tokenizer: Tokenizer, texts: pa.LargeStringArray, spans: Sequence[Sequence[Sequence[int]]], *, reference: bool
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.uint8]]]:
    """(ids, mask) of each text, without special tokens."""
    fast = None if reference else tokenizer.encode_fast(texts)
    if fast is None:
        for one, (ids, starts, stops) in zip(spans, tokenizer.encode_with_characters(texts.to_pylist()), strict=True):
            yield np.asarray(ids, np.uint32), token_mask(starts, stops, one)
        return
    offsets, ids, pieces = fast
    ranges = pieces.ranges(texts, offsets, ids)
    sizes, counts = (pc.call_function(name, [texts]).to_numpy() for name in ("binary_length", "utf8_length"))
    plain = sizes == counts  # every character is a byte
    for i, one in enumerate(spans):
        a, b = offsets[i], offsets[i + 1]
        if not ranges.known[i]:
            ((found, starts, stops),) = tokenizer.encode_with_characters([texts[i].as_py()])
            yield np.asarray(found, np.uint32), token_mask(starts, stops, one)
        else:
            yield ids[a:b], token_mask(ranges.starts[a:b], ranges.stops[a:b], one if plain[i] else _in_bytes(texts[i].as_py(), one))


def _in_bytes(text: str, spans: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ascending ranges of characters as ranges of UTF-8 bytes."""
    done = size = 0
    found = []
    for span in spans:
        edges = []
        for edge in span:
            size += len(text[done:edge].encode())
            done = edge
            edges.append(size)
        found.append(edges)
    return found


def has_target(mask: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Bool[n]: whether a document has a token to train on. Its first one is nobody's next token: it alone is none."""
    before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    return before[offsets[1:]] - before[np.minimum(offsets[:-1] + 1, offsets[1:])] > 0


def token_mask(starts: NDArray[np.int64], stops: NDArray[np.int64], spans: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
    """UInt8[tokens]: 1 from the first token that reaches into a range to the last one that does.

    starts, stops: Int64[tokens], the first character of each token and the one behind its last, ascending.
    """
    mask = np.zeros(len(starts), np.uint8)
    edges = np.asarray(spans, np.int64).reshape(-1, 2)
    firsts, lasts = stops.searchsorted(edges[:, 0], side="right"), starts.searchsorted(edges[:, 1], side="left")
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        mask[first:last] = 1
    return mask
