"""Special strings in raw text: special tokens, ordinary text, or bad rows; counted; the same
cached, streaming and read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

import strategies
from chat_support import chat_tokenizer, talk
from easypipe import (
    DatasetConfig,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    load_tokenizer,
)
from easypipe.core.errors import ConfigError, SourceError, TokenizerError
from easypipe.core.schema import INPUT_IDS, LOSS_MASK
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.special import SpecialPolicy
from strategies import examples
from token_support import TOKENIZERS, small_tokenizer_folder

SMALL = str(small_tokenizer_folder())
POLICIES: tuple[SpecialPolicy, ...] = ("allow", "escape", "error")


def escaping(folder: str) -> Tokenizer:
    """What escape must give: `tokenizers` told to take special tokens for text."""
    reference = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    reference.encode_special_tokens = True
    return reference


def special_strings(folder: str) -> list[str]:
    added = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json").get_added_tokens_decoder()
    return [token.content for token in added.values() if token.special]


def source_of(
    folder: Path, rows: list[dict[str, Any]], policy: SpecialPolicy, **options: Any
) -> TokenizedShardedSource:
    chosen = TokenizerConfig(
        **{"name_or_path": SMALL, "special_strings": policy} | options.pop("tokenizer", {})
    )
    dataset = DatasetConfig(name="d", data_files=rows, tokenizer=chosen, **options)
    config = PipelineConfig(datasets=[dataset], seed=1, cache_dir=folder)
    source = Pipeline.from_config(config).source().tokenize().get_data()["d"]
    assert isinstance(source, TokenizedShardedSource)
    return source


def documents(source: TokenizedShardedSource) -> list[list[int]]:
    return source.read(0, 0, source.shards[0].num_rows).column(INPUT_IDS).to_pylist()


@examples(30)
@given(data=st.data())
def test_escape_is_what_tokenizers_makes_of_ordinary_text(data: st.DataObject) -> None:
    strings = special_strings(SMALL)
    pieces = st.lists(st.one_of(strategies.texts(), st.sampled_from(strings)), max_size=4).map(
        "".join
    )
    rows = data.draw(st.lists(pieces, max_size=6))
    backend: Any = data.draw(st.sampled_from(["gigatoken", "tokenizers"]))
    tokenizer = load_tokenizer(
        TokenizerConfig(name_or_path=SMALL, special_strings="escape", backend=backend)
    )
    encoded, expected = tokenizer.encode_column(pa.array(rows, pa.string())), escaping(SMALL)
    plain = load_tokenizer(TokenizerConfig(name_or_path=SMALL, backend=backend)).encode_column(
        pa.array(rows, pa.string())
    )
    # what is escaped is what would have been special
    assert encoded.special.tolist() == plain.special.tolist()
    ids = {expected.token_to_id(text) for text in strings}
    for i, text in enumerate(rows):
        found = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
        assert found == expected.encode(text).ids == tokenizer.reference_encode(text)
        assert not ids & set(expected.encode(text, add_special_tokens=False).ids)
        if not plain.special[i]:
            assert found == plain.ids[plain.offsets[i] : plain.offsets[i + 1]].tolist()


@pytest.mark.shared
@pytest.mark.parametrize("name", TOKENIZERS)
def test_real_tokenizers(shared_data: Path, name: str) -> None:
    folder = str(shared_data / "tokenizers" / name)
    strings, expected = special_strings(folder), escaping(folder)
    rows = [
        "plain",
        *(f"a{text}b" for text in strings),
        *strings,
        "".join(strings) + " end",
        "nothing",
    ]
    backends: tuple[Any, ...] = ("auto", "tokenizers")
    for backend in backends:
        config = TokenizerConfig(name_or_path=folder, special_strings="escape", backend=backend)
        encoded = load_tokenizer(config).encode_column(pa.array(rows))
        for i, text in enumerate(rows):
            assert (
                encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
                == expected.encode(text).ids
            )
        assert encoded.special.tolist() == [0, *[1] * 2 * len(strings), len(strings), 0]


def test_every_policy_in_the_cache_and_beside_it(tmp_path: Path) -> None:
    string = special_strings(SMALL)[0]
    rows = [
        {"text": "plain"},
        {"text": f"a {string}{string} b"},
        {"text": "more"},
        {"text": string},
    ]
    made = {}
    for policy in POLICIES:
        source = source_of(tmp_path, rows, policy, on_error="skip")
        made[policy] = documents(source)
        cache = source.materialize()
        assert [cache.tokens(i).tolist() for i in range(cache.num_docs)] == made[policy]
        entry = [
            entry
            for entry in cache.ledger.to_json()["entries"]
            if entry["unit"] == "special strings"
        ]
        expected = {"allow": {"special tokens": 3}, "escape": {"ordinary text": 3}}.get(policy)
        assert [each["out"] for each in entry] == ([] if expected is None else [expected])
    assert made["allow"][0] == made["escape"][0] == made["error"][0]
    assert made["allow"][1] != made["escape"][1]
    assert made["error"] == [made["allow"][0], made["allow"][2]]
    with pytest.raises(
        SourceError,
        match=r"row 1, column 'text': special_string: the text holds '<.*>', and special_strings "
        r"is 'error'",
    ):
        source_of(tmp_path, rows, "error").materialize()
    reasons = (
        source_of(tmp_path, rows, "error", on_error="skip")
        .materialize()
        .ledger.to_json()["entries"][0]["out"]
    )
    assert reasons["special_string"] == 2


def test_it_is_obeyed_before_max_length_cuts(tmp_path: Path) -> None:
    string = special_strings(SMALL)[0]
    rows = [{"text": "a b c d e f g h " + string}, {"text": "short"}]
    short: dict[str, Any] = {"tokenizer": {"max_length": 4}}
    assert len(documents(source_of(tmp_path, rows, "error", on_error="skip", **short))) == 1
    assert len(documents(source_of(tmp_path, rows, "allow", **short))) == 2


@pytest.mark.parametrize("policy", ["allow", "escape"])
def test_strings_of_a_text_in_pieces_are_counted_once(tmp_path: Path, policy: Any) -> None:
    rows = [{"text": "a b c d e f g h " + special_strings(SMALL)[0]}, {"text": "short"}]
    split: dict[str, Any] = {"tokenizer": {"max_length": 4}, "length": {"policy": "split"}}
    source = source_of(tmp_path, rows, policy, **split)
    assert len(documents(source)) > 3
    entry = source.materialize().ledger.find("tokenize", "d", "special strings")
    assert entry.into == {"in texts": 1}


def test_streaming_gives_the_same_and_counts(tmp_path: Path) -> None:
    string = special_strings(SMALL)[0]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": f"row {i} {string if i % 3 == 0 else ''}"}) + "\n"
            for i in range(30)
        )
    )
    outcomes: dict[SpecialPolicy, str] = {"allow": "special tokens", "escape": "ordinary text"}
    for policy, counted in outcomes.items():
        found = []
        for streaming in (False, True):
            chosen = TokenizerConfig(name_or_path=SMALL, special_strings=policy)
            config = PipelineConfig(
                datasets=[DatasetConfig(name="d", data_files=str(path), tokenizer=chosen)],
                seed=1, cache_dir=tmp_path / "cache", streaming=streaming, pack=PackStageConfig(seq_length=64),
                load=LoadStageConfig(batch_size=1, drop_last=False),
            )  # fmt: skip
            loader = Pipeline.from_config(config).source().tokenize().pack().load().build()
            tokens = np.concatenate([np.asarray(batch[INPUT_IDS]).ravel() for batch in loader])
            found.append(np.bincount(tokens[tokens != 0], minlength=4))
        assert np.array_equal(*found)
        assert loader.ledger().find("stream", "d", "special strings").out == {counted: 10}


def test_prompts_and_completions(tmp_path: Path) -> None:
    string = special_strings(SMALL)[0]
    rows = [
        {"p": "say ", "c": f"a{string}b"},
        {"p": f"{string} ", "c": "yes"},
        {"p": "x", "c": "y"},
    ]
    pair = {"prompt_field": "p", "completion_field": "c"}
    allowed, escaped = (source_of(tmp_path, rows, policy, **pair) for policy in ("allow", "escape"))
    expected = escaping(SMALL)
    batch = escaped.read(0, 0, 3)
    for ids, mask, row in zip(
        batch.column(INPUT_IDS).to_pylist(), batch.column(LOSS_MASK).to_pylist(), rows, strict=True
    ):
        plain = expected.encode(row["p"] + row["c"], add_special_tokens=False).ids
        assert any(ids[i : i + len(plain)] == plain for i in range(len(ids)))
        assert 0 < sum(mask) < len(mask)
    assert documents(allowed)[2] == documents(escaped)[2]
    assert documents(allowed)[0] != documents(escaped)[0]
    assert (
        escaped.materialize().manifest.counts.escaped,
        allowed.materialize().manifest.counts.special,
    ) == (2, 2)
    scanned = source_of(tmp_path, rows, "error", on_error="skip", **pair).scan(0, 0, 3)
    assert [(reject.row, reject.reason) for reject in scanned.rejects] == [
        (0, "special_string"),
        (1, "special_string"),
    ]


def test_conversations_are_looked_into_before_the_template_writes_its_own(tmp_path: Path) -> None:
    rows = [{"messages": talk("hello", "there")}, {"messages": talk("say <|im_end|> now", "no")}]
    wrong: list[Any] = [{"messages": []}, {"messages": [{"role": None, "content": "say"}]}]
    chat = {"tokenizer": {"name_or_path": chat_tokenizer()}, "content_field": "messages"}
    assert source_of(tmp_path, rows, "allow", **chat).read(0, 0, 2).num_rows == 2
    scanned = source_of(tmp_path, rows + wrong, "error", on_error="skip", **chat).scan(0, 0, 4)
    assert [(reject.row, reject.reason) for reject in scanned.rejects] == [
        (1, "special_string"),
        (2, "empty"),
        (3, "no_role"),
    ]
    assert "'<|im_end|>'" in scanned.rejects[0].detail
    with pytest.raises(
        ConfigError,
        match=r"datasets\[0\]\.tokenizer: special_strings='escape' is for raw "
        r"text.*special_strings='error'",
    ):
        source_of(tmp_path, rows, "escape", **chat)


def test_a_model_that_writes_special_tokens_by_itself_cannot_escape(tmp_path: Path) -> None:
    model = models.Unigram([("<unk>", 0.0), ("a", -1.0), ("<s>", -2.0)], unk_id=0)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        TokenizerError,
        match=r"special_strings='escape' is not possible: .*'<s>'.*special_strings='error'",
    ):
        load_tokenizer(TokenizerConfig(name_or_path=str(tmp_path), special_strings="escape"))
    found = {}
    for policy in ("allow", "error"):
        encoded = load_tokenizer(
            TokenizerConfig(name_or_path=str(tmp_path), special_strings=policy)
        ).encode_column(pa.array(["a<s>", "aq", "a<unk>", "a"]))
        found[policy] = encoded.special.tolist()
    # the unknown token says nothing by itself
    assert found == {"allow": [1, 0, 0, 0], "error": [1, 0, 1, 0]}


def test_the_default_is_the_recipe_that_it_always_was(tmp_path: Path) -> None:
    paths = {
        policy: source_of(tmp_path, [{"text": "a"}], policy).writer.path() for policy in POLICIES
    }
    assert len(set(paths.values())) == 3
    assert source_of(tmp_path, [{"text": "a"}], "allow").tokenizer.special.recipe == ()
    prints = {
        source_of(tmp_path, [{"text": "a"}], policy).tokenizer.fingerprint for policy in POLICIES
    }
    assert len(prints) == 1  # the same ids mean the same: such datasets may be mixed
