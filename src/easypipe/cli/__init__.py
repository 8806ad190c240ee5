"""The command line. `easypipe = easypipe.cli:main`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0 done, 1 a failure of easypipe or the machine, 2
    something for the user to correct, 128 + n stopped by signal n.
    """
    # Imports and traced programs make many objects that live on: fewer searches for garbage among
    # them take a tenth off the processor time of a short run, and memory stays as it is.
    gc.set_threshold(20_000, 10, 100)
    try:
        from easypipe.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:  # before a command began: a cold import takes its time
        print("easypipe: stopped; run the same command again to go on", file=sys.stderr)
        return 130
