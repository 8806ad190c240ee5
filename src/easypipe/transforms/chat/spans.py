"""Finds which turns, ends and characters of a conversation are trained on: proven, or refused.

The conversation is rendered twice, with its own texts and with sentinels (sentinels.py), so that it
is known where each text is. What ends and begins turns is found from a probe, and from renderings
of parts of the conversation. This runs in the worker process and imports little.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from easypipe.transforms.chat.aligned import Aligned
from easypipe.transforms.chat.sandbox import Message, RenderError, Template
from easypipe.transforms.chat.sentinels import UnprovenError
from easypipe.transforms.chat.stops import Turns, num_shared

if TYPE_CHECKING:
    from easypipe.core.values import JsonValue

# what follows the text: nothing, an EOS that the loss does not see, an EOS as a target
OPEN, MASKED_END, TRAINED_END = 0, 1, 2
LAST, MORE = b".", b"+"  # how frames of answers begin: the last of a request, or not
# keys by which a message says whether it is trained on; 0 or 1, as in OpenAI's files
FLAG, WEIGHT = "train", "weight"
# The key by which a message says which of its characters are trained on, as in axolotl's
# `message_field_training_detail`: objects of begin_offset, end_offset (the last character) and
# train.
RANGES = "train_ranges"


class Rendered(NamedTuple):
    """A text, with the character ranges of it that are trained on.

    Attributes:
        text: The text.
        spans: The ranges, ascending; lists if they come from a worker process.
        end: OPEN if the template itself ended the last turn; otherwise which EOS must follow.
        lost: How many tokens were left out before the text was written; a negative number means
            tokens that were written twice.
        goes_on: Whether the conversation continues in another text.
    """

    text: str
    spans: Sequence[Sequence[int]]
    end: int
    lost: int = 0
    goes_on: bool = False


def flag_of(message: Message) -> bool | None:
    """Returns whether a message itself says that it is trained on; None if it does not say."""
    if (flag := message.get(FLAG)) is not None:
        return flag
    if (said := message.get(WEIGHT)) is not None or (said := message.get(RANGES)) is not None:
        return bool(said)
    return None


def ranges_of(message: Message) -> list[tuple[int, int]] | None:
    """Returns the trained characters of a message's content; None if it does not say."""
    if not (given := message.get(RANGES)):
        return None
    return [(one["begin_offset"], one["end_offset"] + 1) for one in given if one["train"]]


def turns_to_train(
    messages: Sequence[Message], train_on: str, roles: Sequence[str], prompt: int = 0
) -> list[int]:
    """Returns the numbers of the messages that are trained on.

    Args:
        train_on: Which turns are trained on if their own `train` or `weight` does not say.
        roles: Whose turns train_on chooses among.
        prompt: How many of the first messages are a prompt, which is not trained on.
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


@dataclass
class Spans:
    """The renderer that finds trained spans, for one template.

    Attributes:
        template: The template.
        closers: The special tokens of the tokenizer.
        empty_thoughts: Whether the empty reasoning that templates of reasoning models write before
            an answer is trained on.
        ends: Which trained turns have their end trained on too: every `turn`, the `last` one, or
            `none`.
        roles: Whose turns are trained on.
        mask: Whether their reasoning is not trained on.
        end_tokens: The tokens that end what the model writes, if they are known.
    """

    template: Template
    closers: Sequence[str]
    empty_thoughts: bool = True
    ends: str = "turn"
    roles: Sequence[str] = ("assistant",)
    mask: bool = False
    end_tokens: Sequence[str] = ()

    @functools.cached_property
    def _turns(self) -> Turns:
        return Turns(self.template, self.closers, self.end_tokens)

    def find(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None,
        train_on: str,
        answers: int | None = None,
    ) -> Rendered:
        """Writes a conversation, and finds its trained spans.

        Args:
            train_on: Which turns are trained on if their own `train` or `weight` does not say;
                templates do not get those keys.
            answers: How many of the last messages answer the others, which are a prompt; None if
                the row does not say.

        Raises:
            RenderError: The template refuses the conversation.
            UnprovenError: It cannot be known what is trained on.
        """
        flagged = messages
        if any(flag_of(message) is not None for message in messages):
            messages = [
                {key: value for key, value in message.items() if key not in (FLAG, WEIGHT, RANGES)}
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
        partly = {i: some for i in trained if (some := ranges_of(flagged[i])) is not None}
        if self.template.marked and trained == every and not self.mask and not partly:
            spans = marked
        else:
            spans = self._proven(text, marked, messages, tools, trained, partly)
        last = trained[-1] in every and bool(spans) and not text[spans[-1][1] :].strip()
        kept = {"turn": len(spans), "last": 1, "none": 0}[self.ends]
        cut = len(spans) - kept
        spans = [*map(functools.partial(self._without_stop, text), spans[:cut]), *spans[cut:]]
        spans = [(start, stop) for start, stop in spans if start < stop]
        return Rendered(text, spans, self._end(text, trained=last and kept > 0))

    def _without_stop(self, text: str, span: tuple[int, int]) -> tuple[int, int]:
        """Returns a trained turn without the text that ends it, if it holds that."""
        start, stop = span
        for end in (self._turns.stops.middle, self._turns.stops.last):
            if end and text.endswith(end, start, stop):
                return start, stop - len(end)
        closed = self._turns.closed.search(text, start, stop)
        return start, stop if closed is None else closed.start()

    def _behind_prompt(
        self, text: str, prompt: Sequence[Message], tools: Sequence[JsonValue] | None
    ) -> int:
        """Returns where in a text the generation prompt of its first messages ends.

        If the text does not begin with that prompt, it is the place from which they differ.
        """
        asked, _ = self.template.render(prompt, tools, prompt=True)
        return len(asked) if text.startswith(asked) else num_shared(asked, text)

    def _end(self, text: str, *, trained: bool) -> int:
        """Returns what must follow a text: OPEN, TRAINED_END or MASKED_END."""
        if self._turns.is_ended(text):
            return OPEN
        return TRAINED_END if trained else MASKED_END

    def _proven(
        self,
        text: str,
        marked: list[tuple[int, int]],
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None,
        trained: list[int],
        partly: Mapping[int, list[tuple[int, int]]],
    ) -> list[tuple[int, int]]:
        """Returns the trained spans, as proven by two renderings.

        First the words of all messages are replaced, then those of trained ones alone, because a
        template may inspect what users and tools say.

        Raises:
            UnprovenError: Both proofs fail.
        """
        errors: list[UnprovenError | RenderError] = []
        for everyone in (True, False):
            try:
                others = range(len(messages)) if everyone else trained
                aligned = Aligned(
                    self._turns, text, messages, tools, others, empty_thoughts=self.empty_thoughts
                )
                answers = [i for i in trained if messages[i].get("role") == "assistant"]
                answers = answers if self.template.marked else []
                rest = [i for i in trained if i not in answers]
                ended = {"turn": trained, "last": trained[-1:], "none": []}[self.ends]
                spans = sorted([*aligned.marked(marked, answers), *aligned.spans(rest, ended)])
                spans = aligned.without_thoughts(spans) if self.mask else spans
                return aligned.narrowed(spans, partly)
            except (UnprovenError, RenderError) as error:
                errors.append(error)
        if isinstance(errors[0], RenderError):
            raise UnprovenError(
                f"the template does not render other words in place of these: {errors[0]}"
            )
        raise errors[0]
