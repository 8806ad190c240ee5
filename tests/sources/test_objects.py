"""Datasets of other libraries in memory, and the folders that `datasets` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from easypipe import DatasetConfig, Pipeline, PipelineConfig
from easypipe.core.errors import ConfigError, MissingFileError, SourceError
from easypipe.core.protocols import Source
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.external.objects import is_dataset_object, open_object
from easypipe.sources.external.saved_datasets import is_saved_dataset, saved_dataset_files
from easypipe.sources.open import open_files
from easypipe.sources.partitions import NOTHING, partition_values
from laws import assert_stateless_reads

ROWS = [{"text": f"row {i}", "n": i, "list": [i, None]} for i in range(100)]


def source_of(tmp_path: Path, **options: Any):
    """What a pipeline makes of a dataset."""
    config = PipelineConfig(
        datasets=[DatasetConfig(name="d", **options)], seed=1, cache_dir=str(tmp_path / "cache")
    )
    return Pipeline.from_config(config).source().get_data()["d"]


class Rows:
    """Rows by number, as torch's and Grain's data sources give them."""

    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


def test_random_access() -> None:
    source = open_object(Rows(ROWS), name="rows")
    assert_stateless_reads(source, [1, 50, 99])
    assert source.read(0, 7, 8).to_pylist() == [{**ROWS[7], ROW_NUMBER: 7}]
    assert (
        source.fingerprint
        == open_object(Rows(list(ROWS))).fingerprint
        != open_object(Rows(ROWS[1:])).fingerprint
    )
    arrays = open_object(
        Rows(
            [
                {"input_ids": np.arange(i, dtype=np.uint16), "grid": np.ones((2, 2), np.int8)}
                for i in range(3)
            ]
        )
    )
    assert arrays.schema.field("input_ids").type == pa.large_list(pa.uint16())
    assert arrays.read(0, 2, 3).to_pylist() == [
        {"input_ids": [0, 1], "grid": [[1, 1], [1, 1]], ROW_NUMBER: 2}
    ]


def test_a_version_is_what_chosen_columns_and_exact_ones_are_known_by() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is optional")
    for data in (Rows(ROWS), datasets.Dataset.from_list(ROWS)):
        source = open_object(data, version="1")
        assert isinstance(source, Source)
        assert source.fingerprint != open_object(data).fingerprint
        for other in (source.select(["n"]), source.exactly(["list"])):
            assert other.fingerprint == source.fingerprint


def test_rows_that_are_filtered_out() -> None:
    source = open_object(Rows([None if i % 3 else row for i, row in enumerate(ROWS)]))
    assert_stateless_reads(source, [1, 2, 50])
    scan = source.scan(0, 0, 4)
    assert (
        scan.batch.column(ROW_NUMBER).to_pylist(),
        [(reject.row, reject.count) for reject in scan.rejects],
    ) == ([0, 3], [(1, 2)])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"a": 1}, 5],
            "memory, row 1: expected a dict with names of columns, got int. Map it to rows like "
            "{'text': ...}, or set on_error to 'skip'.",
        ),
        ([], "memory: has no row from which columns can be determined. Give data with rows."),
        (
            [{"a": 1}, {"a": "x"}],
            "memory, row 1, column 'a': is not of type int64: ",
        ),
        (
            [{"a": 1}] * 1024 + [{"b": 1}],
            "memory, row 1024: column 'b' is not in the first 1024 rows (have: a).",
        ),
        ([{"a": 1}] * 1024 + [{"a": "x"}], "memory, row 1024, column 'a': is not of type int64: "),
    ],
)
def test_rows_that_are_none(rows: list, message: str) -> None:
    source = open_object(Rows(rows))
    with pytest.raises(SourceError, match=re.escape(message)):
        source.read(0, 0, len(rows))


def test_grain(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain", reason="grain is optional")
    data = (
        grain.MapDataset.source(Rows(ROWS))
        .map(lambda row: {"text": row["text"].upper()})
        .filter(lambda row: not row["text"].endswith("3"))
    )
    source = source_of(tmp_path, data_files=data)
    assert_stateless_reads(source, [1, 33])
    assert source.read(0, 2, 5).column("text").to_pylist() == ["ROW 2", "ROW 4"]
    with pytest.raises(SourceError, match=r"MapDataset never ends\. Take off its repeat"):
        open_object(data.repeat())
    forward = source_of(tmp_path, data_files=data.to_iter_dataset(), version="1")
    assert forward.read(0, 0, 3).column("text").to_pylist() == ["ROW 0", "ROW 1", "ROW 2"]
    assert_stateless_reads(forward, [33])
    sliced = grain.MapDataset.source(Rows(ROWS)).shuffle(seed=3)[5:20]
    assert source_of(tmp_path, data_files=sliced).read(0, 0, 15).column("n").to_pylist() == [
        sliced[i]["n"] for i in range(15)
    ]


def test_datasets_in_memory(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is optional")
    plain = datasets.Dataset.from_list(ROWS)
    for data in (
        plain,
        plain.shuffle(seed=1),
        plain.select([5, 3, 3, 9]),
        plain.with_format("numpy"),
    ):
        source = source_of(tmp_path, data_files=data)
        assert_stateless_reads(source, [1, 2, 50])
        assert source.read(0, 0, len(data)).column("text").to_pylist() == list(data["text"])
    assert source_of(tmp_path, data_files=plain).select(["n"]).schema.names == ["n"]
    assert (
        source_of(tmp_path, data_files=plain).fingerprint
        == source_of(tmp_path, data_files=datasets.Dataset.from_list(ROWS)).fingerprint
    )
    both = datasets.DatasetDict(train=plain, test=plain.select(range(3)))
    assert source_of(tmp_path, data_files=both, split="test").shards[0].num_rows == 3
    with pytest.raises(
        ConfigError,
        match=re.escape("split: holds several splits (have: train, test). Name one by split=."),
    ):
        source_of(tmp_path, data_files=both)
    stream = source_of(tmp_path, data_files=plain.to_iterable_dataset(), version="1")
    assert stream.read(0, 0, len(plain)).to_pylist() == plain.to_list()


def test_rows_that_a_dataset_makes_when_they_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is optional")
    made = datasets.Dataset.from_list(ROWS).with_transform(
        lambda batch: {"text": [text.upper() for text in batch["text"]]}
    )
    for data in (
        {"data_files": made},
        {"data_files": datasets.DatasetDict(train=made), "split": "train"},
    ):
        source = source_of(tmp_path, **data)
        assert_stateless_reads(source, [1, 50])
        assert source.read(0, 7, 9).column("text").to_pylist() == ["ROW 7", "ROW 8"]
        assert "n" not in source.schema.names


def test_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is optional")
    plain = datasets.Dataset.from_list(ROWS)
    plain.shuffle(seed=1).save_to_disk(tmp_path / "one", num_shards=3)
    source = source_of(tmp_path, data_files=str(tmp_path / "one"))
    assert_stateless_reads(source, [1, 10])
    assert len(source.shards) == 3
    assert [
        n
        for s, shard in enumerate(source.shards)
        for n in source.read(s, 0, shard.num_rows).column("n").to_pylist()
    ] == plain.shuffle(seed=1)["n"][:]
    datasets.DatasetDict(train=plain, test=plain.select(range(3))).save_to_disk(tmp_path / "two")
    assert (
        source_of(tmp_path, data_files=str(tmp_path / "two"), split="test").shards[0].num_rows == 3
    )
    with pytest.raises(
        ConfigError, match=r"two has no split 'tset' \(have: train, test\)\. Did you mean 'test'"
    ):
        source_of(tmp_path, data_files=tmp_path / "two", split="tset")
    with pytest.raises(
        ConfigError, match=r"datasets\.d\.type: 'json', but .* is a folder of `datasets`"
    ):
        source_of(tmp_path, data_files=tmp_path / "one", type="json")


def test_damaged_saved_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    assert is_saved_dataset(folder)
    with pytest.raises(
        MissingFileError, match=r"data-00000-of-00001\.arrow: named by state\.json, but not there"
    ):
        saved_dataset_files(folder)
    for state, message in (
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "names no data file"),
        ('{"_indices_data_files": [1]}', "flatten_indices"),
    ):
        (folder / "state.json").write_text(state)
        with pytest.raises(SourceError, match=message):
            saved_dataset_files(folder)
    with pytest.raises(ConfigError, match="holds the split 'train' alone, not 'test'"):
        saved_dataset_files(folder, "test")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_files": "a.jsonl", "subset": "en"},
            "subset: applies only to datasets of the Hub. Set type='huggingface'",
        ),
        (
            {"data_files": "a.jsonl", "revision": "v1"},
            "revision: applies only to datasets of the Hub",
        ),
        (
            {"data_files": "a.jsonl", "split": "test"},
            "split: 'test', but these rows name no splits: all of them are 'train'",
        ),
        (
            {"data_files": ["a/b"], "type": "huggingface"},
            "data_files: ['a/b'] names no dataset of the Hub. Write owner/name.",
        ),
        (
            {"data_files": "hf://datasets/a/b", "type": "csv"},
            "type: 'csv', but hf://datasets/a/b is on the Hub",
        ),
        (
            {"data_files": "hf://datasets/a/b/*.csv", "split": "x"},
            "split: has no effect together with a pattern",
        ),
    ],
)
def test_options_without_effect(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DatasetConfig(**options)
    assert message in str(caught.value)


def test_plain_files_are_train(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    assert source_of(tmp_path, data_files=tmp_path / "a.txt", split="train").shards[0].num_rows == 1


def test_what_is_an_object() -> None:
    for plain in (
        "a.txt",
        Path("a.txt"),
        ["a.txt"],
        ROWS,
        pa.table({"a": [1]}),
        {"a": [1]},
        None,
        5,
    ):
        assert not is_dataset_object(plain)


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["1", "-20", NOTHING], [1, -20, None]),
        (["7", "007"], ["7", "007"]),  # both would be 7
        (["1", "1.5"], ["1", "1.5"]),
        ([str(2**63 - 1), str(-(2**63))], [2**63 - 1, -(2**63)]),
        (["1", str(2**63)], ["1", str(2**63)]),
        (["a%3Db", ""], ["a=b", ""]),
    ],
)
def test_values_of_folders_are_numbers_where_all_are(names: list[str], values: list[Any]) -> None:
    found = partition_values([f"/base/of={name}/a.parquet" for name in names], "/base/")
    assert found == [(("of", value),) for value in values]


def test_folders_that_name_values(tmp_path: Path) -> None:
    """Hive partitions are columns; the same for every format, and in patterns."""
    import pyarrow.parquet as pq

    for lang, year, rows in (("en", "2023", 3), ("en", "2024", 2), ("de%2FAT", "2024", 1)):
        folder = tmp_path / "data" / f"lang={lang}" / f"year={year}"
        folder.mkdir(parents=True)
        pq.write_table(
            pa.table({"text": [f"{lang} {i}" for i in range(rows)]}), folder / "part-0.parquet"
        )
    source = open_files(tmp_path / "data")
    assert_stateless_reads(source, [1, 2])
    assert source.schema == pa.schema(
        [("text", pa.large_string()), ("lang", pa.large_string()), ("year", pa.int64())]
    )
    assert source.read(0, 0, 1).to_pylist() == [
        {"text": "de%2FAT 0", "lang": "de/AT", "year": 2024}
    ]
    assert open_files(tmp_path / "data", columns=["year"]).read(1, 1, 2).to_pylist() == [
        {"year": 2023}
    ]
    assert open_files(str(tmp_path / "data" / "lang=en" / "*" / "*.parquet")).schema.names == [
        "text",
        "year",
    ]
    assert open_files(
        tmp_path / "data" / "lang=en" / "year=2023" / "part-0.parquet"
    ).schema.names == ["text"]
    with pytest.raises(
        SourceError, match=r"no column 'lng' \(have: text, lang, year\)\. Did you mean 'lang'"
    ):
        open_files(tmp_path / "data", columns=["lng"]).schema  # noqa: B018
    nothing = tmp_path / "data" / "lang=__HIVE_DEFAULT_PARTITION__" / "year=1"
    nothing.mkdir(parents=True)
    (nothing / "part.parquet").write_bytes(
        (tmp_path / "data" / "lang=en" / "year=2023" / "part-0.parquet").read_bytes()
    )
    assert open_files(tmp_path / "data").read(0, 0, 1).to_pylist()[0]["lang"] is None
    other = tmp_path / "data" / "lang=fr"
    (other / "part.parquet").write_bytes(
        (nothing / "part.parquet").read_bytes()
    ) if other.mkdir() is None else None
    with pytest.raises(
        SourceError,
        match=r"its folders name the partitions \['lang'.*Give the two kinds as datasets of their "
        r"own",
    ):
        open_files(tmp_path / "data")


def test_partitions_decide_the_fingerprint(tmp_path: Path) -> None:
    for lang in ("en", "fr"):
        (tmp_path / lang / f"lang={lang}").mkdir(parents=True)
        (tmp_path / lang / f"lang={lang}" / "a.jsonl").write_text('{"text": "x"}\n')
    one, two = open_files(tmp_path / "en"), open_files(tmp_path / "en" / "lang=en")
    assert one.fingerprint != two.fingerprint
    assert one.read(0, 0, 1).to_pylist() == [{"text": "x", "lang": "en", ROW_NUMBER: 0}]
