"""Texts of which only some characters are trained, to tokens with a loss mask.

A token is a target where one of the characters it stands for is trained; between the first and the
last token of a trained range every token is. Which characters those are, `tokenizers` says, or the
bytes of gigatoken's tokens (token_bytes.py) where these are the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from easypipe.core.errors import TokenizerError
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

# what follows a text: nothing, EOS unseen by the loss, EOS as a target
NO_END, MASKED_END, TRAINED_END = 0, 1, 2


class Masked(NamedTuple):
    """n documents: `ids[offsets[i] : offsets[i + 1]]`, special tokens included.

    offsets Int64[n+1] from 0 · ids UInt32[total] · mask UInt8[total]: 1 is a target · before, added
    Int64[n]: special tokens that were put in front of each document, and in all · truncated
    Int64[n]: tokens cut off each · special Int64[n]: special strings in each text, where they were
    looked for
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
    """texts: without nulls. spans: of each, ascending character ranges that are trained. ends: of
    each, NO_END, MASKED_END or TRAINED_END.

    raw: no template wrote the texts: the tokenizer's own special tokens are put around each, where
    they do not stand there already, and its special_strings is obeyed. Masks are made of the whole
    text and cut with it; a text that was cut gets no EOS.
    reference: ask `tokenizers`, whatever backend runs. whole: max_length cuts nothing.
    """
    before, after = tokenizer.surrounding if raw else ((), ())
    limit = tokenizer.config.max_length if tokenizer.config.truncation and not whole else None
    eos = tokenizer.eos_token_id
    offsets, ids, mask = _encoded(tokenizer, texts, spans, reference=reference)
    special = np.zeros(len(texts), np.int64)
    if raw:
        (offsets, ids, mask), special = _settled(
            tokenizer, texts, spans, _Tokens(offsets, ids, mask)
        )
    sizes, asked = np.diff(offsets), np.asarray(ends, np.int64)
    front = np.where(_stands(before, offsets[:-1], ids, sizes), 0, len(before))
    cut = (
        np.zeros(len(texts), np.int64)
        if limit is None
        else np.maximum(0, sizes + front + len(after) - limit)
    )
    behind = np.full(len(texts), bool(after))
    if not after:
        closed = (
            np.zeros(len(texts), np.bool_)
            if eos is None
            else _stands((eos,), offsets[1:] - 1, ids, sizes)
        )
        behind = (asked != NO_END) & (cut == 0) & ~closed
        behind &= limit is None or sizes + front < limit
        if behind.any() and eos is None:
            raise TokenizerError(
                at=tokenizer.name,
                problem="it names no EOS token, and nothing else ends what is trained",
                fix="Name its eos_token in tokenizer_config.json.",
            )
    if cut.any():
        kept = np.arange(len(ids)) < np.repeat(offsets[1:] - cut, sizes)
        ids, mask, sizes = ids[kept], mask[kept], sizes - cut
        offsets = _offsets(sizes)
    suffix = after or ((eos,) if eos is not None else ())
    added = front + behind * len(suffix)
    if added.any():
        edges = _offsets(sizes + added)
        place = np.arange(len(ids)) + np.repeat(edges[:-1] + front - offsets[:-1], sizes)
        body, flags = ids, mask
        ids, mask = np.zeros(edges[-1], np.uint32), np.zeros(edges[-1], np.uint8)
        ids[place], mask[place] = body, flags
        for k, token in enumerate(before):
            ids[edges[:-1][front > 0] + k] = token
        for k, token in enumerate(suffix):
            at = edges[1:][behind] - len(suffix) + k
            ids[at], mask[at] = token, ((asked == TRAINED_END) & (cut == 0))[behind]
        offsets = edges
    return Masked(
        offsets=offsets,
        ids=ids,
        mask=mask,
        before=front,
        added=added,
        truncated=cut,
        special=special,
    )


class _Tokens(NamedTuple):
    """offsets Int64[n+1], ids UInt32[total], mask UInt8[total] of n texts, without special
    tokens.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]


def _offsets(sizes: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _stands(
    tokens: Sequence[int], at: NDArray[np.int64], ids: NDArray[np.uint32], sizes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Bool[n]: whether `tokens` stand at these places of documents with these sizes; True where
    there are no tokens to stand.
    """
    found = sizes >= len(tokens)
    for k, token in enumerate(tokens):
        found[found] = ids[at[found] + k] == token
    return found


def _settled(
    tokenizer: Tokenizer,
    texts: pa.LargeStringArray,
    spans: Sequence[Sequence[Sequence[int]]],
    made: _Tokens,
) -> tuple[_Tokens, NDArray[np.int64]]:
    """(tokens, Int64[n] special strings in each text) under the tokenizer's special_strings."""
    special = tokenizer.special
    found, doubtful = special.look(made.offsets, made.ids)
    found = found.astype(np.int64)
    others: dict[int, tuple[NDArray[np.uint32], NDArray[np.uint8]]] = {}
    # few
    for i in np.flatnonzero(doubtful).tolist() if special.policy in ("error", "escape") else ():
        text = texts[i].as_py()
        if special.policy == "error":
            found[i] = found[i] or special.first_in(text) is not None
            continue
        ((new, starts, stops),) = tokenizer.encode_with_characters([text], escaped=True)
        others[i] = np.asarray(new, np.uint32), token_mask(starts, stops, spans[i])
        old = made.ids[made.offsets[i] : made.offsets[i + 1]]
        found[i] += max(0, special.unknown_in(old) - special.unknown_in(others[i][0]))
    return _with(made, others), found


def _with(
    made: _Tokens, others: Mapping[int, tuple[NDArray[np.uint32], NDArray[np.uint8]]]
) -> _Tokens:
    """With other tokens and masks for some texts, by number."""
    if not others:
        return made
    edges = made.offsets
    parts = [
        others.get(i) or (made.ids[a:b], made.mask[a:b])
        for i, (a, b) in enumerate(itertools.pairwise(edges.tolist()))
    ]
    ids, masks = zip(*parts, strict=True)
    return _Tokens(_offsets([len(one) for one in ids]), np.concatenate(ids), np.concatenate(masks))


def _encoded(
    tokenizer: Tokenizer,
    texts: pa.LargeStringArray,
    spans: Sequence[Sequence[Sequence[int]]],
    *,
    reference: bool,
) -> _Tokens:
    fast = None if reference else tokenizer.encode_fast(texts)
    if fast is None:
        encoded = [
            (np.asarray(ids, np.uint32), token_mask(starts, stops, one))
            for one, (ids, starts, stops) in zip(
                spans, tokenizer.encode_with_characters(texts.to_pylist()), strict=True
            )
        ]
        empty = (np.zeros(0, np.uint32), np.zeros(0, np.uint8))
        ids, masks = zip(*encoded, empty, strict=True)
        return _Tokens(
            _offsets([len(one) for one, _ in encoded]), np.concatenate(ids), np.concatenate(masks)
        )
    offsets, ids, pieces = fast
    ranges = pieces.ranges(texts, offsets, ids)
    sizes, counts = (
        pc.call_function(name, [texts]).to_numpy() for name in ("binary_length", "utf8_length")
    )
    plain = (sizes == counts).tolist()  # every character is a byte
    known = ranges.known.tolist()
    edges = [
        one if plain[i] or not known[i] else _in_bytes(texts[i].as_py(), one)
        for i, one in enumerate(spans)
    ]
    owner = np.repeat(np.arange(len(edges)), [len(one) for one in edges])
    flat = (
        np.array([edge for one in edges for span in one for edge in span], np.int64).reshape(-1, 2)
        + ranges.bases[owner, None]
    )
    first, last = offsets[:-1][owner], offsets[1:][owner]
    mask = _marked(ranges.starts, ranges.stops, flat, first, last)
    others: dict[int, tuple[NDArray[np.uint32], NDArray[np.uint8]]] = {}
    for i in np.flatnonzero(~ranges.known).tolist():
        ((found, starts, stops),) = tokenizer.encode_with_characters([texts[i].as_py()])
        others[i] = np.asarray(found, np.uint32), token_mask(starts, stops, spans[i])
    return _with(_Tokens(np.asarray(offsets, np.int64), np.asarray(ids, np.uint32), mask), others)


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
    """Bool[n]: whether a document has a token to train on. Its first one is nobody's next token: it
    alone is none.
    """
    starts, found = offsets[:-1], np.zeros(len(offsets) - 1, np.bool_)
    filled = offsets[1:] > starts
    seen = mask.copy()
    seen[starts[filled]] = 0
    if filled.any():
        found[filled] = np.maximum.reduceat(seen, starts[filled]) > 0
    return found


def token_mask(
    starts: NDArray[np.int64], stops: NDArray[np.int64], spans: Sequence[Sequence[int]]
) -> NDArray[np.uint8]:
    """UInt8[tokens]: 1 from the first token that reaches into a range to the last one that does.

    starts, stops: Int64[tokens], the first character of each token and the one behind its last,
    ascending.
    """
    return _marked(starts, stops, np.asarray(spans, np.int64).reshape(-1, 2), 0, len(starts))


def _marked(
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    edges: NDArray[np.int64],
    first: NDArray[np.int64] | int,
    last: NDArray[np.int64] | int,
) -> NDArray[np.uint8]:
    """`token_mask` of many texts, one after the other. edges Int64[m, 2]: ranges, each for the
    tokens from `first` to `last`, Int64[m].
    """
    mask = np.zeros(len(starts), np.uint8)
    begin = np.clip(stops.searchsorted(edges[:, 0], side="right"), first, last)
    end = np.clip(starts.searchsorted(edges[:, 1], side="left"), first, last)
    for a, b in zip(begin.tolist(), end.tolist(), strict=True):
        mask[a:b] = 1
    return mask
