"""Whose turns are trained: roles_to_train, by the same mechanism as train_on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chat_support import CHATML, MARKED, SHARED, chat_tokenizer, needs_shared, talk
from easypipe import ConfigError, PromptConfig, PromptEngine, SourceError
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES

END = "<|im_end|>"
ROW = {"messages": talk("Why?", "So.", "And now?", "No.", system="Be brief.")}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"


def trained(row: dict[str, Any] = ROW, **options: Any) -> list[str]:
    found = PromptEngine(chat_tokenizer(), PromptConfig(**options)).render(row)
    return [found.text[a:b] for a, b in found.spans]


@pytest.mark.parametrize("template", [None, MARKED, "chatml"])
def test_the_turns_of_these_roles_are_trained(template: str | None) -> None:
    def of(*roles: str, **options: Any) -> list[str]:
        return trained(template=template, roles_to_train=roles, **options)

    asked, said = [f"Why?{END}", f"And now?{END}"], [f"So.{END}", f"No.{END}"]
    assert of("assistant") == said == trained(template=template, train_on="assistant")
    assert of("user") == asked
    assert of("system") == [f"Be brief.{END}"]
    both = [f"Be brief.{END}", asked[0], said[0], asked[1], said[1]]
    assert of("assistant", "user", "system") == both
    assert of("user", train_on_eos="none") == ["Why?", "And now?"]
    assert of("user", "assistant", train_on_eos="last") == ["Why?", "So.", "And now?", said[1]]
    with pytest.raises(SourceError, match="nothing_to_train"):
        of("tool")


def test_flags_of_messages_say_it_for_any_role() -> None:
    """As axolotl's example of `roles_to_train: []` with message_field_training has it."""
    messages = [dict(message) for message in ROW["messages"]]
    messages[1]["train"], messages[4]["train"] = True, False
    assert trained({"messages": messages}, roles_to_train=()) == [f"Why?{END}"]
    assert trained({"messages": messages}, roles_to_train=("assistant",)) == [
        f"Why?{END}",
        f"So.{END}",
    ]
    with pytest.raises(SourceError, match="message 1 is to be trained, and is the user's"):
        trained({"messages": messages})


def test_others_turns_end_with_what_ends_the_assistant_s_or_with_their_words() -> None:
    assert trained(template=PLAIN, roles_to_train=("user", "assistant")) == [
        "Why?",
        f"So.{END}",
        "And now?",
        f"No.{END}",
    ]
    asks = {"messages": ROW["messages"][:-1]}
    engine = PromptEngine(
        chat_tokenizer(), PromptConfig(template=PLAIN, roles_to_train=("user", "assistant"))
    )
    ids, mask = engine.encode(asks)["input_ids"], engine.encode(asks)["loss_mask"]
    assert ids[-1] == engine.tokenizer.eos_token_id
    assert mask[-1] == 0  # no template of this kind ends a question with it


def test_the_words_of_a_tool_are_trained_and_a_call_is_the_assistant_s() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        *talk("Why?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Three"},
    ]
    assert trained({"messages": messages}, template="chatml", roles_to_train=("tool",)) == [
        f"3{END}"
    ]


@needs_shared
@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "gemma", "mistral_tool"])
def test_templates_of_models_print_what_users_say_where_it_is_proven(name: str) -> None:
    template = SHARED / "templates" / f"{name}.jinja"
    row = {"messages": talk("Why?", "So.", "And now?", "No.")}
    found = trained(row, template=template, roles_to_train=("user",))
    assert [text.partition("?")[0] for text in found] == ["Why", "And now"]
    assert not any("[/INST]" in text or "start" in text for text in found)
    both = trained(row, template=template, roles_to_train=("user", "assistant"))
    assert both[1::2] == trained(row, template=template)


def test_a_template_that_writes_a_question_twice_is_refused() -> None:
    twice = CHATML.replace("message['content']", "message['content'] + message['content']")
    with pytest.raises(SourceError, match="unproven_spans: the template prints"):
        trained(template=twice, roles_to_train=("user",))


def test_built_in_templates_train_the_same_marked_or_not() -> None:
    for name, source in CHAT_TEMPLATES.items():
        unmarked = source.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
        roles = {"roles_to_train": ("user", "assistant")}
        assert trained(template=name, **roles) == trained(template=unmarked, **roles)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"roles_to_train": ["gpt"]}, r"roles_to_train\[0\]: 'gpt' is no role .have: assistant"),
        (
            {"roles_to_train": ["user"], "train_on": "last_assistant"},
            "roles_to_train: says whose turns are trained, and train_on 'last_assistant' says it",
        ),
        (
            {"roles_to_train": ["user"], "format_type": "alpaca"},
            "roles_to_train: has no effect on format_type 'alpaca'",
        ),
    ],
)
def test_what_has_no_effect_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PromptConfig(**options)


def test_answers_to_a_prompt_are_trained_by_role(tmp_path: Path) -> None:
    row = {"prompt": talk("Why?"), "answer": talk("x", "So.", "Oh?", "No.")[1:]}
    columns = {"input_columns": ("prompt",), "label_column": "answer", "template": "chatml"}
    assert trained(row, **columns, roles_to_train=("user", "assistant")) == [
        f"So.{END}",
        f"Oh?{END}",
        f"No.{END}",
    ]
