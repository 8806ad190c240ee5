"""Loader.explain and `easypipe explain`: every token of a batch is traced to its row of a file, by
the plan alone.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from easypipe import Loader, LoadStageConfig, Pipeline, PlanError, load_tokenizer
from easypipe.cli import main
from easypipe.cli.explain import text_line
from easypipe.core.config import to_dict
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, SEGMENT_IDS
from easypipe.loader.explain import ExplainedBatch
from easypipe.loader.rows.stored import StoredRows
from easypipe.plan.windows import MARK_EVERY
from laws import assert_same_batch
from loader_support import MemoryCache, plan_rows, some_docs
from pipelines import config, tokenizer


def build(tmp_path: Path, **options: Any) -> Pipeline:
    values = {
        "mix": {"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": "all_exhausted"},
        "load": {"batch_size": 4},
    } | options
    pipeline = Pipeline.from_config(to_dict(config(tmp_path)) | values).source().tokenize().mix()
    return (pipeline.pack() if "pack" in options else pipeline).load()


def lines(file: str) -> list[str]:
    return [json.loads(line)["text"] for line in Path(file).read_text().splitlines()]


def assert_explains(loader: Loader, batches: list[dict[str, np.ndarray]], *, eos: bool) -> None:
    """Every slot of every batch is a token of the document that is named, encoded anew from its
    file.
    """
    encode = load_tokenizer(tokenizer())
    for step, batch in enumerate(batches):
        explained = loader.explain(step)
        assert [row.row for row in explained.rows] == list(range(len(batch[INPUT_IDS])))
        assert explained.notes == ()
        for row in explained.rows:
            ids, segments = batch[INPUT_IDS][row.row], batch[SEGMENT_IDS][row.row]
            assert [s.segment for s in row.segments] == sorted(set(segments.tolist()) - {0})
            for s in row.segments:
                here = ids[s.slot_start : s.slot_stop]
                assert (segments[s.slot_start : s.slot_stop] == s.segment).all()
                text = lines(s.file)[s.row]
                tokens = encode.reference_encode(text)
                assert s.document_tokens == len(tokens)
                assert s.token_stop <= len(tokens)  # an EOS that packing added is not stored
                expected = tokens[s.token_start : s.token_stop] + (
                    [encode.eos_token_id] if s.ends_with_eos else []
                )
                assert here.tolist() == expected == list(s.ids)
                assert s.text == encode.decode(expected)
                assert s.dataset == Path(s.file).parent.name
                assert s.is_part == (s.token_stop - s.token_start < len(tokens))
                if not eos:
                    assert s.text == text


@pytest.mark.parametrize("strategy", ["greedy", "first_fit"])
@pytest.mark.parametrize("shuffle", [None, 7])
def test_packed_batches(tmp_path: Path, strategy: str, shuffle: int | None) -> None:
    load = {"batch_size": 4, "num_epochs": 2, "shuffle_buffer_size": shuffle, "drop_last": False}
    loader = build(tmp_path, pack={"seq_length": 32, "strategy": strategy}, load=load).build()
    batches = list(loader)
    assert_explains(loader, batches, eos=True)
    last = loader.explain(len(batches) - 1).rows[-1]
    assert (last.epoch, last.slots) == (1, 32)
    rows = sorted(row.number for step in range(len(batches)) for row in loader.explain(step).rows)
    assert rows == list(range(loader.rows.num_rows))


def test_documents_as_rows(tmp_path: Path) -> None:
    loader = build(tmp_path).build()
    assert_explains(loader, list(loader), eos=False)


def test_one_row_and_what_is_not_there(tmp_path: Path) -> None:
    loader = build(tmp_path, pack={"seq_length": 32}).build()
    assert loader.explain(2, 3).rows == (loader.explain(2).rows[3],)
    assert ExplainedBatch(**{**loader.explain(1).__dict__}).to_json()["rows"][0]["segments"]
    json.dumps(loader.explain(1).to_json())
    with pytest.raises(PlanError, match="step 2, row 4: the batch has 4 rows, counted from 0"):
        loader.explain(2, 4)
    with pytest.raises(PlanError, match=r"step 100000: the data ends before it"):
        loader.explain(100_000)
    with pytest.raises(PlanError, match=r"step -1: steps count from 0"):
        loader.explain(-1)


def test_explaining_disturbs_nothing(tmp_path: Path) -> None:
    loader = build(tmp_path, pack={"seq_length": 32}).build()
    expected = list(build(tmp_path, pack={"seq_length": 32}).build())
    for step, batch in enumerate(loader):
        loader.explain(len(expected) - 1 - step)
        assert_same_batch(batch, expected[step])
        assert loader.state().batch == step + 1


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_saved_rows_tell_datasets_where_they_were_saved(tmp_path: Path, form: str) -> None:
    mix = {"stop_strategy": "all_exhausted", "provenance": True}
    planned = build(tmp_path, mix=mix, pack={"seq_length": 32, "shuffle_packed": False}).build()
    save = {"output_dir": str(tmp_path / "out"), "num_shards": 2, "format": form}
    values = to_dict(config(tmp_path)) | {
        "mix": mix,
        "pack": {"seq_length": 32, "shuffle_packed": False},
        "save": save,
    }
    Pipeline.from_config(values).source().tokenize().mix().pack().save().build()
    saved = Pipeline.from_config(
        {
            "datasets": [{"data_files": str(tmp_path / "out")}],
            "seed": 1,
            "cache_dir": str(tmp_path / "c"),
        }
    )
    loader = saved.source().load({"batch_size": 4}).build()
    for step in (0, 3, len(loader) - 1):
        for told, known in zip(loader.explain(step).rows, planned.explain(step).rows, strict=True):
            assert [s.dataset for s in told.segments] == [s.dataset for s in known.segments]
            assert [s.text for s in told.segments] == [s.text for s in known.segments]


def test_saved_rows_name_shard_and_row(tmp_path: Path) -> None:
    values = {
        "pack": {"seq_length": 32},
        "save": {"output_dir": str(tmp_path / "out"), "num_shards": 3},
    }
    build_from = Pipeline.from_config(
        to_dict(config(tmp_path)) | {"mix": {"stop_strategy": "all_exhausted"}, **values}
    )
    build_from.source().tokenize().mix().pack().save().build()
    saved = Pipeline.from_config(
        {
            "datasets": [{"data_files": str(tmp_path / "out")}],
            "seed": 1,
            "cache_dir": str(tmp_path / "c"),
        }
    )
    loader = saved.source().load(LoadStageConfig(batch_size=4, num_epochs=2)).build()
    batches = list(loader)
    source, encode = saved.get_data()["dataset1"], load_tokenizer(tokenizer())
    for step, batch in enumerate(batches):
        for row in loader.explain(step).rows:
            [shard] = {s.file for s in row.segments}
            [number] = {s.row for s in row.segments}
            index = next(i for i, info in enumerate(source.shards) if info.name == shard)
            stored = source.read(index, number, number + 1).column(INPUT_IDS)[0].as_py()
            assert stored == batch[INPUT_IDS][row.row].tolist()
            assert row.epoch == row.number // (loader.rows.num_rows // 2)
            for s in row.segments:
                assert s.text == encode.decode(stored[s.slot_start : s.slot_stop])


def test_masked_tokens_are_marked() -> None:
    docs = some_docs([9, 5, 12, 7])
    masks = [np.arange(len(doc)) >= 3 for doc in docs]
    rows = plan_rows([MemoryCache(docs, masks=masks)], seq_length=16)

    class Words:
        def decode(self, ids: Any) -> str:
            return "".join(f"<{i}>" for i in ids)

    loader = Loader(rows, LoadStageConfig(batch_size=1), decoder=lambda dataset: Words())
    for step in range(len(loader)):
        gathered = rows.gather(np.array([step]))
        for s in loader.explain(step).rows[0].segments:
            mask = gathered[LOSS_MASK][0, s.slot_start : s.slot_stop]
            assert s.masked_tokens == int((mask == 0).sum())
            assert s.text == "".join(f"<{i}>" for i in s.ids)
            told = [span.masked for span in s.spans for _ in range(span.text.count("<"))]
            assert told == (mask == 0).tolist()


def test_changed_rows_and_no_tokenizer() -> None:
    rows = StoredRows({INPUT_IDS: np.arange(2, 34).reshape(4, 8)})
    loader = Loader(rows, LoadStageConfig(batch_size=2))

    def last_is_masked(columns: dict[str, np.ndarray], key: int) -> None:
        columns[LOSS_MASK][-1] = 0

    [row] = loader.map_rows(last_is_masked, version="1").explain(1, 0).rows
    assert (row.number, row.segments[0].masked_tokens, row.segments[0].ids) == (
        2,
        1,
        tuple(range(18, 26)),
    )
    assert loader.explain(0).notes == ("no text: this loader has no tokenizer",)
    assert loader.explain(0).rows[0].segments[0].spans is None


def test_checkpoints_are_kept_so_that_the_next_process_starts_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("easypipe.stages.mix.mixture.window_docs", lambda *_: 8)
    options = {"pack": {"seq_length": 32}, "mix": {"weights": {"code": 0.7, "docs": 0.3}}}
    loader = build(tmp_path, **options).build()
    far = loader.explain(2000)
    assert len(loader.rows.plan.checkpoints()) > 20
    again = build(tmp_path, **options).build()
    assert len(again.rows.plan.checkpoints()) >= len(loader.rows.plan.checkpoints())
    calls: list[int] = []
    window = type(again.rows.plan._planner).window

    def counted(self: Any, state: Any) -> Any:
        calls.append(state.index)
        return window(self, state)

    monkeypatch.setattr(type(again.rows.plan._planner), "window", counted)
    assert again.explain(2000) == far
    assert len(calls) <= MARK_EVERY + 2


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    values = to_dict(config(tmp_path)) | {
        "mix": {"stop_strategy": "restart"},
        "pack": {"seq_length": 64},
        "load": {"mesh": {"data": 64}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump({"data": values, "train": {"output_dir": str(tmp_path / "run"), "steps": 7}})
    )
    return path


def test_the_command(run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run_yaml), "--step", "3", "--row", "2"]) == 0
    text = capsys.readouterr().out
    assert "batch 3" in text
    assert "metrics.jsonl calls it step 4" in text
    assert "a.jsonl" in text
    assert main(["explain", str(run_yaml), "--step", "3", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in explained["rows"]] == list(range(8))
    assert main(["explain", str(run_yaml), "--step", "3", "--row", "8"]) == 2
    assert "the batch has 8 rows" in capsys.readouterr().err


def test_a_step_behind_the_end_of_the_run_is_said_to_be_one(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the record says, whatever the config asks for by now; nothing where there is no run."""
    said = f"the run in {tmp_path / 'run'} ends after 5 steps (0 to 4): this is what it would read"

    def told(step: int, *options: str) -> str:
        assert main(["explain", str(run_yaml), "--step", str(step), "--row", "0", *options]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert told(9).startswith("batch 9")
    before = json.loads(told(9, "--json"))
    (tmp_path / "run").mkdir()
    for record in ("data: {seed: 7}", "data: {seed: 7}\ntrain: {steps: null}"):
        (tmp_path / "run" / "run.yaml").write_text(record)
        assert told(9).startswith("batch 9")
    (tmp_path / "run" / "run.yaml").write_text("data: {seed: 7}\ntrain: {steps: 5}")
    assert told(4).startswith("batch 4")
    assert told(5).startswith(f"{said} next batch 5")
    assert json.loads(told(9, "--json")) == {**before, "run_ends_after": 5}


def test_the_command_takes_the_seed_of_the_run(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(run_yaml), "--step", "3", "--json"]) == 0
    expected = capsys.readouterr().out
    values = yaml.safe_load(run_yaml.read_text())
    del values["data"]["seed"]
    run_yaml.write_text(yaml.safe_dump(values))
    assert main(["explain", str(run_yaml), "--step", "3"]) == 2
    assert "data.seed: not given, so every run draws its own order" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text("data: {seed: 7}")
    assert main(["explain", str(run_yaml), "--step", "3", "--json"]) == 0
    assert capsys.readouterr().out == expected


def test_warm_and_far_is_quick(tmp_path: Path) -> None:
    loader = build(
        tmp_path, pack={"seq_length": 32}, mix={"weights": {"code": 0.7, "docs": 0.3}}
    ).build()
    loader.explain(20_000)
    began = time.perf_counter()
    loader.explain(20_001)
    assert time.perf_counter() - began < 0.5


def test_streaming_is_refused_with_a_reason(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(run_yaml), "--step", "3", "--set", "data.streaming=true"]) == 2
    assert (
        "streaming: its batches are found only by reading all the batches before them"
        in capsys.readouterr().err
    )


def test_a_plan_leaves_checkpoints_for_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("easypipe.stages.mix.mixture.window_docs", lambda *_: 8)
    pipeline = build(tmp_path, pack={"seq_length": 32}, mix={"weights": {"code": 0.7, "docs": 0.3}})
    pipeline.plan(500)
    [kept] = (tmp_path / "cache" / "plans").glob("*.json")
    assert len(json.loads(kept.read_text())["states"]) > 5


@pytest.mark.parametrize(
    ("characters", "said"),
    [
        (0, "a\\nb⟦cd⟧"),
        (1, "a …"),
        (3, "a\\nb …"),
        (4, "a\\nb⟦c⟧ …"),
        (5, "a\\nb⟦cd⟧"),
        (6, "a\\nb⟦cd⟧"),
    ],
)
def test_as_many_characters_are_shown_as_are_asked_for(characters: int, said: str) -> None:
    """Of the text: a line end is one, however it is written. Only what is cut ends in dots."""
    line = text_line([("a\nb", False, None), ("cd", True, None)], characters)
    assert line.plain == "      " + said


def test_a_step_that_no_search_reaches_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "run.yaml").write_text("{}")
    assert main(["explain", str(tmp_path / "run.yaml"), "--step", "1000000000001"]) == 2
    assert "1000000000" in capsys.readouterr().err.replace("1000000000001", "")
