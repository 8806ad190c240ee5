from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from easypipe.core.errors import ConfigError, TokenizerError
from easypipe.transforms.tokenizer.bpe import END_OF_TEXT, train_bpe
from easypipe.transforms.tokenizer.proof import torture
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from token_support import texts


def test_a_trained_tokenizer_is_lossless_fast_and_reproducible(tmp_path: Path) -> None:
    first = train_bpe(texts(300), 400, ["<|user|>"], tmp_path / "a")
    second = train_bpe(iter(texts(300)), 400, ["<|user|>"], tmp_path / "b")
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    tokenizer = load_tokenizer(str(first))
    assert tokenizer.vocab_size == 400
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 0)
    assert tokenizer.reference_encode(f"a{END_OF_TEXT}<|user|>")[1:] == [0, 1]
    assert tokenizer.backend.name == "gigatoken"
    for text in torture([END_OF_TEXT]).to_pylist():
        encoded = tokenizer.encode_column(pa.array([text]))
        assert tokenizer.decode(encoded.ids) == text


def test_the_least_vocabulary_that_the_error_names_is_bytes_alone(tmp_path: Path) -> None:
    assert load_tokenizer(str(train_bpe(["abc"], 257, [], tmp_path))).vocab_size == 257


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"vocab_size: 200 tokens do not hold 256 bytes and 1 special tokens\. Give at least "
        r"257\.",
    ):
        train_bpe(["abc"], 200, [], tmp_path)
    with pytest.raises(TokenizerError, match="there is no text to learn from"):
        train_bpe([], 300, [], tmp_path)
    assert not list(tmp_path.iterdir())


def test_fewer_tokens_than_asked_for_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_bpe(["abab"], 500, [], tmp_path)
    assert (
        f"the text gives {load_tokenizer(str(tmp_path)).vocab_size} tokens, and vocab_size is 500"
        in caplog.text
    )
