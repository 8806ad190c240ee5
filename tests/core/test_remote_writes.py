"""Writing to object stores that fail in passing ways, lose answers, and give up: S3 and GCS servers
on loopback behind a faulty proxy.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator

import pytest

from easypipe.core import remote, storage
from easypipe.core.errors import StorageError
from stores import SECRET, Store, faulty


@pytest.fixture
def quick() -> Iterator[None]:
    remote.set_retry_policy(
        remote.RetryPolicy(attempts=4, first_wait_s=0.01, attempt_timeout_s=10, deadline_s=30)
    )
    yield
    remote.set_retry_policy(None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", [503, 429, "reset", "lost"])
def test_a_write_is_tried_again(store: Store, fault: object) -> None:
    with faulty(store) as (behind, proxy):
        url = f"{store.new()}/a.json"
        proxy.faults.append(fault)
        stamp = storage.commit_bytes(url, b"content", behind.options)
        assert stamp.num_bytes == 7
        assert len(proxy.seen) >= 2
    assert storage.read_bytes(url, store.options) == b"content"


@pytest.mark.usefixtures("quick")
def test_the_first_to_create_wins(store: Store) -> None:
    url = f"{store.new()}/manifest.json"
    assert storage.create_bytes(url, b"first", store.options)
    assert not storage.create_bytes(url, b"second", store.options)
    assert storage.read_bytes(url, store.options) == b"first"
    with faulty(store) as (behind, proxy):
        proxy.faults.append("lost")
        other = f"{store.new()}/manifest.json"
        assert storage.create_bytes(other, b"mine", behind.options), (
            "it was made, though nobody was told"
        )
        assert len(proxy.seen) >= 2


def test_giving_up_names_the_url_and_no_secret(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    remote.set_retry_policy(
        remote.RetryPolicy(attempts=2, first_wait_s=0.01, attempt_timeout_s=0.3, deadline_s=1.0)
    )
    try:
        with faulty(store) as (behind, proxy), caplog.at_level(logging.DEBUG, "easypipe"):
            proxy.always = 503
            url = f"{store.new()}/a.json"
            with pytest.raises(
                StorageError,
                match=rf"{url}: cannot be written: gave up after 2 attempts in .*run again",
            ) as caught:
                storage.commit_bytes(url, b"content", behind.options)
    finally:
        remote.set_retry_policy(None)
    assert SECRET not in "".join(traceback.format_exception(caught.value)) + caplog.text


def test_names_sizes_and_removal(store: Store) -> None:
    folder = store.new()
    assert storage.names_in(folder, store.options) == []
    assert storage.size_of(f"{folder}/a", store.options) is None
    for name in ("a", "b/c"):
        storage.commit_bytes(f"{folder}/{name}", b"0123456789", store.options)
    assert storage.names_in(folder, store.options) == ["a", "b"]
    assert storage.size_of(f"{folder}/a", store.options) == 10
    assert storage.read_range(f"{folder}/a", 2, 5, store.options) == b"234"
    storage.remove(f"{folder}/b", store.options)
    storage.remove(f"{folder}/b", store.options)
    assert storage.names_in(folder, store.options) == ["a"]
    storage.remove(f"{folder}/a", store.options)
    assert storage.size_of(f"{folder}/a", store.options) is None


def test_the_store_is_asked_to_compare_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs compares none unless it is asked to; botocore sends one by itself."""

    class Bucket:
        protocol = ("gs", "gcs")

        def __init__(self) -> None:
            self.asked: list[str | None] = []

        def put_file(self, local: str, name: str, consistency: str | None = None) -> None:
            self.asked.append(consistency)

        def pipe_file(
            self, name: str, data: bytes, mode: str, consistency: str | None = None
        ) -> None:
            self.asked.append(consistency)

        def invalidate_cache(self) -> None:
            pass

    bucket = Bucket()
    monkeypatch.setattr(storage, "filesystem", lambda path, options=None: (bucket, str(path)))
    storage.commit_bytes("gs://bucket/a", b"x")
    storage.create_bytes("gs://bucket/b", b"x")
    assert bucket.asked == ["md5", "md5"]
