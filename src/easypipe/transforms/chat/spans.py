"""Which characters of a rendered conversation are trained: proven, or refused.

gap   what the template writes between two texts
stop  what the template writes to end a turn
lead  what the template writes between its generation prompt and the words of a turn, which the
model has to write

The conversation is rendered twice: as it is, and with sentinels (chat_sentinels.py), so that it is
known where each text stands. What ends and begins turns is seen on a probe, and on renderings of
parts of the conversation. Runs in the worker process, as light as can be.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from easypipe.transforms.chat.sandbox import RenderError, Template
from easypipe.transforms.chat.sentinels import Place, Sentinels, UnprovenError, align

# what must follow the text: nothing, the EOS token unseen by the loss, or as a target
OPEN, MASKED_END, TRAINED_END = 0, 1, 2
# a message's own word on whether it is trained; 0 or 1, as OpenAI's files have it
FLAG, WEIGHT = "train", "weight"
MOST_ENDS = 1000  # of calls that are remembered

# one without a word in it
_THOUGHT = r"(?:<(think|thinking|thought|reasoning)>\s*</\1>|\[THINK\]\s*\[/THINK\])\s*"
_EMPTY_THOUGHT, _ENDS_IN_EMPTY_THOUGHT = re.compile(rf"\s*{_THOUGHT}"), re.compile(rf"{_THOUGHT}\Z")
_OPENED_THOUGHT = re.compile(
    r"(?:<(think|thinking|thought|reasoning)>\s*(?:</\1>\s*)?|\[THINK\]\s*(?:\[/THINK\]\s*)?)\Z"
)
_HALF_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Rendered(NamedTuple):
    """spans: ascending character ranges that are trained. end: OPEN where the template itself ended
    the last turn.
    """

    text: str
    spans: list[tuple[int, int]]
    end: int


class Stops(NamedTuple):
    """What ends a turn of the assistant that another follows, and the last one; None where nothing
    does, or nobody can tell.

    opening: the assistant's header as the generation prompt has it, empty where there is none.
    leads: what the template writes between that and the words of a turn, longest first: the model
    has to write it (`<|channel|>final<|message|>`), so it is trained.
    """

    middle: str | None
    last: str | None
    opening: str = ""
    leads: tuple[str, ...] = ()


def flag_of(message: Mapping[str, Any]) -> bool | None:
    """Whether a message itself says that it is trained; None where it says nothing."""
    flag = message.get(FLAG)
    weight = message.get(WEIGHT)
    return bool(weight) if flag is None and weight is not None else flag


@dataclass
class Spans:
    """Rendering with spans, for one template.

    closers: the special tokens of the tokenizer. empty_thoughts: whether a thought without words,
    which templates of models that reason write in front of an answer, is trained.
    """

    template: Template
    closers: Sequence[str]
    empty_thoughts: bool = True
    _stops: Stops | None = field(default=None, repr=False)
    _known_ends: set[tuple[bool, str]] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        words = sorted(
            (re.escape(word) for word in self.closers if word.strip()), key=len, reverse=True
        )
        self._closer = re.compile(rf"\s*(?:{'|'.join(words)})") if words else None
        self._closed = re.compile(rf"(?:{'|'.join(words)})\s*\Z") if words else None
        self._token = re.compile("|".join(words)) if words else None
        self._longest = max(map(len, self.closers), default=0)

    def find(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, train_on: str
    ) -> Rendered:
        """train_on: which turns are trained where their own `train` or `weight` does not say;
        templates are not told of those keys.

        Raises RenderError where the template refuses, UnprovenError where it cannot be told what is
        trained.
        """
        flags = [flag_of(message) for message in messages]
        if any(flag is not None for flag in flags):
            messages = [
                {key: value for key, value in message.items() if key not in (FLAG, WEIGHT)}
                for message in messages
            ]
        text, marked = self.template.render(messages, tools)
        if train_on == "all":
            return Rendered(text, [(0, len(text))] if text else [], self._end(text, trained=True))
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        asked = {
            "assistant": turns,
            "last_assistant": turns[-1:],
            "completion": [i for i in turns if i == len(messages) - 1],
        }[train_on]
        trained = [i for i in turns if (i in asked if flags[i] is None else flags[i])]
        if not trained:
            return Rendered(text, [], OPEN)
        if not self.template.marked:
            spans = self._proven(
                lambda everyone: self._with(text, messages, tools, trained, everyone=everyone)
            )
        elif trained == turns:
            spans = marked
        else:
            spans = self._proven(
                lambda everyone: self._owned(
                    text, marked, messages, tools, trained, everyone=everyone
                )
            )
        last = bool(spans) and not text[spans[-1][1] :].strip()
        return Rendered(text, spans, self._end(text, trained=last))

    def stops(self) -> Stops:
        """What ends an assistant's turns, seen on a conversation of two questions and two
        answers.
        """
        if self._stops is None:
            self._stops = self._seek_stops()
        return self._stops

    def _end(self, text: str, *, trained: bool) -> int:
        said = text.rstrip()
        # its words are not all space
        if self._closed is not None and self._closed.search(
            text, max(0, len(said) - self._longest)
        ):
            return OPEN
        stop = self.stops().last
        if stop is not None and said.endswith(stop.strip()):
            return OPEN
        return TRAINED_END if trained else MASKED_END

    def _seek_stops(self) -> Stops:
        words = [f"easypipe{name}probe" for name in ("One", "Two", "Three", "Four")]
        roles = ("user", "assistant", "user", "assistant")
        talk = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        tools: list[Any] | None = None
        try:
            text, _ = self.template.render(talk)
        except RenderError:
            tools = [_PROBE_TOOL]  # for templates that only know rows with tools
            try:
                text, _ = self.template.render(talk, tools)
            except RenderError:
                return Stops(None, None)
        if any(text.count(word) != 1 for word in words):
            return Stops(None, None)
        before, *gaps = re.split("|".join(words), text)
        if len(gaps) != 4 or [text.index(word) for word in words] != sorted(
            text.index(word) for word in words
        ):
            return Stops(None, None)
        asked, alone = (
            self._after(talk[:1], words[0], tools, prompt=prompt) for prompt in (True, False)
        )
        opening = asked[len(alone) :] if asked != alone and asked.startswith(alone) else ""
        opening = _OPENED_THOUGHT.sub("", opening)
        leads = {
            gap.rpartition(opening)[2] for gap in (gaps[0], gaps[2]) if opening and opening in gap
        }
        middle, last = self._ends(before, gaps, alone)
        return Stops(middle, last, opening, tuple(sorted(leads - {""}, key=len, reverse=True)))

    def _after(
        self,
        messages: Sequence[Mapping[str, Any]],
        word: str,
        tools: Sequence[Any] | None,
        *,
        prompt: bool,
    ) -> str:
        """What the template writes behind a word; nothing where it refuses half a conversation."""
        try:
            return self.template.render(messages, tools, prompt=prompt)[0].rpartition(word)[2]
        except RenderError:
            return ""

    def _ends(self, before: str, gaps: Sequence[str], alone: str) -> tuple[str | None, str | None]:
        """(middle, last) of Stops. before: the first word; gaps: behind question, answer, question,
        answer; alone: behind a question that nothing follows."""
        _, between, _, tail = gaps
        ends, follows = (
            self._closer.match(gap) if self._closer is not None else None for gap in (tail, between)
        )
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
        # the header of an answer that is still to come
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
        shared = _shared(between[::-1], before[::-1])
        middle = between[: len(between) - shared].rstrip() or None
        return middle, middle if middle is not None and tail.startswith(middle) else None

    def _heads(self, token: str, before: str) -> bool:
        """Whether a special token stands in front of the first word with no text before it."""
        assert self._token is not None
        head, found, _ = before.partition(token)
        return bool(found) and not self._token.sub("", head).strip()

    def _whole_run(self, before: str, between: str, tail: str, alone: str, end: int) -> str:
        """All special tokens that end a turn, in the middle and at the end alike: those before the
        one that opens the user's turn.
        """
        assert self._closer is not None
        while (found := self._closer.match(tail, end)) is not None and between.startswith(
            found[0], end
        ):
            opens = before.endswith(
                found[0].lstrip() + between[found.end() :]
            ) and not alone.lstrip().startswith(found[0].strip())
            if opens:
                break
            end = found.end()
        return tail[:end]

    def _proven(self, prove: Callable[[bool], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        """What `prove` gives with other words in place of everyone's, else with those of the
        assistant alone replaced.
        """
        try:
            return prove(True)
        # a template may look into what users and tools say
        except (UnprovenError, RenderError) as error:
            first = error
        try:
            return prove(False)
        except (UnprovenError, RenderError):
            pass
        if isinstance(first, RenderError):
            raise UnprovenError(
                f"the template does not render other words in place of these: {first}"
            ) from None
        raise first

    def _aligned(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        everyone: bool,
    ) -> tuple[Sentinels, Sequence[Mapping[str, Any]], list[Place]]:
        """Sentinels, the messages with them, and where in `text` stands what they replaced."""
        words = Sentinels(text, messages)
        changed = [
            words.replace(i, m) if everyone or m.get("role") == "assistant" else m
            for i, m in enumerate(messages)
        ]
        other, _ = self.template.render(changed, tools)
        return words, changed, align(text, other, words)

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
        """Of the marked spans those of the turns `trained`: each has to hold texts of one message
        alone.
        """
        words, _, places = self._aligned(text, messages, tools, everyone=everyone)
        spans = []
        for a, b in marked:
            owners = {
                words.owner[place.word] for place in places if place.start < b and a < place.stop
            }
            whole = all(
                a <= place.start and place.stop <= b
                for place in places
                if place.start < b and a < place.stop
            )
            if len(owners) != 1 or not whole:
                raise UnprovenError(f"which turn is marked at {text[a:b][:40]!r} cannot be told")
            if owners <= set(trained):
                spans.append((a, b))
        return spans

    def _with(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        trained: list[int],
        *,
        everyone: bool,
    ) -> list[tuple[int, int]]:
        words, changed, places = self._aligned(text, messages, tools, everyone=everyone)
        spans = []
        for i in trained:
            here = [place for place in places if words.owner[place.word] == i]
            if not here:
                if any(words.owner[word] == i for word in words.owner):
                    raise UnprovenError(f"the template does not print what message {i} says")
                continue  # an empty turn
            first = places.index(here[0])
            # a template may name a function again where it prints what that returned: the turn ends
            # before
            said = {here[0].word}
            for place in places[first + 1 :]:
                if words.owner[place.word] != i or (
                    place.word in said and place.word in words.of_tools
                ):
                    break
                if place.word in said:
                    raise UnprovenError(
                        f"the template prints the text of message {i} more than once"
                    )
                said.add(place.word)
            run, later = places[first : first + len(said)], places[first + len(said) :]
            if any(
                words.owner[place.word] == i
                and (place.word not in said or place.word not in words.of_tools)
                for place in later
            ):
                if any(place.word in said for place in later if words.owner[place.word] == i):
                    raise UnprovenError(
                        f"the template prints the text of message {i} more than once"
                    )
                raise UnprovenError(f"the text of message {i} does not stand in one piece")
            if messages[i].get("tool_calls") and not any(
                place.word in words.of_tools for place in run
            ):
                raise UnprovenError(f"the template does not print the tool calls of message {i}")
            plain = len(run) == 1 and run[0].word in words.whole
            before = places[first - 1].stop if first else 0
            gap = text[before : run[0].start]
            start = before + (
                self._lead(gap) if plain else self._header(gap, changed, i, tools, words, first)
            )
            after = text[run[-1].stop : later[0].start if later else len(text)]
            spans.append(
                (
                    start,
                    run[-1].stop
                    + self._close(
                        after, changed, i, tools, later, words, run[-1].word, plain=plain
                    ),
                )
            )
        if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
            raise UnprovenError("trained turns overlap")
        return spans

    def _lead(self, gap: str) -> int:
        """Where in the gap before the words of a turn the model begins to write."""
        if (thought := _ENDS_IN_EMPTY_THOUGHT.search(gap)) is not None:
            return thought.start() if self.empty_thoughts else thought.end()
        stops = self.stops()
        return next(
            (len(gap) - len(lead) for lead in stops.leads if gap.endswith(stops.opening + lead)),
            len(gap),
        )

    def _close(
        self,
        gap: str,
        changed: Sequence[Mapping[str, Any]],
        i: int,
        tools: Sequence[Any] | None,
        later: Sequence[Place],
        words: Sentinels,
        word: str,
        *,
        plain: bool,
    ) -> int:
        """How much of the gap behind the last text of message i ends its turn, the stop included.
        word: what stands for that text;
        later: the texts behind the gap."""
        last = i == len(changed) - 1
        stop = self.stops().last if last else self.stops().middle
        if stop is not None and gap.startswith(stop):
            return len(stop)
        if (
            plain
            and stop is not None
            and (found := re.match(r"\s*", gap))
            and gap.startswith(stop.lstrip(), found.end())
        ):
            return found.end() + len(stop.lstrip())
        if last and not gap.strip():
            return 0  # the EOS token will end it
        if (
            last
            and plain
            and self._closer is not None
            and (found := self._closer.fullmatch(gap.rstrip()))
        ):
            return found.end()  # a special token and nothing behind it
        end = None if plain else self._end_of_call(gap, changed, i, tools, later, words, word)
        if end is None:
            raise UnprovenError(
                f"nothing that is known to end a turn follows message {i}: {gap[:40]!r}"
            )
        return end

    def _end_of_call(
        self,
        gap: str,
        changed: Sequence[Mapping[str, Any]],
        i: int,
        tools: Sequence[Any] | None,
        later: Sequence[Place],
        words: Sentinels,
        word: str,
    ) -> int | None:
        """How much of the gap ends a turn that is not words alone: it stands there whether or not
        something follows.
        """
        last = i == len(changed) - 1
        stop = (self.stops().last if last else self.stops().middle) or ""
        inside = (
            gap.find(stop.strip())
            if stop and (last or (later and words.owner[later[0].word] == i + 1))
            else -1
        )
        whole = gap[: inside + len(stop.strip())] if inside >= 0 else ""
        if (last, whole) in self._known_ends or (whole and self._clean(gap, inside)):
            return len(whole)
        other = self._other_gap(changed, i, tools, words, word)
        if other is None:  # a template may refuse half a conversation
            return None
        if whole and other.startswith(whole):
            if len(self._known_ends) < MOST_ENDS:
                self._known_ends.add((last, whole))
            return len(whole)
        end, longer = (gap.rstrip(), other) if last else (other.rstrip(), gap)
        if not end.strip() or not longer.startswith(end):
            return None
        opened = self.stops().opening.strip()
        closed = (
            self._closed is not None
            and self._closed.search(end) is not None
            and not (opened and end.endswith(opened))
        )
        # where the EOS token will end it
        return len(end) if closed or (last and self.stops().last is None) else None

    def _clean(self, gap: str, inside: int) -> bool:
        """Whether the stop at `inside` is a special token before which there is none that could
        have opened another turn.
        """
        return (
            self._token is not None
            and (found := self._token.search(gap)) is not None
            and found.start() >= inside
        )

    def _other_gap(
        self,
        changed: Sequence[Mapping[str, Any]],
        i: int,
        tools: Sequence[Any] | None,
        words: Sentinels,
        word: str,
    ) -> str | None:
        """What follows `word`, the last of message i, where nothing follows that message, or
        something where it is the last one.
        """
        other = list(changed[: i + 1])
        if i == len(changed) - 1:
            calls = changed[i].get("tool_calls")
            id_of = (
                {"tool_call_id": calls[-1]["id"]}
                if calls and isinstance(calls[-1], dict) and "id" in calls[-1]
                else {}
            )
            other.append(
                {"role": "tool" if calls else "user", "content": words.fresh("", i), **id_of}
            )
        try:
            behind = words.pattern.split(self.template.render(other, tools)[0].partition(word)[2])
        except RenderError:
            return None
        return behind[0] if (len(behind) > 1) == (i == len(changed) - 1) else None

    def _header(
        self,
        gap: str,
        changed: Sequence[Mapping[str, Any]],
        i: int,
        tools: Sequence[Any] | None,
        words: Sentinels,
        known: int,
    ) -> int:
        """How much of the gap before message i opens the turn, and is not said by the assistant."""
        if i and not known:
            raise UnprovenError(f"where the turn of message {i} begins cannot be told")
        header = self._opened(gap, changed[:i], i, tools, words)
        if not self.empty_thoughts and (thought := _EMPTY_THOUGHT.match(gap, header)) is not None:
            return thought.end()
        return header

    def _opened(
        self,
        gap: str,
        before: Sequence[Mapping[str, Any]],
        i: int,
        tools: Sequence[Any] | None,
        words: Sentinels,
    ) -> int:
        try:
            asked = _tail(self.template.render(before, tools, prompt=True)[0], words)
            if asked != _tail(self.template.render(before, tools)[0], words):
                asked = _OPENED_THOUGHT.sub("", asked)
                if gap.startswith(asked):
                    return len(asked)
        except RenderError:
            pass  # a template may refuse half a conversation; there is a second way
        word = words.fresh("", i, whole=True)
        try:
            text, _ = self.template.render([*before, {"role": "assistant", "content": word}], tools)
        except RenderError as error:
            raise UnprovenError(
                f"where the turn of message {i} begins cannot be told: {error}"
            ) from None
        if text.count(word) != 1:
            raise UnprovenError(f"where the turn of message {i} begins cannot be told")
        other = _OPENED_THOUGHT.sub("", _tail(text[: text.index(word)], words))
        shared = _shared(gap, other)
        half = _HALF_TAG.search(gap, 0, shared) if shared < len(gap) else None
        return shared if half is None else half.start()


def _shared(one: str, two: str) -> int:
    """How many characters both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )


def _tail(text: str, words: Sentinels) -> str:
    """What follows the last sentinel."""
    return words.pattern.split(text)[-1]
