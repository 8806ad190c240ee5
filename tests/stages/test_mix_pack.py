"""Mixed and packed rows as sources: the laws, the conservation of documents and tokens, and every
refusal with its cure.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
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
    StageOrderError,
    load_tokenizer,
)
from easypipe.core.checked import remember_checked
from easypipe.core.errors import PlanError
from easypipe.core.protocols import Source, SourceInfo, TokenInfo
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, POSITION_IDS, SEGMENT_IDS, SOURCE
from easypipe.plan.spec import PlanSpec
from easypipe.plan.window import Planner
from easypipe.stages.mix.config import block_weights
from easypipe.stages.mix.mixture import Mixture
from easypipe.stages.pack.stage import _eos
from easypipe.stages.tokenize.documents import require_documents, same_tokenizer
from easypipe.transforms.tokenizer.bpe import train_bpe
from pipelines import config, jsonl, texts, tokenizer, two_datasets
from strategies import examples

STOPS = ("first_exhausted", "all_exhausted")


def mixed(tmp_path: Path, **options: object) -> Pipeline:
    values = {"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": "all_exhausted"} | options
    return Pipeline(config(tmp_path)).source().tokenize().mix(MixStageConfig(**values))


@pytest.mark.parametrize("stop", STOPS)
def test_mixed_rows_keep_the_law(tmp_path: Path, stop: str) -> None:
    source = mixed(tmp_path, stop_strategy=stop).get_data()["mixed"]
    laws.assert_stateless_reads(source, cuts=(1, 5, 17, 63))


@pytest.mark.parametrize("strategy", ["greedy", "pool", "first_fit"])
def test_packed_rows_keep_the_laws(tmp_path: Path, strategy: str) -> None:
    pipeline = mixed(tmp_path).pack(PackStageConfig(seq_length=64, strategy=strategy))
    source = pipeline.get_data()["mixed"]
    laws.assert_stateless_reads(source, cuts=(1, 5, 17))
    batch = source.read(0, 0, source.prepare().shards[0].num_rows)
    rows = {
        name: np.stack(batch.column(name).to_numpy(zero_copy_only=False)).astype(np.int32)
        for name in batch.schema.names
    }
    laws.assert_rows_well_formed(rows, pad_token_id=source.pad_token_id)
    laws.assert_conserved(pipeline.ledger())
    slots = pipeline.ledger().find("pack", "mixed", "slots")
    assert slots.out["tokens"] == int((rows[SEGMENT_IDS] > 0).sum())


def test_every_document_once_with_its_own_tokens_and_origin(tmp_path: Path) -> None:
    source = mixed(tmp_path).get_data()["mixed"]
    rows = pa.Table.from_batches(
        [source.read(0, 0, source.prepare().shards[0].num_rows)]
    ).to_pylist()
    known = load_tokenizer(tokenizer())
    expected = Counter(("code", t) for t in texts(60, 3)) + Counter(
        ("docs", t) for t in texts(90, 5, 25)
    )
    assert Counter((row[SOURCE], known.decode(row[INPUT_IDS])) for row in rows) == expected


def test_shares_hold_at_every_prefix(tmp_path: Path) -> None:
    source = mixed(tmp_path, stop_strategy="first_exhausted").get_data()["mixed"]
    origins = source.read(0, 0, source.prepare().shards[0].num_rows).column(SOURCE).to_pylist()
    code = np.cumsum([origin == "code" for origin in origins])
    assert (np.abs(code - 0.7 * np.arange(1, len(code) + 1)) < 1).all()


def test_a_block_holds_whole_shares(tmp_path: Path) -> None:
    source = mixed(tmp_path, block_size=10, stop_strategy="first_exhausted").get_data()["mixed"]
    origins = source.read(0, 0, 80).column(SOURCE).to_pylist()
    assert [origins[i : i + 10].count("code") for i in range(0, 80, 10)] == [7] * 8
    assert block_weights({"a": 1.0, "b": 1.0, "c": 1.0}, 10) == (4, 3, 3)
    with pytest.raises(
        ConfigError,
        match=r"block_size: in a block of 10 documents 'b' has 0.01, which rounds to 0. Use blocks of "
        r"at least 1000,",
    ):
        MixStageConfig(weights={"a": 999, "b": 1}, block_size=10)
    assert MixStageConfig(weights={"a": 999, "b": 1}, block_size=1000).block_size == 1000


def test_the_mixture_has_a_seed_of_its_own(tmp_path: Path) -> None:
    first, second, other = (mixed(tmp_path, seed=seed).get_data()["mixed"] for seed in (None, 7, 8))
    assert first.fingerprint == second.fingerprint != other.fingerprint
    assert first.read(0, 0, 30).equals(second.read(0, 0, 30))
    assert not first.read(0, 0, 30).equals(other.read(0, 0, 30))


def test_equal_weights_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "easypipe"):
        mixed(tmp_path, weights=None, stop_strategy="restart")
    assert "mix: no weights given, so code, docs have 1/2 each" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "easypipe"):  # each once: nothing is shared out
        mixed(tmp_path, weights=None, stop_strategy="all_exhausted")
    assert "no weights given" not in caplog.text


def test_eos_is_added_once(tmp_path: Path) -> None:
    """A text that ends with the EOS token keeps one, the others get one."""
    rows = jsonl(tmp_path / "x.jsonl", [{"text": "plain"}, {"text": "ends already<|endoftext|>"}])
    pipeline = (
        Pipeline(config(tmp_path, datasets=[DatasetConfig(name="x", data_files=rows)]))
        .source()
        .tokenize()
    )
    pipeline.pack(PackStageConfig(seq_length=32))
    source = pipeline.get_data()["x"]
    row = source.read(0, 0, 1).to_pylist()[0]
    ids = np.array(row[INPUT_IDS])[np.array(row[SEGMENT_IDS]) > 0]
    assert (ids == source.eos_token_id).sum() == 2
    assert pipeline.ledger().find("pack", "x", "tokens").into["EOS"] == 1


def test_nothing_is_tokenized_before_it_is_asked_for(tmp_path: Path) -> None:
    pipeline = mixed(tmp_path).pack(PackStageConfig(seq_length=64))
    assert pipeline.get_data()["mixed"].schema.names == [INPUT_IDS, SEGMENT_IDS, POSITION_IDS]
    assert not (tmp_path / "cache" / "tokens").exists()


def test_plan_checkpoints_are_kept_and_give_the_same_rows(tmp_path: Path) -> None:
    first = mixed(tmp_path).pack(PackStageConfig(seq_length=64)).get_data()["mixed"]
    rows = first.prepare().shards[0].num_rows
    [kept] = (tmp_path / "cache" / "plans").glob("*.json")
    assert kept.stem == first.plan().fingerprint
    again = mixed(tmp_path).pack(PackStageConfig(seq_length=64)).get_data()["mixed"]
    assert again.plan().checkpoints()[-1].first_row == rows
    assert again.read(0, 0, rows).equals(first.read(0, 0, rows))


def test_checkpoints_that_were_found_later_are_kept_too(tmp_path: Path) -> None:
    first, again = (
        mixed(tmp_path).pack(PackStageConfig(seq_length=64)).get_data()["mixed"] for _ in range(2)
    )
    plan = first.plan()
    first.mixture.remember(plan)
    assert plan.num_rows
    first.mixture.remember(plan)
    assert again.plan().checkpoints() == plan.checkpoints()
    assert len(plan.checkpoints()) > 1


@pytest.mark.parametrize("unit", ["rows", "tokens"])
@pytest.mark.parametrize("strategy", ["first_fit", "greedy", "stream"])
def test_small_datasets_that_restart_repeat_nothing_before_all_was_seen(
    tmp_path: Path, strategy: str, unit: str
) -> None:
    """Rows of several passes were permuted together: some documents came often, others never."""
    few = {"text": "a b c d e f g h i j k l m n o p"}
    datasets = [
        DatasetConfig(name=name, data_files=[few] * count)
        for name, count in (("few", 100), ("many", 260))
    ]
    source = Pipeline(config(tmp_path, datasets=datasets)).source().tokenize()
    mixed = source.mix({"weights": {"few": 1, "many": 2}, "unit": unit})
    plan = mixed.pack(PackStageConfig(seq_length=32, strategy=strategy)).get_data()["mixed"].plan()
    first = plan.window_at(0)
    seen = [
        np.bincount(first.doc[first.dataset == i], minlength=n) for i, n in ((0, 100), (1, 260))
    ]
    assert abs(first.doc.size - 300) <= 2  # one more under "stream"
    assert (seen[0] != 1).sum() <= 2
    assert seen[1].max() == 1


@pytest.mark.parametrize("oversize", ["split", "error"])
def test_the_first_batch_needs_one_window_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oversize: str
) -> None:
    """All are looked at before it only where a document that is longer than a row is an error."""
    monkeypatch.setattr("easypipe.stages.mix.mixture.window_docs", lambda *_: 8)
    planned: list[int] = []
    window = Planner.window
    monkeypatch.setattr(
        Planner, "window", lambda self, state: (planned.append(state.index), window(self, state))[1]
    )
    loader = (
        mixed(tmp_path)
        .pack(PackStageConfig(seq_length=512, oversize=oversize))
        .load(LoadStageConfig(batch_size=1, prefetch_enabled=False))
        .build()
    )  # type: ignore[arg-type]
    next(iter(loader))
    windows = len(set(planned))
    assert len(loader) > 10
    assert windows > 10 if oversize == "error" else windows <= 2


def test_pack_without_mix_packs_each_dataset(tmp_path: Path) -> None:
    data = (
        Pipeline(config(tmp_path))
        .source()
        .tokenize()
        .pack(PackStageConfig(seq_length=64))
        .get_data()
    )
    assert sorted(data) == ["code", "docs"]
    for source in data.values():
        laws.assert_stateless_reads(source)


def test_disabled_pack_changes_nothing(tmp_path: Path) -> None:
    pipeline = Pipeline(config(tmp_path)).source().tokenize()
    before = pipeline.get_data()
    assert pipeline.pack(PackStageConfig(enabled=False)).get_data() == before


@pytest.mark.parametrize("oversize", ["split", "truncate", "drop"])
def test_long_documents(tmp_path: Path, oversize: str) -> None:
    pipeline = mixed(tmp_path).pack(PackStageConfig(seq_length=16, oversize=oversize))
    laws.assert_conserved(pipeline.ledger())
    tokens = pipeline.ledger().find("pack", "code", "tokens").out
    assert ("truncated" in tokens) == (oversize == "truncate")
    assert ("dropped" in tokens) == (oversize == "drop")


# refusals: the message, and the cure that it names


def test_an_unknown_dataset_in_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        mixed(tmp_path, weights={"cod": 0.7, "docs": 0.3})
    assert (
        str(caught.value)
        == "mix.weights.cod: no dataset named 'cod' (have: code, docs). Did you mean 'code'?"
    )
    mixed(tmp_path, weights={"code": 0.7, "docs": 0.3})


def test_a_dataset_without_a_weight(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"mix.weights: no weight for dataset 'docs' \(have: code\)"
    ):
        mixed(tmp_path, weights={"code": 1.0})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_are_none(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"weights.a: .* is not a weight"):
        MixStageConfig(weights={"a": weight})


def test_stages_in_an_order_that_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(
        StageOrderError,
        match=r"^Call tokenize\(\) before mix\(\): dataset 'code' has no column 'input_ids'",
    ):
        Pipeline(config(tmp_path)).source().mix()
    with pytest.raises(StageOrderError, match=r"^Call tokenize\(\) before pack\(\)"):
        Pipeline(config(tmp_path)).source().pack()
    packed = mixed(tmp_path).pack(PackStageConfig(seq_length=64))
    with pytest.raises(ConfigError, match=r"mix: the rows of dataset 'mixed' are packed already"):
        packed.mix()


def test_two_tokenizers_in_one_mixture(tmp_path: Path) -> None:
    code, docs = two_datasets(tmp_path / "data")
    other = DatasetConfig(name="docs", data_files=docs.data_files, tokenizer=tokenizer(300))
    pipeline = Pipeline(config(tmp_path, datasets=[code, other])).source().tokenize()
    with pytest.raises(ConfigError) as caught:
        pipeline.copy().mix()
    for part in (
        "'code'",
        "'docs'",
        tokenizer(),
        tokenizer(300),
        "mix.allow_mixed_tokenizers=True",
    ):
        assert part in str(caught.value)
    mixture = pipeline.mix(
        MixStageConfig(allow_mixed_tokenizers=True, stop_strategy="all_exhausted")
    ).get_data()["mixed"]
    assert mixture.read(0, 0, 10).num_rows == 10
    sizes = [load_tokenizer(one).vocab_size for one in (tokenizer(), tokenizer(300))]
    assert sizes[0] > sizes[1]
    assert mixture.mixture.vocab_size == sizes[0]


def test_one_tokenizer_with_and_without_its_special_tokens_is_two(tmp_path: Path) -> None:
    code, docs = two_datasets(tmp_path / "data")
    datasets = [code, dataclasses.replace(docs, tokenizer_kwargs={"add_special_tokens": False})]
    made = Pipeline(config(tmp_path, datasets=datasets)).source().tokenize()
    with pytest.raises(
        ConfigError, match=r"different tokenizers.* or another add_special_tokens\."
    ):
        made.mix()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("strategy", ["greedy", "stream"])
def test_documents_of_two_tokenizers_end_each_with_its_own_eos(
    tmp_path: Path, strategy: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    code, docs = two_datasets(tmp_path / "data")
    other = [
        train_bpe(texts(60, 1, 9), 320, ["<|other|>", "<|end|>"], tmp_path / name)
        for name in ("x", "y")
    ]
    for folder, token in zip(other, ("<|end|>", "<|other|>"), strict=True):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    own = {"code": load_tokenizer(tokenizer()), "docs": load_tokenizer(str(other[0]))}
    eos = {name: one.eos_token_id for name, one in own.items()}
    assert eos["code"] != eos["docs"]
    datasets = [code, dataclasses.replace(docs, tokenizer=own["docs"].config)]
    mix = MixStageConfig(allow_mixed_tokenizers=True, stop_strategy="all_exhausted")
    pipeline = (
        Pipeline(config(tmp_path, datasets=datasets, streaming=streaming))
        .source()
        .tokenize()
        .mix(mix)
    )
    assert "datasets 'code' and 'docs' have different tokenizers" in caplog.text
    assert "each document ends with its own tokenizer's EOS" in caplog.text
    pipeline.pack(PackStageConfig(seq_length=48, strategy=strategy))
    load = LoadStageConfig(batch_size=4, num_epochs=1, drop_last=False, prefetch_enabled=False)
    seen = set()
    for batch in pipeline.copy().load(load).build():
        for ids, segments in zip(
            np.asarray(batch[INPUT_IDS]), np.asarray(batch[SEGMENT_IDS]), strict=True
        ):
            seen |= {
                tuple(ids[segments == number].tolist()) for number in range(1, segments.max() + 1)
            }
    written = {"code": texts(60, 3), "docs": texts(90, 5, 25)}
    documents = {
        (*own[name].reference_encode(text), eos[name]) for name in own for text in written[name]
    }
    if strategy == "greedy":
        assert {document for document in documents if len(document) <= 48} <= seen
    for name in own:
        assert {document for document in seen & documents if document[-1] == eos[name]}
    if not streaming:
        pipeline.ledger().check()
        plain = pipeline.get_data()["mixed"].fingerprint
        again = dataclasses.replace(docs, tokenizer=str(other[1]))
        twin = Pipeline(config(tmp_path, datasets=[code, again])).source().tokenize().mix(mix)
        assert (
            twin.pack(PackStageConfig(seq_length=48, strategy=strategy))
            .get_data()["mixed"]
            .fingerprint
            != plain
        )


def test_num_packers_of_another_strategy_is_said_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = (
        mixed(tmp_path).pack(PackStageConfig(seq_length=64, strategy="greedy")).get_data()["mixed"]
    )
    assert "num_packers" not in caplog.text
    same = (
        mixed(tmp_path)
        .pack(PackStageConfig(seq_length=64, strategy="greedy", num_packers=4))
        .get_data()["mixed"]
    )
    assert (
        "pack.num_packers has no effect on strategy 'greedy': it applies only to 'pool'"
        in caplog.text
    )
    assert same.content() == plain.content()


def test_eos_that_is_not_the_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"pack.eos_token_id: 5, but the tokenizer .* ends documents with 0. Leave it out, or "
        r"give 0.",
    ):
        mixed(tmp_path).pack(PackStageConfig(seq_length=64, eos_token_id=5))
    for eos in (None, 0):
        assert (
            mixed(tmp_path)
            .pack(PackStageConfig(seq_length=64, eos_token_id=eos))
            .get_data()["mixed"]
            .eos_token_id
            == 0
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seq_length": 0}, "seq_length: 0 is not a row length"),
        ({"seq_length": (1 << 24) + 1}, "seq_length: 16777217 is not a row length. Give 1 to "),
        ({"strategy": "pool", "num_packers": 0}, "num_packers: 0 open rows hold nothing"),
        ({"strategy": "best"}, "strategy: 'best' is not an option"),
        (
            {"shuffle_buffer_factor": 10, "shuffle_packed": False},
            "shuffle_buffer_factor: has no effect without shuffle_packed",
        ),
    ],
)
def test_pack_options(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PackStageConfig(**values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("own", "size"), [({}, 12), ({"shuffle_buffer_size": 7}, 7)])
def test_packing_decides_the_shuffled_rows_where_the_loader_does_not(
    tmp_path: Path, own: dict[str, int], size: int
) -> None:
    pack = PackStageConfig(seq_length=64, shuffle_buffer_factor=3)
    loader = mixed(tmp_path).pack(pack).load({"batch_size": 4, **own}).build()
    assert loader.state().config["shuffle_buffer_size"] == size


@pytest.mark.parametrize("pad", [320, 99999])
def test_pad_outside_the_vocabulary(tmp_path: Path, pad: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"pack.pad_token_id: {pad} lies outside the vocabulary of 320"
    ):
        mixed(tmp_path).pack(PackStageConfig(seq_length=64, pad_token_id=pad))


class Known(Source):
    """A source of which nothing is known but its tokens."""

    schema, shards, fingerprint = pa.schema([]), (), "nothing"

    def __init__(self, tokens: TokenInfo | None) -> None:
        self.tokens = tokens

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(tokens=self.tokens)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        raise AssertionError("it has no rows")


def mixture_of_tokens(*tokens: TokenInfo | None) -> Mixture:
    parts: Any = {f"d{n}": Known(one) for n, one in enumerate(tokens)}
    spec = PlanSpec(seed=1, weights=(1,) * len(parts), stop="all_exhausted", window_docs=8)
    return Mixture(parts=parts, spec=spec, context=None)  # type: ignore[arg-type]


BARE = TokenInfo(
    tokenizer="t",
    tokenizer_fingerprint="f",
    vocab_size=9,
    eos_token_id=None,
    pad_token_id=None,
    seq_length=None,
)


def test_documents_of_several_datasets_in_one_segment_need_an_end() -> None:
    pack = PackStageConfig(seq_length=64, strategy="concat", segments="row")
    assert _eos(mixture_of_tokens(BARE), pack) == ()
    with pytest.raises(ConfigError, match=r"pack.eos_token_id: .* has no end-of-sequence token"):
        _eos(mixture_of_tokens(BARE, BARE), pack)


@pytest.mark.parametrize(
    ("pad", "eos", "wanted"), [(3, 7, 3), (0, 7, 0), (None, 7, 7), (None, None, 0)]
)
def test_what_pads_rows_that_are_not_packed(pad: Any, eos: Any, wanted: int) -> None:
    info = dataclasses.replace(BARE, pad_token_id=pad, eos_token_id=eos)
    assert mixture_of_tokens(info, BARE).pad_token_id == wanted


class Made(Known):
    """Documents that a stage of one's own makes."""

    schema = pa.schema([(INPUT_IDS, pa.list_(pa.int32()))])

    def materialize(self) -> None:
        raise AssertionError("it has no rows")


def test_documents_of_ones_own_bring_their_columns_themselves(tmp_path: Path) -> None:
    rows = [{INPUT_IDS: [1], "w": [1]}]
    for aligned in ((), ("w",)):
        dataset = DatasetConfig(name="d", data_files=rows, aligned_columns=aligned)
        context = Pipeline(config(tmp_path, datasets=[dataset])).get_context()
        if not aligned:
            assert isinstance(require_documents("d", Made(None), context, stage="pack"), Made)
            continue
        with pytest.raises(ConfigError, match="no effect on a source that makes documents itself"):
            require_documents("d", Made(None), context, stage="pack")


def test_a_dataset_of_unknown_tokens_hides_no_other_two() -> None:
    other = dataclasses.replace(BARE, tokenizer_fingerprint="g")
    same_tokenizer(mixture_of_tokens(None, BARE, BARE).parts, allow=False)
    with pytest.raises(ConfigError, match="datasets 'd1' and 'd2' have different tokenizers"):
        same_tokenizer(mixture_of_tokens(None, BARE, other).parts, allow=False)


def test_states_that_cannot_be_those_of_the_plan_are_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever signed them."""
    own, other = (
        mixed(tmp_path, seed=seed).pack(PackStageConfig(seq_length=64)).get_data()["mixed"]
        for seed in (1, 2)
    )
    rows = own.prepare().shards[0].num_rows
    other.prepare()
    wanted, plan = own.read(0, 0, rows), own.plan().fingerprint
    states = [state.to_json() for state in own.plan().checkpoints()]
    late = dataclasses.replace(own.plan().checkpoints()[0], first_row=rows + 1).to_json()
    others = [state.to_json() for state in other.plan().checkpoints()]
    for lie in (
        {"plan": other.plan().fingerprint, "states": others},
        {"plan": plan, "states": [late, *states[1:]]},
        {"plan": plan, "states": states[::-1]},
    ):
        remember_checked(tmp_path / "cache" / "plans" / f"{plan}.json", lie)
        again = mixed(tmp_path, seed=1).pack(PackStageConfig(seq_length=64)).get_data()["mixed"]
        assert len(again.plan().checkpoints()) == 1
        assert again.prepare().read(0, 0, rows).equals(wanted)
    assert "it is of the plan" in caplog.text


def test_rows_that_are_padded_with_another_token_are_others(tmp_path: Path) -> None:
    packs = [
        mixed(tmp_path).pack(PackStageConfig(seq_length=64, pad_token_id=pad)).get_data()["mixed"]
        for pad in (1, 2)
    ]
    assert len({pack.fingerprint for pack in packs}) == 2
    assert len({pack.content() for pack in packs}) == 2


def test_loss_masks_travel_with_their_tokens(tmp_path: Path) -> None:
    rows = [
        {INPUT_IDS: list(range(1, n + 1)), LOSS_MASK: [i % 2 for i in range(n)]}
        for n in (5, 9, 3, 12)
    ]
    dataset = DatasetConfig(name="chat", data_files=rows, tokenizer=tokenizer())
    source = (
        Pipeline(config(tmp_path, datasets=[dataset]))
        .source()
        .tokenize()
        .pack(PackStageConfig(seq_length=16))
        .get_data()["chat"]
    )
    laws.assert_stateless_reads(source)
    for row in source.read(0, 0, source.prepare().shards[0].num_rows).to_pylist():
        for token, mask, segment, position in zip(
            row[INPUT_IDS], row[LOSS_MASK], row[SEGMENT_IDS], row[POSITION_IDS], strict=True
        ):
            if segment and token:  # not the EOS, whose id is 0
                assert mask == position % 2


@examples(15)
@given(
    code=st.integers(1, 40),
    docs=st.integers(1, 40),
    share=st.floats(0.01, 0.99),
    seq_length=st.integers(2, 80),
    stop=st.sampled_from(STOPS),
    strategy=st.sampled_from(["greedy", "pool", "first_fit"]),
)
def test_conservation(
    tmp_path_factory: pytest.TempPathFactory,
    code: int,
    docs: int,
    share: float,
    seq_length: int,
    stop: str,
    strategy: str,
) -> None:
    datasets = [
        DatasetConfig(name="code", data_files=[{"text": text} for text in texts(code, 3)]),
        DatasetConfig(name="docs", data_files=[{"text": text} for text in texts(docs, 5)]),
    ]
    folder = tmp_path_factory.mktemp("conservation")
    pipeline = Pipeline(config(folder, datasets=datasets)).source().tokenize()
    pipeline.mix(MixStageConfig(weights={"code": share, "docs": 1 - share}, stop_strategy=stop))
    pipeline.pack(PackStageConfig(seq_length=seq_length, strategy=strategy))
    laws.assert_conserved(pipeline.ledger())
    source = pipeline.get_data()["mixed"]
    segments = (
        source.read(0, 0, source.prepare().shards[0].num_rows)
        .column(SEGMENT_IDS)
        .flatten()
        .to_numpy()
    )
    assert pipeline.ledger().find("pack", "mixed", "slots").out.get(
        "tokens", 0
    ) == np.count_nonzero(segments)


@pytest.mark.parametrize("num_epochs", [1, None])
@pytest.mark.parametrize("streaming", [False, True])
def test_where_drop_leaves_nothing_the_length_of_rows_is_to_blame(
    tmp_path: Path, streaming: bool, num_epochs: int | None
) -> None:
    datasets = [DatasetConfig(name="d", data_files=[{"text": "word " * 50}] * 5)]
    pack = PackStageConfig(seq_length=16, oversize="drop")
    wrong = (
        r"pack\.oversize: none of 5 documents fits a row of 16 tokens\. Raise "
        r"pack\.seq_length, or set pack\.oversize to 'split' or"
    )
    load = LoadStageConfig(batch_size=1, num_epochs=num_epochs)

    def packed() -> Pipeline:
        more = {"streaming": True, "num_streams": 1} if streaming else {}
        return (
            Pipeline(config(tmp_path, datasets=datasets, pack=pack, load=load, **more))
            .source()
            .tokenize()
            .pack()
        )

    with pytest.raises(PlanError, match=wrong):
        next(iter(packed().load().build()))
    if not streaming and num_epochs:
        with pytest.raises(PlanError, match=wrong):
            packed().save(SaveStageConfig(output_dir=tmp_path / "out")).build()
        assert not list((tmp_path / "out").glob("part-*"))


@pytest.mark.parametrize("names", [("asked", "plain"), ("plain", "asked")], ids="-".join)
def test_a_mixture_has_masks_where_one_of_its_datasets_has(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    rows = [{"prompt": text, "completion": f" {text[::-1]}"} for text in texts(40, longest=9)]
    asked = {"prompt_field": "prompt", "completion_field": "completion"}
    fields = {"asked": asked, "plain": {"content_field": "prompt"}}
    path = jsonl(tmp_path / "rows.jsonl", rows)
    made = [DatasetConfig(name=name, data_files=path, **fields[name]) for name in names]
    whole = Pipeline(config(tmp_path, datasets=tuple(made))).source().tokenize()
    whole = whole.mix(MixStageConfig(stop_strategy="all_exhausted"))
    batch = whole.get_data()["mixed"].read(0, 0, 80)
    targets: dict[str, set[int]] = {"asked": set(), "plain": set()}
    for name, mask in zip(batch[SOURCE].to_pylist(), batch[LOSS_MASK].to_pylist(), strict=True):
        targets[name] |= {*mask}
    assert targets == {"asked": {0, 1}, "plain": {1}}
    whole = whole.pack(PackStageConfig(seq_length=64))
    load = LoadStageConfig(batch_size=2, drop_last=False)
    batches = [dict(one) for one in whole.copy().load(load).build()]
    entries = {
        name: whole.ledger().find("labels", name, "tokens").out for name in ("asked", "plain")
    }
    counted = sum(int((one["labels"] != -100).sum()) for one in batches)
    assert counted == sum(entry["targets"] for entry in entries.values())
    assert entries["asked"]["masked"] > 100
    assert "masked" not in entries["plain"]
    whole.copy().save(SaveStageConfig(output_dir=str(tmp_path / "saved"))).build()
    saved = DatasetConfig(name="saved", data_files=str(tmp_path / "saved"))
    again = Pipeline(config(tmp_path, datasets=(saved,))).source().load(load).build()
    laws.assert_same_batches(batches, again, what="saved")
