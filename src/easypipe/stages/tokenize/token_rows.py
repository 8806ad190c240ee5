"""Texts to token documents: the one place where a text becomes what the cache stores, whether it is
stored or not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.cache.encoder import EncodedDocuments
from easypipe.cache.manifest import Counts
from easypipe.cache.reader import cache_schema
from easypipe.core.errors import SourceError, TokenizerError, place
from easypipe.core.protocols import Reject
from easypipe.core.random import fold, permute
from easypipe.core.schema import token_dtype
from easypipe.stages.tokenize.text_rows import Texts
from easypipe.transforms.refused import NOTHING_TO_TRAIN, TOO_LONG
from easypipe.transforms.tokenizer.lengths import Lengths, Shaped, Whole, shape
from easypipe.transforms.tokenizer.masked import NO_END, Masked, encode_masked, has_target
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

AUDITED_SHARE = 1000  # one text in so many is encoded again with the reference
AUDITED_ROWS = 64  # at most, of one range
AUDITED_BYTES = 1 << 13  # expected for a range, or a thousandth of its bytes where that is more
# a longer text is looked at in pieces: the reference takes seconds and 150 bytes of memory for a
# byte
WHOLE_BYTES = 256 << 10
PIECE_BYTES = 32 << 10
# looked through for a place where no tokenizer joins what stands before and behind it
BORDER_BYTES = 4 << 10
LATE_TOKENS = 16  # of a piece, which its cut may have changed
# Of text encoded at a time. A call costs half a millisecond, and four bytes a token that are used
# again for the next one: of larger blocks
# the C library gives the memory back to the system, which then clears every page anew. The
# encoder's memory is looked at between two.
CALL_BYTES = 4 << 20
LONGEST = (1 << 31) - 1  # lengths are Int32 in plans


def encode_texts(
    texts: Texts,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    at: str,
    audit_key: str | None = None,
    lengths: Lengths | None = None,
) -> EncodedDocuments:
    """batch_size: most texts encoded at a time; decides memory and speed, never tokens. lengths:
    what cuts them in place of max_length.

    audit_key: a digest that says which texts are encoded again with the reference; None audits
    none. Raises TokenizerError where the fast backend differs from the reference, SourceError for a
    text of more than 2^31 tokens.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    ids, sizes, truncated, special, added = [], [], [], [], 0
    for first, last in itertools.pairwise(_edges(texts, batch_size)):
        encoded = tokenizer.encode_column(
            texts.texts.slice(first, last - first), whole=lengths is not None
        )
        ids.append(encoded.ids)
        sizes.append(np.diff(encoded.offsets))
        truncated.append(encoded.truncated)
        special.append(encoded.special)
        added += encoded.added
    all_ids = _joined(ids, dtype)
    ids.clear()  # a range may be tens of megabytes of tokens
    all_lengths, cut, strings = (
        _joined(sizes, np.int64),
        _joined(truncated, np.int64),
        _joined(special, np.int64),
    )
    offsets = np.concatenate([[0], np.cumsum(all_lengths)]).astype(np.int64)
    if all_lengths.size and all_lengths.max() > LONGEST:
        row = int(texts.rows[int(all_lengths.argmax())])
        raise SourceError(
            at=place(at, row=row),
            problem=f"{all_lengths.max()} tokens in one text",
            fix="Set max_length, or split it.",
        )
    if audit_key is not None:
        _audit(texts, all_ids, offsets, tokenizer, audit_key, at, whole=lengths is not None)
    rows, rejects = texts.rows, ()
    room = tokenizer.specials_per_text
    refused = _refused_strings(texts, strings, tokenizer)
    # nothing but special tokens: the tokenizer knows no piece of the text
    kept = all_lengths > room
    kept[list(refused)] = False
    if not kept.all():
        detail = f"the tokenizer {tokenizer.name} makes no token of this text"
        without = np.flatnonzero(~kept).tolist()
        rejects = tuple(
            refused.get(i) or Reject(row=int(rows[i]), reason="no_tokens", detail=detail)
            for i in without
        )
        all_ids, rows, cut, strings = (
            all_ids[np.repeat(kept, all_lengths)],
            rows[kept],
            cut[kept],
            strings[kept],
        )
        offsets = np.concatenate([[0], np.cumsum(all_lengths[kept])]).astype(np.int64)
        added = len(rows) * room
    lost, mask, counts, continued = int(cut.sum()), None, {}, None
    if lengths is not None:
        before = np.full(len(rows), len(tokenizer.surrounding[0]))
        found = np.flatnonzero(kept)
        whole = Whole(
            offsets,
            all_ids,
            None,
            before,
            np.full(len(rows), room),
            lambda i: texts.texts[int(found[i])].as_py(),
        )
        made = shape(whole, lengths, raw=True)
        rejects = (*rejects, *_too_long(made, rows, np.diff(offsets), lengths))
        all_ids, offsets, mask, rows, strings = (
            made.ids,
            made.offsets,
            made.mask,
            rows[made.origin],
            strings[made.origin],
        )
        added, lost, counts, continued = (
            int(made.added.sum()),
            made.truncated,
            made.counts,
            made.continued,
        )
    tokens = int(offsets[-1])
    eos = _without_eos_inside(ends_with(all_ids, offsets, tokenizer.eos_token_id), continued)
    columns = [
        pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(all_ids)),
        pa.array(eos),
        pa.array(rows),
    ]
    columns += (
        [pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(mask))]
        if mask is not None
        else []
    )
    batch = pa.RecordBatch.from_arrays(
        columns, schema=cache_schema(tokenizer.vocab_size, loss_mask=mask is not None)
    )
    escapes = tokenizer.special.policy == "escape"
    return EncodedDocuments(
        batch=batch,
        counts=Counts(
            docs=len(batch),
            tokens=tokens,
            encoded=tokens - added + lost - counts.get("overlap", 0),
            added=added,
            truncated=lost,
            lengths=counts,
            lost=_lost(texts, tokenizer),
            trained=None if mask is None else int(mask.sum()),
            special=0 if escapes else int(strings.sum()),
            escaped=int(strings.sum()) if escapes else 0,
        ),
        rejects=tuple(rejects),
    )


def encode_spans(
    texts: Texts,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    at: str,
    raw: bool,
    audit_key: str | None = None,
    lengths: Lengths | None = None,
) -> EncodedDocuments:
    """Documents with a loss_mask, from texts with spans. lengths: what cuts them in place of
    max_length.

    raw: the texts are no template's work: the tokenizer's own special tokens are put around each,
    and its special_strings is obeyed. Rows of which nothing that is trained remains within
    max_length are rejects. Raises as encode_texts does.
    """
    assert texts.spans is not None
    assert texts.ends is not None
    dtype = token_dtype(tokenizer.vocab_size)
    found: list[Masked] = []
    for first, last in itertools.pairwise(_edges(texts, batch_size)):
        some = texts.texts.slice(first, last - first)
        whole = lengths is not None
        found.append(
            encode_masked(
                tokenizer,
                some,
                texts.spans[first:last],
                texts.ends[first:last].tolist(),
                raw=raw,
                whole=whole,
            )
        )
    sizes = _joined([np.diff(part.offsets) for part in found], np.int64)
    ids, mask = (
        _joined([part.ids for part in found], dtype),
        _joined([part.mask for part in found], np.uint8),
    )
    added, cut, strings = (
        _joined([getattr(part, name) for part in found], np.int64)
        for name in ("added", "truncated", "special")
    )
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    if sizes.size and sizes.max() > LONGEST:
        row = int(texts.rows[int(sizes.argmax())])
        raise SourceError(
            at=place(at, row=row),
            problem=f"{sizes.max()} tokens in one text",
            fix="Set max_length, or split it.",
        )
    if audit_key is not None:
        _audit_spans(
            texts, ids, mask, offsets, tokenizer, audit_key, at, raw=raw, whole=lengths is not None
        )
    kept = has_target(mask, offsets)
    refused = _refused_strings(texts, strings, tokenizer)
    kept[list(refused)] = False
    rejects = tuple(
        refused.get(i) or _untrained(int(texts.rows[i])) for i in np.flatnonzero(~kept).tolist()
    )
    rows, cut, strings, added = texts.rows[kept], cut[kept], strings[kept], added[kept]
    if rejects:
        tokens = np.repeat(kept, sizes)
        ids, mask, sizes = ids[tokens], mask[tokens], sizes[kept]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    lost, counts, continued = int(cut.sum()), {}, cut > 0
    if lengths is not None:
        before, numbers = (
            _joined([part.before for part in found], np.int64)[kept],
            np.flatnonzero(kept),
        )
        made = shape(
            Whole(
                offsets, ids, mask, before, added, lambda i: texts.texts[int(numbers[i])].as_py()
            ),
            lengths,
            raw=raw,
        )
        rejects = (*rejects, *_too_long(made, rows, sizes, lengths))
        ids, offsets, rows, strings, added = (
            made.ids,
            made.offsets,
            rows[made.origin],
            strings[made.origin],
            made.added,
        )
        assert made.mask is not None
        mask, lost, counts, continued = made.mask, made.truncated, made.counts, made.continued
    before_read = 0
    if texts.goes_on is not None:
        continued = continued | texts.goes_on[kept]
        counts = counts | {"pieces": len(texts.rows) - len(np.unique(texts.rows))}
    if texts.lost is not None or texts.goes_on is not None:
        cut = (
            np.zeros(len(texts.rows), np.int64)
            if texts.lost is None
            else np.where(np.isin(texts.rows, rows), texts.lost, 0)
        )
        before_read = int(cut.clip(0).sum())
        touched = cut != 0 if texts.goes_on is None else (cut != 0) | texts.goes_on
        counts = counts | {texts.cut_by: len(np.unique(texts.rows[touched]))}
        if again := -int(cut.clip(None, 0).sum()):
            counts = counts | {"overlap": again}
    ends = _without_eos_inside(ends_closed(ids, offsets, tokenizer.eos_token_id), continued)
    lists = [
        pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in (ids, mask)
    ]
    columns = [lists[0], pa.array(ends), pa.array(rows), lists[1]]
    batch = pa.RecordBatch.from_arrays(
        columns, schema=cache_schema(tokenizer.vocab_size, loss_mask=True)
    )
    special, lost = int(added.sum()), lost + before_read
    escapes = tokenizer.special.policy == "escape"
    return EncodedDocuments(
        batch=batch,
        counts=Counts(
            docs=len(batch),
            tokens=len(ids),
            encoded=len(ids) - special + lost - counts.get("overlap", 0),
            added=special,
            truncated=lost,
            lengths=counts,
            lost=_lost(texts, tokenizer),
            trained=int(mask.sum()),
            special=0 if escapes else int(strings.sum()),
            escaped=int(strings.sum()) if escapes else 0,
        ),
        rejects=tuple(rejects),
    )


def _without_eos_inside(
    ends: NDArray[np.uint8], continued: NDArray[np.bool_] | None
) -> NDArray[np.uint8]:
    """UInt8[n] has_eos: 1 for documents too whose text goes on where they stop, as packing would
    teach the model to stop there.
    """
    return ends if continued is None else ends | continued


def _untrained(row: int) -> Reject:
    return Reject(row=row, reason=NOTHING_TO_TRAIN, detail="no trained token remains", benign=True)


def _too_long(
    made: Shaped, rows: NDArray[np.int64], sizes: NDArray[np.int64], lengths: Lengths
) -> list[Reject]:
    """What `shape` left out, of texts with these rows and lengths."""
    benign = lengths.policy.policy != "error"
    found = [_untrained(int(rows[i])) for i in made.untrained]
    for i in made.refused:
        detail = f"{sizes[i]} tokens, and max_length is {lengths.limit}"
        found.append(Reject(row=int(rows[i]), reason=TOO_LONG, detail=detail, benign=benign))
    return found


def _refused_strings(
    texts: Texts, strings: NDArray[np.int64], tokenizer: Tokenizer
) -> dict[int, Reject]:
    """By number, the texts that special_strings="error" refuses. strings: Int64[n], special strings
    in each.
    """
    if tokenizer.special.policy != "error":
        return {}
    found = {}
    for i in np.flatnonzero(strings).tolist():  # few
        string = tokenizer.special.first_in(texts.texts[i].as_py())
        detail = f"the text holds {'a special string' if string is None else repr(string)}, and special_strings is 'error'"
        found[i] = Reject(row=int(texts.rows[i]), reason="special_string", detail=detail)
    return found


def _lost(texts: Texts, tokenizer: Tokenizer) -> int:
    return tokenizer.lost.count(texts.texts.to_pylist()) if tokenizer.lost.possible else 0


def ends_closed(
    ids: NDArray[np.unsignedinteger], offsets: NDArray[np.int64], token: int | None
) -> NDArray[np.uint8]:
    """UInt8[n]: 1 where EOS is a document's last token, or its last but one: templates end turns
    with EOS and a newline.
    """
    closed = ends_with(ids, offsets, token)
    if token is None or not ids.size:
        return closed
    longer = np.diff(offsets) > 1
    return closed | (longer & (ids[np.maximum(offsets[1:] - 2, 0)] == token)).astype(np.uint8)


def _joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _edges(texts: Texts, batch_size: int) -> list[int]:
    """0 to all texts, in steps of at most `batch_size` texts and about CALL_BYTES bytes."""
    count = len(texts.texts)
    if not count:
        return [0]
    ends = np.frombuffer(texts.texts.buffers()[1], np.int64, count + 1, texts.texts.offset * 8)
    edges = [0]
    while edges[-1] < count:
        full = int(np.searchsorted(ends, ends[edges[-1]] + CALL_BYTES, side="right")) - 1
        edges.append(min(count, edges[-1] + batch_size, max(full, edges[-1] + 1)))
    return edges


def ends_with(
    ids: NDArray[np.unsignedinteger], offsets: NDArray[np.int64], token: int | None
) -> NDArray[np.uint8]:
    """UInt8[n]: 1 where a document's last token is `token`. No document is empty."""
    if token is None or not ids.size:
        return np.zeros(len(offsets) - 1, np.uint8)
    return (ids[offsets[1:] - 1] == token).astype(np.uint8)


def _audit(
    texts: Texts,
    ids: NDArray[np.unsignedinteger],
    offsets: NDArray[np.int64],
    tokenizer: Tokenizer,
    key: str,
    at: str,
    *,
    whole: bool,
) -> None:
    """Encodes one text in a thousand again with the reference. whole: max_length has cut
    nothing.
    """
    if not len(texts.texts) or tokenizer.backend.name == "tokenizers":
        return
    for i in _picked(texts, key):  # the reference takes one text at a time
        pieces = [piece for _, piece in _pieces(texts, i, key)]
        if pieces and _agree(pieces, ids[offsets[i] : offsets[i + 1]], tokenizer):
            continue
        expected = tokenizer.reference_encode(texts.texts[i].as_py(), whole=whole)
        if not np.array_equal(
            ids[offsets[i] : offsets[i + 1]], np.asarray(expected, dtype=np.uint32)
        ):
            raise _refuted(tokenizer, place(at, row=int(texts.rows[i])))


def _agree(pieces: list[str], ids: NDArray[np.unsignedinteger], tokenizer: Tokenizer) -> bool:
    """Whether the reference gives the tokens of `pieces`, the first of which begins the text of
    `ids`. If not, the whole text decides.
    """
    column = pa.array(pieces, pa.large_string())
    found = tokenizer.encode_column(column, whole=True)
    expected = [
        np.asarray(tokenizer.reference_encode(piece, whole=True), np.uint32) for piece in pieces
    ]
    stored = min(
        len(ids) - tokenizer.specials_per_text,
        len(expected[0]) - tokenizer.specials_per_text - LATE_TOKENS,
    )
    return np.array_equal(found.ids, np.concatenate(expected)) and np.array_equal(
        ids[: max(0, stored)], expected[0][: max(0, stored)]
    )


def _audit_spans(
    texts: Texts,
    ids: NDArray[np.unsignedinteger],
    mask: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    tokenizer: Tokenizer,
    key: str,
    at: str,
    *,
    raw: bool,
    whole: bool,
) -> None:
    """`_audit` for texts with spans: tokens and loss masks."""
    if not len(texts.texts) or tokenizer.backend.name == "tokenizers":
        return
    assert texts.spans is not None
    assert texts.ends is not None
    for i in _picked(texts, key):
        one, pieces = texts.texts.slice(i, 1), _pieces(texts, i, key)
        if pieces:
            parts = pa.array([piece for _, piece in pieces], pa.large_string())
            spans = [_within(texts.spans[i], first, first + len(piece)) for first, piece in pieces]
            ends = [NO_END] * len(pieces)
            found, asked = (
                encode_masked(tokenizer, parts, spans, ends, raw=raw, reference=r, whole=True)
                for r in (False, True)
            )
            if np.array_equal(found.ids, asked.ids) and np.array_equal(found.mask, asked.mask):
                continue
        expected = encode_masked(
            tokenizer,
            one,
            texts.spans[i : i + 1],
            [int(texts.ends[i])],
            raw=raw,
            reference=True,
            whole=whole,
        )
        here = slice(offsets[i], offsets[i + 1])
        if not (
            np.array_equal(ids[here], expected.ids) and np.array_equal(mask[here], expected.mask)
        ):
            raise _refuted(tokenizer, place(at, row=int(texts.rows[i])))


def _refuted(tokenizer: Tokenizer, at: str) -> TokenizerError:
    tokenizer.refute(
        f"{tokenizer.backend.name} {tokenizer.backend.version} differs from `tokenizers` on {at}"
    )
    return TokenizerError(
        at=at,
        problem=f"tokenizer {tokenizer.name}: {tokenizer.backend.name} does not give the tokens of `tokenizers`",
        fix="Run again: from now on `tokenizers` encodes, and ranges that were written are tokenized anew.",
    )


def _picked(texts: Texts, key: str) -> list[int]:
    """Numbers of the texts that are looked at again. Which ones follows from their content alone.

    A text longer than what is left of the budget has its turn with probability left / length, so
    long ones are looked at too.
    """
    count = len(texts.texts)
    picks = permute(
        np.arange(min(AUDITED_ROWS, math.ceil(count / AUDITED_SHARE))), count, fold(0, "audit", key)
    )
    sizes = np.diff(
        np.frombuffer(texts.texts.buffers()[1], np.int64, count + 1, texts.texts.offset * 8)
    )
    budget = max(AUDITED_BYTES, int(sizes.sum()) // AUDITED_SHARE)
    chosen: list[int] = []
    for i in picks.tolist():  # few rows
        size = int(sizes[i])
        if size <= budget or fold(0, "audit a long text", key, i) % size < budget:
            chosen.append(i)
        budget = max(0, budget - size)
    return chosen or [int(sizes.argmin())]


def sample_of(texts: pa.LargeStringArray, most_rows: int, most_bytes: int) -> pa.LargeStringArray:
    """The first texts, at most so many and of so many bytes; of a first one that is longer, what it
    begins with.
    """
    ends, data = _bytes_of(texts)
    count = min(
        most_rows, int(np.searchsorted(ends, ends[0] + most_bytes, side="right")) - 1, len(texts)
    )
    if count or not len(texts):
        return texts.slice(0, count)
    text = data[ends[0] : ends[1]]
    return pa.array([_decoded(text[: _border(text, most_bytes)])], pa.large_string())


def _pieces(texts: Texts, i: int, key: str) -> list[tuple[int, str]]:
    """(first character, piece) of what is looked at of text `i`, its beginning and one place more;
    nothing where it is short.
    """
    ends, data = _bytes_of(texts.texts)
    text = data[ends[i] : ends[i + 1]]
    if len(text) <= WHOLE_BYTES:
        return []
    place = PIECE_BYTES + fold(0, "audit a piece", key, i) % (len(text) - 3 * PIECE_BYTES)
    edges = [
        (0, _border(text, PIECE_BYTES)),
        (_border(text, place), _border(text, place + PIECE_BYTES)),
    ]
    return [
        (int(np.count_nonzero((text[:a] & 0xC0) != 0x80)), _decoded(text[a:b])) for a, b in edges
    ]


def _bytes_of(texts: pa.LargeStringArray) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """(ends Int64[n+1], bytes): text i is `bytes[ends[i] : ends[i + 1]]`."""
    if not len(texts):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, ends, data = texts.buffers()
    return np.frombuffer(ends, np.int64, len(texts) + 1, texts.offset * 8), np.frombuffer(
        data or b"", np.uint8
    )


def _border(text: NDArray[np.uint8], at: int) -> int:
    """The next place where text can be cut: in front of a space between two letters, else in front
    of a character.
    """
    window = text[at - 1 : at + BORDER_BYTES]
    letters = (window | 0x20) - ord("a") < 26  # unsigned: all other bytes are above
    spaces = np.flatnonzero(letters[:-2] & (window[1:-1] == ord(" ")) & letters[2:])
    found = spaces if spaces.size else np.flatnonzero((window[1:] & 0xC0) != 0x80)
    return at + int(found[0]) if found.size else len(text)


def _decoded(text: NDArray[np.uint8]) -> str:
    return text.tobytes().decode()


def _within(spans: Sequence[Sequence[int]], first: int, stop: int) -> list[list[int]]:
    """Character ranges as those of the piece from `first` to `stop`."""
    return [
        [max(a, first) - first, min(b, stop) - first] for a, b in spans if a < stop and b > first
    ]
