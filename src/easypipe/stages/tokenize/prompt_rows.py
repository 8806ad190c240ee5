"""Conversations, prompts with completions, and rows through templates, as rows to tokenize: read,
written, with what is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.cache.encoder import EncodedDocuments
from easypipe.cache.ranges import BLANK_TEXTS
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, did_you_mean, place
from easypipe.core.protocols import Reject, ShardedSource, counted, scan
from easypipe.core.schema import ROW_NUMBER
from easypipe.stages.tokenize.text_rows import Texts
from easypipe.stages.tokenize.token_rows import encode_spans
from easypipe.transforms.chat.messages import decoded_of, plain_of
from easypipe.transforms.chat.render import (
    HostileTemplateError,
    Rendered,
)
from easypipe.transforms.chat.turns import CUT_BY
from easypipe.transforms.prompt.engine import PromptEngine
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.lengths import Lengths
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

ROWS_AT_A_TIME = 1000  # that are Python objects: Python looks through all there are again and again


def lengths_identity(lengths: Lengths | None) -> list[Any]:
    return [] if lengths is None else [lengths.identity]


class PromptForm:
    """Rows that a PromptEngine writes: conversations, prompts with completions, rows through a
    template.
    """

    masked, pairs = True, False

    def __init__(self, engine: PromptEngine, have: Sequence[str], room: int | None = None) -> None:
        """have: the columns of the source, of which the format may read some that others lack.
        room: tokens of a row of packing, for which conversations without a length of their own are
        cut between turns; None cuts none."""
        self.engine = engine
        # whether a room has an effect
        self.splits = engine.splits and _length(engine.tokenizer) is None
        self.room = room if self.splits else None
        format = engine.format
        rejected = engine.config.rejected_column
        self.columns = (
            *engine.columns,
            *(name for name in (*format.optional, *engine.verdicts) if name in have),
        )
        self._pair = [] if rejected is None else ["rejected", rejected]
        self.label = format.columns[0] if format.kind == "chat" else ", ".join(format.columns)

    def require(self, source: ShardedSource, dataset: str) -> None:
        for column in self.columns:
            at = place(f"dataset {dataset!r}", column=column)
            if column not in source.schema.names:
                fix = did_you_mean(column, source.schema.names) or "Name the column that holds it."
                raise SourceError(
                    at=at, problem="no such column", have=source.schema.names, fix=fix
                )
            kind = source.schema.field(column).type
            if column not in self.engine.verdicts and not self.engine.format.accepts(kind):
                wanted = ("lists of objects", "Give messages as [{role, content}, ...].")
                wanted = (
                    wanted
                    if self.engine.format.kind == "chat"
                    else ("text", "Name a column of text.")
                )
                raise SourceError(at=at, problem=f"holds {kind}, not {wanted[0]}", fix=wanted[1])

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        format = self.engine.format
        open_end = (
            ["cut ends are open"]
            if format.kind != "text" and _length(tokenizer) is not None
            else []
        )
        what = (
            format.kind,
            refuted,
            BLANK_TEXTS,
            tokenizer.fingerprint,
            _length(tokenizer),
            list(self.columns),
            format.identity,
        )
        cut = [] if self.room is None else [CUT_BY, 1, self.room]
        return digest(
            *what,
            *tokenizer.special.recipe,
            *lengths_identity(self.engine.lengths),
            *self._pair,
            *open_end,
            *cut,
        )

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts:
        """Raises TokenizerError naming the row on which a template went beyond its limits."""
        batch, rejects = scan(source, shard, start, stop)
        numbers = _numbers(batch, start)
        rendered: list[Rendered | Refused] = []
        of: list[int] = []
        # JSON of conversations is read by who renders them
        values = plain_of if self.engine.format.kind == "chat" else decoded_of
        for first in range(0, batch.num_rows, ROWS_AT_A_TIME):
            columns = [
                values(batch.column(name).slice(first, ROWS_AT_A_TIME)) for name in self.columns
            ]
            rows = [
                dict(zip(self.columns, values, strict=True))
                for values in zip(*columns, strict=True)
            ]
            try:
                some, of_some = self.written(rows, numbers[first : first + len(rows)])
            except HostileTemplateError as error:
                at = place(
                    source.shards[shard].name, row=numbers[first + error.row], column=self.label
                )
                raise type(error)(
                    at=at, problem=f"{error.at}: {error.problem}", fix=error.fix
                ) from None
            rendered += some
            of += of_some
        cut_by = (
            CUT_BY
            if self.room is not None
            else "trim_oldest_turns"
            if self.engine.format.kind == "chat"
            else "budgets"
        )
        return _texts(rendered, of, list(rejects), cut_by)

    def written(
        self, rows: Sequence[Mapping[str, Any]], numbers: Sequence[int]
    ) -> tuple[list[Rendered | Refused], list[int]]:
        """The texts of rows, and the number of the row that each is of."""
        if self.room is None:
            return self.engine.render_rows(rows), list(numbers)
        texts = self.engine.render_split(rows, self.room)
        return list(itertools.chain.from_iterable(texts)), [
            n for n, some in zip(numbers, texts, strict=True) for _ in some
        ]

    def encode(
        self,
        texts: Texts,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        at: str,
        audit_key: str | None = None,
    ) -> EncodedDocuments:
        raw, lengths = self.engine.format.raw, self.engine.lengths
        return encode_spans(
            texts,
            tokenizer,
            batch_size=batch_size,
            at=at,
            raw=raw,
            audit_key=audit_key,
            lengths=lengths,
        )


def _numbers(batch: pa.RecordBatch, start: int) -> list[int]:
    if ROW_NUMBER in batch.schema.names:
        return batch.column(ROW_NUMBER).to_pylist()
    return list(range(start, start + batch.num_rows))


def _length(tokenizer: Tokenizer) -> int | None:
    return tokenizer.config.max_length if tokenizer.config.truncation else None


def _texts(
    rendered: Sequence[Rendered | Refused], rows: Sequence[int], rejects: list[Reject], cut_by: str
) -> Texts:
    found = [
        (row, item) for row, item in zip(rows, rendered, strict=True) if isinstance(item, Rendered)
    ]
    rejects += [
        item.of_row(row)
        for row, item in zip(rows, rendered, strict=True)
        if isinstance(item, Refused)
    ]
    spans = [item.spans for _, item in found]
    return Texts(
        texts=pa.array([item.text for _, item in found], pa.large_string()),
        rows=np.array([row for row, _ in found], np.int64),
        rejects=counted(rejects),
        spans=spans,
        ends=np.array([item.end for _, item in found], np.uint8),
        lost=np.array([item.lost for _, item in found], np.int64)
        if any(item.lost for _, item in found)
        else None,
        cut_by=cut_by,
        goes_on=np.array([item.goes_on for _, item in found], np.bool_)
        if any(item.goes_on for _, item in found)
        else None,
    )
