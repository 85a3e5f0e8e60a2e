"""The route of sandboxes on other machines: this machine's gateway at a public address, which a variable has."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from rllm.errors import ConfigError

VARIABLE = "RLLM_PUBLIC_GATEWAY_URL"
"""`http://ADDRESS:PORT` at which other machines reach the gateway.

A sandbox has the key of its session, which opens nothing else of the gateway.
"""


def public_route(url: str, sandbox: str) -> str:
    """Return the public form of a URL of the gateway; raise `ConfigError` if there is none."""
    if gateway_address() is None:
        raise ConfigError(
            f"sandbox={sandbox} does not reach {url} from other machines: set gateway.host and gateway.port, or make a "
            f"tunnel, and set the variable {VARIABLE} to the gateway's http://ADDRESS:PORT"
        )
    return os.environ[VARIABLE].rstrip("/") + urlsplit(url).path


def gateway_address() -> tuple[str, int] | None:
    """Return the IPv4 address and port of the public gateway, if there is one; raise `ConfigError` if it is unknown."""
    public = os.environ.get(VARIABLE)
    if not public:
        return None
    try:
        parts = urlsplit(public)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        return socket.gethostbyname(parts.hostname or ""), port
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{VARIABLE}={public!r}: use a URL of the form http://ADDRESS:PORT ({error})") from error
