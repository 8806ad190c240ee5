"""What was kept in tests/golden/expected must come out today; `python tests/golden/compare.py`
prints what a change altered.
"""

from __future__ import annotations

import pytest

from golden.cases import Case, all_cases
from golden.compare import MISSING, differences, kept, through_json


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case.group}-{case.name}")
def test_golden(case: Case, tmp_path) -> None:
    changed = list(
        differences(kept(case.group).get(case.name, MISSING), through_json(case.run(tmp_path)))
    )
    assert not changed, "\n".join(changed)


def test_every_kept_value_belongs_to_a_case() -> None:
    names = {(case.group, case.name) for case in all_cases()}
    for group in {case.group for case in all_cases()}:
        assert {(group, name) for name in kept(group)} == {one for one in names if one[0] == group}


def test_what_changed_is_named_by_its_place() -> None:
    was = {"a": {"b": [1, 2.0, "x"]}, "gone": 1}
    now = {"a": {"b": [1, 2.0 + 1e-6, "y"]}, "new": None}
    assert list(differences(was, now)) == [
        'a.b[2]: was "x", is "y"',
        'gone: was 1, is "(nothing)"',
        'new: was "(nothing)", is null',
    ]
    assert list(differences({"a": 2.0}, {"a": 2.001})) == ["a: was 2.0, is 2.001"]
    assert list(differences({"a": 1}, {"a": True})) == ["a: was 1, is true"]
