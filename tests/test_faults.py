"""The faults of `nox -s faults` still fit the code: each changes a place that is there, once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults import FAULTS, Fault


@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one.name)
def test_a_fault_fits(one: Fault) -> None:
    assert one.fits, f"{one.file}: {one.old!r} does not stand there once"


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
