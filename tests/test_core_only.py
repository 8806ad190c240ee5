"""Without the extra `[train]` data is prepared, loaded and saved, and training is refused by name.

`nox -s core_only` runs this where the packages of the extra are not installed; elsewhere they are
hidden.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN = """
import sys
from easypipe.core.errors import TRAIN_EXTRA
sys.modules |= dict.fromkeys(TRAIN_EXTRA)  # to import one raises ModuleNotFoundError
"""
REFUSED = "pip install 'easypipe[train]'"
HEAVY = {"jax", "flax", "optax", "orbax", "torch", "grain", "matplotlib"}


def python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDDEN + code, *arguments],
        cwd=folder,
        env=os.environ | {"EASYPIPE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def easypipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("from easypipe.cli import main; sys.exit(main(sys.argv[1:]))", folder, *arguments)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, texts and the config of a run."""
    folder = tmp_path_factory.mktemp("core")
    text = "a few words to learn from, and to pack"
    done = python(f"from easypipe import train_bpe; train_bpe([{text!r}], 300, [], 'bpe')", folder)
    assert done.returncode == 0, done.stderr
    lines = [json.dumps({"text": text}) for _ in range(200)]
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = {
        "data": {
            "datasets": [{"name": "text", "data_files": "data.jsonl"}],
            "default_tokenizer": "bpe",
            "seed": 1,
            "pack": {"seq_length": 32},
            "save": {"output_dir": "saved"},
            "load": {"batch_size": 2},
        },
        "model": {"hidden_size": 36, "num_layers": 1},
        "train": {"output_dir": "run", "steps": 2},
    }
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    (folder / "data.yaml").write_text(json.dumps(config["data"]), encoding="utf-8")
    return folder


def test_data_is_prepared_loaded_and_saved(project: Path) -> None:
    code = f"""
import numpy as np
from easypipe import Pipeline, PipelineConfig
from easypipe.core.config import from_dict, load_yaml

config = from_dict(PipelineConfig, load_yaml("data.yaml"))
loader = Pipeline.from_config(config).source().tokenize().pack().save().load().build()
batches = list(loader)
assert len(batches) == len(loader) > 1
assert all(type(values) is np.ndarray for values in batches[0].values()), batches[0]
loaded = {{name for name in {HEAVY} if sys.modules.get(name)}}
assert not loaded, loaded
"""
    done = python(code, project)
    assert done.returncode == 0, done.stderr
    assert list((project / "saved").rglob("*.parquet"))


def test_commands_on_data_work_and_others_name_the_extra(project: Path) -> None:
    """The normal run tries two of them."""
    works = [
        ["prepare", "run.yaml", "--set", "data.save.output_dir=again"],
        ["plan", "run.yaml"],
        ["preview", "run.yaml"],
        ["masks", "chatml"],
        ["explain", "run.yaml", "--step", "0"],
        ["verify", "again"],
        ["discover", "data.jsonl"],
        ["cache", "list"],
        ["config", "train.steps"],
    ]
    refused = [["train", "run.yaml"], ["generate", "run", "a few"], ["export", "run", "out"]]
    every = "EASYPIPE_CORE_ONLY" in os.environ
    for command in works if every else works[:1]:
        done = easypipe(project, *command)
        assert done.returncode == 0, (command, done.stderr)
    for command in refused if every else refused[:1]:
        done = easypipe(project, *command)
        assert done.returncode == 2, (command, done.stderr)
        assert REFUSED in " ".join(done.stderr.split())
    assert not (project / "run").exists()


def test_quickstart_refuses_before_it_writes(tmp_path: Path) -> None:
    done = easypipe(tmp_path, "quickstart", "--output-dir", "project")
    assert done.returncode == 2, done.stderr
    assert REFUSED in " ".join(done.stderr.split())
    assert not (tmp_path / "project").exists()


def test_names_that_train_name_the_extra(project: Path) -> None:
    code = """
for code in (
    "from easypipe import Trainer",
    "from easypipe import RunConfig",
    "from easypipe.loader.placement import make_mesh; make_mesh({'data': -1})",
):
    try:
        exec(code)
    except ImportError as error:
        print(error)
"""
    done = python(code, project)
    assert done.stdout.count(REFUSED) == 3, done.stderr
