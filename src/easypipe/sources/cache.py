"""The reader of the token cache: documents as token ids in memory-mapped Arrow files, each length known before a token is touched.

doc     a document, counted over the whole cache: the rows that were kept, in the order of the source
part    the file of one range of rows (sources/manifest.py)
shard   a shard of the source that the tokens came from; rows keep its physical numbers
"""

from __future__ import annotations

import bisect
import contextlib
import os
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from easypipe.core import locks
from easypipe.core.errors import CacheError, SourceError, place
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import Shard, ShardedDataSource
from easypipe.core.schema import HAS_EOS, INPUT_IDS, LOSS_MASK, ROW_NUMBER, token_dtype, token_list
from easypipe.sources.cache_folder import CacheFolder, RemoteFolder
from easypipe.sources.manifest import Manifest, Part, read_manifest
from easypipe.sources.staging import AGAIN, Staged


class Buffers(NamedTuple):
    """Where everything lies in memory, for kernels. P parts; the TokenCache that gave them keeps the maps alive.

    first_doc        Int64[P+1]    documents before each part, and in all
    ids_address      UInt64[P]     first token of the part, `id_bytes` bytes each (unsigned)
    offsets_address  UInt64[P]     int64 offsets of the documents in the part, one more than there are documents
    mask_address     UInt64[P]     uint8 loss_mask, one per token; 0 where every token is a target
    eos_address      UInt64[P]     uint8 per document: 1 where it already ends with EOS
    """

    first_doc: NDArray[np.int64]
    ids_address: NDArray[np.uint64]
    offsets_address: NDArray[np.uint64]
    mask_address: NDArray[np.uint64]
    eos_address: NDArray[np.uint64]
    id_bytes: int


class TokenCache(ShardedDataSource):
    """Documents as tokens, by number or as a ShardedSource whose rows have the physical numbers of the source they came from.

    Law: `read(shard, a, b)` gives what tokenizing rows a to b of that shard of the source gives. Nothing is held in anonymous memory
    but a few words per part. Thread safe; raises CacheError at opening where a file is missing, cut short or foreign.
    """

    def __init__(self, path: str | Path, *, dataset: str | None = None, folder: CacheFolder | None = None) -> None:
        """path: a manifest. dataset: the name to report under, where it is not the one the cache was prepared as. folder: that the manifest
        is in, where it is none of this machine; kept for as long as this object lives."""
        self.folder = folder or CacheFolder(Path(path).parent.parent)
        self.path: Path | str = str(path) if self.folder.remote else Path(path)
        # Held for as long as this object lives, so that nobody clears what it maps.
        mapped = isinstance(self.path, Path) and self.path.exists()
        self._mark = locks.mark_reader(self.folder.local, Path(path).stem) if mapped else None
        self.manifest: Manifest = read_manifest(self.path, self.folder.options)
        self.dataset = dataset or self.manifest.dataset
        self._parts = [part for part in self.manifest.parts if part.docs]
        self._staged: Staged | None = None
        if isinstance(self.folder, RemoteFolder):
            urls = [self.folder.tokens(part.file) for part in self._parts]
            self._staged = Staged(self.folder.staging, self._parts, urls, self.folder.options, self.folder.reading)
            self._batches = [self._checked_batch(staged.batch, staged.part) for staged in self._staged.parts]
        else:
            self._batches = [self._map(part) for part in self._parts]
        self._first_doc = np.concatenate([[0], np.cumsum([part.docs for part in self._parts], dtype=np.int64)]).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """Of the content: the same text under the same tokenizer has the same fingerprint, wherever and whenever it was prepared."""
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
        return self.manifest.counts.ledger(self.dataset, {f"tokenize.{self.dataset}.{k}": v for k, v in self.manifest.facts.items()})

    @property
    def quarantine(self) -> Path | str | None:
        """The JSONL file of rows that were set aside, where there is one; a URL where the cache is at one."""
        return self.folder.at("manifests", self.manifest.quarantine) if self.manifest.quarantine else None

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
            for i, (name, rows) in enumerate(zip(self.manifest.shard_names, self.manifest.shard_rows, strict=True))
        )

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        """Rows `start` to `stop` of a source shard that were kept; zero-copy where they lie in one part on this machine."""
        info = self.shards[shard]
        if not 0 <= start <= stop <= (info.num_rows or 0):
            raise SourceError(at=place(info.name), problem=f"rows {start}:{stop} of {info.num_rows} do not exist")
        pieces = []
        for i in self._parts_of(shard):
            part = self._parts[i]
            if part.start < stop and start < part.stop:
                rows = self._batches[i].column(ROW_NUMBER).to_numpy()
                first, last = map(int, np.searchsorted(rows, [start, stop]))
                if first < last:
                    pieces.append(self._rows(i, first, last))
        if len(pieces) == 1:
            return pieces[0]
        arrays = [pa.concat_arrays([piece.column(i) for piece in pieces]) if pieces else f.type for i, f in enumerate(self.schema)]
        columns = [pa.array([], a) if isinstance(a, pa.DataType) else a for a in arrays]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def lengths(self, docs: NDArray[np.int64]) -> NDArray[np.int32]:
        """Stored tokens of each of `docs` (Int64[n]); Int32[n]. Raises IndexError for a document that does not exist."""
        from easypipe.sources.address import list_lengths  # numba is loaded when tokens are first needed

        docs = self._checked(docs)
        out = np.empty(docs.size, np.int32)
        if docs.size:
            list_lengths(docs, self._buffers.first_doc, self._buffers.offsets_address, out)
        return out

    def has_eos(self, docs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of `docs` (Int64[n]) already ends with the tokenizer's EOS; Bool[n]."""
        from easypipe.sources.address import byte_values

        docs = self._checked(docs)
        out = np.empty(docs.size, np.bool_)
        if docs.size:
            byte_values(docs, self._buffers.first_doc, self._buffers.eos_address, out)
        return out

    def tokens(self, doc: int) -> NDArray[np.unsignedinteger]:
        """The stored ids of one document; a view of the map where that is of a file of this machine."""
        part, local = self._find(doc)
        return self._rows(part, local, local + 1).column(INPUT_IDS).flatten().to_numpy()

    def buffers(self) -> Buffers:
        """Addresses for kernels; good for as long as this object lives. What stands at `ids_address` and `mask_address` of documents in a
        bucket is there while `staged` holds them."""
        return self._buffers

    @property
    def remote(self) -> bool:
        """Whether tokens have to be fetched before kernels read them: see `staged`."""
        return self._staged is not None

    def staged(self, docs: NDArray[np.int64]) -> contextlib.AbstractContextManager[None]:
        """While the block lasts, tokens and masks of `docs` (Int64[n]) are where `buffers` says. Free on this machine's own files.

        Raises StorageError where they cannot be fetched, CacheError where a fetched file is not what was committed.
        """
        if self._staged is None:
            return contextlib.nullcontext()
        number = np.searchsorted(self._first_doc, docs, side="right") - 1
        return self._staged.hold(number, docs - self._first_doc[number])

    def where(self, doc: int) -> tuple[str, int]:
        """(file, physical row) that a document came from."""
        part, local = self._find(doc)
        row = self._batches[part].column(ROW_NUMBER)[local].as_py()
        return self.manifest.shard_names[self._parts[part].shard], row

    def verify(self) -> None:
        """Reads every byte. Raises CacheError naming the first file whose checksum is not the one that was committed."""
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
        columns = [batch.column(INPUT_IDS) for batch in self._batches]
        masks = [_address(batch.column(LOSS_MASK).values.buffers()[1]) if self.manifest.loss_mask else 0 for batch in self._batches]
        return Buffers(
            first_doc=self._first_doc,
            ids_address=np.array([_address(column.values.buffers()[1]) for column in columns], np.uint64),
            offsets_address=np.array([_address(column.buffers()[1]) for column in columns], np.uint64),
            mask_address=np.array(masks, np.uint64),
            eos_address=np.array([_address(batch.column(HAS_EOS).buffers()[1]) for batch in self._batches], np.uint64),
            id_bytes=token_dtype(self.vocab_size).itemsize,
        )

    def _rows(self, part: int, first: int, last: int) -> pa.RecordBatch:
        """Documents `first` to `last` of a part; a copy where the map is filled and emptied by others."""
        found = self._batches[part].slice(first, last - first)
        if not self.remote:
            return found
        with self.staged(np.arange(first, last) + self._first_doc[part]):
            return pa.ipc.read_record_batch(found.serialize(), found.schema)

    def _map(self, part: Part) -> pa.RecordBatch:
        file, again = f"{self.folder.local}/tokens/{part.file}", AGAIN  # pathlib took a tenth of the time
        try:
            size = os.stat(file).st_size
            if size != part.num_bytes:
                raise CacheError(at=file, problem=f"{size} bytes, committed with {part.num_bytes}", fix=again)
            # Closing the file gives its descriptor back; the map lives on in the buffers.
            with pa.memory_map(file) as mapped:
                batch = pa.ipc.open_file(mapped).get_batch(0).replace_schema_metadata(None)
        except FileNotFoundError as error:
            raise CacheError(at=file, problem="missing from the token cache", fix=again) from error
        except (pa.ArrowInvalid, OSError) as error:
            if "Cannot allocate memory" in str(error):  # Arrow gives no errno
                again = f"A process maps a limited number of files, and this cache has {len(self._parts):,}: raise sysctl vm.max_map_count."
            raise CacheError(at=file, problem=f"cannot be read: {error}", fix=again) from error
        return self._checked_batch(batch, part)

    def _checked_batch(self, batch: pa.RecordBatch, part: Part) -> pa.RecordBatch:
        if batch.num_rows != part.docs or not batch.schema.equals(self.schema):
            at = str(self.folder.tokens(part.file))
            raise CacheError(at=at, problem=f"holds {batch.num_rows} rows of {batch.schema.names}, not {part.docs}", fix=AGAIN)
        return batch

    def _parts_of(self, shard: int) -> range:
        """Parts lie in the order of shards."""
        first = bisect.bisect_left(self._parts, shard, key=lambda part: part.shard)
        return range(first, bisect.bisect_right(self._parts, shard, key=lambda part: part.shard))

    def _find(self, doc: int) -> tuple[int, int]:
        if not 0 <= doc < self.num_docs:
            raise IndexError(f"document {doc} of {self.num_docs}")
        part = int(np.searchsorted(self._first_doc, doc, side="right")) - 1
        return part, doc - int(self._first_doc[part])

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


def _offsets(column: pa.LargeListArray) -> NDArray[np.int64]:
    return np.frombuffer(column.buffers()[1], np.int64, len(column) + 1)


def _address(buffer: pa.Buffer | None) -> int:
    return 0 if buffer is None else buffer.address
