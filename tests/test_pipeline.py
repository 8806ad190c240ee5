"""The chain: its order, what it shows, what it refuses, and that batches do not depend on how it
was spelled.
"""

from __future__ import annotations

import gc
import itertools
import logging
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import yaml

import laws
from easypipe import (
    BaseStage,
    ConfigError,
    DatasetConfig,
    Extract,
    LoadStageConfig,
    MissingFileError,
    MixStageConfig,
    OrderConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    SourceError,
    StageOrderError,
    StateError,
    TokenizerConfig,
    TokenizerError,
    TokenizeStageConfig,
    create_pipeline,
    load_saved,
    tokenize_and_save,
)
from easypipe.core import storage
from easypipe.core.config import from_dict, to_dict
from easypipe.core.protocols import PipelineContext, ProgressEvent, ShardedDataSource
from easypipe.core.schema import INPUT_IDS
from easypipe.jobs import prepare_data
from easypipe.save.saved import SavedSource
from easypipe.save.verify import verify
from easypipe.transforms.columns.functions import Map
from pipelines import config, jsonl, texts, tokenizer, two_datasets

MIX = MixStageConfig(weights={"code": 0.7, "docs": 0.3}, stop_strategy="all_exhausted")
PACK = PackStageConfig(seq_length=48)

WRITTEN = {"manifests", "indexes", "plans"}  # folders of a cache that prepare writes to


def whole(folder: Path, **options: object) -> PipelineConfig:
    values = {"mix": MIX, "pack": PACK, "load": LoadStageConfig(batch_size=4)} | options
    return config(folder, **values)


def batches(pipeline: Pipeline) -> list:
    return list(pipeline.source().tokenize().mix().pack().load().build())


# the chain


def test_stages_by_statement_and_by_chain(tmp_path: Path) -> None:
    chained = Pipeline.from_config(whole(tmp_path)).source().tokenize().mix().pack().load()
    stated = Pipeline.from_config(whole(tmp_path))
    assert stated.get_data() == {}
    stated.source()
    assert sorted(stated.get_data()) == ["code", "docs"]
    stated.tokenize()
    stated.mix()
    stated.pack()
    stated.load()
    assert (
        stated.get_stages() == chained.get_stages() == ["source", "tokenize", "mix", "pack", "load"]
    )
    assert laws.assert_same_batches(chained.build(), stated.build()) > 5


def test_configs_from_python_dicts_and_yaml_are_the_same(tmp_path: Path) -> None:
    python = whole(tmp_path)
    as_dict = to_dict(python)
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(as_dict))
    expected = batches(Pipeline.from_config(python))
    for other in (as_dict, path, str(path)):
        laws.assert_same_batches(expected, batches(Pipeline.from_config(other)))


def test_a_stage_takes_its_own_config_in_place_of_the_pipelines(tmp_path: Path) -> None:
    pipeline = (
        Pipeline(whole(tmp_path))
        .source()
        .tokenize()
        .mix()
        .pack({"seq_length": 32})
        .load({"batch_size": 2})
    )
    assert next(iter(pipeline.build()))[INPUT_IDS].shape == (2, 32)


def test_copies_go_their_own_ways(tmp_path: Path) -> None:
    first = Pipeline(whole(tmp_path)).source().tokenize()
    second = first.copy().mix().pack()
    assert first.get_stages() == ["source", "tokenize"]
    assert second.get_stages() == ["source", "tokenize", "mix", "pack"]


def test_before_source(tmp_path: Path) -> None:
    for stage in ("tokenize", "mix", "pack", "save", "load", "build", "ledger"):
        with pytest.raises(RuntimeError) as caught:
            getattr(Pipeline(whole(tmp_path)), stage)()
        assert str(caught.value) == "Call source() before other pipeline stages"
    with pytest.raises(StageOrderError, match=r"source\(\) was called already"):
        Pipeline(whole(tmp_path)).source().source()


def test_after_load(tmp_path: Path) -> None:
    loaded = Pipeline(whole(tmp_path)).source().tokenize().mix().pack().load()
    with pytest.raises(
        StageOrderError, match=r"save\(\) cannot follow load\(\). load\(\) ends the chain"
    ):
        loaded.save({"output_dir": str(tmp_path / "out")})


def test_nothing_to_build(tmp_path: Path) -> None:
    with pytest.raises(
        StageOrderError,
        match=r"there is nothing to build. Call load\(\) for batches or save\(\) for files before "
        r"build\(\)",
    ):
        Pipeline(whole(tmp_path)).source().tokenize().build()


def test_several_unmixed_datasets(tmp_path: Path) -> None:
    pipeline = Pipeline(whole(tmp_path)).source().tokenize().pack().load()
    with pytest.raises(StageOrderError) as caught:
        pipeline.build()
    assert (
        str(caught.value)
        == "build() cannot load 2 unmixed datasets: 'code', 'docs'. Call mix() first."
    )
    assert len(batches(Pipeline(whole(tmp_path)))) > 5


def test_text_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        StageOrderError,
        match=r"Call tokenize\(\) before load\(\): dataset 'code' has no column 'input_ids'",
    ):
        Pipeline(whole(tmp_path)).source().load()


def test_save_in_the_chain_writes_when_it_is_built_and_the_loader_follows(tmp_path: Path) -> None:
    save = SaveStageConfig(output_dir=tmp_path / "out", num_shards=2)
    pipeline = Pipeline(whole(tmp_path, save=save)).source().tokenize().mix().pack().save().load()
    assert not (tmp_path / "out").exists()
    straight = list(pipeline.build())
    stored = PipelineConfig(
        datasets=[DatasetConfig(data_files=tmp_path / "out")],
        seed=0,
        load=LoadStageConfig(batch_size=4),
    )
    laws.assert_same_batches(straight, Pipeline(stored).source().tokenize().load().build())


def test_tokenize_on_tokens_says_that_it_does_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenize_and_save(
        [{"text": "one"}, {"text": "two"}],
        tokenizer(),
        tmp_path / "out",
        cache_dir=tmp_path / "cache",
    )
    with caplog.at_level(logging.INFO, "easypipe"):
        Pipeline(
            PipelineConfig(datasets=[DatasetConfig(data_files=tmp_path / "out")], seed=1)
        ).source().tokenize()
    assert "holds input_ids already, tokenize() leaves it as it is" in caplog.text


def test_a_save_that_is_never_built_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = (
        Pipeline(whole(tmp_path))
        .source()
        .tokenize()
        .save(SaveStageConfig(output_dir=tmp_path / "out"))
    )
    with caplog.at_level(logging.WARNING, "easypipe"):
        del pipeline
        gc.collect()
    assert (
        "save() was called on code, docs, but build() never was: nothing was written" in caplog.text
    )


def test_a_save_that_is_never_built_is_said_at_exit(tmp_path: Path) -> None:
    script = (
        "from easypipe import *\n"
        f"p = Pipeline(PipelineConfig(datasets=[DatasetConfig(data_files=[{{'text': 'a'}}])], "
        "seed=1))\n"
        f"p.source().save(SaveStageConfig(output_dir={str(tmp_path / 'out')!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "save() was called on dataset1, but build() never was" in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", script + "p.build()\n"], capture_output=True, text=True, check=True
    )
    assert "never was" not in done.stderr


class Shouting:
    """Rows with the text in capitals."""

    def __init__(self, source: ShardedDataSource) -> None:
        self.source = source
        self.schema, self.shards, self.fingerprint = (
            source.schema,
            source.shards,
            f"shouting {source.fingerprint}",
        )

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        batch = self.source.read(shard, start, stop)
        i = batch.schema.get_field_index("text")
        return batch.set_column(i, "text", pa.compute.utf8_upper(batch.column(i)))


class Shout(BaseStage):
    @property
    def name(self) -> str:
        return "shout"

    def process(
        self, data: dict[str, ShardedDataSource], context: PipelineContext
    ) -> dict[str, ShardedDataSource]:
        return {name: Shouting(source) for name, source in data.items()}


def test_a_stage_of_ones_own(tmp_path: Path) -> None:
    datasets = [DatasetConfig(name="x", data_files=[{"text": text} for text in texts(20)])]
    plain = (
        Pipeline(config(tmp_path, datasets=datasets, pack=PACK))
        .source()
        .tokenize()
        .pack()
        .get_data()["x"]
    )
    pipeline = (
        Pipeline(config(tmp_path, datasets=datasets, pack=PACK))
        .source()
        .add_stage(Shout())
        .tokenize()
        .pack()
    )
    assert pipeline.get_stages() == ["source", "shout", "tokenize", "pack"]
    loud = pipeline.get_data()["x"]
    laws.assert_stateless_reads(loud)
    assert not loud.read(0, 0, 1).equals(plain.read(0, 0, 1))
    with pytest.raises(ConfigError, match=r"is not a BaseStage. Subclass"):
        pipeline.add_stage(Shout)


class Unshown:
    def __repr__(self) -> str:
        raise AssertionError("written out, and nothing is refused")


class UnshownRows(Unshown):
    version = "1"

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> dict[str, str]:
        return [{"text": "a"}][number]


class UnshownStage(Unshown, Shout):
    def process(
        self, data: dict[str, ShardedDataSource], context: PipelineContext
    ) -> dict[str, ShardedDataSource]:
        return {"x": UnshownRows()}  # type: ignore[dict-item]


class UnshownFunction(Unshown):
    def __call__(self, row: dict[str, str]) -> dict[str, str]:
        return row


def test_what_is_a_users_is_written_out_only_where_it_is_refused(tmp_path: Path) -> None:
    """Rows may be millions, and an object of a user's own may show what it likes."""
    chain = Pipeline(config(tmp_path, datasets=())).add_stage(UnshownStage())
    assert chain.get_data()["x"].read(0, 0, 1)["text"].to_pylist() == ["a"]
    assert Map(UnshownFunction(), version="1") is not None


# the config


def test_validate_and_from_config_say_the_same(tmp_path: Path) -> None:
    code, docs = two_datasets(tmp_path)
    wrong = PipelineConfig(
        datasets=[code, docs, code],
        mix=MixStageConfig(weights={"cod": 1.0, "docs": 1.0}),
        save=SaveStageConfig(),
    )
    problems = wrong.validate()
    assert problems == [
        "datasets[2].name: 'code' names an earlier dataset too. Give each its own name.",
        "mix.weights.cod: no dataset named 'cod' (have: code, code, docs). Did you mean 'code'?",
        "save.output_dir: no folder for dataset 'code'. Set it, or the dataset's save_path.",
    ]
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config(wrong)
    assert [str(caught.value), *caught.value.__notes__] == problems
    assert PipelineConfig(datasets=[]).validate() == [
        "datasets: there is none. Give at least one dataset."
    ]
    assert whole(tmp_path).validate() == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"datasets": [{"data_files": "x", "content_filed": "t"}]},
            "datasets[0].content_filed: unknown key (have: data_files",
        ),
        ({"datasets": [{"data_files": "x"}], "streeming": True}, "streeming: unknown key"),
        (
            {"datasets": [{"data_files": "x", "type": "hugginface"}]},
            "datasets[0].type: 'hugginface' is not an option",
        ),
        (
            {"datasets": [{"data_files": []}]},
            "datasets[0].data_files: an empty list. Give at least one path or row.",
        ),
        ({"datasets": [{"data_files": 5}]}, "datasets[0].data_files: 5 is neither a path nor rows"),
        (
            {"datasets": [{"data_files": [{"text": "a"}, 5]}]},
            "datasets[0].data_files[1]: 5 is not a row, as others are",
        ),
        (
            {"datasets": [{"data_files": "x", "num_rows": 0}]},
            "datasets[0].num_rows: 0 rows are too few",
        ),
        (
            {"datasets": [{"data_files": "x", "max_bad_rows": 3}]},
            "datasets[0].max_bad_rows: has no effect while on_error is 'error'",
        ),
        (
            {"datasets": [{"data_files": "x", "name": "a/b"}]},
            "datasets[0].name: 'a/b' cannot name a dataset",
        ),
        (
            {"datasets": [{"data_files": "x"}], "pack": {"seq_length": 0}},
            "pack.seq_length: 0 is not a row length",
        ),
        (
            {"datasets": [{"data_files": "x"}], "pack": {"seq_lenght": 8}},
            "pack.seq_lenght: unknown key",
        ),
        (
            {"datasets": [{"data_files": "x"}], "order": {"shuffle": False, "block_rows": 2}},
            "order.block_rows: has no effect without shuffle",
        ),
        (
            {"datasets": [{"data_files": "x"}], "seed": -1},
            "seed: -1 is outside [0, 2^63). Give 0 or more.",
        ),
        ({}, "datasets: required, but not given"),
    ],
)
def test_configs_that_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config(values)
    assert str(caught.value).startswith(message)


def test_an_unseeded_pipeline_draws_a_seed_and_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "easypipe"):
        pipeline = Pipeline(whole(tmp_path, seed=None))
    seed = pipeline.get_context().seed
    assert f"seed: not given, drew {seed}; set seed={seed} to repeat this run" in caplog.text
    assert pipeline.get_context().config.seed == seed
    laws.assert_same_batches(batches(pipeline), batches(Pipeline(whole(tmp_path, seed=seed))))


def test_the_context(tmp_path: Path) -> None:
    context = Pipeline(whole(tmp_path)).get_context()
    assert context.seed == 7
    assert context.config.datasets[0].name == "code"
    assert context.cache_dir == tmp_path / "cache"
    unnamed = PipelineConfig(
        datasets=[
            DatasetConfig(data_files=[{"text": "a"}]),
            DatasetConfig(data_files=[{"text": "b"}]),
        ],
        seed=1,
    )
    assert sorted(Pipeline(unnamed).source().get_data()) == ["dataset1", "dataset2"]


def test_order_without_shuffle_is_the_order_of_the_files(tmp_path: Path) -> None:
    datasets = [DatasetConfig(name="x", data_files=[{"text": text} for text in texts(12)])]
    values = {
        "datasets": datasets,
        "order": OrderConfig(shuffle=False),
        "load": LoadStageConfig(batch_size=1),
    }
    loader = Pipeline(config(tmp_path, **values)).source().tokenize().load().build()
    from easypipe import load_tokenizer

    known = load_tokenizer(tokenizer())
    assert [known.decode(batch[INPUT_IDS][0]) for batch in loader] == texts(12)


def test_num_rows_limits_the_dataset(tmp_path: Path) -> None:
    dataset = DatasetConfig(name="x", data_files=[{"text": text} for text in texts(12)], num_rows=5)
    pipeline = Pipeline(config(tmp_path, datasets=[dataset])).source().tokenize()
    assert pipeline.ledger().find("tokenize", "x", "rows").out == {"written": 5}


def test_a_wrong_column_names_the_files_of_its_dataset(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"txt": "a"}])
    for files, note in ((path, [f"dataset 'x' reads {path}"]), ([{"txt": "a"}], [])):
        with pytest.raises(SourceError) as caught:
            prepare_data(config(tmp_path, datasets=[DatasetConfig(name="x", data_files=files)]))
        assert [one for one in getattr(caught.value, "__notes__", ()) if " reads " in one] == note


def test_fewer_rows_than_num_rows_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts(12)])
    for asked, told in ((12, False), (13, True)):
        dataset = DatasetConfig(name="x", data_files=path, num_rows=asked)
        prepare_data(config(tmp_path, datasets=[dataset]))
        words = "data: dataset x: num_rows asks for 13 rows, and it has 12: all are read"
        assert ("num_rows asks for" in caplog.text, words in caplog.text) == (told, told)


def test_tokenizers_go_by_dataset_then_stage_then_pipeline(tmp_path: Path) -> None:
    datasets = [
        DatasetConfig(
            name="own",
            data_files=[{"text": "a"}],
            tokenizer=TokenizerConfig(name_or_path=tokenizer(280)),
        ),
        DatasetConfig(name="other", data_files=[{"text": "b"}]),
    ]
    pipeline = Pipeline(config(tmp_path, datasets=datasets)).source()
    staged = (
        pipeline.copy().tokenize(TokenizeStageConfig(default_tokenizer=tokenizer(300))).get_data()
    )
    assert {name: source.tokenizer.vocab_size for name, source in staged.items()} == {
        "own": 280,
        "other": 300,
    }
    plain = pipeline.tokenize().get_data()
    assert {name: source.tokenizer.vocab_size for name, source in plain.items()} == {
        "own": 280,
        "other": 320,
    }


# loading


def test_batches_resume_exactly_at_every_one(tmp_path: Path) -> None:
    def make() -> object:
        return Pipeline(whole(tmp_path)).source().tokenize().mix().pack().load().build()

    total = len(make())
    laws.assert_exact_resume(make, total, stops=range(0, total + 1, 3), hops=(2,))


@pytest.mark.parametrize(
    "mix", [MIX, MixStageConfig(stop_strategy="first_exhausted"), MixStageConfig()]
)
def test_several_epochs_and_endless_data(tmp_path: Path, mix: MixStageConfig) -> None:
    def make() -> object:
        load = LoadStageConfig(batch_size=4, num_epochs=None)
        return (
            Pipeline(whole(tmp_path, mix=mix, load=load))
            .source()
            .tokenize()
            .mix()
            .pack()
            .load()
            .build()
        )

    with pytest.raises(TypeError, match=r"no len\(\)"):
        len(make())
    laws.assert_exact_resume(make, 40, stops=(0, 1, 39))


@pytest.mark.parametrize(
    ("count", "options", "why"),
    [
        (1, {}, None),
        (1, {"load": {"num_epochs": None}}, "load.num_epochs: null"),
        (1, {"mix": {}}, "mix.stop_strategy: restart"),
        (1, {"mix": {"max_epochs": {"dataset1": 2}}, "load": {"num_epochs": None}}, None),
        (2, {}, "mix.stop_strategy: restart"),
        (2, {"mix": {"stop_strategy": "first_exhausted"}}, None),
        (2, {"mix": {"max_epochs": {"dataset1": 2}}}, "mix.stop_strategy: restart"),
        (2, {"mix": {"max_epochs": {"dataset1": 2, "dataset2": 2}}}, None),
    ],
)
def test_why_batches_never_end(count: int, options: dict[str, object], why: str | None) -> None:
    datasets = [{"data_files": f"{i}.txt"} for i in range(count)]
    assert from_dict(PipelineConfig, {"datasets": datasets, **options}).endless == why


def test_a_batch_that_never_fills(tmp_path: Path) -> None:
    def make(**options: object) -> object:
        return (
            Pipeline(whole(tmp_path))
            .source()
            .tokenize()
            .mix()
            .pack()
            .load(LoadStageConfig(**options))
            .build()
        )

    with pytest.raises(
        ConfigError,
        match=r"load.batch_size: 1000, but 'mixed' has \d+ rows: no batch is ever full. Give at "
        r"most",
    ) as caught:
        make(batch_size=1000)
    rows = int(str(caught.value).rpartition("Give at most ")[2].split(",")[0])
    assert len(make(batch_size=rows)) == 1
    assert len(list(make(batch_size=1000, drop_last=False))) == 1


def test_epochs_of_a_mixture_that_has_none(tmp_path: Path) -> None:
    def make(num_epochs: int | None) -> object:
        load = LoadStageConfig(batch_size=4, num_epochs=num_epochs)
        return (
            Pipeline(whole(tmp_path, mix=MixStageConfig()))
            .source()
            .tokenize()
            .mix()
            .pack()
            .load(load)
            .build()
        )

    said = "never ends: its stop_strategy is 'restart'. Leave it out"
    with pytest.raises(ConfigError, match=rf"load.num_epochs: 3, but 'mixed' {said}"):
        make(3)
    load = LoadStageConfig(batch_size=4, num_epochs=3)  # a config is refused before it is read
    for mix in (MixStageConfig(), None):
        [problem] = whole(tmp_path, mix=mix, load=load).validate()
        assert problem.startswith(f"load.num_epochs: 3, but the mixture {said}")
    capped = MixStageConfig(max_epochs={"code": 2})
    assert "never ends" in whole(tmp_path, mix=capped, load=load).validate()[0]
    capped = MixStageConfig(max_epochs={"code": 2, "docs": 1})
    assert "is drawn once" in whole(tmp_path, mix=capped, load=load).validate()[0]
    for num_epochs in (1, None):
        once = LoadStageConfig(batch_size=4, num_epochs=num_epochs)
        assert not whole(tmp_path, mix=MixStageConfig(), load=once).validate()
        assert len(list(itertools.islice(iter(make(num_epochs)), 30))) == 30


def test_a_state_of_other_data_says_what_changed(tmp_path: Path) -> None:
    def make(**options: object) -> object:
        return Pipeline(whole(tmp_path, **options)).source().tokenize().mix().pack().load().build()

    loader = make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state()
    iterator.close()
    make().restore(state)
    for options, component in (
        ({"seed": 8}, "plan"),
        ({"pack": PackStageConfig(seq_length=64)}, "plan"),
        ({"default_tokenizer": tokenizer(300)}, "tokenizer"),
        ({"datasets": two_datasets(tmp_path / "more", code=61)}, "sources"),
    ):
        with pytest.raises(StateError, match=component):
            make(**options).restore(state)


def test_documents_are_loaded_unpacked_as_their_tokenizer_pads_them(tmp_path: Path) -> None:
    rows = [{"text": text} for text in texts(12)]

    def first(**options: object) -> dict:
        dataset = DatasetConfig(
            name="x",
            data_files=rows,
            tokenizer=TokenizerConfig(name_or_path=tokenizer(), **options),
        )
        return next(
            iter(
                Pipeline(config(tmp_path, datasets=[dataset]))
                .source()
                .tokenize()
                .load({"batch_size": 4})
                .build()
            )
        )

    lengths = (first()["segment_ids"] > 0).sum(axis=1)
    assert first()[INPUT_IDS].shape == (4, lengths.max())
    assert first(padding="max_length", max_length=200)[INPUT_IDS].shape == (4, 200)
    assert (first(return_attention_mask=True)["attention_mask"].sum(axis=1) == lengths).all()


def test_progress_tells_how_far_the_work_is(tmp_path: Path) -> None:
    seen: list[ProgressEvent] = []
    save = SaveStageConfig(output_dir=tmp_path / "out")
    Pipeline(
        whole(tmp_path, save=save), progress=seen.append
    ).source().tokenize().mix().pack().save().build()
    last = {(event.stage, event.dataset): (event.done, event.total) for event in seen}
    assert last["tokenize", "code"] == (60, 60)
    assert last["tokenize", "docs"] == (90, 90)
    done, total = last["save", "mixed"]
    assert done == total > 10


@pytest.mark.parametrize("workers", [1, None])
def test_small_datasets_are_prepared_together(tmp_path: Path, workers: int | None) -> None:
    """A listener hears one event at a time all the same."""
    names = "abcdefgh"
    for name in names:
        jsonl(tmp_path / f"{name}.jsonl", [{"text": f"some words of {name}"}])
    threads, hearing = list[str](), threading.Lock()

    def hear(event: ProgressEvent) -> None:
        assert hearing.acquire(blocking=False)
        time.sleep(0.01)
        threads.append(threading.current_thread().name)
        hearing.release()

    made = PipelineConfig(
        datasets=[
            DatasetConfig(name=name, data_files=tmp_path / f"{name}.jsonl") for name in names
        ],
        default_tokenizer=tokenizer(),
        cache_dir=tmp_path / "cache",
        tokenize=TokenizeStageConfig(num_workers=workers),
    )
    Pipeline(made, progress=hear).source().tokenize().prepare()
    assert len(threads) == len([*(tmp_path / "cache" / "manifests").iterdir()]) == len(names)
    assert ({*threads} == {"MainThread"}) == (workers == 1)
    assert (len({*threads}) > 1) == (workers is None)


def test_what_a_killed_process_left_goes_although_another_one_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SWEPT_SELDOM", 0)  # a slow first sweep puts the second one off
    made = whole(tmp_path)

    def prepare() -> None:
        Pipeline(made).source().tokenize().mix().pack().prepare()

    prepare()
    killed = subprocess.Popen(["true"])
    killed.wait()
    owner = storage.owner().rpartition("_")[0]
    folders = [path for path in (tmp_path / "cache").iterdir() if path.name in WRITTEN]
    assert len(folders) == len(WRITTEN)
    left = [folder / f".tmp-{owner}_{killed.pid}-0123abcd-x.json" for folder in folders]
    for path in left:
        path.write_bytes(b"half")
    prepare()
    assert [path for path in left if path.exists()] == []


def test_of_small_datasets_the_first_bad_one_is_told(tmp_path: Path) -> None:
    for i in range(9):
        jsonl(tmp_path / f"{i}.jsonl", [{"text": None if i in (3, 6) else "some words"}])
    datasets = [DatasetConfig(name=f"d{i}", data_files=tmp_path / f"{i}.jsonl") for i in range(9)]
    chain = Pipeline(
        PipelineConfig(datasets=datasets, default_tokenizer=tokenizer(), cache_dir=tmp_path / "c")
    )
    with pytest.raises(SourceError, match=r"3\.jsonl"):
        chain.source().tokenize().prepare()


# files that are not there, or not what they seem


def test_missing_files_are_never_taken_for_names_on_the_hub(tmp_path: Path) -> None:
    for missing in ("data.jsonl", "nothing/*.parquet", "organisation/dataset"):
        with pytest.raises(MissingFileError, match=missing.replace("*", r"\*")):
            Pipeline(
                config(tmp_path, datasets=[DatasetConfig(data_files=str(tmp_path / missing))])
            ).source()
    with pytest.raises(TokenizerError):
        Pipeline(
            config(tmp_path, default_tokenizer=str(tmp_path / "no-tokenizer"))
        ).source().tokenize()


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"datasets\[0\].tokenizer: dataset 'code' has no tokenizer"
    ):
        Pipeline(config(tmp_path, default_tokenizer=None)).source().tokenize()


def test_a_missing_content_field_names_the_columns(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "x.jsonl", [{"txt": "a", "other": 1}])
    with pytest.raises(SourceError, match=r"'text': no such column \(have: .*txt.*\)"):
        Pipeline(config(tmp_path, datasets=[DatasetConfig(data_files=rows)])).source().tokenize()


def test_a_nested_content_field_says_how_it_is_taken_out(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "x.jsonl", [{"meta": {"a": "nested text"}}])
    nested = DatasetConfig(data_files=rows, content_field="meta.a")
    with pytest.raises(
        SourceError,
        match=r'pipeline\.transform\(Extract\(\{"text": "meta\.a"\}\)\), and set content_field to '
        r'"text"',
    ):
        Pipeline(config(tmp_path, datasets=[nested])).source().tokenize()
    advised = Pipeline(
        config(tmp_path, datasets=[DatasetConfig(data_files=rows, content_field="text")])
    )
    (source,) = (
        advised.source().transform(Extract({"text": "meta.a"})).tokenize().get_data().values()
    )
    assert [shard.num_rows for shard in source.shards] == [1]


@pytest.mark.parametrize("on_error", ["skip", "quarantine"])
def test_bad_rows_are_counted_and_set_aside(tmp_path: Path, on_error: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"text": "good"}\n{"text": null}\n\n{"text": ""}\nbroken\n{"text": "better"}\n'
    )
    pipeline = Pipeline(
        config(
            tmp_path,
            datasets=[DatasetConfig(name="x", data_files=path, on_error=on_error)],
            pack=PACK,
        )
    )
    ledger = pipeline.source().tokenize().pack().ledger()
    laws.assert_conserved(ledger)
    assert ledger.find("tokenize", "x", "rows").out == {
        "written": 2,
        "blank_line": 1,
        "empty": 1,
        "null": 1,
        "unparsable": 1,
    }
    kept = list((tmp_path / "cache").rglob("*.quarantine.jsonl"))
    assert len(kept) == (1 if on_error == "quarantine" else 0)


# the short ways


def test_create_pipeline(tmp_path: Path) -> None:
    code, docs = two_datasets(tmp_path / "data")
    pipeline = create_pipeline(
        [code, to_dict(docs)], tokenizer(), seed=7, cache_dir=tmp_path / "cache", mix=MIX, pack=PACK
    )
    laws.assert_same_batches(
        batches(Pipeline(whole(tmp_path))),
        pipeline.source().tokenize().mix().pack().load({"batch_size": 4}).build(),
    )
    assert (
        create_pipeline([code], tokenizer(), seed=7, streaming=True).get_context().config.streaming
    )
    with pytest.raises(ConfigError, match=r"streamed: unknown key .* Did you mean 'streaming'"):
        create_pipeline([code], tokenizer(), streamed=True)
    for given in ({"datasets": [docs]}, "run.yaml", code):
        with pytest.raises(
            ConfigError, match=r"datasets: wants a list of datasets, got .*from_config"
        ):
            create_pipeline(given)  # type: ignore[arg-type]


def test_tokenize_and_save_keeps_the_order_and_the_length(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts(50)])
    report = tokenize_and_save(str(path), tokenizer(), tmp_path / "out", max_length=8, num_shards=2)
    source = SavedSource(tmp_path / "out")
    from easypipe import load_tokenizer

    known = load_tokenizer(tokenizer())
    rows = [
        row[INPUT_IDS]
        for i, shard in enumerate(source.shards)
        for row in source.read(i, 0, shard.num_rows).to_pylist()
    ]
    assert rows == [known.reference_encode(text)[:8] for text in texts(50)]
    laws.assert_conserved(report.ledger)
    assert (
        tokenize_and_save(str(path), tokenizer(), tmp_path / "out", max_length=8, num_shards=2)
        .folders[0]
        .up_to_date
    )


def test_prepare_tokenizes_and_plans_and_building_finds_it_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = Pipeline(whole(tmp_path)).source().tokenize().mix().pack().load()
    assert not chain.prepared()
    assert not list((tmp_path / "cache").rglob("*.arrow")), "calling a stage moves no rows"
    chain.prepare()
    again = Pipeline(whole(tmp_path)).source().tokenize().mix().pack().load()
    assert again.prepared()
    assert list((tmp_path / "cache" / "plans").iterdir())
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}
    caplog.clear()
    assert list(again.build())
    assert {path: path.stat().st_mtime_ns for path in files} == files
    with pytest.raises(ConfigError, match=r"^streaming: streamed data is not counted"):
        Pipeline(whole(tmp_path, streaming=True)).source().tokenize().prepare()


def test_tokens_that_were_made_before_are_prepared_too(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3]}]
    Pipeline(
        config(tmp_path, datasets=[DatasetConfig(name="d", data_files=rows)])
    ).source().prepare()
    assert len(list((tmp_path / "cache" / "tokens").rglob("*.arrow"))) == 1


def test_a_config_of_nested_dicts_is_a_config() -> None:
    rows = [{"text": "one"}]
    pipeline = Pipeline({"datasets": [{"name": "a", "data_files": rows}], "seed": 1})
    assert pipeline.get_context().config.datasets[0].name == "a"
    with pytest.raises(ConfigError, match="dataset: unknown key"):
        Pipeline({"dataset": [{"name": "a", "data_files": rows}]})


def test_a_tilde_is_home_wherever_a_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is looked for, or written, in a folder of that name."""
    jsonl(tmp_path / "rows.jsonl", [{"q": text, "a": text} for text in texts(9)])
    datasets.Dataset.from_list([{"text": text} for text in texts(9)]).save_to_disk(
        tmp_path / "kept"
    )
    shutil.copytree(tokenizer(), tmp_path / "tokenizer")
    for file in ("chat.jinja", "tokenizer/chat_template.jinja"):
        (tmp_path / file).write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    prompt = {"format_type": "custom", "template": "{q}{a}", "label_column": "a"}
    prompt |= {"few_shot": {"count": 1, "data_files": "~/rows.jsonl"}}
    chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    made = {
        "datasets": [
            {"name": "asked", "data_files": "~/rows.jsonl", "prompt": prompt},
            {"name": "kept", "data_files": "~/kept"},
            {
                "name": "said",
                "data_files": chat,
                "content_field": "messages",
                "chat_template": "~/chat.jinja",
            },
            {"name": "own", "data_files": chat, "content_field": "messages"},
        ],
        "default_tokenizer": "~/tokenizer",
        "cache_dir": "~/cache",
        "seed": 1,
        "mix": {"stop_strategy": "all_exhausted"},
        "pack": {"seq_length": 48},
        "save": {"output_dir": "~/out"},
    }
    chain = Pipeline.from_config(made).source().tokenize().mix().pack().save()
    chain.build()
    assert {one.name for one in tmp_path.iterdir()} >= {"cache", "out"}
    assert load_saved("~/out").shards
    for place in ("~/cache", "~/out"):
        assert all(one.ok for one in verify(place))
        assert all(one.ok for one in chain.repair(place))
    assert not list(here.iterdir())
