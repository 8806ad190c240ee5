from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

import forked
import strategies
from easypipe.cache import writer as cache_writer
from easypipe.cache.folder import STATS
from easypipe.cache.ranges import cut
from easypipe.cache.reader import TokenCache
from easypipe.core import storage
from easypipe.core.errors import (
    BudgetError,
    CacheError,
    ConfigError,
    EasypipeError,
    SourceError,
    StorageError,
    TokenizerError,
)
from easypipe.core.protocols import ProgressEvent, Shard
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.open import open_files
from easypipe.stages.tokenize import encoders
from easypipe.stages.tokenize.text_rows import Texts
from laws import assert_conserved, assert_no_new_threads, assert_stateless_reads
from strategies import examples
from token_support import (
    CountingTokenizer,
    ShardedTexts,
    WithIdentity,
    prepare,
    prepare_part,
    small_tokenizer,
    small_tokenizer_folder,
    texts,
)

TESTS = Path(__file__).parents[1]


def documents(cache: TokenCache) -> list[list[int]]:
    return [cache.tokens(doc).tolist() for doc in range(cache.num_docs)]


def facts(cache: TokenCache) -> dict:
    return dict(cache.manifest.facts)


# What comes out


@examples(25)
@given(strategies.shards())
def test_tokens_order_ledger_and_reads(
    tmp_path_factory: pytest.TempPathFactory, tables: list[pa.Table]
) -> None:
    shards = [table.column("text").to_pylist() for table in tables]
    source, tokenizer = ShardedTexts(*shards, cuts=4), small_tokenizer()
    folder = tmp_path_factory.mktemp("cache")
    expected = [tokenizer.reference_encode(text) for rows in shards for text in rows]
    if not expected:
        with pytest.raises(SourceError, match="not one of 0 rows became a document"):
            prepare(source, tokenizer, dataset="d", cache_dir=folder)
        return
    cache = prepare(source, tokenizer, dataset="d", cache_dir=folder)
    assert documents(cache) == expected
    assert_conserved(cache.ledger)
    assert [(one.stage, one.unit) for one in cache.ledger.entries] == [
        ("tokenize", "rows"),
        ("tokenize", "tokens"),
    ]
    assert cache.ledger.find("tokenize", "d", "rows").into == {"read": len(expected)}
    assert_stateless_reads(cache)
    assert [cache.where(doc) for doc in range(cache.num_docs)] == [
        (f"shard-{s}", r) for s, rows in enumerate(shards) for r in range(len(rows))
    ]


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("batch_size", [1, 1000])
def test_the_same_whatever_the_workers(tmp_path: Path, workers: int, batch_size: int) -> None:
    source, tokenizer = ShardedTexts(texts(95), texts(7, seed=3)), small_tokenizer()
    counter = CountingTokenizer(tokenizer)
    before = set(threading.enumerate())
    cache = prepare(
        source,
        tokenizer,
        dataset="d",
        cache_dir=tmp_path,
        num_workers=workers,
        batch_size=batch_size,
    )
    assert (
        cache.fingerprint
        == prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path / "other").fingerprint
    )
    assert counter.calls == (102 if batch_size == 1 else 11)
    assert_no_new_threads(before)


def test_special_tokens_and_truncation_are_counted(tmp_path: Path) -> None:
    rows = texts(50)
    tokenizer = small_tokenizer(max_length=4)
    cache = prepare(ShardedTexts(rows), tokenizer, dataset="d", cache_dir=tmp_path)
    entry = cache.ledger.find("tokenize", "d", "tokens")
    full = [len(small_tokenizer().reference_encode(text)) for text in rows]
    assert entry.into["encoded"] == sum(full)
    assert entry.out == {
        "stored": sum(min(4, n) for n in full),
        "truncated": sum(max(0, n - 4) for n in full),
    }
    # a text that is cut gets an EOS as the others do where it is packed
    assert not cache.has_eos(np.arange(50)).any()


@pytest.mark.shared
def test_bos_is_counted_and_eos_is_seen(tmp_path: Path, shared_data: Path) -> None:
    from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "mistral_v1"))
    cache = prepare(
        ShardedTexts(["one", "two</s>", "three"]), tokenizer, dataset="d", cache_dir=tmp_path
    )
    assert cache.ledger.find("tokenize", "d", "tokens").into["special"] == 3
    assert cache.has_eos(np.arange(3)).tolist() == [False, True, False]
    assert (cache.eos_token_id, cache.vocab_size, cache.buffers().id_bytes) == (2, 32000, 2)


def test_progress_comes_in_order(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    prepare(
        ShardedTexts(texts(35)),
        small_tokenizer(),
        dataset="d",
        cache_dir=tmp_path,
        progress=events.append,
    )
    assert [event.done for event in events] == [10, 20, 30, 35]
    assert {(event.stage, event.dataset, event.total, event.unit) for event in events} == {
        ("tokenize", "d", 35, "rows")
    }


# Going on


def test_a_finished_cache_opens_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, tokenizer = WithIdentity(texts(40)), small_tokenizer()
    first = prepare(source, tokenizer, dataset="d", cache_dir=tmp_path)
    source.reads.clear()
    counter = CountingTokenizer(tokenizer)
    with caplog.at_level(logging.INFO, logger="easypipe"):
        again = prepare(source, tokenizer, dataset="other", cache_dir=tmp_path)
    assert (source.reads, counter.texts, again.fingerprint) == ([], 0, first.fingerprint)
    assert "is complete, nothing is tokenized" in caplog.text
    assert again.ledger.find("tokenize", "other", "rows")


def test_what_was_measured_is_told_whole(tmp_path: Path) -> None:
    """Every fact that the ledger has of a dataset; the speed of all of it only where all was done."""
    counts = {"ranges_reused", "ranges_found_by_content", "ranges_written", "documents_encoded"}
    told = {"seconds", "text_bytes", "encoder", *counts}
    rows, more = texts(40), texts(20, seed=1)
    first = prepare(WithIdentity(rows), small_tokenizer(), dataset="d", cache_dir=tmp_path)
    assert {*facts(first)} == told | {"megabytes_per_second"}
    assert facts(first)["text_bytes"] == sum(len(text.encode()) for text in rows)
    assert facts(first)["encoder"] in ("gigatoken", "tokenizers")
    assert (facts(first)["documents_encoded"], facts(first)["ranges_written"]) == (40, 4)
    second = prepare(WithIdentity(rows, more), small_tokenizer(), dataset="d", cache_dir=tmp_path)
    assert {*facts(second)} == told
    assert (facts(second)["documents_encoded"], facts(second)["ranges_reused"]) == (20, 4)
    for name, value in facts(second).items():
        assert second.ledger.facts[f"tokenize.d.{name}"] == value


def test_a_touched_file_is_read_and_not_tokenized_again(tmp_path: Path) -> None:
    prepare(
        WithIdentity(texts(40), texts(20, seed=1)),
        small_tokenizer(),
        dataset="d",
        cache_dir=tmp_path,
    )
    tokenizer = small_tokenizer()
    counter = CountingTokenizer(tokenizer)
    source = WithIdentity(texts(40), texts(20, seed=1), touched=(1, 0))
    cache = prepare(source, tokenizer, dataset="d", cache_dir=tmp_path)
    assert {shard for shard, _, _ in source.reads} == {0}
    assert counter.texts == 0
    assert (
        facts(cache)["ranges_found_by_content"],
        facts(cache)["ranges_reused"],
        facts(cache)["ranges_written"],
    ) == (4, 2, 0)
    cache.verify()


def test_a_changed_file_is_tokenized_where_it_changed(tmp_path: Path) -> None:
    rows = texts(40)
    before = prepare(
        WithIdentity(rows, texts(20, seed=1)), small_tokenizer(), dataset="d", cache_dir=tmp_path
    )
    tokenizer = small_tokenizer()
    counter = CountingTokenizer(tokenizer)
    changed = [*rows[:15], "another text", *rows[16:]]
    cache = prepare(
        WithIdentity(changed, texts(20, seed=1), touched=(1, 0)),
        tokenizer,
        dataset="d",
        cache_dir=tmp_path,
    )
    assert counter.texts == 10  # one range of ten rows
    assert cache.fingerprint != before.fingerprint
    assert documents(cache)[15] == tokenizer.reference_encode("another text")
    # open caches keep what they had
    assert documents(before)[15] == tokenizer.reference_encode(rows[15])


def test_rows_are_found_by_all_that_their_tokens_follow_from(tmp_path: Path) -> None:
    """The same characters in other texts are not those texts."""
    for rows in (["ab", "c"], ["a", "bc"]):
        tokenizer = small_tokenizer()
        cache = prepare(ShardedTexts(rows), tokenizer, dataset="d", cache_dir=tmp_path)
        assert documents(cache) == [tokenizer.reference_encode(text) for text in rows]
    two, whole = np.arange(2), pa.array(["-", "ab", "c", "-"], pa.large_string())
    found = Texts(
        texts=whole.slice(1, 2),
        rows=two,
        rejects=(),
        spans=[[[0, 1]], []],
        ends=two.astype(np.uint8),
        lost=two,
        goes_on=two > 0,
        desirable=two.astype(np.uint8),
    )
    others: list[dict[str, Any]] = [
        {"texts": pa.array(["a", "bc"], pa.large_string())},
        {"texts": pa.array(["ab", "d"], pa.large_string())},
        {"rows": two + 1},
        {"spans": [[[0, 2]], []]},
        {"ends": np.zeros(2, np.uint8)},
        {"lost": -two},
        {"goes_on": two < 1},
        {"desirable": np.ones(2, np.uint8)},
    ]
    hashes = [replace(found, **other).content_hash() for other in ({}, *others)]
    assert len({*hashes}) == len(hashes)
    alone = pa.array(["ab", "c"], pa.large_string())
    assert replace(found, texts=alone).content_hash() == hashes[0]


def test_other_options_are_another_cache(tmp_path: Path) -> None:
    source = WithIdentity(texts(20))
    prints = {
        prepare(source, small_tokenizer(**options), dataset="d", cache_dir=tmp_path).fingerprint
        for options in ({}, {"max_length": 3}, {"add_special_tokens": False})
    }
    assert len(prints) == 3


STEPS = 60  # of seven ranges: four for each token file, each record, and the manifest


def assert_goes_on(cache_dir: Path, killed_at: int, fingerprint: str) -> int:
    """Returns how many of the seven ranges the killed process had committed: no text of theirs is
    tokenized again.
    """
    committed = sum(
        1
        for file in cache_dir.glob("tokens/*/*.arrow")
        if not file.name.startswith(storage.TEMPORARY)
    )
    tokenizer = small_tokenizer()
    counter = CountingTokenizer(tokenizer)
    cache = prepare(
        WithIdentity(texts(40), texts(30, seed=1)),
        tokenizer,
        dataset="d",
        cache_dir=cache_dir,
        num_workers=1,
    )
    cache.verify()
    assert cache.fingerprint == fingerprint
    assert counter.texts == 70 - 10 * committed, f"killed at step {killed_at}"
    assert not list(cache_dir.rglob(f"{storage.TEMPORARY}*")), "leftovers of the killed process"
    return committed


@pytest.mark.slow
def test_killed_at_any_point_it_goes_on(tmp_path: Path) -> None:
    """A process ends as by `kill -9` before a step of a commit; the next one tokenizes only what
    was not committed.
    """

    def run(die_at: int) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            str(Path(__file__).with_name("kill_prepare.py")),
            str(small_tokenizer_folder()),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        command += [str(tmp_path / str(die_at)), str(die_at)]
        return forked.run(command, env=environment)

    points = [0, 1, 2, 3, 4, 7, 30, 58, 60]
    with ThreadPoolExecutor(2) as pool:
        done = dict(zip(points, pool.map(run, points), strict=True))
    assert {point: process.returncode for point, process in done.items()} == {
        point: 77 if point else 0 for point in points
    }
    whole = json.loads(done[0].stdout)
    assert whole["steps"] == STEPS
    committed = [
        assert_goes_on(tmp_path / str(point), point, whole["fingerprint"]) for point in points[1:]
    ]
    assert (committed[0], committed[-1]) == (0, 7)


def test_stopped_at_every_step_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(BaseException):
        """As Ctrl-C is."""

    fingerprint = prepare(
        WithIdentity(texts(40), texts(30, seed=1)),
        small_tokenizer(),
        dataset="d",
        cache_dir=tmp_path / "0",
    ).fingerprint
    for point in range(1, STEPS + 1):
        calls = 0

        def hook(step: str, path: str, point: int = point) -> None:
            nonlocal calls
            calls += "/proofs/" not in path
            if calls == point and "/proofs/" not in path:
                raise Stop

        storage.set_fault_hook(hook)
        source, tokenizer = WithIdentity(texts(40), texts(30, seed=1)), small_tokenizer()
        with monkeypatch.context() as patch:
            # so that nothing follows the step at which it stops
            patch.setattr(cache_writer, "Threads", OneByOne)
            with pytest.raises(Stop):
                prepare(
                    source, tokenizer, dataset="d", cache_dir=tmp_path / str(point), num_workers=1
                )
        storage.set_fault_hook(None)
        committed = assert_goes_on(tmp_path / str(point), point, fingerprint)
        assert committed == min(7, (point + 4) // 8), (
            "the fourth step of a token file comes after its rename"
        )


class OneByOne:
    """An executor that does what it is given at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, call, *arguments):
        result: Future = Future()
        result.set_result(call(*arguments))
        return result

    def shutdown(self, **_: object) -> None: ...


@pytest.mark.parametrize("step", ["write", "sync", "rename", "committed"])
def test_a_failing_disk_is_told_and_nothing_is_torn(tmp_path: Path, step: str) -> None:
    source = WithIdentity(texts(40))
    failed = threading.Event()

    def hook(at: str, path: str) -> None:
        if at == step and path.endswith(".arrow") and not failed.is_set():
            failed.set()
            raise StorageError(at=path, problem="no space left on device")

    storage.set_fault_hook(hook)
    with pytest.raises(StorageError, match="no space left on device") as caught:
        prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path)
    assert (
        any(
            "while tokenizing dataset 'd', shard-0, rows 0:10" in note
            for note in caught.value.__notes__
        )
        or step
    )
    storage.set_fault_hook(None)
    cache = prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path)
    assert documents(cache) == [small_tokenizer().reference_encode(text) for text in texts(40)]


def test_two_at_once_do_no_harm(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from token_support import prepare\n"
        "from easypipe.transforms.tokenizer.tokenizer import load_tokenizer\n"
        "from token_support import WithIdentity, texts\n"
        "source = WithIdentity(*(texts(60, seed=s) for s in range(4)))\n"
        "cache = prepare(source, load_tokenizer(sys.argv[1]), dataset='d', "
        "cache_dir=Path(sys.argv[2]))\n"
        "cache.verify(); print(cache.fingerprint, cache.num_docs)\n"
    )
    command = [sys.executable, "-c", code, str(small_tokenizer_folder()), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    both = [
        forked.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert results[0][0].split()[1] == "240"


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_token_file_that_is_gone_or_cut_is_made_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = WithIdentity(texts(40))
    first = prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path)
    victim = tmp_path / "tokens" / first.manifest.parts[2].file
    victim.unlink() if damage == "gone" else os.truncate(victim, 100)
    tokenizer = small_tokenizer()
    counter = CountingTokenizer(tokenizer)
    again = prepare(source, tokenizer, dataset="d", cache_dir=tmp_path)
    assert counter.texts == 10
    assert again.fingerprint == first.fingerprint
    assert "the token cache is prepared again" in caplog.text
    again.verify()


def test_a_flipped_bit_is_not_taken_over(tmp_path: Path) -> None:
    first = prepare(WithIdentity(texts(40)), small_tokenizer(), dataset="d", cache_dir=tmp_path)
    victim = tmp_path / "tokens" / first.manifest.parts[2].file
    data = bytearray(victim.read_bytes())
    data[
        first.tokens(20).ctypes.data
        - first.buffers().ids_address[2].item()
        + data.find(first.tokens(20).tobytes())
    ] ^= 1
    storage.commit_bytes(victim, bytes(data))
    # The touched file is read again; its tokens are found by content, seen to be damaged, and made
    # again.
    again = prepare(
        WithIdentity(texts(40), touched=(1,)), small_tokenizer(), dataset="d", cache_dir=tmp_path
    )
    assert facts(again)["ranges_written"] == 1
    assert again.fingerprint == first.fingerprint
    again.verify()


# Bad rows


BAD: list[str | None] = ["good", None, "", "fine", "", "last"]


def test_a_bad_row_stops_and_is_named(tmp_path: Path) -> None:
    source = ShardedTexts(texts(30), [*texts(12), *BAD])
    with pytest.raises(SourceError) as caught:
        prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path)
    assert str(caught.value) == (
        "shard-1, row 13, column 'text': null: no value. Correct the row, or set on_error to "
        "'skip' or 'quarantine'."
    )
    # the advice works
    cache = prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path, on_error="skip")
    assert cache.num_docs == 45
    with pytest.raises(SourceError, match="row 13"):  # a finished cache that skipped is no excuse
        prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path)


def test_bad_rows_are_counted_by_reason_and_keep_their_numbers(tmp_path: Path) -> None:
    cache = prepare(
        ShardedTexts(BAD, cuts=2),
        small_tokenizer(),
        dataset="d",
        cache_dir=tmp_path,
        on_error="skip",
    )
    assert cache.ledger.find("tokenize", "d", "rows").out == {"written": 3, "empty": 2, "null": 1}
    assert [cache.where(doc) for doc in range(3)] == [
        ("shard-0", 0),
        ("shard-0", 3),
        ("shard-0", 5),
    ]
    assert_conserved(cache.ledger)
    assert_stateless_reads(cache)
    assert cache.quarantine is None


def test_quarantined_rows_are_written_with_their_place(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.large_string(), 2, [None, pa.py_buffer(np.array([0, 2, 4])), pa.py_buffer(b"ok\xff\xfe")]
    )
    data = pa.table(
        {"text": pa.chunked_array([pa.array([None, "", "good"], pa.large_string()), broken])}
    )
    cache = prepare(
        InMemoryShardedSource(data),
        small_tokenizer(),
        dataset="d",
        cache_dir=tmp_path,
        on_error="quarantine",
    )
    assert cache.quarantine is not None
    lines = [json.loads(line) for line in cache.quarantine.read_text().splitlines()]
    assert lines == [
        {
            "dataset": "d",
            "file": "memory",
            "row": 0,
            "reason": "null",
            "detail": "no value",
            "raw": "null",
        },
        {
            "dataset": "d",
            "file": "memory",
            "row": 4,
            "reason": "invalid_utf8",
            "detail": "not UTF-8",
            "raw": '"\\\\xff\\\\xfe"',
        },
    ]
    assert cache.num_docs == 2


def test_what_a_file_refuses_is_quarantined_as_it_stands_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{bad\n{"text": null}\n{"text": 5}\n{"text": "fine"}\n')
    source = open_files(path, on_error="quarantine")
    cache = prepare(
        source,
        small_tokenizer(),
        dataset="d",
        cache_dir=tmp_path / "cache",
        on_error="quarantine",
        max_bad_rows=3,
    )
    assert cache.quarantine is not None
    lines = [json.loads(line) for line in cache.quarantine.read_text().splitlines()]
    assert [(line["file"], line["row"], line["reason"], line["raw"]) for line in lines] == [
        (str(path), 2, "unparsable", "{bad"),
        (str(path), 3, "null", '{"text": null}'),
        (str(path), 4, "not_a_string", '{"text": 5}'),
    ]
    # The blank line is counted and not charged: it is no bad row.
    assert cache.ledger.find("tokenize", "d", "rows").out == {
        "written": 2,
        "blank_line": 1,
        "not_a_string": 1,
        "null": 1,
        "unparsable": 1,
    }
    assert cache.where(1) == (str(path), 5)


@pytest.mark.shared
def test_a_text_without_tokens_is_a_bad_row(tmp_path: Path, shared_data: Path) -> None:
    from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

    # drops what it does not know
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "torchtitan_tiny"))
    cache = prepare(
        ShardedTexts(["abc", "é", "日本", "def"]),
        tokenizer,
        dataset="d",
        cache_dir=tmp_path,
        on_error="skip",
    )
    assert cache.ledger.find("tokenize", "d", "rows").out == {"written": 2, "no_tokens": 2}
    assert (cache.lengths(np.arange(2)) > 0).all()


@pytest.mark.parametrize("workers", [1, 4])
def test_the_budget_is_charged_in_shard_order(tmp_path: Path, workers: int) -> None:
    source = ShardedTexts([*texts(25), None], [None, *texts(3), None, None], cuts=2)
    with pytest.raises(BudgetError) as caught:
        prepare(
            source,
            small_tokenizer(),
            dataset="d",
            cache_dir=tmp_path,
            on_error="skip",
            max_bad_rows=2,
            num_workers=workers,
        )
    assert str(caught.value) == (
        "shard-1, row 4, column 'text': bad row number 3 of dataset 'd' (null: no value), and max_bad_rows is 2. "
        "Correct the rows, or raise max_bad_rows."
    )
    assert (
        prepare(
            source,
            small_tokenizer(),
            dataset="d",
            cache_dir=tmp_path,
            on_error="skip",
            max_bad_rows=4,
        ).num_docs
        == 28
    )
    with pytest.raises(BudgetError, match=r"bad row number 4 .*, and max_bad_rows is 3"):
        prepare(
            source,
            small_tokenizer(),
            dataset="d",
            cache_dir=tmp_path,
            on_error="skip",
            max_bad_rows=3,
        )
    with pytest.raises(ConfigError, match="max_bad_rows: has no effect while on_error is 'error'"):
        prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path, max_bad_rows=4)


def test_a_part_is_not_charged_what_the_whole_may_have(tmp_path: Path) -> None:
    source, how = ShardedTexts([None, None, *texts(9)]), {"dataset": "d", "cache_dir": tmp_path}
    skipping: dict[str, Any] = {**how, "on_error": "skip", "max_bad_rows": 1}
    assert prepare_part(source, small_tokenizer(), part=[0], **skipping) > 0
    with pytest.raises(BudgetError, match="bad row number 2 "):
        prepare(source, small_tokenizer(), **skipping)


def test_missing_and_wrong_columns(tmp_path: Path) -> None:
    source = ShardedTexts(texts(3))
    with pytest.raises(SourceError) as caught:
        prepare(source, small_tokenizer(), dataset="d", content_field="txt", cache_dir=tmp_path)
    assert (
        str(caught.value)
        == "dataset 'd', column 'txt': no such column (have: text, n). Did you mean 'text'?"
    )
    with pytest.raises(SourceError) as caught:
        prepare(source, small_tokenizer(), dataset="d", content_field="n", cache_dir=tmp_path)
    assert str(caught.value) == (
        "dataset 'd', column 'n': holds int64, not text; columns of text (have: text). Set "
        "content_field to one of them."
    )
    with pytest.raises(
        SourceError,
        match=r"became a document: null 3; the first is memory, row 0: no value\. Check the column",
    ):
        prepare(
            InMemoryShardedSource({"text": [None] * 3}),
            small_tokenizer(),
            dataset="d",
            cache_dir=tmp_path,
            on_error="skip",
        )


def test_an_error_on_a_worker_keeps_its_place_and_leaves_no_thread(tmp_path: Path) -> None:
    class Breaking(ShardedTexts):
        def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
            if start == 20:
                raise SourceError(at="shard-0, row 21", problem="broken")
            return super().read(shard, start, stop)

    before = set(threading.enumerate())
    with pytest.raises(SourceError, match="broken") as caught:
        prepare(
            Breaking(texts(200)), small_tokenizer(), dataset="d", cache_dir=tmp_path, num_workers=3
        )
    assert caught.value.__notes__ == ["while tokenizing dataset 'd', shard-0, rows 20:30"]
    assert_no_new_threads(before)


def test_a_range_that_keeps_waiting_holds_no_other_up(tmp_path: Path) -> None:
    """As one does whose request is never answered: the others go on beside it."""
    others = threading.Event()

    class Waiting(ShardedTexts):
        def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
            if start == 0:
                assert others.wait(30), f"only {len(self.reads)} ranges were read beside it"
            batch = super().read(shard, start, stop)
            if len(self.reads) == 20:
                others.set()
            return batch

    source = Waiting(texts(610))
    assert (
        prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path, num_workers=2).num_docs
        == 610
    )


# The audit


def test_a_backend_that_errs_is_found_by_the_audit_and_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from easypipe.transforms.tokenizer.fast import FastEngine

    class Errs(FastEngine):
        def encode(self, column):
            offsets, ids = super().encode(column)
            if len(column) == 40:  # neither the hostile texts nor the sample
                ids = ids.copy()
                ids[:] = ids ^ 1
            return offsets, ids

    monkeypatch.setattr("easypipe.transforms.tokenizer.tokenizer.engine_of", Errs)
    monkeypatch.setattr(encoders, "SAMPLE_ROWS", 8)
    source = WithIdentity(texts(15), texts(40, seed=1), cuts=40)
    with pytest.raises(
        TokenizerError,
        match=r"shard-1, row \d+: tokenizer .*: gigatoken does not produce the tokens of "
        r"`tokenizers`\. Run again",
    ):
        prepare(source, small_tokenizer(), dataset="d", cache_dir=tmp_path, num_workers=1)
    monkeypatch.undo()
    tokenizer = small_tokenizer()  # the advice works: the reference encodes, all of it
    counter = CountingTokenizer(tokenizer)
    # the first range is so small that nothing has to be proven for it
    cache = prepare(source, tokenizer, dataset="d", cache_dir=tmp_path, num_workers=1)
    assert tokenizer.backend.name == "tokenizers"
    assert counter.texts == 55
    assert documents(cache) == [
        tokenizer.reference_encode(text) for text in [*texts(15), *texts(40, seed=1)]
    ]


# Cutting


@pytest.mark.parametrize(
    ("shard", "ranges"),
    [
        (Shard(name="s", num_rows=0), []),
        (Shard(name="s", num_rows=1, num_bytes=10**10), [(0, 1)]),
        (Shard(name="s", num_rows=100, cuts=(0, 7, 30, 33, 66, 90), num_bytes=100 << 20), None),
        (
            Shard(name="s", num_rows=200_000),
            [(0, 65536), (65536, 131072), (131072, 196608), (196608, 200_000)],
        ),
        (
            Shard(name="s", num_rows=90, cuts=(0, 29, 61), num_bytes=12 << 20),
            [(0, 29), (29, 61), (61, 90)],
        ),
        (  # a cheap place that is far away is none to cut at
            Shard(name="s", num_rows=90, cuts=(0, 10, 61), num_bytes=12 << 20),
            [(0, 30), (30, 61), (61, 90)],
        ),
    ],
)
def test_ranges_cover_every_row_once(shard: Shard, ranges: list[tuple[int, int]] | None) -> None:
    found = list(cut(shard))
    assert [row for a, b in found for row in range(a, b)] == list(range(shard.num_rows or 0))
    if ranges is not None:
        assert found == ranges


def test_rows_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(SourceError, match="its rows cannot be counted"):
        list(cut(Shard(name="s", num_rows=None)))


def test_memory_that_runs_out_is_told_with_the_rows(tmp_path: Path) -> None:
    class Large(WithIdentity):
        def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
            raise MemoryError

    with pytest.raises(CacheError, match=r"rows 0 to \d+: memory ran out\. Give the process more"):
        prepare(Large(texts(60)), small_tokenizer(), dataset="d", cache_dir=tmp_path)


def test_threads_that_do_not_start_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `ulimit -v`, where there is no room for a stack."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    source, tokenizer = WithIdentity(texts(60)), small_tokenizer()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(EasypipeError, match=r"threads: none can be started.*ulimit"):
        prepare(source, tokenizer, dataset="d", cache_dir=tmp_path)


def test_the_tokens_of_another_text_are_no_text_s_own(tmp_path: Path) -> None:
    """Without records a token file is found by its text, and another one of its size is whole by
    its own checksum: its name is held against it too.
    """
    tokenizer = small_tokenizer()
    caches = {
        text: prepare(
            InMemoryShardedSource({"text": [text]}),
            tokenizer,
            dataset="one",
            cache_dir=tmp_path / text[0],
        )
        for text in ("abc", "bcd")
    }
    expected = {text: cache.tokens(0).tolist() for text, cache in caches.items()}
    assert len(expected["abc"]) == len(expected["bcd"])
    assert expected["abc"] != expected["bcd"]
    own, other = (next((tmp_path / text).glob("tokens/*/*.arrow")) for text in "ab")
    for folder in ("manifests", "ranges"):
        shutil.rmtree(tmp_path / "a" / folder)
    own.write_bytes(other.read_bytes())
    again = prepare(
        InMemoryShardedSource({"text": ["abc"]}), tokenizer, dataset="one", cache_dir=tmp_path / "a"
    )
    assert again.tokens(0).tolist() == expected["abc"]


def test_tokens_that_an_earlier_version_left_without_a_name_are_those_of_all_rows(
    tmp_path: Path,
) -> None:
    """Where a token file does not say its name, the rows that it accounts for are held against the
    range.
    """
    tokenizer = small_tokenizer()
    for name, rows in {"own": ["abc"], "other": ["bcd", "cde"]}.items():
        source = InMemoryShardedSource({"text": rows})
        cache = prepare(source, tokenizer, dataset="one", cache_dir=tmp_path / name)
        if name == "own":
            expected = documents(cache)
    own, other = (next((tmp_path / name).glob("tokens/*/*.arrow")) for name in ("own", "other"))
    with pa.OSFile(str(other)) as file:
        table = pa.ipc.open_file(file).read_all()
    said = json.loads(table.schema.metadata[STATS])
    del said["file"]
    table = table.replace_schema_metadata({STATS: json.dumps(said)})
    with pa.OSFile(str(own), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for folder in ("manifests", "ranges"):
        shutil.rmtree(tmp_path / "own" / folder)
    source = InMemoryShardedSource({"text": ["abc"]})
    again = prepare(source, tokenizer, dataset="one", cache_dir=tmp_path / "own")
    assert documents(again) == expected
