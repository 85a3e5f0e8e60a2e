"""Routes of sandboxes on other machines: the public URL of this machine's gateway, which a variable has."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from rllm.errors import ConfigError

VARIABLE = "RLLM_PUBLIC_GATEWAY_URL"
"""`http://ADDRESS:PORT` at which other machines reach this machine's gateway.

The session's key, which the sandbox has, opens that session and nothing else of the gateway.
"""


def public_route(url: str, sandbox: str) -> str:
    """Return the public form of a URL of the gateway.

    Raises:
        ConfigError: if the variable is not set, or not such a URL.
    """
    public = os.environ.get(VARIABLE, "").rstrip("/")
    if not public:
        raise ConfigError(
            f"sandbox={sandbox} does not reach {url} from other machines; make the gateway public (gateway.host, "
            f"gateway.port), and set the variable {VARIABLE} to its http://ADDRESS:PORT"
        )
    gateway_address()
    parts = urlsplit(url)
    return f"{public}{parts.path}" + (f"?{parts.query}" if parts.query else "")


def gateway_address() -> tuple[str, int] | None:
    """Return the IPv4 address and port of the public gateway, if there is one.

    Raises:
        ConfigError: if the variable is not a URL, or its name is unknown.
    """
    public = os.environ.get(VARIABLE)
    if not public:
        return None
    try:
        parts = urlsplit(public)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        return socket.gethostbyname(parts.hostname or ""), port
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{VARIABLE}={public!r}: use a URL of the form http://ADDRESS:PORT ({error})") from error
