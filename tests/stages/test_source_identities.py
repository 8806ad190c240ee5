"""Which identity every option of a dataset changes: one that decides rows changes the fingerprint of
its source, cached and streaming, and that of its shards, by which their tokens are found again
(test_encoding_keys.py has the options that decide what becomes of the rows).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easypipe import DatasetConfig, Pipeline, PipelineConfig
from easypipe.core.config import from_dict
from easypipe.core.protocols import identity_of
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.transforms.columns.hold_out import HoldOutConfig
from pipelines import jsonl
from stages import test_encoding_keys


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"] * 2}


def tripled(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"] * 3}


def letters() -> list[dict[str, Any]]:
    return [{"text": letter} for letter in "abc"]


def figures() -> list[dict[str, Any]]:
    return [{"text": letter} for letter in "123"]


HELD = {"hold_out": {"fraction": 0.5}}
CALLED = {"format_callback": doubled, "format_version": "1"}
TOKENS = {"data_files": "tokens.bin", "token_files": {"dtype": "uint16", "separator_id": 7}}
BASES: dict[str, dict[str, Any]] = {
    "lines": {"data_files": "a.jsonl"},
    "text": {"data_files": "a.txt"},
    "held out": {"data_files": "a.jsonl"} | HELD,
    "called": {"data_files": "a.jsonl"} | CALLED,
    "tokens": TOKENS,
    "blocks": TOKENS | {"token_files": {"dtype": "uint16", "document_tokens": 2}},
    "own": {"data_files": letters, "version": 1},
}
BOTH, NOTHING = "fingerprint identity", ""
ROWS = "fingerprint"  # which rows of a shard are read; what each is, is as it was
# of a base, an option becomes a value; the identities of cached rows that change, and of streamed
# ones, where those are others
CHANGES: list[tuple[str, str, Any, str, str | None]] = [
    ("lines", "data_files", "b.jsonl", BOTH, None),
    ("lines", "type", "txt", BOTH, None),
    ("lines", "type", "jsonl", NOTHING, None),
    ("lines", "split", "train[:50%]", ROWS, None),
    ("lines", "split", "train[50%:]", BOTH, None),
    ("lines", "num_rows", 3, ROWS, None),
    ("lines", "num_rows", 4, ROWS, None),
    ("lines", "hold_out", {"fraction": 0.5}, BOTH, None),
    ("held out", "hold_out.fraction", 0.4, BOTH, None),
    ("held out", "hold_out.seed", 1, BOTH, None),
    ("held out", "hold_out.held", True, BOTH, None),
    ("lines", "format_fields", {"text": "body"}, BOTH, None),
    ("lines", "format_callback", doubled, BOTH, None),
    ("called", "format_callback", tripled, BOTH, None),
    ("called", "format_version", "2", BOTH, None),
    ("called", "format_batched", True, BOTH, None),
    ("called", "format_columns", {"more": "int64"}, BOTH, None),
    ("lines", "on_error", "skip", BOTH, "identity"),
    ("text", "text_unit", "line", NOTHING, None),
    ("text", "text_unit", "paragraph", BOTH, None),
    ("text", "text_unit", "file", BOTH, None),
    ("tokens", "token_files.dtype", "uint8", BOTH, None),
    ("tokens", "token_files.separator_id", 8, BOTH, None),
    ("blocks", "token_files.document_tokens", 3, BOTH, None),
    ("own", "version", 2, BOTH, None),
    ("own", "data_files", figures, BOTH, None),
    ("lines", "storage_options", {"use_listings_cache": False}, NOTHING, None),
]
ELSEWHERE = {
    "name": "told, and decides nothing",
    "subset": "of the Hub: tests/sources/test_hub.py",
    "revision": "of the Hub: tests/sources/test_hub.py",
    "cache_path": "where tokens lie",
    "save_path": "where rows go",
    "save_format": "where rows go",
    "tokenizer_kwargs": "options of the tokenizer: `tokenizer.` there",
    "aligned_columns": "of rows that are tokens: tests/stages/test_formats.py",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rows")
    for name, count in (("a", 9), ("b", 10)):
        jsonl(made / f"{name}.jsonl", [{"text": f"row {i}", "n": i} for i in range(count)])
    (made / "a.txt").write_text("one\ntwo\n\nthree\n")
    np.array([1, 7, 2, 8, 3, 7], np.uint16).tofile(made / "tokens.bin")
    return made


def identities(folder: Path, values: dict[str, Any], *, streaming: bool) -> dict[str, str]:
    files = values["data_files"]
    values = values | {"data_files": str(folder / files) if isinstance(files, str) else files}
    dataset = from_dict(DatasetConfig, {"name": "d", **values})
    made = PipelineConfig(
        datasets=[dataset], seed=1, cache_dir=folder / "cache", streaming=streaming
    )
    source = Pipeline(made).source().get_data()["d"]
    return {"fingerprint": source.fingerprint, "identity": identity_of(source, 0)}


def over(values: dict[str, Any], option: str, value: Any) -> dict[str, Any]:
    part, _, name = option.rpartition(".")
    return values | ({option: value} if not part else {part: {**values[part], name: value}})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("base", "option", "value", "cached", "streamed"), CHANGES, ids=lambda one: str(one)[:20]
)
def test_an_option_changes_the_identities_of_the_rows_that_it_decides(
    folder: Path,
    base: str,
    option: str,
    value: Any,
    cached: str,
    streamed: str | None,
    streaming: bool,
) -> None:
    expected = streamed if streaming and streamed is not None else cached
    was = identities(folder, BASES[base], streaming=streaming)
    now = identities(folder, over(BASES[base], option, value), streaming=streaming)
    assert {name for name in was if was[name] != now[name]} == set(expected.split())
    assert identities(folder, BASES[base], streaming=streaming) == was


def test_every_option_of_a_dataset_is_tried() -> None:
    keys = test_encoding_keys.CHANGES + test_encoding_keys.SAME
    tried = {option for _, option, *_ in CHANGES} | {option for _, option, _ in keys}
    tried |= {option.partition(".")[0] for option in tried}
    for prefix, kind in (
        ("", DatasetConfig),
        ("hold_out.", HoldOutConfig),
        ("token_files.", TokenFilesConfig),
    ):
        names = {prefix + field.name for field in dataclasses.fields(kind)}
        assert names - tried <= {*ELSEWHERE}
    assert not tried & {*ELSEWHERE}
