"""The source stage: a dataset's files, or the rows themselves, become a ShardedSource."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from easypipe.cache.location import index_folder
from easypipe.core.config import ListOf, config
from easypipe.core.errors import ConfigError, SchemaError
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedSource
from easypipe.save.saved import is_saved, load_saved
from easypipe.sources.base import FileSource
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.external.own import OwnSource
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.sources.formats.forward import ForwardSource, open_forward
from easypipe.sources.formats.records import MAX_RECORD_BYTES
from easypipe.sources.formats.txt import TextUnit
from easypipe.sources.hub.source import HuggingFaceShardedSource
from easypipe.sources.limit import LimitedSource, select
from easypipe.sources.open import open_files, require_text_files
from easypipe.sources.splits import PartialSource
from easypipe.stages.source.columns import check_formats, formatted, read_columns, template_columns
from easypipe.stages.source.inputs import check_input, is_object, open_input, split_of
from easypipe.stages.tokenize.prompt_rows import check_prompts
from easypipe.transforms.columns.hold_out import HoldOutConfig
from easypipe.transforms.prompt.config import PromptConfig, TrainOn
from easypipe.transforms.tokenizer.lengths import LengthPolicy
from easypipe.transforms.tokenizer.tokenizer import TokenizerConfig

log = logging.getLogger("easypipe")

HEAD_BYTES = 8 << 20  # of a file of lines, in which the first rows of a dataset are looked for
READERS = {"jsonl": "json"}  # one reader looks at the content and tells lines from an array


@config
class DatasetConfig:
    """One dataset: where its rows are, and how they are read.

    data_files: a path, glob, folder, URL or a list of those; a folder that `save()` wrote, or
    `datasets` with save_to_disk; a dataset of
        the Hub (`hf://datasets/owner/name`, or `owner/name` with type="huggingface"); rows in
        memory (an Arrow table, a list of dicts, a dict of columns), a `datasets.Dataset`, a Grain
        data source, or anything that gives dicts by number; a source of your own (see
        ShardedDataSource), or a function without arguments that yields dicts.
    version: of the rows of an object whose content nobody looks at: a source of your own, a
    function, what gives dicts by number. Change
        it when they change. None takes the object's attribute `version`; without one, rows by
        number are known by their content, and those of the others are read anew in every process.
    name: how weights, reports and errors call it; None gives `dataset1`, `dataset2`, ... by
    position.
    type: the format, where the file names do not tell it. `tokens` reads `.npy`, raw `.bin` and
    Megatron's `.bin` with `.idx`;
        `huggingface` reads a dataset of the Hub.
    split: of a dataset of the Hub (None takes `train`), or of a DatasetDict, in memory or in a
    folder. Plain files are all `train`. A part
        of one is written as `datasets` does: `train[:10%]`, `train[100:200]`, `train[-5%:]`;
        num_rows counts in it.
    subset: the configuration of a dataset of the Hub; None takes its default.
    revision: branch, tag or commit of a dataset of the Hub; None takes main. It is resolved to a
    commit when the source is opened.
    text_unit: what a document of `.txt` files is: a `line` (what None takes), a `paragraph` (lines
    up to a blank one, with the line breaks
        inside), or the whole `file`, as it is.
    token_files: how documents lie in `.npy` and raw `.bin` files of tokens; for ArrayRecord files,
    that records are tokens, of its dtype.
    hold_out: read the rows that are held out for evaluation, or all others. `eval: {held_out:
    {from: data, fraction: 0.01, seed: 7}}` of a
        run sets it on both sides.
    num_rows: only the first so many rows, counted over the files in order.
    tokenizer: this dataset's own; None takes the stage's, then the pipeline's.
    tokenizer_kwargs: fields of TokenizerConfig that this dataset changes, whichever tokenizer it
    takes; and `use_fast`: False encodes with
        the reference, as backend="tokenizers" does.
    content_field: the column that is tokenized: text, or conversations (lists of objects with role
    and content, or JSON of that, as in a
        column `messages`).
    prompt_field, completion_field: two columns of text that are tokenized one after the other, in
    place of content_field.
    prompt: how rows become text, of which columns, and what of it is trained, in place of
    content_field and the options down to
        tools_field, which say the plainest of it.
    train_on: what the loss sees: `all` tokens, the `assistant`'s turns (what messages have where it
    is None), its last one
        (`last_assistant`), the `completion` (what prompts have where it is None; of messages, the
        last one).
    chat_template: a Jinja file, its text, or a built-in template's name (chatml, plain, zephyr,
    alpaca), in place of the tokenizer's own.
    template_date: the day (2026-01-31) that templates are told which ask for today's; None refuses
    those.
    train_empty_thinking: of messages, whether the thought without words that templates of models
    that reason write in
        front of an answer (`<think>\\n\\n</think>`) is trained; None means True, as in TRL's
        training templates. Where a template has generation markers, they decide.
    tools_field: the column with the tools of each conversation; None takes the column `tools`,
    where there is one.
    length: what becomes of documents with more than max_length tokens; None keeps their start.
    format_fields: columns under new names, old to new; all other options know the new ones.
    format_callback: a function that a row (a dict) is passed through, or "module:function"; what it
    returns is laid over the row. In YAML
        it needs --allow-code. It adds the content_field as text; further columns are announced in
        format_columns.
    format_columns: types of the columns that format_callback adds or changes, such as `{score:
    float64, tags: "list<string>"}`.
    format_batched: format_callback takes a pyarrow.RecordBatch instead, and returns one or a
    mapping of columns, row by row.
    format_version: raise it when format_callback changes. Without one, here or as the function's
    attribute `version`, tokens are not kept.
    additional_fields: columns that stay beside the tokens where documents are saved:
    `source().tokenize().save()`. Packed and mixed rows
        have no room for them, which a warning says.
    cache_path: a cache folder for this dataset alone, in place of the pipeline's cache_dir.
    cache_enabled: False keeps nothing: tokens lie in a temporary folder while the process runs, and
    are made anew in the next one.
    on_error: what a bad row does: `error` stops, `skip` counts it by reason, `quarantine` also
    writes it to a file with its place.
        Texts of white space alone are no bad rows: they are left out and counted.
    max_bad_rows: with skip and quarantine, stop at the first bad row after so many; None knows no
    limit. save_path, save_format: where and how `save()` writes this dataset, in place of the save
    stage's own.
    storage_options: passed to fsspec, for remote files; kept out of reports, fingerprints and saved
    configs, as it may hold credentials.
    """

    data_files: Any
    name: str | None = None
    type: (
        Literal[
            "json",
            "jsonl",
            "parquet",
            "csv",
            "arrow",
            "txt",
            "tokens",
            "arrayrecord",
            "huggingface",
        ]
        | None
    ) = None
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    text_unit: TextUnit | None = None
    token_files: TokenFilesConfig | None = None
    hold_out: HoldOutConfig | None = None
    num_rows: int | None = None
    version: str | int | None = None
    tokenizer: TokenizerConfig | str | None = None
    tokenizer_kwargs: dict[str, Any] | None = None
    content_field: str = "text"
    prompt_field: str | None = None
    completion_field: str | None = None
    prompt: PromptConfig | None = None
    train_on: TrainOn | None = None
    chat_template: str | Path | None = None
    template_date: str | None = None
    train_empty_thinking: bool | None = None
    tools_field: str | None = None
    length: LengthPolicy | None = None
    format_fields: dict[str, str] | None = None
    format_callback: Callable[..., Any] | str | None = None
    format_columns: dict[str, Any] | None = None
    format_batched: bool = False
    format_version: str | None = None
    additional_fields: ListOf[str] = ()
    cache_path: str | Path | None = None
    cache_enabled: bool = True
    on_error: Literal["error", "skip", "quarantine"] = "error"
    max_bad_rows: int | None = None
    save_path: str | Path | None = None
    save_format: Literal["parquet", "arrow", "jsonl"] | None = None
    # may hold credentials
    storage_options: dict[str, Any] | None = field(
        default=None, repr=False, metadata={"secret": True}
    )

    def check(self) -> None:
        files = self.data_files
        if not self.in_memory:
            paths = files if isinstance(files, list | tuple) else [files]
            rows = any(isinstance(path, Mapping) for path in paths)
            for i, path in enumerate(paths):
                at = "data_files" if paths is not files else f"data_files[{i}]"
                if rows and not isinstance(path, Mapping):
                    raise ConfigError(
                        at=at,
                        problem=f"{path!r} is no row, as others are",
                        fix="Give dicts alone, or paths alone.",
                    )
                if not rows and (not isinstance(path, str | Path) or not str(path)):
                    raise ConfigError(
                        at=at,
                        problem=f"{path!r} is neither a path nor rows",
                        fix="Give a path, a glob, a list, or a table.",
                    )
            if not paths:
                raise ConfigError(
                    at="data_files", problem="an empty list", fix="Give at least one path or row."
                )
        elif self.type is not None:
            raise ConfigError(
                at="type",
                problem=f"{self.type!r} says nothing about rows in memory",
                fix="Leave it out.",
            )
        if self.name is not None and (not self.name or "/" in self.name):
            raise ConfigError(
                at="name",
                problem=f"{self.name!r} cannot name a dataset",
                fix="Use a word without a slash.",
            )
        if self.num_rows is not None and self.num_rows < 1:
            raise ConfigError(
                at="num_rows",
                problem=f"{self.num_rows} rows are none",
                fix="Give at least 1, or leave it out for all.",
            )
        if self.max_bad_rows is not None and self.on_error == "error":
            raise ConfigError(
                at="max_bad_rows",
                problem="has no effect while on_error is 'error'",
                fix="Set on_error to 'skip' or 'quarantine'.",
            )
        if self.max_bad_rows is not None and self.max_bad_rows < 0:
            raise ConfigError(
                at="max_bad_rows",
                problem=f"{self.max_bad_rows} is no number of rows",
                fix="Give 0 or more.",
            )
        if self.cache_path is not None and not self.cache_enabled:
            raise ConfigError(
                at="cache_path",
                problem="has no effect while cache_enabled is False",
                fix="Leave one of them out.",
            )
        check_input(self)
        check_formats(self)
        check_prompts(self)

    @property
    def in_memory(self) -> bool:
        files = self.data_files
        if isinstance(files, pa.Table | Mapping) or is_object(files):
            return True
        return (
            isinstance(files, list | tuple)
            and bool(files)
            and all(isinstance(row, Mapping) for row in files)
        )


class SourceStage(BaseStage):
    """Opens every dataset of the pipeline's config. Files are listed and their indexes read; no
    rows are.

    first_rows: open of each dataset only so many rows, of the head of its first file, so that no
    file is read through: for a first look.
    """

    def __init__(self, *, first_rows: int | None = None) -> None:
        super().__init__()
        self.first_rows = first_rows

    @property
    def name(self) -> str:
        return "source"

    def process(
        self, data: dict[str, ShardedSource], context: PipelineContext
    ) -> dict[str, ShardedSource]:
        opened = dict(data)
        if not opened and not context.config.datasets:
            raise no_datasets()
        for dataset in context.config.datasets:
            opened[dataset.name] = open_dataset(dataset, context, self.first_rows)
        return opened


def no_datasets() -> ConfigError:
    return ConfigError(at="datasets", problem="there is none", fix="Give at least one dataset.")


def open_dataset(
    dataset: DatasetConfig, context: PipelineContext, first_rows: int | None = None
) -> ShardedSource:
    """Raises MissingFileError where no file is, SourceError where a file is not what its name
    says.
    """
    files = dataset.data_files
    kind = None if dataset.type is None else READERS.get(dataset.type, dataset.type)
    most = (
        dataset.num_rows if first_rows is None else min(first_rows, dataset.num_rows or first_rows)
    )
    own = open_input(
        dataset, index_folder(dataset, context), num_rows=most, counted=not context.config.streaming
    )
    if own is not None:
        source: ShardedSource = own
    elif dataset.in_memory:
        rows = list(files) if isinstance(files, tuple) else files
        source = InMemoryShardedSource(rows, name=str(dataset.name))
    elif isinstance(files, str | Path) and is_saved(files, dataset.storage_options):
        saved = load_saved(files, dataset.storage_options)
        if dataset.type is not None and kind != READERS.get(
            saved.manifest.format, saved.manifest.format
        ):
            raise ConfigError(
                at=f"datasets.{dataset.name}.type",
                problem=f"{dataset.type!r}, but {files} was saved as {saved.manifest.format}",
                fix="Leave it out.",
            )
        if dataset.text_unit is not None:
            problem = "has no effect: this folder was saved row by row"
            raise ConfigError(
                at=f"datasets.{dataset.name}.text_unit", problem=problem, fix="Leave it out."
            )
        source = saved
    else:
        options: dict[str, Any] = {
            "on_error": dataset.on_error,
            "storage_options": dataset.storage_options,
        }
        # a part needs its rows counted, paragraphs and whole files need to be found
        lines = (
            context.config.streaming
            and split_of(dataset)[1] is None
            and dataset.text_unit in (None, "line")
        )
        forward = open_forward(files, kind, **options, num_rows=dataset.num_rows) if lines else None
        unit = dataset.text_unit
        try:
            if forward is not None:
                require_text_files(unit, forward.kind)
            source = forward or open_files(
                files,
                type=kind,
                **options,
                index_dir=index_folder(dataset, context),
                text_unit=unit,
            )
        except ConfigError as error:
            raise error.under(f"datasets.{dataset.name}") from None
    if isinstance(source, FileSource | ForwardSource):
        source = source.exactly(template_columns(dataset))
    if first_rows is not None and most is not None:
        whole = dataset.text_unit == "file"  # every file is one row
        size, count = (MAX_RECORD_BYTES, first_rows) if whole else (HEAD_BYTES, 1)
        head = (
            source.head(size, files=count)
            if isinstance(source, FileSource | HuggingFaceShardedSource)
            else source
        )
        return formatted(LimitedSource(_without_conflicts(head, dataset), most), dataset)
    source = _without_conflicts(source, dataset)
    part = split_of(dataset)[1]
    if part is not None:
        source = PartialSource(source, part)
    if dataset.num_rows is not None and (
        part is not None or not isinstance(source, ForwardSource | OwnSource)
    ):
        source = LimitedSource(source, dataset.num_rows)
    return formatted(source, dataset)


def _without_conflicts(source: ShardedSource, dataset: DatasetConfig) -> ShardedSource:
    """The source; where its files differ in columns that nothing of this dataset reads, without
    those, which a warning names.
    """
    try:
        _ = source.schema
    except SchemaError as conflict:  # not an outage, which every try would wait for anew
        for names in read_columns(dataset) if hasattr(source, "select") else ():
            narrowed: ShardedSource = select(source, names)
            try:
                _ = narrowed.schema
            except SchemaError:
                continue
            log.warning(
                "dataset %s: %s: %s. It reads %s alone",
                dataset.name,
                conflict.at,
                conflict.problem,
                ", ".join(names),
            )
            return narrowed
        raise
    return source
