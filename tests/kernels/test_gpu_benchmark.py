"""benchmarks/gpu_loss.py runs end to end without a GPU, so that it works the first time there is
one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import forked

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_loss.py"


def test_the_gpu_benchmark_runs_without_a_gpu(tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--small",
        "--shape",
        "16",
        "8",
        "40",
        "--rounds",
        "1",
        "--only",
        "easypipe,tokamax",
    ]
    done = forked.run([*command, "--out", str(tmp_path)], env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu_loss_cpu.json").read_text())["results"]
    assert max(found["easypipe"][0]["errors"]) < 0.02
    assert len(found["easypipe"][0]["both_s"]) == 1
    assert "not installed" in str(found["tokamax"]) or found["tokamax"][0]["loss"] > 0
    assert "| easypipe |" in (tmp_path / "gpu_loss_cpu.md").read_text()
