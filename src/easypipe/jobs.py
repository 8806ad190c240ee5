"""Whole jobs: tokenize_and_save(), preparing a config (its file with `--set`), rows held out."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from easypipe.cache.location import cache_folder
from easypipe.cache.repair import place_of
from easypipe.cache.verify import Verification
from easypipe.core.config import apply_overrides, fields_of, from_dict, is_config, load_yaml
from easypipe.core.errors import (
    ConfigError,
    EasypipeError,
    PlanError,
    SourceError,
    StorageError,
    require,
)
from easypipe.core.ledger import Ledger
from easypipe.core.progress import ProgressLine
from easypipe.core.protocols import ProgressListener, silent
from easypipe.core.remote import StorageOptions
from easypipe.core.values import JsonObject, Settings
from easypipe.pipeline import Pipeline
from easypipe.save.config import SaveStageConfig
from easypipe.save.verify import cache_folder_of, verify
from easypipe.stages.build_record import recall, recall_saved
from easypipe.stages.config import PipelineConfig, datasets_of, settings_of
from easypipe.stages.load.stage import DocumentsStage
from easypipe.stages.mix.config import MixStageConfig
from easypipe.stages.save import SaveReport
from easypipe.stages.source.config import DatasetConfig
from easypipe.stages.source.stage import SourceStage
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.train.model.pretrained.added import tokenizer_with
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.transforms.columns.hold_out import HoldOutConfig
from easypipe.transforms.tokenizer.config import TokenizerConfig

log = logging.getLogger("easypipe")


def tokenize_and_save(
    data_files: Any,
    tokenizer: TokenizerConfig | str,
    output_path: str | Path,
    output_format: Literal["parquet", "arrow", "jsonl"] = "parquet",
    max_length: int | None = None,
    *,
    content_field: str = "text",
    on_error: Literal["error", "skip", "quarantine"] = "error",
    max_bad_rows: int | None = None,
    num_shards: int | None = None,
    max_shard_size: int | str | None = None,
    compression: Literal["none", "gzip", "lz4", "zstd"] | None = None,
    overwrite: bool = False,
    num_workers: int | None = None,
    executor: Literal["local", "ray"] = "local",
    cache_dir: str | Path | None = None,
    storage_options: StorageOptions = None,
    output_storage_options: StorageOptions = None,
    progress: ProgressListener | None = None,
) -> SaveReport:
    """Tokenizes one dataset and writes its documents in their order.

    It runs source, tokenize and save of a Pipeline; a second call continues an interrupted one.

    Args:
        storage_options: For data_files, and for output_path without output_storage_options.
        progress: None shows the rate and the remaining time on the terminal, or logs them every
            half minute; `easypipe.core.protocols.silent` shows nothing.

    Raises:
        EasypipeError: What `Pipeline.build` raises.
    """
    dataset = DatasetConfig(
        data_files=data_files,
        tokenizer=tokenizer,
        content_field=content_field,
        on_error=on_error,
        max_bad_rows=max_bad_rows,
        storage_options=storage_options,
    )
    written = storage_options if output_storage_options is None else output_storage_options
    save = SaveStageConfig(
        output_dir=output_path,
        format=output_format,
        num_shards=num_shards,
        max_shard_size=max_shard_size,
        compression=compression,
        overwrite=overwrite,
        storage_options=written,
    )
    config = PipelineConfig(
        datasets=(dataset,),
        seed=0,  # nothing here is random
        cache_dir=cache_dir,
        executor=executor,
        tokenize=TokenizeStageConfig(max_length=max_length, num_workers=num_workers),
        save=save,
    )
    return Pipeline(config, progress=progress or ProgressLine()).source().tokenize().save().build()


def file_values(path: str | Path, overrides: Sequence[str]) -> JsonObject:
    """Reads the values of a config file, with `key.path=value` overrides.

    Raises:
        ConfigError: A value is wrong; the message names its key path. An override with `data.` is
            also wrong if the file is a pipeline config.
    """
    values = load_yaml(path)
    if "data" in values or "datasets" not in values:
        return apply_overrides(values, overrides)
    for override in overrides:
        key, equals, value = override.partition("=")
        head, _, rest = key.partition(".")
        require(
            head != "data" or not rest or not equals,
            key,
            f"{path} is a pipeline config, whose keys are written without `data.`",
            f"Write --set {rest}={value}.",
        )
        require(
            head not in RUN_KEYS,
            key,
            f"{path} is a pipeline config, which has no {head}",
            "Put its keys under data: in a run config (data, model, train, eval).",
        )
    return apply_overrides(values, overrides)


RUN_KEYS = ("data", "model", "train", "eval")


def chain(
    config: PipelineConfig,
    *,
    progress: ProgressListener = silent,
    save: bool = True,
    first_rows: int | None = None,
) -> Pipeline:
    """Returns the stages that `config` describes, without load().

    Several datasets are mixed; they are packed and saved if the config says so.

    Args:
        config: The config of the data.
        progress: Called as the work goes on.
        save: False leaves out save(), for callers that only inspect the data.
        first_rows: As in SourceStage.
    """
    pipeline = Pipeline(config, progress=progress).add_stage(SourceStage(first_rows=first_rows))
    with _naming_files(config):
        pipeline.tokenize()
    if config.mix is not None or len(config.datasets) > 1:
        pipeline.mix()
    if config.pack is not None:
        pipeline.pack()
    if save and config.save is not None:
        pipeline.save()
    for i, dataset in enumerate(config.datasets if save and config.save is None else ()):
        for option in ("save_path", "save_format"):
            require(
                fields_of(dataset)[option] is None,
                f"datasets[{i}].{option}",
                "has no effect without save",
                "Add `save: {}` to the config, or leave it out.",
            )
    if config.mix is None and len(config.datasets) == 1 and config.pack is None:
        pipeline.add_stage(DocumentsStage())
    return pipeline


def repair_as_made(
    path: str | Path, *, progress: ProgressListener = silent
) -> tuple[Verification, ...]:
    """Repairs a token cache or saved folder with the chains that made the broken files.

    It calls `Pipeline.repair` on the chains recorded in the cache folder (stages/build_record.py).

    Raises:
        ConfigError: The chain was not recorded, or rows came from memory or from code; the message
            says what to give.
    """
    path = place_of(path)
    found = verify(path)
    broken = [one for one in found if not one.ok]
    place = cache_folder_of(path)
    if place is None:
        noted = [recall_saved(place_of(one.path), cache_folder(None)) for one in broken]
    else:  # records of ranges belong to every manifest that names their tokens
        to_make = found if any(one.kind == "records" for one in broken) else broken
        names = [place_of(one.path).rpartition("/")[2] for one in to_make if one.kind != "records"]
        noted = [recall(name.removesuffix(".json"), place[0]) for name in names]
    for i, made in enumerate(noted):
        if made in noted[:i]:
            continue
        with contextlib.chdir(made["folder"]):
            config = from_dict(PipelineConfig, made["config"])
            # The tokens are at the caller's path, even if the folder was elsewhere at their making.
            config = (
                config
                if place is None
                else dataclasses.replace(config, cache_dir=str(place[0].at()))
            )
            pipeline = Pipeline(config, progress=progress).source()
            for stage, values in made["stages"]:
                # the stages that a manifest names, which are methods of a Pipeline
                getattr(pipeline, stage)(values)
            pipeline.repair(path)
    return verify(path)


def with_tokenizer_of(data: PipelineConfig, model: PretrainedConfig) -> PipelineConfig:
    """Returns `data` with the tokenizer of the model as its default.

    A default tokenizer that `data` already names is kept.
    """
    if data.default_tokenizer is not None or (
        data.tokenize is not None and data.tokenize.default_tokenizer is not None
    ):
        return data
    try:
        _, folder = model.resolved()
    except EasypipeError as error:
        error.at = f"model.pretrained: {error.at}"
        raise
    if model.add_tokens:
        into = cache_folder(data.cache_dir, data.cache).local / "tokenizers"
        folder = tokenizer_with(folder, model.add_tokens, into)
    own = folder / "tokenizer.json"
    return dataclasses.replace(data, default_tokenizer=str(folder)) if own.is_file() else data


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Data that is tokenized, planned and saved.

    Args:
        data: The pipeline of the training data, which ends before load().
        held_out: The pipelines of the held-out data by name.
        report: The report of what happened to their rows.
    """

    data: Pipeline
    held_out: Mapping[str, Pipeline]
    report: SaveReport


def chains(
    data: PipelineConfig,
    held_out: Mapping[str, PipelineConfig] | None = None,
    *,
    progress: ProgressListener = silent,
    save: bool = True,
) -> tuple[Pipeline, dict[str, Pipeline]]:
    """Returns the chain of `data`, and those of the held-out configs, completed from it."""
    pipeline = chain(data, progress=progress, save=save)
    config = settings_of(pipeline.get_context())
    others: dict[str, Pipeline] = {}
    for name, other in (held_out or {}).items():
        with placed(f"eval.{name}"):
            others[name] = chain(complete(name, config, other), progress=progress, save=save)
    return pipeline, others


def prepare_data(
    data: PipelineConfig,
    held_out: Mapping[str, PipelineConfig] | None = None,
    *,
    progress: ProgressListener = silent,
    check: Callable[[Pipeline, Mapping[str, Pipeline]], None] | None = None,
) -> Prepared:
    """Tokenizes, plans and saves what the configs describe.

    It loads nothing onto a device and needs no jax.

    Args:
        data: The config of the training data.
        held_out: The configs of held-out data by name.
        progress: Called as the work goes on.
        check: Called with the chains before any row is read; it may raise an error to stop there.
    """
    pipeline, others = chains(data, held_out, progress=progress)
    if check is not None:
        check(pipeline, others)
    warn_of_trained_rows(pipeline, others)
    with _naming_files(data):
        reports = {"": pipeline.write()}
    for name, other in others.items():
        with placed(f"eval.{name}"):
            reports[f"eval.{name}"] = other.write()
    if not data.streaming:
        warn_of_fewer_rows("data", pipeline)
        for name, other in others.items():
            warn_of_fewer_rows(f"eval.{name}", other)
    return Prepared(pipeline, others, _joined(reports))


@contextlib.contextmanager
def _naming_files(config: PipelineConfig) -> Generator[None]:
    """Adds a dataset's data_files as a note to a SourceError that names none of its files."""
    try:
        yield
    except SourceError as error:
        for dataset in config.named().datasets:
            if error.at.startswith(f"dataset {dataset.name!r}") and not dataset.in_memory:
                error.add_note(f"dataset {dataset.name!r} reads {dataset.data_files}")
        raise


@contextlib.contextmanager
def placed(at: str) -> Generator[None]:
    """Makes errors name keys as in the file, which has the PipelineConfig under the key `at`.

    An error then says `data.mix.weights` and not `mix.weights`. An empty `at` means that the config
    is the whole file.
    """
    try:
        yield
    except (ConfigError, PlanError, StorageError) as error:  # errors of other kinds name files
        notes: list[str] = error.__dict__.get("__notes__", [])
        notes[:] = (f"{at}.{note}" if at and KEY.match(note) else note for note in notes)
        if at and KEY.match(error.at):
            error.at = f"{at}.{error.at}"
        raise


KEY = re.compile(rf"({'|'.join(PipelineConfig.__annotations__)})([.\[:=]|$)")
FROM_DATA = {"from", "fraction", "seed", "load"}


def _check_held_out(at: str, entry: Settings) -> None:
    """Checks that `entry` describes rows held out of the data.

    Raises:
        ConfigError: It does not.
    """
    for key in entry:
        require(
            key in FROM_DATA,
            f"{at}.{key}",
            "has no effect together with from",
            "Leave it out.",
            have=sorted(FROM_DATA),
        )
    require(
        entry["from"] == "data",
        f"{at}.from",
        f"{entry['from']!r} names no data",
        "Write from: data.",
        have=["data"],
    )
    require(
        entry.get("fraction") is not None,
        f"{at}.fraction",
        "is missing",
        "Say how many of the rows: fraction: 0.01.",
    )


def with_hold_outs(values: Settings) -> JsonObject:
    """Returns the values of a run config with `eval: {name: {from: data, ...}}` written out.

    The datasets of `data` (a config or its values) are then listed in `data` and in the entry, each
    with `hold_out`.

    Raises:
        ConfigError: Two entries hold out rows, an entry with `from` has other keys, or a dataset
            already has `hold_out`.
    """
    entries = values.get("eval") if isinstance(values.get("eval"), Mapping) else {}
    held = {
        name: entry
        for name, entry in (entries or {}).items()
        if isinstance(entry, Mapping) and "from" in entry
    }
    if not held:
        return dict(values)
    if len(held) > 1:
        raise ConfigError(
            at=f"eval.{list(held)[1]}.from",
            problem="two entries hold out rows of the data",
            fix="Leave one of them out.",
        )
    [(name, entry)] = held.items()
    _check_held_out(f"eval.{name}", entry)
    options = {key: entry[key] for key in ("fraction", "seed") if key in entry}
    from_dict(HoldOutConfig, options, f"eval.{name}")
    data = values.get("data") or {}
    sets = _of(data, "datasets") or ()
    if not isinstance(sets, list | tuple) or not all(
        isinstance(one, Mapping) or is_config(type(one)) for one in (data, *sets)
    ):
        return {**values, "eval": {}}  # validation of the data reports what is wrong
    for i, dataset in enumerate(sets):
        require(
            _of(dataset, "hold_out") is None,
            f"data.datasets[{i}].hold_out",
            f"is set by eval.{name}",
            "Leave one of them out.",
        )
    own: list[Any] = []
    for i, dataset in enumerate(sets, start=1):
        changes = {
            "hold_out": options | {"held": True},
            "name": f"eval.{name}.{_of(dataset, 'name') or f'dataset{i}'}",
        }
        own.append(_with(dataset, save_path=None, save_format=None, **changes))
    made: JsonObject = {"datasets": own} | ({"load": entry["load"]} if "load" in entry else {})
    if len(own) > 1:
        made["mix"] = {"stop_strategy": "all_exhausted"}
    of_data = [_with(dataset, hold_out=options) for dataset in sets]
    return {
        **values,
        "data": _with(data, datasets=of_data),
        "eval": {**(entries or {}), name: made},
    }


def _of(given: Any, option: str) -> Any:
    """Returns an option of a config or of its values."""
    return given.get(option) if isinstance(given, Mapping) else getattr(given, option, None)


def _with(given: Any, **changes: Any) -> Any:
    """Returns a config or its values with changes; in values, None removes a key."""
    if not isinstance(given, Mapping):
        return dataclasses.replace(given, **changes)
    return {
        key: value
        for key, value in {**given, **changes}.items()
        if key not in changes or value is not None
    }


def warn_of_trained_rows(data: Pipeline, held_out: Mapping[str, Pipeline]) -> None:
    """Warns of each held-out entry whose rows are also trained on.

    Such an entry reads files that training also reads, without a hold-out.
    """
    sides = {name: dataset.hold_out for name, dataset in datasets_of(data.get_context()).items()}
    trained = {
        shard.name: sides.get(name)
        for name, source in data.tokenized().items()
        for shard in source.shards
    }
    for entry, pipeline in held_out.items():
        own = {
            name: dataset.hold_out for name, dataset in datasets_of(pipeline.get_context()).items()
        }
        for name, source in pipeline.tokenized().items():
            apart = own.get(name)
            for shard in source.shards:
                other = trained.get(shard.name)
                kept = (
                    apart
                    and other
                    and (apart.fraction, apart.seed) == (other.fraction, other.seed)
                    and apart.held != other.held
                )
                # Rows in memory are named after their dataset, so equal names prove nothing.
                if shard.name in trained and not kept and shard.name != name:
                    log.warning(
                        "eval.%s: its rows of %s are trained on too, so its loss says little "
                        "about new text",
                        entry,
                        shard.name,
                    )
                    break


def warn_of_fewer_rows(at: str, pipeline: Pipeline) -> None:
    """Warns of each dataset that has fewer rows than its num_rows."""
    datasets = datasets_of(pipeline.get_context())
    for name, source in pipeline.tokenized().items():
        there, asked = source.materialize().manifest.counts.rows, datasets[name].num_rows
        if asked is not None and there < asked:
            text = "%s: dataset %s: num_rows asks for %d rows, and it has %d: all are read"
            log.warning(text, at, name, asked, there)


def complete(name: str, data: PipelineConfig, held_out: PipelineConfig) -> PipelineConfig:
    """Returns the held-out config `name`, completed from `data`.

    It takes seed, cache_dir (and cache), default_tokenizer, tokenize and pack from `data` unless it
    sets them. Without its own mix, several datasets are read to their ends, each document once.
    """
    fields = (
        "seed",
        "cache_dir",
        "default_tokenizer",
        "tokenize",
        "pack",
        *(("cache",) if held_out.cache_dir is None else ()),
    )
    given, own = fields_of(data), fields_of(held_out)
    missing = {field: given[field] for field in fields if own[field] is None}
    several = len(held_out.datasets) > 1
    if several and held_out.mix is None:
        missing["mix"] = MixStageConfig(stop_strategy="all_exhausted")
    datasets = tuple(
        dataset
        if dataset.name is not None
        else dataclasses.replace(dataset, name=f"eval.{name}" + (f".{i}" if several else ""))
        for i, dataset in enumerate(held_out.datasets, start=1)
    )
    return dataclasses.replace(held_out, datasets=datasets, **missing)


def _joined(reports: Mapping[str, SaveReport]) -> SaveReport:
    """Returns one report; the ledger names datasets below the names of their reports."""
    ledger = Ledger()
    for name, report in reports.items():
        ledger.extend(report.ledger, name)
    return SaveReport(
        folders=tuple(folder for report in reports.values() for folder in report.folders),
        ledger=ledger,
        pushed=tuple(pushed for report in reports.values() for pushed in report.pushed),
    )
