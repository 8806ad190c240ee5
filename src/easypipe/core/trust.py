# pyright: strict
"""Decides which servers, named by environment or command line, get secrets and the Hub's token.

A configuration may name any address, so it cannot make one trusted: the machine's own credentials
(HF_TOKEN, the login of the Hub's client, cloud accounts) go to huggingface.co, to HF_ENDPOINT, and
to what `--trust-endpoint` or EASYPIPE_TRUST_ENDPOINT names, and only over https. Secrets that a
configuration holds itself go to the address beside them, and to no other that it redirects to.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Literal
from urllib.parse import urlsplit

from easypipe.core.errors import ConfigError, require
from easypipe.core.values import Settings

HUB = "https://huggingface.co"
TRUSTED = "EASYPIPE_TRUST_ENDPOINT"  # URLs, separated by blanks; child processes inherit it
# variables that name the server of a service in place of its usual one
_NAMED_BY = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")
# options of storage_options that may hold credentials of their own
_OWN = ("key", "secret", "token", "anon", "username", "password", "connection_string")
_OF_THE_MACHINE = ("cloud", "cache", "google_default", "browser", False, None)

log = logging.getLogger("easypipe")
_told: set[str] = set()


def trust_endpoint(url: str) -> None:
    """Makes this process, and those that it starts, send the machine's credentials to a server.

    Args:
        url: The URL of the server.

    Raises:
        ConfigError: It is not a URL of a web server.
    """
    scheme, host = _origin(url)[:2]
    require(
        scheme in ("http", "https") and host,
        "trust_endpoint",
        f"{url!r} is not a URL of a web server",
        "Write https://host.",
    )
    os.environ[TRUSTED] = f"{os.environ.get(TRUSTED, '')} {url}".strip()


def hub_token(
    endpoint: str | None = None, own: str | None = None, at: str = "storage_options.endpoint"
) -> str | Literal[False] | None:
    """Returns the `token` for the Hub's client.

    Args:
        endpoint: Where requests go; None takes HF_ENDPOINT, else huggingface.co.
        own: A token that the configuration gives beside the endpoint.
        at: The key path of the endpoint.

    Returns:
        `own`, else None if the endpoint is trusted (the client takes the machine's token), else
        False: the client sends none, which a warning says once.

    Raises:
        ConfigError: `own` would go over plain http to another machine.
    """
    url = endpoint or os.environ.get("HF_ENDPOINT") or HUB
    if own:
        require_private(url, at)
        return own
    if _private(url) and _is_one_of(url, _trusted()):
        return None
    from huggingface_hub import get_token

    if get_token() and url not in _told:
        _told.add(url)
        log.warning(
            "%s: gets no token, because it is %s: what is private there cannot be read. %s",
            url,
            "named by the configuration alone" if _private(url) else "plain http",
            f"Name it by --trust-endpoint {url}, {TRUSTED} or HF_ENDPOINT."
            if _private(url)
            else "Use https.",
        )
    return False


def require_private(url: str, at: str) -> None:
    """Raises ConfigError if what is sent to `url` can be read on the way."""
    require(
        _private(url),
        at,
        f"secrets are not sent to {_shown(url)} over plain http",
        "Use https; http will do for this machine alone.",
    )


def require_trusted_storage(options: Settings, at: str) -> None:
    """Checks that storage_options send no credentials of this machine to an untrusted server.

    Args:
        options: storage_options that came as text.
        at: Their key path.

    Raises:
        ConfigError: They name a server that only they name, and give no credentials of their own.
    """
    if any(options.get(name, None) not in _OF_THE_MACHINE for name in _OWN):
        return
    named = [*_trusted(), *(os.environ.get(name, "") for name in _NAMED_BY)]
    for key, url in options.items():
        here = f"{at}.{key}"
        if isinstance(url, Mapping):  # client_kwargs; a part of a chain of protocols
            require_trusted_storage(url, here)  # pyright: ignore[reportUnknownArgumentType]
        elif (
            key == "endpoint_url"
            and isinstance(url, str)
            and url
            and not (_loopback(url) or _is_one_of(url, named))
        ):
            raise ConfigError(
                at=here,
                problem=f"would send credentials of this machine to {_shown(url)}, which only the "
                "configuration names",
                fix=f"If you trust that server, pass --trust-endpoint {_shown(url)}, or give "
                "it credentials of its own in the configuration.",
            )


def _trusted() -> list[str]:
    return [HUB, os.environ.get("HF_ENDPOINT", ""), *os.environ.get(TRUSTED, "").split()]


def _private(url: str) -> bool:
    """Returns whether what is sent to a URL cannot be read on the way."""
    return url.startswith("https://") or _loopback(url)


def _loopback(url: str) -> bool:
    host = _origin(url)[1]
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_one_of(url: str, trusted: Sequence[str]) -> bool:
    """Returns whether a URL names the server of one of these; a text that is no URL names none."""
    origin = _origin(url)
    return bool(origin[1]) and origin in map(_origin, trusted)


def _origin(url: str) -> tuple[str, str, int]:
    """Returns scheme, host and port; the host of a text that is not a URL is ''."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return parts.scheme, (parts.hostname or "").rstrip("."), port
    except ValueError:
        return "", "", 0


def _shown(url: str) -> str:
    scheme, host, _ = _origin(url)
    return f"{scheme}://{urlsplit(url).netloc.rpartition('@')[2]}" if host else url
