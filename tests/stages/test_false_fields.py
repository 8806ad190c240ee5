"""Each field of each JSON file that easypipe keeps for itself, one by one, as another value.

Where nobody signed the change it is found by the file's checksum. Where somebody did, `verify` finds
it in what the other files say; what is left is for people to read, and changes no batch.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easypipe import LoaderState, Pipeline
from easypipe.core.checked import KEY, checked_json, commit_checked, parse_checked, read_checked
from easypipe.core.config import to_dict
from easypipe.core.errors import DamagedFileError, StateError
from easypipe.save.verify import verify
from pipelines import config, jsonl, texts

WORDS = texts(24, 3, 12)
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [*({"text": text} for text in WORDS), {"text": None}],
    "pairs": [{"prompt": a, "chosen": b, "rejected": a} for a, b in itertools.pairwise(WORDS)],
    "verdicts": [{"prompt": a, "chosen": a, "good": len(a) % 2 > 0} for a in WORDS],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"on_error": "quarantine"},
    "pairs": {"prompt_field": "prompt", "completion_field": "chosen", "rejected_field": "rejected"},
    "verdicts": {"prompt_field": "prompt", "completion_field": "chosen", "desirable_field": "good"},
}
# What no other file says: names, measurements, and why a row is none.
TOLD = re.compile(
    r"dataset|content_field|shard_names\.\d+|facts\..*|tokenizer\.bos_token_id|quarantine_checksum"
    r"|shard_name|text|text_bytes|encoder|counts\.rejects\..*|rejects\..*|compression|fingerprint|schema|columns\..*"
    r"|ledger\.entries\.\d+\.(dataset|stage|unit)"
)
Way = tuple[str | int, ...]


def chain(folder: Path, kind: str) -> Pipeline:
    jsonl(folder / "rows.jsonl", ROWS[kind])
    values = to_dict(config(folder)) | {
        "pack": {"seq_length": 64, "oversize": "drop"},
        "load": {"batch_size": 2},
    }
    data = {"name": "one", "data_files": str(folder / "rows.jsonl"), **OPTIONS[kind]}
    values |= {"datasets": [data], "save": {"output_dir": str(folder / "saved"), "num_shards": 2}}
    return Pipeline.from_config(values).source().tokenize().mix().pack()


def batches(folder: Path, kind: str) -> list[bytes]:
    loader = chain(folder, kind).load().build()
    return [np.asarray(batch[name]).tobytes() for batch in loader for name in sorted(batch)]


def fields(value: Any, way: Way = ()) -> Iterator[Way]:
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inside:
        if isinstance(one, dict | list):
            yield from fields(one, (*way, key))
        else:
            yield *way, key


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | None):
        return (value or 0) + 1
    return value[:-1] + ("1" if value[-1:] == "0" else "0")


def falsified(values: dict[str, Any], way: Way) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    node: Any = changed
    for key in way[:-1]:
        node = node[key]
    node[way[-1]] = another(node[way[-1]])
    return changed


@pytest.fixture(scope="module", params=list(ROWS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    chain(folder, kind).save().build()
    expected = batches(folder, kind)
    assert all(one.ok for place in ("cache", "saved") for one in verify(folder / place))
    return folder, kind, expected


def test_what_nobody_signed_is_found(made: tuple[Path, str, list[bytes]]) -> None:
    folder, kind, _ = made
    files = [path for path in folder.rglob("*.json") if KEY in path.read_text()]
    kinds = {path.relative_to(folder).parts[:2] for path in files}
    assert {("cache", name) for name in ("manifests", "ranges", "plans", "indexes", "configs")} <= {
        *kinds
    }
    tried = 0
    for path in files:
        values = read_checked(path)
        signed = json.loads(path.read_bytes())[KEY].encode()
        assert parse_checked(path.read_bytes(), path) == values
        for way in fields(values):
            data = checked_json(falsified(values, way))
            own = json.loads(data)[KEY].encode()
            assert own != signed
            with pytest.raises(DamagedFileError, match="its checksum does not match"):
                parse_checked(data.replace(own, signed, 1), path)
            tried += 1
    assert tried > 100
    loader = chain(folder, kind).load().build()
    next(iter(loader))
    state = json.loads(loader.state().to_json())
    for way in fields(state):
        with pytest.raises(StateError):
            LoaderState.from_json(json.dumps(falsified(state, way)))


def test_what_was_signed_is_found_or_told_alone(made: tuple[Path, str, list[bytes]]) -> None:
    folder, kind, expected = made
    manifests = [*(folder / "cache" / "manifests").glob("*[0-9a-f].json")]
    records = [*(folder / "cache" / "ranges").rglob("*.json")]
    saved = [*(folder / "saved").glob("_easypipe.json")]
    believed: list[str] = []
    whole = {path: path.read_bytes() for path in manifests}
    for path in (*manifests, *records, *saved):
        values, before = read_checked(path), path.read_bytes()
        for way in fields(values):
            commit_checked(path, falsified(values, way))
            where = folder / "saved" if path in saved else folder / "cache"
            found = verify(where)
            told = [problem for one in found for problem in one.problems]
            assert all(one.file for one in told if not one.at.startswith("tokenizer"))  # to repair
            if all(one.ok and not one.notes for one in found):
                name = ".".join(map(str, way))
                if path in records:  # which are read where there is no manifest
                    for manifest in manifests:
                        manifest.unlink()
                if path not in saved:
                    assert batches(folder, kind) == expected, name
                if path.read_bytes() != before:
                    believed.append(f"{path.parent.name}/{name}")
                for manifest in manifests:
                    manifest.write_bytes(whole[manifest])
            path.write_bytes(before)
    assert [one for one in believed if not TOLD.fullmatch(one.partition("/")[2])] == []
    assert batches(folder, kind) == expected
