"""`easypipe.masks` and `easypipe masks`: what a template trains, told without a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chat_support import REASONING, chat_tokenizer, talk
from easypipe import (
    ConfigError,
    ConversationMask,
    EasypipeError,
    PromptConfig,
    PromptEngine,
    masks,
    train_bpe,
)
from easypipe.cli import main
from easypipe.previews.masks import SAMPLES, TOKEN, spellings
from told import assert_told

PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}{% endfor %}"
    "<|end|>{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["masks", *arguments])
    return code, capsys.readouterr().out


def test_samples_of_a_template_alone() -> None:
    found = {one.name: one for one in masks(PARTS)}
    assert list(found) == list(SAMPLES)
    one = found["two turns with system"]
    assert one.text is not None
    assert one.reason is None
    assert one.form == "typed parts"
    said = [one.text[a:b] for a, b in one.spans]
    assert said == ["It is four.<|end|>", "Six, of course.<|end|>"]
    call = found["a tool call"]
    assert call.text is None
    assert call.reason is not None
    assert not call.spans
    assert not call.pieces
    assert "".join(piece.text for piece in one.pieces) == one.text
    assert [piece.masked for piece in one.pieces] == [True, False, True, False]


@pytest.mark.parametrize("refused", ["is not string", "is string"])
def test_the_reason_of_the_first_form_is_told_that_is_not_refused(refused: str) -> None:
    source = (
        "{% for m in messages %}{{ raise_exception('another form') if m.content " + refused + " }}"
        "{{ m.role }}: {{ m.content | string | upper }}<|end|>{% endfor %}"
    )
    (one, *_) = masks(source)
    assert str(one.reason).startswith("unproven_spans: "), one.reason


def test_a_call_is_tried_in_every_form() -> None:
    call = {form: one["messages"][1] for form, one in spellings(SAMPLES["a tool call"])}
    written, empty = "arguments as JSON text", "empty content beside a call"
    assert list(call) == [
        *("", empty, written, f"{written}, {empty}"),
        *("typed parts", f"typed parts, {empty}", f"typed parts, {written}"),
        f"typed parts, {written}, {empty}",
    ]
    for form, message in call.items():
        content = [] if "typed" in form else ""
        assert message.get("content", "left out") == (content if empty in form else "left out")
        given = message["tool_calls"][0]["function"]["arguments"]
        assert given == ('{"city": "Bern"}' if written in form else {"city": "Bern"})


def test_what_looks_like_a_special_token_of_a_template_alone() -> None:
    seen = ["<|im_end|>", "<end_of_turn>", "<SPECIAL_12>", "[/INST]", "[|endofturn|]", "</s>"]
    assert TOKEN.findall("a < b > [c] ".join(seen)) == seen
    source = (
        "{% for m in messages %}<SPECIAL_11>{{ m.role }}\n{{ m.content }}<SPECIAL_12>{% endfor %}"
    )
    found = {one.name: one for one in masks(source)}["two turns with system"]
    assert trained(found) == ["It is four.<SPECIAL_12>", "Six, of course.<SPECIAL_12>"]


def test_a_turn_ends_with_the_special_tokens_that_are_named() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}(end)(stop){% endfor %}"
    source += "{{ '[assistant]' if add_generation_prompt }}"
    for special, end in ((None, "(end)(stop)"), (["(end)"], "(end)")):
        options: Any = {"special_tokens": special}
        (alone,) = masks(source, [talk("Hi", "Four.")], **options)
        (found,) = masks(chat_tokenizer(), [talk("Hi", "Four.")], chat_template=source, **options)
        assert trained(alone) == trained(found) == [f"Four.{end}"]


def test_own_conversations_with_a_tokenizer(shared_data: Path) -> None:
    """The masks of tokens are those that a pipeline trains."""
    folder = shared_data / "tokenizers" / "torchtitan_tiny"
    talks = [talk("Hi", "Hello"), {"messages": talk("Hi", "Hello", "And?", "Bye")}, talk("Hi")]
    one, two, none = masks(folder, talks, chat_template="chatml")
    assert none.reason is not None
    assert none.reason.startswith("nothing_to_train")
    for found, turns in ((one, 1), (two, 2)):
        assert found.input_ids is not None
        assert found.loss_mask is not None
        assert len(found.input_ids) == len(found.loss_mask)
        assert len(found.spans) == turns
        edges = zip((0, *found.loss_mask), found.loss_mask, strict=False)
        assert sum(before < after for before, after in edges) == turns
    (last,) = masks(folder, talks[1:2], chat_template="chatml", train_on="last_assistant")
    assert last.spans == two.spans[1:]


def test_a_conversation_is_proven_or_not_whatever_came_before_it() -> None:
    """Of a template that refuses three messages, and ends calls with two special tokens."""
    template = (
        "{% if messages|length == 3 %}{{ raise_exception('three') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}<|endoftext|>{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    short: Any = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "z"},
    ]
    long = [{"role": "system", "content": "s"}, *short]
    proven, alone, after = (
        masks(template, talks)[-1].reason for talks in ([short], [long], [short, long])
    )
    assert proven is None
    assert alone == after is not None


THOUGHTS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye.", "reasoning_content": "An end."},
]
# writes what the last turn thinks, and drops it from earlier ones
DROPS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)


def trained(found: ConversationMask) -> list[str]:
    assert found.text is not None, found.reason
    return [found.text[a:b] for a, b in found.spans]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["Hello.<|end|>", "<think>An end.</think>Bye.<|end|>"]),
        ({"train_on": "last_assistant"}, ["<think>An end.</think>Bye.<|end|>"]),
        ({"train_on_eos": "last"}, ["Hello.", "<think>An end.</think>Bye.<|end|>"]),
        ({"train_on_eos": "none"}, ["Hello.", "<think>An end.</think>Bye."]),
        ({"reasoning": "mask"}, ["Hello.<|end|>", "Bye.<|end|>"]),
        ({"roles_to_train": ["user"]}, ["Hi<|end|>", "And?<|end|>"]),
        ({"roles_to_train": ["user", "assistant"], "train_on_eos": "none"}, None),
    ],
)
def test_options_of_a_config_say_what_is_trained(
    options: dict[str, Any], expected: list[str] | None, tmp_path: Path
) -> None:
    """And tokens and masks are those of a pipeline with the same options."""
    (found,) = masks(DROPS, [THOUGHTS], **options)
    if expected is None:
        expected = ["Hi", "Hello.", "And?", "<think>An end.</think>Bye."]
    assert trained(found) == expected
    train_bpe(
        ["a text of some words"] * 20, 300, ["<|end|>", "<|user|>", "<|assistant|>"], tmp_path
    )
    (found,) = masks(tmp_path, [THOUGHTS], chat_template=DROPS, **options)
    config = PromptConfig(input_columns=("messages",), template=DROPS, **options)
    sample = PromptEngine(str(tmp_path), config).encode({"messages": THOUGHTS})
    assert list(found.input_ids or ()) == sample["input_ids"].tolist()
    assert list(found.loss_mask or ()) == sample["loss_mask"].tolist()


def test_each_turn_that_thinks_is_a_sample_of_its_own() -> None:
    one, two = masks(DROPS, [THOUGHTS], reasoning="per_turn")
    assert [one.name, two.name] == [f"conversation 0, sample {n} of 2" for n in (1, 2)]
    assert trained(one) == ["<think>A greeting.</think>Hello.<|end|>"]
    assert trained(two) == ["<think>An end.</think>Bye.<|end|>"]
    assert [one.name for one in masks("chatml", reasoning="per_turn")] == list(SAMPLES)
    (found,) = masks("chatml", [[THOUGHTS[0]]], reasoning="per_turn")
    assert str(found.reason).startswith("nothing_to_train")


def test_a_message_says_that_it_is_trained() -> None:
    said = [THOUGHTS[0] | {"train": True}, THOUGHTS[1]]
    (found,) = masks(DROPS, [said], roles_to_train=[])
    assert trained(found) == ["Hi<|end|>"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"system": "Be brief."}, "<|im_start|>system\nBe brief.<|im_end|>"),
        ({"tools": '[{"name": "f", "strict": null}]'}, '<tools>\n{"name": "f", "strict": null}\n<'),
        ({"tools": [{"name": "f", "strict": None}]}, '<tools>\n{"name": "f", "strict": null}\n<'),
        ({"tools": "[{"}, "not_json: tools: "),
        ({"chat_template_kwargs": {"messages": 1}}, "bad_template_kwargs: "),
        ({"messages": [THOUGHTS[0] | {"train": True}]}, "bad_train_flag: message 0 is to be"),
        ({"messages": json.dumps(THOUGHTS)}, "<|im_start|>user\nHi<|im_end|>"),
    ],
)
def test_rows_are_read_as_those_of_data(row: dict[str, Any], told: str) -> None:
    (found,) = masks("chatml", [{"messages": THOUGHTS} | row])
    assert told in str(found.text or found.reason)


def test_options_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(THOUGHTS))
    template = tmp_path / "drops.jinja"
    template.write_text(DROPS)

    def found(*options: str) -> list[list[str]]:
        code, out = shown(capsys, str(template), "--messages", str(rows), "--json", *options)
        assert code == 0
        return [[one["text"][a:b] for a, b in one["spans"]] for one in json.loads(out)]

    assert found("--roles-to-train", "user") == [["Hi<|end|>", "And?<|end|>"]]
    assert found("--train-on-eos", "none", "--train-on", "last_assistant") == [
        ["<think>An end.</think>Bye."]
    ]
    assert found("--reasoning", "mask") == [["Hello.<|end|>", "Bye.<|end|>"]]
    assert len(found("--reasoning", "per_turn")) == 2
    said = [THOUGHTS[0] | {"weight": 1}, THOUGHTS[1]]
    rows.write_text(json.dumps(said))
    assert found("--roles-to-train", "") == [["Hi<|end|>"]]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"roles_to_train": ["users"]}, r"roles_to_train\[0\]: 'users'"),
        ({"roles_to_train": ["user"], "train_on": "all"}, "roles_to_train: says whose turns"),
        ({"reasoning": "mask", "train_on": "all"}, "reasoning: 'mask' has no effect"),
        ({"train_on": "none"}, "train_on"),
        ({"special_tokens": "<|end|>"}, r"special_tokens: wants a list, .* Write \['<|end|>'\]"),
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        masks("chatml", **options)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    (found,) = masks("chatml", [{"messages": {}}])
    assert found.reason == "not_a_list: messages are an object"
    with pytest.raises(ConfigError, match="neither a file"):
        masks(tmp_path / "none.jinja")
    with pytest.raises(ConfigError, match="chat_template: has no effect with a template alone"):
        masks("chatml", chat_template="zephyr")
    with pytest.raises(EasypipeError, match="line 1 is not Jinja"):
        masks("{% for %}")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = shown(capsys, "chatml")
    assert code == 0
    asked = "<|im_start|>user\\nWhat is two and two?<|im_end|>\\n<|im_start|>assistant\\n"
    assert out.splitlines()[:3] == [
        "one turn: proven",
        f"      ⟦<s>{asked}⟧It is four.<|im_end|>⟦\\n⟧",
        "two turns with system: proven",
    ]
    assert shown(capsys, PARTS)[1].startswith("one turn: proven (typed parts)\n      ⟦<|user|>")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps(talk(*said)) + "\n" for said in (("Hi", "\x1b[2J"), ("Hi",)))
    )
    code, out = shown(capsys, "chatml", "--messages", str(rows))
    assert code == 1
    assert "\x1b" not in out
    assert "conversation 1: not proven: nothing_to_train" in out
    code, out = shown(capsys, "chatml", "--messages", str(rows), "--json")
    assert [row["reason"] is None for row in json.loads(out)] == [True, False]
    page = tmp_path / "page.html"
    assert shown(capsys, "chatml", "--html", str(page))[0] == 0
    assert '<span class="trained">It is four.&lt;|im_end|&gt;</span>' in page.read_text()
    assert "<title>easypipe masks chatml</title>" in page.read_text()


def test_masks_of_many_templates_word_for_word() -> None:
    """Of a template alone, and with the tokens of a tokenizer."""
    dated = "{{ strftime_now('%d %b') }}" + DROPS
    only_text = "{{ raise_exception('no parts') if messages[0].content is not string }}"
    named = (
        "{% for m in messages %}{{ m.content or m.tool_calls[0].function.name }}</s>{% endfor %}"
    )
    silent = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    refusing = "{{ raise_exception(messages[0].content is string and 'no text' or 'no parts') }}"
    thinks = [THOUGHTS[0], {"role": "assistant", "content": "<think>\n\n</think>\n\nNo."}]
    keys = "{% for m in messages %}{{ m.role }} {{ m | length }} {{ m.content }}</s>{% endfor %}"
    own = chat_tokenizer()
    cases: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "samples": ("chatml", None, {}),
        "of typed parts": (PARTS, None, {"special_tokens": ["<|end|>"]}),
        "of text": (only_text + silent, None, {}),
        "of the name of an end": (silent.replace("</s>", "{{ eos_token }}"), None, {}),
        "of a call": (named, None, {"train_on": "all"}),
        "of no call": (silent, [SAMPLES["a tool call"]], {}),
        "of no end": ("{% for m in messages %}{{ m.content }} {% endfor %}", None, {}),
        "of keys": (keys, None, {"train_on": "all"}),
        "on a day": (dated, [THOUGHTS], {"template_date": "2027-02-03"}),
        "on the usual day": (dated, [THOUGHTS], {}),
        "an empty thought": (REASONING, [thinks], {"train_empty_thinking": False}),
        "the end of the last": ("chatml", [THOUGHTS], {"train_on_eos": "last"}),
        "tokens": (own, [talk("Hi", "Four."), THOUGHTS, talk("Hi"), [{"role": "x"}]], {}),
        "tokens of another template": (own, [THOUGHTS], {"chat_template": dated}),
        "tokens of a day": (
            own,
            [THOUGHTS],
            {"chat_template": dated, "template_date": "2027-02-03", "reasoning": "per_turn"},
        ),
        "of nothing": (refusing, None, {}),
        "tokens without ends": (own, [THOUGHTS], {"special_tokens": ["<|other|>"]}),
        "tokens with ends of one's own": (
            own,
            [THOUGHTS],
            {"chat_template": DROPS, "special_tokens": ["<|end|>"]},
        ),
    }
    told = []
    for name, (source, conversations, options) in cases.items():
        told.append(f"### {name}")
        for one in masks(source, conversations, **options):
            told += [one.title + f" ({one.form})" * bool(one.form)]
            told += ["      " + "".join(map(str, one.pieces))] * bool(one.pieces)
            if one.input_ids is not None:
                told += [f"      {list(one.input_ids)}", f"      {list(one.loss_mask or ())}"]
        told.append("")
    assert_told("masks", "\n".join(told))
