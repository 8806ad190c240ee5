"""Parts of splits, as `datasets` writes them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelines
from easypipe import DatasetConfig, Pipeline
from easypipe.core.errors import ConfigError, SourceError
from easypipe.core.protocols import ShardedSource
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.open import open_files
from easypipe.sources.splits import PartialSource, parse_split
from laws import assert_stateless_reads
from strategies import examples

ROWS = [{"text": f"row {i}"} for i in range(110)]


def texts(source: ShardedSource) -> list[str]:
    return [
        text
        for i, shard in enumerate(source.shards)
        for text in source.read(i, 0, shard.num_rows or 0)["text"].to_pylist()
    ]


def test_parts_that_begin_elsewhere_are_other_shards() -> None:
    """Tokens of the one would be taken for those of the other, whose rows have the same numbers."""
    parts = [
        PartialSource(InMemoryShardedSource(ROWS), part)
        for _, part in map(parse_split, ("t[:10]", "t[10:20]", "t[20:30]"))
        if part
    ]
    assert len({part.shard_identity(0) for part in parts}) == 3


def source_of(folder: Path, **options: object) -> ShardedSource:
    return (
        Pipeline(pipelines.config(folder, datasets=[DatasetConfig(name="d", **options)]))
        .source()
        .get_data()["d"]
    )  # type: ignore[arg-type]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    start=st.none() | st.integers(-60, 60),
    stop=st.none() | st.integers(-60, 60),
    percent=st.booleans(),
)
@examples(60)
def test_a_part_is_what_datasets_makes_of_it(
    sizes: list[int], start: int | None, stop: int | None, percent: bool
) -> None:
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    rows = [{"text": f"row {i}"} for i in range(edges[-1])]
    if not rows:
        return
    shards = InMemoryShardedSource(rows).read(0, 0, len(rows))
    source = Pieces(
        [pa.Table.from_batches([shards]).slice(a, b - a) for a, b in itertools.pairwise(edges)]
    )
    words = ["" if bound is None else f"{bound}{'%' * percent}" for bound in (start, stop)]
    name, part = parse_split(f"train[{words[0]}:{words[1]}]")
    bounds = [
        None if bound is None else round(len(rows) * bound / 100) if percent else bound
        for bound in (start, stop)
    ]
    expected = [row["text"] for row in rows[bounds[0] : bounds[1]]]
    if any(n == 0 and b is not None and b < 0 for n, b in zip(bounds, (start, stop), strict=True)):
        return  # percent of few rows
    assert name == "train"
    assert part is not None
    if not expected:
        with pytest.raises(
            ConfigError, match=re.escape(f"holds none of the {len(rows)} rows. Correct its bounds.")
        ):
            _ = PartialSource(source, part).shards
        return
    made = PartialSource(source, part)
    assert texts(made) == expected
    assert_stateless_reads(made, [1, 2, 7])


class Pieces:
    """Tables as shards."""

    def __init__(self, tables: list[pa.Table]) -> None:
        self.sources = [
            InMemoryShardedSource(table, name=f"t{i}") for i, table in enumerate(tables)
        ]
        self.schema, self.fingerprint = self.sources[0].schema, "pieces"
        self.shards = [source.shards[0] for source in self.sources]

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self.sources[shard].read(0, start, stop)


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train[:10%]", range(11)),
        ("train[100:]", range(100, 110)),
        ("train[-5%:]", range(104, 110)),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "memory", "datasets"])
def test_every_kind_of_rows_has_parts(tmp_path: Path, split: str, rows: range, kind: str) -> None:
    data: object = ROWS
    if kind == "parquet":
        for i, (a, b) in enumerate([(0, 30), (30, 110)]):
            pq.write_table(
                pa.Table.from_pylist(ROWS[a:b]), tmp_path / f"{i}.parquet", row_group_size=17
            )
        data = str(tmp_path / "*.parquet")
    elif kind == "jsonl":
        data = str(pipelines.jsonl(tmp_path / "a.jsonl", ROWS))
    elif kind == "datasets":
        data = pytest.importorskip("datasets", reason="datasets is optional").Dataset.from_list(
            ROWS
        )
        if split != "train[:10%]":
            return
        data = pytest.importorskip("datasets", reason="datasets is optional").DatasetDict(
            train=data
        )
    assert texts(source_of(tmp_path, data_files=data, split=split)) == [f"row {i}" for i in rows]


def test_num_rows_counts_in_the_part(tmp_path: Path) -> None:
    assert texts(source_of(tmp_path, data_files=ROWS, split="train[50:]", num_rows=3)) == [
        "row 50",
        "row 51",
        "row 52",
    ]


def test_a_bad_row_in_a_part_is_named(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    lines[60] = "nonsense"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = pipelines.config(
        tmp_path,
        datasets=[
            DatasetConfig(name="d", data_files=str(tmp_path / "a.jsonl"), split="train[50:]")
        ],
    )
    with pytest.raises(SourceError, match=r"a\.jsonl, row 60"):
        Pipeline(config).source().tokenize().ledger()
    _, part = parse_split("train[50:]")
    assert part is not None
    source = PartialSource(open_files(tmp_path / "a.jsonl", on_error="skip"), part)
    (found,) = source.scan(0, 5, 20).rejects  # rows count from where the part begins
    assert (found.row, source.raw(0, found.row)) == (10, "nonsense")
    numbers = source.read(0, 5, 20).column(ROW_NUMBER).to_pylist()
    assert numbers == [row for row in range(5, 20) if row != 10]
    assert_stateless_reads(source, [7, 13])
    with pytest.raises(
        SourceError, match=r"row 60 was asked for. The part of the split has rows 0:60\.$"
    ):
        source.read(0, 5, 61)


def test_a_part_is_cut_where_its_file_is(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=20)
    (shard,) = source_of(
        tmp_path, data_files=str(tmp_path / "a.parquet"), split="train[30:90]"
    ).shards
    assert (shard.num_rows, shard.cuts) == (60, (0, 10, 30, 50))


@pytest.mark.parametrize("split", ["train[-200:-150]", "train[200:300]", "train[60:50]"])
def test_a_part_without_rows_is_refused(tmp_path: Path, split: str) -> None:
    source = source_of(tmp_path, data_files=ROWS, split=split)
    with pytest.raises(ConfigError, match="holds none of the 110 rows"):
        source.shards  # noqa: B018


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            "train[:10%",
            "split: 'train[:10%' names no split. Write a name, or a part of it: train[:10%], "
            "train[100:200].",
        ),
        ("train+test", "split: 'train+test' names several splits. Make each a dataset of its own."),
        (
            "train[:200%]",
            "split: 'train[:200%]': 200% of the rows are more than all. Give at most 100%.",
        ),
        (
            "test[:10%]",
            "split: 'test[:10%]', but these rows name no splits: all of them are 'train'",
        ),
    ],
)
def test_what_is_no_part(split: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        DatasetConfig(data_files="a.jsonl", split=split)


@pytest.mark.parametrize("other", ["val", "validation", "test", "dev", "eval"])
def test_a_folder_of_splits_has_no_split(tmp_path: Path, other: str) -> None:
    """As written by MDSWriter: `split` names a folder of `local` there, and held-out rows stay so."""
    folder = tmp_path / "data"
    for name in ("train", other):
        (folder / name).mkdir(parents=True)
        pipelines.jsonl(folder / name / "a.jsonl", ROWS[:3])
    refused = f"split: 'train[:2]' would read all of {folder}, with {other}. Give data_files: "
    with pytest.raises(ConfigError, match=re.escape(f"{refused}{folder}/train.")):
        DatasetConfig(data_files=str(folder), split="train[:2]")
    assert len(texts(source_of(tmp_path, data_files=str(folder / "train"), split="train"))) == 3
    (folder / other).rename(folder / "more")
    assert len(texts(source_of(tmp_path, data_files=str(folder), split="train"))) == 6


def test_parts_in_streaming(tmp_path: Path) -> None:
    lines = str(pipelines.jsonl(tmp_path / "a.jsonl", ROWS))
    options = {
        "datasets": [DatasetConfig(name="d", data_files=lines, split="train[:10%]")],
        "streaming": True,
    }
    source = Pipeline(pipelines.config(tmp_path, **options)).source().get_data()["d"]
    assert len(texts(source)) == 11
