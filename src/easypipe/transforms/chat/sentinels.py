"""Proves where a template prints a conversation's texts, by other words; finds reasoning.

A sentinel is a word that the template does not print, put in place of a message's text. Two
renderings are compared, one of the original and one with sentinels. What is between the sentinels
of the second must be in the first, with exactly the original texts (or their trimmed or
JSON-escaped forms) between. Then the positions of all texts are known, and known to be right. This
runs in the worker process and imports little.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from easypipe.transforms.chat.sandbox import KEYS_OF_REASONING, REASONING, Json, Message

MOST_TRIES = 10_000  # the most steps of comparing two renderings

_THINK = re.compile(r"(</?think>)")


class UnprovenError(Exception):
    """Raised if it cannot be known for certain where the trained text is."""


class Place(NamedTuple):
    """Where the text that a sentinel replaces is: from character `start` to `stop`."""

    word: str
    start: int
    stop: int


class Sentinels:
    """The sentinels of a conversation, and the texts that they stand for.

    Attributes:
        value: The text that each word stands for.
        owner: The number of the message that each word belongs to.
        whole: The words that stand for everything that a message says.
        thoughts: The words that stand for reasoning.
        of_tools: The words in tool calls.
        of_calls: For each message, the words of each of its calls.
        pattern: Matches any sentinel.
    """

    def __init__(self, text: str) -> None:
        self._stem = unused_stem(text)
        self.value: dict[str, str] = {}
        self.owner: dict[str, int] = {}
        self.whole: set[str] = set()
        self.thoughts: set[str] = set()
        self.of_tools: set[str] = set()
        self.of_calls: dict[int, list[set[str]]] = {}
        self.pattern = re.compile(rf"{self._stem}\d{{5}}x")

    def fresh(self, value: str, owner: int, *, whole: bool = False) -> str:
        """Returns a new word that stands for `value` of message `owner`."""
        word = f"{self._stem}{len(self.value):05d}x"
        self.value[word], self.owner[word] = value, owner
        if whole:
            self.whole.add(word)
        return word

    def replace(self, i: int, message: Message) -> Message:
        """Returns message `i` with a word in place of each text in it.

        Empty texts stay empty, because templates test for them.
        """
        said = message.get("content")
        thinks = not KEYS_OF_REASONING.isdisjoint(message) and any(
            message.get(key) for key in REASONING
        )
        alone = not message.get("tool_calls") and not thinks
        result = dict(message)
        if isinstance(said, str) and said.strip():
            result["content"] = self._spoken(said, i, whole=alone)
        elif isinstance(said, list):
            result["content"] = [
                {**part, "text": self._spoken(part["text"], i, whole=alone and len(said) == 1)}
                for part in said
            ]
        if message.get("role") != "assistant":
            return result
        thought: dict[str, str] = {}
        for key in REASONING if thinks else ():
            value = message.get(key)
            if isinstance(value, str) and value.strip():
                thought[value] = result[key] = thought.get(value) or self.fresh(value, i)
        self.thoughts.update(thought.values())
        if isinstance(message.get("tool_calls"), list):
            edges, result["tool_calls"] = [len(self.value)], []
            for call in message["tool_calls"]:
                result["tool_calls"].append(self._call(call, i))
                edges.append(len(self.value))
            words = list(self.value)
            self.of_calls[i] = [set(words[a:b]) for a, b in itertools.pairwise(edges)]
            self.of_tools.update(*self.of_calls[i])
        return result

    def _spoken(self, said: str, i: int, *, whole: bool) -> str:
        """Returns words in place of a text and of the reasoning in it.

        `whole` says that the text is everything that the message says.
        """
        pieces = _THINK.split(said) if "think>" in said else [said]
        for n in range(0, len(pieces), 2):
            if pieces[n].strip():
                pieces[n] = self.fresh(pieces[n], i, whole=whole and len(pieces) == 1)
                if "<think>" in pieces[max(n - 1, 0) : n] or pieces[n + 1 : n + 2] == ["</think>"]:
                    self.thoughts.add(pieces[n])
        return "".join(pieces)

    def _call(self, call: Json, i: int) -> Json:
        """Returns a tool call with words in place of its name and arguments."""
        if not isinstance(call, dict):
            return call
        function = call.get("function")
        inner = function if isinstance(function, dict) else call
        new = {
            key: self._leaves(value, i) if key in ("name", "arguments", "parameters") else value
            for key, value in inner.items()
        }
        return {**call, "function": new} if inner is not call else new

    def _leaves(self, node: Json, i: int) -> Json:
        """Returns a JSON value with words in place of its texts."""
        if isinstance(node, str):
            return self.fresh(node, i) if node.strip() else node
        if isinstance(node, list):
            return [self._leaves(item, i) for item in node]
        return (
            {key: self._leaves(item, i) for key, item in node.items()}
            if isinstance(node, dict)
            else node
        )


def without_reasoning(message: Message) -> Message:
    """Returns a message as if it had been said without reasoning."""
    said = {key: value for key, value in message.items() if key not in REASONING}
    content = said.get("content")
    if isinstance(content, str):
        said["content"] = content.rpartition("</think>")[2]
    elif isinstance(content, list):
        texts = [part["text"].rpartition("</think>")[2] for part in content]
        said["content"] = [
            {**part, "text": text} for part, text in zip(content, texts, strict=True)
        ]
    return said


def has_reasoning(message: Message) -> bool:
    """Whether a message holds reasoning."""
    return any(message.get(key) for key in REASONING) or "think>" in str(message.get("content"))


def unused_stem(text: str) -> str:
    """Returns a word that is not in `text`."""
    stem = "Sentinel"
    while stem in text:
        stem = f"S{hashlib.sha256(stem.encode()).hexdigest()[:12]}"
    return stem


def align(text: str, other: str, words: Sentinels) -> list[Place]:
    """Finds where the texts that the words stand for are in `text`.

    Putting them back into `other`, the rendering with sentinels, results in exactly `text`.

    Raises:
        UnprovenError: That is not possible.
    """
    gaps, found = words.pattern.split(other), words.pattern.findall(other)
    # a word of this form that is printed only in addition to the words stands for nothing
    if not text.startswith(gaps[0]) or not words.value.keys() >= set(found):
        raise UnprovenError("the template writes other things around other words")
    tries = 0
    stack: list[Iterator[tuple[int, int]]] = []
    places: list[Place] = []
    at = len(gaps[0])
    while True:
        if len(stack) < len(found):
            word = found[len(stack)]
            stack.append(
                _fits(
                    text,
                    at,
                    words.value[word],
                    gaps[len(stack) + 1],
                    last=len(stack) + 1 == len(found),
                )
            )
        elif at == len(text):
            return places
        while stack:
            tries += 1
            step = next(stack[-1], None) if tries < MOST_TRIES else None
            if step is not None:
                start, stop = step
                del places[len(stack) - 1 :]
                places.append(Place(found[len(stack) - 1], start, stop))
                at = stop + len(gaps[len(stack)])
                break
            stack.pop()
        else:
            raise UnprovenError("putting its texts back does not give what the template printed")


def _fits(text: str, at: int, value: str, gap: str, *, last: bool) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of the forms of `value` at `at` in `text` that `gap` follows."""
    for form in forms_of(value):
        stop = at + len(form)
        if (
            text.startswith(form, at)
            and text.startswith(gap, stop)
            and (not last or stop + len(gap) == len(text))
        ):
            yield at, stop


def forms_of(value: str) -> Iterator[str]:
    """Yields a text as templates may print it, each form once.

    These are the text itself, trimmed, and inside JSON or as Python's repr writes it.
    """
    yield value
    plain = [
        value.strip(),
        value.rstrip(),
        value.lstrip(),
        value.strip("\n"),
        value.rstrip("\n"),
        value.lstrip("\n"),
    ]
    escaped = [json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]]
    escaped.append(repr(value)[1:-1])
    yield from (form for form in dict.fromkeys(plain + escaped) if form != value)
