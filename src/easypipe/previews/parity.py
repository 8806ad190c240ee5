"""`parity`: the first rows of a config, tokenized and masked here and by transformers.

Rows are compared before cutting, mixing and packing, which transformers does not do.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
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
from easypipe.previews.samples import looked_at
from easypipe.stages.config import PipelineConfig
from easypipe.stages.source.stage import SourceStage
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.stages.tokenize.encoders import PromptRows
from easypipe.transforms.chat.columns import plain_of
from easypipe.transforms.chat.render import ChatTemplate
from easypipe.transforms.chat.spans import FLAG, OPEN, RANGES, WEIGHT, Rendered, flag_of
from easypipe.transforms.chat.turns import by_turns
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
                yield _compared(name, tokenized[name])
            else:
                notes = ("its rows are tokens already",)
                yield Parity(dataset=name, rows=0, masks=0, differences=(), notes=notes)


def _compared(name: str, source: TokenizedShardedSource) -> Parity:
    """Compares the first rows of one dataset."""
    tokenizer, form = source.tokenizer.with_length(None), source.form
    named = _named(tokenizer)
    notes: list[str] = []
    raw = not (isinstance(form, PromptRows) and isinstance(form.engine.format, ChatFormat))
    pairs = [*(_texts if raw else _conversations)(source, named, notes)]
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
        dataset=name,
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
    source: TokenizedShardedSource, named: NamedTokenizer, notes: list[str]
) -> Iterator[_Pair]:
    """Yields the texts of a column, or of a template of columns."""
    own, eos = source.tokenizer, source.tokenizer.eos_token_id
    for shard, one in enumerate(source.source.shards):
        texts = source.form.read(source.source, shard, 0, one.num_rows or 0)
        notes += [_note(reject, "are not text") for reject in texts.rejects]
        for i, (row, text) in enumerate(
            zip(texts.rows.tolist(), texts.texts.to_pylist(), strict=True)
        ):
            found = named(text, add_special_tokens=own.config.add_special_tokens)["input_ids"]
            end = OPEN if texts.ends is None else int(texts.ends[i])
            if end != OPEN and found[-1:] != [eos]:
                found = [*found, *([] if eos is None else [eos])]
            spans = [] if texts.spans is None else texts.spans[i]
            yield _Pair(place(one.name, row=row), Rendered(text, spans, end), found, None)


def _conversations(
    source: TokenizedShardedSource, named: NamedTokenizer, notes: list[str]
) -> Iterator[_Pair]:
    """Yields conversations, as a chat template renders them here and in transformers."""
    form = source.form
    assert isinstance(form, PromptRows)
    engine, format = form.engine, form.engine.format
    assert isinstance(format, ChatFormat)
    template, config = format.template, engine.config
    for shard, one in enumerate(source.source.shards):
        batch, rejects = scan(source.source, shard, 0, one.num_rows or 0)
        notes += [_note(reject, "cannot be read") for reject in rejects]
        columns = [plain_of(batch.column(name), objects=True) for name in form.columns]
        rows = [dict(zip(form.columns, row, strict=True)) for row in zip(*columns, strict=True)]
        numbers = row_numbers(batch, 0).tolist()
        if config.rejected_column is not None:
            other, rejected = str(config.answer), config.rejected_column
            rows = [one for row in rows for one in (row, {**row, other: row[rejected]})]
            numbers = [number for number in numbers for _ in (0, 1)]
        asked = [format.request(row) for row in rows]
        samples = by_turns(template, asked) if config.reasoning == "per_turn" else None
        every = samples or [[pair] for pair in zip(asked, template.render(asked), strict=True)]
        for row, (request, answer) in (
            (row, pair) for row, some in zip(numbers, every, strict=True) for pair in some
        ):
            at = place(one.name, row=row)
            if isinstance(answer, Refused):
                notes.append(f"{at}: refused here: {answer.detail}")
            elif isinstance(request, dict):
                yield _theirs(at, template, request, answer, named, given=config.template)


def _theirs(
    at: str,
    template: ChatTemplate,
    request: JsonObject,
    answer: Rendered,
    named: NamedTokenizer,
    *,
    given: str | Path | None,
) -> _Pair:
    """Returns the tokens and mask that transformers makes from the messages of a row."""
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
