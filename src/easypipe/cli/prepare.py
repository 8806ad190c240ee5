"""`easypipe prepare`: tokenize, mix, pack and save what a config describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.show import console, progress, show_report
from easypipe.core.config import apply_overrides, from_dict, load_yaml
from easypipe.core.errors import ConfigError
from easypipe.pipeline import PipelineConfig, prepare_data

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Set a value of the config; may be repeated.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.YAML", help="A run config (data, model, train, eval), or a pipeline config.")]


def prepare(config: ConfigFile, overrides: Overrides = None) -> None:
    """Tokenize, mix, pack and save what CONFIG.YAML describes. What was prepared before is not done again."""
    values = apply_overrides(load_yaml(config), overrides or [])
    data, held_out = data_of(values)
    with progress() as listener:
        prepared = prepare_data(data, held_out, progress=listener)
    show_report(prepared.report)
    console.print("prepared; train with: easypipe train " + str(config), highlight=False)


def data_of(values: dict) -> tuple[PipelineConfig, dict[str, PipelineConfig]]:
    """The data of a run config, or a pipeline config on its own. The model is not looked at: no jax is needed to prepare data."""
    if "data" not in values:
        return from_dict(PipelineConfig, values), {}
    known = ("data", "model", "train", "eval")
    for key in values:
        if key not in known:
            raise ConfigError(at=key, problem="unknown key", have=known)
    held_out = values.get("eval") or {}
    if not isinstance(held_out, dict):
        raise ConfigError(at="eval", problem=f"expected names with a pipeline config each, got {held_out!r}")
    return (
        from_dict(PipelineConfig, values["data"], "data"),
        {str(name): from_dict(PipelineConfig, entry, f"eval.{name}") for name, entry in held_out.items()},
    )
