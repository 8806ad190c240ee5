"""What batches have beside each token, under the laws: numbers of datasets, verdicts on answers,
values of aligned columns. One line enters another kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easypipe import DatasetConfig, Pipeline
from easypipe.core.aligned import DESIRABLE, SOURCE_IDS
from laws import (
    assert_conserved,
    assert_exact_resume,
    assert_ranks,
    assert_same_batches,
    assert_same_documents,
)
from pipelines import config, jsonl, texts, two_datasets


def sources(folder: Path) -> tuple[DatasetConfig, ...]:
    return two_datasets(folder / "data", 40, 60)


def verdicts(folder: Path) -> tuple[DatasetConfig, ...]:
    rows = [
        {"prompt": text, "completion": f"yes {text}", "good": i % 3 > 0}
        for i, text in enumerate(texts(90, 3, 12))
    ]
    path = jsonl(folder / "data" / "judged.jsonl", rows)
    fields = {"prompt_field": "prompt", "completion_field": "completion", "desirable_field": "good"}
    return (DatasetConfig(name="judged", data_files=path, **fields),)


def aligned(folder: Path) -> tuple[DatasetConfig, ...]:
    sizes = np.random.default_rng(1).integers(1, 40, 90)
    ids = [((np.arange(a, b)) % 300).tolist() for a, b in itertools.pairwise(np.cumsum(sizes))]
    rows = [{"input_ids": one, "weight": [i / 4 for i in one]} for one in ids]
    path = jsonl(folder / "data" / "tokens.jsonl", rows)
    return (DatasetConfig(name="tokens", data_files=path, aligned_columns=["weight"]),)


KINDS: dict[str, tuple[Callable[[Path], tuple[DatasetConfig, ...]], str]] = {
    "source_ids": (sources, SOURCE_IDS),
    "verdicts": (verdicts, DESIRABLE.name),
    "aligned": (aligned, "weight"),
}
PACK = {"seq_length": 64, "strategy": "greedy", "oversize": "drop"}


def chain(folder: Path, kind: str, streaming: bool, batch_size: int = 4) -> Pipeline:
    load = {"batch_size": batch_size, "num_epochs": 1, "drop_last": False, "source_ids": True}
    options: dict[str, Any] = {"mix": {"stop_strategy": "all_exhausted"}, "pack": PACK}
    options |= {"streaming": True, "num_streams": 4} if streaming else {}
    values = config(folder, datasets=KINDS[kind][0](folder), load=load, **options)
    return Pipeline.from_config(values).source().tokenize().mix().pack().load()


@pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streaming"])
@pytest.mark.parametrize("kind", KINDS)
def test_laws_of_what_stands_beside_tokens(tmp_path: Path, kind: str, streaming: bool) -> None:
    def make(batch_size: int = 4) -> Any:
        return chain(tmp_path, kind, streaming, batch_size).build()

    whole = list(make())
    assert len(np.unique([values for batch in whole for values in batch[KINDS[kind][1]]])) > 1
    assert_exact_resume(make, len(whole), hops=(1, 2))
    assert_ranks(make, 2, 4, 3)
    unchanged = make().map_rows(lambda columns, key: None, version="1")
    assert_same_batches(whole, unchanged, what="changed by nothing")
    cached = chain(tmp_path, kind, False)
    cached.prepare()
    assert_conserved(cached.ledger())
    assert assert_same_documents(whole, cached.build(), what="streamed and cached") > 80
