"""The save stage: which sources are written to which folders and pushed, and the SaveReport."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from easypipe.core.config import fields_of
from easypipe.core.errors import ConfigError, require
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    ShardedSource,
    Source,
    Sources,
    info_of,
)
from easypipe.core.publication import Publication, Pushed
from easypipe.core.schema import ROW_NUMBER
from easypipe.save.config import SaveStageConfig
from easypipe.save.documents import CachedDocuments, UnnumberedRows
from easypipe.save.publish import publication
from easypipe.save.saved import join
from easypipe.save.shard_writer import check_json
from easypipe.save.write_folder import Rows, SavedFolder, Target, write_folder
from easypipe.stages.config import datasets_of
from easypipe.stages.mix.mixture import planned_of
from easypipe.stages.reports.ledger import ledger_of
from easypipe.stages.tokenize.documents import cached_of, is_documents, trained_turns

log = logging.getLogger("easypipe")


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What `Pipeline.build()` saved: the folders, their ledger, and what was pushed to the Hub."""

    folders: tuple[SavedFolder, ...]
    ledger: Ledger = field(repr=False)
    pushed: tuple[Pushed, ...] = ()

    @property
    def num_rows(self) -> int:
        """The number of rows in all folders."""
        return sum(folder.num_rows for folder in self.folders)

    @property
    def rejected(self) -> dict[str, dict[str, int]]:
        """For each dataset, how many rows all stages rejected, by reason."""
        lost: dict[str, Counter[str]] = {}
        for entry in self.ledger.entries:
            if entry.unit == "rows" and entry.stage in ("tokenize", "save"):
                lost.setdefault(entry.dataset, Counter()).update(
                    {k: n for k, n in entry.out.items() if k not in ("written", "saved")}
                )
        return {dataset: dict(+counts) for dataset, counts in lost.items() if +counts}

    def __str__(self) -> str:
        """Returns what was written and what was left out, as text."""
        said = [f"{folder.path}: {folder.num_rows} rows" for folder in self.folders]
        left = [
            f"{name}: left out {sum(why.values())} "
            f"({', '.join(f'{k} {n}' for k, n in why.items())})"
            for name, why in self.rejected.items()
        ]
        return "; ".join([*said, *left])


class SaveStage(BaseStage):
    """The save stage; it passes its data on unchanged, and `Pipeline.build()` calls `write`."""

    config: SaveStageConfig

    # Where relative folders are: the process may go elsewhere between `save()` and `build()`.
    _here: str | None = None

    @property
    def name(self) -> str:
        return "save"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        """Checks that every dataset can be written; it writes nothing.

        Raises:
            ConfigError: A mixture never ends, or its rows do not fit the format.
        """
        for target in self.targets(data, context):
            planned = planned_of(target.source)
            require(
                planned is None or not planned.mixture.endless,
                "save",
                f"{target.dataset!r} never ends: its stop_strategy is 'restart'",
                "Set mix.stop_strategy to 'first_exhausted' or 'all_exhausted'.",
            )
            own = datasets_of(context).get(target.dataset)
            if own is not None and planned is None and not is_documents(target.source):
                unheard = {
                    "on_error 'quarantine'": own.on_error == "quarantine",
                    f"max_bad_rows {own.max_bad_rows}": own.max_bad_rows is not None,
                }
                for option in (name for name, given in unheard.items() if given):
                    log.warning(
                        "dataset %s: %s has no effect on rows that are saved as they are: bad rows "
                        "are left out and counted; call tokenize() before save()",
                        target.dataset,
                        option,
                    )
            if target.config.format == "jsonl":
                check_json(target.source.schema)
        return data

    def write(self, data: Sources, context: PipelineContext) -> list[SavedFolder]:
        """Writes every dataset of `data`.

        Raises:
            ConfigError: A folder holds something else.
            StorageError: Writing fails.
        """
        return [
            write_folder(target, rows_of(target, context), context.progress)
            for target in self.targets(data, context)
        ]

    def publication(self, folders: Sequence[SavedFolder]) -> Publication | None:
        """Returns what to push of the written folders; None if nothing is pushed."""
        if not (self.config.push_to_hub and folders):
            return None
        assert self.config.hub_repo_id is not None
        paths = {folder.dataset: folder.path for folder in folders}
        return publication(paths, self.config.hub_repo_id, self.config.storage_options)

    def targets(self, data: Mapping[str, ShardedSource], context: PipelineContext) -> list[Target]:
        """Returns the folder of each dataset, and how it is written."""
        if not self.config.enabled:
            return []
        datasets = datasets_of(context)
        for name, dataset in datasets.items():
            for own, instead in (("save_path", "output_dir"), ("save_format", "format")):
                require(
                    fields_of(dataset)[own] is None or name in data,
                    f"datasets.{name}.{own}",
                    "has no effect after mix(), where the datasets are one",
                    f"Save before mix(), or drop it and set save.{instead}.",
                )
        targets = []
        for name, source in data.items():
            config, folder = self.config, self.config.output_dir
            if folder is not None and len(data) > 1:
                folder = join(folder, name)
            if name in datasets:
                folder = datasets[name].save_path or folder
                try:
                    config = dataclasses.replace(
                        config, format=datasets[name].save_format or config.format
                    )
                except ConfigError as error:
                    raise error.under("save") from None
            require(
                folder is not None,
                "save.output_dir",
                f"no folder for dataset {name!r}",
                "Set it, or the dataset's save_path.",
            )
            place = self._placed(str(folder))
            targets.append(Target(dataset=name, source=source, folder=place, config=config))
        return targets

    def _placed(self, folder: str) -> str:
        """Returns a folder that is the same wherever the process is."""
        if "://" in folder or folder.startswith("~") or os.path.isabs(folder):
            return folder
        self._here = self._here or os.getcwd()
        return folder if self._here == os.getcwd() else os.path.join(self._here, folder)


def rows_of(target: Target, context: PipelineContext) -> Rows:
    """Returns the rows to write of a source, prepared.

    Token documents come from their cache; everything else is written unchanged.
    """
    source = rows = target.source
    info, planned = info_of(source), planned_of(source)
    require(
        not info.pairs,
        "save",
        "pairs of answers have no columns of their own until they are packed",
        "Call pack() before save(), or load them without.",
    )
    if is_documents(source):
        below = source.below if isinstance(source, Source) else None
        own, columns = cached_of(source), info.extra_columns
        continues = own is not None and own.continues
        rows = CachedDocuments(source.materialize(), below or source, columns, continues=continues)
    elif ROW_NUMBER in source.schema.names:
        rows = UnnumberedRows(source)
    fingerprint = rows.fingerprint if planned is None else planned.prepare().content()
    turns = trained_turns(target.source)
    own = datasets_of(context).get(target.dataset)
    aligned = info.aligned or (() if own is None else tuple(own.aligned))
    ledger = lambda: ledger_of(target.dataset, source)  # noqa: E731
    return Rows(rows, fingerprint, info.tokens, turns, ledger, aligned)
