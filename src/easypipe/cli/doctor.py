"""`easypipe doctor`: tests easypipe's guarantees on this machine or a config; says what it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import tempfile
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easypipe.cli.arguments import AsJson, Html, Overrides, complete_config
from easypipe.cli.show import say, write_page
from easypipe.core.errors import require

if TYPE_CHECKING:
    from easypipe.doctor.check import Check, Finding

STYLES = {"ok": "green", "FAILED": "red", "skipped": "dim"}

Config = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG.YAML]",
        help="A run config or a pipeline config.",
        autocompletion=complete_config,
        show_default=False,
    ),
]


def doctor(
    config: Config = None,
    machine: Annotated[
        bool,
        typer.Option(
            "--machine", help="Check the installation, devices, file system, clock and limits."
        ),
    ] = False,
    folder: Annotated[
        Path,
        typer.Option(
            help="A folder on the file system that --machine checks, such as that of the cache or "
            "of the runs."
        ),
    ] = Path("."),
    rows: Annotated[int, typer.Option(min=1, help="How many rows of each dataset to check.")] = 200,
    html: Html = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Check your machine and your data. It tests easypipe's guarantees (determinism, exact resume,
    conservation of tokens, isolation of documents) and shows an example of each failure; the exit
    code is 1 if there is one. Its temporary files are deleted.
    """
    require(
        machine or config is not None,
        "doctor",
        "there is nothing to check",
        "Give CONFIG.YAML, or --machine.",
    )
    log = logging.getLogger("easypipe")
    if log.level > logging.DEBUG:
        log.setLevel(logging.WARNING)  # usual messages are not findings
    costs: list[str] = []
    findings: list[Finding] = []
    with _warnings_once(log):
        if machine:
            from easypipe.doctor.machine import machine_checks

            require(folder.is_dir(), str(folder), "is not a folder", "Give a folder that exists.")
            with tempfile.TemporaryDirectory(prefix=".easypipe-doctor-", dir=folder) as inside:
                costs.append(
                    f"this machine, and the file system of {folder.absolute()}: about 10 s"
                )
                say(costs[-1])
                findings += _shown(machine_checks(Path(inside).absolute()), as_json)
        if config is not None:
            with tempfile.TemporaryDirectory(prefix="easypipe-doctor-") as inside:
                costs.append(_cost(config, overrides or [], rows))
                say(costs[-1])
                checks = _of_config(config, overrides or [], Path(inside), rows)
                findings += _shown(checks, as_json)
    if html is not None:
        from easypipe.doctor.check import page

        write_page(html, page(costs, findings))
    if any(one.state == "FAILED" for one in findings):
        raise typer.Exit(1)


@contextlib.contextmanager
def _warnings_once(log: logging.Logger) -> Generator[None, None, None]:
    """Prints each warning of the block once, although the data is prepared several times."""
    told: set[str] = set()

    def new(record: logging.LogRecord) -> bool:
        known = record.getMessage() in told
        told.add(record.getMessage())
        return not known

    log.addFilter(new)
    try:
        yield
    finally:
        log.removeFilter(new)


def _cost(config: Path, overrides: list[str], rows: int) -> str:
    """Returns what the checks of a config prepare and compile; it is printed before they begin."""
    from easypipe.cli.configs import described

    found = described(config, overrides)
    trains = (
        "; a small model like the run's is trained a step, and a step of the whole model is "
        "compiled, not run: a minute, and what compiling takes"
        if found.within
        else ""
    )
    return (
        f"{config}: the first {rows:,} rows of each of {len(found.data.datasets)} datasets, "
        f"prepared five times, also by other processes{trains}"
    )


def _of_config(config: Path, overrides: list[str], inside: Path, rows: int) -> list[Check]:
    """Returns the checks of a config."""
    from easypipe.cli.configs import described
    from easypipe.doctor.data import Sample, data_checks
    from easypipe.doctor.processes import process_checks

    found = described(config, overrides)
    sample = Sample(found.data, inside, rows)
    checks = [*data_checks(sample), *process_checks(sample)]
    if found.within:
        # This loads jax, only if there is a model.
        from easypipe.doctor.devices import device_checks
        from easypipe.doctor.model import model_checks
        from easypipe.run import RunConfig

        run = RunConfig.load(config, overrides)
        checks += [*model_checks(run, sample, inside / "runs"), *device_checks(run, sample)]
    return checks


def _shown(checks: Iterable[Check], as_json: bool) -> Iterator[Finding]:
    """Yields what each check finds, after printing it as soon as the check is done."""
    from easypipe.doctor.check import examine

    for one in examine(checks):
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(one)))
        else:
            line = f"{one.state:<8}{one.name:<37}{one.seconds:6.1f} s  {one.says}"
            say(line, style=STYLES[one.state])
        yield one
