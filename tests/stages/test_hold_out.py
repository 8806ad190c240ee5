"""Rows held out of the data for evaluation: disjoint, stable, said."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pytest
import xxhash

from easypipe import (
    ConfigError,
    DatasetConfig,
    ModelConfig,
    Pipeline,
    PipelineConfig,
    RunConfig,
    SourceError,
    Trainer,
    TrainingConfig,
)
from easypipe.cache.config import CacheConfig
from easypipe.cli.configs import data_of
from easypipe.core.config import digest, from_dict
from easypipe.core.schema import JSON
from easypipe.jobs import (
    chains,
    complete,
    prepare_data,
    warn_of_trained_rows,
    with_hold_outs,
)
from easypipe.loader.config import LoadStageConfig
from easypipe.run import _held_out, inputs_of
from easypipe.stages.pack.config import PackStageConfig
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.train.parallel.mesh import make_mesh
from easypipe.transforms.columns.base import Rows
from easypipe.transforms.columns.hold_out import HoldOut, HoldOutConfig
from pipelines import jsonl, texts, tokenizer


def read(folder: Path, hold_out: dict[str, Any] | None = None, **options: Any) -> list[str]:
    dataset = DatasetConfig(name="d", data_files=str(folder / "*.jsonl"), hold_out=hold_out)  # type: ignore[arg-type]
    (source,) = (
        Pipeline(PipelineConfig(datasets=(dataset,), seed=1, **options))
        .source()
        .get_data()
        .values()
    )
    return [row["text"] for name in source.shard_names for row in source.open_shard(name)]  # type: ignore[attr-defined]


def test_the_two_sides_are_disjoint_and_stable(tmp_path: Path) -> None:
    every = texts(800, 3)
    jsonl(tmp_path / "a.jsonl", [{"text": text, "n": i} for i, text in enumerate(every)])
    rest, held = (
        read(tmp_path, {"fraction": 0.2, "seed": 7, "held": held}) for held in (False, True)
    )
    assert sorted(rest + held) == sorted(every)
    assert not set(rest) & set(held)
    assert 100 < len(held) < 220
    assert set(read(tmp_path, {"fraction": 0.2, "seed": 8, "held": True})) != set(held)
    more = texts(300, 5)
    # before the others, and with a row of theirs
    jsonl(tmp_path / "0.jsonl", [{"text": text} for text in [*more, held[0]]])
    (tmp_path / "a.jsonl").rename(tmp_path / "z.jsonl")
    assert set(held) <= set(read(tmp_path, {"fraction": 0.2, "seed": 7, "held": True}))
    assert held[0] not in read(tmp_path, {"fraction": 0.2, "seed": 7})
    for wrong in (0, 1.0):
        with pytest.raises(ConfigError, match=r"hold_out\.fraction: .* is not a part of the rows"):
            read(tmp_path, {"fraction": wrong})


def test_the_type_of_a_column_moves_no_row() -> None:
    """It depends on the other rows and files: with a fraction among them, 1 is 1.0."""
    json = pa.array([f"[{n}]" for n in range(50)]).cast(pa.large_string())
    same = (
        {
            "integers": pa.array(range(2**60, 2**60 + 5000, 100)),
            "floats": pa.array([float(n) for n in range(2**60, 2**60 + 5000, 100)]),
        },
        {
            "lists": pa.array([[n] for n in range(50)]),
            "of floats": pa.array([[float(n)] for n in range(50)]),
            "JSON": pa.ExtensionArray.from_storage(JSON, json),
        },
        {
            "maps": pa.array([[("k", n)] for n in range(50)], pa.map_(pa.string(), pa.int64())),
            "objects": pa.array([{"k": n, "other": None} for n in range(50)]),
        },
    )
    for columns in same:
        sides = []
        for column in columns.values():
            batch = pa.record_batch({"x": column})
            hold = HoldOut(HoldOutConfig(fraction=0.5), ["x"], batch.schema)
            sides.append(hold.rows(Rows(batch, np.arange(50))).numbers.tolist())
        assert 10 < len(sides[0]) < 40
        assert all(side == sides[0] for side in sides), list(columns)


@pytest.mark.parametrize("nulls", [True, False])
@pytest.mark.parametrize("kind", [pa.large_string(), pa.string(), pa.int64()], ids=str)
def test_which_rows_are_held_out_is_the_hash_of_what_they_hold(
    kind: pa.DataType, nulls: bool
) -> None:
    """The rule may never change: rows would go from one side to the other."""
    rows: list[Any] = [None if nulls and i % 7 == 0 else i for i in range(300)]
    if kind != pa.int64():
        rows = [row if row is None else f"héé {row}" * (row % 5) for row in rows]
    options = HoldOutConfig(fraction=0.3, seed=9, held=True)
    batch = pa.RecordBatch.from_arrays([pa.array(rows, kind)], names=["text"])[10:]
    held = HoldOut(options, ["text"], batch.schema)(batch).column(0).to_pylist()
    texts = [row if isinstance(row, str) else json.dumps([row]) for row in rows[10:]]
    hashes = [xxhash.xxh3_64_intdigest(text.encode(), 9) for text in texts]
    assert held == [rows[10 + i] for i, one in enumerate(hashes) if one < int(0.3 * 2**64)]


def test_caches_of_rows_with_keys_are_not_those_of_the_rule_before() -> None:
    """Rows with keys were held out by another rule once; those of plain text were not."""
    options = HoldOutConfig(fraction=0.3, seed=9)
    before = digest("hold out", options, ("a",))
    kinds = {pa.string(): True, pa.int64(): True, pa.json_(): False}
    kinds[pa.list_(pa.struct({"role": pa.string()}))] = False
    for kind, same in kinds.items():
        mine = HoldOut(options, ["a"], pa.schema({"a": kind})).fingerprint
        assert (mine == before) is same, kind


def test_the_order_of_columns_holds_out_no_other_rows() -> None:
    rows = [{"a": f"ask {i}", "b": f"tell {i}"} for i in range(200)]
    options = HoldOutConfig(fraction=0.3, seed=9)
    batch = pa.RecordBatch.from_pylist(rows)
    one, other = (
        HoldOut(options, names, batch.schema)(batch).to_pylist()
        for names in (["a", "b"], ["b", "a"])
    )
    assert one == other
    assert 0 < len(one) < 200


def test_the_order_of_keys_holds_out_no_other_rows() -> None:
    options = HoldOutConfig(fraction=0.3, seed=9)
    batches = (
        pa.RecordBatch.from_pylist([{"a": dict.fromkeys(keys, i)} for i in range(200)])
        for keys in ("xy", "yx")
    )
    one, other = (HoldOut(options, ["a"], rows.schema)(rows).to_pylist() for rows in batches)
    assert one == other
    assert 0 < len(one) < 200


@pytest.mark.parametrize(
    "more", [[{"name": "bob"}], [{"name": {"a": 1}}, {"name": [1]}]], ids=["a new key", "any type"]
)
def test_a_file_whose_messages_have_another_key_moves_no_row(
    tmp_path: Path, more: list[Any]
) -> None:
    def talks(name: str, first: int, keys: list[Any]) -> None:
        said = [
            {"role": "user", "content": f"q{first + i}"} | keys[i % len(keys)] for i in range(60)
        ]
        jsonl(tmp_path / f"{name}.jsonl", [{"messages": [message]} for message in said])

    def held(**more: Any) -> set[str]:
        options: Any = {"fraction": 0.5, "held": True}
        dataset = DatasetConfig(
            name="d",
            data_files=str(tmp_path / "*.jsonl"),
            content_field="messages",
            train_on="all",
            hold_out=options,
        )
        config = PipelineConfig(datasets=(dataset,), seed=1, **more)
        source: Any = Pipeline(config).source().get_data()["d"]
        rows = [source.read(i, 0, shard.num_rows) for i, shard in enumerate(source.shards)]
        said = str([batch.column("messages").to_pylist() for batch in rows])
        return set(re.findall(r"\bq\d\b|\bq[1-5]\d\b", said))

    talks("a", 0, [{}])
    before = held()
    assert held(streaming=True) == before
    talks("b", 100, more)
    assert held() == held(streaming=True) == before
    assert 10 < len(before) < 50


def run(tmp_path: Path, held_out: dict[str, Any]) -> dict[str, Any]:
    file = jsonl(tmp_path / "data" / "a.jsonl", [{"text": text} for text in texts(300, 3)])
    data = {
        "datasets": [{"data_files": str(file)}],
        "default_tokenizer": tokenizer(),
        "seed": 1,
        "cache_dir": str(tmp_path / "cache"),
    }
    return {"data": data | {"pack": {"seq_length": 64}}, "train": {}, "eval": {"held": held_out}}


def test_one_dataset_in_place_of_a_list_is_refused_as_without_held_out_data(tmp_path: Path) -> None:
    values = run(tmp_path, {"from": "data", "fraction": 0.1, "seed": 7})
    [values["data"]["datasets"]] = values["data"]["datasets"]
    with pytest.raises(ConfigError, match=r"^data\.datasets: wants a list"):
        data_of(values)


def test_the_ledger_tells_held_out_data_of_the_same_name_apart(tmp_path: Path) -> None:
    values = run(tmp_path, {})
    other = jsonl(tmp_path / "data" / "b.jsonl", [{"text": text} for text in texts(20, 9)])
    for of, file in (("data", tmp_path / "data" / "a.jsonl"), ("eval", other)):
        entry = values["data"] if of == "data" else values["eval"]["held"]
        entry["datasets"] = [{"name": name, "data_files": str(file)} for name in ("one", "two")]
        entry["mix"] = {"weights": {"one": 1, "two": 1}, "stop_strategy": "all_exhausted"}
    ledger = prepare_data(*data_of(values)).report.ledger
    for name, count in (("one", 300), ("eval.held.one", 20)):
        assert ledger.find("tokenize", name, "rows").out == {"written": count}
    for name in ("mixed", "eval.held.mixed"):
        slots = ledger.find("pack", name, "slots")
        assert ledger.facts[f"pack.{name}.rows"] * 64 == sum(slots.into.values())
    assert len({(one.stage, one.dataset, one.unit) for one in ledger.entries}) == len(
        ledger.entries
    )


def test_a_run_holds_out_rows_of_its_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepare_data(*data_of(run(tmp_path, {"from": "data", "fraction": 0.1, "seed": 7})))
    rows = [
        prepared.report.ledger.find("tokenize", name, "rows").out
        for name in ("dataset1", "eval.held.dataset1")
    ]
    assert rows[0]["written"] + rows[1]["written"] == 300
    assert rows[0]["held_out"] == rows[1]["written"] > 10
    assert rows[1]["not_held_out"] == rows[0]["written"]
    assert "filtered" not in rows[0] | rows[1]
    assert "trained on too" not in caplog.text


@pytest.mark.parametrize(("fraction", "helps"), [(1e-6, "larger"), (1 - 1e-6, "smaller")])
def test_a_side_without_rows_says_what_helps(tmp_path: Path, fraction: float, helps: str) -> None:
    values = run(tmp_path, {"from": "data", "fraction": fraction, "seed": 7})
    with pytest.raises(SourceError, match=f"held_out 300; .* Hold out a {helps} fraction of"):
        prepare_data(*data_of(values))


def test_a_run_made_in_python_holds_out_as_its_file_does(tmp_path: Path) -> None:
    held_out = {"from": "data", "fraction": 0.1, "seed": 7}
    values = run(tmp_path, held_out)
    wanted = data_of(values)
    [dataset] = values["data"].pop("datasets")
    data = PipelineConfig(
        datasets=(DatasetConfig(**dataset, save_path=str(tmp_path / "saved")),), **values["data"]
    )
    made = RunConfig(
        data=data,
        train=TrainingConfig(output_dir=str(tmp_path / "run"), steps=1),
        eval={"held": held_out},
    )  # type: ignore[dict-item]
    assert made.eval == wanted[1]
    assert [one.hold_out for one in made.data.datasets] == [
        one.hold_out for one in wanted[0].datasets
    ]
    assert made.data.datasets[0].save_path is not None
    assert dataclasses.replace(made, model=made.model) == made
    with pytest.raises(ConfigError, match=r"data\.datasets\[0\]\.hold_out: is set by eval\.held"):
        RunConfig(data=made.data, train=made.train, eval={"held": held_out})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"^data: "):
        RunConfig(data="files", train=made.train, eval={"held": held_out})  # type: ignore[arg-type, dict-item]
    trainer = Trainer(
        ModelConfig(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2),
        data=PipelineConfig(datasets=(DatasetConfig(**dataset),), **values["data"]),
        evals={"held": held_out},
        output_dir=str(tmp_path / "run"),
        steps=1,
        batch_size=2,
    )
    assert trainer.evals[0].name == "held"
    assert 0 < len(trainer.evals[0].loader) < len(trainer.train)


def test_evaluating_on_trained_rows_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = run(tmp_path, {})
    values["eval"]["held"] = {"datasets": json.loads(json.dumps(values["data"]["datasets"]))}
    prepare_data(*data_of(values))
    assert "eval.held: its rows of " in caplog.text
    assert "a.jsonl are trained on too" in caplog.text


SIDES = [None, *({"fraction": f, "seed": s, "held": h} for f, s, h in [
    (0.5, 7, False), (0.5, 7, True), (0.5, 8, True), (0.6, 7, True), (0.6, 8, False),
])]  # fmt: skip


@pytest.mark.parametrize("trained", range(len(SIDES)))
def test_rows_that_both_have_are_warned_of_and_the_sides_of_a_hold_out_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trained: int
) -> None:
    """By the rows themselves. Parts of other sizes may be apart, and are warned of."""
    values = run(tmp_path, {})
    without = {"held": None}
    texts_of = [set(read(tmp_path / "data", side)) for side in SIDES]
    for held, side in enumerate(SIDES):
        [one] = values["data"]["datasets"]
        values["data"]["datasets"] = [one | {"hold_out": SIDES[trained]}]
        values["eval"]["held"] = {"datasets": [one | {"hold_out": side}]}
        caplog.clear()
        warn_of_trained_rows(*chains(*data_of(values)))
        both = texts_of[trained] & texts_of[held]
        sides = [(one or {}) | without for one in (side, SIDES[trained])]
        if both or sides[0] == sides[1]:
            assert ("are trained on too" in caplog.text) == bool(both)


@pytest.mark.parametrize("own", [False, True])
def test_however_a_run_loads_its_held_out_rows_are_read_once_each(
    tmp_path: Path, own: bool
) -> None:
    """In batches of one size, though those of training grow, are cut, shuffled and repeated; also
    where the held-out data says so itself.
    """
    load = {
        "batch_size": 4,
        "batch_size_schedule": [[1, 8], [2, 16]],
        "accumulation_steps": 2,
        "shuffle_buffer_size": 64,
        "num_epochs": 3,
        "drop_last": True,
    }
    side = {"fraction": 0.3, "seed": 7}
    values = run(tmp_path, {"from": "data", **side} | ({"load": load} if own else {}))
    del values["data"]["pack"]
    jsonl(tmp_path / "data" / "b.jsonl", [{"text": text} for text in texts(40, 4)])
    files = {"data_files": str(tmp_path / "data" / "b.jsonl")}
    values["data"] |= {"datasets": [*values["data"]["datasets"], files], "load": load}
    values["data"]["mix"] = {"stop_strategy": "all_exhausted"}  # else there are no passes
    values["train"] = {"output_dir": str(tmp_path / "run"), "steps": 1}
    values["model"] = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2}
    made = from_dict(RunConfig, values)
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    loader = inputs_of(made, mesh=mesh).evals["held"]
    batches = list(itertools.islice(loader, 99))  # one may never end
    assert {len(batch["input_ids"]) for batch in batches} == {4}
    both = (zip(batch["input_ids"], batch["segment_ids"], strict=True) for batch in batches)
    rows = [bytes(np.asarray(row)[np.asarray(own) > 0]) for one in both for row, own in one]
    rows = [row for row in rows if row]
    wanted = read(tmp_path / "data", side | {"held": True})
    assert len(rows) == len(wanted)
    assert len(set(rows)) == len(set(wanted))


def test_refusals(tmp_path: Path) -> None:
    for held, message in (
        ({"from": "dat"}, r"eval.held.from: 'dat' names no data"),
        ({"from": "data", "fraction": None}, r"eval.held.fraction: is missing. Say how many"),
        ({"from": "data", "fraction": 2}, r"eval.held.fraction: 2.0 is not a part"),
        ({"from": "data", "datasets": []}, r"eval.held.datasets: has no effect together with from"),
    ):
        with pytest.raises(ConfigError, match=message):
            data_of(run(tmp_path, held))


# what reading held-out rows once fixes, whatever training says
ONCE: dict[str, Any] = {
    "batch_size_schedule": (),
    "accumulation_steps": 1,
    "shuffle_buffer_size": None,
    "drop_last": False,
    "num_epochs": 1,
}
LOADED: dict[str, Any] = {
    "batch_size": 16,
    "batch_size_schedule": ((2, 32),),
    "accumulation_steps": 2,
    "prefetch_enabled": False,
    "prefetch_workers": 3,
    "prefetch_buffer_size": 5,
    "shuffle_buffer_size": 9,
    "group_by_length": 3,
    "drop_last": True,
    "prefetch_to_device": True,
    "num_epochs": 3,
    "source_ids": True,
    "mesh": {"data": 1},
    "partition_spec": ["data"],
    "stall_timeout_s": 7.0,
}


@pytest.mark.parametrize("option", LOADED)
def test_an_option_of_loading_is_the_same_for_held_out_rows_or_fixed(option: str) -> None:
    needs = {"batch_size_schedule": {"batch_size": 16}, "partition_spec": {"mesh": {"data": 1}}}
    given = LoadStageConfig(**needs.get(option, {}), **{option: LOADED[option]})
    read = _held_out(given)
    for field in dataclasses.fields(LoadStageConfig):
        wanted = ONCE.get(field.name, getattr(given, field.name))
        assert getattr(read, field.name) == wanted, field.name


def test_every_option_of_loading_is_tried() -> None:
    assert {field.name for field in dataclasses.fields(LoadStageConfig)} == {*LOADED}


TAKEN: dict[str, tuple[Any, Any]] = {  # what held-out data leaves out: of the data, of its own
    "seed": (3, 4),
    "cache_dir": ("there", "here"),
    "cache": (CacheConfig(staging_bytes=9), CacheConfig(staging_bytes=8)),
    "default_tokenizer": ("one", "two"),
    "tokenize": (TokenizeStageConfig(max_length=9), TokenizeStageConfig(max_length=8)),
    "pack": (PackStageConfig(seq_length=9), PackStageConfig(seq_length=8)),
}
OWN = {
    "datasets",
    "streaming",
    "num_streams",
    "executor",
    "order",
    "mix",
    "save",
    "load",  # run.py: where it names none, that of the data, read once
}


@pytest.mark.parametrize("option", TAKEN)
def test_held_out_data_takes_what_it_leaves_out(option: str) -> None:
    of_data, own = TAKEN[option]
    bucket = {"cache_dir": "s3://bucket/cache"} if option == "cache" else {}
    rows = DatasetConfig(data_files="a.jsonl")
    data = PipelineConfig(datasets=[rows], **bucket, **{option: of_data})
    missing = complete("held", data, PipelineConfig(datasets=[rows]))
    assert getattr(missing, option) == of_data
    there = complete("held", data, PipelineConfig(datasets=[rows], **bucket, **{option: own}))
    assert getattr(there, option) == own
    for field in dataclasses.fields(PipelineConfig):
        if field.name not in (option, "datasets", *bucket):
            plain = getattr(PipelineConfig(datasets=[rows]), field.name)
            assert getattr(there, field.name) == plain


def test_every_option_of_held_out_data_is_taken_or_its_own() -> None:
    names = {field.name for field in dataclasses.fields(PipelineConfig)}
    assert names == {*TAKEN} | OWN
    assert not {*TAKEN} & OWN


def test_rows_that_are_held_out_may_be_loaded_in_another_way() -> None:
    data = {"datasets": [{"data_files": "a.txt"}], "load": {"batch_size": 4}}
    entry = {"from": "data", "fraction": 0.1, "load": {"batch_size": 2}}
    made = with_hold_outs({"data": data, "eval": {"held": entry}})
    assert made["eval"]["held"]["load"] == {"batch_size": 2}
    assert made["data"]["load"] == {"batch_size": 4}


def test_held_out_data_with_a_cache_of_its_own_takes_no_options_of_another() -> None:
    data = PipelineConfig(
        datasets=[DatasetConfig(data_files="a.txt")], cache_dir="s3://one", cache=CacheConfig()
    )
    own = PipelineConfig(datasets=[DatasetConfig(data_files="b.txt")])
    assert complete("held", data, own).cache == data.cache
    apart = dataclasses.replace(own, cache_dir="here")
    assert complete("held", data, apart).cache is None
