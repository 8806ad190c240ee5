"""Imports tokens that others made, or that were saved, into a token cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from easypipe.cache.encoder import EncodedDocuments
from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import FORMAT, Counts, TokenizerIdentity
from easypipe.cache.reader import TokenCache, cache_schema
from easypipe.cache.writer import CacheWriter
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, place
from easypipe.core.protocols import (
    PipelineContext,
    Reject,
    Shard,
    ShardedSource,
    Source,
    SourceInfo,
    TokenInfo,
    info_of,
    left_out,
    scan,
)
from easypipe.core.schema import (
    ATTENTION_MASK,
    HAS_EOS,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    ROW_NUMBER,
    SEGMENT_IDS,
    token_dtype,
)
from easypipe.loader.rows.stored import Block, decode
from easypipe.stages.tokenize.token_rows import ends_closed, ends_with

IMPORT_VERSION = 1
# of documents with a loss mask: one that ends with EOS and one token more needs no other EOS
MASKED_VERSION = 2


@dataclass(frozen=True)
class ImportedRows:
    """Rows as the cache stores them; implements cache.encoder.RowsRead."""

    documents: EncodedDocuments
    rejects: tuple[Reject, ...]
    num_texts = num_bytes = 0  # there was no text

    def content_hash(self) -> str:
        return stored_hash(self.documents.batch)


class TokenEncoder:
    """Rows of `input_ids` (and `loss_mask`, or unshifted `labels`) to what the cache stores;
    implements cache.encoder.RowEncoder. Rows without tokens are counted, not passed on.
    """

    label, pairs, backend = INPUT_IDS, False, ""

    def __init__(self, source: ShardedSource, tokens: TokenInfo) -> None:
        known = (INPUT_IDS, LOSS_MASK, LABELS, ATTENTION_MASK)
        self.columns = tuple(name for name in known if name in source.schema.names)
        self.masked = LOSS_MASK in self.columns or LABELS in self.columns
        self.tokens = tokens
        self.schema = cache_schema(tokens.vocab_size, loss_mask=self.masked)
        self._key = digest(
            "adopt",
            MASKED_VERSION if self.masked else IMPORT_VERSION,
            FORMAT,
            tokens.tokenizer_fingerprint,
            tokens.vocab_size,
            tokens.eos_token_id,
        )

    @property
    def tokenizer_identity(self) -> TokenizerIdentity:
        return TokenizerIdentity(
            name=self.tokens.tokenizer,
            fingerprint=self.tokens.tokenizer_fingerprint,
            vocab_size=self.tokens.vocab_size,
            eos_token_id=self.tokens.eos_token_id,
            pad_token_id=self.tokens.pad_token_id,
        )

    def key(self, memo: Path) -> str:
        return self._key

    def manifest_key(self, ranges: Sequence[str], *choices: object) -> str:
        return digest("adopted", list(ranges))

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> ImportedRows:
        """Raises SourceError naming file and row for a token outside the tokenizer's vocabulary,
        for padding (`attention_mask` of 0) and for columns of unequal length.
        """
        name = source.shards[shard].name
        batch, rejects = scan(source, shard, start, stop)
        numbered = ROW_NUMBER in batch.schema.names
        rows = (
            batch.column(ROW_NUMBER).to_numpy()
            if numbered
            else np.arange(start, start + batch.num_rows, dtype=np.int64)
        )
        block = decode(batch, self.columns, name, start)
        self._check(block, rows, name)
        full = np.diff(block.offsets) > 0
        # an empty row moves no offset
        offsets = np.concatenate([[0], block.offsets[1:][full]]).astype(np.int64)
        ids = block.columns[INPUT_IDS].astype(token_dtype(self.tokens.vocab_size))
        ends = (ends_closed if self.masked else ends_with)(ids, offsets, self.tokens.eos_token_id)
        lists = [ids, block.columns[LOSS_MASK].astype(np.uint8)] if self.masked else [ids]
        columns = [pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(v)) for v in lists]
        columns[1:1] = [pa.array(ends), pa.array(rows[full], pa.int64())]
        made = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        counts = Counts(docs=made.num_rows, tokens=len(ids), encoded=len(ids))
        return ImportedRows(
            EncodedDocuments(made, counts), (*rejects, *left_out(rows[~full], "empty"))
        )

    def prove(self, rows: ImportedRows, dataset: str, memo: Path) -> None:
        """Nothing is encoded."""

    def encode(self, rows: ImportedRows, at: str, audit_key: str | None = None) -> EncodedDocuments:
        return rows.documents

    def content(self, batch: pa.RecordBatch) -> str:
        return stored_hash(batch)

    def _check(self, block: Block, rows: NDArray[np.int64], name: str) -> None:
        ids, attended = block.columns[INPUT_IDS], block.columns.get(SEGMENT_IDS)
        wrong = np.flatnonzero((ids < 0) | (ids >= self.tokens.vocab_size))
        if wrong.size:
            raise SourceError(
                at=place(name, row=_row_of(wrong[0], block, rows), column=INPUT_IDS),
                problem=f"token {ids[wrong[0]]} is outside the vocabulary of "
                f"{self.tokens.vocab_size} of {self.tokens.tokenizer!r}",
                fix="Name the tokenizer that made the tokens.",
            )
        padding = np.flatnonzero(attended == 0) if attended is not None else wrong
        if padding.size:
            raise SourceError(
                at=place(name, row=_row_of(padding[0], block, rows), column=ATTENTION_MASK),
                problem="the row is padded",
                fix="Save the tokens without padding: packing needs documents as they are.",
            )


class ImportedTokens(Source):
    """Documents of a source of tokens. Reads nothing until `materialize()`, which gives its token
    cache.
    """

    def __init__(
        self, name: str, source: ShardedSource, tokens: TokenInfo, context: PipelineContext
    ) -> None:
        self.source, self.tokens = source, tokens
        self._encoder = TokenEncoder(source, tokens)
        self.schema = self._encoder.schema
        self.writer = CacheWriter(
            source=source,
            encoder=self._encoder,
            dataset=name,
            folder=context.cache or CacheFolder(context.cache_dir),
            on_error="skip",
            progress=context.progress,
            stage="adopt",
        )

    @property
    def info(self) -> SourceInfo:
        return dataclasses.replace(info_of(self.source), tokens=self.tokens)

    @property
    def below(self) -> ShardedSource:
        return self.source

    @property
    def shards(self) -> Sequence[Shard]:
        return self.source.shards

    @property
    def fingerprint(self) -> str:
        # the key alone: in streaming nobody has counted the rows that ranges are cut from
        return digest(self._encoder.key(self.writer.folder.local), self.source.fingerprint)

    def materialize(self) -> TokenCache:
        """The token cache of all rows: opened, finished or made; see CacheWriter.fill."""
        return self.writer.fill()

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self._encoder.read(self.source, shard, start, stop).documents.batch


def stored_hash(batch: pa.RecordBatch) -> str:
    """XXH3-128 of offsets, tokens, EOS marks, row numbers and loss mask."""
    hasher, ids = xxhash.xxh3_128(), batch.column(INPUT_IDS)
    for array in (ids.offsets, ids.values, batch.column(HAS_EOS), batch.column(ROW_NUMBER)):
        hasher.update(array.to_numpy())
    if LOSS_MASK in batch.schema.names:
        hasher.update(batch.column(LOSS_MASK).values.to_numpy())
    return hasher.hexdigest()


def _row_of(token: np.int64, block: Block, rows: NDArray[np.int64]) -> int:
    return int(rows[int(np.searchsorted(block.offsets, token, side="right")) - 1])
