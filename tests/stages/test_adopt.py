"""Tokens that were made elsewhere: mixed and packed like others, refused where they cannot be what
they say.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import laws
from chat_support import chat_tokenizer
from easypipe import (
    BudgetError,
    ConfigError,
    DatasetConfig,
    Filter,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    SourceError,
    TokenizerConfig,
    TokenizeStageConfig,
)
from easypipe.core.schema import (
    ATTENTION_MASK,
    COMPLETION_MASK,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_IDS,
)
from easypipe.stages.tokenize.documents import require_documents
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import config, tokenizer

MASKS = {LOSS_MASK, COMPLETION_MASK}

PACK = PackStageConfig(seq_length=16)


def pipeline(tmp_path: Path, rows: object, **options: object) -> Pipeline:
    values = {"name": "x", "data_files": rows, "tokenizer": tokenizer()} | options
    return Pipeline(config(tmp_path, datasets=[DatasetConfig(**values)])).source().tokenize()


def ids(source: object) -> list[list[int]]:
    cache = source.mixture.prepare()[0]
    return [cache.tokens(i).tolist() for i in range(cache.num_docs)]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.list_(pa.int64()),
        pa.large_list(pa.uint16()),
        pa.list_(pa.int32(), 3),
    ],
)
def test_every_list_of_integers(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(
        pa.table({INPUT_IDS: pa.array([[1, 2, 3], [4, 5, 6]], kind)}), tmp_path / "x.parquet"
    )
    source = pipeline(tmp_path, str(tmp_path / "x.parquet")).pack(PACK).get_data()["x"]
    assert ids(source) == [[1, 2, 3], [4, 5, 6]]
    laws.assert_stateless_reads(source)


def test_empty_rows_are_counted_and_books_close(tmp_path: Path) -> None:
    rows = [{INPUT_IDS: row} for row in ([1, 2], [], [3], [], [4, 5])]
    packed = pipeline(tmp_path, rows).pack(PACK)
    assert ids(packed.get_data()["x"]) == [[1, 2], [3], [4, 5]]
    assert packed.ledger().find("tokenize", "x", "rows").out == {"written": 3, "empty": 2}
    laws.assert_conserved(packed.ledger())


def test_unshifted_labels_become_the_mask(tmp_path: Path) -> None:
    rows = [{INPUT_IDS: [1, 2, 3], LABELS: [-100, 2, 3]}, {INPUT_IDS: [4, 5], LABELS: [4, -100]}]
    source = pipeline(tmp_path, rows).pack(PACK).get_data()["x"]
    batch = source.mixture.prepare()[0].read(0, 0, 2)
    assert batch.column(LOSS_MASK).to_pylist() == [[0, 1, 1], [1, 0]]


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_masks_by_trls_names_say_what_is_trained(tmp_path: Path, name: str) -> None:
    """Rows as TRL's preparation leaves them; with labels too, what both name is a target."""
    rows = [{INPUT_IDS: [1, 2, 3], name: [0, 1, 1]}, {INPUT_IDS: [4, 5], name: [1, 0]}]
    source = pipeline(tmp_path, rows).pack(PACK).get_data()["x"]
    assert source.mixture.prepare()[0].read(0, 0, 2).column(LOSS_MASK).to_pylist() == [
        [0, 1, 1],
        [1, 0],
    ]
    loaded = pipeline(tmp_path, rows).load(LoadStageConfig(batch_size=2)).build().batch(0)
    assert sorted(np.asarray(loaded[LABELS])[:, :2].tolist()) == [[-100, -100], [2, 3]]
    both = [row | {LABELS: [-100, -100, 3][-len(row[INPUT_IDS]) :]} for row in rows[:1]]
    laid = pipeline(tmp_path, both).pack(PACK).get_data()["x"].mixture.prepare()[0]
    assert laid.read(0, 0, 1).column(LOSS_MASK).to_pylist() == [[0, 0, 1]]
    with pytest.raises(SourceError, match=rf"column '{name}': not as long as input_ids"):
        pipeline(tmp_path, [{INPUT_IDS: [1, 2], name: [1]}]).pack(PACK).ledger()


def test_the_adopted_source_keeps_the_law_and_says_what_its_cache_says(tmp_path: Path) -> None:
    rows = [{INPUT_IDS: list(range(1, 1 + n % 7))} for n in range(40)]
    before = pipeline(tmp_path, rows)
    source = require_documents("x", before.get_data()["x"], before.get_context(), stage="pack")
    laws.assert_stateless_reads(source)
    cache = source.materialize()
    laws.assert_stateless_reads(cache)
    assert cache.read(0, 0, 40).equals(source.read(0, 0, 40))


def test_the_cache_is_opened_where_it_stands_and_made_again_where_it_is_damaged(
    tmp_path: Path,
) -> None:
    rows = [{INPUT_IDS: [1, 2, 3]}]
    assert ids(pipeline(tmp_path, rows).pack(PACK).get_data()["x"]) == [[1, 2, 3]]
    [file] = (tmp_path / "cache" / "tokens").rglob("*.arrow")
    written = file.stat().st_mtime_ns
    assert ids(pipeline(tmp_path, rows).pack(PACK).get_data()["x"]) == [[1, 2, 3]]
    assert file.stat().st_mtime_ns == written
    file.write_bytes(b"cut")
    assert ids(pipeline(tmp_path, rows).pack(PACK).get_data()["x"]) == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {INPUT_IDS: [1, 320]},
            r"row 1, column 'input_ids': token 320 is outside the vocabulary of 320 of .* Name the "
            r"tokenizer",
        ),
        ({INPUT_IDS: [1, -1]}, r"row 1, column 'input_ids': token -1 is outside the vocabulary"),
        ({INPUT_IDS: None}, r"row 1, column 'input_ids': null instead of tokens"),
        (
            {INPUT_IDS: [1, 2], LABELS: [2, -100]},
            r"row 1, column 'labels': token 0 has label 2, its id is 1",
        ),
        (
            {INPUT_IDS: [1, 2], LOSS_MASK: [1]},
            r"row 1, column 'loss_mask': not as long as input_ids",
        ),
        (
            {INPUT_IDS: [1, 2], LOSS_MASK: [1, 256]},
            r"row 1, column 'loss_mask': token 1 has 256. Give 1 for a target and 0 for any other "
            "token, or leave the row out",
        ),
        (
            {INPUT_IDS: [1, 2], ATTENTION_MASK: [1, 0]},
            r"row 1, column 'attention_mask': the row is padded. Save the tokens without",
        ),
        (
            {INPUT_IDS: [1, 2, 3], POSITION_IDS: [0, 1, 0]},
            r"row 1, column 'position_ids': positions start again at 0: the row holds several",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, row: dict, message: str) -> None:
    good = {INPUT_IDS: [7, 8], LABELS: [7, 8], LOSS_MASK: [1, 1], ATTENTION_MASK: [1, 1]}
    good[POSITION_IDS] = [0, 1]
    rows = [{name: good[name] for name in row}, row]
    with pytest.raises(SourceError, match=message):
        pipeline(tmp_path, rows).pack(PACK).ledger()
    skipping = pipeline(tmp_path, [*rows, rows[0]], on_error="skip").pack(PACK)
    assert skipping.ledger().find("tokenize", "x", "rows").out == {"written": 2, "bad_tokens": 1}
    laws.assert_conserved(skipping.ledger())
    with pytest.raises(SourceError, match=message):  # not by the cache without that row
        pipeline(tmp_path, [*rows, rows[0]]).pack(PACK).ledger()


def test_columns_that_hold_no_tokens_are_refused_whatever_on_error_says(tmp_path: Path) -> None:
    rows = [{INPUT_IDS: [1.5, 2.5]}]
    with pytest.raises(SourceError, match="expected lists of integers, got"):
        pipeline(tmp_path, rows, on_error="skip").pack(PACK).ledger()


def test_bad_token_rows_are_quarantined_and_counted_against_the_budget(tmp_path: Path) -> None:
    rows = [{INPUT_IDS: [n, 999 if n % 3 == 1 else 7]} for n in range(9)]
    kept = pipeline(tmp_path, rows, on_error="quarantine").pack(PACK)
    assert ids(kept.get_data()["x"]) == [row[INPUT_IDS] for row in rows if row[INPUT_IDS][1] == 7]
    [file] = (tmp_path / "cache").rglob("*.quarantine.jsonl")
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["row"], one["reason"], one["raw"]) for one in told] == [
        (n, "bad_tokens", f"[{n}, 999]") for n in (1, 4, 7)
    ]
    assert "token 999 is outside the vocabulary" in told[0]["detail"]
    with pytest.raises(
        BudgetError, match=r"row 7, .* bad row number 3 of dataset 'x' \(bad_tokens: token 999"
    ):
        pipeline(tmp_path, rows, on_error="skip", max_bad_rows=2).pack(PACK).ledger()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "broken",
    [
        {INPUT_IDS: [1, 999, 1], LABELS: [1, 999, 1]},
        {LABELS: [2]},
        {LABELS: [3, 3, 3]},
        {LOSS_MASK: [0, 2, 1]},
        {COMPLETION_MASK: [0, 1, -1]},
    ],
)
def test_a_bad_row_is_named_by_its_place_in_the_file_however_it_is_read(
    tmp_path: Path, kind: str, streaming: bool, broken: dict
) -> None:
    rows = [{INPUT_IDS: [1, 1, 1], LABELS: [1, 1, 1], "n": n} for n in range(9)]
    rows = [row | {name: [0, 1, 1] for name in MASKS & set(broken)} for row in rows]
    rows[7] |= broken
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    dataset = DatasetConfig(name="x", data_files=str(tmp_path / f"x.{kind}"), tokenizer=tokenizer())
    made = config(tmp_path, datasets=[dataset], streaming=streaming)
    where = "row 7"
    if streaming and kind == "jsonl":
        where = f"line at byte {sum(map(len, lines[:7]))}"

    def rows_of(made: PipelineConfig) -> int:
        chain = Pipeline(made).source().transform(Filter(pc.field("n") > 2)).pack(PACK)
        loader = chain.load(LoadStageConfig(batch_size=1, num_epochs=1)).build()
        return sum(int(batch[SEGMENT_IDS].max()) for batch in loader)

    with pytest.raises(SourceError, match=rf"x\.{kind}, {where}, column '{next(iter(broken))}': "):
        rows_of(made)
    skipping = dataclasses.replace(dataset, on_error="skip")
    assert rows_of(dataclasses.replace(made, datasets=(skipping,))) == 5


def test_tokens_that_nobody_claims(tmp_path: Path) -> None:
    dataset = DatasetConfig(name="x", data_files=[{INPUT_IDS: [1, 2]}])
    with pytest.raises(
        ConfigError,
        match=r"datasets.x.tokenizer: unknown tokenizer for column 'input_ids'. Name the tokenizer",
    ):
        Pipeline(
            config(tmp_path, datasets=[dataset], default_tokenizer=None)
        ).source().tokenize().pack(PACK)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_tokenizer_of_the_tokenize_stage_is_that_of_tokens_too(
    tmp_path: Path, streaming: bool
) -> None:
    rows = [{INPUT_IDS: [1, 2]}] * 9
    datasets = [DatasetConfig(name="x", data_files=rows)]
    plain = config(tmp_path, datasets=datasets, default_tokenizer=None, streaming=streaming)
    stage = TokenizeStageConfig(default_tokenizer=tokenizer())
    for made, given in ((dataclasses.replace(plain, tokenize=stage), None), (plain, stage)):
        chain = Pipeline(made).source().tokenize(given).pack(PACK)
        batches = chain.load(LoadStageConfig(batch_size=1, num_epochs=1)).build()
        assert next(iter(batches))[INPUT_IDS].tolist()[0][:2] == [1, 2]


def test_saved_tokens_can_be_limited_and_their_type_is_not_another(tmp_path: Path) -> None:
    first = pipeline(tmp_path, [{"text": f"row {i}"} for i in range(9)])
    first.save({"output_dir": str(tmp_path / "out")}).build()
    dataset = DatasetConfig(name="x", data_files=tmp_path / "out", num_rows=4, type="parquet")
    limited = Pipeline(config(tmp_path, datasets=[dataset])).source().tokenize().pack(PACK)
    assert limited.ledger().find("tokenize", "x", "rows").out == {"written": 4}
    other = DatasetConfig(name="x", data_files=tmp_path / "out", type="csv")
    with pytest.raises(
        ConfigError, match=r"datasets.x.type: 'csv', but .* was saved as parquet. Leave it out."
    ):
        Pipeline(config(tmp_path, datasets=[other])).source()


def test_the_tokenizer_of_a_saved_folder_is_not_another(tmp_path: Path) -> None:
    first = pipeline(tmp_path, [{"text": f"row {i}"} for i in range(9)])
    first.save({"output_dir": str(tmp_path / "out")}).build()

    def opened(name: str) -> Pipeline:
        dataset = DatasetConfig(name="x", data_files=tmp_path / "out", tokenizer=name)
        return Pipeline(config(tmp_path, datasets=[dataset])).source()

    opened(tokenizer())
    opened(shutil.copytree(tokenizer(), tmp_path / "copy").as_posix())
    with pytest.raises(
        ConfigError, match=r"datasets.x.tokenizer: '.*', but .*out holds tokens of '.*'. Leave it"
    ):
        opened(chat_tokenizer())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("content_field", "body"),
        ("train_on", "completion"),
        ("length", {"policy": "drop"}),
        ("tokenizer_kwargs", {"max_length": 2}),
        ("tokenizer", {"name_or_path": tokenizer(), "max_length": 2}),
    ],
)
def test_options_of_text_are_refused_on_tokens(tmp_path: Path, option: str, value: object) -> None:
    rows = [{"input_ids": [1, 2, 3]}]
    datasets = [{"name": "x", "data_files": rows, option: value}]
    with pytest.raises(
        ConfigError, match=rf"datasets\[0\].{option}\S*: has no effect: .* are tokens"
    ):
        Pipeline(config(tmp_path, datasets=datasets)).source().tokenize()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_changed_row_holds_ids_of_the_vocabulary(tmp_path: Path, streaming: bool) -> None:
    rows = [{INPUT_IDS: [1, 2, 3]}] * 9
    datasets = [DatasetConfig(name="x", data_files=rows)]
    chain = Pipeline(config(tmp_path, datasets=datasets, streaming=streaming)).source().tokenize()
    loader = chain.pack(PACK).load(LoadStageConfig(batch_size=1)).build()
    size = load_tokenizer(TokenizerConfig(name_or_path=tokenizer())).vocab_size

    def filled(token: int) -> Any:
        changed = loader.map_rows(lambda row, key: row[INPUT_IDS].fill(token), version="1")
        return next(iter(changed))[INPUT_IDS]

    assert (filled(size - 1) == size - 1).all()
    with pytest.raises(
        SourceError,
        match=rf"row 0: returned {size} in column 'input_ids'. Return integers from 0 to {size - 1}",
    ):
        filled(size)


def test_a_max_length_that_text_shares_with_tokens_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"text": [{"text": "a b c d"}], "tokens": [{INPUT_IDS: [1, 2, 3]}]}
    datasets = [{"name": name, "data_files": data} for name, data in rows.items()]
    options = TokenizerConfig(name_or_path=tokenizer(), max_length=2)
    for option, given, stage in (
        ("tokenize.max_length", {}, TokenizeStageConfig(max_length=2)),
        ("default_tokenizer.max_length", {"default_tokenizer": options}, None),
    ):
        caplog.clear()
        made = Pipeline(config(tmp_path, datasets=datasets, **given)).source().tokenize(stage)
        found = {name: source.read(0, 0, 1) for name, source in made.get_data().items()}
        lengths = {name: len(batch.column(INPUT_IDS)[0]) for name, batch in found.items()}
        assert lengths == {"text": 2, "tokens": 3}
        assert (
            f"{option}: has no effect on dataset tokens, whose rows are tokens already and stay "
            "as long as they are; pack.oversize says what packing does with long ones"
        ) in caplog.text
        assert "dataset text" not in caplog.text
    caplog.clear()
    width = dataclasses.replace(options, padding="max_length")
    made = config(tmp_path, datasets=datasets[1:], default_tokenizer=width)
    loader = Pipeline(made).source().tokenize().load(LoadStageConfig(batch_size=1)).build()
    assert "has no effect" not in caplog.text
    with pytest.raises(
        SourceError,
        match=r"3 tokens do not fit max_length 2. Shorten the rows where tokens are made, pack the "
        r"rows, or raise max_length to 3",
    ):
        next(iter(loader))


def test_tokens_that_were_made_before_are_padded_as_the_tokenizer_says_that_the_config_names(
    tmp_path: Path,
) -> None:
    rows = [{"input_ids": list(range(3 + i % 5))} for i in range(12)]
    own = {"max_length": 9, "padding": "max_length", "return_attention_mask": True}
    options = TokenizerConfig(name_or_path=tokenizer(), **own)
    for given in (
        {"datasets": [DatasetConfig(name="d", data_files=rows, tokenizer_kwargs=own)]},
        {"default_tokenizer": options},
        {"datasets": [DatasetConfig(name="d", data_files=rows, tokenizer=options)]},
    ):
        values = config(
            tmp_path, **({"datasets": [DatasetConfig(name="d", data_files=rows)]} | given)
        )
        batch = next(iter(Pipeline(values).source().load(LoadStageConfig(batch_size=4)).build()))
        assert batch["input_ids"].shape == (4, 9)
        assert (batch["attention_mask"] == (batch["segment_ids"] > 0)).all()
        packed = next(
            iter(
                Pipeline(values)
                .source()
                .pack(PackStageConfig(seq_length=6))
                .load(LoadStageConfig(batch_size=4))
                .build()
            )
        )
        assert packed["attention_mask"].shape == (4, 6)
