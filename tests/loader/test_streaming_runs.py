"""Pack strategy `stream` in streaming mode: each canonical stream is one continuous run of tokens,
whatever window a row stands in.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelines
from easypipe import (
    DatasetConfig,
    LoadStageConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    load_tokenizer,
)
from easypipe.core.errors import PlanError
from easypipe.core.schema import INPUT_IDS, LABELS, LOSS_MASK, POSITION_IDS, SEGMENT_IDS
from easypipe.loader.loader import Loader
from easypipe.loader.streams import spec
from easypipe.loader.streams.feed import Place
from easypipe.loader.streams.state import StreamState, from_text, to_text
from easypipe.plan import mix
from easypipe.plan.order import in_order_of_streams
from laws import (
    assert_conserved,
    assert_contiguous,
    assert_exact_resume,
    assert_rows_well_formed,
    assert_same_batches,
)
from strategies import examples

EOS = 0


def build(
    folder: Path,
    *,
    load: dict[str, Any] | None = None,
    pack: dict[str, Any] | None = None,
    **options: Any,
) -> Loader:
    """`options` go to the PipelineConfig; mixed by 7 to 3 where they say nothing else, in batches
    of 4 with nothing left out.
    """
    values: dict[str, Any] = {
        "streaming": True,
        "mix": MixStageConfig(stop_strategy="all_exhausted", weights={"code": 0.7, "docs": 0.3}),
        "load": LoadStageConfig(**({"batch_size": 4, "drop_last": False} | (load or {}))),
        "pack": PackStageConfig(**({"seq_length": 64, "strategy": "stream"} | (pack or {}))),
    }
    config = pipelines.config(folder, **(values | options))
    pipeline = Pipeline(config).source().tokenize()
    return (pipeline if config.mix is None else pipeline.mix()).pack().load().build()


def lists(counts: dict[str, int], longest: int = 40) -> tuple[DatasetConfig, ...]:
    """Documents of 0 to `longest` tokens; the first token names the dataset."""
    found = []
    for number, (name, count) in enumerate(counts.items()):
        rows = [
            {INPUT_IDS: [10 + number, *range(20, 20 + (i * 7919) % (longest + 1))]}
            for i in range(count)
        ]
        found.append(DatasetConfig(name=name, data_files=rows, tokenizer=pipelines.tokenizer()))
    return tuple(found)


def columns(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def whole_documents(columns: dict[str, np.ndarray], loader: Loader) -> Counter[tuple[int, ...]]:
    """The documents of a whole pass, rows in the order of their streams, put together where rows
    cut them; they end with EOS, once.
    """
    found: Counter[tuple[int, ...]] = Counter()
    ends = np.array(
        [from_text(text, len(loader.rows.sources)).first_row for text in loader.state().hint]
    )
    total, size = len(columns[INPUT_IDS]), loader.batch_size
    of = np.concatenate(
        [in_order_of_streams(ends, start, start + size)[0] for start in range(0, total, size)]
    )
    for stream in range(len(ends)):
        ids = columns[INPUT_IDS][of == stream][columns[SEGMENT_IDS][of == stream] > 0]
        ends = np.flatnonzero(ids == EOS)
        found.update(tuple(part.tolist()) for part in np.split(ids, ends[:-1] + 1))
    return found


@pytest.mark.parametrize("segments", ["document", "row"])
@pytest.mark.parametrize("window", [4096, 1, 7])
def test_one_stream_in_order_is_the_text_from_the_first_file_to_the_last(
    tmp_path: Path, segments: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # with 1, a row takes more documents than a window has
    monkeypatch.setattr(spec, "WINDOW_DOCS", window)
    _, docs = pipelines.two_datasets(tmp_path / "data")
    options: dict[str, Any] = {
        "datasets": [docs],
        "mix": None,
        "num_streams": 1,
        "order": {"shuffle": False},
    }
    loader = build(
        tmp_path, pack={"seq_length": 50, "shuffle_packed": False, "segments": segments}, **options
    )
    batches = list(loader)
    encode = load_tokenizer(pipelines.tokenizer())
    documents = [[*encode.reference_encode(text), EOS] for text in pipelines.texts(90, 5, 25)]
    rows = columns(batches)
    kept = (rows[SEGMENT_IDS] > 0).any(axis=1)
    assert_contiguous(
        {name: column[kept] for name, column in rows.items()},
        [(doc, [1] * len(doc)) for doc in documents],
        joined=segments == "row",
    )
    assert_conserved(loader.ledger())
    labels = loader.ledger().find("labels", "docs", "tokens").out
    assert labels["targets or masked"] == np.count_nonzero(rows[LABELS] != -100)
    assert labels["segment starts"] == (1 if segments == "row" else 90)
    # also of documents that windows cut, of each one
    tokens = loader.ledger().find("pack", "docs", "tokens").into
    assert tokens == {"drawn": sum(map(len, documents)) - 90, "EOS": 90}


@given(
    counts=st.tuples(st.integers(0, 40), st.integers(1, 60)),
    longest=st.sampled_from([3, 40, 300]),
    seq_length=st.sampled_from([1, 16, 64]),
    streams=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 9]),
    stop=st.sampled_from(["all_exhausted", "first_exhausted", "restart"]),
    unit=st.sampled_from(["rows", "tokens"]),
    segments=st.sampled_from(["document", "row"]),
    at=st.integers(0, 12),
)
@examples(25)
def test_any_run_holds_each_token_once_and_resumes(
    tmp_path_factory: pytest.TempPathFactory,
    counts: tuple[int, int],
    longest: int,
    seq_length: int,
    streams: int,
    window: int | None,
    stop: str,
    unit: str,
    segments: str,
    at: int,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "runs"
    options: dict[str, Any] = {
        "datasets": lists({"code": counts[0] + 8, "docs": counts[1] + 8}, longest),
        "num_streams": streams,
    }
    options["mix"] = MixStageConfig(weights={"code": 2, "docs": 1}, stop_strategy=stop, unit=unit)  # type: ignore[arg-type]
    load: dict[str, Any] = {"shuffle_buffer_size": window}

    def make(**pack: Any) -> Loader:
        return build(
            folder,
            load=load,
            pack={"seq_length": seq_length, "segments": segments, **pack},
            **options,
        )

    loader = make(shuffle_packed=False)
    batches = list(itertools.islice(loader, 200))
    assert_conserved(loader.ledger())
    rows = columns(batches)
    if segments == "document":
        assert_rows_well_formed(rows)
    if stop == "all_exhausted" and len(batches) < 200:
        expected = Counter(
            (*row[INPUT_IDS], EOS) for dataset in options["datasets"] for row in dataset.data_files
        )
        assert whole_documents(rows, loader) == expected
    if stop == "restart":
        assert (rows[SEGMENT_IDS] > 0).all(), "an endless run has no padding"
    assert_exact_resume(make, min(16, len(batches)), stops=[min(at, len(batches))], hops=(2, 1))


@pytest.mark.parametrize("segments", ["document", "row"])
def test_a_resumed_run_conserves_and_labels_what_it_reads(tmp_path: Path, segments: str) -> None:
    """The document that is cut where a state was taken counts with the tokens that are left of
    it.
    """
    options: dict[str, Any] = {"datasets": lists({"code": 30, "docs": 40}, 200), "num_streams": 2}
    total = len(
        list(
            build(tmp_path, load={"shuffle_buffer_size": 5}, pack={"segments": segments}, **options)
        )
    )
    for stop in range(0, total, 3):
        loader = build(
            tmp_path, load={"shuffle_buffer_size": 5}, pack={"segments": segments}, **options
        )
        for _ in itertools.islice(loader, stop):
            pass
        again = build(
            tmp_path, load={"shuffle_buffer_size": 5}, pack={"segments": segments}, **options
        )
        again.restore(loader.state())
        read = 0
        for _ in again:
            read += 1
            assert_conserved(again.ledger())
        assert read == total - stop


def test_documents_that_are_read_again_for_a_state_are_in_the_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows end inside of what is read at a time."""
    monkeypatch.setattr(spec, "WINDOW_DOCS", 7)
    first, again = (
        build(tmp_path, datasets=lists({"code": 120}), mix=None, num_streams=1) for _ in range(2)
    )
    for _ in itertools.islice(first, 5):
        pass
    again.restore(first.state())
    assert list(again)
    assert_conserved(again.ledger())
    assert again.ledger().find("mix", "code", "documents").out["before the state"] > 0


def test_the_last_label_of_a_row_is_the_first_token_of_the_next(tmp_path: Path) -> None:
    """Where the document goes on there, across windows too; in rows of one segment always."""
    options: dict[str, Any] = {
        "datasets": lists({"code": 50, "docs": 50}, 90),
        "num_streams": 1,
        "load": {"shuffle_buffer_size": 4},
    }
    options["load"] |= {"batch_size": 1}
    for segments in ("document", "row"):
        rows = columns(
            list(
                build(
                    tmp_path,
                    pack={"shuffle_packed": False, "segments": segments, "seq_length": 32},
                    **options,
                )
            )
        )
        ids, last = rows[INPUT_IDS], rows[LABELS][:-1, -1]
        begins = np.isin(ids[1:, 0], (10, 11))  # the first token of every document
        expected = np.where(begins & (segments == "document"), -100, ids[1:, 0])
        assert (last == expected).all()
        assert 0 < begins.sum() < len(begins)
        assert rows[LABELS][-1, -1] == -100
        assert (rows[POSITION_IDS][:, 0] == 0).all()


def test_masks_go_on_behind_the_end_of_a_row(tmp_path: Path) -> None:
    random = np.random.Generator(np.random.PCG64(2))
    given = [
        {
            INPUT_IDS: random.integers(1, 300, n).tolist(),
            LOSS_MASK: random.integers(0, 2, n).tolist(),
        }
        for n in (5, 90, 3, 12, 70)
    ]
    dataset = DatasetConfig(name="chat", data_files=given, tokenizer=pipelines.tokenizer())
    for segments in ("document", "row"):
        loader = build(
            tmp_path, datasets=[dataset], mix=None, num_streams=1, order={"shuffle": False},
            pack={"seq_length": 16, "shuffle_packed": False, "segments": segments}, load={"batch_size": 1},
        )  # fmt: skip
        documents = [
            ([*row[INPUT_IDS], EOS], [*row[LOSS_MASK], row[LOSS_MASK][-1]]) for row in given
        ]
        assert_contiguous(columns(list(loader)), documents, joined=segments == "row")


def test_weights_change_at_the_row_and_epochs_end_their_run(tmp_path: Path) -> None:
    points = [
        {"step": 0, "weights": {"code": 1, "docs": 0}},
        {"step": 3, "weights": {"code": 0, "docs": 1}},
    ]
    data: dict[str, Any] = {"datasets": lists({"code": 60, "docs": 90}, 40)}
    mix = MixStageConfig(
        weight_schedule=points, weight_schedule_type="step", stop_strategy="restart"
    )  # type: ignore[arg-type]
    loader = build(tmp_path, mix=mix, num_streams=2, **data)
    for step, batch in enumerate(itertools.islice(loader, 6)):
        begun = set(batch[INPUT_IDS][np.isin(batch[INPUT_IDS], (10, 11))].tolist())
        assert begun == {10 if step < 3 else 11}
        assert (batch[SEGMENT_IDS] > 0).all()
    twice = build(tmp_path, load={"num_epochs": 2, "batch_size": 1}, num_streams=1, **data)
    both = columns(list(twice))
    ragged = (both[SEGMENT_IDS] == 0).any(axis=1)
    assert ragged.sum() == 2, "the last row of each epoch"
    assert whole_documents(both, twice).total() == 2 * 150


def test_threads_change_nothing(tmp_path: Path) -> None:
    plain = list(build(tmp_path, load={"prefetch_enabled": False}))
    assert_same_batches(plain, build(tmp_path, load={"prefetch_workers": 3}))


def test_a_state_with_a_cut_document_is_small_and_read_back() -> None:
    for bad in ((0, 0), (5, 6)):
        state = StreamState(
            first_row=1 << 40,
            epoch=3,
            deficits=(-(1 << 39), 1 << 39),
            active=(True, False),
            drawn=(Place(3, 5, 7, 9, bad[0]), Place(1, 2, 3, 4, bad[1])),
            cut=(1, 1 << 27),
        )
        assert from_text(to_text(state), 2) == state
        assert len(to_text(state)) <= 24 + 2 * 48


def test_documents_that_never_fill_a_row_are_an_error_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix, "MAX_DRAWS", 5000)
    endless = MixStageConfig(weights={"code": 1, "docs": 1}, stop_strategy="restart")
    loader = build(
        tmp_path,
        datasets=lists({"code": 9, "docs": 9}, 0),
        mix=endless,
        num_streams=1,
        pack={"seq_length": 1 << 20},
    )
    with pytest.raises(
        PlanError,
        match=r"pack.seq_length: \d+ documents do not fill a row of 1048576 tokens\. Lower it",
    ):
        next(iter(loader))
