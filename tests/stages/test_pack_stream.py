"""Strategy `concat` through the pipeline: one continuous run of tokens, whatever window, file or
epoch a row stands in.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import laws
from easypipe import (
    ConfigError,
    DatasetConfig,
    LoadStageConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    SaveStageConfig,
    load_tokenizer,
)
from easypipe.core.schema import INPUT_IDS, LABELS, LOOK_AHEAD, LOSS_MASK, SEGMENT_IDS
from easypipe.save.verify import verify
from pipelines import config, texts, tokenizer, two_datasets

NAMES: tuple[Any, Any] = ("stream", "concat")


def packed(
    folder: Path,
    *,
    mix: dict[str, Any] | None = None,
    load: dict[str, Any] | None = None,
    **pack: Any,
) -> Pipeline:
    pipeline = Pipeline(config(folder)).source().tokenize()
    pipeline.mix(
        MixStageConfig(
            **(
                {"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": "all_exhausted"}
                | (mix or {})
            )
        )
    )
    pipeline.pack(PackStageConfig(**({"seq_length": 64, "strategy": "concat"} | pack)))
    return pipeline if load is None else pipeline.load(LoadStageConfig(**load))


def test_the_older_name_is_the_same(tmp_path: Path) -> None:
    """Rows, identities and so states: who wrote `stream` goes on with `concat`."""
    rows = [packed(tmp_path, strategy=name).get_data()["mixed"].rows() for name in NAMES]
    old, new = (one.batch(np.arange(one.num_rows), 64) for one in rows)
    assert all((old[name] == new[name]).all() for name in old)
    assert rows[0].identity == rows[1].identity
    for name in NAMES:
        with pytest.raises(ConfigError, match=f"no effect on strategy '{name}', which cuts"):
            PackStageConfig(seq_length=8, strategy=name, oversize="drop")


@pytest.mark.parametrize("segments", ["document", "row"])
def test_laws(tmp_path: Path, segments: str) -> None:
    pipeline = packed(tmp_path, segments=segments)
    source = pipeline.get_data()["mixed"]
    laws.assert_stateless_reads(source, cuts=(1, 5, 17))
    ledger = pipeline.ledger()
    laws.assert_conserved(ledger)
    batch = source.rows().batch(np.arange(source.prepare().shards[0].num_rows), 64)
    trained = sum(ledger.find("labels", name, "tokens").out["targets"] for name in ("code", "docs"))
    assert trained == np.count_nonzero(batch[LABELS] != -100)
    starts = sum(
        ledger.find("labels", name, "tokens").out.get("segment starts", 0)
        for name in ("code", "docs")
    )
    assert starts == (1 if segments == "row" else 150), "of 150 documents"
    assert ledger.find("pack", "mixed", "slots").out["padding"] < 64, (
        "only the last row of an epoch is not full"
    )


@pytest.mark.parametrize("segments", ["document", "row"])
def test_in_order_it_is_the_text_from_the_first_file_to_the_last(
    tmp_path: Path, segments: str
) -> None:
    _, docs = two_datasets(tmp_path / "data")
    pipeline = (
        Pipeline(config(tmp_path, datasets=[docs], order={"shuffle": False})).source().tokenize()
    )
    pipeline.pack(
        PackStageConfig(seq_length=50, strategy="stream", shuffle_packed=False, segments=segments)
    )  # type: ignore[arg-type]
    loader = pipeline.load(LoadStageConfig(batch_size=4, drop_last=False)).build()
    batches = list(loader)
    encode = load_tokenizer(tokenizer())
    documents = [[*encode.reference_encode(text), encode.eos_token_id] for text in texts(90, 5, 25)]
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    laws.assert_contiguous(
        whole, [(doc, [1] * len(doc)) for doc in documents], joined=segments == "row"
    )
    for step, batch in enumerate(batches):
        for row in loader.explain(step).rows:
            assert [token for s in row.segments for token in s.ids] == batch[INPUT_IDS][row.row][
                batch[SEGMENT_IDS][row.row] > 0
            ].tolist()
            for s in row.segments:
                found = documents[s.document or 0][s.token_start : s.token_stop + s.ends_with_eos]
                assert batch[INPUT_IDS][row.row, s.slot_start : s.slot_stop].tolist() == found


def test_an_epoch_ends_its_stream_and_resume_is_exact(tmp_path: Path) -> None:
    def make() -> Any:
        return packed(
            tmp_path,
            load={"batch_size": 3, "num_epochs": 2, "drop_last": False, "shuffle_buffer_size": 5},
        ).build()

    loader = make()
    laws.assert_exact_resume(make, len(loader), hops=(1,), stops=(0, 2, len(loader) // 2))
    rows = loader.rows
    per_epoch = rows.num_rows // 2
    segments = rows.gather(np.arange(rows.num_rows))[SEGMENT_IDS]
    assert [
        int((segments[part] == 0).any(axis=1).sum())
        for part in (slice(per_epoch), slice(per_epoch, None))
    ] == [1, 1]
    assert rows.epochs(np.array([per_epoch - 1, per_epoch])).tolist() == [0, 1]


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
def test_saved_rows_keep_the_token_behind_them(tmp_path: Path, form: str) -> None:
    expected = list(packed(tmp_path, load={"batch_size": 4, "drop_last": False}).build())
    packed(tmp_path).save(
        SaveStageConfig(output_dir=tmp_path / "saved", format=form, num_shards=2)
    ).build()  # type: ignore[arg-type]
    assert all(found.ok for found in verify(tmp_path / "saved"))
    pipeline = (
        Pipeline(
            config(
                tmp_path, datasets=[DatasetConfig(name="mixed", data_files=str(tmp_path / "saved"))]
            )
        )
        .source()
        .tokenize()
    )
    loader = pipeline.load(LoadStageConfig(batch_size=4, drop_last=False)).build()
    laws.assert_same_batches(expected, list(loader))
    assert any((batch[LABELS][:, -1] != -100).any() for batch in expected)


def test_masks_go_on_behind_the_end_of_a_row(tmp_path: Path) -> None:
    random = np.random.Generator(np.random.PCG64(2))
    rows = [
        {
            INPUT_IDS: random.integers(1, 300, n).tolist(),
            LOSS_MASK: random.integers(0, 2, n).tolist(),
        }
        for n in (5, 90, 3, 12, 70)
    ]
    dataset = DatasetConfig(name="chat", data_files=rows, tokenizer=tokenizer())
    for segments in ("document", "row"):
        pipeline = (
            Pipeline(config(tmp_path, datasets=[dataset], order={"shuffle": False}))
            .source()
            .tokenize()
        )
        pipeline.pack(
            PackStageConfig(
                seq_length=16, strategy="stream", shuffle_packed=False, segments=segments
            )
        )
        source = pipeline.get_data()["chat"]
        laws.assert_stateless_reads(source)
        laws.assert_conserved(pipeline.ledger())
        batch = source.rows().batch(np.arange(source.prepare().shards[0].num_rows), 16)
        documents = [([*row[INPUT_IDS], 0], [*row[LOSS_MASK], row[LOSS_MASK][-1]]) for row in rows]
        laws.assert_contiguous(batch, documents, joined=segments == "row")
        assert pipeline.ledger().find("labels", "chat", "tokens").out[
            "targets"
        ] == np.count_nonzero(batch[LABELS] != -100)


def test_the_plan_of_a_run(tmp_path: Path) -> None:
    report = packed(tmp_path, load={"batch_size": 4}).plan()
    assert report.fill > 0.99
    assert report.steps == report.rows // 4


def test_weights_may_follow_the_step(tmp_path: Path) -> None:
    """A stream is cut where the weights change: at a row, to the token."""
    mix = {
        "weights": None,
        "weight_schedule": [
            {"step": 0, "weights": {"code": 1, "docs": 0}},
            {"step": 3, "weights": {"code": 0, "docs": 1}},
        ],
        "stop_strategy": "restart",
    }
    loader = packed(tmp_path, mix=mix, load={"batch_size": 4, "num_epochs": None}).build()
    for step, batch in enumerate(itertools.islice(loader, 6)):
        names = {
            s.dataset
            for row in loader.explain(step).rows
            for s in row.segments
            if s.token_start == 0
        }
        assert names == {"code" if step < 3 else "docs"}
        assert (batch[SEGMENT_IDS] > 0).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"strategy": "stream", "oversize": "drop"},
            "oversize: 'drop' has no effect on strategy 'stream', which cuts documents where rows "
            "end",
        ),
        (
            {"segments": "row"},
            "segments: 'row' has no effect on strategy 'greedy', which keeps documents apart. "
            "Leave it out, or set strategy",
        ),
        ({"segments": "none"}, "segments: 'none' is not an option"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PackStageConfig(**values)
    assert str(caught.value).startswith(message)


def test_joined_documents_have_no_provenance_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"mix.provenance: names the dataset of every segment.*set pack.segments to "
        r"'document'",
    ):
        packed(tmp_path, mix={"provenance": True}, segments="row")
    source = packed(tmp_path, mix={"provenance": True}).get_data()["mixed"]
    assert LOOK_AHEAD in source.schema.names
    packed(tmp_path, segments="row")
    assert "pack.segments is 'row': documents in one row see each other" in caplog.text
