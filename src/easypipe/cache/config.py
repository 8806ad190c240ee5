"""CacheConfig: how a token cache at a URL is reached and read, and how much of it is staged."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from easypipe.core import storage
from easypipe.core.config import config
from easypipe.core.errors import require


@config
class CacheConfig:
    """How a token cache at a URL (`s3://`, `gs://`) is reached and read.

    Local files are memory-mapped, and need none of these options.

    Args:
        reading: "shards" fetches whole token files, each compared with its checksum; use it to read
            most of a cache, or of neighbouring documents (`order.block_rows`). "ranges" fetches the
            documents of a batch, in checked blocks of 64 KiB.
        staging_bytes: Bytes of fetched tokens that are kept on this machine's disk, for each
            process and cache folder; the least recently read are removed first.
        staging_dir: The folder of fetched tokens; None takes the system's temporary folder
            (TMPDIR).
        storage_options: Passed to fsspec: credentials, an endpoint. Never logged, saved or part of
            a fingerprint.
    """

    reading: Literal["shards", "ranges"] = "shards"
    staging_bytes: int = 16 << 30
    staging_dir: str | Path | None = None
    storage_options: dict[str, Any] | None = field(
        default=None, repr=False, metadata={"secret": True}
    )

    def check(self) -> None:
        require(
            self.staging_bytes >= 1,
            "staging_bytes",
            f"{self.staging_bytes} is too few bytes",
            "Give at least what a batch needs.",
        )


def check_cache(
    options: CacheConfig | None,
    cache_dir: str | Path | None,
    own: Iterable[str | Path | None],
    *,
    streaming: bool,
) -> None:
    """Checks that the options for a token cache at a URL have an effect.

    Args:
        options: The options; None passes.
        cache_dir: The cache folder of the pipeline.
        own: The `cache_path` of each dataset.
        streaming: Whether the pipeline streams.

    Raises:
        ConfigError: The options would have no effect.
    """
    if options is None:
        return
    chosen = [cache_dir or os.environ.get("EASYPIPE_CACHE"), *own]
    require(not streaming, "cache", "has no effect: streaming keeps no tokens", "Leave it out.")
    require(
        any(place is not None and storage.is_remote(place) for place in chosen),
        "cache",
        "has no effect: no token cache is at a URL",
        "Leave it out, or give cache_dir a URL.",
    )
