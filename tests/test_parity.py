"""`easypipe parity`: tokens and masks of the first rows beside those of transformers."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from chat_support import CHATML, MARKED, REASONING, chat_tokenizer, talk
from easypipe import DatasetConfig, PipelineConfig, PromptConfig
from easypipe.cli import main
from easypipe.core.protocols import Scan
from easypipe.previews import parity
from easypipe.previews.parity import _differing, _Pair
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.formats.jsonlines import JsonShardedSource
from easypipe.transforms.chat.spans import OPEN, Rendered
from easypipe.transforms.columns.base import TransformedSource
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import jsonl
from told import assert_told

pytest.importorskip("transformers", reason="transformers is not installed")

TALK = talk("Why?", "So.", "And now?", "No.", system="Be brief.")
THINKS = talk("Why?", "So.", "And now?", "No.")
THINKS[1]["reasoning_content"] = THINKS[3]["reasoning_content"] = "hm"
PAIR = {"prompt": talk("Why?"), "good": talk("", "So.")[1:], "bad": talk("", "No.")[1:]}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = [*talk("Why?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
CALLS += [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "Three"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TURNS = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
SWITCHED = CHATML + "{% if thinking %}{{ '<think>' }}{% endif %}"

# rows, options of the dataset, texts, texts whose masks are compared
EQUAL: dict[str, tuple[list[dict[str, Any]], dict[str, Any], int, int]] = {
    "own template": ([{"messages": TALK}], {"content_field": "messages"}, 1, 0),
    "markers": ([{"messages": TALK}], {"content_field": "messages", "chat_template": MARKED}, 1, 1),
    "tools": (
        [{"messages": CALLS, "tools": [TOOL]}],
        {"content_field": "messages", "chat_template": "chatml"},
        1,
        1,
    ),
    "flags": (
        [{"messages": [*TALK[:4], TALK[4] | {"train": False}]}],
        {"content_field": "messages", "chat_template": MARKED},
        1,
        0,
    ),
    "ShareGPT": (
        [{"conversations": TURNS}],
        {"prompt": {"format_type": "sharegpt", "template": MARKED}},
        1,
        1,
    ),
    "pairs": (
        [PAIR],
        {"prompt_field": "prompt", "completion_field": "good", "rejected_field": "bad"},
        2,
        0,
    ),
    "a sample for each turn": (
        [{"messages": THINKS}],
        {"prompt": {"template": REASONING, "reasoning": "per_turn"}},
        2,
        0,
    ),
    "kwargs": (
        [
            {"messages": TALK, "chat_template_kwargs": {"thinking": True}},
            {"messages": TALK, "chat_template_kwargs": {"thinking": False}},
        ],
        {"content_field": "messages", "chat_template": SWITCHED},
        2,
        0,
    ),
    "text": ([{"text": "the quick brown fox"}, {"text": "<|im_end|> Four."}], {}, 2, 0),
    "completions": (
        [
            {"prompt": "Sure? ", "completion": "Four."},
            {"prompt": "Sure? ", "completion": "Four.<|im_end|>"},
        ],
        {"prompt_field": "prompt", "completion_field": "completion"},
        2,
        0,
    ),
}


def written(folder: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    path = jsonl(folder / "rows.jsonl", rows)
    dataset = {"name": "d", "data_files": str(path), "tokenizer": chat_tokenizer()} | options
    config = folder / "config.yaml"
    config.write_text(
        yaml.safe_dump({"datasets": [dataset], "pack": {"seq_length": 64, "oversize": "drop"}})
    )
    return str(config)


@pytest.mark.parametrize("case", EQUAL)
def test_tokens_and_masks_are_those_of_transformers(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, options, texts, masks = EQUAL[case]
    assert main(["parity", written(tmp_path, rows, **options)]) == 0
    compared = f"{texts} texts, masks of {masks}" if masks else f"{texts} texts"
    assert f"d: {compared} compared, 0 differ" in capsys.readouterr().out


def test_rows_that_differ_are_shown_with_their_first_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": "Four."}, *({"text": "Sure? <|im_end|>"} for _ in range(12))]
    escaped = {"tokenizer_kwargs": {"special_strings": "escape"}}
    config = written(tmp_path, rows, **escaped)
    assert main(["parity", config]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "d: 13 texts compared, 12 differ" in text
    at = load_tokenizer(chat_tokenizer()).reference_encode("Sure? ")
    end = load_tokenizer(chat_tokenizer()).eos_token_id
    assert f"row 1: token {len(at)} is '<'" in text
    assert f"and with transformers '<|im_end|>' ({end})" in text
    assert text.count("differs: ") == 10
    assert "and 2 more" in text
    assert main(["parity", config, "--rows", "1"]) == 0
    assert "1 texts compared, 0 differ" in capsys.readouterr().out


def damaged(value: Any) -> Any:
    """The value with the keys of its objects in the other order, and floats for integers."""
    if isinstance(value, dict):
        return {key: damaged(item) for key, item in reversed(value.items())}
    if isinstance(value, list):
        return [damaged(item) for item in value]
    return float(value) if type(value) is int else value


def reads_wrong(monkeypatch: pytest.MonkeyPatch, reader: type, column: str) -> None:
    """Damages a column of what a source reads."""
    name = "read" if reader is InMemoryShardedSource else "scan"
    usual = getattr(reader, name)

    def wrong(batch: pa.RecordBatch) -> pa.RecordBatch:
        values: list[Any] = []
        for value in batch.column(column).to_pylist():
            found = damaged(json.loads(value) if isinstance(value, str) else value)
            values.append(json.dumps(found) if isinstance(found, list) else found)
        return batch.set_column(batch.schema.names.index(column), column, pa.array(values))

    def read(self: Any, *rows: int) -> Any:
        found = usual(self, *rows)
        return wrong(found) if name == "read" else Scan(wrong(found.batch), found.rejects)

    monkeypatch.setattr(reader, name, read)


CALLED = [*talk("Why?"), *CALLS[1:]]
CALLED[1] = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
    "name": "f", "arguments": {"x": 1, "a": {"y": 2, "b": "two"}}}}]}  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "renamed", "memory", "columns"]
)
def test_what_reading_changes_is_a_difference(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers gets the rows as the file or the user has them."""
    rows = [{"messages": TALK, "id": n} for n in range(2)] + [{"messages": CALLED, "id": 2}]
    files: Any = str(jsonl(tmp_path / "rows.jsonl", rows))
    more: dict[str, Any] = {}
    if kind == "rows.jsonl.gz":
        files = tmp_path / kind
        files.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    elif kind == "rows.json":
        files = tmp_path / kind
        files.write_text(json.dumps(rows))
    elif kind == "renamed":
        files = jsonl(tmp_path / "rows.jsonl", [{"talk": row["messages"]} for row in rows])
        more = {"format_fields": {"talk": "messages"}}
    elif kind == "memory":
        files = rows
    elif kind == "columns":
        files = {"messages": [row["messages"] for row in rows], "id": [0, 1, 2]}
    data = DatasetConfig(
        name="d",
        data_files=files if isinstance(files, list | dict) else str(files),
        content_field="messages",
        chat_template="chatml",
        tokenizer=chat_tokenizer(),
        **more,
    )
    config = PipelineConfig(datasets=[data])
    (found,) = parity.parity(config, 3)
    assert (found.rows, found.masks, found.differences, found.notes) == (3, 3, (), ())
    readers = {
        "renamed": TransformedSource,
        "memory": InMemoryShardedSource,
        "columns": InMemoryShardedSource,
    }
    reads_wrong(monkeypatch, readers.get(kind, JsonShardedSource), "messages")
    (found,) = parity.parity(config, 3)
    assert found.rows == 3
    (told,) = found.differences
    assert "row 2: token " in told


def test_numbers_that_reading_changes_are_a_difference_in_a_template_of_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "1+1", "answer": 2}])
    prompt = PromptConfig(
        format_type="custom",
        template="{question}={answer}",
        input_columns=("question",),
        label_column="answer",
    )
    data = DatasetConfig(name="d", data_files=str(path), prompt=prompt, tokenizer=chat_tokenizer())
    config = PipelineConfig(datasets=[data])
    (found,) = parity.parity(config, 3)
    assert (found.rows, found.differences) == (1, ())
    reads_wrong(monkeypatch, JsonShardedSource, "answer")
    (found,) = parity.parity(config, 3)
    assert len(found.differences) == 1


@pytest.mark.parametrize("changed", [False, True])
def test_rows_that_are_known_only_as_they_are_read_are_noted(changed: bool, tmp_path: Path) -> None:
    """Those of other files, and those that a function changes."""
    rows = [{"messages": TALK}]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    if changed:
        path = jsonl(tmp_path / "rows.jsonl", rows)
    data = DatasetConfig(
        name="d",
        data_files=str(path),
        content_field="messages",
        chat_template="chatml",
        tokenizer=chat_tokenizer(),
        format_callback=(lambda row: {"messages": row["messages"][:3]}) if changed else None,
    )
    (found,) = parity.parity(PipelineConfig(datasets=[data]), 3)
    assert (found.rows, found.differences) == (1, ())
    assert found.notes == ("transformers was given these rows as easypipe reads them",)


def test_a_mask_that_differs_is_told_with_its_token() -> None:
    tokenizer = load_tokenizer(chat_tokenizer())
    ids = tokenizer.reference_encode("Four.")
    pair = _Pair("row 3", Rendered("Four.", [[0, 5]], OPEN), ids, [0] * len(ids))
    (said,) = _differing(pair, ids, [1] * len(ids), tokenizer)
    assert said.startswith("row 3: token 0, ")
    assert said.endswith("is a target here, and not with transformers")
    assert [*_differing(pair, ids, [0] * len(ids), tokenizer)] == []


def test_a_token_that_transformers_does_not_write_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an EOS that closes a text is written here alone."""
    usual = parity._named

    def shorter(tokenizer: Any) -> Any:
        named = usual(tokenizer)
        return lambda text, **options: {"input_ids": named(text, **options)["input_ids"][:-1]}

    monkeypatch.setattr(parity, "_named", shorter)
    assert main(["parity", written(tmp_path, [{"text": "Four."}])]) == 1
    assert "and with transformers nothing" in " ".join(capsys.readouterr().out.split())


def test_rows_that_are_refused_or_not_closed_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strict = CHATML + "{% if messages|length == 2 %}{{ raise_exception('too short') }}{% endif %}"
    rude = CHATML + "{% if messages[-1].content == 'No.' %}{{ raise_exception('rude') }}{% endif %}"
    talks = [{"messages": TALK}, {"messages": talk("Why?", "So.")}]
    pairs = [PAIR, PAIR | {"bad": PAIR["good"]}]
    open_end = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    both = {"prompt_field": "prompt", "completion_field": "good", "rejected_field": "bad"}
    for rows, fields, template, notes in (
        (talks, {"content_field": "messages"}, strict, ["row 1: refused here: too short"]),
        (pairs, both, rude, ["row 0: refused here: rude"]),
        (
            talks[1:],
            {"content_field": "messages"},
            open_end,
            ["EOS follows 1 texts here, and none with transformers"],
        ),
        (
            talks[1:],
            {"content_field": "messages"},
            open_end.replace("\n", "").replace(
                "{{ m.content }}",
                "{% generation %}{{ m.content }}{% endgeneration %}",
            ),
            ["EOS follows 1 texts here, and none with transformers"],
        ),
    ):
        config = written(tmp_path, rows, chat_template=template, **fields)
        assert main(["parity", config]) == 0
        said = " ".join(capsys.readouterr().out.split())
        told = [note.removeprefix(f"{tmp_path}/rows.jsonl, ") for note in said.split("note: ")[1:]]
        assert told == notes


@pytest.mark.parametrize("field", ["messages", "text"])
def test_rows_that_are_held_out_are_no_rows_that_cannot_be_read(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{field: talk(f"{n}?", "So.") if field == "messages" else f"{n}"} for n in range(40)]
    config = written(tmp_path, rows, content_field=field, hold_out={"fraction": 0.5})
    assert main(["parity", config]) == 0
    said = " ".join(capsys.readouterr().out.split())
    (texts,) = re.findall(r"d: (\d+) texts compared", said)
    (out,) = re.findall(r"note: (\d+) rows are left out: held_out", said)
    assert int(texts) + int(out) == 40
    assert int(out) > 5
    assert "cannot be read" not in said
    assert "are not text" not in said


def test_what_cannot_be_compared_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path, [{"text": "Four."}])
    assert main(["parity", config, "--rows", "0"]) == 2
    assert main(["parity", config, "--against", "trl"]) == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["parity", config]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--against: needs the package transformers" in said
    assert "pip install 'easypipe[check]'" in said


def test_rows_of_tokens_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    config = written(tmp_path, [{"text": "x"}], data_files=str(path))
    assert main(["parity", config]) == 0
    assert "note: its rows are tokens already" in capsys.readouterr().out


def test_what_is_compared_is_told_word_for_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tokenizer of transformers that sees some of it otherwise."""
    usual = parity._named

    class Other:
        """Leaves out a token of "Four.", refuses "No.", and marks the first token alone."""

        def __init__(self, named: Any) -> None:
            self._named = named

        def __call__(self, text: str, **options: Any) -> Any:
            ids = self._named(text, **options)["input_ids"]
            return {"input_ids": ids[:-1] if text == "Four." else ids}

        def apply_chat_template(self, talk: list[Any], **options: Any) -> Any:
            if talk[-1]["content"] == "No.":
                raise ValueError("no")
            found = dict(self._named.apply_chat_template(talk, **options))
            if "assistant_masks" in found:
                found["assistant_masks"] = [1, *[0] * (len(found["input_ids"]) - 1)]
            return found

    monkeypatch.setattr(parity, "_named", lambda tokenizer: Other(usual(tokenizer)))
    keys = CHATML + "{{ messages[-1] | length }}"
    weighed = [*TALK[:2], TALK[2] | {"weight": 1}, TALK[3], TALK[2] | {"weight": 0}]
    open_end = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    both = {"prompt_field": "prompt", "completion_field": "good", "rejected_field": "bad"}
    asked = {"prompt_field": "prompt", "completion_field": "completion"}
    answers = [{"prompt": "Sure? ", "completion": said} for said in ("Four.", "No.", None, "")]
    talks = [{"messages": TALK}, {"messages": talk("Why?", "So.")}, {"messages": talk("Why?")}]
    chat = {"content_field": "messages", "on_error": "skip"}
    cases: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "text": ([{"text": text} for text in ("Four.", "a" * 40, None)], {"on_error": "skip"}),
        "completions": (answers, asked | {"on_error": "skip"}),
        "marked": (talks, chat | {"chat_template": MARKED}),
        "open": (
            [{"messages": talk("Why?", said)} for said in ("So.", "No.")],
            chat | {"chat_template": open_end},
        ),
        "keys": ([{"messages": weighed}], chat | {"chat_template": keys}),
        "pairs": ([PAIR, PAIR], both | {"chat_template": CHATML}),
        "held out": (
            talks[1:2] * 6,
            chat | {"hold_out": {"fraction": 0.5}, "chat_template": CHATML},
        ),
    }
    told = []
    for name, (rows, options) in cases.items():
        code = main(["parity", written(tmp_path, rows, **options)])
        told += [f"### {name}: {code}", capsys.readouterr().out]
    assert_told("compared", "\n".join(told), DATA=tmp_path)
