"""MDS folders and tars that mosaicml-streaming and webdataset write are read as they read them."""

from __future__ import annotations

import importlib.machinery
import io
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easypipe.sources.open import open_files

if "EASYPIPE_SHARDS" not in os.environ:
    pytest.skip("nox -s shards installs the libraries", allow_module_level=True)

# streaming imports its readers of images, and those a torchvision, which has to fit torch
for name, values in {
    "torchvision": {},
    "torchvision.datasets": {"VisionDataset": object},
    "torchvision.transforms": {},
    "torchvision.transforms.functional": {"to_tensor": None},
}.items():
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(values)
    sys.modules[name] = module

import webdataset  # noqa: E402

import streaming  # noqa: E402

COLUMNS = {
    "array": "ndarray",
    "bytes": "bytes",
    "flag": "uint8",
    "half": "float16",
    "ids": "ndarray:int32",
    "json": "json",
    "number": "int",
    "pair": "ndarray:uint16:2",
    "real": "float64",
    "stated": "str_int",
    "text": "str",
}
COLUMNS.pop("array")  # without a dtype it is refused


def row(i: int) -> dict[str, Any]:
    return {
        "bytes": bytes(range(i % 9)),
        "flag": np.uint8(i % 250),
        "half": np.float16(i / 8),
        "ids": np.arange(1 + i * 7 % 400, dtype=np.int32),
        "json": {"i": i, "of": ["é", None]},
        "number": -i,
        "pair": np.array([i, i + 1], np.uint16),
        "real": i / 3,
        "stated": i * 10**12,
        "text": f"é {i} " * (i % 5),
    }


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@pytest.mark.parametrize("compression", [None, "zstd:3", "gz", "bz2"])
@pytest.mark.parametrize("hashes", [[], ["sha1", "xxh64"]])
def test_mds(tmp_path: Path, compression: str | None, hashes: list[str]) -> None:
    out, rows = str(tmp_path / "mds"), 500
    options = {"compression": compression, "hashes": hashes, "size_limit": 1 << 16}
    with streaming.MDSWriter(out=out, columns=COLUMNS, **options) as writer:
        for i in range(rows):
            writer.write(row(i))
    source = open_files(out)
    ours = [found for name in source.shard_names for found in source.open_shard(name)]
    assert len(source.shards) > 2
    assert len(ours) == rows
    theirs = streaming.StreamingDataset(local=out, shuffle=False, batch_size=1, keep_zip=True)
    import json

    for mine, other in zip(ours, (theirs[i] for i in range(rows)), strict=True):
        mine["json"] = json.loads(mine["json"])
        assert mine == {name: plain(value) for name, value in other.items()}


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_webdataset(tmp_path: Path, ending: str) -> None:
    pattern = str(tmp_path / f"%03d{ending}")
    with webdataset.ShardWriter(pattern, maxcount=60, verbose=0) as writer:
        for i in range(200):
            found = {"__key__": f"a/{i:04}", "txt": f"é {i}", "json": {"i": i}, "cls": i}
            if i % 3:
                found |= {"tokens.npy": np.arange(i), "jpg": b"\xff"}
            writer.write(found)
    source = open_files(str(tmp_path / f"*{ending}"))
    ours = [found for name in source.shard_names for found in source.open_shard(name)]
    files = sorted(map(str, tmp_path.iterdir()))
    theirs = webdataset.WebDataset(files, shardshuffle=False)
    count = 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["__key__"] == other["__key__"]
        assert mine["txt"] == other["txt"].decode()
        assert (mine["json"], mine["cls"]) == (other["json"].decode(), int(other["cls"]))
        array = other.get("tokens.npy")
        assert mine["tokens.npy"] == (array and np.load(io.BytesIO(array)).tolist())
        assert mine["jpg"] == other.get("jpg")
        count += 1
    assert count == 200
