"""The reader of the token cache: documents as token ids in memory-mapped Arrow files, each length
known before a token is touched.

doc     a document, counted over the whole cache: the rows that were kept, in the order of the source
part    the file of one range of rows (cache/manifest.py)
shard   a shard of the source that the tokens came from; rows keep its physical numbers
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from easypipe.cache import mapping
from easypipe.cache.address import byte_values, count_zeros, list_lengths
from easypipe.cache.blocks import INDEX, ROOM, BlockChecks, note_documents
from easypipe.cache.folder import CacheFolder, RemoteFolder
from easypipe.cache.manifest import Manifest, Part, read_manifest
from easypipe.cache.paged import AGAIN, Staged
from easypipe.core import locks
from easypipe.core.errors import CacheError, SourceError, place
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import Shard, ShardedDataSource
from easypipe.core.schema import HAS_EOS, INPUT_IDS, LOSS_MASK, ROW_NUMBER, token_dtype, token_list

KEPT_BATCHES = 32  # that were read last, where files are mapped only while they are read


class Buffers(NamedTuple):
    """Where everything lies in memory, for kernels. P parts; the TokenCache that gave them keeps
    the maps alive.

    first_doc        Int64[P+1]    documents before each part, and in all
    ids_address      UInt64[P]     first token of the part, `id_bytes` bytes each (unsigned)
    offsets_address  UInt64[P]     int64 offsets of the documents in the part, one more than there are documents
    mask_address     UInt64[P]     uint8 loss_mask, one per token; 0 where every token is a target
    eos_address      UInt64[P]     uint8 per document: 1 where it already ends with EOS
    file_address     UInt64[P]     first byte of the part's file
    checked_address  UInt64[P]     flags of what was checked of it (cache/blocks.py); 0 where nothing has to be checked
    """

    first_doc: NDArray[np.int64]
    ids_address: NDArray[np.uint64]
    offsets_address: NDArray[np.uint64]
    mask_address: NDArray[np.uint64]
    eos_address: NDArray[np.uint64]
    file_address: NDArray[np.uint64]
    checked_address: NDArray[np.uint64]
    id_bytes: int


class TokenCache(ShardedDataSource):
    """Documents as tokens, by number or as a ShardedSource whose rows have the physical numbers of
    the source they came from.

    Law: `read(shard, a, b)` gives what tokenizing rows a to b of that shard of the source gives.
    Nothing is held in anonymous memory but a few words per part. Thread safe; raises CacheError at
    opening where a file is missing, cut short or foreign, and where a block that is touched for the
    first time is damaged, before a token of it is handed out.
    """

    def __init__(
        self, path: str | Path, *, dataset: str | None = None, folder: CacheFolder | None = None
    ) -> None:
        """path: a manifest. dataset: the name to report under, where it is not the one the cache
        was prepared as. folder: that the manifest is in, where it is none of this machine; kept for
        as long as this object lives."""
        self.folder = folder or CacheFolder(Path(path).parent.parent)
        self.path: Path | str = str(path) if self.folder.remote else Path(path)
        # Held for as long as this object lives, so that nobody clears what it maps.
        mapped = isinstance(self.path, Path) and self.path.exists()
        self._mark = locks.mark_reader(self.folder.local, Path(path).stem) if mapped else None
        self.manifest: Manifest = read_manifest(self.path, self.folder.options)
        self.dataset = dataset or self.manifest.dataset
        self._parts = [part for part in self.manifest.parts if part.docs]
        self._staged: Staged | None = None
        self._files: mapping.MappedFiles | None = None
        # None in a bucket, whose files are checked when they are fetched
        self._blocks: BlockChecks | None = None
        # where each file is mapped; none where files are mapped only while they are read
        self._maps: list[int] = []
        # one for each part; none where files are mapped only while they are read ...
        self._batches: list[pa.RecordBatch] = []
        # ... and then those that were asked for last
        self._kept: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        if isinstance(self.folder, RemoteFolder):
            urls = [self.folder.tokens(part.file) for part in self._parts]
            self._staged = Staged(
                self.folder.staging, self._parts, urls, self.folder.options, self.folder.reading
            )
            self._batches = [
                self._checked_batch(staged.batch, staged.part) for staged in self._staged.parts
            ]
        elif mapping.may_map(self, len(self._parts)):
            mapped = [self._map(part) for part in self._parts]
            self._batches, self._maps = (
                [batch for batch, _ in mapped],
                [address for _, address in mapped],
            )
        else:
            files = [f"{self.folder.local}/tokens/{part.file}" for part in self._parts]
            self._files = mapping.MappedFiles(files, [part.num_bytes for part in self._parts])
        if self._staged is None:
            self._blocks = BlockChecks(
                self._parts, lambda i: f"{self.folder.local}/tokens/{self._parts[i].file}"
            )
        self._first_doc = np.concatenate(
            [[0], np.cumsum([part.docs for part in self._parts], dtype=np.int64)]
        ).astype(np.int64)
        if self._files is not None:
            _ = self._buffers  # looks into every file

    @property
    def fingerprint(self) -> str:
        """Of the content: the same text under the same tokenizer has the same fingerprint, wherever
        and whenever it was prepared.
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
        """Rows and tokens of the preparation."""
        return self.manifest.counts.ledger(
            self.dataset,
            {f"tokenize.{self.dataset}.{k}": v for k, v in self.manifest.facts.items()},
        )

    @property
    def quarantine(self) -> Path | str | None:
        """The JSONL file of rows that were set aside, where there is one; a URL where the cache is
        at one.
        """
        return (
            self.folder.at("manifests", self.manifest.quarantine)
            if self.manifest.quarantine
            else None
        )

    @cached_property
    def schema(self) -> pa.Schema:
        return cache_schema(self.vocab_size, loss_mask=self.manifest.loss_mask)

    @property
    def pairs(self) -> bool:
        """Whether every document is two answers, see Manifest."""
        return self.manifest.pairs

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
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
        """Rows `start` to `stop` of a source shard that were kept; zero-copy where they lie in one
        part on this machine.
        """
        info = self.shards[shard]
        if not 0 <= start <= stop <= (info.num_rows or 0):
            raise SourceError(
                at=place(info.name), problem=f"rows {start}:{stop} of {info.num_rows} do not exist"
            )
        pieces = []
        for i in self._parts_of(shard):
            part = self._parts[i]
            if part.start < stop and start < part.stop:
                self._check_index([i])
                rows = self._batch(i).column(ROW_NUMBER).to_numpy()
                first, last = map(int, np.searchsorted(rows, [start, stop]))
                if first < last:
                    pieces.append(self._rows(i, first, last))
        if len(pieces) == 1:
            return pieces[0]
        arrays = [
            pa.concat_arrays([piece.column(i) for piece in pieces]) if pieces else f.type
            for i, f in enumerate(self.schema)
        ]
        columns = [pa.array([], a) if isinstance(a, pa.DataType) else a for a in arrays]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def lengths(self, docs: NDArray[np.int64]) -> NDArray[np.int32]:
        """Stored tokens of each of `docs` (Int64[n]); Int32[n]. Raises IndexError for a document
        that does not exist.
        """
        return self._of_each(docs, list_lengths, self._buffers.offsets_address, np.int32)

    def has_eos(self, docs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of `docs` (Int64[n]) already ends with the tokenizer's EOS; Bool[n]."""
        return self._of_each(docs, byte_values, self._buffers.eos_address, np.bool_)

    def count_without_eos(self) -> int:
        """Documents that do not end with the tokenizer's EOS."""
        parts, found = np.arange(len(self._parts)), 0
        for here in self._held_in_turn(parts):
            a, b = int(here[0]), int(here[-1]) + 1
            self._check_index(range(a, b))
            found += int(count_zeros(self._first_doc[a : b + 1], self._buffers.eos_address[a:b]))
        return found

    def tokens(self, doc: int) -> NDArray[np.unsignedinteger]:
        """The stored ids of one document; a view of the map where that is of a file of this
        machine.
        """
        part, local = self._find(doc)
        return self._rows(part, local, local + 1).column(INPUT_IDS).flatten().to_numpy()

    def buffers(self) -> Buffers:
        """Addresses for kernels; good for as long as this object lives. Where `comes_and_goes`,
        what stands there is only there while `staged` holds it."""
        return self._buffers

    @property
    def comes_and_goes(self) -> bool:
        """Whether kernels find documents only while `staged` holds them: in a bucket, or where
        there are more files than may be mapped.
        """
        return self._staged is not None or self._files is not None

    def staged(self, docs: NDArray[np.int64]) -> contextlib.AbstractContextManager[None]:
        """While the block lasts, `docs` (Int64[n]) are where `buffers` says. Free where files are
        mapped for good.

        Raises StorageError where they cannot be fetched, CacheError where a fetched file is not
        what was committed.
        """
        number = self._part_numbers(docs) if self.comes_and_goes else docs
        if self._staged is not None:
            return self._staged.hold(number, docs - self._first_doc[number])
        return (
            self._checked_and_held(docs, number)
            if self._files is not None or self.pending
            else contextlib.nullcontext()
        )

    @contextlib.contextmanager
    def _checked_and_held(
        self, docs: NDArray[np.int64], number: NDArray[np.int64]
    ) -> Iterator[None]:
        with contextlib.nullcontext() if self._files is None else self._files.hold(number):
            b, todo = self._buffers, np.empty((2, ROOM if self.pending else 0), np.int64)
            places = (
                b.ids_address,
                b.offsets_address,
                b.mask_address,
                b.file_address,
                b.checked_address,
            )
            while todo.size and (
                count := note_documents(docs, b.first_doc, *places, b.id_bytes, todo)
            ):
                self.check(todo[:, :count])
            yield

    @property
    def pending(self) -> bool:
        """Whether parts of its files were not held against their checksums yet: kernels then have
        to look at the flags, and `check`.
        """
        return self._blocks is not None and self._blocks.pending

    def check(self, touched: NDArray[np.int64]) -> None:
        """touched: Int64[2, n], parts and their blocks as `blocks.note` gives them. Raises
        CacheError where one is damaged.
        """
        assert self._blocks is not None
        for part, block in sorted(set(zip(*touched.tolist(), strict=True))):  # an index first
            if block == INDEX:
                self._check_index([part])
            else:
                self._blocks.check(part, [block], int(self._buffers.file_address[part]))

    def _check_index(self, parts: Sequence[int]) -> None:
        if self.pending:
            assert self._blocks is not None
            b = self._buffers
            with (
                contextlib.nullcontext()
                if self._files is None
                else self._files.hold(np.array(parts))
            ):
                for i in parts:
                    self._blocks.check_index(
                        i,
                        int(b.file_address[i]),
                        int(b.ids_address[i]),
                        int(b.mask_address[i]),
                        b.id_bytes,
                    )

    def where(self, doc: int) -> tuple[str, int]:
        """(file, physical row) that a document came from."""
        part, local = self._find(doc)
        self._check_index([part])
        row = self._batch(part).column(ROW_NUMBER)[local].as_py()
        return self.manifest.shard_names[self._parts[part].shard], row

    def verify(self) -> None:
        """Reads every byte. Raises CacheError naming the first file whose checksum is not the one
        that was committed.
        """
        for part in self._parts:
            found = xxh3_128_hexdigest(self.folder.content(part.file))
            if found != part.checksum:
                raise CacheError(
                    at=str(self.folder.tokens(part.file)),
                    problem=f"damaged: checksum {found}, committed as {part.checksum}",
                    fix="Delete the file and prepare the dataset again; only this range is tokenized anew.",
                )

    @cached_property
    def _buffers(self) -> Buffers:
        where = [np.empty(len(self._parts), np.uint64) for _ in range(4)]
        for i, part in enumerate(self._parts):
            if self._files is None:
                found, base = _addresses(self._batch(i)), 0
            else:  # one at a time: what counts is where in the file they are
                batch, mapped = self._map(part)
                found, base = _addresses(batch), int(self._files.addresses[i]) - mapped
            for column, address in zip(where, found, strict=True):
                column[i] = address + base if address else 0
        ids, offsets, masks, eos = where
        nowhere = np.zeros(len(self._parts), np.uint64)
        files = (
            np.array(self._maps, np.uint64)
            if self._maps
            else nowhere
            if self._files is None
            else self._files.addresses
        )
        checked = nowhere if self._blocks is None else self._blocks.addresses
        return Buffers(
            self._first_doc,
            ids,
            offsets,
            masks,
            eos,
            files,
            checked,
            token_dtype(self.vocab_size).itemsize,
        )

    def _of_each(
        self,
        docs: NDArray[np.int64],
        kernel: Callable[..., None],
        address: NDArray[np.uint64],
        kind: type,
    ) -> NDArray[Any]:
        """`kernel(docs, first_doc, address, out)` for all of `docs`, some at a time where not all
        files may be mapped at once.
        """
        docs = self._checked(docs)
        out = np.empty(docs.size, kind)
        if self._files is None:
            if docs.size:
                if self.pending:
                    self._check_index(np.unique(self._part_numbers(docs)).tolist())
                kernel(docs, self._first_doc, address, out)
            return out
        number = self._part_numbers(docs)
        order = np.argsort(number, kind="stable")
        for here in self._held_in_turn(number[order]):
            some = order[: here.size]
            order = order[here.size :]
            found = np.empty(some.size, kind)
            self._check_index(np.unique(here).tolist())
            kernel(docs[some], self._first_doc, address, found)
            out[some] = found
        return out

    def _held_in_turn(self, parts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """`parts` (Int64[n], ascending) piece by piece, each mapped until the next is asked for."""
        if self._files is None or not parts.size:
            yield from [parts] if parts.size else []
            return
        distinct = np.cumsum(np.diff(parts, prepend=parts[0]) > 0) // self._files.most
        for here in np.split(parts, np.flatnonzero(np.diff(distinct)) + 1):
            with self._files.hold(here):
                yield here

    def _rows(self, part: int, first: int, last: int) -> pa.RecordBatch:
        """Documents `first` to `last` of a part; a copy where the map is filled and emptied by
        others.
        """
        found = self._batch(part).slice(first, last - first)
        if not self.pending and self._staged is None:
            return found
        with self.staged(np.arange(first, last) + self._first_doc[part]):
            if self._staged is None:
                return found
            return pa.ipc.read_record_batch(found.serialize(), found.schema)

    def _batch(self, part: int) -> pa.RecordBatch:
        if self._files is None:
            return self._batches[part]
        found = self._kept.get(part)
        if found is None:
            found = self._kept[part] = self._map(self._parts[part])[0]
            if len(self._kept) > KEPT_BATCHES:
                self._kept.popitem(last=False)
        return found

    def _map(self, part: Part) -> tuple[pa.RecordBatch, int]:
        """A token file, and the address that it is mapped at for as long as the batch lives."""
        # pathlib took a tenth of the time
        file, again = f"{self.folder.local}/tokens/{part.file}", AGAIN
        try:
            size = os.stat(file).st_size
            if size != part.num_bytes:
                raise CacheError(
                    at=file, problem=f"{size} bytes, committed with {part.num_bytes}", fix=again
                )
            # Closing the file gives its descriptor back; the map lives on in the buffers.
            with pa.memory_map(file) as mapped:
                whole = mapped.read_buffer()
                batch = pa.ipc.open_file(whole).get_batch(0).replace_schema_metadata(None)
        except FileNotFoundError as error:
            raise CacheError(at=file, problem="missing from the token cache", fix=again) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            if "Cannot allocate memory" in str(error):  # Arrow gives no errno
                again = mapping.limit_named(len(self._parts))
            raise CacheError(at=file, problem=f"cannot be read: {error}", fix=again) from error
        return self._checked_batch(batch, part), whole.address

    def _checked_batch(self, batch: pa.RecordBatch, part: Part) -> pa.RecordBatch:
        if batch.num_rows != part.docs or not batch.schema.equals(self.schema):
            at = str(self.folder.tokens(part.file))
            raise CacheError(
                at=at,
                problem=f"holds {batch.num_rows} rows of {batch.schema.names}, not {part.docs}",
                fix=AGAIN,
            )
        return batch

    def _parts_of(self, shard: int) -> range:
        """Parts lie in the order of shards."""
        first = bisect.bisect_left(self._parts, shard, key=lambda part: part.shard)
        return range(first, bisect.bisect_right(self._parts, shard, key=lambda part: part.shard))

    def _find(self, doc: int) -> tuple[int, int]:
        if not 0 <= doc < self.num_docs:
            raise IndexError(f"document {doc} of {self.num_docs}")
        part = int(self._part_numbers(np.int64(doc)))
        return part, doc - int(self._first_doc[part])

    def _part_numbers(self, docs: Any) -> Any:
        return np.searchsorted(self._first_doc, docs, side="right") - 1

    def _checked(self, docs: NDArray[np.int64]) -> NDArray[np.int64]:
        docs = np.ascontiguousarray(docs, dtype=np.int64)
        if docs.size and (docs.min() < 0 or docs.max() >= self.num_docs):
            raise IndexError(f"documents {docs.min()} to {docs.max()} of {self.num_docs}")
        return docs


def cache_schema(vocab_size: int, *, loss_mask: bool = False) -> pa.Schema:
    """Columns of a token file, and of whatever tokenizes a source without a cache."""
    fields = [
        pa.field(INPUT_IDS, token_list(vocab_size), nullable=False),
        pa.field(HAS_EOS, pa.uint8(), nullable=False),
        pa.field(ROW_NUMBER, pa.int64(), nullable=False),
    ]
    if loss_mask:
        fields.append(pa.field(LOSS_MASK, pa.large_list(pa.uint8()), nullable=False))
    return pa.schema(fields)


def _addresses(batch: pa.RecordBatch) -> tuple[int, int, int, int]:
    """Where its tokens, offsets, masks (0: it has none) and EOS marks are."""
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
