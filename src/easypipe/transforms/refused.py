"""Why a row becomes no document: the words of the ledger for it, and what helps."""

from __future__ import annotations

from typing import NamedTuple

from easypipe.core.protocols import Reject

NOTHING_TO_TRAIN = "nothing_to_train"
EMPTY = "empty"  # no text, or white space alone
TOO_LONG = "too_long"
BEYOND_LIMITS = "beyond_limits"  # of time, memory or characters that a template may take for a row
# a template never prints what `reasoning` of a prompt says something of
UNPRINTED_REASONING = "unprinted_reasoning"
BENIGN = (NOTHING_TO_TRAIN, EMPTY, TOO_LONG)  # dropped and counted, not an error of the row

_ADVICE = {
    "unproven_spans": "Give a chat_template with {% generation %} markers (the built-in ones have "
    "them), or set train_on to 'all'",
    BEYOND_LIMITS: "Leave such rows out, cut them before, or give a simpler chat_template",
    UNPRINTED_REASONING: "Give a chat_template that prints it, or leave 'reasoning' out",
    "refused_by_template": "Give a chat_template that takes such conversations",
    "rejected_answer": "Leave such rows out, for example with a filter on that column",
    TOO_LONG: "Raise max_length, or choose another length.policy",
}


class Refused(NamedTuple):
    """What a row is written as that is no sample."""

    reason: str  # a word for the ledger
    detail: str

    @property
    def benign(self) -> bool:
        return self.reason in BENIGN

    def of_row(self, row: int) -> Reject:
        return Reject(row=row, reason=self.reason, detail=self.detail, benign=self.benign)


def advice(reason: str, otherwise: str = "Correct the row") -> str:
    """What helps rows that are refused for `reason`, as the beginning of a sentence."""
    return _ADVICE.get(reason, otherwise)
