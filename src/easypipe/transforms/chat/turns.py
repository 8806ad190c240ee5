"""Cuts long conversations between turns: the oldest left out, in pieces, or in samples by turn.

In this file:
    question: A message from the user that an answer follows; every cut is before a question.
    exchange: A question, and all that follows it up to the next one: answers, calls of tools,
        results.
    piece: The system message and some exchanges, which the template writes as a conversation of its
        own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from easypipe.core.values import Int64
from easypipe.transforms.chat.pool import Asked
from easypipe.transforms.chat.render import ChatTemplate, HostileTemplateError
from easypipe.transforms.chat.sandbox import Json, Message
from easypipe.transforms.chat.sentinels import has_reasoning
from easypipe.transforms.chat.spans import FLAG, OPEN, WEIGHT, Rendered, turns_to_train
from easypipe.transforms.chat.stops import num_shared
from easypipe.transforms.refused import TOO_LONG, Refused
from easypipe.transforms.tokenizer.lengths import Lengths
from easypipe.transforms.tokenizer.masked import encode_masked
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, UnencodableError

CUT_BY = "split_turns"  # the ledger's name for conversations that were cut
Sample = tuple["Asked | Refused", "Answer"]  # the request, and its answer
# `messages`, `tools` and sometimes `answers`, as ChatTemplate.render takes them
Request = Mapping[str, Json]
Answer = Rendered | Refused


def trimmed(
    template: ChatTemplate,
    asked: Sequence[Asked | Refused],
    answers: Sequence[Answer],
    lengths: Lengths,
) -> list[Answer]:
    """Renders answers that are too long again, with as few turns left out as possible.

    The system prompt and the last turn of the assistant stay, with the question before it. A
    conversation that is still too long is Refused. The answers were rendered from `asked`. If they
    are those of pairs (the preferred ones first, then the others), both answers of a pair lose the
    same turns, which are at the beginning that they share.

    Returns:
        All answers; `Rendered.lost` says how many tokens were left out.
    """
    assert lengths.limit is not None
    limit, half = lengths.limit, len(answers) // 2
    result, sizes = list(answers), _sizes(answers, lengths.tokenizer)
    alone = [(i,) for i in range(len(answers))]
    groups = [(i, i + half) for i in range(half)] if lengths.pairs else alone
    requests = {i: row for i, row in enumerate(asked) if isinstance(row, Mapping)}
    starts: dict[tuple[int, ...], list[int]] = {}
    for group in groups:
        if min(sizes[list(group)]) and max(sizes[list(group)]) > limit:
            starts[group] = _shared_questions([requests[i] for i in group])
    for i in (i for group in starts for i in group if sizes[i] > limit):
        detail = (
            f"{sizes[i]} tokens; its system prompt and last turn alone are more than "
            f"max_length {limit}"
        )
        result[i] = Refused(TOO_LONG, detail)
    # How many turns are left out: more than low; high is known to be enough.
    low, high = dict.fromkeys(starts, 0), {group: len(at) for group, at in starts.items()}
    tried = {group: count for group, count in high.items() if count}  # can it be enough at all?
    while tried:
        fewer = [
            (i, _from(requests[i], starts[group][count - 1]))
            for group, count in tried.items()
            for i in group
        ]
        made = _rendered(template, fewer)
        new = dict(zip([i for i, _ in fewer], _sizes(made, lengths.tokenizer), strict=True))
        texts = dict(zip(new, made, strict=True))
        for group, count in tried.items():
            if not all(0 < new[i] <= limit for i in group):
                low[group] = count
                continue
            high[group] = count
            for i in group:
                if isinstance(one := texts[i], Rendered):
                    result[i] = one._replace(lost=int(sizes[i] - new[i]))
        tried = {
            group: (low[group] + high[group]) // 2
            for group in tried
            if high[group] - low[group] > 1
        }
    return result


def _shared_questions(requests: Sequence[Request]) -> list[int]:
    """Returns the questions of one prompt, or of two with the same beginning, that may be first."""
    talks = [request["messages"] for request in requests]
    found = [
        {at for at in _questions(talk) if at < len(talk) - request.get("answers", 0)}
        for talk, request in zip(talks, requests, strict=True)
    ]
    shared = num_shared(talks[0], talks[-1])
    return sorted(at for at in set.intersection(*found) if at <= shared)


def _from(request: Request, start: int) -> Request:
    """Returns the conversation from message `start` on, after its system message."""
    talk = request["messages"]
    return {**request, "messages": [*_system(talk), *talk[start:]]}


def by_turns(template: ChatTemplate, asked: Sequence[Asked | Refused]) -> list[list[Sample]]:
    """Makes a sample of each trained turn, if a conversation holds reasoning; others stay whole.

    A sample ends with its turn. If a later sample writes a turn, and everything before it, in the
    same way, the turn is trained on there. Samples are in the order of their last turns. A
    conversation is refused as a whole.

    Raises:
        HostileTemplateError: The template went beyond its limits.
    """
    tried: list[tuple[int, Asked | Refused]] = []
    for row, one in enumerate(asked):
        ends: list[int] = []
        if isinstance(one, Mapping) and any(map(has_reasoning, one["messages"])):
            ends = turns_to_train(one["messages"], template.train_on, template.roles_to_train)
        tried += [(row, _until(one, end)) for end in ends if isinstance(one, Mapping)]
        tried += [] if ends else [(row, one)]
    found: list[list[Sample]] = [[] for _ in asked]
    for (row, one), answer in zip(tried, _rendered(template, tried), strict=True):
        found[row].append((one, answer))
    return [_fewest(samples) for samples in found]


def _until(request: Request, end: int) -> Request:
    """Returns the conversation up to message `end`, with only that message trained on."""
    conversation = request["messages"][: end + 1]
    return {**request, "messages": [_with_flag(m, i == end) for i, m in enumerate(conversation)]}


def _fewest(samples: Sequence[Sample]) -> list[Sample]:
    """Leaves out samples of one turn if a later sample writes that turn in the same way."""
    wrong = [one for one in samples if isinstance(one[1], Refused) and not one[1].benign]
    found: list[tuple[Request, Rendered]] = []
    for request, one in reversed([] if wrong or len(samples) == 1 else samples):
        if not isinstance(one, Rendered) or not isinstance(request, Mapping):
            continue
        said = one.text[: one.spans[-1][1]]
        for n, (later, whole) in enumerate(found):
            if one.end == OPEN and whole.text.startswith(said):
                conversation, last = list(later["messages"]), len(request["messages"]) - 1
                conversation[last] = _with_flag(conversation[last], trained=True)
                spans = [*one.spans, *whole.spans]
                found[n] = {**later, "messages": conversation}, whole._replace(spans=spans)
                break
        else:
            found.insert(0, (request, one))
    return [*found] or [*wrong, *samples][:1]


def split_at_turns(
    template: ChatTemplate,
    answers: Sequence[Answer],
    request: Callable[[int], Request | Refused],
    tokenizer: Tokenizer,
    room: int,
) -> list[list[Answer]]:
    """Cuts each answer into pieces of at most `room` tokens, in order.

    An exchange that has more is a piece of its own. The last pieces hold the most exchanges. A
    piece has the trained spans of the whole, and a piece without a target is left out.
    Conversations that fit, or that the template refuses in pieces, stay whole.

    Args:
        answers: The rendered conversations.
        request: Returns the request from which the answer of that number was rendered.
        room: The most tokens of a piece.

    Raises:
        HostileTemplateError: The template went beyond its limits.
    """
    result: list[list[Answer]] = [[one] for one in answers]
    long = {
        i: one
        for i, one in enumerate(answers)
        if isinstance(one, Rendered) and one.spans and len(one.text.encode()) >= room
    }
    sizes = _sizes(list(long.values()), tokenizer, row=True)
    cuts = [
        _Cut(i, made, template.train_on, size)
        for i, size in zip(long, sizes.tolist(), strict=True)
        if size > room and isinstance(made := request(i), Mapping)
    ]
    cuts = [cut for cut in cuts if cut.left > 1]
    # Only pieces that are kept are rendered with their trained spans.
    everything = dataclasses.replace(template, train_on="all")
    alone = [(cut.row, cut.part(k, k + 1)) for cut in cuts for k in range(cut.left)]
    each = iter(_sizes(_rendered(everything, alone), tokenizer, row=True).tolist())
    cuts = [cut for cut in cuts if cut.weigh([next(each) for _ in range(cut.left)], room)]
    at_work = list(cuts)
    while at_work:
        tried = [(cut.row, cut.next) for cut in at_work]
        made = _rendered(everything, tried)
        for cut, size in zip(at_work, _sizes(made, tokenizer, row=True).tolist(), strict=True):
            cut.try_next(size, room)
        at_work = [cut for cut in at_work if cut.left]
    pieces = iter(_rendered(template, [(cut.row, piece) for cut in cuts for piece in cut.pieces]))
    for cut in cuts:
        found = [next(pieces) for _ in cut.pieces]
        if all(isinstance(one, Rendered) or one.benign for one in found):
            result[cut.row] = list(_joined(long[cut.row], found, tokenizer))
    return result


class _Cut:
    """A conversation that is being cut into pieces, from its end.

    Attributes:
        row: The number of the conversation.
        left: How many exchanges are not in a piece yet.
        pieces: The pieces so far.
    """

    def __init__(self, row: int, request: Request, train_on: str, size: int) -> None:
        self.row, self._request, self._size = row, request, size
        self._messages = messages = _flagged(request["messages"], train_on)
        later = (i for i in _questions(messages) if messages[i - 1]["role"] not in _BEFORE)
        self._starts = [len(_system(messages)), *later]
        self.left = len(self._starts)
        self.pieces: list[Request] = []

    def part(self, start: int, stop: int) -> Request:
        """Returns exchanges `start` to `stop`, after the system message."""
        edges = [*self._starts, len(self._messages)]
        some = self._messages[edges[start] : edges[stop]]
        return {**self._request, "messages": [*_system(self._messages), *some]}

    def weigh(self, each: Sequence[int], room: int) -> bool:
        """Takes the tokens of every exchange alone, 0 for one that the template refuses.

        Returns:
            Whether the template refuses none of them.
        """
        # tokens that every piece has, such as those of the system message
        self._again = max(0, (sum(each) - self._size) // (len(each) - 1))
        self._costs = np.array(each) - self._again
        self._guess(room)
        return all(each)

    @property
    def next(self) -> Request:
        """The piece that is tried next."""
        return self.part(self.left - self._count, self.left)

    def try_next(self, size: int, room: int) -> None:
        """Takes the tokens of `next`, 0 if the template refuses it."""
        if size > room and self._count > 1:
            self._count -= 1
            return
        self.pieces.insert(0, self.next)
        self.left -= self._count
        self._guess(room)

    def _guess(self, room: int) -> None:
        """Estimates how many of the last exchanges fit."""
        totals = self._again + np.cumsum(self._costs[: self.left][::-1])
        self._count = max(1, int(np.count_nonzero(totals <= room)))


_INSTRUCT = ("system", "developer")  # the roles of messages that say how to answer
_BEFORE = ("user", *_INSTRUCT)  # the roles before a message that is not the first question


def _system(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns the messages of the system and the developer that a conversation begins with."""
    return list(itertools.takewhile(lambda message: message["role"] in _INSTRUCT, messages))


def _questions(messages: Sequence[Message]) -> list[int]:
    """Returns the numbers of questions, without the first message.

    The last one is the question before the assistant's last turn.
    """
    roles = [message["role"] for message in messages]
    answer = max((i for i, role in enumerate(roles) if role == "assistant"), default=-1)
    first = len(_system(messages)) + 1
    return [i for i in range(first, answer) if roles[i] == "user"]


def _flagged(messages: Sequence[Message], train_on: str) -> Sequence[Message]:
    """Returns the messages, with flags on answers that are trained on because of their place."""
    if train_on == "assistant":
        return messages
    trained = turns_to_train(messages, train_on, ("assistant",))
    return [
        _with_flag(message, i in trained) if message["role"] == "assistant" else message
        for i, message in enumerate(messages)
    ]


def _with_flag(message: Message, trained: bool) -> Message:
    return {**{k: v for k, v in message.items() if k != WEIGHT}, FLAG: trained}


def _rendered(template: ChatTemplate, tried: Sequence[tuple[int, Asked | Refused]]) -> list[Answer]:
    """Renders requests; `tried` has the number of the row of each, for errors."""
    try:
        return template.render([request for _, request in tried]) if tried else []
    except HostileTemplateError as error:
        error.row = tried[error.row][0]
        raise


def _joined(whole: Rendered, pieces: Sequence[Answer], tokenizer: Tokenizer) -> list[Rendered]:
    """Returns the pieces that have a target.

    Except in the last piece, the last turn ends as it does in the whole, where other turns follow
    it.
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
    size, *sizes = _sizes([whole, *found], tokenizer).tolist()
    return [found[0]._replace(lost=size - sum(sizes)), *found[1:]]


def _ended(piece: Rendered, trained: str) -> Rendered:
    """Gives the last turn of a piece the end that it has in the whole conversation.

    A template may write an end of the whole after it, or leave out the end of a turn there.

    Args:
        trained: The trained text of the whole in the last turn of the piece.
    """
    *before, (first, last) = piece.spans
    here = piece.text[first:last]
    if here == trained or not (here.startswith(trained) or trained.startswith(here)):
        return piece
    return piece._replace(
        text=piece.text[:first] + trained, spans=[*before, [first, first + len(trained)]]
    )


def _sizes(answers: Sequence[Answer], tokenizer: Tokenizer, *, row: bool = False) -> Int64:
    """Returns Int64[n], the tokens of each answer; 0 for those that are or will be refused.

    With `row`, the count includes the EOS that packing adds to an answer that does not end with it.
    """
    good = [(i, one) for i, one in enumerate(answers) if isinstance(one, Rendered)]
    texts = pa.array([one.text for _, one in good], pa.large_string())
    spans, ends = [one.spans for _, one in good], [one.end for _, one in good]
    sizes = np.zeros(len(answers), np.int64)
    try:
        made = encode_masked(tokenizer, texts, spans, ends, raw=False, whole=True)
    except UnencodableError:
        if len(answers) == 1:
            return sizes
        return np.concatenate([_sizes([one], tokenizer, row=row) for one in answers])
    for (i, _), (start, stop) in zip(good, itertools.pairwise(made.offsets.tolist()), strict=True):
        last = made.ids[max(stop - 2, start) : stop].tolist()
        sizes[i] = stop - start + (row and tokenizer.eos_token_id not in last)
    return sizes
