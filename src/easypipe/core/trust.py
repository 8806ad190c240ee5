# pyright: strict
"""Decides which servers, named by environment or command line, get secrets and the Hub's token.

A config may name any server, so it cannot make one trusted. The machine's own credentials
(HF_TOKEN, the login of the Hub's client, cloud accounts) are sent only over https, and only to
huggingface.co, to HF_ENDPOINT, and to what `--trust-endpoint` or EASYPIPE_TRUST_ENDPOINT names.
Secrets in a config are sent to the server that it names with them, and do not follow redirects.
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
TRUSTED = "EASYPIPE_TRUST_ENDPOINT"  # URLs, separated by spaces; child processes inherit it
# variables that name another server for a service than its usual one
_NAMED_BY = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")
# storage_options that may hold a config's own credentials
_OWN = ("key", "secret", "token", "anon", "username", "password", "connection_string")
_OF_THE_MACHINE = ("cloud", "cache", "google_default", "browser", False, None)

log = logging.getLogger("easypipe")
_told: set[str] = set()


def trust_endpoint(url: str) -> None:
    """Makes this process and its child processes send the machine's credentials to a server.

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
        own: A token that the config gives with the endpoint.
        at: The key path of the endpoint.

    Returns:
        `own`, else None if the endpoint is trusted (the client takes the machine's token), else
        False: the client sends no token, and one warning says so.

    Raises:
        ConfigError: `own` would be sent over plain http to another machine.
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
    """Raises ConfigError if others can read what is sent to `url`."""
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
        ConfigError: They name an untrusted server without their own credentials.
    """
    if any(options.get(name, None) not in _OF_THE_MACHINE for name in _OWN):
        return
    named = [*_trusted(), *(os.environ.get(name, "") for name in _NAMED_BY)]
    for key, url in options.items():
        here = f"{at}.{key}"
        if isinstance(url, Mapping):  # client_kwargs, or a part of a chain of protocols
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
    """Returns whether no one else can read what is sent to a URL."""
    return url.startswith("https://") or _loopback(url)


def _loopback(url: str) -> bool:
    host = _origin(url)[1]
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_one_of(url: str, trusted: Sequence[str]) -> bool:
    """Returns whether a URL names the server of one of these; a text that is not a URL does not."""
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
