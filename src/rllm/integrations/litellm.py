"""Exact capture of calls that pass through a LiteLLM proxy in front of vLLM.

In the proxy's configuration:

    litellm_settings:
      callbacks: rllm.integrations.litellm.handler

and `RLLM_STORE` in its environment, by default `sqlite:///traces.db`. Deployments of `hosted_vllm/...` are captured,
and others with `rllm: true` in their `model_info`.

LiteLLM's own view of a stream is not exact: it omits the ids of the last token, and mixes up the ends of several
answers. Therefore the callback only redirects a call: a gateway in this process, one for each deployment, forwards it
to the deployment.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rllm.errors import needed
from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig
from rllm.gateway.identity import KEY_PREFIX, METADATA_HEADER, SESSION_HEADER
from rllm.gateway.server import ServerThread
from rllm.gateway.sessions import check_session_id, is_session_id
from rllm.gateway.upstream import HTTPUpstream
from rllm.store import TraceStore, open_store
from rllm.types import JSONMapping, JSONObject

logger = logging.getLogger(__name__)

METADATA_FIELD = "rllm_session"
"""Key of the session in a request's `metadata`, for clients that cannot send headers."""

_FORWARDED = (METADATA_HEADER, "traceparent", "tracestate")
_NOT_CAPTURED = (
    "calls of %s are not captured: only hosted_vllm/ deployments are, and those with rllm: true in model_info"
)


class Detours:
    """Gateways of this process, one for each address that LiteLLM would call."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._key = secrets.token_hex()  # Only this process may use the gateways, which hold the upstream's key.
        self._servers: dict[tuple[str, str | None], ServerThread] = {}
        self._starting = asyncio.Lock()
        self._warned: set[str] = set()

    async def redirect(self, call: JSONObject) -> JSONObject:
        """Redirect the keyword arguments of a LiteLLM call through a gateway, in its session.

        Raises:
            ConfigError: if the deployment's address is not a web address, or cannot contain the session's name.
        """
        if call.get("api_key") == self._key:  # LiteLLM invokes the callback twice for a call that it translates.
            return call
        model = str(call.get("model"))
        is_chosen = (call.get("model_info") or {}).get("rllm") is True or model.startswith("hosted_vllm/")
        if not call.get("api_base") or not is_chosen:
            if model not in self._warned:
                self._warned.add(model)
                logger.warning(_NOT_CAPTURED, model)
            return call
        server = await self._server(str(call["api_base"]), call.get("api_key"))
        headers = headers_of(call)
        session_id = session_of(call, headers)
        if session_id is not None:
            check_session_id(session_id)
        path = f"/sessions/{quote(session_id, safe='')}/v1" if session_id else "/v1"
        forwarded = {name: headers[name] for name in _FORWARDED if name in headers}
        extra_headers = {**(call.get("extra_headers") or {}), **forwarded}
        return {**call, "api_base": server.url + path, "api_key": self._key, "extra_headers": extra_headers}

    async def _server(self, api_base: str, api_key: str | None) -> ServerThread:
        async with self._starting:
            server = self._servers.get((api_base, api_key))
            if server is None:
                app = create_app(self._store, HTTPUpstream(api_base, api_key=api_key), GatewayConfig(api_key=self._key))
                server = await asyncio.to_thread(ServerThread(app, shutdown_timeout_s=1.0).start)
                self._servers[api_base, api_key] = server
            return server

    def close(self) -> None:
        """Wait for calls in flight, and close the store."""
        for server in self._servers.values():
            server.stop()
        self._store.close()


def headers_of(call: JSONMapping) -> dict[str, str]:
    """Return the headers of the proxy's client by lower-case name, those with secrets included."""
    shown = (call.get("proxy_server_request") or {}).get("headers") or {}
    secret = (call.get("secret_fields") or {}).get("raw_headers") or {}
    return {name.lower(): value for name, value in {**shown, **secret}.items()}


def session_of(call: JSONMapping, headers: Mapping[str, str]) -> str | None:
    """Return the session that a request names in a header, metadata or the API key, or as LiteLLM's own session."""
    metadata = {**(call.get("litellm_metadata") or {}), **(call.get("metadata") or {})}
    named = headers.get(SESSION_HEADER) or metadata.get(METADATA_FIELD)
    if named:
        return str(named)
    of_litellm = call.get("litellm_session_id") or metadata.get("session_id")
    if isinstance(of_litellm, str) and is_session_id(of_litellm):  # a call is answered in any case
        return of_litellm
    key = headers.get("authorization", "").rpartition(" ")[2].rpartition(":")[2]
    return key.removeprefix(KEY_PREFIX) or None if key.startswith(KEY_PREFIX) else None


def callback(store: TraceStore) -> Any:
    """Return a callback for `litellm.callbacks` that stores traces; it closes the store when the process ends.

    Raises:
        MissingDependencyError: if LiteLLM is not installed.
    """
    with needed("litellm", "litellm", "capturing what passes through LiteLLM"):
        from litellm.integrations.custom_logger import CustomLogger  # type: ignore[import-not-found]
    detours = Detours(store)
    atexit.register(detours.close)

    class CaptureCallback(CustomLogger):  # type: ignore[misc]
        """Callback class; LiteLLM inspects the class itself for methods, so they cannot be inherited."""

        async def async_pre_call_deployment_hook(self, kwargs: JSONObject, call_type: object) -> JSONObject:
            return await detours.redirect(kwargs)

    return CaptureCallback()


@functools.cache
def _handler() -> Any:
    return callback(open_store(os.environ.get("RLLM_STORE", "sqlite:///traces.db")))


def __getattr__(name: str) -> Any:
    if name == "handler":  # made on first access, because it opens the store
        return _handler()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
