"""TokenCache: the documents of a token cache by number, their lengths, EOS flags and columns.

The length of every document is known before a token is touched.

doc     a document, numbered over the whole cache: the rows that were kept, in the order of the
        source
part    the file of one range of rows (cache/manifest.py)
shard   a shard of the source that the tokens came from; rows keep its physical numbers
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from easypipe.cache.address import Buffers, byte_values, count_zeros, list_lengths
from easypipe.cache.blocks import (
    AHEAD,
    INDEX,
    ROOM,
    BlockChecks,
    note_documents,
    note_values,
    noted,
)
from easypipe.cache.folder import CacheFolder, RemoteFolder
from easypipe.cache.manifest import Manifest, contradictions, read_manifest
from easypipe.cache.mapping import AGAIN, MappedFiles, require_sound
from easypipe.cache.remote import StagedFiles
from easypipe.core import locks
from easypipe.core.aligned import AlignedColumn, numbers_of
from easypipe.core.errors import CacheError, SourceError, place
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import Shard, Source
from easypipe.core.schema import (
    HAS_EOS,
    INPUT_IDS,
    LOSS_MASK,
    ROW_NUMBER,
    offsets_of,
    token_dtype,
    token_list,
)
from easypipe.core.values import Array, Bools, Int32, Int64, Integers, UInt64

_NONE = np.empty(0, np.int64)


class TokenFiles(Protocol):
    """The token files of a cache as memory at fixed addresses.

    Law: while a document of file i is held, `addresses[i]` holds the bytes of that file. While only
    its index is held, it holds the index. The index is everything except tokens and masks: lengths,
    EOS marks, row numbers and Arrow's metadata.
    """

    addresses: UInt64

    @property
    def stays(self) -> bool:
        """Whether all files are in memory for the lifetime of this object, or of a view of it."""
        ...

    @property
    def most(self) -> int:
        """The most files whose index should be held at once."""
        ...

    def batch(self, i: int) -> pa.RecordBatch:
        """Returns the documents of a file whose index is held, without a copy.

        Raises:
            CacheError: It is not a token file.
        """
        ...

    def hold(self, files: Integers, docs: Int64 | None = None) -> AbstractContextManager[None]:
        """Holds documents, or the index of files, for the length of the block.

        Args:
            files: Int[n], numbers of files.
            docs: Int64[n], the document of each file that is held; None holds only the index.

        Raises:
            StorageError: A file cannot be fetched.
            CacheError: A file differs from what was committed.
        """
        ...


class TokenCache(Source):
    """A token cache as documents by number, and as a source of rows.

    The rows keep the row numbers of the source from which they were made.

    Law: `read(shard, a, b)` returns what tokenizing rows a to b of that shard of the source
    returns. Only a few words per part are in anonymous memory. It is thread-safe.

    Raises:
        CacheError: At opening, a file is missing, cut short or foreign. Later, a block is damaged;
            this is found when the block is first touched, before a token of it is returned.
    """

    def __init__(
        self, path: str | Path, *, dataset: str | None = None, folder: CacheFolder | None = None
    ) -> None:
        """Opens a cache.

        Args:
            path: The manifest.
            dataset: The name to report under; None takes the name under which it was prepared.
            folder: The folder of the manifest, needed if it is not on this machine; kept for the
                lifetime of this object.
        """
        self.folder = folder or CacheFolder(Path(path).parent.parent)
        self.path: Path | str = str(path) if self.folder.remote else Path(path)
        # The lock is held for the lifetime of this object, so that no process clears what it maps.
        mapped = isinstance(self.path, Path) and self.path.exists()
        self._mark = locks.mark_reader(self.folder.local, Path(path).stem) if mapped else None
        self.manifest: Manifest = read_manifest(self.path, self.folder.options)
        for what in contradictions(self.manifest):
            fix = "Delete it and prepare again."
            raise CacheError(at=str(self.path), problem=f"damaged: {what}", fix=fix)
        self.dataset = dataset or self.manifest.dataset
        self._parts = [part for part in self.manifest.parts if part.docs]
        tokens = self.folder.at("tokens")  # pathlib takes a tenth of the time of opening
        self._names = [f"{tokens}/{part.file}" for part in self._parts]
        self._files: TokenFiles
        # A bucket has none: its files are checked when they are fetched.
        self._blocks = BlockChecks((), ())
        if isinstance(self.folder, RemoteFolder):
            staging, options, reading = (
                self.folder.staging,
                self.folder.options,
                self.folder.reading,
            )
            self._files = StagedFiles(staging, self._parts, self._names, options, reading)
        else:
            self._files = MappedFiles(self._parts, self._names)
            self._blocks = BlockChecks(self._parts, self._names)
        counts = [part.docs for part in self._parts]
        self._first_doc = offsets_of(counts)
        # by aligned column, the address at which the values of each part begin: UInt64[P]
        self._values = {one.name: np.zeros(len(counts), np.uint64) for one in self.aligned}
        self._buffers = self._look_into_files()

    @property
    def fingerprint(self) -> str:
        """A digest of the content.

        The same text under the same tokenizer has the same fingerprint, no matter where and when it
        was prepared.
        """
        return self.manifest.fingerprint

    @property
    def num_docs(self) -> int:
        return int(self._first_doc[-1])

    @property
    def total_tokens(self) -> int:
        return self.manifest.counts.tokens

    @property
    def vocab_size(self) -> int:
        return self.manifest.tokenizer.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        return self.manifest.tokenizer.eos_token_id

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.manifest.tokenizer.fingerprint

    @property
    def ledger(self) -> Ledger:
        """The account of rows and tokens of the preparation."""
        return self.manifest.counts.ledger(
            self.dataset,
            {f"tokenize.{self.dataset}.{k}": v for k, v in self.manifest.facts.items()},
        )

    @property
    def quarantine(self) -> Path | str | None:
        """The JSONL file of rows that were set aside, or its URL; None if there is none."""
        name = self.manifest.quarantine
        return self.folder.at("manifests", name) if name else None

    @cached_property
    def schema(self) -> pa.Schema:
        manifest = self.manifest
        return cache_schema(self.vocab_size, loss_mask=manifest.loss_mask, aligned=manifest.aligned)

    @property
    def aligned(self) -> tuple[AlignedColumn, ...]:
        """The columns whose values travel with the tokens, in addition to the loss mask."""
        return self.manifest.aligned

    @property
    def pairs(self) -> bool:
        """Whether every document is a pair of answers, as in `Manifest.pairs`."""
        return self.manifest.pairs

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of the source; their cuts are the rows where parts begin."""
        cuts: list[list[int]] = [[] for _ in self.manifest.shard_names]
        num_bytes = [0] * len(cuts)
        for part in self.manifest.parts:
            cuts[part.shard].append(part.start)
            num_bytes[part.shard] += part.num_bytes
        return tuple(
            Shard(name=name, num_rows=rows, cuts=tuple(cuts[i]) or (0,), num_bytes=num_bytes[i])
            for i, (name, rows) in enumerate(
                zip(self.manifest.shard_names, self.manifest.shard_rows, strict=True)
            )
        )

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        """Returns the rows `start` to `stop` of a source shard that were kept.

        Nothing is copied if they are all in one part that stays mapped.

        Raises:
            SourceError: The shard has no such rows.
        """
        info = self.shards[shard]
        if not 0 <= start <= stop <= (info.num_rows or 0):
            raise SourceError(
                at=place(info.name), problem=f"rows {start}:{stop} of {info.num_rows} do not exist"
            )
        pieces: list[pa.RecordBatch] = []
        first = bisect.bisect_left(self._parts, shard, key=lambda part: part.shard)
        last = bisect.bisect_right(self._parts, shard, key=lambda part: part.shard)
        for i in range(first, last):
            part = self._parts[i]
            if part.start < stop and start < part.stop:
                with self._index(np.array([i])):
                    rows = self._files.batch(i).column(ROW_NUMBER).to_numpy()
                    a, b = map(int, np.searchsorted(rows, [start, stop]))
                if a < b:
                    pieces.append(self._rows(i, a, b))
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            nothing = [pa.array([], field.type) for field in self.schema]
            return pa.RecordBatch.from_arrays(nothing, schema=self.schema)
        columns = [
            pa.concat_arrays([one.column(i) for one in pieces]) for i in range(len(self.schema))
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def lengths(self, docs: Int64) -> Int32:
        """Returns the number of stored tokens of each of `docs` (Int64[n]): Int32[n].

        Raises:
            IndexError: A document does not exist.
        """
        return self._of_each(docs, list_lengths, self._buffers.offsets_address, np.int32)

    def has_eos(self, docs: Int64) -> Bools:
        """Returns for each of `docs` (Int64[n]) whether packing adds no EOS after it: Bool[n]."""
        return self._of_each(docs, byte_values, self._buffers.eos_address, np.bool_)

    def count_without_eos(self) -> int:
        """Returns how many documents get an EOS after them in packing."""
        found = 0
        for first in range(0, len(self._parts), self._files.most):
            stop = min(first + self._files.most, len(self._parts))
            with self._index(np.arange(first, stop)):
                marks = self._buffers.eos_address[first:stop]
                found += int(count_zeros(self._first_doc[first : stop + 1], marks))
        return found

    def tokens(self, doc: int) -> NDArray[np.unsignedinteger]:
        """Returns the stored ids of one document, as a view if the map stays."""
        part, local = self._find(doc)
        return self._rows(part, local, local + 1).column(INPUT_IDS).flatten().to_numpy()

    def where(self, doc: int) -> tuple[str, int]:
        """Returns the file and the physical row that a document came from."""
        part, local = self._find(doc)
        with self._index(np.array([part])):
            row = self._files.batch(part).column(ROW_NUMBER)[local].as_py()
        return self.manifest.shard_names[self._parts[part].shard], row

    def buffers(self) -> Buffers:
        """Returns addresses for kernels, valid for the lifetime of this object.

        If `comes_and_goes`, an address is valid only while `pin` holds its document.
        """
        return self._buffers

    def values(self, name: str) -> UInt64:
        """Returns where the values of an aligned column begin in each part, for kernels.

        Returns:
            UInt64[P]; zeros if the cache has no such column.
        """
        found = self._values.get(name)
        return np.zeros(len(self._parts), np.uint64) if found is None else found

    @property
    def comes_and_goes(self) -> bool:
        """Whether kernels find documents only while they are pinned.

        That is so in a bucket, and if there are more files than may be mapped.
        """
        return not self._files.stays

    @contextlib.contextmanager
    def pin(self, docs: Int64) -> Generator[None, None, None]:
        """Holds documents for the duration of the block; the only way to read them by address.

        They are fetched, mapped, and checked when first touched, and are at the addresses of
        `buffers`.

        Args:
            docs: Int64[n], the numbers of the documents.

        Raises:
            StorageError: They cannot be fetched.
            CacheError: A file differs from what was committed.
        """
        if self._files.stays:
            self._check_documents(docs)
            yield
            return
        number = self._part_numbers(docs)
        with self._files.hold(number, docs - self._first_doc[number]):
            self._check_documents(docs)
            yield

    def _check_documents(self, docs: Int64) -> None:
        """Checks `docs` (Int64[n]), which are in memory; raises CacheError if one is damaged."""
        if not self.pending:
            return
        todo = np.empty((2, ROOM), np.int64)
        while count := note_documents(docs, self._buffers, todo):
            for part, blocks in noted(todo[:, :count]).items():
                self.check(part, blocks)
        for column in self.aligned:
            where, size = self._values[column.name], column.num_bytes
            while count := note_values(docs, self._buffers, where, size, todo):
                for part, blocks in noted(todo[:, :count]).items():
                    self.check(part, blocks)

    @property
    def pending(self) -> bool:
        """Whether some blocks have not been compared with their checksums yet.

        If so, kernels have to test the flags, and `check` the blocks that are not flagged.
        """
        return self._blocks.pending

    def check(self, part: int, blocks: Set[int]) -> None:
        """Checks blocks of a part.

        Args:
            part: The number of the part.
            blocks: Numbers of blocks as `blocks.noted` returns them, INDEX among them.

        Raises:
            CacheError: A block is damaged.
        """
        if INDEX in blocks:
            self._check_index([part])
        address = int(self._buffers.file_address[part])
        self._blocks.check(part, sorted(blocks - {INDEX}), address, AHEAD)

    def verify(self) -> None:
        """Reads every byte and compares each file's checksum.

        Raises:
            CacheError: The checksum of a file is not the one that was committed; it names the
                first.
        """
        for part, name in zip(self._parts, self._names, strict=True):
            found = xxh3_128_hexdigest(self.folder.content(part.file))
            if found != part.checksum:
                raise CacheError(
                    at=name,
                    problem=f"damaged: checksum {found}, committed as {part.checksum}",
                    fix="Delete the file and prepare the dataset again; only this range is "
                    "tokenized again.",
                )

    def _look_into_files(self) -> Buffers:
        """Returns the addresses in all files.

        Raises:
            CacheError: The content of a file differs from the manifest.
        """
        where = np.zeros((4, len(self._parts)), np.uint64)
        for i, part in enumerate(self._parts):
            with self._files.hold(np.array([i])):
                batch = self._files.batch(i)
                if batch.num_rows != part.docs or not batch.schema.equals(self.schema):
                    raise CacheError(
                        at=self._names[i],
                        problem=f"holds {batch.num_rows} rows of {batch.schema.names}, not "
                        f"{part.docs}",
                        fix=AGAIN,
                    )
                if not part.blocks:  # written by an earlier version, so nothing is checked later
                    self._require_sound(i)
                where[:, i] = _addresses(batch)
                for name, addresses in self._values.items():
                    addresses[i] = _address(numbers_of(batch.column(name)).buffers()[1])
        checked = np.zeros(len(self._parts), np.uint64)
        checked[: len(self._blocks.addresses)] = self._blocks.addresses
        id_bytes = token_dtype(self.vocab_size).itemsize
        ids, offsets, mask, eos = where
        files = self._files.addresses
        return Buffers(self._first_doc, ids, offsets, mask, eos, files, checked, id_bytes)

    @contextlib.contextmanager
    def _index(self, parts: Int64) -> Generator[None, None, None]:
        """Holds the checked index of `parts` (Int64[n]) for the length of the block."""
        with self._files.hold(parts):
            self._check_index(np.unique(parts).tolist() if self._blocks.indexes_left else ())
            yield

    def _check_index(self, parts: Iterable[int]) -> None:
        b = self._buffers
        for i in parts:
            runs = [(int(b.ids_address[i]), b.id_bytes), (int(b.mask_address[i]), 1)]
            runs += [(int(self._values[c.name][i]), c.num_bytes) for c in self.aligned]
            sound = functools.partial(self._require_sound, i)
            self._blocks.check_index(i, int(b.file_address[i]), runs, sound)

    def _require_sound(self, i: int) -> None:
        require_sound(self._files.batch(i), self._parts[i], self._names[i])

    def _of_each(
        self,
        docs: Int64,
        kernel: Callable[..., None],
        address: UInt64,
        kind: type,
    ) -> Array:
        """Returns the output of `kernel(docs, first_doc, address, out)` for all of `docs`.

        It takes some documents at a time if not all files may be mapped at once.

        Args:
            docs: Int64[n], numbers of documents.
            kernel: A kernel of cache/address.py.
            address: UInt64[P], the addresses that it reads.
            kind: The dtype of the result.

        Raises:
            IndexError: A document does not exist.
        """
        docs = np.ascontiguousarray(docs, dtype=np.int64)
        if docs.size and (docs.min() < 0 or docs.max() >= self.num_docs):
            raise IndexError(f"documents {docs.min()} to {docs.max()} of {self.num_docs}")
        out = np.empty(docs.size, kind)
        if not docs.size:
            return out
        if len(self._parts) <= self._files.most:
            known = self._files.stays and not self._blocks.indexes_left
            number = _NONE if known else self._part_numbers(docs)
            with self._index(number):
                kernel(docs, self._first_doc, address, out)
            return out
        number = self._part_numbers(docs)
        order = np.argsort(number, kind="stable")
        distinct = np.cumsum(np.diff(number[order], prepend=number[order[0]]) > 0)
        turns = np.flatnonzero(np.diff(distinct // self._files.most)) + 1
        for some in np.split(order, turns):
            with self._index(number[some]):
                found = np.empty(some.size, kind)
                kernel(docs[some], self._first_doc, address, found)
                out[some] = found
        return out

    def _rows(self, part: int, first: int, last: int) -> pa.RecordBatch:
        """Returns documents `first` to `last` of a part, as a copy if the map does not stay."""
        docs = np.arange(first, last) + self._first_doc[part]
        if self._files.stays:
            self._check_documents(docs)
            return self._files.batch(part).slice(first, last - first)
        with self.pin(docs):
            found = self._files.batch(part).slice(first, last - first)
            return pa.ipc.read_record_batch(found.serialize(), found.schema)

    def _find(self, doc: int) -> tuple[int, int]:
        """Returns the part of a document, and the document's number within it."""
        if not 0 <= doc < self.num_docs:
            raise IndexError(f"document {doc} of {self.num_docs}")
        part = bisect.bisect_right(self._first_doc, doc) - 1
        return part, doc - int(self._first_doc[part])

    def _part_numbers(self, docs: Int64) -> Int64:
        return np.searchsorted(self._first_doc, docs, side="right") - 1


@contextlib.contextmanager
def pin(
    caches: Sequence[TokenCache], dataset: Integers, docs: Int64
) -> Generator[None, None, None]:
    """Holds documents of several caches for the duration of the block, as `TokenCache.pin` does.

    Documents that a cache does not have are left for the reader to report.

    Args:
        caches: The caches.
        dataset: Int[n], the index of each document's cache.
        docs: Int64[n], the documents.
    """
    with contextlib.ExitStack() as stack:
        for i, cache in enumerate(caches):
            if cache.comes_and_goes or cache.pending:
                asked = np.unique(docs[dataset == i])
                stack.enter_context(cache.pin(asked[(asked >= 0) & (asked < cache.num_docs)]))
        yield


def cache_schema(
    vocab_size: int, *, loss_mask: bool = False, aligned: Sequence[AlignedColumn] = ()
) -> pa.Schema:
    """Returns the columns of a token file, and of tokens that are made without a cache."""
    fields = [
        pa.field(INPUT_IDS, token_list(vocab_size), nullable=False),
        pa.field(HAS_EOS, pa.uint8(), nullable=False),
        pa.field(ROW_NUMBER, pa.int64(), nullable=False),
    ]
    if loss_mask:
        fields.append(pa.field(LOSS_MASK, pa.large_list(pa.uint8()), nullable=False))
    return pa.schema([*fields, *(column.field for column in aligned)])


def _addresses(batch: pa.RecordBatch) -> tuple[int, int, int, int]:
    """Returns the addresses of tokens, offsets, masks (0 if there are none) and EOS marks."""
    ids = batch.column(INPUT_IDS)
    mask = (
        _address(batch.column(LOSS_MASK).values.buffers()[1])
        if LOSS_MASK in batch.schema.names
        else 0
    )
    return (
        _address(ids.values.buffers()[1]),
        _address(ids.buffers()[1]),
        mask,
        _address(batch.column(HAS_EOS).buffers()[1]),
    )


def _address(buffer: pa.Buffer | None) -> int:
    return 0 if buffer is None else buffer.address
