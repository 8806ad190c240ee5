"""Never a wrong mask: conversations of every shape through every template that there is, against
what was said by whom.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_support import CHATML, MARKED, REASONING, SHARED, needs_shared
from easypipe.transforms.chat import aligned
from easypipe.transforms.chat.render import ChatTemplate, Refused
from easypipe.transforms.chat.sandbox import Template, as_given
from easypipe.transforms.chat.spans import Rendered, Spans, UnprovenError
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES
from easypipe.transforms.tokenizer.masked import TRAINED_END
from strategies import examples

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CLOSERS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<start_of_turn>",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}
# In the manner of templates in use that the shared ones are not like.
STOCK = {
    "llama2": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = "
        "messages[1:] %}"
        "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must "
        "alternate') }}{% endif %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + ('<<SYS>>\n' + system + "
        "'\n<</SYS>>\n\n' if loop.first and system else '') "
        "+ m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token "
        "}}{% endif %}{% endfor %}"
    ),
    "vicuna": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}{% "
        "elif m.role == 'user' %}"
        "{{ 'USER: ' + m.content + ' ' }}{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% "
        "endif %}{% endfor %}"
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{% endfor "
        "%}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + "
        "'\n\n' }}"
        "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}"
        "{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}"
    ),
    "command": (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|><|' + m.role|upper + '|>' + "
        "m.content.strip() + '<|im_end|>' }}{% endfor %}"
    ),
    "no stop": "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
    "twice": "{% for m in messages %}{{ '<|im_start|>' + m.content + m.content + '<|im_end|>' }}{% "
    "endfor %}",
    "last first": "{% for m in messages|reverse %}{{ '<|im_start|>' + m.content + '<|im_end|>' "
    "}}{% endfor %}",
}
TEMPLATES = {"ChatML": CHATML, "marked": MARKED, "reasoning": REASONING, **CHAT_TEMPLATES, **STOCK}


def words(mark: str) -> st.SearchStrategy[str]:
    """Text of which every word says whose it is."""
    pieces = st.sampled_from(
        [f"{mark}one", f"{mark}two", f" {mark}three ", f"\n{mark}four\n", f"{mark}\n\n{mark}"]
    )
    return st.lists(pieces, min_size=1, max_size=3).map(" ".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(words("S"))})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(words("U"))})
        if draw(st.integers(0, 4)) == 0:
            call = {
                "type": "function",
                "id": "call00001",
                "function": {
                    "name": "f",
                    "arguments": {"x": draw(st.sampled_from(["Aarg", 1, None]))},
                },
            }
            messages.append(
                {
                    "role": "assistant",
                    "content": draw(st.sampled_from([None, "", "Acall"])),
                    "tool_calls": [call],
                }
            )
            messages.append(
                {
                    "role": "tool",
                    "name": "f",
                    "tool_call_id": "call00001",
                    "content": draw(words("T")),
                }
            )
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": draw(st.one_of(words("A"), st.just(""))),
        }
        if draw(st.integers(0, 4)) == 0:
            answer["reasoning_content"] = draw(words("A"))
        if draw(st.integers(0, 3)) == 0:
            answer |= {"name": None, "tool_calls": None}
        if draw(st.integers(0, 4)) == 0:
            answer["train"] = draw(st.booleans())
        messages.append(answer)
    if draw(st.integers(0, 3)) == 0:
        messages.append({"role": "user", "content": draw(words("U"))})
    return messages


def check(
    name: str, source: str, messages: list[dict[str, Any]], tools: Any, train_on: str
) -> bool:
    """Whether it was rendered; if so, nothing but the assistant's words is trained, and all of
    those that were asked for.
    """
    template = ChatTemplate(
        source=source,
        tool_use=None,
        names=NAMES,
        closers=CLOSERS,
        train_on=train_on,
        date="2026-01-31",
        origin=name,
    )
    (found,) = template.render([{"messages": messages, "tools": tools}])
    if isinstance(found, Refused):
        assert found.reason in ("refused_by_template", "unproven_spans", "nothing_to_train"), (
            name,
            found,
        )
        return False
    assert isinstance(found, Rendered)
    trained = [found.text[a:b] for a, b in found.spans]
    # the stop is trained with each turn, or the EOS that the tokenizer adds is
    for i, part in enumerate(trained):
        assert part.rstrip().endswith(CLOSERS) or (
            i == len(trained) - 1 and found.end == TRAINED_END
        ), (name, part)
    masked = "".join(
        found.text[b:a]
        for (_, b), (a, _) in zip(
            [(0, 0), *found.spans], [*found.spans, (len(found.text), 0)], strict=True
        )
    )
    assert not any(
        f"{mark}{word}" in part
        for part in trained
        for mark in "SUT"
        for word in ("one", "two", "three", "four")
    ), (
        name,
        trained,
    )
    turns = [message for message in messages if message["role"] == "assistant"]
    default = {
        "assistant": turns,
        "last_assistant": turns[-1:],
        "completion": turns[-1:] if messages[-1] is turns[-1] else [],
    }[train_on]
    flagged = [
        turn
        for turn in turns
        if (turn["train"] if turn.get("train") is not None else any(turn is one for one in default))
    ]
    left = [turn for turn in turns if not any(turn is one for one in flagged)]
    if len(flagged) == len(turns):
        assert not any(
            f"A{word}" in masked for word in ("one", "two", "three", "four", "arg", "call")
        ), (name, masked)
    said = [turn["content"].strip() for turn in flagged if (turn["content"] or "").strip()]
    # some templates leave out what is said beside a tool call
    wanted = [text for text in said if text in found.text]
    for text in wanted:
        assert any(text in part for part in trained), (name, text, trained)
    assert len(trained) >= len(wanted) or "{% generation" in source.replace("{%-", "{%"), (
        name,
        trained,
    )
    if not left:
        return True
    if not flagged:
        raise AssertionError((name, "nothing was asked for", trained))
    for turn in left:
        text = (turn["content"] or "").strip()
        if text and not any(
            text in (other["content"] or "") or text in (other.get("reasoning_content") or "")
            for other in flagged
        ):
            assert not any(text in part for part in trained), (name, text, trained)
    return True


@examples(60)
@given(
    st.sampled_from(sorted(TEMPLATES)),
    conversations(),
    st.sampled_from(["assistant", "last_assistant", "completion"]),
    st.booleans(),
)
def test_never_a_wrong_mask(
    name: str, messages: list[dict[str, Any]], train_on: str, with_tools: bool
) -> None:
    check(name, TEMPLATES[name], messages, [TOOL] if with_tools else None, train_on)


@needs_shared
@pytest.mark.shared
@examples(60)
@given(st.data())
def test_never_a_wrong_mask_with_the_shared_templates(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted((SHARED / "templates").glob("*.jinja"))))
    train_on = data.draw(st.sampled_from(["assistant", "last_assistant", "completion"]))
    tools = [TOOL] if data.draw(st.booleans()) else None
    check(path.stem, path.read_text(encoding="utf-8"), data.draw(conversations()), tools, train_on)


@pytest.mark.parametrize("name", TEMPLATES)
def test_plain_conversations_are_proven_on_stock_templates(name: str) -> None:
    messages = [
        {"role": "system", "content": "Sone"},
        {"role": "user", "content": "Uone"},
        {"role": "assistant", "content": "Aone"},
        {"role": "user", "content": "Utwo"},
        {"role": "assistant", "content": "Atwo"},
    ]
    assert check(name, TEMPLATES[name], messages, None, "assistant") == (
        name not in ("no stop", "twice", "last first")
    )


def test_turns_that_would_overlap_are_refused(monkeypatch):
    """Whatever the end of a turn is found to be, no token is trained for two of them."""
    monkeypatch.setattr(
        aligned.Aligned, "_plain_end", lambda self, gap, *more, **how: len(gap) + 100
    )
    messages = [
        {"role": role, "content": text}
        for role, text in (
            ("user", "one"),
            ("assistant", "two"),
            ("user", "three"),
            ("assistant", "four"),
        )
    ]
    with pytest.raises(UnprovenError, match="trained turns overlap"):
        Spans(Template(CHATML, NAMES), CLOSERS).find(messages, None, "assistant")


def test_a_block_that_writes_nothing_is_no_span() -> None:
    block = "{{% generation %}}{}{{% endgeneration %}}"
    template = Template(f"a{block.format('')}b{block.format('c')}", NAMES)
    assert template.write({}) == ("abc", [(2, 3)])


@pytest.mark.parametrize(
    ("printed", "whole"), [("m.tool_calls[:1]", False), ("m.tool_calls", True)]
)
def test_every_call_of_an_answer_is_printed(printed: str, whole: bool) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        f"{{% for call in {printed} %}}{{{{ call.function.name }}}} {{% endfor %}}{{% endif %}}"
        "<|im_end|>\n{% endfor %}"
    )
    calls = [{"type": "function", "function": {"name": one, "arguments": {}}} for one in ("f", "g")]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    refused = pytest.raises(UnprovenError, match="does not print the tool calls of message 1")
    with contextlib.nullcontext() if whole else refused:
        Spans(Template(source, NAMES), CLOSERS).find(messages, None, "assistant")


def test_reasoning_is_read_by_every_name() -> None:
    """Templates ask for `reasoning_content` or `thinking`; data name it in a third way too."""
    names = ("reasoning_content", "thinking", "reasoning")
    for i, name in enumerate(names):
        message = {"role": "assistant", "content": "A", **{later: later for later in names[i:]}}
        [given] = as_given([message])
        assert given == {"thinking": name, **message, "reasoning_content": name}
