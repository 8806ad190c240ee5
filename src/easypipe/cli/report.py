"""`easypipe report`: a run's folder as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.show import say


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The output folder of a run, finished or not.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Where to write it; else report.html in the folder."),
    ] = None,
) -> None:
    """Write one page of HTML about a run. It has curves, evaluations, roll-backs, mixture, ledger,
    versions and configuration, and needs no network.
    """
    from easypipe.train.metrics.report import write_report

    say(f"report: {write_report(run, out).absolute()}")
