"""The row encoder of rows that are tokens already, which it checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from easypipe.cache.encoder import EncodedDocuments, documents_hash, token_documents
from easypipe.cache.manifest import FORMAT, Counts, TokenizerIdentity
from easypipe.cache.reader import cache_schema
from easypipe.core.aligned import AlignedColumn, flat_values
from easypipe.core.config import digest
from easypipe.core.errors import SourceError
from easypipe.core.protocols import (
    Reject,
    ShardedSource,
    TokenInfo,
    by_row,
    left_out,
    place_of,
    scan,
    unit_of,
)
from easypipe.core.schema import (
    ATTENTION_MASK,
    HAS_EOS,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_IDS,
    TARGET_COLUMNS,
    row_numbers,
    token_dtype,
)
from easypipe.core.text import failing
from easypipe.core.values import Array
from easypipe.loader.rows.stored import Block, decode
from easypipe.stages.tokenize.token_rows import (
    ends_closed,
    ends_with,
)
from easypipe.transforms.refused import Refused

IMPORT_VERSION = 1
# The version of documents with a loss mask. In 2, a document that ends with EOS and one more token
# (as with chat templates) needs no other EOS.
MASKED_VERSION = 2


@dataclass(frozen=True)
class ImportedRows:
    """Rows of tokens as the cache stores them; it implements cache.encoder.RowsRead."""

    documents: EncodedDocuments
    rejects: tuple[Reject, ...]
    num_texts = num_bytes = 0  # there was no text

    def content_hash(self) -> str:
        return documents_hash(self.documents.batch, one_set_of_offsets=True)


class TokenEncoder:
    """The encoder of rows that are already tokens; it implements cache.encoder.RowEncoder.

    It reads `input_ids` with `loss_mask`, unshifted `labels` or TRL's masks. Rows without tokens
    are counted, not passed on.

    Args:
        aligned: The aligned columns.
        dataset: The name of the dataset, for errors.
        tolerant: Whether bad rows are rejected, in place of an error.
    """

    label, pairs, backend = INPUT_IDS, False, ""

    def __init__(
        self,
        source: ShardedSource,
        tokens: TokenInfo,
        aligned: tuple[AlignedColumn, ...] = (),
        dataset: str = "",
        *,
        tolerant: bool = False,
    ) -> None:
        known = (INPUT_IDS, *TARGET_COLUMNS, ATTENTION_MASK, POSITION_IDS)
        self._read = tuple(name for name in known if name in source.schema.names)
        ends = HAS_EOS in source.schema.names and source.schema.field(HAS_EOS).type == pa.uint8()
        self._ends = [HAS_EOS] if ends else []  # as easypipe saves it
        self.columns = (*self._read, *self._ends, *(column.name for column in aligned))
        self._targets = [name for name in TARGET_COLUMNS if name in self.columns]
        self.masked = bool(self._targets)
        self.aligned, self._dataset, self._tolerant = aligned, dataset, tolerant
        self.tokens = tokens
        self._schema = cache_schema(tokens.vocab_size, loss_mask=self.masked, aligned=aligned)

    @property
    def tokenizer_identity(self) -> TokenizerIdentity:
        tokens = self.tokens
        return TokenizerIdentity(
            name=tokens.tokenizer,
            fingerprint=tokens.tokenizer_fingerprint,
            vocab_size=tokens.vocab_size,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
        )

    def key(self) -> str:
        version, tokens = MASKED_VERSION if self.masked else IMPORT_VERSION, self.tokens
        whose = (tokens.tokenizer_fingerprint, tokens.vocab_size, tokens.eos_token_id)
        masks = [name for name in self._targets if name not in (LOSS_MASK, LABELS)]
        more = ["tolerant"] if self._tolerant else []
        more += [POSITION_IDS] if POSITION_IDS in self._read else []
        return digest("adopt", version, FORMAT, *whose, *masks, *self._ends, *self.aligned, *more)

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> ImportedRows:
        """Reads and checks rows `start` to `stop`.

        Raises:
            SourceError: A token is outside the tokenizer's vocabulary, a row is padded
                (`attention_mask` of 0) or holds several documents (`position_ids`), or columns have
                unequal lengths; the error names file and row.
        """
        batch, rejects = scan(source, shard, start, stop)
        rows, name = row_numbers(batch, start), source.shards[shard].name
        unit = "line at byte" if unit_of(source) == "bytes" else "row"

        def decoded(batch: pa.RecordBatch) -> tuple[Block, dict[str, Array]]:
            block = decode(batch, self._read, name, start, unit)
            at = lambda i: place_of(source, shard, int(rows[i]))  # noqa: E731
            self._check(block, at)
            whose = lambda i: f"dataset {self._dataset!r}, {at(i)}"  # noqa: E731
            return block, {
                one.name: flat_values(one, batch.column(one.name), block.offsets, whose)
                for one in self.aligned
            }

        try:
            block, values = decoded(batch)
        except SourceError:
            if not self._tolerant:
                raise
            decoded(batch.slice(0, 0))  # raises for the type of a column
            bad = failing(len(rows), lambda i, j: decoded(batch.slice(i, j - i)), (SourceError,))
            keep = ~np.isin(np.arange(len(rows)), list(bad))
            whys = {int(rows[i]): error.problem for i, error in bad.items()}
            refused = [Refused("bad_tokens", why).of_row(row) for row, why in whys.items()]
            batch, rows = batch.filter(pa.array(keep)), rows[keep]
            block, values = decoded(batch)
            rejects = by_row((*rejects, *refused))
        full = np.diff(block.offsets) > 0
        # an empty row does not change the offset
        offsets = np.concatenate([[0], block.offsets[1:][full]]).astype(np.int64)
        ids = block.columns[INPUT_IDS].astype(token_dtype(self.tokens.vocab_size))
        ends = (ends_closed if self.masked else ends_with)(ids, offsets, self.tokens.eos_token_id)
        for name in self._ends:
            ends |= pc.fill_null(batch.column(name), 0).to_numpy()[full] != 0
        mask = block.columns[LOSS_MASK].astype(np.uint8) if self.masked else None
        lists = [one.lists(offsets, values[one.name]) for one in self.aligned]
        made = token_documents(self._schema, offsets, ids, ends, rows[full], mask, lists)
        told = {of: len(numbers) for of, numbers in values.items()} or None
        counts = Counts(docs=made.num_rows, tokens=len(ids), encoded=len(ids), aligned=told)
        empty = left_out(rows[~full], "empty")
        return ImportedRows(EncodedDocuments(made, counts), (*rejects, *empty))

    def encode(self, rows: ImportedRows, at: str, audit_key: str | None = None) -> EncodedDocuments:
        return rows.documents

    def content(self, batch: pa.RecordBatch) -> str:
        return documents_hash(batch, one_set_of_offsets=True)

    def _check(self, block: Block, where: Callable[[int], str]) -> None:
        """Raises SourceError for tokens outside the vocabulary, padding and several documents."""

        def at(token: np.int64, column: str) -> str:
            row = int(np.searchsorted(block.offsets, token, side="right")) - 1
            return f"{where(row)}, column {column!r}"

        ids, attended = block.columns[INPUT_IDS], block.columns.get(SEGMENT_IDS)
        vocabulary = self.tokens.vocab_size
        for i in np.flatnonzero((ids < 0) | (ids >= vocabulary))[:1]:
            problem = f"token {ids[i]} is outside the vocabulary of {vocabulary} of "
            raise SourceError(
                at=at(i, INPUT_IDS),
                problem=f"{problem}{self.tokens.tokenizer!r}",
                fix="Name the tokenizer that made the tokens.",
            )
        for i in () if attended is None else np.flatnonzero(attended == 0)[:1]:
            raise SourceError(
                at=at(i, ATTENTION_MASK),
                problem="the row is padded",
                fix="Save the tokens without padding: packing needs documents as they are.",
            )
        for i in () if attended is None else np.flatnonzero(attended > 1)[:1]:
            raise SourceError(
                at=at(i, POSITION_IDS),
                problem="positions start again at 0: the row holds several documents",
                fix="Give one document a row, or segment_ids too: such rows are not packed again.",
            )
