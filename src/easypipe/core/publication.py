"""What is to be published, and what became of it: shared by save and the uploading client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from easypipe.core.remote import StorageOptions


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """name: in the repository. content: small text made for it; None where the bytes are those of
    the file at `path`.
    """

    name: str
    num_bytes: int
    path: str = ""
    content: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Files that make one state of a repository. The last is what says that all others are there.

    card: its README.md, which yields to one that people wrote: their own lacks `mark`.
    stale: a pattern for names that an earlier publication may have left, which go where this one
    does not name them.
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
    """A publication that stands on the Hub. up_to_date: it stood there already, nothing was
    uploaded.
    """

    repo_id: str
    revision: str
    commit: str  # its hash
    url: str
    num_files: int
    num_bytes: int
    up_to_date: bool
    seconds: float
