"""The example configurations load, and quickstart.yaml is the one that the quickstart writes."""

from __future__ import annotations

from pathlib import Path

import pytest

import easypipe
from easypipe.core.config import from_dict, load_yaml
from easypipe.run import RunConfig

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_example_loads(path: Path) -> None:
    run = from_dict(RunConfig, load_yaml(path), at=path.name)
    assert run.data.datasets
    assert run.data.validate() == []


def test_there_is_a_quickstart_a_pretraining_and_an_sft_example() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} >= {"quickstart", "pretrain", "sft"}


def test_quickstart_is_the_one_that_the_command_writes() -> None:
    written = Path(easypipe.__file__).parent / "cli" / "templates" / "quickstart.yaml"
    assert (CONFIGS / "quickstart.yaml").read_bytes() == written.read_bytes(), f"copy {written} to configs/"
