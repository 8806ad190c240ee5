"""Datasets of the Hub, on a server on loopback that speaks its API, through the real client."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import socket
import time
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from easypipe import DatasetConfig, Pipeline, PipelineConfig
from easypipe.core import reachable, remote
from easypipe.core.errors import ConfigError, MissingFileError, SourceError
from easypipe.core.protocols import ShardedSource
from easypipe.discovery.discover import discover
from easypipe.sources import files
from easypipe.sources.hub.layout import choose_files, layouts
from easypipe.sources.hub.source import HuggingFaceShardedSource, parse_hub_name
from easypipe.sources.open import open_files
from hub_mirror import MAIN, hub_mirror, publish  # noqa: F401  (a fixture)
from laws import assert_stateless_reads
from web import WebServer

OLD = "b" * 40
TOKEN = "hf_" + "x" * 30


def parquet(start: int, rows: int) -> bytes:
    out = io.BytesIO()
    table = pa.table(
        {
            "text": [f"row {i}" for i in range(start, start + rows)],
            "ballast": [f"{i}" * 150 for i in range(rows)],
        }
    )
    pq.write_table(table, out, row_group_size=1000, compression="none")
    return out.getvalue()


@pytest.fixture
def hub(hub_mirror: WebServer) -> WebServer:  # noqa: F811
    publish(
        hub_mirror,
        "org/stories",
        {
            "README.md": b"# card",
            "data/train-00000-of-00002.parquet": parquet(0, 3000),
            "data/train-00001-of-00002.parquet": parquet(3000, 2000),
            "data/validation-00000-of-00001.parquet": parquet(9000, 10),
        },
    )
    return hub_mirror


def texts(source) -> list[str]:
    return [
        text
        for s, shard in enumerate(source.shards)
        for text in source.read(s, 0, shard.num_rows).column("text").to_pylist()
    ]


def test_splits_and_law(hub: WebServer) -> None:
    source = HuggingFaceShardedSource("org/stories")
    assert_stateless_reads(source, [1, 999, 1000, 2999])
    assert texts(source) == [f"row {i}" for i in range(5000)]
    assert source.commit == MAIN
    assert texts(HuggingFaceShardedSource("hf://datasets/org/stories", split="validation")) == [
        f"row {i}" for i in range(9000, 9010)
    ]
    assert texts(HuggingFaceShardedSource("hf://datasets/org/stories/data/val*.parquet")) == [
        f"row {i}" for i in range(9000, 9010)
    ]
    with pytest.raises(MissingFileError) as caught:
        HuggingFaceShardedSource("org/stories", split="valid")
    assert (
        str(caught.value)
        == "hf://datasets/org/stories: no split 'valid' (have: train, validation). Did you mean "
        "'validation'?"
    )


def test_offline_is_said_at_once(hub: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    remote.set_retry_policy(remote.RetryPolicy(first_wait_s=30))
    began = time.monotonic()
    with pytest.raises(
        SourceError, match=r"org/stories: HF_HUB_OFFLINE forbids access to the Hub\. Unset it"
    ):
        HuggingFaceShardedSource("org/stories")
    assert time.monotonic() - began < 5
    cached = Path(constants.HF_HUB_CACHE, "datasets--org--stories")
    (cached / "snapshots" / MAIN).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(MAIN)
    with pytest.raises(SourceError, match=f"files of your split in {cached}/snapshots/{MAIN}"):
        HuggingFaceShardedSource("org/stories")
    assert not hub.seen


@pytest.mark.parametrize("where", ["refused", "dropped", "unknown", "proxy"])
def test_without_a_network_it_is_said_within_five_seconds(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # which the test run sets
    monkeypatch.setattr(reachable, "_asked", {})  # a later test's server may get this port
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        if where == "dropped":  # a full queue: the kernel answers nobody
            listener.listen(0)
            for _ in range(3):
                one = held.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(listener.getsockname())
        host = "no-such-host.invalid" if where == "unknown" else "127.0.0.1"
        endpoint = f"http://{host}:{listener.getsockname()[1]}"
        if where == "proxy":
            monkeypatch.setenv("http_proxy", endpoint)
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            endpoint = "http://hub.invalid"
        began = time.monotonic()
        with pytest.raises(
            SourceError,
            match=rf"org/stories: the Hub cannot be reached: {'the proxy' * (where == 'proxy')}.*"
            r"hf download --repo-type dataset "
            r"org/stories",
        ):
            HuggingFaceShardedSource("org/stories", storage_options={"endpoint": endpoint})
        assert time.monotonic() - began < 5


def test_no_more_than_needed_travels(hub: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    source = HuggingFaceShardedSource("org/stories", columns=["text"])
    assert hub.sent < 10_000  # the listing
    before = hub.sent
    texts(source)
    assert hub.sent - before < 0.25 * sum(len(parquet(*part)) for part in ((0, 3000), (3000, 2000)))
    limited = HuggingFaceShardedSource("org/stories", num_rows=10)
    assert len(limited.shards) == 1  # the second file is not even opened
    out, table = io.BytesIO(), pq.read_table(io.BytesIO(parquet(0, 30)))
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    publish(hub, "org/arrow", {"a.arrow": out.getvalue()})
    assert len(texts(HuggingFaceShardedSource("org/arrow"))) == 30
    asked = zip(hub.seen, hub.headers, strict=True)
    got = [named for (method, path, _), named in asked if method == "GET" and "a.arrow" in path]
    assert {"Range" in named for named in got} == {True}  # what has no entries is downloaded


def test_a_file_without_rows_fills_no_row_and_an_empty_file_is_named(hub: WebServer) -> None:
    publish(hub, "org/gap", {"a.parquet": parquet(0, 0), "b.parquet": parquet(0, 5)})
    assert texts(HuggingFaceShardedSource("org/gap", num_rows=1)) == [f"row {i}" for i in range(5)]
    publish(hub, "org/empty", {"a.jsonl": b"", "b.jsonl": b'{"text": "b"}\n'})
    with pytest.raises(SourceError, match=r"org/empty/a\.jsonl: is empty \(0 bytes\)"):
        HuggingFaceShardedSource("org/empty").shards  # noqa: B018


def test_parts_of_a_split(hub: WebServer, tmp_path: Path) -> None:
    def source(split: str) -> ShardedSource:
        dataset = DatasetConfig(name="d", data_files="org/stories", type="huggingface", split=split)
        return (
            Pipeline(PipelineConfig(datasets=[dataset], cache_dir=tmp_path, seed=1))
            .source()
            .get_data()["d"]
        )

    assert texts(source("train[:1%]")) == [f"row {i}" for i in range(50)]
    assert texts(source("train[2998:3002]")) == [f"row {i}" for i in range(2998, 3002)]
    assert texts(source("validation[-3:]")) == [f"row {i}" for i in range(9007, 9010)]
    for split, start in (("train[:10]", 0), ("train[4:10]", 4)):
        first = source(split)
        assert texts(first) == [f"row {i}" for i in range(start, 10)]
        assert "00001" not in str(first.shards)  # the file behind is not even opened
    assert texts(source("train[-4996:10]")) == [f"row {i}" for i in range(4, 10)]
    assert texts(source("train[50%:2502]")) == ["row 2500", "row 2501"]
    with pytest.raises(MissingFileError, match=r"no split 'valid'.*Did you mean 'validation'"):
        source("valid[:1%]")


def test_the_commit_is_kept(hub: WebServer) -> None:
    """What main says later does not change a source that was made; a file that stays the same keeps
    its identity.
    """
    before = HuggingFaceShardedSource("org/stories")
    fingerprint, identity = before.fingerprint, before.shard_identity(0)
    files = {
        "data/train-00000-of-00002.parquet": parquet(0, 3000),
        "data/train-00001-of-00002.parquet": parquet(0, 5),
    }
    publish(hub, "org/stories", files, commit=OLD)
    assert texts(before)[-1] == "row 4999"
    after = HuggingFaceShardedSource("org/stories")
    assert after.commit == OLD
    assert after.fingerprint != fingerprint
    assert (after.shard_identity(0), after.shard_identity(1) == before.shard_identity(1)) == (
        identity,
        False,
    )
    pinned = HuggingFaceShardedSource("org/stories", revision=MAIN)
    assert pinned.fingerprint == fingerprint
    assert HuggingFaceShardedSource(f"hf://datasets/org/stories@{MAIN}").fingerprint == fingerprint


def test_lines_are_downloaded_once_into_the_clients_cache(hub: WebServer, tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": f"line {i}"}).encode() + b"\n" for i in range(500))
    publish(hub, "org/lines", {"train.jsonl": lines, "test.jsonl": lines[:200]})
    source = HuggingFaceShardedSource("org/lines")
    # nothing is downloaded before rows are asked for
    assert not [path for _, path, _ in hub.seen if "resolve" in path]
    assert_stateless_reads(source, [7, 100])
    assert texts(source) == [f"line {i}" for i in range(500)]
    assert list((tmp_path / "hf").rglob("train.jsonl"))
    assert not list((tmp_path / "hf").rglob("test.jsonl"))
    hub.seen.clear()
    again = HuggingFaceShardedSource("org/lines")
    assert texts(again) == texts(source)
    assert not [path for method, path, _ in hub.seen if "resolve" in path and method == "GET"]
    assert (again.fingerprint, again.shard_identity(0)) == (
        source.fingerprint,
        source.shard_identity(0),
    )


def test_files_in_the_clients_cache_are_read_there(hub: WebServer) -> None:
    source = HuggingFaceShardedSource("org/stories", split="validation")
    rows, identity = texts(source), source.shard_identity(0)
    name = "data/validation-00000-of-00001.parquet"
    there = Path(
        huggingface_hub.hf_hub_download(
            "org/stories", name, repo_type="dataset", revision=MAIN, endpoint=hub.url
        )
    ).resolve()
    hub.seen.clear()
    cached = HuggingFaceShardedSource("org/stories", split="validation")
    assert (texts(cached), cached.shard_identity(0)) == (rows, identity)
    assert not [path for _, path, _ in hub.seen if "resolve" in path]
    whole = there.read_bytes()
    for other in (whole[:-1], whole + b"x"):
        there.write_bytes(other)
        with pytest.raises(SourceError, match=f"{len(other)} bytes in the cache of the Hub's"):
            texts(HuggingFaceShardedSource("org/stories", split="validation"))


def test_passing_failures(hub: WebServer) -> None:
    hub.faults.extend([503, None, "reset", None, 429, None, 502, None])
    assert len(texts(HuggingFaceShardedSource("org/stories"))) == 5000


def test_gated(hub: WebServer) -> None:
    publish(hub, "org/gated", {"train.parquet": parquet(0, 10)}, gated="manual")
    path = f"/datasets/org/gated/resolve/{MAIN}/train.parquet"
    hub.denied[path] = (
        403,
        {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"},
    )
    source = HuggingFaceShardedSource("org/gated")
    with pytest.raises(SourceError) as caught:
        source.shards  # noqa: B018
    assert str(caught.value) == (
        "hf://datasets/org/gated: is gated: its authors want their licence accepted. "
        f"Accept it at {hub.url}/datasets/org/gated, and set HF_TOKEN to a token of that account."
    )
    del hub.denied[path]  # what the message says is done
    hub.headers.clear()
    source = HuggingFaceShardedSource("org/gated", storage_options={"token": TOKEN})
    assert len(texts(source)) == 10
    assert {
        headers.get("Authorization", headers.get("authorization")) for headers in hub.headers
    } == {f"Bearer {TOKEN}"}


def test_the_token_is_shown_nowhere(
    hub: WebServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    with caplog.at_level(logging.DEBUG, "easypipe"):
        source = HuggingFaceShardedSource("org/stories", storage_options={"token": TOKEN})
        assert source.shards
        hub.faults.extend([403] * 20)
        with pytest.raises(SourceError) as caught:
            source.read(0, 0, 10)
    assert TOKEN not in caplog.text + repr(source.files) + str(caught.value) + repr(
        caught.value.__cause__
    )
    assert (
        source.fingerprint == HuggingFaceShardedSource("org/stories").fingerprint
        if not hub.faults.clear()
        else None
    )


def test_what_is_not_there(hub: WebServer) -> None:
    missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
    hub.denied["/api/datasets/org/strories"] = (401, missing)
    with pytest.raises(
        MissingFileError,
        match=r"hf://datasets/org/strories: the Hub has no such dataset, or it is private\. Check "
        r"the spelling",
    ):
        HuggingFaceShardedSource("org/strories")
    hub.denied["/api/datasets/org/stories/revision/v9"] = (
        404,
        {"X-Error-Code": "RevisionNotFound"},
    )
    with pytest.raises(
        MissingFileError,
        match=r"hf://datasets/org/stories: no revision 'v9'\. See the branches and tags at",
    ):
        HuggingFaceShardedSource("org/stories", revision="v9")
    with pytest.raises(MissingFileError, match="no subset 'x'"):
        HuggingFaceShardedSource("org/stories", subset="x")


def test_converted_copy(hub: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    files = {
        "plain/partial-train/0000.parquet": parquet(0, 5),  # a large split is converted in part
        "plain/test/0000.parquet": parquet(5, 5),
    }
    copy = ("refs/convert/parquet", "refs%2Fconvert%2Fparquet")
    other = {"other/test/0000.parquet": parquet(90, 5)}
    for repo, converted in (("org/script", files), ("org/two", files | other)):
        # what scripts and `datasets` leave beside no data
        publish(hub, repo, {"script.py": b"code", "dataset_infos.json": b"{}", "a.tar": b"-"})
        publish(hub, repo, converted, commit=OLD, revisions=copy)
    with caplog.at_level(logging.INFO, "easypipe"):
        source = HuggingFaceShardedSource("org/script", split="test")
    assert "the Hub's parquet copy" in caplog.text
    assert texts(source) == [f"row {i}" for i in range(5, 10)]
    assert "first rows" not in caplog.text
    assert texts(HuggingFaceShardedSource("org/script")) == [f"row {i}" for i in range(5)]
    partly = "holds only the first rows of this split (plain/partial-train)"
    assert (
        f"hf://datasets/org/script: the Hub's parquet copy, which is read, {partly}" in caplog.text
    )
    assert any(partly in note for note in discover("hf://datasets/org/script").notes)
    two = HuggingFaceShardedSource("org/two", subset="plain", split="test")
    assert texts(two) == [f"row {i}" for i in range(5, 10)]


def test_several_formats(hub: WebServer) -> None:
    publish(hub, "org/mixed", {"a.parquet": parquet(0, 5), "b.csv": b"text\nx\n"})
    with pytest.raises(
        SourceError,
        match=r"files of several formats: .*Name one kind: hf://datasets/org/mixed/\*\.parquet",
    ):
        HuggingFaceShardedSource("org/mixed")
    assert len(texts(HuggingFaceShardedSource("hf://datasets/org/mixed/*.parquet"))) == 5
    publish(hub, "org/texts", {"a/1.csv": b"text\nx\n", "b.txt": b"x\n"})
    named = "hf://datasets/org/texts/**/*.csv"
    with pytest.raises(SourceError, match=rf"Name one kind: {re.escape(named)}\."):
        HuggingFaceShardedSource("org/texts")
    assert len(texts(HuggingFaceShardedSource(named))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "hf://org/name"}, "does not name a dataset. Write hf://datasets/owner/name"),
        ({"dataset": "a/b/c"}, "names no dataset of the Hub"),
        (
            {"dataset": "hf://datasets/a/b@v1", "revision": "v2"},
            "revision: 'v2', but data_files says 'v1'",
        ),
        (
            {"dataset": "hf://datasets/a/b/*.csv", "split": "test"},
            "split: has no effect together with a pattern",
        ),
        (
            {"dataset": "a/b", "storage_options": {"key": 1}},
            "storage_options: ['key'] mean nothing to the Hub (have: token, endpoint)",
        ),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HuggingFaceShardedSource(**arguments)
    assert message in str(caught.value)


def test_names() -> None:
    assert parse_hub_name("imdb") == ("imdb", None, None)
    assert parse_hub_name("hf://datasets/o/n@refs%2Fpr%2F1/x/*.csv") == (
        "o/n",
        "refs/pr/1",
        "x/*.csv",
    )
    with pytest.raises(
        ConfigError, match=r"is a dataset on the Hub\. Read it with type='huggingface'"
    ):
        open_files("hf://datasets/o/n")


CONFIGS = [
    {
        "config_name": "en",
        "data_files": [
            {"split": "train", "path": "en/*.parquet"},
            {"split": "test", "path": ["t/en.parquet"]},
        ],
        "default": True,
    },
    {"config_name": "de", "data_files": "de/*.parquet"},
    {"config_name": "fr", "data_dir": "fr"},
]
NAMES = [
    "en/1.parquet",
    "en/2.parquet",
    "en/10.parquet",
    "de/1.parquet",
    "t/en.parquet",
    "fr/train.parquet",
    "fr/dev.parquet",
    "README.md",
]


@pytest.mark.parametrize(
    ("names", "card", "options", "chosen"),
    [
        (NAMES, {"configs": CONFIGS}, {}, ["en/1.parquet", "en/2.parquet", "en/10.parquet"]),
        (NAMES, {"configs": CONFIGS}, {"split": "test"}, ["t/en.parquet"]),
        (NAMES, {"configs": CONFIGS}, {"subset": "de"}, ["de/1.parquet"]),
        (NAMES, {"configs": CONFIGS}, {"subset": "fr", "split": "validation"}, ["fr/dev.parquet"]),
        (NAMES, {}, {"subset": "fr"}, ["fr/train.parquet"]),
        (["a.jsonl", "b.jsonl", "dataset_infos.json"], {}, {}, ["a.jsonl", "b.jsonl"]),
        (
            ["data/train_sft-00000-of-00001.parquet"],
            {},
            {"split": "train"},
            ["data/train_sft-00000-of-00001.parquet"],
        ),
        (
            ["data/extra-00000-of-00001.parquet"],
            {},
            {"split": "extra"},
            ["data/extra-00000-of-00001.parquet"],
        ),
        (["train1.csv", "test.csv"], {}, {}, ["train1.csv"]),
        (
            ["a.csv", "b.csv"],
            {
                "configs": [
                    {"config_name": "a", "data_files": "a.csv"},
                    {"config_name": "default", "data_files": "b.csv"},
                ]
            },
            {},
            ["b.csv"],
        ),
    ],
)
def test_layouts(names: list[str], card: dict, options: dict, chosen: list[str]) -> None:
    assert choose_files(names, card, at="hub", **options) == chosen


@pytest.mark.parametrize(
    ("split", "words"),
    [  # those that the Hub documents ("File names and splits")
        ("train", ("train", "training")),
        ("validation", ("validation", "valid", "val", "dev")),
        ("test", ("test", "testing", "eval", "evaluation")),
    ],
)
def test_words_that_name_a_split(split: str, words: tuple[str, ...]) -> None:
    for word in words:
        for name in (f"{word}.csv", f"data/{word}/1.csv", f"my-{word}_1.csv", f"{word}1.csv"):
            others = [f"{other}/2.csv" for other in ("train", "test", "dev") if other not in words]
            assert choose_files([name, *others], {}, at="hub", split=split) == [name]


def test_files_that_the_library_keeps_beside_data_are_no_data() -> None:
    kept = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
    names = ["a.jsonl", *kept, *(f"sub/{name}" for name in kept)]
    assert choose_files(names, {}, at="hub") == ["a.jsonl"]


@pytest.mark.parametrize(
    ("data_files", "message"),
    [
        (
            "*.png",
            "hub: its card names none of its data files (have: a.csv, b.csv). Name them: hub/",
        ),
        ([{"split": "train", "path": "*.png"}], "hub: its card names none of its data files"),
        (
            ["*.csv", {"path": "b.csv"}],
            "hub, card: data_files is ['*.csv', {'path': 'b.csv'}]: not",
        ),
        (
            [{"path": None}],
            "not one split and its path for each entry. Name the files: hub/PATTERN",
        ),
        ([{"path": "a.csv"}, {"split": "train", "path": "b.csv"}], "not one split and its path"),
        ({"train": "a.csv"}, "not one split and its path"),
        (7, "not one split and its path"),
        ("**.csv", "hub/**.csv: cannot be matched: Invalid pattern: '**'"),
    ],
)
def test_cards_whose_files_are_not_found(data_files: object, message: str) -> None:
    """The last of two entries for one split took the place of the first."""
    card = {"configs": [{"config_name": "default", "data_files": data_files}]}
    for find in (choose_files, layouts):
        with pytest.raises(SourceError) as caught:
            find(["a.csv", "b.csv", "c.png"], card, at="hub")
        assert message in str(caught.value)


def test_layouts_that_say_too_little() -> None:
    configs = [{"config_name": name, "data_files": f"{name}.csv"} for name in ("en", "de")]
    with pytest.raises(MissingFileError) as caught:
        choose_files(["en.csv", "de.csv"], {"configs": configs}, at="hub")
    assert (
        str(caught.value)
        == "hub: has several subsets, and none is the default (have: en, de). Name one by subset=."
    )
    with pytest.raises(MissingFileError, match="holds no data file"):
        choose_files(["README.md"], {}, at="hub")
