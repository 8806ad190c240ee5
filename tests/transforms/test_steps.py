"""How much is encoded or rendered at a time changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Encoding

from chat_support import CHATML, talks
from easypipe.transforms.chat import pool
from easypipe.transforms.chat.render import ChatTemplate
from easypipe.transforms.tokenizer import tokenizer as tokenizers
from easypipe.transforms.tokenizer.tokenizer import Tokenizer
from pipelines import texts
from token_support import small_tokenizer

TEXTS = ["", *texts(20), "é" * 50, "", "x"]


@pytest.mark.parametrize("most", [1, 40, 1 << 30])
@pytest.mark.parametrize("skipped", [0, 3])
def test_bytes_for_the_reference(most: int, skipped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_REFERENCE_BYTES", most)
    usual, sizes = Tokenizer._reference_batch, []

    def batch(self: Tokenizer, some: list[str], **how: bool) -> list[Encoding]:
        assert some, "a step of nothing never ends"
        sizes.append(sum(len(text.encode()) for text in some) if len(some) > 1 else 0)
        return usual(self, some, **how)

    monkeypatch.setattr(Tokenizer, "_reference_batch", batch)
    tokenizer = small_tokenizer(backend="tokenizers")
    found = tokenizer.encode_column(pa.array(TEXTS, pa.large_string()).slice(skipped))
    assert max(sizes) <= most
    each = np.split(found.ids, found.offsets[1:-1])
    assert [ids.tolist() for ids in each] == [
        tokenizer.reference_encode(text) for text in TEXTS[skipped:]
    ]


@pytest.mark.parametrize(("rows", "characters"), [(1, 1), (3, 1 << 20), (64, 100)])
def test_conversations_of_a_request(
    rows: int, characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = [{"tools": None} | row for row in talks(9)]
    template = ChatTemplate(CHATML, None, {}, ("<|im_end|>",), "assistant", None, "here")
    usual = template.render(given)
    monkeypatch.setattr(pool, "BATCH_ROWS", rows)
    monkeypatch.setattr(pool, "BATCH_CHARACTERS", characters)
    monkeypatch.setattr(pool, "LARGE_CALL", 0)
    assert template.render(given) == usual
    assert len(usual) == 9
