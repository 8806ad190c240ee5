"""The error budget of bad rows, against counting them one by one; and the file that keeps them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_support import CHATML, talk
from easypipe import (
    DatasetConfig,
    LengthPolicy,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    PromptConfig,
)
from easypipe.cache import bad_rows
from easypipe.cache.bad_rows import ErrorBudget
from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import Counts, Part
from easypipe.cache.ranges import Record
from easypipe.core.errors import BudgetError, ConfigError, SourceError
from easypipe.core.protocols import Reject
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.external.memory import InMemoryShardedSource
from pipelines import config, jsonl, tokenizer
from strategies import examples


def record(rejects: list[Reject], name: str = "a.jsonl", shard: int = 0) -> Record:
    part = Part(shard=shard, start=0, stop=99, docs=1, tokens=1)
    return Record(
        part=part, counts=Counts(), rejects=tuple(rejects), shard_name=name, text="", text_bytes=0
    )


@st.composite
def rejected(draw: st.DrawFn) -> list[Record]:
    found = []
    for name in ("a.jsonl", "b.jsonl"):
        row, rejects = 0, []
        for _ in range(draw(st.integers(0, 4))):
            row += draw(st.integers(0, 3))
            count = draw(st.integers(1, 4))
            benign = draw(st.booleans())
            rejects.append(Reject(row=row, reason="null", detail="d", benign=benign, count=count))
            row += count
        found.append(record(rejects, name))
    return found


@examples(60)
@given(rejected(), st.one_of(st.none(), st.integers(0, 9)), st.sampled_from(["skip", "error"]))
def test_the_row_that_is_one_too_many_is_named(
    records: list[Record], most: int | None, on_error: bad_rows.OnError
) -> None:
    bad = [
        (one.shard_name, row)
        for one in records
        for reject in one.rejects
        if not reject.benign
        for row in range(reject.row, reject.row + reject.count)
    ]
    budget = ErrorBudget("d", "text", on_error, most)
    allowed = 0 if on_error == "error" else most
    over = None if allowed is None or len(bad) <= allowed else bad[allowed]

    def charge_all() -> None:
        for one in records:
            budget.charge(one)

    if allowed is None or over is None:
        charge_all()
        assert budget.bad == len(bad)
        return
    kind = SourceError if on_error == "error" else BudgetError
    with pytest.raises(kind) as caught:
        charge_all()
    assert str(caught.value).startswith(f"{over[0]}, row {over[1]}, column 'text': ")
    number = f"bad row number {allowed + 1} of dataset 'd' (null: d), and max_bad_rows is {most}"
    assert (number in str(caught.value)) == (on_error == "skip")
    assert budget.bad == allowed + 1


def test_where_no_row_became_a_document_the_first_reason_is_told() -> None:
    budget = ErrorBudget("d", "text", "skip", None)
    budget.charge(record([Reject(row=4, reason="empty", benign=True)]))
    budget.charge(record([Reject(row=5, reason="null", detail="later")]))
    budget.require_documents(Counts(rows=9, docs=1))
    with pytest.raises(
        SourceError,
        match=r"dataset 'd', column 'text': not one of 9 rows became a document: empty 1, null 8; "
        r"the first is a\.jsonl, row 4: empty",
    ):
        budget.require_documents(Counts(rows=9, docs=0, rejects={"empty": 1, "null": 8}))
    with pytest.raises(
        SourceError, match=r"not one of 0 rows became a document: there are no rows\."
    ):
        ErrorBudget("d", "text", "skip", None).require_documents(Counts(rows=0, docs=0))


def test_the_quarantine_has_a_line_for_every_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_rows, "RAW_CHARACTERS", 8)
    texts = ["ä", "b" * 6, "c" * 7, "d", None]
    source = InMemoryShardedSource({"text": pa.array([*texts, *texts], pa.string())})
    folder = CacheFolder(tmp_path)
    records = [
        record(
            [
                Reject(row=0, reason="bad", detail="first"),
                Reject(row=1, reason="blank", benign=True, count=2),
                Reject(row=6, reason="long", count=2),
                Reject(row=9, reason="null"),
            ],
            name="rows",
        )
    ]
    name, checksum = bad_rows.write_quarantine(folder, "key", "d", records, source, "text")
    path = tmp_path / "manifests" / "key.quarantine.jsonl"
    assert (name, path.parent.parent) == (path.name, tmp_path)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(line["row"], line["reason"], line["raw"]) for line in lines] == [
        (0, "bad", '"ä"'),
        (6, "long", '"bbbbbb"'),
        (7, "long", '"ccccccc…'),
        (9, "null", "null"),
    ]
    assert {(line["dataset"], line["file"]) for line in lines} == {("d", "rows")}
    assert lines[0]["detail"] == "first"
    assert len(checksum) == 32
    assert "ä" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kept", [False, True])
def test_a_quarantine_file_that_goes_with_the_process_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", [{"text": "one"}, {"text": None}])
    dataset = DatasetConfig(data_files=str(rows), on_error="quarantine", cache_enabled=kept)
    pipeline = Pipeline(config(tmp_path, datasets=(dataset,))).source().tokenize()
    file = pipeline.tokenized()["dataset1"].materialize().quarantine
    assert (f"{file} is removed when this process ends" in caplog.text) != kept


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_are_tokens_have_the_policy_of_their_dataset(
    tmp_path: Path, streaming: bool, packed: bool
) -> None:
    rows = [json.dumps({"input_ids": [1, 2, 3]}) for _ in range(9)]
    rows[2], rows[4], rows[6] = "{broken", json.dumps({"input_ids": []}), "[1]"
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))

    def read(**options: Any) -> int:
        config = PipelineConfig(
            datasets=[DatasetConfig(name="d", data_files=str(tmp_path / "rows.jsonl"), **options)],
            default_tokenizer=tokenizer(),
            cache_dir=tmp_path / "cache",
            seed=1,
            pack=PackStageConfig(seq_length=6),
            load=LoadStageConfig(batch_size=2, drop_last=False),
            streaming=streaming,
        )
        chain = Pipeline.from_config(config).source().tokenize()
        chain = (chain.pack() if packed else chain).load()
        loader = chain.build()
        rows = sum(len(batch["input_ids"]) for batch in loader)
        stage, made = ("stream", "documents") if streaming else ("tokenize", "written")
        became = (loader if streaming else chain).ledger().find(stage, "d", "rows").out
        assert dict(became) == {made: 6, "empty": 1, "unparsable": 1, "not_an_object": 1}
        return rows

    for options in ({"on_error": "error"}, {"on_error": "skip", "max_bad_rows": 1}):
        with pytest.raises(SourceError, match=r"rows\.jsonl"):
            read(**options)
    assert read(on_error="skip", max_bad_rows=2) == read(on_error="skip")
    assert not list(tmp_path.rglob("*.quarantine.jsonl"))
    if not streaming:
        with pytest.raises(SourceError, match=r"rows\.jsonl"):
            read(on_error="quarantine", max_bad_rows=1)
        read(on_error="quarantine", max_bad_rows=2)
        (kept,) = tmp_path.rglob("*.quarantine.jsonl")
        assert len(kept.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"on_error": "skip", "max_bad_rows": 3}, "max_bad_rows"),
        ({"on_error": "quarantine"}, "on_error"),
    ],
)
def test_packed_rows_have_no_policy_for_bad_ones(
    tmp_path: Path, options: dict[str, Any], key: str
) -> None:
    row = {"input_ids": [1, 2, 3], "segment_ids": [1, 1, 1]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4))

    def chain(**options: Any) -> Pipeline:
        dataset = DatasetConfig(name="d", data_files=str(tmp_path / "rows.jsonl"), **options)
        config = PipelineConfig(datasets=[dataset], cache_dir=tmp_path / "cache", seed=1)
        return Pipeline.from_config(config).source()

    with pytest.raises(ConfigError, match=rf"datasets\.d\.{key}: has no effect on rows that are"):
        chain(**options).load({"batch_size": 2})
    loader = chain(on_error="skip").load({"batch_size": 2}).build()
    assert sum(len(batch["input_ids"]) for batch in loader) == 4


@pytest.mark.parametrize("kind", ["text", "trained", "pairs", "budgets", "room", "trimmed"])
def test_a_row_at_which_the_tokenizer_panics_leaves_the_others_as_they_are(
    tmp_path: Path, kind: str
) -> None:
    """`tokenizers` panics where its pattern gives up; a panic is not an Exception."""
    folder = Path(shutil.copytree(tokenizer(), tmp_path / "tokenizer"))
    values = json.loads((folder / "tokenizer.json").read_text())
    gives_up = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    values["pre_tokenizer"] = gives_up | {"invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    pair, chat = PromptConfig(format_type="prompt_completion"), PromptConfig(template=CHATML)
    cut = {"tokenizer_kwargs": {"max_length": 64}}
    options: dict[str, Any] = {
        "text": {"content_field": "completion"},
        "trained": {"prompt": pair},
        "budgets": {"prompt": pair, "length": LengthPolicy(budgets={"prompt": 9}), **cut},
        "room": {"prompt": chat},
        "trimmed": {"prompt": chat, "length": LengthPolicy(policy="trim_oldest_turns"), **cut},
        "pairs": {
            "prompt": PromptConfig(format_type="prompt_completion", rejected_column="rejected")
        },
    }[kind]

    def tokens(rows: list[dict[str, Any]], cache: str, on_error: str = "error") -> Any:
        dataset = DatasetConfig(
            name="d", data_files=rows, tokenizer=str(folder), on_error=on_error, **options
        )
        pack = PackStageConfig(seq_length=64)
        config = PipelineConfig(datasets=[dataset], cache_dir=tmp_path / cache, pack=pack)
        # several calls of the tokenizer
        pipeline = Pipeline.from_config(config).source().tokenize({"batch_size": 3})
        pipeline.prepare()
        source = pipeline.get_data()["d"]
        batch = source.read(0, 0, source.shards[0].num_rows)
        return batch.drop_columns([ROW_NUMBER]), pipeline.ledger().find("tokenize", "d", "rows").out

    good: list[dict[str, Any]]
    good = [{"prompt": f"{n} ", "completion": f"{n} 1 2", "rejected": f"{n} 3"} for n in range(9)]
    bad = {"prompt": "1 ", "completion": "a" * 40 + "b", "rejected": "2"}
    bad |= {"prompt": bad["completion"]} if kind == "budgets" else {}
    for row in (*good, bad):
        row["messages"] = talk(row["prompt"], row["completion"], row["prompt"], "So.")
    mixed = [*good[:4], bad, *good[4:]]
    with pytest.raises(
        SourceError,
        match=r"row 4.*: refused_by_tokenizer: .*cannot be encoded.*Leave such rows out, or give a "
        r"tokenizer that takes them, or set on_error",
    ):
        tokens(mixed, "error")
    kept, counts = tokens(mixed, "skip", "skip")
    assert counts == {"written": kept.num_rows, "refused_by_tokenizer": 1}
    assert kept.equals(tokens(good, "good")[0])
