"""Every option of the configs of pipelines, runs and compat has an effect that a test shows:
option_effects.py and its neighbours say which, and are held to the classes here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import compat_option_effects
import train_option_effects
from easypipe import (
    ConfigError,
    DatasetConfig,
    LoadStageConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    SaveStageConfig,
    TokenizeStageConfig,
)
from easypipe.compat.classify import ClassifyConfig
from easypipe.compat.data_pipeline import DataPipelineConfig
from easypipe.core.schema import INPUT_IDS, OutputSchema, TaskSpec
from easypipe.run import RunConfig
from easypipe.stages.config import PipelineConfig
from easypipe.stages.streamable import KNOWN
from option_effects import OPTIONS, config_classes
from pipelines import config, jsonl, texts

TESTS = Path(__file__).parent
KINDS = {"output", "files", "threads", "memory", "cost", "error"}


OF_PIPELINES = config_classes(PipelineConfig)
OF_RUNS = {name: cls for name, cls in config_classes(RunConfig).items() if name not in OF_PIPELINES}
OF_COMPAT = {
    name: cls
    for root in (DataPipelineConfig, ClassifyConfig, TaskSpec, OutputSchema)
    for name, cls in config_classes(root).items()
    if name not in OF_PIPELINES and name not in OF_RUNS
}
TABLES = {
    "option_effects.py": (OPTIONS, OF_PIPELINES),
    "train_option_effects.py": (train_option_effects.OPTIONS, OF_RUNS),
    "compat_option_effects.py": (compat_option_effects.OPTIONS, OF_COMPAT),
}
EVERY = OPTIONS | train_option_effects.OPTIONS | compat_option_effects.OPTIONS


@pytest.mark.parametrize("file", TABLES)
def test_the_table_is_of_the_classes(file: str) -> None:
    table, classes = TABLES[file]
    there = {
        (name, field.name) for name, cls in classes.items() for field in dataclasses.fields(cls)
    }
    named = {(cls, option) for cls, options in table.items() for option in options}
    missing, gone = (
        sorted(".".join(pair) for pair in pairs) for pairs in (there - named, named - there)
    )
    assert not missing, (
        f"without an effect and a test of it: give each a line in tests/{file}: {missing}"
    )
    assert not gone, f"tests/{file} names options that are gone: {gone}"


@pytest.mark.parametrize(
    ("cls", "option"), [(cls, option) for cls, options in EVERY.items() for option in options]
)
def test_every_option_has_an_effect_and_a_test_of_it(cls: str, option: str) -> None:
    entry = EVERY[cls][option]
    assert set(entry.effect.split("+")) <= KINDS
    file, _, function = entry.test.partition("::")
    assert (TESTS / file).is_file(), f"{cls}.{option}: no file {file}"
    source = (TESTS / file).read_text(encoding="utf-8")
    assert function in functions_of(source), f"{cls}.{option}: {file} has no test {function!r}"
    assert re.search(rf"\b{option}\b", source), f"{cls}.{option}: {file} never names it"
    assert entry.cached
    assert entry.streaming


def test_what_streaming_refuses_is_what_the_table_says() -> None:
    for stage, known in KNOWN.items():
        cls = f"{stage.capitalize()}StageConfig"
        refused = {
            option
            for option, entry in OPTIONS[cls].items()
            if entry.streaming.startswith("refused")
        }
        assert refused == set(OPTIONS[cls]) - known, cls


@functools.cache
def functions_of(source: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


# effects that no other test looks at on their own


def test_cache_dir_is_where_everything_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EASYPIPE_CACHE", str(tmp_path / "elsewhere"))
    pipeline = (
        Pipeline(config(tmp_path, cache_dir=tmp_path / "own"))
        .source()
        .tokenize()
        .mix(MixStageConfig(stop_strategy="all_exhausted"))
    )
    loader = pipeline.pack(PackStageConfig(seq_length=32)).load().build()
    assert len(list(loader)) == len(loader)  # which looks at the whole plan
    kept = {path.name for path in (tmp_path / "own").iterdir()}
    assert {"manifests", "ranges", "tokens", "indexes", "plans"} <= kept
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "cache").exists()


def test_stages_take_the_config_of_the_pipeline(tmp_path: Path) -> None:
    values = config(
        tmp_path,
        tokenize=TokenizeStageConfig(max_length=5),
        mix=MixStageConfig(weights={"code": 3, "docs": 1}, stop_strategy="all_exhausted"),
        pack=PackStageConfig(seq_length=17),
        save=SaveStageConfig(output_dir=tmp_path / "out"),
        load=LoadStageConfig(batch_size=3),
    )
    pipeline = Pipeline(values).source().tokenize()
    assert max(pipeline.get_data()["code"].materialize().lengths(range(60))) == 5  # type: ignore[attr-defined, arg-type]
    assert pipeline.mix().get_data()["mixed"].mixture.spec.weights == (3, 1)  # type: ignore[attr-defined]
    batch = next(iter(pipeline.pack().save().load().build()))
    assert batch[INPUT_IDS].shape == (3, 17)
    assert (tmp_path / "out" / "_easypipe.json").is_file()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_num_workers_is_how_many_ranges_are_in_work(tmp_path: Path, num_workers: int) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def watched(row: dict[str, Any]) -> dict[str, Any]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return {}

    for i in range(6):
        jsonl(tmp_path / "data" / f"{i}.jsonl", [{"text": text} for text in texts(3, i + 1)])
    dataset = DatasetConfig(data_files=str(tmp_path / "data" / "*.jsonl"), format_callback=watched)
    Pipeline(config(tmp_path, datasets=[dataset])).source().tokenize(
        TokenizeStageConfig(num_workers=num_workers)
    ).ledger()
    assert most == num_workers


def loader_of(tmp_path: Path, **options: Any) -> Any:
    pipeline = Pipeline(
        config(
            tmp_path,
            datasets=[DatasetConfig(name="d", data_files=[{"text": text} for text in texts(60)])],
        )
    )
    return (
        pipeline.source()
        .tokenize()
        .pack(PackStageConfig(seq_length=16))
        .load(LoadStageConfig(batch_size=1, **options))
        .build()
    )


@pytest.mark.parametrize("prefetch_workers", [1, 3])
def test_prefetch_workers_are_threads(tmp_path: Path, prefetch_workers: int) -> None:
    loader = loader_of(
        tmp_path, prefetch_workers=prefetch_workers, prefetch_buffer_size=prefetch_workers
    )
    before = set(threading.enumerate())
    batches = iter(loader)
    next(batches)
    assert len(set(threading.enumerate()) - before) == prefetch_workers
    batches.close()


@pytest.mark.parametrize("prefetch_buffer_size", [1, 4])
def test_prefetch_buffer_size_bounds_what_is_made_ahead(
    tmp_path: Path, prefetch_buffer_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(tmp_path, prefetch_buffer_size=prefetch_buffer_size)
    made: list[int] = []
    kind, fetch = type(loader), type(loader)._make
    monkeypatch.setattr(
        kind, "_make", lambda self, *args, **rest: made.append(1) or fetch(self, *args, **rest)
    )
    batches = iter(loader)
    next(batches)
    deadline = time.monotonic() + 10
    while len(made) < 1 + prefetch_buffer_size and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(made) == 1 + prefetch_buffer_size
    batches.close()


def test_num_packers_fills_rows_better(tmp_path: Path) -> None:
    datasets = [DatasetConfig(name="d", data_files=[{"text": text} for text in texts(300)])]

    def rows(num_packers: int) -> int:
        packed = Pipeline(config(tmp_path, datasets=datasets)).source().tokenize()
        packed.pack(
            PackStageConfig(
                seq_length=160, strategy="pool", num_packers=num_packers, oversize="truncate"
            )
        )
        packed.prepare()
        return sum(shard.num_rows or 0 for shard in packed.get_data()["d"].shards)

    assert rows(16) < rows(1)


def test_stop_strategy_decides_when_a_mixture_ends(tmp_path: Path) -> None:
    def mixed(stop_strategy: Any) -> Any:
        return (
            Pipeline(config(tmp_path))
            .source()
            .tokenize()
            .mix(MixStageConfig(stop_strategy=stop_strategy))
            .get_data()["mixed"]
        )

    assert mixed("all_exhausted").prepare().shards[0].num_rows == 60 + 90
    assert mixed("first_exhausted").prepare().shards[0].num_rows in (120, 121)
    assert mixed("restart").mixture.endless


def test_include_segment_ids_false_leaves_the_column_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def batches(**options: Any) -> list[dict[str, Any]]:
        pipeline = Pipeline(
            config(
                tmp_path,
                datasets=[
                    DatasetConfig(name="d", data_files=[{"text": text} for text in texts(60)])
                ],
            )
        )
        pipeline.source().tokenize().pack(PackStageConfig(seq_length=64, **options))
        return list(
            pipeline.load(
                LoadStageConfig(batch_size=2, mesh={"data": -1}, prefetch_enabled=False)
            ).build()
        )

    whole, without = batches(), batches(include_segment_ids=False)
    assert "documents in one row see each other" in caplog.text
    for one, other in zip(whole, without, strict=True):
        assert set(one) - set(other) == {"segment_ids"}
        assert all((one[name] == other[name]).all() for name in other)


def test_shuffle_buffer_factor_permutes_within_blocks_of_batches(tmp_path: Path) -> None:
    def rows(load: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
        pipeline = Pipeline(
            config(
                tmp_path,
                datasets=[
                    DatasetConfig(name="d", data_files=[{"text": text} for text in texts(200)])
                ],
            )
        )
        pipeline.source().tokenize().pack(PackStageConfig(seq_length=64, **options))
        loader = pipeline.load(LoadStageConfig(batch_size=2, **(load or {}))).build()
        return [row for batch in loader for row in batch[INPUT_IDS].tolist()]

    plain, shuffled = rows(), rows(shuffle_buffer_factor=3)
    assert plain != shuffled
    for first in range(0, len(plain) - 6, 6):
        assert sorted(plain[first : first + 6]) == sorted(shuffled[first : first + 6])
    assert rows({"shuffle_buffer_size": 6}) == shuffled
    assert rows({"shuffle_buffer_size": 8}, shuffle_buffer_factor=3) == rows(
        {"shuffle_buffer_size": 8}
    )
    for wrong, message in (
        ({"shuffle_packed": False}, "has no effect without shuffle_packed"),
        ({}, "0 batches hold nothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            PackStageConfig(shuffle_buffer_factor=3 if wrong else 0, **wrong)


def test_shuffle_packed_moves_rows_and_changes_none(tmp_path: Path) -> None:
    def rows(shuffle_packed: bool) -> list[list[int]]:
        pipeline = Pipeline(
            config(
                tmp_path,
                datasets=[
                    DatasetConfig(name="d", data_files=[{"text": text} for text in texts(100)])
                ],
            )
        )
        pipeline.source().tokenize().pack(
            PackStageConfig(seq_length=64, strategy="first_fit", shuffle_packed=shuffle_packed)
        )
        pipeline.prepare()
        source = pipeline.get_data()["d"]
        return source.read(0, 0, source.shards[0].num_rows).column(INPUT_IDS).to_pylist()

    moved, unmoved = rows(True), rows(False)
    assert moved != unmoved
    assert sorted(moved) == sorted(unmoved)
