"""The loader over a real token cache: text, tokenizer, mapped files, plan, batches."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from easypipe.cache import mapping
from easypipe.cache.reader import TokenCache
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.transforms.tokenizer.bpe import train_bpe
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from laws import assert_exact_resume, assert_labels, assert_rows_well_formed, assert_same_batches
from loader_support import plan_rows
from token_support import ShardedTexts, prepare

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "some",
    "more",
    "of",
    "it",
    "follows",
]
TEXTS = [
    " ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(1 + i % 60)) for i in range(300)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    path = train_bpe(
        TEXTS,
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        path=tmp_path_factory.mktemp("tokenizer"),
    )
    return load_tokenizer(str(path))


@pytest.fixture(scope="module")
def caches(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[TokenCache]:
    folder = tmp_path_factory.mktemp("cache")
    parts = {"code": TEXTS[:200], "docs": TEXTS[200:]}
    return [
        prepare(
            InMemoryShardedSource([{"text": t} for t in texts]),
            tokenizer,
            dataset=name,
            cache_dir=Path(folder),
        )
        for name, texts in parts.items()
    ]


def make(caches, tokenizer, **load) -> Loader:
    rows = plan_rows(
        caches,
        seq_length=96,
        strategy="first_fit",
        weights=[0.7, 0.3],
        window=64,
        eos=tokenizer.eos_token_id,
    )
    return Loader(rows, LoadStageConfig(batch_size=4, **load))


def test_batches_are_the_documents_of_the_cache(caches, tokenizer):
    loader = make(caches, tokenizer, drop_last=False)
    eos = tokenizer.eos_token_id
    documents = sorted([*tokenizer.reference_encode(text), eos] for text in TEXTS)
    seen = []
    for batch in loader:
        assert_rows_well_formed(batch)
        assert_labels(batch)
        for ids, segments in zip(batch[INPUT_IDS], batch[SEGMENT_IDS], strict=True):
            seen += [ids[segments == s].tolist() for s in range(1, segments.max() + 1)]
    whole = [piece for piece in seen if piece[-1] == eos and len(piece) < 96]
    assert sum(map(len, seen)) == sum(map(len, documents))
    assert len(whole) > 100
    assert sorted(d for d in documents if len(d) <= 96) == sorted(
        d for d in seen if d[-1] == eos and d in documents
    )


def test_laws_over_a_real_cache(caches, tokenizer):
    assert_same_batches(
        make(caches, tokenizer), make(caches, tokenizer, prefetch_enabled=False, mesh={"data": 1})
    )
    assert_exact_resume(lambda: make(caches, tokenizer), len(make(caches, tokenizer)), hops=[1, 2])


@pytest.mark.parametrize("strategy", ["first_fit", "stream"])
def test_more_files_than_a_process_may_map(tokenizer, tmp_path, monkeypatch, strategy):
    split = [TEXTS[i : i + 30] for i in range(0, len(TEXTS), 30)]
    caches = [
        prepare(ShardedTexts(*some), tokenizer, dataset=name, cache_dir=tmp_path)
        for name, some in (("a", split[:7]), ("b", split[7:]))
    ]
    rows = {
        "strategy": strategy,
        "weights": [0.7, 0.3],
        "window": 64,
        "eos": tokenizer.eos_token_id,
    }
    wanted = list(Loader(plan_rows(caches, **rows), LoadStageConfig(batch_size=4)))
    monkeypatch.setattr(mapping, "most_maps", lambda: 16)
    several = [TokenCache(cache.path) for cache in caches]
    assert [cache.comes_and_goes for cache in several] == [True, True]

    def loader() -> Loader:
        return Loader(plan_rows(several, **rows), LoadStageConfig(batch_size=4, prefetch_workers=3))

    assert_same_batches(wanted, loader())
    assert_exact_resume(loader, len(wanted), hops=[3])
    assert 0 < len(mapping._open) <= 4
    assert [one.count_without_eos() for one in several] == [
        one.count_without_eos() for one in caches
    ]
    several.clear()
    gc.collect()
    assert not mapping._open
