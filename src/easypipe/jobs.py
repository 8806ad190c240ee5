"""What a config describes, as whole chains: data to train on and held-out data, prepared here or in parts on several machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from easypipe.core.ledger import Ledger
from easypipe.core.protocols import ProgressListener, silent
from easypipe.pipeline import Pipeline
from easypipe.stages.config import PipelineConfig
from easypipe.stages.save import SaveReport


def chain(config: PipelineConfig, *, progress: ProgressListener = silent, save: bool = True) -> Pipeline:
    """The stages that `config` describes, up to and without load(): several datasets are mixed; packed and saved where it says so.

    save: False leaves out save(), for those who only look.
    """
    pipeline = Pipeline(config, progress=progress).source().tokenize()
    if config.mix is not None or len(config.datasets) > 1:
        pipeline.mix()
    if config.pack is not None:
        pipeline.pack()
    if save and config.save is not None:
        pipeline.save()
    return pipeline


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Data that is tokenized, planned and saved: pipelines that end before load(), and what became of their rows."""

    data: Pipeline
    held_out: Mapping[str, Pipeline]
    report: SaveReport


def chains(
    data: PipelineConfig, held_out: Mapping[str, PipelineConfig] | None = None, *, progress: ProgressListener = silent, save: bool = True
) -> tuple[Pipeline, dict[str, Pipeline]]:
    """The chain of `data`, and those of the held-out configs, completed from it."""
    pipeline = chain(data, progress=progress, save=save)
    config: PipelineConfig = pipeline.get_context().config
    others = {name: chain(complete(name, config, other), progress=progress, save=save) for name, other in (held_out or {}).items()}
    return pipeline, others


def prepare_data(
    data: PipelineConfig, held_out: Mapping[str, PipelineConfig] | None = None, *, progress: ProgressListener = silent
) -> Prepared:
    """Tokenizes, plans and saves what the configs describe; loads nothing onto a device and needs no jax."""
    pipeline, others = chains(data, held_out, progress=progress)
    return Prepared(pipeline, others, _joined([each.write() for each in (pipeline, *others.values())]))


def complete(name: str, data: PipelineConfig, held_out: PipelineConfig) -> PipelineConfig:
    """The held-out config `name`, with what it leaves out of seed, cache_dir, default_tokenizer, tokenize and pack taken from `data`."""
    fields = ("seed", "cache_dir", "default_tokenizer", "tokenize", "pack")
    missing = {field: getattr(data, field) for field in fields if getattr(held_out, field) is None}
    several = len(held_out.datasets) > 1
    datasets = tuple(
        dataset if dataset.name is not None else dataclasses.replace(dataset, name=f"eval.{name}" + (f".{i}" if several else ""))
        for i, dataset in enumerate(held_out.datasets, start=1)
    )
    return dataclasses.replace(held_out, datasets=datasets, **missing)


def _joined(reports: Sequence[SaveReport]) -> SaveReport:
    books = Ledger()
    for report in reports:
        books.extend(report.ledger)
    return SaveReport(
        folders=tuple(folder for report in reports for folder in report.folders),
        ledger=books,
        pushed=tuple(pushed for report in reports for pushed in report.pushed),
    )
