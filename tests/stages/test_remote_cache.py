"""Token caches in buckets: byte-equal batches however they are read, commits that others go on
from, no more staged than allowed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forked
from easypipe import (
    CacheError,
    ConfigError,
    DatasetConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    StorageError,
)
from easypipe.cache.blocks import BLOCK
from easypipe.cache.config import CacheConfig
from easypipe.cache.folder import RemoteFolder
from easypipe.cache.location import cache_folder
from easypipe.cache.manifest import manifest_json
from easypipe.cache.reader import TokenCache
from easypipe.cache.remote import STRETCH
from easypipe.cache.writer import CacheWriter
from easypipe.core import remote, storage
from easypipe.core.protocols import TokenInfo
from easypipe.core.schema import INPUT_IDS, LOSS_MASK
from easypipe.loader.rows.documents import gather_documents
from easypipe.pipeline import _Remade
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.stages.tokenize.imported import TokenEncoder
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from laws import assert_same_batches, assert_stateless_reads
from pipelines import config, tokenizer
from stores import SECRET, Store, faulty
from strategies import examples
from token_support import CountingTokenizer, WithIdentity, pending, prepare, prepare_part, texts

TESTS = Path(__file__).resolve().parents[1]
READINGS = ("shards", "ranges")


def remote_folder(store: Store, url: str, tmp_path: Path, **options: Any) -> RemoteFolder:
    """url: of the cache; tmp_path: stands for a machine."""
    return RemoteFolder(url, tmp_path / "local", options=store.options, **options)


def source() -> WithIdentity:
    return WithIdentity(*(texts(60, seed=seed) for seed in range(3)))


def batches(tmp_path: Path, **options: Any) -> list[dict[str, np.ndarray]]:
    made = config(tmp_path, **options)
    mix = MixStageConfig(weights={"code": 0.6, "docs": 0.4}, stop_strategy="all_exhausted")
    loader = (
        Pipeline(made)
        .source()
        .tokenize()
        .mix(mix)
        .pack(PackStageConfig(seq_length=64))
        .load({"batch_size": 4})
    )
    return [
        {name: np.asarray(column) for name, column in batch.items()} for batch in loader.build()
    ]


@pytest.mark.parametrize("reading", READINGS)
def test_batches_are_those_of_a_local_cache(tmp_path: Path, store: Store, reading: str) -> None:
    here = batches(tmp_path)
    url = f"{store.new()}/cache"
    cache = CacheConfig(
        reading=reading, storage_options=store.options, staging_dir=tmp_path / "staging"
    )
    made = {"cache_dir": url, "cache": cache}
    first = batches(tmp_path, **made)
    assert assert_same_batches(here, first) > 3
    files = store.files(url)
    assert {name.partition("/")[0] for name in files} == {
        "configs",
        "manifests",
        "ranges",
        "tokens",
    }
    assert not any(SECRET.encode() in data for data in files.values())
    assert not any((tmp_path / "staging").iterdir()), (
        "what is staged goes with the process, whatever ends it"
    )
    assert_same_batches(here, batches(tmp_path, **made))


long_texts = [" ".join(f"{i} {j}" for j in range(50 + 700 * (i % 7))) for i in range(60)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenCache, str]:
    """The same documents of up to 6,000 tokens in a local cache, and the URL of one in a bucket."""
    here, tok = tmp_path_factory.mktemp("two"), load_tokenizer(tokenizer())
    many = WithIdentity(long_texts, long_texts[::-1])
    folder = RemoteFolder("memory://caches/two", here / "beside")
    prepare(many, tok, dataset="d", cache_dir=folder)
    local = prepare(many, tok, dataset="d", cache_dir=here / "local")
    return local, str(folder.manifest(local.path.stem))  # type: ignore[union-attr]


def opened(url: str, tmp_path: Path, **options: Any) -> TokenCache:
    return TokenCache(
        url, folder=RemoteFolder(url.rpartition("/manifests/")[0], tmp_path, **options)
    )


@given(
    data=st.data(),
    reading=st.sampled_from(READINGS),
    room=st.sampled_from([1, 3 * BLOCK, 20 * BLOCK, 1 << 30]),
)
@examples(40)
def test_whatever_is_read_in_whatever_order(
    two: tuple[TokenCache, str], tmp_path_factory: Any, data: Any, reading: str, room: int
) -> None:
    local, url = two
    cache = opened(url, tmp_path_factory.mktemp("read"), reading=reading, staging_bytes=room)
    assert cache.fingerprint == local.fingerprint
    everything = np.arange(local.num_docs)
    np.testing.assert_array_equal(cache.lengths(everything), local.lengths(everything))
    np.testing.assert_array_equal(cache.has_eos(everything), local.has_eos(everything))
    for docs in data.draw(
        st.lists(st.lists(st.integers(0, local.num_docs - 1), max_size=9), max_size=6)
    ):
        asked = np.array(docs, np.int64)
        mine = gather_documents([cache], np.zeros(asked.size, np.int32), asked, with_mask=False)
        theirs = gather_documents([local], np.zeros(asked.size, np.int32), asked, with_mask=False)
        np.testing.assert_array_equal(mine.ids, theirs.ids)
    doc = data.draw(st.integers(0, local.num_docs - 1))
    np.testing.assert_array_equal(cache.tokens(doc), local.tokens(doc))
    start = data.draw(st.integers(0, 60))
    stop = data.draw(st.integers(start, 60))
    assert cache.read(1, start, stop).equals(local.read(1, start, stop))
    cache.verify()
    assert isinstance(cache.folder, RemoteFolder)
    assert cache.folder.staging.used <= max(room, 0), "what nobody holds stays within staging_bytes"


@pytest.mark.parametrize("reading", READINGS)
def test_the_law_of_sources(two: tuple[TokenCache, str], tmp_path: Path, reading: str) -> None:
    assert_stateless_reads(
        opened(two[1], tmp_path, reading=reading, staging_bytes=4 * BLOCK), [1, 10, 17, 59]
    )


def test_staged_bytes_are_given_back_to_the_disk(
    two: tuple[TokenCache, str], tmp_path: Path
) -> None:
    local, url = two
    cache = opened(url, tmp_path, reading="shards", staging_bytes=1, staging_dir=tmp_path)
    staging = cache.folder.staging  # type: ignore[union-attr]
    index = os.fstat(staging._file.fileno()).st_blocks * 512
    most = 0
    for doc in range(local.num_docs):
        with cache.pin(np.array([doc])):
            most = max(most, os.fstat(staging._file.fileno()).st_blocks * 512)
    whole = sum(part.num_bytes for part in local.manifest.parts)
    assert staging.fetched_bytes > whole, "each part came again and again"
    assert most < index + 2 * max(
        part.num_bytes for part in local.manifest.parts
    ) + 8 * BLOCK * len(local.manifest.parts)
    assert os.fstat(staging._file.fileno()).st_blocks * 512 < whole / 2


def test_a_folder_whose_room_cannot_be_given_back_is_named(
    two: tuple[TokenCache, str], tmp_path: Path
) -> None:
    staging = opened(two[1], tmp_path, reading="shards", staging_dir=tmp_path).folder.staging
    assert staging is not None
    file = staging._file
    with (
        open(file.fileno(), "rb", closefd=False) as same,
        open(f"/proc/self/fd/{same.fileno()}", "rb") as closed,
    ):
        staging._file = closed  # as of a file system that has no holes, it answers with an error
        with pytest.raises(StorageError, match=r"staging_dir: .*Choose a folder on a local disk\."):
            staging.punch(0, BLOCK)
    staging._file = file
    staging.punch(0, BLOCK)


def test_a_full_disk_is_named(two: tuple[TokenCache, str], tmp_path: Path) -> None:
    cache = opened(two[1], tmp_path, staging_dir=tmp_path)
    staging = cache.folder.staging
    assert staging is not None
    file = staging._file
    with open("/dev/full", "wb", buffering=0) as full:
        staging._file = full  # as of a full disk, it has no space
        told = rf"^{tmp_path}: cannot be written: .*No space left.* or set cache.staging_dir\."
        with pytest.raises(StorageError, match=told):
            cache.tokens(0)
        with pytest.raises(StorageError, match=rf"^{tmp_path}: cannot be written: "):
            staging.reserve(2 * STRETCH)
    staging._file = file
    np.testing.assert_array_equal(cache.tokens(0), two[0].tokens(0))


def test_reading_ranges_fetches_less_than_shards(
    two: tuple[TokenCache, str], tmp_path: Path
) -> None:
    _, url = two
    fetched = {}
    for reading in READINGS:
        cache = opened(url, tmp_path, reading=reading)
        before = cache.folder.staging.fetched_bytes  # type: ignore[union-attr]
        cache.tokens(13)
        fetched[reading] = cache.folder.staging.fetched_bytes - before  # type: ignore[union-attr]
    assert 0 < fetched["ranges"] < fetched["shards"] / 2


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a cache of three token files, each with one document of several blocks."""
    here = tmp_path_factory.mktemp("long")
    folder = RemoteFolder("memory://caches/long", here)
    rows = [[" ".join(map(str, range(start, 60_000)))] for start in range(3)]
    prepare(WithIdentity(*rows), load_tokenizer(tokenizer()), dataset="d", cache_dir=folder)
    (manifest,) = storage.names_in(folder.at("manifests"), None)
    return f"{folder.at('manifests')}/{manifest}"


def test_neighbouring_blocks_come_with_one_request(
    long: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(long, tmp_path, reading="ranges")
    asked: list[int] = []
    read = storage.read_range

    def counted(url: str, start: int, stop: int, options: Any) -> bytes:
        asked.append(stop - start)
        return read(url, start, stop, options)

    monkeypatch.setattr(storage, "read_range", counted)
    assert cache.tokens(1).size > BLOCK
    assert len(asked) == 1
    assert asked[0] > 2 * BLOCK


@pytest.mark.parametrize("column", [INPUT_IDS, LOSS_MASK])
def test_a_document_that_ends_with_the_first_byte_of_a_block_is_whole(
    tmp_path: Path, column: str
) -> None:
    folder = RemoteFolder(f"memory://caches/{tmp_path.name}", tmp_path, reading="ranges")
    tokens = TokenInfo(
        tokenizer="own",
        tokenizer_fingerprint="own",
        vocab_size=9,
        eos_token_id=None,
        pad_token_id=None,
        seq_length=None,
    )

    def made(lengths: list[int]) -> tuple[TokenCache, int, pa.Table]:
        """The cache, the token whose value begins the second block of values, and the rows."""
        ids = [[1 + i % 7] * length for i, length in enumerate(lengths)]
        rows = pa.table({INPUT_IDS: ids, LOSS_MASK: [[1] * length for length in lengths]})
        source = InMemoryShardedSource(rows)
        encoder = TokenEncoder(source, tokens)
        cache = CacheWriter(source=source, encoder=encoder, dataset="d", folder=folder).fill()
        data = folder.content(cache.manifest.parts[0].file)
        values = pa.ipc.open_file(data).get_batch(0).column(column).values
        first, width = values.buffers()[1].address - data.address, values.type.bit_width // 8
        return cache, (-first % BLOCK + BLOCK) // width, rows

    _, border, _ = made([1000] * 300)
    doc, more = divmod(border + 1, 1000)
    cache, again, rows = made([1000] * doc + [more, 2000 - more] + [1000] * (298 - doc))
    assert again == border
    alone = opened(str(cache.path), tmp_path, reading="ranges").read(0, doc, doc + 1)
    assert alone.column(column).to_pylist() == rows.column(column)[doc : doc + 1].to_pylist()


@pytest.mark.parametrize("reading", READINGS)
def test_what_was_not_read_for_longest_goes_first(long: str, tmp_path: Path, reading: str) -> None:
    size = opened(long, tmp_path).manifest.parts[0].num_bytes
    cache = opened(long, tmp_path, reading=reading, staging_bytes=(2 * size // BLOCK + 2) * BLOCK)
    staging = cache.folder.staging  # type: ignore[union-attr]
    for doc in (0, 1, 0, 2):
        cache.tokens(doc)
    before = staging.fetched_bytes
    cache.tokens(0)
    assert staging.fetched_bytes == before, "it was read after document 1"
    cache.tokens(1)
    assert staging.fetched_bytes > before


def test_staging_dir_is_where_fetched_tokens_are(
    two: tuple[TokenCache, str], tmp_path: Path
) -> None:
    cache = opened(two[1], tmp_path, staging_dir=tmp_path / "fast" / "disk")
    file = cache.folder.staging._file.fileno()  # type: ignore[union-attr]
    assert os.readlink(f"/proc/self/fd/{file}").startswith(str(tmp_path / "fast"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file: cannot be written: .*set cache.staging_dir"):
        opened(two[1], tmp_path, staging_dir=tmp_path / "file")


def test_a_batch_that_needs_more_room_is_named(
    two: tuple[TokenCache, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = opened(two[1], tmp_path, staging_bytes=1)
    cache.tokens(0)
    assert "cache.staging_bytes=1: the batches under way need" in caplog.text


@pytest.mark.parametrize("reading", READINGS)
def test_tokens_that_did_not_come_take_no_room(
    two: tuple[TokenCache, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    local, url = two
    cache = opened(url, tmp_path, reading=reading, staging_bytes=1 << 30)
    staging = cache.folder.staging  # type: ignore[union-attr]

    def fails(*_: object) -> bytes:
        raise StorageError(at="the bucket", problem="is gone")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_range", fails)
        for _ in range(3):
            with pytest.raises(StorageError, match="is gone"):
                cache.tokens(6)
    assert staging.used == 0
    np.testing.assert_array_equal(cache.tokens(6), local.tokens(6))
    assert staging.used > 0


def test_threads_share_what_is_staged(two: tuple[TokenCache, str], tmp_path: Path) -> None:
    local, url = two
    cache = opened(url, tmp_path, reading="ranges", staging_bytes=4 * BLOCK)
    wrong: list[int] = []

    def work(salt: int) -> None:
        docs = np.random.default_rng(salt).permutation(local.num_docs).tolist()
        wrong.extend(
            doc for doc in docs if not np.array_equal(cache.tokens(doc), local.tokens(doc))
        )

    threads = [threading.Thread(target=work, args=(salt,)) for salt in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_damage_is_noticed(tmp_path: Path, store: Store) -> None:
    folder = remote_folder(store, store.new(), tmp_path)
    tok = load_tokenizer(tokenizer())
    prepare(source(), tok, dataset="d", cache_dir=folder)
    cache = prepare(source(), tok, dataset="d", cache_dir=folder)
    part = cache.manifest.parts[0]
    url = folder.tokens(part.file)
    whole = storage.read_bytes(url, store.options)
    at = cache._files.parts[0].starts[0]  # type: ignore[union-attr]
    storage.commit_bytes(url, whole[:at] + b"\xff" + whole[at + 1 :], store.options)
    with pytest.raises(
        CacheError,
        match=rf"{url}: damaged: bytes 0 to {len(whole)} are not those that were committed",
    ):
        prepare(source(), tok, dataset="d", cache_dir=folder).tokens(0)
    with pytest.raises(CacheError, match=rf"{url}: damaged"):
        cache.verify()
    storage.commit_bytes(url, whole[: len(whole) // 2], store.options)
    began = time.monotonic()
    prepare(source(), tok, dataset="d", cache_dir=folder).verify()
    assert time.monotonic() - began < 20, "a file that was cut is no passing failure"
    storage.remove(url, store.options)
    counted = CountingTokenizer(tok)
    again = prepare(source(), tok, dataset="d", cache_dir=folder)
    assert counted.texts == 10, "one range is made again"
    assert storage.read_bytes(url, store.options) == whole
    again.verify()


@pytest.mark.parametrize("reading", READINGS)
def test_no_changed_byte_reaches_a_batch(
    two: tuple[TokenCache, str], tmp_path: Path, reading: str
) -> None:
    """Wherever it is: tokens, lengths, EOS flags, row numbers, Arrow's own words."""
    local, url = two
    victim = local.manifest.parts[0]
    path = f"memory://caches/two/tokens/{victim.file}"
    whole = storage.read_bytes(path)
    docs = np.arange(local.num_docs)

    def read_all() -> None:
        cache = opened(url, tmp_path, reading=reading)
        for doc in docs:
            np.testing.assert_array_equal(cache.tokens(int(doc)), local.tokens(int(doc)))

    found = []
    try:
        for at in (
            9,
            700,
            70_000,
            *range(50_000, len(whole), len(whole) // 7),
            len(whole) - 2100,
            len(whole) - 20,
        ):
            storage.commit_bytes(path, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(
                CacheError, match=r"damaged: .*(committed as|are not those that were committed)"
            ) as refused:
                read_all()
            assert victim.file in str(refused.value)
            found.append(at)
    finally:
        storage.commit_bytes(path, whole)
    assert len(found) > 9
    read_all()


def test_another_machine_goes_on(tmp_path: Path, store: Store) -> None:
    """Killed after any commit; a machine with nothing but the bucket finishes, and tokenizes only
    what is missing.
    """
    tok, url = load_tokenizer(tokenizer()), store.new()
    # the proof of the tokenizer is no business of this test
    prepare(source(), tok, dataset="d", cache_dir=tmp_path / "here")
    for stop in (2, 5, 9):
        commits = 0

        def hook(step: str, path: str, stop: int = stop) -> None:
            nonlocal commits
            commits += step == "committed" and path.startswith(url)
            if commits > stop:
                raise KeyboardInterrupt

        storage.set_fault_hook(hook)
        with pytest.raises(KeyboardInterrupt):
            prepare(
                source(),
                tok,
                dataset="d",
                cache_dir=remote_folder(store, url, tmp_path / f"machine{stop}"),
                num_workers=1,
            )
        storage.set_fault_hook(None)
        assert not [name for name in store.files(url) if name.startswith("manifests/")], (
            "nothing is promised before everything is there"
        )
    folder = remote_folder(store, url, tmp_path / "last")
    missing, total = pending(source(), tok, dataset="d", cache_dir=folder)
    assert 0 < len(missing) < total
    assert prepare_part(source(), tok, part=missing[:1], dataset="d", cache_dir=folder) == 10
    counted = CountingTokenizer(tok)
    cache = prepare(source(), tok, dataset="d", cache_dir=folder)
    assert counted.texts <= 10 * (len(missing) - 1)
    assert (
        cache.fingerprint
        == prepare(source(), tok, dataset="d", cache_dir=tmp_path / "here").fingerprint
    )
    assert store.files(url).keys() == {name for name in store.files(url) if ".tmp-" not in name}


def test_processes_prepare_the_same_at_once(tmp_path: Path, gs: Store) -> None:
    """Machines (each with a folder of its own, so that no lock tells them of the others) fill one
    empty bucket.
    """
    url = gs.new()
    arguments = [tokenizer(), url, json.dumps(gs.options)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    running = [
        forked.Popen(
            [sys.executable, str(TESTS / "stages" / "remote_cache_user.py"), *arguments, str(tmp_path / f"m{i}")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for i in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], ended
    assert len({out for out, _ in ended}) == 1
    assert len([name for name in gs.files(url) if name.startswith("manifests/")]) == 1
    TokenCache(
        json.loads(ended[0][0])["manifest"], folder=remote_folder(gs, url, tmp_path)
    ).verify()


def test_the_first_manifest_wins(tmp_path: Path, store: Store) -> None:
    """Its measured facts are the first writer's; one that is damaged, or tells of other tokens, is
    replaced.
    """
    url, tok = store.new(), load_tokenizer(tokenizer())
    folder = remote_folder(store, url, tmp_path)
    cache = prepare(source(), tok, dataset="first", cache_dir=folder)
    path = str(cache.path)
    before = storage.read_bytes(path, store.options)
    folder.commit_manifest(dataclasses.replace(cache.manifest, facts={"seconds": 1e9}))
    assert storage.read_bytes(path, store.options) == before
    other = dataclasses.replace(cache.manifest, parts=cache.manifest.parts[:-1])
    for found in (b"{", manifest_json(other)):
        storage.commit_bytes(path, found, store.options)
        folder.commit_manifest(cache.manifest)
        assert storage.read_bytes(path, store.options) == before


def test_a_store_that_fails_in_passing(tmp_path: Path, store: Store) -> None:
    remote.set_retry_policy(
        remote.RetryPolicy(attempts=4, first_wait_s=0.01, attempt_timeout_s=20, deadline_s=60)
    )
    try:
        with faulty(store) as (behind, proxy):
            proxy.faults.extend([503, None, "reset", None, None, "lost"])
            folder = remote_folder(behind, store.new(), tmp_path)
            prepare(source(), load_tokenizer(tokenizer()), dataset="d", cache_dir=folder).verify()
    finally:
        remote.set_retry_policy(None)


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^staging_bytes: 0 is too few bytes"):
        CacheConfig(staging_bytes=0)
    with pytest.raises(ConfigError, match=r"^reading: "):
        CacheConfig(reading="whole")  # type: ignore[arg-type]
    options = CacheConfig(storage_options={"secret": SECRET})
    assert SECRET not in repr(options)
    here = {
        "datasets": (DatasetConfig(name="d", data_files="x.jsonl"),),
        "seed": 1,
        "cache_dir": tmp_path,
    }
    with pytest.raises(
        ConfigError, match=r"^cache: has no effect: no token cache is at a URL. Leave it out"
    ) as caught:
        Pipeline(PipelineConfig(**here, cache=options))
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^cache: has no effect: streaming keeps no tokens"):
        Pipeline(
            PipelineConfig(
                **here | {"cache_dir": "memory://caches/a"}, streaming=True, cache=options
            )
        )
    with pytest.raises(StorageError, match=r"nothing://"):
        cache_folder("nothing://bucket/cache")


def test_workers_of_a_cluster_get_the_url(tmp_path: Path) -> None:
    made = config(
        tmp_path,
        cache_dir="memory://caches/ray",
        executor="ray",
        cache=CacheConfig(reading="ranges"),
    )
    pipeline = Pipeline(made).source().tokenize()
    remade = _Remade.of(pipeline.get_context(), [step.stage for step in pipeline._plan])
    assert (remade.config.cache_dir, remade.config.cache) == ("memory://caches/ray", made.cache)
    assert {source.folder.at() for source in remade().values()} == {"memory://caches/ray"}


def test_a_dataset_keeps_its_tokens_in_a_bucket_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    dataset = DatasetConfig(
        name="d", data_files=str(tmp_path / "a.jsonl"), cache_path="memory://caches/own"
    )
    made = PipelineConfig(
        datasets=(dataset,),
        seed=1,
        cache_dir=tmp_path / "cache",
        cache=CacheConfig(reading="ranges"),
        default_tokenizer=tokenizer(),
    )
    source: Any = Pipeline(made).source().tokenize().get_data()["d"]
    cache = source.materialize()
    assert (cache.num_docs, cache.folder.reading) == (2, "ranges")
    assert storage.names_in("memory://caches/own") == ["configs", "manifests", "ranges", "tokens"]
    assert not (tmp_path / "cache" / "tokens").exists()
