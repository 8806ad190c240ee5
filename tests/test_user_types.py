"""What a type checker and an editor know of easypipe, in a script such as users write.

pyright fetches itself from the network when it is first used, so `nox -s tests` has none: there
this test is skipped, and `nox -s types`, which sets EASYPIPE_TYPES, fails where it cannot run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import easypipe

SCRIPT = """
from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, Pipeline, PipelineConfig, TokenizerConfig
from easypipe import OptimizerConfig, RunConfig, Trainer, TrainingConfig, discover, verify
from easypipe import Pipelin  # wrong: Pipelin
from easypipe.kernels import fused_linear_cross_entropy
from easypipe.kernels import fused_linear_crossentropy  # wrong: fused_linear_crossentropy
from easypipe.train import load_pretrained

datasets = [DatasetConfig(name="code", data_files="code/*.jsonl", additional_fields=["path"])]
config = PipelineConfig(datasets=datasets, default_tokenizer="tokenizer", seed=1, pack=PackStageConfig(seq_length=128))
PipelineConfig(datasets=datasets, sead=1)  # wrong: sead
PackStageConfig(seq_lenght=128)  # wrong: seq_lenght
PackStageConfig(seq_length="128")  # wrong: seq_length
TrainingConfig(output_dir="run", optimizer=OptimizerConfig(learning_rat=1e-3))  # wrong: learning_rat
TrainingConfig(output_dir="run", resume_changes=["loader.batch_size"])
TokenizerConfig(name_or_path="tokenizer", length_buckets=[128, 256])
Pipeline.from_config(config).source().tokenise()  # wrong: tokenise
Pipeline.from_config(config).source().tokenize().mix().pack().load(LoadStageConfig(batch_size=8)).build()
Pipeline.from_config(config).source().get_data()["code"].shemas  # wrong: shemas
fused_linear_cross_entropy(1, z_lose=1e-4)  # wrong: fused_linear_cross_entropy
reveal_type(Trainer)  # wrong: type[Trainer]
RunConfig.load("run.yaml")
discover("code")
verify("saved")
"""


def test_a_script_of_a_users(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyright") is None:
        assert "EASYPIPE_TYPES" not in os.environ, (
            "pyright is not installed: pip install easypipe[types]"
        )
        pytest.skip("pyright is not installed; `nox -s types` runs this test")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # On the interpreter's path, as an installed package is, so that py.typed decides what is
    # public.
    env = os.environ | {"PYTHONPATH": str(Path(easypipe.__file__).parents[1])}
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        script.name,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    said: dict[int, str] = {}
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        line = found["range"]["start"]["line"]
        said[line] = said.get(line, "") + found["message"]
    marked = {
        i: line.partition("# wrong: ")[2]
        for i, line in enumerate(SCRIPT.splitlines())
        if "# wrong: " in line
    }
    assert {i: said[i] for i in said.keys() - marked.keys()} == {}, "right lines are refused"
    assert {i: marked[i] for i in marked.keys() - said.keys()} == {}, "what is wrong is not found"
    silent = {word: said[i] for i, word in marked.items() if word not in said[i]}
    assert not silent
