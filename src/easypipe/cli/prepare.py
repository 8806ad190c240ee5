"""`easypipe prepare`: tokenize, mix, pack and save what a config describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.show import progress, say, show_report
from easypipe.core.config import apply_overrides, from_dict, load_yaml
from easypipe.core.errors import ConfigError, did_you_mean, require
from easypipe.jobs import chains, prepare_data, with_hold_outs, with_tokenizer_of
from easypipe.stages.config import PipelineConfig
from easypipe.train.model.pretrained.config import PretrainedConfig

TASK = "task"  # the key by which a run on images is told from one on text

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY.PATH=VALUE", help="Set a value of the config; may be repeated."
    ),
]
ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG.YAML", help="A run config (data, model, train, eval), or a pipeline config."
    ),
]


Part = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Only tokenize part I (from 0) of N, for array jobs that share the cache folder.",
    ),
]
Finalize = Annotated[
    bool,
    typer.Option(
        "--finalize", help="Finish what the parts prepared; refuse where some of it is missing."
    ),
]


def prepare(
    config: ConfigFile, overrides: Overrides = None, shard: Part = None, finalize: Finalize = False
) -> None:
    """Tokenize, mix, pack and save what CONFIG.YAML describes. What was prepared before is not done
    again.
    """
    values = apply_overrides(load_yaml(config), overrides or [])
    data, held_out = data_of(values)
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
    # else there is no model to train
    then = f"; train with: easypipe train {config}" if "data" in values else ""
    say(done + then)


def of_images(config: Path, overrides: list[str]) -> bool:
    """Whether it is a config of ClassifyConfig, and not one of text."""
    return TASK in apply_overrides(load_yaml(config), overrides)


def data_of(values: dict) -> tuple[PipelineConfig, dict[str, PipelineConfig]]:
    """The data of a run config, or a pipeline config on its own. The model is not looked at: no jax
    is needed to prepare data.
    """
    require(
        TASK not in values,
        TASK,
        "a run on images, of which this command knows nothing",
        "For such runs there are `easypipe train` and `easypipe plan`.",
    )
    if "data" not in values:
        return from_dict(PipelineConfig, values), {}
    values = with_hold_outs(values)
    known = ("data", "model", "train", "eval")
    for key in values:
        require(key in known, key, "unknown key", did_you_mean(str(key), known), have=known)
    held_out = {} if values.get("eval") is None else values["eval"]
    if not isinstance(held_out, dict):
        raise ConfigError(
            at="eval", problem=f"expected names with a pipeline config each, got {held_out!r}"
        )
    data, model = from_dict(PipelineConfig, values["data"], "data"), values.get("model")
    if isinstance(model, dict) and "pretrained" in model:
        data = with_tokenizer_of(data, from_dict(PretrainedConfig, model, "model"))
    return (
        data,
        {
            str(name): from_dict(PipelineConfig, entry, f"eval.{name}")
            for name, entry in held_out.items()
        },
    )


def _prepare_part(
    data: PipelineConfig, held_out: dict[str, PipelineConfig], shard: str, finalize: bool
) -> None:
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
    number, slash, count = shard.partition("/")
    require(
        slash and number.isdecimal() and count.isdecimal() and int(number) < int(count),
        "--shard",
        f"{shard!r} is no part",
        "Write I/N with I from 0 to N - 1, like 0/8.",
    )
    return int(number), int(count)
