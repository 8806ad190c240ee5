"""Pages of HTML: runs, plans, discoveries, previews, masks and the doctor share base.html.jinja."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from easypipe.core.values import Json, JsonValue
from easypipe.core.visible import visible


class Section(NamedTuple):
    """A part of the page: a table with notes behind it, text as it stands, or why there is
    none.
    """

    heading: str
    head: Sequence[str] = ()
    lines: Sequence[Sequence[JsonValue]] = ()
    notes: Sequence[str] = ()
    text: str = ""
    none: str = ""


def page_of(title: str, sections: Sequence[Section]) -> str:
    """A page of HTML without a script: tables and texts, one below the other."""
    return render("easypipe.core", {"title": title, "sections": sections, "shown": shown})


def render(package: str, values: Json) -> str:
    """The page.html.jinja of a package, which extends base.html.jinja. Every text is escaped, and
    what would not be seen in it is spelled out.
    """
    import jinja2  # only where a page is made
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
    return pages.get_template("page.html.jinja").render(values)


def shown(value: JsonValue) -> str:
    """A value as tables show it."""
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
