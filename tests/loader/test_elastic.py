"""The same batches for any number of processes, and states that go from one number to another."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.state import LoaderState
from laws import assert_same_batch, assert_same_batches
from loader_processes import finish, free_port, python
from loader_support import MemoryCache, plan_rows, some_docs
from pipelines import texts, two_datasets
from strategies import examples

# Each resumes from what the one before it saved. Of four, three devices each, some share rows and
# slots of every layout that can be shared;
# three and two divide it more evenly, and are left to `nox -s laws`.
COUNTS = (4, 1, 3, 2) if "EASYPIPE_EXAMPLES" in os.environ else (1, 4)


@pytest.mark.slow
def test_any_number_of_processes_sees_the_same_batches_and_reads_only_its_rows(tmp_path):
    """Real processes of jax.distributed with 12 devices in all; slots are split too in some of the
    layouts.
    """
    from easypipe.transforms.tokenizer.bpe import train_bpe

    two_datasets(tmp_path / "data")
    train_bpe(texts(200), 320, [], tmp_path / "tokenizer")
    seen = {}
    before = COUNTS[0]
    for count in COUNTS:
        port = free_port()
        processes = [
            python("one_process.py", port, count, i, tmp_path, before, devices=12 // count)
            for i in range(count)
        ]
        for process in processes:
            finish(process)
        seen[count] = [
            json.loads((tmp_path / f"report-{count}-{i}.json").read_text()) for i in range(count)
        ]
        before = count
    whole = seen[1][0]
    assert len(whole["batches"]["data, the whole chain"]) >= 4
    for layout, batches in whole["batches"].items():
        for count, reports in seen.items():
            for t, batch in enumerate(batches):
                together: dict[str, str] = {}
                for report in reports:
                    for place, content in report["batches"][layout][t].items():
                        assert together.setdefault(place, content) == content, (
                            f"{layout}, {count} processes, batch {t}: {place} differs"
                        )
                assert together == batch, f"{layout}, {count} processes, batch {t}"
            rows = [set(report["rows"][layout]) for report in reports]
            assert set.union(*rows) == set(whole["rows"][layout])
            if layout.startswith("data"):
                assert sum(map(len, rows)) == len(whole["rows"][layout]), (
                    f"{layout}, {count} processes: a row was read twice"
                )
            for report in reports:
                assert report["states"][layout] == whole["states"][layout], (
                    f"{layout}: states depend on the process"
                )


CACHE = MemoryCache(some_docs(np.random.Generator(np.random.PCG64(3)).integers(1, 60, 400)))


class Share:
    """The rows that one of several processes has to make of a batch, left on the host."""

    def __init__(self, batch_size: int, processes: int, process: int) -> None:
        self.local_rows = np.array_split(np.arange(batch_size), processes)[process]
        self.whole = processes == 1

    def place(self, batch):
        return batch


@examples(6)
@given(
    data=st.data(),
    shuffle=st.sampled_from([None, 7, 100]),
    strategy=st.sampled_from(["greedy", "pool", "first_fit"]),
)
def test_batches_do_not_depend_on_the_number_of_processes_from_1_to_64(data, shuffle, strategy):
    def make(share: Share | None = None) -> Loader:
        rows = plan_rows([CACHE, CACHE], weights=[0.8, 0.2], strategy=strategy, num_epochs=2)
        load = LoadStageConfig(
            batch_size=64,
            num_epochs=2,
            shuffle_buffer_size=shuffle,
            drop_last=False,
            prefetch_enabled=False,
        )
        one = Loader(rows, load)
        if share is not None:
            one._placements = {64: share}  # type: ignore[dict-item]
            one._local = {64: one._rows_here(64)}
        return one

    wanted = list(make())
    short = 64 - len(wanted[-1]["labels"])
    step = data.draw(st.integers(0, len(wanted) - 1))
    state = make().state_at(step).to_json()
    for processes in data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=3)):
        parts = []
        for process in range(processes):
            one = make(Share(64, processes, process))
            one.restore(state)
            parts.append(list(one))
        for t, batch in enumerate(wanted[step:], start=step):
            together = {
                name: np.concatenate([part[t - step][name] for part in parts]) for name in batch
            }
            if t == len(wanted) - 1 and short:
                assert not together["segment_ids"][64 - short :].any()
                together = {name: column[: 64 - short] for name, column in together.items()}
            assert_same_batch(batch, together, what=f"{processes} processes, batch {t}")


def test_a_state_of_step_one_million_is_small_and_found_without_what_stands_before():
    lengths = (
        np.random.Generator(np.random.PCG64(1)).lognormal(6, 1, 4000).astype(int).clip(1, 4000)
    )
    cache = MemoryCache(some_docs(lengths), parts=2)
    stored, ends = (
        np.array([len(d) for d in cache.docs], np.int32),
        np.array([d[-1] == 1 for d in cache.docs]),
    )
    cache.lengths, cache.has_eos = lambda docs: stored[docs], lambda docs: ends[docs]

    def make() -> Loader:
        rows = plan_rows([cache], seq_length=2048, strategy="greedy", window=4000, num_epochs=None)
        return Loader(rows, LoadStageConfig(batch_size=2, num_epochs=None, shuffle_buffer_size=64))

    planned = make()
    text = planned.state_at(1_000_000).to_json()
    assert len(text.encode()) <= 4096
    wanted = [planned.batch(1_000_000 + n) for n in range(3)]
    resumed = make()
    start = time.perf_counter()
    resumed.restore(text)
    batches = iter(resumed)
    got = [next(batches)]
    seconds = time.perf_counter() - start
    got += [next(batches), next(batches)]
    assert_same_batches(wanted, got)
    assert seconds < 0.2
    state = LoaderState.from_json(resumed.state().to_json())
    assert (state.batch, state.row) == (1_000_003, 2_000_006)
    again = make()  # save → resume → save → resume
    again.restore(state)
    batches.close()
    assert_same_batches([planned.batch(1_000_003)], [next(iter(again))])
