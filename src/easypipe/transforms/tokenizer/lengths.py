"""What becomes of samples with more than max_length tokens. Masks are made of whole texts; they are
cut with their tokens.

content   a sample without the special tokens in front of it (BOS) and behind it, which stay
whatever is cut room      most tokens of content: max_length less those special tokens
edge      a place between two tokens at which a sentence, a clause or a word ends
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.config import config
from easypipe.core.errors import ConfigError
from easypipe.transforms.tokenizer.ragged import offsets_of
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

Boundary = Literal["sentence", "clause", "word"]

# From the end of what ends to where the next one begins; each kind of edge counts for the weaker
# kinds too.
_ENDS: dict[str, re.Pattern[str]] = {
    "sentence": re.compile(r"(?<=[.!?])[\"'”’)\]]*(?:\s+|\Z)|(?<=[。！？])[”’）」』]*\s*|\n+"),
    "clause": re.compile(r"(?<=[,;:–—])\s+|(?<=[，；：、])\s*"),
    "word": re.compile(r"\s+"),
}


@config
class LengthPolicy:
    """What becomes of samples with more than max_length tokens.

    policy: "error" makes a bad row of them; "drop" leaves them out; "keep_start" and "keep_end"
    keep that end of them; "middle" keeps both
        ends, half of the length each; "split" makes several documents of them; "trim_oldest_turns"
        leaves out the oldest turns of a conversation, whole ones, never the system prompt nor the
        last turn; "trim_prompt_first" cuts the beginning of what stands before the first trained
        token, and what is trained only where that is not enough, at its end.
    overlap: with "split", tokens of the document before it that each begins with, for context: they
    are not trained again. Without it
        the first token of each document is nobody's next token, and so not trained at all.
    boundary: cut where a sentence, a clause (or sentence) or a word ends, as far as at least half
    of the room stays; where there is
        none, at the next finer one, and at any token where no word ends.
    budgets: most tokens of columns of a prompt, cut at their end before the prompt is written:
    {"context": 512}. Not of the label.
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
        if self.overlap < 0 or (self.overlap and self.policy != "split"):
            problem = (
                f"{self.overlap} tokens"
                if self.overlap < 0
                else f"has no effect on policy {self.policy!r}"
            )
            raise ConfigError(
                at="overlap", problem=problem, fix="Give 0 or more, with policy='split'."
            )
        if (
            self.boundary is not None
            and self.policy in ("error", "drop", "trim_oldest_turns")
            and not self.budgets
        ):
            raise ConfigError(
                at="boundary",
                problem=f"has no effect on policy {self.policy!r}",
                fix="Leave it out.",
            )
        for name, tokens in (self.budgets or {}).items():
            if tokens < 1:
                raise ConfigError(
                    at=f"budgets.{name}",
                    problem=f"{tokens} tokens are none",
                    fix="Give at least 1.",
                )


class Lengths:
    """A LengthPolicy with the tokenizer whose tokens it counts. Raises ConfigError where max_length
    is missing or too small for it.
    """

    def __init__(self, policy: LengthPolicy, tokenizer: Tokenizer) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.limit = tokenizer.config.max_length if tokenizer.config.truncation else None
        if self.limit is None and (policy.policy != "keep_start" or not policy.budgets):
            fix = "Set it on the tokenizer, or tokenize.max_length."
            raise ConfigError(
                at="length.policy", problem=f"{policy.policy!r} needs a max_length", fix=fix
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
        """Whether texts of which all is trained get a mask: for an overlap, and for the tokenizer's
        own EOS, which stands behind pieces whose text goes on too."""
        return self.policy.overlap > 0 or (
            self.policy.policy == "split" and bool(self.tokenizer.surrounding[1])
        )

    @property
    def identity(self) -> list[Any]:
        # 2: packing ends no document inside a text; a boundary leaves at least one token. 3: nor
        # does the tokenizer's own EOS
        masked = self.masks and not self.policy.overlap
        return [
            "lengths",
            3 if masked else 2 if self.policy.policy == "split" or self.policy.boundary else 1,
            self.policy,
        ]

    def within(self, text: str, budget: int) -> tuple[str, int]:
        """The text, of which at most `budget` tokens stay, and how many tokens it lost."""
        ((ids, _, stops),) = self.tokenizer.encode_with_characters([text])
        if len(ids) <= budget:
            return text, 0
        keep = _Edges.of(text, stops, self.policy.boundary).before(budget, budget // 2)
        while (
            keep
            and len(
                next(iter(self.tokenizer.encode_with_characters([text[: int(stops[keep - 1])]])))[0]
            )
            > budget
        ):
            keep -= 1  # the tokens of a part may be other ones than those of the whole
        return (text[: int(stops[keep - 1])], len(ids) - keep) if keep else ("", len(ids))


class Whole(NamedTuple):
    """n documents as they were encoded: `ids[offsets[i] : offsets[i + 1]]`.

    mask UInt8[total]: 1 is a target; None: every token is. before, added Int64[n]: special tokens
    in front of each, and in all.
    texts: what they were encoded from, for boundaries; one by one, as str.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[Any]
    mask: NDArray[np.uint8] | None
    before: NDArray[np.int64]
    added: NDArray[np.int64]
    texts: Callable[[int], str]


class Shaped(NamedTuple):
    """m documents made of n. origin Int64[m]: of which each is. refused: those of n that are too
    long. untrained: those of which nothing is left to train; a piece without a target is no
    document.

    added Int64[m]: special tokens of each. continued Bool[m]: pieces behind which their text goes
    on in the next one, and documents with a mask of their own that have lost their end. truncated:
    tokens of texts that are in no document. counts: for the ledger; documents over max_length by
    policy, `pieces`: documents more than texts, `overlap`: tokens of texts that are in a second
    document.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[Any]
    mask: NDArray[np.uint8] | None
    origin: NDArray[np.int64]
    added: NDArray[np.int64]
    continued: NDArray[np.bool_]
    truncated: int
    refused: list[int]
    untrained: list[int]
    counts: dict[str, int]


class _Document(NamedTuple):
    """One of those that are made. tokens Int64[m]: which it has. known: how many at its start an
    earlier one has. ended: it stops where its text does. continued: its text goes on in another
    one, or has lost its end."""

    origin: int
    tokens: NDArray[np.int64]
    known: int = 0
    ended: bool = True
    continued: bool = False


def shape(whole: Whole, lengths: Lengths, *, raw: bool) -> Shaped:
    """Documents of at most max_length tokens. raw: the tokenizer's own special tokens stand around
    the texts.
    """
    offsets, ids, mask = whole.offsets, whole.ids, whole.mask
    sizes, count = np.diff(offsets), len(offsets) - 1
    if mask is None and lengths.masks:
        mask = np.ones(len(ids), np.uint8)
    over = np.flatnonzero(sizes > lengths.limit).tolist() if lengths.limit is not None else []
    if not over:
        same, none = np.arange(count), np.zeros(count, np.bool_)
        return Shaped(offsets, ids, mask, same, whole.added, none, 0, [], [], {})
    tail = len(lengths.tokenizer.surrounding[1]) if raw else 0
    kept = {i: _cut_to_length(whole, mask, lengths, i, tail) for i in over}
    refused = [i for i in over if kept[i] is None]
    untrained = [i for i in over if kept[i] == []]
    made = [
        one
        for i in range(count)
        for one in (
            kept[i] or () if i in kept else [_Document(i, np.arange(offsets[i], offsets[i + 1]))]
        )
    ]
    new = offsets_of([len(one.tokens) for one in made])
    at = np.concatenate([np.zeros(0, np.int64), *(one.tokens for one in made)])
    new_mask = None if mask is None else mask[at]
    if new_mask is not None:
        for one, start, stop in zip(made, new[:-1].tolist(), new[1:].tolist(), strict=True):
            new_mask[start : start + one.known] = 0
            new_mask[stop - (0 if one.ended else tail) : stop] = 0
    special = _special(whole)
    uses = np.bincount(at, minlength=len(ids))
    gone = np.isin(np.repeat(np.arange(count), sizes), refused + untrained)
    sums = np.concatenate([[0], np.cumsum(special[at])])
    counts = {
        lengths.policy.policy: len(over),
        "pieces": len(made) + len(refused) + len(untrained) - count,
        "overlap": int((uses[~special] - 1).clip(0).sum()),
    }
    return Shaped(
        offsets=new,
        ids=ids[at],
        mask=new_mask,
        origin=np.array([one.origin for one in made], np.int64),
        added=sums[new[1:]] - sums[new[:-1]],
        continued=np.array([one.continued for one in made], np.bool_),
        truncated=int(((uses == 0) & ~special & ~gone).sum()),
        refused=refused,
        untrained=untrained,
        counts={name: number for name, number in counts.items() if number},
    )


def _special(whole: Whole) -> NDArray[np.bool_]:
    """Bool[total]: the special tokens around texts."""
    special = np.zeros(len(whole.ids), np.bool_)
    for i in np.flatnonzero(whole.added).tolist():
        first, stop, before = whole.offsets[i], whole.offsets[i + 1], whole.before[i]
        special[first : first + before] = True
        special[stop - (whole.added[i] - before) : stop] = True
    return special


def _cut_to_length(
    whole: Whole, mask: NDArray[np.uint8] | None, lengths: Lengths, i: int, tail: int
) -> list[_Document] | None:
    """What becomes of document i, which is too long: those with a target; None where it is
    refused.
    """
    assert lengths.limit is not None
    first, stop = int(whole.offsets[i]), int(whole.offsets[i + 1])
    eos = lengths.tokenizer.eos_token_id
    # a template may have written that one
    bos = whole.ids[first] == lengths.tokenizer.bos_token_id and lengths.limit - tail > 1
    head = int(whole.before[i]) or int(bos)
    pieces = _pieces(whole, lengths, i, head, tail)
    if not pieces:
        return None
    found: list[_Document] = []
    end = first  # of what documents have of it
    for number, keep in enumerate(pieces):
        around = [(first, first + head), *keep, (stop - tail, stop)]
        tokens = np.concatenate([np.arange(a, b) for a, b in around])
        known = head + lengths.policy.overlap if number else 0
        if mask is None or mask[tokens[max(known, 1) :]].any():
            end = keep[-1][1]
            found.append(_Document(i, tokens, known, ended=end == stop - tail, continued=True))
    if found and whole.ids[end : pieces[-1][-1][1]].tolist() in ([], [eos]):
        found[-1] = found[-1]._replace(continued=False)  # else the rest has no target
    if whole.mask is not None and lengths.policy.policy != "split":
        found = [one._replace(continued=one.continued or not one.ended) for one in found]
    return found


def _pieces(
    whole: Whole, lengths: Lengths, i: int, head: int, tail: int
) -> list[list[tuple[int, int]]]:
    """Of a document that is too long, what each document that is made of it has of the content, as
    ranges of tokens.
    """
    assert lengths.limit is not None
    policy = lengths.policy
    if policy.policy in ("error", "drop", "trim_oldest_turns"):
        return []
    low, high = int(whole.offsets[i]) + head, int(whole.offsets[i + 1]) - tail
    room = lengths.limit - head - tail
    edges = _edges(whole, lengths, i)
    if policy.policy == "keep_end":
        return [[(edges.after(high - room, high - max(1, room // 2)), high)]]
    if policy.policy == "middle":
        front = room - room // 2
        stop = edges.before(low + front, low + max(1, front // 2))
        return [[(low, stop), (edges.after(high - room // 2, high - max(1, room // 4)), high)]]
    if policy.policy == "split":
        made = []
        while high - low > room:
            stop = edges.before(low + room, low + max(policy.overlap + 1, room // 2))
            made.append([(low, stop)])
            low = stop - policy.overlap
        return [*made, [(low, high)]]
    if policy.policy == "trim_prompt_first":
        assert whole.mask is not None
        trained = np.flatnonzero(whole.mask[low:high])
        answer = low + int(trained[0]) if trained.size else high
        if high - answer <= room:
            return [[(edges.after(high - room, answer), high)]]
        low = answer
    return [[(low, edges.before(low + room, low + max(1, room // 2)))]]


def _edges(whole: Whole, lengths: Lengths, i: int) -> _Edges:
    """Of the document i, in positions of all tokens."""
    kind = lengths.policy.boundary
    if kind is None:
        return _Edges(())
    text, start = whole.texts(i), int(whole.offsets[i] + whole.before[i])
    size = int(whole.offsets[i + 1] - whole.offsets[i] - whole.added[i])
    escaped = lengths.tokenizer.special.policy == "escape"
    ((ids, _, stops),) = lengths.tokenizer.encode_with_characters([text])
    if len(ids) != size and escaped:
        ((ids, _, stops),) = lengths.tokenizer.encode_with_characters([text], escaped=True)
    assert len(ids) == size, "tokens of a text are those that `tokenizers` makes of it"
    return _Edges.of(text, stops, kind, start)


class _Edges:
    """Places between tokens at which a text may be cut, of each kind of boundary ascending, the
    wanted kind first.
    """

    def __init__(self, kinds: Sequence[NDArray[np.int64]]) -> None:
        self._kinds = kinds

    @classmethod
    def of(
        cls, text: str, stops: NDArray[np.int64], kind: Boundary | None, start: int = 0
    ) -> _Edges:
        """stops Int64[tokens]: the character behind each token. start: the number of the first
        token.
        """
        found: list[NDArray[np.int64]] = []
        for pattern in _ENDS.values() if kind is not None else ():
            spans = np.array([match.span() for match in pattern.finditer(text)], np.int64).reshape(
                -1, 2
            )
            at = np.searchsorted(stops, spans[:, 0])  # the first token that reaches so far ...
            inside = at < len(stops)
            at, spans = at[inside], spans[inside]
            # ... and not beyond; all of it, where several make one character
            at = at[stops[at] <= spans[:, 1]]
            edges = np.searchsorted(stops, stops[at], side="right") + start
            found.append(np.union1d(found[-1], edges) if found else np.unique(edges))
        return cls(found[list(_ENDS).index(kind) :] if kind is not None else ())

    def before(self, most: int, least: int) -> int:
        """The last edge in [least, most], of the first kind that has one; else `most`."""
        for edges in self._kinds:
            at = int(np.searchsorted(edges, most, side="right")) - 1
            if at >= 0 and edges[at] >= least:
                return int(edges[at])
        return most

    def after(self, least: int, most: int) -> int:
        """The first edge in [least, most], of the first kind that has one; else `least`."""
        for edges in self._kinds:
            at = int(np.searchsorted(edges, least))
            if at < len(edges) and edges[at] <= most:
                return int(edges[at])
        return least
