"""What `discover` found in a dataset, as text and JSON: its parts, their columns, rows and kind."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.core.values import JsonObject, JsonValue, Row, Settings
from easypipe.core.visible import bytes_text, visible
from easypipe.discovery.proposal import Proposal, propose, try_rows
from easypipe.transforms.columns.kinds import Kind

SHOWN = 160  # characters of a value that a report shows
SHOWN_TYPE = 60  # characters of a type
SHOWN_FILES = 4  # files of a part


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a part.

    `type` is the name of the Arrow type, one of the plain types that the pipeline reads
    (`large_string` is text).
    """

    name: str
    type: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of one shape: a split of a subset, or those files of a folder that hold rows of one
    kind.

    Attributes:
        subset: The configuration of a Hub dataset; None if there is no name for one.
        split: The split; `train` if there is no name for one.
        format: The format of the files.
        files: Their paths; empty for rows in memory.
        num_bytes: The stored bytes; None for rows in memory.
        num_rows: The number of rows; None if counting would have to read the files.
        rows_from: Where `num_rows` comes from: `files` (each is one row), `footer`, `index` (of a
            file that easypipe has read before), `read` (the whole part was inspected), `manifest`,
            `card`, `memory` or `count`.
        cost: What counting would read, if the rows are not counted.
        columns: The columns; None if the part was only listed.
        kind: The kind of the rows.
        sample: The first rows.
        notes: What is not known, and why.
        because: Why the proposed config reads the files in its way.
        reads: The fields of the DatasetConfig that reads this part, without its columns.
        schema: The schema of the rows.
        rows: All rows that were inspected.
    """

    subset: str | None
    split: str
    format: str
    files: tuple[str, ...]
    num_bytes: int | None
    num_rows: int | None = None
    rows_from: str | None = None
    cost: str | None = None
    columns: tuple[Column, ...] | None = None
    kind: Kind = dataclasses.field(default_factory=lambda: Kind(name="unknown"))
    sample: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    because: tuple[str, ...] = ()
    reads: Settings = dataclasses.field(repr=False)
    schema: pa.Schema | None = dataclasses.field(default=None, repr=False)
    rows: tuple[Row, ...] = dataclasses.field(default=(), repr=False)

    @property
    def name(self) -> str:
        return self.split if self.subset is None else f"{self.subset}/{self.split}"

    def propose(
        self,
        *,
        kind: str | None = None,
        columns: Mapping[str, str] | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> Proposal:
        """Returns the config that would read these rows, with the reason for every column.

        It reads nothing; it tries the rows that were inspected.

        Args:
            kind: The kind of rows; None: it is guessed.
            columns: The columns that you choose ({"prompt": "question"}); the others are guessed.
            roles: The role of each speaker ({"bot": "assistant"}), for conversations whose
                speakers have other names.

        Raises:
            ConfigError: Two columns fit equally well (both are named), no kind fits, a speaker is
                unknown, or there is no such kind or column.
        """
        return propose(self, kind=kind, columns=columns, roles=roles)


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What was found at `source`."""

    source: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    @property
    def subsets(self) -> tuple[str, ...]:
        """The configurations that a dataset of the Hub has; none for others."""
        return tuple(dict.fromkeys(part.subset for part in self.parts if part.subset is not None))

    configs = subsets

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.split for part in self.parts))

    def part(self, split: str | None = None, *, subset: str | None = None) -> Part:
        """Returns the only part, or the one of that name.

        Raises:
            ConfigError: None of the parts, or more than one, has that name; the message lists them.
        """
        found = [
            part
            for part in self.parts
            if split in (None, part.split) and subset in (None, part.subset)
        ]
        if len(found) != 1:
            have = [part.name for part in self.parts]
            asked = "/".join(filter(None, (subset, split))) or "one part"
            problem = (
                f"no part {asked!r}"
                if not found
                else f"{len(found)} parts match {asked!r}: index `parts` for one"
            )
            raise ConfigError(
                at=self.source, problem=problem, have=have, fix=did_you_mean(asked, have)
            )
        return found[0]

    def propose(self, split: str | None = None, **decided: Any) -> Proposal:
        """Returns `part(split).propose(**decided)`.

        Without a split it is the training part, if there is one.
        """
        if split is None and "train" in self.splits:
            split = "train"
        return self.part(split).propose(**decided)

    def to_json(self) -> JsonObject:
        """Returns plain dicts, lists and numbers.

        Values of sample rows are cut to a few words, and bytes are replaced by their number.
        """
        return {
            "source": self.source,
            "subsets": list(self.subsets),
            "splits": list(self.splits),
            "parts": [_part_json(part) for part in self.parts],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(map(visible, self._lines()))

    def _lines(self) -> Iterator[str]:
        yield f"{self.source}: {len(self.parts)} part{'s' if len(self.parts) != 1 else ''}"
        for part in self.parts:
            yield ""
            yield from _part_lines(part)
        for note in self.notes:
            yield f"note: {note}"


def _part_lines(part: Part) -> Iterator[str]:
    """Yields the lines of a part in the text report."""
    size = "" if part.num_bytes is None else f", {bytes_text(part.num_bytes)}"
    many = f" in {len(part.files)} files" if len(part.files) > 1 else ""
    yield f"{part.name}: {part.format}{size}{many}"
    for file in part.files[:SHOWN_FILES]:
        yield f"  {file}"
    if len(part.files) > SHOWN_FILES:
        yield f"  … and {len(part.files) - SHOWN_FILES} more"
    yield "  rows     " + (
        f"not counted: {part.cost}"
        if part.num_rows is None
        else f"{part.num_rows:,} ({part.rows_from})"
    )
    if part.columns is not None:
        yield "  columns  " + ", ".join(
            f"{column.name} ({short_type(column.type)})" for column in part.columns
        )
        yield f"  kind     {part.kind}"
        yield from (f"  proposed {reason}" for reason in part.because)
        trial = try_rows(part.kind, part.rows)
        word = "doubtful" if trial.failed else "proposed"
        yield from (
            f"  {word} {choice.slot} = {choice.column!r}: {choice.reason}"
            for choice in part.kind.choices
        )
        if trial.first is not None:
            yield f"  refused  {trial}"
        yield from (f"  refused  {tie.error(part.name).problem}" for tie in part.kind.ties)
        yield from (
            f"  row {i}    {json.dumps(shown_value(row), ensure_ascii=False)}"
            for i, row in enumerate(part.sample)
        )
    yield from (f"  note     {note}" for note in part.notes)


def _part_json(part: Part) -> JsonObject:
    values = dataclasses.asdict(dataclasses.replace(part, reads={}, schema=None, rows=()))
    for name in ("reads", "schema", "rows"):
        del values[name]
    for choice, known in zip(values["kind"]["choices"], part.kind.choices, strict=True):
        choice["reason"] = known.reason
    return values | {"files": list(part.files), "sample": [shown_value(row) for row in part.sample]}


def shown_value(value: object) -> JsonValue:
    """Returns a value as it is shown.

    Long texts are cut, bytes are replaced by their number, and values that JSON lacks become text.
    """
    if isinstance(value, str):
        return value if len(value) <= SHOWN else value[:SHOWN] + "…"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, Mapping):
        return {str(key): shown_value(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [
            *(shown_value(item) for item in value[:8]),
            *([f"… {len(value) - 8} more"] if len(value) > 8 else []),
        ]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def short_type(text: str) -> str:
    """Returns an Arrow type in shorter words."""
    text = (
        text.replace("large_string", "text")
        .replace("large_list", "list")
        .replace("item: ", "")
        .replace("element: ", "")
    )
    return text if len(text) <= SHOWN_TYPE else text[:SHOWN_TYPE] + "…"
