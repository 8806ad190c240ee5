"""Streaming under the laws: every document once, exact resume at every batch, the same rows for any
number of hosts and threads.
"""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

import forked
import pipelines
from easypipe import (
    DatasetConfig,
    Drop,
    Filter,
    LoadStageConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    ShardedDataSource,
)
from easypipe.core.config import from_dict
from easypipe.core.errors import (
    BudgetError,
    ConfigError,
    SourceError,
    StallError,
    StateError,
    TokenizerError,
)
from easypipe.core.protocols import PipelineContext
from easypipe.core.schema import INPUT_IDS, LABELS, LOSS_MASK, POSITION_IDS, SEGMENT_IDS
from easypipe.loader.config import default_streams
from easypipe.loader.loader import Loader
from easypipe.loader.rows.rows import Share
from easypipe.loader.state import LoaderState
from easypipe.loader.streams import feed, spec
from easypipe.loader.streams.feed import Place
from easypipe.loader.streams.state import StreamState, from_text, to_text
from easypipe.sources.formats import forward
from easypipe.sources.formats.forward import ForwardSource, open_forward
from easypipe.sources.open import open_files
from easypipe.sources.splits import limited
from easypipe.stages.load.stage import ForwardDocuments
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from laws import (
    assert_conserved,
    assert_exact_resume,
    assert_labels,
    assert_no_new_threads,
    assert_rows_well_formed,
    assert_same_batches,
)
from strategies import examples

ALL = MixStageConfig(stop_strategy="all_exhausted", weights={"code": 0.7, "docs": 0.3})


def build(
    folder: Path,
    *,
    load: dict[str, Any] | None = None,
    pack: dict[str, Any] | None = None,
    **options: Any,
) -> Loader:
    """The two datasets of `pipelines`, streamed, packed into rows of 64, in batches of 4 with
    nothing left out.
    """
    values: dict[str, Any] = {
        "streaming": True,
        "mix": ALL,
        "load": LoadStageConfig(**({"batch_size": 4, "drop_last": False} | (load or {}))),
    }
    values["pack"] = PackStageConfig(**({"seq_length": 64} | (pack or {})))
    config = pipelines.config(folder, **(values | options))
    pipeline = Pipeline(config).source().tokenize()
    if config.mix is not None:
        pipeline.mix()
    if config.pack.enabled:
        pipeline.pack()
    return pipeline.load().build()


def segments(batches: list[dict[str, np.ndarray]]) -> Counter[tuple[int, ...]]:
    """Every piece of a document that was seen, with how often."""
    found: Counter[tuple[int, ...]] = Counter()
    for batch in batches:
        for ids, of in zip(
            np.asarray(batch[INPUT_IDS]), np.asarray(batch[SEGMENT_IDS]), strict=True
        ):
            found.update(
                tuple(ids[of == segment].tolist())
                for segment in range(1, int(of.max(initial=0)) + 1)
            )
    return found


def cached_segments(folder: Path, **options: Any) -> Counter[tuple[int, ...]]:
    values = {
        "mix": ALL,
        "pack": PackStageConfig(seq_length=64),
        "load": LoadStageConfig(batch_size=1),
    } | options
    return segments(
        list(
            Pipeline(pipelines.config(folder, **values))
            .source()
            .tokenize()
            .mix()
            .pack()
            .load()
            .build()
        )
    )


def one(
    folder: Path, texts: list[str], name: str = "a.jsonl", **options: Any
) -> tuple[DatasetConfig, ...]:
    """A dataset of one file, compressed and formatted as its name says."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    data = "".join(
        (text if ".txt" in name else json.dumps({"text": text})) + "\n" for text in texts
    ).encode()
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(data, mtime=0))
    elif name.endswith(".zst"):
        path.write_bytes(zstandard.compress(data))
    else:
        path.write_bytes(data)
    return (DatasetConfig(name="code", data_files=str(path), **options),)


# Laws


@pytest.mark.parametrize("strategy", ["greedy", "pool", "first_fit"])
def test_a_pass_holds_what_the_cached_mode_holds_each_document_once(
    tmp_path: Path, strategy: str
) -> None:
    loader = build(tmp_path, pack={"strategy": strategy})
    batches = list(loader)
    assert segments(batches) == cached_segments(tmp_path)
    for batch in batches:
        assert_rows_well_formed({k: np.asarray(v) for k, v in batch.items()})
        assert_labels(batch)
    assert_conserved(loader.ledger())
    assert loader.ledger().find("mix", "code", "documents").out == {"drawn": 60}
    assert loader.ledger().find("stream", "docs", "rows").out == {"documents": 90}


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.txt.zst", "a.parquet"]
)
def test_every_format_gives_every_document_once_and_resumes(tmp_path: Path, name: str) -> None:
    texts = pipelines.texts(70, 3)
    datasets = one(tmp_path / "data", texts, name)
    expected = cached_segments(
        tmp_path, datasets=datasets, mix=MixStageConfig(stop_strategy="all_exhausted")
    )

    def make() -> Loader:
        return build(tmp_path, datasets=datasets, mix=None)

    assert segments(list(make())) == expected
    assert_exact_resume(make, 8, hops=(1, 2), stops=(0, 1, 3))


def test_resume_is_exact_at_every_batch(tmp_path: Path) -> None:
    datasets = pipelines.two_datasets(tmp_path / "data", 20, 30)
    options: dict[str, Any] = {
        "datasets": datasets,
        "load": {"num_epochs": 2, "shuffle_buffer_size": 10},
    }
    total = len(list(build(tmp_path, **options)))
    assert total >= 8
    assert_exact_resume(lambda: build(tmp_path, **options), total)
    assert_exact_resume(
        lambda: build(tmp_path, **options), total, hops=(1, 3), stops=range(0, total, 4)
    )
    for stop in range(0, total, 3):
        begun, resumed = build(tmp_path, **options), build(tmp_path, **options)
        list(itertools.islice(iter(begun), stop))
        resumed.restore(begun.state())
        assert len(list(resumed)) == total - stop
        assert_conserved(resumed.ledger())
        [rows] = [one.out for one in resumed.ledger().entries if one.stage == "load"]
        assert not rows.get("waiting"), "rows before the state are not waiting"


def test_endless_mixtures_resume_too(tmp_path: Path) -> None:
    mix = MixStageConfig(weights={"code": 0.8, "docs": 0.2})
    options: dict[str, Any] = {"mix": mix, "load": {"batch_size": 2, "shuffle_buffer_size": 7}}
    assert_exact_resume(lambda: build(tmp_path, **options), 60, hops=(2, 5), stops=range(0, 60, 6))
    loader = build(tmp_path, **options)
    list(itertools.islice(iter(loader), 60))
    drawn = {
        name: loader.ledger().find("mix", name, "documents").out["drawn"]
        for name in ("code", "docs")
    }
    assert 3.5 < drawn["code"] / drawn["docs"] < 4.5
    assert_conserved(loader.ledger())


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    streams=st.sampled_from([1, 2, 3, 6]),
    window=st.integers(1, 30),
    compressed=st.booleans(),
    stop=st.integers(0, 12),
)
@examples(15)
def test_any_shards_and_streams(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    streams: int,
    window: int,
    compressed: bool,
    stop: int,
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    (folder / "data").mkdir()
    written = 0
    for i, size in enumerate(sizes):
        lines = [json.dumps({"text": f"{i} {j} " + "word " * (j % 9)}) for j in range(size)]
        data = ("\n".join(lines) + ("\n" if i % 2 or not lines else "")).encode()
        path = folder / "data" / f"{i}.jsonl{'.zst' if compressed else ''}"
        path.write_bytes(zstandard.compress(data) if compressed else data)
        written += size
    if not written:
        return
    datasets = (DatasetConfig(name="code", data_files=str(folder / "data")),)
    options: dict[str, Any] = {
        "datasets": datasets,
        "mix": None,
        "num_streams": streams,
        "pack": {"seq_length": 16},
    }
    options["load"] = {"batch_size": 6, "shuffle_buffer_size": window}
    loader = build(folder, **options)
    batches = list(loader)
    ledger = loader.ledger()
    assert_conserved(ledger)
    assert ledger.find("mix", "code", "documents").out == {"drawn": written}
    placed = ledger.find("pack", "code", "tokens").out["placed"]
    assert sum(int((batch[SEGMENT_IDS] > 0).sum()) for batch in batches) == placed
    assert_exact_resume(
        lambda: build(folder, **options), len(batches), stops=[min(stop, len(batches))]
    )


def test_neither_threads_nor_prefetching_change_a_batch(tmp_path: Path) -> None:
    expected = list(build(tmp_path))
    for load, workers in (
        ({"prefetch_enabled": False}, 1),
        ({"prefetch_buffer_size": 1}, 3),
        ({"prefetch_buffer_size": 50}, 2),
    ):
        made = build(tmp_path, load=load, tokenize={"num_workers": workers})
        assert_same_batches(expected, made, what=f"{load}, {workers} workers")


def test_rows_of_a_stream_do_not_depend_on_who_reads_the_others(tmp_path: Path) -> None:
    """A host with some of the rows reads only their streams, and makes the same rows."""
    endless: dict[str, Any] = {
        "mix": MixStageConfig(),
        "load": {"batch_size": 8, "num_epochs": None, "shuffle_buffer_size": 16},
        "num_streams": 2,
    }
    whole = list(itertools.islice(iter(build(tmp_path, **endless)), 12))
    for rows in (range(4), range(4, 8), range(2, 6)):
        part = build(tmp_path, **endless)
        part._local = {8: np.array(rows)}
        assert part.rows.own(Share(part._local)) == sorted({row // 4 for row in rows})
        for expected, made in zip(whole, part, strict=False):
            assert all((expected[column][rows] == made[column]).all() for column in expected)
    # of a batch that streams do not divide, any row may be of any stream
    assert build(tmp_path, **endless).rows.own(Share({8: np.arange(4), 7: np.arange(3)})) == [0, 1]


@pytest.mark.slow
def test_processes_read_their_own_streams_and_resume_from_each_other(tmp_path: Path) -> None:
    """1 and 2 real processes: the same rows, each process its own streams, states that another
    number of them goes on from.
    """
    shutil.copytree(pipelines.tokenizer(), tmp_path / "tokenizer")
    pipelines.two_datasets(tmp_path / "data")
    script = Path(__file__).with_name("stream_process.py")
    path = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    asked = os.environ.get("XLA_FLAGS", "")
    reports = {}
    for count, before in ((1, 0), (2, 1)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{asked} --xla_force_host_platform_device_count={4 // count}",
            "PYTHONPATH": path,
        }
        command = [sys.executable, str(script), str(port), str(count)]
        running = [
            forked.Popen(
                [*command, str(i), str(tmp_path), str(before)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(count)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in running]
        assert not any(process.returncode for process in running), "\n".join(
            output[-3000:] for output in outputs
        )
        reports[count] = [
            json.loads((tmp_path / f"streams-{count}-{i}.json").read_text()) for i in range(count)
        ]
    whole = reports[1][0]
    for kind in ("endless", "finite"):
        parts = [report["batches"][kind] for report in reports[2]]
        together = [
            {key: value for part in batch for key, value in part.items()}
            for batch in zip(*parts, strict=True)
        ]
        assert together == whole["batches"][kind], kind
        assert all(report["states"][kind] == whole["states"][kind] for report in reports[2])
    assert [report["streams"]["endless"] for report in reports[2]] == [[0, 1], [2, 3]]
    assert all(report["streams"]["finite"] == [0, 1, 2, 3] for report in reports[2])


def test_epochs_come_in_another_order(tmp_path: Path) -> None:
    once, twice = list(build(tmp_path)), list(build(tmp_path, load={"num_epochs": 2}))
    assert segments(twice) == Counter({piece: 2 * count for piece, count in segments(once).items()})
    lines = one(tmp_path / "lines", pipelines.texts(40, 3))
    options: dict[str, Any] = {
        "datasets": lines,
        "mix": None,
        "num_streams": 1,
        "order": {"shuffle": False},
    }
    in_order = list(build(tmp_path, pack={"shuffle_packed": False}, **options))
    assert_same_batches(
        in_order, build(tmp_path, pack={"shuffle_packed": False}, seed=99, **options)
    )
    known = load_tokenizer(TokenizerConfig(name_or_path=pipelines.tokenizer()))
    read = [known.decode(piece, skip_special_tokens=True) for piece in segments(in_order)]
    assert read[:20] == pipelines.texts(40, 3)[:20]


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    first, other = (
        np.concatenate([b[INPUT_IDS] for b in build(tmp_path, seed=seed)][:3]) for seed in (1, 2)
    )
    assert (first != other).any()


# State


def test_a_state_is_small(tmp_path: Path) -> None:
    datasets = pipelines.two_datasets(tmp_path / "data", 900, 900)
    loader = build(
        tmp_path,
        datasets=datasets,
        load={"batch_size": 64, "num_epochs": None, "shuffle_buffer_size": 9},
        num_streams=16,
        mix=MixStageConfig(),
    )
    next(iter(loader))
    text = loader.state().to_json()
    assert len(text) <= 4096 + 48 * 16 * 2
    assert all(len(stream) <= 2 * 48 for stream in loader.state().hint)
    worst = StreamState(
        first_row=1 << 40,
        epoch=1000,
        deficits=((1 << 40) - 1,),
        active=(True,),
        drawn=(Place(1000, 1 << 20, 1 << 24, 1 << 16),),
    )
    assert len(to_text(worst)) <= 48
    assert from_text(to_text(worst), 1) == worst
    negative = StreamState(
        first_row=3,
        epoch=0,
        deficits=(-5, 4),
        active=(True, False),
        drawn=(Place(), Place(1, 2, 3, 4)),
    )
    assert from_text(to_text(negative), 2) == negative
    with pytest.raises(StateError, match="is not a state of a stream"):
        from_text(to_text(negative), 3)


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    loader = build(tmp_path)
    next(iter(loader))
    state = loader.state().to_json()
    others: list[tuple[dict[str, Any], str]] = [
        ({"seed": 8}, "plan"),
        ({"num_streams": 2}, "config and plan"),
        ({"pack": {"seq_length": 32}}, "plan"),
    ]
    for options, changed in others:
        with pytest.raises(
            StateError, match=f"{changed} changed since this state was saved"
        ) as raised:
            build(tmp_path, **options).restore(LoaderState.from_json(state))
        assert "allow_changed" not in str(raised.value)
        with pytest.raises(
            ConfigError, match="allow_changed: a stream can continue only where its files were left"
        ):
            build(tmp_path, **options).restore(state, allow_changed=["plan"])
    build(tmp_path).restore(state)


# Ends


def test_drop_last_ends_before_the_first_batch_that_is_not_full(tmp_path: Path) -> None:
    whole, full = (
        list(build(tmp_path, load={"batch_size": 16})),
        list(build(tmp_path, load={"batch_size": 16, "drop_last": True})),
    )
    assert len(full) == len(whole) - 1
    assert_same_batches(whole[: len(full)], full)
    assert all((batch[SEGMENT_IDS].max(axis=1) > 0).all() for batch in full)
    padding = whole[len(full)]
    empty = padding[SEGMENT_IDS].max(axis=1) == 0
    assert empty.any()
    assert (padding[LABELS][empty] == -100).all()


def test_first_exhausted_ends_a_stream_where_a_dataset_would_have_to_give_more(
    tmp_path: Path,
) -> None:
    loader = build(
        tmp_path,
        mix=MixStageConfig(stop_strategy="first_exhausted", weights={"code": 0.5, "docs": 0.5}),
        num_streams=1,
    )
    batches = list(loader)
    ledger = loader.ledger()
    assert_conserved(ledger)
    assert ledger.find("mix", "code", "documents").out == {"drawn": 60}
    docs = ledger.find("mix", "docs", "documents").out
    assert docs["drawn"] in (60, 61)
    assert docs["left at the end of an epoch"] > 0
    assert sum(ledger.find("files", "docs", "bytes").into.values()) > 0
    assert segments(batches)


def test_a_dataset_too_small_for_its_streams(tmp_path: Path) -> None:
    tiny = (DatasetConfig(name="code", data_files=[{"text": "one"}, {"text": "two"}]),)
    assert sum(segments(list(build(tmp_path, datasets=tiny, mix=None))).values()) == 2
    endless = build(tmp_path, datasets=tiny, mix=None, load={"num_epochs": None})
    with pytest.raises(
        ConfigError, match=r"num_streams: a whole pass of stream \d of 4 .* had no row"
    ):
        next(iter(endless))
    assert next(
        iter(build(tmp_path, datasets=tiny, mix=None, load={"num_epochs": None}, num_streams=1))
    )


def test_it_has_no_length(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"has no len\(\): its rows are not counted"):
        len(build(tmp_path))


# Rows that are bad, and rows that are not packed


def test_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(
        '\n{"text": "good one"}\n{"text": nonsense}\n{"text": "good two"}\n{"text": ""}\n{"text": '
        '"good three"}\n'
    )
    at = path.read_text().index('{"text": nonsense}')

    def make(**options: Any) -> Loader:
        return build(
            tmp_path,
            datasets=(DatasetConfig(name="code", data_files=str(path), **options),),
            mix=None,
            num_streams=1,
        )

    with pytest.raises(SourceError, match=rf"bad\.jsonl, line at byte {at}: .*Correct the"):
        list(make())
    loader = make(on_error="skip")
    assert sum(segments(list(loader)).values()) == 3
    assert loader.ledger().find("stream", "code", "rows").out == {
        "documents": 3,
        "blank_line": 1,
        "empty": 1,
        "unparsable": 1,
    }
    with pytest.raises(
        BudgetError, match=r"bad row number 1 of dataset 'code' .*max_bad_rows is 0"
    ):
        list(make(on_error="skip", max_bad_rows=0))
    path.write_text('{"text": "good"}\n' * 300 + '{"text": ""}\n' * 8 + '{"text": null}\n')
    at = path.read_text().index('{"text": null}')
    with pytest.raises(SourceError, match=rf"bad\.jsonl, line at byte {at}: null: no value"):
        list(make())


def test_the_first_bad_row_of_a_dataset_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": None if i % 50 == 49 else "good"} for i in range(200)]
    dataset = DatasetConfig(
        name="code", data_files=str(pipelines.jsonl(tmp_path / "a.jsonl", rows)), on_error="skip"
    )
    list(build(tmp_path, datasets=(dataset,), mix=None, num_streams=1, load={"num_epochs": 2}))
    assert caplog.text.count("bad rows are left out and counted; the first that was read") == 1


def test_options_of_other_stages_decide_how_streams_are_read(tmp_path: Path) -> None:
    assert build(tmp_path, tokenize={"num_workers": 3}).rows.workers == 3
    options: dict[str, Any] = {"order": {"shuffle": False}, "num_streams": 1}
    inside = [
        [batch[INPUT_IDS].tobytes() for batch in build(tmp_path, load=load, **options)]
        for load in ({}, {"shuffle_buffer_size": 150})
    ]
    assert inside[0] != inside[1], "within windows documents are shuffled where one asks for it"


def test_documents_without_packing(tmp_path: Path) -> None:
    loader = build(tmp_path, pack={"enabled": False})
    batches = list(loader)
    assert sum(int((b[SEGMENT_IDS].max(axis=1) > 0).sum()) for b in batches) == 150
    assert len({b[INPUT_IDS].shape[1] for b in batches}) > 1
    assert_conserved(loader.ledger())
    assert_exact_resume(lambda: build(tmp_path, pack={"enabled": False}), 10, stops=(0, 4))


def test_tokens_with_a_loss_mask(tmp_path: Path) -> None:
    rows = [
        {INPUT_IDS: [5 + i % 7] * (3 + i % 5), LOSS_MASK: [0] + [1] * (2 + i % 5)}
        for i in range(40)
    ]
    options: dict[str, Any] = {
        "datasets": (DatasetConfig(name="code", data_files=rows),),
        "mix": None,
        "num_streams": 2,
    }
    for batch in build(tmp_path, **options):
        first = (batch[POSITION_IDS] == 0) & (batch[SEGMENT_IDS] > 0)
        assert (batch[LABELS][:, :-1][first[:, 1:]] == -100).all()
    assert_exact_resume(lambda: build(tmp_path, **options), 3)


def test_one_stream_of_two_has_a_loss_mask(tmp_path: Path) -> None:
    masked = [{INPUT_IDS: [5, 6, 7], LOSS_MASK: [0, 0, 1]}]
    plain = [{INPUT_IDS: [8, 9, 10]}] * 40
    loader = build(
        tmp_path,
        datasets=(
            DatasetConfig(name="masked", data_files=masked),
            DatasetConfig(name="plain", data_files=plain),
        ),
        mix={"stop_strategy": "all_exhausted"},
        num_streams=2,
    )
    trained = np.concatenate([batch[LABELS].reshape(-1) for batch in loader])
    assert 7 in trained
    assert 6 not in trained


def test_a_thousandth_of_the_texts_is_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reference, and a fast tokenizer that errs is found."""
    datasets = one(tmp_path / "data", pipelines.texts(3000, 3))
    config = pipelines.config(
        tmp_path, datasets=datasets, mix=None, streaming=True, tokenize={"num_workers": 1}
    )
    documents = Pipeline(config).source().tokenize().get_data()["code"]
    assert isinstance(documents, TokenizedShardedSource)
    forward = ForwardDocuments(
        "code", documents, PipelineContext(config=config, seed=7, cache_dir=tmp_path / "cache")
    )
    size = forward.shards[0].num_rows
    assert (
        sum(forward._audit_key(0, a, a + 8192) is not None for a in range(0, 1000 * 8192, 8192))
        < 12
    )
    assert sum(
        forward._audit_key(0, a, a + (1 << 20)) is not None for a in range(0, 800 << 20, 1 << 20)
    ) in range(60, 170)
    forward.load(0, 0, size, threading.Semaphore())
    monkeypatch.setattr(ForwardDocuments, "_audit_key", lambda self, *place: "key")
    monkeypatch.setattr(
        type(documents.tokenizer), "reference_encode", lambda self, text, whole: [1]
    )
    with pytest.raises(TokenizerError, match="does not produce the tokens of `tokenizers`"):
        forward.load(0, 0, size, threading.Semaphore())


# Manners


def test_breaking_off_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for _ in build(tmp_path):
        break
    iterator: Any = iter(build(tmp_path, load={"prefetch_enabled": False}))
    next(iterator)
    iterator.close()
    list(build(tmp_path))
    assert_no_new_threads(before)


def test_a_read_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    release = threading.Event()

    def hang(self: ForwardDocuments, *rows: Any) -> Any:
        release.wait(30)
        raise SourceError(at="x", problem="too late")

    monkeypatch.setattr(ForwardDocuments, "load", hang)
    with pytest.raises(
        StallError, match=r"batch 0 was not ready after 0\.2 s; it is in stage 'read'"
    ):
        next(iter(build(tmp_path, load={"stall_timeout_s": 0.2})))
    hanging = [thread for thread in threading.enumerate() if thread not in before]
    assert all(thread.daemon for thread in hanging)  # they keep no process from ending
    release.set()
    for thread in hanging:
        thread.join(10)
    assert_no_new_threads(before)


def test_nothing_is_written_to_the_token_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "easypipe"):
        list(build(tmp_path, tokenize={"cache_tokenized": False}))
        assert "cache_tokenized" not in caplog.text
        list(build(tmp_path))
        assert "cache_tokenized" not in caplog.text
        list(build(tmp_path, tokenize={"cache_tokenized": True}))
    assert (
        "dataset code: streaming keeps no tokens, though tokenize.cache_tokenized is True"
        in caplog.text
    )
    assert not (tmp_path / "cache" / "tokens").exists()
    assert not (tmp_path / "cache" / "indexes").exists()


def test_batches_lie_on_a_mesh(tmp_path: Path) -> None:
    expected = list(build(tmp_path))
    made = list(build(tmp_path, load={"mesh": {"data": 1}}))
    assert type(made[0][INPUT_IDS]).__module__.startswith("jax")
    assert_same_batches(expected, made)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": {"block_rows": 4}}, "order.block_rows: has no effect in streaming"),
        (
            {"num_streams": 4, "load": {"batch_size_schedule": [[5, 6]]}},
            "num_streams: 4 streams do not divide a batch of 6 rows",
        ),
        (
            {"num_streams": 3},
            "num_streams: 3 streams do not divide a batch of 8 rows.*Give a divisor of 8, or leave "
            "it out for 8",
        ),
        (
            {"tokenize": {"remove_columns": ["x"]}},
            "tokenize.remove_columns: is not there in streaming: nothing is saved",
        ),
        (
            {"mix": {"provenance": True}},
            "mix.provenance: is not there in streaming: nothing is saved",
        ),
        ({"executor": "ray"}, "executor: 'ray' fills a token cache"),
        ({"num_streams": 2, "streaming": False}, "num_streams: has no effect without streaming"),
        (
            {"datasets": [{"data_files": "x", "on_error": "quarantine"}]},
            r"datasets\[0\].on_error: 'quarantine'",
        ),
    ],
)
def test_what_streaming_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    config = from_dict(
        PipelineConfig, {"streaming": True, "datasets": [{"data_files": "x"}]} | options
    )
    with pytest.raises(ConfigError, match=message):
        Pipeline(config)


def test_what_only_a_pipeline_shows_is_refused(tmp_path: Path) -> None:
    config = pipelines.config(
        tmp_path, streaming=True, save=SaveStageConfig(output_dir=tmp_path / "out")
    )
    pipeline = Pipeline(config).source().tokenize()
    for own in (None, {"output_dir": str(tmp_path / "out")}):
        with pytest.raises(ConfigError, match="save: streaming writes nothing"):
            pipeline.copy().save(own)
    assert pipeline.copy().save({"enabled": False}).get_stages()[-1] == "save"
    for ask in (
        pipeline.pending,
        lambda: pipeline.prepare_part(0, 1),
        pipeline.mix().pack().ledger,
    ):
        with pytest.raises(ConfigError, match="there is no plan"):
            ask()
    with pytest.raises(ConfigError, match="there is no plan"):
        pipeline.get_data()["mixed"].prepare()  # type: ignore[attr-defined]
    assert not pipeline.write().ledger.entries  # as `train` calls it: there is nothing to prepare
    assert [default_streams(n) for n in (1, 6, 7, 12, 13, 64)] == [1, 6, 7, 6, 1, 8]


# Lines by byte


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    end=st.booleans(),
    num_rows=st.integers(1, 30),
    packed=st.booleans(),
)
@examples(40)
@example(sizes=[2, 3], end=False, num_rows=3, packed=False)
def test_num_rows_are_the_first_lines(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    end: bool,
    num_rows: int,
    packed: bool,
) -> None:
    if not any(sizes):
        return
    folder = tmp_path_factory.mktemp("first")
    for i, size in enumerate(sizes):
        lines = [json.dumps({"text": f"{i} {j}"}) if j % 4 != 2 else "" for j in range(size)]
        data = ("\n".join(lines) + ("\n" if end else "")).encode() or b"\n"
        (folder / f"{i}.jsonl{'.zst' if packed else ''}").write_bytes(
            zstandard.compress(data) if packed else data
        )
    source = open_forward(str(folder), num_rows=num_rows)
    assert source is not None
    texts = [
        text
        for i in range(len(source.shards))
        for text in source.read(i, 0, 1 << 20)["text"].to_pylist()
    ]
    counted = limited(open_files(str(folder)), num_rows)
    assert texts == [
        t
        for i, s in enumerate(counted.shards)
        for t in counted.read(i, 0, s.num_rows or 0)["text"].to_pylist()
    ]
    assert all(source.at_end(i, source._cuts[i]) for i in range(len(source.shards)))
    others = [open_forward(str(folder), num_rows=other) for other in (num_rows + 1, None)]
    assert source.fingerprint not in [other.fingerprint for other in others if other is not None]


@pytest.mark.parametrize("head", [1, 64, 1 << 20])
def test_columns_of_lines_follow_from_whole_rows_however_long_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: int
) -> None:
    monkeypatch.setattr(forward, "HEAD_BYTES", head)
    rows = [{"n": i, "text": "x" * 3000, "tags": ["a"]} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_forward(str(tmp_path))
    assert source is not None
    assert [(f.name, str(f.type)) for f in source.schema if f.name != "__row_number__"] == [
        ("n", "int64"),
        ("text", "large_string"),
        ("tags", "large_list<item: large_string>"),
    ]
    assert source.read(0, 0, 1 << 20)["n"].to_pylist() == [0, 1, 2]


def test_all_that_decides_rows_read_forward_is_in_their_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "n": 1}\n' * 3)

    def opened(**options: Any) -> str:
        source = open_forward(str(path), **options)
        assert source is not None
        columns = options.get("type") != "txt" and ["n"]
        return f"{source.fingerprint} {source.select(columns).fingerprint if columns else ''}"

    ways = [{}, {"type": "txt"}, {"num_rows": 2}, {"num_rows": 3}]
    prints = [one for way in ways for one in opened(**way).split()]
    assert prints == [one for way in ways for one in opened(**way).split()]
    path.write_text('{"text": "b", "n": 12}\n' * 3)
    prints += [one for way in ways for one in opened(**way).split()]
    assert len(set(prints)) == len(prints) == 14


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt.gz", "a.parquet"])
def test_num_rows_limits_a_stream(tmp_path: Path, name: str) -> None:
    datasets = one(tmp_path / "data", pipelines.texts(70, 3), name, num_rows=33)
    expected = cached_segments(
        tmp_path, datasets=datasets, mix=MixStageConfig(stop_strategy="all_exhausted")
    )
    assert segments(list(build(tmp_path, datasets=datasets, mix=None))) == expected
    assert_exact_resume(lambda: build(tmp_path, datasets=datasets, mix=None), 4, stops=(1, 2))


@given(
    lines=st.lists(
        st.text(
            st.characters(exclude_categories=("Cs",), exclude_characters="\n\r\x00"), max_size=12
        ),
        max_size=30,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    end=st.sampled_from(["", "\n"]),
    kind=st.sampled_from(["txt", "txt.gz", "jsonl", "jsonl.zst"]),
)
@examples(60)
def test_reads_by_byte_are_stateless(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: list[int], end: str, kind: str
) -> None:
    written = (
        [json.dumps({"text": line}, ensure_ascii=False) for line in lines]
        if "json" in kind
        else lines
    )
    data = ("\n".join(written) + end).encode()
    if not data.strip():
        return
    path = tmp_path_factory.mktemp("lines") / f"a.{kind}"
    path.write_bytes(
        zstandard.compress(data)
        if kind.endswith("zst")
        else gzip.compress(data)
        if kind.endswith("gz")
        else data
    )
    source = open_forward(str(path), on_error="skip")
    assert isinstance(source, ForwardSource)
    whole = source.read(0, 0, len(data))
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [source.read(0, a, b) for a, b in itertools.pairwise(edges)]
    assert (
        pa.Table.from_batches(pieces)
        .combine_chunks()
        .equals(pa.Table.from_batches([whole]).combine_chunks())
    )
    counted = open_files(str(path), on_error="skip")
    texts = counted.read(0, 0, counted.shards[0].num_rows).column("text").to_pylist()
    assert whole.column("text").to_pylist() == texts
    assert source.at_end(0, len(data))
    assert not source.at_end(0, len(data) - 1)


def test_a_compressed_file_entered_in_the_middle_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = b"".join(b'{"text": "%d %s"}\n' % (i, b"x" * 1000) for i in range(5000))
    (path := tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(data))
    with caplog.at_level(logging.WARNING, "easypipe"):
        source = open_forward(str(path))
        assert source is not None
        late = source.read(0, 4_000_000, 4_100_000)
    assert (
        "a.jsonl.zst: zst data cannot be read from the middle: reading from plain byte 0"
        in caplog.text
    )
    again = open_forward(str(path))
    assert again is not None
    again.read(0, 0, 1000)
    assert again.read(0, 4_000_000, 4_100_000).equals(late)
    assert again.read(0, 0, 1000).num_rows == 1


def test_json_arrays_and_csv_are_counted_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"text": "two"}]')
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    for name in ("a.json", "a.csv"):
        assert open_forward(str(tmp_path / name)) is None
        datasets = (DatasetConfig(name="code", data_files=str(tmp_path / name)),)
        assert sum(segments(list(build(tmp_path, datasets=datasets, mix=None))).values()) == 2


def test_a_small_dataset_is_read_once_however_often_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[list[Any], int]:
        read: list[tuple[int, int, int]] = []
        load = ForwardDocuments.load
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                ForwardDocuments,
                "load",
                lambda self, *chunk: read.append(chunk) or load(self, *chunk),
            )
            loader = build(
                tmp_path,
                mix=MixStageConfig(weights={"docs": 0.05, "code": 0.95}, stop_strategy="restart"),
            )
            return list(itertools.islice(iter(loader), 30)), len(read)

    monkeypatch.setattr(spec, "WINDOW_DOCS", 256)
    kept, few = run()
    monkeypatch.setattr(feed, "KEPT_BYTES", 0)
    anew, many = run()
    assert_same_batches(anew, kept)
    assert 3 * few < many


def test_rows_are_transformed_wherever_they_are_read(tmp_path: Path) -> None:
    """The key of a row is its number, so neither batches nor a resume change what it becomes."""

    def note_key(columns: dict[str, np.ndarray], key: int) -> None:
        columns[INPUT_IDS][:2] = key % 311, key // 311 % 311  # both are in the vocabulary
        columns[LOSS_MASK][1] = 0

    def make(**load: Any) -> Loader:
        return build(tmp_path, load=load, num_streams=2).map_rows(note_key, version="1")

    plain, noted = list(build(tmp_path, num_streams=2)), list(make())
    keys = {tuple(batch[INPUT_IDS][row, :2]) for batch in noted[:-1] for row in range(4)}
    assert len(keys) > 2 * len(noted)
    for before, after in zip(plain, noted, strict=True):
        np.testing.assert_array_equal(before[INPUT_IDS][:, 2:], after[INPUT_IDS][:, 2:])
        assert (after[LABELS][:, 0] == -100).all()
    assert_exact_resume(make, len(noted), stops=(1, 3))
    rows = [row for batch in make(batch_size=8) for row in batch[INPUT_IDS].tolist()]
    wanted = [row for batch in noted for row in batch[INPUT_IDS].tolist()]
    assert sorted(rows)[-len(wanted) :] == sorted(wanted)
    with pytest.raises(StateError, match="row_transforms"):
        make().restore(build(tmp_path, num_streams=2).state())


def only_long(row: dict[str, Any]) -> bool:
    return len(row["text"]) > 40


class Opened:
    """Holds what nothing can compare with that of another process."""

    def __init__(self) -> None:
        self.file, self.least = sys.stdout, 40


def longer_than(held: Opened, row: dict[str, Any]) -> bool:
    return len(row["text"]) > held.least


class Unversioned(ShardedDataSource):
    shard_names = ("all",)

    def open_shard(self, shard_name: str) -> Iterator[dict[str, Any]]:
        yield from ({"text": text} for text in pipelines.texts(60))


@pytest.mark.parametrize(
    ("source", "transform", "lacking"),
    [
        (None, lambda: Filter(only_long), r"\S*test_streaming:only_long has no version"),
        (
            None,
            lambda: Drop("n") >> Filter(partial(longer_than, Opened()), version="1"),
            r"\S*longer_than holds a value of type \S+",
        ),
        (Unversioned(), None, r"\S*test_streaming:Unversioned has no version"),
        (lambda: Unversioned().open_shard(""), None, r"\S*<lambda> has no version"),
    ],
)
def test_states_without_a_version_are_said_to_be_of_no_use_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: Any, transform: Any, lacking: str
) -> None:
    rows = source or [{"text": text, "n": 1} for text in pipelines.texts(60)]

    def make(seed: int = 7) -> Loader:
        values = pipelines.config(
            tmp_path, datasets=[{"name": "a", "data_files": rows}], streaming=True, seed=seed
        )
        chain = Pipeline(values).source()
        if transform is not None:
            chain = chain.transform(transform())
        return chain.tokenize().pack({"seq_length": 32}).load({"batch_size": 2}).build()

    loader = make()
    assert re.search(
        "streaming: no state of this run can be restored in another process, nor in another "
        "loader of this one, because nothing tells whether the rows are the same: dataset 'a': "
        rf"{lacking}. Give it a version \(version=\.\.\., or its attribute `version`\)",
        caplog.text,
    )
    state = loader.state()
    loader.restore(state)
    told = f"nothing tells whether the sources are those of this state: dataset 'a': {lacking}"
    with pytest.raises(
        StateError,
        match=rf"{told}. Give it a version, and start a new run, whose states can be restored",
    ):
        make().restore(state.to_json())
    with pytest.raises(StateError, match=rf"{told}; plan changed since this state was saved"):
        make(seed=8).restore(state.to_json())


def test_ranks_share_the_rows_of_streams(tmp_path: Path) -> None:
    load: dict[str, Any] = {"num_epochs": None, "shuffle_buffer_size": 64}
    endless: dict[str, Any] = {"mix": MixStageConfig(), "load": load}
    ranks = [build(tmp_path, num_streams=4, **endless).of_rank(rank, 2) for rank in range(2)]
    one = build(tmp_path, num_streams=4, **(endless | {"load": load | {"batch_size": 8}}))
    for together, *parts in zip(itertools.islice(one, 6), *ranks, strict=False):
        rows = sorted(row for part in parts for row in part[INPUT_IDS].tolist())
        assert rows == sorted(together[INPUT_IDS].tolist())
    assert_exact_resume(lambda: build(tmp_path, **endless).of_rank(1, 2), 5, stops=(1, 3))
    stopped, resumed = (build(tmp_path, **endless).of_rank(1, 2) for _ in range(2))
    assert len(list(itertools.islice(stopped, 2))) == 2
    resumed.restore(stopped.state())
    assert len(list(itertools.islice(resumed, 3))) == 3
    assert resumed.ledger().find("load", "stream", "rows").out["in batches"] == 3 * 8
    ended = build(tmp_path).of_rank(0, 2)
    assert len(list(ended)) > 1
    rows = ended.ledger().find("load", "stream", "rows")
    assert rows.out == {"in batches": rows.into["made"]}


def test_only_reading_tells_what_stands_in_a_batch(tmp_path: Path) -> None:
    loader = build(tmp_path)
    asked = (
        lambda: loader.batch(1),
        lambda: loader.rows_of(1),
        lambda: loader.explain(1),
        lambda: loader.state_at(1),
    )
    for ask in asked:
        with pytest.raises(ConfigError, match=r"a stream cannot tell what stands in .* 1 without"):
            ask()
