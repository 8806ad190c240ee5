"""Progress lines from progress events: rates and remaining times, on a terminal or in the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from typing import IO, TYPE_CHECKING

from easypipe.core.visible import visible

if TYPE_CHECKING:
    from easypipe.core.protocols import ProgressEvent

log = logging.getLogger("easypipe")

# the rate covers this many seconds, so that ranges that were already done do not count for long
WINDOW_S = 20.0
LINE_S = 0.2
LOG_S = 30.0


class Pace:
    """The rate and remaining time of each stage and dataset, from its events. It is thread safe.

    Args:
        events: The rate covers at least this many events, so that a single slow one (a training
            step with an evaluation) does not dominate it.
    """

    def __init__(self, events: int = 2) -> None:
        self._events = events
        self._seen: dict[tuple[str, str], deque[tuple[float, int, int]]] = {}
        self._lock = threading.Lock()

    def text(self, event: ProgressEvent, now: float | None = None) -> str:
        """Returns `12,345 rows/s, 101.2 MB/s, 0:35 to go`; "" before a second event.

        MB are 10^6 bytes of what is read or written, uncompressed.

        Args:
            event: The newest event of its stage and dataset.
            now: Seconds on any clock that only goes forward; None takes time.monotonic().
        """
        now = time.monotonic() if now is None else now
        with self._lock:
            seen = self._seen.setdefault((event.stage, event.dataset), deque())
            seen.append((now, event.done, event.num_bytes))
            while len(seen) > self._events and now - seen[1][0] >= WINDOW_S:
                seen.popleft()
            first = seen[0]
        seconds, rows, num_bytes = now - first[0], event.done - first[1], event.num_bytes - first[2]
        if seconds < 0.001 or rows <= 0:  # two events at the same time
            return ""
        rate = rows / seconds
        parts = [f"{rate:,.0f} {event.unit}/s" if rate >= 10 else f"{rate:.2g} {event.unit}/s"]
        if num_bytes > 0:
            parts.append(f"{num_bytes / seconds / 1e6:,.1f} MB/s")
        if event.total is not None and event.done < event.total:
            parts.append(f"{clock((event.total - event.done) * seconds / rows)} to go")
        return ", ".join(parts)


class ProgressLine:
    """A listener that keeps one line on a terminal up to date.

    Without a terminal it logs a line every half minute.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        """Writes to `stream`; None takes sys.stderr."""
        self._stream = stream or sys.stderr
        self._pace = Pace()
        self._said: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def __call__(self, event: ProgressEvent) -> None:
        """Writes or logs the progress of a stage and dataset, if a line is due."""
        now, live = time.monotonic(), self._stream.isatty()
        pace, key = self._pace.text(event, now), (event.stage, event.dataset)
        ended = event.total is not None and event.done >= event.total
        with self._lock:
            last = self._said.get(key, -float("inf") if live else now)
            self._said.setdefault(key, last)
            if last == float("inf") or (not ended and now - last < (LINE_S if live else LOG_S)):
                return
            self._said[key] = float("inf") if ended else now
            of = "" if event.total is None else f" of {event.total:,}"
            line = f"{event.stage} {event.dataset}: {event.done:,}{of} {event.unit}" + (
                f", {pace}" if pace else ""
            )
            line = visible(line)
            if live:
                self._stream.write(f"\r\x1b[2K{line}" + ("\n" if ended else ""))
                self._stream.flush()
            else:
                log.info("%s", line)


def clock(seconds: float) -> str:
    """Returns a duration as `0:35`, `12:05` or `3:02:11`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
