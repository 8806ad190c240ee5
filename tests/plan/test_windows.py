from __future__ import annotations

import dataclasses
import itertools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import plan_oracle as oracle
from easypipe.core.errors import PlanError, StateError
from easypipe.plan.mix import integer_weights
from easypipe.plan.mix_schedule import KINDS, Schedule
from easypipe.plan.order import OrderConfig
from easypipe.plan.pack import OVERSIZE, STRATEGIES, PackSpec
from easypipe.plan.window import _permute, token_sizes
from easypipe.plan.windows import (
    MARK_EVERY,
    Pieces,
    Plan,
    PlanDataset,
    PlanSpec,
    WindowState,
    window_docs,
)
from strategies import examples

FIRST_ROWS = 150  # looked at where there is no end


def dataset(name: str, lengths: list[int] | np.ndarray) -> PlanDataset:
    array = np.asarray(lengths, dtype=np.int32)
    return PlanDataset(
        name,
        array.size,
        int(array.sum(dtype=np.int64)),
        f"tokens of {name}",
        lambda docs: array[docs],
    )


packs = st.one_of(
    st.none(),
    st.builds(
        PackSpec,
        seq_length=st.integers(20, 40),
        strategy=st.sampled_from(STRATEGIES[:3]),
        num_packers=st.integers(1, 5),
        oversize=st.sampled_from(OVERSIZE[:3]),
        shuffle_rows=st.booleans(),
    ),
    st.builds(
        PackSpec,
        seq_length=st.integers(1, 40),
        strategy=st.just("stream"),
        shuffle_rows=st.booleans(),
    ),
)


@st.composite
def schedules(draw: st.DrawFn, size: int) -> Schedule:
    """A few points within the first steps, weights of 0 among them, batches of one or two sizes."""
    weights = (
        st.lists(st.sampled_from([0, 1, 1, 3, 1000]), min_size=size, max_size=size)
        .filter(any)
        .map(tuple)
    )
    steps = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3, unique=True).map(sorted))
    sizes = draw(st.sampled_from([((0, 1),), ((0, 3),), ((0, 2), (5, 4))]))
    points = tuple((step, draw(weights)) for step in steps)
    return Schedule(
        points, draw(st.sampled_from(KINDS)), sizes, draw(st.one_of(st.none(), weights))
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[PlanDataset], PlanSpec]:
    """Mixtures of one to four small datasets; about one document in three is longer than a row,
    some are empty.
    """
    lengths = draw(
        st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=40), min_size=1, max_size=4)
    )
    stop = draw(st.sampled_from(["restart", "first_exhausted", "all_exhausted"]))
    epochs = draw(st.sampled_from([1, 3, None]))
    datasets = [dataset(f"d{i}", [*values, 3]) for i, values in enumerate(lengths)]
    size = len(datasets)
    changing = draw(st.booleans())
    unit = draw(st.sampled_from(["rows", "rows", "tokens"]))
    return datasets, PlanSpec(
        schedule=draw(schedules(size)) if changing else None,
        unit=unit,
        block=draw(st.sampled_from([None, 7])) if changing and unit == "rows" else None,
        max_epochs=draw(st.one_of(st.none(), st.tuples(*[st.sampled_from([None, 1, 2])] * size))),
        seed=draw(st.integers(0, 1 << 31)),
        weights=tuple(draw(st.integers(1, 9)) for _ in datasets),
        stop=stop,
        num_epochs=None if stop == "restart" and len(datasets) > 1 else epochs,
        order=draw(
            st.sampled_from([OrderConfig(), OrderConfig(block_rows=3), OrderConfig(shuffle=False)])
        ),
        pack=draw(packs),
        window_docs=draw(st.integers(1, 50)),
    )


def forward(datasets: list[PlanDataset], spec: PlanSpec) -> list[list[oracle.Piece]]:
    return list(itertools.islice(oracle.plan_rows(datasets, spec), FIRST_ROWS))


def by_row(pieces: Pieces, num_rows: int) -> list[list[oracle.Piece]]:
    rows: list[list[oracle.Piece]] = [[] for _ in range(num_rows)]
    assert (np.diff(pieces.row) >= 0).all()
    for row, *piece in zip(*(column.tolist() for column in pieces), strict=True):
        rows[row].append(tuple(piece))
    return rows


def look(plan: Plan, rows: list[int]) -> list[list[oracle.Piece]]:
    return by_row(plan.pieces(np.array(rows, dtype=np.int64)), len(rows))


CUT_BY_TOKENS = (  # windows end within documents, of which some are long
    [dataset("d0", [*range(1, 60)]), dataset("d1", [7, 31, 2] * 13)],
    PlanSpec(
        seed=5,
        weights=(2, 3),
        stop="all_exhausted",
        unit="tokens",
        pack=PackSpec(13, "stream"),
        window_docs=4,
    ),
)


@given(
    made=plans(),
    cache_bytes=st.sampled_from([0, 1 << 20]),
    shuffler=st.randoms(use_true_random=False),
)
@example(made=CUT_BY_TOKENS, cache_bytes=0, shuffler=random.Random(0))
@examples(150)
def test_any_row_equals_the_forward_scan(
    made: tuple[list[PlanDataset], PlanSpec], cache_bytes: int, shuffler: random.Random
) -> None:
    """In any order, alone or together, with windows kept or not."""
    expected = forward(*made)
    order = list(range(len(expected)))
    shuffler.shuffle(order)
    plan = Plan(*made, cache_bytes=cache_bytes)
    assert look(plan, order) == [expected[row] for row in order]
    plan = Plan(*made, cache_bytes=cache_bytes)
    for row in order[:20]:
        address = plan.locate(row)
        assert by_row(address.pieces, 1) == [expected[row]]
        assert address.row == row
        window = plan.window_at(row)
        assert (address.window, address.epoch) == (window.state.index, window.state.epoch)
        assert window.first_row + address.row_in_window == row
        assert 0 <= address.row_in_window < window.num_rows
    assert (plan.num_rows is None) == (
        made[1].last_epoch([each.num_docs for each in made[0]]) is None
    )
    if plan.num_rows is not None and len(expected) < FIRST_ROWS:
        assert plan.num_rows == len(expected)


@given(made=plans(), data=st.data())
@examples(150)
def test_resuming_from_a_state_gives_the_same_rows_onward(
    made: tuple[list[PlanDataset], PlanSpec], data: st.DataObject
) -> None:
    expected = forward(*made)
    row = data.draw(st.integers(0, len(expected) - 1))
    state = WindowState.from_json(json.loads(json.dumps(Plan(*made).state_at(row).to_json())))
    assert state == Plan(*made).state_at(row)
    assert state.first_row <= row
    asked = list[int]()

    def counted(each: PlanDataset) -> PlanDataset:
        return dataclasses.replace(
            each, lengths=lambda docs: (asked.append(docs.size), each.lengths(docs))[1]
        )

    plan = Plan([counted(each) for each in made[0]], made[1])
    plan.resume(state)
    assert look(plan, [row]) == [expected[row]]
    streams = made[1].pack is not None and made[1].pack.strategy == "stream"
    # their windows look at more than they draw
    ahead = streams or made[1].unit == "tokens" or made[1].schedule is not None
    assert ahead or sum(asked) <= made[1].window_docs, (
        "more than one window was planned to look at a resumed row"
    )
    assert look(plan, list(range(row, len(expected)))) == expected[row:]
    assert look(plan, list(range(len(expected)))) == expected, "rows before the state changed"
    again = plan.state_at(row)
    assert again == state


@given(made=plans(), keep=st.lists(st.booleans(), min_size=1, max_size=5))
@examples(60)
def test_checkpoints_change_no_row(
    made: tuple[list[PlanDataset], PlanSpec], keep: list[bool]
) -> None:
    expected = forward(*made)
    first = Plan(*made)
    assert look(first, [len(expected) - 1]) == expected[-1:]
    ends = first.num_rows
    marks = first.checkpoints()
    last = made[1].last_epoch([each.num_docs for each in made[0]])
    assert all(mark.index % MARK_EVERY == 0 or mark.epoch == last for mark in marks)
    kept = [mark for mark, take in zip(marks, itertools.cycle(keep), strict=False) if take]
    second = Plan(*made, checkpoints=kept)
    assert second.fingerprint == first.fingerprint
    assert look(second, list(range(len(expected) - 1, -1, -1))) == expected[::-1]
    assert second.num_rows == ends


def test_a_checkpoint_at_the_end_spares_the_scan() -> None:
    spec = PlanSpec(seed=1, weights=(1,), stop="all_exhausted", window_docs=7, pack=PackSpec(50))
    first = Plan([dataset("a", range(1, 50))], spec)
    assert first.num_rows is not None
    blind = dataclasses.replace(
        first.datasets[0], lengths=lambda docs: pytest.fail("lengths were read")
    )
    second = Plan([blind], spec, first.checkpoints())
    assert second.num_rows == first.num_rows
    assert second.state_at(second.num_rows) == first.state_at(first.num_rows)


@given(made=plans(), more=st.integers(1, 3))
@examples(60)
def test_more_epochs_only_add_rows(made: tuple[list[PlanDataset], PlanSpec], more: int) -> None:
    datasets, spec = made
    if spec.num_epochs is None:
        return
    longer = dataclasses.replace(spec, num_epochs=spec.num_epochs + more)
    short, long = Plan(datasets, spec), Plan(datasets, longer)
    assert short.fingerprint == long.fingerprint
    assert short.num_rows is not None
    assert long.num_rows is not None
    rows = list(range(min(short.num_rows, FIRST_ROWS)))
    assert look(short, rows) == look(long, rows)
    assert Plan(datasets, spec, long.checkpoints()).num_rows == short.num_rows
    assert Plan(datasets, longer, short.checkpoints()).num_rows == long.num_rows


def test_a_state_behind_the_last_epoch_is_not_begun_from() -> None:
    parts, spec = CUT_BY_TOKENS
    rows = Plan(parts, spec).num_rows
    assert rows is not None
    state = Plan(parts, dataclasses.replace(spec, num_epochs=3)).state_at(rows + 40)
    assert (state.epoch, any(state.drawn)) == (1, True)
    plan = Plan(parts, spec)
    plan.resume(state)
    assert plan.num_rows == rows


def test_epochs_are_permuted_anew() -> None:
    spec = PlanSpec(seed=1, weights=(1,), stop="all_exhausted", num_epochs=3, window_docs=16)
    plan = Plan([dataset("a", [4] * 40)], spec)
    assert plan.num_rows == 120
    docs = plan.pieces(np.arange(120)).doc.reshape(3, 40)
    assert (np.sort(docs) == np.arange(40)).all()
    assert len({epoch.tobytes() for epoch in docs}) == 3


def books(
    datasets: list[PlanDataset], spec: PlanSpec, rows: list[list[oracle.Piece]]
) -> dict[str, tuple[int, int]]:
    """(tokens, segments with tokens) that stand in `rows`, per dataset. In a stream, a document
    that goes on begins no segment.
    """
    goes_on = spec.pack is not None and spec.pack.strategy == "stream"
    sums = {each.name: (0, 0) for each in datasets}
    for _, _, i, _, start, length in itertools.chain.from_iterable(rows):
        tokens, segments = sums[datasets[i].name]
        sums[datasets[i].name] = (
            tokens + length,
            segments + (length > 0 and not (goes_on and start)),
        )
    return sums


@given(made=plans(), data=st.data())
@examples(150)
def test_the_stats_conserves(made: tuple[list[PlanDataset], PlanSpec], data: st.DataObject) -> None:
    datasets, spec = made
    expected = forward(*made)
    plan = Plan(*made)
    for stop_row in [
        *data.draw(st.lists(st.integers(0, len(expected)), max_size=4)),
        len(expected),
    ]:
        stats = plan.stats(stop_row)
        assert stats == Plan(*made).stats(stop_row), "stats depend on the ones before it"
        assert stats.rows == stop_row
        placed = 0
        for name, (tokens, segments) in books(datasets, spec, expected[:stop_row]).items():
            part = stats.datasets[name]
            assert min(dataclasses.astuple(part)) >= 0
            assert part.passes * part.num_docs == part.draws + part.unreached
            assert (
                part.draws
                == part.docs_placed + part.docs_pending + part.docs_dropped + part.docs_empty
            )
            assert (
                part.tokens_drawn
                == part.tokens_placed
                + part.tokens_pending
                + part.tokens_truncated
                + part.tokens_dropped
            )
            assert (part.tokens_placed, part.segments) == (tokens, segments)
            assert part.docs_truncated <= part.docs_placed
            placed += tokens
        assert stats.slots == placed + stats.padding
        assert stats.slots == (placed if spec.pack is None else stop_row * spec.pack.seq_length)
    if plan.num_rows is not None and plan.num_rows < FIRST_ROWS:
        whole = plan.stats()
        for each in datasets:
            part = whole.datasets[each.name]
            assert part.docs_pending == part.tokens_pending == 0
        for each, cap in zip(datasets, spec.caps, strict=True):
            part = whole.datasets[each.name]
            assert cap is None or part.draws <= cap * each.num_docs, (
                "a document came more often than max_epochs allows"
            )
            if spec.stop != "first_exhausted" or len(datasets) == 1:
                passes = min(n for n in (spec.num_epochs, cap) if n is not None)
                assert (part.unreached, part.passes, part.epochs) == (0, passes, passes)
                assert part.tokens_drawn == passes * each.total_tokens


@pytest.mark.parametrize("unit", ["rows", "tokens"])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_a_dataset_has_its_share_until_it_leaves(strategy: str | None, unit: str) -> None:
    """A window ends with its last document: its rows are permuted, and what the others give later
    would come before it.
    """
    datasets = [dataset("small", [20] * 50), dataset("large", [20] * 5000)]
    spec = PlanSpec(
        seed=3,
        weights=(7, 3),
        stop="restart",
        num_epochs=None,
        unit=unit,
        max_epochs=(4, None),
        pack=None if strategy is None else PackSpec(seq_length=64, strategy=strategy),
    )
    plan = Plan(datasets, spec)
    placed = plan.stats(plan.window_at(0).after.first_row).datasets
    # "stream": what fills no row belongs to the next window
    assert 4 * 50 * 20 - 64 < placed["small"].tokens_placed <= 4 * 50 * 20
    assert placed["large"].tokens_placed == pytest.approx(4 * 50 * 20 * 3 / 7, abs=160)


def test_the_stats_counts_what_oversize_does() -> None:
    lengths = [5, 10, 23, 8, 0]
    expected = {
        "split": {"tokens_placed": 46, "docs_placed": 4, "docs_empty": 1, "segments": 6},
        "truncate": {
            "tokens_placed": 33,
            "docs_placed": 4,
            "docs_truncated": 1,
            "tokens_truncated": 13,
            "segments": 4,
        },
        "drop": {
            "tokens_placed": 23,
            "docs_placed": 3,
            "docs_dropped": 1,
            "tokens_dropped": 23,
            "segments": 3,
        },
    }
    for oversize, wanted in expected.items():
        pack = PackSpec(10, oversize=oversize)  # pyright: ignore[reportArgumentType]
        spec = PlanSpec(seed=0, weights=(1,), stop="all_exhausted", window_docs=3, pack=pack)
        part = Plan([dataset("a", lengths)], spec).stats().datasets["a"]
        assert {key: getattr(part, key) for key in wanted} == wanted
        assert part.tokens_drawn == 46
        assert part.docs_empty == 1


def test_threads_see_the_same_rows() -> None:
    """Eight threads ask for neighbouring rows of a plan that keeps two windows."""
    datasets = [dataset("a", np.arange(3000) % 90 + 1), dataset("b", np.arange(900) % 300 + 1)]
    spec = PlanSpec(
        seed=5,
        weights=(3, 1),
        stop="restart",
        num_epochs=None,
        window_docs=100,
        pack=PackSpec(256, "first_fit"),
    )
    batches = [np.arange(start, start + 8) for start in range(0, 2000, 8)]
    alone = Plan(datasets, spec)
    expected = [alone.pieces(rows) for rows in batches]
    shared = Plan(datasets, spec, cache_bytes=0)
    started = threading.Barrier(8)

    def work(n: int) -> list[Pieces]:
        started.wait(30)
        return [shared.pieces(rows) for rows in batches[n::8]]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    for n, rows in enumerate(expected):
        for a, b in zip(rows, found[n % 8][n // 8], strict=True):
            assert np.array_equal(a, b)
    assert len(shared._windows) == 2


def test_states_are_small() -> None:
    """60 datasets, weights and counts as large as they get."""
    rng = random.Random(0)
    weights = integer_weights({f"d{i}": rng.random() for i in range(60)})
    assert sum(weights) > 1 << 39
    datasets = [
        PlanDataset(f"d{i}", 1 << 40, 1 << 50, "", lambda docs: np.full(docs.size, 1000, np.int32))
        for i in range(60)
    ]
    plan = Plan(
        datasets,
        PlanSpec(
            seed=0,
            weights=weights,
            stop="restart",
            num_epochs=None,
            window_docs=5000,
            pack=PackSpec(2048),
        ),
    )
    state = plan.state_at(100_000)
    assert state.index > 10
    far = dataclasses.replace(
        state, drawn=tuple((1 << 40) + n for n in state.drawn), index=1 << 40, first_row=1 << 47
    )
    assert len(json.dumps(far.to_json())) < 3072
    plan.resume(far)
    assert plan.pieces(np.array([far.first_row])).length.sum() <= 2048


def test_memory_does_not_grow_with_the_documents() -> None:
    datasets = [
        PlanDataset("a", 1 << 32, 100 << 32, "", lambda docs: (docs % 199 + 1).astype(np.int32))
    ]
    spec = PlanSpec(
        seed=0,
        weights=(1,),
        stop="restart",
        num_epochs=None,
        window_docs=65_536,
        pack=PackSpec(2048, "first_fit"),
    )
    plan = Plan(datasets, spec, cache_bytes=8 << 20)
    process = psutil.Process()
    plan.pieces(np.array([60_000]))
    before = process.memory_full_info().uss
    for row in range(60_000, 600_000, 3000):
        plan.pieces(np.array([row]))
    assert process.memory_full_info().uss - before < 24 << 20
    assert len(plan.checkpoints()) < 20


def test_window_docs_are_chosen_from_integers() -> None:
    few, many = dataset("few", [1000] * 100), dataset("many", [200] * 100)
    assert window_docs([few], (1,)) == -(-(16 << 20) // 1000)
    assert window_docs([few, many], (1, 1)) == -(-(16 << 20) // 600)
    assert window_docs([few], (1,), 8192) == -(-4096 * 8192 // 1000)
    assert window_docs([dataset("tiny", [3] * 10)], (1,)) == 65_536
    assert window_docs([dataset("none", [])], (1,)) == 65_536
    assert window_docs([dataset("huge", [1 << 30])], (1,)) == 1


def spec(**changes: object) -> PlanSpec:
    values = {
        "seed": 1,
        "weights": (1, 1),
        "stop": "all_exhausted",
        "window_docs": 8,
        "num_epochs": 1,
        **changes,
    }
    return PlanSpec(**values)  # pyright: ignore[reportArgumentType]


A, B, EMPTY = dataset("a", [5, 9, 30]), dataset("b", [7]), dataset("empty", [])


@pytest.mark.parametrize(
    ("datasets", "changes", "message"),
    [
        (
            [A, EMPTY],
            {"stop": "restart", "num_epochs": None},
            r"dataset 'empty': has no documents\. Leave it out",
        ),
        ([EMPTY], {"weights": (1,)}, r"dataset 'empty': has no documents\. Give it data"),
        ([EMPTY, dataclasses.replace(EMPTY, name="too")], {}, r"datasets: none has any documents"),
    ],
)
def test_plans_that_cannot_be_are_refused(
    datasets: list[PlanDataset], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(datasets, spec(**changes))


def test_an_empty_dataset_has_left_already() -> None:
    assert Plan([A, EMPTY], spec()).num_rows == 3
    assert Plan([A, B], spec(stop="restart", num_epochs=None)).num_rows is None


def test_rows_behind_the_last_are_refused() -> None:
    plan = Plan([A, B], spec(pack=PackSpec(10)))
    total = plan.num_rows
    assert total is not None
    for call in (
        plan.locate,
        plan.state_at,
        plan.stats,
        plan.window_at,
        lambda row: plan.pieces(np.array([row])),
    ):
        with pytest.raises(PlanError, match=rf"row {total + 1}: the plan has {total} rows"):
            call(total + 1)
        with pytest.raises(PlanError, match=r"row -1: rows count from 0"):
            call(-1)
    for call in (plan.locate, plan.window_at):
        with pytest.raises(PlanError, match=rf"row {total}: the plan has {total} rows"):
            call(total)
    nothing = Plan([A, B], spec(pack=PackSpec(2, oversize="drop")))
    with pytest.raises(PlanError, match=r"row 0: the plan has 0 rows"):
        nothing.window_at(0)
    assert nothing.num_rows == 0
    assert plan.state_at(total).epoch == 1
    assert plan.pieces(np.array([], dtype=np.int64)).row.size == 0
    with pytest.raises(PlanError, match=r"this plan has no end.*Say up to which row"):
        Plan([A, B], spec(num_epochs=None)).stats()


def test_oversize_error_names_dataset_and_document() -> None:
    with pytest.raises(
        PlanError,
        match=r"dataset 'a', document 2: 30 tokens do not fit a row of 10\. Raise pack\.seq_length",
    ):
        Plan([A, B], spec(pack=PackSpec(10, oversize="error"))).locate(0)
    assert Plan([A, B], spec(pack=PackSpec(30, oversize="error"))).num_rows


@pytest.mark.parametrize("stop", ["restart", "first_exhausted", "all_exhausted"])
def test_a_plan_of_which_no_document_fits_says_so(stop: str) -> None:
    datasets = [dataset("a", [50] * 9), dataset("b", [60] * 4)]
    plan = Plan(datasets, spec(stop=stop, num_epochs=None, pack=PackSpec(10, oversize="drop")))
    for call in (plan.locate, plan.stats, plan.state_at):
        with pytest.raises(
            PlanError,
            match=r"pack\.oversize: none of 13 documents fits a row of 10 tokens\. Raise "
            r"pack\.seq_length",
        ):
            call(5)
    rare = Plan(
        [*datasets, dataset("c", [60] * 99 + [10])],
        spec(weights=(1, 1, 1), num_epochs=None, pack=plan.spec.pack),
    )
    assert rare.locate(5).pieces.length.tolist() == [10]
    ends = Plan(datasets, spec(pack=PackSpec(10, oversize="drop")))
    assert ends.num_rows == 0
    assert ends.stats().datasets["a"].docs_dropped == 9


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (lambda docs: docs, r"dataset 'a': lengths of \d documents came as int64"),
        (
            lambda docs: np.zeros(1, np.int32),
            r"dataset 'a': lengths of \d documents came as int32\[1\]",
        ),
        (
            lambda docs: np.where(docs == 1, -4, 4).astype(np.int32),
            r"dataset 'a', document 1: a length of -4 tokens\. The token cache is damaged",
        ),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths: object, message: str) -> None:
    broken = dataclasses.replace(A, lengths=lengths)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match=message):
        Plan([broken, B], spec(pack=PackSpec(10))).locate(0)


def test_states_of_other_plans_are_refused() -> None:
    plan = Plan([A, B], spec(pack=PackSpec(10)))
    good = plan.state_at(0)
    for bad in (
        dataclasses.replace(good, drawn=(1,)),
        dataclasses.replace(good, index=-1),
        dataclasses.replace(good, deficits=(1, 1)),
        dataclasses.replace(good, drawn=(4, 0)),
    ):
        with pytest.raises(StateError, match="window: "):
            plan.resume(bad)
    for text in (
        {},
        [],
        None,
        {**good.to_json(), "active": "x1"},
        {**good.to_json(), "drawn": "ab"},
        *({**good.to_json(), key: 1 << 62} for key in ("index", "epoch", "first_row")),
        *({**good.to_json(), key: [0, -1 << 62]} for key in ("drawn", "deficits", "cut")),
    ):
        with pytest.raises(StateError, match="is not a state of a plan"):
            WindowState.from_json(text)


def test_the_fingerprint_holds_all_that_decides_rows() -> None:
    pack = PackSpec(10)
    base = Plan([A, B], spec(pack=pack)).fingerprint
    assert base == Plan([A, B], spec(pack=PackSpec(10, num_packers=3))).fingerprint, (
        "greedy has no packers"
    )
    choices: list[dict[str, object]] = [
        {"seed": 2},
        {"weights": (1, 2)},
        {"stop": "first_exhausted"},
        {"window_docs": 9},
    ]
    choices += [{"order": OrderConfig(block_rows=2)}, {"order": OrderConfig(shuffle=False)}]
    choices += [
        {"pack": other}
        for other in (None, PackSpec(11), PackSpec(10, "pool"), PackSpec(10, "pool", 3))
    ]
    changed = [
        dataclasses.replace(A, **change)
        for change in ({"name": "c"}, {"fingerprint": "x"}, {"total_tokens": 47})
    ]
    others = [Plan([A, B], spec(**{"pack": pack, **choice})).fingerprint for choice in choices]
    others += [Plan([dataset, B], spec(pack=pack)).fingerprint for dataset in changed]
    assert len({base, *others}) == len(others) + 1


def test_rows_are_pinned() -> None:
    """Other rows here need a higher PLAN_VERSION: saved states of earlier versions would name other
    documents.
    """
    datasets = [dataset("code", np.arange(1, 30)), dataset("text", np.arange(40, 1, -1))]
    made = PlanSpec(
        seed=7,
        weights=(7, 3),
        stop="first_exhausted",
        window_docs=16,
        pack=PackSpec(32, "first_fit"),
    )
    rows = look(Plan(datasets, made), [0, 5, 9])
    assert rows == [
        [(0, 1, 1, 18, 0, 22), (22, 2, 1, 30, 0, 10)],
        [(0, 1, 0, 17, 0, 18)],
        [(0, 1, 1, 1, 0, 32)],
    ]


def test_documents_weigh_their_tokens_up_to_a_whole_row() -> None:
    lengths = np.array([0, 1, 63, 64, 65, 500], np.int32)
    weighed = {
        how: token_sizes(lengths, PackSpec(seq_length=64, strategy="greedy", oversize=how)).tolist()
        for how in ("split", "truncate", "drop")
    }
    assert weighed == {
        "split": [1, 1, 63, 64, 65, 500],
        "truncate": [1, 1, 63, 64, 64, 64],
        "drop": [1, 1, 63, 64, 1, 1],
    }


@pytest.mark.parametrize("key", range(20))
@pytest.mark.parametrize("cuts", [(None, None), (0, None), (None, 0), (1, 0), (0, 0), (2, 1)])
def test_what_is_cut_stays_at_its_end_of_a_window(key, cuts):
    """All else may change places, within its dataset."""
    dataset = np.random.default_rng(key).integers(0, 3, 30).astype(np.int32)
    doc, length = np.arange(30), np.arange(30, dtype=np.int32) + 5
    begins, ends = (None if of is None else (of, 3) for of in cuts)
    keys = SimpleNamespace(document_keys=(key, key + 1, key + 2))
    _permute(keys, begins, ends, dataset, doc, length)
    assert (length == doc + 5).all()
    assert (doc != np.arange(30)).any()
    for i in range(3):
        here = np.flatnonzero(dataset == i)
        assert sorted(doc[here].tolist()) == here.tolist()
        assert begins is None or begins[0] != i or doc[here[0]] == here[0]
        assert ends is None or ends[0] != i or doc[here[-1]] == here[-1]
