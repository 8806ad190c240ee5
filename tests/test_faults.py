"""The faults of `nox -s faults` still fit the code: each changes a place that is there, once."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from faults import FAULTS, PACKAGE, ROOT, Fault
from golden.cases import all_cases


@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one.name)
def test_a_fault_fits(one: Fault) -> None:
    assert one.fits, f"{one.file}: {one.old!r} does not stand there once"
    ast.parse(one.put_into((PACKAGE / one.file).read_text(encoding="utf-8")))


@functools.cache
def _selectable(path: str) -> str:
    """What `-k` may select by: the path, names of functions, and texts, which become ids."""
    if path == "tests/test_golden.py":
        return " ".join(f"{case.group}-{case.name}" for case in all_cases())
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
    said = [node.value for node in nodes if isinstance(node, ast.Expr)]  # docstrings
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    texts = [str(n.value) for n in nodes if isinstance(n, ast.Constant) and n not in said]
    return " ".join([path, *names, *texts]).lower()


@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one.name)
def test_a_fault_has_tests(one: Fault) -> None:
    """Of no test that is asked, no fault would die."""
    paths = [word.partition("::")[0] for word in one.tests if word.startswith("tests/")]
    told = " ".join(map(_selectable, paths))
    chosen = one.tests[one.tests.index("-k") + 1] if "-k" in one.tests else ""
    words = set(re.findall(r"\w+", chosen)) - {"or", "and", "not"}
    assert paths, one.tests
    assert not [word for word in words if word.lower() not in told]


def test_names_are_told_apart() -> None:
    assert len({one.name for one in FAULTS}) == len(FAULTS)


def test_processes_of_tests_run_the_code_that_is_tested() -> None:
    """Where PYTHONPATH says nothing of it, they run the package that is installed: no fault of a
    copy is found there.
    """
    alone = re.compile(r'"PYTHONPATH": str\((?!copy|package|Path\(easypipe)')
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found = alone.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found}: name sys.path too"
