"""Texts, a small tokenizer and sources for the tests of tokenizing."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from easypipe.cache.reader import TokenCache
from easypipe.core.config import digest
from easypipe.core.protocols import Shard, Source
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.transforms.tokenizer.bpe import train_bpe
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer
from strategies import HOSTILE

TOKENIZERS = ("gpt2", "mistral_v1", "olmo_neox", "torchtitan_tiny")
FAST = ("gpt2", "mistral_v1", "olmo_neox")  # gigatoken loads these


@functools.cache
def small_tokenizer_folder() -> Path:
    """A byte-level BPE of 500 tokens, trained on this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    return train_bpe(
        lines * 3, 500, ["<|pad|>"], Path(tempfile.mkdtemp(prefix="easypipe-test-")) / "tokenizer"
    )


def small_tokenizer(**options: object) -> Tokenizer:
    return load_tokenizer(TokenizerConfig(name_or_path=str(small_tokenizer_folder()), **options))  # type: ignore[arg-type]


def texts(count: int, *, seed: int = 0) -> list[str]:
    """Different texts of a few words, the same for the same seed."""
    words = [
        "alpha",
        "beta",
        "naïve",
        "日本",
        "def f(x):\n",
        "  ",
        "1234",
        "don't",
        HOSTILE[:5],
        "<|endoftext|>",
    ]
    return [
        " ".join(words[(seed + i * k + k) % len(words)] for k in range(1 + (i + seed) % 9))
        + f" {seed}-{i}"
        for i in range(count)
    ]


class ShardedTexts:
    """Shards of rows in memory, that count their reads. Without `shard_identity`: a source of the
    least kind there is.
    """

    def __init__(self, *shards: list[str | None], cuts: int = 10, column: str = "text") -> None:
        self.data = [
            pa.record_batch({column: pa.array(rows, pa.string()), "n": pa.array(range(len(rows)))})
            for rows in shards
        ]
        self.schema = pa.schema([(column, pa.string()), ("n", pa.int64())])
        # num_bytes is large, so that cutting into ranges happens at every cut
        self.shards = tuple(
            Shard(
                name=f"shard-{i}",
                num_rows=len(rows),
                cuts=tuple(range(0, max(1, len(rows)), cuts)),
                num_bytes=(len(rows) << 22) // cuts,
            )
            for i, rows in enumerate(shards)
        )
        self.fingerprint = digest("texts", list(shards))
        self.reads: list[tuple[int, int, int]] = []

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        self.reads.append((shard, start, stop))
        return self.data[shard].slice(start, stop - start)


class WithIdentity(ShardedTexts, Source):
    """The same rows in files that were touched `touched` times."""

    def __init__(
        self, *shards: list[str | None], touched: tuple[int, ...] = (), cuts: int = 10
    ) -> None:
        super().__init__(*shards, cuts=cuts)
        self.touched = touched or (0,) * len(shards)
        self.fingerprint = digest(self.fingerprint, self.touched)

    def shard_identity(self, shard: int) -> str:
        return digest("file", shard, self.touched[shard])


class CountingTokenizer:
    """Counts the texts that a tokenizer encodes from here on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts = self.calls = 0
        encode = tokenizer.encode_column

        def counted(column: pa.Array, **options: Any):
            self.calls += 1
            self.texts += len(column)
            return encode(column, **options)

        tokenizer.encode_column = counted  # type: ignore[method-assign]


def _writer(source: Any, tokenizer: Tokenizer, options: dict[str, Any]) -> Any:
    return TokenizedShardedSource(source, tokenizer, **options).writer


def prepare(source: Any, tokenizer: Tokenizer, **options: Any) -> TokenCache:
    """The token cache of a source of text. options: as TokenizedShardedSource has them."""
    return _writer(source, tokenizer, options).fill()


def prepare_part(source: Any, tokenizer: Tokenizer, *, part: Any, **options: Any) -> int:
    return _writer(source, tokenizer, options).fill_part(part)


def pending(source: Any, tokenizer: Tokenizer, **options: Any) -> tuple[list[int], int]:
    return _writer(source, tokenizer, options).missing()
