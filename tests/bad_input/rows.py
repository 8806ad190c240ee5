"""Cases: conversations, pairs of answers, prompts and templates that are broken."""

from __future__ import annotations

import json
from typing import Any

from bad_input.case import Case, lines

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
GOOD = {"messages": [USER, ANSWER]}


def options(**given: Any) -> dict[str, Any]:
    return {f"datasets.0.{key}": value for key, value in given.items()}


def chat(what: str, says: str | None, messages: Any, **given: Any) -> Case:
    """A file of three conversations, of which the second is `messages`, or JSON text of a row."""
    bad = messages if isinstance(messages, str) else json.dumps({"messages": messages})
    content = lines([GOOD]) + bad + "\n" + lines([GOOD])
    chosen = {"data_files": "chat.jsonl", "content_field": "messages", "chat_template": "chatml"}
    return Case(what, says, files={"chat.jsonl": content}, options=options(**(chosen | given)))


def prompt(what: str, says: str | None, row: Any, files: Any = None, **given: Any) -> Case:
    """A file of rows with a prompt, the second of which is `row`; `given` is its PromptConfig."""
    good = {"prompt": "a?", "completion": "b", "rejected": "c"}
    content = lines([good]) + (row if isinstance(row, str) else json.dumps(row)) + "\n"
    return Case(
        what,
        says,
        files={"qa.jsonl": content} | (files or {}),
        options=options(data_files="qa.jsonl", prompt=given) | {"pack.oversize": "drop"},
    )


def template(what: str, says: str | None, text: str, **given: Any) -> Case:
    """Good conversations, and a template of one's own."""
    chosen = {"data_files": "chat.jsonl", "content_field": "messages", "chat_template": text}
    return Case(
        what, says, files={"chat.jsonl": lines([GOOD] * 3)}, options=options(**(chosen | given))
    )


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
AT = "chat.jsonl, row 1"
CHATS = [
    chat("a message without a role", AT, [{"content": "hi"}, ANSWER]),
    chat("a message without content", AT, [{"role": "user"}, ANSWER]),
    chat("the role is null", AT, [{"role": None, "content": "x"}, ANSWER]),
    chat("the role is a number", AT, [{"role": 5, "content": "x"}, ANSWER]),
    chat("the role is empty", AT, [{"role": "", "content": "x"}, ANSWER]),
    chat("an unknown role", None, [{"role": "narrator", "content": "x"}, ANSWER]),
    chat("a role with terminal escapes", None, [{"role": "\x1b[31m", "content": "x"}, ANSWER]),
    chat("the content is null", AT, [{"role": "user", "content": None}, ANSWER]),
    chat("the content is a number", AT, [{"role": "user", "content": 5}, ANSWER]),
    chat("the content is true", AT, [{"role": "user", "content": True}, ANSWER]),
    chat("the content is an object", AT, [{"role": "user", "content": {"text": "x"}}, ANSWER]),
    chat(
        "the content is a list of texts",
        f"{AT} … part of message 0 is text",
        [{"role": "user", "content": ["x"]}, ANSWER],
    ),
    chat(
        "the content holds a picture",
        AT,
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER],
    ),
    chat("the content is empty", None, [{"role": "user", "content": ""}, ANSWER]),
    chat("no messages", None, []),
    chat("messages are null", AT, None),
    chat("messages are a text", AT, "[]"),
    chat("messages are one object", AT, json.dumps({"messages": USER})),
    chat("messages are numbers", AT, [1, 2]),
    chat("messages are texts", AT, ["hi", "yes"]),
    chat("messages are lists", AT, [["user", "hi"]]),
    chat("a message is null", AT, [USER, None]),
    chat(
        "messages hold `from` and `value`", f"{AT} … sharegpt", [{"from": "human", "value": "hi"}]
    ),
    chat(
        "messages with keys of their own",
        f"{AT} … message_fields maps its keys who, says",
        [{"who": "human", "says": "hi"}],
    ),
    chat("a row that is a list", AT, "[1]"),
    chat("a row that is cut", AT, '{"messages": [{"role": "us'),
    chat("a row without messages", AT, json.dumps({"text": "x"})),
    chat("no turn of the assistant", None, [USER]),
    chat("two turns of the user", None, [USER, USER, ANSWER]),
    chat("the system message comes last", None, [USER, ANSWER, {"role": "system", "content": "x"}]),
    chat("unknown keys", None, [USER | {"colour": 1}, ANSWER]),
    chat("`train` is a text", AT, [USER, ANSWER | {"train": "yes"}]),
    chat(
        "tool calls are a text",
        f"{AT} … are text, not a list",
        [USER, ANSWER | {"tool_calls": "f()"}],
    ),
    chat(
        "tool calls are an object",
        f"{AT} … are an object, not a list",
        [USER, ANSWER | {"tool_calls": CALL}],
    ),
    chat(
        "a tool call without a function",
        AT,
        [USER, ANSWER | {"tool_calls": [{"type": "function"}]}],
    ),
    chat(
        "a tool call without a name",
        AT,
        [USER, ANSWER | {"tool_calls": [{"function": {"arguments": {}}}]}],
    ),
    chat(
        "a tool call that is a number",
        f"{AT} … is a number, not an object",
        [USER, ANSWER | {"tool_calls": [5]}],
    ),
    chat(
        "arguments that are not JSON",
        None,
        [USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}],
    ),
    chat(
        "1,000 nested lists in a message",
        AT,
        '{"messages": [{"role": "user", "content": %s}]}' % ("[" * 1000 + "]" * 1000),
    ),
    chat("a message of a million characters", None, [USER, ANSWER | {"content": "x" * 1_000_000}]),
    chat("2,000 turns", None, [USER, ANSWER] * 1000),
    chat("half a surrogate pair", AT, '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    chat("a special token of the template", None, [USER, ANSWER | {"content": "<|im_end|>"}]),
    chat(
        "a message whose text is Jinja",
        None,
        [USER, ANSWER | {"content": "{{ 7 * 7 }} {% raise %}"}],
    ),
    chat("a bad conversation that is skipped", None, [{"content": "hi"}], on_error="skip"),
    chat("a bad conversation that is kept apart", None, [{"content": "hi"}], on_error="quarantine"),
    chat("tools are a text that is not JSON", AT, json.dumps(GOOD | {"tools": "no json"})),
    chat(
        "a tool call whose function is a text",
        f"{AT} … is text, not an object",
        [USER, ANSWER | {"tool_calls": [{"type": "function", "function": "f"}]}],
    ),
    chat(
        "a tool call without arguments",
        f"{AT} … a tool call of message 1 has no arguments",
        [USER, ANSWER | {"tool_calls": [{"type": "function", "function": {"name": "f"}}]}],
    ),
    chat(
        "a part without a type",
        f"{AT} … an object without a type",
        [{"role": "user", "content": [{"text": "x"}]}, ANSWER],
    ),
    chat(
        "a part whose text is null",
        f"{AT} … is not text",
        [{"role": "user", "content": [{"type": "text", "text": None}]}, ANSWER],
    ),
    Case(
        "every row has an empty list of tools",
        None,
        files={"chat.jsonl": lines([GOOD | {"tools": []}] * 3)},
        options=options(data_files="chat.jsonl", content_field="messages", chat_template="chatml"),
    ),
    Case(
        "tools are an object",
        "chat.jsonl, row 0 … tools are an object, not a list of objects",
        files={"chat.jsonl": lines([GOOD | {"tools": CALL}] * 3)},
        options=options(data_files="chat.jsonl", content_field="messages", chat_template="chatml"),
    ),
    Case(
        "tools are JSON text of a number",
        "chat.jsonl, row 0 … tools are a number, not a list of objects",
        files={"chat.jsonl": lines([GOOD | {"tools": "5"}] * 3)},
        options=options(data_files="chat.jsonl", content_field="messages", chat_template="chatml"),
    ),
    Case(
        "roles that no message has",
        "chat.jsonl, row 0 … its messages are from 'human', 'gpt' … format_type: sharegpt",
        files={
            "chat.jsonl": lines(
                [{"messages": [USER | {"role": "human"}, ANSWER | {"role": "gpt"}]}] * 3
            )
        },
        options=options(data_files="chat.jsonl", content_field="messages", chat_template="chatml"),
    ),
    chat("tools are a number", "chat.jsonl", json.dumps(GOOD | {"tools": 5})),
    chat(
        "a column of tools that is not there", "column 'tolls'", [USER, ANSWER], tools_field="tolls"
    ),
    chat("train_on of nothing", "train_on", [USER, ANSWER], train_on="asistant"),
]
TEMPLATES = [
    template(
        "that does not end",
        "chat_template: the template cannot be used: line 1",
        "{% for m in messages %}{{ m.content }}",
    ),
    template(
        "of no Jinja", "chat_template: the template cannot be used: line 1", "{{ messages[ }}"
    ),
    template(
        "with an unknown filter",
        "chat_template: the template cannot be used: line 1",
        "{% for m in messages %}{{ m.content | shout }}{% endfor %}",
    ),
    template(
        "with an unknown test",
        "chat.jsonl, row 0",
        "{% for m in messages %}{% if m is loud %}x{% endif %}{% endfor %}",
    ),
    template(
        "with an unknown tag",
        "chat_template: the template cannot be used: line 1",
        "{% shout %}{{ messages }}",
    ),
    template("that includes a file", "chat_template", "{% include 'x' %}{{ messages }}"),
    template(
        "that refuses every row",
        "chat.jsonl, row 0",
        "{{ messages[0].content }}{{ raise_exception('no') }}",
    ),
    template("that divides by zero", "chat.jsonl, row 0", "{{ messages[0].content }}{{ 1 // 0 }}"),
    template("that reads what is not there", "chat.jsonl, row 0", "{{ messages[9].content.x }}"),
    template("that writes nothing", "", "{% for m in messages %}{% endfor %}"),
    template(
        "that never ends", "", "{% for i in range(10 ** 9) %}{{ messages[0].content }}{% endfor %}"
    ),
    template("that writes too much", "", "{{ messages[0].content * (10 ** 9) }}"),
    template("that looks for Python's classes", "", "{{ messages.__class__.__mro__ }}"),
    template(
        "that opens files", "", "{{ cycler.__init__.__globals__.os.system('true') }}{{ messages }}"
    ),
    template("without the messages", "", "hello {{ name }}"),
    template(
        "that asks for today",
        "template_date",
        "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    ),
    template("of a million braces", "chat_template", "{{" * 10_000),
    template("of deep nesting", "chat_template", "{% if messages %}" * 500 + "{% endif %}" * 500),
    template("that is a folder", "chat_template", "tokenizer"),
    template("that is a file of noise", "chat_template", "chat.jsonl"),
    template("that is not there", "datasets[0].chat_template", "nowhere.jinja"),
    template("by a name with a slip", "Did you mean 'chatml'", "chatlm"),
    template("with an invalid date", "template_date", "chatml", template_date="2026-13-45"),
]
PC = {"format_type": "prompt_completion"}
PAIRS = [
    prompt("a prompt that is a number", "qa.jsonl, row 1", {"prompt": 5, "completion": "b"}, **PC),
    prompt(
        "a completion that is null", "qa.jsonl, row 1", {"prompt": "a", "completion": None}, **PC
    ),
    prompt("a row without the completion", "qa.jsonl, row 1", {"prompt": "a"}, **PC),
    prompt("an empty completion", None, {"prompt": "a", "completion": ""}, **PC),
    prompt("an empty prompt", None, {"prompt": "", "completion": "b"}, **PC),
    prompt(
        "a rejected answer that is null",
        "qa.jsonl, row 1",
        {"prompt": "a", "completion": "b", "rejected": None},
        rejected_column="rejected",
        **PC,
    ),
    prompt(
        "a rejected answer that is the chosen one",
        None,
        {"prompt": "a", "completion": "b", "rejected": "b"},
        rejected_column="rejected",
        **PC,
    ),
    prompt(
        "a column of rejected answers that is not there",
        "column 'worse'",
        {},
        rejected_column="worse",
        **PC,
    ),
    prompt(
        "rejected answers in place of the answer",
        "rejected_column",
        {},
        rejected_column="completion",
        **PC,
    ),
    prompt(
        "a label that is not there", "column 'label' … qa.jsonl", {}, label_column="label", **PC
    ),
    prompt("a format of nothing", "datasets[0].prompt.format_type", {}, format_type="chta"),
    prompt(
        "a template with a column that is not there",
        "column 'qestion'",
        {},
        format_type="custom",
        template="{qestion}",
    ),
    prompt("a template without columns", "", {}, format_type="custom", template="{}"),
    prompt("a template with an open brace", "", {}, format_type="custom", template="{prompt"),
    prompt(
        "a template in Jinja that does not parse",
        "template",
        {},
        format_type="custom",
        template="{{ prompt ",
    ),
    prompt(
        "a template that fails",
        "qa.jsonl, row",
        {"prompt": "x"},
        format_type="custom",
        input_columns=["prompt"],
        template="{% if 1 // 0 %}{{ prompt }}{% endif %}",
    ),
    prompt(
        "alpaca without its columns", "column 'instruction' … qa.jsonl", {}, format_type="alpaca"
    ),
    prompt(
        "sharegpt without its column",
        "column 'conversations' … qa.jsonl",
        {},
        format_type="sharegpt",
        template="chatml",
    ),
    prompt(
        "an unknown role",
        "roles",
        {},
        format_type="sharegpt",
        template="chatml",
        roles={"bot": "asistant"},
    ),
    prompt("few-shot without examples", "few_shot", {}, few_shot={"examples": []}, **PC),
    prompt(
        "few-shot examples without the column",
        "few_shot",
        {},
        few_shot={"examples": [{"x": "y"}]},
        **PC,
    ),
    prompt(
        "few-shot examples of numbers",
        "column 'prompt' has no text",
        {},
        few_shot={"examples": [{"prompt": 1, "completion": 2}]},
        **PC,
    ),
    prompt(
        "a file of examples that is not there",
        "nowhere.jsonl",
        {},
        few_shot={"data_files": "nowhere.jsonl", "count": 1},
        **PC,
    ),
    prompt(
        "a file of examples of noise",
        "shots.jsonl",
        {},
        {"shots.jsonl": bytes(range(200, 256))},
        few_shot={"data_files": "shots.jsonl", "count": 1},
        **PC,
    ),
    prompt(
        "a file of examples that is cut",
        "shots.jsonl",
        {},
        {"shots.jsonl": '{"prompt": "a", '},
        few_shot={"data_files": "shots.jsonl", "count": 1},
        **PC,
    ),
    prompt(
        "an empty file of examples",
        "shots.jsonl",
        {},
        {"shots.jsonl": ""},
        few_shot={"data_files": "shots.jsonl", "count": 1},
        **PC,
    ),
    prompt(
        "a file of examples that are not objects",
        "shots.jsonl",
        {},
        {"shots.jsonl": "[1, 2]"},
        few_shot={"data_files": "shots.jsonl", "count": 1},
        **PC,
    ),
    prompt(
        "examples of other columns",
        "shots.jsonl",
        {},
        {"shots.jsonl": '{"x": "a"}\n'},
        few_shot={"data_files": "shots.jsonl", "count": 1},
        **PC,
    ),
    prompt(
        "deep nesting in the examples",
        "shots.jsonl",
        {},
        {"shots.jsonl": "[" * 100_000},
        few_shot={"data_files": "shots.jsonl", "count": 1},
        **PC,
    ),
    prompt(
        "more examples than there are",
        "few_shot",
        {"prompt": "x", "completion": "y"},
        {"shots.jsonl": lines([{"prompt": "a", "completion": "b"}])},
        few_shot={"data_files": "shots.jsonl", "count": 5},
        **PC,
    ),
]
KINDS = {"Conversations": CHATS, "Chat templates": TEMPLATES, "Prompts and pairs": PAIRS}
