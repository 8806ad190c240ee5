"""`easypipe doctor`: tries the laws on this machine, or on a config and the first of its data."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easypipe.cli.arguments import AsJson, Overrides, complete_config
from easypipe.cli.show import say
from easypipe.core.errors import require

if TYPE_CHECKING:
    from easypipe.doctor.check import Check

STYLES = {"ok": "green", "FAILED": "red", "skipped": "dim"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.YAML]",
            help="A run config, or a pipeline config.",
            autocompletion=complete_config,
            show_default=False,
        ),
    ] = None,
    machine: Annotated[
        bool,
        typer.Option("--machine", help="Installation, devices, file system, clock and limits."),
    ] = False,
    folder: Annotated[
        Path,
        typer.Option(help="On whose file system --machine looks: that of a cache, or of runs."),
    ] = Path("."),
    rows: Annotated[int, typer.Option(min=1, help="Rows of each dataset that are tried.")] = 200,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Try the laws on your machine and on your data. Says what does not hold, with the smallest
    example; exit code 1 if anything does not. What is written goes away with it.
    """
    require(
        machine or config is not None,
        "doctor",
        "there is nothing to look at",
        "Give CONFIG.YAML, or --machine.",
    )
    failed, log = False, logging.getLogger("easypipe")
    if log.level > logging.DEBUG:
        log.setLevel(logging.WARNING)  # what is usual is no finding
    if machine:
        from easypipe.doctor.machine import machine_checks

        require(folder.is_dir(), str(folder), "is no folder", "Give one that is there.")
        with tempfile.TemporaryDirectory(prefix=".easypipe-doctor-", dir=folder) as inside:
            say(f"this machine, and the file system of {folder.absolute()}: about 10 s")
            failed |= _shown(machine_checks(Path(inside).absolute()), as_json)
    if config is not None:
        with tempfile.TemporaryDirectory(prefix="easypipe-doctor-") as inside:
            failed |= _shown(_of_config(config, overrides or [], Path(inside), rows), as_json)
    if failed:
        raise typer.Exit(1)


def _of_config(config: Path, overrides: list[str], inside: Path, rows: int) -> list[Check]:
    from easypipe.cli.configs import described
    from easypipe.doctor.data import Sample, data_checks

    found = described(config, overrides)
    sample = Sample(found.data, inside, rows)
    trains = ", and a small model like the run's, trained a step: a minute" if found.within else ""
    say(f"{config}: the first {rows:,} rows of each dataset, prepared three times{trains}")
    checks = list(data_checks(sample))
    if found.within:
        from easypipe.doctor.model import model_checks  # jax, only where there is a model
        from easypipe.run import RunConfig

        checks += model_checks(RunConfig.load(config, overrides), sample, inside / "runs")
    return checks


def _shown(checks: Iterable[Check], as_json: bool) -> bool:
    """Whether a check failed. Each is shown when it is done."""
    from easypipe.doctor.check import examine

    failed = False
    for one in examine(checks):
        failed |= one.state == "FAILED"
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(one)))
        else:
            line = f"{one.state:<8}{one.name:<37}{one.seconds:6.1f} s  {one.says}"
            say(line, style=STYLES[one.state])
    return failed
