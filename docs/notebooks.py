"""Tutorials as notebooks: the site's build makes them of the pages, which stay their one source.

`python docs/notebooks.py [NAME ...]` runs them by Jupyter's nbclient, in one new folder: the
quickstart that each begins with runs once. With `--folder FOLDER` they run there, and a quickstart
that stands in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

TUTORIALS = ("quickstart", "pretrain", "finetune", "dpo", "multihost", "custom")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r'^--8<-- "(.+)"\n', re.MULTILINE)  # a file that the site shows
CHECKOUT = "python -m pip install '.[train]'"  # beside a notebook there is none
INSTALL = "(command -v easypipe || python -m pip install 'easypipe[train]')"
SETUP = f"%%bash\n{INSTALL}\n[ -d easypipe-quickstart ] || easypipe quickstart\n"


def notebook(page: Path) -> dict[str, Any]:
    """The page as a notebook: blocks of Python and of the shell are cells that run, a config that
    is to be saved is a cell that writes it, and the rest is text.
    """
    text = SNIPPET.sub(
        lambda found: (page.parents[1] / found[1]).read_text(encoding="utf-8"),
        page.read_text(encoding="utf-8"),
    )
    cells, done, before = [], 0, ""
    if page.stem != "quickstart":  # which begins with this
        cells.append(_cell("code", SETUP))
    for block in BLOCK.finditer(text):
        before = text[done : block.start()]
        code = _code(block[1], block[2], before)
        if code is not None:
            cells += [_cell("markdown", _unlinked(before)), _cell("code", code)]
            done = block.end()
    cells.append(_cell("markdown", _unlinked(text[done:])))
    cells = [cell | {"id": f"cell{i}"} for i, cell in enumerate(cells) if cell["source"]]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _code(language: str, text: str, before: str) -> str | None:
    """What runs in place of a block; None: it is to be read, as `sh` on files of your own is."""
    if language == "python":
        return text
    if language == "bash":
        return f"%%bash -e\n{text.replace(CHECKOUT, INSTALL)}"
    if language == "console":
        typed = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
        return "%%bash -e\n" + "\n".join(typed) + "\n"  # ends at the first line that fails
    saved = re.search(r"save it as `(\S+)`[^`]*$", before)
    return f"%%writefile {saved[1]}\n{text}" if language == "yaml" and saved else None


def _cell(kind: str, text: str) -> dict[str, Any]:
    more = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.strip("\n"), **more}


def _unlinked(text: str) -> str:
    """Without links to other pages, which do not stand beside a notebook."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


def on_files(files: Any, config: Any) -> Any:
    """Puts the notebooks into the site."""
    from mkdocs.structure.files import File

    for name in TUTORIALS:
        made = json.dumps(notebook(Path(config["docs_dir"]) / f"{name}.md"), indent=1)
        files.append(File.generated(config, f"notebooks/{name}.ipynb", content=made))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Below the title of a tutorial, a link to its notebook."""
    name = Path(page.file.src_uri).stem
    if page.file.src_uri not in {f"{one}.md" for one in TUTORIALS}:
        return markdown
    title, end, rest = markdown.partition("\n")
    return f"{title}{end}\n[This page as a notebook](notebooks/{name}.ipynb)\n{rest}"


def run(name: str, folder: str) -> None:
    """Runs every cell in `folder` as Jupyter does; raises CellExecutionError with the output of one
    that fails.
    """
    import nbformat
    from nbclient import NotebookClient

    begun = time.monotonic()
    cells = nbformat.from_dict(notebook(Path(__file__).parent / f"{name}.md"))
    NotebookClient(cells, timeout=3600, resources={"metadata": {"path": folder}}).execute()
    count = sum(cell["cell_type"] == "code" for cell in cells["cells"])
    print(f"{name}: {count} cells in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=TUTORIALS)
    parser.add_argument("--folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="easypipe-notebooks-") as made:
        for tutorial in asked.names:
            run(tutorial, asked.folder or made)
