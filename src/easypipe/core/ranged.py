# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Reads ranges of remote files, one attempt each: web servers, S3, GCS; lists secret headers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsspec import AbstractFileSystem
from fsspec.asyn import sync

from easypipe.core.remote import (
    ChangedError,
    OtherAnswerError,
    PackedError,
    ShortReadError,
    WrongRangeError,
    remote_call,
    secrets_of,
)
from easypipe.core.trust import require_private
from easypipe.core.values import Arguments

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

OTHER = "the server sent something other than the file, perhaps a page of HTML"
_TOO_MUCH = "the server sent more than the {} bytes that were requested"
_RANGE = re.compile(r"bytes (\d+)-", re.IGNORECASE)  # the beginning of Content-Range
_FOLLOWING = {"range", "accept", "accept-encoding", "user-agent"}  # headers of every client


def http_options(url: str, options: Arguments) -> Arguments:
    """Returns `options` for fsspec's http client that make it send secrets only to one server.

    It is the server of `url`: secrets do not follow a redirect to another one.

    Raises:
        ConfigError: Secrets would be sent over plain http to another machine.
    """
    headers = options.get("headers") or {}
    telling = {name: value for name, value in headers.items() if name.lower() not in _FOLLOWING}
    if any(secrets_of({**options, "headers": telling})):
        require_private(url, "storage_options")
    return {"get_client": _client, **options}


async def _client(**options: Any) -> ClientSession:
    """Returns fsspec's own client; no secret header follows a redirect to another origin."""
    import aiohttp

    async def redirected(_session: Any, _context: Any, asked: Any) -> None:
        here = asked.response.url
        there = here.join(type(here)(asked.response.headers.get("Location", "")))
        if there.origin() != here.origin():
            for name in {name.lower() for name in asked.headers} - _FOLLOWING:
                asked.headers.popall(name, None)

    # as a header, because the client sends its own cookies to every server
    if cookies := options.pop("cookies", None):
        said = "; ".join(f"{name}={value}" for name, value in dict(cookies).items())
        options["headers"] = {**(options.get("headers") or {}), "Cookie": said}
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(redirected)
    return aiohttp.ClientSession(
        trace_configs=[trace, *options.pop("trace_configs", ())], **options
    )


@dataclass(frozen=True)
class HttpFacts:
    """What one request for the first byte of a file shows.

    Args:
        num_bytes: The size of the file; None if the server does not say.
        identity: "etag:" or "modified:" with the header's value, else "size:" with the size.
        ranges: Whether the server sends parts of the file.
        packed: How it compressed the file for this answer; "" if it did not.
    """

    num_bytes: int | None
    identity: str
    ranges: bool
    packed: str = ""


def http_facts(fs: Any, url: str, timeout_s: float) -> HttpFacts:
    """Asks a web server for size, identity (ETag, else Last-Modified), and support of ranges.

    HEAD is not used, because signed URLs often allow only GET.
    """
    answer: Any = sync(fs.loop, _http_facts, fs, url, timeout=timeout_s)
    return answer


def http_range(fs: Any, url: str, start: int, stop: int, identity: str, timeout_s: float) -> bytes:
    """Returns the bytes `start` to `stop` of a file on a web server.

    Args:
        identity: As in HttpFacts; "" accepts any.

    Raises:
        ChangedError: The file has been replaced or shortened.
        WrongRangeError: The server sent a different range than was requested.
        PackedError: The server compressed the bytes.
        OtherAnswerError: The server sent something other than the file.
        ShortReadError: Bytes are missing.
    """
    answer: Any = sync(fs.loop, _http_range, fs, url, start, stop, identity, timeout=timeout_s)
    return answer


async def _http_facts(fs: Any, url: str) -> HttpFacts:
    """Requests the first byte, and reads the facts from the response headers."""
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
        ):  # a page generated for this request, not a file
            answer.close()
            raise OtherAnswerError(OTHER)
        if answer.status != 206:
            answer.close()  # otherwise the client would read the whole body to reuse the connection
        packed = _packed(answer.headers)
        return HttpFacts(total, identity or f"size:{total}", answer.status == 206, packed)


async def _http_range(
    fs: AbstractFileSystem, url: str, start: int, stop: int, identity: str
) -> bytes:
    """Requests a range, and checks that the response is that range of the same file."""
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
            raise ChangedError("the server says that the file has changed")
        if packed := _packed(answer.headers):
            answer.close()  # before it is decompressed: it may have any size
            raise PackedError(f"the server compressed it ({packed}), which was not requested")
        skipped = start  # if the server sends the whole file, the range is cut out of it
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
            raise OtherAnswerError(_TOO_MUCH.format(stop - start))
        data = b"".join(pieces)
        if len(data) != stop - start:
            raise ShortReadError(f"{len(data)} of {stop - start} bytes came")
        return data


def object_range(
    fs: Any, name: str, start: int, stop: int, identity: str, timeout_s: float
) -> bytes:
    """Returns the bytes `start` to `stop` of an object of a store.

    Args:
        identity: As in FileRef. Each response of S3 and GCS says which object and range it is.

    Raises:
        ChangedError: The object has been replaced.
        OtherAnswerError: The store sent something other than an object.
        WrongRangeError: The store sent a different range than was requested.
        ShortReadError: Bytes are missing.
    """
    names = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
    ask = _s3_range if "s3" in names else _gcs_range if "gs" in names else None
    told, data = {}, b""
    if ask is None:
        data = bytes(remote_call(fs, "cat_file", timeout_s, name, start=start, end=stop))
    else:
        asked = f"bytes={start}-{stop - 1}"
        answer: Any = sync(fs.loop, ask, fs, name, asked, stop - start, timeout=timeout_s)
        told, data = answer
    kind, _, then = identity.partition(":")
    if told.get(kind, then) != then:
        if not told[kind]:
            raise OtherAnswerError(OTHER)
        raise ChangedError("the store says that the object has changed")
    _check_range(told.get("range", ""), start, stop)
    if len(data) > stop - start:
        raise OtherAnswerError(_TOO_MUCH.format(stop - start))
    if len(data) != stop - start:
        raise ShortReadError(f"{len(data)} of {stop - start} bytes came")
    return data


async def _s3_range(fs: Any, name: str, asked: str, most: int) -> tuple[Mapping[str, str], bytes]:
    bucket, key, version = fs.split_path(name)
    of = {"Bucket": bucket, "Key": key} | ({"VersionId": version} if version else {})
    answer = await fs._call_s3("get_object", **of, Range=asked)
    async with answer["Body"] as body:
        data = await _at_most(body, most)
    return {"ETag": answer.get("ETag", ""), "range": answer.get("ContentRange", "")}, data


async def _gcs_range(fs: Any, name: str, asked: str, most: int) -> tuple[Mapping[str, str], bytes]:
    """Reads an object as it is stored.

    If it is stored with `Content-Encoding: gzip`, GCS decompresses it for clients that do not
    accept gzip, and gcsfs for those that do; both results may have any size.
    """
    from gcsfs.retry import validate_response  # pyright: ignore[reportMissingImports]

    await fs._set_session()
    asking = fs._get_headers({"Range": asked, "Accept-Encoding": "gzip"})
    async with fs.session.get(
        fs.url(name),
        params=fs._get_params({}),
        headers=asking,
        timeout=fs.requests_timeout,
        auto_decompress=False,
    ) as answer:
        headers, wrong = answer.headers, answer.status >= 400
        data = await _at_most(answer.content, 1 << 16 if wrong else most)
        validate_response(answer.status, data, name)
    told = {"range": headers.get("Content-Range", "")}
    if generation := headers.get("x-goog-generation"):
        told["generation"] = generation
    return told, data


async def _at_most(body: Any, most: int) -> bytes:
    """Reads a response, at most one byte more than `most`."""
    data = bytearray()
    while len(data) <= most and (piece := await body.read(most + 1 - len(data))):
        data += piece
    return bytes(data)


def _check_range(sent: str, start: int, stop: int) -> None:
    """Raises WrongRangeError if a response has the Content-Range of a different range."""
    first = _RANGE.match(sent)
    if sent and (first is None or int(first[1]) != start):
        raise WrongRangeError(
            f"the server sent {sent!r} where bytes {start} to {stop - 1} were asked for"
        )


def _refuse_status(answer: ClientResponse) -> None:
    """Raises an error if a response has no bytes of a file, such as a redirect without a target."""
    answer.raise_for_status()
    if answer.status not in (200, 203, 206):
        answer.close()
        raise OSError(f"HTTP {answer.status} came in place of the file")


async def _get(fs: Any, url: str, byte_range: str) -> ClientResponse:
    """Sends a GET request for a byte range, without compression."""
    session = await fs.set_session()
    kwargs = dict(fs.kwargs)
    headers = {**kwargs.pop("headers", {}), "Range": byte_range, "Accept-Encoding": "identity"}
    return await session.get(fs.encode_url(url), headers=headers, **kwargs)


def _total(content_range: str) -> int | None:
    total = content_range.rpartition("/")[2]
    return int(total) if total.isdigit() else None


def _packed(headers: Mapping[str, str]) -> str:
    """Returns how the bytes are compressed for transfer; "" if they are the bytes of the file."""
    return headers.get("Content-Encoding", "").strip().lower().replace("identity", "")


def _http_identity(headers: Mapping[str, str]) -> str:
    if headers.get("ETag"):
        return f"etag:{headers['ETag']}"
    return f"modified:{headers['Last-Modified']}" if headers.get("Last-Modified") else ""
