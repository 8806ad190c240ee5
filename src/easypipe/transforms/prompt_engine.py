"""Rows to samples: one row at a time here, and many at a time in pipelines, by the same code.

engine = PromptEngine("my-tokenizer", PromptConfig(format_type="prompt_completion"))
engine.encode({"prompt": "2 + 2 = ", "completion": "4"})     # {"input_ids": int32[n], "loss_mask": uint8[n]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.core.errors import ConfigError, SourceError, did_you_mean
from easypipe.core.schema import INPUT_IDS, LOSS_MASK
from easypipe.transforms.chat import Refused, Rendered, load_chat_template
from easypipe.transforms.fields import BENIGN
from easypipe.transforms.masked import encode_masked, has_target
from easypipe.transforms.prompt_formats import Format, PlainFormat, TalkFormat, TextFormat
from easypipe.transforms.prompts import TALKS, PromptConfig
from easypipe.transforms.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer


class PromptEngine:
    """Rows as texts with the characters that are trained, and as tokens with a loss mask. Thread safe.

    tokenizer: a loaded one, or what names one. config: PromptConfig() where it is None: messages through the tokenizer's chat template.
    max_length: most tokens of a sample, in place of the tokenizer's own; what is longer is cut at its end, with its mask.
    Law: `encode(row)` equals what `DatasetConfig(prompt=config)` stores of that row.
    Raises ConfigError for options that do not go together, TokenizerError where there is no tokenizer, or no chat template.
    """

    def __init__(
        self, tokenizer: Tokenizer | TokenizerConfig | str, config: PromptConfig | None = None, *, max_length: int | None = None
    ) -> None:
        self.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
        self.config = config or PromptConfig()
        if max_length is not None:
            self.tokenizer = self.tokenizer.with_length(max_length)
        self.format = _format(self.config, self.tokenizer)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row has to have; of messages, `tools` is read too where it is there."""
        return self.format.columns

    def render(self, row: Mapping[str, Any]) -> Rendered:
        """(text, spans: ascending character ranges that are trained, end: what follows, see transforms/masked.py).

        Raises SourceError naming the reason for a row that is no sample, HostileTemplateError for a template beyond its limits.
        """
        for name in self.columns:
            if name not in row:
                raise SourceError(at="row", problem=f"no column {name!r}", have=list(row), fix=did_you_mean(name, list(row)))
        (found,) = self.render_rows([row])
        if isinstance(found, Refused):
            raise _no_sample(found)
        return found

    def render_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Rendered | Refused]:
        """`render` of rows that have all columns; a row that is no sample is Refused."""
        return self.format.render(rows)

    def encode(self, row: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """`input_ids` Int32[n] and `loss_mask` UInt8[n] (1: the token is a target), special tokens included. Raises as `render` does."""
        found = self.render(row)
        texts = pa.array([found.text], pa.large_string())
        if isinstance(self.format, PlainFormat):
            ids = self.tokenizer.encode_column(texts).ids
            return {INPUT_IDS: ids.astype(np.int32), LOSS_MASK: np.ones(len(ids), np.uint8)}
        made = encode_masked(self.tokenizer, texts, [found.spans], [found.end], raw=self.format.raw)
        if made.special[0] and self.tokenizer.special.policy == "error":
            raise _no_sample(Refused("special_string", "the text holds a special string, and special_strings is 'error'"))
        if not has_target(made.mask, made.offsets)[0]:
            raise _no_sample(Refused(BENIGN, "no trained token remains"))
        return {INPUT_IDS: made.ids.astype(np.int32), LOSS_MASK: made.mask}

    def __repr__(self) -> str:
        return f"PromptEngine({self.tokenizer.name!r}, {self.config.format_type!r})"


def _format(config: PromptConfig, tokenizer: Tokenizer) -> Format:
    if config.format_type == "text":
        return PlainFormat(config.inputs[0])
    if config.format_type not in TALKS:
        return TextFormat(config, tokenizer.special_strings)
    train_on = config.train_on or "assistant"
    try:
        template = load_chat_template(tokenizer, chat_template=config.template, train_on=train_on, date=config.template_date)
    except ConfigError as error:
        raise ConfigError(at="template", problem=error.problem, have=error.have, fix=error.fix) from None
    policy = tokenizer.special.policy
    if policy == "escape":
        raise ConfigError(
            at="tokenizer",
            problem="special_strings='escape' is for raw text, and the template of conversations writes special tokens",
            fix="Set special_strings='error', which looks into the messages.",
        )
    return TalkFormat(config, template, tokenizer.special.strings if policy == "error" else ())


def _no_sample(why: Refused) -> SourceError:
    return SourceError(at="row", problem=f"{why.reason}: {why.detail}", fix="Correct the row, or leave it out.")
