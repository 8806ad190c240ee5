"""Where what is printed goes: full disks, readers that leave, terminals of ASCII."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from easypipe.cli import app, main
from pipelines import jsonl, texts, tokenizer

COMMAND = [sys.executable, "-c", "import sys; from easypipe.cli import main; sys.exit(main())"]
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_a_full_disk_behind_stdout_is_named() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert (
        done.stderr == "easypipe: output: No space left on device. Check space and permissions.\n"
    )


def test_a_reader_that_leaves_is_no_failure_to_report() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" --help | true', "-", *COMMAND], capture_output=True, text=True
    )
    assert "Error" not in done.stderr
    assert "report" not in done.stderr


def test_a_locale_of_ascii_shows_names_as_numbers(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(20)])
    path = tmp_path / "c.yaml"
    for name, files, code, said, *more in (
        ("wörld", data, 0, "w\\xf6rld"),
        ("a", tmp_path / "dätä.jsonl", 2, "d\\xe4t\\xe4.jsonl: no such file or folder"),
        ("a", data, 0, "w\\xf6rld", "--set", "datasets.0.name=wörld".encode()),
        (
            "a",
            data,
            2,
            "'seed=\\udce4' is not valid UTF-8. Write it in UTF-8.",
            "--set",
            b"seed=\xe4",
        ),
    ):
        values = {
            "datasets": [{"name": name, "data_files": str(files)}],
            "default_tokenizer": tokenizer(),
            "cache_dir": str(tmp_path / "cache"),
        }
        path.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
        done = subprocess.run(
            [*COMMAND, "prepare", str(path), *more],
            capture_output=True,
            env={**os.environ, **ASCII},
        )
        text = (done.stdout + done.stderr).decode("ascii")
        assert done.returncode == code, text
        assert said in text


def test_a_panic_of_a_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class PanicException(BaseException):
        """What pyo3 raises."""

    def panics(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(app, "app", panics)
    assert main(["plan", "x.yaml"]) == 1
    assert capsys.readouterr().err.startswith("easypipe: PanicException: index out of bounds. ")


def test_a_device_whose_memory_ran_out_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax

    def exhausts(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(app, "app", exhausts)
    assert main(["generate", "run", "x"]) == 1
    said = "easypipe: memory ran out. Give the process more, or less to do at a time.\n"
    assert capsys.readouterr().err == said
