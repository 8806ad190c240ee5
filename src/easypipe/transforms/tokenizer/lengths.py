"""LengthPolicy: where documents over max_length are cut, at which boundary, with what overlap.

Masks are made from whole texts and are cut with their tokens.

In this file:
    content: A document without the special tokens before it (BOS) and after it, which stay wherever
        it is cut.
    room: The most tokens of content: max_length less those special tokens.
    edge: A place between two tokens at which a sentence, a clause or a word ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from easypipe.core.config import config
from easypipe.core.errors import ConfigError, require
from easypipe.core.schema import offsets_of
from easypipe.core.values import Bools, Identity, Int64
from easypipe.transforms.tokenizer.config import length_limit
from easypipe.transforms.tokenizer.ragged import EncodedTexts, Ids, Mask
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

Boundary = Literal["sentence", "clause", "word"]

# Each pattern matches from the end of a sentence, clause or word to the beginning of the next. An
# edge of one kind counts for the weaker kinds too.
_ENDS: dict[str, re.Pattern[str]] = {
    # The first part: Latin, Arabic, Urdu, Hindi, Armenian, Amharic, Burmese, Khmer; the second:
    # Chinese.
    "sentence": re.compile(
        r"(?<=[.!?؟۔।॥։።။។])[\"'”’)\]»]*(\s+|\Z)|(?<=[。！？])[”’）」』]*(\s*)|\n+"
    ),
    "clause": re.compile(r"(?<=[,;:–—،؛])\s+|(?<=[，；：、])\s*"),
    "word": re.compile(r"\s+"),
}
# the ranges of content tokens of each document that is made from a text
_Pieces = list[list[tuple[int, int]]]
_CUT_PROMPTS = ("keep_end", "middle", "trim_oldest_turns", "trim_prompt_first")


@config
class LengthPolicy:
    """What happens to samples with more than max_length tokens.

    Args:
        policy: "error" makes them bad rows; "drop" leaves them out; "keep_start" and "keep_end"
            keep the start or the end; "middle" keeps both ends, half of the length each; "split"
            makes several documents. "trim_oldest_turns" removes whole turns of a conversation, the
            oldest first, but never the system prompt or the last turn. "trim_prompt_first" removes
            the beginning of the part before the first trained token, and cuts trained tokens at
            their end only if that is not enough.
        overlap: With "split", the number of tokens of the previous document that each document
            begins with, as context; they are not trained on again. With 0, the first token of each
            document is not trained on.
        boundary: Cut at the end of a sentence, a clause (or sentence) or a word, if at least half
            of the length stays; otherwise at the end of the next smaller unit, or at any token if
            no word ends.
        budgets: The most tokens of single columns of a prompt (not the label): {"context": 512}.
            Longer ones are cut at their end before the prompt is rendered; for a template in Jinja,
            only those that hold text.
    """

    policy: Literal[
        "error",
        "drop",
        "keep_start",
        "keep_end",
        "middle",
        "split",
        "trim_oldest_turns",
        "trim_prompt_first",
    ] = "keep_start"
    overlap: int = 0
    boundary: Boundary | None = None
    budgets: dict[str, int] | None = None

    def check(self) -> None:
        require(
            self.overlap >= 0 and (not self.overlap or self.policy == "split"),
            "overlap",
            f"{self.overlap} tokens"
            if self.overlap < 0
            else f"has no effect on policy {self.policy!r}",
            "Give 0 or more, with policy='split'.",
        )
        require(
            self.boundary is None
            or self.policy not in ("error", "drop", "trim_oldest_turns")
            or self.budgets,
            "boundary",
            f"has no effect on policy {self.policy!r}",
            "Leave it out.",
        )
        for name, tokens in (self.budgets or {}).items():
            require(
                tokens >= 1, f"budgets.{name}", f"{tokens} tokens are too few", "Give at least 1."
            )


class Lengths:
    """A LengthPolicy together with the tokenizer whose tokens it counts.

    Args:
        policy: The policy.
        tokenizer: The tokenizer.
        pairs: Whether texts are the answers of pairs, two in turn. What the policy takes from the
            beginning that both answers share, it takes from both.

    Raises:
        ConfigError: max_length is missing, or too small for the policy.
    """

    def __init__(self, policy: LengthPolicy, tokenizer: Tokenizer, *, pairs: bool = False) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.pairs = pairs
        self.limit = length_limit(tokenizer.config)
        require(
            self.limit is not None or (policy.policy == "keep_start" and policy.budgets),
            "length.policy",
            f"{policy.policy!r} needs a max_length",
            "Set it on the tokenizer, or tokenize.max_length.",
        )
        if (
            self.limit is not None
            and policy.overlap
            and policy.overlap > (most := (self.limit - tokenizer.specials_per_text) // 2 - 1)
        ):
            raise ConfigError(
                at="length.overlap",
                problem=f"{policy.overlap}, and max_length is {self.limit}",
                fix=f"Give at most {max(0, most)}.",
            )

    @property
    def masks(self) -> bool:
        """Whether texts whose tokens are all targets nevertheless need a mask.

        They do for an overlap, and for the tokenizer's own EOS, which also follows pieces whose
        text continues.
        """
        return self.policy.overlap > 0 or (
            self.policy.policy == "split" and bool(self.tokenizer.surrounding[1])
        )

    @property
    def identity(self) -> Identity:
        """The policy's part of the encoding key, with a version."""
        # Version 2: packing ends no document inside a text, and a boundary leaves at least one
        # token; a developer's message stays as the system's. Version 3: nor does the tokenizer's
        # own EOS end one there.
        masked = self.masks and not self.policy.overlap
        second = self.policy.policy in ("split", "trim_oldest_turns") or self.policy.boundary
        return [
            "lengths",
            3 if masked else 2 if second else 1,
            self.policy,
            *(["one prompt"] if self.pairs and self.policy.policy in _CUT_PROMPTS else []),
            *(["budgets of all values"] if self.policy.budgets else []),
        ]

    def within(self, text: str, budget: int) -> tuple[str, int]:
        """Cuts a text to at most `budget` tokens.

        Returns:
            (the text that stays, how many tokens it lost).
        """
        escaped = self.tokenizer.special.policy == "escape"
        ((ids, _, stops),) = self.tokenizer.encode_with_characters([text], escaped=escaped)
        if len(ids) <= budget:
            return text, 0
        keep = _Edges.of(text, stops, self.policy.boundary).before(budget, budget // 2)
        while keep:
            part = text[: int(stops[keep - 1])]
            ((found, _, _),) = self.tokenizer.encode_with_characters([part], escaped=escaped)
            if len(found) <= budget:
                break
            keep -= 1  # the tokens of a part may differ from those of the whole text
        return (text[: int(stops[keep - 1])], len(ids) - keep) if keep else ("", len(ids))


class Shaped(NamedTuple):
    """m documents made from n encoded texts.

    Attributes:
        offsets: Int64[m+1].
        ids: The tokens of all documents.
        mask: The targets; None if every token is a target.
        origin: Int64[m], the number of the text that each document is made from.
        added: Int64[m], the special tokens of each document.
        continued: Bool[m], the documents whose text continues in the next one, and the documents
            with a mask of their own that have lost their end.
        truncated: How many tokens of texts are in no document.
        refused: The numbers of the texts that are too long.
        untrained: The numbers of the texts that have no target left; a piece without a target is
            not a document.
        counts: For the ledger: texts (or pairs) over max_length under the name of the policy;
            `pieces`, how many more documents than texts there are; `overlap`, tokens of texts that
            are in a second document.
    """

    offsets: Int64
    ids: Ids
    mask: Mask | None
    origin: Int64
    added: Int64
    continued: Bools
    truncated: int
    refused: list[int]
    untrained: list[int]
    counts: dict[str, int]


class _Document(NamedTuple):
    """One of the documents that are made from a text.

    Attributes:
        tokens: Int64[m], the positions of its tokens.
        known: How many tokens at its start are in an earlier document too.
        ended: Whether it stops where its text does.
        continued: Whether its text continues in another document, or has lost its end.
    """

    tokens: Int64
    known: int
    ended: bool
    continued: bool = True


def shape(
    made: EncodedTexts, text_of: Callable[[int], str], lengths: Lengths, *, raw: bool
) -> Shaped:
    """Makes documents of at most max_length tokens.

    Args:
        made: The encoded texts, not cut yet.
        text_of: Returns the text that a document was made from, for boundaries.
        lengths: The policy and the tokenizer.
        raw: Whether the tokenizer's own special tokens are around the texts.
    """
    offsets, ids, mask = made.offsets, made.ids, made.mask
    sizes, count = np.diff(offsets), len(offsets) - 1
    if mask is None and lengths.masks:
        mask = np.ones(len(ids), np.uint8)
    over = np.flatnonzero(sizes > lengths.limit).tolist() if lengths.limit is not None else []
    if not over:
        same, none = np.arange(count), np.zeros(count, np.bool_)
        return Shaped(offsets, ids, mask, same, made.added, none, 0, [], [], {})
    tail = len(lengths.tokenizer.surrounding[1]) if raw else 0
    pieces = {i: _pieces(made, text_of, lengths, i, tail) for i in over}
    if lengths.pairs and lengths.policy.policy in _CUT_PROMPTS:
        for first in {i - i % 2 for i in over}:
            _cut_alike(made, lengths, pieces, first, tail)
    cut = {i: _documents(made, mask, lengths, i, pieces[i], tail) for i in sorted(pieces)}
    refused = [i for i in cut if cut[i] is None]
    untrained = [i for i in cut if cut[i] == []]
    documents = [one for some in cut.values() for one in some or ()]
    origin, at = _taken(offsets, cut)
    changed = np.flatnonzero(np.isin(origin, list(cut)))
    new_sizes, continued = sizes[origin], np.zeros(len(origin), np.bool_)
    new_sizes[changed] = [len(one.tokens) for one in documents]
    continued[changed] = [one.continued for one in documents]
    new = offsets_of(new_sizes)
    new_mask = None if mask is None else mask[at]
    if new_mask is not None:
        for number, one in zip(changed.tolist(), documents, strict=True):
            start, stop = new[number], new[number + 1]
            new_mask[start : start + one.known] = 0
            new_mask[stop - (0 if one.ended else tail) : stop] = 0
    special, uses = _special(made), np.bincount(at, minlength=len(ids))
    gone = np.isin(np.repeat(np.arange(count), sizes), refused + untrained)
    sums = np.concatenate([[0], np.cumsum(special[at])])
    counts = {
        lengths.policy.policy: len({i // 2 for i in over}) if lengths.pairs else len(over),
        "pieces": len(origin) + len(refused) + len(untrained) - count,
        "overlap": int((uses[~special] - 1).clip(0).sum()),
    }
    return Shaped(
        offsets=new,
        ids=ids[at],
        mask=new_mask,
        origin=origin,
        added=sums[new[1:]] - sums[new[:-1]],
        continued=continued,
        truncated=int(((uses == 0) & ~special & ~gone).sum()),
        refused=refused,
        untrained=untrained,
        counts={name: number for name, number in counts.items() if number},
    )


def _taken(offsets: Int64, cut: Mapping[int, Sequence[_Document] | None]) -> tuple[Int64, Int64]:
    """Returns (the text that each document is made from, the positions of all their tokens).

    Texts that are not in `cut` are taken whole.
    """
    taken: list[Int64] = []
    times, begin = np.ones(len(offsets) - 1, np.int64), 0
    for i, documents in cut.items():
        some = documents or ()
        taken += [np.arange(begin, offsets[i]), *(one.tokens for one in some)]
        times[i], begin = len(some), offsets[i + 1]
    at = np.concatenate([*taken, np.arange(begin, offsets[-1])])
    return np.repeat(np.arange(len(times)), times), at


def _special(made: EncodedTexts) -> Bools:
    """Returns Bool[total]: which tokens are special tokens around texts."""
    special = np.zeros(len(made.ids), np.bool_)
    for i in np.flatnonzero(made.added).tolist():
        first, stop, before = made.offsets[i], made.offsets[i + 1], made.before[i]
        special[first : first + before] = True
        special[stop - (made.added[i] - before) : stop] = True
    return special


def _content(made: EncodedTexts, lengths: Lengths, i: int, tail: int) -> tuple[int, int]:
    """Returns where the content of text i begins and ends among the tokens of all texts."""
    assert lengths.limit is not None
    first, stop = int(made.offsets[i]), int(made.offsets[i + 1])
    # a chat template may have written the BOS
    bos = made.ids[first] == lengths.tokenizer.bos_token_id and lengths.limit - tail > 1
    return first + (int(made.before[i]) or int(bos)), stop - tail


def _cut_alike(
    made: EncodedTexts, lengths: Lengths, pieces: dict[int, _Pieces], first: int, tail: int
) -> None:
    """Cuts what either answer of a pair loses of their prompt from both.

    The prompt is what both begin with, up to the last turn that is trained on.

    Args:
        pieces: The pieces of the answers that are too long, which this changes.
        first: The number of the preferred answer; that of the other one is the next.
    """
    pair = (first, first + 1)
    if [] in map(pieces.get, pair):
        return
    assert made.mask is not None
    (a, b), (c, d) = edges = [_content(made, lengths, i, tail) for i in pair]
    size = min(b - a, d - c) - 1
    parted = np.flatnonzero(made.ids[a : a + size] != made.ids[c : c + size])[:1].tolist()
    shared = min([size, *parted])
    stays = []
    for i, (low, high) in zip(pair, edges, strict=True):
        mask = made.mask[low:high]
        turns = np.flatnonzero(mask[1:] > mask[:-1])[-1:] + 1
        shared = min([shared, *turns.tolist()])
        stays.append(np.zeros(high - low, np.bool_))
        for start, stop in pieces[i][0] if i in pieces else [(low, high)]:
            stays[-1][start - low : stop - low] = True
    both = stays[0][:shared] & stays[1][:shared]
    for i, (low, _), kept in zip(pair, edges, stays, strict=True):
        kept[:shared] = both
        if i in pieces or not kept.all():
            ends = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]])))
            pieces[i] = [[(int(x), int(y)) for x, y in (ends + low).reshape(-1, 2)]]


def _documents(
    made: EncodedTexts, mask: Mask | None, lengths: Lengths, i: int, pieces: _Pieces, tail: int
) -> list[_Document] | None:
    """Makes the documents of text i from its pieces.

    Returns:
        Those that have a target; None if the text is refused.
    """
    if not pieces:
        return None
    first, stop = int(made.offsets[i]), int(made.offsets[i + 1])
    head = _content(made, lengths, i, tail)[0] - first
    tokenizer = lengths.tokenizer
    found: list[_Document] = []
    end = first  # the position up to which documents have the text
    for number, keep in enumerate(pieces):
        around = [(first, first + head), *keep, (stop - tail, stop)]
        tokens = np.concatenate([np.arange(a, b) for a, b in around])
        known = head + lengths.policy.overlap if number else 0
        if mask is None or mask[tokens[max(known, 1) :]].any():
            end = keep[-1][1]
            found.append(_Document(tokens, known, ended=end == stop - tail))
    if found and made.ids[end : pieces[-1][-1][1]].tolist() in ([], [tokenizer.eos_token_id]):
        found[-1] = found[-1]._replace(continued=False)  # the rest of the text has no target
    if made.mask is not None and lengths.policy.policy != "split":
        found = [one._replace(continued=one.continued or not one.ended) for one in found]
    return found


def _pieces(
    made: EncodedTexts, text_of: Callable[[int], str], lengths: Lengths, i: int, tail: int
) -> _Pieces:
    """Returns, for each document that is made from text i, its ranges of content tokens.

    Text i is too long. The list is empty if the policy refuses it.
    """
    assert lengths.limit is not None
    policy = lengths.policy
    if policy.policy in ("error", "drop", "trim_oldest_turns"):
        return []
    low, high = _content(made, lengths, i, tail)
    room = lengths.limit - (low - int(made.offsets[i])) - tail
    edges = _edges(made, text_of, lengths, i)
    if policy.policy == "keep_end":
        return [[(edges.after(high - room, high - max(1, room // 2)), high)]]
    if policy.policy == "middle":
        front = room - room // 2
        stop = edges.before(low + front, low + max(1, front // 2))
        return [[(low, stop), (edges.after(high - room // 2, high - max(1, room // 4)), high)]]
    if policy.policy == "split":
        pieces = []
        while high - low > room:
            stop = edges.before(low + room, low + max(policy.overlap + 1, room // 2))
            pieces.append([(low, stop)])
            low = stop - policy.overlap
        return [*pieces, [(low, high)]]
    if policy.policy == "trim_prompt_first":
        assert made.mask is not None
        trained = np.flatnonzero(made.mask[low:high])
        answer = low + int(trained[0]) if trained.size else high
        if high - answer <= room:
            return [[(edges.after(high - room, answer), high)]]
        low = answer
    return [[(low, edges.before(low + room, low + max(1, room // 2)))]]


def _edges(made: EncodedTexts, text_of: Callable[[int], str], lengths: Lengths, i: int) -> _Edges:
    """Returns the edges of text i, as positions among the tokens of all texts."""
    kind = lengths.policy.boundary
    if kind is None:
        return _Edges(())
    text, start = text_of(i), int(made.offsets[i] + made.before[i])
    size = int(made.offsets[i + 1] - made.offsets[i] - made.added[i])
    escaped = lengths.tokenizer.special.policy == "escape"
    ((ids, _, stops),) = lengths.tokenizer.encode_with_characters([text])
    if len(ids) != size and escaped:
        ((ids, _, stops),) = lengths.tokenizer.encode_with_characters([text], escaped=True)
    assert len(ids) == size, "tokens of a text are those that `tokenizers` makes of it"
    return _Edges.of(text, stops, kind, start)


class _Edges:
    """The places between tokens at which a text may be cut.

    Args:
        kinds: Ascending places for each kind of boundary, the wanted kind first.
    """

    def __init__(self, kinds: Sequence[Int64]) -> None:
        self._kinds = kinds

    @classmethod
    def of(cls, text: str, stops: Int64, kind: Boundary | None, start: int = 0) -> _Edges:
        """Finds the edges of a text.

        Args:
            stops: Int64[tokens], the character after each token.
            kind: The wanted boundary; None finds no edges.
            start: The position of the first token.
        """
        found: list[Int64] = []
        for pattern in _ENDS.values() if kind is not None else ():
            edge = [match.span(match.lastindex or 0) for match in pattern.finditer(text)]
            spans = np.array(edge, np.int64).reshape(-1, 2)
            at = np.searchsorted(stops, spans[:, 0])  # the first token that reaches so far ...
            inside = at < len(stops)
            at, spans = at[inside], spans[inside]
            # ... and not beyond; all tokens of a character, if several make one
            at = at[stops[at] <= spans[:, 1]]
            edges = np.searchsorted(stops, stops[at], side="right") + start
            found.append(np.union1d(found[-1], edges) if found else np.unique(edges))
        return cls(found[list(_ENDS).index(kind) :] if kind is not None else ())

    def before(self, most: int, least: int) -> int:
        """Returns the last edge in [least, most], of the first kind that has one; else `most`."""
        for edges in self._kinds:
            at = int(np.searchsorted(edges, most, side="right")) - 1
            if at >= 0 and edges[at] >= least:
                return int(edges[at])
        return most

    def after(self, least: int, most: int) -> int:
        """Returns the first edge in [least, most], of the first kind that has one; else `least`."""
        for edges in self._kinds:
            at = int(np.searchsorted(edges, least))
            if at < len(edges) and edges[at] <= most:
                return int(edges[at])
        return least
