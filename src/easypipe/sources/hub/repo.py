"""A dataset repository on the Hub: its files at a commit, its errors, and whether it is downloaded.

Failures are explained: a dataset is gated, private, or does not exist.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from easypipe.core import remote, trust
from easypipe.core.errors import MissingFileError, SourceError, StorageError, require
from easypipe.core.reachable import hub_unreachable
from easypipe.core.remote import StorageOptions
from easypipe.core.values import Arguments, Json
from easypipe.sources.hub.layout import is_data
from easypipe.sources.refs import FileRef

T = TypeVar("T")
log = logging.getLogger("easypipe")

# where the Hub keeps its own parquet copy of datasets in other formats
CONVERTED = "refs/convert/parquet"
BY_RANGES = ("parquet", "arrow")


class Listing(NamedTuple):
    """The files and the card of a dataset at one commit.

    Attributes:
        commit: The hash of the commit.
        sizes: (bytes, content hash) of every file.
        card: The data of its card.
        converted: Whether it is the Hub's own parquet copy, laid out as
            `subset/split/0000.parquet`.
    """

    commit: str
    sizes: dict[str, tuple[int, str]]
    card: Json
    converted: bool


class HubRepo:
    """A dataset repository, with the access that was given for it.

    Args:
        repo: `owner/name`.
        storage_options: `token` (None: HF_TOKEN, or the login of the Hub's client, if the endpoint
            is trusted) and `endpoint` (None: HF_ENDPOINT).

    Raises:
        ConfigError: storage_options has other keys.
    """

    def __init__(self, repo: str, storage_options: StorageOptions = None) -> None:
        access = dict(storage_options or {})
        self.repo = repo
        self._endpoint = access.pop("endpoint", None) or os.environ.get("HF_ENDPOINT")
        self._token = trust.hub_token(self._endpoint, access.pop("token", None))
        require(
            not access,
            "storage_options",
            f"{sorted(access)} mean nothing to the Hub",
            "Leave them out.",
            have=["token", "endpoint"],
        )

    @property
    def at(self) -> str:
        return f"hf://datasets/{self.repo}"

    def listing(self, revision: str | None) -> Listing:
        """Returns the files at a branch, tag or commit.

        None takes main, or the Hub's parquet copy if main has no data files.

        Raises:
            MissingFileError: The dataset or revision does not exist.
            SourceError: It is gated, or the Hub cannot be asked.
        """
        found = self._info(revision)
        if revision is None and not any(map(is_data, found.sizes)):
            try:  # for a dataset that a script makes, the Hub keeps the rows as parquet
                found = self._info(CONVERTED)._replace(card={}, converted=True)
                log.info(
                    "%s: has no data files of its own; the Hub's parquet copy (%s) is read",
                    self.at,
                    CONVERTED,
                )
            except MissingFileError:
                log.debug("%s: has no converted copy either", self.at)
        return found

    def file(self, name: str, listing: Listing) -> FileRef:
        """Returns a file that is read by ranges."""
        from huggingface_hub import get_token, hf_hub_url

        num_bytes, content = listing.sizes[name]
        token = get_token() if self._token is None else self._token
        options = {"headers": {"Authorization": f"Bearer {token}"}} if token else None
        url = hf_hub_url(
            self.repo, name, repo_type="dataset", revision=listing.commit, endpoint=self._endpoint
        )
        return FileRef(
            path=f"{self.at}/{name}",
            num_bytes=num_bytes,
            identity=f"blob:{content}",
            url=url,
            storage_options=options,
        )

    def ready(self, file: FileRef, commit: str, *, whole: bool) -> FileRef:
        """Returns the file in the form in which it is read.

        That is the copy in the cache of the Hub's client if there is one, otherwise the file
        itself, by ranges.

        Args:
            file: What `file` returned.
            commit: The commit of the listing.
            whole: Downloads the file into that cache first.

        Raises:
            SourceError: The Hub refuses the download, or the cached copy has another size.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, try_to_load_from_cache

        inside = file.path.removeprefix(self.at + "/")
        cached = try_to_load_from_cache(self.repo, inside, revision=commit, repo_type="dataset")
        if not isinstance(cached, str):
            if not whole:
                # requested once here, because the Hub's client can tell why it is refused
                url = file.address
                self._call(
                    lambda: get_hf_file_metadata(url, token=self._token, endpoint=self._endpoint)
                )
                return file
            more: Arguments = {
                "revision": commit,
                "repo_type": "dataset",
                "token": self._token,
                "endpoint": self._endpoint,
            }
            cached = self._call(lambda: hf_hub_download(self.repo, inside, **more))
        status = os.stat(cached)
        if status.st_size != file.num_bytes:
            raise file.error(
                f"{status.st_size} bytes in the cache of the Hub's client, not {file.num_bytes}",
                f"Delete {Path(cached).resolve()} and run again.",
            )
        return replace(
            file,
            local_copy=FileRef(
                path=cached, num_bytes=status.st_size, identity=str(status.st_mtime_ns)
            ),
        )

    def _info(self, revision: str | None) -> Listing:
        """Returns what the Hub lists for a revision."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._endpoint, token=self._token)
        info: Any = self._call(
            lambda: api.dataset_info(self.repo, revision=revision, files_metadata=True), revision
        )
        sizes = {
            file.rfilename: (
                int(file.size or 0),
                str(file.lfs.sha256 if file.lfs is not None else file.blob_id),
            )
            for file in info.siblings or ()
        }
        return Listing(
            str(info.sha),
            sizes,
            info.card_data.to_dict() if info.card_data is not None else {},
            converted=False,
        )

    def _call(self, call: Callable[[], T], revision: str | None = None) -> T:
        """Returns `call()`, retried after transient failures.

        Raises:
            MissingFileError: The Hub does not have the dataset or revision.
            SourceError: The dataset is gated, or the Hub cannot be asked.
        """
        from huggingface_hub import errors

        endpoint = (self._endpoint or "https://huggingface.co").rstrip("/")
        page = f"{endpoint}/datasets/{self.repo}"
        _require_someone_there(endpoint, self.at)

        def attempt(timeout_s: float) -> T:
            try:
                return call()
            except errors.GatedRepoError:
                refused: SourceError = SourceError(
                    at=self.at,
                    problem="is gated: its authors want their licence accepted",
                    fix=f"Accept it at {page}, and set HF_TOKEN to a token of that account.",
                )
            except errors.RevisionNotFoundError:
                refused = MissingFileError(
                    at=self.at,
                    problem=f"no revision {revision!r}",
                    fix=f"See the branches and tags at {page}.",
                )
            except errors.RepositoryNotFoundError:
                refused = MissingFileError(
                    at=self.at,
                    problem="the Hub has no such dataset, or it is private",
                    fix="Check the spelling of owner/name; for a private one set HF_TOKEN.",
                )
            raise refused

        try:
            return remote.retrying(self.at, attempt, options={"token": self._token or None})
        except StorageError as error:
            fix, offline = error.fix, "HF_HUB_OFFLINE" in error.problem
            if offline and (folder := self._on_this_machine(revision)) is not None:
                fix = f"Unset it, or give data_files the files of your split in {folder}."
            raise SourceError(at=self.at, problem=error.problem, fix=fix) from None

    def _on_this_machine(self, revision: str | None) -> str | None:
        """Returns the folder of a revision in the cache of the Hub's client, if it has one."""
        from huggingface_hub import errors, snapshot_download

        here: Arguments = {"repo_type": "dataset", "revision": revision, "local_files_only": True}
        try:
            return snapshot_download(self.repo, **here)
        except errors.LocalEntryNotFoundError:
            return None


def _require_someone_there(endpoint: str, at: str) -> None:
    """Raises SourceError within seconds if the Hub cannot be reached."""
    why = hub_unreachable(endpoint)
    if why is not None:
        proxy = ", or https_proxy" if why.startswith("the proxy") else ""
        raise SourceError(
            at=at,
            problem=f"the Hub cannot be reached: {why}",
            fix=f"Check the network{proxy}, or HF_ENDPOINT if a mirror is used; or download the "
            "dataset on another machine "
            f"(hf download --repo-type dataset {at.removeprefix('hf://datasets/')} --local-dir "
            "FOLDER) and give data_files the folder.",
        )
