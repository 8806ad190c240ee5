"""What a run leaves behind, and the page that is made of it."""

from __future__ import annotations

import ast
import json
import re
import shutil
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from platform import platform, python_version
from typing import get_args

import jax
import pytest
import yaml
from flax import nnx

import easypipe
from easypipe.cli import main
from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, StateError, TrainError
from easypipe.history import spans_of
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.train.checkpoint.checkpoint import Checkpoints
from easypipe.train.config import (
    UNPAIRED,
    Measure,
    PreferenceConfig,
    SpikeConfig,
    TrainingConfig,
)
from easypipe.train.events import TrainEvent, TrainListener, null_listener
from easypipe.train.losses.loss import RECORDED
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.record import (
    check_record,
    read_changes,
    read_kept,
    recorded_datasets,
    write_changes,
    write_kept,
    write_versions,
)
from easypipe.train.report.page import page, write_report
from easypipe.train.report.pictures import MIXTURE, PLOTS
from easypipe.train.trainer import Trainer
from loader_support import MemoryCache, plan_rows, some_docs
from train.runs import Tiny, settings

SOURCE = Path(easypipe.__file__).parent
MESH = make_mesh({"data": 1}, devices=jax.devices()[:1])
CACHE = MemoryCache(some_docs([9] * 90, vocab_size=32), vocab_size=32)


class Dropping(Tiny):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs, dropout=0.2)


def loader(num_epochs: int | None = None) -> Loader:
    return Loader(
        plan_rows([CACHE], seq_length=12, num_epochs=num_epochs),
        LoadStageConfig(batch_size=8, num_epochs=num_epochs, mesh=MESH),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run <1>")
    how = {
        "steps": 6,
        "eval_every": 2,
        "eval_batches": 2,
        "spikes": SpikeConfig(window=4),
        "callbacks": {"best": {"metric": "eval.one.loss"}},
    }
    Trainer(
        Dropping, settings(folder, **how), loader(), {"one": loader(1), "two": loader(1)}, mesh=MESH
    ).run()
    return folder


def test_the_folder_says_how_and_on_what_it_was_trained(folder):
    config = from_dict(TrainingConfig, yaml.safe_load((folder / "run.yaml").read_text())["train"])
    assert (config.steps, config.spikes) == (6, SpikeConfig(window=4))
    (ran,) = json.loads((folder / "versions.json").read_text())["versions"]
    assert (ran["from_step"], ran["jax"], ran["device_kind"]) == (
        0,
        version("jax"),
        jax.devices()[0].device_kind,
    )
    assert {
        "python",
        "easypipe",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "numpy",
        "pyarrow",
        "tokenizers",
        "gigatoken",
    } <= set(ran)
    prints = json.loads((folder / "fingerprints.json").read_text())
    assert prints["train"] == dict(loader().state().components)
    assert set(prints["eval"]) == {"one", "two"}
    for name in ("loss", "learning_rate", "tokens_per_second", "data_wait"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_other_versions_are_added_and_the_same_are_not(folder, tmp_path):
    path = tmp_path / "versions.json"
    write_versions(tmp_path, 0)
    write_versions(tmp_path, 4)
    (first,) = read_kept(path)
    path.write_text(json.dumps([first | {"jax": "0.1"}]))  # as before there were checksums
    write_versions(tmp_path, 8)
    assert [(one["from_step"], one["jax"]) for one in read_kept(path)] == [
        (0, "0.1"),
        (8, version("jax")),
    ]
    # the run goes back to before these versions
    write_kept(path, [*read_kept(path), first | {"from_step": 12, "jax": "0.2"}])
    write_versions(tmp_path, 10)
    assert [one["from_step"] for one in read_kept(path)] == [0, 8]
    write_versions(tmp_path, 4)
    assert [(one["from_step"], one["jax"]) for one in read_kept(path)] == [
        (0, "0.1"),
        (4, version("jax")),
    ]
    # the run goes back to where they began
    write_kept(path, [first, first | {"from_step": 4, "jax": "0.2"}])
    write_versions(tmp_path, 4)
    assert [one["from_step"] for one in read_kept(path)] == [0]


def test_datasets_without_names_are_numbered(tmp_path):
    assert recorded_datasets(tmp_path) == []
    (tmp_path / "run.yaml").write_text("data: {datasets: [{name: a}, {}, {name: null}]}")
    assert recorded_datasets(tmp_path) == ["a", "dataset2", "dataset3"]


def test_changes_that_only_the_loader_knows_come_in_their_place(tmp_path):
    change = {"row": 40, "changed": {"data.seed": "was 1, is 2"}, "before": None}
    write_changes(tmp_path, 10, change, [{"batch": 3, "row": 12, "plan": "a"}])
    assert [one["step"] for one in read_changes(tmp_path)] == [3, 10]


def test_whatever_has_a_say_in_the_numbers_begins_an_entry_of_versions(tmp_path):
    path = tmp_path / "versions.json"
    here = write_versions(tmp_path, 0)
    assert (here["python"], here["platform"]) == (python_version(), platform())
    assert (here["devices"], here["processes"]) == (jax.device_count(), jax.process_count())
    for name in here:
        write_kept(path, [{"from_step": 0, **here, name: "another"}])
        write_versions(tmp_path, 8)
        assert [one[name] for one in read_kept(path)] == ["another", here[name]]


KEPT = (
    "restarts.json",
    "versions.json",
    "changes.json",
    "fingerprints.json",
    "ledger.json",
    "plan.json",
    "best.json",
)
DAMAGE = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b"[null]",
    b'[{"step": "1"}]',
    b'{"train": 3}',
    b'{"versions": [], "best": []}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage[:20].decode())
def test_damage_of_any_shape_is_told_and_stops_no_command(folder, tmp_path, caplog, damage):
    """The page says which file tells nothing; what decides what else is told of the run is an error
    that names it.
    """
    shutil.copytree(
        folder,
        tmp_path,
        dirs_exist_ok=True,
        ignore=lambda at, names: [name for name in names if name.endswith(".png")],
    )
    for name in KEPT:
        (tmp_path / name).write_bytes(damage)
    text = page([tmp_path])
    for name in KEPT:
        assert f"not known: {name} is damaged: " in text
        assert f"{tmp_path / name}: damaged: " in caplog.text
    with pytest.raises(
        StateError, match=r"fingerprints\.json: damaged: .*Move it away: what it says about the run"
    ):
        spans_of(tmp_path)
    (tmp_path / "fingerprints.json").write_bytes((folder / "fingerprints.json").read_bytes())
    with pytest.raises(StateError, match=r"changes\.json: damaged: .*Move it away"):
        spans_of(tmp_path)
    with pytest.raises(StateError, match=r"changes\.json: damaged: "):
        write_changes(tmp_path, 6, None)
    write_versions(tmp_path, 6)
    assert [one["from_step"] for one in read_kept(tmp_path / "versions.json")] == [6]
    assert (tmp_path / "versions-damaged.json").read_bytes() == damage
    assert "moved to versions-damaged.json, and started again" in caplog.text


@pytest.mark.parametrize("name", KEPT)
def test_no_changed_byte_is_believed(folder, tmp_path, name):
    value = {
        "versions.json": [{"from_step": 0, "jax": "1"}],
        "changes.json": [
            {"step": 6, "row": 24, "changed": {"train.steps": "was 1, is 2"}, "before": None}
        ],
        "fingerprints.json": {"train": None, "eval": {"a": {"plan": "0"}}},
        "ledger.json": {"entries": [{"in": {"drawn": 3}}], "facts": {}},
        "plan.json": {"steps": 5, "datasets": [], "by_step": []},
        "best.json": [{"step": 2, "loss": 0.5, "checkpoint": "checkpoints/2"}],
        "restarts.json": [{"step": 3, "time": "2026-01-31 10:00:00"}],
    }[name]
    path = tmp_path / name
    assert read_kept(path) is None
    write_kept(path, value)
    assert read_kept(path) == value
    written = path.read_bytes()
    for at in range(len(written)):
        path.write_bytes(written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :])
        with pytest.raises(StateError, match="damaged: "):
            read_kept(path)
    path.write_text(json.dumps(value))  # as earlier versions wrote it
    assert read_kept(path) == value


def test_a_checkpoint_holds_the_data_s_fingerprint_the_config_and_the_random_state(folder):
    with Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        step = checkpoints.latest()
        saved = checkpoints.run(step)
        described = checkpoints.describe(step)
    assert json.loads(saved["loader"]["text"])["components"] == dict(loader().state().components)
    assert saved["train"]["steps"] == 6
    assert {name for name in described if name.startswith("rest/dropout.rngs")}, (
        "the count and the key that dropout draws from"
    )


class Tables(HTMLParser):
    """The text of every element, and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.sources, self.open = "", [], []

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("img", "meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + " "


def test_the_page_holds_everything_and_fetches_nothing(folder, capsys):
    (folder / "ledger.json").write_text(
        json.dumps(
            {
                "entries": [
                    {
                        "stage": "pack",
                        "dataset": "<code>",
                        "unit": "tokens",
                        "in": {"drawn": 1234},
                        "out": {"placed": 1234},
                    }
                ]
            }
        )
    )
    dataset = {
        "name": "code",
        "requested": 0.5,
        "realised": 0.25,
        "drawn": 7,
        "epochs": 0.5,
        "tokens_placed": 99,
    }
    by_step = [{"step": 6, "requested": {"code": 1.0}, "realised": {"code": 1.0}}]
    (folder / "plan.json").write_text(
        json.dumps({"unit": "rows", "steps": 6, "datasets": [dataset], "by_step": by_step})
    )
    skipped = {"dataset": "code", "file": "a.txt", "row": 77}
    (folder / "rollbacks.jsonl").write_text(
        json.dumps({"step": 5, "to": 2, "batch_of_step": 4, "documents": [skipped]}) + "\n"
    )
    assert main(["report", str(folder)]) == 0
    assert "report.html" in capsys.readouterr().out
    written = (folder / "report.html").read_text()
    seen = Tables()
    seen.feed(written)
    assert not seen.open
    assert not seen.sources
    for text in (
        "run <1>",
        "<code>",
        "placed 1,234",
        "code a.txt row 77",
        "checkpoints/",
        "device_kind",
        "output_dir:",
        "eval.one.loss",
        "two",
    ):
        assert text in seen.text, text


def test_it_goes_where_it_is_told_and_long_tables_lose_their_middle(folder, tmp_path):
    lines = [{"step": step, "to": 0, "batch_of_step": step} for step in range(1, 501)]
    kept = (folder / "rollbacks.jsonl").read_bytes()
    (folder / "rollbacks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = write_report(folder, tmp_path / "page.html").read_text()
    (folder / "rollbacks.jsonl").write_bytes(kept)
    assert "… 300 more …" in written


def names_of_a_run() -> set[str]:
    """The metrics that the code may log, and the files that a run may write."""
    told = {name for loss in ("sigmoid", *UNPAIRED) for name in PreferenceConfig(loss=loss).tells}
    measured = {*get_args(Measure)} - {"sources"}
    by_dataset = {f"{name}/NAME" for name in (*measured, "nll", "share")}
    pictures = {f"{name}.png" for name in (*PLOTS, MIXTURE)}
    written = {
        node.value
        for path in (SOURCE / "train").rglob("*.py")
        if "pretrained" not in path.parts and path.name != "trackers.py"  # others' files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"\w[\w-]*\.(jsonl?|png|html|yaml)", node.value)
    }
    written |= {"checkpoints/", "arrays/", "run/", "heartbeat-PROCESS.json", "mlflow.db"}
    written |= {f"{tracker}/" for tracker in ("tensorboard", "wandb", "mlflow", "profile")}
    told |= measured | by_dataset | pictures | written
    return {*RECORDED, *told, "nll", "accuracy", "kl"}


def test_every_metric_and_file_of_a_run_has_its_line() -> None:
    rows = re.findall(
        r"^\| (`.*?) \|", (Path(__file__).parents[2] / "docs/run_folder.md").read_text(), re.M
    )
    page = {part.rpartition("STEP/")[2] for row in rows for part in re.findall(r"`(.+?)`", row)}
    names = names_of_a_run()
    assert len(names) > 50
    assert not names - page


def test_a_folder_that_is_no_run_is_said_to_be_none(folder, tmp_path, capsys):
    for wrong, message in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, "holds no metrics.jsonl"),
    ):
        assert main(["report", str(wrong)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Give the train.output_dir of a run" in error
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "ledger.json").write_text('{"entries": [{}]}')
    assert (
        "not known: ledger.json is damaged: it does not hold what a run writes there: "
        "KeyError(&#39;stage&#39;)" in page([tmp_path])
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "eval": {"web": {}}}\n')
    with pytest.raises(
        StateError, match=r"a file in it is not what a run writes there: KeyError 'loss'"
    ):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("hello\n\n")
    assert main(["report", str(tmp_path)]) != 0
    assert "line 1: not a metrics record" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    said: list[str] = []

    def second(event: TrainEvent) -> None:
        if event.kind == "step" and event.step == 1:
            with pytest.raises(TrainError, match="another process trains in this folder") as caught:
                trainer(null_listener).run()
            said.append(str(caught.value))

    def trainer(listener: TrainListener) -> Trainer:
        how = settings(tmp_path / "run", steps=4)
        return Trainer(Tiny, how, loader(), mesh=MESH, listener=listener)

    assert trainer(second).run().steps == 4
    assert said == [
        f"{tmp_path / 'run'}: another process trains in this folder. Wait until it has ended, or "
        "give another train.output_dir."
    ]
    assert trainer(null_listener).run().resumed_from == 4, "the lock ends with the run"


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_run_in_a_file_is_refused_before_any_data_is_read(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^train\.output_dir: .*/file is a file\. Give a folder"):
        check_record(tmp_path / name)
