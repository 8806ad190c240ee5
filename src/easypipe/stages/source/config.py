"""DatasetConfig: where a dataset's rows are, how they are read, which options go together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from easypipe.core.aligned import LOOK_AHEAD_WEIGHT
from easypipe.core.config import ListOf, config, fields_of
from easypipe.core.errors import ConfigError, require
from easypipe.core.schema import (
    ATTENTION_MASK,
    DECODER_INPUT_IDS,
    HAS_EOS,
    INPUT_IDS,
    LOOK_AHEAD,
    PIXEL_VALUES,
    POSITION_IDS,
    ROW_NUMBER,
    SEGMENT_IDS,
    SOURCE,
    TARGET_COLUMNS,
)
from easypipe.core.storage import is_remote, names_in
from easypipe.sources.external.objects import is_dataset_object
from easypipe.sources.external.saved_datasets import is_saved_dataset
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.sources.formats.txt import TextUnit
from easypipe.sources.hub.layout import KEYWORDS
from easypipe.sources.hub.source import parse_hub_name
from easypipe.sources.refs import TOKEN_EXTENSIONS, format_of
from easypipe.sources.splits import Part, parse_split
from easypipe.transforms.chat.render import check_date, check_kwargs, check_whole
from easypipe.transforms.columns.columns import Rename
from easypipe.transforms.columns.hold_out import HoldOutConfig
from easypipe.transforms.columns.types import column_types
from easypipe.transforms.prompt.config import (
    PromptConfig,
    TrainOn,
    TrainOnEos,
    check_message_fields,
    check_thinking,
)
from easypipe.transforms.tokenizer.config import TokenizerConfig, with_options
from easypipe.transforms.tokenizer.lengths import LengthPolicy

WHOLE = "train"  # the split to which `datasets` assigns all rows of files without split names
HELD_OUT = (*KEYWORDS["validation"], *KEYWORDS["test"])

TALK_OPTIONS = (
    "message_fields",
    "chat_template",
    "template_date",
    "chat_template_kwargs",
    "train_empty_thinking",
    "tools_field",
)
PROMPT_OPTIONS = (
    "prompt_field",
    "completion_field",
    "rejected_field",
    "desirable_field",
    "train_on",
    "train_on_eos",
    *TALK_OPTIONS,
)

TOKEN_COLUMNS = (
    INPUT_IDS,
    *TARGET_COLUMNS,
    SEGMENT_IDS,
    POSITION_IDS,
    LOOK_AHEAD,
    ATTENTION_MASK,
    HAS_EOS,
    SOURCE,
    ROW_NUMBER,
)
# Batches get these columns elsewhere, so a dataset must not have one.
MADE_COLUMNS = (LOOK_AHEAD_WEIGHT, "reference_log_probs", PIXEL_VALUES, DECODER_INPUT_IDS)


@config
class DatasetConfig:
    r"""One dataset: where its rows are, and how they are read.

    Args:
        data_files: A path, glob, folder, URL or a list of those; a folder of `save()` or of
            `datasets`' save_to_disk; a dataset of the Hub (`hf://datasets/owner/name`, or
            `owner/name` with type="huggingface"); rows in memory (an Arrow table, a list of dicts,
            a dict of columns); a `datasets.Dataset`, a Grain data source, or any object that
            returns dicts by index; your own source (see ShardedDataSource); a function without
            arguments that yields dicts.
        name: Its name in weights, reports and errors; None means `dataset1`, `dataset2`, ... by
            position.
        type: The format, if the file names do not show it. `tokens` reads `.npy`, raw `.bin` and
            Megatron's `.bin` with `.idx`; `huggingface` reads a dataset of the Hub.
        split: The split of a dataset of the Hub (None takes `train`) or of a DatasetDict; plain
            files are all `train`. A part is written as in `datasets`: `train[:10%]`,
            `train[100:200]`, `train[-5%:]`; num_rows counts from its start.
        subset: The configuration of a dataset of the Hub; None takes its default.
        revision: Branch, tag or commit of a dataset of the Hub; None takes main. It is resolved to
            a commit when the source is opened.
        text_unit: What a document of `.txt` files is: a `line` (the default), a `paragraph` (lines
            up to a blank one, with the line breaks inside), or the whole `file`.
        token_files: How documents are stored in `.npy` and raw `.bin` files of tokens. For
            ArrayRecord files, it says that records are tokens of its dtype.
        hold_out: Read the rows that are held out for evaluation, or all others. `eval: {held_out:
            {from: data, fraction: 0.01, seed: 7}}` of a run sets it on both sides.
        num_rows: Read only the first rows, this many, counted over the files in order.
        version: The version of rows that are not identified by their content: those of your own
            source, a function, or an object that returns dicts by index. Change it when they
            change. None takes the object's attribute `version`; without one, rows by index are
            identified by their content, and the others are read again in every process.
        tokenizer: This dataset's tokenizer; None takes the stage's, then the pipeline's.
        tokenizer_kwargs: Fields of TokenizerConfig that this dataset changes, whichever tokenizer
            it uses; and `use_fast`: False encodes with the reference, as backend="tokenizers" does.
        content_field: The column that is tokenized: text, or conversations (lists of objects with
            role and content, or JSON text of them, as in a column `messages`).
        prompt_field: The first of two columns that are tokenized together, instead of
            content_field: text, or messages.
        completion_field: The second of two columns that are tokenized together: the text after the
            prompt, or the messages that answer it.
        rejected_field: The column of the answer that was not preferred, in addition to
            completion_field; the rows become pairs for train.preference. Without a prompt_field,
            the common beginning of both answers is the prompt.
        desirable_field: The column (true or false) that says whether the answer of completion_field
            is a desirable one, for train.preference with the losses kto and apo_zero_unpaired.
        prompt: How rows become text, and which part is trained on, instead of content_field and the
            options down to tools_field, which cover the common cases.
        train_on: Which tokens count in the loss: `all`; the `assistant`'s turns (default for
            messages); its last one (`last_assistant`); the `completion` (default for prompts; with
            messages, the last one).
        train_on_eos: Whether the token that ends a turn (`<|im_end|>`, EOS) is trained on: for
            every `turn` that is trained on (default), the `last` one, or `none`; for a text
            completion, its EOS.
        chat_template: A Jinja file, its text, or the name of a built-in template (chatml, plain,
            zephyr, alpaca), instead of the tokenizer's own.
        message_fields: Maps OpenAI's keys (role, content, tool_calls, reasoning_content, train,
            train_ranges, weight), and the `text` of typed parts, to the keys in your messages:
            {role: speaker, content: said}. Who speaks is mapped by `prompt.roles`.
        template_date: The day (2026-01-31) for templates that use today's date; with None, such
            templates are an error.
        chat_template_kwargs: Variables of the template besides messages, as in
            `apply_chat_template` of transformers: {enable_thinking: false}. A row's column
            `chat_template_kwargs` overrides it.
        train_empty_thinking: Whether the empty reasoning block that templates of reasoning models
            write before an answer (`<think>\n\n</think>`) is trained on; None means True, as in
            TRL's training templates. If a template has generation markers, they decide.
        tools_field: The column with the tools of each conversation; None takes the column `tools`,
            if there is one.
        length: What happens to documents with more than max_length tokens; None keeps their start.
        format_fields: New names of columns, as {old: new}; all other options use the new names.
        format_callback: A function that is called with each row (a dict), or "module:function"; the
            row is updated with its result. In YAML it needs --allow-code. It must return
            content_field as text; declare other columns in format_columns.
        format_columns: Types of the columns that format_callback adds or changes, such as `{score:
            float64, tags: "list<string>"}`.
        format_batched: Call format_callback with a pyarrow.RecordBatch instead; it returns one, or
            a mapping of columns, row by row.
        format_version: The version of format_callback: raise it when the function changes. Without
            one, here or as the function's attribute `version`, tokens are not kept.
        additional_fields: Columns that are saved with the tokens of documents
            (`source().tokenize().save()`). Packed and mixed rows cannot hold them, and a warning
            says so.
        cache_path: A cache folder only for this dataset, instead of the pipeline's cache_dir.
        cache_enabled: False stores tokens only in a temporary folder while the process runs; the
            next process makes them again.
        on_error: What happens at a bad row: `error` stops, `skip` counts it by reason, `quarantine`
            also writes it to a file with its place. Texts of only white space are not bad rows:
            they are left out and counted.
        max_bad_rows: With skip and quarantine, stop after this many bad rows; None means no limit.
        aligned_columns: For rows of tokens: columns of lists as long as input_ids, with values that
            stay with their tokens in batches (weights, log-probs, advantages). If a list has k
            values for each token and its type does not say so, give {name: k}.
        save_path: Where `save()` writes this dataset, instead of the save stage's path.
        save_format: The format in which `save()` writes this dataset, instead of the save stage's.
        storage_options: Passed to fsspec, for remote files; kept out of reports, fingerprints and
            saved configs, because it may hold credentials.
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
            "mds",
            "webdataset",
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
    rejected_field: str | None = None
    desirable_field: str | None = None
    prompt: PromptConfig | None = None
    train_on: TrainOn | None = None
    train_on_eos: TrainOnEos | None = None
    chat_template: str | Path | None = None
    message_fields: dict[str, str] | None = None
    template_date: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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
    aligned_columns: ListOf[str] | dict[str, int | None] = ()
    save_path: str | Path | None = None
    save_format: Literal["parquet", "arrow", "jsonl"] | None = None
    # may hold credentials
    storage_options: dict[str, Any] | None = field(
        default=None, repr=False, metadata={"secret": True}
    )

    def check(self) -> None:
        if not self.in_memory:
            _check_paths(self.data_files)
        require(
            not self.in_memory or self.type is None,
            "type",
            f"{self.type!r} says nothing about rows in memory",
            "Leave it out.",
        )
        if self.name is not None:
            _check_name(self.name)
        require(
            self.num_rows is None or self.num_rows >= 1,
            "num_rows",
            f"{self.num_rows} rows are too few",
            "Give at least 1, or leave it out for all.",
        )
        require(
            self.max_bad_rows is None or self.on_error != "error",
            "max_bad_rows",
            "has no effect while on_error is 'error'",
            "Set on_error to 'skip' or 'quarantine'.",
        )
        require(
            self.max_bad_rows is None or self.max_bad_rows >= 0,
            "max_bad_rows",
            f"{self.max_bad_rows} is not a number of rows",
            "Give 0 or more.",
        )
        require(
            self.cache_path is None or self.cache_enabled,
            "cache_path",
            "has no effect while cache_enabled is False",
            "Leave one of them out.",
        )
        for column, width in self.aligned.items():
            require_free(column, "aligned_columns")
            require(
                (width or 0) < 1 << 31,
                f"aligned_columns.{column}",
                f"a token cannot have {width} numbers",
                "Give the length of the inner lists.",
            )
            require(
                column not in MADE_COLUMNS,
                "aligned_columns",
                f"{column!r} is a column that batches get elsewhere",
                f'Give it another name: format_fields={{"{column}": "my_{column}"}}.',
            )
        check_input(self)
        check_formats(self)
        check_prompts(self)

    @property
    def aligned(self) -> dict[str, int | None]:
        """The aligned columns, with the number of values per token; None: the type decides."""
        named = self.aligned_columns
        return dict(named) if isinstance(named, Mapping) else dict.fromkeys(named)

    @property
    def in_memory(self) -> bool:
        """Whether data_files holds the rows themselves, or an object that returns them."""
        files = self.data_files
        if isinstance(files, pa.Table | Mapping) or is_object(files):
            return True
        return (
            isinstance(files, list | tuple)
            and bool(files)
            and all(isinstance(row, Mapping) for row in files)
        )


def is_object(data: Any) -> bool:
    """Whether `data` is an object that returns rows, such as a `datasets.Dataset`."""
    return not isinstance(data, pa.Table | Path) and is_dataset_object(data)


def is_hub(dataset: DatasetConfig) -> bool:
    """Whether the rows are on the Hugging Face Hub."""
    files = dataset.data_files
    return dataset.type == "huggingface" or (isinstance(files, str) and files.startswith("hf://"))


def is_tokens(dataset: DatasetConfig) -> bool:
    """Whether the files hold tokens, which token_files may describe."""
    if dataset.type is not None:
        return dataset.type in TOKEN_EXTENSIONS
    files = _listed(dataset.data_files)
    return bool(files) and all(
        isinstance(file, str | Path) and format_of(str(file)) in TOKEN_EXTENSIONS for file in files
    )


def _listed(files: Any) -> Sequence[Any]:
    """Returns paths or rows as a list; a single one may be given."""
    return files if isinstance(files, list | tuple) else [files]


def _may_be_text(dataset: DatasetConfig) -> bool:
    """Whether these can be text files, judged by their names."""
    if dataset.in_memory or dataset.type not in (None, "txt", "huggingface"):
        return False
    return dataset.type is not None or all(
        format_of(str(file)) in (None, "txt") for file in _listed(dataset.data_files)
    )


def _check_name(name: str) -> None:
    require(
        name not in ("", ".", "..") and "/" not in name and name.isprintable(),
        "name",
        f"{name!r} cannot name a dataset",
        "Use a word without a slash.",
    )
    require(len(name) <= 100, "name", f"{len(name)} characters", "Give at most 100.")


def _check_paths(files: Any) -> None:
    """Raises ConfigError if `files` are neither paths nor rows."""
    paths = _listed(files)
    rows = any(isinstance(path, Mapping) for path in paths)
    for i, path in enumerate(paths):
        at = "data_files" if paths is not files else f"data_files[{i}]"
        require(
            not rows or isinstance(path, Mapping),
            at,
            f"{path!r} is not a row, as others are",
            "Give dicts alone, or paths alone.",
        )
        if not rows and (not isinstance(path, str | Path) or not str(path)):
            raise ConfigError(
                at=at,
                problem=f"{path!r} is neither a path nor rows",
                fix=f"Give an object of this class: {path.__name__}(...)."
                if isinstance(path, type)
                else "Give a path, a glob, a list, or a table.",
            )
    require(paths, "data_files", "an empty list", "Give at least one path or row.")


def check_input(dataset: DatasetConfig) -> None:
    """Checks type, split, subset, revision and the other options of the input together.

    Raises:
        ConfigError: One of them would have no effect.
    """
    files = dataset.data_files
    if dataset.split is not None:
        parse_split(dataset.split)
    require(
        dataset.version is None or is_object(files),
        "version",
        "has no effect: files, and rows in memory, are known by their content",
        "Leave it out.",
    )
    require(
        dataset.token_files is None or is_tokens(dataset),
        "token_files",
        "has no effect: these are not files of tokens",
        "Set type='tokens', or leave it out.",
    )
    require(
        dataset.text_unit is None or _may_be_text(dataset),
        "text_unit",
        "has no effect: these are not text files",
        "Leave it out.",
    )
    if is_hub(dataset):
        _check_hub(dataset, files)
        return
    for name, value in (("subset", dataset.subset), ("revision", dataset.revision)):
        require(
            value is None,
            name,
            "applies only to datasets of the Hub",
            "Set type='huggingface', or leave it out.",
        )
    if (
        dataset.split is None
        or is_object(files)
        or (isinstance(files, str | Path) and is_saved_dataset(files))
    ):
        return
    require(
        parse_split(dataset.split)[0] == WHOLE,
        "split",
        f"{dataset.split!r}, but these rows name no splits: all of them are {WHOLE!r}",
        "Leave it out, and give the files of that split by data_files.",
    )
    if isinstance(files, str | Path) and not is_remote(files):
        _check_folders(str(files), dataset.split)


def _check_folders(folder: str, split: str) -> None:
    """Refuses a folder with a folder for each split: all of them would be read."""
    names = names_in(folder)
    others = [name for name in names if name in HELD_OUT]
    require(
        WHOLE not in names or not others,
        "split",
        f"{split!r} would read all of {folder}, with {', '.join(others)}",
        f"Give data_files: {os.path.join(folder, WHOLE)}.",
    )


def _check_hub(dataset: DatasetConfig, files: Any) -> None:
    """Checks the options of a dataset of the Hub."""
    require(
        dataset.type in (None, "huggingface"),
        "type",
        f"{dataset.type!r}, but {files} is on the Hub, where file names tell the format",
        "Leave it out, or name files: hf://datasets/owner/name/*.jsonl.",
    )
    require(
        isinstance(files, str),
        "data_files",
        f"{files!r} names no dataset of the Hub",
        "Write owner/name.",
    )
    require(
        not parse_hub_name(files).pattern or (not dataset.split and not dataset.subset),
        "split" if dataset.split else "subset",
        "has no effect together with a pattern",
        "Leave it or the pattern out.",
    )


def split_of(dataset: DatasetConfig) -> tuple[str | None, Part | None]:
    """Returns (the name of the split, the part of it) that a dataset's config names."""
    return (None, None) if dataset.split is None else parse_split(dataset.split)


def check_formats(dataset: DatasetConfig) -> None:
    """Checks a dataset's column options, as far as that is possible without its rows.

    Raises:
        ConfigError: One of them is wrong or has no effect.
    """
    call = dataset.format_callback
    if call is None:
        options = fields_of(dataset)
        for name in ("format_columns", "format_version", "format_batched"):
            require(
                not options[name],
                name,
                "has no effect without a format_callback",
                "Leave it out.",
            )
    elif not callable(call) and not (isinstance(call, str) and ":" in call):
        raise ConfigError(
            at="format_callback",
            problem=f"{call!r} is not a function",
            fix='Give a function, or "module:function".',
        )
    column_types(dataset.format_columns, "format_columns")
    if dataset.format_fields is not None:
        try:
            Rename(dataset.format_fields)
        except ConfigError as error:
            raise ConfigError(
                at="format_fields", problem=error.problem, fix='Write {"old_name": "new_name"}.'
            ) from None
    fields = dataset.additional_fields
    for i, name in enumerate(fields):
        require(
            name not in fields[:i],
            f"additional_fields[{i}]",
            f"{name!r} appears twice",
            "Leave one of them out.",
        )
        require_free(name, f"additional_fields[{i}]")
    try:
        with_options("any", dataset.tokenizer_kwargs)
    except ConfigError as error:
        raise error.under("tokenizer_kwargs") from None


def require_free(name: str, at: str) -> None:
    """Raises ConfigError for a column with the name of a column of tokens."""
    require(
        name not in TOKEN_COLUMNS,
        at,
        f"{name!r} is a column that tokenized rows have already",
        f'Give it another name: format_fields={{"{name}": "my_{name}"}}.',
    )


def check_prompts(dataset: DatasetConfig) -> None:
    """Raises ConfigError if options about conversations, prompts and completions conflict."""
    options = fields_of(dataset)
    given = [name for name in PROMPT_OPTIONS if options[name] is not None]
    if dataset.prompt is not None:
        require(
            not given and dataset.content_field == "text",
            given[0] if given else "content_field",
            "has no effect together with prompt",
            "Say it in prompt, or leave prompt out.",
        )
        return
    _check_answers(dataset)
    check_thinking(dataset)
    check_whole(dataset.chat_template, "chat_template")
    if dataset.template_date is not None:
        check_date(dataset.template_date)
    check_kwargs(dataset.chat_template_kwargs)
    check_message_fields(dataset.message_fields)


def _check_answers(dataset: DatasetConfig) -> None:
    """Raises ConfigError if columns of prompts and answers do not go together."""
    options = fields_of(dataset)
    names = ("prompt_field", "completion_field", "rejected_field", "desirable_field")
    given = {name: options[name] for name in names if options[name] is not None}
    one = next(iter(given), "")
    for missing, complete in (
        ("completion_field", not given or "completion_field" in given),
        ("prompt_field", list(given) != ["completion_field"]),
    ):
        fix = f"Name the column, or leave {one} out."
        require(complete, missing, f"{one} needs it", fix)
    for i, (name, column) in enumerate(given.items()):
        first = next(other for other in given if given[other] == column)
        require(first == name or not i, name, f"is the {first} too", "Name another column.")


def check_text_answers(dataset: DatasetConfig) -> None:
    """Raises ConfigError for options of conversations if answers are columns of text."""
    options = fields_of(dataset)
    for name in TALK_OPTIONS:
        require(
            options[name] is None,
            name,
            "has no effect on prompts and completions",
            "Leave it out."
            if name != "chat_template"
            else "Leave it out, or write it with {column}s as template of a prompt of "
            "format_type: custom.",
        )
    require(
        dataset.train_on not in ("assistant", "last_assistant"),
        "train_on",
        "prompts have no assistant",
        "Use 'completion'.",
        have=["completion", "all"],
    )
    require(
        dataset.prompt_field is not None or dataset.train_on is None,
        "train_on",
        "has no effect without a prompt_field: what both answers begin with is the prompt",
        "Leave it out.",
    )


def no_datasets() -> ConfigError:
    """Returns the error for a pipeline without datasets."""
    return ConfigError(at="datasets", problem="there is none", fix="Give at least one dataset.")
