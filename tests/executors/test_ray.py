"""Tokenizing on a real Ray cluster of two nodes on this machine: same bytes as here, whoever dies
on the way.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from easypipe import (
    BaseStage,
    ConfigError,
    DatasetConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    SourceError,
)
from easypipe.cache.config import CacheConfig
from easypipe.core import storage
from easypipe.core.protocols import ProgressEvent
from easypipe.executors.ray import _warn_if_none_is_large_enough, prepare_on_ray
from easypipe.pipeline import _Remade
from easypipe.stages.source.stage import SourceStage
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.stages.tokenize.stage import TokenizeStage
from golden.batches import chain, load, mixed, pack
from golden.compare import kept
from golden.data import config as golden_config
from golden.digests import batches
from stores import Store
from token_support import small_tokenizer_folder, texts

ray = pytest.importorskip("ray", reason="needs the extra 'ray'")


@pytest.fixture(scope="module", autouse=True)
def two_nodes() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    # workers cannot import this file
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    cluster.wait_for_nodes()
    yield
    ray.shutdown()
    cluster.shutdown()


def write_files(folder: Path, files: int, rows: int = 20) -> list[str]:
    folder.mkdir()
    paths = []
    for number in range(files):
        path = folder / f"part-{number:05d}.jsonl"
        path.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts(rows, seed=number))
        )
        paths.append(str(path))
    return paths


def pipeline(
    files: list[str], folder: Path, stage: BaseStage | None = None, listener=None, **options
) -> Pipeline:
    config = PipelineConfig(
        datasets=(
            DatasetConfig(name="d", data_files=files, tokenizer=str(small_tokenizer_folder())),
        ),
        seed=1,
        cache_dir=folder / "cache",
        save=SaveStageConfig(output_dir=folder / "out", num_shards=2),
        **options,
    )
    made = Pipeline(config, progress=listener or (lambda event: None)).source()
    return (made if stage is None else made.add_stage(stage)).tokenize().save()


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = [
        file
        for kept in ("tokens", "out")
        for file in sorted((folder / kept).rglob("*"))
        if file.is_file()
    ]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_f15_a_cluster_makes_the_bytes_that_this_process_makes(tmp_path: Path) -> None:
    files = write_files(tmp_path / "data", files=7)
    here, there = tmp_path / "here", tmp_path / "there"
    pipeline(files, here).build()
    events: list[ProgressEvent] = []
    made = pipeline(files, there, listener=events.append, executor="ray")
    assert made.pending() == {"d": (7, 7)}
    made.build()
    assert made.pending() == {"d": (0, 7)}
    assert bytes_of(here / "cache") == bytes_of(there / "cache")
    assert bytes_of(here) == bytes_of(there)
    assert [(e.done, e.total) for e in events if e.unit == "ranges"][-1] == (7, 7)
    assert made.get_data()["d"].materialize().manifest.facts["ranges_reused"] == 7, (
        "nothing was tokenized by this process"
    )


def test_a_cluster_makes_the_golden_batches(tmp_path: Path) -> None:
    """Parts of a job array make them in tests/golden."""
    made = golden_config(tmp_path, mix=mixed(), pack=pack("first_fit"), load=load(), executor="ray")
    assert batches(chain(made).build()) == kept("documents")["prepared_apart"]


class DieOnce(BaseStage):
    """The first worker that reads the third file dies as by `kill -9`."""

    name = "die_once"

    def process(self, data, context):
        marker = self.config

        class Deadly:
            def __init__(self, inner):
                self.inner = inner

            def __getattr__(self, name):
                return getattr(self.inner, name)

            def read(self, shard, start, stop) -> pa.RecordBatch:
                if shard == 2 and not os.path.exists(marker):
                    Path(marker).touch()
                    os._exit(1)
                return self.inner.read(shard, start, stop)

            scan = select = None

        return {name: Deadly(source) for name, source in data.items()}


def test_f15_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    files = write_files(tmp_path / "data", files=5)
    pipeline(files, tmp_path / "here").build()
    pipeline(files, tmp_path / "there", DieOnce(str(tmp_path / "died")), executor="ray").build()
    assert (tmp_path / "died").exists()
    here, there = (bytes_of(tmp_path / name / "cache") for name in ("here", "there"))
    assert here == there


class DieAt(BaseStage):
    """The first worker that comes to its `at`-th step of a commit is killed there."""

    name = "die_at"

    def process(self, data, context):
        at, marker = self.config
        steps = itertools.count(1)

        def hook(step: str, path: str) -> None:
            if next(steps) == at and not os.path.exists(marker):
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)

        if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            storage.set_fault_hook(hook)
        return data


# four steps each of a token file, its record, and those of the next range
POINTS = range(1, 17) if os.environ.get("EASYPIPE_DISASTERS") == "all" else (2, 8)


@pytest.mark.parametrize("at", POINTS)
def test_a_worker_killed_at_any_step_of_a_commit_leaves_nothing(tmp_path: Path, at: int) -> None:
    files, marker = write_files(tmp_path / "data", files=40, rows=2), tmp_path / "died"
    pipeline(files, tmp_path / "here").build()
    pipeline(files, tmp_path / "there", DieAt((at, str(marker))), executor="ray").build()
    assert marker.exists()
    here, there = (bytes_of(tmp_path / name / "cache") for name in ("here", "there"))
    assert here == there
    assert not [*(tmp_path / "there").rglob(f"{storage.TEMPORARY}*")]


def test_f15_an_error_is_raised_as_it_was_there_and_what_was_done_stays(tmp_path: Path) -> None:
    files = write_files(tmp_path / "data", files=4)
    good = Path(files[2]).read_text()
    Path(files[2]).write_text(good + '{"text": 3}\n')
    made = pipeline(files, tmp_path / "job", executor="ray")
    with pytest.raises(SourceError, match=r"part-00002\.jsonl, row 20") as caught:
        made.build()
    assert type(caught.value) is SourceError
    assert any("while tokenizing dataset 'd'" in note for note in caught.value.__notes__)
    Path(files[2]).write_text(good)
    again = pipeline(files, tmp_path / "job", executor="ray")
    missing, total = again.pending()["d"]
    assert total == 4
    assert missing < 4
    again.build()


def test_f15_workers_that_write_elsewhere_are_noticed(tmp_path: Path) -> None:
    files = write_files(tmp_path / "data", files=2)
    here, elsewhere = pipeline(files, tmp_path / "here"), pipeline(files, tmp_path / "elsewhere")
    with pytest.raises(
        ConfigError,
        match=r"cache_dir: Ray's workers are done, and 2 of 2 ranges of dataset 'd' are not in "
        r"this folder",
    ):
        prepare_on_ray(
            {name: source.writer for name, source in here.tokenized().items()},
            _Remade.of(
                elsewhere.get_context(), [SourceStage(), TokenizeStage(TokenizeStageConfig())]
            ),
        )
    assert elsewhere.pending() == {"d": (0, 2)}


def test_tasks_larger_than_every_machine_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    _warn_if_none_is_large_enough(ray, 1)
    assert not caplog.messages
    _warn_if_none_is_large_enough(ray, 64)
    assert "tokenize.num_workers=64 CPUs, and no machine of the cluster has more" in caplog.text


def test_f15_without_ray_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"executor: 'ray' needs the package ray.*easypipe\[ray\]"
    ):
        pipeline(write_files(tmp_path / "data", files=1), tmp_path / "job", executor="ray").build()


def test_f15_many_tiny_files_cost_little_each(tmp_path: Path) -> None:
    files = write_files(tmp_path / "data", files=400, rows=1)
    events: list[ProgressEvent] = []
    made = pipeline(files, tmp_path / "job", listener=events.append, executor="ray")
    pipeline(files[:2], tmp_path / "warm", executor="ray").build()  # workers are up
    started = time.perf_counter()
    made.build()
    each = (time.perf_counter() - started) / len(files)
    # 20 ms on a quiet machine: benchmarks are for that
    assert each < 0.1, f"{each * 1e3:.0f} ms for each file"
    told = [event.done for event in events if event.unit == "ranges"]
    assert len(told) < 100, "a task has many of them"
    assert told == sorted(told)
    assert told[-1] == 400


def test_a_cache_in_a_bucket_is_filled_by_the_nodes(tmp_path: Path, s3: Store) -> None:
    files, bucket = write_files(tmp_path / "data", 6), s3.new()
    made = []
    for name, executor in (("here", "local"), ("spread", "ray")):
        url = f"{bucket}/{name}"
        options = {
            "cache_dir": url,
            "cache": CacheConfig(storage_options=s3.options),
            "executor": executor,
            "save": None,
        }
        config = PipelineConfig(
            datasets=(
                DatasetConfig(name="d", data_files=files, tokenizer=str(small_tokenizer_folder())),
            ),
            seed=1,
            **options,
        )
        chain = Pipeline(config).source().tokenize()
        chain.copy().save({"output_dir": tmp_path / name, "num_shards": 2}).build()
        facts = chain.get_data()["d"].materialize().manifest.facts
        assert facts["ranges_reused"] == (6 if executor == "ray" else 0), (
            "nothing was tokenized by this process"
        )
        made.append(
            {file: data for file, data in s3.files(url).items() if file.startswith("tokens/")}
        )
    assert made[0] == made[1]
    assert len(made[0]) == 6
    assert [path.read_bytes() for path in sorted((tmp_path / "here").glob("part-*"))] == [
        path.read_bytes() for path in sorted((tmp_path / "spread").glob("part-*"))
    ]
