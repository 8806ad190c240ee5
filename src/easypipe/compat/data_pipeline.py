"""Document 000: DataPipeline makes loaders of the splits in a YAML file; every failure is a Result.

It is a thin layer: the file has the content of `DatasetConfig(prompt=...)`, `TokenizerConfig` and
`DataLoaderConfig`, and the Pipeline that they describe reads the data.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from easypipe.compat.loaders import DataLoaderConfig, text_loader, text_stream
from easypipe.core.config import ListOf, config, from_dict, load_yaml
from easypipe.core.errors import ConfigError, EasypipeError, did_you_mean, require, require_known
from easypipe.core.result import Err, Result, attempt
from easypipe.core.values import Arguments, Settings
from easypipe.loader.epochs import EpochLoader
from easypipe.sources.refs import format_of
from easypipe.stages.source.config import DatasetConfig
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.lengths import LengthPolicy

VERSION = "1.0"


@config
class DatasetSection:
    """The rows of a data module.

    Args:
        name: A dataset of the Hub, a path, glob or URL of files, or a folder of `datasets`.
        columns: The columns that may be read. It is an error if a template needs others, or if the
            dataset lacks one.
        subset: The configuration of a dataset of the Hub.
        revision: Branch, tag or commit of a dataset of the Hub.
        data_files: {split: path, glob or URL}, read instead of `name`, which then only names the
            dataset.
        num_rows: Read only the first rows of a split, this many.
        streaming: Read forward and tokenize while training; rows are not counted and tokens are not
            stored (docs/streaming.md).
        storage_options: Options of fsspec for remote files, as in DatasetConfig.
    """

    name: str
    columns: ListOf[str] | None = None
    subset: str | None = None
    revision: str | None = None
    data_files: dict[str, str] | None = None
    num_rows: int | None = None
    streaming: bool = False
    storage_options: dict[str, Any] | None = field(
        default=None, repr=False, metadata={"secret": True}
    )

    def check(self) -> None:
        require(
            self.columns is None or self.columns,
            "columns",
            "an empty list",
            "Name the columns to read, or leave it out for all.",
        )
        for name, value in (("subset", self.subset), ("revision", self.revision)):
            require(
                self.data_files is None or value is None,
                name,
                "has no effect together with data_files",
                "Leave it out.",
            )

    def rows(self, split: str) -> Arguments:
        """Returns the fields of DatasetConfig that say where a split's rows are.

        Raises:
            ConfigError: data_files does not name the split.
        """
        rows: Arguments = {
            "num_rows": self.num_rows,
            "storage_options": self.storage_options,
        }
        if self.data_files is not None:
            at, fix = "dataset.data_files", "Name it in dataset.data_files."
            require_known(split, self.data_files, at, f"no split {split!r}", fix)
            return {**rows, "data_files": self.data_files[split]}
        if not self.is_local:
            rows["type"] = "huggingface"
        of_hub = {"subset": self.subset, "revision": self.revision}
        return {**rows, "data_files": self.name, "split": split, **of_hub}

    @property
    def is_local(self) -> bool:
        """Whether `name` is a path or URL, and not a dataset of the Hub."""
        return (
            "://" in self.name
            or Path(os.path.expanduser(self.name)).exists()
            or format_of(self.name) is not None
            or glob.has_magic(self.name)
        )


@config
class TokenizerSection:
    """The tokenizer, as in TokenizerConfig.

    Args:
        name_or_path: A folder, a tokenizer.json or a Hub name.
        max_length: The most tokens of a sample.
        truncation: False keeps longer samples whole.
        padding: How rows are padded; None pads to max_length if there is one, else to the longest
            row of the batch.
        padding_side: The side of a row on which padding is put.
        pad_to_multiple_of: Round widths of batches up to a multiple of this.
        length: What happens to samples of more than max_length tokens, as in DatasetConfig; None
            keeps their start.
        use_fast: False encodes with the reference.
    """

    name_or_path: str
    max_length: int | None = None
    truncation: bool = True
    padding: Literal["longest", "max_length"] | None = None
    padding_side: Literal["right", "left"] = "right"
    pad_to_multiple_of: int | None = None
    length: LengthPolicy | None = None
    use_fast: bool = True

    def check(self) -> None:
        self.config()

    def config(self) -> TokenizerConfig:
        """Returns the TokenizerConfig of this section."""
        return TokenizerConfig(
            name_or_path=self.name_or_path,
            max_length=self.max_length,
            truncation=self.truncation,
            padding=self.padding or ("max_length" if self.max_length is not None else "longest"),
            padding_side=self.padding_side,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_attention_mask=True,
            backend="auto" if self.use_fast else "tokenizers",
        )


@config
class DataPipelineConfig:
    """The file: `type: data_module`, `version: "1.0"`, and its four sections.

    Args:
        type: `data_module`.
        version: `"1.0"`; others are an error.
        dataset: The rows.
        tokenizer: The tokenizer.
        prompt_template: How a row becomes text, and which part is trained on.
        dataloader: How rows become batches.
    """

    type: Literal["data_module"]
    version: str | float
    dataset: DatasetSection
    tokenizer: TokenizerSection
    prompt_template: PromptConfig
    dataloader: DataLoaderConfig = field(default_factory=DataLoaderConfig)

    def check(self) -> None:
        require(
            str(self.version) == VERSION,
            "version",
            f"{self.version!r} is not known",
            f'Write version: "{VERSION}".',
            [VERSION],
        )
        require(
            self.dataloader.collate_fn is None,
            "dataloader.collate_fn",
            "the rows are text, which the Loader collates",
            "Leave it out.",
        )

    def problems(self) -> list[ConfigError]:
        """Returns conflicts between the sections; each section was checked when it was made."""
        problems = []
        if self.dataset.streaming and self.dataloader.world_size > 1:
            problem = "ranks share rows by their numbers, and a stream has none"
            fix = "Leave dataset.streaming out, or give the loader of a Pipeline a mesh."
            problems.append(ConfigError(at="dataloader.world_size", problem=problem, fix=fix))
        columns, prompt = self.dataset.columns, self.prompt_template
        wanted = {f"input_columns[{i}]": name for i, name in enumerate(prompt.inputs)}
        if prompt.label is not None:
            wanted["label_column"] = prompt.label
        for at, name in wanted.items():
            if columns is not None and name not in columns:
                fix = did_you_mean(name, columns) or "Add it to dataset.columns."
                problems.append(
                    ConfigError(
                        at=f"prompt_template.{at}",
                        problem=f"dataset.columns has no {name!r}",
                        have=columns,
                        fix=fix,
                    )
                )
        return problems


class DataPipeline:
    """The loaders of the splits that a YAML file describes, with every failure as a Result.

    `DataPipeline.from_config("pipeline_config.yaml").unwrap().get_dataloader("train",
    shuffle=True).unwrap()`

    `from_config` returns an error as Err, the constructor raises it, and `validate` lists it.

    Raises:
        ConfigError: The first conflict between the sections.
    """

    def __init__(self, config: DataPipelineConfig) -> None:
        for problem in config.problems():
            raise problem
        self.config = config
        self._passes: dict[tuple[str, bool], int] = {}

    @classmethod
    def from_config(
        cls, config: DataPipelineConfig | Settings | str | Path
    ) -> Result[Self, EasypipeError]:
        """Makes a DataPipeline from a YAML file, its contents as a dict, or a config."""
        return attempt(_read, config).and_then(lambda made: attempt(cls, made))

    @staticmethod
    def validate(config: DataPipelineConfig | Settings | str | Path) -> list[str]:
        """Lists the first wrong value, or all conflicts between sections; [] if a config is valid.

        It opens no dataset and no tokenizer.
        """
        made = attempt(_read, config)
        return (
            [str(made.error)]
            if isinstance(made, Err)
            else [str(problem) for problem in made.value.problems()]
        )

    def get_dataloader(
        self, split: str, shuffle: bool | None = None
    ) -> Result[EpochLoader, EasypipeError]:
        """Returns the Loader of a split. It tokenizes what is not in the token cache yet.

        Batches have `input_ids`, `labels`, `attention_mask`, `segment_ids`, `position_ids`,
        Int32[B, T]. Every iteration is the next pass, in a new order if rows are shuffled; a loader
        begins at the pass after the last one that a loader of this split has finished.

        Args:
            split: The name of the split.
            shuffle: Whether to shuffle rows; None takes dataloader.shuffle.
        """
        return attempt(self._loader, split, shuffle)

    def dataset_config(self, split: str) -> DatasetConfig:
        """Returns how a Pipeline reads a split."""
        sections = self.config
        return DatasetConfig(
            name=split.partition("[")[0],
            prompt=sections.prompt_template,
            tokenizer=sections.tokenizer.config(),
            length=sections.tokenizer.length,
            **sections.dataset.rows(split),
        )

    @cached_property
    def options(self) -> DataLoaderConfig:
        """The dataloader section, with a drawn seed if none was given."""
        return self.config.dataloader.with_seed(drawing=True)

    def _loader(self, split: str, shuffle: bool | None) -> EpochLoader:
        shuffle = self.config.dataloader.shuffle if shuffle is None else shuffle
        self.config.dataloader.warn_of_what_has_no_effect()
        options = dataclasses.replace(self.config.dataloader, shuffle=shuffle)
        if options.order_is_drawn:
            options = dataclasses.replace(options, seed=self.options.seed)
        dataset, columns = self.dataset_config(split), self.config.dataset.columns
        make = text_stream if self.config.dataset.streaming else text_loader
        loader = make(dataset, options, columns=columns)
        return loader.counted_by(self._passes, (split, shuffle))


def _read(given: DataPipelineConfig | Settings | str | Path) -> DataPipelineConfig:
    """Returns the config itself, or the one in a file or a dict."""
    if isinstance(given, str | Path):
        given = load_yaml(given)
    return given if isinstance(given, DataPipelineConfig) else from_dict(DataPipelineConfig, given)


__all__ = ["DataPipeline", "DataPipelineConfig", "DatasetSection", "TokenizerSection"]
