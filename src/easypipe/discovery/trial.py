"""Tries a proposal on the first rows: which of them it can read, and why not the others.

Needs no tokenizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from easypipe.transforms.chat.conversations import MessageReader, Wrong, value_of, wrong_messages
from easypipe.transforms.columns.kinds import SLOTS, Kind
from easypipe.transforms.prompt.config import ROLES
from easypipe.transforms.prompt.fields import text_of
from easypipe.transforms.refused import EMPTY, NOTHING_TO_TRAIN

Row = Mapping[str, Any]  # one of the first rows of a dataset
Fields = Mapping[str, Any]  # of a DatasetConfig
WRITTEN = ("user", "assistant", "system", "tool")  # the roles that chat templates know


@dataclass(frozen=True, kw_only=True)
class Trial:
    """rows: that were tried. reasons: how many of them cannot be read, by reason. first: the number
    of the first such row, and why.
    """

    rows: int
    reasons: Mapping[str, int]
    first: tuple[int, str] | None = None

    @property
    def failed(self) -> bool:
        """Whether not one row can be read."""
        return self.rows > 0 and sum(self.reasons.values()) == self.rows

    def __str__(self) -> str:
        if self.first is None:
            return f"all of the first {self.rows} rows can be read so"
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.reasons.items())
        number, why = self.first
        return (
            f"{sum(self.reasons.values())} of the first {self.rows} rows cannot be read so: "
            f"{reasons}; row {number}: {why}"
        )


def try_rows(kind: Kind, rows: Sequence[Row], roles: Mapping[str, str] | None = None) -> Trial:
    """kind: with the columns that a proposal reads. roles: as in PromptConfig."""
    if kind.ties:
        rows = ()  # nothing is proposed yet
    reasons: Counter[str] = Counter()
    first = None
    for number, row in enumerate(rows):
        wrong = _wrong(kind, row, roles)
        if wrong is not None:
            reasons[wrong[0]] += 1
            first = first or (number, wrong[1])
    return Trial(rows=len(rows), reasons=dict(reasons.most_common()), first=first)


def names_roles_otherwise(kind: Kind) -> bool:
    """Whether all who speak are known, some of them by another word (or another case) than chat
    templates have for them.
    """
    return any(role not in WRITTEN for role in kind.roles) and all(
        role.lower() in ROLES for role in kind.roles
    )


def _wrong(kind: Kind, row: Row, roles: Mapping[str, str] | None) -> Wrong | None:
    values = {choice.slot: row.get(choice.column) for choice in kind.choices}
    if kind.name in ("tokens", "unknown"):
        return None
    if kind.name in ("messages", "sharegpt") or kind.roles:
        renamed = kind.name == "sharegpt" or names_roles_otherwise(kind)
        reader = MessageReader({**ROLES, **(roles or {})} if renamed else None)
        for slot in ("messages", "conversations", "chosen", "rejected"):
            if slot in values and (wrong := _wrong_talk(reader, values[slot])) is not None:
                return wrong
        return None
    required = {slot.name for slot in SLOTS[kind.name] if slot.required}
    texts = {slot: text_of(value, slot) for slot, value in values.items() if slot in required}
    for text in texts.values():
        if not isinstance(text, str):
            return text.reason, text.detail
    label = {"prompt_completion": "completion", "alpaca": "output"}.get(kind.name)
    if not any(text.strip() for text in texts.values() if isinstance(text, str)):
        return EMPTY, "no text"
    if label is not None and not texts[label]:
        return NOTHING_TO_TRAIN, f"the {label} is empty"
    return None


def _wrong_talk(reader: MessageReader, value: object) -> Wrong | None:
    talk = reader.translated(value_of(value, keep=("role", "content", "from", "value")))
    wrong = wrong_messages(talk) or reader.wrong_flags(talk)
    if wrong is None and not any(message["role"] == "assistant" for message in talk):
        return NOTHING_TO_TRAIN, "nobody in it is the assistant"
    return wrong
