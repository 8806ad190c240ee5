"""What the cache asks of whoever makes documents of rows: its writer is given one of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import pyarrow as pa
import xxhash

from easypipe.cache.manifest import Counts, TokenizerIdentity
from easypipe.core.protocols import Reject, ShardedSource


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

    @property
    def tokenizer_identity(self) -> TokenizerIdentity: ...

    @property
    def backend(self) -> str:
        """What encodes, for people; "" where rows are tokens already."""
        ...

    def key(self, memo: Path) -> str:
        """Digest of everything that decides tokens but the rows. memo: this machine's folder of the
        cache, where verdicts on fast tokenizers are kept.
        """
        ...

    def manifest_key(self, ranges: Sequence[str], *choices: object) -> str:
        """What the manifest over ranges with these keys is called."""
        ...

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> R: ...

    def prove(self, rows: R, dataset: str, memo: Path) -> None:
        """Called once, before the first rows of a dataset are encoded."""
        ...

    def encode(self, rows: R, at: str, audit_key: str | None = None) -> EncodedDocuments:
        """audit_key: a digest that says which rows are looked at again; None: none."""
        ...

    def content(self, batch: pa.RecordBatch) -> str:
        """XXH3-128 of documents, of which the fingerprint of the cache is made."""
        ...


def documents_hash(batch: pa.RecordBatch) -> str:
    """XXH3-128 of offsets, tokens and the other columns of a whole token file; no nulls, no
    slices.
    """
    hasher = xxhash.xxh3_128()
    for column in batch.columns:
        listed = isinstance(column, pa.LargeListArray)
        if listed:
            hasher.update(column.offsets.to_numpy())
        hasher.update((column.values if listed else column).to_numpy())
    return hasher.hexdigest()
