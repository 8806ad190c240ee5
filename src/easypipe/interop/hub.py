"""Pushes a publication to a dataset repository of the Hub (private or not); explains its errors.

One commit makes it visible after all files were uploaded: a reader of the repository sees the old
state or the new one. Uploads are identified by content, so that a resumed push uploads only what is
missing. The token is only passed to the client.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar

from easypipe.core import storage
from easypipe.core.errors import StorageError, require
from easypipe.core.protocols import ProgressEvent, ProgressListener, silent
from easypipe.core.publication import Publication, PublishedFile, Pushed
from easypipe.core.trust import hub_token

log = logging.getLogger("easypipe")
T = TypeVar("T")

CARD = "README.md"
MAIN = "main"
Where = dict[str, Any]  # the client's arguments for a repository or its branch
ACCOUNT = "Set hub_token or HF_TOKEN, or log in with `hf auth login`"
# For each status of the Hub's responses: what it means, and what helps.
ANSWERS = {
    401: ("the Hub does not accept the token, or no token is set", f"{ACCOUNT}."),
    403: (
        "the token may not write there",
        "Use a token with write permission, of an account that may write to the repository.",
    ),
    404: (
        "the Hub does not know it, or the token may not see it",
        f"Check hub_repo_id. {ACCOUNT}.",
    ),
}


def push(
    publication: Publication,
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    progress: ProgressListener = silent,
) -> Pushed:
    """Makes a branch of the dataset repository hold `publication`; creates what is missing.

    Files with other names are kept, except shards of an earlier publication. `revision` is the
    branch; None means main. If `token` is None, it takes HF_TOKEN, else that of the last login.

    Raises:
        ConfigError: The repository is public and `private` is True.
        StorageError: The Hub returns an error; the message has its response.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    began, files = time.perf_counter(), publication.files
    repo = _Repository(repo_id, token, revision or MAIN)
    repo.make(private)
    standing = repo.sizes()
    own_card = CARD not in standing or publication.mark.encode() in repo.read(CARD)
    if not own_card:
        log.info("hub: the README.md of %s was not written by easypipe, so it is kept", repo_id)
    names = {CARD, *(file.name for file in files)}
    stale = [n for n in standing if n not in names and re.fullmatch(publication.stale, n)]
    # The manifests are compared byte by byte, because they hold the checksums of the other files.
    up_to_date = (
        not stale
        and all(standing.get(file.name) == file.num_bytes for file in files)
        and all(repo.read(file.name) == file.content for file in files if file.content is not None)
    )
    if up_to_date:
        commit = repo.head()
        url = f"{repo.api.endpoint}/datasets/{repo_id}/commit/{commit}"
    else:
        event = ProgressEvent(stage="push", dataset=repo_id, done=0, total=len(files), unit="files")
        contents = {file.name: _content(file, publication) for file in files}
        contents |= {CARD: publication.card.encode()} if own_card else {}
        progress(event)
        commit, url = repo.commit(
            [*starmap(CommitOperationAdd, contents.items()), *map(CommitOperationDelete, stale)],
            f"easypipe: {len(files)} files, {publication.num_bytes:,} bytes",
        )
        progress(dataclasses.replace(event, done=len(files)))
    return Pushed(
        repo_id=repo_id,
        revision=repo.revision,
        commit=commit,
        url=url,
        num_files=len(files),
        num_bytes=publication.num_bytes,
        up_to_date=up_to_date,
        seconds=time.perf_counter() - began,
    )


def _content(file: PublishedFile, publication: Publication) -> bytes | str | io.BufferedReader:
    """Returns what the client uploads: bytes, a local path, or an open remote file."""
    if file.content is not None:
        return file.content
    if not storage.is_remote(file.path):
        return file.path.removeprefix("file://")
    fs, name = storage.filesystem(file.path, publication.storage_options)
    opened: Any = fs.open(name, "rb")
    return io.BufferedReader(opened)


class _Repository:
    """A branch of a dataset repository. Errors of the client are raised as StorageError."""

    def __init__(self, repo_id: str, token: str | None, revision: str) -> None:
        from huggingface_hub import HfApi

        self.repo_id, self.token, self.revision = repo_id, token, revision
        # the client reads the environment only once, at import
        access = hub_token(own=token, at="HF_ENDPOINT")
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=access)
        self.where: Where = {"repo_id": repo_id, "repo_type": "dataset"}
        self.branch: Where = {**self.where, "revision": revision}

    def make(self, private: bool) -> None:
        """Creates the repository and the branch if they are missing.

        Raises:
            ConfigError: The repository is public, and `private` is set.
        """
        self._ask(
            "creating it",
            lambda: self.api.create_repo(**self.where, private=private, exist_ok=True),
        )
        info = self._ask("looking at it", lambda: self.api.repo_info(**self.where))
        require(
            not private or info.private is not False,
            "save.hub_private",
            f"the repository {self.repo_id!r} exists and is public: what is pushed can "
            "be read by everybody",
            "Set hub_private=False if that is meant, or make the repository private on the Hub.",
        )
        if not private and info.private:
            log.warning(
                "hub: the repository %s is private and stays so; hub_private=False applies only "
                "to new repositories",
                self.repo_id,
            )
        if self.revision != MAIN:
            self._ask(
                f"creating branch {self.revision!r}",
                lambda: self.api.create_branch(**self.where, branch=self.revision, exist_ok=True),
            )

    def sizes(self) -> dict[str, int]:
        from huggingface_hub.hf_api import RepoFile

        tree = self._ask(
            "listing its files",
            lambda: list(self.api.list_repo_tree(**self.branch, recursive=True)),
        )
        return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}

    def read(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="easypipe-") as folder:
            path = self._ask(
                f"reading {name}",
                lambda: self.api.hf_hub_download(**self.branch, filename=name, local_dir=folder),
            )
            return Path(path).read_bytes()

    def head(self) -> str:
        info = self._ask("reading its head", lambda: self.api.repo_info(**self.branch))
        return info.sha or ""

    def commit(self, operations: list[Any], message: str) -> tuple[str, str]:
        """Makes one commit after everything was uploaded; returns its (hash, URL)."""
        done = self._ask(
            "committing",
            lambda: self.api.create_commit(
                **self.branch, operations=operations, commit_message=message
            ),
        )
        return done.oid, str(done.commit_url)

    def _ask(self, doing: str, call: Callable[[], T]) -> T:
        """Returns the client's answer.

        Raises:
            StorageError: The Hub returns an error. The client's error is not attached, because it
                contains the request's headers.
        """
        try:
            return call()
        except Exception as error:
            # The client's connection errors do not have one of Python's base classes.
            if not isinstance(error, OSError | ValueError | RuntimeError) and not type(
                error
            ).__module__.startswith(("httpx", "httpcore", "requests", "huggingface_hub", "hf_xet")):
                raise
            problem, fix = self._explain(error)
        raise StorageError(at=f"hub:{self.repo_id}", problem=f"{doing} failed{problem}", fix=fix)

    def _explain(self, error: BaseException) -> tuple[str, str]:
        """Returns what an error of the client means, and what helps; the token is hidden."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
            error = error.__cause__  # the client wraps errors of its threads
        if isinstance(error, OfflineModeIsEnabled):
            fix = "Unset it and run the job again: what was saved is kept."
            return ": HF_HUB_OFFLINE forbids access to the Hub", fix
        what, said, status = type(error).__name__, str(error).strip().replace("\n", " "), ""
        fix = "Run the job again: uploaded files are kept and not sent again."
        if isinstance(error, HfHubHTTPError):
            status, said = f" with HTTP {error.response.status_code}", error.server_message or said
            what, fix = ANSWERS.get(error.response.status_code, (what, fix))
        if self.token:
            said = said.replace(self.token, "***")
        return f"{status}: {what}: {said[:500]}", fix
