"""A run on images from one config: by the command, from Python, and spelled out with the faces that
it is short for.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import forked
import laws
from easypipe import ClassifyConfig, ConfigError, SourceError, TaskSpec, UniversalDataModule
from easypipe.cli import main
from easypipe.compat import classify
from easypipe.compat.classify import Images, ImagesConfig
from easypipe.core.config import from_dict, load_yaml
from easypipe.train import trainer as engine
from easypipe.train.finished import load_trained
from easypipe.train.model.classifier import Classifier
from easypipe.train.model.config import ClassifierConfig
from easypipe.train.record import read_kept
from loader_processes import free_port
from strategies import examples

CONFIG = Path(__file__).parents[2] / "configs" / "classify.yaml"
TASK = {
    "name": "t",
    "modality": "vision",
    "task_type": "classification",
    "options": {"channels": 1, "normalize": False},
}


def digits(path: Path, rows: int = 640) -> None:
    """Writes scikit-learn's digits as the docs do."""
    found = pytest.importorskip("sklearn.datasets").load_digits()
    images = (found.images[:rows] * 255 / 16).astype("uint8")
    pq.write_table(
        pa.table({"image": images.tolist(), "label": found.target[:rows]}), path, row_group_size=100
    )


def table(path: Path, rows: int = 20, **columns: Any) -> Path:
    """4 x 4 pixels that say their row, and labels 0, 1, 2, 0, ..."""
    images = [np.full((4, 4), i % 256, np.uint8).tolist() for i in range(rows)]
    pq.write_table(
        pa.table({"image": images, "label": [i % 3 for i in range(rows)], **columns}),
        path,
        row_group_size=7,
    )
    return path


def config(folder: Path, data: dict[str, Any] | None = None, **sections: Any) -> ClassifyConfig:
    path = folder / "images.parquet"
    if not path.exists():
        table(path)
    given = {
        "data_files": str(path),
        "seed": 1,
        "batch_size": 4,
        "num_workers": 1,
        "cache_dir": str(folder / "cache"),
        **(data or {}),
    }
    model = {"hidden_sizes": [2], **sections.pop("model", {})}
    return from_dict(
        ClassifyConfig,
        {
            "task": TASK,
            "data": given,
            "train": {"output_dir": str(folder / "run"), "steps": 2},
            "model": model,
            **sections,
        },
    )


def losses(folder: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["accuracy"], line.get("eval")) for line in lines]


def test_the_command_and_python_train_the_same_and_go_on_when_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    digits(tmp_path / "digits.parquet")
    few = [
        "model={kind: mlp, hidden_sizes: [64]}",
        "train.steps=30",
        "train.eval_every=15",
        "train.checkpoint.every=10",
        "train.optimizer.warmup_steps=3",
        "train.callbacks.best={metric: eval.val.accuracy, mode: max}",
    ]
    wrong = "train.callbacks.best.metric=eval.val.acuracy"
    assert main(["train", str(CONFIG), *(f"--set={value}" for value in (*few, wrong))]) == 2
    assert "Did you mean 'eval.val.accuracy'?" in capsys.readouterr().err
    assert main(["train", str(CONFIG), *(f"--set={value}" for value in few)]) == 0
    told = capsys.readouterr().out
    assert "held out val: loss" in told
    assert "accuracy" in told
    run = tmp_path / "runs" / "digits"
    assert {
        "checkpoints",
        "metrics.jsonl",
        "run.yaml",
        "versions.json",
        "fingerprints.json",
        "loss.png",
    } <= {p.name for p in run.iterdir()}
    whole = losses(run)
    assert whole[-1][3]["val"]["accuracy"] > 0.8
    assert whole[-1][3]["val"]["num_targets"] == 128
    [best] = read_kept(run / "best.json")
    assert best["eval.val.accuracy"] == max(line[3]["val"]["accuracy"] for line in whole if line[3])

    # Its record is a config, and gives the same run from Python.
    again = ClassifyConfig.load(run / "run.yaml", ["train.output_dir=python"])
    assert (again.model.num_classes, again.model.image_shape) == (10, (8, 8, 1))
    assert classify.train(again).last["accuracy"] == whole[-1][2]
    assert losses(tmp_path / "python") == whole

    # Killed behind step 20 and run again: bit for bit.
    shutil.rmtree(run / "checkpoints" / "30")
    assert main(["train", str(CONFIG), *(f"--set={value}" for value in few)]) == 0
    assert "resumed from step 20" in capsys.readouterr().out
    assert losses(run) == whole
    trained = load_trained(run)
    assert trained.model(np.zeros((2, 8, 8, 1), np.float32)).shape == (2, 10)
    assert main(["report", str(run)]) == 0
    assert main(["export", str(run), "out"]) == 2
    assert main(["generate", str(run), "x"]) == 2
    told = capsys.readouterr().err
    assert "Classifier is not a Decoder" in told
    assert "Traceback" not in told

    # Another network is another run.
    assert (
        main(
            [
                "train",
                str(CONFIG),
                *(f"--set={value}" for value in few),
                "--set=model.hidden_sizes=[63]",
            ]
        )
        == 2
    )
    assert "model.hidden_sizes" in capsys.readouterr().err


@given(
    counts=st.lists(st.integers(2, 30), min_size=1, max_size=3),
    size=st.integers(1, 3),
    split=st.sampled_from([0.0, 0.25, 0.5]),
    seed=st.integers(0, 9),
    stop=st.integers(0, 60),
)
@examples(20)
def test_laws_one_way_and_exact_resume(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    size: int,
    split: float,
    seed: int,
    stop: int,
) -> None:
    """The files of a config give the batches of the face over the same rows; a state goes on behind
    any batch.
    """
    folder = tmp_path_factory.mktemp("law")
    files = [str(table(folder / f"{i}.parquet", n)) for i, n in enumerate(counts)]
    rows = [
        {"image": np.full((4, 4), i, np.uint8), "label": i % 3} for n in counts for i in range(n)
    ]
    options: dict[str, Any] = {"batch_size": size, "seed": seed, "num_workers": 0, "num_epochs": 2}
    split = 0.0 if len(rows) * (1 - split) < size + 1 else split
    inputs = classify.inputs_of(
        config(folder, {"data_files": files, "val_split": split, **options})
    )
    module = UniversalDataModule(
        rows, task_spec=from_dict(TaskSpec, TASK), val_split=split, **options
    )
    laws.assert_one_way(inputs.train, module.train_dataloader(), what="a run on images")
    if split:
        laws.assert_one_way(inputs.val, module.val_dataloader(), what="its held-out rows")
    laws.assert_exact_resume(
        inputs.module.train_dataloader, len(inputs.train), stops=[stop % (len(inputs.train) + 1)]
    )


def test_what_rows_may_hold(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    arrays = [np.random.default_rng(i).integers(0, 256, (6, 5), np.uint8) for i in range(8)]

    def png(array: Any) -> bytes:
        out = io.BytesIO()
        Image.fromarray(array).save(out, "PNG")
        return out.getvalue()

    labels = {"label": pa.array([0, 1] * 4, pa.uint8())}
    kinds = {
        "bytes": [png(array) for array in arrays],
        "struct": [{"bytes": png(array), "path": None} for array in arrays],
        "pixels": [array.tolist() for array in arrays],
        "channels": [array[:, :, None].tolist() for array in arrays],
        "floats": [(array / np.float32(255)).tolist() for array in arrays],
        "memory": None,
    }
    seen = {}
    for kind, images in kinds.items():
        path = tmp_path / f"{kind}.parquet"
        if images is not None:
            pq.write_table(pa.table({"image": images, **labels}), path)
        rows = (
            [{"image": png(a), "label": i % 2} for i, a in enumerate(arrays)]
            if images is None
            else str(path)
        )
        seen[kind] = classify.inputs_of(config(tmp_path, {"data_files": rows}))
        assert seen[kind].run.model.image_shape == (6, 5, 1)
        laws.assert_same_batches(
            seen[kind].train.loader(0), seen["bytes"].train.loader(0), what=kind
        ) if kind != "floats" else None
    np.testing.assert_allclose(
        seen["floats"].train.batch(0)["pixel_values"],
        seen["bytes"].train.batch(0)["pixel_values"],
        rtol=1e-6,
    )

    small = classify.inputs_of(
        config(
            tmp_path,
            {"data_files": str(tmp_path / "bytes.parquet")},
            task=TASK | {"options": {"image_size": 4}},
        )
    )
    assert small.train.batch(0)["pixel_values"].shape == (4, 4, 4, 3)

    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"image": a.tolist(), "label": i % 2}) + "\n" for i, a in enumerate(arrays)
        )
    )
    lines = classify.inputs_of(config(tmp_path, {"data_files": str(tmp_path / "rows.jsonl")}))
    laws.assert_same_batches(lines.train, seen["bytes"].train.loader(0), what="lines")


def test_labels_may_be_names(tmp_path: Path) -> None:
    names = ["cat", "ant", "bee", "cat", "ant", "bee", "cat", "ant"]
    table(tmp_path / "named.parquet", 8, name=names)
    data = {
        "data_files": str(tmp_path / "named.parquet"),
        "label_column": "name",
        "val_split": 0.25,
    }
    inputs = classify.inputs_of(config(tmp_path, data))
    assert inputs.run.data.classes == ("ant", "bee", "cat")
    assert inputs.per_class == {"ant": 3, "bee": 2, "cat": 3}
    assert inputs.run.model.num_classes == 3
    other = classify.inputs_of(config(tmp_path, {**data, "classes": ["cat", "bee", "ant", "dog"]}))
    assert (2 - np.sort(inputs.train.batch(0)["labels"])).tolist() == sorted(
        other.train.batch(0)["labels"], reverse=True
    )
    assert other.run.model.num_classes == 4
    with pytest.raises(
        SourceError,
        match=r"named\.parquet, row 0, column 'name': label 'cat' is not one of the classes \(have: ant, "
        r"bee\)",
    ):
        classify.inputs_of(config(tmp_path, {**data, "classes": ["ant", "bee"]}))
    with pytest.raises(ConfigError, match="Name each once"):
        config(tmp_path, {"classes": ["ant", "ant"]})


def test_rows_of_files_are_copied_once_and_mapped(tmp_path: Path) -> None:
    path = table(tmp_path / "images.parquet", 600)
    made = ImagesConfig(data_files=str(path), cache_dir=tmp_path / "cache")
    rows = Images(made, "data_files").rows(None)
    [copied] = (tmp_path / "cache" / "images").iterdir()
    before = copied.stat()
    assert [rows[i]["image"][0, 0] for i in (0, 255, 256, 599)] == [0, 255, 0, 599 % 256]
    again = Images(made, "data_files").rows(None)
    assert again.fingerprint == rows.fingerprint
    assert copied.stat().st_mtime_ns == before.st_mtime_ns
    table(path, 601)
    changed = Images(made, "data_files").rows(None)
    assert (len(changed), changed.fingerprint == rows.fingerprint) == (601, False)
    assert len(list((tmp_path / "cache" / "images").iterdir())) == 2


@pytest.mark.parametrize("num_bytes", [0, 1000])
def test_a_copy_that_is_cut_off_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_bytes: int
) -> None:
    path = table(tmp_path / "images.parquet", 600)
    made = ImagesConfig(data_files=str(path), cache_dir=tmp_path / "cache")
    Images(made, "data_files")
    [copied] = (tmp_path / "cache" / "images").iterdir()
    whole = copied.read_bytes()
    copied.write_bytes(whole[:num_bytes])
    assert len(Images(made, "data_files").rows(None)) == 600
    assert f"{copied} is damaged, and is made again" in caplog.text
    assert copied.read_bytes() == whole


@pytest.mark.parametrize("count", range(1, 10))
def test_rows_are_copied_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(classify, "ROWS_AT_A_TIME", 4)
    path = table(tmp_path / "images.parquet", count)
    rows = Images(
        ImagesConfig(data_files=str(path), cache_dir=tmp_path / "cache"), "data_files"
    ).rows(None)
    assert [rows[i]["image"][0, 0] for i in range(len(rows))] == [*range(count)]


def test_each_column_of_a_file_has_a_copy_of_its_own(tmp_path: Path) -> None:
    path = table(tmp_path / "images.parquet", 9)
    plain = pq.read_table(path)
    pq.write_table(
        plain.append_column("other", plain.column("image").take([*range(9)][::-1])), path
    )
    one, other = (
        Images(
            ImagesConfig(data_files=str(path), image_column=name, cache_dir=tmp_path / "cache"),
            "data_files",
        ).rows(None)
        for name in ("image", "other")
    )
    assert one.fingerprint != other.fingerprint
    assert [one[i]["image"][0, 0] for i in range(9)] == [*range(9)]
    assert [other[i]["image"][0, 0] for i in range(9)] == [*range(9)][::-1]


def test_options_of_the_data(tmp_path: Path) -> None:
    made = config(tmp_path)
    plain = classify.inputs_of(made)
    assert plain.val is None
    assert len(plain.train) == 5

    def other(**data: Any) -> classify.Inputs:
        return classify.inputs_of(config(tmp_path, data))

    assert len(other(batch_size=10).train) == 2
    assert len(other(num_epochs=3).train) == 15
    assert (other(split="train[:50%]").per_class, other(val_split=0.25).val_rows) == (
        {"0": 4, "1": 3, "2": 3},
        5,
    )
    held_out = other(val_files=str(table(tmp_path / "val.parquet", 6)), split="train[:60%]")
    assert (held_out.val_rows, len(held_out.val), len(held_out.train)) == (6, 2, 3)
    first, second = plain.train.batch(0), other(seed=2).train.batch(0)
    assert first["pixel_values"].tobytes() != second["pixel_values"].tobytes()
    shutil.copy(tmp_path / "images.parquet", tmp_path / "unnamed")
    assert len(other(data_files=str(tmp_path / "unnamed"), type="parquet").train) == 5
    moved = pq.read_table(tmp_path / "images.parquet").rename_columns(["x", "y"])
    pq.write_table(moved, tmp_path / "moved.parquet")
    renamed = other(data_files=str(tmp_path / "moved.parquet"), image_column="x", label_column="y")
    laws.assert_same_batches(renamed.train, plain.train)
    iterated = iter(other(num_workers=3, num_epochs=None).train)
    next(iterated)
    assert sum("easypipe" in thread.name for thread in threading.enumerate()) >= 3
    iterated.close()


def test_options_of_the_network(tmp_path: Path) -> None:
    def shapes(**model: Any) -> dict[str, tuple[int, ...]]:
        made = classify.inputs_of(config(tmp_path, model=model))
        trainer = engine.Trainer(made.run.model, made.run.train, made.train)
        return {
            name: value.shape
            for name, value in trainer.layout.params.items()
            if name.endswith("kernel")
        }

    assert shapes() == {"layers.0.kernel": (3, 3, 1, 2), "out.kernel": (2, 3)}
    assert shapes(num_classes=5)["out.kernel"] == (2, 5)
    assert shapes(kind="mlp", hidden_sizes=[7, 6]) == {
        "layers.0.kernel": (16, 7),
        "layers.1.kernel": (7, 6),
        "out.kernel": (6, 3),
    }
    assert shapes(kind="mlp", hidden_sizes=[]) == {"out.kernel": (16, 3)}
    assert shapes(image_shape=[4, 4, 1]) == shapes()


def test_the_logits_are_those_of_the_network_that_is_described() -> None:
    pixels = np.random.default_rng(0).normal(size=(3, 4, 4, 2)).astype(np.float32)
    for kind in ("mlp", "convnet"):
        shape = {"hidden_sizes": (5,), "num_classes": 3, "image_shape": (4, 4, 2)}
        model = Classifier(ClassifierConfig(kind=kind, **shape), nnx.Rngs(1))
        kernel, bias = (
            np.asarray(one[...]) for one in (model.layers[0].kernel, model.layers[0].bias)
        )
        if kind == "mlp":
            inner = np.maximum(pixels.reshape(3, -1) @ kernel + bias, 0)
        else:
            padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1), (0, 0)))
            places = [(i, j) for i in range(3) for j in range(3)]
            made = sum(padded[:, i : i + 4, j : j + 4] @ kernel[i, j] for i, j in places) + bias
            halved = np.maximum(made, 0).reshape(3, 2, 2, 2, 2, 5).max(axis=(2, 4))
            inner = halved.mean(axis=(1, 2))
        out = np.asarray(model.out.kernel[...])
        np.testing.assert_allclose(model(jnp.asarray(pixels)), inner @ out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"image_column": "imag"}},
            r"data.image_column: data_files have no column 'imag' .*Did you mean 'image'\?",
        ),
        ({"data": {"label_column": "image"}}, "data.label_column: is the image_column too"),
        (
            {"data": {"val_split": 0.5, "val_files": "x.parquet"}},
            "data.val_split: has no effect together with val_files",
        ),
        ({"data": {"val_split": 1.0}}, "data.val_split: 1.0 is not a share of the rows"),
        (
            {"data": {"val_split": 0.01}},
            "data.val_split: 0.01 of 20 rows leaves none to validate on",
        ),
        ({"data": {"data_files": []}}, "data.data_files: an empty list"),
        ({"data": {"bach_size": 3}}, r"data.bach_size: unknown key .*Did you mean 'batch_size'\?"),
        ({"data": {"batch_size": 21}}, "21"),
        (
            {"task": TASK | {"modality": "audio"}},
            "task.modality: 'audio' cannot be trained from a config",
        ),
        ({"task": TASK | {"task_type": "regression"}}, "task.task_type: 'regression'"),
        (
            {"task": TASK | {"options": {"chanels": 1}}},
            r"task.options: .*'chanels'.*Did you mean 'channels'\?",
        ),
        (
            {"task": TASK | {"options": {"channels_last": False}}},
            r"task\.options: batches are \{'pixel_values': \[\d+, 3, \d+, \d+\], 'labels': \[\d+\]\}, "
            r"not pixel_values \[B, H, W, C\] with labels\. Leave channels_last out",
        ),
        (
            {"model": {"hidden_sizes": [2, 2, 2]}},
            "model.hidden_sizes: 3 halvings leave nothing of a side of 4 pixels. Give at most 2",
        ),
        ({"model": {"hidden_sizes": [0]}}, r"model.hidden_sizes\[0\]: 0 is not a size"),
        ({"model": {"hidden_sizes": []}}, "model.hidden_sizes: a convnet without convolutions"),
        (
            {"model": {"num_classes": 2}},
            "model.num_classes: 2, but labels go to 2. Leave it out, or give at least 3",
        ),
        ({"model": {"num_classes": 1}}, "model.num_classes: 1 leaves nothing to tell apart"),
        (
            {"model": {"image_shape": [5, 4, 1]}},
            r"model.image_shape: \[5, 4, 1\], but the images are \[4, 4, 1\]",
        ),
        ({"model": {"image_shape": [0, 4, 1]}}, "model.image_shape: .* is no"),
        (
            {"train": {"output_dir": "x", "preference": {}}},
            "train.preference: is for pairs of answers",
        ),
        (
            {"train": {"output_dir": "x", "lora": {}}},
            "train.lora: adapts the projections of a decoder",
        ),
        (
            {
                "train": {
                    "output_dir": "x",
                    "distributed": {"num_processes": 2, "process_id": 0, "coordinator": "h:1"},
                }
            },
            "train.distributed",
        ),
        (
            {"train": {"output_dir": "x", "steps": 9, "optimizer": {"warmup_steps": 1}}},
            "train.steps: 9 steps, but the loader ends after 5 batches. Give at most 5, or a loader "
            r"that never ends \(num_epochs: null\)\.",
        ),
        (
            {"train": {"output_dir": "x", "steps": 2, "loss": {"chunk_size": 4}}},
            "train.loss.chunk_size: has no effect",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_its_key(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    sections = {
        "train": {
            "output_dir": str(tmp_path / "run"),
            "steps": 2,
            "optimizer": {"warmup_steps": 1},
        },
        **sections,
    }
    with pytest.raises(ConfigError, match=message):
        classify.train(config(tmp_path, sections.pop("data", None), **sections))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, None, 1], "images.parquet, row 2, column 'label': there is no label"),
        (
            [0, 1, -1, 1],
            "images.parquet, row 2, column 'label': label -1 is not one of the classes",
        ),
        ([0.5, 1.0, 1.0, 1.0], "data_files, column 'label': holds double, not classes"),
        (
            [0, 10**9, 1, 1],
            "images.parquet, row 1, column 'label': label 1000000000 is not one of the",
        ),
    ],
)
def test_bad_labels_name_their_row(tmp_path: Path, labels: list[Any], message: str) -> None:
    images = [np.zeros((4, 4), np.uint8).tolist()] * 4
    pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "images.parquet")
    with pytest.raises(SourceError, match=message):
        classify.inputs_of(config(tmp_path))


def test_a_bad_label_behind_blank_lines_names_its_own_record(tmp_path: Path) -> None:
    """Of the second file: sources leave blank lines out of what they read."""
    rows = [json.dumps({"image": [[0, 1], [2, 3]], "label": label}) for label in (0, 1, 0, -1)]
    (tmp_path / "a.jsonl").write_text("\n".join([rows[0], "", rows[1]]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join([rows[2], "", "", rows[3]]) + "\n")
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(SourceError, match=r"b\.jsonl, row 3, column 'label': label -1"):
        classify.inputs_of(config(tmp_path, {"data_files": files}))


def test_names_of_held_out_rows_are_not_those_of_numbers(tmp_path: Path) -> None:
    images = [np.zeros((4, 4), np.uint8).tolist()] * 4
    for name, labels in (("images", [0, 1, 0, 1]), ("val", ["ant", "bee", "ant", "bee"])):
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / f"{name}.parquet")
    data: dict[str, Any] = {"val_files": str(tmp_path / "val.parquet")}
    with pytest.raises(SourceError, match="val_files, column 'label': holds names, and the labels"):
        classify.inputs_of(config(tmp_path, data))
    classify.inputs_of(config(tmp_path, data | {"classes": ["ant", "bee"]}))


def test_held_out_rows_may_number_the_same_names_in_another_order() -> None:
    datasets = pytest.importorskip("datasets")
    images = [np.zeros((4, 4), np.uint8).tolist()] * 2
    train, held_out = (
        datasets.Dataset.from_dict({"image": images, "label": [0, 1]}).cast_column(
            "label", datasets.ClassLabel(names=names)
        )
        for names in (["cat", "dog"], ["dog", "cat"])
    )
    data = ImagesConfig(data_files=train, val_files=held_out)
    names = Images(data, "data_files").names
    assert names == ["cat", "dog"]
    assert Images(data, "data_files").rows(names).labels.tolist() == [0, 1]
    assert Images(data, "val_files").rows(names).labels.tolist() == [1, 0]


def test_a_bad_image_names_its_row(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"image": [b"no image"] * 4 + [None], "label": [0, 1] * 2 + [1]}),
        tmp_path / "images.parquet",
    )
    with pytest.raises(SourceError, match="row 0 of the batch: is not an image that Pillow reads"):
        classify.inputs_of(
            config(tmp_path, {"split": "train[:4]"}, task=TASK | {"options": {"channels": 1}})
        )
    ragged = [{"image": [[1, 2], [3]], "label": i % 2} for i in range(4)]
    with pytest.raises(SourceError, match=r"row 0 of the batch: object of shape \(\) is not an"):
        classify.inputs_of(config(tmp_path, {"data_files": ragged}))
    pq.write_table(
        pa.table({"image": [b"one"] * 3, "label": [0, 1, 0]}), tmp_path / "before.parquet"
    )
    of_file = {"data_files": str(tmp_path / "*.parquet")}
    with pytest.raises(
        SourceError, match=r"images\.parquet, row 4, column 'image': the row has no image"
    ):
        Images(config(tmp_path, of_file).data, "data_files").rows(None)[7]
    known = table(tmp_path / "val.parquet")
    images = [{"image": np.zeros((4, 4), np.uint8).tolist(), "label": i % 2} for i in range(8)]
    with pytest.raises(
        SourceError,
        match=r"val_files, row 2: label 2, but the model has 2 classes. Set model.num_classes",
    ):
        classify.inputs_of(config(tmp_path, {"data_files": images, "val_files": str(known)}))
    made = classify.inputs_of(
        config(tmp_path, {"data_files": images, "val_files": str(known)}, model={"num_classes": 3})
    )
    assert made.val_rows == 20


def test_commands_know_what_such_a_config_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "classify.yaml"
    table(tmp_path / "images.parquet")
    values = {
        "task": TASK,
        "data": {
            "data_files": str(tmp_path / "images.parquet"),
            "batch_size": 4,
            "val_split": 0.2,
            "num_epochs": 2,
        },
        "train": {"output_dir": str(tmp_path / "run")},
    }
    path.write_text(yaml.safe_dump(values))
    assert main(["plan", str(path)]) == 0
    told = capsys.readouterr().out
    assert "4 x 4 pixels, grey" in told
    assert "16 to train on, 4 held out" in told
    assert "steps    8 of 4 rows: 2.00 passes" in told
    assert main(["plan", str(path), "--json", "--steps", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == 1.0
    assert not (tmp_path / "run").exists()
    assert main(["plan", str(path), "--topology", "v5p:2x2x1"]) == 2
    assert "--topology: is for runs on text" in capsys.readouterr().err
    assert main(["plan", str(path), "--no-prepare"]) == 2
    assert "--no-prepare: images have no tokens to prepare" in capsys.readouterr().err
    assert main(["train", str(path), "--prompt", "x"]) == 2
    assert (
        "--prompt: is the beginning of generated texts, but this run is on images"
        in capsys.readouterr().err
    )
    for command in (["prepare"], ["preview"], ["explain", "--step", "0"]):
        assert main([command[0], str(path), *command[1:]]) == 2
        assert (
            "task: this is a run on images, which this command does not support. Use "
            "`easypipe train`" in capsys.readouterr().err
        )
    path.write_text(yaml.safe_dump(values | {"modle": {}}))
    assert main(["train", str(path)]) == 2
    assert (
        "modle: unknown key (have: task, data, train, model). Did you mean 'model'?"
        in capsys.readouterr().err
    )


def test_a_run_without_a_seed_records_one_and_goes_on_with_it(tmp_path: Path) -> None:
    made = config(
        tmp_path,
        {"seed": None},
        train={"output_dir": str(tmp_path / "run"), "steps": 1, "optimizer": {"warmup_steps": 0}},
    )
    classify.train(made)
    seed = load_yaml(tmp_path / "run" / "run.yaml")["data"]["seed"]
    assert classify.inputs_of(made).run.data.seed == seed
    assert (
        classify.inputs_of(
            dataclasses.replace(made, data=dataclasses.replace(made.data, seed=None))
        ).module.seed
        == seed
    )


def test_one_of_several_processes_is_refused(tmp_path: Path) -> None:
    """Each would train on all rows, into one folder."""
    program = "import sys; from easypipe.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        program,
        "train",
        str(CONFIG),
        "--set",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    told = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    each = [os.environ | told | {"JAX_PROCESS_ID": str(i)} for i in range(2)]
    for process in [
        forked.Popen(command, env=one, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for one in each
    ]:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "this is one of several processes" in " ".join(said.split())
