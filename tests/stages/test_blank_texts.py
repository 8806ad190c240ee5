"""Texts of white space alone: counted and left out, whatever on_error says of bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
from chat_support import chat_tokenizer
from easypipe import DatasetConfig, OrderConfig, Pipeline, PipelineConfig
from easypipe.core.errors import SourceError
from easypipe.core.text import has_text
from strategies import examples
from token_support import small_tokenizer_folder

TEXTS = ["one", "", "  \n", "\u00a0\u3000\x1c", "two ", "\u200b"]  # the last is not white space


def tokens(folder: Path, rows: Any, *, tokenizer: Path | None = None, **options: Any) -> Any:
    config = PipelineConfig(
        datasets=(DatasetConfig(name="d", data_files=rows, **options),),
        default_tokenizer=str(tokenizer or small_tokenizer_folder()),
        cache_dir=folder,
    )
    (source,) = Pipeline(config).source().tokenize().get_data().values()
    return source


@examples(40)
@given(
    st.lists(
        st.one_of(
            st.none(), st.text(" \t\n\x0b\x1f\x85\u00a0\u2003\u2028\u3000\u200bé日a", max_size=5)
        )
    )
)
def test_text_is_what_strip_leaves(texts: list[str | None]) -> None:
    expected = [bool(text and text.strip()) for text in texts]
    for kind in (pa.string(), pa.large_string()):
        column = pa.array(["x", *texts], kind).slice(1)
        assert has_text(column).tolist() == expected


def test_every_character_of_white_space() -> None:
    every = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    assert [
        c
        for c, kept in zip(every, has_text(pa.array(every)).tolist(), strict=True)
        if kept != bool(c.strip())
    ] == []


@pytest.mark.parametrize("on_error", ["error", "skip", "quarantine"])
def test_they_are_counted_and_never_charged(tmp_path: Path, on_error: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    budget = {} if on_error == "error" else {"max_bad_rows": 0}
    cache = tokens(tmp_path / "cache", str(path), on_error=on_error, **budget).materialize()
    assert cache.ledger.find("tokenize", "d", "rows").out == {"written": 3, "empty": 3}
    assert [cache.where(doc)[1] for doc in range(3)] == [0, 4, 5]
    assert cache.quarantine is None
    laws.assert_conserved(cache.ledger)


def test_null_keeps_the_policy(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="row 2, column 'text': null"):
        tokens(tmp_path, {"text": ["one", " ", None]}).materialize()


def test_a_dataset_of_nothing_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError,
        match="not one of 2 rows became a document: empty 2; the first is d, row 0: an empty text",
    ):
        tokens(tmp_path, {"text": ["", " "]}).materialize()


def test_prompts_templates_and_conversations(tmp_path: Path) -> None:
    rows = [{"q": "a", "b": "c"}, {"q": " ", "b": "\n"}]
    for prompt in (
        {"format_type": "custom", "input_columns": ["q", "b"], "template": "{q}{b}"},
        {"format_type": "custom", "input_columns": ["q", "b"], "template": "{{ q }}{{ b }}"},
        {"format_type": "prompt_completion", "input_columns": ["q"], "label_column": "b"},
    ):
        cache = tokens(tmp_path, rows, prompt=prompt, tokenizer=chat_tokenizer()).materialize()
        assert cache.ledger.find("tokenize", "d", "rows").out == {"written": 1, "empty": 1}, prompt
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    said = tokens(
        tmp_path,
        [{"messages": talk}, {"messages": []}],
        content_field="messages",
        tokenizer=chat_tokenizer(),
    )
    assert said.materialize().ledger.find("tokenize", "d", "rows").out == {"written": 1, "empty": 1}


def test_streaming(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = PipelineConfig(
        datasets=(DatasetConfig(name="d", data_files=str(path)),),
        default_tokenizer=str(small_tokenizer_folder()),
        streaming=True,
    )
    loader = (
        Pipeline(config)
        .source()
        .tokenize()
        .pack({"seq_length": 8})
        .load({"batch_size": 1, "num_epochs": 1})
        .build()
    )
    list(loader)
    assert loader.ledger().find("stream", "d", "rows").out == {"documents": 3, "empty": 3}


@pytest.mark.parametrize("shuffle", [True, False])
def test_streaming_of_files_without_a_row_names_them(tmp_path: Path, shuffle: bool) -> None:
    (tmp_path / "head.csv").write_text("text\n")
    config = PipelineConfig(
        datasets=(DatasetConfig(name="d", data_files=str(tmp_path / "head.csv")),),
        default_tokenizer=str(small_tokenizer_folder()),
        order=OrderConfig(shuffle=shuffle),
        streaming=True,
    )
    loader = Pipeline(config).source().tokenize().pack({"seq_length": 8}).load({"batch_size": 1})
    with pytest.raises(SourceError, match=r"dataset 'd': no row in .*head\.csv"):
        list(loader.build())
