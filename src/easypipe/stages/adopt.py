"""Tokens that others made, or that were saved and read again, become a token cache: then they are
mixed and packed like any others.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from easypipe.cache.blocks import TokenStamp
from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import FORMAT, Counts, Manifest, Part, TokenizerIdentity
from easypipe.cache.ranges import Range, ranges_of
from easypipe.cache.reader import TokenCache, cache_schema
from easypipe.core import locks
from easypipe.core.config import digest
from easypipe.core.errors import CacheError, MissingFileError, SourceError, place
from easypipe.core.protocols import (
    PipelineContext,
    ProgressEvent,
    Shard,
    ShardedDataSource,
    ShardedSource,
    scan,
)
from easypipe.core.schema import (
    ATTENTION_MASK,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    ROW_NUMBER,
    SEGMENT_IDS,
    token_dtype,
)
from easypipe.loader.rows.stored import decode
from easypipe.save.saved import TokenInfo
from easypipe.stages.tokenize.token_rows import ends_closed, ends_with

log = logging.getLogger("easypipe")

ADOPT_VERSION = 1
# of documents with a loss mask: one that ends with EOS and one token more needs no other EOS
MASKED_VERSION = 2


class AdoptedTokens(ShardedDataSource):
    """Documents of a source with `input_ids` (and `loss_mask`, or unshifted `labels`); rows without
    tokens are counted, not passed on.

    Reads nothing until `materialize()`. That raises SourceError naming file and row for a token
    outside the tokenizer's vocabulary, for padding (`attention_mask` of 0) and for columns of
    unequal length.
    """

    def __init__(
        self, name: str, source: ShardedSource, tokens: TokenInfo, context: PipelineContext
    ) -> None:
        self.folder: CacheFolder = context.cache or CacheFolder(context.cache_dir)
        self.name, self.source, self.tokens, self.context = name, source, tokens, context
        self._columns = [
            column
            for column in (INPUT_IDS, LOSS_MASK, LABELS, ATTENTION_MASK)
            if column in source.schema.names
        ]
        self.has_mask = LOSS_MASK in self._columns or LABELS in self._columns
        self.schema = cache_schema(tokens.vocab_size, loss_mask=self.has_mask)
        version = MASKED_VERSION if self.has_mask else ADOPT_VERSION
        self._key = digest(
            "adopt",
            version,
            FORMAT,
            tokens.tokenizer_fingerprint,
            tokens.vocab_size,
            tokens.eos_token_id,
        )

    @property
    def shards(self) -> Sequence[Shard]:
        return self.source.shards

    @property
    def fingerprint(self) -> str:
        return digest(self._key, self.source.fingerprint)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self._read(shard, start, stop)[0]

    def materialize(self) -> TokenCache:
        """The token cache; opened where it stands."""
        return self._cache

    @functools.cached_property
    def _cache(self) -> TokenCache:
        ranges = ranges_of(self.source, self._key)
        opened = self._open(key := self._key_of(ranges))
        if opened is not None:
            return opened
        with locks.preparing(self.folder.local, key, self.name) as waited:
            return (self._open(key) if waited else None) or self._fill(ranges, key)

    @property
    def cache_path(self) -> Path | str:
        """Where the manifest of its token cache stands, or will. Reads no rows."""
        return self.folder.manifest(self._key_of(ranges_of(self.source, self._key)))

    def _key_of(self, ranges: Sequence[Range]) -> str:
        return digest("adopted", [piece.key for piece in ranges])

    def _open(self, key: str) -> TokenCache | None:
        try:
            return TokenCache(self.folder.manifest(key), dataset=self.name, folder=self.folder)
        except MissingFileError:
            log.debug("dataset %s: its tokens are taken into the cache", self.name)
        except CacheError as error:
            log.warning("dataset %s: its token cache is made again: %s", self.name, error)
        return None

    def _fill(self, ranges: Sequence[Range], key: str) -> TokenCache:
        rows, total = 0, sum(piece.stop - piece.start for piece in ranges)
        parts, rejects = [], Counter()
        for piece in ranges:
            part, refused = self._part(piece)
            parts.append(part)
            rejects.update(refused)
            rows += piece.stop - piece.start
            self.context.progress(
                ProgressEvent(stage="adopt", dataset=self.name, done=rows, total=total, unit="rows")
            )
        self.folder.commit_manifest(self._manifest(key, parts, rejects))
        return TokenCache(self.folder.manifest(key), dataset=self.name, folder=self.folder)

    def _part(self, piece: Range) -> tuple[Part, Counter[str]]:
        batch, refused, content = self._read(piece.shard, piece.start, piece.stop)
        name = digest("tokens", self._key, content)
        file = f"{name[:2]}/{name}.arrow"
        if not batch.num_rows:
            file, stamp = "", TokenStamp(num_bytes=0, checksum="")
        else:
            stamp = self.folder.commit_tokens(file, batch)
        part = Part(
            shard=piece.shard,
            start=piece.start,
            stop=piece.stop,
            docs=batch.num_rows,
            tokens=len(batch.column(INPUT_IDS).values),
            file=file,
            num_bytes=stamp.num_bytes,
            checksum=stamp.checksum,
            blocks=stamp.blocks,
            content=content,
        )
        return part, refused

    def _read(self, shard: int, start: int, stop: int) -> tuple[pa.RecordBatch, Counter[str], str]:
        """Rows as the cache stores them, how many were left out by reason, and the digest of what
        is stored.
        """
        name = self.source.shards[shard].name
        batch, rejects = scan(self.source, shard, start, stop)
        numbered = ROW_NUMBER in batch.schema.names
        rows = (
            batch.column(ROW_NUMBER).to_numpy()
            if numbered
            else np.arange(start, start + batch.num_rows, dtype=np.int64)
        )
        block = decode(batch, self._columns, name, start)
        ids, offsets = block.columns[INPUT_IDS], block.offsets
        self._check(ids, offsets, block.columns.get(SEGMENT_IDS), rows, name)
        full = np.diff(offsets) > 0
        refused: Counter[str] = Counter()
        for reject in rejects:
            refused[reject.reason] += reject.count
        refused["empty"] += int((~full).sum())
        # an empty row moves no offset
        offsets, rows = np.concatenate([[0], offsets[1:][full]]).astype(np.int64), rows[full]
        eos = self.tokens.eos_token_id
        stored = ids.astype(token_dtype(self.tokens.vocab_size))
        ends = (ends_closed if self.has_mask else ends_with)(stored, offsets, eos)
        hasher = xxhash.xxh3_128()
        arrays = [
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(stored)),
            pa.array(ends),
            pa.array(rows, pa.int64()),
        ]
        for values in (offsets, stored, ends, rows):
            hasher.update(values.tobytes())
        if self.has_mask:
            mask = block.columns[LOSS_MASK].astype(np.uint8)
            hasher.update(mask.tobytes())
            arrays.append(pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(mask)))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema), +refused, hasher.hexdigest()

    def _check(
        self,
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        attended: NDArray[np.int32] | None,
        rows: NDArray[np.int64],
        name: str,
    ) -> None:
        wrong = np.flatnonzero((ids < 0) | (ids >= self.tokens.vocab_size))
        if wrong.size:
            raise SourceError(
                at=place(name, row=_row_of(wrong[0], offsets, rows), column=INPUT_IDS),
                problem=f"token {ids[wrong[0]]} is outside the vocabulary of {self.tokens.vocab_size} of {self.tokens.tokenizer!r}",
                fix="Name the tokenizer that made the tokens.",
            )
        padding = np.flatnonzero(attended == 0) if attended is not None else np.empty(0, np.int64)
        if padding.size:
            raise SourceError(
                at=place(name, row=_row_of(padding[0], offsets, rows), column=ATTENTION_MASK),
                problem="the row is padded",
                fix="Save the tokens without padding: packing needs documents as they are.",
            )

    def _manifest(self, key: str, parts: Sequence[Part], rejects: Counter[str]) -> Manifest:
        info, shards = self.tokens, self.source.shards
        docs, tokens = sum(part.docs for part in parts), sum(part.tokens for part in parts)
        counts = Counts(
            rows=docs + sum(rejects.values()),
            docs=docs,
            rejects=dict(sorted(rejects.items())),
            encoded=tokens,
            tokens=tokens,
        )
        return Manifest(
            dataset=self.name,
            key=key,
            content_field=INPUT_IDS,
            tokenizer=TokenizerIdentity(
                name=info.tokenizer,
                fingerprint=info.tokenizer_fingerprint,
                vocab_size=info.vocab_size,
                eos_token_id=info.eos_token_id,
                pad_token_id=info.pad_token_id,
            ),
            shard_names=tuple(shard.name for shard in shards),
            shard_rows=tuple(shard.num_rows or 0 for shard in shards),
            parts=tuple(parts),
            counts=counts,
            fingerprint=digest(
                "tokens",
                info.tokenizer_fingerprint,
                [[p.shard, p.start, p.stop, p.content] for p in parts],
            ),
            loss_mask=self.has_mask,
        )


def _row_of(token: np.int64, offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
    return int(rows[int(np.searchsorted(offsets, token, side="right")) - 1])
