"""What the cache asks of whoever makes documents of rows: its writer is given one of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pyarrow as pa
import xxhash

from easypipe.cache.manifest import Counts, TokenizerIdentity
from easypipe.core.aligned import AlignedColumn, numbers_of
from easypipe.core.protocols import Reject, ShardedSource
from easypipe.core.values import Array, Int64, UInt8


class RowsRead(Protocol):
    """The rows of a range that documents can be made of."""

    @property
    def rejects(self) -> tuple[Reject, ...]:
        """The others."""
        ...

    @property
    def num_texts(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def content_hash(self) -> str:
        """XXH3-128 of all that decides the documents; the same whatever buffers it lies in."""
        ...


R = TypeVar("R", bound=RowsRead)


@dataclass(frozen=True)
class EncodedDocuments:
    """What rows became.

    Args:
        batch: The columns of `cache_schema`.
        counts: Of the documents; rows and their rejects are left to who knows the range.
        rejects: Rows that were read and became none.
    """

    batch: pa.RecordBatch
    counts: Counts
    rejects: tuple[Reject, ...] = ()


class RowEncoder(Protocol[R]):
    """How rows become documents. Law: row-wise; what a row becomes depends on the row alone."""

    columns: tuple[str, ...]  # of the source, that are read; the first is shown of bad rows
    label: str  # how errors and manifests call what is encoded
    masked: bool  # documents carry a loss_mask
    pairs: bool  # every document is two answers
    aligned: tuple[AlignedColumn, ...]  # further columns with values for every token

    @property
    def tokenizer_identity(self) -> TokenizerIdentity: ...

    @property
    def backend(self) -> str:
        """What encodes, for people; "" where rows are tokens already."""
        ...

    def key(self) -> str:
        """Digest of everything that decides tokens but the rows."""
        ...

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> R: ...

    def encode(self, rows: R, at: str, audit_key: str | None = None) -> EncodedDocuments:
        """audit_key: a digest that says which rows are looked at again; None: none."""
        ...

    def content(self, batch: pa.RecordBatch) -> str:
        """XXH3-128 of documents, of which the fingerprint of the cache is made."""
        ...


def token_documents(
    schema: pa.Schema,
    offsets: Int64,
    ids: Array,
    ends: UInt8,
    rows: Int64,
    mask: UInt8 | None,
    aligned: Sequence[pa.LargeListArray] = (),
) -> pa.RecordBatch:
    """Documents in the columns of `cache_schema`: `ids[offsets[i] : offsets[i + 1]]`, and whether
    each ends with EOS, its row, its loss mask where there is one, its values of aligned columns.
    """
    tokens, *masks = (
        pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
        for values in (ids, mask)
        if values is not None
    )
    return pa.RecordBatch.from_arrays(
        [tokens, pa.array(ends), pa.array(rows), *masks, *aligned], schema=schema
    )


def documents_hash(batch: pa.RecordBatch, *, one_set_of_offsets: bool = False) -> str:
    """XXH3-128 of offsets, tokens and the other columns of a whole token file; no nulls, no
    slices.

    one_set_of_offsets: those of the loss mask and of aligned columns, which are those of the
    tokens, are left out.
    """
    hasher = xxhash.xxh3_128()
    for i, column in enumerate(batch.columns):
        listed = isinstance(column, pa.LargeListArray)
        if listed and not (i and one_set_of_offsets):
            hasher.update(column.offsets.to_numpy())
        hasher.update((numbers_of(column) if listed else column).to_numpy())
    return hasher.hexdigest()
