"""Reads the texts of a range of rows; says which rows have none, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.core.errors import SourceError, place, require_known
from easypipe.core.protocols import Reject, ShardedSource, counted, info_of, left_out, scan
from easypipe.core.schema import data_columns, row_numbers
from easypipe.core.text import bytes_of, has_text, not_utf8
from easypipe.core.values import Bools, Int64, UInt8
from easypipe.transforms.chat.columns import is_text
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.refused import EMPTY, Refused


@dataclass(frozen=True)
class Texts:
    """Rows `start` to `stop` of a shard that hold text.

    Attributes:
        texts: The texts, large_string without nulls or blank texts.
        rows: Int64[n], the numbers of their rows in the shard.
        rejects: The other rows, ascending.
        spans: The character ranges of each text that are trained on; None: all texts as a whole.
        ends: UInt8[n], what follows each text (transforms/tokenizer/masked.py).
        lost: Int64[n], how many tokens each text lost when it was rendered; a negative number
            counts tokens that another text of the row also has. None if no text was cut.
        cut_by: What cut the texts, as the ledger names it.
        goes_on: Bool[n], whether the row continues in another text; None if no row has several.
        desirable: UInt8[n], 1 if the answer is desirable; None if the data does not say.
        pieces: How many more texts there are than rows, with those that were refused.
    """

    texts: pa.LargeStringArray
    rows: Int64
    rejects: tuple[Reject, ...]
    spans: Sequence[Sequence[Sequence[int]]] | None = None
    ends: UInt8 | None = None
    lost: Int64 | None = None
    cut_by: str = ""
    goes_on: Bools | None = None
    desirable: UInt8 | None = None
    pieces: int = 0

    def content_hash(self) -> str:
        """Returns the XXH3-128 of texts and row numbers, independent of their buffers."""
        hasher = xxhash.xxh3_128()
        hasher.update(self.rows.data)
        if len(self.texts):
            ends, data = bytes_of(self.texts)
            hasher.update((ends - ends[0]).data)
            hasher.update(data[ends[0] : ends[-1]].data)
        if self.spans is not None and self.ends is not None:
            hasher.update(json.dumps([self.spans, self.ends.tolist()]).encode())
        if self.lost is not None:
            hasher.update(json.dumps(self.lost.tolist()).encode())
        if self.goes_on is not None:
            hasher.update(json.dumps(self.goes_on.tolist()).encode())
        if self.desirable is not None:
            hasher.update(self.desirable.data)
        return hasher.hexdigest()

    def take(self, which: Int64) -> Texts:
        """Returns the texts with these numbers (Int64[m]); none may continue in another."""
        return Texts(
            texts=self.texts.take(pa.array(which)),
            rows=self.rows[which],
            rejects=(),
            spans=None if self.spans is None else [self.spans[i] for i in which.tolist()],
            ends=None if self.ends is None else self.ends[which],
            lost=None if self.lost is None else self.lost[which],
            cut_by=self.cut_by,
        )

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def num_bytes(self) -> int:
        """The bytes of all texts in UTF-8."""
        ends, _ = bytes_of(self.texts)
        return int(ends[-1] - ends[0])


def texts_of(
    rendered: Sequence[Rendered | Refused],
    rows: Sequence[int],
    rejects: Sequence[Reject] = (),
    cut_by: str = "",
    *,
    plain: bool = False,
) -> Texts:
    """Makes Texts from rendered rows.

    Args:
        rendered: The text of each row, or why it has none.
        rows: The numbers of the rows.
        rejects: Rows that were rejected earlier.
        cut_by: What cut the texts.
        plain: Whether texts are trained on as a whole.
    """
    pairs = list(zip(rows, rendered, strict=True))
    found = [one for _, one in pairs if isinstance(one, Rendered)]
    numbers = [row for row, one in pairs if isinstance(one, Rendered)]
    refused = [one.of_row(row) for row, one in pairs if isinstance(one, Refused)]
    lost, goes_on = [one.lost for one in found], [one.goes_on for one in found]
    return Texts(
        texts=pa.array([one.text for one in found], pa.large_string()),
        rows=np.array(numbers, np.int64),
        rejects=counted([*rejects, *refused]),
        spans=None if plain else [one.spans for one in found],
        ends=None if plain else np.array([one.end for one in found], np.uint8),
        lost=np.array(lost, np.int64) if any(lost) else None,
        cut_by=cut_by,
        goes_on=np.array(goes_on, np.bool_) if any(goes_on) else None,
        pieces=len(rows) - len(set(rows)),
    )


def require_text(source: ShardedSource, content_field: str, dataset: str) -> None:
    """Checks that a column exists and can hold text; it reads no rows.

    Raises:
        SourceError: It does not.
    """
    schema = source.schema
    columns = data_columns(schema)
    at = place(f"dataset {dataset!r}", column=content_field)
    if content_field not in columns and content_field.partition(".")[0] in columns:
        extract = f'pipeline.transform(Extract({{"text": "{content_field}"}}))'
        fix = f'Take it out of its column first, {extract}, and set content_field to "text".'
        raise SourceError(at=at, problem="no such column", have=columns, fix=fix)
    if any(content_field in name.split(";") for name in columns if content_field != name):
        fix = "Write the CSV file with commas, or as .tsv with tabs: it seems to have semicolons."
        raise SourceError(at=at, problem="no such column", have=columns, fix=fix)
    fix = "Set content_field to the column that holds the text."
    require_known(content_field, columns, at, "no such column", fix, SourceError)
    kind = schema.field(content_field).type
    if not is_text(kind) and not pa.types.is_null(kind):
        texts = [field.name for field in schema if is_text(field.type)]
        raise SourceError(
            at=at,
            problem=f"holds {kind}, not text; columns of text",
            have=texts,
            fix="Set content_field to one of them.",
        )


def read_texts(
    source: ShardedSource,
    shard: int,
    start: int,
    stop: int,
    content_field: str,
    *,
    blanks: bool = False,
) -> Texts:
    """Reads the texts of rows `start` to `stop`, and why other rows have none.

    Args:
        content_field: The column of text.
        blanks: Whether texts of only white space are also documents; empty ones never are.

    Raises:
        EasypipeError: The source raises it for a row.
    """
    batch, rejects = scan(source, shard, start, stop)
    rows = row_numbers(batch, start)
    column = batch.column(content_field)
    bad: list[Reject] = []
    if is_text(column.type):
        column = column.cast(pa.large_string())
        bad += [
            Reject(row=int(rows[i]), reason="invalid_utf8", detail="not UTF-8")
            for i in (() if info_of(source).checks_text else not_utf8(column))
        ]
    else:
        bad += [
            Reject(row=int(row), reason="not_a_string", detail=f"{column.type}, not text")
            for row, valid in zip(rows.tolist(), column.is_valid().to_pylist(), strict=True)
            if valid
        ]
    missing = column.is_null().to_numpy(zero_copy_only=False)
    empty = np.zeros(len(column), np.bool_)
    if is_text(column.type):
        ends, _ = bytes_of(column)
        empty = (np.diff(ends) == 0 if blanks else ~has_text(column)) & ~missing
    bad += [Reject(row=int(row), reason="null", detail="no value") for row in rows[missing]]
    if not bad and not empty.any():
        return Texts(column, rows, counted(rejects))
    keep = ~np.isin(rows, np.array([reject.row for reject in bad], np.int64)) & ~empty
    bad += left_out(rows[empty], EMPTY, "an empty text")
    texts = (
        column.filter(pa.array(keep)) if is_text(column.type) else pa.array([], pa.large_string())
    )
    return Texts(texts, rows[keep], counted((*rejects, *bad)))
