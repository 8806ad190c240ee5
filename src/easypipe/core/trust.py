# pyright: strict
"""Which servers are sent secrets: those that the environment or the command line names, over https.

A configuration may name any address, so it cannot make one trusted: the machine's own credentials
(HF_TOKEN, the login of the Hub's client, cloud accounts) go to huggingface.co, to HF_ENDPOINT, and
to what `--trust-endpoint` or EASYPIPE_TRUST_ENDPOINT names. Secrets that a configuration holds
itself go to the address beside them, and to no other that it redirects to.
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
TRUSTED = "EASYPIPE_TRUST_ENDPOINT"  # URLs, separated by blanks; processes that are started see it
# of services of which storage_options may name another server than the usual one
_NAMED_BY = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")
# the machine's own login, or credentials that storage_options hold themselves
_OWN = ("key", "secret", "token", "anon", "username", "password", "connection_string")
_OF_THE_MACHINE = ("cloud", "cache", "google_default", "browser", False, None)

log = logging.getLogger("easypipe")
_told: set[str] = set()


def trust_endpoint(url: str) -> None:
    """From now on this process, and those that it starts, send the machine's credentials to the
    server of `url`. Raises ConfigError where it is no URL."""
    scheme, host = _origin(url)[:2]
    require(
        scheme in ("http", "https") and host,
        "trust_endpoint",
        f"{url!r} is no URL of a web server",
        "Write https://host.",
    )
    os.environ[TRUSTED] = f"{os.environ.get(TRUSTED, '')} {url}".strip()


def hub_token(
    endpoint: str | None = None, own: str | None = None, at: str = "storage_options.endpoint"
) -> str | Literal[False] | None:
    """The `token` for the Hub's client: `own`, else None (it takes the machine's) where `endpoint`
    is trusted, else False: it sends none, which a warning says once.

    Args:
        endpoint: where requests go; None takes HF_ENDPOINT, else huggingface.co.
        own: a token that stands beside the endpoint.
        at: the key path of the endpoint.

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
    """Raises ConfigError where what is sent to `url` can be read on the way."""
    require(
        _private(url),
        at,
        f"secrets are not sent to {_shown(url)} over plain http",
        "Use https; http will do for this machine alone.",
    )


def require_trusted_storage(options: Settings, at: str) -> None:
    """Raises ConfigError where storage_options that came as text would send credentials of this
    machine to a server that nobody but they name."""
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
                "credentials of its own beside it.",
            )


def _trusted() -> list[str]:
    return [HUB, os.environ.get("HF_ENDPOINT", ""), *os.environ.get(TRUSTED, "").split()]


def _private(url: str) -> bool:
    return url.startswith("https://") or _loopback(url)


def _loopback(url: str) -> bool:
    host = _origin(url)[1]
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_one_of(url: str, trusted: Sequence[str]) -> bool:
    """Whether it names the server of one of these; what is no URL names none."""
    origin = _origin(url)
    return bool(origin[1]) and origin in map(_origin, trusted)


def _origin(url: str) -> tuple[str, str, int]:
    """Scheme, host, port; of what is no URL the host is ''."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return parts.scheme, (parts.hostname or "").rstrip("."), port
    except ValueError:
        return "", "", 0


def _shown(url: str) -> str:
    scheme, host, _ = _origin(url)
    return f"{scheme}://{urlsplit(url).netloc.rpartition('@')[2]}" if host else url
