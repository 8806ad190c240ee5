"""One canonical stream: windows of documents that are drawn, shuffled and packed in turn, each from the state that the last one left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from easypipe.core.config import digest, to_dict
from easypipe.core.errors import ConfigError
from easypipe.core.random import child, fold
from easypipe.loader.gather import Tables
from easypipe.loader.streaming_pool import ReadPool
from easypipe.loader.streaming_read import Cursor, Deal, Loaded, Place
from easypipe.loader.streaming_state import StreamState
from easypipe.plan import mix, tally
from easypipe.plan.order import permute
from easypipe.plan.pack import OVERSIZE, Layout, PackSpec, one_row_each, pack_window

STREAM_VERSION = 1  # raise it with every change that moves a document to another row

WINDOW_DOCS = 4096  # of a stream, where shuffle_buffer_size says nothing else: so many, ...
WINDOW_TOKENS = 1 << 20  # ... or so many tokens, or WINDOW_ROWS rows' worth where that is more, whichever comes first
WINDOW_ROWS = 128
BLOCK_DOCS = 256  # drawn at a time; a window ends between two blocks

_NEVER = np.int64(1 << 62)


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """The choices that, with the datasets, decide what stands in every row. weights, stop, num_epochs, pack: as in plan.spec.PlanSpec.

    num_streams: canonical streams; each gives `batch_size // num_streams` rows of every batch. shuffle: ranges per pass, and documents
    within a window. window_docs: of a window; None takes WINDOW_DOCS, or fewer long ones. eos: id that ends documents, None adds none.
    """

    seed: int
    num_streams: int
    weights: tuple[int, ...]
    stop: mix.Stop
    num_epochs: int | None = 1
    shuffle: bool = True
    shuffle_window: bool = True
    window_docs: int | None = None
    pack: PackSpec | None = None
    eos: int | None = None

    @property
    def endless_parts(self) -> bool:
        """Whether each dataset begins anew on its own, so that the mixture has no epochs."""
        return self.stop == "restart" and len(self.weights) > 1

    @property
    def window_tokens(self) -> int:
        return max(WINDOW_TOKENS, WINDOW_ROWS * (self.pack.seq_length if self.pack is not None else 0))

    def fingerprint(self) -> str:
        return digest("streams", STREAM_VERSION, {k: v for k, v in to_dict(self).items() if k != "num_epochs"})


class Window(NamedTuple):
    """Rows `first_row` to `first_row + layout.num_rows` of a stream. `kept` owns the memory that `tables` points to."""

    first_row: int
    layout: Layout
    dataset: NDArray[np.int32]  # Int32[draws]; all 0: the window's documents are one table
    doc: NDArray[np.int64]  # Int64[draws], numbers within the table
    tables: Tables
    kept: tuple[NDArray, ...]
    before: StreamState
    after: StreamState

    @property
    def stop(self) -> int:
        return self.first_row + self.layout.num_rows

    @property
    def view(self) -> tuple:
        return self.first_row, self.layout.first_piece, self.layout.table, self.dataset, self.doc


@dataclass
class Books:
    """Counters of all streams of a process, by dataset number; only its one sequential thread writes them."""

    rows: Counter[int] = field(default_factory=Counter)
    docs: Counter[int] = field(default_factory=Counter)
    rejects: dict[int, Counter[str]] = field(default_factory=dict)
    added: Counter[int] = field(default_factory=Counter)  # EOS
    left: Counter[int] = field(default_factory=Counter)  # read, and not drawn before their epoch ended
    resumed: Counter[int] = field(default_factory=Counter)  # read again, and placed before the state that was restored
    waiting: Counter[int] = field(default_factory=Counter)
    table: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, tally.COUNTERS), np.int64))
    packed_rows: int = 0
    padding_rows: int = 0

    def copy(self) -> Books:
        """As they stand now."""
        return Books(
            rows=self.rows.copy(),
            docs=self.docs.copy(),
            rejects={i: counts.copy() for i, counts in self.rejects.items()},
            added=self.added.copy(),
            left=self.left.copy(),
            resumed=self.resumed.copy(),
            waiting=self.waiting.copy(),
            table=self.table.copy(),
            packed_rows=self.packed_rows,
            padding_rows=self.padding_rows,
        )

    def chunk(self, dataset: int, loaded: Loaded, skipped: int) -> None:
        self.resumed[dataset] += skipped
        self.rows[dataset] += loaded.rows
        self.docs[dataset] += loaded.num_docs
        self.rejects.setdefault(dataset, Counter()).update(loaded.rejects)


class Stream:
    """The rows of one canonical stream, in order. `windows` are those that were made and not yet forgotten.

    Law: from equal states come equal windows, whatever other streams there are. Not thread safe.
    """

    def __init__(
        self, number: int, spec: StreamSpec, deals: Sequence[Deal], pool: ReadPool, books: Books, state: StreamState | None = None
    ) -> None:
        self.number, self.spec, self.books = number, spec, books
        self._stop: mix.Stop = "all_exhausted" if len(deals) == 1 else spec.stop
        self._weights = np.array(spec.weights, np.int64)
        self._keys = [fold(spec.seed, "stream", number, deal.source.name) for deal in deals]
        self._row_key = fold(spec.seed, "stream rows", number)
        self.state = state or _start(0, 0, len(deals), self._stop)
        self.ended = spec.num_epochs is not None and self.state.epoch >= spec.num_epochs
        endless = spec.endless_parts
        self._cursors = [
            Cursor(deal, number, place, pool, lambda loaded, skipped, i=i: books.chunk(i, loaded, skipped), endless=endless)
            for i, (deal, place) in enumerate(zip(deals, self.state.places, strict=True))
        ]
        if not self.ended:
            for cursor, weight in zip(self._cursors, spec.weights, strict=True):
                cursor.wish((spec.window_docs or WINDOW_DOCS) * weight // sum(spec.weights))
        self._names = [deal.source.name for deal in deals]
        self._end_row = -1  # where the last epoch ended that was seen to
        self.windows: list[Window] = []

    def reach(self, row: int) -> bool:
        """Makes windows until `row` stands in one. False: the stream ends before it."""
        while not self.ended and self.state.first_row <= row:
            window = self._window()
            if window.layout.num_rows:
                self.windows.append(window)
            self.state = window.after
            self.ended = self.spec.num_epochs is not None and self.state.epoch >= self.spec.num_epochs
        return row < self.state.first_row

    def state_at(self, row: int) -> StreamState:
        """The state from which `row` is found again; it must not be forgotten."""
        for window in self.windows:
            if row < window.stop:
                return window.before
        return self.state

    def forget(self, row: int) -> None:
        """Drops windows that hold nothing at `row` or behind it."""
        while self.windows and self.windows[0].stop <= row:
            self.windows.pop(0)

    def waiting(self, dataset: int) -> int:
        return self._cursors[dataset].waiting

    def close(self) -> None:
        for cursor in self._cursors:
            cursor.close()

    def _window(self) -> Window:
        before, spec = self.state, self.spec
        k = len(self._cursors)
        deficits, active = np.array(before.deficits, np.int64), np.array(before.active, np.bool_)
        taken: list[list[tuple[Loaded, int, int]]] = [[] for _ in range(k)]
        drawn: list[NDArray[np.int32]] = []
        made = tokens = 0
        ended = False
        limit = spec.window_docs or WINDOW_DOCS
        while not ended and made < limit and (spec.window_docs is not None or tokens < spec.window_tokens):
            draws = self._draw(min(BLOCK_DOCS, limit - made), deficits, active)
            for i, count in enumerate(draws.counts.tolist()):
                if count:
                    pieces = self._cursors[i].take(count)
                    taken[i] += pieces
                    tokens += sum(int(loaded.offsets[b] - loaded.offsets[a]) for loaded, a, b in pieces)
            drawn.append(draws.dataset)
            made += draws.dataset.shape[0]
            deficits, active, ended = draws.deficits, draws.active, draws.ended
        dataset = np.concatenate(drawn)
        for cursor, part in zip(self._cursors, taken, strict=True):
            cursor.wish(0 if ended else sum(b - a for _, a, b in part))
        lengths, doc, tables, kept = self._lay(dataset, taken, before)
        layout = one_row_each(lengths) if spec.pack is None else pack_window(lengths, spec.pack, child(self._row_key, before.first_row))
        self._enter(dataset, lengths, layout)
        return Window(
            first_row=before.first_row,
            layout=layout,
            dataset=np.zeros_like(dataset),
            doc=doc,
            tables=tables,
            kept=kept,
            before=before,
            after=self._after(before, layout.num_rows, deficits, active, ended),
        )

    def _draw(self, count: int, deficits: NDArray[np.int64], active: NDArray[np.bool_]) -> mix.Draws:
        """The next draws, with every document that they need waiting.

        How many documents a dataset still has is not known; that it has more than these draws take is: one beyond them is looked for.
        """
        remaining = np.full(len(self._cursors), _NEVER)
        while True:
            draws = mix.draw(count, self._weights, remaining, deficits, active, self._stop)
            short = False
            for i, wanted in enumerate(draws.counts.tolist()):
                if remaining[i] == _NEVER:
                    waiting = self._cursors[i].fill(wanted + 1)
                    if waiting <= wanted:
                        remaining[i] = waiting
                        short = True
                        if not waiting and self._stop == "all_exhausted":  # its share is empty: it leaves before it came
                            active = active & (np.arange(len(active)) != i)
                            deficits = np.zeros_like(deficits)
            if not short:
                return draws

    def _lay(
        self, dataset: NDArray[np.int32], taken: list[list[tuple[Loaded, int, int]]], before: StreamState
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], Tables, tuple[NDArray, ...]]:
        """All documents of the window side by side, and which of them each draw is."""
        doc = np.empty(dataset.shape[0], np.int64)
        pieces = [piece for part in taken for piece in part]
        offsets = np.zeros(len(dataset) + 1, np.int64)
        lacks = np.zeros(len(dataset), np.bool_)
        masked = any(loaded.mask is not None for loaded, _, _ in pieces)
        ids, masks, at = [], [], 0
        for loaded, a, b in pieces:
            first, last = int(loaded.offsets[a]), int(loaded.offsets[b])
            offsets[at + 1 : at + 1 + b - a] = loaded.offsets[a + 1 : b + 1] - first + offsets[at]
            lacks[at : at + b - a] = ~loaded.has_eos[a:b]
            ids.append(loaded.ids[first:last])
            if masked:
                masks.append(np.ones(last - first, np.uint8) if loaded.mask is None else loaded.mask[first:last])
            at += b - a
        base = 0
        for i, part in enumerate(taken):
            here = np.flatnonzero(dataset == i)
            order = np.arange(len(here), dtype=np.int64)
            if self.spec.shuffle_window and len(here) > 1:
                order = permute(order, len(here), child(self._keys[i], before.first_row + before.epoch))
            doc[here] = base + order
            base += sum(b - a for _, a, b in part)
        flat = np.concatenate(ids) if ids else np.zeros(1, np.uint16)
        mask = np.concatenate(masks) if masks else np.zeros(0, np.uint8)
        extra = lacks.astype(np.int64) if self.spec.eos is not None else 0
        lengths = (np.diff(offsets) + extra)[doc].astype(np.int32)
        if self.spec.eos is not None:
            for i in range(len(taken)):
                self.books.added[i] += int(lacks[doc[dataset == i]].sum())
        tables = Tables(
            first_part=np.array([0, 1], np.int64),
            first_doc=np.array([0, len(dataset)], np.int64),
            ids=np.array([flat.ctypes.data], np.uint64),
            offsets=np.array([offsets.ctypes.data], np.uint64),
            mask=np.array([mask.ctypes.data if masks else 0], np.uint64),
            id_bytes=np.array([flat.itemsize], np.int64),
        )
        return lengths, doc, tables, (flat, offsets, mask)

    def _after(
        self, before: StreamState, num_rows: int, deficits: NDArray[np.int64], active: NDArray[np.bool_], ended: bool
    ) -> StreamState:
        first_row = before.first_row + num_rows
        if not ended:
            return StreamState(
                first_row, before.epoch, tuple(deficits.tolist()), tuple(active.tolist()), tuple(c.place for c in self._cursors)
            )
        if first_row == self._end_row and self.spec.num_epochs is None:
            raise ConfigError(
                at="num_streams",
                problem=f"a whole pass of stream {self.number} of {self.spec.num_streams} over its share of "
                f"{', '.join(map(repr, self._names))} gave no row, and another would give none",
                fix="Use fewer streams, or leave streaming out: the data is small.",
            )
        self._end_row = first_row
        epoch = before.epoch + 1
        for i, cursor in enumerate(self._cursors):
            self.books.left[i] += cursor.drop()
            cursor.close()
            if self.spec.num_epochs is None or epoch < self.spec.num_epochs:
                cursor.begin(epoch)
        return _start(first_row, epoch, len(self._cursors), self._stop)

    def _enter(self, dataset: NDArray[np.int32], lengths: NDArray[np.int32], layout: Layout) -> None:
        books, pack = self.books, self.spec.pack
        if not books.table.shape[0]:
            books.table = np.zeros((len(self._cursors), tally.COUNTERS), np.int64)
        rule = tally.WHOLE if pack is None else (tally.SPLIT, tally.TRUNCATE, tally.DROP, tally.SPLIT)[OVERSIZE.index(pack.oversize)]
        seq_length = 0 if pack is None else pack.seq_length
        num_pieces = layout.table.shape[1]
        tally.count(dataset, lengths, layout.table, num_pieces, layout.num_rows, seq_length, rule, books.table)
        books.packed_rows += layout.num_rows


def _start(first_row: int, epoch: int, num_datasets: int, stop: mix.Stop) -> StreamState:
    deficits, active = mix.start([1] * num_datasets, stop)
    return StreamState(first_row, epoch, tuple(deficits.tolist()), tuple(active.tolist()), (Place(epoch),) * num_datasets)
