# pyright: strict
"""Finds within seconds why the Hub is unreachable, and what an unknown repository name may mean."""

from __future__ import annotations

import os
import queue
import socket
import ssl
import threading
import time
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from easypipe.core.errors import near_path
from easypipe.core.remote import causes_of

CONNECT_S = 4.0  # seconds for a connection; the response may take longer

FAILED_S = 30.0  # seconds after which an unreachable host is tried again

# for each host and port: when it was tried, and why it could not be reached
_asked: dict[tuple[str, int], tuple[float, str | None]] = {}


def near_here(name: str, fix: str) -> tuple[list[str] | None, str]:
    """Returns what to try instead of a name unknown to the Hub, which may be a local path.

    Returns:
        (a few names in the folder with which the name begins, or None; a suggested fix, else
        `fix`).
    """
    near, meant = near_path(name)
    if os.path.isdir(os.path.dirname(name)):
        return near, meant or "Check the path."
    return None, f"{meant} {fix}" if meant else fix


def hub_unreachable(endpoint: str | None = None) -> str | None:
    """Returns why there is no connection to the Hub within CONNECT_S; None if there is one.

    A missing network and an untrusted certificate are found immediately. Each host, or its proxy,
    is tried once, and again FAILED_S after a failure. Failures beyond a proxy and offline mode are
    left to the Hub's client to report.

    Args:
        endpoint: The URL of the Hub; None takes that of its client.
    """
    from huggingface_hub import constants

    url = endpoint or constants.ENDPOINT
    parts = urlsplit(url)
    proxy = {} if proxy_bypass(parts.hostname or "") else getproxies()
    via = proxy.get(parts.scheme) or proxy.get("all")
    if via:
        parts = urlsplit(via if "://" in via else f"http://{via}")
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 1080)  # the last is SOCKS
    host, role = parts.hostname or "", "the proxy " if via else ""
    if constants.HF_HUB_OFFLINE:
        return None
    asked, why = _asked.get((host, port), (-FAILED_S, ""))
    if why is None or time.monotonic() - asked < FAILED_S:
        return why
    failure = _connection_failure(host, port)
    if failure is None and url.startswith("https:"):
        failure = _certificate_failure(url)
    why = None if failure is None else f"{role}{host}:{port}: {failure}"
    _asked[host, port] = time.monotonic(), why
    return why


def _connection_failure(host: str, port: int) -> OSError | None:
    """Returns why there is no connection to a host within CONNECT_S, with retries."""
    said: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
    began = time.monotonic()

    def connect() -> None:
        wait = 0.1
        while True:
            try:
                socket.create_connection((host, port), timeout=CONNECT_S).close()
                return said.put(None)
            except OSError as error:
                if time.monotonic() - began + wait >= CONNECT_S:
                    return said.put(error)
            time.sleep(wait)
            wait *= 2

    # a resolver cannot be interrupted
    threading.Thread(target=connect, name="easypipe-connect", daemon=True).start()
    try:
        return said.get(timeout=CONNECT_S)
    except queue.Empty:
        return TimeoutError("no answer in time")


def _certificate_failure(url: str) -> ssl.SSLError | None:
    """Returns the error of a certificate that the Hub's client does not trust; None if it does.

    Only the client knows which certificates it trusts; it would try six times before it reports.
    """
    from huggingface_hub.utils import get_session

    try:
        get_session().head(url, timeout=CONNECT_S)
    except Exception as error:  # noqa: BLE001  (of whatever library the client uses; it tells all else itself)
        found = (e for e in causes_of(error) if isinstance(e, ssl.SSLCertVerificationError))
        return next(found, None)
    return None
