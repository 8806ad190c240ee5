"""Document 003: train_tokenizer, TransformerDataset, create_dataloaders for a small transformer.

They make a user's tokenizer, a continuous stream of tokens, and a training and a validation loader.
The stream is that of the Pipeline: `pack` with strategy "stream", segments "row" and nothing
shuffled, so the documents have the order of the files, with EOS between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from easypipe.compat.collators import is_number
from easypipe.compat.foreign import (
    OwnTokenizer,
    TokenizerLike,
    is_own,
    row_number,
    tokenizer_config,
    vocabulary_of,
)
from easypipe.compat.loaders import DataLoaderConfig
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, TokenizerError, require
from easypipe.core.identity import held_by, name_of, warn_unversioned
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    Reject,
    ShardedSource,
    Sources,
    TokenInfo,
    by_row,
    left_out,
)
from easypipe.core.schema import INPUT_IDS, LABELS, SEGMENT_IDS, offsets_of
from easypipe.core.values import Dataset, Int32, Integers, attribute_of
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.epochs import EpochLoader, seed_of_epoch
from easypipe.loader.loader import Loader
from easypipe.pipeline import Pipeline
from easypipe.plan.order import OrderConfig
from easypipe.stages.config import PipelineConfig
from easypipe.stages.load.stage import require_a_batch
from easypipe.stages.pack.config import PackStageConfig
from easypipe.stages.pack.stage import PackStage
from easypipe.stages.source.config import DatasetConfig
from easypipe.stages.tokenize.documents import require_documents
from easypipe.stages.tokenize.text_rows import read_texts, require_text
from easypipe.transforms.chat.columns import is_text
from easypipe.transforms.columns.base import ColumnTransform, Rows, TransformedSource
from easypipe.transforms.refused import EMPTY
from easypipe.transforms.tokenizer.bpe import train_bpe
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

SPECIAL_TOKENS = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
# Their keys in tokenizer_config.json.
ROLES = {"[CLS]": "cls_token", "[SEP]": "sep_token", "[MASK]": "mask_token", "[PAD]": "pad_token"}
ROWS_AT_A_TIME = 1024


class BPETokenizer:
    """A byte-level BPE tokenizer in a folder, as `train_tokenizer` writes it.

    It also opens any other tokenizer folder or Hub name.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Self:
        """Opens the tokenizer of a folder or Hub name.

        Raises:
            TokenizerError: There is no tokenizer.
        """
        return cls(load_tokenizer(TokenizerConfig(name_or_path=str(path))))

    @property
    def name_or_path(self) -> str:
        return self.tokenizer.name

    def get_vocab_size(self) -> int:
        """Returns the number of tokens, including special ones: the rows of an embedding."""
        return self.tokenizer.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """Returns the tokens of a text, in the form for BERT models.

        Args:
            text: The text.
            add_special_tokens: Whether to put [CLS] before the text and [SEP] after it.

        Returns:
            `input_ids`, `token_type_ids` (all 0: one text) and `attention_mask` (all 1: no
            padding), of equal length.

        Raises:
            TokenizerError: The tokenizer has no [CLS] or [SEP].
        """
        ids = self.tokenizer.reference_encode(text)
        if add_special_tokens:
            ids = [self._special("[CLS]"), *ids, self._special("[SEP]")]
        return {
            "input_ids": ids,
            "token_type_ids": [0] * len(ids),
            "attention_mask": [1] * len(ids),
        }

    def decode(self, ids: Sequence[int] | Integers, *, skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _special(self, text: str) -> int:
        if text not in self.tokenizer.special_tokens:
            raise TokenizerError(
                at=self.tokenizer.name,
                problem=f"has no token {text}",
                fix="Leave add_special_tokens out.",
            )
        [number] = self.tokenizer.reference_encode(text)
        return number

    def __repr__(self) -> str:
        return f"BPETokenizer({self.tokenizer.name!r}, {self.get_vocab_size()} tokens)"


def train_tokenizer(
    data_files: Dataset,
    vocab_size: int,
    output_dir: str | Path,
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    content_field: str = "text",
    is_jsonl: bool | None = None,
) -> BPETokenizer:
    """Trains a byte-level BPE on the texts, and writes it to the folder `output_dir`.

    The same texts give the same files.

    Args:
        data_files: As in DatasetConfig, like content_field: JSON lines, plain text, rows in memory.
        is_jsonl: As in TransformerDataset.
        vocab_size: As in train_bpe.
        special_tokens: As in train_bpe; "<|endoftext|>", which ends documents, is always added.

    Raises:
        SourceError: The column does not hold text. train_bpe may raise other errors.
    """
    pipeline = Pipeline(
        PipelineConfig(datasets=(_dataset(data_files, content_field, is_jsonl),), seed=0)
    ).source()
    [source] = pipeline.get_data().values()
    require_text(source, content_field, "tokenizer")
    named = {ROLES[token]: token for token in special_tokens if token in ROLES}
    train_bpe(_texts(source, content_field), vocab_size, special_tokens, output_dir, named=named)
    return BPETokenizer.from_pretrained(output_dir)


class TransformerDataset:
    """Sequences of a continuous stream of tokens, and the token after each.

    `dataset[i]` begins at token `i * stride`. It is `{"input_ids": Int32[seq_length], "labels":
    Int32[seq_length]}`, where labels[t] is the token after input_ids[t]. Every item is full; the
    rest at the end of the stream is not an item, but a row of the validation loader. Tokens are
    made once and stored on disk (docs/cache.md); an item is read when it is requested.

    Args:
        data_path: JSON lines or plain text, or anything else that DatasetConfig.data_files takes.
        tokenizer: A BPETokenizer, a folder, a Hub name, or your own object with `encode(text)`,
            which returns ids or a dict with `input_ids`. Its `eos_token_id` is put between
            documents. Its tokens are cached if it has a `version`, which must change when `encode`
            does.
        is_jsonl: Whether the file is JSON lines; None decides by its name.
        content_field: For JSON lines, the column of text.
    """

    def __init__(
        self,
        data_path: Dataset,
        tokenizer: TokenizerLike,
        seq_length: int,
        *,
        stride: int = 1,
        is_jsonl: bool | None = None,
        content_field: str = "text",
    ) -> None:
        require(
            is_number(stride, int) and stride >= 1,
            "stride",
            f"{stride} tokens from one item to the next",
            "Give at least 1.",
        )
        self.seq_length, self.stride = seq_length, stride
        pipeline = stream(
            _dataset(data_path, content_field, is_jsonl),
            _encoder(tokenizer, content_field),
            seq_length,
        )
        loader: Loader = pipeline.load(LoadStageConfig(batch_size=1, drop_last=False)).build()
        self._reader = loader.rows.open()
        count = loader.rows.num_rows or 0
        last = self._reader.gather(np.array([count - 1], np.int64))
        self.num_tokens = (count - 1) * seq_length + int((last[SEGMENT_IDS] != 0).sum())

    def __len__(self) -> int:
        """Returns the number of full items, for which the token after the last one exists."""
        return max(0, (self.num_tokens - 1 - self.seq_length) // self.stride + 1)

    def __getitem__(self, i: int) -> dict[str, Int32]:
        """Returns item i.

        Raises:
            IndexError: i is after the end.
            ConfigError: i is no number.
        """
        index = row_number(i, len(self), "TransformerDataset", "Take one item at a time.")
        if not 0 <= index < len(self):
            raise IndexError(f"item {i} was asked for, there are {len(self)}")
        row, offset = divmod(index * self.stride, self.seq_length)
        two = self._reader.gather(np.array([row, row + 1], np.int64))[INPUT_IDS].ravel()
        found = two[offset : offset + self.seq_length + 1]
        return {INPUT_IDS: found[:-1].copy(), LABELS: found[1:].copy()}


def create_dataloaders(
    train_path: Dataset,
    val_path: Dataset,
    tokenizer: TokenizerLike,
    batch_size: int = 16,
    seq_length: int = 128,
    *,
    is_jsonl: bool | None = None,
    content_field: str = "text",
    seed: int | None = None,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[EpochLoader, Loader]:
    """Makes a training and a validation loader over streams of tokens.

    Batches have `input_ids` and `labels`, Int32[batch_size, seq_length]. Rows follow each other in
    the stream without overlap, and labels are the next tokens, -100 if there is none. Training rows
    are shuffled differently in every pass, and a last batch that is not full is left out.
    Validation rows are in order and complete; the last batch may be short, and its last row is
    padded.

    Args:
        seed: The seed of the training order; None draws one and logs it.
        num_workers: As in DataLoaderConfig, like pin_memory, persistent_workers, rank, world_size.
        tokenizer: As in TransformerDataset.

    Raises:
        ConfigError: A stream does not fill one batch of this rank.
    """
    options = DataLoaderConfig(
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )
    options.warn_of_what_has_no_effect()
    options = options.with_seed(drawing=True)
    load = options.load_options()
    encoders = {train: _encoder(tokenizer, content_field) for train in (True, False)}

    def made(path: Dataset, order: int | None, *, train: bool) -> Loader:
        dataset = _dataset(path, content_field, is_jsonl)
        pipeline = stream(dataset, encoders[train], seq_length, shuffle_seed=order)
        loader: Loader = pipeline.load(dataclasses.replace(load, drop_last=train)).build()
        own = loader if world_size == 1 else loader.of_rank(rank, world_size)
        require_a_batch("stream", own.rows, own.config)
        return own

    first = options.seed or 0
    return EpochLoader(
        lambda epoch: made(train_path, seed_of_epoch(first, epoch), train=True)
    ), made(val_path, None, train=False)


def stream(
    dataset: DatasetConfig,
    encoder: EncodeStage | TokenizerConfig | str,
    seq_length: int,
    *,
    shuffle_seed: int | None = None,
) -> Pipeline:
    """Returns the Pipeline of a continuous stream of tokens.

    Args:
        dataset: The texts.
        encoder: The tokenizer, or the stage that encodes.
        seq_length: Tokens of a row.
        shuffle_seed: The seed of the order of rows; None leaves them in the order of the stream.
    """
    own = encoder if isinstance(encoder, EncodeStage) else None
    pack = PackStageConfig(
        seq_length=seq_length,
        strategy="stream",
        segments="row",
        shuffle_packed=shuffle_seed is not None,
    )
    config = PipelineConfig(
        datasets=(dataset,),
        default_tokenizer=None if isinstance(encoder, EncodeStage) else encoder,
        seed=0 if shuffle_seed is None else shuffle_seed,
        order=OrderConfig(shuffle=False),
        pack=pack,
    )
    pipeline = Pipeline(config).source()
    pipeline = pipeline.tokenize() if own is None else pipeline.add_stage(own)
    return pipeline.add_stage(PackStage(pack, chosen=False))


def _encoder(tokenizer: TokenizerLike, content_field: str) -> EncodeStage | TokenizerConfig | str:
    """Returns the encoder for `stream`.

    Raises:
        ConfigError: `tokenizer` is not a tokenizer.
    """
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.tokenizer.config
    if is_own(tokenizer):
        return EncodeStage(tokenizer, content_field)
    return str(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer_config(tokenizer)


def _dataset(data: Dataset, content_field: str, is_jsonl: bool | None) -> DatasetConfig:
    data = str(data) if isinstance(data, Path) else data
    type_ = None if is_jsonl is None else "jsonl" if is_jsonl else "txt"
    return DatasetConfig(name="stream", data_files=data, type=type_, content_field=content_field)


def _texts(source: ShardedSource, content_field: str) -> Iterator[str]:
    for number, shard in enumerate(source.shards):
        rows = shard.num_rows or 0
        for start in range(0, rows, ROWS_AT_A_TIME):
            yield from read_texts(
                source, number, start, min(rows, start + ROWS_AT_A_TIME), content_field
            ).texts.to_pylist()


ANY_IDS = 1 << 32  # the vocabulary size of an object that does not provide one


class EncodeTexts(ColumnTransform):
    """A transform of a column of text to `input_ids`, by a user's own tokenizer.

    Texts of only white space are left out and counted. A null is a bad row, and so is a text on
    which `encode` fails.

    Args:
        tokenizer: Its `encode(text)` returns ids, or a dict with `input_ids`. If it has them,
            `eos_token_id` ends documents, `pad_token_id` pads rows, its vocabulary (`vocab_size`,
            `get_vocab_size()` or `get_vocab()`) bounds the ids, and `version` allows tokens to be
            cached, because nothing else identifies what `encode` does.
        column: The column of text.

    Attributes:
        tokens: The description of the tokens and their tokenizer.
    """

    drops = True

    def __init__(self, tokenizer: TokenizerLike, column: str) -> None:
        self._own, self._column = OwnTokenizer(tokenizer, None), column
        version, vocabulary = attribute_of(tokenizer, "version"), vocabulary_of(tokenizer)
        self.cacheable, self._held = version is not None, held_by(tokenizer)
        if not self.cacheable:
            self.unversioned = (f"{name_of(tokenizer)} has no version",)
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
        del before  # callers have checked it (`require_text`)
        return pa.schema([pa.field(INPUT_IDS, pa.large_list(pa.int64()), nullable=False)])

    def rows(self, rows: Rows) -> Rows:
        """Encodes the texts; bad and empty ones are rejected with their reasons."""
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
        batch = pa.record_batch(
            [pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))],
            schema=self.columns(pa.schema([])),
        )
        rejects = (*bad, *left_out(blank, EMPTY, "an empty text"))
        return Rows(
            batch,
            np.array(numbers, np.int64),
            by_row(rejects),
        )

    def __repr__(self) -> str:
        return f"EncodeTexts({self._info.tokenizer}, {self._column!r})"


class EncodeStage(BaseStage):
    """The stage that turns texts into documents with EncodeTexts.

    It does so once for all pipelines that share this stage, such as those of every pass.
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
