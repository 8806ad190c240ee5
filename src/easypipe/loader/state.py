"""LoaderState: a loader's position, how its data or batches changed, and what may on resume."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import pydantic

from easypipe.core.config import digest
from easypipe.core.errors import StateError, raising, require_known
from easypipe.core.values import Json
from easypipe.loader.steps import Begin

VERSION = 1
COMPONENTS = ("sources", "tokenizer", "config", "plan")
MAX_DATASETS = 16  # a state names at most this many; with more, only the sources as a whole
MAX_CHANGES = 12  # of one run: each is kept in every later state, which must stay small
SHORT = 8  # hex digits of a digest that a change keeps

log = logging.getLogger("easypipe")


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The state after `batch` batches, or before the first.

    It is the same for any number of processes, workers and batches in flight.

    Args:
        batch: The number of batches yielded.
        row: The first row of the next batch, counted over the whole run.
        components: The digests of sources, tokenizer, config and plan, so that an error can say
            which changed.
        config: The settings that decide the content of a batch, the choices of the plan (`plan.`),
            and a shortened digest per dataset, so that an error can say what changed.
        hint: Where the plan's scan may start. It affects speed, never a result.
        changes: The changes allowed when the run was resumed, oldest first: `{"batch": 5, "row":
            40, "sources": [was, is]}` with the shortened digests. Counting of batches continues
            from the last change.
        epoch: The current pass of a loader that has passes (EpochLoader); batches and rows are
            counted within it.
    """

    batch: int
    row: int
    components: Mapping[str, str]
    config: Json = field(default_factory=dict)
    hint: Any = None
    changes: tuple[Json, ...] = ()
    epoch: int = 0

    @property
    def begin(self) -> Begin:
        """The place from which batches are counted.

        It is the start of the run, or where the run was last resumed with a change.
        """
        return (
            Begin(self.changes[-1]["batch"], self.changes[-1]["row"]) if self.changes else Begin()
        )

    def to_json(self) -> str:
        """Returns one line of JSON, at most 4 KiB, with a checksum."""
        values = {"version": VERSION, **asdict(self)}
        for name in ("changes", "epoch"):
            if not values[name]:
                del values[name]
        return json.dumps(values | {"checksum": digest(values)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes | Json) -> LoaderState:
        """Reads a state that `to_json` wrote.

        Raises:
            StateError: `text` is not a complete, unchanged state of this version.
        """
        try:
            values = dict(text) if isinstance(text, Mapping) else json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise StateError(
                at="loader state",
                problem=f"not JSON: {error}",
                fix="Restore from another checkpoint.",
            ) from None
        if not isinstance(values, dict) or "version" not in values:
            raise StateError(
                at="loader state",
                problem="not a state of a loader",
                fix="Give what `loader.state().to_json()` returned.",
            )
        if values["version"] != VERSION:
            raise StateError(
                at="loader state",
                problem=f"format version {values['version']}, this easypipe reads {VERSION}",
                fix="Restore with the easypipe that saved it.",
            )
        damaged = functools.partial(
            raising,
            StateError,
            "loader state",
            fix="Restore from another checkpoint.",
            on=(ValueError, TypeError, RecursionError),
        )
        checksum = values.pop("checksum", None)
        with damaged("damaged"):
            if checksum != digest(values):
                raise ValueError("its checksum does not fit")
        unknown = sorted(values.keys() - {"version", *(entry.name for entry in fields(cls))})
        with damaged("of another shape"):
            if unknown:
                raise ValueError(f"no state has {', '.join(unknown)}")
            return pydantic.TypeAdapter(cls).validate_python(values)

    def changed(self, components: Mapping[str, str], config: Json) -> tuple[list[str], str]:
        """Returns the components that changed since this state was saved, and a sentence about
        them.

        The result is ([], "") if nothing changed.
        """
        names = [name for name in COMPONENTS if self.components.get(name) != components[name]]
        details = [
            f"{key} was {self.config.get(key)!r}, is {config.get(key)!r}"
            for key in sorted({*self.config, *config})
            if self.config.get(key) != config.get(key)
        ]
        problem = f"{' and '.join(names)} changed since this state was saved" + (
            f": {'; '.join(details)}" if details else ""
        )
        return names, problem if names else ""

    def check(
        self,
        components: Mapping[str, str],
        config: Json,
        allow_changed: Collection[str] = (),
    ) -> LoaderState:
        """Returns this state, with the changes of components since it was saved.

        Args:
            components: The current digests.
            config: The current settings.
            allow_changed: The components that may have changed.

        Raises:
            StateError: A component changed that `allow_changed` does not name (the message names
                every changed component), or the run was already changed too often.
            ConfigError: A name in `allow_changed` is not a component.
        """
        for name in allow_changed:
            problem = f"a state has no component {name!r}"
            require_known(name, COMPONENTS, "allow_changed", problem)
        changed, problem = self.changed(components, config)
        if not changed:
            return self
        if not set(changed) <= set(allow_changed):
            ranks = self.config.get("world_size") or 1
            given = f" ({self.row} rows of each of {ranks} ranks were given)" if ranks > 1 else ""
            raise StateError(
                at="loader state",
                problem=problem,
                fix="Restore into the pipeline that saved it, start a new run, "
                f"or go on from row {self.row} of what there is now{given} with restore(state, "
                f"allow_changed={changed}).",
            )
        if len(self.changes) == MAX_CHANGES:
            raise StateError(
                at="loader state",
                problem=f"this run was changed {MAX_CHANGES} times already",
                fix="Start a new run.",
            )
        log.warning(
            "loader state: %s; continuing after batch %d, from row %d of the current data",
            problem,
            self.batch,
            self.row,
        )
        digests = {
            name: [self.components.get(name, "")[:SHORT], components[name][:SHORT]]
            for name in changed
        }
        change = {"batch": self.batch, "row": self.row, **digests}
        # the hint belongs to another plan
        hint = None if {"sources", "plan"} & set(changed) else self.hint
        return replace(
            self, components=components, config=config, hint=hint, changes=(*self.changes, change)
        )
