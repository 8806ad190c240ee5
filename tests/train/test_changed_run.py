"""A run whose data was changed under way, as files and commands tell it afterwards."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from easypipe import train_bpe
from easypipe.cli.app import run as command
from easypipe.core.config import from_dict
from easypipe.history import spans_of
from easypipe.run import Inputs, RunConfig, train
from easypipe.stages.reports.plan_report import PlanReport, joined
from easypipe.train.events import TrainEvent
from easypipe.train.record import read_changes, read_kept, write_changes, write_kept
from easypipe.train.report.numbers import Curves
from easypipe.train.report.page import numbers_of
from easypipe.train.report.pictures import mixture_lines
from easypipe.train.signals import Interrupted
from pipelines import texts

# What each part of the run is trained with: to which step, and with what beside the config.
# what lies on it is planned without it
MESH = ["train.mesh={data: -1}", "data.load.mesh={data: -1}", "data.load.partition_spec=[data]"]
PARTS = (
    (6, ["data.load.batch_size=4"], []),
    (9, ["data.load.batch_size=8"], ["train.steps", "loader.batch_size", "loader.config"]),
    (
        12,
        ["data.load.batch_size=8", "data.mix.weights={a: 0.9, b: 0.1}", *MESH],
        ["train.steps", "loader.plan"],
    ),
)
# first row of a step, and how many
ROWS = [*((4 * step, 4) for step in range(6)), *((24 + 8 * step, 8) for step in range(6))]


def given(part: int, folder: Path, *more: str) -> list[str]:
    steps, overrides, changes = PARTS[part]
    values = [
        *overrides,
        f"train.steps={steps}",
        f"train.output_dir={folder / 'out'}",
        f"train.resume_changes=[{','.join(changes)}]",
        *more,
    ]
    return [str(folder / "run.yaml"), *(word for value in values for word in ("--set", value))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that went through all PARTS."""
    folder = tmp_path_factory.mktemp("changed")
    train_bpe(texts(60), 280, ["<|endoftext|>"], folder / "tokenizer")
    for name, rows in (("a", texts(60)), ("b", texts(60, 3, 90))):
        pq.write_table(pa.table({"text": rows}), folder / f"{name}.parquet")
    values = {
        "data": {
            "datasets": [
                {"name": name, "data_files": str(folder / f"{name}.parquet")} for name in "ab"
            ],
            "default_tokenizer": str(folder / "tokenizer"),
            "mix": {"weights": {"a": 0.5, "b": 0.5}, "unit": "tokens"},
            "pack": {"seq_length": 32},
            "load": {"num_epochs": None},
            "cache_dir": str(folder / "cache"),
            "seed": 1,
        },
        "model": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
        },
        "train": {"log_every": 1, "optimizer": {"learning_rate": 0.01}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    for part in range(len(PARTS)):
        assert command(["train", *given(part, folder), "--samples", "0"]) == 0
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """The run again, whose files may be changed. Its data is read where it stands."""
    shutil.copytree(run / "out", tmp_path / "out")
    shutil.copy(run / "run.yaml", tmp_path)
    return tmp_path


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]


def told(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> Any:
    assert command(arguments) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert command(arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_folder_records_every_change_with_its_step(run: Path) -> None:
    first, second = read_changes(run / "out")
    assert (first["step"], first["row"], second["step"], second["row"]) == (6, 24, 9, 48)
    assert first["changed"].keys() == {
        "train.steps",
        "loader.batch_size",
        "loader.config",
        "data.load.batch_size",
    }
    assert first["changed"]["loader.batch_size"] == "was 4, is 8"
    assert second["changed"].keys() >= {"train.steps", "loader.plan", "data.mix.weights.a"}
    assert first["before"]["config"]["data"]["load"]["batch_size"] == 4
    assert second["before"]["components"].keys() == {"sources", "tokenizer", "config", "plan"}


def test_changes_of_the_data_alone_begin_another_span(copied: Path) -> None:
    folder = copied / "out"
    spans, (first, second) = spans_of(folder), read_changes(folder)
    assert [(span.first, span.row) for span in spans] == [(0, 0), (6, 24), (9, 48)]
    between = {**first, "step": 7, "row": 32, "changed": {"train.steps": "was 9, is 12"}}
    write_kept(folder / "changes.json", [first, between, second])
    assert spans_of(folder) == spans


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_every_step_is_explained_as_it_was_read_whichever_part_s_config_is_given(
    run: Path, capsys: Any, part: int
) -> None:
    lines = metrics(run)
    assert len(lines) == 12
    for step in range(12) if part == 0 else (5, 6, 8, 9):
        explained = told(capsys, ["explain", *given(part, run), "--step", str(step), "--json"])
        assert explained["step"] == step
        first, count = ROWS[step]
        assert [row["number"] for row in explained["rows"]] == list(range(first, first + count))
        assert (
            sum(
                s["slot_stop"] - s["slot_start"]
                for row in explained["rows"]
                for s in row["segments"]
            )
            == lines[step]["num_tokens"]
        )


def test_the_plan_counts_what_each_part_read(run: Path, capsys: Any) -> None:
    seen = Counter()
    for step in range(12):
        for row in told(capsys, ["explain", *given(2, run), "--step", str(step), "--json"])["rows"]:
            for segment in row["segments"]:
                seen[segment["dataset"]] += segment["slot_stop"] - segment["slot_start"]
    written = json.loads((run / "out" / "plan.json").read_text())
    planned = told(capsys, ["plan", *given(2, run), "--json"])
    for plan in (written, planned):
        assert {one["name"]: one["tokens_placed"] for one in plan["datasets"]} == dict(seen)
        assert (
            plan["slots"] - plan["padding"]
            == seen.total()
            == sum(line["num_tokens"] for line in metrics(run))
        )
        assert (plan["steps"], plan["rows"]) == (12, 72)
        assert {one["name"]: one["token_share"] for one in plan["datasets"]} == pytest.approx(
            {name: count / seen.total() for name, count in seen.items()}
        )
        assert plan["datasets"][0]["requested"] == pytest.approx((48 * 0.5 + 24 * 0.9) / 72)
        [changed] = [one for one in plan["notes"] if one.startswith("changed steps 7 to 9: ")]
        assert "data.load.batch_size was 4, is 8" in changed
        assert "loader.batch_size" not in changed, "one change, told once"
        assert [tuple(one) for one in plan["sizes"]] == [(6, 4), (6, 8)]
    lines = mixture_lines(written)
    assert lines["a"]["step"] == list(range(1, 13))
    assert lines["a"]["asked for"] == pytest.approx([0.5] * 9 + [0.9] * 3)
    assert lines["a"]["so far"][-1] == pytest.approx(seen["a"] / seen.total(), abs=1e-6)
    assert told(capsys, ["plan", *given(1, run), "--json", "--steps", "8"])["rows"] == 6 * 4 + 2 * 8


def test_rows_that_changed_their_length_are_told_with_both(copied: Path, capsys: Any) -> None:
    shorter = ["data.pack.seq_length=24", "train.steps=14"]
    shorter += ["train.resume_changes=[train.steps, loader.plan]"]
    assert command(["train", *given(2, copied, *shorter), "--samples", "0"]) == 0
    capsys.readouterr()
    assert command(["plan", *given(2, copied, *shorter)]) == 0
    said = capsys.readouterr().out
    assert "rows    88 of 32 or 24 slots, " in said
    planned = told(capsys, ["plan", *given(2, copied, *shorter), "--json"])
    assert planned["slots"] == 72 * 32 + 16 * 24
    assert (
        told(capsys, ["plan", *given(2, copied, *shorter), "--json", "--steps", "12"])[
            "seq_lengths"
        ]
        == []
    )


def test_a_joined_plan_names_the_steps_of_a_note_once() -> None:
    def part(notes: tuple[str, ...], size: int) -> PlanReport:
        return PlanReport(
            name="mixed",
            steps=15,
            steps_available=None,
            batch_size=size,
            sizes=((15, size),),
            rows=15 * size,
            rows_left_over=0,
            notes=notes,
        )

    own = "steps 1 to 15: a has 75.80 % of the tokens"
    parts = [part((own, "a is read 2 times", "of both"), 8), part(("of both",), 12)]
    report = joined(parts, ["steps 1 to 15", "from step 16"])
    assert report.notes == (own, "steps 1 to 15: a is read 2 times", "of both")
    assert "steps   30: 15 of 8 rows, 15 of 12 rows (never ends)" in str(report)
    assert "steps   15 of 8 rows (never ends)" in str(parts[0])


def test_a_run_that_was_stopped_has_its_plan(run: Path, tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if event.kind == "step" and event.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    config = RunConfig.load(run / "run.yaml", ["train.steps=9", f"train.output_dir={tmp_path}"])
    with pytest.raises(Interrupted):
        train(config, listener=stop)
    written = read_kept(tmp_path / "plan.json")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 4 <= written["steps"] == len(lines) < 9
    placed = sum(one["tokens_placed"] for one in written["datasets"])
    assert placed == sum(line["num_tokens"] for line in lines)


def test_the_report_tells_of_the_changes(copied: Path) -> None:
    assert command(["report", str(copied / "out")]) == 0
    page = re.sub(r"<[^>]+>", " ", (copied / "out" / "report.html").read_text())
    for words in (
        r"after step 6\s+loader\.batch_size\s+was 4, is 8",
        r"after step 9\s+data\.mix\.weights\.a\s+was 0\.5, is 0\.9",
    ):
        assert re.search(words, page)
    (copied / "out" / "changes.json").unlink()
    plan = read_kept(copied / "out" / "plan.json")
    write_kept(copied / "out" / "plan.json", plan | {"steps": 6})
    assert command(["report", str(copied / "out")]) == 0
    page = (copied / "out" / "report.html").read_text()
    assert "nothing was changed while it ran" in page
    assert "counted for the first 6 steps" in page, "it had ended there once, and has gone on"


def test_what_cannot_be_known_is_refused(copied: Path, capsys: Any) -> None:
    other = refused(capsys, ["explain", *given(2, copied, "data.seed=5"), "--step", "3"])
    assert "out: the run in it read other data than this config describes: plan differ" in other
    assert (
        command(
            [
                "explain",
                *given(2, copied, "data.seed=5", f"train.output_dir={copied / 'new'}"),
                "--step",
                "3",
            ]
        )
        == 0
    )
    capsys.readouterr()
    plan = told(capsys, ["plan", *given(2, copied, "data.seed=5"), "--json"])
    assert (
        "holds a run that used different data (plan differ): this is the plan of a new run"
        in plan["notes"][0]
    )
    changes = read_changes(copied / "out")
    gone = json.loads(json.dumps(changes))
    gone[0]["before"]["components"]["sources"] = "0" * 32  # as if the files had been others then
    for before, said in (
        (
            gone[0]["before"],
            "steps 1 to 6 read other data than there is now: sources changed since",
        ),
        (None, "not record"),
    ):
        (copied / "out" / "changes.json").write_text(
            json.dumps([changes[0] | {"before": before}, changes[1]])
        )
        assert said in refused(capsys, ["explain", *given(2, copied), "--step", "5"])
        told(capsys, ["explain", *given(2, copied), "--step", "6", "--json"])
        plan = told(capsys, ["plan", *given(2, copied), "--json"])
        assert plan["slots"] - plan["padding"] == sum(
            line["num_tokens"] for line in metrics(copied)[6:]
        )
        assert any(note.startswith("steps 1 to 6 are not counted: ") for note in plan["notes"])
        nothing = refused(capsys, ["plan", *given(2, copied, "train.steps=6")])
        assert re.search(r"out: steps 1 to 6 are not counted: .* Bring back the files", nothing)
    (copied / "out" / "changes.json").write_text("[3]")
    assert "changes.json: damaged: it does not hold what a run" in refused(
        capsys, ["explain", *given(2, copied), "--step", "5"]
    )


def test_a_run_that_goes_back_forgets_what_came_after(tmp_path: Path) -> None:
    change = {"row": 24, "changed": {"loader.plan": "x"}, "before": None}
    write_changes(tmp_path, 3, None)
    assert not (tmp_path / "changes.json").exists(), (
        "where nothing was changed there is nothing to say"
    )
    write_changes(tmp_path, 6, change)
    write_changes(tmp_path, 9, change | {"row": 48})
    write_changes(tmp_path, 12, None)
    assert [one["step"] for one in read_changes(tmp_path)] == [6, 9]
    # killed, and begun again as it was before step 9
    write_changes(tmp_path, 9, None, [{"batch": 6, "row": 24, "plan": ["a", "b"]}])
    assert [one["step"] for one in read_changes(tmp_path)] == [6]
    write_changes(
        tmp_path,
        20,
        None,
        [
            {"batch": 6, "row": 24, "plan": ["a", "b"]},
            {"batch": 15, "row": 99, "sources": ["a", "b"]},
        ],
    )
    assert read_changes(tmp_path)[1] == {
        "step": 15,
        "row": 99,
        "changed": {"loader.sources": "another"},
        "before": None,
    }
    write_changes(tmp_path, 0, None)
    assert read_changes(tmp_path) == []


@pytest.mark.parametrize("streaming", [False, True])
def test_what_was_drawn_is_told_while_it_trains(run: Path, tmp_path: Path, streaming: bool) -> None:
    """The flow of every dataset goes on to the rows of the run, though a mixture restarts."""
    values = yaml.safe_load((run / "run.yaml").read_text())
    values["data"]["load"] = {"batch_size": 4, "num_epochs": None}
    if streaming:
        values["data"] |= {
            "streaming": True,
            "num_streams": 1,
            "mix": {"weights": {"a": 1, "b": 1}},
        }
    values["train"] |= {"steps": 10, "output_dir": str(tmp_path), "checkpoint": {"every": 1}}
    told: dict[int, int] = {}

    def flowing() -> dict[str, int]:
        links = numbers_of(tmp_path, Curves({"step": 0}, {"step": 0}))["flows"]
        ends = ("placed", "in the run's rows")
        into: Counter[str] = Counter()
        for link in links:
            name, _, word = link["target"].partition(": ")
            if word in ends:
                into[name] += link["value"]
        return dict(into)

    def listen(event: TrainEvent) -> None:
        if event.kind == "step":
            told[event.step] = sum(flowing().values())

    train(from_dict(RunConfig, values), listener=listen)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seen = {line["step"]: line["num_tokens"] for line in lines}
    until = [0, *itertools.accumulate(seen[step] for step in range(1, 11))]
    at_last = flowing()
    assert set(at_last) == {"a", "b"}
    if streaming:  # windows are made before their rows are read
        assert sum(at_last.values()) >= until[10]
        assert told[3] > 0
    else:
        assert sum(at_last.values()) == until[10]
        # counted at the checkpoints of steps 1, 2, 3, 4, 5, 7 and 9
        assert [told[step] for step in (3, 7, 10)] == [until[2], until[5], until[9]]


def test_a_signal_is_answered_with_the_checkpoint_before_anything_is_counted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = yaml.safe_load((run / "run.yaml").read_text())
    values["data"]["load"] = {"batch_size": 4, "num_epochs": None}
    values["train"] |= {"steps": 10, "output_dir": str(tmp_path), "checkpoint": {"every": 5}}
    counted: list[tuple[int, bool]] = []

    def count(self: Inputs, folder: Path, steps: int) -> None:
        counted.append((steps, (folder / "checkpoints" / str(steps)).is_dir()))

    def stop(event: TrainEvent) -> None:
        if (event.kind, event.step) == ("step", 2):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Inputs, "_write_drawn", count)
    with pytest.raises(Interrupted) as stopped:
        train(from_dict(RunConfig, values), listener=stop)
    assert counted == [(stopped.value.step, True)]
