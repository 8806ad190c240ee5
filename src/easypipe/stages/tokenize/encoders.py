"""The row encoders of text, prompts, conversations and pairs.

A form (TextColumn, PromptRows) says how rows become texts. `TextEncoder` makes documents from
texts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.cache.encoder import EncodedDocuments, documents_hash, token_documents
from easypipe.cache.manifest import FORMAT, TokenizerIdentity
from easypipe.cache.ranges import BLANK_TEXTS
from easypipe.core.aligned import DESIRABLE
from easypipe.core.config import digest, fields_of
from easypipe.core.errors import ConfigError, EasypipeError, SourceError, place, require_known
from easypipe.core.protocols import (
    ShardedSource,
    place_of,
    scan,
    unit_of,
)
from easypipe.core.schema import (
    INPUT_IDS,
    LOSS_MASK,
    ROW_NUMBER,
    SEGMENT_BREAK,
    data_columns,
    holds,
    is_json,
    row_numbers,
)
from easypipe.core.values import Arguments, Int64, UInt8
from easypipe.stages.source.config import PROMPT_OPTIONS, DatasetConfig, check_text_answers
from easypipe.stages.tokenize.engine import PromptEngine
from easypipe.stages.tokenize.text_rows import Texts, read_texts, require_text, texts_of
from easypipe.stages.tokenize.token_rows import (
    encode_texts,
    equal_documents,
    sample_of,
)
from easypipe.transforms.chat.columns import VERDICTS, decoded_of, is_messages, is_text, plain_of
from easypipe.transforms.chat.render import HostileTemplateError
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.chat.turns import CUT_BY
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.prompt.formats import KWARGS, warn_unread
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.config import length_limit
from easypipe.transforms.tokenizer.lengths import Lengths
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("easypipe")

# rows of the data that are compared with the reference before the fast backend is used
SAMPLE_ROWS = 256
SAMPLE_BYTES = 64 << 10
# rows as Python objects at a time: the garbage collector visits all existing ones repeatedly
ROWS_AT_A_TIME = 1000


class TextColumn:
    """The form of rows with one column of text; every token is trained on.

    Args:
        content_field: The column.
        lengths: How long texts are cut, instead of max_length.
        blanks: Whether texts of only white space are also documents.
    """

    pairs, raw, judged = False, True, None

    def __init__(
        self, content_field: str, lengths: Lengths | None = None, *, blanks: bool = False
    ) -> None:
        self.columns, self.label = (content_field,), content_field
        self.lengths, self._blanks = lengths, blanks
        self.masked = lengths is not None and lengths.masks
        # whether a text may become several documents
        self.continues = lengths is not None and lengths.policy.policy == "split"

    def require(self, source: ShardedSource, dataset: str) -> None:
        """Raises SourceError if the source has no such column of text."""
        require_text(source, self.label, dataset)

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        """Returns the encoding key, a digest of everything that tokens depend on."""
        what = (tokenizer.fingerprint, tokenizer.content_limit, self.label, refuted, BLANK_TEXTS)
        recipe = digest("recipe", FORMAT, *what, *tokenizer.special.recipe)
        return recipe if self.lengths is None else digest(recipe, self.lengths.identity)

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts:
        """Reads the texts of rows `start` to `stop`."""
        return read_texts(source, shard, start, stop, self.label, blanks=self._blanks)


class PromptRows:
    """The form of rows that a PromptEngine renders: conversations, prompts, rows with a template.

    Args:
        have: The schema of the source; the format reads some columns only if they exist.
        room: The tokens of a packed row, to which conversations without their own length are cut
            between turns; None cuts none.
        template_at: The key path of the template, for errors.
    """

    masked = True

    def __init__(
        self,
        engine: PromptEngine,
        have: pa.Schema,
        room: int | None = None,
        template_at: str | None = None,
    ) -> None:
        self.engine, self._template_at = engine, template_at
        limit = length_limit(engine.tokenizer.config)
        self.splits = engine.splits and limit is None  # whether a room has an effect
        self.room = room if self.splits else None
        # whether a text may become several documents, or lose its end
        self.continues = self.room is not None or limit is not None
        format, rejected = engine.format, engine.config.rejected_column
        self.columns = (
            *engine.columns,
            *(name for name in (*format.optional, *engine.verdicts) if name in have.names),
        )
        kinds = [have.field(name).type for name in self.columns if name in have.names]
        self._pair = [] if rejected is None else ["rejected", rejected]
        self._pair += ["shared prompt"] if engine.config.shares_prompt else []
        shots = engine.config.few_shot
        self._pair += ["same examples"] if self._pair and shots and shots.count else []
        self.pairs, self.judged = rejected is not None, engine.config.desirable_column
        self._pair += [] if self.judged is None else ["desirable", self.judged]
        self._pair += ["maps"] * any(holds(kind, pa.types.is_map) for kind in kinds)
        self._pair += ["JSON as given"] * (format.kind == "prompt" and any(map(is_json, kinds)))
        self.raw, self.lengths = format.raw, engine.lengths
        self.label = format.columns[0] if format.kind == "chat" else ", ".join(format.columns)

    def require(self, source: ShardedSource, dataset: str) -> None:
        """Raises SourceError if a column is missing or has a type that the format rejects."""
        format, schema = self.engine.format, source.schema
        for column in self.columns:
            at = place(f"dataset {dataset!r}", column=column)
            if column not in schema.names:
                fix = "Name the column that holds it."
                require_known(column, data_columns(schema), at, "no such column", fix, SourceError)
            kind = schema.field(column).type
            if column == self.judged:
                if not (pa.types.is_boolean(kind) or is_text(kind)):  # CSV has texts alone
                    where, value = _first_value(source, column, ("true", "false"))
                    raise SourceError(
                        at=where or at,
                        problem=f"{value} is not a verdict on an answer"
                        if value is not None
                        else f"some of its values are not a verdict on an answer ({kind})",
                        fix="Give true where it is desirable and false where it is not.",
                    )
            elif column not in self.engine.verdicts and not format.accepts(kind, column):
                wanted, fix = "text", "Name a column of text."
                if column == KWARGS:
                    wanted, fix = "objects", "Rename it: format_fields."
                elif format.kind == "chat":
                    wanted = "lists of objects, or JSON text of them"
                    fix = "Give messages as [{role, content}, ...]."
                    if column != format.columns[0]:
                        fix = "Rename it: format_fields, or give null in rows without it."
                raise SourceError(at=at, problem=f"holds {kind}, not {wanted}", fix=fix)

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        """Returns the encoding key of these rows."""
        format, length = self.engine.format, length_limit(tokenizer.config)
        return digest(
            format.kind,
            refuted,
            BLANK_TEXTS,
            tokenizer.fingerprint,
            length,
            list(self.columns),
            format.identity,
            *tokenizer.special.recipe,
            *([] if self.lengths is None else [self.lengths.identity]),
            *self._pair,
            *([] if format.kind == "text" or length is None else ["cut ends are open"]),
            *([] if self.room is None else [CUT_BY, 2, self.room]),
            *(["one end"] if format.raw and tokenizer.surrounding[1] else []),
        )

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts:
        """Reads rows `start` to `stop` as texts.

        It raises a TokenizerError that names the row on which a template exceeded its limits.
        """
        batch, rejects = scan(source, shard, start, stop)
        numbers = row_numbers(batch, start).tolist()
        rendered: list[Rendered | Refused] = []
        of: list[int] = []
        # The worker that renders conversations also parses their JSON.
        chat = self.engine.format.kind == "chat"
        values = plain_of if chat else decoded_of
        for first in range(0, batch.num_rows, ROWS_AT_A_TIME):
            some = batch.slice(first, ROWS_AT_A_TIME)
            columns = [values(some.column(name), objects=True) for name in self.columns]
            rows = [dict(zip(self.columns, row, strict=True)) for row in zip(*columns, strict=True)]
            here = numbers[first : first + len(rows)]
            try:
                written, of_written = self.engine.written(rows, here, self.room)
            except HostileTemplateError as error:
                at = f"{place_of(source, shard, here[error.row])}, column {self.label!r}"
                given = self._template_at if error.at in ("template", "chat_template") else None
                problem = f"{given or error.at}: {error.problem}"
                raise type(error)(at=at, problem=problem, fix=error.fix) from None
            rendered += written
            of += of_written
        cut_by = CUT_BY if self.room is not None else "trim_oldest_turns" if chat else "budgets"
        if self.judged is None:
            return texts_of(rendered, of, rejects, cut_by)
        given = dict(zip(numbers, batch.column(self.judged).to_pylist(), strict=True))
        verdict_of = {row: VERDICTS.get(str(one).lower()) for row, one in given.items()}
        said = {row: "null" if one is None else repr(one)[:100] for row, one in given.items()}
        rendered = [
            Refused("no_verdict", f"column {self.judged!r} is {said[row]}, not true or false")
            if verdict_of[row] is None
            else one
            for row, one in zip(of, rendered, strict=True)
        ]
        texts = texts_of(rendered, of, rejects, cut_by)
        desirable = np.array([verdict_of[row] for row in texts.rows.tolist()], np.uint8)
        return replace(texts, desirable=desirable)


def _first_value(
    source: ShardedSource, column: str, but: tuple[str, ...]
) -> tuple[str | None, str | None]:
    """Finds the first value of a column that is not one of `but`, else its first value.

    Returns:
        (its place, the value); (None, None) if the head of the first shard cannot be read, for
        example because its values have several types.
    """
    known, most = source.shards[0].num_rows, 1 << 16 if unit_of(source) == "bytes" else 1000
    with contextlib.suppress(EasypipeError):  # the caller reports the wrong column anyway
        batch, _ = scan(source, 0, 0, most if known is None else min(most, known))
        values = batch.column(column).to_pylist()
        given = [i for i, value in enumerate(values) if value is not None]
        for i in sorted(given, key=lambda i: values[i] in but)[:1]:
            row = int(row_numbers(batch, 0)[i])
            return f"{place_of(source, 0, row)}, column {column!r}", repr(values[i])[:100]
    return None, None


RowForm = TextColumn | PromptRows


def form_of(
    dataset: DatasetConfig,
    at: str,
    source: ShardedSource,
    tokenizer: Tokenizer,
    room: int | None = None,
) -> RowForm:
    """Returns the form of a dataset's rows, from its options and the type of its column.

    It reads no rows, except a file of few-shot examples. `at` is the dataset's key path, for
    errors; `room` is as in PromptRows.

    Raises:
        SourceError: content_field is not a column.
        ConfigError: An option has no effect on such rows.
        TokenizerError: The tokenizer has no chat template.
    """
    prompt, inside = dataset.prompt, f"{at}.prompt"
    if prompt is None:
        inside = at
        try:
            prompt = _prompt_of(dataset, source)
        except ConfigError as error:
            raise error.under(at) from None
    try:
        engine = PromptEngine(tokenizer, prompt, length=dataset.length)
    except ConfigError as error:
        if dataset.prompt is None and error.at == "template":
            error.at = "chat_template"
        own = error.at == "tokenizer" or error.at.startswith("length.")
        raise error.under(at if own else inside) from None
    if prompt.format_type == "text" and prompt.rejected_column is None:
        return TextColumn(prompt.inputs[0], engine.lengths, blanks=dataset.text_unit == "file")
    if engine.format.kind == "pairs":
        warn_unread(f"{at} ({dataset.name!r})", tuple(source.schema.names), engine.columns)
    template_at = f"{at}.chat_template" if dataset.prompt is None else f"{inside}.template"
    return PromptRows(engine, source.schema, room, template_at)


def _prompt_of(dataset: DatasetConfig, source: ShardedSource) -> PromptConfig:
    """Returns the PromptConfig that is equivalent to a DatasetConfig without `prompt`."""
    if dataset.completion_field is not None:
        return _answers_of(dataset, source)
    column = dataset.content_field
    if column not in source.schema.names:
        require_text(source, column, str(dataset.name))
    kind = source.schema.field(column).type
    options = fields_of(dataset)
    given = [name for name in PROMPT_OPTIONS if options[name] is not None]
    is_chat = is_text(kind) and (given or column == "messages")
    if is_messages(kind) or is_json(kind) or is_chat:
        return _chat_of(dataset, input_columns=(column,))
    if given:
        raise ConfigError(
            at=given[0],
            problem=f"has no effect on column {column!r}, which holds {kind}",
            fix="Name a column of messages.",
        )
    return PromptConfig(format_type="text", input_columns=(column,))


def _chat_of(dataset: DatasetConfig, **columns: Any) -> PromptConfig:
    """Returns the PromptConfig of conversations; `columns` are other options of it."""
    own: Arguments = {
        "template": dataset.chat_template,
        "train_on": dataset.train_on,
        "train_on_eos": dataset.train_on_eos,
        "tools_column": dataset.tools_field,
        "template_date": dataset.template_date,
        "message_fields": dataset.message_fields,
        "chat_template_kwargs": dataset.chat_template_kwargs,
        "train_empty_thinking": dataset.train_empty_thinking,
    }
    return PromptConfig(**(own | columns))


def _answers_of(dataset: DatasetConfig, source: ShardedSource) -> PromptConfig:
    """Returns the PromptConfig of prompt_field, completion_field and rejected_field.

    It raises ConfigError for options of conversations if the columns hold text.
    """
    prompt, answer = dataset.prompt_field, dataset.completion_field
    there = answer in source.schema.names
    column = source.schema.field(answer).type if there else pa.null()
    columns: Arguments = {
        "rejected_column": dataset.rejected_field,
        "desirable_column": dataset.desirable_field,
        "train_on_eos": dataset.train_on_eos,
    }
    if prompt is not None:
        columns |= {"input_columns": (prompt,), "label_column": answer}
    else:
        columns |= {"input_columns": (answer,)}
    alone = prompt is not None and pa.types.is_struct(column)  # a single message
    if is_messages(column) or is_json(column) or alone:
        return _chat_of(dataset, **columns, train_on=dataset.train_on or "completion")
    if there:  # a missing column is refused by its name
        check_text_answers(dataset)
    if prompt is None:
        return PromptConfig(format_type="text", **columns)
    return PromptConfig(format_type="prompt_completion", train_on=dataset.train_on, **columns)


class TextEncoder:
    """The encoder of rows of text in any form; it implements cache.encoder.RowEncoder.

    The fast backend is used on a dataset only after it agreed with the reference on a sample.

    Args:
        memo: The local folder of the cache, where results of checks of fast tokenizers are stored.
        batch_size: How many texts are encoded at a time; affects memory and speed, never tokens.
    """

    def __init__(
        self,
        form: RowForm,
        tokenizer: Tokenizer,
        *,
        dataset: str,
        memo: Path,
        batch_size: int = 1000,
    ) -> None:
        self.form, self.tokenizer = form, tokenizer
        self.columns, self.label, self.read = form.columns, form.label, form.read
        self.masked, self.pairs = form.masked, form.pairs
        self.aligned = () if form.judged is None else (DESIRABLE,)
        self._dataset, self._memo, self._batch_size = dataset, memo, batch_size
        self._proving, self._proved, self._warned = threading.Lock(), False, False
        tokenizer.remember_in(memo)  # before anything asks which backend encodes

    @property
    def tokenizer_identity(self) -> TokenizerIdentity:
        return TokenizerIdentity.of(self.tokenizer)

    @property
    def backend(self) -> str:
        return self.tokenizer.backend.name

    def key(self) -> str:
        return self.form.recipe(self.tokenizer, refuted=self.tokenizer.refuted(self._memo))

    def encode(self, rows: Texts, at: str, audit_key: str | None = None) -> EncodedDocuments:
        """Encodes texts; before gigatoken is first used, it is checked on a sample of these."""
        with self._proving:
            if not self._proved and not self.tokenizer.by_reference(rows.texts):
                sample = sample_of(rows.texts, SAMPLE_ROWS, SAMPLE_BYTES)
                of = f"dataset {self._dataset}"
                backend = self.tokenizer.prove(sample, of=of, memo=self._memo)
                logger.debug("%s: tokenizing with %s: %s", of, self.tokenizer.name, backend)
                self._proved = True

        def encoded(texts: Texts, audit_key: str | None) -> EncodedDocuments:
            return encode_texts(
                texts,
                self.tokenizer,
                batch_size=self._batch_size,
                at=at,
                raw=self.form.raw,
                audit_key=audit_key,
                lengths=self.form.lengths,
            )

        if self.pairs:
            made = encode_pairs(rows, encoded, audit_key)
            if (equal := made.counts.equal_pairs) and not self._warned:
                self._warned = True
                warning = "dataset %s: both answers of %d pairs in %s are equal: none is preferred"
                logger.warning(f"{warning}; the ledger counts them", self._dataset, equal, at)
            return made
        made = encoded(rows, audit_key)
        return made if rows.desirable is None else with_verdicts(made, rows.rows, rows.desirable)

    def content(self, batch: pa.RecordBatch) -> str:
        return documents_hash(batch)


def with_verdicts(made: EncodedDocuments, rows: Int64, desirable: UInt8) -> EncodedDocuments:
    """Returns the documents with a column that marks the tokens of desirable answers.

    Args:
        made: The documents.
        rows: Int64[n], ascending, the row of each verdict.
        desirable: UInt8[n], the verdicts.
    """
    tokens = made.batch.column(INPUT_IDS)
    offsets = np.asarray(tokens.offsets.to_numpy(), np.int64)
    own = np.searchsorted(rows, made.batch.column(ROW_NUMBER).to_numpy())
    values = np.repeat(desirable[own], np.diff(offsets))
    batch = made.batch.append_column(DESIRABLE.field, DESIRABLE.lists(offsets, values))
    counts = replace(made.counts, aligned={DESIRABLE.name: len(values)})
    return replace(made, batch=batch, counts=counts)


# A pair is one document of both answers to a prompt, the chosen one first. At the first token of
# the second answer the loss mask is SEGMENT_BREAK (loader/rows/gather.py makes two segments of it).
# If one answer is left out, so is the other.


def encode_pairs(
    texts: Texts,
    encode: Callable[[Texts, str | None], EncodedDocuments],
    audit_key: str | None,
) -> EncodedDocuments:
    """Encodes pairs, one document for each row.

    Args:
        texts: The answers, two of each row in turn.
        encode: Encodes texts, given with an audit key.
    """

    made = encode(texts, audit_key)
    rejects = {reject.row: reject for reject in reversed(made.rejects)}
    if rejects:  # the other halves of these pairs were counted and must not be
        good = ~np.isin(texts.rows, list(rejects))
        made = encode(texts.take(np.flatnonzero(good)), None)
    ids, masks = (made.batch.column(name) for name in (INPUT_IDS, LOSS_MASK))
    edges = np.asarray(ids.offsets.to_numpy(), np.int64)
    offsets, begins = edges[::2], [edges[:-1:2], edges[1::2]]
    ids, mask = ids.values.to_numpy(), masks.values.to_numpy().copy()
    mask[begins[1]] = SEGMENT_BREAK
    # Packing must not add an EOS, because it would end only one of the two answers.
    rows = made.batch.column(ROW_NUMBER).to_numpy()[::2]
    closed = np.ones(len(rows), np.uint8)
    batch = token_documents(made.batch.schema, offsets, ids, closed, rows, mask)
    sizes = [begins[1] - begins[0], offsets[1:] - begins[1]]
    counts = replace(
        made.counts,
        docs=len(rows),
        trained=int((mask == 1).sum()),
        lengths={of: count for of, count in made.counts.lengths.items() if of != "pieces"},
        equal_pairs=equal_documents(ids, begins, sizes) or None,
    )
    return EncodedDocuments(batch, counts, tuple(rejects[row] for row in sorted(rejects)))
