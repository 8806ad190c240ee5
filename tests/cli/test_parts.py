"""`easypipe prepare --shard I/N` and `--finalize`: array jobs that share a cache folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
from token_support import small_tokenizer_folder, texts


def easypipe(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from easypipe.cli import main; sys.exit(main(sys.argv[1:]))",
        *arguments,
    ]
    return forked.run(command, cwd=cwd)


def write_project(folder: Path) -> Path:
    folder.mkdir()
    for number in range(5):
        rows = [json.dumps({"text": text}) + "\n" for text in texts(20, seed=number)]
        (folder / f"part-{number}.jsonl").write_text("".join(rows))
    (folder / "held.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts(9, seed=77))
    )
    config = {
        "data": {
            "datasets": [{"name": "d", "data_files": "part-*.jsonl"}],
            "default_tokenizer": str(small_tokenizer_folder()),
            "seed": 1,
            "cache_dir": "cache",
            "pack": {"seq_length": 64},
            "save": {"output_dir": "out"},
        },
        "eval": {"held": {"datasets": [{"data_files": "held.jsonl"}]}},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return folder


def test_f15_parts_on_several_machines_make_what_one_machine_makes(tmp_path: Path) -> None:
    alone, array = write_project(tmp_path / "alone"), write_project(tmp_path / "array")
    assert easypipe("prepare", "run.yaml", cwd=alone).returncode == 0
    first = easypipe("prepare", "run.yaml", "--shard", "0/2", cwd=array)
    assert first.returncode == 0, first.stderr
    # three of five files, and the held-out one
    assert "part 0 of 2: 69 rows tokenized" in first.stdout
    early = easypipe("prepare", "run.yaml", "--finalize", cwd=array)
    assert early.returncode == 2
    assert (
        "--finalize: 2 of 5 ranges of dataset 'd' are not tokenized. Run the parts that are missing"
        in early.stderr
    )
    assert not (array / "out").exists()
    assert easypipe("prepare", "run.yaml", "--shard", "1/2", cwd=array).returncode == 0
    last = easypipe("prepare", "run.yaml", "--finalize", cwd=array)
    assert last.returncode == 0, last.stderr
    said = next(line for line in last.stdout.splitlines() if line.startswith("tokenize d:"))
    assert "5 ranges found finished" in said, "seconds in which nothing was tokenized make no rate"
    assert "MB/s" not in said
    made = {
        folder: {f.name: f.read_bytes() for f in (folder / "out").rglob("*") if f.is_file()}
        for folder in (alone, array)
    }
    assert made[alone] == made[array]
    held = array / "held.jsonl"  # what is held out must be there too
    held.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(9, seed=78)))
    late = easypipe("prepare", "run.yaml", "--finalize", cwd=array)
    assert late.returncode == 2
    assert "1 of 1 ranges of dataset 'eval.held' are not tokenized" in late.stderr
