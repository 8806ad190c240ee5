"""Remote reads on a real web server that fails in every passing way, and on real S3 and GCS
servers, all on loopback.
"""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import logging
import resource
import ssl
import struct
import time
import traceback
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import fsspec
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import known_implementations

import pipelines
from easypipe import DatasetConfig, Pipeline, PipelineConfig, load_saved
from easypipe.core import jit, remote, storage
from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError, MissingFileError, SourceError, StorageError
from easypipe.core.protocols import ShardedSource, fetched
from easypipe.save.saved import is_saved
from easypipe.sources import files as sources_files
from easypipe.sources.external.megatron import write_megatron
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.sources.formats import streams
from easypipe.sources.formats.forward import open_forward
from easypipe.sources.open import open_files
from easypipe.sources.splits import PartialSource, parse_split
from easypipe.transforms.columns.base import TransformedSource
from easypipe.transforms.columns.columns import FilterNonEmpty
from laws import assert_stateless_reads
from stores import Store, faulty
from web import WebServer, web_server

TABLE = pa.table({"text": [f"row {i}" for i in range(3000)], "n": range(3000)})
LINES = b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(3000))


def _parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(TABLE, out, row_group_size=500)
    return out.getvalue()


def _arrow() -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_file(out, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=700)
    return out.getvalue()


FILES = {
    "a.parquet": _parquet(),
    "b.arrow": _arrow(),
    "c.jsonl": LINES,
    "d.jsonl.gz": gzip.compress(LINES),
    "e.jsonl.bz2": bz2.compress(LINES),
    "f.csv": b"text\n" + b"".join(b"row %d\n" % i for i in range(3000)),
}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is small enough to be read whole, and nothing is kept."""
    monkeypatch.setattr(sources_files, "SMALL_BYTES", 0)
    monkeypatch.setattr(streams, "KEPT_BLOCKS", 0)


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        server.files.update({f"/data/{name}": data for name, data in FILES.items()})
        yield server


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    remote.set_retry_policy(
        remote.RetryPolicy(
            attempts=5, first_wait_s=0.01, longest_wait_s=0.05, attempt_timeout_s=0.5, deadline_s=5
        )
    )
    yield
    remote.set_retry_policy(None)


@pytest.mark.parametrize("name", list(FILES))
def test_every_format_over_http(web: WebServer, name: str) -> None:
    source = open_files(f"{web.url}/data/{name}")
    assert_stateless_reads(source, [1, 499, 1024, 2999])
    assert source.read(0, 1234, 1236).column("text").to_pylist() == ["row 1234", "row 1235"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *itertools.product(["a.parquet", "c.jsonl"], [503, 429, 500, "reset", "short", "page"]),
        ("c.jsonl", "hang"),
    ],
)
def test_passing_failures_are_tried_again(web: WebServer, name: str, fault: object) -> None:
    """Every request fails once, while it is resolved, indexed and read; the rows are those of a
    server that never fails.
    """
    remote.set_retry_policy(
        remote.RetryPolicy(
            attempts=6,
            first_wait_s=0.001,
            longest_wait_s=0.002,
            attempt_timeout_s=0.3,
            deadline_s=30,
        )
    )
    web.faults.extend([fault, None] * (2 if fault == "hang" else 400))
    source = open_files(f"{web.url}/data/{name}")
    assert source.read(0, 100, 2600).column("text").to_pylist() == [
        f"row {i}" for i in range(100, 2600)
    ]


@pytest.mark.usefixtures("large")
def test_a_bomb_is_not_unpacked(web: WebServer) -> None:
    source = open_files(f"{web.url}/data/c.jsonl")
    web.faults.extend(["bomb"] * 5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SourceError, match=r"gave up after 5 attempts.*compressed it \(gzip\)"):
        source.read(0, 0, 10)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 << 10


@pytest.mark.usefixtures("large")
def test_more_than_was_asked_for_is_not_read(web: WebServer) -> None:
    source = open_files(f"{web.url}/data/c.jsonl")
    web.faults.extend(["more"] * 5)
    with pytest.raises(
        SourceError, match=r"gave up after 5 attempts.*sent more than the \d+ bytes"
    ):
        source.read(0, 0, 10)


@pytest.mark.usefixtures("large")
def test_an_empty_encoding_packs_nothing(web: WebServer) -> None:
    """Found by tests/fuzz.py."""
    web.extra["/data/c.jsonl"] = {"Content-Encoding": ""}
    assert open_files(f"{web.url}/data/c.jsonl").read(0, 0, 1).column("text").to_pylist()


def test_a_server_that_packs_everything_is_named_so(web: WebServer) -> None:
    web.ranges = False
    web.extra["/data/c.jsonl"] = {"Content-Encoding": "gzip"}
    with pytest.raises(SourceError, match=r"compresses it \(gzip\), .* Turn compression off"):
        open_files(f"{web.url}/data/c.jsonl")


@pytest.mark.usefixtures("large")
def test_the_length_of_a_packed_answer_is_not_that_of_the_file(web: WebServer) -> None:
    web.ranges = False
    web.files["/a.jsonl"] = gzip.compress(LINES)
    for encoding, size in (("gzip", None), ("identity", len(web.files["/a.jsonl"]))):
        web.extra["/a.jsonl"] = {"Content-Encoding": encoding}
        assert storage.size_of(f"{web.url}/a.jsonl") == size


def test_a_stall_is_cut_by_what_other_requests_took(web: WebServer) -> None:
    """Not by the policy's minute; and a server that became slow is waited for longer each time."""
    remote.set_retry_policy(remote.RetryPolicy())
    url = f"{web.url}/data/c.jsonl"
    for at in range(remote.KNOWN):
        storage.read_range(url, at, at + 100)
    web.faults.append("hang")  # for 3 s
    began = time.monotonic()
    assert storage.read_range(url, 0, 100) == LINES[:100]
    assert 1 <= time.monotonic() - began < 2.5
    asked: list[float] = []

    def slow(timeout_s: float) -> None:
        asked.append(timeout_s)
        time.sleep(min(timeout_s, 3))
        if timeout_s < 3:
            raise TimeoutError

    remote.retrying(url, slow, num_bytes=100, kind="range")
    assert asked == pytest.approx([1, 2, 4])


@pytest.mark.usefixtures("large")
def test_giving_up_names_the_url_the_attempts_and_the_cause(web: WebServer) -> None:
    source = open_files(f"{web.url}/data/c.jsonl")
    web.faults.extend([503] * 100)
    with pytest.raises(
        SourceError,
        match=r"data/c\.jsonl: gave up after 5 attempts in [\d.]+ s; the last one: .*503.*Check "
        r"the network",
    ):
        source.shards  # noqa: B018
    web.faults.clear()
    assert source.shards[0].num_rows == 3000  # run again, as the message says
    web.faults.extend(["reset"] * 100)
    with pytest.raises(
        SourceError,
        match=r"gave up after 5 attempts.*ServerDisconnected|gave up after 5 attempts.*reset",
    ):
        source.read(0, 0, 10)


def test_the_deadline_ends_it(web: WebServer) -> None:
    remote.set_retry_policy(
        remote.RetryPolicy(attempts=1000, first_wait_s=0.05, longest_wait_s=0.05, deadline_s=0.4)
    )
    web.faults.extend([503] * 10_000)
    started = time.monotonic()
    with pytest.raises(SourceError, match="gave up after"):
        open_files(f"{web.url}/data/c.jsonl")
    assert 0.2 < time.monotonic() - started < 2


def test_the_server_says_how_long_to_wait(web: WebServer) -> None:
    web.retry_after, web.faults = "1", type(web.faults)([429])
    started = time.monotonic()
    open_files(f"{web.url}/data/c.jsonl")
    assert time.monotonic() - started >= 1


def test_what_does_not_pass_is_not_tried_again(web: WebServer) -> None:
    for status, kind, message in (
        (404, MissingFileError, "no such file or folder"),
        (403, SourceError, "access denied: .*403"),
        (202, SourceError, "HTTP 202 came in place of the file"),
    ):
        web.seen.clear()
        web.faults.extend([status])
        with pytest.raises(kind, match=message):
            open_files(f"{web.url}/data/c.jsonl")
        assert len(web.seen) == 1


def test_a_wrong_certificate_is_not_tried_again_whatever_wraps_it() -> None:
    tried: list[float] = []

    def call(timeout_s: float) -> None:
        tried.append(timeout_s)
        try:
            raise ssl.SSLCertVerificationError(1, "certificate verify failed")
        except ssl.SSLError as error:
            raise httpx.ConnectError("certificate verify failed") from error

    with pytest.raises(StorageError, match="certificate verify failed"):
        remote.retrying("https://data.corp/a.jsonl", call)
    assert len(tried) == 1


def test_no_one_there() -> None:
    with pytest.raises(
        SourceError, match=r"http://127\.0\.0\.1:9/a\.jsonl: gave up after 5 attempts"
    ):
        open_files("http://127.0.0.1:9/a.jsonl")
    remote.set_retry_policy(remote.RetryPolicy(attempts=99, first_wait_s=0.01))
    with pytest.raises(SourceError, match="gave up after 5 attempts"):
        open_files("http://127.0.0.1:9/b.jsonl")


@pytest.mark.usefixtures("large")
def test_a_file_that_changed(web: WebServer) -> None:
    source = open_files(f"{web.url}/data/c.jsonl")
    assert source.shards
    fingerprint = source.fingerprint
    web.files["/data/c.jsonl"] = LINES.replace(b"row 1", b"ROW 1")
    with pytest.raises(
        SourceError, match=r"changed after the source was made.*Make the source again"
    ):
        source.read(0, 0, 10)
    assert open_files(f"{web.url}/data/c.jsonl").fingerprint != fingerprint


def test_a_file_that_nothing_marks_is_said_to_be_known_by_its_size(
    web: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_files(f"{web.url}/data/c.jsonl").shards
    assert not caplog.messages
    web.extra["/data/c.jsonl"] = {"ETag": ""}
    assert open_files(f"{web.url}/data/c.jsonl").shards
    assert (
        "the server sends neither ETag nor Last-Modified: a new file of the same size is not"
        in (caplog.text)
    )


TAG = {"ETag": '"one"'}
DAY = {"ETag": "", "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}
NOTHING = {"ETag": ""}


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        (TAG, DAY, False),
        (DAY, TAG, False),
        (TAG, NOTHING, False),
        (TAG, {"ETag": '"two"'}, True),
        (DAY, {**DAY, "Last-Modified": "Sat, 03 Jan 2026 03:04:05 GMT"}, True),
    ],
)
def test_a_file_has_changed_only_where_the_same_mark_has(
    web: WebServer, before: dict[str, str], now: dict[str, str], changed: bool
) -> None:
    web.extra["/data/c.jsonl"] = before
    source = open_files(f"{web.url}/data/c.jsonl")
    assert source.shards
    web.extra["/data/c.jsonl"] = now
    with pytest.raises(SourceError, match="changed") if changed else contextlib.nullcontext():
        assert source.read(0, 7, 9).column("text").to_pylist() == ["row 7", "row 8"]


@pytest.mark.parametrize(("name", "kind"), [("/a.parquet", "parquet"), ("/a.jsonl", "json")])
def test_an_outage_is_no_conflict_of_columns(
    web: WebServer, name: str, kind: str, tmp_path: Path
) -> None:
    """One round of attempts, not one for each set of columns that the dataset could do with."""
    web.files[name] = _parquet() if name.endswith("parquet") else b'{"text": "a"}\n'
    web.faults.extend([None, *[503] * 100])
    remote.set_retry_policy(remote.RetryPolicy(attempts=3, first_wait_s=0.01))
    dataset = DatasetConfig(name="d", type=kind, data_files=web.url + name)
    with pytest.raises(SourceError, match=r"gave up after 3 attempts .*503"):
        Pipeline(PipelineConfig(datasets=[dataset], cache_dir=tmp_path)).source()
    assert len(web.seen) == 1 + 3


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("told", ["bytes 0-{last}/{size}", "bytes 7-{stop}/{size}", "", "nonsense"])
def test_another_range_than_was_asked_for_is_not_believed(
    web: WebServer, told: str, tmp_path: Path
) -> None:
    web.files["/a.parquet"] = _parquet()
    size = len(_parquet())
    source = open_files(f"{web.url}/a.parquet")
    web.extra["/a.parquet"] = {}
    web.told = told.format(last=size - 1, stop=size, size=size)
    with pytest.raises(
        SourceError,
        match=r"a\.parquet.* the server sent .* where bytes \d+ to \d+ were asked for\. Its ranges "
        r"cannot",
    ):
        source.read(0, 0, 3)
    with pytest.raises(StorageError, match="the server sent"):
        storage.read_range(f"{web.url}/a.parquet", 100, 200)


@pytest.mark.usefixtures("large")
def test_a_server_without_ranges(
    web: WebServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.ranges = False
    with caplog.at_level(logging.WARNING, "easypipe"):
        source = open_files(f"{web.url}/data/a.parquet")
    assert "does not support range requests: every read transfers the whole file" in caplog.text
    assert source.read(0, 7, 9).column("text").to_pylist() == ["row 7", "row 8"]
    from easypipe.sources import files

    monkeypatch.setattr(files, "WHOLE_BYTES", 100)
    with pytest.raises(
        SourceError, match=r"the server does not support range requests, .*Download the file"
    ):
        open_files(f"{web.url}/data/a.parquet")


def test_web_servers_list_nothing(web: WebServer) -> None:
    for name in ("data/*.jsonl", "data/"):
        with pytest.raises(
            ConfigError, match=r"a web server does not list files\. Give the URL of every file"
        ):
            open_files(f"{web.url}/{name}")
    web.files["/empty.jsonl"] = b""
    for web.told in (None, ""):  # some servers do not say of how many bytes there is no first one
        assert storage.size_of(f"{web.url}/empty.jsonl") == 0
        source = open_files(f"{web.url}/empty.jsonl")
        with pytest.raises(SourceError, match=r"empty\.jsonl: is empty"):
            source.shards  # noqa: B018


@pytest.mark.usefixtures("large")
def test_only_what_is_needed_is_transferred(web: WebServer) -> None:
    big = pa.table({"text": ["x"] * 20_000, "ballast": [str(i) * 40 for i in range(20_000)]})
    out = io.BytesIO()
    pq.write_table(big, out, row_group_size=5000, compression="none")
    web.files["/big.parquet"] = out.getvalue()
    source = open_files(f"{web.url}/big.parquet", columns=["text"])
    source.read(0, 0, 20_000)
    assert web.sent < len(out.getvalue()) / 5


# Waiting for answers


def _forward(url: str) -> ShardedSource:
    source = open_forward(url)
    assert source is not None
    return source


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("name", "opened"),
    [
        *(("c.jsonl", one) for one in (open_files, _forward)),
        ("f.csv", open_files),
        ("c.jsonl", lambda url: PartialSource(open_files(url), parse_split("train[700:]")[1])),
        ("c.jsonl", lambda url: TransformedSource(open_files(url), FilterNonEmpty("text"))),
    ],
)
def test_what_was_fetched_is_not_asked_for_again(
    web: WebServer, name: str, opened: Callable[[str], ShardedSource]
) -> None:
    source = opened(f"{web.url}/data/{name}")
    rows = source.shards[0].num_rows
    expected = source.read(0, rows // 2, rows)
    asked = len(web.seen)
    with fetched(source, 0, rows // 2, rows):
        assert len(web.seen) == asked + 1
        assert source.read(0, rows // 2, rows).equals(expected)
        assert source.read(0, rows - 100, rows).num_rows > 0
        assert len(web.seen) == asked + 1
    source.read(0, rows // 2, rows)  # nothing is kept
    assert len(web.seen) == asked + 2


@pytest.mark.parametrize(("blocks", "step", "asked_again"), [(128, 1, 0), (128, -1, 0), (2, 1, 2)])
def test_what_the_index_read_is_kept_for_the_rows(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, blocks: int, step: int, asked_again: int
) -> None:
    """Of a file of four blocks two are kept, so that its first rows are asked for again."""
    monkeypatch.setattr(sources_files, "SMALL_BYTES", 0)
    monkeypatch.setattr(streams, "KEPT_BLOCKS", blocks)
    monkeypatch.setattr(streams, "BLOCK_BYTES", -(-len(LINES) // 4))
    source = open_files(f"{web.url}/data/c.jsonl")
    cuts = [0, 1024, 2048, 3000]  # as token caches are cut, where the index has entries
    assert source.shards[0].num_rows == 3000
    asked = len(web.seen)
    for a, b in [*itertools.pairwise(cuts)][::step]:
        expected = [f"row {i}" for i in range(a, b)]
        assert source.read(0, a, b).column("text").to_pylist() == expected
    assert len(web.seen) == asked + asked_again


@pytest.mark.parametrize("opened", [open_files, _forward])
def test_numba_is_imported_while_the_first_lines_come(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, opened: Callable[[str], ShardedSource]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(jit, "ahead", lambda: asked.append(len(web.seen)))
    assert opened(f"{web.url}/data/c.jsonl").schema.names
    assert 0 < asked[0] < len(web.seen)


@pytest.mark.usefixtures("large")
def test_rows_of_a_saved_folder_are_fetched_ahead_too(web: WebServer, tmp_path: Path) -> None:
    rows = [{"text": text} for text in pipelines.texts(500)]
    config = PipelineConfig(
        datasets=[
            DatasetConfig(name="text", data_files=pipelines.jsonl(tmp_path / "x.jsonl", rows))
        ],
        cache_dir=tmp_path / "cache",
        save={"output_dir": tmp_path / "out", "format": "jsonl", "num_shards": 1},
    )
    Pipeline.from_config(config).source().save().build()
    for path in (tmp_path / "out").iterdir():
        web.files[f"/out/{path.name}"] = path.read_bytes()
    saved = load_saved(f"{web.url}/out")
    assert saved.waits
    expected, asked = saved.read(0, 0, 500), len(web.seen)
    with saved.fetched(0, 0, 500):
        assert saved.read(0, 0, 500).equals(expected)
        assert len(web.seen) == asked + 1


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("streaming", "least", "last"), [(True, 4, 64), (False, 3, 8)])
def test_one_reader_has_several_requests_under_way(
    web: WebServer, tmp_path: Path, streaming: bool, least: int, last: int
) -> None:
    """last: how many requests are for rows, behind those for the index."""
    web.late_s = 0.05
    for i in range(8):
        web.files[f"/{i}.jsonl"] = LINES
    data = [f"{web.url}/{i}.jsonl" for i in range(8)]
    config = PipelineConfig(
        datasets=[DatasetConfig(name="text", data_files=data)],
        default_tokenizer=pipelines.tokenizer(),
        streaming=streaming,
        cache_dir=tmp_path,
        tokenize={"num_workers": 1},
        pack={"seq_length": 64},
        load={"batch_size": 4},
    )
    pipeline = Pipeline.from_config(config).source().transform(FilterNonEmpty("text"))
    assert len([*pipeline.tokenize().pack().load().build()]) > 100
    assert max(web.beside[-last:]) >= least


# Secrets


def everything_said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


SECRET = "s3cr3t-t0ken-value"


@pytest.mark.parametrize("fault", [503, 403, 404, "reset", "hang"])
def test_secrets_stay_secret(
    web: WebServer, fault: object, caplog: pytest.LogCaptureFixture
) -> None:
    remote.set_retry_policy(
        remote.RetryPolicy(attempts=2, first_wait_s=0.01, attempt_timeout_s=0.1, deadline_s=2)
    )
    options = {"headers": {"X-Api-Token": SECRET}}
    host = web.url.replace("http://", f"http://user:{SECRET}@")
    url = f"{host}/data/c.jsonl?X-Amz-Signature={SECRET}&version=7&X-Amz-Credential={SECRET}%2F2026"
    with caplog.at_level(logging.DEBUG, "easypipe"):
        source = open_files(url, storage_options=options)
        web.faults.extend([fault] * 50)
        with pytest.raises(SourceError) as caught:
            source.read(0, 0, 10)
        with pytest.raises(SourceError) as again:
            open_files(url, storage_options=options)
        with pytest.raises((StorageError, MissingFileError)) as low:
            storage.read_bytes(url, options)
    text = (
        everything_said(caught.value)
        + everything_said(again.value)
        + everything_said(low.value)
        + caplog.text
    )
    assert "data/c.jsonl?version=7" in text
    assert SECRET not in text
    assert SECRET not in repr(source.files)
    assert SECRET not in source.files[0].path
    assert {
        (h.get("X-Api-Token"), "Basic " in h.get("Authorization", "")) for h in web.headers
    } == {(SECRET, True)}  # and yet they were used


def test_a_new_signature_is_the_same_file(web: WebServer) -> None:
    one, two = (open_files(f"{web.url}/data/a.parquet?sig={sig}") for sig in ("first0", "second"))
    assert one.fingerprint == two.fingerprint
    assert one.shard_identity(0) == two.shard_identity(0)
    assert open_files(f"{web.url}/data/a.parquet?version=2").fingerprint != one.fingerprint


@pytest.mark.parametrize("query", ["", "?download=true", "?sig=ab/cd"])
def test_a_query_hides_no_name(web: WebServer, tmp_path: Path, query: str) -> None:
    """Neither the comma of .tsv nor the index beside a file; a signature is for one file alone."""
    write_megatron(tmp_path / "t", [[1, 2], [3]])
    files = {name: (tmp_path / name).read_bytes() for name in ("t.bin", "t.idx")}
    text = b'{"column_names": ["b"], "column_encodings": ["bytes"], "column_sizes": [1]}'
    shard = struct.pack("<3I", 1, 12 + len(text), 13 + len(text)) + text + b"x"
    entry = {"basename": "s.mds", "bytes": 9}
    index = {"shards": [{"samples": 1, "raw_data": entry, "zip_data": None}]}
    files |= {
        "a.tsv": b"a\tb\n1,0\t2\n",
        "s.mds": shard,
        "index.json": json.dumps(index).encode(),
    }
    web.files.update({f"/{name}": data for name, data in files.items()})
    if "sig" in query:
        web.denied = {f"/{name}": (403, {}) for name in ("t.idx", "index.json")}

    def read(name: str, **options: TokenFilesConfig) -> list:
        source = open_files(f"{web.url}/{name}{query}", **options)
        return source.read(0, 0, source.shards[0].num_rows or 0).to_pylist()

    assert read("a.tsv")[0]["a"] == "1,0"
    if "sig" in query:
        raw = TokenFilesConfig(dtype="uint16", document_tokens=3)
        assert read("t.bin", token_files=raw) == [{"input_ids": [1, 2, 3]}]
        assert len(read("s.mds")) == 1
    else:
        assert read("t.bin") == [{"input_ids": [1, 2]}, {"input_ids": [3]}]
        with pytest.raises(SourceError, match=r"bytes: \d+, index.json says 9"):
            read("s.mds")


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("s3://bucket/a b.parquet", "s3://bucket/a b.parquet"),
        ("https://h/x?download=true", "https://h/x?download=true"),
        ("https://me:pw@h/x", "https://h/x"),
        ("https://h/x?key=a.txt&token=abc", "https://h/x?key=a.txt"),
        ("https://h/x?sv=1&sig=2&se=3", "https://h/x"),
        ("/a/b?c", "/a/b?c"),
        ("s3://b/[ab].txt", "s3://b/[ab].txt"),
    ],
)
def test_public_urls(url: str, public: str) -> None:
    assert remote.public_url(url) == public


def test_a_signed_file_is_asked_for_once(web: WebServer, tmp_path: Path) -> None:
    """No request is made for names that are not files (a folder's manifest behind a signed URL would
    be refused).
    """
    from easypipe import DatasetConfig, Pipeline, PipelineConfig

    dataset = DatasetConfig(name="d", data_files=f"{web.url}/data/c.jsonl?sig=abcdef")
    Pipeline.from_config(
        PipelineConfig(datasets=[dataset], seed=1, cache_dir=str(tmp_path))
    ).source()
    assert {path for _, path, _ in web.seen} == {"/data/c.jsonl?sig=abcdef"}


def test_configs_keep_no_storage_options() -> None:
    from easypipe import DatasetConfig

    dataset = DatasetConfig(data_files="s3://bucket/a.parquet", storage_options={"secret": SECRET})
    assert SECRET not in repr(dataset)
    assert SECRET not in json.dumps(to_dict(dataset))
    with pytest.raises(ConfigError) as caught:
        DatasetConfig(data_files="s3://bucket/a.parquet", storage_options=SECRET)  # type: ignore[arg-type]
    assert SECRET not in everything_said(caught.value)


# Buckets


@pytest.mark.parametrize(
    "url", [f"{protocol}:///a.jsonl" for protocol in ("s3", "s3a", "gs", "gcs", "http", "https")]
)
def test_a_url_without_a_bucket(url: str) -> None:
    with pytest.raises((SourceError, StorageError), match=r"names no (bucket|server)"):
        open_files(url)


ARCHIVE = "with storage_options={'fo': '/b.zip'}."


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("zip://in/a.jsonl::/b.zip", f"Give 'zip://in/a.jsonl', {ARCHIVE}"),
        ("simplecache::zip://in::/b.zip", f"Give 'zip://in', {ARCHIVE}"),
        ("tar://a.jsonl::s3://me:pw@b/c.tar", "storage_options={'fo': 's3://b/c.tar'}."),
        ("filecache::file:///a.jsonl", "Give 'file:///a.jsonl' alone."),
    ],
)
def test_a_chain_of_urls_is_refused_by_name(url: str, said: str) -> None:
    """Whether it is asked for a saved folder first or not."""
    for ask in (open_files, is_saved):
        with pytest.raises(StorageError, match="only as a cache of a store") as caught:
            ask(url)
        assert str(caught.value).endswith(said)
        assert "pw" not in str(caught.value)
        assert "_easypipe" not in str(caught.value)


def test_a_cache_of_a_store_and_an_archive_are_read(tmp_path: Path) -> None:
    path = f"{tmp_path.name}/c.jsonl"
    fsspec.filesystem("memory").pipe(f"/{path}", LINES)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/c.jsonl", LINES)
    zipped = open_files("zip://in/*.jsonl", storage_options={"fo": str(tmp_path / "a.zip")})
    for source in (open_files(f"simplecache::memory://{path}"), zipped):
        assert column(source.read(0, 0, 2)) == ["row 0", "row 1"]


@pytest.mark.parametrize("url", ["github://x/a.jsonl", "dir://x", "zip://x"])
def test_a_filesystem_without_its_options_is_named(url: str) -> None:
    with pytest.raises(StorageError, match=rf"^{url}: .*for \w+:// in storage_options\.$"):
        is_saved(url)


def test_a_fragment_hides_no_name(web: WebServer) -> None:
    url = f"{web.url}/data/c.jsonl#part"
    assert not is_saved(url)
    assert column(open_files(url).read(0, 0, 1)) == ["row 0"]


def test_a_bucket(store: Store) -> None:
    folder = store.new()

    def put(name: str, data: bytes) -> None:
        store.filesystem.pipe_file(f"{folder}/{name}", data)

    options = store.options
    for name, data in FILES.items():
        put(name, data)
    put("z/g.parquet", FILES["a.parquet"])
    for name in ("a.parquet", "d.jsonl.gz"):
        source = open_files(f"{folder}/{name}", storage_options=options)
        assert_stateless_reads(source, [1, 1024, 2999])
    listed = sources_files.resolve(folder, options, extensions=["parquet"])
    assert [file.path for file in listed] == [f"{folder}/a.parquet", f"{folder}/z/g.parquet"]
    listed = sources_files.resolve(f"{folder}/*.jsonl*", options)
    assert [file.path.rpartition("/")[2] for file in listed] == [
        "c.jsonl",
        "d.jsonl.gz",
        "e.jsonl.bz2",
    ]
    before = open_files(f"{folder}/c.jsonl", storage_options=options).fingerprint
    put("c.jsonl", LINES + LINES)
    assert open_files(f"{folder}/c.jsonl", storage_options=options).fingerprint != before
    with pytest.raises(MissingFileError, match="no such file or folder"):
        open_files(f"{folder}/missing.jsonl", storage_options=options)


def test_objects_that_stand_for_folders_are_no_files(s3: Store) -> None:
    """As the console of S3 makes them, when somebody makes a folder."""
    folder = s3.new()
    s3.filesystem.pipe_file(f"{folder}/e/a.jsonl", LINES)
    bucket, _, key = folder.partition("://")[2].partition("/")
    for name in ("e/", "e/sub/"):
        s3.filesystem.call_s3("put_object", Bucket=bucket, Key=f"{key}/{name}", Body=b"")
    for named in ("e", "e/**", "**", "e/*"):
        found = sources_files.resolve(f"{folder}/{named}", s3.options)
        assert [file.path for file in found] == [f"{folder}/e/a.jsonl"], named


def rows_of(url: str, store: Store) -> list[str]:
    source = open_files(url, storage_options=store.options)
    shards = enumerate(source.shards)
    return [row for i, one in shards for row in column(source.read(i, 0, one.num_rows or 0))]


def column(batch: pa.RecordBatch) -> list[str]:
    return batch.column("text").to_pylist()


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "fault", [429, 500, 503, "reset", "hang", "short", "fewer", "page", "bomb"]
)
def test_a_bucket_whose_answers_fail_in_passing(store: Store, fault: object) -> None:
    """At each of the first requests for a part of an object, one after another."""
    name = f"{store.new()}/a.parquet"
    store.filesystem.pipe_file(name, FILES["a.parquet"])
    with faulty(store) as (behind, proxy):
        for before in range(3):
            sources_files._whole.cache_clear()
            proxy.answers.extend([None] * before + [fault])
            assert rows_of(name, behind) == column(TABLE)
            assert not proxy.answers


@pytest.mark.usefixtures("large")
def test_a_part_of_an_object_that_was_not_asked_for_is_not_believed(store: Store) -> None:
    name = f"{store.new()}/a.parquet"
    store.filesystem.pipe_file(name, FILES["a.parquet"])
    with faulty(store) as (behind, proxy):
        proxy.answers.append("wrong")
        with pytest.raises(SourceError, match=r"sent 'bytes 1-.*' where bytes 0 to \d+ were asked"):
            rows_of(name, behind)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", ["c.jsonl", "a.parquet"])
def test_an_object_that_is_written_anew_while_it_is_read(
    store: Store, name: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes, so that no size tells."""
    monkeypatch.setattr(sources_files, "SMALL_BYTES", (1 << 22) * small)
    monkeypatch.setattr(streams, "KEPT_BLOCKS", 0)
    url = f"{store.new()}/{name}"
    store.filesystem.pipe_file(url, FILES[name])
    source = open_files(url, storage_options=store.options)
    rows = source.shards[0].num_rows or 0
    sources_files._whole.cache_clear()
    store.filesystem.pipe_file(url, FILES[name].replace(b"row 29", b"ROW 29"))
    with pytest.raises(SourceError, match="the store says that the object has changed"):
        source.read(0, 0, rows)


def test_an_object_that_is_stored_packed_is_read_as_it_is_stored(gs: Store) -> None:
    """`gcloud storage cp --gzip-local` stores so; another client may unpack any number of bytes."""
    packed = gzip.compress(bytes(1 << 26))
    name = f"{gs.new()}/bomb.jsonl"
    gs.filesystem.pipe_file(name, packed, fixed_key_metadata={"content_encoding": "gzip"})
    tracemalloc.start()
    try:
        assert storage.read_range(name, 0, 2, gs.options) == packed[:2]
        with pytest.raises(SourceError, match=r"bomb\.jsonl: is compressed \(gz\)"):
            open_files(name, storage_options=gs.options).read(0, 0, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def wait_a_second_for_a_new_host(
    monkeypatch: pytest.MonkeyPatch, *, attempt_timeout_s: float
) -> None:
    """And a minute for one that has answered; none has, so far."""
    known = remote.RetryPolicy(
        attempts=99, first_wait_s=0.05, attempt_timeout_s=attempt_timeout_s, deadline_s=60.0
    )
    monkeypatch.setattr(remote, "_answered", set())
    monkeypatch.setattr(remote, "FIRST", dataclasses.replace(known, deadline_s=1.0))
    monkeypatch.setattr(remote, "DEFAULT", known)
    remote.set_retry_policy(None)


@pytest.mark.parametrize("fault", [503, 429, "reset", "hang", "page"])
def test_a_server_that_always_fails_is_told_of_soon(
    web: WebServer, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has answered is waited for."""
    wait_a_second_for_a_new_host(monkeypatch, attempt_timeout_s=0.3)
    web.faults.extend([fault] * 999)
    began = time.monotonic()
    with pytest.raises(SourceError, match=r"gave up after \d+ attempts in"):
        open_files(f"{web.url}/data/c.jsonl")
    assert time.monotonic() - began < 3
    web.faults.clear()
    source = open_files(f"{web.url}/data/c.jsonl")
    web.faults.extend(["hang"] * 4)
    assert source.shards[0].num_rows == 3000
    assert not web.faults


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("name", ["*.jsonl", "c.jsonl"])
def test_a_bucket_that_always_fails_is_told_of_soon(
    store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pattern too, whose list may take longer where the store works."""
    wait_a_second_for_a_new_host(monkeypatch, attempt_timeout_s=0.5)
    folder = store.new()
    store.filesystem.pipe_file(f"{folder}/c.jsonl", LINES)
    with faulty(store) as (behind, proxy):
        proxy.always, proxy.reads = 503, True
        began = time.monotonic()
        with pytest.raises((SourceError, StorageError), match="gave up after"):
            open_files(f"{folder}/{name}", storage_options=behind.options)
        assert time.monotonic() - began < 5
        proxy.always = None
        assert open_files(f"{folder}/{name}", storage_options=behind.options).shards


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("fault", [503, "reset", "hang"])
def test_an_outage_of_a_bucket_is_told_by_the_deadline(store: Store, fault: object) -> None:
    """Whatever attempts the client of the store makes of its own."""
    name = f"{store.new()}/c.jsonl"
    store.filesystem.pipe_file(name, LINES)
    limits = {"attempt_timeout_s": 0.5, "deadline_s": 1.5}
    remote.set_retry_policy(remote.RetryPolicy(attempts=99, first_wait_s=0.01, **limits))
    with faulty(store) as (behind, proxy):
        source = open_files(name, storage_options=behind.options)
        proxy.always, proxy.reads = fault, True

        def told(call: Callable[[], object]) -> None:
            began = time.monotonic()
            with pytest.raises((SourceError, StorageError), match="gave up after"):
                call()
            assert time.monotonic() - began < 2 * limits["deadline_s"] + 1

        calls = (
            lambda: open_files(name, storage_options=behind.options),
            lambda: source.shards,
            lambda: storage.read_bytes(name, behind.options),
        )
        with ThreadPoolExecutor() as pool:  # each waits for its deadline
            list(pool.map(told, calls))


@pytest.mark.parametrize(
    ("protocol", "extra"),
    [("s3", "s3"), ("s3a", "s3"), ("gs", "gcs"), ("gcs", "gcs"), ("abfs", None)],
)
def test_a_store_without_its_package(
    protocol: str, extra: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocols are those that fsspec serves by the packages of our extras."""
    if extra is not None:
        serves = known_implementations[protocol]["class"].partition(".")[0]
        told = metadata.requires("easypipe") or []
        assert any(one.startswith(serves) and f'"{extra}"' in one.replace("'", '"') for one in told)

    def absent(*args: object, **kwargs: object) -> None:
        raise ImportError("Install it")

    monkeypatch.setattr(storage, "url_to_fs", absent)
    install = (
        f"pip install 'easypipe[{extra}]'." if extra else "Install the fsspec package for abfs."
    )
    with pytest.raises(StorageError) as caught:
        open_files(f"{protocol}://bucket/a.txt")
    assert str(caught.value) == (
        f"{protocol}://bucket/a.txt: cannot open {protocol}:// paths: ImportError: Install it. {install}"
    )


def test_no_secret_is_told_in_whatever_form_it_comes_back() -> None:
    """What a library's message repeats: header, key and signature as they are, and as a URL writes
    them.
    """
    url = "https://me:pa55word@host/a.parquet?X-Amz-Signature=abc%2Fdef%3D&version=7"
    options = {
        "headers": {"Authorization": "Bearer t0ken-t0ken"},
        "client_kwargs": {"aws_secret_access_key": "key/with+signs="},
    }
    secrets = [
        "pa55word",
        "abc/def=",
        "abc%2Fdef%3D",
        "t0ken-t0ken",
        "key/with+signs=",
        "key%2Fwith%2Bsigns%3D",
    ]
    told = remote.tell(OSError(f"GET {url} refused: " + ", ".join(secrets)), url, options)
    assert not [secret for secret in secrets if secret in told], told
    assert "refused" in told
    assert "version=7" in told
