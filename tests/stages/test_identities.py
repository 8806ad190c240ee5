"""Which identity every option of a pipeline's stages changes: one that changes rows changes the
fingerprint of saved rows and the state of a loader; one that does not, changes neither.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from easypipe import ConfigError, Pipeline
from easypipe.core.config import from_dict, to_dict
from easypipe.loader.config import LoadStageConfig
from easypipe.plan.order import OrderConfig
from easypipe.stages.config import PipelineConfig
from easypipe.stages.mix.config import MixStageConfig
from easypipe.stages.mix.stage import MixedShardedSource
from easypipe.stages.pack.config import PackStageConfig
from easypipe.stages.pack.stage import PackedShardedSource
from easypipe.stages.tokenize.config import TokenizeStageConfig
from pipelines import config, tokenizer, two_datasets

CLASSES = {
    "tokenize": TokenizeStageConfig,
    "mix": MixStageConfig,
    "pack": PackStageConfig,
    "load": LoadStageConfig,
    "order": OrderConfig,
}
BASE = {
    "mix": {"weights": {"code": 3, "docs": 1}, "stop_strategy": "first_exhausted"},
    "pack": {"seq_length": 64},
    "load": {"batch_size": 4},
}
START = {"step": 0, "weights": {"code": 1, "docs": 1}}
LATER = {"step": 9, "weights": {"code": 1, "docs": 3}}
SCHEDULE = {"mix": {"weights": None, "weight_schedule": [START, LATER]}}
UNPACKED = {"pack": {"enabled": False}}
NOTHING = ""
ROWS = "fingerprint content plan"  # which rows there are, told by mix and pack
REFUSED = "refused"


class Change(NamedTuple):
    """`option` becomes `value` over BASE and `base`; cached, streaming: the identities that change
    (`fingerprint` before a text is read, `content` of the rows, components of a loader's state).
    """

    option: str
    value: Any
    cached: str = ROWS
    streaming: str | None = None  # None: those of `cached`, but `content`, which is not known
    base: dict[str, Any] = {}


CHANGES = [
    Change("tokenize.default_tokenizer", tokenizer(330), "fingerprint content sources tokenizer plan", "fingerprint sources tokenizer"),
    Change("tokenize.max_length", 9, "fingerprint content sources plan", "fingerprint sources"),
    Change("tokenize.batch_size", 3, NOTHING),
    Change("tokenize.num_workers", 2, NOTHING),
    Change("tokenize.cache_tokenized", True, NOTHING),
    Change("mix.weights", {"code": 1, "docs": 1}),
    Change("mix.weight_schedule", [START, LATER | {"step": 8}], base=SCHEDULE),
    Change("mix.weight_schedule", [START, LATER | {"weights": {"code": 1, "docs": 2}}], base=SCHEDULE),
    Change("mix.weight_schedule_type", "linear", base=SCHEDULE),
    Change("mix.batch_size", 4, NOTHING, base=SCHEDULE),  # another than load's is refused
    Change("mix.unit", "tokens"),
    Change("mix.max_epochs", {"docs": 3}),
    Change("mix.block_size", 7, base=SCHEDULE),
    Change("mix.block_size", 7, base={"mix": {"weights": {"code": 2, "docs": 1}}}),
    Change("mix.stop_strategy", "all_exhausted"),
    Change("mix.stop_strategy", "restart"),
    Change("mix.seed", 8),
    Change("mix.allow_mixed_tokenizers", True, NOTHING),
    Change("mix.provenance", True, "fingerprint content", REFUSED),
    Change("mix.provenance", True, "fingerprint", REFUSED, UNPACKED),
    Change("pack.enabled", False, ROWS + " tokenizer"),
    Change("pack.seq_length", 65),
    Change("pack.strategy", "pool"),
    Change("pack.strategy", "first_fit"),
    Change("pack.strategy", "concat"),
    Change("pack.strategy", "stream", NOTHING, base={"pack": {"strategy": "concat"}}),
    Change("pack.num_packers", 3, base={"pack": {"strategy": "pool"}}),
    Change("pack.num_packers", 3, "fingerprint", "fingerprint plan"),  # rows stay, and nobody sees
    Change("pack.oversize", "drop"),
    Change("pack.oversize", "truncate"),
    Change("pack.train_continued", True, "plan"),  # without masks saved rows have all targets
    Change("pack.segments", "row", base={"pack": {"strategy": "concat"}}),
    Change("pack.pad_token_id", 5, "fingerprint content tokenizer"),
    Change("pack.include_segment_ids", False, "config"),
    Change("pack.shuffle_packed", False),
    Change("pack.shuffle_buffer_factor", 2, "config", REFUSED),
    Change("load.batch_size", 8, "config", "config plan"),  # streams are as many as divide it
    Change("load.batch_size", 8, "config", base={"load": {"batch_size_schedule": [[1, 4]]}}),
    Change("load.batch_size_schedule", [[2, 8]], "config"),
    Change("load.batch_size_schedule", [[3, 8]], "config", base={"load": {"batch_size_schedule": [[2, 8]]}}),
    Change("load.accumulation_steps", 2, NOTHING),
    Change("load.prefetch_enabled", False, NOTHING),
    Change("load.prefetch_workers", 2, NOTHING),
    Change("load.prefetch_buffer_size", 3, NOTHING),
    Change("load.shuffle_buffer_size", 9, "config", "config plan"),
    Change("load.shuffle_buffer_size", 9, "config", "config plan", {"load": {"shuffle_buffer_size": 8}}),
    Change("load.group_by_length", 2, "config", REFUSED, UNPACKED),
    Change("load.group_by_length", 2, "config", REFUSED, UNPACKED | {"load": {"group_by_length": 3}}),
    Change("load.drop_last", False, "config"),
    Change("load.source_ids", True, NOTHING),
    Change("load.num_epochs", 2, NOTHING),  # more of them stand behind the last row
    Change("load.mesh", {"data": -1}, NOTHING),
    Change("load.partition_spec", ["data"], NOTHING, base={"load": {"mesh": {"data": 1}}}),
    Change("load.prefetch_to_device", True, NOTHING),
    Change("load.stall_timeout_s", 7.0, NOTHING),
    Change("order.shuffle", False),
    Change("order.block_rows", 2, ROWS, REFUSED),
    Change("seed", 8),
    Change("num_streams", 2, REFUSED, "config plan"),
]  # fmt: skip
ELSEWHERE = {
    "mix.batch_size": "decides by load's",
    "pack.eos_token_id": "one that the tokenizer has not",
    "tokenize.remove_columns": "of saved rows",
}


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    return below | {
        key: over(below[key], value)
        if isinstance(value, dict) and isinstance(below.get(key), dict) and key in CLASSES
        else value
        for key, value in above.items()
    }


@pytest.fixture(scope="module")
def identities(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., dict[str, str]]:
    folder = tmp_path_factory.mktemp("identities")
    plain = to_dict(config(folder, datasets=two_datasets(folder / "data", 30, 45)))
    known: dict[str, dict[str, str]] = {}

    def of(*options: dict[str, Any], streaming: bool) -> dict[str, str]:
        values: dict[str, Any] = plain | {"streaming": streaming}
        for more in (BASE, *options):
            values = over(values, more)
        if (key := json.dumps(values, default=str)) not in known:
            pipeline = Pipeline(from_dict(PipelineConfig, values)).source().tokenize().mix().pack()
            source = pipeline.get_data()["mixed"]
            assert isinstance(source, MixedShardedSource | PackedShardedSource)
            found = {"fingerprint": source.fingerprint}
            loaded = pipeline.load()
            found |= loaded.build().state().components
            if not streaming:
                planned = loaded.get_data()["mixed"]
                assert isinstance(planned, MixedShardedSource | PackedShardedSource)
                if not planned.mixture.endless:
                    found["content"] = planned.content()
            known[key] = found
        return known[key]

    return of


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    # without the folder of a process
    "change",
    CHANGES,
    ids=lambda change: f"{change.option} {change.value}".rpartition("/")[2],
)
def test_an_option_changes_the_identities_of_what_it_decides(
    identities: Callable[..., dict[str, str]], change: Change, streaming: bool
) -> None:
    expected = change.streaming if streaming and change.streaming is not None else change.cached
    stage, _, name = change.option.rpartition(".")
    option = {stage: {name: change.value}} if stage else {name: change.value}
    if expected == REFUSED:
        with pytest.raises(ConfigError, match=change.option):
            identities(over(change.base, option), streaming=streaming)
        return
    was = identities(change.base, streaming=streaming)
    now = identities(over(change.base, option), streaming=streaming)
    found = {name for name in {*was, *now} if was.get(name) != now.get(name)}
    assert found == set(expected.split()) - ({"content"} if streaming else set())


def test_every_option_of_a_stage_is_tried() -> None:
    fields = {
        f"{stage}.{field.name}"
        for stage, kind in CLASSES.items()
        for field in dataclasses.fields(kind)
    }
    assert fields <= {change.option for change in CHANGES} | set(ELSEWHERE)
