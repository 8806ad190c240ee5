"""Finds what ends and begins the turns of a template, by rendering a probe."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from easypipe.transforms.chat.sandbox import Message, RenderError, Template

if TYPE_CHECKING:
    from easypipe.core.values import JsonValue

# special tokens that open something, and what closes each
BRACKETS = ((r"<\|(\w+)>", "<{}|>"), (r"<(\w+)>", "</{}>"), (r"\[(\w+)\]", "[/{}]"))
CLOSING = r"</[^<>\s]+>|<\w+\|>|\[/\w+\]"  # text in this form opens nothing
OPENED_THOUGHT = re.compile(
    r"(?:<(think|thinking|thought|reasoning)>\s*(?:</\1>\s*)?|\[THINK\]\s*(?:\[/THINK\]\s*)?)\Z"
)
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Stops(NamedTuple):
    """What ends the turns of the assistant.

    Attributes:
        middle: What ends a turn that another follows; None if nothing does, or if it cannot be
            known.
        last: What ends the last turn; None as for `middle`.
        opening: The assistant's header as in the generation prompt; empty if there is none.
        leads: What the template writes between the header and the words of a turn, longest first.
            The model has to write it (`<|channel|>final<|message|>`), so it is trained on.
    """

    middle: str | None
    last: str | None
    opening: str = ""
    leads: tuple[str, ...] = ()


class Turns:
    """The knowledge of what ends and begins the turns of one template.

    Args:
        closers: The special tokens of the tokenizer.
        ends: Those that end what the model writes, by its generation_config.json.
    """

    def __init__(self, template: Template, closers: Sequence[str], ends: Sequence[str]) -> None:
        self.template, self.ends = template, frozenset(ends)
        words = sorted((re.escape(w) for w in closers if w.strip()), key=len, reverse=True)
        special = "|".join(words) or r"(?!)"  # matches nothing
        self.token = re.compile(special)
        self.closer = re.compile(rf"\s*(?:{special})")
        self.closed = re.compile(rf"(?:{special})\s*\Z")
        self.closing = re.compile(CLOSING)
        self.shut = re.compile(rf"(?:{special}|{CLOSING})\Z")
        opening = "|".join(map(re.escape, filter(_opens_among(closers), closers)))
        self.opened = re.compile(rf"\s*(?:{opening or '(?!)'})\Z")
        self._longest = max(map(len, closers), default=0)

    def is_ended(self, text: str) -> bool:
        """Whether the template itself ended the last turn of a text."""
        said = text.rstrip()
        # the name of a special token contains more than spaces
        if self.closed.search(text, max(0, len(said) - self._longest)):
            return True
        stop = self.stops.last
        return stop is not None and said.endswith(stop.strip())

    @functools.cached_property
    def stops(self) -> Stops:
        """What ends the assistant's turns, as seen on two questions and their answers."""
        unknown = Stops(None, None)
        words = [f"easypipe{name}probe" for name in ("One", "Two", "Three", "Four")]
        text, talk, tools = "", [], None
        # Some templates accept only typed parts, some only rows with tools.
        for parts, tools in itertools.product((False, True), (None, [_PROBE_TOOL])):
            talk = [
                {"role": role, "content": [{"type": "text", "text": word}] if parts else word}
                for role, word in zip(("user", "assistant") * 2, words, strict=True)
            ]
            try:
                text, _ = self.template.render(talk, tools)
            except RenderError:
                continue
            if re.findall("|".join(words), text) == words:
                break
        else:
            return unknown
        before, *gaps = re.split("|".join(words), text)
        asked, alone = (
            self._after(talk[:1], words[0], tools, prompt=prompt) for prompt in (True, False)
        )
        opening = asked[len(alone) :] if asked != alone and asked.startswith(alone) else ""
        opening = OPENED_THOUGHT.sub("", opening)
        leads = {
            gap.rpartition(opening)[2] for gap in (gaps[0], gaps[2]) if opening and opening in gap
        }
        middle, last = self._ends(before, gaps, alone)
        if middle and middle != last and self.closer.match(middle) is None:
            # Text that does not follow the last answer may belong to the question after the first
            # one.
            middle = middle if self._follows_whoever(middle, talk[:2], words, tools) else None
        return Stops(middle, last, opening, tuple(sorted(leads - {""}, key=len, reverse=True)))

    def _after(
        self,
        messages: Sequence[Message],
        word: str,
        tools: Sequence[JsonValue] | None,
        *,
        prompt: bool,
    ) -> str:
        """Returns what the template writes after a word; "" if it refuses these messages."""
        try:
            return self.template.render(messages, tools, prompt=prompt)[0].rpartition(word)[2]
        except RenderError:
            return ""

    def _follows_whoever(
        self,
        stop: str,
        talk: Sequence[Message],
        words: Sequence[str],
        tools: Sequence[JsonValue] | None,
    ) -> bool:
        """Whether `stop` also follows an answer if the next message is not a user's."""
        _, answer, word, *_ = words
        content = talk[0]["content"]
        parts = [{"type": "text", "text": word}] if isinstance(content, list) else word
        found = []
        for role in ("assistant", "system", "tool"):
            try:
                text, _ = self.template.render([*talk, {"role": role, "content": parts}], tools)
            except RenderError:
                continue
            _, here, behind = text.partition(answer)
            if here and word in behind:
                found.append(behind.startswith(stop))
        return bool(found) and all(found)

    def _ends(self, before: str, gaps: Sequence[str], alone: str) -> tuple[str | None, str | None]:
        """Returns (middle, last) of Stops.

        Args:
            before: The text before the first word.
            gaps: The texts after question, answer, question and answer.
            alone: The text after a question that nothing follows.
        """
        _, between, _, tail = gaps
        ends, follows = self.closer.match(tail), self.closer.match(between)
        last = (ends[0] if ends else tail.rstrip()) or None
        if (
            ends
            and self._heads(ends[0].strip(), before)
            and alone.lstrip().startswith(ends[0].strip())
        ):
            ends = last = None  # it opens a turn, here one that is still to come
        if last is not None and between.startswith(last):
            if ends:
                last = self._whole_run(before, between, tail, alone, len(last))
            return last, last
        if last is not None and not between.startswith(last) and not ends:
            # It is followed by the header of an answer that is still to come, as after a question.
            last = last.removesuffix(alone.strip()).rstrip() or None
            if last is not None and between.startswith(last):
                return last, last
        # It is the header of an answer that is still to come.
        if last is not None and last.strip() in gaps[0]:
            ends = last = None
        if follows is not None:
            stop = follows[0].strip()
            opens = stop in before and (
                self._heads(stop, before) or not alone.lstrip().startswith(stop)
            )
            if not opens:
                return follows[0], last
        if last is not None:
            return None, last
        shared = num_shared(between[::-1], before[::-1])
        middle = between[: len(between) - shared].rstrip() or None
        return middle, middle if middle is not None and tail.startswith(middle) else None

    def _heads(self, token: str, before: str) -> bool:
        """Whether a special token is before the first word with no text before it."""
        head, found, _ = before.partition(token)
        return bool(found) and not self.token.sub("", head).strip()

    def _whole_run(self, before: str, between: str, tail: str, alone: str, end: int) -> str:
        """Returns everything that ends a turn, both in the middle and at the end.

        It goes up to the last special token before the one that opens the user's turn.
        """
        said, closed = tail.rstrip(), alone.strip()
        # What ends the turns of both users and the assistant does not open a turn.
        both = between.startswith(said) and said.endswith(closed)
        common = len(said) - len(closed) if both else len(said)
        shared = num_shared(between, tail)
        while (found := self.token.search(tail, end, shared)) is not None:
            header, at = between[found.start() :], max(0, before.find(found[0]))
            # the first turn may have more between its header and its words
            opens = before.endswith(header) or (
                self._heads(found[0], before) and num_shared(before[at:], header) > len(found[0])
            )
            if opens and found.start() < common and not alone.lstrip().startswith(found[0]):
                break
            end = found.end()
        return tail[:end]


def _opens_among(tokens: Sequence[str]) -> Callable[[str], bool]:
    """Returns a test for tokens that open what another one of `tokens` closes."""
    return lambda token: any(
        (name := re.fullmatch(form, token)) and partner.format(name[1]) in tokens
        for form, partner in BRACKETS
    )


def num_shared(one: Sequence[JsonValue], two: Sequence[JsonValue]) -> int:
    """Returns how many characters, or messages, both begin with."""
    pairs = zip(one, two, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
