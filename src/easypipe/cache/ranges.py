"""Cuts a source into ranges of rows, by how many bytes; the records that commit each range.

range   rows of one shard that are tokenized, stored and committed together
recipe  the encoding key: a digest of everything that decides tokens except the text, such as cache
        format, tokenizer, length and column
key     a digest of recipe, shard identity and rows, which identifies a range while its file does
        not change
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from easypipe.cache.blocks import sums_of
from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import FORMAT, Counts, Part, check_format
from easypipe.core.checked import recall_checked, remember_checked, shaped
from easypipe.core.config import digest, fields_of, to_dict
from easypipe.core.errors import SourceError, place
from easypipe.core.protocols import Reject, Shard, ShardedSource, counted, identity_of
from easypipe.core.remote import StorageOptions
from easypipe.core.storage import is_inside
from easypipe.core.values import Json, JsonObject

# Stored bytes of one range. Small files are cut into smaller ranges, so that every worker gets
# some. How a file is cut depends on that file alone.
LEAST_BYTES = 4 << 20
MOST_BYTES = 8 << 20
PIECES = 16
ROWS_OF_UNKNOWN_SIZE = 1 << 16
# part of recipes since blank texts are skipped, because older caches may hold such texts
BLANK_TEXTS = "blank texts skipped"


@dataclass(frozen=True)
class Range:
    """The rows `start` to `stop` of a shard; recipe and key are explained above."""

    shard: int
    start: int
    stop: int
    recipe: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of tokenizing a range; on disk, the commit of that range.

    On disk, all of it is one object, with `rejects` in place of `counts.rejects`.

    Args:
        part: Its documents.
        counts: The fate of its rows and tokens.
        rejects: The rejected rows.
        shard_name: The name of the shard.
        text: XXH3-128 of the texts and their row numbers.
        text_bytes: The bytes of the texts.
        encoder: The name of the library that encoded them.
    """

    part: Part
    counts: Counts
    rejects: tuple[Reject, ...]
    shard_name: str
    text: str
    text_bytes: int
    encoder: str = ""


def ranges_of(source: ShardedSource, recipe: str) -> list[Range]:
    """Returns all rows of the source as ranges, in order.

    Raises:
        SourceError: The rows of a shard cannot be counted.
    """
    found: list[Range] = []
    for shard, info in enumerate(source.shards):
        identity = identity_of(source, shard)
        for a, b in cut(info):
            key = digest("range", recipe, identity, a, b)
            found.append(Range(shard, a, b, recipe, key))
    return found


def cut(info: Shard) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of the ranges of a shard.

    Raises:
        SourceError: Its rows cannot be counted.
    """
    if info.num_rows is None:
        raise SourceError(
            at=place(info.name),
            problem="its rows cannot be counted",
            fix="A token cache needs a source that knows num_rows.",
        )
    rows = info.num_rows
    wanted = min(max(info.num_bytes // PIECES, LEAST_BYTES), MOST_BYTES)
    step = max(1, wanted * rows // info.num_bytes) if info.num_bytes else ROWS_OF_UNKNOWN_SIZE
    yield from itertools.pairwise(_edges(info.cuts, rows, step))


def _edges(cuts: Sequence[int], rows: int, step: int) -> Iterator[int]:
    """Yields row numbers from 0 to `rows` in steps of about `step`, at cheap cuts near enough."""
    at = 0
    while at < rows:
        yield at
        after = bisect.bisect_right(cuts, at + step)
        near = min(
            cuts[max(0, after - 1) : after + 1], key=lambda cut: abs(cut - at - step), default=0
        )
        at = near if at + (step + 1) // 2 <= near <= at + step + step // 2 else at + step
    yield rows


def kept_rejects(rejects: Iterable[Reject]) -> tuple[Reject, ...]:
    """Returns the rejects of one range as its record stores them.

    Benign rejects are counted; consecutive bad rows with one reason and detail become one Reject
    with their `count`.
    """
    kept: list[Reject] = []
    for reject in counted(rejects):
        before = kept[-1] if kept and not reject.benign else None
        if before is not None and reject == dataclasses.replace(
            before, row=before.row + before.count, count=reject.count
        ):
            kept[-1] = dataclasses.replace(before, count=before.count + reject.count)
        else:
            kept.append(reject)
    return tuple(kept)


def record_path(folder: CacheFolder, piece: Range) -> Path | str:
    """Returns where the record of a range is stored."""
    return folder.at("ranges", piece.recipe, f"{piece.key}.json")


def write_record(path: Path | str, record: Record, storage_options: StorageOptions = None) -> None:
    """Commits the record of a range."""
    values = {
        **counts_json(record.counts),
        **fields_of(record.part),
        "rejects": to_dict(record.rejects),
        "shard_name": record.shard_name,
        "text": record.text,
        "text_bytes": record.text_bytes,
        "encoder": record.encoder,
        "format": FORMAT,
    }
    del values["shard"]  # it changes when another file is added before this one
    remember_checked(path, values, storage_options)


def read_record(
    path: Path | str, shard: int = 0, storage_options: StorageOptions = None
) -> Record | None:
    """Returns the record at `path`; None if there is none or, with a warning, if it is damaged.

    The text is then read again, and its tokens are found by its content.

    Args:
        path: The record.
        shard: The number that the range's shard has now.
        storage_options: Passed to fsspec.
    """

    def record(values: JsonObject) -> Record:
        check_format(values, path)
        found = record_of({**values, "shard": shard})
        if any(entry.leak for entry in found.counts.ledger("", {}).entries):
            raise ValueError("its counts do not add up")
        if (found.part.docs, found.part.tokens) != (found.counts.docs, found.counts.tokens):
            raise ValueError("its part holds other documents than are counted")
        if not all(
            found.part.start <= one.row <= found.part.stop - one.count for one in found.rejects
        ):
            raise ValueError("it rejects rows that it does not have")
        if found.part.file and not is_inside(found.part.file):
            raise ValueError(f"{found.part.file!r} is not a file of this cache")
        if bool(found.part.docs) != bool(found.part.file):
            raise ValueError("it has documents and no file, or a file without documents")
        sums_of(found.part, found.part.file)
        return found

    return recall_checked(
        path, record, what="the record of a range of rows", storage_options=storage_options
    )


def record_of(values: Json, more: Sequence[Reject] = ()) -> Record:
    """Returns the record that the values of a JSON object describe.

    Args:
        values: The stored values.
        more: Rejects that they lack.

    Raises:
        KeyError: A value is missing.
        TypeError: A value has the wrong type.
        ValueError: A value has the wrong type or is impossible.
    """
    rejects = (*more, *(shaped(Reject, reject) for reject in values["rejects"]))
    reasons = Counter[str]()
    for reject in rejects:
        reasons[reject.reason] += reject.count
    rows = values["stop"] - values["start"]
    found = {
        "part": shaped(Part, {name: values[name] for name in _PART if name in values}),
        "counts": dataclasses.replace(counts_of(values), rows=rows, rejects=dict(reasons)),
        "rejects": rejects,
        "encoder": values.get("encoder", ""),
    }
    return shaped(
        Record, found | {name: values[name] for name in ("shard_name", "text", "text_bytes")}
    )


def counts_json(counts: Counts) -> JsonObject:
    """Returns the counts that a token file and the record of its range store."""
    values = fields_of(counts)
    return {name: values[name] for name in _COUNTS if values[name] is not None}


def counts_of(values: Json) -> Counts:
    """Returns the counts that `counts_json` returned, without rows and their rejects."""
    return shaped(Counts, {name: values[name] for name in _COUNTS if name in values})


_PART = tuple(entry.name for entry in dataclasses.fields(Part))
_COUNTS = tuple(
    entry.name for entry in dataclasses.fields(Counts) if entry.name not in ("rows", "rejects")
)
