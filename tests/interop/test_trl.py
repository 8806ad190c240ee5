"""TRL itself on the rows of tests/trl_oracle.py: it gives what the oracle says.

Runs where trl is installed: `nox -s trl` has it in an environment of its own.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

import trl_oracle
from chat_support import MARKED, REASONING
from easypipe.transforms.prompt.templates import CHATML
from trl_oracle import SHAPES, hf_tokenizer, rows

if os.environ.get("EASYPIPE_TRL") != "required":
    pytest.importorskip("trl", reason="needs trl: nox -s trl")

TEMPLATES = {"chatml": CHATML, "think": REASONING, "marked": MARKED}


def prepared(trainer: Any, config: Any, data: list[dict[str, Any]], tokenizer: Any) -> list[Any]:
    """The rows that a trainer of TRL makes, by the method that its constructor calls."""
    own = SimpleNamespace(
        _tokenizer=tokenizer, completion_only_loss=True, chat_template=None, calculate_KL=False
    )
    given = datasets.Dataset.from_list(data)
    further = (False, None) if trainer.__name__ == "SFTTrainer" else ()
    return list(trainer._prepare_dataset(own, given, tokenizer, config, *further, "rows"))


def options(tmp_path: Any, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path),
        "max_length": None,
        "report_to": "none",
        "bf16": False,
    } | more


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shape", [name for name in SHAPES if "prompts" not in name])
def test_trl_makes_what_the_oracle_says(shape: str, template: str, tmp_path: Any) -> None:
    import trl

    data, tokenizer = rows(shape), hf_tokenizer(TEMPLATES[template])
    if "tools" in data[0] and template != "chatml":
        pytest.skip("a template without tools")
    if "chosen" in data[0]:
        found = prepared(trl.DPOTrainer, trl.DPOConfig(**options(tmp_path)), data, tokenizer)
        for row, made in zip(data, found, strict=True):
            for name, (ids, mask) in zip(
                ("chosen", "rejected"), trl_oracle.dpo(row, tokenizer), strict=True
            ):
                assert [*made["prompt_ids"], *made[f"{name}_ids"]] == ids
                assert mask.count(0) == len(made["prompt_ids"])
        return
    if "label" in data[0]:
        found = prepared(trl.KTOTrainer, trl.KTOConfig(**options(tmp_path)), data, tokenizer)
        for row, made in zip(data, found, strict=True):
            ids, mask = trl_oracle.sft(row, tokenizer)
            assert [*made["prompt_ids"], *made["completion_ids"]] == ids
            assert mask.count(0) == len(made["prompt_ids"])
        return
    ways = (
        (False, True)
        if template != "think" and shape.split()[-1] in ("messages", "talk")
        else (False,)
    )
    for only in ways:
        config = trl.SFTConfig(**options(tmp_path, assistant_only_loss=only))
        found = prepared(trl.SFTTrainer, config, data, tokenizer)
        for row, made in zip(data, found, strict=True):
            ids, mask = trl_oracle.sft(row, tokenizer, assistant_only=only)
            assert made["input_ids"] == ids
            assert [int(label != -100) for label in made["labels"]] == mask
