"""The routes by which an operator, such as a trainer, changes the upstreams of a running gateway. No agent's key opens them."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rllm.gateway.config import GatewayConfig
from rllm.gateway.dialects.base import members_of
from rllm.gateway.errors import GatewayError
from rllm.gateway.identity import authorization_of
from rllm.gateway.upstream.pool import UpstreamPool
from rllm.gateway.web_pages import check_no_page_asks

_MAX_DRAIN_S = 3600.0
_MAX_VERSION = 2**53
"""What every store and every JSON parser holds exactly."""


class Operator:
    """`GET /upstreams`, and what changes them: `POST`, `DELETE /upstreams/ID`, and `POST /upstreams/pause|resume|version`."""

    def __init__(self, pool: UpstreamPool, config: GatewayConfig) -> None:
        self._replicas = pool.replicas
        self._key = config.admin_key or config.api_key

    def routes(self) -> list[Route]:
        return [
            self._route("/upstreams", self._show, "GET"),
            self._route("/upstreams", self._add, "POST"),
            self._route("/upstreams/{replica_id:int}", self._remove, "DELETE"),
            self._route("/upstreams/pause", self._pause, "POST"),
            self._route("/upstreams/resume", self._resume, "POST"),
            self._route("/upstreams/version", self._publish, "POST"),
        ]

    def _route(self, path: str, answer: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        async def authorized(request: Request) -> Response:
            self._authorize(request)
            return await answer(request)

        return Route(path, authorized, methods=[method])

    def _authorize(self, request: Request) -> None:
        """Let only the bare key pass: one that names a session (`KEY:rllm-SESSION`) is an agent's."""
        if self._key is None:
            if request.method == "GET":
                check_no_page_asks(dict(request.headers.raw))
                return
            raise GatewayError(
                403,
                "this gateway has no key, so anybody could send its calls elsewhere: start it with --admin-key KEY "
                "(RLLM_GATEWAY_ADMIN_KEY) or --api-key KEY, and present that key",
                type="permission_error",
                code="key_required",
            )
        scheme, _, presented = authorization_of(dict(request.headers.raw)).partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(presented.strip().encode(), self._key.encode()):
            raise GatewayError(
                401,
                "the upstreams are the operator's: send 'Authorization: Bearer KEY' with the gateway's admin key, or with its "
                "API key if it has no other",
                type="authentication_error",
                code="invalid_api_key",
            )

    async def _show(self, request: Request) -> Response:
        return self._state()

    async def _add(self, request: Request) -> Response:
        wanted = await members_of(request, url=str)
        if "url" not in wanted:
            raise GatewayError(400, "'url' is missing: send {url}, the base URL of an inference server", param="url")
        return self._state(201, added=self._replicas.add(wanted["url"]).id)

    async def _remove(self, request: Request) -> Response:
        return self._state(removed=self._replicas.remove(request.path_params["replica_id"]).id)

    async def _pause(self, request: Request) -> Response:
        """Hold new calls, and wait for those under way for as long as `drain_s` says."""
        wanted = await members_of(request, id=int, drain_s=(int, float))
        replica_id = wanted.get("id")
        drain_s = wanted.get("drain_s", 0.0)
        if not 0 <= drain_s <= _MAX_DRAIN_S:
            raise GatewayError(400, f"drain_s={drain_s}: use 0 to {_MAX_DRAIN_S:g} seconds", param="drain_s")
        self._replicas.pause(replica_id)
        return self._state(drained=not await self._replicas.drain(drain_s, replica_id))

    async def _resume(self, request: Request) -> Response:
        """Let calls go again, with new weights if `version` says so."""
        wanted = await members_of(request, id=int, version=int)
        replica_id = wanted.get("id")
        if "version" in wanted:
            _check_version(wanted["version"])
            self._replicas.publish(wanted["version"], replica_id)
        self._replicas.resume(replica_id)
        return self._state()

    async def _publish(self, request: Request) -> Response:
        wanted = await members_of(request, id=int, version=int)
        if "version" not in wanted:
            raise GatewayError(400, "'version' is missing: send {version}, the number of the weights", param="version")
        _check_version(wanted["version"])
        self._replicas.publish(wanted["version"], wanted.get("id"))
        return self._state()

    def _state(self, status: int = 200, **more: Any) -> Response:
        body = orjson.dumps({**more, **self._replicas.to_dict()})
        return Response(body, status_code=status, media_type="application/json")


def _check_version(version: int) -> None:
    if not 0 <= version <= _MAX_VERSION:
        raise GatewayError(400, f"version={version}: use 0 to {_MAX_VERSION}", param="version")
