"""What is proven of the chat templates that lie in the wheels of trl and axolotl: `nox -s masks`,
which fetches them. Run as a script with their folder, it writes docs/masks.md.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from easypipe import ConversationMask, masks
from easypipe.previews.masks import NAMES, SAMPLES, TOKEN, spellings
from easypipe.transforms.chat.render import ChatTemplate
from easypipe.transforms.refused import Refused

FOLDER = os.environ.get("EASYPIPE_TEMPLATES")
# What the package `renderers` says of the same conversations (test_renderers.py), for the page.
TEMPLATES, CONVERSATIONS, SAME, DIFFERENT = 35, 443, 435, {"glm-4.5"}
TRAINING = "_training"  # how trl names the marked sibling of a template
if FOLDER is None and __name__ != "__main__":
    pytest.skip("needs the templates of two wheels: nox -s masks", allow_module_level=True)


def user(said: str) -> dict:
    return {"role": "user", "content": said}


def says(said: str, *calls: tuple[str, dict], **more: str) -> dict:
    asked = [
        {"id": f"abcdefgh{n}", "type": "function", "function": {"name": name, "arguments": given}}
        for n, (name, given) in enumerate(calls)
    ]
    return {
        "role": "assistant",
        "content": said,
        **more,
        **({"tool_calls": asked} if asked else {}),
    }


def result(said: str, name: str = "get_weather", n: int = 0) -> dict:
    return {"role": "tool", "name": name, "tool_call_id": f"abcdefgh{n}", "content": said}


BERN = ("get_weather", {"city": "Bern"})
TOOLS = SAMPLES["a tool call"]["tools"]
TALKS = {
    **SAMPLES,
    "three turns": [user("Hi"), says("Hello there!"), user("Who?"), says("Me."), user("Bye"), says("Soon.\n\nYes.")],
    "the same words": [user("yes"), says("yes"), user("yes"), says("yes")],
    "white space": [user(" a "), says("  b\n"), user("c\n"), says("d ")],
    "code": [user("Code?"), says("```python\nprint('<b>')\n```\n| a | b |\n")],
    "other scripts": [user("héé 😀"), says("日本語 — ok\u200d")],
    "two thoughts": [
        user("2+2?"), says("4", reasoning_content="Twice two."),
        user("3+3?"), says("6", reasoning_content="Twice three."),
    ],
    "a thought in the words": [user("2+2?"), says("<think>\nTwice two.\n</think>\n\n4")],
    "a thought before a call": [
        user("Warm?"), says("", BERN, reasoning_content="I must look."), result("19"),
        says("19 degrees.", reasoning_content="It says 19."),
    ],
    "two calls": [
        user("Both?"), says("", BERN, ("add", {"a": 1, "b": 2.5})), result("19"),
        result("3.5", "add", 1), says("19 and 3.5."),
    ],
    "words and a call": [user("Warm?"), says("Let me look.", BERN), result("19"), says("19."), user("Ta"), says("Yes.")],
    "calls in turn": [
        user("Warm?"), says("", BERN), result("19"), says("", ("get_weather", {"city": "Rome"})),
        result("25"), says("19 and 25."),
    ],
    "a call without arguments": [user("Warm?"), says("", ("get_weather", {})), result("{}"), says("19.")],
    "a call that is last": [user("Warm?"), says("", BERN)],
}  # fmt: skip


@functools.cache
def templates() -> dict[str, str]:
    """By the wheel's name and their own."""
    found = sorted(Path(FOLDER or sys.argv[1]).rglob("*.jinja"))
    wheels = ("trl", "axolotl")
    return {
        f"{next(w for w in wheels if w in path.parts)}/{path.stem}": path.read_text()
        for path in found
    }


def stock() -> list[str]:
    return [name for name in templates() if not name.endswith(TRAINING)]


@functools.cache
def found(name: str) -> dict[str, ConversationMask]:
    return {one.name: one for one in masks(templates()[name])}


def trained(
    name: str,
    talk: dict,
    names: Mapping[str, str] = NAMES,
    day: str = "2026-01-31",
    ends: tuple[str, ...] = (),
) -> tuple[str, set[int]] | None:
    """The text, and its characters that are trained, of the first spelling that is proven."""
    source = templates()[name]
    closers = tuple(sorted({*TOKEN.findall(source), *names.values()}))
    template = ChatTemplate(source, None, names, closers, "assistant", day, name, end_tokens=ends)
    for answer in template.render([row for _, row in spellings(talk)]):
        if not isinstance(answer, Refused):
            return answer.text, {i for a, b in answer.spans for i in range(a, b)}
    return None


def proven(kind: str) -> int:
    return sum(found(name)[kind].reason is None for name in stock())


def test_how_many_are_proven() -> None:
    assert len(stock()) == 77
    assert proven("one turn") == 77
    assert proven("two turns with system") == 73  # two templates refuse a system message
    assert proven("a tool call") == 42  # all that print it


@pytest.mark.parametrize("kind", TALKS)
def test_nothing_is_trained_that_the_marked_sibling_does_not_train(kind: str) -> None:
    talk = TALKS[kind]
    talk = talk if isinstance(talk, dict) else {"messages": talk, "tools": TOOLS}
    seen: Counter[str] = Counter()
    for name in stock():
        if name + TRAINING not in templates():
            continue
        one, other = trained(name, talk), trained(name + TRAINING, talk)
        # trl's copy for GLM also writes what the model writes behind the last answer
        if one is not None and other is not None and other[0].startswith(one[0]):
            seen["compared"] += 1
            extra = one[1] - other[1]
            assert not extra, (name, "".join(one[0][i] for i in sorted(extra)))
    assert seen["compared"] >= 12


def page() -> Iterator[str]:
    names = stock()
    yield "# Masks of well-known templates\n"
    yield (
        "For each chat template, this table shows whether [`easypipe masks`](conversations.md#masks-for-other-trainers) can "
        "prove which tokens to train on, without generation markers or a tokenizer. The templates are those in the wheels of "
        "trl 1.16.0 and axolotl 0.19.0. A cell contains `yes`, the form that messages must have, or the reason that the mask "
        "is not proven. easypipe does not guess: it refuses a row if its mask is not proven. `nox -s masks` writes this page.\n"
    )
    yield (
        "`nox -s renderers` compares these masks with those of the package `renderers` 0.1.12, which renders the conversations "
        "of some model families in Python and marks the tokens that the model itself generates. The comparison uses "
        f"{len(TALKS)} conversations. In {CONVERSATIONS} cases, the text of the package is equal to the output of a template; "
        f"{TEMPLATES} templates have such cases. In {SAME} of these cases both masks are equal, if `<|tool_response>` is one "
        "of the stop tokens of Gemma 4, as in the model's generation_config.json. In the other cases, all of GLM-4.5, the "
        "model first generates a line break. easypipe and TRL's copy of the template train on this line break; `renderers` "
        "does not.\n"
    )
    yield "| template | " + " | ".join(SAMPLES) + " |\n|" + " --- |" * (len(SAMPLES) + 1)
    yield "| proven of {} | {} |".format(
        len(names), " | ".join(f"**{proven(kind)}**" for kind in SAMPLES)
    )
    for name in names:
        cells = [found(name)[kind] for kind in SAMPLES]
        said = [cell.form or "yes" if cell.reason is None else why(cell.reason) for cell in cells]
        yield f"| {name} | " + " | ".join(said) + " |"


def why(reason: str) -> str:
    word, _, detail = reason.partition(": ")
    said = detail.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    return ("the template refuses: " if word == "refused_by_template" else "no: ") + said


if __name__ == "__main__":
    target = Path(__file__).resolve().parents[2] / "docs" / "masks.md"
    target.write_text("\n".join(page()) + "\n")
