"""Which column is which: names of columns matched with what a kind of rows needs, exactly, by known
other names, or by likeness.

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
    """Something that rows of a kind have: its own name is the exact one, `aliases` are other names
    that people give it.
    """

    name: str
    aliases: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Column `column` is proposed for `slot`. how: `given` by the user, `exact` name, `alias`,
    `fuzzy` likeness (score, of 100, to `known`), or the `only` column that could be."""

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


@dataclass(frozen=True)
class Match:
    """What was found for the slots of a kind; None where a required one has no column. `ties` are
    undecided.
    """

    choices: tuple[Choice, ...]
    ties: tuple[Tie, ...]


def match_columns(
    slots: Sequence[Slot],
    fitting: Mapping[str, Sequence[str]],
    *,
    fuzzy: bool,
    given: Mapping[str, str] | None = None,
) -> Match | None:
    """Columns for `slots`. fitting: of each slot the columns whose type it could have. given: what
    the user has decided. fuzzy: names that are merely alike count too. A column is used once, and
    better reasons choose first, over all slots.
    """
    chosen = {
        slot: Choice(slot=slot, column=column, how="given")
        for slot, column in (given or {}).items()
    }
    ties: dict[str, Tie] = {}
    for how in ("exact", "alias", "fuzzy") if fuzzy else ("exact", "alias"):
        for slot in slots:
            if slot.name in chosen or slot.name in ties:
                continue
            used = {choice.column for choice in chosen.values()}
            found = _candidates(
                slot, [column for column in fitting[slot.name] if column not in used], how
            )
            if len(found) == 1:
                chosen[slot.name] = found[0]
            elif found:
                why = (
                    "both are " + found[0].reason
                    if how != "fuzzy"
                    else " and ".join(f"{c.column!r} is {c.reason}" for c in found)
                )
                ties[slot.name] = Tie(
                    slot=slot.name, columns=tuple(choice.column for choice in found), why=why
                )
    if any(slot.required and slot.name not in chosen and slot.name not in ties for slot in slots):
        return None
    order = [slot.name for slot in slots]
    return Match(tuple(chosen[name] for name in order if name in chosen), tuple(ties.values()))


def _candidates(
    slot: Slot, columns: Sequence[str], how: Literal["exact", "alias", "fuzzy"]
) -> list[Choice]:
    if how == "exact":
        return [
            Choice(slot=slot.name, column=column, how=how)
            for column in columns
            if column == slot.name
        ]
    known = {plain(name): name for name in (*slot.aliases, slot.name)}
    if how == "alias":
        return [
            Choice(slot=slot.name, column=column, how=how)
            for column in columns
            if plain(column) in known
        ]
    scored = [
        (score, column, name)
        for column in columns
        for score, name in [_best(plain(column), known)]
        if score >= LIKE
    ]
    best = max((score for score, _, _ in scored), default=0.0)
    return [
        Choice(slot=slot.name, column=column, how=how, known=name, score=score)
        for score, column, name in scored
        if best - score < NEAR
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
