"""Web pages, whose requests a gateway without a key would take for an agent's.

The browser of whoever runs one lets the page of any site send requests to it, and says `Sec-Fetch-Site: cross-site`. A site
whose name leads to this machine for a moment (DNS rebinding) may read the answers, too; but then its name is the `Host`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache

from rllm.gateway.errors import GatewayError

_NOBODYS = (".localhost", ".local", ".internal", ".test", ".home.arpa", ".lan")
"""Names that end so belong to this machine, its network or its containers: nobody can register one (RFC 6761, 6762 and 8375,
ICANN)."""


def check_no_page_asks(headers: Mapping[bytes, bytes]) -> None:
    """
    Raises:
        GatewayError: 403, if the page of a site in the Internet does.
    """
    host = headers.get(b"host", b"")
    if _has_an_owner(host):
        raise _refused("Host", host)
    if headers.get(b"sec-fetch-site") == b"cross-site":
        origin = headers.get(b"origin", b"null")
        if origin == b"null" or _has_an_owner(origin.rpartition(b"//")[2]):
            raise _refused("Origin", origin)


@lru_cache(maxsize=256)
def _has_an_owner(host: bytes) -> bool:
    """Whether a host, with or without port, is a name in the Internet: neither an address nor one of this network."""
    name = host.decode("latin-1").lower()
    name = name.rpartition(":")[0] if ":" in name and not name.endswith("]") else name
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        name = name.rstrip(".")
        return "." in name and not name.endswith(_NOBODYS)
    return False


def _refused(header: str, value: bytes) -> GatewayError:
    return GatewayError(
        403,
        f"{header}: {value[:80].decode('latin-1')}: a gateway without a key does nothing for web pages of other sites: use "
        "localhost or an address, or start it with --api-key KEY",
        type="permission_error",
        code="web_page",
    )
