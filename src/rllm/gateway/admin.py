"""Routes other than model calls: sessions and their traces, models, health, metrics, upstreams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rllm._runtime.untrusted import LARGE
from rllm.capture.wire_formats import WIRE_FORMATS
from rllm.errors import RLLMError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.core import Gateway
from rllm.gateway.dialects.base import invalid, names_of, parse_object
from rllm.gateway.errors import GatewayError
from rllm.gateway.http_limits import BodyBudget, read_body
from rllm.gateway.identity import caller_of, key_holder, session_key
from rllm.gateway.sessions import SAMPLING_KEY, TRACE_CONTEXT_KEY, Sessions, new_session_id
from rllm.gateway.upstream.pool import UpstreamPool
from rllm.store.base import SessionInfo
from rllm.types import REWARD_KEY, JSONObject

_MAX_PAGE = 1000
# Every store and every JSON parser holds it exactly.
_MAX_VERSION = 2**53
_CHANGES = ("pause", "resume", "version")
"""Changes of the upstreams; a request may give the version of their weights, and `version` requires it."""
DIALECT = "rllm.dialect"
"""Key of a request's dialect in its ASGI scope."""


_Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class Admin:
    """Routes that operate on a gateway rather than call a model."""

    def __init__(self, gateway: Gateway, sessions: Sessions, config: GatewayConfig, budget: BodyBudget) -> None:
        self._gateway = gateway
        self._store = gateway.store
        self._sessions = sessions
        self._config = config
        self._budget = budget
        self._pool = gateway.upstream if isinstance(gateway.upstream, UpstreamPool) else None

    def routes(self) -> list[Route]:
        # Some clients add a version of their own to a base URL that ends with one.
        versions = dict.fromkeys(row.version for row in WIRE_FORMATS)
        lists = "/models", *(f"{base}/{version}/models" for version in versions for base in ("", "/v1"))
        models = [
            self._route(f"{prefix}{path}{end}", answer, of_model=True)
            for prefix in ("", "/sessions/{session_id}")
            for path in lists
            for end, answer in (("", self._models), ("/{model_id:path}", self._model))
        ]
        upstreams = [
            self._route("/upstreams", self._show_upstreams, "GET"),
            *(self._route(f"/upstreams/{name}", self._change_upstreams, "POST") for name in _CHANGES),
        ]
        return [
            *models,
            *(upstreams if self._pool is not None else ()),
            self._route("/sessions", self._create_session, "POST"),
            self._route("/sessions", self._list_sessions, "GET"),
            self._route("/sessions/{session_id}", self._show_session, "GET"),
            self._route("/sessions/{session_id}", self._delete_session, "DELETE"),
            self._route("/sessions/{session_id}/reward", self._reward_session, "POST"),
            self._route("/sessions/{session_id}/traces", self._list_traces, "GET"),
            self._route("/metrics", self._metrics, "GET"),
            Route("/healthz", self._healthz, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
        ]

    def _route(self, path: str, answer: _Endpoint, method: str = "GET", *, of_model: bool = False) -> Route:
        """Return a route for the gateway's key; a session's key may read its session, and any caller the models."""

        async def authorized(request: Request) -> Response:
            in_path, headers = request.path_params.get("session_id"), dict(request.headers.raw)
            if of_model:
                caller = await caller_of(in_path, headers, self._config, self._sessions)
            else:
                caller = await key_holder(headers, self._config, self._sessions)
            if in_path is not None and method == "GET":
                caller.check(in_path)
            elif not of_model:
                caller.check_operator()
            return await answer(request)

        return Route(path, authorized, methods=[method])

    async def _models(self, request: Request) -> Response:
        models = await self._gateway.upstream.models()
        return Response(request.scope[DIALECT].render_models(models), media_type="application/json")

    async def _model(self, request: Request) -> Response:
        wanted = request.path_params["model_id"]
        for model in await self._gateway.upstream.models():
            if model.get("id") == wanted:
                return Response(request.scope[DIALECT].render_model(model), media_type="application/json")
        raise GatewayError(404, f"the upstream has no model {wanted!r}", code="model_not_found", param="model")

    async def _create_session(self, request: Request) -> Response:
        wanted = await self._members_of(request, id=str, metadata=dict, sampling=dict)
        session_id = wanted.get("id") or new_session_id()
        write = await asyncio.to_thread(
            self._sessions.open, session_id, metadata=wanted.get("metadata"), sampling=wanted.get("sampling")
        )
        await self._gateway.writes.wait(write)  # the first call may come to another gateway
        base_url = f"{str(request.base_url).rstrip('/')}/sessions/{quote(session_id, safe='')}/v1"
        created = {"id": session_id, "base_url": base_url}
        if self._config.api_key is not None:
            number = await self._sessions.number_of(session_id)
            if number is None:
                raise GatewayError(
                    410, f"the session {session_id!r} was deleted during this request", code="session_deleted"
                )
            created["api_key"] = session_key(self._config.api_key, session_id, number)
        return _json(created)

    async def _list_sessions(self, request: Request) -> Response:
        limit = min(_whole_number(request, "limit", 100), _MAX_PAGE)
        offset = _whole_number(request, "offset", 0)
        found = await asyncio.to_thread(self._store.sessions, limit=limit, offset=offset)
        return _json({"sessions": [_session_to_dict(info) for info in found]})

    async def _show_session(self, request: Request) -> Response:
        return _json(_session_to_dict(await self._known_session(request)))

    async def _delete_session(self, request: Request) -> Response:
        info = await self._known_session(request)
        deleted = await self._sessions.delete(info.id)
        return _json({"id": info.id, "deleted": True, "num_traces": deleted})

    async def _reward_session(self, request: Request) -> Response:
        """Set the reward of a session, for training; only the operator may, since agents must not reward themselves."""
        info = await self._known_session(request)
        reward = (await self._members_of(request, reward=(int, float))).get("reward")
        if reward is None:
            raise GatewayError(400, "'reward' is missing: send {reward}, a number", param="reward")
        metadata = {REWARD_KEY: float(reward)}
        write = await asyncio.to_thread(self._sessions.open, info.id, metadata=metadata, sampling=None)
        await self._gateway.writes.wait(write)
        return _json({"id": info.id, **metadata})

    async def _list_traces(self, request: Request) -> Response:
        info = await self._known_session(request)
        stored = await asyncio.to_thread(self._store.by_session, info.id)
        # Concurrent calls are stored as they end; the order in which they began is the call order.
        traces = sorted(stored, key=lambda trace: trace.started_at)
        return _json({"traces": [trace.to_dict() for trace in traces]})

    async def _members_of(self, request: Request, **kinds: type | tuple[type, ...]) -> JSONObject:
        """Return the members of a body's JSON object without those that are `null`; an empty body has none.

        Args:
            request: the request.
            kinds: the types of all possible members.

        Raises:
            GatewayError: 400, if it is not an object, or has another member, or one of another type.
        """
        body = await read_body(request.scope, request.receive, self._config, self._budget) or b"{}"
        parse = partial(parse_object, body, needs=", ".join(kinds))
        # In a thread if it is large: all other requests would wait meanwhile.
        given = parse() if len(body) < LARGE else await asyncio.to_thread(parse)
        for name, value in given.items():
            if name not in kinds:
                raise invalid(f"{name!r} is not a field of this request: use {', '.join(kinds)}", name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds[name])):
                raise invalid(f"{name}={repr(value)[:80]}: expected {names_of(kinds[name])}", name)
        return {name: value for name, value in given.items() if value is not None}

    async def _known_session(self, request: Request) -> SessionInfo:
        session_id = request.path_params["session_id"]
        info = await asyncio.to_thread(self._store.session, session_id)
        if info is None:
            raise GatewayError(
                404,
                f"there is no session {session_id!r}: a session begins with its first model call or with POST "
                "/sessions",
                code="session_not_found",
            )
        return info

    async def _show_upstreams(self, request: Request) -> Response:
        assert self._pool is not None
        return _json(self._pool.to_dict())

    async def _change_upstreams(self, request: Request) -> Response:
        """Pause or resume calls, or record the version of new weights, for a trainer that updates the servers."""
        assert self._pool is not None
        if self._config.api_key is None:
            raise GatewayError(
                403,
                "this gateway has no key, so anyone could pause its calls: start it with --api-key KEY "
                "(RLLM_GATEWAY_API_KEY), and present that key",
                type="permission_error",
                code="key_required",
            )
        action = request.url.path.rpartition("/")[2]
        version = (await self._members_of(request, version=int)).get("version")
        if action == "version" and version is None:
            raise GatewayError(400, "'version' is missing: send {version}, the weights' number", param="version")
        if version is not None:
            if not 0 <= version <= _MAX_VERSION:
                raise GatewayError(400, f"version={version}: use 0 to {_MAX_VERSION}", param="version")
            self._pool.publish(version)
        if action == "pause":
            self._pool.pause()
        elif action == "resume":
            self._pool.resume()
        return await self._show_upstreams(request)

    async def _metrics(self, request: Request) -> Response:
        text = self._gateway.metrics.render(store_pending=self._gateway.writes.pending)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _healthz(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _readyz(self, request: Request) -> Response:
        """Report whether a call would be answered and stored now, by asking the upstream and the store.

        Only an operator reads the reasons, since they name addresses.
        """
        problems = {}
        for name, check in (("upstream", self._gateway.upstream.check), ("store", self._check_store)):
            try:
                await asyncio.wait_for(check(), timeout=self._config.ready_timeout_s)
            except TimeoutError:
                problems[name] = f"no answer within {self._config.ready_timeout_s:g} s"
            except RLLMError as error:
                problems[name] = str(error)
        try:
            (await key_holder(dict(request.headers.raw), self._config, self._sessions)).check_operator()
        except RLLMError:
            problems = dict.fromkeys(problems, "not ready: present the gateway's key to read why")
        return _json({"ready": not problems, "problems": problems}, status=503 if problems else 200)

    async def _check_store(self) -> None:
        await asyncio.to_thread(self._store.sessions, limit=1)


def _session_to_dict(info: SessionInfo) -> JSONObject:
    metadata = {name: value for name, value in info.metadata.items() if name not in (SAMPLING_KEY, TRACE_CONTEXT_KEY)}
    sampling = info.metadata.get(SAMPLING_KEY) or {}
    return {
        "id": info.id,
        "created_at": info.created_at,
        "num_traces": info.num_traces,
        "metadata": metadata,
        "sampling": sampling,
    }


def _whole_number(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) <= 18):  # More would be too large for a database.
        raise GatewayError(400, f"{name}={given!r}: use a whole number, 0 or above", param=name)
    return int(given)


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")
