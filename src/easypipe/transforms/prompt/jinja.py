"""Prompts in Jinja, written in the worker processes of chat templates, with their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from easypipe.transforms.chat.render import (
    ENGINE_VERSION,
    Refused,
    Rendered,
    answers_of,
    is_unicode,
)
from easypipe.transforms.prompt.fields import BENIGN, text_of


class JinjaTemplate:
    """Columns of a row, written by a Jinja template that sees them as variables. names, date: as of
    a ChatTemplate.

    label: the column that is trained, found where the template prints it, and proven; None: `{%
    generation %}` markers say what is, or all is. everything: train all of it. origin: for errors.
    Raises HostileTemplateError when it writes, for what goes beyond the limits.
    """

    def __init__(
        self,
        source: str,
        inputs: Sequence[str],
        label: str | None,
        *,
        everything: bool,
        names: Mapping[str, str],
        date: str | None,
        origin: str,
    ) -> None:
        self.columns = (*inputs, *([label] if label is not None else []))
        self._origin, self._label, self._everything = origin, label, everything
        self._spec = {
            "source": source,
            "names": dict(names),
            "closers": (),
            "train_on": "all" if everything else "marked" if label is None else "completion",
            "date": date,
            "label": label,
        }
        self.identity: Any = ["jinja", ENGINE_VERSION, list(self.columns), self._spec]

    def write(self, rows: Sequence[Mapping[str, Any]]) -> list[Rendered | Refused]:
        good: list[dict[str, Any]] = []
        found: list[Rendered | Refused | None] = []
        for row in rows:
            made = self._fields(row)
            found.append(made if isinstance(made, Refused) else None)
            good += [] if isinstance(made, Refused) else [{"fields": made}]
        answers = iter(answers_of(self._spec, good, self._origin))
        return [next(answers) if one is None else one for one in found]

    def _fields(self, row: Mapping[str, Any]) -> dict[str, Any] | Refused:
        """What the template sees of a row; the label as text."""
        fields = {name: row[name] for name in self.columns}
        if self._label is not None:
            said = fields[self._label] = text_of(row[self._label], self._label)
            if isinstance(said, Refused):
                return said
            if not said and not self._everything:
                return Refused(BENIGN, f"the {self._label} is empty")
        bad = next((name for name in self.columns if not is_unicode(fields[name])), None)
        return fields if bad is None else Refused("invalid_utf8", f"column {bad!r} has no text")
