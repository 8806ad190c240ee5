"""HTML pages of sections (tables, notes, text) from jinja2 templates, which all reports share.

The reports are those of runs, plans, discoveries, previews, masks and the doctor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from easypipe.core.values import Json, JsonValue
from easypipe.core.visible import visible


class Section(NamedTuple):
    """One part of a page: a table followed by notes, plain text, or why there is nothing.

    Attributes:
        heading: The heading of the part.
        head: The column heads of the table.
        lines: The lines of the table, one value for each head.
        notes: Sentences after the table.
        text: Preformatted text.
        none: The sentence that says why there is nothing to show.
    """

    heading: str
    head: Sequence[str] = ()
    lines: Sequence[Sequence[JsonValue]] = ()
    notes: Sequence[str] = ()
    text: str = ""
    none: str = ""


def page_of(title: str, sections: Sequence[Section]) -> str:
    """Returns an HTML page with the sections in order, without a script."""
    return render("easypipe.core", {"title": title, "sections": sections, "shown": shown})


def commit_page(path: Path, page: str) -> None:
    """Writes an HTML page as one commit.

    Raises:
        StorageError: The path has a file that is not an HTML page, such as the config; or the page
            cannot be written.
    """
    from easypipe.core.errors import StorageError
    from easypipe.core.storage import commit_bytes

    if path.is_file():
        with path.open("rb") as file:
            begin = file.read(100).lstrip().lower()
        if begin and not begin.startswith((b"<!doctype html", b"<html")):
            problem = "is a file, and no HTML page"
            raise StorageError(at=str(path), problem=problem, fix="Give another name.")
    commit_bytes(path, page.encode())


def render(package: str, values: Json, block: str = "") -> str:
    """Renders the page.html.jinja of a package, which extends base.html.jinja.

    Every text is escaped, and its invisible characters are spelled out.

    Args:
        package: The package that holds the template.
        values: The variables of the template.
        block: The block to render; "" is the whole page.
    """
    import jinja2  # imported here, because few processes make a page
    from markupsafe import Markup

    def seen(value: object) -> object:
        return value if isinstance(value, Markup) else visible(str(value), keep="\n\t")

    folders = [jinja2.PackageLoader(name, "") for name in (package, "easypipe.core")]
    pages = jinja2.Environment(
        loader=jinja2.ChoiceLoader(folders),
        autoescape=True,
        finalize=seen,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = pages.get_template("page.html.jinja")
    if not block:
        return template.render(values)
    return "".join(template.blocks[block](template.new_context(dict(values))))


def shown(value: JsonValue) -> str:
    """Returns a value as tables show it."""
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
