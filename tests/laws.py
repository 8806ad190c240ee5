"""The laws of DESIGN.md as reusable checks. Every source, transform, stage, plan and loader goes
through the ones that bind it.

A law is a function that raises AssertionError with the place where it is broken. Tests call them
with real objects, most often under Hypothesis (tests/strategies.py).
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.core.ledger import Ledger
from easypipe.core.protocols import ShardedSource, Source, Transform, fetched
from easypipe.core.schema import (
    IGNORE,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    POSITION_IDS,
    ROW_NUMBER,
    SEGMENT_IDS,
)
from easypipe.stages.mix.mixture import PlannedSource

MAX_STATE_BYTES = 4096


# Law 1: determinism


def assert_same_batches(
    first: Iterable[Mapping[str, Any]],
    second: Iterable[Mapping[str, Any]],
    *,
    what: str = "batches",
) -> int:
    """Byte-equal, column by column, dtype by dtype, to the end of both. Returns how many batches
    there were.
    """
    missing = object()
    count = 0
    for n, (a, b) in enumerate(itertools.zip_longest(first, second, fillvalue=missing)):
        assert a is not missing, f"{what}: the second goes on after batch {n}"
        assert b is not missing, f"{what}: the first goes on after batch {n}"
        assert_same_batch(a, b, what=f"{what}, batch {n}")
        count = n + 1
    return count


def assert_same_batch(a: Mapping[str, Any], b: Mapping[str, Any], *, what: str = "batch") -> None:
    assert sorted(a) == sorted(b), f"{what}: columns {sorted(a)} and {sorted(b)}"
    for column in a:
        x, y = np.asarray(a[column]), np.asarray(b[column])
        assert x.dtype == y.dtype, f"{what}, {column}: {x.dtype} and {y.dtype}"
        assert x.shape == y.shape, f"{what}, {column}: {x.shape} and {y.shape}"
        assert x.tobytes() == y.tobytes(), (
            f"{what}, {column}: first difference at {np.argwhere(x != y)[:1].tolist()}"
        )


def assert_rows_by_number(rows: Any, numbers: np.ndarray, width: int) -> None:
    """What a row holds depends on its number alone: not on the rows beside it, their order, or how
    often it was asked for.
    """
    together = rows.gather(numbers, width)
    for i in reversed(range(len(numbers))):
        alone = rows.gather(numbers[i : i + 1], width)
        assert_same_batch(
            {name: column[i : i + 1] for name, column in together.items()},
            alone,
            what=f"row {numbers[i]}",
        )
    for name, column in rows.batch(numbers[::-1].copy(), width).items():
        np.testing.assert_array_equal(column[::-1], rows.batch(numbers, width)[name])


def assert_ranks(make: Callable[[int], Any], world: int, batch_size: int, batches: int) -> None:
    """Of `world` ranks, batch t of all together has the rows of batch t of one loader that is as
    many times as large. make: a fresh loader of that batch size.
    """
    ranks = [iter(make(batch_size).of_rank(rank, world)) for rank in range(world)]
    each = itertools.islice(zip(*ranks, strict=False), batches)
    for n, (parts, whole) in enumerate(zip(each, make(world * batch_size), strict=False)):
        rows = Counter(itertools.chain.from_iterable(map(_rows, parts)))
        assert rows == Counter(_rows(whole)), f"batch {n} of {world} ranks of {batch_size} rows"
        batches -= 1
    assert batches == 0, f"{batches} batches are missing"


def _rows(batch: Mapping[str, Any]) -> list[tuple[bytes, ...]]:
    columns = [np.asarray(batch[name]) for name in sorted(batch)]
    return [tuple(row.tobytes() for row in rows) for rows in zip(*columns, strict=True)]


def assert_same_documents(
    first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]], *, what: str
) -> int:
    """The same segments, however they are laid into rows, each with the values that every column
    has beside its tokens. Returns how many there were.
    """
    one, other = (
        Counter(itertools.chain.from_iterable(map(_segments, x))) for x in (first, second)
    )
    assert one == other, f"{what}: {len(one - other)} and {len(other - one)} documents more"
    return one.total()


def _segments(batch: Mapping[str, Any]) -> list[tuple[bytes, ...]]:
    columns = {name: np.asarray(batch[name]) for name in sorted(batch) if name != SEGMENT_IDS}
    segments = np.asarray(batch[SEGMENT_IDS])
    return [
        tuple(values[row][segments[row] == number].tobytes() for values in columns.values())
        for row in range(len(segments))
        for number in range(1, int(segments[row].max()) + 1)
    ]


# Law 2: exact resume


def assert_exact_resume(
    make: Callable[[], Any],
    batches: int,
    *,
    hops: Sequence[int] = (),
    stops: Sequence[int] | None = None,
) -> None:
    """Stop after every batch (or after `stops`), restore into a new loader, and see the same
    batches from there.

    make: builds a fresh loader. batches: how many to look at. hops: save → resume again after that
    many further batches.
    """
    reference = [_copied(batch) for batch in itertools.islice(iter(make()), batches)]
    assert reference, "the loader yielded nothing"
    for stop in range(len(reference) + 1) if stops is None else stops:
        loader = make()
        position = _advance(loader, stop, reference, 0)
        state = _through_json(loader.state())
        for hop in hops:
            loader = make()
            loader.restore(state)
            position = _advance(loader, hop, reference, position)
            state = _through_json(loader.state())
        resumed = make()
        resumed.restore(state)
        rest = itertools.islice(iter(resumed), len(reference) - position)
        assert_same_batches(
            reference[position:], rest, what=f"resumed after batch {position} (hops {list(hops)})"
        )


def _advance(loader: Any, count: int, reference: list[dict[str, np.ndarray]], position: int) -> int:
    count = min(count, len(reference) - position)
    iterator = iter(loader)
    try:
        for _ in range(count):
            assert_same_batch(
                reference[position], next(iterator), what=f"batch {position} on the way"
            )
            position += 1
    finally:
        close = getattr(iterator, "close", None)
        if count and close is not None:
            close()
    return position


def _copied(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {column: np.array(values) for column, values in batch.items()}


def _through_json(state: Any) -> Any:
    """The state as another process would read it; at most 4 KiB."""
    if not hasattr(state, "to_json"):
        return json.loads(json.dumps(state))
    text = state.to_json()
    assert len(text.encode()) <= MAX_STATE_BYTES, f"state of {len(text.encode())} bytes"
    return type(state).from_json(text)


# Law 3: stateless reads


def assert_stateless_reads(source: ShardedSource, cuts: Sequence[int] = (1, 3, 7, 100)) -> None:
    """Any cuts, any order, any thread give the same rows; row numbers are physical records."""
    if isinstance(source, PlannedSource):
        source.prepare()
    for shard, info in enumerate(source.shards):
        total = info.num_rows
        assert total is not None, f"shard {info.name} cannot be cut: give it a row count"
        assert list(info.cuts) == sorted(set(info.cuts)), f"cuts of {info.name} are not ascending"
        assert not info.cuts or (info.cuts[0] == 0 and info.cuts[-1] <= total), (
            f"cuts of {info.name} leave the shard"
        )
        whole = source.read(shard, 0, total)
        assert whole.schema.equals(source.schema), (
            f"{info.name}: read gives\n{whole.schema}\nschema says\n{source.schema}"
        )
        _assert_row_numbers(whole, 0, total, info.name)
        edges = sorted({0, total, *(cut % (total + 1) for cut in cuts)})
        spans = list(itertools.pairwise(edges))
        pieces = {span: source.read(shard, *span) for span in reversed(spans)}
        for (start, stop), piece in pieces.items():
            assert piece.schema.equals(source.schema), (
                f"{info.name}[{start}:{stop}]: another schema than the whole"
            )
            _assert_row_numbers(piece, start, stop, info.name)
        _assert_equal_tables([pieces[span] for span in spans], whole, f"{info.name} cut at {edges}")
        with ThreadPoolExecutor(4) as pool:
            threaded = list(pool.map(lambda span, shard=shard: source.read(shard, *span), spans))
        _assert_equal_tables(threaded, whole, f"{info.name} read by threads, cut at {edges}")
        _assert_equal_tables(
            [_read_fetched(source, shard, *span) for span in spans], whole, f"{info.name}, fetched"
        )
        if isinstance(source, Source):
            assert source.at_end(shard, total), f"{info.name}: rows behind the last one"
            assert total == 0 or not source.at_end(shard, total - 1), f"{info.name} ends early"
        if isinstance(source, Source) and type(source).scan is not Source.scan:
            scanned = source.scan(shard, 0, total)
            _assert_equal_tables([scanned.batch], whole, f"{info.name}: scan and read differ")
            refused = sum(reject.count for reject in scanned.rejects)
            numbered = ROW_NUMBER in scanned.batch.schema.names
            given = (
                len(np.unique(scanned.batch.column(ROW_NUMBER).to_numpy()))
                if numbered
                else scanned.batch.num_rows
            )
            assert given + refused == total, f"{info.name}: rows lost without a reject"


def _read_fetched(source: ShardedSource, shard: int, start: int, stop: int) -> pa.RecordBatch:
    with fetched(source, shard, start, stop):
        return source.read(shard, start, stop)


def _assert_row_numbers(batch: pa.RecordBatch, start: int, stop: int, name: str) -> None:
    if ROW_NUMBER not in batch.schema.names:
        assert batch.num_rows == stop - start, (
            f"{name}[{start}:{stop}] gave {batch.num_rows} rows and no {ROW_NUMBER}"
        )
        return
    numbers = batch.column(ROW_NUMBER).to_numpy()
    steps = np.diff(numbers)
    # a long text may be split into several documents
    apart = steps > 0 if INPUT_IDS not in batch.schema.names else steps >= 0
    assert apart.all(), f"{name}: row numbers do not ascend"
    assert not numbers.size or (numbers[0] >= start and numbers[-1] < stop), (
        f"{name}: row numbers leave {start}:{stop}"
    )


def _assert_equal_tables(
    pieces: Sequence[pa.RecordBatch], whole: pa.RecordBatch, what: str
) -> None:
    together = pa.Table.from_batches(list(pieces), schema=whole.schema).combine_chunks()
    assert together.equals(pa.Table.from_batches([whole]).combine_chunks()), what


def assert_row_wise(transform: Transform, batch: pa.RecordBatch, cuts: Sequence[int]) -> None:
    """A transform of the whole equals the transforms of the pieces."""
    edges = sorted({0, batch.num_rows, *(cut % (batch.num_rows + 1) for cut in cuts)})
    pieces = [transform(batch.slice(a, b - a)) for a, b in itertools.pairwise(edges)]
    _assert_equal_tables(pieces, transform(batch), f"{transform} at cuts {edges}")


# Law 4: conservation


def assert_conserved(ledger: Ledger) -> None:
    assert ledger.entries, "an empty ledger proves nothing"
    for entry in ledger.entries:
        assert all(value >= 0 for value in (*entry.into.values(), *entry.out.values())), (
            f"negative count in {entry}"
        )
        assert entry.leak == 0, f"{entry.leak} {entry.unit} leak in {entry}"
    ledger.check()


# Laws 4 and 5: what a packed row must look like


def assert_rows_well_formed(
    rows: Mapping[str, np.ndarray], pad_token_id: int | None = None
) -> None:
    """Segments count from 1 without gaps and lie in one piece each, positions restart with each,
    padding is 0.
    """
    segments, positions = np.asarray(rows[SEGMENT_IDS]), np.asarray(rows[POSITION_IDS])
    for r in range(segments.shape[0]):
        used = segments[r] > 0
        filled = int(used.sum())
        changes = np.flatnonzero(np.diff(segments[r], prepend=0))
        seen = [int(segments[r, c]) for c in changes if segments[r, c] > 0]
        assert seen == list(range(1, len(seen) + 1)), f"row {r}: segments come as {seen}"
        starts = np.zeros(segments.shape[1], dtype=np.int64)
        starts[changes] = changes
        expected = np.where(used, np.arange(segments.shape[1]) - np.maximum.accumulate(starts), 0)
        assert (positions[r] == expected).all(), f"row {r}: positions do not restart with segments"
        if pad_token_id is not None:
            assert (np.asarray(rows[INPUT_IDS])[r][~used] == pad_token_id).all(), (
                f"row {r}: padding is not the pad token"
            )
        if LOSS_MASK in rows:
            assert not np.asarray(rows[LOSS_MASK])[r][~used].any(), f"row {r}: padding is trained"
        assert filled == used.sum()


def assert_labels(batch: Mapping[str, np.ndarray], loss_mask: np.ndarray | None = None) -> None:
    """labels[t] is the next token of the same segment where that token is a target, else -100."""
    ids, segments, labels = (np.asarray(batch[c]) for c in (INPUT_IDS, SEGMENT_IDS, LABELS))
    expected = np.full_like(labels, IGNORE)
    for r in range(ids.shape[0]):
        for t in range(ids.shape[1] - 1):
            target = loss_mask is None or loss_mask[r, t + 1]
            if segments[r, t] > 0 and segments[r, t + 1] == segments[r, t] and target:
                expected[r, t] = ids[r, t + 1]
    assert (labels == expected).all(), (
        f"labels differ first at {np.argwhere(labels != expected)[:1].tolist()}"
    )


def assert_contiguous(
    batch: Mapping[str, np.ndarray],
    documents: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    joined: bool = False,
) -> None:
    """The rows of `batch`, in their order, are `documents` (ids and loss mask of each) one behind
    the other, each token once; and each but a document's first is a label once, if it is a target,
    also where a row ends within the document. joined: each but the first of all.
    """
    ids, segments, positions, labels = (
        np.asarray(batch[c]) for c in (INPUT_IDS, SEGMENT_IDS, POSITION_IDS, LABELS)
    )
    slots = ids.shape[1]
    tokens = [
        (token, bool(flag), n, at)
        for n, (doc, mask) in enumerate(documents)
        for at, (token, flag) in enumerate(zip(doc, mask, strict=True))
    ]
    assert ids.shape[0] == -(-len(tokens) // slots), (
        f"{len(tokens)} tokens in {ids.shape[0]} rows of {slots}"
    )
    for i in range(ids.size):
        r, t = divmod(i, slots)
        if i >= len(tokens):
            assert (segments[r, t], labels[r, t]) == (0, IGNORE), f"row {r}, slot {t}: not padding"
            continue
        token, _, doc, _ = tokens[i]
        first = t == 0 or (tokens[i - 1][2] != doc and not joined)
        segment, position = (
            (1, 0)
            if t == 0
            else (segments[r, t - 1] + first, 0 if first else positions[r, t - 1] + 1)
        )
        assert (ids[r, t], segments[r, t], positions[r, t]) == (token, segment, position), (
            f"row {r}, slot {t}"
        )
        follows = i + 1 < len(tokens) and tokens[i + 1][1] and (joined or tokens[i + 1][2] == doc)
        assert labels[r, t] == (tokens[i + 1][0] if follows else IGNORE), (
            f"row {r}, slot {t}: label {labels[r, t]}"
        )


def assert_aligned(
    batches: Iterable[Mapping[str, np.ndarray]],
    columns: Mapping[str, Callable[[np.ndarray], np.ndarray]],
    *,
    added: int,
) -> int:
    """Every token has the values that the columns say of its id, byte for byte; padding and an
    `added` EOS, which no row holds itself, have zeros. Returns how many tokens were looked at.
    """
    count = 0
    for n, batch in enumerate(batches):
        ids, segments = np.asarray(batch[INPUT_IDS]), np.asarray(batch[SEGMENT_IDS])
        held = (segments > 0) & (ids != added)
        count += int(held.sum())
        for name, values_of in columns.items():
            found, wanted = np.asarray(batch[name]), values_of(ids)
            assert found.shape == wanted.shape, f"batch {n}, {name}: {found.shape}"
            wrong = np.argwhere(
                held.reshape(held.shape + (1,) * (found.ndim - 2)) & (found != wanted)
            )
            assert not wrong.size, f"batch {n}, {name}: first difference at {wrong[0].tolist()}"
            assert not found[~held].any(), f"batch {n}, {name}: values where no token of a row is"
    return count


# Law 9: one way


def assert_one_way(face: Any, spelling: Any, *, what: str) -> None:
    """A face of text gives the batches of its Pipeline spelling, byte for byte, as many, and each
    at least one.
    """
    assert assert_same_batches(face, spelling, what=f"{what} and its Pipeline spelling") > 0
    assert len(face) == len(spelling), what


def assert_fewest_slots(counts: np.ndarray, widths: Sequence[int], buckets: int) -> None:
    """Widths hold every row, are no more than asked for, and no other choice among the lengths has
    fewer slots.
    """

    def slots(chosen: Sequence[int]) -> int:
        return sum(
            int(count) * min(width for width in chosen if width >= length)
            for length, count in enumerate(counts)
            if length and count
        )

    lengths = [length for length, count in enumerate(counts) if length and count]
    assert list(widths) == sorted(set(widths))
    assert len(widths) <= buckets
    assert widths[-1] == lengths[-1]
    others = (
        (*more, lengths[-1])
        for size in range(min(buckets, len(lengths)))
        for more in itertools.combinations(lengths[:-1], size)
    )
    assert slots(widths) == min(slots(sorted(other)) for other in others)


def assert_json_is_values(
    render: Callable[[Sequence[Mapping[str, Any]]], Sequence[Any]],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Rows whose columns are JSON become what rows of the values themselves become: the same texts,
    the same spans, the same refusals.
    """
    written = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    for row, one, other in zip(rows, render(written), render(rows), strict=True):
        assert one == other, f"{row}: {one} from JSON, {other} from values"


# Law 7 and good manners


def assert_no_new_threads(before: set[threading.Thread]) -> None:
    left = [t.name for t in threading.enumerate() if t not in before and t.is_alive()]
    assert not left, f"threads left behind: {left}"
