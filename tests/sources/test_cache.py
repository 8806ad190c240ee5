from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest

from easypipe.cache import mapping
from easypipe.cache.manifest import Counts, total
from easypipe.cache.reader import Buffers, TokenCache
from easypipe.core import locks
from easypipe.core.checked import commit_checked, read_checked
from easypipe.core.errors import CacheError, MissingFileError, SourceError
from laws import assert_stateless_reads
from token_support import ShardedTexts, prepare, small_tokenizer, texts


@pytest.fixture(params=["mapped whole", "mapped while it is read"])
def cache(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> TokenCache:
    """Three shards, 57 rows, 55 documents in seven parts."""
    if request.param != "mapped whole":
        monkeypatch.setattr(mapping, "most_maps", lambda: 8)  # two files at once
    source = ShardedTexts(texts(30), [], [None, *texts(25, seed=2), "x<|endoftext|>", ""])
    return prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path, on_error="skip")


def test_stateless_reads(cache: TokenCache) -> None:
    assert_stateless_reads(cache, cuts=(0, 1, 9, 10, 11, 28))
    assert [shard.num_rows for shard in cache.shards] == [30, 0, 28]
    assert [shard.cuts for shard in cache.shards] == [(0, 10, 20), (0,), (0, 10, 20)]
    for i, shard in enumerate(cache.shards):
        parts = [part.num_bytes for part in cache.manifest.parts if part.shard == i]
        assert shard.num_bytes == sum(parts)
        assert len([size for size in parts if size]) > 1 or not shard.num_rows
    with pytest.raises(SourceError, match="shard-2: rows 0:29 of 28 do not exist"):
        cache.read(2, 0, 29)


def test_ranges_without_documents_stand_between_others(tmp_path: Path) -> None:
    source = ShardedTexts([None] * 10 + texts(10), [None] * 3, [*texts(5, seed=2), *[""] * 15])
    cache = prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path, on_error="skip")
    assert [part.docs for part in cache.manifest.parts] == [0, 10, 0, 5, 0]
    assert_stateless_reads(cache, cuts=(0, 3, 9, 10, 11, 15))
    assert [cache.where(doc) for doc in (0, 9, 10)] == [
        ("shard-0", 10),
        ("shard-0", 19),
        ("shard-2", 0),
    ]
    assert all(len(cache.tokens(doc)) == cache.lengths(np.array([doc]))[0] for doc in range(15))


def test_lengths_ends_and_places_agree_with_the_rows(cache: TokenCache) -> None:
    docs = np.arange(cache.num_docs)
    rows = [
        row
        for shard, info in enumerate(cache.shards)
        for row in cache.read(shard, 0, info.num_rows).to_pylist()
    ]
    assert cache.num_docs == len(rows) == 56
    assert cache.lengths(docs).dtype == np.int32
    assert cache.lengths(docs).tolist() == [len(row["input_ids"]) for row in rows]
    assert cache.has_eos(docs).tolist() == [row["input_ids"][-1] == 0 for row in rows]
    assert cache.has_eos(docs)[-1]
    assert cache.total_tokens == cache.lengths(docs).sum()
    assert [cache.tokens(doc).tolist() for doc in docs] == [row["input_ids"] for row in rows]
    assert [cache.where(int(doc))[1] for doc in docs] == [row["__row_number__"] for row in rows]
    assert cache.where(30) == ("shard-2", 1)
    shuffled = np.random.default_rng(0).permutation(docs)
    assert cache.lengths(shuffled).tolist() == cache.lengths(docs)[shuffled].tolist()
    assert cache.has_eos(shuffled).tolist() == cache.has_eos(docs)[shuffled].tolist()
    assert cache.lengths(docs[:0]).shape == (0,)


def test_buffers_point_at_the_tokens(cache: TokenCache) -> None:
    b = cache.buffers()
    assert b.id_bytes == 2
    assert (np.diff(b.first_doc) > 0).all()
    with cache.pin(np.arange(cache.num_docs)):
        _assert_tokens_at(cache, b)
    assert len(mapping._open) <= 2


def _assert_tokens_at(cache: TokenCache, b: Buffers) -> None:
    assert b.mask_address.tolist() == [0] * len(b.ids_address)
    for part, first in enumerate(b.first_doc[:-1]):
        count = int(cache.lengths(np.array([first]))[0])
        at = (ctypes.c_uint16 * count).from_address(int(b.ids_address[part]))
        assert list(at) == cache.tokens(int(first)).tolist()
        assert ctypes.c_int64.from_address(int(b.offsets_address[part])).value == 0


@pytest.mark.parametrize("doc", [-1, 56])
def test_documents_that_do_not_exist(cache: TokenCache, doc: int) -> None:
    for ask in (
        lambda: cache.lengths(np.array([0, doc])),
        lambda: cache.has_eos(np.array([doc])),
        lambda: cache.tokens(doc),
    ):
        with pytest.raises(IndexError, match="of 56"):
            ask()


def test_open_files_do_not_grow_with_parts(cache: TokenCache) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    more = [TokenCache(cache.path) for _ in range(5)]
    assert before == 0 or len(os.listdir("/proc/self/fd")) == before + len(more), (
        "one lock each, nothing for its parts"
    )
    assert {other.fingerprint for other in more} == {cache.fingerprint}


def test_a_cache_trains_without_its_sources_and_elsewhere(
    cache: TokenCache, tmp_path: Path
) -> None:
    before, moved = (
        cache.lengths(np.arange(56)).tolist(),
        tmp_path.parent / f"{tmp_path.name}-moved",
    )
    tmp_path.rename(moved)
    again = TokenCache(moved / "manifests" / cache.path.name, dataset="renamed")
    again.verify()
    assert again.lengths(np.arange(56)).tolist() == before
    assert again.ledger.find("tokenize", "renamed", "rows").out["null"] == 1


def mapped_parts(cache: TokenCache) -> list[int]:
    """Which token files of a cache stand in the memory of this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    there = {line.partition("/")[2] for line in lines}
    return [i for i, name in enumerate(cache._names) if name.lstrip("/") in there]


needs_maps = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="needs /proc to see what is mapped"
)


@needs_maps
def test_of_files_that_come_and_go_those_stay_that_were_read_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "most_maps", lambda: 8)  # two files at once
    cache = prepare(ShardedTexts(texts(60)), small_tokenizer(), dataset="d", cache_dir=tmp_path)
    files = cache._files
    for i in (0, 1, 0, 2):
        with files.hold(np.array([i])):
            assert i in mapped_parts(cache)
            assert len(mapped_parts(cache)) <= 2
    assert mapped_parts(cache) == [0, 2]
    with files.hold(np.array([2, 3, 4])):
        assert mapped_parts(cache) == [2, 3, 4]
        for _ in range(2):  # what is held twice is held until both end
            with files.hold(np.array([1, 3])):
                assert mapped_parts(cache) == [1, 2, 3, 4]
            assert mapped_parts(cache) == [2, 3, 4]
    assert len(mapped_parts(cache)) == 2
    kept = cache.tokens(0).tolist()
    names = list(cache._names)
    del cache, files
    gc.collect()
    assert kept
    assert not any(name in Path("/proc/self/maps").read_text(encoding="utf-8") for name in names)


@needs_maps
def test_caches_that_were_closed_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = mapping._standing + 3
    monkeypatch.setattr(mapping, "most_maps", lambda: 2 * room)
    paths = [
        prepare(ShardedTexts(texts(30)), small_tokenizer(), dataset=name, cache_dir=tmp_path).path
        for name in "ab"
    ]
    gc.collect()
    first = TokenCache(paths[0])
    assert [first.comes_and_goes, TokenCache(paths[1]).comes_and_goes] == [False, True]
    del first
    gc.collect()
    assert not TokenCache(paths[1]).comes_and_goes


def test_a_lock_that_was_closed_is_free_while_its_object_lives(tmp_path: Path) -> None:
    path = locks.work_lock(tmp_path)
    held = locks.hold(path, exclusive=True, what="a test")
    assert locks.try_hold(path, exclusive=True) is None
    held.close()
    again = locks.try_hold(path, exclusive=True)
    assert again is not None
    with again:
        assert locks.try_hold(path, exclusive=True) is None
    assert locks.try_hold(path, exclusive=True) is not None
    del held, again  # which lived until now


def test_many_may_read_a_cache_and_nobody_clears_it_before_the_last_has_ended(
    cache: TokenCache, tmp_path: Path
) -> None:
    began = time.monotonic()
    readers = [TokenCache(cache.path) for _ in range(2)]
    assert time.monotonic() - began < 30
    lock = locks.reader_lock(tmp_path, Path(cache.path).stem)
    while readers:
        readers.pop()
        gc.collect()
        assert locks.try_hold(lock, exclusive=True) is None


def edit(path: Path, **values: object) -> None:
    commit_checked(path, read_checked(path) | values)


def test_other_formats_and_foreign_files_are_refused(cache: TokenCache, tmp_path: Path) -> None:
    edit(cache.path, format=99)
    with pytest.raises(
        CacheError,
        match=r"token cache format 99, this version of easypipe reads format 1\. Prepare the "
        r"dataset again",
    ):
        TokenCache(cache.path)
    commit_checked(tmp_path / "x.json", {"format": 1})
    with pytest.raises(CacheError, match="not a token cache manifest"):
        TokenCache(tmp_path / "x.json")
    with pytest.raises(MissingFileError):
        TokenCache(tmp_path / "none.json")


def test_damage_is_found(cache: TokenCache, tmp_path: Path) -> None:
    victim = tmp_path / "tokens" / cache.manifest.parts[0].file
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        CacheError, match=r"damaged: checksum .* Delete the file and prepare the dataset again"
    ):
        cache.verify()
    for other in (data[:-8], data + b"x"):
        victim.write_bytes(other)
        with pytest.raises(
            CacheError,
            match=rf"{len(other)} bytes, committed with {len(data)}\. Prepare the dataset again",
        ):
            TokenCache(cache.path)
    victim.write_bytes(b"x" * len(data))
    with pytest.raises(CacheError, match="cannot be read"):
        TokenCache(cache.path)
    victim.unlink()
    with pytest.raises(CacheError, match="missing from the token cache"):
        TokenCache(cache.path)


@pytest.mark.parametrize(
    ("next_docs", "message"),
    [
        (0, r"its parts hold \d+ documents of .*, its counts say \d+"),
        (-1, r"holds \d+ rows of \['input_ids'.*, not \d+"),
    ],
)
def test_a_token_file_with_another_number_of_documents_is_refused(
    cache: TokenCache, next_docs: int, message: str
) -> None:
    """Bytes and checksum are right, the manifest says another number of documents, of one file or
    in such a way that the sum is right: every document behind it would be another.
    """
    first, second, *others = read_checked(cache.path)["parts"]
    first |= {"docs": first["docs"] + 1}
    second |= {"docs": second["docs"] + next_docs}
    edit(cache.path, parts=[first, second, *others])
    with pytest.raises(CacheError, match=message):
        TokenCache(cache.path).tokens(0)


def test_every_count_is_told_and_summed() -> None:
    nothing = Counts()
    assert not any(vars(nothing).values())
    for field in dataclasses.fields(Counts):
        value = {"x": 3} if "Mapping" in str(field.type) else 3
        some = dataclasses.replace(nothing, **{field.name: value})
        assert some.ledger("d", {}).entries != nothing.ledger("d", {}).entries, field.name
        twice = {"x": 6} if isinstance(value, dict) else 6
        assert getattr(total([some, nothing, some]), field.name) == twice
    assert {one.unit for one in nothing.ledger("d", {}).entries} == {"rows", "tokens"}
