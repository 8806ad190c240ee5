"""Protocols of rows that were read and of encoders that make documents from them; their hash."""

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
    """The rows of a range from which documents can be made."""

    @property
    def rejects(self) -> tuple[Reject, ...]:
        """The records of the range that cannot become documents."""
        ...

    @property
    def num_texts(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def content_hash(self) -> str:
        """Returns the XXH3-128 of everything that decides the documents, in any buffers."""
        ...


R = TypeVar("R", bound=RowsRead)


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents that rows became.

    Args:
        batch: The columns of `cache_schema`.
        counts: The counts of the documents; rows and rejects are added by the caller, who knows the
            range.
        rejects: Rows that were read but did not become documents.
    """

    batch: pa.RecordBatch
    counts: Counts
    rejects: tuple[Reject, ...] = ()


class RowEncoder(Protocol[R]):
    """Turns rows into documents.

    Law: row-wise; the result for a row depends on the row alone.

    Attributes:
        columns: The columns of the source that are read; the first is shown for bad rows.
        label: The name of the encoded content, in errors and manifests.
        masked: Whether documents have a loss_mask.
        pairs: Whether every document is a pair of answers.
        aligned: Further columns with values for every token.
    """

    columns: tuple[str, ...]
    label: str
    masked: bool
    pairs: bool
    aligned: tuple[AlignedColumn, ...]

    @property
    def tokenizer_identity(self) -> TokenizerIdentity: ...

    @property
    def backend(self) -> str:
        """The name of the library that encodes, for people; "" if rows are tokens already."""
        ...

    def key(self) -> str:
        """Returns the encoding key: a digest of everything that decides tokens except the rows."""
        ...

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> R: ...

    def encode(self, rows: R, at: str, audit_key: str | None = None) -> EncodedDocuments:
        """Encodes rows.

        Args:
            rows: What `read` returned.
            at: Where they are, for errors.
            audit_key: A digest that chooses the rows whose encoding is checked; None checks none.
        """
        ...

    def content(self, batch: pa.RecordBatch) -> str:
        """Returns the XXH3-128 of documents, from which the fingerprint of the cache is made."""
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
    """Returns documents in the columns of `cache_schema`.

    Args:
        schema: The schema of the result.
        offsets: Int64[n + 1]; document i is `ids[offsets[i] : offsets[i + 1]]`.
        ids: The tokens of all documents.
        ends: UInt8[n], whether packing must not add an EOS after each document.
        rows: Int64[n], the row of each.
        mask: UInt8[tokens], the loss mask; None if there is none.
        aligned: The lists of each aligned column.
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
    """Returns the XXH3-128 of a whole token file: offsets, tokens and the other columns.

    Args:
        batch: The documents, without nulls and not a slice.
        one_set_of_offsets: Leaves out the offsets of the loss mask and of aligned columns, which
            equal those of the tokens.
    """
    hasher = xxhash.xxh3_128()
    for i, column in enumerate(batch.columns):
        listed = isinstance(column, pa.LargeListArray)
        if listed and not (i and one_set_of_offsets):
            hasher.update(column.offsets.to_numpy())
        hasher.update((numbers_of(column) if listed else column).to_numpy())
    return hasher.hexdigest()
