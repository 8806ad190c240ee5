"""The table of PyTorch's options in docs/faces.md: every row does what it says there."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easypipe import (
    DataLoaderBuilder,
    DataLoaderConfig,
    DataLoaderFactory,
    TokenizerConfig,
    create_collate_fn,
)
from easypipe.compat.data_pipeline import TokenizerSection
from easypipe.core.errors import ConfigError
from easypipe.transforms.tokenizer.config import with_options
from pipelines import tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "faces.md"
ROWS = [{"x": np.float32(i)} for i in range(10)]


def table() -> list[tuple[str, str, str]]:
    """(option, where, mapped | warned | refused) of every row."""
    text = PAGE.read_text(encoding="utf-8").partition("## What becomes of PyTorch's options")[2]
    return re.findall(r"^\| `([^`]+)` \| (\S+) \| (\w+) \|", text, re.MULTILINE)


def values(**options: Any) -> list[list[float]]:
    loader = DataLoaderFactory().create_dataloader(
        ROWS, DataLoaderConfig(**{"batch_size": 4, "seed": 1, **options})
    )
    return [batch["x"].tolist() for batch in loader]


def num_workers() -> None:
    assert DataLoaderConfig(num_workers=3).load_options().prefetch_workers == 3
    assert not DataLoaderConfig(num_workers=0).load_options().prefetch_enabled


def prefetch_factor() -> None:
    assert (
        DataLoaderConfig(num_workers=3, prefetch_factor=4).load_options().prefetch_buffer_size == 12
    )
    with pytest.raises(ConfigError, match="has no effect while num_workers is 0"):
        DataLoaderConfig(num_workers=0, prefetch_factor=4)


def drop_last() -> None:
    assert (
        len(values(drop_last=True)),
        len(values(drop_last=False)),
        len(values()),
        len(values(shuffle=True)),
    ) == (2, 3, 3, 2)


def shuffle() -> None:
    first, second = (values(shuffle=True, num_epochs=2, batch_size=10)[i] for i in (0, 1))
    assert sorted(first) == sorted(second) == [*range(10)]
    assert first != second != [*range(10)]


def collate_fn() -> None:
    assert values(collate_fn=lambda rows: {"x": np.array([len(rows)])}) == [[4], [4], [2]]


def distributed() -> None:
    ranks = [
        DataLoaderBuilder()
        .with_dataset(ROWS)
        .with_batch_size(2)
        .with_distributed(rank=r, world_size=3)
        .build()
        for r in range(3)
    ]
    assert sorted(x for rank in ranks for batch in rank for x in batch["x"].tolist()) == [
        *range(10)
    ]


def return_tensors() -> None:
    import jax

    row = [{"input_ids": [1, 2]}]
    assert (
        create_collate_fn()(row)["labels"].tolist()
        == create_collate_fn(return_tensors=False)(row)["labels"]
    )
    assert isinstance(create_collate_fn(return_tensors="np")(row)["labels"], np.ndarray)
    assert isinstance(create_collate_fn(return_tensors="jax")(row)["labels"], jax.Array)


def use_fast() -> None:
    assert with_options(tokenizer(), {"use_fast": False}).backend == "tokenizers"
    assert with_options(tokenizer(), {"use_fast": True}).backend == "auto"


def section_use_fast() -> None:
    assert (
        TokenizerSection(name_or_path=tokenizer(), use_fast=False).config().backend == "tokenizers"
    )


def return_pt() -> None:
    with pytest.raises(ConfigError, match="TorchBatches"):
        create_collate_fn(return_tensors="pt")  # type: ignore[arg-type]


def trust_remote_code() -> None:
    with pytest.raises(ConfigError, match="never runs code that comes with a tokenizer"):
        TokenizerConfig(name_or_path=tokenizer(), trust_remote_code=True)


KNOWN: dict[tuple[str, str], Callable[[], None]] = {
    ("num_workers", "DataLoaderConfig"): num_workers,
    ("prefetch_factor", "DataLoaderConfig"): prefetch_factor,
    ("drop_last", "DataLoaderConfig"): drop_last,
    ("shuffle", "DataLoaderConfig"): shuffle,
    ("collate_fn", "DataLoaderConfig"): collate_fn,
    ("DistributedSampler", "DataLoaderBuilder"): distributed,
    ("return_tensors", "create_collate_fn"): return_tensors,
    ('return_tensors="pt"', "create_collate_fn"): return_pt,
    ("use_fast", "DatasetConfig.tokenizer_kwargs"): use_fast,
    ("use_fast", "TokenizerSection"): section_use_fast,
    ("trust_remote_code", "TokenizerConfig"): trust_remote_code,
}


@pytest.mark.parametrize(("option", "where", "here"), table(), ids=lambda word: word)
def test_every_row_of_the_table(
    option: str, where: str, here: str, caplog: pytest.LogCaptureFixture
) -> None:
    if (option, where) in KNOWN:
        return KNOWN[option, where]()
    assert where == "DataLoaderConfig"
    if here == "refused":
        with pytest.raises(ConfigError, match=f"{option}: unknown key"):
            DataLoaderConfig(**{option: None})
        return None
    assert here == "warned"
    assert values(**{option: None}) == values(**{option: False}) == values()
    assert not caplog.records  # which is what happens
    assert values(**{option: True}) == values()
    assert f"loader: {option}=True changes nothing" in caplog.text
    return None


def test_the_table_has_every_option_that_is_tested_and_more() -> None:
    rows = {(option, where) for option, where, _ in table()}
    assert rows >= KNOWN.keys()
    assert {"pin_memory", "persistent_workers", "sampler", "generator"} <= {
        option for option, _ in rows
    }


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "easypipe"):
        DataLoaderBuilder().with_dataset(ROWS).with_workers(1, pin_memory=True).with_options(
            persistent_workers=True
        ).build()
    assert "pin_memory=True changes nothing: jax takes batches from any host memory" in caplog.text
    assert "persistent_workers=True changes nothing: workers are threads" in caplog.text
