"""The page of what `discover` found: each part with its columns, first rows, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from easypipe.core.errors import ConfigError
from easypipe.core.pages import Section, page_of
from easypipe.core.values import JsonValue
from easypipe.core.visible import bytes_text
from easypipe.discovery.findings import Discovery, Part, short_type, shown_value
from easypipe.discovery.proposal import Proposal


def page(found: Discovery, proposals: Sequence[Proposal | ConfigError]) -> str:
    """Returns a page of HTML.

    Args:
        found: What `discover` found.
        proposals: For each part the config that reads it, or the error that says what to decide.
    """
    parts = [
        (part.name, part.format, *_counts(part), part.kind.name if part.columns else "")
        for part in found.parts
    ]
    head = ("part", "format", "files", "size", "rows", "kind")
    sections = [Section("Parts", head, parts, found.notes)]
    for part, made in zip(found.parts, proposals, strict=True):
        sections += _sections(part, made)
    return page_of(f"easypipe discover {found.source}", sections)


def _counts(part: Part) -> tuple[JsonValue, JsonValue, JsonValue]:
    size = "in memory" if part.num_bytes is None else bytes_text(part.num_bytes)
    rows = f"not counted: {part.cost}" if part.num_rows is None else part.num_rows
    return len(part.files), size, rows


def _sections(part: Part, made: Proposal | ConfigError) -> Iterator[Section]:
    """Yields the sections of a part: its columns, its first rows, and how to read it."""
    columns = [(column.name, short_type(column.type)) for column in part.columns or ()]
    yield Section(
        f"{part.name}: columns",
        ("column", "type"),
        columns,
        part.notes,
        none="" if columns else "it was listed, not looked into",
    )
    if part.sample:
        names = list(dict.fromkeys(name for row in part.sample for name in row))
        rows = [[_cell(row.get(name)) for name in names] for row in part.sample]
        yield Section(f"{part.name}: first rows", names, rows)
    decide = ", decide first" if isinstance(made, ConfigError) else ""
    yield Section(f"To read {part.name}{decide}", notes=part.because, text=str(made).rstrip())


def _cell(value: object) -> JsonValue:
    """Returns a value of a row, shortened as on the terminal."""
    seen = shown_value(value)
    return seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)
