"""A changed byte of a token file, wherever it is, is an error that names the file before a token of
its block is handed out.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import pipelines
from easypipe import Pipeline
from easypipe.cache import mapping
from easypipe.cache.blocks import AHEAD, BLOCK, INDEX, note_documents, note_values
from easypipe.cache.reader import Buffers, TokenCache
from easypipe.core.errors import CacheError
from easypipe.loader.rows.documents import gather_documents
from easypipe.loader.rows.planned import PlannedRows
from easypipe.plan.pack import PackSpec
from easypipe.plan.windows import Plan, PlanDataset, PlanSpec
from easypipe.sources.external.memory import InMemoryShardedSource
from token_support import prepare, small_tokenizer

DOCS = 240
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of a cache of one part with several blocks."""
    texts = [" ".join(WORDS[(i * j) % 8] for j in range(1 + i * 37 % 2400)) for i in range(DOCS)]
    source = InMemoryShardedSource(pa.table({"text": pa.array(texts, pa.large_string())}))
    cache = prepare(
        source,
        small_tokenizer(),
        dataset="d",
        cache_dir=tmp_path_factory.mktemp("cache"),
        batch_size=DOCS,
    )
    assert isinstance(cache.path, Path)
    assert max(part.num_bytes for part in cache.manifest.parts) > 4 * BLOCK
    return cache.path


def copied(whole: Path, folder: Path) -> tuple[Path, Path]:
    """(manifest, its largest token file), to be damaged."""
    shutil.copytree(whole.parent.parent, folder / "cache")
    path = folder / "cache" / "manifests" / whole.name
    part = max(TokenCache(path).manifest.parts, key=lambda part: part.num_bytes)
    return path, folder / "cache" / "tokens" / part.file


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def batches(cache: TokenCache, strategy: str) -> list[dict[str, np.ndarray]]:
    pack = PackSpec(seq_length=256, strategy=strategy, oversize="split")  # type: ignore[arg-type]
    dataset = PlanDataset("d", cache.num_docs, cache.total_tokens, cache.fingerprint, cache.lengths)
    plan = Plan(
        [dataset], PlanSpec(seed=1, weights=(1,), stop="all_exhausted", window_docs=DOCS, pack=pack)
    )
    rows = PlannedRows(plan, [cache], eos_token_id=None, pad_token_id=0)
    return [rows.batch(np.array([r]), 256) for r in range(plan.num_rows or 0)]


READERS: dict[str, Callable[[TokenCache], object]] = {
    "packed rows": lambda cache: batches(cache, "greedy"),
    "a stream": lambda cache: batches(cache, "stream"),
    "documents": lambda cache: gather_documents(
        [cache], np.zeros(DOCS, np.int32), np.arange(DOCS), with_mask=False
    ),
    "tokens": lambda cache: [cache.tokens(doc) for doc in range(DOCS)],
    "read": lambda cache: cache.read(0, 0, DOCS),
}


@pytest.mark.parametrize("mapped", ["whole", "while read"])
@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_byte_anywhere_is_found_by_whoever_reads(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, mapped: str
) -> None:
    if mapped == "while read":
        monkeypatch.setattr(mapping, "may_map", lambda *_: False)
    path, file = copied(whole, tmp_path)
    size = file.stat().st_size
    READERS[reader](TokenCache(path))
    for at in [*range(100, size, BLOCK), size - 12, size - 1]:
        flip(file, at)
        with pytest.raises(CacheError, match=r"damaged|cannot be read|holds .* rows") as caught:
            READERS[reader](TokenCache(path))
        assert str(file) in str(caught.value)
        flip(file, at)


def test_a_block_is_checked_once_and_only_when_it_is_touched(whole: Path, tmp_path: Path) -> None:
    path, file = copied(whole, tmp_path)
    cache = TokenCache(path)
    assert cache.pending
    expected = [cache.tokens(doc).tolist() for doc in range(DOCS)]
    assert not cache.pending, "nothing is left to look at"

    cache = TokenCache(path)
    b = cache.buffers()
    middle = 3 * BLOCK + 5  # of the tokens, in the only part that is damaged
    flip(file, middle)
    part = int(np.argmax([p.num_bytes for p in cache.manifest.parts]))
    token = (middle - int(b.ids_address[part] - b.file_address[part])) // b.id_bytes
    ends = np.cumsum(cache.lengths(np.arange(DOCS)))
    hurt = int(np.searchsorted(ends, token, side="right"))
    for doc in range(hurt):
        assert cache.tokens(doc).tolist() == expected[doc], "its blocks are whole"
    for _ in range(2):
        with pytest.raises(
            CacheError,
            match=rf"{file}: damaged: bytes {3 * BLOCK} to {4 * BLOCK} .*easypipe verify CACHE "
            r"--repair",
        ):
            cache.tokens(hurt)
    flip(file, middle)
    assert cache.tokens(hurt).tolist() == expected[hurt]


def test_who_reads_on_has_the_blocks_behind_checked_too(whole: Path) -> None:
    part = max(TokenCache(whole).manifest.parts, key=lambda part: part.num_bytes)
    count = -(-part.num_bytes // BLOCK)

    def checked(*touched: int) -> list[int]:
        """Which blocks of tokens have their flags behind a touch of some."""
        cache = TokenCache(whole)
        b, number = cache.buffers(), cache.manifest.parts.index(part)
        address = ctypes.POINTER(ctypes.c_uint8 * (1 + count))
        flags = np.ctypeslib.as_array(ctypes.cast(int(b.checked_address[number]), address)[0])[1:]
        cache.check(number, {INDEX})
        index = set(np.flatnonzero(flags).tolist())
        for block in touched:
            cache.check(number, {block})
        return sorted(set(np.flatnonzero(flags).tolist()) - index)

    tokens = checked(1)  # block 0 begins with Arrow's words, and was checked with the index
    assert tokens[0] == 1
    assert tokens == list(range(1, 1 + len(tokens)))
    assert len(tokens) == min(1 + AHEAD, count - 1 - 1) > 3, "and no further"
    assert checked(3) == [3], "nobody reads on from block 2"
    assert checked(3, 2) == [2, 3]


def test_blocks_of_tokens_and_of_masks_are_noted_up_to_their_last_byte() -> None:
    file, flags, offsets = (
        np.zeros(5 * BLOCK, np.uint8),
        np.zeros(6, np.uint8),
        np.array([0, 7, 8 + BLOCK // 2]),
    )

    def address(array: np.ndarray) -> np.ndarray:
        return np.array([array.ctypes.data], np.uint64)

    buffers = Buffers(
        first_doc=np.array([0, 2]),
        ids_address=address(file),
        offsets_address=address(offsets),
        mask_address=address(file[3 * BLOCK - 8 :]),  # masks stand behind
        eos_address=np.zeros(1, np.uint64),
        file_address=address(file),
        checked_address=address(flags),
        id_bytes=2,
    )
    todo = np.zeros((2, 9), np.int64)

    def noted(doc: int) -> list[int]:
        count = note_documents(np.array([doc]), buffers, todo)
        return todo[1, :count].tolist()

    assert noted(0) == [INDEX]
    flags[0] = 1
    assert noted(0) == [0, 2]
    assert noted(1) == [0, 1, 2, 3]
    values = note_values(np.array([1]), buffers, address(file[BLOCK:]), 4, todo)
    assert todo[1, :values].tolist() == [1, 2, 3]
    flags[1 + 3] = 1
    assert noted(1) == [0, 1, 2]


def test_what_decides_that_a_piece_has_no_targets_is_checked_too(tmp_path: Path) -> None:
    """The first token of its document, which stands in another row and in another block."""
    answers = [" ".join(WORDS) * (BLOCK // 4)] * 2
    values = {
        "datasets": [
            {
                "name": "d",
                "data_files": [{"prompt": "the", "answer": answer} for answer in answers],
                "prompt_field": "prompt",
                "completion_field": "answer",
            }
        ],
        "pack": {"seq_length": 256, "oversize": "split"},
        "tokenize": {"default_tokenizer": pipelines.tokenizer()},
        "cache_dir": str(tmp_path),
        "seed": 1,
    }
    loader = Pipeline.from_config(values).source().tokenize().pack().load().build()
    rows = loader.rows
    assert isinstance(rows, PlannedRows)
    at = [rows.plan.locate(row).pieces for row in range(rows.num_rows or 0)]
    deep = next(
        row
        for row, pieces in enumerate(at)
        if (pieces.doc == 1).all() and pieces.start[0] > BLOCK + BLOCK // 2
    )
    wanted = rows.gather(np.array([deep]))
    assert not wanted["loss_mask"].any()
    [file] = (tmp_path / "tokens").rglob("*.arrow")
    data = pa.py_buffer(file.read_bytes())
    batch = pa.ipc.open_file(data).get_batch(0)
    masks = batch.column("loss_mask")
    first = masks.flatten().buffers()[1].address - data.address + int(masks.offsets[1].as_py())
    flip(file, first)
    again = Pipeline.from_config(values).source().tokenize().pack().load().build().rows
    with pytest.raises(CacheError, match="damaged"):
        again.gather(np.array([deep]))


def test_a_manifest_without_checksums_of_blocks_still_opens(whole: Path, tmp_path: Path) -> None:
    """That of an earlier version."""
    path, file = copied(whole, tmp_path)
    values = json.loads(path.read_text())
    for name in ("xxh3_128", "quarantine_checksum"):
        del values[name]
    for part in values["parts"]:
        del part["blocks"]
    path.write_text(json.dumps(values))
    old, new = TokenCache(path), TokenCache(whole)
    assert not old.pending
    for strategy in ("greedy", "stream"):
        for a, b in zip(batches(old, strategy), batches(new, strategy), strict=True):
            assert all((a[column] == b[column]).all() for column in a)
    # Arrow's own words are checked as a whole, before anything reads by them
    data = pa.py_buffer(file.read_bytes())
    offsets = pa.ipc.open_file(data).get_batch(0).column("input_ids").buffers()[1]
    flip(file, offsets.address - data.address + offsets.size - 4)
    with pytest.raises(CacheError, match=re.escape(str(file))):
        TokenCache(path).buffers()


def test_a_manifest_under_the_key_of_another_is_refused(whole: Path, tmp_path: Path) -> None:
    path, _ = copied(whole, tmp_path)
    with pytest.raises(CacheError, match=f"not a token cache manifest: it belongs to {path.stem}"):
        TokenCache(path.rename(path.with_name("another.json")))
