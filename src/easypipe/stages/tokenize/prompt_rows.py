"""Encodes conversations, prompts with completions, and templates, with what is trained of them."""

from __future__ import annotations

from collections.abc import Sequence

from easypipe.cache.ranges import BLANK_TEXTS
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, did_you_mean, place
from easypipe.core.protocols import ShardedSource, scan
from easypipe.stages.tokenize.engine import PromptEngine
from easypipe.stages.tokenize.text_rows import Texts, row_numbers, texts_of
from easypipe.transforms.chat.messages import decoded_of, plain_of
from easypipe.transforms.chat.render import HostileTemplateError
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.chat.turns import CUT_BY
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.config import length_limit
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

ROWS_AT_A_TIME = 1000  # that are Python objects: Python looks through all there are again and again


class PromptRows:
    """Rows that a PromptEngine writes: conversations, prompts with completions, rows through a
    template.
    """

    masked = True

    def __init__(self, engine: PromptEngine, have: Sequence[str], room: int | None = None) -> None:
        """have: the columns of the source, of which the format may read some that others lack.
        room: tokens of a row of packing, for which conversations without a length of their own are
        cut between turns; None cuts none."""
        self.engine = engine
        # whether a room has an effect
        self.splits = engine.splits and length_limit(engine.tokenizer.config) is None
        self.room = room if self.splits else None
        format = engine.format
        rejected = engine.config.rejected_column
        self.columns = (
            *engine.columns,
            *(name for name in (*format.optional, *engine.verdicts) if name in have),
        )
        self._pair = [] if rejected is None else ["rejected", rejected]
        self.pairs = rejected is not None
        self.raw, self.lengths = format.raw, engine.lengths
        self.label = format.columns[0] if format.kind == "chat" else ", ".join(format.columns)

    def require(self, source: ShardedSource, dataset: str) -> None:
        for column in self.columns:
            at = place(f"dataset {dataset!r}", column=column)
            if column not in source.schema.names:
                fix = did_you_mean(column, source.schema.names) or "Name the column that holds it."
                raise SourceError(
                    at=at, problem="no such column", have=source.schema.names, fix=fix
                )
            kind = source.schema.field(column).type
            if column not in self.engine.verdicts and not self.engine.format.accepts(kind):
                wanted = ("lists of objects", "Give messages as [{role, content}, ...].")
                wanted = (
                    wanted
                    if self.engine.format.kind == "chat"
                    else ("text", "Name a column of text.")
                )
                raise SourceError(at=at, problem=f"holds {kind}, not {wanted[0]}", fix=wanted[1])

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        format = self.engine.format
        open_end = (
            ["cut ends are open"]
            if format.kind != "text" and length_limit(tokenizer.config) is not None
            else []
        )
        what = (
            format.kind,
            refuted,
            BLANK_TEXTS,
            tokenizer.fingerprint,
            length_limit(tokenizer.config),
            list(self.columns),
            format.identity,
        )
        cut = [] if self.room is None else [CUT_BY, 1, self.room]
        return digest(
            *what,
            *tokenizer.special.recipe,
            *([] if self.lengths is None else [self.lengths.identity]),
            *self._pair,
            *open_end,
            *cut,
        )

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts:
        """Raises TokenizerError naming the row on which a template went beyond its limits."""
        batch, rejects = scan(source, shard, start, stop)
        numbers = row_numbers(batch, start).tolist()
        rendered: list[Rendered | Refused] = []
        of: list[int] = []
        # JSON of conversations is read by who renders them
        chat = self.engine.format.kind == "chat"
        values = plain_of if chat else decoded_of
        for first in range(0, batch.num_rows, ROWS_AT_A_TIME):
            columns = [
                values(batch.column(name).slice(first, ROWS_AT_A_TIME)) for name in self.columns
            ]
            rows = [
                dict(zip(self.columns, values, strict=True))
                for values in zip(*columns, strict=True)
            ]
            try:
                some, of_some = self.engine.written(
                    rows, numbers[first : first + len(rows)], self.room
                )
            except HostileTemplateError as error:
                at = place(
                    source.shards[shard].name, row=numbers[first + error.row], column=self.label
                )
                raise type(error)(
                    at=at, problem=f"{error.at}: {error.problem}", fix=error.fix
                ) from None
            rendered += some
            of += of_some
        cut_by = CUT_BY if self.room is not None else "trim_oldest_turns" if chat else "budgets"
        return texts_of(rendered, of, rejects, cut_by)
