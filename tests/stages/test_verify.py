"""Verifying and repairing: every kind of damage is found and named, and what is made again is byte
for byte what was there.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import yaml

from easypipe import (
    ConfigError,
    MissingFileError,
    Pipeline,
    StorageError,
    tokenize_and_save,
)
from easypipe.cache.config import CacheConfig
from easypipe.cache.reader import TokenCache
from easypipe.cache.repair import aside
from easypipe.cache.verify import wrong_content
from easypipe.cache.writer import CacheWriter
from easypipe.cli import main
from easypipe.cli.verify import _options_for
from easypipe.core import storage
from easypipe.core.checked import commit_checked, read_checked
from easypipe.core.config import to_dict
from easypipe.core.schema import ROW_NUMBER
from easypipe.core.storage import TEMPORARY
from easypipe.jobs import repair_as_made
from easypipe.save.config import SaveStageConfig
from easypipe.save.saved import MANIFEST
from easypipe.save.verify import verify
from easypipe.stages.config import PipelineConfig
from easypipe.stages.source.config import DatasetConfig
from easypipe.transforms.columns.functions import Filter
from pipelines import config, jsonl, tokenizer
from stores import Store


def values(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return (
        to_dict(config(tmp_path))
        | {"mix": {"stop_strategy": "all_exhausted"}, "pack": {"seq_length": 64}}
        | options
    )


def prepared(tmp_path: Path) -> Path:
    Pipeline.from_config(values(tmp_path)).source().tokenize().mix().ledger()
    return tmp_path / "cache"


def saved(tmp_path: Path, **options: Any) -> Path:
    save = {"output_dir": str(tmp_path / "out"), "num_shards": 3, **options}
    Pipeline.from_config(
        values(tmp_path, save=save)
    ).source().tokenize().mix().pack().save().build()
    return tmp_path / "out"


def files(folder: Path, *skip: str) -> dict[str, bytes]:
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {name: data for name, data in found.items() if not name.startswith(skip)}


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(1).randrange(len(data)) if at is None else at] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip, "damaged: checksum"),
    "flipped in its padding": (lambda path: flip(path, 6), "damaged: checksum"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size // 2), "bytes, committed with"),
    "empty": (lambda path: path.write_bytes(b""), "0 bytes, committed with"),
    "gone": (lambda path: path.unlink(), "missing"),
}


def test_what_is_whole_is_said_to_be(tmp_path: Path) -> None:
    cache, out = verify(prepared(tmp_path)), verify(saved(tmp_path))
    assert [one.dataset for one in cache] in (["code", "docs"], ["docs", "code"])
    assert all(one.ok and not one.notes for one in (*cache, *out))
    assert sum(one.rows for one in cache) == 150
    assert out[0].files == 3
    assert verify(next((tmp_path / "cache" / "manifests").glob("*.json")))[0] in cache


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_broken_token_file_is_named_and_repaired(tmp_path: Path, kind: str) -> None:
    cache = prepared(tmp_path)
    before = files(cache, "locks")
    victim = sorted((cache / "tokens").rglob("*.arrow"))[1]
    damage, message = DAMAGE[kind]
    damage(victim)
    [broken] = [one for one in verify(cache) if not one.ok]
    [problem] = broken.problems
    assert message in problem.what
    assert problem.at.startswith(f"{victim} (rows 0:")
    written = {
        path: path.stat().st_mtime_ns
        for path in (cache / "tokens").rglob("*.arrow")
        if path != victim
    }
    after = Pipeline.from_config(values(tmp_path)).source().tokenize().mix().pack().repair(cache)
    assert all(one.ok for one in after)
    assert files(cache, "locks") == before
    assert written == {path: path.stat().st_mtime_ns for path in written}, (
        "what was whole was not written again"
    )


def manifest_of(cache: Path, dataset: str) -> Path:
    return next(
        path
        for path in (cache / "manifests").glob("*.json")
        if json.loads(path.read_text())["dataset"] == dataset
    )


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The file lies, and its checksum is right."""
    read = read_checked(path)
    change(read)
    commit_checked(path, read)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["counts"].update(docs=7), "its counts say 7"),
        (lambda m: m["parts"][0].update(docs=3), "documents"),
        (lambda m: m["parts"][0].update(docs=0), "have 0 documents, in file"),
        (lambda m: m["parts"][0].update(start=2), "do not follow row 0"),
        (
            lambda m: m["parts"][-1].update(content="0" * 32),
            "its fingerprint does not match its parts",
        ),
        (lambda m: m["shard_rows"].__setitem__(0, 1000), "of 1000 rows of"),
        (lambda m: m.update(format=99), "token cache format 99"),
        (lambda m: m.pop("parts"), "not a token cache manifest"),
        (lambda m: m["tokenizer"].update(vocab_size=9), "is outside the vocabulary of 9"),
    ],
)
def test_a_manifest_that_lies_is_found_and_made_again(
    tmp_path: Path, change: Any, message: str
) -> None:
    cache = prepared(tmp_path)
    before = {
        name: json.loads(data) | {"xxh3_128": ""}
        for name, data in files(cache / "manifests").items()
    }
    edit(manifest_of(cache, "code"), change)
    assert message in str([str(problem) for one in verify(cache) for problem in one.problems])
    assert all(
        one.ok
        for one in Pipeline.from_config(values(tmp_path)).source().tokenize().mix().repair(cache)
    )
    after = {
        name: json.loads(data) | {"xxh3_128": ""}
        for name, data in files(cache / "manifests").items()
    }
    assert [m | {"facts": {}} for m in after.values()] == [
        m | {"facts": {}} for m in before.values()
    ]


def test_not_json_and_broken_records(tmp_path: Path) -> None:
    cache = prepared(tmp_path)
    before = files(cache, "locks")
    record = sorted((cache / "ranges").rglob("*.json"))[0]
    edit(record, lambda r: r.update(docs=r["docs"] + 1))
    [found] = [one for one in verify(cache) if not one.ok]
    assert (found.kind, found.problems[0].file) == ("records", str(record))
    assert all(
        one.ok
        for one in Pipeline.from_config(values(tmp_path)).source().tokenize().mix().repair(cache)
    )
    assert files(cache, "locks") == before
    manifest_of(cache, "code").write_text("{")
    [found] = [one for one in verify(cache) if not one.ok]
    assert "it is not JSON" in found.problems[0].what
    assert all(
        one.ok
        for one in Pipeline.from_config(values(tmp_path)).source().tokenize().mix().repair(cache)
    )


@pytest.mark.parametrize(
    ("form", "kind"),
    [*(("parquet", kind) for kind in DAMAGE), ("arrow", "flipped"), ("jsonl", "cut")],
)
def test_a_broken_shard_is_named_and_repaired(tmp_path: Path, form: str, kind: str) -> None:
    out = saved(tmp_path, format=form)
    before = files(out)
    victim = sorted(out.glob("part-*"))[1]
    damage, message = DAMAGE[kind]
    damage(victim)
    [broken] = verify(out)
    [problem] = broken.problems
    assert (problem.at, message in problem.what) == (str(victim), True)
    others = {path: path.stat().st_mtime_ns for path in out.glob("part-*") if path != victim}
    pipeline = Pipeline.from_config(
        values(tmp_path, save={"output_dir": str(out), "num_shards": 3, "format": form})
    )
    assert all(one.ok for one in pipeline.source().tokenize().mix().pack().save().repair(out))
    assert files(out) == before
    assert others == {path: path.stat().st_mtime_ns for path in others}


def test_a_saved_manifest_that_lies(tmp_path: Path) -> None:
    out = saved(tmp_path)
    before = files(out)
    edit(out / MANIFEST, lambda m: m["shards"][0].update(num_rows=m["shards"][0]["num_rows"] + 1))
    assert "the manifest is damaged" in str(verify(out)[0].problems[0])
    save = {"output_dir": str(out), "num_shards": 3}
    chain = (
        Pipeline.from_config(values(tmp_path, save=save)).source().tokenize().mix().pack().save()
    )
    assert all(one.ok for one in chain.repair(out))
    assert files(out) == before
    (out / MANIFEST).write_text("{")
    assert "it is not JSON" in str(verify(out)[0].problems[0])
    assert all(one.ok for one in chain.repair(out))
    assert files(out) == before


def broken_in(store: Store, url: str, name: str) -> None:
    """One byte of a file that has `name` in it is another."""
    victim = sorted(file for file in store.files(url) if name in file)[1]
    data = bytearray(store.files(url)[victim])
    data[len(data) // 2] ^= 1
    store.filesystem.pipe_file(f"{url}/{victim}", bytes(data))


def test_one_saved_dataset_in_a_bucket_is_read_with_the_options_of_save(
    tmp_path: Path, store: Store
) -> None:
    url = f"{store.new()}/out"
    save = {"output_dir": url, "storage_options": store.options}
    made = values(tmp_path, mix=None, pack=None, save=save)
    Pipeline.from_config(made).source().save().build()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": made}))
    for path in (url, f"{url}/code"):
        assert main(["verify", path, str(tmp_path / "run.yaml")]) == 0


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_ledger_that_does_not_add_up_is_a_problem(tmp_path: Path, side: str) -> None:
    out = tmp_path / "out"
    made = values(tmp_path, mix=None, pack=None, save={"output_dir": str(out)})
    Pipeline.from_config(made).source().save().build()
    path = out / "code" / MANIFEST
    manifest = read_checked(path)
    counts = manifest["ledger"]["entries"][0][side]
    counts[next(iter(counts))] += 1
    commit_checked(path, manifest)
    [found] = verify(out / "code")
    assert "its ledger does not add up" in str(found.problems[0])


def test_a_cache_below_a_saved_folder_is_read_with_the_options_of_the_cache() -> None:
    own, saves = {"key": "cache"}, {"key": "save"}
    data = PipelineConfig(
        datasets=(DatasetConfig(data_files="a.txt"),),
        cache_dir="s3://b/out/cache",
        cache=CacheConfig(storage_options=own),
        save=SaveStageConfig(output_dir="s3://b/out", storage_options=saves),
    )
    for path, options in (("s3://b/out/cache", own), ("s3://b/out", saves), ("s3://b/a", own)):
        assert _options_for(path, data) == options


def test_a_saved_folder_in_a_bucket_is_repaired(tmp_path: Path, store: Store) -> None:
    url = f"{store.new()}/out"
    save = {"output_dir": url, "num_shards": 3, "storage_options": store.options}
    chain = (
        Pipeline.from_config(values(tmp_path, save=save)).source().tokenize().mix().pack().save()
    )
    chain.build()
    before = store.files(url)
    [whole] = verify(url, store.options)
    assert (whole.ok, whole.files) == (True, 3)
    broken_in(store, url, "part-")
    [broken] = verify(url, store.options)
    assert "damaged: checksum" in broken.problems[0].what
    assert all(one.ok for one in chain.repair(f"{url}/"))
    assert store.files(url) == before
    broken_in(store, url, "part-")
    made = values(tmp_path, save=save)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": made}))
    assert main(["verify", url, "--repair", str(tmp_path / "run.yaml")]) == 0
    assert store.files(url) == before


def test_a_token_cache_in_a_bucket_is_repaired(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{store.new()}/cache"
    made = values(tmp_path, cache_dir=url) | {"cache": {"storage_options": store.options}}
    chain = Pipeline.from_config(made).source().tokenize().mix()
    chain.ledger()
    before = store.files(url)
    assert [one.dataset for one in verify(url, store.options)] in (
        ["code", "docs"],
        ["docs", "code"],
    )
    assert all(one.ok for one in verify(url, store.options))
    broken_in(store, url, "tokens/")
    [broken] = [one for one in verify(url, store.options) if not one.ok]
    assert "damaged: checksum" in broken.problems[0].what
    manifest = f"{url}/{next(name for name in before if name.startswith('manifests/'))}"
    assert len(verify(manifest, store.options)) == 1
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": made}))
    assert main(["verify", url, "--repair", str(tmp_path / "run.yaml")]) == 0
    assert store.files(url) == before
    store.filesystem.pipe_file(manifest, b"{")
    again = Pipeline.from_config(made).source().tokenize().mix()
    assert all(one.ok for one in again.repair(f"{url}/"))
    after = {name: data for name, data in store.files(url).items() if f"{url}/{name}" != manifest}
    assert after == {name: data for name, data in before.items() if f"{url}/{name}" != manifest}


def test_a_repair_that_fails_in_a_bucket_leaves_everything(
    tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3.new()}/cache"
    chain = (
        Pipeline.from_config(
            values(tmp_path, cache_dir=url) | {"cache": {"storage_options": s3.options}}
        )
        .source()
        .tokenize()
        .mix()
    )
    chain.ledger()
    broken_in(s3, url, "tokens/")
    before = s3.files(url)

    def fails(self: object, **_: object) -> None:
        raise StorageError(at="here", problem="the disk is full")

    monkeypatch.setattr(CacheWriter, "fill", fails)
    with pytest.raises(StorageError, match="the disk is full"):
        chain.repair(url)
    assert s3.files(url) == before
    monkeypatch.undo()
    assert all(one.ok for one in chain.repair(url)), "though the chain has had it open"


def test_a_tokenizer_that_is_gone_is_noted_of_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(tokenizer(), tmp_path / "own")
    texts = jsonl(tmp_path / "texts.jsonl", [{"text": "a b c"}] * 9)
    tokenize_and_save(texts, str(own), tmp_path / "out")
    shutil.rmtree(own)
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert "  note: the tokenizer is not here" in capsys.readouterr().out


def test_another_tokenizer_under_the_same_name(tmp_path: Path) -> None:
    """The golden probe: the name now leads to files that encode otherwise; a name that leads
    nowhere is only noted.
    """
    cache = prepared(tmp_path)
    edited = json.loads((Path(tokenizer()) / "tokenizer.json").read_text())
    moved = tmp_path / "elsewhere"
    edit(manifest_of(cache, "code"), lambda m: m["tokenizer"].update(name=str(moved)))
    [noted] = [one for one in verify(cache) if one.notes]
    assert noted.ok
    assert "the tokenizer is not here" in noted.notes[0]
    moved.mkdir()
    edited["model"]["merges"] = edited["model"]["merges"][:-5]
    (moved / "tokenizer.json").write_text(json.dumps(edited))
    [wrong] = [one for one in verify(cache) if not one.ok]
    assert "is not the tokenizer that made these tokens" in wrong.problems[0].what


def test_a_dataset_with_a_cache_and_masks_of_its_own(tmp_path: Path) -> None:
    """Prompts are masked, so its token files have a column more; the folder is not the
    pipeline's.
    """
    rows = [{"p": f"question {i} ", "c": f"answer {i * i}"} for i in range(30)]
    data = jsonl(tmp_path / "qa.jsonl", rows)
    dataset = {
        "name": "qa",
        "data_files": str(data),
        "prompt_field": "p",
        "completion_field": "c",
        "cache_path": str(tmp_path / "own"),
    }
    made = Pipeline.from_config(
        to_dict(config(tmp_path)) | {"datasets": [dataset], "pack": {"seq_length": 64}}
    )
    made.source().tokenize().pack()
    loader = made.load({"batch_size": 2}).build()
    before = files(tmp_path / "own", "locks")
    for row in loader.explain(0).rows:
        for segment in row.segments:
            asked, answered = rows[segment.row]["p"], rows[segment.row]["c"]
            if not segment.is_part:
                told = {span.masked: span.text for span in segment.spans}
                assert told[True].strip() == asked.strip()
                assert told[False].strip().startswith(answered)
    [whole] = verify(tmp_path / "own")
    assert whole.ok
    [victim] = (tmp_path / "own" / "tokens").rglob("*.arrow")
    flip(victim)
    again = (
        Pipeline.from_config(to_dict(config(tmp_path)) | {"datasets": [dataset]})
        .source()
        .tokenize()
        .repair(tmp_path / "own")
    )
    assert all(one.ok for one in again)
    assert files(tmp_path / "own", "locks", "plans") == {
        k: v for k, v in before.items() if not k.startswith("plans")
    }


def test_a_repair_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    cache = prepared(tmp_path)
    victim = sorted((cache / "tokens").rglob("*.arrow"))[0]
    flip(victim)
    before = files(cache, "locks", "indexes")
    pipeline = Pipeline.from_config(values(tmp_path)).source().tokenize().mix()
    for file in (tmp_path / "data").rglob("*.jsonl"):
        file.rename(file.with_suffix(".away"))
    with pytest.raises(MissingFileError):
        pipeline.repair(cache)
    assert files(cache, "locks", "indexes") == before
    assert not list(cache.rglob(f"{TEMPORARY}*"))


def test_what_the_pipeline_does_not_make_stays_broken(tmp_path: Path) -> None:
    cache = prepared(tmp_path)
    for file in (cache / "tokens").rglob("*.arrow"):
        os.truncate(file, 10)
    only_code = values(tmp_path) | {
        "datasets": [d for d in values(tmp_path)["datasets"] if d["name"] == "code"]
    }
    after = Pipeline.from_config(only_code).source().tokenize().repair(cache)
    assert {one.dataset: one.ok for one in after} == {"code": True, "docs": False}
    with pytest.raises(
        ConfigError, match=r"cache_dir: no dataset has its tokens in .*\. Set cache_dir="
    ):
        Pipeline.from_config(
            only_code | {"cache_dir": str(tmp_path / "other")}
        ).source().tokenize().repair(cache)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        yaml.safe_dump(
            values(tmp_path, save={"output_dir": str(tmp_path / "out"), "num_shards": 2})
        )
    )
    assert main(["prepare", str(path)]) == 0
    before = files(tmp_path / "cache", "locks"), files(tmp_path / "out")
    for folder in ("cache", "out"):
        assert main(["verify", str(tmp_path / folder)]) == 0
    assert "ok: token cache 'code': 2 files" in capsys.readouterr().out
    shard, tokens = (
        sorted((tmp_path / "out").glob("part-*"))[0],
        sorted((tmp_path / "cache" / "tokens").rglob("*.arrow"))[0],
    )
    flip(shard)
    flip(tokens)
    for folder, victim in (("cache", tokens), ("out", shard)):
        assert main(["verify", str(tmp_path / folder)]) == 1
        assert str(victim) in capsys.readouterr().out
        assert main(["verify", str(tmp_path / folder), "--json"]) == 1
        assert any(not one["ok"] for one in json.loads(capsys.readouterr().out))
        assert main(["verify", str(tmp_path / folder), "--repair", str(path)]) == 0
    assert (files(tmp_path / "cache", "locks"), files(tmp_path / "out")) == before
    assert main(["verify", str(tmp_path)]) == 0, "a folder of saved folders"
    assert main(["verify", str(tmp_path / "data")]) == 2
    assert "is neither a token cache, nor a folder that save() wrote" in capsys.readouterr().err


def test_repair_needs_no_config_where_everything_was_in_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EASYPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    made = values(tmp_path, save={"output_dir": "out", "num_shards": 2}) | {"cache_dir": None}
    for dataset in made["datasets"]:
        dataset["data_files"] = os.path.relpath(dataset["data_files"])
    Pipeline.from_config(made).source().tokenize().mix().pack().save().build()
    before = files(tmp_path / "cache", "locks"), files(tmp_path / "out")
    monkeypatch.chdir("/")
    for victim in (
        *(tmp_path / "cache" / "tokens").rglob("*.arrow"),
        *(tmp_path / "out").glob("part-*"),
    ):
        flip(victim)
    for folder in ("cache", "out"):
        assert main(["verify", "--repair", str(tmp_path / folder)]) == 0
    assert (files(tmp_path / "cache", "locks"), files(tmp_path / "out")) == before
    (tmp_path / "out" / MANIFEST).write_text("{")
    manifest_of(tmp_path / "cache", "docs").write_text("{")
    edit(
        sorted((tmp_path / "cache" / "ranges").rglob("*.json"))[0],
        lambda record: record.update(docs=1),
    )
    assert main(["verify", str(tmp_path / "cache"), "--repair"]) == 0
    assert main(["verify", str(tmp_path / "out"), "--repair"]) == 0
    assert files(tmp_path / "out") == before[1]
    assert main(["verify", str(tmp_path / "out"), "--set", "seed=1"]) == 2
    assert "--set: has no effect without a config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dataset", "chain", "reason"),
    [
        (
            {"data_files": [{"text": "one document"}]},
            lambda p: p,
            r"datasets\[0\].data_files.* in memory",
        ),
        (
            {},
            lambda p: p.transform(Filter(pc.field("text") != "")),
            "its chain has a stage of Python, 'transform'",
        ),
        (
            {"format_callback": f"{__name__}:same", "format_version": "1"},
            lambda p: p,
            r"format_callback runs code",
        ),
    ],
)
def test_repair_says_what_it_has_to_be_told(
    tmp_path: Path, dataset: dict[str, Any], chain: Any, reason: str
) -> None:
    one = {
        "name": "d",
        "data_files": str(jsonl(tmp_path / "d.jsonl", [{"text": "one document"}])),
    } | dataset
    pipeline = chain(
        Pipeline.from_config({**to_dict(config(tmp_path)), "datasets": [one]}).source()
    ).tokenize()
    pipeline.ledger()
    flip(next((tmp_path / "cache" / "tokens").rglob("*.arrow")))
    with pytest.raises(
        ConfigError,
        match=rf"{reason}.*Give the config that made it: easypipe verify PATH CONFIG.YAML --repair",
    ):
        repair_as_made(tmp_path / "cache")


def same(row: dict[str, Any]) -> dict[str, Any]:
    return row


@pytest.mark.parametrize(
    "numbers",
    [
        lambda rows: rows[::-1],
        lambda rows: rows + 1000,
        lambda rows: rows - 1,
        lambda rows: rows + 1,
    ],
    ids=["backwards", "later", "earlier", "one later"],
)
def test_wrong_row_numbers_do_not_pass(tmp_path: Path, numbers: Callable[[Any], Any]) -> None:
    """Tokens, counts and checksums are right, and the documents are told of as other rows."""
    cache = TokenCache(manifest_of(prepared(tmp_path), "code"))
    part = cache.manifest.parts[0]
    with pa.memory_map(str(cache.folder.tokens(part.file))) as mapped:
        batch = pa.ipc.open_file(mapped).get_batch(0)
        assert wrong_content(cache.manifest, part, batch) is None
        assert wrong_content(replace(cache.manifest, pairs=True), part, batch) == (
            f"holds 0 pairs of answers, the manifest says that all {part.docs} documents are pairs"
        )
        largest = pa.compute.max(batch.column("input_ids").flatten()).as_py()
        smaller = replace(cache.manifest.tokenizer, vocab_size=largest)
        assert wrong_content(replace(cache.manifest, tokenizer=smaller), part, batch) == (
            f"token {largest} is outside the vocabulary of {largest}"
        )
        place = batch.schema.get_field_index(ROW_NUMBER)
        field = batch.schema.field(place)
        wrong = batch.set_column(
            place, field, pa.array(numbers(batch.column(place).to_numpy()), field.type)
        )
        assert "row numbers" in str(wrong_content(cache.manifest, part, wrong))


def test_what_is_set_aside_stands_beside_its_place(tmp_path: Path) -> None:
    """In a bucket too: a repair that is killed leaves the damaged file where it can be found."""
    for folder in (f"memory://aside-{tmp_path.name}", str(tmp_path)):
        file = f"{folder}/tokens.arrow"
        storage.commit_bytes(file, b"damaged")
        fs, place = storage.filesystem(folder)
        with pytest.raises(KeyboardInterrupt), aside({file}, None):  # noqa: PT012 (a block is left)
            assert not storage.exists(file)
            [beside] = fs.ls(place, detail=False)
            assert fs.cat_file(beside) == b"damaged"
            raise KeyboardInterrupt
        assert storage.read_bytes(file) == b"damaged"
        assert len(fs.ls(place, detail=False)) == 1
        with aside({file}, None):
            pass
        assert not fs.ls(place, detail=False)


# what only people read, or what nothing that is there could contradict
UNCHECKED = {
    "token cache": r"dataset|content_field|facts\..*|shard_names.*|tokenizer\.(name|\w+_token_id)"
    r"|counts\.(special|escaped|lost)|parts\[\d\]\.blocks|pairs|quarantine_checksum"
    r"|tokenizer\.vocab_size",
    "saved rows": r"ledger\..*|shards\[\d\]\.name|format|compression|columns\..*|fingerprint|schema"
    r"|tokens\.(\w+_token_id|tokenizer|seq_length|vocab_size)",
}


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, dict[Any, Any] | list[Any], Any]]:
    """(path, what holds it, its key) of every number, text and flag."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        path = f"{at}[{key}]" if isinstance(value, list) else f"{at}.{key}".lstrip(".")
        if isinstance(one, dict | list):
            yield from leaves(one, path)
        elif one is not None:
            yield path, value, key


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}0"


@pytest.mark.parametrize("kind", UNCHECKED)
def test_a_manifest_that_lies_in_any_one_place_is_found(tmp_path: Path, kind: str) -> None:
    if kind == "token cache":
        path = manifest_of(prepared(tmp_path), "code")
        place = path
    else:
        place = saved(tmp_path, num_shards=2)
        path = place / MANIFEST
    whole, found = path.read_bytes(), set[str]()
    read = read_checked(path)
    for name, holder, key in list(leaves(read)):
        was = holder[key]
        holder[key] = another(was)
        commit_checked(path, read)
        holder[key] = was
        if all(one.ok for one in verify(place)):
            found.add(name)
    path.write_bytes(whole)
    assert all(one.ok for one in verify(place))
    assert {name for name in found if not re.fullmatch(UNCHECKED[kind], name)} == set()
