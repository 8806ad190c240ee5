"""PromptEngine: turns rows into texts and tokens, one at a time or, in pipelines, in bulk.

```python
engine = PromptEngine("my-tokenizer", PromptConfig(format_type="prompt_completion"))
engine.encode({"prompt": "2 + 2 = ", "completion": "4"})
# {"input_ids": int32[n], "loss_mask": uint8[n]}
```
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from easypipe.core.errors import ConfigError, SourceError, moved, require, require_columns
from easypipe.core.schema import INPUT_IDS, LOSS_MASK
from easypipe.stages.tokenize.text_rows import texts_of
from easypipe.stages.tokenize.token_rows import encode_texts
from easypipe.transforms.chat.render import (
    ChatTemplate,
    HostileTemplateError,
    load_chat_template,
)
from easypipe.transforms.chat.sandbox import Row
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.prompt.config import CHAT_FORMATS, PromptConfig
from easypipe.transforms.prompt.few_shot import PREFERRED
from easypipe.transforms.prompt.formats import (
    SHARED,
    VERDICTS,
    ChatFormat,
    TemplateFormat,
    TextFormat,
)
from easypipe.transforms.refused import Refused, advice
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.lengths import LengthPolicy, Lengths
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

# `input_ids` Int32[n] and `loss_mask` UInt8[n]
Sample = dict[str, NDArray[np.int32 | np.uint8]]


class PromptEngine:
    """Turns rows into texts with target characters, and into tokens with a loss mask.

    It is thread-safe.

    Law: `encode(row)` equals what `DatasetConfig(prompt=config, length=length)` stores of that row.

    Args:
        tokenizer: A loaded tokenizer, its config or its name.
        config: None takes PromptConfig(): messages with the tokenizer's chat template.
        max_length: The most tokens of a sample, instead of the tokenizer's own max_length.
        length: What happens to longer samples; None cuts them at their end.

    Raises:
        ConfigError: Options conflict.
        TokenizerError: There is no tokenizer, or no chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | TokenizerConfig | str | Path,
        config: PromptConfig | None = None,
        *,
        max_length: int | None = None,
        length: LengthPolicy | None = None,
    ) -> None:
        self.tokenizer = (
            tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
        )
        self.config = config or PromptConfig()
        if max_length is not None:
            self.tokenizer = self.tokenizer.with_length(max_length)
        pairs = self.config.rejected_column is not None
        self.lengths = None if length is None else Lengths(length, self.tokenizer, pairs=pairs)
        self.format = _format(self.config, self.tokenizer, self.lengths)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every row must have; conversations may also have `tools`."""
        more = (self.config.rejected_column, self.config.desirable_column)
        return (*self.format.columns, *(name for name in more if name is not None))

    def render(self, row: Row) -> Rendered:
        """Renders the text of a row.

        Returns:
            The text; its spans, ascending character ranges that are trained on; and its end, which
            says what follows the text (see transforms/tokenizer/masked.py).

        Raises:
            SourceError: The row is not a sample; the error names the reason.
            HostileTemplateError: A template exceeded its limits.
        """
        written, _ = self.written([self._given(row)], [0], None)
        found, *more = written[:1] if self.config.rejected_column is not None else written
        if more:
            found = Refused(
                "split", f"it becomes {len(more) + 1} samples, which only a Pipeline can make"
            )
        if isinstance(found, Refused):
            raise _no_sample(found)
        return found

    def _given(self, row: Row) -> Row:
        """Returns a user's row as a pipeline reads it; raises SourceError if it lacks columns."""
        if not isinstance(row, Mapping):
            raise SourceError(
                at="row",
                problem=f"{type(row).__name__} is not a row",
                fix="Give a dict of columns.",
            )
        require_columns(self.columns, list(row), "row")
        return self.format.as_json(row) if isinstance(self.format, ChatFormat) else row

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template for conversations; None for samples of another kind."""
        return self.format.template if isinstance(self.format, ChatFormat) else None

    def render_rows(self, rows: Sequence[Row]) -> list[Rendered | Refused]:
        """Does `render` for rows that have all columns; returns Refused for invalid samples."""
        found = self.format.render(rows)
        return [self._rejected(row) or one for row, one in zip(rows, found, strict=True)]

    def render_turns(self, rows: Sequence[Row]) -> list[list[Rendered | Refused]]:
        """Returns the samples of each row, if reasoning is "per_turn"."""
        assert isinstance(self.format, ChatFormat)
        found = self.format.by_turns(rows)
        rejected = [self._rejected(row) for row in rows]
        return [[no] if no else some for no, some in zip(rejected, found, strict=True)]

    def _rejected(self, row: Row) -> Refused | None:
        """Returns why a row's answer is not trained on, if the row itself says so."""
        name = next((name for name in self.verdicts if row.get(name) is False), None)
        if name is None:
            return None
        detail = (
            f"column {name!r} is false: an answer that is not to be learned; "
            "desirable_field names the column for train.preference"
        )
        return Refused("rejected_answer", detail)

    @property
    def splits(self) -> bool:
        """Whether rows that are too long may be cut between turns.

        They must be conversations that are not trained on as a whole.
        """
        train_on = self.config.train_on
        return (
            self.lengths is None
            and self.config.rejected_column is None
            and self.config.label is None
            and self.config.train_on_eos in (None, "turn")
            and self.config.reasoning != "per_turn"
            and isinstance(self.format, ChatFormat)
            and train_on != "all"
        )

    def render_split(self, rows: Sequence[Row], room: int) -> list[list[Rendered | Refused]]:
        """Returns the texts of at most `room` tokens into which each row is cut, if `splits`."""
        assert isinstance(self.format, ChatFormat)
        return self.format.split(rows, self.render_rows(rows), self.tokenizer, room)

    @functools.cached_property
    def verdicts(self) -> tuple[str, ...]:
        """Optional columns, true or false, that say whether a row's answer is a good one."""
        if self.config.format_type in ("text", "custom") or self.config.rejected_column is not None:
            return ()
        return tuple(name for name in VERDICTS if name not in self.columns)

    def render_pairs(self, rows: Sequence[Row]) -> list[tuple[Rendered, Rendered] | Refused]:
        """Returns for each row of a pair the texts of the preferred and the other answer."""
        answer, rejected = str(self.config.answer), str(self.config.rejected_column)
        rows = self._with_shared(rows)
        others = [{**row, answer: row[rejected], PREFERRED: row} for row in rows]
        try:
            found = self.render_rows([*rows, *others])
        except HostileTemplateError as error:
            error.row %= len(rows)
            raise
        pairs: list[tuple[Rendered, Rendered] | Refused] = []
        for better, worse in zip(found[: len(rows)], found[len(rows) :], strict=True):
            if isinstance(better, Rendered) and isinstance(worse, Rendered):
                pairs.append((better, worse))
            elif isinstance(worse, Refused) and isinstance(better, Rendered):
                # in the row it was rendered from, it is in the preferred answer's column
                told = worse.detail.removeprefix(f"column {answer!r} ")
                parted = " " if told != worse.detail else ": "
                pairs.append(worse._replace(detail=f"column {rejected!r}{parted}{told}"))
            elif isinstance(better, Refused):
                pairs.append(better)
        return pairs

    def _with_shared(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Returns pairs without a prompt, with the length of the text that both answers share."""
        if not self.config.shares_prompt or isinstance(self.format, TextFormat):
            return rows
        answer, rejected = str(self.config.answer), str(self.config.rejected_column)
        shared = self.format.shared
        return [{**row, SHARED: shared(row[answer], row[rejected])} for row in rows]

    def written(
        self, rows: Sequence[Row], numbers: Sequence[int], room: int | None
    ) -> tuple[list[Rendered | Refused], list[int]]:
        """Renders rows as texts.

        Args:
            room: The most tokens of texts that are cut between turns; None cuts none.

        Returns:
            (the texts, the row number of each); for pairs, both answers in turn.
        """
        texts: Sequence[Sequence[Rendered | Refused]]
        if self.config.rejected_column is not None:
            pairs = self.render_pairs(rows)
            texts = [[pair] if isinstance(pair, Refused) else pair for pair in pairs]
        elif self.config.reasoning == "per_turn":
            texts = self.render_turns(rows)
        elif room is not None:
            texts = self.render_split(rows, room)
        else:
            return self.render_rows(rows), list(numbers)
        of = [n for n, some in zip(numbers, texts, strict=True) for _ in some]
        return list(itertools.chain.from_iterable(texts)), of

    def encode(self, row: Row) -> Sample:
        """Encodes a row, special tokens included.

        For a pair it encodes the preferred answer; `encode_pair` encodes both.

        Returns:
            `input_ids` Int32[n] and `loss_mask` UInt8[n], which is 1 for targets.

        Raises:
            EasypipeError: What `render` raises.
        """
        if self.config.rejected_column is not None:
            return self.encode_pair(row)[0]
        (made,) = self._encoded([self.render(row)])
        return made

    def encode_pair(self, row: Row) -> tuple[Sample, Sample]:
        """Encodes the preferred and the other answer, each as `encode` does.

        Raises:
            ConfigError: There is no rejected_column.
        """
        require(
            self.config.rejected_column is not None,
            "rejected_column",
            "not given, so rows are not pairs",
            "Name it, or use encode.",
        )
        (pair,) = self.render_pairs([self._given(row)])
        if isinstance(pair, Refused):
            raise _no_sample(pair)
        better, worse = self._encoded(pair)
        return better, worse

    def _encoded(self, found: Sequence[Rendered]) -> list[Sample]:
        """Encodes a rendered row; raises SourceError unless each text becomes one document."""
        plain = isinstance(self.format, TextFormat)
        texts = texts_of(found, [0] * len(found), plain=plain)
        made = encode_texts(
            texts,
            self.tokenizer,
            batch_size=1,
            at="row",
            raw=self.format.raw,
            lengths=self.lengths,
        )
        if made.rejects:
            raise _no_sample(Refused(made.rejects[0].reason, made.rejects[0].detail))
        if len(made.batch) > len(found):
            detail = f"it becomes {len(made.batch)} documents, which only a Pipeline can make"
            raise _no_sample(Refused("split", detail))
        ids = made.batch.column(INPUT_IDS).values.to_numpy()
        mask = np.ones(len(ids), np.uint8)
        if LOSS_MASK in made.batch.schema.names:
            mask = made.batch.column(LOSS_MASK).values.to_numpy().copy()
        parts = itertools.pairwise(made.batch.column(INPUT_IDS).offsets.to_pylist())
        return [{INPUT_IDS: ids[a:b].astype(np.int32), LOSS_MASK: mask[a:b]} for a, b in parts]

    def __repr__(self) -> str:
        return f"PromptEngine({self.tokenizer.name!r}, {self.config.format_type!r})"


def _format(
    config: PromptConfig, tokenizer: Tokenizer, lengths: Lengths | None
) -> ChatFormat | TemplateFormat | TextFormat:
    """Returns the format that renders the rows of a PromptConfig."""
    is_chat = config.format_type in CHAT_FORMATS
    escaped = tokenizer.special.policy == "escape"
    if lengths is not None:
        _check_lengths(config, lengths.policy)
    if config.format_type == "text" and config.rejected_column is None:
        return TextFormat(config.inputs[0])
    if not is_chat:
        return TemplateFormat(
            config,
            tokenizer.special_strings,
            lengths if lengths is not None and lengths.policy.budgets else None,
            "" if escaped else tokenizer.special_strings.get("eos_token", ""),
        )
    roles, behind = config.roles_to_train, config.label is not None
    train_on = config.train_on or ("completion" if behind and roles is None else "assistant")
    try:
        template = load_chat_template(
            tokenizer,
            chat_template=config.template,
            train_on=train_on,
            date=config.template_date,
            train_empty_thinking=config.train_empty_thinking is not False,
            kwargs=config.chat_template_kwargs or {},
            train_on_eos=config.train_on_eos or "turn",
        )
        template = replace(
            template,
            reasoning=config.reasoning or "keep",
            roles_to_train=("assistant",) if roles is None else tuple(roles),
        )
    except ConfigError as error:
        own = error.at.startswith("chat_template_kwargs")
        raise moved(error, error.at if own else "template") from None
    policy = tokenizer.special.policy
    require(
        not escaped,
        "tokenizer",
        "special_strings='escape' is for raw text, and the template of conversations "
        "writes special tokens",
        "Set special_strings='error', which looks into the messages.",
    )
    trim = lengths if lengths is not None and lengths.policy.policy == "trim_oldest_turns" else None
    return ChatFormat(
        config, template, tokenizer.special.strings if policy == "error" else (), trim
    )


def _check_lengths(config: PromptConfig, policy: LengthPolicy) -> None:
    """Raises ConfigError, at `length`, for policies that do not apply to this format."""
    kind = config.format_type
    for judged, would in (
        (config.rejected_column, "part the answers of a pair"),
        (config.desirable_column, "make several answers of one, each with its verdict"),
    ):
        require(
            policy.policy != "split" or judged is None,
            "length.policy",
            f"'split' would {would}",
            "Use 'drop' or 'keep_start'.",
        )
    require(
        policy.policy != "trim_oldest_turns" or kind in CHAT_FORMATS,
        "length.policy",
        f"{kind!r} has no turns to trim",
        "Use 'trim_prompt_first' or 'keep_end'.",
    )
    require(
        policy.policy != "trim_prompt_first"
        or kind != "text"
        or config.rejected_column is not None,
        "length.policy",
        "a text has no prompt",
        "Use 'keep_start' or 'keep_end'.",
    )
    answers = (config.label, config.rejected_column, config.desirable_column)
    have = (
        [] if kind in (*CHAT_FORMATS, "text") else [c for c in config.columns if c not in answers]
    )
    for name in policy.budgets or {}:
        at = f"length.budgets.{name}"
        require(name in have, at, "no column of a prompt", "Leave it out.", have)


def _no_sample(why: Refused) -> SourceError:
    return SourceError(
        at="row",
        problem=f"{why.reason}: {why.detail}",
        fix=f"{advice(why.reason)}, or leave the row out.",
    )
