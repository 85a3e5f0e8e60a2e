"""ASGI application of the gateway."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from rllm import telemetry
from rllm.errors import RLLMError, SessionDeletedError, StoreError
from rllm.gateway.admin import DIALECT, Admin
from rllm.gateway.calls import CallEndpoint
from rllm.gateway.config import GatewayConfig
from rllm.gateway.core import Gateway
from rllm.gateway.dialects import DIALECTS, dialect_of, find_call
from rllm.gateway.errors import GatewayError, to_gateway_error
from rllm.gateway.http_limits import BodyBudget, ClientDisconnected
from rllm.gateway.identity import with_key_header
from rllm.gateway.sessions import Sessions
from rllm.gateway.upstream.base import Upstream
from rllm.store.base import TraceStore

logger = logging.getLogger(__name__)


def create_app(
    store: TraceStore, upstream: Upstream, config: GatewayConfig | None = None, *, sessions: Sessions | None = None
) -> ASGIApp:
    """Return the application with all routes of a gateway. It closes the upstream at shutdown, but not the store.

    `GatewayServer` and `serve` cancel calls whose clients have left; under another server, these run to their end.
    """
    config = config or GatewayConfig()
    sessions = sessions or Sessions(store, memory_gb=config.session_memory_gb)
    if config.otel:
        telemetry.enable(response_ids=config.otel_response_ids)
    gateway = Gateway(
        store,
        upstream,
        require_tokens=config.require_tokens,
        exact_turns=config.exact_turns,
        keeps_traces=config.otel,
    )
    budget = BodyBudget(config)
    endpoint = partial(CallEndpoint, gateway, sessions, config, budget)
    calls = {
        template: endpoint(dialect, counts=template in dialect.wire.counts)
        for dialect in DIALECTS
        for template in (*dialect.wire.calls, *dialect.wire.counts)
    }

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await upstream.close()

    others = Starlette(
        routes=Admin(gateway, sessions, config, budget).routes(),
        lifespan=lifespan,
        exception_handlers={
            HTTPException: _http_exception,
            RLLMError: _our_error,
            ClientDisconnected: _disconnected,
            Exception: _unexpected,
        },
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # Model calls are nearly all the traffic and answer their own errors, so they need no router and no middleware.
        called = find_call(scope["path"]) if scope["type"] == "http" else None
        if scope.get("method") == "HEAD":
            await _present(scope, receive, send)
        elif called is not None:
            scope["path_params"] = {
                **called.parameters,
                "session_id": called.session_id,
                "query": scope["query_string"].decode("latin-1"),
            }
            scope["headers"] = with_key_header(scope, called.dialect.wire)
            await calls[called.template](scope, receive, send)
        elif scope["type"] == "http":
            dialect = scope[DIALECT] = dialect_of(scope["path"], dict(scope["headers"]))
            scope["headers"] = with_key_header(scope, dialect.wire)
            try:
                await others(scope, receive, send)
            finally:
                budget.release(scope)
        else:
            await others(scope, receive, send)

    return app


_present = Response()
"""Answer to `HEAD` for any path, with which some clients check that the server is running."""


async def _http_exception(request: Request, error: Exception) -> Response:
    """Answer requests for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = error.detail.lower().replace(" ", "_")
    allow = None
    if error.status_code == 405:  # Each method of a path may be a route of its own.
        found = (route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL)
        allow = ", ".join(sorted({method for route in found for method in route.methods}))
    return _error_response(request, GatewayError(error.status_code, message, code=code, allow=allow))


async def _our_error(request: Request, error: Exception) -> Response:
    if isinstance(error, StoreError) and not isinstance(error, SessionDeletedError):
        # The message of `to_gateway_error` is about a call.
        error = GatewayError(500, f"the store failed: {error}", code="store_failed")
    return _error_response(request, to_gateway_error(error))


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    logger.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return _error_response(request, to_gateway_error(error))


def _error_response(request: Request, error: GatewayError) -> Response:
    """Return an error in the client's dialect."""
    body = request.scope[DIALECT].render_error(error)
    return Response(body, status_code=error.status, headers=error.headers(), media_type="application/json")
