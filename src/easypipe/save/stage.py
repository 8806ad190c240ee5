"""The save stage: rows of any source into a folder of shards that reads back as what was saved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from easypipe.core.config import config
from easypipe.core.errors import ConfigError
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedSource
from easypipe.core.publication import Publication, Pushed
from easypipe.save.publish import publication
from easypipe.save.saved import join
from easypipe.save.shard_writer import Format, check_codec, check_json
from easypipe.save.write_folder import SavedFolder, Target, write_folder
from easypipe.stages.reports.ledger import is_endless

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


@config
class SaveStageConfig:
    """Where and how rows are written.

    enabled: False skips the stage.
    output_dir: folder or URL. Several datasets go to a folder each below it; a dataset's own
    `save_path` goes before it.
    format: of the files; a dataset's own `save_format` goes before it.
    compression: None takes the format's own default: zstd for parquet, none for arrow (so that it
    can be memory-mapped) and jsonl.
    num_shards: exactly so many files, the rows dealt evenly; None makes as many as `max_shard_size`
    asks for.
    max_shard_size: bytes of a file on disk, as a number or as "500MB". Files are filled to within a
    tenth of it, judged by what samples of
        the data take with this format and compression. With num_shards too the one that makes more
        files decides. None, where num_shards is None too: an eighth of the data, but at least 16
        MiB and at most 500 MiB before compression, so that several cores can write.
    overwrite: replace what another run left in the folder. The old shards stay readable until the
    new ones are complete.
    storage_options: passed to fsspec, for a remote output_dir or save_path: credentials, an
    endpoint. Never logged, saved or part of an
        identity.
    push_to_hub: when the folder is complete, make the dataset repository `hub_repo_id` of the
    Hugging Face Hub hold it, in one commit.
    hub_repo_id: "user/name". Several datasets go to folders below its root. Read back with
    `load_saved("hf://datasets/user/name")`.
    hub_private: whether a repository that is made is private. True refuses one that exists and is
    public.
    hub_token: None takes HF_TOKEN from the environment, else the token of `hf auth login`. Never
    logged, saved or part of an identity.
    hub_revision: branch, made where it is missing; None is main.
    """

    enabled: bool = True
    output_dir: str | Path | None = None
    format: Format = "parquet"
    compression: Literal["none", "gzip", "lz4", "zstd"] | None = None
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
        check_codec(self.format, self.compression)
        if self.num_shards is not None and self.num_shards < 1:
            raise ConfigError(
                at="num_shards",
                problem=f"{self.num_shards} shards hold nothing",
                fix="Give at least 1.",
            )
        if self.max_shard_size is not None:
            parse_bytes(self.max_shard_size)
        if self.push_to_hub and self.hub_repo_id is None:
            raise ConfigError(
                at="hub_repo_id",
                problem="push_to_hub needs to know where to",
                fix='Set it, like "user/name".',
            )
        if self.hub_repo_id is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub_repo_id):
            raise ConfigError(
                at="hub_repo_id",
                problem=f"{self.hub_repo_id!r} names no repository",
                fix='Write "user/name".',
            )
        if self.hub_token == "":
            raise ConfigError(
                at="hub_token",
                problem="is empty",
                fix="Give a token, or leave it out for HF_TOKEN or your login.",
            )
        if self.hub_revision is not None and not re.fullmatch(r"[\w][\w./-]*", self.hub_revision):
            raise ConfigError(
                at="hub_revision",
                problem=f"{self.hub_revision!r} names no branch",
                fix="Leave it out for main.",
            )


def parse_bytes(size: int | str) -> int:
    """Bytes of `500`, `"500MB"` (10^6) or `"500MiB"` (2^20). Raises ConfigError at
    `max_shard_size`.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if (
        found is None
        or found[2].upper() not in _UNITS
        or float(found[1]) * _UNITS[found[2].upper()] < 1
    ):
        raise ConfigError(
            at="max_shard_size",
            problem=f"{size!r} is no size",
            fix='Write bytes as a number, or like "500MB" or "2GiB".',
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    folders: tuple[SavedFolder, ...]
    ledger: Ledger = field(repr=False)
    pushed: tuple[Pushed, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(folder.num_rows for folder in self.folders)

    @property
    def rejected(self) -> dict[str, dict[str, int]]:
        """Of each dataset the rows that became nothing, by reason, whichever stage refused them."""
        lost: dict[str, Counter[str]] = {}
        for entry in self.ledger.entries:
            if entry.unit == "rows" and entry.stage in ("tokenize", "save"):
                lost.setdefault(entry.dataset, Counter()).update(
                    {k: n for k, n in entry.out.items() if k not in ("written", "saved")}
                )
        return {dataset: dict(+counts) for dataset, counts in lost.items() if +counts}

    def __str__(self) -> str:
        """What was written, and what was left out."""
        said = [f"{folder.path}: {folder.num_rows} rows" for folder in self.folders]
        left = [
            f"{name}: left out {sum(why.values())} ({', '.join(f'{k} {n}' for k, n in why.items())})"
            for name, why in self.rejected.items()
        ]
        return "; ".join([*said, *left])


class SaveStage(BaseStage):
    """Passes its data on unchanged; `write` is what `Pipeline.build()` calls."""

    config: SaveStageConfig

    @property
    def name(self) -> str:
        return "save"

    def process(
        self, data: dict[str, ShardedSource], context: PipelineContext
    ) -> dict[str, ShardedSource]:
        for target in self._targets(data, context):
            if is_endless(target.source):
                raise ConfigError(
                    at="save",
                    problem=f"{target.dataset!r} never ends: its stop_strategy is 'restart'",
                    fix="Set mix.stop_strategy to 'first_exhausted' or 'all_exhausted'.",
                )
            if target.format == "jsonl":
                check_json(target.source.schema)
        return data

    def write(self, data: dict[str, ShardedSource], context: PipelineContext) -> list[SavedFolder]:
        """Writes every dataset of `data`. Raises ConfigError where a folder holds something else,
        StorageError where writing fails.
        """
        return [write_folder(target, context) for target in self._targets(data, context)]

    def publication(self, folders: Sequence[SavedFolder]) -> Publication | None:
        """What of the written folders goes to the Hub; None where nothing is to."""
        if not (self.config.push_to_hub and folders):
            return None
        assert self.config.hub_repo_id is not None
        paths = {folder.dataset: folder.path for folder in folders}
        return publication(paths, self.config.hub_repo_id, self.config.storage_options)

    def _targets(self, data: Mapping[str, ShardedSource], context: PipelineContext) -> list[Target]:
        if not self.config.enabled:
            return []
        datasets = {dataset.name: dataset for dataset in context.config.datasets}
        for name, dataset in datasets.items():
            if dataset.save_path is not None and name not in data:
                raise ConfigError(
                    at=f"datasets.{name}.save_path",
                    problem="has no effect after mix(), where the datasets are one",
                    fix="Save before mix(), or drop it and set save.output_dir.",
                )
        targets = []
        for name, source in data.items():
            own = datasets.get(name)
            chosen: Format = (own.save_format if own is not None else None) or self.config.format
            if own is not None and own.save_path is not None:
                folder = str(own.save_path)
            elif self.config.output_dir is not None:
                folder = (
                    str(self.config.output_dir)
                    if len(data) == 1
                    else join(self.config.output_dir, name)
                )
            else:
                raise ConfigError(
                    at="save.output_dir",
                    problem=f"no folder for dataset {name!r}",
                    fix="Set it, or the dataset's save_path.",
                )
            try:
                codec = check_codec(chosen, self.config.compression)
            except ConfigError as error:
                raise error.under("save") from None
            targets.append(
                Target(
                    dataset=name,
                    source=source,
                    folder=folder,
                    format=chosen,
                    compression=codec,
                    num_shards=self.config.num_shards,
                    max_bytes=None
                    if self.config.max_shard_size is None
                    else parse_bytes(self.config.max_shard_size),
                    overwrite=self.config.overwrite,
                    storage_options=self.config.storage_options,
                )
            )
        return targets
