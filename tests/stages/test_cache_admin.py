"""Listing and clearing the cache beside real processes that use it."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked
from easypipe import CacheError, ConfigError, Pipeline, StallError, TokenCache
from easypipe.cache import admin as cache_admin
from easypipe.cache.admin import clear_cache, list_cache
from easypipe.cache.folder import RemoteFolder
from easypipe.cache.location import cache_folder
from easypipe.cli import main
from easypipe.cli.cache import _age
from easypipe.core import locks, storage
from easypipe.save.verify import verify
from pipelines import config
from stores import Store
from token_support import (
    ShardedTexts,
    WithIdentity,
    prepare,
    small_tokenizer,
    small_tokenizer_folder,
    texts,
)

TESTS = Path(__file__).parents[1]


def start(cache_dir: Path, what: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        str(TESTS / "stages" / "cache_users.py"),
        str(small_tokenizer_folder()),
        str(cache_dir),
        what,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return forked.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line
    raise AssertionError(f"the process ended without saying {word!r}")


def put(cache_dir: Path, name: str, *, rows: int = 40, seed: int = 0, days_ago: float = 0) -> Path:
    """Prepares a dataset and closes it; `days_ago` turns its clock back."""
    path = prepare(
        ShardedTexts(texts(rows, seed=seed)), small_tokenizer(), dataset=name, cache_dir=cache_dir
    ).path
    os.utime(path, (time.time() - days_ago * 86_400,) * 2)
    gc.collect()
    return path


def left(cache_dir: Path) -> list[str]:
    return sorted(
        path.relative_to(cache_dir).parts[0] for path in cache_dir.rglob("*") if path.is_file()
    )


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_cache(tmp_path / "none").datasets == ()
    put(tmp_path, "old", days_ago=3)
    reader = TokenCache(put(tmp_path, "new", rows=25, seed=1))
    listing = list_cache(tmp_path)
    new, old = sorted(listing.datasets, key=lambda one: one.dataset)
    assert (new.dataset, new.rows, new.documents, new.tokens, new.in_use) == (
        "new",
        25,
        25,
        reader.total_tokens,
        True,
    )
    assert (old.dataset, old.in_use) == ("old", False)
    assert 2.9 < old.age_s / 86_400 < 3.1
    tokens = [path for path in (tmp_path / "tokens").rglob("*") if path.is_file()]
    assert new.num_bytes + old.num_bytes == sum(path.stat().st_size for path in tokens)
    assert listing.leftover_bytes == 0
    assert main(["cache", "list", "--cache-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "3 d" in text
    assert "in use" in text
    assert main(["cache", "list", "--cache-dir", str(tmp_path), "--json"]) == 0
    assert {one["dataset"] for one in json.loads(capsys.readouterr().out)["datasets"]} == {
        "old",
        "new",
    }


def test_an_age_has_its_largest_unit() -> None:
    ages = {59: "59 s", 60: "1 min", 3599: "60 min", 3600: "1 h", 86_400: "1 d", 864_000: "10 d"}
    assert {seconds: _age(seconds) for seconds in ages} == ages


def test_clear_removes_everything_and_a_dry_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = (
        Pipeline.from_config(config(tmp_path))
        .source()
        .tokenize()
        .mix({"stop_strategy": "all_exhausted"})
        .pack({"seq_length": 32})
    )
    pipeline.ledger()
    del pipeline
    gc.collect()
    cache = tmp_path / "cache"
    before = left(cache)
    assert main(["cache", "clear", "--cache-dir", str(cache), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "would remove 2 datasets" in said
    assert left(cache) == before
    assert main(["cache", "clear", "--cache-dir", str(cache)]) == 0
    assert capsys.readouterr().out == said.replace("would remove", "removed")
    assert set(left(cache)) <= {"locks", "proofs"}
    Pipeline.from_config(config(tmp_path)).source().tokenize().mix(
        {"stop_strategy": "all_exhausted"}
    ).ledger()
    assert all(one.ok for one in verify(cache))


def test_tokens_behind_a_link_are_listed_and_cleared(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tokens").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "circle").symlink_to(tmp_path / "cache")
    put(tmp_path / "cache", "a")
    listing = list_cache(tmp_path / "cache")
    assert listing.num_bytes > listing.datasets[0].num_bytes > 0
    assert clear_cache(tmp_path / "cache").num_bytes > listing.datasets[0].num_bytes
    assert not list((tmp_path / "disk").rglob("*.arrow"))
    (tmp_path / "disk" / "circle").unlink()
    clear_cache(tmp_path / "cache")
    assert (tmp_path / "cache" / "tokens").is_symlink()


def test_clear_by_name_and_age(tmp_path: Path) -> None:
    put(tmp_path, "a", days_ago=5)
    put(tmp_path, "b", seed=1, days_ago=5)
    put(tmp_path, "c", seed=2, days_ago=0.9)
    with pytest.raises(ConfigError, match=r"--dataset: no dataset 'aa' in .* \(have: a, b, c\)"):
        clear_cache(tmp_path, datasets=["aa"])
    with pytest.raises(ConfigError, match="--older-than: -1 days are not an age"):
        clear_cache(tmp_path, older_than_days=-1)
    assert clear_cache(tmp_path, older_than_days=1, datasets=["b", "c"]).removed == ("b",)
    assert {one.dataset for one in list_cache(tmp_path).datasets} == {"a", "c"}
    assert clear_cache(tmp_path, older_than_days=1).removed == ("a",)
    assert all(one.ok for one in verify(tmp_path))
    assert list_cache(tmp_path).leftover_bytes == 0


@pytest.mark.parametrize("remote", [False, True])
def test_a_folder_that_is_no_cache_is_not_cleared(tmp_path: Path, remote: bool) -> None:
    """A project has its own configs/ and plans/, which clearing a cache removes."""
    folder = f"memory://clear/{tmp_path.name}" if remote else str(tmp_path)
    for name in ("configs/a.json", "plans/b.json", "tokens/c.arrow"):
        storage.commit_bytes(f"{folder}/{name}", b"{}")
    (tmp_path / "empty").mkdir()
    before = {*tmp_path.rglob("*")}
    said = (
        rf"^--cache-dir: {folder} is no token cache: it holds configs, .*plans, tokens.* Give the"
    )
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match=said):
            clear_cache(cache_folder(folder), dry_run=dry_run)
    for nothing in ("empty", "nowhere"):
        assert clear_cache(cache_folder(f"{folder}/{nothing}")).files == 0
    assert {*tmp_path.rglob("*")} == before
    assert storage.exists(f"{folder}/configs/a.json")


def test_manifests_go_before_what_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "a")
    removed: list[str] = []
    monkeypatch.setattr(
        cache_admin.storage, "remove", lambda path, options: removed.append(Path(path).parent.name)
    )
    clear_cache(tmp_path)
    assert "manifests" in removed
    assert removed == sorted(removed, key=lambda folder: folder != "manifests")
    assert removed[-1] != "manifests"


def test_tokens_that_two_datasets_share_stay_until_both_go(tmp_path: Path) -> None:
    rows = [texts(20), texts(20, seed=1)]
    prepare(WithIdentity(*rows), small_tokenizer(), dataset="both", cache_dir=tmp_path)
    prepare(WithIdentity(rows[0]), small_tokenizer(), dataset="first", cache_dir=tmp_path)
    gc.collect()
    files = len(list((tmp_path / "tokens").rglob("*.arrow")))
    cleared = clear_cache(tmp_path, datasets=["both"])
    assert cleared.removed == ("both",)
    assert all(one.ok for one in verify(tmp_path))
    assert 0 < len(list((tmp_path / "tokens").rglob("*.arrow"))) < files
    clear_cache(tmp_path, datasets=["first"])
    assert not list(tmp_path.glob("tokens/*/*.arrow"))


def test_tokens_that_two_ranges_share_are_counted_once(tmp_path: Path) -> None:
    prepare(ShardedTexts(texts(10), texts(10)), small_tokenizer(), dataset="d", cache_dir=tmp_path)
    (file,) = (tmp_path / "tokens").rglob("*.arrow")
    (found,) = list_cache(tmp_path).datasets
    assert (found.rows, found.num_bytes) == (20, file.stat().st_size)


def test_leftovers_go_with_a_full_clear_only(tmp_path: Path) -> None:
    reader = TokenCache(put(tmp_path, "kept"))
    path = put(tmp_path, "gone", seed=1)
    path.unlink()  # as a preparation that never finished leaves it
    assert list_cache(tmp_path).leftover_bytes > 0
    clear_cache(tmp_path, older_than_days=0)
    assert list_cache(tmp_path).leftover_bytes > 0
    assert clear_cache(tmp_path).kept == ("kept",)
    assert list_cache(tmp_path).leftover_bytes == 0
    reader.verify()


def test_what_was_set_aside_of_a_dataset_that_stays_is_no_leftover(tmp_path: Path) -> None:
    source = ShardedTexts([*texts(10), None])
    options = {"dataset": "d", "cache_dir": tmp_path, "on_error": "quarantine"}
    path = prepare(source, small_tokenizer(), **options).path
    assert isinstance(path, Path)
    [aside] = path.parent.glob("*.quarantine.jsonl")
    assert list_cache(tmp_path).leftover_bytes == 0
    aside.rename(aside.with_name("0000.quarantine.jsonl"))
    assert list_cache(tmp_path).leftover_bytes > 0


def test_of_a_reader_whose_manifest_nobody_can_read_nothing_goes(tmp_path: Path) -> None:
    reader = TokenCache(put(tmp_path, "kept"))
    put(tmp_path, "gone", seed=1)
    Path(reader.path).write_text('{"format": 99}')  # as a later version may write it
    tokens = {name for name in reader._names if Path(name).exists()}
    cleared = clear_cache(tmp_path)
    assert (cleared.removed, cleared.kept) == (("gone",), ("?",))
    assert tokens
    assert all(Path(name).exists() for name in tokens)
    reader.verify()


def test_what_another_process_reads_stays(tmp_path: Path) -> None:
    put(tmp_path, "idle", seed=7)
    process = start(tmp_path, "hold")
    try:
        wait_for(process, "open")
        cleared = clear_cache(tmp_path)
        assert (cleared.removed, cleared.kept) == (("idle",), ("slow",))
        assert [(one.dataset, one.in_use) for one in list_cache(tmp_path).datasets] == [
            ("slow", True)
        ]
    finally:
        rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "still True\n")
    assert clear_cache(tmp_path).removed == ("slow",)


def test_a_killed_reader_holds_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "hold")
    wait_for(process, "open")
    process.kill()
    process.wait(timeout=60)
    assert clear_cache(tmp_path).removed == ("slow",)


def test_nothing_is_cleared_while_another_process_prepares(tmp_path: Path) -> None:
    process = start(tmp_path, "prepare")
    try:
        wait_for(process, "reading")
        with pytest.raises(CacheError, match="a process prepares data in it right now"):
            clear_cache(tmp_path)
        assert main(["cache", "clear", "--cache-dir", str(tmp_path)]) == 2
    finally:
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert clear_cache(tmp_path).removed == ("slow",)


def test_two_that_prepare_the_same_share_the_work(tmp_path: Path) -> None:
    both = [start(tmp_path, "prepare") for _ in range(2)]
    said = [process.communicate(timeout=120)[0].splitlines()[-1].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0][1] == said[1][1]
    assert sorted(int(words[2]) for words in said) == [0, 120], (
        "one encoded everything, the other waited and found it"
    )
    assert all(one.ok for one in verify(tmp_path))


def test_the_second_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    first = start(tmp_path, "prepare")
    wait_for(first, "reading")
    wait_for(first, "reading")
    wait_for(first, "reading")
    second = start(tmp_path, "prepare")
    wait_for_lock(tmp_path)
    first.kill()
    first.wait(timeout=60)
    said = second.communicate(timeout=60)[0].splitlines()[-1].split()
    assert second.returncode == 0
    assert int(said[2]) <= 120
    assert all(one.ok for one in verify(tmp_path))


def wait_for_lock(cache_dir: Path) -> None:
    deadline = time.monotonic() + 30
    while not list((cache_dir / locks.FOLDER).glob("*.writer.lock")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_waiting_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locks.hold(path, exclusive=True, what="nobody"):
        assert locks.try_hold(path, exclusive=False) is None
        with pytest.raises(StallError, match=r"waited 0\.05 s for the one above"):
            locks.hold(path, exclusive=True, what="the one above", timeout_s=0.05)
    with (
        locks.hold(path, exclusive=False, what="nobody"),
        locks.hold(path, exclusive=False, what="nobody"),
    ):
        assert locks.try_hold(path, exclusive=True) is None
    locks.remove(path)
    assert locks.try_hold(path, exclusive=True) is not None


def test_one_prepares_alone(tmp_path: Path) -> None:
    with locks.preparing(tmp_path, "key", "a") as waited:
        assert not waited
        assert locks.try_hold(locks.writer_lock(tmp_path, "key"), exclusive=False) is None


def test_a_lock_on_a_file_that_was_removed_before_it_was_locked_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened, removals = tmp_path / "a.lock", locks._open, [tmp_path / "a.lock"]

    def removed_once(path: Path) -> int:
        descriptor = opened(path)
        if removals:
            locks.remove(removals.pop())
        return descriptor

    monkeypatch.setattr(locks, "_open", removed_once)
    with locks.hold(path, exclusive=True, what="nobody"):
        assert locks.try_hold(path, exclusive=True) is None


@pytest.mark.parametrize("reason", ["EACCES", "EPERM", "EROFS", "ENOSPC"])
def test_a_cache_that_cannot_be_written_is_still_read(
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where it is read-only, nobody clears it either; a full disk is told."""
    path = put(tmp_path, "a")
    for lock in (tmp_path / locks.FOLDER).iterdir():
        lock.unlink()
    opened = os.open

    def read_only(name: object, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(getattr(errno, reason), "told")
        return opened(name, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(locks.os, "open", read_only)
    assert TokenCache(path).num_docs == 40
    assert ("will not know that it is read" in caplog.text) == (reason == "ENOSPC")


def test_a_cache_in_a_bucket_is_listed_and_cleared(
    tmp_path: Path,
    store: Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"{store.new()}/cache"
    folder = RemoteFolder(url, tmp_path / "local", options=store.options)
    rows = [texts(20), texts(20, seed=1), texts(20, seed=2)]
    for name, shards, touched in (("a", rows[:2], (0, 1)), ("b", rows[1:], (1, 2))):
        prepare(
            WithIdentity(*shards, touched=touched),
            small_tokenizer(),
            dataset=name,
            cache_dir=folder,
        )
    before = store.files(url)
    listing = list_cache(folder)
    assert [
        (one.dataset, one.rows, one.in_use)
        for one in sorted(listing.datasets, key=lambda one: one.dataset)
    ] == [
        ("a", 40, False),
        ("b", 40, False),
    ]
    assert listing.num_bytes == sum(map(len, before.values()))
    assert listing.leftover_bytes == 0
    assert all(one.age_s < 600 for one in listing.datasets)
    assert clear_cache(folder, older_than_days=1).removed == ()
    assert clear_cache(folder, datasets=["a"], dry_run=True).files > 0
    assert clear_cache(folder, dry_run=True).files == len(before), "their own tokens, however young"
    assert store.files(url) == before
    assert clear_cache(folder, datasets=["a"]).removed == ("a",)
    assert all(one.ok for one in verify(url, store.options))
    assert [one.dataset for one in list_cache(folder).datasets] == ["b"]
    [manifest] = [name for name in store.files(url) if name.startswith("manifests/")]
    store.filesystem.rm(f"{url.partition('://')[2]}/{manifest}")
    assert list_cache(folder).leftover_bytes > 0
    assert clear_cache(folder).files == 0, "leftovers may be of somebody who is at work"
    monkeypatch.setattr(cache_admin, "YOUNG_S", -1.0)
    clear_cache(folder)
    assert store.files(url) == {}
    monkeypatch.setattr(
        "easypipe.cache.location.cache_folder",
        lambda given, **_: RemoteFolder(given, tmp_path / "local", options=store.options),
    )
    assert main(["cache", "list", "--cache-dir", url]) == 0
    assert main(["cache", "clear", "--cache-dir", url]) == 0
    assert f"removed 0 datasets: 0 files, 0.0 MB: {url}" in capsys.readouterr().out


def test_a_file_is_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    for command in ("list", "clear"):
        assert main(["cache", command, "--cache-dir", str(path)]) == 2
        assert f"--cache-dir: {path} is a file. Give a folder." in capsys.readouterr().err
    assert path.read_text() == "{}"
