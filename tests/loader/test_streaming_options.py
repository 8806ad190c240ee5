"""Options that follow the training step or the length of documents, in streaming: the bounds that
they keep, and exact resume.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelines
from easypipe import (
    DatasetConfig,
    LengthPolicy,
    LoadStageConfig,
    MixStageConfig,
    OrderConfig,
    PackStageConfig,
    Pipeline,
    TokenizerConfig,
)
from easypipe.core.errors import BudgetError, ConfigError, SourceError, StateError
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.loader.loader import Loader
from easypipe.loader.streams import rows as stream_rows
from easypipe.loader.streams.feed import Place
from easypipe.loader.streams.rows import StreamMark
from easypipe.loader.streams.state import StreamState, from_text, to_text
from easypipe.plan.pack import PackSpec, placed_tokens
from easypipe.plan.spec import WindowState
from easypipe.stages.load.stage import NAMED_ROWS
from laws import assert_conserved, assert_exact_resume, assert_no_new_threads, assert_same_batches
from strategies import examples

POINTS = [{"step": 0, "weights": {"a": 1, "b": 0}}, {"step": 20, "weights": {"a": 0, "b": 1}}]
SLOTS = 32


def datasets(
    counts: dict[str, int], longest: int = 20, shortest: int = 1
) -> tuple[DatasetConfig, ...]:
    """Documents of up to `longest` tokens; those of the n-th dataset hold the tokens from 10 + 100
    n on.
    """
    made = []
    for n, (name, count) in enumerate(counts.items()):
        lengths = [shortest + (i * 7 + n) % (longest - shortest + 1) for i in range(count)]
        rows = [
            {INPUT_IDS: [10 + 100 * n + (i + j) % 90 for j in range(length)]}
            for i, length in enumerate(lengths)
        ]
        made.append(DatasetConfig(name=name, data_files=rows))
    return tuple(made)


def build(
    folder: Path,
    mix: dict[str, Any] | None = None,
    load: dict[str, Any] | None = None,
    **options: Any,
) -> Loader:
    values: dict[str, Any] = {
        "datasets": datasets({"a": 300, "b": 300}),
        "num_streams": 2,
        "streaming": True,
    }
    values |= {"pack": PackStageConfig(**({"seq_length": SLOTS} | options.pop("pack", {})))}
    config = pipelines.config(folder, **(values | options))
    pipeline = Pipeline(config).source().tokenize().mix(MixStageConfig(**(mix or {}))).pack()
    return pipeline.load(
        LoadStageConfig(**({"batch_size": 4, "drop_last": False} | (load or {})))
    ).build()


def owners(batch: dict[str, np.ndarray]) -> Counter[int]:
    """Tokens of each dataset in a batch."""
    ids = np.asarray(batch[INPUT_IDS])[np.asarray(batch[SEGMENT_IDS]) > 0]
    return Counter(((ids[ids >= 10] - 10) // 100).tolist())


# Weights by training step

LATE = 2  # batches that windows of a stage this short may run on into the next one


@pytest.mark.parametrize(("strategy", "late"), [("pool", LATE), ("first_fit", 0), ("concat", 0)])
def test_weights_change_at_the_batch_of_the_step(tmp_path: Path, strategy: str, late: int) -> None:
    loader = build(tmp_path, {"weight_schedule": POINTS}, pack={"strategy": strategy})
    seen = [owners(batch) for batch in itertools.islice(loader, 60)]
    assert all(set(batch) == {0} for batch in seen[:20])
    assert all(set(batch) == {1} for batch in seen[20 + late :])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_weights_go_over(tmp_path: Path, kind: str) -> None:
    mix = {"weight_schedule": POINTS, "weight_schedule_type": kind, "unit": "tokens"}
    seen = [owners(batch) for batch in itertools.islice(build(tmp_path, mix), 40)]
    share = [
        sum((batch[1] for batch in some), 0) / sum(batch.total() for batch in some)
        for some in (seen[:7], seen[7:13], seen[13:20])
    ]
    assert share[0] < 0.3 < share[1] < 0.7 < share[2]
    assert all(set(batch) == {1} for batch in seen[21:])


def test_a_border_costs_about_half_a_row(tmp_path: Path) -> None:
    points = [{"step": s, "weights": {"a": 1 + s % 3, "b": 1}} for s in range(0, 200, 40)]
    loader = build(tmp_path, {"weight_schedule": points}, pack={"strategy": "first_fit"})
    for _ in itertools.islice(loader, 200):
        pass
    assert loader.ledger().facts["pack.stream.fill"] > 0.97  # windows of 80 rows
    assert_conserved(loader.ledger())


@given(
    weights=st.lists(st.tuples(*[st.integers(0, 9)] * 3).filter(any), min_size=1, max_size=3),
    gap=st.integers(1, 30),
    kind=st.sampled_from(["step", "linear", "cosine"]),
    unit=st.sampled_from(["rows", "tokens"]),
    stop=st.sampled_from(["restart", "first_exhausted", "all_exhausted"]),
    window=st.sampled_from([None, 5, 40]),
    oversize=st.sampled_from(["split", "truncate", "drop"]),
    at=st.integers(0, 15),
)
@examples(8)
def test_any_schedule_resumes_and_conserves(
    tmp_path_factory: pytest.TempPathFactory,
    weights: list[tuple[int, int, int]],
    gap: int,
    kind: str,
    unit: str,
    stop: str,
    window: int | None,
    oversize: str,
    at: int,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "schedules"
    points = [
        {"step": gap * i, "weights": dict(zip("abc", some, strict=True))}
        for i, some in enumerate(weights)
    ]
    mix = {
        "weight_schedule": points,
        "weight_schedule_type": kind,
        "unit": unit,
        "stop_strategy": stop,
    }
    options: dict[str, Any] = {
        "datasets": datasets({"a": 60, "b": 90, "c": 40}, 40),
        "pack": {"oversize": oversize},
    }

    def make() -> Loader:
        return build(folder, mix, {"shuffle_buffer_size": window}, **options)

    loader = make()
    total = len(list(itertools.islice(loader, 16)))
    assert_conserved(loader.ledger())
    assert_exact_resume(make, total, stops=[min(at, total)])


@given(weights=st.tuples(*[st.integers(1, 1000)] * 3), batches=st.integers(1, 40))
@examples(15)
def test_shares_of_tokens_hold(
    tmp_path_factory: pytest.TempPathFactory, weights: tuple[int, int, int], batches: int
) -> None:
    """The bound of docs/mixing.md in every stream: at most L ahead, L · (1 + 1/2) behind, for
    documents of up to L tokens.
    """
    folder = tmp_path_factory.getbasetemp() / "shares"
    mix = {"weights": dict(zip("abc", weights, strict=True)), "unit": "tokens"}
    longest = 40
    loader = build(
        folder,
        mix,
        {"shuffle_buffer_size": 50},
        datasets=datasets({"a": 200, "b": 100, "c": 150}, longest),
        pack={"oversize": "split"},
    )
    for _ in itertools.islice(loader, batches):
        pass
    drawn = [sum(loader.ledger().find("pack", name, "tokens").into.values()) for name in "abc"]
    for tokens, weight in zip(drawn, weights, strict=True):
        owed = float(sum(drawn) * Fraction(weight, sum(weights))) - tokens
        assert -2 * (longest + 1) < owed < 2 * 1.5 * (longest + 1)  # two streams; EOS is a token


# Caps on repetition


def test_a_capped_dataset_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    mix = {"weights": {"a": 1, "b": 1}, "max_epochs": {"a": 2}}
    options: dict[str, Any] = {
        "datasets": datasets({"a": 40, "b": 60}),
        "load": {"shuffle_buffer_size": 10},
    }
    seen = [owners(batch) for batch in itertools.islice(build(tmp_path, mix, **options), 60)]
    length = sum(1 + (i * 7) % 20 for i in range(40))
    assert sum((batch[0] for batch in seen), 0) == 2 * length
    assert all(set(batch) == {1} for batch in seen[-10:])
    assert_exact_resume(lambda: build(tmp_path, mix, **options), 40, stops=range(0, 40, 7))


def test_a_capped_dataset_has_its_share_until_it_leaves(tmp_path: Path) -> None:
    """A window of a stream holds thousands of documents, and its rows are permuted."""
    mix = {"weights": {"a": 3, "b": 1}, "max_epochs": {"a": 2}}
    loader = build(tmp_path, mix, datasets=datasets({"a": 40, "b": 600}))
    seen = [owners(batch) for batch in itertools.islice(loader, 60)]
    last = max(n for n, batch in enumerate(seen) if 0 in batch)
    before = sum((batch[0] for batch in seen[: last + 1]), 0)
    others = sum((batch[1] for batch in seen[: last + 1]), 0)
    # 25 %, and a little more: one of the two streams has its last document of it earlier
    assert 0.2 < others / (before + others) < 0.45


def test_a_mixture_of_capped_datasets_ends(tmp_path: Path) -> None:
    mix = {"weights": {"a": 3, "b": 1}, "max_epochs": {"a": 1, "b": 3}}
    options: dict[str, Any] = {
        "datasets": datasets({"a": 40, "b": 60}),
        "load": {"shuffle_buffer_size": 10},
    }
    loader = build(tmp_path, mix, **options)
    total = len(list(loader))
    drawn = [loader.ledger().find("mix", name, "documents").out for name in "ab"]
    assert drawn == [{"drawn": 40}, {"drawn": 180}]
    assert_conserved(loader.ledger())
    assert_exact_resume(lambda: build(tmp_path, mix, **options), total, stops=range(0, total, 5))


def test_caps_end_the_epochs_of_a_mixture(tmp_path: Path) -> None:
    mix = {"max_epochs": {"a": 1, "b": 2}, "stop_strategy": "all_exhausted"}
    loader = build(tmp_path, mix, {"num_epochs": 5}, datasets=datasets({"a": 40, "b": 60}))
    list(loader)
    assert [loader.ledger().find("mix", name, "documents").out["drawn"] for name in "ab"] == [
        40,
        120,
    ]


def test_small_datasets_begin_again_and_again(tmp_path: Path) -> None:
    """A pass may deal a stream nothing; the next deals anew."""
    made = []
    for name, count in (("a", 300), ("b", 5)):
        path = pipelines.jsonl(
            tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(count)]
        )
        made.append(DatasetConfig(name=name, data_files=str(path)))
    options: dict[str, Any] = {
        "datasets": tuple(made),
        "num_streams": 4,
        "load": {"shuffle_buffer_size": 20},
    }
    loader = build(tmp_path, **options)
    for _ in itertools.islice(loader, 15):
        pass
    assert loader.ledger().find("mix", "b", "documents").out["drawn"] > 50


# Batches


def test_batches_have_the_size_of_their_step(tmp_path: Path) -> None:
    """A stream gives the same rows whatever the batches hold."""
    load = {"batch_size": 4, "batch_size_schedule": [[3, 8], [5, 2]]}
    made = list(itertools.islice(build(tmp_path, load=load), 20))
    assert [len(batch[INPUT_IDS]) for batch in made[:7]] == [4, 4, 4, 8, 8, 2, 2]
    plain = list(itertools.islice(build(tmp_path), 30))
    for stream in range(2):
        of = [
            np.concatenate([np.array_split(batch[INPUT_IDS], 2)[stream] for batch in batches])
            for batches in (made, plain)
        ]
        count = min(map(len, of))
        assert (of[0][:count] == of[1][:count]).all()
    assert_exact_resume(lambda: build(tmp_path, load=load), 8, stops=(0, 2, 3, 5))
    assert (
        build(tmp_path, load=load | {"batch_size": 6}, num_streams=None).rows.spec.num_streams == 2
    )
    with pytest.raises(
        ConfigError,
        match=r"num_streams: 4 streams do not divide a batch of 2 rows.*Give a divisor of 2 and 4 "
        r"and 8",
    ):
        build(tmp_path, load=load, num_streams=4)


def test_a_schedule_of_weights_follows_the_sizes_of_batches(tmp_path: Path) -> None:
    load = {"batch_size": 4, "batch_size_schedule": [[10, 8]]}
    seen = [
        owners(batch)
        for batch in itertools.islice(build(tmp_path, {"weight_schedule": POINTS}, load), 40)
    ]
    own = [set(batch) for batch in seen]
    assert own[:20] == [{0}] * 20
    assert own[20 + LATE :] == [{1}] * (20 - LATE)
    with pytest.raises(ConfigError, match=r"mix\.batch_size: 16, but load"):
        build(tmp_path, {"weight_schedule": POINTS, "batch_size": 16}, load)


@pytest.mark.parametrize("mesh", [None, {"data": 1}])
def test_micro_batches_are_the_rows_of_the_plain_batch(tmp_path: Path, mesh: Any) -> None:
    plain = list(build(tmp_path, {"stop_strategy": "all_exhausted"}))
    load = {"accumulation_steps": 2, "mesh": mesh}
    made = list(build(tmp_path, {"stop_strategy": "all_exhausted"}, load))
    assert len(made) == len(plain) > 10
    for whole, parts in zip(plain, made, strict=True):
        for name, column in parts.items():
            assert column.shape == (2, 2, SLOTS)
            for a in range(2):
                assert (np.asarray(column)[a] == whole[name][a::2]).all()
    saved = build(tmp_path, load=load)
    assert saved.accumulation_steps == 2  # which the Trainer asks for
    batches = iter(saved)
    next(batches)
    other = build(tmp_path)
    other.restore(saved.state())  # micro-batches are free to change
    expected = np.asarray(next(batches)[INPUT_IDS])
    assert (next(iter(other))[INPUT_IDS][1::2] == expected[1]).all()


@pytest.mark.parametrize("prefetch_workers", [1, 3])
def test_prefetch_workers_make_windows_ahead(tmp_path: Path, prefetch_workers: int) -> None:
    before = set(threading.enumerate())
    load: dict[str, Any] = {"shuffle_buffer_size": 20, "num_epochs": 2}
    mix = {"stop_strategy": "all_exhausted"}
    expected = list(build(tmp_path, mix, load | {"prefetch_enabled": False}, num_streams=4))
    loader = build(tmp_path, mix, load | {"prefetch_workers": prefetch_workers}, num_streams=4)
    batches = iter(loader)
    made = [next(batches)]
    names = [
        thread.name for thread in set(threading.enumerate()) - before if "-window-" in thread.name
    ]
    assert len(names) == (prefetch_workers if prefetch_workers > 1 else 0)
    made += list(batches)
    assert_same_batches(expected, made)
    assert_conserved(loader.ledger())
    assert_exact_resume(
        lambda: build(tmp_path, mix, load | {"prefetch_workers": prefetch_workers}, num_streams=4),
        12,
        stops=(0, 5),
    )
    for _ in build(tmp_path, mix, load | {"prefetch_workers": prefetch_workers}, num_streams=4):
        break
    assert_no_new_threads(before)
    # windows of a schedule depend on which streams have ended, if any does
    points = [{"step": n, "weights": {"a": 1, "b": n + 1}} for n in (0, 2)]
    for num_epochs, threads in ((1, 0), (None, len(names))):
        scheduled = build(
            tmp_path,
            mix | {"weight_schedule": points},
            load | {"num_epochs": num_epochs, "prefetch_workers": prefetch_workers},
            num_streams=4,
        )
        batches = iter(scheduled)
        next(batches)
        now = [thread.name for thread in set(threading.enumerate()) - before]
        assert sum("-window-" in name for name in now) == threads
        batches.close()


# Bad rows


def test_max_bad_rows_counts_on_after_a_resume(tmp_path: Path) -> None:
    """Each bad row counts once in the run, whoever read it, and where the run was resumed."""
    lines = [
        f'{{"text": "good {i} ' + "x " * 10 + '"}\n' + ("bad\n" if i % 10 == 3 else "")
        for i in range(200)
    ]
    (tmp_path / "a.jsonl").write_text("".join(lines))

    def make(most: int, **load: Any) -> Loader:
        dataset = DatasetConfig(
            name="a", data_files=str(tmp_path / "a.jsonl"), on_error="skip", max_bad_rows=most
        )
        return build(
            tmp_path,
            {},
            {"num_epochs": None, "shuffle_buffer_size": 4} | load,
            datasets=(dataset,),
            num_streams=2,
        )

    for _ in itertools.islice(make(20), 200):  # several passes over 20 bad rows
        pass

    def through(most: int) -> None:
        """All in one go."""
        for _ in make(most):
            reached.append(len(reached) + 1)

    def hopping(most: int) -> None:
        """One batch a process."""
        state = None
        while True:
            loader = make(most, prefetch_workers=1 + len(reached) % 2)
            if state is not None:
                loader.restore(state)
            next(iter(loader))
            state = loader.state().to_json()
            reached.append(len(reached) + 1)

    for most in (0, 13):
        found = []
        for run in (through, hopping):
            reached: list[int] = []
            with pytest.raises(
                BudgetError,
                match=rf"a\.jsonl, line at byte \d+: bad row number {most + 1} of dataset 'a'",
            ) as raised:
                run(most)
            found.append((reached, str(raised.value)))
        assert found[0] == found[1]


def test_the_bad_row_that_is_one_too_many_is_named(tmp_path: Path) -> None:
    """Several of them stand in one of the chunks that are read."""
    (tmp_path / "a.jsonl").write_text("bad\n" * 160 + '{"text": "good words"}\n' * 40)
    for most in (0, 1, 2):
        dataset = DatasetConfig(
            name="a", data_files=str(tmp_path / "a.jsonl"), on_error="skip", max_bad_rows=most
        )
        at = 4 * most
        one: Any = {"datasets": (dataset,), "num_streams": 1, "order": OrderConfig(shuffle=False)}
        with pytest.raises(BudgetError, match=rf"byte {at}: bad row number {most + 1} of"):
            list(build(tmp_path, {}, {"num_epochs": 1}, **one))


def test_bad_rows_beyond_those_that_are_named_count(tmp_path: Path) -> None:
    bad = 40 * NAMED_ROWS  # of which a chunk holds a sixteenth
    lines = "bad\n" * bad + '{"text": "good words"}\n' * 40
    (tmp_path / "a.jsonl").write_text(lines)

    def read(most: int) -> None:
        dataset = DatasetConfig(
            name="a", data_files=str(tmp_path / "a.jsonl"), on_error="skip", max_bad_rows=most
        )
        for _ in build(tmp_path, {}, {"num_epochs": 1}, datasets=(dataset,), num_streams=1):
            pass

    read(bad)
    with pytest.raises(BudgetError, match=f"bad row number {bad} of dataset 'a'"):
        read(bad - 1)


def test_a_stream_does_not_go_on_with_another_pad_token(tmp_path: Path) -> None:
    loader = build(tmp_path, {}, {}, pack={"pad_token_id": 1})
    next(iter(loader))
    other = build(tmp_path, {}, {}, pack={"pad_token_id": 2})
    with pytest.raises(StateError, match="tokenizer changed since this state was saved"):
        other.restore(loader.state())


def test_documents_weigh_what_is_placed_of_them() -> None:
    for oversize, placed in (("split", [3, 9]), ("truncate", [3, 8]), ("drop", [3, 0])):
        assert (
            placed_tokens(np.array([3, 9]), PackSpec(seq_length=8, oversize=oversize)).tolist()
            == placed
        )  # type: ignore[arg-type]


def test_a_state_with_everything_in_it_is_small() -> None:
    worst = StreamState(
        first_row=1 << 40,
        epoch=1000,
        deficits=((1 << 61) - 1,),
        active=(True,),
        drawn=(Place(1000, 1 << 20, 1 << 24, 1 << 16, 1 << 20),),
    )
    assert len(to_text(worst)) <= 48
    assert from_text(to_text(worst), 1) == worst
    # in its last number, of bad rows, without which it would be one of none
    with pytest.raises(StateError, match="cut short"):
        from_text(to_text(worst)[:-1], 1)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_without_a_batch_is_an_error_and_not_the_end_of_data(
    tmp_path: Path, drop_last: bool
) -> None:
    """As a plan says it before anything is read: here all texts are longer than the policy allows,
    or too few fill a batch.
    """
    tokenizer = TokenizerConfig(
        name_or_path=pipelines.tokenizer(), max_length=2 if not drop_last else None
    )
    policy = None if drop_last else LengthPolicy(policy="drop")
    rows = [{"text": "the quick brown fox"}] * (1 if drop_last else 9)
    dataset = DatasetConfig(name="d", data_files=rows, tokenizer=tokenizer, length=policy)
    config = pipelines.config(tmp_path, datasets=(dataset,), streaming=True, num_streams=1)
    loader = (
        Pipeline(config)
        .source()
        .tokenize()
        .load(LoadStageConfig(batch_size=2, drop_last=drop_last))
        .build()
    )
    for _ in range(2):
        with pytest.raises(
            SourceError,
            match=r"the rows that were read do not fill a batch: 'd': "
            + ("1 documents" if drop_last else "9 too_long"),
        ) as caught:
            next(iter(loader))
        assert ("with drop_last=False a batch need not be full" in str(caught.value)) is drop_last
    assert loader.state().batch == 0


class Books:
    """200 rows: one block of a source of a user's."""

    version = "1"
    shard_names = ("0",)

    def open_shard(self, shard_name: str) -> Iterator[dict[str, str]]:
        yield from ({"text": f"book {i}"} for i in range(200))


def test_a_source_of_few_rows_says_how_many_a_stream_takes(tmp_path: Path) -> None:
    dataset = DatasetConfig(name="d", data_files=Books())
    config = pipelines.config(tmp_path, datasets=(dataset,), streaming=True)
    endless = {"batch_size": 2, "num_epochs": None}
    loader = Pipeline(config).source().tokenize().load(endless).build()
    with pytest.raises(ConfigError, match="256 rows of a source of your own"):
        list(itertools.islice(loader, 400))
    config = pipelines.config(tmp_path, datasets=(dataset,), streaming=True, num_streams=1)
    loader = Pipeline(config).source().tokenize().load({"batch_size": 2}).build()
    assert sum(len(batch[INPUT_IDS]) for batch in loader) == 200


@examples(20)
@given(st.data())
def test_a_state_gathers_what_every_process_holds(data: st.DataObject) -> None:
    """Streams are dealt in any way; every process ends up with the states of all of them."""
    count, datasets = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    number = st.integers(0, 1 << 40)
    place = st.builds(Place, number, number, number, number, bad=st.integers(0, 9))
    states = {
        i: WindowState(
            first_row=data.draw(number),
            epoch=data.draw(st.integers(0, 300)),
            drawn=tuple(data.draw(place) for _ in range(datasets)),
            deficits=tuple(data.draw(st.integers(-(1 << 50), 1 << 50)) for _ in range(datasets)),
            active=tuple(data.draw(st.booleans()) for _ in range(datasets)),
            cut=data.draw(st.none() | st.tuples(st.integers(0, datasets - 1), number)),
        )
        for i in range(count)
    }
    whose = [0, 1, *(data.draw(st.integers(0, 1)) for _ in range(count - 2))]
    rows: Any = SimpleNamespace(spec=SimpleNamespace(num_streams=count), sources=[None] * datasets)
    marks = [
        StreamMark(rows, {i: state for i, state in states.items() if whose[i] == own}, (), {})
        for own in (0, 1)
    ]
    tables: list[bytes] = []

    def gather(own: bytes) -> list[bytes]:
        tables.append(own)
        return tables

    with mock.patch.object(stream_rows, "gather_bytes", gather):
        for mark in marks:  # the first to ask sees its own alone
            with contextlib.suppress(KeyError):
                mark.hint()
    with mock.patch.object(stream_rows, "gather_bytes", return_value=tables):
        found = [mark.hint() for mark in marks]
    assert found[0] == found[1] == [to_text(states[i]) for i in range(count)]
    assert [from_text(text, datasets) for text in found[0]] == list(states.values())
