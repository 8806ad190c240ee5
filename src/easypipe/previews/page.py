"""Samples as one HTML page: no script, nothing loaded from elsewhere, and whatever a sample holds
is shown as text.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

from easypipe.core.text import visible
from easypipe.previews.samples import Piece, Preview, Sample, SampleSegment

STYLE = """
:root { color-scheme: light dark; --line: #8886; --trained: #d7f0d4; --ink: #14401a; --role: #6b2fa0; --cut: #8a4b00; }
@media (prefers-color-scheme: dark) { :root { --trained: #1d4a24; --ink: #d5f2d3; --role: #cda6f5; --cut: #f0b56a; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.segment { border: 1px solid var(--line); border-left-width: 6px; margin: 0 0 .5rem; padding: .5rem .75rem; }
.segment:nth-of-type(even) { border-left-style: dashed; }
.where, .note { color: GrayText; font-size: .85rem; overflow-wrap: anywhere; }
.cut { color: var(--cut); font-size: .85rem; }
.text { font: 14px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0 0; }
.trained { background: var(--trained); color: var(--ink); }
.masked { opacity: .65; }
.role { color: var(--role); font-weight: 600; border: 1px solid; border-radius: 3px; padding: 0 .3em; margin: 0 .3em; font-size: .8em; }
.padding { border: 1px dashed var(--line); padding: .2rem .75rem; color: GrayText; }
"""


def page(preview: Preview, title: str) -> str:
    """The whole document, UTF-8. Its policy forbids scripts and every other source, should a
    browser find one in it all the same.
    """
    body = "\n".join(_sample(sample) for sample in preview.samples)
    notes = "\n".join(f'<p class="note">{_text(note)}</p>' for note in preview.notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{_text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>
<p><span class="trained">trained</span> <span class="masked">masked</span> <span class="role">who begins to speak</span></p>
{body}
{notes}
</body>
</html>
"""


def _sample(sample: Sample) -> str:
    segments = "\n".join(map(_segment, sample.segments))
    padding = (
        f'<div class="padding">{sample.row.padding} slots of padding</div>'
        if sample.row.padding
        else ""
    )
    return f"<section>\n<h2>{_text(sample.row.title)}</h2>\n{segments}\n{padding}</section>"


def _segment(segment: SampleSegment) -> str:
    cuts = "".join(f'<div class="cut">cut: {_text(cut)}</div>' for cut in segment.cuts)
    pieces = (
        "no tokenizer decodes it"
        if segment.pieces is None
        else "".join(map(_piece, segment.pieces))
    )
    return f'<div class="segment"><div class="where">{_text(segment.title)}</div>{cuts}<div class="text">{pieces}</div></div>'


def _piece(piece: Piece) -> str:
    role = "" if piece.role is None else f'<span class="role">{_text(piece.role)}</span>'
    return (
        f'{role}<span class="{"masked" if piece.masked else "trained"}">{_text(piece.text)}</span>'
    )


def _text(text: str) -> str:
    """Text as text: nothing in it is markup, and what would not be seen is spelled out."""
    return html.escape(visible(text, keep="\n\t"), quote=True)


def lines(preview: Preview) -> Iterator[str]:
    """The same as lines of text, with masked parts in ⟦ ⟧."""
    for sample in preview.samples:
        yield sample.row.title
        for segment in sample.segments:
            yield f"  {segment.title}"
            yield from (f"      cut: {cut}" for cut in segment.cuts)
            if segment.pieces is not None:
                yield "      " + "".join(_marked(piece) for piece in segment.pieces)
    yield from (f"note: {note}" for note in preview.notes)


def _marked(piece: Piece) -> str:
    role = "" if piece.role is None else f" {piece.role}: "
    text = repr(piece.text)[1:-1]
    return role + (f"⟦{text}⟧" if piece.masked else text)
