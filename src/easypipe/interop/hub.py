"""Pushing a publication to a dataset repository of the Hugging Face Hub, through its own client.

One commit makes it visible, after all files were uploaded: whoever reads the repository sees the
old state or the new one. Uploads are by content, so that a push that was stopped uploads only what
is missing. The token is handed to the client and to nobody else.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from easypipe.core import storage
from easypipe.core.errors import ConfigError, StorageError
from easypipe.core.protocols import ProgressEvent, ProgressListener, silent
from easypipe.core.publication import Publication, PublishedFile, Pushed

log = logging.getLogger("easypipe")
T = TypeVar("T")

CARD = "README.md"
GROUP = 8  # files uploaded between two words on progress
MAIN = "main"
ACCOUNT = "Set hub_token or HF_TOKEN, or log in with `hf auth login`"


def push(
    publication: Publication,
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    progress: ProgressListener = silent,
) -> Pushed:
    """Makes branch `revision` (None: main) of the dataset repository hold `publication`; creates
    both where they are missing.

    Files of other names stay, except shards of an earlier publication. token: None takes HF_TOKEN,
    else that of the last login. Raises ConfigError where the repository is public and `private`
    says otherwise; StorageError with the Hub's answer where it refuses.
    """
    began = time.perf_counter()
    return _Push(publication, repo_id, private, token, revision or MAIN, progress).run(began)


class _Push:
    def __init__(
        self,
        publication: Publication,
        repo_id: str,
        private: bool,
        token: str | None,
        revision: str,
        progress: ProgressListener,
    ) -> None:
        from huggingface_hub import HfApi

        self.publication, self.repo_id, self.private, self.revision, self.progress = (
            publication,
            repo_id,
            private,
            revision,
            progress,
        )
        self.token = token
        # the client reads the environment once, at its import
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
        self.where: dict[str, Any] = {"repo_id": repo_id, "repo_type": "dataset"}

    def run(self, began: float) -> Pushed:
        from huggingface_hub import CommitOperationDelete

        self._open()
        standing = self._ask("listing its files", self._sizes)
        here = self.publication
        own_card = self._card_is_ours(standing)
        up_to_date = self._stands(standing)
        if up_to_date:
            head = (
                self._ask(
                    "reading its head",
                    lambda: self.api.repo_info(**self.where, revision=self.revision),
                ).sha
                or ""
            )
            url = f"{self.api.endpoint}/datasets/{self.repo_id}/commit/{head}"
        else:
            files = [*here.files]
            if own_card:
                card = here.card.encode()
                files.append(PublishedFile(name=CARD, num_bytes=len(card), content=card))
            names = {file.name for file in files}
            additions = self._upload(files)
            deletions = [
                CommitOperationDelete(name)
                for name in standing
                if name not in names and re.fullmatch(here.stale, name)
            ]
            message = f"easypipe: {len(here.files)} files, {here.num_bytes:,} bytes"
            done = self._ask(
                "committing",
                lambda: self.api.create_commit(
                    **self.where,
                    operations=[*additions, *deletions],
                    commit_message=message,
                    revision=self.revision,
                ),
            )
            head, url = done.oid, str(done.commit_url)
        return Pushed(
            repo_id=self.repo_id,
            revision=self.revision,
            commit=head,
            url=url,
            num_files=len(here.files),
            num_bytes=here.num_bytes,
            up_to_date=up_to_date,
            seconds=time.perf_counter() - began,
        )

    def _open(self) -> None:
        """The repository and the branch, made where they are missing. A public one is no place for
        what is meant to be private.
        """
        self._ask(
            "creating it",
            lambda: self.api.create_repo(**self.where, private=self.private, exist_ok=True),
        )
        info = self._ask("looking at it", lambda: self.api.repo_info(**self.where))
        if self.private and info.private is False:
            raise ConfigError(
                at="save.hub_private",
                problem=f"the repository {self.repo_id!r} exists and is public: what is pushed can be read by everybody",
                fix="Set hub_private=False if that is meant, or make the repository private on the Hub.",
            )
        if not self.private and info.private:
            log.warning(
                "hub: the repository %s is private and stays so; hub_private=False applies to repositories that are made",
                self.repo_id,
            )
        if self.revision != MAIN:
            self._ask(
                f"creating branch {self.revision!r}",
                lambda: self.api.create_branch(**self.where, branch=self.revision, exist_ok=True),
            )

    def _sizes(self) -> dict[str, int]:
        tree = self.api.list_repo_tree(**self.where, revision=self.revision, recursive=True)
        return {
            entry.path: int(size)
            for entry in tree
            if (size := getattr(entry, "size", None)) is not None
        }

    def _stands(self, standing: dict[str, int]) -> bool:
        """Whether every file is there, the manifests byte by byte: they hold the checksums of the
        others.
        """
        if any(standing.get(file.name) != file.num_bytes for file in self.publication.files):
            return False
        return all(
            self._fetch(file.name) == file.content
            for file in self.publication.files
            if file.content is not None
        )

    def _card_is_ours(self, standing: dict[str, int]) -> bool:
        if CARD not in standing or self.publication.mark.encode() in self._fetch(CARD):
            return True
        log.info("hub: the README.md of %s is somebody's own, it stays as it is", self.repo_id)
        return False

    def _fetch(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="easypipe-") as folder:
            path = self._ask(
                f"reading {name}",
                lambda: self.api.hf_hub_download(
                    **self.where, filename=name, revision=self.revision, local_dir=folder
                ),
            )
            return Path(path).read_bytes()

    def _upload(self, files: Sequence[PublishedFile]) -> list[Any]:
        from huggingface_hub import CommitOperationAdd

        additions, total = [], len(files)
        for start in range(0, total, GROUP):
            with ExitStack() as stack:
                group = [
                    CommitOperationAdd(
                        path_in_repo=file.name, path_or_fileobj=self._local(file, stack)
                    )
                    for file in files[start : start + GROUP]
                ]
                self._ask(
                    f"uploading {group[0].path_in_repo}"
                    + (f" and {len(group) - 1} more" if len(group) > 1 else ""),
                    lambda group=group: self.api.preupload_lfs_files(
                        **self.where, additions=group, revision=self.revision
                    ),
                )
                for addition, file in zip(group, files[start : start + GROUP], strict=True):
                    # the client empties what it uploaded; small files
                    if addition.path_or_fileobj != b"" and file.content is None:
                        # travel with the commit
                        addition.path_or_fileobj = Path(str(addition.path_or_fileobj)).read_bytes()
            additions += group
            done = min(start + GROUP, total)
            self.progress(
                ProgressEvent(
                    stage="push", dataset=self.repo_id, done=done, total=total, unit="files"
                )
            )
        return additions

    def _local(self, file: PublishedFile, stack: ExitStack) -> str | bytes:
        if file.content is not None:
            return file.content
        if not storage.is_remote(file.path):
            return file.path.removeprefix("file://")
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="easypipe-"))) / "shard"
        with open(copy, "wb") as here:
            here.writelines(storage.chunks(file.path, self.publication.storage_options))
        return str(copy)

    def _ask(self, doing: str, call: Callable[[], T]) -> T:
        """The client's answer, or StorageError with what the Hub said. Without the client's own
        error: it holds the request's headers.
        """
        try:
            return call()
        except (OSError, ValueError, RuntimeError) as error:
            problem, fix = self._explain(doing, error)
        except Exception as error:  # the client's connection errors belong to no family of Python's
            if not type(error).__module__.startswith(
                ("httpx", "httpcore", "requests", "huggingface_hub", "hf_xet")
            ):
                raise
            problem, fix = self._explain(doing, error)
        raise StorageError(at=f"hub:{self.repo_id}", problem=problem, fix=fix)

    def _explain(self, doing: str, error: BaseException) -> tuple[str, str]:
        cause: Any = error
        while cause.__cause__ is not None and getattr(cause, "response", None) is None:
            cause = cause.__cause__  # the client wraps what failed in one of its threads
        status = getattr(getattr(cause, "response", None), "status_code", None)
        said = getattr(cause, "server_message", None) or str(cause).strip().replace("\n", " ")
        if self.token:
            said = said.replace(self.token, "***")
        known = {
            401: ("the Hub does not accept the token, or there is none", f"{ACCOUNT}."),
            403: (
                "the token may not write there",
                "Use a token with write permission, of an account that may write to the repository.",
            ),
            404: (
                "the Hub does not know it, or the token may not see it",
                f"Check hub_repo_id. {ACCOUNT}.",
            ),
        }
        if type(cause).__name__ == "OfflineModeIsEnabled":
            return (
                f"{doing} failed: HF_HUB_OFFLINE forbids to ask the Hub",
                "Unset it and run the job again: what was saved stands.",
            )
        what, fix = known.get(
            status or 0,
            (
                type(cause).__name__,
                "Run the job again: what was uploaded stays and is not sent again.",
            ),
        )
        return (
            f"{doing} failed{f' with HTTP {status}' if status else ''}: {what}: {said[:500]}",
            fix,
        )
