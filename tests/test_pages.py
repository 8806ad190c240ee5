"""Pages of `discover`, `plan` and `doctor`: what the terminal tells, as text that does nothing.
Pages of the site, opened as files.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

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


OPEN_ALL = """<!doctype html><meta name="color-scheme" content="light dark"><body><script>
const pages = PAGES;
const found = [];
const shown = (one) => one.checkVisibility();
function look(name, width, page) {
  const over = () => page.documentElement.scrollWidth - page.documentElement.clientWidth;
  const first = over();
  const sets = [...page.querySelectorAll(".tabbed-set")];
  const switched = sets.map((set) => {
    const label = set.querySelectorAll(":scope > .tabbed-labels > label")[1];
    label.click();
    const blocks = [...set.querySelectorAll(":scope > .tabbed-content > .tabbed-block")];
    return blocks.map(shown).join() === blocks.map((_, i) => i === 1).join();
  });
  found.push({
    name, width, switched, over: Math.max(first, over()), scheme: page.body.dataset.mdColorScheme,
    ran: "document$" in page.defaultView,
    escapes: [...page.querySelectorAll("td")].filter((one) => one.textContent.includes("\\\\|")).length,
  });
}
async function open(name, width) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  frame.src = name;
  document.body.append(frame);
  await new Promise((done) => frame.addEventListener("load", done));
  await new Promise((done) => setTimeout(done, 20));  // its scripts have run
  look(name, width, frame.contentDocument);
  frame.remove();
}
(async () => {
  for (const name of pages) for (const width of WIDTHS) await open(name, width);
  document.body.dataset.found = JSON.stringify(found);
})();
</script>"""


def open_all(site: Path, folder: Path, widths: list[int], *flags: str) -> list[dict[str, Any]]:
    """What a browser finds in every page of the site, each opened in a frame of each width.

    Only a server shows 404.html, whose links begin at the root.
    """
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    names = [name for name in names if name not in ("404.html", "driver.html")]
    driver = site / "driver.html"
    driver.write_text(
        OPEN_ALL.replace("PAGES", json.dumps(names)).replace("WIDTHS", json.dumps(widths))
    )
    frames = "--allow-file-access-from-files"  # the driver reads pages that are files too
    done = show(folder, "1400,1000", frames, *flags, "--dump-dom", driver.as_uri())
    assert "CONSOLE" not in done.stderr
    [found] = re.findall(r'data-found="([^"]*)"', done.stdout)
    looked = json.loads(html.unescape(found))
    assert all(one["ran"] for one in looked), "the scripts of the site"
    assert [(one["name"], one["width"]) for one in looked] == [
        (name, width) for name in names for width in widths
    ]
    return looked


@pytest.mark.skipif("EASYPIPE_CHROMIUM" not in os.environ, reason="needs a browser: nox -s html")
def test_every_page_of_the_site_in_a_browser(site: Path, tmp_path: Path) -> None:
    """Nothing is wider than the window, tabs switch, and no cell shows the escape of a pipe."""
    looked = open_all(site, tmp_path, [380, 1200])
    assert len(looked) > 100
    assert not [(one["name"], one["width"], one["over"]) for one in looked if one["over"] > 0]
    assert not [one["name"] for one in looked if not all(one["switched"])]
    tabs = {one["name"]: len(one["switched"]) for one in looked if one["switched"]}
    assert tabs["coming_from.html"] == 9
    assert not [one["name"] for one in looked if one["escapes"]]
    assert {one["scheme"] for one in looked} == {"default"}


@pytest.mark.skipif("EASYPIPE_CHROMIUM" not in os.environ, reason="needs a browser: nox -s html")
def test_every_page_is_dark_where_the_machine_is(site: Path, tmp_path: Path) -> None:
    looked = open_all(site, tmp_path, [1200], "--blink-settings=preferredColorScheme=0")
    assert {one["scheme"] for one in looked} == {"slate"}


def test_no_cell_of_a_table_shows_a_backslash() -> None:
    """In backticks the one that escapes a `|` is shown."""
    pages = sorted(Path(__file__).parents[1].joinpath("docs").glob("*.md"))
    rows = [row for page in pages for row in page.read_text(encoding="utf-8").splitlines()]
    assert not [row for row in rows if re.search(r"^\|.*`[^`|]*\\\|[^`]*` ", row)]
