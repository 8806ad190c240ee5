"""HuggingFaceShardedSource: a Hub dataset, by its `hf://` name, as plain files at one commit.

The revision is resolved to a commit when the source is made. Parquet and Arrow files are read by
ranges, so that only the columns and rows that are asked for are transferred. Other formats are
needed whole, and are downloaded once into the Hub client's own cache. A file that is in that cache
is read there, whatever its format.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import SourceError, require
from easypipe.core.protocols import Scan, Shard, Source
from easypipe.core.threads import each
from easypipe.core.values import Arguments
from easypipe.sources.base import READER_VERSION, FileOptions, FileSource
from easypipe.sources.formats.jsonlines import JsonShardedSource
from easypipe.sources.formats.txt import TextUnit
from easypipe.sources.hub.layout import choose_files, partial_note
from easypipe.sources.hub.repo import BY_RANGES, HubRepo
from easypipe.sources.open import FORMATS, require_text_files
from easypipe.sources.refs import FileRef, format_of

log = logging.getLogger("easypipe")

DOWNLOADS = 8  # how many files are downloaded at a time


class HubName(NamedTuple):
    """The parts of `hf://datasets/owner/name@revision/pattern`."""

    repo: str
    revision: str | None
    pattern: str | None


def parse_hub_name(text: str) -> HubName:
    """Parses `owner/name` or `hf://datasets/owner/name[@revision][/pattern]`.

    Raises:
        ConfigError: The text is anything else.
    """
    rest = text.removeprefix("hf://")
    if rest != text:
        require(
            rest.startswith("datasets/"),
            "data_files",
            f"{text!r} does not name a dataset",
            "Write hf://datasets/owner/name, or hf://datasets/owner/name/*.parquet.",
        )
        rest = rest.removeprefix("datasets/")
    parts = rest.strip("/").split("/")
    require(
        rest != text or len(parts) <= 2,
        "data_files",
        f"{text!r} names no dataset of the Hub",
        "Write owner/name, or hf://datasets/owner/name/*.parquet.",
    )
    name, pattern = "/".join(parts[:2]), "/".join(parts[2:])
    repo, at, revision = name.partition("@")
    require(
        all(repo.split("/")) and (not at or revision),
        "data_files",
        f"{text!r} names no dataset of the Hub",
        "Write owner/name.",
    )
    return HubName(repo, revision.replace("%2F", "/") or None, pattern or None)


class HuggingFaceShardedSource(Source):
    """The rows of one split of a dataset on the Hub, one shard per file, at one `commit`.

    Args:
        dataset: `owner/name`, or `hf://datasets/owner/name[@revision][/pattern]`.
        split: None takes `train`; with a pattern there is no split.
        subset: A configuration in the dataset's card or folders; None takes the default.
        revision: Branch, tag or commit; None takes main.
        num_rows: The most rows that are read; files after them are not opened.
        text_unit: As in TextShardedSource.
        options: Those of FileSource. `storage_options` may have `token` (None: HF_TOKEN, or the
            login of the Hub's client) and `endpoint` (None: HF_ENDPOINT).

    Raises:
        MissingFileError: The dataset, revision, subset or split does not exist.
        SourceError: The dataset is gated (the error names the page of its licence), or the files of
            a split have several formats.
    """

    _exact: Sequence[str] = ()  # the columns of Source.exactly

    def __init__(
        self,
        dataset: str,
        *,
        split: str | None = None,
        subset: str | None = None,
        revision: str | None = None,
        num_rows: int | None = None,
        text_unit: TextUnit | None = None,
        **options: Unpack[FileOptions],
    ) -> None:
        name = parse_hub_name(dataset)
        same = not name.revision or not revision or name.revision == revision
        problem = f"{revision!r}, but data_files says {name.revision!r}"
        require(same, "revision", problem, "Leave one of them out.")
        require(
            not name.pattern or (not split and not subset),
            "split" if split else "subset",
            "has no effect together with a pattern",
            "Leave it or the pattern out.",
        )
        self._hub = HubRepo(name.repo, options.get("storage_options"))
        self.repo, self.subset = name.repo, subset
        self.split = split or (None if name.pattern else "train")
        self._num_rows = num_rows
        # storage_options are for the Hub's client, which says where the files are
        self._made: Arguments = {"on_error": "error", **options}
        self._made.pop("storage_options", None)
        self._lock = threading.Lock()
        self._rows: FileSource | None = None
        revision = name.revision or revision
        listing = self._hub.listing(revision)
        self.commit = listing.commit
        names = choose_files(
            list(listing.sizes),
            listing.card,
            at=self._hub.at,
            pattern=name.pattern,
            subset=subset,
            split=self.split,
            converted=listing.converted,
        )
        if listing.converted and (note := partial_note(names)) is not None:
            log.warning("%s: %s", self._hub.at, note)
        self.files = tuple(self._hub.file(file, listing) for file in names)
        self.kind = one_format(self.files, self._hub)
        self._reader = FORMATS[self.kind]
        require_text_files(text_unit, self.kind)
        if text_unit is not None:
            self._made["text_unit"] = text_unit
        log.info(
            "%s: revision %s is commit %s; %d files of %s",
            self._hub.at,
            revision or "main",
            self.commit,
            len(self.files),
            self.kind,
        )

    @property
    def schema(self) -> pa.Schema:
        return self._open().schema

    @property
    def shards(self) -> Sequence[Shard]:
        return self._open().shards

    @property
    def files_cut(self) -> int:
        return self._open().files_cut

    @property
    def fingerprint(self) -> str:
        """A digest of the commit, the files and the reading options; opens no file."""
        tolerance = "error" if self._made["on_error"] == "error" else "tolerant"
        unit = self._made.get("text_unit", "line")
        options = [self._made.get("columns"), tolerance, *([] if unit == "line" else [unit])]
        files = [file.digest for file in self.files]
        return digest(
            "hub",
            READER_VERSION,
            self.repo,
            self.commit,
            self.split,
            self.subset,
            self.kind,
            options,
            files,
        )

    def shard_identity(self, shard: int) -> str:
        """Returns a digest of the file's content and of how it is read.

        If a new commit leaves a file unchanged, its tokens stay valid.
        """
        return self._open().shard_identity(shard)

    def head(self, num_bytes: int, files: int | None = None) -> FileSource:
        """Does what FileSource.head does; downloads no file whole."""
        first = [self._hub.ready(file, self.commit, whole=False) for file in self.files[:files]]
        return self._source(first).head(num_bytes)

    def exactly(self, columns: Sequence[str]) -> HuggingFaceShardedSource:
        clone = copy.copy(self)
        clone._lock, clone._rows, clone._exact = threading.Lock(), None, columns
        return clone

    def select(self, columns: Sequence[str]) -> FileSource:
        return self._open().select(columns)

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        return self._open().scan(shard, start, stop)

    def raw(self, shard: int, row: int) -> str | None:
        return self._open().raw(shard, row)

    def _open(self) -> FileSource:
        """Returns the source of the files that are needed, downloading them if necessary."""
        with self._lock:
            if self._rows is None:
                get = partial(self._hub.ready, commit=self.commit, whole=self.kind not in BY_RANGES)
                if self._num_rows is None:
                    ready = each(get, self.files, DOWNLOADS, "hub")
                else:
                    ready, rows = [], 0
                    for file in self.files:
                        ready.append(get(file))
                        rows += self._reader([ready[-1]], **self._made).shards[0].num_rows or 0
                        if rows >= self._num_rows:
                            break
                self._rows = self._source(ready)
            return self._rows

    def _source(self, files: Sequence[FileRef]) -> FileSource:
        source = self._reader(files, **self._made)
        exact = isinstance(source, JsonShardedSource)
        return source.exactly(self._exact) if exact else source


def one_format(files: Sequence[FileRef], hub: HubRepo) -> str:
    """Returns the format of the files; raises SourceError if they have several."""
    kinds = {format_of(file.path): file.path for file in files}
    if len(kinds) > 1 or None in kinds:
        first = next(iter(kinds.values()))
        deep = "**/" * ("/" in first.removeprefix(f"{hub.at}/"))
        raise SourceError(
            at=hub.at,
            problem="files of several formats: "
            + ", ".join(f"{path} ({kind})" for kind, path in kinds.items()),
            fix=f"Name one kind: {hub.at}/{deep}*{Path(first).suffix}.",
        )
    return str(next(iter(kinds)))
