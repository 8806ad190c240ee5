"""What commands print, word for word, and the codes that they end with."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from chat_support import talk
from easypipe.cli import main
from easypipe.cli.show import console
from pipelines import jsonl, mixed_file, tokenizer
from told import assert_told

# what differs from run to run and from machine to machine: the log, times, speeds, sizes, digests
UNLIKE = (
    (r"^(INFO|WARNING) .*\n( {9}.*\n)*", ""),
    (r"\b\d+(\.\d+)? (s|min)\b", "TIME"),
    (r"by (gigatoken|tokenizers)", "by ENCODER"),
    (r"\b(?=\d*[a-f])[0-9a-f]{8,64}\b", "DIGEST"),
    (r"^(code|docs)( +)\d{8}\b", r"\1\2DIGEST"),  # one in fifty has no letter
    (r"\d+ bytes, committed with \d+", "SIZE bytes, committed with SIZE"),
    (r" {2,}", "  "),
)


class Said:
    """Runs commands, and keeps what they print."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capsys = folder, capsys
        self.lines: list[str] = []

    def run(self, *arguments: str | Path, unordered: bool = False) -> None:
        """Runs a command.

        Args:
            arguments: Its arguments.
            unordered: Whether its lines stand in an order of digests or times.
        """
        gc.collect()  # what an earlier command read is in use no longer
        code = main([str(one) for one in arguments])
        out, err = self._capsys.readouterr()
        text = "\n".join(sorted(out.splitlines())) if unordered else out + err
        self.lines += [
            f"$ easypipe {' '.join(map(str, arguments))}",
            f"{text.rstrip()}\n-> {code}\n",
        ]

    def assert_told(self, name: str) -> None:
        text = "\n".join(self.lines).replace(str(self._folder), "DATA")
        text = text.replace(tokenizer(), "TOKENIZER")
        for pattern, word in UNLIKE:
            text = re.sub(pattern, word, text, flags=re.MULTILINE)
        assert_told(name, text)


@pytest.fixture
def said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Said]:
    monkeypatch.setenv("COLUMNS", "120")
    console.cache_clear()  # which keeps the width that it began with
    yield Said(tmp_path, capsys)
    console.cache_clear()


@pytest.fixture
def pipeline_yaml(tmp_path: Path) -> Path:
    return mixed_file(tmp_path)


@pytest.fixture
def run_yaml(tmp_path: Path, pipeline_yaml: Path) -> Path:
    data = yaml.safe_load(pipeline_yaml.read_text()) | {"save": None, "load": {"batch_size": 4}}
    run = {"data": data, "train": {"output_dir": str(tmp_path / "run"), "steps": 7}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def test_commands_that_prepare_data(
    said: Said, tmp_path: Path, pipeline_yaml: Path, run_yaml: Path
) -> None:
    said.run("prepare", run_yaml, "--finalize")
    said.run("prepare", run_yaml, "--shard", "0/1")
    said.run("prepare", run_yaml, "--shard", "0/1", "--finalize")
    for part in ("1/1", "-1/2", "a/b", "0", "/2"):
        said.run("prepare", run_yaml, f"--shard={part}")
    said.run("prepare", run_yaml, "--finalize")
    said.run("prepare", pipeline_yaml)
    said.run("prepare", pipeline_yaml)
    said.run("prepare", run_yaml, "--set", "data.streaming=true")
    said.run("prepare", run_yaml, "--set", "data.pack.seq_length=0")
    said.run("prepare", run_yaml, "--set", "evall.x=1")
    said.run("prepare", run_yaml, "--set", "shuffle=1")
    said.run("prepare", run_yaml, "--set", "eval=3")
    said.run("prepare", run_yaml, "--set", "task=classify")
    said.run("verify", tmp_path / "out")
    said.run("verify", tmp_path / "out", "--set", "seed=1")
    (shard,) = (tmp_path / "out").glob("*.parquet")
    shard.write_bytes(shard.read_bytes()[:-9])
    said.run("verify", tmp_path / "out")
    said.run("verify", tmp_path / "out", pipeline_yaml, "--repair")
    (one, *_) = sorted((tmp_path / "cache" / "tokens").rglob("*.arrow"))
    one.write_bytes(b"")
    said.run("verify", tmp_path / "cache", "--repair", unordered=True)
    said.run("cache", "list", "--cache-dir", tmp_path / "cache", unordered=True)
    stray = tmp_path / "cache" / "tokens" / "stray.arrow"
    stray.write_bytes(b"x" * 2_500_000)
    said.run("cache", "list", "--cache-dir", tmp_path / "cache", unordered=True)
    stray.unlink()
    said.run("cache", "list", "--cache-dir", run_yaml)
    for options in (
        ("--dataset", "none"),
        ("--older-than", "1"),
        ("--dataset", "code", "--dry-run"),
        ("--dataset", "code"),
    ):
        said.run("cache", "clear", "--cache-dir", tmp_path / "cache", *options)
    said.run("cache", "list", "--cache-dir", tmp_path / "cache", unordered=True)
    said.assert_told("commands that prepare data")


def test_commands_that_look_at_data(said: Said, tmp_path: Path, run_yaml: Path) -> None:
    rows = [{"question": "q" * 90, "solution": "s", "answer": "a"}] * 5
    path = jsonl(tmp_path / "rows.jsonl", rows)
    chats = jsonl(
        tmp_path / "chats.jsonl", [{"messages": talk("Hi")}, {"messages": talk("a", "b")}]
    )
    turns = [{"who": who, "says": "Hi"} for who in ("the boss", "customer", "helper")]
    strangers = jsonl(tmp_path / "strangers.jsonl", [{"chat": turns}])
    shared = [{"from": who, "value": "Hi"} for who in ("human", "gpt")]
    shared = jsonl(tmp_path / "shared.jsonl", [{"conversations": shared}])
    numbers = jsonl(tmp_path / "numbers.jsonl", [{"a": 1}])
    page = tmp_path / "page.html"
    said.run("plan", run_yaml, "--no-prepare")
    said.run("plan", run_yaml)
    said.run("plan", run_yaml, "--steps", "3", "--html", page)
    said.run("plan", run_yaml, "--json", "--html", page)
    said.run("plan", run_yaml, "--set", "data.load.num_epochs=null", "--set", "train.steps=null")
    said.run("explain", run_yaml, "--step", "1", "--characters", "10")
    said.run("explain", run_yaml, "--step", "1", "--row", "2")
    said.run("explain", run_yaml, "--step", "1", "--row", "4")
    said.run("explain", run_yaml, "--step", "9000")
    said.run("explain", run_yaml, "--step", "1", "--set", "data.seed=null")
    said.run("preview", run_yaml, "-n", "2", "--characters", "30", "--rows", "3")
    said.run("preview", run_yaml, "-n", "1", "--characters", "0", "--rows", "1")
    said.run("preview", run_yaml, "--html", page)
    said.run("discover", path)
    said.run("discover", path, "--column", "completion=answer", "--rows", "1")
    said.run("discover", path, "--column", "=answer")
    said.run("discover", path, "--column", "completion=reply", "--rows", "0")
    said.run("discover", path, "--column", "text=answer", "--role", "bot=user", "--rows", "0")
    said.run("discover", strangers, "--rows", "0")
    said.run("discover", numbers, "--rows", "0")
    said.run("discover", chats, "--role", "bot=assistant", "--html", page)
    said.run("masks", "chatml", "--messages", chats)
    said.run("masks", "chatml", "--messages", strangers)
    said.run("masks", "chatml", "--messages", shared)
    said.run("masks", "chatml", "--messages", numbers)
    said.run("masks", "{{ 'Hi' }}")
    said.run("masks", "chatml", "--messages", chats, "--roles-to-train", "", "--html", page)
    said.assert_told("commands that look at data")


def test_commands_about_models_and_keys(
    said: Said, tmp_path: Path, run_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    for name, records, steps in (
        ("a/second", [{"step": 1_000, "loss": 2.5}], 1_000),
        ("a/first", [{"step": 3, "loss": 2.0, "eval": {"x": {"loss": 1.25}, "y": {}}}], None),
        ("b", [{"step": 3, "loss": None, "eval": {"x": {"loss": 9.5}}}, {"step": 4, "loss": 1}], 5),
        ("none", [], 5),
    ):
        (folder / name / "within").mkdir(parents=True)
        lines = "".join(json.dumps(one) + "\n" for one in records)
        (folder / name / "metrics.jsonl").write_text(lines)
        (folder / name / "within" / "metrics.jsonl").write_text("")
        train = {} if steps is None else {"steps": steps}
        (folder / name / "run.yaml").write_text(yaml.safe_dump({"train": train}))
    said.run("runs", folder)
    said.run("runs", tmp_path / "runs" / "a" / "first" / "within")
    (tmp_path / "empty").mkdir()
    said.run("runs", tmp_path / "empty")
    said.run("report", folder / "b", "--port", "80")
    said.run("report", folder / "b", "--serve", "--out", "x.html")
    said.run("report", tmp_path / "empty")
    said.run("report", folder / "a" / "second", folder / "none", "-o", "both.html")
    said.run("report", folder / "a" / "second", folder / "a" / "second", "-o", "both.html")
    said.run("export", folder / "b", "out", "--dtype", "float16")
    said.run("export", folder / "b", "out", "--gguf", "--adapters")
    said.run("export", folder / "b", "out")
    said.run("generate", folder / "b")
    said.run("generate", folder / "b", "text", "--chat")
    said.run("generate", folder / "b", "text", "--system", "x")
    said.run("generate", tmp_path / "empty", "text", "--step", "3")
    said.run("doctor")
    said.run("doctor", "--machine", "--folder", tmp_path / "nothing")
    said.run("kernels", "table", "--table", "none.json")
    said.run("init", "sft")
    said.run("init", "sft")
    said.run("init", "sft", "--force", "-o", "sft.yaml")
    said.run("config", "train.optimizer.learning_rate")
    said.run("config", "data")
    for key in ("seq_length", "learning_rat", "data.pack.seq_len", "per_device_train_batch_size"):
        said.run("config", key)
    said.run("--trust-endpoint", "https://a.example", "config", "no.such.key")
    said.run("config", "no.such.key", "--trust-endpoint", "https://a.example")
    said.run("train", run_yaml, "--prompt", "x", "--set", "task=classify")
    said.run("quickstart", "--output-dir", "~nobody-here/x")
    said.run("quickstart", "--output-dir", folder)
    said.lines.append(Path("sft.yaml").read_text())
    said.assert_told("commands about models and keys")
