# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Calls to remote storage: retries, time limits, errors without secrets; ranged reads over HTTP.

A call that fails for a passing reason (429, 5xx, a reset, a timeout, fewer bytes than were asked
for) is made again after a wait that doubles, with jitter, until the policy's attempts or its
deadline are used up. A request that takes much longer than others of its kind did is given up early
and made again, with twice the time each time. The error that is raised in the end names the URL,
the attempts and the last cause, without credentials: those of the URL (user info, signatures) and
those of storage_options are hidden.
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
from easypipe.core.trust import require_private
from easypipe.core.values import Arguments, attribute_of

T = TypeVar("T")
# Options for fsspec: credentials, an endpoint. They are never logged, saved or part of an identity.
StorageOptions = dict[str, Any] | None
log = logging.getLogger("easypipe")

SLOWEST_BYTES_PER_S = 1 << 18  # a transfer slower than this counts as hung
HIDDEN = "***"
OTHER = "the server sent something else than the file, a page of its own perhaps"
# A request counts as stalled when it takes PATIENCE times as long as nearly all of the last of its
# kind, once KNOWN of them were answered; never within LEAST_TIMEOUT_S.
PATIENCE = 4
KNOWN, REMEMBERED = 20, 128
LEAST_TIMEOUT_S = 1.0

_PASSING_STATUS = frozenset(
    {408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524, 529}
)
_PASSING_ERRNO = frozenset(
    {
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ETIMEDOUT,
        errno.EPIPE,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
    }
    | {errno.EBUSY}  # s3fs raises it for SlowDown
)
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
_RANGE = re.compile(r"bytes (\d+)-", re.IGNORECASE)  # the head of Content-Range
_FOLLOWING = {"range", "accept", "accept-encoding", "user-agent"}  # headers of every client
# words that gcsfs accepts in place of a token, which are not secrets
_NO_SECRETS = ("anon", "cloud", "cache", "google_default", "browser")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and how long a call to remote storage is tried.

    A host that never answered and takes no connection has FEW attempts, and so has a server that
    packs its answers. Waits double from `first_wait_s` to `longest_wait_s`, each shortened at
    random by up to half.

    Args:
        attempt_timeout_s: Seconds of one attempt, plus the time that its bytes take at 256 KiB/s.
        deadline_s: Seconds of all attempts and waits together, plus the same time.
    """

    attempts: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 20.0
    attempt_timeout_s: float = 60.0
    deadline_s: float = 180.0


FEW = 5

# The default, and what it is until a host has answered this process: a config that names a server
# that is down, or no server, is told of within half a minute.
DEFAULT = RetryPolicy()
FIRST = RetryPolicy(attempt_timeout_s=10.0, deadline_s=20.0)
_policy = DEFAULT


def set_retry_policy(policy: RetryPolicy | None) -> None:
    """Sets the policy of this process from now on; None brings the default back.

    Another policy than the default holds from the first request to a host.
    """
    global _policy
    _policy = policy or DEFAULT


class ShortReadError(OSError):
    """Fewer bytes came than were asked for and announced."""


class OtherAnswerError(OSError):
    """Something else came than the bytes of the file, as gateways and portals send it."""


class PackedError(OtherAnswerError):
    """A server, or a cache before it, compresses what it sends; few of them stop doing so."""


class WrongRangeError(OSError):
    """A server, or a cache before it, sent another part of the file than was asked for."""


class ChangedError(OSError):
    """The file that is read now is not the one that was resolved."""


def retrying(
    url: str,
    call: Callable[[float], T],
    *,
    options: StorageOptions = None,
    num_bytes: int = 0,
    kind: str | None = "",
) -> T:
    """Returns `call(timeout_s)`, called again and again while it fails for passing reasons.

    Args:
        url: What the call is about.
        call: Makes one attempt.
        options: The storage_options, whose secrets are hidden.
        num_bytes: The bytes that are sent or received.
        kind: A name for requests that take equally long for one host and size, so that stalled ones
            are recognised and given up; "": nothing is known about them; None: `call` sends none.

    Raises:
        MissingFileError: Nothing is there.
        StorageError: Any other failure; it names the public URL, the attempts and the last cause.
    """
    policy = FIRST if _policy is DEFAULT and never_answered(url) else _policy
    started, attempt, stalls, extra = time.monotonic(), 0, 0, num_bytes / SLOWEST_BYTES_PER_S
    deadline = started + policy.deadline_s + extra
    times = _times[_host(url), kind, num_bytes.bit_length()] if kind else None
    said_so: set[str] = set()  # what failed up to now
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
            if not any(map(_lasting, causes_of(failure))):  # it says no, but it answers
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
    # Raised here, outside of the except block: the library's own error has the whole URL in it, and
    # a traceback would print it.
    raise _told(failure, url, options, attempt, time.monotonic() - started)


def _hopeless(failure: Exception, url: str, said_so: set[str]) -> bool:
    """Returns whether few attempts are enough: nobody is there, or it fails alike each time.

    Args:
        failure: The last failure.
        url: What was asked for.
        said_so: The words of all failures up to now.
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
        """Returns the seconds after which one of them counts as stalled."""
        return self._patience

    def add(self, seconds: float) -> None:
        """Notes how long a request took."""
        with self._lock:
            self._last.append(seconds)
            if len(self._last) >= KNOWN:
                usual = sorted(self._last)[len(self._last) * 19 // 20]
                self._patience = max(LEAST_TIMEOUT_S, PATIENCE * usual)


# by host, kind and size of the request (its power of two)
_times: defaultdict[tuple[str, str, int], _Times] = defaultdict(_Times)


# hosts that answered this process: if one of them is down now, it is waited for
_answered: set[str] = set()


def never_answered(url: str) -> bool:
    """Returns whether the host of a URL has not answered this process yet."""
    return _host(url) not in _answered


def _nobody_there(error: BaseException) -> bool:
    """Returns whether no connection was made: the host is unknown, or refuses all."""
    kinds = ConnectionRefusedError | socket.gaierror
    return any(isinstance(link, kinds) for link in causes_of(error))


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2]


def is_passing(error: BaseException) -> bool:
    """Returns whether another attempt may succeed."""
    if any(
        map(_lasting, causes_of(error))
    ):  # libraries wrap such an error in one of a passing kind
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
    """Returns whether no waiting will cure the error."""
    return (
        isinstance(error, ChangedError | ssl.SSLCertVerificationError)
        or "Certificate" in type(error).__name__
        or _offline(error)
    )


def _offline(error: BaseException) -> bool:
    """Returns whether the Hub's client was told to send no requests.

    It raises a ConnectionError then, which no waiting will cure.
    """
    return type(error).__name__ == "OfflineModeIsEnabled"


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status behind an error, whatever library made it; None if there is none."""
    for link in causes_of(error):
        # a broken body; aiohttp itself invented the status that it carries
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
    """Returns `url` without credentials; what remains names the same file.

    User info and the query parameters that sign or authorise are left out.
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
    for secret in sorted({*_secrets_of(options), *_secrets_of_url(url)}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN).replace(quote(secret, safe=""), HIDDEN)
    name = type(error).__name__
    code = f"HTTP {status}, " if status is not None and str(status) not in text else ""
    return f"{code}{name}: {text}" if text else f"{code}{name}"


def remote_call(
    fs: AbstractFileSystem, name: str, timeout_s: float, *args: Any, **kwargs: Any
) -> Any:
    """Calls the method `name` of a filesystem, within `timeout_s` if it is asynchronous inside."""
    # fsspec names an asynchronous method as the other one, with an underscore in front
    method = getattr(fs, f"_{name}", None) if isinstance(fs, AsyncFileSystem) else None
    if not isinstance(fs, AsyncFileSystem) or method is None:
        return getattr(fs, name)(*args, **kwargs)
    return sync(fs.loop, method, *args, timeout=timeout_s, **kwargs)


def is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def http_options(url: str, options: Arguments) -> Arguments:
    """Returns `options` for fsspec's client of web servers, which sends secrets to one server only.

    That server is the one of `url`: no secret follows a redirect to another one.

    Raises:
        ConfigError: Secrets would go over plain http to another machine.
    """
    headers = options.get("headers") or {}
    telling = {name: value for name, value in headers.items() if name.lower() not in _FOLLOWING}
    if any(_secrets_of({**options, "headers": telling})):
        require_private(url, "storage_options")
    return {"get_client": _client, **options}


async def _client(**options: Any) -> Any:
    """Returns fsspec's own client; no secret header follows a redirect to another origin."""
    import aiohttp

    async def redirected(_session: Any, _context: Any, asked: Any) -> None:
        here = asked.response.url
        there = here.join(type(here)(asked.response.headers.get("Location", "")))
        if there.origin() != here.origin():
            for name in {name.lower() for name in asked.headers} - _FOLLOWING:
                asked.headers.popall(name, None)

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(redirected)
    return aiohttp.ClientSession(
        trace_configs=[trace, *options.pop("trace_configs", ())], **options
    )


@dataclass(frozen=True)
class HttpFacts:
    """The facts that one request for the first byte of a file tells.

    Args:
        num_bytes: The size of the file; None if the server does not say.
        identity: "etag:" or "modified:" with the header's value, else "size:" with the size.
        ranges: Whether the server sends parts of the file.
    """

    num_bytes: int | None
    identity: str
    ranges: bool


def http_facts(fs: Any, url: str, timeout_s: float) -> HttpFacts:
    """Asks a web server for size, identity (ETag, else Last-Modified), and support of ranges.

    HEAD is not used: signed URLs often allow GET alone.
    """
    answer: Any = sync(fs.loop, _http_facts, fs, url, timeout=timeout_s)
    return answer


def http_range(fs: Any, url: str, start: int, stop: int, identity: str, timeout_s: float) -> bytes:
    """Returns the bytes `start` to `stop` of a file on a web server.

    Args:
        identity: As in HttpFacts; "" accepts any.

    Raises:
        ChangedError: The file is another or a shorter one now.
        WrongRangeError: The server sent another part than was asked for.
        PackedError: The server compressed the bytes.
        OtherAnswerError: Something else came than the file.
        ShortReadError: Bytes are missing.
    """
    answer: Any = sync(fs.loop, _http_range, fs, url, start, stop, identity, timeout=timeout_s)
    return answer


async def _http_facts(fs: Any, url: str) -> HttpFacts:
    """Asks for the first byte, and reads the facts from the headers of the answer."""
    async with await _get(fs, url, "bytes=0-0") as answer:
        total: int | None = None
        if answer.status == 416:  # an empty file has no first byte
            total = _total(answer.headers.get("Content-Range", ""))
            return HttpFacts(0 if total is None else total, _http_identity(answer.headers), True)
        _refuse_status(answer)
        if answer.status == 206:
            total = _total(answer.headers.get("Content-Range", ""))
        elif answer.headers.get("Content-Length", "").isdigit() and not _packed(answer.headers):
            total = int(answer.headers["Content-Length"])
        identity = _http_identity(answer.headers)
        if (
            not identity and answer.content_type == "text/html"
        ):  # a page made for this request, so no file
            answer.close()
            raise OtherAnswerError(OTHER)
        if answer.status != 206:
            answer.close()  # else the connection would be kept, and the whole body read to free it
        return HttpFacts(total, identity or f"size:{total}", answer.status == 206)


async def _http_range(
    fs: AbstractFileSystem, url: str, start: int, stop: int, identity: str
) -> bytes:
    """Asks for a range, and checks that the answer is that part of the same file."""
    from aiohttp import ClientPayloadError

    async with await _get(fs, url, f"bytes={start}-{stop - 1}") as answer:
        if answer.status == 416:
            raise ChangedError("the server says that the file is shorter now")
        _refuse_status(answer)
        now = _http_identity(answer.headers)
        if (
            now
            and identity.startswith(("etag:", "modified:"))
            and now != identity
            and now.partition(":")[0] == identity.partition(":")[0]
        ):
            raise ChangedError("the server says that the file is another now")
        if packed := _packed(answer.headers):
            answer.close()  # before it is unpacked: it may be of any size
            raise PackedError(f"the server packed it ({packed}), which was not asked for")
        skipped = start  # if the server sends the whole file, the part is cut out of it
        if answer.status == 206:
            skipped = 0
            try:
                _check_range(answer.headers.get("Content-Range") or "no part", start, stop)
            except WrongRangeError:
                answer.close()
                raise
        elif identity and (now or f"size:{answer.headers.get('Content-Length')}") != identity:
            answer.close()
            raise OtherAnswerError(OTHER)
        pieces: list[bytes] = []
        at = 0
        with contextlib.suppress(ClientPayloadError):  # it ends early, see below
            async for piece in answer.content.iter_chunked(1 << 18):
                if at + len(piece) > skipped:
                    pieces.append(piece[max(0, skipped - at) : skipped + stop - start - at])
                at += len(piece)
                if at >= skipped + stop - start:
                    break
        if answer.status != 206 or at > stop - start:
            answer.close()  # closes the connection, so that the rest is not sent
        if answer.status == 206 and at > stop - start:
            raise OtherAnswerError(f"more than the {stop - start} bytes came that were asked for")
        data = b"".join(pieces)
        if len(data) != stop - start:
            raise ShortReadError(f"{len(data)} of {stop - start} bytes came")
        return data


def object_range(
    fs: Any, name: str, start: int, stop: int, identity: str, timeout_s: float
) -> bytes:
    """Returns the bytes `start` to `stop` of an object of a store.

    Args:
        identity: As in FileRef. S3 and GCS tell with each answer which object and part it is of.

    Raises:
        ChangedError: The object is another now.
        OtherAnswerError: Something else came than an object.
        WrongRangeError: The store sent another part than was asked for.
        ShortReadError: Bytes are missing.
    """
    names = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
    ask = _s3_range if "s3" in names else _gcs_range if "gs" in names else None
    told, data = {}, b""
    if ask is None:
        data = bytes(remote_call(fs, "cat_file", timeout_s, name, start=start, end=stop))
    else:
        asked = f"bytes={start}-{stop - 1}"
        answer: Any = sync(fs.loop, ask, fs, name, asked, timeout=timeout_s)
        told, data = answer
    kind, _, then = identity.partition(":")
    if told.get(kind, then) != then:
        if not told[kind]:
            raise OtherAnswerError(OTHER)
        raise ChangedError("the store says that the object is another now")
    _check_range(told.get("range", ""), start, stop)
    if len(data) != stop - start:
        raise ShortReadError(f"{len(data)} of {stop - start} bytes came")
    return data


async def _s3_range(fs: Any, name: str, asked: str) -> tuple[Mapping[str, str], bytes]:
    bucket, key, version = fs.split_path(name)
    of = {"Bucket": bucket, "Key": key} | ({"VersionId": version} if version else {})
    answer = await fs._call_s3("get_object", **of, Range=asked)
    async with answer["Body"] as body:
        data = await body.read()
    return {"ETag": answer.get("ETag", ""), "range": answer.get("ContentRange", "")}, data


async def _gcs_range(fs: Any, name: str, asked: str) -> tuple[Mapping[str, str], bytes]:
    headers, data = await fs._call("GET", fs.url(name), headers={"Range": asked})
    told = {"range": headers.get("Content-Range", "")}
    if generation := headers.get("x-goog-generation"):
        told["generation"] = generation
    return told, data


def _check_range(sent: str, start: int, stop: int) -> None:
    """Raises WrongRangeError where the Content-Range of an answer, if any, is of another part."""
    first = _RANGE.match(sent)
    if sent and (first is None or int(first[1]) != start):
        raise WrongRangeError(
            f"the server sent {sent!r} where bytes {start} to {stop - 1} were asked for"
        )


def _refuse_status(answer: Any) -> None:
    """Raises an error where an answer has no bytes of a file; a redirect to nowhere is one."""
    answer.raise_for_status()
    if answer.status not in (200, 203, 206):
        answer.close()
        raise OSError(f"HTTP {answer.status} came in place of the file")


async def _get(fs: Any, url: str, byte_range: str) -> Any:
    """Sends a GET request for a byte range, without compression."""
    session = await fs.set_session()
    kwargs = dict(fs.kwargs)
    headers = {**kwargs.pop("headers", {}), "Range": byte_range, "Accept-Encoding": "identity"}
    return await session.get(fs.encode_url(url), headers=headers, **kwargs)


def _total(content_range: str) -> int | None:
    total = content_range.rpartition("/")[2]
    return int(total) if total.isdigit() else None


def _packed(headers: Mapping[str, str]) -> str:
    """Returns how the bytes are compressed on the way; "" if they are those of the file."""
    return headers.get("Content-Encoding", "").strip().lower().replace("identity", "")


def _http_identity(headers: Mapping[str, str]) -> str:
    if headers.get("ETag"):
        return f"etag:{headers['ETag']}"
    return f"modified:{headers['Last-Modified']}" if headers.get("Last-Modified") else ""


def _wait(policy: RetryPolicy, attempt: int, error: BaseException) -> float:
    """Returns the seconds until the next attempt; more if the server asks for it."""
    jitter = random.uniform(0.5, 1.0)  # noqa: S311  (nobody gains by guessing it)
    wait = min(policy.longest_wait_s, policy.first_wait_s * 2 ** (attempt - 1)) * jitter
    for link in causes_of(error):
        headers = attribute_of(link, "headers") or attribute_of(
            attribute_of(link, "response"), "headers"
        )
        if isinstance(headers, Mapping) and "Retry-After" in headers:
            now = headers.get("Date", formatdate())
            return max(wait, _asked_s(str(headers["Retry-After"]), str(now)))
    return wait


def _asked_s(asked: str, now: str) -> float:
    """Returns the seconds that a server asks to wait.

    Args:
        asked: Its header Retry-After: a number, or a time.
        now: The time by the same clock.
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
    """Returns the error of ours that says what went wrong, without credentials."""
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
            problem="HF_HUB_OFFLINE forbids to ask the Hub",
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
        return StorageError(
            at=at, problem=problem, fix="Check the network and the server, then run again."
        )
    return StorageError(at=at, problem=text, fix="Check the address and the server.")


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields the error, then what it was raised because of, one after another."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _secrets_of(options: Any, secret: bool = False) -> Iterator[str]:
    """Yields the texts within storage_options that are secret, by the names of their keys."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from _secrets_of(value, secret or bool(_SECRET_OPTION.search(str(key))))
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _secrets_of(value, secret)
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
