"""Each field of each JSON file that easypipe keeps for itself, as a value of another type or size,
under a checksum that fits: whoever reads the file gives the batches it gave, or an error of ours
that names the file.

`test_false_fields.py` has values that could be true, and what `verify` finds of them.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from xxhash import xxh3_128_hexdigest

from easypipe import Pipeline, load_saved
from easypipe.cache.blocks import block_sums
from easypipe.cache.manifest import read_manifest
from easypipe.core.checked import commit_checked, read_checked
from easypipe.core.config import to_dict
from easypipe.core.errors import CacheError, EasypipeError
from easypipe.save.verify import verify
from easypipe.train.metrics.log import MetricsFile
from easypipe.train.record import write_kept
from easypipe.train.report.page import write_report
from pipelines import config, jsonl, texts

GONE = object()
LIES = [None, "x", "../../x", -1, 10**15, 10**30, 1.5, math.inf, [], [[]], {}, {"a": 1}, True, GONE]
Way = tuple[str | int, ...]


def chain(folder: Path) -> Pipeline:
    data = {"name": "one", "data_files": str(folder / "rows.jsonl"), "on_error": "quarantine"}
    values = to_dict(config(folder)) | {
        "datasets": [data],
        "pack": {"seq_length": 64},
        "load": {"batch_size": 2},
        "save": {"output_dir": str(folder / "saved"), "num_shards": 2, "format": "jsonl"},
    }
    return Pipeline.from_config(values).source().tokenize().mix().pack()


def batches(folder: Path) -> list[bytes]:
    loader = chain(folder).load().build()
    return [np.asarray(batch[name]).tobytes() for batch in loader for name in sorted(batch)]


def saved_rows(folder: Path) -> list[Any]:
    source = load_saved(folder / "saved")
    return [
        source.read(i, 0, shard.num_rows or 0).to_pylist() for i, shard in enumerate(source.shards)
    ]


def verified(folder: Path) -> None:
    verify(folder)


def ways(value: Any, way: Way = ()) -> Iterator[Way]:
    """To every value within, itself left out."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inside:
        yield *way, key
        if isinstance(one, dict | list):
            yield from ways(one, (*way, key))


def lied(values: dict[str, Any], way: Way, lie: Any) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    node: Any = changed
    for key in way[:-1]:
        node = node[key]
    if lie is GONE:
        del node[way[-1]]
    else:
        node[way[-1]] = lie
    return changed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lies")
    jsonl(folder / "rows.jsonl", [*({"text": text} for text in texts(24, 3, 12)), {"text": None}])
    chain(folder).save().build()
    batches(folder)
    return folder


def wrong_answers(
    folder: Path, pattern: str, read: Callable[[Path], Any], forget: str = ""
) -> list[str]:
    """What is neither the answer of before nor an error that names the file, for each lie."""
    expected, found = read(folder), list[str]()
    whole = folder.parent / f"{folder.name}-whole"
    shutil.rmtree(whole, ignore_errors=True)
    shutil.copytree(folder, whole)
    paths = [path for path in folder.glob(pattern) if path.is_file()]
    assert paths
    for path in paths:
        values = read_checked(path)
        for n, way in enumerate(ways(values)):
            for lie in LIES[n % 7 :: 7]:  # two of them: all take minutes
                commit_checked(path, lied(values, way, lie))
                if forget:
                    shutil.rmtree(folder / forget)
                name = f"{path.parent.name} {'.'.join(map(str, way))} {lie!r}"
                try:
                    answer = read(folder)
                    if answer != expected:
                        found.append(f"{name}: another answer")
                except EasypipeError as error:
                    said = f"{error} {' '.join(getattr(error, '__notes__', ()))}"
                    if str(folder) not in said and "dataset 'one'" not in said:
                        found.append(f"{name}: {error}")
                except Exception as error:  # noqa: BLE001  (what is looked for)
                    found.append(f"{name}: {type(error).__name__}: {error}")
                shutil.rmtree(folder)
                shutil.copytree(whole, folder)
    return found


@pytest.mark.parametrize(
    ("pattern", "read", "forget"),
    [
        ("cache/manifests/*.json", batches, ""),
        ("cache/ranges/*/*.json", batches, "cache/manifests"),
        ("cache/plans/*.json", batches, ""),
        ("cache/indexes/*.json", batches, ""),
        ("cache/proofs/*.json", batches, "cache/manifests"),
        ("saved/_easypipe.json", saved_rows, ""),
        ("cache/*/*.json", lambda folder: verified(folder / "cache"), ""),
        ("saved/_easypipe.json", lambda folder: verified(folder / "saved"), ""),
    ],
)
def test_a_signed_lie_reaches_no_batch(
    made: Path, pattern: str, read: Callable[[Path], Any], forget: str
) -> None:
    assert wrong_answers(made, pattern, read, forget) == []


DRAWN = {"name": "a", "requested": 0.5, "realised": 0.25, "drawn": 7, "epochs": 0.5}
SHARES = {"step": 2, "requested": {"a": 1.0}, "realised": {"a": 1.0}, "lately": {"a": 1.0}}
RUN: dict[str, Any] = {
    "plan.json": {
        "unit": "rows",
        "steps": 2,
        "datasets": [DRAWN | {"tokens_placed": 9}, DRAWN | {"name": "b", "tokens_placed": 9}],
        "by_step": [SHARES],
        "notes": ["one"],
    },
    "ledger.json": {
        "entries": [
            {"stage": "mix", "dataset": "a", "unit": "documents", "in": {"x": 3}, "out": {"y": 3}}
        ],
        "facts": {"tokenize": {"a": {"seconds": 0.5}}},
    },
    "versions.json": [{"from_step": 0, "jax": "1", "devices": 1}],
    "changes.json": [{"step": 1, "row": 2, "changed": {"train.steps": "was 1"}, "before": None}],
    "fingerprints.json": {"train": {"plan": "0"}, "eval": {"a": {"plan": "0"}}},
    "best.json": [{"step": 2, "loss": 0.5, "checkpoint": "checkpoints/2"}],
    "restarts.json": [{"step": 1, "time": "2026-01-31 10:00:00"}],
}


@pytest.mark.parametrize("name", RUN)
def test_a_signed_lie_in_a_run_s_folder_ends_no_page(tmp_path: Path, name: str) -> None:
    """Pages are for people: what stands there is shown, or said to be damaged."""
    with MetricsFile(tmp_path / "metrics.jsonl", after_step=0) as file:
        for step in (1, 2):
            file.append({"step": step, "loss": 1.0, "seconds": 0.1})
    for other, value in RUN.items():
        write_kept(tmp_path / other, value)
    for n, way in enumerate(ways(RUN[name])):
        for lie in LIES[n % 7 :: 7]:
            write_kept(tmp_path / name, lied(RUN[name], way, lie))
            write_report(tmp_path)


def test_documents_that_end_outside_of_their_file_are_not_read(made: Path, tmp_path: Path) -> None:
    """A kernel reads where the offsets say: what lies there may be another file, or nothing."""
    folder = tmp_path / "lies"
    shutil.copytree(made, folder)
    chain(folder).prepare()
    manifests = [*(folder / "cache" / "manifests").glob("*[0-9a-f].json")]
    for manifest in manifests:
        values = read_checked(manifest)
        [part] = values["parts"]
        file = folder / "cache" / "tokens" / part["file"]
        data = file.read_bytes()
        offsets = pa.ipc.open_file(data).get_batch(0).column("input_ids").offsets.to_numpy()
        false = offsets.copy()
        false[1] = 1 << 40
        assert data.count(offsets.tobytes()) == 1
        data = data.replace(offsets.tobytes(), false.tobytes())
        file.write_bytes(data)
        part |= {"checksum": xxh3_128_hexdigest(data), "blocks": block_sums(data)}
        commit_checked(manifest, values)
    with pytest.raises(CacheError, match=r"\.arrow: cannot be read: .*offset.*only this range"):
        batches(folder)


def test_what_is_wrong_is_said(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "lies"
    shutil.copytree(made, folder)
    [manifest] = (folder / "cache" / "manifests").glob("*[0-9a-f].json")
    column = {"name": "w", "dtype": "datetime64[s]", "width": 0}
    commit_checked(manifest, read_checked(manifest) | {"aligned": [column]})
    with pytest.raises(CacheError, match=r"manifest: datetime64\[s\] are not numbers\. Delete it"):
        read_manifest(manifest)
    saved = folder / "saved" / "_easypipe.json"
    commit_checked(saved, read_checked(saved) | {"num_rows": 10**15})
    with pytest.raises(CacheError, match=r"10{15} rows of \d+ tokens, its shards have"):
        load_saved(folder / "saved")
    expected = batches(folder)
    for index in (folder / "cache" / "indexes").glob("*.json"):
        commit_checked(index, read_checked(index) | {"rows": "", "offsets": ""})
    assert batches(folder) == expected
    assert "it has no entries" in caplog.text
