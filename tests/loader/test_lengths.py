"""Rows of several lengths: the side and the width of padding, and rows of like length in one
batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, Pipeline, TokenizerConfig
from easypipe.core.errors import ConfigError, SourceError
from easypipe.core.schema import (
    ATTENTION_MASK,
    IGNORE,
    INPUT_IDS,
    LABELS,
    POSITION_IDS,
    SEGMENT_IDS,
)
from easypipe.loader.collate import CollateConfig, collate, row_width, with_asked
from easypipe.loader.loader import Loader
from easypipe.loader.order import ReadingOrder
from easypipe.plan.buckets import bucket_widths, length_counts
from laws import (
    assert_exact_resume,
    assert_fewest_slots,
    assert_labels,
    assert_same_batch,
    assert_same_batches,
)
from loader_support import MemoryCache, plan_rows, some_docs
from pipelines import config, texts, tokenizer
from strategies import examples

# As texts are: many short, few long.
LENGTHS = np.minimum(
    np.random.Generator(np.random.PCG64(5)).lognormal(3.0, 1.0, 517).astype(int) + 1, 300
)
CACHE = MemoryCache(some_docs(LENGTHS), masks=[np.arange(n) % 3 > 0 for n in LENGTHS])


def documents(rule: CollateConfig | None = None, *, seed: int = 0, **load: Any) -> Loader:
    rows = plan_rows([CACHE], seq_length=None, num_epochs=load.get("num_epochs", 1))
    return Loader(rows, LoadStageConfig(**({"batch_size": 8} | load)), seed=seed, collate=rule)


def tokens(batch: dict[str, np.ndarray]) -> list[bytes]:
    """The document of every row."""
    return [
        ids[segments > 0].tobytes()
        for ids, segments in zip(batch[INPUT_IDS], batch[SEGMENT_IDS], strict=True)
    ]


def widths(loader: Loader) -> list[int]:
    return [batch[INPUT_IDS].shape[1] for batch in loader]


# Side


@pytest.mark.parametrize(
    "load",
    [{}, {"accumulation_steps": 2, "drop_last": False}, {"mesh": {"data": 1}, "drop_last": False}],
    ids=str,
)
def test_padding_on_the_left_moves_every_column(load: dict[str, Any]) -> None:
    rule = {"attention_mask": True, "pad_to_multiple_of": 16}
    count = 0
    for left, right in zip(
        documents(CollateConfig(padding_side="left", **rule), **load),
        documents(CollateConfig(**rule), **load),
        strict=True,
    ):
        padding = (np.asarray(right[SEGMENT_IDS]) == 0).sum(axis=-1)
        count += int((padding > 0).sum())
        for name, values in right.items():
            slots = np.arange(values.shape[-1])
            moved = np.take_along_axis(
                np.asarray(values), (slots - padding[..., None]) % slots.size, axis=-1
            )
            np.testing.assert_array_equal(np.asarray(left[name]), moved, err_msg=name)
        assert (np.asarray(left[LABELS])[..., -1] == IGNORE).all(), (
            "the last token of a row has no label"
        )
    assert count > 100


def test_labels_beside_padding_on_the_left() -> None:
    rows = {
        INPUT_IDS: np.array([[5, 6, 7, 0, 0], [1, 2, 3, 4, 9], [0] * 5]),
        SEGMENT_IDS: np.array([[1, 2, 2, 0, 0], [1] * 5, [0] * 5]),
    }
    left = CollateConfig(padding_side="left", attention_mask=True)
    batch = with_asked(collate(rows), left)
    assert_labels(batch)
    assert batch[INPUT_IDS].tolist() == [[0, 0, 5, 6, 7], [1, 2, 3, 4, 9], [0] * 5]
    assert batch[LABELS][0].tolist() == [IGNORE, IGNORE, IGNORE, 7, IGNORE]
    assert batch[POSITION_IDS][0].tolist() == [0, 0, 0, 0, 1]
    assert batch[ATTENTION_MASK].sum(axis=1).tolist() == [3, 5, 0]
    empty = {name: column[:2, :0] for name, column in rows.items()}
    assert with_asked(collate(empty), left)[INPUT_IDS].shape == (2, 0)


# Widths


def test_widths_are_multiples_or_buckets() -> None:
    lengths = np.array([3, 9, 1])
    for rule, width in (
        ({"pad_to_multiple_of": 8}, 16),
        ({"pad_to_multiple_of": 9}, 9),
        ({"length_buckets": (4, 9, 20)}, 9),
        ({"length_buckets": (4, 8, 20)}, 20),
        ({"padding": "max_length", "max_length": 31}, 31),
    ):
        assert row_width(lengths, CollateConfig(**rule)) == width
    longest = widths(documents())
    assert widths(documents(CollateConfig(pad_to_multiple_of=32))) == [
        -(-width // 32) * 32 for width in longest
    ]
    with pytest.raises(
        SourceError,
        match=r"row 1 of the batch: 9 tokens do not fit length_buckets 8.*max_length=8.*bucket of "
        r"9",
    ):
        row_width(lengths, CollateConfig(length_buckets=(4, 8)))


@pytest.mark.parametrize("group", [None, 8])
def test_an_epoch_has_no_more_shapes_than_buckets(group: int | None) -> None:
    buckets = (16, 64, 128, 300)
    bucketed = documents(CollateConfig(length_buckets=buckets), group_by_length=group)
    seen = [
        (batch[INPUT_IDS].shape[1], int((batch[SEGMENT_IDS] > 0).sum(axis=1).max()))
        for batch in bucketed
    ]
    assert all(width == next(b for b in buckets if b >= longest) for width, longest in seen)
    assert (
        1
        < len({width for width, _ in seen})
        <= len(buckets)
        < len(set(widths(documents(group_by_length=group))))
    )


@examples(60)
@given(
    counts=st.lists(st.integers(0, 5), min_size=2, max_size=9).filter(
        lambda counts: any(counts[1:])
    ),
    buckets=st.integers(1, 10),
)
def test_law_a_number_of_buckets_chooses_the_widths_with_the_fewest_slots(
    counts: list[int], buckets: int
) -> None:
    assert_fewest_slots(np.array(counts), bucket_widths(np.array(counts), buckets), buckets)


def test_widths_of_many_lengths_are_chosen_in_time() -> None:
    lengths = np.random.Generator(np.random.PCG64(3)).lognormal(7.0, 1.5, 100_000).astype(np.int64)
    counts = length_counts([lengths[:60_000], lengths[60_000:]])
    np.testing.assert_array_equal(counts, np.bincount(lengths))
    widths = bucket_widths(counts, 6)
    assert len(widths) == 6
    assert widths[-1] == lengths.max()
    evenly = np.quantile(lengths, np.arange(1, 7) / 6, method="higher")
    slots = [
        np.asarray(chosen)[np.searchsorted(chosen, lengths)].sum() for chosen in (widths, evenly)
    ]
    assert slots[0] < 0.8 * slots[1]
    assert bucket_widths(np.array([7]), 3) == ()


def test_a_number_of_buckets_reaches_the_batches(tmp_path: Path) -> None:
    plain, three = build(tmp_path), build(tmp_path, length_buckets=3)
    lengths = three.rows.lengths(np.arange(30))
    assert three.collate.length_buckets == bucket_widths(np.bincount(lengths), 3)
    seen = set(widths(three))
    assert seen <= set(three.collate.length_buckets)
    assert 1 < len(seen) <= 3 < len(set(widths(plain)))
    assert (
        assert_same_batches(three, build(tmp_path, length_buckets=three.collate.length_buckets))
        == 7
    )
    assert_exact_resume(
        lambda: build(tmp_path, {"group_by_length": 3}, length_buckets=3), 7, stops=[0, 2, 7]
    )
    with pytest.raises(
        ConfigError,
        match=r"length_buckets: 3 widths cannot be chosen: lengths are not known before rows are "
        r"read",
    ):
        build(tmp_path, streaming=True, length_buckets=3)


# Groups


def test_groups_have_less_padding_and_every_row_once() -> None:
    plain, grouped = list(documents()), list(documents(group_by_length=16))
    padding = [
        sum((batch[SEGMENT_IDS] == 0).sum() for batch in batches)
        / sum(b[INPUT_IDS].size for b in batches)
        for batches in (plain, grouped)
    ]
    assert padding[1] < 0.3 * padding[0], padding
    for start in range(0, len(plain), 16):  # drop_last leaves out the same rows, too
        before, after = (
            sorted(row for batch in batches[start : start + 16] for row in tokens(batch))
            for batches in (plain, grouped)
        )
        assert before == after
    lengths = [batch[INPUT_IDS].shape[1] for batch in grouped[:16]]
    assert lengths != sorted(lengths), "the batches of a window are permuted"
    assert (
        lengths
        != [batch[INPUT_IDS].shape[1] for batch in documents(group_by_length=16, seed=1)][:16]
    ), "by the seed"
    rows = plan_rows(
        [MemoryCache(some_docs([*range(1, 33)] * 2))],
        seq_length=None,
        shuffle=False,
        shuffle_packed=False,
    )
    order = ReadingOrder(
        rows, LoadStageConfig(batch_size=2, group_by_length=16), CollateConfig(), 3
    )
    first, second = (rows.lengths(order.rows(rows, start, start + 32)) for start in (0, 32))
    assert sorted(first) == sorted(second), "the windows hold rows of the same lengths"
    assert first.tolist() != second.tolist(), "windows have permutations of their own"


@pytest.mark.parametrize(
    "prefetch",
    [{"prefetch_enabled": False}, {"prefetch_workers": 4, "prefetch_buffer_size": 5}],
    ids=str,
)
def test_grouped_batches_do_not_depend_on_how_they_are_made(prefetch: dict[str, Any]) -> None:
    load: dict[str, Any] = {
        "group_by_length": 5,
        "num_epochs": 2,
        "drop_last": False,
        "shuffle_buffer_size": 50,
        "batch_size": 24,
    }

    def make():
        return documents(
            CollateConfig(length_buckets=(32, 300), padding_side="left"), **load, **prefetch
        )

    wanted = [
        documents(make().collate, **load).batch(step) for step in reversed(range(len(make())))
    ][::-1]
    assert assert_same_batches(wanted, make()) == len(make()) == -(-2 * len(LENGTHS) // 24)
    assert_exact_resume(make, len(wanted), hops=[3, 4], stops=[0, 1, 4, 5, 6, 20, 43])
    explained = make().explain(7)
    assert [len(row.segments[0].ids) for row in explained.rows] == [
        len(row) // 4 for row in tokens(wanted[7])
    ]


def test_ranks_and_row_transforms_keep_groups() -> None:
    """Every row belongs to one rank; a transform sees padding behind the tokens, whatever side it
    goes to.
    """
    whole = documents(CollateConfig(padding_side="left"), group_by_length=4, drop_last=False)

    def last_is_masked(columns: dict[str, np.ndarray], key: int) -> None:
        columns["loss_mask"][int((columns[SEGMENT_IDS] > 0).sum()) - 1] = 0

    changed = whole.map_rows(last_is_masked, version="1")
    for before, after in zip(whole, changed, strict=True):
        np.testing.assert_array_equal(before[INPUT_IDS], after[INPUT_IDS])
        assert (after[LABELS][:, -2] == IGNORE).all()
    ranks = [row for rank in range(3) for batch in whole.of_rank(rank, 3) for row in tokens(batch)]
    assert sorted(ranks) == sorted(row for batch in whole for row in tokens(batch))


@examples(40)
@given(
    count=st.integers(1, 90),
    batch=st.integers(1, 7),
    group=st.integers(1, 6),
    block=st.sampled_from([None, 1, 4, 11, 100]),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(1, 89), max_size=5),
)
def test_the_order_is_arithmetic(
    count: int, batch: int, group: int, block: int | None, seed: int, cuts: list[int]
) -> None:
    """Every row once; asked for in pieces, by new objects, from the end: the same; a window holds
    the rows that it held without groups.
    """
    rows = plan_rows([MemoryCache(some_docs(LENGTHS[:count]))], seq_length=None)
    shuffled = {"batch_size": batch, "shuffle_buffer_size": block}

    def make(**more):
        return ReadingOrder(rows, LoadStageConfig(**shuffled, **more), CollateConfig(), seed)

    order, plain = make(group_by_length=group).rows(rows, 0, count), make().rows(rows, 0, count)
    window = batch * group
    for start in range(0, count, window):
        assert sorted(order[start : start + window]) == sorted(plain[start : start + window])
    full = count // batch * batch
    assert order[full:].tolist() == plain[full:].tolist(), "what fills no batch stays where it is"
    edges = sorted({0, count, *(cut % count for cut in cuts)})
    one = make(group_by_length=group)
    pieces = [
        (one if i % 2 else make(group_by_length=group)).rows(rows, *edges[i : i + 2])
        for i in reversed(range(len(edges) - 1))
    ]
    assert np.concatenate(pieces[::-1]).tolist() == order.tolist()
    assert all(min(order[start:], default=count) >= one.first(start) for start in range(count))
    lengths = rows.lengths(order)
    # no row of a window lies among the lengths of a batch that it is not of
    for start in range(0, full, batch):
        first = start // window * window
        here = lengths[start : start + batch]
        others = np.delete(
            lengths[first : min(first + window, full)], np.arange(batch) + start - first
        )
        assert not ((others > here.min()) & (others < here.max())).any()


# Options


def build(
    folder: Path,
    load: dict[str, Any] | None = None,
    *,
    streaming: bool = False,
    pack: bool = False,
    **options: Any,
) -> Any:
    rows = [{"text": text} for text in texts(30)]
    dataset = DatasetConfig(
        name="x", data_files=rows, tokenizer=TokenizerConfig(name_or_path=tokenizer(), **options)
    )
    chain = Pipeline(config(folder, datasets=[dataset], streaming=streaming)).source().tokenize()
    chain = chain.pack(PackStageConfig(seq_length=64)) if pack else chain
    return chain.load(LoadStageConfig(**({"batch_size": 4} | (load or {})))).build()


@pytest.mark.parametrize("streaming", [False, True])
def test_options_of_the_tokenizer_reach_the_batches(tmp_path: Path, streaming: bool) -> None:
    right = list(build(tmp_path, streaming=streaming))
    left = list(build(tmp_path, streaming=streaming, padding_side="left", pad_to_multiple_of=16))
    bucketed = build(
        tmp_path, streaming=streaming, padding_side="left", length_buckets=(48, 64, 500)
    )
    for plain, moved, batch in zip(right, left, bucketed, strict=True):
        assert tokens(plain) == tokens(moved) == tokens(batch)
        assert moved[SEGMENT_IDS][:, -1].all()
        assert moved[INPUT_IDS].shape[1] == -(-plain[INPUT_IDS].shape[1] // 16) * 16
        assert batch[INPUT_IDS].shape[1] in (48, 64, 500)
    with pytest.raises(SourceError, match="do not fit length_buckets 3"):
        next(iter(build(tmp_path, streaming=streaming, length_buckets=(3,))))


def test_no_option_leaves_batches_as_they_were(tmp_path: Path) -> None:
    """Neither batches nor what states say of the config change where none of these options is
    set.
    """
    loader = documents(CollateConfig(padding_side="right"))
    assert {"padding_side", "pad_to_multiple_of", "length_buckets", "group_by_length"}.isdisjoint(
        loader.state().config
    )
    for step in (0, 3):
        numbers = np.arange(8 * step, 8 * step + 8)
        assert_same_batch(
            loader.batch(step), loader.rows.batch(numbers, int(loader.rows.lengths(numbers).max()))
        )


@pytest.mark.parametrize("streaming", [False, True])
def test_ranks_and_a_weight_schedule_count_the_same_steps(tmp_path: Path, streaming: bool) -> None:
    points = [{"step": 2 * i, "weights": {"code": 1 + 8 * i, "docs": 9 - 8 * i}} for i in (0, 1)]
    mix = {"weight_schedule": points, "stop_strategy": "all_exhausted"}
    values = config(tmp_path, mix=mix, streaming=streaming)
    chain = Pipeline(values).source().tokenize().mix().pack({"seq_length": 32})
    two, four = (LoadStageConfig(batch_size=size) for size in (2, 4))
    small, whole = chain.copy().load(two).build(), chain.load(four).build()
    for one in (small, whole.copy(two), small.copy(four).copy(two)):
        ranks = [list(one.of_rank(rank, 2)) for rank in (0, 1)]
        for batch, *parts in zip(whole, *ranks, strict=True):
            rows = {row.tobytes() for part in parts for row in part["input_ids"]}
            assert rows == {row.tobytes() for row in batch["input_ids"]}
    alone = Loader(whole.rows, two)
    with pytest.raises(
        ConfigError,
        match=r"mix.weight_schedule: counts steps of 4 rows, and such a step has 6. Call load\(\) "
        r"with a batch_size of 6 for these rows",
    ):
        alone.of_rank(0, 3)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("option", "value", "packed"),
    [
        ("return_attention_mask", True, True),
        ("padding_side", "left", True),
        ("padding", "max_length", False),
    ],
)
def test_datasets_of_a_mixture_agree_on_the_shape_of_batches(
    tmp_path: Path, option: str, value: Any, packed: bool, streaming: bool
) -> None:
    def chain(**changed: Any) -> Any:
        datasets = [
            DatasetConfig(name=name, data_files=[{"text": name}] * 9, tokenizer_kwargs=options)
            for name, options in (("a", {"max_length": 9}), ("b", {"max_length": 9} | changed))
        ]
        data = Pipeline(config(tmp_path, datasets=datasets, streaming=streaming)).source()
        mixed = data.tokenize().mix({"stop_strategy": "all_exhausted"})
        return (mixed.pack({"seq_length": 9}) if packed else mixed).load({"batch_size": 4})

    assert next(iter(chain().build()))["input_ids"].shape[0] == 4
    with pytest.raises(
        ConfigError, match=rf"datasets.b.tokenizer.{option}: {value!r}, but dataset 'a' has"
    ):
        chain(**{option: value}).build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"padding_side": "left", "pack": True},
            "padding_side: 'left', but the rows are packed: each has 64 slots already.*do not pack",
        ),
        (
            {"padding_side": "left", "pack": True, "streaming": True},
            "padding_side: 'left', but the rows are packed",
        ),
        ({"pad_to_multiple_of": 8, "pack": True}, "pad_to_multiple_of: 8, but the rows are packed"),
        ({"length_buckets": (8,), "pack": True}, r"length_buckets: \[8\], but the rows are packed"),
        (
            {"load": {"group_by_length": 8}, "pack": True},
            "load.group_by_length: 8, but the rows are packed",
        ),
        (
            {"load": {"group_by_length": 8}, "padding": "max_length", "max_length": 500},
            "padding is 'max_length': every row has as many slots",
        ),
        (
            {"load": {"group_by_length": 8}, "streaming": True},
            "group_by_length.*rows come in the order in which they are read",
        ),
        (
            {"load": {"group_by_length": 8, "batch_size_schedule": [(5, 8)]}},
            "group_by_length.*batches of one size",
        ),
        ({"load": {"group_by_length": 0}}, "group_by_length: 0 is too few"),
        (
            {"length_buckets": (64, 16)},
            r"length_buckets: \[64, 16\] do not ascend.*ascending order",
        ),
        ({"length_buckets": (0, 16)}, "do not ascend"),
        ({"length_buckets": 0}, "length_buckets: 0 widths hold nothing"),
        ({"length_buckets": 2, "pack": True}, r"length_buckets: \[2\], but the rows are packed"),
        ({"length_buckets": 2, "pad_to_multiple_of": 8}, "length_buckets say every width already"),
        (
            {"length_buckets": (16,), "pad_to_multiple_of": 8},
            "length_buckets say every width already",
        ),
        (
            {"length_buckets": (16,), "padding": False},
            "length_buckets: padding=False leaves it nothing to do",
        ),
        (
            {"pad_to_multiple_of": 8, "padding": "max_length", "max_length": 9},
            "'max_length' leaves it nothing to do",
        ),
        ({"pad_to_multiple_of": 0}, "0 is not a number of slots"),
        ({"padding_side": "left", "padding": False}, "puts padding nowhere"),
        ({"padding_side": "middle"}, "padding_side"),
    ],
    ids=str,
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build(tmp_path, **options)


def test_every_block_and_every_window_has_an_order_of_its_own() -> None:
    rows = plan_rows([MemoryCache(some_docs([7] * 4096))], seq_length=None)
    shuffled = ReadingOrder(
        rows, LoadStageConfig(batch_size=8, shuffle_buffer_size=64), CollateConfig(), 3
    )
    blocks = {
        (shuffled.rows(rows, start, start + 64) - start).tobytes() for start in range(0, 4096, 64)
    }
    assert len(blocks) == 64
    grouped = ReadingOrder(
        rows, LoadStageConfig(batch_size=8, group_by_length=16), CollateConfig(), 3
    )
    windows = {
        (grouped.rows(rows, start, start + 128) - start).tobytes() for start in range(0, 4096, 128)
    }
    assert len(windows) == 32
