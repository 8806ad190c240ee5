"""Short, obvious and slow: what the kernels of this package are checked against. Plain Python, exact integers, no arrays in the middle."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from easypipe.core.random import child, fold, permute
from easypipe.plan.mix import Stop
from easypipe.plan.order import OrderSpec
from easypipe.plan.pack import PackSpec
from easypipe.plan.spec import PlanDataset, PlanSpec

Item = tuple[int, int, int]  # draw, start, length
Piece = tuple[int, int, int, int, int, int]  # slot, segment, dataset, doc, start, length


def assign(weights: Sequence[int]) -> Iterator[int]:
    """The draws of a mixture without end, straight from Tijdeman's rule (The chairman assignment problem, Discrete Mathematics 32, 1980).

    Among the datasets that are owed at least 1/(2k - 2) of a draw, the one whose debt would first exceed 1 - 1/(2k - 2); of equals,
    the first.
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


def draws(weights: Sequence[int], num_docs: Sequence[int], stop: Stop) -> Iterator[int]:
    """The datasets that one epoch of a mixture draws from, draw by draw."""
    left = list(num_docs)
    active = [i for i in range(len(left)) if left[i] or stop != "all_exhausted"]
    while active:
        for chosen in assign([weights[i] for i in active]):
            dataset = active[chosen]
            if stop != "restart" and left[dataset] == 0:
                return
            left[dataset] -= 1
            yield dataset
            if stop == "all_exhausted" and left[dataset] == 0:
                active.remove(dataset)
                break


@functools.lru_cache(maxsize=64)
def one_pass(spec: OrderSpec, num_docs: int, key: int) -> list[int]:
    """All documents, in the order of the pass that `key` names."""
    if not spec.shuffle:
        return list(range(num_docs))
    blocks = [range(start, min(start + spec.block_rows, num_docs)) for start in range(0, num_docs, spec.block_rows)]
    order = permute(np.arange(len(blocks)), len(blocks), key)
    return [doc for block in order for doc in blocks[block]]


def pack(lengths: Sequence[int], spec: PackSpec) -> list[list[Item]]:
    """The rows of a window before they are shuffled, in the order they were opened; what stands in each, from slot 0 on."""
    rows: list[list[Item]] = []
    rests: list[Item] = []
    open_rows: list[list[Item] | None] = [None] * (spec.num_packers if spec.strategy == "pool" else 1)
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


def room(row: list[Item], spec: PackSpec) -> int:
    return spec.seq_length - sum(length for _, _, length in row)


def plan_rows(datasets: Sequence[PlanDataset], spec: PlanSpec) -> Iterator[list[Piece]]:
    """Every row of a plan from the first on, as the pieces in it."""
    window_index = 0
    stop: Stop = "all_exhausted" if len(datasets) == 1 else spec.stop
    for epoch in itertools.count() if spec.num_epochs is None else range(spec.num_epochs):
        drawn = [0] * len(datasets)
        chosen = draws(spec.weights, [dataset.num_docs for dataset in datasets], stop)
        while window := list(itertools.islice(chosen, spec.window_docs)):
            documents: list[tuple[int, int, int]] = []  # dataset, doc, length
            for i in window:
                turn, position = divmod(drawn[i], datasets[i].num_docs)
                key = child(fold(spec.seed, "order", datasets[i].name), epoch + turn)
                doc = one_pass(spec.order, datasets[i].num_docs, key)[position]
                documents.append((i, doc, int(datasets[i].lengths(np.array([doc]))[0])))
                drawn[i] += 1
            if spec.pack is None:
                rows: list[list[Item]] = [[(draw, 0, length)] for draw, (_, _, length) in enumerate(documents)]
            else:
                rows = pack([length for _, _, length in documents], spec.pack)
            places = np.arange(len(rows))
            if spec.pack is not None and spec.pack.shuffle_rows and rows:
                places = permute(places, len(rows), child(fold(spec.seed, "rows"), window_index))
            for place in np.argsort(places):
                slot, row = 0, list[Piece]()
                for segment, (draw, start, length) in enumerate(rows[place], start=1):
                    row.append((slot, segment, documents[draw][0], documents[draw][1], start, length))
                    slot += length
                yield row
            window_index += 1
