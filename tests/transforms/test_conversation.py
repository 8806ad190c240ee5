"""Conversations in chains of transforms."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
from chat_support import MARKED, chat_tokenizer
from easypipe import Chat, FilterNonEmpty, Rename
from easypipe.core.errors import ConfigError, SourceError, TokenizerError
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.transforms.columns.base import TransformedSource
from strategies import examples, row_cuts


def talk(*turns: str) -> list[dict[str, Any]]:
    return [
        {"role": "user" if i % 2 == 0 else "assistant", "content": turn}
        for i, turn in enumerate(turns)
    ]


@examples(8)
@given(
    turns=st.lists(
        st.lists(st.text("ab <|im_end|>", max_size=6), max_size=3), min_size=1, max_size=8
    ),
    cuts=row_cuts(),
)
def test_laws(turns: list[list[str]], cuts: list[int]) -> None:
    rows = [{"messages": talk(*words) or None, "n": i} for i, words in enumerate([*turns, ["a"]])]
    source = TransformedSource(
        InMemoryShardedSource(rows),
        Chat(chat_tokenizer()) >> FilterNonEmpty("text"),
        on_error="skip",
    )
    laws.assert_stateless_reads(source, cuts)
    whole = source.read(0, 0, len(rows))
    assert source.select(["text"]).read(0, 0, len(rows)).column("text").equals(whole.column("text"))
    assert whole.column("n").to_pylist() == [row["n"] for row in rows if row["messages"]]


def test_text_as_the_template_writes_it() -> None:
    source = InMemoryShardedSource([{"talk": talk("Two?", "Four."), "n": 1}])
    made = (Rename({"talk": "messages"}) >> Chat(chat_tokenizer(), into="words"))(source).read(
        0, 0, 1
    )
    assert made.schema.names == ["messages", "n", "words"]
    expected = "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
    assert made.column("words").to_pylist() == [expected]
    assert Chat(chat_tokenizer(), messages="talk", chat_template=MARKED)(source).read(
        0, 0, 1
    ).column("text").to_pylist() == [expected]


def test_tools_are_those_of_their_row() -> None:
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    rows = [{"messages": talk("a"), "tools": tools} for tools in ([tool], [], None)]
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = Chat(chat_tokenizer(), tools="tools", chat_template=template)
    texts = [f"{json.dumps([tool])}a", "nulla", "nulla"]
    for first, last in ((0, 3), (1, 2), (2, 3)):  # also where no row has any
        some = chat(InMemoryShardedSource(rows[first:last]))
        assert some.read(0, 0, last - first).column("text").to_pylist() == texts[first:last]


def test_what_is_no_conversation_is_that_row_s() -> None:
    rows = [
        {"messages": talk("a")},
        {"messages": []},
        {"messages": None},
        {"messages": [{"role": None, "content": "x"}]},
    ]
    source = TransformedSource(InMemoryShardedSource(rows), Chat(chat_tokenizer()), on_error="skip")
    assert [(reject.row, reject.reason) for reject in source.scan(0, 0, 4).rejects] == [
        (1, "empty"),
        (2, "null"),
        (3, "no_role"),
    ]
    with pytest.raises(SourceError, match=re.escape("memory, row 2: null: no messages")):
        TransformedSource(InMemoryShardedSource(rows), Chat(chat_tokenizer())).read(0, 0, 4)


def test_refusals() -> None:
    plain = Chat(chat_tokenizer())
    others = [
        Chat(chat_tokenizer(), into="x"),
        Chat(chat_tokenizer(), messages="m"),
        Chat(chat_tokenizer(), chat_template=MARKED),
    ]
    others += [
        Chat(chat_tokenizer(), tools="t"),
        Chat(chat_tokenizer(), template_date="2026-01-31"),
    ]
    assert len({plain.fingerprint, *(other.fingerprint for other in others)}) == 6
    assert Chat(chat_tokenizer()).fingerprint == plain.fingerprint
    with pytest.raises(SourceError, match="column 'messages' holds int64, not lists of objects"):
        plain(InMemoryShardedSource({"messages": [1]}))
    with pytest.raises(SourceError, match="no column 'messages'"):
        plain(InMemoryShardedSource({"message": ["x"]}))
    for into in ("", ROW_NUMBER):
        with pytest.raises(ConfigError, match=f"'{into}' cannot name a column"):
            Chat(chat_tokenizer(), into=into)
    hostile = Chat(chat_tokenizer(), chat_template="{% for i in range(10**9) %}{% endfor %}")
    with pytest.raises(TokenizerError, match=r"row 0: .*the template cannot be used"):
        hostile(InMemoryShardedSource([{"messages": talk("a")}])).read(0, 0, 1)
