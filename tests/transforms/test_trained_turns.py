"""Whose turns are trained (roles_to_train), and what becomes of what they think (reasoning)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_support import CHATML, MARKED, REASONING, SHARED, chat_tokenizer, needs_shared, talk
from easypipe import (
    ConfigError,
    DatasetConfig,
    LengthPolicy,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    PromptConfig,
    PromptEngine,
    SourceError,
    load_tokenizer,
)
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, ROW_NUMBER
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
    for flag in ({"train": False}, {"weight": 0}):  # what is said of a question that is not trained
        messages[1] = {"role": "user", "content": "Why?"} | flag
        assert trained({"messages": messages}) == [f"So.{END}"]


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


def ranges(*given: tuple[int, int, bool]) -> list[dict[str, Any]]:
    return [{"begin_offset": a, "end_offset": b, "train": train} for a, b, train in given]


def test_characters_of_a_message_are_trained_as_it_says() -> None:
    """As axolotl's documentation has it: the last character is within, the end of the turn too."""
    messages = talk("Hello", "I'm very good", "And now?", "  No, not now. ", "Why?", "So.")
    messages[1]["spans"] = ranges((0, 2, True), (4, 7, False), (9, 12, True))
    messages[3]["spans"] = ranges((2, 3, True))
    row, fields = {"messages": messages}, {"train_ranges": "spans"}
    wanted = ["I'm", "good", END, "No", END, f"So.{END}"]
    for source in (PLAIN, MARKED):
        assert trained(row, template=source, message_fields=fields) == wanted
    strips = PLAIN.replace("['content']", "['content'] | trim")
    assert trained(row, template=strips, message_fields=fields)[3:5] == ["No", END]
    last = trained(row, template=PLAIN, message_fields=fields, train_on_eos="last")
    assert last == ["I'm", "good", "No", f"So.{END}"]
    alone = trained(row, template=PLAIN, message_fields=fields, roles_to_train=())
    assert alone == wanted[:-1]
    messages[1]["train"] = False
    assert trained(row, template=PLAIN, message_fields=fields) == wanted[3:]
    del messages[1]["train"]
    messages[1]["spans"] = []  # trains nothing, as axolotl's
    assert trained(row, template=PLAIN, message_fields=fields) == wanted[3:]
    messages[1]["spans"] = ranges((0, 2, False))
    assert trained(row, template=PLAIN, message_fields=fields) == [END, *wanted[3:]]


@pytest.mark.parametrize(
    "given", [ranges((0, 3, True)), ranges((2, 1, True)), [{"begin_offset": 0}], "all", [1]]
)
def test_ranges_that_are_not_in_a_message_are_refused(given: Any) -> None:
    messages = talk("Why?", "So.")
    messages[1]["train_ranges"] = given
    with pytest.raises(SourceError, match="bad_train_flag: the train_ranges of message 1 are not"):
        trained({"messages": messages})


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
        ({"roles_to_train": ["gpt"]}, r"roles_to_train\[0\]: 'gpt' is not a role .have: assistant"),
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


# what messages think: kept, seen without being a target, or a sample for each turn


def thought(answer: str, reasoning: str, *, inside: bool = False) -> dict[str, Any]:
    if inside:
        return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{answer}"}
    return {"role": "assistant", "content": answer, "reasoning_content": reasoning}


def reasons(*, inside: bool = False) -> dict[str, Any]:
    (why,), (now,) = talk("Why?"), talk("And now?")
    return {
        "messages": [why, thought("So.", "hm", inside=inside), now, thought("No.", "hmm", inside=inside)]
    }  # fmt: skip


@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_is_context_and_no_target_where_it_is_masked(inside: bool) -> None:
    row = reasons(inside=inside)
    keeps = trained(row, template=REASONING)
    assert keeps == [f"So.{END}", f"<think>\nhmm\n</think>\n\nNo.{END}"]
    assert trained(row, template=REASONING, reasoning="keep") == keeps
    assert trained(row, template=REASONING, reasoning="mask") == [f"So.{END}", f"No.{END}"]
    plain = trained(row, template="chatml", reasoning="mask")  # marked, and prints all reasoning
    assert [text.strip() for text in plain] == [f"So.{END}", f"No.{END}"]
    whole = PromptEngine(chat_tokenizer(), PromptConfig(template="chatml", reasoning="mask"))
    assert "hm\n</think>" in whole.render(row).text


def test_a_thought_that_the_row_only_closes_is_masked_up_to_there() -> None:
    """Where templates open it in the prompt of the model, rows hold what the model wrote."""
    row = {"messages": talk("Why?", "hm\n</think>\n\nSo.")}
    for template in ("chatml", CHATML):
        assert trained(row, template=template, reasoning="mask") == [f"\n\nSo.{END}"]


def test_a_thought_that_the_row_only_opens_is_masked_whole() -> None:
    row = {"messages": talk("Why?", "So.", "And now?", "<think>\nhm")}
    for template in ("chatml", CHATML):
        assert trained(row, template=template, reasoning="mask") == [f"So.{END}"]


def test_the_empty_thought_of_an_answer_without_one_is_no_reasoning_of_the_row() -> None:
    assert trained(template=REASONING, reasoning="mask") == trained(template=REASONING)
    assert trained(template=REASONING, reasoning="mask", train_empty_thinking=False) == [
        f"So.{END}",
        f"No.{END}",
    ]


def test_calls_behind_reasoning_are_trained_with_what_opens_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    calls = thought("", "hm") | {"tool_calls": [call]}
    messages = [*talk("Why?"), calls, {"role": "tool", "content": "3"}, thought("Three", "ah")]
    unmarked = CHAT_TEMPLATES["chatml"].replace("{%- generation -%}", "")
    for source in ("chatml", unmarked.replace("{%- endgeneration -%}", "")):
        assert trained({"messages": messages}, template=source, reasoning="mask") == [
            f'<tool_call>\n{{"name": "f", "arguments": {{"x": 1}}}}\n</tool_call>{END}',
            f"Three{END}",
        ]


HARMONY = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|im_end|>{% else %}{% if m.reasoning_content and loop.last %}"
    "<|im_start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|im_end|>"
    "{% endif %}<|im_start|>assistant<|channel|>final<|message|>{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


def test_what_only_the_last_answer_begins_with_is_trained_behind_its_reasoning() -> None:
    thinks = "+ ('[' + message.reasoning_content + ']' if message.reasoning_content else '') "
    begins = "+ ('Answer: ' if loop.last and message.role == 'assistant' else '') "
    source = CHATML.replace("+ message['content']", f"{thinks}{begins}+ message['content']")
    assert trained(reasons(), template=source, reasoning="mask") == [
        f"So.{END}",
        f"Answer: No.{END}",
    ]


def test_channels_of_harmony_are_told_apart() -> None:
    row = {"messages": [*talk("Why?"), thought("So.", "hm")]}
    assert trained(row, template=HARMONY, reasoning="mask") == [
        f"<|channel|>final<|message|>So.{END}"
    ]


def test_nothing_is_trained_of_what_only_thinks_and_words_before_it_are_refused() -> None:
    row = reasons()
    row["messages"][3]["content"] = ""
    assert trained(row, template=REASONING, reasoning="mask") == [f"So.{END}"]
    between = {"messages": [*talk("Why?"), {"role": "assistant", "content": "a<think>b</think>c"}]}
    with pytest.raises(SourceError, match="unproven_spans: reasoning comes after other words"):
        trained(between, reasoning="mask")


@pytest.mark.parametrize("reasoning", ["mask", "per_turn"])
def test_reasoning_that_the_template_never_prints_is_refused(
    reasoning: str, tmp_path: Path
) -> None:
    options = {"template": CHATML, "reasoning": reasoning}
    with pytest.raises(SourceError, match=r"row 0.*unprinted_reasoning") as refused:
        samples([reasons()], tmp_path, **options)
    assert "prints no reasoning_content" in str(refused.value)
    assert "Give a chat_template that prints it, or leave 'reasoning' out" in str(refused.value)
    # what stands in the content is printed, and what is kept asks for nothing
    assert samples([reasons(inside=True)], tmp_path, **options)[0]
    assert trained(reasons(), template=CHATML) == [f"So.{END}", f"No.{END}"]
    inside = trained(reasons(inside=True), template=CHATML, reasoning="mask")
    assert [text.strip() for text in inside] == [f"So.{END}", f"No.{END}"]


def test_reasoning_that_is_printed_only_beside_calls_is_printed() -> None:
    printed = "(message.reasoning_content if message.tool_calls else '') + message['content'] "
    source = CHATML.replace("message['content'] ", printed)
    assert trained(reasons(), template=source, reasoning="mask") == [f"So.{END}", f"No.{END}"]


def samples(rows: Any, folder: Path, **options: Any) -> tuple[list[tuple[int, str, str]], Pipeline]:
    """((row, text, what of it is trained), ...) of the documents that are stored."""
    extra = options.pop("dataset", {})
    config = PipelineConfig(
        datasets=[
            DatasetConfig(
                name="d",
                data_files=rows,
                tokenizer=chat_tokenizer(),
                prompt=PromptConfig(**({"template": REASONING} | options)),
                **extra,
            )
        ],
        pack=PackStageConfig(seq_length=512),
        load=LoadStageConfig(batch_size=1, drop_last=False),
        seed=1,
        cache_dir=folder,
    )
    made = Pipeline.from_config(config).source().tokenize()
    batch = made.get_data()["d"].read(0, 0, len(rows))
    decode = load_tokenizer(chat_tokenizer()).decode
    found = [
        (row[ROW_NUMBER], decode(row[INPUT_IDS]), decode([i for i, m in zip(row[INPUT_IDS], row[LOSS_MASK], strict=True) if m]))
        for row in batch.to_pylist()
    ]  # fmt: skip
    return found, made


def test_a_sample_for_each_turn_whose_reasoning_is_dropped_later(tmp_path: Path) -> None:
    """Each is what the template writes when the conversation ends with that turn."""
    plain = {"messages": talk("Why?", "So.", "And now?", "No.")}
    rows = [plain, reasons(), reasons(inside=True), plain]
    found, made = samples(rows, tmp_path, reasoning="per_turn")
    assert [row for row, *_ in found] == [0, 1, 1, 2, 2, 3]
    first, last = f"<think>\nhm\n</think>\n\nSo.{END}", f"<think>\nhmm\n</think>\n\nNo.{END}"
    assert [targets for *_, targets in found[1:3]] == [first, last] == [t for *_, t in found[3:5]]
    one = PromptEngine(chat_tokenizer(), PromptConfig(template=REASONING))
    for (_, text, _), stop in zip(found[1:3], (2, 4), strict=True):
        assert text == one.render({"messages": reasons()["messages"][:stop]}).text
    assert found[0][1] == one.render(plain).text  # without reasoning nothing is dropped
    ledger = made.ledger()
    ledger.check()
    assert ledger.find("tokenize", "d", "rows").into == {"read": 4, "pieces": 2}
    engine = PromptEngine(chat_tokenizer(), PromptConfig(template=REASONING, reasoning="per_turn"))
    assert engine.render(plain).text == found[0][1]
    with pytest.raises(SourceError, match="split: it becomes 2 samples"):
        engine.encode(rows[1])


def test_turns_that_a_later_sample_writes_alike_share_it(tmp_path: Path) -> None:
    """Calls and results behind one question keep their reasoning."""
    again = [thought("I look.", "one"), {"role": "tool", "content": "3"}, thought("Three", "two")]
    row = {"messages": [*talk("Why?"), thought("So.", "hm"), *talk("And now?"), *again]}
    found, _ = samples([row], tmp_path, reasoning="per_turn")
    assert [targets.count("<think>") for *_, targets in found] == [1, 2]
    kept, _ = samples([row], tmp_path, reasoning="per_turn", template="chatml")
    assert [targets.count("<think>") for *_, targets in kept] == [3]  # which drops none
    last, _ = samples([row], tmp_path, reasoning="per_turn", train_on="last_assistant")
    assert [targets for *_, targets in last] == [f"<think>\ntwo\n</think>\n\nThree{END}"]
    row["messages"][1]["train"] = False
    flagged, _ = samples([row], tmp_path, reasoning="per_turn")
    assert [targets.count("<think>") for *_, targets in flagged] == [2]


def test_a_turn_that_eos_ends_is_a_sample_of_its_own(tmp_path: Path) -> None:
    """Where the template ends only turns that others follow, the whole writes another end."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}"
        "{{ '' if loop.last else '\n' }}{% endfor %}"
        "{{ '\nassistant: ' if add_generation_prompt else '' }}"
    )
    found, _ = samples([reasons()], tmp_path, reasoning="per_turn", template=template)
    assert [targets for *_, targets in found] == [f"hmSo.{END}", f"hmmNo.{END}"]


def test_a_sample_that_is_too_long_is_counted_beside_the_others(tmp_path: Path) -> None:
    rows = [reasons(), reasons()]
    rows[1]["messages"][0]["content"] = "Why? " * 99
    length = {"length": LengthPolicy(policy="trim_oldest_turns")}
    extra = {**length, "tokenizer_kwargs": {"max_length": 60}}
    _, made = samples(rows, tmp_path, reasoning="per_turn", dataset=extra)
    entry = made.ledger().find("tokenize", "d", "rows")
    assert entry.into == {"read": 2, "pieces": 2}
    assert entry.out == {"written": 3, "too_long": 1}


def test_a_conversation_that_is_refused_at_a_turn_is_refused_whole(tmp_path: Path) -> None:
    strict = (
        REASONING + "{% if messages|length == 2 %}{{ raise_exception('too short') }}{% endif %}"
    )
    with pytest.raises(SourceError, match=r"refused_by_template.*too short"):
        samples([reasons()], tmp_path, reasoning="per_turn", template=strict)


@pytest.mark.parametrize(
    "length",
    [{}, *({"length": LengthPolicy(policy=name)} for name in ("trim_oldest_turns", "split"))],
    ids=["no length", "trimmed", "split"],
)
def test_samples_per_turn_have_their_places_streamed_and_resumed(
    tmp_path: Path, length: dict[str, Any]
) -> None:
    extra = {**length, "tokenizer_kwargs": {"max_length": 60}} if length else {}
    rows = [reasons(inside=n % 2 == 1) for n in range(12)]
    for n, row in enumerate(rows):
        row["messages"][0]["content"] = f"{n}?"
    stored, made = samples(rows, tmp_path, reasoning="per_turn", dataset=extra)
    config = made.get_context().config
    for streaming in (False, True):
        more = {"streaming": True, "num_streams": 1} if streaming else {}
        whole = Pipeline.from_config(dataclasses.replace(config, **more))
        whole = whole.source().tokenize().pack().load()
        loader = whole.build()
        batches = [{k: np.asarray(v) for k, v in batch.items()} for batch in loader]
        assert len(batches) > 2
        half = iter(loader)
        next(half)
        state = loader.state()
        del half
        loader.restore(state)
        for batch, same in zip(batches[1:], loader, strict=True):
            for name, values in batch.items():
                np.testing.assert_array_equal(values, np.asarray(same[name]))
        ledger = loader.ledger() if streaming else whole.ledger()
        ledger.check()
        assert any(entry.stage == "lengths" for entry in ledger.entries) == bool(length)
        if not streaming:
            segments = loader.explain(0).rows[0].segments
            decode = load_tokenizer(chat_tokenizer()).decode
            shown = {(one.row, decode(one.ids[: one.document_tokens])) for one in segments}
            assert len(shown) == len(segments)
            assert shown <= {(row, text) for row, text, _ in stored}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"train_on": "all", "reasoning": "mask"},
            "reasoning: 'mask' has no effect if everything is",
        ),
        (
            {"label_column": "a", "reasoning": "mask"},
            "reasoning: 'mask' has no effect if everything",
        ),
        (
            {"label_column": "a", "train_on": "assistant", "reasoning": "per_turn"},
            "reasoning: 'per_turn' makes several samples of a row, and label_column names",
        ),
        ({"rejected_column": "a", "reasoning": "per_turn"}, "rejected_column names one answer"),
        ({"desirable_column": "a", "reasoning": "per_turn"}, "desirable_column names one answer"),
        (
            {"train_on_eos": "last", "reasoning": "per_turn"},
            "train_on_eos: 'last' has no effect with reasoning 'per_turn'",
        ),
        ({"format_type": "text", "reasoning": "keep"}, "reasoning: has no effect on format_type"),
    ],
)
def test_reasoning_is_refused_where_it_means_nothing(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PromptConfig(**options)
