"""The source stage opens files (whole, or their first bytes), saved folders or rows as a source."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from easypipe.cache.location import index_folder
from easypipe.core.errors import ConfigError, SchemaError, SourceError, require
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    ShardedSource,
    Source,
    Sources,
    info_of,
    select,
)
from easypipe.core.storage import is_remote
from easypipe.core.values import Arguments, Dataset
from easypipe.save.saved import SavedSource, is_saved, load_saved, read_manifest
from easypipe.sources.base import FileOptions
from easypipe.sources.external.dicts import MISFITS
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.external.objects import RandomAccessSource, open_object
from easypipe.sources.external.saved_datasets import is_saved_dataset, saved_dataset_files
from easypipe.sources.formats.forward import open_forward
from easypipe.sources.formats.records import MAX_RECORD_BYTES
from easypipe.sources.hub.source import HuggingFaceShardedSource
from easypipe.sources.open import open_files, require_text_files
from easypipe.sources.refs import format_of
from easypipe.sources.splits import PartialSource, limited
from easypipe.stages.config import datasets_of
from easypipe.stages.source.columns import formatted, read_columns, template_columns
from easypipe.stages.source.config import (
    DatasetConfig,
    is_hub,
    is_object,
    is_tokens,
    no_datasets,
    split_of,
)
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

log = logging.getLogger("easypipe")

HEAD_BYTES = 8 << 20  # bytes of a file's head that are read for the first rows of a dataset
# one reader, which distinguishes lines from an array by the content
READERS = {"jsonl": "json"}


class SourceStage(BaseStage):
    """The source stage; it opens every dataset of the pipeline's config.

    It lists files and reads their indexes, but no rows.

    Args:
        first_rows: For a first look: only this many rows of each dataset are opened, from the head
            of its first file, so that no file is read to its end.
    """

    def __init__(self, *, first_rows: int | None = None) -> None:
        super().__init__()
        self.first_rows = first_rows

    @property
    def name(self) -> str:
        return "source"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        opened = dict(data)
        datasets = datasets_of(context)
        if not opened and not datasets:
            raise no_datasets()
        for name, dataset in datasets.items():
            opened[name] = open_dataset(dataset, context, self.first_rows)
        return opened


def _saved(dataset: DatasetConfig, saved: SavedSource) -> SavedSource:
    """Returns the rows of a saved folder, which knows its format."""
    written = saved.manifest.format
    require(
        dataset.type is None
        or READERS.get(dataset.type, dataset.type) == READERS.get(written, written),
        f"datasets.{dataset.name}.type",
        f"{dataset.type!r}, but {dataset.data_files} was saved as {written}",
        "Leave it out.",
    )
    require(
        dataset.text_unit is None,
        f"datasets.{dataset.name}.text_unit",
        "has no effect: this folder was saved row by row",
        "Leave it out.",
    )
    own, tokens = dataset.tokenizer, saved.manifest.tokens
    if own is not None and tokens is not None:
        named = own if isinstance(own, str) else own.name_or_path
        require(
            named == tokens.tokenizer
            or load_tokenizer(own).fingerprint == tokens.tokenizer_fingerprint,
            f"datasets.{dataset.name}.tokenizer",
            f"{named!r}, but {dataset.data_files} holds tokens of {tokens.tokenizer!r}",
            "Leave it out.",
        )
    return saved


def _plain_files(dataset: DatasetConfig, context: PipelineContext) -> ShardedSource:
    """Returns the rows of files, read forward if they are streamed by lines."""
    kind = None if dataset.type is None else READERS.get(dataset.type, dataset.type)
    files, unit = dataset.data_files, dataset.text_unit
    options: Arguments = {"on_error": dataset.on_error, "storage_options": dataset.storage_options}
    # A part of a split needs row counts; paragraphs and whole files must be located.
    lines = context.config.streaming and split_of(dataset)[1] is None and unit in (None, "line")
    forward = open_forward(files, kind, **options, num_rows=dataset.num_rows) if lines else None
    try:
        if forward is not None:
            require_text_files(unit, forward.kind)
        return forward or open_files(
            files, type=kind, **options, index_dir=index_folder(dataset, context), text_unit=unit
        )
    except ConfigError as error:
        raise error.under(f"datasets.{dataset.name}") from None


def open_dataset(
    dataset: DatasetConfig, context: PipelineContext, first_rows: int | None = None
) -> ShardedSource:
    """Opens the source of a dataset, with its formatting.

    Args:
        first_rows: Only this many rows, from the head of the first file; None: all rows.

    Raises:
        MissingFileError: There is no such file.
        SourceError: A file does not have the format that its name says.
    """
    files = dataset.data_files
    most = (
        dataset.num_rows if first_rows is None else min(first_rows, dataset.num_rows or first_rows)
    )
    own = _open_input(
        dataset, index_folder(dataset, context), num_rows=most, counted=not context.config.streaming
    )
    if own is not None:
        source: ShardedSource = own
    elif dataset.in_memory:
        rows = list(files) if isinstance(files, tuple) else files
        source = _rows_in_memory(rows, dataset)
    elif isinstance(files, str | Path) and is_saved(files, dataset.storage_options):
        source = _saved(dataset, load_saved(files, dataset.storage_options))
    else:
        for i, one in enumerate(files if isinstance(files, list | tuple) else ()):
            here = format_of(str(one)) is None and not is_remote(one) and is_saved(one)
            require(
                not here or read_manifest(one).tokens is None,
                f"datasets.{dataset.name}.data_files[{i}]",
                f"{str(one)!r} is a folder of saved tokens, and a list of files does not tell "
                "whose they are",
                "Give each such folder as a dataset of its own.",
            )
        source = _plain_files(dataset, context)
    if isinstance(source, Source):
        source = source.exactly(template_columns(dataset))
    if first_rows is not None and most is not None:
        whole = dataset.text_unit == "file"  # every file is one row
        size, count = (MAX_RECORD_BYTES, first_rows) if whole else (HEAD_BYTES, 1)
        head = source.head(size, files=count) if isinstance(source, Source) else source
        return formatted(limited(_without_conflicts(head, dataset), most), dataset)
    source = _without_conflicts(source, dataset)
    part = split_of(dataset)[1]
    if part is not None:
        source = PartialSource(source, part, f"dataset {dataset.name!r}, split")
    if dataset.num_rows is not None and not info_of(source).uncounted:
        source = limited(source, dataset.num_rows)
    return formatted(source, dataset)


def _rows_in_memory(rows: Dataset, dataset: DatasetConfig) -> ShardedSource:
    """Returns the source of a table, of a list of dicts or of a dict of columns."""
    name = str(dataset.name)
    try:
        return InMemoryShardedSource(rows, name=name)
    except SourceError as error:
        if not isinstance(error.__cause__, MISFITS):
            raise
        if isinstance(rows, Mapping):
            rows = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    # types differ in a column, which matters if it is read, or in rows, which may be skipped
    skip = dataset.on_error != "error"
    return RandomAccessSource(rows, name=name, skip=skip, first_rows=len(rows))


def _without_conflicts(source: ShardedSource, dataset: DatasetConfig) -> ShardedSource:
    """Returns the source; if its files differ in columns that the dataset ignores, without them.

    A warning then names the columns that are read.
    """
    try:
        _ = source.schema
    except SchemaError as conflict:  # not for an outage: each attempt would wait again
        for names in read_columns(dataset) if isinstance(source, Source) else ():
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


def _open_input(
    dataset: DatasetConfig,
    index_dir: Path | None,
    *,
    num_rows: int | None = None,
    counted: bool = True,
) -> ShardedSource | None:
    """Opens the whole split of an input that is neither plain files nor rows; None for those.

    Args:
        num_rows: For a user's source, how many of its rows are requested.
        counted: For a user's source, whether its rows are counted before they are read.
    """
    files = dataset.data_files
    split, part = split_of(dataset)
    options: FileOptions = {
        "on_error": dataset.on_error,
        "storage_options": dataset.storage_options,
        "index_dir": index_dir,
    }
    if is_object(files):
        return open_object(
            files,
            name=str(dataset.name),
            split=split,
            version=dataset.version,
            num_rows=num_rows if part is None else None,
            counted=counted or part is not None,
            folder=index_dir,
            skip=dataset.on_error != "error",
        )
    if is_hub(dataset):
        return HuggingFaceShardedSource(
            files,
            split=split,
            subset=dataset.subset,
            revision=dataset.revision,
            num_rows=dataset.num_rows if part is None else part.first_rows,
            text_unit=dataset.text_unit,
            **options,
        )
    if is_tokens(dataset):
        return open_files(files, type=dataset.type, token_files=dataset.token_files, **options)
    if isinstance(files, str | Path) and is_saved_dataset(files):
        require(
            dataset.type in (None, "arrow"),
            f"datasets.{dataset.name}.type",
            f"{dataset.type!r}, but {files} is a folder of `datasets`",
            "Leave it out.",
        )
        return open_files(
            saved_dataset_files(files, split),
            type="arrow",
            text_unit=dataset.text_unit,
            **options,
        )
    return None
