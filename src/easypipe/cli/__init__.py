"""The entry point of the command line: `easypipe = easypipe.cli:main`."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    The code is 0 for success, 1 for a failure of easypipe or the machine, 2 for something that the
    user must correct, and 128 + n after signal n.
    """
    # Imports and traced programs make many long-lived objects: less frequent garbage collection
    # saves a tenth of the processor time of a short run, with no more memory.
    gc.set_threshold(20_000, 10, 100)
    with _stopping() as stopped:
        try:
            from easypipe.cli.app import run

            code = run(arguments)
        except KeyboardInterrupt:  # during the imports, which take time when cold
            print("easypipe: stopped; run the same command again to continue", file=sys.stderr)
            code = 130
        return 128 + stopped[0] if stopped and code == 130 else code


@contextmanager
def _stopping() -> Generator[list[int], None, None]:
    """Lets the first SIGTERM stop the block as Ctrl-C does; yields a list for its number."""
    came: list[int] = []

    def stop(signum: int, *_: object) -> None:
        came.append(signum)
        signal.signal(signum, signal.SIG_DFL)  # a second one ends the process
        raise KeyboardInterrupt

    mine = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if mine:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield came
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
