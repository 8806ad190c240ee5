"""What stands in front of rows, and the one BOS in front of all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from chat_support import chat_tokenizer
from easypipe import (
    ConfigError,
    DatasetConfig,
    FewShotConfig,
    Pipeline,
    PipelineConfig,
    PromptConfig,
    PromptEngine,
    SourceError,
)
from easypipe.core.schema import INPUT_IDS, LOSS_MASK
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.prompt import few_shot
from pipelines import jsonl
from strategies import examples

BOS = "<|endoftext|>"  # the chat tokenizer's
TEMPLATE: dict[str, Any] = {
    "format_type": "custom",
    "template": "{{ bos_token }}Q: {{ q }} A: {{ a }}",
    "input_columns": ("q",),
    "label_column": "a",
}
SHOT = FewShotConfig(examples=({"q": "1", "a": "one"}, {"q": "2", "a": "two"}), separator="\n")


@pytest.mark.parametrize(
    ("options", "text", "trained"),
    [
        ({"few_shot": SHOT}, "Q: 1 A: one\nQ: 2 A: two\nQ: 3 A: three", ["three"]),
        ({"system_prompt": "Be brief."}, "Be brief.\n\nQ: 3 A: three", ["three"]),
        (
            {"few_shot": SHOT, "train_on": "all"},
            "Q: 1 A: one\nQ: 2 A: two\nQ: 3 A: three",
            ["Q: 3 A: three"],
        ),
        (
            {"system_prompt": "S", "train_on": "all"},
            "S\n\nQ: 3 A: three",
            [f"{BOS}S\n\nQ: 3 A: three"],
        ),
        (
            {"system_prompt": "S", "few_shot": SHOT},
            "S\n\nQ: 1 A: one\nQ: 2 A: two\nQ: 3 A: three",
            ["three"],
        ),
    ],
)
def test_a_bos_that_templates_write_stands_once_in_front_of_all(
    options: dict[str, Any], text: str, trained: list[str]
) -> None:
    engine = PromptEngine(chat_tokenizer(), PromptConfig(**TEMPLATE, **options))
    found = engine.render({"q": "3", "a": "three"})
    assert found.text == BOS + text
    assert [found.text[a:b] for a, b in found.spans] == trained


@examples(15)
@given(
    said=strategies.texts(min_size=1).filter(str.strip),
    system=st.sampled_from([None, "Be brief."]),
    few=st.booleans(),
)
def test_no_row_has_two(
    tmp_path_factory: pytest.TempPathFactory, said: str, system: str | None, few: bool
) -> None:
    prompt = PromptConfig(**TEMPLATE, system_prompt=system, few_shot=SHOT if few else None)
    engine, row = PromptEngine(chat_tokenizer(), prompt), {"q": "how?", "a": said}
    made = engine.encode(row)
    assert made[INPUT_IDS].tolist().count(engine.tokenizer.bos_token_id) == 1 + said.count(BOS)
    assert made[INPUT_IDS][0] == engine.tokenizer.bos_token_id
    assert made[LOSS_MASK][0] == 0
    config = DatasetConfig(name="d", data_files=[row], tokenizer=chat_tokenizer(), prompt=prompt)
    folder: Path = tmp_path_factory.mktemp("cache")
    [source] = (
        Pipeline(PipelineConfig(datasets=(config,), seed=1, cache_dir=folder))
        .source()
        .tokenize()
        .get_data()
        .values()
    )
    stored = source.read(0, 0, 1)
    assert stored.column(INPUT_IDS)[0].as_py() == made[INPUT_IDS].tolist()
    assert stored.column(LOSS_MASK)[0].as_py() == made[LOSS_MASK].tolist()


def test_a_file_of_exactly_the_most_bytes_is_drawn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "pool.jsonl", [{"q": q, "a": "one"} for q in "12"])
    monkeypatch.setattr(few_shot, "MOST_BYTES", path.stat().st_size)
    drawn = PromptConfig(**TEMPLATE, few_shot=FewShotConfig(count=1, data_files=str(path)))
    assert PromptEngine(chat_tokenizer(), drawn).encode({"q": "3", "a": "three"})
    monkeypatch.setattr(few_shot, "MOST_BYTES", path.stat().st_size - 1)
    with pytest.raises(ConfigError, match="to draw from"):
        PromptEngine(chat_tokenizer(), drawn)


def test_an_array_behind_a_byte_order_mark_is_drawn_from(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    rows = [{"q": q, "a": "one"} for q in "12"]
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    drawn = PromptConfig(**TEMPLATE, few_shot=FewShotConfig(count=1, data_files=path))
    assert "A: one" in PromptEngine(chat_tokenizer(), drawn).render({"q": "3", "a": "three"}).text


@pytest.mark.parametrize("chat", [False, True])
def test_both_answers_of_a_pair_have_the_examples_of_their_row(tmp_path: Path, chat: bool) -> None:
    """A row's own preferred answer must not be an example of the rejected one either."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"q{n} ", "good": f"good{n}", "bad": f"bad{n}"} for n in range(4)
    ]
    kind: dict[str, Any] = {"format_type": "prompt_completion"}
    if chat:
        roles = {"prompt": "user", "good": "assistant", "bad": "assistant"}
        rows = [{k: [{"role": roles[k], "content": row[k]}] for k in row} for row in rows]
        kind = {"input_columns": ("prompt",)}
    pool = FewShotConfig(data_files=jsonl(tmp_path / "pool.jsonl", rows), count=2)
    config = PromptConfig(**kind, label_column="good", rejected_column="bad", few_shot=pool)
    engine = PromptEngine(chat_tokenizer(), config)
    for n, row in enumerate(rows):
        pair, _ = engine.written([row], [n], None)
        better, worse = (one.text for one in pair if isinstance(one, Rendered))
        assert worse == better.replace(f"good{n}", f"bad{n}")


def test_what_is_no_row_says_so() -> None:
    engine = PromptEngine(chat_tokenizer(), PromptConfig(**TEMPLATE))
    with pytest.raises(SourceError, match="int is not a row"):
        engine.encode(5)  # pyright: ignore[reportArgumentType]
