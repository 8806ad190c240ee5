"""Every case of bad input ends in time with an error of ours that names the place, and the page
about them is that of the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bad_input import KINDS
from bad_input.case import Case, expect, try_out, warm_up
from bad_input.page import PAGE, cell
from fuzz import TARGETS, Hunt

CASES = [
    pytest.param(case, id=f"{kind}: {case.what}"[:120]) for kind in KINDS for case in KINDS[kind]
]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    warm_up(tmp_path_factory.mktemp("warm"))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: Case, tmp_path: Path) -> None:
    expect(case, try_out(case, tmp_path.resolve()))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("target", TARGETS)
def test_drawn_cases(target: str) -> None:
    """Two of each kind, always the same: `nox -s fuzz` draws them for minutes."""
    hunt = Hunt(target)
    hunt.test(2, derandomize=True)()
    assert hunt.tried >= 2


def test_the_page_lists_every_case() -> None:
    """After a change of the table: python tests/bad_input/page.py."""
    written = [
        row.removeprefix("| ").split(" | ")[0]
        for row in PAGE.read_text(encoding="utf-8").splitlines()
        if row.startswith("| ") and not row.startswith(("| what is wrong", "| ---"))
    ]
    assert written == [cell(case.what) for cases in KINDS.values() for case in cases]


def test_no_case_stands_twice() -> None:
    for cases in KINDS.values():
        names = [case.what for case in cases]
        assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]
