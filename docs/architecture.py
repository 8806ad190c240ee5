"""Draws the pictures of architecture.md from the code: `python docs/architecture.py`.

rooms.svg          the packages of easypipe by floors: each imports only from floors below it
way_of_a_row.svg   the files that run while a row of text is prepared, planned and made into a
                   batch, as `sys.setprofile` sees them

`--check` writes nothing, and fails where a picture is not as the code is (tests/test_docs.py).
"""

from __future__ import annotations

import ast
import html
import json
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
HOUSE = DOCS.parent / "src" / "easypipe"
WIDE, HIGH, GAP = 176, 76, 12
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f }
.name { font-weight: 600; font-size: 14px } .small { font-size: 11px; fill: #57606a }
.room { fill: #eef4fb; stroke: #5b84b1 } .floor { fill: #57606a; font-size: 11px }
.paper { fill: #ffffff } .arrow { stroke: #b0753a; fill: none; stroke-width: 1.4 }
.step { fill: #fdf6ec; stroke: #b0753a }
</style>"""


def room_of(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Modules of easypipe that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.startswith("easypipe."))


def rooms() -> dict[str, set[str]]:
    """Every package or top-level module, with those that it imports from."""
    files = [path for path in sorted(HOUSE.rglob("*.py")) if room_of(path) != "__init__"]
    known = {room_of(path) for path in files}
    seen: dict[str, set[str]] = {room: set() for room in known}
    for path in files:
        seen[room_of(path)] |= {name.split(".")[1] for name in imports(path)} & known
    return {room: uses - {room} for room, uses in sorted(seen.items())}


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """Rooms by floors from the lowest: a room stands above all that it imports from. Rooms that
    import from one another share a floor.
    """
    reach = {room: set(uses) for room, uses in graph.items()}
    for middle in graph:
        for room in graph:
            if middle in reach[room]:
                reach[room] |= reach[middle]
    level: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in level:
            same = {other for other in reach[room] if room in reach[other]} | {room}
            below = {use for one in same for use in graph[one]} - same
            height = 1 + max((of(use) for use in below), default=-1)
            level.update(dict.fromkeys(same, height))
        return level[room]

    for room in graph:
        of(room)
    return [
        [room for room in graph if level[room] == floor] for floor in range(max(level.values()) + 1)
    ]


def first_line(room: str) -> str:
    path = HOUSE / room / "__init__.py"
    path = path if path.is_file() else HOUSE / f"{room}.py"
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(said.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def words(x: float, y: float, text: str, kind: str, *, line: int = 14) -> str:
    parts = text.split("\n")
    return "".join(
        f'<text class="{kind}" x="{x:.0f}" y="{y + i * line:.0f}">{html.escape(part)}</text>'
        for i, part in enumerate(parts)
    )


def picture(width: float, height: float, inside: str, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img">'
        f"<title>{html.escape(title)}</title>{STYLE}"
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>\n{inside}</svg>\n'
    )


def draw_rooms() -> str:
    levels = floors(rooms())
    width = 70 + max(len(level) for level in levels) * (WIDE + GAP)
    parts = []
    for height, level in enumerate(reversed(levels)):
        y = GAP + height * (HIGH + GAP)
        parts.append(words(GAP, y + HIGH / 2 + 4, f"floor {len(levels) - 1 - height}", "floor"))
        wide = (width - 70) / len(level) - GAP  # a floor is as wide as the house
        for place, room in enumerate(level):
            x = 70 + place * (wide + GAP)
            said = textwrap.wrap(first_line(room), int(wide / 6.4), max_lines=3, placeholder=" …")
            parts.append(
                f'<rect class="room" x="{x:.0f}" y="{y}" width="{wide:.0f}" height="{HIGH}" '
                'rx="6"/>'
                + words(x + 9, y + 19, room, "name")
                + words(x + 9, y + 36, "\n".join(said), "small", line=13)
                + "\n"
            )
    title = "The rooms of easypipe: each imports only from floors below its own"
    return picture(width, GAP + len(levels) * (HIGH + GAP), "".join(parts), title)


def way() -> list[tuple[str, list[str]]]:
    """(what is done, the files of easypipe of which a function runs while it is)."""
    import easypipe
    from easypipe import (
        DatasetConfig,
        LoadStageConfig,
        PackStageConfig,
        Pipeline,
        PipelineConfig,
        train_bpe,
    )

    imported = Path(easypipe.__file__).parent  # an installed copy, perhaps
    found: list[tuple[str, list[str]]] = []
    entered: set[str] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(imported)):
            place = Path(name).relative_to(imported).as_posix()
            if not place.endswith("__init__.py"):
                entered.add(place)

    def watched(what: str, run: Any) -> Any:
        entered.clear()
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            return run()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            found.append((what, sorted(entered)))

    with tempfile.TemporaryDirectory() as folder:
        text = "a row of text that becomes tokens"
        tokenizer = train_bpe([text] * 8, 300, [], Path(folder, "tokenizer"))
        path = Path(folder, "text.jsonl")
        path.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
        config = PipelineConfig(
            datasets=[DatasetConfig(name="text", data_files=str(path))],
            default_tokenizer=str(tokenizer),
            cache_dir=str(Path(folder, "cache")),
            seed=1,
            pack=PackStageConfig(seq_length=16),
            load=LoadStageConfig(batch_size=1, drop_last=False),
        )
        chain = watched("describe", lambda: Pipeline.from_config(config).source().tokenize())
        watched("tokenize", lambda: chain.prepare_part(0, 1))
        loader = watched("plan", lambda: chain.pack().load().build())
        watched("make batches", lambda: list(loader))
    return found


def draw_way(steps: list[tuple[str, list[str]]]) -> str:
    """steps: as `way` gives them. A column each; rooms from the highest floor down."""
    height_of = {room: i for i, level in enumerate(floors(rooms())) for room in level}
    columns, height = [], 0
    for place, (what, files) in enumerate(steps):
        x, y = GAP + place * 250, 58
        lines = [words(x + 8, 32, f"{place + 1}. {what}", "name")]
        by_room: dict[str, list[str]] = {}
        for file in files:
            room, _, rest = file.partition("/")
            by_room.setdefault(room if rest else room.removesuffix(".py"), []).append(
                rest.removesuffix(".py")
            )
        for room in sorted(by_room, key=lambda room: (-height_of[room], room)):
            names = by_room[room]
            said = textwrap.wrap(", ".join(name for name in names if name), 36)
            high = 24 + 13 * len(said)
            lines.append(
                f'<rect class="step" x="{x}" y="{y}" width="236" height="{high}" rx="6"/>'
                + words(x + 8, y + 16, room, "name")
                + words(x + 8, y + 31, "\n".join(said), "small", line=13)
                + "\n"
            )
            y += high + 6
        columns.append("".join(lines))
        height = max(height, y)
    arrows = "".join(
        f'<path class="arrow" d="M{GAP + i * 250 + 160} 28 h70 m-7 -4 l7 4 l-7 4"/>'
        for i in range(len(steps) - 1)
    )
    title = "The way of a row: the files that run, step by step"
    return picture(GAP + len(steps) * 250, height + GAP, arrows + "".join(columns), title)


def main() -> None:
    pictures = {"rooms.svg": draw_rooms(), "way_of_a_row.svg": draw_way(way())}
    if sys.argv[1:] == ["--check"]:
        old = [name for name, now in pictures.items() if (DOCS / name).read_text("utf-8") != now]
        sys.exit(f"not as the code is, run python docs/architecture.py: {old}" if old else 0)
    for name, now in pictures.items():
        (DOCS / name).write_text(now, encoding="utf-8")


if __name__ == "__main__":
    main()
