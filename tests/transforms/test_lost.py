"""What a tokenizer loses: characters without a token, and tokens that share an id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from easypipe import (
    DatasetConfig,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    load_tokenizer,
)
from easypipe.core.errors import TokenizerError
from easypipe.transforms.tokenizer import lost
from easypipe.transforms.tokenizer.bpe import train_bpe


def _bpe(folder: Path, vocabulary: dict[str, int], **options: Any) -> str:
    """A tokenizer that knows these pieces, and merges `he`."""
    folder.mkdir(parents=True)
    model = tokenizers.models.BPE(
        vocab={**vocabulary, "h": 0, "e": 1, "he": 2}, merges=[("h", "e")], **options
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "e"}')
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_characters_that_no_token_stands_for_are_counted_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    name = _bpe(tmp_path / "lossy", {})
    rows = [{"text": "héé hé"}, {"text": "he he"}, {"text": "日he"}]
    config = PipelineConfig(
        datasets=[DatasetConfig(data_files=rows, name="d", tokenizer=name)], load=LoadStageConfig(batch_size=1), seed=1,
        cache_dir=tmp_path / "cache", streaming=streaming, pack=PackStageConfig(seq_length=4),
    )  # fmt: skip
    pipeline = Pipeline.from_config(config).source().tokenize().pack().load()
    loader = pipeline.build()
    assert len(list(loader)) > 0
    ledger = loader.ledger() if streaming else pipeline.ledger()  # pyright: ignore[reportAttributeAccessIssue]
    lost = ledger.find("stream" if streaming else "tokenize", "d", "lost characters")
    assert lost.into == {"in texts": 4}
    assert lost.out == {"without a token": 4}
    (told,) = [
        record.getMessage() for record in caplog.records if "are lost" in record.getMessage()
    ]
    assert "it has no token for '" in told
    assert "the ledger counts them" in told


def test_characters_are_lost_only_where_nothing_stands_for_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fallback = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    unknown = _bpe(tmp_path / "unknown", {"?": 3}, unk_token="?")
    whole, some = (
        _bpe(tmp_path / name, dict(list(fallback.items())[:count]), byte_fallback=True)
        for name, count in (("a", 256), ("b", 200))
    )
    assert not load_tokenizer(unknown).lost.possible
    assert not load_tokenizer(whole).lost.possible
    lossy = load_tokenizer(some).lost
    # bytes below 200
    assert [lossy.count([text]) for text in ("he x\x7f", "é", "hée é", " ")] == [0, 0, 0, 0]
    assert lossy.count(["日本"]) == 2
    assert load_tokenizer(_bpe(tmp_path / "c", {"é": 3})).lost.count(["éhx", "é\n y"]) == 2
    byte_level = train_bpe(["he é"], 300, [], tmp_path / "d")
    assert not load_tokenizer(str(byte_level)).lost.possible
    path = byte_level / "tokenizer.json"
    for gone, possible in (("ü", False), ("Ċ", True)):  # 0xFC, which no UTF-8 has, and a newline
        value = json.loads(path.read_text())
        value["model"]["vocab"][f"<{gone}>"] = value["model"]["vocab"].pop(gone)
        path.write_text(json.dumps(value))
        assert load_tokenizer(str(byte_level)).lost.possible == possible
    assert load_tokenizer(str(byte_level)).lost.count(["he\nhe", "\n"]) == 2


def test_two_tokens_of_one_id_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_tokenizer(_bpe(tmp_path / "one", {"x": 3}))
    assert not [record for record in caplog.records if "stands for each of" in record.getMessage()]
    path = Path(_bpe(tmp_path / "two", {"x": 3}), "tokenizer.json")
    value = json.loads(path.read_text())
    value["model"]["vocab"] |= {"y": 1, "z": 3}
    path.write_text(json.dumps(value))
    load_tokenizer(str(tmp_path / "two"))
    (told,) = [
        record.getMessage()
        for record in caplog.records
        if "stands for each of" in record.getMessage()
    ]
    assert "token 1 stands for each of ['e', 'y'], and so do 2 ids in all" in told


def test_every_byte_that_utf8_has_is_asked_for() -> None:
    """Of bytes that no text has, 0xC0, 0xC1 and 0xF5 on, a vocabulary needs no token."""
    assert set(lost._EVERY_BYTE.encode()) == {*range(256)} - {0xC0, 0xC1, *range(0xF5, 256)}


def test_added_tokens_have_ids_of_their_own(tmp_path: Path) -> None:
    path = Path(_bpe(tmp_path / "own", {"x": 3}), "tokenizer.json")
    value = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

    def added(**ids: int) -> str:
        tokens = [{"id": n, "content": f"<{c}>", "special": True, **flags} for c, n in ids.items()]
        path.write_text(json.dumps(value | {"added_tokens": tokens}))
        return str(path)

    size = len(value["model"]["vocab"])
    twice = rf"added_tokens: '<b>' has the id {size}, and so has '<a>'. Give each token an id"
    with pytest.raises(TokenizerError, match=twice):
        load_tokenizer(added(a=size, b=size))
    with pytest.raises(TokenizerError, match="added_tokens: '<a>' has the id 3, and so has 'x'"):
        load_tokenizer(added(a=3))
    assert load_tokenizer(added(a=size, b=size + 1)).vocab_size == size + 2
