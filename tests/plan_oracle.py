"""The oracles of easypipe.plan: short, obvious and slow, in plain Python with exact integers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from easypipe.core.random import child, fold, permute
from easypipe.plan.feed import CachedFeed
from easypipe.plan.mix import ROWS_TOTAL, TOKENS_TOTAL, Stop, weights_of
from easypipe.plan.order import OrderConfig
from easypipe.plan.pack import PackSpec
from easypipe.plan.spec import PlanDataset, PlanSpec, WindowState

Item = tuple[int, int, int]  # draw, start, length
Document = tuple[int, int, int]  # dataset, doc, length
Piece = tuple[int, int, int, int, int, int]  # slot, segment, dataset, doc, start, length


def assign(weights: Sequence[int]) -> Iterator[int]:
    """The draws of a mixture without end, straight from Tijdeman's rule (The chairman assignment
    problem, Discrete Mathematics 32, 1980).

    Among the datasets that are owed at least 1/(2k - 2) of a draw, the one whose debt would first
    exceed 1 - 1/(2k - 2); of equals, the first.
    """
    if len(weights) == 1:
        yield from itertools.repeat(0)
    total, slack = sum(weights), 2 * len(weights) - 2
    counts = [0] * len(weights)
    for n in itertools.count(1):
        deadlines: dict[int, int] = {}
        for i, weight in enumerate(weights):
            owed = n * weight - counts[i] * total  # in units of 1 / total
            if slack * owed >= total:
                # the smallest m with slack * (m * weight - counts[i] * total) > (slack - 1) * total
                deadlines[i] = ((slack - 1 + slack * counts[i]) * total) // (slack * weight) + 1
        chosen = min(deadlines, key=lambda i: (deadlines[i], i))
        counts[chosen] += 1
        yield chosen


def draws(
    weights: Sequence[int], left: Sequence[float], stop: Stop, out: Sequence[int] = ()
) -> Iterator[int]:
    """The datasets that one epoch of a mixture draws from, draw by draw. left: documents they may
    give. out: datasets not in it.
    """
    left = list(left)
    active = [i for i in range(len(left)) if i not in out and (left[i] or stop != "all_exhausted")]
    while active:
        for chosen in assign([weights[i] for i in active]):
            dataset = active[chosen]
            if left[dataset] == 0:
                return
            left[dataset] -= 1
            yield dataset
            if stop != "first_exhausted" and left[dataset] == 0:
                active.remove(dataset)
                break


@dataclass
class Mixing:
    """Where a mixture stands that gives to whom it owes most. deficits: in units of the weights.
    left: documents that each may give.
    """

    deficits: list[int]
    left: list[float]
    active: list[bool]
    ended: bool = False


def owed_most(
    mixing: Mixing,
    weigh: Callable[[list[bool]], Sequence[int]],
    stop: Stop,
    size: Callable[[int], int] | None,
) -> Iterator[int]:
    """The draws of a window, to whom is owed most. weigh: the weights of the datasets in the
    mixture.

    size: tokens of the next document of a dataset; None counts draws. Of equals, the one with more
    weight; of those, the first.
    """
    while True:
        mixing.ended = not any(mixing.active)
        if mixing.ended:
            return
        weights = weigh(mixing.active)
        granted = [
            owed + (weight if size is None else 0)
            for owed, weight in zip(mixing.deficits, weights, strict=True)
        ]
        chosen = max(
            (i for i, alive in enumerate(mixing.active) if alive),
            key=lambda i: (granted[i], weights[i], -i),
        )
        if mixing.left[chosen] == 0:
            mixing.ended = True
            return
        tokens = 1 if size is None else size(chosen)
        for i, weight in enumerate(weights):
            mixing.deficits[i] += weight * tokens
        mixing.deficits[chosen] -= sum(weights) * tokens
        mixing.left[chosen] -= 1
        if stop != "first_exhausted" and mixing.left[chosen] == 0:
            mixing.active[chosen] = False
            mixing.deficits = [0] * len(weights)
            mixing.ended = not any(mixing.active)
        yield chosen
        if mixing.ended:
            return


@functools.lru_cache(maxsize=64)
def one_pass(spec: OrderConfig, num_docs: int, key: int) -> list[int]:
    """All documents, in the order of the pass that `key` names."""
    if not spec.shuffle:
        return list(range(num_docs))
    blocks = [
        range(start, min(start + spec.block_rows, num_docs))
        for start in range(0, num_docs, spec.block_rows)
    ]
    order = permute(np.arange(len(blocks)), len(blocks), key)
    return [doc for block in order for doc in blocks[block]]


def pack(lengths: Sequence[int], spec: PackSpec) -> list[list[Item]]:
    """The rows of a window before they are shuffled, in the order they were opened; what stands in
    each, from slot 0 on.
    """
    if spec.strategy == "stream":
        return stream(lengths, spec.seq_length)
    rows: list[list[Item]] = []
    rests: list[Item] = []
    open_rows: list[list[Item] | None] = [None] * (
        spec.num_packers if spec.strategy == "pool" else 1
    )
    for draw, length in enumerate(lengths):
        if length > spec.seq_length:
            assert spec.oversize != "error"
            if spec.oversize == "drop":
                continue
            if spec.oversize == "truncate":
                length = spec.seq_length
        whole = length // spec.seq_length * spec.seq_length
        rows += [[(draw, start, spec.seq_length)] for start in range(0, whole, spec.seq_length)]
        if whole == length:
            continue
        item = (draw, whole, length - whole)
        if spec.strategy == "first_fit":
            rests.append(item)
            continue
        rooms = [0 if row is None else room(row, spec) for row in open_rows]
        fitting = [place for place in range(len(rooms)) if rooms[place] >= item[2]]
        place = min(fitting or range(len(rooms)), key=lambda place: (rooms[place], place))
        if not fitting:
            rows.append([])
            open_rows[place] = rows[-1]
        open_row = open_rows[place]
        assert open_row is not None
        open_row.append(item)
    touched: list[list[Item]] = []  # the rows of first_fit, the last one touched at the end
    for item in sorted(rests, key=lambda item: -item[2]):
        fitting = [row for row in touched if room(row, spec) >= item[2]]
        if fitting:
            row = min(reversed(fitting), key=lambda row: room(row, spec))
            touched = [other for other in touched if other is not row]
        else:
            row = []
            rows.append(row)
        row.append(item)
        touched.append(row)
    return rows


def stream(lengths: Sequence[int], seq_length: int, start: int = 0) -> list[list[Item]]:
    """All tokens from the first document's number `start` on, cut into rows."""
    tokens = [
        (draw, at)
        for draw, length in enumerate(lengths)
        for at in range(start if draw == 0 else 0, length)
    ]
    rows = []
    for first in range(0, len(tokens), seq_length):
        pieces: list[Item] = []
        for draw, mine in itertools.groupby(
            tokens[first : first + seq_length], key=lambda token: token[0]
        ):
            places = [at for _, at in mine]
            pieces.append((draw, places[0], len(places)))
        rows.append(pieces)
    return rows


def room(row: list[Item], spec: PackSpec) -> int:
    return spec.seq_length - sum(length for _, _, length in row)


def plan_rows(datasets: Sequence[PlanDataset], spec: PlanSpec) -> Iterator[list[Piece]]:
    """Every row of a plan from the first on, as the pieces in it."""
    window_index = first_row = 0
    num_docs = [dataset.num_docs for dataset in datasets]
    stop: Stop = "all_exhausted" if len(datasets) == 1 else spec.stop
    last = spec.last_epoch(num_docs)
    for epoch in itertools.count() if last is None else range(last):
        out = [
            i
            for i, cap in enumerate(spec.caps)
            if spec.has_epochs and cap is not None and epoch >= cap
        ]
        left: list[float] = [*num_docs]
        if not spec.has_epochs:
            left = [
                math.inf if cap is None else float(cap * count)
                for cap, count in zip(spec.caps, num_docs, strict=True)
            ]
        drawn = [0] * len(datasets)
        chosen = draws(spec.weights, left, stop, out)
        active = [
            i not in out and (left[i] > 0 or stop != "all_exhausted") for i in range(len(left))
        ]
        mixing = Mixing([0] * len(left), left, active)
        windows = (
            stream_windows
            if spec.pack is not None and spec.pack.strategy == "stream"
            else closed_windows
        )
        for documents, rows in windows(
            datasets, spec, epoch, stop, first_row, chosen, mixing, drawn
        ):
            places = np.arange(len(rows))
            if spec.pack is not None and spec.pack.shuffle_rows and rows:
                places = permute(places, len(rows), child(fold(spec.seed, "rows"), window_index))
            for place in np.argsort(places):
                slot, row = 0, list[Piece]()
                for segment, (draw, start, length) in enumerate(rows[place], start=1):
                    row.append(
                        (slot, segment, documents[draw][0], documents[draw][1], start, length)
                    )
                    slot += length
                yield row
            window_index += 1
            first_row += len(rows)


# of an epoch: their documents, and their rows
Windows = Iterator[tuple[list[Document], list[list[Item]]]]


def closed_windows(
    datasets: Sequence[PlanDataset],
    spec: PlanSpec,
    epoch: int,
    stop: Stop,
    row: int,
    chosen: Iterator[int],
    mixing: Mixing,
    drawn: list[int],
) -> Windows:
    """Every document stands in the window that drew it."""
    while True:
        if spec.schedule is None and spec.unit == "rows":
            some = itertools.islice(chosen, spec.window_docs)
            some = until_one_leaves(datasets, spec, drawn, some)
            documents = take(datasets, spec, epoch, some, drawn)
            if not documents:
                return
        elif mixing.ended:
            return
        else:
            size = num_draws(datasets, spec, epoch, stop, row, mixing, drawn)
            documents = take_owed_most(datasets, spec, epoch, stop, row, size, mixing, drawn)
        rows = lay(documents, spec)
        yield documents, rows
        row += len(rows)


def stream_windows(
    datasets: Sequence[PlanDataset],
    spec: PlanSpec,
    epoch: int,
    stop: Stop,
    row: int,
    chosen: Iterator[int],
    mixing: Mixing,
    drawn: list[int],
) -> Windows:
    """The full rows that the documents of a window give, if a token stands behind them; what is
    left belongs to the next window.
    """
    assert spec.pack is not None
    size, kept, start = spec.pack.seq_length, list[Document](), 0
    while True:
        asked, again = estimate(datasets, spec, row, mixing), False
        while True:
            chosen, ahead = itertools.tee(chosen)
            twin = Mixing([*mixing.deficits], [*mixing.left], [*mixing.active])
            if spec.schedule is None and spec.unit == "rows":
                some = itertools.islice(ahead, asked)
                if not again:
                    some = until_one_leaves(datasets, spec, drawn, some)
                new = take(datasets, spec, epoch, some, [*drawn])
                over = next(ahead, None) is None
            else:
                new = take_owed_most(
                    datasets, spec, epoch, stop, row, asked, twin, [*drawn], leave=not again
                )
                over = twin.ended
            documents = kept + new
            rows = stream([length for _, _, length in documents], size, start)
            tokens = [
                (draw, first + i)
                for pieces in rows
                for draw, first, length in pieces
                for i in range(length)
            ]
            full = len(rows) if over else max(0, len(tokens) - 1) // size
            if over or full:
                break
            asked, again = 2 * asked, True
        left = spec.stage(row).rows
        if left is not None and left < full:
            over, full = False, left
        yield documents, rows[:full]
        if over:
            return
        row += full
        draw, start = tokens[full * size]
        count = draw + (start > 0) - len(kept)
        kept = documents[draw : draw + 1] if start else []
        if spec.schedule is None and spec.unit == "rows":
            take(datasets, spec, epoch, itertools.islice(chosen, count), drawn)
        else:
            take_owed_most(
                datasets, spec, epoch, stop, row - full, count, mixing, drawn, leave=False
            )


def look(
    datasets: Sequence[PlanDataset], spec: PlanSpec, epoch: int, i: int, drawn: list[int]
) -> Document:
    """The next document of dataset i."""
    turn, position = divmod(drawn[i], datasets[i].num_docs)
    key = child(fold(spec.seed, "order", datasets[i].name), epoch + turn)
    doc = one_pass(spec.order, datasets[i].num_docs, key)[position]
    return i, doc, int(datasets[i].lengths(np.array([doc]))[0])


def take(
    datasets: Sequence[PlanDataset],
    spec: PlanSpec,
    epoch: int,
    chosen: Iterator[int],
    drawn: list[int],
) -> list[Document]:
    """The documents that the draws `chosen` give; counts them in `drawn`."""
    documents: list[Document] = []
    for i in chosen:
        documents.append(look(datasets, spec, epoch, i, drawn))
        drawn[i] += 1
    return documents


def lay(documents: list[Document], spec: PlanSpec) -> list[list[Item]]:
    lengths = [length for _, _, length in documents]
    return (
        [[(draw, 0, length)] for draw, length in enumerate(lengths)]
        if spec.pack is None
        else pack(lengths, spec.pack)
    )


def take_owed_most(
    datasets: Sequence[PlanDataset],
    spec: PlanSpec,
    epoch: int,
    stop: Stop,
    row: int,
    size: int,
    mixing: Mixing,
    drawn: list[int],
    *,
    leave: bool = True,
) -> list[Document]:
    """At most `size` documents of a window that begins at `row`; moves `mixing` and `drawn` on.

    leave: it ends where a dataset leaves.
    """
    total = ROWS_TOTAL if spec.unit == "rows" else TOKENS_TOTAL

    def tokens(i: int) -> int:
        """Those that get a place in a row, and at least one."""
        _, _, length = look(datasets, spec, epoch, i, drawn)
        if (
            spec.pack is not None
            and length > spec.pack.seq_length
            and spec.pack.oversize in ("truncate", "drop")
        ):
            length = spec.pack.seq_length if spec.pack.oversize == "truncate" else 0
        return max(1, length)

    shares = spec.stage(row).shares
    assert shares is not None
    by_size = tokens if spec.unit == "tokens" else None
    chosen = owed_most(
        mixing, lambda active: weights_of(shares, active, total, spec.block), stop, by_size
    )
    some: Iterator[int] = itertools.islice(chosen, size)
    if leave:
        some = until_one_leaves(datasets, spec, drawn, some)
    return take(datasets, spec, epoch, some, drawn)


def until_one_leaves(
    datasets: Sequence[PlanDataset], spec: PlanSpec, drawn: list[int], chosen: Iterator[int]
) -> Iterator[int]:
    """`chosen` up to the last document of a dataset that does not come again."""
    left: list[float] = [
        math.inf if cap is None or spec.has_epochs else cap * dataset.num_docs - done
        for cap, dataset, done in zip(spec.caps, datasets, drawn, strict=True)
    ]
    for i in chosen:
        left[i] -= 1
        yield i
        if left[i] == 0:
            return


def estimate(datasets: Sequence[PlanDataset], spec: PlanSpec, row: int, mixing: Mixing) -> int:
    """Documents that fill the rows from `row` to where the shares change next, by mean lengths."""
    state = WindowState(
        index=0, epoch=0, first_row=row, drawn=(), deficits=(), active=tuple(mixing.active)
    )
    feed = CachedFeed(datasets, spec)
    return feed.rule(state).docs


def num_draws(
    datasets: Sequence[PlanDataset],
    spec: PlanSpec,
    epoch: int,
    stop: Stop,
    row: int,
    mixing: Mixing,
    drawn: list[int],
) -> int:
    """Documents of the window that begins at `row`: as estimated, or fewer where these would fill
    rows far behind the one where the shares change next.
    """
    count, stage = estimate(datasets, spec, row, mixing), spec.stage(row)
    while spec.pack is not None and stage.rows is not None and count > 1:
        copy = Mixing([*mixing.deficits], [*mixing.left], [*mixing.active])
        made = take_owed_most(datasets, spec, epoch, stop, row, count, copy, [*drawn])
        filled = len(lay(made, spec))
        if filled <= stage.most:
            break
        count = max(1, len(made) * stage.rows // filled)
    return count
