"""Datasets of the Hugging Face Hub, read as plain files at one commit.

The revision is resolved to a commit when the source is made. Parquet and Arrow files are read by ranges, so that only the columns and
rows that are asked for travel; other formats are needed whole, and are downloaded once into the Hub client's own cache. A file that stands
in that cache is read there, whatever its format.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Unpack

import pyarrow as pa

from easypipe.core import remote
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, MissingFileError, SourceError, StorageError
from easypipe.core.protocols import Scan, Shard, ShardedDataSource
from easypipe.sources.base import READER_VERSION, FileOptions, FileSource
from easypipe.sources.hub_layout import choose_files
from easypipe.sources.open import FORMATS
from easypipe.sources.refs import FileRef, format_of

T = TypeVar("T")
log = logging.getLogger("easypipe")

CONVERTED = "refs/convert/parquet"  # where the Hub keeps its own parquet copy of datasets that came in another form
BY_RANGES = ("parquet", "arrow")
DOWNLOADS = 8  # at a time


class HubName(NamedTuple):
    """`hf://datasets/owner/name@revision/pattern`, taken apart."""

    repo: str
    revision: str | None
    pattern: str | None


def parse_hub_name(text: str) -> HubName:
    """Of `owner/name` or `hf://datasets/owner/name[@revision][/pattern]`. Raises ConfigError for anything else."""
    rest = text.removeprefix("hf://")
    if rest != text:
        if not rest.startswith("datasets/"):
            problem = f"{text!r} does not name a dataset"
            raise ConfigError(
                at="data_files", problem=problem, fix="Write hf://datasets/owner/name, or hf://datasets/owner/name/*.parquet."
            )
        rest = rest.removeprefix("datasets/")
    parts = rest.strip("/").split("/")
    if rest == text and len(parts) > 2:
        raise ConfigError(
            at="data_files", problem=f"{text!r} names no dataset of the Hub", fix="Write owner/name, or hf://datasets/owner/name/*.parquet."
        )
    name, pattern = "/".join(parts[:2]), "/".join(parts[2:])
    repo, at, revision = name.partition("@")
    if not repo or any(not part for part in repo.split("/")) or (at and not revision):
        raise ConfigError(at="data_files", problem=f"{text!r} names no dataset of the Hub", fix="Write owner/name.")
    return HubName(repo, revision.replace("%2F", "/") or None, pattern or None)


class HuggingFaceShardedSource(ShardedDataSource):
    """Rows of one split of a dataset on the Hub; implements ScanningSource. One shard per file.

    dataset: `owner/name` or `hf://datasets/owner/name[@revision][/pattern]`. split: None takes `train`; no split with a pattern.
    subset: one of the configurations that the dataset's card or folders name; None takes the default one. revision: branch, tag or commit;
    None takes main. storage_options: `token` (None: HF_TOKEN, or the login of the Hub's client) and `endpoint` (None: HF_ENDPOINT).
    num_rows: so many rows will be read at most: files behind them are not opened. Other options are those of FileSource.

    `commit` is the commit that is read. Raises MissingFileError for a dataset, revision, subset or split that is not there; SourceError
    for a gated one, with the page of its licence, and where the files of a split have several formats.
    """

    def __init__(
        self,
        dataset: str,
        *,
        split: str | None = None,
        subset: str | None = None,
        revision: str | None = None,
        num_rows: int | None = None,
        **options: Unpack[FileOptions],
    ) -> None:
        name = parse_hub_name(dataset)
        if name.revision and revision and name.revision != revision:
            raise ConfigError(at="revision", problem=f"{revision!r}, but data_files says {name.revision!r}", fix="Leave one of them out.")
        if name.pattern and (split or subset):
            raise ConfigError(
                at="split" if split else "subset", problem="has no effect beside a pattern", fix="Leave it or the pattern out."
            )
        access = dict(options.get("storage_options") or {})
        self._token, self._endpoint = access.pop("token", None), access.pop("endpoint", None) or os.environ.get("HF_ENDPOINT")
        if access:
            problem = f"{sorted(access)} mean nothing to the Hub"
            raise ConfigError(at="storage_options", problem=problem, have=["token", "endpoint"], fix="Leave them out.")
        self.repo, self.split, self.subset = name.repo, split or (None if name.pattern else "train"), subset
        self._num_rows = num_rows
        self._made: FileOptions = {"columns": options.get("columns"), "on_error": options.get("on_error", "error")}
        if "index_dir" in options:
            self._made["index_dir"] = options["index_dir"]
        self._lock = threading.Lock()
        self._rows: FileSource | None = None
        self._revision = name.revision or revision
        self.commit, found = self._list(name.pattern, self._revision)
        kinds = {format_of(file.path): file.path for file in found}
        if len(kinds) > 1 or None in kinds:
            raise SourceError(
                at=self._at(),
                problem="files of several formats: " + ", ".join(f"{path} ({kind})" for kind, path in kinds.items()),
                fix=f"Name one kind: hf://datasets/{self.repo}/*.parquet.",
            )
        self.kind = str(next(iter(kinds)))
        self.files = tuple(found)
        log.info("%s: revision %s is commit %s; %d files of %s", self._at(), self._revision or "main", self.commit, len(found), self.kind)

    @property
    def schema(self) -> pa.Schema:
        return self._open().schema

    @property
    def shards(self) -> Sequence[Shard]:
        return self._open().shards

    @property
    def fingerprint(self) -> str:
        """Digest of the commit, the files and the reading options. Opens no file."""
        options = [self._made.get("columns"), "error" if self._made.get("on_error") == "error" else "tolerant"]
        files = [file.digest for file in self.files]
        return digest("hub", READER_VERSION, self.repo, self.commit, self.split, self.subset, self.kind, options, files)

    def shard_identity(self, shard: int) -> str:
        """Of the file's content: a new commit that leaves a file as it is leaves its tokens as they are."""
        return self._open().shard_identity(shard)

    def select(self, columns: Sequence[str]) -> FileSource:
        return self._open().select(columns)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self._open().read(shard, start, stop)

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        return self._open().scan(shard, start, stop)

    def raw(self, shard: int, row: int) -> str | None:
        return self._open().raw(shard, row)

    def _at(self) -> str:
        return f"hf://datasets/{self.repo}"

    def _open(self) -> FileSource:
        with self._lock:
            if self._rows is None:
                reader: Any = FORMATS[self.kind]
                if self._num_rows is None:
                    with ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="easypipe-hub") as pool:
                        ready = list(pool.map(self._ready, self.files))
                else:
                    ready, rows = [], 0
                    for file in self.files:
                        ready.append(self._ready(file))
                        rows += reader([ready[-1]], **self._made).shards[0].num_rows
                        if rows >= self._num_rows:
                            break
                self._rows = reader(ready, **self._made)
            rows: Any = self._rows
            return rows

    def _ready(self, file: FileRef) -> FileRef:
        """The file as it is to be read: from the Hub client's cache, or by ranges."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, try_to_load_from_cache

        inside = file.path.removeprefix(self._at() + "/")
        cached = try_to_load_from_cache(self.repo, inside, revision=self.commit, repo_type="dataset")
        if not isinstance(cached, str):
            if self.kind in BY_RANGES:
                url = file.address  # asked for once here, because the Hub's client knows why it is refused
                self._call(lambda: get_hf_file_metadata(url, token=self._token, endpoint=self._endpoint))
                return file
            more: dict[str, Any] = {"revision": self.commit, "repo_type": "dataset", "token": self._token, "endpoint": self._endpoint}
            cached = self._call(lambda: hf_hub_download(self.repo, inside, **more))
        status = os.stat(cached)
        if status.st_size != file.num_bytes:
            raise SourceError(
                at=file.path,
                problem=f"{status.st_size} bytes in the cache of the Hub's client, not {file.num_bytes}",
                fix=f"Delete {Path(cached).resolve()} and run again.",
            )
        return replace(file, twin=FileRef(path=cached, num_bytes=status.st_size, identity=str(status.st_mtime_ns)))

    def _list(self, pattern: str | None, revision: str | None) -> tuple[str, list[FileRef]]:
        commit, sizes, card = self._info(revision)
        converted = False
        if revision is None and not any(format_of(name) for name in sizes if not name.startswith((".", "README"))):
            try:  # a dataset made by a script: the Hub keeps its rows as parquet
                commit, sizes, _ = self._info(CONVERTED)
                card, converted = {}, True
                log.info("%s: has no data files of its own; the Hub's parquet copy (%s) is read", self._at(), CONVERTED)
            except MissingFileError:
                log.debug("%s: has no converted copy either", self._at())
        names = choose_files(list(sizes), card, at=self._at(), pattern=pattern, subset=self.subset, split=self.split, converted=converted)
        return commit, [self._ref(name, commit, *sizes[name]) for name in names]

    def _ref(self, name: str, commit: str, num_bytes: int, content: str) -> FileRef:
        from huggingface_hub import get_token, hf_hub_url

        token = self._token or get_token()
        options = {"headers": {"Authorization": f"Bearer {token}"}} if token else None
        url = hf_hub_url(self.repo, name, repo_type="dataset", revision=commit, endpoint=self._endpoint)
        return FileRef(path=f"{self._at()}/{name}", num_bytes=num_bytes, identity=f"blob:{content}", url=url, storage_options=options)

    def _info(self, revision: str | None) -> tuple[str, dict[str, tuple[int, str]], Mapping[str, Any]]:
        """Commit, (size, content hash) of every file, and the card's data."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._endpoint, token=self._token)
        info: Any = self._call(lambda: api.dataset_info(self.repo, revision=revision, files_metadata=True), revision)
        sizes = {
            file.rfilename: (int(file.size or 0), str(file.lfs.sha256 if file.lfs is not None else file.blob_id))
            for file in info.siblings or ()
        }
        card = info.card_data.to_dict() if info.card_data is not None else {}
        return str(info.sha), sizes, card

    def _call(self, call: Callable[[], T], revision: str | None = None) -> T:
        """`call()`, tried again where it fails for a passing reason; what the Hub refuses is said in words."""
        from huggingface_hub import errors

        page = f"{(self._endpoint or 'https://huggingface.co').rstrip('/')}/datasets/{self.repo}"

        def attempt(timeout_s: float) -> T:
            try:
                return call()
            except errors.GatedRepoError:
                refused: SourceError = SourceError(
                    at=self._at(),
                    problem="is gated: its authors want their licence accepted",
                    fix=f"Accept it at {page}, and set HF_TOKEN to a token of that account.",
                )
            except errors.RevisionNotFoundError:
                refused = MissingFileError(at=self._at(), problem=f"no revision {revision!r}", fix=f"See the branches and tags at {page}.")
            except errors.RepositoryNotFoundError:
                refused = MissingFileError(
                    at=self._at(),
                    problem="the Hub has no such dataset, or it is private",
                    fix="Check the spelling of owner/name; for a private one set HF_TOKEN.",
                )
            raise refused

        try:
            return remote.retrying(self._at(), attempt, options={"token": self._token})
        except StorageError as error:
            raise SourceError(at=self._at(), problem=error.problem, fix=error.fix) from None
