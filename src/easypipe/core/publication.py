"""Descriptions of a publication on the Hub, shared by `save` and the uploading client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from easypipe.core.remote import StorageOptions


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """A file that is to be published.

    Args:
        name: Its path in the repository.
        num_bytes: Its size.
        path: The local or remote file that holds its bytes.
        content: A small text that was made for it; None if its bytes are those of the file at
            `path`.
    """

    name: str
    num_bytes: int
    path: str = ""
    content: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Publication:
    """The files that make one state of a repository; the last one says that all others are there.

    Args:
        files: The files, in order.
        card: The text of its README.md, which yields to one that people wrote.
        mark: A text that is in every card of ours, so that a README.md without it was written by
            people.
        stale: A pattern for names that an earlier publication may have left; such files are removed
            unless this one names them.
        storage_options: How `path`s are read.
    """

    files: Sequence[PublishedFile]
    card: str
    mark: str
    stale: str
    storage_options: StorageOptions = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A publication that is on the Hub.

    Args:
        repo_id: The repository.
        revision: The branch.
        commit: The hash of the commit.
        url: Its page.
        num_files: Its files.
        num_bytes: Their bytes.
        up_to_date: Whether all of it was there already, so that nothing was uploaded.
        seconds: How long it took.
    """

    repo_id: str
    revision: str
    commit: str
    url: str
    num_files: int
    num_bytes: int
    up_to_date: bool
    seconds: float
