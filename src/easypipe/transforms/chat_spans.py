"""Which characters of a rendered conversation are trained: proven, or refused.

sentinel  a word that stands nowhere in the conversation, put in place of a message's text
gap       what the template writes between two sentinels
stop      what the template writes to end a turn

The conversation is rendered twice: as it is, and with sentinels. Both are read side by side: every gap of the second must stand in the
first, with the very text (or its trimmed or JSON-escaped form) between. Then the positions of all texts are known, and known to be right.
Imports nothing: it runs in the worker process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from easypipe.transforms.chat_sandbox import KEYS_OF_REASONING, REASONING, RenderError, Template

OPEN, MASKED_END, TRAINED_END = 0, 1, 2  # what must follow the text: nothing, the EOS token unseen by the loss, or as a target
FLAG = "train"  # a message's own word on whether it is trained
MOST_TRIES = 10_000  # of ways to read two renderings side by side

_THINK = re.compile(r"(</?think>)")


class UnprovenError(Exception):
    """Where the trained text stands cannot be told for certain."""


class Rendered(NamedTuple):
    """spans: ascending character ranges that are trained. end: OPEN where the template itself ended the last turn."""

    text: str
    spans: list[tuple[int, int]]
    end: int


class Stops(NamedTuple):
    """What ends a turn of the assistant that another follows, and the last one; None where nothing does, or nobody can tell."""

    middle: str | None
    last: str | None


@dataclass
class Spans:
    """Rendering with spans, for one template. closers: the special tokens of the tokenizer."""

    template: Template
    closers: Sequence[str]
    _stops: Stops | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        words = sorted((re.escape(word) for word in self.closers if word.strip()), key=len, reverse=True)
        self._closer = re.compile(rf"\s*(?:{'|'.join(words)})") if words else None
        self._closed = re.compile(rf"(?:{'|'.join(words)})\s*\Z") if words else None
        self._longest = max(map(len, self.closers), default=0)

    def find(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, train_on: str) -> Rendered:
        """train_on: which turns are trained where their own `train` does not say; templates are not told of that key.

        Raises RenderError where the template refuses, UnprovenError where it cannot be told what is trained.
        """
        flags = [message.get(FLAG) for message in messages]
        if any(flag is not None for flag in flags):
            messages = [{key: value for key, value in message.items() if key != FLAG} for message in messages]
        text, marked = self.template.render(messages, tools)
        if train_on == "all":
            return Rendered(text, [(0, len(text))] if text else [], self._end(text, trained=True))
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        asked = {"assistant": turns, "last_assistant": turns[-1:], "completion": [i for i in turns if i == len(messages) - 1]}[train_on]
        trained = [i for i in turns if (i in asked if flags[i] is None else flags[i])]
        if not trained:
            return Rendered(text, [], OPEN)
        if not self.template.marked:
            spans = self._proven(lambda everyone: self._with(text, messages, tools, trained, everyone=everyone))
        elif trained == turns:
            spans = marked
        else:
            spans = self._proven(lambda everyone: self._owned(text, marked, messages, tools, trained, everyone=everyone))
        last = bool(spans) and not text[spans[-1][1] :].strip()
        return Rendered(text, spans, self._end(text, trained=last))

    def stops(self) -> Stops:
        """What ends an assistant's turns, seen on a conversation of two questions and two answers."""
        if self._stops is None:
            self._stops = self._seek_stops()
        return self._stops

    def _end(self, text: str, *, trained: bool) -> int:
        said = text.rstrip()
        if self._closed is not None and self._closed.search(text, max(0, len(said) - self._longest)):  # its words are not all space
            return OPEN
        stop = self.stops().last
        if stop is not None and said.endswith(stop.strip()):
            return OPEN
        return TRAINED_END if trained else MASKED_END

    def _seek_stops(self) -> Stops:
        words = [f"easypipe{name}probe" for name in ("One", "Two", "Three", "Four")]
        roles = ("user", "assistant", "user", "assistant")
        try:
            text, _ = self.template.render([{"role": role, "content": word} for role, word in zip(roles, words, strict=True)])
        except RenderError:
            return Stops(None, None)
        if any(text.count(word) != 1 for word in words):
            return Stops(None, None)
        before, *gaps = re.split("|".join(words), text)
        if len(gaps) != 4 or [text.index(word) for word in words] != sorted(text.index(word) for word in words):
            return Stops(None, None)
        between, tail = gaps[1], gaps[3]
        ends, follows = (self._closer.match(gap) if self._closer is not None else None for gap in (tail, between))
        last = (ends[0] if ends else tail.rstrip()) or None
        if last is not None and between.startswith(last):
            return Stops(last, last)
        if follows is not None and follows[0].strip() not in before:  # else it opens the user's turn
            return Stops(follows[0], last)
        if last is not None:
            return Stops(None, last)
        shared = _shared(between[::-1], before[::-1])
        return Stops(between[: len(between) - shared].rstrip() or None, None)

    def _proven(self, prove: Callable[[bool], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        """What `prove` gives with other words in place of everyone's, else with those of the assistant alone replaced."""
        try:
            return prove(True)
        except (UnprovenError, RenderError):  # a template may look into what users and tools say
            pass
        try:
            return prove(False)
        except RenderError as error:
            raise UnprovenError(f"the template does not render other words in place of these: {error}") from None

    def _aligned(
        self, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, everyone: bool
    ) -> tuple[_Words, Sequence[Mapping[str, Any]], list[_Place]]:
        """Sentinels, the messages with them, and where in `text` stands what they replaced."""
        words = _Words(text, messages)
        changed = [words.replace(i, m) if everyone or m.get("role") == "assistant" else m for i, m in enumerate(messages)]
        other, _ = self.template.render(changed, tools)
        return words, changed, _align(text, other, words)

    def _owned(
        self,
        text: str,
        marked: list[tuple[int, int]],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        trained: list[int],
        *,
        everyone: bool,
    ) -> list[tuple[int, int]]:
        """Of the marked spans those of the turns `trained`: each has to hold texts of one message alone."""
        words, _, places = self._aligned(text, messages, tools, everyone=everyone)
        spans = []
        for a, b in marked:
            owners = {words.owner[place.word] for place in places if place.start < b and a < place.stop}
            whole = all(a <= place.start and place.stop <= b for place in places if place.start < b and a < place.stop)
            if len(owners) != 1 or not whole:
                raise UnprovenError(f"which turn is marked at {text[a:b][:40]!r} cannot be told")
            if owners <= set(trained):
                spans.append((a, b))
        return spans

    def _with(
        self, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, trained: list[int], *, everyone: bool
    ) -> list[tuple[int, int]]:
        words, changed, places = self._aligned(text, messages, tools, everyone=everyone)
        spans = []
        for i in trained:
            here = [place for place in places if words.owner[place.word] == i]
            if not here:
                if any(words.owner[word] == i for word in words.owner):
                    raise UnprovenError(f"the template does not print what message {i} says")
                continue  # an empty turn
            if len({place.word for place in here}) != len(here):
                raise UnprovenError(f"the template prints the text of message {i} more than once")
            if messages[i].get("tool_calls") and not any(place.word in words.of_tools for place in here):
                raise UnprovenError(f"the template does not print the tool calls of message {i}")
            first, last = places.index(here[0]), places.index(here[-1])
            if last - first + 1 != len(here):
                raise UnprovenError(f"the text of message {i} does not stand in one piece")
            plain = len(here) == 1 and here[0].word in words.whole
            before = places[first - 1].stop if first else 0
            after = places[last + 1].start if last + 1 < len(places) else len(text)
            start = here[0].start if plain else before + self._header(text[before : here[0].start], changed, i, tools, words, first)
            spans.append((start, self._close(text, here[-1].stop, after, i, len(messages), places[last + 1 :], words, plain=plain)))
        if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
            raise UnprovenError("trained turns overlap")
        return spans

    def _close(self, text: str, at: int, after: int, i: int, count: int, later: Sequence[_Place], words: _Words, *, plain: bool) -> int:
        """Where the turn of message i ends, its stop included. at: end of its last text; after: start of the next one."""
        gap, stop = text[at:after], self.stops().last if i == count - 1 else self.stops().middle
        if stop is not None and gap.startswith(stop):
            return at + len(stop)
        if plain and stop is not None and (found := re.match(r"\s*", gap)) and gap.startswith(stop.lstrip(), found.end()):
            return at + found.end() + len(stop.lstrip())
        if i == count - 1 and not gap.strip():
            return at  # the EOS token will end it
        if i == count - 1 and plain and self._closer is not None and (found := self._closer.fullmatch(gap.rstrip())):
            return at + found.end()  # a special token and nothing behind it
        if not plain and stop is not None and (i == count - 1 or (later and words.owner[later[0].word] == i + 1)):
            inside = gap.find(stop.strip())
            if inside >= 0:
                return at + inside + len(stop.strip())
        if not plain and i == count - 1 and not later and stop is None:
            return at + len(gap.rstrip())
        raise UnprovenError(f"nothing that is known to end a turn follows message {i}: {gap[:40]!r}")

    def _header(
        self, gap: str, changed: Sequence[Mapping[str, Any]], i: int, tools: Sequence[Any] | None, words: _Words, known: int
    ) -> int:
        """How much of the gap before message i opens the turn, and is not said by the assistant."""
        if i and not known:
            raise UnprovenError(f"where the turn of message {i} begins cannot be told")
        before = changed[:i]
        try:
            asked = _tail(self.template.render(before, tools, prompt=True)[0], words)
            if asked != _tail(self.template.render(before, tools)[0], words) and gap.startswith(asked):
                return len(asked)
        except RenderError:
            pass  # a template may refuse half a conversation; there is a second way
        word = words.fresh("", i, whole=True)
        try:
            text, _ = self.template.render([*before, {"role": "assistant", "content": word}], tools)
        except RenderError as error:
            raise UnprovenError(f"where the turn of message {i} begins cannot be told: {error}") from None
        if text.count(word) != 1:
            raise UnprovenError(f"where the turn of message {i} begins cannot be told")
        return _shared(gap, _tail(text[: text.index(word)], words))


class _Place(NamedTuple):
    word: str
    start: int
    stop: int


class _Words:
    """Sentinels, and what they stand for."""

    def __init__(self, text: str, messages: Sequence[Mapping[str, Any]]) -> None:
        self._stem = unused_stem(text, messages)
        self.value: dict[str, str] = {}
        self.owner: dict[str, int] = {}
        self.whole: set[str] = set()  # words that stand for all that a message says
        self.of_tools: set[str] = set()
        self.pattern = re.compile(rf"{self._stem}\d{{5}}x")

    def fresh(self, value: str, owner: int, *, whole: bool = False) -> str:
        word = f"{self._stem}{len(self.value):05d}x"
        self.value[word], self.owner[word] = value, owner
        if whole:
            self.whole.add(word)
        return word

    def replace(self, i: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with a word in place of each text in it. Empty texts stay, for templates ask whether there is any."""
        said = message.get("content")
        thinks = not KEYS_OF_REASONING.isdisjoint(message) and any(message.get(key) for key in REASONING)
        alone = not message.get("tool_calls") and not thinks
        result = dict(message)
        if isinstance(said, str) and said.strip():
            pieces = _THINK.split(said) if "think>" in said else [said]
            new = [
                piece if n % 2 or not piece.strip() else self.fresh(piece, i, whole=alone and len(pieces) == 1)
                for n, piece in enumerate(pieces)
            ]
            result["content"] = "".join(new)
        elif isinstance(said, list):
            result["content"] = [
                {**part, "text": self.fresh(part["text"], i, whole=alone and len(said) == 1)} if part["text"].strip() else part
                for part in said
            ]
        if message.get("role") != "assistant":
            return result
        thought: dict[str, str] = {}
        for key in REASONING if thinks else ():
            value = message.get(key)
            if isinstance(value, str) and value.strip():
                thought[value] = result[key] = thought.get(value) or self.fresh(value, i)
        if isinstance(message.get("tool_calls"), list):
            before = set(self.value)
            result["tool_calls"] = [self._call(call, i) for call in message["tool_calls"]]
            self.of_tools |= set(self.value) - before
        return result

    def _call(self, call: Any, i: int) -> Any:
        if not isinstance(call, dict):
            return call
        function = call.get("function")
        inner: dict[str, Any] = function if isinstance(function, dict) else call
        new = {key: self._leaves(value, i) if key in ("name", "arguments", "parameters") else value for key, value in inner.items()}
        return {**call, "function": new} if inner is not call else new

    def _leaves(self, node: Any, i: int) -> Any:
        if isinstance(node, str):
            return self.fresh(node, i) if node.strip() else node
        if isinstance(node, list):
            return [self._leaves(item, i) for item in node]
        return {key: self._leaves(item, i) for key, item in node.items()} if isinstance(node, dict) else node


def unused_stem(text: str, values: Any) -> str:
    """A word that stands neither in `text` nor in any text of `values`."""
    stem = "Sentinel"
    while stem in text or _holds(values, stem):
        stem = f"S{hashlib.sha256(stem.encode()).hexdigest()[:12]}"
    return stem


def _holds(value: Any, word: str) -> bool:
    """Whether a text within a value of JSON, or a key, holds the word."""
    if isinstance(value, str):
        return word in value
    if isinstance(value, dict):
        return any(word in key or _holds(item, word) for key, item in value.items())
    return isinstance(value, list) and any(_holds(item, word) for item in value)


def _shared(one: str, two: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _tail(text: str, words: _Words) -> str:
    """What follows the last sentinel."""
    return words.pattern.split(text)[-1]


def _align(text: str, other: str, words: _Words) -> list[_Place]:
    """Where the texts behind the words stand in `text`, so that putting them back into `other` gives `text` exactly."""
    gaps, found = words.pattern.split(other), words.pattern.findall(other)
    if not text.startswith(gaps[0]):
        raise UnprovenError("the template writes other things around other words")
    tries = 0
    stack: list[Iterator[tuple[int, int]]] = []
    places: list[_Place] = []
    at = len(gaps[0])
    while True:
        if len(stack) < len(found):
            word = found[len(stack)]
            stack.append(_fits(text, at, words.value[word], gaps[len(stack) + 1], last=len(stack) + 1 == len(found)))
        elif at == len(text):
            return places
        while stack:
            tries += 1
            step = next(stack[-1], None) if tries < MOST_TRIES else None
            if step is not None:
                start, stop = step
                del places[len(stack) - 1 :]
                places.append(_Place(found[len(stack) - 1], start, stop))
                at = stop + len(gaps[len(stack)])
                break
            stack.pop()
        else:
            raise UnprovenError("putting its texts back does not give what the template printed")


def _fits(text: str, at: int, value: str, gap: str, *, last: bool) -> Iterator[tuple[int, int]]:
    """Forms of `value` that stand in `text` at `at` with `gap` behind them."""
    for form in forms_of(value):
        stop = at + len(form)
        if text.startswith(form, at) and text.startswith(gap, stop) and (not last or stop + len(gap) == len(text)):
            yield at, stop


def forms_of(value: str) -> Iterator[str]:
    """A text as templates print it: as it is, trimmed, or inside JSON; each form once."""
    yield value
    plain = [value.strip(), value.rstrip(), value.lstrip(), value.strip("\n"), value.rstrip("\n"), value.lstrip("\n")]
    escaped = [json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]]
    yield from (form for form in dict.fromkeys(plain + escaped) if form != value)
