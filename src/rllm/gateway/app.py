"""The gateway as an ASGI application."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rllm.errors import RLLMError
from rllm.gateway.admin import Admin
from rllm.gateway.calls import CallEndpoint
from rllm.gateway.config import GatewayConfig
from rllm.gateway.core import Gateway
from rllm.gateway.dialects.chat import ChatDialect
from rllm.gateway.errors import GatewayError, to_gateway_error
from rllm.gateway.sessions import Sessions
from rllm.gateway.upstream.base import Upstream
from rllm.store.base import TraceStore

logger = logging.getLogger(__name__)

_CALL_PATH = re.compile(r"(?:/sessions/(?P<session_id>[^/]+))?(?:/v1)?/chat/completions")


def create_app(
    store: TraceStore, upstream: Upstream, config: GatewayConfig | None = None, *, sessions: Sessions | None = None
) -> ASGIApp:
    """All routes of a gateway. It closes the upstream at shutdown; the store stays its maker's."""
    config = config or GatewayConfig()
    sessions = sessions or Sessions(store)
    gateway = Gateway(store, upstream, require_tokens=config.require_tokens)
    chat = CallEndpoint(gateway, sessions, config, ChatDialect())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await upstream.close()

    others = Starlette(
        routes=Admin(gateway, sessions, config).routes(),
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_exception, RLLMError: _our_error, Exception: _unforeseen},
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # Model calls are nearly all the traffic and answer their own errors, so they need no router and no middleware.
        called = _CALL_PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if called is None:
            await others(scope, receive, send)
        else:
            scope["path_params"] = called.groupdict()
            await chat(scope, receive, send)

    return app


async def _http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the shape that OpenAI clients read."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _error_response(GatewayError(error.status_code, message, code=error.detail.lower().replace(" ", "_")))


async def _our_error(request: Request, error: Exception) -> Response:
    return _error_response(to_gateway_error(error))


async def _unforeseen(request: Request, error: Exception) -> Response:
    logger.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return _error_response(to_gateway_error(error))


def _error_response(error: GatewayError) -> Response:
    return Response(orjson.dumps(error.to_dict()), status_code=error.status, media_type="application/json")
