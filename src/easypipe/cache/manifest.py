"""The manifest that commits a token cache: its JSON, counts, fingerprint, and its contradictions.

cache_dir/
  manifests/<key>.json                 this file; key = digest of the range keys and of how bad
                                       rows are handled
  manifests/<key>.quarantine.jsonl     rows that were set aside, if there are any
  ranges/<recipe>/<range key>.json     one per range of rows: the commit of that range
  tokens/<ab>/<abcd…>.arrow            tokens, named by recipe (cache/ranges.py) and by the content
                                       of the text
  proofs/<tokenizer>.json              whether the fast backend was found to agree with the
                                       reference

part    the rows `start` to `stop` of one source shard, and the file with their tokens ("" if no row
        was kept)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import pydantic

from easypipe.core.aligned import AlignedColumn
from easypipe.core.checked import checked_json, parse_checked, shaped
from easypipe.core.config import digest, fields_of, to_dict
from easypipe.core.errors import CacheError, DamagedFileError
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import TokenInfo
from easypipe.core.remote import StorageOptions
from easypipe.core.storage import is_inside, read_bytes
from easypipe.core.values import Json, JsonObject
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

FORMAT = 1

Count = Annotated[int, pydantic.Field(ge=0, lt=1 << 63)]
_EXACT = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The documents that came from rows `start` to `stop` of source shard `shard`.

    Args:
        shard: The number of the shard.
        start: The first row.
        stop: The row after the last one.
        docs: How many documents there are.
        tokens: How many tokens they have.
        file: The name of the token file below `tokens/`.
        num_bytes: The size of the file.
        checksum: XXH3-128 of the file.
        blocks: The checksums of its blocks (cache/blocks.py); "" in manifests of earlier versions.
        content: XXH3-128 of offsets, tokens and row numbers, which does not depend on the Arrow
            version that wrote the file.
    """

    __pydantic_config__: ClassVar = _EXACT

    shard: Count
    start: Count
    stop: Count
    docs: Count
    tokens: Count
    file: str = ""
    num_bytes: Count = 0
    checksum: str = ""
    blocks: str = ""
    content: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    """The tokenizer of the tokens, as a manifest records it."""

    __pydantic_config__: ClassVar = _EXACT

    name: str
    fingerprint: str
    vocab_size: Count
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Returns the identity of a tokenizer."""
        return cls(
            name=tokenizer.name,
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    @property
    def tokens(self) -> TokenInfo:
        """The description of its tokens that sources pass on."""
        return TokenInfo(
            tokenizer=self.name,
            tokenizer_fingerprint=self.fingerprint,
            vocab_size=self.vocab_size,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.pad_token_id,
            seq_length=None,
        )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The account of rows and tokens of a range of rows, or of a whole dataset.

    Law: rows + pieces = docs + rejects; encoded + added + overlap = tokens + truncated.

    Args:
        rows: The rows that were read.
        rejects: Rejected rows by reason.
        docs: Documents.
        tokens: Tokens that were stored.
        encoded: Tokens of the text itself.
        added: Special tokens around it.
        truncated: Tokens that were cut off.
        special: Special strings in the texts that became special tokens.
        escaped: Special strings in the texts that became ordinary text.
        lost: Characters of the texts that became no token.
        lengths: Documents over max_length by policy; `pieces` and `overlap` of splitting.
        trained: Stored tokens that are targets; None if there is no loss mask.
        equal_pairs: Pairs of answers that are equal; None if documents are not pairs.
        aligned: How many tokens have values, by aligned column; None if there is no such column.
    """

    __pydantic_config__: ClassVar = _EXACT

    rows: int = 0
    rejects: Mapping[str, int] = field(default_factory=dict)
    docs: int = 0
    tokens: int = 0
    encoded: int = 0
    added: int = 0
    truncated: int = 0
    special: int = 0
    escaped: int = 0
    lost: int = 0
    lengths: Mapping[str, int] = field(default_factory=dict)
    trained: int | None = None
    equal_pairs: int | None = None
    aligned: Mapping[str, int] | None = None

    def ledger(self, dataset: str, facts: Json) -> Ledger:
        """Returns a ledger of these counts."""
        ledger = Ledger(facts=dict(facts))
        self.enter(ledger, dataset)
        return ledger

    def enter(self, ledger: Ledger, dataset: str, *, streamed: bool = False) -> None:
        """Adds the fate of rows, texts and tokens to a ledger.

        Args:
            ledger: The ledger.
            dataset: The name of the dataset.
            streamed: Whether the tokens are streamed; they are then counted when they are drawn.
        """
        stage, written = ("stream", "documents") if streamed else ("tokenize", "written")
        over = dict(self.lengths)
        pieces, overlap = (
            {name: over.pop(name)} if name in over else {} for name in ("pieces", "overlap")
        )
        into = {"read": self.rows, **pieces}
        ledger.add(stage, dataset, "rows", into=into, out={written: self.docs, **self.rejects})
        if not streamed:
            into = {"encoded": self.encoded, "special": self.added, **overlap}
            out = {"stored": self.tokens, "truncated": self.truncated}
            ledger.add(stage, dataset, "tokens", into=into, out=out)
        if over:
            into = {"over max_length": sum(over.values())}
            ledger.add("lengths", dataset, "documents", into=into, out=over)
        if self.trained is not None:
            out = {"targets": self.trained, "masked": self.tokens - self.trained}
            ledger.add("loss_mask", dataset, "tokens", into={"stored": self.tokens}, out=out)
        for name, count in (self.aligned or {}).items():
            into = {"stored": self.tokens}
            ledger.add("aligned", dataset, f"tokens of {name}", into=into, out={"with": count})
        if self.equal_pairs:
            out = {"equal": self.equal_pairs, "different": self.docs - self.equal_pairs}
            ledger.add(stage, dataset, "pairs of answers", into={written: self.docs}, out=out)
        if self.special or self.escaped:
            into = {"in texts": self.special + self.escaped}
            out = {"special tokens": self.special, "ordinary text": self.escaped}
            ledger.add(stage, dataset, "special strings", into=into, out=out)
        if self.lost:
            into, out = {"in texts": self.lost}, {"without a token": self.lost}
            ledger.add(stage, dataset, "lost characters", into=into, out=out)


def total(counts: Iterable[Counts]) -> Counts:
    """Returns the sum of several counts."""
    sums: JsonObject = {}
    for each in counts:
        for name, value in fields_of(each).items():
            if isinstance(value, Mapping):
                sums.setdefault(name, Counter()).update(value)
            elif value is not None:
                sums[name] = sums.get(name, 0) + value
    for name in ("rejects", "lengths", *(["aligned"] if "aligned" in sums else [])):
        sums[name] = dict(sorted(sums.get(name, {}).items()))
    return Counts(**sums)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a token cache except the tokens.

    Args:
        dataset: The name under which it was prepared.
        key: The name of the manifest: a digest of the range keys and of how bad rows are handled.
        content_field: The content that was encoded.
        tokenizer: Its tokenizer.
        shard_names: The names of the source's shards.
        shard_rows: The rows of each shard.
        parts: The ranges, in order.
        counts: The fate of rows and tokens.
        fingerprint: A digest of the documents: the same text with the same tokenizer always has the
            same.
        loss_mask: Whether documents have a loss mask.
        pairs: Whether every document is a pair of answers; the second begins at the token whose
            loss_mask is SEGMENT_BREAK.
        aligned: The columns with values for every token.
        quarantine: The name of the quarantine file next to this one; "" if there is none.
        quarantine_checksum: Its XXH3-128; "" in manifests of earlier versions.
        facts: Measured facts: seconds, bytes, backend.
        format: The version of this layout.
    """

    __pydantic_config__: ClassVar = _EXACT

    dataset: str
    key: str
    content_field: str
    tokenizer: TokenizerIdentity
    shard_names: tuple[str, ...]
    shard_rows: tuple[int, ...]
    parts: tuple[Part, ...]
    counts: Counts
    fingerprint: str
    loss_mask: bool = False
    pairs: bool = False
    aligned: tuple[AlignedColumn, ...] = ()
    quarantine: str = ""
    quarantine_checksum: str = ""
    facts: Json = field(default_factory=dict)
    format: int = FORMAT


def fingerprint_of(tokenizer: TokenizerIdentity, parts: Iterable[Part]) -> str:
    """Returns the fingerprint of the documents in `parts`."""
    content = [[part.shard, part.start, part.stop, part.content] for part in parts]
    return digest("tokens", tokenizer.fingerprint, content)


def manifest_json(manifest: Manifest) -> bytes:
    """Returns the bytes of a manifest's file."""
    values = to_dict(manifest)
    if not manifest.aligned:  # written as before aligned columns existed
        del values["aligned"], values["counts"]["aligned"]
    return checked_json(values)


def read_manifest(path: str | Path, storage_options: StorageOptions = None) -> Manifest:
    """Reads a manifest.

    Raises:
        MissingFileError: There is no manifest.
        CacheError: It has another format version, or is not a manifest.
    """
    return parse_manifest(read_bytes(path, storage_options), path)


def parse_manifest(data: bytes, path: str | Path) -> Manifest:
    """Does what `read_manifest` does, with the bytes `data` of the file at `path`."""
    try:
        values = parse_checked(data, path, older=_KEYS)
        check_format(values, path)
        found = shaped(Manifest, values)
        if found.key != str(path).rpartition("/")[2].removesuffix(".json"):
            raise TypeError(f"it belongs to {found.key}")
        for file in (found.quarantine, *(part.file for part in found.parts)):
            if file and not is_inside(file):
                raise TypeError(f"{file!r} is not a file of this cache")
        for column in found.aligned:
            if column.kind.kind not in "iuf":
                raise TypeError(f"{column.dtype} are not numbers")
        return found
    except DamagedFileError as error:
        raise CacheError(
            at=str(path), problem=error.problem, fix="Delete it and prepare again."
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise CacheError(
            at=str(path),
            problem=f"not a token cache manifest: {error}",
            fix="Delete it and prepare again.",
        ) from error


def contradictions(m: Manifest) -> Iterator[str]:
    """Yields the contradictions within a manifest."""
    docs, tokens = sum(part.docs for part in m.parts), sum(part.tokens for part in m.parts)
    if (docs, tokens) != (m.counts.docs, m.counts.tokens):
        yield (
            f"its parts hold {docs} documents of {tokens} tokens, its counts say "
            f"{m.counts.docs} "
            f"of {m.counts.tokens}"
        )
    for entry in m.counts.ledger(m.dataset, {}).entries:
        if entry.leak:
            yield f"{entry.unit} do not add up: in {dict(entry.into)}, out {dict(entry.out)}"
    if len(m.shard_names) != len(m.shard_rows):
        yield f"{len(m.shard_names)} shards, and the rows of {len(m.shard_rows)}"
    at: Counter[int] = Counter()
    for part in m.parts:
        follows = part.start == at[part.shard] and part.stop >= part.start
        if not 0 <= part.shard < len(m.shard_names) or not follows:
            yield (
                f"rows {part.start}:{part.stop} of shard {part.shard} do not follow row "
                f"{at[part.shard]}"
            )
            break
        at[part.shard] = part.stop
        if bool(part.docs) != bool(part.file):
            yield f"rows {part.start}:{part.stop} have {part.docs} documents, in file {part.file!r}"
    else:
        for i, (name, rows) in enumerate(zip(m.shard_names, m.shard_rows, strict=False)):
            if at[i] != rows:
                yield f"it describes {at[i]} of {rows} rows of {name}"
    if fingerprint_of(m.tokenizer, m.parts) != m.fingerprint:
        yield "its fingerprint does not match its parts"
    if m.pairs and not m.loss_mask:
        yield "its documents are pairs, and nothing says where the second answer begins"
    if m.quarantine_checksum and not m.quarantine:
        yield "it has the checksum of a quarantine file, but does not name the file"


_KEYS = tuple(entry.name for entry in dataclasses.fields(Manifest))


def check_format(values: Any, path: str | Path) -> None:
    """Raises CacheError if `values` have a format version other than this one."""
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise CacheError(
            at=str(path),
            problem=f"token cache format {found!r}, this version of easypipe reads format {FORMAT}",
            fix="Prepare the dataset again, or use the version of easypipe that wrote it.",
        )
