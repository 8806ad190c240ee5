"""Pages of `discover`, `plan` and `doctor`: what the terminal tells, as text that does nothing.
Pages of the site, opened as files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from easypipe.cli import main
from easypipe.doctor.check import Finding, page
from pipelines import jsonl, texts, tokenizer

NAME = "<script>web"
HOSTILE = "<script>document.title='owned'</script>"


class Cells(HTMLParser):
    """The texts of a page's cells and notes, and which elements it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts = [""]
        self.elements: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.add(tag)
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    rows = [{"text": text, HOSTILE: HOSTILE, "n": i} for i, text in enumerate(texts(30))]
    path = jsonl(folder / "rows.jsonl", rows)
    values = {
        "datasets": [{"name": NAME, "data_files": str(path)}],
        "default_tokenizer": tokenizer(),
        "seed": 1,
        "cache_dir": str(folder / "cache"),
        "pack": {"seq_length": 32},
        "load": {"batch_size": 2},
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    assert main(["discover", str(path), "--html", str(folder / "discover.html")]) == 0
    assert main(["plan", str(config), "--html", str(folder / "plan.html")]) == 0
    findings = [Finding("masks", "FAILED", HOSTILE, 1.0), Finding("resume", "ok", "well", 2.0)]
    (folder / "doctor.html").write_text(page(["what it costs"], findings))
    return {file.stem: file.read_text() for file in folder.glob("*.html")}


def test_they_tell_what_the_terminal_tells(pages: dict[str, str]) -> None:
    told = {name: Cells(text).texts for name, text in pages.items()}
    assert {"train", "json", "30", "int64", HOSTILE} <= set(told["discover"])
    assert any("data_files" in text for text in told["discover"])
    assert {"rows of a step", "2", "100.0000%", NAME} <= set(told["plan"])
    assert {"Failed: 1", "masks", HOSTILE, "All is well: 1"} <= set(told["doctor"])


def test_nothing_in_them_runs(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert "script" not in Cells(text).elements, name
        assert "default-src 'none'" in text


@pytest.mark.skipif("EASYPIPE_CHROMIUM" not in os.environ, reason="needs a browser: nox -s html")
@pytest.mark.parametrize("name", ["discover", "plan", "doctor"])
@pytest.mark.parametrize("size", ["1200,1000", "380,1000"])
def test_in_a_browser(pages: dict[str, str], name: str, size: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(pages[name])
    done = show(tmp_path, size, "--dump-dom", file.as_uri())
    assert "CONSOLE" not in done.stderr
    assert f"<title>easypipe {name}" in done.stdout
    seen = Cells(done.stdout)
    assert "script" not in seen.elements
    assert "<script>" in "".join(seen.texts)
    show(tmp_path, size, f"--screenshot={tmp_path / 'page.png'}", file.as_uri())
    assert (tmp_path / "page.png").stat().st_size > 5_000


def show(folder: Path, size: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What Chromium prints when it opens a page in a window of `size`."""
    browser = shutil.which(os.environ["EASYPIPE_CHROMIUM"])
    assert browser
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    own = [f"--user-data-dir={folder / 'profile'}", f"--window-size={size}"]
    command = [browser, *flags, *own, "--virtual-time-budget=9000", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
    return folder


@pytest.mark.skipif("EASYPIPE_CHROMIUM" not in os.environ, reason="needs a browser: nox -s html")
def test_the_search_of_the_site_finds_without_a_server(site: Path, tmp_path: Path) -> None:
    done = show(tmp_path, "1200,1000", "--dump-dom", (site / "index.html").as_uri() + "?q=packing")
    assert "CONSOLE" not in done.stderr
    links = re.findall(r'<a href="([^"]*)" class="md-search-result__link"', done.stdout)
    assert links[0].startswith((site / "packing.html").as_uri())


@pytest.mark.skipif("EASYPIPE_CHROMIUM" not in os.environ, reason="needs a browser: nox -s html")
@pytest.mark.parametrize("size", ["1200,1000", "500,1000"])
@pytest.mark.parametrize("name", ["index", "conversations", "gallery", "reference/config"])
def test_the_site_in_a_browser(site: Path, name: str, size: str, tmp_path: Path) -> None:
    """Nothing is wider than the window, and no cell shows the escape of a pipe."""
    file = site / f"{name}.html"
    asked = file.with_name("asked.html")
    asked.write_text(
        file.read_text()
        + "<script>document.body.dataset.wide = document.documentElement.scrollWidth - innerWidth"
        "</script>"
    )
    done = show(tmp_path, size, "--dump-dom", asked.as_uri())
    assert "CONSOLE" not in done.stderr
    wide = re.search(r'data-wide="(-?[0-9]+)"', done.stdout)
    assert wide
    assert int(wide[1]) <= 0
    assert "\\|" not in done.stdout


def test_no_cell_of_a_table_shows_a_backslash() -> None:
    """In backticks the one that escapes a `|` is shown."""
    pages = sorted(Path(__file__).parents[1].joinpath("docs").glob("*.md"))
    rows = [row for page in pages for row in page.read_text(encoding="utf-8").splitlines()]
    assert not [row for row in rows if re.search(r"^\|.*`[^`|]*\\\|[^`]*` ", row)]
