"""`easypipe plan`: prints what a run would do; its options set the steps and the devices."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easypipe.cli.arguments import AsJson, ConfigFile, Html, Overrides
from easypipe.cli.show import console, progress, require_one, say, write_page
from easypipe.core.errors import EasypipeError, require

if TYPE_CHECKING:
    from easypipe.cli.configs import Described
    from easypipe.compat.classify import ClassifyPlan
    from easypipe.core.pages import Section
    from easypipe.core.protocols import ProgressListener
    from easypipe.stages.reports.plan_report import PlanReport
    from easypipe.train.plan.aot import StepPlan

    Found = ClassifyPlan | PlanReport | StepPlan | str


def plan(
    config: ConfigFile,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps of the run. Default: train.steps, else as many as the data has."
        ),
    ] = None,
    html: Html = None,
    as_json: AsJson = False,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare/--no-prepare",
            help="Whether to tokenize data that is not in the cache; with --no-prepare, missing "
            "data is an error.",
        ),
    ] = True,
    topology: Annotated[
        str | None,
        typer.Option(
            help="Also compile the training step for these devices (v5p:4x4x4, v6e:16x16, h200:8), "
            "which this machine need not have, and show its memory and communication. With "
            "--no-prepare the data may be missing."
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show what a run of CONFIG.YAML would do. It shows steps, shares and epochs of datasets, how
    full rows are, dropped tokens and disk space, and with --topology whether the run fits the
    devices.
    """
    require_one(as_json, html)
    from easypipe.cli.configs import described, of_images

    if of_images(config, overrides or []):
        require(prepare, "--no-prepare", "images have no tokens to prepare", "Leave it out.")
        _show([_images_plan(config, overrides or [], steps, topology)], as_json, html)
        return
    run = described(config, overrides or [])
    if topology is None:
        _show([_data_plan(run, steps, prepare, as_json)], as_json, html)
        return
    compiled = _compiled(config, overrides or [], topology, as_json)
    if not as_json and html is None:
        say(f"{compiled}\n\ndata")
    try:
        data, missing = _data_plan(run, steps, prepare, as_json), None
    except EasypipeError as error:
        if prepare:
            raise
        data, missing = None, str(error)
    found = {"step": compiled.to_json(), "data": data and data.to_json(), "data_missing": missing}
    if html is not None:
        _show([compiled, data or f"not known: {missing}"], as_json, html)
    elif as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        say(str(data or f"  not known: {missing}"))


def _images_plan(
    config: Path, overrides: list[str], steps: int | None, topology: str | None
) -> ClassifyPlan:
    """Returns the plan of a run on images."""
    from easypipe.compat import classify

    require(
        topology is None,
        "--topology",
        "is for runs on text, and this one is on images",
        "Leave it out.",
    )
    return classify.plan(classify.ClassifyConfig.load(config, overrides), steps)


def _data_plan(run: Described, steps: int | None, prepare: bool, quiet: bool) -> PlanReport:
    """Returns the plan of the data of a run.

    Raises:
        ConfigError: The data streams, or never ends and no steps are given.
    """
    from easypipe.core.protocols import silent
    from easypipe.history import plan_of_run

    run.refuse_streaming(
        "streamed data is not counted before it is read, and a plan needs the counts",
        "to plan over the token cache",
    )

    def report(listener: ProgressListener) -> PlanReport:
        pipeline, given, never = run.loaded(progress=listener), steps or run.steps, run.data.endless
        require(
            given is not None or never is None,
            "steps",
            f"this data never ends ({run.within}{never})",
            "Say how many: --steps, or train.steps.",
        )
        return plan_of_run(run.output_dir, pipeline, given, prepare=prepare, progress=listener)

    with run.placed():
        if quiet:
            return report(silent)
        with progress() as listener:
            return report(listener)


def _compiled(config: Path, overrides: list[str], topology: str, quiet: bool) -> StepPlan:
    """Returns the plan of the training step, compiled for a topology."""
    # The devices are not present; compiling for them needs no accelerator of this machine.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from easypipe import run as runs  # loads jax, only if something is compiled

    run = runs.RunConfig.load(config, overrides)
    if quiet:
        return runs.plan_on(run, topology)
    with console().status(f"compiling for {topology}"):
        return runs.plan_on(run, topology)


def _show(found: Sequence[Found], as_json: bool, html: Path | None) -> None:
    """Prints plans as text or JSON, or writes them as a page."""
    [first, *_] = found
    if html is not None:
        from easypipe.core.pages import page_of

        write_page(html, page_of("easypipe plan", [one for part in found for one in _parts(part)]))
    elif as_json and not isinstance(first, str):
        typer.echo(json.dumps(first.to_json(), indent=1))
    else:
        say(str(first))


def _parts(found: Found) -> Sequence[Section]:
    """Returns the sections of a page for a plan."""
    from easypipe.core.pages import Section
    from easypipe.stages.reports.plan_page import plan_sections
    from easypipe.stages.reports.plan_report import PlanReport

    if isinstance(found, PlanReport):
        return plan_sections(found)
    heading = "The data" if isinstance(found, str) else "The run"
    return [Section(heading, text=str(found))]
