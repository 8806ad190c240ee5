"""Reasons for which a row becomes no document: their names in the ledger, and advice in errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from easypipe.core.protocols import Reject

NOTHING_TO_TRAIN = "nothing_to_train"
EMPTY = "empty"  # the text has no characters, or only white space
TOO_LONG = "too_long"
# the template took more time, memory or characters than a row may take
BEYOND_LIMITS = "beyond_limits"
# the tokenizer raises an error, or panics, on the text
REFUSED_BY_TOKENIZER = "refused_by_tokenizer"
# the option `reasoning` has no effect, since the chat template never prints reasoning
UNPRINTED_REASONING = "unprinted_reasoning"
# such rows are dropped and counted; they are not errors
BENIGN = (NOTHING_TO_TRAIN, EMPTY, TOO_LONG)

_ADVICE = {
    "unproven_spans": "Give a chat_template with {% generation %} markers (the built-in ones have "
    "them), or set train_on to 'all'",
    BEYOND_LIMITS: "Leave such rows out, cut them before, or give a simpler chat_template",
    UNPRINTED_REASONING: "Give a chat_template that prints it, or leave 'reasoning' out",
    "unknown_role": "Map the name in `prompt.roles` of the dataset, as in {NAME: assistant}",
    "refused_by_template": "Give a chat_template that takes such conversations",
    REFUSED_BY_TOKENIZER: "Leave such rows out, or give a tokenizer that takes them",
    "rejected_answer": "Leave such rows out, for example with a filter on that column",
    TOO_LONG: "Raise max_length, or choose another length.policy",
    "not_held_out": "Hold out a larger fraction of so few rows, or hold them out by another seed",
    "held_out": "Hold out a smaller fraction of so few rows, or hold them out by another seed",
}


class Refused(NamedTuple):
    """The reason why a row becomes no document, returned in place of its text.

    Attributes:
        reason: The word under which the ledger counts the row.
        detail: What the error message or the quarantine says about this row.
    """

    reason: str
    detail: str

    @property
    def benign(self) -> bool:
        """Whether the row is dropped and counted, and is not a bad row."""
        return self.reason in BENIGN

    def of_row(self, row: int) -> Reject:
        """Returns the `Reject` that a source reports for row number `row`."""
        from easypipe.core.protocols import Reject  # Arrow, which chat workers do without

        return Reject(row=row, reason=self.reason, detail=self.detail, benign=self.benign)


def advice(reason: str, otherwise: str = "Correct the row") -> str:
    """Returns what helps rows that are refused for `reason`, as the start of a sentence."""
    return _ADVICE.get(reason, otherwise)
