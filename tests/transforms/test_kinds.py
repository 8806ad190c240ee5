"""What kind of rows a dataset holds, and which column is which: proposals with reasons, and
refusals where two columns fit equally well.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.errors import ConfigError
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.transforms.columns.kinds import SLOTS, TITLES, Kind, guess_kind, plain
from strategies import examples

ROOT = Path(__file__).resolve().parents[2]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


def kind(*rows: dict[str, Any], **decided: Any) -> Kind:
    source = InMemoryShardedSource(list(rows))
    return guess_kind(source.schema, rows, **decided)


def texts(*names: str, **decided: Any) -> Kind:
    return kind({name: f"some {name}" for name in names}, **decided)


def mapped(found: Kind) -> dict[str, str]:
    return {choice.slot: choice.column for choice in found.choices}


@pytest.mark.parametrize(
    ("row", "name", "columns"),
    [
        ({"text": "a"}, "text", {"text": "text"}),
        ({"repo": "a", "content": "b"}, "text", {"text": "content"}),
        ({"blurb": "a"}, "text", {"text": "blurb"}),
        ({"blurb": "a", "score": 1.5}, "unknown", {}),
        ({"question": "a", "answer": "b"}, "prompt_completion", {"prompt": "question", "completion": "answer"}),
        ({"userPrompt": "a", "model_response": "b"}, "prompt_completion", {"prompt": "userPrompt", "completion": "model_response"}),
        ({"promt": "a", "compleetion": "b"}, "prompt_completion", {"prompt": "promt", "completion": "compleetion"}),
        ({"instruction": "a", "input": "", "output": "c"}, "alpaca", {"instruction": "instruction", "input": "input", "output": "output"}),
        ({"instruct": "a", "context": "b", "answer": "c"}, "alpaca", {"instruction": "instruct", "input": "context", "output": "answer"}),
        ({"instruction": "a", "output": "c"}, "alpaca", {"instruction": "instruction", "output": "output"}),
        ({"messages": TALK}, "messages", {"messages": "messages"}),
        ({"dialog": json.dumps(TALK), "id": "x"}, "messages", {"messages": "dialog"}),
        ({"whatever": TALK, "id": "x"}, "messages", {"messages": "whatever"}),
        ({"conversations": SHARED}, "sharegpt", {"conversations": "conversations"}),
        ({"chat": [{"who": "user", "says": "hi"}], "id": "x"}, "messages", {"messages": "chat"}),
        ({"chat": json.dumps([{"from": "user", "text": "hi"}])}, "messages", {"messages": "chat"}),
        ({"links": [{"author": "x", "url": "y"}]}, "unknown", {}),
        ({"chat": json.dumps(SHARED)}, "sharegpt", {"conversations": "chat"}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}),
        ({"chosen": TALK, "rejected": TALK}, "preference", {"chosen": "chosen", "rejected": "rejected"}),
        ({"input_ids": [1, 2], "text": "a"}, "tokens", {"input_ids": "input_ids"}),
        ({"a": "x", "b": "y"}, "unknown", {}),
        ({"prompt_id": "x", "answer": "y", "lang": "z"}, "unknown", {}),
        ({"number": 3}, "unknown", {}),
    ],
)  # fmt: skip
def test_kinds(row: dict[str, Any], name: str, columns: dict[str, str]) -> None:
    found = kind(row)
    assert (found.name, mapped(found), found.ties) == (name, columns, ())
    assert all(choice.reason for choice in found.choices)


def test_reasons() -> None:
    assert [choice.reason for choice in texts("prompt", "answer").choices] == [
        "named 'prompt' exactly",
        "an alias of 'completion'",
    ]
    assert texts("promt", "completion").choices[0].reason == "like 'prompt' (91 of 100)"
    assert texts("blurb").choices[0].reason == "the only column that can be 'text'"
    assert texts("a", "b", kind="text", columns={"text": "b"}).choices[0].reason == "as you say"


@pytest.mark.parametrize(
    ("names", "slot", "both"),
    [
        (("question", "solution", "answer"), "completion", ("solution", "answer")),
        (("prompt_a", "prompt_b", "completion"), "prompt", ("prompt_a", "prompt_b")),
        (("content", "document"), "text", ("content", "document")),
    ],
)
def test_two_columns_that_fit_equally_well_are_refused(
    names: tuple[str, ...], slot: str, both: tuple[str, str]
) -> None:
    found = texts(*names)
    with pytest.raises(ConfigError) as caught:
        found.require_decided("here")
    assert f"columns {both[0]!r} and {both[1]!r} fit {slot!r} equally well" in str(caught.value)
    decided = texts(*names, columns={slot: both[1]})  # what the message recommends
    decided.require_decided("here")
    assert mapped(decided)[slot] == both[1]


def test_exact_names_go_before_other_names() -> None:
    assert mapped(texts("question", "prompt", "completion", "answer")) == {
        "prompt": "prompt",
        "completion": "completion",
    }


def test_who_speaks_and_with_which_tools() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    found = kind({"messages": [*TALK, call, {"role": "tool", "content": "1"}]})
    assert (found.roles, found.tools) == (("user", "assistant", "tool"), True)
    assert str(found) == "OpenAI messages, roles user, assistant, tool, with tools"
    shared = kind({"conversations": SHARED})
    assert shared.roles == ("human", "gpt")
    assert str(shared) == "ShareGPT conversations, roles human, gpt"
    assert kind({"messages": TALK}).tools is False
    assert kind({"messages": TALK, "tools": json.dumps([{"type": "function"}])}).tools is True


def test_one_row_of_json_is_no_column_of_conversations() -> None:
    found = kind(
        {"instruction": "a", "input": json.dumps([{"role": "x"}]), "output": "b"},
        {"instruction": "a", "input": "plain", "output": "b"},
    )
    assert mapped(found)["input"] == "input"


@pytest.mark.parametrize(
    ("decided", "message"),
    [
        ({"kind": "alpca"}, "kind: 'alpca' is not a kind of rows"),
        ({"columns": {"prompt": "promt"}}, "columns.prompt: no column 'promt'"),
        ({"columns": {"prompt": "a", "instruction": "b"}}, "columns: no kind of rows has"),
    ],
)
def test_decisions_that_name_nothing(decided: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        texts("a", "b", "prompt", **decided)


@given(
    st.lists(
        st.sampled_from(
            [
                "text",
                "prompt",
                "question",
                "answer",
                "Answer",
                "output",
                "promt",
                "prompt_2",
                "id",
                "body",
                "ü",
            ]
        ),
        unique=True,
        min_size=1,
    )
)
@examples(60)
def test_every_column_is_used_once_and_order_decides_nothing(names: list[str]) -> None:
    found = texts(*names)
    used = [choice.column for choice in found.choices]
    assert len(set(used)) == len(used)
    assert not {column for tie in found.ties for column in tie.columns} & set(used)
    back = texts(*reversed(names))
    assert (back.name, mapped(back)) == (found.name, mapped(found))
    if found.name != "unknown":
        required = {slot.name for slot in SLOTS[found.name] if slot.required}
        assert required <= set(mapped(found)) | {tie.slot for tie in found.ties}


def test_every_other_name_that_the_docs_list_is_known() -> None:
    """An exact name or one that is merely alike would give other reasons."""
    told: dict[tuple[str, str], list[str]] = {}
    for line in (ROOT / "docs" / "discover.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 3 or not (slot := re.fullmatch("`(\\w+)`", cells[1])):
            continue
        for name, slots in SLOTS.items():
            has = slot[1] in [one.name for one in slots]
            if has and (TITLES[name] in cells[0].split(", ") or cells[0].startswith("all ")):
                told[name, slot[1]] = re.findall("`([^`]+)`", cells[2])
    assert told == {
        (name, slot.name): [*slot.aliases]
        for name, slots in SLOTS.items()
        for slot in slots
        if slot.aliases
    }
    for (name, slot), aliases in told.items():
        talks = {"messages": TALK, "sharegpt": SHARED, "prompts": TALK}.get(name, "a")
        values = {"input_ids": [1], "label": True, "tools": [{"name": "f"}]}
        for alias in aliases:
            row = {
                alias if one.name == slot else one.name: values.get(one.name, talks)
                for one in SLOTS[name]
                if one.required or one.name == slot
            }
            [found] = [one for one in kind(row, kind=name).choices if one.slot == slot]
            how = "exact" if alias == slot else "alias"
            assert (found.column, found.how) == (alias, how), (name, slot)


def test_words_that_make_a_column_something_else() -> None:
    page = (ROOT / "docs" / "discover.md").read_text(encoding="utf-8")
    words = re.findall(r"`(\w+)`", page.partition("one of its words is")[2].partition(":")[0])
    assert len(words) == 12
    assert texts("prompt_word", "answer").column("prompt") == "prompt_word"
    for word in words:
        assert texts(f"prompt_{word}", "answer").column("prompt") is None, word


def test_spellings_of_one_name() -> None:
    assert {
        plain(name) for name in ("userPrompt", "user-prompt", "User_Prompt", " user prompt ")
    } == {"user prompt"}


def test_types_that_cannot_be_it() -> None:
    schema = pa.schema(
        [("text", pa.int64()), ("body", pa.large_string()), ("input_ids", pa.large_string())]
    )
    assert mapped(guess_kind(schema)) == {"text": "body"}


@pytest.mark.parametrize(("other", "tied"), [("passages", True), ("textt", False)])
def test_names_that_are_nearly_as_alike_are_for_the_user_to_choose_among(
    other: str, tied: bool
) -> None:
    found = texts("documents", other, kind="text")
    assert [set(tie.columns) for tie in found.ties] == ([{"documents", other}] if tied else [])
    assert found.column("text") == (None if tied else "documents")
