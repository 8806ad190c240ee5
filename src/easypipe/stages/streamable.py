"""Which options of each stage streaming does not have, and why; the error for uses of a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

from easypipe.core.config import fields_of
from easypipe.core.errors import ConfigError, require

# The options of each stage that streaming has. Every other option is an error unless it has its
# default value.
KNOWN = {
    "tokenize": {"default_tokenizer", "max_length", "batch_size", "num_workers", "cache_tokenized"},
    "mix": {
        "weights",
        "weight_schedule",
        "weight_schedule_type",
        "batch_size",
        "unit",
        "max_epochs",
        "block_size",
        "stop_strategy",
        "seed",
        "allow_mixed_tokenizers",
    },
    "pack": {
        "enabled",
        "seq_length",
        "strategy",
        "num_packers",
        "oversize",
        "segments",
        "eos_token_id",
        "pad_token_id",
        "shuffle_packed",
        "include_segment_ids",
        "train_continued",
    },
    "load": {
        "batch_size",
        "batch_size_schedule",
        "accumulation_steps",
        "prefetch_enabled",
        "prefetch_workers",
        "prefetch_buffer_size",
        "shuffle_buffer_size",
        "drop_last",
        "prefetch_to_device",
        "num_epochs",
        "source_ids",
        "mesh",
        "partition_spec",
        "stall_timeout_s",
    },
}
WHY = {
    "pack.shuffle_buffer_factor": "documents are shuffled in the windows of "
    "load.shuffle_buffer_size",
    "load.group_by_length": "rows come in the order in which they are read",
    "tokenize.remove_columns": "nothing is saved, so no column stays beside tokens",
    "mix.provenance": "nothing is saved, and batches have no column of it",
}


def require_streamable(at: str, config: Any) -> None:
    """Checks that streaming has every option of the stage `at` that is set.

    Raises:
        ConfigError: An option has no meaning in streaming.
    """
    if config is None or at not in (*KNOWN, "save"):
        return
    if at == "save":
        require(
            not config.enabled,
            "save",
            "streaming writes nothing: it reads forward and keeps no tokens",
            "Leave streaming out.",
        )
        return
    options = fields_of(config)
    for field in dataclasses.fields(config):
        value = options[field.name]
        default = (
            field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
        )
        if field.name not in KNOWN[at] and value != default:
            why = WHY.get(f"{at}.{field.name}", "it needs rows that are counted first")
            raise ConfigError(
                at=f"{at}.{field.name}",
                problem=f"is not there in streaming: {why}",
                fix="Leave it, or streaming, out.",
            )


def no_plan() -> ConfigError:
    """Returns the error for methods that need a plan, which streaming does not have."""
    return ConfigError(
        at="streaming",
        problem="streamed data is not counted or cached, so there is no plan, no token "
        "cache and no ledger of the whole",
        fix="Ask loader.ledger() for what was read so far, or leave streaming out.",
    )
