# pyright: strict
"""Check, a test that the doctor makes, and its Finding; `examine` runs them; their page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from easypipe.core.errors import EasypipeError
from easypipe.core.pages import Section, page_of


class Failed(Exception):
    """Reports that a check failed.

    The message names an example.
    """


class Skipped(Exception):
    """Reports that a check cannot be made here; the message says why."""


@dataclass(frozen=True)
class Check:
    """A check of the doctor.

    `try_out` returns what was checked, or raises Failed, Skipped, or any other error.
    """

    name: str
    try_out: Callable[[], str]


@dataclass(frozen=True)
class Finding:
    name: str
    state: Literal["ok", "FAILED", "skipped"]
    says: str
    seconds: float


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yields the finding of each check in turn; an error in a check is its finding.

    An unusable config or dataset is reported once; the other checks that need it are skipped.
    """
    told: dict[str, str] = {}
    for check in checks:
        began = time.monotonic()
        state: Literal["ok", "FAILED", "skipped"] = "FAILED"
        try:
            says = check.try_out()
            state = "ok"
        except Skipped as why:
            state, says = "skipped", str(why)
        except Failed as wrong:
            says = str(wrong)
        except EasypipeError as wrong:
            says = str(wrong)
            if first := told.get(says):
                state, says = "skipped", f"for what {first!r} says"
            told.setdefault(str(wrong), check.name)
        except Exception as error:  # noqa: BLE001  (what breaks here would break a run)
            says = f"{type(error).__name__}: {error}"
        yield Finding(check.name, state, says, time.monotonic() - began)


def page(costs: Sequence[str], findings: Sequence[Finding]) -> str:
    """Returns a page of HTML: failed checks come first, then skipped ones."""
    head = ("check", "seconds", "what it found")
    parts = [Section("What was tried", notes=costs)]
    for state, heading in (("FAILED", "Failed"), ("skipped", "Skipped"), ("ok", "All is well")):
        lines = [
            (one.name, round(one.seconds, 1), one.says) for one in findings if one.state == state
        ]
        parts.append(Section(f"{heading}: {len(lines)}", head, lines))
    return page_of("easypipe doctor", parts)
