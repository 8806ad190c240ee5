"""Prompts in Jinja, written in the worker processes of chat templates, with their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from easypipe.core.values import Identity
from easypipe.transforms.chat.render import ENGINE_VERSION, answers_of, is_unicode
from easypipe.transforms.chat.sandbox import Row
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.prompt.fields import text_of
from easypipe.transforms.refused import NOTHING_TO_TRAIN, Refused


class JinjaTemplate:
    """Columns of a row, written by a Jinja template that sees them as variables.

    The config's label is the column that is trained, found where the template prints it, and
    proven; without one `{% generation %}` markers say what is, or all is. names: as of a
    ChatTemplate. everything: train all of it. origin: for errors. Raises HostileTemplateError when
    it writes, for what goes beyond the limits.
    """

    def __init__(
        self,
        source: str,
        config: PromptConfig,
        names: Mapping[str, str],
        *,
        everything: bool,
        origin: str,
    ) -> None:
        self._origin, self._label, self._everything = origin, config.label, everything
        label = () if config.label is None else (config.label,)
        self.columns = (*config.inputs, *label)
        self._spec = {
            "source": source,
            "names": dict(names),
            "closers": (),
            "train_on": "all" if everything else "completion" if label else "marked",
            "date": config.template_date,
            "label": config.label,
        }
        self.identity: Identity = ["jinja", ENGINE_VERSION, list(self.columns), self._spec]

    def write(self, rows: Sequence[Row]) -> list[Rendered | Refused]:
        return answers_of(self._spec, [self._request(row) for row in rows], self._origin)

    def _request(self, row: Row) -> Row | Refused:
        """What the template sees of a row; the label as text."""
        fields = {name: row[name] for name in self.columns}
        if self._label is not None:
            said = fields[self._label] = text_of(row[self._label], self._label)
            if isinstance(said, Refused):
                return said
            if not said and not self._everything:
                return Refused(NOTHING_TO_TRAIN, f"the {self._label} is empty")
        bad = next((name for name in self.columns if not is_unicode(fields[name])), None)
        if bad is not None:
            return Refused("invalid_utf8", f"column {bad!r} has no text")
        return {"fields": fields}
