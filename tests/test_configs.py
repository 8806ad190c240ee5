"""The example configurations load, and quickstart.yaml is the one that the quickstart writes."""

from __future__ import annotations

from pathlib import Path

import pytest

import easypipe
from easypipe.compat.classify import ClassifyConfig
from easypipe.core.config import from_dict, load_yaml
from easypipe.run import RunConfig

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_example_loads(path: Path) -> None:
    values = load_yaml(path)
    if "task" in values:
        assert from_dict(ClassifyConfig, values, at=path.name).data.data_files
        return
    run = from_dict(RunConfig, values, at=path.name)
    assert run.data.datasets
    assert run.data.validate() == []
    assert run.data.mix is None or run.data.mix.unit == "tokens", (
        "weights of documents surprise where their lengths differ"
    )


def test_there_is_one_for_each_kind_of_run() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} >= {
        "quickstart",
        "pretrain",
        "sft",
        "sft_lora",
        "dpo",
        "classify",
    }


def test_fine_tuning_with_adapters_has_the_same_data() -> None:
    """Whoever changes one of the two changes the other; tests/train/test_sft.py trains both."""
    full, lora = (load_yaml(CONFIGS / name) for name in ("sft.yaml", "sft_lora.yaml"))
    assert full["data"]["load"].pop("accumulation_steps") == 2  # all weights need more memory
    assert (full["data"], full["eval"], full["model"]) == (
        lora["data"],
        lora["eval"],
        lora["model"],
    )
    assert set(lora["train"]) - set(full["train"]) == {"lora"}


def test_quickstart_is_the_one_that_the_command_writes() -> None:
    written = Path(easypipe.__file__).parent / "cli" / "templates" / "quickstart.yaml"
    assert (CONFIGS / "quickstart.yaml").read_bytes() == written.read_bytes(), (
        f"copy {written} to configs/"
    )
