"""`easypipe prepare`: tokenizes, packs and saves a config's data, whole or one part of many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from easypipe.cli.arguments import ConfigFile, Overrides
from easypipe.cli.show import progress, say, show_report
from easypipe.core.errors import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from easypipe.pipeline import Pipeline
    from easypipe.stages.config import PipelineConfig

Part = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Only tokenize part I (counted from 0) of N, for array jobs that share a cache "
        "folder.",
    ),
]
Finalize = Annotated[
    bool,
    typer.Option("--finalize", help="Combine the parts of --shard; an error if one is missing."),
]


def prepare(
    config: ConfigFile, overrides: Overrides = None, shard: Part = None, finalize: Finalize = False
) -> None:
    """Tokenize, mix, pack and save the data of CONFIG.YAML. Data in the cache is not tokenized
    again.
    """
    from easypipe.cli.configs import data_of
    from easypipe.jobs import file_values, placed, prepare_data

    values = file_values(config, overrides or [])
    data, held_out = data_of(values)
    with placed("data" if "data" in values else ""):
        if shard is not None:
            _prepare_part(data, held_out, shard, finalize)
            return
        if finalize:
            _refuse_what_is_missing(data, held_out)
        with progress() as listener:
            prepared = prepare_data(data, held_out, progress=listener)
    show_report(prepared.report)
    done = (
        "nothing to prepare: streaming tokenizes while it reads, and keeps no tokens"
        if data.streaming
        else "prepared"
    )
    if lost := _not_kept((prepared.data, *prepared.held_out.values())):
        done += f", and not kept for the next process: the tokens of {', '.join(lost)}"
    # Otherwise there is no model to train.
    then = f"; train with: easypipe train {config}" if "data" in values else ""
    say(done + then)


def _not_kept(pipelines: Sequence[Pipeline]) -> list[str]:
    """Returns the datasets whose tokens are removed when this process ends, and are not saved."""
    from easypipe.stages.config import settings_of
    from easypipe.stages.tokenize.documents import cached_of

    return [
        name
        for one in pipelines
        if (settings := settings_of(one.get_context())).save is None and not settings.streaming
        for name, source in one.tokenized().items()
        if (cached := cached_of(source)) is not None and cached.writer.folder.temporary
    ]


def _prepare_part(
    data: PipelineConfig, held_out: dict[str, PipelineConfig], shard: str, finalize: bool
) -> None:
    """Tokenizes one part of the data."""
    from easypipe.jobs import chains

    number, count = _part(shard)
    require(not finalize, "--finalize", "together with --shard", "Run it once, after all parts.")
    with progress() as listener:
        pipeline, others = chains(data, held_out, progress=listener, save=False)
        rows = sum(each.prepare_part(number, count) for each in (pipeline, *others.values()))
    say(
        f"part {number} of {count}: {rows:,} rows tokenized. After all parts: easypipe prepare "
        "CONFIG --finalize",
    )


def _refuse_what_is_missing(data: PipelineConfig, held_out: dict[str, PipelineConfig]) -> None:
    """Checks that all parts are tokenized.

    Raises:
        ConfigError: Some parts are missing.
    """
    from easypipe.jobs import chains

    pipeline, others = chains(data, held_out, save=False)
    for each in (pipeline, *others.values()):
        for dataset, (missing, total) in each.pending().items():
            require(
                not missing,
                "--finalize",
                f"{missing} of {total} ranges of dataset {dataset!r} are not tokenized",
                "Run the parts that are missing (--shard I/N), or leave out --finalize to "
                "tokenize them here.",
            )


def _part(shard: str) -> tuple[int, int]:
    """Returns (I, N) of --shard I/N.

    Raises:
        ConfigError: It is not of this form.
    """
    number, slash, count = shard.partition("/")
    require(
        slash and number.isdecimal() and count.isdecimal() and int(number) < int(count),
        "--shard",
        f"{shard!r} is not a part",
        "Write I/N with I from 0 to N - 1, like 0/8.",
    )
    return int(number), int(count)
