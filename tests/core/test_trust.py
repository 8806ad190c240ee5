"""To whom secrets go: servers that the environment or the command line names, over https."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from huggingface_hub import constants

from easypipe import (
    CacheError,
    ConfigError,
    DatasetConfig,
    Pipeline,
    PipelineConfig,
    SaveStageConfig,
    SourceError,
)
from easypipe.cache.location import cache_folder
from easypipe.cli import main
from easypipe.core import storage, trust
from easypipe.core.checked import commit_checked, read_checked
from easypipe.core.config import parse_yaml
from easypipe.save.saved import MANIFEST, load_saved
from easypipe.sources.external.saved_datasets import saved_dataset_files, saved_splits
from hub_mirror import hub_mirror, publish  # noqa: F401
from pipelines import tokenizer
from web import WebServer, web_server

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
ELSEWHERE = "https://mirror.example.org"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv(trust.TRUSTED, "")  # and put back afterwards
    monkeypatch.setattr(trust, "_told", set())
    return


def sent(server: WebServer) -> set[str | None]:
    return {
        headers.get("Authorization") or headers.get("authorization") for headers in server.headers
    }


@pytest.mark.parametrize("trusted", [False, True])
def test_a_config_sends_the_token_to_no_endpoint_of_its_own(
    hub_mirror: WebServer,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trusted: bool,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # the mirror of the tests has none
    monkeypatch.setenv("HF_ENDPOINT", "https://huggingface.co")
    publish(hub_mirror, "org/data", {"a.jsonl": json.dumps({"text": "one two"}).encode()})
    path = tmp_path / "config.yaml"
    dataset = {
        "name": "a",
        "type": "huggingface",
        "data_files": "org/data",
        "storage_options": {"endpoint": hub_mirror.url},
    }
    values = {
        "datasets": [dataset],
        "default_tokenizer": tokenizer(),
        "cache_dir": str(tmp_path / "cache"),
    }
    path.write_text(yaml.safe_dump(values))
    flags = ["--trust-endpoint", hub_mirror.url] if trusted else []
    assert main(["prepare", str(path), *flags]) == 0
    assert sent(hub_mirror) == ({f"Bearer {TOKEN}"} if trusted else {None})


def test_what_is_not_trusted_gets_no_token_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    with caplog.at_level(logging.WARNING, "easypipe"):
        assert trust.hub_token() is None
        assert trust.hub_token(ELSEWHERE) is False
        assert trust.hub_token("https://huggingface.co.evil.org") is False
    assert f"--trust-endpoint {ELSEWHERE}," in caplog.text
    assert TOKEN not in caplog.text
    trust.trust_endpoint(ELSEWHERE)
    assert trust.hub_token(ELSEWHERE + "/path") is None
    assert trust.hub_token("https://huggingface.co@mirror.evil.org") is False
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.corp")
    assert trust.hub_token() is False, "plain http"
    with pytest.raises(ConfigError, match="HF_ENDPOINT: secrets are not sent to http://mirror"):
        trust.hub_token(own=TOKEN, at="HF_ENDPOINT")
    assert trust.hub_token("http://127.0.0.1:80", TOKEN) == TOKEN, "it stands beside the endpoint"


def test_a_file_of_the_hub_is_read_with_as_much_care() -> None:
    options = {"endpoint": ELSEWHERE}
    assert storage.filesystem("hf://datasets/o/n/a.jsonl", options)[0].token is False  # pyright: ignore
    trust.trust_endpoint(ELSEWHERE)
    assert storage.filesystem("hf://datasets/o/n/a.jsonl", options)[0].token is None  # pyright: ignore


def test_credentials_of_the_machine_go_to_no_store_that_only_a_config_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(**options: object) -> None:
        dataset = {"name": "a", "storage_options": options}
        parse_yaml(yaml.safe_dump({"datasets": [dataset]}), at="x.yaml")

    for options in (
        {"endpoint_url": ELSEWHERE},
        {"client_kwargs": {"endpoint_url": ELSEWHERE}},
        # of gcsfs, credentials of the machine
        *(
            {"endpoint_url": ELSEWHERE, "token": own}
            for own in ("cloud", "cache", "google_default", "browser", None)
        ),
        {"endpoint_url": ELSEWHERE, "anon": False},
    ):
        with pytest.raises(
            ConfigError,
            match=rf"^datasets\[0\].storage_options\..*--trust-endpoint {ELSEWHERE}",
        ):
            read(**options)
    read(endpoint_url="http://127.0.0.1:9000")
    read(endpoint_url=ELSEWHERE, anon=True)
    for name in ("key", "secret", "token", "username", "password", "connection_string"):
        read(endpoint_url=ELSEWHERE, **{name: "its own"})
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST"):
        with monkeypatch.context() as patched:
            patched.setenv(name, ELSEWHERE)
            read(endpoint_url=ELSEWHERE)
    trust.trust_endpoint(ELSEWHERE)
    read(endpoint_url=ELSEWHERE)


def test_own_headers_follow_no_redirect_to_another_origin() -> None:
    with web_server() as first, web_server() as other:
        for server in (first, other):
            server.files["/a.jsonl"] = b'{"text": "x"}\n'
        for path, there in (("/same", first), ("/other", other)):
            first.denied[path] = (302, {"Location": f"{there.url}/a.jsonl"})
        options = {
            "headers": {"X-Api-Key": "sesame", "PRIVATE-TOKEN": "opens", "User-Agent": "me"},
            "client_kwargs": {"cookies": {"session": "lets-in"}},
        }
        for path in ("/same", "/other"):
            assert storage.size_of(first.url + path, options) == 14
            assert storage.read_range(first.url + path, 2, 6, options) == b"text"
            assert storage.read_bytes(first.url + path, options) == b'{"text": "x"}\n'
        assert {headers.get("X-Api-Key") for headers in first.headers} == {"sesame"}
        assert {headers.get("PRIVATE-TOKEN") for headers in first.headers} == {"opens"}
        assert {headers.get("Cookie") for headers in first.headers} == {"session=lets-in"}
        assert other.headers
        assert not any({"X-Api-Key", "PRIVATE-TOKEN", "Cookie"} & {*got} for got in other.headers)
        assert {"Range", "Accept", "Accept-Encoding"} <= {*other.headers[0]}
        assert {headers.get("User-Agent") for headers in other.headers} == {"me"}


def test_secret_headers_do_not_go_over_plain_http() -> None:
    with pytest.raises(
        ConfigError, match=r"secrets are not sent to http://data\.corp over plain http"
    ):
        storage.filesystem("http://data.corp/a.jsonl", {"headers": {"X-Api-Key": "sesame"}})
    for name in ("Accept", "Accept-Encoding", "Range", "User-Agent"):  # of every client
        storage.filesystem("http://data.corp/a.jsonl", {"headers": {name: "a client's own"}})


def test_the_flag_wants_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("mirror", "ftp://mirror.corp", "https://"):
        assert main(["plan", "x.yaml", "--trust-endpoint", url]) == 2
        told = f"trust_endpoint: '{url}' is not a URL of a web server. Write https://host."
        assert told in capsys.readouterr().err
    assert constants.ENDPOINT  # what the Hub's client took at its import


@pytest.mark.parametrize(
    "url", ["https://[::1", "https://host:port", "https://host:99999", "https://", "host", "::"]
)
def test_what_is_no_url_is_no_server(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Not even the same as another that is none."""
    monkeypatch.setenv(trust.TRUSTED, ELSEWHERE)
    with pytest.raises(ConfigError, match=re.escape(f"{url!r} is not a URL of a web server")):
        trust.trust_endpoint(url)
    monkeypatch.setenv("HF_ENDPOINT", "https://[::2")
    assert trust.hub_token(url or "::") is False
    for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    options = {"endpoint_url": url}
    with pytest.raises(ConfigError, match=re.escape(f"credentials of this machine to {url}")):
        trust.require_trusted_storage(options, "storage_options")


def test_lists_of_files_name_none_outside_their_folder(tmp_path: Path) -> None:
    other = tmp_path / "other" / "x.arrow"
    other.parent.mkdir()
    other.write_bytes(b"")
    folder = tmp_path / "saved"
    (folder / "train").mkdir(parents=True)
    for name in ("../other/x.arrow", str(other), "..\\other", "s3://b/x.arrow", "", 1, None):
        (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
        (folder / "train" / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": name}]})
        )
        with pytest.raises(SourceError, match=r"state.json: .* does not name a file"):
            saved_dataset_files(folder)
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
        with pytest.raises(SourceError, match=r"dataset_dict.json: .* does not name a file"):
            saved_splits(folder)
    for damaged in ('{"_data_files": 1}', '{"_data_files": [1]}', "[" * 100_000, '{"_data_files'):
        (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
        (folder / "train" / "state.json").write_text(damaged)
        with pytest.raises(SourceError, match=r"state\.json: "):
            saved_dataset_files(folder)


def test_a_saved_folder_names_no_file_outside_of_it(tmp_path: Path) -> None:
    data = pa.table({"text": ["one", "two"]})
    pipeline = Pipeline.from_config(
        PipelineConfig(
            datasets=[DatasetConfig(name="a", data_files=data)],
            default_tokenizer=tokenizer(),
            cache_dir=tmp_path / "cache",
            save=SaveStageConfig(output_dir=tmp_path / "out"),
        )
    )
    [folder] = [Path(folder.path) for folder in pipeline.source().tokenize().save().build().folders]
    manifest = folder / MANIFEST
    values = read_checked(manifest)
    shard = values["shards"][0]["name"]
    (tmp_path / "stolen").write_bytes((folder / shard).read_bytes())
    values["shards"][0]["name"] = "../" * len(folder.parts) + str(tmp_path / "stolen")[1:]
    commit_checked(manifest, values)
    with pytest.raises(CacheError, match=r"_easypipe.json: .*stolen' is not a file of this folder"):
        load_saved(folder)


def test_a_cache_that_everybody_may_write_to_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "easypipe"):
        (tmp_path / "own").mkdir(mode=0o755)
        cache_folder(tmp_path / "own")
        assert not caplog.text
        (tmp_path / "all").mkdir()
        (tmp_path / "all").chmod(0o777)
        cache_folder(tmp_path / "all")
    assert "all: every user of this machine may write to this cache" in caplog.text


@pytest.mark.parametrize(
    ("url", "trusted"),
    [
        (ELSEWHERE, True),
        (f"{ELSEWHERE}:443/hub", True),
        ("https://MIRROR.example.org./", True),
        (f"{ELSEWHERE}:8443", False),
        ("https://example.org", False),
        ("https://mirror.example.org.evil.example", False),
        ("https://mirror.example.org@evil.example", False),
        ("http://mirror.example.org", False),
        ("http://mirror.example.org:443", False),
    ],
)
def test_a_server_is_known_by_scheme_host_and_port_however_they_are_written(
    monkeypatch: pytest.MonkeyPatch, url: str, trusted: bool
) -> None:
    for named in (ELSEWHERE, f"{ELSEWHERE}:443", f"{ELSEWHERE}/some/path"):
        monkeypatch.setenv(trust.TRUSTED, named)
        assert trust.hub_token(url) is (None if trusted else False)
        options = {"endpoint_url": url}
        if trusted:
            trust.require_trusted_storage(options, "storage_options")
        else:
            with pytest.raises(ConfigError, match="credentials of this machine"):
                trust.require_trusted_storage(options, "storage_options")


@pytest.mark.parametrize("host", ["evil-localhost", "notlocalhost", "localhost.evil.example"])
def test_a_host_that_looks_like_this_machine_is_another(host: str) -> None:
    with pytest.raises(ConfigError, match="over plain http"):
        trust.require_private(f"http://{host}:9000", "endpoint")
    trust.require_private("http://localhost:9000", "endpoint")
