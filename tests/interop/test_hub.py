"""Pushing to the Hub, with its real client, against a server on loopback that speaks its API."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import easypipe
from easypipe import (
    ConfigError,
    DatasetConfig,
    MissingFileError,
    PackStageConfig,
    Pipeline,
    SaveReport,
    SaveStageConfig,
    StorageError,
    load_saved,
)
from easypipe.core.config import digest, to_dict
from easypipe.interop.hub import _Repository
from easypipe.save.card import CARD, HUB_CARD, YAML
from easypipe.save.saved import MANIFEST, SavedSource
from hub_server import Hub
from pipelines import config

TOKEN = "hf_secret0123456789"
REPO = "someone/tokens"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    # the server speaks the older protocol for large files
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    # the server is on this machine
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Hub(tokens={TOKEN}, readers={"hf_reader"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def save(tmp_path: Path, out: str = "out", /, **options: object) -> SaveReport:
    values = {
        "output_dir": tmp_path / out,
        "num_shards": 3,
        "push_to_hub": True,
        "hub_repo_id": REPO,
        "hub_token": TOKEN,
    } | options
    pipeline = (
        Pipeline(config(tmp_path)).source().tokenize().mix({"stop_strategy": "all_exhausted"})
    )
    return pipeline.pack(PackStageConfig(seq_length=64)).save(SaveStageConfig(**values)).build()


def rows(source: SavedSource) -> list:
    return [
        row
        for i, shard in enumerate(source.shards)
        for row in source.read(i, 0, shard.num_rows).to_pylist()
    ]


def test_a_pushed_folder_loads_again_from_the_hub(tmp_path: Path, hub: Hub) -> None:
    report = save(tmp_path)
    [pushed] = report.pushed
    repo = hub.repos[REPO]
    assert repo.private
    assert (pushed.repo_id, pushed.revision, pushed.commit, pushed.up_to_date) == (
        REPO,
        "main",
        repo.heads["main"],
        False,
    )
    assert pushed.num_files == 4
    assert pushed.num_bytes == sum(
        len(data) for name, data in repo.branches["main"].items() if name != HUB_CARD
    )
    here = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    there = repo.branches["main"]
    assert there.keys() == (here.keys() - {CARD, YAML}) | {HUB_CARD}
    assert {name: data for name, data in there.items() if name.startswith("part-")} == {
        n: d for n, d in here.items() if n.startswith("part-")
    }
    assert f'load_saved("hf://datasets/{REPO}")'.encode() in there[HUB_CARD]
    again = load_saved(
        f"hf://datasets/{REPO}", {"endpoint": hub.url, "token": TOKEN, "skip_instance_cache": True}
    )
    assert rows(again) == rows(load_saved(tmp_path / "out"))
    assert again.fingerprint == load_saved(tmp_path / "out").fingerprint


def test_nothing_private_is_published(tmp_path: Path, hub: Hub) -> None:
    """Neither the token nor a path of this machine stands in what is pushed, nor in the folder's
    own card.
    """
    save(tmp_path)
    card = (tmp_path / "out" / CARD).read_bytes()
    for data in [*hub.repos[REPO].branches["main"].values(), card]:
        for secret in (TOKEN, str(tmp_path), "/tmp", "easypipe-test-tokenizer"):
            assert secret.encode() not in data


def test_pushed_twice_it_is_up_to_date(tmp_path: Path, hub: Hub) -> None:
    first = save(tmp_path).pushed[0]
    uploads, before = list(hub.uploads), len(hub.requests)
    second = save(tmp_path).pushed[0]
    assert (second.up_to_date, second.commit) == (True, first.commit)
    assert hub.uploads == uploads
    assert not [path for method, path in hub.requests[before:] if "/commit/" in path]


@pytest.mark.parametrize("change", ["a byte of the manifest", "a shorter shard", "a shard less"])
def test_what_is_there_is_what_is_pushed(tmp_path: Path, hub: Hub, change: str) -> None:
    save(tmp_path)
    there = hub.repos[REPO].branches["main"]
    wanted = dict(there)
    shard = next(name for name in there if name.startswith("part-"))
    if change == "a byte of the manifest":  # of another state, as long as this one
        at = wanted[MANIFEST].index(b'"checksum"') + len(b'"checksum": "')
        there[MANIFEST] = wanted[MANIFEST][:at] + b"x" + wanted[MANIFEST][at + 1 :]
    elif change == "a shorter shard":
        there[shard] = wanted[shard][:-1]
    else:
        del there[shard]
    [pushed] = save(tmp_path).pushed
    assert not pushed.up_to_date
    assert hub.repos[REPO].branches["main"] == wanted


@pytest.mark.parametrize("at", [("PUT", "/lfs/"), ("POST", "/commit/")])
def test_a_push_that_stopped_goes_on(
    tmp_path: Path, hub: Hub, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was uploaded is not sent again, and nothing is visible before the commit."""
    hub.fail[at] = 418
    with pytest.raises(
        StorageError,
        match=r"hub:someone/tokens: (uploading|committing).* failed with HTTP 418: .* Run the job "
        r"again",
    ):
        save(tmp_path)
    assert not hub.repos[REPO].branches["main"]
    [pushed] = save(tmp_path).pushed
    assert not pushed.up_to_date
    assert len(hub.uploads) == len(set(hub.uploads)), "a file was sent twice"
    assert MANIFEST in hub.repos[REPO].branches["main"]


def test_another_state_replaces_the_shards_of_the_first(tmp_path: Path, hub: Hub) -> None:
    save(tmp_path)
    there = hub.repos[REPO].branches["main"]
    there[HUB_CARD] += b"of the first"
    save(tmp_path, "one", num_shards=1)
    assert not there[HUB_CARD].endswith(b"of the first")
    there["notes.txt"] = b"mine"
    there[HUB_CARD] = b"# My own words"
    save(tmp_path, "other", num_shards=2)
    assert sum(name.startswith("part-") for name in there) == 2
    assert there["notes.txt"] == b"mine"
    assert there[HUB_CARD] == b"# My own words"
    assert (
        len(
            load_saved(
                f"hf://datasets/{REPO}",
                {"endpoint": hub.url, "token": TOKEN, "skip_instance_cache": True},
            ).shards
        )
        == 2
    )


def test_several_datasets_in_one_repository(tmp_path: Path, hub: Hub) -> None:
    save(tmp_path, "one")  # its manifest would be read in place of the folders
    pipeline = Pipeline(config(tmp_path)).source().tokenize()
    pipeline.save(
        SaveStageConfig(
            output_dir=tmp_path / "out", push_to_hub=True, hub_repo_id=REPO, hub_token=TOKEN
        )
    ).build()
    there = hub.repos[REPO].branches["main"]
    assert {name.partition("/")[0] for name in there} == {"code", "docs", HUB_CARD}
    options = {"endpoint": hub.url, "token": TOKEN, "skip_instance_cache": True}
    with pytest.raises(MissingFileError, match="holds several saved folders, not one"):
        load_saved(f"hf://datasets/{REPO}", options)
    for name in ("code", "docs"):
        assert rows(load_saved(f"hf://datasets/{REPO}/{name}", options)) == rows(
            load_saved(tmp_path / "out" / name)
        )
    assert b"path: docs/part-" in there[HUB_CARD]


def test_a_branch_of_ones_own(tmp_path: Path, hub: Hub) -> None:
    assert save(tmp_path, hub_revision="v2").pushed[0].revision == "v2"
    assert hub.repos[REPO].branches["main"] == {}
    assert MANIFEST in hub.repos[REPO].branches["v2"]
    assert save(tmp_path, hub_revision="v2").pushed[0].up_to_date


def test_a_remote_folder_is_pushed_as_well(tmp_path: Path, hub: Hub) -> None:
    save(tmp_path, output_dir=f"memory://{tmp_path.name}/out")
    remote = dict(hub.repos.pop(REPO).branches["main"])
    save(tmp_path)
    assert hub.repos[REPO].branches["main"] == remote


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (
            "hf_wrong",
            r"creating it failed with HTTP 401: the Hub does not accept the token, or no token "
            r"is set: .* Set hub_token or HF_TOKEN, or",
        ),
        (
            "hf_reader",
            r"creating it failed with HTTP 403: the token may not write there: .* Use a token with "
            r"write permission",
        ),
    ],
)
def test_refused_tokens(
    tmp_path: Path, hub: Hub, token: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.DEBUG, logger="easypipe"),
        pytest.raises(StorageError, match=message) as caught,
    ):
        save(tmp_path, hub_token=token)
    assert str(caught.value).startswith(f"hub:{REPO}: ")
    assert token not in "".join(traceback.format_exception(caught.value))
    assert token not in caplog.text
    assert save(tmp_path).pushed, "the advice: a token that may write"


def test_a_token_that_an_answer_repeats_is_not_told(hub: Hub) -> None:
    repository = _Repository(REPO, TOKEN, "main")
    told, _ = repository._explain(ValueError(f"{TOKEN} is not known"))
    assert told == ": ValueError: *** is not known"


def test_the_token_of_the_environment(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert save(tmp_path, hub_token=None).pushed


def test_private_rows_do_not_go_to_a_public_repository(tmp_path: Path, hub: Hub) -> None:
    assert save(tmp_path, hub_private=False).pushed
    assert not hub.repos[REPO].private
    hub.repos[REPO].branches["main"].clear()
    with pytest.raises(
        ConfigError, match=r"save.hub_private: the repository 'someone/tokens' exists and is public"
    ):
        save(tmp_path)
    assert not hub.repos[REPO].branches["main"]


def test_a_hub_that_is_not_there(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        StorageError, match=r"hub:someone/tokens: creating it failed: .* Run the job again"
    ):
        save(tmp_path)


def test_offline_nothing_is_pushed(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        StorageError, match="creating it failed: HF_HUB_OFFLINE forbids access to the Hub"
    ):
        save(tmp_path)
    assert load_saved(tmp_path / "out").manifest.num_rows


def test_not_asked_nothing_is_pushed(tmp_path: Path, hub: Hub) -> None:
    assert save(tmp_path, push_to_hub=False).pushed == ()
    assert not hub.requests


def test_tokens_are_in_no_text() -> None:
    options = {"key": "id", "secret": TOKEN}
    stage = SaveStageConfig(
        output_dir="x", hub_token=TOKEN, hub_repo_id=REPO, storage_options=options
    )
    for text in (
        repr(stage),
        str(to_dict(stage)),
        repr(easypipe.PipelineConfig(datasets=(DatasetConfig(data_files="x"),), save=stage)),
    ):
        assert TOKEN not in text
    assert digest(stage) == digest(SaveStageConfig(output_dir="x", hub_repo_id=REPO))
    with pytest.raises(ConfigError) as caught:
        SaveStageConfig(output_dir="x", hub_token=[TOKEN])
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"push_to_hub": True},
            'hub_repo_id: push_to_hub needs a repository. Set it, like "user/name".',
        ),
        *(
            (
                {"hub_repo_id": name},
                f'hub_repo_id: {name!r} names no repository. Write "user/name".',
            )
            for name in ("name", "a/b/c", "a b/c", "a/b/")
        ),
        (
            {"hub_token": ""},
            "hub_token: is empty. Give a token, or leave it out for HF_TOKEN or your login.",
        ),
        *(
            (
                {"hub_revision": name},
                f"hub_revision: {name!r} names no branch. Leave it out for main.",
            )
            for name in ("-x", "", "a b")
        ),
        ({"num_shards": 0}, "num_shards: 0 shards hold nothing. Give at least 1."),
    ],
)
def test_options_that_make_no_sense(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SaveStageConfig(output_dir="x", **options)
    assert str(caught.value) == message
