"""Conversations, and prompts with completions, as rows to tokenize: read, checked, rendered, with the characters that are trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, did_you_mean, place
from easypipe.core.protocols import Reject, ShardedSource, scan
from easypipe.core.schema import ROW_NUMBER
from easypipe.stages.text_rows import Texts, is_text, require_text
from easypipe.stages.token_rows import Documents, encode_spans
from easypipe.transforms.chat import ChatTemplate, HostileTemplateError, Refused, Rendered, check_date
from easypipe.transforms.masked import TRAINED_END
from easypipe.transforms.messages import BadJson, is_messages, strings_of, strings_within, values_of, wrong_messages
from easypipe.transforms.tokenizer import Tokenizer

TrainOn = Literal["all", "completion", "assistant"]

BENIGN = "nothing_to_train"  # dropped and counted, not an error of the row


def check_chat(dataset: Any) -> None:
    """Raises ConfigError where options of a DatasetConfig about conversations, prompts and completions do not go together."""
    if (dataset.prompt_field is None) != (dataset.completion_field is None):
        missing, given = ("prompt_field", "completion_field") if dataset.prompt_field is None else ("completion_field", "prompt_field")
        raise ConfigError(at=missing, problem=f"{given} needs it", fix=f"Name the column, or leave {given} out.")
    if dataset.prompt_field is not None:
        if dataset.prompt_field == dataset.completion_field:
            raise ConfigError(at="completion_field", problem="is the prompt_field too", fix="Name another column.")
        for name in ("chat_template", "template_date", "tools_field"):
            if getattr(dataset, name) is not None:
                raise ConfigError(at=name, problem="has no effect on prompts and completions", fix="Leave it out.")
        if dataset.train_on == "assistant":
            raise ConfigError(at="train_on", problem="prompts have no assistant", have=["completion", "all"], fix="Use 'completion'.")
    if dataset.template_date is not None:
        check_date(dataset.template_date)


class ChatForm:
    """A column of messages (lists of structs with `role` and `content`, or JSON text of that), rendered with a chat template.

    tools_field: a column with the tools of each row; None: there is none. refuse: strings that no message may hold: the template writes
    the special tokens, and one in a message would pass for the template's.
    """

    masked = True

    def __init__(self, template: ChatTemplate, content_field: str, tools_field: str | None, refuse: Sequence[str] = ()) -> None:
        self.template, self.label, self.tools_field = template, content_field, tools_field
        self._refused = re.compile("|".join(re.escape(text) for text in sorted(refuse, key=len, reverse=True))) if refuse else None
        self.columns = (content_field,) if tools_field is None else (content_field, tools_field)

    def require(self, source: ShardedSource, dataset: str) -> None:
        for column in self.columns:
            at = place(f"dataset {dataset!r}", column=column)
            if column not in source.schema.names:
                fix = did_you_mean(column, source.schema.names) or "Name the column that holds it."
                raise SourceError(at=at, problem="no such column", have=source.schema.names, fix=fix)
            kind = source.schema.field(column).type
            if not (is_messages(kind) or is_text(kind) or pa.types.is_null(kind)):
                raise SourceError(at=at, problem=f"holds {kind}, not lists of objects", fix="Give messages as [{role, content}, ...].")

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        what = ("chat", refuted, tokenizer.fingerprint, _length(tokenizer), self.template.fingerprint, list(self.columns))
        return digest(*what, *tokenizer.special.recipe)

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts:
        """Raises TokenizerError naming the row on which the template went beyond its limits."""
        batch, rejects = scan(source, shard, start, stop)
        numbers = _numbers(batch, start)
        bad: list[Reject] = []
        rows, kept = [], []
        tools = None if self.tools_field is None else values_of(batch.column(self.tools_field), keep=())
        for i, value in enumerate(values_of(batch.column(self.label), keep=("role", "content"))):
            with_tools = None if tools is None else tools[i]
            wrong = wrong_messages(value) or (("not_json", f"tools: {with_tools}") if isinstance(with_tools, BadJson) else None)
            if wrong is None and self._refused is not None:
                found = next((hit for text in strings_within([value, with_tools]) if (hit := self._refused.search(text))), None)
                if found is not None:
                    wrong = "special_string", f"a message holds {found[0]!r}, and special_strings is 'error'"
            if wrong is not None:
                bad.append(Reject(row=numbers[i], reason=wrong[0], detail=wrong[1]))
                continue
            rows.append({"messages": value, "tools": with_tools or None})
            kept.append(numbers[i])
        try:
            rendered = self.template.render(rows)
        except HostileTemplateError as error:
            at = place(source.shards[shard].name, row=kept[error.row], column=self.label)
            raise type(error)(at=at, problem=f"{error.at}: {error.problem}", fix=error.fix) from None
        return _texts(rendered, kept, [*rejects, *bad])

    def encode(self, texts: Texts, tokenizer: Tokenizer, *, batch_size: int, at: str, audit_key: str | None = None) -> Documents:
        return encode_spans(texts, tokenizer, batch_size=batch_size, at=at, raw=False, audit_key=audit_key)


class PairForm:
    """A column of prompts and one of completions, put together as they are; train_on: `completion`, or `all` of it."""

    masked = True

    def __init__(self, prompt_field: str, completion_field: str, train_on: TrainOn) -> None:
        self.columns = (prompt_field, completion_field)
        self.label = f"{prompt_field}, {completion_field}"
        self.train_on = train_on

    def require(self, source: ShardedSource, dataset: str) -> None:
        for column in self.columns:
            require_text(source, column, dataset)

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        what = ("pairs", refuted, tokenizer.fingerprint, _length(tokenizer), list(self.columns), self.train_on)
        return digest(*what, *tokenizer.special.recipe)

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts:
        batch, rejects = scan(source, shard, start, stop)
        numbers = _numbers(batch, start)
        bad: list[Reject] = []
        rendered: list[Rendered | Refused] = []
        kept = []
        prompts, completions = (strings_of(batch.column(name)) for name in self.columns)
        for row, prompt, completion in zip(numbers, prompts, completions, strict=True):
            for name, value in zip(self.columns, (prompt, completion), strict=True):
                if not isinstance(value, str):
                    reason = "null" if value is None else "invalid_utf8"
                    bad.append(Reject(row=row, reason=reason, detail=f"column {name!r} has no text"))
                    break
            else:
                text = prompt + completion
                begin = 0 if self.train_on == "all" else len(prompt)
                trained = begin < len(text) and bool(completion or self.train_on == "all")
                none = Refused("empty", "both are empty") if not text else Refused(BENIGN, "the completion is empty")
                rendered.append(Rendered(text, [[begin, len(text)]], TRAINED_END) if trained else none)
                kept.append(row)
        return _texts(rendered, kept, [*rejects, *bad])

    def encode(self, texts: Texts, tokenizer: Tokenizer, *, batch_size: int, at: str, audit_key: str | None = None) -> Documents:
        return encode_spans(texts, tokenizer, batch_size=batch_size, at=at, raw=True, audit_key=audit_key)


def _numbers(batch: pa.RecordBatch, start: int) -> list[int]:
    if ROW_NUMBER in batch.schema.names:
        return batch.column(ROW_NUMBER).to_pylist()
    return list(range(start, start + batch.num_rows))


def _length(tokenizer: Tokenizer) -> int | None:
    return tokenizer.config.max_length if tokenizer.config.truncation else None


def _texts(rendered: Sequence[Rendered | Refused], rows: Sequence[int], rejects: list[Reject]) -> Texts:
    found = [(row, item) for row, item in zip(rows, rendered, strict=True) if isinstance(item, Rendered)]
    rejects += [
        Reject(row=row, reason=item.reason, detail=item.detail, benign=item.reason == BENIGN)
        for row, item in zip(rows, rendered, strict=True)
        if isinstance(item, Refused)
    ]
    spans = [item.spans for _, item in found]
    return Texts(
        texts=pa.array([item.text for _, item in found], pa.large_string()),
        rows=np.array([row for row, _ in found], np.int64),
        rejects=tuple(sorted(rejects, key=lambda reject: reject.row)),
        spans=spans,
        ends=np.array([item.end for _, item in found], np.uint8),
    )
