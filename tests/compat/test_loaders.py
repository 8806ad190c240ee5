"""Any map-style dataset in the one Loader: order, resume, ranks, threads; DataLoaderFactory and
DataLoaderBuilder.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from easypipe import (
    DataLoaderBuilder,
    DataLoaderConfig,
    DataLoaderFactory,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    TaskSpec,
    UniversalDataModule,
    create_causal_lm_collate,
    create_masked_lm_collate,
)
from easypipe.compat.loaders import text_loader
from easypipe.compat.registry import CollatorRegistry
from easypipe.core.errors import ConfigError, PlacementError, StateError
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.rows import items
from easypipe.loader.rows.items import ForwardRows, ItemRows
from laws import assert_exact_resume, assert_no_new_threads, assert_same_batch, assert_same_batches
from pipelines import config, texts, tokenizer
from strategies import examples


class Images:
    """A torch-like dataset: `len()` and rows by number."""

    def __init__(self, count: int = 23) -> None:
        self.count, self.read = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        self.read.append(index)
        return {"pixel_values": np.full((4, 5, 3), index % 256, np.uint8), "labels": index}


class Stream:
    """Rows in their order alone."""

    def __init__(self, count: int) -> None:
        self.count, self.begun = count, 0

    def __iter__(self):
        self.begun += 1
        return iter({"x": np.float32(i)} for i in range(self.count))


def loader(dataset=None, **options) -> Loader:
    return DataLoaderFactory().create_dataloader(
        Images() if dataset is None else dataset, DataLoaderConfig(**{"seed": 3, **options})
    )


def firsts(rows):
    return {"a": np.array([row[0] for row in rows])}


def labels(batches) -> list[int]:
    return [int(label) for batch in batches for label in batch["labels"]]


VISION = CollatorRegistry().get_collator(TaskSpec.vision_tiny())
MASKED = create_masked_lm_collate(mask_token_id=3, vocab_size=50, probability=0.5)
TOKENS = [{"input_ids": list(range(4, 6 + i % 7))} for i in range(17)]


@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [
        (Images(), VISION),
        (TOKENS, MASKED),
        (TOKENS, create_causal_lm_collate()),
        ([(i, i) for i in range(17)], None),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 3, "prefetch_factor": 1, "drop_last": False, "num_epochs": 2},
    ],
    ids=str,
)
def test_law_exact_resume_of_any_dataset(dataset, collate_fn, options):
    def make() -> Loader:
        return loader(
            dataset, batch_size=4, shuffle=True, collate_fn=collate_fn or firsts, **options
        )

    assert_exact_resume(make, 12, hops=(1, 2), stops=(0, 1, 3))


@examples(30)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 3), st.integers(0, 5), st.booleans())
def test_law_determinism_and_every_row_once_a_pass(count, batch_size, num_epochs, seed, shuffle):
    options = {
        "batch_size": batch_size,
        "num_epochs": num_epochs,
        "seed": seed,
        "shuffle": shuffle,
        "drop_last": False,
    }
    one = list(loader(Images(count), num_workers=0, **options))
    assert_same_batches(one, loader(Images(count), num_workers=3, prefetch_factor=2, **options))
    seen = labels(one)
    for epoch in range(num_epochs):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert shuffle or seen == [*range(count)] * num_epochs


@examples(30)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_ranks_share_the_rows_and_put_together_are_one_large_batch(
    count, batch_size, world_size, drop_last
):
    assume(count >= batch_size * world_size)
    options = {"shuffle": True, "drop_last": drop_last, "num_workers": 0}
    ranks = [
        list(loader(Images(count), batch_size=batch_size, rank=r, world_size=world_size, **options))
        for r in range(world_size)
    ]
    whole = list(loader(Images(count), batch_size=batch_size * world_size, **options))
    if drop_last:
        assert len({len(batches) for batches in ranks}) == 1
    else:
        assert sorted(label for batches in ranks for label in labels(batches)) == list(range(count))
    for step, batch in enumerate(whole[: count // (batch_size * world_size)]):
        together = np.stack([ranks[r][step]["labels"] for r in range(world_size)], axis=1).reshape(
            -1
        )
        np.testing.assert_array_equal(together, batch["labels"])


def test_a_rank_resumes_and_its_state_is_every_ranks():
    def make(rank: int = 1) -> Loader:
        return loader(Images(40), batch_size=3, shuffle=True, rank=rank, world_size=2)

    assert_exact_resume(make, 6, hops=(1,), stops=(0, 2))
    first, second = make(0), make(1)
    wanted = list(make(1))
    next(iter(first))
    second.restore(first.state().to_json())
    assert_same_batches(second, wanted[1:])
    more = loader(Images(40), batch_size=3, shuffle=True, rank=0, world_size=4)
    with pytest.raises(StateError, match=r"world_size was 2, is 4.*of each of 2 ranks"):
        more.restore(first.state())


def test_only_the_rows_of_a_batch_are_read():
    data = Images(1000)
    made = loader(data, batch_size=4, num_workers=0, shuffle=True)
    made.restore(made.state_at(100))
    next(iter(made))
    assert len(data.read) == 4


def test_f33_the_same_seed_gives_the_same_order_and_another_another():
    assert_same_batches(loader(shuffle=True, seed=42), loader(shuffle=True, seed=42))
    assert labels(loader(shuffle=True, seed=42)) != labels(loader(shuffle=True, seed=43))


def test_an_unseeded_loader_draws_a_seed_and_says_which(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "easypipe"):
        one = loader(shuffle=True, seed=None)
    assert f"no seed was given, drew {one.seed}" in caplog.text
    assert_same_batches(one, loader(shuffle=True, seed=one.seed))
    assert loader(seed=None).seed == 0  # nothing is drawn, so two of them have one state
    assert (
        loader(TOKENS, seed=None, collate_fn=MASKED).seed
        != loader(TOKENS, seed=None, collate_fn=MASKED).seed
    )


def test_a_dataset_whose_own_collator_draws_draws_a_seed_that_ranks_must_share():
    class Masked(list):
        collate_fn = staticmethod(MASKED)

    assert loader(Masked(TOKENS), seed=None).seed != loader(Masked(TOKENS), seed=None).seed
    with pytest.raises(ConfigError, match="seed: every rank would draw its own"):
        loader(Masked(TOKENS), seed=None, rank=1, world_size=2)


def test_a_collator_that_draws_draws_anew_in_every_pass():
    made = list(loader(TOKENS, batch_size=17, num_epochs=2, collate_fn=MASKED))
    assert (made[0]["labels"] != made[1]["labels"]).any()


def test_device_arrays_fill_a_short_last_batch_with_nothing(caplog: pytest.LogCaptureFixture):
    import jax

    items._warn_of_zeros.cache_clear()

    made = list(loader(Images(5), batch_size=4, prefetch_to_device=True, collate_fn=VISION))
    assert all(isinstance(column, jax.Array) for column in made[1].values())
    assert made[1]["labels"].tolist() == [4, -100, -100, -100]
    assert_same_batch(made[0], next(iter(loader(Images(5), batch_size=4, collate_fn=VISION))))
    assert "rows of zeros" not in caplog.text
    [(first, second)] = loader([(i, 0.5) for i in range(3)], batch_size=4, prefetch_to_device=True)
    assert "rows of zeros fill its last batch, and no integer column 'labels'" in caplog.text
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 0], [0.5, 0.5, 0.5, 0])
    assert isinstance(first, jax.Array)
    refused = r"column 'text': it does not hold numbers.*Leave the"
    with pytest.raises(PlacementError, match=refused):
        next(iter(loader([{"text": "a"}] * 4, batch_size=4, prefetch_to_device=True)))
    for text in (np.array(["a"] * 4, object), np.array(["a"] * 4), np.array([b"a"] * 4)):
        collate = {"collate_fn": lambda rows, text=text: {"text": text}}
        with pytest.raises(PlacementError, match=refused):
            next(iter(loader([{"x": 1}] * 4, batch_size=4, prefetch_to_device=True, **collate)))


def test_micro_batches_of_any_shape():
    rows = ItemRows(Images(8), VISION)
    [batch] = Loader(rows, LoadStageConfig(batch_size=8, accumulation_steps=2))
    assert batch["pixel_values"].shape == (2, 4, 4, 5, 3)
    assert batch["labels"].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    pairs = ItemRows([(i, -i) for i in range(4)], lambda rows: (*np.array(rows).T,))
    [cut] = Loader(pairs, LoadStageConfig(batch_size=4, accumulation_steps=2))
    assert [column.tolist() for column in cut] == [[[0, 2], [1, 3]], [[0, -2], [-1, -3]]]


def test_states_of_another_dataset_order_or_collator_are_refused():
    state = loader(shuffle=True).state().to_json()
    for other, what in (
        (loader(Images(24), shuffle=True), "sources"),
        (loader(shuffle=True, seed=4), "plan"),
        (loader(shuffle=True, collate_fn=VISION), "tokenizer"),
        (loader(shuffle=True, batch_size=9), "config"),
    ):
        with pytest.raises(StateError, match=what):
            other.restore(state)


def test_errors_of_a_dataset_name_the_row():
    class Broken(Images):
        def __getitem__(self, index: int):
            if index == 13:
                raise RuntimeError("a bad sector")
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="a bad sector") as error:
        list(loader(Broken()))
    assert any("row 13" in note for note in error.value.__notes__)

    def refuse(rows: object) -> None:
        raise RuntimeError("row 1 of the batch: a bad pixel")

    for data in (Images(), Stream(9)):
        with pytest.raises(RuntimeError, match="a bad pixel") as error:
            list(loader(data, collate_fn=refuse, batch_size=3))
        assert "dataset1: the rows of the batch are 0, 1, 2" in error.value.__notes__
    with pytest.raises(ConfigError, match="they cannot be inspected"):
        next(iter(loader().map_rows(lambda columns, key: None, version="1")))


def test_streams_are_read_in_their_order_and_resume():
    made = loader(Stream(3000), batch_size=7)
    assert [batch["x"].tolist() for batch in made] == [
        [*range(i, min(i + 7, 3000))] for i in range(0, 3000, 7)
    ]
    assert len(made) == 429

    def make() -> Loader:
        return loader(Stream(40), batch_size=6, drop_last=True)

    assert_exact_resume(make, 6, hops=(1,), stops=(0, 2, 5))
    data = Stream(5000)
    made = loader(data, batch_size=5, num_workers=1)
    for _, _ in zip(range(600), iter(made), strict=False):
        made.state()
    assert data.begun == 1  # asking for states reads nothing again


def test_forward_rows_go_back_by_beginning_again():
    rows = ForwardRows(Stream(50), lambda items: {"x": np.array([item["x"] for item in items])})
    assert rows.batch(np.arange(40, 44), 0)["x"].tolist() == [40, 41, 42, 43]
    assert rows.batch(np.array([3, 1, -1]), 0)["x"].tolist() == [3, 1, 0]
    assert (rows.available(45, 60), rows.available(60, 70), rows.num_rows) == (5, 0, 50)


@pytest.mark.parametrize("num_rows", [4, 1023, 1024, 2048])
def test_a_place_behind_the_last_row_has_no_rows_and_padding_has_the_shapes_of_one(num_rows: int):
    data = Stream(num_rows)
    rows = ForwardRows(data, lambda items: {"x": np.array([item["x"] for item in items])})
    assert rows.available(num_rows + 4, num_rows + 8) == 0
    assert rows.num_rows == num_rows == rows.available(0, num_rows + 8)
    assert rows.batch(np.array([-1, -1]), 0)["x"].tolist() == [0, 0]


def test_a_later_row_of_a_stream_is_reached_without_keeping_those_before_it():
    class Row(dict):
        __hash__ = object.__hash__

    held: weakref.WeakSet[Row] = weakref.WeakSet()

    class Rows:
        def __iter__(self):
            for i in range(20_000):
                row = Row(x=i)
                held.add(row)
                most.append(len(held))
                yield row

    most: list[int] = []
    rows = ForwardRows(Rows(), lambda items: {"x": np.array([item["x"] for item in items])})
    assert rows.batch(np.array([19_000]), 0)["x"].tolist() == [19_000]
    assert max(most) < 5000


def test_a_stream_that_has_fewer_rows_than_its_state_is_no_end_of_the_data():
    made = loader(Stream(40), batch_size=8)
    states = [made.state() for _ in made]
    again = loader(Stream(16), batch_size=8)
    again.restore(states[1])
    assert list(again) == []
    with pytest.raises(StateError, match="it is at row 24, and there are fewer rows now"):
        again.restore(states[2])


@pytest.mark.parametrize("kind", [ItemRows, ForwardRows])
def test_a_process_whose_rows_of_a_batch_are_all_padding_makes_padding(kind):
    keyed = kind(TOKENS, MASKED)
    keyed.available(16, 20)
    some, none = (keyed.batch(np.array([row, -1]), 0) for row in (16, -1))
    assert some.keys() == none.keys()
    for name, column in none.items():
        assert (column == (-100 if name == "labels" else 0)).all()
        assert (len(column), column.dtype) == (2, some[name].dtype)


def test_streams_cannot_be_shuffled_or_repeated(caplog: pytest.LogCaptureFixture):
    with pytest.raises(
        ConfigError, match=r"shuffle: Stream is read from its start. Give it a buffer_size"
    ):
        loader(Stream(5), shuffle=True)
    with pytest.raises(ConfigError, match="a stream is read once"):
        loader(Stream(5), num_epochs=2)
    with caplog.at_level(logging.WARNING, "easypipe"):
        loader(Stream(5), num_workers=1)
        assert not caplog.text
        loader(Stream(5), num_workers=2)
    assert "num_workers=2, but one thread reads a stream" in caplog.text
    shared = [
        [
            b["x"].tolist()
            for b in loader(Stream(7), batch_size=2, rank=r, world_size=2, drop_last=False)
        ]
        for r in range(2)
    ]
    assert shared == [[[0, 2], [4, 6]], [[1, 3], [5]]]


def test_f28_the_builder_is_the_config():
    data = Images()
    built = (
        DataLoaderBuilder()
        .with_dataset(data)
        .with_batch_size(4)
        .with_workers(2)
        .with_distributed(rank=1, world_size=2)
    )
    assert_same_batches(
        built.build(), loader(data, batch_size=4, num_workers=2, rank=1, world_size=2)
    )
    shuffled = built.with_options(shuffle=True, seed=9).build()
    assert_same_batches(
        shuffled, loader(data, batch_size=4, shuffle=True, seed=9, rank=1, world_size=2)
    )
    with pytest.raises(ConfigError, match=r"build\(\): there is no dataset. Call with_dataset"):
        DataLoaderBuilder().build()
    with pytest.raises(ConfigError, match=r"batchsize: unknown option.*Did you mean 'batch_size'"):
        DataLoaderBuilder().with_options(batchsize=3)


def test_threads_are_as_many_as_asked_for_and_end(monkeypatch: pytest.MonkeyPatch):
    before = set(threading.enumerate())
    for workers in (0, 1, 3):
        batches = iter(loader(Images(400), batch_size=1, num_workers=workers))
        next(batches)
        assert len(set(threading.enumerate()) - before) == workers
        batches.close()
        assert_no_new_threads(before)
    for cores, workers in ((1, 1), (4, 2), (64, 4)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert DataLoaderConfig().workers == workers
    assert (
        DataLoaderConfig(num_workers=3, prefetch_factor=5).load_options().prefetch_buffer_size == 15
    )


def test_drop_last_follows_shuffle_unless_it_is_said():
    counts = {
        (s, d): len(list(loader(shuffle=s, drop_last=d)))
        for s in (True, False)
        for d in (None, True, False)
    }
    assert counts == {
        (True, None): 2,
        (True, True): 2,
        (True, False): 3,
        (False, None): 3,
        (False, True): 2,
        (False, False): 3,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers: -1 threads"),
        (
            {"num_workers": 0, "prefetch_factor": 2},
            "prefetch_factor: has no effect while num_workers is 0",
        ),
        ({"prefetch_factor": 0}, "prefetch_factor: 0 batches"),
        ({"rank": 2, "world_size": 2}, "rank: there is no rank 2 of 2"),
        ({"shuffle": True, "rank": 0, "world_size": 2}, "seed: every rank would draw its own"),
        ({"batch_size": 0}, "batch_size: 0 is too few"),
        ({"seed": -1}, "seed: -1 is outside"),
        ({"worker_init_fn": print}, "worker_init_fn: unknown key"),
        ({"collate_fn": "os:system"}, "collate_fn"),
    ],
)
def test_configs_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DataLoaderConfig(**options)


def test_what_can_be_iterated_over_once_is_no_dataset():
    with pytest.raises(ConfigError, match="dataset: generator can be read once, and every"):
        loader({"x": i} for i in range(10))


def test_what_is_no_dataset_is_refused():
    with pytest.raises(ConfigError, match="dataset: int does not return rows by number"):
        loader(5)


def test_a_ranks_batch_is_explained_by_the_documents_that_stand_in_it(tmp_path):
    packed = (
        Pipeline(config(tmp_path)).source().tokenize().mix().pack(PackStageConfig(seq_length=64))
    )
    whole = packed.load(LoadStageConfig(batch_size=2)).build()
    one = whole.of_rank(1, 2)
    [first, second] = one.explain(0).rows
    assert [row.segments for row in (first, second)] == [
        whole.explain(step).rows[1].segments for step in (0, 1)
    ]
    batch = next(iter(one))
    ids = [token for segment in first.segments for token in segment.ids]
    assert batch["input_ids"][0][: len(ids)].tolist() == ids


def test_a_path_is_no_dataset():
    with pytest.raises(ConfigError, match=r"dataset: 'rows\.jsonl' does not return rows by number"):
        DataLoaderBuilder().with_dataset("rows.jsonl").build()


def test_rows_of_like_length_stand_together_as_in_the_pipeline():
    rows = [{"text": text} for text in texts(90)]
    module = UniversalDataModule(
        rows, tokenizer=tokenizer(), batch_size=4, val_split=0.2, seed=5, group_by_length=8
    )
    plain = UniversalDataModule(rows, tokenizer=tokenizer(), batch_size=4, val_split=0.2, seed=5)
    dataset = module.dataset_config([rows[i] for i in module.splits.train], "train")
    spelled = Pipeline(PipelineConfig(datasets=(dataset,), seed=5)).source().tokenize()
    loader = module.train_dataloader()
    assert_same_batches(
        loader, spelled.load(LoadStageConfig(batch_size=4, group_by_length=8)).build()
    )
    padding = [
        sum((batch["attention_mask"] == 0).sum() for batch in one.train_dataloader())
        for one in (module, plain)
    ]
    assert padding[0] < 0.6 * padding[1]
    assert_same_batches(module.val_dataloader(), plain.val_dataloader())  # in order, as ever
    parts = [
        dataclasses.replace(module.options, rank=rank, world_size=2, drop_last=False)
        for rank in range(2)
    ]
    seen = [
        row.tobytes()
        for part in parts
        for batch in text_loader(dataset, part)
        for row in unpadded(batch)
    ]
    whole, again = (
        [
            row.tobytes()
            for batch in text_loader(dataset, DataLoaderConfig(batch_size=4, seed=seed))
            for row in unpadded(batch)
        ]
        for seed in (1, 9)
    )
    assert sorted(seen) == sorted(whole)
    assert again == whole, "rows come in their order, whatever the seed, unless they are shuffled"


def unpadded(batch):
    return [
        ids[mask == 1]
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def test_rows_whose_lengths_nobody_knows_are_not_grouped():
    with pytest.raises(
        ConfigError,
        match=r"group_by_length: how long rows of Images are is not known.*PreprocessedDataset",
    ):
        DataLoaderBuilder().with_dataset(Images()).with_options(group_by_length=4).build()
    with pytest.raises(ConfigError, match="seed: every rank would draw its own"):
        DataLoaderConfig(group_by_length=4, world_size=2)
