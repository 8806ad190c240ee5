"""The folders that `save()` wrote: the manifest's content and checks, and reading the rows again.

```text
part-<run>-00000-of-00004.parquet …   the shards, each committed on its own
_easypipe-run.json, _shards/…         only during a run: its claim, records of finished shards
_easypipe.json                        the manifest, committed last; missing if the run is unfinished
```
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NotRequired

import numpy as np
import pyarrow as pa
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from easypipe.cache.verify import wrong_bytes
from easypipe.core import storage
from easypipe.core.checked import read_checked, shaped
from easypipe.core.errors import CacheError, DamagedFileError, MissingFileError
from easypipe.core.protocols import (
    Shard,
    Source,
    SourceInfo,
    TokenInfo,
    Turns,
    fetched,
)
from easypipe.core.remote import StorageOptions
from easypipe.core.schema import (
    INPUT_IDS,
    SEGMENT_IDS,
    schema_of_text,
    schema_text,
    without_row_numbers,
)
from easypipe.core.values import JsonObject
from easypipe.sources.base import FileSource
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.open import open_files
from easypipe.sources.refs import format_of

MANIFEST = "_easypipe.json"
REMAKE = "Save the data again, with overwrite=True."
FORMAT_VERSION = 1
EMPTY_BYTES = 20  # the most that a codec of JSON lines writes for no rows

_KEYS = (
    "format_version", "fingerprint", "format", "compression", "schema", "columns", "num_rows",
    "num_tokens", "tokens", "shards", "ledger",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SavedShard:
    """One file of a saved folder, as described in the manifest.

    Attributes:
        name: The name of the file.
        num_rows: The number of its rows.
        num_tokens: The number of their tokens, without padding.
        num_bytes: The size of the file.
        checksum: The checksum of the file.
        rejected: Rows of the source that were not written, by reason.
    """

    name: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    checksum: str
    rejected: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_read(self) -> int:
        """The number of rows of the source, written or not."""
        return self.num_rows + sum(self.rejected.values())


@dataclass(frozen=True, kw_only=True)
class SavedManifest:
    """The manifest of a saved folder.

    Attributes:
        fingerprint: The identity of the rows and of how they are saved.
        format: parquet, arrow or jsonl.
        compression: The codec.
        schema: The columns of the rows.
        tokens: What is known of their tokenizer.
        shards: The files, in order.
        ledger: The balances of rows and tokens.
        turns: How their conversations are rendered.
        aligned: Columns with values for every token.
    """

    fingerprint: str
    format: str
    compression: str
    schema: pa.Schema
    tokens: TokenInfo | None
    shards: tuple[SavedShard, ...]
    ledger: JsonObject
    turns: Turns | None = None
    aligned: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def readable(self) -> tuple[SavedShard, ...]:
        """The shards that can be opened: JSON lines without a row are an empty file."""
        lines = self.format == "jsonl"
        empty = [lines and not one.num_rows and one.num_bytes <= EMPTY_BYTES for one in self.shards]
        return tuple(one for one, nothing in zip(self.shards, empty, strict=True) if not nothing)

    @property
    def rejected(self) -> Mapping[str, int]:
        """Rows of the source that were not written, by reason."""
        counts = Counter[str]()
        for shard in self.shards:
            counts.update(shard.rejected)
        return counts

    @property
    def edges(self) -> tuple[int, ...]:
        """Row numbers of the source at which the shards begin, and the end."""
        rows = (shard.num_read for shard in self.shards)
        return tuple(itertools.accumulate(rows, initial=0))

    def to_json(self) -> JsonObject:
        """Returns the manifest as it is written."""
        return {
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "format": self.format,
            "compression": self.compression,
            "schema": schema_text(self.schema),
            "columns": {field.name: str(field.type) for field in self.schema},
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "tokens": None if self.tokens is None else asdict(self.tokens),
            **({} if self.turns is None else {"turns": asdict(self.turns)}),
            **({"aligned": list(self.aligned)} if self.aligned else {}),
            "shards": [asdict(shard) for shard in self.shards],
            "ledger": self.ledger,
        }


def count_tokens(batch: pa.RecordBatch) -> int:
    """Returns the tokens of a batch, without padding."""
    if SEGMENT_IDS in batch.schema.names:
        segments = batch.column(SEGMENT_IDS).flatten().to_numpy(zero_copy_only=False)
        return int(np.count_nonzero(segments))
    return len(batch.column(INPUT_IDS).flatten()) if INPUT_IDS in batch.schema.names else 0


def join(folder: str | Path, name: str) -> str:
    return f"{str(folder).rstrip('/')}/{name}"


def is_saved(path: str | Path, storage_options: StorageOptions = None) -> bool:
    """Whether a folder or URL is a complete saved folder."""
    url = str(path)
    named = url.startswith(("http://", "https://", "hf://")) and format_of(url) is not None
    if storage.is_remote(path) and (named or any(c in url for c in "*?[")):
        # A pattern, or a file where nothing is saved, is not a folder: no server need be asked.
        return False
    if storage.is_remote(path):
        storage.filesystem(path, storage_options)  # its errors name the URL, not the manifest
    return storage.exists(join(path, MANIFEST), storage_options)


def read_manifest(folder: str | Path, storage_options: StorageOptions = None) -> SavedManifest:
    """Reads the manifest of a saved folder.

    Raises:
        CacheError: It is of another version, damaged, or not a manifest.
    """
    path = join(folder, MANIFEST)
    try:
        text = read_checked(path, storage_options, older=_KEYS)
    except DamagedFileError as error:
        raise CacheError(at=path, problem=error.problem, fix=REMAKE) from None
    version = text.get("format_version")
    if version != FORMAT_VERSION:
        raise CacheError(
            at=path,
            problem=f"format version {version!r}, this easypipe reads {FORMAT_VERSION}",
            fix="Save the data again.",
        )
    try:
        found = shaped(_Shape, text)
        outside = [one.name for one in found["shards"] if not storage.is_inside(one.name)]
        if outside:
            raise ValueError(f"{outside[0]!r} is not a file of this folder")
        schema, aligned = schema_of_text(found["schema"]), found.get("aligned", ())
        if not {*aligned} <= {*schema.names}:
            raise ValueError(f"{[*aligned]} are not columns of its schema")
        told = found["num_rows"], found["num_tokens"]
        rows, tokens = (
            sum(one.num_rows for one in found["shards"]),
            sum(one.num_tokens for one in found["shards"]),
        )
        if told != (rows, tokens):
            raise ValueError(
                f"{told[0]} rows of {told[1]} tokens, its shards have {rows} of {tokens}"
            )
        return SavedManifest(
            fingerprint=found["fingerprint"],
            format=found["format"],
            compression=found["compression"],
            schema=schema,
            tokens=found["tokens"],
            shards=found["shards"],
            ledger=text["ledger"],
            turns=found.get("turns"),
            aligned=aligned,
        )
    except (ValueError, pa.ArrowException) as error:
        raise CacheError(
            at=path, problem=f"damaged: {error}", fix="Save the data again."
        ) from error


_Entry = TypedDict(
    "_Entry",
    {"stage": str, "dataset": str, "unit": str, "in": dict[str, int], "out": dict[str, int]},
)


class _Ledger(TypedDict):
    entries: list[_Entry]


class _Shape(TypedDict):
    """A manifest, as written by `SavedManifest.to_json`."""

    fingerprint: str
    format: Literal["parquet", "arrow", "jsonl"]
    compression: str
    schema: str
    num_rows: int
    num_tokens: int
    tokens: TokenInfo | None
    turns: NotRequired[Turns]  # only for conversations, because it is exported with the model
    aligned: NotRequired[tuple[str, ...]]
    shards: tuple[SavedShard, ...]
    ledger: _Ledger


class SavedSource(Source):
    """The rows of a saved folder, in the columns and types they were saved with.

    The checksum of a local shard is compared before its first row is read, once in a process.

    Raises:
        CacheError: A shard is missing, or its size differs from the manifest.
    """

    def __init__(self, folder: str | Path, storage_options: StorageOptions = None) -> None:
        self.folder = str(folder)
        self.manifest = read_manifest(folder, storage_options)
        self.tokens = self.manifest.tokens
        self.schema = without_row_numbers(self.manifest.schema)  # earlier versions saved them
        self.fingerprint = self.manifest.fingerprint
        for shard in self.manifest.shards:
            _check_size(join(folder, shard.name), shard.num_bytes, storage_options)
        self.saved = self.manifest.readable or self.manifest.shards[:1]
        paths = [join(folder, shard.name) for shard in self.manifest.readable]
        kind = "json" if self.manifest.format == "jsonl" else self.manifest.format
        self._files: FileSource | InMemoryShardedSource = (
            open_files(paths, type=kind, storage_options=storage_options)
            if paths
            else InMemoryShardedSource(self.schema.empty_table(), name=self.saved[0].name)
        )
        self.waits = self._files.waits
        self._sound = [storage.is_remote(join(folder, shard.name)) for shard in self.saved]
        self._locks = [threading.Lock() for _ in self.saved]

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(
            tokens=self.tokens,
            num_tokens=self.manifest.num_tokens,
            turns=self.manifest.turns,
            aligned=self.manifest.aligned,
        )

    @property
    def packed(self) -> bool:
        """Whether the rows are packed."""
        return SEGMENT_IDS in self.schema.names

    @property
    def shards(self) -> tuple[Shard, ...]:
        files = self._files.shards
        for shard, saved in zip(files, self.saved, strict=True):
            if shard.num_rows not in (None, saved.num_rows):
                raise CacheError(
                    at=join(self.folder, saved.name),
                    problem=f"{shard.num_rows} rows, the manifest says {saved.num_rows}",
                    fix=REMAKE,
                )
        return tuple(
            Shard(
                name=shard.name, num_rows=saved.num_rows, cuts=shard.cuts, num_bytes=saved.num_bytes
            )
            for shard, saved in zip(files, self.saved, strict=True)
        )

    def shard_identity(self, shard: int) -> str:
        return self.saved[shard].checksum

    def fetched(self, shard: int, start: int, stop: int) -> AbstractContextManager[None]:
        return fetched(self._files, shard, start, stop)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        if not self._sound[shard]:
            self._require_sound(shard)
        batch = self._files.read(shard, start, stop)
        # JSON knows only int64 and string
        columns = [batch.column(field.name).cast(field.type) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _require_sound(self, shard: int) -> None:
        saved = self.saved[shard]
        with self._locks[shard]:
            path = join(self.folder, saved.name).removeprefix("file://")
            wrong = wrong_bytes(path, saved.num_bytes, saved.checksum, None)
            if wrong is not None:
                raise CacheError(at=path, problem=wrong, fix=REMAKE)
            self._sound[shard] = True


def load_saved(path: str | Path, storage_options: StorageOptions = None) -> SavedSource:
    """Returns the rows that `save()` wrote to `path`, in their columns and types.

    A `DatasetConfig(data_files=path)` reads the same rows in a Pipeline, in which `tokenize()` does
    not change tokens.

    Args:
        path: A folder or URL, also `hf://datasets/user/name`.
        storage_options: Passed to fsspec, for a URL.

    Raises:
        MissingFileError: There is no complete saved folder, or a shard is missing.
        CacheError: The size of a shard differs from the manifest, or the manifest is of another
            version.
    """
    if storage.exists(join(path, MANIFEST), storage_options):
        return SavedSource(path, storage_options)
    names = storage.names_in(path, storage_options)
    below = [
        name for name in names if storage.exists(join(join(path, name), MANIFEST), storage_options)
    ]
    if below:
        raise MissingFileError(
            at=str(path),
            problem="holds several saved folders, not one",
            have=below,
            fix="Load one of these.",
        )
    unfinished = "_easypipe-run.json" in names
    fix = (
        "Run the job that writes it again: it continues."
        if unfinished
        else "Give the folder that save() wrote."
    )
    raise MissingFileError(
        at=str(path), problem=f"is not a complete saved folder: it has no {MANIFEST}", fix=fix
    )


def _check_size(path: str, num_bytes: int, storage_options: StorageOptions) -> None:
    """Raises an error if a shard is missing or has a different size."""
    size = storage.size_of(path, storage_options)
    if size is None:
        raise MissingFileError(
            at=path, problem="named by the manifest, but not there", fix="Save the data again."
        )
    if size != num_bytes:
        raise CacheError(
            at=path,
            problem=f"{size} bytes, the manifest says {num_bytes}",
            fix=REMAKE,
        )
