"""Cutting a source into ranges of rows, and the record that commits what a range became.

range   rows of one shard that are tokenized, stored and committed together
recipe  digest of everything that decides tokens but the text: cache format, tokenizer, length,
column key     digest of recipe, shard identity and rows: what a range is known by while its file does not change
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import FORMAT, Part, check_format
from easypipe.core.checked import commit_checked, recall_checked
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, place
from easypipe.core.protocols import Reject, Shard, ShardedSource
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

# Bytes at rest of one range. Small files are cut finer, so that every worker has some; how a file
# is cut follows from that file alone.
LEAST_BYTES = 4 << 20
MOST_BYTES = 8 << 20
PIECES = 16
ROWS_OF_UNKNOWN_SIZE = 1 << 16
BLANK_TEXTS = "blank texts skipped"  # in recipes: older caches may hold texts of white space alone


@dataclass(frozen=True)
class Range:
    shard: int
    start: int
    stop: int
    key: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a range became. rows + pieces = docs + rejects; encoded + added + overlap = tokens +
    truncated.
    """

    shard_name: str
    start: int
    stop: int
    docs: int
    tokens: int
    encoded: int
    added: int
    truncated: int
    text: str  # XXH3-128 of the texts and their row numbers
    text_bytes: int
    content: str  # see sources.manifest.Part
    file: str = ""
    num_bytes: int = 0
    checksum: str = ""
    blocks: str = ""
    encoder: str = ""
    rejects: tuple[Reject, ...] = ()
    trained: int | None = None  # stored tokens that are targets; None where every one is
    special: int = 0  # special strings in the texts that became special tokens ...
    escaped: int = 0  # ... and those that became ordinary text
    lost: int = 0  # characters of the texts that became no token
    # documents over max_length, by policy; see lengths.Shaped
    lengths: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def part(self, shard: int) -> Part:
        return Part(
            shard=shard, start=self.start, stop=self.stop, docs=self.docs, tokens=self.tokens, file=self.file,
            num_bytes=self.num_bytes, checksum=self.checksum, blocks=self.blocks, content=self.content,
        )  # fmt: skip


def recipe_of(tokenizer: Tokenizer, content_field: str, *, refuted: bool) -> str:
    """refuted: gigatoken wrote wrong tokens for this tokenizer into this cache; what it wrote then
    has another name.
    """
    limit, special = tokenizer.content_limit, tokenizer.special.recipe
    return digest(
        "recipe",
        FORMAT,
        tokenizer.fingerprint,
        limit,
        content_field,
        refuted,
        BLANK_TEXTS,
        *special,
    )


def shard_identity(source: ShardedSource, shard: int) -> str:
    own = getattr(source, "shard_identity", None)
    return own(shard) if own is not None else digest(source.fingerprint, source.shards[shard].name)


def ranges_of(source: ShardedSource, recipe: str) -> list[Range]:
    """All rows of the source, in order. Raises SourceError for a shard whose rows cannot be
    counted.
    """
    found = []
    for shard, info in enumerate(source.shards):
        identity = shard_identity(source, shard)
        found += [Range(shard, a, b, digest("range", recipe, identity, a, b)) for a, b in cut(info)]
    return found


def cut(info: Shard) -> Iterator[tuple[int, int]]:
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
    """0 to `rows` in steps of about `step`, at a cheap cut where one is near enough."""
    at = 0
    while at < rows:
        yield at
        after = bisect.bisect_right(cuts, at + step)
        near = min(
            cuts[max(0, after - 1) : after + 1], key=lambda cut: abs(cut - at - step), default=0
        )
        at = near if at + (step + 1) // 2 <= near <= at + step + step // 2 else at + step
    yield rows


def record_path(folder: CacheFolder, recipe: str, key: str) -> Path | str:
    return folder.at("ranges", recipe, f"{key}.json")


def write_record(
    path: Path | str, record: Record, storage_options: dict[str, Any] | None = None
) -> None:
    commit_checked(path, dataclasses.asdict(record), storage_options)


def read_record(path: Path | str, storage_options: dict[str, Any] | None = None) -> Record | None:
    """None where there is none, or, with a warning, a damaged one: the text is then read again, and
    its tokens are found by its content.
    """

    def record(values: dict[str, Any]) -> Record:
        check_format(values, path)
        return Record(
            **{**values, "rejects": tuple(Reject(**reject) for reject in values["rejects"])}
        )

    return recall_checked(
        path, record, what="the record of a range of rows", storage_options=storage_options
    )
