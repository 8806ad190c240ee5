"""What a document of a text file is: a line, a paragraph, the file."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from easypipe import DatasetConfig, Pipeline, PipelineConfig, SaveStageConfig
from easypipe.core.errors import ConfigError
from easypipe.core.schema import ROW_NUMBER
from easypipe.jobs import chain
from easypipe.sources.formats import records
from easypipe.sources.open import open_files
from laws import assert_stateless_reads
from strategies import examples, row_cuts
from token_support import small_tokenizer_folder

POEM = "\n\n  Roses are red,\r\n  violets é blue.\r\n \t\r\n\nSugar\nis\nsweet\n   \nand so"
PACKINGS = {"a.txt": bytes, "a.txt.gz": gzip.compress, "a.txt.zst": zstandard.compress}


def paragraphs(data: bytes) -> list[str]:
    """What split_paragraphs should find, a line at a time."""
    found: list[list[bytes]] = [[]]
    for line in data.split(b"\n"):
        if line.strip(b" \t\r\n"):
            found[-1].append(line)
        else:
            found.append([])
    return [b"\n".join(lines).removesuffix(b"\r").decode() for lines in found if lines]


def config(folder: Path, files: Any, **options: Any) -> PipelineConfig:
    return PipelineConfig(
        datasets=(
            DatasetConfig(name="d", data_files=files, text_unit=options.pop("text_unit", None)),
        ),
        default_tokenizer=str(small_tokenizer_folder()),
        cache_dir=folder,
        seed=1,
        **options,
    )


def documents(folder: Path, files: Any, **options: Any) -> list[str]:
    (source,) = Pipeline(config(folder, files, **options)).source().tokenize().get_data().values()
    cache: Any = source.materialize()
    rows = [
        row
        for s, shard in enumerate(cache.shards)
        for row in cache.read(s, 0, shard.num_rows).column("input_ids").to_pylist()
    ]
    return [source.tokenizer.decode(row) for row in rows]


@examples(60)
@given(
    text=st.text(st.sampled_from("ab \n\n\r\té日"), max_size=60),
    mark=st.booleans(),
    name=st.sampled_from(sorted(PACKINGS)),
    cuts=row_cuts(),
)
def test_paragraphs(
    tmp_path_factory: pytest.TempPathFactory, text: str, mark: bool, name: str, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("rows") / name
    path.write_bytes(PACKINGS[name](b"\xef\xbb\xbf" * mark + f"{text}\nx".encode()))
    sizes = {
        "ENTRY_ROWS": 2,
        "ENTRY_BYTES": 20,
        "CHUNK_BYTES": 8,
        "PIECE_BYTES": 16,
        "BATCH_RECORDS": 2,
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in sizes.items():
            patch.setattr(records, key, value)
        source = open_files(path, text_unit="paragraph")
        assert_stateless_reads(source, cuts)
        found = source.read(0, 0, source.shards[0].num_rows or 0)
    assert found.column("text").to_pylist() == paragraphs(f"{text}\nx".encode())
    assert found.column(ROW_NUMBER).to_pylist() == list(range(found.num_rows))


@pytest.mark.parametrize("name", PACKINGS)
def test_what_each_unit_gives(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(PACKINGS[name](POEM.encode()))
    lines = ["  Roses are red,", "  violets é blue.", "Sugar", "is", "sweet", "and so"]
    assert (
        documents(tmp_path / "c", str(path))
        == documents(tmp_path / "c", str(path), text_unit="line")
        == lines
    )
    found = ["  Roses are red,\r\n  violets é blue.", "Sugar\nis\nsweet", "and so"]
    assert documents(tmp_path / "c", str(path), text_unit="paragraph") == found
    assert documents(tmp_path / "c", str(path), text_unit="file") == [POEM]


def test_files_of_white_space_stay_as_they_are(tmp_path: Path) -> None:
    for name, text in {"a": "one\n", "b": " \n\n", "c": "\ufefftwo"}.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    assert documents(tmp_path / "c", str(tmp_path / "*.txt"), text_unit="file") == [
        "one\n",
        " \n\n",
        "two",
    ]


def test_the_line_of_a_bad_paragraph_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\n\n\nb\nc\n\n\xff\n")
    with pytest.raises(ValueError, match=r"a\.txt, row 2, line 7"):
        documents(tmp_path / "c", str(path), text_unit="paragraph")


def test_fingerprints(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(POEM)
    plain, *others = [open_files(path, text_unit=unit) for unit in (None, "paragraph", "file")]  # type: ignore[arg-type]
    assert open_files(path, text_unit="line").fingerprint == plain.fingerprint
    for each in ("fingerprint", "identity"):
        made = [
            source.fingerprint if each == "fingerprint" else source.shard_identity(0)
            for source in (plain, *others)
        ]
        assert len(set(made)) == 3


def test_streaming_saving_and_previews_know_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(POEM)
    load, pack = {"batch_size": 1, "num_epochs": 1, "prefetch_enabled": False}, {"seq_length": 64}
    for unit, count in {"line": 6, "paragraph": 3, "file": 1}.items():
        streamed = (
            Pipeline(config(tmp_path, str(path), text_unit=unit, streaming=True))
            .source()
            .tokenize()
            .pack(pack)
            .load(load)
            .build()
        )
        list(streamed)
        assert streamed.ledger().find("stream", "d", "rows").out["documents"] == count
        first = chain(config(tmp_path, str(path), text_unit=unit), first_rows=99).get_data()["d"]
        assert first.materialize().num_docs == count
        saved = tmp_path / unit
        Pipeline(config(tmp_path, str(path), text_unit=unit)).source().tokenize().save(
            SaveStageConfig(output_dir=saved)
        ).build()
        (again,) = Pipeline(config(tmp_path, str(saved))).source().get_data().values()
        assert sum(shard.num_rows or 0 for shard in again.shards) == count


def test_refusals(tmp_path: Path) -> None:
    for name, kind in {"a.jsonl": None, "a.bin": None, "a.txt": "json"}.items():
        with pytest.raises(ConfigError, match="text_unit: has no effect: these are not text files"):
            DatasetConfig(data_files=name, type=kind, text_unit="line")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="text_unit: has no effect: these are not text files"):
        DatasetConfig(data_files=[{"text": "a"}], text_unit="file")
    with pytest.raises(
        ConfigError, match=r"text_unit: 'page' is not an option \(have: line, paragraph, file\)"
    ):
        DatasetConfig(data_files="a.txt", text_unit="page")  # type: ignore[arg-type]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"text": "a"}\n')
    for streaming in (False, True):
        with pytest.raises(
            ConfigError,
            match=re.escape("datasets.d.text_unit: has no effect on json files. Leave it out"),
        ):
            Pipeline(
                config(tmp_path, str(tmp_path / "rows"), text_unit="line", streaming=streaming)
            ).source()
