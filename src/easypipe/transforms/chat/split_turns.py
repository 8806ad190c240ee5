"""Conversations that are longer than a row of packing, in several documents that are conversations
too.

exchange   a question, and all that follows it up to the next one: answers, calls of tools, results
piece      the system message and some exchanges, written by the template as a conversation of its own
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.transforms.chat.render import ChatTemplate, HostileTemplateError, Refused, Rendered
from easypipe.transforms.chat.spans import FLAG, OPEN, WEIGHT, flag_of
from easypipe.transforms.prompt.fields import BENIGN
from easypipe.transforms.tokenizer.masked import encode_masked
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

CUT_BY = "split_turns"  # what the ledger calls them
Request = Mapping[str, Any]


def split_at_turns(
    template: ChatTemplate,
    answers: Sequence[Rendered | Refused],
    request: Callable[[int], Request | Refused],
    tokenizer: Tokenizer,
    room: int,
) -> list[list[Rendered | Refused]]:
    """Of each answer its pieces of at most `room` tokens, in order; an exchange that has more is a
    piece.

    The last pieces hold the most exchanges. A piece trains what the whole does, and one without a
    target is left out. What the template refuses in pieces stays whole, as does what fits.
    request: what the answer of that number was rendered from. Raises HostileTemplateError.
    """
    result: list[list[Rendered | Refused]] = [[one] for one in answers]
    long = {
        i: one
        for i, one in enumerate(answers)
        if isinstance(one, Rendered) and one.spans and len(one.text.encode()) >= room
    }
    sizes = dict(zip(long, _sizes(list(long.values()), tokenizer).tolist(), strict=True))
    talks = {
        i: _Talk(made, template.train_on)
        for i in long
        if sizes[i] > room and isinstance(made := request(i), Mapping)
    }
    talks = {i: talk for i, talk in talks.items() if len(talk.starts) > 1}
    alone = [(i, k) for i, talk in talks.items() for k in range(len(talk.starts))]
    # what is trained is asked of the pieces alone that are kept
    everything = dataclasses.replace(template, train_on="all")
    each = dict(
        zip(
            alone,
            _measured(everything, [(i, talks[i].part(k, k + 1)) for i, k in alone], tokenizer),
            strict=True,
        )
    )
    for i in {i for (i, _), size in each.items() if size is None}:
        del talks[i]
    stop = {i: len(talk.starts) for i, talk in talks.items()}  # exchanges that are in no piece yet
    costs = {
        i: _costs([each[i, k] or 0 for k in range(count)], sizes[i]) for i, count in stop.items()
    }
    count = {i: _guess(*costs[i], room) for i in stop}  # exchanges of the piece that is tried
    pieces: dict[int, list[Request]] = {i: [] for i in talks}
    while stop:
        tried = [(i, talks[i].part(stop[i] - count[i], stop[i])) for i in stop]
        for (i, part), size in zip(tried, _measured(everything, tried, tokenizer), strict=True):
            if size is None:
                del stop[i], pieces[i]
            elif size > room and count[i] > 1:
                count[i] -= 1
            else:
                pieces[i].insert(0, part)
                stop[i] -= count[i]
                if not stop[i]:
                    del stop[i]
                else:
                    again, more = costs[i]
                    count[i] = _guess(again, more[: stop[i]], room)
    made = iter(_render(template, [(i, part) for i, parts in pieces.items() for part in parts]))
    for i, parts in pieces.items():
        found = [next(made) for _ in parts]
        if all(isinstance(one, Rendered) or one.reason == BENIGN for one in found):
            result[i] = list(_joined(long[i], found, tokenizer))
    return result


class _Talk:
    """starts: the number of the first message of each exchange."""

    def __init__(self, request: Request, train_on: str) -> None:
        self._request = request
        messages = self._messages = _flagged(request["messages"], train_on)
        self._first = int(messages[0]["role"] == "system")
        answer = max(
            (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1
        )
        questions = (i for i in range(self._first + 1, answer) if messages[i]["role"] == "user")
        self.starts = [
            self._first,
            *(i for i in questions if messages[i - 1]["role"] not in ("user", "system")),
        ]

    def part(self, start: int, stop: int) -> Request:
        """Exchanges `start` to `stop` behind the system message."""
        end = self.starts[stop] if stop < len(self.starts) else len(self._messages)
        return {
            **self._request,
            "messages": [*self._messages[: self._first], *self._messages[self.starts[start] : end]],
        }


def _flagged(messages: Sequence[Mapping[str, Any]], train_on: str) -> Sequence[Mapping[str, Any]]:
    """The messages, each answer with a word on whether it is trained where its place in the whole
    decides that.
    """
    if train_on == "assistant":
        return messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asked = (
        turns[-1:] if train_on == "last_assistant" else [i for i in turns if i == len(messages) - 1]
    )
    found = list(messages)
    for i in turns:
        flag = flag_of(messages[i])
        found[i] = {
            **{k: v for k, v in messages[i].items() if k != WEIGHT},
            FLAG: i in asked if flag is None else flag,
        }
    return found


def _costs(each: Sequence[int], whole: int) -> tuple[int, list[int]]:
    """Tokens that every piece has, such as the system message, and those that each exchange adds to
    it. each: of it alone.
    """
    again = max(0, (sum(each) - whole) // (len(each) - 1))
    return again, [size - again for size in each]


def _guess(again: int, costs: Sequence[int], room: int) -> int:
    """How many of the last exchanges fit."""
    totals = again + np.cumsum(costs[::-1])
    return max(1, int(np.count_nonzero(totals <= room)))


def _render(
    template: ChatTemplate, tried: Sequence[tuple[int, Request]]
) -> list[Rendered | Refused]:
    """tried: with the number of the row, for errors."""
    try:
        return template.render([request for _, request in tried]) if tried else []
    except HostileTemplateError as error:
        error.row = tried[error.row][0]
        raise


def _measured(
    template: ChatTemplate, tried: Sequence[tuple[int, Request]], tokenizer: Tokenizer
) -> list[int | None]:
    """Tokens of each; None where the template refuses it."""
    made = _render(template, tried)
    sizes = iter(_sizes([one for one in made if isinstance(one, Rendered)], tokenizer).tolist())
    return [next(sizes) if isinstance(one, Rendered) else None for one in made]


def _joined(
    whole: Rendered, pieces: Sequence[Rendered | Refused], tokenizer: Tokenizer
) -> list[Rendered]:
    """The pieces that have a target. The last turn of each but the last ends as it does in the
    whole, where it is no last turn.
    """
    made = [(number, piece) for number, piece in enumerate(pieces) if isinstance(piece, Rendered)]
    ends = np.cumsum([len(piece.spans) for _, piece in made])
    aligned = len(made) > 0 and ends[-1] == len(whole.spans)
    found = []
    for (number, piece), end in zip(made, ends.tolist(), strict=True):
        if number < len(pieces) - 1:
            if aligned and piece.spans:
                first, last = whole.spans[end - 1]
                piece = _ended(piece, whole.text[first:last])
            piece = piece._replace(end=OPEN, goes_on=True)
        if any(b > a for a, b in piece.spans):
            found.append(piece)
    if not found:
        return [whole]
    size, *sizes = _sizes([whole, *found], tokenizer, row=False).tolist()
    return [found[0]._replace(lost=size - sum(sizes)), *found[1:]]


def _ended(piece: Rendered, trained: str) -> Rendered:
    """trained: what the whole trains of the last turn that the piece does. A template may write an
    end of the whole behind it, or leave out the end of a turn there."""
    *before, (first, last) = piece.spans
    here = piece.text[first:last]
    if here == trained or not (here.startswith(trained) or trained.startswith(here)):
        return piece
    return piece._replace(
        text=piece.text[:first] + trained, spans=[*before, [first, first + len(trained)]]
    )


def _sizes(
    found: Sequence[Rendered], tokenizer: Tokenizer, *, row: bool = True
) -> NDArray[np.int64]:
    """Int64[n] tokens of each. row: with the EOS that packing puts behind one that does not end
    with it.
    """
    texts = pa.array([one.text for one in found], pa.large_string())
    made = encode_masked(
        tokenizer,
        texts,
        [one.spans for one in found],
        [one.end for one in found],
        raw=False,
        whole=True,
    )
    sizes = np.diff(made.offsets)
    if row and len(found):
        last = [
            made.ids[max(stop - 2, start) : stop]
            for start, stop in zip(made.offsets[:-1], made.offsets[1:], strict=True)
        ]
        sizes = sizes + np.array([tokenizer.eos_token_id not in ids.tolist() for ids in last])
    return sizes.astype(np.int64)
