"""Callers: the session and the key that a request names in its URL, headers or key, and whether it is admitted."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import parse_qs, unquote_to_bytes

import orjson

from rllm.capture.wire_formats import WIRE_FORMATS, WireFormat
from rllm.gateway.dialects.base import check_depth
from rllm.gateway.errors import GatewayError
from rllm.types import RESERVED_PREFIX, JSONMapping, JSONObject

if TYPE_CHECKING:
    from rllm.gateway.config import GatewayConfig
    from rllm.gateway.sessions import Sessions

SESSION_HEADER = "x-rllm-session"
METADATA_HEADER = "x-rllm-metadata"
KEY_PREFIX = "rllm-"
"""An API key of the form `rllm-SESSION` names the session: the one channel that every client has besides the URL."""
SESSION_KEY_PREFIX = "rllm.session."
"""Prefix of keys that are valid for one session only."""
UNNAMED_KEY_PREFIX = "rllm.unnamed."
"""Prefix of the key that is valid for calls without a session."""

_OWN_SESSION_HEADERS = (b"x-claude-code-session-id", b"x-session-id", b"session-id")
"""Headers in which Claude Code, opencode and Codex name their own session."""
_KEY_HEADERS = sorted({row.key_header.encode() for row in WIRE_FORMATS} - {b"authorization"})
_MAX_DIGITS = 20
_OWN_SESSION = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.:-]{1,256}")


class Caller(NamedTuple):
    """Holder of a key."""

    session: str | None = None
    """Session named by the key, if any."""
    number: int | None = None
    """Number of the session, if the key belongs to a session; see `SessionInfo.number`."""
    is_bound: bool = False
    """True if the key is valid for that session only; without a session, for calls that name none."""

    def check(self, session_id: str | None) -> None:
        """Check that the key may be used for a session.

        Raises:
            GatewayError: 403, if the key is another session's.
        """
        if self.is_bound and session_id != self.session:
            self.check_operator()

    def check_operator(self) -> None:
        """Check that the key is the gateway's own.

        Raises:
            GatewayError: 403, if the key is not the gateway's own.
        """
        if self.is_bound:
            scope = "calls without a session" if self.session is None else f"the session {self.session!r}"
            raise GatewayError(
                403,
                f"this key is valid for {scope} only: use it there, or send the gateway's own key",
                type="permission_error",
                code="wrong_session",
            )


def session_key(api_key: str, session_id: str, number: int) -> str:
    """Return a key for one session, which cannot be made without the gateway's own and is not stored.

    `number` is `SessionInfo.number`: the key expires with the session, and a later one of its name has another key.
    """
    return SESSION_KEY_PREFIX + ".".join(
        (_base64(session_id.encode()), str(number), _mac(api_key, f"session\0{number}\0{session_id}"))
    )


def unnamed_key(api_key: str) -> str:
    """Return a key that is valid for calls without a session only."""
    return UNNAMED_KEY_PREFIX + _mac(api_key, "unnamed")


def _mac(api_key: str, scope: str) -> str:
    return _base64(hmac.digest(api_key.encode(), b"rllm " + scope.encode(), "sha256"))


def authorize(authorization: str, api_key: str | None) -> Caller:
    """Check the `Authorization` header.

    Raises:
        GatewayError: 401, if the gateway has a key and this is neither it nor a session's.
    """
    scheme, _, presented = authorization.partition(" ")
    presented = presented.strip() if scheme.lower() == "bearer" else ""
    if api_key is not None:
        if presented.startswith(SESSION_KEY_PREFIX):
            parts = presented.removeprefix(SESSION_KEY_PREFIX).split(".")
            try:
                session_id, number = urlsafe_b64decode(parts[0] + "==").decode(), int(parts[1][:_MAX_DIGITS])
            except (ValueError, IndexError) as error:
                raise refused() from error
            if not secrets.compare_digest(presented.encode(), session_key(api_key, session_id, number).encode()):
                raise refused()
            return Caller(session=session_id, number=number, is_bound=True)
        if presented.startswith(UNNAMED_KEY_PREFIX):
            if not secrets.compare_digest(presented.encode(), unnamed_key(api_key).encode()):
                raise refused()
            return Caller(is_bound=True)
        key, _, presented = presented.partition(":") if ":" not in api_key else (presented, "", "")
        if not secrets.compare_digest(key.encode(), api_key.encode()):
            raise refused()
    named = presented.removeprefix(KEY_PREFIX) if presented.startswith(KEY_PREFIX) else ""
    return Caller(session=named or None)


def refused() -> GatewayError:
    """Return the error for a request without a valid key."""
    return GatewayError(
        401,
        "this gateway needs an API key: an agent sends the OPENAI_API_KEY that it was given, as 'Authorization: Bearer "
        "KEY', or calls its own base_url; an operator sends the gateway's key",
        type="authentication_error",
        code="invalid_api_key",
    )


def _base64(part: bytes) -> str:
    return urlsafe_b64encode(part).decode().rstrip("=")


def authorization_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the `Authorization` header, or one made of the key header of another wire format."""
    authorization = headers.get(b"authorization", b"")
    for name in () if authorization else _KEY_HEADERS:
        if key := headers.get(name, b""):
            authorization = b"Bearer " + key
    return authorization.decode("latin-1")


def session_named(path: str | None, headers: Mapping[bytes, bytes], caller: Caller, *, takes_own: bool) -> str | None:
    """Return the session that a request names, or `None`: then it gets a fresh one.

    With `takes_own`, that may be the client's own name of its session, if nothing else names one.

    Raises:
        GatewayError: 403, if the key is another session's.
    """
    named = _openly_named(path, headers) or caller.session
    if named is None and takes_own and not caller.is_bound:
        own = (headers.get(header, b"").decode("latin-1") for header in _OWN_SESSION_HEADERS)
        named = next(filter(_OWN_SESSION.fullmatch, own), None)
    caller.check(named)
    return named


def named_by_any_means(path: str | None, headers: Mapping[bytes, bytes]) -> str | None:
    """Return the session that the URL, a header or the key names, without checking the key."""
    key = authorization_of(headers).rpartition(" ")[2].rpartition(":")[2]
    in_key = key.removeprefix(KEY_PREFIX) if key.startswith(KEY_PREFIX) else ""
    return _openly_named(path, headers) or in_key or None


def check_one_named(path: str | None, headers: Mapping[bytes, bytes]) -> None:
    """Check that path and header name the same session; both overrule a key, which is often shared.

    Raises:
        GatewayError: 400, if they name different sessions.
    """
    header = _text(headers, SESSION_HEADER)
    if path and header and path != header:
        raise GatewayError(
            400,
            f"the URL names the session {path!r} and the header {SESSION_HEADER} names {header!r}: send one of them",
            code="conflicting_session",
        )


def _openly_named(path: str | None, headers: Mapping[bytes, bytes]) -> str | None:
    """Return the session that a request names in its URL, or in our header."""
    return path or _text(headers, SESSION_HEADER) or None


def metadata_of(headers: Mapping[bytes, bytes]) -> JSONObject:
    """Return the call's metadata: a header's value, a percent-encoded JSON object.

    Raises:
        GatewayError: 400, if it is anything else, is nested too deep, or uses a name that is ours.
    """
    header = _text(headers, METADATA_HEADER)
    if not header:
        return {}
    written = unquote_to_bytes(header)
    try:
        metadata = orjson.loads(written)
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise GatewayError(
            400, f"header {METADATA_HEADER}={header[:80]!r}: use a percent-encoded JSON object", code="invalid_metadata"
        )
    check_depth(metadata, f"the header {METADATA_HEADER}")
    for name in metadata:
        if name.startswith(RESERVED_PREFIX):
            raise GatewayError(
                400,
                f"header {METADATA_HEADER}: {name!r} begins with {RESERVED_PREFIX!r}, which is reserved for the "
                "gateway: choose another name",
                code="invalid_metadata",
            )
    return metadata


def with_key_header(scope: JSONMapping, wire: WireFormat) -> list[tuple[bytes, bytes]]:
    """Return a request's headers, with the key that its URL has in place of a header, if any."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if not wire.key_parameter or wire.key_parameter.encode() not in scope["query_string"]:
        return headers
    name, keys = wire.key_header.encode(), parse_qs(scope["query_string"].decode("latin-1")).get(wire.key_parameter, [])
    return [*headers, *((name, key.encode()) for key in keys[:1] if name not in dict(headers))]


def _text(headers: Mapping[bytes, bytes], name: str) -> str:
    """Return a header, decoded as UTF-8 or else as Latin-1; empty if it is missing."""
    value = headers.get(name.encode())
    if value is None:
        return ""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def trace_context_of(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the W3C trace context of a request, which spans and the upstream get."""
    names = ("traceparent", "tracestate")
    return {name: headers[name.encode()].decode("latin-1") for name in names if name.encode() in headers}


# --- admission --------------------------------------------------------------------------------------------------------

_RANDOM_ID = re.compile(r"(?:s-[0-9a-f]+-)?[0-9a-f]{32}")
"""Ids of sessions that commands and trainers begin, with 122 random bits."""


async def key_holder(headers: Mapping[bytes, bytes], config: GatewayConfig, sessions: Sessions) -> Caller:
    """Return the holder of the presented key, if one is needed.

    Raises:
        GatewayError: 401, if it is not a key of this gateway, or its session was deleted; 403, if no key is needed, but
            a web page sends the request.
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
        GatewayError: 401 or 403, if the sender is not admitted.
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

    A browser lets the page of any site send requests to the gateway, and names the site in `Origin`, or sends
    `Sec-Fetch-Site: cross-site`. A site whose name resolves to this machine for a moment (DNS rebinding) may read the
    answers, too; but then its name is the `Host`.

    Raises:
        GatewayError: 403, if the page of a site on the Internet sends the request.
    """
    host = headers.get(b"host", b"")
    if _place_of(host) == "internet":
        raise _page_refused("Host", host)
    site = headers.get(b"sec-fetch-site")
    origin = headers.get(b"origin", b"null" if site == b"cross-site" else None)
    if origin is None:
        return
    # Older browsers send no `Sec-Fetch-Site`; an `Origin` on another machine is foreign nevertheless.
    is_unknown = origin == b"null" and site in (None, b"cross-site")
    of_page = origin.rpartition(b"//")[2]
    if is_unknown or (of_page != host and _place_of(of_page) != "here"):
        raise _page_refused("Origin", origin)


@lru_cache(maxsize=256)
def _place_of(host: bytes) -> Literal["here", "address", "internet"]:
    """Classify a host: a name of this machine or network, the address of another machine, or a registered name."""
    name = host.decode("latin-1").lower()
    name = name.rpartition(":")[0] if ":" in name and not name.endswith("]") else name
    try:
        return "here" if ipaddress.ip_address(name.strip("[]")).is_loopback else "address"
    except ValueError:
        name = name.rstrip(".")
        return "internet" if "." in name and not name.endswith(_LOCAL_SUFFIXES) else "here"


def _page_refused(header: str, value: bytes) -> GatewayError:
    return GatewayError(
        403,
        f"{header}: {value[:80].decode('latin-1')}: a gateway without a key refuses requests from web "
        "pages of other sites: use localhost or an address, or start it with --api-key KEY",
        type="permission_error",
        code="web_page",
    )
