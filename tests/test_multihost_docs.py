"""What docs/multihost.md and launch/ give to copy: manifests that parse, and command lines that our
command line takes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from easypipe.cli.app import app
from easypipe.core.config import apply_overrides, from_dict
from easypipe.train.config import TrainingConfig
from easypipe.train.parallel.distributed import VARIABLES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "multihost.md").read_text(encoding="utf-8")
SLURM, JOBSET = ((ROOT / "launch" / name).read_text() for name in ("slurm.sh", "jobset.yaml"))
SCRIPTS = [*re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL), SLURM]
MANIFEST = yaml.safe_load(JOBSET)
(CONTAINER,) = MANIFEST["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
    "containers"
]
LINES = [
    shlex.split(line.partition("easypipe ")[2])
    for script in SCRIPTS
    for line in script.splitlines()
    if "easypipe " in line
]


@pytest.mark.parametrize("arguments", [*LINES, CONTAINER["command"][1:]])
def test_command_lines_are_ours(arguments):
    command = typer.main.get_command(app).commands[arguments[0]]  # pyright: ignore[reportAttributeAccessIssue]
    with command.make_context(arguments[0], arguments[1:]) as context:
        overrides = context.params["overrides"]
    values = apply_overrides({"train": {"output_dir": "out"}}, overrides)
    assert from_dict(TrainingConfig, values["train"]).mesh == "hybrid"


def test_scripts_are_bash():
    assert len(SCRIPTS) == 2
    for script in SCRIPTS:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert all(line.startswith("#SBATCH --") for line in SCRIPTS[1].splitlines()[2:11])


def test_files_say_first_that_they_never_ran():
    first = [
        next(line for line in text.splitlines() if line[1:2] == " ") for text in (SLURM, JOBSET)
    ]
    assert all(line.startswith("# Never run") for line in first)
    assert all(f'--8<-- "launch/{name}"' in PAGE for name in ("slurm.sh", "jobset.yaml"))


def test_the_manifest_says_who_is_who():
    job = MANIFEST["spec"]["replicatedJobs"][0]
    spec, named = job["template"]["spec"], {one["name"]: one for one in CONTAINER["env"]}
    assert set(named) == set(VARIABLES.values())
    assert (
        named["JAX_NUM_PROCESSES"]["value"] == str(spec["parallelism"]) == str(spec["completions"])
    )
    assert named["JAX_COORDINATOR_ADDRESS"]["value"].startswith(
        f"{MANIFEST['metadata']['name']}-{job['name']}-0-0.{MANIFEST['metadata']['name']}:"
    )
    assert spec["completionMode"] == "Indexed", "or pods have no numbers"
