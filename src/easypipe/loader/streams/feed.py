"""Cursor and Deal: a stream's share of a dataset, by estimated sizes, read by chunks; its counts.

entry  a range of rows of one shard, or a whole file with rows that are only found by reading on;
       every pass has a new permutation of the entries
chunk  what is read and tokenized at a time: a range, or the c-th piece of such a file
deal   the assignment of a pass's entries, large ones first, each to the stream with the fewest
       bytes so far; of a whole file, chunk c goes to the c-th stream after that one
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from easypipe.cache.manifest import Counts
from easypipe.core.errors import SourceError, require
from easypipe.core.protocols import Shard
from easypipe.core.random import child, fold
from easypipe.core.values import Array, Bools, Int64, UInt8
from easypipe.loader.prefetch import ReadPool
from easypipe.plan.order import permute

# The most stored bytes of a chunk, unless a dataset has more than MAX_ENTRIES chunks.
CHUNK_BYTES = 1 << 20
# The least chunks of a dataset per stream, if it has enough rows, so that streams end at about the
# same time.
CHUNKS_A_STREAM = 16
MAX_ENTRIES = 1 << 20
LEAST_PIECE_BYTES = 256  # the least bytes of a piece of a compressed file
UNPACKED = 4  # the assumed number of plain bytes of a compressed byte
ROWS_OF_UNKNOWN_SIZE = 1 << 10  # rows of a chunk of unknown size
FIRST_AHEAD = 2  # chunks read ahead before the number of documents of a chunk is known
# After this many passes in a row without a document (each has a new deal), a stream assumes that
# all later passes have none.
EMPTY_PASSES = 64
# The documents of a dataset up to this size are kept, because it may be read many times; a larger
# one is read again in every pass.
KEPT_BYTES = 16 << 20
# The most entries of passes whose deal is kept; streams may be in different passes.
KEPT_ENTRIES = 1 << 16
# why a stream may get nothing of small data
FEWER_STREAMS = (
    "Use fewer streams, or leave streaming out: each stream reads whole pieces of a dataset (256 "
    "rows of a source of your own), and this one has too few."
)
FILES = "files to each stream"  # the ledger's unit for files with uncounted content
MOST_AHEAD = 32  # the most chunks of one stream and dataset that are read or being read ahead


@dataclass(frozen=True)
class Loaded:
    """The documents of a chunk: document i has the tokens `ids[offsets[i] : offsets[i + 1]]`.

    Args:
        ids: UInt16 or UInt32.
        offsets: Int64[n+1].
        has_eos: Bool[n], whether the document already ends with an EOS.
        mask: UInt8, one for each id; None if every token is a target.
        counts: The counts of rows and texts by outcome.
        values: The values of aligned columns for each of the ids: [ids] or [ids, width].
        ended: Whether the chunk is the last of its entry.
        num_bad: The number of rejects that count for a limit.
        bad: (place, reason) of the first of them.
    """

    ids: NDArray[np.unsignedinteger]
    offsets: Int64
    has_eos: Bools
    mask: UInt8 | None
    counts: Counts
    values: Mapping[str, Array] = field(default_factory=dict[str, Array])
    ended: bool = True
    num_bad: int = 0
    bad: tuple[tuple[str, str], ...] = ()

    @property
    def num_docs(self) -> int:
        return self.offsets.shape[0] - 1


class Piece(NamedTuple):
    """Documents `start` to `stop` of a chunk."""

    loaded: Loaded
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return int(self.loaded.offsets[self.stop] - self.loaded.offsets[self.start])


class StreamCounts(Counter[tuple[str, str]]):
    """The counters of one dataset, by subject and name, for what was read and what was drawn."""

    def add(self, subject: str, counts: Mapping[str, int]) -> None:
        self.update({(subject, what): count for what, count in counts.items()})

    def of(self, subject: str) -> Counter[str]:
        """Returns the counters of a subject, by name."""
        return Counter({what: n for (of, what), n in sorted(self.items()) if of == subject})

    def chunk(self, loaded: Loaded, skipped: int, share: Mapping[str, int]) -> None:
        """Counts a chunk that was read.

        Args:
            loaded: The chunk.
            skipped: Its documents before the place where reading began.
            share: Its part of the stream's share.
        """
        made = loaded.counts
        self.add("shares read", share)
        self["read", "rows"] += made.rows
        self["read", "documents"] += made.docs
        self["drawn", "again"] += skipped
        self.add("rejects", made.rejects)
        self.add("lengths", made.lengths)
        self["texts", "special"] += made.special
        self["texts", "escaped"] += made.escaped
        self["texts", "lost"] += made.lost

    @property
    def made(self) -> Counts:
        """The counts of all rows and texts that were read, by outcome."""
        return Counts(
            rows=self["read", "rows"],
            docs=self["read", "documents"],
            rejects=self.of("rejects"),
            lengths=self.of("lengths"),
            special=self["texts", "special"],
            escaped=self["texts", "escaped"],
            lost=self["texts", "lost"],
        )

    def unread(self) -> Counter[str]:
        """Returns, for every unit, how much was not read in the shares of the started passes."""
        left = self.of("shares")
        for subject in ("shares read", "shares before"):
            left.subtract(self.of(subject))
        return Counter(dict(sorted(left.items())))


class Forward(Protocol):
    """A dataset as documents that are read in order.

    `load` is called from several threads; `turns` admits those that may work, while the others wait
    for storage. `shards` are listed without reading rows. `max_bad_rows` applies to the whole
    dataset; None allows any number.
    """

    name: str
    waits: bool  # whether reading waits for remote storage

    @property
    def max_bad_rows(self) -> int | None: ...

    @property
    def shards(self) -> Sequence[Shard]: ...

    @property
    def unit(self) -> str:
        """The unit that positions in its shards count."""
        ...

    def load(self, shard: int, start: int, stop: int, turns: Semaphore) -> Loaded: ...


class Place(NamedTuple):
    """The position of a stream in a dataset.

    Attributes:
        epoch: The pass.
        entry: The position of the entry in the pass.
        chunk: The number of the chunk in the entry.
        taken: The number of documents taken from the chunk.
        bad: The number of bad rows of the first pass before this place, in the chunks from which
            documents were taken and those before them.
    """

    epoch: int = 0
    entry: int = 0
    chunk: int = 0
    taken: int = 0
    bad: int = 0


class Chunk(NamedTuple):
    """The positions of a shard that are read at a time.

    `of_file` says that it is a piece of a file whose end is found only by reading.
    """

    shard: int
    start: int
    stop: int
    of_file: bool = False


class Deal:
    """The entries of a dataset and the streams that read them.

    They depend only on the files' sizes, the number of streams and the seed. Each stream reads
    chunks of `ahead_bytes` in total ahead, at least one.

    Raises:
        SourceError: The dataset has no rows.
    """

    def __init__(
        self, source: Forward, num_streams: int, *, seed: int, shuffle: bool, ahead_bytes: int = 0
    ) -> None:
        self.source = source
        # `shuffled`: every pass has a new deal
        self.num_streams, self.shuffled = num_streams, shuffle
        self._key = fold(seed, "stream order", source.name) if shuffle else None
        shards = source.shards
        total = sum(shard.num_bytes for shard in shards)
        self.step = max(
            1, min(CHUNK_BYTES, total // (CHUNKS_A_STREAM * num_streams)), total // MAX_ENTRIES
        )
        self.ahead = min(MOST_AHEAD, max(1, ahead_bytes // self.step))
        self.piece = min(CHUNK_BYTES, max(LEAST_PIECE_BYTES, UNPACKED * self.step))
        entries = list(self._entries(shards))
        if not entries:
            raise SourceError(
                at=f"dataset {source.name!r}",
                problem=f"no row in {', '.join(shard.name for shard in shards[:3])}",
                fix="Check the files that data_files names.",
            )
        self.num_entries = len(entries)
        # (shard, start, stop) of each entry; a stop of -1 means the whole file
        self._entries_at = np.array(entries, np.int64).reshape(-1, 3)
        self._forward = self._entries_at[:, 2] < 0
        self._num_bytes = self._sizes(shards)
        self._passes: OrderedDict[int, _Pass] = OrderedDict()
        # A small dataset is kept in memory: with a large weight it is read thousands of times, a
        # few documents at a time.
        self._room = KEPT_BYTES if total * UNPACKED <= KEPT_BYTES else 0
        self._kept: dict[Chunk, Loaded] = {}
        self._lock = threading.Lock()

    def chunk(self, place: Place) -> Chunk:
        """Returns the chunk that is read at `place`."""
        entry = self._dealt(place.epoch).entries[place.entry]
        shard, start, stop = self._entries_at[entry].tolist()
        if stop >= 0:
            return Chunk(shard, start, stop)
        return Chunk(shard, place.chunk * self.piece, (place.chunk + 1) * self.piece, of_file=True)

    def first(self, stream: int, place: Place) -> Place | None:
        """Returns the first chunk of `stream` at or after `place`; None after the last.

        Documents were taken only from a place that is a chunk of this stream itself.
        """
        dealt = self._dealt(place.epoch)
        mine = dealt.of(stream)
        here = mine[np.searchsorted(mine, place.entry) :][:1].tolist()
        if not here:
            return None
        entry, chunk = here[0], place.chunk if here[0] == place.entry else 0
        if self._forward[dealt.entries[entry]]:
            chunk += (stream - int(dealt.owners[entry]) - chunk) % self.num_streams
        return Place(place.epoch, entry, chunk, place.taken)

    def share(self, stream: int, place: Place, *, before: bool = False) -> dict[str, int]:
        """Returns the size of the share of `stream` in the pass of `place`.

        With `before` it is only the part before `place`. Ranges are counted in records, or in bytes
        of lines; files with uncounted content are counted as files.
        """
        dealt = self._dealt(place.epoch)
        mine = dealt.of(stream)
        entries = dealt.entries[mine[: np.searchsorted(mine, place.entry)] if before else mine]
        ranges = entries[~self._forward[entries]]
        counted = int((self._entries_at[ranges, 2] - self._entries_at[ranges, 1]).sum())
        return +Counter({self.source.unit: counted, FILES: len(entries) - len(ranges)})

    def _dealt(self, epoch: int) -> _Pass:
        """Returns how the entries of a pass are dealt; it keeps the deals of the last passes."""
        with self._lock:
            found = self._passes.get(epoch)
            if found is None:
                entries = np.arange(self.num_entries)
                if self._key is not None:
                    entries = permute(entries, self.num_entries, child(self._key, epoch))
                owners = deal(
                    self._num_bytes[entries], self._forward[entries], self.num_streams, self.piece
                )
                found = self._passes[epoch] = _Pass(entries, owners, self._forward[entries])
                while len(self._passes) > max(2, KEPT_ENTRIES // max(1, self.num_entries)):
                    self._passes.popitem(last=False)
            else:
                self._passes.move_to_end(epoch)
            return found

    def _sizes(self, shards: Sequence[Shard]) -> Int64:
        """Returns the bytes of every entry, estimated from the sizes of files: Int64[entries].

        For a whole file it is the estimated size after decompression.
        """
        packed = np.array([shard.num_bytes for shard in shards], np.int64)
        rows = np.array([shard.num_rows or 0 for shard in shards], np.int64)
        shard, start, stop = self._entries_at.T
        counted = np.where(
            packed[shard] > 0,
            packed[shard] * (stop - start) // np.maximum(1, rows[shard]),
            stop - start,
        )
        return np.maximum(1, np.where(self._forward, UNPACKED * packed[shard], counted))

    def ask(self, place: Place, pool: ReadPool) -> Future[Loaded]:
        """Returns the chunk at `place` as a future, read by the pool, or finished if it is kept."""
        chunk = self.chunk(place)
        kept = self._kept.get(chunk)
        if kept is None:
            return pool.submit(partial(self._load, pool.turns), chunk)
        there: Future[Loaded] = Future()
        there.set_result(kept)
        return there

    def _load(self, turns: Semaphore, chunk: Chunk) -> Loaded:
        loaded = self.source.load(chunk.shard, chunk.start, chunk.stop, turns)
        num_bytes = (
            loaded.ids.nbytes
            + loaded.offsets.nbytes
            + loaded.has_eos.nbytes
            + (0 if loaded.mask is None else loaded.mask.nbytes)
            + sum(values.nbytes for values in loaded.values.values())
        )
        with self._lock:
            if num_bytes <= self._room and chunk not in self._kept:
                self._room -= num_bytes
                self._kept[chunk] = loaded
        return loaded

    def _entries(self, shards: Sequence[Shard]) -> Iterator[tuple[int, int, int]]:
        """Yields (shard, start, stop) of every entry; a stop of -1 means the whole file."""
        cuts = sum(len(shard.cuts) for shard in shards)
        for number, shard in enumerate(shards):
            if shard.num_rows is None:
                yield number, 0, -1
                continue
            rows = shard.num_rows
            step = (
                max(1, self.step * rows // shard.num_bytes)
                if shard.num_bytes
                else ROWS_OF_UNKNOWN_SIZE
            )
            step = max(1, min(step, rows))
            edges = range(0, rows, step)
            # ranges that can be read separately at low cost, and enough of them for all streams
            if cuts >= 4 * self.num_streams and len(shard.cuts) > 1:
                edges = [0]
                for cut in shard.cuts[1:]:
                    if cut - edges[-1] >= step:
                        edges.append(cut)
            for a, b in itertools.pairwise([*edges, rows]):
                if a < b:
                    yield number, a, b


class _Pass:
    """How the entries of a pass are dealt.

    Args:
        entries: Int64[n], the entry at every position.
        owners: Int64[n], as `deal` returns them.
        forward: Bool[n], the positions of whole files.
    """

    def __init__(self, entries: Int64, owners: Int64, forward: Bools) -> None:
        self.entries, self.owners, self._forward = entries, owners, forward
        self._of: dict[int, Int64] = {}

    def of(self, stream: int) -> Int64:
        """Returns the positions, ascending, of the entries that `stream` reads at least in part."""
        if stream not in self._of:
            self._of[stream] = np.flatnonzero(self._forward | (self.owners == stream))
        return self._of[stream]


def deal(num_bytes: Int64, forward: Bools, num_streams: int, piece: int) -> Int64:
    """Returns which stream has each entry, so that all have about equally many bytes: Int64[n].

    For a whole file it is the stream of its first chunk. Large entries are dealt first, each to the
    stream with the fewest bytes. Among entries of similar size (within a power of two) the order of
    the pass decides, so that a new pass combines different ones.

    Args:
        num_bytes: The bytes of the entries, in the order of the pass.
        forward: Whether each entry is a whole file.
        num_streams: The number of streams.
        piece: The bytes of a piece of a whole file.
    """
    classes = np.frexp(num_bytes.astype(np.float64))[1]
    owners = np.zeros(len(num_bytes), np.int64)
    loads = np.zeros(num_streams, np.int64)
    order = np.argsort(-classes, kind="stable")
    # files: chunks are dealt in rounds, and only the rest after full rounds makes a difference
    for i in order[forward[order]].tolist():
        starts = np.arange(0, int(num_bytes[i]) % (num_streams * piece), piece)
        added = np.minimum(piece, int(num_bytes[i]) % (num_streams * piece) - starts)
        whose = (np.arange(num_streams)[:, None] + np.arange(len(starts))) % num_streams
        after = loads[whose] + added
        owners[i] = first = int(np.lexsort((after.sum(axis=1), after.max(axis=1, initial=0)))[0])
        loads[whose[first]] += added
    waiting = [(load, stream) for stream, load in enumerate(loads.tolist())]
    heapq.heapify(waiting)
    ranges = order[~forward[order]]
    for i, size in zip(ranges.tolist(), num_bytes[ranges].tolist(), strict=True):
        load, stream = waiting[0]
        owners[i] = stream
        heapq.heapreplace(waiting, (load + size, stream))
    return owners


class Cursor:
    """The documents of one stream's share of one dataset, pass after pass.

    It is not thread-safe: a stream owns it. The pool reads chunks ahead, as many as the next window
    is expected to take (`read_ahead`); this never affects what is read. `bad` counts as `Place.bad`
    does.
    """

    def __init__(
        self,
        deal: Deal,
        stream: int,
        place: Place,
        pool: ReadPool,
        counts: StreamCounts,
        passes: int | None,
    ) -> None:
        """Begins at `place`.

        Args:
            deal: The entries of the dataset.
            stream: The number of the stream.
            place: Where to begin.
            pool: The threads that read the chunks.
            counts: The counters of the dataset.
            passes: After the last document a new pass begins, up to this many; None: endless; 0: a
                pass begins only when `begin` is called.
        """
        self._deal, self._stream, self._pool, self._passes = deal, stream, pool, passes
        self.counts, self.bad = counts, place.bad
        self.counts.add("shares", deal.share(stream, place))
        self.counts.add("shares before", deal.share(stream, place, before=True))
        self._bad_chunks: list[Loaded] = []  # chunks counted since the last call of `bad_chunks`
        self._held: deque[tuple[Place, Loaded]] = deque()
        self._start = place  # where the pass, or this cursor, began
        self._next = deal.first(stream, place)  # the chunk after those that are held
        # `_next` and the chunks after it that were requested
        self._ahead: deque[tuple[Place, Future[Loaded]]] = deque()
        self._pass_docs = self._empty_passes = 0
        self.waiting = 0  # documents that are held
        self._asked = 0  # the waiting documents that the current window uses
        self._needed, self._needed_tokens = 0, None
        self._chunk_docs = self._chunk_tokens = 0.0  # running means over chunks; 0: unknown

    @property
    def place(self) -> Place:
        """The place after the document that was taken last."""
        end = Place(self._start.epoch, self._deal.num_entries)
        place = self._held[0][0] if self._held else end if self._next is None else self._next
        return place._replace(bad=self.bad)

    def fill(self, count: int) -> int:
        """Reads until `count` documents wait, or the pass has no more; returns how many wait."""
        while self.waiting < count and self._read():
            pass
        self._asked = max(self._asked, min(count, self.waiting))
        return self.waiting

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Returns the waiting documents `start` to `stop`."""
        found, at = list[Piece](), 0
        for place, loaded in self._held:
            if at >= stop:
                break
            a, b = max(start, at), min(stop, at + loaded.num_docs - place.taken)
            if a < b:
                found.append(Piece(loaded, a - at + place.taken, b - at + place.taken))
            at += loaded.num_docs - place.taken
        return found

    def take(self, count: int) -> None:
        """Takes the first `count` waiting documents."""
        self.waiting, self._asked = self.waiting - count, 0
        while count:
            place, loaded = self._held[0]
            if not place.taken:
                self._enter(place, loaded)
            here = min(count, loaded.num_docs - place.taken)
            count -= here
            if place.taken + here < loaded.num_docs:
                self._held[0] = (place._replace(taken=place.taken + here), loaded)
            else:
                self._held.popleft()
                self._pass_empty()

    def bad_chunks(self) -> list[Loaded]:
        """Returns the chunks with bad rows that were counted since the last call."""
        found, self._bad_chunks = self._bad_chunks, []
        return found

    def read_ahead(self, count: int, tokens: int | None = None) -> None:
        """Sets how much the next window will probably take, and reads ahead.

        Args:
            count: The number of documents.
            tokens: The number of tokens, if fewer documents hold as many.
        """
        self._needed, self._needed_tokens = count, tokens
        self._read_ahead()

    def end_epoch(self) -> None:
        """Drops the waiting documents, and counts what was not read so far as left."""
        self.counts["drawn", "left"] += self.waiting
        for unit, count in self.counts.unread().items():
            self.counts["shares left", unit] = count
        self.waiting = self._asked = 0
        self._held.clear()
        self.close()

    def begin(self, epoch: int) -> None:
        """Begins pass `epoch` after the waiting documents."""
        self.close()
        self._start = Place(epoch)
        self._next = self._deal.first(self._stream, self._start)
        self.counts.add("shares", self._deal.share(self._stream, self._start))
        self._pass_docs = 0

    def close(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _read(self) -> bool:
        """Adds the next chunk; returns False if the pass has no more."""
        if self._next is None:
            if self._passes is not None and self._start.epoch + 1 >= self._passes:
                return False
            nothing = not (any(self._start[1:4]) or self._pass_docs)
            self._empty_passes = self._empty_passes + 1 if nothing else 0
            require(
                self._empty_passes < (EMPTY_PASSES if self._deal.shuffled else 1),
                "num_streams",
                f"dataset {self._deal.source.name!r} has no document in the share of "
                f"stream {self._stream} of "
                f"{self._deal.num_streams}, pass after pass",
                FEWER_STREAMS,
            )
            self.begin(self._start.epoch + 1)
            return True
        if not self._ahead:
            self._read_ahead()
        place, future = self._ahead.popleft()
        loaded = future.result()
        chunk = self._deal.chunk(place)
        share = (
            {FILES: int(loaded.ended)}
            if chunk.of_file
            else {self._deal.source.unit: chunk.stop - chunk.start}
        )
        self.counts.chunk(loaded, min(place.taken, loaded.num_docs), share)
        self._pass_docs += loaded.num_docs
        num_tokens = int(loaded.offsets[-1])
        self._chunk_docs = max(
            1.0, (self._chunk_docs or loaded.num_docs) * 0.75 + loaded.num_docs * 0.25
        )
        self._chunk_tokens = max(1.0, (self._chunk_tokens or num_tokens) * 0.75 + num_tokens * 0.25)
        if loaded.num_docs or loaded.num_bad:
            self._held.append((place, loaded))
            self.waiting += loaded.num_docs - place.taken
            self._pass_empty()
        if loaded.ended and chunk.of_file:
            self.close()  # chunks that were requested ahead are after the end of the file
        self._next = (
            self._ahead[0][0]
            if self._ahead
            else self._deal.first(self._stream, self._behind(place, loaded.ended))
        )
        self._read_ahead()
        return True

    def _pass_empty(self) -> None:
        """Drops chunks without documents at the front."""
        while self._held and not self._held[0][1].num_docs:
            self._enter(*self._held.popleft())

    def _enter(self, place: Place, loaded: Loaded) -> None:
        """Counts the bad rows of a chunk once in the run: later passes have the same rows."""
        if loaded.num_bad and not place.epoch:
            self.bad += loaded.num_bad
            self._bad_chunks.append(loaded)

    def _behind(self, place: Place, ended: bool) -> Place:
        return (
            Place(place.epoch, place.entry + 1)
            if ended
            else Place(place.epoch, place.entry, place.chunk + 1)
        )

    def _read_ahead(self) -> None:
        """Requests the next chunk, and as many after it as `read_ahead` expects to need.

        A file with an unknown end is assumed to continue.
        """
        wanted = FIRST_AHEAD
        if self._chunk_docs:
            needed = self._needed / self._chunk_docs
            if self._needed_tokens is not None:
                needed = min(needed, self._needed_tokens / self._chunk_tokens)
            wanted = math.ceil(needed - (self.waiting - self._asked) / self._chunk_docs)
        wanted = max(self._deal.ahead, min(MOST_AHEAD, wanted))
        while len(self._ahead) < wanted:
            if self._ahead:
                last = self._ahead[-1][0]
                place = self._deal.first(
                    self._stream,
                    self._behind(last, not self._deal.chunk(last).of_file),
                )
            else:
                place = self._next
            if place is None:
                return
            self._ahead.append((place, self._deal.ask(place, self._pool)))
