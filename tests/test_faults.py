"""The faults of `nox -s faults` still fit the code: each changes a place that is there, once."""

from __future__ import annotations

import pytest

from faults import FAULTS, Fault


@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one.name)
def test_a_fault_fits(one: Fault) -> None:
    assert one.fits, f"{one.file}: {one.old!r} does not stand there once"


def test_names_are_told_apart() -> None:
    assert len({one.name for one in FAULTS}) == len(FAULTS)
