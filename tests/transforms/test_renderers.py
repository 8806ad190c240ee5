"""A second opinion on masks: those of the package `renderers`, which writes the conversations of
some model families by code: `nox -s renderers`.

Where its text is the text of a template in the wheels of trl and axolotl, what it says the model
itself wrote (`sampled_mask`) is compared, character by character, with what is trained here.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from easypipe.previews.masks import NAMES, TOKEN, spellings
from transforms.test_wheel_templates import (
    CONVERSATIONS,
    DIFFERENT,
    SAME,
    TALKS,
    TEMPLATES,
    TOOLS,
    stock,
    trained,
)

base = pytest.importorskip("renderers.base", reason="nox -s renderers installs it")
# `default` renders by the template itself; gpt-oss asks for a vocabulary file, which the package
# openai-harmony downloads; deepseek-v4 has no template.
WITHOUT = {"default", "gpt-oss", "deepseek-v4"}
# Special tokens that templates ask for by their role, and a word in the names of such templates.
DEEPSEEK = (
    "deepseek",
    {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
)
SPECIAL: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "gemma4": ("gemma", {"bos_token": "<bos>"}),
    "llama-3": ("llama", {"bos_token": "<|begin_of_text|>"}),
    "deepseek-v3": DEEPSEEK,
    "deepseek-r1": DEEPSEEK,
}
# The tokens that end what the model writes, by its published generation_config.json.
ENDS = {"gemma4": ("<eos>", "<turn|>", "<|tool_response>")}
DAY = "2024-07-26"  # which the renderer of Llama 3 tells
# What is trained here alone, by renderer: trl's marked template trains the line break too, since the
# generation prompt ends before it.
KNOWN = {"glm-4.5": "\n"}


class Characters:
    """A tokenizer with a token for every character, and for every special token it is asked for."""

    name_or_path, unk_token_id = "characters", None

    def __init__(self) -> None:
        self.special: list[str] = []

    def convert_tokens_to_ids(self, token: str) -> int:
        if token not in self.special:
            self.special.append(token)
        return 0x110000 + self.special.index(token)

    @property
    def eos_token_id(self) -> int:
        return self.convert_tokens_to_ids(NAMES["eos_token"])

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.convert_tokens_to_ids(text)] if TOKEN.fullmatch(text) else [*map(ord, text)]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(self.piece, ids))

    def piece(self, number: int) -> str:
        return chr(number) if number < 0x110000 else self.special[number - 0x110000]

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        offsets = [(i, i + 1) for i in range(len(text))]
        return {"input_ids": [*map(ord, text)], "offset_mapping": offsets}


def written(kind: type, talk: Mapping[str, Any]) -> Iterator[tuple[str, set[int]]]:
    """Yields the texts that a renderer writes of a conversation, and what the model wrote."""
    tokenizer = Characters()
    renderer = kind(tokenizer)
    for _, row in spellings(talk):
        try:
            made = renderer.render(row["messages"], tools=row.get("tools"))
        except (TypeError, ValueError):  # it takes no such messages
            continue
        said, at = set[int](), 0
        pieces = [tokenizer.piece(number) for number in made.token_ids]
        for piece, sampled in zip(pieces, made.sampled_mask, strict=True):
            said |= {*range(at, at + len(piece))} if sampled else set()
            at += len(piece)
        yield "".join(pieces), said


@functools.cache
def ours(template: str, title: str, like: str) -> tuple[str, set[int]] | None:
    names = NAMES | dict(SPECIAL.get(like, ("", {}))[1])
    return trained(template, talk_of(title), names, DAY, ENDS.get(like, ()))


def talk_of(title: str) -> Mapping[str, Any]:
    talk = TALKS[title]
    return talk if isinstance(talk, dict) else {"messages": talk, "tools": TOOLS}


@functools.cache
def compared() -> dict[tuple[str, str], dict[str, tuple[str, str]]]:
    """By template and conversation, the characters trained here alone and there, by renderer."""
    base._populate_registry()
    found: dict[tuple[str, str], dict[str, tuple[str, str]]] = defaultdict(dict)
    for name, kind in base.RENDERER_REGISTRY.items():
        like, word = name if name in SPECIAL else "", SPECIAL.get(name, ("",))[0]
        for title in TALKS if name not in WITHOUT else ():
            theirs = dict(written(kind, talk_of(title)))
            for template in stock():
                mine = ours(template, title, like) if word in template else None
                if mine is not None and (said := theirs.get(mine[0])) is not None:
                    found[template, title][name] = tuple(
                        "".join(mine[0][i] for i in sorted(one))
                        for one in (mine[1] - said, said - mine[1])
                    )
    return found


def test_masks_are_those_of_renderers_but_for_a_line_break() -> None:
    for (template, title), by_renderer in compared().items():
        for name, (here, there) in by_renderer.items():
            assert (here.strip(KNOWN.get(name, "")), there) == ("", ""), (template, title, name)


def test_the_figures_of_the_page() -> None:
    pairs = compared()
    same = [at for at, sides in pairs.items() if not any(map(any, sides.values()))]
    assert len({template for template, _ in pairs}) == TEMPLATES
    assert (len(pairs), len(same)) == (CONVERSATIONS, SAME)
    assert {name for sides in pairs.values() for name in sides if any(sides[name])} == DIFFERENT
