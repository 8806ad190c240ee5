"""What runs on an NVIDIA GPU, on one: a run gives what it gives on the CPU, and goes on exactly.

    JAX_PLATFORMS=cuda,cpu pytest --noconftest tests/test_cuda.py

The kernels' own tests run there too, compiled instead of interpreted, with float32 products that
are not rounded to TF32 (Triton's compiler takes a minute for the widest heads of these):

    JAX_PLATFORMS=cuda JAX_DEFAULT_MATMUL_PRECISION=highest pytest --noconftest \
        tests/kernels/test_pallas_gpu.py tests/train/test_attention.py -k "not splash and not eight"
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from easypipe.core.config import from_dict
from easypipe.run import RunConfig, train
from easypipe.train.metrics.log import read_metrics
from token_support import small_tokenizer_folder

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")

VOCAB, TOP, STEPS = 500, 4, 12
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"model": {"dtype": "float32"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "strict": {"train": {"loss": {"rule": "strict", "z_loss": 1e-3, "label_smoothing": 0.1}}},
    "distill": {"train": {"distill": {"weight": 0.5}}},
}


def config(folder: Path, tokenizer: str, way: str, kind: str, steps: int) -> RunConfig:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 200, 300)
    rows = []
    for length in lengths:
        ids = (rng.integers(3, VOCAB) + np.arange(length) * rng.integers(1, 5)) % (VOCAB - 3) + 3
        near = (ids[:, None] + np.arange(TOP)) % VOCAB
        rows.append(
            {
                "input_ids": ids.tolist(),
                "teacher_ids": near.tolist(),
                "teacher_log_probs": np.full((length, TOP), np.log(0.2)).tolist(),
            }
        )
    dataset: dict[str, Any] = {"data_files": rows, "tokenizer": tokenizer}
    if kind == "distill":
        dataset["aligned_columns"] = {"teacher_ids": TOP, "teacher_log_probs": TOP}
    else:
        rows[:] = [{"input_ids": row["input_ids"]} for row in rows]
    made: dict[str, Any] = {
        "data": {
            "datasets": [dataset],
            "cache_dir": str(folder / "cache"),
            "pack": {"seq_length": 256, "strategy": "first_fit"},
            "load": {"batch_size": 8},
            "seed": 1,
        },
        "model": MODEL | {"vocab_size": VOCAB} | KINDS[kind].get("model", {}),
        "train": {
            "output_dir": str(folder / way),
            "steps": steps,
            "optimizer": {"learning_rate": 3e-3, "schedule": "constant"},
            "checkpoint": {"every": STEPS // 2},
            "resume_changes": ["train.steps"],
        }
        | KINDS[kind].get("train", {}),
    }
    return from_dict(RunConfig, made)


def losses(folder: Path, way: str, kind: str) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / kind / way / "metrics.jsonl")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The runs of all kinds on the CPU and on the GPU, side by side."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("cpu", "cuda")}
    path = os.pathsep.join(sys.path)
    running = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": name},
        )
        for name, folder in made.items()
    ]
    assert [process.wait() for process in running] == [0, 0]
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_gives_what_it_gives_on_the_cpu(kind: str, folders: dict[str, Path]) -> None:
    """Losses of every step; products of float32 are TF32 on a GPU."""
    gpu, cpu = (losses(folders[name], "whole", kind) for name in ("cuda", "cpu"))
    assert len(gpu) == STEPS
    np.testing.assert_allclose(gpu, cpu, rtol=1e-2 if kind == "bfloat16" else 2e-3)
    assert gpu[-1] < gpu[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stops_goes_on_as_if_it_had_not(kind: str, folders: dict[str, Path]) -> None:
    """What GPUs add up in no order makes up for the last digits."""
    whole, halves = (losses(folders["cuda"], way, kind) for way in ("whole", "halves"))
    np.testing.assert_allclose(halves, whole, rtol=1e-3 if kind == "bfloat16" else 1e-6)


if __name__ == "__main__":
    tokenizer = str(small_tokenizer_folder())
    for kind in KINDS:
        place = Path(sys.argv[1]) / kind
        for way, ends in {"whole": [STEPS], "halves": [STEPS // 2, STEPS]}.items():
            for steps in ends:
                train(config(place, tokenizer, way, kind, steps))
        for way in ("whole", "halves"):
            print(
                Path(sys.argv[1]).name, kind, way, losses(Path(sys.argv[1]), way, kind), flush=True
            )
