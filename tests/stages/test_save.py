"""Saved folders: they read back as what was saved, stop and go on at any step, and never take what is not theirs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
from easypipe import (
    CacheError,
    ConfigError,
    DatasetConfig,
    MissingFileError,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    StorageError,
    tokenize_and_save,
)
from easypipe.core import storage
from easypipe.core.protocols import Shard
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.sources.memory import InMemoryShardedSource
from easypipe.stages.layout import default_shard_bytes, shard_edges
from easypipe.stages.save import parse_bytes
from easypipe.stages.saved import MANIFEST, SavedSource
from easypipe.stages.shard_writer import CODECS
from pipelines import config, jsonl, texts, tokenizer

MIX = MixStageConfig(weights={"code": 0.7, "docs": 0.3}, stop_strategy="all_exhausted")
EVERY = [(kind, codec) for kind, codecs in CODECS.items() for codec in codecs]


def packed(tmp_path: Path, **options: object) -> Pipeline:
    return Pipeline(config(tmp_path, **options)).source().tokenize().mix(MIX).pack(PackStageConfig(seq_length=64))


def table(source: object) -> pa.Table:
    batches = [source.read(i, 0, shard.num_rows) for i, shard in enumerate(source.shards)]
    return pa.Table.from_batches(batches, schema=source.schema).combine_chunks()


@pytest.mark.parametrize(("kind", "codec"), EVERY)
def test_packed_rows_read_back_as_they_were(tmp_path: Path, kind: str, codec: str) -> None:
    pipeline = packed(tmp_path)
    report = pipeline.save(SaveStageConfig(output_dir=tmp_path / "out", format=kind, compression=codec, num_shards=3)).build()
    [folder] = report.folders
    source = pipeline.get_data()["mixed"]
    assert (folder.num_shards, folder.num_rows) == (3, source.shards[0].num_rows)
    again = SavedSource(tmp_path / "out")
    assert table(again).equals(table(source))
    assert again.tokens == source.tokens
    laws.assert_stateless_reads(again)
    laws.assert_conserved(report.ledger)
    files = sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != MANIFEST)
    assert len(files) == 3
    assert all(name.endswith(f"-of-00003{CODECS[kind][codec]}") for name in files)


@pytest.mark.parametrize("kind", list(CODECS))
def test_documents_read_back_and_can_be_mixed_and_packed_again(tmp_path: Path, kind: str) -> None:
    straight = packed(tmp_path).get_data()["mixed"]
    Pipeline(config(tmp_path)).source().tokenize().save(SaveStageConfig(output_dir=tmp_path / "out", format=kind)).build()
    datasets = [DatasetConfig(name=name, data_files=tmp_path / "out" / name) for name in ("code", "docs")]
    again = packed(tmp_path, datasets=datasets, default_tokenizer=None).get_data()["mixed"]
    assert table(again).equals(table(straight))


def test_saved_documents_of_a_mixture_keep_their_origin(tmp_path: Path) -> None:
    pipeline = Pipeline(config(tmp_path)).source().tokenize().mix(MIX)
    pipeline.save(SaveStageConfig(output_dir=tmp_path / "out")).build()
    assert table(SavedSource(tmp_path / "out")).equals(table(pipeline.get_data()["mixed"]))
    assert set(pq.read_table(next((tmp_path / "out").glob("*.parquet"))).column("__source__").to_pylist()) == {"code", "docs"}


def test_text_can_be_saved_as_it_is(tmp_path: Path) -> None:
    """Rows that the source refuses are counted by reason, blank lines included."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\nbroken\n')
    dataset = DatasetConfig(name="x", data_files=path, on_error="skip")
    report = Pipeline(config(tmp_path, datasets=[dataset])).source().save(SaveStageConfig(output_dir=tmp_path / "out")).build()
    assert report.ledger.find("save", "x", "rows").into == {"read": 4}
    assert report.ledger.find("save", "x", "rows").out == {"saved": 2, "blank_line": 1, "unparsable": 1}
    assert pq.read_table(next((tmp_path / "out").glob("*.parquet"))).column("text").to_pylist() == ["a", "b"]


# going on, being up to date, replacing


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_second_run_is_up_to_date(tmp_path: Path) -> None:
    save = SaveStageConfig(output_dir=tmp_path / "out", num_shards=3)
    assert not packed(tmp_path).save(save).build().folders[0].up_to_date
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    report = packed(tmp_path).save(save).build()
    assert report.folders[0].up_to_date
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    laws.assert_conserved(report.ledger)


class Killed(BaseException):
    pass


def test_killed_at_every_step_it_goes_on_and_leaves_the_same_folder(tmp_path: Path) -> None:
    def save(folder: Path) -> Pipeline:
        return packed(tmp_path).save(SaveStageConfig(output_dir=folder, num_shards=3))

    save(tmp_path / "whole").build()
    whole = contents(tmp_path / "whole")
    finished = set()
    for step in range(200):
        seen = 0

        def hook(what: str, path: str, step: int = step) -> None:
            nonlocal seen
            seen += 1
            if seen == step + 1:
                raise Killed(f"{what} {path}")

        folder = tmp_path / f"killed-{step}"
        storage.set_fault_hook(hook)
        try:
            save(folder).build()
            break
        except Killed:
            pass
        finally:
            storage.set_fault_hook(None)
        report = save(folder).build()
        finished.add(report.folders[0].resumed_shards)
        assert contents(folder) == whole, f"killed at step {step}"
    assert step > 20
    assert finished >= {0, 1, 2}, "no run found shards that were finished"


def test_a_real_kill_leaves_finished_shards(tmp_path: Path) -> None:
    """kill -9 after the first shard record, in another process; the next run writes the others only."""
    job = (
        "import os, signal\nfrom pathlib import Path\nfrom easypipe import *\nfrom easypipe.core import storage\n"
        f"here = Path({str(tmp_path)!r})\n"
        "def hook(step, path):\n"
        "    if step == 'committed' and '_shards' in path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "storage.set_fault_hook(hook if os.environ.get('KILL') else None)\n"
        "config = PipelineConfig(datasets=[DatasetConfig(name='x', data_files=str(here / 'x.jsonl'))],\n"
        f"    default_tokenizer={tokenizer()!r}, seed=1, cache_dir=here / 'cache')\n"
        "pipeline = Pipeline(config).source().tokenize().pack(PackStageConfig(seq_length=64))\n"
        "report = pipeline.save(SaveStageConfig(output_dir=here / 'out', num_shards=4)).build()\n"
        "print(report.folders[0].resumed_shards)\n"
    )
    jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts(80)])
    killed = subprocess.run([sys.executable, "-c", job], env=os.environ | {"KILL": "1"}, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "out" / MANIFEST).exists()
    done = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1
    assert not list((tmp_path / "out").glob(".tmp-*"))
    assert SavedSource(tmp_path / "out").manifest.num_rows > 0


def test_another_run_is_refused_until_overwrite_replaces_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=3)).build()
    old = set(contents(out))
    with pytest.raises(ConfigError) as caught:
        packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2)).build()
    assert "holds another saved run" in str(caught.value)
    assert "in 3 parquet shards. Choose another folder, or set overwrite=True to replace it." in str(caught.value)
    packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2, overwrite=True)).build()
    assert set(contents(out)) & old == {MANIFEST}
    assert len(SavedSource(out).manifest.shards) == 2


def test_the_old_run_stays_readable_until_the_new_one_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=3)).build()
    before = table(SavedSource(out))

    def hook(what: str, path: str) -> None:
        if what == "rename" and path.endswith(MANIFEST):
            raise Killed

    storage.set_fault_hook(hook)
    with pytest.raises(Killed):
        packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2, overwrite=True)).build()
    storage.set_fault_hook(None)
    assert table(SavedSource(out)).equals(before)
    report = packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2)).build()  # its own claim stands there
    assert report.folders[0].resumed_shards == 2
    assert sum(path.suffix == ".parquet" for path in out.iterdir()) == 2


def test_foreign_files_are_never_taken_or_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"save.output_dir=.*: is not empty: thesis.txt. Choose another folder, or set overwrite=True"):
        packed(tmp_path).save(SaveStageConfig(output_dir=out)).build()
    packed(tmp_path).save(SaveStageConfig(output_dir=out, overwrite=True)).build()
    assert (out / "thesis.txt").read_text() == "mine"


def test_a_shard_that_is_lost_or_cut_is_noticed_and_written_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save = SaveStageConfig(output_dir=out, num_shards=3)
    packed(tmp_path).save(save).build()
    whole = contents(out)
    first, second = sorted(out.glob("*.parquet"))[:2]
    first.write_bytes(first.read_bytes()[:-10])
    with pytest.raises(CacheError, match=r"the manifest says \d+. Save the data again"):
        SavedSource(out)
    first.unlink()
    with pytest.raises(MissingFileError, match="named by the manifest, but not there"):
        SavedSource(out)
    report = packed(tmp_path).save(save).build()
    assert (report.folders[0].resumed_shards, report.folders[0].up_to_date) == (2, False)
    assert contents(out) == whole
    assert second.exists()


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(tmp_path).save(SaveStageConfig(output_dir=out)).build()
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(CacheError, match=r"format version 99, this easypipe reads 1. Save the data again"):
        SavedSource(out)


# shards


@pytest.mark.parametrize(("size", "expected"), [(500, 500), ("500", 500), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("2gib", 2 << 30)])
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "many", "5 parsecs", "0", -3])
def test_sizes_that_are_none(size: int | str) -> None:
    with pytest.raises(ConfigError, match=r"max_shard_size: .* is no size"):
        SaveStageConfig(output_dir="x", max_shard_size=size)


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60), limit=st.integers(1, 600))
def test_shards_stay_below_their_size(lengths: list[int], limit: int) -> None:
    source = InMemoryShardedSource({"text": ["x" * n for n in lengths]})
    edges = shard_edges(source, num_shards=None, max_bytes=limit)
    assert edges[0] == 0
    assert edges[-1] == len(lengths)
    assert (edges[1:] > edges[:-1]).all()
    for a, b in itertools.pairwise(edges):
        size = sum(n + 8 for n in lengths[a:b])
        assert size <= limit or b - a == 1
        if b < len(lengths):
            assert size + lengths[b] + 8 > limit, "the next row would have fitted"


def test_more_shards_than_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save.num_shards: 1000 shards for (\d+) rows. Ask for at most \1."):
        packed(tmp_path).save(SaveStageConfig(output_dir=tmp_path / "out", num_shards=1000)).build()


def test_shards_that_cannot_keep_to_the_size(tmp_path: Path) -> None:
    def save(**options: object) -> None:
        packed(tmp_path).save(SaveStageConfig(output_dir=tmp_path / "out", **options)).build()

    with pytest.raises(ConfigError, match=r"save.max_shard_size: of 2 shards one would hold .* the limit is 2,000.") as caught:
        save(num_shards=2, max_shard_size="2KB")
    needed = int(str(caught.value).rpartition("max_shard_size=")[2].split(",")[0])
    save(num_shards=2, max_shard_size=needed)
    save(max_shard_size="2KB", overwrite=True)


@pytest.mark.parametrize(("kind", "codec"), [("arrow", "gzip"), ("jsonl", "lz4")])
def test_codecs_that_a_format_does_not_have(kind: str, codec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SaveStageConfig(output_dir="x", format=kind, compression=codec)
    have = ", ".join(CODECS[kind])
    assert str(caught.value) == f"compression: {kind} files cannot be compressed with {codec} (have: {have}). Choose one of these."


# places


def test_each_dataset_has_its_own_folder_or_save_path(tmp_path: Path) -> None:
    datasets = [
        DatasetConfig(name="a", data_files=[{"text": "one"}], save_path=tmp_path / "elsewhere", save_format="jsonl"),
        DatasetConfig(name="b", data_files=[{"text": "two"}]),
    ]
    pipeline = Pipeline(config(tmp_path, datasets=datasets)).source().tokenize()
    report = pipeline.save(SaveStageConfig(output_dir=tmp_path / "out")).build()
    assert [(folder.path, folder.format) for folder in report.folders] == [
        (str(tmp_path / "elsewhere"), "jsonl"),
        (str(tmp_path / "out" / "b"), "parquet"),
    ]
    with pytest.raises(ConfigError, match=r"datasets.a.save_path: has no effect after mix\(\)"):
        Pipeline(config(tmp_path, datasets=datasets)).source().tokenize().mix(MixStageConfig(stop_strategy="all_exhausted")).save(
            SaveStageConfig(output_dir=tmp_path / "mixed")
        )


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save.output_dir: no folder for dataset 'mixed'"):
        packed(tmp_path).save()


def test_an_endless_mixture_cannot_be_saved(tmp_path: Path) -> None:
    mixture = Pipeline(config(tmp_path)).source().tokenize().mix()
    with pytest.raises(ConfigError) as caught:
        mixture.copy().save(SaveStageConfig(output_dir=tmp_path / "out"))
    assert str(caught.value) == (
        "save: 'mixed' never ends: its stop_strategy is 'restart'. Set mix.stop_strategy to 'first_exhausted' or 'all_exhausted'."
    )
    for stop in ("first_exhausted", "all_exhausted"):
        pipeline = Pipeline(config(tmp_path)).source().tokenize().mix(MixStageConfig(stop_strategy=stop))
        pipeline.save(SaveStageConfig(output_dir=tmp_path / stop)).build()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((StorageError, ConfigError, NotADirectoryError)) as caught:
        packed(tmp_path).save(SaveStageConfig(output_dir=tmp_path / "file" / "out")).build()
    assert str(tmp_path / "file") in str(caught.value)


def test_disabled_save_writes_nothing(tmp_path: Path) -> None:
    report = packed(tmp_path).save(SaveStageConfig(enabled=False, output_dir=tmp_path / "out")).build()
    assert report.folders == ()
    assert not (tmp_path / "out").exists()


def test_rows_without_end_tokens_and_counts(tmp_path: Path) -> None:
    report = tokenize_and_save(str(jsonl(tmp_path / "x.jsonl", [{"text": t} for t in texts(30)])), tokenizer(), tmp_path / "out")
    saved = SavedSource(tmp_path / "out")
    assert report.folders[0].num_tokens == sum(len(row[INPUT_IDS]) for row in table(saved).to_pylist())
    assert SEGMENT_IDS not in saved.schema.names


def test_memory_filesystem(tmp_path: Path) -> None:
    """Remote folders go the same way: through fsspec, manifest last."""
    url = f"memory://{tmp_path.name}/out"
    packed(tmp_path).save(SaveStageConfig(output_dir=url, num_shards=2)).build()
    assert packed(tmp_path).save(SaveStageConfig(output_dir=url, num_shards=2)).build().folders[0].up_to_date
    again = Pipeline(PipelineConfig(datasets=[DatasetConfig(data_files=url)], seed=1, cache_dir=tmp_path / "cache")).source()
    assert table(again.get_data()["dataset1"]).equals(table(packed(tmp_path).get_data()["mixed"]))


@pytest.mark.parametrize(("megabytes", "shards"), [(1, 16 << 20), (400, 50 << 20), (1 << 20, 500 << 20)])
def test_default_size_of_a_shard(megabytes: int, shards: int) -> None:
    assert default_shard_bytes([Shard(name="x", num_rows=1, num_bytes=megabytes << 20)]) == shards
