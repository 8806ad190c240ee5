"""The command line: what it prints, what it returns, and that an error is one line."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from easypipe import ConfigError, Pipeline, __version__
from easypipe.cli import main
from easypipe.cli.train import _beginnings
from easypipe.core.errors import LedgerError
from easypipe.save.saved import MANIFEST
from pipelines import mixed_file, tokenizer
from web import web_server


@pytest.fixture
def pipeline_yaml(tmp_path: Path) -> Path:
    return mixed_file(tmp_path)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("quickstart", "prepare", "train"))
    for command in ("quickstart", "prepare", "train"):
        assert main([command, "--help"]) == 0


def test_tokens_that_were_there_are_told_of_no_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"input_ids": [[1, 2, 3]] * 9}), tmp_path / "tokens.parquet")
    values = {
        "datasets": [{"name": "posts", "data_files": str(tmp_path / "tokens.parquet")}],
        "default_tokenizer": tokenizer(),
        "pack": {"seq_length": 32},
        "cache_dir": str(tmp_path / "cache"),
        "seed": 1,
    }
    (tmp_path / "tokens.yaml").write_text(yaml.safe_dump(values))
    assert main(["prepare", str(tmp_path / "tokens.yaml")]) == 0
    text = capsys.readouterr().out
    assert "pack posts: " in text
    assert "tokenize posts: " not in text


def test_set_changes_a_value(pipeline_yaml: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert (
        main(
            [
                "prepare",
                str(pipeline_yaml),
                "--set",
                "pack.seq_length=32",
                "--set",
                f"save.output_dir={other}",
            ]
        )
        == 0
    )
    assert json.loads((other / MANIFEST).read_text())["tokens"]["seq_length"] == 32


def test_prepare_a_run_config_needs_no_jax(pipeline_yaml: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    held_out = {"datasets": [{"data_files": str(tmp_path / "data" / "docs" / "a.jsonl")}]}
    run.write_text(
        yaml.safe_dump(
            {
                "data": yaml.safe_load(pipeline_yaml.read_text()),
                "train": {"output_dir": "run"},
                "eval": {"docs": held_out},
            }
        )
    )
    script = (
        "import sys; from easypipe.cli import main; code = main(sys.argv[1:]); assert 'jax' "
        "not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "prepare", str(run)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "eval.docs" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "pack.seq_lenght=32"], "easypipe: pack.seq_lenght: unknown key"),
        (
            ["--set", "pack.seq_length=0"],
            "easypipe: pack.seq_length: 0 is not a row length. Give 1 to 16777216 tokens.",
        ),
        (["--set", "datasets.0.data_files=nowhere.jsonl"], "no such file or folder"),
        (["--set", "mix.weights={cod: 1, docs: 1}"], "Did you mean 'code'?"),
        (["--set", "nonsense"], "easypipe: nonsense: not of the form key.path=value"),
        (["--set", "default_tokenizer=./nowhere"], "nowhere"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(
    pipeline_yaml: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(pipeline_yaml), *arguments]) == 2
    text = capsys.readouterr().err
    assert message in text
    assert "Traceback" not in text
    assert sum(line.startswith("easypipe: ") for line in text.splitlines()) == 1


@pytest.mark.parametrize("command", ["prepare", "plan", "preview", "explain", "train"])
@pytest.mark.parametrize(
    ("wrong", "at"),
    [
        ({"mix": {"weights": {"cod": 1.0, "docs": 1.0}}}, "mix.weights.cod"),
        ({"pack": {"seq_length": 64, "eos_token_id": 3}}, "pack.eos_token_id"),
        ({"pack": {"seq_length": 2, "oversize": "drop"}}, "pack.oversize"),
    ],
    ids=["config", "stage", "plan"],
)
def test_errors_name_keys_as_the_file_does(
    command: str,
    wrong: dict[str, dict[str, object]],
    at: str,
    pipeline_yaml: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = yaml.safe_load(pipeline_yaml.read_text()) | {"seed": 1} | wrong
    whole, part = tmp_path / "run.yaml", tmp_path / "data.yaml"
    training = {"output_dir": str(tmp_path / "run"), "steps": 1}
    whole.write_text(yaml.safe_dump({"data": data, "train": training}))
    part.write_text(yaml.safe_dump(data))
    options = ["--step", "0"] if command == "explain" else []
    assert main([command, str(whole), *options]) == 2
    assert f"easypipe: data.{at}: " in capsys.readouterr().err
    if command != "train":
        assert main([command, str(part), *options]) == 2
        assert f"easypipe: {at}: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prepare", "plan", "preview", "explain", "train"])
@pytest.mark.parametrize(
    ("wrong", "at"),
    [
        ({"model": {"hidden_size": 64}}, "model.hidden_size"),  # the 6 heads do not divide it
        ({"train": {"optimizer": {"learning_rate": -1}}}, "train.optimizer.learning_rate"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_rows_are_read(
    command: str,
    wrong: dict[str, dict[str, object]],
    at: str,
    pipeline_yaml: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = yaml.safe_load(pipeline_yaml.read_text()) | {"seed": 1}
    data["datasets"][0]["data_files"] = "nowhere.jsonl"
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"data": data, "train": {"output_dir": "run"}} | wrong))
    assert main([command, str(path), *(["--step", "0"] if command == "explain" else [])]) == 2
    assert f"easypipe: {at}: " in capsys.readouterr().err


def test_errors_of_held_out_data_name_their_entry(
    pipeline_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = yaml.safe_load(pipeline_yaml.read_text()) | {"seed": 1}
    held_out = {"datasets": data["datasets"], "mix": {"weights": {"cod": 1.0, "docs": 1.0}}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"data": data, "train": {}, "eval": {"held": held_out}}))
    assert main(["prepare", str(path)]) == 2
    assert "easypipe: eval.held.mix.weights.cod: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--steps", "--steps is a key of the config: --set train.steps=VALUE"),
        ("--learning-rate", "--set train.learning_rate=VALUE"),
        ("--stepz", None),
    ],
)
def test_an_option_that_is_a_key_of_the_config(
    option: str, told: str | None, pipeline_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(pipeline_yaml), option, "5"]) == 2
    said = capsys.readouterr().err
    assert "No such option" in said
    assert ("is a key of the config" in said) is (told is not None)
    assert told is None or told in said
    assert main(["discover", str(pipeline_yaml), option, "5"]) == 2
    assert "--set" not in capsys.readouterr().err, "it reads no config"


def test_a_missing_config_and_a_wrong_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(tmp_path / "nowhere.yaml")]) == 2
    assert "no such file. Give the path of a YAML file." in capsys.readouterr().err
    assert main(["explain", str(tmp_path), "--step", "1"]) == 2
    assert "this is a folder. Give the path of a YAML file." in capsys.readouterr().err
    (tmp_path / "run.yaml").touch()
    assert main(["explain", str(tmp_path), "--step", "1"]) == 2
    assert "this is a folder. Give the path of its run.yaml." in capsys.readouterr().err
    assert main(["prepar"]) == 2
    assert main(["prepare", "--nonsense"]) == 2
    unknown = tmp_path / "x.yaml"
    unknown.write_text("data: {datasets: [{data_files: x}]}\nmodle: {}\n")
    assert main(["prepare", str(unknown)]) == 2
    assert "modle: unknown key (have: data, model, train, eval)" in capsys.readouterr().err


def test_debug_shows_the_traceback(pipeline_yaml: Path) -> None:
    with pytest.raises(ConfigError):
        main(["prepare", str(pipeline_yaml), "--set", "pack.seq_length=0", "--debug"])


def test_failures_that_are_not_the_users_exit_with_1(
    pipeline_yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leak(*_: object, **__: object) -> None:
        raise LedgerError(at="pack.code", problem="1 documents lost")

    monkeypatch.setattr("easypipe.jobs.prepare_data", leak)
    assert main(["prepare", str(pipeline_yaml)]) == 1
    monkeypatch.setattr("easypipe.jobs.prepare_data", lambda *_, **__: 1 / 0)
    assert main(["prepare", str(pipeline_yaml)]) == 1
    assert (
        "ZeroDivisionError: division by zero. This is a bug in easypipe; run again with "
        "--debug" in capsys.readouterr().err
    )


def test_ctrl_c_leaves_what_is_committed(
    pipeline_yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("easypipe.jobs.prepare_data", interrupted)
    assert main(["prepare", str(pipeline_yaml)]) == 130
    assert "stopped; run the same command again to continue" in capsys.readouterr().err


def test_sigterm_stops_a_command_with_a_word(pipeline_yaml: Path) -> None:
    """While it waits for a server; a second one ends whatever it does."""
    with web_server() as server:
        server.faults.extend(["hang"] * 99)
        values = yaml.safe_load(pipeline_yaml.read_text())
        values["datasets"][0]["data_files"] = f"{server.url}/a.jsonl"
        pipeline_yaml.write_text(yaml.safe_dump(values))
        process = subprocess.Popen(
            [sys.executable, "-m", "easypipe", "prepare", str(pipeline_yaml)],
            stderr=subprocess.PIPE,
            text=True,
        )
        while not server.seen:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert said.endswith("easypipe: stopped; run the same command again to continue\n")


@pytest.mark.parametrize("unread", ["tokenizer/tokenizer.json", "cache/tokens/*/*.arrow"])
def test_a_file_that_one_may_not_read_is_named(tmp_path: Path, unread: str) -> None:
    shutil.copytree(tokenizer(), tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("some words\n")
    values = {"datasets": [{"name": "a", "data_files": "a.txt"}], "default_tokenizer": "tokenizer"}
    (tmp_path / "run.yaml").write_text(json.dumps(values | {"cache_dir": "cache", "seed": 1}))
    override = "-dac_override,-dac_read_search"  # by which root may read everything
    drop = (
        [] if os.getuid() else ["setpriv", f"--bounding-set={override}", f"--inh-caps={override}"]
    )
    if drop and not shutil.which(drop[0]):
        pytest.skip("root may read every file here")
    prepare = [*drop, sys.executable, "-m", "easypipe", "prepare", "run.yaml"]
    if unread.startswith("cache"):
        subprocess.run(prepare, cwd=tmp_path, check=True, capture_output=True)
        for manifest in (tmp_path / "cache" / "manifests").iterdir():
            manifest.unlink()
    [path] = tmp_path.glob(unread)
    path.chmod(0)
    done = subprocess.run(prepare, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Check the path and permissions." in " ".join(done.stderr.split())
    assert f"{path.relative_to(tmp_path)}: cannot be read: [Errno 13]" in done.stderr


def test_a_command_within_another_program_leaves_its_handler() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        assert main(["--version"]) == 0
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_before_a_command_began_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading the commands takes a second where the machine is cold."""

    class Loading:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "easypipe.cli.app", Loading())
    assert main(["--version"]) == 130
    assert capsys.readouterr().err == "easypipe: stopped; run the same command again to continue\n"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "one two three four"),
        ("a.jsonl", '{"text": "one two three four"}'),
        ("a.csv", "text\none two three four"),
        ("a.json", '[{"text": "one two three four"}]'),
    ],
)
def test_samples_begin_as_the_only_row_does(
    name: str, text: str, streaming: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(f"{text}\n")
    unit = {"text_unit": "file"} if name.endswith("txt") else {}
    datasets = [{"name": "a", "data_files": str(tmp_path / name), **unit}]
    values = {"datasets": datasets, "default_tokenizer": tokenizer(), "streaming": streaming}
    pipeline = Pipeline({**values, "seed": 1, "cache_dir": str(tmp_path / "cache")})
    assert _beginnings(pipeline.source().tokenize(), 3) == ["one two three"]


def test_a_stream_that_may_change_is_refused_by_the_key_of_the_run(
    pipeline_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = yaml.safe_load(pipeline_yaml.read_text()) | {"streaming": True, "seed": 1}
    del data["save"]
    model = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    path, run = tmp_path / "run.yaml", {"output_dir": str(tmp_path / "run"), "steps": 1}
    path.write_text(yaml.safe_dump({"data": data, "model": model, "train": run}))
    assert main(["train", str(path), "--samples", "0"]) == 0
    changes = "train.resume_changes=[train.steps,loader.plan,loader.config]"
    more = ["--set", "train.steps=2", "--set", "data.seed=2", "--set", changes]
    assert main(["train", str(path), *more]) == 2
    assert "easypipe: train.resume_changes: a stream can continue only" in capsys.readouterr().err


def test_train_and_its_refusals(
    pipeline_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
    }
    data = yaml.safe_load(pipeline_yaml.read_text()) | {
        "load": {"batch_size": 4, "num_epochs": None},
        "seed": None,
    }
    values = {
        "data": data,
        "model": model,
        "train": {"output_dir": str(tmp_path / "run"), "steps": 4, "checkpoint": {"every": 2}},
        "eval": {
            "docs": {"datasets": [{"data_files": str(tmp_path / "data" / "docs" / "a.jsonl")}]}
        },
    }
    del data["save"]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    assert main(["train", str(path), "--samples", "1"]) == 0
    text = capsys.readouterr().out
    assert text.index("compiling: the first step") < text.index("trained 4 steps: loss")
    assert "training continues" not in text
    [told] = re.findall(r"texts by the model:\n  » (.+)", text)
    rows = (tmp_path / "data" / "code" / "a.jsonl").read_text().splitlines()
    begin = json.loads(rows[0])["text"].split()[:3]
    assert ast.literal_eval(told).split()[:2] == begin[:2]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert "docs" in lines[-1]["eval"]
    for plot in ("loss", "mixture"):
        assert (tmp_path / "run" / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
    drawn = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (drawn["steps"], {dataset["name"] for dataset in drawn["datasets"]}) == (
        4,
        {"code", "docs"},
    )
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["data"]["seed"] is not None
    # finished: nothing is trained again, the drawn seed is remembered
    assert main(["train", str(path), "--samples", "0"]) == 0
    assert "all 4 steps are trained; to continue, set" in capsys.readouterr().out
    assert main(["train", str(path), "--samples", "1", "--prompt", "the quick"]) == 0
    told = capsys.readouterr().out
    assert "texts by the model:\n  » 'the quick" in told
    for change, message in (
        ("model.vocab_size=100", "model.vocab_size: 100, but the tokenizer"),
        (
            "data.load.mesh={data: 4}",
            "data.load.mesh: {'data': 4}, but training runs on dp. Leave it out.",
        ),
        (f"eval.docs.default_tokenizer={tokenizer(300)}", "is not the one of the training data"),
        ("data.load.batch_size=3", "belongs to another run"),
        ("data.pack.seq_length=32", "plan"),
    ):
        assert main(["train", str(path), "--set", change]) == 2, change
        assert message in capsys.readouterr().err


def test_the_installed_command(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "easypipe"
    if not command.exists():
        pytest.skip("easypipe is not installed as a command here")
    done = subprocess.run(
        [command, "prepare", "nowhere.yaml"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 2
    assert (
        done.stderr.strip() == "easypipe: nowhere.yaml: no such file. Give the path of a YAML file."
    )
