"""SaveStageConfig: where rows are saved, in which format, codec and sizes, and their upload."""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from easypipe.core.config import config
from easypipe.core.errors import ConfigError, require

Format = Literal["parquet", "arrow", "jsonl"]
Compression = Literal["none", "gzip", "lz4", "zstd"]

# format -> codec -> file extension; the first codec is the default. Arrow files without compression
# are the ones that can be memory-mapped.
CODECS: dict[str, dict[str, str]] = {
    "parquet": {"zstd": ".parquet", "gzip": ".parquet", "lz4": ".parquet", "none": ".parquet"},
    "arrow": {"none": ".arrow", "lz4": ".arrow", "zstd": ".arrow"},
    "jsonl": {"none": ".jsonl", "gzip": ".jsonl.gz", "zstd": ".jsonl.zst"},
}


@config
class SaveStageConfig:
    """Where and how rows are written.

    Args:
        enabled: False skips the stage.
        output_dir: A folder or URL. With several datasets, each has a subfolder of it; a dataset's
            `save_path` overrides it.
        format: The format of the files; a dataset's own `save_format` overrides it.
        compression: None takes the format's own default: zstd for parquet, none for arrow (so that
            it can be memory-mapped) and jsonl.
        num_shards: Exactly this many files, with equal numbers of rows; None makes as many as
            `max_shard_size` needs.
        max_shard_size: Bytes of a file on disk, as a number or as "500MB". Files are filled to
            within a tenth of it, estimated from samples of the data in this format and compression.
            If num_shards is also set, the option that makes more files decides. If both are None,
            it is an eighth of the data, between 16 MiB and 500 MiB before compression, so that
            several cores can write.
        overwrite: Replace the rows of another run in the folder. The old shards stay readable until
            the new ones are complete.
        storage_options: Passed to fsspec, for a remote output_dir or save_path: credentials, an
            endpoint. Never logged, saved or part of a fingerprint.
        push_to_hub: Upload the complete folder to the dataset repository `hub_repo_id` of the
            Hugging Face Hub, in one commit.
        hub_repo_id: "user/name". With several datasets, each has a folder in it. Read it back with
            `load_saved("hf://datasets/user/name")`.
        hub_private: Whether a new repository is private. With True, an existing public one is an
            error.
        hub_token: None takes HF_TOKEN from the environment, else the token of `hf auth login`.
            Never logged, saved or part of a fingerprint.
        hub_revision: The branch, created if it is missing; None means main.
    """

    enabled: bool = True
    output_dir: str | Path | None = None
    format: Format = "parquet"
    compression: Compression | None = None
    num_shards: int | None = None
    max_shard_size: int | str | None = None
    overwrite: bool = False
    storage_options: dict[str, Any] | None = field(
        default=None, repr=False, metadata={"secret": True}
    )
    push_to_hub: bool = False
    hub_repo_id: str | None = None
    hub_private: bool = True
    hub_token: str | None = field(default=None, repr=False, metadata={"secret": True})
    hub_revision: str | None = None

    def check(self) -> None:
        require(
            codec_of(self) in CODECS[self.format],
            "compression",
            f"{self.format} files cannot be compressed with {self.compression}",
            "Choose one of these.",
            have=CODECS[self.format],
        )
        max_bytes_of(self)  # raises if it is not a size
        repo, branch = self.hub_repo_id, self.hub_revision
        for wrong, at, problem, fix in (
            (
                self.num_shards is not None and self.num_shards < 1,
                "num_shards",
                f"{self.num_shards} shards hold nothing",
                "Give at least 1.",
            ),
            (
                self.push_to_hub and repo is None,
                "hub_repo_id",
                "push_to_hub needs a repository",
                'Set it, like "user/name".',
            ),
            (
                repo is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", repo),
                "hub_repo_id",
                f"{repo!r} names no repository",
                'Write "user/name".',
            ),
            (
                self.hub_token == "",
                "hub_token",
                "is empty",
                "Give a token, or leave it out for HF_TOKEN or your login.",
            ),
            (
                branch is not None and not re.fullmatch(r"[\w][\w./-]*", branch),
                "hub_revision",
                f"{branch!r} names no branch",
                "Leave it out for main.",
            ),
        ):
            require(
                not wrong,
                at,
                problem,
                fix,
            )


def codec_of(config: SaveStageConfig) -> str:
    """Returns the codec of the files: that of the config, else the format's default."""
    return config.compression or next(iter(CODECS[config.format]))


def max_bytes_of(config: SaveStageConfig) -> int | None:
    """Returns `max_shard_size` in bytes."""
    return None if config.max_shard_size is None else parse_bytes(config.max_shard_size)


def parse_bytes(size: int | str) -> int:
    """Returns the bytes of `500`, `"500MB"` (10^6) or `"500MiB"` (2^20).

    Raises:
        ConfigError: It is none of these; at `max_shard_size`.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMG])(I?)B|B?)\s*", str(size), re.IGNORECASE)
    if found is not None:
        base = 1024 if found[3] else 1000
        num_bytes = int(float(found[1]) * base ** ("KMG".find((found[2] or " ").upper()) + 1))
        if num_bytes >= 1:
            return num_bytes
    raise ConfigError(
        at="max_shard_size",
        problem=f"{size!r} is not a size",
        fix='Write bytes as a number, or like "500MB" or "2GiB".',
    )
