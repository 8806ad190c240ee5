"""Document 000 (shared/spec/000): its YAML and its example, in a folder where its names are
folders.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import fsspec
import numpy as np
import pytest
import yaml

from easypipe import (
    DataLoaderConfig,
    DataPipeline,
    DatasetConfig,
    LoadStageConfig,
    OrderConfig,
    Pipeline,
    PipelineConfig,
    PromptConfig,
    TokenizerConfig,
    train_bpe,
)
from easypipe.compat.data_pipeline import DataPipelineConfig
from easypipe.core.errors import ConfigError, SourceError
from hub_mirror import hub_mirror, publish  # noqa: F401  (a fixture)
from laws import assert_exact_resume, assert_one_way
from pipelines import jsonl, texts
from web import WebServer

PRINTED = """type: "data_module"
version: "1.0"

dataset:
  name: "tatsu-lab/alpaca"
  columns: ["instruction", "input", "output"]

tokenizer:
  name_or_path: "meta-llama/Llama-2-7b-hf"
  max_length: 2048

prompt_template:
  format_type: "custom"
  template: |
    Below is an instruction that describes a task.
    
    ### Instruction:
    {instruction}
    
    ### Input:
    {input}
    
    ### Response:
    {output}
  input_columns: ["instruction", "input"]
  label_column: "output"

dataloader:
  batch_size: 4
  num_workers: 4
"""  # noqa: W293


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EASYPIPE_CACHE", str(tmp_path / "cache"))
    words = texts(60)
    rows = [
        {
            "instruction": words[i],
            "input": words[i + 1] if i % 2 else "",
            "output": words[i + 2],
            "id": i,
        }
        for i in range(30)
    ]
    jsonl(tmp_path / "tatsu-lab" / "alpaca" / "data.jsonl", rows)
    train_bpe(texts(100), 300, ["<s>", "</s>"], "meta-llama/Llama-2-7b-hf")
    options = Path("meta-llama/Llama-2-7b-hf/tokenizer_config.json")
    options.write_text(
        json.dumps(json.loads(options.read_text()) | {"bos_token": "<s>", "eos_token": "</s>"})
    )
    Path("pipeline_config.yaml").write_text(PRINTED)
    return tmp_path


def values() -> dict:
    return yaml.safe_load(PRINTED)


def test_f16_the_documents_example_as_printed() -> None:
    # Load pipeline from config
    result = DataPipeline.from_config("pipeline_config.yaml")

    if result.is_err():
        print(f"Configuration Error: {result.unwrap_err()}")
        exit(1)

    pipeline = result.unwrap()

    # Get a DataLoader for the 'train' split
    loader_result = pipeline.get_dataloader("train", shuffle=True)
    train_loader = loader_result.unwrap()

    # Iterate
    shapes = [batch["input_ids"].shape for batch in train_loader]
    assert shapes == [(4, 2048)] * 7


@pytest.mark.parametrize("shuffle", [True, False])
def test_law_9_it_is_a_pipeline(shuffle: bool) -> None:
    given = values()
    given["dataloader"] |= {"seed": 5, "drop_last": False}
    face = (
        DataPipeline.from_config(given).unwrap().get_dataloader("train", shuffle=shuffle).unwrap()
    )
    spelled = PipelineConfig(
        datasets=(
            DatasetConfig(
                name="train",
                data_files="tatsu-lab/alpaca",
                prompt=PromptConfig(
                    format_type="custom",
                    template=given["prompt_template"]["template"],
                    input_columns=("instruction", "input"),
                    label_column="output",
                ),
                tokenizer=TokenizerConfig(
                    name_or_path="meta-llama/Llama-2-7b-hf",
                    max_length=2048,
                    padding="max_length",
                    return_attention_mask=True,
                ),
            ),
        ),
        seed=5,
        order=OrderConfig(shuffle=shuffle),
    )
    spelling = (
        Pipeline(spelled)
        .source()
        .tokenize()
        .load(LoadStageConfig(batch_size=4, drop_last=False))
        .build()
    )
    assert_one_way(face, spelling, what="DataPipeline")


def test_only_the_label_column_is_trained() -> None:
    given = values()
    del given["tokenizer"]["max_length"]
    pipeline = DataPipeline.from_config(given).unwrap()
    loader = pipeline.get_dataloader("train").unwrap()
    batch = next(iter(loader))
    tokenizer = pipeline.config.tokenizer.config()
    assert tokenizer.padding == "longest"
    from easypipe import load_tokenizer

    rows = [
        json.loads(line) for line in Path("tatsu-lab/alpaca/data.jsonl").read_text().splitlines()
    ]
    for r in range(4):
        trained = load_tokenizer(tokenizer).decode(
            batch["labels"][r][batch["labels"][r] != -100], skip_special_tokens=True
        )
        assert trained.strip() == rows[r]["output"]
    assert len(loader) == 8  # ordered and complete
    assert batch["attention_mask"].sum() == (batch["segment_ids"] > 0).sum()


def test_law_exact_resume() -> None:
    given = values()
    given["tokenizer"]["max_length"] = 512
    given["dataloader"] |= {"seed": 3}
    assert_exact_resume(
        lambda: (
            DataPipeline.from_config(given).unwrap().get_dataloader("train", shuffle=True).unwrap()
        ),
        6,
        hops=(1,),
        stops=(0, 2),
    )


def test_an_unseeded_shuffle_draws_a_seed_once(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = DataPipeline.from_config(values()).unwrap()
    with caplog.at_level(logging.INFO, "easypipe"):
        one, two = (pipeline.get_dataloader("train", shuffle=True).unwrap() for _ in range(2))
        given = values()
        given["dataloader"] |= {"group_by_length": 2}
        del given["tokenizer"]["max_length"]
        grouped = DataPipeline.from_config(given).unwrap()
        three, four = (grouped.get_dataloader("train").unwrap() for _ in range(2))
    assert one.seed == two.seed == pipeline.options.seed
    assert three.seed == four.seed == grouped.options.seed
    assert f"drew {one.seed}" in caplog.text


def test_splits_by_files_and_local_files() -> None:
    given = values()
    rows = Path("tatsu-lab/alpaca/data.jsonl").read_text().splitlines()
    Path("val.jsonl").write_text("\n".join(rows[:5]) + "\n")
    given["dataset"]["data_files"] = {
        "train": "tatsu-lab/alpaca/*.jsonl",
        "validation": "val.jsonl",
    }
    pipeline = DataPipeline.from_config(given).unwrap()
    assert len(pipeline.get_dataloader("validation").unwrap()) == 2
    assert len(pipeline.get_dataloader("train").unwrap()) == 8
    error = pipeline.get_dataloader("validatoin").unwrap_err()
    assert (
        str(error)
        == "dataset.data_files: no split 'validatoin' (have: train, validation). Did you mean "
        "'validation'?"
    )
    given["dataset"] = {"name": "val.jsonl"}
    assert len(DataPipeline.from_config(given).unwrap().get_dataloader("train[:2]").unwrap()) == 1


def test_a_name_that_is_no_path_is_on_the_hub() -> None:
    given = values()
    given["dataset"] = {"name": "gsm8k-like/rows", "subset": "main", "revision": "abc"}
    pipeline = DataPipeline.from_config(given).unwrap()
    dataset = pipeline.dataset_config("test")
    assert (dataset.type, dataset.data_files, dataset.split, dataset.subset, dataset.revision) == (
        "huggingface", "gsm8k-like/rows", "test", "main", "abc"
    )  # fmt: skip
    given["dataset"]["name"] = "teknium/OpenHermes-2.5"  # a version is no extension
    hermes = DataPipeline.from_config(given).unwrap().dataset_config("test")
    assert (hermes.type, hermes.subset) == ("huggingface", "main")
    given["dataset"]["name"] = "hf://datasets/gsm8k-like/rows"
    spelled = DataPipeline.from_config(given).unwrap().dataset_config("test")
    assert (spelled.subset, spelled.revision) == ("main", "abc")
    given["dataset"]["name"] = "rows/val.jsonl"
    with pytest.raises(ConfigError, match="subset: applies only to datasets of the Hub"):
        DataPipeline.from_config(given).unwrap().dataset_config("train")
    for name in ("rows/val.jsonl", "rows/*", "s3://bucket/rows"):  # nothing is there
        given["dataset"] = {"name": name}
        named = DataPipeline.from_config(given).unwrap().dataset_config("train")
        assert (named.type, named.data_files) == (None, name)


def test_the_printed_file_reads_a_dataset_of_the_hub(hub_mirror: WebServer) -> None:  # noqa: F811
    """As printed, the name is one of the Hub; here it is a mirror on loopback, and there is no
    folder of that name.
    """
    rows = Path("tatsu-lab/alpaca/data.jsonl").read_bytes().splitlines(keepends=True)
    Path("tatsu-lab").rename("elsewhere")
    publish(
        hub_mirror,
        "tatsu-lab/alpaca",
        {"train.jsonl": b"".join(rows), "validation.jsonl": b"".join(rows[:6])},
    )
    pipeline = DataPipeline.from_config("pipeline_config.yaml").unwrap()
    assert [
        batch["input_ids"].shape for batch in pipeline.get_dataloader("validation").unwrap()
    ] == [(4, 2048), (2, 2048)]
    assert len(pipeline.get_dataloader("train", shuffle=True).unwrap()) == 7
    assert "no split 'valid' (have: train, validation). Did you mean 'validation'?" in str(
        pipeline.get_dataloader("valid").unwrap_err()
    )


WRONG = [
    (("version",), "2.0", r"version: '2.0' is not known \(have: 1.0\). Write version: \"1.0\""),
    (("type",), "trainer", "type"),
    (("datset",), {}, "datset: unknown key.*Did you mean 'dataset'"),
    (("dataset", "colums"), [], "dataset.colums: unknown key.*Did you mean 'columns'"),
    (("dataset", "columns"), [], "dataset.columns: an empty list"),
    (("tokenizer", "max_length"), "long", "tokenizer.max_length"),
    (("tokenizer", "padding"), "max_length", None),
    (("prompt_template", "format_type"), "custm", "prompt_template.format_type"),
    (("prompt_template", "label_column"), "answer", "prompt_template.label_column"),
    (("dataloader", "batch_size"), 0, "dataloader.batch_size: 0 is too few"),
    (("dataloader", "worker_init_fn"), "os:system", "dataloader.worker_init_fn: unknown key"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    WRONG,
    ids=lambda item: ".".join(item) if isinstance(item, tuple) else None,
)
def test_three_views_of_one_check(
    path: tuple[str, ...], value: object, message: str | None
) -> None:
    given = values()
    section = given
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    found = DataPipeline.from_config(given)
    listed = DataPipeline.validate(given)
    if message is None:
        assert (found.is_ok(), listed) == (True, [])
        return
    error = found.unwrap_err()
    assert isinstance(error, ConfigError)
    assert listed[0] == str(error)
    with pytest.raises(ConfigError, match=message):
        found.unwrap()
    with pytest.raises(ConfigError, match=message):
        DataPipeline(DataPipelineConfig(**given))
    assert DataPipeline.validate(values()) == []


def test_every_problem_between_sections_is_listed() -> None:
    given = values()
    given["dataset"]["columns"] = ["instruction"]
    assert len(DataPipeline.validate(given)) == 2
    assert (
        "prompt_template.input_columns[1]: dataset.columns has no 'input'"
        in DataPipeline.validate(given)[0]
    )


def test_what_only_data_can_tell_is_err_of_get_dataloader() -> None:
    given = values()
    given["dataset"]["columns"].append("nobody")
    found = DataPipeline.from_config(given).unwrap().get_dataloader("train")
    assert "no column 'nobody' (have: instruction, input, output, id" in str(found.unwrap_err())
    given = values()
    given["tokenizer"]["name_or_path"] = "./nowhere"
    assert DataPipeline.from_config(given).unwrap().get_dataloader("train").is_err()
    assert DataPipeline.from_config("no.yaml").is_err()
    assert "num_workers" in str(
        DataPipeline.from_config(values() | {"dataloader": {"num_workers": -2}}).unwrap_err()
    )


def test_bugs_are_not_err(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = DataPipeline.from_config(values()).unwrap()
    monkeypatch.setattr("easypipe.compat.data_pipeline.text_loader", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipeline.get_dataloader("train")


def test_options_of_the_sections() -> None:
    def widths(**options: object) -> list[int]:
        given = values()
        given["tokenizer"] |= options
        return [
            batch["input_ids"].shape[1]
            for batch in DataPipeline.from_config(given).unwrap().get_dataloader("train").unwrap()
        ]

    assert set(widths(max_length=200, use_fast=False)) == {200}
    assert len(set(widths(max_length=200, padding="longest"))) > 1
    assert max(widths(max_length=200, padding="longest", truncation=False)) > 200
    given = values()
    given["tokenizer"]["use_fast"] = False
    assert (
        DataPipeline.from_config(given).unwrap().dataset_config("train").tokenizer.backend
        == "tokenizers"
    )
    with pytest.raises(ConfigError, match=r"dataloader.collate_fn: the rows are text"):
        DataPipelineConfig(**(values() | {"dataloader": DataLoaderConfig(collate_fn=len)}))
    for name in ("subset", "revision"):
        with pytest.raises(
            ConfigError, match=f"dataset.{name}: has no effect together with data_files"
        ):
            DataPipelineConfig(
                **(values() | {"dataset": {"name": "a", "data_files": {"train": "a"}, name: "b"}})
            )


def test_f16_f20_f21_more_options_of_the_file() -> None:
    def made(section: str = "dataset", **options: object) -> list[dict[str, np.ndarray]]:
        given = values()
        del given["tokenizer"]["max_length"]
        given[section] |= options
        return list(DataPipeline.from_config(given).unwrap().get_dataloader("train").unwrap())

    plain = made()
    assert sum(len(batch["input_ids"]) for batch in plain) == 30
    assert sum(len(batch["input_ids"]) for batch in made(num_rows=6)) == 6
    memory = fsspec.filesystem("memory")
    memory.pipe("/rows-of-000.jsonl", Path("tatsu-lab/alpaca/data.jsonl").read_bytes())
    assert (
        len(made(name="memory://rows-of-000.jsonl", storage_options={"skip_instance_cache": True}))
        == 8
    )
    with pytest.raises(SourceError, match="no_such_option"):
        made(name="https://127.0.0.1:1/rows.jsonl", storage_options={"no_such_option": 1})
    left = made("tokenizer", padding_side="left")
    for one, other in zip(plain, left, strict=True):
        for row, mask, moved, shown in zip(
            one["input_ids"],
            one["attention_mask"],
            other["input_ids"],
            other["attention_mask"],
            strict=True,
        ):
            assert row[mask == 1].tolist() == moved[shown == 1].tolist()
            assert shown[-1] == 1
    assert {
        batch["input_ids"].shape[1] % 16 for batch in made("tokenizer", pad_to_multiple_of=16)
    } == {0}
    kept = made("tokenizer", max_length=120, length={"policy": "keep_end"})
    cut = made("tokenizer", max_length=120)
    assert any((a["input_ids"] != b["input_ids"]).any() for a, b in zip(kept, cut, strict=True))
    given = values()
    given["dataset"]["streaming"] = True
    given["dataloader"] |= {"seed": 5}
    loader = DataPipeline.from_config(given).unwrap().get_dataloader("train", shuffle=True).unwrap()
    assert not loader.rows.by_number
    assert sum(len(batch["input_ids"]) for batch in loader) in range(16, 31)
    given["dataloader"] |= {"world_size": 2}
    [problem] = DataPipeline.validate(given)
    assert problem.startswith(
        "dataloader.world_size: ranks share rows by their numbers, and a stream has none"
    )


def test_batches_are_numpy_of_int32() -> None:
    batch = next(iter(DataPipeline.from_config(values()).unwrap().get_dataloader("train").unwrap()))
    assert {type(column) for column in batch.values()} == {np.ndarray}
    assert {column.dtype for column in batch.values()} == {np.dtype(np.int32)}
