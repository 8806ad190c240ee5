"""What is trained of conversations of every shape: their text as each template writes it, trained
parts between «».
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from easypipe.transforms.chat.sandbox import RenderError, Template
from easypipe.transforms.chat.spans import Spans, UnprovenError
from golden.cases import golden
from transforms.test_spans import CLOSERS, NAMES, TEMPLATES, TOOL


def _said(words: str) -> list[dict[str, Any]]:
    """One message a letter: "sua" is a system prompt, a question and an answer."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[word], "content": f"{word}{i}"} for i, word in enumerate(words)]


def _with(words: str, at: int, **changes: Any) -> list[dict[str, Any]]:
    messages = _said(words)
    messages[at] |= changes
    return messages


CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    **{words: _said(words) for words in ("suaua", "aua", "uaa", "uuaau", "ssua", "s")},
    "an empty answer": _with("uaua", 1, content=""),
    "the last answer is empty": _with("uaua", 3, content=""),
    "spaces around an answer": _with("uaua", 1, content="  a \n"),
    "an answer that is said before": _with("uaua", 3, content="u0"),
    "an answer like its end": _with("ua", 1, content="a<|im_end|>"),
    "a thought": _with("uaua", 3, reasoning_content="r"),
    "an empty thought": _with("ua", 1, content="<think>\n\n</think>\n\na"),
    "a turn that is not trained": _with("uaua", 1, train=False),
    "a question that is trained": _with("uaua", 2, train=True),
    "a weight of nothing": _with("uaua", 3, weight=0),
    "a call": _with("uatua", 1, tool_calls=[CALL]),
    "a call without words": _with("uata", 1, tool_calls=[CALL], content=None),
    "a call first": _with("atua", 0, tool_calls=[CALL], content=None),
    "two calls": _with("uatta", 1, tool_calls=[CALL, CALL | {"id": "c2"}]),
    "names of nothing": _with("ua", 1, name=None, tool_calls=None),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "last_assistant": {"train_on": "last_assistant"},
    "completion": {"train_on": "completion"},
    "all": {"train_on": "all"},
    "one answer": {"answers": 1},
    "one answer alone": {"answers": 1, "train_on": "completion"},
    "ends: last": {"ends": "last"},
    "ends: none": {"ends": "none"},
    "no empty thoughts": {"empty_thoughts": False},
}
TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WRITTEN = {**TEMPLATES, "tools": TOOLS}
WITH_OPTIONS = ("suaua", "aua", "uaa", "an empty thought", "a turn that is not trained")


def marked(source: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The text with its trained parts between «», and how its end is trained; or the refusal."""
    given = {"train_on": "assistant", "answers": None} | options
    train_on, answers = given.pop("train_on"), given.pop("answers")
    spans = Spans(Template(source, NAMES, "2026-01-31"), CLOSERS, **given)
    tools = [TOOL] if any(message.get("tool_calls") for message in messages) else None
    try:
        found = spans.find(messages, tools, train_on, answers)
    except RenderError:  # Python's and Jinja's words differ from version to version
        return "refused by the template"
    except UnprovenError as error:
        return f"unproven: {error}"
    text = found.text
    for start, stop in reversed(found.spans):
        text = f"{text[:start]}«{text[start:stop]}»{text[stop:]}"
    return f"{text} end {found.end}"


@golden(*WRITTEN)
def what_is_trained(folder: Path, name: str) -> Any:
    """By the shape of a conversation; of options, what differs from what holds without them."""
    found: dict[str, dict[str, str]] = {}
    for shape, messages in CONVERSATIONS.items():
        say = functools.partial(marked, WRITTEN[name], messages)
        usual = say({})
        found[shape] = {"": usual}
        for option, options in OPTIONS.items() if shape in WITH_OPTIONS else ():
            if (said := say(options)) != usual:
                found[shape][option] = said
    return found
