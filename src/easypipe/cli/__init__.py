"""The entry point of the command line: `easypipe = easypipe.cli:main`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    0: done. 1: a failure of easypipe or the machine. 2: something for the user to correct. 128 + n:
    stopped by signal n.
    """
    # Imports and traced programs make many long-lived objects: less frequent garbage collection
    # saves a tenth of the processor time of a short run, with no more memory.
    gc.set_threshold(20_000, 10, 100)
    try:
        from easypipe.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:  # during the imports, which take time when cold
        print("easypipe: stopped; run the same command again to go on", file=sys.stderr)
        return 130
