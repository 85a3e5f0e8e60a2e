"""Admission: keys, random session ids as keys, and no requests of foreign web pages where there is no key."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from functools import lru_cache

from rllm.gateway.config import GatewayConfig
from rllm.gateway.errors import GatewayError
from rllm.gateway.identity import Caller, authorization_of, authorize, named_by_any_means, refused
from rllm.gateway.sessions import Sessions

_RANDOM_ID = re.compile(r"(?:s-[0-9a-f]+-)?[0-9a-f]{32}")
"""Ids of sessions that commands and trainers begin, of 122 random bits."""


async def key_holder(headers: Mapping[bytes, bytes], config: GatewayConfig, sessions: Sessions) -> Caller:
    """Return the holder of the presented key, where one is needed.

    Raises:
        GatewayError: 401, if it is none of this gateway's, or its session was deleted; 403, if none is needed, but a
        web
            page asks.
    """
    if config.api_key is None:
        check_no_page_asks(headers)
    caller = authorize(authorization_of(headers), config.api_key)
    if caller.is_bound and caller.session is not None and await sessions.number_of(caller.session) != caller.number:
        raise refused()
    return caller


async def caller_of(
    path: str | None, headers: Mapping[bytes, bytes], config: GatewayConfig, sessions: Sessions
) -> Caller:
    """Return the sender of a request with these headers; `path` is the session named by its URL, if any.

    Raises:
        GatewayError: 401 or 403, if the sender has no right to it.
    """
    if config.session_ids_admit and config.api_key is not None:
        named = named_by_any_means(path, headers)
        if named is not None and _RANDOM_ID.fullmatch(named) and await sessions.has_begun(named):
            return Caller(session=named, is_bound=True)
    return await key_holder(headers, config, sessions)


_LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".test", ".home.arpa", ".lan")
"""Suffixes of names of this machine, its network or its containers, which cannot be registered (RFC 6761, 6762,
8375)."""


def check_no_page_asks(headers: Mapping[bytes, bytes]) -> None:
    """Refuse requests that a browser sends for the page of another site.

    Its user's browser lets the page of any site send requests to the gateway, and names the site in `Origin`, or sends
    `Sec-Fetch-Site: cross-site`. A site whose name resolves to this machine for a moment (DNS rebinding) may read the
    answers, too; but then its name is the `Host`.

    Raises:
        GatewayError: 403, if the page of a site in the Internet sends the request.
    """
    host = headers.get(b"host", b"")
    if _is_internet_name(host):
        raise _page_refused("Host", host)
    site = headers.get(b"sec-fetch-site")
    origin = headers.get(b"origin", b"null" if site == b"cross-site" else None)
    if origin is None:
        return
    # Older browsers send no `Sec-Fetch-Site`; an `Origin` that is not of this machine is foreign all the same.
    is_unknown = origin == b"null" and site in (None, b"cross-site")
    of_page = origin.rpartition(b"//")[2]
    if is_unknown or (of_page != host and (_is_internet_name(of_page) or _is_elsewhere(of_page))):
        raise _page_refused("Origin", origin)


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
def _is_internet_name(host: bytes) -> bool:
    """Return whether a host is a name in the Internet: neither an address nor a name of this network."""
    name = _name_of(host)
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        name = name.rstrip(".")
        return "." in name and not name.endswith(_LOCAL_SUFFIXES)
    return False


def _page_refused(header: str, value: bytes) -> GatewayError:
    return GatewayError(
        403,
        f"{header}: {value[:80].decode('latin-1')}: a gateway without a key does nothing for web pages of other "
        "sites: use localhost or an address, or start it with --api-key KEY",
        type="permission_error",
        code="web_page",
    )
