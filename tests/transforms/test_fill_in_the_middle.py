"""Fill in the middle: keyed by seed and text, nothing lost, and special tokens that are single
ids.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
import strategies
from chat_support import WORDS, chat_tokenizer
from easypipe import (
    ConfigError,
    DatasetConfig,
    FillInTheMiddle,
    InMemoryShardedSource,
    Pipeline,
    PipelineConfig,
    TokenizerConfig,
    TransformedSource,
    load_tokenizer,
)
from easypipe.core.errors import TokenizerError
from easypipe.core.schema import INPUT_IDS
from easypipe.transforms.tokenizer.bpe import train_bpe
from strategies import examples

TOKENS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fim") / "tokenizer"
    train_bpe([word + "\n" for word in WORDS] * 20, 400, TOKENS, folder)
    return str(folder)


@examples(40)
@given(
    st.lists(strategies.texts(), max_size=8),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    strategies.seeds(),
)
def test_nothing_is_lost_and_rows_stand_alone(
    tokenizer: str, texts: list[str], rate: float, spm_rate: float, seed: int
) -> None:
    one = FillInTheMiddle(tokenizer, rate=rate, spm_rate=spm_rate, seed=seed)
    batch = pa.record_batch(
        {"text": pa.array([*texts, None], pa.string()), "n": pa.array(range(len(texts) + 1))}
    )
    laws.assert_row_wise(one, batch, [1, 2, 5])
    made = one(batch).column("text").to_pylist()
    assert [None if text is None else one.restored(text) for text in made] == [*texts, None]
    for before, after in zip(texts, made, strict=False):
        turned = after != before
        assert not (turned and rate == 0)
        assert turned or rate < 1 or not before
        if turned and spm_rate in (0.0, 1.0):
            assert after.startswith(TOKENS[0] + TOKENS[1]) or spm_rate == 0
            assert after.index(TOKENS[1]) < after.index(TOKENS[2])


def test_seed_rate_and_spm_rate_decide(tokenizer: str) -> None:
    texts = [f"def f{i}(x):\n    return x + {i}\n" for i in range(400)]

    def made(**options: float) -> list[str]:
        one = FillInTheMiddle(tokenizer, **options)  # type: ignore[arg-type]
        return [one.turned(text) for text in texts]

    half = made(rate=0.5, spm_rate=0.25)
    turned = [text for text in half if text.startswith(TOKENS[0])]
    assert 160 < len(turned) < 240
    assert 25 < sum(text.startswith(TOKENS[0] + TOKENS[1]) for text in turned) < 80
    assert half == made(rate=0.5, spm_rate=0.25)
    assert half != made(rate=0.5, spm_rate=0.25, seed=1)
    prints = {
        FillInTheMiddle(tokenizer, rate=rate, spm_rate=spm, seed=seed).fingerprint
        for rate in (0, 1)
        for spm in (0, 1)
        for seed in (0, 1)
    }
    assert len(prints) == 8
    assert made(rate=1.0)[0] == FillInTheMiddle(tokenizer, rate=1.0, tokens=TOKENS).turned(texts[0])
    already = f"x{TOKENS[2]}y"
    assert FillInTheMiddle(tokenizer, rate=1.0).turned(already) == already
    assert FillInTheMiddle(tokenizer, rate=1.0).turned("") == ""


@pytest.mark.parametrize("kind", ["starcoder", "qwen", "santacoder", "deepseek", "codellama"])
def test_the_tokens_of_models_in_use_are_known(tmp_path: Path, kind: str) -> None:
    pre, suf, mid = {
        "starcoder": TOKENS,
        "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    }[kind]
    train_bpe(["def f"] * 20, 300, [mid, pre, suf], tmp_path)
    for spm_rate in (0.0, 1.0):
        turned = FillInTheMiddle(str(tmp_path), rate=1.0, spm_rate=spm_rate).turned("def f(x): x")
        assert turned.startswith(pre)
        assert turned.index(suf) < turned.index(mid)


def test_in_a_pipeline_the_tokens_are_single_ids(tokenizer: str, tmp_path: Path) -> None:
    rows = [{"code": "the quick brown fox"}, {"code": "two and two"}]
    dataset = DatasetConfig(name="d", data_files=rows, tokenizer=tokenizer, content_field="code")
    pipeline = Pipeline.from_config(
        PipelineConfig(datasets=[dataset], seed=1, cache_dir=tmp_path)
    ).source()
    pipeline = pipeline.transform(FillInTheMiddle(tokenizer, rate=1.0, column="code")).tokenize()
    loaded = load_tokenizer(tokenizer)
    for row in pipeline.get_data()["d"].read(0, 0, 2).to_pylist():
        words = [loaded.decode([token]) for token in row[INPUT_IDS]]
        assert sorted(word for word in words if word in TOKENS) == sorted(TOKENS)


def test_refusals(tokenizer: str) -> None:
    with pytest.raises(TokenizerError, match="it lacks <fim_prefix>, <fim_suffix>, <fim_middle>"):
        FillInTheMiddle(chat_tokenizer())
    with pytest.raises(TokenizerError, match="it lacks <P>"):
        FillInTheMiddle(tokenizer, tokens=["<P>", *TOKENS[1:]])
    for name, value in itertools.product(("rate", "spm_rate"), (-0.5, 1.5)):
        with pytest.raises(ConfigError, match=rf"FillInTheMiddle.{name}: {value} is not a share"):
            FillInTheMiddle(tokenizer, **{name: value})
    for tokens in (["a", "a", "b"], ["a", "b"], ["a", "b", "c", "d"], ["a", "", "b"]):
        with pytest.raises(
            ConfigError, match=r"tokens: .* Give those of prefix, suffix and middle"
        ):
            FillInTheMiddle(tokenizer, tokens=tokens)
    with pytest.raises(ConfigError, match="special_strings='escape' takes the tokens for text"):
        FillInTheMiddle(TokenizerConfig(name_or_path=tokenizer, special_strings="escape"))
    with pytest.raises(ConfigError, match="column 'n' holds int64, not text"):
        FillInTheMiddle(tokenizer, column="n")(pa.record_batch({"n": [1]}))


def test_a_column_without_any_text_is_one_of_text(tokenizer: str) -> None:
    batch = pa.record_batch({"text": pa.nulls(2), "n": [1, 2]})
    made = FillInTheMiddle(tokenizer, rate=1.0)(batch)
    assert made.column("text").to_pylist() == [None, None]
    assert made.schema.field("text").type == pa.large_string()


def test_a_text_that_is_not_utf8_is_a_bad_row(tokenizer: str) -> None:
    texts = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    below = InMemoryShardedSource(pa.table({"text": texts}))
    batch, rejects = TransformedSource(below, FillInTheMiddle(tokenizer), on_error="skip").scan(
        0, 0, 3
    )
    assert batch.num_rows == 2
    assert [(reject.reason, reject.row) for reject in rejects] == [("invalid_utf8", 1)]
