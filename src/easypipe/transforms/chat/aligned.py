"""Aligned: a conversation compared with one with other words, or one more message; its borders.

In this file:
    gap: What the template writes between two texts.
    stop: What the template writes to end a turn.
    lead: What the template writes between its generation prompt and the words of a turn; the model
        has to write it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from easypipe.transforms.chat.sandbox import Json, Message, RenderError
from easypipe.transforms.chat.sentinels import (
    Place,
    Sentinels,
    UnprovenError,
    align,
    without_reasoning,
)
from easypipe.transforms.chat.stops import OPENED_THOUGHT, Turns, num_shared

if TYPE_CHECKING:
    from easypipe.core.values import JsonValue

# a thought without a word in it
_THOUGHT = r"(?:<(think|thinking|thought|reasoning)>\s*</\1>|\[THINK\]\s*\[/THINK\])\s*"
_EMPTY_THOUGHT, _ENDS_IN_EMPTY_THOUGHT = re.compile(rf"\s*{_THOUGHT}"), re.compile(rf"{_THOUGHT}\Z")
_HALF_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")


class Aligned:
    """A conversation as it was written, compared with one whose texts are replaced by sentinels.

    Args:
        known: What ends and begins the turns of the template.
        text: The text of the conversation.
        others: The messages that are replaced besides the assistant's.
        empty_thoughts: As in Spans.

    Raises:
        UnprovenError: The two cannot be read side by side.
        RenderError: The template refuses other words.
    """

    def __init__(
        self,
        known: Turns,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None,
        others: Sequence[int],
        *,
        empty_thoughts: bool,
    ) -> None:
        self._known, self._text, self._tools = known, text, tools
        self._empty_thoughts = empty_thoughts
        self._words = words = Sentinels(text)
        self._changed = [
            words.replace(i, m) if i in others or m.get("role") == "assistant" else m
            for i, m in enumerate(messages)
        ]
        self._places = align(text, self._render(self._changed), words)
        self._owners = [words.owner[place.word] for place in self._places]

    def marked(self, marked: list[tuple[int, int]], trained: list[int]) -> list[tuple[int, int]]:
        """Returns the marked spans that belong to the turns `trained`.

        Raises:
            UnprovenError: A span does not hold whole texts of one message alone.
        """
        spans = []
        for a, b in marked:
            inside = [
                n for n, place in enumerate(self._places) if place.start < b and a < place.stop
            ]
            owners = {self._owners[n] for n in inside}
            whole = all(a <= self._places[n].start and self._places[n].stop <= b for n in inside)
            if len(owners) != 1 or not whole:
                raise UnprovenError(
                    f"which turn is marked at {self._text[a:b][:40]!r} cannot be told"
                )
            if owners <= set(trained):
                spans.append((a, b))
        return spans

    def spans(self, trained: list[int], ended: list[int]) -> list[tuple[int, int]]:
        """Returns the spans of the turns `trained`, from what the model writes first to the stop.

        The stop must be known only for the turns `ended`.

        Raises:
            UnprovenError: A span cannot be known.
        """
        spans = [self._span(i, ended=i in ended) for i in trained if self._says(i)]
        if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
            raise UnprovenError("trained turns overlap")
        return spans

    def narrowed(
        self, spans: list[tuple[int, int]], partly: Mapping[int, list[tuple[int, int]]]
    ) -> list[tuple[int, int]]:
        """Narrows trained spans to the characters that messages ask for.

        Args:
            spans: The trained spans.
            partly: For some messages, the trained characters of what they say. What ends the turn
                is still trained on.
        """
        found: list[tuple[int, int]] = []
        for start, stop in spans:
            inside = [place for place in self._places if start <= place.start < stop]
            i = self._words.owner[inside[0].word] if inside else -1
            if i not in partly:
                found.append((start, stop))
                continue
            place, at = inside[0], -1
            if len(inside) == 1 and place.word in self._words.whole:
                at = self._words.value[place.word].find(self._text[place.start : place.stop])
            if at < 0:
                raise UnprovenError(f"where the train_ranges of message {i} stand cannot be told")
            reached = place.start
            for first, last in sorted(partly[i]):
                edges = (place.start - at + first, place.start - at + last)
                begin, end = (min(max(edge, reached), place.stop) for edge in edges)
                found.append((begin, end))
                reached = end
            found.append((place.stop, stop))
        return found

    def without_thoughts(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the part of each trained span that follows the reasoning in it."""
        found: list[tuple[int, int]] = []
        for start, stop in spans:
            inside = [n for n, one in enumerate(self._places) if start <= one.start < stop]
            thinks = [self._places[n].word in self._words.thoughts for n in inside]
            count = sum(thinks)
            if thinks != sorted(thinks, reverse=True):
                raise UnprovenError("reasoning comes after other words of its turn")
            if count < len(inside):
                found.append((self._answer(inside[count]) if count else start, stop))
            elif not count:
                found.append((start, stop))
        return found

    def _answer(self, n: int) -> int:
        """Returns where the model begins to answer after its reasoning.

        This is before place n, with as much of the text before it as is also there without the
        reasoning.
        """
        i, place = self._owners[n], self._places[n]
        text = self._render(
            [*self._changed[:i], without_reasoning(self._changed[i]), *self._changed[i + 1 :]]
        )
        before, found, _ = text.partition(place.word)
        other = self._tail(before)
        lead = other[self._opened(other, i) :]
        thought = _EMPTY_THOUGHT.match(lead)
        lead = lead if thought is None else lead[thought.end() :]
        if not found or not self._text.endswith(lead, self._places[n - 1].stop, place.start):
            raise UnprovenError(f"where the reasoning of message {i} ends cannot be told")
        return place.start - len(lead)

    def _says(self, i: int) -> bool:
        """Whether message i is not an empty turn."""
        if i not in self._owners and i in self._words.owner.values():
            raise UnprovenError(f"the template does not print what message {i} says")
        return i in self._owners

    def _span(self, i: int, *, ended: bool) -> tuple[int, int]:
        """Returns the span of message i, from what the model writes first to what ends the turn.

        The stop must be known if the turn is `ended`.
        """
        words, text, places = self._words, self._text, self._places
        first = self._owners.index(i)
        before = places[first - 1].stop if first else 0
        gap = text[before : places[first].start]
        if self._changed[i].get("role") != "assistant":
            return self._others(i, first)
        after, endless = "", False
        for behind in self._behind(i, first):
            run, later = places[first:behind], places[behind:]
            said = {place.word for place in run}
            calls = words.of_calls.get(i, [])
            if self._changed[i].get("tool_calls") and (
                not calls or any(map(said.isdisjoint, calls))
            ):
                raise UnprovenError(f"the template does not print the tool calls of message {i}")
            alone = len(run) == 1 and run[0].word in words.whole
            after = text[run[-1].stop : later[0].start if later else len(text)]
            end = self._plain_end(after, i, plain=alone)
            if end is None and not alone:
                end = self._end_of_call(after, i, run, follows=self._owners[behind:][:1])
            spoken = not self._changed[i].get("tool_calls") and run[-1].word not in words.thoughts
            endless = spoken and self._stop(i) is None
            if end is None and endless and (not ended or self._handed_over(after, 0, i, behind)):
                end = 0
            if end is None:
                continue
            if not alone:  # what opens another's words does not end a turn
                end = len(self._known.opened.sub("", after[:end]))
            end += self._handed_over(after, end, i, behind)
            start = before + (self._lead(gap) if alone else self._header(gap, i, first))
            return start, run[-1].stop + end
        other = " (train_on_eos='none' asks for no end)" if endless else ""
        raise UnprovenError(
            f"nothing that is known to end a turn follows message {i}: {after[:40]!r}{other}"
        )

    def _others(self, i: int, first: int) -> tuple[int, int]:
        """Returns the span of message i, which is not the assistant's.

        It includes what follows, if that is what ends the assistant's turns.
        """
        behind, known = self._behind(i, first)[-1], self._known.stops
        start, stop = self._places[first].start, self._places[behind - 1].stop
        space = len(self._text) - len(self._text[stop:].lstrip())
        for end in filter(None, (known.middle, known.last)):
            for at, written in ((stop, end), (space, end.lstrip())):
                if self._text.startswith(written, at):
                    return start, at + len(written)
        return start, stop

    def _behind(self, i: int, first: int) -> Sequence[int]:
        """Returns the places after which the turn of message i may end, the likeliest first.

        The turn must be in one piece from `first` on. A template may name a function again: in the
        call itself, or, when the turn has ended, with what the function returned.

        Raises:
            UnprovenError: The turn is not in one piece, or its text is printed again.
        """
        said: set[str] = set()
        new = stop = first
        while stop < len(self._owners) and self._owners[stop] == i:
            word = self._places[stop].word
            stop += 1
            if word not in said:
                said.add(word)
                new = stop
        again = {
            place.word
            for place, owner in zip(self._places[new:], self._owners[new:], strict=True)
            if owner == i
        }
        if not again <= said & self._words.of_tools:
            if said.isdisjoint(again):
                raise UnprovenError(f"the text of message {i} is not printed in one piece")
            raise UnprovenError(f"the template prints the text of message {i} more than once")
        return range(new, stop + 1)

    def _lead(self, gap: str) -> int:
        """Returns where in the gap before the words of a turn the model begins to write."""
        if (thought := _ENDS_IN_EMPTY_THOUGHT.search(gap)) is not None:
            return thought.start() if self._empty_thoughts else thought.end()
        stops = self._known.stops
        return next(
            (len(gap) - len(lead) for lead in stops.leads if gap.endswith(stops.opening + lead)),
            len(gap),
        )

    def _is_last(self, i: int) -> bool:
        return i == len(self._changed) - 1

    def _stop(self, i: int) -> str | None:
        """Returns what ends the turn of message i, if that is known."""
        return self._known.stops.last if self._is_last(i) else self._known.stops.middle

    def _plain_end(self, gap: str, i: int, *, plain: bool) -> int | None:
        """Returns how much of the gap after the last text of message i ends its turn.

        This includes the stop. The result is None if it cannot be read off the gap. `plain` says
        that the message consists only of words.
        """
        last, stop, space = self._is_last(i), self._stop(i), len(gap) - len(gap.lstrip())
        if stop is not None and gap.startswith(stop):
            return len(stop)
        if plain and stop is not None and gap.startswith(stop.lstrip(), space):
            return space + len(stop.lstrip())
        if last and not gap.strip():
            return 0  # the EOS token will end it
        if last and plain and (found := self._known.closer.fullmatch(gap.rstrip())):
            return found.end()  # a special token with nothing after it
        return None

    def _end_of_call(
        self, gap: str, i: int, run: Sequence[Place], follows: Sequence[int]
    ) -> int | None:
        """Returns how much of the gap ends a turn that has more than words.

        This is the part that is there whether or not something follows.

        Args:
            gap: The text after the turn's last text.
            i: The number of the message.
            run: The places of its texts.
            follows: The message that the text after the gap belongs to.
        """
        known, last, stop = self._known, self._is_last(i), self._stop(i) or ""
        inside = gap.find(stop.strip()) if stop and (last or list(follows) == [i + 1]) else -1
        whole = gap[: inside + len(stop.strip())] if inside >= 0 else ""
        # a special token; none before it could have opened another turn
        before = known.closing.sub("", whole[:inside])
        if known.token.search(whole) is not None and known.token.search(before) is None:
            return len(whole)
        other = self._other_gap(i, [place.word for place in run])
        if other is None:  # a template may refuse half a conversation
            return None
        if not whole and (closing := known.token.findall(stop)[-1:]):
            # The end of a call differs from the end of words, but then the same token follows.
            whole = gap[: gap.find(closing[0]) + len(closing[0])] if closing[0] in gap else ""
        if whole and other.startswith(whole):
            return len(whole)
        end, longer = (gap.rstrip(), other) if last else (other.rstrip(), gap)
        if not end.strip() or not longer.startswith(end):
            return None
        opened = known.stops.opening.strip()
        closed = known.shut.search(end) is not None and not (opened and end.endswith(opened))
        # the EOS token will end it
        return len(end) if closed or (last and known.stops.last is None) else None

    def _handed_over(self, gap: str, end: int, i: int, behind: int) -> int:
        """Returns how much more of the gap the model writes after message i, whose turn is over.

        It is the token that opens the next message, if the model stops by writing it. It does so if
        the token is one of its end tokens. It also does so after a tool call, if the template ends
        the assistant's turns with nothing.

        Args:
            gap: The text after the turn's last text.
            end: How much of it ends the turn.
            behind: The number of the first place after the turn.
        """
        known, found = self._known, self._known.closer.match(gap, end)
        if found is None:
            return 0
        if known.ends:
            stops = known.ends.isdisjoint(known.token.findall(gap, 0, end))
            if stops and found[0].strip() in known.ends:
                return len(found[0])
        asked = [m.get("role") for m in self._changed[i + 1 : i + 2]] == ["tool"]
        called = (
            asked and self._changed[i].get("tool_calls") and self._owners[behind:][:1] == [i + 1]
        )
        endless = known.stops.middle is None and known.stops.last is None
        return len(found[0]) if called and endless and not known.opened.match(found[0]) else 0

    def _other_gap(self, i: int, said: Sequence[str]) -> str | None:
        """Returns what follows the last word of message i if nothing follows the message.

        For the last message, it is what follows if something does. The result is None if the
        template refuses that.
        """
        other = list(self._changed[: i + 1])
        if self._is_last(i):
            calls = self._changed[i].get("tool_calls")
            call = calls[-1] if calls and isinstance(calls[-1], dict) else {}
            id_of = {"tool_call_id": call["id"]} if "id" in call else {}
            answer = self._spoken(self._words.fresh("", i), i)
            other.append({"role": "tool" if calls else "user", "content": answer, **id_of})
        try:
            *_, after = self._render(other).split(said[-1], said.count(said[-1]))
        except RenderError:
            return None
        behind = self._words.pattern.split(after)
        return behind[0] if (len(behind) > 1) == self._is_last(i) else None

    def _spoken(self, word: str, i: int) -> Json:
        """Returns a word in the form in which message i speaks: typed parts, or text."""
        parts = isinstance(self._changed[i].get("content"), list)
        return [{"type": "text", "text": word}] if parts else word

    def _header(self, gap: str, i: int, first: int) -> int:
        """Returns how much of the gap before message i opens the turn, and is not the assistant's.

        `first` is the number of texts before it.
        """
        if i and not first:
            raise UnprovenError(f"where the turn of message {i} begins cannot be told")
        header = self._opened(gap, i)
        if not self._empty_thoughts and (thought := _EMPTY_THOUGHT.match(gap, header)):
            return thought.end()
        return header

    def _opened(self, gap: str, i: int) -> int:
        """Returns how much of the gap before message i opens the turn."""
        before = self._changed[:i]
        try:
            asked = self._tail(self._render(before, prompt=True))
            if asked != self._tail(self._render(before)):
                asked = OPENED_THOUGHT.sub("", asked)
                if gap.startswith(asked):
                    return len(asked)
        except RenderError:
            pass  # a template may refuse half a conversation; there is a second way
        word = self._words.fresh("", i, whole=True)
        try:
            text = self._render([*before, {"role": "assistant", "content": self._spoken(word, i)}])
        except RenderError as error:
            raise UnprovenError(
                f"where the turn of message {i} begins cannot be told: {error}"
            ) from None
        if text.count(word) != 1:
            raise UnprovenError(f"where the turn of message {i} begins cannot be told")
        other = OPENED_THOUGHT.sub("", self._tail(text[: text.index(word)]))
        shared = num_shared(gap, other)
        half = _HALF_TAG.search(gap, 0, shared) if shared < len(gap) else None
        return shared if half is None else half.start()

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self._known.template.render(messages, self._tools, prompt=prompt)[0]

    def _tail(self, text: str) -> str:
        """Returns what follows the last sentinel."""
        return self._words.pattern.split(text)[-1]
