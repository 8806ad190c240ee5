"""`easypipe verify`: checks a token cache, saved folder or checkpoint; repairs the first two."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easypipe.cli.arguments import AsJson, Overrides, complete_config
from easypipe.cli.show import progress, say
from easypipe.core.errors import require

if TYPE_CHECKING:
    from easypipe.cache.verify import Verification
    from easypipe.core.remote import StorageOptions
    from easypipe.stages.config import PipelineConfig


def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A token cache or a manifest in it, a folder written by save(), or a run's "
            "output_dir.",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.YAML]",
            help="The config that made it. Default: --repair uses what is recorded in the cache "
            "folder.",
            autocompletion=complete_config,
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Rebuild the broken files, and only those, from their source."
        ),
    ] = False,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Check the files at PATH, and repair them with --repair. It checks counts, checksums, columns,
    manifest and tokenizer, and names each broken file; the exit code is 1 if there is one.
    """
    from easypipe.cli.configs import described
    from easypipe.save import verify as check

    require(
        not overrides or config is not None,
        "--set",
        "has no effect without a config",
        "Give CONFIG.YAML after PATH.",
    )
    run = None if config is None else described(config, overrides or [])
    data = None if run is None else run.data
    storage_options = None if data is None else _options_for(path, data)
    found = check.verify(path, storage_options)
    require(
        not repair or not any(one.kind == check.CHECKPOINT for one in found),
        "--repair",
        "checkpoints cannot be rebuilt from a source",
        "Train again: the run moves a damaged checkpoint aside, and continues from the one before.",
    )
    if repair and not all(one.ok for one in found):
        with contextlib.nullcontext() if run is None else run.placed():
            found = _repaired(path, found, data)
    if as_json:
        typer.echo(
            json.dumps([dataclasses.asdict(one) | {"ok": one.ok} for one in found], indent=1)
        )
    else:
        _show(found)
    if not all(one.ok for one in found):
        raise typer.Exit(1)


def _options_for(path: str, data: PipelineConfig) -> StorageOptions:
    """Returns the storage options of the config's save or cache, whichever `path` belongs to.

    Options that the config leaves out come from the environment.
    """
    from easypipe.cache.repair import place_of

    def within(folder: str | Path | None, outer: str | Path | None) -> bool:
        if folder is None or outer is None:
            return False
        return f"{place_of(folder)}/".startswith(f"{place_of(outer)}/")

    saves = [dataset.save_path for dataset in data.datasets] + [
        None if data.save is None else data.save.output_dir
    ]
    if (
        data.save is not None
        and not within(path, data.cache_dir)
        and any(within(folder, path) or within(path, folder) for folder in saves)
    ):
        return data.save.storage_options
    return None if data.cache is None else data.cache.storage_options


def _repaired(
    path: str, found: tuple[Verification, ...], data: PipelineConfig | None
) -> tuple[Verification, ...]:
    """Repairs what is broken, and returns the new findings."""
    from easypipe.jobs import chain, repair_as_made
    from easypipe.save import verify as check

    _show(found)
    if data is None:
        say("repairing what is broken, with the config that made it")
        with progress() as listener:
            return repair_as_made(path, progress=listener)
    storage_options = _options_for(path, data)
    cache = check.cache_folder_of(path, storage_options)
    if cache is not None:
        data = dataclasses.replace(data, cache_dir=str(cache[0].at()))
    say("repairing what is broken")
    with progress() as listener:
        pipeline = chain(data, progress=listener, save=cache is None)
        return pipeline.repair(path)


def _show(found: tuple[Verification, ...]) -> None:
    """Prints what was checked and found."""
    from easypipe.save.verify import CHECKPOINT

    for one in found:
        name = f" {one.dataset!r}" if one.dataset else ""
        state = "ok" if one.ok else f"{len(one.problems)} problems"
        size = f"{one.files:,} files, {one.num_bytes / 1e6:,.1f} MB"
        size += "" if one.kind == CHECKPOINT else f", {one.rows:,} rows, {one.tokens:,} tokens"
        say(
            f"{state}: {one.kind}{name}: {size} ({one.path})",
        )
        for problem in one.problems:
            say(f"  {problem}")
        for note in one.notes:
            say(f"  note: {note}")
