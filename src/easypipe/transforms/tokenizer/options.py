"""Options of a tokenizer that a dataset sets for itself, in our words or those of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.transforms.tokenizer.config import TokenizerConfig

USE_FAST = "use_fast"  # transformers' word


def with_options(
    tokenizer: TokenizerConfig | str, options: Mapping[str, Any] | None
) -> TokenizerConfig:
    """`tokenizer` with `options` in place of what it says itself.

    use_fast: False encodes with the reference, as backend="tokenizers" does; True changes nothing,
    as no slow tokenizer exists here. Raises ConfigError for an unknown key, a wrong value, and for
    `name_or_path`, which would be another tokenizer.
    """
    config = TokenizerConfig(name_or_path=tokenizer) if isinstance(tokenizer, str) else tokenizer
    if not options:
        return config
    known = [
        field.name for field in dataclasses.fields(TokenizerConfig) if field.name != "name_or_path"
    ]
    values = dict(options)
    if "name_or_path" in values:
        raise ConfigError(
            at="name_or_path", problem="names another tokenizer", fix="Set the dataset's tokenizer."
        )
    for key in values:
        if key not in known and key != USE_FAST:
            have = [*known, USE_FAST]
            raise ConfigError(at=key, problem="unknown key", have=have, fix=did_you_mean(key, have))
    if USE_FAST in values:
        fast = values.pop(USE_FAST)
        if not isinstance(fast, bool):
            raise ConfigError(at=USE_FAST, problem=f"expected true or false, got {fast!r}")
        if not fast and values.get("backend", "tokenizers") != "tokenizers":
            problem = f"False means backend='tokenizers', and backend is {values['backend']!r}"
            raise ConfigError(at=USE_FAST, problem=problem, fix="Leave one of them out.")
        if not fast:
            values["backend"] = "tokenizers"
    return dataclasses.replace(config, **values)
