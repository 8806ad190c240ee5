"""Descriptions of a publication on the Hub, shared by `save` and the uploading client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from easypipe.core.remote import StorageOptions


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """A file to publish.

    Args:
        name: Its path in the repository.
        num_bytes: Its size.
        path: The local or remote file that holds its bytes.
        content: Its text if it was generated; None if its bytes are those of the file at `path`.
    """

    name: str
    num_bytes: int
    path: str = ""
    content: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Publication:
    """The files of one state of a repository; the last file shows that all others are complete.

    Args:
        files: The files, in order.
        card: The text of its README.md; a README.md that a person wrote is kept instead.
        mark: A text in every generated card; a README.md without it was written by a person.
        stale: A pattern for names that an earlier publication may have left; matching files that
            this one does not name are removed.
        storage_options: The storage options for reading `path`s.
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
        num_files: The number of its files.
        num_bytes: Their size.
        up_to_date: Whether everything was already there, so that nothing was uploaded.
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
