"""Every option of a dataset, a prompt and a tokenizer that decides tokens is in the key of its token
cache; what decides none is not, so that nothing is tokenized again for it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest

from chat_support import CHATML, MARKED, chat_tokenizer, talk
from easypipe import DatasetConfig, LengthPolicy, Pipeline, PipelineConfig
from easypipe.core.config import from_dict
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.transforms.prompt.config import FewShotConfig, PromptConfig
from easypipe.transforms.tokenizer.config import TokenizerConfig
from pipelines import jsonl, tokenizer

ROW = {
    "messages": talk("the quick", "Four.", "Sure?", "Yes"),
    "turns": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    "prompt": "a b",
    "completion": "c d",
    "worse": "c e",
    "text": "one two three",
    "other": "four five",
    "liked": True,
    "tools": "[]",
    "tools2": "[]",
}
OTHER = ROW | {"prompt": "e f"}
PAIR = {
    "format_type": "prompt_completion",
    "input_columns": ["prompt"],
    "label_column": "completion",
}
FOLDER = Path(tempfile.mkdtemp(prefix="easypipe-test-shots-"))
SHOTS = str(jsonl(FOLDER / "a.jsonl", [ROW, OTHER, ROW | {"prompt": "g h"}]))
MORE_SHOTS = str(jsonl(FOLDER / "b.jsonl", [ROW, OTHER, ROW | {"prompt": "g i"}]))
THINKING = CHATML + "{% if enable_thinking %}{% endif %}"
BASES: dict[str, dict[str, Any]] = {
    "chat": {"content_field": "messages", "chat_template": THINKING},
    "text": {},
    "pair": {"prompt": PAIR},
    # of 8 tokens: else they are those of "pair"
    "fields": {"prompt_field": "prompt", "completion_field": "completion", "tokenizer_kwargs": {"max_length": 8}},
    "custom": {"prompt": {"format_type": "custom", "template": "{prompt} {completion}", "label_column": "completion"}},
    "jinja": {"prompt": {"format_type": "custom", "template": "{{ prompt }} {{ completion }}{% if 0 %}{{ strftime_now('%Y') }}{% endif %}", "input_columns": ["prompt"], "label_column": "completion", "template_date": "2026-01-30"}},
    "sharegpt": {"prompt": {"format_type": "sharegpt", "input_columns": ["turns"], "template": THINKING}},
    "skipping": {"on_error": "skip"},
    "cut": {"tokenizer_kwargs": {"max_length": 7}},
    "long": {"tokenizer_kwargs": {"max_length": 7}, "length": {"policy": "split"}},
    "budgets": {"prompt": PAIR, "tokenizer_kwargs": {"max_length": 7}, "length": {"policy": "keep_start", "budgets": {"prompt": 2}}},
    "shots": {"prompt": PAIR | {"few_shot": {"count": 1, "data_files": SHOTS}}},
    "alpaca": {"prompt": PAIR | {"format_type": "alpaca"}},
}  # fmt: skip
# the base, an option, its value: with it other tokens are made
CHANGES: list[tuple[str, str, Any]] = [
    ("text", "content_field", "other"),
    ("long", "length", {"policy": "drop"}),
    ("long", "length", {"policy": "split", "overlap": 2}),
    ("long", "length.policy", "keep_end"),
    ("long", "length.overlap", 1),
    ("long", "length.boundary", "word"),
    ("budgets", "length.budgets", {"prompt": 3}),
    ("long", "tokenizer.max_length", 8),
    ("cut", "tokenizer.truncation", False),
    ("text", "tokenizer.name_or_path", tokenizer(310)),
    ("text", "tokenizer.max_length", 9),
    ("text", "tokenizer.add_special_tokens", False),
    ("text", "tokenizer.special_strings", "escape"),
    ("text", "tokenizer.special_strings", "error"),
    ("chat", "train_on", "all"),
    ("chat", "train_on", "last_assistant"),
    ("chat", "train_on_eos", "last"),
    ("chat", "chat_template", MARKED),
    ("chat", "template_date", "2026-01-31"),
    ("chat", "chat_template_kwargs", {"enable_thinking": False}),
    ("chat", "chat_template_kwargs", {"enable_thinking": True}),
    ("chat", "train_empty_thinking", False),
    ("chat", "message_fields", {"role": "content"}),
    ("chat", "tools_field", "tools2"),
    ("chat", "tokenizer.max_length", 9),
    ("alpaca", "prompt.format_type", "prompt_completion"),
    ("pair", "prompt.input_columns", ["other"]),
    ("pair", "prompt.label_column", "other"),
    ("pair", "prompt.rejected_column", "worse"),
    ("pair", "prompt.desirable_column", "liked"),
    ("pair", "prompt.system_prompt", "Be brief."),
    ("pair", "prompt.few_shot", {"examples": [ROW]}),
    ("pair", "prompt.few_shot.examples", [ROW, OTHER]),
    ("shots", "prompt.few_shot.count", 2),
    ("shots", "prompt.few_shot.seed", 1),
    ("shots", "prompt.few_shot.separator", "|"),
    ("shots", "prompt.few_shot.data_files", MORE_SHOTS),
    ("fields", "prompt_field", "other"),
    ("fields", "completion_field", "other"),
    ("fields", "rejected_field", "worse"),
    ("fields", "desirable_field", "liked"),
    ("fields", "train_on", "all"),
    ("fields", "train_on_eos", "none"),
    ("custom", "prompt.template", "{prompt}: {completion}"),
    ("custom", "prompt.train_on_eos", "none"),
    ("jinja", "prompt.template", "{{ prompt }}: {{ completion }}"),
    ("jinja", "prompt.template_date", "2026-01-31"),
    ("jinja", "prompt.label_column", "other"),
    ("jinja", "prompt.train_on", "all"),
    ("sharegpt", "prompt.roles", {"bot": "assistant"}),
    ("sharegpt", "prompt.message_fields", {"role": "who"}),
    ("sharegpt", "prompt.tools_column", "tools2"),
    ("sharegpt", "prompt.train_on", "all"),
    ("sharegpt", "prompt.train_on_eos", "last"),
    ("sharegpt", "prompt.reasoning", "mask"),
    ("sharegpt", "prompt.reasoning", "per_turn"),
    ("sharegpt", "prompt.roles_to_train", ["user"]),
    ("sharegpt", "prompt.roles_to_train", ["assistant"]),
    ("sharegpt", "prompt.template_date", "2026-01-31"),
    ("sharegpt", "prompt.chat_template_kwargs", {"enable_thinking": False}),
    ("sharegpt", "prompt.train_empty_thinking", False),
    ("sharegpt", "prompt.system_prompt", "Be brief."),
]
# with these the same tokens are made
SAME: list[tuple[str, str, Any]] = [
    ("text", "tokenizer.padding", "max_length"),
    ("text", "tokenizer.padding_side", "left"),
    ("text", "tokenizer.pad_to_multiple_of", 8),
    ("text", "tokenizer.length_buckets", [8, 16]),
    ("text", "tokenizer.return_attention_mask", True),
    ("text", "tokenizer.backend", "tokenizers"),
    ("text", "tokenizer.truncation", False),  # there is no limit
    ("text", "on_error", "skip"),
    ("skipping", "max_bad_rows", 3),
    ("text", "additional_fields", ["other"]),
    ("text", "cache_enabled", False),
]
REFUSED = {"trust_remote_code"}


def key(folder: Path, base: str, option: str = "", value: Any = None) -> str:
    values: dict[str, Any] = {"name": "d", "data_files": "in memory", **BASES[base]}
    part, _, name = option.rpartition(".")
    if name:
        holder = values
        for one in part.replace("tokenizer", "tokenizer_kwargs").split(".") if part else ():
            holder[one] = dict(holder.get(one, {}))
            holder = holder[one]
        holder[name] = value
        if value == "max_length":
            holder["max_length"] = 999
    if option == "tokenizer.name_or_path":
        values |= {"tokenizer": values["tokenizer_kwargs"].pop(name)}
    config = from_dict(DatasetConfig, {"tokenizer": chat_tokenizer(), **values})
    config = dataclasses.replace(config, data_files=[ROW])
    pipeline = Pipeline(PipelineConfig(datasets=[config], seed=1, cache_dir=folder))
    source = pipeline.source().tokenize().get_data()["d"]
    assert isinstance(source, TokenizedShardedSource)
    return source.encoder.key()


def named(value: Any) -> str | None:
    """The name of a test, without the folder of a process."""
    return Path(value).name if isinstance(value, str) and value.startswith("/") else None


@pytest.mark.parametrize(("base", "option", "value"), CHANGES, ids=named)
def test_what_decides_tokens_is_in_the_key(
    tmp_path: Path, base: str, option: str, value: Any
) -> None:
    assert key(tmp_path, base, option, value) != key(tmp_path, base)


@pytest.mark.parametrize(("base", "option", "value"), SAME, ids=named)
def test_what_decides_none_is_not(tmp_path: Path, base: str, option: str, value: Any) -> None:
    if value == "max_length":
        assert key(tmp_path, base, option, value) == key(
            tmp_path, base, "tokenizer.max_length", 999
        )
    else:
        assert key(tmp_path, base, option, value) == key(tmp_path, base)


def test_no_two_of_the_others_are_alike(tmp_path: Path) -> None:
    keys = [key(tmp_path, *change) for change in CHANGES]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("prompt.", PromptConfig),
        ("prompt.few_shot.", FewShotConfig),
        ("length.", LengthPolicy),
        ("tokenizer.", TokenizerConfig),
    ],
)
def test_every_option_is_tried(prefix: str, kind: Any) -> None:
    tried = {option for _, option, _ in (*CHANGES, *SAME)}
    names = {prefix + field.name for field in dataclasses.fields(kind)}
    assert names - tried <= {prefix + name for name in REFUSED}
