"""What a token cache writes down of ranges and of the whole: every field comes back, counts add up,
and the digest of documents sees every column.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.cache.encoder import documents_hash, token_documents
from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import (
    Counts,
    Manifest,
    Part,
    TokenizerIdentity,
    fingerprint_of,
    manifest_json,
    parse_manifest,
    read_manifest,
    total,
)
from easypipe.cache.ranges import (
    Range,
    Record,
    kept_rejects,
    read_record,
    record_path,
    write_record,
)
from easypipe.cache.reader import cache_schema
from easypipe.core.aligned import AlignedColumn
from easypipe.core.checked import read_checked
from easypipe.core.errors import CacheError
from easypipe.core.protocols import Reject
from strategies import examples

PART = Part(
    shard=3, start=10, stop=40, docs=20, tokens=500, file="f.arrow", num_bytes=999,
    checksum="sum", blocks="YmxvYg==", content="content",
)  # fmt: skip
COUNTS = Counts(
    rows=30, rejects={"null": 7, "blank": 5}, docs=20, tokens=500, encoded=480, added=40,
    truncated=20, special=2, escaped=4, lost=5, lengths={"split": 1, "pieces": 2}, trained=77,
    equal_pairs=1,
    aligned={"value": 500},
)  # fmt: skip
REJECTS = (
    Reject(row=11, reason="null", detail="why", count=7),
    Reject(row=12, reason="blank", benign=True, count=5),
)
TOKENIZER = TokenizerIdentity(
    name="bpe", fingerprint="print", vocab_size=320, bos_token_id=1, eos_token_id=2, pad_token_id=3
)
RECORD = Record(
    part=PART, counts=COUNTS, rejects=REJECTS, shard_name="a.jsonl", text="text", text_bytes=321,
    encoder="fast",
)  # fmt: skip
MANIFEST = Manifest(
    dataset="d", key="key", content_field="text", tokenizer=TOKENIZER, shard_names=("a", "b"),
    shard_rows=(30, 9), parts=(PART, dataclasses.replace(PART, start=40, stop=41)), counts=COUNTS,
    fingerprint="whole", loss_mask=True, pairs=True,
    aligned=(AlignedColumn(name="value", dtype="int16", width=2),), quarantine="key.jsonl",
    quarantine_checksum="sum", facts={"seconds": 0.5},
)  # fmt: skip


@pytest.mark.parametrize("sample", [PART, COUNTS, *REJECTS[1:], TOKENIZER, RECORD, MANIFEST])
def test_no_field_of_a_sample_is_as_ever(sample: Any) -> None:
    """Else what is lost on the way to the disk would look as if it had been kept."""
    left = {
        field.name
        for field in dataclasses.fields(sample)
        if getattr(sample, field.name) == field.default
    }
    assert left <= {"format", "detail"}


@pytest.mark.parametrize("shard", [0, 3, 8])
def test_a_record_comes_back_for_the_shard_that_it_is_of_now(tmp_path: Path, shard: int) -> None:
    path = record_path(CacheFolder(tmp_path), Range(3, 10, 40, "recipe", "key"))
    assert path == tmp_path / "ranges" / "recipe" / "key.json"
    assert read_record(path, shard) is None
    write_record(path, RECORD)
    assert "shard" not in read_checked(path)
    expected = dataclasses.replace(RECORD, part=dataclasses.replace(PART, shard=shard))
    assert read_record(path, shard) == expected


@pytest.mark.parametrize("change", ["damaged", "format"])
def test_a_record_that_cannot_be_read_is_none(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key.json"
    write_record(path, RECORD)
    now = {"damaged": ('"a.jsonl"', '"b.jsonl"'), "format": ('"format":', '"Format":')}[change]
    text = path.read_text()
    path.write_text(text.replace(*now))
    assert path.read_text() != text
    assert read_record(path) is None
    assert "the record of a range of rows" in caplog.text


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    assert folder.manifest("key") == tmp_path / "manifests" / "key.json"
    folder.commit_manifest(MANIFEST)
    assert read_manifest(folder.manifest("key")) == MANIFEST
    plain = dataclasses.replace(
        MANIFEST, aligned=(), counts=dataclasses.replace(COUNTS, aligned=None)
    )
    assert "aligned" not in manifest_json(plain).decode()
    assert parse_manifest(manifest_json(plain), "key.json") == plain


@pytest.mark.parametrize("file", ["../a", "/a", "s3://b/a", "a/../../b"])
def test_a_manifest_names_no_file_elsewhere(file: str) -> None:
    parts = (PART, dataclasses.replace(PART, file=file))
    with pytest.raises(CacheError, match="is not a file of this cache"):
        parse_manifest(manifest_json(dataclasses.replace(MANIFEST, parts=parts)), "key.json")
    with pytest.raises(CacheError, match="is not a file of this cache"):
        parse_manifest(manifest_json(dataclasses.replace(MANIFEST, quarantine=file)), "key.json")


def test_every_field_that_decides_tokens_changes_their_fingerprint() -> None:
    base = fingerprint_of(TOKENIZER, [PART, PART])
    for name in ("shard", "start", "stop", "content"):
        value = getattr(PART, name)
        other = dataclasses.replace(PART, **{name: value + 1 if name != "content" else "other"})
        assert fingerprint_of(TOKENIZER, [PART, other]) != base, name
    for name in ("docs", "tokens", "num_bytes", "file", "checksum", "blocks"):
        other = dataclasses.replace(PART, **{name: type(getattr(PART, name))()})
        assert fingerprint_of(TOKENIZER, [PART, other]) == base, name
    assert fingerprint_of(dataclasses.replace(TOKENIZER, fingerprint="x"), [PART, PART]) != base
    assert fingerprint_of(dataclasses.replace(TOKENIZER, name="x"), [PART, PART]) == base
    assert fingerprint_of(TOKENIZER, [PART]) != base


def test_counts_add_up() -> None:
    other = Counts(rows=1, rejects={"null": 1, "also": 2}, lengths={"pieces": 1}, lost=1)
    both = total([other, COUNTS, COUNTS])
    for field in dataclasses.fields(Counts):
        value = getattr(both, field.name)
        if isinstance(value, int):
            assert value == 2 * getattr(COUNTS, field.name) + (getattr(other, field.name) or 0)
    assert both.rejects == {"also": 2, "blank": 10, "null": 15}
    assert list(both.rejects) == sorted(both.rejects)
    assert both.lengths == {"pieces": 5, "split": 2}
    assert both.aligned == {"value": 1000}
    assert (total([other]).trained, total([other]).aligned) == (None, None)
    assert total([]) == Counts()


@examples(80)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from("ab"), st.booleans(), st.integers(1, 3)),
        max_size=9,
    )
)
def test_rejects_that_are_kept_stand_for_all(drawn: list[tuple[int, str, bool, int]]) -> None:
    row, given_ = 5, []
    for gap, reason, benign, count in drawn:
        given_.append(Reject(row=row + gap, reason=reason, benign=benign, count=count))
        row += gap + count
    kept = kept_rejects(reversed(given_))
    rows = [
        sorted(
            (one.reason, row)
            for one in some
            if not one.benign
            for row in range(one.row, one.row + one.count)
        )
        for some in (given_, kept)
    ]
    assert rows[0] == rows[1]
    assert [one.row for one in kept] == sorted(one.row for one in kept)
    for reason in "ab":
        before, after = (
            [one for one in some if one.benign and one.reason == reason] for some in (given_, kept)
        )
        assert len(after) == min(1, len(before))
        if before:
            assert after[0].row == before[0].row
            assert after[0].count == sum(one.count for one in before)
    for one, following in itertools.pairwise(kept):
        assert (one.benign or following.benign) or (
            (one.row + one.count, one.reason) != (following.row, following.reason)
        ), "they are one"


def test_the_digest_of_documents_sees_every_column() -> None:
    schema = cache_schema(
        1000, loss_mask=True, aligned=(AlignedColumn(name="value", dtype="int16", width=2),)
    )
    offsets = np.array([0, 2, 5])
    column = AlignedColumn(name="value", dtype="int16", width=2)

    def documents(**changes: Any) -> pa.RecordBatch:
        values: dict[str, Any] = {
            "offsets": offsets,
            "ids": np.arange(5, dtype=np.uint16),
            "ends": np.array([0, 1], np.uint8),
            "rows": np.array([4, 7]),
            "mask": np.array([1, 0, 1, 1, 0], np.uint8),
            "value": np.arange(10, dtype=np.int16).reshape(5, 2),
        } | changes
        lists = column.lists(values["offsets"], values.pop("value"))
        return token_documents(schema, **values, aligned=(lists,))

    changed = {
        "offsets": np.array([0, 3, 5]),
        "ids": np.array([0, 1, 2, 3, 9], np.uint16),
        "ends": np.array([1, 1], np.uint8),
        "rows": np.array([4, 8]),
        "mask": np.array([1, 0, 1, 1, 1], np.uint8),
        "value": np.array([[0, 1], [2, 3], [4, 5], [6, 7], [8, 0]], np.int16),
    }
    for once in (False, True):
        digests = [documents_hash(documents(), one_set_of_offsets=once)]
        digests += [
            documents_hash(documents(**{name: value}), one_set_of_offsets=once)
            for name, value in changed.items()
        ]
        assert len(set(digests)) == len(changed) + 1
    assert documents_hash(documents()) != documents_hash(documents(), one_set_of_offsets=True)
