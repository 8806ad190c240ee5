"""The doctor finds each fault that is planted, and is silent where all is well."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pytest

import doctor_faults
from disasters.jobs import write_inputs
from easypipe import DatasetConfig, PackStageConfig, Pipeline, TokenizeStageConfig
from easypipe.cache.reader import TokenCache
from easypipe.cli import main
from easypipe.core import storage
from easypipe.core.config import from_dict
from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.doctor import devices, machine, processes
from easypipe.doctor.check import Check, Failed, Finding, examine
from easypipe.doctor.data import Sample, compare, data_checks, resume, rows_are_well_formed
from easypipe.doctor.devices import device_checks
from easypipe.doctor.model import SLOTS, _packed_row, model_checks
from easypipe.doctor.processes import process_checks
from easypipe.loader.loader import Loader
from easypipe.loader.placement import Placement
from easypipe.run import RunConfig, plan_on
from easypipe.train import step
from easypipe.train.model.decoder import Decoder
from easypipe.train.plan.topology import Topology
from easypipe.transforms.tokenizer.tokenizer import Tokenizer
from pipelines import config


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
    sample = Sample(run.data, folder / "sample", 200)
    return found([*data_checks(sample), *process_checks(sample)], name)


def of_model(folder: Path, name: str) -> Finding:
    run = RunConfig.load("train.yaml")
    sample = Sample(run.data, folder / "sample", 200)
    checks = [*model_checks(run, sample, folder / "runs"), *device_checks(run, sample)]
    return found(checks, name)


def test_a_healthy_project_has_nothing(
    project: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(project.rglob("*"))
    page = tmp_path_factory.mktemp("page") / "doctor.html"
    assert main(["doctor", "train.yaml", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    cost = said.partition("\nok ")[0]
    assert "the first 200 rows of each of 2 datasets, prepared five times" in cost
    assert "a step of the whole model is compiled" in cost
    assert said.count("\nok ") == 13
    assert "FAILED" not in said
    assert sorted(project.rglob("*")) == before
    text = page.read_text()
    assert "<h2>Failed: 0</h2>" in text
    assert "<h2>All is well: 13</h2>" in text
    assert "<td>memory headroom</td>" in text


SCHEDULE = "data.mix.weight_schedule=[{step: 2, weights: {code: 0.9, docs: 0.1}}]"


@pytest.mark.parametrize(
    ("changes", "skipped"),
    [
        (["data.load.accumulation_steps=2"], []),  # as `easypipe init sft` writes it
        ([SCHEDULE, "data.load.batch_size_schedule=[[1, 4]]"], []),
        ([SCHEDULE, "data.load.batch_size=3"], ["several processes"]),
        (["data.load.group_by_length=4", "data.pack=null"], ["rows are well formed", "masks"]),
    ],
)
def test_options_of_batches_are_no_fault(
    project: Path, changes: list[str], skipped: list[str]
) -> None:
    run = RunConfig.load("train.yaml", changes)
    sample = Sample(run.data, project / "sample", 200)
    every = [*examine([*data_checks(sample), *process_checks(sample)])]
    assert [one for one in every if one.state == "FAILED"] == []
    assert {one.name for one in every if one.state == "skipped"} <= {*skipped}


def test_rows_of_tokens_are_no_fault_and_are_not_called_tokenized(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """JSON's numbers are float64, of which a device has float32; rows that are not packed have no
    length that a plan could take.
    """
    row = {"input_ids": [5, 6, 7, 8], "scores": [0.1, 0.2, 0.3, 0.7]}
    Path("tokens.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    values = json.loads(Path("train.yaml").read_text())
    one = {"data_files": "tokens.jsonl", "aligned_columns": {"scores": None}}
    tokens = {"datasets": [one], "default_tokenizer": "tokenizer", "seed": 3}
    tokens |= {"load": {"batch_size": 4, "num_epochs": None}}
    run = from_dict(
        RunConfig,
        values
        | {"data": tokens, "eval": {"held": {"datasets": [one]}}}
        | {"train": values["train"] | {"steps": 6, "eval_every": 2, "eval_batches": 1}},
    )
    sample = Sample(run.data, project / "sample", 200)
    every = [*examine([*data_checks(sample), *device_checks(run, sample)])]
    said = {one.name: (one.state, one.says) for one in every}
    for name in ("no row is lost", "tokens are the reference's", "preparing again changes nothing"):
        assert said[name] == (
            "skipped",
            "no dataset is tokenized here: the rows hold tokens already",
        )
    assert said["batches lie on their devices"][0] == "ok"
    state, says = said["memory headroom"]
    assert (state, says.partition(":")[0]) == ("skipped", "data.pack")
    assert {state for state, _ in said.values()} == {"ok", "skipped"}
    packed = dataclasses.replace(
        run, data=dataclasses.replace(run.data, pack=PackStageConfig(seq_length=16))
    )
    assert found(device_checks(packed, sample), "memory headroom").state == "ok"
    assert "no data is held out" not in caplog.text


def test_as_many_devices_as_rows_are_no_fault(project: Path) -> None:
    code = (
        "from pathlib import Path; import test_doctor as t; "
        "print(t.of_model(Path('..'), 'accumulation equals the whole batch'))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment = os.environ | devices | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "state='ok'" in done.stdout


def test_the_largest_step_of_a_schedule_needs_memory(project: Path) -> None:
    plans = [
        plan_on(RunConfig.load("train.yaml", [change]), Topology("here", jax.devices()[:1]))
        for change in ("data.load.batch_size=8", "data.load.batch_size_schedule=[[2, 8], [3, 4]]")
    ]
    assert plans[0].memory == plans[1].memory


def test_a_healthy_machine_has_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--machine", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\nok ") == 8
    assert list(tmp_path.iterdir()) == []


def one_target_less(labels: np.ndarray) -> np.ndarray:
    left = labels.copy()
    left[0, np.flatnonzero(labels[0] != IGNORE)[0]] = IGNORE
    return left


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda labels: np.roll(labels, 1, axis=1), r"batch 0, row 0, slot \d+: the label is"),
        (lambda labels: np.full_like(labels, -100), r": 0 targets, but its loss mask trains \d"),
        (one_target_less, r": \d+ targets, but its loss mask trains \d"),
    ],
)
def test_a_wrong_mask(
    project: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], Any], says: str
) -> None:
    usual = Loader.__iter__

    def changed(self: Loader) -> Any:
        for batch in usual(self):
            yield {**batch, LABELS: wrong(np.asarray(batch[LABELS]))}

    monkeypatch.setattr(Loader, "__iter__", changed)
    finding = of_data(project, "masks")
    assert finding.state == "FAILED"
    assert re.search(says, finding.says), finding.says


def test_positions_that_go_on(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Loader.__iter__

    def counted(self: Loader) -> Any:
        for batch in usual(self):
            slots = np.arange(batch[POSITION_IDS].shape[1], dtype=np.int32)
            yield {**batch, POSITION_IDS: np.broadcast_to(slots, batch[POSITION_IDS].shape)}

    monkeypatch.setattr(Loader, "__iter__", counted)
    finding = of_data(project, "rows are well formed")
    assert finding.state == "FAILED"
    assert "positions do not restart there" in finding.says


def test_processes_that_read_the_same_rows(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "share", doctor_faults.share_of_the_first)
    finding = of_data(project, "several processes")
    assert finding.state == "FAILED"
    assert "in process 1 of 2 than in one alone" in finding.says


def test_a_process_without_rows(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "share", doctor_faults.share_of_nobody)
    finding = of_data(project, "several processes")
    assert finding.state == "FAILED"
    assert "process 0 of 2 has 0 rows of" in finding.says


def test_what_a_killed_process_left(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_sweep", lambda *_: 0)
    finding = of_data(project, "a kill while preparing")
    assert finding.state == "FAILED"
    assert "left by a killed process, and not removed" in finding.says


def test_rows_on_the_wrong_device(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Placement.place

    def turned(self: Placement, batch: Any) -> Any:
        return usual(self, {name: np.roll(values, 1, axis=0) for name, values in batch.items()})

    monkeypatch.setattr(Placement, "place", turned)
    finding = of_model(project, "batches lie on their devices")
    assert finding.state == "FAILED"
    assert "holds other values of input_ids" in finding.says


def test_a_device_that_is_too_small(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_free_memory", lambda: 10_000)
    finding = of_model(project, "memory headroom")
    assert finding.state == "FAILED"
    assert "less than 5% is left. What helps: " in finding.says


def test_leaky_attention(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Decoder.hidden

    def leaky(self: Decoder, ids: Any, segments: Any = None, positions: Any = None) -> Any:
        return usual(self, ids, None, positions)

    monkeypatch.setattr(Decoder, "hidden", leaky)
    finding = of_model(project, "no document sees another")
    assert finding.state == "FAILED"
    assert "when the tokens of document 1 change" in finding.says
    assert of_model(project / "again", "packing keeps the loss").state == "FAILED"


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


def test_a_row_that_is_cut_has_no_label_behind_its_end() -> None:
    slots = np.arange(SLOTS + 8, dtype=np.int32)
    segments = np.where(slots < 9, 1, 2)
    columns = {INPUT_IDS: slots, LABELS: slots + 1, SEGMENT_IDS: segments, POSITION_IDS: slots}
    sample: Any = SimpleNamespace(batches=[{name: one[None] for name, one in columns.items()}])
    row = _packed_row(sample)
    assert row[LABELS][0].tolist() == [*range(1, SLOTS), IGNORE]
    assert {values.shape for values in row.values()} == {(1, SLOTS)}


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
    finding = of_data(project, "preparing again changes nothing")
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


def test_the_stops_that_were_tried_are_told(project: Path) -> None:
    data = RunConfig.load("train.yaml").data
    sample = Sample(data, project / "sample", 200)
    for batches, told in ((6, "0, 1, 2, 4 of 6"), (3, "0, 1, 2 of 3"), (1, "0 of 1")):
        sample.__dict__["batches"] = sample.batches[:batches]
        assert resume(sample) == f"stopped after {told} batches"


def test_a_loader_that_ends_where_it_goes_on(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, ended = Loader.__iter__, set[int]()
    monkeypatch.setattr(Loader, "restore", lambda self, state: ended.add(id(self)))
    monkeypatch.setattr(
        Loader, "__iter__", lambda self: iter(()) if id(self) in ended else usual(self)
    )
    finding = of_data(project, "resume")
    assert finding.state == "FAILED"
    assert "stopped after batch 0: it ends before batch 0" in finding.says


def test_other_masks_of_the_same_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": "a b", "completion": "c d"}] * 3
    made: list[Pipeline] = []
    for eos, count in (("turn", 3), ("none", 3), ("turn", 2)):
        dataset = DatasetConfig(
            name="d",
            data_files=rows[:count],
            prompt_field="prompt",
            completion_field="completion",
            train_on_eos=eos,
        )
        made.append(Pipeline(config(tmp_path, datasets=[dataset])).source().tokenize())
        made[-1].prepare()
    assert compare(made[0], made[0], "the same") == "3 documents"
    with pytest.raises(Failed, match="another loss mask without the end"):
        compare(*made[:2], "without the end")
    for one, other in ((made[0], made[2]), (made[2], made[0])):
        with pytest.raises(Failed, match=r"dataset d: (3 documents, 2|2 documents, 3) a time ago"):
            compare(one, other, "a time ago")


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


@pytest.mark.parametrize("where", ["default_tokenizer", "tokenize", "datasets", "kwargs"])
def test_the_reference_encodes_wherever_the_tokenizer_is_named(project: Path, where: str) -> None:
    data = RunConfig.load("train.yaml").data
    name, own = data.default_tokenizer, {}
    if where == "datasets":
        own = {"tokenizer": name}
    elif where == "kwargs":
        own = {"tokenizer_kwargs": {"backend": "gigatoken"}}
    data = dataclasses.replace(
        data,
        datasets=[dataclasses.replace(one, **own) for one in data.datasets],
        default_tokenizer=None if where in ("tokenize", "datasets") else name,
        tokenize=TokenizeStageConfig(default_tokenizer=name) if where == "tokenize" else None,
    )
    made = Sample(data, project / "sample", 200).by_reference().tokenized()
    assert {source.tokenizer.backend.name for source in made.values()} == {"tokenizers"}


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


def _by_two_steps(source: Any, target: Any) -> None:
    if os.path.exists(target):
        os.unlink(target)
        time.sleep(0.02)
    os.link(source, target)
    os.unlink(source)


DIE_WRITING = "import os, sys; open(sys.argv[1], 'wb', 0).write(b'n'); os._exit(9)"


@pytest.mark.parametrize(
    ("check", "says", "where", "name", "fault"),
    [
        ("writes are synced", "Input/output error", os, "fsync", _not_synced),
        ("renaming is atomic", "a reader saw", os, "replace", _by_copying),
        ("renaming is atomic", "a reader saw no file", os, "replace", _by_two_steps),
        ("locks exclude", "another process got it too", fcntl, "flock", lambda *_: None),
        ("clock", "from this machine's clock", machine.time, "time", lambda: 0.0),
        ("clock", "dated -", machine.time, "time", lambda: 9e9),
        ("limits", "9 open files are allowed", resource, "getrlimit", lambda _: (9, 9)),
        (
            "limits",
            "are free in",
            shutil,
            "disk_usage",
            lambda _: shutil._ntuple_diskusage(9, 9, 0),
        ),
        ("devices", "no such device", machine, "MULTIPLY", "raise SystemExit('no such device')"),
        ("a kill loses nothing", "it holds b'n", machine, "DIE", DIE_WRITING),
        (
            "a kill loses nothing",
            "killed while it was replaced, it holds b'old'",
            machine,
            "DIE",
            "raise SystemExit(1)",
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
    fault: Callable[..., Any] | str,
) -> None:
    monkeypatch.setattr(where, name, fault)
    finding = found(machine.machine_checks(tmp_path), check)
    assert finding.state == "FAILED"
    assert says in finding.says


def _ahead_by(seconds: float) -> Callable[..., Any]:
    return lambda: time.time_ns() / 1e9 + seconds


def _open_files(count: int) -> Callable[..., Any]:
    return lambda _: (count, 1 << 20)


def _free(num_bytes: int) -> Callable[..., Any]:
    return lambda _: shutil._ntuple_diskusage(1 << 40, 1, num_bytes)


@pytest.mark.parametrize(
    ("check", "where", "name", "good", "bad"),
    [
        ("clock", machine.time, "time", _ahead_by(-4), _ahead_by(-7)),
        ("clock", machine.time, "time", _ahead_by(4), _ahead_by(7)),
        ("limits", resource, "getrlimit", _open_files(1024), _open_files(1023)),
        ("limits", shutil, "disk_usage", _free(1 << 30), _free((1 << 30) - 1)),
    ],
)
def test_how_much_is_enough(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    where: Any,
    name: str,
    good: Callable[..., Any],
    bad: Callable[..., Any],
) -> None:
    asked = {one.name: one.try_out for one in machine.machine_checks(tmp_path)}[check]
    monkeypatch.setattr(where, name, good)
    asked()
    monkeypatch.setattr(where, name, bad)
    with pytest.raises(Failed):
        asked()


def test_no_limit_of_open_files_is_no_low_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = resource.RLIM_INFINITY  # which is -1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (endless, endless))
    finding = found(machine.machine_checks(tmp_path), "limits")
    assert finding.state == "ok"
    assert finding.says.startswith("any number of open files, ")


def test_what_breaks_is_found_and_the_rest_goes_on() -> None:
    def breaks() -> str:
        raise KeyError("x")

    first, second = examine([Check("a", breaks), Check("b", lambda: "well")])
    assert (first.state, first.says) == ("FAILED", "KeyError: 'x'")
    assert (second.state, second.says) == ("ok", "well")


def test_what_cannot_be_prepared_is_tried_and_told_once(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a traceback of the processes that would prepare it."""
    usual, tried = Sample._prepared, list[str]()

    def counted(self: Sample, name: str, config: Any) -> Any:
        tried.append(name)
        return usual(self, name, config)

    monkeypatch.setattr(Sample, "_prepared", counted)
    assert main(["doctor", "train.yaml", "--set", "data.datasets.0.content_field=nowhere"]) == 1
    said = capfd.readouterr()
    assert "Traceback" not in said.err, said.err
    assert said.out.count("FAILED") == 1
    assert "for what 'no row is lost' says" in said.out
    assert tried == ["sample"]


WELL = {"segments": [1, 1, 2, 0], "positions": [0, 1, 0, 0]}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"segments": [1, 1, 1, 1], "positions": [0, 1, 2, 3]}, None),
        ({"segments": [0, 0, 0, 0], "positions": [7, 7, 7, 7]}, None),
        ({"positions": [0, 1, 0, 9]}, None),
        ({"segments": [1, 1, 3, 0]}, "segments come as"),
        ({"segments": [2, 2, 1, 0]}, "segments come as"),
        ({"segments": [1, 2, 1, 0]}, "segments come as"),
        ({"positions": [0, 1, 2, 0]}, "slot 2: positions do not restart there"),
        ({"positions": [1, 2, 0, 0]}, "slot 0: positions do not restart there"),
        ({"positions": [0, 0, 0, 0]}, "slot 1: positions do not restart there"),
    ],
)
def test_rows_that_are_not_well_formed(changed: dict[str, list[int]], says: str | None) -> None:
    row = WELL | changed
    batch = {SEGMENT_IDS: np.array([WELL["segments"], row["segments"]])}
    batch[POSITION_IDS] = np.array([WELL["positions"], row["positions"]])
    sample: Any = SimpleNamespace(batches=[batch])
    if says is None:
        assert rows_are_well_formed(sample) == "1 batches"
        return
    with pytest.raises(Failed, match=f"batch 0, row 1.*{says}"):
        rows_are_well_formed(sample)
