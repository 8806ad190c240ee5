"""Rows that are left out on purpose are counted, not kept: memory does not grow with how many there
are.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from easypipe import BudgetError, DatasetConfig, Pipeline
from easypipe.cache.ranges import kept_rejects
from easypipe.core.protocols import Reject, counted
from pipelines import config

ROWS = 40_000


def test_benign_rows_of_one_reason_are_one_reject() -> None:
    bad = Reject(row=4, reason="null")
    rejects = [
        Reject(row=9, reason="empty", benign=True),
        bad,
        Reject(row=2, reason="empty", benign=True, count=3),
    ]
    assert counted(rejects) == (Reject(row=2, reason="empty", benign=True, count=4), bad)


def test_bad_rows_that_follow_each_other_are_one_reject_of_a_record() -> None:
    bad = [Reject(row=row, reason="null") for row in (3, 4, 5, 8)]
    other = Reject(row=6, reason="null", detail="another")
    blank = Reject(row=7, reason="null", benign=True)
    assert kept_rejects([*bad, other, blank]) == (
        Reject(row=3, reason="null", count=3),
        other,
        blank,
        Reject(row=8, reason="null"),
    )


def test_bad_rows_of_one_kind_take_no_room_and_each_has_its_line(tmp_path: Path) -> None:
    """A record of 5,000 such rows had 750 kB."""
    rows = [{"text": "good"}, *[{"text": {"x": n}} for n in range(5000)], {"text": "good"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def chain(**more: Any) -> Any:
        dataset = DatasetConfig(name="d", data_files=str(tmp_path / "a.jsonl"), **more)
        return Pipeline(config(tmp_path, datasets=[dataset])).source().tokenize().prepare()

    with pytest.raises(BudgetError, match=r"row 4000.*bad row number 4000 .*max_bad_rows is 3999"):
        chain(on_error="skip", max_bad_rows=3999)
    chain(on_error="quarantine", max_bad_rows=5000)
    (record,) = tmp_path.rglob("ranges/**/*.json")
    assert record.stat().st_size < 2000
    (quarantine,) = tmp_path.rglob("*.quarantine.jsonl")
    lines = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(1, 5001))
    assert lines[-1]["raw"] == json.dumps(rows[5000])


def prepared(folder: Path, kind: str, rows: int, *, streaming: bool) -> Any:
    """The ledger's entry of the rows that were read of a file with `rows` empty ones."""
    folder.mkdir()
    path = folder / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": ["one text", *[""] * rows, "two texts"]}), path)
    else:
        head, row = {"jsonl": ("", '{"text": "%s"}'), "txt": ("", "%s"), "csv": ("text\n", "%s")}[
            kind
        ]
        path.write_text(head + row % "one text" + "\n" * rows + "\n" + row % "two texts" + "\n")
    more: dict[str, Any] = (
        {"load": {"batch_size": 1}, "streaming": True, "num_streams": 1} if streaming else {}
    )
    pipeline = (
        Pipeline(config(folder, datasets=[DatasetConfig(name="d", data_files=str(path))], **more))
        .source()
        .tokenize()
    )
    if not streaming:
        source: Any = pipeline.get_data()["d"]
        return source.materialize().ledger.find("tokenize", "d", "rows")
    loader = pipeline.load().build()
    assert len(list(loader)) == 2
    return loader.ledger().find("stream", "d", "rows")


@pytest.mark.parametrize("kind", ["jsonl", "txt", "csv", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_are_left_out_cost_no_memory(tmp_path: Path, kind: str, streaming: bool) -> None:
    prepared(tmp_path / "small", kind, 1, streaming=streaming)  # so that everything is imported
    tracemalloc.start()
    try:
        entry = prepared(tmp_path / "large", kind, ROWS, streaming=streaming)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert entry.out["empty" if kind == "parquet" else "blank_line"] == ROWS
    assert peak < 300 * ROWS, f"{peak / ROWS:.0f} bytes a row"
    assert all(path.stat().st_size < 5000 for path in (tmp_path / "large").rglob("ranges/*/*.json"))


def test_streaming_knows_the_columns_behind_a_first_line_that_is_long(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "' + "a b " * (400 << 10) + '"}\n{"text": "short"}\n'
    )
    more: dict[str, Any] = {"load": {"batch_size": 1}, "streaming": True, "num_streams": 1}
    datasets = [DatasetConfig(name="d", data_files=str(tmp_path / "a.jsonl"))]
    loader = (
        Pipeline(config(tmp_path, datasets=datasets, **more)).source().tokenize().load().build()
    )
    assert len(list(loader)) == 2
