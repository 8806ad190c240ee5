"""LengthPolicy: no document over max_length, masks that travel with their tokens, everything in the
ledger.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
import strategies
from chat_support import chat_tokenizer, talk
from easypipe import (
    ConfigError,
    DatasetConfig,
    LengthPolicy,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    PromptConfig,
    PromptEngine,
    SourceError,
    TokenizerConfig,
    load_tokenizer,
)
from easypipe.core.schema import HAS_EOS, INPUT_IDS, LABELS, LOSS_MASK, ROW_NUMBER, SEGMENT_IDS
from easypipe.save.verify import verify
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from strategies import examples

PAIR = PromptConfig(format_type="prompt_completion")
SENTENCES = "One fox runs, quickly. Two foxes run; slowly! Do three foxes run? They do. "


def dataset(
    rows: Any, policy: LengthPolicy | None, max_length: int | None, **options: Any
) -> DatasetConfig:
    kwargs = {} if max_length is None else {"tokenizer_kwargs": {"max_length": max_length}}
    values = {
        "name": "d",
        "data_files": rows,
        "tokenizer": chat_tokenizer(),
        "length": policy,
        **kwargs,
    } | options
    return DatasetConfig(**values)


def tokenized(
    folder: Path, rows: Any, policy: LengthPolicy | None, max_length: int | None, **options: Any
) -> TokenizedShardedSource:
    config = PipelineConfig(
        datasets=[dataset(rows, policy, max_length, **options)], seed=1, cache_dir=folder
    )
    source = Pipeline.from_config(config).source().tokenize().get_data()["d"]
    assert isinstance(source, TokenizedShardedSource)
    return source


def documents(source: TokenizedShardedSource) -> dict[int, list[tuple[list[int], list[int]]]]:
    """By row, its documents: (tokens, mask)."""
    found: dict[int, list[tuple[list[int], list[int]]]] = {}
    for row in source.scan(0, 0, source.shards[0].num_rows).batch.to_pylist():
        found.setdefault(row[ROW_NUMBER], []).append(
            (row[INPUT_IDS], row.get(LOSS_MASK, [1] * len(row[INPUT_IDS])))
        )
    return found


def text(ids: list[int]) -> str:
    return load_tokenizer(chat_tokenizer()).decode(ids)


policies = st.one_of(
    st.builds(
        LengthPolicy,
        policy=st.sampled_from(["keep_start", "keep_end", "middle", "trim_prompt_first", "split"]),
        boundary=st.sampled_from([None, "sentence", "clause", "word"]),
    ),
    st.builds(
        LengthPolicy,
        policy=st.just("split"),
        overlap=st.integers(1, 3),
        boundary=st.sampled_from([None, "word"]),
    ),
    st.builds(LengthPolicy, policy=st.sampled_from(["drop"])),
)


def with_specials(folder: Path) -> str:
    """The chat tokenizer, which then puts one token in front of texts and one behind them."""
    import tokenizers

    shutil.copytree(chat_tokenizer(), folder)
    one = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    around = [(token, one.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")]
    one.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=around
    )
    one.save(str(folder / "tokenizer.json"))
    return str(folder)


WITH_SPECIALS: list[str] = []  # a tokenizer that puts tokens around texts, made once


@examples(25)
@given(st.data())
def test_no_policy_gives_too_much_and_masks_travel_with_tokens(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    if not WITH_SPECIALS:
        WITH_SPECIALS.append(with_specials(tmp_path_factory.mktemp("tokenizer") / "t"))
    policy, limit = data.draw(policies), data.draw(st.integers(12, 40))
    said = st.one_of(strategies.texts(min_size=1), st.integers(1, 4).map(lambda n: SENTENCES * n))
    row = st.fixed_dictionaries({"prompt": said, "completion": said})
    rows = [*data.draw(st.lists(row, min_size=1, max_size=4)), {"prompt": "a", "completion": "b"}]
    plain = policy.policy != "trim_prompt_first" and data.draw(st.booleans())
    options: dict[str, Any] = {"content_field": "prompt"} if plain else {"prompt": PAIR}
    options["tokenizer"] = data.draw(st.sampled_from([chat_tokenizer(), WITH_SPECIALS[0]]))
    folder = tmp_path_factory.mktemp("cache")
    source, whole = (
        tokenized(folder, rows, policy, limit, **options),
        documents(tokenized(folder, rows, None, None, **options)),
    )
    laws.assert_stateless_reads(source, data.draw(strategies.row_cuts()))
    cache = source.materialize()
    assert cache.read(0, 0, len(rows)).equals(source.read(0, 0, len(rows)))
    cache.ledger.check()
    assert not [problem for checked in verify(cache.path) for problem in checked.problems]
    made = documents(source)
    tokenizer = load_tokenizer(options["tokenizer"])
    before, after = (len(side) for side in tokenizer.surrounding)
    for row, ((ids, mask),) in whole.items():
        found = made.get(row, [])
        assert all(len(tokens) == len(flags) <= limit for tokens, flags in found)
        if len(ids) <= limit:
            assert found == [(ids, [int(flag) for flag in mask])]
            continue
        pairs = list(zip(ids, mask, strict=True))
        head, tail = (
            pairs[: before or int(ids[0] == tokenizer.bos_token_id)],
            pairs[len(pairs) - after :] if after else [],
        )
        inside = pairs[len(head) : len(pairs) - len(tail)]
        if policy.policy == "drop":
            assert not found
        elif policy.policy == "split":
            assert sum(sum(flags) for _, flags in found) <= sum(mask)
            if policy.overlap:  # every target is one once, and everything is somewhere
                lost = sum(flag for _, flag in head[1:]) * (len(found) - 1)
                assert plain or sum(sum(flags[1:]) for _, flags in found) + lost >= sum(
                    mask[1:]
                ) - len(tail)
            if plain:
                bodies = [tokens[len(head) : len(tokens) - len(tail)] for tokens, _ in found]
                joined = bodies[0] + [
                    token for body in bodies[1:] for token in body[policy.overlap :]
                ]
                assert joined == [token for token, _ in inside]
        elif found:
            ((tokens, flags),) = found
            own = list(zip(tokens, flags, strict=True))
            assert own[: len(head)] == head
            assert tokens[len(own) - len(tail) :] == [token for token, _ in tail]
            body = own[len(head) : len(own) - len(tail)]
            ends = {
                "keep_start": [inside[: len(body)]],
                "keep_end": [inside[len(inside) - len(body) :]],
                "middle": [
                    inside[:k] + inside[len(inside) - len(body) + k :] for k in range(len(body) + 1)
                ],
                "trim_prompt_first": [inside[k : k + len(body)] for k in range(len(inside))],
            }[policy.policy]
            assert body in ends


@pytest.mark.parametrize(
    ("columns", "limit", "own"),
    [("text", 30, 0), ("prompt, completion", 31, 1), ("prompt, completion", 30, 0)],
)
def test_packing_ends_only_the_last_piece_of_a_document(
    tmp_path: Path, columns: str, limit: int, own: int
) -> None:
    """A completion ends with EOS itself: in its last piece, or, with 241 tokens in pieces of 30,
    behind it, where packing puts it back.
    """
    rows: Any = (
        [{"text": SENTENCES * 4}] * 2
        if columns == "text"
        else [{"prompt": "Say.", "completion": SENTENCES * 4}] * 2
    )
    options: dict[str, Any] = {} if columns == "text" else {"prompt": PAIR}
    source = tokenized(tmp_path, rows, LengthPolicy(policy="split"), limit, **options)
    pieces = source.scan(0, 0, 2).batch
    each = pieces.num_rows // 2
    assert each > 2
    assert pieces.column(HAS_EOS).to_pylist() == ([1] * (each - 1) + [own]) * 2
    data = [dataset(rows, LengthPolicy(policy="split"), limit, **options)]
    config = PipelineConfig(
        datasets=data,
        seed=1,
        cache_dir=tmp_path,
        pack=PackStageConfig(seq_length=64),
        load=LoadStageConfig(batch_size=1),
    )
    made = Pipeline.from_config(config).source().tokenize()
    made.copy().save({"output_dir": tmp_path / "documents"}).build()
    made.mix().save({"output_dir": tmp_path / "mixed"}).build()
    again = [
        dataclasses.replace(
            config, datasets=[DatasetConfig(name="d", data_files=str(tmp_path / name))]
        )
        for name in ("documents", "mixed")
    ]
    for one in (config, *again):
        batches = Pipeline.from_config(one).source().tokenize().mix().pack().load().build()
        eos = source.tokenizer.eos_token_id
        ends = [(batch[INPUT_IDS] == eos) & (batch[SEGMENT_IDS] > 0) for batch in batches]
        assert sum(int(one.sum()) for one in ends) == 2


def test_the_tokenizers_own_eos_is_a_target_behind_the_last_piece_alone(tmp_path: Path) -> None:
    tokenizer = with_specials(tmp_path / "t")
    ((before,), (after,)) = load_tokenizer(tokenizer).surrounding
    (pieces,) = documents(
        tokenized(
            tmp_path,
            [{"text": SENTENCES * 4}],
            LengthPolicy(policy="split"),
            30,
            tokenizer=tokenizer,
        )
    ).values()
    assert len(pieces) > 2
    assert all((ids[0], ids[-1]) == (before, after) for ids, _ in pieces)
    assert [mask[-1] for _, mask in pieces] == [0] * (len(pieces) - 1) + [1]
    assert all(all(mask[1:-1]) for _, mask in pieces)


@pytest.mark.parametrize("train_on_eos", [None, "none"])
@pytest.mark.parametrize("own", [False, True])
def test_a_completion_that_ends_with_eos_is_as_one_that_does_not(
    tmp_path: Path, own: bool, train_on_eos: Any
) -> None:
    """With a tokenizer that puts an EOS behind every text, and with one that puts none."""
    prompt = PromptConfig(format_type="prompt_completion", train_on_eos=train_on_eos)
    tokenizer = with_specials(tmp_path / "t") if own else chat_tokenizer()
    for max_length in (None, *range(8, 14)):
        engine = PromptEngine(tokenizer, prompt, max_length=max_length)
        one, two = (
            engine.encode({"prompt": "a b ", "completion": "the fox" + end})
            for end in ("", "<|im_end|>")
        )
        assert one[INPUT_IDS].tolist() == two[INPUT_IDS].tolist()
        assert one[LOSS_MASK].tolist() == two[LOSS_MASK].tolist()
        assert max_length or one[LOSS_MASK][-1] == (train_on_eos is None)


def test_the_default_is_what_max_length_always_did(tmp_path: Path) -> None:
    rows = [{"text": SENTENCES * n} for n in (1, 3)]
    assert documents(tokenized(tmp_path, rows, None, 20)) == documents(
        tokenized(tmp_path, rows, LengthPolicy(), 20)
    )
    assert (
        tokenized(tmp_path, rows, None, 20).fingerprint
        != tokenized(tmp_path, rows, LengthPolicy(), 20).fingerprint
    )


def test_error_makes_a_bad_row_and_drop_counts_it(tmp_path: Path) -> None:
    rows = [{"text": "One fox."}, {"text": SENTENCES * 3}]
    with pytest.raises(
        SourceError,
        match=r"row 1, column 'text': too_long: \d+ tokens, and max_length is 20\. "
        r"Raise max_length, or choose another length\.policy, or set on_error",
    ):
        tokenized(tmp_path, rows, LengthPolicy(policy="error"), 20).materialize()
    dropped = tokenized(tmp_path, rows, LengthPolicy(policy="drop"), 20).materialize()
    assert dropped.ledger.find("tokenize", "d", "rows").out == {"written": 1, "too_long": 1}
    assert dropped.ledger.find("lengths", "d", "documents").out == {"drop": 1}
    with pytest.raises(SourceError, match="too_long"):
        PromptEngine(
            chat_tokenizer(),
            PromptConfig(format_type="text"),
            max_length=20,
            length=LengthPolicy(policy="drop"),
        ).encode(rows[1])


SENTENCE_ENDS = [*".!?؟۔।॥։።။។", *(f".{one}" for one in "\"'”’)]»"), "?»", "।”"]
WIDE_ENDS = [*"。！？", *(f"。{one}" for one in "”’）」』")]


@pytest.mark.parametrize(
    ("boundary", "end", "gap"),
    [
        *(("sentence", end, " ") for end in SENTENCE_ENDS),
        *(("sentence", end, "") for end in WIDE_ENDS),
        ("sentence", "\n", ""),
        *(("clause", end, " ") for end in ",;:–—،؛"),
        *(("clause", end, "") for end in "，；：、"),
    ],
)
def test_sentences_and_clauses_end_in_every_script(
    tmp_path: Path, boundary: Any, end: str, gap: str
) -> None:
    """A cut behind the last word that fits would be one word later."""
    start, more = f"नमस्ते दुनिया{end}", f"{gap}مرحبا"
    policy = LengthPolicy(policy="keep_start", boundary=boundary)
    limit = len(f"{start}{more} ".encode())
    rows = [{"text": f"{start}{more} بالعالم"}]
    ((ids, _),) = documents(tokenized(tmp_path, rows, policy, limit))[0]
    assert text(ids).rstrip() == start.rstrip()


@pytest.mark.parametrize(
    ("boundary", "ends"),
    [
        ("sentence", (". ", "! ", "? ", ".", "!", "?")),
        ("clause", (",", ";", ".", "!", "?")),
        ("word", None),
    ],
)
def test_boundary_says_where_a_cut_may_be(
    tmp_path: Path, boundary: Any, ends: tuple[str, ...] | None
) -> None:
    rows = [{"text": SENTENCES * 4}]
    for limit in (61, 70, 83):
        for policy in ("keep_start", "split"):
            pieces = documents(
                tokenized(tmp_path, rows, LengthPolicy(policy=policy, boundary=boundary), limit)
            )[0]
            for ids, _ in pieces[: -1 if policy == "split" else None]:
                kept = text(ids)
                if ends is not None:
                    assert kept.rstrip().endswith(ends), kept
                at = len("".join(text(tokens) for tokens, _ in pieces[:1]))
                assert not (kept[-1:].isalpha() and (SENTENCES * 4)[at : at + 1].isalpha()), kept
    start = text(
        documents(
            tokenized(tmp_path, rows, LengthPolicy(policy="keep_end", boundary="sentence"), 40)
        )[0][0][0]
    )
    assert start.lstrip().startswith(("One", "Two", "Do", "They"))


@pytest.mark.parametrize(
    ("policy", "limit", "kept"),
    [
        ("keep_start", 6, {2: "88 777", 3: "888", 6: "888888", 7: "888888"}),
        ("keep_end", 6, {1: "7777 8", 2: " 88", 5: " 88888", 6: "888888"}),
        ("middle", 12, {1: "8 77777777 8", 2: "88 777 88", 3: "888 888", 6: "888888888888"}),
    ],
)
def test_a_boundary_is_looked_for_in_half_of_the_room(
    tmp_path: Path, policy: Any, limit: int, kept: dict[int, str]
) -> None:
    rows = [{"text": f"{'8' * n} {'7' * 20} {'8' * n}"} for n in kept]
    source = tokenized(tmp_path, rows, LengthPolicy(policy=policy, boundary="word"), limit)
    found = documents(source).values()
    assert [text(ids) for ((ids, _),) in found] == list(kept.values())


def test_a_token_in_front_makes_no_overlap_shorter(tmp_path: Path) -> None:
    rows, tokenizer = [{"text": SENTENCES * 4}], with_specials(tmp_path / "t")
    policy = LengthPolicy(policy="split", overlap=4)
    pieces = documents(tokenized(tmp_path, rows, policy, 32, tokenizer=tokenizer))[0]
    assert len(pieces) > 2
    assert [mask[:6] for _, mask in pieces[1:-1]] == [[0] * 5 + [1]] * (len(pieces) - 2)
    for (before, _), (after, _) in itertools.pairwise(pieces):
        assert before[-5:-1] == after[1:5]


def test_split_gives_several_documents_of_a_row_and_trains_each_token_once(tmp_path: Path) -> None:
    rows = [{"text": SENTENCES * 4}, {"text": "One fox."}]
    source = tokenized(tmp_path, rows, LengthPolicy(policy="split", overlap=4), 32)
    cache = source.materialize()
    pieces = documents(source)[0]
    assert len(pieces) > 2
    assert [mask[:4] for _, mask in pieces[1:]] == [[0] * 4] * (len(pieces) - 1)
    for (before, _), (after, _) in itertools.pairwise(pieces):
        assert before[-4:] == after[:4]
    rows_entry, tokens = (
        cache.ledger.find("tokenize", "d", "rows"),
        cache.ledger.find("tokenize", "d", "tokens"),
    )
    assert (rows_entry.into, rows_entry.out) == (
        {"read": 2, "pieces": len(pieces) - 1},
        {"written": len(pieces) + 1},
    )
    assert tokens.into["overlap"] == 4 * (len(pieces) - 1)
    assert cache.ledger.find("lengths", "d", "documents").out == {"split": 1}
    assert not [problem for found in verify(cache.path) for problem in found.problems]
    with pytest.raises(SourceError, match=r"split: it becomes \d+ documents"):
        PromptEngine(
            chat_tokenizer(),
            PromptConfig(format_type="text"),
            max_length=32,
            length=LengthPolicy(policy="split"),
        ).encode(rows[0])


@pytest.mark.parametrize("policy", ["keep_end", "split", "drop", "trim_prompt_first"])
def test_streaming_reads_the_same_documents_and_counts_them(tmp_path: Path, policy: Any) -> None:
    rows = [
        {"prompt": SENTENCES * (i % 4), "completion": f"fox {i} " * (1 + i % 5)} for i in range(40)
    ]
    length = LengthPolicy(policy=policy, overlap=2 if policy == "split" else 0)
    path = tmp_path / "rows.jsonl"  # whose rows nobody counts where they are streamed
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for streaming in (False, True):
        config = PipelineConfig(
            datasets=[dataset(str(path), length, 40, prompt=PAIR)],
            pack=PackStageConfig(seq_length=64),
            load=LoadStageConfig(batch_size=2, drop_last=False),
            seed=3,
            cache_dir=tmp_path,
            streaming=streaming,
        )
        pipeline = Pipeline.from_config(config).source().tokenize().pack().load()
        loader = pipeline.build()
        segments = []
        for batch in loader:
            ids, labels, numbers = (
                np.asarray(batch[name]) for name in (INPUT_IDS, LABELS, SEGMENT_IDS)
            )
            for r in range(len(ids)):
                for segment in range(1, numbers[r].max(initial=0) + 1):
                    here = numbers[r] == segment
                    segments.append((ids[r][here].tolist(), labels[r][here].tolist()))
        ledger = loader.ledger() if streaming else pipeline.ledger()
        ledger.check()
        read = ledger.find("stream" if streaming else "tokenize", "d", "rows").into
        assert read["read"] == len(rows)
        found.append((sorted(segments), ledger.find("lengths", "d", "documents").out, read))
    assert found[0] == found[1]


def test_budgets_cut_columns_before_the_prompt_is_written(tmp_path: Path) -> None:
    prompt = PromptConfig(
        format_type="custom", template="C: {context}\nQ: {q}\nA: {a}", label_column="a"
    )
    rows = [
        {"context": SENTENCES * 3, "q": "How many foxes run?", "a": "Three."},
        {"context": "One fox.", "q": "?", "a": "One."},
    ]
    policy = LengthPolicy(budgets={"context": 12}, boundary="sentence")
    engine = PromptEngine(chat_tokenizer(), prompt, length=policy)
    whole = PromptEngine(chat_tokenizer(), prompt)
    cut = engine.render(rows[0]).text
    assert cut == "C: One fox runs,\nQ: How many foxes run?\nA: Three." or cut.startswith(
        "C: One fox runs, quickly."
    )
    assert engine.render(rows[1])[:3] == whole.render(rows[1])[:3]
    source = tokenized(tmp_path, rows, policy, None, prompt=prompt)
    assert documents(source)[0] == [
        tuple(values.tolist() for values in engine.encode(rows[0]).values())
    ]
    ledger = source.materialize().ledger
    ledger.check()
    assert ledger.find("lengths", "d", "documents").out == {"budgets": 1}
    assert ledger.find("tokenize", "d", "tokens").out["truncated"] > 20
    # a list is written as text
    listed = {"context": ["one fox", "two foxes"] * 9, "q": "?", "a": "One."}
    assert "two" not in engine.render(listed).text
    # special strings that are ordinary text have more tokens
    escaping = TokenizerConfig(
        name_or_path=chat_tokenizer(), special_strings="escape", max_length=99
    )
    string = {"context": "<|im_end|>" * 12, "q": "?", "a": "One."}
    cut = PromptEngine(escaping, prompt, length=LengthPolicy(budgets={"context": 12}))
    assert cut.render(string).lost > 12
    # what was cut of a row that becomes no document is not in the books
    rows[1] |= {"context": "a", "a": "1"}
    counts = tokenized(tmp_path / "short", rows, policy, 20, prompt=prompt).materialize().manifest
    assert (counts.counts.docs, counts.counts.truncated) == (1, 0)
    assert counts.counts.rejects == {"nothing_to_train": 1}


def test_trim_oldest_turns_keeps_the_system_prompt_and_the_last_turn(tmp_path: Path) -> None:
    said = [word for i in range(6) for word in (f"question {i}", f"answer {i} fox fox")]
    rows = [
        {"messages": talk(*said, system="Be brief.")},
        {"messages": talk("a", "b")},
        {"messages": talk("a", "fox " * 900)},
    ]
    policy = LengthPolicy(policy="trim_oldest_turns")
    whole = documents(tokenized(tmp_path, rows, None, None, content_field="messages"))
    sizes = set()
    for limit in range(60, len(whole[0][0][0]) + 1, 19):
        source = tokenized(tmp_path, rows, policy, limit, content_field="messages")
        ((ids, mask),) = documents(source)[0]
        assert len(ids) <= limit
        shown = text(ids)
        kept = 6 - shown.count("question")
        fewer = {"messages": talk(*said[2 * kept :], system="Be brief.")}
        assert ids == PromptEngine(chat_tokenizer()).encode(fewer)[INPUT_IDS].tolist()
        if kept:
            more = {"messages": talk(*said[2 * kept - 2 :], system="Be brief.")}
            # no turn went without need
            assert len(PromptEngine(chat_tokenizer()).encode(more)[INPUT_IDS]) > limit
        sizes.add(kept)
        assert documents(source).keys() == {0, 1}
        ledger = source.materialize().ledger
        ledger.check()
        assert ledger.find("tokenize", "d", "rows").out["too_long"] == 1
        one = PromptEngine(chat_tokenizer(), max_length=limit, length=policy).encode(rows[0])
        assert (one[INPUT_IDS].tolist(), one[LOSS_MASK].tolist()) == (ids, mask)
    assert len(sizes) > 3


def test_trim_prompt_first_keeps_what_is_trained(tmp_path: Path) -> None:
    rows = [
        {"prompt": SENTENCES * 4, "completion": "They all do."},
        {"prompt": "a", "completion": "fox " * 90},
    ]
    found = documents(
        tokenized(
            tmp_path,
            rows,
            LengthPolicy(policy="trim_prompt_first", boundary="word"),
            40,
            prompt=PAIR,
        )
    )
    ((ids, mask),) = found[0]
    assert text([token for token, flag in zip(ids, mask, strict=True) if flag]).endswith(
        "They all do.<|im_end|>"
    )
    assert text(ids).endswith("They do. They all do.<|im_end|>")
    ((ids, mask),) = found[1]
    assert (len(ids), sum(mask)) == (40, 40)
    trained = sum(found[0][0][1])
    exact = documents(
        tokenized(
            tmp_path,
            rows[:1],
            LengthPolicy(policy="trim_prompt_first", boundary="word"),
            trained,
            prompt=PAIR,
        )
    )
    assert text(exact[0][0][0]) == "They all do.<|im_end|>", "what just fits is not cut at a word"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"policy": "shorten"}, "policy: 'shorten' is not an option"),
        ({"overlap": 3}, "overlap: has no effect on policy 'keep_start'"),
        ({"policy": "split", "overlap": -1}, "overlap: -1 tokens"),
        ({"policy": "drop", "boundary": "word"}, "boundary: has no effect on policy 'drop'"),
        ({"budgets": {"a": 0}}, "budgets.a: 0 tokens are too few"),
    ],
)
def test_policies_that_make_no_sense_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LengthPolicy(**options)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "limit", "options", "problem"),
    [
        (
            {"policy": "keep_end"},
            None,
            {},
            r"datasets\[0\].length.policy: 'keep_end' needs a max_length",
        ),
        (
            {"policy": "drop", "budgets": {"prompt": 3}},
            None,
            {"prompt": PAIR},
            r"datasets\[0\].length.policy: 'drop' needs a max_length",
        ),
        (
            {"policy": "split", "overlap": 10},
            20,
            {},
            r"datasets\[0\].length.overlap: 10, and max_length is 20. Give at most 9",
        ),
        ({"policy": "trim_oldest_turns"}, 20, {}, "length.policy: 'text' has no turns to trim"),
        ({"policy": "trim_prompt_first"}, 20, {}, "length.policy: a text has no prompt"),
        (
            {"budgets": {"completion": 3}},
            20,
            {"prompt": PAIR},
            "length.budgets.completion: no column of a prompt .have: prompt",
        ),
        *(
            (
                {"budgets": {"text": 3}},
                20,
                {"prompt": dataclasses.replace(PAIR, **{name: "text"})},
                r"length.budgets.text: no column of a prompt .have: prompt\)",
            )
            for name in ("rejected_column", "desirable_column")
        ),
    ],
)
def test_policies_that_rows_have_no_use_for_are_refused(
    tmp_path: Path, policy: Any, limit: Any, options: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        tokenized(
            tmp_path,
            [{"text": "x", "prompt": "x", "completion": "y"}],
            LengthPolicy(**policy),
            limit,
            **options,
        )


@pytest.mark.parametrize("policy", ["keep_start", "keep_end", "middle", "split"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_boundary_leaves_some_of_a_text_however_little_room_there_is(
    tmp_path: Path, policy: Any, limit: int
) -> None:
    whole = len(documents(tokenized(tmp_path, [{"text": "One two three."}], None, None))[0][0][0])
    source = tokenized(
        tmp_path, [{"text": "One two three."}], LengthPolicy(policy=policy, boundary="word"), limit
    )
    found = [len(ids) for ids, _ in documents(source)[0]]
    assert min(found) >= 1
    assert max(found) <= limit < whole
