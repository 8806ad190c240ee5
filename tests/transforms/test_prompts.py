"""PromptConfig and PromptEngine: every format, byte-equal to the pipeline; what is trained; what is
refused.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
import strategies
from chat_support import (
    CHATML,
    HOSTILE,
    MARKED,
    REASONING,
    chat_tokenizer,
    processor_time_of_workers,
    talk,
)
from easypipe import (
    ConfigError,
    DatasetConfig,
    FewShotConfig,
    Pipeline,
    PipelineConfig,
    PromptConfig,
    PromptEngine,
    SourceError,
    TokenizerConfig,
    load_tokenizer,
)
from easypipe.core.config import from_dict
from easypipe.core.schema import INPUT_IDS, LOSS_MASK
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.transforms.chat.render import HostileTemplateError
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES
from pipelines import jsonl
from strategies import examples

ROWS = [
    {"instruction": "Add two and two.", "input": "in words", "output": "Four."},
    {"instruction": "Say yes", "input": "", "output": "Yes"},
    {"instruction": "the quick", "input": "naïve 日本 😀", "output": "brown fox"},
]
TALK = {"messages": talk("1?", "A1", "2?", "A2")}
CUSTOM: dict[str, Any] = {
    "format_type": "custom",
    "template": "### {instruction}\n{input}\n### Response:\n{output}\n",
    "input_columns": ("instruction", "input"),
    "label_column": "output",
}


PRINTS_NULLS = (
    "{{ tools | tojson }}{{ (documents or []) | tojson }}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{{ (m.tool_calls or []) | tojson }}{{ m.name is defined }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
WITH_NULLS = [
    {
        "messages": [
            {"role": "user", "content": "q", "name": None},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": given}]},
        ],
        "tools": ({"name": "f", "default": None},),
        "chat_template_kwargs": {"documents": [{"title": None}]},
    }
    for given in (
        {"a": 1, "z": None},
        {"a": datetime.date(2026, 1, 31), "z": [None, {"b": None}]},
    )
]


def engine(**options: Any) -> PromptEngine:
    return PromptEngine(chat_tokenizer(), PromptConfig(**options))


def shown(row: dict[str, Any], **options: Any) -> tuple[str, list[str]]:
    """(text, what of it is trained)."""
    found = engine(**options).render(row)
    return found.text, [found.text[a:b] for a, b in found.spans]


def tokenized(
    folder: Path, rows: Any, prompt: PromptConfig, **options: Any
) -> TokenizedShardedSource:
    values = {
        "name": "d",
        "data_files": rows,
        "tokenizer": chat_tokenizer(),
        "prompt": prompt,
        "on_error": "skip",
    } | options
    config = PipelineConfig(datasets=[DatasetConfig(**values)], seed=1, cache_dir=folder)
    source = Pipeline.from_config(config).source().tokenize().get_data()["d"]
    assert isinstance(source, TokenizedShardedSource)
    return source


def assert_one_way(folder: Path, rows: Sequence[dict[str, Any]], prompt: PromptConfig) -> int:
    """Law 9: what PromptEngine makes of a row is what the pipeline stores of it; what it refuses is
    a reject. Returns how many.
    """
    source = tokenized(folder, rows, prompt)
    scanned = source.scan(0, 0, len(rows))
    laws.assert_stateless_reads(source)
    stored = {row["__row_number__"]: row for row in scanned.batch.to_pylist()}
    refused = Counter[str]()
    one = PromptEngine(chat_tokenizer(), prompt)
    for number, row in enumerate(rows):
        if number not in stored:
            with pytest.raises(SourceError) as caught:
                one.encode(row)
            refused[str(caught.value).split(": ")[1]] += 1
            continue
        made = one.encode(row)
        assert made[INPUT_IDS].tolist() == stored[number][INPUT_IDS]
        assert made[LOSS_MASK].tolist() == stored[number].get(LOSS_MASK, [1] * len(made[INPUT_IDS]))
    counts = Counter[str]()
    # of benign ones the first is named, and how many went the same way
    for reject in scanned.rejects:
        assert reject.row not in stored
        counts[reject.reason] += reject.count
    assert counts == refused
    return len(stored)


FORMATS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "chat": ({}, [TALK, {"messages": None}, {"messages": talk("only a question")}]),
    "messages and those that answer them": (
        {"label_column": "completion", "input_columns": ("prompt",)},
        [
            {"prompt": talk("Sure?"), "completion": talk("", "Yes.")[1:]},
            {"prompt": talk("Sure?", "Yes.", "And now?"), "completion": talk("", "No.")[1:]},
            {"prompt": [], "completion": talk("", "Yes.")[1:]},
            {"prompt": talk("Sure?"), "completion": None},
        ],
    ),
    "nulls inside": ({"template": PRINTS_NULLS, "train_on": "all"}, WITH_NULLS),
    "nulls inside an answer": (
        {
            "template": PRINTS_NULLS,
            "input_columns": ("prompt",),
            "label_column": "completion",
            "train_on": "completion",
        },
        [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in WITH_NULLS],
    ),
    "chat as text": ({}, [{"messages": json.dumps(TALK["messages"])}, {"messages": "[{"}]),
    "sharegpt": (
        {"format_type": "sharegpt", "roles": {"bot": "assistant"}},
        [
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "bot", "value": "Yes"}]},
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "nobody", "value": "Yes"},
                ]
            },
        ],
    ),
    "alpaca": (
        {"format_type": "alpaca"},
        [*ROWS, {"instruction": "a", "input": None, "output": "b"}, {**ROWS[0], "output": None}],
    ),
    "custom": (CUSTOM, [*ROWS, {**ROWS[0], "input": None}, {**ROWS[0], "output": ""}]),
    "jinja": (
        CUSTOM
        | {
            "template": "{{ instruction }}{% if input %}: {{ input }}{% endif %} -> {{ output|trim "
            "}}\n---"
        },
        [*ROWS, {**ROWS[0], "input": None}, {**ROWS[0], "output": ""}],
    ),
    "pairs": (
        {"format_type": "prompt_completion", "input_columns": ("q",), "label_column": "a"},
        [{"q": "the quick ", "a": "brown fox"}, {"q": "", "a": "x"}, {"q": None, "a": "x"}],
    ),
    "text": ({"format_type": "text"}, [{"text": "the quick"}, {"text": ""}, {"text": "brown fox"}]),
    "few": (
        CUSTOM | {"few_shot": FewShotConfig(examples=(ROWS[0],)), "system_prompt": "Be brief."},
        [*ROWS, {**ROWS[0], "output": ""}],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_engine_gives_what_the_pipeline_stores(tmp_path: Path, name: str) -> None:
    options, rows = FORMATS[name]
    assert assert_one_way(tmp_path, rows, PromptConfig(**options)) >= 1


@examples(15)
@given(st.data())
def test_any_text_in_any_format(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    value = st.one_of(strategies.texts(), st.none())
    row = st.fixed_dictionaries({"instruction": value, "input": value, "output": value})
    rows = [*data.draw(st.lists(row, min_size=1, max_size=5)), ROWS[0]]
    options = data.draw(
        st.sampled_from([FORMATS[name][0] for name in ("alpaca", "custom", "jinja", "few")])
    )
    assert assert_one_way(tmp_path_factory.mktemp("cache"), rows, PromptConfig(**options)) >= 1
    found = (
        engine(**options).render(rows[0])
        if all(rows[0].values()) and rows[0]["output"].strip()
        else None
    )
    if found is not None and name_of(options) != "jinja":
        assert rows[0]["output"] in found.text[found.spans[0][0] :]
        assert rows[0]["instruction"] in found.text[: found.spans[0][0]]


def name_of(options: dict[str, Any]) -> str:
    return next(name for name, (known, _) in FORMATS.items() if known is options)


@pytest.mark.parametrize("as_list", [list, tuple])
def test_the_template_sees_nulls_inside_messages_tools_and_variables(as_list: Any) -> None:
    """Of the message itself, keys that are null are left out, as in `apply_chat_template`."""
    row = WITH_NULLS[0] | {"messages": as_list(WITH_NULLS[0]["messages"])}
    text, _ = shown(row, template=PRINTS_NULLS, train_on="all")
    assert text == (
        '[{"name": "f", "default": null}][{"title": null}]user:q[]False<|im_end|>'
        'assistant:[{"name": "f", "arguments": {"a": 1, "z": null}}]False<|im_end|>'
    )
    # what JSON cannot say is refused as before
    with pytest.raises(SourceError, match="the content of message 0 is null"):
        engine().render({"messages": [{"role": "user", "content": b"q"}]})


def test_template_input_columns_and_label_column_say_what_is_written() -> None:
    text = "### Say yes\n\n### Response:\nYes\n"
    assert shown(ROWS[1], **CUSTOM) == (text, ["Yes\n"])
    assert shown(ROWS[1], **CUSTOM, train_on="all") == (text, [text])
    bare = {**CUSTOM, "label_column": None, "input_columns": ("instruction", "input", "output")}
    assert shown(ROWS[1], **bare) == (text, [text])
    unnamed = engine(format_type="custom", template="{n} + {n} = {sum}", label_column="sum")
    assert unnamed.columns == ("n", "sum")
    assert unnamed.render({"n": 2, "sum": 4.0}).text == "2 + 2 = 4.0"
    marked = {
        "format_type": "custom",
        "template": "Q {{ q }}{% generation %}A {{ a }}!{% endgeneration %}.",
        "input_columns": ("q", "a"),
    }
    assert shown({"q": 1, "a": 2}, **marked) == ("Q 1A 2!.", ["A 2!"])


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({"format_type": "chat", "tools_column": "t"}, ("messages", "t")),
        ({"format_type": "prompt_completion", "label_column": "a"}, ("prompt", "a")),
        ({"format_type": "prompt_completion", "rejected_column": "r"}, ("prompt", "r")),
        ({"format_type": "prompt_completion", "desirable_column": "d"}, ("prompt", "d")),
    ],
)
def test_every_column_that_an_option_names_is_read(
    options: dict[str, Any], columns: tuple[str, ...]
) -> None:
    assert {*PromptConfig(**options).columns} >= {*columns}


def test_alpaca_has_a_prompt_with_input_and_one_without() -> None:
    with_input, without = (shown(row, format_type="alpaca") for row in ROWS[:2])
    assert "### Input:\nin words\n\n### Response:\nFour." in with_input[0]
    assert "Input" not in without[0]
    assert (with_input[1], without[1]) == (["Four."], ["Yes"])
    renamed = {"format_type": "alpaca", "input_columns": ("task",), "label_column": "solution"}
    assert shown({"task": "Say yes", "solution": "Yes"}, **renamed) == without


def test_openai_and_chat_are_one_format() -> None:
    row = {"messages": talk("1?", "A1")}
    assert shown(row, format_type="openai") == shown(row, format_type="chat")
    openai = PromptConfig(format_type="openai", roles_to_train=("user",))
    assert (openai.inputs, openai.label) == (("messages",), None)


def test_sharegpt_is_openai_in_other_words() -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "1?"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "Three"},
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Three"},
    ]
    expected = shown({"messages": messages, "tools": [{"name": "f"}]}, template="chatml")
    assert (
        shown(
            {"conversations": turns, "tools": [{"name": "f"}]},
            format_type="sharegpt",
            template="chatml",
        )
        == expected
    )
    assert expected[1] == [
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
        "Three<|im_end|>",
    ]
    with pytest.raises(SourceError, match=r"unknown_role: message 1 is from 'bot'.*prompt\.roles"):
        shown({"conversations": [turns[1], {"from": "bot", "value": "x"}]}, format_type="sharegpt")
    with pytest.raises(SourceError, match="not_a_message: message 1 has no value"):
        shown({"conversations": [turns[1], {"from": "gpt"}]}, format_type="sharegpt")
    with pytest.raises(ConfigError, match=r"roles.bot: 'robot' is not a role"):
        PromptConfig(format_type="sharegpt", roles={"bot": "robot"})


@pytest.mark.parametrize(
    ("asks", "answers"), [("human", "gpt"), ("user", "chatgpt"), ("human", "assistant")]
)
@pytest.mark.parametrize("tells", ["observation", "tool"])
def test_names_of_speakers(asks: str, answers: str, tells: str) -> None:
    said = ((asks, "1?"), (answers, "A1"), (tells, "3"), (answers, "A2"))
    turns = [{"from": name, "value": text} for name, text in said]
    roles = ("user", "assistant", "tool", "assistant")
    messages = [
        {"role": role, "content": text} for role, (_, text) in zip(roles, said, strict=True)
    ]
    assert shown({"conversations": turns}, format_type="sharegpt", template="chatml") == shown(
        {"messages": messages}, template="chatml"
    )


@pytest.mark.parametrize("role", ["assistant", "user", "system", "tool", "developer"])
def test_every_role_can_be_trained(role: str) -> None:
    messages = [
        {"role": one, "content": f"of {one}"} for one in dict.fromkeys((role, "user", "assistant"))
    ]
    [trained] = shown({"messages": messages}, roles_to_train=(role,), template="chatml")[1]
    assert trained.startswith(f"of {role}")


def test_train_on_and_the_train_flags_of_messages() -> None:
    both, last = ["A1<|im_end|>", "A2<|im_end|>"], ["A2<|im_end|>"]
    for template in (None, MARKED, "chatml"):
        assert shown(TALK, template=template)[1] == both
        assert shown(TALK, template=template, train_on="last_assistant")[1] == last
        assert shown(TALK, template=template, train_on="completion")[1] == last
        open_end = {"messages": talk("1?", "A1", "2?")}
        assert shown(open_end, template=template, train_on="last_assistant")[1] == both[:1]
        with pytest.raises(SourceError, match="nothing_to_train"):
            shown(open_end, template=template, train_on="completion")
        flagged = [dict(message) for message in TALK["messages"]]
        flagged[1]["train"] = False
        assert shown({"messages": flagged}, template=template)[1] == last
        flagged[1]["train"], flagged[3]["train"] = True, False
        assert (
            shown({"messages": flagged}, template=template, train_on="last_assistant")[1]
            == both[:1]
        )
        assert (
            shown({"messages": flagged}, template=template)[0] == shown(TALK, template=template)[0]
        )
    for flag, role, train_on in (
        ("yes", 1, "assistant"),
        (True, 0, "assistant"),
        (False, 1, "all"),
    ):
        flagged = [dict(message) for message in TALK["messages"]]
        flagged[role]["train"] = flag
        with pytest.raises(SourceError, match="bad_train_flag"):
            shown({"messages": flagged}, train_on=train_on)


GIVEN = st.recursive(  # without nulls: of values, those are keys that are not there
    st.one_of(
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["user", "assistant", "\ud800"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["type", "text", "name"]), inner, max_size=2),
    ),
    max_leaves=4,
)
ODD = st.one_of(st.none(), GIVEN)
TURNS = st.fixed_dictionaries(
    {
        "role": st.one_of(st.sampled_from(["user", "assistant", "system"]), ODD),
        "content": st.one_of(strategies.texts(), ODD),
    },
    optional={"train": ODD, "from": GIVEN, "value": GIVEN, "tool_calls": ODD},
)
VALUE = ODD.filter(lambda value: not isinstance(value, str))  # which would be taken for JSON
WRITTEN = st.fixed_dictionaries(
    {"messages": st.one_of(st.lists(TURNS, max_size=3), VALUE)}, optional={"tools": VALUE}
)


@given(st.lists(WRITTEN, min_size=1, max_size=8))
@examples(60)
def test_conversations_as_json_are_those_of_their_values(rows: list[dict[str, Any]]) -> None:
    for options in ({"template": MARKED}, {"system_prompt": "Be brief.", "train_on": "all"}):
        laws.assert_json_is_values(engine(**options).render_rows, rows)
    turns = [{"conversations": row["messages"]} for row in rows]
    laws.assert_json_is_values(engine(format_type="sharegpt", template="chatml").render_rows, turns)


def test_rows_of_broken_json_keep_their_reasons_and_places() -> None:
    good = {"messages": json.dumps(TALK["messages"]), "tools": "null"}
    bad = [
        {"messages": "[{", "tools": "[{"},
        {"messages": good["messages"], "tools": "[{"},
        {"messages": good["messages"], "tools": ""},
        {"messages": "[" * 99999},
        {"messages": "9" * 9999},
        {"messages": b"\xff\xfe"},
        {"messages": None},
    ]
    found = engine().render_rows([good, *(row for one in bad for row in (one, good))])
    assert [one.text for one in found[::2]] == [engine().render(TALK).text] * 8
    assert [one.reason for one in found[1::2]] == ["not_json"] * 6 + ["null"]
    assert found[3].detail.startswith("tools: Expecting")
    twice = (
        '[{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": '
        '"c", "x": NaN}]'
    )
    assert (
        engine().render({"messages": twice}).text
        == engine().render({"messages": talk("b", "c")}).text
    )


def test_marked_spans_are_given_to_turns_by_proof_not_by_number() -> None:
    """Two marks in the first turn and none in an empty one are as many as turns: counting them
    would train the wrong one.
    """
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% for part in "
        "m.content.split('|') %}"
        "{% generation %}{{ part }}{% endgeneration %}<s>{% endfor %}{% else %}{{ m.content }}{% "
        "endif %}{% endfor %}"
    )
    row = {"messages": talk("1?", "one|two", "2?", "")}
    with pytest.raises(
        SourceError, match=r"unproven_spans: which turn is marked|unproven_spans: putting"
    ):
        shown(row, template=source, train_on="last_assistant")


@pytest.mark.parametrize("said", ["", "  "])
def test_the_end_of_an_empty_turn_is_trained_on_if_the_template_marks_it(said: str) -> None:
    row = {"messages": talk("1?", said, "2?", "A2", "3?", said)}
    assert shown(row, template=CHATML)[1] == ["A2<|im_end|>"]
    end = f"{said}<|im_end|>"
    assert shown(row, template=MARKED)[1] == [end, "A2<|im_end|>", end]
    with pytest.raises(SourceError, match="unproven_spans: which turn is marked"):
        shown({"messages": talk("1?", "", "2?", "A2")}, template=MARKED, train_on="last_assistant")
    alone = {"messages": talk("1?", said)}
    assert shown(alone, template=MARKED)[1] == [end]
    with pytest.raises(SourceError, match="nothing_to_train: no text that train_on='assistant'"):
        shown(alone, template=CHATML)
    pair = {"prompt": talk("1?"), "completion": talk("1?", said)[1:]}
    answers = {"input_columns": ("prompt",), "label_column": "completion"}
    assert shown(pair, template=CHATML, **answers)[1] == [f"{end}\n"]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_built_in_templates_by_name_mark_what_the_sentinels_find(name: str) -> None:
    row = {"messages": talk("1?", "A1", "2?", " A2 ", system="Be brief.")}
    text, trained = shown(row, template=name)
    assert trained == ["A1<|im_end|>", " A2 <|im_end|>"]
    unmarked = (
        CHAT_TEMPLATES[name].replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    )
    assert shown(row, template=unmarked) == (text, trained)
    assert text.startswith("<|endoftext|>")  # its BOS, once
    assert text.count("<|endoftext|>") == 1
    if name != "chatml":
        with pytest.raises(
            SourceError, match="refused_by_template: this built-in template knows no tools"
        ):
            shown(row | {"tools": [{"name": "f"}]}, template=name)


def test_weights_of_messages_are_train_flags(tmp_path: Path) -> None:
    """As OpenAI's files have them: 0 and 1, on the assistant's messages."""

    def weighted(*weights: Any, **options: Any) -> list[str]:
        messages = talk("1?", "A1", "2?", "A2")
        for message, weight in zip(messages[1::2], weights, strict=True):
            message["weight"] = weight
        return shown({"messages": messages}, **options)[1]

    assert weighted(0, 1) == ["A2<|im_end|>"]
    assert weighted(1.0, 0.0) == ["A1<|im_end|>"]
    assert weighted(1, None, train_on="last_assistant") == ["A1<|im_end|>", "A2<|im_end|>"]
    for bad, why in (
        (0.5, "weight of message 1 is 0.5, and messages have weights of 0 and 1 alone"),
        ("1", "weight of message 1 is '1'"),
    ):
        with pytest.raises(SourceError, match=why):
            weighted(bad, 1)
    with pytest.raises(
        SourceError, match="message 1 has a weight, and train_on='all' trains every token"
    ):
        weighted(0, 1, train_on="all")
    with pytest.raises(SourceError, match="the train flag of message 1 is True, and its weight 0"):
        shown(
            {
                "messages": [
                    talk("1?")[0],
                    {"role": "assistant", "content": "A1", "train": True, "weight": 0},
                ]
            }
        )
    with pytest.raises(SourceError, match="message 0 is to be trained, and is the user's"):
        shown({"messages": [{"role": "user", "content": "1?", "weight": 1}, talk("1?", "A1")[1]]})
    sharegpt = [
        {"from": "human", "value": "1?"},
        {"from": "gpt", "value": "A1", "weight": 0},
        {"from": "gpt", "value": "A2"},
    ]
    assert shown({"conversations": sharegpt}, format_type="sharegpt")[1] == ["A2<|im_end|>"]
    rows = [
        {
            "messages": [
                talk("1?")[0],
                {"role": "assistant", "content": f"A{i}", "weight": i},
                *talk("2?", "A2"),
            ]
        }
        for i in (0, 1)
    ]
    assert assert_one_way(tmp_path, rows, PromptConfig()) == 2


@pytest.mark.parametrize("form", ["chat", "sharegpt", "alpaca"])
def test_a_system_column_is_the_row_s_own_system_prompt(tmp_path: Path, form: Any) -> None:
    column, who, what = {"sharegpt": ("conversations", "from", "value")}.get(
        form, ("messages", "role", "content")
    )
    said = [{who: "user", what: "1?"}, {who: "assistant", what: "A1"}]
    row: dict[str, Any] = ROWS[0] if form == "alpaca" else {column: said}
    plain = shown(row, format_type=form)
    for none in (None, "", " "):
        assert shown({**row, "system": none}, format_type=form) == plain
    text, trained = shown(
        {**row, "system": "Be brief."}, format_type=form, system_prompt="Be kind."
    )
    assert (
        text
        == ("<|im_start|>system\nBe brief.<|im_end|>\n" if form != "alpaca" else "Be brief.\n\n")
        + plain[0]
    )
    assert trained == plain[1]
    assert (
        "Be kind." in shown({**row, "system": None}, format_type=form, system_prompt="Be kind.")[0]
    )
    with pytest.raises(SourceError, match="not_a_string: column 'system': 3 is not text"):
        shown({**row, "system": 3}, format_type=form)
    rows = [{**row, "system": "Be brief."}, {**row, "system": None}]
    assert assert_one_way(tmp_path / "columns", rows, PromptConfig(format_type=form)) == 2
    if form != "alpaca":
        own = [{who: "system", what: "Be brief."}, *said]
        assert (
            shown({column: own, "system": "Be brief."}, format_type=form)[0].count("Be brief.") == 1
        )
        with pytest.raises(
            SourceError,
            match="two_system_prompts: column 'system' and the first message both hold one",
        ):
            shown({column: own, "system": "Be long."}, format_type=form)
        rows = [
            {column: json.dumps(said), "system": "Be brief."},
            {column: json.dumps(said), "system": None},
        ]
        assert assert_one_way(tmp_path / "json", rows, PromptConfig(format_type=form)) == 2


@pytest.mark.parametrize("column", ["label", "kto_tag"])
def test_answers_that_are_marked_as_bad_are_not_trained(tmp_path: Path, column: str) -> None:
    for form, row in (
        ("prompt_completion", {"prompt": "1?", "completion": "A1"}),
        ("chat", {"messages": talk("1?", "A1")}),
    ):
        for good in (True, None, 0, "no"):  # a class is not a verdict
            assert shown({**row, column: good}, format_type=form) == shown(row, format_type=form)
        with pytest.raises(
            SourceError,
            match=f"rejected_answer: column {column!r} is false.*Leave such rows out, for example with a filter on that column, or",
        ):
            shown({**row, column: False}, format_type=form)
        folder = tmp_path / form
        source = tokenized(
            folder, [{**row, column: True}, {**row, column: False}], PromptConfig(format_type=form)
        )
        assert [(reject.row, reject.reason) for reject in source.scan(0, 0, 2).rejects] == [
            (1, "rejected_answer")
        ]
    custom = {"format_type": "custom", "template": "{text}: {label}", "label_column": "label"}
    assert shown({"text": "x", "label": False}, **custom)[1] == ["false"]


def test_train_empty_thinking() -> None:
    row, options = {"messages": talk("2?", "A2")}, {"template": REASONING}
    for value, expected in ((None, "<think>\n\n</think>\n\nA2<|im_end|>"), (False, "A2<|im_end|>")):
        assert shown(row, **options, train_empty_thinking=value)[1] == [expected]
    with pytest.raises(
        ConfigError,
        match=r"train_empty_thinking: has no effect together with train_on 'all'.*Leave it out",
    ):
        PromptConfig(train_on="all", train_empty_thinking=True)
    with pytest.raises(
        ConfigError, match="train_empty_thinking: has no effect on format_type 'text'"
    ):
        PromptConfig(format_type="text", train_empty_thinking=False)
    with pytest.raises(
        ConfigError, match=r"train_empty_thinking: has no effect together with train_on 'all'"
    ):
        DatasetConfig(
            data_files="x.jsonl",
            content_field="messages",
            train_on="all",
            train_empty_thinking=False,
        )


@pytest.mark.parametrize("tools", [None, [], "[]", "null"])
def test_no_tools_are_none_to_a_template(tools: Any) -> None:
    """Llama 3.1 and others ask whether `tools is none`: an empty list would print a list of no
    tools.
    """
    template = "{% if tools is not none %}tools: {{ tools }}{% endif %}" + CHATML
    assert shown(TALK | {"tools": tools}, template=template) == shown(TALK, template=CHATML)


def test_transformers_passes_an_empty_list_of_tools_to_the_template() -> None:
    """docs/conversations.md says that easypipe does not."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install easypipe[compare]"
    )
    template = "{% if tools is not none %}[TOOLS]{{ tools }}[/TOOLS]{% endif %}" + CHATML
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(Path(chat_tokenizer()) / "tokenizer.json")
    ).apply_chat_template(TALK["messages"], tools=[], chat_template=template, tokenize=False)
    ours, _ = shown(TALK | {"tools": []}, template=template)
    assert theirs == "[TOOLS][][/TOOLS]" + ours


def test_tools_column_system_prompt_and_template_date() -> None:
    template = (
        "{% if tools %}{{ tools|tojson }}{% endif %}{{ strftime_now('%Y') if false else '' }}"
        + CHATML
    )
    row = TALK | {"functions": [{"name": "f"}]}
    assert shown(row, template=template, tools_column="functions")[0].startswith('[{"name": "f"}]')
    assert shown(row, template=template)[0].startswith("<|im_start|>user")
    assert shown(TALK, system_prompt="Be brief.")[0].startswith(
        "<|im_start|>system\nBe brief.<|im_end|>"
    )
    own = {"messages": talk("a", "b", system="Mine")}
    assert shown(own, system_prompt="Be brief.") == shown(own)
    assert (
        shown(ROWS[1], **CUSTOM, system_prompt="Be brief.")[0]
        == "Be brief.\n\n" + shown(ROWS[1], **CUSTOM)[0]
    )
    everything = CUSTOM | {"train_on": "all", "system_prompt": "Be brief."}
    assert shown(ROWS[1], **everything)[1] == [shown(ROWS[1], **everything)[0]]
    dated = {
        "format_type": "custom",
        "template": "{{ strftime_now('%Y') }} {{ q }}",
        "input_columns": ("q",),
    }
    assert shown({"q": "x"}, **dated, template_date="2024-07-26")[0] == "2024 x"
    with pytest.raises(SourceError, match="set template_date"):
        shown({"q": "x"}, **dated)


@pytest.mark.parametrize(
    "template", ["{q} {a}EOS\n", "{q} {a}EOS \n\n", "{{ q }} {{ a }}{{ eos_token }}{{ '\n' }}"]
)
def test_a_template_that_ends_with_eos_and_spaces_gets_no_second_eos(template: str) -> None:
    tokenizer = load_tokenizer(chat_tokenizer())
    assert tokenizer.eos_token_id is not None
    eos = tokenizer.special_strings["eos_token"]
    options: dict[str, Any] = {
        "format_type": "custom",
        "template": template.replace("EOS", eos),
        "input_columns": ("q",),
        "label_column": "a",
    }
    row = {"q": "why?", "a": "so"}
    for more, trained in (({}, 1), ({"train_on_eos": "none"}, 0)):
        sample = PromptEngine(tokenizer, PromptConfig(**options, **more)).encode(row)
        at = np.flatnonzero(sample["input_ids"] == tokenizer.eos_token_id)
        assert sample["loss_mask"][at].tolist() == [trained]
        assert tokenizer.decode(sample["input_ids"][sample["loss_mask"] > 0]).startswith("so")
    if "eos_token" not in template:
        escaped = TokenizerConfig(name_or_path=chat_tokenizer(), special_strings="escape")
        sample = PromptEngine(escaped, PromptConfig(**options)).encode(row)
        assert sample["input_ids"][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("columns", [("system",), ("system", "tools"), ("chat_template_kwargs",)])
def test_columns_of_conversations_beside_text_are_warned_of(
    columns: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "".join(columns)  # warned of once in a process
    options: dict[str, Any] = {"name": name, "tokenizer": chat_tokenizer()}

    def said(row: dict[str, Any], **more: Any) -> str:
        caplog.clear()
        dataset = DatasetConfig(data_files=[row], **options, **more)
        config = PipelineConfig(datasets=[dataset], seed=1, cache_dir=tmp_path)
        Pipeline.from_config(config).source().tokenize().get_data()
        return "".join(line for line in caplog.messages if "not read" in line)

    row = {"prompt": "2+2=", "completion": "4", **dict.fromkeys(columns, "x")}
    fields = {"prompt_field": "prompt", "completion_field": "completion"}
    listed = " and ".join(f"column {column!r}" for column in columns)
    verb = "is" if len(columns) == 1 else "are"
    start = (
        f"datasets[0] ({name!r}): the prompts and answers are text, so {listed} {verb} not read."
    )
    assert said(row, **fields).startswith(start)
    columns_too = "{prompt}{completion}" + "".join(f"{{{column}}}" for column in columns)
    reads = PromptConfig(
        format_type="custom",
        template=columns_too,
        input_columns=("prompt", *columns),
        label_column="completion",
    )
    assert said(row, prompt=reads) == ""
    messages = {"messages": talk("a", "b"), **dict.fromkeys(columns)}
    assert said(messages, content_field="messages") == ""


def test_few_shot_examples_stand_in_front_and_are_never_trained() -> None:
    fixed = FewShotConfig(examples=(ROWS[0], ROWS[1]), separator="\n==\n")
    plain = [shown(row, **CUSTOM)[0] for row in ROWS]
    assert shown(ROWS[2], **CUSTOM, few_shot=fixed) == ("\n==\n".join(plain), ["brown fox\n"])
    assert shown(ROWS[2], **CUSTOM, train_on="all", few_shot=fixed)[1] == [plain[2]]
    theirs = FewShotConfig(examples=({"messages": talk("0?", "A0", system="Not mine")},))
    with pytest.raises(
        ConfigError,
        match="few_shot, example 0: two_system_prompts: it has a system message; system_prompt is for all rows",
    ):
        engine(few_shot=theirs)
    examples = FewShotConfig(examples=({"messages": talk("0?", "A0")},))
    text, trained = shown({"messages": talk("1?", "A1", system="Mine")}, few_shot=examples)
    assert trained == ["A1<|im_end|>"]
    assert [text.index(word) for word in ("Mine", "0?", "A0", "1?", "A1")] == sorted(
        text.index(w) for w in ("Mine", "0?", "A0", "1?", "A1")
    )
    with pytest.raises(ConfigError, match=r"few_shot.examples\[0\]: no column 'output'"):
        engine(**CUSTOM, few_shot=FewShotConfig(examples=({"instruction": "x", "input": "y"},)))


def test_few_shot_draws_from_data_files_by_seed_and_row(tmp_path: Path) -> None:
    rows = [{"q": f"question {i}", "a": f"answer {i}"} for i in range(30)]
    path = jsonl(tmp_path / "pool.jsonl", rows)
    pair: dict[str, Any] = {
        "format_type": "prompt_completion",
        "input_columns": ("q",),
        "label_column": "a",
    }
    drawn = {seed: FewShotConfig(data_files=str(path), count=3, seed=seed) for seed in (1, 2)}
    texts = {
        seed: [shown(row, **pair, few_shot=few) for row in rows] for seed, few in drawn.items()
    }
    for row, (text, trained) in zip(rows, texts[1], strict=True):
        assert trained == [row["a"]]
        assert text.count("question ") == 4
        assert text.count(row["q"] + row["a"]) == 1  # never itself
    assert len({text.split("\n\n")[0] for text, _ in texts[1]}) > 10  # every row has its own
    assert texts[1] != texts[2]
    assert texts[1] == [shown(row, **pair, few_shot=drawn[1]) for row in rows]
    prints = {
        tokenized(tmp_path, rows, PromptConfig(**pair, few_shot=few)).fingerprint
        for few in (None, *drawn.values())
    }
    assert len(prints) == 3
    assert assert_one_way(tmp_path, rows, PromptConfig(**pair, few_shot=drawn[1])) == 30
    talks = [{"messages": talk(f"q{i}", f"a{i}", system="Not mine")} for i in range(5)]
    jsonl(tmp_path / "talks.jsonl", talks)
    few = FewShotConfig(data_files=tmp_path / "talks.jsonl", count=2)
    text, _ = shown({"messages": talk("q1", "a1")}, few_shot=few)
    assert len(text.split("<|im_end|>\n")) == 7
    assert "Not mine" not in text
    with pytest.raises(ConfigError, match=r"few_shot.count: .*has 5 rows, and 5 are drawn"):
        engine(few_shot=FewShotConfig(data_files=tmp_path / "talks.jsonl", count=5))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"format_type": "xml"}, "format_type: 'xml' is not an option"),
        ({"label_column": "messages"}, "label_column: 'messages' appears twice"),
        ({"roles": {"a": "user"}}, "roles: has no effect on format_type 'chat'"),
        (
            {"format_type": "text", "train_on": "all"},
            "train_on: has no effect on format_type 'text'",
        ),
        (
            {"format_type": "alpaca", "template": "x"},
            "template: has no effect on format_type 'alpaca'. Leave it out, or write it with {column}s",
        ),
        ({"format_type": "custom"}, "template: format_type 'custom' needs one"),
        (
            {"format_type": "alpaca", "input_columns": ("a", "b", "c")},
            "input_columns: ['a', 'b', 'c'] for format_type 'alpaca'",
        ),
        (
            {"format_type": "prompt_completion", "label_column": "prompt"},
            "label_column: 'prompt' appears twice",
        ),
        (
            {"format_type": "alpaca", "train_on": "assistant"},
            "train_on: 'assistant' is nothing that 'alpaca' has",
        ),
        (
            {"format_type": "custom", "template": "{a}", "train_on": "completion"},
            "train_on: 'completion' needs a label_column",
        ),
        (
            {"train_on": "all", "few_shot": FewShotConfig(examples=(TALK,))},
            "train_on: 'all' would train the few_shot examples",
        ),
        ({"template_date": "today"}, "template_date: 'today' is not a date"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptConfig(**options)
    assert problem in str(caught.value)
    with pytest.raises(ConfigError, match="examples: there are none, and no data_files"):
        FewShotConfig()
    with pytest.raises(ConfigError, match="count: data_files needs it"):
        FewShotConfig(data_files="x.jsonl")
    with pytest.raises(ConfigError, match="seed: has no effect"):
        FewShotConfig(examples=(TALK,), seed=3)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{instruction.__class__}{input}{output}", "it has a field {instruction.__class__}"),
        ("{instruction[0]}{input}{output}", "it has a field {instruction[0]}"),
        ("{instruction!r}{input}{output}", "it has a field {instruction!r}"),
        ("{instruction:>99999999}{input}{output}", "it has a field {instruction:>99999999}"),
        ("{}{instruction}{input}{output}", "it has a field {}"),
        ("{instruction}{input}", "label_column: 'output' does not appear"),
        ("{instruction}{output}", "input_columns: 'input' does not appear"),
        ("{instruction}{input}{output}{output}", "the label {output} stands 2 times"),
        ("{instruction}{input}{output} }", "a brace that is not a field"),
        ("nothing.jinja", "neither a file nor the text of a template"),
    ],
)
def test_field_templates_know_columns_and_nothing_else(template: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(**CUSTOM | {"template": template})
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ q }} {{ a }} {{ a }}", "prints 'a' as it is 2 times"),
        ("{{ q }}", "prints 'a' as it is 0 times"),
        ("{{ q }} {{ a|upper }}", "prints 'a' as it is 0 times"),
        ("{{ q }}{% if a|length > 3 %}long{% endif %} {{ a }}", "changes more than that word"),
    ],
)
def test_labels_that_cannot_be_proven_are_refused(template: str, why: str) -> None:
    with pytest.raises(SourceError, match="unproven_spans") as caught:
        shown(
            {"q": "x", "a": "yes"},
            format_type="custom",
            template=template,
            input_columns=("q",),
            label_column="a",
        )
    assert why in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_custom_templates_end_alone(name: str) -> None:
    source, why = HOSTILE[name]
    one = engine(format_type="custom", template=source, input_columns=("messages",))
    # whatever takes too long does so for the shortest row, too
    alone = ("memory", "characters")
    errors = tuple(SourceError if w in alone else HostileTemplateError for w in why.split("|"))
    with processor_time_of_workers(most=5), pytest.raises(errors) as caught:
        one.render({"messages": [1]})
    assert any(part in str(caught.value) for part in why.split("|"))
    assert engine().render(TALK).text.startswith("<|im_start|>")


def test_the_prompt_of_document_000_loads_as_printed(tmp_path: Path) -> None:
    printed = {
        "format_type": "custom",
        "template": "Below is an instruction that describes a task.\n\n### "
        "Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
        "### Response:\n{output}\n",
        "input_columns": ["instruction", "input"],
        "label_column": "output",
    }
    config = from_dict(PromptConfig, printed)
    assert assert_one_way(tmp_path, ROWS, config) == 3
    made = PromptEngine(chat_tokenizer(), config).encode(ROWS[0])
    tokenizer = PromptEngine(chat_tokenizer(), config).tokenizer
    assert (
        tokenizer.decode(
            [i for i, flag in zip(made[INPUT_IDS], made[LOSS_MASK], strict=True) if flag]
        )
        == "Four.\n<|im_end|>"
    )


TALK_OPTIONS: dict[str, Any] = {  # options of a dataset that are for conversations alone
    "message_fields": {"content": "body"},
    "chat_template": "chatml",
    "template_date": "2026-01-01",
    "chat_template_kwargs": {"thinking": True},
    "train_empty_thinking": True,
    "tools_field": "instruction",
}


@pytest.mark.parametrize("name", TALK_OPTIONS)
def test_options_of_conversations_are_refused_on_text(name: str, tmp_path: Path) -> None:
    def prepared(**options: Any) -> None:
        rows = [row | {"n": 1} for row in ROWS]
        own = {"name": "d", "data_files": rows, "tokenizer": chat_tokenizer(), **options}
        values = {"datasets": [own | {name: TALK_OPTIONS[name]}], "cache_dir": tmp_path, "seed": 1}
        Pipeline.from_config(PipelineConfig(**values)).source().tokenize().get_data()

    with pytest.raises(
        ConfigError, match=f"{name}: has no effect on column 'n', which holds int64"
    ):
        prepared(content_field="n")
    says = f"{name}: has no effect on prompts and completions. Leave it out"
    says += ", or write it with {column}s" if name == "chat_template" else "."
    with pytest.raises(ConfigError, match=re.escape(says)):
        prepared(prompt_field="instruction", completion_field="output")


def test_prompt_stands_alone_in_a_dataset_and_the_engine_says_what_a_row_lacks(
    tmp_path: Path,
) -> None:
    answers = ("prompt_field", "completion_field", "rejected_field", "desirable_field")
    for other in (
        {"content_field": "messages"},
        *({name: "a"} for name in answers),
        {"prompt_field": "a", "completion_field": "b"},
        *({"train_on": "all"}, {"train_on_eos": "last"}),
        *({name: value} for name, value in TALK_OPTIONS.items()),
    ):
        with pytest.raises(ConfigError) as caught:
            DatasetConfig(data_files="x.jsonl", prompt=PromptConfig(), **other)  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"{next(iter(other))}: has no effect together with prompt. Say it in prompt, or leave prompt out."
        )
    with pytest.raises(ConfigError, match=r"datasets\[0\].prompt.template: it has a field"):
        tokenized(
            tmp_path, ROWS, PromptConfig(**CUSTOM | {"template": "{instruction}{input}{outputs}"})
        )
    with pytest.raises(SourceError, match="column 'messages': no such column"):
        tokenized(tmp_path, ROWS, PromptConfig())
    with pytest.raises(SourceError, match=r"row: no column 'messages'.*Did you mean 'message'"):
        engine().encode({"message": []})
    for kind in ("text", "prompt_completion"):
        bad = dict.fromkeys(("text", "prompt", "completion"), "a\ud800")
        with pytest.raises(SourceError, match=r"row: invalid_utf8: column '\w+' has no text"):
            engine(format_type=kind).encode(bad)
    with pytest.raises(SourceError, match="multimodal: message 0 holds a part of type 'image_url'"):
        engine().encode(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}
        )


def test_max_length_of_the_engine_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    row = {"messages": talk("hi", "a long answer " * 20)}
    cut = PromptEngine(chat_tokenizer(), max_length=30).encode(row)
    stored = tokenized(tmp_path, [row], PromptConfig(), tokenizer_kwargs={"max_length": 30}).read(
        0, 0, 1
    )
    assert len(cut[INPUT_IDS]) == 30
    assert cut[INPUT_IDS].tolist() == stored.column(INPUT_IDS)[0].as_py()
    assert cut[LOSS_MASK].tolist() == stored.column(LOSS_MASK)[0].as_py()


@pytest.mark.parametrize(
    "word", ["include 'x'", "import 'x' as y", "from 'x' import y", "extends 'x'"]
)
def test_templates_that_ask_for_other_files_are_refused_before_any_row(
    tmp_path: Path, word: str
) -> None:
    statement = word.split()[0]
    text = "{# {% include 'fine' %} #}\n{{ messages }}{%- " + word + " -%}"
    with pytest.raises(
        ConfigError, match=rf"template: line 2: asks for another file \({{% {statement} %}}\)"
    ):
        PromptConfig(template=text)
    with pytest.raises(ConfigError, match="chat_template: line 2: asks for another file"):
        DatasetConfig(
            data_files=[{"messages": talk("a")}], content_field="messages", chat_template=text
        )
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"template: .*chat.jinja, line 2: asks for another file"):
        PromptEngine(chat_tokenizer(), PromptConfig(template=file))
    with pytest.raises(ConfigError, match=r"template: .*chat.jinja, line 2: asks for another file"):
        PromptEngine(
            chat_tokenizer(),
            PromptConfig(format_type="custom", template=file, input_columns=("messages",)),
        )
    # words, and no statements
    PromptConfig(
        template="{% raw %}{% include 'x' %}{% endraw %}{{ include }}{# {% extends 'x' %} #}"
    )
