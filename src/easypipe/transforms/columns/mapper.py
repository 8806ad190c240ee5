"""Which column is which: names of columns matched with what rows of a kind need, at best exactly.

A match is a proposal with its reason. Where two columns fit equally well there is none: nobody but
the user knows which is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from easypipe.core.errors import ConfigError

LIKE = 85  # of 100: names less alike than this are not taken for each other
NEAR = 3  # scores nearer than this tell nothing

How = Literal["given", "exact", "alias", "fuzzy", "only"]
OTHERS = {
    "id",
    "ids",
    "hash",
    "url",
    "type",
    "length",
    "len",
    "count",
    "lang",
    "language",
    "name",
    "source",
}  # of a column: `prompt_id` is no prompt


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Something that rows of a kind have, with the names that people give its column.

    name: the exact one. aliases: others.
    """

    name: str
    aliases: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Column `column` is proposed for `slot`.

    how: `given` by the user, `exact` name, `alias`, `fuzzy` likeness (score, of 100, to
    `known`), or the `only` column that could be.
    """

    slot: str
    column: str
    how: How
    known: str = ""
    score: float = 100.0

    @property
    def reason(self) -> str:
        return {
            "given": "as you say",
            "exact": f"named {self.slot!r} exactly",
            "alias": f"an alias of {self.slot!r}",
            "fuzzy": f"like {self.known!r} ({self.score:.0f} of 100)",
            "only": f"the only column that can be {self.slot!r}",
        }[self.how]


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Columns that fit a slot equally well."""

    slot: str
    columns: tuple[str, ...]
    why: str

    def error(self, at: str) -> ConfigError:
        names = " and ".join(repr(name) for name in self.columns)
        return ConfigError(
            at=at,
            problem=f"columns {names} fit {self.slot!r} equally well: {self.why}",
            have=self.columns,
            fix=f"Say which one is meant: columns={{{self.slot!r}: {self.columns[0]!r}}}.",
        )


Match = tuple[tuple[Choice, ...], tuple[Tie, ...]]  # what was found, and what is undecided


def match_columns(
    slots: Sequence[Slot],
    fitting: Mapping[str, Sequence[str]],
    *,
    fuzzy: bool,
    given: Mapping[str, str] | None = None,
) -> Match | None:
    """Columns for `slots`; None where one that is required has no column.

    A column is used once, and better reasons choose first, over all slots.

    Args:
        fitting: Of each slot the columns whose type it could have.
        fuzzy: Names that are merely alike count too.
        given: What the user has decided.
    """
    chosen = {
        slot: Choice(slot=slot, column=column, how="given")
        for slot, column in (given or {}).items()
    }
    ties: dict[str, Tie] = {}
    for how in ("exact", "alias", "fuzzy") if fuzzy else ("exact", "alias"):
        for slot in slots:
            name = slot.name
            if name in chosen or name in ties:
                continue
            used = {choice.column for choice in chosen.values()}
            found = _candidates(slot, [one for one in fitting[name] if one not in used], how)
            if len(found) == 1:
                chosen[name] = found[0]
            elif found:
                each = [f"{one.column!r} is {one.reason}" for one in found]
                why = " and ".join(each) if how == "fuzzy" else f"both are {found[0].reason}"
                ties[name] = Tie(slot=name, columns=tuple(one.column for one in found), why=why)
    if any(slot.required and slot.name not in {*chosen, *ties} for slot in slots):
        return None
    return tuple(chosen[one.name] for one in slots if one.name in chosen), tuple(ties.values())


def _candidates(
    slot: Slot, columns: Sequence[str], how: Literal["exact", "alias", "fuzzy"]
) -> list[Choice]:
    known = {plain(name): name for name in (*slot.aliases, slot.name)}
    if how != "fuzzy":
        same = [
            one for one in columns if (one == slot.name if how == "exact" else plain(one) in known)
        ]
        return [Choice(slot=slot.name, column=one, how=how) for one in same]
    scored = {one: _best(plain(one), known) for one in columns}
    best = max((score for score, _ in scored.values()), default=0.0)
    return [
        Choice(slot=slot.name, column=one, how=how, known=name, score=score)
        for one, (score, name) in scored.items()
        if score >= LIKE and best - score < NEAR
    ]


def plain(name: str) -> str:
    """`userPrompt`, `user-prompt` and `User_Prompt` are one name."""
    return (
        " ".join(re.split(r"[\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name))).strip().lower()
    )


def _best(name: str, known: Mapping[str, str]) -> tuple[float, str]:
    """How alike a name is to the most similar of those known: letters that agree, or a known name
    that stands whole among its words.
    """
    from rapidfuzz import fuzz

    words = name.split()
    if OTHERS & set(words):
        return 0.0, name

    def score(other: str) -> float:
        whole = len(words) > 1 and set(other.split()) <= set(words)
        return max(fuzz.ratio(name, other), 90.0 if whole else 0.0)

    return max((score(other), original) for other, original in known.items())
