"""Whose call this is, read from the URL path, the headers and the API key, in this order."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from rllm.gateway.errors import GatewayError

SESSION_HEADER = "x-rllm-session"
METADATA_HEADER = "x-rllm-metadata"
KEY_PREFIX = "rllm-"
"""An API key of the form `rllm-SESSION` names the session: the one channel that every client has besides the URL."""


def authorize(authorization: str, api_key: str | None) -> str | None:
    """Check the `Authorization` header; returns the session that its key names, if it names one.

    Raises:
        GatewayError: 401, if the gateway has a key and this is not it.
    """
    scheme, _, presented = authorization.partition(" ")
    presented = presented.strip() if scheme.lower() == "bearer" else ""
    if api_key is not None:
        key, _, presented = presented.partition(":") if ":" not in api_key else (presented, "", "")
        if not secrets.compare_digest(key.encode(), api_key.encode()):
            raise GatewayError(
                401,
                "this gateway needs its API key: send 'Authorization: Bearer KEY', or 'Bearer KEY:rllm-SESSION'",
                type="authentication_error",
                code="invalid_api_key",
            )
    return presented.removeprefix(KEY_PREFIX) or None if presented.startswith(KEY_PREFIX) else None


def authorization_of(headers: Mapping[bytes, bytes]) -> str:
    """The `Authorization` header; Anthropic's clients may send their key as `x-api-key` instead."""
    authorization, key = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
    return (authorization or (b"Bearer " + key if key else b"")).decode("latin-1")


def session_named(path: str | None, header: str | None, key: str | None) -> str | None:
    """The session that a request names, or `None`: then it gets a fresh one.

    Raises:
        GatewayError: 400, if path and header name different sessions. A key is often shared, so the others overrule it.
    """
    if path and header and path != header:
        raise GatewayError(
            400,
            f"the URL names the session {path!r} and the header {SESSION_HEADER} names {header!r}: send one of them",
            code="conflicting_session",
        )
    return path or header or key


def metadata_of(header: str | None) -> dict[str, Any]:
    """The call's metadata: the header's value, a percent-encoded JSON object.

    Raises:
        GatewayError: 400, if it is anything else.
    """
    if not header:
        return {}
    try:
        metadata = orjson.loads(unquote_to_bytes(header))
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise GatewayError(
            400, f"header {METADATA_HEADER}={header[:80]!r}: use a percent-encoded JSON object", code="invalid_metadata"
        )
    return metadata


def headers_of(scope: Mapping[str, Any]) -> dict[bytes, bytes]:
    """The headers of an ASGI request; of repeated ones, the last."""
    return dict(scope["headers"])
