# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Calls to remote storage: retries, time limits, errors without secrets.

A call that fails for a transient reason (429, 5xx, a reset, a timeout, fewer bytes than requested)
is retried with exponential backoff and jitter, until the policy's attempts or its deadline are used
up. A request that takes much longer than earlier ones of its kind is abandoned and retried, with
twice the time each time. The final error names the URL, the attempts and the last cause. It hides
the credentials of the URL (user info, signatures) and of storage_options.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import re
import socket
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem, sync

from easypipe.core.errors import EasypipeError, MissingFileError, StorageError
from easypipe.core.values import attribute_of

T = TypeVar("T")
# Options for fsspec: credentials, an endpoint. They are never logged, saved or part of an identity.
StorageOptions = dict[str, Any] | None
log = logging.getLogger("easypipe")

SLOWEST_BYTES_PER_S = 1 << 18  # a transfer slower than this counts as hung
HIDDEN = "***"
# A request counts as stalled when it takes PATIENCE times as long as nearly all recent ones of its
# kind, if at least KNOWN of them were answered; never within LEAST_TIMEOUT_S.
PATIENCE = 4
KNOWN, REMEMBERED = 20, 128
LEAST_TIMEOUT_S = 1.0

_PASSING_STATUS = frozenset(
    {408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524, 529}
)
# in addition to those of ConnectionError and TimeoutError; s3fs raises EBUSY for SlowDown
_PASSING_ERRNO = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EBUSY)
_PASSING_NAMES = re.compile(
    r"^(ServerDisconnected|ClientPayload|ClientOS|ClientConnector|ServerTimeout|ConnectionClosed|EndpointConnection|ReadTimeout|ConnectTimeout|"
    r"ResponseStreaming|IncompleteRead|HTTPClient|Connect|Read|Write|Pool|RemoteProtocol|Protocol|ChunkedEncoding|Connection|(Flexible)?Checksum)(Error|Timeout|)$"
)
_LIBRARIES = (
    "aiohttp",
    "botocore",
    "aiobotocore",
    "httpx",
    "httpx2",
    "httpcore",
    "requests",
    "urllib3",
    "http",
    "gcsfs",
)
_SECRET_QUERY = re.compile(
    r"^(x-amz-.*|x-goog-.*|sig(nature)?|s[eprvt]|skoid|sktid|.*token.*|api[-_]?key|.*access.?key.*|key-pair-id|.*secret.*|password|expires|policy)$",
    re.IGNORECASE,
)
_SECRET_OPTION = re.compile(
    r"token|secret|pass|key|cred|auth|sign|sas|header|cookie|session|conn", re.IGNORECASE
)
# words that gcsfs accepts in place of a token; they are not secret
_NO_SECRETS = ("anon", "cloud", "cache", "google_default", "browser")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and how long a call to remote storage is tried.

    Only FEW attempts are made for a host that never answered and accepts no connection, and for a
    server that compresses its responses. Waits double from `first_wait_s` to `longest_wait_s`, each
    shortened at random by up to half.

    Args:
        attempt_timeout_s: Seconds for one attempt, plus the time for its bytes at 256 KiB/s.
        deadline_s: Seconds for all attempts and waits together, plus the same time.
    """

    attempts: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 20.0
    attempt_timeout_s: float = 60.0
    deadline_s: float = 180.0


FEW = 5

# The default policy, and the one for hosts that have not answered this process yet: if a config
# names a server that is down or does not exist, the error comes within half a minute.
DEFAULT = RetryPolicy()
FIRST = RetryPolicy(attempt_timeout_s=10.0, deadline_s=20.0)
_policy = DEFAULT


def set_retry_policy(policy: RetryPolicy | None) -> None:
    """Sets the policy of this process; None restores the default.

    A policy other than the default also applies to hosts that have not answered yet.
    """
    global _policy
    _policy = policy or DEFAULT


class ShortReadError(OSError):
    """Fewer bytes arrived than were requested and announced."""


class OtherAnswerError(OSError):
    """The response is not the bytes of the file but, for example, the page of a gateway."""


class PackedError(OtherAnswerError):
    """A server, or a cache in front of it, compresses its responses; a retry seldom helps."""


class WrongRangeError(OSError):
    """A server, or a cache in front of it, sent a different range than was requested."""


class ChangedError(OSError):
    """The file has changed since it was resolved."""


def retrying(
    url: str,
    call: Callable[[float], T],
    *,
    options: StorageOptions = None,
    num_bytes: int = 0,
    kind: str | None = "",
) -> T:
    """Returns `call(timeout_s)`, retried while it fails for transient reasons.

    Args:
        url: What the call is about.
        call: Makes one attempt.
        options: The storage_options, whose secrets are hidden.
        num_bytes: The number of bytes sent or received.
        kind: A name for requests that take equally long for one host and size, so that stalled ones
            are recognized and abandoned; "": nothing is known about them; None: `call` sends none.

    Raises:
        MissingFileError: There is no file.
        StorageError: Any other failure, with the public URL, the attempts and the last cause.
    """
    policy = FIRST if _policy is DEFAULT and never_answered(url) else _policy
    started, attempt, stalls, extra = time.monotonic(), 0, 0, num_bytes / SLOWEST_BYTES_PER_S
    deadline = started + policy.deadline_s + extra
    times = _times[_host(url), kind, num_bytes.bit_length()] if kind else None
    said_so: set[str] = set()  # the messages of all failures so far
    while True:
        attempt += 1
        began = time.monotonic()
        most = policy.attempt_timeout_s + extra
        patience = min(most, times.patience() * 2**stalls) if times else most
        try:
            answer = call(max(0.001, min(patience, deadline - began)))
            if times:
                times.add(time.monotonic() - began)
            if kind is not None:
                _answered.add(_host(url))
            return answer
        except EasypipeError:
            raise
        except Exception as error:  # noqa: BLE001  (libraries of every store have trees of their own; all of it is raised again below)
            failure = error
        if not is_passing(failure):
            if not any(map(_lasting, causes_of(failure))):  # the server refuses, but it answers
                _answered.add(_host(url))
            break
        cut = patience < most and time.monotonic() - began >= patience
        stalls += cut
        wait = 0.0 if cut else _wait(policy, attempt, failure)
        said_so.add(str(failure))
        tries = min(policy.attempts, FEW if _hopeless(failure, url, said_so) else policy.attempts)
        if attempt >= tries or time.monotonic() + wait >= deadline:
            break
        said = f"{public_url(url)}: {tell(failure, url, options)}"
        log.info("%s; attempt %d of %d in %.1f s", said, attempt + 1, tries, wait)
        time.sleep(wait)
    # Raised here, outside the except block: the library's error contains the whole URL, and a
    # traceback would print it.
    raise _told(failure, url, options, attempt, time.monotonic() - started)


def _hopeless(failure: Exception, url: str, said_so: set[str]) -> bool:
    """Returns whether few attempts are enough: no server is there, or each failure is the same.

    Args:
        failure: The last failure.
        url: The requested URL.
        said_so: The messages of all failures so far.
    """
    nobody = _nobody_there(failure) and never_answered(url)
    same = len(said_so) == 1 and isinstance(failure, ShortReadError)
    return nobody or same or any(isinstance(link, PackedError) for link in causes_of(failure))


class _Times:
    """How long the last requests of one kind took. It is thread safe."""

    def __init__(self) -> None:
        self._lock, self._last = threading.Lock(), deque[float](maxlen=REMEMBERED)
        self._patience = float("inf")

    def patience(self) -> float:
        """Returns the seconds after which a request counts as stalled."""
        return self._patience

    def add(self, seconds: float) -> None:
        """Records how long a request took."""
        with self._lock:
            self._last.append(seconds)
            if len(self._last) >= KNOWN:
                usual = sorted(self._last)[len(self._last) * 19 // 20]
                self._patience = max(LEAST_TIMEOUT_S, PATIENCE * usual)


# for each host, kind and size of requests (as a power of two)
_times: defaultdict[tuple[str, str, int], _Times] = defaultdict(_Times)


# hosts that have answered this process: if one of them goes down, the process waits for it
_answered: set[str] = set()


def never_answered(url: str) -> bool:
    """Returns whether the host of a URL has not answered this process yet."""
    return _host(url) not in _answered


def _nobody_there(error: BaseException) -> bool:
    """Returns whether no connection was made: the host is unknown, or refuses connections."""
    kinds = ConnectionRefusedError | socket.gaierror
    return any(isinstance(link, kinds) for link in causes_of(error))


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2]


def is_passing(error: BaseException) -> bool:
    """Returns whether another attempt may succeed."""
    if any(map(_lasting, causes_of(error))):  # libraries wrap such an error in a transient one
        return False
    for link in causes_of(error):
        if isinstance(link, ConnectionError | TimeoutError | ShortReadError | OtherAnswerError):
            return True
        if isinstance(link, OSError) and link.errno in _PASSING_ERRNO:
            return True
        if type(link).__module__.partition(".")[0] in _LIBRARIES and _PASSING_NAMES.match(
            type(link).__name__
        ):
            return True
    return status_of(error) in _PASSING_STATUS


def _lasting(error: BaseException) -> bool:
    """Returns whether the error is permanent."""
    return (
        isinstance(error, ChangedError | ssl.SSLCertVerificationError)
        or "Certificate" in type(error).__name__
        or _offline(error)
    )


def _offline(error: BaseException) -> bool:
    """Returns whether the Hub's client is in offline mode.

    It then raises a ConnectionError, which is permanent.
    """
    return type(error).__name__ == "OfflineModeIsEnabled"


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status that caused an error of any library; None if there is none."""
    for link in causes_of(error):
        # a broken body; its status is aiohttp's, not the server's
        if type(link).__module__ == "aiohttp.http_exceptions":
            continue
        response = attribute_of(link, "response")
        found = (
            response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(response, Mapping)
            else None
        )
        for holder, name in (
            (link, "status"),
            (response, "status_code"),
            (link, "status_code"),
            (link, "code"),
        ):
            found = attribute_of(holder, name) if found is None else found
        if isinstance(found, str) and found.isdigit():
            found = int(found)
        if isinstance(found, int) and 300 <= found < 600:
            return found
    return None


def public_url(url: str) -> str:
    """Returns `url` without credentials; the result names the same file.

    User info and the query parameters that sign or authorize are left out.
    """
    if "://" not in url:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket that is not an IPv6 host: a glob
        return url
    host = parts.netloc.rpartition("@")[2]
    query = parts.query
    if query:
        kept = [
            (key, value)
            for key, value in parse_qsl(query, keep_blank_values=True)
            if not _SECRET_QUERY.match(key)
        ]
        query = query if len(kept) == query.count("&") + 1 else urlencode(kept)
    if host == parts.netloc and query == parts.query:
        return url
    return urlunsplit((parts.scheme, host, parts.path, query, parts.fragment))


def tell(error: BaseException, url: str, options: StorageOptions) -> str:
    """Returns the error as text, with every secret of the URL and the options hidden."""
    status = status_of(error)
    text = str(error).strip()
    if isinstance(error, TimeoutError) and not text:
        text = "no answer in time"
    text = text.replace(url, public_url(url))
    for secret in sorted({*secrets_of(options), *_secrets_of_url(url)}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN).replace(quote(secret, safe=""), HIDDEN)
    name = type(error).__name__
    code = f"HTTP {status}, " if status is not None and str(status) not in text else ""
    return f"{code}{name}: {text}" if text else f"{code}{name}"


def remote_call(
    fs: AbstractFileSystem, name: str, timeout_s: float, *args: Any, **kwargs: Any
) -> Any:
    """Calls the method `name` of a filesystem, within `timeout_s` if it is an asynchronous one."""
    # fsspec's name for an asynchronous method has an underscore in front
    method = getattr(fs, f"_{name}", None) if isinstance(fs, AsyncFileSystem) else None
    if not isinstance(fs, AsyncFileSystem) or method is None:
        return getattr(fs, name)(*args, **kwargs)
    return sync(fs.loop, method, *args, timeout=timeout_s, **kwargs)


def is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _wait(policy: RetryPolicy, attempt: int, error: BaseException) -> float:
    """Returns the seconds until the next attempt; more if the server asks for it."""
    jitter = random.uniform(0.5, 1.0)  # noqa: S311  (nobody gains by guessing it)
    wait = min(policy.longest_wait_s, policy.first_wait_s * 2 ** (attempt - 1)) * jitter
    return max(wait, _asked_by(error))


def _asked_by(error: BaseException) -> float:
    """Returns the seconds that the server asks to wait in the response that caused an error."""
    for link in causes_of(error):
        headers = attribute_of(link, "headers") or attribute_of(
            attribute_of(link, "response"), "headers"
        )
        if isinstance(headers, Mapping) and "Retry-After" in headers:
            now = headers.get("Date", formatdate())
            return _asked_s(str(headers["Retry-After"]), str(now))
    return 0.0


def _asked_s(asked: str, now: str) -> float:
    """Returns the seconds that a server asks to wait.

    Args:
        asked: Its header Retry-After: a number or a time.
        now: The current time by the server's clock.
    """
    if asked.isdecimal():
        return float(asked)
    times: list[float] = []
    for text in (asked, now):
        with contextlib.suppress(ValueError, OverflowError):
            times.append(parsedate_to_datetime(text).timestamp())
    return times[0] - times[1] if len(times) == 2 else 0.0


def _told(
    error: BaseException, url: str, options: StorageOptions, attempts: int, seconds: float
) -> EasypipeError:
    """Returns easypipe's error that says what went wrong, without credentials."""
    at, text, status = public_url(url), tell(error, url, options), status_of(error)
    if status == 404 or (isinstance(error, FileNotFoundError) and status is None):
        return MissingFileError(at=at, problem="no such file or folder", fix="Check the URL.")
    if (
        status in (401, 403)
        or isinstance(error, PermissionError)
        or "Credentials" in type(error).__name__
    ):
        return StorageError(
            at=at,
            problem=f"access denied: {text}",
            fix="Give credentials by storage_options or the environment.",
        )
    if any(map(_offline, causes_of(error))):
        return StorageError(
            at=at,
            problem="HF_HUB_OFFLINE forbids access to the Hub",
            fix="Unset it, or read files that are on this machine.",
        )
    if isinstance(error, ChangedError):
        return StorageError(
            at=at,
            problem=f"changed after the source was made: {error}",
            fix="Make the source again.",
        )
    if isinstance(error, WrongRangeError):
        return StorageError(
            at=at,
            problem=str(error),
            fix="Its ranges cannot be trusted: download the file, or ask another server.",
        )
    if is_passing(error):
        tries = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        problem = f"gave up after {tries} in {seconds:.1f} s; the last one: {text}"
        if asked := _asked_by(error):
            problem += f"; the server asks to wait {asked:,.0f} s"
        return StorageError(
            at=at, problem=problem, fix="Check the network and the server, then run again."
        )
    return StorageError(at=at, problem=text, fix="Check the address and the server.")


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields the error, then its causes in turn."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def secrets_of(options: Any, secret: bool = False) -> Iterator[str]:
    """Yields the texts in storage_options that are secret, judged by the names of their keys."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from secrets_of(value, secret or bool(_SECRET_OPTION.search(str(key))))
    elif isinstance(options, list | tuple):
        for value in options:
            yield from secrets_of(value, secret)
    elif secret and isinstance(options, str) and len(options) >= 4 and options not in _NO_SECRETS:
        yield options
        if options.startswith("Bearer "):
            yield options.removeprefix("Bearer ")


def _secrets_of_url(url: str) -> Iterator[str]:
    """Yields user, password and signing query values of a URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    user = parts.netloc.rpartition("@")[0]
    yield from (part for part in re.split("[:@]", user) if len(part) >= 3)
    for key, value in parse_qsl(parts.query):
        if _SECRET_QUERY.match(key) and len(value) >= 4:
            yield value
