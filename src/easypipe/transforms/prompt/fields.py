"""FieldTemplate: templates that know `{column}` and nothing else; how values become text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Protocol

from easypipe.core.errors import ConfigError, did_you_mean, require
from easypipe.core.values import Identity
from easypipe.transforms.chat.render import is_unicode
from easypipe.transforms.chat.sandbox import Json, Row
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.refused import EMPTY, NOTHING_TO_TRAIN, Refused
from easypipe.transforms.tokenizer.masked import TRAINED_END

_FIELD = re.compile(r"\{([^{}]*)\}")


class Writer(Protocol):
    """Writes rows as texts.

    Attributes:
        columns: The columns that it reads.
        identity: JSON of what decides the texts besides the rows.
    """

    columns: tuple[str, ...]
    identity: Identity

    def write(self, rows: Sequence[Row]) -> list[Rendered | Refused]: ...


def pieces_of(template: str, at: str = "template") -> list[str]:
    """Splits a template into text, column, text, column, ..., text.

    Raises:
        ConfigError: A brace is not part of a field.
    """
    pieces = _FIELD.split(template)
    for piece in pieces[::2]:
        brace = next((found for found in "{}" if found in piece), None)
        if brace is not None:
            near = piece[max(0, piece.index(brace) - 20) :][:40]
            raise ConfigError(
                at=at,
                problem=f"a brace that is not a field, in {near!r}",
                fix="Write the template in Jinja: {{ '{' }}.",
            )
    return pieces


class FieldTemplate:
    """A writer of rows by a template with `{column}`s.

    Args:
        pieces: The template, as `pieces_of` returns it.
        inputs: The columns that it must name; if empty, the columns that it does name.
        label: The column that is trained on, if there is one.
        everything: Whether all of the text is trained on, not only the label.
        at: The key path of the template, for errors.

    Raises:
        ConfigError: The template names other columns or omits some, or names the label twice.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        inputs: Sequence[str],
        label: str | None,
        *,
        everything: bool,
        at: str = "template",
    ) -> None:
        self._pieces = tuple(pieces)
        named = self._pieces[1::2]
        inputs = inputs or [name for name in dict.fromkeys(named) if name != label]
        have = [*inputs, *([label] if label is not None else [])]
        for name in named:
            if name not in have or not name:
                known = [one for one in have if one]
                fix = (
                    did_you_mean(name, known)
                    or "Name it in input_columns; a plain brace is written in Jinja: {{ '{' }}."
                )
                raise ConfigError(at=at, problem=f"it has a field {{{name}}}", have=known, fix=fix)
        for name in have:
            require(
                name in named,
                "label_column" if name == label else "input_columns",
                f"{name!r} does not appear in the template",
                f"Write {{{name}}} in it, or leave it out.",
            )
        require(
            label is None or named.count(label) == 1,
            at,
            f"the label {{{label}}} stands {named.count(label)} times in it",
            "Write it once.",
        )
        self._label, self._everything = label, everything
        self.columns = tuple(have)
        self.identity: Identity = [list(pieces), label, everything]

    def write(self, rows: Sequence[Row]) -> list[Rendered | Refused]:
        """Writes rows as texts, in which the span from the label to the end is trained on.

        The text that follows the label in the template is how an answer ends.
        """
        return [self._written(row) for row in rows]

    def _written(self, row: Row) -> Rendered | Refused:
        """Writes one row."""
        texts = list(self._pieces)
        begin, said = 0, None
        for i in range(1, len(texts), 2):
            name = self._pieces[i]
            text = text_of(row[name], name)
            if isinstance(text, Refused):
                return text
            if name == self._label and not self._everything:
                begin, said = sum(map(len, texts[:i])), text
            texts[i] = text
        text = "".join(texts)
        if not text.strip():
            return Refused(EMPTY, "no text in any column")
        if said == "":
            return Refused(NOTHING_TO_TRAIN, f"the {self._label} is empty")
        return Rendered(text, [[begin, len(text)]], TRAINED_END)


class AlpacaTemplate:
    """A writer with one template for rows with an input, and one for an empty or null input.

    Its columns are instruction, input and output.
    """

    def __init__(self, without: FieldTemplate, with_input: FieldTemplate) -> None:
        self._without, self._with = without, with_input
        self.columns = with_input.columns
        self.identity: Identity = [without.identity, with_input.identity]

    def write(self, rows: Sequence[Row]) -> list[Rendered | Refused]:
        name = self.columns[1]
        return [
            (self._without if row[name] is None or row[name] == "" else self._with).write([row])[0]
            for row in rows
        ]


def text_of(value: Json, name: str) -> str | Refused:
    """Returns a value as people would write it.

    Text stays unchanged, numbers are digits, and objects, lists and booleans are JSON.
    """
    if value is None:
        return Refused("null", f"column {name!r} has no text")
    if not is_unicode(value):
        return Refused("invalid_utf8", f"column {name!r} has no text")
    if isinstance(value, dict | list | bool):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
