"""The tokenize stage: chooses each dataset's tokenizer, max_length, and the columns it keeps."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping
from typing import Any

from easypipe.cache.location import cache_folder_of
from easypipe.core.class_names import classes_of
from easypipe.core.config import digest, fields_of
from easypipe.core.errors import ConfigError, require, require_known
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedSource, Sources
from easypipe.core.schema import INPUT_IDS, data_columns
from easypipe.core.values import Arguments
from easypipe.stages.config import datasets_of, settings_of, tokenizer_config_of
from easypipe.stages.source.columns import kept_columns
from easypipe.stages.source.config import PROMPT_OPTIONS, DatasetConfig
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.stages.tokenize.encoders import form_of
from easypipe.transforms.columns.base import TransformedSource
from easypipe.transforms.columns.columns import ClassNames
from easypipe.transforms.tokenizer.config import TokenizerConfig, with_options
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("easypipe")


class TokenizeStage(BaseStage):
    """The tokenize stage: every dataset of text becomes a TokenizedShardedSource.

    Its tokenizer is the dataset's own, else the stage's default_tokenizer, else the pipeline's.
    Datasets of tokens are passed on unchanged.
    """

    @property
    def name(self) -> str:
        return "tokenize"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        """Wraps every dataset of text in an encoder; it reads no rows.

        Raises:
            ConfigError: A dataset has no tokenizer.
            TokenizerError: A tokenizer does not load.
            SourceError: A column is missing.
        """
        stage: TokenizeStageConfig = self.config or TokenizeStageConfig()
        datasets = {name: (i, one) for i, (name, one) in enumerate(datasets_of(context).items())}
        kept = _kept_columns(data, datasets, stage)
        loaded: dict[str, Tokenizer] = {}
        pack = settings_of(context).pack
        room = pack.seq_length if pack is not None and pack.holds else None
        result: Sources = {}
        for name, source in data.items():
            number, dataset = datasets.get(name, (None, None))
            if INPUT_IDS in source.schema.names:
                logger.info(
                    "dataset %s: holds %s already, tokenize() leaves it as it is", name, INPUT_IDS
                )
                _check_tokens(name, number, dataset, stage, context)
                result[name] = source
                continue
            require(
                dataset is None or not dataset.aligned,
                f"datasets[{number}].aligned_columns",
                f"has no effect on text: the rows of dataset {name!r} have no {INPUT_IDS!r}, whose "
                "tokens the values would travel with",
                "Leave it out, or give rows that are tokens already.",
            )
            chosen = _with_length(_choose(name, number, dataset, stage, context), stage.max_length)
            key = digest(chosen)
            if key not in loaded:
                loaded[key] = load_tokenizer(chosen)
            options: Arguments = {}
            if dataset is not None:
                named = [field.name for field in source.schema if classes_of(field)]
                as_text = TransformedSource(source, ClassNames(named)) if named else source
                form = form_of(dataset, f"datasets[{number}]", as_text, loaded[key], room)
                if names := [name for name in named if name in form.columns]:
                    source = TransformedSource(source, ClassNames(names))
                bad = {"on_error": dataset.on_error, "max_bad_rows": dataset.max_bad_rows}
                options = {"form": form, **bad}
            keep = stage.cache_tokenized
            result[name] = TokenizedShardedSource(
                source,
                loaded[key],
                dataset=name,
                cache_dir=cache_folder_of(name, dataset, source, context, keep=keep),
                num_workers=stage.num_workers,
                batch_size=stage.batch_size,
                progress=context.progress,
                keep=kept[name],
                **options,
            )
        return result


def _choose(
    name: str,
    number: int | None,
    dataset: DatasetConfig | None,
    stage: TokenizeStageConfig,
    context: PipelineContext,
) -> TokenizerConfig:
    """Returns the config of a dataset's tokenizer, with the dataset's tokenizer_kwargs."""
    own = None if dataset is None else dataset.tokenizer
    wide = settings_of(context).default_tokenizer
    chosen = next(
        (tokenizer for tokenizer in (own, stage.default_tokenizer, wide) if tokenizer is not None),
        None,
    )
    if chosen is None:
        raise ConfigError(
            at="default_tokenizer" if number is None else f"datasets[{number}].tokenizer",
            problem=f"dataset {name!r} has no tokenizer",
            fix="Set it there, or set default_tokenizer for all datasets.",
        )
    try:
        return with_options(chosen, None if dataset is None else dataset.tokenizer_kwargs)
    except ConfigError as error:
        raise error.under(f"datasets[{number}].tokenizer_kwargs") from None


def _check_tokens(
    name: str,
    number: int | None,
    dataset: DatasetConfig | None,
    stage: TokenizeStageConfig,
    context: PipelineContext,
) -> None:
    """Refuses options of text that a dataset of tokens has, and warns of a shared max_length.

    With padding="max_length" max_length is the width of batches, and so has an effect.

    Raises:
        ConfigError: The dataset itself has such an option.
    """
    own = [] if dataset is None else _options_of_text(dataset)
    shared = ["tokenize.max_length"] if stage.max_length is not None else []
    chosen = tokenizer_config_of(name, context)
    if isinstance(chosen, TokenizerConfig) and chosen.padding != "max_length":
        if dataset is not None and (dataset.tokenizer_kwargs or {}).get("max_length") is not None:
            own.append("tokenizer_kwargs.max_length")
        elif chosen.max_length is not None and dataset is not None and dataset.tokenizer:
            own.append("tokenizer.max_length")
        elif chosen.max_length is not None:
            shared.append("default_tokenizer.max_length")
    for option in own:
        raise ConfigError(
            at=f"datasets[{number}].{option}",
            problem=f"has no effect: the rows of dataset {name!r} are tokens already",
            fix="Leave it out.",
        )
    for option in shared:
        logger.warning(
            "%s: has no effect on dataset %s, whose rows are tokens already and stay as long as "
            "they are; pack.oversize says what packing does with long ones",
            option,
            name,
        )


def _options_of_text(dataset: DatasetConfig) -> list[str]:
    """Returns the options of a dataset that say how its text is read and cut."""
    options = fields_of(dataset)
    given = [name for name in (*PROMPT_OPTIONS, "prompt", "length") if options[name] is not None]
    return [*given, *(["content_field"] if dataset.content_field != "text" else [])]


def _kept_columns(
    data: Mapping[str, ShardedSource], datasets: Mapping[str, Any], stage: TokenizeStageConfig
) -> dict[str, tuple[str, ...]]:
    """Returns the columns of each dataset of text that are kept with its tokens.

    Raises:
        ConfigError: None of the datasets has a column of that name.
    """
    texts = {name: source for name, source in data.items() if INPUT_IDS not in source.schema.names}
    every = (data_columns(source.schema) for source in texts.values())
    have = list(dict.fromkeys(itertools.chain.from_iterable(every)))
    for i, column in enumerate(stage.remove_columns or ()):
        at = f"tokenize.remove_columns[{i}]"
        require_known(column, have, at, f"no dataset has a column {column!r}")
    kept = {}
    for name, source in texts.items():
        number, dataset = datasets.get(name, (None, None))
        own = () if dataset is None else dataset.additional_fields
        kept[name] = kept_columns(name, source, own, stage.remove_columns, at=f"datasets[{number}]")
    return kept


def _with_length(tokenizer: TokenizerConfig, max_length: int | None) -> TokenizerConfig:
    """Returns the config with the stage's max_length, unless it has its own."""
    if max_length is None or tokenizer.max_length is not None:
        return tokenizer
    return dataclasses.replace(tokenizer, max_length=max_length)
