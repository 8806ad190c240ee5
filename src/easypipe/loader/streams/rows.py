"""StreamRows: uncounted data in an order that is the same for any number of hosts.

stream   one of S canonical streams; until one ends, all have equally many rows in every batch
share    the ranges of every dataset that a stream reads (feed.py); they depend on the files, S and
         the seed
window   documents of a stream that are drawn, shuffled and packed together (stream.py); a row is
         always in one window
turn     one row of each stream that has not ended: rows are numbered turn by turn, and ordered in a
         batch stream by stream (plan/order.py)
state    what the next window of a stream depends on (state.py)

When streams end, the others take over their places in the batch. So a pass over finite data ends
when all streams have ended: the last batch is filled with rows of padding, or left out with
drop_last. A process reads the streams of its rows. If the data ends, it must know when the other
streams end, and reads all of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from easypipe.cache.writer import cores
from easypipe.core.aligned import AlignedColumn
from easypipe.core.errors import BudgetError, SourceError, StateError
from easypipe.core.ledger import Ledger
from easypipe.core.schema import (
    LOSS_MASK,
    SEGMENT_IDS,
)
from easypipe.core.values import Int32, Int64, Json, UInt64
from easypipe.loader.placement import gather_bytes
from easypipe.loader.prefetch import ReadPool
from easypipe.loader.rows.gather import Tables, eos_ids
from easypipe.loader.rows.rows import (
    RowReader,
    Rows,
    Share,
    default_width,
    require_no_source_ids,
)
from easypipe.loader.rows.write import RowWriter
from easypipe.loader.state import LoaderState
from easypipe.loader.streams.feed import Deal, Forward, Place
from easypipe.loader.streams.ledger import StreamTotals, ledger_of
from easypipe.loader.streams.spec import StreamSpec
from easypipe.loader.streams.state import StreamState, from_text, to_text
from easypipe.loader.streams.stream import Made, Stream, StreamFeed, lay
from easypipe.plan import order
from easypipe.plan.pack import nothing_fits
from easypipe.plan.spec import in_words
from easypipe.plan.window import View, Window

log = logging.getLogger("easypipe")

STREAM = 1 << 40  # more rows than any stream has
WAITING = 8  # threads that wait for remote storage, per working thread
# the least bytes that the streams of a process request ahead from remote storage, for all datasets
WAITED_BYTES = 64 << 20
_NONE = np.empty(0, np.int32)
# the window of rows of padding
NOTHING = (
    View(0, np.zeros(1, np.int64), np.empty((5, 0), np.int32), _NONE, np.empty(0, np.int64), _NONE),
    lay([]),
)


class StreamRows(Rows):
    """Rows that are read forward, with one reader per iteration.

    Law: row n is the same for any number of processes, threads and batches, and after restoring any
    state.

    Args:
        sources: The datasets, in the order of the plan's weights.
        spec: The choices that decide the rows.
        tokens_identity: Digests of sources and tokenizer.
        pad_token_id: The token id in padding.
        aligned: Columns with values for every token.
        workers: The number of threads that read; None takes one per core.
        name: The name of the loader, used in messages and for threads.
    """

    lengths_are_free = False
    by_number = False

    def __init__(
        self,
        sources: Sequence[Forward],
        spec: StreamSpec,
        tokens_identity: Mapping[str, str],
        *,
        pad_token_id: int,
        aligned: Sequence[AlignedColumn] = (),
        workers: int | None = None,
        name: str = "loader",
    ) -> None:
        self.aligned = tuple(aligned)
        self.sources, self.spec, self.pad_token_id = tuple(sources), spec, pad_token_id
        self.seq_length = None if spec.plan.pack is None else spec.plan.pack.seq_length
        self.num_epochs = spec.plan.num_epochs
        if spec.plan.schedule is not None:  # its sizes are those of one stream
            self.step_sizes = tuple(
                (step, rows * spec.num_streams) for step, rows in spec.plan.schedule.batch_sizes
            )
        self.workers, self.name = workers or cores(), name
        self._tokens_identity = tokens_identity

    @property
    def num_rows(self) -> NoReturn:
        raise TypeError(
            "a streaming loader has no len(): its rows are not counted before they are read. "
            "Count steps instead (max_steps), or leave streaming out."
        )

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.sources]

    @property
    def identity(self) -> Mapping[str, str]:
        return {**self._tokens_identity, "plan": self.spec.fingerprint()}

    @property
    def words(self) -> Json:
        return in_words(self.spec.choices())

    @property
    def settings(self) -> Json:
        return {"streaming": True, "num_streams": self.spec.num_streams}

    def with_source_ids(self, wanted: bool = True) -> StreamRows:
        require_no_source_ids(self.aligned)
        other = copy.copy(self)
        other.source_names = tuple(self.names) if wanted else ()
        return other

    def with_seed(self, seed: int) -> StreamRows:
        """Returns the rows of the same data in the order of a different seed."""
        other, plan = copy.copy(self), dataclasses.replace(self.spec.plan, seed=seed)
        other.spec = dataclasses.replace(self.spec, plan=plan)
        return other

    def open(self, state: LoaderState | None = None, share: Share | None = None) -> RowReader:
        batch, texts = (0, []) if state is None else (state.batch, state.hint or [])
        if len(texts) != (self.spec.num_streams if batch else 0):
            raise StateError(
                at="loader state",
                problem=f"{len(texts)} streams after batch {batch}",
                fix="Restore another state.",
            )
        states = [from_text(text, len(self.sources)) for text in texts]
        return StreamReader(self, 0 if state is None else state.row, states, share or Share())

    def own(self, share: Share) -> list[int]:
        """Returns the streams that a process reads."""
        spec, streams = self.spec, self.spec.num_streams
        own = {
            row // (size // streams)
            for size, rows in share.local.items()
            if size % streams == 0
            for row in rows.tolist()
        }
        if not own or any(size % streams for size in share.local):
            return list(range(streams))
        if spec.last_epoch is not None and len(own) < streams:
            log.warning(
                "%s: the data ends after %d epochs, so every process reads all %d streams to know "
                "where they end, not only its own %d; "
                "with num_epochs=None and a number of steps each reads its own alone",
                self.name, spec.last_epoch, streams, len(own),
            )  # fmt: skip
            return list(range(streams))
        return sorted(own)

    def ledger(self) -> Ledger:
        return ledger_of(StreamTotals.total(len(self.sources)), self.names, self.spec)


class StreamReader(RowReader):
    """The rows of one iteration, batch by batch.

    It advances the streams to their next rows and lays out their tokens. Windows are made in the
    order of their rows: the next one is always for the stream with the earliest next row. So the
    streams that have ended by then are the same for every process, thread and restart.

    Args:
        rows: The rows to read.
        row: The row at which the iteration begins.
        states: The states of the streams there; none at the first row.
        share: The part of the batches that this process makes.
    """

    def __init__(
        self, rows: StreamRows, row: int, states: Sequence[StreamState], share: Share
    ) -> None:
        self._rows, self._begin_row, self._states = rows, row, states
        self.aligned = rows.aligned
        self._own = rows.own(share)
        waits = any(source.waits for source in rows.sources)
        waiting = WAITING * rows.workers if waits else 0
        self._pool = ReadPool(rows.workers, f"easypipe-{rows.name}-read", waiting=waiting)
        self._window_pool = ReadPool(share.workers, f"easypipe-{rows.name}-window")
        self._windows_ahead = share.workers > 0
        self._streams: dict[int, Stream] = {}
        # the rows of each stream that has ended
        self._ends = np.full(rows.spec.num_streams, order.NEVER)
        # rows of each stream that were returned before the iteration began, and how many of these
        # are in windows that are made again
        self._given_before = np.zeros(rows.spec.num_streams, np.int64)
        self._rows_before = 0
        self._bad: Counter[int] = Counter()  # by dataset
        spec = rows.spec
        runs = spec.plan.pack is not None and spec.plan.pack.concat
        self._writer = RowWriter(
            eos=eos_ids(spec.eos, len(spec.plan.weights)),
            pad_token_id=rows.pad_token_id,
            hold=not (spec.train_continued or runs),
            seq_length=rows.seq_length,
            runs=runs,
            joined=spec.joined,
            source_ids=bool(rows.source_names),
        )

    def close(self, *, wait: bool = True) -> None:
        self._pool.close(wait=wait)
        self._window_pool.close(wait=wait)

    def available(self, start: int, stop: int) -> int:
        """Returns how many of the rows `start` to `stop` exist (RowReader.available).

        It makes windows until all of this process's rows before `stop` are in one, or every stream
        has ended.
        """
        if not self._streams:
            self._begin()
        while (known := self._known()) is not None and known[0] < stop:
            stream = self._streams[known[1]]
            self._charge(stream.go_on())
            self._note_end(stream)
        return (stop if known is not None else max(start, min(stop, int(self._ends.sum())))) - start

    def arrange(self, rows: Int64) -> Int64:
        """Returns the rows ordered stream by stream."""
        return rows[np.argsort(self._places(rows)[0], kind="stable")]

    def lengths(self, rows: Int64) -> Int32:
        def length(window: Window[Place], row: int) -> int:
            first = window.layout.first_piece
            return int(window.layout.table[4, first[row] : first[row + 1]].sum())

        return self._each(rows, length).astype(np.int32)

    def epochs(self, rows: Int64) -> Int64:
        return self._each(rows, lambda window, row: window.state.epoch)

    def gather(self, rows: Int64, width: int | None = None) -> dict[str, Int32]:
        width = default_width(self, rows, self._rows.seq_length) if width is None else width
        columns = self._writer.gather(self, self._keys(rows), width)
        columns.setdefault(LOSS_MASK, (columns[SEGMENT_IDS] > 0).astype(np.int32))
        return columns

    def batch(self, rows: Int64, width: int) -> dict[str, Int32]:
        return self._writer.batch(self, self._keys(rows), width)

    # The members below implement write.Tokens, for rows that are numbered
    # stream * STREAM + row of the stream.

    unchecked = False  # the tokens were just read, so nothing is left to check

    def _keys(self, rows: Int64) -> Int64:
        streams, numbers = self._places(rows)
        return np.where(streams < 0, -1, streams * STREAM + numbers)

    def window_at(self, row: int) -> tuple[View, Tables]:
        if row < 0:
            return NOTHING
        made = self._streams[row // STREAM].made_at(row % STREAM)
        return made.view._replace(first_row=row - row % STREAM + made.view.first_row), made.tables

    def values_at(self, row: int) -> Mapping[str, UInt64]:
        return {} if row < 0 else self._streams[row // STREAM].made_at(row % STREAM).values

    @property
    def masked(self) -> bool:
        return any(made.masked for stream in self._streams.values() for made in stream.windows)

    def pinned(self, view: View, rows: Int64) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check(self, touched: Int64) -> None:
        raise AssertionError("nothing is unchecked")

    def missing(self, view: View, piece: int, width: int) -> Exception:
        return AssertionError(f"piece {piece} of a window is not in its tokens")

    def mark(self, row: int) -> StreamMark:
        given = order.given_by(self._ends, row)
        for number, stream in self._streams.items():
            stream.forget(given[number])
        states = {n: stream.state_at(given[n]) for n, stream in self._streams.items()}
        return self._mark(row, given, states)

    def finish(self, row: int, left_out: int) -> StreamMark:
        mark = self._mark(row, order.given_by(self._ends, row), {})
        return mark._replace(counts={**mark.counts, "rows_left_out": left_out})

    def _mark(self, row: int, given: Int64, states: Mapping[int, StreamState]) -> StreamMark:
        added = given - self._given_before
        counts = {
            "rows_given": int(added[list(self._streams)].sum()),
            "rows_before": self._rows_before,
            "padding_rows": row - self._begin_row - int(added.sum()),
        }
        totals = tuple(stream.totals for stream in self._streams.values())
        return StreamMark(self._rows, states, totals, counts)

    def check_some_batch(self) -> None:
        """Raises an error for an iteration without a batch: training would end without a step.

        Raises:
            PlanError: Every document was longer than a row and left out.
            SourceError: What was read did not fill a batch.
        """
        rows, totals = (
            self._rows,
            StreamTotals.total(
                len(self._rows.sources), (stream.totals for stream in self._streams.values())
            ),
        )
        if rows.spec.plan.pack is not None and totals.all_dropped:
            raise nothing_fits(totals.all_dropped, rows.spec.plan.pack) from None
        read = [
            f"{one.dataset!r}: "
            f"{', '.join(f'{count} {what}' for what, count in one.out.items()) or 'no row'}"
            for one in ledger_of(totals, rows.names, rows.spec).entries
            if (one.stage, one.unit) == ("stream", "rows")
        ]
        few = "; with drop_last=False a batch need not be full" if totals.table.any() else ""
        raise SourceError(
            at=rows.name,
            problem=f"the rows that were read do not fill a batch: {'; '.join(read)}",
            fix=f"Check the columns that are named, the filters and the files{few}.",
        ) from None

    def _begin(self) -> None:
        """Makes the streams of this process, at the states at which the iteration begins."""
        spec = self._rows.spec
        sources, seed = self._rows.sources, spec.plan.seed
        ahead = WAITED_BYTES // (len(sources) * max(1, len(self._own)))
        deals = [
            Deal(
                source,
                spec.num_streams,
                seed=seed,
                shuffle=spec.shuffle,
                ahead_bytes=ahead if source.waits else 0,
            )
            for source in sources
        ]
        for state in self._states:
            self._bad.update({i: place.bad for i, place in enumerate(state.drawn)})
        # Windows of a weight schedule depend on which streams have ended, which is only known if
        # windows are made in the order of their rows.
        ahead = self._windows_ahead and (spec.plan.schedule is None or spec.last_epoch is None)
        for number in self._own:
            state = self._states[number] if self._states else None
            feed = StreamFeed(number, spec, deals, self._ends)
            windows = self._window_pool if ahead else None
            stream = self._streams[number] = Stream(feed, self._pool, state, windows)
            self._note_end(stream)
        self._given_before = order.given_by(self._ends, self._begin_row)
        self._rows_before = sum(
            int(self._given_before[number]) - stream.state.first_row
            for number, stream in self._streams.items()
        )
        for stream in self._streams.values():
            stream.begin()

    def _known(self) -> tuple[int, int] | None:
        """Returns (rows of the run that are in windows, the stream of the next row).

        It is None if every stream has ended.
        """
        live = [
            (stream.state.first_row, number)
            for number, stream in self._streams.items()
            if not stream.ended
        ]
        return (order.rows_before(self._ends, *min(live)), min(live)[1]) if live else None

    def _note_end(self, stream: Stream) -> None:
        if stream.ended:
            self._ends[stream.number] = stream.state.first_row

    def _charge(self, made: Made) -> None:
        """Counts the bad rows of a window.

        For streams that other processes read, they are known up to the restored state.

        Raises:
            BudgetError: There are more than max_bad_rows of a dataset.
        """
        for i, (source, chunks) in enumerate(zip(self._rows.sources, made.bad, strict=True)):
            most = source.max_bad_rows
            for loaded in chunks:
                self._bad[i] += loaded.num_bad
                if most is not None and self._bad[i] > most:
                    which = most - self._bad[i] + loaded.num_bad
                    at, said = loaded.bad[min(which, len(loaded.bad) - 1)]
                    raise BudgetError(
                        at=at,
                        problem=f"bad row number {most + 1} of dataset {source.name!r} ({said}), "
                        f"and max_bad_rows is {most}",
                        fix="Correct the rows, or raise max_bad_rows.",
                    )

    def _places(self, rows: Int64) -> tuple[Int64, Int64]:
        """Returns (stream, row of the stream) for each row, (-1, -1) for padding."""
        real = rows >= 0
        if (self._ends == order.NEVER).all():
            turn, stream = np.divmod(rows, len(self._ends))
            return np.where(real, stream, -1), np.where(real, turn, -1)
        if not real.any():
            return rows, rows
        first = int(rows[real].min())
        streams, numbers = order.in_order_of_streams(self._ends, first, int(rows.max()) + 1)
        at = np.lexsort((streams, numbers))[np.where(real, rows - first, 0)]
        return np.where(real, streams[at], -1), np.where(real, numbers[at], -1)

    def _each(self, rows: Int64, ask: Callable[[Window[Place], int], int]) -> Int64:
        """Returns the result of `ask` for each row and its window, 0 for -1."""
        found = np.zeros(len(rows), np.int64)
        # a loop over the rows of one batch
        for i, (number, row) in enumerate(
            zip(*map(np.ndarray.tolist, self._places(rows)), strict=True)
        ):
            if number >= 0:
                window = self._streams[number].made_at(row).window
                found[i] = ask(window, row - window.first_row)
        return found


class StreamMark(NamedTuple):
    """The position after some rows: the states of this process's streams, and the counters.

    `counts` holds the counters of StreamTotals for all streams together.
    """

    rows: StreamRows
    states: Mapping[int, StreamState]
    totals: tuple[StreamTotals, ...]
    counts: Mapping[str, int]  # the counters of StreamTotals for all streams together

    def ledger(self) -> Ledger:
        totals = dataclasses.replace(
            StreamTotals.total(len(self.rows.sources), self.totals), **self.counts
        )
        return ledger_of(totals, self.rows.names, self.rows.spec)

    def hint(self) -> list[str]:
        """Returns the state of every stream; collective if several processes read their own."""
        known = {number: to_text(state) for number, state in self.states.items()}
        count, room = self.rows.spec.num_streams, 24 + 48 * len(self.rows.sources)
        if len(known) < count:
            table = b"".join(known.get(i, "").encode().ljust(room) for i in range(count))
            for other in gather_bytes(table):
                texts = [other[i : i + room].decode().strip() for i in range(0, len(other), room)]
                known = {i: text for i, text in enumerate(texts) if text} | known
        return [known[number] for number in range(count)]
