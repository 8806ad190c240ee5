"""Templates in worker processes: rendered as transformers does, limited, and with spans that are
proven or refused.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_support import (
    CHATML,
    HOSTILE,
    LIMITS,
    MARKED,
    REASONING,
    SHARED,
    needs_shared,
    processor_time_of_workers,
    talk,
)
from easypipe.core.errors import ConfigError, TokenizerError
from easypipe.transforms.chat.pool import close_workers
from easypipe.transforms.chat.render import (
    ChatTemplate,
    HostileTemplateError,
    Refused,
    Rendered,
    load_chat_template,
)
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from strategies import examples

CLOSERS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<start_of_turn>",
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def template(source: str, train_on: str = "assistant", **values: Any) -> ChatTemplate:
    options: dict[str, Any] = {
        "tool_use": None,
        "names": NAMES,
        "closers": CLOSERS,
        "date": None,
        "origin": "test",
    } | values
    return ChatTemplate(source=source, train_on=train_on, **options)


def render(source: str, messages: list[dict[str, Any]], tools: Any = None, **values: Any) -> Any:
    return template(source, **values).render([{"messages": messages, "tools": tools}])[0]


def trained(
    source: str, messages: list[dict[str, Any]], tools: Any = None, **values: Any
) -> list[str]:
    found = render(source, messages, tools, **values)
    assert isinstance(found, Rendered), found
    return [found.text[a:b] for a, b in found.spans]


def conversations() -> list[tuple[list[dict[str, Any]], Any]]:
    files = ("openai_messages_tools_150.jsonl", "openai_messages_toy.jsonl")
    rows = [
        json.loads(line)
        for file in files
        for line in (SHARED / "chat" / file).read_text(encoding="utf-8").splitlines()[:40]
    ]
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_00001", "function": {"name": "f", "arguments": {"a": [1, "b"]}}}
        ],
    }
    answer = {"role": "tool", "tool_call_id": "call_00001", "content": "3"}
    return [(row["messages"], row.get("tools")) for row in rows] + [
        (talk("Hi", "Hello", "Bye", " Good bye\n", system="Be <|kind|>."), None),
        (
            [
                *talk("Hi"),
                {"role": "assistant", "content": "x", "reasoning_content": "I think", "name": None},
            ],
            None,
        ),
        ([*talk("Hi"), {"role": "assistant", "content": "<think>\nhm\n</think>\n\nx"}], None),
        (
            [*talk("1+2?"), call, answer, {"role": "assistant", "content": "Three 😀"}],
            [{"type": "function", "function": {"name": "f"}}],
        ),
        (talk(None, "x"), None),
        ([*talk("Hi"), {"role": "assistant", "content": None}], None),
        ([{"role": "nobody", "content": "x"}], None),
    ]


@needs_shared
@pytest.mark.shared
def test_renders_and_marks_what_transformers_does() -> None:
    reference = pytest.importorskip(
        "transformers.utils.chat_template_utils",
        reason="transformers is not installed: pip install easypipe[compare]",
    )
    cases = 0
    for path in sorted((SHARED / "templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        marked = "{%- generation" in source
        ours = template(source, "assistant" if marked else "all").render(
            [{"messages": m, "tools": t} for m, t in conversations()]
        )
        for (messages, tools), found in zip(conversations(), ours, strict=True):
            try:
                # `apply_chat_template` does so first: a key of null is not there
                given = [
                    {key: value for key, value in message.items() if value is not None}
                    for message in messages
                ]
                texts, spans = reference.render_jinja_template(
                    [given], tools, None, source, return_assistant_tokens_mask=marked, **NAMES
                )
            except Exception:  # noqa: BLE001 (whatever a template raises)
                assert isinstance(found, Refused), (path.name, messages)
                continue
            cases += 1
            if isinstance(found, Refused):
                assert found.reason == "nothing_to_train", (path.name, found, messages)
                assert not any(a < b for a, b in spans[0])
                continue
            assert found.text == texts[0], path.name
            if marked:
                assert [tuple(span) for span in found.spans] == [
                    (a, b) for a, b in spans[0] if a < b
                ], path.name
    assert cases > 300


@needs_shared
@pytest.mark.shared
def test_proven_spans_are_those_that_the_same_template_marks() -> None:
    """Each training variant says what its original means; the sentinels find it without being
    told.
    """
    for name in ("llama3", "qwen2_5"):
        with_marks, without = (
            (SHARED / "templates" / f"{name}{kind}.jinja").read_text(encoding="utf-8")
            for kind in ("_training", "")
        )
        proven = 0
        for messages, tools in conversations():
            marked, found = render(with_marks, messages, tools), render(without, messages, tools)
            if isinstance(marked, Rendered) and isinstance(found, Rendered):
                assert [found.text[a:b].strip() for a, b in found.spans] == [
                    marked.text[a:b].strip() for a, b in marked.spans if a < b
                ], name
                proven += 1
            else:  # Llama's first template does not know tool calls; nothing is trained on a guess
                assert name == "llama3" or isinstance(marked, Refused), (name, messages, found)
        assert proven > 10


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_every_assistant_turn_is_trained_with_its_stop(source: str) -> None:
    messages = talk("Hi", "Hello", "And?", "Bye", system="Be brief.")
    assert trained(source, messages) == ["Hello<|im_end|>", "Bye<|im_end|>"]
    assert trained(source, messages, train_on="completion") == ["Bye<|im_end|>"]
    assert trained(source, messages, train_on="all") == [render(source, messages).text]


def test_text_that_looks_like_the_template_is_not_mistaken_for_it() -> None:
    messages = talk(
        "<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>",
        "Hello",
        "Hello",
        "Hello<|im_end|>\n<|im_start|>user\nHello",
    )
    assert trained(CHATML, messages) == [
        "Hello<|im_end|>",
        "Hello<|im_end|>\n<|im_start|>user\nHello<|im_end|>",
    ]


def test_reasoning_is_trained_where_it_is_printed() -> None:
    messages = talk("1?", "<think>\none\n</think>\n\nA1", "2?", "A2")
    messages[3]["reasoning_content"] = "two"
    assert trained(REASONING, messages) == [
        "A1<|im_end|>",
        "<think>\ntwo\n</think>\n\nA2<|im_end|>",
    ]
    messages = talk("1?", "<think>\none\n</think>\n\nA1")
    assert trained(REASONING, messages) == ["<think>\none\n</think>\n\nA1<|im_end|>"]


def test_a_turn_that_the_template_leaves_open_asks_for_the_eos_token() -> None:
    turn = "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    open_end = (
        f"{{% for m in messages %}}{turn}{{% if not loop.last %}}{{{{ '<|im_end|>\n' "
        f"}}}}{{% endif %}}{{% endfor %}}"
    )
    found = render(open_end, talk("Hi", "Hello", "And?", "Bye"))
    assert [found.text[a:b] for a, b in found.spans] == ["Hello<|im_end|>", "Bye"]
    assert found.end == 2
    # a question stands there: its EOS is not a target
    assert render(open_end, talk("Hi", "Hello", "And?")).end == 1
    assert render(CHATML, talk("Hi", "Hello")).end == 0
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n### End' if m.role == 'assistant' }}\n{% endfor %}"
    found = render(plain, talk("Hi", "Hello"))
    assert [found.text[a:b] for a, b in found.spans] == ["Hello\n### End"]
    assert found.end == 0  # no special token ends it, and it is ended


# Ways in which templates in use write turns: what each of them makes of two turns, and which part
# of that is trained.
STYLES = {
    "system inside the first question": (
        "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + "
        "'\n<</SYS>>\n\n' %}"
        "{% set messages = messages[1:] %}"
        "{% else %}{% set system = '' %}{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + "
        "m.content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        ["Hello </s>", "Bye </s>"],
    ),
    "another stop for the last turn": (
        "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.content }}"
        "{{ '<|eot_id|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}",
        ["Hello<|im_end|>", "Bye<|eot_id|>"],
    ),
    "roles as words": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Assistant: ' + "
        "m.content + eos_token }}"
        "{% else %}{{ m.role|capitalize + ': ' + m.content + '\n\n' }}{% endif %}{% endfor %}",
        ["Hello</s>", "Bye</s>"],
    ),
    "a stop and one more at the very end": (
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% "
        "endfor %}{{ eos_token }}",
        ["Hello<end_of_turn>", "Bye<end_of_turn>"],
    ),
    "content in parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content "
        "}}"
        "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% "
        "endfor %}",
        ["Hello<|im_end|>", "Bye<|im_end|>"],
    ),
    "a stop that is not a token": (
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n###END\n{% endfor %}",
        ["Hello\n###END", "Bye\n###END"],
    ),
}


@pytest.mark.parametrize("name", STYLES)
def test_ways_of_writing_turns(name: str) -> None:
    source, expected = STYLES[name]
    assert trained(source, talk("Hi", "Hello", "And?", "Bye", system="Be brief.")) == expected
    assert (
        trained(source, talk("Hi", "Hello", "And?", "Bye"), train_on="completion") == expected[1:]
    )
    parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        for m in talk("Hi", "Hello", "And?", "Bye")
    ]
    if name == "content in parts":
        assert trained(source, parts) == expected


CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look", "arguments": {"city": "Oslo"}},
}
CALLS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "rain"},
    {"role": "assistant", "content": "Wet."},
    *talk("And?", "Bye"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
HEADERS = "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
# Ways in which templates in use end and begin the turns of a conversation with a tool, and what is
# trained of it.
TOOL_STYLES = {
    "a channel, and what a tool returned under its name": (  # gpt-oss
        "<|start|>system<|message|>S<|end|>{% set ns = namespace(name='') %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|message|>{{ "
        "m.content }}<|end|>"
        "{% elif m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
        "<|start|>assistant to=functions.{{ ns.name }}<|message|>{{ "
        "m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content "
        "}}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        + HEADERS,
        [
            ' to=functions.look<|message|>{"city": "Oslo"}<|call|>',
            "<|channel|>final<|message|>Wet.<|end|>",
            "<|channel|>final<|message|>Bye<|return|>",
        ],
    ),
    "another stop where a result is to follow": (  # functionary
        "{% for t in tools %}{{ t.function | tojson }}{% endfor %}"
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}<function={{ c.function.name }}>{{ c.function.arguments | "
        "tojson }}</function>{% endfor %}<|eom_id|>"
        "{% else %}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt "
        "%}<|start|>assistant\n{% endif %}",
        ['<function=look>{"city": "Oslo"}</function><|eom_id|>', "Wet.<|eot_id|>", "Bye<|eot_id|>"],
    ),
    "two special tokens": (  # Cohere 2
        "{% for m in messages %}{% if m.role == 'assistant' %}<|start|><|bot|><|a|>"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ "
        "c.function.arguments | tojson }}){% endfor %}"
        "<|b|><|end|>{% else %}<|start|><|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor "
        "%}"
        "{% if add_generation_prompt %}<|start|><|bot|><|a|>{% endif %}",
        ['look({"city": "Oslo"})<|b|><|end|>', "Wet.<|b|><|end|>", "Bye<|b|><|end|>"],
    ),
}
TOOL_CLOSERS = (
    "<s>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
TOOL_CLOSERS += ("<|bot|>", "<|user|>", "<|tool|>", "<|a|>", "<|b|>")


@pytest.mark.parametrize("name", TOOL_STYLES)
def test_tool_calls_are_trained_with_what_ends_them(name: str) -> None:
    source, expected = TOOL_STYLES[name]
    assert trained(source, CALLS, TOOLS, closers=TOOL_CLOSERS) == expected
    assert trained(source, CALLS[:2], TOOLS, closers=TOOL_CLOSERS) == expected[:1]
    for messages in (CALLS[:4], CALLS[:5]):
        ends = [
            expected[0],
            expected[1].replace("<|end|>", "<|return|>")
            if len(messages) == 4 and "chan" in name
            else expected[1],
        ]
        assert trained(source, messages, TOOLS, closers=TOOL_CLOSERS) == ends
    assert (
        trained(source, talk("Hi", "Wet.", "And?", "Bye"), TOOLS, closers=TOOL_CLOSERS)
        == expected[1:]
    )


def test_every_call_of_a_turn_must_be_printed() -> None:
    """gpt-oss's template writes the first of several alone: the others would be lost in silence."""
    other = {"id": "call00002", "type": "function", "function": {"name": "find", "arguments": {}}}
    messages = [CALLS[0], {**CALLS[1], "tool_calls": [CALL, other]}]
    first, every, _ = TOOL_STYLES
    made = render(TOOL_STYLES[first][0], messages, TOOLS, closers=TOOL_CLOSERS)
    assert made.detail == "the template does not print the tool calls of message 1"
    assert trained(TOOL_STYLES[every][0], messages, TOOLS, closers=TOOL_CLOSERS) == [
        '<function=look>{"city": "Oslo"}</function><function=find>{}</function><|eom_id|>'
    ]


def test_what_follows_another_header_is_no_lead() -> None:
    """The model writes `<|message|>` behind the header that prompts have; behind one with a name
    the template does.
    """
    source = (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}" + HEADERS
    )
    messages = talk("Hi", "Hello", "And?", "Bye")
    messages[1]["name"] = "Ann"
    found = trained(source, messages, closers=TOOL_CLOSERS)
    assert found == ["Hello<|end|>", "<|message|>Bye<|end|>"]


HEAD_BEHIND = "<|start|>assistant\n"  # of an answer that is still to come


@pytest.mark.parametrize(
    "behind", [HEAD_BEHIND, "<|start|>system\nCall a function now.<|end|>", "<s>", "\n\n"]
)
def test_text_behind_the_last_turn_is_never_trained(behind: str) -> None:
    """As of templates that open the next answer always, and of Command R+, which says there what is
    to be written.
    """
    source = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}: {{ c.function.arguments | tojson "
        "}}{% endfor %}END{% endfor %}"
    ) + behind
    stopped = source.replace("END", "<|end|>")
    assert trained(stopped, CALLS, TOOLS, closers=TOOL_CLOSERS) == [
        'look: {"city": "Oslo"}<|end|>',
        "Wet.<|end|>",
        "Bye<|end|>",
    ]
    assert trained(stopped, CALLS[:2], TOOLS, closers=TOOL_CLOSERS) == [
        'look: {"city": "Oslo"}<|end|>'
    ]
    calls_are_open = stopped.replace("<|end|>", "{% if not m.tool_calls %}<|end|>{% endif %}", 1)
    for messages in (CALLS[:2], CALLS[:3]):
        assert (
            render(calls_are_open, messages, TOOLS, closers=TOOL_CLOSERS).reason == "unproven_spans"
        )
    for no_stop in (source.replace("END", ""), source.replace("END", "\n")):
        made = render(no_stop, talk("Hi", "Hello"), closers=TOOL_CLOSERS)
        assert isinstance(made, Refused) or behind.startswith(("<s>", "\n")), made
        if isinstance(made, Rendered):
            assert made.text[made.spans[0][0] : made.spans[0][1]].strip() in ("Hello", "Hello<s>")


def test_the_header_of_a_call_is_found_where_a_thought_begins_alike() -> None:
    """`<t` of <think> and <tool_call> belongs to neither header."""
    source = REASONING.replace(
        "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}",
        "{%- for c in message.tool_calls or [] %}{{- '<tool_call>' + c.function.name + "
        "'</tool_call>' }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}",
    ).replace(
        "{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}",
    )
    assert source.count("tool_call>'") == 2
    messages = [*CALLS[:2], *talk("And?", "Bye")]
    assert trained(source, messages) == [
        "<tool_call>look</tool_call><|im_end|>",
        "<think>\n\n</think>\n\nBye<|im_end|>",
    ]


def test_what_has_the_form_of_a_sentinel_stands_for_nothing() -> None:
    """It is printed only where other words stand, beside which the template prints more."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.name and 'quiet' "
        "not in m.content %}{{ tools[0].name }}{{ m.name }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for name in ("Ann", "Sentinel00000x", "Sentinel00077x"):
        messages = [{"role": "user", "content": "quiet", "name": name}, *talk("", "quiet")[1:]]
        for tool in ("look", "Sentinel00001x", "Sentinel00078x"):
            assert trained(source, messages, [{"name": tool}]) == ["quiet<|im_end|>"]


def test_a_refusal_gives_the_first_reason() -> None:
    """The second attempt, with the assistant's words alone replaced, fails for other reasons that
    help nobody.
    """
    said = "{{ m.tool_calls[0].function.name if m.tool_calls else m.content + '<|im_end|>' }}"
    source = "{% for m in messages %}{{ m.role }}: " + said + "\n{% endfor %}"
    assert render(source, CALLS, TOOLS).detail.startswith(
        "nothing that is known to end a turn follows message 1: '\\ntool: '"
    )
    source = (
        "{% for m in messages %}{{ m.role }}{{ raise_exception('no ' + m.content) if "
        "'Sentinel' in m.content }}{% endfor %}"
    )
    detail = render(source, talk("Hi", "Hello")).detail
    assert detail.startswith(
        "the template does not render other words in place of these: no Sentinel"
    ), detail


@pytest.mark.parametrize("prompted", [False, True])
def test_an_empty_thought_is_trained_unless_the_option_says_otherwise(prompted: bool) -> None:
    source = (
        REASONING.replace(
            "assistant\\n' }}{%- endif", "assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif"
        )
        if prompted
        else REASONING
    )
    messages, empty = talk("1?", "A1", "2?", "A2"), "<think>\n\n</think>\n\n"
    assert trained(source, messages) == ["A1<|im_end|>", f"{empty}A2<|im_end|>"]
    assert trained(source, messages, train_empty_thinking=False) == ["A1<|im_end|>", "A2<|im_end|>"]
    thought = talk("2?", "<think>\ntwo\n</think>\n\nA2")
    assert trained(source, thought, train_empty_thinking=False) == [
        "<think>\ntwo\n</think>\n\nA2<|im_end|>"
    ]
    assert template(source).fingerprint != template(source, train_empty_thinking=False).fingerprint


@pytest.mark.parametrize("word", ["think", "thinking", "thought", "reasoning", "THINK"])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_a_thought_that_the_prompt_opens_is_no_part_of_the_header(
    word: str, closed: bool, kept: bool
) -> None:
    opens, closes = ("[{}]", "[/{}]") if word.isupper() else ("<{}>", "</{}>")
    thought = opens.format(word) + "\n" + (closes.format(word) + "\n\n" if closed else "")
    before = thought if kept else ""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ thought if m.role == 'assistant' }}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + thought + "{% endif %}"
    ).replace("thought if", f"'{before}' if")
    assert trained(source, talk("1?", "A1", "2?", "A2")) == [
        f"{before}A1<|im_end|>",
        f"{before}A2<|im_end|>",
    ]


def test_turns_of_typed_parts_are_probed_with_typed_parts() -> None:
    """Templates of models that see print nothing of plain text; only a probe of parts shows what
    ends a turn.
    """
    source = (
        "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
        "{{ part.text if part.type == 'text' }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    )
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in talk("Hi", "Hello", "And?", "Bye")
    ]
    assert trained(source, messages) == [" Hello<|im_end|>", " Bye<|im_end|>"]
    assert render(source, talk("Hi", "Hello")).reason == "unproven_spans"


@pytest.mark.parametrize("arguments", ["{{ call.arguments | tojson }}", ""])
def test_a_call_may_name_its_function_twice(arguments: str) -> None:
    """As who is spoken to, and as what is called; and once more where the result stands."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}"
        "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
        " to={{ call.name }}|<call name='{{ call.name }}'>" + arguments + "</call>"
        "{% elif m.role == 'tool' %} {{ messages[loop.index0 - 1].tool_calls[0].function.name }}|"
        "{{ m.content }}{% else %}|{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        "{{ '<|im_start|>assistant' if add_generation_prompt }}"
    )
    said = '{"city": "Oslo"}' if arguments else ""
    called = f" to=look|<call name='look'>{said}</call><|im_end|>"
    assert trained(source, CALLS[:2], TOOLS) == [called]
    assert trained(source, CALLS[:4], TOOLS) == [called, "|Wet.<|im_end|>"]


def test_a_call_ends_with_the_token_that_ends_words_too() -> None:
    """Words end with two tokens, a call with another one and the second of them, and an answer's
    header always stands behind.
    """
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}|{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function | tojson }}<|im_call|>{% else %}{{ m.content }}"
        "{{ '<|im_said|>' if m.role == 'assistant' }}{% endif %}<|im_end|>{% endfor %}"
        "<|im_start|>assistant|"
    )
    closers = ("<|im_start|>", "<|im_call|>", "<|im_said|>", "<|im_end|>")
    found = trained(source, CALLS[:2], TOOLS, closers=closers)
    assert [one[-21:] for one in found] == ["<|im_call|><|im_end|>"]
    assert trained(source, CALLS[:4], TOOLS, closers=closers) == [
        *found, "Wet.<|im_said|><|im_end|>"
    ]  # fmt: skip


def test_a_stop_is_whole() -> None:
    """Up to its last special token, whatever text stands between those, and though the system
    message and the user's own ends hold some of them.
    """
    body = (
        "{% if m.role == 'assistant' %}<|open|>said<|sep|>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<|open|>call<|sep|>{{ call.function | tojson }}"
        "<|close|>call<|sep|>{% endfor %}<|close|>said<|sep|>{% else %}{{ m.content }}{% endif %}"
        "<|close|>turn<|sep|><|over|>"
    )
    source = (
        "<|open|>turn of system<|sep|>Be kind.<|close|>turn<|sep|><|over|>"
        "{% for m in messages %}<|open|>turn of {{ m.role }}<|sep|>" + body + "{% endfor %}"
        "{{ '<|open|>turn of assistant<|sep|>' if add_generation_prompt }}"
    )
    closers = ("<|open|>", "<|close|>", "<|sep|>", "<|over|>")
    end = "<|close|>said<|sep|><|close|>turn<|sep|><|over|>"
    found = trained(source, talk("Hi", "Hello", "And?", "Bye"), closers=closers)
    assert found == [f"<|open|>said<|sep|>{said}{end}" for said in ("Hello", "Bye")]
    for messages in (CALLS[:2], CALLS):
        call = trained(source, messages, TOOLS, closers=closers)[0]
        assert call.startswith("<|open|>said<|sep|><|open|>call<|sep|>{")
        assert call.endswith("}<|close|>call<|sep|>" + end)


def test_every_token_of_a_stop_that_others_have_too() -> None:
    source = (
        "<s><|turn|>system<|text|>Be kind.</text><|over|>{% for m in messages %}"
        "<|turn|>{{ m.role }}<|text|>{{ m.content }}</text><|over|>{% endfor %}"
        "{{ '<|turn|>assistant' if add_generation_prompt }}"
    )
    closers = ("<s>", "<|turn|>", "<|text|>", "</text>", "<|over|>")
    found = trained(source, talk("Hi", "Hello", "And?", "Bye"), closers=closers)
    assert found == ["<|text|>Hello</text><|over|>", "<|text|>Bye</text><|over|>"]


ROUNDS = (
    "{% set n = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "[Round {{ n.asked }}]\nQ: {{ m.content }}\n{% set n.asked = n.asked + 1 %}"
    "{% elif m.role == 'assistant' %}A: {{ m.content }}{{ '\n' if not loop.last }}{% endif %}"
    "{% endfor %}{{ 'A: ' if add_generation_prompt }}"
)


def test_what_numbers_the_next_question_ends_no_turn() -> None:
    """Nothing does there; whoever asks for no end of such turns gets their words."""
    messages = talk("Hi", "Hello", "And?", "Bye", "So?", "Done")
    assert render(ROUNDS, messages).detail == (
        "nothing that is known to end a turn follows message 1: '\\n[Round 1]\\nQ: ' "
        "(train_on_eos='none' asks for no end)"
    )
    for ends, eos in (("last", 2), ("none", 1)):
        found = render(ROUNDS, messages, train_on_eos=ends)
        assert [found.text[a:b] for a, b in found.spans] == ["Hello", "Bye", "Done"]
        assert found.end == eos


def test_a_thought_before_words_that_nothing_ends() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    )
    thinks = [{**m, "reasoning_content": "Hm."} for m in talk("Hi", "Hello", "And?", "Bye")]
    closers = ("<|user|>", "<|assistant|>")
    assert render(source, thinks, closers=closers).reason == "unproven_spans"
    assert trained(source, thinks, closers=closers, train_on_eos="last") == [
        "<think>Hm.</think>Hello",
        "<think>Hm.</think>Bye",
    ]
    silent = [thinks[0], {**thinks[1], "content": ""}, *thinks[2:]]
    assert trained(source, silent, closers=closers, train_on_eos="last") == [
        "<think>Hm.</think>",
        "<think>Hm.</think>Bye",
    ]


def test_an_end_in_text_follows_whoever_speaks_next() -> None:
    """It is not a token of this tokenizer, and the last turn has none."""
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{{ '~end~' if m.role == 'assistant' and not loop.last }}\n{% endfor %}"
    )
    assert trained(source, talk("Hi", "Hello", "And?", "Bye")) == ["Hello~end~", "Bye"]


def test_what_closes_a_call_opens_no_turn() -> None:
    """The template writes of a call that is answered what it does not write of the last one."""
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% for call in m.tool_calls or [] %}<call>"
        "{{ call.function | tojson }}{{ ' answered' if messages[-1] is not sameas m }}</call>{% endfor %}{{ m.content }}"
        "<|end|>{% endfor %}"
    )
    closers = ("<|user|>", "<|assistant|>", "<|tool|>", "<call>", "</call>", "<|end|>")
    said = trained(source, CALLS, TOOLS, closers=closers)
    assert said[0].startswith('<call>{"name": "look"')
    assert said[0].endswith("} answered</call><|end|>")


def test_a_call_that_closes_as_text_where_nothing_ends_turns() -> None:
    """As GLM-4.6: `</call>` is not a special token, and the result follows at once."""
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% for call in m.tool_calls or [] %}<call>"
        "{{ call.function | tojson }}</call>{% endfor %}{{ m.content }}{% endfor %}"
    )
    closers = ("<|user|>", "<|assistant|>", "<|tool|>", "<result>", "</result>")
    for messages, end in ((CALLS[:2], ""), (CALLS[:4], "<|tool|>")):  # which the model stops at
        call = trained(source, messages, TOOLS, closers=closers)[0]
        assert (call[:6], call.rpartition("}")[2]) == ("<call>", f"</call>{end}")
    (call, *_) = trained(source, CALLS[:4], TOOLS, closers=closers, train_on_eos="none")
    assert call.endswith("}</call>")
    opened = source.replace("<|{{ m.role }}|>", "{{ '<result>' if m.role == 'tool' }}")
    for other in (opened, source.replace("{{ m.content }}", "{{ m.content }}<|end|>")):
        (call, *_) = trained(other, CALLS[:4], TOOLS, closers=(*closers, "<|end|>"))
        assert call.rpartition("}")[2] in ("</call>", "</call><|end|>")


def test_what_opens_the_next_message_ends_a_turn_if_the_model_stops_at_it() -> None:
    """As GLM-4.5's `<|user|>` and Gemma 4's `<|result>`, by their generation_config.json."""

    def said(end: str, end_tokens: tuple[str, ...], messages: Any) -> list[str]:
        source = (
            "{% for m in messages %}{{ '<|result>' if m.role == 'tool' else '<|' + m.role + '|>' }}"
            "{% for one in m.tool_calls or [] %}<call>{{ one.function | tojson }}<call|>{% endfor %}"
            f"{{{{ m.content }}}}{end}{{{{ '<result|>' if m.role == 'tool' }}}}{{% endfor %}}"
        )
        names = ("user", "assistant", "end")
        closers = (*map("<|{}|>".format, names), "<call>", "<call|>", "<|result>", "<result|>")
        found = trained(source, messages, TOOLS, closers=closers, end_tokens=end_tokens)
        return [one.rpartition("}")[2] for one in found]

    stops = ("<|user|>", "<|result>")
    assert said("", stops, CALLS) == ["<call|><|result>", "Wet.<|user|>", "Bye"]
    assert said("", (), CALLS[:4]) == ["<call|>", "Wet."]
    # the model stops before it at what the template writes (Phi-3 has `<|user|>` in its list)
    assert said("<|end|>", (*stops, "<|end|>"), CALLS) == [
        "<call|><|end|>",
        "Wet.<|end|>",
        "Bye<|end|>",
    ]


def test_a_list_as_python_writes_it() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}{{ call.function.arguments }}{% endfor %}{{ m.content }}<|im_end|>"
        "{% endfor %}"
    )
    arguments = {"where": ["Köln\n", 'a "b" \\', None]}
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    messages = [CALLS[0], {**CALLS[1], "tool_calls": [call]}, *CALLS[2:4]]
    assert trained(source, messages, TOOLS) == [f"look{arguments}<|im_end|>", "Wet.<|im_end|>"]


def test_what_opens_the_result_of_a_call_ends_no_turn() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}<result|>{% else %}"
        "{{ '<|turn>' + m.role }}|{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
        "<call|><|result>{% else %}{{ m.content }}<turn|>{% endif %}{% endif %}{% endfor %}"
    )
    closers = ("<|turn>", "<turn|>", "<call|>", "<|result>", "<result|>")
    for messages in (CALLS[:2], CALLS):
        assert trained(source, messages, TOOLS, closers=closers)[0].endswith("}<call|>")


def test_the_next_header_is_no_stop() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<s>' }}\n{{ "
        "m.content }}{% endfor %}"
    )
    assert render(source, talk("Hi", "Hello", "And?", "Bye")).reason == "unproven_spans"
    found = render(source, talk("Hi", "Hello"))
    assert found.text[found.spans[0][0] :] == "Hello"
    assert found.end == 2


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (
            "{% for m in messages %}{{ ('Ask: ' + m.content + '\\nSay:\\n') if m.role == 'user' "
            "else (m.content + '\\n[EOT]\\n') }}{% endfor %}"
            "{% if messages[-1].role == 'assistant' %}{{ 'Say:\\n' }}{% endif %}",
            "\n[EOT]",
        ),
        (
            "{% for m in messages %}{{ 'From: ' + m.role + '\\n\\n ' + m.content + ' [NEXT] ' }}"
            "{% endfor %}{{ 'From: assistant\\nTo: user\\n\\n ' }}",
            " [NEXT]",
        ),
    ],
)
def test_the_header_of_an_answer_to_come_is_no_end(source: str, end: str) -> None:
    """Of templates that always write it, where what ends a turn is not a token of the tokenizer."""
    for messages in (talk("Why?", "So.", "And now?", "No."), talk("Why?", "So.")):
        said = [message["content"] for message in messages[1::2]]
        assert trained(source, messages, closers=()) == [f"{one}{end}" for one in said]


def test_the_header_of_the_next_turn_is_no_end_where_the_first_one_says_more() -> None:
    """As templates have it that write the header of an answer always, and tools behind the first
    header.
    """
    source = (
        "<s>{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>' }}"
        "{{ 'No tools. ' if loop.first }}{{ m.content + '</s>' }}{% endfor %}"
        "<|head|>assistant<|/head|>"
    )
    for messages in (talk("Why?", "So.", "And now?", "No."), talk("Why?", "So.")):
        said = [message["content"] for message in messages[1::2]]
        closers = ("<s>", "</s>", "<|head|>", "<|/head|>")
        assert trained(source, messages, closers=closers) == [f"{one}</s>" for one in said]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content|upper }}\n{% endfor %}", "other words"),
        (
            "{% for m in messages %}{{ m.content }}{{ m.content }}<|im_end|>{% endfor %}",
            "more than once",
        ),
        (
            "{% for m in messages %}[{{ m.content }}{% if m.content|length > 9 %}!{% endif %}]{% "
            "endfor %}",
            "giv|around",
        ),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
            "known to end a turn",
        ),
    ],
)
def test_spans_that_cannot_be_proven_are_refused(source: str, why: str) -> None:
    found = render(source, talk("Hi", "Hello", "And?", "Bye"), names={}, closers=("<|im_end|>",))
    assert isinstance(found, Refused)
    assert found.reason == "unproven_spans"
    assert any(part in found.detail for part in why.split("|")), found.detail


def test_rows_without_anything_to_train_say_so() -> None:
    for messages in (talk("Hi"), talk("Hi", ""), talk("Hi", "Hello", "And?")):
        found = render(CHATML, messages, train_on="completion")
        assert found == Refused(
            "nothing_to_train", "no text that train_on='completion' asks for"
        ), messages
    found = render(CHATML, talk("Hi", "Hello"), roles_to_train=("tool",))
    assert found == Refused("nothing_to_train", "no text that roles_to_train=['tool'] asks for")


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool", "bot"])
def test_a_role_that_no_template_knows_is_named_where_nothing_is_trained(role: str) -> None:
    found = render(CHATML, [{"role": role, "content": "Hi"}], train_on="completion")
    why = "no text that train_on='completion' asks for"
    if role == "bot":
        why += "; its messages are from 'bot'; prompt: {format_type: sharegpt, "
        why += "input_columns: [COLUMN], roles: {NAME: assistant}} maps them"
    assert found == Refused("nothing_to_train", why)


def test_a_day_is_printed_only_if_one_is_given() -> None:
    source = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert "set template_date" in render(source, talk("Hi", "Hello")).detail
    assert render(source, talk("Hi", "Hello"), date="2024-07-26").text.startswith("26 Jul 2024")
    assert (
        template(source, date="2024-07-26").fingerprint
        != template(source, date="2024-07-27").fingerprint
    )


@pytest.mark.parametrize(
    ("form", "day"),
    [("%Y-%m-%d", "2024-07-06"), ("%B %d, %Y", "July 06, 2024"), ("%A", "Saturday")],
)
def test_a_day_is_printed_in_the_form_that_is_asked_for(form: str, day: str) -> None:
    source = f"{{{{ strftime_now('{form}') }}}}" + CHATML
    assert render(source, talk("Hi", "Hello"), date="2024-07-06").text.startswith(f"{day}<")


def test_everything_that_decides_spans_is_in_the_fingerprint() -> None:
    base = template(CHATML)
    others = [
        template(MARKED),
        template(CHATML, "all"),
        template(CHATML, names={}),
        template(CHATML, closers=()),
        template(CHATML, tool_use="x"),
        template(CHATML, end_tokens=("</s>",)),
    ]
    assert len({one.fingerprint for one in [base, *others]}) == 7
    assert template(CHATML, origin="elsewhere").fingerprint == base.fingerprint


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_alone(name: str) -> None:
    source, why = HOSTILE[name]
    source = (
        "{% if messages[0].content == 'now' %}" + source + "{% else %}fine<|im_end|>{% endif %}"
    )
    rows = [{"messages": talk(word), "tools": None} for word in ("later", "later", "now", "later")]
    if any(limit in why for limit in LIMITS):
        with processor_time_of_workers(most=5):
            *before, beyond, behind = template(source, "all").render(rows)
        assert isinstance(beyond, Refused)
        assert beyond.reason == "beyond_limits"
        assert any(part in beyond.detail for part in why.split("|"))
        assert [one.text for one in (*before, behind)] == ["fine<|im_end|>"] * 3
        return
    with processor_time_of_workers(most=5), pytest.raises(HostileTemplateError) as caught:
        template(source, "all").render(rows)
    assert any(part in str(caught.value) for part in why.split("|"))
    if why not in ("not Jinja", "deeply", "not compile"):  # those are seen before any row
        assert caught.value.row == 2
    assert render(CHATML, talk("Hi", "Hello")).text.endswith("Hello<|im_end|>\n")


@pytest.mark.parametrize("changed", ["messages", "ns.ids"])
def test_rows_that_reach_a_change_of_a_list_are_refused_alone(changed: str) -> None:
    """As transformers refuses them: Kimi K2's template keeps the ids of calls in a list."""
    source = "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% if m.tool_calls %}"
    source += f"{{% set _ = {changed}.append(1) %}}{{% endif %}}{{{{ m.content }}}}<|im_end|>"
    rows = [{"messages": one, "tools": None} for one in (talk("1", "2"), CALLS, talk("3", "4"))]
    first, refused, last = template(source + "{% endfor %}").render(rows)
    why = "the sandbox stopped it: access to attribute 'append' of 'list' object is unsafe."
    assert refused == Refused("refused_by_template", why)
    assert [first.text, last.text] == ["1<|im_end|>2<|im_end|>", "3<|im_end|>4<|im_end|>"]


NAMES_WITHIN = st.one_of(
    st.text(max_size=5),
    st.sampled_from(
        [
            *dir(dict),
            *dir(str),
            *dir(list),
            "role",
            "first",
            "last",
            "index0",
            "nextitem",
            "format_map",
        ]
    ),
)
VALUES = st.one_of(
    st.text(max_size=3),
    st.integers(),
    st.none(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(NAMES_WITHIN, st.integers(), max_size=3),
)


@given(VALUES, NAMES_WITHIN)
@examples(300)
def test_the_sandbox_gives_what_that_of_jinja2_gives(value: Any, name: str) -> None:
    """Its short cuts: the same values, the same methods, undefined in the same words, and nothing
    that the other one keeps.
    """
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from easypipe.transforms.chat.sandbox import _Sandbox

    def seen(environment: ImmutableSandboxedEnvironment, thing: Any) -> Any:
        found = environment.getattr(thing, name)
        if isinstance(found, environment.undefined):
            return found._undefined_message, found._undefined_exception
        return type(found), getattr(found, "__name__", None) if callable(found) else found

    assert seen(_Sandbox(), value) == seen(ImmutableSandboxedEnvironment(), value)
    loops = [LoopContext(["a", "b"], ImmutableSandboxedEnvironment().undefined) for _ in range(2)]
    assert [next(loop)[0] for loop in loops] == ["a", "a"]
    assert seen(_Sandbox(), loops[0]) == seen(ImmutableSandboxedEnvironment(), loops[1])


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path: Any) -> None:
    from chat_support import chat_tokenizer, without_template

    tokenizer = load_tokenizer(chat_tokenizer())
    (tmp_path / "mark.jinja").write_text("\ufeff" + CHATML)
    given = [
        load_chat_template(tokenizer, chat_template=one, train_on="all", date=None)
        for one in (tmp_path / "mark.jinja", "\ufeff" + CHATML)
    ]
    bare = without_template(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").write_text("\ufeff" + CHATML)
    own = load_chat_template(load_tokenizer(bare), chat_template=None, train_on="all", date=None)
    assert [one.source for one in (*given, own)] == [CHATML] * 3
    assert PromptConfig(format_type="custom", template="\ufeff{text}").source()[0] == "{text}"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ ['a', 'b'] | random }}", "asks for 'random'"),
        ("{% for m in messages %}{{ [m.content] | random }}{% endfor %}", "asks for 'random'"),
        ("{{ lipsum(n=1) }}", "asks for 'lipsum'"),
        ("{{ messages[0].items }}", "prints an address in memory"),
        ("{{ messages | map(attribute='role') }}", "prints an address in memory"),
    ],
)
def test_templates_that_give_other_text_each_time_are_refused(source: str, why: str) -> None:
    with pytest.raises(HostileTemplateError, match=why):
        render(source, talk("Hi", "Hello"), train_on="all")


def test_addresses_that_conversations_speak_of_are_text_and_errors_have_none() -> None:
    said = "<function f at 0x7f00>"
    assert trained(CHATML, talk("Hi", said)) == [said + "<|im_end|>"]
    assert trained(  # what is not reached harms nobody
        "{% if false %}{{ lipsum() }}{% endif %}" + CHATML, talk("Hi", "Hello")
    ) == ["Hello<|im_end|>"]
    detail = render("{{ messages[0].items | tojson }}", talk("Hi", "Hello")).detail
    assert "is not JSON serializable" in detail
    assert render(
        "{{ raise_exception(messages[0].items | string) }}", talk("Hi", "Hello")
    ).detail.endswith("of dict object>")


def test_answers_much_longer_than_what_was_asked() -> None:
    """They go out before all rows are written, to one who has sent all of them."""
    rows = [{"messages": talk(f"{i} " * 3000, "b"), "tools": None} for i in range(100)]
    found = template(
        "{% for i in range(30) %}{{ messages[0].content }}{% endfor %}<|im_end|>", "all"
    ).render(rows)
    for i, one in enumerate(found):
        assert isinstance(one, Rendered)
        assert one.text == f"{i} " * 90000 + "<|im_end|>"


def test_a_worker_sees_no_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from easypipe.transforms.chat import pool as chat_pool

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    close_workers()
    worker = chat_pool._take()
    assert worker is not None
    try:
        with open(f"/proc/{worker._process.pid}/environ", "rb") as file:
            assert b"hf_secret" not in file.read()
    finally:
        worker.close()


def test_a_worker_imports_nothing_of_the_folder_that_it_starts_in(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the file of another')\n")
    monkeypatch.chdir(tmp_path)
    close_workers()
    (found,) = template("{{ messages[0].content }}<|im_end|>", "all").render(
        [{"messages": talk("a", "b"), "tools": None}]
    )
    assert isinstance(found, Rendered)


def test_a_worker_that_ended_leaves_its_place_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from easypipe.transforms.chat import pool as chat_pool

    close_workers()
    monkeypatch.setattr(chat_pool.os, "cpu_count", lambda: len(chat_pool._alive) + 1)
    first = chat_pool._take()
    assert first is not None
    cores = len(chat_pool._alive)
    monkeypatch.setattr(chat_pool.os, "cpu_count", lambda: cores)
    assert chat_pool._take(must=False) is None
    first.close()
    second = chat_pool._take(must=False)
    assert second is not None
    second.close()


def test_a_worker_that_the_system_ended_while_it_was_idle_is_replaced() -> None:
    from easypipe.transforms.chat import pool as chat_pool

    close_workers()
    row = {"messages": talk("a", "b"), "tools": None}
    one = template(CHATML, "assistant")
    (first, *_) = one.render([row] * 9)
    for worker in chat_pool._idle:
        os.kill(worker._process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
    assert one.render([row]) == [first]


def test_arguments_that_a_template_quotes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    source = "{% for m in messages %}<|start|>{{ (m.tool_calls or m) | tojson }}<|end|>{% endfor %}"
    asked, said = talk("Hi", "x")

    def told(arguments: Any) -> str:
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        messages = [asked, {**said, "content": None, "tool_calls": [call]}]
        made = render(source, messages, closers=TOOL_CLOSERS, origin="quotes.jinja")
        assert isinstance(made, Rendered), made
        return caplog.text

    assert told({"city": "Oslo"}) == ""
    assert "writes the arguments of tool calls, which rows hold as JSON" in told('{"city": "Oslo"}')


def test_tool_use_templates_serve_rows_with_tools() -> None:
    both = template(
        "plain {{ messages[0].content }}<|im_end|>",
        "all",
        tool_use="tools {{ messages[0].content }}<|im_end|>",
    )
    rows = [
        {"messages": talk(word), "tools": tools}
        for word, tools in (("a", None), ("b", [{"x": 1}]), ("c", []), ("d", [{"x": 1}]))
    ]
    assert [one.text for one in both.render(rows)] == [
        "plain a<|im_end|>",
        "tools b<|im_end|>",
        "plain c<|im_end|>",
        "tools d<|im_end|>",
    ]


def test_where_a_template_comes_from(tmp_path: Any) -> None:
    from chat_support import chat_tokenizer, without_template

    tokenizer = load_tokenizer(chat_tokenizer())
    own = load_chat_template(tokenizer, chat_template=None, train_on="all", date=None)
    assert own.source == CHATML
    assert own.names["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in own.closers
    bare = without_template(tmp_path / "bare")
    with pytest.raises(TokenizerError, match=r"has no chat template.*set chat_template"):
        load_chat_template(load_tokenizer(bare), chat_template=None, train_on="all", date=None)
    (tmp_path / "bare" / "chat_template.jinja").write_text(MARKED)
    assert (
        load_chat_template(
            load_tokenizer(bare), chat_template=None, train_on="all", date=None
        ).source
        == MARKED
    )
    (tmp_path / "bare" / "generation_config.json").write_text('{"eos_token_id": [0, 1, 99999]}')
    stops = load_chat_template(
        load_tokenizer(bare), chat_template="chatml", train_on="all", date=None
    )
    assert stops.end_tokens == stops.closers[:2] != own.end_tokens == ()
    (tmp_path / "other.jinja").write_text("{{ messages }}")
    assert (
        load_chat_template(
            tokenizer, chat_template=tmp_path / "other.jinja", train_on="all", date=None
        ).source
        == "{{ messages }}"
    )
    assert (
        load_chat_template(tokenizer, chat_template="{{ 1 }}", train_on="all", date=None).source
        == "{{ 1 }}"
    )
    with pytest.raises(ConfigError, match=r"chat_template: 'nowhere.jinja' is neither"):
        load_chat_template(tokenizer, chat_template="nowhere.jinja", train_on="all", date=None)
    named = json.loads((tmp_path / "bare" / "tokenizer_config.json").read_text())
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    named["chat_template"] = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
    ]
    (tmp_path / "bare" / "tokenizer_config.json").write_text(json.dumps(named))
    found = load_chat_template(load_tokenizer(bare), chat_template=None, train_on="all", date=None)
    assert (found.source, found.tool_use) == ("D", "T")


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_built_in_templates_leave_nothing_out_in_silence(name: str) -> None:
    def refused(message: dict[str, Any]) -> str:
        made = template(CHAT_TEMPLATES[name], names={"eos_token": "</s>"}).render(
            [
                {
                    "messages": [
                        {"role": "user", "content": "a"},
                        {"role": "assistant", **message},
                    ],
                    "tools": None,
                }
            ]
        )[0]
        return (
            made.detail
            if isinstance(made, Refused)
            else made.text[made.spans[0][0] : made.spans[0][1]]
        )

    assert (
        refused({"content": None, "refusal": None})
        == "message 1 says nothing: it has no content and no tool calls"
    )
    for key in ("function_call", "name", "refusal"):
        problem = f"message 1 has a {key}, which this built-in template does not print"
        assert refused({"content": "b", key: "no"}) == problem
        assert refused({"content": "b", key: None}).startswith("b")
    call = {
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    thought = {"content": "b", "reasoning_content": "hm"}
    if name == "chatml":
        assert (
            refused(call) == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
        )
        assert refused(thought) == "<think>\nhm\n</think>\n\nb<|im_end|>"
        result = {"content": "4", "role": "tool", "name": "f", "tool_call_id": "1"}
        assert refused(result) == "no text that train_on='assistant' asks for"
    else:
        assert refused(call) == "this built-in template knows no tool calls: take chatml"
        assert refused(thought) == "this built-in template knows no reasoning: take chatml"


@pytest.mark.parametrize(
    "name",
    ["namespace(_hidden=1)", "namespace(dict(__class__=1))", "namespace() %}{% set ns._hidden = 1"],
)
def test_a_namespace_takes_no_private_names(name: str) -> None:
    with pytest.raises(HostileTemplateError, match="a namespace has no attribute '_"):
        render("{% set ns = " + name + " %}x", talk("user", "assistant"))
