"""Texts that a model writes while it is trained."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from chat_support import chat_tokenizer
from easypipe import RunConfig, Trainer
from easypipe.cli import main
from easypipe.core import storage
from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, EasypipeError
from easypipe.run import train
from easypipe.train.events import TrainEvent
from easypipe.train.metrics.log import read_metrics
from easypipe.train.report.page import write_report
from pipelines import texts
from token_support import small_tokenizer_folder
from train.runs import Arithmetic, Tiny, numbers, settings

PROMPTS = ["alpha beta", ""]


def config(folder: Path, samples: Any, name: str = "run", **training: Any) -> RunConfig:
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in texts(60)))
    data = {
        "datasets": [{"name": "rows", "data_files": str(rows)}],
        "default_tokenizer": str(small_tokenizer_folder()),
        "cache_dir": str(folder / "cache"),
        "pack": {"seq_length": 32},
        "load": {"batch_size": 4, "num_epochs": None},
        "seed": 1,
    }
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    model = {**sizes, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    own = {"output_dir": str(folder / name), "steps": 5, "checkpoint": {"every": 2}, **training}
    own |= {"callbacks": {"samples": samples}} if samples else {}
    return from_dict(RunConfig, {"data": data, "model": model, "train": own})


def written(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "samples.jsonl")


def test_samples_are_written_and_nothing_else_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses bit for bit, the lines of a run that was killed, the page, and what the command
    writes with the same checkpoint.
    """
    asked = {"prompts": PROMPTS, "every": 2, "max_new_tokens": 6}
    train(config(tmp_path, asked))
    train(config(tmp_path, None, "plain"))
    run, plain = tmp_path / "run", tmp_path / "plain"
    assert numbers(read_metrics(run / "metrics.jsonl")) == numbers(
        read_metrics(plain / "metrics.jsonl")
    )
    lines = written(run)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert all([one["prompt"] for one in line["samples"]] == PROMPTS for line in lines)
    assert all(one["text"] for line in lines for one in line["samples"])

    def kill(event: TrainEvent) -> None:
        if event.kind == "step" and event.step == 3:
            raise KeyboardInterrupt

    cut = config(tmp_path, asked, "cut")
    with pytest.raises(KeyboardInterrupt):
        train(cut, listener=kill)
    assert [line["step"] for line in written(tmp_path / "cut")] == [2]
    assert train(cut).resumed_from == 2
    assert (tmp_path / "cut" / "samples.jsonl").read_bytes() == (run / "samples.jsonl").read_bytes()

    page = write_report(run).read_text()
    assert "what the model wrote" in page
    assert "none written" in write_report(plain).read_text()
    capsys.readouterr()
    options = ["--max-new-tokens", "6", "--step", "5"]
    assert main(["generate", str(run), PROMPTS[0], *options]) == 0
    alone = capsys.readouterr().out.strip("\n")
    assert alone == PROMPTS[0] + lines[-1]["samples"][0]["text"]


def test_what_is_drawn_follows_from_the_options(tmp_path: Path) -> None:
    found = {}
    for name, more in (
        ("own", {}),
        ("again", {}),
        ("seed", {"seed": 1}),
        ("greedy", {"temperature": 0.0}),
        ("short", {"max_new_tokens": 3}),
    ):
        asked = {"prompts": PROMPTS[:1], "every": 9, "max_new_tokens": 12, **more}
        train(config(tmp_path, asked, name, steps=1))
        (line,) = written(tmp_path / name)
        found[name] = line["samples"][0]["text"]
    assert found["own"] == found["again"]
    assert len({found["own"], found["seed"], found["greedy"]}) == 3
    assert found["own"].startswith(found["short"])
    assert len(found["short"]) < len(found["own"])


@pytest.mark.parametrize(("metric", "last"), [("loss", 3), ("eval.held.loss", 8)])
def test_the_last_step_is_sampled_where_a_run_ends_early(
    tmp_path: Path, metric: str, last: int
) -> None:
    callbacks = {
        "samples": {"prompts": PROMPTS[:1], "every": 9, "max_new_tokens": 3},
        "early_stopping": {"metric": metric, "patience": 1, "min_delta": 9.0},
    }
    rare = {"steps": 12, "eval_every": 4, "eval_batches": 1, "checkpoint": {"every": 9}}
    made = config(tmp_path, None, callbacks=callbacks, **rare)
    made = dataclasses.replace(made, eval={"held": made.data})
    assert train(made).steps == last
    assert [line["step"] for line in written(tmp_path / "run")] == [last]


def test_conversations_are_answered_by_the_template(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "yes"}]}
        for n in range(20)
    ]  # fmt: skip
    asked = [{"role": "user", "content": "say 3"}]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    samples = {"messages": str(tmp_path / "asked.json"), "every": 2, "max_new_tokens": 4}
    data = {"name": "talk", "data_files": str(tmp_path / "talk.jsonl"), "chat_template": "chatml", "content_field": "messages"}  # fmt: skip
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    whole = {
        "data": {
            "datasets": [data],
            "default_tokenizer": chat_tokenizer(),
            "cache_dir": str(tmp_path / "cache"),
            "pack": {"seq_length": 64},
            "load": {"batch_size": 2, "num_epochs": None},
            "seed": 1,
        },
        "model": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1},
        "train": {"output_dir": str(tmp_path / "run"), "steps": 2, "callbacks": {"samples": samples}},
    }  # fmt: skip
    train(from_dict(RunConfig, whole))
    (line,) = written(tmp_path / "run")
    (one,) = line["samples"]
    assert one["prompt"].endswith("assistant\n")
    assert "say 3" in one["prompt"]
    for text, message in (("{", "is not JSON"), ('[{"role": 3}]', "role")):
        (tmp_path / "asked.json").write_text(text)
        whole["train"]["output_dir"] = str(tmp_path / message[:2])
        with pytest.raises(EasypipeError, match=message):
            train(from_dict(RunConfig, whole))
    (tmp_path / "asked.json").unlink()
    with pytest.raises(ConfigError, match=r"train.callbacks.samples.messages: .* is not a file"):
        train(from_dict(RunConfig, whole))


def test_what_cannot_write_is_refused(tmp_path: Path) -> None:
    given = settings(tmp_path, callbacks={"samples": {"prompts": ["a"]}})
    with pytest.raises(ConfigError, match="the run's data names no tokenizer"):
        Trainer(Tiny, given, Arithmetic())
    name = str(small_tokenizer_folder())
    with pytest.raises(ConfigError, match="cannot write with a Tiny"):
        Trainer(Tiny, given, Arithmetic(), tokenizer=name).run()
    for wrong, message in (
        ({}, "no prompts are given, and no file"),
        ({"prompts": ["a"], "every": 0}, "every"),
        ({"prompts": ["a"], "temperature": -1.0}, "not a number from 0 up"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings(tmp_path, callbacks={"samples": wrong})


def test_samples_are_on_the_disk_before_a_checkpoint_behind_which_they_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, file = os.fsync, tmp_path / "run" / "samples.jsonl"
    synced, seen = {}, []

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_size

    def struck(event: str, path: str) -> None:
        if event == "rename" and Path(path).parent.name == "checkpoints":
            told = file.read_bytes()[: synced.get(file.stat().st_ino, 0)]
            seen.append((int(Path(path).name), told.count(b"\n")))

    monkeypatch.setattr(os, "fsync", recorded)
    storage.set_fault_hook(struck)
    try:
        train(config(tmp_path, {"prompts": PROMPTS, "every": 2, "max_new_tokens": 2}, steps=4))
    finally:
        storage.set_fault_hook(None)
    assert [step for step, _ in seen] == [2, 4]
    assert all(lines >= step // 2 for step, lines in seen)
