"""Which characters of a rendered conversation are trained: proven, or refused.

gap   what the template writes between two texts
stop  what the template writes to end a turn
lead  what the template writes between its generation prompt and the words of a turn, which the
model has to write

The conversation is rendered twice: as it is, and with sentinels (sentinels.py), so that it is
known where each text stands. What ends and begins turns is seen on a probe, and on renderings of
parts of the conversation. Runs in the worker process, as light as can be.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from easypipe.core.values import JsonValue
from easypipe.transforms.chat.sandbox import Json, Message, RenderError, Template
from easypipe.transforms.chat.sentinels import (
    Place,
    Sentinels,
    UnprovenError,
    align,
    without_reasoning,
)

# what must follow the text: nothing, the EOS token unseen by the loss, or as a target
OPEN, MASKED_END, TRAINED_END = 0, 1, 2
# a message's own word on whether it is trained; 0 or 1, as OpenAI's files have it
FLAG, WEIGHT = "train", "weight"
MOST_ENDS = 1000  # of calls that are remembered
# special tokens that open something, and what closes it
BRACKETS = ((r"<\|(\w+)>", "<{}|>"), (r"<(\w+)>", "</{}>"), (r"\[(\w+)\]", "[/{}]"))

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
    """A text with the character ranges of it that are trained.

    spans: ascending; lists where they come from a worker process. end: OPEN where the template
    itself ended the last turn, else the EOS token has to. lost: tokens that were left out before
    the text was written; fewer than 0 were written twice. goes_on: the conversation does so in
    another text.
    """

    text: str
    spans: Sequence[Sequence[int]]
    end: int
    lost: int = 0
    goes_on: bool = False


class Stops(NamedTuple):
    """What ends a turn of the assistant that another follows, and what ends the last one.

    None where nothing does, or nobody can tell.

    opening: the assistant's header as the generation prompt has it, empty where there is none.
    leads: what the template writes between that and the words of a turn, longest first: the model
    has to write it (`<|channel|>final<|message|>`), so it is trained.
    """

    middle: str | None
    last: str | None
    opening: str = ""
    leads: tuple[str, ...] = ()


def flag_of(message: Message) -> bool | None:
    """Whether a message itself says that it is trained; None where it says nothing."""
    flag = message.get(FLAG)
    weight = message.get(WEIGHT)
    return bool(weight) if flag is None and weight is not None else flag


def turns_to_train(
    messages: Sequence[Message], train_on: str, roles: Sequence[str], prompt: int = 0
) -> list[int]:
    """The messages behind a prompt of so many that are trained: those of `roles` that train_on
    chooses, where their own `train` or `weight` does not say.
    """
    flags = [flag_of(message) for message in messages]
    turns = [i for i in range(prompt, len(messages)) if messages[i].get("role") in roles]
    asked = {
        "assistant": turns,
        "last_assistant": turns[-1:],
        "completion": [i for i in turns if i == len(messages) - 1],
    }[train_on]
    return [
        i for i in range(prompt, len(messages)) if (i in asked if flags[i] is None else flags[i])
    ]


class Spans:
    """Rendering with spans, for one template.

    closers: the special tokens of the tokenizer. empty_thoughts: whether a thought without words,
    which templates of models that reason write in front of an answer, is trained. ends: of which
    trained turns what ends them is trained too: every `turn`, the `last` one, or `none`. roles:
    whose turns are trained. mask: whether what they think is none of it.
    """

    def __init__(
        self,
        template: Template,
        closers: Sequence[str],
        empty_thoughts: bool = True,
        ends: str = "turn",
        roles: Sequence[str] = ("assistant",),
        mask: bool = False,
    ) -> None:
        self.template, self.empty_thoughts, self.ends = template, empty_thoughts, ends
        self.roles, self.mask = roles, mask
        words = sorted((re.escape(w) for w in closers if w.strip()), key=len, reverse=True)
        special = "|".join(words) or r"(?!)"  # which stands nowhere
        self.token = re.compile(special)
        self.closer = re.compile(rf"\s*(?:{special})")
        self.closed = re.compile(rf"(?:{special})\s*\Z")
        opening = "|".join(map(re.escape, filter(_opens_among(closers), closers)))
        self.opened = re.compile(rf"\s*(?:{opening or '(?!)'})\Z")
        self._longest = max(map(len, closers), default=0)
        self.known_ends: set[tuple[bool, str]] = set()

    def find(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None,
        train_on: str,
        answers: int | None = None,
    ) -> Rendered:
        """The text of a conversation, with the characters that are trained.

        train_on: which turns are trained where their own `train` or `weight` does not say;
        templates are not told of those keys. answers: how many of the last messages answer the
        others, which are a prompt; None where nobody says.

        Raises RenderError where the template refuses, UnprovenError where it cannot be told what is
        trained.
        """
        flagged = messages
        if any(flag_of(message) is not None for message in messages):
            messages = [
                {key: value for key, value in message.items() if key not in (FLAG, WEIGHT)}
                for message in messages
            ]
        text, marked = self.template.render(messages, tools)
        if train_on == "all":
            return Rendered(text, [(0, len(text))] if text else [], self._end(text, trained=True))
        prompt = 0 if answers is None else len(messages) - answers
        if answers is not None and train_on == "completion":
            start = self._behind_prompt(text, messages[:prompt], tools)
            return Rendered(text, [(start, len(text))], self._end(text, trained=True))
        every = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        trained = turns_to_train(flagged, train_on, self.roles, prompt)
        if not trained:
            return Rendered(text, [], OPEN)
        if self.template.marked and trained == every and not self.mask:
            spans = marked
        else:
            spans = self._proven(text, marked, messages, tools, trained)
        last = trained[-1] in every and bool(spans) and not text[spans[-1][1] :].strip()
        kept = {"turn": len(spans), "last": 1, "none": 0}[self.ends]
        cut = len(spans) - kept
        spans = [*map(functools.partial(self._without_stop, text), spans[:cut]), *spans[cut:]]
        return Rendered(text, spans, self._end(text, trained=last and kept > 0))

    def _without_stop(self, text: str, span: tuple[int, int]) -> tuple[int, int]:
        """A trained turn without what ends it, where it holds that."""
        start, stop = span
        for end in (self.stops.middle, self.stops.last):
            if end and text.endswith(end, start, stop):
                return start, stop - len(end)
        closed = self.closed.search(text, start, stop)
        return start, stop if closed is None else closed.start()

    def _behind_prompt(
        self, text: str, prompt: Sequence[Message], tools: Sequence[JsonValue] | None
    ) -> int:
        """Where in a text the generation prompt of its first messages ends, as far as the text
        begins with it.
        """
        asked, _ = self.template.render(prompt, tools, prompt=True)
        return len(asked) if text.startswith(asked) else num_shared(asked, text)

    def _end(self, text: str, *, trained: bool) -> int:
        said = text.rstrip()
        # its words are not all space
        if self.closed.search(text, max(0, len(said) - self._longest)):
            return OPEN
        stop = self.stops.last
        if stop is not None and said.endswith(stop.strip()):
            return OPEN
        return TRAINED_END if trained else MASKED_END

    def _proven(
        self,
        text: str,
        marked: list[tuple[int, int]],
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None,
        trained: list[int],
    ) -> list[tuple[int, int]]:
        """What is proven with other words in place of everyone's, else with those of the assistant
        alone replaced: a template may look into what users and tools say.
        """
        errors: list[UnprovenError | RenderError] = []
        for everyone in (True, False):
            try:
                others = range(len(messages)) if everyone else trained
                aligned = _Aligned(self, text, messages, tools, others)
                answers = [i for i in trained if messages[i].get("role") == "assistant"]
                answers = answers if self.template.marked else []
                rest = [i for i in trained if i not in answers]
                spans = sorted([*aligned.marked(marked, answers), *aligned.spans(rest)])
                return aligned.without_thoughts(spans) if self.mask else spans
            except (UnprovenError, RenderError) as error:
                errors.append(error)
        if isinstance(errors[0], RenderError):
            raise UnprovenError(
                f"the template does not render other words in place of these: {errors[0]}"
            )
        raise errors[0]

    @functools.cached_property
    def stops(self) -> Stops:
        """What ends the assistant's turns, seen on two questions and their answers."""
        unknown = Stops(None, None)
        words = [f"easypipe{name}probe" for name in ("One", "Two", "Three", "Four")]
        text, talk, tools = "", [], None
        # some templates only know typed parts, some only rows with tools
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
        opening = _OPENED_THOUGHT.sub("", opening)
        leads = {
            gap.rpartition(opening)[2] for gap in (gaps[0], gaps[2]) if opening and opening in gap
        }
        middle, last = self._ends(before, gaps, alone)
        return Stops(middle, last, opening, tuple(sorted(leads - {""}, key=len, reverse=True)))

    def _after(
        self,
        messages: Sequence[Message],
        word: str,
        tools: Sequence[JsonValue] | None,
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
        shared = num_shared(between[::-1], before[::-1])
        middle = between[: len(between) - shared].rstrip() or None
        return middle, middle if middle is not None and tail.startswith(middle) else None

    def _heads(self, token: str, before: str) -> bool:
        """Whether a special token stands in front of the first word with no text before it."""
        head, found, _ = before.partition(token)
        return bool(found) and not self.token.sub("", head).strip()

    def _whole_run(self, before: str, between: str, tail: str, alone: str, end: int) -> str:
        """All special tokens that end a turn, in the middle and at the end alike: those before the
        one that opens the user's turn.
        """
        while (found := self.closer.match(tail, end)) is not None and between.startswith(
            found[0], end
        ):
            opens = before.endswith(
                found[0].lstrip() + between[found.end() :]
            ) and not alone.lstrip().startswith(found[0].strip())
            if opens:
                break
            end = found.end()
        return tail[:end]


class _Aligned:
    """A conversation as it was written, beside one with sentinels in place of its texts.

    others: the messages that are replaced besides the assistant's. Raises UnprovenError where the
    two cannot be read side by side, RenderError where the template refuses other words.
    """

    def __init__(
        self,
        known: Spans,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None,
        others: Sequence[int],
    ) -> None:
        self._known, self._text, self._tools = known, text, tools
        self._words = words = Sentinels(text, messages)
        self._changed = [
            words.replace(i, m) if i in others or m.get("role") == "assistant" else m
            for i, m in enumerate(messages)
        ]
        self._places = align(text, self._render(self._changed), words)
        self._owners = [words.owner[place.word] for place in self._places]

    def marked(self, marked: list[tuple[int, int]], trained: list[int]) -> list[tuple[int, int]]:
        """Of the marked spans those of the turns `trained`: each has to hold texts of one message
        alone.
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

    def spans(self, trained: list[int]) -> list[tuple[int, int]]:
        """What the turns `trained` say, with what the model writes in front of it, and the stop."""
        spans = [self._span(i) for i in trained if self._says(i)]
        if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
            raise UnprovenError("trained turns overlap")
        return spans

    def without_thoughts(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of trained spans stands behind the reasoning in them."""
        found: list[tuple[int, int]] = []
        for start, stop in spans:
            inside = [n for n, one in enumerate(self._places) if start <= one.start < stop]
            thinks = [self._places[n].word in self._words.thoughts for n in inside]
            count = sum(thinks)
            if thinks != sorted(thinks, reverse=True):
                raise UnprovenError("reasoning stands behind words of its turn")
            if count < len(inside):
                found.append((self._answer(inside[count]) if count else start, stop))
            elif not count:
                found.append((start, stop))
        return found

    def _answer(self, n: int) -> int:
        """Where the model begins to answer when it has thought: in front of place n, as far as what
        stands there stands there without the reasoning too.
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
        """Whether message i is no empty turn."""
        if i not in self._owners and i in self._words.owner.values():
            raise UnprovenError(f"the template does not print what message {i} says")
        return i in self._owners

    def _span(self, i: int) -> tuple[int, int]:
        words, text, places = self._words, self._text, self._places
        first = self._owners.index(i)
        before = places[first - 1].stop if first else 0
        gap = text[before : places[first].start]
        if self._changed[i].get("role") != "assistant":
            return self._others(i, first)
        after = ""
        for behind in self._behind(i, first):
            run, later = places[first:behind], places[behind:]
            said = {place.word for place in run}
            calls = words.of_calls.get(i, [])
            if self._changed[i].get("tool_calls") and (
                not calls or any(map(said.isdisjoint, calls))
            ):
                raise UnprovenError(f"the template does not print the tool calls of message {i}")
            plain = len(run) == 1 and run[0].word in words.whole
            after = text[run[-1].stop : later[0].start if later else len(text)]
            end = self._plain_end(after, i, plain=plain)
            if end is None and not plain:
                end = self._end_of_call(after, i, run, follows=self._owners[behind:][:1])
            if end is None:
                continue
            if not plain:  # what opens another's words ends no turn
                end = len(self._known.opened.sub("", after[:end]))
            start = before + (self._lead(gap) if plain else self._header(gap, i, first))
            return start, run[-1].stop + end
        raise UnprovenError(
            f"nothing that is known to end a turn follows message {i}: {after[:40]!r}"
        )

    def _others(self, i: int, first: int) -> tuple[int, int]:
        """What message i, which is not the assistant's, says; with what follows it where that is
        what ends the assistant's turns.
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
        """The places behind which the turn of message i may end, which stands in one piece from
        `first` on; the likeliest first.

        A template may name a function again: in the call itself, or where it prints what that
        returned, when the turn has ended.
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
                raise UnprovenError(f"the text of message {i} does not stand in one piece")
            raise UnprovenError(f"the template prints the text of message {i} more than once")
        return range(new, stop + 1)

    def _lead(self, gap: str) -> int:
        """Where in the gap before the words of a turn the model begins to write."""
        if (thought := _ENDS_IN_EMPTY_THOUGHT.search(gap)) is not None:
            return thought.start() if self._known.empty_thoughts else thought.end()
        stops = self._known.stops
        return next(
            (len(gap) - len(lead) for lead in stops.leads if gap.endswith(stops.opening + lead)),
            len(gap),
        )

    def _is_last(self, i: int) -> bool:
        return i == len(self._changed) - 1

    def _stop(self, i: int) -> str | None:
        return self._known.stops.last if self._is_last(i) else self._known.stops.middle

    def _plain_end(self, gap: str, i: int, *, plain: bool) -> int | None:
        """How much of the gap behind the last text of message i ends its turn, the stop included;
        None where that cannot be read off it. plain: the message is words alone.
        """
        last, stop, space = self._is_last(i), self._stop(i), len(gap) - len(gap.lstrip())
        if stop is not None and gap.startswith(stop):
            return len(stop)
        if plain and stop is not None and gap.startswith(stop.lstrip(), space):
            return space + len(stop.lstrip())
        if last and not gap.strip():
            return 0  # the EOS token will end it
        if last and plain and (found := self._known.closer.fullmatch(gap.rstrip())):
            return found.end()  # a special token and nothing behind it
        return None

    def _end_of_call(
        self, gap: str, i: int, run: Sequence[Place], follows: Sequence[int]
    ) -> int | None:
        """How much of the gap ends a turn that is not words alone: it stands there whether or not
        something follows. run: its texts. follows: whose the text behind the gap is.
        """
        known, last, stop = self._known, self._is_last(i), self._stop(i) or ""
        inside = gap.find(stop.strip()) if stop and (last or list(follows) == [i + 1]) else -1
        whole = gap[: inside + len(stop.strip())] if inside >= 0 else ""
        # a special token before which there is none that could have opened another turn
        first = known.token.search(gap) if whole else None
        if (last, whole) in known.known_ends or (first is not None and first.start() >= inside):
            return len(whole)
        other = self._other_gap(i, [place.word for place in run])
        if other is None:  # a template may refuse half a conversation
            return None
        if not whole and (closing := known.token.findall(stop)[-1:]):
            # a call is closed otherwise than words are, and then with the same token
            whole = gap[: gap.find(closing[0]) + len(closing[0])] if closing[0] in gap else ""
        if whole and other.startswith(whole):
            if len(known.known_ends) < MOST_ENDS:
                known.known_ends.add((last, whole))
            return len(whole)
        end, longer = (gap.rstrip(), other) if last else (other.rstrip(), gap)
        if not end.strip() or not longer.startswith(end):
            return None
        opened = known.stops.opening.strip()
        closed = known.closed.search(end) is not None and not (opened and end.endswith(opened))
        # where the EOS token will end it
        return len(end) if closed or (last and known.stops.last is None) else None

    def _other_gap(self, i: int, said: Sequence[str]) -> str | None:
        """What follows the last of the words of message i where nothing follows that message, or
        something where it is the last one.
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
        """A word in the form in which message i speaks: typed parts, or text."""
        parts = isinstance(self._changed[i].get("content"), list)
        return [{"type": "text", "text": word}] if parts else word

    def _header(self, gap: str, i: int, first: int) -> int:
        """How much of the gap before message i opens the turn, and is not said by the assistant.
        first: how many texts stand before it."""
        if i and not first:
            raise UnprovenError(f"where the turn of message {i} begins cannot be told")
        header = self._opened(gap, i)
        if not self._known.empty_thoughts and (thought := _EMPTY_THOUGHT.match(gap, header)):
            return thought.end()
        return header

    def _opened(self, gap: str, i: int) -> int:
        before = self._changed[:i]
        try:
            asked = self._tail(self._render(before, prompt=True))
            if asked != self._tail(self._render(before)):
                asked = _OPENED_THOUGHT.sub("", asked)
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
        other = _OPENED_THOUGHT.sub("", self._tail(text[: text.index(word)]))
        shared = num_shared(gap, other)
        half = _HALF_TAG.search(gap, 0, shared) if shared < len(gap) else None
        return shared if half is None else half.start()

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self._known.template.render(messages, self._tools, prompt=prompt)[0]

    def _tail(self, text: str) -> str:
        """What follows the last sentinel."""
        return self._words.pattern.split(text)[-1]


def _opens_among(tokens: Sequence[str]) -> Callable[[str], bool]:
    """Tells a token that opens what another one of `tokens` closes."""
    return lambda token: any(
        (name := re.fullmatch(form, token)) and partner.format(name[1]) in tokens
        for form, partner in BRACKETS
    )


def num_shared(one: Sequence[JsonValue], two: Sequence[JsonValue]) -> int:
    """How many characters, or messages, both begin with."""
    pairs = zip(one, two, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
