"""Rates, time to go, and the line that says them."""

from __future__ import annotations

import io
import logging

import pytest

from easypipe.core import progress
from easypipe.core.progress import Pace, ProgressLine, clock
from easypipe.core.protocols import ProgressEvent


def event(
    done: int, num_bytes: int = 0, total: int | None = 1000, dataset: str = "x"
) -> ProgressEvent:
    return ProgressEvent(
        stage="save", dataset=dataset, done=done, total=total, unit="rows", num_bytes=num_bytes
    )


def test_rate_and_time_to_go() -> None:
    pace = Pace()
    assert pace.text(event(0), 0.0) == ""
    assert pace.text(event(100, 5_000_000), 2.0) == "50 rows/s, 2.5 MB/s, 0:18 to go"
    assert pace.text(event(100, total=None, dataset="y"), 2.0) == "", "each dataset on its own"
    assert pace.text(event(1000, 50_000_000), 4.0) == "250 rows/s, 12.5 MB/s"


def test_what_was_found_finished_does_not_count_for_long() -> None:
    pace = Pace()
    for second, done in enumerate([0, 900, 910, 920, *(920 + i for i in range(1, 60))]):
        said = pace.text(event(done), float(second))
    assert said == "1 rows/s, 0:21 to go"


def test_one_event_that_took_long_does_not_stand_for_all() -> None:
    """A training step with an evaluation behind it."""
    pace = Pace(events=50)
    for done in range(50):
        pace.text(event(done), float(done))
    assert pace.text(event(50), 149.0) == "0.33 rows/s, 47:49 to go"


def test_times() -> None:
    assert [clock(s) for s in (0.4, 35, 725, 10931)] == ["0:00", "0:35", "12:05", "3:02:11"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.1, 1.0, 2.0, 3.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(ticks))
    listen = ProgressLine(stream := Terminal())
    for done in (0, 50, 100, 1000, 1000):
        listen(event(done))
    shown = stream.getvalue().split("\r\x1b[2K")
    assert shown == [
        "",
        "save x: 0 of 1,000 rows",
        "save x: 100 of 1,000 rows, 100 rows/s, 0:09 to go",
        "save x: 1,000 of 1,000 rows, 500 rows/s\n",
    ]


def test_log_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = iter([0.0, 15.0, 33.0, 36.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(ticks))
    listen = ProgressLine(io.StringIO())
    with caplog.at_level(logging.INFO, logger="easypipe"):
        for done in (0, 50, 330, 1000):
            listen(event(done))
    assert [record.getMessage() for record in caplog.records] == [
        "save x: 330 of 1,000 rows, 10 rows/s, 1:07 to go",
        "save x: 1,000 of 1,000 rows, 45 rows/s",
    ]
