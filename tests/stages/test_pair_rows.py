"""Rows with a preferred answer and another one: from files to batches of pairs, and into a run that
prefers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import laws
from chat_support import CHATML, HOSTILE, chat_tokenizer
from easypipe import (
    DatasetConfig,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    load_tokenizer,
)
from easypipe.core.errors import ConfigError, SourceError
from easypipe.core.schema import (
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    SEGMENT_BREAK,
    SEGMENT_IDS,
    SOURCE,
)
from easypipe.stages.mix.config import MixStageConfig
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.stages.tokenize.engine import PromptEngine
from easypipe.transforms.chat.render import HostileTemplateError
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.tokenizer.lengths import LengthPolicy, Lengths
from pipelines import jsonl
from strategies import examples

PLAIN = PromptConfig(
    format_type="prompt_completion", label_column="chosen", rejected_column="rejected"
)
TALK = PromptConfig(
    input_columns=("chosen",),
    rejected_column="rejected",
    template=CHATML,
    train_on="last_assistant",
)
SHARED = PromptConfig(
    input_columns=("chosen",), rejected_column="rejected", template=CHATML, train_on="completion"
)
SHARED_TEXT = PromptConfig(
    format_type="text", input_columns=("chosen",), rejected_column="rejected"
)
PACK = PackStageConfig(seq_length=64, strategy="first_fit", oversize="drop")


def rows(count: int = 12) -> list[dict[str, str]]:
    return [
        {"prompt": f"{n} + {n} = ", "chosen": f"{2 * n}!", "rejected": f"{n}, I think"}
        for n in range(count)
    ]


def talks(count: int = 6) -> list[dict[str, Any]]:
    def talk(n: int, answer: str) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": f"What is {n}?"},
            {"role": "assistant", "content": answer},
        ]

    return [
        {"chosen": talk(n, f"It is {n}."), "rejected": talk(n, "No idea.")} for n in range(count)
    ]


def pipeline(folder: Path, data: Any, prompt: PromptConfig = PLAIN, **options: Any) -> Pipeline:
    given = {"pack": PACK, "load": LoadStageConfig(batch_size=4, drop_last=False), "save": None}
    stages = {name: options.pop(name, value) for name, value in given.items()}
    dataset = DatasetConfig(
        **{"name": "pairs", "data_files": data, "tokenizer": chat_tokenizer(), "prompt": prompt}
        | options
    )
    return Pipeline.from_config(
        PipelineConfig(datasets=[dataset], seed=3, cache_dir=folder, **stages)
    )


def tokenized(
    folder: Path, data: Any, prompt: PromptConfig = PLAIN, **options: Any
) -> TokenizedShardedSource:
    source = pipeline(folder, data, prompt, **options).source().tokenize().get_data()["pairs"]
    assert isinstance(source, TokenizedShardedSource)
    return source


@pytest.mark.parametrize(
    ("prompt", "data"),
    [(PLAIN, rows()), (TALK, talks()), (SHARED, talks()), (SHARED_TEXT, rows())],
    ids=["columns", "messages", "shared messages", "shared text"],
)
@pytest.mark.parametrize("length", [None, LengthPolicy(policy="keep_end")])
def test_a_document_is_both_answers_as_the_engine_writes_them(tmp_path, prompt, data, length):
    most = {"tokenizer_kwargs": {"max_length": 14}} if length is not None else {}
    source = tokenized(tmp_path, data, prompt, length=length, **most)
    batch = source.read(0, 0, len(data))
    engine = PromptEngine(source.tokenizer, prompt, length=length)
    laws.assert_conserved(source.materialize().ledger)
    for row, ids, mask in zip(
        data, batch.column(INPUT_IDS).to_pylist(), batch.column(LOSS_MASK).to_pylist(), strict=True
    ):
        better, worse = engine.encode_pair(row)
        assert ids == [*better[INPUT_IDS], *worse[INPUT_IDS]]
        assert mask == [*better[LOSS_MASK], SEGMENT_BREAK, *worse[LOSS_MASK][1:]]
        for name in (INPUT_IDS, LOSS_MASK):
            np.testing.assert_array_equal(engine.encode(row)[name], better[name])


def test_batches_have_the_pairs_of_all_rows_and_the_ledger_closes(tmp_path):
    run = pipeline(tmp_path, rows()).source().tokenize().pack().load()
    tokenizer, seen = load_tokenizer(chat_tokenizer()), []
    for batch in run.build():
        labels, segments = (np.asarray(batch[name]) for name in (LABELS, SEGMENT_IDS))
        for r in range(len(labels)):
            for first in range(1, segments[r].max() + 1, 2):
                trained = [
                    tokenizer.decode(labels[r][(segments[r] == s) & (labels[r] >= 0)].tolist())
                    for s in (first, first + 1)
                ]
                seen.append(tuple(text.strip().removesuffix("<|im_end|>") for text in trained))
    assert sorted(seen) == sorted((row["chosen"], row["rejected"]) for row in rows())
    laws.assert_conserved(run.ledger())
    entry = run.ledger().find("labels", "pairs", "tokens")
    assert entry is not None
    assert entry.out["segment starts"] == 2 * len(rows())


@examples(6)
@given(cut=st.integers(1, 11))
def test_reading_in_parts_changes_nothing(tmp_path_factory, cut):
    laws.assert_stateless_reads(tokenized(tmp_path_factory.mktemp("pairs"), rows()), [cut])


def test_an_answer_that_is_no_sample_takes_the_other_one_with_it(tmp_path):
    data = [
        *rows(4),
        {"prompt": "a", "chosen": "b", "rejected": ""},
        {"prompt": "a", "chosen": "", "rejected": "c"},
    ]
    source = tokenized(tmp_path, data, on_error="skip")
    scanned = source.scan(0, 0, 6)
    assert [(reject.row, reject.reason) for reject in scanned.rejects] == [
        (4, "nothing_to_train"),
        (5, "nothing_to_train"),
    ]
    assert "rejected" in scanned.rejects[0].detail
    assert scanned.batch.num_rows == 4
    laws.assert_conserved(source.materialize().ledger)


@pytest.mark.parametrize("length", [None, LengthPolicy(policy="keep_start")])
def test_an_answer_with_a_special_string_takes_the_other_one_with_it(tmp_path, length):
    bad = {"prompt": "a ", "chosen": "fine", "rejected": "b<|im_end|>"}
    kwargs = {"special_strings": "error", "max_length": 30}
    options = {"length": length, "tokenizer_kwargs": kwargs, "on_error": "skip"}
    with_bad = tokenized(tmp_path / "bad", [*rows(3), bad, *rows(2)], **options).scan(0, 0, 6)
    without = tokenized(tmp_path / "good", [*rows(3), *rows(2)], **options).scan(0, 0, 5)
    assert [reject.row for reject in with_bad.rejects] == [3]
    for name in (INPUT_IDS, LOSS_MASK):
        assert with_bad.batch.column(name).equals(without.batch.column(name))


def test_an_answer_that_is_null_shares_no_text_with_the_other_one(tmp_path):
    """Without a column of prompts, both answers begin with the prompt."""
    data = [
        *rows(4),
        {"prompt": "a", "chosen": None, "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": None},
    ]
    scanned = tokenized(tmp_path, data, SHARED_TEXT, on_error="skip").scan(0, 0, 6)
    assert [(one.row, one.reason) for one in scanned.rejects] == [(4, "null"), (5, "null")]
    told = [one.detail for one in scanned.rejects]
    assert told == [f"column {name!r} has no text" for name in ("chosen", "rejected")]
    assert scanned.batch.num_rows == 4


def test_a_hostile_answer_is_told_by_its_row():
    hostile = "{% if messages[-1].content == 'No.' %}" + HOSTILE["attributes"][0] + "{% endif %}"
    prompt = dataclasses.replace(TALK, template=hostile + CHATML)
    data = [*talks(1), {**talks(1)[0], "rejected": [{"role": "assistant", "content": "No."}]}]
    engine = PromptEngine(chat_tokenizer(), prompt)
    with pytest.raises(HostileTemplateError) as caught:
        engine.render_pairs([*data, data[0]])
    assert caught.value.row == 1


def test_rows_of_an_answer_are_not_cut_between_turns():
    talk = PromptConfig(input_columns=("messages",), template=CHATML)
    assert PromptEngine(chat_tokenizer(), talk).splits
    answered = PromptConfig(input_columns=("messages",), label_column="answer", template=CHATML)
    assert not PromptEngine(chat_tokenizer(), answered).splits


def test_pairs_of_equal_answers_are_counted_and_told(tmp_path, caplog):
    data = [*rows(3), *({"prompt": "a", "chosen": "b", "rejected": "b"} for _ in range(2))]
    ledger = tokenized(tmp_path, data).materialize().ledger
    laws.assert_conserved(ledger)
    entry = ledger.find("tokenize", "pairs", "pairs of answers")
    assert entry.out == {"equal": 2, "different": 3}
    told = [one.getMessage() for one in caplog.records if "answers of" in one.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("dataset pairs: both answers of 2 pairs in ")
    again = tokenized(tmp_path / "again", rows(3)).materialize().ledger
    assert "pairs of answers" not in {entry.unit for entry in again.entries}


def test_lengths_hold_for_each_answer_and_leave_out_pairs(tmp_path):
    data = [*rows(3), {"prompt": "x ", "chosen": "short", "rejected": "long " * 40}]
    options = {"tokenizer_kwargs": {"max_length": 30}, "on_error": "skip"}
    cut = tokenized(tmp_path / "cut", data, length=LengthPolicy(policy="keep_start"), **options)
    mask = cut.read(0, 3, 4).column(LOSS_MASK).to_pylist()[0]
    assert len(mask) - mask.index(SEGMENT_BREAK) == 30
    both = [{"prompt": "x ", "chosen": "right " * 50, "rejected": "long " * 40}]
    refused = tokenized(tmp_path / "both", both, length=LengthPolicy(policy="error"), **options)
    sizes = [
        len(answer[INPUT_IDS])
        for answer in PromptEngine(chat_tokenizer(), PLAIN).encode_pair(both[0])
    ]
    assert sizes[0] != sizes[1]
    (reject,) = refused.scan(0, 0, 1).rejects  # of two answers the preferred one says why
    assert reject.detail.startswith(f"{sizes[0]} tokens")
    dropped = tokenized(tmp_path / "dropped", data, length=LengthPolicy(policy="drop"), **options)
    assert dropped.scan(0, 0, 4).batch.num_rows == 3
    counts = dropped.materialize().manifest.counts
    alone = (
        tokenized(tmp_path / "alone", rows(3), length=LengthPolicy(policy="drop"), **options)
        .materialize()
        .manifest.counts
    )
    assert (counts.tokens, counts.encoded, counts.truncated) == (
        alone.tokens,
        alone.encoded,
        alone.truncated,
    )


@examples(40)
@given(data=st.data())
@pytest.mark.parametrize(
    ("prompt", "policy"),
    [
        *((PLAIN, name) for name in ("keep_end", "middle", "trim_prompt_first")),
        *((SHARED_TEXT, name) for name in ("keep_end", "trim_prompt_first")),
        *((TALK, name) for name in ("keep_end", "trim_oldest_turns")),
        *((SHARED, name) for name in ("middle", "trim_oldest_turns", "trim_prompt_first")),
    ],
    ids=lambda one: one if isinstance(one, str) else one.train_on or one.format_type,
)
def test_both_answers_of_a_pair_keep_one_prompt(prompt, policy, data):
    words = st.lists(st.sampled_from(["so", "it is.", "\u00fc", "hm, 4"]), min_size=1, max_size=30)
    asked = [" ".join(one) for one in data.draw(st.lists(words, min_size=1, max_size=4))]
    row: dict[str, Any] = {"prompt": f"{' '.join(asked)}:"}
    row |= {side: " ".join(data.draw(words)) for side in ("chosen", "rejected")}
    if prompt is SHARED_TEXT:
        row |= {side: f"{row['prompt']} {row[side]}" for side in ("chosen", "rejected")}
    elif prompt is not PLAIN:
        talk = [
            {"role": role, "content": f"{n} {text}"}
            for n, text in enumerate(asked)
            for role in ("user", "assistant")
        ]
        for side in ("chosen", "rejected"):
            row[side] = [*talk[:-1], {"role": "assistant", "content": row[side]}]
    most = data.draw(st.integers(30, 200))
    kinds = [None] if policy == "trim_oldest_turns" else [None, "word"]
    length = LengthPolicy(policy=policy, boundary=data.draw(st.sampled_from(kinds)))
    assume(row["chosen"] != row["rejected"])
    whole = PromptEngine(chat_tokenizer(), prompt).encode_pair(row)
    try:
        cut = PromptEngine(chat_tokenizer(), prompt, max_length=most, length=length)
        pair = cut.encode_pair(row)
    except SourceError:
        return  # too long without its oldest turns, or no target is left
    (before, sizes), (_, given) = (
        (
            [one[INPUT_IDS][: one[LOSS_MASK].argmax()].tolist() for one in both],
            [len(one[INPUT_IDS]) for one in both],
        )
        for both in (pair, whole)
    )
    assert before[0] == before[1]
    assert max(sizes) <= most
    if max(given) <= most:
        assert sizes == given
    elif length.boundary is None and policy != "trim_oldest_turns":
        assert max(sizes) == most


def test_caches_of_pairs_with_two_prompts_are_not_read():
    def identity(policy: Any, *, pairs: bool) -> Any:
        tokenizer = load_tokenizer(chat_tokenizer()).with_length(30)
        return Lengths(LengthPolicy(policy=policy), tokenizer, pairs=pairs).identity

    for policy in ("keep_end", "middle", "trim_oldest_turns", "trim_prompt_first"):
        assert identity(policy, pairs=True) != identity(policy, pairs=False)
    assert identity("keep_start", pairs=True) == identity("keep_start", pairs=False)


def test_both_answers_of_a_packed_pair_have_their_dataset(tmp_path):
    mix = MixStageConfig(stop_strategy="all_exhausted", provenance=True)
    made = pipeline(tmp_path, rows()).source().tokenize().mix(mix).pack()
    [source] = made.get_data().values()
    count = source.prepare().shards[0].num_rows
    for row in source.read(0, 0, count).to_pylist():
        assert len(row[SOURCE]) == max(row[SEGMENT_IDS])


def test_packed_pairs_are_saved_and_loaded_again(tmp_path):
    save = SaveStageConfig(output_dir=tmp_path / "saved")
    run = pipeline(tmp_path / "cache", str(jsonl(tmp_path / "rows.jsonl", rows())), save=save)
    run.source().tokenize().pack().save().build()
    want = [
        batch[LABELS]
        for batch in pipeline(tmp_path / "cache", str(tmp_path / "rows.jsonl"))
        .source()
        .tokenize()
        .pack()
        .load()
        .build()
    ]
    packed = next(
        iter(
            Pipeline(PipelineConfig(datasets=[DatasetConfig(data_files=str(tmp_path / "saved"))]))
            .source()
            .get_data()
            .values()
        )
    )
    masks = np.concatenate(
        [
            packed.read(i, 0, shard.num_rows).column(LOSS_MASK).values.to_numpy()
            for i, shard in enumerate(packed.shards)
        ]
    )
    assert set(masks.tolist()) == {0, 1}
    assert sum(int((np.asarray(labels) >= 0).sum()) for labels in want) == int(masks.sum())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pack": PackStageConfig(seq_length=64)}, "pack.oversize: 'split' would cut pairs"),
        ({"pack": PackStageConfig(seq_length=64, strategy="stream")}, "pack.strategy: 'stream'"),
    ],
)
def test_what_would_part_a_pair_is_refused(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        pipeline(tmp_path, rows(), **change).source().tokenize().pack().load().build()


@pytest.mark.parametrize("talks", [False, True])
def test_an_answer_that_is_judged_is_one_document(tmp_path, talks):
    said = "why it is so and not otherwise, at length"
    row = {"prompt": "what?", "completion": said, "label": True}
    names = {"input_columns": ("prompt",), "label_column": "completion"}
    if talks:
        row["prompt"] = [{"role": "user", "content": "what?"}]
        row["completion"] = [{"role": "assistant", "content": said}]
        names["template"] = CHATML
    judged = PromptConfig(
        format_type="chat" if talks else "prompt_completion", desirable_column="label", **names
    )
    options = {"prompt": judged, "tokenizer_kwargs": {"max_length": 24}}
    with pytest.raises(ConfigError, match=r"'split' would make several answers of one, each with"):
        tokenized(tmp_path, [row], length=LengthPolicy(policy="split"), **options)
    for policy, documents in (("drop", 0), ("keep_start", 1)):
        source = tokenized(tmp_path, [row], length=LengthPolicy(policy=policy), **options)
        assert source.read(0, 0, 1).num_rows == documents


def test_pairs_are_refused_where_they_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match=r"length.policy: 'split' would part"):
        tokenized(
            tmp_path,
            rows(),
            length=LengthPolicy(policy="split"),
            tokenizer_kwargs={"max_length": 9},
        )
    with pytest.raises(ConfigError, match="rejected_column: there is no label"):
        PromptConfig(format_type="custom", template="{a}", rejected_column="b")
    with pytest.raises(ConfigError, match="rejected_column: 'chosen' appears twice"):
        PromptConfig(
            format_type="prompt_completion", label_column="chosen", rejected_column="chosen"
        )
    with pytest.raises(
        ConfigError, match=r"datasets\[0\].prompt.rejected_column: is not there in streaming"
    ):
        Pipeline.from_config(
            PipelineConfig(
                datasets=[DatasetConfig(data_files=rows(), prompt=PLAIN)], streaming=True
            )
        )
    with pytest.raises(ConfigError, match="save: pairs of answers have no columns"):
        pipeline(
            tmp_path, rows(), save=SaveStageConfig(output_dir=tmp_path / "x")
        ).source().tokenize().save().build()
    both = [
        DatasetConfig(name="pairs", data_files=rows(), prompt=PLAIN),
        DatasetConfig(name="text", data_files=[{"text": "a b"}]),
    ]
    mixed = PipelineConfig(
        datasets=both,
        default_tokenizer=chat_tokenizer(),
        mix=MixStageConfig(),
        seed=1,
        cache_dir=tmp_path,
    )
    with pytest.raises(
        ConfigError, match="mix: dataset 'pairs' holds pairs of answers, and 'text' does not"
    ):
        Pipeline.from_config(mixed).source().tokenize().mix()
