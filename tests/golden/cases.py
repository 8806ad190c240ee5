"""The registry of golden cases. A case is a function of an empty folder that gives what JSON can
hold; its module is its group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUPS = (
    "batches",
    "resume",
    "training",
    "documents",
    "errors",
    "exports",
    "limits",
    "masks",
    "kept",
    "reading",
    "foreign",
)


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    run: Callable[[Path], Any]


CASES: dict[tuple[str, str], Case] = {}
writing = False  # set by `compare.py --write`


def is_to_be_kept(path: Path) -> bool:
    """Whether what is kept at `path` is to be made now. A test never makes it: what is missing
    there is an error.
    """
    assert writing or path.exists(), (
        f"{path.name} is missing; it is kept by `python tests/golden/compare.py --write`"
    )
    return not path.exists()


def golden(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a case for each name, which the function also takes; without a name one case, named as
    the function is.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        group = function.__module__.rpartition(".")[2]
        for name in names or (function.__name__,):
            run = (lambda folder, name=name: function(folder, name)) if names else function
            assert (group, name) not in CASES, f"two golden cases {group}/{name}"
            CASES[group, name] = Case(group, name, run)
        return function

    return enter


def all_cases() -> list[Case]:
    for group in GROUPS:
        importlib.import_module(f"golden.{group}")
    return list(CASES.values())
