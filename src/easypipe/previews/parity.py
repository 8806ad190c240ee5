"""`parity`: the first rows of a config, tokenized and masked here and by transformers.

Rows are compared before cutting, mixing and packing, which transformers does not do. It is given
the rows of JSON files and of memory as they are there, so that a fault of reading is a difference.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from easypipe.core.errors import TokenizerError, place, raising
from easypipe.core.protocols import Reject, scan
from easypipe.core.schema import row_numbers
from easypipe.core.values import Json, JsonObject
from easypipe.interop.hf_tokens import NamedTokenizer, applied, first_difference, needed
from easypipe.pipeline import Pipeline
from easypipe.previews.given import given_rows
from easypipe.previews.samples import looked_at
from easypipe.stages.config import PipelineConfig
from easypipe.stages.source.config import DatasetConfig
from easypipe.stages.source.stage import SourceStage
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.stages.tokenize.encoders import PromptRows
from easypipe.transforms.chat.columns import plain_of
from easypipe.transforms.chat.render import ChatTemplate
from easypipe.transforms.chat.spans import FLAG, OPEN, RANGES, WEIGHT, Rendered, flag_of
from easypipe.transforms.chat.turns import Asked, Request, by_turns
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.prompt.formats import ChatFormat
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.masked import encode_masked
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN = 24  # characters of a token that differs


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The result of comparing the first rows of a dataset.

    Attributes:
        dataset: The name of the dataset.
        rows: The number of texts with compared tokens.
        masks: The number of texts with compared masks.
        differences: A sentence for each text that differs.
        notes: What was not compared, and why.
    """

    dataset: str
    rows: int
    masks: int
    differences: tuple[str, ...]
    notes: tuple[str, ...]


class _Pair(NamedTuple):
    """A text as it is rendered here, and its tokens and mask by transformers.

    Attributes:
        at: The place of the text.
        own: The text as it is rendered here.
        found: The tokens; None if transformers rejects the conversation.
        mask: The mask; None if the template has no generation markers.
    """

    at: str
    own: Rendered
    found: Sequence[int] | None
    mask: Sequence[int] | None


def parity(config: PipelineConfig, rows: int) -> Iterator[Parity]:
    """Compares the first `rows` rows of each dataset.

    Raises:
        ConfigError: transformers is not installed.
        TokenizerError: It cannot open a tokenizer of the config.
    """
    needed("transformers", "--against")
    with tempfile.TemporaryDirectory(prefix="easypipe-parity-") as folder:
        source = SourceStage(first_rows=rows)
        tokenized = Pipeline(looked_at(config, folder)).add_stage(source).tokenize().tokenized()
        for dataset in config.named().datasets:
            name = str(dataset.name)
            if name in tokenized:
                yield _compared(dataset, tokenized[name])
            else:
                notes = ("its rows are tokens already",)
                yield Parity(dataset=name, rows=0, masks=0, differences=(), notes=notes)


def _compared(dataset: DatasetConfig, source: TokenizedShardedSource) -> Parity:
    """Compares the first rows of one dataset."""
    tokenizer, form = source.tokenizer.with_length(None), source.form
    named = _named(tokenizer)
    notes: list[str] = []
    raw = not (isinstance(form, PromptRows) and isinstance(form.engine.format, ChatFormat))
    pairs = [*(_texts if raw else _conversations)(dataset, source, named, notes)]
    texts = pa.array([pair.own.text for pair in pairs], pa.large_string())
    spans, ends = [pair.own.spans for pair in pairs], [pair.own.end for pair in pairs]
    made = encode_masked(tokenizer, texts, spans, ends, raw=raw, whole=True)
    assert made.mask is not None
    differences: list[str] = []
    ended = 0
    for pair, (start, stop) in zip(pairs, itertools.pairwise(made.offsets.tolist()), strict=True):
        own, mask = made.ids[start:stop].tolist(), made.mask[start:stop].tolist()
        found = pair.found
        if found is None:
            differences.append(f"{pair.at}: transformers refuses it")
            continue
        if pair.own.end != OPEN and own[:-1] == list(found):
            ended, own, mask = ended + 1, own[:-1], mask[:-1]
        differences += _differing(pair, own, mask, tokenizer)
    if ended:
        notes.append(f"EOS follows {ended} texts here, and none with transformers")
    return Parity(
        dataset=str(dataset.name),
        rows=len(pairs),
        masks=sum(pair.mask is not None for pair in pairs),
        differences=tuple(differences),
        notes=tuple(notes),
    )


def _differing(
    pair: _Pair, own: Sequence[int], mask: Sequence[int], tokenizer: Tokenizer
) -> Iterator[str]:
    """Yields a sentence if the tokens or the masks of a text differ."""

    def shown(ids: Sequence[int], at: int) -> str:
        text = f"{tokenizer.decode(ids[at : at + 1])!r:.{SHOWN}}"
        return f"{text} ({ids[at]})" if at < len(ids) else "nothing"

    found = pair.found or ()
    at = first_difference(own, found)
    if at is not None:
        yield (
            f"{pair.at}: token {at} is {shown(own, at)}, and with transformers {shown(found, at)}; "
            f"{len(own)} and {len(found)} tokens"
        )
    elif pair.mask is not None and (at := first_difference(mask, pair.mask)) is not None:
        here, there = ("here", "with transformers") if mask[at] else ("with transformers", "here")
        yield f"{pair.at}: token {at}, {shown(own, at)}, is a target {here}, and not {there}"


def _named(tokenizer: Tokenizer) -> NamedTokenizer:
    path = Path(os.path.expanduser(tokenizer.name))
    name = str(path.parent if path.is_file() else tokenizer.name)
    open_one = needed("transformers").AutoTokenizer.from_pretrained
    wrong = OSError, ValueError, KeyError
    with raising(TokenizerError, name, "transformers cannot open it", None, wrong):
        return open_one(name)


def _note(reject: Reject, wrong: str) -> str:
    """Returns a note about a reject.

    Args:
        reject: The reject.
        wrong: What to call its rows, unless they were left out on purpose.
    """
    if reject.benign:
        return f"{reject.count} rows are left out: {reject.detail or reject.reason}"
    return f"{reject.count} rows {wrong}: {reject.detail or reject.reason}"


def _texts(
    dataset: DatasetConfig,
    source: TokenizedShardedSource,
    named: NamedTokenizer,
    notes: list[str],
) -> Iterator[_Pair]:
    """Yields the texts of a column, or of a template of columns."""
    own, eos = source.tokenizer, source.tokenizer.eos_token_id
    written = _written(dataset, source)
    for shard, one in enumerate(source.source.shards):
        texts = source.form.read(source.source, shard, 0, one.num_rows or 0)
        notes += [_note(reject, "are not text") for reject in texts.rejects]
        for i, (row, text) in enumerate(
            zip(texts.rows.tolist(), texts.texts.to_pylist(), strict=True)
        ):
            said = written(shard, row) or text
            found = named(said, add_special_tokens=own.config.add_special_tokens)["input_ids"]
            end = OPEN if texts.ends is None else int(texts.ends[i])
            if end != OPEN and found[-1:] != [eos]:
                found = [*found, *([] if eos is None else [eos])]
            spans = [] if texts.spans is None else texts.spans[i]
            yield _Pair(place(one.name, row=row), Rendered(text, spans, end), found, None)


def _written(
    dataset: DatasetConfig, source: TokenizedShardedSource
) -> Callable[[int, int], str | None]:
    """Returns what writes a row of a template of columns from its values as they are given.

    It returns None for a row that is not known, and for columns of text, which are read unchanged.
    """
    form = source.form
    if not isinstance(form, PromptRows) or form.engine.format.kind != "prompt" or form.pairs:
        return lambda shard, row: None
    format, given = form.engine.format, given_rows(dataset, source.source, form.columns)

    def written(shard: int, row: int) -> str | None:
        values = None if given is None else given(shard, row)
        one = None if values is None else format.render([values])[0]
        return one.text if isinstance(one, Rendered) else None

    return written


def _conversations(
    dataset: DatasetConfig,
    source: TokenizedShardedSource,
    named: NamedTokenizer,
    notes: list[str],
) -> Iterator[_Pair]:
    """Yields conversations, as a chat template renders them here and in transformers."""
    form = source.form
    assert isinstance(form, PromptRows)
    engine, format = form.engine, form.engine.format
    assert isinstance(format, ChatFormat)
    template, config = format.template, engine.config
    given = given_rows(dataset, source.source, form.columns)
    if given is None:
        notes.append("transformers was given these rows as easypipe reads them")
    for shard, one in enumerate(source.source.shards):
        batch, rejects = scan(source.source, shard, 0, one.num_rows or 0)
        notes += [_note(reject, "cannot be read") for reject in rejects]
        columns = [plain_of(batch.column(name), objects=True) for name in form.columns]
        rows = [dict(zip(form.columns, row, strict=True)) for row in zip(*columns, strict=True)]
        numbers = row_numbers(batch, 0).tolist()
        raw = [None if given is None else given(shard, number) for number in numbers]
        there = [
            row if own is None else format.as_json(own) for row, own in zip(rows, raw, strict=True)
        ]
        if config.rejected_column is not None:
            rows, there = _both_answers(rows, config), _both_answers(there, config)
            numbers = [number for number in numbers for _ in (0, 1)]
        asked, theirs = ([format.request(row) for row in some] for some in (rows, there))
        for i, request, answer in _samples(template, asked, theirs, config):
            at = place(one.name, row=numbers[i])
            if isinstance(answer, Refused):
                notes.append(f"{at}: refused here: {answer.detail}")
            elif isinstance(request, dict):
                yield _theirs(at, template, request, answer, named, given=config.template)
            else:
                yield _Pair(at, answer, None, None)


def _both_answers(rows: Sequence[Json], config: PromptConfig) -> list[Json]:
    """Returns each row with its answer, and with its rejected answer in its place."""
    other, rejected = str(config.answer), str(config.rejected_column)
    return [one for row in rows for one in (row, {**row, other: row[rejected]})]


def _samples(
    template: ChatTemplate,
    asked: Sequence[Request | Refused],
    theirs: Sequence[Request | Refused],
    config: PromptConfig,
) -> Iterator[tuple[int, Asked | Refused, Rendered | Refused]]:
    """Yields the number of a row, the request to transformers, and the text here, of each sample.

    Args:
        template: The template.
        asked: The requests of the rows as easypipe reads them.
        theirs: The requests of the rows as they are given.
        config: The config of the format.
    """
    if config.reasoning != "per_turn":
        every = zip(theirs, template.render(asked), strict=True)
        yield from ((i, request, answer) for i, (request, answer) in enumerate(every))
        return
    both = zip(by_turns(template, asked), by_turns(template, theirs), strict=True)
    for i, (some, others) in enumerate(both):
        other = Refused("other_turns", "the row as it is given has other turns to train")
        requests = [one for one, _ in others] if len(some) == len(others) else [other] * len(some)
        for (_, answer), request in zip(some, requests, strict=True):
            yield i, request, answer


def _theirs(
    at: str,
    template: ChatTemplate,
    request: JsonObject,
    answer: Rendered,
    named: NamedTokenizer,
    *,
    given: str | Path | None,
) -> _Pair:
    """Returns the tokens and mask that transformers makes from the messages of a row.

    Args:
        request: The request, from the row as it is given.
        answer: The text, from the row as easypipe reads it.
    """
    messages: list[Json] = request["messages"]
    plain = [{k: v for k, v in one.items() if k not in (FLAG, RANGES, WEIGHT)} for one in messages]
    asks = (template.train_on, template.train_on_eos, template.roles_to_train, template.reasoning)
    every = asks == ("assistant", "turn", ("assistant",), "keep") and "answers" not in request
    flagged = any(flag_of(one) is not None for one in messages)
    marked = every and not flagged and MARKS.search(template.source)
    options: JsonObject = {"tools": request.get("tools"), **request.get("kwargs", {})}
    options |= {"chat_template": template.source} if given is not None else {}
    options |= {"return_assistant_tokens_mask": True} if marked else {}
    found = applied(named, plain, **options)
    mask = None if found is None or not marked else found["assistant_masks"]
    return _Pair(at, answer, None if found is None else found["input_ids"], mask)
