"""Pages of `discover`, `plan` and `doctor`: what the terminal tells, as text that does nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
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
    browser = shutil.which(os.environ["EASYPIPE_CHROMIUM"])
    assert browser
    file = tmp_path / "page.html"
    file.write_text(pages[name])
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    own = [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size}"]

    def show(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [browser, *flags, *own, *arguments, file.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    done = show("--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert f"<title>easypipe {name}" in done.stdout
    seen = Cells(done.stdout)
    assert "script" not in seen.elements
    assert "<script>" in "".join(seen.texts)
    show(f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").stat().st_size > 5_000
