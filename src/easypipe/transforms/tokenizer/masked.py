"""Encodes texts with trained spans: loss masks, and ends that are added.

A token is a target if one of the characters that it stands for is trained on. Between the first and
the last token of a trained range, every token is a target. Which characters a token stands for is
known from `tokenizers`, or from the bytes of gigatoken's tokens (token_bytes.py) if these are the
text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from easypipe.core.errors import TokenizerError
from easypipe.core.schema import offsets_of
from easypipe.core.values import Bools, Int64
from easypipe.transforms.tokenizer.config import length_limit
from easypipe.transforms.tokenizer.ragged import EncodedTexts, Ids, Mask, Tokens
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

# what follows a text: nothing, an EOS that the loss does not see, an EOS as a target
NO_END, MASKED_END, TRAINED_END = 0, 1, 2


def encode_masked(
    tokenizer: Tokenizer,
    texts: pa.LargeStringArray,
    spans: Sequence[Sequence[Sequence[int]]],
    ends: Sequence[int],
    *,
    raw: bool,
    reference: bool = False,
    whole: bool = False,
) -> EncodedTexts:
    """Encodes texts with a loss mask, which is made from the whole text and cut with it.

    A text that was cut gets no EOS.

    Args:
        texts: A column without nulls.
        spans: The character ranges of each text that are trained on, ascending.
        ends: What follows each text: NO_END, MASKED_END or TRAINED_END.
        raw: Whether no template wrote the texts. Then the tokenizer's own special tokens are put
            around each, unless they are there already, and its special_strings is obeyed.
        reference: Whether `tokenizers` encodes, whatever backend runs.
        whole: Whether max_length cuts nothing.
    """
    before, after = tokenizer.surrounding if raw else ((), ())
    limit = None if whole else length_limit(tokenizer.config)
    eos = tokenizer.eos_token_id
    tokens, special = _settled(tokenizer, texts, spans, raw=raw, reference=reference)
    sizes, asked = tokens.sizes, np.asarray(ends, np.int64)
    front = ~_stands(before, tokens.offsets[:-1], tokens.ids, sizes)
    room = front * len(before)
    behind = ~_stands(after, tokens.offsets[1:] - len(after), tokens.ids, sizes)
    if limit is not None:
        behind |= sizes + room > limit  # a text that is cut loses its own end
    room += behind * len(after)
    cut = _none(texts) if limit is None else np.maximum(0, sizes + room - limit)
    if not after:
        behind = _needs_end(tokenizer, tokens, asked) & (cut == 0)
        behind &= limit is None or sizes + room < limit
        if behind.any() and eos is None:
            raise TokenizerError(
                at=tokenizer.name,
                problem="it names no EOS token, and nothing else ends what is trained",
                fix="Name its eos_token in tokenizer_config.json.",
            )
    suffix = after or ((eos,) if eos is not None else ())
    trained = (asked == TRAINED_END) & (cut == 0)
    tokens = tokens.shortened(cut).framed(before, suffix, front, behind, trained)
    if raw and eos is not None and tokens.mask is not None:
        last = tokens.offsets[1:] - 1
        masked = (asked == MASKED_END) & _stands((eos,), last, tokens.ids, tokens.sizes)
        tokens.mask[last[masked]] = 0  # also an EOS of the text itself
    return EncodedTexts(
        offsets=tokens.offsets,
        ids=tokens.ids,
        mask=tokens.mask,
        before=front * len(before),
        added=front * len(before) + behind * len(suffix),
        truncated=cut,
        special=special,
    )


def _none(texts: pa.LargeStringArray) -> Int64:
    return np.zeros(len(texts), np.int64)


def _needs_end(tokenizer: Tokenizer, tokens: Tokens, asked: Int64) -> Bools:
    """Returns Bool[n]: whether an end is asked for that is not there yet."""
    eos = tokenizer.eos_token_id
    if eos is None:
        return asked != NO_END
    return (asked != NO_END) & ~_stands((eos,), tokens.offsets[1:] - 1, tokens.ids, tokens.sizes)


def _stands(tokens: Sequence[int], at: Int64, ids: Ids, sizes: Int64) -> Bools:
    """Returns Bool[n]: whether `tokens` are at the places `at` of documents of these sizes."""
    found = sizes >= len(tokens)
    for k, token in enumerate(tokens):
        found[found] = ids[at[found] + k] == token
    return found


def _by_reference(
    tokenizer: Tokenizer, text: str, spans: Sequence[Sequence[int]], *, escaped: bool = False
) -> tuple[Sequence[int], Mask]:
    ((ids, starts, stops),) = tokenizer.encode_with_characters([text], escaped=escaped)
    return ids, token_mask(starts, stops, spans)


def _settled(
    tokenizer: Tokenizer,
    texts: pa.LargeStringArray,
    spans: Sequence[Sequence[Sequence[int]]],
    *,
    raw: bool,
    reference: bool,
) -> tuple[Tokens, Int64]:
    """Returns the tokens of the texts alone, and how many special strings are in each of them."""

    def escaped(text: str, i: int) -> tuple[Sequence[int], Mask]:
        return _by_reference(tokenizer, text, spans[i], escaped=True)

    tokens = _encoded(tokenizer, texts, spans, reference=reference)
    return tokenizer.special.settle(texts, tokens, escaped) if raw else (tokens, _none(texts))


def _encoded(
    tokenizer: Tokenizer,
    texts: pa.LargeStringArray,
    spans: Sequence[Sequence[Sequence[int]]],
    *,
    reference: bool,
) -> Tokens:
    """Returns the tokens and masks of the texts alone, without special tokens around them."""
    fast = None if reference else tokenizer.encode_fast(texts)
    if fast is None:
        ids, masks = [np.zeros(0, np.uint32)], [np.zeros(0, np.uint8)]
        encoded = tokenizer.encode_with_characters(texts.to_pylist())
        for one, (found, starts, stops) in zip(spans, encoded, strict=True):
            ids.append(np.asarray(found, np.uint32))
            masks.append(token_mask(starts, stops, one))
        offsets = offsets_of([len(one) for one in ids[1:]])
        return Tokens(offsets, np.concatenate(ids), np.concatenate(masks))
    offsets, ids, pieces = fast
    ranges = pieces.ranges(texts, offsets, ids)
    sizes, counts = (
        pc.call_function(name, [texts]).to_numpy() for name in ("binary_length", "utf8_length")
    )
    plain = ((sizes == counts) | ~ranges.known).tolist()  # every character is one byte
    edges = [one if plain[i] else _in_bytes(texts[i].as_py(), one) for i, one in enumerate(spans)]
    owner = np.repeat(np.arange(len(edges)), [len(one) for one in edges])
    flat = (
        np.array([edge for one in edges for span in one for edge in span], np.int64).reshape(-1, 2)
        + ranges.bases[owner, None]
    )
    mask = _marked(ranges.starts, ranges.stops, flat, offsets[:-1][owner], offsets[1:][owner])
    others = {
        i: _by_reference(tokenizer, texts[i].as_py(), spans[i])
        for i in np.flatnonzero(~ranges.known).tolist()
    }
    return Tokens(offsets, ids, mask).replaced(others)


def _in_bytes(text: str, spans: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns ascending ranges of characters as ranges of UTF-8 bytes."""
    edges = [edge for span in spans for edge in span]
    pieces = (text[a:b].encode() for a, b in itertools.pairwise([0, *edges]))
    ends = list(itertools.accumulate(map(len, pieces)))
    return [ends[i : i + 2] for i in range(0, len(ends), 2)]


def has_target(mask: Mask, offsets: Int64) -> Bools:
    """Returns Bool[n]: whether a document has a token to train on.

    The first token of a document does not follow another, so it alone is not a target.
    """
    starts, found = offsets[:-1], np.zeros(len(offsets) - 1, np.bool_)
    filled = offsets[1:] > starts
    seen = mask.copy()
    seen[starts[filled]] = 0
    if filled.any():
        found[filled] = np.maximum.reduceat(seen, starts[filled]) > 0
    return found


def token_mask(starts: Int64, stops: Int64, spans: Sequence[Sequence[int]]) -> Mask:
    """Returns UInt8[tokens]: 1 for the tokens from the first to the last that reach into a range.

    Args:
        starts: Int64[tokens], the first character of each token, ascending.
        stops: Int64[tokens], the character after each token, ascending.
        spans: The trained ranges of characters.
    """
    return _marked(starts, stops, np.asarray(spans, np.int64).reshape(-1, 2), 0, len(starts))


def _marked(
    starts: Int64,
    stops: Int64,
    edges: Int64,
    first: Int64 | int,
    last: Int64 | int,
) -> Mask:
    """Computes `token_mask` for many texts at once.

    Args:
        starts: As in `token_mask`.
        stops: As in `token_mask`.
        edges: Int64[m, 2], the trained ranges.
        first: Int64[m], the first token to which each range applies.
        last: Int64[m], the token after the last one to which each range applies.
    """
    mask = np.zeros(len(starts), np.uint8)
    begin = np.clip(stops.searchsorted(edges[:, 0], side="right"), first, last)
    end = np.clip(starts.searchsorted(edges[:, 1], side="left"), first, last)
    for a, b in zip(begin.tolist(), end.tolist(), strict=True):
        mask[a:b] = 1
    return mask
