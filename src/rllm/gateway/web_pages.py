"""Web pages, whose requests a gateway without a key would take for an agent's.

The browser of whoever runs one lets the page of any site send requests to it, and names the site in `Origin`, or sends
`Sec-Fetch-Site: cross-site`. A site whose name leads to this machine for a moment (DNS rebinding) may read the answers, too; but then its name is the `Host`.
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
    site = headers.get(b"sec-fetch-site")
    origin = headers.get(b"origin", b"null" if site == b"cross-site" else None)
    if origin is None:
        return
    # Older browsers send no `Sec-Fetch-Site`; an `Origin` that is not of this machine is foreign all the same.
    is_unknown = origin == b"null" and site in (None, b"cross-site")
    of_page = origin.rpartition(b"//")[2]
    if is_unknown or (of_page != host and (_has_an_owner(of_page) or _is_elsewhere(of_page))):
        raise _refused("Origin", origin)


@lru_cache(maxsize=256)
def _is_elsewhere(host: bytes) -> bool:
    """Return whether a host is the address of another machine."""
    try:
        return not ipaddress.ip_address(_name_of(host).strip("[]")).is_loopback
    except ValueError:
        return False


def _name_of(host: bytes) -> str:
    """Return a host without its port."""
    name = host.decode("latin-1").lower()
    return name.rpartition(":")[0] if ":" in name and not name.endswith("]") else name


@lru_cache(maxsize=256)
def _has_an_owner(host: bytes) -> bool:
    """Whether a host, with or without port, is a name in the Internet: neither an address nor one of this network."""
    name = _name_of(host)
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
