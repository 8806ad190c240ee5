"""Pages of HTML: the run page, previews and masks have one look, which base.html.jinja gives."""

from __future__ import annotations

from easypipe.core.values import Json
from easypipe.core.visible import visible


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
