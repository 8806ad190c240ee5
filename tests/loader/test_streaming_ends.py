"""How a finite pass ends in streaming: streams that have ended hand their places in the batch to
the others, and nothing is lost.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import pipelines
from easypipe import DatasetConfig, LoadStageConfig, MixStageConfig, PackStageConfig, Pipeline
from easypipe.core.protocols import Shard
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.loader.loader import Loader
from easypipe.loader.streams.feed import Deal, Place, deal
from easypipe.plan.order import NEVER, given_by, known_before, rows_before
from laws import assert_conserved, assert_exact_resume, assert_same_batch, assert_same_batches
from strategies import examples


def write(
    folder: Path, files: list[list[int]], *, kind: str = "jsonl", texts: bool = False
) -> tuple[DatasetConfig, ...]:
    """Files of documents of so many tokens; the tokens of a document tell it from every other."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for i, lengths in enumerate(files):
        lines = []
        for length in lengths:
            number += 1
            lines.append(
                json.dumps(
                    {"text": f"{number} " * length}
                    if texts
                    else {"input_ids": [number % 251 + 1] * length}
                )
            )
        data = "".join(line + "\n" for line in lines).encode()
        path = folder / f"{i}.{kind}"
        path.write_bytes(zstandard.compress(data) if kind.endswith("zst") else data)
    return (DatasetConfig(name="code", data_files=str(folder)),)


def build(
    folder: Path,
    datasets: tuple[DatasetConfig, ...],
    *,
    pack: dict[str, Any] | None,
    **options: Any,
) -> Loader:
    values: dict[str, Any] = {
        "streaming": True,
        "seed": 3,
        "load": LoadStageConfig(batch_size=4, drop_last=False),
    } | options
    if pack is not None:
        values["pack"] = PackStageConfig(**({"seq_length": 16, "eos_token_id": 0} | pack))
    pipeline = Pipeline(pipelines.config(folder, datasets=datasets, **values)).source().tokenize()
    if "mix" in options:
        pipeline.mix()
    if pack is not None:
        pipeline.pack()
    return pipeline.load().build()


def tokens(batches: list[dict[str, np.ndarray]]) -> Counter[int]:
    found: Counter[int] = Counter()
    for batch in batches:
        found.update(np.asarray(batch[INPUT_IDS])[np.asarray(batch[SEGMENT_IDS]) > 0].tolist())
    return found


def padding(batch: dict[str, np.ndarray]) -> int:
    """Rows of nothing but padding."""
    return int((np.asarray(batch[SEGMENT_IDS]).max(axis=1) == 0).sum())


@given(
    ends=st.lists(st.one_of(st.integers(0, 9), st.just(NEVER)), min_size=1, max_size=6),
    count=st.integers(0, 70),
)
@examples(300)
def test_turns_pass_over_those_that_have_ended(ends: list[int], count: int) -> None:
    """Against the sentence itself: turn after turn, each stream that has a row left gives one,
    lowest number first.
    """
    order = [(turn, stream) for turn in range(72) for stream, end in enumerate(ends) if turn < end][
        : count + 1
    ]
    given_rows = given_by(np.array(ends), count)
    assert given_rows.tolist() == [
        sum(stream == s for _, stream in order[:count]) for s in range(len(ends))
    ]
    if len(order) > count:
        assert rows_before(np.array(ends), *order[count]) == count


@given(ends=st.lists(st.integers(0, 5), min_size=1, max_size=5), place=st.data())
@examples(300)
def test_only_ends_that_move_a_row_are_known_before_it(ends: list[int], place: Any) -> None:
    """Against the sentence itself: without the end of another stream the row is another one."""
    stream = place.draw(st.integers(0, len(ends) - 1))
    row = place.draw(st.integers(0, 6))
    known, all_ends = known_before(np.array(ends), row, stream), np.array(ends)
    all_ends[stream] = NEVER
    for other in range(len(ends)):
        without = all_ends.copy()
        without[other] = NEVER
        moves = rows_before(all_ends, row, stream) != rows_before(without, row, stream)
        if other != stream:
            assert known[other] == (ends[other] if moves else NEVER)


@given(
    files=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=1, max_size=4),
    huge=st.integers(0, 300),
    streams=st.sampled_from([1, 2, 3, 6]),
    each=st.sampled_from([1, 2, 4]),
    strategy=st.sampled_from(["greedy", "pool", "first_fit", "stream", None]),
    kind=st.sampled_from(["jsonl", "jsonl.zst"]),
    processes=st.integers(1, 4),
    num_epochs=st.integers(1, 2),
    ahead=st.sampled_from([1, 2]),
    drop_last=st.booleans(),
)
@examples(25)
def test_a_pass_loses_or_pads_less_than_a_batch_whatever_the_files(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[int]],
    huge: int,
    streams: int,
    each: int,
    strategy: str | None,
    kind: str,
    processes: int,
    num_epochs: int,
    ahead: int,
    drop_last: bool,
) -> None:
    """Nothing lost, the ledger closed, every state exact, and the same rows on every process,
    through the hand-over to the end.
    """
    if huge:
        files = [*files, [huge]]
    folder, size = tmp_path_factory.mktemp("ends"), streams * each
    datasets = write(folder / "data", files, kind=kind)

    def make(drop_last: bool = False) -> Loader:
        load = LoadStageConfig(
            batch_size=size,
            drop_last=drop_last,
            num_epochs=num_epochs,
            shuffle_buffer_size=5,
            prefetch_workers=ahead,
        )
        pack: dict[str, Any] = {"strategy": strategy} | (
            {"num_packers": 2} if strategy == "pool" else {}
        )
        return build(
            folder,
            datasets,
            pack=None if strategy is None else pack,
            load=load,
            num_streams=streams,
        )

    loader = make()
    batches, states = [], [loader.state().to_json()]
    for batch in loader:
        batches.append(batch)
        states.append(loader.state().to_json())
    ledger = loader.ledger()
    assert_conserved(ledger)
    assert all(padding(batch) == 0 for batch in batches[:-1])
    assert padding(batches[-1]) < size
    expected = Counter[int]()
    lengths = [length for of in files for length in of]
    for number, length in enumerate(lengths):
        expected[(number + 1) % 251 + 1] += length * num_epochs
    found = tokens(batches)
    del found[0]  # EOS
    assert found == expected
    rows = len(batches) * size - padding(batches[-1])
    assert ledger.find("load", "stream", "rows").out == {"in batches": rows}
    unit, total = ("bytes", sum(path.stat().st_size for path in (folder / "data").iterdir()))
    if kind == "jsonl.zst":
        unit, total = "files to each stream", len(files) * streams
    assert ledger.find("files", "code", unit).out == {"read": total * num_epochs}
    assert ledger.find("mix", "code", "documents").out == {"drawn": len(lengths) * num_epochs}

    if drop_last and rows >= size:
        full = make(drop_last=True)
        assert_same_batches(batches[: rows // size], full, what="drop_last")
        out = full.ledger().find("load", "stream", "rows").out
        assert out == {"in batches": rows // size * size} | (
            {"left out, for want of a full batch": rows % size} if rows % size else {}
        )
    again = make()
    # each state gives the next batch, and the next state: so all further ones
    for n, batch in enumerate(batches):
        again.restore(states[n])
        rest: Any = iter(again)
        assert_same_batch(batch, next(rest), what=f"resumed after batch {n}")
        assert again.state().to_json() == states[n + 1]
        assert_conserved(again.ledger())
        rest.close()
    again.restore(states[len(batches) // 2])
    list(again)
    out = again.ledger().find("files", "code", unit)
    assert (
        sum(out.into.values()) - sum(out.out.get(key, 0) for key in ("read", "before the state"))
        == 0
    )
    again.restore(states[-1])
    assert next(iter(again), None) is None
    # without packing, a width that all know has to be set
    processes = min(processes, size) if strategy else 1
    for rank in {0, processes - 1}:
        part = make()
        local = np.array_split(np.arange(size), processes)[rank]
        part._local = {size: local}
        assert_same_batches(
            [{name: column[local] for name, column in batch.items()} for batch in batches],
            part,
            what=f"process {rank}",
        )
        assert part.state().to_json() == loader.state().to_json()


@given(
    sizes=st.lists(st.integers(1, 1 << 20), max_size=200),
    forward=st.booleans(),
    streams=st.integers(1, 9),
)
@examples(100)
def test_work_is_dealt_by_bytes(sizes: list[int], forward: bool, streams: int) -> None:
    """Streams differ by no more than the largest entry, and by a few chunks where every file's
    chunks go round.
    """
    num_bytes, piece = np.array(sizes, np.int64), 1 << 12
    owners = deal(num_bytes, np.full(len(sizes), forward), streams, piece)
    loads = np.zeros(streams, np.int64)
    for owner, size in zip(owners.tolist(), sizes, strict=True):
        for chunk in range(-(-size // piece) if forward else 1):
            loads[(owner + chunk) % streams] += (
                min(piece, size - chunk * piece) if forward else size
            )
    assert loads.sum() == sum(sizes)
    assert not sizes or loads.max() - loads.min() <= (4 * piece if forward else max(sizes))
    equal = deal(np.full(3 * streams, 77), np.zeros(3 * streams, bool), streams, piece)
    assert (equal == np.arange(3 * streams) % streams).all()


def test_every_pass_deals_in_an_order_of_its_own() -> None:
    shards = tuple(Shard(name=f"{i}", num_rows=1, num_bytes=100) for i in range(50))
    made = Deal(SimpleNamespace(name="d", shards=shards), 1, seed=1, shuffle=True)  # type: ignore[arg-type]
    passes = [
        [made.chunk(Place(epoch, position)).shard for position in range(50)] for epoch in range(3)
    ]
    assert all(sorted(one) == list(range(50)) for one in passes)
    assert len(set(map(tuple, passes))) == 3


def test_weights_follow_the_step_through_the_hand_over(tmp_path: Path) -> None:
    """Stream 0 has all the long documents, so that it gives most rows in the end; still each batch
    is drawn by the weights of its step.
    """
    datasets = tuple(
        DatasetConfig(
            name=name,
            data_files=[{"input_ids": [10 + n] * (15 if i % 4 == 0 else 2)} for i in range(64)],
        )
        for n, name in enumerate("ab")
    )
    points = [{"step": 0, "weights": {"a": 1, "b": 0}}, {"step": 4, "weights": {"a": 0, "b": 1}}]

    def make(**load: Any) -> Loader:
        return build(
            tmp_path,
            datasets,
            pack={"strategy": "greedy"},
            mix=MixStageConfig(stop_strategy="first_exhausted", weight_schedule=points),
            load=LoadStageConfig(batch_size=8, drop_last=False, shuffle_buffer_size=3, **load),
            num_streams=4,
            order={"shuffle": False},
        )

    loader = make()
    batches, own = [], []
    for batch in loader:
        batches.append(batch)
        ids = np.asarray(batch[INPUT_IDS])[np.asarray(batch[SEGMENT_IDS]) > 0]
        own.append(set((ids[ids >= 10] - 10).tolist()))
    assert len(own) > 6
    assert own[:4] == [{0}] * 4
    assert own[6:] == [{1}] * (len(own) - 6), "later than two batches behind the step"
    assert_conserved(loader.ledger())
    assert_exact_resume(make, len(batches))
    assert_same_batches(batches, make(prefetch_workers=3))
