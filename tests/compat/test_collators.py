"""Collators of tokens: padding, masks, the one shift, hidden tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe import (
    UniversalDataModule,
    create_causal_lm_collate,
    create_collate_fn,
    create_masked_lm_collate,
    create_seq2seq_collate,
    create_vision_collate,
)
from easypipe.compat.collators import default_collate
from easypipe.compat.masking import word_starts
from easypipe.core.errors import ConfigError, SourceError, TokenizerError
from easypipe.core.schema import OutputSchema
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from laws import assert_labels, assert_same_batch
from pipelines import texts, tokenizer
from strategies import examples

ROWS = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}, {"input_ids": [9, 4]}]


def rows_of_tokens() -> st.SearchStrategy[list[dict[str, list[int]]]]:
    one = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 1)), min_size=1, max_size=12)
    return st.lists(one, min_size=1, max_size=6).map(
        lambda rows: [
            {"input_ids": [t for t, _ in row], "loss_mask": [m for _, m in row]} for row in rows
        ]
    )


def test_f27_create_collate_fn_pads_and_never_shifts():
    batch = create_collate_fn(pad_token_id=3)(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 4, 3, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8], [9, 4, -100, -100]]
    assert {column.dtype for column in batch.values()} == {np.dtype(np.int32)}


def test_labels_are_masked_where_attention_is_0_whatever_they_were():
    row = {"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1], "labels": [5, 6, 40]}
    # labels of tokens need not be tokens
    assert create_collate_fn(label_pad_token_id=-1)([row])["labels"].tolist() == [[5, -1, 40]]


def test_left_padding_fixed_length_lists_and_other_columns():
    collate = create_collate_fn(0, padding_side="left", max_length=5, return_tensors=False)
    batch = collate(
        [row | {"weight": 0.5, "word_ids": list(range(len(row["input_ids"])))} for row in ROWS]
    )
    assert batch["input_ids"] == [[0, 5, 6, 7, 8], [0, 0, 0, 9, 4]]
    assert batch["word_ids"] == [[0, 0, 1, 2, 3], [0, 0, 0, 0, 1]]
    assert batch["weight"] == [0.5, 0.5]
    with pytest.raises(
        SourceError,
        match=r"row 0 of the batch: 4 tokens do not fit max_length 3.*raise max_length to 4",
    ):
        create_collate_fn(max_length=3)(ROWS)
    assert create_collate_fn(max_length=4)(ROWS)["input_ids"].shape == (2, 4)


def test_one_label_for_a_row():
    assert create_collate_fn()(
        [{"input_ids": [1, 2], "labels": 1}, {"input_ids": [1], "labels": 0}]
    )["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"labels": 1}, {}], "row 1 of the batch, column 'labels': no label of the row"),
        ([{}, {"labels": 1}], "row 0 of the batch, column 'labels': no label of the row"),
        ([{"labels": [5]}, {"labels": 1}], "row 0 of the batch, column 'labels'"),
        ([{}, {"weight": 1}], "row 0 of the batch, column 'weight': there is none"),
        ([{"weight": 1}, {}], "row 1 of the batch, column 'weight': there is none"),
    ],
)
def test_rows_of_one_batch_have_the_same_columns(rows: list[dict], message: str):
    with pytest.raises(SourceError, match=message):
        create_collate_fn()([{"input_ids": [5]} | row for row in rows])


def test_dtypes_come_from_the_output_schema_and_jax_arrays_from_return_tensors():
    import jax

    wide = create_collate_fn(
        schema=OutputSchema(dtypes={"labels": "int64", "attention_mask": "bool"})
    )(ROWS)
    assert (wide["labels"].dtype, wide["attention_mask"].dtype, wide["input_ids"].dtype) == (
        np.int64,
        np.bool_,
        np.int32,
    )
    on_device = create_causal_lm_collate(return_tensors="jax")(ROWS)
    assert all(isinstance(column, jax.Array) for column in on_device.values())
    assert_same_batch(on_device, create_causal_lm_collate()(ROWS))
    with pytest.raises(SourceError, match=r"column 'input_ids': 300 does not fit uint8"):
        create_collate_fn(schema=OutputSchema(dtypes={"input_ids": "uint8"}))(
            [{"input_ids": [300]}]
        )
    with pytest.raises(ConfigError, match=r"dtypes.labels: 'text' is not a dtype of numbers"):
        OutputSchema(dtypes={"labels": "text"})


@examples(40)
@given(rows_of_tokens(), st.sampled_from(["right", "left"]))
def test_causal_lm_shifts_once(rows, side):
    batch = create_causal_lm_collate(padding_side=side)(rows)
    width = batch["input_ids"].shape[1]
    mask = np.zeros(batch["input_ids"].shape, np.int64)
    for r, row in enumerate(rows):
        start = 0 if side == "right" else width - len(row["loss_mask"])
        mask[r, start : start + len(row["loss_mask"])] = row["loss_mask"]
    assert_labels(batch, mask)
    assert (batch["attention_mask"] == (batch["segment_ids"] > 0)).all()


def test_a_token_that_is_not_attended_to_is_in_no_segment_and_no_target():
    row = {"input_ids": [5, 6, 7, 8], "segment_ids": [1, 1, 2, 2], "attention_mask": [1, 1, 1, 0]}
    batch = create_causal_lm_collate()([row])
    found = {name: batch[name].tolist() for name in ("segment_ids", "attention_mask", "labels")}
    assert found == {
        "segment_ids": [[1, 1, 2, 0]],
        "attention_mask": [[1, 1, 1, 0]],
        "labels": [[6, -100, -100, -100]],
    }


MASKED = {
    "input_ids": [5, 6, 7, 8],
    "completion_mask": [False, True, True, True],
    "assistant_masks": [1, 1, 0, 1],
}


def test_the_masks_of_other_libraries_say_which_tokens_are_targets():
    shown = {"input_ids": [[5, 6, 7, 8]], "attention_mask": [[1, 1, 1, 1]]}
    padded = create_collate_fn(return_tensors=False)([MASKED])
    assert padded == shown | {"labels": [[-100, 6, -100, 8]]}
    two = {"segment_ids": [1, 1, 2, 2]}
    packed = create_causal_lm_collate(return_tensors=False)([MASKED | two])
    assert packed["labels"] == [[6, -100, 8, -100]]
    hidden = create_masked_lm_collate(mask_token_id=1, vocab_size=9, probability=0.99)([MASKED])
    assert hidden["labels"].tolist() == [[-100, 6, -100, 8]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"completion_mask": [0, 2]}, "'completion_mask': token 1 has 2. Give 1 for a target"),
        (
            {"completion_mask": [0, 1], "loss_mask": [-1, 1]},
            "'loss_mask': token 0 has -1. Give 1 for a target",
        ),
        ({"completion_mask": None}, "'completion_mask': null instead of a mask. Give 1"),
        ({"completion_mask": [1]}, "'completion_mask': 1 values for 2 tokens"),
        ({"completion_mask": [0.5, 1]}, "'completion_mask': expected a row of integers"),
        ({}, "'completion_mask': there is none, which other rows have"),
    ],
)
def test_a_mask_of_other_values_is_a_bad_row(row: dict, message: str):
    rows = [{"input_ids": [5, 6], "completion_mask": [0, 1]}, {"input_ids": [7, 8]} | row]
    for collate in (create_causal_lm_collate(), create_collate_fn()):
        with pytest.raises(SourceError, match=f"row 1 of the batch, column {message}"):
            collate(rows)


@pytest.mark.parametrize("number", [1 << 31, (1 << 32) + 5, (1 << 64) - 100, -1, -100])
def test_an_id_that_batches_cannot_hold_is_refused_by_row_and_column(number: int):
    kind = np.uint64 if number > 0 else np.int64
    rows = [{"input_ids": [5, 6]}, {"input_ids": np.array([7, number], kind)}]
    labelled = [row | {"labels": [5]} for row in rows]
    where = "row 1 of the batch, column 'input_ids'"
    for collate, some in (
        (create_causal_lm_collate(), rows),
        (create_collate_fn(), rows),
        (create_masked_lm_collate(mask_token_id=1, vocab_size=9), rows),
        (create_seq2seq_collate(0, decoder_start_token_id=1), labelled),
    ):
        message = rf"{where}: ({number} does not fit int32|token 1 has {number}, outside \[)"
        with pytest.raises(SourceError, match=message):
            collate(some)


def test_other_numbers_that_a_column_cannot_hold_are_refused():
    wide = create_collate_fn(schema=OutputSchema(dtypes={"input_ids": "int64"}))
    ids = {"input_ids": [5, 1 << 40], "labels": [-1, -100]}
    assert wide([ids])["input_ids"].tolist() == [[5, 1 << 40]]
    for collate, row, message in (
        (create_collate_fn(), {"hash": np.full(2, (1 << 64) - 1)}, r"'hash': token 0 has 18446744073709551615, .*Give numbers of that range."),
        (create_causal_lm_collate(), {"segment_ids": [1, (1 << 32) + 1]}, r"'segment_ids': token 1 has"),
        (create_collate_fn(), {"labels": [5, 1 << 31]}, r"'labels': 2147483648 does not fit int32"),
        (create_seq2seq_collate(0), {"labels": [5, -1]}, "'labels': token 1 has label -1. Give the id, or -100"),
        (create_vision_collate(), {"image": np.zeros((2, 2)), "label": (1 << 64) - 100}, "'labels': 18446744073709551516 does not fit int32"),
    ):  # fmt: skip
        with pytest.raises(SourceError, match=f"row 0 of the batch, column {message}"):
            collate([{"input_ids": [5, 6]} | row])
    with pytest.raises(ConfigError, match="pad_token_id: 2147483648 is no id that fits int32"):
        create_causal_lm_collate(1 << 31)
    with pytest.raises(ConfigError, match=r"^label_pad_token_id: 'x' is no id that fits int32"):
        create_collate_fn(label_pad_token_id="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="decoder_start_token_id: -3000000000 is no id"):
        create_seq2seq_collate(0, decoder_start_token_id=-3_000_000_000)
    whole = create_masked_lm_collate(load_tokenizer(tokenizer()), mask_token_id=3, whole_word=True)
    with pytest.raises(SourceError, match="row 0 of the batch, column 'input_ids': token 1: 999"):
        whole([{"input_ids": [5, 999]}])


@pytest.mark.parametrize(
    "values",
    [
        [-1, (1 << 63) + 1],
        [0.5, (1 << 53) + 1],
        [[1.0, 2], [0.5, (1 << 53) + 1]],
        [[1, 2], [np.uint64((1 << 63) + 1), -1]],
        [np.array([0.5]), np.array([(1 << 53) + 1])],
    ],
)
def test_integers_that_would_become_fractions_are_refused(values: list):
    rows = [{"n": value} for value in values]
    message = "row 1 of the batch, column 'n': [0-9]+ would become 9.*: no type holds all numbers. "
    with pytest.raises(SourceError, match=message + "Give texts, or smaller numbers"):
        default_collate(rows)
    assert default_collate(rows[:1])["n"].tolist() == [np.asarray(values[0]).tolist()]


def test_large_floats_and_exact_integers_are_stacked():
    rows = [{"n": [1 << 60, 0.5]}, {"n": np.array([1e300, np.inf])}, {"n": [np.nan, 3]}]
    assert default_collate(rows)["n"][:2].tolist() == [[2.0**60, 0.5], [1e300, np.inf]]


@pytest.mark.parametrize(
    ("make", "option", "values", "words"),
    [
        (create_collate_fn, "max_length", ["a", 2.5, True, 0], "is not a row length"),
        (create_seq2seq_collate, "max_target_length", ["a"], "is not a row length"),
        (create_causal_lm_collate, "schema", [{"labels": "int64"}, 3], "is no OutputSchema. Give"),
        (create_causal_lm_collate, "pad_token_id", [None, 1.5, True], "is no id that fits int32"),
        (create_masked_lm_collate, "probability", ["a", 1, True], "is not a share of tokens"),
        (create_masked_lm_collate, "seed", [1.5, "a"], "is no whole number. Give 0 or another"),
        (create_masked_lm_collate, "vocab_size", [9.5], "is no id that fits int32"),
        (create_masked_lm_collate, "mask_token_id", [0.5], "is outside the vocabulary of 9"),
        (
            create_vision_collate,
            "image_size",
            [2.5, True, "a"],
            "are not its numbers. Give a tuple",
        ),
        (create_vision_collate, "mean", [3, ["a"] * 3, [1, 1, np.nan]], "are not its numbers"),
        (create_vision_collate, "schema", [4], "is no OutputSchema"),
    ],
)
def test_options_that_are_no_numbers_are_refused_by_name(make, option, values, words):
    known = {"mask_token_id": 3, "vocab_size": 9} if make is create_masked_lm_collate else {}
    known |= {"std": [1, 1, 1]} if option == "mean" else {}
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{option}: .* ?{words}".replace(". ", r"\. ")):
            make(**known | {option: value})


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("float16", 4097),
        ("float16", 70_000),
        ("float32", (1 << 24) + 1),
        ("float64", (1 << 53) + 1),
    ],
)
def test_integers_that_a_type_of_fractions_rounds_are_refused(kind: str, number: int):
    collate = create_collate_fn(schema=OutputSchema(dtypes={"n": kind}))
    message = f"row 1 of the batch, column 'n': {number} does not fit {kind}"
    with pytest.raises(SourceError, match=message):
        collate([{"input_ids": [5], "n": 4096}, {"input_ids": [5], "n": number}])
    batch = collate([{"input_ids": [5], "n": 4096}, {"input_ids": [5], "n": -3}])
    assert (batch["n"].tolist(), batch["n"].dtype) == ([4096, -3], kind)


def test_rows_that_were_packed_keep_their_positions_as_in_a_pipeline():
    row = {"input_ids": [5, 6, 7], "segment_ids": [1, 2, 2], "position_ids": [3, 0, 7]}
    options = {"batch_size": 1, "seed": 1}
    batches = [
        next(iter(UniversalDataModule([row], tokenizer=one, **options).train_dataloader()))
        for one in (None, tokenizer())
    ]
    assert_same_batch(*batches)
    assert batches[0]["position_ids"].tolist() == [[3, 0, 7]]


def test_flattened_rows_are_documents_that_do_not_see_each_other():
    """transformers' DataCollatorWithFlattening writes only positions."""
    row = {"input_ids": [5, 6, 7, 8, 9], "position_ids": [0, 1, 0, 1, 2]}
    batch = create_causal_lm_collate()([row, {**row, "attention_mask": [1, 1, 1, 1, 0]}])
    assert batch["segment_ids"].tolist() == [[1, 1, 2, 2, 2], [1, 1, 2, 2, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 1, 0]]
    assert batch["labels"][0].tolist() == [6, -100, 8, 9, -100]


def test_causal_lm_refuses_labels_that_were_shifted():
    with pytest.raises(
        SourceError,
        match=r"column 'labels': token 0 has label 6, its id is 5. Give unshifted labels",
    ):
        create_causal_lm_collate()([{"input_ids": [5, 6], "labels": [6, -100]}])
    assert create_causal_lm_collate(label_pad_token_id=-1)(
        [{"input_ids": [5, 6], "labels": [-100, 6]}]
    )["labels"].tolist() == [[6, -1]]


def test_seq2seq_starts_the_decoder():
    rows = [{"input_ids": [5, 6, 7], "labels": [8, 9]}, {"input_ids": [4], "labels": [3, -100, 2]}]
    batch = create_seq2seq_collate(0, decoder_start_token_id=1, max_length=4)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [4, 0, 0, 0]]
    assert batch["labels"].tolist() == [[8, 9, -100], [3, -100, 2]]
    assert batch["decoder_input_ids"].tolist() == [[1, 8, 9], [1, 3, 0]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert create_seq2seq_collate(0, decoder_start_token_id=1, max_target_length=5)(rows)[
        "labels"
    ].shape == (2, 5)
    # a decoder reads what it is not trained on
    masked = [{**row, "loss_mask": mask} for row, mask in zip(rows, ([0, 1], [1] * 3), strict=True)]
    masked = create_seq2seq_collate(0, decoder_start_token_id=1, max_length=4)(masked)
    assert masked["labels"].tolist() == [[-100, 9, -100], [3, -100, 2]]
    assert np.array_equal(masked["decoder_input_ids"], batch["decoder_input_ids"])
    with pytest.raises(
        SourceError, match=r"row 1 .* 'completion_mask': there is none, which other"
    ):
        create_seq2seq_collate(0)([{**rows[0], "completion_mask": [0, 1]}, rows[1]])
    with pytest.raises(SourceError, match="column 'loss_mask': 3 values for 2 tokens"):
        create_seq2seq_collate(0)([{**rows[0], "loss_mask": [0, 1, 1]}])
    with pytest.raises(SourceError, match="column 'labels': no token to predict"):
        create_seq2seq_collate(0, decoder_start_token_id=1)([{"input_ids": [5], "labels": []}])


@examples(20)
@given(rows_of_tokens(), rows_of_tokens(), st.integers(0, 3))
def test_a_decoder_begins_at_its_first_slot_whichever_side_its_encoder_is_padded_on(
    read: list[dict], told: list[dict], more: int
):
    """On the left the encoder's rows end where the others begin; nothing else is another. Each has
    a width of its own.
    """
    pairs = list(zip(read, told, strict=False))
    rows = [{"input_ids": a["input_ids"], "labels": b["input_ids"]} for a, b in pairs]
    lengths = [[len(row[name]) for row in rows] for name in ("input_ids", "labels")]
    width, out_width = max(lengths[0]) + 2 * more, max(lengths[1]) + more
    right, left = (
        create_seq2seq_collate(
            501,
            padding_side=side,
            max_length=width,
            decoder_start_token_id=502,
            max_target_length=out_width,
        )(rows)
        for side in ("right", "left")
    )
    for i, (row, length) in enumerate(zip(rows, lengths[0], strict=True)):
        for name, filler in (("input_ids", 501), ("attention_mask", 0)):
            own = row["input_ids"] if name == "input_ids" else [1] * length
            assert right[name][i].tolist() == own + [filler] * (width - length)
            assert left[name][i].tolist() == [filler] * (width - length) + own
    for i, (row, length) in enumerate(zip(rows, lengths[1], strict=True)):
        rest = out_width - length
        wanted = {
            "labels": row["labels"] + [-100] * rest,
            "decoder_input_ids": [502, *row["labels"], *[501] * rest][:out_width],
            "decoder_attention_mask": [1] * length + [0] * rest,
        }
        for batch in (right, left):
            assert {name: batch[name][i].tolist() for name in wanted} == wanted


def test_masked_lm_hides_by_berts_shares_and_leaves_the_rest():
    rows = [{"input_ids": list(range(5, 205))} for _ in range(50)]
    collate = create_masked_lm_collate(
        mask_token_id=3, vocab_size=300, special_token_ids=[0, 1, 2, 4], seed=5
    )
    batch = collate(rows, keys=range(50))
    chosen = batch["labels"] != -100
    ids = np.array([row["input_ids"] for row in rows])
    assert (batch["labels"][chosen] == ids[chosen]).all()
    assert (batch["input_ids"][~chosen] == ids[~chosen]).all()
    assert abs(chosen.mean() - 0.15) < 0.015
    masked, kept = (
        (batch["input_ids"] == 3)[chosen].mean(),
        (batch["input_ids"] == ids)[chosen].mean(),
    )
    assert (abs(masked - 0.8) < 0.04, abs(kept - 0.1) < 0.03) == (True, True)
    assert batch["input_ids"].min() >= 3  # special tokens are never drawn
    drawn = batch["input_ids"][chosen & (batch["input_ids"] != 3) & (batch["input_ids"] != ids)]
    assert len(set(drawn.tolist())) > 80  # of about 150
    assert drawn.min() < 30 < 270 < drawn.max()
    assert len({row.tobytes() for row in chosen}) == 50  # every row has draws of its own


def test_masked_lm_hides_nothing_that_is_not_attended_to():
    attended = [1] * 15 + [0] * 5
    rows = [{"input_ids": list(range(5, 25)), "attention_mask": attended} for _ in range(20)]
    batch = create_masked_lm_collate(mask_token_id=3, vocab_size=30, probability=0.9)(
        rows, keys=range(20)
    )
    assert (batch["labels"][:, 15:] == -100).all()
    assert (batch["input_ids"][:, 15:] == np.arange(20, 25)).all()
    assert (batch["labels"][:, :15] != -100).any(axis=0).all()


def test_masked_lm_hides_no_token_that_is_no_target():
    made = create_masked_lm_collate(mask_token_id=3, vocab_size=30, probability=0.9)
    for name, no in (("loss_mask", 0), ("labels", -100)):
        row = {"input_ids": [*range(5, 25)], name: [*[no] * 15, *[1] * 5]}
        row[name][15:] = [1] * 5 if name == "loss_mask" else row["input_ids"][15:]
        labels = made([row] * 20, keys=range(20))["labels"]
        assert (labels[:, :15] == -100).all()
        assert (labels[:, 15:] != -100).any(axis=0).all()


def test_masked_lm_depends_on_the_row_and_its_key_alone():
    rows = [{"input_ids": list(range(5, 25))}, {"input_ids": list(range(9, 20))}]
    collate = create_masked_lm_collate(mask_token_id=3, vocab_size=30)
    both, alone = collate(rows, keys=[7, 8]), collate(rows[1:], keys=[8])
    np.testing.assert_array_equal(both["labels"][1, :11], alone["labels"][0])
    assert_same_batch(collate(rows), collate(rows))
    assert (collate(rows, keys=[1, 2])["labels"] != collate(rows, keys=[3, 4])["labels"]).any()
    other = create_masked_lm_collate(mask_token_id=3, vocab_size=30, seed=1)
    assert (other(rows)["labels"] != collate(rows)["labels"]).any()


def test_whole_words_are_hidden_together(tmp_path: Path):
    from easypipe import train_bpe

    tokenizer = load_tokenizer(str(train_bpe(texts(200), 300, ["[MASK]"], tmp_path / "bpe")))
    rows = [{"input_ids": tokenizer.reference_encode(text)} for text in texts(60)]
    batch = create_masked_lm_collate(tokenizer, whole_word=True, probability=0.4)(rows)
    starts = word_starts(tokenizer)
    split = 0
    for r, row in enumerate(rows):
        words = np.cumsum(starts[row["input_ids"]])
        for word in np.unique(words):
            hidden = (batch["labels"][r, : len(words)] != -100)[words == word]
            assert hidden.all() or not hidden.any()
            split += hidden.size > 1
    assert split > 50
    first = {text: starts[tokenizer.reference_encode(text)[0]] for text in ("\n", "\t", " a", "a")}
    assert first == {"\n": True, "\t": True, " a": True, "a": False}
    by_ids = [{"input_ids": [5, 6, 7, 8, 5], "word_ids": [None, 0, 0, 1, None]}] * 8
    labels = create_masked_lm_collate(
        mask_token_id=3, vocab_size=9, whole_word=True, probability=0.5
    )(by_ids, keys=range(8))["labels"]
    hidden = labels != -100
    assert (hidden[:, 1] == hidden[:, 2]).all()
    assert (hidden[:, 0] != hidden[:, 4]).any()  # tokens in no word are none together


def test_what_masked_lm_cannot_know_it_asks_for(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"mask_token_id: is not known. Give it, or a tokenizer that has one"
    ):
        create_masked_lm_collate(vocab_size=9)
    with pytest.raises(SourceError, match="column 'word_ids': whole_word needs it"):
        create_masked_lm_collate(mask_token_id=3, vocab_size=9, whole_word=True)(
            [{"input_ids": [1]}]
        )
    with pytest.raises(ConfigError, match=r"probability: 1\.5 is not a share"):
        create_masked_lm_collate(mask_token_id=3, vocab_size=9, probability=1.5)
    with pytest.raises(SourceError, match="9 is outside the vocabulary of 9"):
        create_masked_lm_collate(mask_token_id=3, vocab_size=9)([{"input_ids": [9]}])
    plain = {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(plain | {"version": "1.0", "added_tokens": []})
    )
    with pytest.raises(TokenizerError, match="nothing in its vocabulary tells where words begin"):
        word_starts(load_tokenizer(str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_tensors": "pt"}, "return_tensors: 'pt' is not made here.*TorchBatches"),
        ({"padding_side": "top"}, "padding_side: 'top' is not a side"),
        ({"max_length": 0}, "max_length: 0 is not a row length"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        create_collate_fn(**options)


def test_bad_rows_are_named():
    collate = create_collate_fn()
    with pytest.raises(
        SourceError, match=r"row 1 of the batch, column 'input_ids': there is none .have: text"
    ):
        collate([{"input_ids": [1]}, {"text": "a"}])
    with pytest.raises(
        SourceError, match="row 0 of the batch, column 'attention_mask': 1 values for 2 tokens"
    ):
        collate([{"input_ids": [1, 2], "attention_mask": [1]}])
    with pytest.raises(SourceError, match="expected a row of integers, got float64"):
        collate([{"input_ids": [0.5]}])
    with pytest.raises(SourceError, match="expected a row of integers, got object"):
        collate([{"input_ids": [[1, 2], [3]]}])


def test_default_collate():
    assert default_collate([(np.ones(3), 1), (np.zeros(3), 2)])[1].tolist() == [1, 2]
    assert default_collate([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}])["b"] == ["x", "y"]
    assert default_collate([np.ones(2), np.ones(2)])["data"].shape == (2, 2)
    with pytest.raises(
        SourceError, match=r"row 1 of the batch, column 'a': shape \(2,\), the first row has \(3,\)"
    ):
        default_collate([{"a": [1, 2, 3]}, {"a": [1, 2]}])
    with pytest.raises(SourceError, match="row 1 of the batch: has"):
        default_collate([{"a": 1}, {"b": 1}])
    with pytest.raises(SourceError, match="row 1 of the batch: has 1 columns, the first row has 2"):
        default_collate([(1, 2), (1,)])
    boxes = [[np.zeros((2, 2)), np.zeros((2, 3))], [[1], 2]]  # parts of several shapes
    assert default_collate([{"a": value} for value in boxes])["a"] == boxes
    assert default_collate(boxes)["data"] == boxes
    assert create_collate_fn(0)([{"input_ids": [1, 2], "a": boxes}])["a"] == [boxes]


def test_ids_outside_the_vocabulary_are_refused_when_a_collator_is_made():
    for options, message in (
        (
            {"mask_token_id": 20},
            "mask_token_id: 20 is outside the vocabulary of 10. Give a larger vocab_size.",
        ),
        ({"mask_token_id": 2, "special_token_ids": [50]}, "special_token_ids: 50 is outside"),
        (
            {"mask_token_id": 0, "special_token_ids": range(10)},
            "all 10 tokens are special: none can be hidden",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            create_masked_lm_collate(vocab_size=10, **options)


def test_a_batch_without_rows_is_refused():
    seq2seq = create_seq2seq_collate(decoder_start_token_id=1)
    for collator in (
        create_collate_fn(),
        create_causal_lm_collate(),
        seq2seq,
        create_vision_collate(),
        default_collate,
    ):
        with pytest.raises(SourceError, match="the batch: holds no rows"):
            collator([])
    masks = seq2seq([{"input_ids": [1], "labels": [2]}])
    assert {column.dtype for column in masks.values()} == {np.dtype(np.int32)}
