"""Where a loader stands, small enough to put beside any checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from easypipe.core.config import digest
from easypipe.core.errors import StateError

VERSION = 1
COMPONENTS = ("sources", "tokenizer", "config", "plan")


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The state after `batch` batches, or before the first. The same for any number of processes, workers and batches in flight.

    batch: batches that were yielded. row: the first row of the next one, counted over the whole run.
    components: a digest each of sources, tokenizer, config and plan, so that a refusal can say which changed. config: the settings that
    decide what stands in a batch, in plain words for the same reason. hint: where the plan's scan may start; it changes speed, never a
    result.
    """

    batch: int
    row: int
    components: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    hint: Any = None

    def to_json(self) -> str:
        """One line of JSON, at most 4 KiB, with a checksum."""
        values = {"version": VERSION, **asdict(self)}
        return json.dumps(values | {"checksum": digest(values)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes | Mapping[str, Any]) -> LoaderState:
        """Raises StateError where it is not a whole, unaltered state of this version."""
        try:
            values = dict(text) if isinstance(text, Mapping) else json.loads(text)
        except ValueError as error:
            raise StateError(at="loader state", problem=f"not JSON: {error}", fix="Restore from another checkpoint.") from None
        if not isinstance(values, dict) or "version" not in values:
            raise StateError(at="loader state", problem="no state of a loader", fix="Give what `loader.state().to_json()` gave.")
        if values["version"] != VERSION:
            raise StateError(
                at="loader state",
                problem=f"format version {values['version']}, this easypipe reads {VERSION}",
                fix="Restore with the easypipe that saved it.",
            )
        checksum = values.pop("checksum", None)
        if checksum != digest(values):
            raise StateError(at="loader state", problem="damaged: its checksum does not fit", fix="Restore from another checkpoint.")
        del values["version"]
        return cls(**values)

    def check(self, components: Mapping[str, str], config: Mapping[str, Any]) -> None:
        """Raises StateError naming every component that is another one now than when the state was saved."""
        changed = [name for name in COMPONENTS if self.components.get(name) != components[name]]
        if not changed:
            return
        details = [
            f"{key} was {self.config.get(key)!r}, is {config.get(key)!r}"
            for key in sorted({*self.config, *config})
            if self.config.get(key) != config.get(key)
        ]
        problem = f"{' and '.join(changed)} changed since this state was saved"
        raise StateError(
            at="loader state",
            problem=problem + (f": {'; '.join(details)}" if details else ""),
            fix="Restore into the pipeline that saved it, or start a new run.",
        )
