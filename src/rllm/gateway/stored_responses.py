"""`GET` and `DELETE /v1/responses/ID`: earlier answers, by their ids.

A response is rebuilt from its trace. Deleting one hides it from clients; its trace remains until the session is
deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rllm.gateway.admission import caller_of
from rllm.gateway.config import GatewayConfig
from rllm.gateway.core import ABORTED, Gateway
from rllm.gateway.dialects.responses import asked_of
from rllm.gateway.dialects.responses_output import broken_off, from_chat
from rllm.gateway.errors import GatewayError
from rllm.gateway.identity import check_one_named, session_named
from rllm.gateway.model_call import USAGE_KEY
from rllm.gateway.sessions import Sessions
from rllm.types import JSONObject, Trace

_DELETED_KEY = "rllm.deleted"
"""Trace metadata: a client deleted the response."""


def is_deleted(trace: Trace) -> bool:
    """Return whether a client deleted the response of a trace."""
    return _DELETED_KEY in trace.metadata


class StoredResponses:
    """Routes of stored responses, found in the session that the request names, or else in that of their own call."""

    def __init__(self, gateway: Gateway, sessions: Sessions, config: GatewayConfig) -> None:
        self._gateway = gateway
        self._sessions = sessions
        self._config = config

    def routes(self) -> list[Route]:
        paths = [
            f"{session}{version}/responses/{{response_id}}"
            for session in ("", "/sessions/{session_id}")
            for version in ("/v1", "/v1/v1", "")
        ]
        answers = (("GET", self._show), ("DELETE", self._delete))
        return [Route(path, self._of_trace(answer), methods=[method]) for path in paths for method, answer in answers]

    def _of_trace(self, answer: Callable[[Trace], Awaitable[JSONObject]]) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            trace = await self._found(request)
            _check_whole(request)
            return Response(orjson.dumps(await answer(trace)), media_type="application/json")

        return answered

    async def _show(self, trace: Trace) -> JSONObject:
        response = from_chat(_chat_of(trace), asked_of(trace))
        if trace.error is not None and trace.finish_reason in ("abort", "error"):
            return broken_off(response, cancelled=trace.error == ABORTED, reason=trace.error)
        return response

    async def _delete(self, trace: Trace) -> JSONObject:
        hidden = replace(trace, metadata={**trace.metadata, _DELETED_KEY: True})
        session = await self._sessions.get(trace.session_id)
        await self._gateway.writes.wait(self._gateway.store.add([hidden], session=session.ref))
        return {"id": trace.id, "object": "response", "deleted": True}

    async def _found(self, request: Request) -> Trace:
        headers = dict(request.headers.raw)
        in_path = request.path_params.get("session_id")
        caller = await caller_of(in_path, headers, self._config, self._sessions)
        response_id = request.path_params["response_id"]
        check_one_named(in_path, headers)
        session_id = session_named(in_path, headers, caller)
        session_id = session_id or self._sessions.session_of_answer(response_id)
        trace = None
        if session_id is not None and response_id.startswith("resp_"):
            trace = await asyncio.to_thread(self._gateway.store.trace, session_id, response_id)
        if trace is None or not trace.response or is_deleted(trace):
            raise GatewayError(
                404,
                f"Response with id '{response_id}' not found: this session has no such response, or it was deleted.",
                code="response_not_found",
            )
        return trace


def _check_whole(request: Request) -> None:
    """Check that no stream is requested: stored responses are whole.

    Raises:
        GatewayError: 400, if one is.
    """
    stream = request.query_params.get("stream", "")
    if stream.lower() in ("true", "1"):
        raise GatewayError(
            400, f"stream={stream}: a stored response is returned whole: retrieve it without", param="stream"
        )


def _chat_of(trace: Trace) -> JSONObject:
    """Return the chat completion of a response, as far as its trace has it."""
    logprobs = {"content": None}
    choice = {"index": 0, "message": trace.response, "finish_reason": trace.finish_reason, "logprobs": logprobs}
    counted = {"prompt_tokens": len(trace.prompt_ids), "completion_tokens": len(trace.response_ids)}
    usage = trace.metadata.get(USAGE_KEY) or counted
    created = int(trace.started_at)
    return {"id": trace.id, "created": created, "model": trace.model, "choices": [choice], "usage": usage}
