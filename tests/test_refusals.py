"""What is refused stays refused: the refusals that no room's tests reach. `test_floors.py` looks for
one whose words stand in no test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers

from easypipe import (
    DatasetConfig,
    FewShotConfig,
    Pipeline,
    PromptConfig,
    PromptEngine,
    StreamingPreprocessedDataset,
    UniversalDataModule,
    block_mixture_interleave,
    create_vision_collate,
)
from easypipe.cli import main
from easypipe.core import random
from easypipe.core.aligned import AlignedColumn
from easypipe.discovery.findings import Part
from easypipe.history import Span
from easypipe.loader.prefetch import ReadPool
from easypipe.loader.rows.aligned import joined_columns
from easypipe.plan import mix, order
from easypipe.save.shard_writer import check_json
from easypipe.sources.external.own import as_source
from easypipe.train.callbacks.named import value_of
from easypipe.train.checkpoint.manager import CheckpointManager
from easypipe.train.model.config import ClassifierConfig
from easypipe.train.model.harness import _sampling
from easypipe.train.plan.topology import topology
from easypipe.train.record import recorded_seed
from easypipe.train.report.page import write_report
from easypipe.transforms.chat.conversations import conversations_of
from easypipe.transforms.chat.sandbox import Template
from easypipe.transforms.columns.columns import Combine
from easypipe.transforms.prompt import few_shot
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import config, jsonl, tokenizer

PROMPT = PromptConfig(format_type="prompt_completion")
CUSTOM = PromptConfig(
    format_type="custom", template="{{ q }} {{ a }}", input_columns=("q",), label_column="a"
)


def engine(prompt: PromptConfig = PROMPT) -> PromptEngine:
    return PromptEngine(tokenizer(), prompt, max_length=40)


def two_kinds(folder: Path) -> Any:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "text": "d"}]
    path = str(jsonl(folder / "rows.jsonl", rows))
    pairs = {"prompt_field": "prompt", "completion_field": "chosen", "rejected_field": "rejected"}
    datasets = [{"name": "pairs", "data_files": path, **pairs}, {"name": "texts", "data_files": path}]  # fmt: skip
    values = config(folder, datasets=[DatasetConfig(**one) for one in datasets])
    return Pipeline.from_config(values).source().tokenize().mix().pack().load().build()


class OfNumbers:
    """A source of one's own whose shards hold no rows."""

    shard_names = ("a",)

    def open_shard(self, name: str) -> Any:
        return 5


def few(folder: Path, most: int = 10, **more: Any) -> Any:
    path = jsonl(folder / "pool.jsonl", [{"q": "a", "a": "b"}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_shot, "MOST_BYTES", most)
        pool = FewShotConfig(data_files=str(path), count=1, **more)
        return engine(PromptConfig(**{**dict(vars(CUSTOM)), "few_shot": pool}))


def with_gaps(folder: Path) -> Any:
    """A tokenizer whose first free id is not the number of its tokens."""
    text = Path(tokenizer(), "tokenizer.json").read_text()
    grown = tokenizers.Tokenizer.from_str(text)
    values = json.loads(text)
    most = max(values["model"]["vocab"].values())
    values["model"]["vocab"]["gap!"] = most + 7
    folder.joinpath("tokenizer.json").write_text(json.dumps(values))
    assert grown.get_vocab_size() == most + 1
    return load_tokenizer(str(folder)).definition_with(["<new>"])


def saved_without_numbers(folder: Path) -> Any:
    manager = CheckpointManager(folder / "kept")
    manager.save(model={"w": np.zeros(2)}, metrics={"note": "good"})


def listed_only() -> Any:
    reads = DatasetConfig(name="a", data_files="x")
    part = Part(subset="s", split="t", format="parquet", files=(), num_bytes=0, reads=vars(reads))
    return part.propose()


def not_text(folder: Path) -> Any:
    folder.joinpath("talk.json").write_bytes(b'{"messages": [{"role": "user", "content": "\xff"}]}')
    return conversations_of(folder / "talk.json")


def no_seed(folder: Path) -> Any:
    folder.joinpath("run.yaml").write_text("train: {}\n")
    return recorded_seed(folder)


def closed_pool() -> Any:
    pool = ReadPool(1, "test")
    pool.submit(len, []).result(10)
    pool.close()
    return pool.submit(len, [])


def column(dtype: str) -> AlignedColumn:
    return AlignedColumn(name="weight", dtype=dtype)


ONES = np.ones(2, np.int64)
SPAN = Span(first=0, stop=9, row=0, config=None, components=None, changed={})
LOOP = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
REASONING = {"format_type": "chat", "reasoning": "per_turn", "train_on": "assistant"}
# what is said -> what it is said to; `folder` is an empty one
REFUSED: dict[str, Callable[[Path], Any]] = {
    r"val_split: 0\.1 of 3 rows leaves none to validate on\. Give another share\.": (
        lambda folder: UniversalDataModule([{"input_ids": [1]}] * 3, val_split=0.1)
    ),
    r"folders: names no run\. Give the train\.output_dir of a run\.": (
        lambda folder: write_report([])
    ),
    r"buffer_size: -1 rows\. Give 0 to keep the order\.": (
        lambda folder: StreamingPreprocessedDataset([{}], engine(), buffer_size=-1)
    ),
    r"channels: 2 channels .*1 is grey, 3 is RGB\.": (
        lambda folder: create_vision_collate(channels=2)
    ),
    r"indices must lie in \[0, 4\)": lambda folder: random.permute(np.array([4]), 4, 1),
    r"indices must lie in \[0, 5\)": lambda folder: order.permute(np.array([-1]), 5, 1),
    r"between 1 and \d+ draws can be made at once, not 0": (
        lambda folder: mix.draw(0, ONES, ONES, *mix.start(ONES, "restart"), "restart")
    ),
    r"between 1 and \d+ draws can be made at once, not -1": (
        lambda folder: mix.draw_largest_deficit(
            -1, lambda active: ONES, ONES, *mix.start(ONES, "restart"), "restart"
        )
    ),
    r"s/t: was listed only, not looked into\. Discover it by its own subset and split\.": (
        lambda folder: listed_only()
    ),
    r"does not record what data was read in steps 1 to 9\. Only a run that records its changes": (
        lambda folder: SPAN.built()
    ),
    r"train\.callbacks\.x: the loss does not return 'los' .*Did you mean 'loss'\?": (
        lambda folder: value_of({"loss": 1.0, "eval": {}}, "los", "train.callbacks.x")
    ),
    r"format_callback: 'call' is not a function\. Give a function": (
        lambda folder: DatasetConfig(name="a", data_files="x", format_callback="call")
    ),
    r"the pool is closed": lambda folder: closed_pool(),
    r"'weight' holds .*, and in dataset 'a' .*\. Give them one type\.": (
        lambda folder: joined_columns([("a", [column("float32")]), ("b", [column("uint16")])])
    ),
    r"Call load\(\) before loader\(\)": (
        lambda folder: Pipeline.from_config(config(folder)).source().loader()
    ),
    r"format: JSON cannot hold column 'x' of type .*\. Save as parquet or arrow\.": (
        lambda folder: check_json(pa.schema([("x", pa.list_(pa.binary()))]))
    ),
    r"shard 'a': open_shard of OfNumbers gave int, which has no rows\. Yield a dict for a row\.": (
        lambda folder: as_source(OfNumbers(), name="x").read(0, 0, 1)
    ),
    r"datasets\.a: int holds no rows: .*\. Give a source, a list of dicts, a table": (
        lambda folder: block_mixture_interleave({"a": 3}, weights={"a": 1.0}, seed=0)
    ),
    r"mix: dataset 'pairs' holds pairs of answers, and 'texts' does not\. Train on them in two": (
        two_kinds
    ),
    r"rejected_column: not given, so rows are not pairs\. Name it, or use encode\.": (
        lambda folder: engine().encode_pair({"prompt": "a", "completion": "b"})
    ),
    r"metrics\.note: 'good' is not a number\. Put it into custom_state\.": saved_without_numbers,
    r"image_shape: \(0, 4, 3\) is not \(height, width, channels\)\. Give sizes from 1\.": (
        lambda folder: ClassifierConfig(image_shape=(0, 4, 3))
    ),
    r"generation_kwargs\.top: is not an option of generate .*Did you mean 'top_": (
        lambda folder: _sampling({"top": 1})
    ),
    r"topology: 'h100:2x2x2' has 3 dimensions\. Write 'h100:8', or 'h100:4x8' for 4 hosts\.": (
        lambda folder: topology("h100:2x2x2")
    ),
    r"run\.yaml: records no seed: .*\. Set data\.seed\.": no_seed,
    r"talk\.json: is not UTF-8: .*\. Save it as UTF-8\.": not_text,
    r"it calls itself without end": lambda folder: Template(LOOP, {}).render([]),
    r"it writes more than 33554432 characters for one conversation": (
        lambda folder: Template(
            "{% for n in range(99999) %}{{ 'x' * 400 }}{% endfor %}", {}
        ).render([])
    ),
    r"Combine: 3 is not a format\. Write only columns in braces": (
        lambda folder: Combine("x", 3)  # pyright: ignore[reportArgumentType]
    ),
    r"Combine: '\{\{x\}\}' names no column\. Write only columns in braces": (
        lambda folder: Combine("x", "{{x}}")
    ),
    r"reasoning: 'per_turn' makes several samples of a row, and label_column names one answer\. Use 'keep' or 'mask'\.": (
        lambda folder: PromptConfig(**REASONING, label_column="a")
    ),
    r"few_shot\.data_files: .*pool\.jsonl has \d+ bytes, more than 10 to draw from\. Name a smaller": (
        few
    ),
    r"gives '<new>' the id \d+, not \d+\. Its ids have gaps\.": with_gaps,
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_is_reached(tmp_path: Path, words: str) -> None:
    with pytest.raises(Exception) as refused:
        REFUSED[words](tmp_path)
    assert re.search(words, str(refused.value)), str(refused.value)


def test_a_key_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "learning_rat"]) == 2
    assert "learning_rat: no such key. Did you mean" in capsys.readouterr().err
