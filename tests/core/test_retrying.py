"""Which failures of remote storage pass, when another attempt is made and how long it may take, and
what is said in the end: by a clock that only waiting moves.
"""

from __future__ import annotations

import contextlib
import errno
import ssl
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from easypipe.core import remote
from easypipe.core.errors import EasypipeError, MissingFileError, StorageError
from easypipe.core.remote import RetryPolicy

URL = "https://host/a.jsonl"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


class Calls:
    """Attempts that take `seconds` each (None: all that they are given), and fail `failing` times
    with `error`.
    """

    def __init__(
        self, clock: Clock, seconds: float | None, failing: int, error: BaseException
    ) -> None:
        self.clock, self.seconds, self.failing, self.error = clock, seconds, failing, error
        self.given: list[float] = []

    def __call__(self, timeout_s: float) -> str:
        self.given.append(round(timeout_s, 6))
        self.clock.now += timeout_s if self.seconds is None else self.seconds
        if len(self.given) <= self.failing:
            raise self.error
        return "answer"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(remote, "time", clock)
    monkeypatch.setattr(remote, "random", SimpleNamespace(uniform=lambda low, high: high))
    monkeypatch.setattr(remote, "_times", type(remote._times)(remote._Times))
    yield clock
    remote.set_retry_policy(None)


def policy(**changes: Any) -> None:
    known = {"attempts": 6, "first_wait_s": 1, "longest_wait_s": 5, "deadline_s": 1000}
    remote.set_retry_policy(RetryPolicy(**{**known, **changes}))


def test_waits_double_up_to_the_longest(clock: Clock) -> None:
    policy()
    call = Calls(clock, 0, 5, ConnectionError("reset"))
    assert remote.retrying(URL, call) == "answer"
    assert clock.waits == [1, 2, 4, 5, 5]
    assert call.given == [60] * 6
    with pytest.raises(StorageError, match=r"gave up after 6 attempts in 17\.0 s; .*: reset\."):
        remote.retrying(URL, Calls(clock, 0, 6, ConnectionError("reset")))


def test_a_server_that_packs_is_given_up_sooner(clock: Clock) -> None:
    policy(attempts=8)
    with pytest.raises(StorageError, match=r"gave up after 5 attempts .*the server compressed it"):
        remote.retrying(
            URL, Calls(clock, 0, 9, remote.PackedError("the server compressed it (br)"))
        )
    policy(attempts=2)
    with pytest.raises(StorageError, match="gave up after 2 attempts"):
        remote.retrying(
            URL, Calls(clock, 0, 9, remote.PackedError("the server compressed it (br)"))
        )


def test_waits_are_shortened_by_up_to_half(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    policy(attempts=4)
    monkeypatch.setattr(remote, "random", SimpleNamespace(uniform=lambda low, high: low))
    remote.retrying(URL, Calls(clock, 0, 3, ConnectionError("reset")))
    assert clock.waits == [0.5, 1, 2]


@pytest.mark.parametrize(
    ("seconds_of_bytes", "given"),
    [(0, [60, 60, 57]), (10, [70, 70, 47]), (0.5, [60.5, 60.5, 56.5])],
)
def test_the_time_of_the_bytes_comes_on_top(
    clock: Clock, seconds_of_bytes: float, given: list[float]
) -> None:
    """Of an attempt, and once of all of them: 180 s less two attempts and waits of 1 s and 2 s."""
    policy(deadline_s=180)
    num_bytes = int(seconds_of_bytes * remote.SLOWEST_BYTES_PER_S)
    call = Calls(clock, None, 9, TimeoutError())
    with pytest.raises(StorageError, match=r"gave up after 3 .* the last one: .*no answer in time"):
        remote.retrying(URL, call, num_bytes=num_bytes)
    assert call.given == given


def test_no_wait_goes_over_the_deadline(clock: Clock) -> None:
    policy(deadline_s=3)
    with pytest.raises(StorageError, match=r"gave up after 2 attempts in 1\.0 s"):
        remote.retrying(URL, Calls(clock, 0, 9, ConnectionError("reset")))


def test_a_host_that_never_answered_is_given_up_within_half_a_minute(clock: Clock) -> None:
    """By the default policy; what it answers well, or refuses, shows that it works."""
    remote.set_retry_policy(None)
    for answer in (None, FileNotFoundError("no such file"), PermissionError("denied")):
        url = f"https://new-{type(answer).__name__}/a.jsonl"
        call = Calls(clock, None, 9, TimeoutError())
        remote.retrying(url, lambda _: "a filesystem", kind=None)  # sends nothing
        with pytest.raises(StorageError, match=r"gave up after 2 attempts in 20\.0 s"):
            remote.retrying(url, call)
        assert call.given == [10, 9.5]
        with pytest.raises(EasypipeError) if answer else contextlib.nullcontext():
            remote.retrying(url, Calls(clock, 0, 1 if answer else 0, answer or ValueError()))
        call = Calls(clock, None, 9, TimeoutError())
        with pytest.raises(StorageError, match=r"gave up after 3 attempts in 180\.0 s"):
            remote.retrying(url, call)
        assert call.given == [60, 60, 58.5]


def test_a_policy_of_ones_own_holds_from_the_first_request(clock: Clock) -> None:
    policy(attempts=2)
    call = Calls(clock, None, 9, TimeoutError())
    with pytest.raises(StorageError, match=r"gave up after 2 attempts in 121\.0 s"):
        remote.retrying("https://never/a.jsonl", call)
    assert call.given == [60, 60]


NOW = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("headers", "waits"),
    [
        ({"Retry-After": "7"}, [7, 7]),
        ({"Retry-After": "1"}, [1, 2]),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:05 GMT", "Date": NOW}, [5, 5]),
        ({"Retry-After": "Wed, 21 Oct 2015 09:28:06 +0200", "Date": NOW}, [6, 6]),
        ({"Retry-After": NOW}, [1, 2]),  # long gone by this machine's clock
        ({"Retry-After": "Wed"}, [1, 2]),
        ({"Retry-After": "Wed, 21 Oct 99999 07:28:05 GMT"}, [1, 2]),
        ({}, [1, 2]),
    ],
)
@pytest.mark.parametrize("holder", ["error", "response", "cause"])
def test_a_server_may_ask_for_more(
    clock: Clock, headers: Mapping[str, str], waits: list[float], holder: str
) -> None:
    policy()
    error = found = ConnectionError("busy")
    if holder == "cause":
        error, found = ConnectionError("busy"), RuntimeError("below")
        error.__cause__ = found
    if holder == "response":
        vars(found)["response"] = SimpleNamespace(headers=headers)
    else:
        vars(found)["headers"] = headers
    remote.retrying(URL, Calls(clock, 0, 2, error))
    assert clock.waits == waits


def test_a_wait_that_ends_behind_the_deadline_is_told(clock: Clock) -> None:
    policy(deadline_s=180)
    error = ConnectionError("busy")
    vars(error)["headers"] = {"Retry-After": "3600"}
    with pytest.raises(StorageError, match=r"after 1 attempt .*; the server asks to wait 3,600 s"):
        remote.retrying(URL, Calls(clock, 0, 2, error))
    assert clock.waits == []


def learn(clock: Clock, count: int, seconds: float = 2, **of: Any) -> None:
    for _ in range(count):
        remote.retrying(URL, Calls(clock, seconds, 0, TimeoutError()), **of)


def stalled(clock: Clock, url: str = URL, **of: Any) -> list[float]:
    """The seconds that three attempts are given that never answer."""
    policy(attempts=4)
    clock.waits.clear()
    call = Calls(clock, None, 3, TimeoutError())
    remote.retrying(url, call, **of)
    return call.given[:3]


@pytest.mark.parametrize(
    ("known", "seconds", "given"),
    [
        (remote.KNOWN, 2, [8, 16, 32]),
        (remote.KNOWN - 1, 2, [60, 60, 60]),
        (remote.KNOWN, 0.01, [1, 2, 4]),
        (remote.KNOWN, 10, [40, 60, 60]),
    ],
)
def test_stalls_are_cut_by_what_others_took(
    clock: Clock, known: int, seconds: float, given: list[float]
) -> None:
    learn(clock, known, seconds, kind="range")
    assert stalled(clock, kind="range") == given
    waits = {8: [0, 0, 0], 60: [1, 2, 4], 1: [0, 0, 0], 40: [0, 2, 4]}[int(given[0])]
    assert clock.waits == waits


def test_one_slow_request_of_many_says_nothing(clock: Clock) -> None:
    learn(clock, 2 * remote.KNOWN - 1, 2, kind="range")
    learn(clock, 1, 14, kind="range")
    assert stalled(clock, kind="range") == [8, 16, 32]
    learn(clock, 2, 14, kind="range")
    assert stalled(clock, kind="range") == [56, 60, 60]
    learn(clock, remote.REMEMBERED, 1, kind="range")  # what was long ago is forgotten
    assert stalled(clock, kind="range") == [4, 8, 16]


@pytest.mark.parametrize(
    ("url", "of"),
    [
        ("https://other/a.jsonl", {"kind": "range", "num_bytes": 8}),
        (URL, {"kind": "facts", "num_bytes": 8}),
        (URL, {"kind": "range", "num_bytes": 16}),
        (URL, {"num_bytes": 8}),
    ],
)
def test_hosts_kinds_and_sizes_have_times_of_their_own(
    clock: Clock, url: str, of: dict[str, Any]
) -> None:
    learn(clock, remote.KNOWN, kind="range", num_bytes=8)
    assert round(stalled(clock, url, **of)[0]) == 60
    same = stalled(clock, "https://me:pw@host/b.jsonl", kind="range", num_bytes=15)
    assert same == [8, 16, 32]


def test_failures_teach_nothing(clock: Clock) -> None:
    policy(attempts=1)
    for _ in range(remote.KNOWN):
        with pytest.raises(StorageError):
            remote.retrying(URL, Calls(clock, 1, 1, ConnectionError()), kind="range")
    assert stalled(clock, kind="range") == [60, 60, 60]


def of_library(module: str, name: str, **attributes: Any) -> Exception:
    return type(name, (Exception,), {"__module__": module, **attributes})("told by it")


def caused(by: BaseException, *, cause: bool) -> Exception:
    error = RuntimeError("outer")
    if cause:
        error.__cause__ = by
    else:
        error.__context__ = by
    return error


RESET = {"ResponseMetadata": {"HTTPStatusCode": 503}}
PASSING: list[BaseException] = [
    ConnectionResetError(),
    TimeoutError(),
    remote.ShortReadError(),
    remote.OtherAnswerError(),
    *(OSError(number, "told") for number in (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EBUSY)),
    *(of_library(f"{module}.inner", "ReadTimeout") for module in ("aiohttp", "botocore", "aiobotocore", "httpx", "httpx2", "httpcore", "requests", "urllib3", "http", "gcsfs")),
    *(of_library("aiohttp", name) for name in ("ServerDisconnectedError", "ClientPayloadError", "ClientOSError", "ClientConnectorError", "ConnectTimeout", "IncompleteReadError", "RemoteProtocolError")),
    *(of_library(module, name) for module, name in (("botocore.exceptions", "FlexibleChecksumError"), ("gcsfs.retry", "ChecksumError"))),
    *(of_library("own", "Refused", status=status) for status in (408, 425, 429, 500, 502, 503, 504, 507, 509, *range(520, 525), 529)),
    of_library("own", "Refused", response=SimpleNamespace(status_code=503)),
    of_library("own", "Refused", response=RESET),
    of_library("own", "Refused", status_code=503),
    of_library("own", "Refused", code="503"),
    caused(TimeoutError(), cause=True),
    caused(TimeoutError(), cause=False),
]  # fmt: skip
LASTING: list[BaseException] = [
    ValueError("told"),
    OSError(errno.ENOENT, "told"),
    remote.ChangedError(),
    remote.WrongRangeError(),
    ssl.SSLCertVerificationError(1, "told"),
    of_library("aiohttp", "ClientConnectorCertificateError"),
    of_library("huggingface_hub.errors", "OfflineModeIsEnabled"),
    of_library("own", "ReadTimeout"),
    of_library("aiohttp", "ReadTimeoutOfMine"),
    of_library("aiohttp.http_exceptions", "Broken", code=503),
    *(of_library("own", "Refused", status=status) for status in (301, 400, 401, 403, 404, 416, 501)),
    caused(remote.ChangedError(), cause=True),
]  # fmt: skip


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_passes(error: BaseException) -> None:
    assert remote.is_passing(error)


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_does_not(clock: Clock, error: BaseException) -> None:
    assert not remote.is_passing(error)
    call = Calls(clock, 0, 9, error)
    with pytest.raises(EasypipeError):
        remote.retrying(URL, call)
    assert len(call.given) == 1


def test_a_status_is_found_where_its_library_has_it() -> None:
    of = remote.status_of
    assert [of(of_library("own", "Refused", status=status)) for status in (299, 300, 599, 600)] == [
        None,
        300,
        599,
        None,
    ]
    assert of(caused(of_library("own", "Refused", code=418), cause=True)) == 418
    assert of(of_library("own", "Refused", response=RESET, code=404)) == 503
    assert of(of_library("own", "Refused", status=0, code="not")) is None


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FileNotFoundError("a"), MissingFileError, "no such file or folder. Check the URL"),
        (of_library("own", "Refused", status=404), MissingFileError, "no such file or folder"),
        (of_library("own", "Refused", status=401), StorageError, "access denied: HTTP 401, Refused"),
        (of_library("own", "Refused", status=403), StorageError, "access denied: HTTP 403, Refused"),
        (PermissionError("a"), StorageError, "access denied: PermissionError: a"),
        (of_library("own", "NoCredentialsError"), StorageError, "access denied: NoCredentials"),
        (of_library("hf", "OfflineModeIsEnabled"), StorageError, "HF_HUB_OFFLINE forbids"),
        (remote.ChangedError("a"), StorageError, "changed after the source was made: a"),
        (remote.WrongRangeError("b"), StorageError, "b. Its ranges cannot be trusted"),
        (ValueError("HTTP 500"), StorageError, "ValueError: HTTP 500. Check the address"),
    ],
)  # fmt: skip
def test_what_is_said(error: Exception, kind: type[EasypipeError], words: str) -> None:
    def call(timeout_s: float) -> None:
        raise error

    with pytest.raises(kind) as caught:
        remote.retrying("https://me:pa55@host/a.jsonl", call)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("https://host/a.jsonl: ")
    assert words in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_our_own_errors_go_through_as_they_are(clock: Clock) -> None:
    own = StorageError(at="here", problem="ours")
    call: Callable[[float], str] = Calls(clock, 0, 1, own)
    with pytest.raises(StorageError) as caught:
        remote.retrying(URL, call)
    assert caught.value is own


SIGNING = "X-Amz-Signature x-goog-credential sig signature sv se sp sr st skoid sktid my_token api_key AWSAccessKeyId Key-Pair-Id client_secret password Expires Policy"  # fmt: skip


@pytest.mark.parametrize("name", SIGNING.split())
def test_a_parameter_that_signs_is_neither_shown_nor_told(name: str) -> None:
    url = f"https://host/a?version=7&{name}=s3cr3t&part="
    assert remote.public_url(url) == "https://host/a?version=7&part="
    assert "s3cr3t" not in remote.tell(OSError("of s3cr3t"), url, None)


@pytest.mark.parametrize("name", ["version", "download", "key", "signed_by", "service"])
def test_one_that_does_not_stays(name: str) -> None:
    url = f"https://host/a?{name}=something"
    assert remote.public_url(url) == url
    assert "something" in remote.tell(OSError("of something"), url, None)


@pytest.mark.parametrize(
    "options",
    [
        *({name: "s3cr3t"} for name in ["token", "secret", "passwd", "key", "credential", "auth", "signature", "sas", "header", "cookie", "session", "connection_string"]),
        {"client_kwargs": {"headers": ["s3cr3t"]}},
        {"headers": {"anything": ("s3cr3t", "x")}},
    ],
)  # fmt: skip
def test_values_of_telling_options_are_hidden(options: dict[str, Any]) -> None:
    assert remote.tell(OSError("of s3cr3t"), URL, options) == "OSError: of ***"


def test_what_is_no_secret_is_told() -> None:
    # what gcsfs takes for a token, and is none
    for word in ("anon", "cloud", "cache", "google_default", "browser"):
        options = {"token": word, "endpoint": "https://own", "key": "abc"}
        said = f"{word} of https://own, abc"
        assert remote.tell(OSError(said), URL, options) == f"OSError: {said}"
    # the longer first: of one that begins with another no end is left
    both = {"token": "s3cr3t", "key": "s3cr3t-and-more"}
    assert remote.tell(OSError("s3cr3t-and-more"), URL, both) == "OSError: ***"
    assert remote.tell(OSError(), URL, None) == "OSError"
    assert remote.tell(TimeoutError(), URL, None) == "TimeoutError: no answer in time"
    assert remote.tell(TimeoutError("of DNS"), URL, None) == "TimeoutError: of DNS"
    assert remote.tell(of_library("own", "Refused", status=503), URL, None) == (
        "HTTP 503, Refused: told by it"
    )
