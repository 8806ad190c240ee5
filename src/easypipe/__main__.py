"""`python -m easypipe`: the command line, for when the command itself is not on the path."""

import sys

from easypipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
