"""TRL's shapes of rows, and what TRL 1.16 makes of them, written from its documentation.

tests/interop/test_trl.py compares this with TRL itself, where that is installed (`nox -s trl`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import transformers

from chat_support import chat_tokenizer
from easypipe.transforms.prompt.templates import CHATML

Row = dict[str, Any]
Sample = tuple[list[int], list[int]]  # tokens, and 1 for each that is a target


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def rows(shape: str, count: int = 5) -> list[Row]:
    return [SHAPES[shape](n) for n in range(count)]


def both(question: str, answer: str, **more: Any) -> list[Row]:
    return [user(question), said(answer, **more)]


SHAPES: dict[str, Any] = {
    "text": lambda n: {"text": f"The sky is blue {n}."},
    "messages": lambda n: {"messages": both(f"Sure {n}?", "Yes.") + both("And now?", f"{n}.")},
    "messages tools": lambda n: {
        "messages": [
            user(f"Add {n}."),
            said("", tool_calls=[CALL]),
            {"role": "tool", "name": "add", "content": f"{n}"},
            said(f"{n}."),
        ],
        "tools": json.dumps(TOOLS),
    },
    "prompts": lambda n: {"prompt": [user(f"What is {n}?")]},
    "completion": lambda n: {"prompt": f"The sky {n} is", "completion": f" blue {n}."},
    "completion talk": lambda n: {
        "prompt": [{"role": "system", "content": "Be brief."}, user(f"What is {n}?")],
        "completion": [said(f" {n}. ")],
    },
    "completion turns": lambda n: {
        "prompt": [*both("Sure?", "Yes."), user(f"What is {n}?")],
        "completion": [said(f"{n}."), *both("And now?", "The same.")],
    },
    "completion tools": lambda n: {
        "prompt": [user(f"Add {n}.")],
        "completion": [
            said("", tool_calls=[CALL]),
            {"role": "tool", "name": "add", "content": f"{n}"},
            said(f"{n}."),
        ],
        "tools": TOOLS,
    },
    "preference": lambda n: {
        "prompt": f"The sky {n} is",
        "chosen": f" blue {n}.",
        "rejected": f" green {n}.",
    },
    "preference implicit": lambda n: {
        "chosen": f"The sky {n} is blue.",
        "rejected": f"The sky {n} is green.",
    },
    "preference talk": lambda n: {
        "prompt": [user(f"What is {n}?")],
        "chosen": [said(f"It is {n}.")],
        "rejected": [said("It may be.")],
    },
    "preference talk implicit": lambda n: {
        "chosen": [user("Sure?"), said("Yes."), *both(f"What is {n}?", f"It is {n}.")],
        "rejected": [user("Sure?"), said("Yes."), *both(f"What is {n}?", "It may be.")],
    },
    "preference tools": lambda n: {
        "prompt": [user(f"Add {n}.")],
        "chosen": [said(f"It is {n}.")],
        "rejected": [said("No.")],
        "tools": json.dumps(TOOLS),
    },
    "unpaired": lambda n: {
        "prompt": f"The sky {n} is",
        "completion": f" blue {n}.",
        "label": n % 2 == 0,
    },
    "unpaired talk": lambda n: {
        "prompt": [user(f"What is {n}?")],
        "completion": [said(f"It is {n}.")],
        "label": n % 2 == 0,
    },
}  # fmt: skip


def hf_tokenizer(template: str = CHATML) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def sft(row: Row, tokenizer: Any, *, assistant_only: bool = False) -> Sample:
    """A row of language modelling, or a prompt with its completion, as SFTTrainer trains it."""
    if "prompt" not in row:
        if "messages" not in row:
            ids = _tokens(_closed(row["text"], tokenizer), tokenizer)
            return ids, [1] * len(ids)
        return _talk(row["messages"], row, tokenizer, assistant_only=assistant_only)
    start, (ids, mask) = _answer(row, row["completion"], tokenizer, assistant_only=assistant_only)
    return ids, [flag if i >= start else 0 for i, flag in enumerate(mask)]


def dpo(row: Row, tokenizer: Any) -> tuple[Sample, Sample]:
    """The preferred answer behind its prompt, and the other one, as DPOTrainer compares them."""
    if "prompt" not in row:
        row = _with_prompt(row)
    made = [_answer(row, row[name], tokenizer) for name in ("chosen", "rejected")]
    start = min(first for first, _ in made)
    better, worse = ((ids, [int(i >= start) for i in range(len(ids))]) for _, (ids, _) in made)
    return better, worse


def _with_prompt(row: Row) -> Row:
    """The row with what both answers begin with, messages or characters, as their prompt."""
    chosen, rejected = row["chosen"], row["rejected"]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    at = sum(1 for _ in same)
    if at and chosen[at - 1] == " ":
        at -= 1
    return {**row, "prompt": chosen[:at], "chosen": chosen[at:], "rejected": rejected[at:]}


def _answer(
    row: Row, answer: Any, tokenizer: Any, *, assistant_only: bool = False
) -> tuple[int, Sample]:
    """The first token behind the prompt, and the whole."""
    if isinstance(answer, str):
        alone = _tokens(row["prompt"], tokenizer)
        whole = _tokens(row["prompt"] + _closed(answer, tokenizer), tokenizer)
        made = whole, [1] * len(whole)
    else:
        alone, _ = _talk(row["prompt"], row, tokenizer, add_generation_prompt=True)
        made = _talk([*row["prompt"], *answer], row, tokenizer, assistant_only=assistant_only)
    pairs = zip(alone, made[0], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)), made


def _talk(
    messages: Sequence[Any],
    row: Row,
    tokenizer: Any,
    *,
    assistant_only: bool = False,
    **options: Any,
) -> Sample:
    tools = row.get("tools")
    made = tokenizer.apply_chat_template(
        list(messages),
        tools=json.loads(tools) if isinstance(tools, str) else tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=assistant_only,
        **options,
        **(row.get("chat_template_kwargs") or {}),
    )
    ids = list(made["input_ids"])
    return ids, list(made["assistant_masks"]) if assistant_only else [1] * len(ids)


def _tokens(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def _closed(text: str, tokenizer: Any) -> str:
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token
