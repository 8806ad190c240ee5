"""Document 003: tokens of a user's own `encode(text)`, as a transform of rows with texts."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from easypipe.compat.foreign import OwnTokenizer, TokenizerLike, vocabulary_of
from easypipe.core.config import digest
from easypipe.core.errors import SourceError
from easypipe.core.identity import held_by, name_of, warn_unversioned
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    Reject,
    Sources,
    TokenInfo,
    left_out,
)
from easypipe.core.schema import INPUT_IDS, offsets_of
from easypipe.core.values import attribute_of
from easypipe.stages.tokenize.documents import require_documents
from easypipe.stages.tokenize.text_rows import require_text
from easypipe.transforms.chat.conversations import is_text
from easypipe.transforms.columns.base import ColumnTransform, Rows, TransformedSource
from easypipe.transforms.refused import EMPTY

ANY_IDS = 1 << 32  # the vocabulary of an object that does not say how large its own is


class EncodeTexts(ColumnTransform):
    """The column `column` of text becomes `input_ids`.

    Texts of white space alone are left out and counted; null is a bad row, and so is a text
    that `encode` fails on.

    tokenizer: its `encode(text)` gives ids, or a dict with `input_ids`. Where it has them,
    `eos_token_id` and `pad_token_id` end documents and fill rows, its vocabulary (`vocab_size`,
    `get_vocab_size()` or `get_vocab()`) bounds the ids, and `version` lets tokens be kept: what
    `encode` does is known by nothing else.
    tokens: whose they are.
    """

    drops = True

    def __init__(self, tokenizer: TokenizerLike, column: str) -> None:
        self._own, self._column = OwnTokenizer(tokenizer, None), column
        version, vocabulary = attribute_of(tokenizer, "version"), vocabulary_of(tokenizer)
        self.cacheable, self._held = version is not None, held_by(tokenizer)
        if not self.cacheable:
            warn_unversioned("tokenizer", name_of(tokenizer))
        ends = self._own.eos_token_id, self._own.pad_token_id
        known = (
            None
            if vocabulary is None
            else sorted([str(token), int(number)] for token, number in vocabulary.items())
        )
        self.tokens = self._info = TokenInfo(
            tokenizer=type(tokenizer).__name__,
            tokenizer_fingerprint=digest(
                "own tokenizer", name_of(tokenizer), str(version), known, list(ends)
            ),
            vocab_size=self._own.vocab_size or ANY_IDS,
            eos_token_id=ends[0],
            pad_token_id=ends[1],
            seq_length=None,
        )

    @property
    def fingerprint(self) -> str:
        return digest("encode texts", self._info.tokenizer_fingerprint, self._held, self._column)

    def columns(self, before: pa.Schema) -> pa.Schema:
        del before  # whoever applies this has looked at it (`require_text`)
        return pa.schema([pa.field(INPUT_IDS, pa.large_list(pa.int64()), nullable=False)])

    def rows(self, rows: Rows) -> Rows:
        ids, numbers, blank, bad = [], [], [], []
        column = rows.batch.column(self._column)
        texts = column.to_pylist() if is_text(column.type) else [None] * len(column)
        for number, text in zip(rows.numbers.tolist(), texts, strict=True):
            if text is None:
                bad.append(Reject(row=number, reason="null", detail="no value"))
            elif not text.strip():
                blank.append(number)
            else:
                try:
                    ids.append(np.asarray(self._own.reference_encode(text), np.int64))
                    numbers.append(number)
                except Exception as error:  # noqa: BLE001 (whatever the user's code raises, its row is named)
                    said = (
                        error.problem
                        if isinstance(error, SourceError)
                        else f"{type(error).__name__}: {error}"
                    )
                    bad.append(Reject(row=number, reason="encode failed", detail=said))
        offsets = offsets_of([len(one) for one in ids])
        flat = np.concatenate([np.zeros(0, np.int64), *ids])
        batch = pa.RecordBatch.from_arrays(
            [pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))],
            schema=self.columns(pa.schema([])),
        )
        rejects = (*bad, *left_out(blank, EMPTY, "an empty text"))
        return Rows(
            batch,
            np.array(numbers, np.int64),
            tuple(sorted(rejects, key=lambda reject: reject.row)),
        )

    def __repr__(self) -> str:
        return f"EncodeTexts({self._info.tokenizer}, {self._column!r})"


class EncodeStage(BaseStage):
    """Texts become documents by EncodeTexts.

    They do so once for all pipelines that have this very stage: those of every pass, for one.
    """

    def __init__(self, tokenizer: TokenizerLike, column: str) -> None:
        super().__init__()
        self._transform, self._column = EncodeTexts(tokenizer, column), column
        self._made: Sources = {}

    @property
    def name(self) -> str:
        return "tokenize"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        for name, source in data.items():
            if name not in self._made:
                require_text(source, self._column, name)
                self._made[name] = require_documents(
                    name, TransformedSource(source, self._transform), context, stage=self.name
                )
        return {name: self._made[name] for name in data}


__all__ = ["EncodeStage", "EncodeTexts"]
