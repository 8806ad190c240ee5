"""No property works: whoever only looks at a chain reads no row and writes no file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chat_support import CHATML, chat_tokenizer
from easypipe import (
    DatasetConfig,
    LoadStageConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    block_mixture_interleave,
)
from easypipe.core.protocols import Source
from easypipe.transforms.prompt.config import PromptConfig

PACK, LOAD = PackStageConfig(seq_length=64), LoadStageConfig(batch_size=2)
WRITING = set("wax+")


def _talk(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": answer}]


COLUMNS: dict[str, dict[str, list[Any]]] = {
    "text": {"text": [f"a few words, number {i}" for i in range(40)]},
    "chat": {"messages": [_talk(f"It is {i}.") for i in range(40)]},
    "pairs": {
        "chosen": [_talk(f"It is {i}.") for i in range(40)],
        "rejected": [_talk("No idea.")] * 40,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "text": {},
    "chat": {"content_field": "messages", "chat_template": CHATML},
    "pairs": {
        "prompt": PromptConfig(
            input_columns=("chosen",),
            rejected_column="rejected",
            template=CHATML,
            train_on="last_assistant",
        )
    },
}


def opened(folder: Path, *kinds: str, **options: Any) -> Pipeline:
    datasets = []
    for i, kind in enumerate(kinds):
        path = folder / "in" / f"{i}-{kind}.parquet"
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            pq.write_table(pa.table(COLUMNS[kind]), path)
        datasets.append(
            DatasetConfig(
                name=f"{kind}{i}",
                data_files=str(path),
                tokenizer=chat_tokenizer(),
                **OPTIONS[kind],
            )
        )
    return Pipeline(
        PipelineConfig(datasets=datasets, seed=1, cache_dir=folder / "cache", **options)
    ).source()


def stream(folder: Path) -> Pipeline:
    return opened(folder, "text", "text", streaming=True).tokenize().mix().pack(PACK).load(LOAD)


def saved(folder: Path) -> Pipeline:
    to = SaveStageConfig(output_dir=folder / "saved")
    opened(folder, "text").tokenize().pack(PACK).save(to).build()
    return (
        Pipeline(PipelineConfig(datasets=[DatasetConfig(data_files=folder / "saved")], seed=1))
        .source()
        .load(LOAD)
    )


def interleaved(folder: Path) -> Pipeline:
    sources = opened(folder, "text", "text").get_data()
    both = block_mixture_interleave(sources, stop_strategy="all_exhausted")
    config = PipelineConfig(datasets=[], seed=1, default_tokenizer=chat_tokenizer())
    return Pipeline(config).source({"both": both}).tokenize().pack(PACK).load(LOAD)


CHAINS: dict[str, Callable[[Path], Pipeline]] = {
    "text": lambda folder: opened(folder, "text").tokenize().load(LOAD),
    "chat": lambda folder: opened(folder, "chat").tokenize().pack(PACK).load(LOAD),
    "pairs": lambda folder: (
        opened(folder, "pairs").tokenize().pack(PackStageConfig(seq_length=64, oversize="drop"))
    ),
    "mixture": lambda folder: (
        opened(folder, "text", "text")
        .tokenize()
        .mix(MixStageConfig(stop_strategy="first_exhausted"))
        .load(LOAD)
    ),
    "packed": lambda folder: opened(folder, "text", "text").tokenize().mix().pack(PACK).load(LOAD),
    "saving": lambda folder: (
        opened(folder, "text").tokenize().pack(PACK).save(SaveStageConfig(output_dir=folder / "to"))
    ),
    "saved": saved,
    "interleaved": interleaved,
    "streaming": stream,
}


def things(pipeline: Pipeline) -> Iterator[Any]:
    """The pipeline and everything that it shows: stages, and the sources that they made."""
    yield pipeline
    yield pipeline.get_context()
    yield from pipeline.stages
    for step in pipeline._plan:
        waiting = list(step.data.values())
        while waiting:
            source = waiting.pop()
            yield source
            waiting += [below for below in [getattr(source, "below", None)] if below is not None]
            mixture = getattr(source, "mixture", None)
            if mixture is not None:
                yield mixture
                waiting += mixture.parts.values()


def look(thing: Any) -> None:
    for name, value in inspect.getmembers_static(type(thing)):
        if not name.startswith("_") and (
            isinstance(value, property) or type(value).__name__ == "cached_property"
        ):
            getattr(thing, name)


class Watch:
    """What was done while it is `on`: rows that sources were asked for, files opened to write."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()

    def __call__(self, event: str, arguments: Any) -> None:
        if not self.on or event != "open":
            return
        path, mode, flags = arguments
        if (set(mode or "") & WRITING) or (mode is None and flags & 3):
            self.seen.append(f"wrote {path}")


WATCH = Watch()
sys.addaudithook(WATCH)


def _kinds(of: type) -> Iterator[type]:
    yield of
    for below in of.__subclasses__():
        yield from _kinds(below)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    for kind in set(_kinds(Source)):
        for name in {"read", "scan"} & vars(kind).keys():
            own = vars(kind)[name]

            def spy(self: Any, *arguments: Any, own: Any = own, name: str = name) -> Any:
                if WATCH.on:
                    WATCH.seen.append(f"{type(self).__name__}.{name}{arguments}")
                return own(self, *arguments)

            monkeypatch.setattr(kind, name, spy)
    WATCH.seen = []
    yield WATCH
    WATCH.on = False


@pytest.mark.parametrize("chain", CHAINS)
def test_properties_read_no_row_and_write_no_file(tmp_path: Path, chain: str, watch: Watch) -> None:
    pipeline = CHAINS[chain](tmp_path)
    watch.on = True
    for thing in things(pipeline):
        look(thing)
    watch.on = False
    assert not watch.seen
    if pipeline.get_stages()[-1] != "load":
        return
    loader = pipeline.build()
    watch.on = True
    look(loader)
    assert not watch.seen


def test_the_watch_sees_work(tmp_path: Path, watch: Watch) -> None:
    pipeline = CHAINS["text"](tmp_path)
    watch.on = True
    pipeline.prepare()
    assert any(seen.startswith("wrote ") for seen in watch.seen)
    assert any(".scan(0, 0, 40)" in seen or ".read(0, 0, 40)" in seen for seen in watch.seen)
