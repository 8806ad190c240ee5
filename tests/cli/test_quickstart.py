"""The quickstart: killed with -9 in the middle of everything it does, it ends where an
uninterrupted run ends, bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import forked
from easypipe import ConfigError
from easypipe.cli.quickstart import MARKER, standard_library, training_texts, write_project
from easypipe.core import storage
from easypipe.save.saved import MANIFEST

pytestmark = pytest.mark.slow

SMALL = [
    f"--set={change}"
    for change in (
        "train.steps=8",
        "train.eval_every=4",
        "train.eval_batches=1",
        "train.optimizer.warmup_steps=1",
        "train.checkpoint.every=2",
        "model.hidden_size=32",
        "model.intermediate_size=64",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.num_kv_heads=1",
        "data.pack.seq_length=128",
    )
]


# A third of the standard library. The whole one is in .ci/run, and what tests/test_docs.py has its
# examples read.
PACKAGES = (
    "asyncio collections email html http importlib json logging multiprocessing unittest urllib xml"
)

PROGRAM = """
import os, sys, sysconfig
whole = sysconfig.get_paths
sysconfig.get_paths = lambda *scheme: whole(*scheme) | {"stdlib": os.environ["SMALL_LIBRARY"]}
from easypipe.cli import main, quickstart
quickstart.VOCAB_SIZE = 512
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Python with a small standard library, here and in the processes that are started."""
    paths, small = sysconfig.get_paths, tmp_path_factory.mktemp("python") / "lib"
    for name in PACKAGES.split():
        shutil.copytree(
            Path(paths()["stdlib"], name),
            small / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMALL_LIBRARY", str(small))
        patch.setattr(
            sysconfig, "get_paths", lambda *scheme: paths(*scheme) | {"stdlib": str(small)}
        )
        yield


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *arguments]


@pytest.fixture(scope="module")
def keeps(library: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of runs that take compiled programs from each other, though not from `whole`:
    it compiles its own.
    """
    programs = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {**os.environ, **programs}


def run(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = forked.run(command(*arguments), cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def kill_when(
    reached: Callable[[], bool],
    *arguments: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    how: int = signal.SIGKILL,
) -> int:
    process = forked.Popen(
        command(*arguments), cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not reached():
        assert process.poll() is None, f"ended with {process.returncode} before it could be killed"
        assert time.monotonic() < deadline, "was never reached"
        time.sleep(0.002)
    os.kill(process.pid, how)
    return process.wait(timeout=120)


def curve(folder: Path) -> list[tuple]:
    """What has to be equal, bit for bit."""
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    same = ("step", "loss", "nll", "grad_norm", "learning_rate", "num_tokens", "num_targets")
    return [
        (*(line[key] for key in same), json.dumps(line.get("eval"), sort_keys=True))
        for line in lines
    ]


def saved(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted((folder / "packed").rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(library: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a quickstart that nobody stopped."""
    base = tmp_path_factory.mktemp("whole")
    whole = command("quickstart", "--output-dir", "project", *SMALL)
    done = subprocess.run(whole, cwd=base, stdout=subprocess.PIPE, text=True, check=True)
    return base / "project", done.stdout


def test_it_does_what_it_says(whole: tuple[Path, str]) -> None:
    folder, text = whole
    for part in (
        "Ledger",
        "MB/s",
        "of their slots filled",
        "trained 8 steps",
        "metrics.jsonl",
        "loss.png",
        str(folder),
    ):
        assert part in text
    assert text.count("»") == 3
    assert len(list((folder / "data" / "code").glob("*.jsonl"))) > 1
    assert len(list((folder / "data" / "docs").glob("*.parquet"))) > 1
    books = json.loads((folder / "run" / "ledger.json").read_text())["entries"]
    assert all(sum(entry["in"].values()) == sum(entry["out"].values()) for entry in books)
    assert {entry["stage"] for entry in books} >= {"tokenize", "pack", "save"}
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses = [line[1] for line in curve(folder)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    page = (Path(__file__).parents[2] / "docs/run_folder.md").read_text()
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    seen = {metric for line in lines for metric in line}
    seen |= {metric for line in lines for one in line.get("eval", {}).values() for metric in one}
    seen |= {path.name + "/" * path.is_dir() for path in (folder / "run").iterdir()}
    unexplained = [name for name in seen if f"| `{name}` |" not in page]
    assert not unexplained, f"docs/run_folder.md has no line of {unexplained}"
    entries = json.loads((folder / "packed" / MANIFEST).read_text())["ledger"]["entries"]
    assert all(sum(entry["in"].values()) == sum(entry["out"].values()) for entry in entries)


def test_killed_in_the_middle_of_everything(
    whole: tuple[Path, str], keeps: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    arguments = ("quickstart", "--output-dir", "project", *SMALL)
    moments = [
        lambda: (folder / "data" / "code" / "part-1.jsonl").exists(),
        lambda: (folder / MARKER).exists(),
        lambda: (folder / "tokenizer" / "tokenizer.json").exists(),
        lambda: any((folder / "cache").glob("ranges/*/*.json")),
        lambda: (
            any((folder / "packed").glob("_shards/*.json"))
            or (folder / "packed" / MANIFEST).exists()
        ),
        lambda: (folder / "run" / "checkpoints" / "2").exists(),
        lambda: (folder / "run" / "checkpoints" / "6").exists(),
    ]
    for reached in moments:
        if not reached():  # what a slow watcher let pass is no moment any more
            kill_when(reached, *arguments, cwd=tmp_path, env=keeps)
    text = run(*arguments, cwd=tmp_path, env=keeps)
    assert "training continues from step" in text
    assert curve(folder) == curve(whole[0])
    assert saved(folder) == saved(whole[0])


def test_ctrl_c_saves_and_goes_on(
    whole: tuple[Path, str], keeps: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    shutil.copytree(whole[0], folder, ignore=shutil.ignore_patterns("run"))
    arguments = ("quickstart", "--output-dir", "project", *SMALL)
    metrics = folder / "run" / "metrics.jsonl"
    # It compiles what it evaluates with after step 4, and so is not over before the signal comes.
    code = kill_when(
        lambda: metrics.exists() and metrics.stat().st_size > 0,
        *arguments,
        cwd=tmp_path,
        how=signal.SIGINT,
    )
    assert code == 130
    run(*arguments, cwd=tmp_path, env=keeps)
    assert curve(folder) == curve(whole[0])


def test_prepare_and_train_do_the_same(
    whole: tuple[Path, str], keeps: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(whole[0], folder, ignore=shutil.ignore_patterns("run", "packed", "cache"))
    run("prepare", "quickstart.yaml", "--set=data.pack.seq_length=128", cwd=folder)
    assert saved(folder) == saved(whole[0])
    text = run("train", "quickstart.yaml", *SMALL, cwd=folder, env=keeps)
    assert "up to date" in text
    assert curve(folder) == curve(whole[0])


# the project folder


def test_the_project_is_the_same_every_time_and_held_out_modules_are_apart(
    whole: tuple[Path, str], tmp_path: Path
) -> None:
    assert write_project(tmp_path / "again")
    files = [
        path.relative_to(tmp_path / "again")
        for path in (tmp_path / "again").rglob("*")
        if path.is_file()
    ]
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (whole[0] / name).read_bytes(), name
    modules = list(standard_library())
    train, held = ({m.name for m in modules if m.held_out is out} for out in (False, True))
    assert len(train) > 10 * len(held) > 0
    assert len(list(training_texts(tmp_path / "again"))) == len(train) + sum(
        bool(m.docs) for m in modules if not m.held_out
    )


def test_edits_stay(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    write_project(folder)
    (folder / "quickstart.yaml").write_text(yaml.safe_dump({"mine": True}))
    assert not write_project(folder)
    assert "mine" in (folder / "quickstart.yaml").read_text()


def test_a_killed_writer_is_finished_and_leaves_files_that_stood_alone(tmp_path: Path) -> None:
    folder = tmp_path / "project"

    def hook(step: str, path: str) -> None:
        if step == "rename" and path.endswith("part-1.parquet"):
            raise KeyboardInterrupt

    storage.set_fault_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        write_project(folder)
    storage.set_fault_hook(None)
    stood = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert stood
    assert write_project(folder)
    assert {path: path.stat().st_mtime_ns for path in stood} == stood


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"is not empty: thesis.txt. Choose another folder with --output-dir."
    ):
        write_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
