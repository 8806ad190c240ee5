"""The documents of a dataset as streams read them: forward, tokenized on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from easypipe.cache.encoder import EncodedDocuments
from easypipe.cache.manifest import Counts
from easypipe.core.aligned import values_of
from easypipe.core.config import digest
from easypipe.core.errors import SourceError
from easypipe.core.protocols import (
    PipelineContext,
    Reject,
    Shard,
    Source,
    bad_of,
    info_of,
    innermost,
    place_of,
    scan,
    unit_of,
)
from easypipe.core.schema import HAS_EOS, INPUT_IDS, LOSS_MASK
from easypipe.loader.streams.feed import Loaded
from easypipe.stages.config import datasets_of
from easypipe.stages.tokenize.documents import Documents, cached_of
from easypipe.stages.tokenize.token_rows import AUDITED_BYTES, AUDITED_SHARE
from easypipe.transforms.refused import advice

NAMED_ROWS = 64  # bad rows of a chunk whose places are kept


class ForwardDocuments:
    """The documents of one dataset as streams read them, tokenized on the way; implements
    loader.streams.feed.Forward.

    Raises SourceError for a bad row under on_error="error"; where it is skipped, the loader counts
    it against `max_bad_rows`.
    """

    def __init__(self, name: str, source: Documents, context: PipelineContext) -> None:
        self.name, self._source = name, source
        dataset = datasets_of(context).get(name)
        self._on_error = "error" if dataset is None else dataset.on_error
        self.max_bad_rows = None if dataset is None else dataset.max_bad_rows
        self.unit = unit_of(source)

    @property
    def shards(self) -> Sequence[Shard]:
        """Raises SourceError where nobody knows where one ends."""
        shards, files = self._source.shards, info_of(innermost(self._source))
        for shard in shards:
            if shard.num_rows is None and not files.uncounted:
                raise SourceError(
                    at=shard.name,
                    problem="its rows cannot be counted, nor read forward",
                    fix="Give files, or rows in memory.",
                )
        return shards

    def load(self, shard: int, start: int, stop: int) -> Loaded:
        here = self._source.shards[shard]
        try:
            found = self._documents(shard, start, stop)
            bad = self._bad(shard, found.rejects)
        except Exception as error:
            at = f"{here.name}, {self.unit} {start}:{stop}"
            error.add_note(f"while streaming dataset {self.name!r}, {at}")
            raise
        batch, column = found.batch, found.batch.column(INPUT_IDS)
        offsets = np.asarray(column.offsets.to_numpy(), np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        rejects = Counter[str]()
        for reject in found.rejects:
            rejects[reject.reason] += reject.count
        # rows that became documents
        made = batch.num_rows - found.counts.lengths.get("pieces", 0)
        # some say only which rows they pass on
        if self.unit == "records" and here.num_rows is not None:
            rejects["other"] += stop - start - made - rejects.total()
        mask = (
            batch.column(LOSS_MASK).values.to_numpy()[first:last]
            if LOSS_MASK in batch.schema.names
            else None
        )
        return Loaded(
            ids=column.values.to_numpy()[first:last],
            offsets=offsets - first,
            has_eos=batch.column(HAS_EOS).to_numpy().astype(np.bool_),
            mask=None if mask is None else mask.astype(np.uint8),
            counts=replace(found.counts, rows=made + rejects.total(), rejects=+rejects),
            values={
                name: values_of(batch.column(name))[first:last]
                for name in info_of(self._source).aligned
            },
            num_bad=0 if self.max_bad_rows is None else len(bad),
            bad=tuple(
                (place_of(self._source, shard, reject.row), f"{reject.reason}: {reject.detail}")
                for reject in bad[:NAMED_ROWS]
            ),
            ended=here.num_rows is not None
            or (isinstance(self._source, Source) and self._source.at_end(shard, stop)),
        )

    def _documents(self, shard: int, start: int, stop: int) -> EncodedDocuments:
        encoded = cached_of(self._source)
        if encoded is not None:
            return encoded.documents(shard, start, stop, self._audit_key(shard, start, stop))
        batch, rejects = scan(self._source, shard, start, stop)
        return EncodedDocuments(batch, Counts(docs=batch.num_rows), rejects)

    def _audit_key(self, shard: int, start: int, stop: int) -> str | None:
        """Of so many chunks that about a thousandth of all text is encoded again with the
        reference; their places say which.
        """
        at, plain = self._source.shards[shard], stop - start
        if at.num_rows:  # where these are bytes, there are as many as at rest
            plain = at.num_bytes * plain // at.num_rows
        key = digest("audit a chunk", at.name, start)
        return (
            None if int(key, 16) % max(1, AUDITED_SHARE * AUDITED_BYTES // max(1, plain)) else key
        )

    def _bad(self, shard: int, rejects: Sequence[Reject]) -> list[Reject]:
        bad = list(bad_of(rejects))
        if bad and self._on_error == "error":
            raise SourceError(
                at=place_of(self._source, shard, bad[0].row),
                problem=f"{bad[0].reason}: {bad[0].detail}",
                fix=f"{advice(bad[0].reason)}, or set on_error to 'skip'.",
            )
        return bad
