"""Lists and objects that no Arrow type holds are kept as JSON, so that templates see what stands in
the file.
"""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from easypipe import DatasetConfig, Pipeline, PromptConfig, ShardedDataSource
from easypipe.core.errors import SourceError
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.external.objects import open_object
from easypipe.sources.formats.jsonlines import JsonShardedSource
from easypipe.sources.open import open_files
from easypipe.sources.schemas import JSON
from hub_mirror import hub_mirror, publish  # noqa: F401  (a fixture)
from laws import assert_stateless_reads
from pipelines import config, jsonl
from web import WebServer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{{ "
    "m.tool_calls | tojson }}{% endif %}{% endfor %}"
)


def talk(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call], **more},
        ]
    }


MIXED = [
    talk({"c": 1}),
    talk({"c": "x"}),
    talk({"c": [1, {"d": None}]}),
    talk({}),
    talk({"b": True, "a": 0.5}),
]


def texts_of(tmp_path: Path, data: Any, **options: Any) -> list[str]:
    """The documents of a dataset, as its tokenizer reads them back."""
    options = {"chat_template": TEMPLATE, "content_field": "messages", "train_on": "all"} | options
    datasets = [DatasetConfig(name="d", data_files=data, **options)]
    source: Any = Pipeline(config(tmp_path, datasets=datasets)).source().tokenize().get_data()["d"]
    cache = source.materialize()
    return [
        source.tokenizer.decode(ids)
        for ids in cache.read(0, 0, cache.shards[0].num_rows).column("input_ids").to_pylist()
    ]


def written(rows: list[dict[str, Any]]) -> list[str]:
    """What the template makes of the rows as they stand."""
    return [
        "".join(
            f"[{m['role']}]{m['content'] or ''}"
            + (json.dumps(m["tool_calls"]) if m.get("tool_calls") else "")
            for m in row["messages"]
        )
        + "<|endoftext|>"
        for row in rows
    ]


def test_rows_of_mixed_types_are_read_and_written_as_they_stand(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", MIXED)
    source = JsonShardedSource(path)
    assert source.schema.field("messages").type == JSON
    assert_stateless_reads(source, [1, 3])
    assert [json.loads(text) for text in source.read(0, 0, 5).column("messages").to_pylist()] == [
        row["messages"] for row in MIXED
    ]
    assert texts_of(tmp_path, str(path)) == written(MIXED)
    # each of one type
    halves = [
        str(jsonl(tmp_path / f"{i}.jsonl", rows)) for i, rows in enumerate((MIXED[:1], MIXED[1:2]))
    ]
    assert open_files(halves).schema.field("messages").type == JSON
    assert open_files(halves).read(1, 0, 1).column("messages").to_pylist() == [
        json.dumps(MIXED[1]["messages"])
    ]


def test_lines_that_are_none_for_any_reason_shift_no_other(tmp_path: Path) -> None:
    """Of Arrow, of Python's json, of the scanner, and blank ones, each in front of good lines."""
    lines = [
        '{"any": [1, "x"], "text": "a"}',
        "",
        '{"any": [], "text": tru}',
        '{"any": [2], "text": "b"}',
        f'{{"any": [{"9" * 5000}], "text": "c"}}',
        "[1]",
        '{"any": [3, "y"], "text": "d"}',
        '{"any": [], "text": 5}',
        '{"any": [null, 4], "text": "e"}',
        '{"any": ["\ud800"], "text": "f"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", errors="surrogatepass")
    source = open_files(tmp_path / "a.jsonl", on_error="skip")
    found = source.scan(0, 0, len(lines))
    assert found.batch.column(ROW_NUMBER).to_pylist() == [0, 3, 6, 8]
    assert found.batch.column("text").to_pylist() == list("abde")
    kept = [json.loads(text) for text in found.batch.column("any").to_pylist()]
    assert kept == [[1, "x"], [2], [3, "y"], [None, 4]]
    assert [(one.row, one.reason) for one in found.rejects] == [
        (1, "blank_line"),
        (2, "unparsable"),
        (4, "unparsable"),
        (5, "not_an_object"),
        (7, "not_a_string"),
        (9, "invalid_utf8"),
    ]
    assert_stateless_reads(source, range(1, 10))


def test_values_that_json_writes_as_text_are_kept_within_objects() -> None:
    values = {
        "day": datetime.date(2026, 1, 31),
        "at": datetime.datetime(2026, 1, 31, 12, 5),
        "hour": datetime.time(12, 5),
        "price": decimal.Decimal("1.50"),
        "id": uuid.UUID(int=7),
    }
    numbers = [np.float32(0.5), np.int64(3), np.bool_(True), np.array(7), np.array([1, 2])]
    rows = [{"x": [values, "text", *numbers]}, {"x": [1]}]
    texts = open_object(rows, name="d").read(0, 0, 2).column("x").to_pylist()
    kept = {key: str(value) for key, value in values.items()}
    assert json.loads(texts[0]) == [kept, "text", 0.5, 3, True, 7, [1, 2]]


def test_the_type_says_that_a_column_of_any_name_holds_conversations(tmp_path: Path) -> None:
    rows = [{"talk": row["messages"]} for row in MIXED]
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert texts_of(
        tmp_path, str(path), content_field="talk", chat_template=TEMPLATE, train_on=None
    ) == written(MIXED)


@pytest.mark.parametrize("value", [{"lang": None}, {"lang": None, "deep": [{"x": None}]}])
def test_a_null_that_stood_in_the_file_stays(tmp_path: Path, value: Any) -> None:
    rows = [talk(value), talk({"lang": "en"}), talk({})]
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert texts_of(tmp_path, str(path)) == written(rows)
    # a key that only others have is not a null
    plain = [talk({"lang": "en"}), talk({"lang": "en", "more": "x"})]
    path = jsonl(tmp_path / "b.jsonl", plain)
    assert texts_of(tmp_path, str(path)) == written(plain)


@pytest.mark.parametrize(
    "values",
    [
        [{"a": 1, "b": 2}, {"b": "x", "a": 3}],
        [{"a": 1}, {"a": 1.5}],
        [{"n": [1, 2]}, {"n": [0.5]}],
        [{"a": 1, "b": {"d": 1, "c": 2}}, {"b": {"c": 0.5, "d": 1}}],
    ],
    ids=["order", "numbers", "lists", "deep"],
)
@pytest.mark.parametrize("given", ["file", "rows"])
def test_a_row_does_not_depend_on_the_others(tmp_path: Path, values: Any, given: str) -> None:
    rows = [talk(value) for value in values]
    data = str(jsonl(tmp_path / "a.jsonl", rows)) if given == "file" else rows
    assert texts_of(tmp_path, data) == written(rows)


def test_messages_may_be_json_in_a_text_of_single_rows(tmp_path: Path) -> None:
    rows = [talk({"a": 1}), talk({"b": 2})]
    written_out = {"messages": json.dumps(rows[1]["messages"])}
    path = jsonl(tmp_path / "a.jsonl", [rows[0], written_out])
    assert texts_of(tmp_path, str(path)) == written(rows)


@pytest.mark.parametrize("given", ["file", "rows", "columns"])
def test_an_integer_beside_a_fraction_is_no_fraction(tmp_path: Path, given: str) -> None:
    rows = [{"q": "1+1", "a": 2}, {"q": "1/2", "a": 0.5}, {"q": "4/2", "a": 2.0}]
    data: Any = {"q": [row["q"] for row in rows], "a": [row["a"] for row in rows]}
    if given != "columns":
        data = rows if given == "rows" else str(jsonl(tmp_path / "a.jsonl", rows))
    prompt = PromptConfig(
        format_type="custom", template="{q}={a}", input_columns=("q",), label_column="a"
    )
    plain = {"chat_template": None, "content_field": "text", "train_on": None, "prompt": prompt}
    wanted = [f"{row['q']}={row['a']}<|endoftext|>" for row in rows]
    assert texts_of(tmp_path, data, **plain) == wanted
    if given == "file":  # beside a file of integers, and one of fractions
        more = [{"q": "3", "a": 3}], [{"q": "7/2", "a": 3.5}]
        files = [str(jsonl(tmp_path / f"{i}.jsonl", one)) for i, one in enumerate(more)]
        assert texts_of(tmp_path, [data, files[0]], **plain)[:3] == wanted
        assert texts_of(tmp_path, [files[0], data, files[1]], **plain) == ["3=3<|endoftext|>"]


VALUES = [
    [[1, 2], [0.5]],
    [[[3]], [[1.5, 2]]],
    [[9007199254740993, 1.5]],
    [[2**64 - 1], [2**63 + 1]],
    [2**63 + 1, 2**63 + 3],
    [{"a": None, "b": [{"c": None}]}, {"b": []}, {"a": 2}],
]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("given", ["file", "rows"])
def test_a_prompt_writes_a_value_as_it_was_given(tmp_path: Path, values: Any, given: str) -> None:
    rows = [{"q": value} for value in values]
    data = rows if given == "rows" else str(jsonl(tmp_path / "a.jsonl", rows))
    plain = {"chat_template": None, "content_field": "text", "train_on": None}
    prompt = PromptConfig(format_type="custom", template="{q}", input_columns=("q",))
    written_out = [f"{json.dumps(value)}<|endoftext|>" for value in values]
    assert texts_of(tmp_path, data, prompt=prompt, **plain) == written_out
    jinja = PromptConfig(format_type="custom", template="{{ q | tojson }}", input_columns=("q",))
    assert texts_of(tmp_path, data, prompt=jinja, **plain) == written_out


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([2**53 + 1, 0.5], JSON),
        ([2**53 + 2, 0.5], pa.float64()),
        ([2**53 + 1, 1], pa.int64()),
        ([2**63 + 1], JSON),
        ([-(2**63) - 1], JSON),
        ([1e300, 0.5], pa.float64()),
        ([[2**63 + 1], [1]], JSON),
        ([{"id": 10**20}, {"id": None}], JSON),
        ([[9_999_999_999_999_999, 1]], pa.large_list(pa.int64())),
    ],
)
def test_numbers_that_no_type_holds_are_json(tmp_path: Path, values: Any, kind: Any) -> None:
    """Also where no template reads them: an id that was rounded is another id."""
    source = JsonShardedSource(jsonl(tmp_path / "a.jsonl", [{"x": value} for value in values]))
    assert source.schema.field("x").type == kind
    assert_stateless_reads(source, [1])
    found = source.read(0, 0, len(values)).column("x").to_pylist()
    assert [json.loads(one) for one in found] == values if kind == JSON else found == values


def test_bytes_in_an_object_are_no_text(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"q": [{"a": b"x", "b": 1}, {"a": None, "b": 2}]}), tmp_path / "a.parquet"
    )
    prompt = PromptConfig(format_type="custom", template="{q}", input_columns=("q",))
    plain = {"chat_template": None, "content_field": "text", "train_on": None, "prompt": prompt}
    found = texts_of(tmp_path, str(tmp_path / "a.parquet"), on_error="skip", **plain)
    assert found == ['{"b": 2}<|endoftext|>']


def test_a_null_of_a_file_of_the_hub_stays(
    hub_mirror: WebServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    rows = [talk({"lang": None}), talk({"lang": "en"})]
    path = jsonl(tmp_path / "a.jsonl", rows)
    publish(hub_mirror, "org/talks", {"train.jsonl": path.read_bytes()})
    assert texts_of(tmp_path, "org/talks", type="huggingface") == written(rows)


def test_a_null_of_a_tool_is_no_missing_key(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    tools: list[list[Any]] = [[tool | more] for more in ({"strict": None}, {"strict": True}, {})]
    rows = [{"messages": [{"role": "user", "content": "q"}], "tools": some} for some in tools]
    path = jsonl(tmp_path / "a.jsonl", rows)
    found = texts_of(tmp_path, str(path), chat_template="{{ tools | tojson }}q")
    assert found == [f"{json.dumps(some)}q<|endoftext|>" for some in tools]


class ByNumber:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


class Listed(ShardedDataSource):
    shard_names = ("one",)

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def open_shard(self, shard_name: str) -> Any:
        yield from self.rows


@pytest.mark.parametrize("make", [list, ByNumber, Listed])
@pytest.mark.parametrize("late", [0, 1100], ids=["in the first rows", "behind them"])
def test_a_null_of_a_python_row_stays(tmp_path: Path, make: Any, late: int) -> None:
    rows = [talk({"lang": "en"}), *[talk({})] * late, talk({"lang": None, "deep": [{"x": None}]})]
    assert texts_of(tmp_path, make(rows)) == written(rows)


def chat(path: Path, **options: Any) -> DatasetConfig:
    return DatasetConfig(
        name="d",
        data_files=str(path),
        content_field="messages",
        chat_template=TEMPLATE,
        train_on="all",
        **options,
    )


def test_streaming_reads_what_cached_mode_reads(tmp_path: Path) -> None:
    rows = [talk({"lang": "en", "n": i}) for i in range(400)] + [
        talk({"lang": None, "n": "x"}) for _ in range(400)
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)

    def ids(**options: Any) -> set[tuple[int, ...]]:
        made = (
            Pipeline(config(tmp_path, datasets=[chat(path)], order={"shuffle": False}, **options))
            .source()
            .tokenize()
        )
        found = made.load({"batch_size": 1, "num_epochs": 1}).build()
        return {tuple(batch["input_ids"][0].tolist()) for batch in found}

    assert ids() == ids(streaming=True, num_streams=1)


def test_json_of_datasets_is_decoded(tmp_path: Path) -> None:
    """As `datasets` stores mixed types since 4.8: the type arrow.json, in the place of the value
    that has no type of its own.
    """
    inner = pa.struct([("c", pa.json_())])
    call = pa.struct(
        [
            ("type", pa.string()),
            ("function", pa.struct([("name", pa.string()), ("arguments", inner)])),
        ]
    )
    message = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]
    )

    def stored(row: dict[str, Any]) -> list[dict[str, Any]]:
        out = json.loads(json.dumps(row["messages"]))
        for one in out:
            for each in one.get("tool_calls") or ():
                each["function"]["arguments"] = {
                    "c": json.dumps(each["function"]["arguments"]["c"])
                }
        return out

    rows = MIXED[:3]
    storage = pa.array([stored(row) for row in rows], pa.list_(_stored(message)))
    table = pa.table(
        {
            "messages": storage.cast(pa.list_(message))
            if storage.type == pa.list_(message)
            else _typed(storage, message)
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert open_files(tmp_path / "a.parquet").schema.field("messages").type == JSON
    assert texts_of(tmp_path, str(tmp_path / "a.parquet")) == written(rows)
    assert texts_of(tmp_path / "memory", table) == written(rows)


def _stored(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.JsonType):
        return kind.storage_type
    if pa.types.is_list(kind):
        return pa.list_(_stored(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct(
            [(kind.field(i).name, _stored(kind.field(i).type)) for i in range(kind.num_fields)]
        )
    return kind


def _typed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The same values under the extension type."""

    def one(array: pa.Array, kind: pa.DataType) -> pa.Array:
        if isinstance(kind, pa.JsonType):
            return pa.ExtensionArray.from_storage(kind, array)
        if pa.types.is_list(kind):
            return pa.ListArray.from_arrays(
                array.offsets, one(array.values, kind.value_type), type=kind, mask=array.is_null()
            )
        if pa.types.is_struct(kind):
            fields = [kind.field(i) for i in range(kind.num_fields)]
            children = [one(array.field(i), field.type) for i, field in enumerate(fields)]
            return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
        return array

    return one(array, pa.list_(kind))


def test_jinja_prompts_see_values(tmp_path: Path) -> None:
    rows = [{"meta": {"tags": [1]}, "answer": "a"}, {"meta": {"tags": ["x", None]}, "answer": "b"}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    prompt = PromptConfig(
        format_type="custom",
        template="{{ meta.tags | length }} {{ answer }}",
        input_columns=["meta"],
        label_column="answer",
    )
    options = {"chat_template": None, "train_on": None, "content_field": "text", "prompt": prompt}
    assert texts_of(tmp_path, str(path), **options) == ["1 a<|endoftext|>", "2 b<|endoftext|>"]


def test_save_says_what_was_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": 5}\n{"text": "two"}\n{broken\n')
    chain = Pipeline(
        config(tmp_path, datasets=[DatasetConfig(name="d", data_files=str(path), on_error="skip")])
    ).source()
    for made in (
        chain.copy(),
        chain.copy().tokenize(),
        chain.copy().tokenize().pack({"seq_length": 8}),
    ):
        folder = tmp_path / str(len(made.get_stages()))
        report = made.save({"output_dir": folder}).build()
        assert report.rejected == {"d": {"not_a_string": 1, "unparsable": 1}}
        assert "d: left out 2 (not_a_string 1, unparsable 1)" in str(report)


class Numbered:
    """Rows by number."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]


@pytest.mark.parametrize(
    "given",
    [list, lambda rows: lambda: iter(rows), Numbered],
    ids=["list", "function", "by number"],
)
def test_rows_of_python_are_read_as_those_of_files(tmp_path: Path, given: Any) -> None:
    assert texts_of(tmp_path, given(MIXED)) == written(MIXED)
    one = talk({"c": [1, "x", {"d": None}]})  # without a type in itself
    assert texts_of(tmp_path / "one", given([one, talk({"c": 1})])) == written(
        [one, talk({"c": 1})]
    )
    with pytest.raises(SourceError, match="row 1, column 'messages': not_a_list"):
        texts_of(
            tmp_path / "bad", given([talk({}), {"messages": {"role": "user", "content": "x"}}])
        )
    with pytest.raises(
        SourceError, match=r"d, row 1, column 'messages': .*(convert b'raw'|JSON knows no bytes)"
    ):
        texts_of(tmp_path / "bad", given([talk({"c": 1}), talk({"c": b"raw"}), talk({"c": "x"})]))


@pytest.mark.parametrize(
    "given", [lambda rows: lambda: iter(rows), Numbered], ids=["function", "by number"]
)
def test_a_key_that_only_late_rows_have_is_not_lost(tmp_path: Path, given: Any) -> None:
    """Arrow drops keys that a type does not name: what a template reads is kept as JSON."""
    rows = [talk({"c": 1})] * 1100
    late = [*rows, talk({"c": 1, "d": None}), talk({"c": 1, "e": 2})]
    assert texts_of(tmp_path, given(late)) == written(late)
    source = open_object(given(late), name="d", version="1")
    with pytest.raises(
        SourceError,
        match="d, row 1101, column 'messages': has the key 'e', which no object there has in the "
        "first 1024",
    ):
        source.read(0, 1000, 1102)
    for key in (7, None):  # Arrow drops the latter
        other = open_object(given([*rows, talk({key: 1})]), name="d", version="1")
        with pytest.raises(
            SourceError, match=f"d, row 1100, column 'messages': has the key '{key}'"
        ):
            other.read(0, 1000, 1101)
    mixed = [talk({"c": 1}), talk({"c": "x"}), *rows[2:], talk({"e": 2})]
    assert texts_of(tmp_path / "json", given(mixed)) == written(mixed)
    with pytest.raises(
        SourceError,
        match="d, row 1103, column 'messages': is kept as JSON: int 5 is in a column of lists "
        "or objects",
    ):
        texts_of(tmp_path / "five", given([*mixed, *rows[:2], {"messages": 5}]))
