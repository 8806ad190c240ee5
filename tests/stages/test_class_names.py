"""Columns of class labels, as `datasets` describes them: text gets the names, and everything else
the integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from datasets import Array2D, ClassLabel, Features, Value
from datasets import List as ListOf

from easypipe import (
    ClassifyConfig,
    Combine,
    DatasetConfig,
    ImagesConfig,
    Map,
    Pipeline,
    PipelineConfig,
    PromptConfig,
    SaveStageConfig,
    TaskSpec,
    TrainingConfig,
    block_mixture_interleave,
    discover,
    load_tokenizer,
)
from easypipe.compat.classify import inputs_of
from easypipe.core.errors import ConfigError, SchemaError, SourceError
from easypipe.core.protocols import ShardedSource
from easypipe.core.schema import INPUT_IDS
from easypipe.sources.open import open_files
from pipelines import tokenizer

TAGS = ["O", "PER", "LOC"]
FEATURES = Features(
    {
        "text": Value("string"),
        "label": ClassLabel(names=["neg", "pos"]),
        "tags": ListOf(ClassLabel(names=TAGS)),
        "of": {"kind": ClassLabel(names=["short", "long"]), "year": Value("int32")},
    }
)
ROWS = [
    {"text": "good", "label": 1, "tags": [0, 2], "of": {"kind": 0, "year": 1999}},
    {"text": "bad", "label": 0, "tags": [], "of": {"kind": 1, "year": 2001}},
    {"text": "unseen", "label": -1, "tags": [1], "of": None},
]
DATA = datasets.Dataset.from_list(ROWS, features=FEATURES)
PROMPT = PromptConfig(
    format_type="custom", template="{text}:\n{label}", input_columns=["text"], label_column="label"
)


def saved_folder(folder: Path) -> Any:
    DATA.save_to_disk(folder / "saved")
    return str(folder / "saved")


def parquet(folder: Path) -> Any:
    DATA.to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


def feather(folder: Path) -> Any:
    pyarrow.feather.write_feather(DATA.data.table, folder / "rows.feather")
    return str(folder / "rows.feather")


HOLDERS: list[Callable[[Path], Any]] = [
    saved_folder,
    parquet,
    feather,
    lambda _: DATA,
    lambda _: DATA.select([0, 1, 2]),
    lambda _: DATA.data.table,
    lambda _: datasets.DatasetDict(train=DATA),
    lambda _: DATA.to_iterable_dataset(),
]


def pipeline(folder: Path, data: Any, **options: Any) -> Pipeline:
    one = DatasetConfig(name="d", data_files=data, tokenizer=tokenizer(), **options)
    return Pipeline.from_config(PipelineConfig(datasets=[one], seed=1, cache_dir=folder / "cache"))


def texts(made: Pipeline) -> list[str]:
    source = made.tokenize().get_data()["d"]
    rows: list[list[int]] = []
    for i, shard in enumerate(source.shards):
        rows += source.read(i, 0, shard.num_rows).column(INPUT_IDS).to_pylist()
    return [load_tokenizer(tokenizer()).decode(row, skip_special_tokens=True) for row in rows]


@pytest.mark.parametrize("made", HOLDERS)
def test_a_prompt_has_the_name_of_a_class(made: Callable[[Path], Any], tmp_path: Path) -> None:
    read = pipeline(tmp_path, made(tmp_path), prompt=PROMPT, on_error="skip", max_bad_rows=1)
    assert texts(read.source()) == ["good:\npos", "bad:\nneg"]


def test_names_stand_within_lists_and_objects_too(tmp_path: Path) -> None:
    prompt = PromptConfig(
        format_type="custom", template="{text}\n{tags}\n{of}", input_columns=["text", "tags", "of"]
    )
    made = texts(pipeline(tmp_path, DATA.select([0, 1]), prompt=prompt).source())
    assert made == [
        'good\n["O", "LOC"]\n{"kind": "short", "year": 1999}',
        'bad\n[]\n{"kind": "long", "year": 2001}',
    ]


def test_a_column_of_classes_is_a_column_of_text(tmp_path: Path) -> None:
    read = pipeline(tmp_path, DATA.select([0, 1]), content_field="label")
    assert texts(read.source()) == ["pos", "neg"]


def test_messages_have_names_of_classes(tmp_path: Path) -> None:
    role, says = ClassLabel(names=["user", "assistant"]), ClassLabel(names=["Yes.", "No."])
    features = Features({"messages": ListOf({"role": role, "content": says})})
    talk = [{"role": 0, "content": 1}, {"role": 1, "content": 0}]
    data = datasets.Dataset.from_list([{"messages": talk}], features=features)
    read = pipeline(tmp_path, data, content_field="messages", chat_template="chatml")
    made = texts(read.source())[0]
    assert "user\nNo." in made
    assert "assistant\nYes." in made


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_without_a_name_is_a_row_without_a_value(label: int, tmp_path: Path) -> None:
    table = DATA.data.table.slice(0, 1)
    at = table.schema.get_field_index("label")
    table = table.set_column(at, table.schema.field(at), [pa.array([label])])
    with pytest.raises(SourceError, match=r"row 0.*null.*'label' has no text"):
        texts(pipeline(tmp_path, table, prompt=PROMPT).source())


def test_what_is_no_text_keeps_the_integers(tmp_path: Path) -> None:
    """Functions of users, and columns beside the tokens that no prompt names."""
    seen: list[Any] = []
    read = pipeline(tmp_path, DATA.select([0, 1]), additional_fields=["label"]).source()
    made = read.transform(Map(lambda row: seen.append(row["label"]) or {}, version="1")).tokenize()
    made.save(SaveStageConfig(output_dir=tmp_path / "out", format="parquet")).build()
    written = pq.read_table(next((tmp_path / "out").rglob("*.parquet")))
    assert written.column("label").to_pylist() == [1, 0]
    assert set(seen) == {0, 1}


def test_names_go_through_renaming_and_into_combined_text(tmp_path: Path) -> None:
    data = DATA.select([0, 1])
    prompt = replace(PROMPT, template="{text}:\n{feeling}", label_column="feeling")
    renamed = pipeline(tmp_path, data, format_fields={"label": "feeling"}, prompt=prompt)
    assert texts(renamed.source()) == ["good:\npos", "bad:\nneg"]
    joined = pipeline(tmp_path, data, content_field="both").source()
    assert texts(joined.transform(Combine("both", "{text}={label}"))) == ["good=pos", "bad=neg"]


def test_a_column_that_a_function_makes_anew_has_no_classes(tmp_path: Path) -> None:
    read = pipeline(tmp_path, DATA.select([0, 1]), content_field="label").source()
    own = Map(
        lambda row: {"label": f"n{row['label']}"}, columns={"label": pa.string()}, version="1"
    )
    assert texts(read.transform(own)) == ["n1", "n0"]


def test_other_names_make_other_tokens(tmp_path: Path) -> None:
    """The encoding key knows the names, and stays where no text has any."""
    other = Features(FEATURES | {"label": ClassLabel(names=["no", "yes"])})
    for data, said in ((DATA, "pos"), (DATA.cast(other), "yes")):
        for add in ((), Combine("text", "{text}")):
            made = pipeline(tmp_path, data.select([0]), prompt=PROMPT).source()
            made = made.transform(add) if add else made
            assert texts(made) == [f"good:\n{said}"]
    table = DATA.data.table
    plain = table.replace_schema_metadata(None)
    sources = [
        pipeline(tmp_path, one).source().tokenize().get_data()["d"] for one in (table, plain)
    ]
    keys = [one.encoder.key() for one in sources]  # pyright: ignore[reportAttributeAccessIssue]
    assert keys[0] == keys[1]


def test_files_whose_classes_differ_are_refused_where_they_are_read(tmp_path: Path) -> None:
    other = Features(FEATURES | {"label": ClassLabel(names=["pos", "neg"])})
    DATA.to_parquet(tmp_path / "a.parquet")
    DATA.cast(other).to_parquet(tmp_path / "b.parquet")
    pq.write_table(DATA.data.table.replace_schema_metadata(None), tmp_path / "c.parquet")
    two = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    said = r"b.parquet, column 'label': its classes are \['pos', 'neg'\] here and \['neg', 'pos'\]"
    with pytest.raises(SchemaError, match=said):
        _ = open_files(two).schema
    assert open_files(two, columns=["text"]).schema.names == ["text"]
    assert len(texts(pipeline(tmp_path, two).source())) == 6
    both = [tmp_path / "a.parquet", tmp_path / "c.parquet"]  # one file is silent about them
    read = pipeline(tmp_path, both, prompt=PROMPT, on_error="skip", max_bad_rows=2)
    assert texts(read.source()) == 2 * ["good:\npos", "bad:\nneg"]

    keys = [open_files(both).shard_identity(1)]
    DATA.cast(other).to_parquet(tmp_path / "a.parquet")
    assert open_files(both).shard_identity(1) not in keys  # its rows have the other file's names
    DATA.to_parquet(tmp_path / "a.parquet")

    def opened(name: str) -> ShardedSource:
        return open_files(tmp_path / name)

    with pytest.raises(
        ConfigError, match=r"datasets.b: the classes of 'label' are .*\['pos', 'neg'"
    ):
        block_mixture_interleave({"a": opened("a.parquet"), "b": opened("b.parquet")}, [1, 1])
    assert block_mixture_interleave({"a": opened("a.parquet"), "b": opened("a.parquet")}, [1, 1])


def test_discover_shows_names(tmp_path: Path) -> None:
    DATA.to_parquet(tmp_path / "a.parquet")
    for data in (tmp_path / "a.parquet", DATA):
        sample = discover(data).parts[0].sample
        assert [row["label"] for row in sample] == ["pos", "neg", None]


@pytest.mark.parametrize(
    "metadata",
    [b"", b"{", b"[]", b'{"info": {"features": 3}}', b"[" * 100_000]
    + [
        b'{"info": {"features": {"label": %s, "tags": %s}}}' % (one, one)
        for one in (
            b"[]",
            b"3",
            b'{"_type": "ClassLabel", "names": 2}',
            b'{"_type": "ClassLabel", "names": [2, "a", "b"]}',
            b'{"feature": null}',
        )
    ],
)
def test_other_metadata_says_nothing(metadata: bytes, tmp_path: Path) -> None:
    table = DATA.data.table.replace_schema_metadata({b"huggingface": metadata}).slice(0, 1)
    assert texts(pipeline(tmp_path, table, prompt=PROMPT).source()) == ["good:\n1"]


def test_older_spellings_of_lists(tmp_path: Path) -> None:
    of = b'{"names": ["O", "PER", "LOC"], "_type": "ClassLabel"}'
    prompt = PromptConfig(format_type="custom", template="\n{tags}", input_columns=["tags"])
    for tags in (b"[%s]" % of, b'{"feature": %s, "length": -1, "_type": "Sequence"}' % of):
        metadata = {b"huggingface": b'{"info": {"features": {"tags": %s}}}' % tags}
        table = DATA.data.table.replace_schema_metadata(metadata).slice(0, 1)
        assert texts(pipeline(tmp_path, table, prompt=prompt).source()) == ['\n["O", "LOC"]']


def test_a_classifier_has_integers_and_their_names(tmp_path: Path) -> None:
    pixels = [[[float(i)] * 4] * 4 for i in range(4)]
    features = Features(
        {"image": Array2D((4, 4), "float32"), "label": ClassLabel(names=["cat", "dog"])}
    )
    rows = [{"image": one, "label": i % 2} for i, one in enumerate(pixels)]
    data = datasets.Dataset.from_list(rows, features=features)
    task = TaskSpec(
        name="t", modality="vision", task_type="classification", options={"image_size": 4}
    )

    def made(data: Any, **options: Any) -> Any:
        images = ImagesConfig(
            data_files=data, seed=1, batch_size=4, cache_dir=tmp_path / "cache", **options
        )
        return inputs_of(ClassifyConfig(task=task, data=images, train=TrainingConfig(steps=1)))

    inputs = made(data)
    assert inputs.run.data.classes == ("cat", "dog")
    assert inputs.per_class == {"cat": 2, "dog": 2}
    assert sorted(inputs.train.batch(0)["labels"].tolist()) == [0, 0, 1, 1]
    assert made(data, classes=["miau", "wau"]).per_class == {"miau": 2, "wau": 2}
    unknown = datasets.Dataset.from_list(
        [*rows, {"image": pixels[0], "label": -1}], features=features
    )
    with pytest.raises(SourceError, match=r"row 4.*label -1 is not one of the classes"):
        made(unknown)
