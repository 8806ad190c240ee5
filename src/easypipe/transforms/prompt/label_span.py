"""Where a prompt template prints the trained column, proven by printing another word, or refused.

Runs in the worker process, as spans.py does for conversations.
"""

from __future__ import annotations

from easypipe.transforms.chat.sandbox import Message, Template
from easypipe.transforms.chat.sentinels import UnprovenError, forms_of, unused_stem
from easypipe.transforms.chat.spans import MASKED_END, TRAINED_END, Rendered


def find_label(template: Template, fields: Message, label: str | None, train_on: str) -> Rendered:
    """A text of a template of columns, with what is trained of it.

    Trained is what `{% generation %}` marks, else all from the label to the end, else (no
    label, or train_on="all") all.

    Raises RenderError where the template refuses, UnprovenError where it cannot be told what is
    trained.
    """
    text, marked = template.write(fields)
    if train_on == "all" or (label is None and not template.marked):
        return Rendered(text, [(0, len(text))] if text else [], TRAINED_END)
    if template.marked:
        closed = bool(marked) and not text[marked[-1][1] :].strip()
        return Rendered(text, marked, TRAINED_END if closed else MASKED_END)
    assert label is not None
    word = unused_stem(text, fields)
    other, _ = template.write({**fields, label: word})
    if other.count(word) != 1:
        raise UnprovenError(f"the template prints {label!r} as it is {other.count(word)} times")
    before, after = other.split(word)
    said = text[len(before) : len(text) - len(after)]
    whole = (
        text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
    )
    if not whole or said not in forms_of(fields[label]):
        raise UnprovenError(
            f"putting another word in place of {label!r} changes more than that word"
        )
    return Rendered(text, [(len(before), len(text))] if said else [], TRAINED_END)
