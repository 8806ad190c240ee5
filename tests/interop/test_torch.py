"""Loaders under torch's DataLoader: every batch once and in order, states, workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from easypipe import (
    DataLoaderConfig,
    DataLoaderFactory,
    PromptConfig,
    PromptEngine,
    StreamingPreprocessedDataset,
)
from easypipe.core.errors import ConfigError, StateError
from easypipe.loader.loader import Loader
from laws import assert_same_batches
from pipelines import config, texts, tokenizer

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from easypipe.interop.torch import TorchBatches, TorchRows  # noqa: E402

# A forked worker inherits a parent that has threads (jax, numba); it runs neither.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*")

ROWS = [{"x": np.full(3, i, np.float32), "labels": i} for i in range(22)]


def loader(**options: object) -> Loader:
    return DataLoaderFactory().create_dataloader(
        ROWS, DataLoaderConfig(**{"batch_size": 3, "shuffle": True, "seed": 4, **options})
    )


def test_batches_are_the_loaders_as_tensors():
    batches = list(DataLoader(TorchBatches(loader(drop_last=False)), batch_size=None))
    assert isinstance(TorchBatches(loader()), IterableDataset)
    assert {batch["labels"].dtype for batch in batches} == {torch.int64}
    assert {batch["x"].dtype for batch in batches} == {torch.float32}
    wanted = [
        batch | {"labels": batch["labels"].astype(np.int64)} for batch in loader(drop_last=False)
    ]
    assert_same_batches(
        [{name: column.numpy() for name, column in batch.items()} for batch in batches], wanted
    )
    assert len(TorchBatches(loader())) == 7


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_give_every_batch_once_and_in_order(num_workers: int):
    # prefetch in the parent would leave threads behind that a fork does not take along
    wanted = [batch["labels"].tolist() for batch in loader(num_workers=0)]
    data = DataLoader(
        TorchBatches(loader(num_workers=0)),
        batch_size=None,
        num_workers=num_workers,
        timeout=60 if num_workers else 0,
    )
    for _ in range(2):
        assert [batch["labels"].tolist() for batch in data] == wanted


def test_text_of_a_pipeline(tmp_path: Path):
    from easypipe import Pipeline

    made = (
        Pipeline(config(tmp_path))
        .source()
        .tokenize()
        .mix()
        .pack({"seq_length": 32})
        .load({"batch_size": 2})
        .build()
    )
    first = next(iter(TorchBatches(made)))
    np.testing.assert_array_equal(first["labels"].numpy(), next(iter(made))["labels"])


def test_law_exact_resume():
    wanted = [batch["labels"].tolist() for batch in TorchBatches(loader())]
    data = TorchBatches(loader())
    batches = iter(data)
    for _ in range(3):
        next(batches)
    state = data.state_dict()
    other = TorchBatches(loader())
    other.load_state_dict(state)
    assert [batch["labels"].tolist() for batch in other] == wanted[3:]
    second = [batch["labels"].tolist() for batch in other]  # the next pass, in its own order
    assert second != wanted
    other.set_epoch(0)
    assert [[batch["labels"].tolist() for batch in other] for _ in range(2)] == [wanted, second]
    with pytest.raises(ConfigError, match="begins at its first batch every time"):
        TorchBatches(loader().loader(0)).set_epoch(1)
    with pytest.raises(StateError, match=r"not a state of an easypipe loader: it has .'step'."):
        other.load_state_dict({"step": 3})


def test_workers_go_through_the_passes():
    passes = [
        [batch["labels"].tolist() for batch in TorchBatches(loader().loader(epoch))]
        for epoch in range(3)
    ]
    kept = DataLoader(
        TorchBatches(loader(num_workers=0)),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        timeout=60,
    )
    next(iter(kept))  # abandoned: no worker knows how far the others came
    assert [[batch["labels"].tolist() for batch in kept] for _ in range(2)] == passes[1:]
    data = TorchBatches(loader(num_workers=0))
    for epoch in range(2):
        data.set_epoch(epoch)
        assert [
            batch["labels"].tolist()
            for batch in DataLoader(data, batch_size=None, num_workers=2, timeout=60)
        ] == passes[epoch]


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_law_exact_resume_of_a_worker(stop: int, monkeypatch: pytest.MonkeyPatch):
    """As torchdata's StatefulDataLoader does it: each worker is asked for its state, and given it
    back.
    """
    wanted = [batch["labels"].tolist() for batch in TorchBatches(loader())]
    for worker in range(3):
        monkeypatch.setattr(
            "easypipe.interop.torch.torch_worker", lambda worker=worker: (worker, 3)
        )
        data = TorchBatches(loader())
        batches = iter(data)
        for _ in range(stop):
            next(batches)
        other = TorchBatches(loader())
        other.load_state_dict(data.state_dict())
        assert [batch["labels"].tolist() for batch in other] == wanted[worker::3][stop:]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_state_is_refused_in_a_process_whose_workers_read(num_workers: int):
    """It was that before the first batch: all batches came again."""
    data = TorchBatches(loader(num_workers=0))
    batches = iter(DataLoader(data, batch_size=None, num_workers=num_workers, timeout=60))
    read = [next(batches)["labels"].tolist() for _ in range(3)]
    with pytest.raises(StateError, match="workers read the batches, and this process does not"):
        data.state_dict()
    del batches
    data.set_epoch(0)
    start = data.state_dict()
    data.load_state_dict(start)
    assert [batch["labels"].tolist() for batch, _ in zip(data, read, strict=False)] == read
    assert data.state_dict() != start  # this process read them itself


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_state_loaded_beside_the_workers_is_refused(num_workers: int):
    data = TorchBatches(loader(num_workers=0))
    data.load_state_dict(TorchBatches(loader()).state_dict())
    with pytest.raises(Exception, match="state was loaded in the process that started it"):
        next(iter(DataLoader(data, batch_size=None, num_workers=num_workers, timeout=60)))


def test_what_workers_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("easypipe.interop.torch.torch_worker", lambda: (0, 2))
    with pytest.raises(
        ConfigError, match=r"num_workers: 2 workers, but its batches lie on devices"
    ):
        next(iter(TorchBatches(loader(prefetch_to_device=True))))
    with pytest.raises(ConfigError, match="2 workers would each read all of list"):
        iter(TorchRows(ROWS))


def test_f26_a_streaming_dataset_shares_itself_over_workers_as_printed():
    class Rows:
        def __iter__(self):
            return iter({"prompt": text, "completion": " yes"} for text in texts(30))

    engine = PromptEngine(tokenizer(), PromptConfig(format_type="prompt_completion"))
    dataset = StreamingPreprocessedDataset(
        hf_iterable=Rows(), prompt_engine=engine, buffer_size=1000
    )
    rows = [tuple(row["input_ids"].tolist()) for row in dataset]
    for num_workers in (0, 2):
        seen = [
            tuple(row["input_ids"].tolist())
            for row in DataLoader(
                TorchRows(dataset),
                batch_size=None,
                num_workers=num_workers,
                timeout=60 if num_workers else 0,
            )
        ]
        assert sorted(seen) == sorted(rows)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stream_that_shares_its_rows_over_workers_is_not_shared_twice(world_size: int):
    """As those of `datasets` do: two files for two workers, of which each would have lost every
    other row.
    """
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"prompt": texts(30), "completion": [" yes"] * 30})
    engine = PromptEngine(tokenizer(), PromptConfig(format_type="prompt_completion"))
    wanted = sorted(tuple(engine.encode(row)["input_ids"].tolist()) for row in table)
    seen = []
    for rank in range(world_size):
        rows = StreamingPreprocessedDataset(
            table.to_iterable_dataset(num_shards=2), engine, rank=rank, world_size=world_size
        )
        data = DataLoader(TorchRows(rows), batch_size=None, num_workers=2, timeout=60)
        seen += [tuple(row["input_ids"].tolist()) for row in data]
    assert sorted(seen) == wanted


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_of_a_stream_are_refused_to_workers(
    monkeypatch: pytest.MonkeyPatch, world_size: int
):
    stream = DataLoaderFactory().create_dataloader(
        IterableRows(), DataLoaderConfig(batch_size=3, world_size=world_size)
    )
    assert len(list(TorchBatches(stream))) == (8 if world_size == 1 else 4)
    monkeypatch.setattr("easypipe.interop.torch.torch_worker", lambda: (0, 2))
    with pytest.raises(ConfigError, match="2 workers, but streams are read forward"):
        next(iter(TorchBatches(stream)))


class IterableRows:
    def __iter__(self):
        return iter(ROWS)
