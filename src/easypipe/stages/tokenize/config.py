"""TokenizeStageConfig: the options of the tokenize stage, such as max_length and workers."""

from __future__ import annotations

from easypipe.core.config import ListOf, config, fields_of
from easypipe.core.errors import require
from easypipe.transforms.tokenizer.config import TokenizerConfig


@config
class TokenizeStageConfig:
    """How text becomes tokens.

    Args:
        default_tokenizer: The tokenizer of datasets that name none; None takes the pipeline's
            default_tokenizer.
        max_length: The most tokens of a document, for tokenizers without their own max_length; None
            keeps all.
        batch_size: How many texts are encoded at a time; it affects memory and speed, never tokens.
        num_workers: How many ranges of rows are read and encoded at a time, each held in memory;
            None takes one per core. It is also how many datasets of up to 1 MiB are prepared at a
            time (8 with None).
        cache_tokenized: False means cache_enabled=False for every dataset; None and True store
            tokens. Streaming stores none, and with True a warning says so.
        remove_columns: Columns of the sources that are not saved with the tokens of documents; all
            others are. None removes all except each dataset's additional_fields.
    """

    default_tokenizer: TokenizerConfig | str | None = None
    max_length: int | None = None
    batch_size: int = 1000
    num_workers: int | None = None
    cache_tokenized: bool | None = None
    remove_columns: ListOf[str] | None = None

    def check(self) -> None:
        options = fields_of(self)
        for name in ("max_length", "batch_size", "num_workers"):
            value = options[name]
            require(
                value is None or value >= 1,
                name,
                f"{value} is too few",
                "Give at least 1, or leave it out.",
            )
