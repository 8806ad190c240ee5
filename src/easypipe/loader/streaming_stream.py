"""One canonical stream: the windows that it stands in, made when a row of them is asked for, or one
ahead.
"""

from __future__ import annotations

from concurrent.futures import Future

from easypipe.loader.streaming_books import Books
from easypipe.loader.streaming_pool import ReadPool
from easypipe.loader.streaming_state import StreamState
from easypipe.loader.streaming_window import Window, Windows


class Stream:
    """The rows of one canonical stream, in order. `windows` are those that were made and not yet
    forgotten. Not thread safe.

    state, ended, books: behind the last of them, whatever was made ahead. version: how many there
    were.
    """

    def __init__(self, made: Windows, ahead: ReadPool | None = None) -> None:
        """ahead: makes the next window while rows of this one are taken; None makes each when it is
        asked for.
        """
        self._made, self._ahead = made, ahead
        self._next: Future[Window] | None = None
        self.state, self.ended, self.books, self.version = made.state, made.ended, Books(), 0
        self.windows: list[Window] = []

    def go_on(self) -> Window:
        """The next window, which may hold no row."""
        window = self._made.make() if self._ahead is None else self._wait().result()
        self._next = None
        if window.layout.num_rows:
            self.windows.append(window)
        self.state, self.books = window.after, window.books
        self.ended = self._made.at_end(window.after)
        self.version += 1
        self.begin()
        return window

    def begin(self) -> None:
        """Starts on the next window, where windows are made ahead."""
        if self._ahead is not None and not self.ended:
            self._wait()

    def state_at(self, row: int) -> StreamState:
        """The state from which `row` is found again; it must not be forgotten."""
        for window in self.windows:
            if row < window.stop:
                return window.before
        return self.state

    def forget(self, row: int) -> None:
        """Drops windows that hold nothing at `row` or behind it."""
        while self.windows and self.windows[0].stop <= row:
            self.windows.pop(0)

    def _wait(self) -> Future[Window]:
        assert self._ahead is not None
        if self._next is None:
            self._next = self._ahead.submit(lambda made: made.make(), self._made)
        return self._next
