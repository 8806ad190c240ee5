"""What a run is refused for is told before its data is prepared, wherever it can be known by
then.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from easypipe import DatasetConfig, LoraConfig, Trainer, train_bpe
from easypipe.cli.app import run as command
from easypipe.core.errors import ConfigError, StateError
from pipelines import texts
from train.runs import Tiny

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a tokenizer and the config of a run, which is trained once."""
    folder = tmp_path_factory.mktemp("run")
    train_bpe(texts(60), 280, ["<|endoftext|>"], folder / "tokenizer")
    pq.write_table(pa.table({"text": texts(80)}), folder / "text.parquet")
    pq.write_table(pa.table({"text": texts(9)}), folder / "held.parquet")
    values = {
        "data": {
            "datasets": [{"name": "text", "data_files": str(folder / "text.parquet")}],
            "default_tokenizer": str(folder / "tokenizer"),
            "pack": {"seq_length": 32},
            "load": {"batch_size": 8},
            "cache_dir": str(folder / "cache"),
            "seed": 1,
        },
        "eval": {"held": {"datasets": [{"data_files": str(folder / "held.parquet")}]}},
        "model": SMALL,
        "train": {
            "steps": 2,
            "output_dir": str(folder / "out"),
            "optimizer": {"learning_rate": 0.01},
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    assert command(["train", str(folder / "run.yaml"), "--samples", "0"]) == 0
    return folder


REFUSED = [
    (["model.vocab_size=100"], "model.vocab_size: 100, but the tokenizer '"),
    (["train.lora.targets=[q_proj]"], "train.lora.targets[0]: no projection fits 'q_proj' (have: "),
    (["train.lora.rank=64"], "train.lora.rank: 64, but layers."),
    (["train.mesh.tensor=2"], "train.mesh"),
    (
        ["data.load.batch_size=6", "train.accumulate_steps=4"],
        "data.load.batch_size: 6 rows do not divide",
    ),
    (
        [
            "data.load.batch_size=8",
            "data.load.batch_size_schedule=[[2, 6]]",
            "train.accumulate_steps=4",
        ],
        "data.load.batch_size_schedule[0]: 6 rows do not divide",
    ),
    (["train.callbacks.best.metric=eval.hold.loss"], "Did you mean 'eval.held.loss'?"),
    (
        ["model.hidden_size=32"],
        "out/checkpoints/2: belongs to another run: model.hidden_size: 32 here, 16 in the "
        "checkpoint",
    ),
    (["train.optimizer.name=lion"], "out/checkpoints/2: belongs to another run: train.optimizer"),
    (["train.steps=7"], "belongs to another run: train.steps: 7 here, 2 in the checkpoint"),
    (["train.resume=false"], "train.resume: "),
    (
        ["train.preference.beta=0.1"],
        "train.preference: is given, but the rows hold no pairs of answers",
    ),
    (["eval.held.default_tokenizer={other}"], "eval.held: its tokenizer '"),
    (
        ["train.output_dir={here}"],
        "run.yaml: is not the record of a run, and training would replace it. Give another",
    ),
    (["train.output_dir='{here}/lr=[1]'"], "train.output_dir: "),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_nothing_is_prepared_for_a_run_that_cannot_be(
    made: Path, tmp_path: Path, capsys: Any, changes: list[str], said: str
) -> None:
    if any("{other}" in change for change in changes):
        train_bpe(texts(60), 270, ["<|endoftext|>"], tmp_path / "other")
    given = [
        part
        for change in changes
        for part in ("--set", change.format(other=tmp_path / "other", here=made))
    ]
    status = command(
        ["train", str(made / "run.yaml"), "--set", f"data.cache_dir={tmp_path / 'cache'}", *given]
    )
    told = " ".join(capsys.readouterr().err.split())
    assert status != 0
    assert said in told
    assert not list(tmp_path.glob("cache/**/*.arrow")), "nothing was tokenized"


def test_all_that_differs_is_named_at_once_where_the_data_is_prepared(
    made: Path, capsys: Any
) -> None:
    for allowed in ("", "ended"):
        changes = ["data.load.batch_size=4", "train.steps=3", f"train.resume_changes=[{allowed}]"]
        given = [part for change in changes for part in ("--set", change)]
        assert command(["train", str(made / "run.yaml"), *given]) != 0
        told = "".join(capsys.readouterr().err.split())
        names = ["train.steps", "loader.batch_size", "loader.config", *filter(None, [allowed])]
        assert f"train.resume_changes=[{','.join(names)}]." in told
        assert "loader.plan" not in told


def test_a_run_that_is_refused_for_its_data_changes_no_file(
    made: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(made / "out", tmp_path / "out")

    def kept() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("out/*") if path.is_file()}

    before, other = kept(), f"data.datasets.0.data_files={made / 'held.parquet'}"
    given = ["--set", f"train.output_dir={tmp_path / 'out'}", "--set", other]
    assert command(["train", str(made / "run.yaml"), *given]) != 0
    assert "belongs to a run on other data" in " ".join(capsys.readouterr().err.split())
    assert kept() == before


def test_a_run_as_long_as_its_data_is_compared_without_its_steps(
    made: Path, tmp_path: Path, capsys: Any
) -> None:
    given = ["--set", f"data.cache_dir={tmp_path / 'cache'}", "--set", "train.steps=null"]
    assert command(["train", str(made / "run.yaml"), *given]) != 0
    assert "belongs to another run: train.steps: " in capsys.readouterr().err.replace("\n", " ")
    assert list(tmp_path.glob("cache/**/*.arrow")), "known once the data was planned"


@pytest.mark.parametrize(
    ("model", "options", "error", "said"),
    [
        (Tiny, {"lora": LoraConfig(targets=("nope",))}, ConfigError, r"no projection fits 'nope'"),
        (
            Tiny,
            {"steps": 2, "resume": False, "output_dir": "out"},
            ConfigError,
            r"train\.resume: .* holds a run at step 2",
        ),
        (Tiny, {"steps": 2, "output_dir": "out"}, StateError, r"belongs to another run: model"),
    ],
)
def test_so_it_is_from_python(
    made: Path, tmp_path: Path, model: Any, options: Any, error: Any, said: str
) -> None:
    heard: list[Any] = []
    folder = made / options["output_dir"] if "output_dir" in options else tmp_path / "out"
    data = [
        DatasetConfig(
            name="text", data_files=str(made / "text.parquet"), tokenizer=str(made / "tokenizer")
        )
    ]
    with pytest.raises(error, match=said):
        Trainer(
            model,
            data=data,
            seq_length=32,
            batch_size=8,
            progress=heard.append,
            **{"steps": 3} | options | {"output_dir": folder},
        )
    assert not heard, "no row was read"
