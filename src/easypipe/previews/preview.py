"""What a preview shows: samples and which parts are trained on, as text, JSON or a page of HTML."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from easypipe.core.pages import render
from easypipe.core.values import Json, JsonObject
from easypipe.loader.explain import ExplainedRow, Segment


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text of one speaker that is all trained on, or all masked.

    `role` is the speaker who begins here; None if the previous one continues.
    """

    text: str
    masked: bool
    role: str | None = None

    def __str__(self) -> str:
        text = repr(self.text)[1:-1]
        speaker = "" if self.role is None else f"‹{self.role}›"
        return speaker + (f"⟦{text}⟧" if self.masked else text)


@dataclass(frozen=True, kw_only=True)
class SampleSegment:
    """A document, or the part of one that is in a row.

    Attributes:
        segment: Where it came from, and where it is.
        pieces: Its text; None if there is no tokenizer to decode it.
        roles: The speakers in the row that it was made from, in order.
        cuts: The parts of the document that are missing here, in words.
    """

    segment: Segment
    pieces: tuple[Piece, ...] | None
    roles: tuple[str, ...]
    cuts: tuple[str, ...]

    @property
    def title(self) -> str:
        """One line that says where it is, where it came from, and who speaks in it."""
        return self.segment.title + (
            f"; {', '.join(dict.fromkeys(self.roles))}" if self.roles else ""
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A row of a batch: one document, or several if rows are packed."""

    row: ExplainedRow
    segments: tuple[SampleSegment, ...]

    @property
    def title(self) -> str:
        return self.row.title

    @property
    def padding(self) -> int:
        """The number of empty slots of the row."""
        return self.row.padding


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Samples as they would be trained on.

    `notes` say how they were made, and what happened to the other rows.
    """

    samples: tuple[Sample, ...]
    notes: tuple[str, ...]

    def to_json(self) -> JsonObject:
        return dataclasses.asdict(self)

    def to_html(self, title: str = "easypipe preview") -> str:
        """Returns one self-contained page, in which samples are escaped text."""
        return page(title, self.samples, self.notes)

    def __str__(self) -> str:
        """Returns lines of text, with masked parts in ⟦ ⟧ and speakers in ‹ ›."""
        lines: list[str] = []
        for sample in self.samples:
            lines.append(sample.title)
            for segment in sample.segments:
                lines.append(f"  {segment.title}")
                lines += [f"      cut: {cut}" for cut in segment.cuts]
                if segment.pieces is not None:
                    lines.append("      " + "".join(map(str, segment.pieces)))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def page(title: str, samples: Sequence[Sample | Json], notes: Sequence[str]) -> str:
    """Returns a page of HTML that shows samples.

    It has no script and loads nothing, and invisible characters are spelled out.

    Args:
        title: The title of the page.
        samples: Each has a `title`, `padding`, and `segments` that have a `title`, `cuts` and
            `pieces`.
        notes: Sentences about the samples.
    """
    return render("easypipe.previews", {"title": title, "samples": samples, "notes": notes})
