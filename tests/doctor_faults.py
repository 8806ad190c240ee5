"""Faults that stand in a process which the doctor starts: it imports them by this name."""

from __future__ import annotations

from easypipe.core.values import Batch
from easypipe.doctor.data import Sample
from easypipe.doctor.processes import share


def share_of_the_first(sample: Sample, _: int) -> list[Batch]:
    return share(sample, 0)


def share_of_nobody(_: Sample, __: int) -> list[Batch]:
    return []
