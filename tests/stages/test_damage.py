"""Files that are read back, damaged in every shape: batches stay what they were, and each is told
of or made again with a word.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest

from easypipe import DatasetConfig, Pipeline, PipelineConfig, SaveStageConfig
from easypipe.core import storage
from easypipe.core.checked import _told, read_checked
from easypipe.core.config import to_dict
from easypipe.save.verify import verify
from pipelines import config, jsonl, tokenizer


def chain(folder: Path) -> Pipeline:
    jsonl(folder / "bad.jsonl", [{"text": "fine"}, {"text": None}] * 20)
    values = to_dict(config(folder)) | {"pack": {"seq_length": 64}}
    values["datasets"].append(
        {"name": "bad", "data_files": str(folder / "bad.jsonl"), "on_error": "quarantine"}
    )
    values["mix"] = {"stop_strategy": "all_exhausted"}
    return Pipeline.from_config(values).source().tokenize().mix().pack()


def batches(folder: Path) -> list[bytes]:
    source = chain(folder).get_data()["mixed"]
    batch = source.read(0, 0, source.prepare().shards[0].num_rows)
    return [np.ascontiguousarray(column.flatten().to_numpy()).tobytes() for column in batch.columns]


def another_number(data: bytes) -> bytes:
    """A digit of the last number is another: JSON that is believed where nobody looks at the
    checksum.
    """
    at = next(
        i
        for i in reversed(range(len(data)))
        if data[i : i + 1].isdigit() and data[i - 1 : i] in b" ["
    )
    return data[:at] + str((int(data[at : at + 1]) + 1) % 10).encode() + data[at + 1 :]


def another_key(data: bytes) -> bytes:
    values = json.loads(data)
    name = next(name for name in values if name != "xxh3_128")
    return json.dumps(
        {f"{name}s" if key == name else key: value for key, value in values.items()}, indent=1
    ).encode()


SHAPES: dict[str, Callable[[bytes], bytes]] = {
    "[1]": lambda _: b"[1]",
    "null": lambda _: b"null",
    "empty": lambda _: b"",
    "cut": lambda data: data[: len(data) // 2],
    "not UTF-8": lambda _: b"\xff" * 9,
    "another number": another_number,
    "another key": another_key,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, batches(folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_is_damaged_is_made_again(
    whole: tuple[Path, list[bytes]], shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One file of every kind at a time, then all at once."""
    folder, expected = whole
    cache = folder / "cache"
    kinds = {
        kind: sorted((cache / kind).rglob("*.json"))
        for kind in ("manifests", "plans", "indexes", "proofs", "ranges")
    }
    assert all(kinds.values())
    original = {path: read_checked(path) for paths in kinds.values() for path in paths}
    for kind in (*kinds, "all"):
        _told.clear()
        caplog.clear()
        some = (
            [path for paths in kinds.values() for path in paths] if kind == "all" else kinds[kind]
        )
        before = {path: path.read_bytes() for path in some}
        for path, data in before.items():
            path.write_bytes(SHAPES[shape](data))
        with caplog.at_level(logging.WARNING, "easypipe"):
            assert batches(folder) == expected
        if kind != "ranges":  # which only a preparation reads
            assert "damaged" in caplog.text, kind
        for path in some:
            if path.relative_to(cache).parts[0] in ("manifests", "plans", "indexes") or (
                kind == "all" and "ranges" in path.parts
            ):
                assert read_checked(path) | {"facts": 0} == original[path] | {"facts": 0}
        for path, data in before.items():
            path.write_bytes(data)


def test_a_quarantine_file_is_written_again(
    whole: tuple[Path, list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = whole
    [quarantine] = (folder / "cache" / "manifests").glob("*.quarantine.jsonl")
    before = quarantine.read_bytes()
    for damage in (
        lambda: quarantine.unlink(),
        lambda: quarantine.write_bytes(before.replace(b'"row": 1', b'"row": 2', 1)),
    ):
        damage()
        assert [problem.at for one in verify(folder / "cache") for problem in one.problems] == [
            str(quarantine)
        ]
        assert batches(folder) == expected
        assert f"{quarantine} is gone or damaged, and is written again" in caplog.text
        assert quarantine.read_bytes() == before


def test_a_bucket_without_its_quarantine_file_is_verified(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", [{"text": "one two"}, {"text": None}])
    dataset = DatasetConfig(data_files=str(rows), on_error="quarantine")
    url = f"memory://quarantine/{tmp_path.name}"
    options = {"default_tokenizer": tokenizer(), "seed": 0, "cache_dir": url}
    pipeline = Pipeline(PipelineConfig(datasets=(dataset,), **options)).source().tokenize()
    pipeline.prepare()
    [quarantine] = fsspec.filesystem("memory").glob(f"{url}/manifests/*.quarantine.jsonl")
    fsspec.filesystem("memory").rm(quarantine)
    [found] = verify(url)
    assert [one.at.partition("://")[2] for one in found.problems] == [quarantine.lstrip("/")]
    pipeline.repair(url)
    assert all(one.ok for one in verify(url))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("victim", ["_easypipe-run.json", "_shards"])
def test_an_unfinished_save_goes_on_though_its_books_are_damaged(
    tmp_path: Path, shape: str, victim: str
) -> None:
    class Killed(BaseException):
        pass

    def die(step: str, path: str) -> None:
        if step == "rename" and path.endswith("_easypipe.json"):
            raise Killed

    def save(folder: Path) -> None:
        chain(tmp_path).save(SaveStageConfig(output_dir=str(folder), num_shards=2)).build()

    save(tmp_path / "whole")
    storage.set_fault_hook(die)
    try:
        with pytest.raises(Killed):
            save(tmp_path / "out")
    finally:
        storage.set_fault_hook(None)
    for path in (
        [tmp_path / "out" / victim]
        if victim.endswith("json")
        else (tmp_path / "out" / victim).iterdir()
    ):
        path.write_bytes(SHAPES[shape](path.read_bytes()))
    save(tmp_path / "out")
    assert all(one.ok for one in verify(tmp_path / "out"))
    assert [path.read_bytes() for path in sorted((tmp_path / "out").glob("part-*"))] == [
        path.read_bytes() for path in sorted((tmp_path / "whole").glob("part-*"))
    ]
