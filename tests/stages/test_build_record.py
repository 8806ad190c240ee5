"""What keeps a config from being written down as it is, and which values do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from easypipe import ConfigError, DatasetConfig, Pipeline
from easypipe.cache.folder import CONFIGS, CacheFolder
from easypipe.core.checked import remember_checked
from easypipe.core.config import CODE_KEYS
from easypipe.core.protocols import BaseStage, PipelineContext, Sources
from easypipe.save.folder import prefix_of
from easypipe.stages.build_record import _reasons, recall, recall_saved
from pipelines import config, jsonl

CODE = sorted(CODE_KEYS)[0]


@pytest.mark.parametrize(
    ("value", "reasons"),
    [
        (None, []),
        (True, []),
        (7, []),
        (0.5, []),
        ("text", []),
        (Path("a"), []),
        ("https://host/a?version=7", []),
        ({"a": [1, {"b": ("c", None)}]}, []),
        (DatasetConfig(name="d", data_files="a.jsonl"), []),
        ({CODE: None}, []),
        ({CODE: "module:function"}, [f"{CODE} runs code"]),
        ({"a": {"b": [{CODE: "x"}]}}, [f"a.b[0].{CODE} runs code"]),
        ("https://me:pa55@host/a", [" is an address with credentials"]),
        ({"a": ["x", "s3://k:s@b/c"]}, ["a[1] is an address with credentials"]),
        ({"a": {"b": len}}, ["a.b is a builtin_function_or_method in memory"]),
        ({"a": [object(), 1, {2}]}, ["a[0] is a object in memory", "a[2] is a set in memory"]),
        (DatasetConfig(name="d", data_files="https://me:pa55@host/a.jsonl"), ["data_files is an address with credentials"]),
    ],
)  # fmt: skip
def test_what_plain_values_do_not_say(value: Any, reasons: list[str]) -> None:
    assert _reasons(value, "") == reasons


def test_a_saved_folder_without_manifest_is_known_by_its_shards(tmp_path: Path) -> None:
    """Where they are those of one config; else nobody knows which of them made it."""
    folder, out = CacheFolder(tmp_path / "cache"), tmp_path / "out"
    out.mkdir()
    names = ["0" * 16, "1" * 16]
    for name in names:
        kept = {"config": name, "stages": [], "folder": str(tmp_path), "unknown": ""}
        remember_checked(folder.at(CONFIGS, f"{name}.json"), kept)
    for there, found in (((), None), ((1,), 1), ((0, 1), None)):
        for number in there:
            (out / f"{prefix_of(names[number])}00000-of-00001.parquet").write_bytes(b"x")
        if found is None:
            with pytest.raises(ConfigError, match="what made this is unknown"):
                recall_saved(str(out), folder)
        else:
            assert recall_saved(str(out), folder)["config"] == names[found]


class Own(BaseStage):
    @property
    def name(self) -> str:
        return "own"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        return data


def test_a_folder_that_relative_paths_started_from_is_gone(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache")
    kept = {"config": {}, "stages": [], "folder": str(tmp_path / "gone"), "unknown": ""}
    remember_checked(folder.at(CONFIGS, "made.json"), kept)
    with pytest.raises(ConfigError, match=r"was made in .*gone, which is gone.*Give the config"):
        recall("made", folder)
    (tmp_path / "gone").mkdir()
    assert recall("made", folder) == kept
    for key in kept:
        less = {name: value for name, value in kept.items() if name != key}
        remember_checked(folder.at(CONFIGS, f"{key}.json"), less)
        with pytest.raises(ConfigError, match="what made this is unknown"):
            recall(key, folder)


def test_a_saved_folder_is_known_by_the_stages_before_it(tmp_path: Path) -> None:
    """So that one of the user's own behind it does not keep it from being repaired."""
    rows = jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    dataset = DatasetConfig(name="d", data_files=str(rows))
    for more in ((), ("mix", "pack")):
        chain = Pipeline(config(tmp_path, datasets=[dataset])).source().tokenize()
        if more:
            chain = chain.mix({"stop_strategy": "all_exhausted"}).pack({"seq_length": 4})
        out = str(tmp_path / f"out{len(more)}")
        chain.save({"output_dir": out}).add_stage(Own()).write()
        made = recall_saved(out, CacheFolder(tmp_path / "cache"))
        assert [stage for stage, _ in made["stages"]] == ["tokenize", *more, "save"]
