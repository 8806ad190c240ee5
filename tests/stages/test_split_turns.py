"""Conversations that are longer than a row of packing are cut between their turns."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_support import chat_tokenizer, talk
from easypipe import (
    DatasetConfig,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    load_tokenizer,
)
from easypipe.core.schema import HAS_EOS, INPUT_IDS, LABELS, LOSS_MASK
from easypipe.transforms.chat.render import HostileTemplateError
from strategies import examples

ONCE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == "
    "'assistant' %}{% generation %}"
    "{{ message.content }}{% if loop.last %}{{ '<|im_end|>' }}{% endif %}{% endgeneration %}{% "
    "else %}{{ message.content + '\\n' }}"
    "{% endif %}{% endfor %}"
)
OPEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% if not loop.last %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)


def pipeline(
    folder: Path,
    rows: Any,
    pack: PackStageConfig | None,
    *,
    streaming: bool = False,
    **options: Any,
) -> Pipeline:
    data = DatasetConfig(
        name="chat",
        data_files=rows,
        tokenizer=chat_tokenizer(),
        content_field="messages",
        **options,
    )
    load, more = (
        LoadStageConfig(batch_size=2, drop_last=False),
        {"streaming": True, "num_streams": 1} if streaming else {},
    )
    config = PipelineConfig(datasets=[data], pack=pack, load=load, seed=3, cache_dir=folder, **more)  # type: ignore[arg-type]
    return Pipeline.from_config(config).source().tokenize()


def documents(
    folder: Path, rows: Any, pack: PackStageConfig | None, **options: Any
) -> list[tuple[int, str, str, int]]:
    """(row, text, what of it is trained, has_eos) of each."""
    source = pipeline(folder, rows, pack, **options).get_data()["chat"]
    batch, decode = source.read(0, 0, len(rows)), load_tokenizer(chat_tokenizer()).decode
    columns = (
        batch.column(name).to_pylist()
        for name in (batch.schema.names[2], INPUT_IDS, LOSS_MASK, HAS_EOS)
    )
    return [
        (row, decode(ids), decode([i for i, m in zip(ids, mask, strict=True) if m]), eos)
        for row, ids, mask, eos in zip(*columns, strict=True)
    ]


def targets(made: Pipeline) -> int:
    return sum(int((np.asarray(batch[LABELS]) >= 0).sum()) for batch in made.pack().load().build())


@examples(12)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 9)), min_size=1, max_size=5
    ),
    st.sampled_from([60, 90, 200]),
)
def test_pieces_are_conversations_and_train_what_the_whole_does(
    tmp_path_factory: Any, shapes: list[tuple[int, bool, int]], room: int
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    rows = [
        {
            "messages": talk(
                *(
                    f"{word} {i}{'!' * (i * extra % 7)}"
                    for i in range(n)
                    for word in ("fox", "Four")
                ),
                system="Be brief." if system else None,
            )
        }
        for n, system, extra in shapes
    ]
    pack = PackStageConfig(seq_length=room)
    whole, found = documents(folder, rows, None), documents(folder, rows, pack)
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    for row, text, trained, _ in whole:
        pieces = [piece for piece in found if piece[0] == row]
        head = system if text.startswith(system) else ""
        assert "".join(piece[2] for piece in pieces) == trained
        assert head + "".join(piece[1].removeprefix(head) for piece in pieces) == text
        assert all(piece[1].startswith(head + "<|im_start|>user\n") for piece in pieces)
        assert all(piece[3] for piece in pieces[:-1])  # packing ends none of them
    made = pipeline(folder, rows, pack)
    trained = targets(made)
    ledger = made.ledger()
    ledger.check()
    encoded = [
        one.ledger().find("tokenize", "chat", "tokens").into["encoded"]
        for one in (made, pipeline(folder, rows, None))
    ]
    assert encoded[0] == encoded[1]  # a system prompt that several pieces repeat counts once
    assert "without their prompt" not in ledger.find("labels", "chat", "tokens").out
    assert (
        ledger.find("labels", "chat", "tokens").out["targets"]
        == trained
        == ledger.find("loss_mask", "chat", "tokens").out["targets"]
    )
    if len(found) > len(whole):
        assert ledger.find("lengths", "chat", "documents").out == {
            "split_turns": len({row for row, *_ in found if sum(r == row for r, *_ in found) > 1})
        }
    forward = pipeline(folder, rows, pack, streaming=True)
    assert targets(forward) == trained


def test_what_fills_a_row_exactly_is_not_cut(tmp_path: Path) -> None:
    rows = [{"messages": talk(*("fox", "Four") * n)} for n in (3, 2)]
    source = pipeline(tmp_path, rows, None).get_data()["chat"]
    three, two = (len(ids) for ids in source.read(0, 0, 2).column(INPUT_IDS).to_pylist())

    def pieces(room: int) -> list[int]:
        found = documents(tmp_path, rows[:1], PackStageConfig(seq_length=room))
        return [text.count("Four") for _, text, *_ in found]

    assert [pieces(room) for room in (three, three - 1)] == [[3], [1, 2]]
    assert [pieces(room) for room in (two, two - 1)] == [[1, 2], [1, 1, 1]]


@pytest.mark.parametrize("more", ["a", "ab", "abc"])
def test_what_fits_is_not_cut_whatever_its_pieces_cost(tmp_path: Path, more: str) -> None:
    template = "{% if messages|length == 2 %}" + more + "{% endif %}" + ONCE
    rows = [{"messages": talk(*("fox", "Four") * 3)}]
    (whole,) = documents(tmp_path, rows, None, chat_template=template)
    source = pipeline(tmp_path, rows, None, chat_template=template).get_data()["chat"]
    (size,) = map(len, source.read(0, 0, 1).column(INPUT_IDS).to_pylist())
    for room, count in ((size, 1), (size - 1, 2)):
        pack = PackStageConfig(seq_length=room)
        found = documents(tmp_path, rows, pack, chat_template=template)
        assert len(found) == count
        assert count > 1 or found == [whole]


def test_a_template_that_goes_too_far_on_a_piece_names_its_row(tmp_path: Path) -> None:
    far = (
        "{% if messages|length == 2 and 'bad' in messages[0].content %}"
        "{% for i in range(10**9) %}{% endfor %}{% endif %}"
    )
    rows = [{"messages": talk(*[f"{word} " * 30] * 4)} for word in ("fox", "bad")]
    with pytest.raises(HostileTemplateError, match=r"row 1, column 'messages'"):
        documents(tmp_path, rows, PackStageConfig(seq_length=200), chat_template=far + ONCE)


@pytest.mark.parametrize("system", [None, "Be brief, and think of " + "the fox, " * 3])
def test_pieces_hold_as_many_exchanges_as_fit(tmp_path: Path, system: str | None) -> None:
    """But the first, which has what is left: with one exchange more each would be too long."""
    said = (f"{word} {i}" for i in range(12) for word in ("fox", "Four"))
    rows, tokenizer = [{"messages": talk(*said, system=system)}], load_tokenizer(chat_tokenizer())
    found = [text for _, text, *_ in documents(tmp_path, rows, PackStageConfig(seq_length=150))]
    assert len(found) > 2
    head, begins = found[0].partition("<|im_start|>user")[:2]
    for before, piece in itertools.pairwise(found):
        more = begins + before.rpartition(begins)[2] + piece.removeprefix(head)
        assert len(tokenizer.reference_encode(head + more)) > 148  # packing ends a row with EOS


def test_pack_tells_tokenize_its_rows_however_it_is_called(tmp_path: Path) -> None:
    rows = [{"messages": talk(*[f"{word} {i}" for i in range(8) for word in ("fox", "Four")])}]
    pack, more = (
        PackStageConfig(seq_length=60),
        PackStageConfig(seq_length=60, train_continued=True),
    )
    expected = targets(pipeline(tmp_path, rows, pack))
    for config, called in ((None, pack), (PackStageConfig(seq_length=90), pack), (more, pack)):
        before = pipeline(tmp_path, rows, config)
        assert (
            sum(
                int((np.asarray(b[LABELS]) >= 0).sum())
                for b in before.copy().mix().pack(called).load().build()
            )
            == expected
        )
        assert (
            before.get_data()["chat"].fingerprint
            == pipeline(tmp_path, rows, config).get_data()["chat"].fingerprint
        )
    whole = pipeline(tmp_path, rows, pack).pack(more)
    assert (
        whole.tokenized()["chat"].fingerprint
        == pipeline(tmp_path, rows, None).tokenized()["chat"].fingerprint
    )


def test_an_exchange_that_is_longer_than_a_row_stays_whole_and_is_trained_in_its_first_row(
    tmp_path: Path,
) -> None:
    rows = [
        {"messages": talk("fox", "Four.", "fox", "fox " * 90, "Sure?", "Yes", system="Be brief.")}
    ]
    pack = PackStageConfig(seq_length=60)
    found = documents(tmp_path, rows, pack)
    assert [trained.count("fox") for _, _, trained, _ in found] == [0, 90, 0]
    made = pipeline(tmp_path, rows, pack)
    trained, ledger = targets(made), made.ledger()
    labels = ledger.find("labels", "chat", "tokens").out
    assert labels["targets"] == trained
    assert labels["without their prompt"] > 60


def test_what_is_trained_of_the_whole_alone_decides_what_pieces_train(tmp_path: Path) -> None:
    said = [f"{word} {i}" for i in range(8) for word in ("fox", "Four")]
    flagged = talk(*said)
    flagged[1]["train"] = True
    (last,) = documents(
        tmp_path,
        [{"messages": talk(*said)}],
        PackStageConfig(seq_length=60),
        train_on="last_assistant",
    )
    assert last[2] == "Four 7<|im_end|>"
    assert "fox 6" in last[1]  # as much as fits stands before it
    both = documents(
        tmp_path, [{"messages": flagged}], PackStageConfig(seq_length=60), train_on="last_assistant"
    )
    assert [piece[2] for piece in both] == ["Four 0<|im_end|>", "Four 7<|im_end|>"]
    made = pipeline(
        tmp_path, [{"messages": flagged}], PackStageConfig(seq_length=60), train_on="last_assistant"
    )
    targets(made)
    made.ledger().check()


@pytest.mark.parametrize(
    ("template", "once"),
    [(ONCE, True), (OPEN, False)],
    ids=["an end of the whole", "no end of the last turn"],
)
def test_turns_end_as_they_do_in_the_whole(tmp_path: Path, template: str, once: bool) -> None:
    rows = [{"messages": talk(*[f"{word} {i}" for i in range(8) for word in ("fox", "Four")])}]
    ((_, _, trained, _),) = documents(tmp_path, rows, None, chat_template=template)
    found = documents(tmp_path, rows, PackStageConfig(seq_length=60), chat_template=template)
    assert len(found) > 1
    assert "".join(piece[2] for piece in found) == trained
    assert trained.count("<|im_end|>") == (1 if once else 8)
    assert all(piece[3] for piece in found)


@pytest.mark.parametrize(
    ("pack", "options"),
    [
        ({"train_continued": True}, {}),
        ({"oversize": "truncate"}, {}),
        ({"strategy": "stream"}, {}),
        ({"enabled": False}, {}),
        ({}, {"train_on": "all"}),
        ({}, {"length": {"policy": "drop"}, "tokenizer_kwargs": {"max_length": 400}}),
        ({}, {"tokenizer_kwargs": {"max_length": 400}}),
    ],
)
def test_nothing_is_cut_where_something_else_is_said(
    tmp_path: Path, pack: dict[str, Any], options: dict[str, Any]
) -> None:
    rows = [{"messages": talk(*[f"{word} {i}" for i in range(8) for word in ("fox", "Four")])}]
    before, after = (
        pipeline(tmp_path, rows, made, **options).get_data()["chat"]
        for made in (None, PackStageConfig(seq_length=60, **pack))
    )
    assert before.fingerprint == after.fingerprint
    assert after.read(0, 0, 1).num_rows == 1


def test_the_plan_tells_of_answers_that_are_longer_than_a_row(tmp_path: Path) -> None:
    rows = [{"messages": talk("fox", "Four " * 200)}, {"messages": talk("a", "b")}]

    def notes(pack: PackStageConfig) -> list[str]:
        made = pipeline(tmp_path, rows, pack).pack()
        return [note for note in made.plan().notes if "go on with a document" in note]

    (note,) = notes(PackStageConfig(seq_length=64))
    assert note.startswith("chat: 6 pieces go on with a document of another row")
    assert not notes(PackStageConfig(seq_length=64, train_continued=True))
    assert not notes(PackStageConfig(seq_length=600))
