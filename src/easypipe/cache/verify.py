"""Verifies a token cache: bytes, manifest, records, tokenizer; the findings of every verifier.

Nothing is changed here; cache/repair.py repairs what is found.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.cache.blocks import block_sums
from easypipe.cache.folder import STATS, CacheFolder
from easypipe.cache.manifest import (
    Manifest,
    Part,
    TokenizerIdentity,
    contradictions,
    read_manifest,
    total,
)
from easypipe.cache.mapping import token_batch
from easypipe.cache.ranges import counts_json, counts_of, read_record
from easypipe.cache.reader import cache_schema
from easypipe.core import storage
from easypipe.core.errors import CacheError, EasypipeError, TokenizerError
from easypipe.core.protocols import TokenInfo
from easypipe.core.remote import StorageOptions
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, ROW_NUMBER, SEGMENT_BREAK, fields_text
from easypipe.core.values import JsonObject
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

TOKEN_CACHE, RECORDS = "token cache", "records"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Args:
        at: Where it is.
        what: What is wrong.
        file: The file to make again; None if no file is the cause.
    """

    at: str
    what: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.at}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The findings about one dataset of a token cache, one saved folder or one checkpoint.

    Args:
        path: What was verified.
        kind: "token cache", "saved rows", "records" or "checkpoint".
        dataset: The name of the dataset; "?" if the manifest cannot be read.
        files: The files that were read.
        num_bytes: Their bytes.
        rows: The rows that the manifest counts; 0 for a checkpoint.
        tokens: The tokens that the manifest counts; 0 for a checkpoint.
        problems: What is wrong.
        notes: What could not be checked, and why.
    """

    path: str
    kind: str
    dataset: str
    files: int = 0
    num_bytes: int = 0
    rows: int = 0
    tokens: int = 0
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_manifest(folder: CacheFolder, key: str) -> Verification:
    """Verifies one dataset of a token cache; reads every byte."""
    path = str(folder.manifest(key))
    try:
        m = read_manifest(path, folder.options)
    except EasypipeError as error:
        problem = Problem(at=path, what=f"the manifest: {error.problem}", file=path)
        return Verification(path=path, kind=TOKEN_CACHE, dataset="?", problems=(problem,))
    parts = [part for part in m.parts if part.file]
    said: list[JsonObject] = []
    problems = [problem for part in parts for problem in _wrong_part(m, part, folder, said)]
    problems += [
        Problem(at=path, what=f"the manifest is damaged: {what}", file=path)
        for what in (*contradictions(m), *_miscounted(m, said))
    ]
    if not folder.holds_quarantine(m):
        at = str(folder.at("manifests", m.quarantine))
        what = "the quarantine file is missing or damaged"
        problems.append(Problem(at=at, what=what, file=path))
    more, notes = check_tokenizer(m.tokenizer.tokens, path)
    return Verification(
        path=path,
        kind=TOKEN_CACHE,
        dataset=m.dataset,
        files=len(parts),
        num_bytes=sum(part.num_bytes for part in parts),
        rows=m.counts.rows,
        tokens=m.counts.tokens,
        problems=(*problems, *more),
        notes=notes,
    )


def verify_records(folder: CacheFolder) -> Iterator[Verification]:
    """Verifies the records of ranges, which a later preparation would reuse.

    Records with missing or damaged tokens are skipped: their manifest's verification reports that,
    and a preparation notices it.

    Yields:
        One Verification if there is a problem, otherwise nothing.
    """
    ranges = folder.at("ranges")
    paths = [
        folder.at("ranges", key, name)
        for key in storage.names_in(ranges, folder.options)
        for name in storage.names_in(folder.at("ranges", key), folder.options)
    ]
    known: dict[str, tuple[str, JsonObject] | None] = {}
    problems: list[Problem] = []
    for path in map(str, paths):
        record = read_record(path, storage_options=folder.options)
        if record is None:
            what = "the record of a range cannot be read"
            problems.append(Problem(at=path, what=what, file=path))
            continue
        part = record.part
        if part.file and part.file not in known:
            known[part.file] = _held(folder, part.file)
        there = known.get(part.file)
        if not there or there[0] != part.checksum:
            continue
        own = counts_json(record.counts) | dataclasses.asdict(part)
        what = ", ".join(
            f"{name} is {own[name]!r}, in its file {there[1][name]!r}"
            for name in own.keys() & there[1].keys()
            if own[name] not in ("", there[1][name])  # earlier versions left some empty
        )
        if what:
            problems.append(Problem(at=path, what=what, file=path))
    if problems:
        yield Verification(
            path=str(ranges), kind=RECORDS, dataset="", files=len(paths), problems=tuple(problems)
        )


def check_tokenizer(tokens: TokenInfo, manifest: str) -> tuple[list[Problem], tuple[str, ...]]:
    """Checks that the tokenizer with that name still encodes as before.

    Its fingerprint covers its files and its tokens of a fixed text.

    Args:
        tokens: The facts that were recorded with the tokens.
        manifest: The file that records it.

    Returns:
        (problems, notes); a tokenizer that is not found is a note.
    """
    try:
        found = same_tokenizer_again(tokens.tokenizer, tokens.tokenizer_fingerprint)
    except TokenizerError as error:
        if "is not the tokenizer" in error.problem:
            return [Problem(at=f"tokenizer {tokens.tokenizer}", what=error.problem)], ()
        why = f"{error.at}: {error.problem}"
        return [], (f"the tokenizer is not here, so its encoding was not compared: {why}",)
    own = dataclasses.asdict(TokenizerIdentity.of(found).tokens)
    # packed rows are padded with the id that the stage was given, not the tokenizer's
    ids = ("eos_token_id",) if tokens.seq_length else ("eos_token_id", "pad_token_id")
    what = [
        f"{name} is {value}, of the tokenizer {own[name]}"
        for name, value in dataclasses.asdict(tokens).items()
        if name in ("vocab_size", *ids) and value != own[name]
    ]
    return [Problem(at=manifest, what="; ".join(what), file=manifest)] if what else [], ()


def same_tokenizer_again(name: str, fingerprint: str) -> Tokenizer:
    """Returns the tokenizer that made some tokens.

    Args:
        name: The name that was recorded with the tokens.
        fingerprint: The fingerprint that was recorded with them.

    Raises:
        TokenizerError: It cannot be found, or the tokenizer that is found encodes differently.
    """
    # the only option of a TokenizerConfig on which the fingerprint depends, besides the files
    for special in (False, True):
        found = load_tokenizer(TokenizerConfig(name_or_path=name, add_special_tokens=special))
        if found.fingerprint == fingerprint:
            return found
    raise TokenizerError(
        at=name,
        problem="is not the tokenizer that made these tokens: its files or its encoding of a fixed "
        "text are different",
        fix="Put the files back that were used when the tokens were made.",
    )


def wrong_bytes(
    path: str, num_bytes: int, checksum: str, storage_options: StorageOptions
) -> str | None:
    """Returns what is wrong with the bytes of a file; None if they are right."""
    try:
        found = storage.checksum(path, storage_options)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if found.num_bytes != num_bytes:
        return f"{found.num_bytes} bytes, committed with {num_bytes}"
    if found.checksum != checksum:
        return f"damaged: checksum {found.checksum}, committed as {checksum}"
    return None


def _miscounted(m: Manifest, said: Sequence[JsonObject]) -> Iterator[str]:
    """Yields the counts of a manifest that differ from those in its token files.

    Args:
        m: The manifest.
        said: The counts that each token file has in its metadata.
    """
    # ranges without a document are counted too, but have no file
    if len(said) < len(m.parts) or not all(said):
        return
    held = dataclasses.asdict(total(counts_of(one) for one in said))
    for name, value in dataclasses.asdict(m.counts).items():
        if name not in ("rows", "rejects") and value != held[name]:
            yield f"{name} is {value}, its token files have {held[name]}"


def _wrong_part(
    m: Manifest, part: Part, folder: CacheFolder, said: list[JsonObject]
) -> Iterator[Problem]:
    """Yields what is wrong with a token file; appends the counts in its metadata to `said`."""
    file = str(folder.tokens(part.file))
    shard = m.shard_names[part.shard] if 0 <= part.shard < len(m.shard_names) else "?"
    at = f"{file} (rows {part.start}:{part.stop} of {shard})"
    wrong = wrong_bytes(file, part.num_bytes, part.checksum, folder.options)
    if wrong is not None:
        yield Problem(at=at, what=wrong, file=file)
        return
    try:
        data = folder.content(part.file)
        said.append(_said(data))
        wrong = wrong_content(m, part, token_batch(data, file))
        if part.blocks not in ("", block_sums(data)):
            wrong = wrong or "the checksums of its blocks are different"
        if said[-1].get("content", part.content) != part.content:
            wrong = wrong or "its tokens have another hash"
    except (CacheError, pa.ArrowException, OSError, ValueError) as error:
        wrong = f"cannot be read: {error}"
    if wrong:  # its bytes are those that were committed, so the manifest has changed
        what = f"{wrong}, though its checksum is right"
        yield Problem(at=at, what=what, file=str(folder.manifest(m.key)))


def wrong_content(m: Manifest, part: Part, batch: pa.RecordBatch) -> str | None:
    """Returns how the content of a token file differs from its manifest; None if it does not."""
    expected = cache_schema(m.tokenizer.vocab_size, loss_mask=m.loss_mask, aligned=m.aligned)
    if not batch.schema.equals(expected):
        return f"columns {fields_text(batch.schema)}, expected {fields_text(expected)}"
    ids, rows = batch.column(INPUT_IDS).flatten(), batch.column(ROW_NUMBER).to_numpy()
    if (batch.num_rows, len(ids)) != (part.docs, part.tokens):
        return (
            f"holds {batch.num_rows} documents of {len(ids)} tokens, the manifest says "
            f"{part.docs} of {part.tokens}"
        )
    masks = batch.column(LOSS_MASK).flatten().to_numpy() if m.loss_mask else np.empty(0)
    two = int(np.count_nonzero(masks == SEGMENT_BREAK))
    if two != (part.docs if m.pairs else 0):
        wanted = f"all {part.docs} documents are pairs" if m.pairs else "there are none"
        return f"holds {two} pairs of answers, the manifest says that {wanted}"
    largest = int(ids.to_numpy().max()) if len(ids) else 0
    if largest >= m.tokenizer.vocab_size:
        return f"token {largest} is outside the vocabulary of {m.tokenizer.vocab_size}"
    if rows.size and not (
        part.start <= rows[0] and rows[-1] < part.stop and (np.diff(rows) >= 0).all()
    ):
        return f"row numbers {rows[0]} to {rows[-1]} do not ascend within {part.start}:{part.stop}"
    return None


def _held(folder: CacheFolder, file: str) -> tuple[str, JsonObject] | None:
    """Returns the checksum and the content of a token file; None if it is unreadable."""
    try:
        data = folder.content(file)
        batch = token_batch(data, file)
        tokens = len(batch.column(INPUT_IDS).flatten())
        said = _said(data)
    except (CacheError, pa.ArrowException, OSError, ValueError):
        return None
    held = {"docs": batch.num_rows, "tokens": tokens, "num_bytes": data.size}
    return xxhash.xxh3_128(data).hexdigest(), {**said, **held, "blocks": block_sums(data)}


def _said(data: pa.Buffer) -> JsonObject:
    """Returns the counts that a token file has in its metadata."""
    return json.loads((pa.ipc.open_file(data).schema.metadata or {}).get(STATS, b"{}"))
