"""The doctor finds each fault that is planted, and is silent where all is well."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from disasters.jobs import write_inputs
from easypipe.cache.reader import TokenCache
from easypipe.cli import main
from easypipe.core.schema import LABELS
from easypipe.doctor import machine
from easypipe.doctor.check import Check, Finding, examine
from easypipe.doctor.data import Sample, data_checks
from easypipe.doctor.model import model_checks
from easypipe.loader.loader import Loader
from easypipe.run import RunConfig
from easypipe.train import step
from easypipe.train.model.decoder import Decoder
from easypipe.transforms.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_inputs(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


def found(checks: Any, name: str) -> Finding:
    [check] = [one for one in checks if one.name == name]
    [finding] = examine([check])
    return finding


def of_data(folder: Path, name: str) -> Finding:
    run = RunConfig.load("train.yaml")
    return found(data_checks(Sample(run.data, folder / "sample", 200)), name)


def of_model(folder: Path, name: str) -> Finding:
    run = RunConfig.load("train.yaml")
    sample = Sample(run.data, folder / "sample", 200)
    return found(model_checks(run, sample, folder / "runs"), name)


def test_a_healthy_project_has_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(project.rglob("*"))
    assert main(["doctor", "train.yaml"]) == 0
    said = capsys.readouterr().out
    assert "prepared three times, and a small model" in said.partition("\nok ")[0]
    assert said.count("\nok ") == 9
    assert "FAILED" not in said
    assert sorted(project.rglob("*")) == before


def test_a_healthy_machine_has_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--machine", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\nok ") == 8
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_mask(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Loader.__iter__

    def shifted(self: Loader) -> Any:
        for batch in usual(self):
            yield {**batch, LABELS: np.roll(np.asarray(batch[LABELS]), 1, axis=1)}

    monkeypatch.setattr(Loader, "__iter__", shifted)
    finding = of_data(project, "masks")
    assert finding.state == "FAILED"
    assert "batch 0, row 0, slot" in finding.says


def test_leaky_attention(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Decoder.hidden

    def leaky(self: Decoder, ids: Any, segments: Any = None, positions: Any = None) -> Any:
        return usual(self, ids, None, positions)

    monkeypatch.setattr(Decoder, "hidden", leaky)
    finding = of_model(project, "no document sees another")
    assert finding.state == "FAILED"
    assert "where the tokens of document 1 are others" in finding.says
    assert of_model(project / "again", "packed equals alone").state == "FAILED"


def test_accumulation_that_averages(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second micro-batch is not counted."""
    usual = step._micro_batches

    def first_twice(batch: Any, pieces: int) -> Any:
        cut = usual(batch, pieces)
        return {name: values.at[1:].set(values[:1]) for name, values in cut.items()}

    monkeypatch.setattr(step, "_micro_batches", first_twice)
    finding = of_model(project, "accumulation equals the whole batch")
    assert finding.state == "FAILED"
    assert "in two micro-batches" in finding.says


def test_a_lost_row(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = TokenCache.read
    monkeypatch.setattr(
        TokenCache,
        "read",
        lambda self, shard, start, stop: usual(self, shard, start, stop).slice(1),
    )
    finding = of_data(project, "no row is lost")
    assert finding.state == "FAILED"
    assert "code.jsonl, row 0: no document, no reject" in finding.says


def test_an_unstable_template(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Tokenizer.encode_column
    calls: list[int] = []

    def unstable(self: Tokenizer, texts: Any, **options: Any) -> Any:
        calls.append(1)
        given = texts.to_pylist()
        given[0] = f"{len(calls)} {given[0]}"
        return usual(self, _array(texts, given), **options)

    monkeypatch.setattr(Tokenizer, "encode_column", unstable)
    finding = of_data(project, "prepared again, the same")
    assert finding.state == "FAILED"
    assert "row 0, token" in finding.says
    assert "prepared another time" in finding.says


def _array(like: pa.Array, values: list[str]) -> pa.Array:
    return pa.array(values, like.type)


def test_a_loader_that_goes_on_elsewhere(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "restore", lambda self, state: None)
    finding = of_data(project, "resume")
    assert finding.state == "FAILED"
    assert "stopped after batch 1: batch 1 has another" in finding.says


def test_tokens_of_another_backend(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Tokenizer.encode_column

    def other(self: Tokenizer, texts: Any, **options: Any) -> Any:
        if self.backend.name == "tokenizers":
            texts = _array(texts, [f"{text}!" for text in texts.to_pylist()])
        return usual(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_column", other)
    finding = of_data(project, "tokens are the reference's")
    assert finding.state == "FAILED"
    assert "by the `tokenizers` library" in finding.says


def _not_synced(_: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def _by_copying(source: Any, target: Any) -> None:
    with open(source, "rb") as there, open(target, "wb") as here:
        here.write(there.read(1000))
        here.flush()
        time.sleep(0.02)
        shutil.copyfileobj(there, here)
    os.unlink(source)


def _no_package(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("check", "says", "where", "name", "fault"),
    [
        ("writes are synced", "Input/output error", os, "fsync", _not_synced),
        ("renaming is atomic", "a reader saw", os, "replace", _by_copying),
        ("locks exclude", "another process got it too", fcntl, "flock", lambda *_: None),
        ("clock", "from this machine's clock", machine.time, "time", lambda: 0.0),
        (
            "limits",
            "are free in",
            shutil,
            "disk_usage",
            lambda _: shutil._ntuple_diskusage(9, 9, 0),
        ),
        ("installation", "is not installed", importlib.metadata, "version", _no_package),
    ],
)
def test_a_faulty_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    says: str,
    where: Any,
    name: str,
    fault: Callable[..., Any],
) -> None:
    monkeypatch.setattr(where, name, fault)
    finding = found(machine.machine_checks(tmp_path), check)
    assert finding.state == "FAILED"
    assert says in finding.says


def test_what_breaks_is_found_and_the_rest_goes_on() -> None:
    def breaks() -> str:
        raise KeyError("x")

    first, second = examine([Check("a", breaks), Check("b", lambda: "well")])
    assert (first.state, first.says) == ("FAILED", "KeyError: 'x'")
    assert (second.state, second.says) == ("ok", "well")
