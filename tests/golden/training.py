"""Losses of short runs, within 1e-5 of their size, and a run that was kept by the commit which kept
these digests.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from easypipe import PipelineConfig
from easypipe.run import RunConfig, train
from easypipe.train.config import (
    CheckpointConfig,
    LoraConfig,
    OptimizerConfig,
    PreferenceConfig,
    TrainingConfig,
)
from easypipe.train.model.decoder import ModelConfig
from golden.batches import CACHED, load
from golden.cases import golden, is_to_be_kept

RUN = Path(__file__).parent / "saved" / "run.zip"
MODEL = ModelConfig(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1)
STEPS, KEPT_STEPS = 6, 3
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)

DATA: dict[str, Callable[[Path], PipelineConfig]] = {
    "pretrain": CACHED["first_fit"],
    "sft_lora": CACHED["chat_whole"],
    "preferences": lambda d: dataclasses.replace(
        CACHED["preferences"](d), load=load(num_epochs=None)
    ),
}
MORE: dict[str, dict[str, Any]] = {
    "sft_lora": {"lora": LoraConfig(rank=4)},
    "preferences": {"preference": PreferenceConfig()},
}


@golden(*DATA)
def losses(folder: Path, name: str) -> Any:
    run = _run(DATA[name](folder), folder / "run", **MORE.get(name, {}))
    train(run)
    return [_logged(line) for line in _metrics(folder / "run")]


@golden("a_kept_run_goes_on")
def kept_run(folder: Path, _: str) -> Any:
    """Model, optimizer and loader state of a run that was stopped after three steps then, continued
    now.
    """
    if is_to_be_kept(RUN):
        run = _run(DATA["pretrain"](folder), folder / "first", steps=KEPT_STEPS)
        train(run)
        for picture in (folder / "first").rglob("*.png"):
            picture.unlink()
        shutil.make_archive(str(RUN.with_suffix("")), "zip", folder / "first")
    shutil.unpack_archive(RUN, folder / "run")
    train(_run(DATA["pretrain"](folder), folder / "run", resume_changes=["ended", "train.steps"]))
    lines = [_logged(line) for line in _metrics(folder / "run")]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), (
        "the kept run did not go on where it stood"
    )
    return lines


def _run(data: PipelineConfig, output_dir: Path, **options: Any) -> RunConfig:
    fixed: dict[str, Any] = {
        "steps": STEPS,
        "optimizer": OPTIMIZER,
        "checkpoint": CheckpointConfig(every=KEPT_STEPS, keep=1),
        "seed": 5,
    }
    return RunConfig(
        data=data, model=MODEL, train=TrainingConfig(output_dir=output_dir, **(fixed | options))
    )


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def _logged(line: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock."""
    return {
        name: line[name]
        for name in ("step", "loss", "tokens", "targets", "learning_rate", "gradient_norm")
        if name in line
    }
