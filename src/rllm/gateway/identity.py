"""Whose call this is, read from the URL path, the headers and the API key, in this order."""

from __future__ import annotations

import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from rllm.gateway.baggage import session_of_baggage
from rllm.gateway.dialects.fields import check_depth
from rllm.gateway.errors import GatewayError
from rllm.types import RESERVED_PREFIX

SESSION_HEADER = "x-rllm-session"
METADATA_HEADER = "x-rllm-metadata"
KEY_PREFIX = "rllm-"
"""An API key of the form `rllm-SESSION` names the session: the one channel that every client has besides the URL."""
SESSION_KEY_PREFIX = "rllm.session."
"""How the keys begin that are good for one session only."""

_OWN_SESSION_HEADERS = (b"x-claude-code-session-id", b"x-session-id", b"session-id")
"""Of Claude Code, opencode and Codex."""
_OWN_SESSION = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.:-]{1,256}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who presents a key."""

    session: str | None = None
    """The session that the key names, if it names one."""
    is_bound: bool = False
    """Whether the key is good for that session only."""

    def check(self, session_id: str | None) -> None:
        """
        Raises:
            GatewayError: 403, if the key is another session's.
        """
        if self.is_bound and session_id != self.session:
            raise GatewayError(
                403,
                f"this key is good for the session {self.session!r} only: use it there, or present the gateway's own",
                type="permission_error",
                code="wrong_session",
            )


def session_key(api_key: str, session_id: str) -> str:
    """A key that is good for one session, and that nobody can make without the gateway's own; nothing is kept of it."""
    mac = hmac.digest(api_key.encode(), b"rllm session\0" + session_id.encode(), "sha256")
    return SESSION_KEY_PREFIX + ".".join(_base64(part) for part in (session_id.encode(), mac))


def authorize(authorization: str, api_key: str | None) -> Caller:
    """Check the `Authorization` header.

    Raises:
        GatewayError: 401, if the gateway has a key and this is neither it nor a session's.
    """
    scheme, _, presented = authorization.partition(" ")
    presented = presented.strip() if scheme.lower() == "bearer" else ""
    if api_key is not None:
        if presented.startswith(SESSION_KEY_PREFIX):
            return _bound_caller(presented, api_key)
        key, _, presented = presented.partition(":") if ":" not in api_key else (presented, "", "")
        if not secrets.compare_digest(key.encode(), api_key.encode()):
            raise _refused()
    named = presented.removeprefix(KEY_PREFIX) if presented.startswith(KEY_PREFIX) else ""
    return Caller(session=named or None)


def _bound_caller(presented: str, api_key: str) -> Caller:
    try:
        session_id = urlsafe_b64decode(presented.removeprefix(SESSION_KEY_PREFIX).partition(".")[0] + "==").decode()
    except ValueError as error:
        raise _refused() from error
    if not secrets.compare_digest(presented.encode(), session_key(api_key, session_id).encode()):
        raise _refused()
    return Caller(session=session_id, is_bound=True)


def _refused() -> GatewayError:
    return GatewayError(
        401,
        "this gateway needs its API key: send 'Authorization: Bearer KEY', or 'Bearer KEY:rllm-SESSION', or the key that "
        "POST /sessions gave for a session",
        type="authentication_error",
        code="invalid_api_key",
    )


def _base64(part: bytes) -> str:
    return urlsafe_b64encode(part).decode().rstrip("=")


def authorization_of(headers: Mapping[bytes, bytes]) -> str:
    """The `Authorization` header; Anthropic's clients may send their key as `x-api-key` instead."""
    authorization, key = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
    return (authorization or (b"Bearer " + key if key else b"")).decode("latin-1")


def session_named(path: str | None, headers: Mapping[bytes, bytes], caller: Caller) -> str | None:
    """The session that a request names, or `None`: then it gets a fresh one.

    Raises:
        GatewayError: 403, if the key is another session's.
    """
    openly = openly_named(path, headers)
    named = openly or session_of_baggage(_text(headers, "baggage")) or caller.session or own_session(headers)
    caller.check(named)
    return named


def check_one_named(path: str | None, headers: Mapping[bytes, bytes]) -> None:
    """
    Raises:
        GatewayError: 400, if path and header name different sessions (a key is often shared, so the others overrule it).
    """
    header = _text(headers, SESSION_HEADER)
    if path and header and path != header:
        raise GatewayError(
            400,
            f"the URL names the session {path!r} and the header {SESSION_HEADER} names {header!r}: send one of them",
            code="conflicting_session",
        )


def openly_named(path: str | None, headers: Mapping[bytes, bytes]) -> str | None:
    """The session that a request names in its URL, or in our header."""
    return path or _text(headers, SESSION_HEADER) or None


def own_session(headers: Mapping[bytes, bytes]) -> str | None:
    """What a client calls its own session, which is ours where nothing else names one."""
    for header in _OWN_SESSION_HEADERS:
        named = headers.get(header, b"").decode("latin-1")
        if _OWN_SESSION.fullmatch(named):
            return named
    return None


def metadata_of(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The call's metadata: a header's value, a percent-encoded JSON object.

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
    check_depth(written, metadata, f"the header {METADATA_HEADER}")
    for name in metadata:
        if name.startswith(RESERVED_PREFIX):
            raise GatewayError(
                400,
                f"header {METADATA_HEADER}: {name!r} begins with {RESERVED_PREFIX!r}, as only names of the gateway's own may: "
                "choose another name",
                code="invalid_metadata",
            )
    return metadata


def headers_of(scope: Mapping[str, Any]) -> dict[bytes, bytes]:
    """The headers of an ASGI request; of repeated ones, the last."""
    return dict(scope["headers"])


def _text(headers: Mapping[bytes, bytes], name: str) -> str:
    """A header as URLs are read, in UTF-8; some clients still write the older encoding. Empty where it is missing."""
    value = headers.get(name.encode())
    if value is None:
        return ""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
