"""Encodes texts to documents, audits one in a thousand; why texts are skipped or rejected."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from easypipe.cache.encoder import EncodedDocuments, token_documents
from easypipe.cache.manifest import Counts
from easypipe.cache.reader import cache_schema
from easypipe.core.errors import SourceError, TokenizerError, place
from easypipe.core.protocols import Reject
from easypipe.core.random import fold, permute
from easypipe.core.schema import offsets_of, token_dtype
from easypipe.core.text import bytes_of
from easypipe.core.values import Bools, Int64, UInt8
from easypipe.stages.tokenize.text_rows import Texts
from easypipe.transforms.refused import NOTHING_TO_TRAIN, REFUSED_BY_TOKENIZER, TOO_LONG, Refused
from easypipe.transforms.tokenizer.lengths import Lengths, Shaped, shape
from easypipe.transforms.tokenizer.masked import NO_END, encode_masked, has_target
from easypipe.transforms.tokenizer.ragged import EncodedTexts, Ids, Tokens
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, UnencodableError

AUDITED_SHARE = 1000  # one text in this many is encoded again with the reference
AUDITED_ROWS = 64  # the most texts of one range that are checked
# bytes that are checked of a range, or a thousandth of it if that is more
AUDITED_BYTES = 1 << 13
# A longer text is checked in pieces, because the reference takes seconds, and 150 bytes of memory
# per byte.
WHOLE_BYTES = 256 << 10
PIECE_BYTES = 32 << 10
# the range that is searched for a place at which no tokenizer merges across
BORDER_BYTES = 4 << 10
LATE_TOKENS = 16  # the last tokens of a piece, which its cut may have changed
# Bytes of text encoded at a time. A call costs half a millisecond, and four bytes a token, which
# the next call reuses: the C library returns the memory of larger blocks to the system, which then
# clears every page again. The encoder's memory is checked between two calls.
CALL_BYTES = 4 << 20
LONGEST = (1 << 31) - 1  # lengths are Int32 in plans


def encode_texts(
    texts: Texts,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    at: str,
    raw: bool = True,
    audit_key: str | None = None,
    lengths: Lengths | None = None,
) -> EncodedDocuments:
    """Encodes texts to documents, with a loss_mask if the texts have spans.

    Args:
        batch_size: The most texts encoded at a time; affects memory and speed, never tokens.
        at: The name of the file in errors.
        raw: Whether no template wrote the texts; special tokens and special_strings then apply.
        audit_key: A digest that chooses the texts that the reference encodes too; None: none.
        lengths: How they are cut, instead of max_length.

    Raises:
        TokenizerError: The fast backend differs from the reference.
        SourceError: A text has more than 2^31 tokens.
    """
    made, failed = _encoded(texts, tokenizer, batch_size, raw=raw, whole=lengths is not None)
    _require_short(made, texts, at)
    if audit_key is not None and tokenizer.encodes_fast(texts.texts):
        _audit(texts, made, tokenizer, audit_key, at, raw=raw, whole=lengths is not None)
    rejects = _rejected(texts, made, tokenizer) | failed
    kept = np.ones(len(texts.rows), np.bool_)
    kept[list(rejects)] = False
    if lengths is not None and lengths.pairs:  # both answers are cut, or none
        kept = kept.reshape(-1, 2).all(axis=1).repeat(2)
    refused = [rejects[i] for i in sorted(rejects)]
    sizes, strings, rows = np.diff(made.offsets)[kept], made.special[kept], texts.rows[kept]
    shaped = _shaped(texts, made.where(kept), np.flatnonzero(kept), lengths, raw=raw)
    if lengths is not None:
        refused += _too_long(shaped, rows, sizes, lengths)
    rows, mask, texts_made = rows[shaped.origin], shaped.mask, np.unique(shaped.origin)
    gone, counts = _cut_before(texts, rows)
    lost = shaped.truncated + gone
    counts = {n: shaped.counts.get(n, 0) + counts.get(n, 0) for n in shaped.counts | counts}
    continued = shaped.continued | (False if texts.goes_on is None else texts.goes_on[kept])
    found, special = int(strings[texts_made].sum()), int(shaped.added.sum())
    escapes = tokenizer.special.policy == "escape"
    return EncodedDocuments(
        batch=_batch(shaped, rows, continued, tokenizer, plain=texts.spans is None),
        counts=Counts(
            docs=len(rows),
            tokens=len(shaped.ids),
            encoded=len(shaped.ids) - special + lost - counts.get("overlap", 0),
            added=special,
            truncated=lost,
            lengths=counts,
            lost=tokenizer.lost.count(texts.texts.to_pylist()) if tokenizer.lost.possible else 0,
            trained=None if mask is None else int(mask.sum()),
            special=0 if escapes else found,
            escaped=found if escapes else 0,
        ),
        rejects=tuple(refused),
    )


def _require_short(made: EncodedTexts, texts: Texts, at: str) -> None:
    """Raises SourceError for a text with too many tokens for an Int32."""
    sizes = np.diff(made.offsets)
    if sizes.size and sizes.max() > LONGEST:
        raise SourceError(
            at=place(at, row=int(texts.rows[int(sizes.argmax())])),
            problem=f"{sizes.max()} tokens in one text",
            fix="Set max_length, or split it.",
        )


def _shaped(
    texts: Texts,
    made: EncodedTexts,
    numbers: Int64,
    lengths: Lengths | None,
    *,
    raw: bool,
) -> Shaped:
    """Returns the documents cut to their length.

    Args:
        texts: All texts.
        made: The encoded texts that become documents.
        numbers: Int64[m], the numbers of these texts.
        lengths: How they are cut; None: `made` is already cut.
        raw: As in `encode_texts`.
    """
    if lengths is not None:
        return shape(made, lambda i: texts.texts[int(numbers[i])].as_py(), lengths, raw=raw)
    continued = (made.truncated > 0) & (made.mask is not None)
    same, cut = np.arange(len(numbers)), int(made.truncated.sum())
    return Shaped(made.offsets, made.ids, made.mask, same, made.added, continued, cut, [], [], {})


def _batch(
    shaped: Shaped,
    rows: Int64,
    continued: Bools,
    tokenizer: Tokenizer,
    *,
    plain: bool,
) -> pa.RecordBatch:
    """Returns the documents as a batch of the cache's schema."""
    offsets, eos = shaped.offsets, tokenizer.eos_token_id
    ends = (ends_with if plain else ends_closed)(shaped.ids, offsets, eos)
    schema = cache_schema(tokenizer.vocab_size, loss_mask=shaped.mask is not None)
    # For packing, a document that continues elsewhere counts as ended: an added EOS would teach the
    # model to stop there.
    return token_documents(schema, offsets, shaped.ids, ends | continued, rows, shaped.mask)


def _encoded(
    texts: Texts, tokenizer: Tokenizer, batch_size: int, *, raw: bool, whole: bool
) -> tuple[EncodedTexts, dict[int, Reject]]:
    """Encodes the texts in calls of bounded size.

    Returns:
        (all texts, without tokens if the tokenizer rejects them; the reasons, by their numbers).
    """
    found: list[EncodedTexts] = []
    failed: dict[int, Reject] = {}
    calls = deque(itertools.pairwise(_edges(texts, batch_size)))
    while calls:
        first, last = calls.popleft()
        some = texts.texts.slice(first, last - first)
        try:
            if texts.spans is None or texts.ends is None:
                found.append(tokenizer.encode_column(some, whole=whole))
            else:
                spans, ends = texts.spans[first:last], texts.ends[first:last].tolist()
                found.append(encode_masked(tokenizer, some, spans, ends, raw=raw, whole=whole))
        except UnencodableError as error:
            if last - first > 1:  # one by one, to find the bad text
                calls.extendleft((i, i + 1) for i in reversed(range(first, last)))
                continue
            refused = Refused(REFUSED_BY_TOKENIZER, error.problem)
            failed[first] = refused.of_row(int(texts.rows[first]))
            found.append(EncodedTexts.empty(masked=texts.spans is not None))
    return EncodedTexts.joined(found, np.dtype(token_dtype(tokenizer.vocab_size))), failed


def _rejected(texts: Texts, made: EncodedTexts, tokenizer: Tokenizer) -> dict[int, Reject]:
    """Returns the texts that do not become documents, by their numbers."""
    if made.mask is None:
        # Such a text has only special tokens: the tokenizer has no token for any part of it.
        kept, reason = np.diff(made.offsets) > tokenizer.specials_per_text, "no_tokens"
        detail = f"the tokenizer {tokenizer.name} makes no tokens from this text"
        none = Refused(reason, detail)
    else:
        kept, none = has_target(made.mask, made.offsets), _UNTRAINED
    rejects = {i: none.of_row(int(texts.rows[i])) for i in np.flatnonzero(~kept).tolist()}
    return rejects | _refused_strings(texts, made.special, tokenizer)


def _cut_before(texts: Texts, rows: Int64) -> tuple[int, dict[str, int]]:
    """Counts what was cut before the texts were encoded.

    Args:
        texts: All texts.
        rows: The rows that have become documents.

    Returns:
        (how many tokens were cut, the counts for the ledger).
    """
    told = {"pieces": texts.pieces} if texts.pieces else {}
    if texts.lost is None and texts.goes_on is None:
        return 0, told
    cut = np.zeros(len(texts.rows), np.int64)
    if texts.lost is not None:
        cut = np.where(np.isin(texts.rows, rows), texts.lost, 0)
    touched, counts = cut != 0, told
    if texts.goes_on is not None:
        touched = touched | texts.goes_on
    counts[texts.cut_by] = len(np.unique(texts.rows[touched]))
    if again := -int(cut.clip(None, 0).sum()):
        counts["overlap"] = again
    return int(cut.clip(0).sum()), counts


_UNTRAINED = Refused(NOTHING_TO_TRAIN, "no trained token remains")


def _too_long(made: Shaped, rows: Int64, sizes: Int64, lengths: Lengths) -> list[Reject]:
    """Returns rejects for the texts that `shape` left out.

    `rows` and `sizes` are the row and the number of tokens of each text.
    """
    benign = lengths.policy.policy != "error"
    found = [_UNTRAINED.of_row(int(rows[i])) for i in made.untrained]
    for i in made.refused:
        detail = f"{sizes[i]} tokens, and max_length is {lengths.limit}"
        found.append(Reject(row=int(rows[i]), reason=TOO_LONG, detail=detail, benign=benign))
    return found


def _refused_strings(texts: Texts, strings: Int64, tokenizer: Tokenizer) -> dict[int, Reject]:
    """Returns the texts that special_strings="error" rejects, by their numbers.

    Args:
        strings: Int64[n], the number of special strings in each.
    """
    if tokenizer.special.policy != "error":
        return {}
    found = {}
    for i in np.flatnonzero(strings).tolist():  # few texts
        string = tokenizer.special.first_in(texts.texts[i].as_py())
        detail = (
            f"the text holds {'a special string' if string is None else repr(string)}, and "
            "special_strings is 'error'"
        )
        found[i] = Reject(row=int(texts.rows[i]), reason="special_string", detail=detail)
    return found


def ends_closed(ids: Ids, offsets: Int64, token: int | None) -> UInt8:
    """Returns UInt8[n]: 1 if EOS is a document's last or second to last token.

    Chat templates end turns with EOS and a newline.
    """
    closed = ends_with(ids, offsets, token)
    if token is None or not ids.size:
        return closed
    longer = np.diff(offsets) > 1
    return closed | (longer & (ids[np.maximum(offsets[1:] - 2, 0)] == token)).astype(np.uint8)


def _edges(texts: Texts, batch_size: int) -> list[int]:
    """Returns cuts from 0 to the number of texts, at most `batch_size` and CALL_BYTES apart."""
    count = len(texts.texts)
    if not count:
        return [0, 0]
    ends, _ = bytes_of(texts.texts)
    edges = [0]
    while edges[-1] < count:
        full = int(np.searchsorted(ends, ends[edges[-1]] + CALL_BYTES, side="right")) - 1
        edges.append(min(count, edges[-1] + batch_size, max(full, edges[-1] + 1)))
    return edges


def ends_with(ids: Ids, offsets: Int64, token: int | None) -> UInt8:
    """Returns UInt8[n]: 1 if a document's last token is `token`. No document may be empty."""
    if token is None or not ids.size:
        return np.zeros(len(offsets) - 1, np.uint8)
    return (ids[offsets[1:] - 1] == token).astype(np.uint8)


def _audit(
    texts: Texts,
    made: EncodedTexts,
    tokenizer: Tokenizer,
    key: str,
    at: str,
    *,
    raw: bool,
    whole: bool,
) -> None:
    """Encodes one text in a thousand again with the reference, to tokens and loss masks.

    Args:
        made: Their tokens by the fast backend.
        key: A digest that decides which texts.
        at: The name of the file in errors.
        raw: As in `encode_texts`.
        whole: Whether max_length has cut nothing.

    Raises:
        TokenizerError: The fast backend differs.
    """
    for i in _picked(texts, key):  # the reference takes one text at a time
        spans, ends = None, None
        if texts.spans is not None and texts.ends is not None:
            spans, ends = texts.spans[i : i + 1], [int(texts.ends[i])]
        here = slice(made.offsets[i], made.offsets[i + 1])
        mask = None if made.mask is None else made.mask[here]
        stored = Tokens(np.array([0, here.stop - here.start]), made.ids[here], mask)
        pieces = _pieces(texts, i, key)
        text = texts.texts.slice(i, 1)
        try:
            equal = (pieces and _agree(pieces, spans, stored.ids, tokenizer, raw=raw)) or _equal(
                stored, _again(text, spans, ends, tokenizer, raw, whole, reference=True)
            )
        except UnencodableError:
            equal = not stored.ids.size  # also rejected before
        if not equal:
            raise _refuted(tokenizer, place(at, row=int(texts.rows[i])))


def _equal(one: Tokens, two: Tokens) -> bool:
    if one.mask is None or two.mask is None:
        return np.array_equal(one.ids, two.ids)
    return np.array_equal(one.ids, two.ids) and np.array_equal(one.mask, two.mask)


def _again(
    texts: pa.LargeStringArray,
    spans: Sequence[Sequence[Sequence[int]]] | None,
    ends: Sequence[int] | None,
    tokenizer: Tokenizer,
    raw: bool,
    whole: bool,
    *,
    reference: bool,
) -> Tokens:
    """Encodes some texts, of which `spans` are trained on, with either encoder."""
    if spans is not None and ends is not None:
        made = encode_masked(
            tokenizer, texts, spans, ends, raw=raw, reference=reference, whole=whole
        )
        return Tokens(*made[:3])
    if not reference:
        return Tokens(*tokenizer.encode_column(texts, whole=whole)[:3])
    found = [tokenizer.reference_encode(text, whole=whole) for text in texts.to_pylist()]
    return Tokens(offsets_of([len(one) for one in found]), np.concatenate(found).astype(np.uint32))


def _agree(
    pieces: Sequence[tuple[int, str]],
    spans: Sequence[Sequence[Sequence[int]]] | None,
    ids: Ids,
    tokenizer: Tokenizer,
    *,
    raw: bool,
) -> bool:
    """Returns whether both encoders produce the same tokens for `pieces`.

    The first piece is the beginning of the text with tokens `ids`. If they differ, the caller
    compares the whole text, because only that decides.
    """
    parts = pa.array([piece for _, piece in pieces], pa.large_string())
    within = ends = None
    if spans is not None:
        within = [_within(spans[0], first, first + len(piece)) for first, piece in pieces]
        ends = [NO_END] * len(pieces)
    one, two = (
        _again(parts, within, ends, tokenizer, raw, True, reference=reference)
        for reference in (False, True)
    )
    stored = min(len(ids), int(two.sizes[0]) - LATE_TOKENS) - tokenizer.specials_per_text
    begin = slice(0, 0 if spans is not None else max(0, stored))
    return _equal(one, two) and np.array_equal(ids[begin], two.ids[begin])


def _refuted(tokenizer: Tokenizer, at: str) -> TokenizerError:
    """Records that the fast backend is wrong, and returns the error that says so."""
    tokenizer.refute(
        f"{tokenizer.backend.name} {tokenizer.backend.version} differs from `tokenizers` on {at}"
    )
    return TokenizerError(
        at=at,
        problem=f"tokenizer {tokenizer.name}: {tokenizer.backend.name} does not produce the tokens "
        "of `tokenizers`",
        fix="Run again: from now on `tokenizers` encodes, and ranges that were written are "
        "tokenized again.",
    )


def _picked(texts: Texts, key: str) -> list[int]:
    """Returns the numbers of the texts that are encoded again; only their content decides which.

    A text longer than the rest of the budget is chosen with probability rest / length, so that long
    texts are also checked.
    """
    count = len(texts.texts)
    picks = permute(
        np.arange(min(AUDITED_ROWS, math.ceil(count / AUDITED_SHARE))), count, fold(0, "audit", key)
    )
    sizes = np.diff(bytes_of(texts.texts)[0])
    budget = max(AUDITED_BYTES, int(sizes.sum()) // AUDITED_SHARE)
    chosen: list[int] = []
    for i in picks.tolist():  # few rows
        size = int(sizes[i])
        if size <= budget or fold(0, "audit a long text", key, i) % size < budget:
            chosen.append(i)
        budget = max(0, budget - size)
    return chosen or [int(sizes.argmin())]


def sample_of(texts: pa.LargeStringArray, most_rows: int, most_bytes: int) -> pa.LargeStringArray:
    """Returns the first texts, at most `most_rows` of them and `most_bytes` bytes.

    If the first is longer, its beginning is returned.
    """
    ends, data = bytes_of(texts)
    count = min(
        most_rows, int(np.searchsorted(ends, ends[0] + most_bytes, side="right")) - 1, len(texts)
    )
    if count or not len(texts):
        return texts.slice(0, count)
    text = data[ends[0] : ends[1]]
    return pa.array([_decoded(text[: _border(text, most_bytes)])], pa.large_string())


def _pieces(texts: Texts, i: int, key: str) -> list[tuple[int, str]]:
    """Returns (first character, piece) for the two pieces of text `i` that are checked.

    They are its beginning and one more place; a short text has none.
    """
    ends, data = bytes_of(texts.texts)
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


def _border(text: UInt8, at: int) -> int:
    """Returns the next place, in bytes, at which text can be cut.

    It is before a space between two letters, or else before a character.
    """
    window = text[at - 1 : at + BORDER_BYTES]
    letters = (window | 0x20) - ord("a") < 26  # unsigned: all other bytes give larger numbers
    spaces = np.flatnonzero(letters[:-2] & (window[1:-1] == ord(" ")) & letters[2:])
    found = spaces if spaces.size else np.flatnonzero((window[1:] & 0xC0) != 0x80)
    return at + int(found[0]) if found.size else len(text)


def _decoded(text: UInt8) -> str:
    return text.tobytes().decode()


def _within(spans: Sequence[Sequence[int]], first: int, stop: int) -> list[list[int]]:
    """Returns character ranges relative to the piece from `first` to `stop`."""
    return [
        [max(a, first) - first, min(b, stop) - first] for a, b in spans if a < stop and b > first
    ]


def equal_documents(ids: Ids, begins: Sequence[Int64], sizes: Sequence[Int64]) -> int:
    """Returns how many pairs have two equal halves.

    Args:
        ids: The tokens.
        begins: Where the first and the second half of each pair begin.
        sizes: The number of tokens of these halves.
    """
    alike = np.flatnonzero(sizes[0] == sizes[1])
    places = zip(begins[0][alike], begins[1][alike], sizes[0][alike], strict=True)
    return sum(np.array_equal(ids[a : a + n], ids[b : b + n]) for a, b, n in places)
