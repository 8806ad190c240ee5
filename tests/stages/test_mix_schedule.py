"""Schedules, caps, token shares and provenance through the pipeline: the laws, what each option
does, and every refusal with its cure.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
from easypipe import (
    ConfigError,
    DatasetConfig,
    LoadStageConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    SaveStageConfig,
    StateError,
    WeightSchedulePoint,
    WeightScheduler,
)
from easypipe.core.schema import SEGMENT_IDS, SOURCE
from easypipe.plan.spec import MAX_WINDOW_DOCS, window_docs
from easypipe.stages.mix.config import exact_weights
from pipelines import config, texts
from strategies import examples

HALF_WAY = [
    {"step": 0, "weights": {"code": 1, "docs": 0}},
    {"step": 20, "weights": {"code": 0, "docs": 1}},
]
LOAD = LoadStageConfig(batch_size=3, prefetch_enabled=False)


def mixed(folder: Path, *, pack: int | None = None, **options: object) -> Pipeline:
    pipeline = Pipeline(config(folder)).source().tokenize().mix(options)
    return pipeline if pack is None else pipeline.pack(PackStageConfig(seq_length=pack))


def origins(pipeline: Pipeline, batches: int) -> np.ndarray:
    """The dataset of every row of the first batches: Int[batches, rows]."""
    loader = pipeline.loader()
    size = loader.batch_size
    return loader.rows.plan.pieces(np.arange(batches * size)).dataset.reshape(batches, size)


# A step is a training step.


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_weights_change_at_the_batch_of_the_step(tmp_path: Path, batch_size: int) -> None:
    points = [
        {"step": 5, "weights": {"code": 0, "docs": 1}},
        {"step": 8, "weights": {"code": 1, "docs": 0}},
    ]
    pipeline = mixed(tmp_path, weights={"code": 1, "docs": 1e-9}, weight_schedule=points)
    drawn = origins(pipeline.load(LoadStageConfig(batch_size=batch_size)), 12)
    assert [set(row) for row in drawn.tolist()] == [{0}] * 5 + [{1}] * 3 + [{0}] * 4
    grown = mixed(tmp_path, weights={"code": 1, "docs": 1e-9}, weight_schedule=points)
    loader = grown.load(
        LoadStageConfig(batch_size=batch_size, batch_size_schedule=[[2, 4], [6, 2]])
    ).loader()
    first = 2 * batch_size + 3 * 4
    rows = loader.rows.plan.pieces(np.arange(first + 4 + 2 * 2 + 9)).dataset
    assert np.flatnonzero(np.diff(rows)).tolist() == [first - 1, first + 4 + 2 * 2 - 1], (
        "steps are of the batches that grew"
    )


@pytest.mark.parametrize(
    "points", [HALF_WAY, [{**HALF_WAY[1], "step": 0}, HALF_WAY[0] | {"step": 9}]]
)
def test_windows_bear_the_longest_documents_of_a_schedule(
    tmp_path: Path, points: list[dict]
) -> None:
    datasets = [
        DatasetConfig(name="code", data_files=[{"text": "a b"}] * 3),
        DatasetConfig(name="docs", data_files=[{"text": texts(1)[0] * 999}] * 3),
    ]
    pipeline = Pipeline(config(tmp_path, datasets=datasets)).source().tokenize()
    mixture = pipeline.mix({"weight_schedule": points}).load(LOAD).get_data()["mixed"].mixture
    plan = mixture.plan(None)
    assert plan.spec.window_docs == window_docs(plan.datasets, (0, 1)) < MAX_WINDOW_DOCS
    assert window_docs(plan.datasets, (1, 0)) == MAX_WINDOW_DOCS


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_weights_go_over(tmp_path: Path, kind: str) -> None:
    pipeline = mixed(tmp_path, weight_schedule=HALF_WAY, weight_schedule_type=kind).load(
        LoadStageConfig(batch_size=50)
    )
    share = origins(pipeline, 25).mean(axis=1)
    known = WeightScheduler(HALF_WAY, kind)  # pyright: ignore[reportArgumentType]
    for step in range(25):
        assert share[step] == pytest.approx(known.get_weights(step)["docs"], abs=0.04)


def test_the_batch_size_comes_from_load_whoever_names_it(tmp_path: Path) -> None:
    """load(), the config's load and mix.batch_size give the same plan; another one gives
    another.
    """
    load = LoadStageConfig(batch_size=4)
    called = mixed(tmp_path, weight_schedule=HALF_WAY).load(load).loader()
    named = mixed(tmp_path, weight_schedule=HALF_WAY, batch_size=4).load(load).loader()
    configured = (
        Pipeline(config(tmp_path, load=load)).source().tokenize().mix({"weight_schedule": HALF_WAY})
    )
    assert (
        called.rows.plan.fingerprint
        == named.rows.plan.fingerprint
        == configured.load().loader().rows.plan.fingerprint
    )
    assert (
        configured.get_data()["mixed"].mixture.plan(None).fingerprint
        == called.rows.plan.fingerprint
    )
    other = mixed(tmp_path, weight_schedule=HALF_WAY).load(LoadStageConfig(batch_size=5)).loader()
    assert other.rows.plan.fingerprint != called.rows.plan.fingerprint
    with pytest.raises(
        ConfigError,
        match=r"mix.batch_size: 4, but load\(\) makes batches of 5 rows. Leave mix.batch_size out",
    ):
        mixed(tmp_path, weight_schedule=HALF_WAY, batch_size=4).load(LoadStageConfig(batch_size=5))
    growing = LoadStageConfig(batch_size=4, batch_size_schedule=((3, 8),))
    with pytest.raises(ConfigError, match=r"mix.batch_size: 4, but .* of 4, then 8 rows\. Leave"):
        mixed(tmp_path, weight_schedule=HALF_WAY, batch_size=4).load(growing)
    with pytest.raises(
        ConfigError,
        match=r"mix.weight_schedule: .* the number of rows in one is unknown. Set load.batch_size .* or set "
        r"mix.batch_size",
    ):
        mixed(tmp_path, weight_schedule=HALF_WAY).get_data()["mixed"].prepare()  # type: ignore[attr-defined]
    assert mixed(tmp_path, weight_schedule=HALF_WAY, batch_size=4).get_data()["mixed"].fingerprint


def test_weights_belong_to_names_whatever_their_order() -> None:
    assert exact_weights({"b": 0.75, "none": 0, "a": 0.25}, ["a", "b", "none"]) == (1, 3, 0)


# The laws, with everything on.

EVERYTHING = {
    "weight_schedule": [
        {"step": 1, "weights": {"code": 3, "docs": 1}},
        {"step": 4, "weights": {"code": 1, "docs": 9}},
        {"step": 9, "weights": {"code": 1, "docs": 0}},
    ],
    "weight_schedule_type": "cosine",
    "weights": {"code": 1, "docs": 2},
    "max_epochs": {"docs": 2, "code": 3},
}


@pytest.mark.parametrize("stop", ["restart", "first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("unit", ["rows", "tokens"])
@pytest.mark.parametrize("pack", [None, 64])
def test_exact_resume_at_every_batch(
    tmp_path: Path, stop: str, unit: str, pack: int | None
) -> None:
    load = LoadStageConfig(
        batch_size=12, prefetch_enabled=False, num_epochs=1 if stop == "restart" else None
    )
    known = mixed(tmp_path, pack=pack, stop_strategy=stop, unit=unit, **EVERYTHING).load(load)
    batches = len(known.loader())  # caps end every one of them
    laws.assert_exact_resume(
        lambda: known.copy().loader(),
        min(batches, 25),
        hops=(1, 2),
        stops=range(0, min(batches, 25), 3),
    )
    laws.assert_exact_resume(lambda: known.copy().loader(), 6)


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_reads_are_stateless_and_nothing_is_lost(tmp_path: Path, stop: str) -> None:
    options = EVERYTHING | {"stop_strategy": stop, "batch_size": 4, "provenance": True}
    laws.assert_stateless_reads(mixed(tmp_path, **options).get_data()["mixed"], cuts=(1, 5, 17))
    packed = mixed(tmp_path, pack=64, **options)
    laws.assert_stateless_reads(packed.get_data()["mixed"], cuts=(1, 5, 17))
    laws.assert_conserved(packed.ledger())


@examples(12)
@given(
    code=st.integers(1, 40),
    docs=st.integers(1, 40),
    weights=st.tuples(*[st.sampled_from([0, 1, 7, 1e-6, 1e6])] * 4).filter(
        lambda w: w[0] + w[1] > 0 and w[2] + w[3] > 0
    ),
    kind=st.sampled_from(["step", "linear", "cosine"]),
    stop=st.sampled_from(["restart", "first_exhausted", "all_exhausted"]),
    unit=st.sampled_from(["rows", "tokens"]),
    caps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_conservation(
    tmp_path_factory: pytest.TempPathFactory,
    code: int,
    docs: int,
    weights: tuple,
    kind: str,
    stop: str,
    unit: str,
    caps: tuple,
) -> None:
    datasets = [
        DatasetConfig(name="code", data_files=[{"text": text} for text in texts(code, 3)]),
        DatasetConfig(name="docs", data_files=[{"text": text} for text in texts(docs, 5)]),
    ]
    points = [
        {"step": 0, "weights": {"code": weights[0], "docs": weights[1]}},
        {"step": 6, "weights": {"code": weights[2], "docs": weights[3]}},
    ]
    pipeline = (
        Pipeline(config(tmp_path_factory.mktemp("conservation"), datasets=datasets))
        .source()
        .tokenize()
    )
    options = {
        "weight_schedule": points,
        "weight_schedule_type": kind,
        "stop_strategy": stop,
        "unit": unit,
        "batch_size": 2,
    }
    pipeline.mix(options | {"max_epochs": dict(zip(("code", "docs"), caps, strict=True))}).pack(
        PackStageConfig(seq_length=32)
    )
    books = pipeline.ledger()
    laws.assert_conserved(books)
    if stop != "first_exhausted":
        passes = caps if stop == "restart" else (1, 1)
        assert [books.facts[f"mix.{name}.epochs"] for name in ("code", "docs")] == list(passes)


def test_a_state_from_before_windows_ended_by_estimate_is_refused_by_name(tmp_path: Path) -> None:
    pipeline = mixed(tmp_path, pack=64, weight_schedule=HALF_WAY)
    loader = pipeline.load(LoadStageConfig(batch_size=4)).loader()
    state = loader.state()
    known = {key: value for key, value in state.config.items() if key != "plan.stages_end"}
    before = {**state.components, "plan": "of before"}
    with pytest.raises(
        StateError, match=r"plan changed since .*plan\.stages_end was None, is 'estimated'"
    ):
        loader.restore(dataclasses.replace(state, components=before, config=known))
    concat = mixed(tmp_path, weight_schedule=HALF_WAY).pack(
        PackStageConfig(seq_length=64, strategy="stream")
    )
    for same in (concat, mixed(tmp_path, weight_schedule=HALF_WAY), mixed(tmp_path, pack=64)):
        loader = same.load(LoadStageConfig(batch_size=4)).loader()
        assert "plan.stages_end" not in loader.state().config, "what has not changed is not refused"


# Caps.


def test_a_capped_dataset_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    pipeline = mixed(tmp_path, weights={"code": 3, "docs": 1}, max_epochs={"code": 2}).load(
        LoadStageConfig(batch_size=10)
    )
    drawn = origins(pipeline, 50).reshape(-1)
    assert (drawn == 0).sum() == 2 * 60, "no document of code comes a third time"
    last = int(np.flatnonzero(drawn == 0)[-1])
    assert abs(last - 160) <= 2, "3 to 1 until then"
    with pytest.raises(TypeError, match="never ends"):
        len(pipeline.loader())


def test_a_mixture_of_capped_datasets_ends(tmp_path: Path) -> None:
    pipeline = mixed(tmp_path, max_epochs={"code": 2, "docs": 1})
    other = mixed(tmp_path, max_epochs={"code": 1, "docs": 1})
    assert other.get_data()["mixed"].fingerprint != pipeline.get_data()["mixed"].fingerprint
    books = pipeline.ledger()
    laws.assert_conserved(books)
    assert (books.facts["mix.code.epochs"], books.facts["mix.docs.epochs"]) == (2.0, 1.0)
    loader = pipeline.copy().load(LoadStageConfig(batch_size=10)).loader()
    assert len(loader) == (2 * 60 + 90) // 10 == sum(1 for _ in loader)
    saved = pipeline.save(SaveStageConfig(output_dir=tmp_path / "out", format="jsonl")).build()
    assert sum(folder.num_rows for folder in saved.folders) == 210
    with pytest.raises(
        ConfigError,
        match=r"load.num_epochs: 2, but 'mixed' is drawn once, until mix.max_epochs ends it",
    ):
        mixed(tmp_path, max_epochs={"code": 2, "docs": 1}).load(
            LoadStageConfig(num_epochs=2)
        ).loader()


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_caps_count_over_all_epochs(tmp_path: Path, stop: str) -> None:
    """From the second epoch on docs is out; the third has code alone; the run ends there, whatever
    num_epochs says.
    """
    pipeline = mixed(tmp_path, stop_strategy=stop, max_epochs={"code": 3, "docs": 1})
    for epochs in (5, None):
        plan = (
            pipeline.copy()
            .load(LoadStageConfig(batch_size=4, num_epochs=epochs))
            .loader()
            .rows.plan
        )
        parts = plan.stats().datasets
        assert (parts["code"].draws, parts["docs"].passes) == (180, 1)
        assert parts["docs"].draws == (90 if stop == "all_exhausted" else 60)


# Shares of tokens.


def test_shares_of_tokens(tmp_path: Path) -> None:
    """code's documents are longer; by tokens, half of the tokens come from each, within the longest
    document.
    """
    for unit in ("rows", "tokens"):
        plan = (
            mixed(tmp_path, unit=unit, weights={"code": 1, "docs": 1}).load(LOAD).loader().rows.plan
        )
        pieces = plan.pieces(np.arange(400))
        longest = int(pieces.length.max())
        tokens = np.cumsum(
            [np.where(pieces.dataset == i, pieces.length, 0) for i in (0, 1)], axis=1
        )
        ahead = np.abs(tokens[0] - tokens[1]).max() / 2
        assert (ahead <= longest) == (unit == "tokens")


# Provenance.


@pytest.mark.parametrize("format", ["parquet", "arrow", "jsonl"])
def test_provenance_survives_packing_and_saving(tmp_path: Path, format: str) -> None:
    pipeline = mixed(tmp_path, pack=64, provenance=True, stop_strategy="all_exhausted")
    plain = mixed(tmp_path, pack=64, stop_strategy="all_exhausted").get_data()["mixed"]
    source = pipeline.get_data()["mixed"]
    rows = source.prepare().shards[0].num_rows
    batch = source.read(0, 0, rows)
    assert batch.schema.names == [*plain.schema.names, SOURCE]
    assert batch.drop_columns([SOURCE]).equals(plain.read(0, 0, rows)), (
        "the other columns stay what they are"
    )
    assert source.fingerprint != plain.fingerprint
    pieces = source.plan().pieces(np.arange(rows))
    named = [["code", "docs"][i] for i in pieces.dataset]
    assert list(itertools.chain(*batch[SOURCE].to_pylist())) == named
    assert [len(names) for names in batch[SOURCE].to_pylist()] == [
        max(row) for row in batch[SEGMENT_IDS].to_pylist()
    ]
    loaded = pipeline.copy().load(LoadStageConfig(batch_size=4))
    assert SOURCE not in next(iter(loaded.build()))
    pipeline.save(SaveStageConfig(output_dir=tmp_path / "out", format=format)).build()  # pyright: ignore[reportArgumentType]
    again = Pipeline(
        config(tmp_path, datasets=[DatasetConfig(name="again", data_files=str(tmp_path / "out"))])
    ).source()
    saved = again.get_data()["again"]
    found = [
        name
        for i, shard in enumerate(saved.shards)
        for name in saved.read(i, 0, shard.num_rows)[SOURCE].to_pylist()
    ]
    assert list(itertools.chain(*found)) == named
    assert next(iter(again.load(LoadStageConfig(batch_size=4)).build()))["input_ids"].shape == (
        4,
        64,
    )


# WeightScheduler.


def test_the_scheduler_gives_weights_by_step() -> None:
    points = [
        WeightSchedulePoint(step=0, weights={"code": 0.2, "text": 0.8}),
        WeightSchedulePoint(step=100, weights={"code": 2, "text": 2}),
    ]
    assert WeightScheduler(points).get_weights(99) == {"code": 0.2, "text": 0.8}
    assert WeightScheduler(points, "linear").get_weights(50) == {"code": 0.35, "text": 0.65}
    assert WeightScheduler(points, "cosine").get_weights(50) == {"code": 0.35, "text": 0.65}
    assert (
        WeightScheduler(points, "cosine").get_weights(10)["code"]
        < WeightScheduler(points, "linear").get_weights(10)["code"]
    )
    for kind in ("step", "linear", "cosine"):
        assert WeightScheduler(points, kind).get_weights(10**9) == {"code": 0.5, "text": 0.5}
        for step in (0, 1, 37, 99, 100):
            assert sum(WeightScheduler(points, kind).get_weights(step).values()) == pytest.approx(1)
    with pytest.raises(
        ConfigError, match=r"type: 'wave' is not an option \(have: step, linear, cosine\)"
    ):
        WeightScheduler(points, "wave")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"step: -1 is before the first step. Steps count from 0"):
        WeightScheduler(points).get_weights(-1)
    with pytest.raises(ConfigError, match=r"points\[0\]\.steps: unknown key"):
        WeightScheduler([{"steps": 0, "weights": {}}])


# Refusals.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight_schedule": []}, "weight_schedule: it has no points"),
        (
            {"weight_schedule": [{"step": -1, "weights": {"a": 1}}]},
            "weight_schedule[0].step: -1 is before the first step",
        ),
        (
            {"weight_schedule": [{"step": 0, "weights": {"a": -1}}]},
            "weight_schedule[0].weights.a: -1.0 is not a weight",
        ),
        (
            {"weight_schedule": [{"step": 0, "weights": {"a": 0}}]},
            "weight_schedule[0].weights: all are 0",
        ),
        (
            {
                "weight_schedule": [
                    {"step": 5, "weights": {"a": 1}},
                    {"step": 5, "weights": {"a": 1}},
                ]
            },
            "weight_schedule[1].step: 5 does not come after 5. Order the points by step.",
        ),
        (
            {
                "weight_schedule": [
                    {"step": 0, "weights": {"code": 1}},
                    {"step": 5, "weights": {"cod": 1}},
                ]
            },
            "weight_schedule[1].weights.cod: weight_schedule[0] has no weight for 'cod' (have: "
            "code). Did you mean 'code'?",
        ),
        (
            {
                "weight_schedule": [
                    {"step": 0, "weights": {"a": 1, "b": 1}},
                    {"step": 5, "weights": {"a": 1}},
                ]
            },
            "weight_schedule[1].weights: no weight for 'b' (have: a). Give it one; 0 leaves it "
            "out.",
        ),
        (
            {"weight_schedule": [{"step": 0, "weights": {"a": 1, "b": 1e-14}}]},
            "weight_schedule[0].weights.b: 1e-14 is less than 2^-41 of the sum of the weights",
        ),
        (
            {"weight_schedule": [{"step": 0, "weights": {"a": 999, "b": 1}}], "block_size": 10},
            "weight_schedule[0].block_size: in a block of 10 documents 'b' has 0.01, which "
            "rounds to 0. Use blocks of at least 1000",
        ),
        (
            {"weight_schedule_type": "linear"},
            "weight_schedule_type: has no effect without weight_schedule",
        ),
        (
            {"weight_schedule_type": "wave"},
            "weight_schedule_type: 'wave' is not an option (have: step, linear, cosine)",
        ),
        ({"batch_size": 8}, "batch_size: has no effect without weight_schedule"),
        ({"batch_size": 0, "weight_schedule": HALF_WAY}, "batch_size: 0 rows are not a batch"),
        ({"unit": "bytes"}, "unit: 'bytes' is not an option (have: rows, tokens)"),
        (
            {"unit": "tokens", "block_size": 10},
            "block_size: counts documents, and unit is 'tokens'. Leave one of them out.",
        ),
        (
            {"max_epochs": {"a": 0}},
            "max_epochs.a: 0 is not a pass. Give at least 1, or leave the dataset out.",
        ),
    ],
)
def test_options_that_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MixStageConfig(**values)
    assert str(caught.value).startswith(message)


def test_names_that_no_dataset_has(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"mix.max_epochs.cod: no dataset named 'cod' \(have: code, docs\). Did you mean "
        r"'code'\?",
    ):
        mixed(tmp_path, max_epochs={"cod": 2})
    with pytest.raises(
        ConfigError,
        match=r"mix.weight_schedule\[0\].weights: no weight for dataset 'docs' \(have: code\)",
    ):
        mixed(tmp_path, weight_schedule=[{"step": 0, "weights": {"code": 1}}])
    with pytest.raises(
        ConfigError, match=r"mix.weight_schedule\[0\].weights.text: no dataset named 'text'"
    ):
        Pipeline(
            config(
                tmp_path,
                mix={
                    "weight_schedule": [{"step": 0, "weights": {"code": 1, "docs": 1, "text": 1}}]
                },
            )
        )


def test_weights_beside_a_schedule_from_the_start_are_said_to_do_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "easypipe"):
        first = mixed(
            tmp_path, weight_schedule=HALF_WAY, weights={"code": 9, "docs": 1}, batch_size=4
        ).get_data()["mixed"]
    assert (
        "mix.weights: has no effect, because weight_schedule has a point at step 0" in caplog.text
    )
    assert (
        first.fingerprint
        == mixed(tmp_path, weight_schedule=HALF_WAY, batch_size=4).get_data()["mixed"].fingerprint
    )


def test_blocks_under_a_schedule(tmp_path: Path) -> None:
    """Shares of 2/3 in blocks of 10 are 7 documents."""
    points = [{"step": 0, "weights": {"code": 2, "docs": 1}}]
    drawn = origins(
        mixed(tmp_path, weight_schedule=points, block_size=10).load(LoadStageConfig(batch_size=10)),
        30,
    )
    assert (drawn == 0).sum(axis=1).tolist() == [7] * 30
