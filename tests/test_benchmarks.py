"""Scripts in benchmarks/ fit the code: a figure in the docs is one that its command still prints."""

from __future__ import annotations

import ast
import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in taken:
        if node.module and node.module.partition(".")[0] == "easypipe":
            module = importlib.import_module(node.module)
            missing = [one.name for one in node.names if not hasattr(module, one.name)]
            assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize(
    ("name", "options", "fact"),
    [
        ("first_batch", ["--gigabytes", "0.05"], "whole: token files, documents, tokens"),
        ("scale", ["--documents", "300_000", "--parts", "12"], "files of the cache"),
    ],
)
def test_a_cache_that_a_benchmark_makes_is_opened(
    name: str, options: list[str], fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [str(FOLDER / f"{name}.py"), *options, "--rounds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(given[0], run_name="__main__")
    assert json.loads((tmp_path / f"{name}.json").read_text())["facts"][fact]
