"""The manifest of a token cache: one JSON file, written last, that commits a prepared dataset.

cache_dir/
  manifests/<key>.json                 this file; key = digest of the range keys
  manifests/<key>.quarantine.jsonl     rows that were set aside, where there are any
  ranges/<recipe>/<range key>.json     one per range of rows: the commit of that range
  tokens/<ab>/<abcd…>.arrow            tokens, named by recipe and by the content of the text
  proofs/<tokenizer>.json              whether the fast backend was seen to agree with the reference

part    the rows `start` to `stop` of one source shard, and the file with their tokens ("" where no row was kept)
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
from easypipe.core.config import digest
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
    """Documents that came from rows `start` to `stop` of source shard `shard`."""

    __pydantic_config__: ClassVar = _EXACT

    shard: Count
    start: Count
    stop: Count
    docs: Count
    tokens: Count
    file: str = ""  # below `tokens/`
    num_bytes: Count = 0
    checksum: str = ""  # XXH3-128 of the file
    # checksums of its blocks, see cache/blocks.py; "" in manifests that earlier versions wrote
    blocks: str = ""
    # XXH3-128 of offsets, tokens and row numbers; does not depend on the Arrow version that wrote
    # the file
    content: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    __pydantic_config__: ClassVar = _EXACT

    name: str
    fingerprint: str
    vocab_size: Count
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
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
        """What sources say of its tokens."""
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
    """What became of rows and tokens: of a range of rows, or of a whole dataset.

    Law: rows + pieces = docs + rejects; encoded + added + overlap = tokens + truncated.
    """

    __pydantic_config__: ClassVar = _EXACT

    rows: int = 0
    rejects: Mapping[str, int] = field(default_factory=dict)  # rows by reason
    docs: int = 0
    tokens: int = 0  # stored
    encoded: int = 0  # tokens of the text itself
    added: int = 0  # special tokens around it
    truncated: int = 0
    special: int = 0  # special strings in the texts of the documents that became special tokens ...
    escaped: int = 0  # ... and those that became ordinary text
    lost: int = 0  # characters of the texts that became no token
    # documents over max_length by policy, `pieces` and `overlap` of splitting
    lengths: Mapping[str, int] = field(default_factory=dict)
    trained: int | None = None  # stored tokens that are targets; None where there is no loss mask
    equal_pairs: int | None = None  # of pairs of answers, those that are equal; None for none
    # of aligned columns, for how many tokens they have values; None where there are none
    aligned: Mapping[str, int] | None = None

    def ledger(self, dataset: str, facts: Json) -> Ledger:
        ledger = Ledger(facts=dict(facts))
        self.enter(ledger, dataset)
        return ledger

    def enter(self, ledger: Ledger, dataset: str, *, streamed: bool = False) -> None:
        """Adds what became of the rows and texts, and of the tokens; of those that are streamed,
        tokens are counted when they are drawn.
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
    """The sum of several."""
    sums: JsonObject = {}
    for each in counts:
        for name, value in dataclasses.asdict(each).items():
            if isinstance(value, dict):
                sums.setdefault(name, Counter()).update(value)
            elif value is not None:
                sums[name] = sums.get(name, 0) + value
    for name in ("rejects", "lengths", *(["aligned"] if "aligned" in sums else [])):
        sums[name] = dict(sorted(sums.get(name, {}).items()))
    return Counts(**sums)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a token cache but the tokens."""

    __pydantic_config__: ClassVar = _EXACT

    dataset: str
    key: str
    content_field: str
    tokenizer: TokenizerIdentity
    shard_names: tuple[str, ...]
    shard_rows: tuple[int, ...]
    parts: tuple[Part, ...]
    counts: Counts
    fingerprint: str  # of the documents: equal wherever the same text met the same tokenizer
    loss_mask: bool = False
    # every document is two: the second begins where its loss_mask is SEGMENT_BREAK
    pairs: bool = False
    aligned: tuple[AlignedColumn, ...] = ()
    quarantine: str = ""  # file beside this one ...
    # ... and its XXH3-128; "" in manifests that earlier versions wrote
    quarantine_checksum: str = ""
    facts: Json = field(default_factory=dict)  # seconds, bytes, backend: measured
    format: int = FORMAT


def fingerprint_of(tokenizer: TokenizerIdentity, parts: Iterable[Part]) -> str:
    """Of the documents in `parts`."""
    content = [[part.shard, part.start, part.stop, part.content] for part in parts]
    return digest("tokens", tokenizer.fingerprint, content)


def manifest_json(manifest: Manifest) -> bytes:
    values = dataclasses.asdict(manifest)
    if not manifest.aligned:  # as manifests were before there were any
        del values["aligned"], values["counts"]["aligned"]
    return checked_json(values)


def read_manifest(path: str | Path, storage_options: StorageOptions = None) -> Manifest:
    """Raises CacheError for another format version or a file that is no manifest, MissingFileError
    where there is none.
    """
    return parse_manifest(read_bytes(path, storage_options), path)


def parse_manifest(data: bytes, path: str | Path) -> Manifest:
    """data: what is in the file at `path`. Raises CacheError as `read_manifest` does."""
    try:
        values = parse_checked(data, path, older=_KEYS)
        check_format(values, path)
        found = shaped(Manifest, values)
        if found.key != str(path).rpartition("/")[2].removesuffix(".json"):
            raise TypeError(f"it is that of {found.key}")
        for file in (found.quarantine, *(part.file for part in found.parts)):
            if file and not is_inside(file):
                raise TypeError(f"{file!r} is not a file of this cache")
        for column in found.aligned:
            if column.kind.kind not in "iuf":
                raise TypeError(f"{column.dtype} are no numbers")
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
    """What a manifest says against itself."""
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
                yield f"{at[i]} of {rows} rows of {name} are told of"
    if fingerprint_of(m.tokenizer, m.parts) != m.fingerprint:
        yield "its fingerprint is not that of its parts"
    if m.pairs and not m.loss_mask:
        yield "its documents are pairs, and nothing says where the second answer begins"
    if m.quarantine_checksum and not m.quarantine:
        yield "it has the checksum of a quarantine file, and names none"


_KEYS = tuple(entry.name for entry in dataclasses.fields(Manifest))


def check_format(values: Any, path: str | Path) -> None:
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise CacheError(
            at=str(path),
            problem=f"token cache format {found!r}, this version of easypipe reads format {FORMAT}",
            fix="Prepare the dataset again, or use the version of easypipe that wrote it.",
        )
