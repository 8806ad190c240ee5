"""The loader under Grain's own checks, and under Orbax as Grain's users save it."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from easypipe import LoadStageConfig, MixStageConfig, PackStageConfig, Pipeline
from easypipe.core.errors import ConfigError, StateError
from easypipe.loader.collate import CollateConfig
from easypipe.loader.loader import Loader
from laws import assert_no_new_threads, assert_same_batch, assert_same_batches
from loader_support import MemoryCache, plan_rows, some_docs
from pipelines import config

grain = pytest.importorskip("grain")
from easypipe.interop.grain import LoaderDataset, LoaderIterator, RowsByNumber  # noqa: E402


@pytest.fixture(autouse=True)
def _arrays_in_few_words():
    """Grain's check writes out every array that it compares, also where they are equal."""
    with np.printoptions(threshold=0, edgeitems=1):
        yield


LENGTHS = np.random.Generator(np.random.PCG64(3)).integers(1, 60, 50)
CACHE = MemoryCache(some_docs(LENGTHS))


def loader(**load) -> Loader:
    load = {"batch_size": 4, "num_epochs": 2, "shuffle_buffer_size": 7, "drop_last": False, **load}
    rows = plan_rows([CACHE, CACHE], weights=[0.8, 0.2], num_epochs=load["num_epochs"])
    return Loader(rows, LoadStageConfig(**load))


LOADS = [
    {},
    {"prefetch_enabled": False},
    {"mesh": {"data": 1}},
    {"batch_size_schedule": ((2, 2), (5, 6)), "accumulation_steps": 2},
]


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_grains_own_check_of_checkpoints(load):
    from grain.experimental import assert_equal_output_after_checkpoint

    before = set(threading.enumerate())
    on_the_host = LoaderDataset(loader(**load)).map(
        lambda batch: {name: np.asarray(column) for name, column in batch.items()}
    )
    assert_equal_output_after_checkpoint(
        on_the_host if "mesh" in load else LoaderDataset(loader(**load))
    )
    assert_no_new_threads(before)


def test_grains_own_check_behind_grains_transformations():
    from grain.experimental import assert_equal_output_after_checkpoint

    one = LoaderDataset(loader())
    assert_equal_output_after_checkpoint(one.map(lambda batch: batch["labels"] * 2))


def test_batches_are_the_loaders_and_iterators_go_their_own_ways():
    dataset = LoaderDataset(loader())
    wanted = list(loader())
    first, second = iter(dataset), iter(dataset)
    assert isinstance(first, grain.DatasetIterator)
    next(first)
    assert_same_batches(wanted, second)
    assert_same_batches(wanted[1:], first)
    first, second, third = (iter(dataset) for _ in range(3))
    next(first)
    next(second)
    third.set_state(first.get_state())  # of the first, whoever has read meanwhile
    next(first)
    assert_same_batches(wanted[1:], third)
    third.set_state(first.get_state())
    assert_same_batches(wanted[2:], third)


def test_index_of_an_iterator():
    from grain.experimental import get_next_index, set_next_index

    one = iter(LoaderDataset(loader()))
    next(one), next(one)
    assert get_next_index(one) == 2
    set_next_index(one, 5)
    assert get_next_index(one) == 5
    assert_same_batches(one, list(loader())[5:])


def test_closing_ends_the_threads():
    before = set(threading.enumerate())
    one = iter(LoaderDataset(loader(prefetch_workers=3)))
    one.start_prefetch()
    next(one)
    one.close()
    one.close()
    assert_no_new_threads(before)
    with pytest.raises(ValueError, match="closed"):
        next(one)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"next_index": 3}, r"not a state of an easypipe loader: it has \['next_index'\]"),
        ({"easypipe": "{}"}, "not a state of"),
    ],
)
def test_foreign_states_are_refused(state, message):
    with pytest.raises(StateError, match=message):
        iter(LoaderDataset(loader())).set_state(state)


def test_orbax_saves_and_restores_with_grains_handler(tmp_path):
    import orbax.checkpoint as ocp
    from grain.checkpoint import CheckpointRestore, CheckpointSave

    wanted = list(loader())
    one = iter(LoaderDataset(loader()))
    for _ in range(3):
        next(one)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(3, args=ocp.args.Composite(data=CheckpointSave(one)))
        manager.wait_until_finished()
        next(one)
        other = iter(LoaderDataset(loader(prefetch_workers=2)))
        restored = manager.restore(3, args=ocp.args.Composite(data=CheckpointRestore(other)))[
            "data"
        ]
    assert restored is other
    assert_same_batches(restored, wanted[3:])


def test_orbax_v1_saves_and_restores_the_iterator(tmp_path):
    from orbax.checkpoint import v1 as ocp

    one = iter(LoaderDataset(loader()))
    next(one), next(one)
    ocp.save_checkpointables(tmp_path / "step", {"data": one})
    other = iter(LoaderDataset(loader()))
    ocp.load_checkpointables(tmp_path / "step", {"data": other})
    assert_same_batches(other, list(loader())[2:])


# Pipeline.as_grain


def pipeline(folder, **options) -> Pipeline:
    options = {
        "mix": MixStageConfig(weights={"code": 0.6, "docs": 0.4}, stop_strategy="all_exhausted"),
        "pack": PackStageConfig(seq_length=64),
        **options,
    }
    return Pipeline.from_config(config(folder, **options)).source().tokenize().mix()


def test_rows_by_number(tmp_path):
    chain = pipeline(tmp_path).pack()
    rows = chain.as_grain()
    assert isinstance(rows, grain.MapDataset)
    whole = chain.copy().load(LoadStageConfig(batch_size=1)).build()
    assert len(rows) == len(whole) > 5
    for i, batch in enumerate(whole):
        assert_same_batch({name: column[0] for name, column in batch.items()}, rows[i])
    source = RowsByNumber(chain.copy().load(LoadStageConfig(batch_size=1)).loader())
    for index in (-1, len(source)):
        with pytest.raises(IndexError, match=f"there is no row {index}"):
            source[index]
    again = rows.shuffle(seed=1).batch(4, drop_remainder=True).to_iter_dataset()
    assert next(iter(again))["labels"].shape == (4, 64)
    first = iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=2)))
    assert_same_batches([next(first) for _ in range(5)], [rows[i] for i in range(5)])


@pytest.mark.parametrize("known", ["load", "mix", ""])
def test_rows_of_a_weight_schedule_are_those_of_its_steps(tmp_path, known):
    points = ((0, 1, 4), (3, 4, 1))
    points = [{"step": step, "weights": {"code": a, "docs": b}} for step, a, b in points]
    mix = {"weight_schedule": points, "stop_strategy": "all_exhausted"}
    mix |= {"batch_size": 4} if known == "mix" else {}
    load = LoadStageConfig(batch_size=4, drop_last=False)
    chain = pipeline(tmp_path, mix=mix, load=load if known == "load" else None)
    if not known:
        with pytest.raises(ConfigError, match="the number of rows in one is unknown"):
            chain.as_grain()
        return
    rows = chain.as_grain()
    batches = [batch["input_ids"] for batch in chain.load(load).build()]
    whole = [row[row > 0] for batch in batches for row in batch]
    assert len(rows) == len(whole)
    assert all((rows[i]["input_ids"] == row).all() for i, row in enumerate(whole))


def test_documents_by_number_have_their_own_lengths(tmp_path):
    chain = pipeline(tmp_path)
    rows = chain.as_grain()
    whole = chain.copy().load(LoadStageConfig(batch_size=1)).build()
    assert_same_batches(
        ({name: column[0] for name, column in batch.items()} for batch in whole),
        (rows[i] for i in range(len(rows))),
    )
    assert len({row["labels"].shape for row in rows._getitems([0, 1, 2, 3, 4])}) > 1


@pytest.mark.parametrize(
    "load",
    [
        {},
        {"drop_last": False, "mesh": {"data": 1}, "num_epochs": 2},
        {"prefetch_to_device": True},
        {"accumulation_steps": 2},
    ],
    ids=str,
)
def test_batches_by_number_behind_load(tmp_path, load):
    chain = (
        pipeline(tmp_path).pack().load(LoadStageConfig(batch_size=4, shuffle_buffer_size=9, **load))
    )
    batches = chain.as_grain()
    whole = list(chain.build())
    assert len(batches) == len(whole)
    for i in reversed(range(len(whole))):
        real = len(batches[i]["labels"])
        assert all(isinstance(column, np.ndarray) for column in batches[i].values())
        if load.get("accumulation_steps", 1) == 1:
            assert_same_batch(
                {name: np.asarray(column)[:real] for name, column in whole[i].items()}, batches[i]
            )
        else:
            assert_same_batch(whole[i], batches[i])


def test_what_never_ends_has_no_map_dataset(tmp_path):
    endless = pipeline(tmp_path, mix=MixStageConfig(stop_strategy="restart")).pack()
    with pytest.raises(
        ConfigError,
        match=r"as_grain: rows without end cannot be a MapDataset.*or use LoaderDataset",
    ):
        endless.as_grain()
    assert next(iter(LoaderDataset(endless.load(LoadStageConfig(batch_size=2)).build())))[
        "labels"
    ].shape == (2, 64)


def test_streams_iterate_and_have_no_numbers(tmp_path):
    from grain.experimental import assert_equal_output_after_checkpoint, set_next_index

    chain = pipeline(tmp_path, streaming=True).pack().load(LoadStageConfig(batch_size=4))
    with pytest.raises(
        ConfigError, match=r"as_grain: streams are read forward.*or use LoaderDataset"
    ):
        chain.as_grain()
    dataset = LoaderDataset(chain.build())
    assert_equal_output_after_checkpoint(dataset)
    with pytest.raises(
        ConfigError, match=r"next index: 3, but streams are read forward.*Keep get_state\(\)"
    ):
        set_next_index(iter(dataset), 3)
    with pytest.raises(
        ConfigError, match="allow_changed: a stream can continue only where its files were left"
    ):
        chain.build().restore(chain.build().state(), allow_changed=["config"])


def test_the_attention_mask_comes_along():
    from easypipe.interop.grain import RowsByNumber, map_dataset

    one = Loader(
        plan_rows([CACHE]),
        LoadStageConfig(batch_size=4),
        collate=CollateConfig(attention_mask=True),
    )
    row = map_dataset(RowsByNumber(one))[0]
    np.testing.assert_array_equal(row["attention_mask"], row["segment_ids"] > 0)


def test_without_grain_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['grain'] = None\n"
        "try:\n    import easypipe.interop.grain\n"
        "except ImportError as error:\n    assert 'easypipe[grain]' in str(error)\nelse:\n    "
        "raise SystemExit(1)\n"
        "import easypipe.pipeline; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_name_says_what_it_is():
    assert str(LoaderDataset(loader())) == "LoaderDataset(loader)"
    assert str(LoaderIterator(loader())) == "LoaderIterator(loader)"
