"""`easypipe report`: writes runs as one HTML page, or serves it while they train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.show import say
from easypipe.core.errors import ConfigError, EasypipeError, require


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="The output folder of a run, finished or not; several runs are compared on one "
            "page.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="The file to write. Default: report.html in the run's folder; "
            "comparison.html in the first run's folder for several runs.",
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve the page on 127.0.0.1 and keep it up to date."),
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port of --serve; 0: any free port.")
    ] = 0,
) -> None:
    """Write an HTML page about a run. The page shows curves, evaluations, rollbacks, mixture,
    ledger, versions and configuration, and needs no network.
    """
    if not serve:
        require(port == 0, "--port", "has no effect without --serve", "Leave it out.")
        from easypipe.train.report.page import write_report

        say(f"report: {write_report(runs, out).absolute()}")
        return
    require(out is None, "--out", "has no effect together with --serve", "Leave one of them out.")
    from easypipe.train.report.serve import HOST, server

    try:
        serving = server([Path(os.path.expanduser(run)) for run in runs], port)
    except OSError as error:
        if isinstance(error, EasypipeError):  # a file of the run cannot be read
            raise
        raise ConfigError(
            at="--port", problem=f"{port} cannot be served: {error}", fix="Give another one, or 0."
        ) from None
    with serving:
        say(f"report: http://{HOST}:{serving.server_address[1]}/ (Ctrl-C ends it)")
        serving.serve_forever()
