"""Names and texts that come from files and configs are printed as they are, and steer nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml

from easypipe.cli import main
from easypipe.cli.terminal import Terminal
from easypipe.core.errors import SourceError
from pipelines import jsonl, texts, tokenizer

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def write(path: Path, **values: object) -> Path:
    text = {"default_tokenizer": tokenizer(), "cache_dir": str(path.parent / "cache"), **values}
    path.write_text(yaml.safe_dump(text))
    return path


def assert_harmless(text: str) -> None:
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*text}, repr(text)


def test_brackets_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = jsonl(tmp_path / "a[1].jsonl", [{"text": text} for text in texts(20)])
    out = tmp_path / "o[/en]"
    path = write(
        tmp_path / "c[b].yaml",
        datasets=[{"name": "web[en]", "data_files": str(data)}],
        save={"output_dir": str(out)},
    )
    assert main(["prepare", str(path)]) == 0
    text = capsys.readouterr().out
    assert "saved web[en]: 20 rows" in text
    assert f"{out}" in text
    assert "web " not in text.replace("web[en]", "")
    assert main(["plan", str(path), "--set", "pack={seq_length: 32}"]) == 0
    assert "web[en]" in capsys.readouterr().out
    assert main(["cache", "list", "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "web[en]" in capsys.readouterr().out


def test_nothing_that_is_printed_steers_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"d{ESCAPE}".replace("\x07", "")
    data = jsonl(tmp_path / f"f{ESCAPE}.jsonl", [{"text": t, f"c{ESCAPE}": 1} for t in texts(20)])
    values = {"datasets": [{"name": name, "data_files": str(data)}]}
    path = write(tmp_path / "c.yaml", **values)
    unknown = write(tmp_path / "u.yaml", **values, **{f"k{ESCAPE}": 1})
    missing = {"name": "a", "data_files": str(data), "content_field": f"x{ESCAPE}"}
    template = {"template": "{{ text " + ESCAPE + " }}"}
    prompt = {"name": "a", "data_files": str(data), "prompt": template}
    for arguments in (
        ["discover", str(data)],
        ["prepare", str(path)],
        ["cache", "list", "--cache-dir", str(tmp_path / "cache")],
        ["plan", str(path), "--set", "pack={seq_length: 32}"],
        ["plan", str(unknown)],
        ["plan", str(write(tmp_path / "m.yaml", datasets=[missing]))],
        ["prepare", str(write(tmp_path / "p.yaml", datasets=[prompt]))],
        ["prepare", str(tmp_path / f"none{ESCAPE}.yaml")],
        ["prepare", str(path), "--set", f"k{ESCAPE}=1"],
        [f"no{ESCAPE}"],
    ):
        main(arguments)
        told = capsys.readouterr()
        assert told.out + told.err
        assert_harmless(told.out + told.err)


def test_the_log_and_errors_of_a_program_are_harmless_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--version"])
    main(["plan", "none.yaml"])  # from here on the log is on the terminal
    capsys.readouterr()
    logging.getLogger("easypipe").warning("column %s [bold]x[/bold]", ESCAPE)
    told = capsys.readouterr().err
    assert_harmless(told)
    assert "[bold]x[/bold]" in " ".join(told.split())
    assert_harmless(str(SourceError(at=f"a{ESCAPE}", problem=ESCAPE, have=[ESCAPE], fix=ESCAPE)))


def test_what_is_written_stays_readable(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.print("a\tb\n👩\u200d🚀 e\u0301 [/x] :smile:")
    assert "b\n👩\u200d🚀 e\u0301 [/x] :smile:" in capsys.readouterr().out
