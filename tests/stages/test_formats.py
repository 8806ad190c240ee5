"""Columns and caches of a dataset: what each option of DatasetConfig and TokenizeStageConfig that
is about them does and refuses.
"""

from __future__ import annotations

import gc
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import laws
from easypipe import (
    ConfigError,
    DatasetConfig,
    Expand,
    Filter,
    FilterNonEmpty,
    Map,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    Rename,
    SaveStageConfig,
    SourceError,
    StageOrderError,
    TokenizerConfig,
    TokenizeStageConfig,
)
from easypipe.core.config import allowing_code, to_dict
from easypipe.core.schema import INPUT_IDS, ROW_NUMBER
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import config, jsonl, texts, tokenizer


def join(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] == 3:
        raise ValueError("three")
    return {"text": f"{row['q']} {row['n']}", "size": len(row["q"])}


def shout_all(batch: pa.RecordBatch) -> dict[str, Any]:
    return {"text": pc.utf8_upper(batch.column("q"))}


def rows(count: int, salt: int = 1) -> list[dict[str, Any]]:
    return [{"q": text, "n": i, "tag": f"tag {i}"} for i, text in enumerate(texts(count, salt))]


def pipeline(
    folder: Path, *, data: Any = None, stage: TokenizeStageConfig | None = None, **options: Any
) -> Pipeline:
    dataset = DatasetConfig(name="d", data_files=rows(6) if data is None else data, **options)
    return Pipeline(config(folder, datasets=[dataset], tokenize=stage)).source()


def tokens_of(built: Pipeline) -> list[list[int]]:
    cache = built.get_data()["d"].materialize()  # type: ignore[attr-defined]
    return [cache.tokens(i).tolist() for i in range(cache.num_docs)]


def saved(built: Pipeline, folder: Path) -> pa.Table:
    built.save(SaveStageConfig(output_dir=folder)).build()
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("*.parquet")))


def encoded(values: list[str]) -> list[list[int]]:
    own = load_tokenizer(tokenizer())
    return [own.reference_encode(value) for value in values]


# columns


def test_format_fields_renames(tmp_path: Path) -> None:
    built = pipeline(tmp_path, format_fields={"q": "text", "n": "number"})
    assert built.get_data()["d"].schema.names == ["text", "number", "tag"]
    assert tokens_of(built.tokenize()) == encoded([row["q"] for row in rows(6)])
    with pytest.raises(SourceError, match=r"no column 'query' \(have: q, n, tag\)"):
        pipeline(tmp_path, format_fields={"query": "text"})
    with pytest.raises(ConfigError, match=r"^format_fields: expected old and new names"):
        DatasetConfig(data_files="x", format_fields={})


def test_format_callback_makes_the_text(tmp_path: Path) -> None:
    options = {
        "format_callback": join,
        "format_columns": {"size": "int32"},
        "format_version": "1",
        "on_error": "skip",
    }
    built = pipeline(tmp_path, **options)
    source = built.get_data()["d"]
    assert source.schema.field("size").type == pa.int32()
    assert (source.schema.field("text").type, source.schema.field("q").type) == (
        pa.large_string(),
        pa.large_string(),
    )
    laws.assert_stateless_reads(source)
    assert source.read(0, 0, 6).column("size").to_pylist() == [
        len(row["q"]) for row in rows(6) if row["n"] != 3
    ]
    assert tokens_of(built.tokenize()) == encoded(
        [f"{row['q']} {row['n']}" for row in rows(6) if row["n"] != 3]
    )
    assert built.ledger().find("tokenize", "d", "rows").out == {"written": 5, "map_failed": 1}
    with pytest.raises(
        SourceError, match=r"^d, row 3.*: map_failed: .*join raised ValueError: three"
    ):
        pipeline(tmp_path, **(options | {"on_error": "error"})).tokenize().ledger()


def test_format_batched(tmp_path: Path) -> None:
    built = pipeline(
        tmp_path, format_callback=shout_all, format_batched=True, format_version="1"
    ).tokenize()
    assert tokens_of(built) == encoded([row["q"].upper() for row in rows(6)])


def test_format_columns_announces_what_is_added(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError,
        match=r"returned a column 'size' whose type is unknown .* columns=\{'size': 'string'\}",
    ):
        pipeline(tmp_path, format_callback=join, format_version="1").get_data()["d"].read(0, 0, 1)
    with pytest.raises(ConfigError, match=r"^format_columns.size: 'int' is not a type"):
        DatasetConfig(data_files="x", format_callback=join, format_columns={"size": "int"})


@pytest.mark.parametrize(
    "option",
    [{"format_columns": {"a": "int64"}}, {"format_batched": True}, {"format_version": "1"}],
)
def test_format_options_without_a_callback(option: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{next(iter(option))}: has no effect without a format_callback"
    ):
        DatasetConfig(data_files="x", **option)


def test_format_version_decides_what_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def kept(version: str | None) -> tuple[set[str], int]:
        built = pipeline(
            tmp_path,
            format_callback=shout_all,
            format_batched=True,
            format_version=version,
            cache_path=str(tmp_path / "own"),
        )
        cache = built.tokenize().get_data()["d"].materialize()  # type: ignore[attr-defined]
        return {
            path.name for path in (tmp_path / "own").glob("manifests/*.json")
        }, cache.manifest.facts["ranges_written"]

    first, written = kept("1")
    assert (len(first), written) == (1, 1)
    assert kept("1") == (first, 1)  # the manifest that was there
    again, written = kept("2")
    # another version runs again; equal text is not tokenized again
    assert (len(again - first), written) == (1, 0)
    assert kept(None) == (again, 1)
    [said] = [text for text in caplog.messages if "version" in text]
    assert "has no version, so its results are not kept in the token cache" in said


def test_callbacks_from_yaml_need_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from easypipe.cli.app import run

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_columns.py").write_text(
        'def join(row):\n    return {"text": row["q"] + "!"}\n'
    )
    jsonl(tmp_path / "d.jsonl", rows(4))
    text = f"""
datasets:
  - {{ data_files: d.jsonl, format_callback: "own_columns:join", format_version: "1" }}
default_tokenizer: {tokenizer()}
cache_dir: cache
seed: 1
"""
    (tmp_path / "data.yaml").write_text(text)
    said = (
        r"^datasets\[0\].format_callback: runs code, 'own_columns:join'. If you trust this "
        r"file, pass --allow-code"
    )
    with pytest.raises(ConfigError, match=said):
        Pipeline.from_config("data.yaml")
    assert run(["prepare", "data.yaml"]) == 2
    assert "pass --allow-code" in capsys.readouterr().err
    assert run(["prepare", "data.yaml", "--allow-code"]) == 0
    assert run(["prepare", "data.yaml"]) == 2  # the flag goes with its command
    with allowing_code():
        source = Pipeline.from_config("data.yaml").source().get_data()["dataset1"]
    assert source.read(0, 0, 1).column("text").to_pylist() == [rows(1)[0]["q"] + "!"]
    assert to_dict(DatasetConfig(data_files="x", format_callback=join))["format_callback"].endswith(
        "test_formats:join"
    )
    with pytest.raises(
        ConfigError, match=r"^format_callback: 'join' is not a function. Give a function, or"
    ):
        DatasetConfig(data_files="x", format_callback="join")


def test_additional_fields_stay_beside_saved_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = [*rows(5), {"q": None, "n": 5, "tag": "null"}, {"q": "last", "n": 6, "tag": None}]
    options = {
        "data": data,
        "content_field": "q",
        "additional_fields": ("tag", "n"),
        "on_error": "skip",
    }
    built = pipeline(tmp_path, **options).transform(Filter(pc.field("n") != 2)).tokenize()
    table = saved(built, tmp_path / "out")
    assert table.column_names == [INPUT_IDS, "tag", "n"]
    assert table.column("n").to_pylist() == [0, 1, 3, 4, 6]
    assert table.column("tag").to_pylist() == ["tag 0", "tag 1", "tag 3", "tag 4", None]
    assert table.column(INPUT_IDS).to_pylist() == encoded([data[i]["q"] for i in (0, 1, 3, 4, 6)])
    assert built.ledger().find("tokenize", "d", "rows").out == {
        "written": 5,
        "filtered": 1,
        "null": 1,
    }
    laws.assert_stateless_reads(built.get_data()["d"])
    assert "leaves columns behind" not in caplog.text
    built.pack(PackStageConfig(seq_length=32))
    assert (
        "dataset d: pack() leaves columns behind, save() before it writes them: tag, n"
        in caplog.text
    )
    with pytest.raises(
        ConfigError,
        match=r"^datasets\[0\].additional_fields: dataset 'd' has no column 'tags' .*Did you mean "
        r"'tag'\?",
    ):
        pipeline(tmp_path, content_field="q", additional_fields=("tags",)).tokenize()
    with pytest.raises(ConfigError, match=r"^additional_fields\[1\]: 'a' appears twice"):
        DatasetConfig(data_files="x", additional_fields=("a", "a"))
    with pytest.raises(
        ConfigError,
        match=r"^additional_fields\[0\]: 'labels' is a column that tokenized rows have "
        r"already.*format_fields",
    ):
        DatasetConfig(data_files="x", additional_fields=("labels",))


def test_a_row_with_a_bad_column_is_a_bad_row_only_where_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a", "n": 1}\n{"text": "b", "n": {"x": 1}}\n{"text": "c", "n": 3}\n')
    options = {"data": str(path), "on_error": "skip"}
    assert len(tokens_of(pipeline(tmp_path, **options).tokenize())) == 3
    assert (
        saved(
            pipeline(tmp_path, **options, additional_fields=("n",)).tokenize(), tmp_path / "out"
        ).num_rows
        == 2
    )


def test_remove_columns_keeps_the_others(tmp_path: Path) -> None:
    def names(remove: tuple[str, ...] | None, **options: Any) -> list[str]:
        stage = TokenizeStageConfig(remove_columns=remove)
        return saved(
            pipeline(tmp_path, content_field="q", stage=stage, **options).tokenize(),
            Path(tempfile.mkdtemp(dir=tmp_path)),
        ).column_names

    assert names(None) == [INPUT_IDS]
    assert names(("q",)) == [INPUT_IDS, "n", "tag"]
    assert names(("n", "q", "tag")) == [INPUT_IDS]
    numbered = str(jsonl(tmp_path / "d.jsonl", rows(5)))  # whose numbers are no column of the data
    assert names(("q",), data=numbered, on_error="skip") == [INPUT_IDS, "n", "tag"]
    with pytest.raises(
        ConfigError,
        match=r"^tokenize.remove_columns\[1\]: no dataset has a column 'tags' .*Did you mean "
        r"'tag'\?",
    ):
        names(("n", "tags"))
    with pytest.raises(
        ConfigError,
        match=r"'tag' is one of the additional_fields of dataset 'd'. Take it out of one of the "
        r"two",
    ):
        names(("tag",), additional_fields=("tag",))
    with pytest.raises(
        ConfigError, match=r"'labels' of dataset 'd' would be kept.*Add 'labels' to remove_columns"
    ):
        names(("q",), data=[{"q": "a", "labels": 1}])


# tokenizers


def test_tokenizer_kwargs_change_whichever_tokenizer_it_is(tmp_path: Path) -> None:
    built = pipeline(
        tmp_path, content_field="q", tokenizer_kwargs={"max_length": 2, "use_fast": False}
    ).tokenize()
    own = built.get_data()["d"].tokenizer.config  # type: ignore[attr-defined]
    assert (own.max_length, own.backend) == (2, "tokenizers")
    assert [len(ids) for ids in tokens_of(built)] == [2] * 6
    named = pipeline(
        tmp_path,
        content_field="q",
        tokenizer=TokenizerConfig(name_or_path=tokenizer(), max_length=9),
        tokenizer_kwargs={"use_fast": True},
    )
    assert named.tokenize().get_data()["d"].tokenizer.config == TokenizerConfig(
        name_or_path=tokenizer(), max_length=9
    )  # type: ignore[attr-defined]
    for wrong, said in {
        "max_lenght": r"tokenizer_kwargs.max_lenght: unknown key .*Did you mean 'max_length'\?",
        "name_or_path": "tokenizer_kwargs.name_or_path: names another tokenizer. Set the dataset's "
        "tokenizer",
        "max_length": "tokenizer_kwargs.max_length: ",
        "use_fast": "tokenizer_kwargs.use_fast: expected true or false",
    }.items():
        with pytest.raises(ConfigError, match=rf"^{said}"):
            DatasetConfig(data_files="x", tokenizer_kwargs={wrong: "x"})
    with pytest.raises(
        ConfigError, match="False means backend='tokenizers', and backend is 'gigatoken'"
    ):
        DatasetConfig(data_files="x", tokenizer_kwargs={"use_fast": False, "backend": "gigatoken"})


# caches


def test_cache_path_is_the_dataset_s_own(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", rows(5))
    built = pipeline(
        tmp_path, data=str(path), content_field="q", cache_path=tmp_path / "own"
    ).tokenize()
    assert tokens_of(built)
    assert not list((tmp_path / "cache").glob("manifests/*"))
    assert (
        len(list((tmp_path / "own").glob("manifests/*.json")))
        == len(list((tmp_path / "own").glob("indexes/*.json")))
        == 1
    )
    with pytest.raises(
        ConfigError, match=r"^cache_path: has no effect while cache_enabled is False"
    ):
        DatasetConfig(data_files="x", cache_path="own", cache_enabled=False)


@pytest.mark.parametrize("by", ["dataset", "stage"])
def test_without_a_cache_nothing_is_left(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cache_enabled of a dataset, cache_tokenized of all."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = jsonl(tmp_path / "d.jsonl", rows(5))
    stage = TokenizeStageConfig(cache_tokenized=False) if by == "stage" else None
    built = pipeline(
        tmp_path, data=str(path), content_field="q", cache_enabled=by == "stage", stage=stage
    ).tokenize()
    built.pack(PackStageConfig(seq_length=16)).load({"batch_size": 1})
    loader = built.build()
    first = [batch[INPUT_IDS].tolist() for batch in loader]
    assert len(list((tmp_path / "temporary").glob("easypipe-uncached-*/manifests/*.json"))) == 1
    assert not list((tmp_path / "cache").glob("manifests/*"))
    assert not list((tmp_path / "cache").glob("tokens/*"))
    assert (not list((tmp_path / "cache").glob("indexes/*"))) == (by == "dataset")
    kept = (
        pipeline(tmp_path, data=str(path), content_field="q")
        .tokenize()
        .pack(PackStageConfig(seq_length=16))
        .load({"batch_size": 1})
    )
    assert first == [batch[INPUT_IDS].tolist() for batch in kept.build()]
    with pytest.raises(
        ConfigError,
        match=r"datasets.d.cache_enabled: its tokens are not kept, so no other process could take "
        r"up",
    ):
        built.prepare_part(0, 2)
    del built
    gc.collect()
    # a loader reads on when its pipeline is gone
    assert [batch[INPUT_IDS].tolist() for batch in loader] == first
    del loader
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


def test_tokens_that_others_made_go_by_the_same_options(tmp_path: Path) -> None:
    def take(**options: Any) -> None:
        dataset = DatasetConfig(
            name="d",
            data_files=[{INPUT_IDS: [5, 6, 7]}, {INPUT_IDS: [8]}],
            tokenizer=tokenizer(),
            **options,
        )
        Pipeline(config(tmp_path, datasets=[dataset])).source().pack(
            PackStageConfig(seq_length=8)
        ).ledger()

    take(cache_enabled=False)
    take(cache_path=tmp_path / "own")
    assert not list((tmp_path / "cache").glob("manifests/*"))
    assert len(list((tmp_path / "own").glob("manifests/*.json"))) == 1


# the stage


def test_transform_stands_between_source_and_tokenize(tmp_path: Path) -> None:
    datasets = [
        DatasetConfig(name=name, data_files=rows(6, salt)) for name, salt in (("a", 1), ("b", 2))
    ]
    chain = (
        Pipeline(config(tmp_path, datasets=datasets))
        .source()
        .transform([Rename({"q": "text"}), FilterNonEmpty("text")])
    )
    chain.transform(Filter(pc.field("n") > 2), datasets="b")
    assert chain.get_stages() == ["source", "transform", "transform"]
    data = chain.get_data()
    assert [data[name].read(0, 0, 6).num_rows for name in "ab"] == [6, 3]
    for source in data.values():
        laws.assert_stateless_reads(source)
    ledger = chain.tokenize().ledger()
    laws.assert_conserved(ledger)
    assert ledger.find("tokenize", "b", "rows").out == {"written": 3, "filtered": 3}
    with pytest.raises(
        StageOrderError,
        match=r"transform\(\) cannot follow tokenize\(\). Call it between source\(\) and "
        r"tokenize\(\)",
    ):
        chain.transform(Rename({"text": "t"}))
    with pytest.raises(StageOrderError, match=r"Call source\(\) before other pipeline stages"):
        Pipeline(config(tmp_path, datasets=datasets)).transform(Rename({"q": "text"}))
    with pytest.raises(ConfigError, match=r"^transform.datasets: no dataset 'c' \(have: a, b\)"):
        Pipeline(config(tmp_path, datasets=datasets)).source().transform(
            Rename({"q": "text"}), datasets=["c"]
        )
    with pytest.raises(
        SourceError, match=r"Rename\({'query': 'text'}\): no column 'query'"
    ) as caught:
        Pipeline(config(tmp_path, datasets=datasets)).source().transform(
            Rename({"query": "text"}), datasets=["b"]
        )
    assert caught.value.__notes__ == ["while transforming dataset 'b'"]


def test_expanded_rows_are_documents(tmp_path: Path) -> None:
    data = [
        {"parts": ["one", "two"], "n": 1},
        {"parts": [], "n": 2},
        {"parts": ["three", None], "n": 3},
    ]
    built = pipeline(
        tmp_path, data=data, content_field="parts", additional_fields=("n",), on_error="skip"
    )
    built.transform(Expand("parts", most=4)).tokenize()
    table = saved(built, tmp_path / "out")
    assert table.to_pydict() == {INPUT_IDS: encoded(["one", "two", "three"]), "n": [1, 1, 3]}
    assert built.ledger().find("tokenize", "d", "rows").out == {
        "written": 3,
        "unfilled": 8,
        "null": 1,
    }
    cache = built.get_data()["d"].materialize()  # type: ignore[attr-defined]
    assert [cache.where(i)[1] for i in range(3)] == [0, 1, 8]


def test_new_shards_are_tokenized_alone(tmp_path: Path) -> None:
    """Finished ones stay, with transforms on as without; another transform reads again and encodes
    only new text.
    """

    def facts(pattern: str, version: str = "1") -> dict[str, Any]:
        built = pipeline(
            tmp_path,
            data=str(tmp_path / "data" / pattern),
            format_fields={"q": "text"},
            on_error="skip",
        )
        built.transform(
            Map(lambda row: {"text": row["text"] + " end"}, version=version)
            >> Filter(pc.field("n") > 0)
        )
        return built.tokenize().get_data()["d"].materialize().manifest.facts  # type: ignore[attr-defined]

    for name, salt in (("a", 1), ("b", 2)):
        jsonl(tmp_path / "data" / f"{name}.jsonl", rows(20, salt))
    assert facts("*.jsonl")["ranges_written"] == 2
    jsonl(tmp_path / "data" / "c.jsonl", rows(20, 3))
    more = facts("*.jsonl")
    assert (more["ranges_reused"], more["ranges_written"]) == (2, 1)
    other = facts("*.jsonl", version="2")
    assert (other["ranges_reused"], other["ranges_found_by_content"], other["ranges_written"]) == (
        0,
        3,
        0,
    )


def test_reading_is_as_narrow_as_the_transform_allows(tmp_path: Path) -> None:
    """What is wrong in a column that nothing needs spoils no row."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"q": "a", "x": 1}\n{"q": "b", "x": {"y": 2}}\n')
    built = pipeline(tmp_path, data=str(path), format_fields={"q": "text"}).tokenize()
    source = built.get_data()["d"]
    assert isinstance(source, TokenizedShardedSource)
    assert source.source.schema.names == ["text", ROW_NUMBER]
    assert len(tokens_of(built)) == 2


def test_on_error_counts_what_transforms_refuse(tmp_path: Path) -> None:
    options = {"format_callback": join, "format_columns": {"size": "int32"}, "format_version": "1"}
    built = pipeline(tmp_path, on_error="quarantine", **options).tokenize()
    cache = built.get_data()["d"].materialize()  # type: ignore[attr-defined]
    assert cache.quarantine is not None
    [line] = [json.loads(line) for line in cache.quarantine.read_text().splitlines()]
    assert (line["row"], line["reason"]) == (3, "map_failed")
    assert "raised ValueError: three" in line["detail"]
    with pytest.raises(SourceError, match="max_bad_rows is 0"):
        pipeline(tmp_path, on_error="skip", max_bad_rows=0, **options).tokenize().ledger()


def test_streaming_says_what_it_does_not_keep(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same rows go through the same functions; columns beside the tokens stay behind."""
    path = jsonl(tmp_path / "d.jsonl", rows(30))
    dataset = DatasetConfig(
        name="d", data_files=str(path), format_fields={"q": "text"}, additional_fields=("tag",)
    )
    values = {
        "datasets": [dataset],
        "default_tokenizer": tokenizer(),
        "seed": 1,
        "cache_dir": tmp_path / "cache",
    }
    seen = []
    for streaming in (False, True):
        built = (
            Pipeline(PipelineConfig(**values, streaming=streaming))
            .source()
            .transform(Filter(pc.field("n") > 4))
            .tokenize()
        )
        with caplog.at_level(logging.WARNING, "easypipe"):
            loader = built.load({"batch_size": 1, "drop_last": False}).build()
        seen.append(sorted(batch[INPUT_IDS][0].tolist() for batch in loader))
        if streaming:
            out = loader.ledger()
            laws.assert_conserved(out)
    assert seen[0] == seen[1]
    assert (
        "dataset d: load() leaves columns behind, save() before it writes them: tag" in caplog.text
    )
    with pytest.raises(
        SourceError, match=r"streaming does not count the lines of these files. Leave streaming out"
    ):
        Pipeline(PipelineConfig(**values, streaming=True)).source().transform(
            Expand(lambda row: [row], most=2, version="1")
        )


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_columns_that_nothing_reads_may_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    for i, value in enumerate((1, "one")):
        table = pa.table({"text": [f"text {i}"], "x": [value], "keep": [i]})
        if ending == "parquet":
            pq.write_table(table, tmp_path / f"{i}.parquet")
        else:
            jsonl(tmp_path / f"{i}.jsonl", table.to_pylist())

    def tokenized(**options: Any) -> Any:
        dataset = DatasetConfig(name="d", data_files=str(tmp_path / f"*.{ending}"), **options)
        return Pipeline(config(tmp_path, datasets=[dataset])).source().tokenize().get_data()["d"]

    assert tokenized(additional_fields=["keep"]).materialize().num_docs == 2
    assert re.search(
        r"dataset d: .*1\.\w+, column 'x': is large_string here and int64 in .*It reads text, keep "
        r"alone",
        caplog.text,
    )
    assert (
        tokenized(format_fields={"text": "body"}, content_field="body").materialize().num_docs == 2
    )
    for options in ({"additional_fields": ["x"]}, {"format_callback": dict, "format_version": "1"}):
        with pytest.raises(
            SourceError,
            match=r"column 'x': is large_string here and int64 in .*Rewrite one of the files",
        ):
            tokenized(**options)


def test_options_of_columns_are_named_where_they_fail(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    for options, message in (
        (
            {"format_fields": {"txt": "body"}},
            "datasets.d.format_fields: no column 'txt' (have: text). Did you mean 'text'?",
        ),
        (
            {"format_callback": "nowhere:f"},
            "datasets.d.format_callback: 'nowhere:f': 'nowhere' cannot be imported",
        ),
    ):
        with pytest.raises((ConfigError, SourceError), match=re.escape(message)):
            Pipeline(
                config(
                    tmp_path, datasets=[DatasetConfig(name="d", data_files=str(data), **options)]
                )
            ).source()
