"""Every shape of rows that TRL documents, as it spells it: proposed by `discover`, and read into the
tokens and masks that TRL makes of them (tests/trl_oracle.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chat_support
import easypipe
import trl_oracle as trl
from chat_support import MARKED, REASONING, chat_tokenizer
from easypipe import (
    ConfigError,
    DatasetConfig,
    LengthPolicy,
    LoadStageConfig,
    Pipeline,
    PipelineConfig,
    PromptConfig,
    PromptEngine,
    TokenizerConfig,
)
from easypipe.core.errors import SourceError
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, SEGMENT_BREAK
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.transforms.chat.conversations import conversations_of
from easypipe.transforms.chat.spans import OPEN
from easypipe.transforms.prompt.templates import CHATML
from pipelines import jsonl
from trl_oracle import SHAPES, Row, both, hf_tokenizer, rows, said, user


def spellings(data: Sequence[Row], folder: Path) -> Iterator[Any]:
    """The same rows as they come: in memory, as files, as objects of `datasets`."""
    yield list(data)
    yield str(jsonl(folder / "rows.jsonl", data))
    pq.write_table(pa.Table.from_pylist(list(data)), folder / "rows.parquet")
    yield str(folder / "rows.parquet")
    made = datasets.Dataset.from_list(list(data))
    yield made
    yield made.to_iterable_dataset()


def tokenized(data: Any, folder: Path, fields: Mapping[str, Any]) -> TokenizedShardedSource:
    given = {"name": "rows", "tokenizer": chat_tokenizer(), "data_files": data} | dict(fields)
    config = PipelineConfig(datasets=[DatasetConfig(**given)], seed=1, cache_dir=folder / "cache")
    source = Pipeline.from_config(config).source().tokenize().get_data()["rows"]
    assert isinstance(source, TokenizedShardedSource)
    return source


def documents(source: TokenizedShardedSource, count: int) -> list[trl.Sample]:
    """Tokens and mask of each; where no mask is kept, packing puts EOS behind them."""
    batch = source.read(0, 0, count)
    ids = batch.column(INPUT_IDS).to_pylist()
    if LOSS_MASK in batch.schema.names:
        return list(zip(ids, batch.column(LOSS_MASK).to_pylist(), strict=True))
    eos = source.tokenizer.eos_token_id
    return [([*row, eos], [1] * (len(row) + 1)) for row in ids]


def proposed(data: Any, template: str) -> dict[str, Any]:
    fields = dict(easypipe.discover(data).part().propose().fields)
    talks = easypipe.discover(data).part().kind.roles != ()
    return fields | ({"chat_template": template} if talks else {})


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_of_trl_gives_its_tokens_and_masks(shape: str, tmp_path: Path) -> None:
    data, tokenizer = rows(shape), hf_tokenizer()
    for i, files in enumerate(spellings(data, tmp_path)):
        fields = proposed(files, "chatml")
        if "messages" in data[0]:
            fields["train_on"] = "all"  # as TRL trains without assistant_only_loss
        made = documents(tokenized(files, tmp_path, fields), len(data))
        if "chosen" in data[0]:
            pairs = [trl.dpo(row, tokenizer) for row in data]
            expected = [([*a[0], *b[0]], [*a[1], SEGMENT_BREAK, *b[1][1:]]) for a, b in pairs]
        elif shape == "prompts":
            expected = [trl.sft({"messages": row["prompt"]}, tokenizer) for row in data]
        else:
            expected = [trl.sft(row, tokenizer) for row in data]
        assert made == expected, f"spelling {i}"


@pytest.mark.parametrize("template", [CHATML, REASONING, MARKED], ids=["chatml", "think", "marked"])
@pytest.mark.parametrize("shape", ["completion talk", "completion turns", "preference talk"])
def test_templates_that_write_more_than_words(shape: str, template: str) -> None:
    """One that drops thoughts, one with generation markers: what is behind the prompt is trained,
    with `assistant` what both that and the markers name."""
    tokenizer = hf_tokenizer(template)
    pair = "chosen" in rows(shape)[0]
    answer = {"label_column": "chosen", "rejected_column": "rejected"} if pair else {}
    answer = answer or {"label_column": "completion"}
    options = {"input_columns": ("prompt",), "template": template, **answer}
    engine = PromptEngine(chat_tokenizer(), PromptConfig(**options))
    for row in rows(shape):
        made = engine.encode_pair(row) if pair else (engine.encode(row),)
        wanted = trl.dpo(row, tokenizer) if pair else (trl.sft(row, tokenizer),)
        assert [(m[INPUT_IDS].tolist(), m[LOSS_MASK].tolist()) for m in made] == list(wanted)
    if template is REASONING or pair:
        return
    turns = PromptEngine(chat_tokenizer(), PromptConfig(**options, train_on="assistant"))
    for row in rows(shape):
        sample = turns.encode(row)
        expected = trl.sft(row, tokenizer, assistant_only=True)
        assert (sample[INPUT_IDS].tolist(), sample[LOSS_MASK].tolist()) == expected


def test_last_assistant_and_all_of_an_answer() -> None:
    row = SHAPES["completion turns"](3)

    def trained(train_on: str) -> str:
        config = PromptConfig(
            input_columns=("prompt",), label_column="completion", train_on=train_on
        )
        found = PromptEngine(chat_tokenizer(), config).render(row)
        return "|".join(found.text[a:b] for a, b in found.spans)

    assert trained("last_assistant") == "The same.<|im_end|>"
    assert trained("assistant") == "3.<|im_end|>|The same.<|im_end|>"
    assert trained("all").startswith("<|im_start|>user\nSure?")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": [], "completion": [said("a")]}, "empty: column 'prompt'"),
        ({"prompt": [user("a")], "completion": "b"}, "not_json: column 'completion'"),
        (
            {"prompt": [user("a")], "completion": [said("b", weight=1)]},
            "bad_train_flag: message 1 has a weight, and train_on='completion' trains all behind",
        ),
    ],
)
def test_rows_that_are_no_prompt_with_its_answer(row: Row, problem: str) -> None:
    config = PromptConfig(input_columns=("prompt",), label_column="completion")
    with pytest.raises(SourceError) as caught:
        PromptEngine(chat_tokenizer(), config).render(row)
    assert problem in str(caught.value)


def test_of_a_prompt_at_least_the_last_turn_stays_before_an_answer_that_asks_first(
    tmp_path: Path,
) -> None:
    first, last = user("one two three " * 10), user("so " * 10)
    row = {"prompt": [first, said("ok"), last], "completion": [user("x"), said("yes")]}
    fields = {"input_columns": ("prompt",), "label_column": "completion"}
    left: dict[int, list[str]] = {}
    for most in (60, 90, 400):
        options = {
            "tokenizer": TokenizerConfig(name_or_path=chat_tokenizer(), max_length=most),
            "prompt": PromptConfig(**fields),
            "length": LengthPolicy(policy="trim_oldest_turns"),
            "on_error": "skip",
        }
        found = tokenized([row], tmp_path / str(most), options).scan(0, 0, 1)
        left[most] = [reject.reason for reject in found.rejects]
    assert left == {60: ["too_long"], 90: [], 400: []}


def test_pairs_that_share_a_prompt_need_no_column_for_it(tmp_path: Path) -> None:
    """Of answers with the same prompt in both, only what differs is trained, and in another cache
    than where the last turn is."""
    data = rows("preference talk implicit")
    made = {
        train_on: tokenized(
            data,
            tmp_path,
            {
                "prompt": PromptConfig(
                    input_columns=("chosen",), rejected_column="rejected", train_on=train_on
                )
            },
        )
        for train_on in ("completion", "last_assistant", "assistant")
    }
    sums = {
        name: sum(mask.count(1) for _, mask in documents(source, len(data)))
        for name, source in made.items()
    }
    assert sums["last_assistant"] < sums["completion"] < sums["assistant"]
    assert len({source.fingerprint for source in made.values()}) == 3
    plain = {"completion_field": "chosen", "rejected_field": "rejected", "train_on": "all"}
    with pytest.raises(ConfigError, match=r"datasets.0..train_on: has no effect without a prompt"):
        tokenized(rows("preference implicit"), tmp_path, plain)


THINKS = (
    "{%- for d in documents or [] %}{{ '<doc>' + d.text + '</doc>\\n' }}{% endfor -%}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and enable_thinking is defined and not enable_thinking -%}"
    "{{ '<think>\\n\\n</think>\\n' }}{% endif -%}"
    "{{ m.content + (reasoning_effort or '') + '<|im_end|>\\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)
NO_THINKING, DOCUMENTS = {"enable_thinking": False}, {"documents": [{"text": "It rains."}]}


def test_chat_template_kwargs_of_rows_and_of_datasets(tmp_path: Path) -> None:
    """A row's own go before those of its dataset; both reach the template as transformers hands
    them on, and decide which cache it is."""
    tokenizer, data = hf_tokenizer(THINKS), rows("completion talk", 4)
    given = [None, NO_THINKING, {"enable_thinking": True}, {**NO_THINKING, **DOCUMENTS}]
    data = [
        {**row, "chat_template_kwargs": kwargs} for row, kwargs in zip(data, given, strict=True)
    ]
    columns = {"prompt_field": "prompt", "completion_field": "completion", "chat_template": THINKS}
    for files in spellings(data, tmp_path):
        made = documents(tokenized(files, tmp_path, columns), 4)
        assert made == [trl.sft(row, tokenizer) for row in data]
    wide = {"enable_thinking": False, "reasoning_effort": "high"}
    source = tokenized(data, tmp_path, columns | {"chat_template_kwargs": wide})
    merged = [
        row | {"chat_template_kwargs": wide | (row["chat_template_kwargs"] or {})} for row in data
    ]
    assert documents(source, 4) == [trl.sft(row, tokenizer) for row in merged]
    other = tokenized(data, tmp_path, columns | {"chat_template_kwargs": {"reasoning_effort": "l"}})
    plain = tokenized(data, tmp_path, columns)
    assert len({one.encoder.key() for one in (source, other, plain)}) == 3
    talks = [{"messages": row["prompt"] + row["completion"]} for row in data]
    own = {"content_field": "messages", "chat_template": THINKS}
    bare, told = (
        tokenized(talks, tmp_path, own | options)
        for options in ({}, {"chat_template_kwargs": NO_THINKING})
    )
    assert bare.encoder.key() != told.encoder.key()
    assert documents(bare, 4) != documents(told, 4)


def test_kwargs_that_no_template_is_given_are_refused(tmp_path: Path) -> None:
    own = ("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message")
    for name in (*own, "no-name", "1st"):
        with pytest.raises(ConfigError, match=rf"chat_template_kwargs\.{name}: is not a variable"):
            PromptConfig(chat_template_kwargs={name: []})
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.f: .* cannot be written as JSON"):
        DatasetConfig(data_files="x.jsonl", chat_template_kwargs={"f": {1, 2}})
    columns = {"prompt_field": "prompt", "completion_field": "completion", "chat_template": THINKS}
    data = rows("completion talk")
    wrong = columns | {"chat_template_kwargs": {"enable_thinkin": False}}
    with pytest.raises(
        ConfigError, match=r"datasets\[0\].chat_template_kwargs.enable_thinkin: has no"
    ):
        tokenized(data, tmp_path, wrong)
    for kwargs, problem in (
        ({"tools": []}, "'tools' is not a variable"),
        ("[1]", "is not an object"),
    ):
        bad = [data[0] | {"chat_template_kwargs": kwargs}]
        with pytest.raises(SourceError, match=f"bad_template_kwargs: .*{problem}"):
            tokenized(bad, tmp_path, columns).read(0, 0, 1)
    with pytest.raises(
        SourceError, match="column 'chat_template_kwargs': holds int64, not objects"
    ):
        tokenized([data[0] | {"chat_template_kwargs": 1}], tmp_path, columns)


@pytest.mark.parametrize("shape", ["completion", "completion talk"])
def test_streaming_gives_the_same_rows(shape: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"prompt_field": "prompt", "completion_field": "completion"}
    data = rows(shape, 6)
    if shape.endswith("talk"):
        data = [row | {"chat_template_kwargs": NO_THINKING} for row in data]
        fields |= {"chat_template": THINKS, "chat_template_kwargs": {"reasoning_effort": "high"}}

    def batches(**options: Any) -> list[list[int]]:
        dataset = DatasetConfig(data_files=data, tokenizer=chat_tokenizer(), **fields)
        config = PipelineConfig(datasets=[dataset], seed=1, cache_dir=tmp_path / "c", **options)
        run = Pipeline.from_config(config).source().tokenize()
        loader = run.load(LoadStageConfig(batch_size=2, drop_last=False)).build()
        found = [row for batch in loader for row in np.asarray(batch["labels"]).tolist()]
        return sorted([label for label in row if label >= 0] for row in found)

    assert batches() == batches(streaming=True, num_streams=1)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("role", "text", None), {"content": "text"}),
        (("role", "value", None), {"content": "value"}),
        (("role", "content", "value"), {"text": "value"}),
        (("speaker", "said", None), None),
    ],
    ids=["text", "value", "parts", "others"],
)
def test_messages_with_other_keys(
    keys: tuple[str, str, str | None], expected: dict[str, str] | None, tmp_path: Path
) -> None:
    """Keys that are near OpenAI's are proposed, any are told; the cache is another one."""
    role, content, part = keys

    def turned(message: Row) -> Row:
        said = message["content"]
        value = said if part is None else [{"type": "text", part: said}]
        return {role: message["role"], content: value}

    data = [{"messages": [turned(one) for one in row["messages"]]} for row in rows("messages")]
    tokenizer = hf_tokenizer()
    wanted = [trl.sft(row, tokenizer, assistant_only=True) for row in rows("messages")]
    told = {"role": role, "content": content} | ({"text": part} if part else {})
    for files in spellings(data, tmp_path):
        if expected is not None:
            fields = proposed(files, "chatml")
            assert fields["message_fields"] == expected
        fields = {"content_field": "messages", "chat_template": "chatml", "message_fields": told}
        source = tokenized(files, tmp_path, fields)
        assert documents(source, len(data)) == wanted
    without = {key: value for key, value in fields.items() if key != "message_fields"}
    assert source.encoder.key() != tokenized(data, tmp_path, without).encoder.key()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rolle": "from"}, r"message_fields\.rolle: no key of messages .*weight\)$"),
        ({"from": "role"}, r"message_fields\.from: .*OpenAI's key comes first: role: from\.$"),
        ({"role": "a", "content": "a"}, r"message_fields\.role: 'a' appears twice"),
        ({"role": ""}, r"message_fields\.role: '' is not a key"),
    ],
)
def test_keys_that_no_message_has_are_refused(fields: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        PromptConfig(message_fields=fields)
    with pytest.raises(ConfigError, match=problem):
        DatasetConfig(data_files="x.jsonl", message_fields=fields)


@pytest.mark.parametrize(
    "template",
    [chat_support.CHATML, MARKED, "plain", THINKS],
    ids=["plain", "marked", "built-in", "kwargs"],
)
def test_which_ends_of_turns_are_trained(template: str, tmp_path: Path) -> None:
    end = "<|im_end|>"
    row = {"messages": both("Sure?", "Yes.") + both("And now?", "No.")}

    def trained(ends: str | None, row: Row = row, **options: Any) -> tuple[str, int]:
        config = PromptConfig(template=template, train_on_eos=ends, **options)
        found = PromptEngine(chat_tokenizer(), config).render(row)
        return "|".join(found.text[a:b] for a, b in found.spans), found.end

    assert trained(None) == trained("turn") == (f"Yes.{end}|No.{end}", OPEN)
    assert trained("last") == (f"Yes.|No.{end}", OPEN)
    assert trained("none") == ("Yes.|No.", OPEN)
    assert trained("last", train_on="last_assistant") == (f"No.{end}", OPEN)
    left_out = {"messages": [*row["messages"][:3], said("No.", train=False)]}
    assert trained("last", left_out) == (f"Yes.{end}", OPEN)
    columns = {"content_field": "messages", "chat_template": template}
    keys = {
        tokenized([row], tmp_path, columns | {"train_on_eos": ends}).encoder.key()
        for ends in (None, "turn", "last", "none")
    }
    assert len(keys) == 3


@pytest.mark.parametrize("rejected", [None, "rejected"])
@pytest.mark.parametrize("form", ["rows", "jsonl"])
def test_an_answer_may_be_one_message(form: str, rejected: str | None, tmp_path: Path) -> None:
    """As axolotl's preferences have it."""
    lists: list[Row] = [
        {
            "prompt": both("Hi", "Hello")[:1],
            "chosen": [said("Yes.", train=True) if n else said("Yes.")],
            "rejected": [said("No.")],
        }
        for n in range(2)
    ]
    alone = [row | {name: row[name][0] for name in ("chosen", "rejected")} for row in lists]
    fields = {
        "prompt_field": "prompt",
        "completion_field": "chosen",
        "rejected_field": rejected,
        "chat_template": chat_support.CHATML,
        "train_on": "assistant",
    }
    found = []
    for name, data in (("lists", lists), ("alone", alone)):
        given: Any = data
        if form == "jsonl":
            given = tmp_path / f"{name}.jsonl"
            given.write_text("".join(json.dumps(row) + "\n" for row in data))
        found.append(documents(tokenized(given, tmp_path, fields), 2))
    assert found[0] == found[1]
    assert all(any(mask) for _, mask in found[0])


def test_the_end_of_a_completion_of_text_need_not_be_trained(tmp_path: Path) -> None:
    columns = {"prompt_field": "prompt", "completion_field": "completion"}
    masks = [
        documents(tokenized(rows("completion"), tmp_path, columns | {"train_on_eos": ends}), 5)
        for ends in (None, "none")
    ]
    for (ids, mask), (same, open_mask) in zip(*masks, strict=True):
        assert (ids, mask[:-1]) == (same, open_mask[:-1])
        assert (mask[-1], open_mask[-1]) == (1, 0)
    for options in ({"train_on": "all"}, {"label_column": "a"}):
        with pytest.raises(
            ConfigError, match="train_on_eos: has no effect if everything is trained"
        ):
            PromptConfig(train_on_eos="none", **options)
    talks = rows("completion talk")
    with pytest.raises(
        ConfigError, match=r"datasets\[0\].train_on_eos: has no effect if everything"
    ):
        tokenized(talks, tmp_path, columns | {"train_on_eos": "none", "chat_template": "chatml"})


@pytest.mark.parametrize(
    "shape", ["completion talk", "preference talk", "preference talk implicit", "unpaired talk"]
)
def test_messages_as_json_text_are_proposed_as_messages(shape: str, tmp_path: Path) -> None:
    data = rows(shape)
    texts = [
        {
            name: json.dumps(value) if isinstance(value, list) else value
            for name, value in row.items()
        }
        for row in data
    ]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "rows.parquet")
    fields = dict(easypipe.discover(str(tmp_path / "rows.parquet")).part().propose().fields)
    told = {"prompt": dataclasses.replace(fields["prompt"], template="chatml")}
    made = documents(tokenized(texts, tmp_path, fields | told), len(data))
    assert made == documents(tokenized(data, tmp_path, proposed(data, "chatml")), len(data))


@pytest.mark.parametrize(
    "shape",
    ["completion talk", "preference talk", "preference talk implicit", "unpaired talk", "prompts"],
)
@pytest.mark.parametrize(
    "roles", [{"human": "user", "gpt": "assistant"}, {"boss": "user", "bot": "assistant"}]
)
def test_speakers_by_other_names_are_proposed_with_their_roles(
    shape: str, roles: dict[str, str], tmp_path: Path
) -> None:
    data, text = rows(shape), json.dumps(rows(shape))
    for name, role in roles.items():
        text = text.replace(f'"role": "{role}"', f'"role": "{name}"')
    told = roles if "boss" in roles else None
    fields = dict(easypipe.discover(json.loads(text)).part().propose(roles=told).fields)
    fields["prompt"] = dataclasses.replace(fields["prompt"], template="chatml")
    made = documents(tokenized(json.loads(text), tmp_path, fields), len(data))
    assert made == documents(tokenized(data, tmp_path, proposed(data, "chatml")), len(data))


def test_prompts_without_answers_are_answered(tmp_path: Path) -> None:
    """What `easypipe generate --messages` reads, of TRL's prompt-only rows too."""
    file = jsonl(tmp_path / "prompts.jsonl", rows("prompts", 2))
    asked = [row["prompt"] for row in rows("prompts", 2)]
    assert [row["messages"] for _, row in conversations_of(file)] == asked
    # one JSON list of conversations, each a list of messages or a row
    for written in (rows("prompts", 2), asked, [asked[0], {"messages": asked[1]}]):
        file.write_text(json.dumps(written, indent=1))
        assert [row["messages"] for _, row in conversations_of(file)] == asked
    assert conversations_of(file)[1][0] == f"{file}, conversation 1"
    file.write_text(json.dumps(asked[0], indent=1))
    assert [row["messages"] for _, row in conversations_of(file)] == [asked[0]]
    # messages in other keys, and rows that name them otherwise
    for keys in (("from", "value"), ("who", "says"), ("role", "text")):
        other = [[dict(zip(keys, one.values(), strict=True)) for one in talk] for talk in asked]
        for name in ("messages", "prompt", "conversations", "chat"):
            jsonl(file, [{name: talk} for talk in other])
            assert [row["messages"] for _, row in conversations_of(file)] == asked
        file.write_text(json.dumps(other))
        assert [row["messages"] for _, row in conversations_of(file)] == asked
    jsonl(file, [{"messages": asked[0]}, {"talk": asked[1]}])
    with pytest.raises(
        ConfigError, match=r"line 2: an object without messages \(have: talk\)\. Call"
    ):
        conversations_of(file)
    # separators that end no line of JSON, behind a byte order mark
    odd = [[user("a\u2028b")], [user("c\x85d")]]
    lines = [json.dumps(talk, ensure_ascii=False) for talk in odd]
    file.write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    assert [row["messages"] for _, row in conversations_of(file)] == odd
