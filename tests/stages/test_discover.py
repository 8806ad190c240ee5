"""discover: what stands in files, folders, the Hub and memory, without loading it; and configs that
read what was found.
"""

from __future__ import annotations

import datetime
import html
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import easypipe
from chat_support import CHATML, chat_tokenizer
from easypipe import (
    DatasetConfig,
    Discovery,
    Pipeline,
    PipelineConfig,
    PromptEngine,
    TokenFilesConfig,
    discover,
    tokenize_and_save,
)
from easypipe.cli import main
from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, EasypipeError, MissingFileError, SourceError
from easypipe.discovery import inspection
from easypipe.discovery.page import page
from easypipe.discovery.proposal import propose
from hub_mirror import hub_mirror, publish  # noqa: F401  (a fixture)
from page_cells import cells
from pipelines import jsonl, tokenizer
from told import assert_told
from web import WebServer, web_server

CHAT = Path(__file__).parents[3] / "shared" / "data" / "chat"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYPIPE_CACHE", str(tmp_path / "cache"))


def first_row(dataset: DatasetConfig) -> dict[str, Any]:
    source = Pipeline(PipelineConfig(datasets=(dataset,), seed=1)).source().get_data()["dataset1"]
    return source.read(0, 0, 1).to_pylist()[0]


def assert_reads(found: Discovery) -> None:
    """What is proposed for every part is a config that reads its rows, from Python and from the
    YAML.
    """
    for part in found.parts:
        proposal = part.propose()
        read = [proposal.config]
        if not proposal.config.in_memory:
            read.append(from_dict(DatasetConfig, yaml.safe_load(proposal.yaml())["datasets"][0]))
        for dataset in read:
            row = first_row(dataset)
            for choice in proposal.kind.choices:
                assert choice.column in row
        assert all(reason in proposal.yaml() for reason in proposal.reasons)


def test_a_folder_of_several_datasets(tmp_path: Path) -> None:
    jsonl(
        tmp_path / "qa_train.jsonl", [{"question": f"q{i}", "answer": f"a{i}"} for i in range(30)]
    )
    jsonl(tmp_path / "qa_val.jsonl", [{"question": f"q{i}", "answer": f"a{i}"} for i in range(5)])
    jsonl(tmp_path / "chat.jsonl", [{"messages": TALK}] * 4)
    jsonl(tmp_path / "chat2.jsonl", [{"messages": TALK, "source": "x"}] * 4)
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    found = discover(tmp_path)
    assert isinstance(found, Discovery)
    told = {(part.split, part.kind.name, part.num_rows, len(part.files)) for part in found.parts}
    assert told == {
        ("train", "prompt_completion", 30, 1),
        ("validation", "prompt_completion", 5, 1),
        ("train", "messages", 8, 2),
        ("train", "text", 2, 1),
    }
    assert found.splits == ("train", "validation")
    assert_reads(found)
    with pytest.raises(ConfigError, match="3 parts match 'train'"):
        found.part("train")
    assert found.propose("validation").fields["prompt_field"] == "question"
    assert {part.split for part in discover(tmp_path, split="validation").parts} == {"validation"}
    with pytest.raises(ConfigError, match="nothing here is called 'test'"):
        discover(tmp_path, split="test")


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Discovery:
    """What is found in a folder of three parts, of which two are looked into."""
    monkeypatch.setattr(sys.modules["easypipe.discovery.discover"], "PARTS", 2)
    spoken = [TALK] * 3 + [[{"role": who, "content": "x"}, *TALK] for who in ("system", "tool")]
    for i, talk in enumerate(spoken):  # four files tell who speaks
        row = {"messages": talk} | ({"tools": [{"name": "f"}]} if i else {})
        jsonl(tmp_path / "data" / f"chat{i}.jsonl", [row] * (i + 1))
    rows = [{"instruction": "add " + "1 " * 99, "output": "99"[: 2 * i]} for i in range(3)]
    jsonl(tmp_path / "data" / "test.jsonl", rows)
    jsonl(tmp_path / "data" / "val.jsonl", [{"text": "a"}])
    return discover(tmp_path / "data", sample_rows=1)


CUT = "add " + "1 " * 78 + "…"


def test_everything_that_was_found_is_told(several: Discovery) -> None:
    told = str(several).replace(several.source, "DATA").splitlines()
    assert told == [
        "DATA: 3 parts",
        "",
        "train: json, 2.07 kB in 5 files",
        *(f"  DATA/chat{i}.jsonl" for i in range(4)),
        "  … and 1 more",
        "  rows     15 (read)",
        "  columns  messages (list<struct<role: text, content: text>>), tools (list<struct<name: "
        "text>>)",
        "  kind     OpenAI messages, roles user, assistant, system, with tools",
        "  proposed messages = 'messages': named 'messages' exactly",
        "  proposed tools = 'tools': named 'tools' exactly",
        '  row 0    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", '
        '"content": "hello"}]}',
        "",
        "test: json, 712 bytes",
        "  DATA/test.jsonl",
        "  rows     3 (read)",
        "  columns  instruction (text), output (text)",
        "  kind     Alpaca instructions",
        "  proposed instruction = 'instruction': named 'instruction' exactly",
        "  proposed output = 'output': named 'output' exactly",
        "  refused  1 of the first 3 rows cannot be read this way: nothing_to_train 1; row 0: the output "
        "is empty",
        f'  row 0    {{"instruction": "{CUT}", "output": ""}}',
        "",
        "validation: json, 14 bytes",
        "  DATA/val.jsonl",
        "  rows     not counted: discover this subset and split alone",
        "  note     listed only: 2 parts were looked into",
    ]


def test_the_page_tells_the_same(several: Discovery) -> None:
    proposals = [part.propose() for part in several.parts[:2]]
    with pytest.raises(ConfigError) as refused:
        several.parts[2].propose()
    text = page(several, [*proposals, refused.value])
    assert cells(text) == [
        ["part", "format", "files", "size", "rows", "kind"],
        ["train", "json", "5", "2.07 kB", "15", "messages"],
        ["test", "json", "1", "712 bytes", "3", "alpaca"],
        [
            "validation",
            "json",
            "1",
            "14 bytes",
            "not counted: discover this subset and split alone",
            "",
        ],
        ["column", "type"],
        ["messages", "list<struct<role: text, content: text>>"],
        ["tools", "list<struct<name: text>>"],
        ["messages"],
        [json.dumps(TALK)],
        ["column", "type"],
        ["instruction", "text"],
        ["output", "text"],
        ["instruction", "output"],
        [CUT, ""],
    ]
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "Parts",
        "train: columns",
        "train: first rows",
        "To read train",
        "test: columns",
        "test: first rows",
        "To read test",
        "validation: columns",
        "To read validation, decide first",
    ]
    assert several.propose() == proposals[0], "the training part, where there are several"
    texts = [html.unescape(text) for text in re.findall("<pre>(.*?)</pre>", text, re.DOTALL)]
    assert texts[:2] == [proposal.yaml().rstrip() for proposal in proposals]
    assert texts[2] == (
        "validation: was listed only, not looked into. Discover it by its own subset and split."
    )
    assert proposals[1].yaml().splitlines() == [
        "# Alpaca instructions",
        "# instruction = 'instruction': named 'instruction' exactly",
        "# output = 'output': named 'output' exactly",
        "# 1 of the first 3 rows cannot be read this way: nothing_to_train 1; row 0: the output is empty",
        "datasets:",
        f"- data_files: {several.parts[1].files[0]}",
        "  prompt:",
        "    format_type: alpaca",
        "    input_columns:",
        "    - instruction",
        "    label_column: output",
    ]


def test_globs_hive_and_compressed(tmp_path: Path) -> None:
    for lang in ("de", "en"):
        folder = tmp_path / "hive" / f"lang={lang}"
        folder.mkdir(parents=True)
        pq.write_table(
            pa.table({"text": [f"{lang} {i}" for i in range(10)]}), folder / "part.parquet"
        )
    found = discover(str(tmp_path / "hive"))
    [part] = found.parts
    assert [column.name for column in part.columns or ()] == ["text", "lang"]
    assert (part.num_rows, part.rows_from, part.format) == (20, "footer", "parquet")
    assert part.sample[0] == {"text": "de 0", "lang": "de"}
    assert_reads(found)
    assert discover(str(tmp_path / "hive" / "*" / "*.parquet")).parts[0].num_rows == 20


def test_only_names_below_the_folder_of_all_files_speak_of_splits(tmp_path: Path) -> None:
    url, here = f"memory://dev-{tmp_path.name}/val", tmp_path / "val"
    for name in ("train.jsonl", "test.jsonl"):
        with fsspec.open(f"{url}/{name}", "wt") as file:
            file.write('{"text": "a"}\n')
        jsonl(here / name, [{"text": "b"}])
    for data in (url, str(here), [url, str(here)]):
        assert {*discover(data).splits} == {"train", "test"}, data


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "rows.json"])
def test_a_terabyte_is_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    start = {
        "jsonl": '{"text": "a"}\n' * 9,
        "csv": "text\n" + "a\n" * 9,
        "txt": "a\n" * 9,
        "json": "[" + '{"text": "a"},' * 9,
    }
    with path.open("wb") as file:
        file.write(start[path.suffix[1:]].encode())
        file.truncate(1 << 40)
    before = _bytes_read()
    found = discover(path)
    assert _bytes_read() - before < 16 << 20
    [part] = found.parts
    assert (part.num_rows, part.rows_from) == (None, None)
    assert part.cost == "counting reads 1.1 TB (count=True, --count)"
    assert (part.kind.name, part.sample[0]) == ("text", {"text": "a"})
    assert "not counted: counting reads 1.1 TB" in str(found)


def test_rows_are_counted_where_asked_or_known(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "x" * 1000}] * 6000)  # more than is looked at
    assert discover(path).parts[0].num_rows is None
    assert not (tmp_path / "cache" / "indexes").exists()
    counted = discover(path, count=True).parts[0]
    assert (counted.num_rows, counted.rows_from) == (6000, "count")
    known = discover(path).parts[0]  # its index is kept now, and the pipeline uses the same
    assert (known.num_rows, known.rows_from) == (6000, "index")
    elsewhere = discover(path, cache_dir=tmp_path / "other").parts[0]
    assert elsewhere.num_rows is None
    assert discover(path, sample_rows=5).parts[0].sample == ({"text": "x" * 1000},) * 5


def test_numbers_that_json_lacks_are_text_in_it(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "score": [[math.nan, -math.inf, 0.5]]}), path)
    [row] = discover(path).to_json()["parts"][0]["sample"]
    assert row["score"] == ["nan", "-inf", 0.5]


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_rows_of_files_that_are_not_opened_are_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Rows are counted whole, or said not to be counted."""
    monkeypatch.setattr(inspection, "LOOKED_AT", 3)
    rows = [{"text": f"row {i}"} for i in range(5)]
    for files in (3, 4):
        folder = tmp_path / str(files)
        folder.mkdir()
        for i in range(files):
            path = folder / f"{i}.{ending}"
            if ending == "jsonl":
                jsonl(path, rows)
            else:
                pq.write_table(pa.Table.from_pylist(rows), path)
        [told], [counted] = discover(folder).parts, discover(folder, count=True).parts
        assert len(told.files) == files
        assert told.num_rows == (5 * files if files == 3 else None)
        assert (told.cost is None) == (files == 3)
        assert counted.num_rows == 5 * files


def test_files_that_are_in_no_part_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last file that is opened, nothing says to which of several kinds files belong."""
    monkeypatch.setattr(inspection, "LOOKED_AT", 2)
    for i, row in enumerate([{"text": "a"}, {"messages": TALK}, {"text": "b"}, {"text": "c"}]):
        jsonl(tmp_path / f"{i}.jsonl", [row])
    found = discover(tmp_path)
    assert [len(part.files) for part in found.parts] == [1, 1]
    [note] = found.notes
    assert note.startswith(f"2 files from {tmp_path / '2.jsonl'} on are in no part")


def test_saved_folders_and_tokens(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": f"some words {i}"} for i in range(50)])
    tokenize_and_save(path, tokenizer(), tmp_path / "saved", progress=lambda event: None)
    found = discover(tmp_path / "saved")
    [part] = found.parts
    assert (part.kind.name, part.num_rows, part.rows_from) == ("tokens", 50, "manifest")
    assert_reads(found)


def test_folders_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(
        [{"instruction": f"do {i}", "input": "", "output": str(i)} for i in range(20)]
    )
    datasets.DatasetDict({"train": rows, "test": rows.select(range(3))}).save_to_disk(
        tmp_path / "dict"
    )
    rows.save_to_disk(tmp_path / "one")
    found = discover(tmp_path / "dict")
    assert [
        (part.split, part.num_rows, part.rows_from, part.kind.name) for part in found.parts
    ] == [
        ("train", 20, "footer", "alpaca"),
        ("test", 3, "footer", "alpaca"),
    ]
    assert_reads(found)
    [one] = discover(str(tmp_path / "one")).parts
    assert (one.num_rows, set(one.reads)) == (20, {"data_files"}), "it has no splits"
    in_memory = discover(datasets.DatasetDict({"train": rows, "test": rows.select(range(3))}))
    assert [(part.split, part.num_rows, part.rows_from) for part in in_memory.parts] == [
        ("train", 20, "memory"),
        ("test", 3, "memory"),
    ]
    assert_reads(in_memory)
    both = datasets.DatasetDict({"train": rows, "test": rows.select(range(3))})
    assert [part.split for part in discover(both, split="test").parts] == ["test"]
    assert_reads(discover(rows))


def test_rows_in_memory() -> None:
    # JSON in text is known by what stands in the rows, however many are shown
    talk = {"chat": json.dumps(TALK), "id": "x"}
    assert (
        discover([talk], sample_rows=0)
        .propose(columns={"messages": "chat"})
        .fields["content_field"]
        == "chat"
    )
    for data in ([{"text": "a"}] * 3, {"text": ["a"] * 3}, pa.table({"text": ["a"] * 3})):
        found = discover(data)
        assert [(part.num_rows, part.kind.name) for part in found.parts] == [(3, "text")]
        assert_reads(found)
    proposal = discover([{"text": "a"}]).propose()
    assert "data_files: the rows are in memory" in proposal.yaml()


def test_the_hub(hub_mirror: WebServer) -> None:  # noqa: F811
    lines = "".join(
        json.dumps({"question": f"q {i}", "answer": "a " * 400}) + "\n" for i in range(20_000)
    ).encode()
    main = [{"split": name, "path": f"main/{name}.jsonl"} for name in ("train", "test")]
    card = {
        "configs": [
            {"config_name": "main", "default": True, "data_files": main},
            {"config_name": "socratic", "data_files": [{"split": "train", "path": "socratic/*.jsonl"}]},
        ],
        "dataset_info": [{"config_name": "main", "splits": [{"name": "train", "num_examples": 20_000}]}],
    }  # fmt: skip
    files = {
        "README.md": b"# card",
        "main/train.jsonl": lines,
        "main/test.jsonl": lines[: lines.index(b"\n") + 1],
        "socratic/a.jsonl": lines,
    }
    publish(hub_mirror, "org/gsm", files, cardData=card)
    before = hub_mirror.sent
    found = discover("hf://datasets/org/gsm")
    assert hub_mirror.sent - before < 30 << 20 < 2 * len(lines)
    assert (found.configs, found.splits) == (("main", "socratic"), ("train", "test"))
    assert [(part.name, part.num_rows, part.rows_from) for part in found.parts] == [
        ("main/train", 20_000, "card"),
        ("main/test", 1, "read"),
        ("socratic/train", None, None),
    ]
    part = found.part("train", subset="socratic")
    assert part.kind.name == "prompt_completion"
    assert part.propose().fields == {
        "data_files": "hf://datasets/org/gsm",
        "type": "huggingface",
        "split": "train",
        "subset": "socratic",
        "prompt_field": "question",
        "completion_field": "answer",
    }
    assert first_row(part.propose().config)["question"] == "q 0"
    [test] = discover("org/gsm", type="huggingface", subset="main", split="test").parts
    assert test.num_rows == 1
    with pytest.raises(ConfigError, match=r"no part 'validation'.*main/train"):
        discover("org/gsm", type="huggingface", split="validation")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such file or folder"):
        discover(tmp_path / "nothing.jsonl")
    (tmp_path / "a.xyz").write_text("?")
    with pytest.raises(SourceError, match="its extension names no format"):
        discover(tmp_path / "a.xyz")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no footer")
    with pytest.raises(SourceError, match="truncated"):
        discover(tmp_path / "bad.parquet")
    jsonl(tmp_path / "good.jsonl", [{"text": "a"}])
    found = discover([tmp_path / "good.jsonl", tmp_path / "bad.parquet", tmp_path / "a.xyz"])
    assert len(found.parts) == 1
    assert any("bad.parquet: truncated" in note for note in found.notes)
    assert any("a.xyz: its extension names no format" in note for note in found.notes)
    beside = discover([tmp_path / "good.jsonl", tmp_path / "a.xyz"]).propose()
    assert beside.fields["data_files"] == str(tmp_path / "good.jsonl")
    (tmp_path / "lines.log").write_text('{"text": "a"}\n')
    [part] = discover(tmp_path / "lines.log", type="jsonl").parts
    assert (part.format, part.num_rows) == ("json", 1)
    (tmp_path / "some.jsonl").write_text('{"text": "a"}\nnot json\n{"text": "b"}\n')
    [part] = discover(tmp_path / "some.jsonl").parts
    assert len(part.sample) == 2
    assert any("1 of the first 3 rows are bad; row 1: unparsable" in note for note in part.notes)
    for options, message in (
        ({"subset": "x"}, "only to datasets of the Hub"),
        ({"sample_rows": -1}, "Give 0 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            discover(tmp_path / "good.jsonl", **options)
    with pytest.raises(ConfigError, match="says nothing about rows in memory"):
        discover([{"text": "a"}], type="json")
    with pytest.raises(ConfigError, match="these rows name no splits"):
        discover([{"text": "a"}], split="test")
    with pytest.raises(ConfigError, match="is a part of a split"):
        discover(tmp_path / "good.jsonl", split="train[:10]")
    with pytest.raises(ConfigError, match="not files of tokens"):
        discover(tmp_path / "good.jsonl", token_files=TokenFilesConfig(dtype="uint16"))


def test_a_hostile_dataset_does_not_steer_the_terminal(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "rows.jsonl", [{"text": "\x1b[2J\u202e\x9b1m", "\x1b]0;owned\x07": "a"}]
    )
    shown = str(discover(path))
    assert not set(shown) & set("\x1b\x07\x9b\u202e")
    assert "\\u{1b}]0;owned" in shown


def test_credentials_are_not_written(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "good.jsonl", [{"text": "a"}])
    found = discover(path, storage_options={"token": "hush"})
    proposal = found.propose()
    assert proposal.config.storage_options == {"token": "hush"}
    for shown in (
        str(found),
        repr(found),
        json.dumps(found.to_json()),
        proposal.yaml(),
        repr(proposal),
    ):
        assert "hush" not in shown
    assert "storage_options: as you gave them" in proposal.yaml()


def test_an_arrow_stream_elsewhere_is_not_read_through(tmp_path: Path) -> None:
    table = pa.table({"text": ["some text " * 100] * 40_000})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    with web_server() as server:
        server.files["/rows.arrow"] = sink.getvalue().to_pybytes()
        [part] = discover(f"{server.url}/rows.arrow").parts
        assert server.sent < 24 << 20 < len(server.files["/rows.arrow"])
    assert (part.num_rows, part.kind.name) == (None, "text")
    assert str(part.cost).startswith("counting reads 4")
    (tmp_path / "rows.arrow").write_bytes(server.files["/rows.arrow"])
    assert discover(tmp_path / "rows.arrow").parts[0].num_rows == 40_000


def test_nothing_is_mapped_silently(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "q", "solution": "s", "answer": "a"}])
    found = discover(path)
    with pytest.raises(
        ConfigError,
        match=r"'solution' and 'answer' fit 'completion' equally well.*Say which one is meant",
    ):
        found.propose()
    assert found.propose(columns={"completion": "answer"}).fields["completion_field"] == "answer"
    assert (
        found.propose(kind="text", columns={"text": "solution"}).fields["content_field"]
        == "solution"
    )
    unknown = discover(jsonl(tmp_path / "ab.jsonl", [{"a": "x", "b": "y"}]))
    with pytest.raises(
        ConfigError,
        match=r"train: the names of its columns do not show what a row is \(have: a, b\)\. "
        r"Name the columns: kind='text'",
    ):
        unknown.propose()
    with pytest.raises(
        ConfigError,
        match=r"Name the columns: kind='prompt_completion', columns=\{'prompt': ..., 'completion': ...\}\.$",
    ):
        unknown.propose(kind="prompt_completion")
    assert unknown.propose(kind="text", columns={"text": "a"}).fields["content_field"] == "a"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p ", "chosen": "c", "rejected": "r"},
        {"chosen": "p: c", "rejected": "p: r"},
        {
            side: [{"role": "user", "content": "p"}, {"role": "assistant", "content": side}]
            for side in ("chosen", "rejected")
        },
    ],
    ids=["prompt", "text", "messages"],
)
def test_pairs_are_proposed_as_pairs(tmp_path: Path, row: dict[str, Any]) -> None:
    fields = dict(discover(jsonl(tmp_path / "pairs.jsonl", [row] * 3)).propose().fields)
    assert (fields["completion_field"], fields["rejected_field"]) == ("chosen", "rejected")
    assert fields.get("prompt_field") == ("prompt" if "prompt" in row else None)
    if not isinstance(row["chosen"], str):
        fields["chat_template"] = CHATML
    config = PipelineConfig(
        datasets=[DatasetConfig(name="x", tokenizer=chat_tokenizer(), **fields)],
        seed=1,
        cache_dir=tmp_path / "cache",
    )
    documents = Pipeline.from_config(config).source().tokenize().get_data()["x"]
    assert documents.info.pairs
    assert documents.read(0, 0, 3).num_rows == 3


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_pairs_without_their_prompt_are_refused(tmp_path: Path, role: str) -> None:
    row = {
        "prompt": "p",
        **{side: [{"role": role, "content": side}] for side in ("chosen", "rejected")},
    }
    with pytest.raises(ConfigError, match="begin with the answer"):
        discover(jsonl(tmp_path / "pairs.jsonl", [row] * 3)).propose()


def test_speakers_of_pairs_are_named_as_well(tmp_path: Path) -> None:
    row = {
        side: [{"role": "user", "content": "hi"}, {"role": "bot", "content": side}]
        for side in ("chosen", "rejected")
    }
    found = discover(jsonl(tmp_path / "pairs.jsonl", [row] * 3))
    with pytest.raises(ConfigError, match=r"unknown roles: 'bot'"):
        found.propose()
    assert found.propose(roles={"bot": "assistant"}).config.prompt is not None


def test_who_speaks_is_not_guessed(tmp_path: Path) -> None:
    def talk(first: str, second: str) -> dict[str, Any]:
        return {
            "conversations": [{"from": first, "value": "hi"}, {"from": second, "value": "hello"}]
        }

    known = discover(jsonl(tmp_path / "known.jsonl", [talk("human", "gpt")] * 4))
    assert_reads(known)
    other = discover(jsonl(tmp_path / "other.jsonl", [talk("human", "bot")] * 4))
    with pytest.raises(ConfigError, match=r"unknown roles: 'bot'.*: roles=\{'bot': 'assistant'\}"):
        other.propose()
    said = other.propose(roles={"bot": "assistant"})
    for proposal in (known.propose(), said):
        dataset = yaml.safe_load(proposal.yaml())["datasets"][0]
        dataset["prompt"]["template"] = "chatml"
        [segment] = (
            easypipe.preview({"datasets": [dataset], "default_tokenizer": tokenizer()}, 1)
            .samples[0]
            .segments
        )
        assert [piece.text for piece in segment.pieces or () if not piece.masked] == [
            "hello<|im_end|>"
        ]
    with pytest.raises(ConfigError, match="roles: has no effect on plain text"):
        discover([{"text": "a"}]).propose(roles={"bot": "assistant"})


@pytest.mark.parametrize(
    ("talks", "asked"),
    [
        (["customer helper boss", "boss customer helper"], "customer=user helper=assistant boss=ROLE"),
        (["Ann Bob Ann Bob", "Ann Bob"], "Ann=user Bob=assistant"),
        (["Ann Bob", "Bob Ann"], "Ann=ROLE Bob=ROLE"),
        (["Ann Bob Eve"], "Ann=ROLE Bob=ROLE Eve=ROLE"),
        (["system Ann gpt"], "Ann=user"),
        (["gpt Ann"], "Ann=ROLE"),
        (["helper customer"], "helper=assistant customer=user"),
        (["human agent tool agent"], "agent=assistant"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keys", [("from", "value"), ("who", "says"), ("role", "content")])
def test_names_and_order_make_a_guess_of_who_answers_where_they_decide_it(
    talks: list[str], asked: str, keys: tuple[str, str], tmp_path: Path
) -> None:
    rows = [
        {"chat": [dict(zip(keys, (who, "x"), strict=True)) for who in talk.split()]}
        for talk in talks
    ]
    [part] = discover(jsonl(tmp_path / "rows.jsonl", rows)).parts
    with pytest.raises(ConfigError) as caught:
        propose(part, typed=True)
    typed = " ".join(f"--role {one}" for one in asked.split())
    assert f": {typed}." in str(caught.value)
    assert ("a guess" in str(caught.value)) == (asked.count("=") > asked.count("=ROLE"))
    given = dict(one.split("=") for one in asked.replace("ROLE", "assistant").split())
    assert part.propose(roles=given).config.prompt is not None


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "q", "solution": "s", "answer": "a"}])
    assert main(["discover", str(path)]) == 3
    out = capsys.readouterr().out
    assert "rows     1 (read)" in out
    assert 'row 0    {"question": "q"' in out
    assert "decide first" in out
    assert "equally well" in out
    assert main(["discover", str(path), "--column", "completion=answer"]) == 0
    assert (
        yaml.safe_load(capsys.readouterr().out.partition("To read")[2].partition(":\n")[2])[
            "datasets"
        ][0]["completion_field"]
        == "answer"
    )
    assert main(["discover", str(path), "--json"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"source", "subsets", "splits", "parts", "notes"}
    assert shown["parts"][0]["kind"]["ties"][0]["columns"] == ["solution", "answer"]
    assert "equally well" in shown["parts"][0]["refused"]
    assert main(["discover", str(tmp_path / "nothing")]) == 2
    assert main(["discover", str(path), "--column", "completion"]) == 2
    assert main(["discover", str(path), "--role", "bot"]) == 2


@pytest.mark.parametrize("undecided", [(), (0,), (1,), (0, 1)])
def test_the_command_ends_with_3_where_any_part_is_undecided(
    tmp_path: Path, undecided: tuple[int, ...]
) -> None:
    """Whichever of two splits it is."""
    (tmp_path / "both").mkdir()
    for i, name in enumerate(("train", "test")):
        more = {"solution": "s"} if i in undecided else {}
        jsonl(tmp_path / "both" / f"{name}.jsonl", [{"question": "q", "answer": "a", **more}])
    look = ["discover", str(tmp_path / "both"), "--json"]
    assert main(look) == (3 if undecided else 0)


@pytest.mark.shared
@pytest.mark.skipif(not CHAT.is_dir(), reason="needs ../shared/data/chat")
def test_the_files_of_chat() -> None:
    found = discover(CHAT)
    told = {part.kind.name: part for part in found.parts}
    assert {name: part.num_rows for name, part in told.items()} == {
        "alpaca": 2000,
        "prompt_completion": 3000,
        "messages": 155,
    }
    assert told["messages"].kind.roles == ("user", "assistant", "tool", "system")
    assert told["messages"].kind.tools
    assert_reads(found)


def test_exported() -> None:
    assert easypipe.discover is discover


def _bytes_read() -> int:
    with open(f"/proc/{os.getpid()}/io") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])


PROSE = "A line of text that was\nwrapped at some width.\n\n" * 9
FILES: dict[str, tuple[dict[str, str], str, str]] = {
    "lines": ({"a.txt": "one\ntwo\nthree\n"}, "line", "no blank lines stand between its lines"),
    "single lines": (
        {f"{i}.txt": f"only {i}\n" for i in range(5)},
        "line",
        "no file has several lines of text",
    ),
    "spaced lines": (
        {"a.txt": "one\n\ntwo\n\nthree\n\nfour\n"},
        "line",
        "each paragraph is a line",
    ),
    "one book": (
        {"a.txt": PROSE},
        "paragraph",
        "blank lines stand between runs of 2.0 lines on average",
    ),
    "many texts": (
        {f"{i}.txt": PROSE for i in range(6)},
        "file",
        "6 files of about 432 bytes, with several paragraphs each",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_unit_of_text_files_is_told_and_why(tmp_path: Path, name: str) -> None:
    files, unit, why = FILES[name]
    for file, text in files.items():
        (tmp_path / "data" / file).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / file).write_text(text)
    found = discover(tmp_path / "data")
    [part] = found.parts
    proposal = part.propose()
    assert proposal.config.text_unit == unit
    assert proposal.reasons[0].startswith(f"text_unit = '{unit}': ")
    assert why in proposal.reasons[0]
    assert f"proposed {proposal.reasons[0]}" in str(found)
    assert_reads(found)
    read = (
        Pipeline(PipelineConfig(datasets=(proposal.config,), seed=1))
        .source()
        .get_data()["dataset1"]
    )
    assert sum(shard.num_rows for shard in read.shards) == part.num_rows
    assert part.sample[0]["text"] == read.read(0, 0, 1).column("text").to_pylist()[0]


def test_what_is_merely_the_only_text_is_not_proposed_as_the_text(tmp_path: Path) -> None:
    for rows in (
        [{"id": f"simple_{i}", "function": [{"name": "f"}], "n": i} for i in range(3)],
        [{"category": "writing", "turns": ["a", "b"], "question_id": i} for i in range(3)],
    ):
        found = discover(jsonl(tmp_path / "rows.jsonl", rows))
        with pytest.raises(
            ConfigError,
            match=r"train: the names of its columns do not show what a row is .*Name the columns: kind='text'",
        ):
            found.propose()
        column = next(iter(rows[0]))
        assert found.propose(kind="text", columns={"text": column}).config.content_field == column
    # there is nothing else
    assert discover([{"blurb": "a text"}]).propose().config.content_field == "blurb"


def test_proposals_are_tried_on_the_first_rows(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "what is this?", "image": None},
        {"type": "image", "text": None, "image": "x.png"},
    ]
    talks = [
        {"messages": [{"role": "user", "content": parts}, TALK[1] | {"content": [parts[0]]}]}
        for _ in range(5)
    ]
    found = discover(jsonl(tmp_path / "images.jsonl", talks))
    with pytest.raises(
        ConfigError,
        match="but 5 of the first 5 rows cannot be read this way: multimodal 5; row 0: message 0 holds a "
        "part",
    ):
        found.propose()
    assert "refused  5 of the first 5 rows" in str(found)
    assert "proposed messages" not in str(found)
    some = discover(
        [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}]
    ).propose()
    assert (
        "# 1 of the first 2 rows cannot be read this way: null 1; row 1: column 'completion' has no text"
        in some.yaml()
    )
    good, bad = ({"prompt": "a", "completion": "b", "label": label} for label in (True, None))
    assert (
        "# 1 of the first 2 rows cannot be read this way: no_verdict 1; row 1: column 'label' is "
        "null" in discover([good, bad]).propose().yaml()
    )
    assert (
        "# all of the first 2 rows can be read this way"
        in discover([{"text": "a"}, {"text": "b"}]).propose().yaml()
    )


def test_labels_of_csv_are_verdicts_if_all_are_true_or_false(tmp_path: Path) -> None:
    for labels, judged in ((("true", "False"), "label"), (("true", "maybe"), None)):
        rows = [f"a{i},b{i},{label}" for i, label in enumerate(labels)]
        (tmp_path / "rows.csv").write_text("\n".join(["prompt,completion,label", *rows]))
        fields = discover(tmp_path / "rows.csv").propose().fields
        assert fields.get("desirable_field") == judged


def test_the_case_of_roles_does_not_matter(tmp_path: Path) -> None:
    for keys in (("from", "value"), ("role", "content")):
        turns = [
            {keys[0]: who, keys[1]: said}
            for who, said in (("System", "Be brief."), ("User", "hi"), ("Assistant", "hello"))
        ]
        proposal = discover([{"conversations": turns}]).propose()
        assert proposal.config.prompt is not None
        engine = PromptEngine(chat_tokenizer(), proposal.config.prompt)
        assert "<|im_start|>assistant\nhello" in engine.render({"conversations": turns}).text
    strangers = [
        {"conversations": [{"from": "Visitor", "value": "hi"}, {"from": "Host", "value": "hello"}]}
    ]
    with pytest.raises(ConfigError, match=r"roles=\{'Visitor': 'user', 'Host': 'assistant'\}"):
        discover(strangers).propose()
    assert (
        not discover(strangers)
        .propose(roles={"Visitor": "user", "Host": "assistant"})
        .trial.reasons
    )


def test_pairs_whose_prompt_stands_beside_them_are_proposed_with_it() -> None:
    pair = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [TALK[1] | {"content": "go away"}]}
    assert discover([pair] * 3).propose().config.prompt_field == "prompt"
    whole = {
        "prompt": "hi",
        "chosen": TALK,
        "rejected": [TALK[0], TALK[1] | {"content": "go away"}],
    }
    config = discover([whole] * 3).propose().config
    assert (config.prompt_field, config.completion_field) == (None, "chosen")


def test_prompts_alone_and_unpaired_preferences_say_what_is_left() -> None:
    prompts = discover([{"prompt": TALK[:1]}] * 3).propose()
    assert prompts.fields["train_on"] == "all"
    assert any("easypipe generate" in reason for reason in prompts.reasons)
    row = {"prompt": TALK[:1], "completion": TALK[1:]}
    unpaired = discover([row | {"label": n > 0} for n in range(3)]).propose()
    assert unpaired.fields["desirable_field"] == "label"
    assert "on_error" not in unpaired.fields
    assert not unpaired.trial.reasons
    assert any("train.preference: {loss: kto}" in reason for reason in unpaired.reasons)


ASKED, ANSWERED = json.dumps(TALK[:1]), json.dumps(TALK[1:])
PAIR = {"prompt": ASKED, "chosen": ANSWERED, "rejected": ANSWERED}
SPOKEN = [{"from": "Human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
LOUD = [TALK[0] | {"role": "User"}, TALK[1]]
# rows of every kind, and rows of which no kind can be read
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "a"}, {"text": ""}, {"text": None}],
    "messages": [{"messages": TALK, "functions": [{"name": "f"}]}],
    "roles by other words": [{"messages": [{"role": "human", "content": "hi"}, TALK[1]]}],
    "a tool speaks": [{"messages": [*TALK, {"role": "tool", "content": "3"}]}],
    "a flag of its own": [{"messages": [TALK[0], TALK[1] | {"train": "yes"}]}],
    "nobody answers": [{"messages": TALK[:1]}, {"messages": TALK}],
    "other keys": [{"chat": [{"speaker": "user", "text": "hi"}, {"speaker": "bot", "text": "x"}]}],
    "keys of their own": [
        {"chat": [{"who": "user", "says": "hi"}, {"who": "assistant", "says": "x"}]}
    ],
    "keys that nobody knows": [{"chat": [{"wer": "user", "sagt": "hi"}]}],
    "sharegpt": [{"conversations": SPOKEN, "tools": "[]"}],
    "strangers": [{"conversations": [{"from": who, "value": "x"} for who in "abc"]}],
    "alpaca": [{"instruction": "i", "input": "in", "output": "o"}],
    "alpaca without input": [{"instruction": "i", "output": "o"}],
    "completions": [
        {"question": "q", "answer": ""},
        {"question": "", "answer": "a"},
        {"question": "", "answer": ""},
        *({"question": None, "answer": "a"} for _ in range(2)),
    ],
    "completions as JSON": [{"prompt": ASKED, "completion": ANSWERED, "functions": "[]"}],
    "pairs": [{"prompt": "p", "chosen": "c", "rejected": "r"}],
    "pairs as JSON": [PAIR],
    "whole pairs as JSON": [dict.fromkeys(("chosen", "rejected"), json.dumps(TALK))],
    "whole pairs": [{"prompt": "hi", "chosen": LOUD, "rejected": LOUD}],
    "unpaired": [{"prompt": "p", "completion": "c", "label": label} for label in (True, None)],
    "unpaired as JSON": [{"prompt": ASKED, "completion": ANSWERED, "label": True}],
    "prompts": [{"prompt": TALK[:1]}],
    "tokens": [{"input_ids": [1, 2]}],
    "tokens by another name": [{"tokens": [1, 2]}],
    "no kind": [{"a": 1}],
    "two that fit": [{"question": "q", "solution": "s", "answer": "a"}],
    "values": [
        {
            "text": "y" * 160,
            "long": "z" * 161,
            "eight": list(range(8)),
            "nine": list(range(9)),
            "bytes": b"123",
            "date": datetime.date(2026, 1, 31),
            "true": True,
            "float": 0.5,
            "within": {"a": "b", "nothing": None, "wide" * 9: 1, "wider" * 9: 2},
        }
    ],
}


def test_every_kind_is_told_and_proposed_word_for_word() -> None:
    told = []
    for name, rows in ROWS.items():
        found = discover(rows)
        told += [f"### {name}", str(found), "---"]
        try:
            told.append(str(found.propose()))
        except ConfigError as error:
            told.append(f"{error}\n")
    told.append(json.dumps(discover(ROWS["two that fit"]).to_json(), indent=1))
    assert_told("discovered rows", "\n".join(told) + "\n")


def test_every_way_that_files_are_looked_at_is_told_word_for_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small limits, so that small files go over them."""
    limits = {"HEAD_BYTES": 60, "HEADS": 2, "OTHER_HEAD_BYTES": 30, "LONG_HEAD_BYTES": 400}
    for name, value in (limits | {"LOOKED_AT": 3, "LOOKED_AT_REMOTE": 2}).items():
        monkeypatch.setattr(inspection, name, value)
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"row {i}"} for i in range(9)]
    two = [{"messages": [{"role": "user", "content": "a" * 150}, TALK[1]]}] * 2
    jsonl(Path("long rows/a.jsonl"), two)
    jsonl(Path("a row that is too long/a.jsonl"), [{"text": "a" * 500}])
    jsonl(Path("types that differ/a.jsonl"), [{"text": "a", "n": 1}])
    jsonl(Path("types that differ/b.jsonl"), [{"text": "a", "n": "x"}])
    for name, spoken in zip("abc", ("user", "system", "tool"), strict=True):
        jsonl(Path(f"speakers/{name}.jsonl"), [{"messages": [TALK[0] | {"role": spoken}, TALK[1]]}])
    jsonl(Path("columns that lack/a.jsonl"), [{"text": "a"}])
    jsonl(Path("columns that lack/b.jsonl"), [{"text": "b", "n": 1}])
    jsonl(Path("uneven/a.jsonl"), rows[:1])
    jsonl(Path("uneven/b.jsonl"), rows)
    for i in range(5):
        jsonl(Path(f"many/{i}.jsonl"), rows)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{i}.parquet")
    jsonl(Path("kinds/chat_valid.jsonl"), [{"messages": TALK}])
    jsonl(Path("kinds/test/chat.jsonl"), [{"messages": TALK}])
    jsonl(Path("kinds/c.jsonl"), [{"text": "a"}])
    Path("kinds/d.csv").write_text("text,n\na,1\n")
    Path("kinds/e.xyz").write_text("?")
    Path("kinds/f.json").write_text('[{"text": "a"}, 3, {"text": 4}, {"text": "b"}]')
    Path("kinds/broken.parquet").write_bytes(b"PAR1 and no footer")
    Path("books").mkdir()
    for i in range(6):
        Path(f"books/{i}.txt").write_text("A text\nof lines.\n\nAnother\nof them.\n" * 9)
    sources: dict[str, tuple[Any, dict[str, Any]]] = {
        **{
            name: (f"{name}/*.jsonl", {})
            for name in (
                "long rows",
                "types that differ",
                "columns that lack",
                "speakers",
                "uneven",
                "many",
            )
        },
        "counted": ("many", {"count": True, "split": "train"}),
        "columns": ("*.parquet", {"sample_rows": 2}),
        "kinds": ("kinds", {}),
        "test": ("kinds", {"split": "test"}),
        "books": ("books", {}),
        "one book": ("books/0.txt", {}),
        "several": (["kinds/c.jsonl", Path("kinds/test/chat.jsonl")], {}),
        "type": ("kinds/e.xyz", {"type": "jsonl"}),
        "no row": ("a row that is too long", {}),
        "no split": ("kinds", {"split": "dev"}),
        "table": (pa.table({"text": ["a", None]}), {"split": "train"}),
    }
    told = []
    for name, (data, options) in sources.items():
        told.append(f"### {name}")
        try:
            found = discover(data, **options)
        except EasypipeError as error:
            told.append(f"{error}\n")
            continue
        told.append(str(found))
        for part in found.parts:
            fields = {**part.reads, "data_files": str(part.reads["data_files"])}
            told.append(f"reads {part.name}: {fields}" if part.files else f"{part.name}")
        proposals = [part.propose() for part in found.parts]
        told += [*(" | ".join(line) for line in cells(page(found, proposals))), ""]
    assert_told("discovered files", "\n".join(told), DATA=tmp_path)


def test_what_a_hub_dataset_holds_is_told_word_for_word(
    hub_mirror: WebServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each file of three has two rows; two files are looked at, and four parts."""
    monkeypatch.setattr(inspection, "LOOKED_AT_REMOTE", 2)
    monkeypatch.setattr(sys.modules["easypipe.discovery.discover"], "PARTS", 4)
    rows = b'{"question": "q", "answer": "a"}\n' * 2
    parts = {"main": ("train", "test"), "more": ("train", "test", "dev")}
    files = {f"{c}/{s}{i}.jsonl": rows for c, all in parts.items() for s in all for i in range(3)}
    card = {
        "configs": [
            {
                "config_name": name,
                "data_files": [{"split": part, "path": f"{name}/{part}*"} for part in all],
            }
            for name, all in parts.items()
        ],
        "dataset_info": [
            {
                "config_name": name,
                "splits": [
                    {"name": "train", "num_examples": number},
                    {"name": "dev", "num_examples": 7},
                    {"name": "test", "num_examples": "many"},
                ],
            }
            for name, number in (("more", 1_234), ("main", 6))
        ],
    }
    publish(hub_mirror, "org/two", files, cardData=card)
    old = {"a.jsonl": rows, "older.jsonl": rows}
    old_card = {"dataset_info": {"splits": [{"name": "train", "num_examples": 2}]}}
    publish(hub_mirror, "org/one", {"a.jsonl": rows})
    publish(hub_mirror, "org/one", old, commit="b" * 40, revisions=("old",), cardData=old_card)
    told = []
    for data, options in (
        ("hf://datasets/org/two", {}),
        ("hf://datasets/org/two", {"subset": "more", "split": "dev"}),
        ("hf://datasets/org/two", {"subset": "more", "split": "validation"}),
        ("hf://datasets/org/one", {}),
        ("hf://datasets/org/one@old/o*", {}),
        ("hf://datasets/org/one@old/a*", {"revision": "old"}),
        ("hf://datasets/org/one@old/a*", {"revision": "main"}),
        ("hf://datasets/org/one", {"revision": "old", "storage_options": {"token": "hush"}}),
    ):
        told.append(f"### {data} {options}")
        try:
            found = discover(data, **options)
        except EasypipeError as error:
            told.append(f"{error}\n")
            continue
        told += [str(found), *(f"reads {part.name}: {part.reads}" for part in found.parts), ""]
    assert_told("discovered on the Hub", "\n".join(told))
