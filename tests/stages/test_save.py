"""Saved folders: they read back as what was saved, stop and go on at any step, and never take what
is not theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

import forked
import laws
from easypipe import (
    BudgetError,
    CacheError,
    ConfigError,
    DatasetConfig,
    EasypipeError,
    MissingFileError,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    SaveStageConfig,
    StorageError,
    load_saved,
    tokenize_and_save,
)
from easypipe.core import storage
from easypipe.core.checked import commit_checked, read_checked
from easypipe.core.config import digest
from easypipe.core.protocols import ProgressEvent, Shard
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS, schema_text
from easypipe.jobs import chain as chain_of
from easypipe.save import sizes
from easypipe.save.card import CARD, HUB_CARD, YAML, public_name, size_category
from easypipe.save.config import CODECS, Compression, parse_bytes
from easypipe.save.saved import MANIFEST, SavedSource
from easypipe.save.shard_writer import check_json, open_writer
from easypipe.save.sizes import default_shard_bytes, edges_by_bytes, edges_by_size
from easypipe.save.verify import verify
from easypipe.save.write_folder import SavedFolder
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.open import open_files
from easypipe.stages.mix.mixture import PlannedSource
from easypipe.stages.source.interleave import block_mixture_interleave
from easypipe.transforms.columns.base import TransformedSource
from easypipe.transforms.columns.functions import Filter
from pipelines import config, jsonl, texts, tokenizer
from stores import SECRET, Store
from strategies import examples

MIX = MixStageConfig(weights={"code": 0.7, "docs": 0.3}, stop_strategy="all_exhausted")
EVERY = [(kind, codec) for kind, codecs in CODECS.items() for codec in codecs]


def packed(tmp_path: Path, **options: object) -> Pipeline:
    return (
        Pipeline(config(tmp_path, **options))
        .source()
        .tokenize()
        .mix(MIX)
        .pack(PackStageConfig(seq_length=64))
    )


def table(source: object) -> pa.Table:
    if isinstance(source, PlannedSource):
        source.prepare()
    batches = [source.read(i, 0, shard.num_rows) for i, shard in enumerate(source.shards)]
    return pa.Table.from_batches(batches, schema=source.schema).combine_chunks()


def test_rows_that_become_larger_are_not_written_at_once() -> None:
    given = pa.table({"text": ["bad"] + ["a"] * 300 + ["b" * 20_000] * 4000})
    test = Filter(lambda row: row["text"] != "bad" or None, version="1")
    source = TransformedSource(InMemoryShardedSource(given), test, on_error="skip")
    found = list(sizes.batches(source, 0, 4301))
    assert max(one.batch.nbytes for one in found) < 4 * sizes.BATCH_BYTES
    texts = pa.Table.from_batches([one.batch for one in found])["text"]
    assert texts.to_pylist() == given["text"].to_pylist()[1:]
    assert [reject.row for one in found for reject in one.rejects] == [0]


@pytest.mark.parametrize(("kind", "codec"), EVERY)
def test_packed_rows_read_back_as_they_were(tmp_path: Path, kind: str, codec: str) -> None:
    pipeline = packed(tmp_path)
    report = pipeline.save(
        SaveStageConfig(output_dir=tmp_path / "out", format=kind, compression=codec, num_shards=3)
    ).build()
    [folder] = report.folders
    source = pipeline.get_data()["mixed"]
    assert (folder.num_shards, folder.num_rows) == (3, source.prepare().shards[0].num_rows)
    again = SavedSource(tmp_path / "out")
    assert table(again).equals(table(source))
    assert again.tokens == source.tokens
    laws.assert_stateless_reads(again)
    datasets = [DatasetConfig(name="again", data_files=str(tmp_path / "out"))]
    loaded = Pipeline(config(tmp_path, datasets=datasets)).source().load({"batch_size": 2}).build()
    assert loaded.rows.seq_length == 64
    laws.assert_conserved(report.ledger)
    files = sorted(
        path.name
        for path in (tmp_path / "out").iterdir()
        if path.name not in (MANIFEST, CARD, YAML)
    )
    assert len(files) == 3
    packed_text = {"gzip": ".gz", "zstd": ".zst"} if kind == "jsonl" else {}
    assert all(name.endswith(f"-of-00003.{kind}{packed_text.get(codec, '')}") for name in files)


@pytest.mark.parametrize("kind", list(CODECS))
def test_documents_read_back_and_can_be_mixed_and_packed_again(tmp_path: Path, kind: str) -> None:
    straight = packed(tmp_path).get_data()["mixed"]
    Pipeline(config(tmp_path)).source().tokenize().save(
        SaveStageConfig(output_dir=tmp_path / "out", format=kind)
    ).build()
    datasets = [
        DatasetConfig(name=name, data_files=tmp_path / "out" / name) for name in ("code", "docs")
    ]
    again = packed(tmp_path, datasets=datasets, default_tokenizer=None).get_data()["mixed"]
    assert table(again).equals(table(straight))


def test_saved_documents_of_a_mixture_keep_their_origin(tmp_path: Path) -> None:
    pipeline = Pipeline(config(tmp_path)).source().tokenize().mix(MIX)
    pipeline.save(SaveStageConfig(output_dir=tmp_path / "out")).build()
    assert table(SavedSource(tmp_path / "out")).equals(table(pipeline.get_data()["mixed"]))
    assert set(
        pq.read_table(next((tmp_path / "out").glob("*.parquet"))).column("__source__").to_pylist()
    ) == {"code", "docs"}


def test_text_can_be_saved_as_it_is(tmp_path: Path) -> None:
    """Rows that the source refuses are counted by reason, blank lines included."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n\n\n{"text": "b"}\nbroken\n{"text": "c"}\n')
    dataset, save = (
        DatasetConfig(name="x", data_files=path, on_error="skip"),
        SaveStageConfig(output_dir=tmp_path / "out", num_shards=2),
    )
    for resumed in (0, 1):
        events: list[ProgressEvent] = []
        pipeline = Pipeline(config(tmp_path, datasets=[dataset]), progress=events.append)
        report = pipeline.source().save(save).build()
        assert report.folders[0].resumed_shards == resumed
        assert [one.done for one in events if one.stage == "save"][-2:] == [6, 6]
        assert report.ledger.find("save", "x", "rows").into == {"read": 6}
        assert report.ledger.find("save", "x", "rows").out == {
            "saved": 3,
            "blank_line": 2,
            "unparsable": 1,
        }
        shards = sorted((tmp_path / "out").glob("*.parquet"))
        assert [pq.read_table(shard).column("text").to_pylist() for shard in shards] == [
            ["a"],
            ["b", "c"],
        ]
        shards[1].unlink()


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
    assert finished & {1, 2}, "no run found shards that were finished"


def test_a_real_kill_leaves_finished_shards(tmp_path: Path) -> None:
    """kill -9 after the first shard record, in another process; the next run writes the others
    only.
    """
    job = (
        "import os, signal\nfrom pathlib import Path\nfrom easypipe import *\nfrom easypipe.core "
        "import storage\n"
        f"here = Path({str(tmp_path)!r})\n"
        "def hook(step, path):\n"
        "    if step == 'committed' and '_shards' in path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "storage.set_fault_hook(hook if os.environ.get('KILL') else None)\n"
        "config = PipelineConfig(datasets=[DatasetConfig(name='x', data_files=str(here / "
        "'x.jsonl'))],\n"
        f"    default_tokenizer={tokenizer()!r}, seed=1, cache_dir=here / 'cache')\n"
        "pipeline = Pipeline(config).source().tokenize().pack(PackStageConfig(seq_length=64))\n"
        "report = pipeline.save(SaveStageConfig(output_dir=here / 'out', num_shards=4)).build()\n"
        "print(report.folders[0].resumed_shards)\n"
    )
    jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts(80)])
    killed = forked.run([sys.executable, "-c", job], env=os.environ | {"KILL": "1"})
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "out" / MANIFEST).exists()
    done = forked.run([sys.executable, "-c", job])
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
    assert (
        "in 3 parquet shards. Choose another folder, or set overwrite=True to replace it."
        in str(caught.value)
    )
    packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2, overwrite=True)).build()
    assert set(contents(out)) & old == {MANIFEST, CARD, YAML}
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
    # its own claim stands there
    report = packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2)).build()
    assert report.folders[0].resumed_shards == 2
    assert sum(path.suffix == ".parquet" for path in out.iterdir()) == 2


def test_a_claim_goes_last_so_that_a_killed_run_is_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, remove = tmp_path / "out", storage.remove
    packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=3)).build()

    def killed(path: str, options: object = None) -> None:
        remove(path, options)
        raise Killed

    save = SaveStageConfig(output_dir=out, num_shards=2, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove", killed)
        with pytest.raises(Killed):
            packed(tmp_path).save(save).build()
    packed(tmp_path).save(save).build()
    assert len(list(out.glob("*.parquet"))) == 2


def test_what_another_run_left_unfinished_goes_where_one_overwrites_it(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def hook(what: str, path: str) -> None:
        if what == "rename" and path.endswith(MANIFEST):
            raise Killed

    storage.set_fault_hook(hook)
    with pytest.raises(Killed):
        packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=3)).build()
    storage.set_fault_hook(None)
    (found,) = verify(out)
    assert found.problems[0].what.startswith("unfinished: it has no manifest yet")
    (out / "part-of-mine.parquet").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="holds an unfinished run of something else"):
        packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2)).build()
    packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2, overwrite=True)).build()
    shards = {shard.name for shard in SavedSource(out).manifest.shards}
    assert {path.name for path in out.glob("*.parquet")} == {*shards, "part-of-mine.parquet"}
    assert not {path.name for path in out.iterdir()} & {"_easypipe-run.json", "_shards"}


def test_foreign_files_are_never_taken_or_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(
        ConfigError,
        match=r"save.output_dir=.*: is not empty: thesis.txt. Choose another folder, or set "
        r"overwrite=True",
    ):
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


@pytest.mark.parametrize(("kind", "codec"), EVERY)
def test_a_changed_bit_is_an_error_before_a_row_is_read(
    tmp_path: Path, kind: str, codec: str
) -> None:
    packed(tmp_path).save(
        SaveStageConfig(output_dir=tmp_path / "out", format=kind, compression=codec)
    ).build()
    [path] = (tmp_path / "out").glob("part-*")
    whole = path.read_bytes()
    for at in range(len(whole) // 10, len(whole), len(whole) // 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        source = SavedSource(tmp_path / "out")
        with pytest.raises(EasypipeError, match=re.escape(path.name)):
            source.read(0, 0, 1)
    path.write_bytes(whole)
    assert SavedSource(tmp_path / "out").read(0, 0, 1).num_rows == 1


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(tmp_path).save(SaveStageConfig(output_dir=out)).build()
    commit_checked(out / MANIFEST, read_checked(out / MANIFEST) | {"format_version": 99})
    with pytest.raises(
        CacheError, match=r"format version 99, this easypipe reads 1. Save the data again"
    ):
        SavedSource(out)


# shards


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (500, 500),
        ("500", 500),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("2gib", 2 << 30),
        ("3MiB", 3 << 20),
    ],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "many", "5 parsecs", "0", -3])
def test_sizes_that_are_none(size: int | str) -> None:
    with pytest.raises(ConfigError, match=r"max_shard_size: .* is not a size"):
        SaveStageConfig(output_dir="x", max_shard_size=size)


def row_sizes(lengths: list[int]) -> list[tuple[int, np.ndarray]]:
    """In blocks of seven rows."""
    return [(i, np.array(lengths[i : i + 7], np.int64)) for i in range(0, len(lengths), 7)]


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60), limit=st.integers(1, 600))
def test_shards_stay_below_their_size(lengths: list[int], limit: int) -> None:
    edges = edges_by_size(row_sizes(lengths), len(lengths), limit)
    assert edges[0] == 0
    assert edges[-1] == len(lengths)
    assert (edges[1:] > edges[:-1]).all()
    for a, b in itertools.pairwise(edges):
        size = sum(lengths[a:b])
        assert size <= limit or b - a == 1
        if b < len(lengths):
            assert size + lengths[b] > limit, "the next row would have fitted"


@given(lengths=st.lists(st.integers(0, 50), max_size=60), data=st.data())
def test_shards_of_equal_bytes(lengths: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, max(1, len(lengths))))
    ends = np.cumsum([0, *lengths])
    edges = edges_by_bytes(ends.tolist(), range(len(ends)), count)
    assert len(edges) == count + 1
    assert (edges[0], edges[-1]) == (0, len(lengths))
    assert (edges[1:] > edges[:-1]).all() or not lengths, "a shard without a row"
    if min(lengths, default=0):
        largest = max(sum(lengths[a:b]) for a, b in itertools.pairwise(edges))
        assert largest <= sum(lengths) / count + 2 * max(lengths)


def test_more_shards_than_rows(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"save.num_shards: 1000 shards for (\d+) rows. Ask for at most \1."
    ):
        packed(tmp_path).save(SaveStageConfig(output_dir=tmp_path / "out", num_shards=1000)).build()


@functools.cache
@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_rows_of_text_files_are_saved_without_their_numbers(tmp_path: Path, kind: str) -> None:
    """Which only sources of files have; whoever reads the saved rows counts them anew."""
    jsonl(tmp_path / "x.jsonl", [{"text": text, "n": 7} for text in texts(30)])
    with open(tmp_path / "x.jsonl", "a", encoding="utf-8") as file:
        file.write("\nno JSON\n" + json.dumps({"text": "the last", "n": 8}) + "\n")
    data = DatasetConfig(name="x", data_files=tmp_path / "x.jsonl", on_error="skip")
    save = SaveStageConfig(output_dir=tmp_path / "out", format=kind)
    Pipeline(config(tmp_path, datasets=[data])).source().save(save).build()
    saved = load_saved(tmp_path / "out")
    laws.assert_stateless_reads(saved)
    rows = saved.read(0, 0, 31).select(["text", "n"]).to_pylist()
    assert [row["text"] for row in rows] == [*texts(30), "the last"]
    assert "__row_number__" not in saved.manifest.schema.names
    again = config(tmp_path, datasets=[DatasetConfig(name="x", data_files=tmp_path / "out")])
    assert len([*Pipeline(again).source().tokenize().load({"batch_size": 1}).build()]) == 31


def prose(letters: int = 1_200_000) -> dict[str, list[str]]:
    """Real text, so that neighbouring shards compress by different ratios."""
    files = sorted(Path(inspect.getfile(inspect)).parent.glob("*.py"))
    words = "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)[:letters]
    return {"text": [words[i : i + 300 + i % 701] for i in range(0, len(words), 650)]}


@pytest.mark.parametrize(("kind", "codec"), EVERY)
@pytest.mark.parametrize("size", ["60KB", "250KB"])
def test_files_take_what_max_shard_size_says(
    tmp_path: Path, kind: str, codec: str, size: str
) -> None:
    """Bytes on disk within a tenth, the last file excepted; and never above it by more."""
    datasets = [DatasetConfig(name="x", data_files=prose())]
    save = SaveStageConfig(
        output_dir=tmp_path / "out", format=kind, compression=codec, max_shard_size=size
    )
    [folder] = Pipeline(config(tmp_path, datasets=datasets)).source().save(save).build().folders
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").glob("part-*"))]
    limit = parse_bytes(size)
    assert folder.decided_by == "max_shard_size"
    if kind == "parquet":
        first = min((tmp_path / "out").glob("part-*"))
        column = pq.read_metadata(first).row_group(0).column(0)
        assert column.compression == {"none": "UNCOMPRESSED"}.get(codec, codec.upper())
    assert len(sizes) > 1
    assert all(0.9 * limit <= at <= 1.1 * limit for at in sizes[:-1]), [at / limit for at in sizes]
    assert sizes[-1] <= 1.1 * limit


@pytest.mark.parametrize("kind", list(CODECS))
def test_large_files_are_judged_by_samples(tmp_path: Path, kind: str) -> None:
    """Beyond a few megabytes a shard is not tried out: blocks are, where it compresses unlike what
    stands before.
    """
    text = prose(5_000_000)["text"]
    hexes = [
        "".join(f"{xxh3_64_intdigest(b'%d %d' % (i, j)):x}" for j in range(20)) for i in range(6000)
    ]
    rows = [*text[:3000], *hexes, *text[3000:]]
    source = InMemoryShardedSource({"text": rows})
    codec, limit = "none" if kind == "jsonl" else "zstd", 700_000
    with mock.patch.object(sizes, "EXACT_BYTES", 0):
        edges, _ = sizes.plan_shards(source, kind, codec, num_shards=None, max_bytes=limit)
    measure = sizes.DiskSizes(source, kind, codec)
    taken = [measure.of_rows(int(a), int(b)) / limit for a, b in itertools.pairwise(edges)]
    assert len(taken) > 3
    assert all(0.9 <= share <= 1.1 for share in taken[:-1]), taken


def test_a_row_larger_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    datasets = [DatasetConfig(name="x", data_files={"text": ["a", "b" * 5000, "c", "d"]})]
    save = SaveStageConfig(output_dir=tmp_path / "out", format="jsonl", max_shard_size=1000)
    Pipeline(config(tmp_path, datasets=datasets)).source().save(save).build()
    assert [shard.num_rows for shard in SavedSource(tmp_path / "out").manifest.shards] == [1, 1, 2]


def test_with_both_options_the_stricter_wins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = [DatasetConfig(name="x", data_files=prose())]

    def save(**options: object) -> SavedFolder:
        caplog.clear()
        pipeline = Pipeline(config(tmp_path, datasets=datasets)).source()
        with caplog.at_level("INFO", logger="easypipe"):
            return (
                pipeline.save(
                    SaveStageConfig(output_dir=tmp_path / "out", overwrite=True, **options)
                )
                .build()
                .folders[0]
            )

    by_size = save(max_shard_size="60KB")
    more = save(num_shards=2, max_shard_size="60KB")
    assert (more.num_shards, more.decided_by) == (by_size.num_shards, "max_shard_size")
    assert (
        f"max_shard_size asks for {by_size.num_shards} shards, num_shards for 2: the stricter wins"
        in caplog.text
    )
    fewer = save(num_shards=by_size.num_shards * 3, max_shard_size="60KB")
    assert (fewer.num_shards, fewer.decided_by) == (by_size.num_shards * 3, "num_shards")
    assert "it decides" in caplog.text
    written = [path.stat().st_size for path in (tmp_path / "out").glob("part-*")]
    assert max(written) < 1.5 * min(written), "dealt by bytes"
    assert save(num_shards=2).decided_by == "num_shards"
    assert save().decided_by == "default"
    assert save().decided_by is None, "planned by the run before"


def test_a_size_that_cannot_hold_a_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"save.max_shard_size: 2,000 bytes: a parquet file of these columns takes ",
    ) as caught:
        packed(tmp_path).save(
            SaveStageConfig(output_dir=tmp_path / "out", max_shard_size="2KB")
        ).build()
    least = int(str(caught.value).rpartition("at least ")[2].rstrip(".").replace(",", ""))
    packed(tmp_path).save(
        SaveStageConfig(output_dir=tmp_path / "out", max_shard_size=least)
    ).build()


def test_a_remote_folder_that_was_emptied_meanwhile_gets_no_manifest(tmp_path: Path) -> None:
    out = f"memory://{tmp_path.name}/out"

    def hook(step: str, path: str) -> None:
        if step == "committed" and not path.endswith(MANIFEST):
            storage.remove(out)

    storage.set_fault_hook(hook)
    with pytest.raises(ConfigError, match=r"out: was emptied while rows were written there"):
        packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=1)).build()
    storage.set_fault_hook(None)
    assert storage.names_in(out) == []
    [folder] = packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=1)).build().folders
    assert folder.num_rows


def test_a_plan_is_kept_for_the_run_that_goes_on(tmp_path: Path) -> None:
    """Measured again by another version of a codec the edges could differ: finished shards would
    not fit them.
    """
    datasets = [DatasetConfig(name="x", data_files=prose())]
    save = SaveStageConfig(output_dir=tmp_path / "out", max_shard_size="60KB")

    def hook(step: str, path: str) -> None:
        if step == "committed" and "_shards" in path:
            raise Killed

    storage.set_fault_hook(hook)
    with pytest.raises(Killed):
        Pipeline(config(tmp_path, datasets=datasets)).source().save(save).build()
    storage.set_fault_hook(None)
    with mock.patch.object(sizes, "EXACT_FILL", 0.5):  # as another codec would
        [folder] = Pipeline(config(tmp_path, datasets=datasets)).source().save(save).build().folders
    assert folder.resumed_shards >= 1
    first = sorted((tmp_path / "out").glob("part-*"))[1]
    whole = first.read_bytes()
    first.unlink()
    with mock.patch.object(sizes, "EXACT_FILL", 0.5):
        [folder] = Pipeline(config(tmp_path, datasets=datasets)).source().save(save).build().folders
    assert folder.resumed_shards == folder.num_shards - 1
    assert first.read_bytes() == whole
    assert table(SavedSource(tmp_path / "out")).column("text").to_pylist() == prose()["text"]


def test_folders_of_the_first_version_are_known(tmp_path: Path) -> None:
    """Without max_shard_size they are up to date; with it they are refused, and it is said why."""
    datasets = [DatasetConfig(name="x", data_files=prose())]

    def pipeline() -> Pipeline:
        return Pipeline(config(tmp_path, datasets=datasets)).source()

    source = pipeline().get_data()["x"]
    what = ("saved", 1, source.fingerprint, schema_text(source.schema), "parquet", "zstd")
    for number, (options, old) in enumerate(
        [({}, (None, 16 << 20)), ({"num_shards": 2}, (2, None))]
    ):
        out = tmp_path / str(number)
        pipeline().save(SaveStageConfig(output_dir=out, **options)).build()
        assert json.loads((out / MANIFEST).read_text())["fingerprint"] == digest(*what, *old)
        (out / CARD).unlink()  # they had none
        assert (
            pipeline()
            .save(SaveStageConfig(output_dir=out, **options))
            .build()
            .folders[0]
            .up_to_date
        )
        assert (out / CARD).exists()
    manifest = read_checked(out / MANIFEST) | {"fingerprint": digest(*what, None, 100_000)}
    (out / MANIFEST).write_text(json.dumps(manifest))  # they had no checksum either
    with pytest.raises(
        ConfigError, match="max_shard_size counted bytes before compression when they were written"
    ):
        pipeline().save(SaveStageConfig(output_dir=out, max_shard_size=100_000)).build()


@pytest.mark.parametrize(("kind", "codec"), [("arrow", "gzip"), ("jsonl", "lz4")])
def test_codecs_that_a_format_does_not_have(kind: str, codec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SaveStageConfig(output_dir="x", format=kind, compression=codec)
    have = ", ".join(CODECS[kind])
    assert (
        str(caught.value)
        == f"compression: {kind} files cannot be compressed with {codec} (have: {have}). Choose "
        "one of these."
    )


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    codecs = get_args(Compression)
    rows = [f"| format | {' | '.join(codecs)} |", "| --- |" + " --- |" * len(codecs)]
    for kind, own in CODECS.items():
        default = next(iter(own))
        rows.append(
            f"| {kind} | "
            + " | ".join("default" if c == default else "yes" if c in own else "" for c in codecs)
            + " |"
        )
    page = (Path(__file__).parents[2] / "docs" / "saving.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in page, "\n".join(rows)


# places


def test_each_dataset_has_its_own_folder_or_save_path(tmp_path: Path) -> None:
    datasets = [
        DatasetConfig(
            name="a",
            data_files=[{"text": "one"}],
            save_path=tmp_path / "elsewhere",
            save_format="jsonl",
        ),
        DatasetConfig(name="b", data_files=[{"text": "two"}]),
    ]
    pipeline = Pipeline(config(tmp_path, datasets=datasets)).source().tokenize()
    report = pipeline.save(SaveStageConfig(output_dir=tmp_path / "out")).build()
    assert [(folder.path, folder.format) for folder in report.folders] == [
        (str(tmp_path / "elsewhere"), "jsonl"),
        (str(tmp_path / "out" / "b"), "parquet"),
    ]
    with pytest.raises(ConfigError, match=r"datasets.a.save_path: has no effect after mix\(\)"):
        Pipeline(config(tmp_path, datasets=datasets)).source().tokenize().mix(
            MixStageConfig(stop_strategy="all_exhausted")
        ).save(SaveStageConfig(output_dir=tmp_path / "mixed"))
    formats = [dataclasses.replace(dataset, save_path=None) for dataset in datasets]
    with pytest.raises(ConfigError, match=r"datasets.a.save_format: has no effect after mix\(\)"):
        Pipeline(config(tmp_path, datasets=formats)).source().tokenize().mix(
            MixStageConfig(stop_strategy="all_exhausted")
        ).save(SaveStageConfig(output_dir=tmp_path / "mixed"))


@pytest.mark.parametrize("option", [{"save_path": "out"}, {"save_format": "jsonl"}])
def test_where_a_dataset_is_saved_is_refused_in_a_config_without_save(
    tmp_path: Path, option: dict[str, str]
) -> None:
    datasets = [DatasetConfig(name="a", data_files=[{"text": "one"}], **option)]
    [name] = option
    with pytest.raises(ConfigError, match=rf"datasets\[0\].{name}: has no effect without save"):
        chain_of(config(tmp_path, datasets=datasets))


def test_bad_rows_of_text_that_is_saved_as_it_is_are_only_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text"\n')
    bad = {"on_error": "quarantine", "max_bad_rows": 0}
    datasets = [DatasetConfig(name="x", data_files=str(rows), **bad)]
    chain = Pipeline(config(tmp_path, datasets=datasets)).source()
    chain.save(SaveStageConfig(output_dir=tmp_path / "out")).build()
    for option in ("on_error 'quarantine'", "max_bad_rows 0"):
        assert f"dataset x: {option} has no effect on rows that are saved as they" in caplog.text


def test_a_relative_folder_is_where_the_pipeline_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there := tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    chain = Pipeline(config(tmp_path)).source().save(SaveStageConfig(output_dir="out"))
    monkeypatch.chdir(there)
    chain.build()
    assert not list(there.iterdir())
    assert all(one.ok for one in verify(tmp_path / "out"))


@pytest.mark.parametrize("twice", ["datasets", "stages"])
def test_what_a_pipeline_saves_is_not_replaced_by_itself(tmp_path: Path, twice: str) -> None:
    own = {"save_path": tmp_path / "out"} if twice == "datasets" else {}
    datasets = [DatasetConfig(name=name, data_files=[{"text": name}], **own) for name in "ab"]
    save = SaveStageConfig(output_dir=tmp_path / "out", overwrite=True)
    chain = Pipeline(config(tmp_path, datasets=datasets)).source().save(save).tokenize()
    chain = chain if twice == "datasets" else chain.save(save)
    again = "out: dataset 'b'" if twice == "datasets" else "out/a: dataset 'a'"
    with pytest.raises(ConfigError, match=rf"save.output_dir=.*/{again} would replace what"):
        chain.build()
    assert not (tmp_path / "out").exists()


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save.output_dir: no folder for dataset 'mixed'"):
        packed(tmp_path).save()


def test_an_endless_mixture_cannot_be_saved(tmp_path: Path) -> None:
    mixture = Pipeline(config(tmp_path)).source().tokenize().mix()
    with pytest.raises(ConfigError) as caught:
        mixture.copy().save(SaveStageConfig(output_dir=tmp_path / "out"))
    assert str(caught.value) == (
        "save: 'mixed' never ends: its stop_strategy is 'restart'. Set mix.stop_strategy to "
        "'first_exhausted' or 'all_exhausted'."
    )
    beside = Pipeline(config(tmp_path, save=SaveStageConfig(output_dir=tmp_path / "out")))
    with pytest.raises(ConfigError, match="save: 'mixed' never ends"):
        beside.copy().source().tokenize().mix().save()
    # never saved
    assert "input_ids" in next(iter(beside.copy().source().tokenize().mix().load().build()))
    beside.source().tokenize().save().mix().load().build()  # saved before it is mixed
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == {"code", "docs"}
    for stop in ("first_exhausted", "all_exhausted"):
        pipeline = (
            Pipeline(config(tmp_path)).source().tokenize().mix(MixStageConfig(stop_strategy=stop))
        )
        pipeline.save(SaveStageConfig(output_dir=tmp_path / stop)).build()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((StorageError, ConfigError, NotADirectoryError)) as caught:
        packed(tmp_path).save(SaveStageConfig(output_dir=tmp_path / "file" / "out")).build()
    assert str(tmp_path / "file") in str(caught.value)


def test_disabled_save_writes_nothing(tmp_path: Path) -> None:
    report = (
        packed(tmp_path).save(SaveStageConfig(enabled=False, output_dir=tmp_path / "out")).build()
    )
    assert report.folders == ()
    assert not (tmp_path / "out").exists()


def test_rows_without_end_tokens_and_counts(tmp_path: Path) -> None:
    report = tokenize_and_save(
        str(jsonl(tmp_path / "x.jsonl", [{"text": t} for t in texts(30)])),
        tokenizer(),
        tmp_path / "out",
    )
    saved = SavedSource(tmp_path / "out")
    assert report.folders[0].num_tokens == sum(
        len(row[INPUT_IDS]) for row in table(saved).to_pylist()
    )
    assert SEGMENT_IDS not in saved.schema.names


# elsewhere


def again(folder: str, tmp_path: Path, storage_options: dict | None = None) -> pa.Table:
    dataset = DatasetConfig(data_files=folder, storage_options=storage_options)
    return table(Pipeline(config(tmp_path, datasets=[dataset])).source().get_data()["dataset1"])


def killed_then_finished(tmp_path: Path, url: str, storage_options: dict | None = None) -> None:
    """Stopped after the first finished shard, before the manifest and not at all: the same rows,
    and what stood is not written again.
    """
    save = SaveStageConfig(output_dir=url, num_shards=3, storage_options=storage_options)
    order = []

    def hook(what: str, path: str) -> None:
        if what == "committed":
            order.append(path.rpartition("/")[2])
            if len(order) > 1 and order[-2].startswith("part-") and order[-1].endswith(".json"):
                raise Killed

    storage.set_fault_hook(hook)
    with pytest.raises(Killed):
        packed(tmp_path).save(save).build()
    storage.set_fault_hook(
        lambda what, path: (
            order.append(path.rpartition("/")[2])
            if what == "committed" and "/configs/" not in path
            else None
        )
    )
    order.clear()
    try:
        [folder] = packed(tmp_path).save(save).build().folders
    finally:
        storage.set_fault_hook(None)
    assert folder.resumed_shards >= 1
    assert order[-3:] == [CARD, YAML, MANIFEST], "the manifest is the commit"
    assert packed(tmp_path).save(save).build().folders[0].up_to_date
    assert again(url, tmp_path, storage_options).equals(table(packed(tmp_path).get_data()["mixed"]))
    assert table(load_saved(url, storage_options)).num_rows == folder.num_rows
    fs, root = storage.filesystem(url, storage_options)
    fs.invalidate_cache()
    names = [str(name).rpartition("/")[2] for name in fs.ls(root, detail=False)]
    assert sorted(names) == sorted(
        [
            CARD,
            YAML,
            MANIFEST,
            *(shard.name for shard in load_saved(url, storage_options).manifest.shards),
        ]
    )


def test_memory_filesystem(tmp_path: Path) -> None:
    """Remote folders go the same way: through fsspec, manifest last."""
    killed_then_finished(tmp_path, f"memory://{tmp_path.name}/out")


def test_a_folder_may_have_the_name_of_a_file(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/rows.parquet"
    packed(tmp_path).save(SaveStageConfig(output_dir=url)).build()
    assert load_saved(url).packed
    again = config(tmp_path, datasets=[DatasetConfig(data_files=url)])
    assert Pipeline(again).source().load().build().rows.seq_length == 64


@pytest.mark.parametrize("kind", list(CODECS))
@pytest.mark.parametrize("good", [0, 2])
def test_files_without_a_row_are_read_back(tmp_path: Path, kind: str, good: int) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{\n" * 4 + '{"text": "a"}\n' * good)
    data = str(rows) if good else pa.table({"text": pa.array([], "string")})
    datasets = [DatasetConfig(name="x", data_files=data, on_error="skip")]
    save = SaveStageConfig(output_dir=tmp_path / "out", format=kind, num_shards=3 if good else 1)
    Pipeline(config(tmp_path, datasets=datasets)).source().save(save).build()
    assert table(load_saved(tmp_path / "out")).column("text").to_pylist() == ["a"] * good
    assert [found.problems for found in verify(tmp_path / "out")] == [()]


def test_rows_that_a_source_leaves_out_without_a_word_are_counted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    mixed = block_mixture_interleave(
        {"x": open_files(str(rows)), "y": [{"text": "c"}]}, stop_strategy="all_exhausted"
    )
    chain = Pipeline(config(tmp_path, datasets=[])).source(mixed)
    report = chain.save(SaveStageConfig(output_dir=tmp_path / "out")).build()
    assert report.rejected == {"dataset1": {"other": 1}}
    assert sorted(table(load_saved(tmp_path / "out")).column("text").to_pylist()) == ["a", "b", "c"]


def test_saved_tokens_are_not_taken_for_those_of_another_tokenizer(tmp_path: Path) -> None:
    straight = Pipeline(config(tmp_path)).source().tokenize()
    straight.save(SaveStageConfig(output_dir=tmp_path / "out")).build()
    folders = [str(tmp_path / "out" / name) for name in ("code", "docs")]
    several = config(tmp_path, datasets=[DatasetConfig(name="x", data_files=folders)])
    with pytest.raises(ConfigError, match=r"datasets.x.data_files\[0\]: .* a folder of saved tok"):
        Pipeline(several).source()


def test_file_urls(tmp_path: Path) -> None:
    killed_then_finished(tmp_path, f"file://{tmp_path}/out")
    assert (tmp_path / "out" / MANIFEST).exists()


def test_a_bucket(tmp_path: Path, store: Store) -> None:
    killed_then_finished(tmp_path, f"{store.new()}/out", store.options)


def test_a_bucket_that_is_not_there(tmp_path: Path, store: Store) -> None:
    url = f"{store.protocol}://nowhere/out"
    with pytest.raises(StorageError, match=rf"{url}/.*: cannot be written: ") as caught:
        packed(tmp_path).save(
            SaveStageConfig(output_dir=url, storage_options=store.options)
        ).build()
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_where_it_lies_changes_nothing(tmp_path: Path, store: Store) -> None:
    url = f"{store.new()}/out"
    packed(tmp_path).save(SaveStageConfig(output_dir=url, storage_options=store.options)).build()
    written = store.files(url)
    assert len(written) == 4
    for data in written.values():
        assert SECRET.encode() not in data, "credentials stay out of what is written"
    here = tmp_path / "out"
    packed(tmp_path).save(SaveStageConfig(output_dir=here)).build()
    assert written == contents(here)
    assert table(load_saved(url, store.options)).equals(table(load_saved(here)))


def two_processes(
    tmp_path: Path, out: str, options: object, *, other_seed: int, overwrite: bool = False
) -> list[str]:
    """What becomes of each, sorted. Neither writes a shard before the other is about to."""
    script, how = Path(__file__).with_name("save_user.py"), "overwrite" if overwrite else "keep"
    paths = os.pathsep.join([str(script.parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    table(packed(tmp_path).get_data()["mixed"])  # so that both find their tokens prepared
    running = [
        forked.Popen(
            [sys.executable, str(script), str(tmp_path), out, json.dumps(options), tokenizer(), str(seed), how],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for seed in (7, other_seed)
    ]  # fmt: skip
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    (tmp_path / "go").touch()
    return sorted(process.communicate(timeout=120)[0].strip() for process in running)


def test_two_processes_save_the_same(tmp_path: Path) -> None:
    said = two_processes(tmp_path, str(tmp_path / "out"), None, other_seed=7)
    rows = load_saved(tmp_path / "out").manifest.num_rows
    assert said == [f"saved {rows} False", f"saved {rows} True"], "one waited, and found it done"
    packed(tmp_path).save(SaveStageConfig(output_dir=tmp_path / "alone", num_shards=4)).build()
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_two_processes_replace_what_stands_there(tmp_path: Path) -> None:
    said = two_processes(tmp_path, str(tmp_path / "out"), None, other_seed=8, overwrite=True)
    assert all(one.startswith("saved ") for one in said)
    source = load_saved(tmp_path / "out")
    assert table(source).num_rows == source.manifest.num_rows
    assert set(contents(tmp_path / "out")) == {
        CARD,
        YAML,
        MANIFEST,
        *(shard.name for shard in source.manifest.shards),
    }


def test_two_machines_save_into_one_bucket(tmp_path: Path, gs: Store) -> None:
    """No lock reaches both: both write the same bytes."""
    out = f"{gs.new()}/out"
    said = two_processes(tmp_path, out, gs.options, other_seed=7)
    assert all(one.startswith("saved ") for one in said)
    packed(tmp_path).save(SaveStageConfig(output_dir=tmp_path / "alone", num_shards=4)).build()
    assert gs.files(out) == contents(tmp_path / "alone")


def test_a_run_that_lost_its_folder_writes_no_manifest(tmp_path: Path, store: Store) -> None:
    out = f"{store.new()}/out"
    other = (
        Pipeline(config(tmp_path, seed=8))
        .source()
        .tokenize()
        .mix(MIX)
        .pack(PackStageConfig(seq_length=64))
    )
    other = other.save(
        SaveStageConfig(output_dir=out, storage_options=store.options, overwrite=True)
    )

    def meanwhile(what: str, path: str) -> None:
        if what == "committed" and path.endswith("_easypipe-run.json"):
            storage.set_fault_hook(None)
            other.build()

    storage.set_fault_hook(meanwhile)
    with pytest.raises(ConfigError, match="holds another saved run"):
        packed(tmp_path).save(
            SaveStageConfig(output_dir=out, storage_options=store.options)
        ).build()
    source = load_saved(out, store.options)
    assert table(source).num_rows == source.manifest.num_rows


# the card


def card(folder: Path) -> tuple[dict, str]:
    text = (folder / CARD).read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_card(tmp_path: Path) -> None:
    report = (
        packed(tmp_path).save(SaveStageConfig(output_dir=tmp_path / "out", num_shards=2)).build()
    )
    front, body = card(tmp_path / "out")
    [folder] = report.folders
    [files] = front["configs"][0]["data_files"]
    assert sorted(path.name for path in (tmp_path / "out").glob(files["path"])) == sorted(
        shard.name for shard in load_saved(tmp_path / "out").manifest.shards
    )
    assert front["dataset_info"][0]["splits"] == [
        {"name": "train", "num_bytes": folder.num_bytes, "num_examples": folder.num_rows}
    ]
    assert front["size_categories"] == ["n<1K"]
    info = load_saved(tmp_path / "out").tokens
    for said in (
        f"{folder.num_rows:,}",
        f"{folder.num_tokens:,}",
        info.tokenizer_fingerprint,
        "| `input_ids` | `large_list<item: uint16>` |",
    ):
        assert said in body
    for entry in report.ledger.entries:
        assert f"| {entry.stage} | {entry.dataset} | {entry.unit} |" in body
    assert str(tmp_path) not in body
    assert "/tmp" not in body
    packed(tmp_path).save(SaveStageConfig(output_dir=tmp_path / "twin", num_shards=2)).build()
    assert (tmp_path / "twin" / CARD).read_bytes() == (tmp_path / "out" / CARD).read_bytes()


@pytest.mark.parametrize("kind", list(CODECS))
def test_the_call_in_the_card_loads_the_rows(tmp_path: Path, kind: str) -> None:
    pipeline = packed(tmp_path)
    pipeline.save(SaveStageConfig(output_dir=tmp_path / "out", format=kind)).build()
    code = re.search(r"```python\n(.*?)```", card(tmp_path / "out")[1], re.DOTALL)[1]
    names: dict = {}
    exec(code.replace("path/to/this/folder", str(tmp_path / "out")), names)
    assert table(names["source"]).equals(table(pipeline.get_data()["mixed"]))


@pytest.mark.parametrize("kind", list(CODECS))
def test_other_readers_open_the_folder(tmp_path: Path, kind: str) -> None:
    """pandas and pyarrow take every file of a folder for data whose name begins with neither `_`
    nor `.`.
    """
    out = tmp_path / "out"
    packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2, format=kind)).build()
    expected = table(load_saved(out)).column("input_ids").to_pylist()
    if kind == "parquet":
        assert pyarrow.dataset.dataset(out).to_table().column("input_ids").to_pylist() == expected
        pandas = pytest.importorskip("pandas")
        assert [list(row) for row in pandas.read_parquet(out)["input_ids"]] == expected
    found = pyarrow.dataset.dataset(out, format="json" if kind == "jsonl" else kind)
    assert found.to_table().column("input_ids").to_pylist() == expected
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "hf"))
    assert rows["input_ids"] == expected


def test_a_folder_of_an_earlier_easypipe_opens_and_loses_its_readme(tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(tmp_path).save(SaveStageConfig(output_dir=out)).build()
    expected = table(load_saved(out))
    (out / CARD).rename(out / HUB_CARD)
    (out / YAML).unlink()
    assert table(load_saved(out)).equals(expected)
    assert packed(tmp_path).save(SaveStageConfig(output_dir=out)).build().folders[0].up_to_date
    assert not (out / HUB_CARD).exists()
    assert pyarrow.dataset.dataset(out).count_rows() == expected.num_rows


def test_a_card_of_ones_own_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    save = SaveStageConfig(output_dir=out, overwrite=True)
    packed(tmp_path).save(save).build()
    first = (out / CARD).read_text()
    packed(tmp_path).save(SaveStageConfig(output_dir=out, num_shards=2, overwrite=True)).build()
    assert (out / CARD).read_text() != first, "easypipe's own is brought up to date"
    for name in (CARD, HUB_CARD):
        (out / name).write_text("# What I say about it")
    (out / YAML).unlink()
    with caplog.at_level("INFO", logger="easypipe"):
        packed(tmp_path).save(save).build()
    assert (out / CARD).read_text() == (out / HUB_CARD).read_text() == "# What I say about it"
    assert caplog.text.count("was not written by easypipe, so it is kept") == 2
    assert not (out / YAML).exists(), "datasets reads what the README.md says"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (0, "n<1K"),
        (999, "n<1K"),
        (1000, "1K<n<10K"),
        (10**4, "10K<n<100K"),
        (10**5, "100K<n<1M"),
        (10**6, "1M<n<10M"),
        (10**7, "10M<n<100M"),
        (5 * 10**8, "100M<n<1B"),
        (10**9, "1B<n<10B"),
        (10**10, "10B<n<100B"),
        (10**12 - 1, "100B<n<1T"),
        (10**12, "n>1T"),
    ],
)
def test_sizes_in_the_words_of_the_hub(rows: int, words: str) -> None:
    assert size_category(rows) == words


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ("meta-llama/Llama-2-7b", "meta-llama/Llama-2-7b"),
        ("/anywhere/tok", "tok"),
        ("./tok/", "tok"),
        ("a/b/tok", "tok"),
        ("gpt2", "gpt2"),
    ],
)
def test_names_of_tokenizers_that_may_be_published(tokenizer: str, name: str) -> None:
    assert public_name(tokenizer) == name


# loading it again


def test_load_saved_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        MissingFileError,
        match=r"is not a complete saved folder: it has no _easypipe.json. Give the folder that "
        r"save\(\) wrote.",
    ):
        load_saved(tmp_path / "nothing")
    Pipeline(config(tmp_path)).source().tokenize().save(
        SaveStageConfig(output_dir=tmp_path / "out")
    ).build()
    with pytest.raises(
        MissingFileError,
        match=r"holds several saved folders, not one \(have: code, docs\). Load one of these.",
    ):
        load_saved(tmp_path / "out")
    assert load_saved(tmp_path / "out" / "code").manifest.num_rows == 60
    (tmp_path / "out" / "code" / MANIFEST).rename(tmp_path / "out" / "code" / "_easypipe-run.json")
    with pytest.raises(MissingFileError, match=r"Run the job that writes it again: it continues."):
        load_saved(tmp_path / "out" / "code")


@pytest.mark.parametrize("kind", list(CODECS))
def test_what_is_saved_is_not_tokenized_twice(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """tokenize() on tokens is a no-op that says so, whatever tokenizer the config names."""
    Pipeline(config(tmp_path)).source().tokenize().save(
        SaveStageConfig(output_dir=tmp_path / "out", format=kind)
    ).build()
    events: list = []
    datasets = [DatasetConfig(name="code", data_files=tmp_path / "out" / "code")]
    pipeline = Pipeline(config(tmp_path, datasets=datasets), progress=events.append)
    with (
        caplog.at_level("INFO", logger="easypipe"),
        mock.patch("easypipe.stages.tokenize.stage.load_tokenizer", side_effect=AssertionError),
    ):
        pipeline.source().tokenize().pack(PackStageConfig(seq_length=64)).save(
            SaveStageConfig(output_dir=tmp_path / "packed")
        ).build()
    assert "dataset code: holds input_ids already, tokenize() leaves it as it is" in caplog.text
    assert not [event for event in events if event.stage == "tokenize"]


def test_options_of_the_input_are_those_of_the_output_too(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "x.txt"
    path.write_text("one\ntwo\n")
    url = f"{store.new()}/out"
    tokenize_and_save(path, tokenizer(), url, cache_dir=tmp_path, storage_options=store.options)
    assert load_saved(url, store.options).manifest.num_rows == 2


def test_tokenize_and_save_takes_the_options_of_its_stages(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts(300)) + "broken\n")
    events: list = []

    def run(**options: object) -> SavedFolder:
        values = {
            "content_field": "body",
            "on_error": "skip",
            "cache_dir": tmp_path / "cache",
            "progress": events.append,
        } | options
        return tokenize_and_save(
            str(path), tokenizer(), f"memory://{tmp_path.name}/out", **values
        ).folders[0]

    with pytest.raises(BudgetError):
        run(max_bad_rows=0)
    folder = run(
        max_bad_rows=1,
        max_shard_size="8KB",
        output_format="jsonl",
        output_storage_options={"skip_instance_cache": True},
    )
    assert (folder.num_rows, folder.decided_by) == (300, "max_shard_size")
    assert folder.num_shards > 1
    seen = {event.stage: event for event in events if event.num_bytes}
    assert seen["tokenize"].num_bytes > 5000
    assert seen["save"].num_bytes > 5000
    assert seen["save"].done <= seen["save"].total
    assert run(max_bad_rows=1, max_shard_size="8KB", output_format="jsonl").up_to_date
    with pytest.raises(ConfigError, match="max_bad_rows: has no effect while on_error is 'error'"):
        run(on_error="error", max_bad_rows=3)


@pytest.mark.parametrize(
    ("megabytes", "shards"), [(1, 16 << 20), (400, 50 << 20), (1 << 20, 500 << 20)]
)
def test_default_size_of_a_shard(megabytes: int, shards: int) -> None:
    assert default_shard_bytes([Shard(name="x", num_rows=1, num_bytes=megabytes << 20)]) == shards


@examples(60)
@given(
    st.lists(st.integers(0, 5), max_size=5),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(1, 4),
)
def test_rows_are_read_in_pieces_of_their_shards(
    rows: list[int], start: int, stop: int, step: int
) -> None:
    shards = [Shard(name=str(i), num_rows=count, num_bytes=0) for i, count in enumerate(rows)]
    every = [(shard, row) for shard, count in enumerate(rows) for row in range(count)]
    found = list(sizes._pieces(shards, start, stop, step))
    assert [(shard, row) for _, shard, a, b in found for row in range(a, b)] == every[start:stop]
    for first, shard, a, b in found:
        assert every[first] == (shard, a)
        assert 0 < b - a <= step
    assert len(found) == sum(
        -(-sum(shard == i for shard, _ in every[start:stop]) // step) for i in range(len(rows))
    )


@pytest.mark.parametrize(("kind", "codec"), EVERY)
def test_the_same_rows_are_the_same_bytes_whenever_they_are_written(
    monkeypatch: pytest.MonkeyPatch, kind: str, codec: str
) -> None:
    batch = pa.record_batch({"text": ["one", "two"], "n": [1, 2]})
    written = []
    for now in (1.0, 2e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        sink = pa.BufferOutputStream()
        with open_writer(sink, kind, codec, batch.schema) as write:
            write(batch)
        written.append(sink.getvalue().to_pybytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((3, kind) for kind in (pa.int8(), pa.uint32())),
        (1.5, pa.float32()),
        (True, pa.bool_()),
        (None, pa.null()),
        ({"a": [1]}, pa.struct([("a", pa.list_(pa.int64()))])),
        *(("é", kind) for kind in (pa.string(), pa.large_string())),
        ("é", pa.dictionary(pa.int8(), pa.string())),
        *(([3], kind(pa.int64())) for kind in (pa.list_, pa.large_list)),
    ],
    ids=str,
)
def test_every_value_of_json_is_written(value: object, kind: pa.DataType) -> None:
    batch = pa.record_batch({"x": pa.array([value, None], kind)})
    sink = pa.BufferOutputStream()
    with open_writer(sink, "jsonl", "none", batch.schema) as write:
        write(batch)
    lines = sink.getvalue().to_pybytes().splitlines()
    assert [json.loads(line) for line in lines] == [{"x": value}, {"x": None}]


@pytest.mark.parametrize("kind", [pa.uint64(), pa.timestamp("us"), pa.binary()])
def test_what_json_lacks_is_refused_at_any_depth(kind: pa.DataType) -> None:
    """A reader takes 2^63 for a floating-point number; dates and bytes have no form."""
    for held in (kind, pa.struct([("a", kind)]), pa.list_(pa.struct([("a", kind)]))):
        with pytest.raises(ConfigError, match="format: JSON cannot hold column 'x' of type"):
            check_json(pa.schema([("x", held)]))


def test_a_number_that_json_lacks_is_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "score": score} for score in (1.0, float("nan"))]
    pipeline = Pipeline(config(tmp_path, datasets=[DatasetConfig(data_files=rows)])).source()
    save = SaveStageConfig(output_dir=tmp_path / "out", format="jsonl")
    with pytest.raises(ConfigError, match=r"format: JSON cannot hold column 'score': it has a NaN"):
        pipeline.save(save).build()


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        (([1], [2] * 9, None), (pa.list_(pa.int64()), pa.large_list(pa.int64()))),
        (("a", "b" * 9, None), (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())),
        ((1, 9, None), (pa.int64(),)),
    ],
)
def test_rows_take_bytes_by_the_length_of_their_values(
    values: tuple[object, ...], kinds: tuple[pa.DataType, ...]
) -> None:
    for kind in kinds:
        batch = pa.record_batch({"x": pa.array(values, kind)})
        weights = np.array([1, 1, 1] if kind == pa.int64() else [2, 10, 1])
        assert sizes.row_bytes(batch) == pytest.approx(batch.nbytes * weights / weights.sum())
