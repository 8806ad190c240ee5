"""What helps at a terminal: help with examples, keys explained, configs written, runs listed."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main
import yaml

from easypipe.cli import keys, main, show
from easypipe.cli.app import COMMANDS, app
from easypipe.cli.arguments import complete_config
from easypipe.cli.init import Kind
from easypipe.cli.terminal import Terminal
from easypipe.core.config import load_yaml
from easypipe.core.ledger import Ledger
from easypipe.core.locks import training
from easypipe.core.protocols import ProgressEvent
from easypipe.core.publication import Pushed
from easypipe.save.saved import SavedManifest, SavedShard
from easypipe.save.write_folder import SavedFolder
from easypipe.stages.save import SaveReport
from easypipe.train.events import TrainEvent
from easypipe.train.record import write_kept
from pipelines import jsonl, texts, tokenizer

ROOT = Path(__file__).parents[2]
HEAVY = ("numpy", "pyarrow", "pydantic", "jax", "fsspec", "yaml", "tokenizers", "rich")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> dict[str, object]:
    """Every command by what is typed for it."""
    found: dict[str, object] = {}
    for name, command in typer.main.get_command(app).commands.items():  # pyright: ignore
        inner = getattr(command, "commands", {})
        found |= {f"{name} {sub}": one for sub, one in inner.items()} or {name: command}
    return found


def test_the_start_loads_nothing_that_is_slow() -> None:
    code = f"import sys, easypipe.cli.app; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "easypipe", "--version"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+", done.stdout.strip())


@pytest.mark.parametrize("command", [*sorted(commands()), "cache", "kernels"])
def test_help_has_examples_that_the_command_takes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    examples = re.findall(rf"^ +easypipe ({command}.*)$", text, re.MULTILINE)
    assert examples, text
    for name in (one for one in commands() if one.startswith(command)):  # also of a group
        main([*name.split(), "--help"])
        text += capsys.readouterr().out.partition("Examples:")[0]
    options = set(re.findall(r"--?[\w-]+", text))
    used = set(re.findall(r"(?<=\s)--?[a-z][\w-]*", " ".join(examples)))
    assert used <= options, used - options


def test_no_line_of_help_is_cut_or_too_wide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], ["cache"], ["kernels"], *(command.split() for command in commands())):
        main([*words, "--help"])
        lines = capsys.readouterr().out.partition("Examples:")[0].splitlines()[1:]
        assert not [line for line in lines if len(line) > 80 or line.endswith("...")], words


def test_every_command_stands_once() -> None:
    assert len({name for name, _, _ in COMMANDS}) == len(COMMANDS)


def test_every_command_with_options_shows_one_in_its_examples() -> None:
    known = commands()
    for name, _, lines in COMMANDS:
        has = any(one.param_type_name == "option" for one in known[name].params)  # type: ignore[attr-defined]
        assert any(" -" in line for line in lines) == has, name
        assert {line.split()[0] for line in lines} == {name}


def test_kept_files_are_as_the_code_is(reference: ModuleType) -> None:
    for path, text in reference.kept_files().items():
        assert path.read_text(encoding="utf-8") == text, "run: python docs/reference.py"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_the_schema_takes_our_configs(path: Path) -> None:
    assert path.read_text().startswith("# yaml-language-server: $schema=easypipe.schema.json\n")
    assert (path.parent / "easypipe.schema.json").is_file()
    jsonschema.Draft202012Validator(keys.schema()).validate(load_yaml(path))


def test_the_schema_refuses_what_is_wrong() -> None:
    check = jsonschema.Draft202012Validator(keys.schema())
    good = load_yaml(ROOT / "configs/pretrain.yaml")
    for at, wrong in (("pack", {"seq_lenght": 8}), ("mix", {"unit": "words"}), ("seed", "x")):
        bad = good | {"data": good["data"] | {at: wrong}}
        [error] = check.iter_errors(bad)
        assert at in str(list(error.absolute_path)) or wrong == error.instance


def test_every_key_of_a_run_is_found_with_its_words() -> None:
    every = dict(keys.paths())
    assert {"train.optimizer.learning_rate", "data.datasets.data_files", "task.modality"} <= set(
        every
    )
    assert [path for path, node in every.items() if len(node["description"]) < 4] == []
    assert [path for path in every if keys.find(path) is None] == []


@pytest.mark.parametrize(
    "key",
    ["data.mix.weights.code", "data.datasets[0].name", "pack.seq_length", "eval.held_out.seed"],
)
def test_names_numbers_and_pipeline_keys_are_found(key: str) -> None:
    assert keys.find(key) is not None


@pytest.mark.parametrize("key", ["data.", "train.steps.0", "train.callbacks.0", "seed.x"])
def test_what_is_no_key_is_not_found(key: str) -> None:
    assert keys.find(key) is None


def test_config_tells_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "data.pack.seq_length"]) == 0
    assert capsys.readouterr().out == "data.pack.seq_length: int = 2048\n    Tokens of a row.\n"
    assert main(["config", "seq_length"]) == 0
    assert "data.pack.seq_length: int = 2048" in capsys.readouterr().out
    assert main(["config", "train.spikes"]) == 0
    assert "train.spikes.patience: int" in capsys.readouterr().out
    assert main(["config"]) == 0
    every = capsys.readouterr().out
    assert "train.optimizer: OptimizerConfig" in every
    assert not [line for line in every.splitlines() if line.startswith("eval.")]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("data.pack.seq_lenght", "data.pack.seq_length"),
        ("trian.optimizer", "train.optimizer"),
        ("lerning_rate", "learning_rate"),
    ],
)
def test_a_misspelt_key_names_the_near_one(
    wrong: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", wrong]) == 2
    assert near in capsys.readouterr().err
    assert main(["config", near]) == 0


def test_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == keys.schema()


def test_keys_are_completed() -> None:
    def completed(typed: str) -> list[str]:
        return [text for text, _ in keys.complete_key(typed)]

    assert completed("train.opt") == ["train.optimizer."]
    assert "train.optimizer.learning_rate=" in completed("train.optimizer.")
    assert completed("data.pack.strat") == ["data.pack.strategy="]
    assert completed("data.pack.strategy=f") == ["data.pack.strategy=first_fit"]
    assert completed("data.datasets.") == ["data.datasets.0."]
    assert "data.datasets.0.train_on=" in completed("data.datasets.0.train")
    assert completed("pac") == ["pack."]
    assert completed("nothing.") == []


def test_config_files_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    for name in ("a.yaml", "a.txt", "configs/b.yml", ".hidden.yaml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert complete_config("") == ["a.yaml", "configs/"]
    assert complete_config("configs/") == ["configs/b.yml"]
    assert complete_config("conf") == ["configs/"]
    assert complete_config("gone/") == []


def test_a_shell_completes(tmp_path: Path) -> None:
    env = os.environ | {
        "_EASYPIPE_COMPLETE": "complete_bash",
        "COMP_WORDS": "easypipe train a.yaml --set train.opt",
        "COMP_CWORD": "4",
    }
    code = "import sys; sys.argv[0] = 'easypipe'; from easypipe.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["train.optimizer."], done.stderr


@pytest.mark.parametrize("kind", [kind.value for kind in Kind])
def test_init_writes_a_config_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", kind]) == 0
    written = tmp_path / f"{kind}.yaml"
    assert written.read_bytes() == (ROOT / "configs" / written.name).read_bytes()
    commands = re.findall(r"^#   easypipe .*?(\S+\.yaml)", written.read_text(), re.MULTILINE)
    assert {*commands} == {written.name}
    assert (tmp_path / "easypipe.schema.json").is_file()
    assert "easypipe train" in capsys.readouterr().out
    written.write_text("seed: 1\n")
    assert main(["init", kind]) == 2
    assert "--force" in capsys.readouterr().err
    assert written.read_text() == "seed: 1\n"
    assert main(["init", kind, "--force"]) == 0
    assert written.read_bytes() == (ROOT / "configs" / written.name).read_bytes()


def test_init_at_home_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces the ~ of `--out=~/sft.yaml`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sft.yaml").write_text("seed: 1\n")
    assert main(["init", "sft", "--out=~/sft.yaml"]) == 2
    assert (tmp_path / "sft.yaml").read_text() == "seed: 1\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pretrain", "sft", "dpo"])
def test_what_init_writes_prepares(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On small data in the shape that the file asks for, with a tokenizer that is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EASYPIPE_CACHE", str(tmp_path / "cache"))
    assert main(["init", kind]) == 0
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    other = [said[0], {"role": "assistant", "content": "5, as I think"}]
    small = [f"data.default_tokenizer={tokenizer()}", "data.tokenize.num_workers=1"]
    if kind == "pretrain":
        for i, name in enumerate(("code", "web", "math")):
            jsonl(tmp_path / f"data/{name}/a.jsonl", [{"text": text} for text in texts(40, i + 1)])
            small += [f"data.datasets.{i}.data_files=data/{name}/a.jsonl"]
        small += ["data.datasets.0.content_field=text"]
    else:
        rows = {"sft": {"messages": said}, "dpo": {"chosen": said, "rejected": other}}[kind]
        name = {"sft": "data/chat/a.jsonl", "dpo": "data/preferences.jsonl"}[kind]
        jsonl(tmp_path / name, [rows] * 100)
        template = {
            "sft": "data.datasets.0.chat_template",
            "dpo": "data.datasets.0.prompt.template",
        }
        small += [f"{template[kind]}=chatml"]
        if kind == "sft":
            small += ["eval.held_out.datasets.0.chat_template=chatml"]
        small += ["model={}"]
    assert main(["prepare", f"{kind}.yaml", *(w for s in small for w in ("--set", s))]) == 0


@pytest.mark.slow
def test_what_init_writes_for_images_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    images = np.arange(64 * 20, dtype=np.uint8).reshape(20, 64)
    rows = {"image": [one.reshape(8, 8).tolist() for one in images], "label": [0, 1] * 10}
    pq.write_table(pa.table(rows), "digits.parquet")
    assert main(["init", "classify"]) == 0
    assert main(["plan", "classify.yaml", "--set", "data.batch_size=4"]) == 0
    assert "classes" in capsys.readouterr().out


def test_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, step in (("done", 10), ("half", 5), ("now", 3), ("odd", 1)):
        folder = tmp_path / "runs" / name
        (folder / "checkpoints").mkdir(parents=True)
        seen = [
            (step - 1, {"held_out": {"loss": 4.0}}),
            (step, {"held_out": {"loss": 3.0}}),
            (step, {}),
        ]
        lines = [json.dumps({"step": n, "loss": 2.5, "eval": one}) for n, one in seen]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        (folder / "run.yaml").write_text(yaml.safe_dump({"train": {"steps": 10}}))
    (tmp_path / "runs/done/checkpoints/10").mkdir()
    (tmp_path / "runs/half/checkpoints/6").mkdir()  # saved when it was stopped, and not logged
    (tmp_path / "runs/half/checkpoints/²").mkdir()
    (tmp_path / "runs/odd/metrics.jsonl").write_text("nothing\nmore\n")
    (tmp_path / "runs/done/within").mkdir()  # is not a run of its own
    (tmp_path / "runs/done/within/metrics.jsonl").write_text("")
    with training(tmp_path / "runs/now"):
        assert main(["runs", str(tmp_path), "--json"]) == 0
    found = {Path(one["folder"]).name: one for one in json.loads(capsys.readouterr().out)}
    states = {name: one["state"] for name, one in found.items()}
    assert states.pop("odd").startswith("damaged: ")
    assert states == {"done": "finished", "half": "stopped", "now": "training"}
    assert (found["done"]["step"], found["done"]["loss"]) == (10, 2.5)
    assert found["half"]["step"] == 6
    assert found["done"]["held_out"] == {"held_out": 3.0}
    assert main(["runs", str(tmp_path)]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "runs/done/checkpoints")]) == 2
    (tmp_path / "runs/done/run.yaml").write_text("train: {}\n")  # its data has ten steps
    write_kept(tmp_path / "runs/done/fingerprints.json", {"train": None, "eval": {}, "steps": 10})
    assert main(["runs", str(tmp_path / "runs/done"), "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)
    assert (one["state"], one["steps"]) == ("finished", 10)
    (tmp_path / "run.yaml").write_text("train: {steps: 10}\n")  # the config of the project
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
    (tmp_path / "runs/now/metrics.jsonl").unlink()  # has not trained a step
    (tmp_path / "runs/now/versions.json").write_text("{}")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4


@pytest.mark.parametrize(
    ("saved", "step", "state"),
    [
        ({"ended": "eval.held.loss is 2.5"}, 4, "finished"),
        ({"ended": None}, 4, "stopped"),
        ({}, 4, "stopped"),  # of a version that did not write it
        ([], 4, "stopped"),
        ({"ended": "eval.held.loss is 2.5"}, 5, "stopped"),  # it went on, and was killed
    ],
)
def test_a_run_that_a_callback_ended_for_good_is_listed_as_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: Any, step: int, state: str
) -> None:
    record = tmp_path / "run" / "checkpoints" / "4" / "run" / "data.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps(saved))
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
    for train in ("train: {steps: 12}\n", "train: {}\n"):
        (tmp_path / "run" / "run.yaml").write_text(train)
        assert main(["runs", str(tmp_path), "--json"]) == 0
        [one] = json.loads(capsys.readouterr().out)
        assert one["state"] == state
        state = state.replace("stopped", "not training")
    record.write_text("{")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)
    assert one["state"].startswith(f"damaged: {record}" if step == 4 else "not training")


@pytest.mark.parametrize(
    ("logged", "saved", "state"),
    [
        (12, {}, "finished"),
        (11, {}, "finished"),  # its last line is torn
        (11, {"unevaluated": {"step": 12}}, "stopped"),  # an evaluation is left
        (12, None, "stopped"),  # its checkpoints are gone
    ],
)
def test_a_run_is_finished_where_its_last_step_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logged: int, saved: Any, state: str
) -> None:
    record = tmp_path / "run" / "checkpoints" / "12" / "run" / "data.json"
    record.parents[2].mkdir(parents=True)
    if saved is not None:
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps(saved))
    lines = "".join(f'{{"step": {step}}}\n' for step in range(1, logged + 1))
    (tmp_path / "run" / "metrics.jsonl").write_text(lines + '{"step"')
    (tmp_path / "run" / "run.yaml").write_text("train: {steps: 12}\n")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)
    assert (one["state"], one["step"]) == (state, 12)


def test_progress_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line every half minute and of the last step, of training with the time to go."""
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    screen = io.StringIO()
    monkeypatch.setattr(show, "console", lambda: Terminal(file=screen, width=400))
    record = {"loss": 1.0}
    with show.training() as heard:
        for step in range(1, 12):
            heard(TrainEvent(kind="step", step=step, steps=11, record=record))
    said = screen.getvalue().splitlines()
    assert [line.split()[:2] for line in said] == [["step", n] for n in ("1", "4", "7", "10", "11")]
    assert "steps/s" in said[-2]
    assert "to go" in said[-2]


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ({"accuracy": 0.5, "ppl": 2.0}, "accuracy 50.00%"),
        ({"reward_accuracy": 0.25, "ppl": 2.0}, "reward accuracy 25.00%"),
        (
            {"reward_desirable": None, "reward_undesirable": 0.5, "ppl": 2.0},
            "reward of undesirable answers 0.500",
        ),
        (
            {"reward_desirable": 0.25, "reward_undesirable": 0.5, "ppl": 2.0},
            "reward of desirable answers 0.250",
        ),
        ({"ppl": 2.0}, "ppl 2.0"),
        ({"loss": 2500.0, "ppl": None}, "no ppl"),  # too large for a number, or not known
    ],
)
def test_evaluations_are_told(seen: dict[str, float | None], told: str) -> None:
    assert show.quality(seen) == told
    record = {"loss": 1.0} | seen
    line = show.training_line(TrainEvent(kind="step", step=1, steps=2, record=record))
    assert line.partition("  ")[2] == ("" if seen["ppl"] is None else told)


def test_the_numbers_of_a_step_are_one_line() -> None:
    record = {"loss": 1.0, "ppl": 2.7, "grad_norm": 0.5, "learning_rate": 1e-3, "mfu": 0.412}
    record |= {"tokens_per_second": 123456.0, "data_wait": 0.031}
    for more, quality, unit in (
        ({}, "ppl 2.7", "tok"),
        ({"accuracy": 0.5}, "accuracy 50.00%", "images"),
    ):
        event = TrainEvent(kind="step", step=1, steps=2, record=record | more)
        assert show.training_line(event) == (
            f"loss 1.0000  {quality}  grad 0.50  lr 1.00e-03  123,456 {unit}/s  MFU 41.2%  wait 3.1%"
        )


def test_nothing_of_progress_is_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Terminal(file=screen, width=80, force_terminal=True, _environ={})
    monkeypatch.setattr(show, "console", lambda: terminal)
    record = {"loss": 1.0, "ppl": 2.7, "grad_norm": 0.5, "learning_rate": 1e-3}
    record |= {"tokens_per_second": 123456.0, "mfu": 0.412, "data_wait": 0.031}
    with show.training() as heard:
        heard(TrainEvent(kind="step", step=1, steps=100, record=record))

    def event(done: int) -> ProgressEvent:
        where = {"stage": "tokenize", "dataset": "a-long-name-of-data", "unit": "rows"}
        return ProgressEvent(**where, done=done, total=10**6, num_bytes=done * 1000)

    with show.progress() as listener:
        for done in (1, 500_000):
            listener(event(done))
            time.sleep(0.01)  # of events at one instant no rate is known
    seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", " ", screen.getvalue())
    words = set(re.split(r"\s+", seen))
    assert {"loss", "ppl", "123,456", "tok/s", "MFU", "41.2%", "3.1%", "rows/s,", "go"} <= words
    assert "…" not in seen


def test_names_in_the_ledger_are_whole_at_80_columns() -> None:
    name = "eval.held_out.conversations"
    ledger = Ledger()
    ledger.add("tokenize", name, "tokens", into={"read": 10**9}, out={"written": 10**9})
    drawn = io.StringIO()
    Terminal(file=drawn, width=80, _environ={}).print(show.ledger_table(ledger))
    cells = [line.split("│")[2].strip() for line in drawn.getvalue().splitlines() if "│" in line]
    assert "".join(cells) == name


def test_every_number_of_a_preparation_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Terminal(file=screen, width=200, _environ={})
    monkeypatch.setattr(show, "console", lambda: terminal)
    ledger = Ledger()
    ledger.add("pack", "a", "tokens", into={"drawn": 1_200, "EOS": 34}, out={"placed": 1_234})
    ledger.add("save", "a", "rows", into={"read": 5_678}, out={"saved": 5_600, "null": 78})
    ledger.facts = {
        "tokenize.a.seconds": 2.5,
        "tokenize.a.megabytes_per_second": 1_500.25,
        "tokenize.a.ranges_reused": 1_007,
        "tokenize.a.encoder": "tokenizers",
        "tokenize.a.files_cut": 2,
        "tokenize.b.seconds": 0.125,
        "tokenize.b.encoder": "",
        "tokenize.c.seconds": 3.0,
        "tokenize.c.megabytes_per_second": 9.0,
        "tokenize.c.encoder": "",
        "pack.a.rows": 4_321,
        "pack.a.fill": 0.98765,
    }
    shard = SavedShard(name="", num_rows=1_500, num_tokens=9, num_bytes=2_600_000, checksum="")
    manifest = SavedManifest(
        fingerprint="",
        format="parquet",
        compression="zstd",
        schema=pa.schema([]),
        tokens=None,
        shards=(shard, shard),
        ledger={},
    )
    folders = [
        SavedFolder(
            dataset="a",
            path="out/a",
            manifest=manifest,
            num_read=9,
            resumed_shards=resumed,
            up_to_date=there,
            seconds=0.25,
            decided_by=None,
        )
        for resumed, there in ((0, False), (3, False), (3, True))
    ]
    pushed = [
        Pushed(
            repo_id="o/r",
            revision="main",
            commit="",
            url="https://hub/r",
            num_files=7,
            num_bytes=1_230_000,
            up_to_date=there,
            seconds=1.5,
        )
        for there in (True, False)
    ]
    report = SaveReport(folders=tuple(folders), ledger=ledger, pushed=tuple(pushed))
    show.show_report(report)
    said = screen.getvalue().splitlines()
    lines = [re.split("[│┃]", line)[1:-1] for line in said if "│" in line or "┃" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["stage", "dataset", "unit", "in", "out"],
        ["pack", "a", "tokens", "drawn 1,200 + EOS 34", "placed 1,234"],
        ["save", "a", "rows", "5,678", "saved 5,600, null 78"],
    ]
    saved = "saved a: 3,000 rows in 2 parquet shards, 5.2 MB"
    assert [line for line in said if line.startswith(("tokenize", "pack ", "saved", "pushed"))] == [
        "tokenize a: 2.50 s, 1,500.2 MB/s, by tokenizers",
        "tokenize a: 2 files without an end mark; how many rows are missing is not known",
        "tokenize b: 0.12 s, 0 ranges found finished",
        "pack a: 4,321 rows, 98.77% of their slots filled",
        f"{saved} (0.25 s): out/a",
        f"{saved} (0.25 s, 3 shards found finished): out/a",
        f"{saved} (up to date): out/a",
        "pushed 7 files, 1.2 MB (up to date): https://hub/r",
        "pushed 7 files, 1.2 MB (1.50 s): https://hub/r",
    ]


def test_one_set_for_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "config.yaml", "--set", "seed=1", "load.batch_size=2"]) == 2
    assert "each key needs its own --set: --set load.batch_size=2" in capsys.readouterr().err


def test_no_row_is_not_told_as_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(5, 3, 12)])
    config = {"datasets": [{"name": "a", "data_files": "a.jsonl"}], "seed": 1}
    settings = {"default_tokenizer": str(tokenizer()), "cache_dir": "cache"}
    pack = {"seq_length": 2, "oversize": "drop"}
    Path("a.yaml").write_text(json.dumps(config | settings | {"pack": pack}))
    assert main(["prepare", "a.yaml"]) == 0
    assert "pack a: 0 rows, nothing would be trained" in capsys.readouterr().out
