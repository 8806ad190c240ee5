"""Checking and auditing look at huge documents by samples of bytes: the reference tokenizer never
sees one whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.errors import TokenizerError
from easypipe.stages.tokenize import token_rows
from easypipe.stages.tokenize.text_rows import Texts
from easypipe.stages.tokenize.token_rows import (
    PIECE_BYTES,
    WHOLE_BYTES,
    encode_texts,
    sample_of,
)
from easypipe.transforms.tokenizer import fast, masked
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, UnencodableError
from strategies import examples
from token_support import small_tokenizer

LONG = "the quick naïve fox, 日本 1234567 jumps over " * 8000


def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every text that the reference is given from now on."""
    sizes: list[int] = []
    for name in ("reference_encode", "encode_with_characters"):
        own = getattr(Tokenizer, name)

        def spy(self: Any, texts: Any, own: Any = own, **options: Any) -> Any:
            sizes.extend(
                len(text.encode()) for text in ([texts] if isinstance(texts, str) else texts)
            )
            return own(self, texts, **options)

        monkeypatch.setattr(Tokenizer, name, spy)
    return sizes


def long_text(**more: Any) -> Texts:
    return Texts(
        texts=pa.array([LONG], pa.large_string()), rows=np.zeros(1, np.int64), rejects=(), **more
    )


@pytest.mark.parametrize("spans", [False, True])
def test_a_huge_document_is_audited_in_pieces(monkeypatch: pytest.MonkeyPatch, spans: bool) -> None:
    assert len(LONG) > WHOLE_BYTES
    tokenizer = small_tokenizer()
    assert tokenizer.backend.name == "gigatoken"
    sizes = seen(monkeypatch)
    if spans:
        texts = long_text(spans=[[[10, 50], [9000, 300_000]]], ends=np.zeros(1, np.uint8))
        encode_texts(texts, tokenizer, batch_size=8, at="a", raw=True, audit_key="k")
    else:
        encode_texts(long_text(), tokenizer, batch_size=8, at="a", audit_key="k")
    assert len(sizes) >= 2
    assert max(sizes) < 2 * PIECE_BYTES


@pytest.mark.parametrize("where", ["beginning", "everywhere"])
def test_wrong_tokens_of_a_huge_document_are_found(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tokenizer, own = small_tokenizer(), fast.FastEngine.encode
    assert tokenizer.backend.name == "gigatoken"

    def wrong(self: Any, column: Any) -> Any:
        offsets, ids = own(self, column)
        if where == "everywhere":
            return offsets, np.where(np.arange(len(ids)) % 1000 == 900, 7, ids)
        if len(ids) > 100_000:  # a fault that only long texts show
            ids = ids.copy()
            ids[50] += 1
        return offsets, ids

    monkeypatch.setattr(fast.FastEngine, "encode", wrong)
    with pytest.raises(TokenizerError, match="does not produce the tokens of `tokenizers`"):
        encode_texts(long_text(), tokenizer, batch_size=8, at="a", audit_key="k")


@pytest.mark.parametrize("text", ["naïve 日本 fox " * 500, LONG], ids=["whole", "pieces"])
def test_wrong_loss_masks_are_found(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def encode() -> None:
        texts = Texts(
            texts=pa.array([text], pa.large_string()),
            rows=np.zeros(1, np.int64),
            rejects=(),
            spans=[[[a, a + 4] for a in range(0, len(text) - 8, 8)]],
            ends=np.zeros(1, np.uint8),
        )
        encode_texts(texts, small_tokenizer(), batch_size=8, at="a", raw=True, audit_key="k")

    encode()
    monkeypatch.setattr(masked, "_in_bytes", lambda text, spans: spans)  # each as one byte
    with pytest.raises(TokenizerError, match="does not produce the tokens of `tokenizers`"):
        encode()


def test_what_the_reference_alone_refuses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.backend.name == "gigatoken"

    def refuses(self: Any, *_: Any, **__: Any) -> Any:
        raise UnencodableError(at="a", problem="it panics", fix="None.")

    for name in ("reference_encode", "encode_with_characters"):
        monkeypatch.setattr(Tokenizer, name, refuses)
    with pytest.raises(TokenizerError, match="does not produce the tokens of `tokenizers`"):
        encode_texts(long_text(), tokenizer, batch_size=8, at="a", audit_key="k")


@given(
    texts=st.lists(st.text(max_size=30), max_size=8),
    most_rows=st.integers(1, 9),
    most_bytes=st.integers(4, 80),
)
@examples(80)
def test_a_sample_is_what_texts_begin_with(
    texts: list[str], most_rows: int, most_bytes: int
) -> None:
    # a buffer that begins elsewhere
    column = pa.array(["x" * 9, *texts], pa.large_string()).slice(1)
    found = sample_of(column, most_rows, most_bytes).to_pylist()
    assert len(found) <= most_rows
    if texts and len(texts[0].encode()) > most_bytes:
        assert len(found) == 1
        assert texts[0].startswith(found[0])
        assert most_bytes <= len(found[0].encode()) <= most_bytes + token_rows.BORDER_BYTES
    else:
        assert found == texts[: len(found)]
        assert sum(len(text.encode()) for text in found) <= most_bytes
        assert bool(found) == bool(texts)


@pytest.mark.parametrize("word", ["two words ", "ü ", "日本 ", "a𝄞b "])
def test_pieces_are_named_by_the_character_at_which_they_begin(word: str) -> None:
    """Spans of what is trained count characters, and a text is cut at bytes."""
    text = "".join(f"{i} {word}" for i in range(WHOLE_BYTES // 5))
    texts = Texts(texts=pa.array(["short", text], pa.large_string()), rows=np.arange(2), rejects=())
    assert token_rows._pieces(texts, 0, "key") == []
    for key in ("key", "other"):
        pieces = token_rows._pieces(texts, 1, key)
        assert pieces[0][0] == 0
        assert len({first for first, _ in pieces}) == len(pieces) == 2
        for first, piece in pieces:
            assert text[first : first + len(piece)] == piece
            assert len(piece.encode()) + token_rows.BORDER_BYTES >= PIECE_BYTES
            assert len(piece.encode()) <= PIECE_BYTES + 2 * token_rows.BORDER_BYTES
            end = text[first + len(piece) :]
            assert not word.startswith("two") or end.startswith(" words")
    spans = [[0, 3], [5, 9], [9, 12]]
    assert token_rows._within(spans, 4, 10) == [[1, 5], [5, 6]]
    assert token_rows._within(spans, 3, 5) == []
    assert token_rows._within(spans, 2, 6) == [[0, 1], [3, 4]]
